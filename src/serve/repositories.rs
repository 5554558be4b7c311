//! The repositories of a server: `hf/` of each view, by name and revision.

use std::{path::Path, sync::Arc};

use ckfs_config::{Config, RepoName, ViewConfig};
use ckfs_service::identity;
use ckfs_volume::{Ino, NodeKind, Volume};

use super::{
    gate::Visitor,
    tree::{FoundNode, NoNode, ServedTree},
};

/// The directory of a view that is a repository.
const DIRECTORY: &str = "hf";

/// The organization of repositories that have no other.
const OWN_ORGANIZATION: &str = "ckfs";

/// The branch that every repository has.
pub(super) const BRANCH: &str = "main";

/// Most bytes of a file whose object name is the id that git gives its bytes. The Hub keeps larger ones under other names too.
const GIT_BYTES_MAX: u64 = 10 << 20;

/// The name of a branch, however a revision says it.
pub(super) fn branch_of(revision: &str) -> &str {
    match revision.strip_prefix("refs/heads/").unwrap_or(revision) {
        "HEAD" => BRANCH,
        name => name,
    }
}

/// One revision of a repository.
#[derive(Clone)]
pub(super) struct ServedRepository {
    /// `org/name`.
    pub(super) id: String,
    /// 40 hexadecimal digits.
    pub(super) commit: String,
    pub(super) tree: Arc<ServedTree>,
    /// Its directory.
    pub(super) root: FoundNode,
}

/// Why there is no such repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoRepository {
    /// No such name.
    Name,
    /// No such revision; what there is.
    Revision(String),
    /// The sources' permissions do not let this visitor read the run.
    Denied,
    /// The step cannot be read: why.
    Failed(String),
}

impl ServedRepository {
    /// The object name of an entry, which is the entity tag of a file, without quotes. It tells of bytes only who may read them.
    pub(super) async fn tag(&self, visitor: Visitor, entry: &FoundNode) -> String {
        let FoundNode { path, attr } = entry;
        let version = identity::file_digest(&self.commit, path, attr.size_bytes);
        if entry.is_file() && attr.size_bytes <= GIT_BYTES_MAX && visitor.may_read(attr) {
            self.tree.reads.blob_id(version, attr.ino, attr.size_bytes).await
        } else {
            version
        }
    }

    /// Whether a visitor may go to its directory, which need not be one whose names this visitor may see.
    pub(super) fn is_open_to(&self, visitor: Visitor) -> bool {
        let below = self.root.path.strip_prefix(&self.tree.root.path).unwrap_or(&self.root.path);
        let names: Vec<String> = below.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        self.tree.reach(visitor, &self.tree.root, &names).is_ok()
    }

    /// All entries below a directory of it, or only those in it, with their paths in the repository; directories come before what is in them. Of a directory whose entries
    /// the visitor may not see, only itself.
    ///
    /// # Errors
    /// As [`ServedTree::entries`].
    pub(super) fn entries(
        &self,
        visitor: Visitor,
        below: &FoundNode,
        recursive: bool,
    ) -> Result<Vec<FoundNode>, NoNode> {
        if !visitor.may_list(&below.attr) {
            return Err(NoNode::Denied);
        }
        let mut found = Vec::new();
        let mut pending: Vec<(String, Ino)> = vec![(self.entry(below).path, below.attr.ino)];
        while let Some((above, directory)) = pending.pop() {
            let mut directories = Vec::new();
            for entry in self.tree.without_links(visitor, directory)? {
                let path = if above.is_empty() { entry.name } else { format!("{above}/{}", entry.name) };
                let attr = self.tree.fs.attr(entry.ino)?;
                if entry.kind == NodeKind::Directory && visitor.may_list(&attr) {
                    directories.push((path.clone(), entry.ino));
                }
                found.push(FoundNode { path, attr });
            }
            if recursive {
                pending.extend(directories.into_iter().rev());
            }
        }
        Ok(found)
    }

    /// A node as an entry of the repository: with its path there.
    pub(super) fn entry(&self, node: &FoundNode) -> FoundNode {
        let path = node.path.strip_prefix(&self.root.path).unwrap_or(&node.path);
        FoundNode { path: path.trim_start_matches('/').to_owned(), attr: node.attr }
    }
}

/// The repository of a view of a tree, if it has one.
pub(super) fn of_view(tree: &Arc<ServedTree>, view: &str, id: &str, commit: String) -> Option<ServedRepository> {
    let names: Vec<String> = [view, DIRECTORY].map(str::to_owned).into_iter().collect();
    let root = tree.find(Visitor::Trusted, &tree.root, &names).ok()?;
    Some(ServedRepository { id: id.to_owned(), commit, tree: Arc::clone(tree), root })
}

/// The name of a view's repository: that of the only view is the user's, or else its own.
pub(super) fn id_of(view: &ViewConfig, name: Option<&RepoName>, own: impl FnOnce() -> String) -> String {
    match (&*view.name, name) {
        ("", Some(name)) => name.as_str().to_owned(),
        ("", None) => own(),
        (view, _) => of_own_organization(view),
    }
}

/// The name of the only view: the source's own on the Hub, else that of its directory or file.
pub(super) fn own_name(volume: &Volume, config: &Config) -> String {
    let checkpoint = volume.engine().checkpoint();
    let label = checkpoint.label().split('@').next().unwrap_or_default();
    if checkpoint.revision().is_some()
        && let Ok(name) = RepoName::parse(label)
    {
        return name.as_str().to_owned();
    }
    name_of_source(config)
}

/// The name of a source's directory or file.
pub(super) fn name_of_source(config: &Config) -> String {
    let source = config.source.as_deref().unwrap_or_default();
    let last = source.split('@').next().unwrap_or_default().trim_end_matches('/').rsplit('/').next();
    let last = Path::new(last.unwrap_or_default());
    let is_file =
        last.extension().is_some_and(|end| ["safetensors", "pt", "pth", "bin"].iter().any(|known| end == *known));
    let name = if is_file { last.file_stem() } else { last.file_name() };
    of_own_organization(&name.unwrap_or_default().to_string_lossy())
}

/// `ckfs/NAME`, where characters that names may not have are dashes.
fn of_own_organization(name: &str) -> String {
    let known = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '-' };
    let name: String = name.chars().map(known).collect();
    let mut name = name.trim_matches(['-', '.']).to_owned();
    for (twice, once) in [("--", "-"), ("..", ".")] {
        while name.contains(twice) {
            name = name.replace(twice, once);
        }
    }
    let whole = format!("{OWN_ORGANIZATION}/{name}");
    RepoName::parse(&whole).map_or_else(|_| format!("{OWN_ORGANIZATION}/model"), |name| name.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_has_a_name_that_clients_take() {
        for (name, expected) in [
            ("llama", "ckfs/llama"),
            ("Llama-3.1_8B", "ckfs/Llama-3.1_8B"),
            ("my model (1)", "ckfs/my-model-1"),
            (".hidden..x--y", "ckfs/hidden.x-y"),
            ("", "ckfs/model"),
            ("größe", "ckfs/gr-e"),
            ("x.git", "ckfs/model"),
        ] {
            assert_eq!(of_own_organization(name), expected);
        }
    }
}
