//! The client of the Hub against a stub of it: what it asks for, what it refuses, and what it never tells.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests panic, and a process tells another")]

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    ops::ControlFlow,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use crate::stub::hub::{HubStub, Switches};
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    source::{
        ByteSpan, FetchPart, FileFetch, FileId, SourceError,
        remote::{
            Backoff, Content, Deadline, Failure, RemoteCounters, RemoteError, RemoteFile, RemoteOptions,
            RemoteRepository, Retrying,
            hub::{Hub, HubSettings},
        },
    },
};
use serde_json::json;
use tempfile::TempDir;

const REPO: &str = "org/name";
/// Bytes of the large file.
const LARGE: usize = 300_000;

struct Rig {
    stub: HubStub,
    dir: TempDir,
    commit: String,
}

fn large() -> Vec<u8> {
    (0..LARGE).map(|at| u8::try_from(at * at % 251).unwrap()).collect()
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{\"a\": 1}").unwrap();
        fs::create_dir(dir.path().join("sub dir")).unwrap();
        fs::write(dir.path().join("sub dir/x#?%.txt"), "small").unwrap();
        fs::write(dir.path().join("model.safetensors"), large()).unwrap();
        let stub = HubStub::start();
        let commit = stub.publish(REPO, "main", dir.path());
        Self { stub, dir, commit }
    }

    fn hub_with(&self, token: Option<&str>) -> Arc<Hub> {
        let variable = |name: &str| match name {
            "HF_ENDPOINT" => Some(PathBuf::from(self.stub.url())),
            "HF_TOKEN" => token.map(PathBuf::from),
            _ => None,
        };
        let settings = HubSettings::from_environment(variable, false).unwrap();
        Arc::new(Hub::new(settings, None, gate(Arc::default())).unwrap())
    }

    fn open(&self, token: Option<&str>) -> Result<RemoteRepository, RemoteError> {
        let hub = self.hub_with(token);
        let commit = hub.commit(REPO, "main", soon())?;
        hub.repository(REPO, &commit, None, false, soon())
    }

    fn switch(&self, change: impl FnOnce(&mut Switches)) {
        self.stub.switch(change);
    }
}

fn gate(counters: Arc<RemoteCounters>) -> Backoff {
    Backoff::new("", RemoteOptions::TIMEOUT, &Arc::default(), counters)
}

fn soon() -> Deadline {
    Deadline::At(Instant::now() + Duration::from_mins(3))
}

fn file<'a>(repository: &'a RemoteRepository, path: &str) -> &'a RemoteFile {
    repository.files.iter().find(|file| file.path == path).unwrap()
}

fn read(repository: &RemoteRepository, path: &str, start: u64, len: u64) -> Result<Vec<u8>, RemoteError> {
    read_until(repository, path, start, len, soon())
}

fn read_until(
    repository: &RemoteRepository,
    path: &str,
    start: u64,
    len: u64,
    deadline: Deadline,
) -> Result<Vec<u8>, RemoteError> {
    let retrying = Retrying::new(gate(Arc::default()), Arc::clone(&repository.objects));
    let mut found = Vec::new();
    let span = ByteSpan::of_len(start, len).unwrap();
    retrying.read(file(repository, path), span, deadline, &mut |bytes| {
        found.extend_from_slice(bytes);
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

#[test]
fn a_revision_is_pinned_and_its_files_have_sizes_and_digests() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    assert_eq!(repository.revision.as_deref(), Some(rig.commit.as_str()));
    assert_eq!(repository.label, format!("{REPO}@{}", &rig.commit[..12]));
    let paths: Vec<&str> = repository.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["config.json", "model.safetensors", "sub dir/x#?%.txt"]);
    let model = file(&repository, "model.safetensors");
    assert_eq!(model.size_bytes, LARGE as u64);
    assert!(matches!(&model.content, Content::Sha256(hex) if hex.len() == 64));
    assert!(matches!(&file(&repository, "config.json").content, Content::GitBlob(hex) if hex.len() == 40));
}

#[test]
fn a_later_commit_of_the_branch_does_not_change_what_is_read() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    let newer = tempfile::tempdir().unwrap();
    fs::write(newer.path().join("model.safetensors"), vec![0; LARGE]).unwrap();
    let second = rig.stub.publish(REPO, "main", newer.path());
    assert_eq!(read(&repository, "model.safetensors", 100, 50).unwrap(), large()[100..150]);
    assert_eq!(rig.hub_with(None).commit(REPO, "main", soon()).unwrap(), second);
}

