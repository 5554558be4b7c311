//! One commit of a repository as objects.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    ops::ControlFlow,
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use parking_lot::Mutex;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, RANGE},
};
use tokio::time::timeout_at;

use super::{
    super::{
        super::ByteSpan,
        cache::geometry::place,
        counters::RemoteCounters,
        error::{Failure, RemoteError},
        hedge::Hedging,
        interface::{Content, Objects, RemoteFile, RemoteRepository, Sink},
        reply::{compressed, text_of},
        retry::Deadline,
        runtime,
        shared::SharedCache,
    },
    client::{Hub, next_chunk, of_status},
    refusal::Subject,
};

/// The largest file of which a part is taken out of a whole answer. The Hub serves small files by itself, and may ignore ranges.
const WHOLE_BYTES_MAX: u64 = 16 << 20;

/// Bytes read at once from a blob of the shared cache.
const BLOB_CHUNK: usize = 1 << 20;

/// The address of a file.
#[derive(Clone, Debug)]
struct Location {
    url: Url,
    /// Counts the addresses of the file: the first is 1.
    generation: u64,
}

impl Location {
    /// The address without its query, which may be signed: host and path name the object.
    fn object(&self) -> String {
        format!("{}{}", self.url.host_str().unwrap_or_default(), self.url.path())
    }
}

/// A digest among the Hub's headers: `"abc"`, `W/"abc"` or `abc`.
fn unquoted(etag: &str) -> &str {
    etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"')
}

/// What is known of a file's address.
#[derive(Debug, Default)]
struct Known {
    /// The present address. Held while it is requested, so that one thread asks.
    location: tokio::sync::Mutex<Option<Location>>,
    /// Entity tags by address without query: the first one counts.
    tags: Mutex<HashMap<String, String>>,
}

/// One commit of a repository.
#[derive(Debug)]
pub(super) struct Snapshot {
    hub: Arc<Hub>,
    repo: String,
    commit: String,
    /// The repository in the Hub's shared cache.
    cached: Option<SharedCache>,
    /// Whether complete files are placed there.
    shares: bool,
    files: Mutex<HashMap<String, Arc<Known>>>,
    /// Blobs of the shared cache that do not have the digest of their name.
    distrusted: Mutex<HashSet<String>>,
}

impl Snapshot {
    fn new(hub: Arc<Hub>, repo: String, commit: String, cached: Option<SharedCache>, shares: bool) -> Self {
        Self { hub, repo, commit, cached, shares, files: Mutex::default(), distrusted: Mutex::default() }
    }

    /// Passes a span from a blob of the shared cache, if it is there in the expected size. A blob appears complete, by a rename.
    fn read_blob(&self, file: &RemoteFile, span: ByteSpan, sink: &mut Sink<'_>) -> Option<Result<(), RemoteError>> {
        let (Content::Sha256(digest) | Content::GitBlob(digest)) = &file.content else { return None };
        let distrusted = || self.distrusted.lock();
        let blob = File::open(self.cached.as_ref().filter(|_| !distrusted().contains(digest))?.blob(digest)).ok()?;
        if !blob.metadata().is_ok_and(|found| found.is_file() && found.len() == file.size_bytes) {
            return None;
        }
        let failed = |error| {
            let message = format!("blob {digest} in the Hub's cache of this machine: {error}");
            RemoteError::new(Failure::Transient, self.hub.host(), &self.what_of(file), message)
        };
        Some(span.for_each_piece(&blob, BLOB_CHUNK, sink).map_err(failed))
    }

    fn known(&self, file: &RemoteFile) -> Arc<Known> {
        let mut files = self.files.lock();
        Arc::clone(files.entry(file.key.clone()).or_default())
    }

    /// The name of a file in messages.
    fn what_of(&self, file: &RemoteFile) -> String {
        format!("{}: {}", self.repo, file.path)
    }

