//! Real mounts of a file system that misbehaves on purpose.
//!
//! These tests protect the host: a daemon that dies with files open leaves processes that cannot be killed, and a daemon
//! that unmounts a foreign mount removes another user's data. Each test serves in a process of its own, started as
//! `ckfs mount` starts its daemon: this binary runs itself with the test `serving_process`, which does nothing otherwise.
//!
//! Tests that cannot run without `/dev/fuse`, `fusermount3` or root report that they are skipped; where `CI=true` they
//! fail.

#![allow(unsafe_code)]
// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::wildcard_enum_match_arm)]

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::{
        fs::{FileExt, MetadataExt, OpenOptionsExt},
        net::UnixDatagram,
    },
    path::{Path, PathBuf},
    process::{self, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::double::{DATA_BYTES, Double, MANY, byte_at, data};
use ckfs::fuse::{
    DaemonError, Exit, FS_TYPE, MountEntry, MountOptions, Readiness, UnmountError, UnmountOptions, block_signals,
    ckfs_mounts, serve, start_background, unmount,
};
use ckfs::host::{Log, LogTarget};
use memmap2::Mmap;
use nix::{
    mount::{MntFlags, MsFlags, umount2},
    sys::{
        signal::{SigSet, Signal, kill},
        stat::Mode,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getegid, geteuid},
};
use rustix::fs::{AtFlags, CWD, FallocateFlags, RenameFlags, XattrFlags};

/// Time limit for anything that should happen soon.
const SOON: Duration = Duration::from_mins(3);

// --- the serving process ---

/// Options of the serving process, passed as one argument that libtest treats as a name filter.
#[derive(Clone, Debug)]
struct Config {
    threads: usize,
    grace_ms: u64,
    drain_ms: u64,
    passthrough: bool,
}

const CONFIG: Config = Config { threads: 2, grace_ms: 300, drain_ms: 60_000, passthrough: true };

const MARK: &str = "serve:";

fn exit_code(exit: Exit) -> i32 {
    match exit {
        Exit::Unmounted => 0,
        Exit::Drained => 10,
        Exit::UnmountedOutside => 11,
        Exit::Aborted => 12,
        Exit::Left => 13,
        Exit::AbortedOutside => 14,
        Exit::Replaced => 15,
        Exit::Kept => 16,
    }
}

#[test]
#[ignore = "run by the other tests as their daemon"]
fn serving_process() {
    let Some(config) = env::args().find_map(|arg| arg.strip_prefix(MARK).map(str::to_owned)) else { return };
    let [base, threads, grace, drain, passthrough] = config.split('|').collect::<Vec<_>>()[..] else {
        panic!("{config}");
    };
    let base = Path::new(base);
    block_signals().unwrap();
    let log = Log::start(LogTarget::stderr());
    log.take_panics();
    let mut readiness = Readiness::new(&log, Some(&base.join("log")), &base.join("mnt")).unwrap();
    tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(log.clone()).init();
    let options = MountOptions {
        name: "double of a repo".into(),
        threads: Some(threads.parse().unwrap()),
        grace: Duration::from_millis(grace.parse().unwrap()),
        drain: Duration::from_millis(drain.parse().unwrap()),
        passthrough: passthrough == "true",
        ..MountOptions::default()
    };
    let fs = Arc::new(Double::new(File::open(base.join("backing")).ok()));
    let result = serve(fs, &base.join("mnt"), &options, &log, || readiness.ready("serving", "2 devices").unwrap());
    log.finish();
    match result {
        Ok(exit) => process::exit(exit_code(exit)),
        Err(error) => {
            readiness.failed(&error.to_string());
            eprintln!("{error}");
            process::exit(1);
        }
    }
}

// --- shared by the tests ---

/// A directory with a mountpoint, and the daemons that serve it. Dropping it leaves neither mounts nor processes.
struct Bench {
    base: tempfile::TempDir,
    daemons: Vec<Pid>,
}

/// Prints why a test cannot run, and fails where all must.
fn skip(missing: &str) {
    assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "cannot test: {missing}");
    eprintln!("skipped: {missing}");
}

/// `None` where nothing can be mounted.
fn bench() -> Option<Bench> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/fuse") {
        skip(&format!("/dev/fuse: {error}"));
        return None;
    }
    if !geteuid().is_root()
        && let Err(error) = Command::new("fusermount3").arg("--version").output()
    {
        skip(&format!("fusermount3: {error}"));
        return None;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    Some(Bench { base, daemons: Vec::new() })
}

/// A bench for tests that mount and unmount by themselves.
fn root_bench() -> Option<Bench> {
    if !geteuid().is_root() {
        skip("not root");
        return None;
    }
    bench()
}

