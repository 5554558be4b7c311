//! Names in the expressions of a layout file that nothing can define.

use std::{collections::BTreeMap, sync::Arc};

use ckfs_config::did_you_mean;

use super::{AtLine, Each, LayoutFile, LeafRule, Placement, Span, Stack, place::line};
use crate::expr::Expr;

/// A name without a meaning.
pub(super) struct UnknownName {
    /// The expression that has it.
    pub(super) at: Span,
    pub(super) name: String,
    /// A hint at a near name.
    pub(super) near: Option<String>,
}

/// The unknown names of a file, by line.
pub(super) fn unknown_names(file: &LayoutFile) -> Vec<UnknownName> {
    let mut check = NameCheck { file, found: BTreeMap::new() };
    check.definitions();
    check.places();
    let found = check.found.into_iter();
    found.map(|((_, name), (at, near))| UnknownName { at, name, near }).collect()
}

struct NameCheck<'a> {
    file: &'a LayoutFile,
    /// By line and name: the place, and the hint at a near name.
    found: BTreeMap<(usize, String), (Span, Option<String>)>,
}

impl NameCheck<'_> {
    /// Notes the names that are neither of the file's table nor among `locals`.
    fn check<'n>(&mut self, at: Span, locals: &[&str], names: impl IntoIterator<Item = &'n Arc<str>>) {
        let LayoutFile { params, vars, text, .. } = self.file;
        let is_known = |name: &str| params.contains_key(name) || vars.contains_key(name) || locals.contains(&name);
        for name in names.into_iter().filter(|name| !is_known(name)) {
            let globals = params.keys().chain(vars.keys()).map(String::as_str);
            let near = did_you_mean("name", name, globals.chain(locals.iter().copied()));
            self.found.entry((line(text, at.0), name.to_string())).or_insert((at, near));
        }
    }

    fn exprs<'e>(&mut self, exprs: impl IntoIterator<Item = &'e AtLine<Expr>>, locals: &[&str]) {
        exprs.into_iter().for_each(|expr| self.check(expr.at, locals, &expr.it.names));
    }

    fn range(&mut self, range: &AtLine<(Expr, Expr)>, locals: &[&str]) {
        self.check(range.at, locals, &range.it.0.names);
        self.check(range.at, locals, &range.it.1.names);
    }

    /// Parameters, variables, checks and ignored names.
    fn definitions(&mut self) {
        let file = self.file;
        self.exprs(file.params.values().chain(file.vars.values()).chain(file.inverse.values()), &[]);
        for check in &file.check {
            self.exprs([&check.that], &[]);
            self.check(check.say.at, &[], &check.say.it.names);
        }
        for ignore in &file.ignore {
            let locals: Vec<&str> = variables(&ignore.each).collect();
            self.check(ignore.names.at, &locals, &ignore.names.it.names);
            self.exprs(&ignore.when, &locals);
        }
    }

    /// The leaves, alone and in their places.
    fn places(&mut self) {
        let (file, nowhere) = (self.file, Placement::default());
        for leaf in &file.leaf {
            self.leaf(&nowhere, leaf);
        }
        for place in &file.place {
            for leaf in place.group.it.iter().filter_map(|group| file.group.get(group)).flatten() {
                self.leaf(place, leaf);
            }
        }
    }

    fn leaf(&mut self, place: &Placement, leaf: &LeafRule) {
        let mut each: Vec<&str> = variables(&place.each).chain(variables(&leaf.each)).collect();
        for (name, binding) in &place.bindings {
            self.exprs([binding], &each);
            each.push(name);
        }
        for (_, over) in place.each.iter().chain(&leaf.each) {
            self.range(over, &[]);
        }
        for template in place.to.iter().chain([&leaf.to]) {
            self.check(template.at, &each, &template.it.names);
        }
        self.exprs(place.when.iter().chain(&leaf.when).chain(&place.stage).chain(&leaf.stage), &each);
        let inner = self.stacks(leaf.stack.iter().chain(&place.stack), &each);
        if let Some(template) = &place.from {
            self.check(template.at, &inner, &template.it.names);
        }
        for (_, shape) in &leaf.shape {
            for extent in shape.it.iter().flatten() {
                self.check(shape.at, &inner, &extent.names);
            }
        }
        for (_, from) in &leaf.from.named {
            self.check(leaf.from.at, &inner, &from.names);
        }
        let sources: Vec<&str> = inner.iter().copied().chain(leaf.from.named.iter().map(|(name, _)| &**name)).collect();
        self.exprs(&leaf.view, &sources);
        let stacked: Vec<&str> = each.iter().copied().chain(["x"]).collect();
        self.exprs(&leaf.after_stack, &stacked);
    }

    /// Checks stacks, the outermost first; returns the names inside them.
    fn stacks<'s>(&mut self, stacks: impl Iterator<Item = &'s Stack>, each: &[&'s str]) -> Vec<&'s str> {
        let mut inner = each.to_vec();
        let axis_names: Vec<&str> = each.iter().copied().chain(["rank", "outer"]).collect();
        for stack in stacks {
            if let Some(over) = &stack.over {
                self.range(over, &inner);
            }
            self.exprs(&stack.axis, &axis_names);
            inner.push(&stack.var.it);
        }
        inner
    }
}

fn variables(each: &Each) -> impl Iterator<Item = &str> {
    each.keys().map(String::as_str)
}
