//! Answers of S3 as XML.

use std::{fmt::Write, time::SystemTime};

use ckfs_source::calendar::utc;
use http::{StatusCode, header::LAST_MODIFIED};

use super::{
    super::{
        answer::{self, Reply},
        listing::escaped,
        path,
        tree::{FileVersion, FoundNode, NoNode, ServedTree},
    },
    keys::{ListStart, ListedKeys},
    signature::BUCKET,
};

/// Content type of XML.
const XML: &str = "application/xml";

/// The namespace of answers.
const NAMESPACE: &str = "http://s3.amazonaws.com/doc/2006-03-01/";

/// How all objects are stored, as clients know it.
const STORAGE: &str = "STANDARD";

/// The owner of all objects.
const OWNER: &str = "<Owner><ID>ckfs</ID><DisplayName>ckfs</DisplayName></Owner>";

/// The version of a request for a list, and where it says that the list begins.
#[derive(Debug)]
pub(super) enum ListPaging {
    /// `ListObjects`: after a key, or after the keys that begin with a row of the list before.
    Marker(String),
    /// `ListObjectsV2`.
    Token { token: Option<String>, start_after: Option<String>, has_owner: bool },
    /// `ListObjectVersions`: as the first.
    Versions { marker: String },
}

impl ListPaging {
    /// Where the list begins; `None` for a token of no list.
    pub(super) fn start(&self, prefix: &str, delimited: bool) -> Option<ListStart> {
        let after = |text: &str, is_prefix| ListStart { text: text.to_owned(), is_prefix };
        match self {
            Self::Marker(marker) | Self::Versions { marker } => {
                let below = marker.strip_prefix(prefix).filter(|_| delimited);
                let is_row = below.and_then(|below| below.strip_suffix('/')).is_some_and(|name| !name.contains('/'));
                Some(after(marker, is_row))
            }
            Self::Token { token: Some(token), .. } => ListStart::of_token(token),
            Self::Token { start_after, .. } => Some(after(start_after.as_deref().unwrap_or_default(), false)),
        }
    }
}

/// What a list repeats of its request.
#[derive(Debug)]
pub(super) struct ShownList {
    pub(super) prefix: String,
    pub(super) delimited: bool,
    pub(super) max: usize,
    /// Whether keys are encoded as in addresses.
    pub(super) encoded: bool,
    pub(super) paging: ListPaging,
}

