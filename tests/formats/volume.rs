//! The file system without FUSE: every virtual byte, in any span, against the slow reference.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::{collections::BTreeMap, fs, os::unix::fs::FileExt, sync::Arc};

use crate::common::repo;
use ckfs::{
    config::{Materialize, Quantize},
    image::Segment,
    plan::{Allow, Layout, Mesh, Pattern, ViewOptions},
    read::{EngineOptions, MaterializeError, MaterializeTarget, Materializing, Path, PreparedFile, reference},
    service::identity,
    tensor::{DType, View},
    volume::{Access, FileSystem, FsError, Ino, NodeKind, Served, Upkeep, Volume, VolumeOptions},
};
use proptest::prelude::*;

fn options(mesh: &str) -> ViewOptions {
    ViewOptions { mesh: Mesh::parse(mesh).unwrap(), ..ViewOptions::default() }
}

/// The view of a file that holds nothing but one.
fn only_view(volume: &Volume, ino: Ino) -> Option<View> {
    let image = volume.image(ino).ok()??;
    if let [Segment::View(view)] = image.segments() { Some(view.clone()) } else { None }
}

/// Bytes of a raw file by the reference evaluator, which reads source files independently.
fn expected(volume: &Volume, ino: Ino) -> Vec<u8> {
    let view = only_view(volume, ino).unwrap();
    let checkpoint = Arc::clone(volume.engine().checkpoint());
    let read = move |id, span: std::ops::Range<u64>| {
        let info = checkpoint.tensor(id);
        let bytes = fs::read(checkpoint.source().path(info.file())).map_err(Box::new)?;
        let at = |offset: u64| usize::try_from(info.span().start() + offset).unwrap();
        Ok(bytes[at(span.start)..at(span.end)].to_vec())
    };
    reference::evaluate(&view, 0..view.bytes().unwrap(), read).unwrap()
}

fn listing(volume: &Volume) -> BTreeMap<String, Ino> {
    let mut found = Vec::new();
    repo::files(volume, Ino::ROOT, "", &mut found);
    found.into_iter().collect()
}

fn check_all(volume: &Volume) -> usize {
    let files = listing(volume);
    for (path, ino) in &files {
        let size = volume.attr(*ino).unwrap().size_bytes;
        let bytes = repo::read(volume, *ino, 0, usize::try_from(size).unwrap() + 100);
        assert_eq!(bytes.len() as u64, size, "{path}");
        if only_view(volume, *ino).is_some() {
            assert_eq!(bytes, expected(volume, *ino), "{path}");
        }
    }
    files.len()
}

#[test]
fn every_file_of_a_llama_equals_the_reference() {
    let dir = repo::llama(3, DType::F32);
    let checkpoint = repo::open(dir.path());
    for mesh in ["", "fsdp=4", "fsdp=3", "fsdp=2,tensor=2", "data=2,tensor=3"] {
        for dtype in [None, Some(DType::BF16)] {
            for layout in [Layout::Canonical, Layout::Hf] {
                let options = ViewOptions { dtype, layout, ..options(mesh) };
                let volume = repo::volume(&checkpoint, &options, VolumeOptions::default());
                assert!(check_all(&volume) > 30);
            }
        }
    }
}