#[test]
fn branches_with_slashes_are_one_word_of_the_address() {
    let rig = Rig::new();
    let commit = rig.stub.publish(REPO, "refs/pr/1", rig.dir.path());
    assert_eq!(rig.hub_with(None).commit(REPO, "refs/pr/1", soon()).unwrap(), commit);
    assert_eq!(rig.stub.hub.record.with("refs%2Fpr%2F1").len(), 1);
}

#[test]
fn long_lists_come_in_pages() {
    let rig = Rig::new();
    rig.switch(|switches| switches.page = Some(1));
    assert_eq!(rig.open(None).unwrap().files.len(), 3);
    assert_eq!(rig.stub.hub.record.with("/tree/").len(), 3);
}

#[test]
fn spans_of_large_and_small_files_are_exact() {
    let rig = Rig::new();
    rig.switch(|switches| switches.resolve_cache = true);
    let repository = rig.open(None).unwrap();
    for (start, len) in [(0, 1), (0, LARGE), (LARGE - 1, 1), (1000, 100_000)] {
        let bytes = read(&repository, "model.safetensors", start as u64, len as u64).unwrap();
        assert_eq!(bytes, large()[start..start + len]);
    }
    assert_eq!(read(&repository, "config.json", 1, 3).unwrap(), b"\"a\"");
    assert_eq!(read(&repository, "sub dir/x#?%.txt", 0, 5).unwrap(), b"small");
    // Each file was located once.
    assert_eq!(rig.stub.hub.record.with("HEAD /org").len(), 3);
    assert_eq!(rig.stub.signatures(), 1);
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let rig = Rig::new();
    rig.switch(|switches| {
        switches.token = Some("hf_secret".into());
        switches.resolve_cache = true;
    });
    let repository = rig.open(Some("hf_secret")).unwrap();
    assert_eq!(read(&repository, "model.safetensors", 0, 10).unwrap(), large()[..10]);
    assert_eq!(read(&repository, "config.json", 0, 2).unwrap(), b"{\"");
    assert!(!rig.stub.token_leaked());
}

#[test]
fn an_expired_address_is_renewed_once() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    read(&repository, "model.safetensors", 0, 10).unwrap();
    rig.switch(|switches| switches.expired = 1);
    assert_eq!(read(&repository, "model.safetensors", 5, 10).unwrap(), large()[5..15]);
    assert_eq!(rig.stub.signatures(), 2);
    rig.switch(|switches| switches.expired = u64::MAX);
    let error = read(&repository, "model.safetensors", 5, 10).unwrap_err();
    assert_eq!((error.failure.clone(), error.status, rig.stub.signatures()), (Failure::Refused, Some(403), 3));
    let shown = error.to_string();
    assert!(shown.contains("model.safetensors") && !shown.contains("secret"), "{shown}");
}

#[test]
fn gated_and_private_repositories_are_explained() {
    let rig = Rig::new();
    rig.switch(|switches| switches.gated = true);
    // Lists of gated repositories are public. The files are not.
    let repository = rig.open(None).unwrap();
    let error = read(&repository, "model.safetensors", 0, 10).unwrap_err().to_string();
    let page = format!("{}/{REPO}", rig.stub.url());
    for part in ["gated", &format!("accept the licence at {page}"), "set HF_TOKEN", "there is none now"] {
        assert!(error.contains(part), "{error}");
    }
    let repository = rig.open(Some("hf_other")).unwrap();
    let error = read(&repository, "config.json", 0, 1).unwrap_err().to_string();
    assert!(error.contains("the token of HF_TOKEN has no access") && !error.contains("hf_other"), "{error}");
    rig.switch(|switches| *switches = Switches { hidden: true, ..Switches::default() });
    let error = rig.open(None).err().unwrap();
    assert_eq!(error.failure, Failure::NotFound);
    assert!(error.to_string().contains("or it is private"), "{error}");
    rig.switch(|switches| *switches = Switches::default());
    let hub = rig.hub_with(None);
    let error = hub.commit(REPO, "mian", soon()).unwrap_err().to_string();
    assert!(error.contains("no branch, tag or commit \"mian\""), "{error}");
    let error = hub.commit("org/nmae", "main", soon()).unwrap_err().to_string();
    assert!(error.contains("no such repository"), "{error}");
}