impl Bench {
    fn mnt(&self) -> PathBuf {
        self.base.path().join("mnt")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.mnt().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.base.path().join("log")).unwrap_or_default()
    }

    /// Waits for a line, since it is written after the request was answered.
    fn logs(&self, text: &str) {
        until(&format!("{text:?} is logged"), || self.log().contains(text));
    }

    fn start(&mut self) -> Pid {
        self.start_with(&CONFIG)
    }

    fn start_with(&mut self, config: &Config) -> Pid {
        self.try_start(config).unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    fn args(&self, config: &Config) -> [OsString; 5] {
        let Config { threads, grace_ms, drain_ms, passthrough } = config;
        let base = self.base.path().display();
        let config = format!("{MARK}{base}|{threads}|{grace_ms}|{drain_ms}|{passthrough}");
        ["--exact", "mount::serving_process", "--ignored", "--nocapture", &config].map(OsString::from)
    }

    fn try_start(&mut self, config: &Config) -> Result<Pid, DaemonError> {
        let args = self.args(config);
        let start = || start_background(&env::current_exe().unwrap(), &args, &self.mnt(), Duration::from_secs(30));
        let pid = Pid::from_raw(i32::try_from(with_signals_blocked(start)?.pid).unwrap());
        self.daemons.push(pid);
        Ok(pid)
    }

    /// Our mounts on the mountpoint.
    fn mounts(&self) -> Vec<MountEntry> {
        let mnt = self.mnt();
        ckfs_mounts().into_iter().filter(|entry| entry.mountpoint == mnt).collect()
    }

    /// A counter of the file system.
    fn stat(&self, name: &str) -> u64 {
        let stats = fs::read_to_string(self.file("stats")).unwrap();
        let value = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("{name} in {stats}")).parse().unwrap()
    }

    /// Waits for the end of a daemon; its exit code.
    fn end_of(&mut self, pid: Pid) -> i32 {
        let mut status = WaitStatus::StillAlive;
        until("the daemon ends", || {
            status = waitpid(pid, Some(WaitPidFlag::WNOHANG)).unwrap();
            status != WaitStatus::StillAlive
        });
        self.daemons.retain(|daemon| *daemon != pid);
        match status {
            WaitStatus::Exited(_, code) => code,
            WaitStatus::Signaled(_, signal, _) => -(signal as i32),
            _ => panic!("{status:?}"),
        }
    }

    /// Ends a daemon by a signal and expects that it was not kept busy for long: a process that another
    /// test starts has our open files until its `exec`, including those that we close meanwhile.
    fn stop(&mut self, pid: Pid) {
        kill(pid, Signal::SIGTERM).unwrap();
        let code = self.end_of(pid);
        let freed = code == exit_code(Exit::Drained) && !self.log().contains("detaching");
        assert!(code == exit_code(Exit::Unmounted) || freed, "{code}: {}", self.log());
        assert_eq!(self.mounts(), []);
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for pid in &self.daemons {
            let _ = kill(*pid, Signal::SIGKILL);
            let _ = waitpid(*pid, None);
        }
        // Any mount found there was made by this test.
        for _ in 0..8 {
            let result = umount2(&self.mnt(), MntFlags::MNT_DETACH);
            if result == Err(nix::errno::Errno::EPERM) {
                let _ = Command::new("fusermount3").args(["-uzq", "--"]).arg(self.mnt()).output();
            }
            if result.is_err() {
                break;
            }
        }
        if thread::panicking() {
            eprintln!("log of the daemons:\n{}", self.log());
        }
    }
}

/// Starts a process whose signals are blocked from the start: libtest has a thread before the test runs, which must block
/// them too.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    let before = SigSet::thread_get_mask().unwrap();
    block_signals().unwrap();
    let result = start();
    before.thread_set_mask().unwrap();
    result
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

fn mount_tmpfs(on: &Path) {
    nix::mount::mount(Some("t"), on, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
}

/// Threads beside the requested ones: one that takes over when all others wait for storage.
const SPARE_THREADS: usize = 1;

fn threads_of(pid: Pid) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.filter(|name| name.starts_with("fuser-")).count()
}

fn map(file: &File) -> Mmap {
    // SAFETY: the files of a mount never change; should the daemon die, a read through the map raises SIGBUS, which ends
    // the test as it should.
    unsafe { Mmap::map(file) }.unwrap()
}

// --- reading ---

