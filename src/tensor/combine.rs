//! Two views element by element: the common parts of both sides.
//!
//! A part of one side covers some elements of the view, a part of the other side some. The elements that both cover are parts of the
//! result: on each axis the intersection of two sets of nested loops, and all combinations over the axes. In such a part
//! each operand has a stride of its own for each loop. The part numbers its elements in the order of its first operand, and the
//! [`IndexMap`] of each operand maps this number to a place in the operand's tensor.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::{
    Digit, IndexMap, Operand, TensorId, Value,
    gather::{Loop, Loops},
    part::{AxisLoop, Part, assign, for_each_nest, gcd},
    shape::PerAxis,
    tiling::{Origin, PIECES_MAX, TilingError, greatest_so_far},
};

/// Most pairs of parts whose bounds overlap. Parts that interleave may overlap without common elements.
const PAIRS_MAX: usize = 16 * PIECES_MAX;

/// One number for each operand.
type Each = SmallVec<[u64; 2]>;

/// A loop on an axis, with the stride of each operand.
#[derive(Clone, Debug)]
struct Line {
    extent: u64,
    target_stride: u64,
    strides: Each,
}

/// The elements of a part along one axis: nested lines, the coarsest first.
#[derive(Clone, Debug)]
struct Along {
    start: u64,
    offsets: Each,
    lines: SmallVec<[Line; 3]>,
}

impl Along {
    fn rest_last(&self) -> u64 {
        self.lines.iter().skip(1).map(|line| (line.extent - 1) * line.target_stride).sum()
    }

    fn last(&self) -> u64 {
        self.start + self.lines.iter().map(|line| (line.extent - 1) * line.target_stride).sum::<u64>()
    }

    /// Turn `n` of the coarsest line.
    fn turn(&self, n: u64) -> Self {
        let (top, rest) = self.lines.split_first().expect("only what has lines has turns");
        Self {
            start: self.start + n * top.target_stride,
            offsets: self.offsets.iter().zip(&top.strides).map(|(offset, stride)| offset + n * stride).collect(),
            lines: rest.iter().cloned().collect(),
        }
    }

    /// Some turns of the coarsest line, at least one.
    fn part(&self, turns: std::ops::Range<u64>) -> Self {
        if turns.end - turns.start == 1 {
            return self.turn(turns.start);
        }
        let top = &self.lines[0];
        let first = |offset: &u64, stride: &u64| offset + turns.start * stride;
        let offsets = self.offsets.iter().zip(&top.strides).map(|(offset, stride)| first(offset, stride)).collect();
        let mut lines = self.lines.clone();
        lines[0].extent = turns.end - turns.start;
        Self { start: first(&self.start, &top.target_stride), offsets, lines }
    }

    /// The turns that lie in `low..=high` as a whole, if these are several but not all.
    fn turns_inside(&self, low: u64, high: u64) -> Option<std::ops::Range<u64>> {
        let (stride, extent) = (self.lines[0].target_stride, self.lines[0].extent);
        let first = low.saturating_sub(self.start).div_ceil(stride);
        let end = high.checked_sub(self.start + self.rest_last()).map_or(0, |room| room / stride + 1).min(extent);
        (first + 1 < end && (first, end) != (0, extent)).then_some(first..end)
    }

    /// The turns of the coarsest line that may have positions in `low..=high`.
    fn turns(&self, low: u64, high: u64) -> std::ops::Range<u64> {
        let stride = self.lines[0].target_stride;
        if high < self.start {
            return 0..0;
        }
        let first = low.saturating_sub(self.start + self.rest_last()).div_ceil(stride);
        first..((high - self.start) / stride + 1).min(self.lines[0].extent)
    }
}

fn joined(left: &Each, right: &Each) -> Each {
    left.iter().chain(right).copied().collect()
}

/// A part with the place of each operand: on each axis the position and the loops.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    axes: Vec<Along>,
    /// The part's tensor or constant.
    pub(super) base: Origin,
}

impl Operands {
    /// First and last position on an axis.
    pub(super) fn bounds(&self, axis: usize) -> (u64, u64) {
        (self.axes[axis].start, self.axes[axis].last())
    }

