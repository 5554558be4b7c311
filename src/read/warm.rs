//! Warm-up: work that ckfs does before the first read, so that this read is faster. For a measurement the environment variable
//! `CKFS_WARM` lists the parts that stay on: `CKFS_WARM=zero,prefault`, or `none`.
//!
//! | word | what it does | to delete it |
//! | --- | --- | --- |
//! | `zero` | keeps pre-zeroed buffers in memory for files that will be materialized | `volume/materialize/prezeroed.rs`; `Memory::{prezeroed, pause}` and their uses in `volume/materialize/`; `Engine::{reserve_spare, prezeroed_bytes}`, `TileCache::{reserve_spare, spare, spare_bytes}`; the rows `prezeroed*` of `volume/stats.rs`, `Counters::prezeroed_files`, `cli/status.rs` |
//! | `prefault` | maps cached source pages before they are read | `read/prefault.rs`; `Maps::prefault`; `Engine::keep_maps` and its call in `volume/opening.rs` |
//! | `threads` | lets each worker run small jobs when it starts | `tensor::warm_up` and its call in `read/worker.rs` |
//! | `wake` | wakes helping workers on another processor | `IdleWorker::wake_elsewhere` and `Workers::submit_beside` in `read/worker.rs`: `submit` takes its place |
//!
//! `zero` and `prefault` use the same thread of `volume/materialize/prezeroed.rs`; without `zero` it only prefaults. As long as one
//! of the two exists the thread stays. If both are deleted, delete also the thread, `Materializer::expect`, and `tell_sizes` in
//! `volume/opening.rs`.

use std::sync::LazyLock;

/// Which parts of the warm-up are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Warm {
    /// Pre-zeroed buffers.
    pub zero: bool,
    /// Prefault of source pages.
    pub prefault: bool,
    /// Workers warmed up when they start.
    pub threads: bool,
    /// Helping workers woken on another processor.
    pub wake: bool,
}

static CHOSEN: LazyLock<Warm> = LazyLock::new(|| {
    let words = std::env::var("CKFS_WARM").ok();
    let warm = Warm::of(words.as_deref());
    if words.is_some() {
        tracing::info!("CKFS_WARM: {warm:?}");
    }
    warm
});

impl Warm {
    /// The parts that the environment of this process selects.
    pub fn chosen() -> Self {
        *CHOSEN
    }

    /// The parts that a list names; without a list all of them.
    fn of(words: Option<&str>) -> Self {
        let has = |word| words.is_none_or(|words| words.split(',').any(|found| found == word));
        Self { zero: has("zero"), prefault: has("prefault"), threads: has("threads"), wake: has("wake") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_switches_off_all_other_parts() {
        let all = Warm { zero: true, prefault: true, threads: true, wake: true };
        let nothing = Warm { zero: false, prefault: false, threads: false, wake: false };
        assert_eq!(Warm::of(None), all);
        assert_eq!(Warm::of(Some("zero,prefault,threads,wake")), all);
        assert_eq!((Warm::of(Some("none")), Warm::of(Some(""))), (nothing, nothing));
        assert_eq!(Warm::of(Some("wake,zero")), Warm { wake: true, zero: true, ..nothing });
    }
}
