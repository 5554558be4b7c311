//! torchao.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, bf16_at, e4m3, f32_at, nibble_at};

fn repository() -> Repository {
    let kind = json!({"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": null}}});
    let config = json!({"quant_method": "torchao", "quant_type": kind, "modules_to_not_convert": ["lm_head"]});
    let mut repository = Repository::new(config);
    repository.config["dtype"] = json!("bfloat16");
    let names = json!(["model.norm.weight"]).to_string();
    repository.metadata.push(("tensor_names".to_owned(), names));
    repository.metadata.push(("model.norm.weight".to_owned(), json!({"_type": "Tensor"}).to_string()));
    repository
}

fn row(of: &str, extents: &[u64], block: &[u64], words: &[&str]) -> Value {
    let dtype = json!({"_type": "torch.dtype", "_data": "float16"});
    let data = if of == "Int4Tensor" {
        json!({"activation_dtype": dtype, "block_size": block, "shape": extents})
    } else {
        json!({"act_quant_kwargs": null, "block_size": block, "dtype": dtype})
    };
    json!({"_type": of, "_data": data, "_tensor_data_names": words})
}

fn described(mut repository: Repository, name: &str, row: &Value) -> Repository {
    repository.metadata.retain(|(other, _)| other != name);
    repository.metadata.push((name.to_owned(), row.to_string()));
    repository
}

fn float8(repository: Repository, module: &str, (out, inner): (u64, u64), block: [u64; 2]) -> Repository {
    let repository = repository.noise(&format!("{module}._weight_qdata"), DType::F8E4M3, &[out, inner]).noise(
        &format!("{module}._weight_scale"),
        DType::F32,
        &[out / block[0], inner / block[1]],
    );
    let row = row("Float8Tensor", &[out, inner], &block, &["qdata", "scale"]);
    described(repository, &format!("{module}.weight"), &row)
}

fn int8(repository: Repository, module: &str, (out, inner): (u64, u64), has_zeros: bool) -> Repository {
    let mut repository = repository.noise(&format!("{module}._weight_qdata"), DType::I8, &[out, inner]).noise(
        &format!("{module}._weight_scale"),
        DType::F32,
        &[out, 1],
    );
    let mut words = vec!["qdata", "scale"];
    if has_zeros {
        words.insert(0, "zero_point");
        repository = repository.noise(&format!("{module}._weight_zero_point"), DType::I8, &[out, 1]);
    }
    described(repository, &format!("{module}.weight"), &row("Int8Tensor", &[out, inner], &[1, inner], &words))
}

fn int4(repository: Repository, module: &str, (out, inner): (u64, u64), group: u64) -> Repository {
    let repository = repository
        .noise(&format!("{module}._weight_qdata"), DType::I8, &[out, inner / 2])
        .noise(&format!("{module}._weight_scale"), DType::BF16, &[inner / group, out])
        .noise(&format!("{module}._weight_zero_point"), DType::BF16, &[inner / group, out]);
    let row = row("Int4Tensor", &[out, inner], &[1, group], &["qdata", "scale", "zero_point"]);
    described(repository, &format!("{module}.weight"), &row)
}

