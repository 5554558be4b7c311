//! The normal form of a view: strided copies that together fill it.
//!
//! A tiling fills a target of `len_units` units in row-major order. Each *piece* is a mixed-radix pair of maps,
//!
//! ```text
//! target(i0, …, ik) = start  + i0*t0 + … + ik*tk        0 <= ij < nj
//! source(i0, …, ik) = offset + i0*s0 + … + ik*sk
//! ```
//!
//! with the loops sorted by target stride and *nested*: each `tj` exceeds the last offset `sum (ni - 1)*ti` of the finer loops.
//! Pieces are disjoint and cover the target. Because target positions are linear, a reshape changes nothing at all. A
//! permutation of rows inside an axis (`RoPE` halves to pairs, interleaved gates) is one more loop, not thousands of boxes.
//!
//! A *unit* is one element, or for types narrower than a byte the smallest group of elements that fills whole bytes.

use std::{ops::Range, sync::Arc};

use super::{
    DType, Decode, EncodedPart, Load, Program, TensorId,
    gather::{Loop, Loops},
    view::EncodedMatrices,
};

/// Most pieces of one tiling. The largest real views (all experts of all layers of a trillion-parameter model, transposed) have
/// about 25 000. A million would mean that the algebra failed to find the structure.
pub const PIECES_MAX: usize = 1 << 20;

/// Steps of a loop that stay together when a piece is cut: the number of lines transposed at once.
const LINES: u64 = 128;

/// Why a view has no tiling.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TilingError {
    /// Too many pieces.
    #[error("the view needs more than {PIECES_MAX} pieces")]
    TooManyPieces,
    /// A view cuts or reorders elements inside a byte.
    #[error("{dtype} elements are packed {elements} to {bytes} bytes; the view cuts or moves parts of such a group")]
    SplitsUnit {
        /// Element type.
        dtype: DType,
        /// Elements of one unit.
        elements: u64,
        /// Bytes of one unit.
        bytes: u64,
    },
}

/// Where a piece's elements come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A tensor of the checkpoint.
    Tensor {
        /// The tensor.
        tensor: TensorId,
        /// Source unit of the piece's first element. For a quantized tensor, the number of that logical element; `tensor` is
        /// then its first operand.
        offset: u64,
        /// Index into [`Tiling::decoders`].
        decoder: u32,
    },
    /// What an encoder makes.
    Encoded {
        /// Index into [`Tiling::encoded`].
        leaf: u32,
        /// Element of the part of the piece's first element.
        offset: u64,
        /// Index into [`Tiling::decoders`].
        decoder: u32,
    },
    /// A constant, in target bytes.
    Fill {
        /// The bytes of one target unit, padded with zeros.
        bytes: [u8; 8],
    },
}

impl Origin {
    /// The same origin, so many source units on.
    #[must_use]
    pub fn moved(self, by: u64) -> Self {
        match self {
            Self::Tensor { tensor, offset, decoder } => Self::Tensor { tensor, offset: offset + by, decoder },
            Self::Encoded { leaf, offset, decoder } => Self::Encoded { leaf, offset: offset + by, decoder },
            Self::Fill { bytes } => Self::Fill { bytes },
        }
    }

    /// The number of its decoder; a constant has none.
    pub(super) fn decoder_mut(&mut self) -> Option<&mut u32> {
        match self {
            Self::Tensor { decoder, .. } | Self::Encoded { decoder, .. } => Some(decoder),
            Self::Fill { .. } => None,
        }
    }
}

/// A part of what an encoder makes, as a tiling refers to it.
#[derive(Clone, Debug)]
pub struct EncodedLeaf {
    /// The encoder and its matrices.
    pub encoding: Arc<EncodedMatrices>,
    /// What is shown of them.
    pub part: EncodedPart,
}

/// A strided copy into the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Target unit of the first element.
    pub start: u64,
    /// Loops by falling target stride, none of extent 1.
    pub loops: Loops,
    /// Where the elements come from.
    pub origin: Origin,
}

/// A work slice: one of several about equal parts of the work on a span of a tiling. The borders lie between lines of the source,
/// if it has lines, so that only one slice visits a page of the source. Runs of the target stay as long as `lines`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkSlice {
    /// Number of the slice, from 0 on.
    pub index: u64,
    /// Number of slices, at least 1.
    pub of: u64,
    /// Lines of the source that stay together, at least 1.
    pub lines: u64,
}