#[test]
fn mounts_with_its_own_type_and_answers_all_questions() {
    let Some(mut bench) = bench() else { return };
    fs::write(bench.mnt().join("hidden"), "").unwrap();
    let pid = bench.start();
    let [entry] = &bench.mounts()[..] else { panic!("one mount expected: {:?}", bench.mounts()) };
    assert_eq!((entry.fs_type.as_str(), entry.source.to_str()), (FS_TYPE, Some("ckfs:double_of_a_repo")));
    let options: Vec<_> = entry.options.split(',').collect();
    assert!(["ro", "nosuid", "nodev", "noatime"].iter().all(|option| options.contains(option)), "{options:?}");

    let metadata = fs::metadata(bench.file("data")).unwrap();
    assert_eq!(metadata.len(), DATA_BYTES as u64);
    assert_eq!((metadata.mode(), metadata.nlink(), metadata.blksize()), (0o100_444, 1, 1 << 20));
    assert_eq!(metadata.blocks(), DATA_BYTES as u64 / 512);
    assert_eq!((metadata.uid(), metadata.gid()), (geteuid().as_raw(), getegid().as_raw()));
    assert_eq!(metadata.mtime(), 1_700_000_000);
    let root = fs::metadata(bench.mnt()).unwrap();
    assert_eq!((root.mode(), root.nlink(), root.ino()), (0o40_555, 3, 1));
    assert_eq!(fs::read_link(bench.file("link")).unwrap(), Path::new("data"));
    assert_eq!(fs::metadata(bench.file("link")).unwrap().ino(), metadata.ino());
    assert_eq!(fs::read(bench.file("tail")).unwrap(), &data()[..5000]);
    assert!(!bench.file("hidden").exists());

    let sizes = nix::sys::statvfs::statvfs(&bench.mnt()).unwrap();
    assert_eq!(sizes.blocks() * sizes.fragment_size(), (3 * DATA_BYTES as u64 + 1).next_multiple_of(4096));
    assert_eq!((sizes.files(), sizes.blocks_available()), (MANY + 18, 0));

    // Absent names are cached, unless the kernel is short of memory or its caches are dropped.
    let before = bench.stat("lookup");
    for _ in 0..100 {
        assert_eq!(errno(fs::metadata(bench.file("absent"))), libc::ENOENT);
    }
    assert!(bench.stat("lookup") - before < 20);
    bench.stop(pid);
    assert!(bench.file("hidden").exists());
}

#[test]
fn xattrs_are_given() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let ask = |file: &str, args: &[&str]| {
        let script =
            "import os,sys\ntry: print(getattr(os,sys.argv[1])(*sys.argv[2:]))\nexcept OSError as e: print(e.errno)";
        let output =
            Command::new("python3").args(["-c", script, args[0]]).arg(bench.file(file)).args(&args[1..]).output();
        String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
    };
    assert_eq!(ask("data", &["getxattr", "user.ckfs.dtype"]), "b'BF16'");
    assert_eq!(ask("data", &["listxattr"]), "['user.ckfs.dtype', 'user.ckfs.shape']");
    assert_eq!(ask("tail", &["listxattr"]), "[]");
    assert_eq!(ask("data", &["getxattr", "user.other"]), libc::ENODATA.to_string());
    bench.stop(pid);
}

#[test]
fn parallel_readers_get_the_right_bytes() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let expected = data();
    thread::scope(|scope| {
        for reader in 0..8_usize {
            let (bench, expected) = (&bench, &expected);
            scope.spawn(move || {
                let name = ["data", "direct", "backed", "link"][reader % 4];
                let mut file = File::open(bench.file(name)).unwrap();
                let mut whole = Vec::new();
                file.read_to_end(&mut whole).unwrap();
                assert!(whole == *expected, "{name}");
                // Odd offsets and lengths, in a different order for each reader.
                for step in 0..200_usize {
                    let start = (step * 7_919_993 + reader * 104_729) % DATA_BYTES;
                    let len = (step * 40_507) % 300_000 % (DATA_BYTES - start);
                    let mut part = vec![0; len];
                    file.read_exact_at(&mut part, start as u64).unwrap();
                    assert!(part == expected[start..start + len], "{name} at {start}, {len} bytes");
                }
                let mut tail = [0; 100];
                file.seek(SeekFrom::End(-10)).unwrap();
                assert_eq!(file.read(&mut tail).unwrap(), 10);
                assert_eq!(file.read(&mut tail).unwrap(), 0);
            });
        }
    });
    bench.stop(pid);
}

#[test]
fn maps_and_direct_reads_agree() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let expected = data();
    for name in ["data", "direct", "backed"] {
        let file = File::open(bench.file(name)).unwrap();
        assert!(map(&file)[..] == expected[..], "{name} mapped");
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(bench.file(name)).unwrap();
        // An anonymous map has the alignment that O_DIRECT requires.
        let mut buffer = memmap2::MmapMut::map_anon(DATA_BYTES).unwrap();
        let mut done = 0;
        while done < DATA_BYTES {
            done += direct.read_at(&mut buffer[done..], done as u64).unwrap();
        }
        assert!(buffer[..] == expected[..], "{name} with O_DIRECT");
        assert!(File::options().read(true).custom_flags(libc::O_NOATIME).open(bench.file(name)).is_ok());
    }
    bench.stop(pid);
}

