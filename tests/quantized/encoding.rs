//! Encoders: every part of what they make is that of the slow reference, slices of it are slices of the whole, and so are the shards
//! that a plan makes of it.
#![allow(clippy::cast_sign_loss, reason = "random numbers are cut to fit")]

use std::{fs, path::Path, sync::Arc};

use crate::{
    common::{
        repo::{self, Row, row},
        shape,
        views::{Choices, choices},
    },
    reads::{expected, served, tensor},
};
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    config::{Pattern, Quantize, ShardRule},
    format::safetensors::write_header,
    plan::{Layout, Mesh, Plan, PlannedTensor, ViewOptions},
    read::EngineOptions,
    tensor::{DType, EncodedMatrices, EncodedPart, Encoder, ExponentRule, MatrixFactor, Op, View, to_usize},
    volume::{Ino, VolumeOptions},
};
use half::{bf16, f16};
use proptest::{
    prelude::*,
    test_runner::{TestError, TestRunner},
};
use serde_json::json;
use tempfile::TempDir;

const ENCODERS: [Encoder; 17] = [
    Encoder::Fp8Block { power_of_two: false },
    Encoder::Fp8Block { power_of_two: true },
    Encoder::Fp8Channel,
    Encoder::Fp8Tensor,
    Encoder::Mxfp8(ExponentRule::Nearest),
    Encoder::Mxfp8(ExponentRule::Up),
    Encoder::Mxfp4,
    Encoder::Nvfp4(MatrixFactor::Divides),
    Encoder::Nvfp4(MatrixFactor::Multiplies),
    Encoder::Int8Channel,
    Encoder::Int4 { group: 32 },
    Encoder::Int4 { group: 128 },
    Encoder::Affine { bits: 2, group: 32 },
    Encoder::Affine { bits: 3, group: 64 },
    Encoder::Affine { bits: 6, group: 32 },
    Encoder::Affine { bits: 8, group: 128 },
    Encoder::MlxMxfp4,
];

const PARTS: [EncodedPart; 4] = [EncodedPart::Codes, EncodedPart::Scales, EncodedPart::Biases, EncodedPart::Factor];

/// Whether an encoder makes a part.
fn makes(encoder: Encoder, part: EncodedPart) -> bool {
    match part {
        EncodedPart::Codes => true,
        EncodedPart::Scales => encoder.has_scales(),
        EncodedPart::Biases => encoder.has_biases(),
        EncodedPart::Factor => encoder.has_factor(),
    }
}

/// Numbers that have codes: of all sizes, few bits (for ties), both zeros, subnormals, and stretches of zeros that fill blocks.
fn weights(dtype: DType, seed: u64, count: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for at in 0..count {
        let mut state = ((seed << 40) ^ at).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
        let stretch = (seed ^ (at / 700)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        let few = (state % 113) as f32 / 16.0 - 3.5;
        let usual = (state >> 20 & 0xff_ffff) as f32 / 16_777_216.0 - 0.5;
        let tiny = if dtype == DType::F16 { 2e-7 } else { 3e-39 };
        let value = match stretch {
            0 => 0.0,
            1 => -0.0,
            2 => usual * tiny,
            3 => usual * 4e4,
            4..=6 => few,
            _ if state.is_multiple_of(61) => 0.0,
            _ => usual * 0.04,
        };
        match dtype {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(f16::from_f32(value).to_le_bytes()),
        }
    }
    bytes
}

/// Writes one file of tensors that have codes.
fn write(path: &Path, rows: &[Row], seed: u64) {
    let tensors = rows.iter().map(|(name, dtype, extents)| (name.as_str(), *dtype, extents.as_slice()));
    let mut bytes = write_header(tensors, &[("format", "pt")], 8).unwrap().bytes;
    for (number, (_, dtype, extents)) in (0..).zip(rows) {
        bytes.extend(weights(*dtype, seed + number, extents.iter().product()));
    }
    fs::write(path, bytes).unwrap();
}

fn open(dir: &TempDir) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap())
}

