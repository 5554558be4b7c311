//! Metadata that has a row for each tensor and each device: exact, the same for any read span, and generated in little
//! memory.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests panic, and print why they are skipped")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Output},
};

use crate::common::repo::{self, row};
use ckfs::{
    checkpoint::Checkpoint,
    format::safetensors::write_header,
    plan::{Allow, Layout, Mesh, Plan, PlanError, ViewOptions},
    tensor::{DType, Region, TensorId},
    volume::{FileSystem, Ino, Volume, VolumeOptions, unavailable},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::json;
use tempfile::TempDir;

fn options(mesh: &str, layout: Layout) -> ViewOptions {
    ViewOptions { mesh: Mesh::parse(mesh).unwrap(), layout, ..ViewOptions::default() }
}

/// A repository of single experts, odd shapes and a name that JSON and pickles have to escape.
fn experts() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = vec![row("model.embed_tokens.weight", DType::BF16, &[1100, 6]), row("scalar", DType::F32, &[])];
    rows.extend([row("hollow", DType::F16, &[0, 5]), row("odd\"\\\n\u{e9}", DType::U8, &[7])]);
    for layer in 0..3 {
        rows.push(row(&format!("model.layers.{layer}.input_layernorm.weight"), DType::F32, &[6]));
        for expert in 0..4 {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
            rows.push(row(&name, DType::BF16, &[11, 6]));
        }
    }
    let config = json!({"model_type": "qwen3_next", "num_hidden_layers": 3});
    repo::write_repo(dir.path(), &[&rows], &config);
    dir
}

/// The manifest, written at once in the simplest way.
fn manifest(checkpoint: &Checkpoint, plan: &Plan) -> Vec<u8> {
    let axes = plan.mesh.axes();
    let mesh: serde_json::Map<_, _> = axes.iter().map(|axis| (axis.name.clone(), axis.size.into())).collect();
    let device = |device: &u64| {
        let names = axes.iter().map(|axis| axis.name.clone());
        let at: serde_json::Map<_, _> = names.zip(plan.mesh.coordinates(*device).into_iter().map(Into::into)).collect();
        json!({"device": device, "coordinates": at})
    };
    let head = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": checkpoint.label(),
        "layout": plan.layout.name(),
        "family": plan.family,
        "dtype": plan.dtype.map(DType::code),
        "mesh": mesh,
        "devices": plan.devices.iter().map(device).collect::<Vec<_>>(),
    });
    let mut out = head.to_string().strip_suffix('}').unwrap().as_bytes().to_vec();
    out.write_all(b",\n\"tensors\": [").unwrap();
    for (index, tensor) in plan.tensors.iter().enumerate() {
        out.write_all(if index == 0 { b"\n" } else { b",\n" }).unwrap();
        let mut ids: Vec<TensorId> = Vec::new();
        tensor.view.for_each_source(&mut |source| {
            if !ids.contains(&source.id) {
                ids.push(source.id);
            }
        });
        let region = |device: &u64| {
            let region: Region = plan.region(tensor, *device);
            json!({"device": device, "offset": region.origin(), "shape": region.shape().extents()})
        };
        let mut row = json!({
            "name": tensor.name,
            "path": plan.path(tensor).join("/"),
            "dtype": tensor.view.dtype().code(),
            "shape": tensor.view.shape().extents(),
            "spec": plan.spec(tensor).to_json(tensor.view.shape().rank(), &plan.mesh),
            "bundled": plan.bundle().any(|bundled| bundled.name == tensor.name),
            "sources": ids.iter().map(|id| checkpoint.tensor(*id).name).collect::<Vec<_>>(),
            "regions": plan.devices.iter().map(region).collect::<Vec<_>>(),
        });
        if let Some(layers) = &tensor.layers {
            row["layers"] = json!(&layers[..]);
        }
        serde_json::to_writer(&mut out, &row).unwrap();
    }
    out.write_all(b"\n]}\n").unwrap();
    out
}

fn files(volume: &Volume) -> BTreeMap<String, Ino> {
    let mut found = Vec::new();
    repo::files(volume, Ino::ROOT, "", &mut found);
    found.into_iter().collect()
}

