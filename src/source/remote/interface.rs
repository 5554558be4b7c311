//! The interface between the cache and the services that hold objects.

use std::{ops::ControlFlow, sync::Arc, time::Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    super::{
        ByteSpan,
        digest::{KnownDigest, SHA1_DIGITS, SHA256_DIGITS, hexadecimal, is_hex},
    },
    error::RemoteError,
    hedge::Hedging,
    shared::SharedCache,
};

/// The content of an object, as far as its service names it. Two objects of the same identity that one service names have the same
/// bytes: the cache keeps them once. Of another service the digest is only a claim until all bytes are compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Content {
    /// SHA-256 of the bytes, in lower-case hexadecimal. A complete copy is checked against it.
    #[serde(rename = "sha256")]
    Sha256(String),
    /// SHA-1 of the git blob, in lower-case hexadecimal: `blob <size>\0` and the bytes.
    #[serde(rename = "git")]
    GitBlob(String),
    /// A version that only this service can compare with others.
    #[serde(untagged)]
    Version {
        /// The service and the object, for example `s3://bucket/key`.
        object: String,
        /// Entity tag, version or, where there is nothing better, modification time.
        version: String,
    },
}

impl Content {
    /// The name in the cache: short, and safe as the name of a directory. `size_bytes` is part of it, so that a service that
    /// confuses versions at least cannot confuse lengths. So is `origin`, the service: blocks are compared with a digest only when
    /// all are here, and a service that lies must not fill the entry of one that does not.
    pub(crate) fn cache_name(&self, size_bytes: u64, origin: &str) -> String {
        let size = size_bytes.to_string();
        let (kind, name) = match self {
            Self::Sha256(hex) => ("sha256", hex),
            Self::GitBlob(hex) => ("git", hex),
            Self::Version { object, version } => {
                return format!("v-{}", digest(&["version", object, version, &size]));
            }
        };
        format!("v-{}", digest(&[kind, name, origin, &size]))
    }

    /// The digest that the bytes must have, if the service names one.
    pub fn known_digest(&self) -> Option<KnownDigest> {
        match self {
            Self::Sha256(hex) if is_hex(hex, SHA256_DIGITS) => Some(KnownDigest::Sha256(hex.clone())),
            Self::GitBlob(hex) if is_hex(hex, SHA1_DIGITS) => Some(KnownDigest::GitBlob(hex.clone())),
            // A digest of other form comes from a service that is not to be trusted with file names.
            Self::Sha256(_) | Self::GitBlob(_) | Self::Version { .. } => None,
        }
    }
}

/// A digest of texts, in hexadecimal. Each text is preceded by its length, so that no two lists give the same.
fn digest(texts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hexadecimal(&hasher.finalize())
}

/// A file of a remote repository: one object, pinned by its version. Listings are kept in this form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteFile {
    /// Path relative to the repository, with `/`.
    pub path: String,
    /// The name by which the service knows the object. Only the [`Objects`] that listed it read it.
    #[serde(default)]
    pub key: String,
    /// Length in bytes, as listed.
    #[serde(rename = "size")]
    pub size_bytes: u64,
    /// Its content.
    #[serde(flatten)]
    pub content: Content,
    /// Entity tag without quotes, if the service has one: every reply must have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Time of its last modification, in seconds of Unix time, if the service says it.
    #[serde(default, rename = "modified", skip_serializing_if = "Option::is_none")]
    pub modified_seconds: Option<u64>,
}

impl RemoteFile {
    /// All of its bytes.
    ///
    /// # Panics
    /// Never: a span may begin at 0.
    pub fn span(&self) -> ByteSpan {
        ByteSpan::new(0, self.size_bytes).expect("a span may begin at 0")
    }
}

/// A repository in an object store, on the Hub or on a web server. Its listing is pinned: it does not change.
#[derive(Clone)]
pub struct RemoteRepository {
    /// The name for messages and for the mount table, for example `s3://bucket/prefix` or `org/name@0123456789ab`.
    pub label: String,
    /// The prefix of file names in messages: [`RemoteRepository::name_of`].
    pub url: String,
    /// The commit, where the service has commits.
    pub revision: Option<String>,
    /// Its files. No two have the same path.
    pub files: Vec<RemoteFile>,
    /// The service.
    pub objects: Arc<dyn Objects>,
}

impl RemoteRepository {
    /// The name of a file in messages: where a person finds it.
    pub fn name_of(&self, file: &RemoteFile) -> String {
        if file.path.is_empty() {
            self.url.clone()
        } else {
            format!("{}/{}", self.url.trim_end_matches('/'), file.path)
        }
    }
}

/// Receives the bytes of a reply in order, as they come. [`ControlFlow::Break`] ends the request: the rest is not needed.
pub type Sink<'a> = dyn FnMut(&[u8]) -> ControlFlow<()> + 'a;

/// A service that holds objects. Blocking; called from many threads.
///
/// An implementation makes one attempt per call. [`super::Retrying`] repeats what may succeed later, with pauses that all threads
/// share, and goes on at the byte where an attempt ended.
pub trait Objects: Send + Sync {
    /// The host, for messages: never with a token or a signature.
    fn host(&self) -> &str;

    /// Names the service, with its endpoint: what one service says of an object is no proof for another.
    fn origin(&self) -> &str {
        self.host()
    }

    /// Notes that the bytes of a file do not have its digest: a copy on this machine from which they came is not used again.
    fn distrust(&self, _: &RemoteFile) {}

    /// The cache of the service's own client on this machine, if complete objects are to be placed there.
    fn shared(&self) -> Option<&SharedCache> {
        None
    }

    /// Passes the bytes of `span` to `sink`, in order. The attempt ends with an error at `until`, or earlier if no byte comes for
    /// a time that the implementation chooses.
    ///
    /// A request whose first byte takes long may be sent a second time, as `hedging` allows.
    ///
    /// The reply counts only if it is of the pinned version and of this span: another version is
    /// [`super::Failure::Changed`], and a reply that holds other bytes or too few is an error. The sink has then seen a correct
    /// beginning of the span, or nothing.
    ///
    /// # Errors
    /// [`RemoteError`] without a signed address, a token or a query.
    fn read(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        until: Instant,
        hedging: &Hedging,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_in_the_cache_depends_on_everything_that_tells_contents_apart() {
        let version = |object: &str, version: &str| Content::Version { object: object.into(), version: version.into() };
        let sha256 = || Content::Sha256("a".repeat(64));
        let names = [
            sha256().cache_name(1, "https://hub"),
            sha256().cache_name(1, "https://mirror"),
            Content::GitBlob("a".repeat(40)).cache_name(1, "https://hub"),
            version("s3://b/k", "1").cache_name(1, ""),
            version("s3://b/k", "1").cache_name(2, ""),
            version("s3://b/k", "2").cache_name(1, ""),
            version("s3://b/", "k1").cache_name(1, ""),
            Content::Sha256("../../etc/passwd".into()).cache_name(1, "https://hub"),
        ];
        for (place, name) in names.iter().enumerate() {
            assert!(!names[..place].contains(name), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "{name}");
        }
        assert_eq!(Content::Sha256("A".repeat(64)).known_digest(), None);
        assert_eq!(sha256().known_digest(), Some(KnownDigest::Sha256("a".repeat(64))));
    }
}
