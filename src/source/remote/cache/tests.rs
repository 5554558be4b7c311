#![expect(clippy::single_range_in_vec_init, reason = "lists of ranges of blocks")]

use std::{
    fs,
    io::Write,
    os::unix::fs::{FileExt, PermissionsExt},
    process::Command,
    sync::Arc,
};

use super::{
    super::{
        RemoteCounters,
        interface::{Content, RemoteFile},
        object::FetchError,
    },
    block_map::BlockMap,
    entry::Eviction,
    geometry::{OBJECT_BYTES_MAX, SEGMENT_BLOCKS, SEGMENT_BYTES},
    *,
};

fn file(key: &str, size_bytes: u64) -> RemoteFile {
    RemoteFile {
        path: key.into(),
        key: key.into(),
        size_bytes,
        content: Content::Version { object: key.into(), version: "1".into() },
        etag: None,
        modified_seconds: None,
    }
}

fn bytes(blocks: u64, seed: u64) -> Vec<u8> {
    (0..blocks * BLOCK_BYTES).map(|place| (place * 31 / 7 + seed).to_le_bytes()[0] | 1).collect()
}

fn open(dir: &std::path::Path, cap: Option<u64>) -> Arc<Cache> {
    Cache::open(dir, cap, Arc::default()).unwrap()
}

fn missing(entry: &Entry, blocks: std::ops::Range<u64>) -> Vec<std::ops::Range<u64>> {
    let _guards = entry.guard(&blocks).unwrap();
    entry.missing(&blocks).unwrap()
}

#[test]
fn stored_blocks_are_found_by_other_processes_and_the_directory_is_private() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (open(dir.path(), None), open(dir.path(), None));
    let object = file("k", 10 * BLOCK_BYTES + 5);
    let (a, b) = (first.entry(&object, "", "s3://b/k").unwrap(), second.entry(&object, "", "s3://b/k").unwrap());
    assert_eq!(missing(&a, 0..11), [0..11]);
    a.store(3, &bytes(2, 0), false).unwrap();
    a.store(10, &[7; 5], false).unwrap();
    assert_eq!(missing(&b, 0..11), [0..3, 5..10]);
    assert_eq!(b.present_bytes().unwrap(), 2 * BLOCK_BYTES + 5);
    assert!(!b.is_whole());
    b.store(0, &bytes(3, 1), true).unwrap();
    b.store(5, &bytes(5, 1), true).unwrap();
    assert!(b.is_whole() && b.keep().unwrap() && !a.is_whole());
    b.note_read(&(0..5));
    let hits = |cache: &Cache| cache.counters().prefetch_hit_bytes.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(hits(&second), 3 * BLOCK_BYTES);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(first.objects().unwrap()), 0o700);
    assert_eq!(mode(a.dir().unwrap()), 0o700);
    assert!(Arc::ptr_eq(&a, &first.entry(&object, "", "").unwrap()));
}

#[test]
fn a_block_with_a_wrong_checksum_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let object = file("k", 4 * BLOCK_BYTES);
    let entry = open(dir.path(), None).entry(&object, "", "k").unwrap();
    entry.store(0, &bytes(4, 0), false).unwrap();
    let path = entry.dir().unwrap().join("data");
    drop(entry);
    fs::File::options().write(true).open(&path).unwrap().write_all_at(b"\0", BLOCK_BYTES + 9).unwrap();
    let cache = open(dir.path(), None);
    let entry = cache.entry(&object, "", "k").unwrap();
    assert_eq!(missing(&entry, 0..4), [1..2]);
    assert_eq!(cache.counters().bad_blocks.load(std::sync::atomic::Ordering::Relaxed), 1);
    entry.store(1, &bytes(1, 3), false).unwrap();
    assert_eq!(missing(&entry, 0..4), []);
}

#[test]
fn guarded_and_foreign_segments_are_not_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (open(dir.path(), None), open(dir.path(), None));
    let object = file("k", 2 * SEGMENT_BYTES);
    let (a, b) = (first.entry(&object, "", "k").unwrap(), second.entry(&object, "", "k").unwrap());
    a.store(0, &bytes(64, 0), false).unwrap();
    a.store(SEGMENT_BLOCKS, &bytes(64, 0), false).unwrap();
    let guards = a.guard(&(0..1)).unwrap();
    assert_eq!(a.evict(0, true).unwrap(), Eviction::Stays, "guarded");
    drop(guards);
    assert_eq!(missing(&b, 0..64), []);
    assert_eq!(a.evict(0, false).unwrap(), Eviction::Stays, "in use by another process");
    assert_eq!(missing(&a, 0..64), [], "and still there");
    b.release_idle(0);
    assert!(matches!(a.evict(0, false).unwrap(), Eviction::Freed(bytes) if bytes >= 64 * BLOCK_BYTES));
    assert_eq!(missing(&a, 0..64), [0..64]);
    assert_eq!(missing(&b, 0..64), [0..64]);
    assert_eq!(missing(&b, SEGMENT_BLOCKS..SEGMENT_BLOCKS + 64), []);
}

