//! Arrays that tensorstore wrote, and what is done to them.

use std::collections::BTreeMap;

use ckfs_tensor::{PerAxis, to_usize};
use serde_json::{Value, json};

use super::*;
use crate::FormatError;
use crate::hexadecimal::bytes_of;

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    zarr: u64,
    metadata: String,
    chunks: BTreeMap<String, String>,
    content: String,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("../../../../tests/fixtures/formats/zarr.json")).unwrap()
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

fn parse(version: u64, metadata: &str) -> Result<Array, FormatError> {
    if version == 2 { Array::parse_v2(metadata.as_bytes()) } else { Array::parse_v3(metadata.as_bytes()) }
}

/// All numbers below `counts`, in row-major order.
fn all(counts: &[u64]) -> Vec<PerAxis> {
    counts.iter().fold(vec![PerAxis::new()], |rows, count| {
        let next = |row: &PerAxis| (0..*count).map(|n| row.iter().copied().chain([n]).collect()).collect::<Vec<_>>();
        rows.iter().flat_map(next).collect()
    })
}

/// The whole array, element by element from its decoded chunks.
fn assemble(array: &Array, chunk: &mut dyn FnMut(&[u64]) -> Vec<u8>) -> Vec<u8> {
    let element_bytes = array.fill.len();
    let chunks: BTreeMap<PerAxis, Vec<u8>> =
        all(&array.grid()).into_iter().map(|numbers| (numbers.clone(), chunk(&numbers))).collect();
    let element = |index: PerAxis| {
        let numbers: PerAxis = index.iter().zip(&array.chunk).map(|(n, extent)| n / extent).collect();
        let inside = index.iter().zip(&array.chunk).fold(0, |at, (n, extent)| at * extent + n % extent);
        let at = to_usize(inside) * element_bytes;
        chunks[&numbers][at..at + element_bytes].to_vec()
    };
    all(array.shape.extents()).into_iter().flat_map(element).collect()
}

fn decoded(array: &Array, stored: Option<&[u8]>) -> Result<Vec<u8>, ChunkError> {
    let mut target = vec![0x5a; to_usize(array.chunk_bytes())];
    match stored {
        Some(stored) => {
            let by_definition = array.decode_by_definition(false, stored);
            array.decode(stored, &mut target)?;
            assert_eq!(by_definition.as_deref(), Ok(&*target));
            if array.codecs.can_stream() {
                let mut streamed = vec![0; target.len()];
                // A few bytes at a time.
                let pieces = std::io::BufReader::with_capacity(3, stored);
                assert_eq!(array.codecs.decode_stream(array.dtype, pieces, &mut streamed), Ok(()));
                assert_eq!(streamed, target);
            }
        }
        None => array.fill(&mut target),
    }
    Ok(target)
}

#[test]
fn arrays_of_tensorstore_are_decoded() {
    let mut read = 0;
    for Case { name, zarr, metadata, chunks, content } in cases() {
        if ["2 int4", "2 blosc"].contains(&name.as_str()) {
            continue;
        }
        let array = parse(zarr, &metadata).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut left = chunks.clone();
        let found = assemble(&array, &mut |numbers| {
            let key = array.key(numbers);
            assert_eq!(array.numbers(&key).unwrap().as_slice(), numbers, "{name}");
            let stored = left.remove(&key).map(|hex| bytes_of(&hex));
            decoded(&array, stored.as_deref()).unwrap_or_else(|error| panic!("{name} {key}: {error}"))
        });
        assert_eq!(found, bytes_of(&content), "{name}");
        assert!(left.is_empty(), "{name}: not in the grid: {left:?}");
        read += 1;
    }
    assert!(read >= 55, "{read}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refusal = |name: &str| {
        let Case { zarr, metadata, .. } = case(name);
        parse(zarr, &metadata).unwrap_err().to_string()
    };
    let blosc = "zarr: codec \"blosc\" is not supported: Orbax never writes it; write the checkpoint with zstd, or without compression";
    assert_eq!(refusal("2 blosc"), blosc);
    let int4 =
        "zarr: element type \"int4\" is not supported: it is stored one element to a byte, and no safetensors type is";
    assert_eq!(refusal("2 int4"), int4);
}

