//! A mount that cannot read its sources reports it: in `ckfs status`, in `.ckfs/stats.json` and in `.ckfs/metrics`.
//!
//! If a monitor reports a broken mount as healthy, a training job fails on it. Tests that mount need `/dev/fuse`;
//! without it they are skipped, except in continuous integration (`CI=true`), where they fail.
#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::common::repo;
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::ViewOptions,
    source::{FetchPart, FileId, Health, Pin, Source, SourceError, digest::hexadecimal},
    tensor::DType,
    volume::{FileSystem, ProblemKind, Upkeep, Volume, VolumeOptions},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Whether the test can try to mount.
fn can_mount() -> bool {
    let can = fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    assert!(can || std::env::var("CI").as_deref() != Ok("true"), "CI needs /dev/fuse");
    can
}

fn stats(volume: &Volume) -> Value {
    let attr = volume.resolve(".ckfs/stats.json").unwrap();
    let bytes = repo::read(volume, attr.ino, 0, 1 << 24);
    assert_eq!(bytes.len() as u64, attr.size_bytes, "the size is exact for any content");
    serde_json::from_slice(&bytes).unwrap()
}

fn metrics(volume: &Volume) -> String {
    let attr = volume.resolve(".ckfs/metrics").unwrap();
    let bytes = repo::read(volume, attr.ino, 0, 1 << 24);
    assert_eq!(bytes.len() as u64, attr.size_bytes);
    String::from_utf8(bytes).unwrap()
}

/// The value of a metric.
fn metric(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Sets a file's times to now, as `touch` does.
fn touch(path: &Path) {
    fs::File::options().write(true).open(path).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
}

fn weights(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("model-0000{number}-of-00002.safetensors"))
}

#[test]
fn problems_of_a_volume_are_in_its_statistics() {
    let dir = repo::llama(2, DType::F32);
    let options = VolumeOptions { remount: "ckfs mount s /m".to_owned(), ..VolumeOptions::default() };
    let volume = repo::volume(&repo::open(dir.path()), &ViewOptions::default(), options);
    assert_eq!((&stats(&volume)["health"], &stats(&volume)["last_error"]), (&json!("healthy"), &Value::Null));
    assert_eq!(metric(&metrics(&volume), "ckfs_degraded"), 0);

    // Removed for the moment: an open fails, and it is not known yet whether the file has changed.
    let aside = dir.path().with_extension("aside");
    fs::rename(dir.path(), &aside).unwrap();
    let late = volume.resolve("full/layers/1/w_down").unwrap().ino;
    assert!(volume.open(late).is_err());
    fs::rename(&aside, dir.path()).unwrap();
    assert!(volume.open(late).is_ok(), "the file itself is what it was");
    let found = stats(&volume);
    let problem = &found["problems"][0];
    assert_eq!((&problem["kind"], &problem["file"]), (&json!("failed open"), &json!("full/layers/1/w_down")));
    assert!(problem["cause"].as_str().unwrap().contains("cannot stat"), "{problem}");
    assert_eq!(
        (&found["failed_opens"], &found["health"], &problem["count"]),
        (&json!(1), &json!("degraded"), &json!(1))
    );

    // Changed while open: reads fail.
    let embed = volume.resolve("full/embed").unwrap().ino;
    let open = volume.open(embed).unwrap();
    touch(&weights(dir.path(), 1));
    for _ in 0..3 {
        assert!(volume.read(embed, open.handle, 0, 100, &mut |_| ckfs::source::Replied::new()).is_err());
    }
    volume.release(embed, open.handle);
    volume.metrics().note_panic("read of inode 5", "index out of bounds");
    let found = stats(&volume);
    let rows = found["problems"].as_array().unwrap();
    assert_eq!((rows.len(), &found["failed_reads"], &found["panics"]), (3, &json!(3), &json!(1)));
    assert_eq!((&rows[1]["kind"], &rows[1]["count"]), (&json!("source changed"), &json!(3)));
    assert_eq!(rows[1]["file"], json!(weights(dir.path(), 1).display().to_string()));
    assert!(rows.iter().all(|row| row["remedy"].as_str().unwrap().contains("ckfs mount s /m")), "{rows:?}");
    assert_eq!((&rows[2]["kind"], &found["last_error"]["kind"]), (&json!("panic"), &json!("panic")));
    let text = metrics(&volume);
    let value = |name| metric(&text, name);
    assert_eq!((value("ckfs_degraded"), value("ckfs_poisoned_sources"), value("ckfs_panics_total")), (1, 1, 1));
    assert_eq!((value("ckfs_failed_reads_total"), value("ckfs_failed_opens_total")), (3, 1));
}

