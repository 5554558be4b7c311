//! The kernels against numpy and `ml_dtypes` (by digest), against a slow independent reference, and against each other.
//!
//! The state protected here is every byte that a cast mount serves: if a cast rounds one pattern in 2^24 wrongly,
//! it remains unnoticed until a training run differs.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::float_cmp,
    clippy::similar_names,
    clippy::wildcard_enum_match_arm,
    clippy::format_collect,
    reason = "a test: sizes are small, floats are compared exactly on purpose, and a panic is a failure"
)]

use std::ops::Range;

use crate::common::decode_by_reference;
use ckfs::tensor::{
    DType, Decode, Field, Gather, Load, Loop, Operand, Operation, Program, Shape, SourceTensor, Step, Stores, TensorId,
    Value, Window, block_index, convert_row, fill, gather,
};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

const FLOATS: [DType; 8] = [
    DType::F64,
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F8E5M2,
    DType::F8E4M3,
    DType::F8E5M2Fnuz,
    DType::F8E4M3Fnuz,
];

/// SHA-256 of the results of casting [`patterns`] of the first type to the second, as numpy and `ml_dtypes` compute them.
/// Computed by `tests/python/cast_digests.py` (numpy 2.4.6, `ml_dtypes` 0.6.0), which also prints where torch differs.
#[rustfmt::skip]
const CAST_DIGESTS: [(DType, DType, &str); 56] = [
    (DType::F64, DType::F32, "7d7a8c9eafa43506982799641436f6fdda2265b2c485f07aaea9a9d8c2f20e0d"),
    (DType::F64, DType::BF16, "4c7ff91f202ceeb5445a5e80e6cd6523acd511455e1b74cb7ff96ab8f10ddaa8"),
    (DType::F64, DType::F16, "5de6154a02bdb9c7f157f77b7aa99aa7e06b94c864feb4eee5cad428014c0c42"),
    (DType::F64, DType::F8E5M2, "5c4da4f63a8fc5b47861a4659819c4722a48de6244738707943a54fb25234fad"),
    (DType::F64, DType::F8E4M3, "b0255b76de698eb9be9a3c604e964315af8b23d7b8e3ee072ef0cad9d4614c08"),
    (DType::F64, DType::F8E5M2Fnuz, "4550c66562366c1602fdd12cf8113402cb65e5eaef939805987444a95fb2f773"),
    (DType::F64, DType::F8E4M3Fnuz, "37cd05174b70e8a09738abb3c2afdf74b46096a79e73bd6cc8980b83022c2bf3"),
    (DType::F32, DType::F64, "106129de9f6b48670eb3a77362fb9469d91624f747c5153bc0684868ca5811a6"),
    (DType::F32, DType::BF16, "185c731f3b157eb6d0fa1876a52b0f99d7696aff6a17dd75066c1c1ad6ec9fa5"),
    (DType::F32, DType::F16, "8b21297afde3075e75368f1b603b3c1e52fe1653105734767380a09e829bcfa3"),
    (DType::F32, DType::F8E5M2, "1b7632e141e390b477ddadc83b40e423abcff975c651b9ae4cff7a317eec5a95"),
    (DType::F32, DType::F8E4M3, "25d8bad0978e67b6200b3c2ede69b3df535e0a96f8eeb72f963c07d1fc48043f"),
    (DType::F32, DType::F8E5M2Fnuz, "0261757eb09dd8ff16db2e339df85a934a1cc511eefe7b966a57380a88ef7464"),
    (DType::F32, DType::F8E4M3Fnuz, "3cda71ba2d917bc95c7068bca84f1153717557d10f8ec04aec0cea22cc898cda"),
    (DType::BF16, DType::F64, "3a1dfdeaf0f7c870697701d0811581c9877443a92a25c23f501fe47497ac197d"),
    (DType::BF16, DType::F32, "9207d7eb28680a098c73dbe536d1ff7b94311dc417b9a385e0af6660683e93ca"),
    (DType::BF16, DType::F16, "ab89ed14cbcb0604fa6ea0609f7ce76a7ea7646ffa543a61ea599994880891d2"),
    (DType::BF16, DType::F8E5M2, "090ec74f2f7cc325aefd5b24d8a7db182ffbf980e5b9178e583b42669f409a76"),
    (DType::BF16, DType::F8E4M3, "ecbb201b2182a3e8e84f521d57c51ff379e8e5ec61141119005be7d672db0d98"),
    (DType::BF16, DType::F8E5M2Fnuz, "fbc7c46b2110bf77ea64283fb71a081f5612b13a074321a544c4332c91709f43"),
    (DType::BF16, DType::F8E4M3Fnuz, "b5a02ccdb033ad9271d82bfc03ae5dbfd2d1eb881ac6e35a81be5b08cb0bd97d"),
    (DType::F16, DType::F64, "0f233aaf46a3f923404343bb0ccecb1af96b0848aee43076da6999522b81e70d"),
    (DType::F16, DType::F32, "f4fdd084f85448d28c84f20fabf4022ba938e40b7f382d2727dec6f41ac6267a"),
    (DType::F16, DType::BF16, "1aeca553d95875b569c9e050595a8a02403c07a83fc42e8d7094732f838139cd"),
    (DType::F16, DType::F8E5M2, "15ab0c3901962e79182e796eb712da5b395066c8bd00b5888a5e1c9125d56f24"),
    (DType::F16, DType::F8E4M3, "66c4d3a1fa3d98587843222ccdff886e38b5726e83ae53c6eb66efa4eebd6e62"),
    (DType::F16, DType::F8E5M2Fnuz, "0fa2de8eb3705708d9fdfca78253b1a841348ee2289f3d1b329374fa4ce166eb"),
    (DType::F16, DType::F8E4M3Fnuz, "95e6fb5b04ba11dcfc5fdb80d6a1637e811d503bae7151aadc96ef8c96583567"),
    (DType::F8E5M2, DType::F64, "1ceb87beba293a68ca9a48f1f0052d4c4c8b85326d7a65299e33ebd2cd6f2c3f"),
    (DType::F8E5M2, DType::F32, "e119e01810d2e0b12e435d3b12fc0a09a0d185442237494c1731ed1aedd7e4b5"),
    (DType::F8E5M2, DType::BF16, "b300e9ee644fd17682252222d0ba59d87e83a2419038be6a6c707f7dab34d825"),
    (DType::F8E5M2, DType::F16, "463691e0517c225d73a9ac64c52c249f0eba967cc0d8ff011d754719d5683f5c"),
    (DType::F8E5M2, DType::F8E4M3, "8bada0c1d51fabc7719938d7b82b82a8b2be888438b2755aa757e2fbc4258bd5"),
    (DType::F8E5M2, DType::F8E5M2Fnuz, "7769aec8aa58fefc262e7cac81d82ca9df32a64f17c6162dc5f1986b0619514d"),
    (DType::F8E5M2, DType::F8E4M3Fnuz, "f1b8978a74747b54fd35c7a9e5e398ceaa790095f6bc1906ab10a4b0386bebe6"),
    (DType::F8E4M3, DType::F64, "bab4a7ff33d1cb3ce5a2943809d59c4d72c653e6bafa6c3dd51f4d96d04c323e"),
    (DType::F8E4M3, DType::F32, "fbfd40716d3eddc590ca82a86c34208d486f88eb69e6a04dbfc62b158dec4d2f"),
    (DType::F8E4M3, DType::BF16, "f45890c7e74be01c5519ba41376c42f8fc1f9cc6f5fd75947b65b7716ba4f00f"),
    (DType::F8E4M3, DType::F16, "26f6424f23eb8c679a0602789b1c0a77d61cd603245d021dd64cc7a38e7c3ed2"),
    (DType::F8E4M3, DType::F8E5M2, "6aa3ec7d87dcde193d9f92aeebee32e87c7cb2e8b51d94f6e9b3195e39f11de5"),
    (DType::F8E4M3, DType::F8E5M2Fnuz, "384f2d18ba20eaa537d23a032dc06312aba07c0264f163e0907239838198914a"),
    (DType::F8E4M3, DType::F8E4M3Fnuz, "d8e6c89762b6b2df7a3776076423109ff0c0caa7c1256ab6b017f74924422584"),
    (DType::F8E5M2Fnuz, DType::F64, "5c9ef5df297b1e9c925984a57d4b640b8505d01cbb4977cb826cffc0cfecc1d0"),
    (DType::F8E5M2Fnuz, DType::F32, "ef71f572c52efd5516a126c023b5bf2779f8bdf1c949ff51e4f30af350da70a4"),
    (DType::F8E5M2Fnuz, DType::BF16, "7ce8f6ad62d4d76c6e2794dc483c3255c9659f57d993964694e35b4937c45b6e"),
    (DType::F8E5M2Fnuz, DType::F16, "5838de8645af61c8cfee1f2479d0d91b6bd47ce7c6d701b0a96eb890a62e2f71"),
    (DType::F8E5M2Fnuz, DType::F8E5M2, "f13bce6a2c1447f72d6d5106777c76d2dee8366c8d573119a47d5331e5789c27"),
    (DType::F8E5M2Fnuz, DType::F8E4M3, "f323be13f92a31a783671a982778e1e230599e51ef6359234667859af06ce08b"),
    (DType::F8E5M2Fnuz, DType::F8E4M3Fnuz, "5282c16eef42517e0ad1bc68751a9c75094c639a8e87adb2178205fdfbbdd200"),
    (DType::F8E4M3Fnuz, DType::F64, "3a9f01696378f0a777ed77bb8cf08eaf954b7467f8b17a0e552110a9ffc9afaa"),
    (DType::F8E4M3Fnuz, DType::F32, "0a964337a9090599d0049c863a5cc7a8e19ba4205f84a79575c265343c8be1c7"),
    (DType::F8E4M3Fnuz, DType::BF16, "c32261e4eb8a99b26e9ca7af0e00a96d82a92212ad27268a37dba5964d9f7de1"),
    (DType::F8E4M3Fnuz, DType::F16, "67ea379dfaf0b9e979ca069f4809cb5641aca7d4a4190b7a00851a72a0fb2805"),
    (DType::F8E4M3Fnuz, DType::F8E5M2, "bab434fe9a2804d1492a00dac8ddc48d6be505182be2bb068938927b3f9b6f0b"),
    (DType::F8E4M3Fnuz, DType::F8E4M3, "089003354dac69fc9a7a79c8814b0d457b266e996a79dd12af6215400712aa7e"),
    (DType::F8E4M3Fnuz, DType::F8E5M2Fnuz, "8ea5315fab1ec04c306b2c9cafa4f95d6988444ef3753c32bc9d61f1ea75b34f"),
];

