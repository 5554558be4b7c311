//! A file as a reply: preconditions, range, headers, body.

use std::sync::Arc;

use ckfs_volume::NodeKind;
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG},
};

use super::{
    answer::{self, Reply},
    body::{FilePart, ReplyBody},
    conditions::{self, FileVerdict},
    gate::Visitor,
    reads::ServedReads,
    tree::FoundNode,
};

/// A file that is requested.
pub(super) struct AskedFile<'a> {
    pub(super) reads: &'a Arc<ServedReads>,
    pub(super) node: &'a FoundNode,
    /// Its entity tag, in quotes; none of a file whose content changes.
    pub(super) etag: Option<String>,
}

/// The content type of a file by its name.
fn content_type(path: &str) -> &'static str {
    match path.rsplit('.').next() {
        Some("json") => answer::JSON,
        Some("txt" | "md" | "toml" | "jinja" | "py") => answer::TEXT,
        _ => "application/octet-stream",
    }
}

/// Answers a request of a file that is made at each one.
pub(super) fn of_text(names: &[String], text: Vec<u8>) -> Reply {
    let name = names.last().map_or("", String::as_str);
    answer::of_body(StatusCode::OK, content_type(name), ReplyBody::of(text))
}

/// Answers a GET or HEAD of a file.
pub(super) async fn of_file(asked: AskedFile<'_>, method: &Method, headers: &HeaderMap) -> Reply {
    let AskedFile { reads, node, etag } = asked;
    debug_assert_eq!(node.attr.kind, NodeKind::File);
    let size_bytes = node.attr.size_bytes;
    let with_tag = |reply: Reply| match &etag {
        Some(etag) => answer::with_header(answer::with_header(reply, ETAG, etag), ACCEPT_RANGES, "bytes"),
        None => reply,
    };
    // Without a version there is nothing to compare, and parts of two answers would not fit.
    let verdict = etag.as_ref().map_or(FileVerdict::Whole, |etag| conditions::judge(headers, etag, size_bytes));
    let (status, start, end) = match verdict {
        // Ranges are of GET.
        FileVerdict::Part(start, end) if method == Method::GET => (StatusCode::PARTIAL_CONTENT, start, end),
        FileVerdict::Outside if method == Method::GET => {
            let text = format!("expected a range of the {size_bytes} bytes");
            let reply = answer::failed(StatusCode::RANGE_NOT_SATISFIABLE, &text);
            return with_tag(answer::with_header(reply, CONTENT_RANGE, &format!("bytes */{size_bytes}")));
        }
        FileVerdict::Whole | FileVerdict::Part(..) | FileVerdict::Outside => (StatusCode::OK, 0, size_bytes),
        FileVerdict::Known => return with_tag(answer::empty(StatusCode::NOT_MODIFIED)),
        FileVerdict::OtherVersion => {
            return with_tag(answer::failed(StatusCode::PRECONDITION_FAILED, "the file has another entity tag"));
        }
    };
    // Opening checks the sources: a file that is known to be damaged is an error, not the beginning of a reply.
    let file = match reads.open(node.attr.ino).await {
        Ok(file) => file,
        Err(refusal) => {
            let text = format!("{}: {refusal}; the log of the server says why", node.path);
            return answer::failed(StatusCode::INTERNAL_SERVER_ERROR, &text);
        }
    };
    let body = if method == Method::HEAD {
        ReplyBody::empty()
    } else {
        ReplyBody::of_file(FilePart::new(reads, file, start, end))
    };
    let mut reply = answer::of_body(status, content_type(&node.path), body);
    reply.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(end - start));
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {start}-{}/{size_bytes}", end - 1);
        reply = answer::with_header(reply, CONTENT_RANGE, &range);
    }
    with_tag(reply)
}

/// The reply to a visitor who may not read a node.
pub(super) fn denied(path: &str, visitor: Visitor) -> Reply {
    debug_assert_eq!(visitor, Visitor::Stranger);
    let text = format!(
        "{path}: the sources are not readable for all users; the token of --token-file reads them, and --file-mode changes this"
    );
    answer::failed(StatusCode::FORBIDDEN, &text)
}
