//! The disk cache against a model: whatever two processes read, evict, reopen and damage in whatever order, each read has the bytes
//! of the object, and what the cache keeps is right. Also when a process is killed in the middle of a fetch.
//!
//! A wrong answer here would be a hole or an old block taken for data, which nobody would notice later.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    env,
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, LazyLock, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::common::objects::{MemoryObjects, Mishap, cache};
use ckfs::source::{
    ByteSpan, FileId, Served, Source,
    remote::{
        Failure,
        cache::{BLOCK_BYTES, Cache, usage},
    },
};
use proptest::prelude::*;

const LONG: Duration = Duration::from_mins(1);
/// Sizes of the objects: three segments, and less than one.
const SIZES: [u64; 2] = [(40 << 20) + 11, (1 << 20) + 7];
/// Room for half of them.
const CAP_BYTES: u64 = 24 << 20;
/// Two processes may each write this much after they have measured the disk at the same time.
const SLACK_BYTES: u64 = 4 << 20;

/// The content of an object. Never zero: a hole must show.
fn content(len: u64, seed: u64) -> Vec<u8> {
    let word = |place: u64| (place ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..len).map(|place| word(place / 8)[usize::try_from(place % 8).unwrap()] | 1).collect()
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

static CONTENTS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| [content(SIZES[0], 1), content(SIZES[1], 2)]);

fn objects() -> Arc<MemoryObjects> {
    MemoryObjects::new([("large.bin", CONTENTS[0].clone()), ("small.bin", CONTENTS[1].clone())])
}

/// How bytes are read.
#[derive(Clone, Copy, Debug)]
enum Way {
    Copy,
    Map,
    Kernel,
    /// Every third stretch of some KiB, as a strided shard.
    Parts,
}

/// What is damaged while no process has the cache open.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Data,
    Map,
    MapLength,
    Meta,
}

/// A step of the model.
#[derive(Clone, Debug)]
enum Step {
    Read {
        process: usize,
        file: usize,
        place: f64,
        len: u64,
        way: Way,
    },
    Ahead {
        process: usize,
        file: usize,
        place: f64,
        len: u64,
    },
    /// The process gives up what it does not use.
    Trim {
        process: usize,
    },
    /// The process ends and another begins.
    Reopen {
        process: usize,
    },
    /// Both processes end, and bytes change on disk.
    Damage {
        file: usize,
        place: f64,
        len: u64,
        what: Damage,
    },
    /// The next request goes wrong.
    Mishap(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let file = prop_oneof![4 => Just(0_usize), 1 => Just(1_usize)];
    let at = (0..2_usize, file, 0.0..1.0_f64, prop_oneof![1..100_000_u64, 1..4_000_000_u64]);
    let way = prop_oneof![Just(Way::Copy), Just(Way::Map), Just(Way::Kernel), Just(Way::Parts)];
    let what = prop_oneof![2 => Just(Damage::Data), 2 => Just(Damage::Map), 1 => Just(Damage::MapLength), 1 => Just(Damage::Meta)];
    prop_oneof![
        24 => (at.clone(), way).prop_map(|((process, file, place, len), way)| Step::Read { process, file, place, len, way }),
        4 => at.clone().prop_map(|(process, file, place, len)| Step::Ahead { process, file, place, len }),
        2 => (0..2_usize).prop_map(|process| Step::Trim { process }),
        2 => (0..2_usize).prop_map(|process| Step::Reopen { process }),
        1 => (at, what).prop_map(|((_, file, place, len), what)| Step::Damage { file, place, len, what }),
        3 => (0..900_000_u64).prop_map(Step::Mishap),
    ]
}

/// The span of a file that begins at a part of it.
fn span_at(file: usize, place: f64, len: u64) -> ByteSpan {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "any place will do"
    )]
    let start = (SIZES[file] as f64 * place) as u64;
    ByteSpan::new(start, (start + len).min(SIZES[file])).unwrap()
}

/// A cache and the source that uses it.
type Opened = (Arc<Cache>, Arc<dyn Source>);

/// Two processes, as far as locks can tell: those belong to open files.
struct Processes {
    dir: tempfile::TempDir,
    objects: Arc<MemoryObjects>,
    open: [Option<Opened>; 2],
}

impl Processes {
    fn start(&mut self, process: usize) {
        let cache = cache(self.dir.path(), Some(CAP_BYTES));
        let source = self.objects.source(&cache, LONG);
        self.open[process] = Some((cache, source));
    }

