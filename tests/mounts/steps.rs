//! Real mounts of a run: steps that appear, are damaged and deleted while clients look and read.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io::{Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{
    faulty::{Faulty, Manner, Pages, can_mount},
    repo,
};
use ckfs::tensor::DType;
use nix::mount::{MntFlags, MsFlags, umount2};
use serde_json::{Value, json};

/// Time limit for anything that should happen soon.
const SOON: Duration = Duration::from_mins(3);

struct RunMount {
    child: Child,
    base: tempfile::TempDir,
}

impl RunMount {
    /// A run without steps, mounted.
    fn new(flags: &[&str]) -> Self {
        let base = tempfile::tempdir().unwrap();
        fs::create_dir(base.path().join("run")).unwrap();
        fs::create_dir(base.path().join("mnt")).unwrap();
        Self::over(base, flags)
    }

    fn over(base: tempfile::TempDir, flags: &[&str]) -> Self {
        let log = File::create(base.path().join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env_remove("CKFS_LOG").arg("mount").args([base.path().join("run"), base.path().join("mnt")]);
        command.arg("--foreground").args(flags);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut mount = Self { child, base };
        until("the mount answers", || {
            assert_eq!(mount.child.try_wait().unwrap(), None, "{}", mount.log());
            mount.path(".ckfs/steps.json").exists()
        });
        mount
    }

    fn run(&self, name: &str) -> PathBuf {
        self.base.path().join("run").join(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join("mnt").join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.base.path().join("log")).unwrap_or_default()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    fn steps(&self) -> BTreeSet<u64> {
        let names = fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter_map(|name| name.to_str().unwrap().parse().ok()).collect()
    }

    fn status(&self) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        let output = command.arg("status").arg(self.path("")).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for RunMount {
    fn drop(&mut self) {
        let _ = umount2(&self.path(""), MntFlags::MNT_DETACH);
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

/// The weights of a step, which are others for each number.
fn weights(number: u64) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.safetensors");
    repo::write_file(&file, &repo::llama_rows(1, DType::F32), u32::try_from(number % 100_000).unwrap() * 7);
    fs::read(file).unwrap()
}

/// The files of a checkpoint of transformers, in the order of their writer.
fn trainer_files(number: u64) -> Vec<(String, Vec<u8>)> {
    let mut config = repo::llama_config(1);
    config["step"] = number.into();
    let state = json!({"global_step": number}).to_string();
    [
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", weights(number)),
        ("optimizer.pt", vec![0; 4096]),
        ("trainer_state.json", state.into_bytes()),
    ]
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .to_vec()
}

/// Writes a checkpoint of transformers, as its trainer does.
fn save(run: &Path, number: u64) {
    let directory = run.join(format!("checkpoint-{number}"));
    fs::create_dir(&directory).unwrap();
    for (name, bytes) in trainer_files(number) {
        fs::write(directory.join(name), bytes).unwrap();
    }
}

fn hf(mount: &RunMount, number: u64) -> PathBuf {
    mount.path(&format!("{number}/hf/model.safetensors"))
}

#[test]
fn steps_appear_and_latest_follows_them() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "all"]);
    assert_eq!((mount.steps(), mount.path("latest").exists()), (BTreeSet::new(), false));
    for number in [100, 200, 1000] {
        save(&mount.run(""), number);
        until("the step is there", || mount.steps().contains(&number));
        let bytes = fs::read(hf(&mount, number)).unwrap();
        assert_eq!(bytes, weights(number));
        assert_eq!(fs::read_link(mount.path("latest")).unwrap(), PathBuf::from(number.to_string()));
        assert_eq!(fs::read(mount.path("latest/hf/model.safetensors")).unwrap(), bytes);
    }
    let listed = mount.json(".ckfs/steps.json");
    assert_eq!((&listed["latest"], listed["steps"].as_array().unwrap().len()), (&json!(1000), 3));
    assert!(mount.path("100/dev0/layers/0/wq").exists() && mount.path("100/.ckfs/manifest.json").exists());
    let error = fs::write(mount.path("100/x"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    let (healthy, text) = mount.status();
    assert!(healthy && text.contains("3 shown, newest 1000"), "{text}");
    // A program that has found the link, and reads it when it has another number, is led to the newest step.
    save(&mount.run(""), 2000);
    until("the step is there", || mount.steps().contains(&2000));
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW;
    let found = rustix::fs::open(mount.path("latest"), flags, rustix::fs::Mode::empty()).unwrap();
    save(&mount.run(""), 3000);
    until("the step is there", || mount.steps().contains(&3000));
    assert_eq!(rustix::fs::readlinkat(&found, "", Vec::new()).unwrap().to_bytes(), b"3000");
}

#[test]
fn a_half_step_is_never_shown_in_any_order_of_files() {
    if !can_mount() {
        return;
    }
    let mount = Arc::new(RunMount::new(&["--steps", "all"]));
    let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
    for next in 0..4 {
        let longer = orders.iter().flat_map(|order: &Vec<usize>| {
            (0..=order.len()).map(move |at| [&order[..at], &[next], &order[at..]].concat())
        });
        orders = longer.collect();
    }
    assert_eq!(orders.len(), 24);
    // Set just before the last bytes of a step are written.
    let whole: Arc<Vec<AtomicBool>> = Arc::new((0..orders.len()).map(|_| AtomicBool::new(false)).collect());
    let done = Arc::new(AtomicBool::new(false));
    let looker = {
        let (mount, whole, done) = (Arc::clone(&mount), Arc::clone(&whole), Arc::clone(&done));
        thread::spawn(move || {
            let (mut looks, mut early) = (0_u64, HashMap::new());
            while !done.load(Ordering::Relaxed) || looks < 10 {
                for number in mount.steps() {
                    if !whole[usize::try_from(number).unwrap()].load(Ordering::SeqCst) {
                        early.entry(number).or_insert_with(Instant::now);
                    }
                }
                looks += 1;
            }
            early
        })
    };
    let held_up: Mutex<HashMap<u64, Instant>> = Mutex::default();
    thread::scope(|scope| {
        for (number, order) in (0_u64..).zip(&orders) {
            let (mount, whole, held_up) = (&mount, &whole, &held_up);
            scope.spawn(move || {
                // A writer that has waited too long for its processor has paused: what lay there may have been taken for finished.
                let mut written = Instant::now();
                let mut writes = move || {
                    if written.elapsed() > Duration::from_millis(400) {
                        held_up.lock().unwrap().entry(number).or_insert(written);
                    }
                    written = Instant::now();
                };
                let directory = mount.run(&format!("checkpoint-{number}"));
                fs::create_dir(&directory).unwrap();
                let files = trainer_files(number);
                for (place, file) in order.iter().enumerate() {
                    let (name, bytes) = &files[*file];
                    let mut target = File::create(directory.join(name)).unwrap();
                    let half = bytes.len() / 2;
                    target.write_all(&bytes[..half]).unwrap();
                    writes();
                    thread::sleep(Duration::from_millis(60 + number * 3));
                    if place + 1 == order.len() {
                        whole[usize::try_from(number).unwrap()].store(true, Ordering::SeqCst);
                    }
                    target.write_all(&bytes[half..]).unwrap();
                    writes();
                    drop(target);
                    thread::sleep(Duration::from_millis(20));
                }
            });
        }
    });
    until("all steps are there", || mount.steps().len() == orders.len());
    done.store(true, Ordering::Relaxed);
    let held_up = held_up.into_inner().unwrap();
    for (number, shown) in looker.join().unwrap() {
        let since = held_up.get(&number);
        assert!(since.is_some_and(|since| *since < shown), "step {number} is shown too early");
    }
    for number in 0..orders.len() as u64 {
        assert_eq!(fs::read(hf(&mount, number)).unwrap(), weights(number), "{number}");
    }
}

#[test]
fn renamed_and_hard_linked_directories_are_steps_only_by_their_names() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "all"]);
    save(&mount.run(""), 5);
    until("the first step", || mount.steps() == BTreeSet::from([5]));
    // A copy of the best step, of hard links, while the step is read.
    let open = File::open(hf(&mount, 5)).unwrap();
    fs::create_dir(mount.run("best-5")).unwrap();
    for (name, _) in trainer_files(5) {
        fs::hard_link(mount.run("checkpoint-5").join(&name), mount.run("best-5").join(&name)).unwrap();
    }
    let expected = weights(5);
    let mut bytes = vec![0; expected.len()];
    // Right bytes, or an error, and never others.
    if open.read_exact_at(&mut bytes, 0).is_ok() {
        assert_eq!(bytes, expected);
    }
    until("the step is read again", || fs::read(hf(&mount, 5)).is_ok_and(|bytes| bytes == expected));
    fs::remove_dir_all(mount.run("best-5")).unwrap();
    until("and after the copy is gone", || fs::read(hf(&mount, 5)).is_ok_and(|bytes| bytes == expected));
    // Written under another name, and renamed.
    let parts = mount.run("tmp-checkpoint-6");
    fs::create_dir(&parts).unwrap();
    for (name, bytes) in trainer_files(6) {
        fs::write(parts.join(name), bytes).unwrap();
    }
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(mount.steps(), BTreeSet::from([5]));
    fs::rename(&parts, mount.run("checkpoint-6")).unwrap();
    until("the renamed step", || mount.steps() == BTreeSet::from([5, 6]));
    assert_eq!(fs::read(hf(&mount, 6)).unwrap(), weights(6));
    assert!(mount.status().0, "{}", mount.status().1);
}

