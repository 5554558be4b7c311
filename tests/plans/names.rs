//! Real and odd names of repositories: the layout `canonical` shows every tensor under a name of its own, and
//! a name that no directory can show is refused. Known families have short names.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use crate::common::{
    repo::{Row, files, open, read, row, write_file},
    source_bytes,
};
use ckfs::{
    plan::{Plan, ViewOptions},
    tensor::{DType, TensorId},
    volume::{Ino, ViewPlan, Volume, VolumeOptions},
};
use serde_json::{Value, json};

/// A repository of one file.
fn repo(rows: &[Row], config: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir.path().join("model.safetensors"), rows, 0);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// The mounted view, and the directory of its source.
fn volume(rows: &[Row], config: &Value) -> Result<(Volume, tempfile::TempDir), String> {
    let dir = repo(rows, config);
    let checkpoint = open(dir.path());
    let plan = Plan::build(&checkpoint, &ViewOptions::default()).map_err(|error| error.to_string())?;
    let views = vec![ViewPlan { name: String::new(), plan: plan.into() }];
    let volume = Volume::new(checkpoint, views, VolumeOptions::default()).map_err(|error| error.to_string())?;
    Ok((volume, dir))
}

/// Files under `full/` with their first bytes, which identify the tensors.
fn shown(names: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let rows: Vec<Row> = names.iter().map(|name| row(name, DType::BF16, &[2, 4])).collect();
    let (volume, _dir) = volume(&rows, &json!({})).unwrap_or_else(|error| panic!("{error}"));
    let mut found = Vec::new();
    files(&volume, Ino::ROOT, "", &mut found);
    let full = found.iter().filter_map(|(path, ino)| Some((path.strip_prefix("full/")?.to_owned(), *ino)));
    full.map(|(path, ino)| (path, read(&volume, ino, 0, 16))).collect()
}

#[test]
fn every_tensor_is_shown_under_a_name_of_its_own() {
    let rows: &[(&[&str], &[&str])] = &[
        // A name that is another one's prefix up to a dot.
        (&["a", "a.b"], &["a/_self", "a/b"]),
        (&["a.weight", "a.b.weight", "a.b"], &["a/weight", "a/b/weight", "a/b/_self"]),
        (&["a", "a."], &["a/_self", "a/%"]),
        (&[".", "..", "..."], &["%/%/_self", "%/%/%/_self", "%/%/%/%"]),
        (&["x.a", "x", "x.a.b"], &["x/a/_self", "x/_self", "x/a/b"]),
        // As bitsandbytes stores 4-bit weights; equal in all layers, so they stack.
        (
            &["h.0.fc.weight", "h.0.fc.weight.absmax", "h.1.fc.weight", "h.1.fc.weight.absmax"],
            &[
                "layers/0/fc/weight/_self",
                "layers/0/fc/weight/absmax",
                "layers/1/fc/weight/_self",
                "layers/1/fc/weight/absmax",
                "layers/scanned/fc/weight/_self",
                "layers/scanned/fc/weight/absmax",
            ],
        ),
        // One tensor per expert, and one for all of them.
        (
            &["h.0.experts.0.up", "h.0.experts.1.up", "h.0.experts.up"],
            &["layers/0/experts/0/up", "layers/0/experts/1/up", "layers/0/experts/up", "layers/scanned/experts/up"],
        ),
        (&["layers.0.x.y", "layers.scanned.x.y"], &["layers/0/x/y", "layers/scanned/x/y"]),
        (&["a/b", "a%2Fb", "a.b"], &["a%2Fb", "a%252Fb", "a/b"]),
    ];
    for (names, expected) in rows {
        let shown = shown(names);
        let mut expected: Vec<&str> = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(shown.keys().collect::<Vec<_>>(), expected, "{names:?}");
        for (id, _) in (0..).zip(*names) {
            let bytes = source_bytes(ckfs::tensor::TensorId(id), 0..16);
            assert!(shown.values().any(|shown| *shown == bytes), "{} of {names:?}", names[id as usize]);
        }
    }
    // Under the name that both have, the stack is that of the tensor for all experts.
    let both = shown(&["h.0.experts.0.up", "h.0.experts.1.up", "h.0.experts.up"]);
    assert_eq!(both["layers/scanned/experts/up"], both["layers/0/experts/up"]);
}