#[test]
fn two_threads_serve_parallel_page_faults_of_several_processes() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let args = ["--exact", "faulting_process", "--ignored", "--nocapture"];
    let mut children: Vec<_> = (0..4)
        .map(|seed| {
            let config = format!("fault:{}|{seed}", bench.file("data").display());
            Command::new(env::current_exe().unwrap())
                .args(args)
                .arg(config)
                .stdout(process::Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    bench.stop(pid);
}

#[test]
#[ignore = "run by another test as one of its clients"]
fn faulting_process() {
    let Some(config) = env::args().find_map(|arg| arg.strip_prefix("fault:").map(str::to_owned)) else { return };
    let (path, seed) = config.split_once('|').unwrap();
    let map = map(&File::open(path).unwrap());
    let pages = DATA_BYTES / 4096;
    let start: usize = seed.parse::<usize>().unwrap() * pages / 4;
    thread::scope(|scope| {
        // Odd strides visit each page once, in scattered order.
        for stride in [1, 1_201] {
            let map = &map;
            scope.spawn(move || {
                for step in 0..pages {
                    let offset = (start + step * stride) % pages * 4096 + step % 4096;
                    assert_eq!(map[offset], byte_at(offset), "at {offset}");
                }
            });
        }
    });
}

#[test]
fn lists_ten_thousand_entries() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    for _ in 0..2 {
        let mut entries: Vec<_> = fs::read_dir(bench.file("many")).unwrap().map(Result::unwrap).collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        assert_eq!(entries.len() as u64, MANY);
        for (index, entry) in entries.iter().enumerate() {
            assert_eq!(entry.file_name().to_str().unwrap(), format!("f{index:05}"));
            assert_eq!(entry.metadata().unwrap().len(), 1000 + index as u64);
        }
    }
    // Attributes come with the listing, and the kernel caches both.
    assert!(bench.stat("lookup") < 100);
    assert!(bench.stat("readdirplus") > 0);
    bench.stop(pid);
}

#[test]
fn passthrough_gives_the_bytes_of_the_backing_file() {
    let Some(mut bench) = bench() else { return };
    fs::write(bench.base.path().join("backing"), data()).unwrap();
    let pid = bench.start();
    let before = bench.stat("read");
    let first = File::open(bench.file("backed")).unwrap();
    let second = File::open(bench.file("backed")).unwrap();
    let mut bytes = vec![0; DATA_BYTES];
    for file in [&first, &second] {
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == data());
    }
    drop(first);
    assert!(map(&second)[..] == bytes[..]);
    drop(second);
    assert!(fs::read(bench.file("backed")).unwrap() == bytes);
    if bench.stat("passthrough") == 0 {
        eprintln!("this kernel did not grant passthrough: {}", bench.log());
    } else {
        assert_eq!(bench.stat("passthrough"), 3);
        // Only the statistics themselves were read from the daemon.
        assert!(bench.stat("read") - before < 10);
    }
    bench.stop(pid);
    // The same files without passthrough.
    let pid = bench.start_with(&Config { passthrough: false, ..CONFIG });
    assert!(fs::read(bench.file("backed")).unwrap() == bytes);
    assert_eq!(bench.stat("passthrough"), 0);
    bench.stop(pid);
}

#[test]
fn an_open_waits_until_its_file_is_materialized() {
    let Some(mut bench) = bench() else { return };
    fs::write(bench.base.path().join("backing"), data()).unwrap();
    let pid = bench.start();
    for (name, grants) in [("materialized", 1), ("not-materialized", 0)] {
        let before = bench.stat("passthrough");
        assert!(fs::read(bench.file(name)).unwrap() == data(), "{name}");
        if bench.stat("passthrough") != 0 {
            assert_eq!(bench.stat("passthrough") - before, grants, "{name}");
        }
    }
    if bench.stat("passthrough") == 0 {
        // Nothing is materialized for a kernel that cannot read the file by itself.
        assert!(fs::read(bench.file("materialize-panics")).unwrap() == data());
    } else {
        for _ in 0..3 {
            assert_eq!(errno(File::open(bench.file("materialize-panics"))), libc::EIO);
            assert_eq!(errno(File::open(bench.file("materialize-forgets"))), libc::EIO);
        }
        // A panic is counted after its reply.
        until("three panics are counted", || bench.stat("panics") == 3);
    }
    assert_eq!(threads_of(pid), 2 + SPARE_THREADS);
    assert!(fs::read(bench.file("data")).unwrap() == data());
    bench.stop(pid);
    let pid = bench.start_with(&Config { passthrough: false, ..CONFIG });
    for name in ["materialized", "materialize-panics", "materialize-forgets"] {
        assert!(fs::read(bench.file(name)).unwrap() == data(), "{name}");
    }
    bench.stop(pid);
}

