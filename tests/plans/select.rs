//! Names, ties, parts of a checkpoint, adapters and strictness, as plans.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::{collections::BTreeSet, fs, path::Path};

use crate::common::repo;
use ckfs::{
    checkpoint::{Accepted, Checkpoint, OpenOptions},
    config::MergedLora,
    format::safetensors::write_header,
    plan::{Allow, HfContent, LayerRanges, Layout, Mesh, Pattern, Plan, Rename, Subset, Tied, ViewOptions},
    tensor::DType,
};
use serde_json::{Value, json};

fn hf() -> ViewOptions {
    ViewOptions { layout: Layout::Hf, ..ViewOptions::default() }
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| Pattern::parse(text).unwrap()).collect()
}

fn names(plan: &Plan) -> BTreeSet<String> {
    plan.tensors.iter().map(|tensor| tensor.name.clone()).collect()
}

fn hf_text(plan: &Plan, path: &str) -> Option<Value> {
    let file = plan.hf.iter().find(|file| file.path == path)?;
    let HfContent::Text(text) = &file.content else { return None };
    Some(serde_json::from_slice(text).unwrap())
}

fn hf_names(plan: &Plan) -> BTreeSet<String> {
    let weights = plan.hf.iter().filter_map(|file| match &file.content {
        HfContent::Weights { tensors, .. } => Some(tensors.iter().map(|(name, _)| name.clone())),
        HfContent::Original(_) | HfContent::Text(_) => None,
    });
    weights.flatten().collect()
}

fn refused(dir: &Path, options: &ViewOptions) -> String {
    Plan::build(&repo::open(dir), options).unwrap_err().to_string()
}

#[test]
fn layers_are_cut_and_the_configuration_follows() {
    let dir = repo::llama(4, DType::BF16);
    let checkpoint = repo::open(dir.path());
    let part = |layers: &str, renumber| {
        let layers = Some(LayerRanges::parse(layers).unwrap());
        Plan::build(&checkpoint, &ViewOptions { subset: Subset { layers, renumber, ..Subset::default() }, ..hf() })
    };
    for (layers, renumber, count, expected) in
        [("0..2", false, 2, vec!["0", "1"]), ("2..4", true, 2, vec!["0", "1"]), ("3", true, 1, vec!["0"])]
    {
        let plan = part(layers, renumber).unwrap();
        assert_eq!(hf_text(&plan, "config.json").unwrap()["num_hidden_layers"], count, "{layers}");
        let index = hf_text(&plan, "model.safetensors.index.json").unwrap();
        let indexed: BTreeSet<String> = index["weight_map"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(indexed, names(&plan), "{layers}");
        let total: u64 = plan.tensors.iter().map(|tensor| tensor.view.bytes().unwrap()).sum();
        assert_eq!(index["metadata"]["total_size"], total);
        let layers_of = |name: &String| Some(name.split_once("layers.")?.1.split('.').next()?.to_owned());
        let found: BTreeSet<String> = names(&plan).iter().filter_map(layers_of).collect();
        assert_eq!(found, expected.into_iter().map(str::to_owned).collect(), "{layers}");
    }
    let kept = part("2..4", false).unwrap();
    assert!(kept.hf.is_empty() && kept.warnings.iter().any(|text| text.starts_with("hf/ is left out: ")));
    assert!(names(&kept).contains("model.layers.3.mlp.up_proj.weight"));
}

#[test]
fn files_without_tensors_vanish_from_hf() {
    let dir = tempfile::tempdir().unwrap();
    let rows = repo::llama_rows(2, DType::F32);
    let (first, second) = rows.split_at(2 + 9);
    repo::write_repo(dir.path(), &[first, second], &repo::llama_config(2));
    let layers = Some(LayerRanges::parse("0..1").unwrap());
    let options = ViewOptions { subset: Subset { layers, ..Subset::default() }, ..hf() };
    let plan = Plan::build(&repo::open(dir.path()), &options).unwrap();
    let paths: Vec<&str> = plan.hf.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]);
    assert!(matches!(plan.hf[1].content, HfContent::Original(_)), "a file that keeps all its tensors is the original");
}

