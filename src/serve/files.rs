//! `/files/`: every file and directory of a volume.

use std::sync::Arc;

use ckfs_volume::NodeKind;
use http::{HeaderMap, Method, StatusCode};

use super::{
    answer::{self, Reply},
    file_reply::{self, AskedFile},
    gate::Visitor,
    listing, path,
    tree::{NoNode, ServedTree},
};

/// Answers a GET or HEAD of a path below `/files/`.
pub(super) async fn answer(
    tree: &Arc<ServedTree>,
    visitor: Visitor,
    path: &str,
    method: &Method,
    headers: &HeaderMap,
) -> Reply {
    let Ok(names) = path::names(path) else {
        return answer::failed(StatusCode::BAD_REQUEST, "expected a path of names, without . and ..");
    };
    let node = match tree.find(visitor, &tree.root(), &names) {
        Ok(node) => node,
        Err(NoNode::Absent) => {
            return answer::failed(StatusCode::NOT_FOUND, &format!("{}: no such file", names.join("/")));
        }
        Err(NoNode::Denied) => return file_reply::denied(&names.join("/"), visitor),
    };
    match node.attr.kind {
        NodeKind::Directory => listing::of_directory(tree, visitor, &node, headers),
        NodeKind::File => {
            let asked = AskedFile { reads: &tree.reads, node: &node, etag: tree.etag(&node) };
            file_reply::of_file(asked, method, headers).await
        }
        // Links were followed.
        NodeKind::Symlink => answer::failed(StatusCode::NOT_FOUND, "a link that leads nowhere"),
    }
}
