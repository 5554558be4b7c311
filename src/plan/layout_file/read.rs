//! Reading a layout file: serde reads the TOML and each text in it, then every name is checked. A slip is found without a repository
//! that triggers it.

use std::{cell::RefCell, collections::BTreeMap, sync::Arc};

use ckfs_config::{DtypeChoice, did_you_mean, value::SettingValue};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use toml::Spanned;

use super::{
    super::{
        expr::{Expr, SyntaxError, TextTemplate, function_names},
        logical::LogicalRules,
        problem::{PlanError, Problem},
    },
    AtLine, Extents, LayoutFile, LeafRule, Placement, Sources, Span,
    names::{UnknownName, unknown_names},
    place,
};

thread_local! {
    /// The malformed texts of the file that this thread reads. All of them are reported, but an error of serde ends the reading.
    static MALFORMED: RefCell<Vec<(Span, String, SyntaxError)>> = const { RefCell::new(Vec::new()) };
}

/// What a text of a layout file stands for.
pub(super) trait Meaning: Sized {
    /// A text with a meaning, which stands for those without.
    const ANY: &'static str;

    fn read(text: &str) -> Result<Self, SyntaxError>;
}

/// Types with a text that has a meaning, and how their texts are read.
macro_rules! meanings {
    ($($of:ty: $any:literal, $read:expr;)*) => {$(
        impl Meaning for $of {
            const ANY: &'static str = $any;

            fn read(text: &str) -> Result<Self, SyntaxError> {
                $read(text)
            }
        }
    )*};
}

meanings! {
    Expr: "absent", Self::parse;
    (Expr, Expr): "0..0", Expr::parse_range;
    Extents: "", Expr::parse_list;
    TextTemplate: "", Self::parse;
    Arc<str>: "", |text: &str| Ok(text.into());
    DtypeChoice: "keep", |text: &str| Self::from_word(text).map_err(SyntaxError::Dtype);
}

/// What a text means. If it means nothing, that is noted.
fn meaning<T: Meaning>(at: Span, text: &str) -> T {
    T::read(text).unwrap_or_else(|error| {
        MALFORMED.with_borrow_mut(|all| all.push((at, text.to_owned(), error)));
        T::read(T::ANY).expect("it has a meaning, which tests show")
    })
}

impl<'de, T: Meaning> Deserialize<'de> for AtLine<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Spanned::<String>::deserialize(deserializer)?;
        Ok(Self { it: meaning(span(&text), text.get_ref()), at: span(&text) })
    }
}

/// One text, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOr<T> {
    One(String),
    Several(T),
}

impl<T: DeserializeOwned> OneOr<T> {
    fn read<'de, D: Deserializer<'de>>(deserializer: D, expected: &str) -> Result<(Self, Span), D::Error> {
        let read = Spanned::<Self>::deserialize(deserializer).map_err(|_| D::Error::custom(expected))?;
        let at = span(&read);
        Ok((read.into_inner(), at))
    }
}

impl<'de> Deserialize<'de> for Sources {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (from, at) = OneOr::read(deserializer, "expected the name of a tensor, or a table of names")?;
        Ok(match from {
            OneOr::One(name) => Self { named: vec![("x".into(), meaning(at, &name))], at, is_one: true },
            OneOr::Several::<BTreeMap<String, String>>(names) => {
                let named = names.iter().map(|(name, from)| (name.as_str().into(), meaning(at, from))).collect();
                Self { named, at, is_one: false }
            }
        })
    }
}

pub(super) fn shapes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, AtLine<Extents>)>, D::Error> {
    let expected = "expected the extents of a source, or a table of them by the names of sources";
    let (named, at) = match OneOr::read(deserializer, expected)? {
        (OneOr::One(extents), at) => (BTreeMap::from([("x".to_owned(), extents)]), at),
        (OneOr::Several(shapes), at) => (shapes, at),
    };
    Ok(named.into_iter().map(|(name, extents)| (name, AtLine { it: meaning(at, &extents), at })).collect())
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected an expression, a number, true or false")]
enum RawExpression {
    Bool(bool),
    Number(i64),
    Text(String),
}

/// An expression, or a value that is one.
pub(super) fn expression<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<AtLine<Expr>>, D::Error> {
    let raw = Spanned::<RawExpression>::deserialize(deserializer)?;
    let at = span(&raw);
    let text = match raw.into_inner() {
        RawExpression::Bool(known) => known.to_string(),
        RawExpression::Number(number) => number.to_string(),
        RawExpression::Text(text) => text,
    };
    Ok(Some(AtLine { it: meaning(at, &text), at }))
}

/// The names of groups.
pub(super) fn groups<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AtLine<Vec<String>>, D::Error> {
    Ok(match OneOr::read(deserializer, "expected the name of a group, or a list of names")? {
        (OneOr::One(name), at) => AtLine { it: vec![name], at },
        (OneOr::Several(it), at) => AtLine { it, at },
    })
}

/// Words, of which `_` stands for none.
pub(super) fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let word = |word: &str| if word == "_" { String::new() } else { word.to_owned() };
    Ok(Some(text.split_whitespace().map(word).collect()))
}

