//! Strictness: the required and the optional tensors of a repository; nothing else is refused.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::path::Path;

use crate::common::repo::{self, Row, row};
use ckfs::{
    config::MergedLora,
    plan::{Allow, Layout, NameGroup, Pattern, Plan, PlanError, ViewOptions},
    tensor::DType,
};
use serde_json::{Value, json};

fn texts(groups: &[NameGroup]) -> Vec<String> {
    groups.iter().map(ToString::to_string).collect()
}

fn allow(pattern: &str) -> Allow {
    Allow::Matching(vec![Pattern::parse(pattern).unwrap()])
}

fn build(rows: &[Row], config: &Value, options: &ViewOptions) -> Result<Plan, PlanError> {
    let dir = tempfile::tempdir().unwrap();
    repo::write_repo(dir.path(), &[rows], config);
    Plan::build(&repo::open(dir.path()), options)
}

/// A llama of three layers; its configuration with these additional members.
fn llama(members: &Value) -> (Vec<Row>, Value) {
    let mut config = repo::llama_config(3);
    config["architectures"] = json!(["LlamaForCausalLM"]);
    config.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    (repo::llama_rows(3, DType::BF16), config)
}

fn renamed(rows: &[Row], from: &str, to: &str) -> Vec<Row> {
    rows.iter().map(|(name, dtype, extents)| (name.replace(from, to), *dtype, extents.clone())).collect()
}

fn without(rows: &[Row], pattern: &str) -> Vec<Row> {
    let pattern = Pattern::parse(pattern).unwrap();
    let rest: Vec<Row> = rows.iter().filter(|(name, ..)| !pattern.matches(name)).cloned().collect();
    assert!(rest.len() < rows.len(), "{pattern:?} matches nothing");
    rest
}

#[test]
fn a_misspelt_name_is_one_missing_and_one_unexpected() {
    let (rows, config) = llama(&json!({}));
    let rows = renamed(&rows, "self_attn.o_proj", "self_atn.o_proj");
    let missing = "missing tensor model.layers.{0-2}.self_attn.o_proj.weight (3 tensors); the nearest name is \
                   model.layers.*.self_atn.o_proj.weight";
    let unexpected = "unexpected tensor model.layers.{0-2}.self_atn.o_proj.weight (3 tensors); the nearest name is \
                      model.layers.*.self_attn.o_proj.weight";
    for layout in [Layout::Canonical, Layout::Hf] {
        let options = |missing: Allow, unmapped: Allow| {
            let layout = layout.clone();
            ViewOptions { layout, allow_missing: missing, allow_unmapped: unmapped, ..ViewOptions::default() }
        };
        let error = |options| build(&rows, &config, &options).unwrap_err().to_string();
        let both = format!("2 problems:\n  {missing}\n  {unexpected}");
        assert_eq!(error(options(Allow::Nothing, Allow::Nothing)), both);
        assert_eq!(error(options(allow("*q_proj*"), allow("*q_proj*"))), both, "patterns of other names");
        assert_eq!(error(options(Allow::Nothing, allow("*self_atn*"))), missing);
        // An unexpected tensor is a problem only as the likely cause of a missing one.
        let plan = build(&rows, &config, &options(allow("*self_attn.o_proj*"), Allow::Nothing)).unwrap();
        assert_eq!(format!("missing tensor {}", texts(&plan.missing)[0]), missing);
        assert_eq!(format!("unexpected tensor {}", texts(&plan.unexpected)[0]), unexpected);
    }
}

#[test]
fn layers_without_any_tensor_are_reported_together() {
    let (rows, mut config) = llama(&json!({}));
    config["num_hidden_layers"] = json!(9);
    let rows = without(&rows, "model.layers.1.*");
    let error = |missing: &str| {
        let options = ViewOptions { allow_missing: allow(missing), ..ViewOptions::default() };
        build(&rows, &config, &options).unwrap_err().to_string()
    };
    assert_eq!(error("x"), "layers 1,3-8 are missing: expected 9 of model.layers, numbered from 0");
    assert_eq!(error("/layers\\.[3-8]\\./"), "layer 1 is missing: expected 9 of model.layers, numbered from 0");
    let options = ViewOptions { allow_missing: allow("model.layers.*"), ..ViewOptions::default() };
    let plan = build(&rows, &config, &options).unwrap();
    assert_eq!(plan.warnings, ["layers 1,3-8 are missing: expected 9 of model.layers, numbered from 0"]);
}