    /// Asks the Hub for the address of a file, and checks that it is still the listed one.
    async fn locate(&self, file: &RemoteFile, generation: u64, until: Instant) -> Result<Location, RemoteError> {
        let commit = self.commit.as_str();
        let mut after = vec!["resolve", commit];
        after.extend(file.key.split('/'));
        let url = self.hub.url(&[], &self.repo, &after);
        let found = self.hub.follow(Method::HEAD, &self.repo, Subject::File(&file.path, commit), url, until).await?;
        let changed = |what: &str, expected: &str, found: &str| {
            let failure = Failure::Changed { expected: expected.to_owned(), found: found.to_owned() };
            let message = format!("{what}: expected {expected}, found {found}");
            Err(RemoteError::new(failure, self.hub.host(), &self.what_of(file), message))
        };
        let headers = &found.described;
        if let Some(other) = text_of(headers, "x-repo-commit").filter(|found| *found != commit) {
            return changed("commit", commit, other);
        }
        let size = text_of(headers, "x-linked-size").and_then(|text| text.parse::<u64>().ok());
        if let Some(other) = size.filter(|size| *size != file.size_bytes) {
            return changed("size in bytes", &file.size_bytes.to_string(), &other.to_string());
        }
        let (Content::Sha256(digest) | Content::GitBlob(digest) | Content::Version { version: digest, .. }) =
            &file.content;
        let linked = text_of(headers, "x-linked-etag").map(unquoted);
        // Only the Hub's own tag is a digest. That of an answer without redirect is one unless a proxy made it.
        let own = || text_of(found.answer.headers(), ETAG).map(unquoted);
        let own = own().filter(|tag| !found.leads_out && tag.len() == digest.len());
        if let Some(other) = linked.or(own).filter(|tag| tag != digest) {
            return changed("digest", digest, other);
        }
        Ok(Location { url: found.url, generation })
    }

    /// The address of a file: the known one, unless it is the `refused` one.
    async fn location(
        &self,
        file: &RemoteFile,
        known: &Known,
        refused: Option<u64>,
        until: Instant,
    ) -> Result<Location, RemoteError> {
        let late = |_| {
            let message = "the address of the file did not come in time";
            RemoteError::new(Failure::Transient, self.hub.host(), &self.what_of(file), message)
        };
        let mut location = timeout_at(until.into(), known.location.lock()).await.map_err(late)?;
        if let Some(location) = location.as_ref().filter(|location| Some(location.generation) != refused) {
            return Ok(location.clone());
        }
        RemoteCounters::add(&self.hub.gate.counters.requests, 1);
        let generation = location.as_ref().map_or(1, |location| location.generation + 1);
        let found = self.locate(file, generation, until).await?;
        *location = Some(found.clone());
        Ok(found)
    }

    /// Sends a request, and waits for the first bytes of the answer.
    async fn begin<'a>(&self, file: &'a RemoteFile, span: ByteSpan, until: Instant) -> Result<Reply<'a>, RemoteError> {
        let known = self.known(file);
        let what = self.what_of(file);
        let mut headers = HeaderMap::new();
        let range = HeaderValue::try_from(format!("bytes={}-{}", span.start(), span.end().saturating_sub(1)));
        headers.insert(RANGE, range.expect("digits and a dash"));
        let mut location = self.location(file, &known, None, until).await?;
        let mut renewed = false;
        loop {
            let answer = self.hub.send(Method::GET, &location.url, &headers, &what, until).await?;
            let host = location.url.host_str().unwrap_or_default().to_owned();
            // A signed address that has expired. The content network also refuses valid ones at times.
            let refused = matches!(answer.status().as_u16(), 401 | 403 | 404 | 410) || answer.status().is_redirection();
            if refused && !renewed {
                renewed = true;
                location = self.location(file, &known, Some(location.generation), until).await?;
                continue;
            }
            if refused {
                let message = "a fresh address of the file is refused, too";
                return Err(of_status(&answer, Failure::Refused, &host, &what, message));
            }
            let mut reply = Reply { file, span, host, what, until, answer, first: None, skip: 0 };
            reply.skip = reply.check()?;
            reply.check_tag(&known, &location)?;
            reply.first = next_chunk(&mut reply.answer, &reply.host, &reply.what, until).await?;
            return Ok(reply);
        }
    }
}