#[test]
fn plain_chunks_have_strides_and_others_have_none() {
    let plain = |name: &str| {
        let Case { zarr, metadata, .. } = case(name);
        let array = parse(zarr, &metadata).unwrap();
        array.codecs.plain(array.dtype, &array.chunk)
    };
    assert_eq!(plain("2 <i2").unwrap().as_slice(), [1]);
    assert_eq!(plain("2 columns").unwrap().as_slice(), [1, 2, 6]);
    assert_eq!(plain("3 dots").unwrap().as_slice(), [3, 1]);
    // Stored as [2, 2, 3] of axes 2, 0, 1, then as axes 0, 2, 1 of the array.
    assert_eq!(plain("3 transposed twice").unwrap().as_slice(), [6, 1, 3]);
    for name in ["2 zstd", "2 >f4", "3 big", "3 crc32c", "3 shards plain"] {
        assert_eq!(plain(name), None, "{name}");
    }
    let Case { zarr, metadata, chunks, .. } = case("3 transposed twice");
    let array = parse(zarr, &metadata).unwrap();
    let strides = array.codecs.plain(array.dtype, &array.chunk).unwrap();
    let stored = bytes_of(&chunks[&array.key(&[1, 1, 0])]);
    let whole = decoded(&array, Some(&stored)).unwrap();
    for (row, index) in all(&array.chunk).iter().enumerate() {
        let at: u64 = index.iter().zip(&strides).map(|(n, stride)| n * stride).sum();
        assert_eq!(stored[to_usize(at) * 2..][..2], whole[row * 2..][..2], "{index:?}");
    }
}

#[test]
fn inner_chunks_of_shards_are_found_and_decoded() {
    for name in
        ["3 shards as Orbax", "3 shards plain", "3 shards index at start", "3 shards big index", "3 shards with holes"]
    {
        let Case { zarr, metadata, chunks, .. } = case(name);
        let array = parse(zarr, &metadata).unwrap();
        let sharding = array.sharding().unwrap();
        for stored in chunks.values().map(|hex| bytes_of(hex)) {
            let whole = decoded(&array, Some(&stored)).unwrap();
            let index = sharding.index_span(stored.len() as u64).unwrap();
            let index = &stored[to_usize(index.start)..to_usize(index.end)];
            let spans = sharding.inner_spans(index, stored.len() as u64).unwrap();
            assert_eq!(spans.len(), all(&sharding.grid).len());
            for (numbers, span) in all(&sharding.grid).iter().zip(spans) {
                let elements: u64 = sharding.chunk.iter().product();
                let mut inner = vec![0; to_usize(elements) * array.fill.len()];
                match span {
                    Some(span) => {
                        array.decode_inner(&stored[to_usize(span.start)..to_usize(span.end)], &mut inner).unwrap();
                    }
                    None => array.fill(&mut inner),
                }
                let first: u64 = numbers
                    .iter()
                    .zip(&sharding.chunk)
                    .zip(&array.chunk)
                    .fold(0, |at, ((n, inner), outer)| at * outer + n * inner);
                let row_bytes = to_usize(sharding.chunk[1]) * array.fill.len();
                let at = to_usize(first) * array.fill.len();
                assert_eq!(inner[..row_bytes], whole[at..at + row_bytes], "{name} {numbers:?}");
            }
        }
    }
    let holes = case("3 shards with holes");
    let array = parse(3, &holes.metadata).unwrap();
    let stored = bytes_of(holes.chunks.values().next().unwrap());
    let sharding = array.sharding().unwrap();
    let span = sharding.index_span(stored.len() as u64).unwrap();
    let spans = sharding.inner_spans(&stored[to_usize(span.start)..], stored.len() as u64).unwrap();
    assert_eq!(spans.iter().flatten().count(), 1);
    assert_eq!(sharding.codecs.plain(array.dtype, &sharding.chunk).unwrap().as_slice(), [3, 1]);
}

/// Every length but the right one is an error, and every flipped bit that a checksum covers.
#[test]
fn damaged_chunks_are_errors_or_other_bytes() {
    for Case { name, zarr, metadata, chunks, .. } in cases() {
        let Ok(array) = parse(zarr, &metadata) else { continue };
        let Some(stored) = chunks.values().next().map(|hex| bytes_of(hex)) else { continue };
        for len in 0..stored.len() {
            assert!(decoded(&array, Some(&stored[..len])).is_err(), "{name}: cut to {len}");
        }
        // What no index refers to is allowed in a shard, if the index is not sought from the end.
        if name != "3 shards index at start" {
            assert!(decoded(&array, Some(&[&stored[..], &[0]].concat())).is_err(), "{name}: one more byte");
        }
        let is_covered = ["3 crc32c", "3 zstd of gzip and crc32c", "2 gzip", "3 gzip"].contains(&name.as_str());
        for place in 0..stored.len() {
            for bit in 0..8 {
                let mut bytes = stored.clone();
                bytes[place] ^= 1 << bit;
                let found = decoded(&array, Some(&bytes));
                // The header of gzip has bits that mean nothing here: time, level, system.
                let is_free = name.contains("gzip") && found == decoded(&array, Some(&stored));
                assert!(!is_covered || found.is_err() || is_free, "{name}: byte {place} bit {bit}");
            }
        }
    }
}