#[test]
fn rows_blocks_and_groups_have_their_scales() {
    let repository = float8(repository(), "a", (24, 33), [1, 33]);
    let repository = float8(float8(repository, "whole", (24, 33), [24, 33]), "blocks", (6, 8), [3, 4]);
    let repository = int8(int8(repository, "b", (24, 33), true), "c", (24, 33), false);
    let opened = int4(repository, "d", (10, 96), 32).noise("lm_head.weight", DType::BF16, &[4, 4]).open();
    let part = |module: &str, word: &str| opened.stored(&format!("{module}._weight_{word}"));
    for (module, rows, columns, block) in
        [("a", 24, 33, [1, 33]), ("whole", 24, 33, [24, 33]), ("blocks", 6, 8, [3, 4])]
    {
        let (codes, scales) = (part(module, "qdata"), part(module, "scale"));
        opened.check(&format!("{module}.weight"), "torchao", &[rows as u64, columns as u64], |n| {
            let at = n / columns / block[0] * (columns / block[1]) + n % columns / block[1];
            e4m3(codes[n]) * f32_at(&scales, at)
        });
    }
    for (module, has_zeros) in [("b", true), ("c", false)] {
        let (codes, scales) = (part(module, "qdata"), part(module, "scale"));
        let zeros = if has_zeros { part(module, "zero_point") } else { vec![0; 24] };
        opened.check(&format!("{module}.weight"), "torchao", &[24, 33], |n| {
            let (q, z) = (codes[n].cast_signed(), zeros[n / 33].cast_signed());
            f32::from(i16::from(q) - i16::from(z)) * f32_at(&scales, n / 33)
        });
    }
    let (codes, scales, zeros) = (part("d", "qdata"), part("d", "scale"), part("d", "zero_point"));
    opened.check("d.weight", "torchao", &[10, 96], |n| {
        let nibble = i16::from(nibble_at(&codes, n));
        let q = f32::from(if nibble > 7 { nibble - 16 } else { nibble });
        let at = n % 96 / 32 * 10 + n / 96;
        let product = q * bf16_at(&scales, at);
        product + bf16_at(&zeros, at)
    });
    assert_eq!(opened.decoded().len(), 6);
    assert!(opened.left_out().is_empty());
    let text = "torchao: 3 weights of Float8Tensor, 2 weights of Int8Tensor, 1 weights of Int4Tensor";
    assert_eq!(opened.checkpoint.quantized().schemes[0].text, text);
}

