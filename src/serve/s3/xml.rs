//! Answers of S3 as XML.

use std::{fmt::Write, time::SystemTime};

use ckfs_source::calendar::utc;
use http::StatusCode;

use super::{
    super::{
        answer::{self, Reply},
        listing::escaped,
        path,
        tree::{FoundNode, ServedTree},
    },
    keys::{KeyRow, ListedKeys},
    signature::BUCKET,
};

/// Content type of XML.
const XML: &str = "application/xml";

/// The namespace of answers.
const NAMESPACE: &str = "http://s3.amazonaws.com/doc/2006-03-01/";

/// What a list repeats of its request.
#[derive(Debug)]
pub(super) struct ShownList {
    pub(super) prefix: String,
    pub(super) delimited: bool,
    pub(super) max: usize,
    /// Whether keys are encoded as in addresses.
    pub(super) encoded: bool,
    pub(super) start_after: Option<String>,
    pub(super) token: Option<String>,
}

fn document(text: &str) -> Reply {
    answer::of_text(StatusCode::OK, XML, format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{text}"))
}

/// An error.
pub(super) fn error(status: StatusCode, code: &str, message: &str, resource: &str) -> Reply {
    let (message, resource) = (escaped(message), escaped(resource));
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message><Resource>{resource}\
         </Resource></Error>"
    );
    answer::of_text(status, XML, text)
}

/// The only bucket.
pub(super) fn buckets(created: SystemTime) -> Reply {
    let created = time(created);
    document(&format!(
        "<ListAllMyBucketsResult xmlns=\"{NAMESPACE}\"><Owner><ID>ckfs</ID></Owner><Buckets><Bucket><Name>{BUCKET}</Name>\
         <CreationDate>{created}</CreationDate></Bucket></Buckets></ListAllMyBucketsResult>"
    ))
}

/// The region of the bucket, which says nothing for the oldest one.
pub(super) fn location() -> Reply {
    document(&format!("<LocationConstraint xmlns=\"{NAMESPACE}\"></LocationConstraint>"))
}

/// A list of keys.
pub(super) fn list(tree: &ServedTree, listed: &ListedKeys, shown: &ShownList) -> Reply {
    let key = |text: &str| if shown.encoded { path::encoded(text) } else { escaped(text) };
    let mut text = format!("<ListBucketResult xmlns=\"{NAMESPACE}\">");
    let mut add = |name: &str, value: &str| text.extend(["<", name, ">", value, "</", name, ">"]);
    add("Name", BUCKET);
    add("Prefix", &key(&shown.prefix));
    add("KeyCount", &listed.rows.len().to_string());
    add("MaxKeys", &shown.max.to_string());
    if shown.delimited {
        add("Delimiter", "/");
    }
    if shown.encoded {
        add("EncodingType", "url");
    }
    if let Some(start) = &shown.start_after {
        add("StartAfter", &key(start));
    }
    if let Some(token) = &shown.token {
        add("ContinuationToken", &escaped(token));
    }
    add("IsTruncated", if listed.next.is_some() { "true" } else { "false" });
    if let Some(next) = &listed.next {
        add("NextContinuationToken", &next.token());
    }
    for row in &listed.rows {
        match row {
            KeyRow::Object { key: name, attr } => {
                let node = FoundNode { path: name.clone(), attr: *attr };
                let tag = tree.etag(&node).map_or_else(String::new, |tag| format!("<ETag>{}</ETag>", escaped(&tag)));
                let (name, modified) = (key(name), time(attr.modified));
                // Writing to a text never fails.
                let _ = write!(
                    text,
                    "<Contents><Key>{name}</Key><LastModified>{modified}</LastModified>{tag}<Size>{}</Size><StorageClass>STANDARD\
                     </StorageClass></Contents>",
                    attr.size_bytes
                );
            }
            KeyRow::Prefix(prefix) => {
                text.extend(["<CommonPrefixes><Prefix>", &key(prefix), "</Prefix></CommonPrefixes>"]);
            }
        }
    }
    text.push_str("</ListBucketResult>");
    document(&text)
}

fn time(time: SystemTime) -> String {
    utc(time).replace('Z', ".000Z")
}

/// A time as headers have it.
pub(super) fn http_date(time: SystemTime) -> String {
    httpdate::fmt_http_date(time)
}
