//! The contract of sources: what every one of them does, whatever it reads from.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
};

use ckfs::source::{ByteSpan, FetchPart, FileId, Replied, Served, Source, SourceError};

use super::objects;

/// A span that the test knows to be one.
pub fn span(start: u64, end: u64) -> ByteSpan {
    ByteSpan::new(start, end).unwrap()
}

/// Fetches spans in one call, with a buffer for each.
pub fn fetch(source: &dyn Source, file: FileId, spans: &[ByteSpan]) -> Result<Vec<Vec<u8>>, SourceError> {
    let mut found: Vec<Vec<u8>> = spans.iter().map(|span| vec![7; usize::try_from(span.len()).unwrap()]).collect();
    let parts = spans.iter().zip(&mut found).map(|(span, target)| FetchPart { start: span.start(), target });
    source.fetch(file, &mut parts.collect::<Vec<_>>())?;
    Ok(found)
}

/// The kernel-only buffer of a span, copied by the kernel.
pub fn zero_copy(source: &dyn Source, file: FileId, span: ByteSpan) -> Option<Result<Vec<u8>, SourceError>> {
    let mut found = None;
    let result = source.maps()?.with_kernel_bytes(file, span, &mut |bytes| {
        found = Some(Served::Kernel(bytes).to_vec().unwrap());
        Replied::new()
    })?;
    Some(result.map(|_| found.unwrap()).map_err(|failure| failure.error))
}

/// The contract, for a source of files with these names and bytes, in its order.
pub fn conforms(source: &dyn Source, contents: &[(String, Vec<u8>)]) {
    assert_eq!(source.file_count(), contents.len());
    for (id, (name, bytes)) in (0..).map(FileId).zip(contents) {
        assert!(source.path(id).ends_with(name), "{} ends with {name}", source.path(id).display());
        assert_eq!(source.len_bytes(id), bytes.len() as u64);
        assert!(source.pin(id).modified >= UNIX_EPOCH);
        source.check(id).unwrap();
        source.check_path(id).unwrap();
        inside(source, id, name, bytes);
        outside(source, id, name, bytes.len() as u64);
        if let Some(file) = source.backing(id) {
            let mut first = vec![0; bytes.len().min(9)];
            file.read_exact_at(&mut first, 0).unwrap();
            assert_eq!(first, bytes[..bytes.len().min(9)]);
        }
    }
    nested(source, contents);
    assert_eq!(source.health().poisoned(), 0);
}

/// Spans inside a file have its bytes, however they are read.
fn inside(source: &dyn Source, id: FileId, name: &str, bytes: &[u8]) {
    let len = bytes.len() as u64;
    let good =
        [(0, len), (0, 0), (len, len), (len / 3, len / 2), (len.saturating_sub(1), len)].map(|(s, e)| span(s, e));
    let got = fetch(source, id, &good).unwrap();
    for (span, got) in good.iter().zip(got) {
        let expected = &bytes[usize::try_from(span.start()).unwrap()..usize::try_from(span.end()).unwrap()];
        assert!(got == expected, "{name} {span}");
        let mut target = vec![7; expected.len()];
        source.read_into(id, span.start(), &mut target).unwrap();
        assert!(target == expected, "{name} {span}");
        if let Some(served) = zero_copy(source, id, *span) {
            assert!(served.unwrap() == expected, "{name} {span}");
        }
        let mut seen = None;
        let maps = source.maps().inspect(|maps| {
            maps.will_need(id, *span);
        });
        if let Some(result) = maps.and_then(|maps| maps.with(id, *span, &mut |bytes| seen = Some(bytes.to_vec()))) {
            // A remote source whose cache has no room gives windows all the same, of a buffer.
            assert!(source.maps_of(id).is_some() || source.remote().is_some());
            result.unwrap();
            assert!(seen.as_deref() == Some(expected), "{name} {span}");
        } else {
            assert!(source.maps_of(id).is_none() && seen.is_none());
        }
    }
}

