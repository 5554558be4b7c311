//! Tensors that transformers makes of others when it loads a repository: parts of one, several in one, axes exchanged, heads
//! permuted.
//!
//! A converter of the table has patterns of names, and the names of what it makes, each with an expression of layout files. Tensors
//! whose names become one belong together: those of the first pattern are called `x0`, those of the second `x1`, and so on. Groups of
//! those of one pattern have a name each.

use std::cmp::Reverse;

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::View;
use fancy_regex::Regex;
use serde::Deserialize;

use super::super::{
    expr::{Expr, ExprValue},
    member::ConfigScope,
};

/// Names that begin so, the longer beginning first.
#[derive(Debug, Default)]
pub(super) struct LoadScope([String; 2]);

impl LoadScope {
    pub(super) fn new(row: &[String]) -> Self {
        let dotted = |word: &String| if word.is_empty() { String::new() } else { format!("{word}.") };
        let [scope, base] = row else { return Self::default() };
        Self([format!("{}{}", dotted(base), dotted(scope)), dotted(scope)])
    }

    /// How much of a name is its beginning. None if the name is none of these.
    pub(super) fn begin(&self, name: &str) -> Option<usize> {
        self.0.iter().find(|scope| name.starts_with(scope.as_str())).map(String::len)
    }
}

/// A pattern of the table.
pub(super) fn compiled(text: &str) -> Regex {
    Regex::new(text).expect("the table is in the program, and a test compiles all of it")
}

/// How several tensors of a pattern are joined: on a new first axis, all of them or in equal groups, one for each name, or end to end.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Several {
    Stack,
    Groups,
    Concat,
}

/// A row of the table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConverterRow {
    from: Vec<String>,
    /// Names and expressions.
    to: Vec<[String; 2]>,
    several: Option<Several>,
    #[serde(default)]
    scope: Vec<String>,
}

/// A converter: patterns of names, and what it makes.
#[derive(Debug)]
pub(crate) struct LoadConverter {
    /// In the order in which their tensors are taken.
    pub(crate) from: Vec<Regex>,
    /// The text in place of the pattern's, and the view.
    pub(super) to: Vec<(String, Expr)>,
    several: Option<Several>,
    pub(super) scope: LoadScope,
}

impl LoadConverter {
    pub(super) fn new(row: &ConverterRow) -> Self {
        let made = |[name, view]: &[String; 2]| {
            (name.clone(), Expr::parse(view).expect("the table is in the program, and a test reads all of it"))
        };
        let from = row.from.iter().map(|text| compiled(text)).collect();
        let (to, scope) = (row.to.iter().map(made).collect(), LoadScope::new(&row.scope));
        Self { from, to, several: row.several, scope }
    }

    /// The pattern that a name matches, and the text that it matches: the first in the name, of those that begin there the longest
    /// pattern's.
    pub(super) fn matched<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let found = self.from.iter().enumerate().filter_map(|(at, regex)| {
            let found = regex.find(name).ok().flatten()?;
            Some(((found.start(), Reverse(regex.as_str().len())), (at, found.as_str())))
        });
        found.min_by_key(|(order, _)| *order).map(|(_, found)| found)
    }

    /// What is made of tensors, which are given for each pattern, and the name of each. `name` is that of the first.
    ///
    /// # Errors
    /// Why the tensors are none that transformers could convert.
    pub(crate) fn make(
        &self,
        name: &str,
        given: &[Vec<View>],
        checkpoint: &Checkpoint,
    ) -> Result<Vec<(String, View)>, String> {
        if let Some(pattern) = given.iter().position(Vec::is_empty) {
            return Err(format!(
                "a tensor that it is made of is missing: its name has {}",
                self.from[pattern].as_str()
            ));
        }
        if given.iter().any(|views| views.len() != given[0].len()) {
            return Err("the tensors that it is made of are not equally many".to_owned());
        }
        let groups = if let Some(Several::Groups) = self.several { self.to.len() } else { 1 };
        let mut bound = Vec::with_capacity(given.len() * groups);
        for all in given {
            if !all.len().is_multiple_of(groups) {
                return Err(format!("{} tensors are no {groups} equal groups", all.len()));
            }
            for group in all.chunks(all.len() / groups) {
                let view = match (self.several, group) {
                    (Some(Several::Stack | Several::Groups), views) => View::stack(0, views)?,
                    (Some(Several::Concat), views) => View::concat(0, views)?,
                    (None, [view]) => view.clone(),
                    (None, views) => return Err(format!("{} tensors for one name", views.len())),
                };
                bound.push((format!("x{}", bound.len()), ExprValue::View(view)));
            }
        }
        let scope = ConfigScope { checkpoint, bound };
        let made = |(to, view): &(String, Expr)| {
            let view = view.eval(&scope).and_then(|value| value.view("view").cloned()).map_err(|error| {
                let shapes = given.iter().filter_map(|views| Some(views.first()?.shape().to_string()));
                let shapes = shapes.collect::<Vec<_>>().join(" and ");
                format!("by config.json {to} is not made of {shapes} as transformers makes it: {error}")
            })?;
            Ok((name.replacen(self.to[0].0.as_str(), to, 1), view))
        };
        self.to.iter().map(made).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_matches_the_first_pattern_in_it_the_longest_first() {
        let row = ConverterRow {
            from: vec![r"\.up(?!\w)".to_owned(), r"\.gate\.up(?!\w)".to_owned()],
            to: vec![[".gate_up", "concat(0, x0, x1)"].map(str::to_owned)],
            several: None,
            scope: Vec::new(),
        };
        let converter = LoadConverter::new(&row);
        assert_eq!(converter.matched("a.up.gate.up"), Some((0, ".up")));
        assert_eq!(converter.matched("a.gate.up"), Some((1, ".gate.up")));
        assert_eq!(converter.matched("a.gate.ups"), None);
    }
}
