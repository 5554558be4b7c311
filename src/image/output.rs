//! The interface between output formats and the file system: directories, files, and subtrees computed by arithmetic.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use ckfs_plan::{Plan, Problem};
use ckfs_source::FileId;
use ckfs_tensor::View;

use super::{
    file_image::{FileImage, ImageError},
    generated_records::{GeneratedFile, GeneratedRecords},
    input::FormatInput,
};

/// Name of the directory about the mount itself.
pub const OWN: &str = ".ckfs";

/// Files about this host and its settings, not about the checkpoint: those of [`OWN`], and Orbax's record of when it was made.
pub const OF_THE_HOST: [&str; 2] = [OWN, "_CHECKPOINT_METADATA"];

/// An output format: the names and the wrapping of a view's tensors.
pub struct OutputFormat {
    /// Its name in messages, which is that of its directory where it has one.
    pub name: &'static str,
    /// The part of a plan's view that the format cannot show; `None` if it shows all.
    pub unavailable: fn(&Plan) -> Option<OmittedFormat>,
    /// The directories and files of a view, relative to the view's own directory; or every problem that prevents the mount of the
    /// view.
    pub layout: fn(&Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>>,
}

/// A format's directories and files for a view, and the omitted part with its reason.
pub type FormatFiles = (Directory, Option<OmittedFormat>);

/// The part of a view that a format omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omission {
    /// Its directory is missing.
    Absent,
    /// Its directory holds only a file with the reason.
    Empty,
    /// A part of the files.
    Part,
}

/// A format that cannot show a view completely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OmittedFormat {
    /// The format, which is the directory's name.
    pub format: &'static str,
    /// The omitted part.
    pub omission: Omission,
    /// The reason.
    pub reason: String,
}

/// Contents of a file.
#[derive(Clone)]
pub enum FileContent {
    /// A source file, unchanged, and its length in bytes.
    Original(FileId, u64),
    /// Literal bytes.
    Bytes(Arc<[u8]>),
    /// Records that are generated as they are read.
    Generated(Arc<GeneratedFile>),
    /// Tensors.
    Image(FileImage),
}

impl FileContent {
    /// These records.
    pub(super) fn generated(rows: Arc<dyn GeneratedRecords>) -> Self {
        Self::Generated(Arc::new(GeneratedFile::new(rows)))
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Original(_, len_bytes) => *len_bytes,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Generated(records) => records.len_bytes(),
            Self::Image(image) => image.len_bytes(),
        }
    }
}

/// The sources of a file: users that may read all of them may read the file.
#[derive(Clone, Debug)]
pub enum DerivedFrom {
    /// One tensor of the view, by number.
    Tensor(u32),
    /// All tensors of the view, or their names and shapes.
    Tensors,
    /// A part of the repository.
    Repository {
        /// A source file.
        file: Option<FileId>,
        /// Views whose sources are read.
        views: Vec<View>,
        /// Whether it shows names of all tensors of the repository.
        all_tensors: bool,
    },
    /// All source files.
    Everything,
}

/// A file that a format shows. It does not change after mount.
pub trait VirtualFile: Send + Sync {
    /// Length in bytes.
    fn len_bytes(&self) -> u64;

    /// Lays the file out; [`VirtualFile::open`] calls it.
    ///
    /// # Errors
    /// [`ImageError`], which planning has excluded.
    fn content(&self) -> Result<FileContent, ImageError>;

    /// The sources of the file.
    fn derived_from(&self) -> DerivedFrom {
        DerivedFrom::Tensors
    }

    /// Whether the file holds all tensors of a device, and readers read it as a whole.
    fn is_bundle(&self) -> bool {
        false
    }

    /// Whether readers read the file item by item, each once: small parts of an item's directory, then its bytes.
    fn is_read_by_items(&self) -> bool {
        false
    }

    /// Whether one program reads the file, or each of its items: its first reader needs no copy of it in memory.
    fn is_read_once(&self) -> bool {
        false
    }

    /// The contents of the file, with the expected length.
    ///
    /// # Errors
    /// As [`VirtualFile::content`], and if the layout has another length.
    fn open(&self) -> Result<FileContent, ImageError> {
        let (content, expected) = (self.content()?, self.len_bytes());
        let found = content.len_bytes();
        if found != expected {
            return Err(ImageError(format!("the file was laid out with {found} bytes, expected {expected}")));
        }
        Ok(content)
    }
}

/// A file that is made when its length is first requested.
pub struct LazyFile<F> {
    content: OnceLock<FileContent>,
    make: F,
    derived_from: DerivedFrom,
}

