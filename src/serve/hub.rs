//! The read requests of the Hub, as its clients send them.
//!
//! ```text
//! GET  /api/models/{id}[/revision/{rev}]          files and commit
//! GET  /api/models/{id}/tree/{rev}[/{path}]       entries, in pages
//! POST /api/models/{id}/paths-info/{rev}          some entries
//! GET  /api/models/{id}/refs                      the branch, and the steps of a run
//! GET  /api/models/{id}/commits/{rev}             the steps up to a revision
//! GET  /api/models/{id}/auth-check                whether the client may read
//! GET  /{id}/resolve/{rev}/{file}, .../raw/...    bytes
//! ```
//!
//! No `X-Xet-Hash` is sent, so clients use plain requests. The digest of a large file's bytes is not known before they are made: its
//! version ([`ckfs_service::identity`]) stands where the Hub has one, in a form that no client takes for a digest.

use ckfs_source::calendar::utc;
use ckfs_volume::NodeKind;
use futures_util::future::join_all;
use http::{
    HeaderMap, HeaderName, Method, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_RANGE, HOST, LINK, LOCATION, RANGE},
};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use url::form_urlencoded;

use super::{
    answer::{self, Answered, JSON, Reply},
    file_reply,
    gate::Visitor,
    path,
    repositories::{BRANCH, NoRepository, ServedRepository},
    served::ServedSource,
    tree::{FileVersion, FoundNode, NoNode},
};

/// Most bytes of a request that names paths.
pub(super) const PATHS_BYTES_MAX: usize = 1 << 20;

/// Most paths of such a request.
const PATHS_MAX: usize = 1000;

/// Entries of a page of a tree, unless the request says fewer.
const PAGE_ENTRIES: usize = 1000;

const REPO_COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");

/// What a path of the Hub asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HubRequest {
    /// All repositories, or all of a kind that is not here.
    All { of_models: bool },
    /// Something else of what may be a repository.
    Other { id: String },
    /// The branches of one.
    Refs { id: String },
    /// Something of one at a revision.
    Revision { id: String, revision: String, asked: AskedOf },
}

/// What is asked of a revision.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AskedOf {
    /// About all of it.
    Model,
    /// Entries of a directory.
    Tree(Vec<String>),
    /// Some entries, named in the body.
    PathsInfo,
    /// The commits that led to it.
    Commits,
    /// Whether the client may read it.
    Access,
    /// A file.
    File(Vec<String>),
}

impl HubRequest {
    /// Reads the path of a request, whose components are separated before they are decoded: a revision may have slashes. `None` if it
    /// is none of the Hub's.
    pub(super) fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let id = |org: &str, name: &str| Some(format!("{}/{}", path::decoded(org)?, path::decoded(name)?));
        let names = |rest: &[&str]| path::names(&rest.join("/"));
        let of = |org: &str, name: &str, revision: &str, asked: AskedOf| {
            Some(Self::Revision { id: id(org, name)?, revision: path::decoded(revision)?, asked })
        };
        match parts.as_slice() {
            ["api", "models"] => Some(Self::All { of_models: true }),
            ["api", "datasets" | "spaces"] => Some(Self::All { of_models: false }),
            ["api", "models", org, name, "refs"] => Some(Self::Refs { id: id(org, name)? }),
            ["api", "models", org, name] => of(org, name, BRANCH, AskedOf::Model),
            ["api", "models", org, name, "auth-check"] => of(org, name, BRANCH, AskedOf::Access),
            ["api", "models", org, name, "revision", rev] => of(org, name, rev, AskedOf::Model),
            ["api", "models", org, name, "commits", rev] => of(org, name, rev, AskedOf::Commits),
            ["api", "models", org, name, "tree", rev, rest @ ..] => of(org, name, rev, AskedOf::Tree(names(rest)?)),
            ["api", "models", org, name, "paths-info", rev] => of(org, name, rev, AskedOf::PathsInfo),
            ["api", "models", org, name, _, ..] => Some(Self::Other { id: id(org, name)? }),
            ["api", "models", name] | [name, "resolve" | "raw", ..] => Some(Self::Other { id: path::decoded(name)? }),
            ["api", kind @ ("datasets" | "spaces"), rest @ ..] | [kind @ ("datasets" | "spaces"), rest @ ..] => {
                let id = rest.split(|word| matches!(*word, "resolve" | "raw")).next().unwrap_or_default();
                Some(Self::Other { id: format!("{kind}/{}", names(id)?.join("/")) })
            }
            [org, name, "resolve" | "raw", rev, rest @ ..] if !rest.is_empty() => {
                of(org, name, rev, AskedOf::File(names(rest)?))
            }
            _ => None,
        }
    }

    /// Whether it is sent by POST.
    pub(super) const fn is_post(&self) -> bool {
        matches!(self, Self::Revision { asked: AskedOf::PathsInfo, .. })
    }
}

