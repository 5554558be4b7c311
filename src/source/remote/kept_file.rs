//! Small files that are kept in the directory of the disk cache, beside its entries.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use super::{super::digest::hexadecimal, unique::unique};

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

/// Directories of the cache below which such files are. The path to them is the user's, and may have links.
const KEPT: [&str; 2] = ["hub", "stores"];

/// A link among the directories of a kept file: another user may have put it there, to have ckfs write elsewhere.
fn link_among(path: &Path) -> Option<&Path> {
    let is_link = |dir: &&Path| fs::symlink_metadata(dir).is_ok_and(|found| found.is_symlink());
    let is_first = |dir: &Path| dir.file_name().is_some_and(|name| KEPT.iter().any(|kept| name == *kept));
    let dirs: Vec<&Path> = path.ancestors().skip(1).collect();
    let count = dirs.iter().position(|dir| is_first(dir)).map_or(1, |first| first + 1);
    dirs.into_iter().take(count).find(is_link)
}

/// Puts a complete file in the place of another. A file that cannot be written is not kept: it is only a saving.
pub(super) fn replace(path: &Path, bytes: &[u8]) {
    let write = || -> io::Result<()> {
        if let Some(link) = link_among(path) {
            return Err(io::Error::other(format!("{} is a link", link.display())));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(path))?;
        let part = path.with_file_name(format!(".part-{}", unique()));
        let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, path));
        written.inspect_err(|_| drop(fs::remove_file(&part)))
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
        replace(&dir.path().join("stores/x.json"), b"{}");
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
        replace(&dir.path().join("hub/host/repo/x"), b"{}");
        assert_eq!(fs::read(dir.path().join("hub/host/repo/x")).unwrap(), b"{}");
    }

    #[test]
    fn names_never_leave_their_directory() {
        assert_eq!(escaped("refs/pr/1"), "refs%2fpr%2f1");
        assert_eq!(escaped(".."), "%2e.");
        assert_eq!(escaped("v1.0"), "v1.0");
    }
}
