//! bitsandbytes.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, f32_at, noise};

const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The table of 4-bit floats: codes 0 to 7, and the same below zero, where there is no -0.0.
fn fp4() -> [f32; 16] {
    let magnitudes = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    std::array::from_fn(|code| (if code > 8 { -magnitudes[code - 8] } else { magnitudes[code % 8] }) / 12.0)
}

fn config(bits: u32, kind: &str) -> Value {
    json!({"quant_method": "bitsandbytes", "_load_in_8bit": bits == 8, "_load_in_4bit": bits == 4,
           "load_in_8bit": bits == 8, "load_in_4bit": bits == 4, "bnb_4bit_quant_type": kind,
           "llm_int8_skip_modules": ["lm_head"], "bnb_4bit_quant_storage": "uint8"})
}

/// Of a model that is bf16 otherwise.
fn repository(bits: u32, kind: &str) -> Repository {
    let mut repository = Repository::new(config(bits, kind));
    repository.config["dtype"] = json!("bfloat16");
    repository
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const OFFSET: f64 = 0.062_301_713_973_283_77;

fn state(kind: &str, extents: &[u64], block: u64, nested: Option<u64>) -> Value {
    let mut state = json!({"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": extents});
    if let Some(size) = nested {
        state["nested_blocksize"] = json!(size);
        state["nested_dtype"] = json!("float32");
        state["nested_offset"] = json!(OFFSET);
    }
    state
}

fn described(repository: Repository, name: &str, kind: &str, state: &Value) -> Repository {
    let text = state.to_string().into_bytes();
    repository.bytes(&format!("{name}.quant_state.bitsandbytes__{kind}"), DType::U8, &[text.len() as u64], text)
}

fn matrix(
    repository: Repository,
    name: &str,
    kind: &str,
    extents: &[u64],
    block: u64,
    nested: Option<u64>,
) -> Repository {
    let count: u64 = extents.iter().product();
    let blocks = count.div_ceil(block);
    let map = if kind == "nf4" { NF4 } else { fp4() };
    let repository = repository.noise(name, DType::U8, &[count.div_ceil(2), 1]).bytes(
        &format!("{name}.quant_map"),
        DType::F32,
        &[16],
        floats(&map),
    );
    let repository = match nested {
        None => repository.noise(&format!("{name}.absmax"), DType::F32, &[blocks]),
        Some(size) => repository
            .noise(&format!("{name}.absmax"), DType::U8, &[blocks])
            .noise(&format!("{name}.nested_absmax"), DType::F32, &[blocks.div_ceil(size)])
            .noise(&format!("{name}.nested_quant_map"), DType::F32, &[256]),
    };
    described(repository, name, kind, &state(kind, extents, block, nested))
}

fn check(repository: &Repository, name: &str, kind: &str, extents: &[u64], block: usize, nested: Option<usize>) {
    let opened = repository.open();
    let part = |word: &str| opened.stored(&format!("{name}.{word}"));
    let (codes, absmax) = (opened.stored(name), part("absmax"));
    let map = if kind == "nf4" { NF4 } else { fp4() };
    let more = nested.map(|size| (size, part("nested_quant_map"), part("nested_absmax")));
    opened.check(name, "bitsandbytes", extents, |n| {
        let code = codes[n / 2] >> (if n % 2 == 0 { 4 } else { 0 }) & 15;
        let k = n / block;
        let largest = match &more {
            None => f32_at(&absmax, k),
            Some((size, map, outer)) => f32_at(map, usize::from(absmax[k])) * f32_at(outer, k / size) + OFFSET as f32,
        };
        map[usize::from(code)] * largest
    });
}

#[test]
fn four_bits_over_flat_tensors_with_the_high_nibble_first() {
    for kind in ["nf4", "fp4"] {
        // An odd number of elements, blocks that go over the ends of rows, a partial last block.
        for (extents, block, nested) in [
            (vec![7u64, 33], 16u64, None),
            (vec![7, 33], 16, Some(4u64)),
            (vec![64, 96], 64, Some(256)),
            (vec![3, 5, 8], 32, None),
        ] {
            let repository = matrix(repository(4, kind), "a.weight", kind, &extents, block, nested);
            let repository = matrix(repository, "b.weight", kind, &extents, 2 * block, nested);
            let repository = repository.noise("lm_head.weight", DType::BF16, &[8, 12]);
            let size = nested.map(|size| size as usize);
            check(&repository, "a.weight", kind, &extents, block as usize, size);
            check(&repository, "b.weight", kind, &extents, 2 * block as usize, size);
            let opened = repository.open();
            let mut gone = vec!["quant_map".to_owned(), format!("quant_state.bitsandbytes__{kind}")];
            gone.extend(nested.map(|_| "nested_quant_map".to_owned()));
            gone.sort();
            let gone: Vec<String> = ["a", "b"]
                .iter()
                .flat_map(|module| gone.iter().map(move |word| format!("{module}.weight.{word}")))
                .collect();
            assert_eq!(opened.left_out(), gone);
            let count = if nested.is_some() { 2 } else { 0 };
            let text = format!("bitsandbytes: 2 weights of 4-bit floats, {count} with nested statistics");
            assert_eq!(opened.checkpoint.quantized().schemes[0].text, text);
        }
    }
}

#[test]
fn bytes_may_be_stored_as_wider_numbers() {
    let repository = matrix(repository(4, "nf4"), "a.weight", "nf4", &[8, 12], 16, None);
    for dtype in [DType::BF16, DType::F32] {
        let count = 8 * 12 * 4 / dtype.bits();
        let bytes = noise(9, 48);
        let repository = matrix(Repository::new(config(4, "nf4")), "a.weight", "nf4", &[8, 12], 16, None);
        check(
            &repository.without("a.weight").bytes("a.weight", dtype, &[count, 1], bytes),
            "a.weight",
            "nf4",
            &[8, 12],
            16,
            None,
        );
    }
    repository
        .instead("a.weight", DType::I32, &[12, 1])
        .is_refused(&["tensor \"a.weight\": expected bytes of codes, as U8, BF16, F16 or F32, found I32"]);
}

fn eight(repository: Repository, module: &str, (out, inner): (u64, u64), format: u8) -> Repository {
    repository
        .noise(&format!("{module}.weight"), DType::I8, &[out, inner])
        .noise(&format!("{module}.SCB"), DType::F32, &[out])
        .bytes(&format!("{module}.weight_format"), DType::U8, &[], vec![format])
}

#[test]
fn eight_bits_are_rounded_twice() {
    let mut repository = eight(repository(8, "nf4"), "a", (24, 33), 0).noise("lm_head.weight", DType::F16, &[4, 4]);
    repository.config["dtype"] = json!("float16");
    let opened = repository.open();
    let (codes, statistics) = (opened.stored("a.weight"), opened.stored("a.SCB"));
    opened.check("a.weight", "bitsandbytes", &[24, 33], |n| {
        f32::from(codes[n].cast_signed()) * f32_at(&statistics, n / 33) * 7.874_015_718_698_502e-3_f64 as f32
    });
    assert_eq!((opened.decoded(), opened.left_out()), (vec!["a.weight"], vec!["a.weight_format"]));
    assert_eq!(opened.checkpoint.quantized().schemes[0].text, "bitsandbytes: 1 weights of 8-bit integers");
}

#[test]
fn tiled_integers_and_skipped_modules_stay_raw_by_name() {
    for (format, name) in [(1, "col32"), (2, "col_turing"), (3, "col_ampere")] {
        eight(repository(8, "nf4"), "a", (24, 33), format).stays_raw(&format!("bitsandbytes int8 {name}"), 1);
    }
    let skipped = "bitsandbytes, but its configuration leaves this tensor unquantized";
    eight(repository(8, "nf4"), "lm_head", (24, 33), 0).stays_raw(skipped, 1);
    matrix(repository(4, "nf4"), "lm_head.weight", "nf4", &[24, 32], 64, None).stays_raw(skipped, 1);
}

#[test]
fn all_of_eight_bits_that_does_not_agree_is_refused_at_once() {
    let mut repository = repository(8, "nf4");
    for module in ["a", "b", "c", "d"] {
        repository = eight(repository, module, (24, 33), 0);
    }
    eight(repository, "e", (24, 33), 4)
        .without("a.SCB")
        .without("d.weight")
        .instead("b.SCB", DType::F32, &[23])
        .instead("c.weight", DType::U8, &[24, 33])
        .is_refused(&[
            "tensor \"a.weight\": expected a.SCB to decode it, found no such tensor",
            "tensor \"b.SCB\": expected F32 [24] to decode \"b.weight\", found F32 [23]",
            "tensor \"c.weight\": expected I8 [24, 33] to decode \"c.weight\", found U8 [24, 33]",
            "tensor \"d.SCB\": expected codes d.weight beside it, found no such tensor",
            "tensor \"e.weight_format\": expected one byte of 0 to 3, found [4] in 1 bytes",
        ]);
    eight(self::repository(4, "nf4"), "a", (24, 33), 0)
        .is_refused(&["tensor \"a.weight\": expected no 8-bit integers, as load_in_8bit false says, found I8"]);
}

#[test]
fn all_of_four_bits_that_does_not_agree_is_refused_at_once() {
    let mut repository = repository(4, "nf4");
    for module in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        repository = matrix(repository, &format!("{module}.weight"), "nf4", &[7, 33], 16, Some(4));
    }
    let mut map = NF4;
    map[3] = -0.4;
    matrix(repository, "i.weight", "fp4", &[7, 33], 16, None)
        .without("a.weight.absmax")
        .without("b.weight.quant_map")
        .without("c.weight.nested_absmax")
        .without("d.weight.quant_state.bitsandbytes__nf4")
        .without("e.weight")
        .without("f.weight.quant_map")
        .bytes("f.weight.quant_map", DType::F32, &[16], floats(&map))
        .instead("g.weight.nested_quant_map", DType::F32, &[255])
        .instead("h.weight.absmax", DType::F32, &[15])
        .is_refused(&[
            "tensor \"a.weight\": expected a.weight.absmax to decode it, found no such tensor",
            "tensor \"b.weight\": expected b.weight.quant_map to decode it, found no such tensor",
            "tensor \"c.weight\": expected c.weight.nested_absmax to decode it, found no such tensor",
            "tensor \"d.weight.absmax\": expected d.weight.quant_state.bitsandbytes__nf4 or d.weight.quant_state.bitsandbytes__fp4 beside it",
            "tensor \"e.weight.quant_state.bitsandbytes__nf4\": expected codes e.weight beside it, found no such tensor",
            "tensor \"f.weight.quant_map\": expected the table of nf4, found other numbers",
            "tensor \"g.weight.nested_quant_map\": expected F32 [256], found F32 [255]",
            "tensor \"h.weight.absmax\": expected U8 [15] to decode \"h.weight\", found F32 [15]",
            "tensor \"i.weight.quant_state.bitsandbytes__fp4\": expected nf4, which is bnb_4bit_quant_type, found fp4",
        ]);
    self::repository(4, "nf4")
        .noise("a.weight", DType::U8, &[116, 1])
        .is_refused(&["tensor \"a.weight\": expected a.weight.quant_state.bitsandbytes__nf4 or"]);
    matrix(self::repository(8, "nf4"), "a.weight", "nf4", &[7, 33], 16, None)
        .is_refused(&["expected no 4-bit floats, as load_in_4bit false says, found a quant_state"]);
}

