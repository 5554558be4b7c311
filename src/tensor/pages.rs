//! Pages that strided reads touch.
//!
//! Disks, file servers and the page cache deliver whole pages. A view that takes some columns of a matrix uses only a part of each
//! page that it touches. [`ByteRuns`] are the source bytes of a piece: equal runs of bytes at regular distances. [`reads`] counts their
//! bytes and their pages, exactly but not one by one: the position of a run in its pages repeats after a few turns of a loop.

use std::ops::{AddAssign, Range};

use smallvec::SmallVec;

use super::part::gcd;

/// Equal runs of bytes of one tensor, at regular distances.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRuns {
    /// First byte of the first run, from the tensor's first byte.
    start: u64,
    /// Extent and stride in bytes of each loop over the runs, by falling stride.
    loops: SmallVec<[(u64, u64); 3]>,
    run_bytes: u64,
}

/// The amount read from a source: needed bytes, and bytes of the pages that hold them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Bytes that are needed, each once.
    pub needed_bytes: u64,
    /// Bytes of the pages with needed bytes.
    pub paged_bytes: u64,
}

impl Reads {
    /// Bytes of pages that are not needed.
    pub const fn excess_bytes(self) -> u64 {
        self.paged_bytes - self.needed_bytes
    }

    /// `count` times these bytes.
    #[must_use]
    pub const fn times(self, count: u64) -> Self {
        Self { needed_bytes: self.needed_bytes * count, paged_bytes: self.paged_bytes * count }
    }
}

impl AddAssign for Reads {
    fn add_assign(&mut self, other: Self) {
        self.needed_bytes += other.needed_bytes;
        self.paged_bytes += other.paged_bytes;
    }
}

impl ByteRuns {
    /// Runs of `run_bytes`, the first at byte `start`, with the extent and stride of each loop over them, by falling stride.
    pub(super) fn new(start: u64, loops: SmallVec<[(u64, u64); 3]>, run_bytes: u64) -> Self {
        Self { start, loops, run_bytes }
    }

    /// First byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes of one run.
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Extent and stride in bytes of each loop over the runs, by falling stride.
    pub fn loops(&self) -> &[(u64, u64)] {
        &self.loops
    }

    /// Bytes in all runs.
    pub fn bytes(&self) -> u64 {
        self.loops.iter().map(|(extent, _)| extent).product::<u64>() * self.run_bytes
    }

    /// Emits start and length, in bytes, of spans that hold all runs. The spans contain no gap of `gap` bytes or more.
    pub fn for_each_span(&self, gap: u64, emit: &mut dyn FnMut(u64, u64)) {
        let Some((extent, stride)) = self.loops.first().copied() else { return emit(self.start, self.run_bytes) };
        let turn = self.turn(0);
        if stride < turn.end() - turn.start + gap {
            return emit(self.start, self.end() - self.start);
        }
        (0..extent).for_each(|index| self.turn(index).for_each_span(gap, emit));
    }

    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.start + self.loops.iter().map(|(extent, stride)| (extent - 1) * stride).sum::<u64>() + self.run_bytes
    }

    /// One turn of the outermost loop.
    fn turn(&self, index: u64) -> Self {
        let stride = self.loops.first().map_or(0, |(_, stride)| *stride);
        Self {
            start: self.start + index * stride,
            loops: self.loops.iter().skip(1).copied().collect(),
            run_bytes: self.run_bytes,
        }
    }
}

/// The cost of reading all of `runs` of a tensor that lies at `place` in its file. In pages that hold other tensors too, only the
/// tensor's own part counts. So a complete read of a tensor costs just its bytes.
pub fn reads(mut runs: Vec<ByteRuns>, place: &Range<u64>, page_bytes: u64) -> Reads {
    runs.sort_unstable();
    runs.dedup();
    let (Some(first), Some(end)) = (runs.first(), runs.iter().map(ByteRuns::end).max()) else {
        return Reads::default();
    };
    let touched = touched(&runs, Pages { at: place.start, page_bytes });
    let page = |byte: u64| byte / page_bytes;
    let mut paged_bytes = touched.pages * page_bytes;
    if page(place.start + first.start) == page(place.start) {
        paged_bytes -= place.start % page_bytes;
    }
    if page(place.start + end - 1) == page(place.end - 1) {
        paged_bytes -= place.end.next_multiple_of(page_bytes) - place.end;
    }
    Reads { needed_bytes: touched.bytes, paged_bytes }
}

