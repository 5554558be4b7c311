//! What an entry says about itself: `meta.json`.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use super::{
    super::super::{digest::KnownDigest, unique},
    own::{self, META},
};

/// Longer files are damaged.
const META_BYTES_MAX: u64 = 1 << 20;

/// What an entry says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryMeta {
    /// Where the object was when the entry was made, for people.
    pub object: String,
    /// Length in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the object, if its service names it.
    pub sha256: Option<String>,
    /// Id of the object as a git blob, if its service names that.
    #[serde(default)]
    pub git_blob: Option<String>,
    /// Whether the complete entry had this digest, and no block was brought since.
    #[serde(default)]
    pub verified: bool,
    /// How often all blocks were dropped because the digest was wrong. What was read before the last time may be wrong.
    #[serde(default)]
    pub dropped: u64,
}

impl EntryMeta {
    /// The digest that the object must have, if one is known.
    pub fn known_digest(&self) -> Option<KnownDigest> {
        match (&self.sha256, &self.git_blob) {
            (Some(hex), _) => Some(KnownDigest::Sha256(hex.clone())),
            (None, Some(hex)) => Some(KnownDigest::GitBlob(hex.clone())),
            (None, None) => None,
        }
    }

    pub(super) fn read(dir: &Path) -> io::Result<Self> {
        let mut text = Vec::new();
        own::open_part(&dir.join(META))?.take(META_BYTES_MAX).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// Writes the file as a whole: a reader sees the old one or the new one.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        unique::replace(&dir.join(META), &format!("{META}."), |new| File::create_new(new)?.write_all(&text))
    }
}

/// Notes that an entry is in use: the modification time of its file is the time of its last use.
pub(super) fn touch(dir: &Path) -> io::Result<()> {
    own::open_part(&dir.join(META))?.set_modified(SystemTime::now())
}

/// When an entry was last in use.
pub(super) fn last_use(dir: &Path) -> SystemTime {
    fs::metadata(dir.join(META)).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}
