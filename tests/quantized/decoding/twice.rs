//! Repositories that are made twice: of codes, and of what they decode to.

use std::{collections::BTreeMap, fs, sync::Arc};

use ckfs::{
    checkpoint::Checkpoint,
    format::safetensors::write_header,
    plan::{Mesh, Plan, ViewOptions},
    source::FileId,
    tensor::DType,
    volume::{Ino, VolumeOptions},
};
use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::repo;

type Tensor = (String, DType, Vec<u64>, Vec<u8>);

/// A repository in both forms.
pub(crate) struct Twice {
    pub(crate) config: Value,
    /// How the codes are told, as a member of `config.json`, or of its `text_config` where it has one.
    pub(crate) quantization: Value,
    /// A further file, and its text.
    pub(crate) file: Option<(&'static str, Value)>,
    stored: Vec<Tensor>,
    decoded: Vec<Tensor>,
}

/// An open repository.
pub(crate) struct Opened {
    pub(crate) checkpoint: Arc<Checkpoint>,
    _dir: TempDir,
}

impl Twice {
    pub(crate) fn new(config: Value, quantization: Value) -> Self {
        Self { config, quantization, file: None, stored: Vec::new(), decoded: Vec::new() }
    }

    fn tensor(name: &str, dtype: DType, extents: &[u64], bytes: Vec<u8>) -> Tensor {
        assert_eq!(dtype.bytes_of(extents.iter().product()), Some(bytes.len() as u64), "{name}");
        (name.to_owned(), dtype, extents.to_vec(), bytes)
    }

    fn store(&mut self, name: &str, dtype: DType, extents: &[u64], bytes: Vec<u8>) {
        self.stored.push(Self::tensor(name, dtype, extents, bytes));
    }

    fn decode(&mut self, name: &str, extents: &[u64], values: impl Iterator<Item = f32>) {
        let bytes = values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
        self.decoded.push(Self::tensor(name, DType::BF16, extents, bytes));
    }

    /// A tensor of noise that is the same in both.
    pub(crate) fn plain(&mut self, name: &str, dtype: DType, extents: &[u64]) {
        let bytes = finite(name, dtype.bytes_of(extents.iter().product()).unwrap() as usize);
        self.store(name, dtype, extents, bytes.clone());
        self.decoded.push(Self::tensor(name, dtype, extents, bytes));
    }

    /// A tensor that the decoded repository does not have.
    pub(crate) fn companion(&mut self, name: &str, dtype: DType, extents: &[u64]) {
        self.store(name, dtype, extents, noise(name, dtype.bytes_of(extents.iter().product()).unwrap() as usize));
    }

    /// `X.weight` as integers of four bits with a scale for 32, as compressed-tensors packs them.
    pub(crate) fn int4(&mut self, module: &str, out: u64, inner: u64) {
        let (width, groups) = (inner as usize, inner as usize / 32);
        let codes = noise(module, out as usize * width / 2);
        let scales: Vec<bf16> = noise(&format!("{module} scales"), 2 * out as usize * groups)
            .chunks_exact(2)
            .enumerate()
            .map(|(at, two)| match at % 7 {
                // Products that are subnormal, or too large.
                5 => bf16::from_f32(1e-38),
                6 => bf16::from_f32(3e38),
                _ => bf16::from_f32((f32::from(two[0]) * 256.0 + f32::from(two[1]) - 30_000.0) * 3.1e-6),
            })
            .collect();
        // Little-endian words of eight codes, the low bits first, are two codes a byte, the low ones first.
        let value = |n: usize| {
            let code = f32::from(codes[n / 2] >> (4 * (n % 2)) & 15);
            (code - 8.0) * scales[n / width * groups + n % width / 32].to_f32()
        };
        self.decode(&format!("{module}.weight"), &[out, inner], (0..out as usize * width).map(value));
        let shape = [out, inner].iter().flat_map(|extent| (*extent as i32).to_le_bytes()).collect();
        let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.store(&format!("{module}.weight_packed"), DType::I32, &[out, inner / 8], codes);
        self.store(&format!("{module}.weight_scale"), DType::BF16, &[out, inner / 32], scales);
        self.store(&format!("{module}.weight_shape"), DType::I32, &[2], shape);
    }

    /// A stack `[experts, inner, out]`, as gpt-oss stores it: floats of four bits with an exponent for 32, turned.
    pub(crate) fn mxfp4(&mut self, name: &str, [experts, out, inner]: [u64; 3]) {
        let (rows, width, high) = (out as usize, inner as usize, experts as usize);
        let codes = noise(name, high * rows * width / 2);
        // All but 255, which is NaN: a NaN has no one form.
        let exponents: Vec<u8> =
            noise(&format!("{name} exponents"), high * rows * width / 32).iter().map(|byte| byte % 255).collect();
        let value = |n: usize| {
            let (expert, column, row) = (n / (width * rows), n / rows % width, n % rows);
            let at = (expert * rows + row) * width + column;
            let code = usize::from(codes[at / 2] >> (4 * (at % 2)) & 15);
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8] as f32;
            let signed = if code < 8 { magnitude } else { -magnitude };
            signed * 2f64.powi(i32::from(exponents[at / 32]) - 127) as f32
        };
        self.decode(name, &[experts, inner, out], (0..high * rows * width).map(value));
        self.store(&format!("{name}_blocks"), DType::U8, &[experts, out, inner / 32, 16], codes);
        self.store(&format!("{name}_scales"), DType::U8, &[experts, out, inner / 32], exponents);
    }

