//! The view of one leaf: its sources, their shapes, and the stacks over them.

use std::{ops::Range, sync::Arc};

use ckfs_tensor::{Shape, TensorId, View};

use super::{
    super::{
        draft::{Draft, Roles},
        expr::{EvalError, Expr, ExprValue, NameScope, TextTemplate},
        naming::joined,
        problem::Problem,
        values::Values,
    },
    AtLine, Extents, LeafRule, Placement, Span, Stack,
    scope::{Bound, Local, Scope},
    targets::NoExtent,
};

/// Most numbers that one range may have.
const RANGE_MAX: u64 = 1 << 20;

/// Logical names by which a stack is known to be one of experts.
const EXPERT_WORDS: [&str; 3] = ["exp", "expert", "experts"];

/// Why a leaf is absent.
pub(super) enum LeafFailure {
    /// A source is missing, or has another shape than its rule says.
    Missing,
    /// The stack would have no layers.
    Empty,
    /// A rule does not fit the repository.
    Rule(Span, EvalError),
    /// A source cannot have the requested values.
    Source(Problem),
}

/// A source of another shape than its rule says.
pub(super) struct Misshapen {
    pub(super) id: TensorId,
    /// Where the rule gives it.
    pub(super) at: Span,
    pub(super) expected: String,
    pub(super) found: Shape,
}

/// A leaf that is not finished.
pub(super) struct LeafInProgress<'a> {
    pub(super) scope: &'a Scope<'a>,
    pub(super) values: &'a Values<'a>,
    pub(super) leaf: &'a LeafRule,
    pub(super) place: Option<&'a Placement>,
    pub(super) name: String,
    pub(super) bound: Bound,
    /// Stacks, outermost first.
    pub(super) stacks: Vec<&'a Stack>,
    /// Numbers of the stacked axes in the finished leaf, once known.
    pub(super) axes: Option<Vec<usize>>,
    /// The pipeline stage that holds the leaf.
    pub(super) stage: Option<u64>,
    pub(super) missing: Vec<String>,
    pub(super) misshapen: Vec<Misshapen>,
    pub(super) found: Vec<TensorId>,
}

/// The failure of the rule at a place.
fn rule(at: Span) -> impl Fn(EvalError) -> LeafFailure {
    move |error| LeafFailure::Rule(at, error)
}

