//! Strided copies: fills the elements of a target that one source tensor provides, converting them on the way.
//!
//! A job is a nest of loops in any order. It is first brought to one form: no loop of extent 1, neighbours merged where
//! both sides chain, sorted by target stride. Its last elements are checked against both slices. Then one of three methods runs:
//!
//! 1. *Rows*: the innermost loop is contiguous on both sides: copy or convert row by row.
//! 2. *Blocks*: the target's innermost loop strides through the source, and another loop takes smaller source steps: a
//!    transpose. A walk along either side in order would touch every cache line of the other many times. So blocks of at
//!    most 128 rows of 512 target bytes are read a few rows at a time, transposed into a scratch, and written from it in
//!    whole cache lines. Conversions run in registers during the transpose, or row by row before it. Reading few rows at a
//!    time avoids conflicts: in a matrix whose rows are a power of two apart, the same part of many rows competes for the same
//!    few sets of a processor's cache. The run of target positions may consist of several loops, as in a transposed matrix
//!    whose rows were permuted.
//! 3. *Elements*: anything else, in target order.

use smallvec::SmallVec;

use super::convert::{Converter, Direct, STRETCH, element_bytes};
use super::kernel::Level;
use super::stretch::{self, Codes, ValueDecoder};
use super::transpose::{BAND_LINES, Fused, FusedKind, Lines, USUAL_PITCH, fence, prefetch, stream, transpose};
use super::{Decode, Load, Program, Window};

/// One loop of a strided copy. Strides are in elements. For elements narrower than a byte the caller converts everything to
/// units, and strides are in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Steps of the loop, at least 1.
    pub extent: u64,
    /// Target elements from one step to the next.
    pub target_stride: u64,
    /// Source elements from one step to the next.
    pub source_stride: u64,
}

/// Everything needed to fill a strided set of target elements from one source tensor.
///
/// Different loop positions must be different target elements; source elements may repeat.
#[derive(Clone, Copy, Debug)]
pub struct Gather<'a> {
    /// How a source element becomes a target element.
    pub decode: &'a Decode,
    /// Bytes of one target element.
    pub target_bytes: u64,
    /// The loops, in any order.
    pub loops: &'a [Loop],
    /// Source element at loop position zero; of a quantized tensor, the number of that logical element.
    pub source_offset: u64,
    /// Target element at loop position zero.
    pub target_offset: u64,
}

impl Gather<'_> {
    /// Passes the job to `each` in turns of the loop with the largest source steps, until one fails. `None`, without any call,
    /// if the job is one element.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn in_turns<E>(&self, each: &mut dyn FnMut(&Gather<'_>) -> Result<(), E>) -> Option<Result<(), E>> {
        let loops = self.loops.iter().enumerate().filter(|(_, l)| l.extent > 1);
        let (at, outer) = loops.max_by_key(|(_, l)| l.source_stride)?;
        let others = self.loops.iter().enumerate().filter(|(index, _)| *index != at);
        let inner: SmallVec<[Loop; 4]> = others.map(|(_, l)| *l).collect();
        Some((0..outer.extent).try_for_each(|turn| {
            each(&Gather {
                loops: &inner,
                source_offset: self.source_offset + turn * outer.source_stride,
                target_offset: self.target_offset + turn * outer.target_stride,
                ..*self
            })
        }))
    }
}

/// How target bytes are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stores {
    /// Through the processor's caches: the bytes are read next.
    #[default]
    Cached,
    /// Past the caches, where that is faster: the target is larger than they are.
    Streamed,
}

/// Rows of one block: 128 elements of 2 bytes are four cache lines of a target row.
const BLOCK_ROWS: usize = 128;
/// Rows of a block that are converted together if the conversion takes several loops.
const ROWS_AT_ONCE: usize = 8;
/// Most rows of a block that are transposed together.
const GROUP_ROWS_MAX: usize = 16;
/// Greatest length of a source line in a block that counts as short.
const SHORT_LINE_BYTES: usize = 128;
/// Bytes of a block's row in the target type.
const BLOCK_ROW_BYTES: usize = 512;
/// Bytes between the lines of a block: one cache line. The distance from one line to the next is then an odd number of cache
/// lines, so that all lines fit in the first-level cache at once.
const LINE_GAP_BYTES: usize = 64;
/// Bytes of a line of a block of 2-byte elements, by far the most common.
const LINE_BYTES: usize = 2 * BLOCK_ROWS;
const _: () = assert!(LINE_BYTES + LINE_GAP_BYTES == USUAL_PITCH, "the pitch of most blocks");
/// Bytes of the widest element that is converted.
const FLOAT_BYTES_MAX: usize = 8;
/// Bytes of the widest run that is transposed as if it were one element.
const UNIT_BYTES_MAX: usize = 16;

