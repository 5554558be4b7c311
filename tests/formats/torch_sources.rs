//! Checkpoints of torch as sources: what two processes saved, and every kind of damage to it.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests panic, and their numbers are small")]

use std::{collections::BTreeMap, fs, path::Path};

use ckfs::{
    checkpoint::{Checkpoint, Container, OpenOptions, Storage},
    read::reference::evaluate,
    tensor::{Shape, SourceTensor, TensorId, View},
};

fn fixture() -> serde_json::Value {
    serde_json::from_str(include_str!("../fixtures/formats/torch.json")).unwrap()
}

fn bytes_of(hexadecimal: &serde_json::Value) -> Vec<u8> {
    let text = hexadecimal.as_str().unwrap();
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn files(name: &str) -> BTreeMap<String, Vec<u8>> {
    fixture()[name].as_object().unwrap().iter().map(|(path, hex)| (path.clone(), bytes_of(hex))).collect()
}

fn write(dir: &Path, files: &BTreeMap<String, Vec<u8>>) {
    for (path, bytes) in files {
        fs::write(dir.join(path), bytes).unwrap();
    }
}

fn open(path: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(path.to_str().unwrap(), &OpenOptions::default()).map_err(|error| error.to_string())
}

/// All bytes of a tensor, by definition.
fn content(checkpoint: &Checkpoint, id: TensorId) -> Vec<u8> {
    let info = checkpoint.tensor(id);
    let view = match info.storage {
        Storage::Mosaic(mosaic) => View::mosaic(mosaic.of_view()),
        Storage::Plain { .. } | Storage::Quantized(_) | Storage::Composed(_) => {
            View::source(SourceTensor { id, dtype: info.dtype, shape: Shape::try_new(info.shape).unwrap() })
        }
    };
    let read = |id: TensorId, span: std::ops::Range<u64>| {
        let info = checkpoint.tensor(id);
        let mut bytes = vec![0; (span.end - span.start) as usize];
        checkpoint.source().read_into(info.file(), info.span().start() + span.start, &mut bytes)?;
        Ok(bytes)
    };
    evaluate(&view, 0..view.bytes().unwrap(), read).unwrap()
}

fn contents(checkpoint: &Checkpoint) -> BTreeMap<String, Vec<u8>> {
    checkpoint.tensors().map(|(id, info)| (info.name.to_owned(), content(checkpoint, id))).collect()
}

fn counting(end: u8) -> Vec<u8> {
    (0..end).flat_map(|number| f32::from(number).to_le_bytes()).collect()
}

#[test]
fn a_directory_of_two_processes_is_a_source() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &files("dcp"));
    let checkpoint = open(dir.path()).unwrap();
    assert_eq!(checkpoint.container(), Container::Dcp);
    assert!(!checkpoint.is_repository());
    let found = contents(&checkpoint);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["model.b", "model.w"]);
    assert_eq!(found["model.w"], counting(15));
    let boxes = |name| checkpoint.tensor(checkpoint.find(name).unwrap()).mosaic().map(|mosaic| mosaic.ids().len());
    assert_eq!((boxes("model.w"), boxes("model.b")), (Some(2), None));
    let left_out: Vec<String> = checkpoint.opened.contents.left_out.iter().map(|left| left.name.clone()).collect();
    assert_eq!(left_out, ["optim.step", "optim.names", "optim.lr"]);
    let all = OpenOptions { training_state: true, ..OpenOptions::default() };
    let all = Checkpoint::open(dir.path().to_str().unwrap(), &all).unwrap();
    assert!(all.find("optim.lr").is_some());
}

#[test]
fn safetensors_that_say_their_offsets_are_one_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &files("safetensors"));
    let checkpoint = open(dir.path()).unwrap();
    assert_eq!(checkpoint.container(), Container::Dcp);
    assert_eq!(contents(&checkpoint)["w"], counting(15));
    // Without one of them, elements are missing.
    let second = files("safetensors").into_keys().next_back().unwrap();
    fs::remove_file(dir.path().join(second)).unwrap();
    match open(dir.path()) {
        // The extents come from the files, so that a missing end is not seen; a missing start is.
        Ok(checkpoint) => assert!(contents(&checkpoint).values().all(|bytes| bytes.len() < 60)),
        Err(error) => assert!(error.contains("are in no box"), "{error}"),
    }
}

#[test]
fn a_missing_file_and_a_cut_one_are_named() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &files("dcp"));
    let second = files("dcp").into_keys().next_back().unwrap();
    fs::remove_file(dir.path().join(&second)).unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(error.contains(&format!("names {second:?} for")) && error.contains("not there"), "{error}");
    fs::write(dir.path().join(&second), &files("dcp")[&second][..100]).unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(error.contains(&second) && error.contains("tensor \"model.w\""), "{error}");
}

