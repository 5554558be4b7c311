//! Layouts as data: a TOML file of rules, a user's own or one of those in the program.
//!
//! A rule says how one leaf of the wanted tree comes from tensors of the repository. In short (worked examples are in
//! `examples/layouts/`, the language of expressions is described in [`expr`](super::expr)):
//!
//! ```toml
//! name = "my-llama"
//! dtype = "bf16"                  # of floats, unless the user asks for another
//!
//! [params]                        # what the user may set, with defaults
//! vocab_size = "config.vocab_size"
//!
//! [vars]                          # numbers that rules use
//! d = "config.head_dim ?? config.hidden_size / config.num_attention_heads"
//!
//! [[leaf]]                        # a leaf by itself
//! to = "tok_embeddings"
//! from = "model.embed_tokens.weight"
//! view = "cut_or_pad(x, 0, vocab_size)"
//! axes = "vocab embed"            # logical names of the axes, for `[[rule]]`s of sharding; `_` for none
//!
//! [group]                         # leaves of a layer, by the name of the group
//! layer = [
//!   { to = "attn.wq", from = "self_attn.q_proj.weight", view = "reshape(x, -1, d, extent(x, 1))", axes = "heads _ embed" },
//!   { to = "moe.up", from = "mlp.experts.{e}.up_proj.weight", stack = [{ var = "e", axis = 0, name = "expert" }] },
//! ]
//!
//! [[place]]                       # where a group goes: here all layers, stacked on a new axis 0
//! group = "layer"
//! to = "layers"
//! from = "model.layers.{l}"
//! stack = [{ var = "l", over = "0..config.num_hidden_layers", axis = 0, name = "layers" }]
//!
//! [[alias]]                       # tried where a name is not in the repository
//! name = "model."
//! on_disk = ["language_model.model."]
//!
//! [[ignore]]                      # tensors left out on purpose; any other that no rule uses is an error
//! names = "vision_tower.*"
//! ```
//!
//! * `from` is the name of a source, called `x` in `view`, or a table of several: `from = { q = "…", k = "…" }`.
//! * Names are templates: `{…}` holds an expression.
//! * `stack` makes axes, outermost first. `axis` is the number of the new axis in the finished leaf; it may be an expression
//!   over `rank` (that of what is stacked, without any stacked axes) and `outer` (how many stacks are further out), and is
//!   the number of the stack where it is left out. Without `over`, all numbers that the repository has, from 0, are taken.
//!   A rule's own stacks are outside those of its place. What is stacked over nothing is left out.
//! * `each = { b = "0..4" }`, on rules and places, repeats them for each number instead; `let = { half = "…" }` on a place
//!   names expressions over those numbers for its leaves.
//! * `when` is a condition, `optional = true` leaves a leaf out where the repository has none of its sources,
//!   `dtype = "keep"` (or a type) holds for one leaf against the layout's.
//! * `tp` and `experts` number the axes of a leaf, before stacking, that tensor and expert parallelism split under
//!   `--shard auto`.
//! * `logical = true` makes the logical rules the default way to shard, `rules = "maxtext"` begins them with MaxText's, and each
//!   `[[rule]]` with `logical` and `mesh` replaces what is there for its axis.
//! * `axes = ""` leaves the names of a leaf's axes to its place, which gives them all by `bare`.
//! * `verified = false`, or a condition, warns that the result has not been compared with that of the program imitated.
//! * `flat = true` makes one file of each tensor, named by its whole dotted name.
//!
//! What it deliberately does not do: read weights, or know any model.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    path::Path,
    sync::Arc,
};

use serde::Deserialize;
use toml::Spanned;

use super::{
    allow::Allow,
    draft::{Bundled, Draft, Roles},
    expr::{EvalError, Expr, Names, SyntaxError, Template, Value},
    logical::{LogicalRule, LogicalRules},
    pattern::Pattern,
    problem::{PlanError, Problem},
    values::Values,
};
use crate::{
    checkpoint::Checkpoint,
    tensor::{DType, TensorId, View},
};

/// Most numbers that one range may have.
const RANGE_MAX: u64 = 1 << 20;

/// Logical names by which a stack is known to be one of experts.
const EXPERT_WORDS: [&str; 3] = ["exp", "expert", "experts"];

