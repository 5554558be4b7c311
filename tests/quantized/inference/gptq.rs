//! GPTQ.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, f16_at, field_at, noise};

fn config(bits: u64, size: i64, act_order: bool) -> Value {
    json!({"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": false, "lm_head": false})
}

fn version(mut config: Value, format: &str) -> Value {
    config["checkpoint_format"] = json!(format);
    config
}

fn matrix(repository: Repository, module: &str, (inner, out): (u64, u64), bits: u64, groups: u64) -> Repository {
    // Some zero points wrap.
    let mut zeros = noise(5, (groups * (out * bits / 32) * 4) as usize);
    zeros[..4].copy_from_slice(&[0xff, 0x0f, 0xf0, 0xff]);
    repository
        .noise(&format!("{module}.qweight"), DType::I32, &[inner * bits / 32, out])
        .bytes(&format!("{module}.qzeros"), DType::I32, &[groups, out * bits / 32], zeros)
        .noise(&format!("{module}.scales"), DType::F16, &[groups, out])
}

fn index(repository: Repository, module: &str, groups: &[i32]) -> Repository {
    let bytes = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
    repository.bytes(&format!("{module}.g_idx"), DType::I32, &[groups.len() as u64], bytes)
}

/// `plus` is what is added to stored zero points.
fn check(
    repository: &Repository,
    module: &str,
    (inner, out): (usize, usize),
    (bits, plus): (usize, i32),
    order: &[i32],
) {
    let opened = repository.open();
    let part = |word: &str| opened.stored(&format!("{module}.{word}"));
    let (codes, zeros, scales, fields) = (part("qweight"), part("qzeros"), part("scales"), 32 / bits);
    opened.check(&format!("{module}.weight"), "gptq", &[out as u64, inner as u64], |n| {
        let (o, i) = (n / inner, n % inner);
        let group = order[i] as usize;
        let q = field_at(&codes, i / fields * out + o, i % fields, bits);
        let z = field_at(&zeros, group * (out / fields) + o / fields, o % fields, bits);
        (q - (z + plus) % (1 << bits)) as f32 * f16_at(&scales, group * out + o)
    });
}

#[test]
fn both_versions_and_widths_with_groups_in_order() {
    for (bits, (inner, out), size) in [(4, (40, 32), 8), (4, (40, 32), 16), (8, (12, 20), 8), (4, (16, 64), -1)] {
        let group = if size < 0 { inner } else { size as u64 };
        let groups = inner.div_ceil(group);
        let order: Vec<i32> = (0..inner).map(|i| (i / group) as i32).collect();
        let config = config(bits, size, false);
        for (config, plus) in
            [(config.clone(), 1), (version(config.clone(), "gptq"), 1), (version(config.clone(), "gptq_v2"), 0)]
        {
            let without = matrix(Repository::new(config), "a", (inner, out), bits, groups);
            let sizes = (inner as usize, out as usize);
            check(&without, "a", sizes, (bits as usize, plus), &order);
            let with = index(without, "a", &order);
            check(&with, "a", sizes, (bits as usize, plus), &order);
            assert_eq!(with.open().left_out(), ["a.g_idx"]);
        }
    }
}

#[test]
fn act_order_gives_each_row_its_own_group() {
    for (bits, plus, format) in [(4, 1, "gptq"), (4, 0, "gptq_v2"), (8, 1, "gptq")] {
        let order: Vec<i32> = (0..40).map(|i| (i * 7 + 3) % 3).collect();
        let turned: Vec<i32> = order.iter().rev().copied().collect();
        let config = version(config(bits, 16, true), format);
        let repository = matrix(Repository::new(config), "a", (40, 32), bits, 3);
        let repository = matrix(repository, "b", (40, 32), bits, 3);
        let repository = index(index(repository, "a", &order), "b", &turned);
        check(&repository, "a", (40, 32), (bits as usize, plus), &order);
        check(&repository, "b", (40, 32), (bits as usize, plus), &turned);
        let opened = repository.open();
        let version = if plus == 1 { 1 } else { 2 };
        let text = format!("gptq version {version}: 2 weights of {bits}-bit integers, 2 with act-order");
        assert_eq!(opened.checkpoint.quantized().schemes[0].text, text);
    }
}

#[test]
fn expressions_give_modules_their_own_bits_and_the_first_counts() {
    let mut config = config(4, 8, false);
    config["dynamic"] =
        json!({"-:.*skipped": {}, "+:.*\\.wide$": {"bits": 8, "group_size": 16}, ".*": {"desc_act": true}});
    let repository = matrix(Repository::new(config), "model.wide", (16, 32), 8, 1);
    let order: Vec<i32> = (0..16).rev().map(|i| i / 8).collect();
    let repository = index(matrix(repository, "model.other", (16, 32), 4, 2), "model.other", &order);
    check(&repository, "model.wide", (16, 32), (8, 1), &[0; 16]);
    check(&repository, "model.other", (16, 32), (4, 1), &order);
    let plain = repository.noise("model.skipped.weight", DType::F16, &[4, 4]).open();
    assert_eq!(plain.decoded(), ["model.other.weight", "model.wide.weight"]);
}

