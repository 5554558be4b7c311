//! A daemon in a control group with little memory is not killed, and every byte is right.
//!
//! The kernel kills a process whose control group exceeds its limit, and a killed daemon takes the mount with it. The budget
//! must hold with defaults, with materialized files, with programs that keep maps of dropped files, and with a full page cache.
//!
//! The tests need root, `/dev/fuse` and a hierarchy of control groups in which they may create a group that limits memory. Where
//! they cannot create one they are skipped with a message; without `/dev/fuse` they fail if `CI=true`.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails where it panics, and prints the reason for a skip"
)]
#![allow(unsafe_code)]

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use ckfs::host::memory::limit_files;
use memmap2::Mmap;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const TENSORS: usize = 150;
/// Elements of each tensor: 2 MiB.
const ELEMENTS: usize = 512 << 10;
const ROWS: usize = 512;

/// A control group for the test.
struct Group {
    directory: PathBuf,
    is_v1: bool,
}

impl Group {
    /// A group beside or below the test's own; else the reason why there is none.
    fn new(name: &str, limit_bytes: u64) -> Result<Self, String> {
        let read = |path| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
        let files = limit_files(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?);
        let name = format!("ckfs-test-{name}-{}", std::process::id());
        let mut why = "no hierarchy limits memory".to_owned();
        for file in &files {
            if !file.before.is_empty() {
                continue;
            }
            let path = &file.path;
            let is_v1 = path.ends_with("memory.limit_in_bytes");
            // In version 2, a group that holds processes cannot have a child that limits memory; a sibling may be possible.
            let Some(parent) = path.parent().filter(|_| is_v1 || path.ends_with("memory.max")) else { continue };
            let directory = parent.join(&name);
            if let Err(error) = fs::create_dir(&directory) {
                why = format!("{}: {error}", directory.display());
                continue;
            }
            let group = Self { directory, is_v1 };
            let limit = group.directory.join(if is_v1 { "memory.limit_in_bytes" } else { "memory.max" });
            match fs::write(&limit, limit_bytes.to_string()) {
                Ok(()) => {
                    // Without swap, as in containers.
                    let _ = fs::write(group.directory.join("memory.swap.max"), "0");
                    return Ok(group);
                }
                Err(error) => why = format!("{}: {error}", limit.display()),
            }
        }
        Err(why)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).unwrap_or_default()
    }

    fn number(&self, file: &str, key: &str) -> u64 {
        let text = self.read(file);
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {key} in {file}: {text}")).trim().parse().unwrap()
    }

    fn kills(&self) -> u64 {
        self.number(if self.is_v1 { "memory.oom_control" } else { "memory.events" }, "oom_kill")
    }

    /// Memory that the kernel cannot reclaim: private memory and files in memory.
    fn pinned_bytes(&self) -> u64 {
        let anonymous = if self.is_v1 { "rss" } else { "anon" };
        self.number("memory.stat", anonymous) + self.number("memory.stat", "shmem")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The daemon needs a moment to end.
        for _ in 0..100 {
            if fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        eprintln!("left behind: {}", self.directory.display());
    }
}

/// Computes the bytes of a tensor as a mount should show them.
type Bytes = fn(usize) -> Vec<u8>;

/// Element `n` of a tensor, a finite float32.
fn element(tensor: usize, n: usize) -> u32 {
    let number = u32::try_from(tensor * ELEMENTS + n).unwrap();
    (number.wrapping_mul(0x9e37_79b9) ^ number.rotate_left(13)) & !0x4000_0000
}

fn bytes_f32(tensor: usize) -> Vec<u8> {
    (0..ELEMENTS).flat_map(|n| element(tensor, n).to_le_bytes()).collect()
}

