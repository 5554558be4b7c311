//! The functions of expressions.

use std::sync::Arc;

use ckfs_tensor::{DType, Element, Keep, Shape, View, ViewError};
use half::bf16;

use super::value::{Absent, EvalError, ExprValue, NameScope};

/// Most repetitions of one element.
const REPEATS_MAX: usize = 4096;

/// Highest number of operands of a function.
const ARGUMENTS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Min,
    Max,
    Sqrt,
    Ceil,
    Floor,
    F32,
    Bf16,
    Exists,
    Given,
    ShapeOf,
    Count,
    View(ViewFunction),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ViewFunction {
    Transpose,
    Permute,
    Swap,
    Reshape,
    Slice,
    Gather,
    Concat,
    Stack,
    Pad,
    CutOrPad,
    Repeat,
    Fill,
    Cast,
    Mul,
    MulFlush,
    MulF32,
    Add,
    AddF32,
    Exp,
    Extent,
    Rank,
}

/// Name, function, least and most number of operands.
pub(super) const FUNCTIONS: &[(&str, Function, usize, usize)] = &[
    ("min", Function::Min, 1, ARGUMENTS_MAX),
    ("max", Function::Max, 1, ARGUMENTS_MAX),
    ("sqrt", Function::Sqrt, 1, 1),
    ("ceil", Function::Ceil, 1, 1),
    ("floor", Function::Floor, 1, 1),
    ("f32", Function::F32, 1, 1),
    ("bf16", Function::Bf16, 1, 1),
    ("exists", Function::Exists, 1, 1),
    ("given", Function::Given, 1, 1),
    ("shape", Function::ShapeOf, 2, 2),
    ("count", Function::Count, 1, 1),
    ("transpose", Function::View(ViewFunction::Transpose), 1, 1),
    ("permute", Function::View(ViewFunction::Permute), 1, ARGUMENTS_MAX),
    ("swap", Function::View(ViewFunction::Swap), 3, 3),
    ("reshape", Function::View(ViewFunction::Reshape), 1, ARGUMENTS_MAX),
    ("slice", Function::View(ViewFunction::Slice), 4, 5),
    ("gather", Function::View(ViewFunction::Gather), 3, ARGUMENTS_MAX),
    ("concat", Function::View(ViewFunction::Concat), 2, ARGUMENTS_MAX),
    ("stack", Function::View(ViewFunction::Stack), 2, ARGUMENTS_MAX),
    ("pad", Function::View(ViewFunction::Pad), 4, 4),
    ("cut_or_pad", Function::View(ViewFunction::CutOrPad), 3, 3),
    ("repeat", Function::View(ViewFunction::Repeat), 3, 3),
    ("fill", Function::View(ViewFunction::Fill), 2, ARGUMENTS_MAX),
    ("cast", Function::View(ViewFunction::Cast), 2, 2),
    ("mul", Function::View(ViewFunction::Mul), 2, 3),
    ("mul_flush", Function::View(ViewFunction::MulFlush), 2, 3),
    ("mul_f32", Function::View(ViewFunction::MulF32), 2, 3),
    ("add", Function::View(ViewFunction::Add), 2, 2),
    ("add_f32", Function::View(ViewFunction::AddF32), 2, 2),
    ("exp", Function::View(ViewFunction::Exp), 1, 1),
    ("extent", Function::View(ViewFunction::Extent), 2, 2),
    ("rank", Function::View(ViewFunction::Rank), 1, 1),
];

/// The axis of a number. A negative number counts from the end.
fn axis(name: &'static str, value: &ExprValue, rank: usize) -> Result<usize, EvalError> {
    let number = value.int(name)?;
    let from_end = if number < 0 { i64::try_from(rank).expect("views have few axes") + number } else { number };
    usize::try_from(from_end).map_err(|_| value.kind(name, "an axis"))
}

fn whole(name: &'static str, value: f64) -> Result<ExprValue, EvalError> {
    // Beyond 2^53 an f64 no longer distinguishes neighbouring integers.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.abs() > EXACT {
        return Err(EvalError::Range(name));
    }
    #[allow(clippy::cast_possible_truncation, reason = "whole and below 2^53")]
    Ok(ExprValue::Int(value as i64))
}

/// Each element of an axis `times` times in a row.
fn repeat(view: &View, axis: usize, times: u64) -> Result<View, EvalError> {
    let extents = view.shape().extents();
    if axis >= extents.len() {
        return Err(ViewError::axis("repeat", axis, view.shape()).into());
    }
    if times == 1 {
        return Ok(view.clone());
    }
    let copies = usize::try_from(times).ok().filter(|copies| (1..=REPEATS_MAX).contains(copies));
    let copies = vec![view.clone(); copies.ok_or(EvalError::Range("repeat"))?];
    let mut merged = extents.to_vec();
    merged[axis] = merged[axis].saturating_mul(times);
    let shape = Shape::try_new(&merged).map_err(ViewError::from)?;
    Ok(View::stack(axis + 1, &copies)?.reshape(&shape)?)
}

