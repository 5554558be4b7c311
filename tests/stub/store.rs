//! A directory as buckets of object stores: the part of the interface of S3, and of the like one of Google, that reading needs.
//!
//! `GET` and `HEAD /bucket/key` with `Range` and `If-Match`; `GET /bucket?list-type=2`, which both understand. Signatures are not
//! checked. Faults are switched on by `GET /_stub/set?NAME=VALUE`; `GET /_stub/stats` counts.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::json;

use super::http::{Line, Reply, Request, Server, unescaped};

/// Objects of a page of a list.
const PAGE: usize = 1000;

/// Faults, off by default.
#[derive(Clone, Debug, Default)]
pub struct Switches {
    /// Time before each reply.
    pub latency: Duration,
    /// Replies that come later than that, and how much.
    pub slow: u64,
    pub slow_by: Duration,
    /// Requests that are answered with `busy_status`, or 503, and the seconds to wait, if they are told.
    pub busy: u64,
    pub busy_status: Option<u16>,
    pub busy_seconds: Option<u64>,
    /// Everything is refused with this status.
    pub refuse: Option<u16>,
    /// Replies with an object that name an encoding of their bytes.
    pub encoded: u64,
    /// Bodies of objects that end early, after this many bytes.
    pub short: u64,
    pub short_after: u64,
    /// Bytes of an object that are sent in 100 ms, if the rate is limited.
    pub drip: Option<usize>,
    /// The line that all bytes of objects share, if its rate is limited.
    pub line: Option<Arc<Line>>,
    /// No byte beyond this one of each object's body is sent.
    pub stall_after: Option<u64>,
    /// Part of all tags: another value is another version of every object.
    pub generation: u64,
}

impl Switches {
    /// Sets a switch by name, as the program's users do.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u64>().map_err(|_| format!("{name}: expected a number, found {value:?}"));
        let some = || if value.is_empty() { Ok(None) } else { number().map(Some) };
        let status = || some().map(|status| status.map(|status| u16::try_from(status).unwrap()));
        match name {
            "latency_ms" => self.latency = Duration::from_millis(number()?),
            "slow" => self.slow = number()?,
            "slow_ms" => self.slow_by = Duration::from_millis(number()?),
            "busy" => self.busy = number()?,
            "busy_status" => self.busy_status = status()?,
            "busy_seconds" => self.busy_seconds = some()?,
            "refuse" => self.refuse = status()?,
            "encoded" => self.encoded = number()?,
            "short" => self.short = number()?,
            "short_after" => self.short_after = number()?,
            "line" => self.line = some()?.map(Line::new),
            "drip" => self.drip = some()?.map(|bytes| usize::try_from(bytes).unwrap()),
            "stall_after" => self.stall_after = some()?,
            "generation" => self.generation = number()?,
            _ => return Err(format!("no switch {name:?}")),
        }
        Ok(())
    }

    /// The reply to a request that is not answered, if one is due.
    fn fault(&mut self) -> Option<Reply> {
        if let Some(status) = self.refuse {
            return Some(
                Reply::new(status, "<Error><Code>AccessDenied</Code></Error>").header("x-request-id", "stub-1"),
            );
        }
        if self.busy == 0 {
            return None;
        }
        self.busy -= 1;
        let reply = Reply::new(self.busy_status.unwrap_or(503), "<Error><Code>SlowDown</Code></Error>");
        Some(match self.busy_seconds {
            Some(seconds) => reply.header("Retry-After", seconds.to_string()),
            None => reply,
        })
    }
}

/// A server of buckets, the directories below a root.
pub struct StoreStub {
    pub server: Server,
    pub switches: Arc<Mutex<Switches>>,
}

struct Store {
    root: PathBuf,
    switches: Arc<Mutex<Switches>>,
    files: Mutex<HashMap<PathBuf, Arc<File>>>,
    /// Objects' bytes in replies.
    object_bytes: AtomicU64,
}

impl StoreStub {
    pub fn start(root: &Path) -> Self {
        Self::start_at(0, root)
    }

    pub fn start_at(port: u16, root: &Path) -> Self {
        let switches: Arc<Mutex<Switches>> = Arc::default();
        let store = Store {
            root: root.to_owned(),
            switches: Arc::clone(&switches),
            files: Mutex::default(),
            object_bytes: AtomicU64::new(0),
        };
        let server = Server::start_at(port, Arc::new(move |request: &Request| store.answer(request)));
        Self { server, switches }
    }

    /// Changes the switches.
    pub fn switch(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.switches.lock().unwrap());
    }
}

