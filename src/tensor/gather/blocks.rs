//! Transposes in blocks: a run of target positions times columns that are near each other in the source.

use smallvec::SmallVec;

use super::{
    super::{
        block_decode::Codes,
        kernel::Level,
        transpose::{BAND_LINES, Fused, Lines, prefetch, stream, transpose},
    },
    axes::{Axes, Axis, Position, each},
    job::Stores,
};

/// Rows of one block: 128 elements of 2 bytes are four cache lines of a target row.
const BLOCK_ROWS: usize = 128;
/// Greatest length of a source line in a block that counts as short.
const SHORT_LINE_BYTES: usize = 128;
/// Bytes of a block's row in the target type.
const BLOCK_ROW_BYTES: usize = 512;
/// Bytes between the lines of a block: one cache line. The distance from one line to the next is then an odd number of cache
/// lines, so that all lines fit in the first-level cache at once.
const LINE_GAP_BYTES: usize = 64;
/// Bytes of a line of a block of 2-byte elements, by far the most common.
const LINE_BYTES: usize = 2 * BLOCK_ROWS;
/// Rows of a block that are converted together if the conversion takes several loops.
pub(super) const ROWS_AT_ONCE: usize = 8;
/// Most rows of a block that are transposed together.
pub(super) const GROUP_ROWS_MAX: usize = 16;

/// `read(offsets, stride, count, scratch)` fills `scratch` with one line per offset: `count` target elements, made from the source
/// elements at that byte and at every `stride` bytes after it.
type ReadLines<'a> = &'a mut dyn FnMut(&[usize], usize, usize, &mut [u8]);

/// How the lines of a block are read for the transpose.
pub(super) enum LineMethod<'a> {
    /// Directly from the source, converted in registers if at all.
    Straight(Option<Fused<'a>>),
    /// Through a scratch, at most `together` lines at a time. If lines do not consist of the source's bytes, they consist of
    /// the elements of `codes`.
    Read { together: usize, read: ReadLines<'a>, codes: Option<Codes<'a>> },
}

/// A nest of loops processed in blocks: a run of target positions times columns that are near each other in the source.
#[derive(Debug)]
pub(super) struct Blocks {
    /// The loops of the run, innermost first: consecutive target positions.
    pub(super) run: Axes,
    pub(super) columns: Axis,
    pub(super) outer: Axes,
    /// Bytes of a target element.
    pub(super) unit: usize,
    /// Columns of one block.
    pub(super) width: usize,
}

impl Blocks {
    /// The blocks for the canonical `axes`, or `None` if blocks would not help.
    pub(super) fn plan(axes: &[Axis], source_bytes: usize, unit: usize) -> Option<Self> {
        let inner = axes.first()?;
        let near = (1..axes.len()).filter(|index| axes[*index].source > 0).min_by_key(|index| axes[*index].source)?;
        let columns = axes[near];
        // With a stride of a cache line or more, reading along the columns gains nothing.
        if columns.source >= inner.source || columns.source >= 64.max(2 * source_bytes) || inner.target != unit {
            return None;
        }
        let mut run: Axes = SmallVec::from_slice(&[*inner]);
        let mut outer = Axes::new();
        let mut end = inner.target * inner.extent;
        for (index, axis) in axes.iter().enumerate().skip(1) {
            if index == near {
                continue;
            }
            if axis.target == end {
                run.push(*axis);
                end *= axis.extent;
            } else {
                outer.push(*axis);
            }
        }
        let width = (BLOCK_ROW_BYTES / unit).max(1);
        Some(Self { run, columns, outer, unit, width })
    }

    /// Processes all blocks.
    pub(super) fn run(
        &self,
        level: Level,
        place: Position,
        source: &[u8],
        target: &mut [u8],
        stores: Stores,
        mut method: LineMethod<'_>,
    ) {
        let width = self.width.min(self.columns.extent);
        let reads = matches!(method, LineMethod::Read { .. });
        let mut memory = BlockMemory::new(self.unit, width, reads);
        // Few rows of short lines and of lines read through a scratch, so that prefetches are spread evenly, but enough to
        // fill registers of 16 bytes.
        let long = width * self.columns.source > SHORT_LINE_BYTES;
        let group = match method {
            LineMethod::Straight(_) if long => BAND_LINES,
            LineMethod::Straight(_) | LineMethod::Read { .. } if self.unit == 1 => GROUP_ROWS_MAX,
            LineMethod::Straight(_) | LineMethod::Read { .. } => ROWS_AT_ONCE,
        };
        let length: usize = self.run.iter().map(|axis| axis.extent).product();
        each(&self.outer, place, &mut |place| {
            let mut rows = ContiguousRows::new(&self.run);
            let (mut offsets, mut next) = ([0; BLOCK_ROWS], [0; BLOCK_ROWS]);
            next.fill_with(|| place.source + rows.next());
            for row in (0..length).step_by(BLOCK_ROWS) {
                std::mem::swap(&mut offsets, &mut next);
                next.fill_with(|| place.source + rows.next());
                let offsets = &mut offsets[..BLOCK_ROWS.min(length - row)];
                // Bytes of a line of the block: one element for each of its positions of the run.
                let line = offsets.len() * self.unit;
                for column in (0..self.columns.extent).step_by(width) {
                    let count = width.min(self.columns.extent - column);
                    let step = count * self.columns.source;
                    for first in (0..offsets.len()).step_by(group) {
                        let end = offsets.len().min(first + group);
                        // The following rows, or the first rows of the next block, which lies beside this one or below it.
                        let mut ahead = [0; BAND_LINES];
                        let ahead = &mut ahead[..end - first];
                        for (index, offset) in (end..).zip(ahead.iter_mut()) {
                            *offset = match offsets.get(index) {
                                Some(offset) => *offset,
                                None if column + count < self.columns.extent => offsets[index - offsets.len()] + step,
                                None => next[index - offsets.len()],
                            };
                        }
                        let offsets = &offsets[first..end];
                        let lines = Lines { source, offsets, unit: self.unit, columns: count, fused: None, ahead };
                        memory.transpose(level, lines, first, self.columns.source, &mut method);
                    }
                    let corner = place.target + column * self.columns.target + row * self.unit;
                    memory.write(count, line, &mut target[corner..], self.columns.target, stores);
                    for offset in &mut *offsets {
                        *offset += step;
                    }
                }
            }
        });
    }
}

