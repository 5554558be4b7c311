//! The functions of expressions.

use std::{cmp::Ordering, sync::Arc};

use ckfs_tensor::{DType, Element, Keep, Shape, View, ViewError};
use half::bf16;

use super::value::{Absent, EvalError, ExprValue, NameScope};

/// Most repetitions of one element.
const REPEATS_MAX: usize = 4096;

/// Highest number of operands of a function.
const ARGUMENTS_MAX: usize = 64;

type Evaluated = Result<ExprValue, EvalError>;

/// Name, least and most number of operands, and the result.
pub(super) type Function = (&'static str, usize, usize, fn(&Call<'_>) -> Evaluated);

pub(super) static FUNCTIONS: [Function; 34] = [
    ("min", 1, ARGUMENTS_MAX, |call| call.best(Ordering::is_lt)),
    ("max", 1, ARGUMENTS_MAX, |call| call.best(Ordering::is_gt)),
    ("sqrt", 1, 1, |call| match call.float()? {
        value if value >= 0.0 => Ok(ExprValue::Float(value.sqrt())),
        _ => Err(EvalError::range(call.name)),
    }),
    ("ceil", 1, 1, |call| call.whole(call.float()?.ceil())),
    ("floor", 1, 1, |call| call.whole(call.float()?.floor())),
    #[allow(clippy::cast_possible_truncation, reason = "the caller asks for rounding")]
    ("f32", 1, 1, |call| Ok(ExprValue::Float(f64::from(call.float()? as f32)))),
    #[allow(clippy::cast_possible_truncation, reason = "the caller asks for rounding, by way of f32")]
    ("bf16", 1, 1, |call| Ok(ExprValue::Float(bf16::from_f32(call.float()? as f32).to_f64()))),
    ("exists", 1, 1, |call| Ok(ExprValue::Bool(call.names.shape(call.text(0)?).is_some()))),
    ("given", 1, 1, |call| Ok(ExprValue::Bool(call.names.given(call.text(0)?)))),
    ("shape", 2, 2, |call| match call.names.shape(call.text(0)?) {
        Some(shape) => call.extent(&shape, "an axis of the tensor"),
        None => Ok(ExprValue::Absent(Arc::new(Absent::Tensor(call.text(0)?.to_owned())))),
    }),
    ("count", 1, 1, |call| ExprValue::whole(call.name, call.names.count(call.text(0)?))),
    ("transpose", 1, 1, |call| Ok(ExprValue::View(call.view()?.reverse_axes()))),
    ("permute", 1, ARGUMENTS_MAX, |call| {
        let (view, axes) = (call.view()?, (1..call.values.len()).map(|at| call.axis(at)));
        Ok(ExprValue::View(view.transpose(&axes.collect::<Result<Vec<_>, _>>()?)?))
    }),
    ("swap", 3, 3, |call| Ok(ExprValue::View(call.view()?.swap_axes(call.axis(1)?, call.axis(2)?)?))),
    ("reshape", 1, ARGUMENTS_MAX, |call| call.reshape()),
    ("slice", 4, 5, |call| call.slice()),
    ("part", 4, ARGUMENTS_MAX, |call| call.part()),
    ("halves", 3, 3, |call| call.halves()),
    ("gather", 3, ARGUMENTS_MAX, |call| Ok(ExprValue::View(call.view()?.gather(call.axis(1)?, &call.indexes()?)?))),
    ("concat", 2, ARGUMENTS_MAX, |call| call.joined(0, View::concat)),
    ("stack", 2, ARGUMENTS_MAX, |call| call.joined(1, View::stack)),
    ("pad", 4, 4, |call| Ok(ExprValue::View(call.view()?.pad(call.axis(1)?, call.natural(2)?, call.natural(3)?)?))),
    ("cut_or_pad", 3, 3, |call| {
        let (view, axis, wanted) = (call.view()?, call.axis(1)?, call.natural(2)?);
        let extent = view.shape().extents().get(axis).copied().unwrap_or(0);
        let cut = if wanted <= extent { view.slice(axis, 0, wanted, 1) } else { view.pad(axis, 0, wanted - extent) };
        Ok(ExprValue::View(cut?))
    }),
    ("repeat", 3, 3, |call| call.repeat()),
    ("fill", 2, ARGUMENTS_MAX, |call| call.fill()),
    ("cast", 2, 2, |call| Ok(ExprValue::View(call.view()?.cast(call.dtype()?)?))),
    ("mul", 2, 3, |call| call.product(false, Keep::Operand)),
    ("mul_flush", 2, 3, |call| call.product(true, Keep::Operand)),
    ("mul_f32", 2, 3, |call| call.product(false, Keep::F32)),
    ("add", 2, 2, |call| call.sum(Keep::Operand)),
    ("add_f32", 2, 2, |call| call.sum(Keep::F32)),
    ("exp", 1, 1, |call| Ok(ExprValue::View(call.view()?.exp()?))),
    ("extent", 2, 2, |call| call.extent(call.view()?.shape().extents(), "an axis of the view")),
    ("rank", 1, 1, |call| ExprValue::whole(call.name, call.view()?.shape().rank())),
];

