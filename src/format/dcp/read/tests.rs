//! Directories that torch and this crate wrote, and damaged ones.

use std::collections::BTreeMap;

use ckfs_tensor::{Region, Shape, to_usize};

use super::*;
use crate::{
    dcp::write::Writer,
    hexadecimal::bytes_of,
    torch::{read::TorchArchive, state::is_allowed},
};

fn directory(name: &str) -> BTreeMap<String, Vec<u8>> {
    let text = include_str!("../../../../tests/fixtures/formats/torch.json");
    let fixtures: serde_json::Value = serde_json::from_str(text).unwrap();
    let files = fixtures[name].as_object().unwrap();
    files.iter().map(|(path, hex)| (path.clone(), bytes_of(hex.as_str().unwrap()))).collect()
}

fn segment<'a>(files: &'a BTreeMap<String, Vec<u8>>, state: &DcpState, segment: &DcpSegment) -> &'a [u8] {
    let DcpSegment { file, offset, len } = *segment;
    &files[&state.files[file as usize]][to_usize(offset)..to_usize(offset + len)]
}

#[test]
fn a_checkpoint_of_two_processes_is_read() {
    let files = directory("dcp");
    let state = DcpState::parse(&files[METADATA]).unwrap();
    let rows: Vec<_> = state.tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
    let expected: [(&str, DType, &[u64]); 3] =
        [("model.w", DType::F32, &[5, 3]), ("model.b", DType::BF16, &[4]), ("optim.lr", DType::F32, &[])];
    assert_eq!(rows, expected);
    assert_eq!(state.objects.iter().map(|o| o.name.as_str()).collect::<Vec<_>>(), ["optim.step", "optim.names"]);
    assert!(state.paths.contains(&("model.w".to_owned(), vec!["model".to_owned(), "w".to_owned()])));
    let mut found = Vec::new();
    for chunk in &state.tensors[0].chunks {
        let bytes = segment(&files, &state, &chunk.segment);
        let mut archive = TorchArchive::new(bytes.len() as u64, is_allowed);
        archive.supply(vec![bytes.to_vec()]).unwrap();
        let saved = archive.into_opened().expect("two KiB are one request").contents().unwrap().tensors.remove(0);
        assert_eq!((&saved.tensor.shape, saved.tensor.dtype), (&chunk.sizes, DType::F32));
        assert_eq!((saved.tensor.name.as_str(), saved.tensor.strides.as_slice()), ("", &[3, 1][..]));
        let span = saved.span();
        found.extend_from_slice(&bytes[to_usize(span.start)..to_usize(span.end)]);
    }
    let expected: Vec<u8> = (0..15_u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_checkpoint_of_safetensors_files_is_read() {
    let files = directory("safetensors");
    let headers: Vec<(&str, Header)> = files
        .iter()
        .map(|(path, bytes)| (path.as_str(), Header::parse_file(bytes, bytes.len() as u64).unwrap()))
        .collect();
    let state = DcpState::of_safetensors(headers.iter().map(|(path, header)| (*path, header))).unwrap();
    let rows: Vec<_> = state.tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice(), t.chunks.len())).collect();
    let expected: [(&str, &[u64], usize); 2] = [("w", &[5, 3], 2), ("b", &[4], 1)];
    assert_eq!(rows, expected);
    assert_eq!(state.tensors[0].chunks[1].offsets, [3, 0]);
    let found: Vec<u8> =
        state.tensors[0].chunks.iter().flat_map(|chunk| segment(&files, &state, &chunk.segment).to_vec()).collect();
    assert_eq!(found, (0..15_u8).flat_map(|n| f32::from(n).to_le_bytes()).collect::<Vec<u8>>());
    // A plain file holds whole tensors; twice the same tensor is two chunks of it.
    let plain = crate::safetensors::write_header([("w", DType::F32, &[5, 3][..])], &[], 8).unwrap();
    let plain = Header::parse_file(&plain.bytes, plain.bytes.len() as u64 + 60).unwrap();
    let state = DcpState::of_safetensors([("a", &plain), ("b", &plain)]).unwrap();
    assert_eq!((state.tensors[0].shape.as_slice(), state.tensors[0].chunks.len()), (&[5, 3][..], 2));
    let other = crate::safetensors::write_header([("w", DType::F16, &[5, 3][..])], &[], 8).unwrap();
    let other = Header::parse_file(&other.bytes, other.bytes.len() as u64 + 30).unwrap();
    let error = DcpState::of_safetensors([("a", &plain), ("b", &other)]).unwrap_err().to_string();
    assert_eq!(error, "tensor \"w\": F32 of 2 axes in one file, F16 of 2 axes in another");
    let error = DcpState::of_safetensors([("../a", &plain)]).unwrap_err().to_string();
    assert!(error.starts_with("file \"../a\": expected a path inside the checkpoint"), "{error}");
    for info in ["{}", "[]", "{\"w\":{\"saved_offsets\":[0]}}", "{\"w\":{\"saved_offsets\":[18446744073709551615,0]}}"]
    {
        let entries = [("w", DType::F32, &[5, 3][..])];
        let file = crate::safetensors::write_header(entries, &[(SHARDING_INFO, info)], 8).unwrap();
        let header = Header::parse_file(&file.bytes, file.bytes.len() as u64 + 60).unwrap();
        let error = DcpState::of_safetensors([("a", &header)]).unwrap_err().to_string();
        assert!(error.contains(": expected "), "{info}: {error}");
    }
}