type Text = Spanned<String>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    name: String,
    #[serde(default)]
    description: String,
    verified: Option<Spanned<RawCondition>>,
    #[serde(default)]
    model_types: Vec<String>,
    #[serde(default)]
    dtype: Option<Text>,
    #[serde(default)]
    flat: bool,
    #[serde(default)]
    logical: bool,
    #[serde(default)]
    rules: Option<Text>,
    #[serde(default)]
    params: BTreeMap<String, Text>,
    #[serde(default)]
    vars: BTreeMap<String, Text>,
    #[serde(default)]
    alias: Vec<RawAlias>,
    #[serde(default)]
    ignore: Vec<RawIgnore>,
    #[serde(default)]
    leaf: Vec<RawLeaf>,
    #[serde(default)]
    group: BTreeMap<String, Vec<RawLeaf>>,
    #[serde(default)]
    place: Vec<RawPlace>,
    #[serde(default)]
    rule: Vec<LogicalRule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAlias {
    name: String,
    on_disk: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawIgnore {
    names: Text,
    when: Option<Text>,
    #[serde(default)]
    each: BTreeMap<String, Text>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected the name of a tensor, or a table of names")]
enum RawFrom {
    One(String),
    Several(BTreeMap<String, String>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected the number of an axis, or an expression")]
enum RawAxis {
    Number(i64),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected true, false or a condition")]
enum RawCondition {
    Bool(bool),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStack {
    var: Text,
    over: Option<Text>,
    axis: Option<Spanned<RawAxis>>,
    #[serde(default)]
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLeaf {
    to: Text,
    from: Option<Spanned<RawFrom>>,
    view: Option<Text>,
    axes: Option<Text>,
    #[serde(default)]
    stack: Vec<RawStack>,
    #[serde(default)]
    each: BTreeMap<String, Text>,
    when: Option<Text>,
    #[serde(default)]
    optional: bool,
    dtype: Option<Text>,
    tp: Option<usize>,
    experts: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected the name of a group, or a list of names")]
enum RawGroups {
    One(String),
    Several(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPlace {
    group: Spanned<RawGroups>,
    #[serde(default)]
    to: Option<Text>,
    #[serde(default)]
    from: Option<Text>,
    #[serde(default)]
    stack: Vec<RawStack>,
    #[serde(default)]
    each: BTreeMap<String, Text>,
    #[serde(default, rename = "let")]
    bindings: BTreeMap<String, Text>,
    when: Option<Text>,
    bare: Option<Text>,
}

/// An expression, and the line on which it stands.
#[derive(Clone, Debug)]
struct Placed<T> {
    it: T,
    line: usize,
}

#[derive(Clone, Debug)]
struct Stack {
    var: Arc<str>,
    over: Option<Placed<(Expr, Expr)>>,
    axis: Option<Placed<Expr>>,
    name: String,
    line: usize,
}

type Each = Vec<(Arc<str>, Placed<(Expr, Expr)>)>;

#[derive(Clone, Debug)]
struct Leaf {
    to: Placed<Template>,
    from: Vec<(Arc<str>, Template)>,
    from_line: usize,
    view: Option<Placed<Expr>>,
    axes: Option<Vec<String>>,
    stack: Vec<Stack>,
    each: Each,
    when: Option<Placed<Expr>>,
    optional: bool,
    dtype: Option<Option<DType>>,
    tp: Option<usize>,
    experts: Option<usize>,
}

#[derive(Clone, Debug)]
struct Place {
    groups: Vec<String>,
    to: Option<Placed<Template>>,
    from: Option<Placed<Template>>,
    stack: Vec<Stack>,
    each: Each,
    /// Names for expressions over the variables of `each`.
    bindings: Vec<(Arc<str>, Placed<Expr>)>,
    when: Option<Placed<Expr>>,
    bare: Vec<String>,
}

#[derive(Clone, Debug)]
struct Ignore {
    names: Placed<Template>,
    when: Option<Placed<Expr>>,
    each: Each,
}

/// A layout file, read and checked.
#[derive(Clone, Debug)]
pub struct LayoutFile {
    /// Where it comes from, for messages.
    label: String,
    text: String,
    name: String,
    description: String,
    verified: Option<Placed<Expr>>,
    model_types: Vec<String>,
    dtype: Option<DType>,
    flat: bool,
    logical: bool,
    rules: LogicalRules,
    params: BTreeMap<String, Placed<Expr>>,
    vars: BTreeMap<String, Placed<Expr>>,
    aliases: Vec<(String, Vec<String>)>,
    ignores: Vec<Ignore>,
    leaves: Vec<Leaf>,
    groups: BTreeMap<String, Vec<Leaf>>,
    places: Vec<Place>,
}

impl PartialEq for LayoutFile {
    fn eq(&self, other: &Self) -> bool {
        self.label == other.label && self.text == other.text
    }
}

impl Eq for LayoutFile {}

/// What a layout makes of a repository.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The leaves.
    pub drafts: Vec<Draft>,
    /// The parameters and their values, as text.
    pub params: Vec<(String, String)>,
    /// Whether the result has been compared with that of the program that the layout imitates, as far as the file says.
    pub verified: bool,
    /// Things worth knowing that are no errors.
    pub warnings: Vec<String>,
}

/// What is accepted although it is not as the layout says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allowed {
    /// Leaves whose sources are missing are left out.
    pub missing: Allow,
    /// Tensors that no rule names are left out.
    pub unmapped: Allow,
}

/// Collects what is wrong while a file is read.
struct Reader<'a> {
    label: &'a str,
    text: &'a str,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|byte| **byte == b'\n').count()
    }

    fn problem(&mut self, line: usize, reason: impl ToString) {
        self.problems.push(Problem::File { file: format!("{}:{line}", self.label), reason: reason.to_string() });
    }

    fn parse<T>(&mut self, text: &Text, parse: impl FnOnce(&str) -> Result<T, SyntaxError>) -> Option<Placed<T>> {
        let line = self.line(text.span().start);
        match parse(text.get_ref()) {
            Ok(it) => Some(Placed { it, line }),
            Err(error) => {
                self.problem(line, format!("{:?}: {error}", text.get_ref()));
                None
            }
        }
    }

    fn expr(&mut self, text: &Text) -> Option<Placed<Expr>> {
        self.parse(text, Expr::parse)
    }

    fn template(&mut self, text: &Text) -> Option<Placed<Template>> {
        self.parse(text, Template::parse)
    }

    fn each(&mut self, each: &BTreeMap<String, Text>) -> Each {
        each.iter()
            .filter_map(|(var, over)| Some((var.as_str().into(), self.parse(over, Expr::parse_range)?)))
            .collect()
    }

    fn stacks(&mut self, stacks: &[RawStack]) -> Vec<Stack> {
        stacks
            .iter()
            .map(|stack| {
                let axis = stack.axis.as_ref().and_then(|axis| {
                    let text = match axis.get_ref() {
                        RawAxis::Number(number) => number.to_string(),
                        RawAxis::Text(text) => text.clone(),
                    };
                    self.expr(&Spanned::new(axis.span(), text))
                });
                Stack {
                    var: stack.var.get_ref().as_str().into(),
                    over: stack.over.as_ref().and_then(|over| self.parse(over, Expr::parse_range)),
                    axis,
                    name: stack.name.trim_matches('_').to_owned(),
                    line: self.line(stack.var.span().start),
                }
            })
            .collect()
    }

    fn dtype(&mut self, text: &Text) -> Option<Option<DType>> {
        if text.get_ref() == "keep" {
            return Some(None);
        }
        let dtype = DType::from_user(text.get_ref()).filter(|dtype| dtype.is_float());
        if dtype.is_none() {
            let line = self.line(text.span().start);
            self.problem(line, format!("expected keep or a float type such as bf16, found {:?}", text.get_ref()));
        }
        dtype.map(Some)
    }

    fn leaf(&mut self, leaf: &RawLeaf) -> Option<Leaf> {
        let to = self.template(&leaf.to)?;
        let from_line = leaf.from.as_ref().map_or(to.line, |from| self.line(from.span().start));
        let named: Vec<(&str, &str)> = match leaf.from.as_ref().map(Spanned::get_ref) {
            None => Vec::new(),
            Some(RawFrom::One(name)) => vec![("x", name)],
            Some(RawFrom::Several(names)) => names.iter().map(|(name, from)| (name.as_str(), from.as_str())).collect(),
        };
        let mut from = Vec::new();
        for (name, text) in named {
            match Template::parse(text) {
                Ok(template) => from.push((name.into(), template)),
                Err(error) => self.problem(from_line, format!("{text:?}: {error}")),
            }
        }
        if leaf.view.is_none() && !matches!(leaf.from.as_ref().map(Spanned::get_ref), Some(RawFrom::One(_))) {
            self.problem(to.line, "without a single source there must be a view");
        }
        Some(Leaf {
            to,
            from,
            from_line,
            view: leaf.view.as_ref().and_then(|view| self.expr(view)),
            axes: leaf.axes.as_ref().map(|axes| words(axes.get_ref())),
            stack: self.stacks(&leaf.stack),
            each: self.each(&leaf.each),
            when: leaf.when.as_ref().and_then(|when| self.expr(when)),
            optional: leaf.optional,
            dtype: leaf.dtype.as_ref().and_then(|dtype| self.dtype(dtype)),
            tp: leaf.tp,
            experts: leaf.experts,
        })
    }

    fn place(&mut self, place: &RawPlace, groups: &BTreeMap<String, Vec<Leaf>>) -> Place {
        let names = match place.group.get_ref() {
            RawGroups::One(name) => vec![name.clone()],
            RawGroups::Several(names) => names.clone(),
        };
        for name in names.iter().filter(|name| !groups.contains_key(*name)) {
            let line = self.line(place.group.span().start);
            self.problem(line, format!("there is no group {name:?}"));
        }
        Place {
            groups: names,
            to: place.to.as_ref().and_then(|to| self.template(to)),
            from: place.from.as_ref().and_then(|from| self.template(from)),
            stack: self.stacks(&place.stack),
            each: self.each(&place.each),
            bindings: place
                .bindings
                .iter()
                .filter_map(|(name, text)| Some((name.as_str().into(), self.expr(text)?)))
                .collect(),
            when: place.when.as_ref().and_then(|when| self.expr(when)),
            bare: place.bare.as_ref().map_or_else(Vec::new, |bare| words(bare.get_ref())),
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|word| if word == "_" { String::new() } else { word.to_owned() }).collect()
}

impl LayoutFile {
    /// Reads a layout from a file.
    ///
    /// # Errors
    /// Everything wrong with it, naming file and line.
    pub fn open(path: &Path) -> Result<Self, PlanError> {
        let label = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Problem::File { file: label.clone(), reason: error.to_string() })?;
        Self::parse(&label, &text)
    }

    /// Reads a layout; `label` is what messages call the file.
    ///
    /// # Errors
    /// Everything wrong with it, naming file and line.
    pub fn parse(label: &str, text: &str) -> Result<Self, PlanError> {
        let mut reader = Reader { label, text, problems: Vec::new() };
        let raw: RawFile = match toml::from_str(text) {
            Ok(raw) => raw,
            Err(error) => {
                let line = error.span().map_or(1, |span| reader.line(span.start));
                reader.problem(line, error.message());
                return Err(PlanError { problems: reader.problems });
            }
        };
        let named = |reader: &mut Reader<'_>, map: &BTreeMap<String, Text>| -> BTreeMap<_, _> {
            map.iter().filter_map(|(name, text)| Some((name.clone(), reader.expr(text)?))).collect()
        };
        let params = named(&mut reader, &raw.params);
        let vars = named(&mut reader, &raw.vars);
        for (name, var) in vars.iter().filter(|(name, _)| params.contains_key(*name)) {
            reader.problem(var.line, format!("{name:?} is a parameter and a variable"));
        }
        let leaves = raw.leaf.iter().filter_map(|leaf| reader.leaf(leaf)).collect();
        let mut groups = BTreeMap::new();
        for (name, leaves) in &raw.group {
            groups.insert(name.clone(), leaves.iter().filter_map(|leaf| reader.leaf(leaf)).collect());
        }
        let places: Vec<Place> = raw.place.iter().map(|place| reader.place(place, &groups)).collect();
        let ignores = raw.ignore.iter().filter_map(|ignore| {
            let when = ignore.when.as_ref().and_then(|when| reader.expr(when));
            Some(Ignore { names: reader.template(&ignore.names)?, when, each: reader.each(&ignore.each) })
        });
        let ignores = ignores.collect();
        let mut rules = LogicalRules::default();
        if let Some(base) = &raw.rules {
            if base.get_ref() == "maxtext" {
                rules = LogicalRules::maxtext();
            } else {
                let line = reader.line(base.span().start);
                reader.problem(line, format!("rules: expected \"maxtext\", found {:?}", base.get_ref()));
            }
        }
        rules.replace(&raw.rule);
        let dtype = raw.dtype.as_ref().and_then(|dtype| reader.dtype(dtype)).flatten();
        let verified = raw.verified.as_ref().and_then(|condition| {
            let text = match condition.get_ref() {
                RawCondition::Bool(known) => known.to_string(),
                RawCondition::Text(text) => text.clone(),
            };
            reader.expr(&Spanned::new(condition.span(), text))
        });
        let file = Self {
            label: label.to_owned(),
            text: text.to_owned(),
            name: raw.name,
            description: raw.description,
            verified,
            model_types: raw.model_types,
            dtype,
            flat: raw.flat,
            logical: raw.logical,
            rules,
            params,
            vars,
            aliases: raw.alias.into_iter().map(|alias| (alias.name, alias.on_disk)).collect(),
            ignores,
            leaves,
            groups,
            places,
        };
        file.check_names(&mut reader);
        if reader.problems.is_empty() { Ok(file) } else { Err(PlanError { problems: reader.problems }) }
    }

    /// Reports names that nothing can have, so that a slip is found without a repository that meets it.
    fn check_names(&self, reader: &mut Reader<'_>) {
        let known = |name: &str| self.params.contains_key(name) || self.vars.contains_key(name);
        let mut found: BTreeSet<(usize, String)> = BTreeSet::new();
        let mut check = |line: usize, locals: &[&str], names: &dyn Fn(&mut dyn FnMut(&str))| {
            names(&mut |name| {
                if !known(name) && !locals.contains(&name) {
                    found.insert((line, name.to_owned()));
                }
            });
        };
        for definition in self.params.values().chain(self.vars.values()) {
            check(definition.line, &[], &|visit| definition.it.for_each_name(visit));
        }
        for ignore in &self.ignores {
            let locals: Vec<&str> = ignore.each.iter().map(|(var, _)| var.as_ref()).collect();
            check(ignore.names.line, &locals, &|visit| ignore.names.it.for_each_name(visit));
            ignore.when.iter().for_each(|when| check(when.line, &locals, &|visit| when.it.for_each_name(visit)));
        }
        let nowhere = Place {
            groups: Vec::new(),
            to: None,
            from: None,
            stack: Vec::new(),
            each: Vec::new(),
            bindings: Vec::new(),
            when: None,
            bare: Vec::new(),
        };
        let placed = self.places.iter().flat_map(|place| {
            place.groups.iter().flat_map(|group| self.groups.get(group)).flatten().map(move |leaf| (place, leaf))
        });
        for (place, leaf) in self.leaves.iter().map(|leaf| (&nowhere, leaf)).chain(placed) {
            let mut each: Vec<&str> = place.each.iter().chain(&leaf.each).map(|(var, _)| var.as_ref()).collect();
            for (name, binding) in &place.bindings {
                check(binding.line, &each, &|visit| binding.it.for_each_name(visit));
                each.push(name);
            }
            for (_, over) in place.each.iter().chain(&leaf.each) {
                check(over.line, &[], &|visit| over.it.0.for_each_name(visit));
                check(over.line, &[], &|visit| over.it.1.for_each_name(visit));
            }
            for template in place.to.iter().chain([&leaf.to]) {
                check(template.line, &each, &|visit| template.it.for_each_name(visit));
            }
            for when in place.when.iter().chain(&leaf.when) {
                check(when.line, &each, &|visit| when.it.for_each_name(visit));
            }
            let mut inner = each.clone();
            for stack in leaf.stack.iter().chain(&place.stack) {
                if let Some(over) = &stack.over {
                    check(over.line, &inner, &|visit| over.it.0.for_each_name(visit));
                    check(over.line, &inner, &|visit| over.it.1.for_each_name(visit));
                }
                let axis_names: Vec<&str> = each.iter().copied().chain(["rank", "outer"]).collect();
                stack.axis.iter().for_each(|axis| check(axis.line, &axis_names, &|visit| axis.it.for_each_name(visit)));
                inner.push(&stack.var);
            }
            if let Some(template) = &place.from {
                check(template.line, &inner, &|visit| template.it.for_each_name(visit));
            }
            leaf.from.iter().for_each(|(_, from)| check(leaf.from_line, &inner, &|visit| from.for_each_name(visit)));
            let sources: Vec<&str> = inner.iter().copied().chain(leaf.from.iter().map(|(name, _)| &**name)).collect();
            leaf.view.iter().for_each(|view| check(view.line, &sources, &|visit| view.it.for_each_name(visit)));
        }
        for (line, name) in found {
            reader.problem(line, format!("nothing is called {name:?}"));
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it comes from.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What it says of itself.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Values of `model_type` in `config.json` that it is for.
    pub fn model_types(&self) -> &[String] {
        &self.model_types
    }

    /// Dtype of floats where the user asks for none.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Whether each tensor is one file named by its whole dotted name.
    pub fn flat(&self) -> bool {
        self.flat
    }

    /// Whether specs come from logical axes unless the user says otherwise.
    pub fn shards_logically(&self) -> bool {
        self.logical
    }

    /// Its rules for logical axes.
    pub fn rules(&self) -> &LogicalRules {
        &self.rules
    }

    /// Names of its parameters.
    pub fn params(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }

    /// Resolves the layout against a repository. `set` holds parameters set by the user.
    ///
    /// # Errors
    /// Everything wrong, at once: missing and unexpected tensors, rules that do not fit, unknown parameters.
    pub fn resolve(
        &self,
        checkpoint: &Checkpoint,
        values: &Values<'_>,
        set: &BTreeMap<String, String>,
        allowed: Allowed,
    ) -> Result<Resolved, Vec<Problem>> {
        let mut problems = Vec::new();
        for name in set.keys().filter(|name| !self.params.contains_key(*name)) {
            let known: Vec<&str> = self.params().collect();
            problems.push(Problem::File {
                file: self.label.clone(),
                reason: format!("there is no parameter {name:?}; there are: {}", known.join(", ")),
            });
        }
        let set = set.iter().map(|(name, text)| (name.clone(), Value::of_text(text))).collect();
        let scope = Scope { file: self, checkpoint, set, known: RefCell::default() };
        for (name, definition) in self.params.iter().chain(&self.vars) {
            // What lacks something is an error only where it is needed.
            if let Err(error) = scope.global(name)
                && !is_absent(&error)
            {
                problems.push(self.problem(definition.line, "", &error));
            }
        }
        let mut resolver = Resolver {
            scope: &scope,
            values,
            allowed,
            used: vec![false; checkpoint.table().id_end()],
            drafts: Vec::new(),
            problems,
            warnings: Vec::new(),
        };
        if resolver.problems.is_empty() {
            resolver.run();
        }
        let params = self.params.keys().map(|name| {
            let value = scope.global(name).map_or_else(|_| "absent".to_owned(), |value| value.to_string());
            (name.clone(), value)
        });
        let params = params.collect();
        let verified = self.verified.as_ref().is_none_or(|verified| {
            let value =
                resolver.eval(verified, &[], |expr, names| Ok(Value::Bool(expr.eval(names)?.bool("verified")?)));
            matches!(value, Some(Value::Bool(true)))
        });
        let Resolver { drafts, problems, warnings, .. } = resolver;
        if problems.is_empty() { Ok(Resolved { drafts, params, verified, warnings }) } else { Err(problems) }
    }

    fn problem(&self, line: usize, target: &str, error: &EvalError) -> Problem {
        Problem::Layout { file: self.label.clone(), line, target: target.to_owned(), reason: error.to_string() }
    }
}

fn is_absent(error: &EvalError) -> bool {
    match error {
        EvalError::Absent(_) => true,
        EvalError::In { error, .. } => is_absent(error),
        EvalError::Name(_)
        | EvalError::Kind { .. }
        | EvalError::Range(_)
        | EvalError::Inexact(_)
        | EvalError::DType(_)
        | EvalError::Cycle(_)
        | EvalError::View(_) => false,
    }
}

/// The repository, and the values of parameters and variables.
struct Scope<'a> {
    file: &'a LayoutFile,
    checkpoint: &'a Checkpoint,
    set: BTreeMap<String, Value>,
    /// Values worked out; `None` while one is.
    known: RefCell<HashMap<String, Option<Result<Value, EvalError>>>>,
}

impl Scope<'_> {
    fn global(&self, name: &str) -> Result<Value, EvalError> {
        if let Some(known) = self.known.borrow().get(name) {
            return known.clone().unwrap_or_else(|| Err(EvalError::Cycle(name.to_owned())));
        }
        let definition = self.file.params.get(name).or_else(|| self.file.vars.get(name));
        let Some(definition) = definition else { return Err(EvalError::Name(name.to_owned())) };
        let value = match self.set.get(name) {
            Some(value) => Ok(value.clone()),
            None => {
                self.known.borrow_mut().insert(name.to_owned(), None);
                let value = definition.it.eval(&Local { scope: self, bound: &[] });
                value.map_err(|error| EvalError::In { name: name.to_owned(), error: Box::new(error) })
            }
        };
        self.known.borrow_mut().insert(name.to_owned(), Some(value.clone()));
        value
    }

    /// The tensor of a name or of one that is tried for it.
    fn find(&self, name: &str) -> Option<TensorId> {
        self.checkpoint.find(name).or_else(|| self.on_disk(name).find_map(|name| self.checkpoint.find(&name)))
    }

    fn on_disk(&self, name: &str) -> impl Iterator<Item = String> {
        self.file.aliases.iter().flat_map(move |(prefix, others)| {
            let rest = name.strip_prefix(prefix.as_str());
            others.iter().filter_map(move |other| rest.map(|rest| format!("{other}{rest}")))
        })
    }

    fn count(&self, pattern: &str) -> u64 {
        let one = |pattern: &str| -> u64 {
            let Some((before, after)) = pattern.split_once('*') else { return 0 };
            let numbers = self.checkpoint.table().with_prefix(before).filter_map(|id| {
                let middle = self.checkpoint.tensor(id).name.strip_prefix(before)?.strip_suffix(after)?;
                let digits = !middle.is_empty() && middle.bytes().all(|byte| byte.is_ascii_digit());
                if digits { middle.parse::<u64>().ok()?.checked_add(1) } else { None }
            });
            numbers.max().unwrap_or(0)
        };
        std::iter::once(pattern.to_owned())
            .chain(self.on_disk(pattern))
            .map(|pattern| one(&pattern))
            .find(|count| *count > 0)
            .unwrap_or(0)
    }
}

/// A scope with the values of loops and sources.
struct Local<'a> {
    scope: &'a Scope<'a>,
    bound: &'a [(Arc<str>, Value)],
}

impl Names for Local<'_> {
    fn name(&self, name: &str) -> Result<Value, EvalError> {
        let bound = self.bound.iter().rev().find(|(bound, _)| **bound == *name);
        bound.map_or_else(|| self.scope.global(name), |(_, value)| Ok(value.clone()))
    }

    fn config(&self, path: &[String]) -> Option<Value> {
        let config = self.scope.checkpoint.config()?;
        let text = self.scope.checkpoint.dialect().text_config.as_deref().and_then(|name| config.get(name));
        let walk = |root: &serde_json::Value| -> Option<Value> {
            Value::of_json(path.iter().try_fold(root, |value, member| value.get(member))?)
        };
        text.and_then(walk).or_else(|| walk(config))
    }

    fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
        self.scope.find(tensor).map(|id| self.scope.checkpoint.tensor(id).shape.to_vec())
    }

    fn count(&self, pattern: &str) -> u64 {
        self.scope.count(pattern)
    }
}

/// Why a leaf is not there.
enum Failure {
    /// A source is missing.
    Missing,
    /// It would be stacked over nothing.
    Empty,
    /// A rule does not fit.
    Rule(usize, EvalError),
    /// A source has no such values.
    Source(Problem),
}

struct Resolver<'a> {
    scope: &'a Scope<'a>,
    values: &'a Values<'a>,
    allowed: Allowed,
    used: Vec<bool>,
    drafts: Vec<Draft>,
    problems: Vec<Problem>,
    warnings: Vec<String>,
}

/// One leaf while it is made.
struct Making<'a> {
    leaf: &'a Leaf,
    place: Option<&'a Place>,
    name: String,
    bound: Vec<(Arc<str>, Value)>,
    /// Stacks, outermost first.
    stacks: Vec<&'a Stack>,
    /// Numbers of the stacked axes in the finished leaf, once known.
    axes: Option<Vec<usize>>,
    missing: Vec<String>,
    found: Vec<TensorId>,
}