/// `ckfs plan` and a mount accept the same repositories.
#[test]
fn plan_and_mount_accept_the_same_names() {
    let (long, longest) = ("n".repeat(300), "n".repeat(255));
    let npy = "n".repeat(252);
    let deep = vec!["ab"; 2_000].join(".");
    let rows: &[(&[&str], bool)] = &[
        (&["a", "a.b"], true),
        (&["a/b", "a%2Fb", "a.b"], true),
        (&["line\nend\u{1b}[2J"], true),
        (&[".", ".."], true),
        (&[&long], false),
        (&[&format!("model.layers.0.{long}.weight")], false),
        (&[&longest], false),
        (&[&npy], false),
        (&[&npy[..251]], true),
        (&[&deep], false),
    ];
    for (names, expected) in rows {
        let rows: Vec<Row> = names.iter().map(|name| row(name, DType::BF16, &[2, 4])).collect();
        let mounts = volume(&rows, &json!({})).map(drop);
        let dir = repo(&rows, &json!({}));
        for layout in ["canonical", "hf"] {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ckfs"));
            let ran = command.arg("plan").arg(dir.path()).args(["--layout", layout]).output().unwrap();
            let error = String::from_utf8(ran.stderr).unwrap();
            assert_eq!(ran.status.success(), *expected, "{layout} {names:?}: {error}");
            assert!(!error.contains('\u{1b}') && !String::from_utf8(ran.stdout).unwrap().contains('\u{1b}'));
        }
        assert_eq!(mounts.is_ok(), *expected, "{names:?}: {mounts:?}");
    }
}

#[test]
fn tensors_of_most_axes_stay_single() {
    let extents = [1, 1, 1, 1, 1, 1, 2, 4];
    let rows: Vec<Row> = ["h.0.x.y", "h.1.x.y"].map(|name| row(name, DType::BF16, &extents)).into();
    let (volume, _dir) = volume(&rows, &json!({})).unwrap();
    assert!(volume.resolve("full/layers/1/x/y").is_ok());
    assert!(volume.resolve("full/layers/scanned").is_err());
}

#[test]
fn paths_that_cannot_be_opened_are_refused() {
    for words in [2_000, 200_000] {
        let name = vec!["ab"; words].join(".");
        let error = volume(&[row(&name, DType::U8, &[1])], &json!({})).err().unwrap();
        assert!(error.contains("ab.ab") && error.contains("bytes, at most 3584 are possible"), "{error}");
        assert!(error.len() < 200, "{error}");
    }
    assert!(volume(&[row(&vec!["a"; 1_500].join("."), DType::U8, &[1])], &json!({})).is_ok());
}

