//! Source pages mapped before anybody reads them.
//!
//! A page of a file that the page cache has still has to be found and mapped when it is touched first: some microseconds for
//! each 64 KiB, up to half of the time that a transposed shard takes, whose rows lie in many pages. So this is done while
//! nobody waits, for the sources of all views that are made rather than copied, as far as the source has room.

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    sync::{Arc, Weak},
};

use super::{Engine, engine::is_made};
use crate::{
    source::{ByteSpan, FileId},
    tensor::{TensorId, View},
};

/// Bytes that are looked after in one step: about a millisecond's work.
const STEP_BYTES: u64 = 16 << 20;

/// Maps the source pages of views, a step at a time.
pub struct MapsAhead {
    engine: Weak<Engine>,
    views: Box<dyn Iterator<Item = View> + Send>,
    seen: HashSet<TensorId>,
    /// What is left of the last view.
    left: VecDeque<(FileId, ByteSpan)>,
}

impl fmt::Debug for MapsAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapsAhead").field("seen", &self.seen.len()).field("left", &self.left).finish_non_exhaustive()
    }
}

impl MapsAhead {
    /// Of `views`, in this order.
    pub fn new(engine: &Arc<Engine>, views: impl Iterator<Item = View> + Send + 'static) -> Self {
        let engine = Arc::downgrade(engine);
        Self { engine, views: Box::new(views), seen: HashSet::new(), left: VecDeque::new() }
    }

    /// Maps some more, and says whether anything may be left to do.
    pub fn step(&mut self) -> bool {
        let Some(engine) = self.engine.upgrade() else { return false };
        let Some((file, span)) = self.left.pop_front() else {
            let Some(view) = self.views.next() else { return false };
            // A view that cannot be lowered is refused to who opens it.
            if view.lower().is_ok_and(|tiling| is_made(&tiling)) {
                view.for_each_source(&mut |tensor| {
                    if self.seen.insert(tensor.id) {
                        let info = engine.checkpoint().tensor(tensor.id);
                        self.left.push_back((info.file, info.span));
                    }
                });
            }
            return true;
        };
        let bytes = span.len().min(STEP_BYTES);
        if let Some(rest) = ByteSpan::new(span.start() + bytes, span.end()).filter(|rest| !rest.is_empty()) {
            self.left.push_front((file, rest));
        }
        ByteSpan::of_len(span.start(), bytes).is_some_and(|step| engine.source().map_ahead(file, step))
    }
}
