//! Guarded memory mappings: a lost page of a mapped file is an error, not the end of the process.
//!
//! A load from a mapped page raises SIGBUS if the file no longer has the page (truncation) or the device cannot deliver it. The
//! handler installed here looks the address up among the guarded mappings. If it belongs to one, the handler first sets
//! that mapping's flag and then puts zero pages from the faulting page to the mapping's end. The interrupted load continues
//! and reads zeros. The user of the mapping checks the flag afterwards. The order matters: zeros are visible only after
//! the flag is, so that no thread can take them for data. The flag never clears, since the zero pages stay.
//!
//! A SIGBUS anywhere else has the same effect as without this handler. The handler restores the action that it found when it
//! was installed, and lets the signal happen again.
//!
//! The fast path costs one atomic load. The mapping must not be used for anything that may outlive the flag's check, such
//! as replies to the kernel. Those have a mapping of their own, where the missing page makes the system call fail.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use memmap2::{MmapOptions, MmapRaw};

/// One guarded mapping as the handler sees it. Slots are never freed or reused: a handler may look at one at any moment, and
/// a repository's mappings are few and live as long as the process.
struct MapSlot {
    start: usize,
    /// One past the last byte of the last page; 0 once the mapping is gone.
    end: AtomicUsize,
    faulted: AtomicBool,
    next: Option<&'static MapSlot>,
}

/// Bytes of resident pages dropped in one call: meanwhile nothing else can be mapped.
const DROPPED_BYTES: usize = 256 << 20;

/// Newest slot; the others follow by `next`.
static SLOTS: AtomicPtr<MapSlot> = AtomicPtr::new(ptr::null_mut());

/// The earlier action of SIGBUS; set before the handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Page size for the handler, which must not call into the C library to learn it.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// A read-only mapping of a whole file that survives the loss of its pages.
pub struct GuardedMap {
    /// For its address and length, and for advice about it: its bytes are read by [`GuardedMap::with`] alone.
    pub(super) map: MmapRaw,
    slot: &'static MapSlot,
}

/// A page of a guarded mapping was missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted;

impl GuardedMap {
    /// Maps the first `len_bytes` bytes of `file`, which must be at least 1.
    ///
    /// # Errors
    /// The mapping or the installation of the signal handler failed.
    pub fn new(file: &File, len_bytes: usize) -> io::Result<Self> {
        install()?;
        let map = MmapOptions::new().len(len_bytes).map_raw_read_only(file)?;
        let start = map.as_ptr().addr();
        let end = (start + len_bytes).next_multiple_of(page_bytes());
        Ok(Self { slot: register(start, end), map })
    }

    /// Whether a page was missing at any time.
    pub(crate) fn has_faulted(&self) -> bool {
        self.slot.faulted.load(Ordering::SeqCst)
    }

    /// Runs `work` over the bytes `start..end`.
    ///
    /// Another process may write to the file meanwhile: `work` must not rely on reading the same value twice.
    ///
    /// # Errors
    /// [`Faulted`] if a page of this mapping, not only of the span, was missing now or earlier. `work` is not called if it
    /// was earlier; otherwise it may have read zeros.
    ///
    /// # Panics
    /// If the span leaves the mapping.
    pub fn with(&self, start: usize, end: usize, work: &mut dyn FnMut(&[u8])) -> Result<(), Faulted> {
        assert!(start <= end && end <= self.map.len(), "span {start}..{end} of a mapping of {} bytes", self.map.len());
        if self.has_faulted() {
            return Err(Faulted);
        }
        // SAFETY: the span lies in the mapping (asserted above), which lives as long as `self`. All of the mapping is
        // readable: where the file has no page, the handler supplies one. The compiler may assume that the bytes do not
        // change under a shared slice, while another process may change them. As with every mapped file this cannot be
        // ruled out, only bounded. Bytes have no invalid values, and results count only after another check of the file's
        // identity, so the worst outcome is a discarded result.
        let bytes = unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(start), end - start) };
        work(bytes);
        if self.has_faulted() { Err(Faulted) } else { Ok(()) }
    }
}

impl Drop for GuardedMap {
    fn drop(&mut self) {
        // Before other mappings may use the address range: a fault there would no longer be ours.
        self.slot.end.store(0, Ordering::SeqCst);
    }
}