impl WorkSlice {
    /// All of the work.
    pub const WHOLE: Self = Self { index: 0, of: 1, lines: 1 };

    /// The units of `count` that are in this slice, counted in any fixed order.
    fn range(self, count: u64) -> Range<u64> {
        // At most `count` again.
        let of = u128::from(self.of.max(1));
        let border = |index: u64| {
            u64::try_from(u128::from(count) * u128::from(index) / of).expect("a slice ends with the count")
        };
        border(self.index)..border(self.index + 1)
    }
}

/// Distance, in target units, from the first to the last element of these loops.
pub(super) fn last_offset(loops: &[Loop]) -> u64 {
    loops.iter().map(|l| (l.extent - 1) * l.target_stride).sum()
}

/// For each number the greatest among it and those before it.
pub(super) fn greatest_so_far(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let so_far = |greatest: &mut u64, number: u64| {
        *greatest = number.max(*greatest);
        Some(*greatest)
    };
    numbers.scan(0, so_far).collect()
}

impl Piece {
    /// Target unit of the last element.
    pub fn last(&self) -> u64 {
        self.start + last_offset(&self.loops)
    }

    /// Number of units.
    pub fn units(&self) -> u64 {
        self.loops.iter().map(|l| l.extent).product()
    }

    /// Calls `emit` with the parts of this piece whose target lies in `low..high`. At most two parts per loop, plus one.
    pub fn cut(&self, low: u64, high: u64, emit: &mut dyn FnMut(Self)) {
        cut(self.start, 0, &self.loops, low, high, &mut |start, moved, loops| {
            emit(Self { start, loops, origin: self.origin.moved(moved) });
        });
    }

    /// The part of this piece that is in a work slice. `units` are the units of the slice, counted from the piece's first, line by
    /// line of the source.
    fn between(&self, units: &Range<u64>, lines: u64) -> Option<Self> {
        // A cut of the target's run would make two threads write to the same cache lines; it is cut only if no other loop exists.
        let order = |index: &usize| {
            let l = self.loops[*index];
            (l.source_stride > 1 && l.target_stride > 1, l.source_stride)
        };
        let Some(widest) = (0..self.loops.len()).max_by_key(order) else {
            return units.contains(&0).then(|| self.clone());
        };
        let l = self.loops[widest];
        let step_units = self.units() / l.extent;
        let others = self.loops.iter().enumerate().filter(|(index, _)| *index != widest);
        let line_units = others.filter(|(_, l)| l.source_stride == 1).map(|(_, l)| l.extent).max().unwrap_or(1);
        // Steps that stay together.
        let run = if l.target_stride == 1 { lines } else { 1 };
        let group = (lines * line_units).div_ceil(step_units).max(run);
        let step = |unit: u64| if unit < self.units() { unit / step_units / group * group } else { l.extent };
        let (first, end) = (step(units.start), step(units.end));
        if first >= end {
            return None;
        }
        Some(self.steps(widest, first, end))
    }

    /// The steps `first..end` of a loop.
    fn steps(&self, number: usize, first: u64, end: u64) -> Self {
        let l = self.loops[number];
        let mut part = self.clone();
        part.start += first * l.target_stride;
        part.origin = part.origin.moved(first * l.source_stride);
        part.loops[number].extent = end - first;
        if end - first == 1 {
            part.loops.remove(number);
        }
        part
    }

    /// Two parts of this piece, cut between steps of the loop with the largest source steps, so that each part needs a shorter
    /// range of the source. Long target runs stay whole lines. `None` if the piece is one unit.
    pub fn halves(&self) -> Option<(Self, Self)> {
        let widest = (0..self.loops.len()).max_by_key(|index| self.loops[*index].source_stride)?;
        let l = self.loops[widest];
        let middle = l.extent.div_ceil(2);
        let middle = if l.extent >= 2 * LINES { middle.next_multiple_of(LINES) } else { middle };
        Some((self.steps(widest, 0, middle), self.steps(widest, middle, l.extent)))
    }

    /// The units of this piece whose source lies within `units` units from its first, and the others, in parts. Loops are cut only as
    /// far as the border asks for it.
    pub fn cut_source(&self, units: u64) -> (Vec<Self>, Vec<Self>) {
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        self.cut_source_into(units, &mut inside, &mut outside);
        (inside, outside)
    }