/// Bytes and pages of a set of runs.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    bytes: u64,
    pages: u64,
}

/// The position of runs in pages: byte 0 of the runs is byte `at` of the pages.
#[derive(Clone, Copy, Debug)]
struct Pages {
    at: u64,
    page_bytes: u64,
}

impl Pages {
    fn of(self, byte: u64) -> u64 {
        (self.at + byte) / self.page_bytes
    }

    fn moved(self, by: u64) -> Self {
        Self { at: self.at + by, ..self }
    }
}

/// Counts sorted `runs`. Runs that are apart from all others are counted separately.
fn touched(runs: &[ByteRuns], pages: Pages) -> Touched {
    let mut total = Touched::default();
    let mut last_page = None;
    let mut rest = runs;
    while let Some(first) = rest.first() {
        let (mut end, mut count) = (first.end(), 1);
        while let Some(run) = rest.get(count).filter(|run| run.start < end) {
            (end, count) = (end.max(run.end()), count + 1);
        }
        let (group, others) = rest.split_at(count);
        let part = interleaved(group, end, pages);
        let shared = last_page == Some(pages.of(first.start));
        total.bytes += part.bytes;
        total.pages += part.pages - u64::from(shared);
        last_page = Some(pages.of(end - 1));
        rest = others;
    }
    total
}

/// Counts runs that overlap or interleave; `end` is the end of the last.
fn interleaved(runs: &[ByteRuns], end: u64, pages: Pages) -> Touched {
    let start = runs[0].start;
    let Some((extent, stride)) =
        runs.iter().filter_map(|run| run.loops.first().copied()).max_by_key(|(_, stride)| *stride)
    else {
        return Touched { bytes: end - start, pages: pages.of(end - 1) - pages.of(start) + 1 };
    };
    if runs.iter().all(|run| run.loops.first() == Some(&(extent, stride))) {
        let turn: SmallVec<[ByteRuns; 2]> = runs.iter().map(|run| run.turn(0)).collect();
        let turn_end = turn.iter().map(ByteRuns::end).max().unwrap_or(end);
        if turn_end - start <= stride {
            return repeated(&turn, turn_end, (extent, stride), pages);
        }
    }
    let mut apart = Vec::new();
    for run in runs {
        match run.loops.first() {
            Some((turns, step)) if *step == stride => apart.extend((0..*turns).map(|index| run.turn(index))),
            _ => apart.push(run.clone()),
        }
    }
    apart.sort_unstable();
    apart.dedup();
    touched(&apart, pages)
}

/// Counts the runs of one turn, which end at `end`, repeated without overlap.
fn repeated(turn: &[ByteRuns], end: u64, (extent, stride): (u64, u64), pages: Pages) -> Touched {
    let first = touched(turn, pages);
    // The count of a later turn depends only on its position in a page, so that it repeats.
    let adds = |index: u64| {
        let shared = pages.of(index * stride + turn[0].start) == pages.of((index - 1) * stride + end - 1);
        touched(turn, pages.moved(index * stride)).pages - u64::from(shared)
    };
    let period = pages.page_bytes / gcd(stride, pages.page_bytes);
    let (cycles, rest) = ((extent - 1) / period, (extent - 1) % period);
    let later = (1..=period.min(extent - 1)).map(|index| adds(index) * (cycles + u64::from(index <= rest)));
    Touched { bytes: first.bytes * extent, pages: first.pages + later.sum::<u64>() }
}