impl Hub {
    /// The files of a commit, with their digests, and how to read them. Files that are complete in `cached`, the repository in
    /// the Hub's shared cache, are read from there. If `shares`, files that become complete here are placed there.
    ///
    /// # Errors
    /// As [`Hub::commit`], and files whose names or digests cannot be used.
    pub fn repository(
        self: &Arc<Self>,
        repo: &str,
        commit: &str,
        cached: Option<SharedCache>,
        shares: bool,
        deadline: Deadline,
    ) -> Result<RemoteRepository, RemoteError> {
        let files = self.files(repo, commit, deadline)?;
        let page = self.settings.endpoint.as_str().trim_end_matches('/');
        Ok(RemoteRepository {
            label: format!("{repo}@{}", commit.get(..12).unwrap_or(commit)),
            url: format!("{page}/{repo}/blob/{commit}"),
            revision: Some(commit.to_owned()),
            files,
            objects: Arc::new(Snapshot::new(Arc::clone(self), repo.to_owned(), commit.to_owned(), cached, shares)),
        })
    }
}

/// The answer to a request for a span, of which the first bytes are here.
struct Reply<'a> {
    file: &'a RemoteFile,
    span: ByteSpan,
    host: String,
    what: String,
    until: Instant,
    answer: Response,
    first: Option<Bytes>,
    /// Bytes before the span.
    skip: u64,
}

impl Reply<'_> {
    fn error(&self, failure: Failure, message: &str) -> RemoteError {
        of_status(&self.answer, failure, &self.host, &self.what, message)
    }

    /// Compares the entity tag with the first one of the same address: the content network has one content at an address.
    fn check_tag(&self, known: &Known, location: &Location) -> Result<(), RemoteError> {
        let Some(tag) = text_of(self.answer.headers(), ETAG).map(unquoted) else { return Ok(()) };
        let mut tags = known.tags.lock();
        let first = tags.entry(location.object()).or_insert_with(|| tag.to_owned());
        if first == tag {
            return Ok(());
        }
        let failure = Failure::Changed { expected: first.clone(), found: tag.to_owned() };
        Err(self.error(failure, &format!("entity tag: expected {first}, found {tag}")))
    }

    /// Checks that it has the span. Returns how many bytes come before it.
    fn check(&self) -> Result<u64, RemoteError> {
        let answer = &self.answer;
        let wrong = |failure, message: String| Err(self.error(failure, &message));
        let size_bytes = self.file.size_bytes;
        let other_size = |found: u64| {
            let message = format!("expected {size_bytes} bytes, found {found}");
            let failure = Failure::Changed { expected: format!("{size_bytes} bytes"), found: format!("{found} bytes") };
            wrong(failure, message)
        };
        let compressed = compressed(answer.headers(), &self.host, &self.what);
        if let Some(error) = compressed.filter(|_| answer.status().is_success()) {
            return Err(error);
        }
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => {
                let text = text_of(answer.headers(), CONTENT_RANGE).unwrap_or_default();
                let expected = (self.span.start(), self.span.end().saturating_sub(1));
                match parse_content_range(text) {
                    Some((_, _, size)) if size != size_bytes => other_size(size),
                    Some((first, last, _)) if (first, last) == expected => Ok(0),
                    Some(_) | None => wrong(
                        Failure::Transient,
                        format!("expected bytes {}-{}/{size_bytes}, found {text:?}", expected.0, expected.1),
                    ),
                }
            }
            StatusCode::OK if size_bytes <= WHOLE_BYTES_MAX => match answer.content_length() {
                Some(found) if found != size_bytes => other_size(found),
                Some(_) | None => Ok(self.span.start()),
            },
            StatusCode::OK => wrong(Failure::Unsupported, "the server ignores ranges".to_owned()),
            StatusCode::RANGE_NOT_SATISFIABLE | StatusCode::PRECONDITION_FAILED => {
                let found = format!("status {}", answer.status().as_u16());
                wrong(Failure::Changed { expected: format!("{size_bytes} bytes"), found }, "another version".to_owned())
            }
            _ => wrong(Failure::Transient, "an unexpected answer".to_owned()),
        }
    }

    /// Passes the bytes of the span to `sink`.
    async fn pass(self, sink: &mut Sink<'_>) -> Result<(), RemoteError> {
        let Self { span, host, what, until, mut answer, first: mut next, mut skip, .. } = self;
        let broken = |message| Err(RemoteError::new(Failure::Transient, &host, &what, message));
        let mut left = span.len();
        let is_whole = answer.status() == StatusCode::OK;
        while let Some(chunk) = next {
            let mut bytes: &[u8] = &chunk;
            let skipped = skip.min(bytes.len() as u64);
            skip -= skipped;
            bytes = &bytes[place(skipped)..];
            if bytes.len() as u64 > left {
                if !is_whole {
                    return broken(format!("expected {} bytes, found more", span.len()));
                }
                bytes = &bytes[..place(left)];
            }
            left -= bytes.len() as u64;
            if !bytes.is_empty() && sink(bytes) == ControlFlow::Break(()) {
                return Ok(());
            }
            if left == 0 && is_whole {
                return Ok(());
            }
            next = next_chunk(&mut answer, &host, &what, until).await?;
        }
        if left == 0 {
            return Ok(());
        }
        broken(format!("expected {} bytes, found {}", span.len(), span.len() - left))
    }
}