impl<'a> Resolver<'a> {
    fn run(&mut self) {
        let file = self.scope.file;
        for leaf in &file.leaves {
            self.rule(None, leaf, &[]);
        }
        for place in &file.places {
            for mut bound in self.instances(&place.each, place.when.as_ref(), &[]) {
                for (name, binding) in &place.bindings {
                    if let Some(value) = self.eval(binding, &bound, |expr, names| expr.eval(names)) {
                        bound.push((name.clone(), value));
                    }
                }
                for leaf in place.groups.iter().flat_map(|group| &file.groups[group]) {
                    self.rule(Some(place), leaf, &bound);
                }
            }
        }
        self.unexpected();
    }

    fn eval<T>(
        &mut self,
        placed: &Placed<T>,
        bound: &[(Arc<str>, Value)],
        eval: impl FnOnce(&T, &dyn Names) -> Result<Value, EvalError>,
    ) -> Option<Value> {
        let result = eval(&placed.it, &Local { scope: self.scope, bound });
        result.map_err(|error| self.add(self.scope.file.problem(placed.line, "", &error))).ok()
    }

    /// Adds a problem unless it is there already, as happens when one rule fails for every layer.
    fn add(&mut self, problem: Problem) {
        if self.problems.last() != Some(&problem) && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn range(&self, range: &Placed<(Expr, Expr)>, bound: &[(Arc<str>, Value)]) -> Result<Range<u64>, Failure> {
        let local = Local { scope: self.scope, bound };
        let number = |expr: &Expr| expr.eval(&local)?.natural("range");
        let range = number(&range.it.0).and_then(|start| Ok(start..number(&range.it.1)?));
        let range = range.map_err(|error| (error, ()));
        match range {
            Ok(range) if range.end.saturating_sub(range.start) <= RANGE_MAX => Ok(range),
            Ok(_) => Err(Failure::Rule(0, EvalError::Range("range"))),
            Err((error, ())) => Err(Failure::Rule(0, error)),
        }
    }

    /// All bindings of the variables of `each` for which the condition holds.
    fn instances(
        &mut self,
        each: &Each,
        when: Option<&Placed<Expr>>,
        outer: &[(Arc<str>, Value)],
    ) -> Vec<Vec<(Arc<str>, Value)>> {
        let mut all = vec![outer.to_vec()];
        for (var, over) in each {
            let range = match self.range(over, outer) {
                Ok(range) => range,
                Err(Failure::Rule(_, error)) => {
                    self.add(self.scope.file.problem(over.line, "", &error));
                    return Vec::new();
                }
                Err(Failure::Missing | Failure::Empty | Failure::Source(_)) => return Vec::new(),
            };
            let extended = all.iter().flat_map(|bound| {
                range.clone().map(|number| {
                    let mut bound = bound.clone();
                    bound.push((var.clone(), int(number)));
                    bound
                })
            });
            all = extended.collect();
        }
        let Some(when) = when else { return all };
        let mut kept = Vec::new();
        for bound in all {
            match self.eval(when, &bound, |expr, names| Ok(Value::Bool(expr.eval(names)?.bool("when")?))) {
                Some(Value::Bool(true)) => kept.push(bound),
                Some(_) => {}
                None => return Vec::new(),
            }
        }
        kept
    }

    fn rule(&mut self, place: Option<&'a Place>, leaf: &'a Leaf, outer: &[(Arc<str>, Value)]) {
        for bound in self.instances(&leaf.each, leaf.when.as_ref(), outer) {
            let text = |template: &Template, names: &dyn Names| Ok(Value::Text(template.eval(names)?.into()));
            let Some(name) = self.eval(&leaf.to, &bound, text) else { return };
            let prefix = match place.and_then(|place| place.to.as_ref()) {
                None => String::new(),
                Some(to) => match self.eval(to, &bound, text) {
                    Some(prefix) => prefix.to_string(),
                    None => return,
                },
            };
            let stacks = leaf.stack.iter().chain(place.map_or(&[][..], |place| &place.stack)).collect();
            let name = joined(&prefix, &name.to_string());
            let mut making =
                Making { leaf, place, name, bound, stacks, axes: None, missing: Vec::new(), found: Vec::new() };
            let view = self.level(&mut making, 0);
            self.finish(making, view);
        }
    }

    fn finish(&mut self, making: Making<'_>, view: Result<View, Failure>) {
        let Making { leaf, name, missing, found, .. } = &making;
        // A leaf that cannot be made has used what it found: it is the reason, not its other sources.
        for id in found {
            self.used[id.0 as usize] = true;
        }
        if !missing.is_empty() {
            if leaf.optional && found.is_empty() {
                return;
            }
            if missing.iter().all(|source| self.allowed.missing.accepts(source)) {
                self.warnings.push(format!("{name} is left out: missing tensor {}", missing[0]));
                return;
            }
            for source in missing {
                self.add(Problem::MissingTensor { name: source.clone(), for_target: name.clone() });
            }
            return;
        }
        match view {
            Ok(view) => {
                let draft = making.draft(view);
                self.drafts.push(draft);
            }
            Err(Failure::Empty | Failure::Missing) => {}
            Err(Failure::Source(problem)) => self.add(problem),
            Err(Failure::Rule(line, error)) => {
                let line = if line == 0 { leaf.to.line } else { line };
                // One rule that fails for every layer is said once, for the first of them.
                let text = error.to_string();
                let said = self.problems.iter().any(|known| {
                    matches!(known, Problem::Layout { line: known, reason, .. } if *known == line && *reason == text)
                });
                if !said {
                    self.add(self.scope.file.problem(line, name, &error));
                }
            }
        }
    }

    /// The view from a level of stacks inwards.
    fn level(&self, making: &mut Making<'_>, level: usize) -> Result<View, Failure> {
        let Some(stack) = making.stacks.get(level).copied() else { return self.slice(making) };
        let range = match &stack.over {
            Some(over) => self.range(over, &making.bound).map_err(|failure| match failure {
                Failure::Rule(_, error) => Failure::Rule(over.line, error),
                other => other,
            })?,
            None => self.numbers(making, stack)?,
        };
        let mut children = Vec::with_capacity(usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0));
        let mut empty = false;
        for number in range {
            making.bound.push((stack.var.clone(), int(number)));
            let child = self.level(making, level + 1);
            making.bound.pop();
            match child {
                Ok(child) => children.push(child),
                // Others may be missing too: go on to name them all.
                Err(Failure::Missing) => {}
                Err(Failure::Empty) => empty = true,
                Err(failure) => return Err(failure),
            }
        }
        if !making.missing.is_empty() {
            return Err(Failure::Missing);
        }
        if empty || children.is_empty() {
            return Err(Failure::Empty);
        }
        let axis = self.axis(making, level, children[0].shape().rank())?;
        View::stack(axis, &children).map_err(|error| Failure::Rule(stack.line, error.into()))
    }

