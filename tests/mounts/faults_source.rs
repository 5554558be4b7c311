//! Sources that fail, are slow, give no answer or change, under a real mount. Readers that depend on them get an error in
//! bounded time, all others continue, and the daemon can be ended.
//!
//! The source is a file system of the test's own ([`common::faulty`]); the program mounts it. Tests need root and
//! `/dev/fuse`; without them they are skipped, except in continuous integration (`CI=true`), where they fail.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::common::{
    faulty::{Faulty, Manner, Pages, can_mount},
    repo::{row, write_repo},
    source_bytes,
};
use ckfs::tensor::{DType, TensorId};
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

/// The files of the source, one tensor each.
const A: &str = "model-00001-of-00003.safetensors";
const B: &str = "model-00002-of-00003.safetensors";
/// Bytes of a tensor: more than the kernel reads along with the header. Reads from 1 MiB on find nothing in memory.
const BYTES: usize = 4 << 20;
/// Time limit for anything that should happen soon.
const SOON: Duration = Duration::from_mins(3);

fn expected(tensor: u32) -> Vec<u8> {
    source_bytes(TensorId(tensor), 0..BYTES as u64)
}

fn source() -> Faulty {
    source_kept_by(Pages::Kernel)
}

fn source_kept_by(pages: Pages) -> Faulty {
    let dir = tempfile::tempdir().unwrap();
    let file = |name| [row(name, DType::BF16, &[1024, 2048])];
    let (a, b, c) = (file("alpha.weight"), file("beta.weight"), file("gamma.weight"));
    write_repo(dir.path(), &[&a, &b, &c], &json!({"model_type": "none of those known"}));
    Faulty::new(dir.path(), pages)
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    command.env_remove("CKFS_LOG");
    command
}

/// What makes a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `ckfs mount`, in the foreground.
    Command,
    /// A program that uses the library (`examples/library.rs`).
    Library,
}

const WAYS: [Way; 2] = [Way::Command, Way::Library];

/// Flags as options of a mount.
fn as_options(flags: &[&str]) -> Vec<String> {
    let mut options: Vec<String> = Vec::new();
    for flag in flags {
        match (flag.strip_prefix("--"), options.last_mut()) {
            (Some(name), _) => options.push(name.replace('-', "_")),
            (None, Some(option)) => *option = format!("{option}={flag}"),
            (None, None) => panic!("{flag}: expected a flag"),
        }
    }
    options
}

/// A mount in the foreground. Its drop ends the daemon at once.
struct Mount {
    child: Child,
    base: tempfile::TempDir,
}

impl Mount {
    fn new(source: &Path, flags: &[&str]) -> Self {
        Self::by(Way::Command, source, flags)
    }

