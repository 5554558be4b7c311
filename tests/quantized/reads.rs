//! Quantized tensors through the engine: over maps and over reads, in tiles and alone, with the fetched bytes counted.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests panic, and sizes are small")]

use std::{fs, sync::Arc};

use crate::common::{repo, shape};
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    image::raw,
    read::{Engine, EngineOptions, Path, PreparedFile, reference},
    source::SourceIo,
    tensor::{Bits, DType, Digit, Field, IndexMap, Operand, Operation, SourceTensor, Value, View, block_index},
};
use serde_json::json;

const OUT: u64 = 512;
const IN: u64 = 1024;

/// A repository with the tensors of two schemes in two files.
fn repository() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let rows = [
        repo::row("a.blocks", DType::U8, &[OUT, IN / 2]),
        repo::row("b.qweight", DType::I32, &[IN / 8, OUT]),
        repo::row("b.scales", DType::F16, &[IN / 128, OUT]),
    ];
    let others =
        [repo::row("a.scales", DType::U8, &[OUT, IN / 32]), repo::row("b.qzeros", DType::I32, &[IN / 128, OUT / 8])];
    repo::write_repo(dir.path(), &[&rows, &others], &json!({"model_type": "unknown"}));
    dir
}

pub(crate) fn tensor(checkpoint: &Checkpoint, name: &str) -> SourceTensor {
    let id = checkpoint.find(name).unwrap();
    let info = checkpoint.tensor(id);
    SourceTensor { id, dtype: info.dtype, shape: shape(info.shape) }
}

/// MXFP4, `[out, in]` as it is stored.
fn by_rows(checkpoint: &Checkpoint) -> View {
    let codes = IndexMap::new(&[Digit::axis(&[OUT * IN], 0, 4)]);
    let codes = Operand { tensor: tensor(checkpoint, "a.blocks"), field: Field::e2m1(), index: codes };
    let scales = Operand {
        tensor: tensor(checkpoint, "a.scales"),
        field: Field::Float(DType::F8E8M0),
        index: block_index(OUT, IN, (1, 32)),
    };
    let value = Value::of(codes).then(Operation::Multiply, scales);
    View::quantized(shape(&[OUT, IN]), value).unwrap().cast(DType::BF16).unwrap()
}

/// GPTQ, `[out, in]`, of which the transpose is stored.
fn by_columns(checkpoint: &Checkpoint) -> View {
    let extents = [IN, OUT];
    let (row, column) = (|stride| Digit::axis(&extents, 0, stride), |stride| Digit::axis(&extents, 1, stride));
    let operand = |name, field, digits: &[Digit]| Operand {
        tensor: tensor(checkpoint, name),
        field,
        index: IndexMap::new(digits),
    };
    let four = Field::Integer(Bits::unsigned(4));
    let codes = operand("b.qweight", four, &[row(OUT * 32).grouped(8), row(4).turning(8), column(32)]);
    let zeros = operand("b.qzeros", Field::one_more(4), &[row(OUT * 4).grouped(128), column(4)]);
    let scales = operand("b.scales", Field::Float(DType::F16), &[row(OUT).grouped(128), column(1)]);
    let value = Value::of(codes).then(Operation::Subtract, zeros).then(Operation::Multiply, scales);
    View::quantized(shape(&extents), value).unwrap().reverse_axes().cast(DType::BF16).unwrap()
}

/// The bytes of a view by the engine, read in pieces, and the number of bytes fetched for them.
pub(crate) fn served(
    checkpoint: &Arc<Checkpoint>,
    view: &View,
    options: EngineOptions,
    piece: usize,
) -> (Vec<u8>, u64) {
    let engine = Arc::new(Engine::new(Arc::clone(checkpoint), options));
    let file = Arc::new(PreparedFile::new("view".to_owned(), raw("view", view.clone()).unwrap()));
    let (len, mut bytes) = (file.len_bytes(), Vec::new());
    while (bytes.len() as u64) < len {
        let start = bytes.len() as u64;
        let mut reply = |part: ckfs::source::Served<'_>| {
            bytes.extend(part.to_vec().unwrap());
            ckfs::source::Replied::new()
        };
        engine.read(&file, start, piece, &mut reply).map(drop).unwrap();
    }
    (bytes, engine.counters().fetched_bytes(Path::Tiles))
}

