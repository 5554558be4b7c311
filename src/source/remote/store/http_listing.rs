//! The files of a repository on a web server, which cannot list: its index names the weights, and the others have usual names.

use std::collections::BTreeSet;

use ckfs_host::{
    RelativePath,
    parse_room::{JsonForm, ParseRoom},
};
use object_store::path::Path;

use super::{
    super::{
        error::{Failure, RemoteError},
        interface::RemoteFile,
    },
    reader::{Store, path_of},
};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Largest index, in bytes.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Files besides the weights that a repository may have.
const OTHERS: [&str; 18] = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "README.md",
    "LICENSE",
];

/// The files of a directory of a web server.
///
/// # Errors
/// It has neither an index nor `model.safetensors`, or a file that the index names is not there.
pub(super) fn list(store: &Store, dir: &Path) -> Result<Vec<RemoteFile>, RemoteError> {
    // Not by `join`, which encodes characters: the client encodes them once more.
    let at = |name: &str| -> Path {
        let parts = dir.parts().map(|part| part.as_ref().to_owned()).chain(name.split('/').map(str::to_owned));
        path_of(&parts.collect::<Vec<_>>().join("/"))
    };
    let what = |name: &str| format!("{}/{}", store.address, at(name));
    let index = match store.head(&at(INDEX), INDEX) {
        Ok(index) => Some(index),
        Err(error) if error.failure == Failure::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut names: BTreeSet<String> = OTHERS.iter().map(|name| (*name).to_owned()).collect();
    let weights = match &index {
        Some(index) if index.size_bytes > INDEX_BYTES_MAX => {
            let message = format!("expected at most {INDEX_BYTES_MAX} bytes, found {}", index.size_bytes);
            return Err(RemoteError::new(Failure::Unsupported, &store.host, &what(INDEX), message));
        }
        Some(_) => weights_of(&store.get(&at(INDEX))?)
            .map_err(|message| RemoteError::new(Failure::Unsupported, &store.host, &what(INDEX), message))?,
        None => BTreeSet::from([SINGLE.to_owned()]),
    };
    names.extend(weights.iter().cloned());
    let keys: Vec<(Path, String)> = names.into_iter().map(|name| (at(&name), name)).collect();
    let mut files = store.heads(&keys)?;
    let missing = |name: &&String| files.iter().all(|file| file.path != **name);
    // An adapter has weights of another name.
    let is_adapter = index.is_none() && files.iter().any(|file| file.path == "adapter_model.safetensors");
    if let Some(name) = weights.iter().find(missing).filter(|_| !is_adapter) {
        let message = match &index {
            Some(_) => format!("{INDEX} names it, and the server does not have it"),
            None => format!("no such file, and no {INDEX} either"),
        };
        return Err(RemoteError::new(Failure::NotFound, &store.host, &what(name), message));
    }
    files.extend(index);
    Ok(files)
}

/// The weight files that an index names.
fn weights_of(text: &[u8]) -> Result<BTreeSet<String>, String> {
    let _held = ParseRoom::of_process().hold_json(text, JsonForm::Tree).map_err(|error| error.to_string())?;
    let index: serde_json::Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let map = index.get("weight_map").and_then(|map| map.as_object()).ok_or("expected an object weight_map")?;
    let mut names = BTreeSet::new();
    for name in map.values() {
        let name = name.as_str().ok_or("expected names of files in weight_map")?;
        if let Err(flaw) = RelativePath::parse(name) {
            return Err(format!("a file in weight_map, {name:?}: not a path inside the repository: {flaw}"));
        }
        names.insert(name.to_owned());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_files_inside_only() {
        let names = weights_of(br#"{"weight_map": {"a": "x.safetensors", "b": "x.safetensors", "c": "d/y"}}"#).unwrap();
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["d/y", "x.safetensors"]);
        for bad in [r#"{"weight_map": {"a": "../x"}}"#, r#"{"weight_map": {"a": "/x"}}"#, r#"{"weight_map": 1}"#, "{"] {
            assert!(weights_of(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