#[test]
fn a_segment_that_one_process_gives_up_is_evicted_by_the_other_and_then_serves_both_again() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (open(dir.path(), None), open(dir.path(), None));
    let object = file("k", SEGMENT_BYTES);
    let (a, b) = (first.entry(&object, "", "k").unwrap(), second.entry(&object, "", "k").unwrap());
    a.store(0, &bytes(64, 0), false).unwrap();
    assert_eq!(missing(&b, 0..64), []);
    assert_eq!(a.evict(0, true).unwrap(), Eviction::GivenUp(64 * BLOCK_BYTES));
    assert!(!a.is_verified(&(0..1)) && b.is_verified(&(0..64)));
    // Its readers and writers leave it alone, or the other process would never find it free.
    assert_eq!(a.guard(&(0..1)).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(a.store(0, &bytes(1, 0), false).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(a.evict(0, true).unwrap(), Eviction::Stays, "nothing is left to give up");
    assert!(matches!(b.evict(0, false).unwrap(), Eviction::Freed(_)));
    assert_eq!(missing(&b, 0..64), [0..64]);
    let begun = std::time::Instant::now();
    while a.guard(&(0..1)).is_err() {
        assert!(begun.elapsed() < std::time::Duration::from_mins(1));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(missing(&a, 0..64), [0..64]);
}

#[test]
fn the_bytes_of_an_earlier_run_are_evicted_from_an_entry_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let object = file("k", 4 * SEGMENT_BYTES);
    let entry = open(dir.path(), None).entry(&object, "", "k").unwrap();
    for segment in 0..3 {
        entry.store(segment * SEGMENT_BLOCKS, &bytes(SEGMENT_BLOCKS, segment), false).unwrap();
    }
    drop(entry);
    let cap = 3 * SEGMENT_BYTES + SEGMENT_BYTES / 2;
    let cache = open(dir.path(), Some(cap));
    let entry = cache.entry(&object, "", "k").unwrap();
    assert_eq!(missing(&entry, 0..SEGMENT_BLOCKS), []);
    assert!(cache.space_of(&entry).reserve(SEGMENT_BYTES).is_some(), "there are segments that nobody uses");
    assert!(entry.is_verified(&(0..SEGMENT_BLOCKS)), "what is in use stays");
    assert_eq!(missing(&entry, SEGMENT_BLOCKS..2 * SEGMENT_BLOCKS), [SEGMENT_BLOCKS..2 * SEGMENT_BLOCKS]);
}

#[test]
fn a_bound_by_the_user_leaves_less_of_the_file_system_free() {
    let dir = tempfile::tempdir().unwrap();
    let limit = |cap| open(dir.path(), cap).limit().unwrap();
    assert_eq!(limit(Some(1 << 20)), CacheLimit { used_bytes: 0, limit_bytes: 1 << 20, disk: None });
    let disk = limit(Some(u64::MAX)).disk.unwrap();
    assert_eq!(disk.kept_free_bytes, (disk.total_bytes / 100).min(1 << 30));
    let by_default = limit(None);
    assert!(by_default.limit_bytes <= disk.total_bytes / 2);
    assert!(by_default.disk.is_none_or(|disk| disk.kept_free_bytes == disk.total_bytes / 20));
}

#[test]
fn the_bound_removes_unused_entries_first_and_then_old_segments() {
    let dir = tempfile::tempdir().unwrap();
    let blocks = 512;
    let cap = 4 * blocks * BLOCK_BYTES;
    let fill = |cache: &Cache, key: &str| {
        let entry = cache.entry(&file(key, blocks * BLOCK_BYTES), "", key).unwrap();
        if cache.space_of(&entry).reserve(blocks * BLOCK_BYTES).is_some() {
            entry.store(0, &bytes(blocks, 0), false).unwrap();
        }
        entry
    };
    let old = open(dir.path(), Some(cap));
    for key in ["a", "b", "c"] {
        drop(fill(&old, key));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let cache = open(dir.path(), Some(cap));
    let kept: Vec<_> = ["d", "e", "f", "g"].iter().map(|key| fill(&cache, key)).collect();
    assert!(cache.limit().unwrap().used_bytes <= cap, "{:?}", cache.limit());
    assert!(
        !kept[0]
            .dir()
            .unwrap()
            .parent()
            .unwrap()
            .join(file("a", 0).content.cache_name(blocks * BLOCK_BYTES, ""))
            .exists()
    );
    assert!(kept[3].is_verified(&(0..blocks)), "the newest stays");
    let present: u64 = kept.iter().map(|entry| entry.present_bytes().unwrap()).sum();
    assert!(present >= 2 * blocks * BLOCK_BYTES && present < cap, "{present}");
}

#[test]
fn an_entry_in_use_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (open(dir.path(), None), open(dir.path(), None));
    let entry = first.entry(&file("k", 9), "", "k").unwrap();
    entry.store(0, &[1; 9], false).unwrap();
    let path = entry.dir().unwrap().to_owned();
    assert_eq!(second.remove_unused(&path).unwrap(), None);
    drop(entry);
    assert!(second.remove_unused(&path).unwrap().is_some() && !path.exists());
    let again = first.entry(&file("k", 9), "", "k").unwrap();
    assert_eq!(missing(&again, 0..1), [0..1]);
}

#[test]
fn a_damaged_entry_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), None);
    let object = file("k", 100_000);
    let path = cache.entry(&object, "", "k").unwrap().dir().unwrap().to_owned();
    for damage in ["map", "data", "meta.json"] {
        fs::File::options().write(true).open(path.join(damage)).unwrap().set_len(3).unwrap();
        let entry = cache.entry(&object, "", "k").unwrap();
        assert_eq!((entry.size_bytes, missing(&entry, 0..7)), (100_000, vec![0..7]), "{damage}");
        assert_eq!(fs::metadata(path.join("data")).unwrap().len(), 100_000, "{damage}");
    }
    fs::remove_file(path.join("map")).unwrap();
    cache.entry(&object, "", "k").unwrap();
}

