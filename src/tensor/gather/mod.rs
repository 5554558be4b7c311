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

mod axes;
mod blocks;
mod convert;
mod job;

use smallvec::SmallVec;

pub(super) use self::job::normalize;
pub use self::job::{Gather, Loop, Loops, Stores};
use self::{
    axes::{Axes, Position, bytes, canonical, check_bounds, copy_line, each},
    blocks::{Blocks, LineMethod},
    convert::{Convert, decode},
};
use super::{
    Decode, Load, Window,
    block_decode::ValueDecoder,
    kernel::{Level, row::copy_elements},
    transpose::{fence, stream_run},
};

/// Bytes of the widest run that is transposed as if it were one element.
const UNIT_BYTES_MAX: usize = 16;

/// Runs `job`, with the given kind of stores. The written bytes may then be passed to other threads in any way.
///
/// Each of `windows` holds bytes of one operand's tensor, in the order of [`super::Value::for_each_operand`]. A window may be a
/// fetched part or a whole mapped tensor; a plain copy or conversion has one window. Target bytes outside of all loop
/// positions stay unchanged.
///
/// # Panics
/// If the loops leave a window or `target`, or the element widths contradict the decoder. Both are broken invariants of
/// the tiling, which is checked before any read.
pub fn gather(stores: Stores, job: &Gather<'_>, windows: &[Window<'_>], target: &mut [u8]) {
    gather_at(Level::detected(), job, windows, target, stores);
    if stores == Stores::Streamed {
        fence();
    }
}

fn gather_at(level: Level, job: &Gather<'_>, windows: &[Window<'_>], target: &mut [u8], stores: Stores) {
    let target_bytes = bytes(job.target_bytes, 1);
    if let Decode::Program(program) = job.decode {
        assert_eq!(program.target.element_bytes(), Some(job.target_bytes), "element width of {program:?}");
        if let Load::Value(value) = &program.load {
            // Logical elements take the place of source bytes.
            let axes = canonical(job.loops, 1, target_bytes);
            let place =
                Position { source: bytes(job.source_offset, 1), target: bytes(job.target_offset, target_bytes) };
            check_bounds("target", place.target, &axes, |axis| axis.target, target_bytes, target.len());
            let mut values = ValueDecoder::new(program, value, level, windows);
            return decode(&mut values, level, &axes, place, target, stores);
        }
    }
    let [Window { bytes: source, start }] = *windows else { panic!("{} windows of one tensor", windows.len()) };
    let Some(source_bytes) = job.decode.source_bytes(job.target_bytes) else {
        panic!("{:?} reads parts of bytes", job.decode);
    };
    let source_bytes = bytes(source_bytes, 1);
    let Some(skip) = bytes(job.source_offset, source_bytes).checked_sub(bytes(start, 1)) else {
        panic!("source element {} of {source_bytes} bytes lies before the window at byte {start}", job.source_offset);
    };
    let axes = canonical(job.loops, source_bytes, target_bytes);
    let place = Position { source: skip, target: bytes(job.target_offset, target_bytes) };
    check_bounds("source", place.source, &axes, |axis| axis.source, source_bytes, source.len());
    check_bounds("target", place.target, &axes, |axis| axis.target, target_bytes, target.len());
    match job.decode {
        Decode::Copy => copy(level, axes, source_bytes, place, source, target, stores),
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
    check_bounds("target", start, &nest, |axis| axis.target, unit, target.len());
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
            let (from, to) = (&source[place.source..][..unit], &mut target[place.target..][..unit]);
            match stores {
                Stores::Streamed => stream_run(from, to),
                Stores::Cached => to.copy_from_slice(from),
            }
        }),
    }
}
