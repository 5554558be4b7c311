//! Sources that fail or give no answer while `ckfs serve` answers: the answer ends before its promised length, in bounded time, other
//! files go on, and the cause is named. And a client of S3 in Rust.
//!
//! The source is a file system of the test's own ([`common::faulty`]). Tests need root and `/dev/fuse`; without them they are
//! skipped, except in continuous integration (`CI=true`), where they fail.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::common::{
    faulty::{Faulty, Manner, Pages, can_mount},
    repo::{row, write_repo},
    source_bytes,
};
use ckfs::tensor::{DType, TensorId};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

const A: &str = "model-00001-of-00003.safetensors";
/// Bytes of a tensor.
const BYTES: usize = 4 << 20;
/// Time limit for anything that should happen soon.
const SOON: Duration = Duration::from_mins(3);

fn write_source(at: &Path) {
    let file = |name| [row(name, DType::BF16, &[1024, 2048])];
    let (a, b, c) = (file("alpha.weight"), file("beta.weight"), file("gamma.weight"));
    write_repo(at, &[&a, &b, &c], &json!({"model_type": "none of those known"}));
}

/// A server. Its drop ends it at once.
struct Server {
    child: Child,
    base: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn new(source: &Path, flags: &[&str]) -> Self {
        let base = tempfile::tempdir().unwrap();
        let log = File::create(base.path().join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.env_remove("CKFS_LOG").args(["serve", "--listen", "0"]).args(flags).arg(source);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut server = Self { child, base };
        let until = Instant::now() + SOON;
        while !server.log().contains("serving") {
            assert!(Instant::now() < until && server.child.try_wait().unwrap().is_none(), "{}", server.log());
            thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(self.base.path().join("log")).unwrap()
    }

    /// The first address after a text of the first line.
    fn address(&self, after: &str) -> String {
        let log = self.log();
        let rest = &log[log.find(after).unwrap_or_else(|| panic!("{log}")) + after.len()..];
        rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.' || *c == ':').collect()
    }

    fn begin(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address("at http://")).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        stream
    }

    fn get(&self, path: &str) -> Answer {
        Answer::read(self.begin(path))
    }
}

/// What a client gets: the status, the promised length, and the bytes that came before the end.
#[derive(Debug)]
struct Answer {
    status: u16,
    promised: usize,
    body: Vec<u8>,
}

impl Answer {
    fn read(mut stream: TcpStream) -> Self {
        let mut received = Vec::new();
        match stream.read_to_end(&mut received) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        let end = received.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&received[..end]).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        Self { status: head[9..12].parse().unwrap(), promised: length, body: received[end + 4..].to_vec() }
    }

    fn is_whole(&self) -> bool {
        self.status == 200 && self.body.len() == self.promised
    }
}

fn expected(tensor: u32) -> Vec<u8> {
    source_bytes(TensorId(tensor), 0..BYTES as u64)
}