    fn cut_source_into(&self, units: u64, inside: &mut Vec<Self>, outside: &mut Vec<Self>) {
        if units == 0 {
            return outside.push(self.clone());
        }
        if self.source_bounding_units() <= units {
            return inside.push(self.clone());
        }
        let widest = (0..self.loops.len()).max_by_key(|index| self.loops[*index].source_stride);
        let widest = widest.expect("a piece of one unit lies within any number of units");
        let l = self.loops[widest];
        let rest = self.source_bounding_units() - (l.extent - 1) * l.source_stride;
        // Steps before the border, those that it cuts, and those after it.
        let whole = if units >= rest { ((units - rest) / l.source_stride.max(1) + 1).min(l.extent) } else { 0 };
        let touched = units.div_ceil(l.source_stride.max(1)).clamp(whole, l.extent);
        if whole > 0 {
            inside.push(self.steps(widest, 0, whole));
        }
        for step in whole..touched {
            self.steps(widest, step, step + 1).cut_source_into(units - step * l.source_stride, inside, outside);
        }
        if touched < l.extent {
            outside.push(self.steps(widest, touched, l.extent));
        }
    }

    /// Units, from the first, that lie consecutively both in the target and in the source.
    pub fn contiguous_units(&self) -> u64 {
        let mut run = 1;
        for l in self.loops.iter().rev() {
            if l.target_stride != run || l.source_stride != run {
                break;
            }
            run *= l.extent;
        }
        run
    }

    /// Number of source units from the first to the last that the piece reads, both included.
    pub fn source_bounding_units(&self) -> u64 {
        self.loops.iter().map(|l| (l.extent - 1) * l.source_stride).sum::<u64>() + 1
    }
}

/// Emits the parts of a mixed-radix set whose target lies in `low..high`: `(start, source moved by, loops)`.
pub(super) fn cut(start: u64, moved: u64, loops: &[Loop], low: u64, high: u64, emit: &mut dyn FnMut(u64, u64, Loops)) {
    let all = last_offset(loops);
    if start >= high || start + all < low {
        return;
    }
    if start >= low && start + all < high {
        emit(start, moved, Loops::from_slice(loops));
        return;
    }
    let [top, rest @ ..] = loops else { return };
    let rest_last = all - (top.extent - 1) * top.target_stride;
    let stride = top.target_stride;
    // Turn i occupies start + i*stride ..= start + i*stride + rest_last.
    let first_touched = low.saturating_sub(start + rest_last).div_ceil(stride);
    let end_touched = (high - start).div_ceil(stride).min(top.extent);
    let first_inside = low.saturating_sub(start).div_ceil(stride).min(end_touched);
    let end_inside =
        if high > start + rest_last { ((high - 1 - start - rest_last) / stride + 1).min(top.extent) } else { 0 };
    let end_inside = end_inside.max(first_inside);
    let turn = |i: u64, emit: &mut dyn FnMut(u64, u64, Loops)| {
        cut(start + i * stride, moved + i * top.source_stride, rest, low, high, emit);
    };
    for i in first_touched..first_inside {
        turn(i, emit);
    }
    let inside = end_inside - first_inside;
    if inside > 0 {
        let mut kept = Loops::new();
        if inside > 1 {
            kept.push(Loop { extent: inside, ..*top });
        }
        kept.extend_from_slice(rest);
        emit(start + first_inside * stride, moved + first_inside * top.source_stride, kept);
    }
    for i in end_inside..end_touched {
        turn(i, emit);
    }
}

/// Disjoint strided copies that cover a target.
#[derive(Clone, Debug)]
pub struct Tiling {
    len_units: u64,
    unit_bytes: u64,
    /// Sorted by start.
    pieces: Vec<Piece>,
    /// `last_so_far[i]` is the greatest last unit among pieces `0..=i`, so that the pieces that touch a range are found by
    /// bisection.
    last_so_far: Vec<u64>,
    decoders: Vec<Decode>,
    encoded: Vec<EncodedLeaf>,
}

impl Tiling {
    pub(super) fn new(
        (len_units, unit_bytes): (u64, u64),
        mut pieces: Vec<Piece>,
        decoders: Vec<Decode>,
        encoded: Vec<EncodedLeaf>,
    ) -> Self {
        pieces.sort_by_key(|piece| piece.start);
        let last_so_far = greatest_so_far(pieces.iter().map(Piece::last));
        let tiling = Self { len_units, unit_bytes, pieces, last_so_far, decoders, encoded };
        tiling.check_invariants();
        tiling
    }