/// The elements of a box of row-major bytes.
fn cut(bytes: &[u8], extents: &[u64], width: u64, origin: &[u64], size: &[u64]) -> Vec<u8> {
    let Some((last, outer)) = size.split_last() else { return bytes.to_vec() };
    let mut found = Vec::new();
    for number in 0..outer.iter().product() {
        let (mut rest, mut at, mut stride) = (number, origin[outer.len()], *extents.last().unwrap());
        for axis in (0..outer.len()).rev() {
            at += (origin[axis] + rest % outer[axis]) * stride;
            rest /= outer[axis];
            stride *= extents[axis];
        }
        found.extend_from_slice(&bytes[to_usize(at * width)..to_usize((at + last) * width)]);
    }
    found
}

/// Runs a test of random choices for an encoder.
fn for_choices(encoder: Encoder, cases: u32, test: impl Fn(Choices) -> Result<(), TestCaseError>) {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let cases = (config.cases * cases).div_ceil(256);
    match TestRunner::new(ProptestConfig { cases, ..config }).run(&choices(), test) {
        Ok(()) => {}
        Err(TestError::Fail(reason, choices)) => panic!("{encoder}: {reason}: {choices:?}"),
        Err(error) => panic!("{encoder}: {error}"),
    }
}

/// A matrix, or several on outer axes, and another that shares a factor with it.
struct Case {
    checkpoint: Arc<Checkpoint>,
    encoding: Arc<EncodedMatrices>,
    _dir: TempDir,
}

fn case(encoder: Encoder, choices: &mut Choices) -> Case {
    let dtype = choices.of(&[DType::BF16, DType::F32, DType::F16]);
    let mut outer = Vec::new();
    for _ in 0..choices.below(3) {
        outer.push(choices.below(2) + 1);
    }
    let rows = choices.of(&[1, 3, 64, 127, 128, 129, 150, 257]);
    let multiple = encoder.columns_multiple();
    let columns = match multiple {
        1 => choices.of(&[1, 2, 127, 128, 129, 130, 161, 256, 300]),
        _ => multiple * (choices.below(320 / multiple + 1).max(1)),
    };
    // Transposed as it is stored, and cast, by the view itself.
    let (is_turned, is_cast) = (choices.below(3) == 2, choices.below(3) == 2);
    let extents = |rows| [&outer[..], &[rows, columns]].concat();
    let stored = |rows| {
        let mut extents = extents(rows);
        if is_turned {
            extents.reverse();
        }
        extents
    };
    let dir = tempfile::tempdir().unwrap();
    let others = choices.below(40) + 1;
    let all = [row("a", dtype, &stored(rows)), row("b", dtype, &stored(others))];
    write(&dir.path().join("model.safetensors"), &all, choices.below(1 << 20));
    let checkpoint = open(&dir);
    let view = |name: &str| {
        let mut view = View::source(tensor(&checkpoint, name));
        if is_turned {
            view = view.reverse_axes();
        }
        if is_cast { view.cast(DType::F32).unwrap() } else { view }
    };
    let (a, b) = (view("a"), view("b"));
    assert_eq!(a.shape().extents(), extents(rows));
    let mut together = vec![("a".to_owned(), a.clone())];
    if encoder.has_factor() && choices.below(2) == 0 {
        together.push(("b".to_owned(), b));
    }
    let encoding = Arc::new(EncodedMatrices::new("a".to_owned(), encoder, &a, &together).unwrap());
    Case { checkpoint, encoding, _dir: dir }
}

/// Some elements of a view, by the slow reference: evaluating all of a large one takes long.
fn agrees(checkpoint: &Checkpoint, view: &View, bytes: &[u8], choices: &mut Choices) -> bool {
    const AT_ONCE: u64 = 1500;
    let (width, elements) = (view.dtype().unit().bytes, view.shape().elements());
    let flat = view.reshape(&shape(&[elements])).unwrap();
    let count = elements.min(AT_ONCE);
    // Both ends and a random place.
    [0, elements - count, choices.below(elements - count + 1)].into_iter().all(|first| {
        let wanted = expected(checkpoint, &flat.slice(0, first, first + count, 1).unwrap());
        wanted == bytes[to_usize(first * width)..to_usize((first + count) * width)]
    })
}

