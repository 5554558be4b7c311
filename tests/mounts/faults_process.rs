//! Failures around the process: logs that cannot be written, limits, signals, a daemon that is killed.
//!
//! All tests use the program and real mounts. A daemon that dies leaves its readers with errors and a dead mount. So
//! each test checks at its end that the mount lives and returns the right bytes, or that no mount is left. Tests that cannot
//! run without `/dev/fuse` or root report that they are skipped; where `CI=true` they fail.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a helper that fails is a test that fails")]

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read},
    os::fd::{FromRawFd, OwnedFd},
    os::unix::{
        fs::PermissionsExt,
        net::UnixDatagram,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use ckfs::fuse::{DaemonError, ckfs_mounts, start_background};
use nix::{
    mount::{MntFlags, MsFlags, umount2},
    sys::{
        resource::{Resource, setrlimit},
        signal::{Signal, kill},
    },
    unistd::{Pid, Uid, geteuid},
};

/// Time limit for anything that should happen soon.
const SOON: Duration = Duration::from_mins(3);

/// Bytes of the one tensor: large enough to be materialized in memory.
const DATA_BYTES: usize = 2 << 20;

/// A directory with a checkpoint, a mountpoint, and a place for logs. Dropping it leaves neither mounts nor processes.
struct Bench {
    base: tempfile::TempDir,
    children: Vec<Child>,
}

/// Prints why a test cannot run, and fails where all must.
fn skip(missing: &str) {
    assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "cannot test: {missing}");
    eprintln!("skipped: {missing}");
}

/// `None` where nothing can be mounted.
fn bench() -> Option<Bench> {
    if !geteuid().is_root() {
        skip("not root");
        return None;
    }
    if let Err(error) = File::options().read(true).write(true).open("/dev/fuse") {
        skip(&format!("/dev/fuse: {error}"));
        return None;
    }
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["mnt", "model", "state"] {
        fs::create_dir(base.path().join(name)).unwrap();
    }
    let header = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{DATA_BYTES}],\"data_offsets\":[0,{DATA_BYTES}]}}}}");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(data());
    fs::write(base.path().join("model/model.safetensors"), file).unwrap();
    Some(Bench { base, children: Vec::new() })
}