#[test]
fn a_deleted_step_disappears_and_its_readers_get_an_error() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "all"]);
    for number in [1, 2, 3] {
        save(&mount.run(""), number);
    }
    until("the steps", || mount.steps().len() == 3);
    let read = File::open(mount.path("2/dev0/layers/scanned/wq")).unwrap();
    let unread = File::open(mount.path("2/dev0/layers/scanned/wk")).unwrap();
    let directory = File::open(mount.path("2/dev0")).unwrap();
    let mut first = vec![0; 64];
    read.read_exact_at(&mut first, 0).unwrap();
    fs::remove_dir_all(mount.run("checkpoint-2")).unwrap();
    until("it is gone", || mount.steps() == BTreeSet::from([1, 3]));
    assert_eq!(fs::metadata(mount.path("2")).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    let error = unread.read_at(&mut [0; 64], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // What the kernel has is right.
    let mut again = vec![0; 64];
    if read.read_exact_at(&mut again, 0).is_ok() {
        assert_eq!(again, first);
    }
    drop(directory);
    let (healthy, text) = mount.status();
    assert!(healthy && text.contains("healthy"), "{text}");
    until("it is counted", || mount.json(".ckfs/stats.json")["steps"]["deleted"] == json!(1));
    assert_eq!(mount.json(".ckfs/stats.json")["steps"]["shown"], json!(2));
    let metrics = fs::read_to_string(mount.path(".ckfs/metrics")).unwrap();
    assert!(metrics.contains("ckfs_steps_deleted_total 1\n") && metrics.ends_with("# EOF\n"), "{metrics}");
    // The newest goes: the link leads to the one before.
    fs::remove_dir_all(mount.run("checkpoint-3")).unwrap();
    until("the link follows", || fs::read_link(mount.path("latest")).is_ok_and(|to| to == Path::new("1")));
    // Written again under the same number, it is another step.
    save(&mount.run(""), 2);
    until("it is back", || mount.steps() == BTreeSet::from([1, 2]));
    assert_eq!(fs::read(hf(&mount, 2)).unwrap(), weights(2));
    assert_eq!(unread.read_at(&mut [0; 64], 0).unwrap_err().raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_damaged_step_tells_why_and_the_others_live() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "all"]);
    save(&mount.run(""), 1);
    save(&mount.run(""), 2);
    let weights_of_two = mount.run("checkpoint-2/model.safetensors");
    let whole = fs::read(&weights_of_two).unwrap();
    fs::write(&weights_of_two, &whole[..whole.len() - 10]).unwrap();
    until("both steps", || mount.steps() == BTreeSet::from([1, 2]));
    let names: Vec<_> = fs::read_dir(mount.path("2")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".ckfs"]);
    let error = fs::read_to_string(mount.path("2/.ckfs/error")).unwrap();
    assert!(error.contains("model.safetensors"), "{error}");
    // The newest step stays the newest: a program must not take what it lacks for files that no checkpoint has.
    for path in ["latest/hf/config.json", "2/dev0"] {
        assert_eq!(fs::metadata(mount.path(path)).unwrap_err().raw_os_error(), Some(libc::EIO), "{path}");
    }
    assert_eq!(fs::read(hf(&mount, 1)).unwrap(), weights(1));
    let (healthy, text) = mount.status();
    assert!(!healthy && text.contains("step not planned") && text.contains("checkpoint-2"), "{text}");
    let steps = mount.json(".ckfs/steps.json");
    assert!(steps["steps"][1]["error"].as_str().unwrap().contains("model.safetensors"), "{steps}");
    // Its trainer writes it anew.
    fs::remove_dir_all(mount.run("checkpoint-2")).unwrap();
    save(&mount.run(""), 2);
    until("the step is whole", || fs::read(hf(&mount, 2)).is_ok_and(|bytes| bytes == weights(2)));
    assert!(mount.status().0);
}

