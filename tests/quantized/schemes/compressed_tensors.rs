//! Formats of compressed-tensors, and the group of each module.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Opened, Repository, bf16_at, e2m1, e4m3, e8m0, f16_at, f32_at, field_at, nibble_at, noise};

/// A group of this format, whose weights are `weights`.
fn group(format: &str, targets: &Value, weights: &Value) -> Value {
    json!({"targets": targets, "weights": weights, "format": format, "input_activations": null})
}

fn configured(format: &str, groups: &[Value], ignore: &Value) -> Value {
    let groups: serde_json::Map<String, Value> =
        groups.iter().enumerate().map(|(n, group)| (format!("group_{n}"), group.clone())).collect();
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ignore,
           "quantization_status": "compressed", "kv_cache_scheme": null})
}

fn linear(format: &str, weights: &Value) -> Repository {
    Repository::new(configured(format, &[group(format, &json!(["Linear"]), weights)], &json!(["lm_head"])))
}

fn integers(bits: u64, strategy: &str, size: Option<u64>, symmetric: bool) -> Value {
    json!({"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric,
           "dynamic": false, "actorder": null})
}

fn floats(bits: u64, strategy: &str, size: Option<u64>) -> Value {
    json!({"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size, "symmetric": true})
}

fn shape_of(out: u64, inner: u64, dtype: DType) -> Vec<u8> {
    [out, inner]
        .iter()
        .flat_map(|extent| extent.to_le_bytes()[..if dtype == DType::I64 { 8 } else { 4 }].to_vec())
        .collect()
}

/// A packed matrix. Rows of groups are as wide as their groups.
fn packed(repository: Repository, module: &str, (out, inner): (u64, u64), bits: u64, groups: u64) -> Repository {
    let words = (inner * bits).div_ceil(32);
    let dtype = if bits == 8 { DType::I64 } else { DType::I32 };
    repository
        .noise(&format!("{module}.weight_packed"), DType::I32, &[out, words])
        .noise(&format!("{module}.weight_scale"), DType::BF16, &[out, groups])
        .bytes(&format!("{module}.weight_shape"), dtype, &[2], shape_of(out, inner, dtype))
}

/// Integers of a packed matrix by the formula; `group` elements have one scale.
fn check_packed(opened: &Opened, module: &str, (out, inner): (usize, usize), bits: usize, group: usize, zeros: bool) {
    let part = |word: &str| opened.stored(&format!("{module}.{word}"));
    let (codes, scales) = (part("weight_packed"), part("weight_scale"));
    let zero_points = zeros.then(|| part("weight_zero_point"));
    let (words, fields, groups) = ((inner * bits).div_ceil(32), 32 / bits, inner.div_ceil(group));
    let name = format!("{module}.weight");
    opened.check(&name, "pack_quantized", &[out as u64, inner as u64], |n| {
        let (o, i) = (n / inner, n % inner);
        let half = 1 << (bits - 1);
        let q = field_at(&codes, o * words + i / fields, i % fields, bits) - half;
        let z = zero_points
            .as_ref()
            .map_or(0, |zero_points| field_at(zero_points, o / fields * groups + i / group, o % fields, bits) - half);
        (q - z) as f32 * bf16_at(&scales, o * groups + i / group)
    });
}

#[test]
fn packed_integers_of_groups_and_channels() {
    for bits in [1, 2, 4, 8] {
        let grouped = linear("pack-quantized", &integers(bits, "group", Some(32), true));
        let opened = packed(grouped, "model.a", (5, 96), bits, 3).open();
        check_packed(&opened, "model.a", (5, 96), bits as usize, 32, false);
        assert_eq!(opened.left_out(), ["model.a.weight_shape"]);
        // Odd widths: the remaining bits of the last word are no elements.
        let by_row = linear("pack-quantized", &integers(bits, "channel", None, true));
        let opened = packed(by_row, "model.a", (3, 37), bits, 1).open();
        check_packed(&opened, "model.a", (3, 37), bits as usize, 37, false);
    }
}

#[test]
fn packed_integers_with_zero_points() {
    for (bits, out) in [(4u64, 13u64), (8, 7), (2, 17)] {
        let rows = out.div_ceil(32 / bits);
        let grouped = linear("pack-quantized", &integers(bits, "group", Some(32), false));
        let grouped = packed(grouped, "model.a", (out, 64), bits, 2);
        let opened = grouped.noise("model.a.weight_zero_point", DType::I32, &[rows, 2]).open();
        check_packed(&opened, "model.a", (out as usize, 64), bits as usize, 32, true);
        let by_row = linear("pack-quantized", &integers(bits, "channel", None, false));
        let by_row = packed(by_row, "model.a", (out, 37), bits, 1);
        let opened = by_row.noise("model.a.weight_zero_point", DType::I32, &[rows, 1]).open();
        check_packed(&opened, "model.a", (out as usize, 37), bits as usize, 37, true);
    }
}

#[test]
fn packed_integers_with_one_scale() {
    for extents in [&[1][..], &[]] {
        let one = linear("pack-quantized", &integers(4, "tensor", None, true));
        let one = packed(one, "a", (3, 40), 4, 1).without("a.weight_scale");
        let opened = one.bytes("a.weight_scale", DType::F16, extents, vec![0x33, 0x2b]).open();
        let (codes, scale) = (opened.stored("a.weight_packed"), opened.stored("a.weight_scale"));
        opened.check("a.weight", "pack_quantized", &[3, 40], |n| {
            (field_at(&codes, n / 8, n % 8, 4) - 8) as f32 * f16_at(&scale, 0)
        });
    }
}

#[test]
fn weight_shape_must_agree_with_words_and_scales() {
    // Twice as many bits and half as large groups give half as many columns, and nothing else contradicts that.
    for (bits, group, said) in [(8, 16, "[9, 32]"), (4, 32, "")] {
        let repository =
            packed(linear("pack-quantized", &integers(bits, "group", Some(group), true)), "a", (9, 64), 4, 2);
        if said.is_empty() {
            assert_eq!(repository.open().decoded(), ["a.weight"]);
        } else {
            repository.is_refused(&[&format!("tensor \"a.weight_shape\": expected {said}"), "found [9, 64]"]);
        }
    }
    packed(linear("pack-quantized", &integers(4, "group", Some(32), true)), "a", (9, 64), 4, 2)
        .without("a.weight_packed")
        .noise("a.weight", DType::BF16, &[9, 64])
        .is_refused(&[
            "tensor \"a.weight\": expected a matrix of codes, as \"a.weight_scale\" and quantization_config say",
        ]);
}

#[test]
fn packed_integers_that_do_not_agree_are_refused_at_once() {
    let by_group = linear("pack-quantized", &integers(4, "group", Some(32), false));
    let mut repository = by_group;
    for module in ["a", "b", "c", "d", "e"] {
        repository = packed(repository, module, (9, 64), 4, 2).noise(
            &format!("{module}.weight_zero_point"),
            DType::I32,
            &[2, 2],
        );
    }
    let repository = repository
        .without("a.weight_scale")
        .without("b.weight_zero_point")
        .instead("c.weight_scale", DType::BF16, &[9, 3])
        .instead("d.weight_packed", DType::U8, &[9, 8])
        .instead("e.weight_zero_point", DType::I32, &[9, 2])
        .noise("f.weight_packed", DType::I32, &[9, 8])
        .noise("f.weight_scale", DType::I32, &[9, 2])
        .noise("f.weight_zero_point", DType::I32, &[2, 2])
        .noise("f.weight_shape", DType::I64, &[2])
        .noise("i.weight_packed", DType::I32, &[9, 8])
        .noise("i.weight_scale", DType::BF16, &[9, 2])
        .noise("i.weight_zero_point", DType::I32, &[2, 2]);
    let repository = packed(repository, "g", (9, 64), 4, 2).noise("g.weight_zero_point", DType::I32, &[2, 2]);
    let repository = packed(repository, "h", (9, 64), 4, 2).without("h.weight_packed").without("h.weight_shape");
    repository.is_refused(&[
        "tensor \"a.weight_packed\": expected a.weight_scale to decode it, found no such tensor",
        "tensor \"b.weight_packed\": expected b.weight_zero_point to decode it, found no such tensor",
        "tensor \"c.weight_packed\": expected I32 [9, 12] for 96 columns of 4 bits, found I32 [9, 8]",
        "tensor \"d.weight_packed\": expected I32 [9, 8] to decode \"d.weight\", found U8 [9, 8]",
        "tensor \"e.weight_zero_point\": expected I32 [2, 2] to decode \"e.weight\", found I32 [9, 2]",
        "tensor \"h.weight_scale\": expected codes h.weight or h.weight_packed beside it, found no such tensor",
        "tensor \"i.weight_packed\": expected i.weight_shape to decode it, found no such tensor",
        "tensor \"f.weight_scale\": expected a float as the scale of \"f.weight_packed\", found I32",
    ]);
    let by_row = || linear("pack-quantized", &integers(4, "channel", None, true));
    packed(by_row(), "a", (3, 37), 4, 1)
        .without("a.weight_shape")
        .is_refused(&["tensor \"a.weight_packed\": expected a.weight_shape to decode it"]);
    for (rows, columns, said) in [
        (4, 37, "tensor \"a.weight_shape\": expected [3, in], found [4, 37]"),
        (3, 41, "tensor \"a.weight_packed\": expected I32 [3, 6] for 41 columns of 4 bits, found I32 [3, 5]"),
        (3, 32, "expected I32 [3, 4] for 32 columns"),
    ] {
        let other = packed(by_row(), "a", (3, 37), 4, 1).without("a.weight_shape");
        other.bytes("a.weight_shape", DType::I32, &[2], shape_of(rows, columns, DType::I32)).is_refused(&[said]);
    }
}

#[test]
fn variants_that_are_not_decoded_stay_raw_by_name() {
    let matrix = |weights: &Value| packed(linear("pack-quantized", weights), "a", (8, 64), 4, 2);
    let with = |key: &str, value: Value| {
        let mut weights = integers(4, "group", Some(32), true);
        weights[key] = value;
        weights
    };
    for (weights, said) in [
        (with("num_bits", json!(3)), "compressed-tensors pack-quantized of 3 bits, int, a scale for 32"),
        (with("strategy", json!("token")), "compressed-tensors pack-quantized with strategy \"token\""),
        (with("group_size", json!(0)), "compressed-tensors pack-quantized with a group_size of 0"),
        (with("type", json!("float")), "compressed-tensors pack-quantized of 4 bits, float, a scale for 32"),
    ] {
        matrix(&weights).stays_raw(said, 1);
    }
    let ordered = with("actorder", json!("group"));
    matrix(&ordered)
        .is_refused(&["tensor \"a.weight_packed\": expected a.weight_g_idx to decode it, found no such tensor"]);
    let order = |groups: &[i32]| groups.iter().flat_map(|group| group.to_le_bytes()).collect::<Vec<u8>>();
    let index = matrix(&ordered).bytes("a.weight_g_idx", DType::I32, &[64], order(&[2; 64]));
    index.is_refused(&["tensor \"a.weight_g_idx\": expected groups below 2, found 2 for input 0"]);
    let unasked = matrix(&integers(4, "group", Some(32), true));
    let unasked = unasked.bytes("a.weight_g_idx", DType::I32, &[64], order(&[0; 64]));
    unasked.stays_raw("compressed-tensors pack-quantized with weight_g_idx, and without actorder", 1);
    let symmetric = matrix(&integers(4, "group", Some(32), true));
    let zeros = symmetric.noise("a.weight_zero_point", DType::I32, &[1, 2]);
    zeros.stays_raw("compressed-tensors pack-quantized, symmetric and with zero points", 1);
    for (format, said) in [
        ("int-quantized", "compressed-tensors int-quantized of 8 bits, int, a scale per channel"),
        ("marlin-24", "compressed-tensors marlin-24 of 8 bits, int, a scale per channel"),
    ] {
        let repository = linear(format, &integers(8, "channel", None, true));
        let repository = repository.noise("a.weight", DType::I8, &[4, 8]).noise("a.weight_scale", DType::BF16, &[4, 1]);
        repository.stays_raw(said, 1);
    }
    let mut sparse = matrix(&integers(4, "group", Some(32), true));
    sparse.config["quantization_config"]["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
    sparse.stays_raw("compressed-tensors sparse-24-bitmask", 1);
    let mut ahead = matrix(&integers(4, "group", Some(32), true));
    ahead.config["quantization_config"]["ignore"] = json!(["re:("]);
    ahead.stays_raw("compressed-tensors with \"re:(\", an expression that is not matched here", 1);
    // Expressions that look ahead are evaluated: this one speaks of other modules.
    ahead.config["quantization_config"]["ignore"] = json!(["re:^(?!a).*"]);
    assert!(ahead.open().checkpoint.quantized().unsupported.is_empty());
    ahead.config["quantization_config"]["ignore"] = json!(["re:(?!b)a"]);
    assert!(ahead.open().decoded().is_empty());
    // The tensors have codes; the configuration says that there are none.
    let mut ignored = matrix(&integers(4, "group", Some(32), true));
    ignored.config["quantization_config"]["ignore"] = json!(["a"]);
    let said = "compressed-tensors, but its configuration leaves this tensor unquantized";
    ignored.stays_raw(said, 1);
    let mut blocks = floats(8, "block", None);
    blocks["block_structure"] = json!([3, 8]);
    let mut blocks = linear("float-quantized", &blocks).noise("a.weight", DType::F8E4M3, &[7, 37]).noise(
        "a.weight_scale",
        DType::BF16,
        &[3, 5],
    );
    blocks.config["quantization_config"]["ignore"] = json!(["a"]);
    blocks.stays_raw(said, 1);
}

#[test]
fn scaled_floats_by_tensor_channel_group_and_block() {
    for (strategy, more, scale, block) in [
        ("tensor", json!({}), vec![1], (7, 37)),
        ("tensor", json!({}), vec![], (7, 37)),
        ("channel", json!({}), vec![7, 1], (1, 37)),
        ("block", json!({"block_structure": [3, 8]}), vec![3, 5], (3, 8)),
        ("block", json!({"block_structure": "3x8"}), vec![3, 5], (3, 8)),
        ("group", json!({"group_size": 8}), vec![7, 5], (1, 8)),
    ] {
        for dtype in [DType::BF16, DType::F32] {
            let mut weights = floats(8, strategy, None);
            weights.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let repository = linear(if dtype == DType::F32 { "naive-quantized" } else { "float-quantized" }, &weights);
            let repository = repository.noise("a.weight", DType::F8E4M3, &[7, 37]);
            let opened = repository
                .noise("a.weight_scale", dtype, &scale)
                .noise("a.input_scale", DType::F32, &[1])
                .noise("model.layers.0.self_attn.k_scale", DType::F32, &[])
                .noise("model.layers.0.self_attn.v_scale", DType::F32, &[3])
                .open();
            assert_eq!(opened.left_out(), ["a.input_scale", "model.layers.0.self_attn.k_scale"]);
            let (codes, scales) = (opened.stored("a.weight"), opened.stored("a.weight_scale"));
            opened.check("a.weight", "scaled_fp8", &[7, 37], |n| {
                let at = (n / 37 / block.0) * 37usize.div_ceil(block.1) + n % 37 / block.1;
                let factor = if dtype == DType::F32 { f32_at(&scales, at) } else { bf16_at(&scales, at) };
                e4m3(codes[n]) * factor
            });
        }
    }
}

#[test]
fn scaled_floats_that_do_not_agree_are_refused_at_once() {
    let repository = linear("float-quantized", &floats(8, "channel", None))
        .noise("a.weight", DType::F8E4M3, &[6, 8])
        .noise("b.weight", DType::F8E4M3, &[6, 8])
        .noise("b.weight_scale", DType::BF16, &[6, 2])
        .noise("c.weight", DType::F8E4M3, &[6, 8])
        .noise("c.weight_scale", DType::U8, &[6, 1])
        .noise("d.weight", DType::BF16, &[6, 8])
        .noise("d.weight_scale", DType::BF16, &[6, 1]);
    repository.is_refused(&[
        "tensor \"a.weight\": expected a.weight_scale to decode it, found no such tensor",
        "tensor \"b.weight_scale\": expected BF16 [6, 1] to decode \"b.weight\", found BF16 [6, 2]",
        "tensor \"c.weight_scale\": expected a float as the scale of \"c.weight\", found U8",
        "tensor \"d.weight\": expected 8-bit floats, scaled by \"d.weight_scale\", found BF16",
    ]);
}

#[test]
fn nvfp4_divides_first() {
    let weights = floats(4, "tensor_group", Some(16));
    let matrix = || {
        linear("nvfp4-pack-quantized", &weights)
            .noise("a.weight_packed", DType::U8, &[5, 32])
            .noise("a.weight_scale", DType::F8E4M3, &[5, 4])
            .bytes("a.weight_global_scale", DType::F32, &[1], 1373.3f32.to_le_bytes().to_vec())
            .noise("a.input_global_scale", DType::F32, &[1])
    };
    let opened = matrix().open();
    assert_eq!(opened.left_out(), ["a.input_global_scale"]);
    let (codes, scales) = (opened.stored("a.weight_packed"), opened.stored("a.weight_scale"));
    let mut other_order = 0;
    opened.check("a.weight", "nvfp4", &[5, 64], |n| e2m1(nibble_at(&codes, n)) * (e4m3(scales[n / 16]) / 1373.3));
    for n in 0..5 * 64 {
        let (code, scale) = (e2m1(nibble_at(&codes, n)), e4m3(scales[n / 16]));
        other_order += usize::from((code * (scale / 1373.3)).to_bits() != (code * (scale * (1.0 / 1373.3))).to_bits());
    }
    assert!(other_order > 10, "the order of operations shows");
    matrix()
        .without("a.weight_global_scale")
        .is_refused(&["tensor \"a.weight_packed\": expected a.weight_global_scale to decode it, found no such tensor"]);
    matrix()
        .instead("a.weight_packed", DType::I32, &[5, 8])
        .instead("a.weight_scale", DType::BF16, &[5, 4])
        .is_refused(&["tensor \"a.weight_packed\": expected U8 [5, 8] to decode \"a.weight\", found I32 [5, 8]"]);
    matrix()
        .instead("a.weight_scale", DType::F8E4M3, &[5, 2])
        .instead("a.weight_global_scale", DType::BF16, &[1])
        .is_refused(&[
            "tensor \"a.weight_scale\": expected F8_E4M3 [5, 4] to decode \"a.weight\", found F8_E4M3 [5, 2]",
            "tensor \"a.weight_global_scale\": expected F32 [1] to decode \"a.weight\", found BF16 [1]",
        ]);
    matrix()
        .instead("a.weight_packed", DType::U8, &[5, 33])
        .is_refused(&["tensor \"a.weight_packed\": expected shape [out, in/2] with groups of 16, found [5, 33]"]);
}

#[test]
fn exponents_of_mxfp4_and_mxfp8() {
    let exponents = || [vec![0, 1, 254, 255, 127], noise(3, 4)].concat();
    let small = || {
        linear("mxfp4-pack-quantized", &floats(4, "group", Some(32)))
            .noise("a.weight_packed", DType::U8, &[3, 48])
            .bytes("a.weight_scale", DType::U8, &[3, 3], exponents())
    };
    let opened = small().open();
    let (codes, scales) = (opened.stored("a.weight_packed"), opened.stored("a.weight_scale"));
    opened.check("a.weight", "mx", &[3, 96], |n| e2m1(nibble_at(&codes, n)) * e8m0(scales[n / 32]));
    let wide = || {
        linear("mxfp8-quantized", &floats(8, "group", Some(32))).noise("a.weight", DType::F8E4M3, &[3, 96]).bytes(
            "a.weight_scale",
            DType::U8,
            &[3, 3],
            exponents(),
        )
    };
    let opened = wide().open();
    let (codes, scales) = (opened.stored("a.weight"), opened.stored("a.weight_scale"));
    opened.check("a.weight", "mx", &[3, 96], |n| e4m3(codes[n]) * e8m0(scales[n / 32]));
    small().without("a.weight_scale").is_refused(&["\"a.weight_packed\": expected a.weight_scale to decode it"]);
    wide().without("a.weight_scale").is_refused(&["\"a.weight\": expected a.weight_scale to decode it"]);
    wide().instead("a.weight", DType::BF16, &[3, 96]).is_refused(&["\"a.weight\": expected F8_E4M3 [3, 96]"]);
    wide().instead("a.weight_scale", DType::BF16, &[3, 3]).is_refused(&["\"a.weight_scale\": expected U8 [3, 3]"]);
    small().instead("a.weight_packed", DType::U8, &[3, 40]).is_refused(&["with groups of 32, found ["]);
    linear("mxfp4-pack-quantized", &floats(4, "group", Some(16)))
        .noise("a.weight_packed", DType::U8, &[3, 48])
        .noise("a.weight_scale", DType::U8, &[3, 6])
        .stays_raw("compressed-tensors mxfp4-pack-quantized of 4 bits, float, a scale for 16", 1);
}

#[test]
fn each_module_belongs_to_one_group() {
    let groups = [
        group("nvfp4-pack-quantized", &json!(["re:.*mlp\\..*"]), &floats(4, "tensor_group", Some(16))),
        group("float-quantized", &json!(["Linear"]), &floats(8, "channel", None)),
        group("pack-quantized", &json!(["layers.0.mlp.down"]), &integers(4, "group", Some(32), true)),
        // Not the first in alphabetical order.
        group("mxfp4-pack-quantized", &json!(["re:layers\\.10\\..*"]), &floats(4, "group", Some(32))),
    ];
    let config = configured("mixed-precision", &groups, &json!(["re:.*gate$", "layers.1.mlp.up"]));
    let mut repository = packed(Repository::new(config), "layers.0.mlp.down", (4, 64), 4, 2)
        .noise("layers.0.attn.q.weight", DType::F8E4M3, &[4, 8])
        .noise("layers.0.attn.q.weight_scale", DType::BF16, &[4, 1])
        .noise("layers.0.mlp.gate.weight", DType::BF16, &[4, 8])
        .noise("layers.1.mlp.up.weight", DType::BF16, &[4, 8])
        .noise("embed.weight", DType::BF16, &[4, 8]);
    for module in ["layers.0.mlp.up", "layers.10.mlp.up"] {
        repository = repository
            .noise(&format!("{module}.weight_packed"), DType::U8, &[4, 16])
            .noise(&format!("{module}.weight_scale"), DType::F8E4M3, &[4, 2])
            .noise(&format!("{module}.weight_global_scale"), DType::F32, &[1]);
    }
    let opened = repository.open();
    let found = opened.checkpoint.quantized();
    let mut schemes: Vec<_> = found.tensors.iter().map(|tensor| (&*tensor.name, tensor.scheme)).collect();
    schemes.sort_unstable();
    let expected = [
        ("layers.0.attn.q.weight", "scaled_fp8"),
        ("layers.0.mlp.down.weight", "pack_quantized"),
        ("layers.0.mlp.up.weight", "nvfp4"),
        ("layers.10.mlp.up.weight", "nvfp4"),
    ];
    assert_eq!(schemes, expected);
    assert!(found.unsupported.is_empty());
    assert_eq!(found.schemes.len(), 3);
}

/// Under another prefix the codes would be read as those of all other modules.
#[test]
fn a_group_for_modules_that_are_not_there_is_named() {
    for target in ["model.layers.0.mlp.down", "re:model\\..*down"] {
        let groups = [
            group("pack-quantized", &json!(["Linear"]), &integers(4, "group", Some(32), true)),
            group("pack-quantized", &json!([target]), &integers(8, "group", Some(32), true)),
        ];
        let config = configured("pack-quantized", &groups, &json!([]));
        let said = |module: &str, bits: u64| {
            let repository = packed(Repository::new(config.clone()), module, (4, 64), bits, 2);
            let opened = repository.open();
            opened.checkpoint.quantized().unsupported.iter().map(|of| of.method.clone()).collect::<Vec<_>>()
        };
        let method =
            format!("compressed-tensors, with a group of its own for {target:?}, which matches no module here");
        assert_eq!(said("language_model.layers.0.mlp.down", 4), [method]);
        assert!(said("model.layers.0.mlp.down", 8).is_empty());
    }
}

#[test]
fn embeddings_belong_to_the_group_of_their_class() {
    let groups = [
        group("pack-quantized", &json!(["Linear"]), &integers(4, "group", Some(32), true)),
        group("pack-quantized", &json!(["Embedding"]), &integers(8, "channel", None, true)),
    ];
    let config = configured("mixed-precision", &groups, &json!([]));
    let repository = packed(Repository::new(config), "model.embed_tokens", (5, 64), 8, 1);
    let opened = packed(repository, "layers.0.q", (4, 64), 4, 2).open();
    check_packed(&opened, "model.embed_tokens", (5, 64), 8, 64, false);
    check_packed(&opened, "layers.0.q", (4, 64), 4, 32, false);
}

#[test]
fn a_matrix_of_other_bits_than_configured_is_named_by_the_sizes_of_the_model() {
    // Both have codes and scales of the same shapes; `weight_shape` is read for the first of a kind.
    let repository = linear("pack-quantized", &integers(8, "group", Some(64), true));
    let repository = packed(repository, "model.layers.0.self_attn.q_proj", (64, 256), 4, 2);
    let mut repository = packed(repository, "model.layers.0.mixer.in_proj", (64, 128), 8, 2);
    repository.config["hidden_size"] = json!(256);
    let opened = repository.open();
    let found: Vec<&str> = opened.checkpoint.quantized().unsupported.iter().map(|of| of.method.as_str()).collect();
    assert_eq!(
        found,
        [
            "pack_quantized, whose settings give \"model.layers.0.self_attn.q_proj.weight\" 128 columns instead of 256 (the hidden size \
          in config.json): the bits or the group of another module, or a config.json of another model"
        ]
    );
}
