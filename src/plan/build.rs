//! Building a plan, in stages. Each makes one value from those of the stages before it:
//!
//! | stage | value |
//! | --- | --- |
//! | `select` | [`Wanted`]: the selected tensors of the repository, and those of an adapter |
//! | `choose` | [`Chosen`]: the layout's file, the dtype, the family |
//! | `draft` | [`Drafted`]: a view for each tensor that the layout makes, and the layout's findings |
//! | `name` | the drafts that the mount shows, under their names in the mount |
//! | `split` | [`LogicalRules`], if specs come from logical axes |
//! | `repository` | the files of `hf/` |
//! | `assemble` | the [`Plan`], each tensor with its spec |
//!
//! The stages collect problems on the way, so that all are reported together. If a later stage needs the value of a
//! failed stage, the plan ends at that stage.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use hashbrown::HashSet;

use super::{
    Decoded, Draft, Family, HfFile, Layout, LayoutFile, LogicalRules, NameGroup, Plan, PlanError, Problem, Sharding,
    Tied, ViewOptions, canonical,
    expect::{self, Findings},
    family::Generic,
    generated, hf,
    inverse::{self, Inverted},
    layout_file, lora,
    name_group::fold,
    names, packed,
    select::{self, Selected},
    shard, stored,
    survey::{self, devices, family, family_problem, missing_layers},
    unused,
    values::{self, Raw, Values, Wish},
};
use crate::{
    checkpoint::{Adapter, Checkpoint, Container},
    config::{Dequantize, Pattern},
    tensor::TensorId,
};

/// The options of a plan, and the problems and warnings found so far.
struct Builder<'a> {
    original: &'a Checkpoint,
    options: &'a ViewOptions,
    problems: Vec<Problem>,
    warnings: Vec<String>,
}

/// The selected tensors.
struct Wanted<'a> {
    original: &'a Checkpoint,
    selected: Selected,
    adapter: Option<&'a Adapter>,
    adapted: Option<Checkpoint>,
}

impl Wanted<'_> {
    /// All tensors, under the names that source renames give.
    fn whole(&self) -> &Checkpoint {
        self.selected.whole.as_ref().unwrap_or(self.original)
    }

    /// The selected ones among them.
    fn part(&self) -> &Checkpoint {
        self.selected.part.as_ref().unwrap_or_else(|| self.whole())
    }

    /// The selected tensors and those of the adapter: the input of the layout.
    fn seen(&self) -> &Checkpoint {
        self.adapted.as_ref().unwrap_or_else(|| self.part())
    }
}

/// How tensors are to be named and shaped.
struct Chosen {
    /// The rules, for a layout of rules.
    file: Option<Arc<LayoutFile>>,
    /// Its parameters, as set.
    set: BTreeMap<String, String>,
    /// The requested dtype and dequantization.
    wish: Wish,
    family: Option<Family>,
    /// Names of what the model's own code keeps in float32.
    keep_f32: Vec<Pattern>,
    /// Whether a name is one path component.
    flat: bool,
    /// The repository that the checkpoint is made back to, if it has the leaves of a layout.
    inverse: Option<Inverted>,
}

/// What a layout makes.
struct Drafted {
    drafts: Vec<Draft>,
    /// Name of the model family whose tables or rules were used.
    family: Option<String>,
    /// Parameters of the layout, with their values.
    params: Vec<(String, String)>,
    findings: Findings,
    left_out: Vec<NameGroup>,
    /// What stays in float32 though a dtype is asked for.
    kept: Vec<NameGroup>,
    /// What decoding leaves out.
    dropped: Vec<NameGroup>,
    decoded_config: Option<Vec<u8>>,
}

/// The files of `hf/`.
#[derive(Default)]
struct Repository {
    files: Vec<HfFile>,
    kept: Vec<NameGroup>,
    /// The reason why there is none.
    absent: Option<String>,
}

