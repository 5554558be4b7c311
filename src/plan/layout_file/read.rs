//! Reading a layout file: serde reads the TOML, then its expressions are parsed and every name is checked. A slip is
//! found without a repository that triggers it.

use std::{collections::BTreeMap, sync::Arc};

use ckfs_config::{did_you_mean, float_of};
use serde::Deserialize;
use toml::Spanned;

use super::{
    super::{
        expr::{Expr, SyntaxError, TextTemplate, function_names},
        logical::{LogicalRule, LogicalRules},
        problem::{PlanError, Problem},
        text_model::TextModel,
    },
    AtLine, Check, Each, Extents, Ignore, LayoutFile, LeafDtype, LeafRule, Placement, Span, Stack,
    names::{UnknownName, unknown_names},
    place,
};

type Text = Spanned<String>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    name: String,
    #[serde(default, rename = "description")]
    _description: String,
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
    sharded_state: bool,
    #[serde(default)]
    rules: Option<Text>,
    #[serde(default)]
    params: BTreeMap<String, Text>,
    #[serde(default)]
    vars: BTreeMap<String, Text>,
    #[serde(default)]
    inverse: BTreeMap<String, Text>,
    #[serde(default)]
    text_model: Option<RawTextModel>,
    #[serde(default)]
    alias: Vec<RawAlias>,
    #[serde(default)]
    ignore: Vec<RawIgnore>,
    #[serde(default)]
    check: Vec<RawCheck>,
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
struct RawTextModel {
    model_type: String,
    architecture: String,
    #[serde(default)]
    names: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAlias {
    name: String,
    on_disk: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCheck {
    that: Text,
    say: Text,
    #[serde(default)]
    warn: bool,
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
#[serde(untagged, expecting = "expected the extents of a source, or a table of them by the names of sources")]
enum RawShape {
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
    shape: Option<Spanned<RawShape>>,
    view: Option<Text>,
    after_stack: Option<Text>,
    axes: Option<Text>,
    #[serde(default)]
    stack: Vec<RawStack>,
    #[serde(default)]
    each: BTreeMap<String, Text>,
    when: Option<Text>,
    stage: Option<Text>,
    #[serde(default)]
    optional: bool,
    #[serde(default)]
    copy: bool,
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
    stage: Option<Text>,
    bare: Option<Text>,
}

/// Collects problems while a file is read.
struct LayoutReader<'a> {
    label: &'a str,
    text: &'a str,
    problems: Vec<Problem>,
}

impl LayoutReader<'_> {
    fn line(&self, at: usize) -> usize {
        place::line(self.text, at)
    }

    fn problem(&mut self, at: Span, reason: impl Into<String>) {
        self.problems.push(place::problem((self.label, self.text), at, String::new(), reason.into()));
    }

    fn word(&self, at: Span, word: &str) -> Span {
        place::word(self.text, at, word)
    }

    fn named(&mut self, map: &BTreeMap<String, Text>) -> BTreeMap<String, AtLine<Expr>> {
        map.iter().filter_map(|(name, text)| Some((name.clone(), self.expr(text)?))).collect()
    }

    /// Reports variables with the name of a parameter, and inverses of nothing.
    fn check_definitions(
        &mut self,
        params: &BTreeMap<String, AtLine<Expr>>,
        vars: &BTreeMap<String, AtLine<Expr>>,
        inverse: &BTreeMap<String, AtLine<Expr>>,
    ) {
        for (name, var) in vars.iter().filter(|(name, _)| params.contains_key(*name)) {
            self.problem(var.at, format!("{name:?} is a parameter and a variable"));
        }
        let has = |name: &String| params.contains_key(name) || vars.contains_key(name);
        for (name, definition) in inverse.iter().filter(|(name, _)| !has(name)) {
            let near =
                did_you_mean("parameter or variable", name, params.keys().chain(vars.keys()).map(String::as_str));
            let reason = near.unwrap_or_else(|| format!("there is no parameter or variable {name:?}"));
            self.problem(definition.at, reason);
        }
    }

    /// The rules that split logical axes.
    fn rules(&mut self, raw: &RawFile) -> LogicalRules {
        let mut rules = LogicalRules::default();
        if let Some(base) = &raw.rules {
            if base.get_ref() == "maxtext" {
                rules = LogicalRules::maxtext();
            } else {
                self.problem(span(base), format!("rules: expected \"maxtext\", found {:?}", base.get_ref()));
            }
        }
        rules.replace(&raw.rule);
        rules
    }

    /// A condition: true, false, or an expression.
    fn condition(&mut self, condition: &Spanned<RawCondition>) -> Option<AtLine<Expr>> {
        let text = match condition.get_ref() {
            RawCondition::Bool(known) => known.to_string(),
            RawCondition::Text(text) => text.clone(),
        };
        self.expr(&Spanned::new(condition.span(), text))
    }

    /// Reports a text that is no expression.
    fn malformed(&mut self, at: Span, text: &str, error: &SyntaxError) {
        let (part, near) = match error {
            SyntaxError::Function(name) => (self.word(at, name), did_you_mean("function", name, function_names())),
            SyntaxError::Expected { at: found, .. } => {
                let start = self.text.get(at.0..at.1).and_then(|text| text.rfind(found.as_str()));
                // A text that is not there is the end: the mark is below the closing quote.
                let part = start.map_or((at.1.saturating_sub(1).max(at.0), at.1), |start| {
                    (at.0 + start, at.0 + start + found.len())
                });
                (part, None)
            }
            SyntaxError::Arguments { function, .. } => (self.word(at, function), None),
            SyntaxError::Depth => (at, None),
        };
        self.problem(part, near.unwrap_or_else(|| format!("{text:?}: {error}")));
    }

    fn parse<T>(&mut self, text: &Text, parse: impl FnOnce(&str) -> Result<T, SyntaxError>) -> Option<AtLine<T>> {
        let at = span(text);
        match parse(text.get_ref()) {
            Ok(it) => Some(AtLine { it, line: self.line(at.0), at }),
            Err(error) => {
                self.malformed(at, text.get_ref(), &error);
                None
            }
        }
    }

    fn expr(&mut self, text: &Text) -> Option<AtLine<Expr>> {
        self.parse(text, Expr::parse)
    }

    fn template(&mut self, text: &Text) -> Option<AtLine<TextTemplate>> {
        self.parse(text, TextTemplate::parse)
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
                    at: span(&stack.var),
                }
            })
            .collect()
    }

    fn dtype(&mut self, text: &Text) -> Option<LeafDtype> {
        if text.get_ref() == "keep" {
            return Some(LeafDtype::Source);
        }
        match float_of(text.get_ref(), "keep") {
            Ok(dtype) => Some(LeafDtype::As(dtype)),
            Err(near) => {
                let other = || format!("expected keep or a float type such as bf16, found {:?}", text.get_ref());
                self.problem(span(text), near.unwrap_or_else(other));
                None
            }
        }
    }

    fn leaf(&mut self, leaf: &RawLeaf) -> Option<LeafRule> {
        let to = self.template(&leaf.to)?;
        let from_at = leaf.from.as_ref().map_or(to.at, span);
        let from_line = self.line(from_at.0);
        let named: Vec<(&str, &str)> = match leaf.from.as_ref().map(Spanned::get_ref) {
            None => Vec::new(),
            Some(RawFrom::One(name)) => vec![("x", name)],
            Some(RawFrom::Several(names)) => names.iter().map(|(name, from)| (name.as_str(), from.as_str())).collect(),
        };
        let mut from = Vec::new();
        for (name, text) in named {
            match TextTemplate::parse(text) {
                Ok(template) => from.push((name.into(), template)),
                Err(error) => self.malformed(from_at, text, &error),
            }
        }
        let shape = self.shapes(leaf.shape.as_ref(), &from);
        if leaf.view.is_none() && !matches!(leaf.from.as_ref().map(Spanned::get_ref), Some(RawFrom::One(_))) {
            self.problem(to.at, "without a single source there must be a view");
        }
        Some(LeafRule {
            to,
            from,
            from_line,
            from_at,
            shape,
            view: leaf.view.as_ref().and_then(|view| self.expr(view)),
            after_stack: leaf.after_stack.as_ref().and_then(|view| self.expr(view)),
            axes: leaf.axes.as_ref().map(|axes| words(axes.get_ref())),
            stack: self.stacks(&leaf.stack),
            each: self.each(&leaf.each),
            when: leaf.when.as_ref().and_then(|when| self.expr(when)),
            stage: leaf.stage.as_ref().and_then(|stage| self.expr(stage)),
            optional: leaf.optional,
            is_copy: leaf.copy,
            dtype: leaf.dtype.as_ref().and_then(|dtype| self.dtype(dtype)),
            tp: leaf.tp,
            experts: leaf.experts,
        })
    }

    fn shapes(
        &mut self,
        shape: Option<&Spanned<RawShape>>,
        from: &[(Arc<str>, TextTemplate)],
    ) -> Vec<(Arc<str>, AtLine<Extents>)> {
        let Some(shape) = shape else { return Vec::new() };
        let at = span(shape);
        let line = self.line(at.0);
        let named: Vec<(&str, &str)> = match shape.get_ref() {
            RawShape::One(extents) => vec![("x", extents)],
            RawShape::Several(shapes) => shapes.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
        };
        let mut shapes = Vec::new();
        for (name, text) in named {
            let Some((name, _)) = from.iter().find(|(known, _)| **known == *name) else {
                let near = did_you_mean("source", name, from.iter().map(|(known, _)| &**known));
                let part = self.word(at, name);
                self.problem(part, near.unwrap_or_else(|| format!("shape: there is no source {name:?}")));
                continue;
            };
            match Expr::parse_list(text) {
                Ok(it) => shapes.push((name.clone(), AtLine { it, line, at })),
                Err(error) => self.malformed(at, text, &error),
            }
        }
        shapes
    }

    fn place(&mut self, place: &RawPlace, groups: &BTreeMap<String, Vec<LeafRule>>) -> Placement {
        let names = match place.group.get_ref() {
            RawGroups::One(name) => vec![name.clone()],
            RawGroups::Several(names) => names.clone(),
        };
        for name in names.iter().filter(|name| !groups.contains_key(*name)) {
            let near = did_you_mean("group", name, groups.keys().map(String::as_str));
            let part = self.word(span(&place.group), name);
            self.problem(part, near.unwrap_or_else(|| format!("there is no group {name:?}")));
        }
        Placement {
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
            stage: place.stage.as_ref().and_then(|stage| self.expr(stage)),
            bare: place.bare.as_ref().map_or_else(Vec::new, |bare| words(bare.get_ref())),
        }
    }
}

