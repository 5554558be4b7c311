//! Reads and lists objects of a store.

use std::{ops::ControlFlow, sync::Arc, time::Instant};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream::BoxStream};
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, path::Path};

use super::{
    super::{
        super::ByteSpan,
        error::{Failure, RemoteError, of_certificate},
        hedge::Hedging,
        interface::{Content, Objects, RemoteFile, Sink},
        runtime::{READ_TIMEOUT, block_on},
    },
    observe::Observer,
};

/// Most objects below a prefix.
const OBJECTS_MAX: usize = 100_000;

type Body = BoxStream<'static, object_store::Result<Bytes>>;

/// An answer of which the first bytes are here.
struct Begun {
    observer: Observer,
    first: Option<Bytes>,
    body: Body,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// A listing, what the store says of an object, or all of it.
    Whole,
    /// A part of an object.
    Part,
}

/// A store, with the prefix of its objects' names in messages.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) inner: Arc<dyn ObjectStore>,
    /// Host, for messages.
    pub(super) host: String,
    /// Names the store: `s3://bucket`, `https://host`.
    pub(super) address: String,
    /// What replies to calls without an observer said.
    pub(super) last: Observer,
    /// What to do if the store refuses.
    pub(super) advice: &'static str,
}

impl Store {
    /// The objects below a prefix, each with its path relative to it.
    ///
    /// # Errors
    /// The store does not list.
    pub(super) fn list(&self, prefix: &Path) -> Result<Vec<RemoteFile>, RemoteError> {
        self.last.forget();
        let listed = self.run(async {
            self.inner.list(Some(prefix)).take(OBJECTS_MAX + 1).try_collect::<Vec<ObjectMeta>>().await
        })?;
        let what = format!("{}/{prefix}", self.address);
        let metas = listed.map_err(|error| self.error(&error, &self.last, &what, Asked::Whole))?;
        if metas.len() > OBJECTS_MAX {
            let message = format!("more than {OBJECTS_MAX} objects: not a model repository");
            return Err(RemoteError::new(Failure::Unsupported, &self.host, &what, message));
        }
        let relative = |meta: &ObjectMeta| {
            let key = meta.location.as_ref();
            let path = key.strip_prefix(prefix.as_ref()).map_or(key, |rest| rest.trim_start_matches('/'));
            path.to_owned()
        };
        // Some tools make empty objects in place of directories.
        let is_file = |meta: &&ObjectMeta| !(meta.size == 0 && relative(meta).is_empty());
        metas.iter().filter(is_file).map(|meta| self.file(meta, relative(meta))).collect()
    }

    /// One object.
    ///
    /// # Errors
    /// It is not there or cannot be read.
    pub(super) fn head(&self, key: &Path, path: &str) -> Result<RemoteFile, RemoteError> {
        let meta = self.run(self.meta(key))?;
        self.file(&meta.map_err(|(_, error)| error)?, path.to_owned())
    }

    /// What a store says of an object, or the kind of error and the error.
    async fn meta(&self, key: &Path) -> Result<ObjectMeta, (bool, RemoteError)> {
        let observer = Observer::default();
        let mut options = GetOptions { head: true, ..GetOptions::default() };
        options.extensions.insert(observer.clone());
        let got = self.inner.get_opts(key, options).await;
        got.map(|got| got.meta).map_err(|error| {
            let is_missing = matches!(error, object_store::Error::NotFound { .. });
            let what = format!("{}/{key}", self.address);
            (is_missing, self.error(&error, &observer, &what, Asked::Whole))
        })
    }

    /// Several objects at a time, without those that are not there.
    ///
    /// # Errors
    /// The first that cannot be read.
    pub(super) fn heads(&self, keys: &[(Path, String)]) -> Result<Vec<RemoteFile>, RemoteError> {
        /// Requests at a time.
        const AT_A_TIME: usize = 32;
        let found = self.run(
            futures_util::stream::iter(keys)
                .map(|(key, path)| async move { (path, self.meta(key).await) })
                .buffered(AT_A_TIME)
                .collect::<Vec<_>>(),
        )?;
        let mut files = Vec::new();
        for (path, meta) in found {
            match meta {
                Ok(meta) => files.push(self.file(&meta, path.clone())?),
                Err((true, _)) => {}
                Err((false, error)) => return Err(error),
            }
        }
        Ok(files)
    }

