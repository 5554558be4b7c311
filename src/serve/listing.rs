//! Directories as JSON and as pages. They are made in parts as the client takes them: a directory may have hundreds of thousands of
//! entries.

use std::{fmt::Write, io, sync::Arc};

use bytes::Bytes;
use ckfs_source::calendar::utc;
use ckfs_volume::{Attr, NodeKind};
use http::{
    HeaderMap, StatusCode,
    header::{ACCEPT, CONTENT_SECURITY_POLICY, VARY},
};
use serde_json::json;

use super::{
    answer::{self, Reply},
    body::{ReplyBody, TextParts},
    gate::Visitor,
    path,
    tree::{FoundNode, NoNode, ServedEntry, ServedTree},
};

/// Entries of one part.
const PART_ENTRIES: usize = 512;

/// Whether a request asks for JSON: it has a page, unless JSON comes first in `Accept`.
fn asks_json(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut kinds = accept.split(',').map(|kind| kind.split(';').next().unwrap_or_default().trim());
    let known = kinds.find(|kind| matches!(*kind, "application/json" | "text/html" | "application/xhtml+xml"));
    known == Some("application/json")
}

/// A listing that is made as the client takes it, or `at_once`, by a thread that may take a while.
///
/// # Errors
/// [`NoNode::Failed`], of one that is made at once.
pub(super) fn of_directory(
    tree: &Arc<ServedTree>,
    visitor: Visitor,
    node: &FoundNode,
    headers: &HeaderMap,
    at_once: bool,
) -> Result<Reply, NoNode> {
    let as_json = asks_json(headers);
    let parts = parts(Arc::clone(tree), visitor, node.clone(), as_json);
    let body = if at_once {
        let whole: Vec<Bytes> = std::iter::from_fn(parts).collect::<io::Result<_>>().map_err(|_| NoNode::failed())?;
        ReplyBody::of(whole.concat())
    } else {
        ReplyBody::of_parts(parts)
    };
    let reply = answer::of_body(StatusCode::OK, if as_json { answer::JSON } else { answer::HTML }, body);
    let reply = answer::with_header(reply, VARY, "Accept");
    Ok(answer::with_header(reply, CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'"))
}

/// The text of a listing in parts.
fn parts(tree: Arc<ServedTree>, visitor: Visitor, node: FoundNode, as_json: bool) -> TextParts {
    let mut next = Some(0);
    let mut is_first = true;
    let mut has_rows = false;
    Box::new(move || {
        let from = next?;
        // Who may not pass a directory may see its names, and no more.
        let may_pass = visitor.may_pass(&node.attr);
        let attr = |entry: &ServedEntry| may_pass.then(|| tree.fs.attr(entry.ino)).transpose();
        let listed = tree.entries(visitor, node.attr.ino, from, PART_ENTRIES).and_then(|(entries, following)| {
            let attrs = entries.iter().map(attr).collect::<Result<Vec<_>, _>>()?;
            Ok((entries.into_iter().zip(attrs), following))
        });
        let Ok((entries, following)) = listed else {
            next = None;
            return Some(Err(io::Error::other("a step was deleted, or its storage gives no answer")));
        };
        next = following;
        let mut text = String::new();
        if std::mem::take(&mut is_first) {
            begin(&mut text, &node, as_json);
        }
        for (entry, attr) in entries {
            if as_json {
                text.push_str(if has_rows { ",\n" } else { "\n" });
            }
            has_rows = true;
            row(&mut text, attr, &node.path, &entry, as_json);
        }
        if next.is_none() {
            text.push_str(if as_json { "\n]\n" } else { "</table>\n" });
        }
        Some(Ok(Bytes::from(text)))
    })
}

fn begin(text: &mut String, node: &FoundNode, as_json: bool) {
    if as_json {
        text.push('[');
        return;
    }
    let shown = escaped(&node.path);
    // Writing to a text never fails.
    let _ = write!(
        text,
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>/{shown}</title>\n<style>\nbody {{ font-family: \
         monospace; margin: 2em }}\ntd {{ padding-right: 2em }}\ntd:nth-child(2) {{ text-align: right }}\n</style>\n<h1>/{shown}</h1>\n\
         <table>\n"
    );
    if let Some((above, _)) = node.path.rsplit_once('/').or((!node.path.is_empty()).then_some(("", ""))) {
        let _ = writeln!(text, "<tr><td><a href=\"/files/{}\">../</a><td><td>", path::encoded(above));
    }
}

fn row(text: &mut String, attr: Option<Attr>, above: &str, entry: &ServedEntry, as_json: bool) {
    let size_bytes = attr.filter(|_| entry.kind == NodeKind::File).map(|attr| attr.size_bytes);
    let modified = attr.map(|attr| utc(attr.modified));
    let kind = match entry.kind {
        NodeKind::Directory => "directory",
        NodeKind::File => "file",
        NodeKind::Symlink => "symlink",
    };
    if as_json {
        let mut row = json!({ "name": entry.name, "type": kind, "mtime": modified });
        if let Some(bytes) = size_bytes {
            row["size"] = bytes.into();
        }
        let _ = write!(text, "{row}");
        return;
    }
    let slash = if entry.kind == NodeKind::File { "" } else { "/" };
    let whole = if above.is_empty() { entry.name.clone() } else { format!("{above}/{}", entry.name) };
    let (address, name) = (path::encoded(&whole), escaped(&entry.name));
    let size = size_bytes.map_or_else(String::new, |bytes| bytes.to_string());
    let modified = modified.unwrap_or_default();
    let _ = writeln!(text, "<tr><td><a href=\"/files/{address}{slash}\">{name}{slash}</a><td>{size}<td>{modified}");
}

/// A text for a page.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_for_those_who_ask_for_it_first() {
        for (accept, expected) in [
            (None, false),
            (Some("*/*"), false),
            (Some("application/json"), true),
            (Some("application/json;q=0.9, */*"), true),
            (Some("text/html,application/xhtml+xml,application/json"), false),
            (Some("application/json, text/html"), true),
        ] {
            let headers = accept.map(|text| (ACCEPT, text.parse().unwrap())).into_iter().collect();
            assert_eq!(asks_json(&headers), expected, "{accept:?}");
        }
        assert_eq!(escaped("<a href='x'>&\""), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;");
    }
}