/// A loop in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    extent: usize,
    target: usize,
    source: usize,
}

type Axes = SmallVec<[Axis; 8]>;

/// Runs `job`.
///
/// Each of `windows` holds bytes of one operand's tensor, in the order of [`super::Value::for_each_operand`]. A window may be a
/// fetched part or a whole mapped tensor; a plain copy or conversion has one window. Target bytes outside of all loop
/// positions stay unchanged.
///
/// # Panics
/// If the loops leave a window or `target`, or the element widths contradict the decoder. Both are broken invariants of
/// the tiling, which is checked before any read.
pub fn gather(job: &Gather<'_>, windows: &[Window<'_>], target: &mut [u8]) {
    gather_at(Level::detected(), job, windows, target, Stores::Cached);
}

/// As [`gather`], with the given kind of stores. The written bytes may then be passed to other threads in any way.
///
/// # Panics
/// As [`gather`].
pub fn gather_with(stores: Stores, job: &Gather<'_>, windows: &[Window<'_>], target: &mut [u8]) {
    gather_at(Level::detected(), job, windows, target, stores);
    if stores == Stores::Streamed {
        fence();
    }
}

fn gather_at(level: Level, job: &Gather<'_>, windows: &[Window<'_>], target: &mut [u8], stores: Stores) {
    let target_bytes = bytes(job.target_bytes, 1);
    if let Decode::Program(program) = job.decode
        && let Load::Value(value) = &program.load
    {
        assert_eq!(program.target.element_bytes(), Some(job.target_bytes), "element width of {program:?}");
        // Logical elements take the place of source bytes.
        let axes = canonical(job.loops, 1, target_bytes);
        let place = Position { source: bytes(job.source_offset, 1), target: bytes(job.target_offset, target_bytes) };
        let reached = axes.iter().map(|axis| (axis.extent, axis.target));
        check_bounds("target", place.target, reached, target_bytes, target.len());
        let values = ValueDecoder::new(program, value, level, windows);
        return DecodedGather { values }.run(level, &axes, place, target, stores);
    }
    let [Window { bytes: source, start }] = *windows else { panic!("{} windows of one tensor", windows.len()) };
    let source_bytes = match job.decode {
        Decode::Copy => target_bytes,
        Decode::Program(Program { load: Load::Element(dtype), target, .. }) => {
            assert_eq!(target.element_bytes(), Some(job.target_bytes), "element width of {:?}", job.decode);
            element_bytes(*dtype)
        }
        Decode::Program(Program { load: Load::Value(value), .. }) => panic!("{value:?} was done above"),
    };
    let Some(skip) = bytes(job.source_offset, source_bytes).checked_sub(bytes(start, 1)) else {
        panic!("source element {} of {source_bytes} bytes lies before the window at byte {start}", job.source_offset);
    };
    let axes = canonical(job.loops, source_bytes, target_bytes);
    let place = Position { source: skip, target: bytes(job.target_offset, target_bytes) };
    check_bounds(
        "source",
        place.source,
        axes.iter().map(|axis| (axis.extent, axis.source)),
        source_bytes,
        source.len(),
    );
    check_bounds(
        "target",
        place.target,
        axes.iter().map(|axis| (axis.extent, axis.target)),
        target_bytes,
        target.len(),
    );
    match job.decode {
        Decode::Copy => copy(level, axes, source_bytes, place, source, target, stores),
        Decode::Program(Program { load: Load::Element(dtype), target: to, steps })
            if dtype == to && steps.is_empty() =>
        {
            copy(level, axes, source_bytes, place, source, target, stores);
        }
        Decode::Program(program) => Convert::new(program, level).run(&axes, place, source, target, stores),
    }
}

