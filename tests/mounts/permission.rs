//! Access through a real mount that all users may enter: users that can read the sources read it, and no others.
//!
//! A daemon of root can read everything, so a mistake here discloses secrets to all users of a host. Each case sets permissions
//! on a small repository, mounts it with `allow_other`, and reads source files and virtual files as several users.
//!
//! The tests need root and `/dev/fuse`; without them they are skipped, except in continuous integration (`CI=true`), where they
//! fail.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests are tests too")]

use std::{
    env, fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};
use serde_json::{Value, json};

const ALICE: u32 = 51_000;
const BOB: u32 = 51_001;
const ML: u32 = 52_000;
const OTHERS: u32 = 52_001;

/// A user of one group.
type As = (u32, u32);

/// Root is not in a group of theirs.
const ROOT: As = (0, 0);

/// Users that attempt every read.
const USERS: [As; 6] = [ROOT, (ALICE, ALICE), (ALICE, ML), (BOB, BOB), (BOB, ML), (51_002, OTHERS)];

/// Prints why a test cannot run, and fails where all must.
fn can_run() -> bool {
    let missing = if !nix::unistd::geteuid().is_root() {
        "root"
    } else if fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
        "/dev/fuse"
    } else {
        return true;
    };
    assert!(env::var("CI").as_deref() != Ok("true"), "cannot test without {missing}");
    eprintln!("skipped: no {missing}");
    false
}

/// A repository in `model/`, and the mountpoint `mnt/`.
struct Fixture {
    directory: tempfile::TempDir,
}

/// Two shards: layer 0 and the embedding are in the first, layer 1 and the head in the second.
const SHARDS: [(&str, [&str; 2]); 2] = [
    ("model-00001-of-00002.safetensors", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]),
    ("model-00002-of-00002.safetensors", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]),
];