#[test]
fn tensors_of_a_complete_model_are_required() {
    let head = |rows: &[Row]| [rows, &[row("lm_head.weight", DType::BF16, &[40, 16])]].concat();
    let (tied, config) = llama(&json!({}));
    let untied = llama(&json!({"tie_word_embeddings": false})).1;
    let biased: Vec<Row> = (0..3)
        .map(|layer| row(&format!("model.layers.{layer}.self_attn.q_proj.bias"), DType::BF16, &[24]))
        .chain(tied.clone())
        .collect();
    build(&tied, &config, &ViewOptions::default()).unwrap();
    build(&head(&tied), &untied, &ViewOptions::default()).unwrap();
    build(&biased, &config, &ViewOptions::default()).unwrap();
    let rows = [
        (without(&tied, "model.layers.1.self_attn.q_proj.weight"), &config, "model.layers.1.self_attn.q_proj.weight"),
        (without(&tied, "*.up_proj.*"), &config, "model.layers.{0-2}.mlp.up_proj.weight (3 tensors)"),
        (without(&tied, "model.norm.weight"), &config, "model.norm.weight"),
        (without(&tied, "*embed_tokens*"), &config, "model.embed_tokens.weight"),
        // A tensor that one layer has is required in all.
        (without(&biased, "model.layers.1.*bias"), &config, "model.layers.1.self_attn.q_proj.bias"),
    ];
    for (rows, config, missing) in rows {
        for layout in [Layout::Canonical, Layout::Hf] {
            let options = ViewOptions { layout, ..ViewOptions::default() };
            let error = build(&rows, config, &options).unwrap_err();
            assert_eq!(error.to_string(), format!("missing tensor {missing}"));
            assert!(error.concerns_names());
            let allowed = ViewOptions { allow_missing: Allow::All, ..options };
            assert_eq!(texts(&build(&rows, config, &allowed).unwrap().missing), [missing]);
        }
    }
    let misspelt = renamed(&head(&tied), "lm_head.weight", "lm_haed.weight");
    let error = build(&misspelt, &untied, &ViewOptions::default()).unwrap_err().to_string();
    assert!(error.contains("unexpected tensor lm_haed.weight; the nearest name is lm_head.weight"), "{error}");
}

