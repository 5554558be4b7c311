//! Reads and lists objects of a store.

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use ckfs_sync::Helpers;
use futures_util::{StreamExt, stream::BoxStream};
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore,
    list::{PaginatedListOptions, PaginatedListResult, PaginatedListStore},
    path::Path,
};
use parking_lot::Mutex;

use super::{
    super::{
        super::ByteSpan,
        error::{Failure, RemoteError, of_causes},
        hedge::Hedging,
        interface::{Content, Objects, RemoteFile, Sink},
        listing::{Gathered, passed_text},
        retry::{Backoff, Deadline, retry},
        runtime::{READ_TIMEOUT, block_on},
    },
    client::{RefusedRedirect, cause},
    observe::{Credentials, Observer},
    page::PageFilter,
};

/// Time between two lines about a listing that takes long.
const TOLD_PERIOD: Duration = Duration::from_secs(2);

type Body = BoxStream<'static, object_store::Result<Bytes>>;

/// A store, with the prefix of its objects' names in messages.
pub(super) struct Store {
    pub(super) inner: Arc<dyn ObjectStore>,
    /// Host, for messages.
    pub(super) host: String,
    /// Behind this it is asked for listings.
    pub(super) gate: Backoff,
    /// Whether it must not be asked for anything.
    pub(super) is_offline: bool,
    /// Names the store: `s3://bucket`, `https://host`.
    pub(super) address: String,
    /// Lists it, where the service lists.
    pub(super) pages: Option<Arc<dyn PaginatedListStore>>,
    /// What became of requests for credentials.
    pub(super) credentials: Credentials,
    /// What to do if the store refuses.
    pub(super) advice: &'static str,
    /// Where credentials were looked for.
    pub(super) looked_for: &'static str,
}

impl Store {
    /// The result of one request of a listing, with all of its repetitions.
    fn again<T>(&self, attempt: impl FnMut(Instant) -> Result<T, RemoteError>) -> Result<T, RemoteError> {
        retry(&self.gate, Deadline::Quiet, attempt, || false)
    }

    /// The objects below a prefix, each with its path relative to it. Those whose keys name no file are passed over.
    ///
    /// # Errors
    /// The store does not list.
    pub(super) fn list(&self, prefix: &Path) -> Result<Vec<RemoteFile>, RemoteError> {
        let what = format!("{}/{prefix}", self.address);
        let below = if prefix.as_ref().is_empty() { String::new() } else { format!("{prefix}/") };
        let filter = PageFilter::new(&below);
        let unusable = |message: String| RemoteError::new(Failure::Unsupported, &self.host, &what, message);
        let mut listing = Gathered::default();
        let (mut token, mut told) = (None, Instant::now());
        loop {
            let page = self.again(|until| {
                filter.take();
                self.page(&below, &filter, token.clone(), until)
            })?;
            let mut files = Vec::with_capacity(page.result.objects.len());
            for meta in &page.result.objects {
                let key = meta.location.as_ref();
                let path = key.strip_prefix(&below).unwrap_or(key).to_owned();
                files.push(self.file(meta, path)?);
            }
            listing.add(files, filter.take(), 0).map_err(unusable)?;
            if told.elapsed() >= TOLD_PERIOD {
                told = Instant::now();
                tracing::warn!("{what}: being listed, {}", listing.so_far());
            }
            match page.page_token {
                None => break,
                Some(next) if token.as_ref() == Some(&next) => {
                    return Err(unusable("the service lists the same page again and again".to_owned()));
                }
                Some(next) => token = Some(next),
            }
        }
        let (files, passed) = listing.finish();
        if let Some(text) = passed_text(&passed) {
            tracing::warn!("{what}: {text}");
        }
        Ok(files)
    }