    /// `X.weight` as floats of four bits, an 8-bit float for 16 of them and one factor, as `ModelOpt` stores them; both forms
    /// hold the codes, since only what is refused or listed of it is looked at.
    pub(crate) fn nvfp4(&mut self, module: &str, out: u64, inner: u64) {
        self.companion(&format!("{module}.weight"), DType::U8, &[out, inner / 2]);
        self.companion(&format!("{module}.weight_scale"), DType::F8E4M3, &[out, inner / 16]);
        self.store(&format!("{module}.weight_scale_2"), DType::F32, &[], 0.5f32.to_le_bytes().to_vec());
    }

    fn open(&self, tensors: &[Tensor], config: &Value) -> Opened {
        let dir = tempfile::tempdir().unwrap();
        let mut map = serde_json::Map::new();
        // Weights and their scales lie in different files.
        for part in 0..2 {
            let file = format!("model-{:05}-of-00002.safetensors", part + 1);
            let tensors: Vec<_> = tensors.iter().skip(part).step_by(2).collect();
            let rows = tensors.iter().map(|(name, dtype, extents, _)| (name.as_str(), *dtype, extents.as_slice()));
            let mut bytes = write_header(rows, &[("format", "pt"), ("codes", "are here")], 8).unwrap().bytes;
            bytes.extend(tensors.iter().flat_map(|tensor| tensor.3.iter().copied()));
            fs::write(dir.path().join(&file), bytes).unwrap();
            map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), json!(file))));
        }
        let write = |name: &str, value: &Value| fs::write(dir.path().join(name), value.to_string()).unwrap();
        write("model.safetensors.index.json", &json!({"metadata": {"total_size": 0}, "weight_map": map}));
        write("config.json", config);
        if let Some((name, text)) = &self.file {
            write(name, text);
        }
        Opened { checkpoint: repo::open(dir.path()), _dir: dir }
    }

    /// The repository of codes.
    pub(crate) fn open_stored(&self) -> Opened {
        let mut config = self.config.clone();
        let text = config.get("text_config").is_some();
        let holder = if text { &mut config["text_config"] } else { &mut config };
        if !self.quantization.is_null() {
            holder["quantization_config"] = self.quantization.clone();
        }
        self.open(&self.stored, &config)
    }

    /// The repository of what they decode to.
    pub(crate) fn open_decoded(&self) -> Opened {
        self.open(&self.decoded, &self.config)
    }
}

impl Opened {
    /// The bytes of a file of the repository.
    pub(crate) fn original(&self, file: FileId) -> Vec<u8> {
        let source = self.checkpoint.source();
        let mut bytes = vec![0; source.len_bytes(file) as usize];
        source.read_into(file, 0, &mut bytes).unwrap();
        bytes
    }

    #[track_caller]
    pub(crate) fn plan(&self, options: &ViewOptions) -> Plan {
        Plan::build(&self.checkpoint, options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// All files of tensors with their bytes.
    pub(crate) fn files(&self, options: &ViewOptions) -> BTreeMap<String, Vec<u8>> {
        let volume = repo::volume(&self.checkpoint, options, VolumeOptions::default());
        let mut files: Vec<(String, Ino)> = Vec::new();
        repo::files(&volume, Ino::ROOT, "", &mut files);
        // The times of the repository are in one file of orbax.
        let is_other = |path: &str| {
            path.starts_with("hf/") || path.starts_with(".ckfs/") || path.ends_with("/_CHECKPOINT_METADATA")
        };
        let shown = files.into_iter().filter(|(path, _)| !is_other(path));
        shown.map(|(path, ino)| (path, repo::read(&volume, ino, 0, 1 << 24))).collect()
    }
}

pub(crate) fn options(layout: &str, mesh: &str) -> ViewOptions {
    ViewOptions { layout: repo::layout(layout), mesh: Mesh::parse(mesh).unwrap(), ..ViewOptions::default() }
}

fn noise(seed: &str, length: usize) -> Vec<u8> {
    let mut state = seed.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + u64::from(byte));
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Noise of which no float of 16 or 32 bits is NaN or infinite.
fn finite(seed: &str, length: usize) -> Vec<u8> {
    noise(seed, length).into_iter().enumerate().map(|(at, byte)| if at % 2 == 1 { byte & 0xbf } else { byte }).collect()
}