fn width(dtype: DType) -> usize {
    usize::try_from(dtype.element_bytes().unwrap()).unwrap()
}

fn cast(source: DType, target: DType) -> Program {
    Program { load: Load::Element(source), target, steps: Vec::new() }
}

/// The inputs of the digests: all patterns of the types of 8 and 16 bits; of F32 and F64 the lists that
/// `cast_digests.py` describes, by the same formulas.
fn patterns(dtype: DType) -> Vec<u8> {
    let mix = |index: u64| (index * 2_654_435_761) & 0xffff_ffff;
    if dtype == DType::F32 {
        let low = [0x00, 0x00, 0x00, 0x01, 0x7f, 0x80, 0x81, 0xff_u64];
        let values = (0..1_u64 << 24).map(|index| index << 8 | low[(mix(index) >> 29) as usize]);
        return values.flat_map(|bits| (bits as u32).to_le_bytes()).collect();
    }
    if dtype == DType::F64 {
        let nudges = [0, 1, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, (1 << 29) - 1, 1 << 27, 3 << 27_u64];
        let values = (0..1_u64 << 20).map(|index| {
            let hashed = mix(index);
            if hashed >> 29 == 0 {
                return index << 44 | hashed << 12;
            }
            let narrow = (index << 12 | hashed & 0xfff) as u32;
            let wide = if f32::from_bits(narrow).is_nan() {
                let sign = u64::from(narrow >> 31) << 63;
                sign | 0x7ff8_0000_0000_0000 | u64::from(narrow & 0x7f_ffff) << 29
            } else {
                f64::from(f32::from_bits(narrow)).to_bits()
            };
            wide | nudges[(hashed >> 12 & 7) as usize]
        });
        return values.flat_map(u64::to_le_bytes).collect();
    }
    let bits = 8 * width(dtype);
    (0..1_u32 << bits).flat_map(|value| value.to_le_bytes()[..bits / 8].to_vec()).collect()
}

