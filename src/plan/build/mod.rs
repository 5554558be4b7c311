//! Building a plan, in stages. Each makes one value from those of the stages before it:
//!
//! | stage | value |
//! | --- | --- |
//! | `select` | [`Selection`]: the selected tensors of the repository, and those of an adapter |
//! | `choose` | [`ChosenLayout`]: the layout's file, the dtype, the family |
//! | `draft` | a view for each tensor that the layout makes, and the layout's findings in the plan |
//! | `name` | the drafts that the mount shows, under their names in the mount |
//! | `split` | [`LogicalRules`], if specs come from logical axes |
//! | `repository` | the files of `hf/`, while the plan is assembled |
//! | `assemble` | the tensors of the [`Plan`], each with its spec |
//! | `finish` | the files of `hf/` in it, and the warnings |
//!
//! [`Selection`] and [`ChosenLayout`] are in `stage`, with the first stage; `request` says what is to be decoded.
//!
//! The stages collect problems on the way, so that all are reported together. If a later stage needs the value of a
//! failed stage, the plan ends at that stage.

mod quantize;
mod repository;
mod request;
mod stage;

use std::collections::{BTreeMap, BTreeSet};

use ckfs_checkpoint::{Checkpoint, Container, Storage, TensorInfo};
use ckfs_config::{MergedLora, ModelPart};
use ckfs_tensor::{TensorId, View};
use hashbrown::HashSet;

use self::{
    repository::HfFiles,
    request::{asked, decoded, decodes, layout_request, with_dtype_of},
    stage::{Builder, ChosenLayout, Selection, groups_of},
};
use super::{
    DecodedScheme, Draft, Family, Layout, LayoutFile, LogicalRules, MergedAdapter, NameGroup, Pattern, Plan, PlanError,
    Problem, Sharding, Tied, ViewOptions, Whole, canonical,
    draft::Roles,
    embedded::FAMILY,
    expect::{self, Findings},
    experts::{self, orientation::PARAMETER},
    gguf, hf,
    inverse::{self, Inverted},
    library::Model,
    lora, merge, modules,
    name_group::fold,
    names, naming, narrow, packed,
    parsed::ParsedNames,
    peft, rename, select, shard, stored,
    survey::{devices, missing_layers, no_layers},
    unused,
    values::{self, Raw, ValueRequest, Values},
    whole, widths,
};

impl Plan {
    /// Resolves the user's request against a checkpoint.
    ///
    /// # Errors
    /// Everything wrong with the plan, at once.
    pub fn build(checkpoint: &Checkpoint, options: &ViewOptions) -> Result<Self, PlanError> {
        let mut chosen = options.for_checkpoint(checkpoint);
        let mut warnings = Vec::new();
        let merged = merge::merged(checkpoint, &chosen, &mut warnings)?;
        if merged.is_some() && chosen.merge_lora == Some(MergedLora::Own) {
            // The base has the names of its model already.
            chosen.to_mut().subset.source_renames.clear();
        }
        let mut plan = build(merged.as_ref().unwrap_or(checkpoint), &chosen)?;
        plan.warnings.append(&mut warnings);
        plan.merged = merged.as_ref().and_then(|merged| merged_adapter(merged, &chosen, &plan));
        let remarks = remarks(checkpoint, options, &plan);
        plan.warnings.extend(remarks);
        if plan.quantized.is_none() {
            plan.warnings.extend(narrow::warning(checkpoint, &plan.tensors));
        }
        for (rename, before, after) in [
            (options.unwrapping(checkpoint), "names are shown without what wraps the model, which matches", ""),
            (
                options.respelling(checkpoint),
                "the layers whose names match",
                " are shown under the names of the model's releases",
            ),
        ] {
            let warning =
                rename.map(|rename| format!("{before} '{}'{after}: --source-rename replaces this", rename.pattern()));
            plan.warnings.extend(warning);
        }
        Ok(plan)
    }
}