/// What a request of the Hub has beside its path.
#[derive(Debug)]
pub(super) struct HubCall<'a> {
    pub(super) visitor: Visitor,
    pub(super) method: &'a Method,
    pub(super) headers: &'a HeaderMap,
    pub(super) query: &'a str,
}

/// Answers a request.
pub(super) async fn answer(
    served: &ServedSource,
    asked: HubRequest,
    call: &HubCall<'_>,
    body: &mut Incoming,
) -> Answered {
    let (id, revision, asked) = match asked {
        HubRequest::All { of_models } => {
            let all = if of_models { served.repositories(call.visitor).await } else { Vec::new() };
            let all: Vec<Value> = searched(&all, call.query).map(|repository| model(repository, &[])).collect();
            return Ok(json_reply(&Value::from(all)));
        }
        HubRequest::Other { id } if served.ids().contains(&id) => {
            return Err(answer::failed(StatusCode::NOT_FOUND, &format!("{id}: this is not answered here")));
        }
        HubRequest::Other { id } => return Err(no_repository(NoRepository::Name, &id, BRANCH, call.visitor)),
        HubRequest::Refs { id } => {
            let branches = served.branches(call.visitor, &id).await;
            let branches = branches.map_err(|reason| no_repository(reason, &id, BRANCH, call.visitor))?;
            return Ok(json_reply(&refs(&branches)));
        }
        HubRequest::Revision { id, revision, asked } => (id, revision, asked),
    };
    let none = |reason| no_repository(reason, &id, &revision, call.visitor);
    let repository = served.repository(call.visitor, &id, &revision).await.map_err(none)?;
    match asked {
        AskedOf::Model => of_model(&repository, call).await,
        AskedOf::Access => Ok(json_reply(&json!({}))),
        AskedOf::Commits => {
            let branches = served.branches(call.visitor, &id).await.map_err(none)?;
            Ok(json_reply(&commits(&branches, &repository)))
        }
        AskedOf::Tree(path) => of_tree(&repository, &path, call).await,
        AskedOf::PathsInfo => of_paths(&repository, call, body).await,
        AskedOf::File(path) if revision == repository.commit => of_file(&repository, &path, call.method, call).await,
        AskedOf::File(path) => of_moving(&repository, &path, served.is_moving(&revision), call).await,
    }
}

fn json_reply(value: &Value) -> Reply {
    answer::of_text(StatusCode::OK, JSON, value.to_string())
}

/// An error as clients of the Hub read it: the code in a header, the message in a header and in the body.
fn hub_error(status: StatusCode, code: &str, message: &str) -> Reply {
    let reply = answer::of_text(status, JSON, json!({ "error": message }).to_string());
    answer::with_header(answer::with_header(reply, ERROR_CODE, code), ERROR_MESSAGE, message)
}