#[test]
fn the_tree_has_the_promised_names() {
    let dir = repo::llama(2, DType::BF16);
    let volume = repo::volume(&repo::open(dir.path()), &options("fsdp=2,tensor=2"), VolumeOptions::default());
    let files = listing(&volume);
    for path in [
        "dev3/layers/scanned/wq",
        "dev0/layers/1/w_down",
        "full/embed",
        "full/final_norm",
        "full/lm_head",
        "full/layers/scanned/attn_norm",
        "safetensors/dev3.safetensors",
        "hf/config.json",
        "hf/model-00002-of-00002.safetensors",
        "hf/model.safetensors.index.json",
        ".ckfs/manifest.json",
        ".ckfs/stats.json",
        ".ckfs/metrics",
        ".ckfs/config.toml",
        ".ckfs/plan.txt",
    ] {
        assert!(files.contains_key(path), "{path} is not among {:#?}", files.keys());
    }
    let link = volume.resolve("mesh/fsdp=1,tensor=0").unwrap();
    assert_eq!(link.kind, NodeKind::Symlink);
    assert_eq!(volume.read_link(link.ino).unwrap(), b"../dev2");
    assert_eq!(
        ckfs::volume::Nodes::xattr(&volume, files["dev3/layers/scanned/wq"], b"user.ckfs.shape").unwrap(),
        b"[2,6,16]"
    );
    assert_eq!(
        ckfs::volume::Nodes::xattr(&volume, files["dev3/layers/scanned/wq"], b"user.ckfs.offset").unwrap(),
        b"[0,18,0]"
    );
    let spec = ckfs::volume::Nodes::xattr(&volume, files["dev3/layers/scanned/wq"], b"user.ckfs.spec").unwrap();
    assert_eq!(String::from_utf8(spec).unwrap(), r#"[null,["tensor","fsdp"],null]"#);
}

#[test]
fn parents_and_names_agree() {
    let dir = repo::llama(2, DType::BF16);
    let volume = repo::volume(&repo::open(dir.path()), &options("fsdp=2"), VolumeOptions::default());
    for (path, ino) in listing(&volume) {
        assert_eq!(volume.resolve(&path).unwrap().ino, ino);
        let mut depth = 0;
        let mut at = ino;
        while at != Ino::ROOT {
            at = ckfs::volume::Nodes::parent(&volume, at).unwrap();
            depth += 1;
        }
        assert_eq!(depth, path.split('/').count(), "{path}");
    }
}

#[test]
fn safetensors_files_are_valid_and_hold_the_raw_files() {
    let dir = repo::llama(2, DType::F32);
    for unscanned in [false, true] {
        let options = ViewOptions { unscanned, dtype: Some(DType::F16), ..options("fsdp=3") };
        let volume = repo::volume(&repo::open(dir.path()), &options, VolumeOptions::default());
        for device in 0..3 {
            let ino = volume.resolve(&format!("safetensors/dev{device}.safetensors")).unwrap().ino;
            let bytes = repo::read(&volume, ino, 0, 1 << 24);
            let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(parsed.names().len(), if unscanned { 2 + 2 * 9 } else { 2 + 9 });
            for (name, tensor) in parsed.tensors() {
                let raw = volume.resolve(&format!("dev{device}/{}", name.replace('.', "/"))).unwrap().ino;
                assert_eq!(tensor.data(), repo::read(&volume, raw, 0, 1 << 24), "{name}");
            }
        }
    }
}

/// A header probe causes the kernel to read 1 MiB, of which only a little may be fetched.
#[test]
fn data_of_large_files_begins_after_the_header_probe() {
    let dir = tempfile::tempdir().unwrap();
    let rows = [repo::row("w", DType::F32, &[8192, 1024]), repo::row("v", DType::BF16, &[77])];
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    // Of 32 and of 11 MiB.
    for (mesh, header_bytes) in [("", 768 << 10), ("fsdp=3", 4096)] {
        let volume = repo::volume(&repo::open(dir.path()), &options(mesh), VolumeOptions::default());
        let ino = volume.resolve("safetensors/dev0.safetensors").unwrap().ino;
        let size = usize::try_from(volume.attr(ino).unwrap().size_bytes).unwrap();
        let header = repo::read(&volume, ino, 0, header_bytes);
        let json_bytes = u64::from_le_bytes(*header.first_chunk().unwrap());
        assert_eq!(json_bytes, header_bytes as u64 - 8);
        let counters = volume.engine().counters();
        assert_eq!([Path::Contiguous, Path::Tiles].map(|path| counters.fetched_bytes(path)), [0, 0]);
        let rest = repo::read(&volume, ino, header_bytes as u64, size);
        let whole = [header, rest].concat();
        assert_eq!(whole.len(), size);
        let parsed = safetensors::SafeTensors::deserialize(&whole).unwrap();
        for (name, tensor) in parsed.tensors() {
            let raw = volume.resolve(&format!("dev0/{name}")).unwrap().ino;
            assert!(tensor.data() == repo::read(&volume, raw, 0, size), "{name} for {mesh:?}");
        }
        assert!(repo::read(&volume, ino, 5, size) == whole[5..], "in one read");
        assert!(materialized(&volume, "safetensors/dev0.safetensors", ino).unwrap() == whole);
    }
}

#[test]
fn hf_is_the_repository_itself_unless_values_change() {
    let dir = repo::llama(2, DType::F32);
    let checkpoint = repo::open(dir.path());
    let plain = repo::volume(&checkpoint, &options(""), VolumeOptions::default());
    for (path, ino) in listing(&plain).into_iter().filter(|(path, _)| path.starts_with("hf/")) {
        let original = fs::read(dir.path().join(path.strip_prefix("hf/").unwrap())).unwrap();
        assert_eq!(repo::read(&plain, ino, 0, 1 << 24), original, "{path}");
    }
    let cast = ViewOptions { dtype: Some(DType::BF16), ..options("") };
    let cast = repo::volume(&checkpoint, &cast, VolumeOptions::default());
    let bytes = repo::read(&cast, cast.resolve("hf/model-00001-of-00002.safetensors").unwrap().ino, 0, 1 << 24);
    let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(parsed.tensors().iter().all(|(_, tensor)| tensor.dtype() == safetensors::Dtype::BF16));
    let text = repo::read(&cast, cast.resolve("hf/config.json").unwrap().ino, 0, 1 << 24);
    let config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
    let text = repo::read(&cast, cast.resolve("hf/model.safetensors.index.json").unwrap().ino, 0, 1 << 24);
    let index: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(index["metadata"]["total_size"], 2 * (40 * 16 + 16 + 2 * (16 * (24 * 2 + 12 * 2 + 36 * 3) + 32)));
}

/// Long texts are generated as they are read: every handle returns the same bytes in every span.
#[test]
fn long_texts_are_the_same_for_every_handle() {
    let dir = repo::llama(2, DType::F32);
    let volume = repo::volume(&repo::open(dir.path()), &options("fsdp=3"), VolumeOptions::default());
    for path in ["dcp/.metadata", ".ckfs/manifest.json"] {
        let attr = volume.resolve(path).unwrap();
        let size = usize::try_from(attr.size_bytes).unwrap();
        let read = |handle, offset, len| {
            let mut found = Vec::new();
            let mut reply = |part: Served<'_>| {
                found = part.to_vec().unwrap();
                ckfs::source::Replied::new()
            };
            volume.read(attr.ino, handle, offset, len, &mut reply).map(drop).unwrap();
            found
        };
        let [a, b] = [(); 2].map(|()| volume.open(attr.ino).unwrap().handle);
        let first = read(a, 0, size);
        assert_eq!(first.len(), size, "{path}");
        volume.release(attr.ino, a);
        assert_eq!(read(b, 0, size), first, "{path}");
        assert_eq!(read(b, 100, size), first[100..], "{path}");
        assert_eq!(read(b, 7, 50), first[7..57], "{path}");
        assert!(read(b, attr.size_bytes + 1, size).is_empty(), "{path}");
        volume.release(attr.ino, b);
        assert_eq!(repo::read(&volume, attr.ino, 0, size), first, "{path}");
    }
}