/// The merged adapter, and how many of the tensors that a plan shows it changes.
fn merged_adapter(merged: &Checkpoint, options: &ViewOptions, plan: &Plan) -> Option<MergedAdapter> {
    let used: HashSet<TensorId> = plan.tensors.iter().flat_map(|tensor| tensor.view.stored_ids()).collect();
    let tensors = merged.merges()?.count_of(&used) as u64;
    Some(MergedAdapter { adapter: options.merge_lora.as_ref()?.path().to_owned(), tensors })
}

/// What is requested and changes nothing of this checkpoint: a mistake, or a flag of another model. And what is not as before where
/// codes are kept, or is not for all programs.
fn remarks(checkpoint: &Checkpoint, options: &ViewOptions, plan: &Plan) -> Vec<String> {
    let (subset, dialect) = (&options.subset, checkpoint.dialect());
    let is_text = subset.part == Some(ModelPart::Text);
    let has_tower = || checkpoint.tensors().any(|(_, info)| naming::is_tower(info.name));
    let has_predictor = || {
        dialect.mtp_named
            || !dialect.mtp_layers.is_empty()
            || checkpoint.tensors().any(|(_, info)| select::is_predictor(info.name))
    };
    let selects = subset.layers.is_some() || !subset.include.is_empty() || !subset.exclude.is_empty();
    let rows = [
        (
            options.dequantize.is_some() && dialect.quantization.is_none(),
            "--dequantize changes nothing: no tensor of this source is quantized",
        ),
        (
            !is_text && subset.no_mtp && !has_predictor(),
            "--no-mtp changes nothing: there are no layers of multi-token prediction",
        ),
        (
            !is_text && subset.text_only && dialect.text_config.is_none() && !has_tower(),
            "--text-only changes nothing: the model has text alone",
        ),
        (subset.renumber && !selects, "--renumber changes nothing: --layers leaves none out"),
        (
            checkpoint.fill().next().is_some() && !is_filled(checkpoint, plan),
            "nothing is taken from --fill-from: it gives what a training program's checkpoint lacks, with --layout hf",
        ),
        (
            options.requantize.is_some()
                && checkpoint.quantized().tensors.iter().any(|tensor| tensor.scheme == "nvfp4"),
            "requantize: the factors of NVFP4 are reciprocals, rounded to f32: decoded weights may differ in the last bit",
        ),
        (
            options.requantize.is_some() && plan.tensors.iter().any(|tensor| tensor.name.ends_with("weight_g_idx")),
            "requantize: weight_g_idx and actorder group are read by compressed-tensors up to 0.18; later versions refuse them",
        ),
    ];
    let renames =
        rename::idle("source_rename", &subset.source_renames, || checkpoint.tensors().map(|(_, info)| info.name));
    rows.into_iter().filter(|(is_so, _)| *is_so).map(|(_, text)| text.to_owned()).chain(renames).collect()
}

/// Whether any tensor is made from the repository that fills what the checkpoint lacks.
fn is_filled(checkpoint: &Checkpoint, plan: &Plan) -> bool {
    let filling: HashSet<TensorId> = checkpoint.fill().map(|(id, _)| id).collect();
    plan.tensors.iter().any(|tensor| tensor.view.stored_ids().iter().any(|id| filling.contains(id)))
}