/// Repositories as published, each without some tensor that a plain `LlamaForCausalLM` has.
#[test]
fn other_models_of_the_same_type_are_not_refused() {
    let (rows, _) = llama(&json!({}));
    let plus = |rows: &[Row], name: &str, extents: &[u64]| [rows, &[row(name, DType::BF16, extents)]].concat();
    let untied = json!({"tie_word_embeddings": false});
    let base = renamed(&rows, "model.", "");
    let gptq: Vec<Row> = renamed(&rows, "proj.weight", "proj.qweight");
    let cases: [(&str, Vec<Row>, Value); 13] = [
        ("a base model of the causal class and its names", rows.clone(), untied.clone()),
        ("a base model that names the causal class", base.clone(), untied.clone()),
        ("a base model", rows.clone(), json!({"architectures": ["LlamaModel"], "tie_word_embeddings": false})),
        (
            "a classifier",
            plus(&rows, "score.weight", &[1, 16]),
            json!({"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": false}),
        ),
        ("a value head in place of the output head", plus(&rows, "v_head.summary.weight", &[1, 16]), untied.clone()),
        (
            "the head of two tied weights",
            plus(&without(&rows, "*embed_tokens*"), "lm_head.weight", &[40, 16]),
            json!({}),
        ),
        ("buffers of older versions", plus(&rows, "model.layers.0.self_attn.rotary_emb.inv_freq", &[2]), json!({})),
        (
            "a draft model",
            plus(&without(&without(&base, "norm.weight"), "*input_layernorm*"), "fc.weight", &[16, 32]),
            untied.clone(),
        ),
        (
            "a class of its own",
            without(&rows, "*up_proj*"),
            json!({"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": false}),
        ),
        (
            "code of its own",
            without(&rows, "*.1.self_attn.*"),
            json!({"auto_map": {"AutoModelForCausalLM": "modeling_dropped.LlamaForCausalLM"}}),
        ),
        (
            "weights quantized under other names",
            gptq,
            // Of 3 bits, which are not decoded: nothing is expected beside them.
            json!({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 128}}),
        ),
        (
            "fused and quantized in a way that nothing names",
            renamed(&without(&without(&rows, "*k_proj*"), "*v_proj*"), "proj.weight", "proj.Qidxs"),
            json!({}),
        ),
        (
            "names of another program",
            renamed(&renamed(&rows, "model.", ""), "self_attn.q_proj", "attention.wq")
                .iter()
                .map(|(name, dtype, extents)| {
                    let name = name.replace("self_attn.", "attention.w").replace("mlp.", "feed_forward.w");
                    (name.replace("_layernorm", "_norm"), *dtype, extents.clone())
                })
                .collect(),
            untied.clone(),
        ),
    ];
    for (what, rows, members) in cases {
        let config = llama(&members).1;
        for layout in [Layout::Canonical, Layout::Hf] {
            let plan = build(&rows, &config, &ViewOptions { layout, ..ViewOptions::default() });
            let plan = plan.unwrap_or_else(|error| panic!("{what}: {error}"));
            // A missing tensor that is not required is still reported, with the reason.
            let reported = plan.warnings.iter().any(|text| text.contains("not refused, as "));
            assert_eq!(reported, !plan.missing.is_empty(), "{what}: {:?}", plan.warnings);
        }
    }
    let headless = build(&rows, &llama(&untied).1, &ViewOptions::default()).unwrap();
    assert_eq!(headless.warnings, ["there is no output head, though config.json says that it is not the embedding"]);
    let unknown = json!({"model_type": "unheard_of", "num_hidden_layers": 3});
    build(&without(&rows, "*.1.*q_proj*"), &unknown, &ViewOptions::default()).unwrap();
}

/// What wraps the model is taken away and said. The names of no known model are refused, with the number of tensors that are not here.
#[test]
fn names_that_hide_the_whole_model_are_unwrapped_or_refused() {
    let (rows, config) = llama(&json!({}));
    let prefixed = |prefix: &str| -> Vec<Row> {
        rows.iter().map(|(name, dtype, extents)| (format!("{prefix}{name}"), *dtype, extents.clone())).collect()
    };
    for layout in [Layout::Canonical, Layout::Hf] {
        let options = ViewOptions { layout, ..ViewOptions::default() };
        let plain: Vec<String> =
            build(&rows, &config, &options).unwrap().tensors.iter().map(|tensor| tensor.name.clone()).collect();
        for prefix in
            ["_orig_mod.", "module._orig_mod.", "base_model.model.", "_fsdp_wrapped_module.", "net.", "model."]
        {
            let plan = build(&prefixed(prefix), &config, &options).unwrap_or_else(|error| panic!("{prefix}: {error}"));
            let names: Vec<String> = plan.tensors.iter().map(|tensor| tensor.name.clone()).collect();
            assert_eq!(names, plain, "{prefix}");
            assert!(plan.warnings.iter().any(|text| text.contains("--source-rename")), "{prefix}: {:?}", plan.warnings);
        }
        let inner = renamed(&rows, ".mlp.", "._checkpoint_wrapped_module.mlp.");
        assert_eq!(build(&inner, &config, &options).unwrap().tensors.len(), plain.len());
        let error = build(&prefixed("student."), &config, &options).unwrap_err().to_string();
        // Three layers of nine tensors, the embedding, the last norm, and the head, which is tied.
        assert!(error.contains("0 of 29 tensors that LlamaForCausalLM has are here, such as model.layers."), "{error}");
        assert!(error.contains("student.model.") && error.contains("--source-rename"), "{error}");
        let accepted = ViewOptions { allow_missing: Allow::All, ..options.clone() };
        let plan = build(&prefixed("student."), &config, &accepted).unwrap();
        assert!(plan.warnings.iter().any(|text| text.contains("0 of 29 tensors")), "{:?}", plan.warnings);
        // The layers of a text model may be in a place of its own.
        let part = renamed(&rows, "model.", "model.text_model.");
        let whole = json!({"model_type": "idefics9", "text_config": config, "architectures": ["Idefics9"]});
        build(&part, &whole, &options).unwrap();
    }
    // A word of a model that nobody knows is no wrapper.
    let unknown = json!({"model_type": "unheard_of", "num_hidden_layers": 3});
    let options = ViewOptions { layout: Layout::Hf, ..ViewOptions::default() };
    let names = |prefix: &str| -> Vec<String> {
        let plan = build(&prefixed(prefix), &unknown, &options).unwrap();
        plan.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    };
    assert!(names("net.").iter().all(|name| name.starts_with("net.")));
    assert!(names("module.").iter().all(|name| !name.starts_with("module.")));
}

