//! `ckfs sums` through the program: lists are equal exactly where the bytes are.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output},
};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

const MESH: &str = "fsdp=2";

/// A safetensors file with these tensors of four bf16 each.
fn weights(names: &[&str]) -> Vec<u8> {
    let row = |at: usize| format!(r#"{{"dtype":"BF16","shape":[2,2],"data_offsets":[{},{}]}}"#, at * 8, at * 8 + 8);
    let rows: Vec<String> = names.iter().enumerate().map(|(at, name)| format!("{name:?}:{}", row(at))).collect();
    let header = format!("{{{}}}", rows.join(","));
    let data = (0..names.len() * 8).map(|at| u8::try_from(at % 120).unwrap());
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(data).collect()
}

fn model() -> Vec<u8> {
    weights(&["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
}

const CONFIG: &str = r#"{"model_type": "stablelm", "num_hidden_layers": 1, "tie_word_embeddings": false}"#;

fn write_model(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("model.safetensors"), model()).unwrap();
    fs::write(directory.join("config.json"), CONFIG).unwrap();
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn run(directory: &TempDir, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    command
        .env_remove("CKFS_LOG")
        .env("HF_HUB_OFFLINE", "1")
        .env_remove("HF_HOME")
        .env("HF_HUB_CACHE", directory.path().join("hub"));
    let Output { status, stdout, stderr } = command.args(args).current_dir(directory.path()).output().unwrap();
    Ran {
        code: status.code().unwrap_or(-1),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

#[track_caller]
fn ok(ran: Ran) -> String {
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    ran.out
}

fn digest(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

/// Lines of a list without comments, as digest and path.
fn files(list: &str) -> Vec<(&str, &str)> {
    list.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_once("  ").unwrap()).collect()
}

#[test]
fn a_list_holds_the_digests_of_exported_files() {
    let at = TempDir::new().unwrap();
    write_model(&at.path().join("model"));
    let list = ok(run(&at, &["sums", "model", "--mesh", MESH]));
    assert!(list.starts_with("# ckfs "), "{list}");
    assert!(list.contains("# view mesh=fsdp=2 layout=canonical dtype=keep\n"), "{list}");
    assert!(list.contains(&format!("# source {}  model.safetensors\n", digest(&model()))), "{list}");
    ok(run(&at, &["export", "model", "out", "--mesh", MESH]));
    let listed = files(&list);
    assert!(listed.is_sorted_by_key(|(_, path)| path));
    for path in ["dev0/embed", "dev1/embed", "full/lm_head", "safetensors/dev1.safetensors", "hf/model.safetensors"] {
        assert!(listed.iter().any(|(_, listed)| *listed == path), "{path}");
    }
    for (found, path) in &listed {
        assert_eq!(*found, digest(&fs::read(at.path().join("out").join(path)).unwrap()), "{path}");
    }
    // The list depends on neither this host nor this run.
    assert!(!list.contains(".ckfs") && !list.contains("_CHECKPOINT_METADATA"), "{list}");
    assert!(!list.contains(at.path().to_str().unwrap()), "{list}");
    // The same list in another place and later.
    write_model(&at.path().join("elsewhere/copy"));
    assert_eq!(ok(run(&at, &["sums", "elsewhere/copy", "--mesh", MESH])), list);
}

#[test]
fn a_check_finds_every_difference() {
    let at = TempDir::new().unwrap();
    write_model(&at.path().join("model"));
    ok(run(&at, &["sums", "model", "--mesh", MESH, "-o", "all.sums"]));
    for args in [
        ["sums", "model", "--mesh", MESH, "--check", "all.sums"],
        ["verify", "model", "--mesh", MESH, "--sums", "all.sums"],
    ] {
        let said = ok(run(&at, &args));
        assert!(said.ends_with("source files, no difference\n"), "{said}");
    }
    // Another mesh has other shards and the same source.
    let other = run(&at, &["sums", "model", "--mesh", "fsdp=1", "--check", "all.sums"]);
    assert_eq!(other.code, 1);
    assert!(
        other.out.contains("dev0/embed: expected ") && other.out.contains("dev1/embed: is not there\n"),
        "{}",
        other.out
    );
    assert!(!other.out.contains("source "), "{}", other.out);
    assert!(other.err.contains("views differ"), "{}", other.err);
    // One byte of one shard.
    let path = at.path().join("model/model.safetensors");
    let mut bytes = model();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    let damaged = run(&at, &["verify", "model", "--mesh", MESH, "--sums", "all.sums"]);
    assert_eq!(damaged.code, 1);
    let lines: Vec<&str> = damaged.out.lines().map(|line| line.split(": expected ").next().unwrap()).collect();
    assert_eq!(lines[0], "source model.safetensors");
    assert!(lines.contains(&"dev1/lm_head") && lines.contains(&"full/lm_head"), "{lines:?}");
    assert!(!lines.contains(&"dev0/lm_head") && !lines.contains(&"dev1/embed"), "{lines:?}");
    assert!(damaged.err.contains(&format!("{} differences from all.sums", lines.len())), "{}", damaged.err);
}

#[test]
fn patterns_are_stored_in_the_list() {
    let at = TempDir::new().unwrap();
    write_model(&at.path().join("model"));
    ok(run(&at, &["sums", "model", "--mesh", MESH, "--only", "dev1", "-o", "dev1.sums"]));
    let list = fs::read_to_string(at.path().join("dev1.sums")).unwrap();
    assert!(list.contains("# only dev1\n") && files(&list).iter().all(|(_, path)| path.starts_with("dev1/")), "{list}");
    let said = ok(run(&at, &["sums", "model", "--mesh", MESH, "--check", "dev1.sums"]));
    assert!(said.starts_with(&format!("{} files and 2 source files", files(&list).len())), "{said}");
    // A file on one side only is a difference too.
    fs::write(at.path().join("dev1.sums"), format!("{list}{}  dev1/nothing\n", digest(b""))).unwrap();
    let lacking = run(&at, &["sums", "model", "--mesh", MESH, "--check", "dev1.sums"]);
    assert_eq!((lacking.code, lacking.out.as_str()), (1, "dev1/nothing: is not there\n"));
    let none = run(&at, &["sums", "model", "--only", "nothing*"]);
    assert!(none.code == 1 && none.err.contains("no file matches nothing*"), "{}", none.err);
}

#[test]
fn files_that_are_no_lists_are_refused() {
    let at = TempDir::new().unwrap();
    write_model(&at.path().join("model"));
    let short = format!("# ckfs 1 sums\n{}  dev0/embed\n", &digest(b"")[1..]);
    for (text, message) in
        [("", "expected a list by `ckfs sums`"), ("hello\n", "expected a list"), (&short, "line 2: ")]
    {
        fs::write(at.path().join("bad.sums"), text).unwrap();
        let ran = run(&at, &["sums", "model", "--check", "bad.sums"]);
        assert!(ran.code == 1 && ran.err.contains(message) && ran.err.contains("bad.sums"), "{}", ran.err);
    }
    let both = run(&at, &["sums", "model", "--check", "bad.sums", "-o", "new"]);
    assert_eq!(both.code, 2);
}

#[test]
fn names_in_the_hub_cache_are_checked_against_the_bytes() {
    let at = TempDir::new().unwrap();
    let repo = at.path().join("hub/models--org--name");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = repo.join("snapshots").join(commit);
    for directory in [&snapshot, &repo.join("refs"), &repo.join("blobs")] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write(repo.join("refs/main"), commit).unwrap();
    let blob = digest(&model());
    let git = ckfs::source::digest::KnownDigest::GitBlob(String::new());
    let mut digester = ckfs::source::digest::Digester::new(&git, CONFIG.len() as u64);
    digester.update(CONFIG.as_bytes());
    let git = digester.finish();
    for (name, blob, bytes) in
        [("model.safetensors", blob.as_str(), model()), ("config.json", &git, CONFIG.as_bytes().to_vec())]
    {
        fs::write(repo.join("blobs").join(blob), bytes).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    let list = ok(run(&at, &["sums", "org/name", "--mesh", MESH]));
    assert!(list.contains(&format!("# revision {commit}\n")), "{list}");
    let mut bytes = model();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(repo.join("blobs").join(&blob), bytes).unwrap();
    let damaged = run(&at, &["sums", "org/name", "--mesh", MESH]);
    assert_eq!((damaged.code, damaged.out.as_str()), (1, ""));
    let message = format!("model.safetensors: expected SHA-256 {blob}, found ");
    assert!(damaged.err.contains(&message) && damaged.err.contains("hf download"), "{}", damaged.err);
    for words in [&["cat", "org/name", ".ckfs/plan.txt"][..], &["verify", "org/name"], &["export", "org/name", "to"]] {
        let refused = run(&at, words);
        assert!(refused.code == 1 && refused.err.contains(&message), "{words:?}: {}", refused.err);
    }
    fs::write(repo.join("blobs").join(&blob), model()).unwrap();
    fs::write(repo.join("blobs").join(&git), CONFIG.replace(' ', "\t")).unwrap();
    let edited = run(&at, &["cat", "org/name", ".ckfs/plan.txt"]);
    assert!(edited.code == 1 && edited.err.contains("config.json: expected git blob id"), "{}", edited.err);
}

#[test]
fn a_mount_has_the_sums_of_its_source() {
    if fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "/dev/fuse is needed");
        return;
    }
    let at = TempDir::new().unwrap();
    write_model(&at.path().join("model"));
    fs::create_dir(at.path().join("mnt")).unwrap();
    ok(run(&at, &["mount", "model", "mnt", "--mesh", MESH]));
    let mounted = run(&at, &["sums", "mnt"]);
    let mut tool = Command::new("sha256sum");
    tool.args(["-c", "--quiet", "../sums"]).current_dir(at.path().join("mnt"));
    let checked = fs::write(at.path().join("sums"), &mounted.out).and_then(|()| tool.output());
    ok(run(&at, &["umount", "mnt"]));
    assert_eq!(ok(mounted), ok(run(&at, &["sums", "model", "--mesh", MESH])));
    let checked = checked.unwrap();
    assert!(checked.status.success(), "{checked:?}");
}