/// The memory of one block, and of lines on their way into it.
struct BlockMemory {
    block: Vec<u8>,
    /// Bytes from one line of the block to the next.
    pitch: usize,
    scratch: Vec<u8>,
}

impl BlockMemory {
    /// Memory for `width` columns of elements of `unit` bytes, with a scratch if lines are read through one.
    fn new(unit: usize, width: usize, reads: bool) -> Self {
        let pitch = BLOCK_ROWS * unit + LINE_GAP_BYTES;
        let scratch_bytes = if reads { GROUP_ROWS_MAX * unit * width } else { 0 };
        Self { block: vec![0; pitch * width], pitch, scratch: vec![0; scratch_bytes] }
    }

    /// Transposes lines to rows of the block from row `first` on. Elements of a line are `stride` bytes apart.
    fn transpose(&mut self, level: Level, lines: Lines<'_>, first: usize, stride: usize, method: &mut LineMethod<'_>) {
        let target = &mut self.block[first * lines.unit..];
        let (together, read, codes) = match method {
            LineMethod::Straight(fused) => {
                return transpose(level, Lines { fused: *fused, ..lines }, target, self.pitch);
            }
            LineMethod::Read { together, read, codes } => (*together, read, *codes),
        };
        let made = lines.columns * lines.unit;
        let parts = self.scratch.chunks_mut(together * made).enumerate();
        for (index, part) in parts.take(lines.offsets.len().div_ceil(together)) {
            let rows = index * together..lines.offsets.len().min((index + 1) * together);
            for ahead in &lines.ahead[rows.clone()] {
                match codes {
                    None => prefetch(lines.source, *ahead, lines.columns * stride),
                    Some(codes) => codes.prefetch(*ahead, lines.columns * stride),
                }
            }
            let offsets = &lines.offsets[rows];
            read(offsets, stride, lines.columns, &mut part[..offsets.len() * made]);
        }
        let starts: [usize; GROUP_ROWS_MAX] = std::array::from_fn(|index| index * made);
        let offsets = &starts[..lines.offsets.len()];
        transpose(level, Lines { source: &self.scratch, offsets, ahead: &[], ..lines }, target, self.pitch);
    }

    /// Writes the first `line` bytes of `count` lines of the block to target lines `apart` bytes from each other.
    fn write(&self, count: usize, line: usize, target: &mut [u8], apart: usize, stores: Stores) {
        for (index, made) in self.block.chunks_exact(self.pitch).take(count).enumerate() {
            let to = &mut target[index * apart..][..line];
            match (stores, made.first_chunk::<LINE_BYTES>(), <&mut [u8; LINE_BYTES]>::try_from(&mut *to).ok()) {
                // By far the most lines have this length, which needs no loop.
                (Stores::Streamed, Some(made), Some(to)) => stream(made, to),
                (Stores::Streamed, ..) => stream(&made[..line], to),
                (Stores::Cached, Some(made), Some(to)) => *to = *made,
                (Stores::Cached, ..) => to.copy_from_slice(&made[..line]),
            }
        }
    }
}

/// Iterates over the source offsets of the positions of a run.
struct ContiguousRows<'a> {
    axes: &'a [Axis],
    index: SmallVec<[usize; 8]>,
    offset: usize,
}

impl<'a> ContiguousRows<'a> {
    fn new(axes: &'a [Axis]) -> Self {
        Self { axes, index: axes.iter().map(|_| 0).collect(), offset: 0 }
    }

    /// The offset of the next position. The first follows the last.
    fn next(&mut self) -> usize {
        let now = self.offset;
        for (axis, index) in self.axes.iter().zip(&mut self.index) {
            *index += 1;
            self.offset += axis.source;
            if *index < axis.extent {
                break;
            }
            self.offset -= *index * axis.source;
            *index = 0;
        }
        now
    }
}