#[test]
fn parts_of_a_fused_matrix_may_be_any_numbers() {
    let rows = [
        row("model.embed_tokens.weight", DType::BF16, &[4, 4]),
        row("model.layers.0.self_attn.qkv_proj.weight", DType::BF16, &[12, 4]),
    ];
    let config = |heads: u64, kv: u64| json!({"model_type": "phi3", "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 4});
    // Sums and products beyond 64 bits.
    for (heads, kv) in [(u64::MAX, u64::MAX), (1 << 63, 1 << 63), (u64::MAX, 1), (0, 0)] {
        let dir = repo(&rows, &config(heads, kv));
        let plan = Plan::build(&open(dir.path()), &ViewOptions::default());
        match plan {
            Ok(plan) => assert!(heads == kv && heads > 0, "{heads} {kv}: {}", plan.tensors.len()),
            Err(error) => assert!(error.to_string().contains("does not split in shares of"), "{error}"),
        }
    }
}

/// Qwen3-VL stores its fused experts as `[experts, in, out]`, and Qwen 3.5 as `[experts, out, in]`. Gate and up are parts of the
/// outputs in both. A tensor of the other orientation, as transformers saves Qwen3-VL, is split along its outputs too.
#[test]
fn fused_experts_are_split_along_their_outputs() {
    let (inner, hidden) = (2, 4);
    let turned: (&[u64], &[u64]) = (&[3, hidden, 2 * inner + 2], &[3, inner + 1, hidden]);
    let upright: (&[u64], &[u64]) = (&[3, 2 * inner + 2, hidden], &[3, hidden, inner + 1]);
    for (model_type, (gate_up, down), columns) in [
        ("qwen3_vl_moe", turned, true),
        ("qwen3_5_moe", upright, false),
        ("qwen3_vl_moe", upright, false),
        ("qwen3_5_moe", turned, true),
    ] {
        let stem = "model.language_model.layers.0.mlp.experts";
        let rows = [
            row(&format!("{stem}.gate_up_proj"), DType::BF16, gate_up),
            row(&format!("{stem}.down_proj"), DType::BF16, down),
        ];
        let text = json!({"hidden_size": hidden, "moe_intermediate_size": inner + 1});
        let config = json!({"model_type": model_type, "text_config": text});
        let (volume, _dir) = volume(&rows, &config).unwrap();
        let shown = "full/language_model/layers/0";
        let bytes = |path: &str| read(&volume, volume.resolve(&format!("{shown}/{path}")).unwrap().ino, 0, 1 << 10);
        let whole = source_bytes(TensorId(0), 0..3 * hidden * (2 * inner + 2) * 2);
        // Runs of the gate and of the up projection follow each other: per row, or per expert.
        let run = usize::try_from(if columns { inner + 1 } else { (inner + 1) * hidden }).unwrap() * 2;
        let part = |first: usize| whole.chunks(run).skip(first).step_by(2).flatten().copied().collect::<Vec<u8>>();
        assert_eq!(bytes("experts/w_gate"), part(0), "{model_type}");
        assert_eq!(bytes("experts/w_up"), part(1), "{model_type}");
        assert_eq!(bytes("experts/w_down"), source_bytes(TensorId(1), 0..3 * hidden * (inner + 1) * 2), "{model_type}");
    }
}

/// Mixtral's experts as transformers names its modules, as vLLM does, and as MLX does; Qwen's as `ModelOpt` orders them: the names and
/// shapes are those of single experts, and each is its own part of the fused tensor.
#[test]
fn fused_experts_are_shown_as_single_ones() {
    let (experts, inner, hidden) = (3, 6, 4);
    let config = |model_type: &str| json!({"model_type": model_type, "hidden_size": hidden});
    let of = |names: &[(&str, &[u64])]| -> Vec<Row> {
        names.iter().map(|(name, shape)| row(&format!("model.layers.0.{name}"), DType::BF16, shape)).collect()
    };
    let whole = |id: u32, elements: u64| source_bytes(TensorId(id), 0..elements * 2);
    let matrix = usize::try_from(inner * hidden * 2).unwrap();
    let (gate_up, one, down) = ([experts, 2 * inner, hidden], [experts, inner, hidden], [experts, hidden, inner]);
    let fused = |gate_up_name: &str, down_name: &str| {
        of(&[(gate_up_name, &gate_up), (down_name, &down), ("mlp.gate.weight", &[experts, hidden])])
    };
    for (model_type, rows, is_fused) in [
        ("mixtral", fused("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), true),
        ("deepseek_v3", fused("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), true),
        ("qwen3_moe", fused("mlp.experts.w13_weight", "mlp.experts.w2_weight"), true),
        (
            "olmoe",
            of(&[
                ("mlp.switch_mlp.gate_proj.weight", &one),
                ("mlp.switch_mlp.up_proj.weight", &one),
                ("mlp.switch_mlp.down_proj.weight", &down),
                ("mlp.gate.weight", &[experts, hidden]),
            ]),
            false,
        ),
    ] {
        let (volume, _dir) = volume(&rows, &config(model_type)).unwrap_or_else(|error| panic!("{model_type}: {error}"));
        let bytes = |path: &str| {
            let found =
                volume.resolve(&format!("full/layers/{path}")).unwrap_or_else(|_| panic!("{model_type}: {path}"));
            read(&volume, found.ino, 0, 1 << 10)
        };
        // Numbers of matrices in the fused tensors.
        let part = |id: u32, number: usize| {
            let all = whole(id, experts * inner * hidden * if is_fused && id == 0 { 2 } else { 1 });
            all[number * matrix..(number + 1) * matrix].to_vec()
        };
        let (gate, up, down) = if is_fused { ((0, 4), (0, 5), (1, 2)) } else { ((0, 2), (1, 2), (2, 2)) };
        assert_eq!(bytes("0/experts/2/w_gate"), part(gate.0, gate.1), "{model_type}");
        assert_eq!(bytes("0/experts/2/w_up"), part(up.0, up.1), "{model_type}");
        assert_eq!(bytes("0/experts/2/w_down"), part(down.0, down.1), "{model_type}");
        assert_eq!(bytes("scanned/experts/w_down").len(), matrix * 3, "{model_type}");
        let router = u32::try_from(rows.len() - 1).unwrap();
        assert_eq!(bytes("0/router"), whole(router, experts * hidden), "{model_type}");
    }
    let order = |name: &str| row(name, DType::BF16, &[inner, hidden]);
    let rows =
        [order("model.layers.0.mlp.experts.up_proj.0.weight"), order("model.layers.0.mlp.experts.up_proj.1.weight")];
    let (volume, _dir) = volume(&rows, &json!({})).unwrap();
    let shown = volume.resolve("full/layers/0/mlp/experts/1/up_proj").unwrap();
    assert_eq!(read(&volume, shown.ino, 0, 1 << 10), whole(1, inner * hidden));
}

/// The text models of Qwen-VL and of Qwen 3.5 have Llama's names, and so its short ones. A tower keeps its words.
#[test]
fn text_models_beside_a_tower_have_short_names() {
    for (model_type, prefix, shown) in [
        ("qwen2_vl", "model.", ""),
        ("qwen2_5_vl", "model.", ""),
        ("qwen3_vl", "model.language_model.", "language_model/"),
        ("qwen3_5", "model.language_model.", "language_model/"),
    ] {
        let matrix = |name: String| row(&name, DType::BF16, &[4, 4]);
        let rows = [
            matrix(format!("{prefix}embed_tokens.weight")),
            matrix(format!("{prefix}layers.0.self_attn.q_proj.weight")),
            matrix(format!("{prefix}layers.0.mlp.down_proj.weight")),
            matrix("visual.blocks.0.attn.proj.weight".to_owned()),
        ];
        let (volume, _dir) = volume(&rows, &json!({"model_type": model_type})).unwrap();
        for path in ["embed", "layers/0/wq", "layers/scanned/w_down"] {
            assert!(volume.resolve(&format!("full/{shown}{path}")).is_ok(), "{model_type}: {path}");
        }
        assert!(volume.resolve("full/visual/layers/0/attn/proj").is_ok(), "{model_type}");
    }
}