#[test]
fn each_member_of_the_description_is_checked() {
    let name = "a.weight.quant_state.bitsandbytes__nf4";
    let whole = matrix(repository(4, "nf4"), "a.weight", "nf4", &[7, 33], 16, Some(4)).without(name);
    let mut whole = Some(whole);
    for (key, value, expected) in [
        ("quant_type", json!("fp4"), "quant_type: nf4, found \"fp4\""),
        ("dtype", json!("int8"), "dtype: float32, float16 or bfloat16, found \"int8\""),
        ("blocksize", json!(0), "blocksize: a positive number, found 0"),
        ("shape", json!("7x33"), "shape: numbers, found \"7x33\""),
        (
            "shape",
            json!([7, 35]),
            "tensor \"a.weight\": expected U8 [123, 1] to decode \"a.weight\", found U8 [116, 1]",
        ),
        ("nested_dtype", json!("float16"), "nested_dtype: float32, found \"float16\""),
        ("nested_offset", json!("0"), "nested_offset: a number, found \"0\""),
        ("nested_blocksize", json!(-1), "nested_blocksize: a positive number, found -1"),
        (
            "nested_blocksize",
            json!(5),
            "\"a.weight.nested_absmax\": expected F32 [3] to decode \"a.weight\", found F32 [4]",
        ),
    ] {
        let mut state = state("nf4", &[7, 33], 16, Some(4));
        state[key] = value;
        let repository = described(whole.take().unwrap(), "a.weight", "nf4", &state);
        repository.is_refused(&[expected]);
        whole = Some(repository.without(name));
    }
    let plain = state("nf4", &[7, 33], 16, None);
    described(whole.take().unwrap(), "a.weight", "nf4", &plain)
        .is_refused(&["expected nested_offset, for nested_absmax is there, found none"]);
}
