//! Parts: what a node of an expression becomes during lowering.
//!
//! A part is like a [`Piece`](super::Piece), but with a separate position on each axis of the node's shape, so that operators on
//! axes are simple. A part's loop belongs to one axis; one axis may have several loops (finer ones nested in coarser). Layout
//! operators are functions of parts. Only reshape is complex: it cuts loops again at the borders of the new axes.

use smallvec::{SmallVec, smallvec};

use super::{
    Shape,
    gather::{Loop, Loops, normalize},
    shape::PerAxis,
    strided_indices::StridedIndices,
    tiling::{Origin, PIECES_MAX, TilingError, cut, last_offset},
};

/// A loop on one axis; its target stride is in elements of that axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisLoop {
    pub(super) axis: usize,
    pub(super) step: Loop,
}

/// A set of elements of a view, and where they come from.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) origin: PerAxis,
    pub(super) loops: SmallVec<[AxisLoop; 4]>,
    /// Source units are elements. The decoder is one of the chains of the lowering, and a constant is an element of the view.
    pub(super) base: Origin,
}

impl Part {
    /// The same elements further on along an axis.
    pub(super) fn shifted(mut self, axis: usize, by: u64) -> Self {
        self.origin[axis] += by;
        self
    }
}

/// Refuses more parts than a tiling may have.
pub(super) fn limit(parts: &[Part]) -> Result<(), TilingError> {
    if parts.len() > PIECES_MAX { Err(TilingError::TooManyPieces) } else { Ok(()) }
}

/// The part that covers the whole of `shape` from one base.
pub(super) fn whole(shape: &Shape, base: Origin) -> Vec<Part> {
    if shape.is_empty() {
        return Vec::new();
    }
    let strides = shape.strides();
    let loops = shape.extents().iter().enumerate().filter(|(_, extent)| **extent > 1);
    let loops = loops.map(|(axis, extent)| AxisLoop {
        axis,
        step: Loop { extent: *extent, target_stride: 1, source_stride: strides[axis] },
    });
    vec![Part { origin: smallvec![0; shape.rank()], loops: loops.collect(), base }]
}

/// Start and loops of a part in the row-major order of a shape with these strides.
pub(super) fn linear(part: &Part, strides: &[u64]) -> (u64, Loops) {
    let start = part.origin.iter().zip(strides).map(|(origin, stride)| origin * stride).sum();
    let mut loops: Loops =
        part.loops.iter().map(|l| Loop { target_stride: l.step.target_stride * strides[l.axis], ..l.step }).collect();
    if matches!(part.base, Origin::Fill { .. }) {
        // A constant has no order: let its loops merge on the target side alone.
        loops.iter_mut().for_each(|l| l.source_stride = l.target_stride);
    }
    normalize(&mut loops);
    (start, loops)
}

/// Axis `i` of the result is axis `axes[i]`.
pub(super) fn transpose(part: &Part, axes: &[usize]) -> Part {
    let mut inverse = vec![0; axes.len()];
    axes.iter().enumerate().for_each(|(to, from)| inverse[*from] = to);
    Part {
        origin: axes.iter().map(|axis| part.origin[*axis]).collect(),
        loops: part.loops.iter().map(|l| AxisLoop { axis: inverse[l.axis], step: l.step }).collect(),
        ..*part
    }
}

/// Elements `start, start + step, …` below `stop` of an axis.
pub(super) fn slice(parts: &[Part], axis: usize, start: u64, stop: u64, step: u64) -> Result<Vec<Part>, TilingError> {
    let mut sliced = Vec::new();
    for part in parts {
        let mut along: Loops = part.loops.iter().filter(|l| l.axis == axis).map(|l| l.step).collect();
        normalize(&mut along);
        let others = part.loops.iter().filter(|l| l.axis != axis);
        let mut emit = |at: u64, moved: u64, loops: &[Loop]| {
            let mut cut_part = Part {
                origin: part.origin.clone(),
                loops: others.clone().copied().collect(),
                base: part.base.moved(moved),
            };
            cut_part.origin[axis] = at;
            cut_part.loops.extend(loops.iter().map(|l| AxisLoop { axis, step: *l }));
            sliced.push(cut_part);
        };
        cut(part.origin[axis], 0, &along, start, stop, &mut |at, moved, loops| {
            select(at - start, moved, &loops, step, &mut Loops::new(), &mut emit);
        });
        limit(&sliced)?;
    }
    Ok(sliced)
}

