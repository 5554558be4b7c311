//! The stage that makes the files of `hf/`.

use std::collections::BTreeSet;

use ckfs_checkpoint::{Checkpoint, Container, FileRole};

use super::{
    super::{
        Draft, HfContent, HfFile, Layout, NameGroup, PlanError, Problem, Tied, generated, hf, quantize::Quantizer,
        values::Values,
    },
    request::{asked, decoded, decodes},
    stage::{Builder, ChosenLayout, Selection, groups_of},
};

/// The files of `hf/`.
#[derive(Default)]
pub(super) struct HfFiles {
    pub(super) files: Vec<HfFile>,
    pub(super) kept: Vec<NameGroup>,
    /// The reason why there is none.
    pub(super) absent: Option<String>,
}

impl Builder<'_> {
    /// The files of `hf/`. What a layout does by itself to its own tensors is no request for another `hf/`: `is_alike` tells
    /// whether what is wanted has the same tensors decoded.
    pub(super) fn repository(
        &mut self,
        wanted: &Selection<'_>,
        chosen: &ChosenLayout,
        is_alike: bool,
    ) -> Result<HfFiles, PlanError> {
        if self.options.layout == Layout::Stored {
            // hf/ is a repository, which a trainer's checkpoint is not.
            return Ok(HfFiles::default());
        }
        if let Some(reason) = &wanted.selected.no_hf {
            return Ok(self.no_repository(reason, self.original.is_repository()));
        }
        let (original, options, model) = (self.original, self.options, &chosen.model);
        // hf/ may have other names than the layout.
        let quantizer = self.quantizer(wanted, chosen)?;
        let plan = |wanted: &Selection<'_>| {
            let part = wanted.part();
            let values = Values::new(part, asked(options), &options.casts, Some(model));
            let (renames, tie, text) = (&options.renames, options.tied == Tied::Alias, wanted.selected.text.as_ref());
            let names = hf::HfNames { renames, tie, text };
            let files = match original.container() {
                Container::Gguf | Container::Ranks => {
                    // Its tensors are spread over files.
                    let tensors = hf::tensors(original, &values, names, quantizer.as_ref());
                    let of = (None, names.text);
                    tensors.and_then(|tensors| {
                        generated::files(part, tensors, of, options.shard_bytes_max, quantizer.as_ref())
                    })
                }
                Container::Safetensors | Container::Torch | Container::Dcp | Container::Orbax => {
                    hf::plan(original, &values, names, quantizer.as_ref())
                }
            };
            (files, groups_of(part, values.kept()), values.raw())
        };
        let mut raw = BTreeSet::new();
        if is_alike {
            let (files, kept, more) = plan(wanted);
            if more.is_empty() {
                return Ok(self.planned(files, kept, wanted.part()));
            }
            raw = more;
        }
        loop {
            let decoded = decoded(original, options, decodes(options, asked(options)), &raw)?;
            let wanted = self.select(decoded.as_ref().unwrap_or(original))?;
            // What a layout decodes for itself may be raw here.
            if let Some(reason) = &wanted.selected.no_hf {
                return Ok(self.no_repository(reason, self.original.is_repository()));
            }
            let (files, kept, more) = plan(&wanted);
            if more.is_empty() {
                return Ok(self.planned(files, kept, wanted.part()));
            }
            raw.extend(more);
        }
    }

    /// The files of a generated `hf/`: the tensors shown, where the source is no repository.
    pub(super) fn generated(
        &mut self,
        drafts: &[Draft],
        wanted: &Selection<'_>,
        chosen: &ChosenLayout,
        quantizer: Option<&Quantizer<'_>>,
    ) -> Option<HfFiles> {
        let (checkpoint, options) = (wanted.seen(), self.options);
        let is_own = options.layout == Layout::Hf && checkpoint.companion().is_some();
        if chosen.inverse.is_none() && !is_own {
            return None;
        }
        let inverse = chosen.inverse.as_ref();
        let text = wanted.selected.text.as_ref().filter(|_| inverse.is_none());
        if let (Some(reason), None) = (&wanted.selected.no_text, inverse) {
            return Some(self.no_repository(reason, true));
        }
        let name = |name: &String| text.map_or_else(|| name.clone(), |text| text.name(name));
        let tensor = |draft: &Draft| (name(&draft.name), draft.view.clone());
        let tensors = drafts.iter().map(tensor).collect();
        let own = inverse.map(|inverted| (&inverted.config, inverted.is_text));
        let files = generated::files(checkpoint, tensors, (own, text), options.shard_bytes_max, quantizer);
        let kept = inverse.map_or_else(Vec::new, |inverted| inverted.kept.clone());
        Some(HfFiles { files: self.or_default(files), kept, absent: None })
    }

    /// The files of `hf/` of this part of the repository, and the remarks about them.
    fn planned(
        &mut self,
        files: Result<Vec<HfFile>, Vec<Problem>>,
        kept: Vec<NameGroup>,
        part: &Checkpoint,
    ) -> HfFiles {
        let decoded = part.tensors().filter(|(_, info)| info.quantized().is_some()).count();
        let raw = if decoded == 0 { 0 } else { part.raw().count() };
        if raw > 0 {
            self.plan.warnings.push(format!(
                "hf/ has {raw} quantized tensors as stored beside {decoded} decoded ones: its config.json still says how the \
                 repository is quantized, which holds for the former only"
            ));
        }
        if let Some(method) = &part.quantized().stale {
            self.plan.warnings.push(format!(
                "hf/ says nothing of the quantization {method} that the repository's configuration tells of: its weights are stored plain"
            ));
        }
        let files = self.or_default(files);
        self.plan.warnings.extend(self.others_kept(&files));
        HfFiles { files, kept, absent: None }
    }

    /// Says of models in subdirectories that they stay as they are, where `hf/` has others weights than the repository.
    fn others_kept(&self, files: &[HfFile]) -> Option<String> {
        let role = |file: &HfFile| {
            let HfContent::Original(id) = file.content else { return None };
            self.original.files().iter().find(|known| known.file == Some(id)).map(|known| &known.role)
        };
        let is_model = |file: &&HfFile| {
            file.path.contains('/') && file.path.ends_with(".safetensors") && role(file) == Some(&FileRole::Other)
        };
        let mut models = files.iter().filter(is_model);
        let first =
            models.next().filter(|_| files.iter().any(|file| matches!(file.content, HfContent::Weights { .. })))?;
        let more = models.count();
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        Some(format!(
            "hf/ has {}{more} as stored: weights in subdirectories are other models, which nothing here changes",
            first.path
        ))
    }

    /// No `hf/`, for this reason. Nobody expects a repository of what is none.
    fn no_repository(&mut self, reason: &str, is_expected: bool) -> HfFiles {
        if is_expected {
            self.plan.warnings.push(format!("hf/ is left out: {reason}"));
        }
        HfFiles { absent: Some(reason.to_owned()), ..HfFiles::default() }
    }
}