/// Drops the resident pages of a read-only shared file mapping. Contents are unaffected: the kernel only empties page
/// table entries and fills them again on the next touch.
pub(super) fn drop_resident(start: *const u8, len_bytes: usize) {
    for at in (0..len_bytes).step_by(DROPPED_BYTES) {
        let part = DROPPED_BYTES.min(len_bytes - at);
        // SAFETY: `start..start + len_bytes` is a live file mapping of the caller, shared and read-only. So MADV_DONTNEED
        // discards no data: concurrent readers of the range fault the same pages in again. Zero pages put there
        // by the handler are anonymous; discarding them yields zero pages again. Failure leaves the pages where they are.
        // Parts lie in the range and begin at a page, as the mapping does.
        unsafe { libc::madvise(start.add(at).cast_mut().cast(), part, libc::MADV_DONTNEED) };
    }
}

/// Size of a memory page.
pub(crate) fn page_bytes() -> usize {
    match PAGE_BYTES.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf has no preconditions.
            let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            let bytes = usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096);
            PAGE_BYTES.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

fn register(start: usize, end: usize) -> &'static MapSlot {
    let mut head = SLOTS.load(Ordering::Acquire);
    let slot =
        Box::leak(Box::new(MapSlot { start, end: AtomicUsize::new(end), faulted: AtomicBool::new(false), next: None }));
    let slot = NonNull::from(slot);
    loop {
        // SAFETY: slots are leaked boxes, so `head`, if any, is valid forever. Until the exchange below succeeds no other
        // thread has a pointer to `slot`, so that writing to it is exclusive.
        unsafe { (*slot.as_ptr()).next = head.as_ref() };
        match SLOTS.compare_exchange_weak(head, slot.as_ptr(), Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the box is leaked, and from now on only shared.
            Ok(_) => return unsafe { slot.as_ref() },
            Err(newer) => head = newer,
        }
    }
}

/// Installs the handler once per process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        page_bytes();
        install_handler().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    installed.map_err(io::Error::from_raw_os_error)
}