#[test]
fn a_source_that_stalls_is_a_problem_until_it_answers() {
    let dir = repo::llama(1, DType::F32);
    let volume = repo::volume(&repo::open(dir.path()), &ViewOptions::default(), VolumeOptions::default());
    let file = weights(dir.path(), 1).display().to_string();
    volume.health().note(ProblemKind::SourceStalled, &file, "no answer in 60 s");
    assert_eq!((&stats(&volume)["health"], metric(&metrics(&volume), "ckfs_stalled_sources")), (&json!("degraded"), 1));
    volume.health().clear(ProblemKind::SourceStalled, &file);
    let found = stats(&volume);
    assert_eq!((&found["health"], metric(&metrics(&volume), "ckfs_stalled_sources")), (&json!("healthy"), 0));
    assert!(found["problems"][0]["ended"].is_string(), "{found}");
}

#[test]
fn sizes_stay_exact_however_much_goes_wrong() {
    let dir = repo::llama(1, DType::F32);
    let volume = repo::volume(&repo::open(dir.path()), &ViewOptions::default(), VolumeOptions::default());
    for number in 0..100 {
        let name = format!("{number}/{}", "\u{1}".repeat(4000));
        volume.health().note(ProblemKind::FailedRead, &name, &"\u{2}".repeat(100_000));
    }
    (1..3).for_each(|number| touch(&weights(dir.path(), number)));
    assert!(volume.open(volume.resolve("full/embed").unwrap().ino).is_err());
    let found = stats(&volume);
    let listed = found["problems"].as_array().unwrap().len() as u64;
    assert!(listed < 16 && listed + found["problems_left_out"].as_u64().unwrap() >= 100, "{listed}");
    assert_eq!(found["poisoned_files"], json!([weights(dir.path(), 1).display().to_string()]), "changes that were met");
    assert!(metrics(&volume).ends_with("# EOF\n"));
}

