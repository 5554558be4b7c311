//! Remote objects through the disk cache: bytes are right whatever is evicted, damaged or fetched at the same time; faults of the
//! service become errors after a stated time, and never other bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::objects::{MemoryObjects, Mishap, cache, source_of};
use ckfs::source::{
    ByteSpan, FetchPart, FileId, Replied, Served, Source, SourceError,
    digest::{Compared, Digester, KnownDigest},
    remote::{
        Content, Failure, RemoteCounters, RemoteOptions, RemoteRepository, RemoteTree,
        cache::{BLOCK_BYTES, Cache, CacheLimit, EntryMeta},
        digest::digest_of,
    },
};
use sha2::{Digest, Sha256};

const FILE: FileId = FileId(0);
const LONG: Duration = Duration::from_mins(3);

fn content(len: usize, seed: u64) -> Vec<u8> {
    // Never zero: a hole must show.
    let word = |place: u64| (place ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..len as u64).map(|place| word(place / 8)[usize::try_from(place % 8).unwrap()] | 1).collect()
}

fn span(start: u64, end: u64) -> ByteSpan {
    ByteSpan::new(start, end).unwrap()
}

fn read(source: &dyn Source, start: u64, len: usize) -> Result<Vec<u8>, SourceError> {
    let mut bytes = vec![0; len];
    source.read_into(FILE, start, &mut bytes)?;
    Ok(bytes)
}

fn count(source: &dyn Source, which: impl Fn(&RemoteCounters) -> u64) -> u64 {
    which(source.remote().unwrap().counters())
}

/// The same numbers on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[test]
fn bytes_are_right_while_segments_are_evicted_under_the_readers_of_two_processes() {
    const LEN: u64 = 112 << 20;
    const CAP_BYTES: u64 = 56 << 20;
    /// More than fits at a time: what was evicted came back and was evicted again.
    const EVICTED_BYTES: u64 = 2 * CAP_BYTES;
    let bytes = Arc::new(content(usize::try_from(LEN).unwrap(), 1));
    let objects = MemoryObjects::new([("model.safetensors", bytes.to_vec())]);
    let dir = tempfile::tempdir().unwrap();
    // Locks belong to open files, so that two caches in one process are to each other as two processes.
    let caches: Vec<_> = (0..2).map(|_| cache(dir.path(), Some(CAP_BYTES))).collect();
    let sources: Vec<Arc<dyn Source>> = caches.iter().map(|cache| objects.source(cache, LONG)).collect();
    let evicted = || -> u64 { caches.iter().map(|cache| cache.counters().evicted_bytes.load(Ordering::Relaxed)).sum() };
    let begun = Instant::now();
    thread::scope(|scope| {
        for (number, source) in sources.iter().enumerate() {
            for reader in 0..2_u64 {
                let (bytes, evicted) = (Arc::clone(&bytes), &evicted);
                scope.spawn(move || {
                    let mut random = Random(number as u64 * 7 + reader);
                    for round in 0.. {
                        if round >= 120 && (evicted() >= EVICTED_BYTES || begun.elapsed() > 3 * LONG) {
                            break;
                        }
                        let start = random.below(LEN - 1);
                        let end = (start + 1 + random.below(700_000)).min(LEN);
                        let expected = &bytes[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()];
                        let maps = source.maps_of(FILE);
                        match (round % 3, maps) {
                            (0, Some(maps)) => {
                                let mut right = false;
                                maps.with(FILE, span(start, end), &mut |found| right = found == expected)
                                    .unwrap()
                                    .unwrap();
                                assert!(right, "{start}..{end} by a map");
                            }
                            (1, Some(maps)) => {
                                let mut found = None;
                                let replied = maps.with_kernel_bytes(FILE, span(start, end), &mut |bytes| {
                                    found = Some(Served::Kernel(bytes).to_vec().unwrap());
                                    Replied::new()
                                });
                                if let Some(result) = replied {
                                    result.map(drop).unwrap();
                                    assert!(found.unwrap() == expected, "{start}..{end} for the kernel");
                                }
                            }
                            _ => {
                                let len = expected.len();
                                assert!(read(&**source, start, len).unwrap() == expected, "{start}..{end} by a read");
                            }
                        }
                        if round % 16 == 0
                            && let Some(maps) = source.maps()
                        {
                            maps.trim();
                        }
                    }
                });
            }
        }
    });
    assert!(evicted() >= EVICTED_BYTES, "{} bytes are evicted", evicted());
    // Each process may write a MiB after both have measured at the same time.
    assert!(caches[0].limit().unwrap().used_bytes <= CAP_BYTES + (4 << 20), "{:?}", caches[0].limit());
    for source in &sources {
        assert_eq!(count(&**source, |counters| counters.bad_blocks.load(Ordering::Relaxed)), 0);
        assert!(count(&**source, |counters| counters.miss_bytes.load(Ordering::Relaxed)) > 0);
    }
}