#[test]
fn further_predictors_are_left_out() {
    // In DeepSeek's form, in a layer after the last; and in the form of others, beside the layers.
    let layer = |number: u64| {
        let mut rows = repo::llama_rows(number + 1, DType::BF16);
        rows.retain(|(name, ..)| name.contains(&format!("layers.{number}.")));
        rows
    };
    for (further, count) in [
        (
            [layer(2), vec![repo::row("model.layers.2.eh_proj.weight", DType::BF16, &[16, 32])]].concat(),
            "num_nextn_predict_layers",
        ),
        (
            vec![
                repo::row("mtp.fc.weight", DType::BF16, &[16, 32]),
                repo::row("mtp.layers.0.self_attn.q_proj.weight", DType::BF16, &[24, 16]),
            ],
            "mtp_num_hidden_layers",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let plain = repo::llama_rows(2, DType::BF16);
        let mut config = repo::llama_config(2);
        config[count] = json!(1);
        repo::write_repo(dir.path(), &[&plain, &further], &config);
        let checkpoint = repo::open(dir.path());
        let build = |no_mtp, layout| {
            let subset = Subset { no_mtp, ..Subset::default() };
            Plan::build(&checkpoint, &ViewOptions { subset, layout, ..ViewOptions::default() }).unwrap()
        };
        let all = [&plain[..], &further].concat();
        let expected = |rows: &[repo::Row]| rows.iter().map(|(name, ..)| name.clone()).collect::<BTreeSet<_>>();
        assert_eq!(names(&build(false, Layout::Hf)), expected(&all), "{count}");
        let plan = build(true, Layout::Hf);
        assert_eq!(names(&plan), expected(&plain), "{count}");
        assert_eq!(plan.no_hf, None);
        let reported = hf_text(&plan, "config.json").unwrap();
        assert_eq!((&reported[count], &reported["num_hidden_layers"]), (&json!(0), &json!(2)), "{count}");
        let files: Vec<&str> = plan.hf.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(files, ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]);
        let wq = build(true, Layout::Canonical);
        let wq = wq.tensors.iter().find(|tensor| tensor.name == "layers.scanned.wq").unwrap();
        assert_eq!(wq.layers.as_deref(), Some(&[0, 1][..]), "{count}");
    }
}

#[test]
fn towers_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let text: Vec<_> = repo::llama_rows(2, DType::BF16)
        .into_iter()
        .map(|(name, dtype, extents)| (format!("language_model.{name}"), dtype, extents))
        .collect();
    let towers = [
        repo::row("vision_tower.encoder.layers.0.self_attn.q_proj.weight", DType::BF16, &[8, 8]),
        repo::row("audio_tower.conv.weight", DType::BF16, &[8, 8]),
        repo::row("multi_modal_projector.linear_1.weight", DType::BF16, &[16, 8]),
    ];
    let config = json!({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
                        "text_config": repo::llama_config(2), "vision_config": {"num_hidden_layers": 1}});
    repo::write_repo(dir.path(), &[&text, &towers], &config);
    let checkpoint = repo::open(dir.path());
    let build = |text_only| {
        let subset = Subset { text_only, ..Subset::default() };
        Plan::build(&checkpoint, &ViewOptions { subset, ..hf() }).unwrap()
    };
    assert_eq!(build(false).tensors.len(), text.len() + towers.len());
    let plan = build(true);
    assert_eq!(names(&plan), text.iter().map(|(name, ..)| name.clone()).collect());
    assert!(plan.no_hf.is_none() && plan.warnings.is_empty(), "{:?} {:?}", plan.no_hf, plan.warnings);
    let expected = text.iter().map(|(name, ..)| name.strip_prefix("language_model.").unwrap().to_owned()).collect();
    assert_eq!(hf_names(&plan), expected);
    let config = hf_text(&plan, "config.json").unwrap();
    assert_eq!((&config["model_type"], &config["architectures"]), (&json!("llama"), &json!(["LlamaForCausalLM"])));
    assert_eq!(config["tie_word_embeddings"], json!(true));
}