    /// One page of a listing.
    fn page(
        &self,
        below: &str,
        filter: &PageFilter,
        token: Option<String>,
        until: Instant,
    ) -> Result<PaginatedListResult, RemoteError> {
        let observer = Observer::default();
        let what = format!("{}/{below}", self.address);
        let Some(pages) = &self.pages else {
            return Err(RemoteError::new(Failure::Unsupported, &self.host, &what, "this service does not list"));
        };
        let mut options = PaginatedListOptions { page_token: token, ..PaginatedListOptions::default() };
        options.extensions.insert(observer.clone());
        options.extensions.insert(filter.clone());
        let listed = pages.list_paginated(Some(below).filter(|below| !below.is_empty()), options);
        self.until(until, below, async { listed.await.map_err(|error| self.error(&error, &observer, &what, false)) })
    }

    /// One object.
    ///
    /// # Errors
    /// It is not there or cannot be read.
    pub(super) fn head(&self, key: &Path, path: &str) -> Result<RemoteFile, RemoteError> {
        let meta = self.again(|until| self.until(until, key.as_ref(), self.meta(key)))?;
        self.file(&meta, path.to_owned())
    }

    /// What a store says of an object.
    async fn meta(&self, key: &Path) -> Result<ObjectMeta, RemoteError> {
        let observer = Observer::default();
        let mut options = GetOptions { head: true, ..GetOptions::default() };
        options.extensions.insert(observer.clone());
        let got = self.inner.get_opts(key, options).await;
        let what = format!("{}/{key}", self.address);
        got.map(|got| got.meta).map_err(|error| self.error(&error, &observer, &what, false))
    }