    /// Ends a process. Requests that no reader waits for end some time after their source: until then they hold the entries.
    fn stop(&mut self, process: usize) {
        let Some((cache, source)) = self.open[process].take() else { return };
        let used = Arc::downgrade(&cache);
        drop((cache, source));
        let started = Instant::now();
        while used.strong_count() > 0 {
            assert!(started.elapsed() < LONG, "a source that was closed still fetches");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn source(&self, process: usize) -> &dyn Source {
        &*self.open[process].as_ref().unwrap().1
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Read { process, file, place, len, way } => {
                read_right(self.source(process), file, span_at(file, place, len), way);
            }
            Step::Ahead { process, file, place, len } => {
                let remote = self.source(process).remote().unwrap();
                remote.prefetch(FileId(u32::try_from(file).unwrap()), &[span_at(file, place, len)]);
            }
            Step::Trim { process } => {
                self.source(process).maps().unwrap().trim();
                self.open[process].as_ref().unwrap().0.trim(0);
            }
            Step::Reopen { process } => {
                self.stop(process);
                self.start(process);
            }
            Step::Damage { file, place, len, what } => {
                self.stop(0);
                self.stop(1);
                damage(self.dir.path(), file, span_at(file, place, len), what);
                self.start(0);
                self.start(1);
            }
            Step::Mishap(len) => {
                let busy = Failure::Busy(Some(Duration::from_millis(2)));
                let mishap = if len % 3 == 0 { Mishap::Fails(busy) } else { Mishap::CutAfter(len) };
                self.objects.mishaps.lock().unwrap().push(mishap);
            }
        }
    }
}

/// Reads a span and compares it with the object.
fn read_right(source: &dyn Source, place: usize, span: ByteSpan, way: Way) {
    let file = FileId(u32::try_from(place).unwrap());
    let expected = &CONTENTS[place][size(span.start())..size(span.end())];
    let right = |found: &[u8]| assert!(found == expected, "{span} of file {place}, {way:?}");
    let copied = || {
        let mut found = vec![0; expected.len()];
        source.read_into(file, span.start(), &mut found).unwrap();
        right(&found);
    };
    match (way, source.maps_of(file)) {
        (Way::Map, Some(maps)) => maps.with(file, span, &mut |found| right(found)).unwrap().unwrap(),
        (Way::Kernel, Some(maps)) => {
            let mut found = None;
            let mut reply = |bytes: ckfs::source::KernelBytes<'_>| {
                found = Some(Served::Kernel(bytes).to_vec().unwrap());
                ckfs::source::Replied::new()
            };
            match maps.with_kernel_bytes(file, span, &mut reply) {
                Some(result) => {
                    result.map(drop).unwrap();
                    right(&found.unwrap());
                }
                None => copied(),
            }
        }
        (Way::Parts, Some(maps)) => {
            const STEP: u64 = 9000;
            let starts = (span.start()..span.end()).step_by(size(3 * STEP));
            let parts: Vec<_> =
                starts.map(|start| ByteSpan::new(start, (start + STEP).min(span.end())).unwrap()).collect();
            let look = &mut |found: &[u8]| {
                for part in &parts {
                    let (from, to) = (size(part.start() - span.start()), size(part.end() - span.start()));
                    assert!(found[from..to] == expected[from..to], "{part} of file {place}, in parts");
                }
            };
            maps.with_parts(file, span, &parts, look).unwrap().unwrap();
        }
        (_, _) => copied(),
    }
}

/// Changes bytes of the entry of a file.
fn damage(dir: &Path, file: usize, span: ByteSpan, what: Damage) {
    let of_file = |entry: &Path| fs::metadata(entry.join("data")).is_ok_and(|found| found.len() == SIZES[file]);
    let entries = fs::read_dir(dir.join("objects")).unwrap().map(|entry| entry.unwrap().path());
    for entry in entries.filter(|entry| of_file(entry)) {
        let open = |name| File::options().write(true).open(entry.join(name)).unwrap();
        let junk = vec![0x5A; size(span.len())];
        match what {
            Damage::Data => open("data").write_all_at(&junk, span.start()).unwrap(),
            Damage::Map => {
                // Zeros, as a file system may leave, and marks of blocks that are not there.
                let words = size(span.len() / BLOCK_BYTES + 1) * 8;
                let at = 4096 + span.start() / BLOCK_BYTES * 8;
                let mark = [1, 2, 3, 4, 0x45, 0x53, 0x52, 0x50].repeat(words / 8);
                let end = fs::metadata(entry.join("map")).unwrap().len();
                let words = words.min(size(end - at));
                let bytes = if span.len().is_multiple_of(2) { vec![0; words] } else { mark[..words].to_vec() };
                open("map").write_all_at(&bytes, at).unwrap();
            }
            Damage::MapLength => open("map").set_len(5000).unwrap(),
            Damage::Meta => open("meta.json").set_len(span.start() % 40).unwrap(),
        }
    }
}

