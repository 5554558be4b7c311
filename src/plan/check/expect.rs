//! The tensors that a complete model of a known family must have, and the names of a repository that no table knows.
//!
//! A family lists only what `config.json` makes certain: every complete model has the names that are expected here.
//! Missing names are refused, and the names that no table knows with them, because one is probably the other, misspelt.
//! Without a missing name, unknown names are only reported, since a generic layout serves any tensor.
//!
//! A repository may differ from its `model_type`: it may have a class or code of its own, or the names of another
//! program. It may also be a draft model, which shares the other tensors with its target. Then nothing is certain, and
//! missing names are only reported too.

use std::collections::BTreeSet;

use ckfs_checkpoint::{Checkpoint, Experts, FileRole};
use hashbrown::HashSet;
use rayon::prelude::*;
use serde_json::Value as Json;

use super::super::{
    ViewOptions,
    expr::{Expr, ExprValue},
    family::{Expectation, Family},
    holes,
    library::Beginnings,
    member::{ConfigScope, config_member},
    name_group::{NameGroup, fold, stars},
    naming::{self, Parsed},
    parsed::{NameKind, ParsedNames},
    problem::{Hole, Problem},
    select,
    survey::unlike,
};

/// The value of an expression over `config.json`, and the number of the layer as `l`.
fn evaluate(expression: &str, checkpoint: &Checkpoint, layer: Option<u64>) -> Option<ExprValue> {
    let expression = Expr::parse(expression).expect("the families' files are in the program, and a test parses these");
    let layer = layer.and_then(|layer| Some(("l".to_owned(), ExprValue::Int(i64::try_from(layer).ok()?))));
    expression.eval(&ConfigScope { checkpoint, bound: layer.into_iter().collect() }).ok()
}

/// Whether an expectation holds for a layer. It does not if its condition cannot be evaluated.
fn holds(expectation: &Expectation, checkpoint: &Checkpoint, layer: Option<u64>) -> bool {
    if let (Some(list), Some(layer)) = (&expectation.unless_listed, layer) {
        let listed = config_member(checkpoint, &[list]).and_then(Json::as_array);
        if listed.is_some_and(|list| list.iter().any(|entry| entry.as_u64() == Some(layer))) {
            return false;
        }
    }
    let Some(when) = &expectation.when else { return true };
    evaluate(when, checkpoint, layer).and_then(|value| value.bool("when").ok()).unwrap_or(false)
}

/// A repository's tensors by its family's tables.
struct FamilyScan<'a> {
    checkpoint: &'a Checkpoint,
    family: &'a Family,
    /// The prefix of the text model's names, or that of its releases if no layer has one of them.
    prefix: String,
    /// Whether layers have a prefix of the text model.
    is_recognized: bool,
    /// Layers of which the repository has at least one tensor.
    layers: BTreeSet<u64>,
    /// Names of all tensors, numbers as `*`.
    stems: BTreeSet<String>,
    /// Names that no table knows, except those of towers and additional predictors.
    unknown: Vec<&'a str>,
}

