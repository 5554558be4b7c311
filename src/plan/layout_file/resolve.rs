//! Resolving a layout file against a repository: instances of places and rules, their sources, stacks and views.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ckfs_checkpoint::{Checkpoint, Storage, TensorInfo};
use ckfs_config::did_you_mean;
use ckfs_tensor::{TensorId, View};

use super::{
    super::{
        Allow,
        expr::{EvalError, Expr, ExprValue, NameScope, TextTemplate},
        mesh::Mesh,
        name_group::{fold, stars},
        naming,
        parsed::ParsedNames,
        pattern::Pattern,
        problem::Problem,
        select,
        shard::STAGE_AXIS,
        values::{ValueRequest, Values},
    },
    AtLine, Each, LayoutFile, LeafRule, Placement, Resolved, Span,
    leaf::{LeafFailure, LeafInProgress, Misshapen, int, range_of},
    place::line,
    scope::{Bound, Local, Scope},
    targets::{Inverse, StoredNames, Targets},
};

impl LayoutFile {
    /// Resolves the layout against a repository, for a mesh. `set` holds parameters set by the user. `stored` is the same
    /// repository with its experts as they are stored, for rules that name them so. Left out are leaves of which `allowed` accepts the
    /// missing sources, and tensors that no rule names and its second part accepts.
    ///
    /// # Errors
    /// Everything wrong, at once: missing and unexpected tensors, rules that do not fit, unknown parameters.
    pub fn resolve(
        &self,
        (checkpoint, stored): (&Checkpoint, Option<&Checkpoint>),
        values: &Values<'_>,
        mesh: &Mesh,
        set: &BTreeMap<String, String>,
        allowed: [&Allow; 2],
    ) -> Result<Resolved, Vec<Problem>> {
        let mut scope = Scope::new(self, checkpoint, mesh, set, None);
        scope.stored = stored;
        self.run(&scope, values, allowed)
    }

    /// The leaves that a checkpoint of this layout has, as views over targets, and the targets.
    ///
    /// A rule gives the view of a leaf over tensors of the repository. Here these tensors do not exist: they are *targets*,
    /// whose names and shapes the rule gives too. Variables that ask the repository have another definition in the file's
    /// table `[inverse]`, where `exists`, `shape` and `count` ask about leaves. Products and sums have the constants that
    /// undo them. The views of leaves are then inverted by `inverse`.
    ///
    /// # Errors
    /// Everything wrong, at once: absent members of the configuration, rules without an inverse, unknown parameters.
    pub(crate) fn resolve_inverse(
        &self,
        checkpoint: &Checkpoint,
        names: &StoredNames,
        mesh: &Mesh,
        set: &BTreeMap<String, String>,
    ) -> Result<(Resolved, Targets), Vec<Problem>> {
        let inverse = Inverse { names, targets: RefCell::new(Targets::default()) };
        let scope = Scope::new(self, checkpoint, mesh, set, Some(&inverse));
        let values = Values::new(checkpoint, ValueRequest::default(), &[], None);
        let resolved = self.run(&scope, &values, [&Allow::default(); 2])?;
        drop(scope);
        Ok((resolved, inverse.targets.into_inner()))
    }