/// Resolves the user's request against a checkpoint.
///
/// # Errors
/// Everything wrong with the plan, at once.
fn build(original: &Checkpoint, options: &ViewOptions) -> Result<Plan, PlanError> {
    let mut raw = BTreeSet::new();
    // Rules may match names in the mount, and these names are known only after drafting. Each further round keeps more
    // tensors raw than the one before.
    loop {
        let mut builder = Builder { original, options, problems: Vec::new(), plan: Plan::default() };
        let decoded = decoded(original, options, decodes(options, layout_request(options)), &raw)?;
        let wanted = builder.select(decoded.as_ref().unwrap_or(original))?;
        peft::check_unmerged(original, wanted.part(), options)?;
        let chosen = builder.choose(&wanted)?;
        // A layout of the user's file has no configuration: what that says of all weights would be lost.
        let (converts, loses) =
            (values::converts(chosen.request, &options.casts), matches!(options.layout, Layout::File(_)));
        if converts || loses {
            let mut problems = values::unsupported(original, wanted.part());
            problems.retain(|problem| converts || matches!(problem, Problem::Quantization { tensors: 0, .. }));
            if !problems.is_empty() {
                return Err(PlanError { problems });
            }
        }
        let values = builder.values(&wanted, &chosen);
        let mut drafts = builder.draft(&wanted, &chosen, &values);
        let quantizer = builder.quantizer(&wanted, &chosen)?;
        if !values.raw().is_empty() {
            raw.extend(values.raw());
            continue;
        }
        builder.plan.kept = match &chosen.inverse {
            Some(inverted) => inverted.kept.clone(),
            None => groups_of(wanted.seen(), values.kept()),
        };
        let is_decoded = |shown: &&Checkpoint| !shown.is_recoded();
        builder.plan.dropped =
            decoded.as_ref().filter(is_decoded).map_or_else(Vec::new, |decoded| dropped(original, decoded));
        builder.plan.decoded_config = hf::decoded_config(&values);
        let meant = names::meant(original, &drafts, &wanted.selected);
        if !meant.is_empty() {
            return built_as_meant(original, options, &meant);
        }
        if let Some(quantizer) = &quantizer {
            builder.quantize(quantizer, &mut drafts, &wanted, &values);
        }
        builder.report_own_head(&wanted, &mut drafts);
        let mut drafts = builder.name(drafts, &wanted, &chosen);
        let rules = builder.split(&drafts, &wanted, &chosen);
        builder.keep(&mut drafts, rules.is_some(), &wanted, &chosen);
        if let Some(quantizer) = &quantizer {
            drafts = quantizer.expand(drafts, &mut builder.problems);
            builder.plan.quantized = Some(quantizer.chosen());
        }
        let is_alike =
            raw.is_empty() && (options.requantize.is_some() || decodes(options, asked(options)) == decoded.is_some());
        if let Some(hf) = builder.generated(&drafts, &wanted, &chosen, quantizer.as_ref()) {
            builder.assemble(&wanted, &chosen, drafts, rules);
            return builder.finish(hf, &wanted);
        }
        // The files of a repository do not depend on the drafts: both are made at the same time.
        let mut beside = Builder { original, options, problems: Vec::new(), plan: Plan::default() };
        let (hf, ()) = rayon::join(
            || beside.repository(&wanted, &chosen, is_alike),
            || builder.assemble(&wanted, &chosen, drafts, rules),
        );
        builder.problems.append(&mut beside.problems);
        builder.plan.warnings.append(&mut beside.plan.warnings);
        return builder.finish(hf?, &wanted);
    }
}

/// The plan with other patterns in the place of those that match nothing.
fn built_as_meant(
    original: &Checkpoint,
    options: &ViewOptions,
    meant: &[(Pattern, Pattern)],
) -> Result<Plan, PlanError> {
    let mut options = options.clone();
    let subset = &mut options.subset;
    for pattern in subset.include.iter_mut().chain(&mut subset.exclude) {
        if let Some((_, inner)) = meant.iter().find(|(given, _)| given == pattern) {
            *pattern = inner.clone();
        }
    }
    let mut plan = build(original, &options)?;
    let taken = |(given, inner): &(Pattern, Pattern)| {
        format!("the pattern {:?} matches no tensor, and is taken for {:?}", given.text(), inner.text())
    };
    plan.warnings.extend(meant.iter().map(taken));
    Ok(plan)
}

/// What decoding leaves out that no decoder reads.
fn dropped(original: &Checkpoint, decoded: &Checkpoint) -> Vec<NameGroup> {
    let shown: HashSet<TensorId> = decoded.tensors().map(|(id, _)| id).collect();
    let is_gone = |id: &TensorId| !shown.contains(id);
    groups_of(original, original.quantized().left_out.iter().copied().filter(is_gone))
}

