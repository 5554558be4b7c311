//! The texts beside a model's weights.

use ckfs_checkpoint::{Checkpoint, FileRole, json};
use serde_json::Value;

/// Longest text.
const BYTES_MAX: u64 = 256 << 20;

/// The files of a repository, or those of the one that gives its configuration.
pub(super) struct ModelTexts<'a>(pub(super) &'a Checkpoint);

impl ModelTexts<'_> {
    /// All paths.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        let others = self.0.files().iter().filter(|file| file.role == FileRole::Other && self.0.companion().is_none());
        let theirs = self.0.companion().into_iter().flat_map(|companion| &companion.files);
        theirs.map(|(path, _)| path.as_str()).chain(others.map(|file| file.path.as_str()))
    }

    /// Whether there is such a file.
    pub(super) fn has(&self, path: &str) -> bool {
        self.paths().any(|known| known == path)
    }

    /// The bytes of a file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>, String> {
        if let Some(companion) = self.0.companion() {
            return Ok(companion.files.iter().find(|(known, _)| known == path).map(|(_, bytes)| bytes.to_vec()));
        }
        let own = self.0.files().iter().find(|file| file.path == path && file.role == FileRole::Other);
        let Some(file) = own.and_then(|file| file.file) else { return Ok(None) };
        self.0.source().read_whole(file, BYTES_MAX).map(Some).map_err(|reason| format!("{path}: {reason}"))
    }

    /// A text with line feeds as line ends, as Python reads it; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not in UTF-8.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>, String> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        let text = String::from_utf8(bytes).map_err(|error| format!("{path}: {error}"))?;
        Ok(Some(text.replace("\r\n", "\n").replace('\r', "\n")))
    }

    /// A JSON file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is no JSON.
    pub(super) fn json(&self, path: &str) -> Result<Option<Value>, String> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        json::parse(&bytes).map(Some).map_err(|error| format!("{path}: {error}"))
    }
}
