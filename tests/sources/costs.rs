//! The cost of views on a source without maps: calls, spans and bytes fetched for a sequential reader of each type of
//! view. The source is in memory and counts, so all figures are exact.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use crate::common::{
    repo, shape,
    sources::{Fetched, MemoryFiles, Watched},
};
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    image::raw,
    read::{Engine, EngineOptions, PreparedFile, reference},
    source::{FileId, LocalFiles, Source, SourceIo},
    tensor::{DType, SourceTensor, View},
};
use serde_json::json;
use tempfile::TempDir;

/// A repository, its checkpoint over a counting source, and that source.
struct Counted {
    _dir: TempDir,
    source: Arc<Watched>,
    checkpoint: Arc<Checkpoint>,
}

/// The repository over files in memory, over files read by system calls, and over mapped files.
fn counted(rows: &[(&str, DType, &[u64])]) -> [Counted; 3] {
    let rows: Vec<_> = rows.iter().map(|(name, dtype, extents)| repo::row(name, *dtype, extents)).collect();
    let open = |wrap: fn(Arc<dyn Source>) -> Watched| {
        let dir = tempfile::tempdir().unwrap();
        repo::write_repo(dir.path(), &[&rows], &json!({"model_type": "unknown"}));
        let opened = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
        let source = Arc::new(wrap(Arc::clone(opened.source())));
        let same = Arc::clone(&source);
        Counted { _dir: dir, source, checkpoint: Arc::new(opened.with_source(|_| same)) }
    };
    [
        open(|source| Watched::new(MemoryFiles::copy_of(source.as_ref()))),
        open(|source| Watched::new(reopened(source.as_ref(), SourceIo::Pread))),
        open(|source| Watched::new(reopened(source.as_ref(), SourceIo::Mmap))),
    ]
}

fn reopened(source: &dyn Source, io: SourceIo) -> LocalFiles {
    let files = (0..u32::try_from(source.file_count()).unwrap()).map(FileId);
    let paths: Vec<_> = files.map(|file| source.path(file).to_owned()).collect();
    LocalFiles::open(&paths, io).unwrap()
}

fn tensor(checkpoint: &Checkpoint, name: &str) -> SourceTensor {
    let id = checkpoint.find(name).unwrap();
    let info = checkpoint.tensor(id);
    SourceTensor { id, dtype: info.dtype, shape: shape(info.shape) }
}

fn of(checkpoint: &Checkpoint, name: &str) -> View {
    View::source(tensor(checkpoint, name))
}

/// Reads a view from end to end in units of 1 MiB, compares it with the reference, and returns the fetches.
fn fetched(counted: &Counted, view: &View, cache_bytes: usize) -> Fetched {
    let Counted { source, checkpoint, .. } = counted;
    let options = EngineOptions { tile_cache_bytes: cache_bytes, ..EngineOptions::default() };
    let engine = Arc::new(Engine::new(Arc::clone(checkpoint), options));
    let file = Arc::new(PreparedFile::new("view".to_owned(), raw("view", view.clone()).unwrap()));
    let before = source.fetched();
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < file.len_bytes() {
        let start = bytes.len() as u64;
        let mut reply = |part: ckfs::source::Served<'_>| {
            bytes.extend(part.to_vec().unwrap());
            ckfs::source::Replied::new()
        };
        engine.read(&file, start, 1 << 20, &mut reply).map(drop).unwrap();
    }
    let after = source.fetched();
    let read = |id, span: std::ops::Range<u64>| {
        let info = checkpoint.tensor(id);
        let mut found = vec![0; usize::try_from(span.end - span.start).unwrap()];
        checkpoint.source().read_into(info.file(), info.span().start() + span.start, &mut found).unwrap();
        Ok(found)
    };
    // The reference is slow, so only some spans are compared.
    let len = bytes.len() as u64;
    for low in (0..8).map(|eighth| len / 8 * eighth) {
        let high = (low + 5000).min(len);
        let right = reference::evaluate(view, low..high, read).unwrap();
        assert!(bytes[usize::try_from(low).unwrap()..usize::try_from(high).unwrap()] == right, "{view} at {low}");
    }
    Fetched { calls: after.calls - before.calls, spans: after.spans - before.spans, bytes: after.bytes - before.bytes }
}