/// A process that goes on with a mount gets reads of files that the process before it has opened. They have the same bytes; what a
/// reader has begun of a generated file is an error.
#[test]
fn a_handle_of_another_process_is_served_or_is_an_error() {
    let dir = repo::llama(2, DType::F32);
    let volume = || repo::volume(&repo::open(dir.path()), &options("fsdp=2"), VolumeOptions::default());
    let (before, after) = (volume(), volume());
    assert_eq!(identity::of_kept(&before), identity::of_kept(&after));
    assert!(identity::of_kept(&before).is_some());
    let other = repo::volume(&repo::open(dir.path()), &options("fsdp=4"), VolumeOptions::default());
    assert_ne!(identity::of_kept(&before), identity::of_kept(&other));
    let quantized = ViewOptions { quantize: Some(Quantize::Int8Channel), ..options("fsdp=2") };
    let [one, another] = [(); 2].map(|()| repo::volume(&repo::open(dir.path()), &quantized, VolumeOptions::default()));
    assert_eq!(identity::of_kept(&one), identity::of_kept(&another));
    assert_ne!(identity::of_kept(&one), identity::of_kept(&before));
    after.succeed(1 << 40);
    let read = |volume: &Volume, ino, handle, offset| {
        let mut found = Vec::new();
        let mut reply = |part: Served<'_>| {
            found = part.to_vec().unwrap();
            ckfs::source::Replied::new()
        };
        volume.read(ino, handle, offset, 4096, &mut reply).map(|_| ()).map_err(|failure| failure.error).map(|()| found)
    };
    let paths =
        ["dev1/embed", "safetensors/dev0.safetensors", "hf/config.json", ".ckfs/manifest.json", ".ckfs/config.toml"];
    let inodes = paths.map(|path| before.resolve(path).unwrap().ino);
    // The numbers of both processes begin alike, so that each is that of several files.
    let opened = [(); 5].map(|()| inodes.map(|ino| (ino, before.open(ino).unwrap().handle))).concat();
    let own = inodes.map(|ino| (ino, after.open(ino).unwrap().handle));
    for (ino, handle) in opened.iter().chain(&own) {
        let expected = repo::read(&before, *ino, 5, 4096);
        assert_eq!(read(&after, *ino, *handle, 5).unwrap(), expected);
        // For a moment both serve: the later one's handles come to the earlier one too.
        assert_eq!(read(&before, *ino, *handle, 5).unwrap(), expected);
        after.release(*ino, *handle);
    }
    assert_eq!(read(&after, own[0].0, own[0].1, 5), Err(FsError::Invalid), "an own handle that is closed");
    let stats = before.resolve(".ckfs/stats.json").unwrap().ino;
    let handle = before.open(stats).unwrap().handle;
    assert_eq!(read(&after, stats, handle, 5), Err(FsError::Io));
    let begun = read(&after, stats, handle, 0).unwrap();
    assert_eq!(read(&after, stats, handle, 5).unwrap()[..50], begun[5..55]);
}