#[test]
fn parts_are_those_of_the_reference_and_slices_are_those_of_the_whole() {
    for encoder in ENCODERS {
        for_choices(encoder, 12, |mut choices| {
            let Case { checkpoint, encoding, _dir } = case(encoder, &mut choices);
            for part in PARTS.into_iter().filter(|part| makes(encoder, *part)) {
                let whole = View::encoded(&encoding, part);
                let piece = to_usize(choices.below(20_000) + 500);
                let (bytes, _) = served(&checkpoint, &whole, EngineOptions::default(), piece);
                prop_assert_eq!(bytes.len() as u64, whole.bytes().unwrap());
                let shown = whole.shape();
                prop_assert!(agrees(&checkpoint, &whole, &bytes, &mut choices), "{} {:?} {}", encoder, part, shown);
                // Any box, its axes reversed too, with and without memory for tiles.
                let (mut view, mut origin, mut size) = (whole.clone(), Vec::new(), Vec::new());
                for (axis, extent) in whole.shape().extents().iter().enumerate() {
                    let start = choices.below(*extent);
                    let stop = start + choices.below(extent - start) + 1;
                    view = view.slice(axis, start, stop, 1).unwrap();
                    origin.push(start);
                    size.push(stop - start);
                }
                let wanted = cut(&bytes, whole.shape().extents(), whole.dtype().unit().bytes, &origin, &size);
                let none = EngineOptions { tile_cache_bytes: 0, ..EngineOptions::default() };
                for options in [EngineOptions::default(), none] {
                    let (found, _) = served(&checkpoint, &view, options, piece);
                    prop_assert!(found == wanted, "{} {:?} {}: {:?} {:?}", encoder, part, shown, origin, size);
                }
            }
            Ok(())
        });
    }
}

/// What blocks are made of does not depend on what is beside them, except for a factor.
#[test]
fn blocks_of_a_slice_are_blocks_of_the_whole() {
    for encoder in ENCODERS.into_iter().filter(|encoder| !encoder.has_factor()) {
        for_choices(encoder, 12, |mut choices| {
            let Case { checkpoint, encoding, _dir } = case(encoder, &mut choices);
            let input = &encoding.input;
            let axes = input.shape().rank();
            let (rows, columns) = encoding.bands.matrix();
            let (block_rows, block_columns) = encoder.block(columns);
            let mut some = |extent: u64, block: u64| {
                let blocks = extent.div_ceil(block);
                let start = choices.below(blocks);
                (start, start + choices.below(blocks - start) + 1)
            };
            let (of_rows, of_columns) = (some(rows, block_rows), some(columns, block_columns));
            let of = |(start, stop): (u64, u64), block: u64, extent: u64| (start * block, (stop * block).min(extent));
            let (rows, columns) = (of(of_rows, block_rows, rows), of(of_columns, block_columns, columns));
            let slice =
                input.slice(axes - 2, rows.0, rows.1, 1).unwrap().slice(axes - 1, columns.0, columns.1, 1).unwrap();
            let of_slice = EncodedMatrices::new("slice".to_owned(), encoder, &slice, &[]).unwrap();
            let of_slice = Arc::new(of_slice);
            let (codes, elements) = encoder.packed();
            let parts = [
                (EncodedPart::Codes, rows, (columns.0 / codes * elements, columns.1.div_ceil(codes) * elements)),
                (EncodedPart::Scales, of_rows, of_columns),
                (EncodedPart::Biases, of_rows, of_columns),
            ];
            for (part, rows, columns) in parts.into_iter().filter(|(part, ..)| makes(encoder, *part)) {
                let whole = View::encoded(&encoding, part);
                let cut = whole.slice(axes - 2, rows.0, rows.1, 1).unwrap();
                let cut = cut.slice(axes - 1, columns.0, columns.1, 1).unwrap();
                let found = View::encoded(&of_slice, part);
                prop_assert_eq!(cut.shape(), found.shape());
                let of_whole = served(&checkpoint, &cut, EngineOptions::default(), 9000).0;
                let of_slice = served(&checkpoint, &found, EngineOptions::default(), 9000).0;
                prop_assert!(of_whole == of_slice, "{} {:?}: {:?} {:?}", encoder, part, rows, columns);
            }
            Ok(())
        });
    }
}