/// Writes `pattern`, the bytes of one element, to every element of `target` that the loops visit from element
/// `target_offset` on. Source strides are ignored.
///
/// # Panics
/// If the loops leave `target`.
pub fn fill(pattern: &[u8], loops: &[Loop], target_offset: u64, target: &mut [u8]) {
    let unit = pattern.len();
    let steps: SmallVec<[Loop; 8]> = loops.iter().map(|&step| Loop { source_stride: 0, ..step }).collect();
    let mut nest = canonical(&steps, 0, unit);
    let start = bytes(target_offset, unit);
    check_bounds("target", start, nest.iter().map(|axis| (axis.extent, axis.target)), unit, target.len());
    let run = match nest.first() {
        Some(axis) if axis.target == unit => nest.remove(0).extent * unit,
        Some(_) | None => unit,
    };
    let constant = pattern.iter().all(|byte| Some(byte) == pattern.first());
    each(&nest, Position { source: 0, target: start }, &mut |place| {
        let run = &mut target[place.target..place.target + run];
        if constant {
            run.fill(pattern.first().copied().unwrap_or(0));
        } else {
            for element in run.chunks_exact_mut(unit) {
                element.copy_from_slice(pattern);
            }
        }
    });
}

/// `elements * width` as bytes in memory.
fn bytes(elements: u64, width: usize) -> usize {
    let product = usize::try_from(elements).ok().and_then(|elements| elements.checked_mul(width));
    let Some(product) = product else { panic!("{elements} elements of {width} bytes exceed memory") };
    product
}

/// The loops in bytes, without those of extent 1, by ascending target stride, merged where both sides chain.
fn canonical(loops: &[Loop], source_bytes: usize, target_bytes: usize) -> Axes {
    let mut axes: Axes = loops
        .iter()
        .inspect(|step| assert!(step.extent >= 1, "a loop of extent 0: {loops:?}"))
        .filter(|step| step.extent > 1)
        .map(|step| Axis {
            extent: bytes(step.extent, 1),
            target: bytes(step.target_stride, target_bytes),
            source: bytes(step.source_stride, source_bytes),
        })
        .collect();
    axes.sort_unstable_by_key(|axis| axis.target);
    axes.dedup_by(|outer, inner| {
        let chained = inner.extent.checked_mul(inner.target) == Some(outer.target)
            && inner.extent.checked_mul(inner.source) == Some(outer.source);
        if chained {
            inner.extent *= outer.extent;
        }
        chained
    });
    axes
}

/// Asserts that the last element of the loops ends within `length` bytes.
fn check_bounds(side: &str, start: usize, axes: impl Iterator<Item = (usize, usize)>, unit: usize, length: usize) {
    let end =
        axes.fold(start.checked_add(unit), |end, (extent, stride)| end?.checked_add((extent - 1).checked_mul(stride)?));
    assert!(end.is_some_and(|end| end <= length), "the loops reach byte {end:?} of {length} {side} bytes");
}

/// A loop position, in bytes of each slice.
#[derive(Clone, Copy, Debug)]
struct Position {
    source: usize,
    target: usize,
}

impl Position {
    fn step(self, axis: Axis, steps: usize) -> Self {
        Self { source: self.source + steps * axis.source, target: self.target + steps * axis.target }
    }
}

/// Visits all positions of the loops; the first loop runs fastest.
fn each(axes: &[Axis], place: Position, visit: &mut impl FnMut(Position)) {
    match axes.split_last() {
        None => visit(place),
        Some((outer, inner)) => {
            for index in 0..outer.extent {
                each(inner, place.step(*outer, index), visit);
            }
        }
    }
}

fn copy(
    level: Level,
    mut axes: Axes,
    element: usize,
    place: Position,
    source: &[u8],
    target: &mut [u8],
    stores: Stores,
) {
    let mut unit = element;
    // Elements contiguous on both sides are copied as one wider element.
    if let Some(axis) = axes.first()
        && axis.target == unit
        && axis.source == unit
    {
        unit *= axis.extent;
        axes.remove(0);
    }
    if unit <= UNIT_BYTES_MAX
        && let Some(plan) = Blocks::plan(&axes, unit, unit)
    {
        let mut read = |offsets: &[usize], stride: usize, count: usize, scratch: &mut [u8]| {
            for (index, from) in offsets.iter().enumerate() {
                copy_line(unit, &source[*from..], stride, &mut scratch[index * count * unit..][..count * unit]);
            }
        };
        let straight = plan.columns.source == unit;
        let method = if straight {
            LineMethod::Straight(None)
        } else {
            LineMethod::Read { together: 1, read: &mut read, codes: None }
        };
        plan.run(level, place, source, target, stores, method);
        return;
    }
    match axes.split_first() {
        Some((inner, outer)) if unit <= UNIT_BYTES_MAX => each(outer, place, &mut |place| {
            let target = &mut target[place.target..];
            copy_elements(unit, &source[place.source..], inner.source, target, inner.target, inner.extent);
        }),
        Some(_) | None => each(&axes, place, &mut |place| {
            target[place.target..place.target + unit].copy_from_slice(&source[place.source..place.source + unit]);
        }),
    }
}