// --- refusing and failing ---

#[test]
fn nothing_can_be_changed() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start();
    let attempts = |bench: &Bench| {
        let (data, new) = (bench.file("data"), bench.file("new"));
        let open = |options: &mut fs::OpenOptions| errno(options.open(&data));
        for (what, found) in [
            ("write", open(File::options().write(true))),
            ("append", open(File::options().append(true))),
            ("read and write", open(File::options().read(true).write(true))),
            ("truncate", open(File::options().write(true).truncate(true))),
            ("create", errno(File::create(&new))),
            ("unlink", errno(fs::remove_file(&data))),
            ("rmdir", errno(fs::remove_dir(bench.file("many")))),
            ("mkdir", errno(fs::create_dir(&new))),
            ("rename", errno(fs::rename(&data, &new))),
            ("link", errno(fs::hard_link(&data, &new))),
            ("symlink", errno(std::os::unix::fs::symlink("data", &new))),
            ("chmod", errno(fs::set_permissions(&data, fs::metadata(&data).unwrap().permissions()))),
            ("chown", errno(std::os::unix::fs::chown(&data, Some(1), None))),
            ("truncate by path", errno(nix::unistd::truncate(&data, 0).map_err(io::Error::from))),
            ("mkfifo", errno(nix::unistd::mkfifo(&new, Mode::S_IRUSR).map_err(io::Error::from))),
            ("times", errno(set_times(&data))),
            ("set an attribute", errno(set_xattr(&data, "user.ckfs.new", b"1"))),
            ("set an attribute that is there", errno(set_xattr(&data, "user.ckfs.dtype", b"F32"))),
            ("empty an attribute", errno(set_xattr(&data, "user.ckfs.dtype", b""))),
            ("set an attribute of a directory", errno(set_xattr(&bench.mnt(), "user.new", b"1"))),
            ("set an access list", errno(set_xattr(&data, "system.posix_acl_access", &[2, 0, 0, 0]))),
            ("remove an attribute", errno(remove_xattr(&data, "user.ckfs.dtype"))),
            ("remove an attribute that is not there", errno(remove_xattr(&data, "user.absent"))),
            ("exchange files", errno(rename_with(&data, &bench.file("direct"), RenameFlags::EXCHANGE))),
            ("exchange a file and a directory", errno(rename_with(&data, &bench.file("many"), RenameFlags::EXCHANGE))),
            ("rename to a new name", errno(rename_with(&data, &new, RenameFlags::NOREPLACE))),
            ("rename and leave a whiteout", errno(rename_with(&data, &new, RenameFlags::WHITEOUT))),
        ] {
            assert_eq!(found, libc::EROFS, "{what}");
        }
    };
    let unnamed =
        |bench: &Bench| errno(File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open(bench.mnt()));
    attempts(&bench);
    assert_eq!(unnamed(&bench), libc::EROFS);
    assert_eq!(bench.stat("refused"), 0, "the kernel refuses by itself");
    // An administrator may lift the kernel's refusal; ours remains.
    let none = None::<&str>;
    nix::mount::mount(none, &bench.mnt(), none, MsFlags::MS_REMOUNT, none).unwrap();
    attempts(&bench);
    assert!(bench.stat("refused") >= 26);
    // The kernel treats a request that fuser does not know as an unsupported operation.
    assert_eq!(unnamed(&bench), libc::EOPNOTSUPP);
    // Requests that change an open file need one open for writing, and there is none.
    let file = File::open(bench.file("data")).unwrap();
    for (what, found) in [
        ("fallocate", errno(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1).map_err(io::Error::from))),
        (
            "copy_file_range",
            errno(rustix::fs::copy_file_range(&file, None, &file, Some(&mut 4096), 1).map_err(io::Error::from)),
        ),
        ("write", errno(file.write_at(b"x", 0))),
    ] {
        assert_eq!(found, libc::EBADF, "{what}");
    }
    assert_eq!(errno(file.set_len(0)), libc::EINVAL);
    drop(file);
    bench.stop(pid);
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::setxattr(path, name, value, XattrFlags::empty())?)
}

fn remove_xattr(path: &Path, name: &str) -> io::Result<()> {
    Ok(rustix::fs::removexattr(path, name)?)
}

fn rename_with(from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, flags)?)
}

fn set_times(path: &Path) -> io::Result<()> {
    let time = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())?)
}