/// E4M3 codes in blocks, of random bits that are numbers, with some blocks of zeros and some that are saturated; and scales: powers of
/// two from one end of E8M0 to the other, and some that are none.
struct Blocks {
    codes: Vec<u8>,
    /// F32 bits.
    scales: Vec<u32>,
    rows: u64,
    columns: u64,
    block: (u64, u64),
}

/// The bits of 2 to this power, as F32.
fn power_bits(exponent: u64) -> u32 {
    if exponent == 0 { 1 << 22 } else { u32::try_from(exponent << 23).unwrap() }
}

impl Blocks {
    fn of(choices: &mut Choices) -> Self {
        let rows = choices.of(&[1_u64, 3, 127, 128, 129, 300]);
        let columns = choices.of(&[32_u64, 96, 128, 160, 288, 416]);
        let block = choices.of(&[(128_u64, 128_u64), (128, 32), (1, 32), (64, 96), (128, 48), (1, 16)]);
        let grid = rows.div_ceil(block.0) * columns.div_ceil(block.1);
        let scales = (0..grid).map(|_| match choices.below(12) {
            0 => power_bits(0),
            // No value of these blocks may be infinite: see the codes below.
            1 => power_bits(254),
            2 => power_bits(1 + choices.below(3)),
            3 => 0x3f80_0001,
            4 => 0x3e4c_cccd,
            // 2^-130, which E8M0 lacks.
            5 => 1 << 19,
            _ => power_bits(100 + choices.below(40)),
        });
        let scales: Vec<u32> = scales.collect();
        let of_columns = columns.div_ceil(block.1);
        let codes = (0..rows * columns).map(|at| {
            let (row, column) = (at / columns, at % columns);
            let place = row / block.0 * of_columns + column / block.1;
            let most = if scales[to_usize(place)] == power_bits(254) { 0x3c } else { 0x7f };
            let code = match (place * 7 + 3) % 11 {
                0 => 0,
                1 => 0x7e & most,
                2 => choices.below(9),
                _ => choices.below(most),
            };
            u8::try_from(code | choices.below(2) << 7).unwrap()
        });
        let codes = codes.collect();
        Self { codes, scales, rows, columns, block }
    }

    /// A repository of this one weight.
    fn write(&self, path: &Path, scale: DType, scale_fmt: Option<&str>) {
        let name = "model.layers.0.self_attn.o_proj.weight";
        let grid = [self.rows.div_ceil(self.block.0), self.columns.div_ceil(self.block.1)];
        let rows = [self.rows, self.columns];
        let scales = format!("{name}_scale_inv");
        let tensors = [(name, DType::F8E4M3, &rows[..]), (scales.as_str(), scale, &grid[..])];
        let mut bytes = write_header(tensors, &[("format", "pt")], 8).unwrap().bytes;
        bytes.extend(&self.codes);
        for bits in &self.scales {
            if scale == DType::F32 {
                bytes.extend(bits.to_le_bytes());
            } else {
                bytes.push(exponent_of(*bits).unwrap_or(127));
            }
        }
        fs::write(path.join("model.safetensors"), bytes).unwrap();
        let mut quantization = json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block.0, self.block.1],
        });
        if let Some(word) = scale_fmt {
            quantization["scale_fmt"] = json!(word);
        }
        let config = json!({"model_type": "made-up", "quantization_config": quantization});
        fs::write(path.join("config.json"), config.to_string()).unwrap();
    }
}

/// The E8M0 byte of a power of two.
fn exponent_of(bits: u32) -> Option<u8> {
    (0..=254).find(|exponent| power_bits(u64::from(*exponent)) == bits)
}