#[test]
fn a_source_that_fails_in_mid_answer_ends_it_and_others_go_on() {
    if !can_mount() {
        eprintln!("skipped: no /dev/fuse, or not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write_source(dir.path());
    let source = Faulty::new(dir.path(), Pages::Nobody);
    let server = Server::new(&source.path(), &[]);
    let whole = server.get("/files/full/alpha");
    assert!(whole.is_whole() && whole.body == expected(0), "{} of {}", whole.body.len(), whole.promised);
    for manner in [Manner::Failing, Manner::Short] {
        source.set(A, Manner::Slow(Duration::from_millis(30)));
        let mut stream = server.begin("/files/full/alpha");
        let mut first = vec![0; 100_000];
        stream.read_exact(&mut first).unwrap();
        source.set(A, manner);
        let mut rest = Vec::new();
        let ended = stream.read_to_end(&mut rest);
        assert!(ended.is_ok() || ended.unwrap_err().kind() == io::ErrorKind::ConnectionReset);
        first.extend_from_slice(&rest);
        let start = first.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
        let body = &first[start..];
        assert!(body.len() < BYTES && expected(0).starts_with(body), "{manner:?}: {} bytes", body.len());
        let other = server.get("/files/full/beta");
        assert!(other.is_whole() && other.body == expected(1));
    }
    let ready = server.get("/readyz");
    let text = String::from_utf8(ready.body).unwrap();
    assert!(ready.status == 503 && text.contains("failed read: full/alpha: "), "{text}");
    source.set(A, Manner::Good);
}

#[test]
fn a_source_without_an_answer_ends_its_answers_in_time() {
    if !can_mount() {
        eprintln!("skipped: no /dev/fuse, or not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write_source(dir.path());
    let source = Faulty::new(dir.path(), Pages::Nobody);
    let server = Server::new(&source.path(), &["--source-timeout", "2s", "--threads", "2"]);
    source.set(A, Manner::Stalled);
    // More than there are threads.
    let waiting: Vec<TcpStream> = (0..8).map(|_| server.begin("/files/full/alpha")).collect();
    thread::sleep(Duration::from_millis(200));
    let other = server.get("/files/full/beta");
    assert!(other.is_whole() && other.body == expected(1));
    for stream in waiting {
        let answer = Answer::read(stream);
        assert!(!answer.is_whole(), "{} of {} bytes", answer.body.len(), answer.promised);
    }
    let ready = server.get("/readyz");
    let text = String::from_utf8(ready.body).unwrap();
    assert!(ready.status == 503 && text.contains("source stalled: ") && text.contains(A), "{text}");
    assert_eq!(server.get("/healthz").status, 200);
    source.set(A, Manner::Good);
    let until = Instant::now() + SOON;
    while server.get("/readyz").status != 200 {
        assert!(Instant::now() < until, "it is ready again when the source answers");
        thread::sleep(Duration::from_millis(50));
    }
    let again = server.get("/files/full/alpha");
    assert!(again.is_whole() && again.body == expected(0));
}

#[test]
fn a_log_file_of_the_configuration_is_used() {
    let dir = tempfile::tempdir().unwrap();
    write_source(dir.path());
    let (config, log) = (dir.path().join("config.toml"), dir.path().join("log"));
    fs::write(&config, "[mount]\nlog_file = 'log'\n").unwrap();
    let server = Server::new(dir.path(), &["--config", config.to_str().unwrap()]);
    let process = i32::try_from(server.child.id()).unwrap();
    kill(Pid::from_raw(process), Signal::SIGUSR1).unwrap();
    let until = Instant::now() + SOON;
    while !fs::read_to_string(&log).unwrap().contains("statistics") {
        assert!(Instant::now() < until, "{}", server.log());
        thread::sleep(Duration::from_millis(20));
    }
    assert!(!server.log().contains("statistics"), "{}", server.log());
}

#[cfg(feature = "remote")]
#[test]
fn object_store_lists_and_reads_the_bucket() {
    use futures_util::TryStreamExt;
    use object_store::{GetOptions, ObjectStore, ObjectStoreExt, aws::AmazonS3Builder, path::Path as Key};

    // The client wants one, though it speaks without encryption here.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let dir = tempfile::tempdir().unwrap();
    write_source(dir.path());
    let token = dir.path().join("token");
    fs::write(&token, "s3cret\n").unwrap();
    let server = Server::new(dir.path(), &["--s3", "0", "--token-file", token.to_str().unwrap()]);
    let endpoint = format!("http://{}", server.address("S3 at http://"));
    let store = |secret: &str| {
        let builder = AmazonS3Builder::new().with_bucket_name("ckfs").with_region("us-east-1").with_endpoint(&endpoint);
        builder.with_access_key_id("ckfs").with_secret_access_key(secret).with_allow_http(true).build().unwrap()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let good = store("s3cret");
        let keys: Vec<String> =
            good.list(Some(&Key::from("full"))).map_ok(|found| found.location.to_string()).try_collect().await.unwrap();
        assert_eq!(keys, ["full/alpha", "full/beta", "full/gamma"]);
        for (number, key) in (0..).zip(&keys) {
            let found = good.get(&Key::from(key.as_str())).await.unwrap();
            assert_eq!(found.meta.size, BYTES as u64);
            let tag = found.meta.e_tag.clone().unwrap();
            assert_eq!(found.bytes().await.unwrap(), expected(number));
            let ranges = [0..10, 4096..5000, BYTES as u64 - 3..BYTES as u64];
            let parts = good.get_ranges(&Key::from(key.as_str()), &ranges).await.unwrap();
            for (part, range) in parts.iter().zip(ranges) {
                assert_eq!(part.as_ref(), &expected(number)[range.start as usize..range.end as usize]);
            }
            let options = GetOptions { if_match: Some("\"other\"".to_owned()), ..GetOptions::default() };
            let refused = good.get_opts(&Key::from(key.as_str()), options).await.unwrap_err();
            assert!(matches!(refused, object_store::Error::Precondition { .. }), "{refused}");
            let options = GetOptions { if_match: Some(tag), ..GetOptions::default() };
            good.get_opts(&Key::from(key.as_str()), options).await.unwrap();
        }
        let absent = good.head(&Key::from("full/absent")).await.unwrap_err();
        assert!(matches!(absent, object_store::Error::NotFound { .. }), "{absent}");
        let refused = store("wrong").get(&Key::from("full/alpha")).await.unwrap_err().to_string();
        assert!(refused.contains("SignatureDoesNotMatch"), "{refused}");
    });
}