/// Fills `target` with elements of `unit` bytes, `stride` apart in `source`.
fn copy_line(unit: usize, source: &[u8], stride: usize, target: &mut [u8]) {
    if stride == unit {
        target.copy_from_slice(&source[..target.len()]);
    } else {
        copy_elements(unit, source, stride, target, unit, target.len() / unit);
    }
}

/// Copies `count` elements of `unit` bytes, each side with its own stride in bytes.
fn copy_elements(unit: usize, source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    match unit {
        1 => copy_units::<1>(source, from, target, to, count),
        2 => copy_units::<2>(source, from, target, to, count),
        3 => copy_units::<3>(source, from, target, to, count),
        4 => copy_units::<4>(source, from, target, to, count),
        8 => copy_units::<8>(source, from, target, to, count),
        16 => copy_units::<16>(source, from, target, to, count),
        unit => {
            for index in 0..count {
                target[index * to..][..unit].copy_from_slice(&source[index * from..][..unit]);
            }
        }
    }
}

fn copy_units<const UNIT: usize>(source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    if to == UNIT {
        for (index, element) in target.as_chunks_mut::<UNIT>().0[..count].iter_mut().enumerate() {
            element.copy_from_slice(&source[index * from..][..UNIT]);
        }
        return;
    }
    for index in 0..count {
        target[index * to..][..UNIT].copy_from_slice(&source[index * from..][..UNIT]);
    }
}

/// `read(offsets, stride, count, scratch)` fills `scratch` with one line per offset: `count` target elements, made from the source
/// elements at that byte and at every `stride` bytes after it.
type Read<'a> = &'a mut dyn FnMut(&[usize], usize, usize, &mut [u8]);

/// How the lines of a block are read for the transpose.
enum LineMethod<'a> {
    /// Directly from the source, converted in registers if at all.
    Straight(Option<Fused<'a>>),
    /// Through a scratch, at most `together` lines at a time. If lines do not consist of the source's bytes, they consist of
    /// the elements of `codes`.
    Read { together: usize, read: Read<'a>, codes: Option<Codes<'a>> },
}

/// A nest of loops processed in blocks: a run of target positions times columns that are near each other in the source.
#[derive(Debug)]
struct Blocks {
    /// The loops of the run, innermost first: consecutive target positions.
    run: Axes,
    columns: Axis,
    outer: Axes,
    /// Bytes of a target element.
    unit: usize,
    /// Columns of one block.
    width: usize,
}

impl Blocks {
    /// The blocks for the canonical `axes`, or `None` if blocks would not help.
    fn plan(axes: &[Axis], source_bytes: usize, unit: usize) -> Option<Self> {
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
    fn run(
        &self,
        level: Level,
        place: Position,
        source: &[u8],
        target: &mut [u8],
        stores: Stores,
        mut method: LineMethod<'_>,
    ) {
        let width = self.width.min(self.columns.extent);
        let pitch = BLOCK_ROWS * self.unit + LINE_GAP_BYTES;
        let mut block = vec![0; pitch * width];
        let reads = matches!(method, LineMethod::Read { .. });
        let mut scratch = vec![0; if reads { GROUP_ROWS_MAX * self.unit * width } else { 0 }];
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
            let mut rows = RunRows::new(&self.run);
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
                        let (offsets, target) = (&offsets[first..end], &mut block[first * self.unit..]);
                        let lines = Lines { source, offsets, unit: self.unit, columns: count, fused: None, ahead };
                        let (together, read, codes) = match &mut method {
                            LineMethod::Straight(fused) => {
                                transpose(level, Lines { fused: *fused, ..lines }, target, pitch);
                                continue;
                            }
                            LineMethod::Read { together, read, codes } => (*together, read, *codes),
                        };
                        let made = count * self.unit;
                        for (index, lines) in
                            scratch.chunks_mut(together * made).enumerate().take(offsets.len().div_ceil(together))
                        {
                            let rows = index * together..offsets.len().min((index + 1) * together);
                            for ahead in &ahead[rows.clone()] {
                                match codes {
                                    None => prefetch(source, *ahead, step),
                                    Some(codes) => codes.prefetch(*ahead, step),
                                }
                            }
                            let offsets = &offsets[rows];
                            read(offsets, self.columns.source, count, &mut lines[..offsets.len() * made]);
                        }
                        let starts: [usize; GROUP_ROWS_MAX] = std::array::from_fn(|index| index * made);
                        let offsets = &starts[..offsets.len()];
                        transpose(level, Lines { source: &scratch, offsets, ahead: &[], ..lines }, target, pitch);
                    }
                    let corner = place.target + column * self.columns.target + row * self.unit;
                    for (index, made) in block.chunks_exact(pitch).take(count).enumerate() {
                        let to = &mut target[corner + index * self.columns.target..][..line];
                        match (
                            stores,
                            made.first_chunk::<LINE_BYTES>(),
                            <&mut [u8; LINE_BYTES]>::try_from(&mut *to).ok(),
                        ) {
                            // By far the most lines have this length, which needs no loop.
                            (Stores::Streamed, Some(made), Some(to)) => stream(made, to),
                            (Stores::Streamed, ..) => stream(&made[..line], to),
                            (Stores::Cached, Some(made), Some(to)) => *to = *made,
                            (Stores::Cached, ..) => to.copy_from_slice(&made[..line]),
                        }
                    }
                    for offset in &mut *offsets {
                        *offset += step;
                    }
                }
            }
        });
    }
}