/// Models without a table of their own: the library's classes say how names begin.
#[test]
fn names_that_do_not_begin_as_those_of_the_model_type_are_refused() {
    let gpt2 = ["h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight", "ln_f.weight", "wte.weight"];
    let t5 = ["encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"];
    let opt = ["decoder.layers.0.fc1.weight", "decoder.embed_tokens.weight"];
    let plan = |names: &[&str], prefix: &str, config: &Value, options: &ViewOptions| {
        let rows: Vec<Row> = names.iter().map(|name| row(&format!("{prefix}{name}"), DType::F32, &[8, 8])).collect();
        build(&rows, config, options).map_err(|error| error.to_string())
    };
    for layout in [Layout::Canonical, Layout::Hf] {
        let options = ViewOptions { layout, ..ViewOptions::default() };
        let accepts = ViewOptions { allow_missing: Allow::All, ..options.clone() };
        for (class, model_type, names, known) in [
            ("GPT2LMHeadModel", "gpt2", &gpt2[..], &["", "transformer.", "_orig_mod.transformer."][..]),
            ("T5ForConditionalGeneration", "t5", &t5, &["", "module."]),
            ("OPTForCausalLM", "opt", &opt, &["", "model.", "module.model."]),
        ] {
            let config = json!({"model_type": model_type, "architectures": [class]});
            for prefix in known {
                let made = plan(names, prefix, &config, &options).unwrap_or_else(|error| panic!("{prefix}: {error}"));
                assert!(made.warnings.iter().all(|text| !text.contains("none of")), "{:?}", made.warnings);
            }
            for prefix in ["student.", "student.transformer.", "model.model.", "ema.module."] {
                let error = plan(names, prefix, &config, &options).unwrap_err();
                assert!(error.contains(&format!("none of the tensors that {class} has is here")), "{error}");
                assert!(error.contains("--source-rename"), "{error}");
                let made = plan(names, prefix, &config, &accepts).unwrap();
                assert!(made.warnings.iter().any(|text| text.contains("none of the tensors")), "{:?}", made.warnings);
                // A class or code of its own has names of its own.
                for more in [json!({"architectures": ["Own"]}), json!({"auto_map": {"AutoModel": "own.Own"}})] {
                    let mut own = config.clone();
                    own.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                    plan(names, prefix, &own, &options).unwrap();
                }
            }
        }
        // A wrapper before the body alone.
        let body = ["student.h.0.attn.c_attn.weight", "student.wte.weight", "lm_head.weight"];
        plan(&body, "", &json!({"model_type": "gpt2"}), &options).unwrap_err();
    }
}

#[test]
fn base_and_adapter_of_a_training_are_refused_unmerged() {
    let (rows, config) = llama(&json!({}));
    let mut wrapped: Vec<Row> = renamed(&rows, "q_proj.weight", "q_proj.base_layer.weight");
    for layer in 0..3 {
        for (matrix, extents) in [("A", [2, 16]), ("B", [16, 2])] {
            let name = format!("model.layers.{layer}.self_attn.q_proj.lora_{matrix}.default.weight");
            wrapped.push(row(&name, DType::BF16, &extents));
        }
    }
    for prefix in ["", "base_model.model.", "_orig_mod.base_model.model."] {
        let rows: Vec<Row> =
            wrapped.iter().map(|(name, dtype, extents)| (format!("{prefix}{name}"), *dtype, extents.clone())).collect();
        for layout in [Layout::Canonical, Layout::Hf] {
            let options = ViewOptions { layout, ..ViewOptions::default() };
            let error = build(&rows, &config, &options).unwrap_err().to_string();
            assert!(error.contains("9 of 35 tensors have the names of a model in PEFT's training"), "{error}");
            assert!(error.contains("--merge-lora self") && error.contains("--layout stored"), "{error}");
            let merged = ViewOptions { merge_lora: Some(MergedLora::Own), ..options };
            let error = build(&rows, &config, &merged).unwrap_err().to_string();
            assert!(error.contains("merge-lora self: expected adapter_config.json, which says lora_alpha"), "{error}");
        }
        build(&rows, &config, &ViewOptions { layout: Layout::Stored, ..ViewOptions::default() }).unwrap();
    }
}