#[test]
fn a_changed_source_is_an_error_and_other_files_are_not_affected() {
    let dir = repo::llama(2, DType::F32);
    let volume = repo::volume(&repo::open(dir.path()), &options(""), VolumeOptions::default());
    let first = dir.path().join("model-00001-of-00002.safetensors");
    let length = fs::metadata(&first).unwrap().len();
    let embed = volume.resolve("full/embed").unwrap().ino;
    let open = volume.open(embed).unwrap();
    fs::OpenOptions::new().write(true).open(&first).unwrap().set_len(length / 2).unwrap();
    let failure = volume.read(embed, open.handle, 0, 100, &mut |_| panic!("changed bytes")).unwrap_err();
    assert!(failure.replied.is_none());
    assert!(volume.open(embed).is_err(), "what has changed is not opened");
    let late = volume.resolve("full/layers/1/w_down").unwrap().ino;
    assert_eq!(repo::read(&volume, late, 0, 1 << 20), expected(&volume, late));
    let stats = repo::read(&volume, volume.resolve(".ckfs/stats.json").unwrap().ino, 0, 1 << 20);
    let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
    assert_eq!(stats["poisoned_sources"], 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any span is the slice of the whole, with any cache and number of workers; any split concatenates to the whole.
    #[test]
    fn any_span_is_a_slice_of_the_whole(
        starts in proptest::collection::vec((0u64..40_000, 0usize..9_000), 24),
        cache in prop_oneof![Just(0usize), Just(4096), Just(64 << 20)],
        workers in 0usize..3,
        dtype in prop_oneof![Just(None), Just(Some(DType::BF16)), Just(Some(DType::F64)), Just(Some(DType::F8E4M3))],
        mesh in prop_oneof![Just("fsdp=4"), Just("fsdp=2,tensor=2"), Just("tensor=5")],
    ) {
        thread_local! {
            static DIR: tempfile::TempDir = repo::llama(3, DType::F32);
        }
        let checkpoint = DIR.with(|dir| repo::open(dir.path()));
        let options = ViewOptions { dtype, ..options(mesh) };
        let engine = EngineOptions { tile_cache_bytes: cache, workers, ..EngineOptions::default() };
        let volume = repo::volume(&checkpoint, &options, VolumeOptions { engine, ..VolumeOptions::default() });
        for path in ["dev1/layers/scanned/wo", "dev0/layers/scanned/w_gate", "safetensors/dev2.safetensors"] {
            let ino = volume.resolve(path).unwrap().ino;
            let whole = repo::read(&volume, ino, 0, 1 << 24);
            for (start, len) in &starts {
                let from = usize::try_from(*start).unwrap().min(whole.len());
                let part = repo::read(&volume, ino, *start, *len);
                prop_assert_eq!(&part, &whole[from..(from + len).min(whole.len())], "{} {} {}", path, start, len);
            }
        }
    }
}

/// 12 matrices of 192 KiB, cast to 96 KiB each.
fn wide(cache_bytes: usize) -> (tempfile::TempDir, Volume) {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<_> = (0..12).map(|number| repo::row(&format!("w{number}"), DType::F32, &[192, 256])).collect();
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let options = ViewOptions { dtype: Some(DType::BF16), ..options("fsdp=4") };
    let engine = EngineOptions { tile_cache_bytes: cache_bytes, workers: 0, ..EngineOptions::default() };
    let volume = repo::volume(&repo::open(dir.path()), &options, VolumeOptions { engine, ..VolumeOptions::default() });
    (dir, volume)
}

/// With more readers than the cache has room for, readers take turns: a tile in use is not computed again and again.
#[test]
fn readers_in_turns_fetch_each_byte_once() {
    for cache_bytes in [0, 256 << 10, 1 << 30] {
        let (_dir, volume) = wide(cache_bytes);
        let files: Vec<Ino> = (0..12).map(|n| volume.resolve(&format!("full/w{n}")).unwrap().ino).collect();
        let handles: Vec<_> = files.iter().map(|ino| volume.open(*ino).unwrap().handle).collect();
        let mut contents = vec![Vec::new(); files.len()];
        for start in (0..96 << 10).step_by(8 << 10) {
            for ((ino, handle), content) in files.iter().zip(&handles).zip(&mut contents) {
                volume
                    .read(*ino, *handle, start, 8 << 10, &mut |bytes| {
                        content.extend(bytes.to_vec().unwrap());
                        ckfs::source::Replied::new()
                    })
                    .map(drop)
                    .unwrap();
            }
        }
        for (ino, content) in files.iter().zip(&contents) {
            assert_eq!(content, &expected(&volume, *ino));
        }
        let fetched = volume.engine().counters().fetched_bytes(Path::Tiles);
        assert_eq!(fetched, 12 * (192 << 10), "with a cache of {cache_bytes} bytes");
        assert_eq!(volume.engine().held().tiles, 0, "what was handed out whole is not kept");
    }
}

/// A reader that has bytes finds them in the counters: they are counted before the answer is sent.
#[test]
fn bytes_are_counted_before_the_reply() {
    let check = |volume: &Volume, path: &str, way: Path| {
        let counters = volume.engine().counters();
        let ino = volume.resolve(path).unwrap().ino;
        let opened = volume.open(ino).unwrap();
        let before = counters.served_bytes(way);
        let mut reported = None;
        let mut reply = |bytes: Served<'_>| {
            reported = Some((bytes.len() as u64, counters.served_bytes(way) - before));
            ckfs::source::Replied::new()
        };
        volume.read(ino, opened.handle, 0, 64, &mut reply).map(drop).unwrap();
        assert_eq!(reported, Some((64, 64)), "{path}: bytes, and how many of them were counted");
    };
    // Without a cache tiles are computed for each read.
    for cache_bytes in [0, 1 << 30] {
        let (_dir, volume) = wide(cache_bytes);
        check(&volume, "full/w0", Path::Tiles);
        check(&volume, "safetensors/dev0.safetensors", Path::Generated);
    }
    let dir = repo::llama(2, DType::BF16);
    let volume = repo::volume(&repo::open(dir.path()), &options("fsdp=2"), VolumeOptions::default());
    check(&volume, "dev0/embed", Path::Contiguous);
    check(&volume, "hf/model-00001-of-00002.safetensors", Path::Identical);
}

