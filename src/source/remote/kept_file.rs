//! Small files that are kept in the directory of the disk cache, beside its entries.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::{
    super::{digest::hexadecimal, unique},
    cache::claim,
};

/// A text as the name of one file.
pub(super) fn escaped(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
