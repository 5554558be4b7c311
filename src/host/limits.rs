#![allow(unsafe_code)]
//! The limits that the system sets to this process.

use std::{
    fs, io,
    sync::mpsc,
    thread::{self, JoinHandle},
};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// Limits that can keep a mount from starting: name, unit of a shell's `ulimit`, its words, and the value below which the limit
/// is suspected, which is less than usual systems have.
const ROWS: [(Resource, &str, u64, &str, u64); 5] = [
    (Resource::RLIMIT_AS, "address space", 1 << 10, " KiB (ulimit -v)", 8 << 30),
    (Resource::RLIMIT_DATA, "data", 1 << 10, " KiB (ulimit -d)", 8 << 30),
    (Resource::RLIMIT_NOFILE, "open files", 1, " (ulimit -n)", 1024),
    (Resource::RLIMIT_NPROC, "processes and threads of the user", 1, " (ulimit -u)", 1024),
    (Resource::RLIMIT_STACK, "stack", 1 << 10, " KiB (ulimit -s)", 1 << 20),
];

/// Whether this process has the capability to administer the system, `CAP_SYS_ADMIN`; `None` without `/proc`.
pub fn may_administer() -> Option<bool> {
    const CAP_SYS_ADMIN: u32 = 21;
    capabilities().map(|set| set >> CAP_SYS_ADMIN & 1 == 1)
}

/// The effective capabilities of this process, a bit for each; `None` if `/proc` does not tell.
pub fn capabilities() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
}

/// Bytes that the stack of the main thread may take; `None` if there is no limit or it is not known.
pub fn stack_bytes() -> Option<u64> {
    let (soft, _) = getrlimit(Resource::RLIMIT_STACK).ok()?;
    (soft != RLIM_INFINITY).then_some(soft)
}

/// Sets glibc's allocator for a daemon of many threads with large buffers.
///
/// * An allocation of 4 MiB and more is a map of its own. By default glibc raises this bound when a large buffer is
///   freed; the next one may then lie in used memory, all of which is cleared first. The buffers of 16 MiB in which the kernel
///   leaves requests, of which a few KiB are used, then take 16 MiB each.
/// * Freed memory goes back to the system from the same size on.
/// * Where address space is limited, all threads share one heap: glibc would set 64 MiB of addresses aside for each.
pub fn tune_allocator() {
    #[cfg(target_env = "gnu")]
    {
        use nix::libc::{M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, mallopt};
        let limits_addresses = getrlimit(Resource::RLIMIT_AS).is_ok_and(|(soft, _)| soft != RLIM_INFINITY);
        // SAFETY: sets numbers inside the allocator, under its own lock; a refusal changes nothing.
        unsafe {
            mallopt(M_MMAP_THRESHOLD, APART_BYTES);
            mallopt(M_TRIM_THRESHOLD, APART_BYTES);
            if limits_addresses {
                mallopt(M_ARENA_MAX, 1);
            }
        }
    }
}

/// Bytes from which on an allocation is a map of its own.
#[cfg(target_env = "gnu")]
const APART_BYTES: nix::libc::c_int = 4 << 20;

/// The limits of this process that are low enough to be the reason of a failed start, as the end of a message, such as
/// `; low limits of this process: address space 300000 KiB (ulimit -v)`; empty if there are none.
pub fn hint() -> String {
    let low = ROWS.into_iter().filter_map(|(resource, name, unit, words, below)| {
        let (soft, _) = getrlimit(resource).ok().filter(|(soft, _)| *soft < below)?;
        Some(format!("{name} {}{words}", soft / unit))
    });
    let low: Vec<String> = low.collect();
    if low.is_empty() { String::new() } else { format!("; low limits of this process: {}", low.join(", ")) }
}

/// Threads that could be started, and why no more.
#[derive(Debug)]
pub struct Startable {
    /// How many of those requested.
    pub threads: usize,
    /// What kept the next one from starting.
    pub refusal: Option<io::Error>,
}

/// How many of `wanted` threads this process may have besides those it has, each with a buffer of `buffer_bytes`. They are
/// started, all at a time, and ended: code that panics where a thread does not start is not called then.
pub fn startable_threads(wanted: usize, buffer_bytes: usize) -> Startable {
    let mut holds: Vec<(mpsc::Sender<()>, JoinHandle<()>)> = Vec::with_capacity(wanted);
    let mut refusal = None;
    for _ in 0..wanted {
        let (hold, held) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let started = thread::Builder::new().name("ckfs-probe".into()).spawn(move || {
            let mut buffer: Vec<u8> = Vec::new();
            let _ = tell.send(buffer.try_reserve_exact(buffer_bytes).is_ok());
            let _ = held.recv();
        });
        match started {
            Ok(thread) => {
                let has_memory = told.recv().unwrap_or(false);
                holds.push((hold, thread));
                if !has_memory {
                    refusal = Some(io::ErrorKind::OutOfMemory.into());
                    break;
                }
            }
            Err(error) => {
                refusal = Some(error);
                break;
            }
        }
    }
    let no_memory = refusal.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::OutOfMemory);
    let threads = holds.len() - usize::from(no_memory && !holds.is_empty());
    for (hold, thread) in holds {
        drop(hold);
        let _ = thread.join();
    }
    Startable { threads, refusal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_with_their_buffers() {
        let all = startable_threads(3, 1 << 20);
        assert!(all.threads == 3 && all.refusal.is_none(), "{all:?}");
        let none = startable_threads(3, usize::MAX / 2);
        assert_eq!((none.threads, none.refusal.unwrap().kind()), (0, io::ErrorKind::OutOfMemory));
    }
}