    /// Number of the axis that a level of stacks makes, among those of the levels inside it.
    fn axis(&self, making: &mut Making<'_>, level: usize, child_rank: usize) -> Result<usize, Failure> {
        if making.axes.is_none() {
            let levels = making.stacks.len();
            let rank = child_rank - (levels - 1 - level);
            let mut axes = Vec::with_capacity(levels);
            for (outer, stack) in making.stacks.iter().enumerate() {
                let Some(axis) = &stack.axis else {
                    axes.push(outer);
                    continue;
                };
                let mut bound = making.bound.clone();
                bound.push(("rank".into(), int(rank as u64)));
                bound.push(("outer".into(), int(outer as u64)));
                let number = axis.it.eval(&Local { scope: self.scope, bound: &bound });
                let number = number.and_then(|number| number.natural("axis"));
                let number = number.map_err(|error| Failure::Rule(axis.line, error))?;
                let number = usize::try_from(number).ok().filter(|number| *number < rank + levels);
                match number.filter(|number| !axes.contains(number)) {
                    Some(number) => axes.push(number),
                    None => return Err(Failure::Rule(axis.line, EvalError::Range("axis"))),
                }
            }
            making.axes = Some(axes);
        }
        let axes = making.axes.as_deref().unwrap_or_default();
        Ok(axes[level] - axes[..level].iter().filter(|outer| **outer < axes[level]).count())
    }