fn install_handler() -> io::Result<()> {
    // SAFETY: `sigaction` is plain data for which all zeros is a valid value.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads the present action into a valid place; a null new action changes nothing.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    PREVIOUS.get_or_init(|| previous);
    // SAFETY: as above, all zeros is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    action.sa_sigaction = handler as *const () as usize;
    // On the alternate stack: Rust gives each of its threads one, and a fault may come on a stack that is nearly full.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is fully initialized; the handler calls only what may be called in a signal handler.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The handler. Uses atomics and raw system calls only, and keeps errno.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: errno's location is valid for the calling thread.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes valid information with SA_SIGINFO; for signals of its own (code above 0) it holds an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    let handled = code > 0 && replace_lost_pages(address);
    if !handled {
        give_up(signal, code);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn replace_lost_pages(address: usize) -> bool {
    let page = address & !(PAGE_BYTES.load(Ordering::Relaxed) - 1);
    // SAFETY: slots are leaked, so every pointer in the list is valid forever.
    let mut next = unsafe { SLOTS.load(Ordering::Acquire).as_ref() };
    while let Some(slot) = next {
        let end = slot.end.load(Ordering::SeqCst);
        if slot.start <= address && address < end {
            slot.faulted.store(true, Ordering::SeqCst);
            // To the end at once: a truncated file has no page from here on, and one replacement splits the mapping once.
            // SAFETY: the range lies in a mapping that some thread is using under `&GuardedMap` (it just faulted), so that it
            // is ours to replace; it is read-only before and after. mmap is a plain system call here.
            let got = unsafe {
                libc::mmap(
                    ptr::with_exposed_provenance_mut(page),
                    end - page,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                    -1,
                    0,
                )
            };
            return got != libc::MAP_FAILED;
        }
        next = slot.next;
    }
    false
}

/// Not ours: restores the earlier action. A fault happens again when the handler returns and meets that action; a signal
/// sent by a process has to be sent again.
fn give_up(signal: libc::c_int, code: libc::c_int) {
    // SAFETY: both calls may be made in a signal handler; the action is the one that sigaction itself gave us, or the
    // default, for which all zeros is the valid value.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        let previous = PREVIOUS.get().unwrap_or(&default);
        libc::sigaction(signal, previous, ptr::null_mut());
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::process::ExitStatusExt, process::Command};

    use super::*;

    fn file_of(len_bytes: usize, byte: u8) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![byte; len_bytes]).unwrap();
        file
    }

    fn sum(bytes: &[u8]) -> u64 {
        bytes.iter().map(|byte| u64::from(*byte)).sum()
    }

    #[test]
    fn a_truncated_file_gives_an_error_and_stays_refused() {
        let file = file_of(100_000, 1);
        let map = GuardedMap::new(&file, 100_000).unwrap();
        let mut total = 0;
        assert_eq!(map.with(0, 100_000, &mut |bytes| total = sum(bytes)), Ok(()));
        assert_eq!(total, 100_000);
        file.set_len(5_000).unwrap();
        assert_eq!(map.with(0, 100_000, &mut |bytes| total = sum(bytes)), Err(Faulted));
        assert_eq!(map.with(0, 10, &mut |_| panic!("not to be called")), Err(Faulted));
    }

    #[test]
    fn sections_nest_and_only_the_lost_file_is_lost() {
        let (weights, scales) = (file_of(50_000, 2), file_of(50_000, 3));
        let (outer, inner) = (GuardedMap::new(&weights, 50_000).unwrap(), GuardedMap::new(&scales, 50_000).unwrap());
        scales.set_len(0).unwrap();
        let mut inner_result = Ok(());
        let outer_result = outer.with(0, 50_000, &mut |left| {
            inner_result = inner.with(0, 50_000, &mut |right| {
                assert_eq!(sum(right), 0);
                assert_eq!(sum(left), 100_000);
            });
        });
        assert_eq!((outer_result, inner_result), (Ok(()), Err(Faulted)));
    }

    #[test]
    fn threads_of_one_section_are_covered() {
        let file = file_of(1 << 20, 1);
        let map = GuardedMap::new(&file, 1 << 20).unwrap();
        file.set_len(0).unwrap();
        let result = map.with(0, 1 << 20, &mut |bytes| {
            std::thread::scope(|scope| {
                for part in bytes.chunks(1 << 16) {
                    scope.spawn(move || assert_eq!(sum(part), 0));
                }
            });
        });
        assert_eq!(result, Err(Faulted));
    }

    #[test]
    fn dropped_maps_are_forgotten() {
        let file = file_of(10_000, 1);
        let map = GuardedMap::new(&file, 10_000).unwrap();
        let slot = map.slot;
        assert_eq!(slot.end.load(Ordering::SeqCst) % page_bytes(), 0);
        drop(map);
        assert_eq!(slot.end.load(Ordering::SeqCst), 0);
    }

    const CHILD: &str = "CKFS_TEST_GUARD_CHILD";

    /// Runs this test binary again with only `name`, which then plays the child.
    fn child(name: &str) -> std::process::ExitStatus {
        let (_, tests) = module_path!().split_once("::").unwrap();
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("{tests}::{name}"), "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap()
            .status
    }

    #[test]
    fn a_fault_elsewhere_still_kills() {
        if std::env::var_os(CHILD).is_some() {
            let (guarded, plain) = (file_of(10_000, 1), file_of(10_000, 1));
            let _map = GuardedMap::new(&guarded, 10_000).unwrap();
            // SAFETY: the whole point of the test is the fault, in a process made for it.
            let other = unsafe { MmapOptions::new().len(10_000).map(&plain).unwrap() };
            plain.set_len(0).unwrap();
            std::process::exit(i32::from(std::hint::black_box(other[5_000])));
        }
        assert_eq!(child("a_fault_elsewhere_still_kills").signal(), Some(libc::SIGBUS));
    }

    #[test]
    fn a_sent_signal_still_kills() {
        if std::env::var_os(CHILD).is_some() {
            let guarded = file_of(10_000, 1);
            let _map = GuardedMap::new(&guarded, 10_000).unwrap();
            // Rust's own handler, which ours puts back, takes the first for a stray fault and steps aside for the second.
            for _ in 0..3 {
                // SAFETY: sends a signal to this process, which was made for it.
                unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            std::process::exit(0);
        }
        assert_eq!(child("a_sent_signal_still_kills").signal(), Some(libc::SIGBUS));
    }
}