    fn of_loops(part: &Part, rank: usize, offsets: &Each, strides: &dyn Fn(&AxisLoop) -> Each) -> Self {
        let along = |axis: usize| {
            let mut lines: SmallVec<[Line; 3]> = part
                .loops
                .iter()
                .filter(|l| l.axis == axis && l.step.extent > 1)
                .map(|l| Line { extent: l.step.extent, target_stride: l.step.target_stride, strides: strides(l) })
                .collect();
            lines.sort_by_key(|line| std::cmp::Reverse(line.target_stride));
            Along { start: part.origin[axis], offsets: smallvec![0; offsets.len()], lines }
        };
        let mut axes: Vec<Along> = (0..rank).map(along).collect();
        // The offset of the part counts once. Without axes there is one element, on an axis of its own.
        if axes.is_empty() {
            axes.push(Along { start: 0, offsets: smallvec![0; offsets.len()], lines: SmallVec::new() });
        }
        axes[0].offsets.clone_from(offsets);
        Self { axes, base: part.base }
    }

    /// A part of one tensor, or of a constant, which is no operand.
    pub(super) fn of_part(part: &Part, rank: usize) -> Self {
        match part.base {
            Origin::Tensor { offset, .. } => {
                Self::of_loops(part, rank, &smallvec![offset], &|l| smallvec![l.step.source_stride])
            }
            Origin::Fill { .. } | Origin::Encoded { .. } => Self::of_loops(part, rank, &Each::new(), &|_| Each::new()),
        }
    }

    /// A part of `value`, which is the result of such a combination. `strides` are those of the view. Its loops are cut where
    /// the number of an element crosses a border of an operand's digits.
    pub(super) fn of_value(part: &Part, value: &Value, strides: &[u64]) -> Result<Vec<Self>, TilingError> {
        let Origin::Tensor { offset, .. } = part.base else { return Ok(vec![Self::of_part(part, strides.len())]) };
        let mut maps: Vec<&IndexMap> = Vec::new();
        value.for_each_operand(&mut |operand| maps.push(&operand.index));
        let mut borders: Vec<u64> = maps.iter().flat_map(|map| map.borders()).chain([1]).collect();
        borders.sort_unstable_by(|a, b| b.cmp(a));
        borders.dedup();
        // From the numbers of elements to their positions in the view, as one number.
        let target = part.origin.iter().zip(strides).map(|(origin, stride)| origin * stride).sum();
        let loops = inverted(part, strides);
        let mut numbered = Vec::new();
        for_each_nest(offset, target, &loops, &mut |start, target, nest| {
            let empty = place(borders.len(), target);
            assign(start, nest, &borders, 0, empty, &mut numbered)
        })?;
        let mut found = Vec::new();
        for numbered in numbered {
            let Origin::Tensor { offset: target, .. } = numbered.base else { continue };
            let first = numbered.origin.iter().zip(&borders).map(|(digit, border)| digit * border).sum();
            let loops = inverted(&numbered, &borders);
            let mut placed = Vec::new();
            assign(target, &loops, strides, 0, place(strides.len(), first), &mut placed)?;
            for placed in placed {
                let Origin::Tensor { offset: first, .. } = placed.base else { continue };
                let offsets = maps.iter().map(|map| map.at(first)).collect();
                let of_loop = |l: &AxisLoop| maps.iter().map(|map| step_of(map, l.step.source_stride)).collect();
                let operands = Self::of_loops(&placed, strides.len(), &offsets, &of_loop);
                found.push(Self { base: part.base, ..operands });
            }
        }
        Ok(found)
    }

    /// The operands of both sides where both have elements.
    pub(super) fn meet(&self, other: &Self) -> Result<Vec<Self>, TilingError> {
        let mut all = vec![Vec::new()];
        for (left, right) in self.axes.iter().zip(&other.axes) {
            let mut found = Vec::new();
            meet(left, right, &mut found)?;
            if found.len().saturating_mul(all.len()) > PIECES_MAX {
                return Err(TilingError::TooManyPieces);
            }
            let longer = |axes: &Vec<Along>| {
                let axes = axes.clone();
                found.iter().map(move |along| axes.iter().cloned().chain([along.clone()]).collect()).collect::<Vec<_>>()
            };
            all = all.iter().flat_map(longer).collect();
        }
        Ok(all.into_iter().map(|axes| Self { axes, base: self.base }).collect())
    }