fn no_repository(reason: NoRepository, id: &str, revision: &str, visitor: Visitor) -> Reply {
    let (status, code, message) = match reason {
        NoRepository::Name => (StatusCode::NOT_FOUND, "RepoNotFound", format!("no repository {id:?} here")),
        NoRepository::Revision(known) => {
            (StatusCode::NOT_FOUND, "RevisionNotFound", format!("no revision {revision:?} of {id}: {known}"))
        }
        NoRepository::Denied => return file_reply::denied(id, visitor),
        NoRepository::Failed(cause) => {
            let cause = match visitor {
                Visitor::Trusted => cause,
                Visitor::Stranger => "it cannot be read".to_owned(),
            };
            (StatusCode::INTERNAL_SERVER_ERROR, "ServerError", format!("revision {revision:?} of {id}: {cause}"))
        }
    };
    hub_error(status, code, &message)
}

fn no_entry(repository: &ServedRepository, path: &str, reason: &NoNode) -> Reply {
    let reply = match reason {
        NoNode::Absent => hub_error(StatusCode::NOT_FOUND, "EntryNotFound", &format!("no file {path:?}")),
        NoNode::Denied => file_reply::denied(path, Visitor::Stranger),
        // No client may take a file for absent because its step was deleted.
        NoNode::Failed(_) if repository.tree.is_gone() => return gone(repository),
        NoNode::Failed(_) => {
            let text = format!("{path}: cannot be read now: its storage gives no answer");
            return hub_error(StatusCode::INTERNAL_SERVER_ERROR, "ServerError", &text);
        }
    };
    answer::with_header(reply, REPO_COMMIT, &repository.commit)
}

/// A step that was deleted while it was looked at.
fn gone(repository: &ServedRepository) -> Reply {
    let text = format!("commit {} of {} is not there any more", repository.commit, repository.id);
    hub_error(StatusCode::NOT_FOUND, "RevisionNotFound", &text)
}

/// A value of the query.
fn asked<'a>(query: &'a str, name: &str) -> Option<std::borrow::Cow<'a, str>> {
    form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value)
}

fn asks_for(query: &str, name: &str) -> bool {
    asked(query, name).is_some_and(|value| matches!(&*value, "true" | "True" | "1"))
}

/// The time of a repository, as the Hub writes it.
fn time_of(repository: &ServedRepository) -> String {
    utc(repository.root.attr.modified).replace('Z', ".000Z")
}

fn model(repository: &ServedRepository, siblings: &[Value]) -> Value {
    let time = time_of(repository);
    let id = &repository.id;
    json!({
        "_id": repository.commit.get(..24),
        "id": id,
        "modelId": id,
        "author": id.split('/').next(),
        "sha": repository.commit,
        "lastModified": time,
        "createdAt": time,
        "private": false,
        "gated": false,
        "disabled": false,
        "downloads": 0,
        "likes": 0,
        "tags": ["ckfs"],
        "siblings": siblings,
    })
}

/// The repositories that the query of a list asks for.
fn searched<'a>(all: &'a [ServedRepository], query: &str) -> impl Iterator<Item = &'a ServedRepository> + use<'a> {
    let lower = |name: &str| asked(query, name).map(|text| text.to_lowercase());
    let (search, author) = (lower("search").unwrap_or_default(), lower("author"));
    let limit = asked(query, "limit").and_then(|text| text.parse().ok()).unwrap_or(usize::MAX);
    let is_asked = move |found: &&ServedRepository| {
        let id = found.id.to_lowercase();
        id.contains(&search) && author.as_deref().is_none_or(|author| id.split('/').next() == Some(author))
    };
    all.iter().filter(is_asked).take(limit)
}

async fn of_model(repository: &ServedRepository, call: &HubCall<'_>) -> Answered {
    let has_sizes = asks_for(call.query, "blobs");
    let entries = repository.entries(call.visitor, &repository.root, true);
    let entries = entries.map_err(|reason| no_entry(repository, &repository.id, &reason))?;
    let sibling = async |entry: &FoundNode| {
        if has_sizes {
            let tag = repository.tag(call.visitor, entry).await;
            json!({ "rfilename": entry.path, "size": entry.attr.size_bytes, "blobId": tag })
        } else {
            json!({ "rfilename": entry.path })
        }
    };
    let siblings = join_all(entries.iter().filter(|entry| entry.is_file()).map(sibling)).await;
    Ok(json_reply(&model(repository, &siblings)))
}

