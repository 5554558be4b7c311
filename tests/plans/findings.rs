//! The findings of a plan about a repository before anything is mounted: differences between layers, absent layers,
//! misspelt mesh axes, weights that belong to their scales, and the tensors that a layout leaves out.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::common::repo::{self, Row, row};
use ckfs::{
    plan::{
        Allow, LayerRanges, Layout, Mesh, Pattern, Plan, PlanError, ShardRule, Sharding, Subset, Tied, ViewOptions,
        report,
    },
    tensor::DType,
};
use serde_json::{Value, json};

const W: DType = DType::BF16;

/// Names, each with its companion.
type Pairs = &'static [(&'static str, &'static str)];

fn build(rows: &[Row], config: &Value, options: &ViewOptions) -> Result<Plan, PlanError> {
    let dir = tempfile::tempdir().unwrap();
    repo::write_repo(dir.path(), &[rows], config);
    describe(&dir.path().join("model-00001-of-00001.safetensors"));
    Plan::build(&repo::open(dir.path()), options)
}

/// Gives the tensors that tell how bitsandbytes has stored a matrix of 64 x 128 bytes that do.
fn describe(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let start = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let state = r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128]}"#;
    let map: [f32; 16] = [
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
    for (name, tensor) in header.as_object().unwrap() {
        let told = match name.rsplit('.').next() {
            Some("bitsandbytes__nf4") => format!("{state:80}").into_bytes(),
            Some("quant_map") => map.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Some("weight_format") => vec![0],
            _ => continue,
        };
        let at = start + usize::try_from(tensor["data_offsets"][0].as_u64().unwrap()).unwrap();
        bytes[at..at + told.len()].copy_from_slice(&told);
    }
    fs::write(file, bytes).unwrap();
}