#[test]
fn the_bound_is_exceeded_by_an_eighth_of_it_for_each_further_process() {
    const FILES: usize = 4;
    const LEN: usize = 24 << 20;
    const CAP_BYTES: u64 = 32 << 20;
    let objects = MemoryObjects::new((0..FILES).map(|file| (format!("{file}.bin"), content(LEN, file as u64))));
    let dir = tempfile::tempdir().unwrap();
    let caches: Vec<_> = (0..FILES).map(|_| cache(dir.path(), Some(CAP_BYTES))).collect();
    let running = AtomicBool::new(true);
    let most = thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut most = 0;
            while running.load(Ordering::Relaxed) {
                most = most.max(caches[0].limit().map_or(0, |limit| limit.used_bytes));
            }
            most
        });
        let readers: Vec<_> = caches
            .iter()
            .enumerate()
            .map(|(number, cache)| {
                let objects = &objects;
                scope.spawn(move || {
                    let source = objects.source(cache, LONG);
                    for round in 0..3 {
                        let file = FileId(u32::try_from((number + round) % FILES).unwrap());
                        for start in (0..LEN).step_by(1 << 20) {
                            let mut bytes = vec![0; 1 << 20];
                            source.read_into(file, start as u64, &mut bytes).unwrap();
                        }
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        running.store(false, Ordering::Relaxed);
        watching.join().unwrap()
    });
    let further = FILES as u64 - 1;
    assert!(most <= CAP_BYTES + further * CAP_BYTES / 8, "{most} bytes");
    // Everybody is done: what is too much goes with the next looks.
    for _ in 0..20 {
        for cache in &caches {
            cache.trim(0);
        }
        thread::sleep(Duration::from_millis(50));
    }
    let CacheLimit { used_bytes: used, limit_bytes: limit, .. } = caches[0].limit().unwrap();
    assert!(used <= limit && limit == CAP_BYTES, "{used} bytes");
}

#[test]
fn reads_past_a_full_cache_have_several_requests_at_a_time() {
    const LEN: usize = 64 << 20;
    let bytes = content(LEN, 12);
    let objects = MemoryObjects::new([("model.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    // Nothing fits.
    let source = objects.source(&cache(dir.path(), Some(4096)), LONG);
    *objects.latency.lock().unwrap() = Duration::from_millis(100);
    let mut targets = vec![vec![0; 1000]; 40];
    let starts: Vec<u64> = (0..40).map(|row| 5 + row * 1_600_001).collect();
    let mut parts: Vec<FetchPart<'_>> =
        targets.iter_mut().zip(&starts).map(|(target, start)| FetchPart { start: *start, target }).collect();
    source.fetch(FILE, &mut parts).unwrap();
    for (target, start) in targets.iter().zip(&starts) {
        let start = usize::try_from(*start).unwrap();
        assert!(*target == bytes[start..start + 1000], "at {start}");
    }
    assert!(read(&*source, 3, 9 << 20).unwrap() == bytes[3..3 + (9 << 20)], "a long one is cut");
    assert!(objects.running_most.load(Ordering::Relaxed) >= 4);
    *objects.latency.lock().unwrap() = Duration::ZERO;
    // Rows near each other come with one request.
    let before = objects.requests.load(Ordering::Relaxed);
    let mut targets = vec![vec![0; 100]; 40];
    let mut parts: Vec<FetchPart<'_>> = targets
        .iter_mut()
        .enumerate()
        .map(|(row, target)| FetchPart { start: (40 << 20) + row as u64 * 1000, target })
        .collect();
    source.fetch(FILE, &mut parts).unwrap();
    for (row, target) in targets.iter().enumerate() {
        let start = (40 << 20) + row * 1000;
        assert!(*target == bytes[start..start + 100], "row {row}");
    }
    assert!(objects.requests.load(Ordering::Relaxed) - before <= 3);
    assert!(count(&*source, |counters| counters.uncached_bytes.load(Ordering::Relaxed)) > 9 << 20);
}

#[test]
fn two_processes_fetch_together_little_more_than_once() {
    const LEN: usize = 64 << 20;
    let bytes = content(LEN, 2);
    let objects = MemoryObjects::new([("model.safetensors", bytes.clone())]);
    *objects.latency.lock().unwrap() = Duration::from_millis(3);
    let dir = tempfile::tempdir().unwrap();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let source = objects.source(&cache(dir.path(), None), LONG);
                assert!(source.remote().unwrap().prefetch(FILE, &[span(0, LEN as u64)]));
                assert!(read(&*source, 0, LEN).unwrap() == bytes);
            });
        }
    });
    let fetched = objects.bytes.load(Ordering::Relaxed);
    assert!(fetched <= LEN as u64 * 11 / 10, "{fetched} bytes for {LEN}");
    let before = fetched;
    let again = objects.source(&cache(dir.path(), None), LONG);
    assert!(read(&*again, 0, LEN).unwrap() == bytes);
    assert_eq!(objects.bytes.load(Ordering::Relaxed), before, "everything was in the cache");
    assert!(again.backing(FILE).is_some());
}