#[test]
fn casts_have_the_digests_of_numpy_and_ml_dtypes() {
    let mut wrong = Vec::new();
    for source in FLOATS {
        let input = patterns(source);
        for (_, target, expected) in CAST_DIGESTS.iter().filter(|row| row.0 == source) {
            let mut output = vec![0; input.len() / width(source) * width(*target)];
            convert_row(&cast(source, *target), &input, &mut output);
            let digest: String = Sha256::digest(&output).iter().map(|byte| format!("{byte:02x}")).collect();
            if digest != *expected {
                wrong.push(format!("{source} to {target}"));
            }
        }
    }
    assert!(wrong.is_empty(), "differ from numpy and ml_dtypes: {wrong:?}");
}

#[test]
fn equal_types_keep_every_bit() {
    for dtype in FLOATS {
        let mut input = patterns(dtype);
        input.truncate(1 << 20);
        let mut output = vec![0; input.len()];
        convert_row(&cast(dtype, dtype), &input, &mut output);
        assert!(input == output, "{dtype}");
    }
}

/// A float format by its definition: exponent bits, mantissa bits, bias, whether it has infinities, and whether
/// negative zero is its only NaN.
fn definition(dtype: DType) -> (u32, u32, i32, bool, bool) {
    match dtype {
        DType::F16 => (5, 10, 15, true, false),
        DType::BF16 => (8, 7, 127, true, false),
        DType::F8E5M2 => (5, 2, 15, true, false),
        DType::F8E4M3 => (4, 3, 7, false, false),
        DType::F8E5M2Fnuz => (5, 2, 16, false, true),
        DType::F8E4M3Fnuz => (4, 3, 8, false, true),
        _ => unreachable!("not a narrow float"),
    }
}

