//! A file as a reply: preconditions, range, headers, body.

use std::{io, sync::Arc};

use bytes::Bytes;
use ckfs_volume::NodeKind;
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH, IF_RANGE, LAST_MODIFIED, RANGE},
};

use super::{
    answer::{self, Answered, Reply},
    body::{FilePart, ReplyBody},
    conditions::{self, FileVerdict},
    gate::Visitor,
    reads::ServedReads,
    tree::{FileVersion, FoundNode},
};

/// The content type of a file by its name.
fn content_type(path: &str) -> &'static str {
    match path.rsplit('.').next() {
        Some("json") => answer::JSON,
        Some("txt" | "md" | "toml" | "jinja" | "py") => answer::TEXT,
        _ => "application/octet-stream",
    }
}

/// Answers a request of a file that is made at each one. Its version is that of these bytes, so no request gets parts of two: a range
/// counts only with the tag that the client has.
pub(super) fn of_bytes(path: &str, bytes: &Bytes, method: &Method, headers: &HeaderMap) -> Answered {
    let version = FileVersion::of_bytes(bytes);
    let mut headers = headers.clone();
    if !headers.contains_key(IF_MATCH) && !headers.contains_key(IF_RANGE) {
        headers.remove(RANGE);
    }
    let part = begin(&version, bytes.len() as u64, method, &headers)?;
    Ok(finish(&version, path, &part, method, || {
        let [start, end] = [part.start, part.end].map(|at| usize::try_from(at).expect("the bytes are in memory"));
        ReplyBody::of(bytes.slice(start..end))
    }))
}

/// The part of a file that a request gets.
struct RepliedPart {
    status: StatusCode,
    start: u64,
    end: u64,
    size_bytes: u64,
}

/// What a reply says of the version of its file.
fn with_version(reply: Reply, version: &FileVersion) -> Reply {
    let reply = answer::with_header(answer::with_header(reply, ETAG, &version.etag), ACCEPT_RANGES, "bytes");
    match version.since {
        Some(since) => answer::with_header(reply, LAST_MODIFIED, &httpdate::fmt_http_date(since)),
        None => reply,
    }
}

/// The part that a request gets, or the reply if there is none.
fn begin(version: &FileVersion, size_bytes: u64, method: &Method, headers: &HeaderMap) -> Result<RepliedPart, Reply> {
    let (status, start, end) = match conditions::judge(headers, version, size_bytes) {
        // Ranges are of GET.
        FileVerdict::Part(start, end) if method == Method::GET => (StatusCode::PARTIAL_CONTENT, start, end),
        FileVerdict::Outside if method == Method::GET => {
            let text = format!("expected a range of the {size_bytes} bytes");
            let reply = answer::failed(StatusCode::RANGE_NOT_SATISFIABLE, &text);
            let reply = answer::with_header(reply, CONTENT_RANGE, &format!("bytes */{size_bytes}"));
            return Err(with_version(reply, version));
        }
        FileVerdict::Whole | FileVerdict::Part(..) | FileVerdict::Outside => (StatusCode::OK, 0, size_bytes),
        FileVerdict::Known => return Err(with_version(answer::empty(StatusCode::NOT_MODIFIED), version)),
        FileVerdict::OtherVersion => {
            let reply = answer::failed(StatusCode::PRECONDITION_FAILED, "the file has another entity tag, or is newer");
            return Err(with_version(reply, version));
        }
    };
    Ok(RepliedPart { status, start, end, size_bytes })
}

/// The reply with a part.
fn finish(
    version: &FileVersion,
    path: &str,
    part: &RepliedPart,
    method: &Method,
    body: impl FnOnce() -> ReplyBody,
) -> Reply {
    let RepliedPart { status, start, end, size_bytes } = *part;
    let body = if method == Method::HEAD { ReplyBody::empty() } else { body() };
    let mut reply = answer::of_body(status, content_type(path), body);
    reply.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(end - start));
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {start}-{}/{size_bytes}", end - 1);
        reply = answer::with_header(reply, CONTENT_RANGE, &range);
    }
    with_version(reply, version)
}

/// Answers a GET or HEAD of a file; `version` is none of one whose content changes.
pub(super) async fn of_file(
    reads: &Arc<ServedReads>,
    node: &FoundNode,
    version: Option<FileVersion>,
    method: &Method,
    headers: &HeaderMap,
) -> Answered {
    debug_assert_eq!(node.attr.kind, NodeKind::File);
    let unreadable = |refusal: io::Error| {
        let text = format!("{}: {refusal}; the log of the server says why", node.path);
        answer::failed(StatusCode::INTERNAL_SERVER_ERROR, &text)
    };
    let Some(version) = version else {
        let made = reads.made(node.attr.ino).await.map_err(unreadable)?;
        return of_bytes(&node.path, &made, method, headers);
    };
    let part = begin(&version, node.attr.size_bytes, method, headers)?;
    // Opening checks the sources: a file that is known to be damaged is an error, not the beginning of a reply.
    let file = reads.open(node.attr.ino).await.map_err(unreadable)?;
    let body = || ReplyBody::of_file(FilePart::new(reads, file, part.start, part.end));
    Ok(finish(&version, &node.path, &part, method, body))
}

/// The reply to a visitor who may not read a node.
pub(super) fn denied(path: &str, visitor: Visitor) -> Reply {
    debug_assert_eq!(visitor, Visitor::Stranger);
    let text = format!(
        "{path}: the sources are not readable for all users; the token of --token-file reads them, and --file-mode changes this"
    );
    answer::failed(StatusCode::FORBIDDEN, &text)
}
