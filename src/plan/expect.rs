//! What a complete model of a known family must have, and which of a repository's names no table knows.
//!
//! Families list what `config.json` makes certain, and no more: a name that is expected here is in every complete model. What
//! is missing is refused, and with it the names that no table knows, for one is probably the other, misspelt. Where nothing
//! is missing, unknown names are only reported, since a generic layout serves any tensor.
//!
//! A repository may be something else than its `model_type` says: a class or code of its own, the names of another program, a
//! draft model that shares the rest with its target. Then nothing is certain, and what is missing is reported too.

use std::collections::BTreeSet;

use rayon::prelude::*;
use serde_json::Value as Json;

use super::{
    ViewOptions,
    expr::{EvalError, Expr, Names, Value},
    family::{Expectation, Family, Generic, Words},
    hole::Hole,
    holes,
    name_group::{NameGroup, fold, stars},
    naming::{self, Parsed},
    problem::Problem,
    select,
};
use crate::checkpoint::{Checkpoint, Experts, FileRole};

/// Tensors that one thread looks at together.
const SURVEYED_TOGETHER: usize = 1024;

/// `config.json` for conditions, and the number of the layer as `l`.
struct Condition<'a> {
    checkpoint: &'a Checkpoint,
    layer: Option<u64>,
}

impl Names for Condition<'_> {
    fn mesh(&self, _axis: &str) -> Option<u64> {
        // What a repository must have does not depend on the devices.
        None
    }

    fn name(&self, name: &str) -> Result<Value, EvalError> {
        let layer = self.layer.filter(|_| name == "l").and_then(|layer| i64::try_from(layer).ok());
        layer.map(Value::Int).ok_or_else(|| EvalError::Name(name.to_owned()))
    }

    fn config(&self, path: &[String]) -> Option<Value> {
        Value::of_json(member(self.checkpoint, path)?)
    }

    fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
        self.checkpoint.find(tensor).map(|id| self.checkpoint.tensor(id).shape.to_vec())
    }

    fn count(&self, _: &str) -> u64 {
        0
    }
}

fn member<'a>(checkpoint: &'a Checkpoint, path: &[String]) -> Option<&'a Json> {
    let config = checkpoint.config()?;
    let text = checkpoint.dialect().text_config.as_deref().and_then(|name| config.get(name));
    let walk = |root: &'a Json| path.iter().try_fold(root, |value, member| value.get(member.as_str()));
    text.and_then(walk).or_else(|| walk(config))
}

fn evaluate(expression: &str, checkpoint: &Checkpoint, layer: Option<u64>) -> Option<Value> {
    let expression = Expr::parse(expression).expect("the families' files are in the program, and a test parses these");
    expression.eval(&Condition { checkpoint, layer }).ok()
}

/// Whether an expectation holds for a layer. One that cannot be told does not.
fn holds(expectation: &Expectation, checkpoint: &Checkpoint, layer: Option<u64>) -> bool {
    if let (Some(list), Some(layer)) = (&expectation.unless_listed, layer) {
        let listed = member(checkpoint, std::slice::from_ref(list)).and_then(Json::as_array);
        if listed.is_some_and(|list| list.iter().any(|entry| entry.as_u64() == Some(layer))) {
            return false;
        }
    }
    let Some(when) = &expectation.when else { return true };
    evaluate(when, checkpoint, layer).and_then(|value| value.bool("when").ok()).unwrap_or(false)
}

/// A repository's tensors, seen through its family's tables.
struct Survey<'a> {
    checkpoint: &'a Checkpoint,
    family: &'a Family,
    /// What stands before the text model's names.
    prefix: String,
    /// Layers of which there is anything.
    layers: BTreeSet<u64>,
    /// Names of all tensors, numbers as `*`.
    stems: BTreeSet<String>,
    /// Names that no table knows, towers and additional predictors aside.
    unknown: Vec<&'a str>,
}

