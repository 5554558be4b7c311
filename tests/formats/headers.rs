//! The safetensors header against the official crate: it reads our output, we read its output, and we refuse what it
//! refuses. A broken input, of any kind, causes at most an error.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Instant;

use ckfs::{
    format::safetensors::{DATA_ALIGNMENT, Header, HeaderErrors, tensor_bytes, write_header},
    tensor::DType,
};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn file(json: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

fn parse(json: &str, data_bytes: usize) -> Result<Header, HeaderErrors> {
    let bytes = file(json, data_bytes);
    Header::parse_file(&bytes, bytes.len() as u64)
}

#[test]
fn accepted_headers() {
    let cases = [
        ("{}", 0, 0),
        (" \n\t {} \r\n ", 0, 0),
        (r#"{"__metadata__":{"format":"pt"}}"#, 0, 0),
        (r#"{"__metadata__":null}"#, 0, 0),
        (r#"{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4, 1),
        (r#"{"a":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}}"#, 0, 1),
        (r#"{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}"#, 4, 1),
        (r#"{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#, 3, 1),
        (r#"{"a":{"shape":[3],"more":{"x":[1,{}]},"data_offsets":[0,3],"dtype":"U8"}}"#, 3, 1),
        (
            r#"{"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]},"__metadata__":{"k":"v"},
               "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"e":{"dtype":"I64","shape":[0],"data_offsets":[3,3]}}"#,
            5,
            3,
        ),
        (r#"{"a\u0041\n\"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, 1),
    ];
    for (json, data_bytes, tensors) in cases {
        let header = parse(json, data_bytes).unwrap_or_else(|error| panic!("{json}: {error}"));
        assert_eq!(header.len(), tensors, "{json}");
    }
    let header = parse(cases[9].0, 5).unwrap();
    let start = 8 + cases[9].0.len() as u64;
    let found: Vec<_> =
        header.tensors().map(|tensor| (tensor.name, tensor.start - start, tensor.end - start)).collect();
    assert_eq!(found, [("a", 0, 3), ("e", 3, 3), ("b", 3, 5)], "in order of data");
    assert_eq!(header.metadata(), [("k".to_owned(), "v".to_owned())]);
    assert_eq!(parse(cases[10].0, 1).unwrap().tensors().next().unwrap().name, "aA\n\"");
}

#[test]
fn refused_headers() {
    let tensor = |dtype: &str, shape: &str, start: u64, end: u64| {
        format!(r#"{{"a.b":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
    };
    let cases: Vec<(String, usize, &str)> = vec![
        (String::new(), 0, "EOF"),
        ("[]".into(), 0, "expected a map of tensor names"),
        ("{}x".into(), 0, "trailing characters"),
        ("{}\0".into(), 0, "trailing characters"),
        (r#"{"a.b":{"dtype":"U8"}}"#.into(), 0, r#"tensor "a.b": missing field `shape`"#),
        (r#"{"a.b":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}"#.into(), 1, "duplicate field"),
        (r#"{"__metadata__":{"k":1}}"#.into(), 0, "expected a string"),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#.into(), 0, "__metadata__: \"k\" is there twice"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "duplicate field"),
        (tensor("U8", "[-1]", 0, 1), 1, "invalid value"),
        (tensor("U8", "[1.0]", 0, 1), 1, "invalid type"),
        (tensor("bfloat16", "[1]", 0, 2), 2, r#"tensor "a.b": unknown dtype "bfloat16""#),
        (tensor("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1), 1, "expected at most 8 axes, found 9"),
        (tensor("U8", "[4294967296,4294967296]", 0, 1), 1, "fits 64 bits"),
        (tensor("F64", "[4611686018427387904]", 0, 1), 1, "fits 64 bits"),
        (tensor("F4", "[3]", 0, 2), 2, "whole bytes"),
        (tensor("F32", "[2,3]", 0, 20), 20, r#"tensor "a.b": F32 of shape [2, 3]: expected 24 bytes, found offsets 0..20"#),
        (tensor("U8", "[1]", 1, 0), 0, "found offsets 1..0"),
        (tensor("U8", "[1]", 1, 2), 2, "expected its data to start at offset 0, found 1"),
        (tensor("U8", "[1]", 18_446_744_073_709_551_614, 18_446_744_073_709_551_615), 1, "expected its data to start"),
        (tensor("U8", "[4]", 0, 4), 5, "data: expected 4 bytes by the header, found 5 bytes in the file"),
        (tensor("U8", "[4]", 0, 4), 3, "expected 4 bytes by the header, found 3"),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#
                .into(),
            3,
            r#"tensor "b": expected its data to start at offset 2, found 1"#,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#
                .into(),
            2,
            r#"tensor "a": described twice"#,
        ),
    ];
    for (json, data_bytes, expected) in cases {
        let error = parse(&json, data_bytes).expect_err(&json).to_string();
        assert!(error.contains(expected), "{json}: {error}");
    }
    let nested = format!(r#"{{"a":{{"x":{}}}}}"#, "[".repeat(100_000));
    assert!(parse(&nested, 0).is_err(), "and the stack is not overrun");
    assert!(parse("{\"\u{e9}\": 1}", 0).is_err());
    assert!(Header::parse(b"{\"\xff\":1}", 100).unwrap_err().to_string().contains("utf-8"));
}

#[test]
fn refused_lengths() {
    let too_long = |found: u64| {
        format!(
            "header length: expected at most 100000000 bytes, found {found}: the file is damaged or not safetensors"
        )
    };
    let truncated = "header of 101 bytes in a file of 100 bytes: the file is truncated or not safetensors".to_owned();
    for (len, file_bytes, expected) in [
        (0, 7, "file of 7 bytes: expected at least 8".to_owned()),
        (u64::MAX, 100, too_long(u64::MAX)),
        (100_000_001, 1 << 40, too_long(100_000_001)),
        (93, 100, truncated),
    ] {
        assert_eq!(Header::json_bytes(len.to_le_bytes(), file_bytes).unwrap_err().to_string(), expected);
    }
    assert_eq!(Header::json_bytes(92_u64.to_le_bytes(), 100), Ok(92));
    for len in 0..8 {
        assert!(Header::parse_file(&vec![0; len], len as u64).is_err());
    }
}

#[test]
fn all_problems_are_reported_up_to_a_limit() {
    let tensors: Vec<String> =
        (0..100).map(|i| format!(r#""t{i}":{{"dtype":"X{i}","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1)).collect();
    let error = parse(&format!("{{{}}}", tensors.join(",")), 100).unwrap_err();
    assert_eq!((error.problems.len(), error.more), (20, 80));
    assert!(error.to_string().ends_with("and 80 more"));
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL)
}

/// A few tensors of a few whole bytes.
fn tensors() -> impl Strategy<Value = Vec<(String, DType, Vec<u64>)>> {
    let tensor = ("\\PC{0,12}|[a-z.\"\\\\\n]{1,9}", dtype(), prop::collection::vec(0_u64..5, 0..5));
    prop::collection::vec(tensor, 0..12).prop_map(|mut tensors| {
        for (_, dtype, shape) in &mut tensors {
            let elements = dtype.unit().elements;
            match shape.last_mut() {
                Some(last) => *last *= elements,
                None => shape.extend((elements > 1).then_some(elements)),
            }
        }
        tensors.sort();
        tensors.dedup_by(|left, right| left.0 == right.0);
        tensors
    })
}

fn entries(tensors: &[(String, DType, Vec<u64>)]) -> impl Iterator<Item = (&str, DType, &[u64])> {
    tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()))
}

/// Edits that keep most headers JSON: members that the format does not know, dtypes in other forms, repeated names.
const WORDS: &[(&str, &str)] = &[
    ("\"shape\"", "\"x\":null,\"shape\""),
    ("\"shape\"", "\"x\":[{},1.5,\"a\"],\"shape\""),
    ("\"shape\"", "\"x\":1e999,\"shape\""),
    ("\"shape\"", "\"x\":\"\\ud800\",\"shape\""),
    ("\"shape\"", "\"x\":NESTED,\"shape\""),
    ("\"shape\"", "\"dtype\":\"U8\",\"shape\""),
    ("\"BF16\"", "{\"BF16\":null}"),
    ("\"U8\"", "\"I8\""),
    ("\"F32\"", "\"F99\""),
    ("\"dtype\"", "\"dtypes\""),
    ("[", "[1,1,1,1,1,1,1,1,1,"),
    ("[", "[-0,"),
    ("}}", "},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"),
    ("}}", "},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":[\"U8\",[0],[0,0]]}"),
    ("\"__metadata__\":{", "\"__metadata__\":{\"format\":\"x\","),
    ("\"__metadata__\":{", "\"__metadata__\":null,\"m\":{"),
];

/// Stricter than the official crate only for repeated names and members and for the number of axes, never laxer.
fn agree(bytes: &[u8], ours: &Result<Header, HeaderErrors>) -> Result<(), TestCaseError> {
    match (ours, SafeTensors::deserialize(bytes)) {
        (Ok(header), Ok(theirs)) => {
            prop_assert_eq!(theirs.len(), header.len());
            let start = bytes.len() as u64 - header.tensors().last().map_or(0, |last| last.end - data_start(bytes));
            prop_assert_eq!(start, data_start(bytes));
            for tensor in header.tensors() {
                let view = theirs.tensor(tensor.name).unwrap();
                prop_assert_eq!(view.dtype().to_string(), tensor.dtype.code());
                prop_assert_eq!(view.data().len() as u64, tensor.end - tensor.start);
                prop_assert!(view.shape().iter().map(|extent| *extent as u64).eq(tensor.shape.iter().copied()));
                let place = view.data().as_ptr().addr() - bytes.as_ptr().addr();
                prop_assert_eq!(place as u64, tensor.start);
            }
        }
        (Ok(header), Err(error)) => prop_assert!(false, "{} tensors accepted, there: {error}", header.len()),
        (Err(errors), Ok(theirs)) => {
            let is_stricter = |problem: &String| {
                let problem = problem.clone();
                ["twice", "duplicate", "axes"].iter().any(|word| problem.contains(word))
            };
            let is_stricter = errors.problems.iter().any(is_stricter);
            prop_assert!(is_stricter, "{} tensors accepted there, here: {errors}", theirs.len());
        }
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

fn data_start(bytes: &[u8]) -> u64 {
    8 + u64::from_le_bytes(*bytes.first_chunk().unwrap())
}

#[test]
fn members_that_the_format_does_not_know_are_read_as_the_official_crate_reads_them() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let members: [(String, bool); 7] = [
        ("null".into(), true),
        (r#"{"a":[1,2.5,"x"]}"#.into(), true),
        (nested(100), true),
        (nested(200), false),
        ("1e999".into(), false),
        (r#""\ud800""#.into(), false),
        ("1 2".into(), false),
    ];
    for (member, is_accepted) in members {
        let json = format!(r#"{{"a":{{"dtype":"U8","more":{member},"shape":[3],"data_offsets":[0,3]}}}}"#);
        let bytes = file(&json, 3);
        assert_eq!(SafeTensors::deserialize(&bytes).is_ok(), is_accepted, "{json}");
        assert_eq!(parse(&json, 3).is_ok(), is_accepted, "{json}");
    }
    for more in ["", r#","more":1"#] {
        let json = format!(r#"{{"a":{{"dtype":{{"U8":null}},"shape":[3],"data_offsets":[0,3]{more}}}}}"#);
        assert_eq!(SafeTensors::deserialize(&file(&json, 3)).is_ok(), parse(&json, 3).is_ok(), "{json}");
    }
}

proptest! {
    #[test]
    fn written_headers_are_read_by_the_official_crate_and_by_us(
        tensors in tensors(),
        metadata in prop::collection::btree_map("\\PC{0,8}", "\\PC{0,8}", 0..4),
        alignment in prop::sample::select(vec![1, 8, 64, DATA_ALIGNMENT]),
        start in prop::sample::select(vec![0, 100, 1000, 70_000]),
    ) {
        let pairs: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let mut written = write_header(entries(&tensors), &pairs, alignment).unwrap();
        prop_assert_eq!(written.bytes.len() as u64 % alignment, 0);
        written.reach(start);
        let mut bytes = written.bytes;
        let header_bytes = start.max(bytes.len() as u64);
        bytes.resize(bytes.len() + usize::try_from(written.spaces).unwrap(), b' ');
        prop_assert_eq!(bytes.len() as u64, header_bytes);
        bytes.resize(bytes.len() + usize::try_from(written.data_bytes).unwrap(), 0);
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        prop_assert_eq!(theirs.len(), tensors.len());
        let (_, their_metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let theirs_map = their_metadata.metadata().clone().unwrap_or_default();
        prop_assert_eq!(theirs_map.into_iter().collect::<std::collections::BTreeMap<_, _>>(), metadata);
        let ours = Header::parse_file(&bytes, bytes.len() as u64).unwrap();
        let mut end = header_bytes;
        // Tensors without bytes may be listed in another order than written.
        for (name, dtype, shape) in &tensors {
            let view = theirs.tensor(name).unwrap();
            prop_assert_eq!(view.shape().iter().map(|extent| *extent as u64).collect::<Vec<_>>(), shape.clone());
            prop_assert_eq!(view.dtype().to_string(), dtype.code());
            let tensor = ours.tensors().find(|tensor| tensor.name == name).unwrap();
            prop_assert_eq!((tensor.dtype, tensor.shape), (*dtype, shape.as_slice()));
            prop_assert_eq!(tensor.start, end);
            end += tensor_bytes(*dtype, shape).unwrap();
            prop_assert_eq!(tensor.end, end);
        }
    }

    #[test]
    fn mutated_headers_never_panic_and_agree_with_the_official_crate(
        tensors in tensors(),
        words in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(WORDS)), 0..3),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..4),
    ) {
        let written = write_header(entries(&tensors), &[("format", "pt")], 8).unwrap();
        let mut json = String::from_utf8(written.bytes[8..].to_vec()).unwrap();
        for (place, (old, new)) in words {
            let places: Vec<usize> = json.match_indices(old).map(|found| found.0).collect();
            if !places.is_empty() {
                let place = *place.get(&places);
                json.replace_range(place..place + old.len(), &new.replace("NESTED", &"[".repeat(200)));
            }
        }
        let mut bytes = file(&json, usize::try_from(written.data_bytes).unwrap());
        for (place, byte, edit) in edits {
            if bytes.is_empty() {
                break;
            }
            let place = place.index(bytes.len());
            match edit {
                0 => bytes[place] = byte,
                1 => { bytes.remove(place); }
                2 => bytes.insert(place, byte),
                _ => bytes.truncate(place),
            }
        }
        let ours = Header::parse_file(&bytes, bytes.len() as u64);
        agree(&bytes, &ours)?;
    }
}

#[test]
fn files_of_the_official_crate_are_read() {
    let data = [7_u8; 24];
    let views = [
        ("x.weight", safetensors::Dtype::F32, vec![2, 3]),
        ("y", safetensors::Dtype::BF16, vec![12]),
        ("scalar", safetensors::Dtype::F64, vec![]),
    ]
    .map(|(name, dtype, shape)| {
        let len = if shape.is_empty() { 8 } else { 24 };
        (name, safetensors::tensor::TensorView::new(dtype, shape, &data[..len]).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    let header = Header::parse_file(&bytes, bytes.len() as u64).unwrap();
    assert_eq!(header.len(), 3);
    let x = header.tensors().find(|tensor| tensor.name == "x.weight").unwrap();
    assert_eq!((x.dtype, x.shape, x.end - x.start), (DType::F32, &[2, 3][..], 24));
}

#[test]
fn unwritable_headers_are_refused() {
    let refused = |entries: &[(&str, DType, &[u64])]| {
        write_header(entries.iter().copied(), &[], 4096).unwrap_err().problems.remove(0)
    };
    let twice: [(&str, DType, &[u64]); 2] = [("a", DType::U8, &[]), ("a", DType::U8, &[])];
    assert_eq!(refused(&twice), "tensor \"a\": described twice");
    assert_eq!(refused(&[("__metadata__", DType::U8, &[])]), "tensor \"__metadata__\": the name is reserved");
    assert!(refused(&[("a", DType::F4, &[1])]).contains("is not a number of whole bytes"));
    let long = "x".repeat(1 << 20);
    let names: Vec<String> = (0..100).map(|i| format!("{i}{long}")).collect();
    let error = write_header(names.iter().map(|name| (name.as_str(), DType::U8, &[][..])), &[], 1).unwrap_err();
    assert!(error.problems.len() == 1 && error.to_string().starts_with("header length: "), "{error}");
}

#[test]
fn headers_of_150_000_tensors_are_fast() {
    let names: Vec<String> =
        (0..150_000).map(|i| format!("model.layers.{}.mlp.experts.{}.gate_proj.weight", i / 800, i % 800)).collect();
    let start = Instant::now();
    let entries = names.iter().map(|name| (name.as_str(), DType::BF16, &[2048, 768][..]));
    let written = write_header(entries, &[("format", "pt")], DATA_ALIGNMENT).unwrap();
    let wrote = start.elapsed();
    let total = written.bytes.len() as u64 + written.data_bytes;
    let start = Instant::now();
    let header = Header::parse_file(&written.bytes, total).unwrap();
    println!(
        "150000 tensors, {} header bytes: written in {wrote:?}, read in {:?}",
        written.bytes.len(),
        start.elapsed()
    );
    assert_eq!(header.len(), names.len());
    // Seconds also on a busy machine; work that grows with the square would take hours.
    assert!(wrote.as_secs() < 120 && start.elapsed().as_secs() < 120);
}