    /// The offsets of all operands.
    fn offsets(&self) -> Each {
        let mut sum: Each = smallvec![0; self.axes[0].offsets.len()];
        for along in &self.axes {
            sum.iter_mut().zip(&along.offsets).for_each(|(sum, offset)| *sum += offset);
        }
        sum
    }

    /// The loops, in the order of the view, each with its axis.
    fn lines(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.axes.iter().enumerate().flat_map(|(axis, along)| along.lines.iter().map(move |line| (axis, line)))
    }

    fn part(&self, rank: usize, base: Origin, strides: impl Iterator<Item = u64>) -> Part {
        let step = |(axis, line): (usize, &Line), source_stride: u64| AxisLoop {
            axis,
            step: Loop { extent: line.extent, target_stride: line.target_stride, source_stride },
        };
        let loops = self.lines().zip(strides).map(|(line, stride)| step(line, stride)).collect();
        let origin: PerAxis = self.axes.iter().take(rank).map(|along| along.start).collect();
        Part { origin, loops, base }
    }

    /// The part of a base that is its one operand, or a constant.
    pub(super) fn plain(&self, rank: usize, mut base: Origin) -> Part {
        if let Origin::Tensor { offset, .. } = &mut base {
            *offset = self.offsets()[0];
        }
        self.part(rank, base, self.lines().map(|(_, line)| line.strides.first().copied().unwrap_or(0)))
    }

    /// The part with its elements numbered, and `value` with the indexes of its operands. The first operand is the part's tensor,
    /// and numbers follow its order: a view that is transposed is then read in lines of that tensor, as one of the tensor alone is.
    pub(super) fn valued(&self, rank: usize, value: &Value) -> (Part, Arc<Value>) {
        let lines: SmallVec<[(usize, &Line); 8]> = self.lines().collect();
        let mut numbers: SmallVec<[u64; 8]> = smallvec![1; lines.len()];
        let mut order: SmallVec<[usize; 8]> = (0..lines.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(lines[*at].1.strides.first().copied()));
        for at in (1..order.len()).rev() {
            numbers[order[at - 1]] = numbers[order[at]] * lines[order[at]].1.extent;
        }
        let offsets = self.offsets();
        let mut maps = (0..offsets.len()).map(|operand| {
            let finest_first = order.iter().rev().copied();
            let line = |at: usize| (numbers[at], lines[at].1.extent, lines[at].1.strides[operand]);
            index_map(offsets[operand], finest_first.map(line))
        });
        let value = value.map_operands(&mut |operand| {
            // Its terms stay.
            let index = maps.next().expect("there is a map for each operand").with_terms(operand.index.terms());
            Operand { index, ..operand.clone() }
        });
        let base = Origin::Tensor { tensor: value.load.tensor.id, offset: 0, decoder: 0 };
        (self.part(rank, base, numbers.iter().copied()), Arc::new(value))
    }
}

/// The loops of a part by falling source stride, each with source and target exchanged; `strides` are of the target's axes.
fn inverted(part: &Part, strides: &[u64]) -> Loops {
    let mut loops: Loops = part
        .loops
        .iter()
        .filter(|l| l.step.extent > 1)
        .map(|l| Loop {
            extent: l.step.extent,
            target_stride: l.step.source_stride,
            source_stride: l.step.target_stride * strides[l.axis],
        })
        .collect();
    loops.sort_by_key(|l| std::cmp::Reverse(l.target_stride));
    loops
}

fn place(rank: usize, offset: u64) -> Part {
    let base = Origin::Tensor { tensor: TensorId(0), offset, decoder: 0 };
    Part { origin: smallvec![0; rank], loops: SmallVec::new(), base }
}

/// How far an index moves while the number of the element grows by `step` within one digit.
fn step_of(map: &IndexMap, step: u64) -> u64 {
    let moving = |digit: &&Digit| digit.divisor <= step && step < digit.period();
    map.digits().iter().find(moving).map_or(0, |digit| step / digit.divisor * digit.stride)
}

