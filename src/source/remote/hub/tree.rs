//! The answers of the Hub's API: a revision's commit, and the files of the commit.

use ckfs_host::RelativePath;
use reqwest::header::{HeaderMap, LINK};
use serde::Deserialize;

use super::super::{
    super::digest::{SHA1_DIGITS, SHA256_DIGITS, is_hex},
    interface::{Content, RemoteFile},
};

/// The answer about a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Revision {
    pub(super) sha: String,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

/// An entry of the tree.
#[derive(Debug, Deserialize)]
pub(super) struct HubEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Lfs>,
}

impl HubEntry {
    /// The file, or `None` for a directory. `repo` is the repository with its host.
    ///
    /// # Errors
    /// What is wrong with the entry.
    pub(super) fn file(self, repo: &str) -> Result<Option<RemoteFile>, String> {
        let Self { kind, path, size, oid, lfs } = self;
        if kind != "file" {
            return Ok(None);
        }
        if let Err(flaw) = RelativePath::parse(&path) {
            let (shown, more) = path.char_indices().nth(80).map_or((&*path, ""), |(end, _)| (&path[..end], "..."));
            return Err(format!("file {shown:?}{more}: not a path inside the repository: {flaw}"));
        }
        let (size_bytes, content) = match lfs {
            Some(Lfs { oid, size }) if is_hex(&oid, SHA256_DIGITS) => (size, Content::Sha256(oid)),
            None if is_hex(&oid, SHA1_DIGITS) => (size, Content::GitBlob(oid)),
            None if is_version(&oid) => (size, Content::Version { object: format!("{repo}/{path}"), version: oid }),
            Some(Lfs { oid, .. }) => return Err(format!("file {path:?}: expected a SHA-256, found {oid:?}")),
            None => return Err(format!("file {path:?}: expected a SHA-1, found {oid:?}")),
        };
        let key = path.clone();
        Ok(Some(RemoteFile { path, key, size_bytes, content, etag: None, modified_seconds: None }))
    }
}

/// Whether an object's name is a version of `ckfs serve`, which makes bytes when they are read and knows no digest of them before.
fn is_version(oid: &str) -> bool {
    oid.strip_prefix("ckfs-").is_some_and(|digits| is_hex(digits, SHA1_DIGITS))
}

/// The address of the next page, from `Link: <address>; rel="next"`.
pub(super) fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    links.flat_map(|value| value.split(',')).find_map(|link| {
        let (address, parameters) = link.split_once(';')?;
        let is_next = parameters.split(';').any(|one| matches!(one.trim(), r#"rel="next""# | "rel=next"));
        let address = address.trim().strip_prefix('<')?.strip_suffix('>')?;
        is_next.then(|| address.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str) -> Result<Option<RemoteFile>, String> {
        serde_json::from_str::<HubEntry>(json).unwrap().file("host/org/name")
    }

    #[test]
    fn large_files_have_the_size_and_digest_of_their_content() {
        let sha1 = "a".repeat(40);
        let sha256 = "b".repeat(64);
        let found = file(&format!(
            r#"{{"type":"file","path":"x/m.safetensors","size":134,"oid":"{sha1}","xetHash":"c",
                "lfs":{{"oid":"{sha256}","size":5000000000,"pointerSize":134}}}}"#
        ));
        let found = found.unwrap().unwrap();
        assert_eq!((found.path.as_str(), found.size_bytes), ("x/m.safetensors", 5_000_000_000));
        assert_eq!(found.content, Content::Sha256(sha256));
        let found = file(&format!(r#"{{"type":"file","path":"config.json","size":7,"oid":"{sha1}"}}"#));
        assert_eq!(found.unwrap().unwrap().content, Content::GitBlob(sha1));
        let version = format!("ckfs-{}", "a".repeat(40));
        let found = file(&format!(r#"{{"type":"file","path":"a/b","size":7,"oid":"{version}"}}"#)).unwrap().unwrap();
        assert_eq!(found.content, Content::Version { object: "host/org/name/a/b".to_owned(), version });
        assert_eq!(file(r#"{"type":"directory","path":"x","oid":"","size":0}"#), Ok(None));
    }

    #[test]
    fn paths_and_digests_that_could_leave_the_cache_are_refused() {
        let sha1 = "a".repeat(40);
        for path in ["../x", "/etc/passwd", "a//b", "a/..", "", "a\\\\b"] {
            file(&format!(r#"{{"type":"file","path":"{path}","size":7,"oid":"{sha1}"}}"#)).unwrap_err();
        }
        for oid in ["", "../../x", "AB", "ckfs-", "ckfs-../../x"] {
            file(&format!(r#"{{"type":"file","path":"x","size":7,"oid":"{oid}"}}"#)).unwrap_err();
            file(&format!(r#"{{"type":"file","path":"x","oid":"{sha1}","lfs":{{"oid":"{oid}","size":1}}}}"#))
                .unwrap_err();
        }
    }

    #[test]
    fn the_next_page_is_found_among_links() {
        let of = |text: &'static str| next_page(&[(LINK, text.parse().unwrap())].into_iter().collect());
        let next = Some("https://hub/api?cursor=x%3D".to_owned());
        assert_eq!(of(r#"<https://hub/api?cursor=x%3D>; rel="next""#), next);
        assert_eq!(of(r#"<https://hub/first>; rel="first", <https://hub/api?cursor=x%3D>; rel="next""#), next);
        assert_eq!(of(r#"<https://hub/api>; rel="prev""#), None);
        assert_eq!(of("nonsense"), None);
    }
}
