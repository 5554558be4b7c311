//! Averages of checkpoints, against sums that are made here one element at a time.

use std::{fs, path::Path, sync::Arc};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    format::safetensors::{DATA_ALIGNMENT, write_header},
    plan::ViewOptions,
    tensor::DType,
    volume::{FileSystem, Ino, VolumeOptions},
};
use half::{bf16, f16};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{
    repo::{files, read, volume},
    views::Choices,
};

const SHAPE: [u64; 2] = [6, 10];

type Rows = Vec<(&'static str, DType, Vec<u8>)>;

fn write(dir: &Path, rows: &Rows) {
    fs::create_dir_all(dir).unwrap();
    let header = write_header(rows.iter().map(|(name, dtype, _)| (*name, *dtype, &SHAPE[..])), &[], DATA_ALIGNMENT);
    let bytes = rows.iter().flat_map(|(.., bytes)| bytes.iter().copied()).collect();
    fs::write(dir.join("model.safetensors"), [header.unwrap().bytes, bytes].concat()).unwrap();
}

/// Numbers of many sizes and signs, some of them not finite.
fn number(choices: &mut Choices) -> f32 {
    let bits = u32::try_from(choices.below(1 << 32)).unwrap();
    if choices.below(30) == 0 { f32::from_bits(bits | 0x7f80_0000) } else { f32::from_bits(bits & 0xc3ff_ffff) }
}

fn rows(choices: &mut Choices) -> Rows {
    let count = usize::try_from(SHAPE.iter().product::<u64>()).unwrap();
    let numbers: Vec<f32> = (0..3 * count).map(|_| number(choices)).collect();
    vec![
        ("a", DType::BF16, numbers[..count].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()),
        (
            "b",
            DType::F16,
            numbers[count..2 * count].iter().flat_map(|x| f16::from_f32(*x / 1e6).to_le_bytes()).collect(),
        ),
        ("c", DType::F32, numbers[2 * count..].iter().flat_map(|x| x.to_le_bytes()).collect()),
        ("equal", DType::F32, (0..count).flat_map(|at| (0.1 * at as f32 + 0.3).to_le_bytes()).collect()),
        ("ids", DType::I32, (0..count).flat_map(|at| u32::try_from(at).unwrap().to_le_bytes()).collect()),
    ]
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
    }
}

fn same(dtype: DType, sum: f32, found: f32) -> bool {
    let rounded = match dtype {
        DType::BF16 => bf16::from_f32(sum).to_f32(),
        DType::F16 => f16::from_f32(sum).to_f32(),
        _ => sum,
    };
    rounded.to_bits() == found.to_bits() || rounded.is_nan() && found.is_nan()
}

/// Sources in a directory, the last one shown.
fn open(dir: &TempDir, weights: &[(usize, f32)]) -> Result<Checkpoint, String> {
    let place = |step: usize| dir.path().join(step.to_string()).to_str().unwrap().to_owned();
    let average = weights.iter().map(|(step, weight)| (place(*step), *weight)).collect();
    let options = OpenOptions { average, ..OpenOptions::default() };
    Checkpoint::open(&place(weights.last().unwrap().0), &options).map_err(|error| error.to_string())
}

#[test]
fn an_average_is_a_sum_in_the_order_of_its_terms() {
    let mut choices = Choices::new((1..5_000u32).map(|n| n.wrapping_mul(2_654_435_761) ^ n << 7).collect());
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<Rows> = (0..4).map(|_| rows(&mut choices)).collect();
    all.iter().enumerate().for_each(|(step, rows)| write(&dir.path().join(step.to_string()), rows));
    for weights in [
        vec![(0, 0.2), (1, 0.2), (2, 0.2), (3, 0.4)],
        vec![(3, 0.75), (1, 0.25)],
        vec![(0, -0.5), (2, 1.5)],
        vec![(2, 0.3), (2, 0.3), (0, 0.3)],
        vec![(1, 1.0 / 3.0), (0, 1.0 / 3.0), (2, 1.0 / 3.0)],
    ] {
        let checkpoint = Arc::new(open(&dir, &weights).unwrap());
        let sum: f32 = weights.iter().map(|(_, weight)| weight).sum();
        assert_eq!(checkpoint.warnings().len(), usize::from((sum - 1.0).abs() > 1e-3), "{:?}", checkpoint.warnings());
        let options = ViewOptions { layout: ckfs::plan::Layout::Stored, ..ViewOptions::default() };
        let volume = volume(&checkpoint, &options, VolumeOptions::default());
        let mut found = Vec::new();
        files(&volume as &dyn FileSystem, Ino::ROOT, "", &mut found);
        for (at, (name, dtype, bytes)) in all[0].iter().enumerate() {
            let ino = found.iter().find(|(path, _)| *path == format!("full/{name}")).unwrap().1;
            let bytes_found = read(&volume, ino, 0, bytes.len());
            if name.len() > 1 {
                assert_eq!(bytes_found, *bytes, "{name}");
                continue;
            }
            let terms: Vec<Vec<f32>> = weights.iter().map(|(step, _)| floats(*dtype, &all[*step][at].2)).collect();
            for (place, found) in floats(*dtype, &bytes_found).into_iter().enumerate() {
                let mut terms = terms.iter().zip(&weights).map(|(term, (_, weight))| weight * term[place]);
                let first = terms.next().unwrap();
                let sum = terms.fold(first, |sum, term| sum + term);
                assert!(same(*dtype, sum, found), "{name}[{place}] of {weights:?}: expected {sum}, found {found}");
            }
        }
    }
}