#[test]
fn archives_of_all_protocols_are_sources_and_old_ones_are_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pt");
    let mut seen = Vec::new();
    for protocol in [2, 3, 4] {
        fs::write(&path, bytes_of(&fixture()[format!("archive {protocol}")])).unwrap();
        let checkpoint = open(&path).unwrap();
        assert_eq!(checkpoint.container(), Container::Torch);
        let found = contents(&checkpoint);
        // A transposed view and a row of one storage.
        let halves = |bytes: &[u8]| bytes.chunks(2).map(|pair| [pair[0], pair[1]]).collect::<Vec<_>>();
        let (a, b) = (halves(&found["a"]), halves(&found["b"]));
        assert_eq!(b, [a[0], a[3], a[1], a[4], a[2], a[5]]);
        assert_eq!(halves(&found["row"]), a[3..]);
        seen.push(found);
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]));
    fs::write(&path, bytes_of(&fixture()["legacy"])).unwrap();
    let error = open(&path).err().unwrap();
    assert!(error.contains("load it with torch.load and save it with torch.save"), "{error}");
}

/// Opens a damaged copy and reads what it shows. It may be refused or read; it may not panic or take for ever.
fn try_damaged(path: &Path) {
    if let Ok(checkpoint) = open(path) {
        for (id, info) in checkpoint.tensors() {
            assert!(info.bytes() < 1 << 20, "{} has {} bytes", info.name, info.bytes());
            content(&checkpoint, id);
        }
    }
}

#[test]
fn every_flipped_byte_and_every_cut_of_an_archive_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pt");
    let whole = bytes_of(&fixture()["archive 4"]);
    for at in 0..whole.len() {
        for bits in [0x01, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= bits;
            fs::write(&path, &bytes).unwrap();
            try_damaged(&path);
        }
        fs::write(&path, &whole[..at]).unwrap();
        assert!(open(&path).is_err(), "cut to {at}");
    }
}

#[test]
fn every_flipped_byte_of_a_directory_ends() {
    for name in ["dcp", "safetensors"] {
        let dir = tempfile::tempdir().unwrap();
        let files = files(name);
        write(dir.path(), &files);
        for (path, whole) in &files {
            let path = dir.path().join(path);
            for at in 0..whole.len() {
                let mut bytes = whole.clone();
                bytes[at] ^= if at % 2 == 0 { 0x01 } else { 0xff };
                fs::write(&path, &bytes).unwrap();
                try_damaged(dir.path());
                if at % 16 == 0 {
                    fs::write(&path, &whole[..at]).unwrap();
                    try_damaged(dir.path());
                }
            }
            fs::write(&path, whole).unwrap();
        }
    }
}

/// The opened checkpoint has the right bytes, or the error names all of these.
fn right_or_named(dir: &Path, right: &BTreeMap<String, Vec<u8>>, names: &[&str], what: &str) {
    match open(dir) {
        Ok(checkpoint) => assert!(contents(&checkpoint) == *right, "{what}: other bytes"),
        Err(error) => assert!(names.iter().all(|name| error.contains(name)), "{what}: {error}"),
    }
}

#[test]
fn files_that_are_cut_exchanged_or_lengthened_are_right_or_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = files("dcp");
    write(dir.path(), &files);
    let right = contents(&open(dir.path()).unwrap());
    let parts: Vec<&String> = files.keys().filter(|path| path.ends_with(".distcp")).collect();
    for path in files.keys() {
        let whole = &files[path];
        let names: &[&str] = if parts.contains(&path) { &[path, "tensor \"model."] } else { &[path] };
        for len in (0..whole.len()).step_by(5).chain([whole.len() - 1]) {
            fs::write(dir.path().join(path), &whole[..len]).unwrap();
            right_or_named(dir.path(), &right, names, &format!("{path} cut to {len}"));
        }
        fs::write(dir.path().join(path), [whole.as_slice(), b"more"].concat()).unwrap();
        right_or_named(dir.path(), &right, &[path], &format!("{path} longer"));
        fs::write(dir.path().join(path), vec![0; whole.len()]).unwrap();
        right_or_named(dir.path(), &right, names, &format!("{path} of zeros"));
        fs::write(dir.path().join(path), whole).unwrap();
    }
    fs::write(dir.path().join(parts[0]), &files[parts[1]]).unwrap();
    fs::write(dir.path().join(parts[1]), &files[parts[0]]).unwrap();
    right_or_named(dir.path(), &right, &["tensor \"model.w\"", parts[0]], "exchanged");
}

/// A safetensors file of one tensor that says where it is in the whole.
fn part(path: &Path, name: &str, dtype: safetensors::Dtype, shape: &[usize], bytes: &[u8], offsets: &str) {
    let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    let info = format!("{{\"{name}\": {{\"saved_offsets\": {offsets}}}}}");
    let metadata = [("DCP_SHARDING_INFO".to_owned(), info)].into();
    fs::write(path, safetensors::serialize([(name, view)], Some(metadata)).unwrap()).unwrap();
}