fn span<T>(text: &Spanned<T>) -> Span {
    (text.span().start, text.span().end)
}

/// A message of serde about an unknown field, with the nearest name in place of all names, if one is near.
fn with_near_field(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let near = quoted
        .next()
        .filter(|_| message.starts_with("unknown field `"))
        .and_then(|found| did_you_mean("field", found, quoted));
    near.unwrap_or_else(|| message.to_owned())
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|word| if word == "_" { String::new() } else { word.to_owned() }).collect()
}

impl LayoutFile {
    /// Reads a layout; `label` is what messages call the file.
    ///
    /// # Errors
    /// Everything wrong with it, naming file and line.
    pub fn parse(label: &str, text: &str) -> Result<Self, PlanError> {
        let mut reader = LayoutReader { label, text, problems: Vec::new() };
        let raw: RawFile = match toml::from_str(text) {
            Ok(raw) => raw,
            Err(error) => {
                let at = error.span().map_or((0, 0), |span| (span.start, span.end));
                reader.problem(at, with_near_field(error.message()));
                return Err(PlanError { problems: reader.problems });
            }
        };
        let (params, vars) = (reader.named(&raw.params), reader.named(&raw.vars));
        let inverse = reader.named(&raw.inverse);
        reader.check_definitions(&params, &vars, &inverse);
        let leaves = raw.leaf.iter().filter_map(|leaf| reader.leaf(leaf)).collect();
        let mut groups = BTreeMap::new();
        for (name, leaves) in &raw.group {
            groups.insert(name.clone(), leaves.iter().filter_map(|leaf| reader.leaf(leaf)).collect());
        }
        let places: Vec<Placement> = raw.place.iter().map(|place| reader.place(place, &groups)).collect();
        let ignores = raw.ignore.iter().filter_map(|ignore| {
            let when = ignore.when.as_ref().and_then(|when| reader.expr(when));
            Some(Ignore { names: reader.template(&ignore.names)?, when, each: reader.each(&ignore.each) })
        });
        let ignores = ignores.collect();
        let mut checks = Vec::new();
        for check in &raw.check {
            if let (Some(that), Some(say)) = (reader.expr(&check.that), reader.template(&check.say)) {
                checks.push(Check { that, say, warn: check.warn });
            }
        }
        let rules = reader.rules(&raw);
        let dtype = match raw.dtype.as_ref().and_then(|dtype| reader.dtype(dtype)) {
            Some(LeafDtype::As(dtype)) => Some(dtype),
            Some(LeafDtype::Source) | None => None,
        };
        let verified = raw.verified.as_ref().and_then(|condition| reader.condition(condition));
        let file = Self {
            label: label.to_owned(),
            is_embedded: false,
            text: text.to_owned(),
            name: raw.name,
            verified,
            model_types: raw.model_types,
            dtype,
            flat: raw.flat,
            logical: raw.logical,
            sharded_state: raw.sharded_state,
            rules,
            params,
            vars,
            inverse,
            text_model: raw.text_model.map(|text| TextModel::new(text.model_type, text.architecture, text.names)),
            aliases: raw.alias.into_iter().map(|alias| (alias.name, alias.on_disk)).collect(),
            ignores,
            checks,
            leaves,
            groups,
            places,
        };
        for UnknownName { at, name, near } in unknown_names(&file) {
            let part = reader.word(at, &name);
            reader.problem(part, near.unwrap_or_else(|| format!("nothing is called {name:?}")));
        }
        if reader.problems.is_empty() { Ok(file) } else { Err(PlanError { problems: reader.problems }) }
    }
}
