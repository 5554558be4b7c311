//! Texts that are read when a repository is opened: configurations and indexes.

use std::{io, path::Path, sync::Arc};

use ckfs_source::{Opened, SourceError, WaitRegistry};

use super::{json, problem::Problems};

/// Longest `config.json` or index that is read, in bytes.
pub(super) const JSON_FILE_BYTES_MAX: u64 = 256 << 20;

/// The error of a file with which the system has not done this.
pub(super) fn io_error(file: impl AsRef<Path>, action: impl Into<String>, error: io::Error) -> SourceError {
    SourceError::Io { file: Arc::from(file.as_ref()), action: action.into(), error: Arc::new(error) }
}

/// The text of a JSON file, or the reason why it is not available.
pub(super) fn read_json(opened: &Opened, fetches: &WaitRegistry) -> Result<Vec<u8>, String> {
    let reading = fetches.begin_path(opened.path(), "read");
    let too_long = |len: u64| format!("expected at most {JSON_FILE_BYTES_MAX} bytes, found {len}");
    let len = opened.len_bytes().map_err(|error| error.to_string())?;
    if len > JSON_FILE_BYTES_MAX {
        return Err(too_long(len));
    }
    let text = opened.read(JSON_FILE_BYTES_MAX + 1, &reading).map_err(|error| error.to_string())?;
    if text.len() as u64 > JSON_FILE_BYTES_MAX { Err(too_long(text.len() as u64)) } else { Ok(text) }
}

/// The object that a JSON file holds.
pub(super) fn parsed(file: &str, text: &Result<Vec<u8>, String>, problems: &mut Problems) -> Option<serde_json::Value> {
    let value = text.as_ref().map_err(Clone::clone).and_then(|text| {
        let value = json::parse(text).map_err(|error| json::fault(&error))?;
        if value.is_object() { Ok(value) } else { Err("expected an object".into()) }
    });
    value.map_err(|message| problems.of_file(file, message)).ok()
}