#[test]
fn the_newest_steps_are_a_window_that_moves() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "latest=2"]);
    for number in [1, 2] {
        save(&mount.run(""), number);
    }
    until("the steps", || mount.steps() == BTreeSet::from([1, 2]));
    let old = File::open(mount.path("1/dev0/layers/scanned/wq")).unwrap();
    save(&mount.run(""), 3);
    until("the window moves", || mount.steps() == BTreeSet::from([2, 3]));
    // The step is there still, and so are the bytes of those that read it.
    let mut bytes = Vec::new();
    (&old).read_to_end(&mut bytes).unwrap();
    fs::remove_dir_all(mount.run("checkpoint-3")).unwrap();
    until("and back", || mount.steps() == BTreeSet::from([1, 2]));
    assert_eq!(fs::read(mount.path("1/dev0/layers/scanned/wq")).unwrap(), bytes);
}

#[test]
fn latest_is_one_step_at_any_moment() {
    if !can_mount() {
        return;
    }
    let mount = Arc::new(RunMount::new(&["--steps", "all"]));
    save(&mount.run(""), 1);
    until("the first step", || mount.steps().len() == 1);
    let done = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let (mount, done) = (Arc::clone(&mount), Arc::clone(&done));
            thread::spawn(move || {
                let (mut last, mut reads) = (0, 0_u64);
                while !done.load(Ordering::Relaxed) {
                    // The config of a step names it: both files are of one step where they are found by one open directory.
                    let text = fs::read_link(mount.path("latest")).unwrap();
                    let number: u64 = text.to_str().unwrap().parse().unwrap();
                    assert!(number >= last, "{number} after {last}");
                    last = number;
                    let config = fs::read(mount.path("latest/hf/config.json")).unwrap();
                    let config: Value = serde_json::from_slice(&config).unwrap();
                    assert!(config["step"].as_u64().unwrap() >= number);
                    reads += 1;
                }
                reads
            })
        })
        .collect();
    for number in 2..6 {
        save(&mount.run(""), number);
        until("the next step", || mount.steps().contains(&number));
    }
    done.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.join().unwrap() > 10);
    }
}