/// The elements of an axis at these indexes. A run upwards is a slice. In a run downwards each index has parts of its own, as
/// the loops of a piece only step upwards.
pub(super) fn gather(parts: &[Part], axis: usize, runs: &[StridedIndices]) -> Result<Vec<Part>, TilingError> {
    let mut chosen = Vec::new();
    let mut at = 0;
    for run in runs {
        let step = run.step.unsigned_abs().max(1);
        let end = if run.step == 0 { run.first + 1 } else { run.low() + step * (run.count - 1) + 1 };
        let found = slice(parts, axis, run.low(), end, step)?;
        match run.step {
            0 => {
                for copy in 0..run.count {
                    chosen.extend(found.iter().cloned().map(|part| part.shifted(axis, at + copy)));
                    limit(&chosen)?;
                }
            }
            1.. => chosen.extend(found.into_iter().map(|part| part.shifted(axis, at))),
            _ => {
                for part in &found {
                    reverse(part, axis, at + run.count - 1, &mut chosen)?;
                }
            }
        }
        at += run.count;
        limit(&chosen)?;
    }
    Ok(chosen)
}

/// Emits a part for each position of `part` on an axis: position `p` moves to `last - p`.
fn reverse(part: &Part, axis: usize, last: u64, done: &mut Vec<Part>) -> Result<(), TilingError> {
    let (along, others): (Vec<AxisLoop>, Vec<AxisLoop>) = part.loops.iter().partition(|l| l.axis == axis);
    let positions = along.iter().try_fold(1_u64, |product, l| product.checked_mul(l.step.extent));
    if positions.is_none_or(|positions| positions > PIECES_MAX as u64) {
        return Err(TilingError::TooManyPieces);
    }
    let mut places = vec![(part.origin[axis], 0)];
    for l in along {
        let turns = |(at, moved): (u64, u64)| {
            (0..l.step.extent).map(move |n| (at + n * l.step.target_stride, moved + n * l.step.source_stride))
        };
        places = places.into_iter().flat_map(turns).collect();
    }
    for (at, moved) in places {
        let mut origin = part.origin.clone();
        origin[axis] = last - at;
        let loops = others.iter().copied().collect();
        done.push(Part { origin, loops, base: part.base.moved(moved) });
    }
    limit(done)
}

/// Emits the elements at multiples of `step`, their positions divided by it.
fn select(at: u64, moved: u64, loops: &[Loop], step: u64, chosen: &mut Loops, emit: &mut dyn FnMut(u64, u64, &[Loop])) {
    let [top, rest @ ..] = loops else {
        if at.is_multiple_of(step) {
            emit(at / step, moved, chosen);
        }
        return;
    };
    // Positions modulo `step` repeat every `period` turns of this loop.
    let period = step / gcd(top.target_stride, step);
    for turn in 0..period.min(top.extent) {
        let extent = (top.extent - turn).div_ceil(period);
        let kept = chosen.len();
        if extent > 1 {
            let target_stride = top.target_stride * period / step;
            chosen.push(Loop { extent, target_stride, source_stride: top.source_stride * period });
        }
        select(at + turn * top.target_stride, moved + turn * top.source_stride, rest, step, chosen, emit);
        chosen.truncate(kept);
    }
}

pub(super) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The same elements, in row-major order, of another shape.
pub(super) fn reshape(parts: &[Part], from: &Shape, to: &Shape) -> Result<Vec<Part>, TilingError> {
    let (from_strides, to_strides) = (from.strides(), to.strides());
    let mut reshaped = Vec::new();
    for part in parts {
        let (start, loops) = linear(part, &from_strides);
        let empty = Part { origin: smallvec![0; to.rank()], loops: SmallVec::new(), base: part.base };
        assign(start, &loops, &to_strides, 0, empty, &mut reshaped)?;
    }
    Ok(reshaped)
}

pub(super) type EachNest<'a> = &'a mut dyn FnMut(u64, u64, &[Loop]) -> Result<(), TilingError>;

/// Emits start and moved source of loops, sorted by falling stride, in which each stride exceeds the last offset of the finer loops.
pub(super) fn for_each_nest(start: u64, moved: u64, loops: &[Loop], emit: EachNest<'_>) -> Result<(), TilingError> {
    let nested = (0..loops.len()).all(|at| loops[at].target_stride > last_offset(&loops[at + 1..]));
    match loops.split_first() {
        Some((top, rest)) if !nested => (0..top.extent).try_for_each(|turn| {
            for_each_nest(start + turn * top.target_stride, moved + turn * top.source_stride, rest, emit)
        }),
        Some(_) | None => emit(start, moved, loops),
    }
}

