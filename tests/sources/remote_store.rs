//! Directories of a web server through the disk cache: what is fetched when a repository is opened, and what is there without a
//! network.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use crate::stub::store::StoreStub;
use ckfs::source::{
    ByteSpan, SourceError,
    remote::{
        RemoteError, RemoteOptions, RemoteRepository, RemoteTree,
        cache::{BLOCK_BYTES, Cache},
        open_url,
    },
};
use serde_json::json;
use tempfile::TempDir;

const FILES: usize = 3;
/// Bytes of tensors of each file.
const DATA_BYTES: u64 = 4 << 20;

struct Rig {
    stub: StoreStub,
    dir: TempDir,
    options: RemoteOptions,
}

/// Writes a safetensors file whose header is at least this long. Returns the header's end.
fn write_file(path: &Path, header_bytes: usize) -> u64 {
    let rows = header_bytes / 60 + 1;
    let mut header = serde_json::Map::new();
    header.insert("weight".into(), json!({"dtype": "U8", "shape": [DATA_BYTES], "data_offsets": [0, DATA_BYTES]}));
    for row in 0..rows {
        header.insert(
            format!("empty{row:09}"),
            json!({"dtype": "U8", "shape": [0], "data_offsets": [DATA_BYTES, DATA_BYTES]}),
        );
    }
    let text = serde_json::to_vec(&header).unwrap();
    assert!(text.len() >= header_bytes);
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    let end = bytes.len() as u64;
    bytes.extend((0..DATA_BYTES).map(|place| u8::try_from(place * place % 251).unwrap()));
    fs::write(path, bytes).unwrap();
    end
}