/// Rounds to nearest, ties to even.
fn bytes_bf16(tensor: usize) -> Vec<u8> {
    let round = |bits: u32| (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    (0..ELEMENTS).flat_map(|n| u16::try_from(round(element(tensor, n))).unwrap().to_le_bytes()).collect()
}

fn name(tensor: usize) -> String {
    format!("t{tensor:03}")
}

fn write_repo(directory: &Path) {
    let mut header = serde_json::Map::new();
    let bytes = ELEMENTS * 4;
    for tensor in 0..TENSORS {
        let offsets = [tensor * bytes, (tensor + 1) * bytes];
        let row = json!({"dtype": "F32", "shape": [ROWS, ELEMENTS / ROWS], "data_offsets": offsets});
        header.insert(name(tensor), row);
    }
    let header = Value::from(header).to_string();
    let mut file = BufWriter::new(File::create(directory.join("model.safetensors")).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    (0..TENSORS).for_each(|tensor| file.write_all(&bytes_f32(tensor)).unwrap());
    fs::write(directory.join("config.json"), "{}").unwrap();
}

/// A mount whose daemon is in a control group.
struct Mounted<'a> {
    mountpoint: &'a Path,
}

fn ckfs() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ckfs"))
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = ckfs().args(["umount", "--lazy"]).arg(self.mountpoint).output();
    }
}

fn mount<'a>(group: &Group, source: &Path, mountpoint: &'a Path, options: &[&str]) -> (Mounted<'a>, String) {
    let Output { status, stderr, .. } = Command::new("sh")
        .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
        .arg(&group.directory)
        .arg(env!("CARGO_BIN_EXE_ckfs"))
        .arg("mount")
        .args([source, mountpoint])
        .args(options)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&stderr).into_owned();
    assert!(status.success(), "{text}");
    (Mounted { mountpoint }, text)
}

fn stats(mountpoint: &Path) -> Value {
    let text = fs::read_to_string(mountpoint.join(".ckfs/stats.json")).expect("the daemon lives");
    serde_json::from_str(&text).unwrap()
}

/// Fails if the daemon holds more than its budget.
fn check_budget(stats: &Value) {
    let (held, budget) = (&stats["memory"]["held"], &stats["memory"]["budget"]);
    let bytes = |value: &Value| value.as_u64().unwrap();
    let cache: u64 =
        ["tiles", "materialized", "dropped"].iter().map(|part| bytes(&held[format!("{part}_bytes")])).sum();
    assert!(cache <= bytes(&budget["cache_bytes"]), "{}", stats["memory"]);
    assert!(bytes(&held["spare_buffers_bytes"]) <= bytes(&budget["spare_buffers_bytes"]), "{}", stats["memory"]);
}

/// Reads all files twice, by four threads that keep maps of some of them.
fn read_all(mountpoint: &Path, expected: Bytes) {
    let read = |first: usize| {
        let mut maps = Vec::new();
        for tensor in (first..TENSORS).step_by(4).chain((first..TENSORS / 5).step_by(4)) {
            let path = mountpoint.join("full").join(name(tensor));
            let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let expected = expected(tensor);
            assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
            // SAFETY: no process writes to files of the mount.
            let map = unsafe { Mmap::map(&file) }.unwrap();
            assert!(*map == *expected, "{} mapped", path.display());
            // The map stays after the file is closed and dropped.
            if tensor % 3 == 0 {
                maps.push((map, tensor));
            }
        }
        for (map, tensor) in maps.iter().step_by(3) {
            assert!(**map == *expected(*tensor), "{tensor} still mapped");
        }
    };
    thread::scope(|scope| (0..4).for_each(|first| drop(scope.spawn(move || read(first)))));
}

