//! A directory as buckets of object stores: the part of S3 and of Google's JSON-less interface that reading needs.
//!
//! `GET` and `HEAD /bucket/key` with `Range` and `If-Match`; `GET /bucket?list-type=2` as S3; `GET /storage/v1/b/bucket/o` as
//! Google. Signatures are not checked.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::json;

use super::http::{Reply, Request, Server, unescaped};

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
    /// Requests that are answered with 503.
    pub busy: u64,
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
}

impl StoreStub {
    pub fn start(root: &Path) -> Self {
        Self::start_at(0, root)
    }

    pub fn start_at(port: u16, root: &Path) -> Self {
        let switches: Arc<Mutex<Switches>> = Arc::default();
        let store = Store { root: root.to_owned(), switches: Arc::clone(&switches), files: Mutex::default() };
        let server = Server::start_at(port, Arc::new(move |request: &Request| store.answer(request)));
        Self { server, switches }
    }
}

fn tag(file: &File) -> String {
    let meta = file.metadata().unwrap();
    format!("\"{:x}-{:x}-{:x}\"", meta.ino(), meta.len(), meta.mtime_nsec())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

impl Store {
    fn answer(&self, request: &Request) -> Reply {
        if request.path == "/_stub/set" {
            let number = |name| request.parameter(name).map_or(0, |text| text.parse().unwrap());
            let mut switches = self.switches.lock().unwrap();
            switches.latency = Duration::from_millis(number("latency_ms"));
            (switches.slow, switches.slow_by) = (number("slow"), Duration::from_millis(number("slow_ms")));
            return Reply::new(200, "");
        }
        let mut switches = self.switches.lock().unwrap();
        let mut latency = switches.latency;
        if switches.slow > 0 {
            switches.slow -= 1;
            latency += switches.slow_by;
        }
        if switches.busy > 0 {
            switches.busy -= 1;
            return Reply::new(503, "<Error><Code>SlowDown</Code></Error>");
        }
        drop(switches);
        let path = unescaped(request.path.trim_matches('/'));
        let mut reply = if let Some(rest) = path.strip_prefix("storage/v1/b/") {
            self.list_google(request, rest.trim_end_matches("/o"))
        } else if path.contains("..") {
            Reply::new(400, "")
        } else if let Some((bucket, key)) = path.split_once('/') {
            self.object(request, &self.root.join(bucket).join(key))
        } else {
            self.list_s3(request, &path)
        };
        reply.faults.delay = latency;
        reply
    }

    fn object(&self, request: &Request, path: &Path) -> Reply {
        let mut files = self.files.lock().unwrap();
        let file = match files.get(path) {
            Some(file) => Arc::clone(file),
            None => match File::open(path) {
                Ok(file) if path.is_file() => {
                    let file = Arc::new(file);
                    files.insert(path.to_owned(), Arc::clone(&file));
                    file
                }
                Ok(_) | Err(_) => return Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
            },
        };
        drop(files);
        let tag = tag(&file);
        if request.header("if-match").is_some_and(|wanted| wanted.trim_matches('"') != tag.trim_matches('"')) {
            return Reply::new(412, "");
        }
        Reply::file(request, &file).header("ETag", tag).header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
    }

    /// Keys below a prefix with sizes and tags, sorted, beginning after `after`.
    fn keys(&self, bucket: &str, prefix: &str, after: &str) -> Vec<(String, u64, String)> {
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
                    let file = File::open(&path).unwrap();
                    found.push((key, file.metadata().unwrap().len(), tag(&file)));
                }
            }
        }
        found.sort();
        found
    }

    fn list_s3(&self, request: &Request, bucket: &str) -> Reply {
        let prefix = request.parameter("prefix").unwrap_or_default();
        let after = request.parameter("continuation-token").unwrap_or_default();
        let keys = self.keys(bucket, &prefix, &after);
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

    fn list_google(&self, request: &Request, bucket: &str) -> Reply {
        let prefix = request.parameter("prefix").unwrap_or_default();
        let after = request.parameter("pageToken").unwrap_or_default();
        let keys = self.keys(bucket, &prefix, &after);
        let items: Vec<_> = keys
            .iter()
            .take(PAGE)
            .map(|(key, size, tag)| {
                json!({"name": key, "size": size.to_string(), "etag": tag, "updated": "2026-10-21T07:28:00.000Z", "generation": "1"})
            })
            .collect();
        let mut answer = json!({"kind": "storage#objects", "items": items});
        if keys.len() > PAGE {
            answer["nextPageToken"] = json!(keys[PAGE - 1].0);
        }
        Reply::new(200, answer.to_string()).header("Content-Type", "application/json")
    }
}
