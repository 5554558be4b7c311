//! What a model's own code keeps in float32: a dtype for all floats spares it, and the plan says so.

use ckfs::{
    plan::{
        CastRule, Dequantize, Pattern, Plan, ViewOptions,
        report::{Report, ViewReport, view_text},
    },
    tensor::DType,
};
use serde_json::{Map, Value, json};

use super::{
    models,
    twice::{Opened, options},
};

const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

fn dtype_of(plan: &Plan, name: &str) -> DType {
    let found = plan.tensors.iter().find(|tensor| tensor.name == name);
    found.unwrap_or_else(|| panic!("no {name}")).view.dtype()
}

fn json_of(opened: &Opened, plan: &Plan) -> Value {
    let view = ViewReport { name: "", plan, more: Map::new() };
    serde_json::to_value(Report::new(&opened.checkpoint, vec![view], Map::new())).unwrap()["views"][0].clone()
}

#[test]
fn the_bias_of_the_router_stays_as_it_is_stored() {
    for model_type in ["deepseek_v3", "kimi_k2", "glm4_moe"] {
        let twice = models::kimi(model_type);
        for opened in [twice.open_stored(), twice.open_decoded()] {
            for dtype in [DType::BF16, DType::F16] {
                for (layout, bias, other) in [
                    ("hf", BIAS, "model.layers.1.self_attn.o_proj.weight"),
                    ("canonical", "layers.1.router_bias", "layers.1.wo"),
                    ("canonical", "layers.scanned.router_bias", "layers.scanned.wo"),
                ] {
                    let plan = opened.plan(&ViewOptions { dtype: Some(dtype), ..options(layout, "") });
                    assert_eq!((dtype_of(&plan, bias), dtype_of(&plan, other)), (DType::F32, dtype), "{layout}");
                    let group = |name: &str| json!({"name": format!("model.layers.{{1-2}}.mlp.gate.{name}"), "count": 2, "nearest": null});
                    // The router's matrix is stored in bf16: only for f16 is there something to spare.
                    let (count, mut group) = (
                        if dtype == DType::F16 { 4 } else { 2 },
                        vec![group("e_score_correction_bias"), group("weight")],
                    );
                    group.truncate(count / 2);
                    let group = Value::from(group);
                    let told = json_of(&opened, &plan);
                    assert_eq!((&told["kept_f32"], &told["hf_kept_f32"]), (&group, &group));
                    let text = view_text(&opened.checkpoint, &plan);
                    let line = format!(
                        "kept        {count} tensors as stored, float32 in the model's own code: \
                         model.layers.{{1-2}}.mlp.gate.e_score_correction_bias"
                    );
                    assert_eq!(text.matches(&line).count(), 1, "{text}");
                }
            }
        }
    }
}

/// Its bytes are those of the repository, in files of one tensor and in `hf/` alike.
#[test]
fn its_bytes_are_the_stored_ones() {
    let opened = models::kimi("deepseek_v3").open_stored();
    let with = |dtype| opened.files(&ViewOptions { dtype, ..options("hf", "") })[&format!("full/{BIAS}")].clone();
    assert_eq!(with(Some(DType::BF16)), with(None));
    let plan = opened.plan(&ViewOptions { dtype: Some(DType::BF16), ..options("hf", "") });
    let mut found = 0;
    for file in &plan.hf {
        let ckfs::plan::HfContent::Weights { tensors, .. } = &file.content else { continue };
        for (name, view) in tensors {
            let is_bias = name.ends_with("e_score_correction_bias");
            assert_eq!(view.dtype(), if is_bias { DType::F32 } else { DType::BF16 }, "{name}");
            found += usize::from(is_bias);
        }
    }
    assert_eq!(found, 2);
}

#[test]
fn a_rule_wins_and_wide_floats_lose_nothing() {
    let opened = models::kimi("deepseek_v3").open_stored();
    let rule = |pattern: &str, dtype| CastRule { pattern: Pattern::parse(pattern).unwrap(), dtype };
    for pattern in ["*.e_score_correction_bias", "layers.scanned.router_bias", "layers.?.router_bias"] {
        let casts = vec![rule(pattern, Some(DType::F16))];
        let plan = opened.plan(&ViewOptions { dtype: Some(DType::BF16), casts, ..options("canonical", "") });
        assert_eq!(dtype_of(&plan, "layers.1.router_bias"), DType::F16, "{pattern}");
        assert_eq!(dtype_of(&plan, "layers.scanned.router_bias"), DType::F16, "{pattern}");
        assert!(plan.kept.is_empty(), "{pattern}");
    }
    for options in [
        ViewOptions { dtype: Some(DType::F32), ..options("canonical", "") },
        // No wish for all floats, so nothing is spared.
        ViewOptions { dequantize: Some(Dequantize::To(DType::BF16)), ..options("canonical", "") },
        options("canonical", ""),
    ] {
        let plan = opened.plan(&options);
        assert_eq!(dtype_of(&plan, "layers.1.router_bias"), DType::F32);
        assert!(plan.kept.is_empty() && plan.kept_hf.is_empty());
        assert!(!view_text(&opened.checkpoint, &plan).contains("\nkept "));
    }
}

/// MaxText's converter casts the bias with all else. The repository beside it is not MaxText's.
#[test]
fn layouts_of_maxtext_cast_all() {
    let opened = models::kimi("deepseek_v3").open_stored();
    let bias = "params.MoEBiasVar.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias";
    let bias = |plan: &Plan| {
        let found =
            plan.tensors.iter().find(|tensor| bias.ends_with(&tensor.name) || tensor.name.ends_with("gate.bias"));
        found.unwrap().view.dtype()
    };
    for (dtype, told, hf) in
        [(None, DType::BF16, 0), (Some(DType::BF16), DType::BF16, 2), (Some(DType::F16), DType::F16, 4)]
    {
        let plan = opened.plan(&ViewOptions { dtype, ..options("maxtext", "") });
        assert_eq!(bias(&plan), told);
        assert!(plan.kept.is_empty());
        assert_eq!(plan.kept_hf.iter().map(|group| group.count).sum::<u64>(), hf);
        let text = view_text(&opened.checkpoint, &plan);
        assert_eq!(text.contains(&format!("kept        in hf/ {hf} tensors as stored")), hf > 0, "{text}");
    }
}
