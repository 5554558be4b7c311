//! Resolving a layout file against a repository: instances of places and rules, their sources, stacks and views.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use super::{
    super::{
        draft::{Bundled, Draft, Roles},
        expr::{EvalError, Expr, Names, Template, Value},
        mesh::Mesh,
        name_group::{NameGroup, fold, stars},
        pattern::Pattern,
        problem::{Problem, RuleLocation},
        shard::STAGE_AXIS,
        values::Values,
    },
    Allowed, AtLine, Each, Keep, LayoutFile, Leaf, Placement, Resolved, Span, Stack,
    scope::{Bound, Local, Scope, is_absent},
};
use crate::{
    checkpoint::Checkpoint,
    config::did_you_mean,
    tensor::{Shape, TensorId, View},
};

/// Most numbers that one range may have.
const RANGE_MAX: u64 = 1 << 20;

/// Logical names by which a stack is known to be one of experts.
const EXPERT_WORDS: [&str; 3] = ["exp", "expert", "experts"];

impl LayoutFile {
    /// Resolves the layout against a repository, for a mesh. `set` holds parameters set by the user.
    ///
    /// # Errors
    /// Everything wrong, at once: missing and unexpected tensors, rules that do not fit, unknown parameters.
    pub fn resolve(
        &self,
        checkpoint: &Checkpoint,
        values: &Values<'_>,
        mesh: &Mesh,
        set: &BTreeMap<String, String>,
        allowed: Allowed,
    ) -> Result<Resolved, Vec<Problem>> {
        let scope = Scope::new(self, checkpoint, mesh, set, None);
        self.run(&scope, values, allowed)
    }

    /// Resolves the layout in a scope.
    pub(super) fn run(
        &self,
        scope: &Scope<'_>,
        values: &Values<'_>,
        allowed: Allowed,
    ) -> Result<Resolved, Vec<Problem>> {
        let checkpoint = scope.checkpoint;
        let mut problems = Vec::new();
        for name in scope.set().filter(|name| !self.params.contains_key(*name)) {
            let known: Vec<&str> = self.params().collect();
            let reason = did_you_mean("parameter", name, known.iter().copied())
                .unwrap_or_else(|| format!("there is no parameter {name:?}; there are: {}", known.join(", ")));
            problems.push(Problem::File { file: self.label.clone(), reason });
        }
        for (name, definition) in self.params.iter().chain(&self.vars) {
            // A variable whose expression needs an absent value is an error only where a rule uses the variable.
            if let Err(error) = scope.global(name)
                && !is_absent(&error)
            {
                problems.push(scope.problem(definition.at, "", &error));
            }
        }
        let mut resolver = Resolver {
            scope,
            values,
            allowed,
            used: vec![false; checkpoint.table().id_end()],
            drafts: Vec::new(),
            lost: Vec::new(),
            misshapen: Vec::new(),
            problems,
            left_out: Vec::new(),
            ignored_patterns: Vec::new(),
            warnings: Vec::new(),
            failed: BTreeSet::new(),
        };
        if resolver.problems.is_empty() {
            resolver.check();
        }
        if resolver.problems.is_empty() {
            resolver.run();
            if scope.inverse.is_some() {
                // The inverse compares the leaves, not their sources.
                resolver.ignored_patterns = resolver.ignored();
            } else {
                resolver.report_shapes();
                resolver.compare();
            }
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
        let Resolver { drafts, problems, left_out, ignored_patterns: ignored, warnings, .. } = resolver;
        if problems.is_empty() {
            Ok(Resolved { drafts, params, verified, left_out, ignored, warnings })
        } else {
            Err(problems)
        }
    }
}

/// Why a leaf is absent.
enum Failure {
    /// A source is missing, or has another shape than its rule says.
    Missing,
    /// The stack would have no layers.
    Empty,
    /// A rule does not fit the repository.
    Rule(Span, EvalError),
    /// A source cannot have the requested values.
    Source(Problem),
}

/// A source that a rule names and the repository lacks.
struct MissingSource {
    source: String,
    /// The leaf that needs the source.
    target: String,
    /// Line of the rule.
    line: usize,
    /// Whether the leaf is left out with the user's permission.
    allowed: bool,
}

/// A source of another shape than its rule says.
struct Misshapen {
    id: TensorId,
    /// Line of the rule.
    line: usize,
    expected: String,
    found: Shape,
}

struct Resolver<'a> {
    scope: &'a Scope<'a>,
    values: &'a Values<'a>,
    allowed: Allowed,
    used: Vec<bool>,
    drafts: Vec<Draft>,
    lost: Vec<MissingSource>,
    misshapen: Vec<Misshapen>,
    problems: Vec<Problem>,
    left_out: Vec<NameGroup>,
    /// The patterns of names that rules leave out, for the inverse.
    ignored_patterns: Vec<Pattern>,
    warnings: Vec<String>,
    /// Expressions of leaves without a value, and the reasons.
    failed: BTreeSet<(Span, String)>,
}

