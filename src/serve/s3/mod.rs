//! Read-only S3: one bucket, whose keys are the paths of the volume. Path style; at the name `ckfs.localhost` virtual-host style too.
//!
//! | request | is |
//! | --- | --- |
//! | `GET /` | `ListBuckets` |
//! | `HEAD /ckfs` | `HeadBucket` |
//! | `GET /ckfs?list-type=2`, `GET /ckfs`, `GET /ckfs?versions` | `ListObjectsV2`, `ListObjects`, `ListObjectVersions` |
//! | `HEAD /ckfs/KEY`, `GET /ckfs/KEY` | `HeadObject`, `GetObject`, with one range and preconditions |
//! | `GET /ckfs/KEY?attributes` | `GetObjectAttributes` |
//! | `GET /ckfs?NAME`, `GET /ckfs/KEY?NAME` | what `sub_resource` has |
//!
//! Signatures count only where there is a token: the key is then `ckfs`, and its secret the token.

mod keys;
mod signature;
mod sub_resource;
mod xml;

use std::{sync::Arc, time::SystemTime};

use bytes::Bytes;
use ckfs_volume::{Ino, NodeKind};
use http::{
    HeaderName, Method, Request, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_RANGE, IF_MATCH, IF_RANGE, LAST_MODIFIED, RANGE},
};
use hyper::body::Incoming;

use super::{
    answer::{self, Answered, Reply},
    file_reply,
    gate::{Caller, NoEntry, Visitor},
    options::ServeOptions,
    path,
    served::{ServedPlace, ServedSource},
    steps::{LATEST, ServedRun},
    tree::{FileVersion, NoNode, ServedTree, TreeVersion},
};
pub(super) use keys::SortedDirectories;
use keys::{KeyLister, ListStart};
use signature::{BUCKET, BadSignature, Parameters, SignedRequest};
use sub_resource::ObjectQuestion;
use xml::ListPaging;

/// The region that the bucket says it is in: the one of which S3 says nothing.
const REGION: &str = "us-east-1";

/// Most keys of a list.
const KEYS_MAX: usize = 1000;

const DENIED: &str = "the sources are not readable for all users";

const BUCKET_REGION: HeaderName = HeaderName::from_static("x-amz-bucket-region");

/// The bucket as part of a name.
const BUCKET_HOST: &str = "ckfs.localhost";