#[test]
fn no_memory_follows_the_length_that_a_service_says() {
    let dir = tempfile::tempdir().unwrap();
    for cache in [open(dir.path(), None), Cache::in_memory(Arc::default())] {
        for size in [OBJECT_BYTES_MAX + 1, 1 << 55, u64::MAX] {
            let error = cache.entry(&file("k", size), "", "k").unwrap_err();
            assert!(error.to_string().contains(&size.to_string()), "{error}");
        }
        let size = OBJECT_BYTES_MAX;
        let entry = cache.entry(&file("k", size), "", "k").unwrap();
        let last = size / BLOCK_BYTES - 1;
        entry.store(last, &bytes(1, 0), false).unwrap();
        assert_eq!(missing(&entry, last - 1..last + 1), [last - 1..last]);
        assert_eq!(entry.absent(&(0..last + 1)).unwrap(), [0..last]);
        assert_eq!(entry.present_bytes().unwrap(), BLOCK_BYTES);
        entry.drop_all().unwrap();
        assert_eq!(entry.present_bytes().unwrap(), 0);
    }
}

#[test]
fn a_comparison_that_ends_after_a_drop_is_not_noted() {
    let dir = tempfile::tempdir().unwrap();
    let open_entry = || open(dir.path(), None).entry(&file("k", BLOCK_BYTES), "", "k").unwrap();
    let (mine, others) = (open_entry(), open_entry());
    mine.store(0, &bytes(1, 0), false).unwrap();
    assert!(mine.note_digest().unwrap() && !others.was_dropped() && others.is_compared());
    others.drop_all().unwrap();
    assert!(!mine.note_digest().unwrap());
    assert!(!open_entry().is_compared());
    // Once it knows of the drop, what it compares is new.
    assert!(mine.was_dropped());
    mine.note_drops();
    mine.store(0, &bytes(1, 0), false).unwrap();
    assert!(mine.note_digest().unwrap() && open_entry().is_compared());
}

#[test]
fn nothing_but_entries_is_evicted_or_listed() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cache = open(dir.path(), Some(0));
    let objects = cache.objects().unwrap().to_owned();
    let entry_name = |digit: &str| format!("v-{}", digit.repeat(64));
    fs::create_dir_all(objects.join("pack")).unwrap();
    fs::write(objects.join("pack/x"), "kept").unwrap();
    // Of the form of the cache's names, but a link, or with other files.
    fs::write(other.path().join("data"), "kept").unwrap();
    std::os::unix::fs::symlink(other.path(), objects.join(entry_name("a"))).unwrap();
    fs::create_dir(objects.join(entry_name("b"))).unwrap();
    fs::write(objects.join(entry_name("b")).join("theirs"), "kept").unwrap();
    let entry = cache.entry(&file("k", 9), "", "k").unwrap();
    let own = entry.dir().unwrap().to_owned();
    drop(entry);
    for path in [objects.join("pack"), objects.join(entry_name("a")), objects.join(entry_name("b"))] {
        assert!(matches!(cache.remove_unused(&path), Ok(None)), "{}", path.display());
    }
    assert!(cache.remove_unused(&own).unwrap().is_some() && !own.exists());
    assert_eq!(cache.list().unwrap(), [objects.join(entry_name("b"))]);
    for kept in [objects.join("pack/x"), other.path().join("data"), objects.join(entry_name("b")).join("theirs")] {
        assert_eq!(fs::read_to_string(kept).unwrap(), "kept");
    }
}