impl Plan {
    /// Resolves the user's request against a checkpoint.
    ///
    /// # Errors
    /// Everything wrong with the plan, at once.
    pub fn build(checkpoint: &Checkpoint, options: &ViewOptions) -> Result<Self, PlanError> {
        let mut plan = build(checkpoint, &options.for_checkpoint(checkpoint))?;
        if let Some(rename) = options.unwrapping(checkpoint) {
            plan.warnings.push(format!(
                "the names of the training state are shown without what matches '{}': --source-rename replaces this",
                rename.pattern()
            ));
        }
        Ok(plan)
    }
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
        let mut builder = Builder { original, options, problems: Vec::new(), warnings: Vec::new() };
        let decoded = decoded(original, decodes(options, layout_wish(options)), &raw)?;
        let wanted = builder.select(decoded.as_ref().unwrap_or(original))?;
        let chosen = builder.choose(&wanted)?;
        if values::converts(chosen.wish, &options.casts) {
            let problems = values::unsupported(original, wanted.part());
            if !problems.is_empty() {
                return Err(PlanError { problems });
            }
        }
        let keep_f32 = if options.layout.keeps_f32() { &chosen.keep_f32[..] } else { &[] };
        // A layout's own dtype is its author's word; only the user's is for all floats of whatever model.
        let keep_f32 = if options.dtype.is_some() { keep_f32 } else { &[] };
        let values = Values::new(wanted.seen(), chosen.wish, &options.casts, keep_f32);
        let mut drafted = builder.draft(&wanted, &chosen, &values);
        if !values.raw().is_empty() {
            raw.extend(values.raw());
            continue;
        }
        drafted.kept = match &chosen.inverse {
            Some(inverted) => inverted.kept.clone(),
            None => groups_of(wanted.seen(), values.kept()),
        };
        drafted.dropped = decoded.as_ref().map_or_else(Vec::new, |decoded| dropped(original, decoded));
        drafted.decoded_config = hf::decoded_config(&values);
        let drafts = std::mem::take(&mut drafted.drafts);
        let drafts = builder.name(drafts, &wanted, &chosen);
        let rules = builder.split(&drafts, &wanted, &chosen);
        let drafts = builder.keep_together(drafts, rules.is_some(), wanted.seen());
        let is_alike = raw.is_empty() && decodes(options, asked(options)) == decoded.is_some();
        let hf = match builder.generated(&drafts, &wanted, &chosen) {
            Some(hf) => hf,
            None => builder.repository(&wanted, &chosen.keep_f32, is_alike)?,
        };
        return builder.assemble(&wanted, &chosen, drafted, drafts, (rules, hf));
    }
}

/// The dtype and dequantization that the user requests.
const fn asked(options: &ViewOptions) -> Wish {
    let quantized = match (options.dequantize, options.dtype) {
        (Some(Dequantize::To(dtype)), _) | (Some(Dequantize::Own) | None, Some(dtype)) => Raw::Decoded(Some(dtype)),
        (Some(Dequantize::Own), None) => Raw::Decoded(None),
        (None, None) => Raw::Shown,
    };
    Wish { dtype: options.dtype, quantized }
}

/// As [`asked`], where the layout may request more: the layouts in the program need floats.
fn layout_wish(options: &ViewOptions) -> Wish {
    let asked = asked(options);
    match &options.layout {
        Layout::Embedded(_) if asked.quantized == Raw::Shown => Wish { quantized: Raw::Decoded(None), ..asked },
        Layout::Canonical | Layout::Hf | Layout::Stored | Layout::Embedded(_) => asked,
        Layout::File(file) => with_dtype_of(asked, file, options),
    }
}

/// Adds the request of a layout's file, where the user has none.
fn with_dtype_of(wish: Wish, file: &LayoutFile, options: &ViewOptions) -> Wish {
    let Some(dtype) = file.dtype().filter(|_| !options.keep_dtype && options.dtype.is_none()) else { return wish };
    let quantized = match options.dequantize {
        Some(Dequantize::To(_)) => wish.quantized,
        Some(Dequantize::Own) | None => Raw::Decoded(Some(dtype)),
    };
    Wish { dtype: Some(dtype), quantized }
}

/// Whether some quantized tensor may be decoded.
fn decodes(options: &ViewOptions, wish: Wish) -> bool {
    wish.quantized != Raw::Shown || options.casts.iter().any(|rule| rule.dtype.is_some())
}

