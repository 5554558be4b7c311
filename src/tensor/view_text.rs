//! Views as text.

use std::fmt;

use super::view::{Op, View};

/// Most runs of a list of indexes that are shown.
const RUNS_SHOWN: usize = 8;

impl fmt::Display for View {
    /// The expression, with tensors as `#row`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list(f: &mut fmt::Formatter<'_>, name: &str, axis: usize, of: &[View]) -> fmt::Result {
            write!(f, "{name}({axis}")?;
            let shown = if of.len() > 4 { 2 } else { of.len() };
            for view in &of[..shown] {
                write!(f, ", {view}")?;
            }
            match of.last() {
                Some(last) if shown < of.len() => write!(f, ", … {} more …, {last})", of.len() - shown - 1),
                _ => f.write_str(")"),
            }
        }
        match self.op() {
            Op::Source(tensor) => write!(f, "#{}", tensor.id.0),
            Op::Mosaic(mosaic) => write!(f, "#{}", mosaic.id().0),
            Op::Fill(element) => write!(f, "fill({}, {:02x?})", self.shape(), element.unit_bytes()),
            Op::Slice { of, axis, start, stop, step: 1 } => write!(f, "slice({of}, {axis}, {start}..{stop})"),
            Op::Slice { of, axis, start, stop, step } => write!(f, "slice({of}, {axis}, {start}..{stop}, {step})"),
            Op::Transpose { of, axes } => write!(f, "transpose({of}, {axes:?})"),
            Op::Gather { of, axis, runs } => {
                write!(f, "gather({of}, {axis}")?;
                let shown = if runs.len() > RUNS_SHOWN { RUNS_SHOWN } else { runs.len() };
                runs[..shown].iter().try_for_each(|run| write!(f, ", {run}"))?;
                f.write_str(if shown < runs.len() { ", …)" } else { ")" })
            }
            Op::Reshape { of } => write!(f, "reshape({of}, {})", self.shape()),
            Op::Stack { of, axis } => list(f, "stack", *axis, of),
            Op::Concat { of, axis } => list(f, "concat", *axis, of),
            Op::Pad { of, axis, before, after } => write!(f, "pad({of}, {axis}, {before}, {after})"),
            Op::Cast { of } => write!(f, "cast({of}, {})", self.dtype()),
            Op::Multiply { of, factor, flush } => {
                write!(f, "multiply({of}, {factor:?}{})", if *flush { ", flush" } else { "" })
            }
            Op::Add { of, addend } => write!(f, "add({of}, {addend:?})"),
            Op::Exp { of } => write!(f, "exp({of})"),
            Op::Sum { of: [left, right] } => write!(f, "add({left}, {right})"),
            Op::Product { of: [left, right], flush } => {
                write!(f, "multiply({left}, {right}{})", if *flush { ", flush" } else { "" })
            }
            Op::Encoded { of, part } => {
                write!(
                    f,
                    "encode({}, {part:?}{})",
                    &of.input,
                    if of.given.as_ref().is_some() { ", scales kept" } else { "" }
                )
            }
            Op::Quantized(value) => {
                write!(f, "decode({}", self.shape())?;
                let mut result = Ok(());
                value.for_each_operand(&mut |operand| {
                    result = result.and_then(|()| write!(f, ", #{}", operand.tensor.id.0));
                });
                result?;
                f.write_str(")")
            }
        }
    }
}
