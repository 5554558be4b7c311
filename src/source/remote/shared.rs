//! A repository in the cache of the Hub's own client, which other programs read: where its parts are, and how they appear.
//!
//! ```text
//! models--org--name/blobs/<digest>                    the bytes of a file
//! models--org--name/snapshots/<commit>/<path>         a symbolic link to them
//! models--org--name/refs/<revision>                   the commit that it stands for
//! ```

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use super::super::unique;

/// A commit of a repository in the shared cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedCache {
    /// The directory `models--org--name`.
    dir: PathBuf,
    commit: String,
    /// The branch, tag or commit that was requested.
    revision: String,
}

impl SharedCache {
    /// The commit that `revision` stands for, in the directory of its repository, which need not be there.
    pub fn new(dir: PathBuf, commit: &str, revision: &str) -> Self {
        Self { dir, commit: commit.to_owned(), revision: revision.to_owned() }
    }

    /// The place of a file's bytes.
    pub fn blob(&self, digest: &str) -> PathBuf {
        self.dir.join("blobs").join(digest)
    }

    /// The directory in which other programs find the files by their paths.
    pub fn snapshot(&self) -> PathBuf {
        self.dir.join("snapshots").join(&self.commit)
    }

    /// Makes the snapshot of files, each a path with a digest whose blob is there, and then the name of the revision.
    ///
    /// # Errors
    /// The directories cannot be written.
    pub(super) fn publish<'a>(&self, files: impl Iterator<Item = (&'a str, &'a str)>) -> io::Result<()> {
        for (path, digest) in files {
            let link = self.snapshot().join(path);
            let up = "../".repeat(path.split('/').count() + 1);
            replace(&link, |new| symlink(format!("{up}blobs/{digest}"), new))?;
        }
        if !self.commit.starts_with(&self.revision) {
            replace(&self.dir.join("refs").join(&self.revision), |new| fs::write(new, &self.commit))?;
        }
        Ok(())
    }
}

/// Makes something under another name, and gives it its own at the end.
pub(super) fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    unique::replace(path, ".ckfs-", make)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_leads_to_its_blobs() {
        let dir = tempfile::tempdir().unwrap();
        let shared = SharedCache::new(dir.path().join("models--org--name"), "c0ffee", "refs/pr/1");
        for digest in ["a", "b"] {
            replace(&shared.blob(digest), |new| fs::write(new, digest)).unwrap();
        }
        for _ in 0..2 {
            shared.publish([("config.json", "a"), ("sub/dir/x", "b")].into_iter()).unwrap();
            assert_eq!(fs::read_to_string(shared.snapshot().join("config.json")).unwrap(), "a");
            assert_eq!(fs::read_to_string(shared.snapshot().join("sub/dir/x")).unwrap(), "b");
            assert_eq!(fs::read_to_string(shared.dir.join("refs/refs/pr/1")).unwrap(), "c0ffee");
        }
        let names = |path: PathBuf| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names(shared.snapshot()).filter(|name| name.to_string_lossy().starts_with('.')).count(), 0);
    }
}