#[test]
fn a_text_model_without_a_class_is_no_repository() {
    let rows = |extra: &[&str]| -> Vec<_> {
        let text = repo::llama_rows(1, DType::BF16);
        let text = text.into_iter().map(|(name, dtype, extents)| (format!("language_model.{name}"), dtype, extents));
        let extra = extra.iter().map(|name| repo::row(name, DType::BF16, &[8, 8]));
        text.chain(extra).chain([repo::row("visual.patch.weight", DType::BF16, &[8, 8])]).collect()
    };
    let nested = |outer: &str| json!({"model_type": outer, "text_config": repo::llama_config(1)});
    let no_class = "no class of transformers is known that is the text model (llama) of qwen2_5_vl alone";
    let sonar = ["sonar.a", "sonar.b", "sonar.c", "sonar.d"];
    let cases = [
        (rows(&[]), nested("qwen2_5_vl"), no_class),
        (rows(&[]), repo::llama_config(1), "it nests no configuration of the text model"),
        (rows(&sonar), nested("llava"), "LlamaForCausalLM has no such tensors: sonar.a, sonar.b, sonar.c and 1 more"),
    ];
    for (rows, config, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        repo::write_repo(dir.path(), &[&rows], &config);
        let subset = Subset { text_only: true, ..Subset::default() };
        let options = ViewOptions { subset, allow_unmapped: Allow::All, ..hf() };
        let plan = Plan::build(&repo::open(dir.path()), &options).unwrap();
        let reason = plan.no_hf.as_deref().unwrap();
        assert!(reason.contains(expected), "{reason}");
        assert!(plan.hf.is_empty() && plan.warnings.contains(&format!("hf/ is left out: {reason}")));
    }
}