#[test]
fn a_daemon_in_a_small_group_survives_and_reads_correctly() {
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI needs /dev/fuse");
        return;
    }
    let (source, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_repo(source.path());
    let rows: [(u64, &[&str], Bytes); 4] = [
        (256, &[], bytes_f32),
        (256, &["--dtype", "bf16"], bytes_bf16),
        (64, &[], bytes_f32),
        (64, &["--dtype", "bf16", "--source-io", "pread"], bytes_bf16),
    ];
    for (limit_mib, options, expected) in rows {
        let group = match Group::new("small", limit_mib * MIB) {
            Ok(group) => group,
            Err(why) => return eprintln!("skipped: no control group can be made: {why}"),
        };
        let (mounted, _) = mount(&group, source.path(), at.path(), options);
        let memory = stats(mounted.mountpoint)["memory"].clone();
        assert_eq!(memory["limit_bytes"], limit_mib * MIB, "{memory}");
        let directory = group.directory.display().to_string();
        assert!(memory["limit_origin"].as_str().unwrap().contains(&directory), "{memory}");
        let (mut pinned_bytes, mut dropped_bytes) = (0, 0);
        thread::scope(|scope| {
            let reading = scope.spawn(|| read_all(at.path(), expected));
            while !reading.is_finished() {
                let stats = stats(at.path());
                check_budget(&stats);
                dropped_bytes = dropped_bytes.max(stats["memory"]["held"]["dropped_bytes"].as_u64().unwrap());
                pinned_bytes = pinned_bytes.max(group.pinned_bytes());
                thread::sleep(Duration::from_millis(20));
            }
            reading.join().unwrap();
        });
        assert_eq!(group.kills(), 0);
        let (pinned_mib, dropped_mib) = (pinned_bytes / MIB, dropped_bytes / MIB);
        eprintln!("{limit_mib} MiB {options:?}: at most {pinned_mib} MiB held, {dropped_mib} MiB dropped but mapped");
        assert!(pinned_bytes < limit_mib * MIB / 4 * 3, "{pinned_bytes} bytes held in {limit_mib} MiB");
        let status = ckfs().arg("status").arg(at.path()).output().unwrap();
        let text = String::from_utf8(status.stdout).unwrap();
        assert!(status.status.success() && text.contains(&directory), "{text}");
        drop(mounted);
    }
}

#[test]
fn a_cache_beyond_the_limit_causes_a_warning() {
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        return;
    }
    let (source, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let header = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7]].concat();
    fs::write(source.path().join("model.safetensors"), file).unwrap();
    let group = match Group::new("warned", 128 * MIB) {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: no control group can be made: {why}"),
    };
    let (mounted, text) = mount(&group, source.path(), at.path(), &["--cache-bytes", "1G"]);
    let limit = format!("more than the limit of 128 MiB (control group: {}", group.directory.display());
    assert!(text.contains("--cache-bytes 1.0 GiB") && text.contains(&limit), "{text}");
    assert_eq!(stats(at.path())["memory"]["budget"]["cache_bytes"], 1024 * MIB, "obeyed");
    drop(mounted);
}

/// How chunks are packed, as Orbax writes them.
#[derive(Clone, Copy, Debug)]
enum Packed {
    Zstd,
    Gzip,
}

impl Packed {
    fn pack(self, file: File, bytes: impl Iterator<Item = Vec<u8>>) {
        match self {
            Self::Zstd => {
                let mut encoder = zstd::stream::Encoder::new(file, 1).unwrap();
                bytes.for_each(|bytes| encoder.write_all(&bytes).unwrap());
                encoder.finish().unwrap();
            }
            Self::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
                bytes.for_each(|bytes| encoder.write_all(&bytes).unwrap());
                encoder.finish().unwrap();
            }
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Gzip => "gzip",
        }
    }
}