#[test]
fn a_contiguous_shard_costs_little_more_than_its_bytes_and_a_strided_one_no_single_requests() {
    const LEN: usize = 64 << 20;
    let objects = MemoryObjects::new([("model.bin", content(LEN, 3))]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), LONG);
    read(&*source, 12_345_678, 10 << 20).unwrap();
    let fetched = objects.bytes.load(Ordering::Relaxed);
    assert!(fetched <= (10 << 20) * 102 / 100, "{fetched}");
    let before = objects.requests.load(Ordering::Relaxed);
    let maps = source.maps_of(FILE).unwrap();
    let first = 32 << 20;
    let parts: Vec<ByteSpan> = (0..64).map(|row| span(first + row * 40_000, first + row * 40_000 + 2_000)).collect();
    let bounding = span(first, parts[63].end());
    assert!(maps.is_partial(FILE, bounding));
    let expected = content(LEN, 3);
    let mut looked = false;
    maps.with_parts(FILE, bounding, &parts, &mut |bytes| {
        looked = true;
        for part in &parts {
            let (from, to) = (part.start() - first, part.end() - first);
            let place = usize::try_from(part.start()).unwrap();
            assert!(
                bytes[usize::try_from(from).unwrap()..usize::try_from(to).unwrap()] == expected[place..place + 2_000]
            );
        }
    })
    .unwrap()
    .unwrap();
    assert!(looked);
    let requests = objects.requests.load(Ordering::Relaxed) - before;
    assert!(requests <= 2, "{requests} requests");
}