struct Mounted {
    dir: tempfile::TempDir,
    mountpoint: PathBuf,
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn ckfs(args: &[&str]) -> Ran {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_ckfs")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: status.code().unwrap_or(-1), out: text(stdout), err: text(stderr) }
}

impl Mounted {
    fn new(more: &[&str]) -> Self {
        let (dir, at) = (repo::llama(2, DType::F32), tempfile::tempdir().unwrap());
        let mountpoint = at.keep();
        let mounted = Self { dir, mountpoint };
        let source = mounted.dir.path().display().to_string();
        let ran = ckfs(&[&["mount", &source, mounted.at()], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        mounted
    }

    fn at(&self) -> &str {
        self.mountpoint.to_str().unwrap()
    }

    fn status(&self, code: i32) -> Value {
        let ran = ckfs(&["status", self.at(), "--json"]);
        assert_eq!(ran.code, code, "{}\n{}", ran.err, ran.out);
        serde_json::from_str::<Value>(&ran.out).unwrap()["mounts"][0].clone()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let ran = ckfs(&["umount", "--lazy", self.at()]);
        assert!(std::thread::panicking() || ran.code == 0, "{}", ran.err);
        let _ = fs::remove_dir(&self.mountpoint);
    }
}

#[test]
fn a_mount_whose_sources_changed_is_degraded() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&[]);
    let read = |name: &str| fs::read(mounted.mountpoint.join(name));
    read("full/embed").unwrap();
    let before = mounted.status(0);
    assert_eq!((&before["health"], &before["problems"]), (&json!("healthy"), &json!([])));
    (1..3).for_each(|number| touch(&weights(mounted.dir.path(), number)));
    for name in ["full/layers/0/wq", "full/layers/1/w_down"] {
        assert_eq!(read(name).unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    let after = mounted.status(1);
    assert_eq!(after["health"], "degraded");
    let problems = after["problems"].as_array().unwrap();
    let mut files: Vec<&str> = problems.iter().map(|problem| problem["file"].as_str().unwrap()).collect();
    files.sort_unstable();
    let expected: Vec<String> =
        (1..3).map(|number| weights(mounted.dir.path(), number).display().to_string()).collect();
    assert_eq!(files, expected);
    let at = mounted.at();
    let again = format!("ckfs restart {at}");
    for problem in problems {
        let remedy = problem["remedy"].as_str().unwrap();
        assert!(remedy.ends_with(&again), "{remedy}");
        assert!(problem["cause"].as_str().unwrap().contains("modification time"), "{problem}");
        assert!(problem["first"].as_str() <= problem["last"].as_str());
    }
    assert_eq!(after["last_error"]["file"], json!(expected[1]));
    assert_eq!((&after["stats"]["failed_opens"], &after["stats"]["poisoned_sources"]), (&json!(2), &json!(2)));

    let ran = ckfs(&["status", mounted.at()]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("1 mount degraded"), "{}", ran.err);
    let times = after["last_error"]["time"].as_str().unwrap();
    for part in ["health  degraded", &expected[0], &expected[1], "modification time", &again, times] {
        assert!(ran.out.contains(part), "{part}: {}", ran.out);
    }
    let doctor = ckfs(&["doctor"]);
    assert!(doctor.out.contains(&format!("{at} is degraded")), "{}", doctor.out);
    let text = fs::read_to_string(mounted.mountpoint.join(".ckfs/metrics")).unwrap();
    assert_eq!((metric(&text, "ckfs_degraded"), metric(&text, "ckfs_failed_opens_total")), (1, 2));

    // The remedy is one.
    let mended = ckfs(&again.split(' ').skip(1).collect::<Vec<_>>());
    assert_eq!(mended.code, 0, "{}", mended.err);
    assert_eq!(mounted.status(0)["health"], "healthy");
    read("full/layers/0/wq").unwrap();
}

/// All files below a directory.
fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn a_daemon_has_no_more_threads_than_the_guide_says_however_many_read() {
    if !can_mount() {
        return;
    }
    let threads = 2;
    let mounted = Mounted::new(&["--threads", "2", "--dtype", "bf16", "--materialize", "none"]);
    let mut files = Vec::new();
    files_below(&mounted.mountpoint.join("full"), &mut files);
    let is_done = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let read = || {
            while !is_done.load(Ordering::Relaxed) {
                for file in &files {
                    assert!(!fs::read(file).unwrap().is_empty());
                }
            }
        };
        (0..24).for_each(|_| drop(scope.spawn(read)));
        let until = Instant::now() + Duration::from_secs(3);
        let mut most = 0;
        while Instant::now() < until {
            most = most.max(mounted.status(0)["stats"]["threads"].as_u64().unwrap());
        }
        is_done.store(true, Ordering::Relaxed);
        most
    });
    let processors = std::thread::available_parallelism().unwrap().get() as u64;
    // `operations.md`, "Limits".
    assert!((threads..=2 * threads + 3 * processors + 24).contains(&most), "{most} threads");
    let stats = &mounted.status(0)["stats"];
    let by_use = stats["threads_by_use"].as_object().unwrap();
    let counted: u64 = by_use.values().map(|count| count.as_u64().unwrap()).sum();
    assert!(counted < stats["threads"].as_u64().unwrap(), "{stats}");
    let ran = ckfs(&["status", mounted.at()]);
    assert!(ran.out.contains("\n  threads "), "{}", ran.out);
}

/// A source of which the check of one file panics, once it is told to.
struct Panicking(Arc<dyn Source>, FileId, Arc<AtomicBool>);

impl Source for Panicking {
    fn file_count(&self) -> usize {
        self.0.file_count()
    }

    fn pin(&self, file: FileId) -> &Pin {
        self.0.pin(file)
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        self.0.check(file)
    }

    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        assert!(file != self.1 || !self.2.load(Ordering::Relaxed), "a check that panics");
        self.0.check_path(file)
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        self.0.fetch(file, parts)
    }

    fn health(&self) -> &Health {
        self.0.health()
    }
}