impl<'a> Survey<'a> {
    fn new(checkpoint: &'a Checkpoint, family: &'a Family) -> Option<Self> {
        let prefix = select::text_prefix(checkpoint, Some(family))?;
        let words = Generic::load().expect("the file is in the program, and a test reads it").words;
        let (layers, stems, unknown) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        let mut survey = Self { checkpoint, family, prefix, layers, stems, unknown };
        let names: Vec<&str> = checkpoint.tensors().map(|(_, info)| info.name).collect();
        let parts: Vec<_> = names.par_chunks(SURVEYED_TOGETHER).map(|names| survey.part(names, &words)).collect();
        for (layers, stems, unknown) in parts {
            survey.layers.extend(layers);
            survey.stems.extend(stems);
            survey.unknown.extend(unknown);
        }
        Some(survey)
    }

    /// Layers, stems and unknown names among `names`.
    fn part(&self, names: &[&'a str], words: &Words) -> (BTreeSet<u64>, BTreeSet<String>, Vec<&'a str>) {
        let (mut layers, mut stems, mut unknown) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        for name in names.iter().copied() {
            let parsed = naming::parse(name, words);
            let of_layers = parsed.layer.filter(|_| parsed.prefix == self.prefix);
            layers.extend(of_layers);
            stems.insert(stars(name));
            let outside = select::is_tower(name) || select::is_predictor(name);
            let of_text = if parsed.layer.is_some() { of_layers.is_some() } else { !outside };
            if of_text && !self.family.knows(name, &parsed) {
                unknown.push(name);
            }
        }
        (layers, stems, unknown)
    }

    /// Whether quantization, where there is any, leaves the names of weights as they are.
    fn keeps_names(&self) -> bool {
        let quantization = &self.checkpoint.dialect().quantization;
        // The tables of gpt-oss know its codes.
        let has_codes = quantization.has("mxfp4");
        quantization.unsupported.is_empty() && (has_codes || self.checkpoint.keeps_names())
    }

    /// Why the repository may be something else than its `model_type` says.
    fn doubt(&self) -> Option<String> {
        let (checkpoint, family) = (self.checkpoint, self.family);
        let dialect = checkpoint.dialect();
        let mut metadata = checkpoint
            .files()
            .iter()
            .filter(|file| file.role == FileRole::Weights)
            .filter_map(|file| file.file)
            .flat_map(|file| checkpoint.file_metadata(file));
        if metadata.any(|(key, value)| key == "format" && value == "mlx") {
            return Some("the files are MLX's, which has names of its own".to_owned());
        }
        // The class of a whole that has a text model in it says nothing of that.
        if dialect.text_config.is_none()
            && !dialect.architectures.is_empty()
            && !dialect.architectures.iter().any(|class| family.has_class(class))
        {
            return Some(format!("config.json names a class of its own, {}", dialect.architectures[0]));
        }
        if !family.own_code && checkpoint.config().is_some_and(|config| config.get("auto_map").is_some()) {
            return Some("the repository brings code of its own".to_owned());
        }
        let unlike = family.unlike.iter().map(|name| format!("{}{name}", self.prefix));
        if let Some(name) = unlike.into_iter().find(|name| self.stems.contains(name)) {
            return Some(format!("{name} is there, which only draft models have"));
        }
        let of_layers = format!("{}{}.", self.prefix, family.layers);
        let all = self.stems.iter().filter(|stem| stem.starts_with(&of_layers)).count();
        let unknown: BTreeSet<String> =
            self.unknown.iter().filter(|name| name.starts_with(&of_layers)).map(|name| stars(name)).collect();
        (unknown.len() * 2 > all).then(|| "most names of its layers are of another kind".to_owned())
    }

    /// Names that a complete model has, possibly several times; none where nothing can be told.
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
                    // config.json may say any number; many more than there are tensors need not be told one by one.
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
            self.settle_ends(&mut names);
        }
        names
    }

    /// The embedding and the output head, either of which may stand for both.
    fn settle_ends(&self, names: &mut Vec<String>) {
        let dialect = self.checkpoint.dialect();
        let embedding = format!("{}embed_tokens.weight", self.prefix);
        if dialect.has_lm_head {
            // Of tied weights some programs keep the head.
            if dialect.tied {
                names.retain(|name| *name != embedding);
            }
            return;
        }
        // Base models are published without a head under the class and configuration of the causal model. It is missed only
        // where another tensor may be it, by its shape.
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

    /// What may well be meant to be missing.
    fn remark(&self) -> Option<String> {
        let dialect = self.checkpoint.dialect();
        let headless = self.is_causal() && dialect.tied_declared == Some(false) && !dialect.has_lm_head;
        headless.then(|| "there is no output head, though config.json says that it is not the embedding".to_owned())
    }
}