/// Every block that the cache calls present has the bytes of its object.
fn check_kept(cache: &Cache) {
    for dir in cache.list().unwrap() {
        let entry = cache.existing(&dir).unwrap();
        let expected = CONTENTS.iter().find(|bytes| bytes.len() as u64 == entry.size_bytes).unwrap();
        let all = 0..entry.block_count();
        let _guards = entry.guard(&all).unwrap();
        let missing = entry.missing(&all).unwrap();
        for block in all.filter(|block| !missing.iter().any(|range| range.contains(block))) {
            let span = entry.span_of(&(block..block + 1));
            let mut found = vec![0; size(span.len())];
            entry.data.read_exact_at(&mut found, span.start()).unwrap();
            assert!(found == expected[size(span.start())..size(span.end())], "block {block}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn two_processes_read_what_the_objects_hold(steps in prop::collection::vec(any_step(), 60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut processes = Processes { dir, objects: objects(), open: [None, None] };
        processes.start(0);
        processes.start(1);
        for step in &steps {
            processes.run(step);
        }
        processes.objects.mishaps.lock().unwrap().clear();
        let used = processes.open[0].as_ref().unwrap().0.limit().unwrap().used_bytes;
        prop_assert!(used <= CAP_BYTES + SLACK_BYTES, "{} bytes of disk", used);
        processes.stop(0);
        processes.stop(1);
        check_kept(&cache(processes.dir.path(), None));
    }
}

/// Directory of the cache of the process that is killed.
const CHILD: &str = "CKFS_TEST_CHILD_CACHE";

/// Not a test by itself: it is the process that `complete_blocks_outlive_a_killed_process` starts and kills.
#[test]
fn child_that_fetches() {
    let Some(dir) = env::var_os(CHILD) else { return };
    let objects = objects();
    *objects.latency.lock().unwrap() = Duration::from_millis(10);
    let source = objects.source(&cache(Path::new(&dir), None), LONG);
    thread::scope(|scope| {
        for quarter in 0..4 {
            let source = &source;
            scope.spawn(move || {
                let quarter_bytes = SIZES[0] / 4;
                let mut bytes = vec![0; 300_000];
                for start in (quarter * quarter_bytes..(quarter + 1) * quarter_bytes - 300_000).step_by(250_000) {
                    source.read_into(FileId(0), start, &mut bytes).unwrap();
                }
            });
        }
    });
}

#[test]
fn complete_blocks_outlive_a_killed_process() {
    let dir = tempfile::tempdir().unwrap();
    let present = |cache: &Cache| -> u64 {
        cache.list().unwrap().iter().map(|dir| cache.existing(dir).unwrap().present_bytes().unwrap()).sum()
    };
    let on_disk = || -> u64 {
        let entries = fs::read_dir(dir.path().join("objects")).into_iter().flatten();
        entries.map(|entry| usage(&entry.unwrap().path()).1).sum()
    };
    let mut before = 0;
    for _ in 0..3 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "remote_model::child_that_fetches"])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (begun, wanted) = (Instant::now(), on_disk() + (5 << 20));
        while on_disk() < wanted && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LONG, "the other process fetches nothing");
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = cache(dir.path(), None);
        let now = present(&cache);
        assert!(now > before && now < SIZES[0], "killed in the middle: {now} bytes after {before}");
        check_kept(&cache);
        assert_eq!(cache.counters().bad_blocks.load(Ordering::Relaxed), 0, "a block counts only after its bytes");
        before = now;
    }
    let objects = objects();
    let source = objects.source(&cache(dir.path(), None), LONG);
    read_right(&*source, 0, ByteSpan::new(0, SIZES[0]).unwrap(), Way::Copy);
    assert_eq!(objects.bytes.load(Ordering::Relaxed), SIZES[0] - before, "what was complete is not fetched again");
}