#[test]
fn parts_that_do_not_fit_each_other_are_named() {
    use safetensors::Dtype::F32;
    let dir = tempfile::tempdir().unwrap();
    part(&dir.path().join("a.safetensors"), "w", F32, &[3, 3], &counting(9), "[0, 0]");
    let second = |offsets: &str| part(&dir.path().join("b.safetensors"), "w", F32, &[2, 3], &counting(6), offsets);
    second("[3, 0]");
    let found = contents(&open(dir.path()).unwrap());
    assert_eq!(found["w"], [counting(9), counting(6)].concat());
    for (offsets, fault) in [("[2, 0]", "b.safetensors overlap"), ("[4, 0]", "elements [3..4, 0..3] are in no box")] {
        second(offsets);
        let error = open(dir.path()).err().unwrap();
        assert!(error.contains("tensor \"w\"") && error.contains(fault), "{error}");
    }
}

/// The files of the last ranks are missing: the tensor must not become shorter.
#[test]
fn missing_files_of_ranks_are_noticed() {
    use safetensors::Dtype::F32;
    let file = |dir: &Path, rank: usize, name: &str, more: &str| {
        let path = dir.join(format!("shard-{rank:05}-model-00001-of-00001.safetensors"));
        part(&path, name, F32, &[2, 3], &counting(6), &format!("[{}, 0]{more}", 2 * (rank - 1)));
    };
    let refused = |ranks: &[usize], name: &str, more: &str, config: Option<&str>| {
        let dir = tempfile::tempdir().unwrap();
        for rank in ranks {
            file(dir.path(), *rank, name, more);
        }
        if let Some(text) = config {
            fs::write(dir.path().join("config.json"), text).unwrap();
        }
        open(dir.path()).err().unwrap_or_default()
    };
    let embed = "model.embed_tokens.weight";
    let config = Some(r#"{"vocab_size": 8, "hidden_size": 3}"#);
    for (ranks, more, config, expected) in [
        (&[1, 2, 3, 4][..], "", config, ""),
        (&[1, 2, 3], "", config, "expected 8 rows by vocab_size in config.json, found 6"),
        (&[1, 2, 3, 4], ", \"global_shape\": [8, 3]", None, ""),
        (&[1, 2, 3], ", \"global_shape\": [8, 3]", None, "elements [6..8, 0..3] are in no box"),
        (&[1, 2, 3], ", \"global_shape\": [4, 3]", None, "global_shape"),
        (&[1, 3], "", None, "rank 2"),
    ] {
        let error = refused(ranks, embed, more, config);
        assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{ranks:?} {more}: {error}");
    }
    // A replica of a part is the same part.
    let dir = tempfile::tempdir().unwrap();
    for (name, offsets) in [("a", "[0, 0]"), ("b", "[2, 0]"), ("c", "[0, 0]"), ("d", "[2, 0]")] {
        part(&dir.path().join(format!("{name}.safetensors")), "w", F32, &[2, 3], &counting(6), offsets);
    }
    assert_eq!(contents(&open(dir.path()).unwrap())["w"], [counting(6), counting(6)].concat());
}

#[test]
fn codes_in_several_boxes_are_not_decoded_and_named() {
    use ckfs::plan::{Dequantize, Layout, Plan, ViewOptions};
    use safetensors::Dtype::{F8_E4M3, F32};
    let dir = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let codes: Vec<u8> = (0..16).map(|code| 0x30 + code).collect();
    part(&dir.path().join("a.safetensors"), name, F8_E4M3, &[2, 4], &codes[..8], "[0, 0]");
    part(&dir.path().join("b.safetensors"), name, F8_E4M3, &[2, 4], &codes[8..], "[2, 0]");
    for (file, offsets) in [("c", "[0, 0]"), ("d", "[1, 0]")] {
        let scale = format!("{name}_scale_inv");
        part(&dir.path().join(format!("{file}.safetensors")), &scale, F32, &[1, 1], &counting(1), offsets);
    }
    let checkpoint = open(dir.path()).unwrap();
    for wish in [Some(Dequantize::Own), None] {
        let dtype = wish.is_none().then_some(ckfs::tensor::DType::F32);
        for layout in [Layout::Hf, Layout::Canonical, Layout::Stored] {
            let options = ViewOptions { layout, dequantize: wish, dtype, ..ViewOptions::default() };
            let error = Plan::build(&checkpoint, &options).expect_err("codes are refused").to_string();
            assert!(error.contains(name) && error.contains("several boxes"), "{error}");
        }
    }
    // As stored they are shown.
    let plan = Plan::build(&checkpoint, &ViewOptions { layout: Layout::Hf, ..ViewOptions::default() }).unwrap();
    assert_eq!(plan.tensors.len(), 2);
    assert_eq!(contents(&checkpoint)[name], codes);
}

#[test]
fn what_is_no_checkpoint_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(error.contains("the directory is empty"), "{error}");
    let file = dir.path().join("model-q4.gguf");
    fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    for path in [dir.path(), &file] {
        let error = open(path).err().unwrap();
        assert!(error.contains("GGUF"), "{error}");
    }
    fs::write(dir.path().join("a.pt"), b"x").unwrap();
    fs::write(dir.path().join("b.pt"), b"x").unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(error.contains("give one of them: a.pt, b.pt"), "{error}");
}
