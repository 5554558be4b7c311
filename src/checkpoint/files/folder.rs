//! The files of a source while its kind is found out and its weight files are chosen, and after they are pinned.
//!
//! A dialect sees files in two steps. At first a [`Folder`]: all files by path and length, with the texts that decide what the
//! weight files are ([`Folder::read`]). The dialect gives each file its role. Then all readable files are pinned in one
//! source, and the dialect reads from [`PinnedFiles`], by ids. It opens nothing itself, so that it works over any listing and
//! any source.

use std::sync::Arc;

use ckfs_source::{
    FileId, Opened, RootDir, Source, SourceError, WaitRegistry, check_open_file_limit, permission::DirectoryRules,
    remote::RemoteTree,
};

use super::super::{
    file::{FileRole, IgnoreReason},
    foreign,
    json::read_json,
    listing::{self, Listed, Listing, leave_out_links, warn_of_weights},
    locate::Located,
    options::OpenOptions,
    problem::{CheckpointError, Problems},
    weight_name::natural,
};

/// A directory whose files are listed and not yet pinned.
pub(crate) struct Folder {
    pub(crate) located: Located,
    /// `None` of a remote repository: its files belong to the cache.
    root: Option<Arc<RootDir>>,
    /// All files, sorted by path.
    pub(crate) files: Vec<Listed>,
    pub(crate) directories: Vec<(String, DirectoryRules)>,
    pub(crate) warnings: Vec<String>,
    pub(crate) problems: Problems,
    /// The variant of the weights that is requested.
    pub(crate) variant: Option<String>,
    fetches: Arc<WaitRegistry>,
    follow_symlinks: bool,
}

/// The directory of a local source.
pub(crate) fn open_root(located: &Located, options: &OpenOptions) -> Result<Arc<RootDir>, CheckpointError> {
    let path = &located.path;
    let _opening = options.fetches.begin_path(path, "open");
    let root = RootDir::open(path).map_err(|error| CheckpointError::Listing { root: path.clone(), error })?;
    if located.revision.is_some() && !root.is_in_hub_cache() && !options.follow_symlinks {
        return Err(CheckpointError::Refused(format!(
            "{}: a symbolic link out of the repository's directory in the cache; give the directory that it leads to, or \
             --follow-symlinks",
            path.display()
        )));
    }
    Ok(Arc::new(root))
}

/// The text of a small file, or the reason why it is not available.
pub(crate) type Text = Result<Vec<u8>, String>;

impl Folder {
    /// Lists a directory. Links out of it are left out, except to weights, as `is_weights` knows them.
    pub(crate) fn open(
        located: Located,
        options: &OpenOptions,
        is_weights: impl Fn(&str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let root = open_root(&located, options)?;
        let Listing { mut files, directories } = listing::list(&root, &options.fetches)
            .map_err(|error| CheckpointError::Listing { root: located.path.clone(), error })?;
        let mut warnings = Vec::new();
        if !options.follow_symlinks {
            leave_out_links(&mut files, &mut warnings, |file| !is_weights(&file.path));
        }
        Ok(Self { warnings, ..Self::of(located, Some(root), Listing { files, directories }, options) })
    }

    /// These files. `root` is that of a directory of this machine.
    pub(crate) fn of(located: Located, root: Option<Arc<RootDir>>, listing: Listing, options: &OpenOptions) -> Self {
        let Listing { files, directories } = listing;
        Self {
            located,
            root,
            files,
            directories,
            warnings: Vec::new(),
            problems: Problems::accepting(options),
            variant: options.variant.clone(),
            fetches: Arc::clone(&options.fetches),
            follow_symlinks: options.follow_symlinks,
        }
    }

    /// Whether there is a file of this path that can be read.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.files.iter().any(|file| file.path == path && file.role.is_readable())
    }

    /// The content of a small file; `None` if it is not there.
    pub(crate) fn read(&mut self, path: &str) -> Result<Option<Text>, SourceError> {
        let listed = self.files.iter_mut().find(|file| file.path == path && file.role == FileRole::Other);
        let Some(listed) = listed else { return Ok(None) };
        let text = listed.open(self.root.as_ref(), &self.fetches)?.map(|opened| read_json(opened, &self.fetches));
        Ok(text.map(|text| match foreign::lfs_pointer(text.as_deref().unwrap_or_default(), self.root.is_none()) {
            Some(found) => Err(found.to_owned()),
            None => text,
        }))
    }

