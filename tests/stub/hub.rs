//! The Hub and its content network: the four requests of its protocol, over directories, with switches for faults.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::http::{Reply, Request, Server, unescaped};

/// Files above this size are on the content network, as are all safetensors.
const LARGE: u64 = 1 << 20;

#[derive(Clone, Debug)]
struct Blob {
    file: Arc<File>,
    size: u64,
    /// SHA-1 of the git blob.
    oid: String,
    sha256: Option<String>,
}

#[derive(Clone, Debug, Default)]
struct Commit {
    files: BTreeMap<String, Blob>,
}

/// Faults. All are off by default.
#[derive(Clone, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Switches {
    /// The only token that is let in.
    pub token: Option<String>,
    /// Answers `GatedRepo` to `/resolve/`.
    pub gated: bool,
    /// Answers `RepoNotFound` to everything.
    pub hidden: bool,
    /// Requests to `/resolve/` that are answered with 429, and the seconds to wait.
    pub busy: u64,
    pub busy_seconds: u64,
    /// Requests to `/api/` that are answered with 429, likewise.
    pub busy_api: u64,
    /// Requests to the content network that are answered with 500.
    pub broken: u64,
    /// Signatures up to this number have expired.
    pub expired: u64,
    /// Bodies of the content network that end early, after this many bytes.
    pub short: u64,
    pub short_after: u64,
    /// Replies with another range than the requested one.
    pub wrong_range: bool,
    /// The content network's entity tag is another one.
    pub changed_etag: bool,
    /// That of one repository's files only.
    pub changed_etag_of: String,
    /// The Hub describes files by another digest.
    pub changed_digest: bool,
    /// Bytes that the content network sends per 100 ms, if its rate is limited.
    pub drip: Option<usize>,
    /// The content network sends no byte beyond this one of each body.
    pub stall_after: Option<u64>,
    /// Time before each reply.
    pub latency_ms: u64,
    /// Replies of the content network that come later than that, and how much.
    pub slow: u64,
    pub slow_ms: u64,
    /// Small files are one redirect further, on the same host.
    pub resolve_cache: bool,
    /// Entries of a page of the tree.
    pub page: Option<usize>,
    /// Answers nothing but 502.
    pub down: bool,
}