/// What is not as a family's tables say, as far as it is not refused.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) missing: Vec<NameGroup>,
    pub(super) unexpected: Vec<NameGroup>,
    /// Differences between layers that nothing explains.
    pub(super) holes: Vec<Hole>,
    /// What is worth a warning.
    pub(super) warning: Option<String>,
}

/// Compares a repository with its family's tables: what is to be told, and what is refused.
pub(super) fn compare(checkpoint: &Checkpoint, family: &Family, options: &ViewOptions) -> (Findings, Vec<Problem>) {
    let nothing = || (Findings::default(), Vec::new());
    let Some(survey) = Survey::new(checkpoint, family) else { return nothing() };
    let words = Generic::load().expect("the file is in the program, and a test reads it").words;
    let expected = survey.expected();
    // A layer of which nothing is there is reported as such.
    let in_missing_layer = |parsed: &Parsed| parsed.layer.is_some_and(|layer| !survey.layers.contains(&layer));
    let mut lost: Vec<&str> = expected
        .par_iter()
        .map(String::as_str)
        .filter(|name| checkpoint.find(name).is_none())
        .filter(|name| !in_missing_layer(&naming::parse(name, &words)) && options.subset.wants(name))
        .collect();
    lost.sort_unstable();
    lost.dedup();
    let strange: BTreeSet<String> = survey.unknown.iter().map(|name| stars(name)).collect();
    let gone: BTreeSet<String> = lost.iter().map(|name| stars(name)).collect();
    // What is known is near to something only where something is not.
    let of_use = expected.iter().filter(|_| !survey.unknown.is_empty());
    let mut known: BTreeSet<String> = of_use.map(|name| stars(name)).collect();
    known.extend(family.stems().map(|stem| format!("{}{stem}", survey.prefix)));
    // What is expected and missing is told already.
    let mut holes = holes(checkpoint, Some(family), options);
    holes.retain(|hole| lost.binary_search(&hole.example.as_str()).is_err());
    let doubt = if lost.is_empty() && holes.is_empty() { None } else { survey.doubt() };
    let is_sure = doubt.is_none() && checkpoint.dialect().quantization.is_none();
    let (holes, differing): (Vec<Hole>, Vec<Hole>) = holes.into_iter().partition(|hole| {
        !is_sure || !hole.of_text || is_buffer(&hole.example) || options.allow_missing.accepts(&hole.example)
    });
    let (allowed, refused): (Vec<&str>, Vec<&str>) =
        lost.into_iter().partition(|name| doubt.is_some() || options.allow_missing.accepts(name));
    let (listed, misspelt): (Vec<&str>, Vec<&str>) =
        survey.unknown.iter().partition(|name| refused.is_empty() || options.allow_unmapped.accepts(name));
    let mut problems: Vec<Problem> = fold(refused, &[&strange]).into_iter().map(Problem::missing).collect();
    problems.extend(fold(misspelt, &[&gone, &known]).into_iter().map(|group| Problem::UnexpectedTensor { group }));
    problems.extend(differing.into_iter().map(|hole| Problem::Hole { hole }));
    let warning = doubt.filter(|_| !allowed.is_empty()).map_or_else(
        || survey.remark().filter(|_| !expected.is_empty()),
        |doubt| Some(format!("{} tensors of a complete model are missing; not refused, as {doubt}", allowed.len())),
    );
    let findings =
        Findings { missing: fold(allowed, &[&strange]), unexpected: fold(listed, &[&gone, &known]), holes, warning };
    (findings, problems)
}

/// Whether a tensor can be computed from `config.json`: some programs store it in the layers that they have touched.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".inv_freq")
}

/// What is told of a repository of no known family.
pub(super) fn survey(checkpoint: &Checkpoint, options: &ViewOptions) -> Findings {
    Findings { holes: holes(checkpoint, None, options), ..Findings::default() }
}

/// Differences between layers that nothing explains, as far as they are wanted.
fn holes(checkpoint: &Checkpoint, family: Option<&Family>, options: &ViewOptions) -> Vec<Hole> {
    let mut holes = holes::find(checkpoint, family);
    holes.retain(|hole| options.subset.wants(&hole.example));
    holes
}