#[test]
fn long_names_are_distinguished_from_absent_ones() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    for (len, expected) in
        [(255, libc::ENOENT), (256, libc::ENAMETOOLONG), (1000, libc::ENAMETOOLONG), (2000, libc::ENAMETOOLONG)]
    {
        let name = "x".repeat(len);
        assert_eq!(errno(fs::metadata(bench.file(&name))), expected, "{len} bytes");
        assert_eq!(errno(fs::metadata(bench.file("many").join(&name))), expected, "{len} bytes in a directory");
        assert_eq!(errno(File::open(bench.file(&name))), expected, "{len} bytes to open");
    }
    bench.stop(pid);
}

#[test]
fn a_panic_is_an_error_of_its_request_only() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let mut byte = [0];
    for _ in 0..5 {
        let file = File::open(bench.file("panicking")).unwrap();
        assert_eq!(errno(file.read_at(&mut byte, 0)), libc::EIO);
        assert_eq!(errno(fs::metadata(bench.file("panicking-lookup"))), libc::EIO);
    }
    // After the reply no caller can receive an error, but the panic counts.
    assert!(fs::read(bench.file("panicking-late")).unwrap() == data());
    assert!(bench.stat("panics") > 10, "{}", bench.stat("panics"));
    assert_eq!(threads_of(pid), 2 + SPARE_THREADS);
    assert!(fs::read(bench.file("data")).unwrap() == data());
    bench.logs("request handler panicked: read panics");
    bench.stop(pid);
}

#[test]
fn failures_are_errors_and_never_zeros() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let mut buffer = vec![0; 8192];
    for name in ["failing", "short", "silent"] {
        let file = File::open(bench.file(name)).unwrap();
        assert_eq!(errno(file.read_at(&mut buffer, 0)), libc::EIO, "{name}");
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(bench.file(name)).unwrap();
        let mut aligned = memmap2::MmapMut::map_anon(8192).unwrap();
        assert_eq!(errno(direct.read_at(&mut aligned, 0)), libc::EIO, "{name} with O_DIRECT");
    }
    bench.logs("answered a read of");
    bench.logs("left unanswered");
    bench.stop(pid);
}

#[test]
fn a_slow_read_does_not_hold_up_others() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let slow = File::open(bench.file("slow")).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| slow.read_exact_at(&mut [0; 4096], 0).unwrap());
        thread::sleep(Duration::from_millis(50));
        bench.stat("read");
        assert!(!reader.is_finished(), "only after the slow read");
    });
    drop(slow);
    bench.stop(pid);
}

// --- ending ---

#[test]
fn each_ending_signal_unmounts() {
    let Some(mut bench) = bench() else { return };
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT] {
        let pid = bench.start();
        kill(pid, signal).unwrap();
        assert_eq!((bench.end_of(pid), bench.mounts()), (0, vec![]), "{signal}");
    }
}

/// Nobody was cut off, so that it is no failure for whoever waits for the process.
#[test]
fn a_second_signal_after_the_unmount_changes_nothing() {
    let Some(mut bench) = bench() else { return };
    for _ in 0..20 {
        let pid = bench.start();
        kill(pid, Signal::SIGTERM).unwrap();
        until("it is unmounted", || bench.mounts().is_empty());
        kill(pid, Signal::SIGTERM).unwrap();
        bench.stop(pid);
    }
}

#[test]
fn failures_that_repeat_are_one_line_and_a_count() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    for name in ["silent", "panicking"] {
        for _ in 0..50 {
            let file = File::open(bench.file(name)).unwrap();
            assert_eq!(errno(file.read_exact_at(&mut [0; 10], 0)), libc::EIO);
        }
    }
    bench.stop(pid);
    let log = bench.log();
    // Once as it happens, once in the count.
    let unanswered = "ERROR ckfs::service::requests::pending: request was left unanswered";
    assert_eq!((log.matches(unanswered).count(), log.contains(" times in ")), (2, true), "{log}");
    assert_eq!(log.matches("request handler panicked").count(), 2, "{log}");
    // The hook's line names thread and place; the adapter's line names the request.
    let hook = log.lines().find(|line| line.contains(" ERROR ckfs::panic: thread fuser-")).unwrap();
    assert!(hook.contains(" panicked at tests/mounts/double.rs:") && hook.ends_with(": read panics"), "{hook}");
}

#[test]
fn a_foreground_daemon_notifies_systemd() {
    let Some(mut bench) = bench() else { return };
    let path = bench.base.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let next = || {
        let mut buffer = [0; 1000];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    };
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(bench.args(&CONFIG)).env("NOTIFY_SOCKET", &path).stdout(process::Stdio::null());
    let pid = with_signals_blocked(|| command.spawn().map(|child| child.id())).unwrap();
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    bench.daemons.push(pid);
    assert_eq!(next(), "READY=1\nSTATUS=serving\n");
    // The mount answers by now.
    assert!(fs::read(bench.file("data")).unwrap() == data());
    let file = File::open(bench.file("data")).unwrap();
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(next(), "STOPPING=1\n");
    let status = next();
    assert!(status.starts_with("STATUS=busy, held by ") && status.contains(&process::id().to_string()), "{status}");
    drop(file);
    assert_eq!(bench.end_of(pid), exit_code(Exit::Drained));
}