#[test]
fn patterns_choose_by_source_or_by_target_name() {
    let dir = repo::llama(2, DType::BF16);
    let checkpoint = repo::open(dir.path());
    let rows: [(&[&str], &[&str], &[&str]); 4] = [
        (&["*norm*"], &["*.0.*"], &["final_norm", "layers.1.attn_norm", "layers.1.mlp_norm"]),
        (&["layers.scanned.w?"], &["*wq"], &["layers.scanned.wk", "layers.scanned.wo", "layers.scanned.wv"]),
        (&["embed"], &[], &["embed"]),
        (&["/embed_tokens/"], &["lm_head"], &["embed"]),
    ];
    for (include, exclude, expected) in rows {
        let subset = Subset { include: patterns(include), exclude: patterns(exclude), ..Subset::default() };
        let plan = Plan::build(&checkpoint, &ViewOptions { subset, ..ViewOptions::default() }).unwrap();
        let found: BTreeSet<String> = names(&plan)
            .into_iter()
            .filter(|name| !name.contains("scanned") || include[0].contains("scanned"))
            .collect();
        assert_eq!(found, expected.iter().map(|name| (*name).to_owned()).collect(), "{include:?} {exclude:?}");
    }
    for (include, expected) in
        [(&["*norm*", "embed"][..], "expected all to do one or the other"), (&["nothing"], "matches no tensor")]
    {
        let subset = Subset { include: patterns(include), ..Subset::default() };
        let error = refused(dir.path(), &ViewOptions { subset, ..ViewOptions::default() });
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_tied_head_is_left_to_the_rules_of_a_layout() {
    let dir = repo::llama(1, DType::BF16);
    for layout in ["maxtext", "vllm"] {
        for tied in [Tied::Alias, Tied::Absent] {
            let options = ViewOptions { layout: repo::layout(layout), tied, ..ViewOptions::default() };
            let error = refused(dir.path(), &options);
            assert!(error.contains(&format!("tied: the rules of layout {layout} say whether")), "{error}");
        }
    }
    // There is no tensor for an alias.
    let dir = tempfile::tempdir().unwrap();
    let mut config = repo::llama_config(1);
    (config["tie_word_embeddings"], config["architectures"]) = (json!(false), json!(["LlamaModel"]));
    repo::write_repo(dir.path(), &[&repo::llama_rows(1, DType::BF16)], &config);
    let plan = Plan::build(&repo::open(dir.path()), &ViewOptions { tied: Tied::Alias, ..hf() }).unwrap();
    assert!(plan.warnings[0].starts_with("tied: there is no output head"), "{:?}", plan.warnings);
}

#[test]
fn renames_reach_every_name_and_collisions_are_refused() {
    let dir = repo::llama(1, DType::BF16);
    let checkpoint = repo::open(dir.path());
    let renames = vec![Rename::strip_prefix("model."), Rename::parse(r"layers\.(\d+)=>h.$1").unwrap()];
    let plan = Plan::build(&checkpoint, &ViewOptions { renames, ..hf() }).unwrap();
    assert!(names(&plan).contains("h.0.self_attn.q_proj.weight"));
    assert_eq!(hf_names(&plan), names(&plan));
    let renames = vec![Rename::parse("[qkv]_proj=>proj").unwrap()];
    let error = refused(dir.path(), &ViewOptions { renames, ..hf() });
    assert!(
        error.contains(
            "model.layers.0.self_attn.k_proj.weight and model.layers.0.self_attn.q_proj.weight would both be at"
        ) || error.contains("q_proj.weight and model.layers.0.self_attn.k_proj.weight would both be at"),
        "{error}"
    );
    // A fine-tune under another prefix is a known family again.
    let other = tempfile::tempdir().unwrap();
    let rows: Vec<_> =
        repo::llama_rows(1, DType::BF16).into_iter().map(|(n, d, e)| (format!("actor.{n}"), d, e)).collect();
    repo::write_repo(other.path(), &[&rows], &repo::llama_config(1));
    let subset = Subset { source_renames: vec![Rename::strip_prefix("actor.")], ..Subset::default() };
    let plan = Plan::build(&repo::open(other.path()), &ViewOptions { subset, ..ViewOptions::default() }).unwrap();
    assert!(names(&plan).contains("layers.scanned.wq") && plan.unexpected.is_empty());
}

#[test]
fn tied_heads_are_shown_as_asked() {
    let dir = repo::llama(1, DType::BF16);
    let checkpoint = repo::open(dir.path());
    for (tied, layout, raw, bundled, in_hf) in [
        (Tied::Auto, Layout::Canonical, true, false, false),
        (Tied::Alias, Layout::Canonical, true, true, true),
        (Tied::Absent, Layout::Canonical, false, false, false),
        (Tied::Auto, Layout::Hf, false, false, false),
        (Tied::Alias, Layout::Hf, true, true, true),
    ] {
        let plan = Plan::build(&checkpoint, &ViewOptions { tied, layout, ..ViewOptions::default() }).unwrap();
        let head = plan.tensors.iter().find(|tensor| tensor.name.starts_with("lm_head"));
        assert_eq!(head.is_some(), raw, "{tied:?}");
        assert_eq!(head.is_some_and(|head| plan.is_bundled(head)), bundled, "{tied:?}");
        assert_eq!(hf_names(&plan).contains("lm_head.weight"), in_hf, "{tied:?}");
    }
}

/// A model that is tied by its configuration, with an output head that is stored: equal to the embedding, or another in its last byte.
fn with_stored_head(differs: bool, quantity: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = repo::llama_config(1);
    (config["tie_word_embeddings"], config["intermediate_size"]) = (json!(true), json!(36));
    let embedding = "model.embed_tokens.weight";
    let mut rows = repo::llama_rows(1, DType::BF16);
    let shape = rows.iter_mut().find(|row| row.0 == embedding).map(|row| {
        row.2[0] *= quantity;
        row.2.clone()
    });
    config["vocab_size"] = json!(shape.as_ref().unwrap()[0]);
    rows.push(repo::row("lm_head.weight", DType::BF16, &shape.unwrap()));
    repo::write_repo(dir.path(), &[&rows], &config);
    let checkpoint = repo::open(dir.path());
    let place = |name: &str| {
        let info = checkpoint.tensor(checkpoint.find(name).unwrap());
        (checkpoint.source().path(info.file()).to_owned(), info.span())
    };
    let ((path, embedding), (_, head)) = (place(embedding), place("lm_head.weight"));
    let range =
        |span: ckfs::source::ByteSpan| usize::try_from(span.start()).unwrap()..usize::try_from(span.end()).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes.copy_within(range(embedding), range(head).start);
    bytes[range(head).end - 1] ^= u8::from(differs);
    fs::write(path, bytes).unwrap();
    dir
}

#[test]
fn a_stored_head_that_is_not_the_embedding_is_kept_although_the_configuration_ties_it() {
    // The second needs more than the first window of the comparison.
    for quantity in [1, 500] {
        let (equal, differing) = (with_stored_head(false, quantity), with_stored_head(true, quantity));
        for layout in [None, Some("vllm"), Some("maxtext"), Some("megatron"), Some("torchtitan")] {
            let layout = layout.map_or(Layout::Hf, repo::layout);
            let plan = |dir: &Path, tied| {
                let options = ViewOptions { tied, layout: layout.clone(), ..ViewOptions::default() };
                let checkpoint = repo::open(dir);
                let plan = Plan::build(&checkpoint, &options).unwrap();
                let head = checkpoint.find("lm_head.weight").unwrap();
                let mut shown = 0;
                for tensor in &plan.tensors {
                    tensor.view.for_each_stored(&mut |id| shown += usize::from(id == head));
                }
                (plan, shown)
            };
            let says =
                |plan: &Plan| plan.warnings.iter().any(|text| text.contains("lm_head.weight is stored and differs"));
            let (kept, shown) = plan(differing.path(), Tied::Auto);
            assert!(shown == 1 && says(&kept), "{layout:?}: {:?}", kept.warnings);
            assert_eq!(hf_text(&kept, "config.json").unwrap()["tie_word_embeddings"], false);
            let (left, shown) = plan(differing.path(), Tied::Absent);
            assert!(shown == 0 && says(&left), "{layout:?}: {:?}", left.warnings);
            assert_eq!(hf_text(&left, "config.json"), None, "hf/ is as the source has it");
            let (tied, _) = plan(equal.path(), Tied::Auto);
            assert!(!says(&tied) && hf_text(&tied, "config.json").is_none(), "{layout:?}");
            if matches!(&layout, Layout::Embedded(embedded) if embedded.name == "maxtext") {
                assert!(!names(&tied).contains("params.decoder.logits_dense.kernel"));
            }
        }
    }
}

/// transformers takes a configuration of quantization at its word, and finds no scales.
#[test]
fn a_configuration_of_quantization_over_plain_weights_is_taken_out_of_hf() {
    let stale = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    for nested in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = repo::llama_config(1);
        if nested {
            config["text_config"] = json!({"quantization_config": stale, "hidden_size": 16});
        } else {
            (config["quantization_config"], config["compression_config"]) = (stale.clone(), stale.clone());
        }
        repo::write_repo(dir.path(), &[&repo::llama_rows(1, DType::BF16)], &config);
        fs::write(dir.path().join("hf_quant_config.json"), "{\"quantization\": {\"quant_algo\": \"FP8\"}}").unwrap();
        for dtype in [None, Some(DType::F32)] {
            let plan = Plan::build(&repo::open(dir.path()), &ViewOptions { dtype, ..hf() }).unwrap();
            let config = hf_text(&plan, "config.json").unwrap().to_string();
            assert!(!config.contains("quant_method"), "{config}");
            assert!(plan.hf.iter().all(|file| file.path != "hf_quant_config.json"));
            assert!(plan.warnings.iter().any(|text| text.contains("says nothing of the quantization fp8")));
        }
    }
}

/// Lists that count what predicts further tokens too, and lists of numbers.
#[test]
fn lists_of_the_configuration_follow_the_layers() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = repo::llama_config(3);
    config["num_nextn_predict_layers"] = json!(1);
    config["layer_types"] = json!(["a", "b", "c", "d"]);
    config["moe_layers"] = json!([1, 2]);
    config["hybrid_override_pattern"] = json!("M*E");
    let mut rows = repo::llama_rows(4, DType::BF16);
    rows.push(repo::row("model.layers.3.eh_proj.weight", DType::BF16, &[16, 32]));
    repo::write_repo(dir.path(), &[&rows], &config);
    let part = |layers: Option<&str>, no_mtp, renumber| {
        let layers = layers.map(|layers| LayerRanges::parse(layers).unwrap());
        let subset = Subset { layers, no_mtp, renumber, ..Subset::default() };
        Plan::build(&repo::open(dir.path()), &ViewOptions { subset, ..hf() }).unwrap()
    };
    for (layers, no_mtp, renumber, types, numbers, pattern, counts) in [
        (None, true, false, json!(["a", "b", "c"]), json!([1, 2]), "M*E", (3, 0)),
        (Some("0..2"), false, false, json!(["a", "b"]), json!([1]), "M*", (2, 0)),
        (Some("1..3"), true, true, json!(["b", "c"]), json!([0, 1]), "*E", (2, 0)),
        (Some("1..4"), false, true, json!(["b", "c", "d"]), json!([0, 1]), "*E", (2, 1)),
    ] {
        let plan = part(layers, no_mtp, renumber);
        let config = hf_text(&plan, "config.json").unwrap_or_else(|| panic!("{layers:?}: {:?}", plan.no_hf));
        assert_eq!(
            [&config["layer_types"], &config["moe_layers"], &config["hybrid_override_pattern"]],
            [&types, &numbers, &json!(pattern)]
        );
        assert_eq!(
            (&config["num_hidden_layers"], &config["num_nextn_predict_layers"]),
            (&json!(counts.0), &json!(counts.1))
        );
    }
    let moved = part(Some("0..2,3..4"), false, false);
    assert!(moved.no_hf.is_some_and(|reason| reason.contains("predict further tokens")));
    // A list that has neither as many entries as layers nor one is not known, which matters where layers are cut.
    config["layer_types"] = json!(["a", "b"]);
    repo::write_repo(dir.path(), &[&rows], &config);
    let whole = part(None, true, false);
    assert_eq!(hf_text(&whole, "config.json").unwrap()["layer_types"], json!(["a", "b"]));
    let reason = part(Some("0..2"), false, false).no_hf.unwrap();
    assert!(reason.contains("\"layer_types\" with 2 entries for 3 layers: not known how to cut it"), "{reason}");
}