/// An open file keeps its tiles and tilings, however many files are opened meanwhile.
#[test]
fn an_open_file_stays_cached() {
    let (_dir, volume) = wide(1 << 30);
    let first = volume.resolve("full/w0").unwrap().ino;
    let handle = volume.open(first).unwrap().handle;
    let mut half = Vec::new();
    let mut reply = |bytes: Served<'_>| {
        half.extend(bytes.to_vec().unwrap());
        ckfs::source::Replied::new()
    };
    volume.read(first, handle, 0, 48 << 10, &mut reply).map(drop).unwrap();
    for path in listing(&volume).values() {
        for _ in 0..8 {
            let opened = volume.open(*path).unwrap();
            volume.release(*path, opened.handle);
        }
    }
    assert_eq!([half, repo::read(&volume, first, 48 << 10, 48 << 10)].concat(), expected(&volume, first));
    assert_eq!(volume.engine().counters().fetched_bytes(Path::Tiles), 192 << 10);
}

#[test]
fn tensor_files_are_read_directly_where_asked() {
    let dir = repo::llama(2, DType::F32);
    let checkpoint = repo::open(dir.path());
    let orbax_only = Allow::Matching(vec![Pattern::parse("orbax/*").unwrap()]);
    for (direct, orbax, other) in [(Allow::Nothing, false, false), (Allow::All, true, true), (orbax_only, true, false)]
    {
        let volume = repo::volume(&checkpoint, &options(""), VolumeOptions { direct, ..VolumeOptions::default() });
        let is_direct = |path: &str| {
            let ino = volume.resolve(path).unwrap().ino;
            matches!(volume.open(ino).unwrap().access, Access::Direct)
        };
        assert_eq!(is_direct("orbax/0/items/embed/0.0"), orbax);
        assert_eq!(is_direct("full/embed"), other);
        assert_eq!(is_direct("safetensors/dev0.safetensors"), other);
        assert!(!is_direct("hf/config.json") && is_direct(".ckfs/stats.json"));
    }
}

#[test]
fn the_first_open_of_a_chunk_of_orbax_of_dcp_and_of_untransformed_bytes_is_direct() {
    let dir = tempfile::tempdir().unwrap();
    let rows = [repo::row("large", DType::F32, &[512, 1024]), repo::row("small", DType::F32, &[64])];
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let checkpoint = repo::open(dir.path());
    for (direct_once, dtype) in [(true, None), (false, None), (true, Some(DType::BF16))] {
        let options = ViewOptions { dtype, ..options("") };
        let volume = repo::volume(&checkpoint, &options, VolumeOptions { direct_once, ..VolumeOptions::default() });
        let opens = |path: &str| {
            let ino = volume.resolve(path).unwrap().ino;
            [(); 3].map(|()| matches!(volume.open(ino).unwrap().access, Access::Once))
        };
        assert_eq!(opens("orbax/0/items/large/0.0"), [direct_once, false, false]);
        assert_eq!(opens("orbax/0/items/small/0"), [false; 3], "the page cache of a small file costs little");
        let is_untransformed = dtype.is_none();
        assert_eq!(opens("full/large"), [direct_once && is_untransformed, false, false]);
        assert_eq!(opens("npy/dev0/large.npy"), [direct_once && is_untransformed, false, false]);
        assert_eq!(opens("safetensors/dev0.safetensors"), [false; 3], "its tensors are read one by one, and again");
        assert_eq!(opens("orbax/0/items/large/.zarray"), [false; 3]);
        assert_eq!(opens("dcp/__0_0.distcp"), [false; 3], "any number of ranks may read an item");
        assert_eq!(opens("dcp/.metadata"), [false; 3]);
        let buffer = |path: &str| volume.resolve(path).unwrap().buffer_bytes;
        assert_eq!(
            ["dcp/__0_0.distcp", "npy/dev0/large.npy"].map(buffer),
            [4096; 2],
            "the parts before the data are small"
        );
        assert_eq!(["full/large", "safetensors/dev0.safetensors"].map(buffer), [1 << 20; 2]);
    }
    for (mesh, direct_once, is_once) in
        [("fsdp=2", true, true), ("fsdp=2", false, false), ("dp_replicate=2", true, false)]
    {
        let volume_options = VolumeOptions { direct_once, ..VolumeOptions::default() };
        let volume = repo::volume(&checkpoint, &options(mesh), volume_options);
        let ino = volume.resolve("dcp/__0_0.distcp").unwrap().ino;
        let opens = [(); 2].map(|()| matches!(volume.open(ino).unwrap().access, Access::Once));
        assert_eq!(opens, [is_once, false], "{mesh}: one rank of fsdp reads an item, and both replicas");
    }
}