    /// Several objects, some at a time, without those that are not there.
    ///
    /// # Errors
    /// The first that cannot be read.
    pub(super) fn heads(&self, keys: &[(Path, String)]) -> Result<Vec<RemoteFile>, RemoteError> {
        /// Requests at a time.
        const AT_A_TIME: usize = 32;
        static LISTING: Helpers = Helpers::new("ckfs-list", || AT_A_TIME);
        let found = Mutex::new(Vec::new());
        LISTING.each(AT_A_TIME, keys.iter().collect(), |(key, path)| {
            match self.head(key, path) {
                Ok(file) => found.lock().push(file),
                Err(error) if error.failure == Failure::NotFound => {}
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        let mut files = found.into_inner();
        files.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(files)
    }

    /// All bytes of a small object.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn get(&self, key: &Path) -> Result<Vec<u8>, RemoteError> {
        let what = format!("{}/{key}", self.address);
        let whole = async || {
            let observer = Observer::default();
            let mut options = GetOptions::default();
            options.extensions.insert(observer.clone());
            let bytes = async { self.inner.get_opts(key, options).await?.bytes().await }.await;
            bytes.map_err(|error| self.error(&error, &observer, &what, false))
        };
        Ok(self.again(|until| self.until(until, key.as_ref(), whole()))?.to_vec())
    }

    /// Runs a request, which fails at `until`.
    fn until<T>(
        &self,
        until: Instant,
        what: &str,
        request: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        block_on(&self.host, async {
            tokio::time::timeout_at(until.into(), request).await.unwrap_or_else(|_| {
                let what = format!("{}/{what}", self.address);
                Err(RemoteError::new(Failure::Transient, &self.host, &what, "no answer in time"))
            })
        })?
    }

    fn file(&self, meta: &ObjectMeta, path: String) -> Result<RemoteFile, RemoteError> {
        let key = meta.location.to_string();
        let etag = meta.e_tag.as_deref().map(etag_of);
        let modified = u64::try_from(meta.last_modified.timestamp()).ok().filter(|seconds| *seconds > 0);
        let version = match (&etag, &meta.version, modified) {
            (Some(etag), version, _) => format!("etag {etag} {}", version.as_deref().unwrap_or_default()),
            (None, Some(version), _) => format!("version {version}"),
            (None, None, Some(modified)) => format!("modified {modified}"),
            (None, None, None) => {
                let message = "the server gives neither ETag nor Last-Modified, so that a change could not be noticed";
                let what = format!("{}/{key}", self.address);
                return Err(RemoteError::new(Failure::Unsupported, &self.host, &what, message));
            }
        };
        let content = Content::Version { object: format!("{}/{key}", self.address), version };
        Ok(RemoteFile { path, key, size_bytes: meta.size, content, etag, modified_seconds: modified })
    }

    /// The error of a call, in words that hold no address: it may be signed.
    fn error(&self, error: &object_store::Error, observer: &Observer, what: &str, is_part: bool) -> RemoteError {
        use object_store::Error;
        let seen = observer.seen();
        let advice = self.advice;
        let (failure, message) = match (error, seen.status) {
            (Error::NotFound { .. }, _) | (_, Some(404)) => (Failure::NotFound, "no such object".to_owned()),
            (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }, _) | (_, Some(401 | 403)) => {
                (Failure::Refused, format!("the service refuses: {advice}"))
            }
            (Error::Precondition { .. }, _) | (_, Some(412)) => {
                let found = "another one (the service refuses If-Match)".to_owned();
                (Failure::Changed { expected: String::new(), found }, "the object has changed".to_owned())
            }
            (_, Some(429 | 503)) => (Failure::Busy(seen.retry_after), "the service asks for a pause".to_owned()),
            (_, Some(200)) if is_part => (
                Failure::Unsupported,
                "asked for a part of an object, the server replied with all of it: it does not support ranges"
                    .to_owned(),
            ),
            (_, Some(206)) => (Failure::Transient, format!("not the requested bytes: {}", cause(error))),
            (_, Some(200..=299)) => (Failure::Transient, format!("the reply broke off: {}", cause(error))),
            (_, Some(408 | 500..)) => (Failure::Transient, "the service failed".to_owned()),
            (_, Some(300..=399)) => (Failure::Refused, format!("the service redirects without an address: {advice}")),
            (_, Some(status)) => (Failure::Refused, format!("the service refuses with status {status}: {advice}")),
            (_, None) => self.unanswered(error),
        };
        let (status, request_id) = (seen.status, seen.request_id);
        RemoteError { status, request_id, ..RemoteError::new(failure, &self.host, what, message) }
    }

    /// The kind and the message of an error of a call that the store did not answer.
    fn unanswered(&self, error: &object_store::Error) -> (Failure, String) {
        if let Some(refused) = RefusedRedirect::among(error) {
            return (Failure::Refused, refused.to_string());
        }
        if let Some((found, given_before)) = self.credentials.failure() {
            let message = format!("no credentials: looked for {}: {found}; {}", self.looked_for, self.advice);
            // A service that gave some before may do so again.
            return (if given_before { Failure::Transient } else { Failure::Refused }, message);
        }
        of_causes(cause(error))
    }

    /// Sends a request, and waits for the first bytes of the answer: these and the rest.
    async fn begin(&self, file: &RemoteFile, span: ByteSpan) -> Result<(Observer, Option<Bytes>, Body), RemoteError> {
        let observer = Observer::default();
        let failed = |error: &object_store::Error| self.error(error, &observer, &file.key, true).of_span(span);
        let range = Some(GetRange::Bounded(span.start()..span.end()));
        let mut options = GetOptions { range, ..GetOptions::default() };
        // A weak tag never matches. It is compared below.
        let strong = file.etag.as_deref().filter(|etag| !etag.starts_with("W/"));
        options.if_match = strong.map(|etag| format!("\"{etag}\""));
        options.extensions.insert(observer.clone());
        let got = self.inner.get_opts(&path_of(&file.key), options).await;
        let got = got.map_err(|error| match failed(&error) {
            RemoteError { failure: Failure::Changed { found, .. }, .. } => self.changed(file, found, &observer),
            other => other,
        })?;
        if let Some(error) = observer.seen().compressed {
            let (host, what) = (self.host.clone(), file.key.clone());
            return Err(RemoteError { host, what, ..error }.of_span(span));
        }
        let etag = got.meta.e_tag.as_deref().map(etag_of);
        let modified = u64::try_from(got.meta.last_modified.timestamp()).ok();
        let same = match &file.etag {
            Some(_) => etag == file.etag,
            None => file.modified_seconds.is_none() || modified == file.modified_seconds,
        };
        if got.meta.size != file.size_bytes || !same {
            let found = format!("{} of {} bytes", etag.as_deref().unwrap_or("an object"), got.meta.size);
            return Err(self.changed(file, found, &observer));
        }
        let mut body = got.into_stream();
        let first = self.next(&mut body, file, span, &observer).await?;
        Ok((observer, first, body))
    }

    /// The next bytes of an answer; `None` at its end.
    async fn next(
        &self,
        body: &mut Body,
        file: &RemoteFile,
        span: ByteSpan,
        observer: &Observer,
    ) -> Result<Option<Bytes>, RemoteError> {
        let next = tokio::time::timeout(READ_TIMEOUT, body.next()).await.map_err(|_| {
            let message = format!("no byte came for {} s", READ_TIMEOUT.as_secs());
            RemoteError::new(Failure::Transient, &self.host, &file.key, message).of_span(span)
        })?;
        next.transpose().map_err(|error| {
            let broken = format!("the reply broke off: {}", cause(&error));
            let error = self.error(&error, observer, &file.key, true).of_span(span);
            RemoteError { failure: Failure::Transient, message: broken, ..error }
        })
    }

    async fn stream(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        hedging: &Hedging,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError> {
        let (observer, mut next, mut body) = hedging.first_of(|| self.begin(file, span)).await?;
        while let Some(bytes) = next {
            if let ControlFlow::Break(()) = sink(&bytes) {
                return Ok(());
            }
            next = self.next(&mut body, file, span, &observer).await?;
        }
        Ok(())
    }

    /// The error of something that only the network has.
    pub(super) fn not_asked(&self, what: &str) -> RemoteError {
        let message = "not in the disk cache, and --offline forbids to ask the store; `ckfs fetch` brings it where the \
                       network may be used";
        RemoteError::new(Failure::Unsupported, &self.host, what, message)
    }

    fn changed(&self, file: &RemoteFile, found: String, observer: &Observer) -> RemoteError {
        let expected = file.etag.clone().unwrap_or_else(|| "the listed one".to_owned());
        let expected = format!("{expected} of {} bytes", file.size_bytes);
        let message = format!("the object has changed: expected version {expected}, found {found}");
        let seen = observer.seen();
        RemoteError {
            status: seen.status,
            request_id: seen.request_id,
            ..RemoteError::new(Failure::Changed { expected, found }, &self.host, &file.key, message)
        }
    }
}

impl Objects for Store {
    fn host(&self) -> &str {
        &self.host
    }

    fn read(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        until: Instant,
        hedging: &Hedging,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError> {
        if self.is_offline {
            return if span.is_empty() { Ok(()) } else { Err(self.not_asked(&file.key).of_span(span)) };
        }
        block_on(&self.host, async {
            tokio::time::timeout_at(until.into(), self.stream(file, span, hedging, sink)).await.unwrap_or_else(|_| {
                let message = "no answer in time";
                Err(RemoteError::new(Failure::Transient, &self.host, &file.key, message).of_span(span))
            })
        })?
    }
}

/// An entity tag without its quotes; a weak one keeps its mark.
fn etag_of(text: &str) -> String {
    match text.strip_prefix("W/") {
        Some(weak) => format!("W/{}", weak.trim_matches('"')),
        None => text.trim_matches('"').to_owned(),
    }
}

/// A key as a path: as the listing has it.
pub(super) fn path_of(key: &str) -> Path {
    Path::parse(key).unwrap_or_else(|_| Path::from(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_lose_their_quotes_and_weak_ones_keep_their_mark() {
        assert_eq!([etag_of("\"a\""), etag_of("W/\"a\""), etag_of("a")], ["a", "W/a", "a"]);
    }
}