/// Whether a path is a file of rows, or a bundle of a device's shards.
fn is_of_many(path: &str) -> bool {
    const NAMES: [&str; 4] = [".metadata", "manifest.json", "_METADATA", ".index.json"];
    const ENDINGS: [&str; 3] = [".safetensors", ".pt", ".distcp"];
    NAMES.iter().chain(&ENDINGS).any(|ending| path.ends_with(ending))
}

#[test]
fn files_of_many_rows_are_exact_whatever_span_is_read() {
    let dir = experts();
    let checkpoint = repo::open(dir.path());
    let mut runner = TestRunner::new(Config { cases: 40, ..Config::default() });
    for (mesh, devices) in [
        ("", None),
        ("fsdp=3", None),
        ("fsdp=700", None),
        ("expert=2,fsdp=5,replica=3", None),
        ("tensor=2,expert=3", Some(vec![1, 4])),
        ("fsdp=70000", Some((0..300).collect())),
    ] {
        for layout in [Layout::Canonical, Layout::Hf] {
            let options = ViewOptions { devices: devices.clone(), ..options(mesh, layout) };
            let plan = Plan::build(&checkpoint, &options).unwrap();
            let volume = repo::volume(&checkpoint, &options, VolumeOptions::default());
            let files = files(&volume);
            let mut seen = 0;
            for (path, ino) in files.iter().filter(|(path, _)| is_of_many(path)) {
                let size = volume.attr(*ino).unwrap().size_bytes;
                let whole = repo::read(&volume, *ino, 0, usize::try_from(size).unwrap() + 9);
                assert_eq!(whole.len() as u64, size, "{path} of {mesh}");
                if path == ".ckfs/manifest.json" {
                    assert!(whole == manifest(&checkpoint, &plan), "the manifest of {mesh}");
                }
                seen += 1;
                // Of many devices' files a few are enough.
                if seen > 20 && size > 1000 && !path.starts_with(".ckfs") {
                    continue;
                }
                let opened = volume.open(*ino).unwrap();
                let spans = (0..size + 3, prop_oneof![0..40_usize, 0..100_000_usize]);
                let checked = runner.run(&spans, |(start, len)| {
                    let from = usize::try_from(start).unwrap().min(whole.len());
                    let expected = &whole[from..whole.len().min(from + len)];
                    volume
                        .read(*ino, opened.handle, start, len, &mut |part| {
                            assert_eq!(part.to_vec().unwrap(), expected);
                            ckfs::source::Replied::new()
                        })
                        .map(drop)
                        .unwrap();
                    Ok(())
                });
                checked.unwrap_or_else(|error| panic!("{path} of {mesh}: {error}"));
                volume.release(*ino, opened.handle);
            }
            assert!(seen > 4, "{mesh}: {seen}");
        }
    }
}

fn refused(checkpoint: &Checkpoint, options: &ViewOptions) -> String {
    let error: PlanError = Plan::build(checkpoint, options).unwrap_err();
    error.to_string()
}

#[test]
fn more_devices_than_can_be_listed_are_refused_with_the_remedy() {
    let dir = repo::llama(1, DType::BF16);
    let checkpoint = repo::open(dir.path());
    let many = options("fsdp=1048576", Layout::Canonical);
    assert_eq!(
        refused(&checkpoint, &many),
        "mesh fsdp=1048576: 1048576 devices are to be listed, at most 65536 can be; list this host's own, for example \
         with --devices 8-15"
    );
    let listed = ViewOptions { devices: Some((0..8).collect()), ..many };
    let plan = Plan::build(&checkpoint, &listed).unwrap();
    let missing = unavailable(&plan);
    let dcp = missing.iter().find(|missing| missing.format == "dcp").unwrap();
    assert_eq!(
        dcp.reason,
        "1048576 devices hold shards, a file for each; at most 65536 files are possible: use a smaller mesh"
    );
    let volume = repo::volume(&checkpoint, &listed, VolumeOptions::default());
    let files = files(&volume);
    assert!(files.contains_key("dcp/UNAVAILABLE.txt") && files.contains_key("safetensors/dev7.safetensors"));
    for ino in files.values() {
        volume.attr(*ino).unwrap();
    }
    for mesh in ["fsdp=1048577", "fsdp=18446744073709551615,tensor=2", "a=4294967296,b=4294967296"] {
        assert!(Mesh::parse(mesh).unwrap_err().contains("more than 1048576 devices"), "{mesh}");
    }
}