#[test]
fn replies_that_break_off_go_on_where_they_ended() {
    let bytes = content(3 << 20, 4);
    let objects = MemoryObjects::new([("model.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), LONG);
    objects.mishaps.lock().unwrap().extend([
        Mishap::CutAfter(0),
        Mishap::Fails(Failure::Busy(Some(Duration::from_millis(30)))),
        Mishap::CutAfter(100_001),
        Mishap::Fails(Failure::Transient),
        Mishap::CutAfter(1_000_000),
    ]);
    assert!(read(&*source, 0, 3 << 20).unwrap() == bytes);
    assert_eq!(objects.bytes.load(Ordering::Relaxed), 3 << 20, "no byte came twice");
    let value = |which: fn(&RemoteCounters) -> &std::sync::atomic::AtomicU64| {
        count(&*source, |counters| which(counters).load(Ordering::Relaxed))
    };
    assert_eq!(value(|counters| &counters.retries), 5);
    assert_eq!(value(|counters| &counters.pauses), 1);
}

#[test]
fn a_reply_that_breaks_off_is_not_continued_with_another_version() {
    let bytes = content(3 << 20, 13);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), LONG);
    let changed = Failure::Changed { expected: "1".into(), found: "2".into() };
    // The last one comes first.
    objects.mishaps.lock().unwrap().extend([Mishap::Fails(changed), Mishap::CutAfter(1_000_001)]);
    let error = read(&*source, 0, 3 << 20).unwrap_err();
    assert!(matches!(&error, SourceError::Lost { flaw, .. } if flaw.ends_with(", found 2")), "{error}");
    assert_eq!(objects.bytes.load(Ordering::Relaxed), 1_000_001, "nothing of the other version");
    drop(source);
    // What came before is of the pinned version, and stays.
    let again = objects.source(&cache(dir.path(), None), LONG);
    let kept = 1_000_001 / BLOCK_BYTES * BLOCK_BYTES;
    assert_eq!(again.remote().unwrap().absent_bytes(FILE, &[span(0, 3 << 20)]), (3 << 20) - kept);
    assert!(read(&*again, 0, 3 << 20).unwrap() == bytes);
}

#[test]
fn another_version_poisons_its_file_only() {
    let objects = MemoryObjects::new([("a.bin", content(1 << 20, 5)), ("b.bin", content(1 << 20, 6))]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), LONG);
    read(&*source, 0, 100).unwrap();
    let changed = Failure::Changed { expected: "1".into(), found: "2".into() };
    objects.mishaps.lock().unwrap().push(Mishap::Fails(changed));
    let error = read(&*source, 500_000, 100).unwrap_err();
    assert!(matches!(&error, SourceError::Lost { flaw, .. } if flaw.ends_with(", found 2")), "{error}");
    assert!(error.to_string().contains("mem://all/a.bin"), "{error}");
    assert!(read(&*source, 0, 100).is_err(), "also what is in the cache: it is unknown which is right");
    assert_eq!(source.health().poisoned(), 1);
    source.read_into(FileId(1), 0, &mut [0; 100]).unwrap();
}

#[test]
fn a_service_without_answer_is_an_error_after_the_stated_time_and_cached_bytes_go_on() {
    let objects = MemoryObjects::new([("a.bin", content(1 << 20, 7)), ("b.bin", content(1 << 20, 8))]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), Duration::from_millis(400));
    source.read_into(FileId(1), 0, &mut vec![0; 1 << 20]).unwrap();
    objects.mishaps.lock().unwrap().extend(vec![Mishap::Hangs; 50]);
    let begun = Instant::now();
    let waiting = thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&*source, 0, 1000));
        thread::sleep(Duration::from_millis(50));
        source.read_into(FileId(1), 0, &mut vec![0; 1 << 20]).unwrap();
        waiting.join().unwrap()
    });
    let error = waiting.unwrap_err();
    assert!(matches!(error, SourceError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("a.bin: bytes 0..1000: "), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(390));
    objects.mishaps.lock().unwrap().clear();
    // At once it would be taken for the kernel's second attempt.
    thread::sleep(Duration::from_millis(60));
    assert!(read(&*source, 0, 1000).is_ok(), "it works again");
}

/// The error of a second attempt of a read, which the service is not asked for. On a busy machine it may come so late that it is a read
/// of its own: then both are made again.
fn second_attempt<S: Fn() -> Result<Vec<u8>, SourceError>>(
    objects: &MemoryObjects,
    first: impl Fn() -> S,
) -> SourceError {
    for _ in 0..20 {
        let second = first();
        let asked = objects.requests.load(Ordering::Relaxed);
        let error = second().unwrap_err();
        if objects.requests.load(Ordering::Relaxed) == asked {
            return error;
        }
    }
    panic!("the service is asked for a second attempt")
}