fn refs(branches: &[(String, ServedRepository)]) -> Value {
    let row = |(name, found): &(String, ServedRepository)| json!({ "name": name, "ref": format!("refs/heads/{name}"), "targetCommit": found.commit });
    json!({
        "branches": branches.iter().map(row).collect::<Vec<_>>(),
        "converts": [],
        "tags": [],
    })
}

/// The title of a commit.
const TITLE: &str = "served by ckfs";

/// The commits that led to a repository's revision, the last one first: the steps of a run up to it.
fn commits(branches: &[(String, ServedRepository)], repository: &ServedRepository) -> Value {
    // The branch is one of the steps, if there are some.
    let steps = branches.iter().filter(|(name, _)| name != BRANCH || branches.len() == 1);
    let row = |(name, found): &(String, ServedRepository)| {
        let title = if name == BRANCH { TITLE.to_owned() } else { format!("step {name}") };
        let (date, authors) = (time_of(found), [json!({ "user": "ckfs" })]);
        json!({ "id": found.commit, "title": title, "message": "", "authors": authors, "date": date })
    };
    steps.rev().skip_while(|(_, found)| found.commit != repository.commit).map(row).collect()
}

/// An entry of a tree.
async fn entry_row(repository: &ServedRepository, entry: &FoundNode, expand: bool, visitor: Visitor) -> Value {
    let kind = if entry.is_file() { "file" } else { "directory" };
    let tag = repository.tag(visitor, entry).await;
    let mut row = json!({ "type": kind, "oid": tag, "size": entry.attr.size_bytes, "path": entry.path });
    if let Some(row) = row.as_object_mut().filter(|_| expand) {
        let last = json!({ "id": repository.commit, "title": TITLE, "date": time_of(repository) });
        row.insert("lastCommit".to_owned(), last);
    }
    row
}

async fn of_tree(repository: &ServedRepository, names: &[String], call: &HubCall<'_>) -> Answered {
    let none = |reason| no_entry(repository, &names.join("/"), &reason);
    let below = repository.tree.find(call.visitor, &repository.root, names);
    let below = below.and_then(|node| node.of_kind(NodeKind::Directory)).map_err(none)?;
    let recursive = asks_for(call.query, "recursive");
    let limit = asked(call.query, "limit").and_then(|text| text.parse().ok()).unwrap_or(PAGE_ENTRIES);
    let limit = limit.clamp(1, PAGE_ENTRIES);
    let start: usize = match asked(call.query, "cursor").map(|text| text.parse()) {
        None => 0,
        Some(Ok(start)) => start,
        Some(Err(_)) => {
            return Err(hub_error(StatusCode::BAD_REQUEST, "InvalidCursor", "cursor: expected that of a page"));
        }
    };
    let expand = asks_for(call.query, "expand");
    let entries = repository.entries(call.visitor, &below, recursive).map_err(none)?;
    // Together: each may wait for its file.
    let rows = entries.iter().skip(start).take(limit).map(|entry| entry_row(repository, entry, expand, call.visitor));
    let page = join_all(rows).await;
    let next = start.saturating_add(page.len());
    let reply = answer::with_header(json_reply(&Value::from(page)), REPO_COMMIT, &repository.commit);
    if next >= entries.len() {
        return Ok(reply);
    }
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(form_urlencoded::parse(call.query.as_bytes()).filter(|(key, _)| key != "cursor"));
    let query = query.append_pair("cursor", &next.to_string()).finish();
    // By the commit: the pages of a branch that moves would be of several.
    let ServedRepository { id, commit, .. } = repository;
    let path = path::encoded(&names.join("/"));
    let link = format!("<{}/api/models/{id}/tree/{commit}/{path}?{query}>; rel=\"next\"", origin(call.headers));
    Ok(answer::with_header(reply, LINK, &link))
}