#[test]
fn a_busy_mount_is_drained_then_detached_and_still_read() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start();
    let file = File::open(bench.file("direct")).unwrap();
    let map = map(&File::open(bench.file("data")).unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    until("it is detached", || bench.mounts().is_empty());
    let log = bench.log();
    assert!(log.contains(&format!("(pid {}, open file)", process::id())), "{log}");
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 5 << 20).unwrap();
    assert!(bytes == data()[5 << 20..6 << 20]);
    assert!(map[..] == data()[..]);
    assert_eq!(waitpid(pid, Some(WaitPidFlag::WNOHANG)).unwrap(), WaitStatus::StillAlive);
    drop((file, map));
    assert_eq!(bench.end_of(pid), exit_code(Exit::Drained));
}

#[test]
fn a_busy_mount_that_is_freed_in_time_is_unmounted() {
    let Some(mut bench) = bench() else { return };
    let pid = bench.start_with(&Config { grace_ms: 10_000, ..CONFIG });
    let file = File::open(bench.file("data")).unwrap();
    kill(pid, Signal::SIGTERM).unwrap();
    until("it is found busy", || bench.log().contains("is busy"));
    drop(file);
    assert_eq!(bench.end_of(pid), exit_code(Exit::Drained));
    assert!(!bench.log().contains("detaching"), "{}", bench.log());
}

#[test]
fn a_second_signal_or_the_end_of_the_drain_period_aborts() {
    let Some(mut bench) = bench() else { return };
    for (config, second) in
        [(Config { grace_ms: 60_000, ..CONFIG }, true), (Config { grace_ms: 50, drain_ms: 200, ..CONFIG }, false)]
    {
        let pid = bench.start_with(&config);
        let file = File::open(bench.file("direct")).unwrap();
        kill(pid, Signal::SIGTERM).unwrap();
        until("it is found busy", || bench.log().contains("is busy"));
        if second {
            kill(pid, Signal::SIGINT).unwrap();
        }
        assert_eq!((bench.end_of(pid), bench.mounts()), (exit_code(Exit::Aborted), vec![]));
        assert_eq!(errno(file.read_at(&mut [0], 0)), libc::ENOTCONN);
    }
}

#[test]
fn an_unmount_from_outside_ends_it_and_spares_the_next_mount() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start();
    umount2(&bench.mnt(), MntFlags::empty()).unwrap();
    mount_tmpfs(&bench.mnt());
    fs::write(bench.file("keep"), "me").unwrap();
    assert_eq!(bench.end_of(pid), exit_code(Exit::UnmountedOutside));
    assert_eq!(fs::read(bench.file("keep")).unwrap(), b"me");
}

#[test]
fn a_daemon_unmounted_outside_spares_its_successor() {
    let Some(mut bench) = root_bench() else { return };
    let first = bench.start();
    umount2(&bench.mnt(), MntFlags::empty()).unwrap();
    let second = bench.start();
    assert_eq!(bench.end_of(first), exit_code(Exit::UnmountedOutside));
    assert_eq!(bench.mounts().len(), 1);
    assert!(fs::read(bench.file("data")).unwrap() == data());
    bench.stop(second);
}

#[test]
fn an_abort_from_outside_ends_it_and_leaves_no_stale_mount() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start();
    let file = File::open(bench.file("direct")).unwrap();
    // It is busy and stays mounted, but the force cuts the connection.
    assert_eq!(umount2(&bench.mnt(), MntFlags::MNT_FORCE), Err(nix::errno::Errno::EBUSY));
    assert_eq!((bench.end_of(pid), bench.mounts()), (exit_code(Exit::AbortedOutside), vec![]));
    assert!(file.read_at(&mut [0], 0).is_err());
}

#[test]
fn a_mount_that_covers_ours_is_spared() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start_with(&Config { drain_ms: 200, ..CONFIG });
    mount_tmpfs(&bench.mnt());
    fs::write(bench.file("keep"), "me").unwrap();
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(bench.end_of(pid), exit_code(Exit::Aborted));
    assert_eq!(fs::read(bench.file("keep")).unwrap(), b"me");
}

#[test]
fn a_stale_mount_is_recovered_by_the_next_start() {
    let Some(mut bench) = bench() else { return };
    for _ in 0..2 {
        let pid = bench.start();
        kill(pid, Signal::SIGKILL).unwrap();
        assert_eq!(bench.end_of(pid), -9);
        assert_eq!(nix::sys::statfs::statfs(&bench.mnt()).unwrap_err(), nix::errno::Errno::ENOTCONN);
    }
    let pid = bench.start();
    assert_eq!(bench.mounts().len(), 1);
    assert!(fs::read(bench.file("data")).unwrap() == data());
    bench.stop(pid);
}