#[test]
fn a_service_that_keeps_failing_takes_no_more_than_the_time_limit() {
    let limit = Duration::from_millis(800);
    for failure in [Failure::Transient, Failure::Busy(None), Failure::Busy(Some(Duration::ZERO))] {
        let objects = MemoryObjects::new([("a.bin", content(1 << 20, 7))]);
        let dir = tempfile::tempdir().unwrap();
        for cache in [cache(dir.path(), None), cache(&dir.path().join("full"), Some(0))] {
            let source = objects.source(&cache, limit);
            objects.mishaps.lock().unwrap().extend(vec![Mishap::Fails(failure.clone()); 1000]);
            // Without a limit it would go on until the failures are used up.
            second_attempt(&objects, || {
                let error = read(&*source, 0, 4096).unwrap_err();
                assert!(matches!(error, SourceError::Refused { .. }), "{error}");
                || read(&*source, 0, 4096)
            });
            objects.mishaps.lock().unwrap().clear();
        }
    }
}

#[test]
fn a_reader_does_not_wait_for_a_request_that_is_stuck() {
    let limit = Duration::from_secs(30);
    // It begins to wait when the request has been stuck for a while, or when it has just begun.
    for before in [Duration::from_millis(2300), Duration::ZERO] {
        let objects = MemoryObjects::new([("a.bin", content(4 << 20, 7))]);
        let dir = tempfile::tempdir().unwrap();
        let source = objects.source(&cache(dir.path(), None), limit);
        objects.mishaps.lock().unwrap().extend(vec![Mishap::Hangs; 8]);
        let begun = Instant::now();
        assert!(source.remote().unwrap().prefetch(FILE, &[span(0, 4 << 20)]));
        while objects.mishaps.lock().unwrap().len() == 8 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(before);
        objects.mishaps.lock().unwrap().clear();
        assert!(read(&*source, 1 << 20, 100_000).unwrap() == content(4 << 20, 7)[1 << 20..][..100_000]);
        assert!(begun.elapsed() < limit, "not after the request has ended");
    }
}

#[test]
fn a_reader_waits_once_although_the_kernel_asks_twice() {
    let objects = MemoryObjects::new([("a.bin", content(1 << 20, 7))]);
    let dir = tempfile::tempdir().unwrap();
    for cache in [cache(dir.path(), None), cache(&dir.path().join("full"), Some(0))] {
        let source = objects.source(&cache, Duration::from_millis(400));
        objects.mishaps.lock().unwrap().extend(vec![Mishap::Hangs; 1000]);
        for first_bytes in [100_000, 4096] {
            let error = second_attempt(&objects, || {
                read(&*source, 500_000, first_bytes).unwrap_err();
                // For the page that its reader wants, alone.
                || read(&*source, 500_000, 4096)
            });
            assert!(error.to_string().contains("a.bin: bytes 500000..504096: "), "{error}");
        }
        objects.mishaps.lock().unwrap().clear();
        assert!(read(&*source, 500_000, 100_000).is_ok(), "a new read asks anew, at once");
        assert!(read(&*source, 500_000, 4096).is_ok());
    }
}

#[test]
fn a_pause_longer_than_the_time_limit_is_an_error_that_says_so() {
    let objects = MemoryObjects::new([("a.bin", content(1 << 20, 9))]);
    let dir = tempfile::tempdir().unwrap();
    let source = objects.source(&cache(dir.path(), None), Duration::from_secs(2));
    objects.mishaps.lock().unwrap().push(Mishap::Fails(Failure::Busy(Some(Duration::from_mins(5)))));
    let begun = Instant::now();
    let error = read(&*source, 0, 10).unwrap_err().to_string();
    assert!(error.contains("300 s") && error.contains("--source-timeout"), "{error}");
    assert!(begun.elapsed() < Duration::from_mins(5));
}

