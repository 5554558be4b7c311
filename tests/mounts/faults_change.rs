//! A source that is overwritten in place while clients read files derived from it, in every possible way. Once the change was
//! noticed, no read returns new bytes as good, and every later read fails.
//!
//! One case cannot be excluded; it is counted and printed. A read in progress when the first new byte was written may return new
//! bytes. `CKFS_TEST_ROUNDS=20 cargo test --release --test mounts faults_change -- --nocapture` measures how often.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests are tests too, and print numbers")]

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::{FileExt, OpenOptionsExt},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::faulty::can_mount;
use ckfs::{format::safetensors::write_header, tensor::DType};
use memmap2::{Mmap, MmapMut};
use nix::mount::{MntFlags, umount2};
use serde_json::Value;

const BYTES: usize = 16 << 20;
const READ_BYTES: usize = 1 << 20;
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;
const SOON: Duration = Duration::from_mins(3);
const FILE: &str = "model.safetensors";

fn write_repo(dir: &Path) {
    let extents = [1024, BYTES as u64 / 2048];
    let rows = ["alpha.weight", "beta.weight"].map(|name| (name, DType::BF16, extents.as_slice()));
    let mut bytes = write_header(rows, &[], 8).unwrap().bytes;
    bytes.resize(bytes.len() + 2 * BYTES, OLD);
    fs::write(dir.join(FILE), bytes).unwrap();
    fs::write(dir.join("config.json"), "{\"model_type\": \"none of those known\"}").unwrap();
}

struct Mount {
    child: Child,
    mnt: PathBuf,
}

impl Mount {
    fn new(base: &Path, name: &str, flags: &[&str]) -> Self {
        let mnt = base.join(name);
        fs::create_dir(&mnt).unwrap();
        let log = File::create(base.join(format!("{name}.log"))).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env_remove("CKFS_LOG").arg("mount").arg(base.join("repo")).arg(&mnt).arg("--foreground").args(flags);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut mount = Self { child, mnt };
        until("the mount answers", || {
            assert_eq!(mount.child.try_wait().unwrap(), None);
            mount.path(".ckfs/stats.json").exists()
        });
        mount
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mnt.join(name)
    }