#[test]
fn a_check_that_panics_keeps_no_other_file_from_being_checked() {
    let dir = repo::llama(2, DType::F32);
    let checkpoint = Checkpoint::open(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    let file = |number| {
        let (source, path) = (checkpoint.source(), weights(dir.path(), number));
        let count = u32::try_from(source.file_count()).unwrap();
        (0..count).map(FileId).find(|file| source.path(*file) == path).unwrap()
    };
    // The first that is checked panics.
    let (panicking, changed) = if file(1) < file(2) { (1, 2) } else { (2, 1) };
    let (bad, panics) = (file(panicking), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&panics);
    let checkpoint = Arc::new(checkpoint.with_source(|source| Arc::new(Panicking(source, bad, told))));
    let volume = repo::volume(&checkpoint, &ViewOptions::default(), VolumeOptions::default());
    let open = |number: usize| {
        let ino = volume.resolve(&format!("hf/model-0000{number}-of-00002.safetensors")).unwrap().ino;
        (ino, volume.open(ino).unwrap().handle)
    };
    let opened = [open(panicking), open(changed)];
    panics.store(true, Ordering::Relaxed);
    volume.check_sources();
    assert!(!volume.needs_poisoned(opened[1].0));
    touch(&weights(dir.path(), changed));
    volume.check_sources();
    assert!(volume.needs_poisoned(opened[1].0), "{}", stats(&volume));
    assert_eq!((&stats(&volume)["panics"], &stats(&volume)["health"]), (&json!(2), &json!("degraded")));
    for (ino, handle) in opened {
        volume.release(ino, handle);
    }
}

/// The kernel reads an identical file by itself, or from its page cache: no request arrives, and the change is found even so.
#[test]
fn a_change_without_any_read_is_noticed() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&[]);
    fs::read(mounted.mountpoint.join("hf/model-00001-of-00002.safetensors")).unwrap();
    touch(&weights(mounted.dir.path(), 1));
    let begin = Instant::now();
    while ckfs(&["status", mounted.at()]).code == 0 {
        assert!(begin.elapsed() < Duration::from_mins(3), "not noticed");
        std::thread::sleep(Duration::from_millis(200));
    }
    let found = mounted.status(1);
    assert_eq!(found["problems"][0]["kind"], "source changed");
    assert_eq!(found["stats"]["failed_reads"], 0);
}

/// Large blobs of the Hub's cache are compared with the digest of their name beside the readers. What a disk lost in the
/// middle of one is noticed although no reader came there.
#[test]
fn a_mount_compares_large_blobs_and_gives_no_byte_of_a_damaged_one_afterwards() {
    const COMMIT: &str = "0123456789012345678901234567890123456789";
    const BYTES: u64 = 160 << 20;
    if !can_mount() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let repository = place.path().join("hub/models--org--name");
    let snapshot = repository.join("snapshots").join(COMMIT);
    for dir in [&snapshot, &repository.join("blobs"), &repository.join("refs"), &place.path().join("mnt")] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(repository.join("refs/main"), COMMIT).unwrap();
    fs::write(snapshot.join("config.json"), r#"{"model_type": "none of those known"}"#).unwrap();
    let header = json!({"alpha.weight": {"dtype": "U8", "shape": [BYTES], "data_offsets": [0, BYTES]}}).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let digest = {
        let mut digest = Sha256::new_with_prefix(&bytes);
        (0..BYTES >> 20).for_each(|_| digest.update(vec![7; 1 << 20]));
        hexadecimal(&digest.finalize())
    };
    let (start, data) = (bytes.len(), repository.join("blobs").join(&digest));
    bytes.resize(start + usize::try_from(BYTES).unwrap(), 7);
    bytes[start + (100 << 20)] = 8;
    fs::write(&data, &bytes).unwrap();
    std::os::unix::fs::symlink(Path::new("../../blobs").join(&digest), snapshot.join("model.safetensors")).unwrap();
    let mnt = place.path().join("mnt");
    let ckfs = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env("HF_HUB_CACHE", place.path().join("hub")).env("XDG_STATE_HOME", place.path().join("state"));
        command.args(args).arg(&mnt).output().unwrap()
    };
    let log = place.path().join("log");
    let made = ckfs(&["mount", "--offline", "--log-file", log.to_str().unwrap(), "org/name"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let read = |name: &str| {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; 1 << 20];
        fs::File::open(mnt.join(name))?.read_exact_at(&mut bytes, 1 << 20).map(|()| bytes)
    };
    let names = ["full/alpha", "hf/model.safetensors"];
    let result = std::panic::catch_unwind(|| {
        for name in names {
            assert!(read(name).unwrap().iter().all(|byte| *byte == 7), "{name}: right where it was read");
        }
        let begin = Instant::now();
        let said = loop {
            let status = ckfs(&["status"]);
            if status.status.code() == Some(1) {
                break String::from_utf8(status.stdout).unwrap();
            }
            assert!(begin.elapsed() < Duration::from_mins(3), "not noticed");
            std::thread::sleep(Duration::from_millis(200));
        };
        for part in ["degraded", &digest, "SHA-256", "hf download", snapshot.to_str().unwrap()] {
            assert!(said.contains(part), "{part} in {said}");
        }
        for name in names {
            let error = read(name).expect_err(name);
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{name}");
        }
        assert!(fs::read_to_string(&log).unwrap().contains(&digest), "the log says it too");
    });
    let ended = ckfs(&["umount", "--lazy"]);
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}