/// Answers a request.
pub(super) async fn answer(
    (options, served): (&ServeOptions, &ServedSource),
    sorted: &Arc<SortedDirectories>,
    request: Request<&mut Incoming>,
    caller: &Caller,
) -> Answered {
    let (parts, _) = request.into_parts();
    let (method, path) = (&parts.method, parts.uri.path());
    let query = Parameters::of(parts.uri.query().unwrap_or_default());
    let visitor = visitor_of(options, &parts, &query, caller)?;
    if method != Method::GET && method != Method::HEAD {
        let text = "the bucket is read-only: GET and HEAD";
        return Err(xml::error(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", text, path));
    }
    let malformed = || xml::error(StatusCode::BAD_REQUEST, "InvalidURI", "expected a path without . and ..", path);
    let mut names = path::names(path).ok_or_else(malformed)?;
    if caller.host.as_deref() == Some(BUCKET_HOST) && names.first().is_none_or(|first| first != BUCKET) {
        names.insert(0, BUCKET.to_owned());
    }
    match names.split_first() {
        None => {
            let root = served.fs().attr(Ino::ROOT);
            Ok(xml::buckets(root.map_or(SystemTime::UNIX_EPOCH, |attr| attr.modified)))
        }
        Some((bucket, _)) if bucket != BUCKET => {
            let text = format!("there is one bucket: {BUCKET}");
            Err(xml::error(StatusCode::NOT_FOUND, "NoSuchBucket", &text, path))
        }
        Some((_, [])) => of_bucket(served, sorted, visitor, method, &query, path).await,
        // A key that ends with a slash is another one, and there is none.
        Some((_, key)) if path.ends_with('/') => Err(no_key(&key.join("/"))),
        Some((_, key)) => of_object(served, visitor, key, method, &query, &parts.headers).await,
    }
}

/// Who asks.
fn visitor_of(
    options: &ServeOptions,
    parts: &http::request::Parts,
    query: &Parameters,
    caller: &Caller,
) -> Result<Visitor, Reply> {
    let denied = |code: &str, text: &str| xml::error(StatusCode::FORBIDDEN, code, text, parts.uri.path());
    let Some(token) = &options.token else {
        return options.admit(&parts.headers, caller).map_err(|_| {
            let text = answer::other_name(caller);
            xml::error(StatusCode::MISDIRECTED_REQUEST, "AccessDenied", &text, parts.uri.path())
        });
    };
    let (method, path) = (&parts.method, parts.uri.path());
    let signed = SignedRequest { method, path, query, headers: &parts.headers };
    let (code, text) = match signed.check(&token.0, SystemTime::now()) {
        Ok(()) => return Ok(Visitor::Trusted),
        Err(BadSignature::Absent) => match options.admit_unsigned() {
            Ok(visitor) => return Ok(visitor),
            Err(NoEntry::Missing | NoEntry::Wrong | NoEntry::Name) => {
                ("AccessDenied", "expected a signature of version 4, with the key ckfs and the token as its secret")
            }
        },
        Err(BadSignature::Former) => {
            let text = "the signature is of version 2: set version 4, as in boto3's Config(signature_version='s3v4')";
            return Err(xml::error(StatusCode::BAD_REQUEST, "InvalidRequest", text, path));
        }
        Err(BadSignature::Key) => ("InvalidAccessKeyId", "expected the access key ckfs"),
        Err(BadSignature::Time) => {
            ("RequestTimeTooSkewed", "the signature is too old, or the clocks differ by more than 15 minutes")
        }
        Err(BadSignature::Malformed) => ("AuthorizationHeaderMalformed", "expected AWS4-HMAC-SHA256"),
        Err(BadSignature::Wrong) => ("SignatureDoesNotMatch", "the secret of the key ckfs is the token of this server"),
    };
    Err(denied(code, text))
}

async fn of_bucket(
    served: &ServedSource,
    sorted: &Arc<SortedDirectories>,
    visitor: Visitor,
    method: &Method,
    query: &Parameters,
    path: &str,
) -> Answered {
    let value = |name: &str| query.value(name);
    if method == Method::HEAD {
        return Ok(answer::with_header(answer::empty(StatusCode::OK), BUCKET_REGION, REGION));
    }
    if let Some(reply) = sub_resource::of_bucket(query, path) {
        return Ok(reply);
    }
    let argument = |text: &str| xml::error(StatusCode::BAD_REQUEST, "InvalidArgument", text, path);
    let text = |name: &str| value(name).unwrap_or_default().to_owned();
    let paging = match (value("versions"), value("list-type")) {
        (Some(_), _) => ListPaging::Versions { marker: text("key-marker") },
        (None, None) => ListPaging::Marker(text("marker")),
        (None, Some("2")) => ListPaging::Token {
            token: value("continuation-token").map(str::to_owned),
            start_after: value("start-after").map(str::to_owned),
            has_owner: value("fetch-owner") == Some("true"),
        },
        (None, Some(_)) => return Err(argument("list-type: expected 2")),
    };
    let delimited = match value("delimiter") {
        None | Some("") => false,
        Some("/") => true,
        Some(_) => {
            let text = "the delimiter of paths is /";
            return Err(xml::error(StatusCode::NOT_IMPLEMENTED, "NotImplemented", text, path));
        }
    };
    let max = value("max-keys").map_or(Ok(KEYS_MAX), str::parse::<usize>);
    let max = max.map_err(|_| argument("max-keys: expected a number"))?;
    let prefix = text("prefix");
    let start = paging.start(&prefix, delimited);
    let start = start.ok_or_else(|| argument("continuation-token: expected that of a list"))?;
    let encoded = value("encoding-type") == Some("url");
    let shown = xml::ShownList { prefix, delimited, max, encoded, paging };
    let sorted = Arc::clone(sorted);
    let listed = match served {
        ServedSource::Checkpoint(served) => list(&served.tree, &sorted, visitor, &start, &shown),
        // Steps are planned to tell their keys.
        ServedSource::Run(run) => {
            let tree = run.root();
            let work = move |run: &ServedRun| run.unchanged(|| list(&tree, &sorted, visitor, &start, &shown));
            run.in_thread(&run.waiting, work).await.unwrap_or_else(|error| Err(error.into()))
        }
    };
    listed.map_err(|reason| {
        if reason == NoNode::Denied {
            return xml::error(StatusCode::FORBIDDEN, "AccessDenied", DENIED, path);
        }
        let text = "the keys cannot be listed now: steps come and go, or storage gives no answer; the log of the server says more";
        xml::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", text, path)
    })
}

async fn of_object(
    served: &ServedSource,
    visitor: Visitor,
    names: &[String],
    method: &Method,
    query: &Parameters,
    headers: &http::HeaderMap,
) -> Answered {
    let key = names.join("/");
    let failed = |text: &str| xml::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", text, &key);
    let no_node = |reason: NoNode| match reason {
        NoNode::Absent => no_key(&key),
        NoNode::Denied => xml::error(StatusCode::FORBIDDEN, "AccessDenied", DENIED, &key),
        NoNode::Failed(cause) => failed(&format!("{key}: {cause}")),
    };
    let (tree, rest) = match served.place(visitor, names).await.map_err(no_node)? {
        ServedPlace::Tree(tree, rest) => (tree, rest),
        ServedPlace::Text(text) => {
            let bytes = Bytes::from(text);
            return Ok(match sub_resource::of_object(query, headers, &key)? {
                ObjectQuestion::Attributes(asked) => {
                    xml::attributes(&asked, &FileVersion::of_bytes(&bytes), bytes.len() as u64)
                }
                asked @ (ObjectQuestion::Bytes | ObjectQuestion::FirstPart) => {
                    object_reply(file_reply::of_bytes(&key, &bytes, method, headers), &asked, &key)
                }
            });
        }
    };
    let node = tree.find(visitor, &tree.root, &rest).and_then(|node| node.of_kind(NodeKind::File));
    let node = node.map_err(no_node)?;
    let question = sub_resource::of_object(query, headers, &key)?;
    if let ObjectQuestion::Attributes(asked) = &question {
        let version = tree.version_now(&node).map_err(no_node)?;
        return Ok(xml::attributes(asked, &version, node.attr.size_bytes));
    }
    let mut version = tree.version(&node);
    if let (TreeVersion::Step { held, .. }, Some((LATEST, below))) = (&tree.version, key.split_once('/'))
        && let Some(version) = &mut version
    {
        if headers.contains_key(RANGE) && !headers.contains_key(IF_MATCH) && !headers.contains_key(IF_RANGE) {
            let (number, etag) = (held.number(), &version.etag);
            let text = format!(
                "{key} leads to another step when one comes, and parts of two would not fit: ask for {number}/{below}, or send If-Match: {etag}"
            );
            return Err(xml::error(StatusCode::BAD_REQUEST, "InvalidRequest", &text, &key));
        }
        // It leads to an older step when the newest is deleted.
        version.since = None;
    }
    let answered = file_reply::of_file(&tree.reads, &node, version, method, headers).await;
    Ok(object_reply(answered, &question, &key))
}

/// The reply with a file as S3 gives it.
fn object_reply(answered: Answered, question: &ObjectQuestion, key: &str) -> Reply {
    let mut reply = answered.unwrap_or_else(|reply| reply);
    let (code, text) = match reply.status() {
        StatusCode::RANGE_NOT_SATISFIABLE => ("InvalidRange", "no such bytes"),
        StatusCode::PRECONDITION_FAILED => ("PreconditionFailed", "the object has another entity tag, or is newer"),
        status if status.is_client_error() || status.is_server_error() => {
            ("InternalError", "the object cannot be read; the log of the server says why")
        }
        status => {
            let len = reply.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            if let (ObjectQuestion::FirstPart, StatusCode::OK, Some(len @ 1..)) = (question, status, len) {
                *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
                reply = answer::with_header(reply, CONTENT_RANGE, &format!("bytes 0-{}/{len}", len - 1));
            }
            let is_dated = reply.headers().contains_key(LAST_MODIFIED);
            return if is_dated { reply } else { xml::dated(reply, None) };
        }
    };
    let error = xml::error(reply.status(), code, text, key);
    match reply.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok()) {
        Some(range) => answer::with_header(error, CONTENT_RANGE, range),
        None => error,
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
    xml::list(tree, &lister.list(start)?, shown)
}

fn no_key(key: &str) -> Reply {
    xml::error(StatusCode::NOT_FOUND, "NoSuchKey", "no such key", key)
}
