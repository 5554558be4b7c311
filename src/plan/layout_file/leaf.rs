//! The view of one leaf: its sources, their shapes, and the stacks over them.

use std::{ops::Range, sync::Arc};

use ckfs_tensor::{Shape, TensorId, View};

use super::{
    super::{
        draft::{Draft, Roles},
        expr::{EvalError, Expr, ExprValue, TextTemplate},
        problem::Problem,
        values::Values,
    },
    AtLine, LeafRule, Placement, Span, Stack,
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

/// Makes the views of leaves.
#[derive(Clone, Copy)]
pub(super) struct LeafViews<'a> {
    pub(super) scope: &'a Scope<'a>,
    pub(super) values: &'a Values<'a>,
}

impl LeafViews<'_> {
    /// The view of a leaf.
    pub(super) fn view(&self, making: &mut LeafInProgress<'_>) -> Result<View, LeafFailure> {
        let view = self.level(making, 0)?;
        self.after_stack(making, view)
    }

    /// The view from one level of stacks inwards.
    fn level(&self, making: &mut LeafInProgress<'_>, level: usize) -> Result<View, LeafFailure> {
        let Some(stack) = making.stacks.get(level).copied() else { return self.slice(making) };
        let range = match &stack.over {
            Some(over) => {
                let range = range_of(self.scope, over, &making.bound);
                range.map_err(|error| LeafFailure::Rule(over.at, error))?
            }
            None => self.numbers(making, stack)?,
        };
        let mut children = Vec::with_capacity(usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0));
        let mut empty = false;
        for number in range {
            making.bound.push((stack.var.it.clone(), int(number)));
            let child = self.level(making, level + 1);
            making.bound.pop();
            match child {
                Ok(child) => children.push(child),
                // Others may be missing too: the loop goes on to name them all.
                Err(LeafFailure::Missing) => {}
                Err(LeafFailure::Empty) => empty = true,
                Err(failure) => return Err(failure),
            }
        }
        if !making.missing.is_empty() || !making.misshapen.is_empty() {
            return Err(LeafFailure::Missing);
        }
        if empty || children.is_empty() {
            return Err(LeafFailure::Empty);
        }
        let axis = self.axis(making, level, children[0].shape().rank())?;
        View::stack(axis, &children).map_err(|error| LeafFailure::Rule(stack.var.at, error.into()))
    }

    /// The view of a finished stack. None of its axes counts as stacked.
    fn after_stack(&self, making: &mut LeafInProgress<'_>, stacked: View) -> Result<View, LeafFailure> {
        let Some(after) = &making.leaf.after_stack else { return Ok(stacked) };
        let mut bound = making.bound.clone();
        bound.push(("x".into(), ExprValue::View(stacked)));
        let view = after.it.eval(&Local { scope: self.scope, bound: &bound });
        let view = view.and_then(|view| view.view("after_stack").cloned());
        making.axes = Some(Vec::new());
        view.map_err(|error| LeafFailure::Rule(after.at, error))
    }

    /// Number of the axis that a level of stacks makes, among the axes of the levels inside it.
    fn axis(&self, making: &mut LeafInProgress<'_>, level: usize, child_rank: usize) -> Result<usize, LeafFailure> {
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
                let number = number.map_err(|error| LeafFailure::Rule(axis.at, error))?;
                let number = usize::try_from(number).ok().filter(|number| *number < rank + levels);
                match number.filter(|number| !axes.contains(number)) {
                    Some(number) => axes.push(number),
                    None => return Err(LeafFailure::Rule(axis.at, EvalError::range("axis"))),
                }
            }
            making.axes = Some(axes);
        }
        let axes = making.axes.as_deref().expect("set above");
        Ok(axes[level] - axes[..level].iter().filter(|outer| **outer < axes[level]).count())
    }

    /// All numbers of a variable in the names of the repository, from 0.
    fn numbers(&self, making: &LeafInProgress<'_>, stack: &Stack) -> Result<Range<u64>, LeafFailure> {
        if self.scope.inverse.is_some() {
            return Err(open(stack));
        }
        let mut bound = making.bound.clone();
        bound.push((stack.var.it.clone(), ExprValue::Text("*".into())));
        // Stacks further in have no number yet. Any number serves, as layers and experts start at 0 unless a range says
        // otherwise.
        let at = making.stacks.iter().position(|other| std::ptr::eq(*other, stack));
        let at = at.expect("the stack is one of those being made");
        for inner in &making.stacks[at + 1..] {
            let first =
                inner.over.as_ref().map_or(Ok(0), |over| range_of(self.scope, over, &bound).map(|range| range.start));
            let first = first.map_err(|error| LeafFailure::Rule(inner.var.at, error))?;
            bound.push((inner.var.it.clone(), int(first)));
        }
        let Some((_, first)) = making.leaf.from.named.first() else { return Ok(0..0) };
        let name = self.source_name(making, first, &bound).map_err(|_| open(stack))?;
        Ok(0..self.scope.count(&name).min(RANGE_MAX))
    }

    fn source_name(
        &self,
        making: &LeafInProgress<'_>,
        template: &TextTemplate,
        bound: &[(Arc<str>, ExprValue)],
    ) -> Result<String, LeafFailure> {
        let local = Local { scope: self.scope, bound };
        let name = template.eval(&local).map_err(|error| LeafFailure::Rule(making.leaf.from.at, error))?;
        let Some(from) = making.place.and_then(|place| place.from.as_ref()) else { return Ok(name) };
        let prefix = from.it.eval(&local).map_err(|error| LeafFailure::Rule(from.at, error))?;
        Ok(joined(&prefix, &name))
    }

    /// The view over one set of sources, before stacking.
    fn slice(&self, making: &mut LeafInProgress<'_>) -> Result<View, LeafFailure> {
        let leaf = making.leaf;
        let before = making.missing.len() + making.misshapen.len();
        let mut sources = Vec::with_capacity(leaf.from.named.len());
        for (name, template) in &leaf.from.named {
            let source = self.source_name(making, template, &making.bound)?;
            if let Some(inverse) = self.scope.inverse {
                let extents = self.extents(making, name)?;
                let view = inverse.targets.borrow_mut().view(source, extents);
                sources.push((name.clone(), view.map_err(|error| LeafFailure::Rule(leaf.from.at, error))?));
                continue;
            }
            let Some(id) = self.scope.find(&source) else {
                making.missing.push(source);
                continue;
            };
            making.found.push(id);
            let found = self.scope.checkpoint.tensor(id).name;
            let dtype = match &leaf.dtype {
                Some(dtype) => dtype.it.dtype(),
                None => self.values.dtype_of(id, &[found, &source, &making.name]),
            };
            let view = self.values.view(id, dtype).map_err(LeafFailure::Source)?;
            making.misshapen.extend(self.misshapen(making, name, id, view.shape())?);
            sources.push((name.clone(), view));
        }
        if making.missing.len() + making.misshapen.len() > before {
            return Err(LeafFailure::Missing);
        }
        let Some(view) = &leaf.view else { return sources.pop().map(|(_, view)| view).ok_or(LeafFailure::Empty) };
        let outside = making.bound.len();
        making.bound.extend(sources.into_iter().map(|(name, view)| (name, ExprValue::View(view))));
        let value = view.it.eval(&Local { scope: self.scope, bound: &making.bound });
        making.bound.truncate(outside);
        value.and_then(|value| value.view("view").cloned()).map_err(|error| LeafFailure::Rule(view.at, error))
    }

    /// The extents that a leaf's rule gives to a source. An extent without a value has the reason in its place.
    fn extents(&self, making: &LeafInProgress<'_>, name: &str) -> Result<Vec<Result<u64, NoExtent>>, LeafFailure> {
        let Some((_, shape)) = making.leaf.shape.iter().find(|(of, _)| **of == *name) else {
            return Ok(vec![Err(None)]);
        };
        let local = Local { scope: self.scope, bound: &making.bound };
        let extents = shape.it.iter().map(|extent| {
            let Some(extent) = extent else { return Ok(Err(None)) };
            match extent.eval(&local).and_then(|extent| extent.natural("shape")) {
                Ok(extent) => Ok(Ok(extent)),
                Err(error) if error.absent.is_some() => Ok(Err(Some(error))),
                Err(error) => Err(LeafFailure::Rule(shape.at, error)),
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
    ) -> Result<Option<Misshapen>, LeafFailure> {
        let Some((_, shape)) = making.leaf.shape.iter().find(|(of, _)| **of == *name) else { return Ok(None) };
        let expected = self.extents(making, name)?;
        let expected: Vec<Option<u64>> = expected.into_iter().map(Result::ok).collect();
        let same = |(expected, found): (&Option<u64>, &u64)| expected.is_none_or(|expected| expected == *found);
        if expected.len() == found.rank() && expected.iter().zip(found.extents()).all(same) {
            return Ok(None);
        }
        let words = expected.iter().map(|extent| extent.map_or_else(|| "_".to_owned(), |extent| extent.to_string()));
        let expected = format!("[{}]", words.collect::<Vec<_>>().join(", "));
        Ok(Some(Misshapen { id, at: shape.at, expected, found: found.clone() }))
    }
}

impl LeafInProgress<'_> {
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
pub(super) fn range_of(
    scope: &Scope<'_>,
    range: &AtLine<(Expr, Expr)>,
    bound: &[(Arc<str>, ExprValue)],
) -> Result<Range<u64>, EvalError> {
    let local = Local { scope, bound };
    let number = |expr: &Expr| expr.eval(&local)?.natural("range");
    let (start, stop) = (number(&range.it.0)?, number(&range.it.1)?);
    if stop.saturating_sub(start) <= RANGE_MAX { Ok(start..stop) } else { Err(EvalError::range("range")) }
}

pub(super) fn int(number: u64) -> ExprValue {
    ExprValue::Int(i64::try_from(number).expect("numbers of loops come from expressions, which have 63 bits"))
}

pub(super) fn joined(prefix: &str, name: &str) -> String {
    if prefix.is_empty() || name.is_empty() { format!("{prefix}{name}") } else { format!("{prefix}.{name}") }
}
