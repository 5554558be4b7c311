//! Who opens a file of many tensors: somebody who will read it, or somebody who goes through a directory for headers.
//!
//! Nothing in an open says which, but what went before it does. A loader opens the file it was told to load. A reader of
//! distributed checkpoints first lists the directory, then opens each file for its header, and then opens those again that
//! hold what it wants. To make a file whole for a look at its header would fetch what nobody reads; to be wrong either way
//! costs time and nothing else.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::Ino;

/// For how long a directory is thought to be gone through after the last sign of it.
const LATELY: Duration = Duration::from_secs(5);

/// For how long the kernel is thought to keep what was read through its page cache.
const KEPT: Duration = Duration::from_mins(1);

/// What was done with a file, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// No more than its header can have been read.
    Looked,
    /// The tensors in it.
    Read,
    /// It was made whole and open long enough for either.
    Unknown,
}

/// What was seen of one directory.
#[derive(Debug)]
struct Look {
    /// The last sign that it is gone through.
    seen: Instant,
    /// Files opened since, in order.
    opened: Vec<Ino>,
    /// Where among them the one is that was opened again last.
    reached: Option<usize>,
}

impl Look {
    fn new(seen: Instant) -> Self {
        Self { seen, opened: Vec::new(), reached: None }
    }
}

#[derive(Debug, Default)]
struct Seen {
    /// Directories that may be gone through now.
    looks: HashMap<Ino, Look>,
    /// How many times each file is open. Loaders open a file twice at once, to map it and to read its header.
    open: HashMap<Ino, usize>,
    /// Files whose tensors were read through the page cache, and when they were closed. To make those whole would fetch them
    /// a second time.
    paged: HashMap<Ino, Instant>,
}

/// What was seen of the directories that hold files of many tensors.
#[derive(Debug, Default)]
pub(super) struct Looks {
    seen: Mutex<Seen>,
}

impl Looks {
    /// Notes that a directory is listed.
    pub(super) fn listed(&self, directory: Ino, now: Instant) {
        self.seen().looks.insert(directory, Look::new(now));
    }

    /// Notes that a file is opened, and says whether it will be read: unless its directory is gone through, or if it is opened
    /// again meanwhile.
    pub(super) fn opened(&self, directory: Ino, file: Ino, now: Instant) -> bool {
        let mut seen = self.seen();
        let handles = seen.open.entry(file).or_default();
        *handles += 1;
        if *handles > 1 {
            return false;
        }
        if seen.paged.get(&file).is_some_and(|closed| now.saturating_duration_since(*closed) < KEPT) {
            return false;
        }
        let Some(look) = seen.looks.get_mut(&directory) else { return true };
        if now.saturating_duration_since(look.seen) > LATELY {
            seen.looks.remove(&directory);
            return true;
        }
        match look.opened.iter().position(|opened| *opened == file) {
            None => look.opened.push(file),
            // Whoever it is knows the headers now, and what it wants it takes in order.
            Some(position) if look.reached.is_none_or(|reached| position > reached) => {
                look.reached = Some(position);
                return true;
            }
            // Back to the beginning: it is gone through anew.
            Some(_) => {
                look.opened = vec![file];
                look.reached = None;
            }
        }
        false
    }

    /// Notes that a file is closed.
    pub(super) fn closed(&self, directory: Ino, file: Ino, used: Use, now: Instant) {
        let mut seen = self.seen();
        // One whose opening was not asked about is read in some other way.
        let Some(handles) = seen.open.get_mut(&file) else { return };
        *handles -= 1;
        if *handles > 0 {
            return;
        }
        seen.open.remove(&file);
        match used {
            Use::Looked => {
                let look = seen.looks.entry(directory).or_insert_with(|| Look::new(now));
                look.seen = now;
                if !look.opened.contains(&file) {
                    look.opened.push(file);
                }
            }
            Use::Read => {
                seen.looks.remove(&directory);
                seen.paged.insert(file, now);
            }
            Use::Unknown => {}
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: Ino = Ino(9);
    const FILES: [Ino; 4] = [Ino(10), Ino(11), Ino(12), Ino(13)];

    #[test]
    fn a_file_opened_by_its_name_is_read() {
        let (looks, now) = (Looks::default(), Instant::now());
        for file in FILES {
            assert!(looks.opened(DIRECTORY, file, now), "ranks open their own at the same time");
        }
        for file in FILES {
            looks.closed(DIRECTORY, file, Use::Unknown, now);
            assert!(looks.opened(DIRECTORY, file, now), "one after another");
        }
    }

    /// Opens files in turn, closing each as `used` says, and says which of them will be read.
    fn go_through(looks: &Looks, files: &[Ino], used: Use, now: Instant) -> Vec<bool> {
        let visit = |file: &Ino| {
            let read = looks.opened(DIRECTORY, *file, now);
            assert!(!looks.opened(DIRECTORY, *file, now), "open a second time while it is open");
            looks.closed(DIRECTORY, *file, used, now);
            looks.closed(DIRECTORY, *file, used, now);
            read
        };
        files.iter().map(visit).collect()
    }

    #[test]
    fn who_lists_a_directory_looks_and_who_comes_back_reads() {
        let (looks, now) = (Looks::default(), Instant::now());
        for wanted in [&FILES[2..3], &FILES[..], &FILES[..1], &FILES[1..3]] {
            for listed in [true, false] {
                if listed {
                    looks.listed(DIRECTORY, now);
                }
                assert_eq!(go_through(&looks, &FILES, Use::Looked, now), [false; 4], "{wanted:?}, {listed}");
                assert_eq!(go_through(&looks, wanted, Use::Unknown, now), vec![true; wanted.len()], "{wanted:?}");
            }
        }
        assert!(looks.opened(Ino(99), Ino(100), now), "another directory");
        assert!(looks.opened(DIRECTORY, FILES[1], now + LATELY * 2), "that was long ago");
    }

    #[test]
    fn who_lists_a_directory_and_reads_it_is_found_out_by_the_first_file() {
        let (looks, now) = (Looks::default(), Instant::now());
        looks.listed(DIRECTORY, now);
        for (index, file) in FILES.into_iter().enumerate() {
            assert_eq!(looks.opened(DIRECTORY, file, now), index > 0);
            looks.closed(DIRECTORY, file, if index > 0 { Use::Unknown } else { Use::Read }, now);
        }
        for (index, file) in FILES.into_iter().enumerate() {
            assert_eq!(looks.opened(DIRECTORY, file, now), index > 0, "the first one is in the page cache");
            looks.closed(DIRECTORY, file, Use::Unknown, now);
        }
        assert!(looks.opened(DIRECTORY, FILES[0], now + KEPT), "and may be gone from there");
    }

    #[test]
    fn who_looks_without_a_listing_is_found_out_by_the_first_file() {
        let (looks, now) = (Looks::default(), Instant::now());
        assert_eq!(go_through(&looks, &FILES, Use::Looked, now), [true, false, false, false]);
        assert_eq!(go_through(&looks, &FILES[2..3], Use::Unknown, now), [true]);
        assert_eq!(go_through(&looks, &FILES, Use::Looked, now), [false; 4]);
    }
}
