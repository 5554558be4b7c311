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

/// Puts a complete file in the place of another. A file that cannot be written is not kept: it is only a saving.
pub(super) fn replace(path: &Path, bytes: &[u8]) {
    let write = || -> io::Result<()> {
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
    fn names_never_leave_their_directory() {
        assert_eq!(escaped("refs/pr/1"), "refs%2fpr%2f1");
        assert_eq!(escaped(".."), "%2e.");
        assert_eq!(escaped("v1.0"), "v1.0");
    }
}
