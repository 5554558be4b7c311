//! Digests that are known of files before they are read: what the Hub says of its objects, and the names of blobs in its cache.
//!
//! A digest is of the whole. Bytes are compared when all of them are here; parts cannot be compared.

use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256, digest::DynDigest};

/// Hexadecimal digits of a SHA-256.
pub(crate) const SHA256_DIGITS: usize = 64;
/// Hexadecimal digits of a SHA-1, such as the id of a git blob.
pub(crate) const SHA1_DIGITS: usize = 40;

/// Whether a text is a digest with this number of hexadecimal digits in lower case. It is then safe as a part of a path.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Bytes in hexadecimal.
pub fn hexadecimal(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// The digest that a file's bytes must have, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KnownDigest {
    /// SHA-256 of the bytes.
    Sha256(String),
    /// SHA-1 of `blob <size>\0` and the bytes.
    GitBlob(String),
}

impl KnownDigest {
    /// The digest that a blob's name says, if it is one.
    pub fn of_name(name: &str) -> Option<Self> {
        if is_hex(name, SHA256_DIGITS) {
            Some(Self::Sha256(name.to_owned()))
        } else {
            is_hex(name, SHA1_DIGITS).then(|| Self::GitBlob(name.to_owned()))
        }
    }

    /// The digest that the Hub's cache names a file by; `real` is its path without links.
    pub(crate) fn of_blob(real: &Path) -> Option<Self> {
        let in_blobs = real.parent()?.file_name()? == "blobs";
        Self::of_name(real.file_name()?.to_str()?).filter(|_| in_blobs)
    }

    /// Its digits.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// What it is called in messages.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git blob id",
        }
    }
}

/// Makes a digest of bytes that are passed in order.
pub struct Digester(Box<dyn DynDigest + Send>);

impl Digester {
    /// Makes a digest of the kind of `known`, of a file of this size.
    pub fn new(known: &KnownDigest, size_bytes: u64) -> Self {
        Self(match known {
            KnownDigest::Sha256(_) => Box::new(Sha256::new()),
            KnownDigest::GitBlob(_) => Box::new(Sha1::new_with_prefix(format!("blob {size_bytes}\0"))),
        })
    }

    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest, in hexadecimal.
    pub fn finish(self) -> String {
        hexadecimal(&self.0.finalize())
    }
}

/// What a comparison with a known digest came to, where the bytes are not wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// No digest is known.
    Unknown,
    /// The bytes have it.
    Right,
    /// Not compared: this number of bytes is not here.
    Partial {
        /// Bytes that are not here.
        absent_bytes: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_sha256sum_and_git() {
        let of = |known: &str, text: &str| {
            let known = KnownDigest::of_name(known).unwrap();
            let mut digester = Digester::new(&known, text.len() as u64);
            text.as_bytes().chunks(2).for_each(|bytes| digester.update(bytes));
            (digester.finish(), known)
        };
        // printf hello | sha256sum, and | git hash-object --stdin
        let (found, known) = of("2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", "hello");
        assert_eq!((found.as_str(), known.kind()), (known.hex(), "SHA-256"));
        let (found, known) = of("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0", "hello");
        assert_eq!((found.as_str(), known.kind()), (known.hex(), "git blob id"));
    }

    #[test]
    fn only_blobs_are_named_by_their_digest() {
        let (sha1, sha256) = ("a".repeat(40), "0".repeat(64));
        let of = |path: String| KnownDigest::of_blob(Path::new(&path));
        assert_eq!(of(format!("/hub/models--o--n/blobs/{sha1}")), Some(KnownDigest::GitBlob(sha1.clone())));
        assert_eq!(of(format!("/x/blobs/{sha256}")), Some(KnownDigest::Sha256(sha256.clone())));
        for other in [format!("/x/other/{sha256}"), format!("/x/blobs/{}", &sha256[1..]), format!("/x/blobs/{sha1}.x")]
        {
            assert_eq!(of(other), None);
        }
    }
}