    /// All numbers of a variable that the repository has, from 0.
    fn numbers(&self, making: &Making<'_>, stack: &Stack) -> Result<Range<u64>, Failure> {
        let mut bound = making.bound.clone();
        bound.push((stack.var.clone(), Value::Text("*".into())));
        // Stacks further in have no number yet: any will do, and layers and experts start at 0 or the range says so.
        let at = making.stacks.iter().position(|other| std::ptr::eq(*other, stack)).unwrap_or(0);
        for inner in &making.stacks[at + 1..] {
            let first = inner.over.as_ref().map_or(Ok(0), |over| self.range(over, &bound).map(|range| range.start))?;
            bound.push((inner.var.clone(), int(first)));
        }
        let Some((_, first)) = making.leaf.from.first() else { return Ok(0..0) };
        let name = self.source_name(making, first, &bound)?;
        Ok(0..self.scope.count(&name).min(RANGE_MAX))
    }

    fn source_name(
        &self,
        making: &Making<'_>,
        template: &Template,
        bound: &[(Arc<str>, Value)],
    ) -> Result<String, Failure> {
        let local = Local { scope: self.scope, bound };
        let name = template.eval(&local).map_err(|error| Failure::Rule(making.leaf.from_line, error))?;
        let Some(from) = making.place.and_then(|place| place.from.as_ref()) else { return Ok(name) };
        let prefix = from.it.eval(&local).map_err(|error| Failure::Rule(from.line, error))?;
        Ok(joined(&prefix, &name))
    }

