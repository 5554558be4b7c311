//! What an entry says about itself: `meta.json`.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use super::super::unique::unique;

/// Name of the file.
pub(super) const META: &str = "meta.json";

/// What an entry says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryMeta {
    /// Where the object was when the entry was made, for people.
    pub object: String,
    /// Length in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the object, if its service names it.
    pub sha256: Option<String>,
    /// Whether the complete entry had this SHA-256.
    #[serde(default)]
    pub verified: bool,
}

impl EntryMeta {
    pub(super) fn read(dir: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(dir.join(META))?)?)
    }

    /// Writes the file as a whole: a reader sees the old one or the new one.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let temporary = dir.join(format!("{META}.{}", unique()));
        let mut file = File::create_new(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(self)?)?;
        drop(file);
        fs::rename(&temporary, dir.join(META)).inspect_err(|_| drop(fs::remove_file(&temporary)))
    }
}

/// Notes that an entry is in use: the modification time of its file is the time of its last use.
pub(super) fn touch(dir: &Path) -> io::Result<()> {
    File::options().write(true).open(dir.join(META))?.set_modified(SystemTime::now())
}

/// When an entry was last in use.
pub(super) fn last_use(dir: &Path) -> SystemTime {
    fs::metadata(dir.join(META)).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}