fn plan(rows: &[Row], config: &Value) -> Plan {
    build(rows, config, &ViewOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn text(rows: &[Row], config: &Value, options: &ViewOptions) -> String {
    let dir = tempfile::tempdir().unwrap();
    repo::write_repo(dir.path(), &[rows], config);
    let checkpoint = repo::open(dir.path());
    report::view_text(&checkpoint, &Plan::build(&checkpoint, options).unwrap_or_else(|error| panic!("{error}")))
}

fn holes(plan: &Plan) -> Vec<String> {
    plan.holes.iter().map(ToString::to_string).collect()
}

/// Layers of a model of no known family: `x` has the tensor in the usual shape, `o` in another, `.` lacks it.
fn layers(kinds: &[(&str, &str)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (name, layers) in kinds {
        for (layer, letter) in layers.bytes().enumerate() {
            let name = format!("net.blocks.{layer}.{name}.weight");
            match letter {
                b'x' => rows.push(row(&name, W, &[4, 4])),
                b'o' => rows.push(row(&name, W, &[2, 4])),
                _ => {}
            }
        }
    }
    rows
}

#[test]
fn holes_of_an_unknown_family_are_listed() {
    let rows: &[(Pairs, &[&str])] = &[
        (&[("a", "xxx"), ("b", "x.x")], &["net.blocks.*.b.weight: layers 0,2 have it, layer 1 lacks it"]),
        (
            &[("a", "xxxxxxxxx"), ("b", "x.xx.xxxx")],
            &["net.blocks.*.b.weight: layers 0,2-3,5-8 have it, layers 1,4 lack it"],
        ),
        (&[("a", "xxx"), ("b", "xox")], &["net.blocks.*.b.weight: layers 0,2 have shape [4, 4], layer 1 has [2, 4]"]),
        // Several equal experts are one line.
        (
            &[("a", "xxxx"), ("experts.0.up", "x.xx"), ("experts.1.up", "x.xx")],
            &["net.blocks.*.experts.{0-1}.up.weight (2 tensors): layers 0,2-3 have it, layer 1 lacks it"],
        ),
        // A misspelt name in two layers is not another type of layer.
        (
            &[("a_proj", "xxxxxx"), ("b_proj", "x..xxx"), ("b_porj", ".xx...")],
            &["net.blocks.*.b_proj.weight: layers 0,3-5 have it, layers 1-2 lack it"],
        ),
        // Runs at either end, patterns that repeat, and additions to a few layers.
        (&[("a", "xxxxxx"), ("b", "..xxxx"), ("c", "xx....")], &[]),
        (&[("a", "xxxxxxxx"), ("b", "xxx.xxx."), ("c", "...x...x")], &[]),
        (&[("a", "xxxxxxxx"), ("b", "xxxoxxxo")], &[]),
        (&[("a", "xxxxxxxx"), ("b", "..x..x..")], &[]),
        // Another type of layer, without a pattern.
        (&[("norm", "xxxxxxxxx"), ("attention", "xx.xxxx.x"), ("convolution", "..x....x.")], &[]),
    ];
    for (kinds, expected) in rows {
        assert_eq!(holes(&plan(&layers(kinds), &json!({"model_type": "unheard_of"}))), *expected, "{kinds:?}");
    }
}

#[test]
fn the_configuration_explains_differences() {
    let kinds = [("a", "xxxxxx"), ("b", "xx.xxx"), ("c", "xxoxxx")];
    let config = |members: Value| {
        let mut config = json!({"model_type": "unheard_of", "num_hidden_layers": 6});
        config.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        config
    };
    assert_eq!(holes(&plan(&layers(&kinds), &config(json!({})))).len(), 2);
    for members in [
        json!({"layer_types": ["s", "s", "f", "s", "s", "s"]}),
        json!({"full_attention_layers": [2]}),
        json!({"attention": {"full": [3]}}),
        json!({"hybrid_override_pattern": "MM*MMM"}),
    ] {
        assert_eq!(holes(&plan(&layers(&kinds), &config(members.clone()))), [""; 0], "{members}");
    }
    let other = json!({"layer_types": ["s", "f", "s", "s", "s", "s"]});
    assert_eq!(holes(&plan(&layers(&kinds), &config(other))).len(), 2);
}

#[test]
fn a_tensor_of_another_shape_in_one_layer_is_named_and_can_be_accepted() {
    let mut rows = repo::llama_rows(4, W);
    let name = "model.layers.2.mlp.up_proj.weight";
    let at = rows.iter().position(|row| row.0 == name).unwrap();
    rows[at] = row(name, W, &[7, rows[at].2[1]]);
    for layout in [Layout::Canonical, Layout::Hf] {
        let options = ViewOptions { layout, ..ViewOptions::default() };
        let error = build(&rows, &repo::llama_config(4), &options).unwrap_err();
        assert!(!error.concerns_names(), "{error}");
        assert_eq!(error.of_other_shape(), Some(name));
        let allow_missing = Allow::Matching(vec![Pattern::parse(name).unwrap()]);
        build(&rows, &repo::llama_config(4), &ViewOptions { allow_missing, ..options }).unwrap();
    }
}

#[test]
fn holes_of_a_known_family_are_refused() {
    let config = repo::llama_config(4);
    let extra = |layers: &[u64]| {
        let mut rows = repo::llama_rows(4, W);
        rows.extend(layers.iter().map(|l| row(&format!("model.layers.{l}.self_attn.gate.weight"), W, &[4])));
        rows
    };
    assert!(plan(&extra(&[0, 1, 2, 3]), &config).holes.is_empty());
    let hole = "model.layers.*.self_attn.gate.weight: layers 0,2-3 have it, layer 1 lacks it";
    for layout in [Layout::Canonical, Layout::Hf] {
        let options = ViewOptions { layout, ..ViewOptions::default() };
        let error = build(&extra(&[0, 2, 3]), &config, &options).unwrap_err();
        assert_eq!(error.to_string(), format!("{hole}; config.json does not say why"));
        assert!(error.concerns_names() && error.of_other_shape().is_none());
        let allowed = Allow::Matching(vec![Pattern::parse("*.1.self_attn.gate.weight").unwrap()]);
        let plan = build(&extra(&[0, 2, 3]), &config, &ViewOptions { allow_missing: allowed, ..options }).unwrap();
        assert_eq!(holes(&plan), [hole]);
    }
    let mut rows = repo::llama_rows(4, W);
    let wrong = rows.iter_mut().find(|(name, ..)| name == "model.layers.2.mlp.up_proj.weight").unwrap();
    wrong.2 = vec![35, 16];
    let error = build(&rows, &config, &ViewOptions::default()).unwrap_err().to_string();
    assert!(error.contains("layers 0-1,3 have shape [36, 16], layer 2 has [35, 16]"), "{error}");
    // A layer that is narrower as a whole is pruned: it is reported and shown.
    let mut pruned = rows.clone();
    for (name, _, shape) in pruned.iter_mut().filter(|(name, ..)| name.starts_with("model.layers.2.mlp.")) {
        *shape = if name.contains("down_proj") { vec![16, 35] } else { vec![35, 16] };
    }
    for layout in [Layout::Canonical, Layout::Hf] {
        let plan = build(&pruned, &config, &ViewOptions { layout, ..ViewOptions::default() }).unwrap();
        assert!(holes(&plan).iter().any(|hole| hole.contains("layer 2 has [35, 16]")), "{:?}", holes(&plan));
    }
    // A different set of layers is required.
    let subset = Subset { layers: Some(LayerRanges::parse("0..2").unwrap()), ..Subset::default() };
    build(&rows, &config, &ViewOptions { subset, ..ViewOptions::default() }).unwrap();
    // A requirement for every layer is reported once.
    rows.retain(|(name, ..)| !name.starts_with("model.layers.2.mlp.up_proj"));
    let error = build(&rows, &config, &ViewOptions::default()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    // With code of its own a model may have any tensors.
    let mut own = config.clone();
    own["auto_map"] = json!({"AutoModel": "m.M"});
    assert_eq!(holes(&plan(&extra(&[0, 2, 3]), &own)), [hole]);
}

#[test]
fn layers_of_multi_token_prediction_are_not_stacked() {
    let mut rows = repo::llama_rows(4, W);
    let mut config = repo::llama_config(3);
    rows.push(row("model.layers.3.eh_proj.weight", W, &[16, 32]));
    rows.push(row("mtp.layers.0.self_attn.q_proj.weight", W, &[24, 16]));
    for (model_type, stack, single, other) in [
        ("deepseek_v3", "layers.scanned.w_up", "layers.3.w_up", "mtp.layers.0.self_attn.q_proj"),
        ("unheard_of", "layers.scanned.mlp.up_proj", "layers.3.mlp.up_proj", "mtp.layers.0.self_attn.q_proj"),
    ] {
        config["model_type"] = json!(model_type);
        let plan = build(&rows, &config, &ViewOptions { allow_missing: Allow::All, ..ViewOptions::default() }).unwrap();
        let tensor =
            |name: &str| plan.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(tensor(stack).layers.as_deref(), Some(&[0, 1, 2][..]));
        assert!(plan.is_bundled(tensor(single)) && !plan.is_bundled(tensor(&single.replace('3', "2"))));
        assert!(!plan.is_bundled(tensor(other)));
    }
    // A decoder may have more layers than the encoder, whose number the configuration gives.
    config["is_encoder_decoder"] = json!(true);
    let plan = plan(&rows, &config);
    let stack = plan.tensors.iter().find(|tensor| tensor.name == "layers.scanned.mlp.up_proj").unwrap();
    assert_eq!(stack.layers.as_deref(), Some(&[0, 1, 2, 3][..]));
}

#[test]
fn a_report_says_how_many_missing_names_it_leaves_out() {
    let mut rows = repo::llama_rows(4, W);
    rows.retain(|(name, ..)| !name.ends_with("up_proj.weight"));
    let dir = tempfile::tempdir().unwrap();
    let config = repo::llama_config(4);
    repo::write_repo(dir.path(), &[&rows], &config);
    let checkpoint = repo::open(dir.path());
    let options = ViewOptions { allow_missing: Allow::All, ..ViewOptions::default() };
    let mut plan = Plan::build(&checkpoint, &options).unwrap();
    assert_eq!(plan.missing.len(), 1);
    for (count, more) in [(40, None), (43, Some("and 3 more"))] {
        plan.missing = vec![plan.missing[0].clone(); count];
        let text = report::view_text(&checkpoint, &plan);
        assert_eq!(text.matches("up_proj").count(), 40, "{text}");
        assert_eq!(text.lines().map(str::trim).find(|line| line.starts_with("and ")), more, "{text}");
    }
}

#[test]
fn ranges_of_layers_beyond_the_last_are_refused() {
    let dir = repo::llama(4, W);
    let checkpoint = repo::open(dir.path());
    let part = |layers: &str| {
        let subset = Subset { layers: Some(LayerRanges::parse(layers).unwrap()), ..Subset::default() };
        Plan::build(&checkpoint, &ViewOptions { subset, ..ViewOptions::default() }).map(drop).map_err(|e| e.to_string())
    };
    for good in ["0..4", "2..", "3", "..2,3.."] {
        assert_eq!(part(good), Ok(()), "{good}");
    }
    for (bad, said) in [("7..9", "7..9"), ("0..9", "0..9"), ("0..2,4", "4..5"), ("4..", "4.."), ("2..,9", "9..10")] {
        let expected = format!("layers: {said}: there are 4 layers, 0 to 3: expected ranges in 0..4");
        assert_eq!(part(bad), Err(expected), "{bad}");
    }
}

#[test]
fn misspelt_mesh_axes_are_refused() {
    let rows = repo::llama_rows(2, W);
    let with = |mesh: &str, options: ViewOptions| {
        let mesh = Mesh::parse(mesh).unwrap();
        build(&rows, &repo::llama_config(2), &ViewOptions { mesh, ..options })
    };
    let refused = |mesh: &str, options| with(mesh, options).unwrap_err().to_string();
    let way_out = |axis: &str| format!("(--replicate {axis} if every device along it is to hold the same)");
    let near = |axis: &str, near: &str| {
        format!("mesh axis {axis:?}: no rule splits by it; did you mean {near:?}? {}", way_out(axis))
    };
    for (mesh, axis, known) in [
        ("fdsp=4", "fdsp", "fsdp"),
        ("data=2,tenor=2", "tenor", "tensor"),
        ("experts=2", "experts", "expert"),
        ("FSDP=4", "FSDP", "fsdp"),
        // Names of other programs.
        ("model=2", "model", "tensor"),
        ("mp=2", "mp", "tensor"),
        ("fsdp=2,tensor_model_parallel=2", "tensor_model_parallel", "tensor"),
        ("ici_fsdp_parallelism=4", "ici_fsdp_parallelism", "fsdp"),
        ("ici_tensor_parallelism=4", "ici_tensor_parallelism", "tensor"),
        ("dcn_data_parallelism=2,fsdp=2", "dcn_data_parallelism", "data"),
        ("zero3=4", "zero3", "fsdp"),
    ] {
        assert_eq!(refused(mesh, ViewOptions::default()), near(axis, known));
    }
    for (mesh, options) in [
        ("fdsp=1", ViewOptions::default()),
        ("fdsp=4", ViewOptions { sharding: Sharding::Replicate, ..ViewOptions::default() }),
    ] {
        assert_eq!(with(mesh, options).unwrap().warnings, [""; 0], "{mesh}");
    }
    for (mesh, axis, known) in [
        ("stage=2", "stage", "fsdp, tensor"),
        ("pp=2", "pp", "fsdp, tensor"),
        ("cp=2", "cp", "fsdp, tensor"),
        ("fsdp=2,fsdp2=2", "fsdp2", "tensor"),
        ("x=2", "x", "fsdp, tensor"),
    ] {
        let first = known.split(',').next().unwrap();
        let expected = format!(
            "mesh axis {axis:?}: no rule splits by it; the layout splits by {known}, as in {first}=2 {}",
            way_out(axis)
        );
        assert_eq!(refused(mesh, ViewOptions::default()), expected);
        let replicate = vec![axis.to_owned()];
        let plan = with(mesh, ViewOptions { replicate, ..ViewOptions::default() }).unwrap();
        assert_eq!(plan.warnings, [""; 0], "{mesh}");
    }
    // A known name that splits nothing in this model.
    let expected = "mesh axis \"expert\": it splits nothing, as the model has no experts that the layout knows ";
    assert_eq!(refused("expert=2", ViewOptions::default()), format!("{expected}{}", way_out("expert")));
    let replicate = |axis: &str| ViewOptions { replicate: vec![axis.to_owned()], ..ViewOptions::default() };
    with("expert=2", replicate("expert")).unwrap();
    let error = refused("fsdp=2", replicate("fsdp"));
    assert!(error.contains("replicate: mesh axis \"fsdp\" splits tensors"), "{error}");
    let own = ShardRule {
        pattern: Pattern::parse("layers.scanned.wq").unwrap(),
        spec: vec![vec![], vec!["fdsp".to_owned()]],
    };
    with("fdsp=4", ViewOptions { shard_rules: vec![own], ..ViewOptions::default() }).unwrap();
}

/// Each of the experts that are stored one by one is on some device, the last of an odd number too.
#[test]
fn single_experts_are_spread_over_the_devices_of_their_axis() {
    let mut rows = repo::llama_rows(1, W);
    rows.retain(|(name, ..)| !name.contains(".mlp."));
    for expert in 0..3 {
        for (name, shape) in [("gate_proj", [24, 16]), ("up_proj", [24, 16]), ("down_proj", [16, 24])] {
            rows.push(row(&format!("model.layers.0.mlp.experts.{expert}.{name}.weight"), W, &shape));
        }
    }
    for layout in ["hf", "canonical"] {
        let (layout, mesh) = (repo::layout(layout), Mesh::parse("expert=2").unwrap());
        let options = ViewOptions { layout, mesh, unscanned: true, ..ViewOptions::default() };
        let plan = build(&rows, &json!({ "model_type": "own" }), &options).unwrap();
        let held = |device: u64, expert: u64| {
            let of_expert = |name: &str| name.contains(&format!("experts.{expert}."));
            let mine = plan.tensors.iter().filter(|tensor| of_expert(&tensor.name));
            mine.filter(|tensor| plan.region(tensor, device).ranges().all(|range| !range.is_empty())).count()
        };
        assert_eq!([0, 1].map(|device| [0, 1, 2].map(|expert| held(device, expert))), [[3, 3, 0], [0, 0, 3]]);
    }
}

#[test]
fn sizes_of_mesh_axes_that_fit_are_proposed() {
    let with = |layout: &str, mesh: &str| {
        let (layout, mesh) = (repo::layout(layout), Mesh::parse(mesh).unwrap());
        let mut config = repo::llama_config(2);
        (config["intermediate_size"], config["vocab_size"]) = (json!(36), json!(40));
        build(&repo::llama_rows(2, W), &config, &ViewOptions { layout, mesh, ..ViewOptions::default() })
            .unwrap_err()
            .to_string()
    };
    // A file in the program is none that the user can open: no line of it is shown.
    assert_eq!(
        with("vllm", "tensor=2"),
        "layout vllm/llama: mesh axis tensor=2 does not fit the model's 3 key-value heads (one must divide the other): vLLM \
         refuses such ranks; sizes of tensor that fit: 1, 3, 6"
    );
    let error = with("maxtext", "tensor=5");
    let expected = "mesh axis tensor=5 does not divide 3 key-value heads, 6 heads, 16 hidden, 36 intermediate; sizes that \
                    divide all: 1\n";
    assert!(error.contains(expected), "{error}");
    assert!(error.contains("does not split evenly in 5 parts"), "{error}");
}

/// The spec of each tensor of a layer for two tensor-parallel devices, by its name in the layer, and the warnings.
fn tensor_parallel(
    model_type: &str,
    layout: Layout,
    modules: &[(&str, &[u64])],
) -> (BTreeMap<String, Value>, Vec<String>) {
    let mut rows: Vec<Row> = vec![row("model.embed_tokens.weight", W, &[16, 8]), row("model.norm.weight", W, &[8])];
    for layer in 0..2 {
        rows.extend(modules.iter().map(|(name, shape)| row(&format!("model.layers.{layer}.{name}"), W, shape)));
    }
    let config = json!({"model_type": model_type, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "hidden_size": 8, "moe_intermediate_size": 4});
    let (mesh, allow) = (Mesh::parse("tensor=2").unwrap(), Allow::All);
    let options =
        ViewOptions { mesh, layout, allow_missing: allow.clone(), allow_unmapped: allow, ..ViewOptions::default() };
    let plan = build(&rows, &config, &options).unwrap_or_else(|error| panic!("{error}"));
    let spec = |tensor: &ckfs::plan::PlannedTensor| plan.spec(tensor).to_json(tensor.view.shape().rank(), &plan.mesh);
    let prefix = if plan.layout == Layout::Hf { "model.layers.1." } else { "layers.1." };
    let of_layer =
        plan.tensors.iter().filter_map(|tensor| Some((tensor.name.strip_prefix(prefix)?.to_owned(), spec(tensor))));
    (of_layer.collect(), plan.warnings.clone())
}

#[test]
fn tensor_parallelism_cuts_blocks_as_a_whole() {
    let cut = |model_type: &str, modules: &[(&str, &[u64])]| {
        let (specs, warnings) = tensor_parallel(model_type, Layout::Hf, modules);
        let axis = |(name, _): &(&str, &[u64])| {
            let axes = specs[*name].as_array().unwrap().clone();
            axes.iter().position(|axis| !axis.is_null()).map_or("-".to_owned(), |axis| axis.to_string())
        };
        (modules.iter().map(axis).collect::<Vec<_>>().join(" "), warnings.join("\n"))
    };
    let glm4: &[(&str, &[u64])] = &[
        ("self_attn.q_proj.weight", &[8, 8]),
        ("self_attn.q_proj.bias", &[8]),
        ("self_attn.k_proj.weight", &[8, 8]),
        ("self_attn.v_proj.weight", &[8, 8]),
        ("self_attn.o_proj.weight", &[8, 8]),
        ("mlp.gate_up_proj.weight", &[24, 8]),
        ("mlp.down_proj.weight", &[8, 12]),
    ];
    // transformers' plan cuts the fused matrix too, and puts its output together.
    assert_eq!(cut("glm4", glm4), ("0 0 0 0 1 0 1".to_owned(), String::new()));
    // Of an unknown model nobody knows what is in it.
    let (axes, said) = cut("unheard_of", glm4);
    assert_eq!(axes, "0 0 0 0 1 - -");
    assert!(said.contains("model.layers.*.mlp (gate_up_proj holds several matrices in one)"), "{said}");
    let latent: &[(&str, &[u64])] = &[
        ("self_attn.q_a_proj.weight", &[4, 8]),
        ("self_attn.q_b_proj.weight", &[8, 4]),
        ("self_attn.kv_a_proj_with_mqa.weight", &[6, 8]),
        ("self_attn.kv_b_proj.weight", &[8, 4]),
        ("self_attn.o_proj.weight", &[8, 8]),
        ("self_attn.indexer.wq_b.weight", &[8, 4]),
    ];
    for model_type in ["glm_moe_dsa", "mistral4", "minicpm3", "deepseek_v3", "unheard_of"] {
        assert_eq!(cut(model_type, latent).0, "- 0 - 0 1 -", "{model_type}");
    }
    let phi: &[(&str, &[u64])] = &[
        ("self_attn.q_proj.weight", &[8, 8]),
        ("self_attn.k_proj.weight", &[8, 8]),
        ("self_attn.v_proj.weight", &[8, 8]),
        ("self_attn.dense.weight", &[8, 8]),
        ("self_attn.dense.bias", &[8]),
        ("mlp.fc1.weight", &[16, 8]),
        ("mlp.fc1.bias", &[16]),
        ("mlp.fc2.weight", &[8, 16]),
    ];
    assert_eq!(cut("phi", phi).0, "0 0 0 1 - 0 0 1");
    // Only one side of a block is there under a name that the plan knows.
    let vendor: &[(&str, &[u64])] = &[("self_attn.W_pack.weight", &[24, 8]), ("self_attn.o_proj.weight", &[8, 8])];
    assert_eq!(cut("llama", vendor).0, "- -");
    // Fused experts in the repository's own tensor: gate and up are one after the other.
    let fused: &[(&str, &[u64])] = &[
        ("mlp.experts.gate_up_proj", &[2, 8, 8]),
        ("mlp.experts.down_proj", &[2, 8, 4]),
        ("mlp.gate.weight", &[2, 8]),
    ];
    let (axes, said) = cut("qwen3_moe", fused);
    assert_eq!(axes, "- - -");
    assert!(said.contains("model.layers.*.mlp.experts (gate_up_proj holds several matrices in one)"), "{said}");
    // The releases of this model have single experts: a fused tensor is shown as these are, and each is cut by itself.
    let (specs, _) = tensor_parallel("qwen3_moe", Layout::Canonical, fused);
    let shown = |name: &str| specs[name].to_string();
    assert_eq!(shown("experts.1.w_gate"), r#"["tensor",null]"#);
    assert_eq!(shown("experts.1.w_up"), r#"["tensor",null]"#);
    assert_eq!(shown("experts.1.w_down"), r#"[null,"tensor"]"#);
    // The releases of these have fused ones, with the outputs first or the inputs.
    let turned: &[(&str, &[u64])] = &[
        ("mlp.experts.gate_up_proj", &[2, 8, 12]),
        ("mlp.experts.down_proj", &[2, 6, 8]),
        ("mlp.gate.weight", &[2, 8]),
    ];
    let [outputs_first, inputs_first] = [r#"[null,"tensor",null]"#, r#"[null,null,"tensor"]"#];
    for (modules, gate, down) in [(fused, outputs_first, inputs_first), (turned, inputs_first, outputs_first)] {
        let (specs, _) = tensor_parallel("qwen3_5_moe_text", Layout::Canonical, modules);
        let shown = |name: &str| specs[name].to_string();
        assert_eq!([shown("experts.w_gate"), shown("experts.w_up")], [gate, gate], "{modules:?}");
        assert_eq!(shown("experts.w_down"), down, "{modules:?}");
    }
}

/// The tensors of one quantized matrix of 64 x 128 and its companions, as each program writes them.
fn module(name: &str, scheme: &str) -> Vec<Row> {
    let rows: &[(&str, DType, &[u64])] = match scheme {
        "bitsandbytes" => &[
            ("weight", DType::U8, &[4096, 1]),
            ("weight.absmax", DType::F32, &[128]),
            ("weight.quant_map", DType::F32, &[16]),
            ("weight.quant_state.bitsandbytes__nf4", DType::U8, &[80]),
        ],
        "int8" => &[("weight", DType::I8, &[64, 128]), ("SCB", DType::F32, &[64]), ("weight_format", DType::U8, &[])],
        "nvfp4" => &[
            ("weight", DType::U8, &[64, 64]),
            ("weight_scale", DType::F8E4M3, &[64, 8]),
            ("weight_scale_2", DType::F32, &[]),
            ("input_scale", DType::F32, &[]),
        ],
        "gptq" => &[
            ("qweight", DType::I32, &[16, 64]),
            ("qzeros", DType::I32, &[4, 8]),
            ("scales", DType::F16, &[4, 64]),
            ("g_idx", DType::I32, &[128]),
            ("bias", DType::F16, &[64]),
        ],
        "awq" => {
            &[("qweight", DType::I32, &[128, 8]), ("qzeros", DType::I32, &[4, 8]), ("scales", DType::F16, &[4, 64])]
        }
        "pack-quantized" => &[
            ("weight_packed", DType::I32, &[64, 16]),
            ("weight_scale", W, &[64, 4]),
            ("weight_shape", DType::I32, &[2]),
        ],
        "mlx" => &[("weight", DType::U32, &[64, 16]), ("scales", W, &[64, 2]), ("biases", W, &[64, 2])],
        "block" => &[("weight", DType::F8E4M3, &[64, 128]), ("weight_scale_inv", DType::F32, &[2, 4])],
        "channel" => &[("weight", DType::F8E4M3, &[64, 128]), ("weight_scale", W, &[64, 1])],
        "tensor" => &[("weight", DType::F8E4M3, &[64, 128]), ("weight_scale", W, &[])],
        _ => panic!("{scheme}"),
    };
    rows.iter().map(|(word, dtype, extents)| row(&format!("{name}.{word}"), *dtype, extents)).collect()
}

fn quantized(scheme: &str) -> (Vec<Row>, Value) {
    let mut rows = vec![row("model.embed_tokens.weight", W, &[64, 128]), row("model.norm.weight", W, &[128])];
    for layer in 0..2 {
        for word in ["self_attn.q_proj", "mlp.down_proj"] {
            rows.extend(module(&format!("model.layers.{layer}.{word}"), scheme));
        }
    }
    let method = match scheme {
        "mlx" => return (rows, json!({"model_type": "stablelm", "quantization": {"group_size": 64, "bits": 4}})),
        "block" => json!({"quant_method": "fp8", "weight_block_size": [32, 32]}),
        "channel" | "tensor" => json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"g": {"weights": {"strategy": scheme, "num_bits": 8}}}}),
        "pack-quantized" => json!({"quant_method": "compressed-tensors", "format": scheme,
            "config_groups": {"g": {"weights": {"strategy": "group", "num_bits": 4, "group_size": 32}}}}),
        "nvfp4" => json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "int8" => json!({"quant_method": "bitsandbytes"}),
        other => json!({"quant_method": other}),
    };
    (rows, json!({"model_type": "stablelm", "quantization_config": method}))
}

/// Specs of split tensors, by name.
fn specs(plan: &Plan) -> BTreeMap<String, String> {
    let spec = |tensor| plan.spec(tensor).to_json(tensor.view.shape().rank(), &plan.mesh).to_string();
    let rows =
        plan.tensors.iter().filter(|tensor| plan.is_bundled(tensor)).map(|tensor| (tensor.name.clone(), spec(tensor)));
    rows.filter(|(_, spec)| spec.contains("tensor")).collect()
}

#[test]
fn packed_weights_stay_with_their_scales() {
    for scheme in ["bitsandbytes", "int8", "nvfp4", "gptq", "awq", "pack-quantized", "mlx"] {
        let (rows, config) = quantized(scheme);
        for layout in [Layout::Canonical, Layout::Hf] {
            let mesh = Mesh::parse("fsdp=2,tensor=2").unwrap();
            let plan =
                build(&rows, &config, &ViewOptions { mesh, layout: layout.clone(), ..ViewOptions::default() }).unwrap();
            let split: Vec<String> = specs(&plan).into_keys().collect();
            assert_eq!(split, [if layout == Layout::Hf { "model.embed_tokens.weight" } else { "embed" }], "{scheme}");
            let reported = plan.warnings.iter().find(|warning| warning.contains("are whole on every device"));
            let reported = reported.unwrap_or_else(|| panic!("{scheme}: {:?}", plan.warnings));
            assert!(reported.contains("model.layers.{0-1}.self_attn.q_proj"), "{reported}");
        }
        // Without tensor parallelism there is nothing to report; and the user's rules apply.
        let mesh = Mesh::parse("fsdp=2").unwrap();
        let plan = build(&rows, &config, &ViewOptions { mesh, ..ViewOptions::default() }).unwrap();
        assert_eq!(plan.warnings, [""; 0], "{scheme}");
    }
}

#[test]
fn unknown_families_split_matrices_by_their_words_and_fused_experts_not() {
    let rows = [
        row("model.layers.0.self_attn.q_proj.weight", W, &[8, 4]),
        row("model.layers.0.mlp.down_proj.weight", W, &[4, 8]),
        row("model.layers.0.mlp.experts.down_proj", W, &[2, 4, 8]),
    ];
    let mesh = Mesh::parse("tensor=2").unwrap();
    let plan =
        build(&rows, &json!({"model_type": "unknown"}), &ViewOptions { mesh, ..ViewOptions::default() }).unwrap();
    let expected = [
        ("layers.scanned.mlp.down_proj", r#"[null,null,"tensor"]"#),
        ("layers.scanned.self_attn.q_proj", r#"[null,"tensor",null]"#),
    ];
    assert_eq!(specs(&plan), expected.map(|(name, spec)| (name.to_owned(), spec.to_owned())).into());
}

#[test]
fn weights_of_eight_bits_are_split_where_their_scales_fit() {
    let rows: &[(&str, &str, Pairs)] = &[
        // Blocks of 32 x 32 in 64 x 128, rows in two parts and columns in two.
        (
            "block",
            "tensor=2",
            &[
                ("wq", r#"[null,"tensor",null]"#),
                ("wq_scale_inv", r#"[null,"tensor",null]"#),
                ("w_down", r#"[null,null,"tensor"]"#),
                ("w_down_scale_inv", r#"[null,null,"tensor"]"#),
            ],
        ),
        // Four parts of 16 rows would cut blocks.
        (
            "block",
            "tensor=4",
            &[("w_down", r#"[null,null,"tensor"]"#), ("w_down_scale_inv", r#"[null,null,"tensor"]"#)],
        ),
        (
            "channel",
            "tensor=4",
            &[
                ("wq", r#"[null,"tensor",null]"#),
                ("wq_scale", r#"[null,"tensor",null]"#),
                ("w_down", r#"[null,null,"tensor"]"#),
            ],
        ),
        ("tensor", "tensor=4", &[("wq", r#"[null,"tensor",null]"#), ("w_down", r#"[null,null,"tensor"]"#)]),
    ];
    for (scheme, mesh, expected) in rows {
        let (rows, config) = quantized(scheme);
        let plan =
            build(&rows, &config, &ViewOptions { mesh: Mesh::parse(mesh).unwrap(), ..ViewOptions::default() }).unwrap();
        let mut found = specs(&plan);
        found.remove("embed");
        let expected: BTreeMap<String, String> =
            expected.iter().map(|(name, spec)| (format!("layers.scanned.{name}"), (*spec).to_owned())).collect();
        assert_eq!(found, expected, "{scheme} {mesh}");
    }
    // Dequantized, each matrix is treated as any other.
    let (rows, config) = quantized("block");
    let options = ViewOptions { mesh: Mesh::parse("tensor=4").unwrap(), dtype: Some(W), ..ViewOptions::default() };
    let plan = build(&rows, &config, &options).unwrap();
    assert_eq!(specs(&plan)["layers.scanned.wq"], r#"[null,"tensor",null]"#);
    assert_eq!(plan.warnings, [""; 0]);
}

/// The table of gpt-oss splits its blocks and their scales alike. It says nothing about codes of another kind beside them.
#[test]
fn blocks_of_gpt_oss_are_split_and_other_codes_beside_them_are_whole() {
    let mut rows = vec![row("model.embed_tokens.weight", W, &[64, 128]), row("model.norm.weight", W, &[128])];
    for layer in 0..2 {
        rows.extend(module(&format!("model.layers.{layer}.self_attn.q_proj"), "int8"));
        for (word, out, groups) in [("gate_up_proj", 64, 4), ("down_proj", 128, 2)] {
            let stem = format!("model.layers.{layer}.mlp.experts.{word}");
            rows.push(row(&format!("{stem}_blocks"), DType::U8, &[4, out, groups, 16]));
            rows.push(row(&format!("{stem}_scales"), DType::U8, &[4, out, groups]));
        }
    }
    let config = json!({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}});
    let mesh = Mesh::parse("tensor=2").unwrap();
    let plan = build(&rows, &config, &ViewOptions { mesh, layout: Layout::Hf, ..ViewOptions::default() }).unwrap();
    let mut expected = BTreeMap::from([("model.embed_tokens.weight".to_owned(), r#"["tensor",null]"#.to_owned())]);
    for layer in 0..2 {
        for (name, spec) in [
            ("gate_up_proj_blocks", r#"[null,"tensor",null,null]"#),
            ("gate_up_proj_scales", r#"[null,"tensor",null]"#),
            ("down_proj_blocks", r#"[null,null,"tensor",null]"#),
            ("down_proj_scales", r#"[null,null,"tensor"]"#),
        ] {
            expected.insert(format!("model.layers.{layer}.mlp.experts.{name}"), spec.to_owned());
        }
    }
    assert_eq!(specs(&plan), expected);
    let reported: Vec<&String> =
        plan.warnings.iter().filter(|warning| warning.contains("are whole on every device")).collect();
    let [reported] = reported.as_slice() else { panic!("{:?}", plan.warnings) };
    assert!(reported.ends_with("not fit each other: model.layers.{0-1}.self_attn.q_proj"), "{reported}");
}

#[test]
fn mlx_weights_are_cast_by_decoding_them() {
    let (rows, config) = quantized("mlx");
    let plan = build(&rows, &config, &ViewOptions { dtype: Some(DType::F32), ..ViewOptions::default() }).unwrap();
    let matrix = plan.tensors.iter().find(|tensor| tensor.name == "layers.scanned.wq").unwrap();
    assert_eq!(matrix.view.dtype(), DType::F32);
    // The same words without packed weights are no quantization.
    let plain =
        build(&repo::llama_rows(2, W), &config, &ViewOptions { dtype: Some(DType::F32), ..ViewOptions::default() });
    plain.unwrap();
}

#[test]
fn tied_heads_follow_transformers_defaults() {
    let matrix = |name: &str| row(name, W, &[8, 4]);
    let cases = [
        ("gpt2", "transformer.wte.weight", "transformer.h.0.ln_1.weight"),
        ("gpt2", "wte.weight", "h.0.ln_1.weight"),
        ("falcon", "transformer.word_embeddings.weight", "transformer.h.0.ln_attn.weight"),
        ("t5", "shared.weight", "encoder.block.0.layer.0.layer_norm.weight"),
        ("opt", "model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight"),
        ("gemma2", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"),
    ];
    for (model_type, embedding, other) in cases {
        let rows = [matrix(embedding), row(other, W, &[4])];
        let with = |config: &Value, layout: &Layout| {
            let missing = Allow::All;
            let (layout, tied) = (layout.clone(), Tied::Alias);
            let plan =
                build(&rows, config, &ViewOptions { layout, tied, allow_missing: missing, ..ViewOptions::default() })
                    .unwrap();
            let heads = plan.tensors.iter().filter(|tensor| tensor.name.contains("lm_head"));
            heads.map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
        };
        let config = json!({"model_type": model_type});
        assert_eq!(with(&config, &Layout::Hf), ["lm_head.weight"], "{model_type}");
        assert_eq!(with(&config, &Layout::Canonical).len(), 1, "{model_type}");
        let none = json!({"model_type": model_type, "architectures": ["SomethingForSequenceClassification"]});
        assert_eq!(with(&none, &Layout::Hf), [""; 0], "{model_type}");
        let untied = json!({"model_type": model_type, "tie_word_embeddings": false});
        assert_eq!(with(&untied, &Layout::Hf).len(), usize::from(model_type == "t5"), "{model_type}");
    }
    let rows = [matrix("bert.embeddings.word_embeddings.weight")];
    let options = ViewOptions { tied: Tied::Alias, allow_missing: Allow::All, ..ViewOptions::default() };
    let plan = build(&rows, &json!({"model_type": "bert"}), &options).unwrap();
    assert!(!plan.tensors.iter().any(|tensor| tensor.name.contains("lm_head")));
    // A scale of its outputs is no head of its own.
    let rows = [matrix("model.embed_tokens.weight"), row("lm_head.logit_scale", W, &[8])];
    let options = ViewOptions { layout: Layout::Hf, ..options };
    let plan = build(&rows, &json!({"model_type": "dory", "tie_word_embeddings": true}), &options).unwrap();
    assert!(plan.tensors.iter().any(|tensor| tensor.name == "lm_head.weight"));
}

/// A Llama whose configuration is that of a published one; its tensors do not exist.
fn sized(layers: u64, width: u64, vocabulary: u64, scaled: bool) -> (Vec<Row>, Value) {
    let rows = vec![row("model.norm.weight", W, &[width])];
    let mut config = json!({"model_type": "llama", "vocab_size": vocabulary, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 4 * width});
    if scaled {
        config["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0});
    }
    (rows, config)
}

#[test]
fn maxtext_models_that_rotate_halves_are_refused_until_rope_is_set() {
    let rows = [
        (80, 8192, 128_256, true, Some("llama3.3-70b")),
        (32, 4096, 128_256, true, None),
        (32, 4096, 128_256, false, Some("llama3-8b")),
        (32, 4096, 32_000, false, Some("llama2-7b")),
        (40, 5120, 32_000, false, Some("llama2-13b")),
        (80, 8192, 32_000, false, Some("llama2-70b")),
        (126, 16_384, 128_256, false, Some("llama3-405b")),
        (16, 2048, 128_256, true, None),
    ];
    for (layers, width, vocabulary, scaled, expected) in rows {
        let (tensors, config) = sized(layers, width, vocabulary, scaled);
        let warned = |rope: Option<&str>| {
            let set = rope.map(|rope| ("rope".to_owned(), rope.to_owned())).into_iter().collect();
            let layout = repo::layout("maxtext");
            let options = ViewOptions {
                layout,
                set,
                allow_missing: Allow::All,
                allow_unmapped: Allow::All,
                ..ViewOptions::default()
            };
            build(&tensors, &config, &options).err().map(|error| error.to_string())
        };
        let found = warned(None);
        assert_eq!(found.is_some(), expected.is_some(), "{expected:?}: {found:?}");
        if let (Some(found), Some(expected)) = (found, expected) {
            assert!(found.contains(&format!("MaxText's model {expected} rotates halves")), "{found}");
            assert!(found.contains("--set rope=halves"), "{found}");
        }
        assert_eq!((warned(Some("halves")), warned(Some("interleaved"))), (None, None));
    }
}

#[test]
fn plans_state_which_trainers_read_only_their_own_chunks() {
    let (rows, config) = (repo::llama_rows(2, W), repo::llama_config(2));
    for (mesh, expected) in [
        ("fsdp=2,tensor=2", "orbax/ and dcp/ are cut for fsdp=2,tensor=2:"),
        ("fsdp=4,data=2", "orbax/ and dcp/ are cut for fsdp=4:"),
        ("fsdp=1", "a trainer that shards reads more than its own"),
        ("", "a trainer that shards reads more than its own"),
    ] {
        let text = text(&rows, &config, &ViewOptions { mesh: Mesh::parse(mesh).unwrap(), ..ViewOptions::default() });
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("chunks ")).collect();
        assert!(lines.len() == 1 && lines[0].contains(expected), "{mesh}: {lines:?}");
    }
}

#[test]
fn plans_list_omitted_tensors() {
    let mut rows = repo::llama_rows(3, W);
    rows.push(row("model.visual.blocks.0.attn.qkv.weight", W, &[4, 4]));
    rows.push(row("model.visual.blocks.1.attn.qkv.weight", W, &[4, 4]));
    rows.push(row("mtp.fc.weight", W, &[4, 4]));
    let subset = Subset { text_only: true, no_mtp: true, ..Subset::default() };
    let options = ViewOptions { subset, ..ViewOptions::default() };
    let text = text(&rows, &repo::llama_config(3), &options);
    for expected in ["left out    3 tensors of the repository:", " model.visual.* (2 tensors)\n", " mtp.* (1 tensor)\n"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let plan = build(&rows, &repo::llama_config(3), &options).unwrap();
    let names: BTreeSet<&str> = plan.left_out.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["model.visual.blocks.{0-1}.attn.qkv.weight", "mtp.fc.weight"].into());
}

#[test]
fn names_are_shown_escaped() {
    let odd = "model.layers.0.odd\u{1b}[2J\nname\u{202e}.weight";
    let mut rows = repo::llama_rows(1, W);
    rows.push(row(odd, W, &[4]));
    let text = text(&rows, &repo::llama_config(1), &ViewOptions::default());
    assert!(text.contains("odd\\u{1b}[2J\\nname\\u{202e}"), "{text}");
    assert!(!text.contains(['\u{1b}', '\u{202e}']));
    let even = ViewOptions { even: true, mesh: Mesh::parse("fsdp=3").unwrap(), ..ViewOptions::default() };
    let error = build(&rows, &repo::llama_config(1), &even).unwrap_err().to_string();
    assert!(error.contains("odd\\u{1b}[2J\\nname\\u{202e}") && !error.contains('\u{1b}'), "{error}");
}

/// Names of bundled tensors that a mesh splits, by layout.
fn split(rows: &[Row], model_type: &str, layout: &Layout, mesh: &str) -> (Vec<String>, Plan) {
    let options = ViewOptions { mesh: Mesh::parse(mesh).unwrap(), layout: layout.clone(), ..ViewOptions::default() };
    let plan = build(rows, &json!({"model_type": model_type}), &options).unwrap();
    let is_split = |tensor: &&_| plan.is_bundled(tensor) && !plan.spec(tensor).is_replicated();
    (plan.tensors.iter().filter(is_split).map(|tensor| tensor.name.clone()).collect(), plan)
}

/// FSDP2 splits parameters and leaves buffers as they are: each rank has all of them.
#[test]
fn buffers_are_whole_on_every_device_in_stacks_too() {
    let mut rows = vec![row("model.bn.running_mean", W, &[8]), row("model.scale", W, &[1]), row("model.zero", W, &[])];
    for layer in 0..2 {
        rows.push(row(&format!("model.layers.{layer}.mlp.gate.weight"), W, &[8, 4]));
        rows.push(row(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"), DType::F32, &[8]));
        rows.push(row(&format!("model.layers.{layer}.mlp.gain"), W, &[1]));
        rows.push(row(&format!("model.layers.{layer}.mlp.expert_bias"), W, &[8]));
    }
    let bias = "model.layers.{0-1}.mlp.gate.e_score_correction_bias";
    // In a model that nobody knows, single numbers are whole too. `afmoe` has a parameter of one of these names.
    for (model_type, numbers, buffers) in [
        ("dots1", false, vec![bias]),
        ("afmoe", false, vec![]),
        ("of nobody", true, vec!["model.layers.{0-1}.mlp.gain", bias, "model.scale", "model.zero"]),
    ] {
        for layout in [Layout::Canonical, Layout::Hf] {
            for mesh in ["fsdp=2", "fsdp=2,tensor=2", "dp_shard=4"] {
                let (names, plan) = split(&rows, model_type, &layout, mesh);
                let has = |word: &str| names.iter().any(|name| name.contains(word));
                assert!(has("gate.weight") || has("layers.scanned.mlp.gate"), "{model_type}: {names:?}");
                assert_eq!(has("e_score_correction_bias"), model_type == "afmoe", "{model_type}: {names:?}");
                assert_eq!((has("gain"), has("scale")), (!numbers, !numbers), "{model_type}: {names:?}");
                assert!(!has("running_mean") && !has("zero"), "{model_type}: {names:?}");
                let mut expected = buffers.clone();
                expected.insert(expected.partition_point(|name| *name < "model.bn"), "model.bn.running_mean");
                let told: Vec<&str> = plan.whole.names.iter().map(|group| group.name.as_str()).collect();
                assert_eq!(told, expected, "{model_type}");
            }
        }
    }
    // The user's rule wins, and without a mesh there is nothing to say.
    let pattern = Pattern::parse("*.e_score_correction_bias").unwrap();
    let rule = ShardRule { pattern, spec: vec![vec!["fsdp".to_owned()]] };
    let options = ViewOptions {
        mesh: Mesh::parse("fsdp=2").unwrap(),
        layout: Layout::Hf,
        shard_rules: vec![rule],
        ..ViewOptions::default()
    };
    let plan = build(&rows, &json!({"model_type": "dots1"}), &options).unwrap();
    let mut biases = plan.tensors.iter().filter(|tensor| tensor.name.ends_with("_bias"));
    assert!(biases.all(|tensor| !plan.spec(tensor).is_replicated()));
    assert!(plan.whole.names.iter().all(|group| !group.name.contains("e_score")));
    let plan = build(&rows, &json!({"model_type": "dots1"}), &ViewOptions::default()).unwrap();
    assert!(plan.whole.names.is_empty());
}