impl<'a> FamilyScan<'a> {
    fn new(checkpoint: &'a Checkpoint, names: &ParsedNames<'_>, family: &'a Family) -> Option<Self> {
        let found = names.text_prefix(Some(family));
        let is_recognized = found.is_some();
        let prefix = found.or_else(|| Self::usual_prefix(checkpoint, names, family))?;
        let of_layers = |kind: &NameKind<'_>| kind.parsed.layer.is_some() && kind.parsed.prefix == prefix;
        let is_unknown = |kind: &NameKind<'_>| {
            let is_outside = || naming::is_tower(kind.name) || select::is_predictor(kind.name);
            let of_text = if kind.parsed.layer.is_some() { of_layers(kind) } else { !is_outside() };
            of_text && !family.knows(kind.name, &kind.parsed)
        };
        let stems = names.kinds().iter().map(|kind| stars(kind.name)).collect();
        let of_text: Vec<bool> = names.kinds().iter().map(of_layers).collect();
        let is_unknown: Vec<bool> = names.kinds().iter().map(is_unknown).collect();
        let in_text = names.names().iter().filter(|name| of_text[name.kind as usize]);
        let mut layers: Vec<u64> = in_text.filter_map(|name| names.layer(name)).collect();
        layers.dedup();
        let layers = layers.into_iter().collect();
        let mut unknown = Vec::new();
        if is_unknown.contains(&true) {
            let all = checkpoint.tensors().zip(names.names());
            unknown.extend(all.filter(|(_, name)| is_unknown[name.kind as usize]).map(|((_, info), _)| info.name));
        }
        Some(Self { checkpoint, family, prefix, is_recognized, layers, stems, unknown })
    }

    /// The prefix that the text model's names should have where no layer has one of them. `None` if there are no layers, here or
    /// in `config.json`, or a model of several parts has those of the text model in a place of its own.
    fn usual_prefix(checkpoint: &Checkpoint, names: &ParsedNames<'_>, family: &Family) -> Option<String> {
        checkpoint.dialect().declared_layers?;
        let is_text_alone = checkpoint.dialect().text_config.is_none();
        let mut layered = names.kinds().iter().filter(|kind| kind.parsed.layer.is_some());
        let is_layer = |kind: &NameKind<'_>| !naming::is_tower(kind.name) && family.knows(kind.name, &kind.parsed);
        let is_elsewhere = !is_text_alone && layered.clone().any(is_layer);
        layered.next().filter(|_| !is_elsewhere)?;
        family.prefixes.iter().find(|prefix| !prefix.is_empty()).cloned()
    }

    /// Whether weights keep their names under quantization, if there is any.
    fn keeps_names(&self) -> bool {
        let quantization = &self.checkpoint.dialect().quantization;
        // The tables of gpt-oss have the names of its codes.
        let has_codes = quantization.has("mxfp4");
        quantization.unsupported.is_empty() && (has_codes || self.checkpoint.keeps_names())
    }

    /// What is missing if no tensor has a name of the model; `expected` are all that it has for certain.
    fn nothing_of(&self, expected: &[String]) -> String {
        let (dialect, head) = (self.checkpoint.dialect(), "lm_head.weight");
        let class = dialect.architectures.first().or(dialect.model_type.as_ref()).map_or("the model", String::as_str);
        let mut names: BTreeSet<&str> = expected.iter().map(String::as_str).collect();
        let Some(example) =
            expected.iter().find(|name| name.starts_with(&format!("{}{}", self.prefix, self.family.layers)))
        else {
            return format!("none of the tensors that {class} has is here");
        };
        names.extend((self.is_causal() && !dialect.tied).then_some(head));
        format!("0 of {} tensors that {class} has are here, such as {example}", names.len())
    }

    /// The reason why the repository may differ from its `model_type`, whatever it has.
    fn doubt(&self) -> Option<String> {
        let (checkpoint, family) = (self.checkpoint, self.family);
        // A class for a whole model with a text model in it does not describe the text model.
        let has_class = |class: &str| checkpoint.dialect().text_config.is_some() || family.has_class(class);
        if let Some(doubt) = doubt_of_source(checkpoint, has_class, family.own_code) {
            return Some(doubt);
        }
        let prefixes = || family.prefixes.iter().chain([&self.prefix]);
        let mut unlike = family.unlike.iter().flat_map(|name| prefixes().map(move |prefix| format!("{prefix}{name}")));
        let draft = unlike.find(|name| self.stems.contains(name));
        draft.map(|name| format!("{name} is there, which only draft models have"))
    }

    /// The same, if a part of the model is there.
    fn doubt_of_part(&self) -> Option<String> {
        let (checkpoint, family) = (self.checkpoint, self.family);
        if let Some(doubt) = self.doubt() {
            return Some(doubt);
        }
        // The user says that the configuration is the model's.
        if checkpoint.companion().is_some() {
            return None;
        }
        let of_layers = format!("{}{}.", self.prefix, family.layers);
        let all = self.stems.iter().filter(|stem| stem.starts_with(&of_layers)).count();
        let unknown: BTreeSet<String> =
            self.unknown.iter().filter(|name| name.starts_with(&of_layers)).map(|name| stars(name)).collect();
        (unknown.len() * 2 > all).then(|| "most names of its layers are of another kind".to_owned())
    }

    /// Names of a complete model, with repetitions. Empty if nothing is certain.
    fn expected(&self) -> Vec<String> {
        let (checkpoint, family, prefix) = (self.checkpoint, self.family, &self.prefix);
        let dialect = checkpoint.dialect();
        let mut names = Vec::new();
        let Some(declared) = dialect.declared_layers.filter(|_| self.keeps_names()) else { return names };
        let model_type = dialect.text_model_type.as_ref().or(dialect.model_type.as_ref());
        let applies = |expectation: &&Expectation| {
            expectation.model_types.is_empty()
                || model_type.is_some_and(|known| expectation.model_types.contains(known))
        };
        for expectation in family.expect.iter().filter(applies) {
            if holds(expectation, checkpoint, None) {
                names.extend(expectation.top.iter().map(|name| format!("{prefix}{name}")));
            }
            let experts = match &expectation.experts {
                None => 1,
                Some(_) if !matches!(dialect.experts, Experts::Single { .. }) => continue,
                Some(count) => {
                    let count = evaluate(count, checkpoint, None).and_then(|count| count.natural("experts").ok());
                    // `config.json` may hold any number. The list stops soon after the number of tensors in the
                    // repository.
                    let told = 16 * checkpoint.tensors().len() as u64 / declared.max(1) + 16;
                    count.unwrap_or(0).min(told)
                }
            };
            let in_any = |name: &&String| {
                !expectation.if_any || self.stems.contains(&format!("{prefix}{}.*.{name}", family.layers))
            };
            let in_layer: Vec<&String> = expectation.layer.iter().filter(in_any).collect();
            for layer in (0..declared).filter(|layer| holds(expectation, checkpoint, Some(*layer))) {
                for name in &in_layer {
                    let name = format!("{prefix}{}.{layer}.{name}", family.layers);
                    if expectation.experts.is_some() {
                        names.extend((0..experts).map(|expert| name.replace('*', &expert.to_string())));
                    } else {
                        names.push(name);
                    }
                }
            }
        }
        if !names.is_empty() {
            self.resolve_ends(&mut names);
        }
        names
    }

    /// The embedding and the output head. If they are tied, either one is enough.
    fn resolve_ends(&self, names: &mut Vec<String>) {
        let dialect = self.checkpoint.dialect();
        let embedding = format!("{}embed_tokens.weight", self.prefix);
        if dialect.has_lm_head {
            // Some programs store the head of tied weights.
            if dialect.tied {
                names.retain(|name| *name != embedding);
            }
            return;
        }
        // Base models are published without a head under the class and configuration of the causal model. A missing
        // head is reported only if the shape of another tensor suggests that it is the head.
        let shape = self.checkpoint.find(&embedding).map(|id| self.checkpoint.tensor(id).shape.to_vec());
        let mut unknown = self.unknown.iter().filter_map(|name| self.checkpoint.find(name));
        let is_head = |id| Some(self.checkpoint.tensor(id).shape) == shape.as_deref();
        if dialect.tied_declared == Some(false) && self.is_causal() && unknown.any(is_head) {
            names.push("lm_head.weight".to_owned());
        }
    }

    fn is_causal(&self) -> bool {
        self.checkpoint.dialect().architectures.iter().any(|class| class.ends_with("ForCausalLM"))
    }

    /// An absence that may be intended.
    fn remark(&self) -> Option<String> {
        let dialect = self.checkpoint.dialect();
        let headless = self.is_causal() && dialect.tied_declared == Some(false) && !dialect.has_lm_head;
        headless.then(|| "there is no output head, though config.json says that it is not the embedding".to_owned())
    }
}