/// Iterates over the source offsets of the positions of a run.
struct RunRows<'a> {
    axes: &'a [Axis],
    index: SmallVec<[usize; 8]>,
    offset: usize,
}

impl<'a> RunRows<'a> {
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

/// A gather that converts.
struct Convert<'a> {
    converter: Converter<'a>,
    source_bytes: usize,
    target_bytes: usize,
    level: Level,
    /// The single loop that converts, if one is enough.
    direct: Option<Direct>,
    /// The same conversion in registers, if the processor has the instructions.
    fused: Option<FusedKind>,
    collected: [u8; STRETCH * FLOAT_BYTES_MAX],
    converted: [u8; STRETCH * FLOAT_BYTES_MAX],
}

impl<'a> Convert<'a> {
    fn new(program: &'a Program, level: Level) -> Self {
        let converter = Converter::new(program, level);
        let (direct, fused) = (converter.direct(), converter.fused());
        Self {
            source_bytes: converter.source_bytes(),
            converter,
            level,
            direct,
            fused: if level.fuses() { fused } else { None },
            target_bytes: element_bytes(program.target),
            collected: [0; STRETCH * FLOAT_BYTES_MAX],
            converted: [0; STRETCH * FLOAT_BYTES_MAX],
        }
    }

    fn run(&mut self, axes: &[Axis], place: Position, source: &[u8], target: &mut [u8], stores: Stores) {
        let unit = self.target_bytes;
        if let Some(mut plan) = Blocks::plan(axes, self.source_bytes, unit) {
            let (level, together) = (self.level, if self.direct.is_some() { 1 } else { ROWS_AT_ONCE });
            plan.width = plan.width.min(STRETCH / together);
            if let Some((kind, direct)) = self.fused.zip(self.direct)
                && plan.columns.source == self.source_bytes
            {
                let exact = |source: &[u8], target: &mut [u8]| direct.run(level, source, target);
                let method = LineMethod::Straight(Some(Fused { kind, exact: &exact }));
                return plan.run(level, place, source, target, stores, method);
            }
            let mut read = |offsets: &[usize], stride: usize, count: usize, scratch: &mut [u8]| {
                self.lines(source, offsets, stride, count, scratch);
            };
            plan.run(level, place, source, target, stores, LineMethod::Read { together, read: &mut read, codes: None });
            return;
        }
        match axes.split_first() {
            Some((inner, outer)) if inner.target == unit => each(outer, place, &mut |place| {
                let target = &mut target[place.target..place.target + inner.extent * unit];
                self.line(source, place, inner.source, inner.extent, target);
            }),
            Some((inner, outer)) => each(outer, place, &mut |place| self.scatter(*inner, place, source, target)),
            None => self.line(source, place, 0, 1, &mut target[place.target..place.target + unit]),
        }
    }