/// The index of an operand. `lines` have the divisor, the extent and the stride of each loop, the finest first.
fn index_map(offset: u64, lines: impl Iterator<Item = (u64, u64, u64)>) -> IndexMap {
    let mut digits: Vec<Digit> = Vec::new();
    for (divisor, extent, stride) in lines {
        match digits.last_mut() {
            // This loop continues the finer one.
            Some(finer) if finer.period() == divisor && stride == finer.modulus * finer.stride => {
                finer.modulus *= extent;
            }
            _ => digits.push(Digit { divisor, modulus: extent, group: 1, turn: u64::MAX, stride, table: None }),
        }
    }
    digits.reverse();
    if offset > 0 {
        digits.push(Digit::constant(offset));
    }
    IndexMap::new(&digits)
}

/// The positions that two sets have in common, with the offsets and strides of both.
fn meet(left: &Along, right: &Along, found: &mut Vec<Along>) -> Result<(), TilingError> {
    if left.start > right.last() || right.start > left.last() {
        return Ok(());
    }
    if found.len() > PIECES_MAX {
        return Err(TilingError::TooManyPieces);
    }
    let (Some(a), Some(b)) = (left.lines.first(), right.lines.first()) else {
        found.extend(meet_one(left, right));
        return Ok(());
    };
    if a.target_stride == b.target_stride {
        return meet_alike(left, right, found);
    }
    if let Some(inside) = inside(left, right) {
        found.push(inside);
        return Ok(());
    }
    if let Some(inside) = inside(right, left) {
        found.push(swapped(inside, right.offsets.len()));
        return Ok(());
    }
    if left.lines.len() == 1 && right.lines.len() == 1 {
        found.extend(progressions(left, right));
        return Ok(());
    }
    // The turns inside the other side together, if it is one line.
    if let ([_], Some(turns)) = (&left.lines[..], right.turns_inside(left.start, left.last())) {
        let parts = [0..turns.start, turns.clone(), turns.end..b.extent];
        let mut parts = parts.into_iter().filter(|turns| turns.start < turns.end);
        return parts.try_for_each(|turns| meet(left, &right.part(turns), found));
    }
    if let ([_], Some(turns)) = (&right.lines[..], left.turns_inside(right.start, right.last())) {
        let parts = [0..turns.start, turns.clone(), turns.end..a.extent];
        let mut parts = parts.into_iter().filter(|turns| turns.start < turns.end);
        return parts.try_for_each(|turns| meet(&left.part(turns), right, found));
    }
    // The coarser side turn by turn.
    if a.target_stride > b.target_stride {
        left.turns(right.start, right.last()).try_for_each(|turn| meet(&left.turn(turn), right, found))
    } else {
        right.turns(left.start, left.last()).try_for_each(|turn| meet(left, &right.turn(turn), found))
    }
}

/// The common position if one of the sides is a single position.
fn meet_one(left: &Along, right: &Along) -> Option<Along> {
    let (mut left, mut right) = (left.clone(), right.clone());
    while !left.lines.is_empty() || !right.lines.is_empty() {
        let (one, many) = if left.lines.is_empty() { (&left, &mut right) } else { (&right, &mut left) };
        let top = &many.lines[0];
        let turn = one.start.checked_sub(many.start)? / top.target_stride;
        if turn >= top.extent {
            return None;
        }
        *many = many.turn(turn);
    }
    let offsets = joined(&left.offsets, &right.offsets);
    (left.start == right.start).then(|| Along { start: left.start, offsets, lines: SmallVec::new() })
}

/// Both sides have coarsest lines of one stride: turn `i` of one meets turn `i + k` of the other, for at most two `k`.
fn meet_alike(left: &Along, right: &Along, found: &mut Vec<Along>) -> Result<(), TilingError> {
    let (a, b) = (&left.lines[0], &right.lines[0]);
    let stride = i128::from(a.target_stride);
    let distance = i128::from(right.start) - i128::from(left.start);
    let first = (distance - i128::from(left.rest_last())).div_euclid(stride);
    let last = (distance + i128::from(right.rest_last())).div_euclid(stride);
    for shift in first..=last {
        // Turn `i` of the left side and turn `i - shift` of the right side.
        let from = u64::try_from(shift.max(0)).unwrap_or(u64::MAX);
        let to = i128::from(a.extent).min(i128::from(b.extent) + shift);
        let Some(count) = u64::try_from(to).ok().and_then(|to| to.checked_sub(from)).filter(|count| *count > 0) else {
            continue;
        };
        let of_right = u64::try_from(i128::from(from) - shift).expect("the shift is at most the first turn");
        let mut inner = Vec::new();
        meet(&left.turn(from), &right.turn(of_right), &mut inner)?;
        if count > 1 {
            let line = Line { extent: count, target_stride: a.target_stride, strides: joined(&a.strides, &b.strides) };
            for along in &mut inner {
                along.lines.insert(0, line.clone());
            }
        }
        found.append(&mut inner);
    }
    Ok(())
}

