//! Small files that are kept in the directory of the disk cache, beside its entries: listings, so that a later run needs fewer
//! requests, or none when it is offline.
//!
//! ```text
//! hub/<host>/<org>--<name>/revisions/<escaped revision>   the commit that it stood for when the Hub was last asked
//! hub/<host>/<org>--<name>/trees/<commit>                 the files of a commit, which never change
//! ```
//!
//! A listing that cannot be read or written is as good as none.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use ckfs_host::RelativePath;

use super::{
    super::{
        digest::{SHA1_DIGITS, hexadecimal, is_hex},
        unique,
    },
    cache::claim,
    interface::RemoteFile,
};

/// A text as the name of one file.
fn escaped(text: &str) -> String {
    let mut name = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) && !name.is_empty() {
            name.push(char::from(byte));
        } else {
            name.push('%');
            name.push_str(&hexadecimal(&[byte]));
        }
    }
    name
}

/// A link among the directories of `inside`, which are below `cache`: another user may have put it there, to have ckfs write
/// elsewhere. The path to the cache is the user's own, and may have links.
fn link_among(cache: &Path, inside: &Path) -> Option<PathBuf> {
    let is_link = |dir: &PathBuf| fs::symlink_metadata(dir).is_ok_and(|found| found.is_symlink());
    inside.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).map(|dir| cache.join(dir)).find(is_link)
}

/// Puts a complete file in the place of another, at `inside` below the directory of the disk cache, if there is one. A file that
/// cannot be written is not kept: it is only a saving. Nothing is written below a directory that is not the cache's.
pub(super) fn replace(cache: Option<&Path>, inside: &Path, bytes: &[u8]) {
    let Some(cache) = cache else { return };
    let path = cache.join(inside);
    let write = || -> io::Result<()> {
        claim(cache)?;
        if let Some(link) = link_among(cache, inside) {
            return Err(io::Error::other(format!("{} is a link", link.display())));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(cache))?;
        unique::replace(&path, ".part-", |new| fs::write(new, bytes))
    };
    if let Err(error) = write() {
        tracing::debug!("{}: not kept: {error}", path.display());
    }
}

/// The kept listings of one Hub.
#[derive(Clone, Debug)]
pub(super) struct KeptTree {
    cache: Option<PathBuf>,
    /// Below the cache.
    dir: PathBuf,
}

impl KeptTree {
    /// The listings of a host below the directory of the disk cache; without one nothing is kept.
    pub(super) fn new(cache: Option<&Path>, host: &str) -> Self {
        Self { cache: cache.map(Path::to_owned), dir: Path::new("hub").join(escaped(host)) }
    }

    /// Where a listing is below the cache.
    fn path(&self, repo: &str, kind: &str, name: &str) -> PathBuf {
        self.dir.join(repo.replace('/', "--")).join(kind).join(escaped(name))
    }

    pub(super) fn commit(&self, repo: &str, revision: &str) -> Option<String> {
        let text = fs::read_to_string(self.cache.as_ref()?.join(self.path(repo, "revisions", revision))).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_hex(commit, SHA1_DIGITS))
    }

    pub(super) fn keep_commit(&self, repo: &str, revision: &str, commit: &str) {
        replace(self.cache.as_deref(), &self.path(repo, "revisions", revision), commit.as_bytes());
    }

    pub(super) fn files(&self, repo: &str, commit: &str) -> Option<Vec<RemoteFile>> {
        let text = fs::read(self.cache.as_ref()?.join(self.path(repo, "trees", commit))).ok()?;
        let mut files: Vec<RemoteFile> = serde_json::from_slice(&text).ok()?;
        for file in &mut files {
            // Earlier versions kept the path alone, which is the key.
            file.key.clone_from(&file.path);
            RelativePath::parse(&file.path).ok()?;
            file.content.known_digest()?;
        }
        Some(files)
    }

    pub(super) fn keep_files(&self, repo: &str, commit: &str, files: &[RemoteFile]) {
        let are_digests = files.iter().all(|file| file.content.known_digest().is_some());
        if let Some(text) = serde_json::to_vec(files).ok().filter(|_| are_digests) {
            replace(self.cache.as_deref(), &self.path(repo, "trees", commit), &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::interface::Content, *};

    #[test]
    fn a_planted_link_leads_nowhere() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(other.path(), dir.path().join("stores")).unwrap();
        replace(Some(dir.path()), Path::new("stores/x.json"), b"{}");
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
        replace(Some(dir.path()), Path::new("hub/host/repo/x"), b"{}");
        assert_eq!(fs::read(dir.path().join("hub/host/repo/x")).unwrap(), b"{}");
    }

    #[test]
    fn nothing_is_kept_in_a_directory_that_is_not_the_caches() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("objects/84")).unwrap();
        replace(Some(dir.path()), Path::new("hub/host/repo/x"), b"{}");
        assert!(!dir.path().join("hub").exists());
    }

    #[test]
    fn names_never_leave_their_directory() {
        assert_eq!(escaped("refs/pr/1"), "refs%2fpr%2f1");
        assert_eq!(escaped(".."), "%2e.");
        assert_eq!(escaped("v1.0"), "v1.0");
    }

    #[test]
    fn listings_are_kept_and_damaged_ones_are_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptTree::new(Some(dir.path()), "huggingface.co");
        let (commit, sha256) = ("c".repeat(40), "a".repeat(64));
        let file = |path: &str, content| RemoteFile {
            path: path.into(),
            key: path.into(),
            size_bytes: 7,
            content,
            etag: None,
            modified_seconds: None,
        };
        let files = vec![file("a/b", Content::Sha256(sha256)), file("c", Content::GitBlob(commit.clone()))];
        assert_eq!((kept.commit("org/name", "main"), kept.files("org/name", &commit)), (None, None));
        kept.keep_commit("org/name", "refs/pr/1", &commit);
        kept.keep_files("org/name", &commit, &files);
        assert_eq!(kept.commit("org/name", "refs/pr/1"), Some(commit.clone()));
        assert_eq!(kept.files("org/name", &commit), Some(files));
        let earlier = format!(r#"[{{"path":"c","size":7,"git":"{commit}"}}]"#);
        fs::write(dir.path().join(kept.path("org/name", "trees", &commit)), earlier).unwrap();
        assert_eq!(kept.files("org/name", &commit), Some(vec![file("c", Content::GitBlob(commit.clone()))]));
        for damage in ["", "[{\"path\":\"../x\",\"size\":1,\"sha256\":\"\"}]", "[{\"path\":\"x\",\"size\":1}]"] {
            fs::write(dir.path().join(kept.path("org/name", "trees", &commit)), damage).unwrap();
            assert_eq!(kept.files("org/name", &commit), None, "{damage}");
        }
    }
}