fn data() -> Vec<u8> {
    (0..DATA_BYTES).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    /// The program, with logs in the bench's directory and in a session of its own, so that no terminal is involved.
    fn program(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env_remove("CKFS_LOG").env("XDG_STATE_HOME", self.path("state")).stdin(Stdio::null());
        command
    }

    /// `ckfs mount` of the checkpoint.
    fn mount(&self) -> Command {
        let mut command = self.program();
        command.arg("mount").arg(self.path("model")).arg(self.mnt());
        command
    }

    /// A daemon in the foreground, with the given standard error, once its mount answers.
    fn foreground(&mut self, args: &[&str], stderr: Stdio) -> Pid {
        let child = self.mount().arg("--foreground").args(args).stderr(stderr).stdout(Stdio::null()).spawn().unwrap();
        let pid = pid_of(&child);
        self.children.push(child);
        until("the mount answers", || self.mnt().join("dev0").is_dir());
        pid
    }

    /// The process of `program` that serves the mountpoint.
    fn find_daemon(&self, program: &Path) -> Option<Pid> {
        let mnt = self.mnt();
        let is_daemon = |process: &PathBuf| {
            let exe = fs::read_link(process.join("exe")).unwrap_or_default();
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            exe == program && words.split(|byte| *byte == 0).any(|word| word == mnt.as_os_str().as_encoded_bytes())
        };
        let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
        let process = processes.find(is_daemon)?;
        Some(Pid::from_raw(process.file_name().unwrap().to_str().unwrap().parse().unwrap()))
    }

    fn has_daemon(&self, program: &Path) -> bool {
        self.find_daemon(program).is_some()
    }

    /// The process that serves the mountpoint in the background.
    fn daemon(&self) -> Pid {
        self.find_daemon(Path::new(env!("CARGO_BIN_EXE_ckfs"))).unwrap()
    }

    fn mounts(&self) -> usize {
        ckfs_mounts().iter().filter(|entry| entry.mountpoint == self.mnt()).count()
    }

    /// Asserts that the mount lives and returns the right bytes.
    #[track_caller]
    fn lives(&self) {
        let bytes = fs::read(self.mnt().join("dev0/w"));
        assert!(bytes.is_ok_and(|bytes| bytes == data()), "the mount is dead or wrong");
    }

    /// Makes a read of the mount fail, since the source has changed.
    fn fail_reads(&self, count: usize) {
        let model = File::options().append(true).open(self.path("model/model.safetensors")).unwrap();
        model.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        for _ in 0..count {
            assert!(fs::read(self.mnt().join("dev0/w")).is_err());
        }
    }

    fn unmount(&self) {
        let output = self.program().arg("umount").arg(self.mnt()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        until("the mount is gone", || self.mounts() == 0);
    }

    /// Ends the foreground daemon by a signal; its exit code.
    fn end(&mut self, signal: Signal) -> i32 {
        let mut child = self.children.pop().unwrap();
        kill(pid_of(&child), signal).unwrap();
        let mut status = None;
        until("the daemon ends", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        status.code().unwrap_or_else(|| -status.signal().unwrap())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Any mount found there was made by this test. Daemons end with their mount.
        for name in ["mnt", "full", "other"] {
            while umount2(&self.path(name), MntFlags::MNT_DETACH).is_ok() {}
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap())
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A terminal: the user's side and the programs' side.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut user, mut program) = (-1, -1);
    let null = std::ptr::null_mut();
    // SAFETY: both numbers are valid for writing, and a null pointer means that the value is not requested.
    let result = unsafe { libc::openpty(&raw mut user, &raw mut program, null, null.cast(), null.cast()) };
    assert_eq!(result, 0);
    // SAFETY: the call has just opened both, for this process, and no other code knows them.
    unsafe { (OwnedFd::from_raw_fd(user), OwnedFd::from_raw_fd(program)) }
}

/// Copies the program by another process: a child of a parallel test would inherit a descriptor that writes it, and until the
/// child has become its own program, this one could not be started ("Text file busy").
pub(crate) fn copy_program(to: &Path) {
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ckfs")).arg(to).status().unwrap().success());
}

/// Runs a command with a limit of its own.
fn limited(command: &mut Command, resource: Resource, limit: u64) -> Output {
    // SAFETY: setrlimit is one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(move || setrlimit(resource, limit, limit).map_err(Into::into)) };
    command.output().unwrap()
}

// --- logs ---

#[test]
fn a_closed_pipe_ends_neither_starter_nor_daemon() {
    let Some(bench) = bench() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = bench.mount().arg("-vv").stderr(writer.try_clone().unwrap()).stdout(writer).status().unwrap();
    assert_eq!(status.code(), Some(0));
    bench.lives();
    bench.unmount();
}

#[test]
fn a_full_device_as_log_ends_nothing() {
    let Some(mut bench) = bench() else { return };
    let output = bench.mount().args(["-vv", "--log-file", "/dev/full"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    bench.lives();
    kill(bench.daemon(), Signal::SIGUSR1).unwrap();
    bench.fail_reads(3);
    assert!(fs::read_dir(bench.mnt()).is_ok());
    bench.unmount();
    // The same for standard error of the foreground, and for every other command.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    bench.foreground(&["-vvv"], full().into());
    bench.lives();
    assert_eq!(bench.end(Signal::SIGTERM), 0);
    let status = bench.program().arg("nonsense").stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(2));
    let status = bench.program().args(["plan", "/nonsense"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn a_full_disk_is_survived_and_the_loss_is_reported_later() {
    let Some(bench) = bench() else { return };
    let full = bench.path("full");
    fs::create_dir(&full).unwrap();
    nix::mount::mount(Some("t"), &full, Some("tmpfs"), MsFlags::empty(), Some("size=65536")).unwrap();
    let log = full.join("log");
    let output = bench.mount().arg("-v").arg("--log-file").arg(&log).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let reported = format!("ckfs: mounted on {}; its log goes to {}; ", bench.mnt().display(), log.display());
    assert!(text(&output).contains(&reported), "{}", text(&output));
    let filler = full.join("filler");
    assert!(fs::write(&filler, vec![1; 1 << 20]).is_err(), "it is full");
    let daemon = bench.daemon();
    for _ in 0..2000 {
        kill(daemon, Signal::SIGUSR1).unwrap();
        thread::sleep(Duration::from_micros(200));
    }
    bench.lives();
    fs::remove_file(&filler).unwrap();
    fs::write(&log, "").unwrap();
    until("the loss is reported", || {
        kill(daemon, Signal::SIGUSR1).unwrap();
        fs::read_to_string(&log).unwrap().contains("lost: No space left on device")
    });
    bench.lives();
    bench.unmount();
}

#[test]
fn a_dead_terminal_ends_nothing() {
    let Some(mut bench) = bench() else { return };
    let pty = terminal();
    let daemon = bench.foreground(&["-v"], pty.1.into());
    drop(pty.0);
    for _ in 0..10 {
        kill(daemon, Signal::SIGUSR1).unwrap();
        bench.lives();
    }
    kill(daemon, Signal::SIGHUP).unwrap();
    bench.lives();
    assert_eq!(bench.end(Signal::SIGTERM), 0);
    // A progress bar.
    let pty = terminal();
    let mut command = bench.program();
    command.arg("export").arg(bench.path("model")).arg(bench.path("out")).arg("-v").stderr(pty.1);
    let mut child = command.spawn().unwrap();
    drop((command, pty.0));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_full_pipe_without_a_reader_blocks_nothing() {
    let Some(mut bench) = bench() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    let daemon = bench.foreground(&["-vvv"], writer.into());
    for _ in 0..200 {
        kill(daemon, Signal::SIGUSR1).unwrap();
        assert!(fs::read_dir(bench.mnt().join("dev0")).unwrap().count() > 0);
    }
    bench.lives();
    assert_eq!(bench.end(Signal::SIGTERM), 0);
    drop(reader);
}

#[test]
fn a_source_that_changes_is_one_line_however_often_it_is_read() {
    let Some(bench) = bench() else { return };
    let log = bench.path("log");
    assert!(bench.mount().arg("-q").arg("--log-file").arg(&log).status().unwrap().success());
    bench.fail_reads(100);
    bench.unmount();
    let is_logged = || fs::read_to_string(&log).unwrap().contains("changed since it was opened");
    until("it is logged", is_logged);
    let text = fs::read_to_string(&log).unwrap();
    assert_eq!(text.matches("changed since it was opened").count(), 1, "{text}");
    assert!(text.lines().count() < 8, "{text}");
    let mut failed = text.lines().filter(|line| line.contains("read failed"));
    assert!(failed.all(|line| line.contains(" tensor=\"") && line.contains(" start=")), "{text}");
}

#[test]
fn messages_of_the_fuse_library_reach_the_log() {
    let Some(bench) = bench() else { return };
    let log = bench.path("log");
    let mut command = bench.mount();
    assert!(command.arg("-q").arg("--log-file").arg(&log).env("CKFS_LOG", "fuser=debug").status().unwrap().success());
    bench.lives();
    let has_line = || fs::read_to_string(&log).unwrap().contains(" DEBUG fuser::");
    until("a line is there", has_line);
    bench.unmount();
}

#[test]
fn the_default_log_is_a_file_of_the_mount_and_the_starter_reports_it() {
    if Path::new("/dev/log").exists() || Path::new("/run/systemd/journal/socket").exists() {
        // There the system's log is the default; the next test checks it.
        return;
    }
    let Some(bench) = bench() else { return };
    let output = bench.mount().output().unwrap();
    let directory = bench.path("state/ckfs");
    assert!(text(&output).contains(&format!("its log goes to {}", directory.display())), "{}", text(&output));
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    bench.unmount();
    let output = bench.mount().arg("-q").output().unwrap();
    assert_eq!((output.status.code(), text(&output).as_str()), (Some(0), ""));
    bench.unmount();

    // An unwritable default place is no reason to fail; an unwritable requested one is.
    fs::remove_dir_all(bench.path("state")).unwrap();
    fs::write(bench.path("state"), "").unwrap();
    let output = bench.mount().output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).contains("its log goes nowhere: ") && text(&output).contains("Not a directory"));
    bench.lives();
    bench.unmount();
    let output = bench.mount().env_remove("XDG_STATE_HOME").env_remove("HOME").output().unwrap();
    assert!(text(&output).contains("neither XDG_STATE_HOME nor HOME is set"), "{}", text(&output));
    bench.unmount();
    let output = bench.mount().arg("--log-file").arg(bench.path("state/log")).output().unwrap();
    assert_eq!((output.status.code(), bench.mounts()), (Some(1), 0));
    assert!(text(&output).contains("Not a directory"), "{}", text(&output));
}

/// Runs `ckfs mount` where `/dev` and `/run` are the test's own, and returns what its log received after SIGUSR1.
fn log_of_system(bench: &Bench, socket: &str, script: &str) -> String {
    let path = bench.path(socket);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let log = UnixDatagram::bind(&path).unwrap();
    log.set_read_timeout(Some(SOON)).unwrap();
    let script = format!(
        "set -e; cd {base}; {script}; {ckfs} mount model mnt 2>reported; \
         pid=$(cat mnt/.ckfs/stats.json | tr -dc 'a-z0-9:,\"' | sed 's/.*\"pid\":\\([0-9]*\\).*/\\1/'); \
         kill -USR1 $pid; read seen || true; {ckfs} umount mnt; while [ -d /proc/$pid ]; do sleep 0.02; done",
        base = bench.base.path().display(),
        ckfs = env!("CARGO_BIN_EXE_ckfs"),
    );
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "slave", "sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let mut buffer = [0; 8192];
    // Before the daemon ends, which drops a request for statistics that it has not answered.
    let received = log.recv(&mut buffer);
    // Its input ends, and it goes on.
    let output = child.wait_with_output().unwrap();
    let reported = fs::read_to_string(bench.path("reported")).unwrap_or_default();
    let all = || format!("{}; {}; {reported}", output.status, text(&output));
    assert!(output.status.success(), "{received:?}; {}", all());
    let bytes = received.unwrap_or_else(|error| panic!("{error}; {}", all()));
    String::from_utf8_lossy(&buffer[..bytes]).into_owned()
}

#[test]
fn a_daemon_logs_to_the_system_where_it_has_a_log() {
    let Some(bench) = bench() else { return };
    let dev = "mkdir -p newdev; for f in null fuse; do touch newdev/$f; mount --bind /dev/$f newdev/$f; done; \
               mount --rbind newdev /dev";
    let line = log_of_system(&bench, "newdev/log", dev);
    assert!(line.starts_with("<30>ckfs[") && line.contains("]: ckfs::fuse::session: statistics of "), "{line}");
    let reported = fs::read_to_string(bench.path("reported")).unwrap();
    assert!(reported.contains("its log goes to the system log (/dev/log), as ckfs["), "{reported}");
    // No syslog: the journal.
    let line = log_of_system(
        &bench,
        "newrun/systemd/journal/socket",
        &format!("rm newdev/log; {dev}; mount --bind newrun /run"),
    );
    assert!(
        line.starts_with("PRIORITY=6\n") && line.contains("\nMESSAGE=ckfs::fuse::session: statistics of "),
        "{line}"
    );
    let reported = fs::read_to_string(bench.path("reported")).unwrap();
    assert!(reported.contains("its log goes to the journal: journalctl _PID="), "{reported}");
}

// --- limits ---

#[test]
fn a_limit_of_file_size_leaves_all_bytes_readable() {
    let Some(bench) = bench() else { return };
    let directory = bench.path("state");
    for (limit, place) in
        [0, 1024].into_iter().flat_map(|limit| [(limit, directory.as_path()), (limit, Path::new("memory"))])
    {
        let log = bench.path("log");
        let _ = fs::remove_file(&log);
        let mut command = bench.mount();
        command.arg("-vv").arg("--log-file").arg(&log).arg("--materialize").arg(place);
        let output = limited(&mut command, Resource::RLIMIT_FSIZE, limit);
        assert!(output.status.success(), "{}", text(&output));
        for _ in 0..3 {
            bench.lives();
        }
        assert_eq!(
            fs::read(bench.mnt().join("hf/model.safetensors")).unwrap(),
            fs::read(bench.path("model/model.safetensors")).unwrap()
        );
        kill(bench.daemon(), Signal::SIGUSR1).unwrap();
        bench.lives();
        bench.unmount();
        assert!(fs::metadata(&log).unwrap().len() <= limit);
    }
}

/// A start within a limit ends with a mount that works, or with one error, without a panic and without a mount.
#[track_caller]
fn starts_or_reports_why(bench: &Bench, resource: Resource, limit: u64, words: &str) -> bool {
    let output = limited(&mut bench.mount(), resource, limit);
    let reported = text(&output);
    let is_up = output.status.success();
    if is_up {
        bench.lives();
        bench.unmount();
    } else {
        assert_eq!(output.status.code(), Some(1), "{limit}: {reported}");
        assert_eq!(reported.matches("ckfs: error: ").count(), 1, "{limit}: {reported}");
        assert!(reported.contains(words), "{limit}: {reported}");
        assert!(!reported.contains("panicked"), "{limit}: {reported}");
    }
    assert_eq!(bench.mounts(), 0, "{limit}: {reported}");
    is_up
}

#[test]
fn a_limit_of_address_space_fails_at_start_or_not_at_all() {
    let Some(bench) = bench() else { return };
    // The kernel itself ends a program that it cannot map as a whole.
    let program_bytes = fs::metadata(env!("CARGO_BIN_EXE_ckfs")).unwrap().len();
    let up = [10, 50, 100, 150, 200, 250, 300, 500, 1000, 4000]
        .map(|mib: u64| starts_or_reports_why(&bench, Resource::RLIMIT_AS, program_bytes + (mib << 20), ""));
    assert!(up[9], "4 GB are enough");
}

#[test]
fn a_limit_of_open_files_is_named_before_the_mount() {
    let Some(bench) = bench() else { return };
    for limit in [16, 24, 40] {
        assert!(!starts_or_reports_why(&bench, Resource::RLIMIT_NOFILE, limit, "expected a limit of"));
    }
    assert!(starts_or_reports_why(&bench, Resource::RLIMIT_NOFILE, 64, ""));
}

#[test]
fn limits_of_stack_and_locked_memory_do_not_matter() {
    let Some(bench) = bench() else { return };
    assert!(starts_or_reports_why(&bench, Resource::RLIMIT_STACK, 64 << 10, ""));
    assert!(starts_or_reports_why(&bench, Resource::RLIMIT_STACK, 512 << 10, ""));
    assert!(starts_or_reports_why(&bench, Resource::RLIMIT_MEMLOCK, 0, ""));
}

#[test]
fn a_limit_of_threads_is_an_error_or_a_fallback_but_no_panic() {
    let Some(bench) = bench() else { return };
    // This limit does not apply to root; for a user without other processes it is exact.
    let nobody = Uid::from_raw(61_537);
    let program = bench.path("ckfs");
    copy_program(&program);
    std::os::unix::fs::chown(bench.mnt(), Some(nobody.as_raw()), Some(nobody.as_raw())).unwrap();
    let mut planned = 0;
    for limit in 1..12 {
        let mut command = Command::new(&program);
        command.env_remove("CKFS_LOG").arg("plan").arg(bench.path("model")).uid(nobody.as_raw()).gid(nobody.as_raw());
        let output = limited(&mut command, Resource::RLIMIT_NPROC, limit);
        let reported = text(&output);
        assert!(!reported.contains("panicked"), "{limit}: {reported}");
        match output.status.code() {
            Some(0) => planned += 1,
            Some(1) => assert!(reported.contains("processes and threads of the user"), "{limit}: {reported}"),
            code => panic!("{limit}: {code:?}: {reported}"),
        }
        // A user's mount goes through fusermount3, which needs a process too.
        let mut command = Command::new(&program);
        command.env_remove("CKFS_LOG").arg("mount").arg(bench.path("model")).arg(bench.mnt());
        let output = limited(command.uid(nobody.as_raw()).gid(nobody.as_raw()), Resource::RLIMIT_NPROC, limit);
        let reported = text(&output);
        let is_up = output.status.code() == Some(0);
        assert!(!reported.contains("panicked") && (is_up || output.status.code() == Some(1)), "{limit}: {reported}");
        assert_eq!(reported.matches("ckfs: error: ").count(), usize::from(!is_up), "{limit}: {reported}");
        assert_eq!(bench.mounts(), usize::from(is_up), "{limit}: {reported}");
        if is_up {
            umount2(&bench.mnt(), MntFlags::MNT_DETACH).unwrap();
            // The user's processes count, so the daemon must end before the next attempt.
            until("the daemon is gone", || !bench.has_daemon(&program));
        }
    }
    assert!(planned > 0, "a dozen threads are enough");
}

// --- a start that goes wrong ---

#[test]
fn a_daemon_that_is_killed_before_it_is_ready_leaves_no_mount() {
    let Some(bench) = bench() else { return };
    // A child of the starter that mounts, and dies with its mount before it reports.
    let script = format!(
        "{} mount -q --foreground {} {} & while [ ! -d {mnt}/dev0 ]; do sleep 0.02; done; kill -9 $!; wait $!; kill -9 $$",
        env!("CARGO_BIN_EXE_ckfs"),
        bench.path("model").display(),
        bench.mnt().display(),
        mnt = bench.mnt().display(),
    );
    let args: [OsString; 2] = ["-c".into(), script.into()];
    let error = start_background(Path::new("/bin/sh"), &args, &bench.mnt(), SOON).unwrap_err();
    assert!(matches!(error, DaemonError::Died { .. }), "{error}");
    assert!(error.to_string().contains("signal: 9 (SIGKILL)"), "{error}");
    assert_eq!(bench.mounts(), 0);
}

/// A daemon as `ckfs mount` starts it: it knows the process that started it, and reports to a pipe in place of standard input.
fn started_by(bench: &Bench, starter: Pid, report: io::PipeWriter) -> Output {
    let mut daemon = bench.mount();
    let daemon = daemon.env("CKFS_STARTER_PID", starter.to_string()).stdin(report).stderr(Stdio::piped());
    let mut daemon = daemon.spawn().unwrap();
    until("the daemon ends", || daemon.try_wait().unwrap().is_some());
    daemon.wait_with_output().unwrap()
}

#[test]
fn a_starter_that_is_killed_leaves_no_mount() {
    let Some(bench) = bench() else { return };
    // It was killed before the daemon looked for it: the daemon has another parent, here this process.
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let (_reader, report) = io::pipe().unwrap();
    let output = started_by(&bench, pid_of(&gone), report);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("the command that started this daemon has ended"), "{}", text(&output));
    assert_eq!(bench.mounts(), 0);
    // It was killed while the daemon reported: nobody reads the report.
    let (reader, report) = io::pipe().unwrap();
    drop(reader);
    let output = started_by(&bench, Pid::this(), report);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(bench.mounts(), 0);
}

#[test]
fn a_log_file_that_cannot_be_opened_is_one_error() {
    let Some(bench) = bench() else { return };
    let output = bench.mount().args(["--log-file", "/no/directory/log"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output).matches("/no/directory/log").count(), 1, "{}", text(&output));
}

#[test]
fn a_failed_start_leaves_foreign_mounts_alone() {
    let Some(bench) = bench() else { return };
    // A live mount, which refuses the second one.
    assert!(bench.mount().status().unwrap().success());
    let args: [OsString; 2] = ["-c".into(), "kill -9 $$".into()];
    assert!(start_background(Path::new("/bin/sh"), &args, &bench.mnt(), SOON).is_err());
    let output = bench.mount().output().unwrap();
    assert!(output.status.code() == Some(1) && text(&output).contains("already mounted"), "{}", text(&output));
    bench.lives();
    bench.unmount();
    // Another file system.
    nix::mount::mount(Some("t"), &bench.mnt(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    assert!(start_background(Path::new("/bin/sh"), &args, &bench.mnt(), SOON).is_err());
    assert!(umount2(&bench.mnt(), MntFlags::empty()).is_ok(), "the tmpfs is still there");
}

// --- signals ---

/// By number: `nix` has no real-time signals.
const HARMLESS: [i32; 12] = [
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGXFSZ,
    libc::SIGXCPU,
    40,
];

fn send_harmless(pid: Pid, signals: impl IntoIterator<Item = i32>) {
    for signal in signals {
        // SAFETY: sends a signal to a process that this test started.
        assert_eq!(unsafe { libc::kill(pid.as_raw(), signal) }, 0);
    }
}

#[test]
fn harmless_signals_are_harmless_while_serving() {
    let Some(mut bench) = bench() else { return };
    assert!(bench.mount().status().unwrap().success());
    let daemon = bench.daemon();
    send_harmless(daemon, HARMLESS);
    bench.lives();
    bench.unmount();
    let daemon = bench.foreground(&[], Stdio::null());
    send_harmless(daemon, HARMLESS);
    bench.lives();
    assert_eq!(bench.end(Signal::SIGQUIT), 0);
    assert_eq!(bench.mounts(), 0);
}

#[test]
fn harmless_signals_are_harmless_during_start() {
    let Some(mut bench) = bench() else { return };
    // This full socket delays the message that the daemon sends to systemd before it mounts.
    let path = bench.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to(b"full", &path).is_ok() {}
    let mut command = bench.mount();
    let child = command.arg("--foreground").env("NOTIFY_SOCKET", &path).stderr(Stdio::piped()).spawn().unwrap();
    let pid = pid_of(&child);
    bench.children.push(child);
    let has_set_up_signals = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let has = |set: &str, signal: i32| {
            let mask = status.lines().find_map(|line| line.strip_prefix(set)).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << (signal - 1)) != 0
        };
        // All are blocked for a moment before, while the thread of the log is started.
        has("SigIgn:", libc::SIGALRM) && has("SigBlk:", libc::SIGUSR2)
    };
    until("the daemon has set up its signals", has_set_up_signals);
    // Where systemd keeps the connection, this one leaves the mount to the next process.
    send_harmless(pid, HARMLESS.into_iter().filter(|signal| *signal != libc::SIGUSR2));
    thread::sleep(Duration::from_millis(20));
    assert_eq!((bench.children[0].try_wait().unwrap(), bench.mounts()), (None, 0));
    socket.set_nonblocking(true).unwrap();
    until("the mount answers", || {
        while socket.recv(&mut [0; 100]).is_ok() {}
        bench.mnt().join("dev0").is_dir()
    });
    bench.lives();
    let mut stderr = bench.children[0].stderr.take().unwrap();
    assert_eq!(bench.end(Signal::SIGTERM), 0);
    let mut reported = String::new();
    stderr.read_to_string(&mut reported).unwrap();
    assert!(reported.contains("statistics of"), "SIGUSR1 was kept until the mount was there: {reported}");
}

#[test]
fn sighup_opens_the_log_file_anew_and_sigusr1_writes_statistics() {
    let Some(mut bench) = bench() else { return };
    for foreground in [false, true] {
        let (log, old) = (bench.path("log"), bench.path("old"));
        let log_args = ["--log-file", log.to_str().unwrap()];
        let daemon = if foreground {
            bench.foreground(&log_args, Stdio::null())
        } else {
            assert!(bench.mount().args(log_args).status().unwrap().success());
            bench.daemon()
        };
        bench.lives();
        kill(daemon, Signal::SIGUSR1).unwrap();
        until("statistics are written", || {
            fs::read_to_string(&log).unwrap().contains(" INFO ckfs::fuse::session: statistics of ")
        });
        let line = fs::read_to_string(&log).unwrap();
        assert!(line.contains(" requests, ") && line.contains(" 0 panics, "), "{line}");
        fs::rename(&log, &old).unwrap();
        kill(daemon, Signal::SIGHUP).unwrap();
        until("the file is opened anew", || log.exists());
        kill(daemon, Signal::SIGUSR1).unwrap();
        until("statistics are written", || fs::read_to_string(&log).unwrap().contains("statistics of"));
        assert_eq!(fs::read_to_string(&old).unwrap().matches("statistics of").count(), 1);
        bench.lives();
        if foreground {
            assert_eq!(bench.end(Signal::SIGINT), 0);
        } else {
            kill(daemon, Signal::SIGTERM).unwrap();
            until("it is unmounted", || bench.mounts() == 0);
        }
        fs::remove_file(&log).unwrap();
    }
}

#[test]
fn two_mounts_have_two_logs() {
    let Some(bench) = bench() else { return };
    if Path::new("/dev/log").exists() || Path::new("/run/systemd/journal/socket").exists() {
        return;
    }
    fs::create_dir(bench.path("other")).unwrap();
    assert!(bench.mount().status().unwrap().success());
    let other = bench.program().arg("mount").arg(bench.path("model")).arg(bench.path("other")).output().unwrap();
    assert!(other.status.success(), "{}", text(&other));
    let kept = fs::read_dir(bench.path("state/ckfs")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(kept.filter(|path| path.extension().is_some_and(|ending| ending == "log")).count(), 2);
    kill(bench.daemon(), Signal::SIGKILL).unwrap();
    until("the first mount is dead", || fs::read_dir(bench.mnt()).is_err());
    assert_eq!(fs::read(bench.path("other/dev0/w")).unwrap(), data(), "the other lives");
    let output = bench.program().arg("umount").arg(bench.path("other")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}