/// All of `within`, if `whole` is one line that has each of its positions.
fn inside(whole: &Along, within: &Along) -> Option<Along> {
    let [line] = &whole.lines[..] else { return None };
    let distance = within.start.checked_sub(whole.start)?;
    let step = line.target_stride;
    let fits = distance.is_multiple_of(step)
        && within.last() <= whole.last()
        && within.lines.iter().all(|other| other.target_stride.is_multiple_of(step));
    let moved = |by: u64| line.strides.iter().map(move |stride| by / step * stride);
    let lines = within.lines.iter().map(|other| Line {
        strides: moved(other.target_stride).chain(other.strides.iter().copied()).collect(),
        ..*other
    });
    let offsets = whole.offsets.iter().zip(moved(distance)).map(|(offset, by)| offset + by);
    fits.then(|| Along {
        start: within.start,
        offsets: offsets.chain(within.offsets.iter().copied()).collect(),
        lines: lines.collect(),
    })
}

/// The result of a meeting of right and left as one of left and right. `first` is the number of operands that come last then.
fn swapped(mut along: Along, first: usize) -> Along {
    along.offsets.rotate_left(first);
    along.lines.iter_mut().for_each(|line| line.strides.rotate_left(first));
    along
}

/// The common positions of two lines: again one line.
fn progressions(left: &Along, right: &Along) -> Option<Along> {
    let (a, b) = (&left.lines[0], &right.lines[0]);
    let common = gcd(a.target_stride, b.target_stride);
    let turns = left.turns(right.start, right.last());
    // Among this many turns of the left side one is a position of the right side, or none ever is.
    let period = b.target_stride / common;
    let first = turns.clone().take(usize::try_from(period).unwrap_or(usize::MAX)).find(|turn| {
        (left.start + turn * a.target_stride)
            .checked_sub(right.start)
            .is_some_and(|distance| distance.is_multiple_of(b.target_stride))
    })?;
    let start = left.start + first * a.target_stride;
    let step = a.target_stride * period;
    let last = left.last().min(right.last());
    if start > last {
        return None;
    }
    let of_right = (start - right.start) / b.target_stride;
    let (left, right) = (left.turn(first), right.turn(of_right));
    let extent = (last - start) / step + 1;
    let strides = a.strides.iter().map(|stride| stride * period);
    let strides = strides.chain(b.strides.iter().map(|stride| stride * (step / b.target_stride))).collect();
    let line = Line { extent, target_stride: step, strides };
    let lines = if extent > 1 { smallvec![line] } else { SmallVec::new() };
    Some(Along { start, offsets: joined(&left.offsets, &right.offsets), lines })
}

/// Pairs of parts that may have common elements: numbers in `left` and in `right`, which is sorted by its first positions.
///
/// # Errors
/// [`TilingError::TooManyPieces`] if there are far more pairs than a tiling may have pieces.
pub(super) fn pairs(left: &[Operands], right: &mut [Operands]) -> Result<Vec<(usize, usize)>, TilingError> {
    right.sort_by_key(|operands| operands.bounds(0).0);
    let last_so_far = greatest_so_far(right.iter().map(|operands| operands.bounds(0).1));
    let mut pairs = Vec::new();
    for (at, operands) in left.iter().enumerate() {
        let (low, high) = operands.bounds(0);
        let begin = last_so_far.partition_point(|last| *last < low);
        let end = right.partition_point(|operands| operands.bounds(0).0 <= high);
        let touches = |other: &usize| {
            (0..operands.axes.len()).all(|axis| {
                let ((low, high), (first, last)) = (operands.bounds(axis), right[*other].bounds(axis));
                first <= high && low <= last
            })
        };
        pairs.extend((begin..end).filter(touches).map(|other| (at, other)));
        if pairs.len() > PAIRS_MAX {
            return Err(TilingError::TooManyPieces);
        }
    }
    Ok(pairs)
}