    /// All bytes of a small object.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn get(&self, key: &Path) -> Result<Vec<u8>, RemoteError> {
        let what = format!("{}/{key}", self.address);
        let observer = Observer::default();
        let mut options = GetOptions::default();
        options.extensions.insert(observer.clone());
        let bytes = self.run(async { self.inner.get_opts(key, options).await?.bytes().await })?;
        Ok(bytes.map_err(|error| self.error(&error, &observer, &what, Asked::Whole))?.to_vec())
    }

    fn run<F: Future>(&self, future: F) -> Result<F::Output, RemoteError> {
        block_on(future)
            .map_err(|error| RemoteError::new(Failure::Unsupported, &self.host, &self.address, error.to_string()))
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
    fn error(&self, error: &object_store::Error, observer: &Observer, what: &str, asked: Asked) -> RemoteError {
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
            (_, Some(200)) if asked == Asked::Part => (
                Failure::Unsupported,
                "asked for a part of an object, the server replied with all of it: it does not support ranges"
                    .to_owned(),
            ),
            (_, Some(206)) => (Failure::Transient, format!("not the requested bytes: {}", cause(error))),
            (_, Some(200..=299)) => (Failure::Transient, format!("the reply broke off: {}", cause(error))),
            (_, Some(408 | 500..)) => (Failure::Transient, "the service failed".to_owned()),
            (_, Some(300..=399)) => (Failure::Refused, format!("the service redirects without an address: {advice}")),
            (_, Some(status)) => (Failure::Refused, format!("the service refuses with status {status}: {advice}")),
            (_, None) => {
                let cause = cause(error);
                let credentials = cause.contains("169.254.") || cause.contains("metadata.google.internal");
                match of_certificate(&cause) {
                    _ if credentials => (Failure::Refused, format!("no credentials: {advice}")),
                    Some(message) => (Failure::Refused, message),
                    None => (Failure::Transient, cause),
                }
            }
        };
        let (status, request_id) = (seen.status, seen.request_id);
        RemoteError { status, request_id, ..RemoteError::new(failure, &self.host, what, message) }
    }

    /// Sends a request, and waits for the first bytes of the answer.
    async fn begin(&self, file: &RemoteFile, span: ByteSpan) -> Result<Begun, RemoteError> {
        let observer = Observer::default();
        let failed = |error: &object_store::Error| self.error(error, &observer, &file.key, Asked::Part).of_span(span);
        let range = Some(GetRange::Bounded(span.start()..span.end()));
        let mut options = GetOptions { range, ..GetOptions::default() };
        // A weak tag never matches. It is compared below.
        let strong = file.etag.as_deref().filter(|etag| !etag.starts_with("W/"));
        options.if_match = strong.map(|etag| format!("\"{etag}\""));
        options.extensions.insert(observer.clone());
        let got = self.inner.get_opts(&Path::from_absolute_path_or(&file.key), options).await;
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
        Ok(Begun { observer, first, body })
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
            RemoteError::new(Failure::TimedOut, &self.host, &file.key, message).of_span(span)
        })?;
        next.transpose().map_err(|error| {
            let broken = format!("the reply broke off: {}", cause(&error));
            let error = self.error(&error, observer, &file.key, Asked::Part).of_span(span);
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
        let Begun { observer, first: mut next, mut body } = hedging.first_of(|| self.begin(file, span)).await?;
        while let Some(bytes) = next {
            if let ControlFlow::Break(()) = sink(&bytes) {
                return Ok(());
            }
            next = self.next(&mut body, file, span, &observer).await?;
        }
        Ok(())
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
        self.run(async {
            tokio::time::timeout_at(until.into(), self.stream(file, span, hedging, sink)).await.unwrap_or_else(|_| {
                let message = "no answer in time";
                Err(RemoteError::new(Failure::TimedOut, &self.host, &file.key, message).of_span(span))
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

/// The innermost causes of an error, without addresses: they may be signed.
fn cause(error: &dyn std::error::Error) -> String {
    let mut all: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let text = error.to_string();
        // An outer error repeats the inner ones, after words of its own that may hold an address.
        if next.is_none() || !text.contains("://") && !text.contains('?') {
            all.push(text);
        }
    }
    let text = all.pop().unwrap_or_default();
    let without_query = |word: &str| word.split('?').next().unwrap_or_default().to_owned();
    text.split(' ').map(without_query).collect::<Vec<_>>().join(" ")
}

/// An error with its innermost cause.
pub(super) fn with_cause(error: &object_store::Error) -> String {
    let (text, cause) = (error.to_string(), cause(error));
    if text.contains(&cause) { text } else { format!("{text}: {cause}") }
}

/// Keys of a listing as paths.
pub(super) trait FromKey {
    fn from_absolute_path_or(key: &str) -> Self;
}

impl FromKey for Path {
    /// A key is written as the listing has it.
    fn from_absolute_path_or(key: &str) -> Self {
        Self::parse(key).unwrap_or_else(|_| Self::from(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_lose_their_quotes_and_weak_ones_keep_their_mark() {
        assert_eq!([etag_of("\"a\""), etag_of("W/\"a\""), etag_of("a")], ["a", "W/a", "a"]);
    }

    #[test]
    fn causes_hold_no_signature() {
        let error = std::io::Error::other("GET https://h/k?X-Amz-Signature=secret failed");
        assert_eq!(cause(&error), "GET https://h/k failed");
    }
}