    /// What is stacked: the view over one set of sources.
    fn slice(&self, making: &mut Making<'_>) -> Result<View, Failure> {
        let leaf = making.leaf;
        let before = making.missing.len();
        let mut sources = Vec::with_capacity(leaf.from.len());
        for (name, template) in &leaf.from {
            let source = self.source_name(making, template, &making.bound)?;
            let Some(id) = self.scope.find(&source) else {
                making.missing.push(source);
                continue;
            };
            making.found.push(id);
            let found = self.scope.checkpoint.tensor(id).name;
            let dtype = leaf.dtype.unwrap_or_else(|| self.values.dtype_of(&[found, &source, &making.name]));
            if let (Some((scale, _)), Some(_)) = (self.values.scale_of(id), dtype) {
                making.found.push(scale);
            }
            sources.push((name.clone(), self.values.view(id, dtype).map_err(Failure::Source)?));
        }
        if making.missing.len() > before {
            return Err(Failure::Missing);
        }
        let Some(view) = &leaf.view else { return sources.pop().map(|(_, view)| view).ok_or(Failure::Empty) };
        let outside = making.bound.len();
        making.bound.extend(sources.into_iter().map(|(name, view)| (name, Value::View(view))));
        let value = view.it.eval(&Local { scope: self.scope, bound: &making.bound });
        making.bound.truncate(outside);
        value.and_then(|value| value.view("view").cloned()).map_err(|error| Failure::Rule(view.line, error))
    }