/// Spans that leave a file are refused, and the error names it.
fn outside(source: &dyn Source, id: FileId, name: &str, len: u64) {
    for bad in [span(0, len + 1), span(len + 1, len + 1), span(u64::MAX - 1, u64::MAX), span(len, u64::MAX)] {
        if bad.len() < 1 << 20 {
            let error = fetch(source, id, &[span(0, 0), bad]).unwrap_err();
            assert!(matches!(error, SourceError::Refused { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(name) && text.contains("are outside the file of"), "{text}");
        }
        assert!(zero_copy(source, id, bad).is_none());
        let mut called = false;
        let maps = source.maps();
        if let Some(result) = maps.and_then(|maps| maps.with(id, bad, &mut |_| called = true)) {
            assert!(matches!(result, Err(SourceError::Refused { .. })));
        }
        assert!(!called);
    }
}

/// A window of a file may be read while one of another is open.
fn nested(source: &dyn Source, contents: &[(String, Vec<u8>)]) {
    const LEN: u64 = 97;
    let mut long = (0..).map(FileId).zip(contents).filter(|(_, (_, bytes))| bytes.len() as u64 >= LEN);
    let (Some((a, (_, first))), Some((b, (_, second)))) = (long.next(), long.next()) else { return };
    let Some(maps) = source.maps_of(a) else { return };
    let (start, mut inner) = (second.len() as u64 - LEN, false);
    let outer = maps.with(a, span(0, LEN), &mut |left| {
        assert!(left == &first[..left.len()]);
        let window = maps.with(b, span(start, start + LEN), &mut |right| {
            assert!(right == &second[second.len() - right.len()..]);
            inner = left.len() == right.len();
        });
        window.unwrap().unwrap();
    });
    outer.unwrap().unwrap();
    assert!(inner);
}

/// The files below a directory, by their paths in it.
pub fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.insert(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// The contract, for the repository at an address whose files are those of a directory: cold, from the cache, without room in it,
/// and without a disk. The environment names the service and the credentials.
#[cfg(feature = "remote")]
pub fn address_conforms(address: &str, dir: &Path) {
    use ckfs::source::remote::{RemoteOptions, cache::Cache, open_url};

    const TIMEOUT: Duration = Duration::from_secs(20);
    let files = files_of(dir);
    let open = || match address.strip_prefix("hf://") {
        Some(name) => repository_of_hub(name),
        None => open_url(address, &RemoteOptions::default()).expect("an address").unwrap(),
    };
    let scratch = tempfile::tempdir().unwrap();
    let on_disk = |name: &str, cap| objects::cache(&scratch.path().join(name), cap);
    let caches = [on_disk("a", None), on_disk("a", None), on_disk("b", Some(0)), Cache::in_memory(Arc::default())];
    for cache in caches {
        let repository = open();
        let mut paths: Vec<_> = repository.files.iter().map(|file| file.path.clone()).collect();
        paths.sort();
        assert_eq!(paths, files.keys().cloned().collect::<Vec<_>>());
        let contents: Vec<_> =
            repository.files.iter().map(|file| (file.path.clone(), files[&file.path].clone())).collect();
        conforms(&*objects::source_of(repository, &cache, TIMEOUT), &contents);
    }
}

#[cfg(feature = "remote")]
fn repository_of_hub(name: &str) -> ckfs::source::remote::RemoteRepository {
    use ckfs::source::remote::{
        Backoff, Deadline, RemoteOptions,
        hub::{Hub, HubSettings},
    };

    let settings = HubSettings::from_environment(|name| env::var_os(name).map(PathBuf::from), false).unwrap();
    let gate = Backoff::new("", RemoteOptions::TIMEOUT, &Arc::default(), Arc::default());
    let hub = Arc::new(Hub::new(settings, None, gate).unwrap());
    let soon = Deadline::At(Instant::now() + Duration::from_secs(20));
    let commit = hub.commit(name, "main", soon).unwrap();
    hub.repository(name, &commit, None, false, soon).unwrap()
}