/// The problem of a layout for repositories that is requested on a checkpoint of the layout `stored`.
fn already_laid_out(layout: &str, stored: &str) -> Problem {
    let reason = format!(
        "it is made from a repository, and the names of the checkpoint are those of the layout {stored}: without --layout it is shown \
         as it is stored, for any mesh; --layout hf with --config-from makes a repository, which ckfs export writes and every layout takes"
    );
    Problem::File { file: format!("layout {layout}"), reason }
}

impl<'a> Builder<'a> {
    fn choose(&self, wanted: &Selection<'_>) -> Result<ChosenLayout, PlanError> {
        let options = self.options;
        let mut set = options.set.clone();
        // It is about the repository, and not about the layout.
        set.remove(PARAMETER);
        let (file, modules) = match &options.layout {
            Layout::Canonical | Layout::Gguf | Layout::Hf | Layout::Stored => (None, None),
            Layout::Embedded(embedded) => {
                if let Some(stored) = inverse::layout_of(wanted.seen()) {
                    return Err(already_laid_out(&embedded.name, stored).into());
                }
                let by_modules = embedded.traits.by_modules && !set.contains_key(FAMILY);
                if by_modules && (modules::is_of_parts(wanted.seen()) || embedded.file_of(wanted.seen()).is_none()) {
                    (None, Some(modules::names(wanted.seen())?))
                } else {
                    (Some(embedded.choose(wanted.seen(), &mut set)?), None)
                }
            }
            Layout::File(file) => (Some(file.clone()), None),
        };
        let request = layout_request(options);
        let request = file.as_ref().map_or(request, |file| with_dtype_of(request, file, options));
        let flat = file.as_ref().is_some_and(|file| file.flat)
            || modules.is_some()
            || matches!(options.layout, Layout::Gguf | Layout::Hf);
        // A trainer's names are in no table.
        let family = if options.layout == Layout::Stored { None } else { Family::of(wanted.seen()) };
        let is_back = options.layout == Layout::Hf && options.lora.is_none();
        let model = Model::of(wanted.seen().config(), options.layout == Layout::Stored);
        let inverse = if is_back { inverse::invert(wanted.part(), options, &model)? } else { None };
        Ok(ChosenLayout { file, modules, set, request, family, model, flat, inverse })
    }

    fn draft(&mut self, wanted: &Selection<'_>, chosen: &ChosenLayout, values: &Values<'_>) -> Vec<Draft> {
        self.plan.left_out = wanted.selected.left_out(wanted.original);
        let drafts = match (&chosen.file, &chosen.inverse) {
            (Some(file), _) => self.draft_by_rules(file, wanted, chosen, values),
            (None, Some(inverted)) => self.draft_back(inverted, wanted, chosen),
            (None, None) if chosen.modules.is_some() => self.draft_by_modules(wanted, chosen, values),
            (None, None) if self.options.layout == Layout::Stored => self.draft_as_stored(wanted, values),
            (None, None) if self.options.layout == Layout::Gguf => self.draft_as_gguf(wanted, chosen, values),
            (None, None) => self.draft_by_tables(wanted, chosen, values),
        };
        // What a torch checkpoint leaves out is no tensor, for the most part; the source's lines list it.
        if self.original.container() == Container::Orbax {
            self.plan
                .left_out
                .extend(fold(self.original.opened.contents.left_out.iter().map(|left| left.name.as_str()), &[]));
        }
        drafts
    }

