//! Requests that wait for bytes, so that another thread can answer them when the bytes do not come.
//!
//! The reply of such a request lies here until it is sent. The thread that takes it out sends it. Usually that is the thread
//! with the bytes. If their source gives no answer, the thread that watches requests takes the reply and answers with an error;
//! a thread that comes back late finds no reply and drops its bytes. This costs two uncontended locks a request, and a box for its
//! reply: replies of all kinds lie in one table.

use std::{
    any::Any,
    cell::Cell,
    collections::HashMap,
    fs,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_volume::{Ino, RequestKind};
use parking_lot::Mutex;

/// A reply that can say that the request failed.
pub trait Refuse: Any + Send {
    /// Answers with the number of an error.
    fn refuse(self: Box<Self>, errno: i32);
}

/// A thread that waits for an answer, by the number that it has in this process's namespace; none if it has no number there.
pub type Client = Option<NonZeroU32>;

/// The bit of SIGKILL in a set of signals. The kernel marks every thread of a process with it that any signal ends.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// Whether a thread ends as soon as its system call does.
///
/// The kernel waits for the answer of a request that was passed to a daemon even if its program is killed meanwhile. It reports
/// the signal for some requests only (not for those of `O_DIRECT`), and fuser declines that report. So the thread that watches
/// requests asks the kernel for the signals of the programs that wait.
pub(super) fn is_killed(client: NonZeroU32) -> bool {
    // Without the file nothing is known: the thread has ended, or other users' processes are hidden.
    fs::read_to_string(format!("/proc/{client}/status")).is_ok_and(|status| has_fatal_signal(&status))
}

/// Whether SIGKILL is pending, for the thread or for its process, by the text of `proc_pid_status(5)`.
fn has_fatal_signal(status: &str) -> bool {
    let set = |line: &str| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(set.trim(), 16).ok()
    };
    status.lines().filter_map(set).any(|set| set & KILLED != 0)
}

/// Requests are spread over this many locks; each thread has one of its own, as far as there are that many.
const SHARDS: usize = 32;

thread_local! {
    static SHARD: Cell<Option<usize>> = const { Cell::new(None) };
}

fn own_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    SHARD.get().unwrap_or_else(|| {
        let shard = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
        SHARD.set(Some(shard));
        shard
    })
}

/// A request that was not answered yet.
#[derive(Debug)]
pub(super) struct WaitingRequest<R = Box<dyn Refuse>> {
    pub(super) op: RequestKind,
    pub(super) ino: Ino,
    pub(super) since: Instant,
    pub(super) client: Client,
    /// Whether a thread handles it that stands in for those that take requests.
    pub(super) elsewhere: bool,
    pub(super) reply: R,
}

#[derive(Debug)]
#[repr(align(64))]
struct Shard<R> {
    waiting: HashMap<u64, WaitingRequest<R>>,
    next_number: u64,
}

/// The requests that were not answered yet.
#[derive(Debug)]
pub struct Requests<R = Box<dyn Refuse>> {
    shards: Box<[Mutex<Shard<R>>]>,
}

/// A request's place among them.
#[derive(Debug)]
pub(super) struct Ticket<R = Box<dyn Refuse>> {
    requests: Arc<Requests<R>>,
    shard: usize,
    number: u64,
    taken: bool,
}

impl<R> Default for Requests<R> {
    fn default() -> Self {
        let shard = || Mutex::new(Shard { waiting: HashMap::new(), next_number: 0 });
        Self { shards: (0..SHARDS).map(|_| shard()).collect() }
    }
}

impl<R> Requests<R> {
    /// Keeps the reply of a request of `client` for `ino` that arrived at `since`.
    pub(super) fn add(
        self: &Arc<Self>,
        (op, ino): (RequestKind, Ino),
        since: Instant,
        client: Client,
        reply: R,
    ) -> Ticket<R> {
        let shard_index = own_shard();
        let mut shard = self.shards[shard_index].lock();
        shard.next_number += 1;
        let number = shard.next_number;
        shard.waiting.insert(number, WaitingRequest { op, ino, since, client, elsewhere: false, reply });
        drop(shard);
        Ticket { requests: Arc::clone(self), shard: shard_index, number, taken: false }
    }

    /// What requests that have waited for `limit` have, each once.
    pub(super) fn of_late<T: Ord>(&self, limit: Duration, of: impl Fn(&WaitingRequest<R>) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            found.extend(shard.waiting.values().filter(|request| request.since.elapsed() >= limit).filter_map(&of));
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Takes these requests out: they waited for too long, or their client ends.
    pub(super) fn take_out(&self, which: impl Fn(&WaitingRequest<R>) -> bool) -> Vec<WaitingRequest<R>> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            taken.extend(shard.lock().waiting.extract_if(|_, request| which(request)).map(|(_, request)| request));
        }
        taken
    }

    /// Whether any request waits.
    pub(super) fn any(&self) -> bool {
        self.shards.iter().any(|shard| !shard.lock().waiting.is_empty())
    }
}

