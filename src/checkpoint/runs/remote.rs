//! A run in an object store: one listing of all its objects.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use ckfs_source::{
    SourceError,
    remote::{RemoteFile, RemoteRepository, RemoteTree},
};

use super::step_tree::{Measure, SMALL_BYTES_MAX, StepTree, digest};
use crate::{
    OpenOptions,
    remote_tree::CachedTree,
    tree::{FileTree, TreeEntry, below, entries_of},
};

/// A listing.
pub(super) struct RemoteSteps {
    /// Without its files.
    repository: RemoteRepository,
    /// By path.
    files: BTreeMap<String, RemoteFile>,
    options: OpenOptions,
}

impl RemoteSteps {
    pub(super) fn new(mut repository: RemoteRepository, options: &OpenOptions) -> Self {
        let files = std::mem::take(&mut repository.files).into_iter().map(|file| (file.path.clone(), file)).collect();
        Self { repository, files, options: options.clone() }
    }

    fn inside(&self, directory: &str) -> impl Iterator<Item = (&str, &RemoteFile)> {
        let prefix = below(directory, "");
        let from = self.files.range(prefix.clone()..);
        from.map_while(move |(path, file)| Some((path.strip_prefix(&prefix)?, file)))
    }
}

impl StepTree for RemoteSteps {
    fn own_name(&self) -> String {
        self.repository.url.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned()
    }

    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError> {
        Ok(entries_of(self.inside(directory).map(|(rest, _)| rest)))
    }

    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError> {
        Ok(self.files.get(path).map(|file| file.size_bytes))
    }

    fn small(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError> {
        let Some(file) = self.files.get(path) else { return Ok(None) };
        if file.size_bytes > SMALL_BYTES_MAX {
            return Ok(None);
        }
        // Of this file alone: opening a tree fetches what is small in it.
        let alone = RemoteRepository { files: vec![file.clone()], ..self.repository.clone() };
        let tree = RemoteTree::open(alone, &self.options.cache(), &self.options.remote)?;
        CachedTree::new(&tree).description(path)
    }

    fn measure(&self, directory: &str) -> Result<Measure, SourceError> {
        let mut found = Measure::begin();
        for (rest, file) in self.inside(directory) {
            let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(file.modified_seconds.unwrap_or(0));
            found.add(rest, Some(file.size_bytes), changed, &[digest(format!("{:?}", file.content))]);
        }
        Ok(found.end())
    }

    fn needs_commit_file(&self) -> bool {
        true
    }
}