#[test]
fn what_cannot_be_averaged_is_refused_by_name() {
    let mut choices = Choices::new((1..3_000u32).map(|n| n.wrapping_mul(2_654_435_761)).collect());
    let dir = tempfile::tempdir().unwrap();
    let good = rows(&mut choices);
    write(&dir.path().join("0"), &good);
    let weights = [(1, 0.5), (0, 0.5)];
    let check = |change: &dyn Fn(&mut Rows), expected: &str| {
        let mut rows = good.clone();
        change(&mut rows);
        write(&dir.path().join("1"), &rows);
        let error = open(&dir, &weights).err().unwrap_or_else(|| panic!("opened, expected {expected}"));
        assert!(error.contains(expected), "{error}");
    };
    check(&|rows| rows[4].2[0] ^= 1, "tensor \"ids\": expected the same in each source of the average");
    check(&|rows| rows[0].0 = "other", "tensor \"a\": expected in each source of the average, found none in ");
    check(
        &|rows| rows[0].1 = DType::F16,
        "tensor \"a\": expected BF16 [6, 10] as in the others, found F16 [6, 10] in ",
    );
    check(&|rows| rows.truncate(3), "expected the 5 tensors of the others, found 3");
    fs::write(dir.path().join("0/config.json"), r#"{"rope_theta": 2, "eos_token_id": 1}"#).unwrap();
    check(
        &|_| fs::write(dir.path().join("1/config.json"), r#"{"rope_theta": 3}"#).unwrap(),
        "found another rope_theta",
    );
    let outside = OpenOptions { average: vec![("/elsewhere".to_owned(), 1.0)], ..OpenOptions::default() };
    let error = Checkpoint::open(dir.path().join("0").to_str().unwrap(), &outside).err().unwrap().to_string();
    assert!(error.contains("--average: expected one of the sources that are averaged"), "{error}");
}

/// Two arrays with equal chunks, and a chunk that neither has: what stands in its place is not equal.
#[test]
fn what_fills_holes_is_averaged_too() {
    let dir = tempfile::tempdir().unwrap();
    for (step, fill) in [(0, 1.0), (1, 3.0)] {
        let array = dir.path().join(step.to_string()).join("n");
        fs::create_dir_all(array.join("c/0")).unwrap();
        let leaf = json!({
            "key_metadata": [{"key": "n", "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": false},
        });
        let tree = json!({"tree_metadata": {"('n',)": leaf}, "use_ocdbt": false, "use_zarr3": true});
        fs::write(array.with_file_name("_METADATA"), tree.to_string()).unwrap();
        let description = json!({
            "zarr_format": 3, "node_type": "array", "shape": [4, 2], "data_type": "float32", "fill_value": fill,
            "attributes": {}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        });
        fs::write(array.join("zarr.json"), description.to_string()).unwrap();
        fs::write(array.join("c/0/0"), [7f32, 8.0, 9.0, 10.0].map(f32::to_le_bytes).concat()).unwrap();
    }
    let checkpoint = Arc::new(open(&dir, &[(0, 0.5), (1, 0.5)]).unwrap());
    let volume = volume(&checkpoint, &ViewOptions::default(), VolumeOptions::default());
    let mut found = Vec::new();
    files(&volume as &dyn FileSystem, Ino::ROOT, "", &mut found);
    let ino = found.iter().find(|(path, _)| path == "full/n").unwrap().1;
    assert_eq!(floats(DType::F32, &read(&volume, ino, 0, 32)), [7.0, 8.0, 9.0, 10.0, 2.0, 2.0, 2.0, 2.0]);
}