impl<R> Ticket<R> {
    /// The reply, to be sent; none if it was taken before.
    pub(super) fn take(&mut self) -> Option<R> {
        let request = self.requests.shards[self.shard].lock().waiting.remove(&self.number)?;
        self.taken = true;
        Some(request.reply)
    }

    /// Notes that a thread handles it that stands in for those that take requests. Whether it still waits.
    pub(super) fn note_elsewhere(&self) -> bool {
        let mut shard = self.requests.shards[self.shard].lock();
        shard.waiting.get_mut(&self.number).map(|request| request.elsewhere = true).is_some()
    }

    /// Whether another thread answered it.
    pub(super) fn expired(&self) -> bool {
        !self.taken && !self.requests.shards[self.shard].lock().waiting.contains_key(&self.number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_reply_is_taken_once_by_whoever_comes_first() {
        let requests = Arc::new(Requests::default());
        let now = Instant::now();
        let mut first = requests.add((RequestKind::Read, Ino(1)), now, None, "first");
        let mut second = requests.add((RequestKind::Read, Ino(2)), now, None, "second");
        let late = |limit| requests.of_late(limit, |request| Some(request.ino));
        assert_eq!(late(Duration::from_hours(1)), []);
        assert_eq!(late(Duration::ZERO), [Ino(1), Ino(2)]);
        assert!(second.note_elsewhere() && requests.any());
        let expired = requests.take_out(|request| request.ino == Ino(2));
        assert_eq!(expired.iter().map(|found| (found.reply, found.elsewhere)).collect::<Vec<_>>(), [("second", true)]);
        assert!(second.expired() && second.take().is_none() && second.expired());
        // Another request for the same file waits now.
        let mut third = requests.add((RequestKind::Read, Ino(2)), now, None, "third");
        assert!(second.take().is_none());
        assert_eq!((first.take(), first.take(), first.expired()), (Some("first"), None, false));
        assert_eq!((third.take(), third.expired()), (Some("third"), false));
        assert!(late(Duration::ZERO).is_empty() && !requests.any() && !third.note_elsewhere());
    }

    #[test]
    fn requests_of_a_client_are_taken_out_together() {
        let requests = Arc::new(Requests::default());
        let client = NonZeroU32::new;
        let now = Instant::now();
        let mut tickets: Vec<_> = [(1, client(7)), (2, client(7)), (2, client(8)), (2, None)]
            .into_iter()
            .map(|(ino, client)| requests.add((RequestKind::Read, Ino(ino)), now, client, ino))
            .collect();
        let late = |limit| requests.of_late(limit, |request| request.client);
        assert_eq!(late(Duration::from_hours(1)), []);
        assert_eq!(late(Duration::ZERO), [7, 8].map(|number| client(number).unwrap()));
        assert_eq!(requests.take_out(|_| false).len(), 0);
        let abandoned = requests.take_out(|request| request.client == client(7));
        assert_eq!(abandoned.iter().map(|found| found.reply).collect::<BTreeSet<_>>(), [1, 2].into());
        let answered: Vec<_> = tickets.iter_mut().map(Ticket::take).collect();
        assert_eq!(answered, [None, None, Some(2), Some(2)]);
    }

    #[test]
    fn memory_is_used_again() {
        let requests = Arc::new(Requests::default());
        for round in 0..100 {
            let mut tickets: Vec<_> =
                (0..3).map(|_| requests.add((RequestKind::Read, Ino(round)), Instant::now(), None, round)).collect();
            assert!(tickets.iter_mut().all(|ticket| ticket.take() == Some(round)));
        }
        assert!((3..16).contains(&requests.shards[own_shard()].lock().waiting.capacity()));
    }

    #[test]
    fn a_pending_sigkill_is_seen_and_no_other_signal() {
        let status = |own: &str, shared: &str| {
            format!("Name:\tSigPnd: 100\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0000000000000100\n")
        };
        for (own, shared, killed) in [
            ("0000000000000000", "0000000000000000", false),
            ("0000000000000100", "0000000000000000", true),
            ("0000000000000000", "0000000000000100", true),
            ("0000000000004002", "0000000000010000", false),
            ("x", "", false),
        ] {
            assert_eq!(has_fatal_signal(&status(own, shared)), killed, "{own} {shared}");
        }
        assert!(!is_killed(NonZeroU32::new(std::process::id()).unwrap()) && !is_killed(NonZeroU32::MAX));
    }
}
