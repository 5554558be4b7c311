//! Reading a layout file: serde reads the TOML, then its expressions are parsed and every name is checked. A slip is
//! found without a repository that triggers it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::Deserialize;
use toml::Spanned;

use super::{
    super::{
        expr::{Expr, SyntaxError, Template},
        logical::{LogicalRule, LogicalRules},
        problem::{PlanError, Problem},
    },
    AtLine, Check, Each, Extents, Ignore, Keep, LayoutFile, Leaf, Placement, Stack, TextModel,
};
use crate::tensor::DType;

type Text = Spanned<String>;

/// Calls its argument for each name that an expression uses.
type NamesOf<'a> = dyn Fn(&mut dyn FnMut(&str)) + 'a;

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

/// Collects problems while a file is read.
struct LayoutReader<'a> {
    label: &'a str,
    text: &'a str,
    problems: Vec<Problem>,
}

impl LayoutReader<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.get(..at).unwrap_or_default().matches('\n').count()
    }

    fn problem(&mut self, line: usize, reason: impl Into<String>) {
        self.problems.push(Problem::File { file: format!("{}:{line}", self.label), reason: reason.into() });
    }

    fn parse<T>(&mut self, text: &Text, parse: impl FnOnce(&str) -> Result<T, SyntaxError>) -> Option<AtLine<T>> {
        let line = self.line(text.span().start);
        match parse(text.get_ref()) {
            Ok(it) => Some(AtLine { it, line }),
            Err(error) => {
                self.problem(line, format!("{:?}: {error}", text.get_ref()));
                None
            }
        }
    }

    fn expr(&mut self, text: &Text) -> Option<AtLine<Expr>> {
        self.parse(text, Expr::parse)
    }

    fn template(&mut self, text: &Text) -> Option<AtLine<Template>> {
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

    fn dtype(&mut self, text: &Text) -> Option<Keep> {
        if text.get_ref() == "keep" {
            return Some(Keep::Source);
        }
        let dtype = DType::from_user(text.get_ref()).filter(|dtype| dtype.is_float());
        if dtype.is_none() {
            let line = self.line(text.span().start);
            self.problem(line, format!("expected keep or a float type such as bf16, found {:?}", text.get_ref()));
        }
        dtype.map(Keep::As)
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
        let shape = self.shapes(leaf.shape.as_ref(), &from);
        if leaf.view.is_none() && !matches!(leaf.from.as_ref().map(Spanned::get_ref), Some(RawFrom::One(_))) {
            self.problem(to.line, "without a single source there must be a view");
        }
        Some(Leaf {
            to,
            from,
            from_line,
            shape,
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

    fn shapes(
        &mut self,
        shape: Option<&Spanned<RawShape>>,
        from: &[(Arc<str>, Template)],
    ) -> Vec<(Arc<str>, AtLine<Extents>)> {
        let Some(shape) = shape else { return Vec::new() };
        let line = self.line(shape.span().start);
        let named: Vec<(&str, &str)> = match shape.get_ref() {
            RawShape::One(extents) => vec![("x", extents)],
            RawShape::Several(shapes) => shapes.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
        };
        let mut shapes = Vec::new();
        for (name, text) in named {
            let Some((name, _)) = from.iter().find(|(known, _)| **known == *name) else {
                self.problem(line, format!("shape: there is no source {name:?}"));
                continue;
            };
            match Expr::parse_list(text) {
                Ok(it) => shapes.push((name.clone(), AtLine { it, line })),
                Err(error) => self.problem(line, format!("{text:?}: {error}")),
            }
        }
        shapes
    }

    fn place(&mut self, place: &RawPlace, groups: &BTreeMap<String, Vec<Leaf>>) -> Placement {
        let names = match place.group.get_ref() {
            RawGroups::One(name) => vec![name.clone()],
            RawGroups::Several(names) => names.clone(),
        };
        for name in names.iter().filter(|name| !groups.contains_key(*name)) {
            let line = self.line(place.group.span().start);
            self.problem(line, format!("there is no group {name:?}"));
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
            bare: place.bare.as_ref().map_or_else(Vec::new, |bare| words(bare.get_ref())),
        }
    }
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
                let line = error.span().map_or(1, |span| reader.line(span.start));
                reader.problem(line, error.message());
                return Err(PlanError { problems: reader.problems });
            }
        };
        let named = |reader: &mut LayoutReader<'_>, map: &BTreeMap<String, Text>| -> BTreeMap<_, _> {
            map.iter().filter_map(|(name, text)| Some((name.clone(), reader.expr(text)?))).collect()
        };
        let params = named(&mut reader, &raw.params);
        let vars = named(&mut reader, &raw.vars);
        for (name, var) in vars.iter().filter(|(name, _)| params.contains_key(*name)) {
            reader.problem(var.line, format!("{name:?} is a parameter and a variable"));
        }
        let inverse = named(&mut reader, &raw.inverse);
        let has = |name: &String| params.contains_key(name) || vars.contains_key(name);
        for (name, definition) in inverse.iter().filter(|(name, _)| !has(name)) {
            reader.problem(definition.line, format!("there is no parameter or variable {name:?}"));
        }
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
        let dtype = match raw.dtype.as_ref().and_then(|dtype| reader.dtype(dtype)) {
            Some(Keep::As(dtype)) => Some(dtype),
            Some(Keep::Source) | None => None,
        };
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
            sharded_state: raw.sharded_state,
            rules,
            params,
            vars,
            inverse,
            text_model: raw.text_model.map(|text| TextModel {
                model_type: text.model_type,
                architecture: text.architecture,
                names: text.names.into_iter().collect(),
            }),
            aliases: raw.alias.into_iter().map(|alias| (alias.name, alias.on_disk)).collect(),
            ignores,
            checks,
            leaves,
            groups,
            places,
        };
        file.check_names(&mut reader);
        if reader.problems.is_empty() { Ok(file) } else { Err(PlanError { problems: reader.problems }) }
    }

    /// Reports names that nothing can define. A slip is found without a repository that triggers it.
    fn check_names(&self, reader: &mut LayoutReader<'_>) {
        let known = |name: &str| self.params.contains_key(name) || self.vars.contains_key(name);
        let mut found: BTreeSet<(usize, String)> = BTreeSet::new();
        let mut check = |line: usize, locals: &[&str], names: &NamesOf<'_>| {
            names(&mut |name| {
                if !known(name) && !locals.contains(&name) {
                    found.insert((line, name.to_owned()));
                }
            });
        };
        for definition in self.params.values().chain(self.vars.values()).chain(self.inverse.values()) {
            check(definition.line, &[], &|visit| definition.it.for_each_name(visit));
        }
        for Check { that, say, .. } in &self.checks {
            check(that.line, &[], &|visit| that.it.for_each_name(visit));
            check(say.line, &[], &|visit| say.it.for_each_name(visit));
        }
        for ignore in &self.ignores {
            let locals: Vec<&str> = ignore.each.iter().map(|(var, _)| var.as_ref()).collect();
            check(ignore.names.line, &locals, &|visit| ignore.names.it.for_each_name(visit));
            ignore.when.iter().for_each(|when| check(when.line, &locals, &|visit| when.it.for_each_name(visit)));
        }
        let nowhere = Placement {
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
            place.groups.iter().filter_map(|group| self.groups.get(group)).flatten().map(move |leaf| (place, leaf))
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
            for (_, shape) in &leaf.shape {
                shape
                    .it
                    .iter()
                    .flatten()
                    .for_each(|extent| check(shape.line, &inner, &|visit| extent.for_each_name(visit)));
            }
            leaf.from.iter().for_each(|(_, from)| check(leaf.from_line, &inner, &|visit| from.for_each_name(visit)));
            let sources: Vec<&str> = inner.iter().copied().chain(leaf.from.iter().map(|(name, _)| &**name)).collect();
            leaf.view.iter().for_each(|view| check(view.line, &sources, &|visit| view.it.for_each_name(visit)));
        }
        for (line, name) in found {
            reader.problem(line, format!("nothing is called {name:?}"));
        }
    }
}