/// A callback for the first element and the loops of a part, each loop with its axis.
pub(super) type EachPart<'a> = &'a mut dyn FnMut(u64, &[(usize, Loop)]);

/// Cuts loops over the elements `start + i0*t0 + …` so that each moves on one axis of a mixed radix. `borders` are the
/// strides of its axes, by falling stride; the last is 1. Emits the first element and the loops with their axes. Returns
/// whether the number of parts stays within the limit of a tiling.
pub(super) fn split_at_borders(start: u64, loops: &[Loop], borders: &[u64], emit: EachPart<'_>) -> bool {
    let base = Origin::Fill { bytes: [0; 8] };
    let whole = Part { origin: smallvec![0; borders.len()], loops: SmallVec::new(), base };
    let mut parts = Vec::new();
    let fits = assign(start, loops, borders, 0, whole, &mut parts).is_ok();
    for part in parts {
        let first = part.origin.iter().zip(borders).map(|(origin, border)| origin * border).sum();
        let loops: SmallVec<[(usize, Loop); 4]> = part
            .loops
            .iter()
            .map(|l| (l.axis, Loop { target_stride: l.step.target_stride * borders[l.axis], ..l.step }))
            .collect();
        emit(first, &loops);
    }
    fits
}

/// Gives each loop of a linear set to an axis, from `axis` inwards, cutting loops where they cross the border of a turn
/// of that axis.
pub(super) fn assign(
    start: u64,
    loops: &[Loop],
    strides: &[u64],
    axis: usize,
    mut part: Part,
    done: &mut Vec<Part>,
) -> Result<(), TilingError> {
    let Some(&turn) = strides.get(axis) else {
        done.push(part);
        return limit(done);
    };
    if axis + 1 == strides.len() {
        part.origin[axis] += start;
        part.loops.extend(loops.iter().map(|l| AxisLoop { axis, step: *l }));
        done.push(part);
        return limit(done);
    }
    let all = last_offset(loops);
    if start / turn == (start + all) / turn {
        part.origin[axis] += start / turn;
        return assign(start % turn, loops, strides, axis + 1, part, done);
    }
    let Some((top, rest)) = loops.split_first() else { return Ok(()) };
    if top.target_stride.is_multiple_of(turn) {
        part.loops.push(AxisLoop { axis, step: Loop { target_stride: top.target_stride / turn, ..*top } });
        return assign(start, rest, strides, axis, part, done);
    }
    let with_top = |tops: &[Loop]| -> Loops { tops.iter().filter(|l| l.extent > 1).chain(rest).copied().collect() };
    // Positions within a turn repeat every `period` steps of this loop: whole periods become a separate loop.
    let period = turn / gcd(turn, top.target_stride);
    let periods = top.extent / period;
    if periods > 1 {
        let outer = Loop {
            extent: periods,
            target_stride: top.target_stride * period,
            source_stride: top.source_stride * period,
        };
        let inner = Loop { extent: period, ..*top };
        assign(start, &with_top(&[outer, inner]), strides, axis, part.clone(), done)?;
        let done_steps = periods * period;
        if done_steps < top.extent {
            part.base = part.base.moved(done_steps * top.source_stride);
            let tail = Loop { extent: top.extent - done_steps, ..*top };
            assign(start + done_steps * top.target_stride, &with_top(&[tail]), strides, axis, part, done)?;
        }
        return Ok(());
    }
    // Few steps: those that stay within one turn form a group.
    let rest_last = all - (top.extent - 1) * top.target_stride;
    let mut step = 0;
    while step < top.extent {
        let first = start + step * top.target_stride;
        let border = (first / turn + 1) * turn;
        let room = (border - first).saturating_sub(rest_last + 1);
        let fits = first / turn == (first + rest_last) / turn;
        let group = if fits { (room / top.target_stride + 1).min(top.extent - step) } else { 1 };
        let mut grouped = part.clone();
        grouped.base = grouped.base.moved(step * top.source_stride);
        assign(first, &with_top(&[Loop { extent: group, ..*top }]), strides, axis, grouped, done)?;
        step += group;
    }
    Ok(())
}