    fn by(way: Way, source: &Path, flags: &[&str]) -> Self {
        let base = tempfile::tempdir().unwrap();
        let mnt = base.path().join("mnt");
        fs::create_dir(&mnt).unwrap();
        let log = File::create(base.path().join("log")).unwrap();
        let flags = [&["--grace", "1", "--drain", "1"], flags].concat();
        let mut command = match way {
            Way::Command => {
                let mut command = program();
                command.arg("mount").arg(source).arg(&mnt).arg("--foreground").args(flags);
                command
            }
            Way::Library => {
                let mut command =
                    Command::new(Path::new(env!("CARGO_BIN_EXE_ckfs")).with_file_name("examples").join("library"));
                command.arg(source).arg(&mnt).args(as_options(&flags));
                command
            }
        };
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut mount = Self { child, base };
        until("the mount answers", || {
            assert_eq!(mount.child.try_wait().unwrap(), None, "{}", mount.log());
            mount.path(".ckfs/stats.json").exists()
        });
        mount
    }

    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join("mnt").join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.base.path().join("log")).unwrap()
    }

    fn stat(&self, name: &str) -> u64 {
        let stats: Value = serde_json::from_slice(&fs::read(self.path(".ckfs/stats.json")).unwrap()).unwrap();
        stats[name].as_u64().unwrap_or_else(|| panic!("{name} in {stats}"))
    }

    /// Reads a span of a file in another thread.
    fn read(&self, name: &str, start: u64, len: usize) -> mpsc::Receiver<io::Result<Vec<u8>>> {
        let (tell, reported) = mpsc::channel();
        let path = self.path(name);
        thread::spawn(move || {
            let read = || {
                let mut bytes = vec![0; len];
                File::open(path)?.read_exact_at(&mut bytes, start)?;
                Ok(bytes)
            };
            let _ = tell.send(read());
        });
        reported
    }

    #[track_caller]
    fn reads(&self, name: &str, tensor: u32) {
        let result = self.read(name, 0, BYTES).recv_timeout(SOON);
        let bytes = result.unwrap_or_else(|_| panic!("{name}: no answer\n{}", self.log()));
        let bytes = bytes.unwrap_or_else(|error| panic!("{name}: {error}\n{}", self.log()));
        assert!(bytes == expected(tensor), "{name}: other bytes");
    }

    /// Output of `ckfs status`, and its exit code.
    fn status(&self) -> (Option<i32>, String) {
        let output = program().arg("status").arg(self.base.path().join("mnt")).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }

    fn metrics(&self) -> String {
        fs::read_to_string(self.path(".ckfs/metrics")).unwrap()
    }

    #[track_caller]
    fn fails(&self, reader: &mpsc::Receiver<io::Result<Vec<u8>>>) {
        let result = reader.recv_timeout(SOON).unwrap_or_else(|_| panic!("no answer\n{}", self.log()));
        assert_eq!(result.err().and_then(|error| error.raw_os_error()), Some(libc::EIO), "{}", self.log());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = umount2(&self.base.path().join("mnt"), MntFlags::MNT_DETACH);
        let _ = self.child.kill();
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Makes the storage of one file give no answer, and reads the file in many places.
fn stall_one(way: Way, flags: &[&str]) {
    let source = source();
    let mount = Mount::by(way, &source.path(), &[&["--source-timeout", "3s"], flags].concat());
    source.set(A, Manner::Stalled);
    let readers: Vec<_> = (0..24).map(|at| mount.read("full/alpha", (at + 4) << 17, 64 << 10)).collect();
    let also: Vec<_> = (0..4).map(|_| mount.read("safetensors/dev0.safetensors", 0, BYTES)).collect();
    until("the source is asked", || source.asked(A) > 0);
    // Neither all these threads nor all the daemon's may wait for the one file.
    mount.reads("full/beta", 1);
    mount.reads("dev0/gamma", 2);
    for reader in readers.iter().chain(&also) {
        mount.fails(reader);
    }
    // The stall is known by now: no read waits.
    mount.fails(&mount.read("full/alpha", 0, 10));
    let failed = mount.stat("failed_reads") + mount.stat("failed_opens");
    assert!(mount.stat("stalled_reads") >= 1 && failed >= 1, "{}", mount.log());
    assert_eq!(mount.stat("poisoned_sources"), 0, "a stall is no change");
    let reported = mount.log().lines().filter(|line| line.contains(A) && line.contains("stalled: ")).count();
    assert_eq!(reported, 1, "{}", mount.log());
    let (code, said) = mount.status();
    assert!(code == Some(1) && said.contains("degraded") && said.contains("source stalled"), "{said}");
    assert!(said.contains(A) && said.contains("got no answer for"), "{said}");
    assert!(mount.metrics().contains("ckfs_stalled_sources 1\n"), "{}", mount.metrics());
    let counted = mount.metrics().lines().find_map(|line| line.strip_prefix("ckfs_stalled_reads_total ")?.parse().ok());
    assert!(counted >= Some(1_u64), "{}", mount.metrics());

    source.set(A, Manner::Good);
    until("the file is good again", || mount.read("full/alpha", 0, 10).recv_timeout(SOON).unwrap().is_ok());
    mount.reads("full/alpha", 0);
    mount.reads("full/beta", 1);
    assert!(mount.log().contains("answers again"), "{}", mount.log());
    let (code, said) = mount.status();
    assert!(code == Some(0) && said.contains("healthy"), "{said}");
    assert!(mount.metrics().contains("ckfs_stalled_sources 0\n"), "{}", mount.metrics());
    until("nothing is left", || mount.stat("in_flight") <= 2);
}

#[test]
fn a_stalled_source_is_an_error_for_its_readers_only() {
    if can_mount() {
        for way in WAYS {
            stall_one(way, &[]);
        }
    }
}

#[test]
fn one_thread_is_enough() {
    if can_mount() {
        stall_one(Way::Command, &["--threads", "1", "--materialize", "none"]);
    }
}

#[test]
fn page_faults_that_get_no_answer_end_too() {
    if can_mount() {
        stall_one(Way::Command, &["--source-io", "mmap", "--materialize", "none", "--direct-io"]);
    }
}

#[test]
fn tiles_of_a_stalled_source_end_too() {
    if !can_mount() {
        return;
    }
    let source = source();
    let flags = ["--source-timeout", "2s", "--materialize", "none", "--dtype", "f32", "--threads", "1"];
    let mount = Mount::new(&source.path(), &flags);
    source.set(A, Manner::Stalled);
    let readers: Vec<_> = (0..8).map(|at| mount.read("full/alpha", (at + 16) << 16, 1 << 16)).collect();
    until("the source is asked", || source.asked(A) > 0);
    let other = mount.read("full/beta", 0, 2 * BYTES).recv_timeout(SOON).unwrap().unwrap();
    assert_eq!(other.len(), 2 * BYTES);
    for reader in &readers {
        mount.fails(reader);
    }
    source.set(A, Manner::Good);
    until("the file is good again", || mount.read("full/alpha", 0, 10).recv_timeout(SOON).unwrap().is_ok());
}

#[test]
fn an_open_that_gets_no_answer_ends_too() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let source = source();
        let mount = Mount::by(way, &source.path(), &["--source-timeout", "2s", "--threads", "1"]);
        source.set(A, Manner::Dead);
        let readers: Vec<_> = (0..8).map(|_| mount.read("full/alpha", 0, 10)).collect();
        mount.reads("full/beta", 1);
        for reader in &readers {
            mount.fails(reader);
        }
        // The configuration names the source: a look at it would wait for ever.
        source.set_root_dead(true);
        let (code, said) = mount.status();
        assert!(code == Some(1) && said.contains("degraded") && said.contains("got no answer"), "{said}");
        assert!(said.contains(source.path().to_str().unwrap()), "{said}");
        source.set_root_dead(false);
        source.set(A, Manner::Good);
        until("the file is good again", || mount.read("full/alpha", 0, 10).recv_timeout(SOON).unwrap().is_ok());
        mount.reads("full/alpha", 0);
    }
}

