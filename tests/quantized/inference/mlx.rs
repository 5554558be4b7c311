//! MLX.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, bf16_at, e2m1, e4m3, e8m0, f16_at, f32_at, field_at, noise};

/// As its converter writes it: the same object twice.
fn repository(bits: u64, group: u64, mode: &str, more: &[(&str, Value)]) -> Repository {
    let mut config = json!({"group_size": group, "bits": bits, "mode": mode});
    for (key, value) in more {
        config[*key] = value.clone();
    }
    let mut repository = Repository::new(config.clone());
    repository.config["quantization"] = config;
    repository
}

fn words(repository: Repository, module: &str, extents: &[u64], bits: u64) -> Repository {
    let mut words = extents.to_vec();
    *words.last_mut().unwrap() = words.last().unwrap() * bits / 32;
    repository.noise(&format!("{module}.weight"), DType::U32, &words)
}

fn grid(extents: &[u64], group: u64) -> Vec<u64> {
    let mut grid = extents.to_vec();
    *grid.last_mut().unwrap() /= group;
    grid
}

fn affine(
    repository: Repository,
    module: &str,
    extents: &[u64],
    (bits, group): (u64, u64),
    dtype: DType,
) -> Repository {
    words(repository, module, extents, bits).noise(&format!("{module}.scales"), dtype, &grid(extents, group)).noise(
        &format!("{module}.biases"),
        dtype,
        &grid(extents, group),
    )
}

fn check(repository: &Repository, module: &str, extents: &[u64], (bits, group): (usize, usize), dtype: DType) {
    let opened = repository.open();
    let part = |word: &str| opened.stored(&format!("{module}.{word}"));
    let (codes, scales, biases) = (part("weight"), part("scales"), part("biases"));
    let float = |bytes: &[u8], at: usize| match dtype {
        DType::F32 => f32_at(bytes, at),
        DType::BF16 => bf16_at(bytes, at),
        _ => f16_at(bytes, at),
    };
    opened.check(&format!("{module}.weight"), "mlx", extents, |n| {
        let q = field_at(&codes, n * bits / 32, n % (32 / bits), bits) as f32;
        let product = q * float(&scales, n / group);
        product + float(&biases, n / group)
    });
}

#[test]
fn affine_integers_and_modules_of_their_own() {
    for (bits, group, dtype) in
        [(2, 32, DType::F16), (4, 64, DType::BF16), (4, 32, DType::F32), (8, 32, DType::F16), (8, 128, DType::F32)]
    {
        let more = [
            ("model.own", json!({"group_size": 32, "bits": 8, "mode": "affine"})),
            ("model.bare", json!({"bits": 2})),
            ("model.plain", json!(false)),
            ("model.same", json!(true)),
        ];
        let repository = repository(bits, group, "affine", &more);
        let repository = affine(repository, "model.a", &[5, 256], (bits, group), dtype);
        let repository = affine(repository, "model.experts", &[3, 4, 128], (bits, group), dtype);
        let repository = affine(repository, "model.same", &[6, 128], (bits, group), dtype);
        let repository = affine(repository, "model.own", &[5, 64], (8, 32), dtype);
        let repository = affine(repository, "model.bare", &[5, 128], (2, 64), dtype);
        let repository = repository.noise("model.plain.weight", DType::F16, &[4, 4]);
        let size = (bits as usize, group as usize);
        check(&repository, "model.a", &[5, 256], size, dtype);
        check(&repository, "model.experts", &[3, 4, 128], size, dtype);
        check(&repository, "model.same", &[6, 128], size, dtype);
        check(&repository, "model.own", &[5, 64], (8, 32), dtype);
        check(&repository, "model.bare", &[5, 128], (2, 64), dtype);
        assert_eq!(repository.open().decoded().len(), 5);
    }
    // The converter of old wrote one of the two objects, without a mode.
    let mut old = affine(Repository::new(Value::Null), "a", &[4, 64], (4, 32), DType::F16);
    old.config = json!({"dtype": "float16", "quantization": {"group_size": 32, "bits": 4}});
    check(&old, "a", &[4, 64], (4, 32), DType::F16);
    let text = "mlx: 1 weights of 4 bits, affine, a scale for 32";
    assert_eq!(old.open().checkpoint.quantized().schemes[0].text, text);
}