/// The checkpoint with its quantized tensors decoded, except those of `raw`. `None` if there is nothing to decode.
fn decoded(original: &Checkpoint, decodes: bool, raw: &BTreeSet<TensorId>) -> Result<Option<Checkpoint>, PlanError> {
    if !decodes || original.quantized().tensors.is_empty() {
        return Ok(None);
    }
    let refused = |reasons: Vec<String>| {
        let problem = |reason| Problem::File { file: "decoded tensors".to_owned(), reason };
        PlanError { problems: reasons.into_iter().map(problem).collect() }
    };
    original.decoded(&|id| raw.contains(&id)).map(Some).map_err(refused)
}

/// The problem of a layout for repositories that is asked for on a checkpoint of the layout `stored`.
fn already_laid_out(layout: &str, stored: &str) -> Problem {
    let reason = format!(
        "it is made from a repository, and the names of the checkpoint are those of the layout {stored}: without --layout it is shown \
         as it is stored, for any mesh; --layout hf with --config-from makes a repository, which ckfs export writes and every layout takes"
    );
    Problem::File { file: format!("layout {layout}"), reason }
}

/// The names of tensors, folded over their numbers.
fn groups_of(checkpoint: &Checkpoint, ids: impl IntoIterator<Item = TensorId>) -> Vec<NameGroup> {
    fold(ids.into_iter().map(|id| checkpoint.tensor(id).name), &[])
}

/// What decoding leaves out that no decoder reads.
fn dropped(original: &Checkpoint, decoded: &Checkpoint) -> Vec<NameGroup> {
    let shown: HashSet<TensorId> = decoded.tensors().map(|(id, _)| id).collect();
    let is_gone = |id: &TensorId| !shown.contains(id);
    groups_of(original, original.quantized().left_out.iter().copied().filter(is_gone))
}

impl<'a> Builder<'a> {
    fn problem(&mut self, file: &str, reason: String) {
        self.problems.push(Problem::File { file: file.to_owned(), reason });
    }

    /// The value, or its default after its problems were collected.
    fn or_default<T: Default>(&mut self, found: Result<T, Vec<Problem>>) -> T {
        found.unwrap_or_else(|problems| {
            self.problems.extend(problems);
            T::default()
        })
    }

