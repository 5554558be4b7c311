//! Every source obeys the same contract: one suite for local files, mapped and not, memory, and the wrapper. Then failures
//! of local files only: truncation, replacement and edits, also while many threads read them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::common::{
    contract::{self, fetch, span, zero_copy},
    objects::{self, MemoryObjects},
    sources::{Fault, Fetched, MemoryFiles, Watched},
};
use ckfs::source::{FileId, LocalFiles, Maps, Replied, Served, Source, SourceError, SourceIo, remote::cache::Cache};
use tempfile::TempDir;

const A: FileId = FileId(0);
const B: FileId = FileId(1);
const EMPTY: FileId = FileId(2);

fn content(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i * 2_654_435_761 + seed * 97) >> 7).to_le_bytes()[0] | 1).collect()
}

fn contents() -> [(&'static str, Vec<u8>); 3] {
    [("a.bin", content(300_000, 1)), ("b.bin", content(4_097, 2)), ("empty.bin", Vec::new())]
}

fn write_all(dir: &Path) -> Vec<PathBuf> {
    let write = |(name, bytes): (&str, Vec<u8>)| {
        let path = dir.join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    contents().into_iter().map(write).collect()
}

fn local(io: SourceIo) -> (TempDir, LocalFiles) {
    let dir = tempfile::tempdir().unwrap();
    let source = LocalFiles::open(&write_all(dir.path()), io).unwrap();
    (dir, source)
}

/// The contract, for a source that holds [`contents`].
fn conforms(source: &dyn Source) {
    contract::conforms(source, &contents().map(|(name, bytes)| (name.to_owned(), bytes)));
}

#[test]
fn every_source_conforms() {
    for io in [SourceIo::Auto, SourceIo::Mmap, SourceIo::Pread] {
        let (_dir, source) = local(io);
        assert_eq!(source.is_mapped(A), io != SourceIo::Pread, "the test's directory is on a local file system");
        conforms(&source);
    }
    conforms(&MemoryFiles::new(contents()));
    let objects = MemoryObjects::new(contents());
    let dir = tempfile::tempdir().unwrap();
    let timeout = Duration::from_mins(3);
    // Cold, warm, without room, and without a disk.
    for cap in [None, None, Some(0)] {
        conforms(&*objects.source(&objects::cache(dir.path(), cap), timeout));
    }
    let full = tempfile::tempdir().unwrap();
    conforms(&*objects.source(&objects::cache(full.path(), Some(0)), timeout));
    conforms(&*objects.source(&Cache::in_memory(Arc::default()), timeout));
    conforms(&Watched::new(MemoryFiles::new(contents())));
    conforms(&Watched::failing(local(SourceIo::Mmap).1, Fault::Changed, u64::MAX));
}

#[test]
fn a_faulty_source_fails_after_its_calls() {
    let source = Watched::failing(local(SourceIo::Mmap).1, Fault::Io, 2);
    fetch(&source, A, &[span(0, 1), span(1, 2)]).unwrap();
    fetch(&source, A, &[span(0, 1)]).unwrap();
    assert_eq!(source.fetched(), Fetched { calls: 2, spans: 3, bytes: 3 });
    assert!(matches!(fetch(&source, A, &[span(0, 1)]), Err(SourceError::Io { .. })));
    assert!(matches!(source.with(A, span(0, 1), &mut |_| ()), Some(Err(SourceError::Io { .. }))));
    assert!(matches!(zero_copy(&source, A, span(0, 1)), Some(Err(SourceError::Io { .. }))));
    let source = Watched::failing(MemoryFiles::new(contents()), Fault::Changed, 1);
    source.check(A).unwrap();
    fetch(&source, A, &[span(0, 1)]).unwrap();
    assert!(is_lost(&source.check(A).unwrap_err(), "version: expected 0, found 1"));
    let source = MemoryFiles::new(contents());
    source.touch(A);
    assert!(source.check(A).is_err() && source.check(B).is_ok());
    assert!(fetch(&source, A, &[span(0, 1)]).is_err(), "poison is sticky");
    assert_eq!(source.health().poisoned(), 1);
}

/// Whether a file is lost since it changed in this aspect.
fn is_lost(error: &SourceError, aspect: &str) -> bool {
    let changed = format!("changed since it was opened: {aspect}");
    matches!(error, SourceError::Lost { flaw, .. } if flaw.starts_with(&changed))
}

/// A change to `a.bin`, and the aspect that is then reported.
type Damage = (&'static str, fn(&Path), &'static str);

const DAMAGES: [Damage; 5] = [
    ("truncated", |path| file(path).set_len(1_000).unwrap(), "size in bytes: "),
    ("grown", |path| file(path).set_len(1_000_000).unwrap(), "size in bytes: "),
    ("edited", |path| file(path).write_all_at(b"x", 5).unwrap(), "modification time: "),
    (
        "edited, modification time put back",
        |path| {
            let file = file(path);
            let modified = file.metadata().unwrap().modified().unwrap();
            file.write_all_at(b"x", 5).unwrap();
            file.set_modified(modified).unwrap();
        },
        "status change time ",
    ),
    (
        "replaced",
        |path| {
            fs::write(path.with_extension("new"), content(300_000, 9)).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        },
        "names (0 when deleted or replaced): expected 1, found 0",
    ),
];

fn file(path: &Path) -> fs::File {
    fs::OpenOptions::new().write(true).open(path).unwrap()
}

#[test]
fn damage_is_noticed_sticks_and_stays_with_its_file() {
    for io in [SourceIo::Mmap, SourceIo::Pread] {
        for (what, damage, aspect) in DAMAGES {
            let (dir, source) = local(io);
            fetch(&source, A, &[span(0, 300_000)]).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            damage(&dir.path().join("a.bin"));
            let error = source.check(A).unwrap_err();
            assert!(is_lost(&error, aspect), "{what}: {error}");
            assert!(error.to_string().contains("a.bin") && error.to_string().contains("expected"), "{error}");
            assert_eq!(fetch(&source, A, &[span(0, 1)]).unwrap_err().to_string(), error.to_string());
            assert!(
                zero_copy(&source, A, span(0, 1)).is_none_or(|served| served.is_err()) && source.backing(A).is_none()
            );
            assert!(source.with(A, span(0, 1), &mut |_| panic!("poisoned")).is_none_or(|result| result.is_err()));
            assert!(source.check(A).is_err() && source.check_path(A).is_err());
            source.check(B).unwrap();
            source.check(EMPTY).unwrap();
            assert_eq!(source.health().poisoned(), 1, "counted once");
        }
    }
}

#[test]
fn a_removed_file_is_noticed() {
    let (dir, source) = local(SourceIo::Auto);
    fs::remove_file(dir.path().join("b.bin")).unwrap();
    assert!(source.check_path(B).is_err());
    assert!(is_lost(&source.check(B).unwrap_err(), "names (0 when deleted or replaced): expected 1, found 0"));
}

#[test]
fn a_short_read_is_an_error_even_without_a_check() {
    let (dir, source) = local(SourceIo::Pread);
    file(&dir.path().join("a.bin")).set_len(100).unwrap();
    let error = fetch(&source, A, &[span(50, 200)]).unwrap_err();
    assert!(is_lost(&error, "size in bytes: expected 300000, found 100"), "{error}");
}

#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| LocalFiles::open(&[path.to_path_buf()], SourceIo::Auto).err().unwrap();
    assert!(matches!(open(dir.path()), SourceError::Refused { .. }));
    assert!(matches!(open(&dir.path().join("missing")), SourceError::Io { .. }));
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(open(&fifo), SourceError::Refused { .. }), "and without waiting for a writer");
}