#[test]
fn slow_storage_is_waited_for() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let source = source();
        // With a small cache nothing is requested ahead: the answers come one after the other.
        let mount =
            Mount::by(way, &source.path(), &["--source-timeout", "2s", "--cache-bytes", "32M", "--threads", "1"]);
        // Each answer takes a quarter of the time limit; all of them together take longer than the limit.
        source.set(A, Manner::Slow(Duration::from_millis(500)));
        let begun = Instant::now();
        mount.reads("full/alpha", 0);
        assert!(begun.elapsed() > Duration::from_secs(3), "this must be slow to show anything");
        assert_eq!((mount.stat("stalled_reads"), mount.stat("failed_reads")), (0, 0), "{}", mount.log());
    }
}

#[test]
fn a_mount_ends_while_its_source_gives_no_answer() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut mount = Mount::new(&source.path(), &["--source-timeout", "1h"]);
    source.set(A, Manner::Stalled);
    let readers: Vec<_> = (0..8).map(|at| mount.read("full/alpha", ((at % 3) + 1) << 20, 10)).collect();
    until("the source is asked", || source.asked(A) > 0);
    kill(Pid::from_raw(i32::try_from(mount.child.id()).unwrap()), Signal::SIGTERM).unwrap();
    until("the daemon ends", || mount.child.try_wait().unwrap().is_some());
    for reader in readers {
        reader.recv_timeout(SOON).unwrap().unwrap_err();
    }
}