/// A leaf in the making.
struct LeafInProgress<'a> {
    leaf: &'a Leaf,
    place: Option<&'a Placement>,
    name: String,
    bound: Bound,
    /// Stacks, outermost first.
    stacks: Vec<&'a Stack>,
    /// Numbers of the stacked axes in the finished leaf, once known.
    axes: Option<Vec<usize>>,
    /// The pipeline stage that holds the leaf.
    stage: Option<u64>,
    missing: Vec<String>,
    misshapen: Vec<Misshapen>,
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
    }

    fn check(&mut self) {
        for check in &self.scope.file.checks {
            let local = Local { scope: self.scope, bound: &[] };
            let said = check.that.it.eval(&local).and_then(|holds| holds.bool("check")).and_then(|holds| {
                let say = || check.say.it.eval(&local);
                if holds { Ok(None) } else { say().map(Some) }
            });
            match said {
                Ok(Some(reason)) if check.warn => self.warnings.push(reason),
                Ok(Some(reason)) => {
                    self.add(self.scope.file.refusal(check.that.at, "", reason));
                }
                Ok(None) => {}
                Err(error) if check.warn && is_absent(&error) => {}
                Err(error) => self.add(self.scope.problem(check.that.at, "", &error)),
            }
        }
    }

    fn eval<T>(
        &mut self,
        placed: &AtLine<T>,
        bound: &[(Arc<str>, Value)],
        eval: impl FnOnce(&T, &dyn Names) -> Result<Value, EvalError>,
    ) -> Option<Value> {
        let result = eval(&placed.it, &Local { scope: self.scope, bound });
        result.map_err(|error| self.add(self.scope.problem(placed.at, "", &error))).ok()
    }

    /// Adds a problem unless it is already listed: one rule may fail for every layer.
    fn add(&mut self, problem: Problem) {
        if self.problems.last() != Some(&problem) && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn range(&self, range: &AtLine<(Expr, Expr)>, bound: &[(Arc<str>, Value)]) -> Result<Range<u64>, EvalError> {
        let local = Local { scope: self.scope, bound };
        let number = |expr: &Expr| expr.eval(&local)?.natural("range");
        let (start, stop) = (number(&range.it.0)?, number(&range.it.1)?);
        if stop.saturating_sub(start) <= RANGE_MAX { Ok(start..stop) } else { Err(EvalError::Range("range")) }
    }

    /// All bindings of the variables of `each` that satisfy the condition.
    fn instances(&mut self, each: &Each, when: Option<&AtLine<Expr>>, outer: &[(Arc<str>, Value)]) -> Vec<Bound> {
        // A condition without any of the variables comes before their ranges: the ranges may have a meaning only if it
        // holds.
        let free = |when: &&AtLine<Expr>| {
            let mut free = true;
            when.it.for_each_name(&mut |name| free &= each.iter().all(|(var, _)| **var != *name));
            free
        };
        if let Some(when) = when.filter(free) {
            let holds = self.eval(when, outer, |expr, names| Ok(Value::Bool(expr.eval(names)?.bool("when")?)));
            if !matches!(holds, Some(Value::Bool(true))) {
                return Vec::new();
            }
        }
        let mut all = vec![outer.to_vec()];
        for (var, over) in each {
            let range = match self.range(over, outer) {
                Ok(range) => range,
                Err(error) => {
                    self.add(self.scope.problem(over.at, "", &error));
                    return Vec::new();
                }
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

    fn rule(&mut self, place: Option<&'a Placement>, leaf: &'a Leaf, outer: &[(Arc<str>, Value)]) {
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
            if self.scope.inverse.is_some() && leaf.optional && self.scope.find(&name).is_none() {
                continue;
            }
            let Ok(stage) = self.stage(place, leaf, &bound, &name) else { return };
            let mut making = LeafInProgress {
                leaf,
                place,
                name,
                bound,
                stacks,
                axes: None,
                stage,
                missing: vec![],
                misshapen: vec![],
                found: vec![],
            };
            let view = self.level(&mut making, 0).and_then(|view| self.after_stack(&mut making, view));
            self.finish(making, view);
        }
    }

    /// The pipeline stage that holds a leaf, as the leaf or else its place says. An error has been reported.
    fn stage(
        &mut self,
        place: Option<&Placement>,
        leaf: &Leaf,
        bound: &[(Arc<str>, Value)],
        name: &str,
    ) -> Result<Option<u64>, ()> {
        let Some(stage) = leaf.stage.as_ref().or_else(|| place?.stage.as_ref()) else { return Ok(None) };
        let number = stage.it.eval(&Local { scope: self.scope, bound }).and_then(|number| number.natural("stage"));
        let stages = self.scope.mesh.find(STAGE_AXIS).map_or(1, |axis| self.scope.mesh.axes()[axis].size);
        let number =
            number.and_then(|number| if number < stages { Ok(number) } else { Err(EvalError::Range("stage")) });
        match number {
            Ok(number) => Ok(Some(number).filter(|_| stages > 1)),
            Err(error) => {
                self.add(self.scope.problem(stage.at, name, &error));
                Err(())
            }
        }
    }

    fn finish(&mut self, mut making: LeafInProgress<'_>, view: Result<View, Failure>) {
        self.misshapen.append(&mut making.misshapen);
        let LeafInProgress { leaf, name, missing, found, .. } = &making;
        // A leaf that fails has still used the sources that it found: the missing source is the reason, not these.
        for id in found {
            self.used[id.0 as usize] = true;
        }
        if !missing.is_empty() {
            if leaf.optional && found.is_empty() {
                return;
            }
            let allowed = missing.iter().all(|source| self.allowed.missing.accepts(source));
            let lost = missing.iter().map(|source| {
                let (source, target) = (source.clone(), name.clone());
                MissingSource { source, target, line: leaf.from_line, allowed }
            });
            self.lost.extend(lost);
            return;
        }
        match view {
            Ok(view) => {
                let draft = making.draft(view);
                self.drafts.push(draft);
            }
            Err(Failure::Empty | Failure::Missing) => {}
            Err(Failure::Source(problem)) => self.add(problem),
            Err(Failure::Rule(at, error)) => {
                // A rule that fails for every layer is reported once, for the first layer.
                let text = error.to_string();
                if self.failed.insert((at, text)) {
                    self.add(self.scope.problem(at, name, &error));
                }
            }
        }
    }

    /// The view from one level of stacks inwards.
    fn level(&self, making: &mut LeafInProgress<'_>, level: usize) -> Result<View, Failure> {
        let Some(stack) = making.stacks.get(level).copied() else { return self.slice(making) };
        let range = match &stack.over {
            Some(over) => {
                let range = self.range(over, &making.bound);
                range.map_err(|error| Failure::Rule(over.at, error))?
            }
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
                // Others may be missing too: the loop goes on to name them all.
                Err(Failure::Missing) => {}
                Err(Failure::Empty) => empty = true,
                Err(failure) => return Err(failure),
            }
        }
        if !making.missing.is_empty() || !making.misshapen.is_empty() {
            return Err(Failure::Missing);
        }
        if empty || children.is_empty() {
            return Err(Failure::Empty);
        }
        let axis = self.axis(making, level, children[0].shape().rank())?;
        View::stack(axis, &children).map_err(|error| Failure::Rule(stack.at, error.into()))
    }

    /// The view of a finished stack. None of its axes counts as stacked.
    fn after_stack(&self, making: &mut LeafInProgress<'_>, stacked: View) -> Result<View, Failure> {
        let Some(after) = &making.leaf.after_stack else { return Ok(stacked) };
        let mut bound = making.bound.clone();
        bound.push(("x".into(), Value::View(stacked)));
        let view = after.it.eval(&Local { scope: self.scope, bound: &bound });
        let view = view.and_then(|view| view.view("after_stack").cloned());
        making.axes = Some(Vec::new());
        view.map_err(|error| Failure::Rule(after.at, error))
    }

    /// Number of the axis that a level of stacks makes, among the axes of the levels inside it.
    fn axis(&self, making: &mut LeafInProgress<'_>, level: usize, child_rank: usize) -> Result<usize, Failure> {
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
                let number = number.map_err(|error| Failure::Rule(axis.at, error))?;
                let number = usize::try_from(number).ok().filter(|number| *number < rank + levels);
                match number.filter(|number| !axes.contains(number)) {
                    Some(number) => axes.push(number),
                    None => return Err(Failure::Rule(axis.at, EvalError::Range("axis"))),
                }
            }
            making.axes = Some(axes);
        }
        let axes = making.axes.as_deref().expect("set above");
        Ok(axes[level] - axes[..level].iter().filter(|outer| **outer < axes[level]).count())
    }

    /// All numbers of a variable in the names of the repository, from 0.
    fn numbers(&self, making: &LeafInProgress<'_>, stack: &Stack) -> Result<Range<u64>, Failure> {
        if self.scope.inverse.is_some() {
            return Err(Failure::Rule(stack.at, EvalError::Open(stack.var.to_string())));
        }
        let mut bound = making.bound.clone();
        bound.push((stack.var.clone(), Value::Text("*".into())));
        // Stacks further in have no number yet. Any number serves, as layers and experts start at 0 unless a range says
        // otherwise.
        let at = making.stacks.iter().position(|other| std::ptr::eq(*other, stack));
        let at = at.expect("the stack is one of those being made");
        for inner in &making.stacks[at + 1..] {
            let first = inner.over.as_ref().map_or(Ok(0), |over| self.range(over, &bound).map(|range| range.start));
            let first = first.map_err(|error| Failure::Rule(inner.at, error))?;
            bound.push((inner.var.clone(), int(first)));
        }
        let Some((_, first)) = making.leaf.from.first() else { return Ok(0..0) };
        let open = |_| Failure::Rule(stack.at, EvalError::Open(stack.var.to_string()));
        let name = self.source_name(making, first, &bound).map_err(open)?;
        Ok(0..self.scope.count(&name).min(RANGE_MAX))
    }

    fn source_name(
        &self,
        making: &LeafInProgress<'_>,
        template: &Template,
        bound: &[(Arc<str>, Value)],
    ) -> Result<String, Failure> {
        let local = Local { scope: self.scope, bound };
        let name = template.eval(&local).map_err(|error| Failure::Rule(making.leaf.from_at, error))?;
        let Some(from) = making.place.and_then(|place| place.from.as_ref()) else { return Ok(name) };
        let prefix = from.it.eval(&local).map_err(|error| Failure::Rule(from.at, error))?;
        Ok(joined(&prefix, &name))
    }

    /// The view over one set of sources, before stacking.
    fn slice(&self, making: &mut LeafInProgress<'_>) -> Result<View, Failure> {
        let leaf = making.leaf;
        let before = making.missing.len() + making.misshapen.len();
        let mut sources = Vec::with_capacity(leaf.from.len());
        for (name, template) in &leaf.from {
            let source = self.source_name(making, template, &making.bound)?;
            if let Some(inverse) = self.scope.inverse {
                let extents = self.extents(making, name)?;
                let view = inverse.targets.borrow_mut().view(source, extents);
                sources.push((name.clone(), view.map_err(|error| Failure::Rule(leaf.from_at, error))?));
                continue;
            }
            let Some(id) = self.scope.find(&source) else {
                making.missing.push(source);
                continue;
            };
            making.found.push(id);
            let found = self.scope.checkpoint.tensor(id).name;
            let dtype = match leaf.dtype {
                Some(Keep::Source) => None,
                Some(Keep::As(dtype)) => Some(dtype),
                None => self.values.dtype_of(id, &[found, &source, &making.name]),
            };
            let view = self.values.view(id, dtype).map_err(Failure::Source)?;
            making.misshapen.extend(self.misshapen(making, name, id, view.shape())?);
            sources.push((name.clone(), view));
        }
        if making.missing.len() + making.misshapen.len() > before {
            return Err(Failure::Missing);
        }
        let Some(view) = &leaf.view else { return sources.pop().map(|(_, view)| view).ok_or(Failure::Empty) };
        let outside = making.bound.len();
        making.bound.extend(sources.into_iter().map(|(name, view)| (name, Value::View(view))));
        let value = view.it.eval(&Local { scope: self.scope, bound: &making.bound });
        making.bound.truncate(outside);
        value.and_then(|value| value.view("view").cloned()).map_err(|error| Failure::Rule(view.at, error))
    }

    /// The extents that a leaf's rule gives to a source. An extent without a value has the reason in its place.
    fn extents(&self, making: &LeafInProgress<'_>, name: &str) -> Result<Vec<Result<u64, EvalError>>, Failure> {
        let Some((_, shape)) = making.leaf.shape.iter().find(|(of, _)| **of == *name) else {
            return Ok(vec![Err(EvalError::NoShape(name.to_owned()))]);
        };
        let local = Local { scope: self.scope, bound: &making.bound };
        let extents = shape.it.iter().map(|extent| {
            let Some(extent) = extent else { return Ok(Err(EvalError::NoShape(name.to_owned()))) };
            match extent.eval(&local).and_then(|extent| extent.natural("shape")) {
                Ok(extent) => Ok(Ok(extent)),
                Err(error) if is_absent(&error) => Ok(Err(error)),
                Err(error) => Err(Failure::Rule(shape.at, error)),
            }
        });
        extents.collect()
    }

    /// The difference between the shape of a leaf's source and the shape in its rule, if the rule has one.
    fn misshapen(
        &self,
        making: &LeafInProgress<'_>,
        name: &str,
        id: TensorId,
        found: &Shape,
    ) -> Result<Option<Misshapen>, Failure> {
        let Some((_, shape)) = making.leaf.shape.iter().find(|(of, _)| **of == *name) else { return Ok(None) };
        let expected = self.extents(making, name)?;
        let expected: Vec<Option<u64>> = expected.into_iter().map(Result::ok).collect();
        let same = |(expected, found): (&Option<u64>, &u64)| expected.is_none_or(|expected| expected == *found);
        if expected.len() == found.rank() && expected.iter().zip(found.extents()).all(same) {
            return Ok(None);
        }
        let words = expected.iter().map(|extent| extent.map_or_else(|| "_".to_owned(), |extent| extent.to_string()));
        let expected = format!("[{}]", words.collect::<Vec<_>>().join(", "));
        Ok(Some(Misshapen { id, line: shape.line, expected, found: found.clone() }))
    }

    /// Reports the sources of another shape than their rules say. Alike ones are one problem.
    fn report_shapes(&mut self) {
        let checkpoint = self.scope.checkpoint;
        let mut alike: BTreeMap<(usize, String, String), Vec<Misshapen>> = BTreeMap::new();
        for misshapen in std::mem::take(&mut self.misshapen) {
            let key = (misshapen.line, misshapen.expected.clone(), misshapen.found.to_string());
            alike.entry(key).or_default().push(misshapen);
        }
        for ((line, expected, _), alike) in alike {
            let file = checkpoint.source().path(checkpoint.file_of(alike[0].id)).display().to_string();
            let names: BTreeSet<&str> = alike.iter().map(|misshapen| checkpoint.tensor(misshapen.id).name).collect();
            for group in fold(names, &[]) {
                let rule = RuleLocation(Some((self.scope.file.label.clone(), line)));
                let (file, expected, found) = (file.clone(), expected.clone(), alike[0].found.clone());
                self.add(Problem::SourceShape { group, file, rule, expected, found });
            }
        }
    }

    /// Names that the rules ignore.
    fn ignored(&mut self) -> Vec<Pattern> {
        let mut ignored = Vec::new();
        for ignore in &self.scope.file.ignores {
            for bound in self.instances(&ignore.each, ignore.when.as_ref(), &[]) {
                let text = |template: &Template, names: &dyn Names| Ok(Value::Text(template.eval(names)?.into()));
                let Some(text) = self.eval(&ignore.names, &bound, text) else { continue };
                match Pattern::parse(&text.to_string()) {
                    Ok(pattern) => ignored.push(pattern),
                    Err(error) => {
                        let problem = self.scope.file.refusal(ignore.names.at, "", error.to_string());
                        self.problems.push(problem);
                    }
                }
            }
        }
        ignored
    }

    /// Reports the missing sources, and the tensors that no rule uses or ignores.
    fn compare(&mut self) {
        // Rules that failed have used nothing: the tensors that they leave over are not unexpected.
        let failed = self.problems.iter().any(|problem| matches!(problem, Problem::Layout { .. }));
        let ignored = self.ignored();
        let (used, unused): (Vec<_>, Vec<_>) =
            self.scope.checkpoint.tensors().partition(|(id, _)| self.used[id.0 as usize]);
        let is_ignored = |name: &&str| ignored.iter().any(|pattern| pattern.matches(name));
        let (ignored, unused): (Vec<&str>, Vec<&str>) =
            unused.into_iter().map(|(_, info)| info.name).partition(is_ignored);
        self.left_out = fold(ignored, &[]);
        let strange: BTreeSet<String> = unused.iter().map(|name| stars(name)).collect();
        let lost = std::mem::take(&mut self.lost);
        let mut by_rule: BTreeMap<(bool, usize, String), Vec<&MissingSource>> = BTreeMap::new();
        for lost in &lost {
            by_rule.entry((lost.allowed, lost.line, stars(&lost.source))).or_default().push(lost);
        }
        for ((allowed, line, _), lost) in by_rule {
            let sources: BTreeSet<&str> = lost.iter().map(|lost| lost.source.as_str()).collect();
            let targets: BTreeSet<&str> = lost.iter().map(|lost| lost.target.as_str()).collect();
            let first = lost[0].target.as_str();
            let for_target =
                if targets.len() == 1 { first.to_owned() } else { format!("{first} and {} more", targets.len() - 1) };
            for group in fold(sources, &[&strange]) {
                if allowed {
                    self.warnings.push(format!("{for_target} is left out: missing tensor {}", group.counted()));
                } else {
                    let rule = RuleLocation(Some((self.scope.file.label.clone(), line)));
                    self.problems.push(Problem::MissingTensor { group, for_target: for_target.clone(), rule });
                }
            }
        }
        let (allowed, refused): (Vec<&str>, Vec<&str>) =
            unused.into_iter().partition(|name| self.allowed.unmapped.accepts(name));
        for group in fold(allowed, &[]) {
            self.warnings.push(format!("{}: left out", Problem::UnexpectedTensor { group }));
        }
        if !failed && !refused.is_empty() {
            let known = used.iter().map(|(_, info)| stars(info.name)).collect();
            let gone = lost.iter().map(|lost| stars(&lost.source)).collect();
            let refused = fold(refused, &[&gone, &known]);
            self.problems.extend(refused.into_iter().map(|group| Problem::UnexpectedTensor { group }));
        }
    }
}

impl LeafInProgress<'_> {
    fn draft(self, view: View) -> Draft {
        let stacked = self.axes.unwrap_or_default();
        let rank = view.shape().rank();
        let own: Vec<usize> = (0..rank).filter(|axis| !stacked.contains(axis)).collect();
        let logical = match &self.leaf.axes {
            None => Vec::new(),
            // A leaf without axis names of its own takes those of its place.
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
            logical,
            stage: self.stage,
            ..Roles::default()
        };
        Draft { name: self.name, view, roles, bundled: Bundled::ALWAYS, layers: None }
    }
}

fn int(number: u64) -> Value {
    Value::Int(i64::try_from(number).expect("numbers of loops come from expressions, which have 63 bits"))
}

fn joined(prefix: &str, name: &str) -> String {
    if prefix.is_empty() || name.is_empty() { format!("{prefix}{name}") } else { format!("{prefix}.{name}") }
}