/// A conversion over the guarded mapping in many threads while the file is truncated: no zero may pass as data.
#[test]
fn truncation_under_a_running_conversion_never_yields_wrong_bytes() {
    const LEN: u64 = 64 << 20;
    const TILE: u64 = 1 << 20;
    for round in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        // No byte of the content is zero, so every zero that passes as data is detected.
        fs::write(&path, vec![1; usize::try_from(LEN).unwrap()]).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, vec![2; 1 << 20]).unwrap();
        let source = LocalFiles::open(&[path.clone(), other], SourceIo::Mmap).unwrap();
        let (truncated, good, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (source, truncated, good, refused) = (&source, &truncated, &good, &refused);
                scope.spawn(move || {
                    for step in 0_u64.. {
                        let start = (step * 7 + thread * 13) % (LEN / TILE) * TILE;
                        let was_truncated = truncated.load(Ordering::SeqCst);
                        let (mut sum, mut others) = (0_u64, 0_u64);
                        let result = source.with(A, span(start, start + TILE), &mut |bytes| {
                            sum = bytes.iter().map(|byte| u64::from(*byte)).sum();
                            let inner = source.with(B, span(0, 1 << 12), &mut |scale| {
                                others = scale.iter().map(|byte| u64::from(*byte)).sum();
                            });
                            inner.unwrap().unwrap();
                        });
                        if result.unwrap().and_then(|()| source.check(A)).is_ok() {
                            assert_eq!(sum, TILE, "zeros passed as data");
                            assert!(!was_truncated, "a truncated file passed");
                            good.fetch_add(1, Ordering::Relaxed);
                        } else {
                            refused.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                        assert_eq!(others, 2 << 12);
                    }
                });
            }
            let deadline = Instant::now() + Duration::from_mins(3);
            while good.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            file(&path).set_len(round * 10_000_001).unwrap();
            truncated.store(true, Ordering::SeqCst);
        });
        assert!(good.load(Ordering::Relaxed) > 0);
        assert_eq!(refused.load(Ordering::Relaxed), 8);
        assert_eq!(source.health().poisoned(), 1);
        source.check(B).unwrap();
        assert!(zero_copy(&source, A, span(0, 1)).unwrap().is_err());
    }
}

