//! Read-only S3, path style: one bucket, whose keys are the paths of the volume.
//!
//! | request | is |
//! | --- | --- |
//! | `GET /` | `ListBuckets` |
//! | `HEAD /ckfs`, `GET /ckfs?location` | `HeadBucket`, `GetBucketLocation` |
//! | `GET /ckfs?list-type=2` | `ListObjectsV2` |
//! | `HEAD /ckfs/KEY`, `GET /ckfs/KEY` | `HeadObject`, `GetObject`, with one range and preconditions |
//!
//! Signatures count only where there is a token: the key is then `ckfs`, and its secret the token.

mod keys;
mod signature;
mod xml;

use std::{net::IpAddr, sync::Arc, time::SystemTime};

use ckfs_volume::{Ino, NodeKind};
use http::{
    HeaderName, Method, Request, StatusCode,
    header::{IF_MATCH, IF_RANGE, LAST_MODIFIED, RANGE},
};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;

use super::{
    answer::{self, Reply},
    file_reply::{self, AskedFile},
    gate::{Gate, NoEntry, Visitor},
    path,
    served::{NoPlace, ServedPlace, ServedSource},
    steps::{LATEST, ServedRun},
    tree::{NoNode, ServedTree, TreeVersion},
};
use keys::{KeyLister, ListStart, SortedDirectories};
use signature::{BUCKET, BadSignature, SignedRequest};

/// The region that the bucket says it is in: the one of which S3 says nothing.
const REGION: &str = "us-east-1";

/// Most keys of a list.
const KEYS_MAX: usize = 1000;

const DENIED: &str = "the sources are not readable for all users";

const BUCKET_REGION: HeaderName = HeaderName::from_static("x-amz-bucket-region");

/// Answers the requests of S3.
pub(super) struct BucketRouter {
    pub(super) gate: Gate,
    pub(super) served: ServedSource,
    sorted: Arc<SortedDirectories>,
}

/// Parameters of a query, decoded once; `+` is itself, as clients of S3 write it.
fn parameters(query: &str) -> Vec<(String, String)> {
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    };
    pairs.map(pair).collect()
}

impl BucketRouter {
    pub(super) fn new(gate: Gate, served: ServedSource) -> Self {
        Self { gate, served, sorted: Arc::default() }
    }