pub(crate) fn expected(checkpoint: &Checkpoint, view: &View) -> Vec<u8> {
    let read = |id, span: std::ops::Range<u64>| {
        let info = checkpoint.tensor(id);
        let bytes = fs::read(checkpoint.source().path(info.file())).map_err(Box::new)?;
        let at = |offset: u64| (info.span().start() + offset) as usize;
        Ok(bytes[at(span.start)..at(span.end)].to_vec())
    };
    reference::evaluate(view, 0..view.bytes().unwrap(), read).unwrap()
}

/// Whole tensors and their shards: the reference's bytes, fetched from no more than the shard's own codes, scales and zero points.
#[test]
fn shards_are_right_and_fetch_only_their_own_bytes() {
    let dir = repository();
    for io in [SourceIo::Mmap, SourceIo::Pread] {
        let options = OpenOptions { io, ..OpenOptions::default() };
        let checkpoint = Arc::new(Checkpoint::open(dir.path().to_str().unwrap(), &options).unwrap());
        let row_bytes = OUT * IN / 2 + OUT * IN / 32;
        let column_bytes = OUT * IN / 2 + IN / 128 * (OUT / 2 + 2 * OUT);
        for (name, whole, bytes) in
            [("rows", by_rows(&checkpoint), row_bytes), ("columns", by_columns(&checkpoint), column_bytes)]
        {
            for parts in [1, 4] {
                for axis in [0, 1] {
                    let length = whole.shape().extents()[axis] / parts;
                    let shard = whole.slice(axis, length * (parts - 1), length * parts, 1).unwrap();
                    let right = expected(&checkpoint, &shard);
                    let (found, fetched) = served(&checkpoint, &shard, EngineOptions::default(), 1 << 20);
                    assert!(found == right, "{name}, {io:?}: part of {parts} along axis {axis}");
                    let share = bytes / parts;
                    assert!(
                        fetched >= share && fetched <= share + share / 50,
                        "{name}, {io:?}: part of {parts} along axis {axis} fetches {fetched} bytes of {share}"
                    );
                }
            }
        }
    }
}

/// Where memory is short, pieces are computed one after the other, and tiles are not cached.
#[test]
fn little_memory_is_enough() {
    let dir = repository();
    let options = OpenOptions { io: SourceIo::Pread, ..OpenOptions::default() };
    let checkpoint = Arc::new(Checkpoint::open(dir.path().to_str().unwrap(), &options).unwrap());
    let small = EngineOptions { tile_cache_bytes: 0, thread_buffer_bytes: 4096, ..EngineOptions::default() };
    for view in [by_rows(&checkpoint), by_columns(&checkpoint)] {
        let part = view.slice(1, 96, 480, 3).unwrap().slice(0, 100, 400, 1).unwrap();
        for view in [&part, &part.reverse_axes(), &view] {
            let (found, _) = served(&checkpoint, view, small, 333_333);
            assert!(found == expected(&checkpoint, view), "{view}");
        }
    }
}

/// A source that ends early is an error that names the tensor, for any operand.
#[test]
fn a_truncated_operand_is_an_error() {
    for (file, name) in [(1, "a.blocks"), (2, "a.scales")] {
        let dir = repository();
        let options = OpenOptions { io: SourceIo::Pread, ..OpenOptions::default() };
        let checkpoint = Arc::new(Checkpoint::open(dir.path().to_str().unwrap(), &options).unwrap());
        let view = by_rows(&checkpoint);
        let path = dir.path().join(format!("model-{file:05}-of-00002.safetensors"));
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(500).unwrap();
        let engine = Arc::new(Engine::new(Arc::clone(&checkpoint), EngineOptions::default()));
        let opened = Arc::new(PreparedFile::new("view".to_owned(), raw("view", view).unwrap()));
        let error = engine.read(&opened, 0, 1 << 20, &mut |_| panic!("{name} is gone")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("model-{file:05}")) || text.contains(name), "{text}");
    }
}
