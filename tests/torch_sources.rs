//! Checkpoints of torch as sources: what two processes saved, and every kind of damage to it.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests panic, and their numbers are small")]

use std::{collections::BTreeMap, fs, path::Path};

use ckfs::{
    checkpoint::{Checkpoint, Container, OpenOptions, Storage},
    read::reference::evaluate,
    tensor::{Shape, SourceTensor, TensorId, View},
};

fn fixture() -> serde_json::Value {
    serde_json::from_str(include_str!("fixtures/formats/torch.json")).unwrap()
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
        Storage::Plain { .. } | Storage::Quantized(_) => {
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
    let boxes = |name| checkpoint.tensor(checkpoint.find(name).unwrap()).mosaic().map(|mosaic| mosaic.boxes());
    assert_eq!((boxes("model.w"), boxes("model.b")), (Some(2), None));
    let left_out: Vec<String> = checkpoint.left_out().iter().map(|left| left.name.clone()).collect();
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
    let error = open(dir.path()).unwrap_err();
    assert!(error.contains(&format!("names {second:?} for")) && error.contains("not there"), "{error}");
    fs::write(dir.path().join(&second), &files("dcp")[&second][..100]).unwrap();
    let error = open(dir.path()).unwrap_err();
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
    let error = open(&path).unwrap_err();
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

#[test]
fn what_is_no_checkpoint_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(error.contains("the directory is empty"), "{error}");
    let file = dir.path().join("model-q4.gguf");
    fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    for path in [dir.path(), &file] {
        let error = open(path).unwrap_err();
        assert!(error.contains("GGUF"), "{error}");
    }
    fs::write(dir.path().join("a.pt"), b"x").unwrap();
    fs::write(dir.path().join("b.pt"), b"x").unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(error.contains("give one of them: a.pt, b.pt"), "{error}");
}