#[test]
fn commands_run_for_new_steps_one_after_the_other() {
    if !can_mount() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("run")).unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    save(&base.path().join("run"), 1);
    let ran = base.path().join("ran");
    let command = format!(
        "echo $CKFS_STEP >> {0}; cmp \"$CKFS_STEP_PATH/hf/model.safetensors\" {1}/checkpoint-$CKFS_STEP/model.safetensors && \
         test $CKFS_STEP != 3",
        ran.display(),
        base.path().join("run").display()
    );
    let mount = RunMount::over(base, &["--steps", "all", "--on-step", &command]);
    until("the old step", || mount.steps() == BTreeSet::from([1]));
    for number in [2, 3] {
        save(&mount.run(""), number);
        until("the hook", || fs::read_to_string(&ran).unwrap_or_default().ends_with(&format!("{number}\n")));
    }
    // The step that was there before is not new.
    assert_eq!(fs::read_to_string(&ran).unwrap(), "2\n3\n");
    until("the results", || mount.json(".ckfs/stats.json")["on_step"]["results"].as_array().unwrap().len() == 2);
    let results = &mount.json(".ckfs/stats.json")["on_step"]["results"];
    assert_eq!((&results[0]["exit_code"], &results[1]["exit_code"]), (&json!(0), &json!(1)));
    let (_, text) = mount.status();
    assert!(text.contains("1 succeeded, 1 failed") && text.contains("step 3: exit code 1"), "{text}");
}