    /// Selects from `original`, whose tensors are stored or decoded.
    fn select<'b>(&self, original: &'b Checkpoint) -> Result<Wanted<'b>, PlanError>
    where
        'a: 'b,
    {
        let options = self.options;
        let mut selected = select::select(original, &options.subset, family(original)?.as_ref())?;
        // A file of hf/ is one of the repository. Boxes of tensors are in none.
        let has_files = match original.container() {
            Container::Safetensors => true,
            Container::Torch => original.is_repository(),
            Container::Dcp | Container::Orbax => false,
        };
        if selected.no_hf.is_none() && !has_files {
            let reason = format!("the source is a checkpoint of {}, not a repository", original.container());
            selected.no_hf = Some(reason);
        }
        let adapter = adapter(original, options)?;
        let mut wanted = Wanted { original, selected, adapter, adapted: None };
        wanted.adapted = adapter.map(|adapter| with_adapter(wanted.part(), adapter)).transpose()?;
        Ok(wanted)
    }

    fn choose(&self, wanted: &Wanted<'_>) -> Result<Chosen, PlanError> {
        let options = self.options;
        let mut set = options.set.clone();
        let file = match &options.layout {
            Layout::Canonical | Layout::Hf | Layout::Stored => None,
            Layout::Embedded(embedded) => {
                if let Some(stored) = inverse::layout_of(wanted.seen()) {
                    return Err(already_laid_out(embedded.name, stored).into());
                }
                Some(embedded.choose(wanted.seen(), &mut set)?)
            }
            Layout::File(file) => Some(file.clone()),
        };
        let wish = layout_wish(options);
        let wish = file.as_ref().map_or(wish, |file| with_dtype_of(wish, file, options));
        let flat = file.as_ref().is_some_and(|file| file.flat()) || options.layout == Layout::Hf;
        // A trainer's names are in no table.
        let family = if options.layout == Layout::Stored { None } else { family(wanted.seen())? };
        let is_back = options.layout == Layout::Hf && options.lora.is_none();
        let is_stored = options.layout == Layout::Stored;
        let keep_f32 = if is_stored { Vec::new() } else { survey::keep_f32(wanted.seen(), family.as_ref())? };
        let inverse = if is_back { inverse::invert(wanted.part(), options, &keep_f32)? } else { None };
        Ok(Chosen { file, set, wish, family, keep_f32, flat, inverse })
    }

    fn draft(&mut self, wanted: &Wanted<'_>, chosen: &Chosen, values: &Values<'_>) -> Drafted {
        let left_out = wanted.selected.left_out(wanted.original);
        let mut drafted = match (&chosen.file, &chosen.inverse) {
            (Some(file), _) => self.draft_by_rules(file, wanted, chosen, values),
            (None, Some(inverted)) => self.draft_back(inverted, wanted, chosen),
            (None, None) if self.options.layout == Layout::Stored => self.draft_as_stored(wanted, values),
            (None, None) => self.draft_by_tables(wanted, chosen, values),
        };
        drafted.left_out.splice(0..0, left_out);
        // What a torch checkpoint leaves out is no tensor, for the most part; the source's lines list it.
        if self.original.container() == Container::Orbax {
            drafted.left_out.extend(fold(self.original.left_out().iter().map(|left| left.name.as_str()), &[]));
        }
        drafted
    }

    /// Drafts by a layout of rules.
    fn draft_by_rules(
        &mut self,
        file: &LayoutFile,
        wanted: &Wanted<'_>,
        chosen: &Chosen,
        values: &Values<'_>,
    ) -> Drafted {
        let options = self.options;
        let (missing, unmapped) = (options.allow_missing.clone(), options.allow_unmapped.clone());
        let allowed = layout_file::Allowed { missing, unmapped };
        let family = Some(file.name().to_owned());
        let nothing = Drafted {
            drafts: Vec::new(),
            family,
            params: Vec::new(),
            findings: Findings::default(),
            left_out: Vec::new(),
            kept: Vec::new(),
            dropped: Vec::new(),
            decoded_config: None,
        };
        let resolved = match file.resolve(wanted.seen(), values, &options.mesh, &chosen.set, allowed) {
            Ok(resolved) => resolved,
            Err(problems) => {
                self.problems.extend(problems);
                return nothing;
            }
        };
        if !resolved.verified {
            let name = file.name();
            self.warnings.push(format!("layout {name} has not been compared here with the program that it imitates"));
        }
        self.warnings.extend(resolved.warnings);
        Drafted { drafts: resolved.drafts, params: resolved.params, left_out: resolved.left_out, ..nothing }
    }

    /// Drafts of the repository that the checkpoint is made back to.
    fn draft_back(&mut self, inverted: &Inverted, wanted: &Wanted<'_>, chosen: &Chosen) -> Drafted {
        self.warnings.extend(inverted.warnings.iter().cloned());
        let tensors = inverted.tensors.iter().map(|(name, view)| (name.clone(), Ok(view.clone())));
        let generic = Generic::load().map_err(|error| family_problem(&error).problems);
        let drafts =
            generic.and_then(|generic| canonical::drafts_of(wanted.seen(), chosen.family.clone(), generic, tensors));
        Drafted {
            drafts: self.or_default(drafts),
            family: Some(inverted.layout.clone()),
            params: inverted.params.clone(),
            findings: Findings::default(),
            left_out: inverted.left_out.clone(),
            kept: Vec::new(),
            dropped: Vec::new(),
            decoded_config: None,
        }
    }

    /// Drafts of the tensors as they are stored.
    fn draft_as_stored(&mut self, wanted: &Wanted<'_>, values: &Values<'_>) -> Drafted {
        let drafts = self.or_default(stored::drafts(wanted.seen(), values));
        let scan = self.original.scan_layers().map(|scan| ("scan".to_owned(), scan.to_string()));
        Drafted {
            drafts,
            family: stored::is_maxtext(wanted.seen()).then(|| "maxtext".to_owned()),
            params: scan.into_iter().collect(),
            findings: Findings::default(),
            left_out: Vec::new(),
            kept: Vec::new(),
            dropped: Vec::new(),
            decoded_config: None,
        }
    }

    /// Drafts by the tables of the model's family, or by the repository's own names.
    fn draft_by_tables(&mut self, wanted: &Wanted<'_>, chosen: &Chosen, values: &Values<'_>) -> Drafted {
        let (whole, family, options) = (wanted.whole(), chosen.family.as_ref(), self.options);
        let is_canonical = options.layout == Layout::Canonical;
        // The comparison and the drafts each visit all tensors: they run at the same time.
        let compare = || match family {
            Some(family) => expect::compare(whole, family, options),
            None => (expect::survey(whole, options), Vec::new()),
        };
        let canonical = || is_canonical.then(|| canonical_drafts(wanted.seen(), family.cloned(), values));
        let ((mut findings, problems), canonical) = rayon::join(compare, canonical);
        self.problems.extend(problems);
        self.warnings.extend(findings.warning.take());
        missing_layers(whole, family, options, &mut self.problems, &mut self.warnings);
        let drafts = canonical.unwrap_or_else(|| hf_drafts(wanted.seen(), family.cloned(), values));
        let drafts = self.or_default(drafts);
        let family = family.map(|family| family.name.clone());
        let (left_out, kept, dropped) = (Vec::new(), Vec::new(), Vec::new());
        Drafted { drafts, family, params: Vec::new(), findings, left_out, kept, dropped, decoded_config: None }
    }

    /// Chooses the drafts that the mount shows, and renames them.
    fn name(&mut self, mut drafts: Vec<Draft>, wanted: &Wanted<'_>, chosen: &Chosen) -> Vec<Draft> {
        let options = self.options;
        if chosen.file.is_none() {
            names::tie(&mut drafts, wanted.seen(), options, &mut self.warnings);
        } else if options.tied != Tied::Auto {
            let name = options.layout.name();
            let reason = format!("the rules of layout {name} say whether a tied output head is shown: expected auto");
            self.problem("tied", reason);
        }
        names::keep(&mut drafts, &wanted.selected, &mut self.problems);
        if let Some(adapter) = wanted.adapter {
            let own = |draft: &Draft| {
                let mut own = false;
                draft.view.for_each_source(&mut |source| own |= self.original.file_of(source.id) == adapter.file);
                own
            };
            let allowed = (&options.allow_missing, &options.allow_unmapped);
            lora::rename(&mut drafts, adapter, own, allowed, &mut self.problems, &mut self.warnings);
        }
        names::rename(&mut drafts, &options.renames, chosen.flat, &mut self.problems);
        drafts
    }

    /// The rules that split logical axes, if specs come from those. Warns of rules and mesh axes that split nothing.
    fn split(&mut self, drafts: &[Draft], wanted: &Wanted<'_>, chosen: &Chosen) -> Option<LogicalRules> {
        let options = self.options;
        let is_maxtext = drafts.iter().any(|draft| !draft.roles.logical.is_empty());
        let rules = logical_rules(options, chosen.file.as_deref(), is_maxtext && options.layout == Layout::Stored);
        if chosen.file.is_none() && !(options.layout == Layout::Stored && is_maxtext && options.set.is_empty()) {
            let name = options.layout.name();
            if !options.set.is_empty() && chosen.inverse.is_none() {
                self.problem("set", format!("the layout {name} has no parameters"));
            }
            if rules.is_some() {
                self.problem("shard", format!("the layout {name} names no logical axes"));
            }
        }
        if let Some((logical, axis)) = rules.as_ref().and_then(LogicalRules::doubled) {
            self.problem("logical rules", format!("the rule for {logical:?} names the mesh axis {axis:?} twice"));
        }
        let (problems, warnings) = (&mut self.problems, &mut self.warnings);
        unused::mesh_axes(options, rules.as_ref(), drafts, problems, warnings);
        unused::patterns(wanted.seen(), options, drafts, warnings);
        unused::logical_rules(options, rules.is_some(), drafts, warnings);
        rules
    }

    /// Keeps a tensor whole on every device if it packs several tensors and a split would cut across them.
    fn keep_together(&mut self, mut drafts: Vec<Draft>, by_rules: bool, checkpoint: &Checkpoint) -> Vec<Draft> {
        let options = self.options;
        if !by_rules {
            let is_told = |draft: &Draft| shard::is_told(draft, options.sharding, &options.shard_rules);
            self.warnings.extend(packed::keep_together(&mut drafts, checkpoint, &options.mesh, &is_told));
        }
        drafts
    }

    /// The files of `hf/`. What a layout does by itself to its own tensors is no wish for another `hf/`: `is_alike` tells
    /// whether what is wanted has the same tensors decoded.
    fn repository(
        &mut self,
        wanted: &Wanted<'_>,
        keep_f32: &[Pattern],
        is_alike: bool,
    ) -> Result<Repository, PlanError> {
        if self.options.layout == Layout::Stored {
            // hf/ is a repository, which a trainer's checkpoint is not.
            return Ok(Repository::default());
        }
        if let Some(reason) = &wanted.selected.no_hf {
            return Ok(self.no_repository(reason, self.original.is_repository()));
        }
        let (original, options) = (self.original, self.options);
        let plan = |wanted: &Wanted<'_>| {
            let part = wanted.part();
            let values = Values::new(part, asked(options), &options.casts, keep_f32);
            let (renames, tie, text) = (&options.renames, options.tied == Tied::Alias, wanted.selected.text.as_ref());
            let files = hf::plan(original, &values, hf::Names { renames, tie, text });
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
            let decoded = decoded(original, decodes(options, asked(options)), &raw)?;
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
    fn generated(&mut self, drafts: &[Draft], wanted: &Wanted<'_>, chosen: &Chosen) -> Option<Repository> {
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
        let alone = text.and_then(|text| Some(text.config(checkpoint.config()?, checkpoint.dialect().tied)));
        let config = inverse.map(|inverted| &inverted.config).or(alone.as_ref()).or_else(|| checkpoint.config());
        let name = |name: &String| text.map_or_else(|| name.clone(), |text| text.name(name));
        let tensors = drafts.iter().map(|draft| (name(&draft.name), draft.view.clone())).collect();
        let is_text = text.is_some() || inverse.is_some_and(|inverted| inverted.is_text);
        let shard_bytes_max = options.shard_bytes_max.unwrap_or(generated::SHARD_BYTES_MAX);
        let files = generated::files(checkpoint, tensors, (config, is_text), shard_bytes_max);
        let kept = chosen.inverse.as_ref().map_or_else(Vec::new, |inverted| inverted.kept.clone());
        Some(Repository { files: self.or_default(files), kept, absent: None })
    }

    /// The files of `hf/` of this part of the repository, and what is said of them.
    fn planned(
        &mut self,
        files: Result<Vec<HfFile>, Vec<Problem>>,
        kept: Vec<NameGroup>,
        part: &Checkpoint,
    ) -> Repository {
        let decoded = part.tensors().filter(|(_, info)| info.quantized().is_some()).count();
        let raw = if decoded == 0 { 0 } else { part.raw().count() };
        if raw > 0 {
            self.warnings.push(format!(
                "hf/ has {raw} quantized tensors as stored beside {decoded} decoded ones: its config.json still says how the \
                 repository is quantized, which holds for the former only"
            ));
        }
        Repository { files: self.or_default(files), kept, absent: None }
    }

    /// No `hf/`, for this reason. Nobody expects a repository of what is none.
    fn no_repository(&mut self, reason: &str, is_expected: bool) -> Repository {
        if is_expected {
            self.warnings.push(format!("hf/ is left out: {reason}"));
        }
        Repository { absent: Some(reason.to_owned()), ..Repository::default() }
    }

    /// Gives each tensor its spec.
    fn assemble(
        mut self,
        wanted: &Wanted<'_>,
        chosen: &Chosen,
        drafted: Drafted,
        drafts: Vec<Draft>,
        (logical_rules, hf): (Option<LogicalRules>, Repository),
    ) -> Result<Plan, PlanError> {
        let options = self.options;
        let no_hf = hf.absent.or_else(|| wanted.selected.no_hf.clone()).filter(|_| hf.files.is_empty());
        let mut plan = Plan {
            mesh: options.mesh.clone(),
            layout: options.layout.clone(),
            dtype: chosen.wish.dtype,
            decoded: decoded_by_scheme(wanted.seen(), chosen.wish, options),
            kept: drafted.kept,
            kept_hf: hf.kept,
            dropped: drafted.dropped,
            kept_raw: if chosen.wish.quantized == Raw::Shown { 0 } else { wanted.seen().raw().count() as u64 },
            family: drafted.family,
            params: drafted.params,
            logical_rules,
            flat: chosen.flat,
            sharded_state: chosen.file.as_ref().is_some_and(|file| file.sharded_state()),
            decoded_config: drafted.decoded_config,
            devices: devices(options, &mut self.problems),
            specs: Vec::new(),
            tensors: Vec::with_capacity(drafts.len()),
            hf: hf.files,
            unscanned: options.unscanned,
            chunk_bytes_max: options.chunk_bytes_max,
            missing: drafted.findings.missing,
            unexpected: drafted.findings.unexpected,
            holes: drafted.findings.holes,
            left_out: drafted.left_out,
            warnings: self.warnings,
            no_hf,
        };
        plan.add(drafts, options, &mut self.problems);
        self.problems.dedup();
        if self.problems.is_empty() { Ok(plan) } else { Err(PlanError { problems: self.problems }) }
    }
}