/// MXFP8 of blocks whose scales are powers of two: codes are those that are stored, exponents are repeated. Where a scale is none, or
/// groups cross blocks, or nothing says that scales are powers of two, groups are encoded anew.
#[test]
fn blocks_with_exponents_keep_their_codes_and_others_are_encoded_anew() {
    let kept_and_new = std::cell::Cell::new((0_u64, 0_u64));
    for encoder in [Encoder::Mxfp8(ExponentRule::Nearest), Encoder::Mxfp8(ExponentRule::Up)] {
        for_choices(encoder, 60, |mut choices| {
            let blocks = Blocks::of(&mut choices);
            let (dtype, scale_fmt) = choices.of(&[
                (DType::F32, Some("ue8m0")),
                (DType::F8E8M0, None),
                (DType::F32, None),
                (DType::F32, Some("e4m3")),
            ]);
            let dir = tempfile::tempdir().unwrap();
            blocks.write(dir.path(), dtype, scale_fmt);
            let checkpoint = open(&dir);
            let options = ViewOptions {
                layout: Layout::Hf,
                chooses_layout: true,
                quantize: Some(scheme(encoder)),
                allow_missing: ckfs::config::Allow::All,
                allow_unmapped: ckfs::config::Allow::All,
                ..ViewOptions::default()
            };
            let plan = Plan::build(&checkpoint, &options).map_err(|error| TestCaseError::fail(error.to_string()))?;
            let bytes = |view: &View| served(&checkpoint, view, EngineOptions::default(), 5000).0;
            let part = |wanted: EncodedPart| {
                let is_part = |view: &View| matches!(view.op(), Op::Encoded { part, .. } if *part == wanted);
                plan.tensors.iter().map(|tensor| &tensor.view).find(|view| is_part(view)).unwrap().clone()
            };
            let (of_codes, of_scales) = (part(EncodedPart::Codes), part(EncodedPart::Scales));
            let (codes, scales) = (bytes(&of_codes), bytes(&of_scales));
            // The slow reference agrees on all, kept or not.
            prop_assert!(agrees(&checkpoint, &of_codes, &codes, &mut choices), "codes");
            prop_assert!(agrees(&checkpoint, &of_scales, &scales, &mut choices), "scales");
            let says = dtype == DType::F8E8M0 || scale_fmt == Some("ue8m0");
            let fits = blocks.block.1.is_multiple_of(32);
            let Op::Encoded { of, .. } = of_codes.op() else { unreachable!() };
            prop_assert_eq!(of.given.as_ref().is_some(), says && fits, "{:?}", blocks.block);
            // The decoder, which is tested elsewhere, gives the numbers before; a slow one those after.
            let before = bytes(&of.input);
            let (mut kept, mut new) = kept_and_new.get();
            for (group, scale) in scales.iter().copied().enumerate() {
                let (row, column) = (group as u64 * 32 / blocks.columns, group as u64 * 32 % blocks.columns);
                let place = row / blocks.block.0 * blocks.columns.div_ceil(blocks.block.1) + column / blocks.block.1;
                let stored = exponent_of(blocks.scales[to_usize(place)]);
                let stored = if dtype == DType::F8E8M0 { Some(stored.unwrap_or(127)) } else { stored };
                let range = group * 32..(group + 1) * 32;
                if let (Some(exponent), true) = (stored, says && fits) {
                    prop_assert_eq!(scale, exponent);
                    prop_assert_eq!(&codes[range], &blocks.codes[group * 32..(group + 1) * 32]);
                    kept += 1;
                    continue;
                }
                new += 1;
                for at in range {
                    let wide = |code: u8| {
                        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
                        if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) }
                    };
                    let after = wide(codes[at]) * 2f64.powi(i32::from(scale) - 127);
                    let number = f32::from_le_bytes(before[at * 4..at * 4 + 4].try_into().unwrap());
                    // Half a step of the greatest code, or of the least exponent.
                    let step = (wide(0x7e) * 2f64.powi(i32::from(scale) - 127) / 28.0).max(1e-40);
                    prop_assert!((after - f64::from(number.abs())).abs() <= step, "{} {}", after, number);
                }
            }
            kept_and_new.set((kept, new));
            Ok(())
        });
    }
    let (kept, new) = kept_and_new.get();
    // A few cases may all be of one kind.
    let is_few = ProptestConfig::default().cases < 256;
    assert!(is_few || (kept > 1000 && new > 1000), "{kept} {new}");
}