    /// Resolves the layout in a scope.
    fn run(&self, scope: &Scope<'_>, values: &Values<'_>, allowed: [&Allow; 2]) -> Result<Resolved, Vec<Problem>> {
        let checkpoint = scope.checkpoint;
        let mut problems = Vec::new();
        for name in scope.set.keys().filter(|name| !self.params.contains_key(*name)) {
            let known: Vec<&str> = self.params.keys().map(String::as_str).collect();
            let reason = did_you_mean("parameter", name, known.iter().copied())
                .unwrap_or_else(|| format!("there is no parameter {name:?}; there are: {}", known.join(", ")));
            problems.push(Problem::File { file: self.label.clone(), reason });
        }
        for (name, definition) in self.params.iter().chain(&self.vars) {
            // A variable whose expression needs an absent value is an error only where a rule uses the variable.
            if let Err(error) = scope.global(name)
                && error.absent.is_none()
            {
                problems.push(scope.problem(definition.at, "", &error));
            }
        }
        let mut resolver = Resolver {
            scope,
            values,
            allowed,
            used: vec![false; checkpoint.table().id_end()],
            lost: BTreeMap::new(),
            misshapen: BTreeMap::new(),
            problems,
            failed: BTreeSet::new(),
            made: Resolved::default(),
        };
        if resolver.problems.is_empty() {
            resolver.check();
        }
        if resolver.problems.is_empty() {
            resolver.run();
            if scope.inverse.is_some() {
                // The inverse compares the leaves, not their sources.
                resolver.made.ignored = resolver.ignored();
            } else {
                resolver.report_shapes();
                resolver.compare();
            }
        }
        let params = self.params.keys().map(|name| {
            let value = scope.global(name).map_or_else(|_| "absent".to_owned(), |value| value.to_string());
            (name.clone(), value)
        });
        resolver.made.params = params.collect();
        let verified = self.verified.as_ref();
        if verified.is_some_and(|verified| resolver.eval(verified, &[], is_true("verified")) != Some(true)) {
            let name = &self.name;
            let warning = format!("layout {name} has not been compared here with the program that it imitates");
            resolver.made.warnings.insert(0, warning);
        }
        let Resolver { problems, made, .. } = resolver;
        if problems.is_empty() { Ok(made) } else { Err(problems) }
    }
}

struct Resolver<'a> {
    scope: &'a Scope<'a>,
    values: &'a Values<'a>,
    /// Of missing sources, and of tensors that no rule names.
    allowed: [&'a Allow; 2],
    used: Vec<bool>,
    /// Sources that rules name and the repository lacks, each with the leaf that needs it: by whether the leaf is left out with the user's
    /// permission, the line of the rule, and the source with stars.
    lost: BTreeMap<(bool, usize, String), Vec<(String, String)>>,
    /// Sources of another shape than their rules say: by the line of the rule, and the expected and the found shape.
    misshapen: BTreeMap<(usize, String, String), Vec<Misshapen>>,
    problems: Vec<Problem>,
    /// Expressions of leaves without a value, and the reasons.
    failed: BTreeSet<(Span, String)>,
    made: Resolved,
}

impl<'a> Resolver<'a> {
    fn run(&mut self) {
        let file = self.scope.file;
        for leaf in &file.leaf {
            self.rule(None, leaf, &[]);
        }
        for place in &file.place {
            for mut bound in self.instances(&place.each, place.when.as_ref(), &[]) {
                for (name, binding) in &place.bindings {
                    if let Some(value) = self.eval(binding, &bound, Expr::eval) {
                        bound.push((name.as_str().into(), value));
                    }
                }
                for leaf in place.group.it.iter().flat_map(|group| &file.group[group]) {
                    self.rule(Some(place), leaf, &bound);
                }
            }
        }
    }

    fn check(&mut self) {
        let mut fitting: Option<String> = None;
        for check in &self.scope.file.check {
            let local = Local { scope: self.scope, bound: &[] };
            let said = check.that.it.eval(&local).and_then(|holds| holds.bool("check")).and_then(|holds| {
                let say = || check.say.it.eval(&local);
                if holds { Ok(None) } else { say().map(Some) }
            });
            match said {
                Ok(Some(reason)) if check.warn => self.made.warnings.push(reason),
                Ok(Some(reason)) => {
                    let fitting = fitting.get_or_insert_with(|| fitting_sizes(self.scope));
                    self.add(self.scope.file.unmet(check.that.at, format!("{reason}{fitting}")));
                }
                Ok(None) => {}
                Err(error) if check.warn && error.absent.is_some() => {}
                Err(error) => self.add(self.scope.problem(check.that.at, "", &error)),
            }
        }
    }