    fn stat(&self, name: &str) -> u64 {
        let stats: Value = serde_json::from_slice(&fs::read(self.path(".ckfs/stats.json")).unwrap()).unwrap();
        stats[name].as_u64().unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = umount2(&self.mnt, MntFlags::MNT_DETACH);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Results of reads.
#[derive(Debug, Default)]
struct Seen {
    old: AtomicU64,
    new: AtomicU64,
    failed: AtomicU64,
}

/// One way to read, repeated in a thread of its own.
struct Reader {
    name: &'static str,
    path: PathBuf,
    flags: i32,
    reopens: bool,
    seen: Arc<Seen>,
}

impl Reader {
    fn new(mount: &Mount, name: &'static str, path: &str, flags: i32, reopens: bool) -> Self {
        Self { name, path: mount.path(path), flags, reopens, seen: Arc::default() }
    }

    fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(self.flags).open(&self.path)
    }

    /// One pass over the file; returns the error that ended it.
    fn pass(&self, file: &File, buffer: &mut MmapMut) -> io::Result<()> {
        for at in (0..BYTES).step_by(READ_BYTES) {
            let read = file.read_exact_at(buffer, at as u64).inspect_err(|error| {
                assert_eq!(error.raw_os_error(), Some(libc::EIO), "{}", self.name);
                self.seen.failed.fetch_add(1, Ordering::Relaxed);
            });
            read?;
            // Bytes of headers and cast values are neither old nor new.
            let new: usize = buffer.iter().map(|byte| usize::from(*byte == NEW)).sum();
            let counter = if new > 4096 { &self.seen.new } else { &self.seen.old };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn run(&self, file: io::Result<File>, ended: &AtomicBool) {
        let mut buffer = MmapMut::map_anon(READ_BYTES).unwrap();
        let mut file = file.unwrap();
        while !ended.load(Ordering::Relaxed) {
            let failed = self.pass(&file, &mut buffer).is_err();
            if self.reopens && !failed {
                match self.open() {
                    Ok(opened) => file = opened,
                    Err(_) => {
                        self.seen.failed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            if failed {
                thread::sleep(Duration::from_millis(2));
            }
        }
    }

    /// Waits until a read fails, and then asserts that each one does, through old and new descriptors.
    fn must_fail(&self, file: &File) {
        let mut buffer = MmapMut::map_anon(READ_BYTES).unwrap();
        until(self.name, || self.pass(file, &mut buffer).is_err());
        for at in (0..BYTES).step_by(READ_BYTES) {
            let read = file.read_exact_at(&mut buffer, at as u64);
            assert_eq!(read.err().and_then(|error| error.raw_os_error()), Some(libc::EIO), "{} at {at}", self.name);
        }
        self.open_must_fail();
    }

    fn open_must_fail(&self) {
        assert_eq!(self.open().err().and_then(|error| error.raw_os_error()), Some(libc::EIO), "{}", self.name);
    }
}

/// Reads a file in a process of its own, before and after a change: see [`reading_process`].
struct Process {
    child: Child,
    go: ChildStdin,
}

impl Process {
    fn new(path: &Path, how: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "faults_change::reading_process", "--ignored", "--nocapture"]);
        command.env("CKFS_TEST_FILE", path).env("CKFS_TEST_HOW", how).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("has read")), "{how}");
        let go = child.stdin.take().unwrap();
        // The test may end without waiting for the process, which must never find the pipe full.
        thread::spawn(move || lines.for_each(drop));
        Self { child, go }
    }

    /// Its end after a second read: its exit code, or the negative number of a signal.
    fn end(mut self) -> i32 {
        self.go.write_all(b"go\n").unwrap();
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| -status.signal().unwrap())
    }
}

#[test]
#[ignore = "run by the other test as one of several processes"]
fn reading_process() {
    let (Some(path), Ok(how)) = (env::var_os("CKFS_TEST_FILE"), env::var("CKFS_TEST_HOW")) else { return };
    let file = File::open(path).unwrap();
    let old = |bytes: &[u8]| bytes.iter().all(|byte| *byte == OLD);
    let read = || {
        let mut bytes = vec![0; BYTES];
        file.read_exact_at(&mut bytes, 0).map(|()| old(&bytes))
    };
    let map = (how == "map").then(|| {
        #[expect(unsafe_code, reason = "the test changes the file on purpose")]
        // SAFETY: the code only reads the bytes, one by one; a missing page ends this process, as it should.
        let map = unsafe { Mmap::map(&file).unwrap() };
        map
    });
    assert!(map.as_deref().map_or_else(|| read().unwrap(), old));
    println_to_parent();
    io::stdin().read_exact(&mut [0; 3]).unwrap();
    let code = match map {
        Some(map) => i32::from(!old(&map)),
        None => read().map_or_else(|error| error.raw_os_error().unwrap_or(-1), |old| i32::from(!old)),
    };
    std::process::exit(100 + code);
}

fn println_to_parent() {
    io::stdout().write_all(b"has read\n").unwrap();
    io::stdout().flush().unwrap();
}

/// Overwrites the tensors in place.
fn overwrite(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let block = vec![NEW; 1 << 20];
    for at in (len - 2 * BYTES..len).step_by(block.len()) {
        file.write_all_at(&block, at as u64).unwrap();
    }
}

/// One round; returns the number of reads, and of those with new bytes, for the ways where that is possible.
fn round() -> (u64, u64) {
    let base = tempfile::tempdir().unwrap();
    let repo = base.path().join("repo");
    fs::create_dir(&repo).unwrap();
    write_repo(&repo);
    let copies = base.path().join("copies");
    fs::create_dir(&copies).unwrap();
    let mount = |name, flags: &[&str]| Mount::new(base.path(), name, flags);
    let plain = mount("plain", &["--materialize", "none"]);
    let without = mount("without", &["--materialize", "none", "--no-passthrough"]);
    let direct = mount("direct", &["--materialize", "none", "--direct-io"]);
    let tiles = mount("tiles", &["--materialize", "none", "--dtype", "f32"]);
    let whole = mount("memory", &["--materialize", "memory"]);
    let copied = mount("copied", &["--materialize", copies.to_str().unwrap()]);

    let hf = format!("hf/{FILE}");
    let readers = [
        Reader::new(&plain, "page cache", "full/alpha", 0, false),
        Reader::new(&plain, "O_DIRECT", "dev0/alpha", libc::O_DIRECT, false),
        Reader::new(&plain, "reopened", "full/beta", 0, true),
        Reader::new(&without, "page cache, no passthrough", &hf, 0, false),
        Reader::new(&without, "O_DIRECT, no passthrough", "full/alpha", libc::O_DIRECT, false),
        Reader::new(&direct, "--direct-io", "full/alpha", 0, false),
        Reader::new(&tiles, "tiles", "full/alpha", 0, false),
        Reader::new(&tiles, "tiles, reopened", "full/beta", 0, true),
    ];
    let passed = Reader::new(&plain, "passthrough", &hf, 0, false);
    let made = Reader::new(&whole, "materialized", "full/alpha", 0, false);
    let copy = Reader::new(&copied, "materialized on disk", "full/alpha", 0, false);
    let mut buffer = MmapMut::map_anon(READ_BYTES).unwrap();
    let (passed_file, made_file) = (passed.open().unwrap(), made.open().unwrap());
    passed.pass(&passed_file, &mut buffer).unwrap();
    made.pass(&made_file, &mut buffer).unwrap();
    drop(Reader::open(&made).unwrap());
    Reader::pass(&copy, &copy.open().unwrap(), &mut buffer).unwrap();
    until("a file is materialized", || copied.stat("materialized_files") == 1);
    let copy_file = copy.open().unwrap();
    copy.pass(&copy_file, &mut buffer).unwrap();
    let maps = [&plain, &without].map(|mount| Process::new(&mount.path("full/beta"), "map"));
    let others = [&plain, &direct].map(|mount| Process::new(&mount.path("full/beta"), "read"));
    let idle = whole.path("full/beta");
    drop(fs::read(&idle).unwrap());

    let files: Vec<File> = readers.iter().map(|reader| reader.open().unwrap()).collect();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for (reader, file) in readers.iter().zip(&files) {
            let (file, ended) = (file.try_clone(), &ended);
            scope.spawn(move || reader.run(file, ended));
        }
        until("all have read", || readers.iter().all(|reader| reader.seen.old.load(Ordering::Relaxed) > 16));
        overwrite(&repo.join(FILE));
        let mounts = [&plain, &without, &direct, &tiles, &whole, &copied];
        // The watcher reports the last ones.
        until("the change is noticed", || mounts.iter().all(|mount| mount.stat("poisoned_sources") >= 1));
        until("all fail", || readers.iter().all(|reader| reader.seen.failed.load(Ordering::Relaxed) > 0));
        ended.store(true, Ordering::Relaxed);
    });
    let sum = |counter: &dyn Fn(&Seen) -> &AtomicU64| -> u64 {
        readers.iter().map(|reader| counter(&reader.seen).load(Ordering::Relaxed)).sum()
    };
    let numbers = (sum(&|seen| &seen.old) + sum(&|seen| &seen.new), sum(&|seen| &seen.new));
    for (reader, file) in readers.iter().zip(&files) {
        reader.must_fail(file);
    }
    for reader in readers.iter().filter(|reader| reader.seen.new.load(Ordering::Relaxed) > 0) {
        eprintln!("{}: {:?}", reader.name, reader.seen);
    }
    // Programs with these files open still see the bytes of the mount; no other can open them.
    for (reader, file) in [(&made, &made_file), (&copy, &copy_file)] {
        reader.pass(file, &mut buffer).unwrap();
        assert_eq!(reader.seen.new.load(Ordering::Relaxed), 0, "{}", reader.name);
        reader.open_must_fail();
    }
    passed.open_must_fail();
    assert_eq!(File::open(&idle).err().and_then(|error| error.raw_os_error()), Some(libc::EIO), "idle in memory");
    for process in maps {
        assert_eq!(process.end(), -libc::SIGBUS, "a map shows nothing any more");
    }
    for process in others {
        assert_eq!(process.end(), 100 + libc::EIO);
    }
    numbers
}

#[test]
fn new_bytes_are_never_good_once_the_change_was_noticed() {
    if !can_mount() {
        return;
    }
    let rounds = env::var("CKFS_TEST_ROUNDS").map_or(1, |text| text.parse().unwrap());
    let (mut reads, mut new) = (0, 0);
    for _ in 0..rounds {
        let numbers = round();
        (reads, new) = (reads + numbers.0, new + numbers.1);
    }
    eprintln!("{new} of {reads} reads of 1 MiB around the change gave new bytes, in {rounds} rounds");
}
