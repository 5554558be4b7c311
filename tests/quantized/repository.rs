//! Repositories of pseudo-random bytes, and the checks on each.

use std::{fs, ops::Range};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    format::safetensors::write_header,
    read::reference::evaluate,
    tensor::{DType, TensorId},
};
use half::{bf16, f16};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tensors of a repository, alternating between two files.
pub(crate) struct Repository {
    pub(crate) config: Value,
    pub(crate) modelopt: Option<Value>,
    /// Of the header of each file.
    pub(crate) metadata: Vec<(String, String)>,
    tensors: Vec<(String, DType, Vec<u64>, Vec<u8>)>,
}

/// An open repository.
pub(crate) struct Opened {
    pub(crate) checkpoint: Checkpoint,
    _dir: TempDir,
}

impl Repository {
    /// A model with dtype f16 and this `quantization_config`.
    pub(crate) fn new(quantization: Value) -> Self {
        let mut config = json!({"model_type": "llama", "dtype": "float16"});
        config["quantization_config"] = quantization;
        let plain = vec![("model.norm.weight".to_owned(), DType::BF16, vec![4], vec![0; 8])];
        Self { config, modelopt: None, metadata: Vec::new(), tensors: plain }
    }

    /// Adds a tensor with these bytes.
    pub(crate) fn bytes(mut self, name: &str, dtype: DType, extents: &[u64], bytes: Vec<u8>) -> Self {
        assert_eq!(dtype.bytes_of(extents.iter().product()), Some(bytes.len() as u64), "{name}");
        self.tensors.push((name.to_owned(), dtype, extents.to_vec(), bytes));
        self
    }

    /// Adds a tensor of noise, or of scales with all extremes if it is a float.
    pub(crate) fn noise(self, name: &str, dtype: DType, extents: &[u64]) -> Self {
        let seed = name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
        let count = extents.iter().product::<u64>() as usize;
        let bytes = match dtype {
            DType::F32 | DType::BF16 | DType::F16 => scales(seed, dtype, count),
            _ => noise(seed, dtype.bytes_of(count as u64).unwrap() as usize),
        };
        self.bytes(name, dtype, extents, bytes)
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|tensor| tensor.0 != name);
        assert_eq!(self.tensors.len() + 1, before, "{name} is there");
        self
    }

    /// The same tensor, stored in another way.
    pub(crate) fn instead(self, name: &str, dtype: DType, extents: &[u64]) -> Self {
        self.without(name).noise(name, dtype, extents)
    }

    pub(crate) fn try_open(&self) -> Result<Opened, String> {
        let dir = tempfile::tempdir().unwrap();
        let mut map = serde_json::Map::new();
        for part in 0..2 {
            let file = format!("model-{:05}-of-00002.safetensors", part + 1);
            let tensors: Vec<_> = self.tensors.iter().skip(part).step_by(2).collect();
            let rows = tensors.iter().map(|(name, dtype, extents, _)| (name.as_str(), *dtype, extents.as_slice()));
            let more = self.metadata.iter().map(|(key, text)| (key.as_str(), text.as_str()));
            let metadata: Vec<(&str, &str)> = more.chain([("format", "pt")]).collect();
            let mut bytes = write_header(rows, &metadata, 8).unwrap().bytes;
            bytes.extend(tensors.iter().flat_map(|tensor| tensor.3.iter().copied()));
            fs::write(dir.path().join(&file), bytes).unwrap();
            map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), json!(file))));
        }
        let write = |name: &str, value: &Value| fs::write(dir.path().join(name), value.to_string()).unwrap();
        write("model.safetensors.index.json", &json!({"metadata": {}, "weight_map": map}));
        write("config.json", &self.config);
        if let Some(modelopt) = &self.modelopt {
            write("hf_quant_config.json", modelopt);
        }
        let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default());
        checkpoint.map(|checkpoint| Opened { checkpoint, _dir: dir }).map_err(|error| error.to_string())
    }

    #[track_caller]
    pub(crate) fn open(&self) -> Opened {
        self.try_open().unwrap()
    }

    /// Asserts that opening fails with each of these texts.
    #[track_caller]
    pub(crate) fn is_refused(&self, expected: &[&str]) {
        let error = self.try_open().err().expect("refused");
        for expected in expected {
            assert!(error.contains(expected), "expected {expected:?} in {error}");
        }
    }

    /// Asserts that the repository opens and decodes nothing, with this text as the reason.
    #[track_caller]
    pub(crate) fn stays_raw(&self, method: &str, tensors: u64) {
        let opened = self.open();
        let found = opened.checkpoint.quantized();
        assert!(found.tensors.is_empty(), "{:?}", found.schemes);
        let said: Vec<(&str, u64)> =
            found.unsupported.iter().map(|of| (of.method.as_str(), of.codes.len() as u64)).collect();
        assert_eq!(said, [(method, tensors)]);
    }
}