/// The scheme of an encoder.
fn scheme(encoder: Encoder) -> Quantize {
    match encoder {
        Encoder::Fp8Block { power_of_two: false } => Quantize::Fp8Block,
        Encoder::Fp8Block { power_of_two: true } => Quantize::Fp8BlockUe8m0,
        Encoder::Fp8Channel => Quantize::Fp8Channel,
        Encoder::Fp8Tensor => Quantize::Fp8Tensor,
        Encoder::Mxfp8(ExponentRule::Nearest) => Quantize::Mxfp8,
        Encoder::Mxfp8(ExponentRule::Up) => Quantize::Mxfp8Sglang,
        Encoder::Mxfp4 => Quantize::Mxfp4,
        Encoder::Nvfp4(MatrixFactor::Divides) => Quantize::Nvfp4,
        Encoder::Nvfp4(MatrixFactor::Multiplies) => Quantize::Nvfp4Modelopt,
        Encoder::Int8Channel => Quantize::Int8Channel,
        Encoder::Int4 { group } => Quantize::Int4(group),
        Encoder::Affine { bits, group } => Quantize::Mlx(bits, group),
        Encoder::MlxMxfp4 => Quantize::MlxMxfp4,
        Encoder::Q8_0 => panic!("no scheme of a repository has it, but the layout gguf"),
    }
}

/// Where torch.chunk cuts an axis, for mesh axes of these sizes, the first outermost.
fn chunk_cuts(start: u64, stop: u64, sizes: &[u64], cuts: &mut Vec<u64>) {
    let Some((size, inner)) = sizes.split_first() else { return };
    let step = (stop - start).div_ceil(*size).max(1);
    for at in 0..*size {
        let (low, high) = ((start + at * step).min(stop), (start + (at + 1) * step).min(stop));
        if low > start && low < stop {
            cuts.push(low);
        }
        chunk_cuts(low, high, inner, cuts);
    }
}

/// A cut that is no border of a block, of a matrix that is split so: by axis the sizes of mesh axes.
fn cuts_inside(encoder: Encoder, (rows, columns): (u64, u64), split: &[Vec<u64>; 2]) -> bool {
    let (block_rows, block_columns) = encoder.block(columns);
    // A scale of whole rows is whole on devices that have a part of them. Only a stored element is not cut.
    let block_columns = if block_columns >= columns { encoder.packed().0 } else { block_columns };
    let inside = |extent: u64, block: u64, sizes: &[u64]| {
        let mut cuts = Vec::new();
        chunk_cuts(0, extent, sizes, &mut cuts);
        cuts.iter().any(|cut| !cut.is_multiple_of(block))
    };
    inside(rows, block_rows, &split[0]) || inside(columns, block_columns, &split[1])
}

