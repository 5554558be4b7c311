//! The stage that puts codes in the place of weights.

use std::collections::HashMap;

use ckfs_config::{Dequantize, Quantize};
use ckfs_tensor::{TensorId, View};

use super::{
    super::{
        Draft, Family, Layout, PlanError, Problem,
        quantize::{Quantizer, WeightChoice, with_codes},
        values::Values,
    },
    stage::{Builder, ChosenLayout, Selection},
};

impl<'a> Builder<'a> {
    /// What quantizes weights, if that is requested.
    ///
    /// # Errors
    /// The layout shows no quantized weights.
    pub(super) fn quantizer(
        &self,
        wanted: &Selection<'_>,
        chosen: &ChosenLayout,
    ) -> Result<Option<Quantizer<'a>>, PlanError> {
        let options = self.options;
        let problem = |reason: String| PlanError::from(Problem::File { file: "quantize".to_owned(), reason });
        let Some(scheme) = options.quantize else {
            let unused = !options.quantize_ignore.is_empty() || !options.quantize_only.is_empty();
            let reason = "--quantize-ignore and --quantize-only have no effect without --quantize SCHEME";
            return if unused { Err(problem(reason.to_owned())) } else { Ok(None) };
        };
        if let Layout::Gguf | Layout::Embedded(_) | Layout::File(_) = &options.layout {
            let reason = options.layout.traits().not_quantized.as_deref();
            let reason = reason.unwrap_or(
                "its rules make floats of the shapes that its program trains or fuses, and no codes and scales; expected the layout \
                 canonical, hf or stored",
            );
            return Err(problem(format!("{} with --layout {}: {reason}", scheme.word(), options.layout.name())));
        }
        if options.lora.is_some() {
            return Err(problem(
                "--lora shows the names of a model in training, whose weights are floats: expected none".to_owned(),
            ));
        }
        let model_type = wanted.seen().config().and_then(|config| config.get("model_type")?.as_str());
        if matches!(scheme, Quantize::Mlx(..) | Quantize::MlxMxfp4) && model_type == Some("granite") {
            let reason =
                "mlx_lm gives some modules of granite 8 bits, and ckfs all the same: expected another model or scheme";
            return Err(problem(format!("{}: {reason}", scheme.word())));
        }
        let family = chosen.family.or_else(|| Family::of(wanted.seen()));
        let has_dtype = options.dtype.is_some() || matches!(options.dequantize, Some(Dequantize::To(_)));
        let has_powers_of_two = wanted.seen().dialect().quantization.has_powers_of_two;
        let choice = WeightChoice::of(options, family);
        Ok(choice.map(|choice| Quantizer::new(choice, has_dtype, has_powers_of_two)))
    }

    /// Puts codes in the place of weights.
    pub(super) fn quantize(
        &mut self,
        quantizer: &Quantizer<'_>,
        drafts: &mut [Draft],
        wanted: &Selection<'_>,
        values: &Values<'_>,
    ) {
        let checkpoint = wanted.seen();
        let by_name: HashMap<String, View> = match self.options.layout {
            // Drafts have the names of the repository, and may be made of anything.
            Layout::Hf | Layout::Stored => {
                drafts.iter().map(|draft| (draft.name.clone(), draft.view.clone())).collect()
            }
            Layout::Canonical | Layout::Gguf | Layout::Embedded(_) | Layout::File(_) => HashMap::new(),
        };
        let find = |name: &str| {
            by_name.get(name).cloned().or_else(|| {
                let id = checkpoint.find(name)?;
                values.view(id, values.dtype_of(id, &[name])).ok()
            })
        };
        let decoded: HashMap<TensorId, &str> =
            checkpoint.tensors().filter_map(|(_, info)| Some((info.quantized()?.operands[0], info.name))).collect();
        for draft in drafts {
            let own_name = by_name.contains_key(&draft.name).then(|| draft.name.clone());
            let codes = |leaf: &View| {
                let name = own_name.clone().or_else(|| {
                    let id = *leaf.source_ids().first()?;
                    Some(decoded.get(&id).copied().unwrap_or_else(|| checkpoint.tensor(id).name).to_owned())
                });
                name.map_or(Ok(None), |name| quantizer.codes(&name, leaf, &find))
            };
            let found = match &own_name {
                Some(_) => codes(&draft.view),
                None => with_codes(&draft.name, &draft.view, &codes),
            };
            match found {
                Ok(Some(view)) => draft.view = view,
                Ok(None) => {}
                Err(problem) => self.problems.push(problem),
            }
        }
        let stacked = quantizer.stacked_experts();
        if !stacked.is_empty() {
            let names: Vec<&str> = stacked.iter().map(|group| group.name.as_str()).collect();
            let scheme = self.options.quantize.map(Quantize::word).unwrap_or_default();
            let (reason, way) = if quantizer.is_mlx() {
                (
                    "which mlx_lm stacks under the name switch_mlp, and ckfs does not".to_owned(),
                    "a model without experts",
                )
            } else {
                (
                    format!(
                        "those of a layer in one tensor, for which engines read no form of {scheme}, but one matrix per expert"
                    ),
                    "fp8-block, which stores experts in one tensor, a repository with single experts",
                )
            };
            self.problem(
                "quantize",
                format!(
                    "{}: experts, {reason}: expected \
                     {way}, or --quantize-ignore with these names, which leaves them as they are",
                    names.join(", ")
                ),
            );
        } else if !quantizer.found_any() {
            let reason = quantizer.why_none(&self.options.quantize.map(Quantize::word).unwrap_or_default());
            self.problem("quantize", format!("no tensor is quantized: {reason}"));
        }
        let fused = quantizer.fused_experts();
        if !fused.is_empty() {
            let names: Vec<&str> = fused.iter().map(|group| group.name.as_str()).collect();
            self.plan.warnings.push(format!(
                "{}: experts of a layer in one tensor are codes with a tensor of scales beside it: transformers 5.24 reports the scales as \
                 unexpected and computes with wrong weights; load them with an engine, or leave them as they are with --quantize-ignore",
                names.join(", ")
            ));
        }
    }
}