const MIB: u64 = 1 << 20;
const CACHE_BYTES: usize = 256 << 20;

/// Asserts the cost of a view on each source: this cost where files are not mapped, and no fetch where they are.
#[track_caller]
fn costs(kinds: &[Counted; 3], view: impl Fn(&Checkpoint) -> View, cache_bytes: usize, expected: [u64; 3]) {
    let [calls, spans, bytes] = expected;
    let nothing = Fetched::default();
    for (kind, expected) in
        kinds.iter().zip([Fetched { calls, spans, bytes }, Fetched { calls, spans, bytes }, nothing])
    {
        let view = view(&kind.checkpoint);
        assert_eq!(fetched(kind, &view, cache_bytes), expected, "{view}");
    }
}

/// Each type of view costs its source bytes, once, in calls of 1 MiB or more. Counts are exact.
#[test]
fn every_kind_of_view_costs_its_source_bytes_in_large_fetches() {
    let matrix: &[u64] = &[2048, 4096];
    let each = 16 * MIB;
    let kinds = counted(&["m0", "m1", "m2", "m3"].map(|name| (name, DType::BF16, matrix)));
    let first = |checkpoint: &Checkpoint| of(checkpoint, "m0");
    let all = |checkpoint: &Checkpoint| ["m0", "m1", "m2", "m3"].map(|name| of(checkpoint, name));
    // In MaxText's form: `[in, layers, out]`.
    let kernel = |checkpoint: &Checkpoint| View::stack(1, &all(checkpoint).map(|view| view.reverse_axes())).unwrap();
    let costs = |view: &dyn Fn(&Checkpoint) -> View, expected| costs(&kinds, view, CACHE_BYTES, expected);

    costs(&first, [16, 16, each]);
    costs(&|c| View::stack(0, &all(c)).unwrap(), [64, 64, 4 * each]);
    // A quarter of each row of 8 KiB.
    costs(&|c| first(c).slice(1, 1024, 2048, 1).unwrap(), [1, 2048, each / 4]);
    costs(&|c| first(c).reverse_axes(), [1, 1, each]);
    costs(&kernel, [4, 4, 4 * each]);
    // A quarter of the last axis needs whole source rows, a quarter of the first a part of each.
    costs(&|c| kernel(c).slice(2, 512, 1024, 1).unwrap(), [1, 4, each]);
    costs(&|c| kernel(c).slice(0, 1024, 2048, 1).unwrap(), [1, 4 * 2048, each]);
    costs(&|c| first(c).cast(DType::F32).unwrap(), [4, 4, each]);
    costs(&|c| kernel(c).cast(DType::F32).unwrap(), [4, 4, 4 * each]);
}

/// If a transposed view exceeds half of the cache, its bands read their part of each row, and no byte twice.
#[test]
fn bands_of_a_view_that_is_too_large_fetch_no_byte_twice() {
    let kinds = counted(&[("m", DType::BF16, &[2048, 4096])]);
    let view = |checkpoint: &Checkpoint| of(checkpoint, "m").reverse_axes();
    // A quarter of 24 MiB are 1536 of the 4096 rows of 4 KiB.
    costs(&kinds, view, 24 << 20, [3, 3 * 2048, 16 * MIB]);
    costs(&kinds, view, 8 << 20, [8, 8 * 2048, 16 * MIB]);
}

/// Codes and scales of a quantized tensor are fetched once for each tile, codes only once.
#[test]
fn quantized_views_cost_their_codes_and_scales() {
    let kinds = counted(&[("codes", DType::F8E4M3, &[2048, 4096]), ("scales", DType::F32, &[16, 32])]);
    let view = |checkpoint: &Checkpoint| {
        let (codes, scales) = (tensor(checkpoint, "codes"), tensor(checkpoint, "scales"));
        View::dequantize(codes, scales, (128, 128), DType::BF16).unwrap()
    };
    costs(&kinds, view, CACHE_BYTES, [2, 4, 8 * MIB + 2048]);
    // They are adjacent in the file.
    costs(&kinds, |checkpoint| view(checkpoint).reverse_axes(), CACHE_BYTES, [1, 1, 8 * MIB + 2048]);
}