    /// Answers a request.
    pub(super) async fn answer(&self, request: Request<Incoming>, peer: IpAddr) -> Reply {
        let (parts, _) = request.into_parts();
        let (method, path) = (&parts.method, parts.uri.path());
        let query = parameters(parts.uri.query().unwrap_or_default());
        let visitor = match self.visitor(&parts, &query, peer) {
            Ok(visitor) => visitor,
            Err(reply) => return reply,
        };
        if method != Method::GET && method != Method::HEAD {
            let text = "the bucket is read-only: GET and HEAD";
            return xml::error(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", text, path);
        }
        let Ok(names) = path::names(path) else {
            return xml::error(StatusCode::BAD_REQUEST, "InvalidURI", "expected a path without . and ..", path);
        };
        match names.split_first() {
            None => {
                let root = self.served.fs().attr(Ino::ROOT);
                xml::buckets(root.map_or(SystemTime::UNIX_EPOCH, |attr| attr.modified))
            }
            Some((bucket, _)) if bucket != BUCKET => {
                let text = format!("there is one bucket: {BUCKET}");
                xml::error(StatusCode::NOT_FOUND, "NoSuchBucket", &text, path)
            }
            Some((_, [])) => self.of_bucket(visitor, method, &query, path).await,
            // A key that ends with a slash is another one, and there is none.
            Some((_, key)) if path.ends_with('/') => no_key(&key.join("/")),
            Some((_, key)) => self.of_object(visitor, key, method, &parts.headers).await,
        }
    }

    /// Who asks.
    fn visitor(
        &self,
        parts: &http::request::Parts,
        query: &[(String, String)],
        peer: IpAddr,
    ) -> Result<Visitor, Reply> {
        let denied = |code: &str, text: &str| xml::error(StatusCode::FORBIDDEN, code, text, parts.uri.path());
        let Some(token) = self.gate.token() else {
            return self.gate.admit(&parts.headers, peer).map_err(|_| denied("AccessDenied", "not admitted"));
        };
        let signed = SignedRequest { method: &parts.method, path: parts.uri.path(), query, headers: &parts.headers };
        let (code, text) = match signed.check(token.secret(), SystemTime::now()) {
            Ok(()) => return Ok(Visitor::Trusted),
            Err(BadSignature::Absent) => match self.gate.admit_unsigned() {
                Ok(visitor) => return Ok(visitor),
                Err(NoEntry::Missing | NoEntry::Wrong) => {
                    ("AccessDenied", "expected a signature of version 4, with the key ckfs and the token as its secret")
                }
            },
            Err(BadSignature::Key) => ("InvalidAccessKeyId", "expected the access key ckfs"),
            Err(BadSignature::Time) => {
                ("RequestTimeTooSkewed", "the signature is too old, or the clocks differ by more than 15 minutes")
            }
            Err(BadSignature::Malformed) => ("AuthorizationHeaderMalformed", "expected AWS4-HMAC-SHA256"),
            Err(BadSignature::Wrong) => {
                ("SignatureDoesNotMatch", "the secret of the key ckfs is the token of this server")
            }
        };
        Err(denied(code, text))
    }

    async fn of_bucket(&self, visitor: Visitor, method: &Method, query: &[(String, String)], path: &str) -> Reply {
        let value = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        if method == Method::HEAD {
            return answer::with_header(answer::empty(StatusCode::OK), BUCKET_REGION, REGION);
        }
        if value("location").is_some() {
            return xml::location();
        }
        if value("list-type") != Some("2") {
            let text = "expected list-type=2 or location";
            return xml::error(StatusCode::NOT_IMPLEMENTED, "NotImplemented", text, path);
        }
        let argument = |text: &str| xml::error(StatusCode::BAD_REQUEST, "InvalidArgument", text, path);
        let delimited = match value("delimiter") {
            None | Some("") => false,
            Some("/") => true,
            Some(_) => {
                let text = "the delimiter of paths is /";
                return xml::error(StatusCode::NOT_IMPLEMENTED, "NotImplemented", text, path);
            }
        };
        let Ok(max) = value("max-keys").map_or(Ok(KEYS_MAX), str::parse::<usize>) else {
            return argument("max-keys: expected a number");
        };
        let token = value("continuation-token");
        let start = match token {
            Some(token) => match ListStart::of_token(token) {
                Some(start) => start,
                None => return argument("continuation-token: expected that of a list"),
            },
            None => ListStart::After(value("start-after").unwrap_or_default().to_owned()),
        };
        let text = |name: &str| value(name).map(str::to_owned);
        let shown = xml::ShownList {
            prefix: text("prefix").unwrap_or_default(),
            delimited,
            max,
            encoded: value("encoding-type") == Some("url"),
            start_after: text("start-after").filter(|_| token.is_none()),
            token: token.map(str::to_owned),
        };
        let sorted = Arc::clone(&self.sorted);
        let listed = match &self.served {
            ServedSource::Checkpoint(served) => list(&served.tree, &sorted, visitor, &start, &shown),
            // Steps are planned to tell their keys.
            ServedSource::Run(run) => {
                let tree = run.root();
                let work = move |run: &ServedRun| run.unchanged(|| list(&tree, &sorted, visitor, &start, &shown));
                run.elsewhere(work).await.unwrap_or(Err(NoNode::Failed))
            }
        };
        listed.unwrap_or_else(|reason| {
            if reason == NoNode::Denied {
                return xml::error(StatusCode::FORBIDDEN, "AccessDenied", DENIED, path);
            }
            let text = "the keys cannot be listed now: steps come and go, or storage gives no answer; the log of the server says more";
            xml::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", text, path)
        })
    }

    async fn of_object(&self, visitor: Visitor, names: &[String], method: &Method, headers: &http::HeaderMap) -> Reply {
        let key = names.join("/");
        let failed = |text: &str| xml::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", text, &key);
        let no_node = |reason: NoNode| match reason {
            NoNode::Absent => no_key(&key),
            NoNode::Denied => xml::error(StatusCode::FORBIDDEN, "AccessDenied", DENIED, &key),
            NoNode::Failed => {
                failed("the object cannot be read now: its step was deleted, or its storage gives no answer")
            }
        };
        let (tree, rest) = match self.served.place(visitor, names).await {
            Ok(ServedPlace::Tree(tree, rest)) => (tree, rest),
            Ok(ServedPlace::Text(text)) => return file_reply::of_text(names, text),
            Err(NoPlace::Node(reason)) => return no_node(reason),
            Err(NoPlace::Failed(cause)) => return failed(&cause),
        };
        let node = match tree.find(visitor, &tree.root, &rest) {
            Ok(node) if node.attr.kind == NodeKind::File => node,
            Ok(_) => return no_key(&key),
            Err(reason) => return no_node(reason),
        };
        if let (TreeVersion::Step { held, .. }, Some((LATEST, below))) = (&tree.version, key.split_once('/'))
            && headers.contains_key(RANGE)
            && !headers.contains_key(IF_MATCH)
            && !headers.contains_key(IF_RANGE)
        {
            let (number, etag) = (held.number(), tree.etag(&node).unwrap_or_default());
            let text = format!(
                "{key} leads to another step when one comes, and parts of two would not fit: ask for {number}/{below}, or send If-Match: {etag}"
            );
            return xml::error(StatusCode::BAD_REQUEST, "InvalidRequest", &text, &key);
        }
        let asked = AskedFile { reads: &tree.reads, node: &node, etag: tree.etag(&node) };
        let reply = file_reply::of_file(asked, method, headers).await;
        let (code, text) = match reply.status() {
            StatusCode::RANGE_NOT_SATISFIABLE => ("InvalidRange", "no such bytes"),
            StatusCode::PRECONDITION_FAILED => ("PreconditionFailed", "the object has another entity tag"),
            status if status.is_client_error() || status.is_server_error() => {
                ("InternalError", "the object cannot be read; the log of the server says why")
            }
            _ => return answer::with_header(reply, LAST_MODIFIED, &xml::http_date(node.attr.modified)),
        };
        let error = xml::error(reply.status(), code, text, &key);
        match reply.headers().get(http::header::CONTENT_RANGE).and_then(|value| value.to_str().ok()) {
            Some(range) => answer::with_header(error, http::header::CONTENT_RANGE, range),
            None => error,
        }
    }
}

/// The reply with a list of keys.
fn list(
    tree: &ServedTree,
    sorted: &SortedDirectories,
    visitor: Visitor,
    start: &ListStart,
    shown: &xml::ShownList,
) -> Result<Reply, NoNode> {
    let (prefix, delimited, max) = (&*shown.prefix, shown.delimited, shown.max.min(KEYS_MAX));
    let lister = KeyLister { tree, sorted, visitor, prefix, delimited, max };
    Ok(xml::list(tree, &lister.list(start)?, shown))
}

fn no_key(key: &str) -> Reply {
    xml::error(StatusCode::NOT_FOUND, "NoSuchKey", "no such key", key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let found = parameters("list-type=2&prefix=a%2Fb+c%2520&location&=x&&y=");
        let expected = [("list-type", "2"), ("prefix", "a/b+c%20"), ("location", ""), ("", "x"), ("y", "")];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