    /// What encoders make of it, as pieces refer to it.
    pub fn encoded(&self) -> &[EncodedLeaf] {
        &self.encoded
    }

    /// Asserts the guarantees of the constructor: loops are nested, pieces lie inside the target, and have as many units as it.
    /// Disjointness is then equivalent to covering, and tests check it element by element.
    fn check_invariants(&self) {
        let mut units = 0;
        for piece in &self.pieces {
            assert!(piece.last() < self.len_units, "{piece:?} leaves a target of {} units", self.len_units);
            units += piece.units();
            for (at, l) in piece.loops.iter().enumerate() {
                let finer = last_offset(&piece.loops[at + 1..]);
                assert!(l.extent > 1 && l.target_stride > finer, "loops of {piece:?} are not nested");
            }
        }
        assert_eq!(units, self.len_units, "pieces do not cover the target");
    }

    /// Units of the target.
    pub fn len_units(&self) -> u64 {
        self.len_units
    }

    /// Bytes of one target unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Bytes of the target.
    pub fn len_bytes(&self) -> u64 {
        self.len_units * self.unit_bytes
    }

    /// The pieces, by start.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The decoders that pieces refer to.
    pub fn decoders(&self) -> &[Decode] {
        &self.decoders
    }

    /// Calls `emit` with the parts of the pieces whose target lies in `low..high`, in no particular order.
    pub fn cut(&self, low: u64, high: u64, emit: &mut dyn FnMut(Piece)) {
        let begin = self.last_so_far.partition_point(|last| *last < low);
        let end = self.pieces.partition_point(|piece| piece.start < high);
        for piece in self.pieces.get(begin..end).unwrap_or_default() {
            piece.cut(low, high, emit);
        }
    }

    /// As [`Tiling::cut`], for a work slice of `low..high`. All slices together are the whole, and no two overlap.
    pub fn cut_work_slice(&self, slice: WorkSlice, low: u64, high: u64, emit: &mut dyn FnMut(Piece)) {
        if slice.of <= 1 {
            return self.cut(low, high, emit);
        }
        let mut total = 0;
        self.cut(low, high, &mut |piece| total += piece.units());
        let (units, mut before) = (slice.range(total), 0);
        self.cut(low, high, &mut |piece| {
            let units = units.start.saturating_sub(before)..units.end.saturating_sub(before);
            before += piece.units();
            if let Some(part) = piece.between(&units, slice.lines) {
                emit(part);
            }
        });
    }

    /// Whether every piece copies bytes unchanged, in runs of at least `run_bytes_min` bytes (or whole pieces). Such a target
    /// needs no tiles.
    pub fn is_run_copy(&self, run_bytes_min: u64) -> bool {
        self.pieces.iter().all(|piece| match piece.origin {
            Origin::Tensor { decoder, .. } => {
                let run = piece.contiguous_units();
                self.decoders[decoder as usize] == Decode::Copy
                    && (run * self.unit_bytes >= run_bytes_min || run == piece.units())
            }
            Origin::Encoded { .. } => false,
            Origin::Fill { .. } => true,
        })
    }

    /// Whether the index of some operand is a table, as the groups of GPTQ's rows are: then any part of the source's lines may need
    /// all of that operand.
    pub fn has_index_tables(&self) -> bool {
        self.decoders.iter().any(|decoder| {
            let Decode::Program(Program { load: Load::Value(value), .. }) = decoder else { return false };
            let mut found = false;
            value.for_each_operand(&mut |operand| {
                found |= operand.index.digits().iter().any(|digit| digit.table.as_ref().is_some_and(|t| t.len() > 1));
            });
            found
        })
    }

    /// Target stride, in units, of the loops along which sources are contiguous, if it is not 1. Then the tiling transposes,
    /// and a tile should hold many multiples of this stride. The greatest over all pieces.
    pub fn transposed_stride_units(&self) -> Option<u64> {
        let strides = self.pieces.iter().filter_map(|piece| {
            let unit = piece.loops.iter().find(|l| l.source_stride == 1)?;
            (unit.target_stride != 1).then_some(unit.target_stride)
        });
        strides.max()
    }
}
