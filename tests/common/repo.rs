//! Small repositories in temporary directories, and walks over a volume.

use std::{fs, ops::ControlFlow, path::Path, sync::Arc};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    config::{LayoutChoice, value},
    format::safetensors::write_header,
    plan::{Layout, Plan, ViewOptions},
    tensor::{DType, TensorId},
    volume::{FileSystem, Ino, NodeKind, ViewPlan, Volume, VolumeOptions},
};
use serde_json::json;
use tempfile::TempDir;

use super::source_bytes;

/// A tensor to write: name, type, extents.
pub type Row = (String, DType, Vec<u64>);

pub fn row(name: &str, dtype: DType, extents: &[u64]) -> Row {
    (name.to_owned(), dtype, extents.to_vec())
}

/// Writes one safetensors file of these tensors; their bytes depend on `first` and their order.
pub fn write_file(path: &Path, rows: &[Row], first: u32) {
    let tensors = rows.iter().map(|(name, dtype, extents)| (name.as_str(), *dtype, extents.as_slice()));
    let mut bytes = write_header(tensors, &[("format", "pt")], 8).unwrap().bytes;
    for (id, (_, dtype, extents)) in (first..).zip(rows) {
        let len = dtype.bytes_of(extents.iter().product()).unwrap();
        bytes.extend(source_bytes(TensorId(id), 0..len));
    }
    fs::write(path, bytes).unwrap();
}

/// Writes a repository of several files with an index and a `config.json`.
pub fn write_repo(dir: &Path, files: &[&[Row]], config: &serde_json::Value) {
    let mut weight_map = serde_json::Map::new();
    let mut first = 0;
    for (number, rows) in (1..).zip(files) {
        let name = format!("model-{number:05}-of-{:05}.safetensors", files.len());
        write_file(&dir.join(&name), rows, first);
        first += u32::try_from(rows.len()).unwrap();
        weight_map.extend(rows.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// The tensors of a small llama.
pub fn llama_rows(layers: u64, dtype: DType) -> Vec<Row> {
    let mut rows = vec![row("model.embed_tokens.weight", dtype, &[40, 16]), row("model.norm.weight", dtype, &[16])];
    for layer in 0..layers {
        for (name, extents) in [
            ("self_attn.q_proj", vec![24, 16]),
            ("self_attn.k_proj", vec![12, 16]),
            ("self_attn.v_proj", vec![12, 16]),
            ("self_attn.o_proj", vec![16, 24]),
            ("mlp.gate_proj", vec![36, 16]),
            ("mlp.up_proj", vec![36, 16]),
            ("mlp.down_proj", vec![16, 36]),
            ("input_layernorm", vec![16]),
            ("post_attention_layernorm", vec![16]),
        ] {
            rows.push(row(&format!("model.layers.{layer}.{name}.weight"), dtype, &extents));
        }
    }
    rows
}

pub fn llama_config(layers: u64) -> serde_json::Value {
    json!({"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 6,
           "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": true, "torch_dtype": "float32"})
}

/// A small llama of two files.
pub fn llama(layers: u64, dtype: DType) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let rows = llama_rows(layers, dtype);
    let (a, b) = rows.split_at(rows.len() / 2);
    write_repo(dir.path(), &[a, b], &llama_config(layers));
    dir
}

/// The layout of a user's word, which is right.
pub fn layout(word: &str) -> Layout {
    let mut choice = <LayoutChoice as value::SettingValue>::from_word(word).unwrap();
    choice.read_file().unwrap();
    Layout::of(&choice).unwrap()
}

pub fn open(dir: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(dir.to_str().unwrap(), &OpenOptions::default()).unwrap())
}

pub fn volume(checkpoint: &Arc<Checkpoint>, options: &ViewOptions, volume: VolumeOptions) -> Volume {
    let plan = Arc::new(Plan::build(checkpoint, options).unwrap());
    Volume::new(Arc::clone(checkpoint), vec![ViewPlan { name: String::new(), plan }], volume).unwrap()
}

/// Every file below a directory: path and number.
pub fn files(volume: &dyn FileSystem, dir: Ino, path: &str, found: &mut Vec<(String, Ino)>) {
    let mut entries = Vec::new();
    volume
        .read_dir(dir, 0, &mut |entry| {
            entries.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino, entry.kind));
            ControlFlow::Continue(())
        })
        .unwrap();
    for (name, ino, kind) in entries {
        let path = if path.is_empty() { name } else { format!("{path}/{name}") };
        match kind {
            NodeKind::Directory => files(volume, ino, &path, found),
            NodeKind::File => found.push((path, ino)),
            NodeKind::Symlink => {}
        }
    }
}

/// Opens a file, reads one span and closes it.
pub fn read(volume: &dyn FileSystem, ino: Ino, start: u64, len: usize) -> Vec<u8> {
    let opened = volume.open(ino).unwrap();
    let mut bytes = None;
    volume
        .read(ino, opened.handle, start, len, &mut |part| {
            assert!(bytes.replace(part.to_vec().unwrap()).is_none());
            ckfs::source::Replied::new()
        })
        .map(drop)
        .unwrap();
    volume.release(ino, opened.handle);
    bytes.expect("a read that succeeds replies")
}