#[test]
fn expressions_look_ahead_and_must_match_some_module() {
    let with = |key: &str| {
        let mut config = config(4, 8, false);
        config["dynamic"] = json!({key: {"bits": 8, "group_size": 16}});
        matrix(Repository::new(config), "model.wide", (16, 32), 8, 1)
    };
    check(&with("+:model\\.(?!other)"), "model.wide", (16, 32), (8, 1), &[0; 16]);
    let key = "+:language_model\\.wide";
    let mut config = config(4, 8, false);
    config["dynamic"] = json!({key: {"bits": 8, "group_size": 16}});
    let opened = matrix(Repository::new(config), "model.wide", (16, 32), 4, 2).open();
    let said: Vec<_> = opened.checkpoint.quantized().unsupported.iter().map(|of| of.method.clone()).collect();
    assert_eq!(
        said,
        [format!("gptq, whose configuration has settings of its own for {key:?}, which matches no module here")]
    );
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let mut repository = Repository::new(config(4, 8, true));
    let order = [0; 16];
    for module in ["a", "b", "c", "d", "e", "f", "h"] {
        repository = index(matrix(repository, module, (16, 16), 4, 2), module, &order);
    }
    repository = index(repository.without("f.g_idx"), "f", &[-1; 16]);
    let repository = index(matrix(repository, "g", (16, 12), 4, 2), "g", &order)
        .without("a.scales")
        .without("b.qzeros")
        .without("c.g_idx")
        .without("h.qweight")
        .instead("d.scales", DType::F16, &[3, 16])
        .instead("e.g_idx", DType::I32, &[15]);
    repository.is_refused(&[
        "tensor \"a.qweight\": expected a.scales to decode it, found no such tensor",
        "tensor \"b.qweight\": expected b.qzeros to decode it, found no such tensor",
        "tensor \"c.qweight\": expected c.g_idx, which desc_act needs, found no such tensor",
        "tensor \"d.scales\": expected F16 [2, 16] to decode \"d.weight\", found F16 [3, 16]",
        "tensor \"e.g_idx\": expected I32 [16], a group for each input of e.qweight, found I32 [15]",
        "tensor \"f.g_idx\": expected groups below 2, found -1 for input 0",
        "tensor \"g.qweight\": expected a multiple of 8 columns, whose zero points fill words, found [2, 12]",
        "tensor \"h.g_idx\": expected codes h.qweight beside it, found no such tensor",
    ]);
    let order: Vec<i32> = (0..16).rev().map(|i| i / 8).collect();
    index(matrix(Repository::new(config(4, 8, false)), "a", (16, 16), 4, 2), "a", &order).is_refused(&[
        "tensor \"a.g_idx\": expected groups of 8 in order, as desc_act false says, found another order",
    ]);
    // Codes of 4 bits, and 8 that are configured.
    matrix(Repository::new(config(8, 8, false)), "a", (16, 16), 4, 2)
        .is_refused(&["tensor \"a.qzeros\": expected I32 [1, 4] to decode \"a.weight\", found I32 [2, 2]"]);
}

#[test]
fn other_widths_and_other_formats_stay_raw_by_name() {
    for (key, value, name) in [
        ("bits", json!(2), "gptq of 2 bits"),
        ("bits", json!(3), "gptq of 3 bits"),
        ("bits", json!(5), "gptq of 5 bits"),
        ("bits", json!(6), "gptq of 6 bits"),
        ("bits", json!(7), "gptq of 7 bits"),
        ("bits", Value::Null, "gptq without bits"),
        ("group_size", Value::Null, "gptq with no group_size"),
        ("checkpoint_format", json!("marlin"), "gptq marlin"),
        ("checkpoint_format", json!("gptq_p"), "gptq gptq_p"),
        ("is_marlin_format", json!(true), "gptq marlin"),
        ("pack_dtype", json!("int16"), "gptq packed as \"int16\""),
        ("dynamic", json!({"-:.*a": {}}), "gptq, but its configuration leaves this tensor unquantized"),
        ("dynamic", json!({"(": {}}), "gptq with \"(\", an expression that is not matched here"),
    ] {
        let mut config = config(4, 8, false);
        config[key] = value;
        matrix(Repository::new(config), "model.a", (16, 16), 4, 2).stays_raw(name, 1);
    }
}