#[test]
fn small_floats_have_scales_of_their_mode() {
    for (mode, bits, group) in [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)] {
        for extents in [vec![5u64, 96], vec![2, 3, 64]] {
            let count: u64 = grid(&extents, group).iter().product();
            let mut scales = noise(3, count as usize);
            scales[..4].copy_from_slice(&[0, 254, 255, 127]);
            let repository = words(repository(bits, group, mode, &[]), "a", &extents, bits).bytes(
                "a.scales",
                DType::U8,
                &grid(&extents, group),
                scales.clone(),
            );
            let opened = repository.open();
            let codes = opened.stored("a.weight");
            opened.check("a.weight", "mlx", &extents, |n| {
                let q = field_at(&codes, n * bits as usize / 32, n % (32 / bits as usize), bits as usize) as u8;
                let scale = scales[n / group as usize];
                match mode {
                    "mxfp4" => e2m1(q) * e8m0(scale),
                    "mxfp8" => e4m3(q) * e8m0(scale),
                    _ => e2m1(q) * e4m3(scale),
                }
            });
        }
    }
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let mut repository = repository(4, 32, "affine", &[("i", json!({"mode": "mxfp4"}))]);
    for module in ["a", "b", "c", "d", "e", "f", "g", "h", "i"] {
        repository = affine(repository, module, &[4, 64], (4, 32), DType::F16);
    }
    repository
        .without("a.scales")
        .without("b.biases")
        .without("g.weight")
        .instead("c.scales", DType::F16, &[4, 3])
        .instead("d.biases", DType::BF16, &[4, 2])
        .instead("e.weight", DType::I32, &[4, 8])
        .instead("f.scales", DType::U8, &[4, 2])
        .instead("h.weight", DType::U32, &[4, 9])
        .is_refused(&[
            "tensor \"a.weight\": expected a.scales to decode it, found no such tensor",
            "tensor \"b.weight\": expected b.biases to decode it, found no such tensor",
            "tensor \"c.scales\": expected F16 [4, 2] to decode \"c.weight\", found F16 [4, 3]",
            "tensor \"d.biases\": expected F16 [4, 2] to decode \"d.weight\", found BF16 [4, 2]",
            "tensor \"e.weight\": expected U32 [4, 8] to decode \"e.weight\", found I32 [4, 8]",
            "tensor \"f.scales\": expected a float as the scale of \"f.weight\", found U8",
            "tensor \"g.scales\": expected codes g.weight beside it, found no such tensor",
            "tensor \"h.weight\": expected shape [.., in * 4 / 32] with groups of 32, found [4, 9]",
            "tensor \"i.biases\": expected no biases of mode mxfp4, found this tensor",
        ]);
    // 8 bits by the configuration, 4 by the tensors.
    affine(self::repository(8, 32, "affine", &[]), "a", &[4, 64], (4, 32), DType::F16)
        .is_refused(&["tensor \"a.scales\": expected F16 [4, 1] to decode \"a.weight\", found F16 [4, 2]"]);
}

#[test]
fn other_widths_and_modes_stay_raw_by_name() {
    for (bits, group, mode, name) in [
        (7, 32, "affine", "mlx affine of 7 bits with a scale for 32"),
        (1, 64, "affine", "mlx affine of 1 bits with a scale for 64"),
        (4, 64, "mxfp4", "mlx mxfp4 of 4 bits with a scale for 64"),
        (4, 32, "nvfp4", "mlx nvfp4 of 4 bits with a scale for 32"),
        (4, 32, "hadamard", "mlx hadamard"),
    ] {
        affine(repository(bits, group, mode, &[]), "a", &[4, 128], (4, 32), DType::F16).stays_raw(name, 1);
    }
    let more = [("a", json!(false))];
    affine(repository(4, 32, "affine", &more), "a", &[4, 128], (4, 32), DType::F16)
        .stays_raw("mlx, but its configuration leaves this tensor unquantized", 1);
    affine(repository(4, 16, "nvfp4", &[]), "a", &[4, 128], (4, 16), DType::F16)
        .noise("a.global_scale", DType::F32, &[1])
        .stays_raw("mlx nvfp4 with global_scale", 1);
}