#[test]
fn an_index_is_checked_before_it_is_believed() {
    let Case { zarr, metadata, chunks, .. } = case("3 shards as Orbax");
    let array = parse(zarr, &metadata).unwrap();
    let sharding = array.sharding().unwrap();
    let stored = bytes_of(chunks.values().next().unwrap());
    let len = stored.len() as u64;
    let span = sharding.index_span(len).unwrap();
    assert_eq!(span, len - 20..len);
    let index = &stored[to_usize(span.start)..];
    for place in 0..index.len() {
        let mut damaged = index.to_vec();
        damaged[place] ^= 0x10;
        let error = sharding.inner_spans(&damaged, len).unwrap_err().to_string();
        assert!(error.contains("expected CRC-32C"), "byte {place}: {error}");
    }
    let pointing = |offset: u64, bytes: u64| {
        let mut index = [offset.to_le_bytes(), bytes.to_le_bytes()].concat();
        index.extend(crc32c::crc32c(&index).to_le_bytes());
        sharding.inner_spans(&index, len)
    };
    assert_eq!(pointing(0, len - 20), Ok(vec![Some(0..len - 20)]));
    assert_eq!(pointing(u64::MAX, u64::MAX), Ok(vec![None]));
    for (offset, bytes) in [(0, len - 19), (len, 0), (u64::MAX, 1), (1, u64::MAX)] {
        let error = pointing(offset, bytes).unwrap_err().to_string();
        assert!(error.starts_with("zarr shard: inner chunk 0: "), "{offset} {bytes}: {error}");
    }
    assert!(sharding.index_span(19).is_err());
}

#[test]
fn a_chunk_that_grows_beyond_its_shape_is_refused() {
    let array = parse(3, &case("3 zstd").metadata).unwrap();
    let packed = zstd::encode_all(&vec![0; 100 << 20][..], 1).unwrap();
    assert!(decoded(&array, Some(&packed)).unwrap_err().to_string().starts_with("zarr chunk: zstd: "));
    let short = zstd::encode_all(&[0; 11][..], 1).unwrap();
    let error = decoded(&array, Some(&short)).unwrap_err().to_string();
    assert_eq!(error, "zarr chunk: elements after zstd: expected 12 bytes, found 11");
    // The codec in the middle may not grow without end either.
    let array = parse(3, &case("3 zstd of gzip and crc32c").metadata).unwrap();
    assert!(decoded(&array, Some(&packed)).unwrap_err().to_string().starts_with("zarr chunk: zstd: "));
}

/// A valid description of version 3 with one member replaced.
fn with(member: &str, value: Value) -> Result<Array, FormatError> {
    let mut description = json!({
        "zarr_format": 3, "node_type": "array", "shape": [4, 6], "data_type": "int16", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    });
    description[member] = value;
    Array::parse_v3(description.to_string().as_bytes())
}