    /// Reports the tensors that no rule uses and none ignores.
    fn unexpected(&mut self) {
        let mut ignored = Vec::new();
        for ignore in &self.scope.file.ignores {
            for bound in self.instances(&ignore.each, ignore.when.as_ref(), &[]) {
                let text = |template: &Template, names: &dyn Names| Ok(Value::Text(template.eval(names)?.into()));
                let Some(text) = self.eval(&ignore.names, &bound, text) else { continue };
                match Pattern::parse(&text.to_string()) {
                    Ok(pattern) => ignored.push(pattern),
                    Err(error) => self.problems.push(Problem::Layout {
                        file: self.scope.file.label.clone(),
                        line: ignore.names.line,
                        target: String::new(),
                        reason: error.to_string(),
                    }),
                }
            }
        }
        for (id, info) in self.scope.checkpoint.tensors() {
            if self.used[id.0 as usize] || ignored.iter().any(|pattern| pattern.matches(info.name)) {
                continue;
            }
            let problem = Problem::UnexpectedTensor { name: info.name.to_owned() };
            if self.allowed.unmapped.accepts(info.name) {
                self.warnings.push(format!("{problem}: left out"));
            } else {
                self.problems.push(problem);
            }
        }
    }
}

impl Making<'_> {
    fn draft(self, view: View) -> Draft {
        let stacked = self.axes.unwrap_or_default();
        let rank = view.shape().rank();
        let own: Vec<usize> = (0..rank).filter(|axis| !stacked.contains(axis)).collect();
        let logical = match &self.leaf.axes {
            None => Vec::new(),
            // A leaf without names of its own: the place says what is then called how.
            Some(axes) if axes.is_empty() => self.place.map_or_else(Vec::new, |place| place.bare.clone()),
            Some(axes) => {
                let mut names = vec![String::new(); rank];
                for (at, name) in own.iter().zip(axes) {
                    names[*at].clone_from(name);
                }
                for (at, stack) in stacked.iter().zip(&self.stacks) {
                    names[*at].clone_from(&stack.name);
                }
                names
            }
        };
        let stacked_experts = self.stacks.iter().position(|stack| EXPERT_WORDS.contains(&stack.name.as_str()));
        let stacked_experts = stacked_experts.and_then(|at| stacked.get(at).copied());
        let roles = Roles {
            stacked: own.first().copied().unwrap_or(rank),
            tp: self.leaf.tp.and_then(|axis| own.get(axis).copied()),
            experts: self.leaf.experts.and_then(|axis| own.get(axis).copied()).or(stacked_experts),
            expert: None,
            logical,
        };
        Draft { name: self.name, view, roles, bundled: Bundled::ALWAYS, layers: None }
    }
}

fn int(number: u64) -> Value {
    Value::Int(i64::try_from(number).unwrap_or(i64::MAX))
}

fn joined(prefix: &str, name: &str) -> String {
    if prefix.is_empty() || name.is_empty() { format!("{prefix}{name}") } else { format!("{prefix}.{name}") }
}