/// The reason why a repository may differ from its `model_type`, by what it says of itself. `own_code` says that all repositories
/// of its kind bring code.
fn doubt_of_source(checkpoint: &Checkpoint, has_class: impl Fn(&str) -> bool, own_code: bool) -> Option<String> {
    let weights = checkpoint.files().iter().filter(|file| file.role == FileRole::Weights);
    let mut metadata = weights.filter_map(|file| file.file).flat_map(|file| checkpoint.file_metadata(file));
    if metadata.any(|(key, value)| key == "format" && value == "mlx") {
        return Some("the files are MLX's, which has names of its own".to_owned());
    }
    let classes = &checkpoint.dialect().architectures;
    if !classes.is_empty() && !classes.iter().any(|class| has_class(class)) {
        return Some(format!("config.json names a class of its own, {}", classes[0]));
    }
    let brings_code = !own_code && checkpoint.config().is_some_and(|config| config.get("auto_map").is_some());
    brings_code.then(|| "the repository brings code of its own".to_owned())
}

/// The differences from a family's tables that are not refused.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) missing: Vec<NameGroup>,
    pub(crate) unexpected: Vec<NameGroup>,
    /// Differences between layers that nothing explains.
    pub(crate) holes: Vec<Hole>,
    /// A warning about the whole repository.
    pub(crate) warning: Option<String>,
}