impl Opened {
    /// The bytes of a stored tensor.
    pub(crate) fn stored(&self, name: &str) -> Vec<u8> {
        self.read(self.checkpoint.find(name).unwrap())
    }

    fn read(&self, id: TensorId) -> Vec<u8> {
        let info = self.checkpoint.tensor(id);
        let mut bytes = vec![0; info.span().len() as usize];
        self.checkpoint.source().read_into(info.file(), info.span().start(), &mut bytes).unwrap();
        bytes
    }

    /// Names of decoded tensors, sorted.
    pub(crate) fn decoded(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.checkpoint.quantized().tensors.iter().map(|tensor| &*tensor.name).collect();
        names.sort_unstable();
        names
    }

    /// Names of stored tensors that disappear when the repository is decoded, sorted.
    pub(crate) fn left_out(&self) -> Vec<&str> {
        let ids = self.checkpoint.quantized().left_out.iter();
        let mut names: Vec<&str> = ids.map(|id| self.checkpoint.tensor(*id).name).collect();
        names.sort_unstable();
        names
    }

    /// Asserts that the decoded tensor has this shape, the model's dtype, and in f32 the formula's values, element by element.
    #[track_caller]
    pub(crate) fn check(&self, name: &str, scheme: &str, shape: &[u64], formula: impl Fn(usize) -> f32) {
        let found = self.checkpoint.quantized();
        let tensor = found.tensors.iter().find(|tensor| *tensor.name == *name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!((tensor.scheme, tensor.dtype, tensor.shape().extents()), (scheme, DType::F16, shape), "{name}");
        assert!(found.schemes.iter().any(|summary| summary.scheme == scheme));
        let view = tensor.view().unwrap();
        let read = |id, span: Range<u64>| Ok(self.read(id)[span.start as usize..span.end as usize].to_vec());
        let bytes = evaluate(&view, 0..view.bytes().unwrap(), read).unwrap();
        let mut finite = 0;
        for (n, four) in bytes.chunks_exact(4).enumerate() {
            let (value, expected) = (f32_at(four, 0), formula(n));
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{name} {n}: {value:e}, by the formula {expected:e}");
            finite += usize::from(value.is_finite() && value != 0.0);
        }
        assert!(4 * finite > bytes.len() / 4, "{name}: too few plain numbers to tell anything");
    }
}

pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Scales of all kinds: ordinary ones, zeros, subnormals, the largest and smallest powers of two, infinity, NaN.
fn scales(seed: u64, dtype: DType, count: usize) -> Vec<u8> {
    let odd = [0.0, -0.0, 1e-45, -1e-40, 2f32.powi(127), 2f32.powi(-126), -3.5, f32::INFINITY, f32::NAN];
    let noise = noise(seed, 2 * count);
    let values = (0..count).map(|at| match at % 6 {
        5 => odd[(at / 6) % odd.len()],
        _ => (f32::from(noise[2 * at]) * 256.0 + f32::from(noise[2 * at + 1]) - 20_000.0) * 1.37e-4,
    });
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
    }
}

pub(crate) fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(bytes[4 * at..][..4].try_into().unwrap())
}

pub(crate) fn bf16_at(bytes: &[u8], at: usize) -> f32 {
    bf16::from_le_bytes(bytes[2 * at..][..2].try_into().unwrap()).to_f32()
}

pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes(bytes[2 * at..][..2].try_into().unwrap()).to_f32()
}

/// Field `place` of `width` bits of a little-endian word.
pub(crate) fn field_at(bytes: &[u8], word: usize, place: usize, width: usize) -> i32 {
    let word = u32::from_le_bytes(bytes[4 * word..][..4].try_into().unwrap());
    (word >> (place * width) & ((1 << width) - 1)) as i32
}

/// Code `n` of two per byte, the low one first.
pub(crate) fn nibble_at(bytes: &[u8], n: usize) -> u8 {
    bytes[n / 2] >> (4 * (n % 2)) & 15
}

/// The OCP float with a sign, two bits of exponent and one of mantissa.
pub(crate) fn e2m1(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
    let magnitude = if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f32.powi(exponent - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

pub(crate) fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

pub(crate) fn e8m0(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f64.powi(i32::from(code) - 127) as f32 }
}