    /// The values that the layout's drafts have.
    fn values<'b>(&self, wanted: &'b Selection<'_>, chosen: &'b ChosenLayout) -> Values<'b>
    where
        'a: 'b,
    {
        let (options, traits) = (self.options, self.options.layout.traits());
        // A layout's own dtype is its author's word; only the user's is for all floats of whatever model.
        let keeps_f32 = !traits.casts_f32 && options.dtype.is_some() && !stored::is_maxtext(wanted.seen());
        let keep_f32 = (keeps_f32 || traits.is_loaded).then_some(&chosen.model);
        let mut values = Values::new(wanted.seen(), chosen.request, &options.casts, keep_f32);
        values.as_loaded = traits.is_loaded;
        values
    }

    /// Drafts by a layout of rules.
    fn draft_by_rules(
        &mut self,
        file: &LayoutFile,
        wanted: &Selection<'_>,
        chosen: &ChosenLayout,
        values: &Values<'_>,
    ) -> Vec<Draft> {
        let options = self.options;
        let allowed = [&options.allow_missing, &options.allow_unmapped];
        self.plan.family = Some(file.name.clone());
        let stored = matches!(options.layout, Layout::File(_)).then(|| wanted.part());
        let resolved = match file.resolve((wanted.seen(), stored), values, &options.mesh, &chosen.set, allowed) {
            Ok(resolved) => resolved,
            Err(problems) => {
                let is_own = matches!(options.layout, Layout::File(_));
                let explained = |problems| widths::explained(&file.name, wanted.seen(), problems);
                self.problems.extend(if is_own { problems } else { explained(problems) });
                return Vec::new();
            }
        };
        self.plan.warnings.extend(resolved.warnings);
        self.plan.params = resolved.params;
        self.plan.left_out.extend(resolved.left_out);
        resolved.drafts
    }

    /// Drafts of the repository that the checkpoint is made back to.
    fn draft_back(&mut self, inverted: &Inverted, wanted: &Selection<'_>, chosen: &ChosenLayout) -> Vec<Draft> {
        self.plan.warnings.extend(inverted.warnings.iter().cloned());
        self.plan.family = Some(inverted.layout.clone());
        self.plan.params.clone_from(&inverted.params);
        self.plan.left_out.extend_from_slice(&inverted.left_out);
        let tensors = inverted.tensors.iter().map(|(name, view)| (name.clone(), Ok(view.clone()))).collect();
        let mesh = (None, &self.options.mesh);
        let drafts = canonical::drafts_of((wanted.seen(), None), chosen.family, tensors, mesh);
        self.tabled(drafts)
    }

    /// Drafts of the tensors as they are stored.
    fn draft_as_stored(&mut self, wanted: &Selection<'_>, values: &Values<'_>) -> Vec<Draft> {
        self.plan.family = stored::is_maxtext(wanted.seen()).then(|| "maxtext".to_owned());
        self.plan
            .params
            .extend(self.original.opened.contents.scan_layers.map(|scan| ("scan".to_owned(), scan.to_string())));
        self.or_default(stored::drafts(wanted.seen(), values))
    }

    /// Drafts of the tensors of a file of llama.cpp.
    fn draft_as_gguf(&mut self, wanted: &Selection<'_>, chosen: &ChosenLayout, values: &Values<'_>) -> Vec<Draft> {
        let options = self.options;
        let is_cast = options.dtype.is_some() || !options.casts.is_empty() || options.dequantize.is_some();
        let renames = !options.renames.is_empty() || options.tied != Tied::Auto;
        for (is_asked, reason) in [
            (is_cast, "its file has types of its own: expected --gguf-type, and no --dtype, --dequantize or [[cast]]"),
            (renames, "its names are llama.cpp's: expected no --rename, --add-prefix, --strip-prefix or --tied"),
        ] {
            if is_asked {
                self.problem("layout gguf", reason.to_owned());
            }
        }
        // The keys of its file are those of a whole model, and llama.cpp takes an absent bias for none.
        if let Some(reason) = &wanted.selected.no_hf {
            self.problem("layout gguf", reason.clone());
        }
        self.compare(wanted, wanted.compared(), chosen.family);
        let Some((file, left_out)) = self.or_default(gguf::plan(values, options.gguf_type, &chosen.set).map(Some))
        else {
            return Vec::new();
        };
        let whole = || Roles { whole: true, ..Roles::default() };
        let draft = |(name, view): &(String, View)| Draft::new(name.clone(), view.clone(), whole());
        let drafts = file.tensors.iter().map(draft).collect();
        self.plan.left_out.extend(fold(left_out.iter().map(String::as_str), &[]));
        self.plan.gguf = Some(file);
        drafts
    }

    /// Drafts by the tables of the model's family, or by the repository's own names.
    fn draft_by_tables(&mut self, wanted: &Selection<'_>, chosen: &ChosenLayout, values: &Values<'_>) -> Vec<Draft> {
        let (whole, family, options) = (wanted.compared(), chosen.family, self.options);
        let is_canonical = options.layout == Layout::Canonical;
        self.plan.warnings.extend(experts::doubts(wanted.seen(), wanted.order));
        // The comparison and the drafts each visit all tensors: they run at the same time.
        let names = ParsedNames::of(whole);
        let compare = || expect::compare(whole, &names, family, options);
        let seen = wanted.seen();
        // Blocks are those of all tensors, under the names that the drafts have.
        let drafts = || {
            if !is_canonical {
                let view = |(id, info): (TensorId, TensorInfo<'_>)| {
                    (info.name.to_owned(), values.view(id, values.dtype_of(id, &[info.name])).map_err(Box::new))
                };
                let (tensors, split) = (seen.tensors().map(view).collect(), (Some(wanted.whole()), &options.mesh));
                return canonical::drafts_of((seen, wanted.order), family, tensors, split);
            }
            let own = (!std::ptr::eq(seen, whole)).then(|| ParsedNames::of(seen));
            let names = own.as_ref().unwrap_or(&names);
            canonical::drafts((seen, names), family, (values, wanted.order), (whole, &options.mesh))
        };
        let (found, drafts) = rayon::join(compare, drafts);
        self.found(wanted, family, found);
        self.plan.family = family.map(|family| family.name.clone());
        self.tabled(drafts)
    }

    /// Compares the names of a repository with those that its model has.
    fn compare(&mut self, wanted: &Selection<'_>, names: &Checkpoint, family: Option<&Family>) {
        let found = expect::compare(names, &ParsedNames::of(names), family, self.options);
        self.found(wanted, family, found);
    }

    /// Takes what the comparison with a family's tables has found. Refuses a repository that lacks layers, or has nothing under the
    /// names of its model.
    fn found(&mut self, wanted: &Selection<'_>, family: Option<&Family>, found: (Findings, Vec<Problem>)) {
        let (findings, mut found) = found;
        let (problems, warnings, compared) = (&mut self.problems, &mut self.plan.warnings, wanted.compared());
        problems.append(&mut found);
        warnings.extend(findings.warning);
        missing_layers(compared, family, self.options, problems, warnings);
        no_layers(compared, self.options, problems);
        if family.is_none() {
            expect::no_beginnings(wanted.whole(), self.options, problems, warnings);
        }
        (self.plan.missing, self.plan.unexpected, self.plan.holes) =
            (findings.missing, findings.unexpected, findings.holes);
    }

    /// Drafts under the names of transformers' modules.
    fn draft_by_modules(&mut self, wanted: &Selection<'_>, chosen: &ChosenLayout, values: &Values<'_>) -> Vec<Draft> {
        let Some(model) = &chosen.modules else { return Vec::new() };
        let (seen, family) = (wanted.seen(), chosen.family);
        self.compare(wanted, seen, family);
        self.plan.family = family.map(|family| family.name.clone());
        let made = modules::drafts(seen, model, family, values, &self.options.mesh);
        let (tabled, left_out) = self.or_default(made);
        self.plan.left_out.extend(left_out);
        self.tabled(Ok(tabled))
    }

    /// The drafts of a layout by tables. Says which blocks tensor parallelism leaves whole.
    fn tabled(&mut self, tabled: Result<canonical::Tabled, Vec<Problem>>) -> Vec<Draft> {
        let (drafts, warning) = self.or_default(tabled);
        self.plan.warnings.extend(warning.filter(|_| self.options.sharding == Sharding::Auto));
        drafts
    }

    /// Chooses the drafts that the mount shows, and renames them.
    fn name(&mut self, mut drafts: Vec<Draft>, wanted: &Selection<'_>, chosen: &ChosenLayout) -> Vec<Draft> {
        let options = self.options;
        if chosen.file.is_none() && chosen.modules.is_none() {
            names::tie(&mut drafts, wanted.seen(), options, &mut self.plan.warnings);
        } else if options.tied != Tied::Auto && !(options.tied == Tied::Absent && wanted.own_head.is_some()) {
            let name = options.layout.name();
            let reason = format!("the rules of layout {name} say whether a tied output head is shown: expected auto");
            self.problem("tied", reason);
        }
        names::keep(self.original, &mut drafts, &wanted.selected, &mut self.problems);
        if let Some(adapter) = wanted.adapter {
            let is_own = |id: &TensorId| self.original.file_of(*id) == adapter.file;
            let own = |draft: &Draft| draft.view.source_ids().iter().any(is_own);
            let allowed = (&options.allow_missing, &options.allow_unmapped);
            lora::rename(&mut drafts, adapter, own, allowed, &mut self.problems, &mut self.plan.warnings);
        }
        let names = || drafts.iter().map(|draft| draft.name.as_str());
        self.plan.warnings.extend(rename::idle("rename", &options.renames, names));
        names::rename(&mut drafts, &options.renames, chosen.flat, &mut self.problems);
        drafts
    }

    /// The rules that split logical axes, if specs come from those. Warns of rules and mesh axes that split nothing.
    fn split(&mut self, drafts: &[Draft], wanted: &Selection<'_>, chosen: &ChosenLayout) -> Option<LogicalRules> {
        let options = self.options;
        let is_maxtext = drafts.iter().any(|draft| !draft.roles.logical.is_empty());
        let rules = logical_rules(options, chosen.file.as_deref(), is_maxtext && options.layout == Layout::Stored);
        if chosen.file.is_none() && !(options.layout == Layout::Stored && is_maxtext && options.set.is_empty()) {
            let name = options.layout.name();
            if !chosen.set.is_empty() && chosen.inverse.is_none() && options.layout != Layout::Gguf {
                self.problem("set", format!("the layout {name} has no parameters"));
            }
            if rules.is_some() {
                self.problem("shard", format!("the layout {name} names no logical axes"));
            }
        }
        if options.gguf_type.is_some() && options.layout != Layout::Gguf {
            self.problem("gguf_type", "is of the file of --layout gguf alone".to_owned());
        }
        if let Some((logical, axis)) = rules.as_ref().and_then(LogicalRules::doubled) {
            self.problem("logical rules", format!("the rule for {logical:?} names the mesh axis {axis:?} twice"));
        }
        let (problems, warnings) = (&mut self.problems, &mut self.plan.warnings);
        unused::mesh_axes(options, rules.as_ref(), drafts, problems, warnings);
        unused::patterns(wanted.seen(), options, drafts, warnings);
        unused::logical_rules(options, rules.is_some(), drafts, warnings);
        rules
    }

    /// Keeps quantized weights and their scales together, and buffers whole on every device, as FSDP leaves them, unless a rule of the
    /// user's or a logical axis says otherwise.
    fn keep(&mut self, drafts: &mut [Draft], by_rules: bool, wanted: &Selection<'_>, chosen: &ChosenLayout) {
        let (options, seen) = (self.options, wanted.seen());
        let is_ruled = |draft: &Draft| shard::is_told(draft, options.sharding, &options.shard_rules);
        if !by_rules {
            self.plan.warnings.extend(packed::keep_together(drafts, seen, &options.mesh, &is_ruled));
        }
        let is_told = |draft: &Draft| (by_rules && !draft.roles.by_position) || is_ruled(draft);
        let names = whole::keep(drafts, seen, &chosen.model, &options.mesh, chosen.inverse.is_some(), &is_told);
        self.plan.whole = Whole { names, is_known: chosen.model.is_known };
    }

    /// Makes the tensors of the plan, each with its spec. The plan has no files of `hf/` yet.
    fn assemble(
        &mut self,
        wanted: &Selection<'_>,
        chosen: &ChosenLayout,
        drafts: Vec<Draft>,
        logical_rules: Option<LogicalRules>,
    ) {
        let options = self.options;
        self.plan = Plan {
            mesh: options.mesh.clone(),
            layout: options.layout.clone(),
            dtype: chosen.request.dtype,
            decoded: decoded_by_scheme(wanted.seen(), chosen.request, options),
            kept_raw: if chosen.request.quantized == Raw::Shown { 0 } else { wanted.seen().raw().count() as u64 },
            logical_rules,
            flat: chosen.flat,
            sharded_state: chosen.file.as_ref().is_some_and(|file| file.sharded_state),
            devices: devices(options, &mut self.problems),
            unscanned: options.unscanned,
            chunk_bytes_max: options.chunk_bytes_max,
            ..std::mem::take(&mut self.plan)
        };
        self.plan.add(drafts, options, &mut self.problems);
    }

    /// Adds the files of `hf/`.
    fn finish(self, hf: HfFiles, wanted: &Selection<'_>) -> Result<Plan, PlanError> {
        let Self { mut plan, mut problems, .. } = self;
        plan.no_hf = hf.absent.or_else(|| wanted.selected.no_hf.clone()).filter(|_| hf.files.is_empty());
        (plan.hf, plan.kept_hf) = (hf.files, hf.kept);
        problems.dedup();
        if problems.is_empty() { Ok(plan) } else { Err(PlanError { problems }) }
    }
}