#[test]
fn memory_serves_where_there_is_no_directory() {
    let cache = Cache::in_memory(Arc::new(RemoteCounters::default()));
    let entry = cache.entry(&file("k", 1 << 40), "", "k").unwrap();
    assert!(cache.space_of(&entry).reserve(100 << 20).is_some());
    entry.store(5, &bytes(2, 0), false).unwrap();
    assert_eq!(missing(&entry, 4..8), [4..5, 7..8]);
    assert!(cache.space_of(&entry).reserve(300 << 20).is_none(), "beyond the bound");
    assert!(cache.space_of(&entry).is_full());
}

#[test]
fn memory_serves_where_the_disk_has_no_place_for_an_entry() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Some(0));
    let object = file("k", 100_000);
    // As a full disk does, this keeps the directory of the entry from being made.
    fs::write(cache.objects().unwrap().join(object.content.cache_name(object.size_bytes, "")), "").unwrap();
    let entry = cache.entry(&object, "", "k").unwrap();
    assert_eq!(entry.dir(), None);
    assert!(cache.space_of(&entry).reserve(2 * BLOCK_BYTES).is_some(), "the bound of the disk is not that of memory");
    entry.store(0, &bytes(2, 0), false).unwrap();
    assert_eq!(missing(&entry, 0..3), [2..3]);
    let other = cache.entry(&file("l", 9), "", "l").unwrap();
    assert!(other.dir().is_some() && cache.space_of(&other).reserve(1).is_none());
}

#[test]
fn a_claim_ends_with_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), None);
    let entry = cache.entry(&file("k", 100 * BLOCK_BYTES), "", "k").unwrap();
    let map = entry.dir().unwrap().join("map");
    // Another process takes the lock of all fetches, tells so, and waits to be killed.
    let script = "import fcntl,struct,sys,time\n\
                  f=open(sys.argv[1],'r+b')\n\
                  fcntl.fcntl(f,37,struct.pack('hhqqi4x',1,0,1<<40,1<<20,0))\n\
                  print('ok',flush=True)\ntime.sleep(60)\n";
    let child = Command::new("python3")
        .args(["-c", script])
        .arg(&map)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn();
    let Ok(mut child) = child else { return };
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    std::io::stdout().flush().unwrap();
    assert!(!entry.claim(&(0..5), true).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(entry.claim(&(0..5), true).unwrap());
}

/// Counts warnings.
#[derive(Default)]
struct Told(std::sync::atomic::AtomicUsize);

impl tracing::Subscriber for Told {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn an_entry_that_cannot_be_guarded_is_told_once_for_each_kind_of_failure() {
    let dir = tempfile::tempdir().unwrap();
    // A descriptor for writing alone gets no shared lock.
    let map = BlockMap::create(fs::File::create(dir.path().join("map")).unwrap(), BLOCK_BYTES).unwrap();
    let entry = open(dir.path(), None).entry(&file("k", BLOCK_BYTES), "", "k").unwrap();
    let data = entry.data.try_clone().unwrap();
    let entry = Entry::new("v-1", None, data, map, entry.meta(), Arc::default());
    let told = Arc::new(Told::default());
    tracing::subscriber::with_default(Arc::clone(&told), || {
        for _ in 0..3 {
            let error = FetchError::of_cache(&entry, entry.guard(&(0..1)).unwrap_err());
            assert!(matches!(error, FetchError::Cache(_)), "{error}");
        }
        let left = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        assert!(matches!(FetchError::of_cache(&entry, left), FetchError::NoRoom));
    });
    assert_eq!(told.0.load(std::sync::atomic::Ordering::Relaxed), 1);
    // Another failure is told too.
    tracing::subscriber::with_default(Arc::clone(&told), || {
        (0..2).for_each(|_| drop(FetchError::of_cache(&entry, std::io::ErrorKind::NotFound.into())));
    });
    assert_eq!(told.0.load(std::sync::atomic::Ordering::Relaxed), 2);
}