#[test]
fn rate_limits_are_obeyed_or_said() {
    let rig = Rig::new();
    rig.switch(|switches| (switches.busy_api, switches.busy, switches.busy_seconds) = (1, 1, 1));
    let begun = Instant::now();
    let repository = rig.open(None).unwrap();
    assert_eq!(read(&repository, "model.safetensors", 0, 10).unwrap(), large()[..10]);
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    rig.switch(|switches| (switches.busy, switches.busy_seconds) = (1, 100));
    let soon = Deadline::At(Instant::now() + Duration::from_mins(1));
    let error = read_until(&repository, "config.json", 0, 2, soon).unwrap_err().to_string();
    assert!(error.contains("asks for a pause of 100 s"), "{error}");
}

#[test]
fn broken_replies_are_repeated_and_resumed() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    rig.switch(|switches| (switches.broken, switches.short, switches.short_after) = (2, 2, 70_000));
    assert_eq!(read(&repository, "model.safetensors", 0, LARGE as u64).unwrap(), large());
    // The bytes before a break are not sent again.
    let sent = rig.stub.content.record.body_bytes.load(std::sync::atomic::Ordering::Relaxed);
    assert!(sent <= LARGE as u64 + 1000, "{sent}");
}

#[test]
fn another_content_is_never_accepted() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    read(&repository, "model.safetensors", 0, 10).unwrap();
    rig.switch(|switches| switches.changed_etag = true);
    let error = read(&repository, "model.safetensors", 0, 10).unwrap_err();
    assert!(matches!(error.failure, Failure::Changed { .. }), "{error}");
    rig.switch(|switches| *switches = Switches { changed_digest: true, ..Switches::default() });
    for path in ["model.safetensors", "config.json"] {
        let repository = rig.open(None).unwrap();
        let error = read(&repository, path, 0, 1).unwrap_err();
        assert!(matches!(error.failure, Failure::Changed { .. }), "{error}");
    }
    rig.switch(|switches| *switches = Switches { wrong_range: true, ..Switches::default() });
    let repository = rig.open(None).unwrap();
    let soon = Deadline::At(Instant::now() + Duration::from_secs(5));
    let error = read_until(&repository, "model.safetensors", 5, 10, soon).unwrap_err().to_string();
    assert!(error.contains("expected bytes 5-14"), "{error}");
}

#[test]
fn a_stalled_reply_ends_at_the_deadline() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    rig.switch(|switches| switches.stall_after = Some(1000));
    let begun = Instant::now();
    let limit = Deadline::At(begun + Duration::from_millis(700));
    let error = read_until(&repository, "model.safetensors", 0, 100_000, limit).unwrap_err();
    assert!(begun.elapsed() < Duration::from_mins(1), "{:?}: {error}", begun.elapsed());
    assert!(read(&repository, "config.json", 0, 1).is_ok());
}

#[test]
fn a_hub_that_is_not_there_is_an_error_in_time() {
    let rig = Rig::new();
    let hub = rig.hub_with(None);
    drop(rig.stub);
    let error = hub.commit(REPO, "main", Deadline::At(Instant::now() + Duration::from_secs(1))).unwrap_err();
    assert!(error.is_transient(), "{error}");
}

#[test]
fn a_request_much_later_than_its_peers_is_sent_a_second_time_and_the_first_answer_wins() {
    let rig = Rig::new();
    let repository = rig.open(None).unwrap();
    let counters: Arc<RemoteCounters> = Arc::default();
    let retrying = Retrying::new(gate(Arc::clone(&counters)), Arc::clone(&repository.objects));
    let read = |start: usize, len: usize| {
        let (mut found, span) = (Vec::new(), ByteSpan::of_len(start as u64, len as u64).unwrap());
        let read = retrying.read(file(&repository, "model.safetensors"), span, soon(), &mut |bytes| {
            found.extend_from_slice(bytes);
            ControlFlow::Continue(())
        });
        read.unwrap();
        assert!(found == large()[start..start + len], "{start}, {len} bytes");
    };
    let counts = || (counters.hedges.load(Ordering::Relaxed), counters.hedge_wins.load(Ordering::Relaxed));
    (0..60).for_each(|place| read(place * 1000, 1000));
    let before = counts();
    // Later than the deadline of the read: the second request alone brings the bytes.
    rig.switch(|switches| (switches.slow, switches.slow_ms) = (1, 30_000));
    read(7, 100_000);
    assert_eq!(counts(), (before.0 + 1, before.1 + 1));
    // Both are late: each byte comes once all the same.
    rig.switch(|switches| (switches.slow, switches.slow_ms) = (2, 2000));
    read(11, 200_000);
    assert_eq!(counts().0, before.0 + 2);
}