/// Under another prefix the codes would be read by the general settings: half or twice the columns.
#[test]
fn settings_of_a_module_that_is_not_there_are_named() {
    let said = |key: &str, own: Value| {
        let module = "language_model.model.layers.0.mlp.down_proj";
        let repository = affine(repository(4, 128, "affine", &[(key, own)]), module, &[4, 128], (4, 128), DType::BF16);
        let opened = repository.open();
        opened.checkpoint.quantized().unsupported.iter().map(|of| of.method.clone()).collect::<Vec<_>>()
    };
    let own = || json!({"group_size": 64, "bits": 8});
    for key in ["model.language_model.layers.0.mlp.down_proj", "layers.0.mlp.down_proj", "nobody"] {
        let method = format!("mlx, whose configuration has settings of its own for {key:?}, which is no module here");
        assert_eq!(said(key, own()), [method]);
    }
    // What says nothing else than the general settings does not matter.
    assert!(said("nobody", json!({"group_size": 128, "bits": 4})).is_empty());
    assert!(said("nobody", json!(false)).is_empty());
}

#[test]
fn settings_that_give_other_sizes_than_the_model_has_are_named() {
    // Stored with bits and group, and read with others that the shapes of codes and scales fit as well.
    let said = |module: &str, inner: u64, stored: (u64, u64), read: (u64, u64), text: &Value| {
        let own = json!({"bits": read.0, "group_size": read.1});
        let mut repository =
            affine(repository(4, 128, "affine", &[(module, own)]), module, &[64, inner], stored, DType::BF16);
        repository.config["model_type"] = json!("qwen3_5");
        repository.config["text_config"] = text.clone();
        let opened = repository.open();
        opened.checkpoint.quantized().unsupported.iter().map(|of| of.method.clone()).collect::<Vec<_>>()
    };
    let sizes = json!({"model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 40,
               "n_shared_experts": 3, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 1});
    let (down, query) = ("language_model.model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj");
    let output = "model.layers.0.self_attn.o_proj";
    let rows = [
        (down, 192, (8, 64), (4, 128), "384 columns instead of 192 (the inner sizes of its MLPs"),
        (down, 192, (4, 32), (8, 16), "96 columns instead of 192 (the inner sizes of its MLPs"),
        ("model.embed_tokens", 64, (8, 64), (4, 128), "128 columns instead of 64 (the hidden size"),
        (query, 64, (8, 32), (2, 128), "256 columns instead of 64 (the hidden size"),
        (output, 128, (4, 32), (2, 64), "256 columns instead of 128 (the sizes of its heads"),
        // Right; the size of the shared experts; one that is nobody's.
        (down, 192, (8, 64), (8, 64), ""),
        (down, 120, (4, 40), (4, 40), ""),
        (down, 160, (4, 32), (4, 32), ""),
        (query, 64, (4, 32), (4, 32), ""),
        // Nothing is known of this one.
        ("model.layers.0.mixer.in_proj", 64, (8, 64), (4, 128), ""),
    ];
    for (module, inner, stored, read, what) in rows {
        let expected = (!what.is_empty()).then(|| {
            format!(
                "mlx, whose settings give \"{module}.weight\" {what} in config.json): the bits or the group of another module, or a \
                 config.json of another model"
            )
        });
        assert_eq!(
            said(module, inner, stored, read, &sizes),
            Vec::from_iter(expected),
            "{module} {inner} {stored:?} {read:?}"
        );
    }
    // A head that predicts for another model reads several of its layers' outputs.
    let mut draft = sizes;
    draft["draft_vocab_size"] = json!(32);
    assert!(said(query, 128, (4, 32), (4, 32), &draft).is_empty());
}