/// Writes an Orbax checkpoint with a small tensor and one of zeros that has `rows` MiB, in chunks of `chunk_rows` MiB.
fn write_orbax(directory: &Path, rows: u64, chunk_rows: u64, packed: Packed, is_version_3: bool) {
    let leaf = json!({
        "key_metadata": [{"key": "n", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": false},
    });
    let mut zeros = leaf.clone();
    zeros["key_metadata"][0]["key"] = json!("zeros");
    let metadata =
        json!({"tree_metadata": {"('n',)": leaf, "('zeros',)": zeros}, "use_ocdbt": false, "use_zarr3": is_version_3});
    fs::write(directory.join("_METADATA"), metadata.to_string()).unwrap();
    for (name, shape, chunk) in [("n", vec![8], vec![8]), ("zeros", vec![rows, MIB / 4], vec![chunk_rows, MIB / 4])] {
        let (packing, place) = (packed.name(), directory.join(name));
        fs::create_dir(&place).unwrap();
        if is_version_3 {
            let array = json!({
                "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "float32", "fill_value": 0.0,
                "attributes": {},
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": packing, "configuration": {"level": 1}},
                ],
            });
            fs::write(place.join("zarr.json"), array.to_string()).unwrap();
        } else {
            let array = json!({
                "zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": "<f4", "order": "C", "fill_value": null,
                "filters": null, "compressor": {"id": packing, "level": 1}, "dimension_separator": ".",
            });
            fs::write(place.join(".zarray"), array.to_string()).unwrap();
        }
        let key = |number: u64| match (name, is_version_3) {
            ("n", false) => "0".to_owned(),
            ("n", true) => "c/0".to_owned(),
            (_, false) => format!("{number}.0"),
            (_, true) => format!("c/{number}/0"),
        };
        let mut first = None;
        for number in 0..shape[0] / chunk[0] {
            let path = place.join(key(number));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match &first {
                Some(first) => drop(fs::copy(first, &path).unwrap()),
                None if name == "n" => packed.pack(
                    File::create(&path).unwrap(),
                    std::iter::once((0..8u8).flat_map(|n| f32::from(n).to_le_bytes()).collect()),
                ),
                None => packed.pack(
                    File::create(&path).unwrap(),
                    (0..chunk_rows).map(|_| vec![0; usize::try_from(MIB).unwrap()]),
                ),
            }
            first.get_or_insert(path);
        }
    }
}

impl Group {
    /// Runs a command of the program on a source in this group. Returns its exit code, its errors, and what it printed.
    fn run(&self, source: &Path, command: &[&str]) -> (Option<i32>, String, Vec<u8>) {
        let output = Command::new("sh")
            .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
            .arg(&self.directory)
            .args([env!("CARGO_BIN_EXE_ckfs"), command[0]])
            .arg(source)
            .args(&command[1..])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), output.stdout)
    }
}

#[test]
fn a_chunk_that_does_not_fit_the_limit_is_refused_before_it_is_decoded() {
    let group = match Group::new("chunk", 512 * MIB) {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: no control group can be made: {why}"),
    };
    for (packed, is_version_3) in
        [(Packed::Zstd, false), (Packed::Gzip, false), (Packed::Zstd, true), (Packed::Gzip, true)]
    {
        let source = tempfile::tempdir().unwrap();
        // One chunk: an array that was on one device, or on all.
        write_orbax(source.path(), 700, 700, packed, is_version_3);
        let target = source.path().join("target");
        let mnt = tempfile::tempdir().unwrap();
        let (target, mnt) = (target.to_str().unwrap(), mnt.path().to_str().unwrap());
        for command in [&["plan"][..], &["mount", "-f", mnt], &["cat", "full/zeros"], &["verify"], &["export", target]]
        {
            let (code, error, _) = group.run(source.path(), command);
            let is_told = ["zeros", "takes 70", "stored in", "512 MiB", "--cache-bytes", "--exclude"];
            assert_eq!(code, Some(1), "{packed:?} {command:?}: {error}");
            assert!(is_told.iter().all(|told| error.contains(told)), "{packed:?} {command:?}: {error}");
        }
        let (code, error, bytes) = group.run(source.path(), &["cat", "full/n", "--exclude", "zeros"]);
        assert_eq!((code, bytes.len()), (Some(0), 32), "{packed:?}: {error}");
    }
    assert_eq!(group.kills(), 0);
}

#[test]
fn an_export_of_an_array_larger_than_the_memory_keeps_the_bound() {
    let group = match Group::new("export", 512 * MIB) {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: no control group can be made: {why}"),
    };
    for packed in [Packed::Zstd, Packed::Gzip] {
        let source = tempfile::tempdir().unwrap();
        write_orbax(source.path(), 1024, 32, packed, false);
        let target = tempfile::tempdir().unwrap();
        let command = ["export", target.path().to_str().unwrap(), "--only", "full/zeros", "--force"];
        let (code, error, _) = group.run(source.path(), &command);
        assert_eq!((code, group.kills()), (Some(0), 0), "{packed:?}: {error}");
        assert_eq!(fs::metadata(target.path().join("full/zeros")).unwrap().len(), 1024 * MIB);
    }
}