#[test]
fn experts_in_one_tensor_have_their_scales() {
    const EXTENTS: [u64; 3] = [3, 4, 64];
    let name = |parameter: &str, word: &str| format!("x.experts._{parameter}_{word}");
    let mut repository = repository();
    let rows = [
        ("row", "Float8Tensor", [1, 1, 64], false),
        ("whole", "Float8Tensor", [3, 4, 64], false),
        ("block", "Float8Tensor", [1, 2, 32], false),
        ("plain", "Int8Tensor", [1, 1, 64], false),
        ("zeros", "Int8Tensor", [1, 1, 64], true),
        ("four", "Int4Tensor", [1, 1, 32], true),
    ];
    for (parameter, of, block, has_zeros) in rows {
        let mut codes = EXTENTS;
        let mut scales: Vec<u64> = EXTENTS.iter().zip(block).map(|(extent, size)| extent / size).collect();
        let (dtype, scale, zero) = match of {
            "Float8Tensor" => (DType::F8E4M3, DType::F32, DType::F32),
            "Int8Tensor" => (DType::I8, DType::F32, DType::I8),
            _ => (DType::I8, DType::BF16, DType::BF16),
        };
        if of == "Int4Tensor" {
            codes[2] /= 2;
            scales.swap(1, 2);
        }
        repository = repository.noise(&name(parameter, "qdata"), dtype, &codes);
        repository = repository.noise(&name(parameter, "scale"), scale, &scales);
        let mut words = vec!["qdata", "scale"];
        if has_zeros {
            repository = repository.noise(&name(parameter, "zero_point"), zero, &scales);
            words.push("zero_point");
        }
        repository = described(repository, &format!("x.experts.{parameter}"), &row(of, &EXTENTS, &block, &words));
    }
    let opened = repository.noise("lm_head.weight", DType::BF16, &[4, 4]).open();
    for (parameter, of, block, has_zeros) in rows {
        let part = |word: &str| opened.stored(&name(parameter, word));
        let (codes, scales) = (part("qdata"), part("scale"));
        let zeros = if has_zeros { part("zero_point") } else { vec![0; 12] };
        let [by_expert, by_row, by_column] = block.map(|size| usize::try_from(size).unwrap());
        opened.check(&format!("x.experts.{parameter}"), "torchao", &EXTENTS, |n| {
            let (expert, row, column) = (n / 256, n / 64 % 4, n % 64);
            let at = (expert / by_expert * (4 / by_row) + row / by_row) * (64 / by_column) + column / by_column;
            match of {
                "Float8Tensor" => e4m3(codes[n]) * f32_at(&scales, at),
                "Int8Tensor" => {
                    let (q, z) = (codes[n].cast_signed(), zeros[at].cast_signed());
                    f32::from(i16::from(q) - i16::from(z)) * f32_at(&scales, at)
                }
                _ => {
                    let nibble = i16::from(nibble_at(&codes, n));
                    let q = f32::from(if nibble > 7 { nibble - 16 } else { nibble });
                    let at = (expert * 2 + column / 32) * 4 + row;
                    let product = q * bf16_at(&scales, at);
                    product + bf16_at(&zeros, at)
                }
            }
        });
    }
    assert_eq!(opened.decoded().len(), rows.len());
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let mut repository = repository();
    for module in ["a", "b", "c", "d", "e", "f"] {
        repository = int8(repository, module, (6, 32), true);
    }
    let repository = int4(float8(repository, "g", (6, 32), [1, 32]), "h", (6, 64), 32);
    let repository = described(repository, "f.weight", &row("Int8Tensor", &[6, 32], &[1, 5], &["qdata", "scale"]));
    let repository =
        described(repository, "h.weight", &row("Int4Tensor", &[6, 32], &[1, 32], &["qdata", "scale", "zero_point"]));
    let mut repository = repository
        .noise("g._weight_zero_point", DType::I8, &[6, 1])
        .without("a._weight_scale")
        .without("b._weight_zero_point")
        .instead("c._weight_scale", DType::F32, &[6, 2])
        .instead("d._weight_zero_point", DType::I32, &[6, 1])
        .instead("g._weight_qdata", DType::I8, &[6, 32]);
    repository.metadata.retain(|(name, _)| name != "e.weight");
    repository.is_refused(&[
        "tensor \"a.weight\": expected a._weight_scale to decode it, found no such tensor",
        "tensor \"b.weight\": expected b._weight_zero_point to decode it, found no such tensor",
        "tensor \"c._weight_scale\": expected F32 [6, 1] to decode \"c.weight\", found F32 [6, 2]",
        "tensor \"d._weight_zero_point\": expected I8 [6, 1] to decode \"d.weight\", found I32 [6, 1]",
        "tensor \"e._weight_scale\": expected what it is in __metadata__ of its file, as torchao writes it, found nothing",
        "tensor \"f.weight\": expected a block_size in __metadata__ that divides [6, 32], found [1,5]",
        "tensor \"g._weight_qdata\": expected F8_E4M3 [6, 32] to decode \"g.weight\", found I8 [6, 32]",
        "; the same of 4 more: \"f._weight_zero_point\", \"e._weight_qdata\", \"e._weight_zero_point\", \"g._weight_zero_point\"",
        "tensor \"h.weight\": expected shape [6, 64] in __metadata__, as its codes have, found [6,32]",
    ]);
}

#[test]
fn other_types_stay_raw_by_name() {
    for of in ["Int4TilePackedTo4dTensor", "MXTensor", "NVFP4Tensor", "IntxUnpackedToInt8Tensor"] {
        let repository = int8(repository(), "a", (6, 32), true);
        let row = row(of, &[6, 32], &[1, 32], &["qdata", "scale", "zero_point"]);
        described(repository, "a.weight", &row).stays_raw(&format!("torchao {of}"), 1);
    }
    let more = row("Int4Tensor", &[6, 64], &[1, 32], &["qdata", "scale", "zero_point", "act_pre_scale"]);
    described(int4(repository(), "a", (6, 64), 32), "a.weight", &more)
        .stays_raw("torchao Int4Tensor with act_pre_scale", 1);
    let more = row("Float8Tensor", &[6, 32], &[1, 32], &["qdata", "scale", "zero_point"]);
    described(float8(repository(), "a", (6, 32), [1, 32]), "a.weight", &more)
        .stays_raw("torchao Float8Tensor with zero_point", 1);
    int8(repository(), "lm_head", (6, 32), true)
        .stays_raw("torchao, but its configuration leaves this tensor unquantized", 1);
}