/// A system call on a truncated file's kernel-only buffer returns an error; the process survives.
#[test]
fn sending_a_truncated_file_to_the_kernel_is_an_errno() {
    let (dir, source) = local(SourceIo::Mmap);
    let mut written = Ok(());
    let checked = source.with_kernel_bytes(A, span(8_192, 300_000), &mut |bytes| {
        file(&dir.path().join("a.bin")).set_len(0).unwrap();
        let (_reader, pipe) = std::io::pipe().unwrap();
        written = bytes.write_to(&pipe);
        Replied::new()
    });
    assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EFAULT));
    let Some(Err(failure)) = checked else { panic!("the check finds the change: {checked:?}") };
    assert!(failure.replied.is_some() && is_lost(&failure.error, "size in bytes: "));
}

/// Resident bytes of this process's maps of a file.
fn resident_bytes(path: &Path) -> u64 {
    let (smaps, name) = (fs::read_to_string("/proc/self/smaps").unwrap(), path.to_str().unwrap());
    let (mut ours, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Rss:").filter(|_| ours) {
            kib += size.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        } else if line.split_ascii_whitespace().next().is_some_and(|word| word.contains('-')) {
            ours = line.ends_with(name);
        }
    }
    kib << 10
}

/// Mapped pages count as resident, but only a window of them stays, also with several threads at work.
#[test]
fn resident_mapped_memory_is_bounded() {
    const LEN: u64 = 256 << 20;
    const WINDOW: u64 = 16 << 20;
    const TILE: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    fs::write(&path, vec![3; usize::try_from(LEN).unwrap()]).unwrap();
    let source = LocalFiles::open(std::slice::from_ref(&path), SourceIo::Mmap).unwrap();
    source.bound(WINDOW, 0);
    let before = resident_bytes(&path);
    let most = Mutex::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (source, most, path) = (&source, &most, &path);
            scope.spawn(move || {
                for tile in (thread..LEN / TILE).step_by(2) {
                    let span = span(tile * TILE, (tile + 1) * TILE);
                    let mut sum = 0_u64;
                    let work = &mut |bytes: &[u8]| sum = bytes.iter().map(|byte| u64::from(*byte)).sum();
                    source.with(A, span, work).unwrap().unwrap();
                    assert_eq!(sum, 3 * TILE);
                    // Pages that the kernel reads through the other mapping count as well.
                    source
                        .with_kernel_bytes(A, span, &mut |bytes| {
                            assert_eq!(Served::Kernel(bytes).to_vec().unwrap().len(), 1 << 20);
                            Replied::new()
                        })
                        .unwrap()
                        .map(drop)
                        .unwrap();
                    let mut most = most.lock().unwrap();
                    *most = resident_bytes(path).saturating_sub(before).max(*most);
                }
            });
        }
    });
    assert!(source.window_drops() >= LEN / WINDOW / 2, "{} drops", source.window_drops());
    let most = *most.lock().unwrap();
    assert!(most <= 4 * WINDOW + (96 << 20), "{} MiB were resident", most >> 20);
    source.check(A).unwrap();
}