/// The decoded tensors by scheme. Dtypes follow the names of the repository.
fn decoded_by_scheme(checkpoint: &Checkpoint, wish: Wish, options: &ViewOptions) -> Vec<Decoded> {
    let values = Values::new(checkpoint, wish, &options.casts, &[]);
    let mut found: BTreeMap<&'static str, Decoded> = BTreeMap::new();
    for (id, info) in checkpoint.tensors() {
        let Some(quantized) = info.quantized() else { continue };
        let dtype = values.dtype_of(id, &[info.name]).unwrap_or(quantized.dtype);
        let scheme = quantized.scheme;
        let row = found.entry(scheme).or_insert(Decoded { scheme, tensors: 0, bytes: 0 });
        row.tensors += 1;
        row.bytes += dtype.bytes_of(quantized.shape().elements()).unwrap_or(0);
    }
    found.into_values().collect()
}

/// Tensors under canonical names.
fn canonical_drafts(
    checkpoint: &Checkpoint,
    family: Option<Family>,
    values: &Values<'_>,
) -> Result<Vec<Draft>, Vec<Problem>> {
    let generic = Generic::load().map_err(|error| family_problem(&error).problems)?;
    canonical::drafts(checkpoint, family, generic, values)
}

/// Tensors under the repository's own names, with the roles that canonical names would have.
fn hf_drafts(checkpoint: &Checkpoint, family: Option<Family>, values: &Values<'_>) -> Result<Vec<Draft>, Vec<Problem>> {
    let generic = Generic::load().map_err(|error| family_problem(&error).problems)?;
    canonical::hf_drafts(checkpoint, family, generic, values)
}