#[test]
fn a_live_mount_is_refused() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start();
    let refusal = bench.try_start(&CONFIG).unwrap_err().to_string();
    assert!(refusal.contains("already mounted: ckfs:double_of_a_repo (type fuse.ckfs)"), "{refusal}");
    assert!(fs::read(bench.file("data")).unwrap() == data());
    bench.stop(pid);
    mount_tmpfs(&bench.mnt());
    let refusal = bench.try_start(&CONFIG).unwrap_err().to_string();
    assert!(refusal.contains("already mounted: t (type tmpfs)"), "{refusal}");
    umount2(&bench.mnt(), MntFlags::empty()).unwrap();
    fs::remove_dir(bench.mnt()).unwrap();
    let refusal = bench.try_start(&CONFIG).unwrap_err().to_string();
    assert!(refusal.contains("no such directory; create it first"), "{refusal}");
    fs::write(bench.mnt(), "").unwrap();
    let refusal = bench.try_start(&CONFIG).unwrap_err().to_string();
    assert!(refusal.contains("not a directory"), "{refusal}");
}

#[test]
fn unmounting_by_path_names_processes_using_the_mount_and_spares_foreign_mounts() {
    let Some(mut bench) = root_bench() else { return };
    let pid = bench.start();
    let options = UnmountOptions::default();
    let mnt = bench.mnt();
    assert!(matches!(unmount(&mnt.join("many"), options), Err(UnmountError::NotMounted { .. })));
    // A live mount is not cleaned up.
    unmount(&mnt, UnmountOptions { stale_only: true, lazy: true, ..options }).unwrap();
    assert_eq!(bench.mounts().len(), 1);
    let file = File::open(bench.file("data")).unwrap();
    match unmount(&mnt, UnmountOptions { wait: Duration::from_millis(200), ..options }) {
        Err(UnmountError::Busy { holders, .. }) => {
            assert!(holders.iter().any(|holder| holder.pid == process::id()), "{holders:?}");
        }
        result => panic!("{result:?}"),
    }
    let busy = unmount(&mnt, options).unwrap_err().to_string();
    assert!(busy.contains(&format!("pid {}", process::id())), "{busy}");
    unmount(&mnt, UnmountOptions { lazy: true, ..options }).unwrap();
    assert_eq!(bench.mounts(), []);
    drop(file);
    assert_eq!(bench.end_of(pid), exit_code(Exit::UnmountedOutside));

    // A stale one is removed too.
    let pid = bench.start();
    kill(pid, Signal::SIGKILL).unwrap();
    bench.end_of(pid);
    unmount(&mnt, UnmountOptions { stale_only: true, ..options }).unwrap();
    assert_eq!(bench.mounts(), []);
    mount_tmpfs(&mnt);
    let foreign = unmount(&mnt, options).unwrap_err().to_string();
    assert_eq!(foreign, format!("{}: expected a mount of type fuse.ckfs, found tmpfs", mnt.display()));
}

// --- as any user ---

/// Runs these tests again as a user without privileges: in a mount namespace of their own, where `/dev/fuse` is open to all as on
/// most hosts.
#[test]
fn users_mount_through_fusermount3() {
    const TESTS: [&str; 7] = [
        "mount::mounts_with_its_own_type_and_answers_all_questions",
        "mount::parallel_readers_get_the_right_bytes",
        "mount::passthrough_gives_the_bytes_of_the_backing_file",
        "mount::each_ending_signal_unmounts",
        "mount::a_busy_mount_is_drained_then_detached_and_still_read",
        "mount::a_second_signal_or_the_end_of_the_drain_period_aborts",
        "mount::a_stale_mount_is_recovered_by_the_next_start",
    ];
    const SCRIPT: &str = "set -e; mount -t tmpfs -o mode=1777 ckfs-test \"$1\"; cd \"$1\"; mknod -m 666 fuse c 10 229; \
        mount --bind fuse /dev/fuse; cp \"$2\" tests; chmod 755 tests; shift 2; \
        exec setpriv --reuid=65534 --regid=65534 --clear-groups env TMPDIR=\"$PWD\" ./tests --exact \"$@\"";
    if root_bench().is_none() {
        return;
    }
    for program in ["unshare", "setpriv", "fusermount3"] {
        if let Err(error) = Command::new(program).arg("--version").output() {
            return skip(&format!("{program}: {error}"));
        }
    }
    let base = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "slave", "sh", "-c", SCRIPT, "sh"]);
    command.arg(base.path()).arg(env::current_exe().unwrap()).args(TESTS);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains(&format!("{} passed; 0 failed", TESTS.len())), "{said}");
}