impl<F: Fn() -> FileContent> LazyFile<F> {
    /// A file of what `make` returns.
    pub fn new(make: F, derived_from: DerivedFrom) -> Self {
        Self { content: OnceLock::new(), make, derived_from }
    }

    fn made(&self) -> &FileContent {
        self.content.get_or_init(&self.make)
    }
}

impl<F: Fn() -> FileContent + Send + Sync> VirtualFile for LazyFile<F> {
    fn len_bytes(&self) -> u64 {
        self.made().len_bytes()
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        Ok(self.made().clone())
    }

    fn derived_from(&self) -> DerivedFrom {
        self.derived_from.clone()
    }
}

/// A file of these bytes.
pub fn text_file(bytes: Arc<[u8]>, derived_from: DerivedFrom) -> impl VirtualFile {
    LazyFile::new(move || FileContent::Bytes(Arc::clone(&bytes)), derived_from)
}

/// Type of a subtree's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubtreeNode {
    /// A directory, with its number of subdirectories.
    Directory(u32),
    /// A file.
    File,
}

/// A directory whose nodes are computed by arithmetic: no table has a row for them. Nodes are numbered from 0, the
/// directory itself; callers pass only numbers below [`Subtree::nodes`].
pub trait Subtree: Send + Sync {
    /// Number of nodes.
    fn nodes(&self) -> u64;

    /// Type of a node.
    fn node(&self, at: u64) -> SubtreeNode;

    /// A node's name; the parent of node 0 names node 0.
    fn name(&self, at: u64) -> Cow<'_, str>;

    /// A node's parent; that of node 0 is node 0.
    fn parent(&self, at: u64) -> u64;

    /// The child of a directory with this name; `None` also for a file.
    fn child(&self, at: u64, name: &[u8]) -> Option<u64>;

    /// Calls `each` with names and numbers of a directory's children, in a fixed order from entry number `from` on, until it
    /// returns false.
    fn list(&self, at: u64, from: u64, each: &mut dyn FnMut(&str, u64) -> bool);

    /// The sources of a file.
    fn derived_from(&self, at: u64) -> DerivedFrom;

    /// Lays a file out.
    ///
    /// # Errors
    /// [`ImageError`], which planning has excluded.
    ///
    /// # Panics
    /// If the node is a directory.
    fn content(&self, at: u64) -> Result<FileContent, ImageError>;

    /// Whether programs read each file of this format from end to end and close it, so that its first reader needs no copy of it in
    /// memory.
    fn is_read_once(&self) -> bool {
        false
    }

    /// Whether programs read a header of each file before the rest.
    fn has_headers(&self) -> bool {
        false
    }

    /// Length of a file in bytes: that of its content.
    ///
    /// # Errors
    /// As [`Subtree::content`].
    ///
    /// # Panics
    /// If the node is a directory.
    fn len_bytes(&self, at: u64) -> Result<u64, ImageError> {
        Ok(self.content(at)?.len_bytes())
    }

    /// Names of a node's extended attributes.
    fn xattr_names(&self, at: u64) -> &'static [&'static str] {
        let _ = at;
        &[]
    }

    /// Value of an extended attribute.
    fn xattr(&self, at: u64, name: &[u8]) -> Option<Vec<u8>> {
        let _ = (at, name);
        None
    }
}

/// An entry of a directory.
pub enum DirectoryEntry<T> {
    /// A directory.
    Directory(Directory<T>),
    /// Anything else.
    Leaf(T),
}

/// What a format shows, but for directories.
pub enum Shown {
    /// A file.
    File(Arc<dyn VirtualFile>),
    /// A symbolic link with its target.
    Link(Box<str>),
    /// A directory whose nodes are computed by arithmetic.
    Subtree(Arc<dyn Subtree>),
}

/// A directory.
pub struct Directory<T = Shown> {
    /// By name.
    pub entries: BTreeMap<String, DirectoryEntry<T>>,
    /// Path of the repository's directory that it mirrors: it may be listed and traversed by the same users.
    pub mirrors: Option<String>,
}

impl<T> Default for Directory<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), mirrors: None }
    }
}

impl<T> Directory<T> {
    /// The directory `name`, added if it is missing; `None` if another entry has the name.
    pub fn directory(&mut self, name: &str) -> Option<&mut Self> {
        match self.entries.entry(name.to_owned()).or_insert_with(|| DirectoryEntry::Directory(Self::default())) {
            DirectoryEntry::Directory(directory) => Some(directory),
            DirectoryEntry::Leaf(_) => None,
        }
    }