/// A repository of single experts in sparse files: names and shapes without stored bytes.
fn hollow(dir: &Path, layers: u64, experts: u64) {
    let mut weight_map = serde_json::Map::new();
    for layer in 0..layers {
        let shapes = [("gate_proj", [1024_u64, 2048]), ("up_proj", [1024, 2048]), ("down_proj", [2048, 1024])];
        let rows: Vec<(String, [u64; 2])> = (0..experts)
            .flat_map(|expert| {
                shapes.map(|(name, shape)| (format!("model.layers.{layer}.mlp.experts.{expert}.{name}.weight"), shape))
            })
            .collect();
        let tensors = rows.iter().map(|(name, shape)| (name.as_str(), DType::BF16, shape.as_slice()));
        let header = write_header(tensors, &[("format", "pt")], 8).unwrap();
        let name = format!("model-{layer:05}.safetensors");
        let file = File::create(dir.join(&name)).unwrap();
        file.write_all_at(&header.bytes, 0).unwrap();
        file.set_len(header.bytes.len() as u64 + header.data_bytes).unwrap();
        weight_map.extend(rows.into_iter().map(|(tensor, _)| (tensor, json!(name))));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let config = json!({"model_type": "unheard_of", "num_hidden_layers": layers});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn ckfs(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    command.env_remove("CKFS_LOG").args(args).current_dir(dir).output().unwrap()
}

fn can_mount() -> bool {
    let Err(error) = File::options().read(true).write(true).open("/dev/fuse") else { return true };
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "cannot test: /dev/fuse: {error}");
    eprintln!("skipped: /dev/fuse: {error}");
    false
}

/// A daemon in the foreground, and its mount. Dropping it ends both.
struct Served<'a> {
    daemon: std::process::Child,
    dir: &'a Path,
}

impl<'a> Served<'a> {
    fn new(dir: &'a Path, args: &[&str]) -> Self {
        fs::create_dir_all(dir.join("mnt")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env_remove("CKFS_LOG").args(["mount", "--foreground", "model", "mnt"]).args(args).current_dir(dir);
        let mut daemon = command.spawn().unwrap();
        while !dir.join("mnt/.ckfs/stats.json").exists() {
            assert!(daemon.try_wait().unwrap().is_none(), "the daemon ended");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Self { daemon, dir }
    }

    /// Peak memory of the daemon in bytes.
    fn peak_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.daemon.id()).unwrap());
        let ended = kill(pid, Signal::SIGTERM).is_ok() && self.daemon.wait().is_ok();
        assert!(std::thread::panicking() || (ended && !self.dir.join("mnt/.ckfs").exists()), "still mounted");
    }
}

/// Reads a part of a file and returns it as text.
fn part(file: &File, start: u64, len: usize) -> String {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, start).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Lists the tree as `ls -lR` does.
fn list(dir: &Path) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect()
}

