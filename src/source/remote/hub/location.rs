//! Where a file's bytes are: at a signed address of the content network, or at the Hub itself.

use std::time::Instant;

use reqwest::{Method, Url, header::ETAG};

use super::{
    super::{
        error::{Failure, RemoteError},
        interface::{Content, RemoteFile},
        reply::text_of,
    },
    client::Hub,
    refusal::Subject,
};

/// The address of a file.
#[derive(Clone, Debug)]
pub(super) struct Location {
    pub(super) url: Url,
    /// Counts the addresses of the file: the first is 1.
    pub(super) generation: u64,
}

impl Location {
    /// The address without its query, which may be signed: host and path name the object.
    pub(super) fn object(&self) -> String {
        format!("{}{}", self.url.host_str().unwrap_or_default(), self.url.path())
    }
}

/// A digest among the Hub's headers: `"abc"`, `W/"abc"` or `abc`.
pub(super) fn unquoted(etag: &str) -> &str {
    etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"')
}

/// Asks the Hub for the address of a file, and checks that it is still the listed one.
pub(super) async fn locate(
    hub: &Hub,
    repo: &str,
    commit: &str,
    file: &RemoteFile,
    generation: u64,
    until: Instant,
) -> Result<Location, RemoteError> {
    let mut after = vec!["resolve", commit];
    after.extend(file.key.split('/'));
    let url = hub.url(&[], repo, &after);
    let found = hub.follow(Method::HEAD, repo, Subject::File(&file.path, commit), url, until).await?;
    let changed = |what: &str, expected: &str, found: &str| {
        let failure = Failure::Changed { expected: expected.to_owned(), found: found.to_owned() };
        RemoteError::new(
            failure,
            hub.host(),
            &what_of(repo, file),
            format!("{what}: expected {expected}, found {found}"),
        )
    };
    let headers = &found.described;
    if let Some(other) = text_of(headers, "x-repo-commit").filter(|found| *found != commit) {
        return Err(changed("commit", commit, other));
    }
    let size = text_of(headers, "x-linked-size").and_then(|text| text.parse::<u64>().ok());
    if let Some(other) = size.filter(|size| *size != file.size_bytes) {
        return Err(changed("size in bytes", &file.size_bytes.to_string(), &other.to_string()));
    }
    let (Content::Sha256(digest) | Content::GitBlob(digest) | Content::Version { version: digest, .. }) = &file.content;
    let linked = text_of(headers, "x-linked-etag").map(unquoted);
    // Only the Hub's own tag is a digest. That of an answer without redirect is one unless a proxy made it.
    let own = || text_of(found.answer.headers(), ETAG).map(unquoted);
    let own = own().filter(|tag| !found.leads_out && tag.len() == digest.len());
    if let Some(other) = linked.or(own).filter(|tag| tag != digest) {
        return Err(changed("digest", digest, other));
    }
    Ok(Location { url: found.url, generation })
}

/// The name of a file in messages.
pub(super) fn what_of(repo: &str, file: &RemoteFile) -> String {
    format!("{repo}: {}", file.path)
}