impl Rig {
    /// A repository of files with headers of this length. Returns their ends, too.
    fn new(header_bytes: usize) -> (Self, Vec<u64>) {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("root/models/name");
        fs::create_dir_all(&model).unwrap();
        fs::write(model.join("config.json"), "{}").unwrap();
        let name = |file: usize| format!("model-{file}.safetensors");
        let ends = (0..FILES).map(|file| write_file(&model.join(name(file)), header_bytes)).collect();
        let map: serde_json::Map<_, _> = (0..FILES).map(|file| (format!("t{file}"), json!(name(file)))).collect();
        fs::write(model.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
        let stub = StoreStub::start(&dir.path().join("root"));
        let options = RemoteOptions {
            cache_dir: Some(dir.path().join("cache")),
            timeout: Duration::from_secs(20),
            // Without a bound the cache would keep nothing on a disk that is nearly full.
            cache_disk_bytes: Some(64 << 30),
            ..RemoteOptions::default()
        };
        (Self { stub, dir, options }, ends)
    }

    fn url(&self) -> String {
        format!("{}/models/name", self.stub.server.url())
    }

    fn open(&self, url: &str, offline: bool) -> Result<RemoteRepository, RemoteError> {
        open_url(url, &RemoteOptions { offline, ..self.options.clone() }).unwrap()
    }

    fn tree(&self, repository: RemoteRepository) -> Result<RemoteTree, SourceError> {
        let cache = Cache::open(&self.dir.path().join("cache"), self.options.cache_disk_bytes, Arc::default()).unwrap();
        RemoteTree::open(repository, &cache, &self.options)
    }

    fn requests(&self) -> u64 {
        self.stub.server.record.count.load(Ordering::Relaxed)
    }
}

fn place(tree: &RemoteTree, path: &str) -> usize {
    tree.repository().files.iter().position(|file| file.path == path).unwrap()
}

#[test]
fn headers_are_complete_when_a_repository_is_open_however_long_they_are() {
    for header_bytes in [1000, 500_000] {
        let (rig, ends) = Rig::new(header_bytes);
        let repository = rig.open(&rig.url(), false).unwrap();
        let listed = rig.requests();
        let tree = rig.tree(repository).unwrap();
        for (file, end) in ends.iter().enumerate() {
            let remote = tree.remote(place(&tree, &format!("model-{file}.safetensors"))).unwrap();
            let blocks = 0..end.div_ceil(BLOCK_BYTES);
            assert!(remote.object.entry.absent(&blocks).unwrap().is_empty(), "{header_bytes}, file {file}");
        }
        // The configuration, the index, and one request or two for each file.
        let expected = 2 + FILES as u64 * if header_bytes > 100_000 { 2 } else { 1 };
        assert_eq!(rig.requests() - listed, expected, "{header_bytes}");
    }
}

#[test]
fn a_reply_to_a_listing_that_breaks_off_is_asked_for_again() {
    let (rig, _) = Rig::new(1000);
    for source in [rig.url(), format!("{}/model-0.safetensors", rig.url())] {
        rig.stub.switch(|switches| (switches.short, switches.short_after) = (1, 100));
        let repository = rig.open(&source, false).unwrap();
        assert!(repository.files.iter().any(|file| file.size_bytes > DATA_BYTES));
    }
    for status in [500, 503] {
        rig.stub.switch(|switches| (switches.busy, switches.busy_status) = (2, Some(status)));
        assert_eq!(rig.open(&rig.url(), false).unwrap().files.len(), FILES + 2);
    }
}

#[test]
fn a_server_that_sends_few_bytes_each_time_is_given_up() {
    let (rig, _) = Rig::new(50_000);
    let repository = rig.open(&format!("{}/model-0.safetensors", rig.url()), false).unwrap();
    let before = rig.requests();
    rig.stub.switch(|switches| (switches.short, switches.short_after) = (1000, 100));
    let error = rig.tree(repository).err().unwrap().to_string();
    assert!(error.contains("model-0.safetensors") && error.contains("the reply broke off"), "{error}");
    assert!((8..20).contains(&(rig.requests() - before)), "{}", rig.requests() - before);
}

#[test]
fn names_in_an_index_are_asked_for_as_they_are() {
    let (rig, _) = Rig::new(1000);
    let model = rig.dir.path().join("root/models/name");
    let names = ["50%.safetensors", "a%20b.safetensors", "a b+c~ü#.safetensors", "d/[e].safetensors"];
    fs::create_dir(model.join("d")).unwrap();
    let map: serde_json::Map<_, _> = names.iter().map(|name| ((*name).to_owned(), json!(name))).collect();
    fs::write(model.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    for name in names {
        fs::copy(model.join("model-0.safetensors"), model.join(name)).unwrap();
    }
    let tree = rig.tree(rig.open(&rig.url(), false).unwrap()).unwrap();
    for name in names {
        let mut target = [0; 8];
        tree.remote(place(&tree, name)).unwrap().read_span(ByteSpan::new(0, 8).unwrap(), &mut target).unwrap();
        assert_eq!(target, fs::read(model.join(name)).unwrap()[..8], "{name}");
    }
}

#[test]
fn compressed_replies_are_refused() {
    let (rig, _) = Rig::new(1000);
    let repository = rig.open(&rig.url(), false).unwrap();
    rig.stub.switch(|switches| switches.encoded = 1000);
    let error = rig.tree(repository).err().unwrap().to_string();
    assert!(error.contains("Content-Encoding: gzip") && error.contains("own bytes"), "{error}");
}

#[test]
fn a_header_that_claims_too_much_is_left_to_the_parser() {
    for claimed in [u64::MAX, 99_000_000, 200_000_000, 0] {
        let (rig, _) = Rig::new(1000);
        let path = rig.dir.path().join("root/models/name/model-1.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let repository = rig.open(&rig.url(), false).unwrap();
        let listed = rig.requests();
        rig.tree(repository).unwrap();
        assert_eq!(rig.requests() - listed, 2 + FILES as u64, "{claimed}");
    }
}

#[test]
fn what_was_pinned_and_fetched_is_there_without_a_network() {
    let (rig, _) = Rig::new(1000);
    let url = rig.url();
    let error = rig.open(&url, true).err().unwrap().to_string();
    assert!(error.contains("--offline") && error.contains("ckfs fetch"), "{error}");
    let online = rig.open(&url, false).unwrap();
    let files = online.files.clone();
    let (weights, data) =
        ("model-2.safetensors", fs::read(rig.dir.path().join("root/models/name/model-2.safetensors")).unwrap());
    let (present, absent) =
        (ByteSpan::new(2_000_000, 2_100_000).unwrap(), ByteSpan::new(3_000_000, 3_100_000).unwrap());
    let read = |tree: &RemoteTree, span: ByteSpan| {
        let mut bytes = vec![0; usize::try_from(span.len()).unwrap()];
        tree.remote(place(tree, weights)).unwrap().read_span(span, &mut bytes)?;
        let start = usize::try_from(span.start()).unwrap();
        assert!(bytes == data[start..start + bytes.len()]);
        Ok::<_, std::io::Error>(())
    };
    read(&rig.tree(online).unwrap(), present).unwrap();

    let asked = rig.requests();
    let offline = rig.open(&format!("{url}/"), true).unwrap();
    assert_eq!(offline.files, files);
    let tree = rig.tree(offline).unwrap();
    read(&tree, present).unwrap();
    let error = read(&tree, absent).unwrap_err().to_string();
    assert!(error.contains(weights) && error.contains("--offline"), "{error}");
    let error = rig.open(&format!("{url}r"), true).err().unwrap().to_string();
    assert!(error.contains("namer") && error.contains("--offline"), "{error}");
    assert_eq!(rig.requests(), asked, "no request in all of this");
}

#[test]
fn the_listing_of_the_last_run_with_a_network_counts() {
    let (rig, _) = Rig::new(1000);
    let first = rig.open(&rig.url(), false).unwrap();
    fs::write(rig.dir.path().join("root/models/name/tokenizer.json"), "{}").unwrap();
    let second = rig.open(&rig.url(), false).unwrap();
    assert_eq!(second.files.len(), first.files.len() + 1);
    assert_eq!(rig.open(&rig.url(), true).unwrap().files, second.files);
}