    /// Leaves out pointers of git LFS among the files beside the weights: hf/ would serve them in place of a tokenizer.
    pub(crate) fn leave_out_pointers(&mut self) -> Result<(), CheckpointError> {
        let is_remote = self.root.is_none();
        let is_short = |file: &&mut Listed| file.role == FileRole::Other && file.size_bytes <= foreign::LFS_BYTES_MAX;
        for file in self.files.iter_mut().filter(is_short) {
            let Some(opened) = file.open(self.root.as_ref(), &self.fetches)? else { continue };
            let Ok(text) = read_json(opened, &self.fetches) else { continue };
            if let Some(found) = foreign::lfs_pointer(&text, is_remote) {
                self.warnings.push(format!("{:?}: left out: {found}", file.path));
                file.role = FileRole::Ignored(IgnoreReason::LfsPointer);
                file.opened = None;
            }
        }
        Ok(())
    }

    /// Makes every file for which `is_weights` is true a weight file.
    pub(crate) fn choose(&mut self, is_weights: impl Fn(&str) -> bool) {
        self.give_role(&FileRole::Weights, is_weights);
    }

    /// Gives this role to every file that has none yet and for which `is_of_role` is true.
    pub(crate) fn give_role(&mut self, role: &FileRole, is_of_role: impl Fn(&str) -> bool) {
        for file in self.files.iter_mut().filter(|file| file.role == FileRole::Other && is_of_role(&file.path)) {
            file.role = role.clone();
        }
    }

    /// Opens all readable files, `more` of others being open: the weight files in natural order, then the others. These are
    /// the order of their ids.
    pub(crate) fn open_files(&mut self, more: usize) -> Result<(Vec<usize>, Vec<Opened>), CheckpointError> {
        if !self.follow_symlinks {
            leave_out_links(&mut self.files, &mut self.warnings, |file| file.role != FileRole::Weights);
            let linked = self.files.iter().filter_map(|file| Some(warn_of_weights(&file.path, file.outside()?)));
            let linked: Vec<String> = linked.collect();
            self.warnings.extend(linked);
        }
        let files = &mut self.files;
        let mut weights: Vec<usize> =
            (0..files.len()).filter(|place| files[*place].role == FileRole::Weights).collect();
        weights.sort_by(|left, right| natural(&files[*left].path, &files[*right].path));
        let others: Vec<usize> = (0..files.len())
            .filter(|place| files[*place].role != FileRole::Weights && files[*place].role.is_readable())
            .collect();
        let each = if self.root.is_some() { 1 } else { RemoteTree::DESCRIPTORS };
        check_open_file_limit(each * (weights.len() + others.len()) + more)?;
        let mut opened = Vec::with_capacity(weights.len() + others.len());
        for place in weights.iter().chain(&others) {
            files[*place].open(self.root.as_ref(), &self.fetches)?;
            opened.extend(files[*place].opened.take());
        }
        Ok((weights, opened))
    }
}

/// The files of a checkpoint, pinned in a source.
#[derive(Clone, Copy)]
pub(crate) struct PinnedFiles<'a> {
    /// All files, sorted by path.
    pub(crate) files: &'a [Listed],
    /// Indices of the weight files in `files`, in the order of their ids, which count from 0.
    pub(crate) weights: &'a [usize],
    /// Where their bytes come from.
    pub(crate) source: &'a dyn Source,
}

impl<'a> PinnedFiles<'a> {
    /// Ids of the weight files.
    pub(crate) fn ids(&self) -> impl ExactSizeIterator<Item = FileId> + use<> {
        (0..self.weights.len()).map(FileId::at)
    }

    /// Path of a weight file.
    pub(crate) fn path(&self, id: FileId) -> &'a str {
        &self.files[self.weights[id.index()]].path
    }

    /// All readable files with their ids, by path: weight files and others.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'a str, FileId)> {
        let mut by_place: Vec<Option<FileId>> = vec![None; self.files.len()];
        for (place, id) in self.weights.iter().zip(self.ids()) {
            by_place[*place] = Some(id);
        }
        let mut next = self.ids().len();
        for (place, listed) in self.files.iter().enumerate() {
            if by_place[place].is_none() && listed.role.is_readable() {
                by_place[place] = Some(FileId::at(next));
                next += 1;
            }
        }
        self.files.iter().zip(by_place).filter_map(|(listed, id)| Some((listed.path.as_str(), id?)))
    }

    /// The file of this path.
    pub(crate) fn find(&self, path: &str) -> Option<FileId> {
        self.all().find(|(found, _)| *found == path).map(|(_, id)| id)
    }
}