/// The adapter that the user requests, if the layout can show it.
fn adapter<'a>(checkpoint: &'a Checkpoint, options: &ViewOptions) -> Result<Option<&'a Adapter>, PlanError> {
    let Some(dir) = &options.lora else { return Ok(None) };
    let problem = |reason: String| PlanError::from(Problem::File { file: format!("lora {}", dir.display()), reason });
    if options.layout != Layout::Hf {
        let layout = options.layout.name();
        return Err(problem(format!(
            "the names of a model with an adapter are those of the layout hf, not of {layout}"
        )));
    }
    checkpoint.adapter(dir).map(Some).ok_or_else(|| problem("the source was opened without this adapter".to_owned()))
}

/// A part of a checkpoint, and the tensors of an adapter under their own names.
fn with_adapter(part: &Checkpoint, adapter: &Adapter) -> Result<Checkpoint, PlanError> {
    let config = part.config().cloned();
    let adapted = part.derived(config, Some(adapter.file), |_, info| Some(info.name.to_owned()));
    adapted.map_err(|reasons| {
        let file = format!("lora {}", adapter.dir.display());
        PlanError { problems: reasons.into_iter().map(|reason| Problem::File { file: file.clone(), reason }).collect() }
    })
}

/// The rules for logical axes, if specs come from those.
fn logical_rules(options: &ViewOptions, file: Option<&LayoutFile>, is_maxtext: bool) -> Option<LogicalRules> {
    let wanted = match options.sharding {
        Sharding::Auto => is_maxtext || file.is_some_and(LayoutFile::shards_logically),
        Sharding::Logical => true,
        Sharding::Replicate => false,
    };
    wanted.then(|| {
        let own = file.map(LayoutFile::rules).filter(|rules| !rules.rules.is_empty());
        let mut rules = own.cloned().unwrap_or_else(LogicalRules::maxtext);
        rules.replace(&options.logical_rules);
        rules
    })
}