    /// Adds an entry; false if the name is in use.
    pub fn add(&mut self, name: &str, entry: T) -> bool {
        let is_free = !self.entries.contains_key(name);
        if is_free {
            self.entries.insert(name.to_owned(), DirectoryEntry::Leaf(entry));
        }
        is_free
    }

    /// Adds the entries of `other`, each as `of` makes it; directories of the same name are merged.
    ///
    /// # Errors
    /// The name of an entry that both have.
    pub fn merge<S>(&mut self, other: Directory<S>, of: &dyn Fn(S) -> T) -> Result<(), String> {
        self.mirrors = self.mirrors.take().or(other.mirrors);
        other.entries.into_iter().try_for_each(|(name, entry)| match entry {
            DirectoryEntry::Directory(directory) => match self.directory(&name) {
                Some(known) => known.merge(directory, of),
                None => Err(name),
            },
            DirectoryEntry::Leaf(entry) => self.add(&name, of(entry)).then_some(()).ok_or(name),
        })
    }
}

impl Directory {
    /// Adds an entry at a path below the directory of a format, whose directories are added if they are missing. Where the format
    /// `mirrors` the repository each says which one it is.
    ///
    /// # Errors
    /// The path is in use.
    pub(super) fn add_at(&mut self, format: &str, path: &str, entry: Shown, mirrors: bool) -> Result<(), Problem> {
        let mut parent = self.directory(format);
        for (at, _) in path.match_indices('/') {
            let above = &path[..at];
            parent = parent.and_then(|parent| parent.directory(above.rsplit('/').next().unwrap_or(above)));
            if let Some(parent) = parent.as_mut().filter(|_| mirrors) {
                parent.mirrors = Some(above.to_owned());
            }
        }
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_added = parent.is_some_and(|parent| parent.add(name, entry));
        let taken =
            || Problem::File { file: format!("{format}/{path}"), reason: "another file has this name".to_owned() };
        if is_added { Ok(()) } else { Err(taken()) }
    }

    /// Adds a file; false if the name is in use.
    pub fn file(&mut self, name: &str, file: impl VirtualFile + 'static) -> bool {
        self.add(name, Shown::File(Arc::new(file)))
    }

    /// Adds a subtree; false if the name is in use.
    pub fn subtree(&mut self, name: &str, subtree: impl Subtree + 'static) -> bool {
        self.add(name, Shown::Subtree(Arc::new(subtree)))
    }

    /// Number of files, here and below, that hold all tensors of a device.
    pub fn bundles(&self) -> usize {
        let count = |entry: &DirectoryEntry<Shown>| match entry {
            DirectoryEntry::Directory(directory) => directory.bundles(),
            DirectoryEntry::Leaf(Shown::File(file)) => usize::from(file.is_bundle()),
            DirectoryEntry::Leaf(Shown::Link(_) | Shown::Subtree(_)) => 0,
        };
        self.entries.values().map(count).sum()
    }

    /// A directory with the single entry `name`, a directory that `fill` fills.
    pub fn with(name: &str, fill: impl FnOnce(&mut Self)) -> Self {
        let mut inner = Self::default();
        fill(&mut inner);
        Self { entries: BTreeMap::from([(name.to_owned(), DirectoryEntry::Directory(inner))]), mirrors: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Declared(u64);

    impl VirtualFile for Declared {
        fn len_bytes(&self) -> u64 {
            self.0
        }

        fn content(&self) -> Result<FileContent, ImageError> {
            Ok(FileContent::Image(FileImage::of_bytes([7; 5])))
        }
    }

    #[test]
    fn a_layout_of_another_length_than_expected_is_refused() {
        for expected in [0, 4, 6] {
            let error = Declared(expected).open().err().unwrap().to_string();
            assert_eq!(error, format!("the file was laid out with 5 bytes, expected {expected}"));
        }
        assert_eq!(Declared(5).open().unwrap().len_bytes(), 5);
    }

    #[test]
    fn directories_of_one_name_are_merged_and_files_are_not() {
        let text = || text_file([1; 3].into(), DerivedFrom::Tensors);
        let of = |inner: &str| Directory::with("a", |a| assert!(a.file(inner, text())));
        let mut all = of("x");
        assert_eq!(all.merge(of("y"), &|shown| shown), Ok(()));
        assert_eq!(all.merge(of("y"), &|shown| shown), Err("y".to_owned()));
        let Some(DirectoryEntry::Directory(a)) = all.entries.get("a") else { panic!("a directory") };
        assert_eq!(a.entries.keys().collect::<Vec<_>>(), ["x", "y"]);
        assert!(!all.file("a", text()), "a name is taken once");
        assert!(all.directory("b").is_some_and(|b| b.directory("c").is_some()));
    }
}
