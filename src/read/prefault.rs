//! Prefaults source pages: maps them before a reader needs them.
//!
//! The kernel must find and map a cached page of a file when a thread touches it first. This takes some microseconds for each
//! 64 KiB: up to half of the time of a transposed shard, whose rows lie in many pages. So it is done while no reader waits, for the
//! sources of all views that are computed and not copied, as far as the source has room.

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    sync::{Arc, Weak},
};

use super::{Engine, open_file::is_made};
use crate::{
    source::{ByteSpan, FileId},
    tensor::{TensorId, View},
};

/// Bytes mapped in one step, which takes about a millisecond.
const STEP_BYTES: u64 = 16 << 20;
/// Smaller views are skipped: they are read fast, and there may be very many of them.
const VIEW_BYTES_MIN: u64 = 1 << 20;

/// Maps the source pages of views, step by step.
#[derive(Debug)]
pub struct Prefault {
    engine: Weak<Engine>,
    sources: PrefaultSources,
}

/// The tensors that large views are made from, each once, in parts.
struct PrefaultSources {
    views: Box<dyn Iterator<Item = View> + Send>,
    seen: HashSet<TensorId>,
    /// The parts of the last view that are not mapped yet.
    left: VecDeque<(FileId, ByteSpan)>,
}

/// The result of one step.
#[derive(Debug, PartialEq, Eq)]
enum StepOutcome {
    Part(FileId, ByteSpan),
    /// A view was examined. Its parts come next, if it has any.
    View,
    Nothing,
}

impl fmt::Debug for PrefaultSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefaultSources")
            .field("seen", &self.seen.len())
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl Prefault {
    /// A prefault of the sources of `views`, in this order.
    pub fn new(engine: &Arc<Engine>, views: impl Iterator<Item = View> + Send + 'static) -> Self {
        Self { engine: Arc::downgrade(engine), sources: PrefaultSources::new(views) }
    }

    /// Maps the next part. Returns whether more may be left.
    pub fn step(&mut self) -> bool {
        let Some(engine) = self.engine.upgrade() else { return false };
        let place = |tensor| {
            let info = engine.checkpoint().tensor(tensor);
            (info.file(), info.span())
        };
        match self.sources.next(place) {
            StepOutcome::Part(file, span) => engine.source().maps().is_some_and(|maps| maps.prefault(file, span)),
            StepOutcome::View => true,
            StepOutcome::Nothing => false,
        }
    }
}

impl PrefaultSources {
    fn new(views: impl Iterator<Item = View> + Send + 'static) -> Self {
        Self { views: Box::new(views), seen: HashSet::new(), left: VecDeque::new() }
    }

    fn next(&mut self, place: impl Fn(TensorId) -> (FileId, ByteSpan)) -> StepOutcome {
        let Some((file, span)) = self.left.pop_front() else {
            let Some(view) = self.views.next() else { return StepOutcome::Nothing };
            let large = view.bytes().is_some_and(|bytes| bytes >= VIEW_BYTES_MIN);
            // A view that cannot be lowered is refused when its file is opened.
            if large && view.as_source().is_none() && view.lower().is_ok_and(|tiling| is_made(&tiling)) {
                view.for_each_stored(&mut |tensor| {
                    if self.seen.insert(tensor) {
                        self.left.push_back(place(tensor));
                    }
                });
            }
            return StepOutcome::View;
        };
        let middle = span.start() + span.len().min(STEP_BYTES);
        let (Some(part), Some(rest)) = (ByteSpan::new(span.start(), middle), ByteSpan::new(middle, span.end())) else {
            return StepOutcome::View;
        };
        if !rest.is_empty() {
            self.left.push_front((file, rest));
        }
        StepOutcome::Part(file, part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Shape, SourceTensor};

    const MIB: u64 = 1 << 20;

    #[test]
    fn sources_of_large_views_are_found_once_and_in_parts() -> Result<(), Box<dyn std::error::Error>> {
        let source = |id, rows: u64| -> Result<View, Box<dyn std::error::Error>> {
            let shape = Shape::try_new(&[rows, 1024])?;
            Ok(View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape }))
        };
        let views = [
            source(0, 4096)?,                                       // copied unchanged
            View::stack(0, &[source(0, 4096)?, source(1, 4096)?])?, // copied in runs
            source(2, 511)?.reverse_axes(),                         // computed, but small
            View::stack(1, &[source(3, 512)?.reverse_axes(), source(4, 512)?.reverse_axes()])?,
            source(4, 512)?.cast(DType::F32)?, // seen before
            source(5, 8192 + 1)?.cast(DType::F32)?,
        ];
        // Tensor `id` begins at byte `id` of file `id`.
        let lengths = [0, 0, 0, MIB, MIB, (8192 + 1) * 2048];
        let place = |tensor: TensorId| {
            let start = u64::from(tensor.0);
            let len = lengths.get(tensor.0 as usize).copied().unwrap_or(0);
            (FileId(tensor.0), ByteSpan::of_len(start, len).expect("short"))
        };
        let mut sources = PrefaultSources::new(views.into_iter());
        let mut parts = Vec::new();
        let mut passed = 0;
        loop {
            match sources.next(place) {
                StepOutcome::Part(file, span) => parts.push((file.0, span.start(), span.end())),
                StepOutcome::View => passed += 1,
                StepOutcome::Nothing => break,
            }
        }
        assert_eq!(passed, 6);
        assert_eq!(
            parts,
            [(3, 3, MIB + 3), (4, 4, MIB + 4), (5, 5, 5 + STEP_BYTES), (5, 5 + STEP_BYTES, 5 + STEP_BYTES + 2048)]
        );
        assert_eq!(sources.next(place), StepOutcome::Nothing);
        Ok(())
    }
}