#[test]
fn descriptions_are_refused_by_what_is_wrong() {
    assert!(with("attributes", json!({"any": "thing"})).is_ok());
    assert!(with("dimension_names", json!(["x", null])).is_ok());
    assert!(with("new", json!({"must_understand": false})).is_ok());
    assert!(with("codecs", json!([{"name": "transpose", "configuration": {"order": [0, 1]}}, {"name": "bytes", "configuration": {"endian": "little"}}])).unwrap().codecs.order.is_none());
    let little = json!({"name": "bytes", "configuration": {"endian": "little"}});
    let shard = |chunk: Value, index: Value| json!([{"name": "sharding_indexed", "configuration": {"chunk_shape": chunk, "codecs": [little], "index_codecs": index}}]);
    let rows = [
        ("zarr_format", json!(2), "zarr_format: expected 3, found 2"),
        ("node_type", json!("group"), "expected \"array\", found \"group\""),
        ("new", json!(1), "member \"new\" is not supported"),
        ("storage_transformers", json!([{"name": "x"}]), "storage transformer"),
        ("data_type", json!("int4"), "element type \"int4\" is not supported: it is stored one element to a byte"),
        ("data_type", json!({"name": "datetime64"}), "element type"),
        ("shape", json!([4]), "chunk_shape: expected 1 extents of at least 1, found [2, 3]"),
        ("shape", json!([-1, 2]), "invalid value"),
        ("shape", json!([u64::MAX, 2]), "shape: expected elements that 64 bits can count"),
        ("shape", json!([1, 1, 1, 1, 1, 1, 1, 1, 1]), "at most 8 axes"),
        ("chunk_grid", json!({"name": "rectilinear"}), "chunk grid \"rectilinear\" is not supported"),
        ("chunk_grid", json!({"name": "regular", "configuration": {"chunk_shape": [0, 3]}}), "extents of at least 1"),
        (
            "chunk_grid",
            json!({"name": "regular", "configuration": {"chunk_shape": [1_u64 << 40, 3]}}),
            "chunks of at most",
        ),
        ("chunk_key_encoding", json!({"name": "default", "configuration": {"separator": "-"}}), "separator"),
        ("chunk_key_encoding", json!({"name": "suffix"}), "chunk key encoding \"suffix\" is not supported"),
        ("fill_value", json!(40000), "fill_value: expected an element of int16, found 40000"),
        ("codecs", json!([]), "expected a codec from elements to bytes, found none"),
        ("codecs", json!([{"name": "bytes"}]), "bytes: endian: expected \"little\" or \"big\", found none"),
        ("codecs", json!([little, little]), "one codec from elements to bytes"),
        ("codecs", json!([{"name": "zstd"}, little]), "expected \"bytes\" before a codec of bytes, found zstd"),
        ("codecs", json!([little, {"name": "blosc"}]), "codec \"blosc\" is not supported: Orbax never writes it"),
        ("codecs", json!([little, {"name": "zstd", "configuration": {"window": 3}}]), "expected settings among"),
        (
            "codecs",
            json!([{"name": "transpose", "configuration": {"order": [0, 0]}}, little]),
            "each of the 2 axes once",
        ),
        ("codecs", shard(json!([2, 2]), json!([little])), "extents that divide those of the shard, [2, 3]"),
        ("codecs", shard(json!([2, 3]), json!([little, {"name": "gzip"}])), "index of shards with codecs"),
        (
            "codecs",
            json!([shard(json!([2, 3]), json!([little]))[0], {"name": "gzip"}]),
            "a codec after sharding_indexed, gzip is not supported",
        ),
    ];
    for (member, value, expected) in rows {
        let error = with(member, value.clone()).unwrap_err().to_string();
        assert!(error.contains(expected), "{member} {value}: {error}");
    }
    let mut nested = json!([little]);
    for _ in 0..5 {
        nested = json!([{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 3], "codecs": nested, "index_codecs": [little]}}]);
    }
    assert!(with("codecs", nested).unwrap_err().to_string().contains("4 shards within each other"));
    let error = Array::parse_v2(&vec![b' '; METADATA_BYTES_MAX + 1]).unwrap_err().to_string();
    assert!(error.contains("expected at most"), "{error}");
}

#[test]
fn names_of_chunks_have_one_spelling() {
    let array = parse(3, &case("3 transposed").metadata).unwrap();
    assert_eq!((array.key(&[1, 0, 0]).as_str(), array.grid().as_slice()), ("c/1/0/0", &[2, 2, 1][..]));
    for name in ["1/0/0", "c/1/0", "c/1/0/0/0", "c/01/0/0", "c/2/0/0", "c/1//0", "c/1/0/0/", "c.1.0.0", "c/+1/0/0", ""]
    {
        assert_eq!(array.numbers(name), None, "{name}");
    }
    let key = |name: &str, numbers: &[u64]| {
        let Case { zarr, metadata, .. } = case(name);
        parse(zarr, &metadata).unwrap().key(numbers)
    };
    let rows = [("3 dots", "c.1.0"), ("3 v2 keys", "1/0"), ("2 zstd", "1.0"), ("2 slashes", "1/0")];
    for (name, expected) in rows {
        assert_eq!(key(name, &[1, 0]), expected);
    }
    assert_eq!((key("3 scalar", &[]), key("2 scalar", &[])), ("c".to_owned(), "0".to_owned()));
}

#[test]
fn damaged_descriptions_never_panic() {
    for Case { zarr, metadata, .. } in cases() {
        for at in 0..metadata.len() {
            drop(parse(zarr, metadata.get(..at).unwrap_or_default()));
            for byte in [b'0', b'9', b'"', b'[', b'-', b'}', 0xff] {
                let mut bytes = metadata.clone().into_bytes();
                bytes[at] = byte;
                drop(if zarr == 2 { Array::parse_v2(&bytes) } else { Array::parse_v3(&bytes) });
            }
        }
    }
}