/// Random models on random meshes: what is refused has a cut inside a block, what is not refused is sharded as the whole is.
#[test]
fn shards_of_a_plan_are_slices_of_the_whole_or_are_refused_by_name() {
    let mut counts = [0_u32; 3];
    for encoder in ENCODERS {
        let counts_of = std::cell::Cell::new(counts);
        for_choices(encoder, 18, |mut choices| {
            let rows = [choices.of(&[256, 128, 383, 384, 60, 512]), choices.of(&[256, 130, 128, 640])];
            let multiple = encoder.columns_multiple();
            let columns = choices.of(&[256_u64, 128, 384, 320, 96]).next_multiple_of(multiple);
            let prefix = |layer: u64| format!("model.layers.{layer}");
            let mut all = vec![row("model.embed_tokens.weight", DType::BF16, &[50, columns])];
            for layer in 0..2 {
                for (name, rows) in
                    [("self_attn.o_proj", rows[0]), ("mlp.gate_proj", rows[1]), ("mlp.up_proj", rows[1])]
                {
                    all.push(row(&format!("{}.{name}.weight", prefix(layer)), DType::BF16, &[rows, columns]));
                }
            }
            let dir = tempfile::tempdir().unwrap();
            write(&dir.path().join("model.safetensors"), &all, choices.below(1 << 20));
            fs::write(dir.path().join("config.json"), json!({"model_type": "made-up"}).to_string()).unwrap();
            let mesh = choices.of(&["a=2", "a=3", "a=2,b=2", "a=4", "a=3,b=2", "a=2,b=3"]);
            let even = choices.below(3) == 2;
            // The matrix's axes are the last ones, whatever is stacked before them.
            let layout = choices.of(&[0, 1]);
            let mut split = [Vec::new(), Vec::new()];
            let mut names = [Vec::new(), Vec::new()];
            let mesh = Mesh::parse(mesh).unwrap();
            for axis in mesh.axes() {
                let at = choices.index(2);
                split[at].push(axis.size);
                names[at].push(axis.name.clone());
            }
            let mut spec = names.to_vec();
            if layout == 1 {
                spec.insert(0, Vec::new());
            }
            let pattern: Pattern =
                Pattern::parse(if layout == 0 { "*_proj.weight" } else { "layers.scanned.*" }).unwrap();
            let options = ViewOptions {
                mesh,
                even,
                layout: if layout == 0 { Layout::Hf } else { Layout::Canonical },
                chooses_layout: true,
                quantize: Some(scheme(encoder)),
                shard_rules: vec![ShardRule { pattern, spec }],
                allow_missing: ckfs::config::Allow::All,
                allow_unmapped: ckfs::config::Allow::All,
                ..ViewOptions::default()
            };
            let checkpoint = open(&dir);
            let inside = rows.iter().any(|rows| cuts_inside(encoder, (*rows, columns), &split));
            let mut count = counts_of.get();
            let plan = match Plan::build(&checkpoint, &options) {
                Ok(plan) => plan,
                Err(error) if even => {
                    // --even asks for equal parts of everything.
                    prop_assert!(error.to_string().contains("split"), "{}", error);
                    return Ok(());
                }
                Err(error) => {
                    let text = error.to_string();
                    prop_assert!(inside && text.contains("inside a block"), "{}: {}", encoder, text);
                    count[0] += 1;
                    counts_of.set(count);
                    return Ok(());
                }
            };
            prop_assert!(even || !inside, "{} {:?} {:?} {} is not refused", encoder, split, rows, columns);
            count[if inside { 1 } else { 2 }] += 1;
            counts_of.set(count);
            check_shards(&checkpoint, &plan, &options)
        });
        counts = counts_of.get();
    }
    // Each of the three is met: refused, whole by --even, and cut.
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

/// Compares the files of devices with boxes of the whole tensors, which the plan's regions give.
fn check_shards(checkpoint: &Arc<Checkpoint>, plan: &Plan, options: &ViewOptions) -> Result<(), TestCaseError> {
    let volume = repo::volume(checkpoint, options, VolumeOptions::default());
    let mut files = Vec::new();
    repo::files(&volume, Ino::ROOT, "", &mut files);
    let read = |path: &str| {
        let (_, ino) = files.iter().find(|(known, _)| known == path).unwrap_or_else(|| panic!("no {path}"));
        repo::read(&volume, *ino, 0, 1 << 26)
    };
    for tensor in &plan.tensors {
        let PlannedTensor { view, .. } = tensor;
        let path = plan.path(tensor).join("/");
        let whole = read(&format!("full/{path}"));
        let (extents, width) = (view.shape().extents(), view.dtype().unit().bytes);
        for device in &plan.devices {
            let region = plan.region(tensor, *device);
            let wanted = cut(&whole, extents, width, region.origin(), region.shape().extents());
            let found = read(&format!("dev{device}/{path}"));
            prop_assert!(found == wanted, "dev{}/{}: {:?}", device, path, region);
        }
    }
    Ok(())
}