impl Switches {
    /// Sets a switch by name, as the program's users do.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u64>().map_err(|_| format!("{name}: expected a number, found {value:?}"));
        let yes = matches!(value, "1" | "true" | "on");
        match name {
            "token" => self.token = (!value.is_empty()).then(|| value.to_owned()),
            "gated" => self.gated = yes,
            "hidden" => self.hidden = yes,
            "busy" => self.busy = number()?,
            "busy_seconds" => self.busy_seconds = number()?,
            "busy_api" => self.busy_api = number()?,
            "broken" => self.broken = number()?,
            "expired" => self.expired = number()?,
            "short" => self.short = number()?,
            "short_after" => self.short_after = number()?,
            "wrong_range" => self.wrong_range = yes,
            "changed_etag" => self.changed_etag = yes,
            "changed_etag_of" => value.clone_into(&mut self.changed_etag_of),
            "changed_digest" => self.changed_digest = yes,
            "drip" => self.drip = Some(usize::try_from(number()?).unwrap()).filter(|bytes| *bytes > 0),
            "stall_after" => self.stall_after = if value.is_empty() { None } else { Some(number()?) },
            "latency_ms" => self.latency_ms = number()?,
            "slow" => self.slow = number()?,
            "slow_ms" => self.slow_ms = number()?,
            "resolve_cache" => self.resolve_cache = yes,
            "page" => self.page = Some(usize::try_from(number()?).unwrap()).filter(|entries| *entries > 0),
            "down" => self.down = yes,
            _ => return Err(format!("no switch {name:?}")),
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct State {
    /// By repository and revision: branches, tags and commits.
    revisions: Mutex<HashMap<(String, String), String>>,
    commits: Mutex<HashMap<(String, String), Commit>>,
    switches: Mutex<Switches>,
    signatures: AtomicU64,
    token_leaked: AtomicBool,
    content_port: AtomicU64,
    own_port: AtomicU64,
}

/// The Hub and its content network, on two ports.
pub struct HubStub {
    pub hub: Server,
    pub content: Server,
    state: Arc<State>,
}

impl HubStub {
    pub fn start() -> Self {
        Self::start_at(0)
    }

    pub fn start_at(port: u16) -> Self {
        let state = Arc::new(State::default());
        let of_content = Arc::clone(&state);
        let content = Server::start(Arc::new(move |request: &Request| of_content.content(request)));
        state.content_port.store(content.port.into(), Ordering::Relaxed);
        let of_hub = Arc::clone(&state);
        let hub = Server::start_at(port, Arc::new(move |request: &Request| of_hub.answer(request)));
        state.own_port.store(hub.port.into(), Ordering::Relaxed);
        Self { hub, content, state }
    }

    pub fn url(&self) -> String {
        self.hub.url()
    }

    /// Puts a directory under a repository's name, as the newest commit of a branch. Returns the commit.
    pub fn publish(&self, repo: &str, branch: &str, dir: &Path) -> String {
        let mut commit = Commit::default();
        let mut hasher = Sha1::new();
        for path in files_of(dir) {
            let name = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
            let blob = read_blob(&path);
            hasher.update(format!("{name} {}\n", blob.oid));
            commit.files.insert(name, blob);
        }
        let sha = hex(&hasher.finalize());
        let key = |revision: &str| (repo.to_owned(), revision.to_owned());
        self.state.commits.lock().unwrap().insert(key(&sha), commit);
        let mut revisions = self.state.revisions.lock().unwrap();
        revisions.insert(key(branch), sha.clone());
        revisions.insert(key(&sha), sha.clone());
        sha
    }

    /// Changes the switches.
    pub fn switch(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.state.switches.lock().unwrap());
    }

    /// Whether a token has reached the content network.
    pub fn token_leaked(&self) -> bool {
        self.state.token_leaked.load(Ordering::Relaxed)
    }

    /// Signed addresses handed out so far.
    pub fn signatures(&self) -> u64 {
        self.state.signatures.load(Ordering::Relaxed)
    }
}

fn files_of(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files_of(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
}

fn read_blob(path: &Path) -> Blob {
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().len();
    let mut git = Sha1::new();
    git.update(format!("blob {size}\0"));
    let mut sha256 = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut input = &file;
    loop {
        let read = input.read(&mut buffer).unwrap();
        if read == 0 {
            break;
        }
        git.update(&buffer[..read]);
        sha256.update(&buffer[..read]);
    }
    let large = size > LARGE || path.extension().is_some_and(|extension| extension == "safetensors");
    let sha256 = large.then(|| hex(&sha256.finalize()));
    Blob { file: Arc::new(file), size, oid: hex(&git.finalize()), sha256 }
}

/// Takes one from a counter of faults.
fn take(count: &mut u64) -> bool {
    let some = *count > 0;
    *count = count.saturating_sub(1);
    some
}

impl State {
    fn answer(&self, request: &Request) -> Reply {
        let path: Vec<&str> = request.path.trim_matches('/').split('/').collect();
        if let ["_stub", what] = path[..] {
            return self.control(request, what);
        }
        let mut switches = self.switches.lock().unwrap();
        if switches.down {
            return Reply::new(502, "");
        }
        let sent = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let known = switches.token.is_none() || switches.token.as_deref() == sent;
        let refused = |status, code: &str, message: &str| {
            Reply::new(status, json!({"error": message}).to_string())
                .header("X-Error-Code", code)
                .header("X-Error-Message", message)
                .header("X-Request-Id", "Root=1-stub")
        };
        if switches.hidden || (!known && !switches.gated) {
            return refused(401, "RepoNotFound", "Repository not found");
        }
        let is_api = path.first() == Some(&"api") && path.get(1) != Some(&"resolve-cache");
        let count = if is_api { &mut switches.busy_api } else { &mut switches.busy };
        if take(count) {
            let kind = if is_api { "api" } else { "resolvers" };
            let limit = format!("\"{kind}\";r=0;t={}", switches.busy_seconds);
            return Reply::new(429, "").header("RateLimit", limit);
        }
        let latency = Duration::from_millis(switches.latency_ms);
        let switches = switches.clone();
        let mut reply = match path[..] {
            ["api", "models", org, name, "revision", revision] => self.revision(&format!("{org}/{name}"), revision),
            ["api", "models", org, name, "tree", commit] => {
                self.tree(request, &format!("{org}/{name}"), commit, &switches)
            }
            ["api", "resolve-cache", org, name, commit, ..] => {
                self.small(request, &format!("{org}/{name}"), commit, &path[5..].join("/"))
            }
            [_, _, "resolve", ..] if switches.gated && !(known && switches.token.is_some()) => {
                let status = if sent.is_some() { 403 } else { 401 };
                refused(status, "GatedRepo", "Access to this model is restricted")
            }
            [org, name, "resolve", commit, ..] => {
                self.resolve(request, &format!("{org}/{name}"), commit, &path[4..].join("/"), &switches)
            }
            _ => Reply::new(404, ""),
        };
        reply.faults.delay = latency;
        reply
    }

    /// `/_stub/set?name=value` and `/_stub/stats`, for programs.
    fn control(&self, request: &Request, what: &str) -> Reply {
        if what == "set" {
            let mut switches = self.switches.lock().unwrap();
            for pair in request.query.split('&') {
                let (name, value) = pair.split_once('=').unwrap_or((pair, "1"));
                if let Err(error) = switches.set(name, &unescaped(value)) {
                    return Reply::new(400, error);
                }
            }
            return Reply::new(200, "");
        }
        let stats = json!({
            "signatures": self.signatures.load(Ordering::Relaxed),
            "token_leaked": self.token_leaked.load(Ordering::Relaxed),
        });
        Reply::new(200, stats.to_string())
    }

    fn commit(&self, repo: &str, revision: &str) -> Option<(String, Commit)> {
        let key = |revision: &str| (repo.to_owned(), revision.to_owned());
        let sha = self.revisions.lock().unwrap().get(&key(revision))?.clone();
        let commit = self.commits.lock().unwrap().get(&key(&sha))?.clone();
        Some((sha, commit))
    }

    fn missing(&self, repo: &str) -> Reply {
        let exists = self.revisions.lock().unwrap().keys().any(|(own, _)| own == repo);
        let (status, code) = if exists { (404, "RevisionNotFound") } else { (401, "RepoNotFound") };
        Reply::new(status, "").header("X-Error-Code", code)
    }

    fn revision(&self, repo: &str, revision: &str) -> Reply {
        match self.commit(repo, &unescaped(revision)) {
            Some((sha, _)) => Reply::new(200, json!({"id": repo, "sha": sha, "private": false}).to_string()),
            None => self.missing(repo),
        }
    }

    fn tree(&self, request: &Request, repo: &str, commit: &str, switches: &Switches) -> Reply {
        let Some((_, found)) = self.commit(repo, commit) else { return self.missing(repo) };
        let entry = |(path, blob): (&String, &Blob)| -> Value {
            match &blob.sha256 {
                Some(sha256) => json!({"type": "file", "path": path, "size": 134, "oid": blob.oid,
                    "lfs": {"oid": sha256, "size": blob.size, "pointerSize": 134}}),
                None => json!({"type": "file", "path": path, "size": blob.size, "oid": blob.oid}),
            }
        };
        let page = switches.page.unwrap_or(1000);
        let first: usize = request.parameter("cursor").map_or(0, |cursor| cursor.parse().unwrap());
        let rows: Vec<Value> = found.files.iter().skip(first).take(page).map(entry).collect();
        let reply = Reply::new(200, Value::from(rows).to_string());
        let next = first + page;
        if next < found.files.len() {
            let port = self.own_port.load(Ordering::Relaxed);
            let address = format!("http://127.0.0.1:{port}{}?recursive=true&limit=1000&cursor={next}", request.path);
            return reply.header("Link", format!("<{address}>; rel=\"next\""));
        }
        reply
    }

    fn resolve(&self, request: &Request, repo: &str, commit: &str, path: &str, switches: &Switches) -> Reply {
        let path = unescaped(path);
        let Some((sha, found)) = self.commit(repo, commit) else { return self.missing(repo) };
        let Some(blob) = found.files.get(&path) else {
            return Reply::new(404, "").header("X-Error-Code", "EntryNotFound");
        };
        let mut digest = blob.sha256.clone().unwrap_or_else(|| blob.oid.clone());
        if switches.changed_digest {
            digest.replace_range(..1, if digest.starts_with('0') { "1" } else { "0" });
        }
        if blob.sha256.is_none() {
            if switches.resolve_cache {
                let escaped = request.path.splitn(6, '/').last().unwrap();
                let target = format!("/api/resolve-cache/{repo}/{sha}/{escaped}");
                return Reply::new(307, "").header("Location", target).header("X-Repo-Commit", sha);
            }
            return Reply::file(request, &blob.file)
                .header("X-Repo-Commit", sha)
                .header("ETag", format!("\"{digest}\""));
        }
        let signature = self.signatures.fetch_add(1, Ordering::Relaxed) + 1;
        let port = self.content_port.load(Ordering::Relaxed);
        let target = format!("http://127.0.0.1:{port}/{repo}/{sha}/{path}?Signature=secret{signature}");
        Reply::new(302, "")
            .header("Location", target)
            .header("X-Repo-Commit", sha)
            .header("X-Linked-Size", blob.size.to_string())
            .header("X-Linked-ETag", format!("\"{digest}\""))
    }

    fn small(&self, request: &Request, repo: &str, commit: &str, path: &str) -> Reply {
        let Some((_, found)) = self.commit(repo, commit) else { return self.missing(repo) };
        let Some(blob) = found.files.get(&unescaped(path)) else { return Reply::new(404, "") };
        Reply::file(request, &blob.file).header("ETag", format!("\"{}\"", blob.oid))
    }

    /// The content network.
    fn content(&self, request: &Request) -> Reply {
        if request.header("authorization").is_some() {
            self.token_leaked.store(true, Ordering::Relaxed);
            return Reply::new(400, "a token has come here");
        }
        let mut switches = self.switches.lock().unwrap();
        let parts: Vec<&str> = request.path.trim_matches('/').splitn(4, '/').collect();
        let [org, name, sha, path] = parts[..] else { return Reply::new(404, "") };
        let signature = request.parameter("Signature").unwrap_or_default();
        let signature: u64 = signature.trim_start_matches("secret").parse().unwrap_or(0);
        if signature <= switches.expired {
            return Reply::new(403, "AccessDenied: Request has expired");
        }
        if take(&mut switches.broken) {
            return Reply::new(500, "").header("X-Amz-Cf-Id", "stub");
        }
        let repo = format!("{org}/{name}");
        let Some((_, found)) = self.commit(&repo, sha) else { return Reply::new(404, "") };
        let Some(blob) = found.files.get(&unescaped(path)) else { return Reply::new(404, "") };
        let mut reply = Reply::file(request, &blob.file);
        let is_changed = switches.changed_etag || switches.changed_etag_of == repo;
        let tag = if is_changed { "\"another\"" } else { "\"of-the-network\"" };
        reply = reply.header("ETag", tag);
        if switches.wrong_range {
            for (name, value) in &mut reply.headers {
                if name == "Content-Range" {
                    *value = format!("bytes 0-0/{}", blob.size);
                }
            }
        }
        if take(&mut switches.short) {
            reply.faults.cut_after = Some(switches.short_after);
        }
        let more_ms = if take(&mut switches.slow) { switches.slow_ms } else { 0 };
        reply.faults.delay = Duration::from_millis(switches.latency_ms + more_ms);
        reply.faults.drip = switches.drip.map(|bytes| (bytes, Duration::from_millis(100)));
        reply.faults.stall_after = switches.stall_after;
        reply
    }
}