#[test]
fn a_large_model_on_many_devices_takes_little_memory() {
    /// An earlier version took 4.4 GB and had not answered after a minute.
    const PEAK_BYTES_MAX: u64 = 256 << 20;
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    hollow(&dir.path().join("model"), 60, 256);
    let served = Served::new(dir.path(), &["--mesh", "fsdp=1024", "--layout", "hf"]);
    let mnt = dir.path().join("mnt");
    let size = list(&mnt.join(".ckfs"))["manifest.json"];
    assert!(size > 46_080 * 1024 * 40, "{size}");
    let manifest = File::open(mnt.join(".ckfs/manifest.json")).unwrap();
    assert!(part(&manifest, 0, 100).starts_with("{\"version\":"));
    assert!(part(&manifest, size / 2, 1 << 20).contains("{\"device\":1023,\"offset\":[1023,0],\"shape\":[1,2048]}"));
    assert!(part(&manifest, size - 300, 300).ends_with("\"shape\":[1,2048]}]}\n]}\n"));
    assert_eq!(manifest.read_at(&mut [0; 9], size).unwrap(), 0);

    let bundles = list(&mnt.join("safetensors"));
    assert_eq!(bundles.len(), 1024);
    let bytes = 60 * 256 * (3 * 1024 * 2048 * 2 / 1024);
    assert!(bundles.values().all(|len| (bytes..bytes + (20 << 20)).contains(len)), "{bundles:?}");
    let dcp = list(&mnt.join("dcp"));
    assert_eq!(dcp.len(), 1024 + 3);
    let (size, metadata) = (dcp[".metadata"], File::open(mnt.join("dcp/.metadata")).unwrap());
    let mut ends = [[0; 8], [0; 8]];
    metadata.read_exact_at(&mut ends[0], 0).unwrap();
    metadata.read_exact_at(&mut ends[1], size - 8).unwrap();
    assert_eq!((&ends[0][..2], ends[1][7]), (b"\x80\x02".as_slice(), b'.'));
    assert_eq!(metadata.read_at(&mut [0; 9], size).unwrap(), 0);
    let mut megabyte = vec![0; 1 << 20];
    metadata.read_exact_at(&mut megabyte, size / 2).unwrap();
    list(&mnt.join("orbax/0/items"));
    let peak = served.peak_bytes();
    assert!(peak < PEAK_BYTES_MAX, "{} MiB", peak >> 20);
    drop((manifest, metadata));
    drop(served);
}

#[test]
fn a_name_that_is_a_file_and_a_directory_is_refused() {
    let dir = repo::llama(1, DType::BF16);
    // One name is sorted between those of the file and of the directory.
    let rules = [("wk", "a"), ("wq", "a-b"), ("wv", "a.b"), ("wo", "a.c")];
    let rules = rules.map(|(from, to)| format!("^layers\\.0\\.{from}$=>{to}"));
    let flags = rules.iter().flat_map(|rule| ["--rename", rule]);
    let output = ckfs(&["plan", "."].into_iter().chain(flags).collect::<Vec<_>>(), dir.path());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.ends_with("error: a and a.b would both be at a\n"), "{error}");
}

#[test]
fn names_and_paths_that_the_kernel_refuses_are_refused_before() {
    let dir = tempfile::tempdir().unwrap();
    let (word, path) = ("x".repeat(256), vec!["y".repeat(250); 15].join("."));
    let names = [format!("{word}.a"), format!("{word}.b"), format!("c.{word}"), path];
    let rows: Vec<_> = names.iter().map(|name| row(name, DType::BF16, &[4])).collect();
    repo::write_repo(dir.path(), &[&rows], &json!({}));
    let output = ckfs(&["plan", "."], dir.path());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    // A directory's name is one problem, however many tensors are in it.
    assert_eq!(error.matches("has 256 bytes, at most 255 are possible").count(), 2, "{error}");
    assert_eq!(error.matches("the path has 3764 bytes, at most 3584 are possible").count(), 1, "{error}");
}

#[test]
fn renames_without_end_are_refused_by_the_rule() {
    let dir = repo::llama(1, DType::BF16);
    let rename = ["--rename", "(.*)=>$1$1"].repeat(40);
    for layout in ["canonical", "hf"] {
        let output = ckfs(&[&["plan", ".", "--layout", layout], &rename[..]].concat(), dir.path());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("rename \"(.*)\" makes a"), "{error}");
    }
    let checkpoint = repo::open(dir.path());
    let long = ckfs::plan::Rename::parse(&format!("^=>{}", "a".repeat(300))).unwrap();
    let options = ViewOptions { renames: vec![long], allow_missing: Allow::default(), ..options("", Layout::Hf) };
    assert!(refused(&checkpoint, &options).contains("makes a file name of"), "{}", refused(&checkpoint, &options));
}