#[test]
fn a_layout_without_a_head_refuses_a_head_of_its_own() {
    let dir = with_stored_head(true, 1);
    let text = "name = 'headless'\n[[leaf]]\nto = 'e'\nfrom = 'model.embed_tokens.weight'\n[[ignore]]\nnames = '*'\n";
    let path = dir.path().join("layout.toml");
    fs::write(&path, text).unwrap();
    let layout = repo::layout(path.to_str().unwrap());
    let error = refused(dir.path(), &ViewOptions { layout: layout.clone(), ..ViewOptions::default() });
    assert!(error.contains("lm_head.weight is stored and differs from model.embed_tokens.weight"), "{error}");
    Plan::build(&repo::open(dir.path()), &ViewOptions { layout, tied: Tied::Absent, ..ViewOptions::default() })
        .unwrap();
}

fn adapter(config: &Value, modules: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<_> = modules
        .iter()
        .flat_map(|module| {
            let name = |matrix: &str| format!("base_model.model.{module}.{matrix}.weight");
            [repo::row(&name("lora_A"), DType::F32, &[2, 16]), repo::row(&name("lora_B"), DType::F32, &[24, 2])]
        })
        .collect();
    repo::write_file(&dir.path().join("adapter_model.safetensors"), &rows, 100);
    fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_once_for_all_layers() {
    let dir = repo::llama(3, DType::BF16);
    let modules =
        ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.2.self_attn.q_proj"];
    let adapter = adapter(&json!({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 8}), &modules);
    let open = OpenOptions { adapters: vec![adapter.path().to_owned()], ..OpenOptions::default() };
    let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &open).unwrap();
    let options = ViewOptions { layout: Layout::Hf, lora: Some(adapter.path().to_owned()), ..ViewOptions::default() };
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    for (matrix, shapes) in [("A", "[8, 16], found [2, 16]"), ("B", "[24, 8], found [24, 2]")] {
        let line =
            format!("model.layers.{{0-2}}.self_attn.q_proj.lora_{matrix}.weight (3 tensors): expected shape {shapes}");
        assert_eq!(error.matches(&line).count(), 1, "{error}");
    }
    assert_eq!(error.matches("expected shape").count(), 2, "{error}");
}