fn span<T>(text: &Spanned<T>) -> Span {
    (text.span().start, text.span().end)
}

/// Collects problems of a file.
struct LayoutReader<'a> {
    label: &'a str,
    text: &'a str,
    problems: Vec<Problem>,
}

impl LayoutReader<'_> {
    fn problem(&mut self, at: Span, reason: impl Into<String>) {
        self.problems.push(place::problem((self.label, self.text), at, String::new(), reason.into()));
    }

    fn word(&self, at: Span, word: &str) -> Span {
        place::word(self.text, at, word)
    }

    /// Reports a text without a meaning.
    fn malformed(&mut self, at: Span, text: &str, error: &SyntaxError) {
        let (part, near) = match error {
            SyntaxError::Dtype(reason) => (at, Some(reason.clone())),
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

    /// Reports variables with the name of a parameter, and inverses of nothing.
    fn check_definitions(&mut self, LayoutFile { params, vars, inverse, .. }: &LayoutFile) {
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

    /// Reports shapes of no source, and leaves without a view that need one.
    fn check_leaf(&mut self, LeafRule { to, from, shape, view, .. }: &LeafRule) {
        for (name, extents) in shape.iter().filter(|(name, _)| from.named.iter().all(|(known, _)| **known != **name)) {
            let near = did_you_mean("source", name, from.named.iter().map(|(known, _)| &**known));
            let part = self.word(extents.at, name);
            self.problem(part, near.unwrap_or_else(|| format!("shape: there is no source {name:?}")));
        }
        if view.is_none() && !from.is_one {
            self.problem(to.at, "without a single source there must be a view");
        }
    }

    fn check_place(&mut self, Placement { group, .. }: &Placement, groups: &BTreeMap<String, Vec<LeafRule>>) {
        for name in group.it.iter().filter(|name| !groups.contains_key(*name)) {
            let near = did_you_mean("group", name, groups.keys().map(String::as_str));
            let part = self.word(group.at, name);
            self.problem(part, near.unwrap_or_else(|| format!("there is no group {name:?}")));
        }
    }

    /// The rules that split logical axes.
    fn rules(&mut self, file: &LayoutFile) -> LogicalRules {
        let mut rules = LogicalRules::default();
        match &file.base_rules {
            Some(base) if &*base.it == "maxtext" => rules = LogicalRules::maxtext(),
            Some(base) => self.problem(base.at, format!("rules: expected \"maxtext\", found {:?}", base.it)),
            None => {}
        }
        rules.replace(&file.rule);
        rules
    }
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

impl LayoutFile {
    /// Reads a layout; `label` is what messages call the file.
    ///
    /// # Errors
    /// Everything wrong with it, naming file and line.
    pub fn parse(label: &str, text: &str) -> Result<Self, PlanError> {
        let mut reader = LayoutReader { label, text, problems: Vec::new() };
        MALFORMED.take();
        let read = toml::from_str(text);
        let mut malformed = MALFORMED.take();
        let mut file: Self = read.map_err(|error| {
            let at = error.span().map_or((0, 0), |span| (span.start, span.end));
            reader.problem(at, with_near_field(error.message()));
            PlanError { problems: std::mem::take(&mut reader.problems) }
        })?;
        malformed.sort_by_key(|(at, ..)| *at);
        // What is defined by a malformed text is not defined.
        for definitions in [&mut file.params, &mut file.vars, &mut file.inverse] {
            definitions.retain(|_, definition| malformed.iter().all(|(at, ..)| *at != definition.at));
        }
        for (at, text, error) in malformed {
            reader.malformed(at, &text, &error);
        }
        reader.check_definitions(&file);
        file.leaf.iter().chain(file.group.values().flatten()).for_each(|leaf| reader.check_leaf(leaf));
        file.place.iter().for_each(|place| reader.check_place(place, &file.group));
        file.rules = reader.rules(&file);
        label.clone_into(&mut file.label);
        text.clone_into(&mut file.text);
        for UnknownName { at, name, near } in unknown_names(&file) {
            let part = reader.word(at, &name);
            reader.problem(part, near.unwrap_or_else(|| format!("nothing is called {name:?}")));
        }
        if reader.problems.is_empty() { Ok(file) } else { Err(PlanError { problems: reader.problems }) }
    }
}