    fn eval<T, V>(
        &mut self,
        placed: &AtLine<T>,
        bound: &[(Arc<str>, ExprValue)],
        eval: impl FnOnce(&T, &dyn NameScope) -> Result<V, EvalError>,
    ) -> Option<V> {
        let result = eval(&placed.it, &Local { scope: self.scope, bound });
        result.map_err(|error| self.add(self.scope.problem(placed.at, "", &error))).ok()
    }

    /// Adds a problem unless it is already listed: one rule may fail for every layer.
    fn add(&mut self, problem: Problem) {
        if self.problems.last() != Some(&problem) && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// All bindings of the variables of `each` that satisfy the condition.
    fn instances(&mut self, each: &Each, when: Option<&AtLine<Expr>>, outer: &[(Arc<str>, ExprValue)]) -> Vec<Bound> {
        // A condition without any of the variables comes before their ranges: the ranges may have a meaning only if it
        // holds.
        let free = |when: &&AtLine<Expr>| !when.it.names.iter().any(|name| each.contains_key(&**name));
        if let Some(when) = when.filter(free)
            && self.eval(when, outer, is_true("when")) != Some(true)
        {
            return Vec::new();
        }
        let mut all = vec![outer.to_vec()];
        for (var, over) in each {
            let Some(range) = self.eval(over, outer, range_of) else { return Vec::new() };
            let var: &Arc<str> = &var.as_str().into();
            let with = |bound: &Bound, number| [&bound[..], &[(var.clone(), int(number))]].concat();
            all = all.iter().flat_map(|bound| range.clone().map(move |number| with(bound, number))).collect();
        }
        let Some(when) = when else { return all };
        let holds = all.iter().map(|bound| self.eval(when, bound, is_true("when"))).collect::<Option<Vec<bool>>>();
        all.into_iter().zip(holds.unwrap_or_default()).filter_map(|(bound, holds)| holds.then_some(bound)).collect()
    }

    fn rule(&mut self, place: Option<&'a Placement>, leaf: &'a LeafRule, outer: &[(Arc<str>, ExprValue)]) {
        for bound in self.instances(&leaf.each, leaf.when.as_ref(), outer) {
            let Some(name) = self.eval(&leaf.to, &bound, TextTemplate::eval) else { return };
            let to = place.and_then(|place| place.to.as_ref());
            let prefix = to.map_or_else(|| Some(String::new()), |to| self.eval(to, &bound, TextTemplate::eval));
            let Some(prefix) = prefix else { return };
            let stacks = leaf.stack.iter().chain(place.map_or(&[][..], |place| &place.stack)).collect();
            let name = naming::joined(&prefix, &name);
            if self.scope.inverse.is_some() && leaf.optional && self.scope.find(&name).is_none() {
                continue;
            }
            if self.scope.inverse.is_some() && leaf.copy {
                self.made.copies.push(name);
                continue;
            }
            let Ok(stage) = self.stage(place, leaf, &bound, &name) else { return };
            let mut making = LeafInProgress {
                scope: self.scope,
                values: self.values,
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
            let view = making.view();
            self.finish(making, view);
        }
    }

    /// The pipeline stage that holds a leaf, as the leaf or else its place says. An error has been reported.
    fn stage(
        &mut self,
        place: Option<&Placement>,
        leaf: &LeafRule,
        bound: &[(Arc<str>, ExprValue)],
        name: &str,
    ) -> Result<Option<u64>, ()> {
        let Some(stage) = leaf.stage.as_ref().or_else(|| place?.stage.as_ref()) else { return Ok(None) };
        let stages = self.scope.mesh.find(STAGE_AXIS).map_or(1, |axis| self.scope.mesh.axes()[axis].size);
        let number = stage.it.eval(&Local { scope: self.scope, bound }).and_then(|number| number.natural("stage"));
        let number =
            number.and_then(|number| if number < stages { Ok(number) } else { Err(EvalError::range("stage")) });
        let number = number.map(|number| Some(number).filter(|_| stages > 1));
        number.map_err(|error| self.add(self.scope.problem(stage.at, name, &error)))
    }

    fn finish(&mut self, mut making: LeafInProgress<'_>, view: Result<View, LeafFailure>) {
        let line = |at: Span| line(&self.scope.file.text, at.0);
        for misshapen in making.misshapen.drain(..) {
            let key = (line(misshapen.at), misshapen.expected.clone(), misshapen.found.to_string());
            self.misshapen.entry(key).or_default().push(misshapen);
        }
        let LeafInProgress { leaf, name, missing, found, .. } = &making;
        // A leaf that fails has still used the sources that it found: the missing source is the reason, not these.
        for id in found {
            self.used[id.0 as usize] = true;
        }
        if !missing.is_empty() {
            if leaf.optional && found.is_empty() {
                return;
            }
            let allowed = missing.iter().all(|source| self.allowed[0].accepts(source));
            for source in missing {
                let lost = self.lost.entry((allowed, line(leaf.from.at), stars(source))).or_default();
                lost.push((source.clone(), name.clone()));
            }
            return;
        }
        match view {
            Ok(view) => self.made.drafts.push(making.draft(view)),
            Err(LeafFailure::Empty | LeafFailure::Missing) => {}
            Err(LeafFailure::Source(problem)) => self.add(problem),
            Err(LeafFailure::Rule(at, error)) => {
                // A rule that fails for every layer is reported once, for the first layer.
                let text = error.to_string();
                if self.failed.insert((at, text)) {
                    self.add(self.scope.problem(at, name, &error));
                }
            }
        }
    }

    /// Reports the sources of another shape than their rules say. Alike ones are one problem.
    fn report_shapes(&mut self) {
        let checkpoint = self.scope.checkpoint;
        for ((line, expected, _), alike) in std::mem::take(&mut self.misshapen) {
            let file = checkpoint.source().path(checkpoint.file_of(alike[0].id)).display().to_string();
            let names: BTreeSet<&str> = alike.iter().map(|misshapen| checkpoint.tensor(misshapen.id).name).collect();
            for group in fold(names, &[]) {
                let rule = format!("{}:{line}: ", self.scope.file.label);
                let (file, expected, found) = (file.clone(), expected.clone(), alike[0].found.clone());
                self.add(Problem::SourceShape { group, file, rule, expected, found });
            }
        }
    }

    /// Names that the rules ignore.
    fn ignored(&mut self) -> Vec<Pattern> {
        let mut ignored = Vec::new();
        for ignore in &self.scope.file.ignore {
            for bound in self.instances(&ignore.each, ignore.when.as_ref(), &[]) {
                let Some(text) = self.eval(&ignore.names, &bound, TextTemplate::eval) else { continue };
                match Pattern::parse(&text) {
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

    /// These names without those of layers that predict further tokens and that the configuration does not count: they are no part of
    /// the model that it describes, and are left out with a warning.
    fn without_predictors(&mut self, unused: Vec<&'a str>) -> Vec<&'a str> {
        let checkpoint = self.scope.checkpoint;
        let Some((prefix, first)) = select::predicting(checkpoint, &ParsedNames::of(checkpoint), None) else {
            return unused;
        };
        let is_beyond = |name: &&str| {
            let parsed = naming::parse(name);
            parsed.prefix == prefix && parsed.layer.is_some_and(|layer| layer >= first)
        };
        let (beyond, rest): (Vec<&str>, Vec<&str>) = unused.into_iter().partition(is_beyond);
        if !beyond.is_empty() {
            self.made.warnings.push(format!(
                "{} tensors of layers from {first} on, which predict further tokens and which config.json does not count, are left out",
                beyond.len()
            ));
            self.made.left_out.extend(fold(beyond, &[]));
        }
        rest
    }

    /// Reports the missing sources, and the tensors that no rule uses or ignores.
    fn compare(&mut self) {
        // Rules that failed have used nothing: the tensors that they leave over are not unexpected.
        let failed = self.problems.iter().any(|problem| matches!(problem, Problem::Layout { .. }));
        let ignored = self.ignored();
        // A part of a tensor that a rule uses as a whole is used.
        let is_used = |id: TensorId, info: &TensorInfo<'_>| match info.storage {
            Storage::Composed(composed) => self.used[id.0 as usize] || self.used[composed.of.0 as usize],
            Storage::Plain { .. } | Storage::Quantized(_) | Storage::Mosaic(_) => self.used[id.0 as usize],
        };
        let (used, unused): (Vec<_>, Vec<_>) =
            self.scope.checkpoint.tensors().partition(|(id, info)| is_used(*id, info));
        let is_ignored = |name: &&str| ignored.iter().any(|pattern| pattern.matches(name));
        let (ignored, unused): (Vec<&str>, Vec<&str>) =
            unused.into_iter().map(|(_, info)| info.name).partition(is_ignored);
        self.made.left_out = fold(ignored, &[]);
        let unused = self.without_predictors(unused);
        let strange: BTreeSet<String> = unused.iter().map(|name| stars(name)).collect();
        let lost = std::mem::take(&mut self.lost);
        for ((allowed, line, _), lost) in &lost {
            let (sources, targets): (BTreeSet<&str>, BTreeSet<&str>) =
                lost.iter().map(|(source, target)| (source.as_str(), target.as_str())).collect();
            let first = lost[0].1.as_str();
            let for_target =
                if targets.len() == 1 { first.to_owned() } else { format!("{first} and {} more", targets.len() - 1) };
            for group in fold(sources, &[&strange]) {
                if *allowed {
                    self.made.warnings.push(format!("{for_target} is left out: missing tensor {}", group.counted()));
                } else {
                    let rule = format!("{}:{line}: ", self.scope.file.label);
                    self.problems.push(Problem::MissingTensor { group, for_target: for_target.clone(), rule });
                }
            }
        }
        let (allowed, refused): (Vec<&str>, Vec<&str>) =
            unused.into_iter().partition(|name| self.allowed[1].accepts(name));
        for group in fold(allowed, &[]) {
            self.made.warnings.push(format!("{}: left out", Problem::UnexpectedTensor { group }));
        }
        if !failed && !refused.is_empty() {
            let known = used.iter().map(|(_, info)| stars(info.name)).collect();
            let gone = lost.into_keys().map(|(.., source)| source).collect();
            let refused = fold(refused, &[&gone, &known]);
            self.problems.extend(refused.into_iter().map(|group| Problem::UnexpectedTensor { group }));
        }
    }
}

/// The value of a condition.
fn is_true(what: &'static str) -> impl Fn(&Expr, &dyn NameScope) -> Result<bool, EvalError> {
    move |expr, names| expr.eval(names)?.bool(what)
}

/// Greatest size of a mesh axis that is tried as a proposal.
const SIZE_MAX: u64 = 256;

/// Most sizes that a message proposes.
const SIZES_LISTED: usize = 12;

/// The sizes of single mesh axes with which all conditions of the file hold, as the end of a message. Empty if the mesh is not
/// the reason.
fn fitting_sizes(scope: &Scope<'_>) -> String {
    let holds = |mesh: &Mesh| {
        let scope = scope.for_mesh(mesh);
        let local = Local { scope: &scope, bound: &[] };
        let mut checks = scope.file.check.iter().filter(|check| !check.warn);
        checks.all(|check| check.that.it.eval(&local).and_then(|holds| holds.bool("check")).unwrap_or(false))
    };
    let axes = scope.mesh.axes().iter().filter(|axis| axis.size > 1);
    let proposals = axes.filter_map(|axis| {
        let fits = |size: &u64| scope.mesh.with_size(&axis.name, *size).is_some_and(|mesh| holds(&mesh));
        let sizes: Vec<String> = (1..=SIZE_MAX).filter(fits).take(SIZES_LISTED).map(|size| size.to_string()).collect();
        (!sizes.is_empty()).then(|| format!("; sizes of {} that fit: {}", axis.name, sizes.join(", ")))
    });
    proposals.collect()
}