/// The address by which the client reached this server. Clients take the address of a next page as it is.
fn origin(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(HOST.as_str()).unwrap_or_default();
    let scheme = if text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    if host.is_empty() { String::new() } else { format!("{scheme}://{host}") }
}

async fn of_paths(repository: &ServedRepository, call: &HubCall<'_>, body: &mut Incoming) -> Answered {
    let malformed = |what: &str| hub_error(StatusCode::BAD_REQUEST, "BadRequest", what);
    let body = Limited::new(body, PATHS_BYTES_MAX).collect().await;
    let body = body.map_err(|_| malformed(&format!("paths: expected at most {PATHS_BYTES_MAX} bytes")))?;
    let (paths, expand) = asked_paths(&body.to_bytes()).ok_or_else(|| malformed("paths: expected a list"))?;
    if paths.len() > PATHS_MAX {
        return Err(malformed(&format!("paths: expected at most {PATHS_MAX}, found {}", paths.len())));
    }
    let mut entries = Vec::new();
    for asked in &paths {
        let Some(names) = path::names(&path::encoded(asked)) else { continue };
        let node = match repository.tree.find(call.visitor, &repository.root, &names) {
            Ok(node) => node,
            Err(NoNode::Absent | NoNode::Denied) => continue,
            Err(failed @ NoNode::Failed(_)) => return Err(no_entry(repository, asked, &failed)),
        };
        let entry = repository.entry(&node);
        // The root is none.
        entries.extend((!entry.path.is_empty()).then_some(entry));
    }
    let rows = join_all(entries.iter().map(|entry| entry_row(repository, entry, expand, call.visitor))).await;
    Ok(answer::with_header(json_reply(&Value::from(rows)), REPO_COMMIT, &repository.commit))
}