fn tag(meta: &Metadata, generation: u64) -> String {
    format!("\"{:x}-{:x}-{:x}-{generation:x}\"", meta.ino(), meta.len(), meta.mtime_nsec())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Takes one from a counter of faults.
fn take(count: &mut u64) -> bool {
    let some = *count > 0;
    *count = count.saturating_sub(1);
    some
}

impl Store {
    fn answer(&self, request: &Request) -> Reply {
        match request.path.as_str() {
            "/_stub/set" => return self.control(request),
            "/_stub/stats" => {
                let bytes = self.object_bytes.load(Ordering::Relaxed);
                return Reply::new(200, json!({"object_bytes": bytes}).to_string());
            }
            _ => {}
        }
        let mut switches = self.switches.lock().unwrap();
        if let Some(reply) = switches.fault() {
            return reply;
        }
        let mut latency = switches.latency;
        if take(&mut switches.slow) {
            latency += switches.slow_by;
        }
        let generation = switches.generation;
        drop(switches);
        let path = unescaped(request.path.trim_matches('/'));
        let mut reply = if path.contains("..") {
            Reply::new(400, "")
        } else if let Some((bucket, key)) = path.split_once('/') {
            self.object(request, &self.root.join(bucket).join(key), generation)
        } else {
            self.list(request, &path, generation)
        };
        reply.faults.delay = latency;
        reply
    }

    fn control(&self, request: &Request) -> Reply {
        let mut switches = self.switches.lock().unwrap();
        for pair in request.query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, "1"));
            if let Err(error) = switches.set(name, &unescaped(value)) {
                return Reply::new(400, error);
            }
        }
        Reply::new(200, "")
    }

    /// A file, open. One that was replaced is opened anew.
    fn file(&self, path: &Path) -> Option<(Arc<File>, Metadata)> {
        let meta = fs::metadata(path).ok().filter(Metadata::is_file)?;
        let mut files = self.files.lock().unwrap();
        if let Some(file) = files.get(path)
            && file.metadata().is_ok_and(|own| own.ino() == meta.ino())
        {
            return Some((Arc::clone(file), meta));
        }
        let file = Arc::new(File::open(path).ok()?);
        files.insert(path.to_owned(), Arc::clone(&file));
        Some((file, meta))
    }

    fn object(&self, request: &Request, path: &Path, generation: u64) -> Reply {
        let Some((file, meta)) = self.file(path) else {
            return Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>");
        };
        let tag = tag(&meta, generation);
        if request.header("if-match").is_some_and(|wanted| wanted.trim_matches('"') != tag.trim_matches('"')) {
            return Reply::new(412, "");
        }
        let mut reply = Reply::file(request, &file)
            .header("ETag", tag)
            .header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
            .header("x-goog-generation", (generation + 1).to_string());
        if request.method == "GET" {
            self.object_bytes.fetch_add(reply.body.len(), Ordering::Relaxed);
        }
        let mut switches = self.switches.lock().unwrap();
        if request.method == "GET" && take(&mut switches.short) {
            reply.faults.cut_after = Some(switches.short_after);
        }
        if request.method == "GET" && take(&mut switches.encoded) {
            reply = reply.header("Content-Encoding", "gzip");
        }
        reply.faults.stall_after = switches.stall_after;
        reply.faults.line.clone_from(&switches.line);
        reply.faults.drip = switches.drip.map(|bytes| (bytes, Duration::from_millis(100)));
        reply
    }

    /// Keys below a prefix with sizes and tags, sorted, beginning after `after`.
    fn keys(&self, bucket: &str, prefix: &str, after: &str, generation: u64) -> Vec<(String, u64, String)> {
        let root = self.root.join(bucket);
        let mut found = Vec::new();
        let mut todo = vec![root.clone()];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    todo.push(path);
                    continue;
                }
                let key = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                if key.starts_with(prefix) && key.as_str() > after {
                    let meta = fs::metadata(&path).unwrap();
                    found.push((key, meta.len(), tag(&meta, generation)));
                }
            }
        }
        found.sort();
        found
    }

    fn list(&self, request: &Request, bucket: &str, generation: u64) -> Reply {
        let prefix = request.parameter("prefix").unwrap_or_default();
        let after = request.parameter("continuation-token").unwrap_or_default();
        let keys = self.keys(bucket, &prefix, &after, generation);
        let more = keys.len() > PAGE;
        let rows = keys.iter().take(PAGE).map(|(key, size, tag)| {
            format!(
                "<Contents><Key>{}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified><ETag>{}</ETag><Size>{size}</Size></Contents>",
                escaped(key),
                escaped(tag)
            )
        });
        let next = keys.get(PAGE - 1).filter(|_| more).map_or_else(String::new, |(key, ..)| {
            format!("<NextContinuationToken>{}</NextContinuationToken>", escaped(key))
        });
        let rows: String = rows.collect();
        Reply::new(
            200,
            format!(
                "<?xml version=\"1.0\"?><ListBucketResult><Name>{bucket}</Name><IsTruncated>{more}</IsTruncated>{next}{rows}</ListBucketResult>"
            ),
        )
        .header("Content-Type", "application/xml")
    }
}