/// Small reads of a small working set do not drop it again and again.
#[test]
fn a_small_working_set_stays_resident() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    fs::write(&path, vec![3; 1 << 20]).unwrap();
    let source = LocalFiles::open(&[path], SourceIo::Mmap).unwrap();
    source.bound(1 << 30, 0);
    for step in 0..100_000_u64 {
        let start = step * 4096 % (1 << 20);
        source.with(A, span(start, start + 4096), &mut |_| ()).unwrap().unwrap();
    }
    assert_eq!(source.window_drops(), 0);
}

/// Pages that will be visited again stay, and are dropped once no reader returns to them.
#[test]
fn pages_to_return_to_stay_until_no_reader_returns() {
    const LEN: u64 = 64 << 20;
    const NARROW: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    fs::write(&path, vec![3; usize::try_from(LEN).unwrap()]).unwrap();
    let source = LocalFiles::open(&[path], SourceIo::Mmap).unwrap();
    source.bound(NARROW, 1 << 40);
    let visit = || {
        for start in (0..LEN).step_by(1 << 16) {
            source.with(A, span(start, start + (1 << 16)), &mut |_| ()).unwrap().unwrap();
        }
    };
    source.will_revisit();
    visit();
    assert_eq!(source.window_drops(), 0);
    source.trim();
    assert_eq!(source.window_drops(), 0, "somebody was here since");
    source.trim();
    assert_eq!(source.window_drops(), 1);
    source.trim();
    assert_eq!(source.window_drops(), 1, "nothing left to drop");
    visit();
    assert!(source.window_drops() > LEN / NARROW / 2, "the window is narrow again");
}

/// A file of `len` bytes, all 7, in a directory, and a map of it. `dropped_len` bytes from `dropped` on (all if 0) are dropped
/// from the page cache; a file system in memory ignores this.
fn written(dir: &Path, len: usize, dropped: i64, dropped_len: i64) -> (PathBuf, fs::File, memmap2::Mmap) {
    let path = dir.join("weights");
    fs::write(&path, content(len, 7)).unwrap();
    let file = fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&file, dropped, dropped_len, advice).unwrap();
    // SAFETY: no other code knows the file.
    #[allow(unsafe_code)]
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    (path, file, map)
}