#[test]
fn a_hundred_steps_cost_the_memory_of_those_in_use() {
    if !can_mount() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("run")).unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    for number in 0..100 {
        save(&base.path().join("run"), number);
    }
    let mount = RunMount::over(base, &["--steps", "all"]);
    until("all steps", || mount.steps().len() == 100);
    assert_eq!(mount.json(".ckfs/stats.json")["steps"]["plans"], json!(0), "a listing plans nothing");
    for number in 0..100 {
        assert_eq!(fs::read(hf(&mount, number)).unwrap(), weights(number));
    }
    let steps = &mount.json(".ckfs/stats.json")["steps"];
    let in_use = steps["in_use"].as_u64().unwrap();
    assert!(in_use <= 33 && steps["dropped"].as_u64().unwrap() >= 67, "{steps}");
    // One that was dropped is the same when it is planned again.
    let cached = fs::metadata(mount.path("0/dev0/layers/scanned/wq")).unwrap();
    assert!(cached.is_file());
    assert_eq!(fs::read(hf(&mount, 0)).unwrap(), weights(0));
    assert!(mount.status().0);
}

/// A file that lies over another, until this is dropped.
struct Bound(PathBuf);

impl Bound {
    fn new(file: &Path, over: PathBuf) -> Self {
        nix::mount::mount(Some(file), &over, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        Self(over)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn others_are_answered_while_a_step_is_planned() {
    if !can_mount() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("run")).unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    for number in [1, 2] {
        save(&base.path().join("run"), number);
    }
    let slow = base.path().join("run/checkpoint-2");
    let faulty = Faulty::new(&slow, Pages::Nobody);
    let bound = Bound::new(&faulty.path().join("model.safetensors"), slow.join("model.safetensors"));
    let mount = RunMount::over(base, &["--steps", "all", "--threads", "1"]);
    // To be dropped before the mount, whose process ends once its storage answers.
    let (_bound, faulty) = (bound, faulty);
    until("both steps", || mount.steps() == BTreeSet::from([1, 2]));
    let expected = weights(1);
    assert_eq!(fs::read(hf(&mount, 1)).unwrap(), expected);
    faulty.set("model.safetensors", Manner::Stalled);
    // Each another name: the kernel asks for a name once.
    let lookers = ["hf", "dev0", "full", "safetensors", ".ckfs", "absent"].map(|name| {
        let path = mount.path(&format!("2/{name}"));
        thread::spawn(move || fs::metadata(path).is_ok())
    });
    until("all of them wait", || mount.json(".ckfs/stats.json")["in_flight"].as_u64().is_some_and(|count| count >= 6));
    for name in ["dev0/layers/scanned/wq", "full/layers/scanned/wk", "hf/config.json"] {
        assert!(!fs::read(mount.path(&format!("1/{name}"))).unwrap().is_empty(), "{name}");
    }
    assert_eq!(fs::read(hf(&mount, 1)).unwrap(), expected);
    assert_eq!(mount.steps(), BTreeSet::from([1, 2]));
    assert!(lookers.iter().all(|looker| !looker.is_finished()), "nobody looks into the step before it is planned");
    // A program that waits there can be ended.
    let mut killed = Command::new("stat").arg(mount.path("2/killed")).stderr(Stdio::null()).spawn().unwrap();
    // With the open of this file.
    until("it waits too", || mount.json(".ckfs/stats.json")["in_flight"].as_u64().is_some_and(|count| count >= 8));
    killed.kill().unwrap();
    until("it has ended", || killed.try_wait().unwrap().is_some());
    assert!(lookers.iter().all(|looker| !looker.is_finished()));
    faulty.set("model.safetensors", Manner::Good);
    let found = lookers.map(|looker| looker.join().unwrap());
    assert_eq!(found, [true, true, true, true, true, false]);
    assert_eq!(fs::read(hf(&mount, 2)).unwrap(), weights(2));
}

#[test]
fn more_steps_may_stall_than_are_planned_at_a_time() {
    if !can_mount() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("run")).unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    (1..=7).for_each(|number| save(&base.path().join("run"), number));
    let stored = tempfile::tempdir().unwrap();
    fs::write(stored.path().join("weights"), weights(1)).unwrap();
    let faulty = Faulty::new(stored.path(), Pages::Nobody);
    let over = |number: u64| base.path().join(format!("run/checkpoint-{number}/model.safetensors"));
    let bound: Vec<_> = (1..=6).map(|number| Bound::new(&faulty.path().join("weights"), over(number))).collect();
    let mount = RunMount::over(base, &["--steps", "all", "--source-timeout", "1s"]);
    // To be dropped before the mount, whose process ends once its storage answers.
    let (_bound, faulty) = (bound, faulty);
    until("all steps", || mount.steps().len() == 7);
    faulty.set("weights", Manner::Stalled);
    // One after the other: the fifth finds four that wait already.
    for number in 1..=6 {
        let path = hf(&mount, number);
        let looker = thread::spawn(move || fs::metadata(path).map(drop).unwrap_err().raw_os_error());
        until("it is answered", || looker.is_finished());
        assert_eq!(looker.join().unwrap(), Some(libc::EIO), "{number}");
    }
    let (healthy, text) = mount.status();
    assert!(!healthy && text.contains("source stalled") && text.contains("checkpoint-6"), "{text}");
    assert_eq!(fs::read(hf(&mount, 7)).unwrap(), weights(7), "another step is planned meanwhile");
    faulty.set("weights", Manner::Good);
    for number in 1..=6 {
        until("it is planned", || fs::read(hf(&mount, number)).is_ok_and(|bytes| bytes == weights(1)));
    }
    until("the mount is healthy", || mount.status().0);
}

#[test]
fn a_run_tells_its_state_while_the_storage_of_a_damaged_step_does_not_answer() {
    if !can_mount() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("run")).unwrap();
    fs::create_dir(base.path().join("mnt")).unwrap();
    (1..=2).for_each(|number| save(&base.path().join("run"), number));
    let damaged = base.path().join("run/checkpoint-2");
    fs::write(damaged.join("model.safetensors"), "no weights").unwrap();
    let faulty = Faulty::new(&damaged, Pages::Nobody);
    let bound = Bound::new(&faulty.path(), damaged);
    let mount = RunMount::over(base, &["--steps", "all", "--source-timeout", "1s"]);
    // To be dropped before the mount, whose process ends once its storage answers.
    let (_bound, faulty) = (bound, faulty);
    until("both steps", || mount.steps() == BTreeSet::from([1, 2]));
    assert!(fs::read_to_string(mount.path("2/.ckfs/error")).unwrap().contains("model.safetensors"));
    faulty.set_root_dead(true);
    let paths = [".ckfs/stats.json", ".ckfs/steps.json", ".ckfs/metrics", "2/.ckfs/error"].map(|name| mount.path(name));
    let reader = thread::spawn(move || paths.map(|path| fs::read(path).unwrap().len()));
    until("they are read", || reader.is_finished());
    assert!(reader.join().unwrap().iter().all(|len| *len > 0));
    let (healthy, text) = mount.status();
    assert!(!healthy && text.contains("step not planned"), "{text}");
    assert_eq!(fs::read(hf(&mount, 1)).unwrap(), weights(1));
    faulty.set_root_dead(false);
}