#[test]
fn a_file_that_was_closed_is_materialized_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<_> = (0..12).map(|number| repo::row(&format!("w{number}"), DType::F32, &[192, 256])).collect();
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let options = ViewOptions { dtype: Some(DType::BF16), ..options("fsdp=4") };
    let checkpoint = repo::open(dir.path());
    let copies = tempfile::tempdir().unwrap();
    let in_directory = |directory: &std::path::Path| {
        let materialize = Materialize::Dir(directory.to_owned());
        let mut volume = repo::volume(&checkpoint, &options, VolumeOptions { materialize, ..VolumeOptions::default() });
        volume.enable_materialization().map(|()| volume)
    };
    let volume = in_directory(copies.path()).unwrap();
    volume.started(Ok(()));
    let (tell, told) = std::sync::mpsc::channel();
    volume.on_change(Some(Box::new(move || tell.send(()).unwrap())));
    let mut inodes = Vec::new();
    for path in ["full/w1", "safetensors/dev2.safetensors", "npy/dev3/w11.npy", "dev1/w0"] {
        let ino = volume.resolve(path).unwrap().ino;
        inodes.push(ino);
        let bytes = repo::read(&volume, ino, 0, 1 << 24);
        let started = std::time::Instant::now();
        let copy = loop {
            let opened = volume.open(ino).unwrap();
            volume.release(ino, opened.handle);
            match opened.access {
                Access::Passthrough(copy) => break copy,
                Access::Cached | Access::Direct | Access::Once | Access::Materialize => {
                    assert!(started.elapsed().as_secs() < 60, "{path} is not materialized");
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        let mut copied = vec![0; bytes.len() + 1];
        assert_eq!(copy.read_at(&mut copied, 0).unwrap(), bytes.len());
        assert_eq!(copied[..bytes.len()], bytes, "{path}");
        let uncached = volume.open_uncached(ino).unwrap();
        assert!(matches!(uncached.access, Access::Passthrough(_)), "{path}: O_DIRECT uses a complete file");
    }
    let counters = volume.engine().counters();
    // A file is counted just after it becomes available.
    let started = std::time::Instant::now();
    while counters.materialized_files.load(std::sync::atomic::Ordering::Relaxed) < 4 {
        assert!(started.elapsed().as_secs() < 60);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    for _ in 0..inodes.len() {
        told.recv_timeout(std::time::Duration::from_mins(1)).unwrap();
    }
    let mut superseded = volume.changed_files();
    superseded.sort_unstable();
    inodes.sort_unstable();
    assert_eq!(superseded, inodes, "pages of the kernel that no open needs any more");
    assert_eq!(volume.changed_files(), [], "they are named once");
    assert_eq!(fs::read_dir(copies.path()).unwrap().count(), 0, "the files have no names");
    let uncached = volume.resolve("full/w0").unwrap().ino;
    for _ in 0..20 {
        let opened = volume.open_uncached(uncached).unwrap();
        volume.release(uncached, opened.handle);
        assert!(matches!(opened.access, Access::Cached));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(counters.materialized_files.load(std::sync::atomic::Ordering::Relaxed), 4, "O_DIRECT starts nothing");
    assert!(in_directory(std::path::Path::new("/proc")).is_err());
}

/// A llama whose larger files are materialized in several parts.
fn large(dtype: DType) -> tempfile::TempDir {
    let (hidden, inner, layers) = (512, 640, 4);
    let mut rows = vec![
        repo::row("model.embed_tokens.weight", dtype, &[1000, hidden]),
        repo::row("lm_head.weight", dtype, &[1000, hidden]),
        repo::row("model.norm.weight", dtype, &[hidden]),
    ];
    for layer in 0..layers {
        for (name, extents) in [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![hidden / 2, hidden]),
            ("self_attn.v_proj", vec![hidden / 2, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            rows.push(repo::row(&format!("model.layers.{layer}.{name}.weight"), dtype, &extents));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 1000, "tie_word_embeddings": false});
    repo::write_repo(dir.path(), &[&rows[..9], &rows[9..]], &config);
    dir
}

/// A file of a volume that is about to be materialized in a disk file, treated as one in memory.
fn materializing(volume: &Volume, path: &str, ino: Ino) -> (Arc<PreparedFile>, Arc<fs::File>, Arc<Materializing>) {
    let file = Arc::new(PreparedFile::new(path.to_owned(), volume.image(ino).unwrap().unwrap()));
    let target = Arc::new(tempfile::tempfile().unwrap());
    target.set_len(file.len_bytes()).unwrap();
    let pieces = Materializing::new(volume.engine(), &file, MaterializeTarget::Memory(Arc::clone(&target))).unwrap();
    (file, target, Arc::new(pieces))
}

/// Materializes a file, and waits for it.
fn materialized(volume: &Volume, path: &str, ino: Ino) -> Result<Vec<u8>, MaterializeError> {
    let (file, target, pieces) = materializing(volume, path, ino);
    let (done, outcome) = std::sync::mpsc::channel();
    pieces.make_all(move |result| done.send(result).unwrap());
    outcome.recv_timeout(std::time::Duration::from_mins(1)).unwrap()?;
    let mut bytes = vec![0; usize::try_from(file.len_bytes()).unwrap()];
    target.read_exact_at(&mut bytes, 0).unwrap();
    Ok(bytes)
}

#[test]
fn materialized_files_equal_the_reference() {
    for (source, layout, mesh, workers) in [
        (DType::BF16, "maxtext", "fsdp=2,tensor=2", 3),
        (DType::F32, "maxtext", "fsdp=2", 0),
        (DType::F32, "canonical", "fsdp=3", 5),
        (DType::BF16, "canonical", "tensor=2", 1),
    ] {
        let dir = large(source);
        let layout = repo::layout(layout);
        let options = ViewOptions { layout, dtype: Some(DType::BF16), ..options(mesh) };
        let engine = EngineOptions { tile_cache_bytes: 64 << 20, workers, ..EngineOptions::default() };
        let checkpoint = repo::open(dir.path());
        let volume = repo::volume(&checkpoint, &options, VolumeOptions { engine, ..VolumeOptions::default() });
        let mut parts = 0;
        for (path, ino) in listing(&volume) {
            let Ok(Some(image)) = volume.image(ino) else { continue };
            if !["full", "dev1", "npy/dev0", "orbax", "safetensors"].iter().any(|top| path.starts_with(top)) {
                continue;
            }
            parts += image.len_bytes() >> 20;
            let bytes = materialized(&volume, &path, ino).unwrap();
            let read = repo::read(&volume, ino, 0, bytes.len() + 1);
            assert!(bytes == read, "{path} from {source} for {mesh}");
            // The reference is slow, and what one device has is cut from what `full` has.
            if only_view(&volume, ino).is_some() && !path.starts_with("full") {
                assert!(bytes == expected(&volume, ino), "{path} from {source} for {mesh}, by the reference");
            }
        }
        assert!(parts > 20, "only {parts} MiB");
    }
}

#[test]
fn a_file_of_a_changed_source_is_not_materialized() {
    let dir = large(DType::F32);
    let options = ViewOptions { dtype: Some(DType::BF16), ..options("fsdp=2") };
    let volume = repo::volume(&repo::open(dir.path()), &options, VolumeOptions::default());
    let ino = volume.resolve("full/embed").unwrap().ino;
    assert!(materialized(&volume, "full/embed", ino).is_ok());
    let file = fs::OpenOptions::new().write(true).open(dir.path().join("model-00001-of-00002.safetensors")).unwrap();
    file.set_len(4096).unwrap();
    assert!(matches!(materialized(&volume, "full/embed", ino), Err(MaterializeError::Read(_))));
    let short = MaterializeTarget::Memory(Arc::new(tempfile::tempfile().unwrap()));
    let file = Arc::new(PreparedFile::new("embed".into(), volume.image(ino).unwrap().unwrap()));
    assert!(Materializing::new(volume.engine(), &file, short).is_err(), "a target that is too short");
    // A target on a disk is written by system calls, so that a full disk is an error.
    let full =
        MaterializeTarget::Disk(Arc::new(fs::OpenOptions::new().read(true).write(true).open("/dev/full").unwrap()));
    let dir = large(DType::F32);
    let other = repo::volume(&repo::open(dir.path()), &options, VolumeOptions::default());
    let ino = other.resolve("full/embed").unwrap().ino;
    let file = Arc::new(PreparedFile::new("embed".into(), other.image(ino).unwrap().unwrap()));
    let pieces = Materializing::new(other.engine(), &file, full).unwrap();
    assert!(matches!(pieces.make_here(), Err(MaterializeError::Room(_))));
}

/// Readers during the materialization of a file get its bytes, wait only for these, and nothing is fetched twice.
#[test]
fn readers_of_a_file_in_materialization_share_its_pieces() {
    for (layout, path, workers) in [
        ("canonical", "safetensors/dev0.safetensors", 2),
        ("canonical", "safetensors/dev0.safetensors", 0),
        ("maxtext", "safetensors/dev1.safetensors", 3),
        ("canonical", "pt/dev1.pt", 2),
    ] {
        let dir = large(DType::F32);
        let options = ViewOptions { layout: repo::layout(layout), dtype: Some(DType::BF16), ..options("fsdp=2") };
        let engine = EngineOptions { workers, ..EngineOptions::default() };
        let checkpoint = repo::open(dir.path());
        let new = || repo::volume(&checkpoint, &options, VolumeOptions { engine, ..VolumeOptions::default() });
        let (plain, volume) = (new(), new());
        let ino = volume.resolve(path).unwrap().ino;
        let expected = repo::read(&plain, ino, 0, 1 << 28);
        let (file, target, pieces) = materializing(&volume, path, ino);
        let counters = volume.engine().counters();
        let fetched = || [Path::Tiles, Path::Contiguous].map(|path| counters.fetched_bytes(path)).iter().sum::<u64>();
        let read = |start: u64, end: u64| {
            let mut found = Vec::new();
            let mut reply = |bytes: &[u8]| {
                found.extend_from_slice(bytes);
                ckfs::source::Replied::new()
            };
            assert!(pieces.read(start, end, &mut reply).is_some(), "{path} {start}..{end}");
            assert!(
                found == expected[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()],
                "{path} {start}..{end}"
            );
        };
        let len = file.len_bytes();
        assert!(len > 6 << 20);
        // If only the ends of a file are read, no other piece is computed.
        read(len - 1000, len);
        read(0, 1 << 20);
        if layout == "canonical" {
            assert!(fetched() <= 2 * (3 << 20), "{path}: {} bytes for both ends", fetched());
        }
        let (done, outcome) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for first in 0..3_u64 {
                let read = &read;
                scope.spawn(move || {
                    let starts = (0..len).step_by(300_000).collect::<Vec<_>>();
                    for start in starts.iter().rev().skip(usize::try_from(first).unwrap()).step_by(3) {
                        read(*start, (start + 400_000).min(len));
                    }
                });
            }
            pieces.make_all(move |result| done.send(result).unwrap());
        });
        outcome.recv_timeout(std::time::Duration::from_mins(1)).unwrap().unwrap();
        let mut made = vec![0; expected.len()];
        target.read_exact_at(&mut made, 0).unwrap();
        assert!(made == expected, "{path}");
        read(5, len - 3);
        let source: u64 = file
            .image()
            .segments()
            .iter()
            .map(|segment| match segment {
                Segment::View(view) => view.shape().elements() * 4,
                Segment::Bytes(_) | Segment::Spaces(_) => 0,
            })
            .sum();
        assert_eq!(fetched(), source, "{path}: each byte once");
    }
}

/// A reader meets the failure of a piece when it reads without materialization; the caller that requested the whole file
/// gets the failure once.
#[test]
fn a_reader_meets_the_failure_of_a_piece_without_materialization() {
    let dir = large(DType::F32);
    let options = ViewOptions { dtype: Some(DType::BF16), ..options("fsdp=2") };
    let volume = repo::volume(&repo::open(dir.path()), &options, VolumeOptions::default());
    let path = "safetensors/dev0.safetensors";
    let ino = volume.resolve(path).unwrap().ino;
    let (file, _target, pieces) = materializing(&volume, path, ino);
    assert!(pieces.read(0, 1 << 20, &mut |_| ckfs::source::Replied::new()).is_some());
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        fs::OpenOptions::new().write(true).open(dir.path().join(shard)).unwrap().set_len(4096).unwrap();
    }
    assert!(pieces.read(0, 1 << 20, &mut |_| panic!("changed bytes")).is_none(), "read before the change");
    assert!(pieces.read(2 << 20, 3 << 20, &mut |_| panic!("changed bytes")).is_none());
    let (done, outcome) = std::sync::mpsc::channel();
    pieces.make_all(move |result| done.send(result).unwrap());
    assert!(outcome.recv_timeout(std::time::Duration::from_mins(1)).unwrap().is_err());
    assert!(volume.engine().read(&file, 2 << 20, 100, &mut |_| panic!("changed bytes")).is_err());
}