impl Function {
    pub(super) fn apply(
        self,
        name: &'static str,
        values: &[ExprValue],
        names: &dyn NameScope,
    ) -> Result<ExprValue, EvalError> {
        match self {
            Self::Min | Self::Max => {
                let mut best = &values[0];
                best.float(name)?;
                for value in &values[1..] {
                    let order = value.float(name)?.total_cmp(&best.float(name)?);
                    if (self == Self::Min && order.is_lt()) || (self == Self::Max && order.is_gt()) {
                        best = value;
                    }
                }
                Ok(best.clone())
            }
            Self::Sqrt => {
                let value = values[0].float(name)?;
                if value >= 0.0 { Ok(ExprValue::Float(value.sqrt())) } else { Err(EvalError::Range(name)) }
            }
            Self::Ceil => whole(name, values[0].float(name)?.ceil()),
            Self::Floor => whole(name, values[0].float(name)?.floor()),
            #[allow(clippy::cast_possible_truncation, reason = "the caller asks for rounding")]
            Self::F32 => Ok(ExprValue::Float(f64::from(values[0].float(name)? as f32))),
            #[allow(clippy::cast_possible_truncation, reason = "the caller asks for rounding, by way of f32")]
            Self::Bf16 => Ok(ExprValue::Float(bf16::from_f32(values[0].float(name)? as f32).to_f64())),
            Self::Exists => Ok(ExprValue::Bool(names.shape(values[0].text(name)?).is_some())),
            Self::Given => Ok(ExprValue::Bool(names.given(values[0].text(name)?))),
            Self::ShapeOf => {
                let tensor = values[0].text(name)?;
                let Some(shape) = names.shape(tensor) else {
                    return Ok(ExprValue::Absent(Arc::new(Absent::Tensor(tensor.to_owned()))));
                };
                let extent = shape.get(axis(name, &values[1], shape.len())?).and_then(|e| i64::try_from(*e).ok());
                extent.map(ExprValue::Int).ok_or_else(|| values[1].kind(name, "an axis of the tensor"))
            }
            Self::Count => {
                let count = names.count(values[0].text(name)?);
                i64::try_from(count).map(ExprValue::Int).map_err(|_| EvalError::Range(name))
            }
            Self::View(function) => function.apply(name, values, names.inverts()),
        }
    }
}