/// Compares a repository with its family's tables, if it is of one, and its layers with each other. Returns the differences to report, and those to refuse.
pub(crate) fn compare(
    checkpoint: &Checkpoint,
    names: &ParsedNames<'_>,
    family: Option<&Family>,
    options: &ViewOptions,
) -> (Findings, Vec<Problem>) {
    let Some(family) = family else {
        let holes = holes(checkpoint, names, None, options);
        return (Findings { holes, ..Findings::default() }, Vec::new());
    };
    let nothing = || (Findings::default(), Vec::new());
    let Some(scan) = FamilyScan::new(checkpoint, names, family) else { return nothing() };
    let expected = scan.expected();
    // A layer without any tensor is reported elsewhere, as a missing layer.
    let in_missing_layer = |parsed: &Parsed| parsed.layer.is_some_and(|layer| !scan.layers.contains(&layer));
    let mut present = HashSet::new();
    if !expected.is_empty() {
        present.extend(checkpoint.tensors().map(|(_, info)| info.name));
    }
    if !scan.is_recognized || (!expected.is_empty() && !expected.iter().any(|name| present.contains(name.as_str()))) {
        let accepts = options.allow_missing.accepts(expected.first().map_or("layers.0.", String::as_str));
        let nothing = scan.nothing_of(&expected);
        let doubt = scan.doubt().or_else(|| accepts.then(|| "--allow-missing accepts it".to_owned()));
        let unexpected = fold(scan.unknown.iter().copied(), &[]);
        let problems = if doubt.is_none() { vec![unlike(checkpoint, &nothing)] } else { Vec::new() };
        let warning = doubt.map(|doubt| format!("{nothing}; not refused, as {doubt}"));
        return (Findings { unexpected, warning, ..Findings::default() }, problems);
    }
    let mut lost: Vec<&str> = expected
        .par_iter()
        .map(String::as_str)
        .filter(|name| !present.contains(name))
        .filter(|name| !in_missing_layer(&naming::parse(name)) && options.subset.wants(name))
        .collect();
    lost.sort_unstable();
    lost.dedup();
    let strange: BTreeSet<String> = scan.unknown.iter().map(|name| stars(name)).collect();
    let gone: BTreeSet<String> = lost.iter().map(|name| stars(name)).collect();
    // Known names serve as hints only if there are unknown names.
    let of_use = expected.iter().filter(|_| !scan.unknown.is_empty());
    let mut known: BTreeSet<String> = of_use.map(|name| stars(name)).collect();
    known.extend(family.stems().map(|stem| format!("{}{stem}", scan.prefix)));
    // The missing names are reported already.
    let mut holes = holes(checkpoint, names, Some(family), options);
    holes.retain(|hole| lost.binary_search(&hole.example.as_str()).is_err());
    let doubt = if lost.is_empty() && holes.is_empty() { None } else { scan.doubt_of_part() };
    let is_sure = doubt.is_none() && checkpoint.dialect().quantization.is_none();
    let (holes, differing): (Vec<Hole>, Vec<Hole>) = holes.into_iter().partition(|hole| {
        !is_sure
            || !hole.of_text
            || hole.is_width
            || is_buffer(&hole.example)
            || options.allow_missing.accepts(&hole.example)
    });
    let (allowed, refused): (Vec<&str>, Vec<&str>) =
        lost.into_iter().partition(|name| doubt.is_some() || options.allow_missing.accepts(name));
    let (listed, misspelt): (Vec<&str>, Vec<&str>) =
        scan.unknown.iter().partition(|name| refused.is_empty() || options.allow_unmapped.accepts(name));
    let mut problems: Vec<Problem> =
        fold(refused, &[&strange]).into_iter().map(|group| Problem::missing(group, "")).collect();
    problems.extend(fold(misspelt, &[&gone, &known]).into_iter().map(|group| Problem::UnexpectedTensor { group }));
    problems.extend(differing.into_iter().map(Problem::Hole));
    let warning = doubt.filter(|_| !allowed.is_empty()).map_or_else(
        || scan.remark().filter(|_| !expected.is_empty()),
        |doubt| Some(format!("{} tensors of a complete model are missing; not refused, as {doubt}", allowed.len())),
    );
    let findings =
        Findings { missing: fold(allowed, &[&strange]), unexpected: fold(listed, &[&gone, &known]), holes, warning };
    (findings, problems)
}