    /// Converts lines of `count` elements, `stride` source bytes apart, to consecutive lines of `target`.
    fn lines(&mut self, source: &[u8], offsets: &[usize], stride: usize, count: usize, target: &mut [u8]) {
        let (from, to) = (count * self.source_bytes, count * self.target_bytes);
        // No division here: this runs once per 64 elements or so, and a division costs as much as converting them.
        if offsets.len() > ROWS_AT_ONCE || offsets.len() * count > STRETCH || self.direct.is_some() {
            for (index, offset) in offsets.iter().enumerate() {
                let line = &mut target[index * to..][..to];
                match self.direct {
                    Some(direct) if stride == self.source_bytes => {
                        direct.run(self.level, &source[*offset..][..from], line);
                    }
                    Some(_) | None => self.line(source, Position { source: *offset, target: 0 }, stride, count, line),
                }
            }
            return;
        }
        for (index, offset) in offsets.iter().enumerate() {
            copy_line(self.source_bytes, &source[*offset..], stride, &mut self.collected[index * from..][..from]);
        }
        self.converter.stretch(&self.collected[..offsets.len() * from], target);
    }

    /// Converts `count` elements, `stride` source bytes apart, to the contiguous `target`.
    fn line(&mut self, source: &[u8], place: Position, stride: usize, count: usize, target: &mut [u8]) {
        let width = self.source_bytes;
        if stride == width || count == 1 {
            let source = &source[place.source..place.source + count * width];
            self.converter.row(source, target);
            return;
        }
        let mut from = place.source;
        for part in target.chunks_mut(STRETCH * self.target_bytes) {
            let count = part.len() / self.target_bytes;
            let collected = &mut self.collected[..count * width];
            copy_elements(width, &source[from..], stride, collected, width, count);
            self.converter.row(collected, part);
            // The last step may lead past the source; nothing is read there.
            from = (from + count * stride).min(source.len());
        }
    }

    /// Converts one loop whose target elements are apart.
    fn scatter(&mut self, inner: Axis, place: Position, source: &[u8], target: &mut [u8]) {
        let unit = self.target_bytes;
        let mut converted = self.converted;
        for start in (0..inner.extent).step_by(STRETCH) {
            let count = STRETCH.min(inner.extent - start);
            let part = place.step(inner, start);
            self.line(source, part, inner.source, count, &mut converted[..count * unit]);
            copy_elements(unit, &converted, unit, &mut target[part.target..], inner.target, count);
        }
    }
}

/// A gather that decodes. Its source positions are logical elements, not bytes.
struct DecodedGather<'a> {
    values: ValueDecoder<'a>,
}

impl DecodedGather<'_> {
    fn run(&mut self, level: Level, axes: &[Axis], place: Position, target: &mut [u8], stores: Stores) {
        let unit = self.values.target_bytes();
        if let Some(mut plan) = Blocks::plan(axes, 1, unit) {
            plan.width = plan.width.min(stretch::STRETCH);
            let codes = Some(self.values.codes());
            let mut read = |offsets: &[usize], stride: usize, count: usize, scratch: &mut [u8]| {
                let firsts: SmallVec<[u64; GROUP_ROWS_MAX]> = offsets.iter().map(|offset| *offset as u64).collect();
                self.values.lines(&firsts, stride as u64, count, scratch);
            };
            let method = LineMethod::Read { together: ROWS_AT_ONCE, read: &mut read, codes };
            plan.run(level, place, &[], target, stores, method);
            return;
        }
        match axes.split_first() {
            Some((inner, outer)) if inner.target == unit => each(outer, place, &mut |place| {
                let target = &mut target[place.target..place.target + inner.extent * unit];
                self.values.line(place.source as u64, inner.source as u64, target);
            }),
            Some((inner, outer)) => each(outer, place, &mut |place| self.scatter(*inner, place, target)),
            None => self.values.line(place.source as u64, 1, &mut target[place.target..place.target + unit]),
        }
    }

    /// Decodes one loop whose target elements are apart.
    fn scatter(&mut self, inner: Axis, place: Position, target: &mut [u8]) {
        let unit = self.values.target_bytes();
        let mut decoded = [0; STRETCH * FLOAT_BYTES_MAX];
        for start in (0..inner.extent).step_by(STRETCH) {
            let count = STRETCH.min(inner.extent - start);
            let part = place.step(inner, start);
            self.values.line(part.source as u64, inner.source as u64, &mut decoded[..count * unit]);
            copy_elements(unit, &decoded, unit, &mut target[part.target..], inner.target, count);
        }
    }
}