impl ViewFunction {
    fn apply(self, name: &'static str, values: &[ExprValue], inverts: bool) -> Result<ExprValue, EvalError> {
        if let Self::Concat | Self::Stack = self {
            let views = values[1..].iter().map(|value| value.view(name).cloned()).collect::<Result<Vec<_>, _>>()?;
            let rank = views[0].shape().rank();
            let axis = axis(name, &values[0], rank + usize::from(self == Self::Stack))?;
            let view = if self == Self::Stack { View::stack(axis, &views) } else { View::concat(axis, &views) };
            return Ok(ExprValue::View(view?));
        }
        if self == Self::Fill {
            return Self::fill(name, values);
        }
        let view = values[0].view(name)?;
        let rank = view.shape().rank();
        let axis = |at: usize| axis(name, &values[at], rank);
        let natural = |at: usize| values[at].natural(name);
        // A product may name the factor that undoes it: a rounded reciprocal is not always the one that another program uses.
        let factor = || match values.get(2) {
            Some(inverse) if inverts => inverse.constant(name),
            None if inverts => Err(EvalError::NoInverse(name)),
            Some(_) | None => values[1].constant(name),
        };
        let addend = || values[1].constant(name).map(|addend| if inverts { -addend } else { addend });
        let result = match self {
            Self::Transpose => view.reverse_axes(),
            Self::Permute => {
                let axes = (1..values.len()).map(axis).collect::<Result<Vec<_>, _>>()?;
                view.transpose(&axes)?
            }
            Self::Swap => {
                let mut axes: Vec<usize> = (0..rank).collect();
                let (a, b) = (axis(1)?, axis(2)?);
                if a >= rank || b >= rank {
                    return Err(ViewError::axis("swap", a.max(b), view.shape()).into());
                }
                axes.swap(a, b);
                view.transpose(&axes)?
            }
            Self::Reshape => {
                view.reshape(&Shape::try_new(&Self::extents(name, view, &values[1..])?).map_err(ViewError::from)?)?
            }
            Self::Slice => match values.get(4).map_or(Ok(1), |step| step.int(name))? {
                step if step < 0 => {
                    view.slice_down(axis(1)?, values[2].int(name)?, values[3].int(name)?, step.unsigned_abs())?
                }
                step => view.slice(axis(1)?, natural(2)?, natural(3)?, step.unsigned_abs())?,
            },
            Self::Gather => view.gather(axis(1)?, &Self::indexes(name, &values[2..])?)?,
            Self::Pad => view.pad(axis(1)?, natural(2)?, natural(3)?)?,
            Self::CutOrPad => {
                let (axis, wanted) = (axis(1)?, natural(2)?);
                let extent = view.shape().extents().get(axis).copied().unwrap_or(0);
                if wanted <= extent { view.slice(axis, 0, wanted, 1)? } else { view.pad(axis, 0, wanted - extent)? }
            }
            Self::Repeat => repeat(view, axis(1)?, natural(2)?)?,
            Self::Cast => view.cast(Self::dtype(name, &values[1])?)?,
            Self::Mul | Self::MulFlush | Self::MulF32 => {
                let (flush, keep) = (self == Self::MulFlush, self.keep());
                if let ExprValue::View(other) = &values[1] {
                    if let Some(inverse) = values.get(2) {
                        return Err(inverse.kind(name, "no third operand after two views"));
                    }
                    view.multiply_view(other, flush, keep)?
                } else {
                    view.multiply(factor()?, flush, keep)?
                }
            }
            Self::Add | Self::AddF32 => {
                if let ExprValue::View(other) = &values[1] {
                    view.add_view(other, self.keep())?
                } else {
                    view.add(addend()?, self.keep())?
                }
            }
            Self::Exp => view.exp()?,
            Self::Extent => {
                let extent = view.shape().extents().get(axis(1)?).and_then(|extent| i64::try_from(*extent).ok());
                return extent.map(ExprValue::Int).ok_or_else(|| values[1].kind(name, "an axis of the view"));
            }
            Self::Rank | Self::Concat | Self::Stack | Self::Fill => {
                return i64::try_from(rank).map(ExprValue::Int).map_err(|_| EvalError::Range(name));
            }
        };
        Ok(ExprValue::View(result))
    }

    /// The dtype of the result of arithmetic.
    fn keep(self) -> Keep {
        if matches!(self, Self::MulF32 | Self::AddF32) { Keep::F32 } else { Keep::Operand }
    }

    /// Indexes given one by one or in lists.
    fn indexes(name: &'static str, values: &[ExprValue]) -> Result<Vec<u64>, EvalError> {
        let mut indexes = Vec::new();
        for value in values {
            if let ExprValue::List(numbers) = value {
                for number in numbers.iter() {
                    indexes.push(ExprValue::Int(*number).natural(name)?);
                }
            } else {
                indexes.push(value.natural(name)?);
            }
        }
        Ok(indexes)
    }

    fn dtype(name: &'static str, value: &ExprValue) -> Result<DType, EvalError> {
        let text = value.text(name)?;
        DType::from_user(text).ok_or_else(|| EvalError::DType(text.to_owned()))
    }

    fn fill(name: &'static str, values: &[ExprValue]) -> Result<ExprValue, EvalError> {
        let dtype = Self::dtype(name, &values[1])?;
        let extents = values[2..].iter().map(|value| value.natural(name)).collect::<Result<Vec<_>, _>>()?;
        let shape = Shape::try_new(&extents).map_err(ViewError::from)?;
        let constant = values[0].constant(name)?;
        if constant.to_bits() == 0 && dtype != DType::F8E8M0 {
            return Ok(ExprValue::View(View::fill(shape, Element::zero(dtype))));
        }
        Ok(ExprValue::View(View::fill(shape, Element::f32(constant)).cast(dtype)?))
    }

    /// Extents, with -1 replaced by the extent that the others leave.
    fn extents(name: &'static str, view: &View, values: &[ExprValue]) -> Result<Vec<u64>, EvalError> {
        let mut open = None;
        let mut extents = Vec::with_capacity(values.len());
        for (at, value) in values.iter().enumerate() {
            if value.int(name)? == -1 && open.is_none() {
                open = Some(at);
                extents.push(1);
            } else {
                extents.push(value.natural(name)?);
            }
        }
        if let Some(at) = open {
            let known = extents.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
            let known = known.ok_or(EvalError::Range(name))?;
            // The reshape itself refuses an extent that does not divide the elements evenly.
            extents[at] = view.shape().elements().checked_div(known).unwrap_or(0);
        }
        Ok(extents)
    }
}