fn document(status: StatusCode, text: &str) -> Reply {
    answer::of_text(status, XML, format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{text}"))
}

/// An error.
pub(super) fn error(status: StatusCode, code: &str, message: &str, resource: &str) -> Reply {
    let (message, resource) = (escaped(message), escaped(resource));
    let inner = format!("<Code>{code}</Code><Message>{message}</Message><Resource>{resource}</Resource>");
    document(status, &format!("<Error>{inner}</Error>"))
}

/// The only bucket.
pub(super) fn buckets(created: SystemTime) -> Reply {
    let created = time(created);
    let inner = format!(
        "{OWNER}<Buckets><Bucket><Name>{BUCKET}</Name><CreationDate>{created}</CreationDate></Bucket></Buckets>"
    );
    of_root("ListAllMyBucketsResult", &inner)
}

/// A document with one root.
pub(super) fn of_root(root: &str, inner: &str) -> Reply {
    document(StatusCode::OK, &format!("<{root} xmlns=\"{NAMESPACE}\">{inner}</{root}>"))
}

/// These attributes of an object.
pub(super) fn attributes(asked: &[&str], version: &FileVersion, size_bytes: u64) -> Reply {
    let mut inner = String::new();
    let mut add = |name: &str, value: &str| inner.extend(["<", name, ">", value, "</", name, ">"]);
    for name in asked {
        match *name {
            "ETag" => add(name, version.etag.trim_matches('"')),
            "StorageClass" => add(name, STORAGE),
            "ObjectSize" => add(name, &size_bytes.to_string()),
            _ => {}
        }
    }
    dated(of_root("GetObjectAttributesResponse", &inner), version.since)
}

/// With the time of the last change: now, of what is made for each reader.
pub(super) fn dated(reply: Reply, since: Option<SystemTime>) -> Reply {
    let time = since.unwrap_or_else(SystemTime::now);
    answer::with_header(reply, LAST_MODIFIED, &httpdate::fmt_http_date(time))
}

/// A list of keys.
///
/// # Errors
/// As [`ServedTree::version_now`].
pub(super) fn list(tree: &ServedTree, listed: &ListedKeys, shown: &ShownList) -> Result<Reply, NoNode> {
    let key = |text: &str| if shown.encoded { path::encoded(text) } else { escaped(text) };
    let mut text = String::new();
    let mut add = |name: &str, value: &str| text.extend(["<", name, ">", value, "</", name, ">"]);
    add("Name", BUCKET);
    add("Prefix", &key(&shown.prefix));
    add("MaxKeys", &shown.max.to_string());
    if shown.delimited {
        add("Delimiter", "/");
    }
    if shown.encoded {
        add("EncodingType", "url");
    }
    add("IsTruncated", if listed.next.is_some() { "true" } else { "false" });
    let next = listed.next.as_ref();
    let (root, row_name, owner) = match &shown.paging {
        ListPaging::Marker(marker) => {
            add("Marker", &key(marker));
            if let Some(next) = next {
                add("NextMarker", &key(&next.text));
            }
            ("ListBucketResult", "Contents", OWNER)
        }
        ListPaging::Token { token, start_after, has_owner } => {
            add("KeyCount", &listed.rows.len().to_string());
            match (token, start_after) {
                (Some(token), _) => add("ContinuationToken", &escaped(token)),
                (None, Some(start)) => add("StartAfter", &key(start)),
                (None, None) => {}
            }
            if let Some(next) = next {
                add("NextContinuationToken", &next.token());
            }
            ("ListBucketResult", "Contents", if *has_owner { OWNER } else { "" })
        }
        ListPaging::Versions { marker } => {
            add("KeyMarker", &key(marker));
            add("VersionIdMarker", "");
            if let Some(next) = next {
                add("NextKeyMarker", &key(&next.text));
                add("NextVersionIdMarker", "null");
            }
            ("ListVersionsResult", "Version", OWNER)
        }
    };
    let version_id = if row_name == "Version" { "<VersionId>null</VersionId><IsLatest>true</IsLatest>" } else { "" };
    for row in &listed.rows {
        let name = key(&row.key);
        let Some(attr) = row.attr else {
            text.extend(["<CommonPrefixes><Prefix>", &name, "</Prefix></CommonPrefixes>"]);
            continue;
        };
        let FileVersion { etag, since } = tree.version_now(&FoundNode { path: row.key.clone(), attr })?;
        let (tag, modified) = (escaped(&etag), time(since.unwrap_or_else(SystemTime::now)));
        // Writing to a text never fails.
        let _ = write!(
            text,
            "<{row_name}><Key>{name}</Key>{version_id}<LastModified>{modified}</LastModified><ETag>{tag}</ETag><Size>{}</Size>\
             {owner}<StorageClass>{STORAGE}</StorageClass></{row_name}>",
            attr.size_bytes
        );
    }
    Ok(of_root(root, &text))
}

fn time(time: SystemTime) -> String {
    utc(time).replace('Z', ".000Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_a_key_or_a_row_of_a_list() {
        let start = |is_prefix| move |text: &str| ListStart { text: text.to_owned(), is_prefix };
        let (after, whole) = (start(false), start(true));
        for (marker, prefix, delimited, expected) in [
            ("", "", true, after("")),
            ("a/b", "", true, after("a/b")),
            ("a/", "", true, whole("a/")),
            ("a/", "", false, after("a/")),
            // The prefix itself is no row below it.
            ("a/", "a/", true, after("a/")),
            ("a/b/", "a/", true, whole("a/b/")),
            ("a/b/c/", "a/", true, after("a/b/c/")),
            ("a/bc/", "a/b", true, whole("a/bc/")),
            ("b/", "a/", true, after("b/")),
        ] {
            let paging = ListPaging::Marker(marker.to_owned());
            assert_eq!(paging.start(prefix, delimited), Some(expected), "{marker:?} {prefix:?}");
        }
    }
}