/// A call of a function.
pub(super) struct Call<'a> {
    pub(super) name: &'static str,
    pub(super) values: &'a [ExprValue],
    pub(super) names: &'a dyn NameScope,
}

impl<'a> Call<'a> {
    /// The first operand as a number.
    fn float(&self) -> Result<f64, EvalError> {
        self.values[0].float(self.name)
    }

    /// The first operand as a view.
    fn view(&self) -> Result<&'a View, EvalError> {
        self.values[0].view(self.name)
    }

    fn text(&self, at: usize) -> Result<&'a str, EvalError> {
        self.values[at].text(self.name)
    }

    fn natural(&self, at: usize) -> Result<u64, EvalError> {
        self.values[at].natural(self.name)
    }

    /// The axis of the view that an operand numbers.
    fn axis(&self, at: usize) -> Result<usize, EvalError> {
        self.axis_of(at, self.view()?.shape().rank())
    }

    /// The axis of this rank that an operand numbers. A negative number counts from the end.
    fn axis_of(&self, at: usize, rank: usize) -> Result<usize, EvalError> {
        let number = self.values[at].int(self.name)?;
        let from_end = if number < 0 { i64::try_from(rank).expect("views have few axes") + number } else { number };
        usize::try_from(from_end).map_err(|_| self.values[at].kind(self.name, "an axis"))
    }

    /// The extent of the axis that the second operand numbers.
    fn extent(&self, extents: &[u64], expected: &'static str) -> Evaluated {
        let extent = extents.get(self.axis_of(1, extents.len())?).and_then(|extent| i64::try_from(*extent).ok());
        extent.map(ExprValue::Int).ok_or_else(|| self.values[1].kind(self.name, expected))
    }

    fn whole(&self, value: f64) -> Evaluated {
        // Beyond 2^53 an f64 no longer distinguishes neighbouring integers.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if value.abs() > EXACT {
            return Err(EvalError::range(self.name));
        }
        #[allow(clippy::cast_possible_truncation, reason = "whole and below 2^53")]
        Ok(ExprValue::Int(value as i64))
    }

    /// The operand that comes before all others.
    fn best(&self, is_before: fn(Ordering) -> bool) -> Evaluated {
        let mut best = &self.values[0];
        best.float(self.name)?;
        for value in &self.values[1..] {
            if is_before(value.float(self.name)?.total_cmp(&best.float(self.name)?)) {
                best = value;
            }
        }
        Ok(best.clone())
    }

    /// The views after the first operand, joined along the axis that it numbers. The result has `more` axes than they.
    fn joined(&self, more: usize, join: fn(usize, &[View]) -> Result<View, ViewError>) -> Evaluated {
        let views =
            self.values[1..].iter().map(|value| value.view(self.name).cloned()).collect::<Result<Vec<_>, _>>()?;
        Ok(ExprValue::View(join(self.axis_of(0, views[0].shape().rank() + more)?, &views)?))
    }

    fn slice(&self) -> Evaluated {
        let view = self.view()?;
        let step = self.values.get(4).map_or(Ok(1), |step| step.int(self.name))?;
        Ok(ExprValue::View(if step < 0 {
            let (start, stop) = (&self.values[2], &self.values[3]);
            view.slice_down(self.axis(1)?, start.int(self.name)?, stop.int(self.name)?, step.unsigned_abs())?
        } else {
            view.slice(self.axis(1)?, self.natural(2)?, self.natural(3)?, step.unsigned_abs())?
        }))
    }

    /// The part of this number, of parts of these extents that make up an axis.
    fn part(&self) -> Evaluated {
        let (view, axis, number) = (self.view()?, self.axis(1)?, self.natural(2)?);
        let parts = (3..self.values.len()).map(|at| self.natural(at)).collect::<Result<Vec<u64>, _>>()?;
        let all = parts.iter().try_fold(0u64, |all, part| all.checked_add(*part));
        let found = view.shape().extents().get(axis).copied();
        let place = usize::try_from(number).ok().filter(|place| *place < parts.len());
        let Some(place) = place.filter(|_| all.is_some() && all == found) else {
            let reason = format!("part: expected part {number} of {parts:?} of axis {axis}, found {}", view.shape());
            return Err(EvalError::new(reason, self.name));
        };
        let start = parts[..place].iter().sum();
        Ok(ExprValue::View(view.slice(axis, start, start + parts[place], 1)?))
    }

    /// Groups of pairs along an axis: in each group all first elements of pairs, then all second ones.
    fn halves(&self) -> Evaluated {
        let (view, axis, groups) = (self.view()?, self.axis(1)?, self.natural(2)?);
        let mut split = view.shape().extents().to_vec();
        let Some(pairs) = split.get(axis).filter(|extent| groups > 0 && extent.is_multiple_of(2 * groups)) else {
            let reason =
                format!("halves: expected pairs in each of {groups} groups of axis {axis}, found {}", view.shape());
            return Err(EvalError::new(reason, self.name));
        };
        split.splice(axis..=axis, [groups, pairs / groups / 2, 2]);
        Ok(ExprValue::View(view.reshape_to(&split)?.swap_axes(axis + 1, axis + 2)?.reshape(view.shape())?))
    }

    /// Each element of an axis several times in a row.
    fn repeat(&self) -> Evaluated {
        let (view, axis, times) = (self.view()?, self.axis(1)?, self.natural(2)?);
        let mut extents = view.shape().extents().to_vec();
        if axis >= extents.len() {
            return Err(ViewError::axis("repeat", axis, view.shape()).into());
        }
        if times == 1 {
            return Ok(ExprValue::View(view.clone()));
        }
        let copies = usize::try_from(times).ok().filter(|copies| (1..=REPEATS_MAX).contains(copies));
        let copies = vec![view.clone(); copies.ok_or_else(|| EvalError::range(self.name))?];
        extents[axis] = extents[axis].saturating_mul(times);
        Ok(ExprValue::View(View::stack(axis + 1, &copies)?.reshape_to(&extents)?))
    }

    fn product(&self, flush: bool, keep: Keep) -> Evaluated {
        let view = self.view()?;
        let inverse = self.values.get(2);
        if let ExprValue::View(other) = &self.values[1] {
            return match inverse {
                Some(inverse) => Err(inverse.kind(self.name, "no third operand after two views")),
                None => Ok(ExprValue::View(view.multiply_view(other, flush, keep)?)),
            };
        }
        // A product may name the factor that undoes it: a rounded reciprocal is not always the one that another program uses.
        let factor = match inverse {
            Some(inverse) if self.names.inverts() => inverse,
            None if self.names.inverts() => {
                let text = format!("{}: the rule has no third operand, the factor that undoes the product", self.name);
                return Err(EvalError::new(text, self.name));
            }
            Some(_) | None => &self.values[1],
        };
        Ok(ExprValue::View(view.multiply(factor.constant(self.name)?, flush, keep)?))
    }

    fn sum(&self, keep: Keep) -> Evaluated {
        let view = self.view()?;
        if let ExprValue::View(other) = &self.values[1] {
            return Ok(ExprValue::View(view.add_view(other, keep)?));
        }
        let addend = self.values[1].constant(self.name)?;
        Ok(ExprValue::View(view.add(if self.names.inverts() { -addend } else { addend }, keep)?))
    }

    /// Indexes given one by one or in lists, from the third operand on.
    fn indexes(&self) -> Result<Vec<u64>, EvalError> {
        let mut indexes = Vec::new();
        for value in &self.values[2..] {
            if let ExprValue::List(numbers) = value {
                for number in numbers.iter() {
                    indexes.push(ExprValue::Int(*number).natural(self.name)?);
                }
            } else {
                indexes.push(value.natural(self.name)?);
            }
        }
        Ok(indexes)
    }

    /// The dtype that the second operand names.
    fn dtype(&self) -> Result<DType, EvalError> {
        let text = self.text(1)?;
        DType::from_user(text).ok_or_else(|| EvalError::no_dtype(text))
    }

    fn fill(&self) -> Evaluated {
        let dtype = self.dtype()?;
        let extents = (2..self.values.len()).map(|at| self.natural(at)).collect::<Result<Vec<_>, _>>()?;
        let shape = Shape::try_new(&extents)?;
        let constant = self.values[0].constant(self.name)?;
        if constant.to_bits() == 0 && dtype != DType::F8E8M0 {
            return Ok(ExprValue::View(View::fill(shape, Element::zero(dtype))));
        }
        Ok(ExprValue::View(View::fill(shape, Element::f32(constant)).cast(dtype)?))
    }

    /// To the extents after the view, with -1 replaced by the extent that the others leave.
    fn reshape(&self) -> Evaluated {
        let view = self.view()?;
        let mut open = None;
        let mut extents = Vec::with_capacity(self.values.len());
        for value in &self.values[1..] {
            if value.int(self.name)? == -1 && open.is_none() {
                open = Some(extents.len());
                extents.push(1);
            } else {
                extents.push(value.natural(self.name)?);
            }
        }
        if let Some(at) = open {
            let known = extents.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
            let known = known.ok_or_else(|| EvalError::range(self.name))?;
            // The reshape itself refuses an extent that does not divide the elements evenly.
            extents[at] = view.shape().elements().checked_div(known).unwrap_or(0);
        }
        Ok(ExprValue::View(view.reshape_to(&extents)?))
    }
}