/// The value of a pattern, by the textbook formula in f64.
fn value(dtype: DType, bits: u32) -> f64 {
    let (exponents, mantissas, bias, infinite, unsigned_zero) = definition(dtype);
    let sign = if bits >> (exponents + mantissas) == 1 { -1.0 } else { 1.0 };
    let magnitude = bits & ((1 << (exponents + mantissas)) - 1);
    let (exponent, mantissa) = (magnitude >> mantissas, magnitude & ((1 << mantissas) - 1));
    let top = exponent == (1 << exponents) - 1;
    if infinite && top {
        return if mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if unsigned_zero && sign < 0.0 && magnitude == 0 {
        return f64::NAN;
    }
    if !infinite && !unsigned_zero && top && mantissa == (1 << mantissas) - 1 {
        return f64::NAN;
    }
    let fraction = f64::from(mantissa) / f64::from(1 << mantissas);
    let scale = |exponent: i32| 2f64.powi(exponent - bias);
    sign * if exponent == 0 { fraction * scale(1) } else { (1.0 + fraction) * scale(exponent as i32) }
}

/// The pattern nearest to `wanted`, by search among all patterns of its sign; NaN and overflow as promised.
fn nearest(dtype: DType, wanted: f32) -> u32 {
    let (exponents, mantissas, _, infinite, unsigned_zero) = definition(dtype);
    let sign = u32::from(wanted.is_sign_negative()) << (exponents + mantissas);
    let count = 1 << (exponents + mantissas);
    let infinity = count - (1 << mantissas);
    let (finite_count, overflow) = match (infinite, unsigned_zero) {
        (true, _) => (infinity, sign | infinity),
        (false, false) => (count - 1, sign | (count - 1)),
        (false, true) => (count, count),
    };
    assert!(!wanted.is_nan());
    let wanted = f64::from(wanted.abs());
    // The patterns of one sign ascend with their values: find the last that is not above `wanted`.
    let (mut low, mut high) = (0, finite_count);
    while high - low > 1 {
        let middle = u32::midpoint(low, high);
        if value(dtype, middle) <= wanted { low = middle } else { high = middle }
    }
    let (below, step) = (value(dtype, low), if low + 1 == finite_count { low - 1 } else { low });
    let above = below + (value(dtype, step + 1) - value(dtype, step));
    let up = wanted - below > above - wanted || (wanted - below == above - wanted && low % 2 == 1);
    match low + u32::from(up) {
        0 if unsigned_zero => 0,
        pattern if pattern == finite_count || wanted.is_infinite() => overflow,
        pattern => sign | pattern,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn narrowing_is_nearest_even(bits in any::<u32>(), border in 0_u32..24, around in -1_i32..=1) {
        // Half of all random patterns are far outside the range of the small types: move the exponent near theirs, and set
        // the low bits on or beside a tie.
        let tied = ((bits >> border << border) | (1 << border >> 1)).wrapping_add_signed(around);
        let near = (tied & 0x807f_ffff) | ((100 + (bits >> 23) % 46) << 23);
        for bits in [bits, tied, near] {
            let wanted = f32::from_bits(bits);
            if wanted.is_nan() {
                continue;
            }
            for dtype in FLOATS.into_iter().filter(|dtype| width(*dtype) <= 2) {
                let mut out = [0; 4];
                let bytes = &mut out[..width(dtype)];
                convert_row(&cast(DType::F32, dtype), &bits.to_le_bytes(), bytes);
                let got = u32::from_le_bytes(out);
                prop_assert_eq!(got, nearest(dtype, wanted), "{:e} = {:#x} to {}", wanted, bits, dtype);
            }
        }
    }
}

#[test]
fn widening_is_exact() {
    for dtype in FLOATS.into_iter().filter(|dtype| width(*dtype) <= 2) {
        for bits in 0..1_u32 << (8 * width(dtype)) {
            let mut out = [0; 8];
            convert_row(&cast(dtype, DType::F64), &bits.to_le_bytes()[..width(dtype)], &mut out);
            let (got, expected) = (f64::from_le_bytes(out), value(dtype, bits));
            assert!(
                got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                "{dtype} {bits:#x}: {got}"
            );
        }
    }
}

/// Codes and scales, type and number of elements, as a decoder of a matrix with scales in blocks.
fn scaled(
    codes: (DType, u64),
    scales: (DType, u64),
    (rows, columns): (u64, u64),
    block: (u64, u64),
    target: DType,
    steps: Vec<Step>,
) -> Decode {
    let tensor =
        |id, (dtype, elements)| SourceTensor { id: TensorId(id), dtype, shape: Shape::try_new(&[elements]).unwrap() };
    let index = block_index(rows, columns, block);
    let scale = Operand { tensor: tensor(1, scales), field: Field::Float(scales.0), index };
    let value = Value::of(Operand::elements(tensor(0, codes))).then(Operation::Multiply, scale);
    Decode::Program(Program { load: Load::Value(value.into()), target, steps })
}

#[test]
fn block_scales_follow_the_formula_with_partial_blocks() {
    // 7 rows of 11 in blocks of 3 by 4: a 3 by 3 scale grid whose last row and column are partial.
    let (rows, columns) = (7, 11);
    let scale: Vec<f32> = (1..=9_u8).map(|value| f32::from(value) * 0.37).collect();
    let scale_bytes: Vec<u8> = scale.iter().flat_map(|value| value.to_le_bytes()).collect();
    let quantized: Vec<u8> = (0..rows * columns).map(|index| (index * 3) as u8).collect();
    let decode = scaled((DType::F8E4M3, 77), (DType::F32, 9), (7, 11), (3, 4), DType::F32, Vec::new());
    let mut target = vec![0; rows * columns * 4];
    let loops = [Loop { extent: 77, target_stride: 1, source_stride: 1 }];
    let job = Gather { decode: &decode, target_bytes: 4, loops: &loops, source_offset: 0, target_offset: 0 };
    gather(Stores::Cached, &job, &[Window::whole(&quantized), Window::whole(&scale_bytes)], &mut target);
    for row in 0..rows {
        for column in 0..columns {
            let index = row * columns + column;
            let expected = value(DType::F8E4M3, u32::from(quantized[index])) as f32 * scale[row / 3 * 3 + column / 4];
            let got = f32::from_le_bytes(target[index * 4..][..4].try_into().unwrap());
            assert!(got == expected || got.is_nan() && expected.is_nan(), "[{row}, {column}]: {got}, not {expected}");
        }
    }
}

#[test]
fn steps_round_where_they_say() {
    let run = |steps: Vec<Step>, input: f32| {
        let program = Program { load: Load::Element(DType::F32), target: DType::F32, steps };
        let mut out = [0; 4];
        convert_row(&program, &input.to_le_bytes(), &mut out);
        f32::from_le_bytes(out)
    };
    assert_eq!(run(vec![Step::Round(DType::BF16), Step::add(1.0)], 1.005), 2.007_812_5);
    assert_eq!(run(vec![Step::add(1.0), Step::Round(DType::BF16)], 1.005), 2.0);
    assert_eq!(run(vec![Step::multiply(0.5, false)], 1e-45), 0.0);
    assert_eq!(run(vec![Step::multiply(2.0, false)], 1e-45), 2.8e-45);
    assert_eq!(run(vec![Step::multiply(2.0, true)], -1e-45).to_bits(), (-0.0_f32).to_bits());
}

/// A job whose loops are disjoint in the target, with slices of exactly the length that it accesses.
#[derive(Clone, Debug)]
struct Job {
    loops: Vec<Loop>,
    source_offset: u64,
    target_offset: u64,
    window: u64,
    shift: usize,
}

/// Loops of a transposed, cut and padded tensor: source strides chain in one order, target strides in another.
fn jobs() -> impl Strategy<Value = Job> {
    let extent = prop_oneof![4 => 1_u64..6, 2 => 6_u64..20, 1 => 60_u64..140];
    let axis = (extent, prop_oneof![4 => Just(0_u64), 1 => 0_u64..3], prop_oneof![4 => Just(1_u64), 1 => 2_u64..4]);
    let axes = proptest::collection::vec(axis, 0..5)
        .prop_filter("small", |axes| axes.iter().map(|axis| axis.0 * axis.2).product::<u64>() < 60_000);
    axes.prop_flat_map(|axes| {
        let order: Vec<usize> = (0..axes.len()).collect();
        let shuffled = Just(order.clone()).prop_shuffle();
        let listed = Just(order).prop_shuffle();
        (Just(axes), shuffled, listed, 0_u64..5, 0_u64..5, 0_u64..3, 0_usize..4, any::<bool>())
    })
    .prop_map(|(axes, shuffled, listed, source_skip, target_offset, window, shift, broadcast)| {
        let mut loops: Vec<Loop> =
            axes.iter().map(|axis| Loop { extent: axis.0, target_stride: 0, source_stride: 0 }).collect();
        let mut stride = 1;
        for (step, (extent, padding, _)) in loops.iter_mut().zip(&axes) {
            step.target_stride = stride;
            stride *= extent + padding;
        }
        let mut stride = 1;
        for index in shuffled {
            loops[index].source_stride = stride * axes[index].2;
            stride *= axes[index].0 * axes[index].2;
        }
        if broadcast && let Some(step) = loops.last_mut() {
            step.source_stride = 0;
        }
        let loops = listed.into_iter().map(|index| loops[index]).collect();
        Job { loops, source_offset: window + source_skip, target_offset, window, shift }
    })
}

/// Elements from the offset to just past the furthest accessed one.
fn reach(loops: &[Loop], stride: impl Fn(&Loop) -> u64) -> usize {
    1 + loops.iter().map(|step| (step.extent - 1) * stride(step)).sum::<u64>() as usize
}

/// Calls `visit(target element, source element)` for every loop position.
fn positions(loops: &[Loop], target: u64, source: u64, visit: &mut impl FnMut(usize, u64)) {
    match loops.split_first() {
        None => visit(target as usize, source),
        Some((step, rest)) => {
            for index in 0..step.extent {
                positions(rest, target + index * step.target_stride, source + index * step.source_stride, visit);
            }
        }
    }
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn check_gather(job: &Job, decode: &Decode, from: usize, to: usize, scale: Option<&[u8]>) -> Result<(), TestCaseError> {
    let skip = (job.source_offset - job.window) as usize;
    let source = noise(job.shift + (skip + reach(&job.loops, |step| step.source_stride)) * from, 7);
    let source = &source[job.shift..];
    let target_elements = job.target_offset as usize + reach(&job.loops, |step| step.target_stride);
    let mut expected = noise(target_elements * to, 9);
    let mut target = vec![0; job.shift];
    target.extend_from_slice(&expected);
    let mut windows = vec![Window { bytes: source, start: job.window * from as u64 }];
    windows.extend(scale.map(Window::whole));
    let read = |tensor: TensorId, span: Range<u64>| {
        let window = &windows[tensor.0 as usize];
        window.bytes[(span.start - window.start) as usize..(span.end - window.start) as usize].to_vec()
    };
    positions(&job.loops, job.target_offset, job.source_offset, &mut |at, element| {
        decode_by_reference(decode, &read, TensorId(0), element, &mut expected[at * to..][..to]);
    });
    let Job { loops, source_offset, target_offset, shift, .. } = job;
    let gathered =
        Gather { decode, target_bytes: to as u64, loops, source_offset: *source_offset, target_offset: *target_offset };
    // Past the caches too: from the start of a cache line on, where the code may write whole lines, and from within one.
    let mut memory = vec![0; 128 + expected.len()];
    let line = memory.as_ptr().align_offset(64);
    for start in [line, line + shift, line + to * shift % 64] {
        let streamed = &mut memory[start..start + expected.len()];
        streamed.copy_from_slice(&target[*shift..]);
        gather(Stores::Streamed, &gathered, &windows, streamed);
        prop_assert!(streamed == expected, "{job:?} {decode:?}, elements of {from} and {to} bytes, past the caches");
    }
    gather(Stores::Cached, &gathered, &windows, &mut target[*shift..]);
    prop_assert!(target[*shift..] == expected, "{job:?} {decode:?}, elements of {from} and {to} bytes");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    #[test]
    fn copies_agree_with_the_element_loop(job in jobs(), unit in prop::sample::select(vec![1_usize, 2, 3, 4, 8])) {
        check_gather(&job, &Decode::Copy, unit, unit, None)?;
    }

    #[test]
    fn conversions_agree_with_the_element_loop(
        job in jobs(),
        source in prop::sample::select(FLOATS.to_vec()),
        target in prop::sample::select(FLOATS.to_vec()),
        is_scaled in any::<bool>(),
        columns in 1_u64..200,
        block in (1_u64..40, 1_u64..40),
        scale_dtype in prop::sample::select(vec![DType::F32, DType::BF16, DType::F16, DType::F8E8M0, DType::F8E4M3]),
    ) {
        let elements = job.source_offset + reach(&job.loops, |step| step.source_stride) as u64;
        if !is_scaled {
            return check_gather(&job, &Decode::Program(cast(source, target)), width(source), width(target), None);
        }
        let rows = elements.div_ceil(columns);
        let scales = rows.div_ceil(block.0) * columns.div_ceil(block.1);
        let scale = noise(scales as usize * width(scale_dtype), 3);
        let steps = vec![Step::Round(DType::BF16)];
        let codes = (source, rows * columns);
        let decode = scaled(codes, (scale_dtype, scales), (rows, columns), block, target, steps);
        check_gather(&job, &decode, width(source), width(target), Some(&scale))?;
    }

    #[test]
    fn fills_agree_with_the_element_loop(job in jobs(), unit in 1_usize..9, uniform in any::<bool>()) {
        let pattern = if uniform { vec![0x41; unit] } else { noise(unit, 5) };
        let elements = job.target_offset as usize + reach(&job.loops, |step| step.target_stride);
        let mut expected = noise(elements * unit, 9);
        let mut target = expected.clone();
        positions(&job.loops, job.target_offset, 0, &mut |at, _| {
            expected[at * unit..][..unit].copy_from_slice(&pattern);
        });
        fill(&pattern, &job.loops, job.target_offset, &mut target);
        prop_assert!(target == expected, "{:?} {:?}", job, pattern);
    }
}

/// Conversions of real checkpoints, at sizes that have whole blocks and edges.
#[test]
fn shapes_of_real_conversions() {
    let step = |extent, target_stride, source_stride| Loop { extent, target_stride, source_stride };
    let cases = [
        ("transpose [200, 150]", vec![step(200, 1, 150), step(150, 200, 1)]),
        ("scan stack, one layer", vec![step(130, 1, 96), step(96, 130 * 5, 1)]),
        (
            "rotary halves interleaved, transposed",
            vec![step(2, 1, 32 * 100), step(32, 2, 100), step(4, 64, 6400), step(100, 256, 1)],
        ),
        ("every second row, transposed", vec![step(70, 1, 2 * 90), step(90, 70, 1)]),
        ("every second column, transposed", vec![step(70, 1, 180), step(90, 70, 2)]),
        ("every second column", vec![step(90, 1, 2), step(70, 90, 180)]),
        ("pairs swapped as wider elements", vec![step(2, 1, 1), step(66, 2, 140), step(70, 132, 2)]),
        ("rows cut", vec![step(33, 1, 1), step(50, 40, 77)]),
        ("stack on the last axis", vec![step(80, 3, 70), step(70, 240, 1)]),
        ("one element", vec![]),
        ("several blocks and edges", vec![step(300, 1, 1100), step(1100, 300, 1)]),
        ("whole blocks", vec![step(256, 1, 1030), step(1024, 256, 1)]),
    ];
    for (name, loops) in cases {
        let target_offset = if name == "whole blocks" { 0 } else { 2 };
        let job = Job { loops, source_offset: 3, target_offset, window: 1, shift: 1 };
        for unit in [1, 2, 3, 4, 8, 16] {
            check_gather(&job, &Decode::Copy, unit, unit, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for source in FLOATS {
            for target in FLOATS {
                let decode = Decode::Program(cast(source, target));
                check_gather(&job, &decode, width(source), width(target), None)
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
            }
        }
    }
}

fn copy_of(loops: &[Loop], source_offset: u64, source_base: u64, source: usize, target: usize) {
    let job = Gather { decode: &Decode::Copy, target_bytes: 2, loops, source_offset, target_offset: 0 };
    gather(Stores::Cached, &job, &[Window { bytes: &vec![0; source], start: 2 * source_base }], &mut vec![0; target]);
}

#[test]
#[should_panic(expected = "the loops reach byte Some(20) of 19 source bytes")]
fn access_past_the_source_is_refused() {
    copy_of(&[Loop { extent: 4, target_stride: 1, source_stride: 3 }], 0, 0, 19, 8);
}

#[test]
#[should_panic(expected = "the loops reach byte Some(8) of 7 target bytes")]
fn access_past_the_target_is_refused() {
    copy_of(&[Loop { extent: 4, target_stride: 1, source_stride: 3 }], 0, 0, 20, 7);
}

#[test]
#[should_panic(expected = "source element 4 of 2 bytes lies before the window at byte 10")]
fn access_before_the_window_is_refused() {
    copy_of(&[], 4, 5, 20, 8);
}

#[test]
#[should_panic(expected = "the loops reach byte None of 8 source bytes")]
fn overflowing_strides_are_refused() {
    copy_of(
        &[
            Loop { extent: 2, target_stride: 1, source_stride: u64::MAX / 2 },
            Loop { extent: 3, target_stride: 2, source_stride: 1 },
        ],
        0,
        0,
        8,
        16,
    );
}