/// The paths that a body names, as a form or as JSON, and whether more is asked of each.
fn asked_paths(body: &[u8]) -> Option<(Vec<String>, bool)> {
    if let Ok(Value::Object(fields)) = serde_json::from_slice(body) {
        let paths = match fields.get("paths")? {
            Value::String(path) => vec![path.clone()],
            Value::Array(paths) => {
                paths.iter().map(|path| path.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()?
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => return None,
        };
        return Some((paths, fields.get("expand").and_then(Value::as_bool).unwrap_or(false)));
    }
    let mut paths = Vec::new();
    let mut expand = false;
    for (key, value) in form_urlencoded::parse(body) {
        match &*key {
            "paths" => paths.push(value.into_owned()),
            "expand" => expand = matches!(&*value, "true" | "True" | "1"),
            _ => {}
        }
    }
    (!paths.is_empty()).then_some((paths, expand))
}

/// Answers a request of a file by a name that may have another commit at the next request: that of a step, or the branch. So that a
/// client which asks twice gets one commit, the answer tells the address that has it: the branch of a run `leads_on` to it, and otherwise
/// clients of the Hub take it from the header.
async fn of_moving(repository: &ServedRepository, names: &[String], leads_on: bool, call: &HubCall<'_>) -> Answered {
    let method = if leads_on { &Method::HEAD } else { call.method };
    let reply = of_file(repository, names, method, call).await?;
    if !reply.status().is_success() {
        return Ok(reply);
    }
    let ServedRepository { id, commit, .. } = repository;
    let query = if call.query.is_empty() { String::new() } else { format!("?{}", call.query) };
    let path = path::encoded(&names.join("/"));
    let address = format!("{}/{id}/resolve/{commit}/{path}{query}", origin(call.headers));
    let mut reply = answer::with_header(reply, LOCATION, &address);
    if leads_on {
        *reply.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        reply.headers_mut().insert(CONTENT_LENGTH, 0.into());
    }
    Ok(reply)
}

async fn of_file(repository: &ServedRepository, names: &[String], method: &Method, call: &HubCall<'_>) -> Answered {
    let node = repository.tree.find(call.visitor, &repository.root, names);
    let node = node
        .and_then(|node| node.of_kind(NodeKind::File))
        .map_err(|reason| no_entry(repository, &names.join("/"), &reason))?;
    let tag = format!("\"{}\"", repository.tag(call.visitor, &repository.entry(&node)).await);
    // The branch of a run leads to an older file when its newest step is deleted: no time is a condition.
    let version = Some(FileVersion { etag: tag.clone(), since: None });
    let mut headers = call.headers.clone();
    let is_empty_part = node.attr.size_bytes == 0 && headers.remove(RANGE).is_some();
    let mut reply = file_reply::of_file(&repository.tree.reads, &node, version, method, &headers)
        .await
        .unwrap_or_else(|reply| reply);
    if is_empty_part && reply.status() == StatusCode::OK {
        // Clients ask for the first byte to learn of the size, which they take from here: 416 would be the end for them.
        reply = answer::with_header(reply, CONTENT_RANGE, "bytes */0");
    }
    let reply = answer::with_header(reply, REPO_COMMIT, &repository.commit);
    let reply = answer::with_header(reply, LINKED_SIZE, &node.attr.size_bytes.to_string());
    Ok(answer::with_header(reply, LINKED_ETAG, &tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_hub_are_read() {
        let (id, text) = (|| "org/name".to_owned(), str::to_owned);
        let of = |revision: &str, asked| Some(HubRequest::Revision { id: id(), revision: text(revision), asked });
        let other = |id: &str| Some(HubRequest::Other { id: text(id) });
        for (path, expected) in [
            ("/api/models", Some(HubRequest::All { of_models: true })),
            ("/api/datasets", Some(HubRequest::All { of_models: false })),
            ("/api/models/org/name", of("main", AskedOf::Model)),
            ("/api/models/org/name/revision/refs%2Fpr%2F1", of("refs/pr/1", AskedOf::Model)),
            ("/api/models/org/name/tree/main", of("main", AskedOf::Tree(vec![]))),
            ("/api/models/org/name/tree/main/a/b%20c", of("main", AskedOf::Tree(vec![text("a"), text("b c")]))),
            ("/api/models/org/name/paths-info/main", of("main", AskedOf::PathsInfo)),
            ("/api/models/org/name/refs", Some(HubRequest::Refs { id: id() })),
            ("/org/name/resolve/main/a/b", of("main", AskedOf::File(vec![text("a"), text("b")]))),
            ("/org/name/resolve/main", None),
            ("/org/name/resolve/main/../../x", None),
            ("/org/name/resolve/main/%2e%2e/x", None),
            ("/org/name/raw/main/a", of("main", AskedOf::File(vec![text("a")]))),
            ("/api/models/org/name/commits/HEAD", of("HEAD", AskedOf::Commits)),
            ("/api/models/org/name/auth-check", of("main", AskedOf::Access)),
            ("/api/models/org/name/discussions", other("org/name")),
            ("/api/models/gpt2", other("gpt2")),
            ("/api/models/gpt2/tree/main", other("gpt2/tree")),
            ("/gpt2/resolve/main/config.json", other("gpt2")),
            ("/api/datasets/org/name", other("datasets/org/name")),
            ("/datasets/org/name/resolve/main/x", other("datasets/org/name")),
            ("/spaces/name/raw/main/x", other("spaces/name")),
            ("/org/name", None),
            ("/", None),
        ] {
            assert_eq!(HubRequest::parse(path), expected, "{path}");
        }
    }

    #[test]
    fn bodies_name_paths_as_forms_or_as_json() {
        let paths = |text: &str| asked_paths(text.as_bytes());
        let both = vec!["a b".to_owned(), "c/d".to_owned()];
        assert_eq!(paths("paths=a+b&paths=c%2Fd&expand=True"), Some((both.clone(), true)));
        assert_eq!(paths(r#"{"paths": ["a b", "c/d"], "expand": false}"#), Some((both, false)));
        assert_eq!(paths(r#"{"paths": "x"}"#), Some((vec!["x".to_owned()], false)));
        for text in ["", "x=1", "{}", r#"{"paths": 1}"#, r#"{"paths": [1]}"#] {
            assert_eq!(paths(text), None, "{text}");
        }
    }
}