#[test]
fn mlx_checkpoints_may_lack_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, config) = llama(&json!({}));
    repo::write_repo(dir.path(), &[&without(&rows, "*o_proj*")], &config);
    Plan::build(&repo::open(dir.path()), &ViewOptions::default()).unwrap_err();
    let file = dir.path().join("model-00001-of-00001.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(13).position(|part| part == br#""format":"pt""#).unwrap();
    // The header keeps its length: the name of the format grows into its padding.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let (head, data) = bytes.split_at(8 + usize::try_from(header).unwrap());
    let text = std::str::from_utf8(&head[8..]).unwrap();
    assert_eq!(&text[at - 8..at - 8 + 13], r#""format":"pt""#);
    let text = text.trim_end().replacen(r#""format":"pt""#, r#""format":"mlx""#, 1);
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out.extend_from_slice(data);
    std::fs::write(&file, out).unwrap();
    let plan = Plan::build(&repo::open(dir.path()), &ViewOptions::default()).unwrap();
    assert!(plan.warnings.iter().any(|text| text.contains("MLX")), "{:?}", plan.warnings);
}

/// Every family of the fixtures is complete, and each removed tensor is reported as missing: one row per family and stem.
#[test]
fn families_are_complete_and_removed_tensors_are_missed() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/maxtext");
    let attention = ["*.1.self_attn.o_proj.weight", "*norm.weight", "*.1.input_layernorm.weight"];
    let rows: [(&str, &[&str]); 13] = [
        ("llama3.1", &attention),
        ("qwen2.5", &[&attention[..], &["*.1.self_attn.k_proj.bias"]].concat()),
        ("qwen3", &[&attention[..], &["*.1.self_attn.k_norm.weight"]].concat()),
        ("qwen3-moe", &[&attention[..], &["*.1.mlp.experts.3.up_proj.weight", "*.1.mlp.gate.weight"]].concat()),
        ("mixtral", &[&attention[..], &["*.1.block_sparse_moe.experts.3.w2.weight", "*.1.*.gate.weight"]].concat()),
        (
            "deepseek2",
            &[&attention[..], &["*.1.self_attn.kv_b_proj.weight", "*.2.mlp.experts.1.up_proj.weight"]].concat(),
        ),
        ("deepseek3", &[&attention[..], &["*.1.self_attn.q_b_proj.weight", "*.4.mlp.gate.weight"]].concat()),
        ("gemma2", &[&attention[..], &["*.1.post_feedforward_layernorm.weight"]].concat()),
        ("gemma3", &["language_model.*.1.self_attn.o_proj.weight", "*.1.self_attn.q_norm.weight"]),
        ("gpt-oss", &[&attention[..], &["*.1.self_attn.sinks", "*.1.mlp.experts.down_proj"]].concat()),
        ("olmo3", &["*.1.self_attn.o_proj.weight", "*.1.post_feedforward_layernorm.weight", "model.norm.weight"]),
        // For these, only the existing tensors are reported.
        ("gemma4", &[]),
        ("qwen3-next", &[]),
    ];
    for (family, patterns) in rows {
        let dir = fixtures.join(family).join("hf");
        let checkpoint = repo::open(&dir);
        for layout in [Layout::Canonical, Layout::Hf] {
            let plan = Plan::build(&checkpoint, &ViewOptions { layout, ..ViewOptions::default() }).unwrap();
            assert_eq!(texts(&plan.missing), [""; 0], "{family}");
        }
        let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        let all: Vec<Row> = checkpoint.tensors().map(|(_, info)| row(info.name, info.dtype, info.shape)).collect();
        for pattern in patterns {
            let error = build(&without(&all, pattern), &config, &ViewOptions::default()).unwrap_err();
            assert!(error.to_string().contains("missing tensor "), "{family} {pattern}: {error}");
        }
    }
}

#[test]
fn encoders_have_their_attention() {
    let mut rows = vec![row("bert.embeddings.word_embeddings.weight", DType::F32, &[10, 8])];
    for layer in 0..2 {
        for (name, extents) in [
            ("attention.self.query", [8, 8]),
            ("attention.self.key", [8, 8]),
            ("attention.self.value", [8, 8]),
            ("attention.output.dense", [8, 8]),
            ("intermediate.dense", [16, 8]),
            ("output.dense", [8, 16]),
        ] {
            let name = format!("bert.encoder.layer.{layer}.{name}");
            rows.push(row(&format!("{name}.weight"), DType::F32, &extents));
            rows.push(row(&format!("{name}.bias"), DType::F32, &extents[..1]));
        }
        rows.push(row(&format!("bert.encoder.layer.{layer}.output.LayerNorm.gamma"), DType::F32, &[8]));
    }
    let config = json!({"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2});
    build(&rows, &config, &ViewOptions::default()).unwrap();
    let error = build(&without(&rows, "*.key.weight"), &config, &ViewOptions::default()).unwrap_err().to_string();
    // Other names are reported too: only the user knows whether one of them is the missing tensor.
    assert_eq!(
        error,
        "2 problems:\n  missing tensor bert.encoder.layer.{0-1}.attention.self.key.weight (2 tensors)\n  \
         unexpected tensor bert.encoder.layer.{0-1}.output.LayerNorm.gamma (2 tensors)"
    );
}

#[test]
fn a_layout_of_rules_reports_groups_by_rule() {
    let (rows, config) = llama(&json!({}));
    let text = "\
name = 'x'
[[leaf]]
to = 'norm'
from = 'model.norm.weight'
[group]
layer = [
  { to = 'wq', from = 'self_attn.q_proj.weight' },
  { to = 'wo', from = 'self_attn.out_proj.weight' },
]
[[place]]
group = 'layer'
to = 'layers.{l}'
from = 'model.layers.{l}'
each = { l = '0..3' }
[[ignore]]
names = '*mlp*'
[[ignore]]
names = '*layernorm*'
[[ignore]]
names = '*[kv]_proj*'
";
    let layout = |text: &str| {
        let file = ckfs::plan::LayoutFile::parse("my.toml", &text.replace("*[kv]_proj*", "/[kv]_proj/")).unwrap();
        ViewOptions { layout: Layout::File(std::sync::Arc::new(file)), ..ViewOptions::default() }
    };
    let missing = "my.toml:8: missing tensor model.layers.{0-2}.self_attn.out_proj.weight (3 tensors), needed for \
                   layers.0.wo and 2 more; the nearest name is model.layers.*.self_attn.o_proj.weight";
    let embedding = "unexpected tensor model.embed_tokens.weight";
    let unexpected = "unexpected tensor model.layers.{0-2}.self_attn.o_proj.weight (3 tensors); the nearest name is \
                      model.layers.*.self_attn.out_proj.weight";
    let error = build(&rows, &config, &layout(text)).unwrap_err().to_string();
    assert_eq!(error, format!("3 problems:\n  {missing}\n  {embedding}\n  {unexpected}"));
    let options =
        ViewOptions { allow_missing: allow("*.out_proj.*"), allow_unmapped: allow("*o_proj*"), ..layout(text) };
    assert_eq!(build(&rows, &config, &options).unwrap_err().to_string(), embedding);
    let options = ViewOptions { allow_unmapped: Allow::All, ..options };
    let plan = build(&rows, &config, &options).unwrap();
    assert_eq!(plan.tensors.len(), 1 + 3);
    assert_eq!(
        plan.warnings,
        [
            "layers.0.wo and 2 more is left out: missing tensor model.layers.{0-2}.self_attn.out_proj.weight (3 tensors)",
            "unexpected tensor model.embed_tokens.weight: left out",
            "unexpected tensor model.layers.{0-2}.self_attn.o_proj.weight (3 tensors): left out",
        ]
    );
}