/// Virtual files, each with the source files that it is derived from.
const MADE_OF: [(&str, &[&str]); 10] = [
    ("full/embed", &["model-00001-of-00002.safetensors"]),
    ("dev1/lm_head", &["model-00002-of-00002.safetensors"]),
    ("npy/dev0/embed.npy", &["model-00001-of-00002.safetensors"]),
    ("full/layers/1/wq", &["model-00002-of-00002.safetensors"]),
    ("dev0/layers/scanned/wq", &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ("safetensors/dev0.safetensors", &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ("dcp/.metadata", &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ("hf/config.json", &["config.json"]),
    ("hf/tokenizer.json", &["tokenizer.json"]),
    ("hf/model-00001-of-00002.safetensors", &["model-00001-of-00002.safetensors"]),
];

fn write_shard(path: &Path, names: &[&str]) {
    let mut header = serde_json::Map::new();
    for (number, name) in names.iter().enumerate() {
        let row = json!({"dtype": "BF16", "shape": [8, 4], "data_offsets": [number * 64, number * 64 + 64]});
        header.insert((*name).to_owned(), row);
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 64 * names.len(), 1);
    fs::write(path, file).unwrap();
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    command.env_remove("CKFS_LOG").env("HF_HUB_OFFLINE", "1").env_remove("HF_HUB_CACHE").env_remove("HF_HOME");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What `attempt` returns in a thread that is a user's, with one group: in Linux a thread has credentials of its own.
fn as_user<T: Send>((uid, gid): As, attempt: impl FnOnce() -> io::Result<T> + Send) -> Result<T, String> {
    let run = || {
        set_thread_groups(&[]).unwrap();
        set_thread_gid(Gid::from_raw(gid)).unwrap();
        set_thread_uid(Uid::from_raw(uid)).unwrap();
        attempt().map_err(|error| error.to_string())
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// The size of a file if a user can read it.
fn read(user: As, path: &Path) -> Result<usize, String> {
    as_user(user, || Ok(fs::read(path)?.len()))
}

/// The names in a directory if a user can list it.
fn list(user: As, path: &Path) -> Result<Vec<String>, String> {
    as_user(user, || fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().into_string().unwrap())).collect())
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fixture = Self { directory };
        fs::set_permissions(fixture.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["model", "mnt"] {
            fs::create_dir(fixture.path(name)).unwrap();
        }
        let mut weight_map = serde_json::Map::new();
        for (file, names) in SHARDS {
            write_shard(&fixture.path("model").join(file), &names);
            weight_map.extend(names.map(|name| (name.to_owned(), json!(file))));
        }
        let config = json!({"model_type": "stablelm", "num_hidden_layers": 2, "tie_word_embeddings": false});
        for (name, text) in [
            ("config.json", config.to_string()),
            ("tokenizer.json", "{}".to_owned()),
            ("model.safetensors.index.json", json!({ "weight_map": weight_map }).to_string()),
        ] {
            fs::write(fixture.path("model").join(name), text).unwrap();
        }
        fixture.set("model", 0, 0, 0o755);
        for file in fixture.files() {
            fixture.set(&format!("model/{file}"), 0, 0, 0o644);
        }
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("model")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn set(&self, name: &str, uid: u32, gid: u32, mode: u32) {
        chown(self.path(name), Some(uid), Some(gid)).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn set_files(&self, uid: u32, gid: u32, mode: u32) {
        for file in self.files() {
            self.set(&format!("model/{file}"), uid, gid, mode);
        }
    }

    fn run(&self, args: &[&str]) -> Output {
        program().args(args).current_dir(self.directory.path()).output().unwrap()
    }

    /// Mounts with `allow_other`; returns the log.
    fn mount(&self, args: &[&str]) -> String {
        let all = [&["mount", "model", "mnt", "--mesh", "fsdp=2", "--allow-other"], args].concat();
        let output = self.run(&all);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stderr)
    }

    fn unmount(&self) {
        let output = self.run(&["umount", "mnt"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn reads(&self, user: As, file: &str) -> bool {
        match read(user, &self.path("mnt").join(file)) {
            Ok(_) => true,
            Err(error) => {
                assert!(error.contains("Permission denied"), "{file}: {error}");
                false
            }
        }
    }

    /// Owner, group and permission bits of a virtual file.
    fn permission(&self, file: &str) -> (u32, u32, u32) {
        let metadata = fs::symlink_metadata(self.path("mnt").join(file)).unwrap();
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    }

    /// Mounts, compares each user's reads with the user's reads of the sources, and unmounts. Where the sources have several
    /// owners, a user that could read all of them may still be refused.
    fn compare(&self, case: &str, exact: bool) {
        self.mount(&[]);
        for user in USERS {
            for (file, sources) in MADE_OF {
                let may = sources.iter().all(|source| read(user, &self.path("model").join(source)).is_ok());
                let found = self.reads(user, file);
                assert!(
                    found == may || (!exact && !found && user != ROOT),
                    "{case}: {user:?} {file}: {found}, expected {may}"
                );
            }
            let may_list = list(user, &self.path("model")).is_ok();
            assert_eq!(list(user, &self.path("mnt")).is_ok(), may_list, "{case}: {user:?} lists the root");
            assert_eq!(list(user, &self.path("mnt/hf")).is_ok(), may_list, "{case}: {user:?} lists hf/");
            // The weights contain the names of tensors.
            let may_read = SHARDS.iter().all(|(file, _)| read(user, &self.path("model").join(file)).is_ok());
            let lists = list(user, &self.path("mnt/full")).is_ok();
            assert!(!lists || (may_list && may_read), "{case}: {user:?} lists full/");
            assert!(lists || !exact || !(may_list && may_read), "{case}: {user:?} does not list full/");
        }
        self.unmount();
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // A test that passed has unmounted everything.
        let _ = Command::new("umount").args(["-l"]).arg(self.path("mnt")).output();
    }
}

/// A name; owner, group and mode of the directory, and of the files in it.
type Case = (&'static str, (u32, u32, u32), (u32, u32, u32));

/// Flags; owner, group and mode of files, and of the root.
type Flagged<'a> = (Vec<&'a str>, (u32, u32, u32), (u32, u32, u32));

#[test]
fn users_read_files_whose_sources_they_can_read() {
    if !can_run() {
        return;
    }
    let rows: [Case; 8] = [
        ("public", (0, 0, 0o755), (0, 0, 0o644)),
        ("private files", (ALICE, ALICE, 0o755), (ALICE, ALICE, 0o600)),
        ("private directory", (ALICE, ALICE, 0o700), (ALICE, ALICE, 0o644)),
        ("private both, of root", (0, 0, 0o700), (0, 0, 0o600)),
        ("a group's files", (0, 0, 0o755), (0, ML, 0o640)),
        ("a group's directory", (ALICE, ML, 0o750), (ALICE, ML, 0o644)),
        ("refused to a group", (0, 0, 0o755), (ALICE, ML, 0o604)),
        ("a directory that can be passed", (ALICE, ALICE, 0o711), (ALICE, ALICE, 0o644)),
    ];
    for (case, (dir_uid, dir_gid, dir_mode), (uid, gid, mode)) in rows {
        let fixture = Fixture::new();
        fixture.set_files(uid, gid, mode);
        fixture.set("model", dir_uid, dir_gid, dir_mode);
        fixture.compare(case, true);
    }
}

#[test]
fn files_of_other_permissions_are_distinguished() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.set("model/tokenizer.json", 0, 0, 0o600);
    fixture.set("model/config.json", ALICE, ML, 0o640);
    fixture.set("model/model-00002-of-00002.safetensors", BOB, ML, 0o640);
    fixture.compare("four kinds of files", true);
    // A directory in the repository determines who lists it and reaches its contents.
    fs::create_dir(fixture.path("model/sub")).unwrap();
    fs::write(fixture.path("model/sub/notes.txt"), "x").unwrap();
    fixture.set("model/sub", ALICE, ML, 0o750);
    fixture.mount(&[]);
    for user in USERS {
        let may = list(user, &fixture.path("model/sub")).is_ok();
        assert_eq!(list(user, &fixture.path("mnt/hf/sub")).is_ok(), may, "{user:?} lists hf/sub");
        assert_eq!(fixture.reads(user, "hf/sub/notes.txt"), may, "{user:?} reads hf/sub/notes.txt");
    }
    fixture.unmount();
    fs::remove_dir_all(fixture.path("model/sub")).unwrap();
    // Neither user may read a file derived from both, except that one is in the other's group.
    fixture.set("model/model-00001-of-00002.safetensors", ALICE, ALICE, 0o600);
    fixture.compare("two owners", false);
    // The same where a directory above is private.
    fixture.set_files(0, 0, 0o644);
    fs::create_dir_all(fixture.path("above/between")).unwrap();
    fs::rename(fixture.path("model"), fixture.path("above/between/model")).unwrap();
    symlink("above/between/model", fixture.path("model")).unwrap();
    fixture.set("above", BOB, ML, 0o710);
    fixture.compare("a directory above", true);
    // A link to the directory does not widen its permissions.
    fixture.mount(&[]);
    assert_eq!(fixture.permission("full/embed"), (BOB, ML, 0o440));
    fixture.unmount();
}

#[test]
fn an_access_list_leaves_the_owner_only() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.set_files(ALICE, ML, 0o644);
    // Version 2; owner, user BOB, group, mask, others: BOB has no permission.
    let entry = |tag: u16, bits: u16, id: u32| {
        let id = id.to_le_bytes();
        [tag.to_le_bytes(), bits.to_le_bytes(), [id[0], id[1]], [id[2], id[3]]].concat()
    };
    let none = u32::MAX;
    let list = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 6, none),
        entry(2, 0, BOB),
        entry(4, 4, none),
        entry(16, 4, none),
        entry(32, 4, none),
    ];
    let shard = fixture.path("model").join(SHARDS[0].0);
    let set = rustix::fs::setxattr(&shard, "system.posix_acl_access", &list.concat(), rustix::fs::XattrFlags::empty());
    if set == Err(rustix::io::Errno::OPNOTSUPP) {
        eprintln!("skipped: no access lists in {}", shard.display());
        return;
    }
    set.unwrap();
    assert!(read((BOB, BOB), &shard).is_err(), "the list keeps him out");
    fixture.mount(&[]);
    assert_eq!(fixture.permission("full/embed"), (ALICE, ML, 0o400));
    assert_eq!(fixture.permission("full/lm_head"), (ALICE, ML, 0o444));
    fixture.unmount();
}

#[test]
fn the_mounts_own_files_belong_to_the_mounting_user() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.set_files(ALICE, ALICE, 0o600);
    fixture.mount(&[]);
    for (name, mode) in [(".ckfs", 0o500), (".ckfs/manifest.json", 0o400), (".ckfs/stats.json", 0o400)] {
        assert_eq!(fixture.permission(name), (0, 0, mode), "{name}");
    }
    assert!(!fixture.reads((ALICE, ALICE), ".ckfs/plan.txt") && fixture.reads(ROOT, ".ckfs/plan.txt"));
    fixture.unmount();
    fixture.set_files(ALICE, ALICE, 0o644);
    fixture.mount(&[]);
    for (name, mode) in [(".ckfs", 0o555), (".ckfs/manifest.json", 0o444), (".ckfs/metrics", 0o444)] {
        assert_eq!(fixture.permission(name), (0, 0, mode), "{name}");
    }
    fixture.unmount();
    // One file that others cannot read is enough.
    fixture.set("model/tokenizer.json", ALICE, ALICE, 0o600);
    fixture.mount(&[]);
    assert_eq!((fixture.permission(".ckfs"), fixture.permission("full/embed").2), ((0, 0, 0o500), 0o444));
    fixture.unmount();
}

#[test]
fn flags_override_the_permissions() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.set_files(ALICE, ALICE, 0o600);
    let (uid, gid) = (BOB.to_string(), ML.to_string());
    let both = format!("file_mode=0444,dir_mode=755,uid={uid},gid={gid}");
    let rows: [Flagged<'_>; 5] = [
        (vec!["--file-mode", "0644", "--dir-mode", "0755"], (ALICE, ALICE, 0o444), (0, 0, 0o555)),
        (vec!["--uid", &uid], (BOB, ALICE, 0o400), (BOB, 0, 0o555)),
        (vec!["--gid", &gid], (ALICE, ML, 0o440), (0, ML, 0o555)),
        (
            vec!["--uid", &uid, "--gid", &gid, "--file-mode", "0o440", "--dir-mode", "550"],
            (BOB, ML, 0o440),
            (BOB, ML, 0o550),
        ),
        (vec!["-o", &both], (BOB, ML, 0o444), (BOB, ML, 0o555)),
    ];
    for (args, file, root) in rows {
        fixture.mount(&args);
        for name in ["full/embed", "hf/config.json", "dcp/.metadata"] {
            assert_eq!(fixture.permission(name), file, "{args:?} {name}");
        }
        assert_eq!(fixture.permission(""), root, "{args:?}");
        assert_eq!(fixture.permission(".ckfs/config.toml").0, 0, "{args:?}");
        fixture.unmount();
    }
    fs::write(
        fixture.path("c.toml"),
        "source = 'model'\nmountpoint = 'mnt'\n[mount]\nallow_other = true\nfile_mode = '0440'\n",
    )
    .unwrap();
    assert!(fixture.run(&["mount", "--config", "c.toml"]).status.success());
    assert_eq!(fixture.permission("full/embed"), (ALICE, ALICE, 0o440));
    let shown = fs::read_to_string(fixture.path("mnt/.ckfs/config.toml")).unwrap();
    assert!(shown.contains("file_mode = \"0440\""), "{shown}");
    fixture.unmount();
    for (args, message) in [
        (["--file-mode", "0888"], "expected octal digits from 0 to 0777 such as 0440"),
        (["--dir-mode", "4755"], "expected octal digits"),
        (["--uid", "4294967295"], "invalid value"),
    ] {
        let output = fixture.run(&[&["mount", "model", "mnt"], &args[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(message), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn plan_and_doctor_report_the_readers() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    let plan = || text(&fixture.run(&["plan", "-v", "model"]).stdout);
    assert!(plan().contains("readable by  everybody (0444)\n"), "{}", plan());
    fixture.set_files(ALICE, ML, 0o640);
    assert!(plan().contains(&format!("readable by  user {ALICE}, group {ML} (0440)\n")), "{}", plan());
    fixture.set("model/tokenizer.json", 0, 0, 0o600);
    let found = plan();
    assert!(found.contains("root only (0400): \"tokenizer.json\"\n"), "{found}");
    let found: Value = serde_json::from_slice(&fixture.run(&["plan", "model", "--json"]).stdout).unwrap();
    assert_eq!(found["readers"][0]["mode"], "0440");
    assert_eq!((&found["readers"][1]["uid"], &found["readers"][1]["files"]), (&json!(0), &json!(1)));
    fixture.mount(&[]);
    let doctor = text(&fixture.run(&["doctor"]).stdout);
    let mine = doctor.lines().find(|line| line.contains(&fixture.path("mnt").display().to_string())).unwrap();
    assert!(mine.contains(&format!("group {ML} (0440)")) && mine.contains("root only (0400)"), "{doctor}");
    fixture.unmount();
}

#[test]
fn a_user_without_privileges_reads_its_own_mount() {
    if !can_run() {
        return;
    }
    if Command::new("fusermount3").arg("--version").output().is_err() {
        assert!(env::var("CI").as_deref() != Ok("true"), "cannot test without fusermount3");
        eprintln!("skipped: no fusermount3");
        return;
    }
    let fixture = Fixture::new();
    fixture.set_files(0, ML, 0o640);
    // fusermount3 requires a user with a name.
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid.as_raw();
    fixture.set("mnt", nobody, nobody, 0o755);
    fs::create_dir(fixture.path("dev")).unwrap();
    crate::faults_process::copy_program(&fixture.path("ckfs"));
    fixture.set("ckfs", 0, 0, 0o755);
    // A device that all users may open, as on most hosts, visible to these processes only.
    let outer = "mount -t tmpfs none dev; mknod dev/fuse c 10 229; chmod 666 dev/fuse; mount --bind dev/fuse /dev/fuse; \
                 exec setpriv --reuid \"$1\" --regid \"$2\" --clear-groups sh -ec \"$3\"";
    let inner = "./ckfs mount model mnt; trap './ckfs umount mnt' EXIT; cat mnt/full/embed mnt/hf/tokenizer.json \
                 mnt/.ckfs/manifest.json mnt/dev0/layers/scanned/wq >/dev/null; ls mnt/full/layers; stat -c %u:%g:%a mnt/full/embed";
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "slave", "sh", "-ec", outer, "sh"])
        .args([&nobody.to_string(), &ML.to_string(), inner])
        .current_dir(fixture.directory.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("0\n1\nscanned\n{nobody}:{ML}:440\n"));
}

#[test]
fn exported_files_are_no_more_permissive() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.set("model/tokenizer.json", 0, 0, 0o600);
    fixture.set("model/model-00002-of-00002.safetensors", 0, ML, 0o640);
    let output = fixture.run(&["export", "model", "out"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (file, mode) in [
        ("full/embed", 0o644),
        ("full/lm_head", 0o600),
        ("full/layers/scanned/wq", 0o600),
        ("hf/tokenizer.json", 0o600),
        ("hf/config.json", 0o644),
        ("hf", 0o755),
        ("full/layers", 0o711),
    ] {
        let found = fs::metadata(fixture.path("out").join(file)).unwrap().mode() & 0o777;
        assert_eq!(found, mode, "{file}: {found:o}");
    }
    fixture.set("model", 0, 0, 0o700);
    assert!(fixture.run(&["export", "model", "private", "--only", "hf/config.json"]).status.success());
    for file in ["", "hf", "hf/config.json"] {
        assert_eq!(fs::metadata(fixture.path("private").join(file)).unwrap().mode() & 0o077, 0, "{file}");
    }
    // A directory that gives its group to files created in it.
    fs::create_dir(fixture.path("shared")).unwrap();
    fixture.set("shared", 0, ML, 0o2775);
    fixture.set("model", 0, 0, 0o755);
    assert!(fixture.run(&["export", "model", "shared/out"]).status.success());
    for (file, mode) in [("hf/tokenizer.json", 0o600), ("full/lm_head", 0o600), ("full/embed", 0o644)] {
        let found = fs::metadata(fixture.path("shared/out").join(file)).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o777), (ML, mode), "{file}: {:o}", found.mode());
    }
}

// --- links ---

#[test]
fn links_out_of_the_repository_are_left_out() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    let model = fixture.path("model");
    fs::write(fixture.path("secret"), "secret").unwrap();
    fixture.set("secret", 0, 0, 0o600);
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    symlink("../secret", model.join("tokenizer.json")).unwrap();
    symlink(fixture.path("secret"), model.join("notes.txt")).unwrap();
    symlink("config.json", model.join("same.json")).unwrap();
    symlink(model.join("config.json"), model.join("absolute.json")).unwrap();
    symlink("..", model.join("up")).unwrap();
    nix::unistd::mkfifo(&model.join("pipe"), nix::sys::stat::Mode::from_bits_truncate(0o644)).unwrap();
    let log = fixture.mount(&[]);
    for name in ["tokenizer.json", "notes.txt"] {
        let reported =
            log.lines().any(|line| line.contains(name) && line.contains("left out") && line.contains("secret"));
        assert!(reported, "{name}: {log}");
    }
    let mut shown = list(ROOT, &fixture.path("mnt/hf")).unwrap();
    shown.sort();
    assert_eq!(
        shown,
        ["absolute.json", "config.json", SHARDS[0].0, SHARDS[1].0, "model.safetensors.index.json", "same.json",]
    );
    fixture.unmount();
    // With links allowed they are no more readable than their targets.
    let log = fixture.mount(&["--follow-symlinks"]);
    assert!(!log.contains("left out"), "{log}");
    assert_eq!(read(ROOT, &fixture.path("mnt/hf/tokenizer.json")), Ok(6));
    assert!(!fixture.reads((ALICE, ALICE), "hf/tokenizer.json") && fixture.reads((ALICE, ALICE), "hf/config.json"));
    fixture.unmount();
    fixture.mount(&["-o", "follow_symlinks"]);
    assert!(fixture.path("mnt/hf/tokenizer.json").exists());
    fixture.unmount();
}

#[test]
fn weights_elsewhere_are_read_by_users_that_can_read_them_there() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    let (file, _) = SHARDS[0];
    fs::create_dir(fixture.path("elsewhere")).unwrap();
    fs::rename(fixture.path("model").join(file), fixture.path("elsewhere/blob")).unwrap();
    symlink("../elsewhere/blob", fixture.path("model").join(file)).unwrap();
    fixture.set("elsewhere", ALICE, ALICE, 0o700);
    let log = fixture.mount(&[]);
    let reported: Vec<&str> = log.lines().filter(|line| line.contains("elsewhere/blob")).collect();
    assert!(
        reported.len() == 1 && reported[0].contains(file) && reported[0].contains("outside the repository"),
        "{log}"
    );
    assert_eq!(fixture.permission("full/embed"), (ALICE, 0, 0o400));
    assert_eq!(fixture.permission("full/lm_head").2, 0o444);
    assert!(fixture.reads((ALICE, ALICE), "full/embed") && !fixture.reads((BOB, ML), "full/embed"));
    fixture.unmount();
    assert!(!fixture.mount(&["--follow-symlinks"]).contains("elsewhere"));
    fixture.unmount();
}

#[test]
fn a_link_that_is_redirected_under_the_mount_is_not_followed() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new();
    fixture.mount(&[]);
    let shard = fixture.path("model").join(SHARDS[1].0);
    fs::remove_file(&shard).unwrap();
    // A link into the mount itself: following it would wait for itself.
    symlink(fixture.path("mnt/hf").join(SHARDS[1].0), &shard).unwrap();
    let error = read(ROOT, &fixture.path("mnt/full/lm_head")).unwrap_err();
    assert!(error.contains("Input/output error"), "{error}");
    assert!(read(ROOT, &fixture.path("mnt/full/embed")).is_ok());
    fixture.unmount();
}