/// First and last byte and the size of the whole, from `bytes 0-9/100`.
fn parse_content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?, size.trim().parse().ok()?))
}

impl Objects for Snapshot {
    fn host(&self) -> &str {
        self.hub.host()
    }

    fn origin(&self) -> &str {
        self.hub.settings.endpoint.as_str()
    }

    fn distrust(&self, file: &RemoteFile) {
        let (Content::Sha256(digest) | Content::GitBlob(digest)) = &file.content else { return };
        let Some(blob) = self.cached.as_ref().map(|cached| cached.blob(digest)).filter(|blob| blob.exists()) else {
            return;
        };
        if self.distrusted.lock().insert(digest.clone()) {
            let blob = blob.display();
            tracing::error!("{blob}: the bytes came from this blob, which does not have its digest; delete it");
        }
    }

    fn shared(&self) -> Option<&SharedCache> {
        self.cached.as_ref().filter(|_| self.shares)
    }

    fn read(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        until: Instant,
        hedging: &Hedging,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError> {
        if span.is_empty() {
            return Ok(());
        }
        if let Some(read) = self.read_blob(file, span, sink) {
            return read;
        }
        if self.hub.settings.offline {
            return Err(self.hub.is_offline(&self.what_of(file)).of_span(span));
        }
        let read = async { hedging.first_of(|| self.begin(file, span, until)).await?.pass(sink).await };
        // As the other services name it.
        let named = |error: RemoteError| RemoteError { what: file.key.clone(), ..error.of_span(span) };
        runtime::block_on(self.host(), read).flatten().map_err(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_exact() {
        assert_eq!(parse_content_range("bytes 0-9/100"), Some((0, 9, 100)));
        for wrong in ["", "bytes */100", "bytes 0-9/*", "bytes 0-9", "items 0-9/100", "bytes 9/100", "bytes -1-9/100"] {
            assert_eq!(parse_content_range(wrong), None, "{wrong}");
        }
    }
}