#[test]
fn the_newest_step_is_planned_before_anybody_looks() {
    if !can_mount() {
        return;
    }
    let mount = RunMount::new(&["--steps", "all"]);
    let plans = |mount: &RunMount| {
        let stats = mount.json(".ckfs/stats.json");
        (stats["steps"]["plans"].as_u64().unwrap(), stats["steps"]["in_use"].as_u64().unwrap())
    };
    save(&mount.run(""), 5);
    until("the step is planned", || plans(&mount) == (1, 1));
    // An older one that comes later is not.
    save(&mount.run(""), 3);
    until("the older step", || mount.steps() == BTreeSet::from([3, 5]));
    save(&mount.run(""), 7);
    until("the newest step is planned", || plans(&mount) == (2, 2));
    assert_eq!(fs::read(hf(&mount, 7)).unwrap(), weights(7));
    assert_eq!(plans(&mount), (2, 2), "it is planned once");
    assert_eq!(fs::read(hf(&mount, 3)).unwrap(), weights(3));
    assert_eq!(plans(&mount), (3, 3));
}

/// A small generator of numbers that look random.
fn next(state: &AtomicU64) -> u64 {
    let before = state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
    let mixed = (before ^ (before >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 31)
}

/// A writer makes, deletes, damages and replaces steps while readers compare. `CKFS_TEST_SECONDS` makes it longer.
#[test]
fn readers_see_right_bytes_or_errors_while_steps_come_and_go() {
    if !can_mount() {
        return;
    }
    let seconds = std::env::var("CKFS_TEST_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8);
    // A file that the kernel reads by itself may be cut short under it: see the guide.
    let mount = Arc::new(RunMount::new(&["--steps", "all", "--mesh", "fsdp=2", "--no-passthrough"]));
    let (begun, enough) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let seed = Arc::new(AtomicU64::new(seconds));
    let expected: Arc<Vec<Vec<u8>>> = Arc::new((0..12).map(weights).collect());
    for number in 0..4 {
        save(&mount.run(""), number);
    }
    until("the first steps", || mount.steps().len() == 4);
    let all = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let (mount, seed, expected) = (Arc::clone(&mount), Arc::clone(&seed), Arc::clone(&expected));
            let (enough, all) = (Arc::clone(&enough), Arc::clone(&all));
            thread::spawn(move || {
                while !enough.load(Ordering::Relaxed) {
                    let steps: Vec<u64> = mount.steps().into_iter().collect();
                    if steps.is_empty() {
                        continue;
                    }
                    let number = steps[usize::try_from(next(&seed)).unwrap_or(0) % steps.len()];
                    match fs::read(hf(&mount, number)) {
                        Ok(bytes) => {
                            assert_eq!(bytes, expected[usize::try_from(number).unwrap()], "step {number}");
                            all.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => {
                            let errno = error.raw_os_error().unwrap();
                            assert!([libc::EIO, libc::ENOENT].contains(&errno), "step {number}: {error}");
                        }
                    }
                }
            })
        })
        .collect();
    let mut written = 0;
    while begun.elapsed().as_secs() < seconds || written <= 3 || all.load(Ordering::Relaxed) <= 50 {
        assert!(begun.elapsed() < Duration::from_secs(seconds) + SOON, "{written} written, {all:?} read");
        let number = next(&seed) % 12;
        let directory = mount.run(&format!("checkpoint-{number}"));
        match (directory.exists(), next(&seed) % 4) {
            (false, _) => {
                save(&mount.run(""), number);
                written += 1;
            }
            (true, 0) => {
                // Damaged: cut short, as by a full disk.
                let file = File::options().write(true).open(directory.join("model.safetensors")).unwrap();
                file.set_len(100).unwrap();
            }
            (true, _) => fs::remove_dir_all(&directory).unwrap(),
        }
        thread::sleep(Duration::from_millis(120));
    }
    enough.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.join().unwrap();
    }
    // In the end all steps are made anew, and everything is well.
    for number in 0..12 {
        let _ = fs::remove_dir_all(mount.run(&format!("checkpoint-{number}")));
    }
    until("all are gone", || mount.steps().is_empty());
    assert!(mount.status().0, "{}", mount.status().1);
    save(&mount.run(""), 3);
    until("a last step", || fs::read(hf(&mount, 3)).is_ok_and(|bytes| bytes == expected[3]));
    assert_eq!(mount.json(".ckfs/stats.json")["panics"], json!(0));
}