/// Number of a mapped file's pages that the page cache has.
#[allow(unsafe_code)]
fn cached_pages(map: &memmap2::Mmap) -> usize {
    let mut pages = vec![0; map.len().div_ceil(4096)];
    // SAFETY: the range is mapped, and there is a byte for each page of it.
    let reported = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
    assert_eq!(reported, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn requested_spans_are_read_ahead_at_any_size() {
    const LEN: usize = 24 << 20;
    let dir = tempfile::tempdir().unwrap();
    let (path, _, map) = written(dir.path(), LEN, 0, 0);
    // A file system in memory always keeps all of them.
    let (before, all) = (cached_pages(&map), LEN / 4096);
    assert!(before == 0 || before == all, "{before} of {all} pages dropped");
    let source = LocalFiles::open(&[path], SourceIo::Auto).unwrap();
    assert_eq!(cached_pages(&map), before);
    source.will_need(FileId(0), span(0, LEN as u64));
    let deadline = Instant::now() + Duration::from_mins(3);
    while cached_pages(&map) < all {
        assert!(Instant::now() < deadline, "{} of {all} pages", cached_pages(&map));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kilobytes of a mapping that are mapped as huge pages, once its bytes of `range` were read.
fn huge_kib(map: &memmap2::Mmap, range: std::ops::Range<usize>) -> u64 {
    let sum: u64 = map[range].iter().step_by(4096).map(|byte| u64::from(*byte)).sum();
    assert!(sum > 0);
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", map.as_ptr() as usize);
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let size = lines.find_map(|line| line.strip_prefix("FilePmdMapped:")).unwrap_or_default();
    size.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

#[test]
fn requested_blocks_become_huge_pages_and_no_other_page_is_read() {
    const MIB: u64 = 1 << 20;
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (path, _, map) = written(dir.path(), 24 << 20, 0, 0);
    let source = LocalFiles::open(&[path], SourceIo::Auto).unwrap();
    if cached_pages(&map) > 0 {
        // In memory nothing has to be read.
        assert!(!source.will_need(A, span(0, MIB)));
        return;
    }
    assert!(source.will_need(A, span(MIB + 5, 7 * MIB)), "storage is asked");
    let wanted = 6 << 8;
    let deadline = Instant::now() + Duration::from_mins(3);
    while cached_pages(&map) < wanted {
        assert!(Instant::now() < deadline, "{} of {wanted} pages", cached_pages(&map));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(cached_pages(&map), wanted, "nothing but the span");
    assert!(!source.will_need(A, span(MIB + 5, 7 * MIB)), "all is cached");
    // Not every kernel and file system has huge pages of files.
    let (_, _, reference) = written(other.path(), 8 << 20, 0, 0);
    reference.advise(memmap2::Advice::HugePage).unwrap();
    if huge_kib(&reference, 0..4 << 20) > 0 {
        assert_eq!(huge_kib(&map, 2 << 20..6 << 20), 4 << 10, "both whole blocks");
    }
}

#[test]
fn bytes_of_requested_blocks_are_right_and_a_shorter_file_is_an_error() {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    // Whole blocks, and 5 bytes.
    let len = (8 << 20) + 5;
    let ((path, _, _map), whole) = (written(dir.path(), len, 0, 0), content(len, 7));
    let source = LocalFiles::open(std::slice::from_ref(&path), SourceIo::Auto).unwrap();
    source.will_need(A, span(0, len as u64));
    let read = |start: u64, end: u64| {
        let mut found = Vec::new();
        source.with(A, span(start, end), &mut |bytes| found = bytes.to_vec()).unwrap().map(|()| found)
    };
    // Inside a block, over a border of blocks, over the last one and the tail, all, and nothing.
    for (start, end) in [(3, 4099), (2 * MIB - 1, 2 * MIB + 1), (8 * MIB - 7, 8 * MIB + 5), (0, 8 * MIB + 5), (9, 9)] {
        let expected = &whole[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()];
        assert!(read(start, end).unwrap() == expected, "{start}..{end}");
    }
    assert!(source.with(A, span(8 * MIB, 8 * MIB + 6), &mut |_| panic!("beyond the end")).unwrap().is_err());
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5 * MIB).unwrap();
    assert!(read(4 * MIB, 7 * MIB).is_err(), "the last pages are gone");
    source.will_need(A, span(0, len as u64));
    assert!(read(0, 10).is_err(), "it stays refused");
}
