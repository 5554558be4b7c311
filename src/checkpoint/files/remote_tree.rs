//! The files of a remote checkpoint that is a tree of directories. Its listing is complete and pinned.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    path::Path,
    sync::Arc,
};

use ckfs_source::{
    ByteSpan, FoundFile, Opened, SourceError, check_open_file_limit,
    permission::DirectoryRules,
    private_directory,
    remote::{Remote, RemoteTree},
};
use ckfs_tensor::to_usize;

use super::super::tree::{DESCRIPTION_BYTES_MAX, FileTree, OpenTree, TreeEntry, entries_of};

/// A remote checkpoint as a tree.
pub(crate) struct CachedTree<'a> {
    tree: &'a RemoteTree,
    /// Places in the repository's list, by path.
    files: BTreeMap<&'a str, usize>,
}

impl<'a> CachedTree<'a> {
    pub(crate) fn new(tree: &'a RemoteTree) -> Self {
        let files = tree.repository().files.iter().enumerate();
        Self { tree, files: files.map(|(place, file)| (file.path.as_str(), place)).collect() }
    }

    fn find(&self, path: &str) -> Result<&'a Remote, SourceError> {
        let found = self.files.get(path).copied();
        self.tree.remote(found.ok_or_else(|| self.failed(path, "open", ErrorKind::NotFound.into()))?)
    }
}

impl FileTree for CachedTree<'_> {
    fn shown(&self, path: &str) -> Arc<Path> {
        let url = self.tree.repository().url.trim_end_matches('/');
        Arc::from(Path::new(&format!("{url}/{path}")))
    }

    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError> {
        let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        let from = self.files.range(prefix.as_str()..);
        Ok(entries_of(from.map_while(|(path, _)| path.strip_prefix(prefix.as_str()))))
    }

    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError> {
        Ok(self.files.get(path).map(|place| self.tree.repository().files[*place].size_bytes))
    }

    fn read(&self, path: &str, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let remote = self.find(path)?;
        let span = ByteSpan::of_len(start, target.len() as u64);
        let shown = span.map_or_else(|| format!("from {start}"), |span| span.to_string());
        let read = span.ok_or_else(|| ErrorKind::UnexpectedEof.into()).and_then(|span| remote.read_span(span, target));
        read.map_err(|error| self.failed(path, &format!("read bytes {shown}"), error))
    }

    fn description(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError> {
        let Some(len) = self.len_bytes(path)? else { return Ok(None) };
        if len > DESCRIPTION_BYTES_MAX {
            let message = format!("expected at most {DESCRIPTION_BYTES_MAX} bytes, found {len}");
            return Err(self.failed(path, "read", io::Error::other(message)));
        }
        let mut bytes = vec![0; to_usize(len)];
        self.read(path, 0, &mut bytes)?;
        Ok(Some(bytes))
    }

    fn needs_commit_file(&self) -> bool {
        true
    }
}

impl OpenTree for CachedTree<'_> {
    fn open_files(&self, paths: &[String], more: usize) -> Result<Vec<Opened>, SourceError> {
        check_open_file_limit(RemoteTree::DESCRIPTORS * paths.len() + more)?;
        let open = |path: &String| {
            let found = FoundFile::cached(self.find(path)?);
            found.map_err(|error| self.failed(path, "open", error))?.open(None)
        };
        paths.iter().map(open).collect()
    }

    fn gates(&self, _: &str) -> DirectoryRules {
        private_directory()
    }
}
