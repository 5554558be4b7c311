//! From the user's SOURCE to a directory or file: a path, or a name in the local cache of the Hugging Face hub.
//!
//! The cache is laid out as the hub's client leaves it:
//!
//! ```text
//! models--org--name/refs/main            the commit that `main` stands for
//! models--org--name/snapshots/<commit>/  symbolic links into ../../blobs
//! ```

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use super::{options::OpenOptions, problem::CheckpointError};
use crate::source::remote::{RemoteRepository, open_url};

/// A located repository or file.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) path: PathBuf,
    pub(super) label: String,
    pub(super) revision: Option<String>,
    /// The listing of a remote repository. `path` is then its address.
    pub(super) remote: Option<RemoteRepository>,
}

/// Fewest characters of a commit that count as its abbreviation.
const PREFIX_CHARS_MIN: usize = 4;

pub(super) fn locate(source: &str, options: &OpenOptions) -> Result<Located, CheckpointError> {
    let path = PathBuf::from(source);
    if path.exists() {
        return Ok(Located { path, label: source.to_owned(), revision: None, remote: None });
    }
    if let Some((scheme, _)) = source.split_once("://") {
        if let Some(found) = open_url(source, &options.remote) {
            let repository = found.map_err(CheckpointError::Remote)?;
            let (path, label) = (PathBuf::from(&repository.url), repository.label.clone());
            return Ok(Located { path, label, revision: repository.revision.clone(), remote: Some(repository) });
        }
        return Err(CheckpointError::NotSupported { source_name: source.to_owned(), scheme: scheme.to_owned() });
    }
    let Some((repo, revision)) = repo_name(source) else {
        return Err(CheckpointError::NotFound { source_name: source.to_owned() });
    };
    let cache = match options.hub_cache.as_deref() {
        Some(dir) => dir.to_path_buf(),
        None => cache_from_environment(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
            .ok_or_else(|| CheckpointError::NotFound { source_name: source.to_owned() })?,
    };
    let dir = cache.join(format!("models--{}", repo.replace('/', "--")));
    if !dir.is_dir() {
        return Err(CheckpointError::NotInCache { source_name: source.to_owned(), looked_in: dir });
    }
    let revision = revision.unwrap_or("main");
    let commit = resolve(&dir, revision).map_err(|revisions| CheckpointError::NoRevision {
        repo: repo.to_owned(),
        revision: revision.to_owned(),
        looked_in: dir.clone(),
        revisions,
    })?;
    Ok(Located {
        path: dir.join("snapshots").join(&commit),
        label: format!("{repo}@{}", commit.get(..12).unwrap_or(&commit)),
        revision: Some(commit),
        remote: None,
    })
}

/// The directory of the hub's cache, from the same variables in the same order as in the hub's client.
fn cache_from_environment(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(cache) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
        return Some(cache);
    }
    let home = variable("HF_HOME").or_else(|| {
        let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        Some(cache?.join("huggingface"))
    });
    Some(home?.join("hub"))
}

/// Splits `org/name[@revision]` or `name[@revision]`. `None` if the text cannot name a repository.
fn repo_name(source: &str) -> Option<(&str, Option<&str>)> {
    let (repo, revision) = source.split_once('@').map_or((source, None), |(repo, revision)| (repo, Some(revision)));
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && !part.contains("--")
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
    };
    let parts = repo.split('/').count();
    (parts <= 2 && repo.split('/').all(valid) && revision.is_none_or(valid_revision)).then_some((repo, revision))
}

/// A branch, tag or commit. It may have slashes (`refs/pr/1`) but never leaves its directory.
fn valid_revision(revision: &str) -> bool {
    revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.')) && !revision.contains('\0')
}

/// The commit of `revision`, if it has a snapshot. Otherwise the available revisions.
fn resolve(repo: &Path, revision: &str) -> Result<String, Vec<String>> {
    let snapshots = repo.join("snapshots");
    let has = |commit: &str| valid_revision(commit) && !commit.contains('/') && snapshots.join(commit).is_dir();
    if let Ok(text) = fs::read_to_string(repo.join("refs").join(revision)) {
        let commit = text.trim();
        if has(commit) {
            return Ok(commit.to_owned());
        }
    }
    if has(revision) {
        return Ok(revision.to_owned());
    }
    let mut commits: Vec<String> = fs::read_dir(&snapshots)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|commit| has(commit))
        .collect();
    commits.sort();
    let mut matching = commits.iter().filter(|commit| commit.starts_with(revision));
    match (matching.next(), matching.next()) {
        (Some(only), None) if revision.len() >= PREFIX_CHARS_MIN => Ok(only.clone()),
        _ => Err(commits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_client_has_it() {
        let all = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"];
        let expected = [
            "/HF_HUB_CACHE",
            "/HUGGINGFACE_HUB_CACHE",
            "/HF_HOME/hub",
            "/XDG_CACHE_HOME/huggingface/hub",
            "/HOME/.cache/huggingface/hub",
        ];
        for (from, expected) in expected.iter().enumerate() {
            let set = &all[from..];
            let found = cache_from_environment(|name| set.contains(&name).then(|| PathBuf::from(format!("/{name}"))));
            assert_eq!(found, Some(PathBuf::from(expected)));
        }
        assert_eq!(cache_from_environment(|_| None), None);
    }

    #[test]
    fn names_of_repositories() {
        assert_eq!(repo_name("org/name"), Some(("org/name", None)));
        assert_eq!(repo_name("gpt2"), Some(("gpt2", None)));
        assert_eq!(repo_name("Org-1/na.me_2@refs/pr/1"), Some(("Org-1/na.me_2", Some("refs/pr/1"))));
        for bad in [
            "",
            "/a",
            "a/",
            "a/b/c",
            "../b",
            "a/..",
            "./a",
            "a b",
            "a--b/c",
            "a/b@",
            "a/b@../x",
            "a/b@x/../y",
            "a/b@/x",
        ] {
            assert_eq!(repo_name(bad), None, "{bad:?}");
        }
    }
}