/// Metadata as this crate writes it, of one tensor with these chunks, of which `stored` are in a file.
fn written(chunks: &[[(u64, u64); 2]], stored: &[[(u64, u64); 2]], path: &str) -> Vec<u8> {
    let writer = Writer::new(1, [DType::BF16]).unwrap();
    let shape = Shape::try_new(&[4, 6]).unwrap();
    let whole = Shape::try_new(&[40, 60]).unwrap();
    let region = |chunk: &[(u64, u64); 2]| Region::within(&whole, &chunk.map(|(start, end)| start..end)).unwrap();
    let mut bytes = Vec::new();
    bytes.extend(&writer.head);
    writer.file(0, path, &mut bytes);
    bytes.extend(&writer.begin);
    writer.tensor(0, "t", DType::BF16, &shape, &mut bytes);
    for chunk in chunks {
        writer.chunk(&region(chunk), &mut bytes);
    }
    bytes.extend(&writer.end_tensor);
    bytes.extend(&writer.begin_segments);
    for (number, chunk) in stored.iter().enumerate() {
        let segment = DcpSegment { file: 0, offset: 100 * number as u64, len: 100 };
        writer.segment(0, &region(chunk), number as u64, segment, &mut bytes);
    }
    bytes.extend(&writer.end);
    bytes
}

const LEFT: [(u64, u64); 2] = [(0, 4), (0, 3)];
const RIGHT: [(u64, u64); 2] = [(0, 4), (3, 6)];

#[test]
fn what_this_crate_writes_is_read() {
    let state = DcpState::parse(&written(&[LEFT, RIGHT], &[LEFT, RIGHT], "__0_0.distcp")).unwrap();
    assert_eq!(state.files, ["__0_0.distcp"]);
    let [tensor] = state.tensors.as_slice() else { panic!("{state:?}") };
    assert_eq!((tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()), ("t", DType::BF16, &[4, 6][..]));
    assert_eq!(tensor.chunks[1].offsets, [0, 3]);
    assert_eq!(tensor.chunks[1].segment, DcpSegment { file: 0, offset: 100, len: 100 });
}

#[test]
fn what_is_no_tensor_is_described_without_chunks() {
    let writer = Writer::new(0, []).unwrap();
    let mut bytes = Vec::new();
    bytes.extend(&writer.head);
    bytes.extend(&writer.begin);
    let objects = [("optim.groups", 0, 1 << 40), ("step", 1 << 40, 7)];
    for (name, ..) in &objects {
        writer.object(name, &mut bytes);
    }
    bytes.extend(&writer.begin_segments);
    for (name, at, len) in &objects {
        writer.object_segment(name, "o.distcp", (*at, *len), &mut bytes);
    }
    bytes.extend(&writer.end);
    let state = DcpState::parse(&bytes).unwrap();
    assert_eq!((state.files.as_slice(), state.tensors.len()), (&["o.distcp".to_owned()][..], 0));
    let object = |(name, offset, len): (&str, u64, u64)| DcpObject {
        name: name.to_owned(),
        segment: DcpSegment { file: 0, offset, len },
    };
    assert_eq!(state.objects, objects.map(object));
}

#[test]
fn chunks_and_segments_must_agree() {
    let error = |chunks: &[_], stored: &[_], path: &str| {
        DcpState::parse(&written(chunks, stored, path)).unwrap_err().to_string()
    };
    assert_eq!(error(&[LEFT, RIGHT], &[LEFT], "f"), "tensor \"t\": the chunk at [0, 3] is in no file");
    assert_eq!(error(&[LEFT], &[LEFT, RIGHT], "f"), "\"t\": 1 stored segments belong to no chunk");
    assert_eq!(error(&[LEFT], &[LEFT, LEFT], "f"), "tensor \"t\" is described twice");
    let outside = [(0, 4), (3, 7)];
    let expected = "tensor \"t\": a chunk of shape [4, 4] at [0, 3] is outside shape [4, 6]";
    assert_eq!(error(&[LEFT, outside], &[LEFT, outside], "f"), expected);
    for path in ["/f", "../f", "a/../f", "", "a//f"] {
        assert!(error(&[LEFT], &[LEFT], path).contains("expected a path inside the checkpoint"), "{path}");
    }
}

#[test]
fn other_classes_are_refused_by_name() {
    let whole = written(&[LEFT], &[LEFT], "f");
    let text = b"ctorch.serialization\n_get_layout";
    let at = whole.windows(text.len()).position(|window| window == text).unwrap();
    let bytes = [&whole[..at], b"cposix\nsystem", &whole[at + text.len()..]].concat();
    let error = DcpState::parse(&bytes).unwrap_err().to_string();
    assert!(error.contains("posix.system is not on the list"), "{error}");
    for (module, name) in [("torch", "load"), ("builtins", "eval"), (CLASSES, "os"), ("pathlib", "Path")] {
        assert!(!is_allowed(module, name), "{module}.{name}");
    }
}

#[test]
fn damaged_metadata_never_panics() {
    for whole in [written(&[LEFT, RIGHT], &[LEFT, RIGHT], "f"), directory("dcp").remove(METADATA).unwrap()] {
        for at in 0..whole.len() {
            assert!(DcpState::parse(&whole[..at]).is_err(), "cut to {at}");
            for byte in [0, 1, b'.', b'h', b't', b'R', b'(', b'N', 0x80, 0x94, 0xff, whole[at] ^ 1] {
                let mut bytes = whole.clone();
                bytes[at] = byte;
                drop(DcpState::parse(&bytes));
            }
        }
    }
}