/// Bytes of each tensor of two repositories: more than are fetched with the header.
const TENSOR: u64 = 8 << 20;

/// Set in the process that reads two repositories of the stub, which the environment names.
const READER: &str = "CKFS_TEST_READER";

/// Repositories of one service have files of the same name; an error of a batch over both condemns the right one.
#[test]
fn a_failure_of_one_file_leaves_another_of_its_name_alone() {
    if env::var_os(READER).is_some() {
        return read_two_repositories();
    }
    let dir = tempfile::tempdir().unwrap();
    let stub = HubStub::start();
    for (name, tensor) in [("base", "weight"), ("fill", "more")] {
        let repo = dir.path().join(name);
        fs::create_dir(&repo).unwrap();
        fs::write(repo.join("config.json"), "{}").unwrap();
        let header = json!({tensor: {"dtype": "U8", "shape": [TENSOR], "data_offsets": [0, TENSOR]}}).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + TENSOR as usize, 7);
        fs::write(repo.join("model.safetensors"), bytes).unwrap();
        stub.publish(&format!("org/{name}"), "main", &repo);
    }
    let mut reader = Command::new(env::current_exe().unwrap());
    reader.args(["hub::a_failure_of_one_file_leaves_another_of_its_name_alone", "--exact", "--nocapture"]);
    reader.env(READER, "1").env("HF_ENDPOINT", stub.url()).env("CKFS_CACHE_DIR", dir.path().join("cache"));
    let mut reader = reader.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(reader.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("opened")), "the reader opens both");
    stub.switch(|switches| switches.changed_etag_of = "org/fill".to_owned());
    reader.stdin.take().unwrap().write_all(b"changed\n").unwrap();
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(reader.wait().unwrap().success(), "{said:#?}");
}

fn read_two_repositories() {
    let remote =
        RemoteOptions { cache_dir: env::var_os("CKFS_CACHE_DIR").map(PathBuf::from), ..RemoteOptions::default() };
    let options =
        OpenOptions { fill_from: Some("org/fill".to_owned()), asks_hub: true, remote, ..OpenOptions::default() };
    let checkpoint = Checkpoint::open("org/base", &options).unwrap();
    let source = checkpoint.source();
    let file = |name: &str| {
        let is_it = |file: &FileId| {
            let path = source.path(*file).display().to_string();
            path.contains(name) && path.ends_with("model.safetensors")
        };
        (0..u32::try_from(source.file_count()).unwrap()).map(FileId).find(is_it).unwrap()
    };
    let (base, fill) = (file("org/base"), file("org/fill"));
    println!("opened");
    io::stdin().read_line(&mut String::new()).unwrap();
    let (mut of_base, mut of_fill) = ([0; 10], [0; 10]);
    let mut parts =
        [FetchPart { start: TENSOR / 2, target: &mut of_base }, FetchPart { start: TENSOR / 2, target: &mut of_fill }];
    let (left, right) = parts.split_at_mut(1);
    let mut batch = [FileFetch { file: base, parts: left }, FileFetch { file: fill, parts: right }];
    let (failed, error) = source.fetch_files(&mut batch).unwrap_err();
    assert_eq!(failed, fill, "{error}");
    assert!(
        matches!(&error, SourceError::Lost { flaw, .. } if flaw.starts_with("changed since it was listed")),
        "{error}"
    );
    let poisoned = |file| source.health().is_poisoned(file);
    assert_eq!((poisoned(base), poisoned(fill)), (false, true));
    let mut bytes = [0; 10];
    source.read_into(base, TENSOR / 2 + 1000, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 10]);
}