/// A program that opens a file with flags and reads it once from `start` on.
fn reading_process(path: &Path, flags: &str, start: u64) -> Child {
    let read = "import mmap,os,sys; f = os.open(sys.argv[1], os.O_RDONLY | eval(sys.argv[2])); os.preadv(f, [mmap.mmap(-1, 1 << 17)], int(sys.argv[3]))";
    let mut command = Command::new("python3");
    command.args(["-c", read]).arg(path).arg(flags).arg(start.to_string()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_reader_that_is_killed_ends_whatever_it_waits_for() {
    if !can_mount() {
        return;
    }
    for (manner, flags, how) in [
        (Manner::Stalled, &["--materialize", "none"][..], "os.O_DIRECT"),
        (Manner::Stalled, &["--direct-io", "--materialize", "none"], "0"),
        (Manner::Stalled, &["--materialize", "none", "--threads", "1"], "0"),
        (Manner::Dead, &[], "0"),
    ] {
        let source = source();
        let mount = Mount::new(&source.path(), &[&["--source-timeout", "1h"], flags].concat());
        source.set(A, manner);
        let mut readers: Vec<_> = (0..3).map(|at| reading_process(&mount.path("full/alpha"), how, at << 20)).collect();
        until("the readers wait", || mount.stat("in_flight") >= 3);
        // Long enough for the kernel to have passed all that it passes.
        thread::sleep(Duration::from_millis(300));
        for (reader, signal) in readers.iter().zip([Signal::SIGKILL, Signal::SIGTERM].into_iter().cycle()) {
            kill(Pid::from_raw(i32::try_from(reader.id()).unwrap()), signal).unwrap();
        }
        for reader in &mut readers {
            until("a killed reader ends", || reader.try_wait().unwrap().is_some());
        }
        mount.reads("full/beta", 1);
        assert_eq!(mount.stat("stalled_reads"), 0, "{}", mount.log());
        source.set(A, Manner::Good);
        mount.reads("full/alpha", 0);
    }
}

#[test]
fn an_abort_by_fusectl_is_a_clean_end() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut mount = Mount::new(&source.path(), &["--source-timeout", "1h", "-v"]);
    until("the daemon is ready", || mount.log().contains("mounted on"));
    source.set(A, Manner::Stalled);
    let readers: Vec<_> = (0..8).map(|at| mount.read("full/alpha", ((at % 3) + 1) << 20, 10)).collect();
    until("the source is asked", || source.asked(A) > 0);
    // So that the mount is in use when the readers are cut off.
    let held = File::open(mount.path("full/beta")).unwrap();
    let device = fs::metadata(mount.path("")).unwrap().dev();
    let control = PathBuf::from(format!("/sys/fs/fuse/connections/{}/abort", nix::sys::stat::minor(device)));
    if control.exists() {
        fs::write(control, "1").unwrap();
    } else {
        // A container may lack this file system; the force does the same.
        assert_eq!(umount2(&mount.path(""), MntFlags::MNT_FORCE), Err(nix::errno::Errno::EBUSY));
    }
    until("the daemon ends", || mount.child.try_wait().unwrap().is_some());
    assert_eq!(mount.child.wait().unwrap().code(), Some(0), "{}", mount.log());
    let log = mount.log();
    assert!(log.contains("aborted by another process") && !log.contains("ERROR") && !log.contains("error:"), "{log}");
    drop(held);
    for reader in readers {
        reader.recv_timeout(SOON).unwrap().unwrap_err();
    }
}

#[test]
fn commands_give_up_a_source_that_gives_no_answer() {
    if !can_mount() {
        return;
    }
    let source = source();
    let path = source.path();
    let base = tempfile::tempdir().unwrap();
    let mnt = base.path().join("mnt");
    fs::create_dir(&mnt).unwrap();
    let run = |args: &[&str]| -> Output { program().args(args).arg("--source-timeout=500ms").output().unwrap() };
    let refused = |output: &Output, file: &str| {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let reported = said.lines().filter(|line| line.contains("ckfs: error: ") || line.contains("stalled: ")).count();
        assert!(reported >= 1 && said.contains(file) && said.contains("stalled: "), "{said}");
    };
    let name = path.to_str().unwrap();
    // In the order of reads: bytes that were read are in the kernel's cache.
    for file in ["model.safetensors.index.json", "config.json", A] {
        source.set(file, Manner::Stalled);
        refused(&run(&["plan", name]), file);
        refused(&run(&["mount", name, mnt.to_str().unwrap()]), file);
        refused(&run(&["mount", "-f", name, mnt.to_str().unwrap()]), file);
        source.set(file, Manner::Failing);
        source.set(file, Manner::Good);
    }
    // The headers can be read now, the tensor cannot.
    assert_eq!(run(&["plan", name]).status.code(), Some(0));
    source.set(B, Manner::Stalled);
    refused(&run(&["cat", name, "full/beta"]), B);
    refused(&run(&["sums", name]), B);
}

/// A directory of a network file system whose server is gone: already a look whether the path exists waits for ever.
#[test]
fn no_command_waits_for_a_directory_that_gives_no_answer() {
    if !can_mount() {
        return;
    }
    let source = source();
    let name = source.path().display().to_string();
    let mount = Mount::new(&source.path(), &["--source-timeout", "500ms"]);
    mount.reads("full/alpha", 0);
    let mnt = mount.path("").display().to_string();
    let base = tempfile::tempdir().unwrap();
    let (config, list, other) = (base.path().join("ckfs.toml"), base.path().join("sums"), base.path().join("other"));
    fs::write(&config, format!("source = '{name}'\nmountpoint = 'other'\n")).unwrap();
    fs::write(&list, "# ckfs 0.1.0 sums\n").unwrap();
    fs::create_dir(&other).unwrap();
    let run = |args: &[&str]| {
        let output = base.path().join("output");
        let mut command = program();
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&output).unwrap());
        source.set_root_dead(true);
        let mut child = command.spawn().unwrap();
        let said = || fs::read_to_string(&output).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        // The kernel lets no process end that waits for this file system's answer. NFS does.
        while child.try_wait().unwrap().is_none() && !said().contains("stalled: ") && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
        source.set_root_dead(false);
        until("it ends", || child.try_wait().unwrap().is_some());
        let said = said();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{args:?}: {said}");
        said
    };
    // Relative: only a look tells it from a name of the Hub.
    let relative = base.path().join("relative.toml");
    std::os::unix::fs::symlink(&name, base.path().join("model")).unwrap();
    fs::write(&relative, "source = 'model'\n").unwrap();
    let (list, config, other) = (list.to_str().unwrap(), config.to_str().unwrap(), other.to_str().unwrap());
    let limit = "--source-timeout=500ms";
    let rows: [&[&str]; 9] = [
        &["plan", &name, limit],
        &["verify", &name, limit],
        &["sums", &name, limit],
        &["verify", &mnt],
        &["verify", &mnt, "--sums", list],
        &["sums", &mnt],
        &["plan", "--config", config, limit],
        &["mount", &name, other, limit],
        &["mount", "-f", &name, other, limit],
    ];
    for args in rows {
        let said = run(args);
        assert!(said.contains(&format!("{name}: stalled: ")) && said.contains("got no answer"), "{args:?}: {said}");
    }
    let said = run(&["plan", "--config", relative.to_str().unwrap(), limit]);
    assert!(said.contains("relative.toml: stalled: ") && said.contains("got no answer"), "{said}");
    let said = run(&["umount", "--config", config]);
    assert!(said.contains("other") && said.contains("not mounted") || said.contains("no ckfs mount"), "{said}");
    mount.reads("full/alpha", 0);
}