/// Whether a tensor can be computed from `config.json`. Some programs store such tensors, but only in the layers that
/// they have touched.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".inv_freq")
}

/// Refuses a repository of no known family where no name begins as those of its model type in the library.
pub(crate) fn no_beginnings(
    checkpoint: &Checkpoint,
    options: &ViewOptions,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let dialect = checkpoint.dialect();
    let Some(known) = dialect.model_type.as_deref().and_then(Beginnings::of) else { return };
    // Those of layers, if there are any: a wrapper may stand before the body alone.
    let all = || checkpoint.tensors().map(|(_, info)| info.name);
    let has_layers = all().any(naming::has_number);
    let mut told = all().filter(|name| !has_layers || naming::has_number(name)).peekable();
    let Some(first) = told.peek().copied().filter(|_| !told.any(|name| known.has_tensor(name))) else { return };
    let accepts = || options.allow_missing.accepts(first).then(|| "--allow-missing accepts it".to_owned());
    let class = dialect.architectures.first().or(dialect.model_type.as_ref()).map_or("the model", String::as_str);
    let nothing = format!("none of the tensors that {class} has is here");
    match doubt_of_source(checkpoint, |class| known.has_class(class), false).or_else(accepts) {
        Some(doubt) => warnings.push(format!("{nothing}; not refused, as {doubt}")),
        None => problems.push(unlike(checkpoint, &nothing)),
    }
}

/// The differences between layers that nothing explains, among the selected tensors.
fn holes(
    checkpoint: &Checkpoint,
    names: &ParsedNames<'_>,
    family: Option<&Family>,
    options: &ViewOptions,
) -> Vec<Hole> {
    let mut holes = holes::find(checkpoint, names, family);
    holes.retain(|hole| options.subset.wants(&hole.example));
    holes
}