impl LeafInProgress<'_> {
    /// The view of the leaf.
    pub(super) fn view(&mut self) -> Result<View, LeafFailure> {
        let stacked = self.level(0)?;
        let Some(after) = &self.leaf.after_stack else { return Ok(stacked) };
        self.bound.push(("x".into(), ExprValue::View(stacked)));
        // None of the stack's axes counts as stacked.
        self.axes = Some(Vec::new());
        self.view_of(after, "after_stack")
    }

    fn local(&self) -> Local<'_> {
        Local { scope: self.scope, bound: &self.bound }
    }

    fn view_of(&self, view: &AtLine<Expr>, what: &'static str) -> Result<View, LeafFailure> {
        view.it.eval(&self.local()).and_then(|value| value.view(what).cloned()).map_err(rule(view.at))
    }

    /// The view from one level of stacks inwards.
    fn level(&mut self, level: usize) -> Result<View, LeafFailure> {
        let Some(stack) = self.stacks.get(level).copied() else { return self.slice() };
        let range = match &stack.over {
            Some(over) => range_of(&over.it, &self.local()).map_err(rule(over.at))?,
            None => self.numbers(level)?,
        };
        let mut children = Vec::with_capacity(usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0));
        let mut empty = false;
        for number in range {
            self.bound.push((stack.var.it.clone(), int(number)));
            let child = self.level(level + 1);
            self.bound.pop();
            match child {
                Ok(child) => children.push(child),
                // Others may be missing too: the loop goes on to name them all.
                Err(LeafFailure::Missing) => {}
                Err(LeafFailure::Empty) => empty = true,
                Err(failure) => return Err(failure),
            }
        }
        if !self.missing.is_empty() || !self.misshapen.is_empty() {
            return Err(LeafFailure::Missing);
        }
        if empty || children.is_empty() {
            return Err(LeafFailure::Empty);
        }
        let axis = self.axis(level, children[0].shape().rank())?;
        View::stack(axis, &children).map_err(|error| LeafFailure::Rule(stack.var.at, error.into()))
    }

    /// Number of the axis that a level of stacks makes, among the axes of the levels inside it. The innermost asks first.
    fn axis(&mut self, level: usize, child_rank: usize) -> Result<usize, LeafFailure> {
        if self.axes.is_none() {
            let mut axes = Vec::with_capacity(self.stacks.len());
            for (outer, stack) in self.stacks.iter().enumerate() {
                let Some(axis) = &stack.axis else {
                    axes.push(outer);
                    continue;
                };
                let more = [("rank".into(), int(child_rank as u64)), ("outer".into(), int(outer as u64))];
                let local = Local { scope: self.scope, bound: &[&self.bound[..], &more].concat() };
                let number = axis.it.eval(&local).and_then(|number| number.natural("axis")).map_err(rule(axis.at))?;
                let number = usize::try_from(number).ok().filter(|number| *number < child_rank + self.stacks.len());
                let number = number.filter(|number| !axes.contains(number));
                axes.push(number.ok_or_else(|| LeafFailure::Rule(axis.at, EvalError::range("axis")))?);
            }
            self.axes = Some(axes);
        }
        let axes = self.axes.as_deref().expect("set above");
        Ok(axes[level] - axes[..level].iter().filter(|outer| **outer < axes[level]).count())
    }

    /// All numbers of a stack's variable in the names of the repository, from 0.
    fn numbers(&self, level: usize) -> Result<Range<u64>, LeafFailure> {
        let stack = self.stacks[level];
        if self.scope.inverse.is_some() {
            return Err(open(stack));
        }
        let mut bound = self.bound.clone();
        bound.push((stack.var.it.clone(), ExprValue::Text("*".into())));
        // Stacks further in have no number yet. Any number serves, as layers and experts start at 0 unless a range says
        // otherwise.
        for inner in &self.stacks[level + 1..] {
            let local = Local { scope: self.scope, bound: &bound };
            let first = inner.over.as_ref().map_or(Ok(0), |over| range_of(&over.it, &local).map(|range| range.start));
            let first = first.map_err(rule(inner.var.at))?;
            bound.push((inner.var.it.clone(), int(first)));
        }
        let Some((_, first)) = self.leaf.from.named.first() else { return Ok(0..0) };
        let name = self.source_name(first, &bound).map_err(|_| open(stack))?;
        Ok(0..self.scope.count(&name).min(RANGE_MAX))
    }

    fn source_name(&self, template: &TextTemplate, bound: &[(Arc<str>, ExprValue)]) -> Result<String, LeafFailure> {
        let local = Local { scope: self.scope, bound };
        let name = template.eval(&local).map_err(rule(self.leaf.from.at))?;
        let Some(from) = self.place.and_then(|place| place.from.as_ref()) else { return Ok(name) };
        Ok(joined(&from.it.eval(&local).map_err(rule(from.at))?, &name))
    }

    /// The view over one set of sources, before stacking.
    fn slice(&mut self) -> Result<View, LeafFailure> {
        let leaf = self.leaf;
        let before = self.missing.len() + self.misshapen.len();
        let mut sources = Vec::with_capacity(leaf.from.named.len());
        for (name, template) in &leaf.from.named {
            let source = self.source_name(template, &self.bound)?;
            let shape = leaf.shape.iter().find(|(of, _)| **of == **name).map(|(_, shape)| shape);
            if let Some(inverse) = self.scope.inverse {
                let extents = shape.map_or_else(|| Ok(vec![Err(None)]), |shape| self.extents(shape))?;
                let view = inverse.view(source, extents).map_err(rule(leaf.from.at))?;
                sources.push((name.clone(), ExprValue::View(view)));
                continue;
            }
            let Some(id) = self.scope.find(&source) else {
                self.missing.push(source);
                continue;
            };
            self.found.push(id);
            let found = self.scope.checkpoint.tensor(id).name;
            let dtype = match &leaf.dtype {
                Some(dtype) => dtype.it.0,
                None => self.values.dtype_of(id, &[found, &source, &self.name]),
            };
            let view = self.values.view(id, dtype).map_err(LeafFailure::Source)?;
            if let Some(shape) = shape {
                self.misshapen.extend(self.misfit(shape, id, view.shape())?);
            }
            sources.push((name.clone(), ExprValue::View(view)));
        }
        if self.missing.len() + self.misshapen.len() > before {
            return Err(LeafFailure::Missing);
        }
        let Some(view) = &leaf.view else {
            let Some((_, ExprValue::View(view))) = sources.pop() else { return Err(LeafFailure::Empty) };
            return Ok(view);
        };
        let outside = self.bound.len();
        self.bound.append(&mut sources);
        let view = self.view_of(view, "view");
        self.bound.truncate(outside);
        view
    }

    /// The extents that a rule gives to a source. An extent without a value has the reason in its place.
    fn extents(&self, shape: &AtLine<Extents>) -> Result<Vec<Result<u64, NoExtent>>, LeafFailure> {
        let extents = shape.it.iter().map(|extent| {
            let Some(extent) = extent else { return Ok(Err(None)) };
            match extent.eval(&self.local()).and_then(|extent| extent.natural("shape")) {
                Ok(extent) => Ok(Ok(extent)),
                Err(error) if error.absent.is_some() => Ok(Err(Some(error))),
                Err(error) => Err(LeafFailure::Rule(shape.at, error)),
            }
        });
        extents.collect()
    }

    /// The difference between the shape of a source and the shape in its rule, if there is one.
    fn misfit(&self, shape: &AtLine<Extents>, id: TensorId, found: &Shape) -> Result<Option<Misshapen>, LeafFailure> {
        let expected: Vec<Option<u64>> = self.extents(shape)?.into_iter().map(Result::ok).collect();
        let same = |(expected, found): (&Option<u64>, &u64)| expected.is_none_or(|expected| expected == *found);
        if expected.len() == found.rank() && expected.iter().zip(found.extents()).all(same) {
            return Ok(None);
        }
        let words = expected.iter().map(|extent| extent.map_or_else(|| "_".to_owned(), |extent| extent.to_string()));
        let expected = format!("[{}]", words.collect::<Vec<_>>().join(", "));
        Ok(Some(Misshapen { id, at: shape.at, expected, found: found.clone() }))
    }

    /// The finished leaf.
    pub(super) fn draft(self, view: View) -> Draft {
        let stacked = self.axes.unwrap_or_default();
        let rank = view.shape().rank();
        let own: Vec<usize> = (0..rank).filter(|axis| !stacked.contains(axis)).collect();
        let logical = match &self.leaf.axes {
            None => Vec::new(),
            // A leaf without axis names of its own takes those of its place.
            Some(axes) if axes.is_empty() => {
                self.place.map_or_else(Vec::new, |place| place.bare.clone().unwrap_or_default())
            }
            Some(axes) => {
                let mut names = vec![String::new(); rank];
                for (at, name) in own.iter().zip(axes) {
                    names[*at].clone_from(name);
                }
                for (at, stack) in stacked.iter().zip(&self.stacks) {
                    stack.name().clone_into(&mut names[*at]);
                }
                names
            }
        };
        let stacked_experts = self.stacks.iter().position(|stack| EXPERT_WORDS.contains(&stack.name()));
        let stacked_experts = stacked_experts.and_then(|at| stacked.get(at).copied());
        let roles = Roles {
            stacked: own.first().copied().unwrap_or(rank),
            tp: self.leaf.tp.and_then(|axis| own.get(axis).copied()),
            experts: self.leaf.experts.and_then(|axis| own.get(axis).copied()).or(stacked_experts),
            logical,
            stage: self.stage,
            ..Roles::default()
        };
        Draft::new(self.name, view, roles)
    }
}

/// A loop without a range, over something other than the number in a name.
fn open(stack: &Stack) -> LeafFailure {
    let text = format!("the numbers of {:?} cannot be derived from names: give a range by over", stack.var.it);
    LeafFailure::Rule(stack.var.at, EvalError::new(text, &stack.var.it))
}

/// The numbers of a range, of which there are at most [`RANGE_MAX`].
pub(super) fn range_of((start, stop): &(Expr, Expr), names: &dyn NameScope) -> Result<Range<u64>, EvalError> {
    let (start, stop) = (start.eval(names)?.natural("range")?, stop.eval(names)?.natural("range")?);
    if stop.saturating_sub(start) <= RANGE_MAX { Ok(start..stop) } else { Err(EvalError::range("range")) }
}

pub(super) fn int(number: u64) -> ExprValue {
    ExprValue::Int(i64::try_from(number).expect("numbers of loops come from expressions, which have 63 bits"))
}