/// The decoded tensors by scheme. Dtypes follow the names of the repository.
fn decoded_by_scheme(checkpoint: &Checkpoint, request: ValueRequest, options: &ViewOptions) -> Vec<DecodedScheme> {
    let values = Values::new(checkpoint, request, &options.casts, None);
    let mut found: BTreeMap<&'static str, DecodedScheme> = BTreeMap::new();
    // Several tensors of a layout may be parts of one.
    let whole = |(id, info): (TensorId, TensorInfo<'_>)| match info.storage {
        Storage::Composed(composed) => composed.of,
        Storage::Plain { .. } | Storage::Quantized(_) | Storage::Mosaic(_) => id,
    };
    let is_quantized = |id: &TensorId| checkpoint.tensor(*id).quantized().is_some();
    let ids: BTreeSet<TensorId> = checkpoint.tensors().map(whole).filter(is_quantized).collect();
    for id in ids {
        let info = checkpoint.tensor(id);
        let Some(quantized) = info.quantized() else { continue };
        let dtype = values.dtype_of(id, &[info.name]).unwrap_or(quantized.dtype);
        let scheme = quantized.scheme;
        let row = found.entry(scheme).or_insert(DecodedScheme { scheme, tensors: 0, bytes: 0 });
        row.tensors += 1;
        row.bytes += dtype.bytes_of(quantized.shape().elements()).unwrap_or(0);
    }
    found.into_values().collect()
}

/// The rules for logical axes, if specs come from those.
fn logical_rules(options: &ViewOptions, file: Option<&LayoutFile>, is_maxtext: bool) -> Option<LogicalRules> {
    let wanted = match options.sharding {
        Sharding::Auto => is_maxtext || file.is_some_and(|file| file.logical),
        Sharding::Logical => true,
        Sharding::Replicate => false,
    };
    wanted.then(|| {
        let own = file.map(|file| &file.rules).filter(|rules| !rules.rules.is_empty());
        let mut rules = own.cloned().unwrap_or_else(LogicalRules::maxtext);
        rules.replace(&options.logical_rules);
        rules
    })
}