fn with_digest(objects: &Arc<MemoryObjects>, digest: &str) -> RemoteRepository {
    let mut repository = objects.repository("1");
    repository.files[0].content = Content::Sha256(digest.to_owned());
    repository
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
}

/// The state of the only entry of a cache.
fn meta_of(cache: &Cache) -> EntryMeta {
    let dirs = cache.list().unwrap();
    assert_eq!(dirs.len(), 1);
    cache.existing(&dirs[0]).unwrap().meta()
}

fn wait_until(done: &dyn Fn() -> bool) {
    let begun = Instant::now();
    while !done() && begun.elapsed() < LONG {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(done());
}

#[test]
fn a_complete_object_is_compared_with_its_digest_once() {
    let bytes = content(1 << 20, 10);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let shared = cache(dir.path(), None);
    let good = source_of(with_digest(&objects, &hex(&bytes)), &shared, LONG);
    let file = FILE;
    assert!(!good.is_used(file), "nothing was read");
    read(&*good, 0, 1000).unwrap();
    assert!(good.is_used(file) && !meta_of(&shared).verified);
    assert!(good.backing(file).is_none(), "the kernel gets no file that was not compared");
    read(&*good, 0, 1 << 20).unwrap();
    // Nobody waits for it.
    wait_until(&|| meta_of(&shared).verified);
    assert_eq!((good.compare(file).unwrap(), good.health().poisoned()), (Compared::Right, 0));
    assert!(good.backing(file).is_some());
}

#[test]
fn wrong_bytes_that_readers_had_poison_their_file_when_the_last_has_come() {
    let bytes = content(1 << 20, 10);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let shared = cache(dir.path(), None);
    let wrong = source_of(with_digest(&objects, &hex(b"other")), &shared, LONG);
    let told = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = Arc::clone(&told);
    wrong.health().on_poisoned(Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    // The comparison may be faster than this reader, who then brings the bytes once more before it learns of it.
    let outrun = read(&*wrong, 0, 1 << 20).err();
    if let Some(error) = &outrun {
        assert!(matches!(error, SourceError::Lost { .. }), "{error}");
    }
    // No reader comes again, since the kernel has the bytes, and nobody looks.
    wait_until(&|| wrong.health().poisoned() == 1);
    wait_until(&|| told.load(Ordering::Relaxed) == 1);
    let error = read(&*wrong, 0, 1).unwrap_err();
    assert!(
        matches!(&error, SourceError::Lost { flaw, .. } if flaw.contains(&format!(", found {}:", hex(&bytes)))),
        "{error}"
    );
    assert!(matches!(wrong.compare(FILE), Err(SourceError::Lost { .. })));
    let entry = shared.existing(&shared.list().unwrap()[0]).unwrap();
    let meta = entry.meta();
    assert_eq!((meta.verified, meta.dropped), (false, 1), "the next mount compares it, or fetches it again");
    assert!(outrun.is_some() || entry.present_bytes().unwrap() == 0, "the next mount fetches it again");
}

#[test]
fn a_command_brings_a_small_rest_to_compare_it_and_says_what_is_a_part() {
    let bytes = content(40 << 20, 3);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let part_of = |len: usize| {
        let dir = tempfile::tempdir().unwrap();
        let source = source_of(with_digest(&objects, &hex(b"other")), &cache(dir.path(), None), LONG);
        read(&*source, 0, len).unwrap();
        source.compare(FILE).map_err(|error| error.to_string())
    };
    assert_eq!(part_of(8 << 20), Ok(Compared::Partial { absent_bytes: 32 << 20 }));
    let error = part_of(30 << 20).unwrap_err();
    assert!(error.contains(&hex(&bytes)), "{error}");
}

#[test]
fn small_files_are_compared_before_anything_is_made_of_them() {
    let (right, wrong) = (b"right content".to_vec(), b"wrong content".to_vec());
    let known = KnownDigest::GitBlob(String::new());
    let mut digester = Digester::new(&known, right.len() as u64);
    digester.update(&right);
    let id = digester.finish();
    let objects = MemoryObjects::new([("config.json", wrong)]);
    let mut repository = objects.repository("1");
    repository.files[0].content = Content::GitBlob(id);
    let dir = tempfile::tempdir().unwrap();
    let refused = RemoteTree::open(repository, &cache(dir.path(), None), &RemoteOptions::default()).err().unwrap();
    assert!(
        matches!(&refused, SourceError::Lost { flaw, .. } if flaw.starts_with("expected git blob id ")),
        "{refused}"
    );
    assert_eq!(objects.requests.load(Ordering::Relaxed), 2, "it was fetched once more");
}

#[test]
fn blocks_that_come_after_the_comparison_are_compared_again() {
    let bytes = content(1 << 20, 4);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let shared = cache(dir.path(), None);
    let source = source_of(with_digest(&objects, &hex(&bytes)), &shared, LONG);
    // Nobody reads it: no comparison beside readers takes note of what is stored below.
    let all = [span(0, 1 << 20)];
    let remote = source.remote().unwrap();
    assert!(remote.prefetch(FILE, &all));
    let begun = Instant::now();
    while !remote.absent_spans(FILE, &all).is_empty() {
        assert!(begun.elapsed() < LONG);
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(source.compare(FILE).unwrap(), Compared::Right);
    let third = cache(dir.path(), None);
    let entry = third.existing(&third.list().unwrap()[0]).unwrap();
    assert!(entry.meta().verified);
    entry.store(3, &vec![7; usize::try_from(BLOCK_BYTES).unwrap()], false).unwrap();
    assert!(!shared.existing(&shared.list().unwrap()[0]).unwrap().meta().verified);
    let other = cache(dir.path(), None);
    let second = source_of(with_digest(&objects, &hex(&bytes)), &other, LONG);
    read(&*second, 0, 1).unwrap();
    assert!(matches!(second.compare(FILE), Err(SourceError::Lost { .. })));
    // Other processes learn of it from the entry.
    assert!(entry.was_dropped());
}

#[test]
fn what_one_endpoint_says_of_an_object_is_no_proof_for_another() {
    let bytes = content(1 << 20, 5);
    let lying = MemoryObjects::of_origin("https://mirror", [("a.bin", vec![0; 1 << 20])]);
    let honest = MemoryObjects::of_origin("https://hub", [("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let shared = cache(dir.path(), None);
    let digest = hex(&bytes);
    let mirror = source_of(with_digest(&lying, &digest), &shared, LONG);
    read(&*mirror, 0, 1 << 19).unwrap();
    let hub = source_of(with_digest(&honest, &digest), &shared, LONG);
    assert!(read(&*hub, 0, 1 << 20).unwrap() == bytes);
    assert_eq!(hub.compare(FILE).unwrap(), Compared::Right);
}

#[test]
fn damage_on_the_disk_is_a_miss() {
    let bytes = content(1 << 20, 11);
    let objects = MemoryObjects::new([("a.bin", bytes.clone())]);
    let dir = tempfile::tempdir().unwrap();
    let first = cache(dir.path(), None);
    read(&*objects.source(&first, LONG), 0, 1 << 20).unwrap();
    let entry = first.list().unwrap().remove(0);
    let data = fs::File::options().write(true).open(entry.join("data")).unwrap();
    data.write_all_at(&vec![0; 50_000], 300_000).unwrap();
    drop(first);
    let second = cache(dir.path(), None);
    let source = objects.source(&second, LONG);
    assert!(read(&*source, 0, 1 << 20).unwrap() == bytes);
    let bad = count(&*source, |counters| counters.bad_blocks.load(Ordering::Relaxed));
    assert_eq!(bad, 349_999 / BLOCK_BYTES - 300_000 / BLOCK_BYTES + 1);
    let known = KnownDigest::Sha256(hex(&bytes));
    assert_eq!(digest_of(&second.existing(&entry).unwrap(), &known).unwrap().unwrap(), known.hex());
}
