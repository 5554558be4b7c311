//! `/files/`: every file and directory that is served.

use ckfs_volume::NodeKind;
use http::{HeaderMap, Method, StatusCode, header::LOCATION};

use super::{
    answer::{self, Answered, Reply},
    file_reply,
    gate::Visitor,
    listing, path,
    served::{ServedPlace, ServedSource},
    steps::{LATEST, ServedRun},
    tree::{NoNode, TreeVersion},
};

/// Answers a GET or HEAD of a path below `/files/`.
pub(super) async fn answer(
    served: &ServedSource,
    visitor: Visitor,
    path: &str,
    method: &Method,
    headers: &HeaderMap,
) -> Answered {
    let malformed = || answer::failed(StatusCode::BAD_REQUEST, "expected a path of names, without . and ..");
    let names = path::names(path).ok_or_else(malformed)?;
    let none = |reason| no_node(reason, &names, visitor);
    let (tree, rest) = match served.place(visitor, &names).await.map_err(none)? {
        ServedPlace::Tree(tree, rest) => (tree, rest),
        ServedPlace::Text(text) => return file_reply::of_bytes(&names.join("/"), &text.into(), method, headers),
    };
    let node = tree.find(visitor, &tree.root, &rest).map_err(none)?;
    let is_directory = node.attr.kind == NodeKind::Directory;
    let elsewhere = match (names.split_first(), &tree.version) {
        // A name that leads elsewhere tomorrow is answered by the address of what it leads to now.
        (Some((first, below)), TreeVersion::Step { held, .. }) if first == LATEST => {
            Some(format!("{}/{}", held.number(), path::encoded(&below.join("/"))))
        }
        // Clients take a page at an address without the slash for a file.
        _ if is_directory && !path.ends_with('/') => Some(path::encoded(&names.join("/"))),
        _ => None,
    };
    if let Some(elsewhere) = elsewhere {
        let slash = if is_directory && !elsewhere.is_empty() && !elsewhere.ends_with('/') { "/" } else { "" };
        let address = format!("/files/{elsewhere}{slash}");
        let reply = answer::failed(StatusCode::TEMPORARY_REDIRECT, &address);
        return Ok(answer::with_header(reply, LOCATION, &address));
    }
    match node.attr.kind {
        NodeKind::Directory => match (served, &tree.version) {
            // The run's own files are made to tell their size, which takes a while.
            (ServedSource::Run(run), TreeVersion::Run(_)) => {
                let headers = headers.clone();
                let work = move |run: &ServedRun| {
                    run.unchanged(|| listing::of_directory(&tree, visitor, &node, &headers, true))
                };
                run.in_thread(&run.looking, work).await.unwrap_or_else(|_| Err(NoNode::failed())).map_err(none)
            }
            _ => listing::of_directory(&tree, visitor, &node, headers, false).map_err(none),
        },
        NodeKind::File => file_reply::of_file(&tree.reads, &node, tree.version(&node), method, headers).await,
        // Links were followed.
        NodeKind::Symlink => Err(answer::failed(StatusCode::NOT_FOUND, "a link that leads nowhere")),
    }
}

fn no_node(reason: NoNode, names: &[String], visitor: Visitor) -> Reply {
    match reason {
        NoNode::Absent => answer::failed(StatusCode::NOT_FOUND, &format!("{}: no such file", names.join("/"))),
        NoNode::Denied => file_reply::denied(&names.join("/"), visitor),
        NoNode::Failed(cause) => {
            let text = format!("{}: {cause}", names.join("/"));
            answer::failed(StatusCode::INTERNAL_SERVER_ERROR, &text)
        }
    }
}