#[test]
fn failures_are_temporary_errors_and_changes_are_permanent_ones() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let source = source();
        let mount = Mount::by(way, &source.path(), &["--materialize", "none"]);
        source.set(A, Manner::Failing);
        mount.fails(&mount.read("full/alpha", 1 << 20, 1 << 20));
        source.set(A, Manner::Good);
        mount.reads("full/alpha", 0);
        mount.reads("full/gamma", 2);
        // Read before, so that the kernel has all its pages.
        mount.reads("full/alpha", 0);
        source.touch(A);
        until("the change is seen", || mount.stat("poisoned_sources") == 1);
        until("pages are dropped", || mount.read("full/alpha", 0, BYTES).recv_timeout(SOON).unwrap().is_err());
        source.truncate(B, BYTES / 2);
        mount.fails(&mount.read("dev0/beta", 0, 10));
        mount.reads("full/gamma", 2);
    }
}

#[test]
fn reads_that_end_early_are_errors_and_never_zeros() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let source = source_kept_by(Pages::Nobody);
        let mount = Mount::by(way, &source.path(), &["--materialize", "none"]);
        source.set(A, Manner::Short);
        mount.fails(&mount.read("full/alpha", 1 << 20, 1 << 20));
        source.set(A, Manner::Good);
        assert_eq!(mount.stat("poisoned_sources"), 1, "{}", mount.log());
        mount.fails(&mount.read("full/alpha", 0, 10));
        mount.reads("full/gamma", 2);
    }
}