#[test]
fn adapters_stand_beside_base_layers() {
    let dir = repo::llama(1, DType::BF16);
    let config = json!({"peft_type": "LORA", "target_modules": ["q_proj"], "bias": "none"});
    let build = |config: &Value, modules: &[&str], layout: Layout| {
        let adapter = adapter(config, modules);
        let open = OpenOptions { adapters: vec![adapter.path().to_owned()], ..OpenOptions::default() };
        let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &open).unwrap();
        assert_eq!(checkpoint.tensors().len(), 11, "hidden until asked for");
        let lora = Some(adapter.path().to_owned());
        Plan::build(&checkpoint, &ViewOptions { layout, lora, ..ViewOptions::default() })
    };
    let q = "model.layers.0.self_attn.q_proj";
    let plan = build(&config, &[q], Layout::Hf).unwrap();
    let found = names(&plan);
    for suffix in ["base_layer", "lora_A.default", "lora_B.default"] {
        assert!(found.contains(&format!("base_model.model.{q}.{suffix}.weight")), "{suffix}");
    }
    assert!(found.contains("base_model.model.model.norm.weight") && found.len() == 13);
    assert!(plan.hf.iter().all(|file| matches!(file.content, HfContent::Original(_))), "hf/ is the base's");
    let ahead = json!({"peft_type": "LORA", "target_modules": r"(?=.*self_attn).*(?<!x)q_proj\Z", "r": 4,
        "rank_pattern": {r"layers\.(?!1)\d+\..*": 2}});
    build(&ahead, &[q], Layout::Hf).unwrap();
    for (config, modules, layout, expected) in [
        (config.clone(), &[q][..], Layout::Canonical, "those of the layout hf, not of canonical: add --layout hf"),
        (config.clone(), &[], Layout::Hf, "needed for the targeted module"),
        (config.clone(), &[q, "model.layers.7.self_attn.q_proj"], Layout::Hf, "its module is not there"),
        (json!({"peft_type": "LOHA"}), &[q], Layout::Hf, "expected LORA"),
        (
            json!({"peft_type": "LORA", "target_modules": ["q_proj"], "use_dora": true}),
            &[q],
            Layout::Hf,
            "missing tensor base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        ),
        (
            json!({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 8}),
            &[q],
            Layout::Hf,
            "q_proj.lora_A.weight: expected shape [8, 16], found [2, 16]",
        ),
        (
            json!({"peft_type": "LORA", "target_modules": ["down_proj"]}),
            &["model.layers.0.mlp.down_proj"],
            Layout::Hf,
            "down_proj.lora_B.weight: expected shape [16, _], found [24, 2]",
        ),
        (json!({"peft_type": "LORA", "bias": "all"}), &[q], Layout::Hf, "bias: expected none"),
        // As PEFT reads them: expressions of Python, of which the first that matches counts.
        (
            json!({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, "rank_pattern": {r"layers\.(?!1)\d+\..*": 8}}),
            &[q],
            Layout::Hf,
            "q_proj.lora_A.weight: expected shape [8, 16], found [2, 16]",
        ),
        (
            json!({"peft_type": "LORA", "target_modules": ["q_proj"], "rank_pattern": {"(": 8}}),
            &[q],
            Layout::Hf,
            "rank_pattern: expected a regular expression of Python, found \"(\"",
        ),
        (
            json!({"peft_type": "LORA", "target_modules": ["q_proj"], "alpha_pattern": {"*": 8}}),
            &[q],
            Layout::Hf,
            "alpha_pattern: expected a regular expression of Python, found \"*\"",
        ),
        (
            json!({"peft_type": "LORA", "target_modules": "q_proj("}),
            &[q],
            Layout::Hf,
            "target_modules: expected a regular",
        ),
    ] {
        let error = build(&config, modules, layout).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Tensors of an adapter, with their shapes.
type Tensors<'a> = &'a [(&'a str, &'a [u64])];

#[test]
fn an_adapter_that_was_saved_empty_or_in_part_is_refused() {
    let dir = repo::llama(1, DType::BF16);
    let q = "model.layers.0.self_attn.q_proj";
    let refusal = |changed: &[(&str, &[u64])], to_save: &[&str]| {
        let config = json!({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, "lora_alpha": 4, "modules_to_save": to_save});
        let adapter = adapter(&config, &[q]);
        let mut rows = vec![
            repo::row(&format!("base_model.model.{q}.lora_A.weight"), DType::F32, &[2, 16]),
            repo::row(&format!("base_model.model.{q}.lora_B.weight"), DType::F32, &[24, 2]),
        ];
        for (name, shape) in changed {
            let name = format!("base_model.model.{name}");
            rows.retain(|(known, ..)| *known != name);
            rows.push(repo::row(&name, DType::F32, shape));
        }
        repo::write_file(&adapter.path().join("adapter_model.safetensors"), &rows, 100);
        let open = OpenOptions { adapters: vec![adapter.path().to_owned()], ..OpenOptions::default() };
        let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &open).unwrap();
        [true, false].map(|shown| {
            let adapter = Some(adapter.path().to_owned());
            let (lora, merge_lora) = if shown { (adapter, None) } else { (None, adapter.map(MergedLora::Dir)) };
            let options = ViewOptions { layout: Layout::Hf, lora, merge_lora, ..ViewOptions::default() };
            Plan::build(&checkpoint, &options).err().map(|error| error.to_string()).unwrap_or_default()
        })
    };
    assert_eq!(refusal(&[("model.norm.weight", &[16])], &["model.norm"]), ["", ""]);
    let (a, b) = (format!("{q}.lora_A.weight"), format!("{q}.lora_B.weight"));
    let cases: [(Tensors<'_>, &[&str], &str); 5] = [
        (&[(&a, &[0]), (&b, &[0])], &[], "lora_A.weight"),
        (&[(&b, &[0, 0])], &[], "lora_B.weight"),
        (&[("model.norm.weight", &[0])], &["model.norm"], "model.norm.weight"),
        (&[("model.norm.weight", &[8])], &["model.norm"], "model.norm.weight"),
        (&[], &["model.norm"], "model.norm.weight"),
    ];
    for (changed, to_save, expected) in cases {
        for error in refusal(changed, to_save) {
            assert!(error.contains(expected), "{changed:?} {to_save:?}: {error}");
        }
    }
    assert!(refusal(&[], &["model.norm"])[0].contains("modules_to_save in adapter_config.json"));
}

#[test]
fn fused_experts_that_no_family_knows_are_split_by_expert() {
    let dir = tempfile::tempdir().unwrap();
    let fused = "model.layers.0.block.experts.both";
    let scales = format!("{fused}_scale_inv");
    let rows = [
        repo::row(fused, DType::BF16, &[4, 6, 8]),
        repo::row(&scales, DType::F32, &[4, 3, 4]),
        repo::row("model.layers.0.block.gate.weight", DType::BF16, &[4, 8]),
    ];
    let config = json!({"model_type": "unheard_of", "num_experts": 4, "num_hidden_layers": 1});
    repo::write_repo(dir.path(), &[&rows], &config);
    let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    let mesh = Mesh::parse("ep=2").unwrap();
    let plan = Plan::build(&checkpoint, &ViewOptions { layout: Layout::Hf, mesh, ..ViewOptions::default() }).unwrap();
    for (name, split) in [(fused, true), (scales.as_str(), true), ("model.layers.0.block.gate.weight", false)] {
        let tensor = plan.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let first = plan.region(tensor, 1).ranges().next().unwrap();
        assert_eq!(first, if split { 2..4 } else { 0..4 }, "{name}");
    }
}

#[test]
fn the_index_of_hf_names_what_is_there() {
    let dir = repo::llama(1, DType::BF16);
    let path = dir.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    index["weight_map"]["gone.weight"] = json!("model-00001-of-00002.safetensors");
    fs::write(&path, index.to_string()).unwrap();
    let open = OpenOptions { allow_missing: Accepted::new(|_| true), ..OpenOptions::default() };
    let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &open).unwrap();
    let plan = Plan::build(&checkpoint, &ViewOptions { allow_missing: Allow::All, ..hf() }).unwrap();
    let shown = hf_text(&plan, "model.safetensors.index.json").expect("it is rewritten");
    let named: BTreeSet<String> = shown["weight_map"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(named, names(&plan));
}

#[test]
fn a_head_that_the_configuration_calls_its_own_stays_with_tied_absent() {
    let dir = tempfile::tempdir().unwrap();
    let rows = [repo::row("shared.weight", DType::F32, &[8, 4]), repo::row("lm_head.weight", DType::F32, &[8, 4])];
    for (says, stays) in [(Some(false), true), (None, false)] {
        let mut config = json!({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]});
        config.as_object_mut().unwrap().extend(says.map(|says| ("tie_word_embeddings".to_owned(), json!(says))));
        repo::write_repo(dir.path(), &[&rows], &config);
        let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
        let plan = Plan::build(&checkpoint, &ViewOptions { tied: Tied::Absent, ..hf() }).unwrap();
        assert_eq!(names(&plan).contains("lm_head.weight"), stays, "{says:?}");
    }
}

#[test]
fn casts_to_8_bits_say_what_they_lose() {
    let dir = tempfile::tempdir().unwrap();
    let (path, values) = (dir.path().join("model.safetensors"), [1.0, 500.0, -1e-4, -4e4, 0.0, 3e-5_f32]);
    let header = write_header([("w", DType::F32, &[6_u64][..])], &[("format", "pt")], 8).unwrap();
    fs::write(&path, [header.bytes, values.iter().flat_map(|value| value.to_le_bytes()).collect()].concat()).unwrap();
    let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    let options = |layout| ViewOptions { layout, dtype: Some(DType::F8E4M3), ..ViewOptions::default() };
    let refused = Plan::build(&checkpoint, &options(Layout::Hf)).unwrap_err().to_string();
    assert!(refused.contains("F8_E4M3 without scales") && refused.contains("--quantize fp8-block"), "{refused}");
    let plan = Plan::build(&checkpoint, &options(Layout::Canonical)).unwrap();
    let warnings = plan.warnings.join("\n");
    assert!(warnings.contains("-40000 in w becomes NaN or infinite, and -0.0001 in w becomes 0"), "{warnings}");
    assert!(warnings.contains("hf/ is left out") && plan.hf.is_empty(), "{warnings}");
    let wide = Plan::build(&checkpoint, &ViewOptions { dtype: Some(DType::BF16), ..hf() }).unwrap();
    assert!(wide.warnings.is_empty() && !wide.hf.is_empty(), "{:?}", wide.warnings);
}
