//! From the user's SOURCE to a directory or file of this machine, or to a repository of a service.
//!
//! A path that exists comes first. A name `org/name[@revision]` is looked for in the local cache of the Hugging Face Hub, then on
//! the Hub. A branch in the cache is compared with the Hub's; only if the Hub cannot be asked, the cache's own word counts. A
//! snapshot that lacks weight files is taken from the Hub, except for the blobs that are there.
//!
//! The cache is laid out as the hub's client leaves it:
//!
//! ```text
//! models--org--name/refs/main            the commit that `main` stands for
//! models--org--name/snapshots/<commit>/  symbolic links into ../../blobs
//! ```

#[cfg(feature = "hub")]
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

use ckfs_source::{
    WaitRegistry,
    remote::{RemoteRepository, open_url},
};

use super::super::{
    options::OpenOptions,
    problem::{CheckpointError, list_or_none},
};
#[cfg(feature = "hub")]
use ckfs_source::remote::{
    Backoff, Deadline, SharedCache,
    cache::default_directory,
    hub::{Hub, HubSettings},
};

/// A located repository or file.
#[derive(Clone)]
pub(crate) struct Located {
    pub(crate) path: PathBuf,
    pub(crate) label: String,
    pub(crate) revision: Option<String>,
    /// The listing of a remote repository. `path` is then its address.
    pub(crate) remote: Option<RemoteRepository>,
}

/// Fewest characters of a commit that count as its abbreviation.
const PREFIX_CHARS_MIN: usize = 4;

/// Finds a source: a path, a name in the Hub's cache, the Hub, another service.
pub(crate) fn locate(source: &str, options: &OpenOptions) -> Result<Located, CheckpointError> {
    let looking = options.fetches.begin_path(Path::new(source), "list");
    let path = PathBuf::from(source);
    if path.exists() {
        return Ok(Located { path, label: source.to_owned(), revision: None, remote: None });
    }
    drop(looking);
    let name = match source.split_once("://") {
        Some(("hf", name)) => name,
        Some((scheme, rest)) => {
            if let Some(name) = hub_page(rest).filter(|_| scheme == "https") {
                return Err(CheckpointError::Refused(format!("{source}: a page of the Hub: give {name}")));
            }
            let found = open_url(source, &options.remote).ok_or_else(|| CheckpointError::of_scheme(source, scheme))?;
            return found.map(remote).map_err(CheckpointError::Remote);
        }
        None => source,
    };
    let Some((repo, revision)) = repo_name(name).filter(|(repo, _)| !looks_like_a_file(repo)) else {
        return Err(CheckpointError::NotFound { source_name: source.to_owned() });
    };
    let name = Name { source, repo, revision: revision.unwrap_or("main") };
    let cache = options.hub_cache.clone().or_else(|| cache_directory(variable));
    let found = name.in_cache(cache.as_deref(), &options.fetches);
    if options.asks_hub { from_hub(&name, cache.as_deref(), found, options) } else { found }
}

/// A variable of the environment that is not empty.
fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The directory of the hub's cache, as its own client has it.
pub fn hub_cache_directory() -> Option<PathBuf> {
    cache_directory(variable)
}

/// The directory of the hub's cache, from the same variables in the same order as in the hub's client.
fn cache_directory(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(cache) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
        return Some(cache);
    }
    let home = variable("HF_HOME").or_else(|| {
        let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        Some(cache?.join("huggingface"))
    });
    Some(home?.join("hub"))
}

/// The name of the repository whose page on the Hub has this address, as a browser shows it:
/// `huggingface.co/org/name/tree/main`. The address of a file there is none.
fn hub_page(address: &str) -> Option<String> {
    let mut parts = address.trim_end_matches('/').split('/');
    if !["huggingface.co", "www.huggingface.co", "hf.co"].contains(&parts.next()?) {
        return None;
    }
    let (org, name) = (parts.next()?, parts.next()?);
    match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => Some(format!("{org}/{name}")),
        (Some("tree"), Some(revision), None) => Some(format!("{org}/{name}@{revision}")),
        _ => None,
    }
}

/// Whether a word without slash is rather a mistyped file: nothing on the Hub is requested by it.
fn looks_like_a_file(repo: &str) -> bool {
    const ENDINGS: [&str; 7] = ["safetensors", "pt", "pth", "bin", "gguf", "toml", "json"];
    let extension = Path::new(repo).extension().and_then(|extension| extension.to_str());
    !repo.contains('/') && extension.is_some_and(|extension| ENDINGS.contains(&extension))
}

/// A repository of a service.
fn remote(repository: RemoteRepository) -> Located {
    let (path, label) = (PathBuf::from(&repository.url), repository.label.clone());
    Located { path, label, revision: repository.revision.clone(), remote: Some(repository) }
}

/// A name of a repository on the Hub.
#[derive(Clone, Copy, Debug)]
struct Name<'a> {
    /// As the user typed it.
    source: &'a str,
    repo: &'a str,
    revision: &'a str,
}

impl Name<'_> {
    /// The snapshot in the Hub's cache.
    fn in_cache(&self, cache: Option<&Path>, fetches: &WaitRegistry) -> Result<Located, CheckpointError> {
        let Self { source, repo, revision } = *self;
        let (source_name, advice) = (source.to_owned(), String::new());
        let Some(cache) = cache else { return Err(CheckpointError::NoHome { source_name, advice }) };
        let dir = repo_directory(cache, repo);
        let _looking = fetches.begin_path(&dir, "list");
        if !dir.is_dir() {
            let near = same_letters(cache, &dir);
            return Err(CheckpointError::NotInCache { source_name, looked_in: dir, near, advice });
        }
        let commit = resolve(&dir, revision).map_err(|revisions| {
            let (place, revisions) = (dir.display(), list_or_none(&revisions));
            let found = format!("{repo}: no revision {revision:?} in {place}; there are: {revisions}");
            CheckpointError::NoRevision { found, advice }
        })?;
        Ok(snapshot(&dir, repo, commit))
    }
}

fn repo_directory(cache: &Path, repo: &str) -> PathBuf {
    cache.join(format!("models--{}", repo.replace('/', "--")))
}

/// The repository in the cache whose name differs in the case of letters only.
fn same_letters(cache: &Path, dir: &Path) -> Option<String> {
    const ENTRIES_MAX: usize = 10_000;
    let wanted = dir.file_name()?.to_str()?;
    let names =
        fs::read_dir(cache).ok()?.take(ENTRIES_MAX).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let near = names.filter(|name| name.eq_ignore_ascii_case(wanted)).min()?;
    Some(near.strip_prefix("models--")?.replace("--", "/"))
}

fn snapshot(dir: &Path, repo: &str, commit: String) -> Located {
    Located {
        path: dir.join("snapshots").join(&commit),
        label: format!("{repo}@{}", commit.get(..12).unwrap_or(&commit)),
        revision: Some(commit),
        remote: None,
    }
}

#[cfg(not(feature = "hub"))]
fn from_hub(
    _name: &Name<'_>,
    _cache: Option<&Path>,
    found: Result<Located, CheckpointError>,
    _options: &OpenOptions,
) -> Result<Located, CheckpointError> {
    found.map_err(|error| error.with_advice("\n  Hub: not asked, this program was built without the feature `hub`"))
}

/// The place of a name whose snapshot in the Hub's cache is `found`.
#[cfg(feature = "hub")]
fn from_hub(
    name: &Name<'_>,
    cache: Option<&Path>,
    found: Result<Located, CheckpointError>,
    options: &OpenOptions,
) -> Result<Located, CheckpointError> {
    let mut settings =
        HubSettings::from_environment(variable, options.remote.allow_http).map_err(CheckpointError::Remote)?;
    settings.offline |= options.remote.offline;
    let is_offline = settings.offline;
    let complete = found.as_ref().ok().filter(|found| !lacks_weights(&found.path));
    // A commit never changes. A branch does, unless the Hub may not be asked.
    let names_commit =
        |found: &Located| found.revision.as_deref().is_some_and(|commit| commit.starts_with(name.revision));
    if let Some(found) = complete.filter(|found| is_offline || names_commit(found)) {
        return Ok(found.clone());
    }
    let deadline = match complete {
        // The answer in the cache will do if none comes soon.
        Some(_) => Deadline::At(Instant::now() + options.remote.timeout.min(REVALIDATE)),
        None => Deadline::Quiet,
    };
    let kept = options.remote.cache_dir.clone().or_else(default_directory);
    let counters = Arc::clone(options.cache().counters());
    let host = settings.endpoint.host_str().unwrap_or_default();
    let gate = Backoff::new(host, options.remote.timeout, &options.remote.waits, counters);
    let hub = Arc::new(Hub::new(settings, kept.as_deref(), gate).map_err(CheckpointError::Remote)?);
    let wanted = found.as_ref().ok().filter(|found| names_commit(found)).and_then(|found| found.revision.as_deref());
    let commit = match (hub.commit(name.repo, wanted.unwrap_or(name.revision), deadline), complete) {
        (Ok(commit), _) => commit,
        (Err(error), Some(found)) => {
            tracing::warn!("{}: the commit in the hub cache is used, as the Hub cannot be asked: {error}", found.label);
            return Ok(found.clone());
        }
        (Err(_), None) if is_offline => {
            let advice = format!(
                "\n  Hub: not asked, --offline or HF_HUB_OFFLINE forbids it\n`ckfs fetch {}` brings it where the network may be used",
                name.source
            );
            // A snapshot that lacks files says which when it is opened.
            return found.map_err(|error| error.with_advice(&advice));
        }
        // A Hub that gave no answer says nothing about the name. What is there says which files it lacks when it is opened.
        (Err(error), None) if error.is_transient() => {
            if found.is_ok() {
                tracing::warn!("{}: the Hub cannot be asked: {error}", name.source);
            }
            let advice = format!(
                "\n  Hub: cannot be asked: {}\n`ckfs fetch {}` brings it where the Hub can be reached, and --offline then asks nobody",
                error.brief(),
                name.source
            );
            return found.map_err(|missing| missing.with_advice(&advice));
        }
        (Err(error), None) => return Err(CheckpointError::Remote(error)),
    };
    let dir = cache.map(|cache| repo_directory(cache, name.repo));
    if let Some(dir) = &dir {
        let local = snapshot(dir, name.repo, commit.clone());
        if local.path.is_dir() && !lacks_weights(&local.path) {
            return Ok(local);
        }
    }
    let cached = dir.map(|dir| SharedCache::new(dir, &commit, name.revision));
    let listed = hub.repository(name.repo, &commit, cached, options.remote.shares, Deadline::Quiet);
    listed.map(remote).map_err(CheckpointError::Remote)
}

/// Longest wait for the Hub's word on a branch that is in the cache.
#[cfg(feature = "hub")]
const REVALIDATE: Duration = Duration::from_secs(10);

/// Whether a snapshot lacks weight files, as far as it tells itself: by its index, or by having none at all.
#[cfg(feature = "hub")]
fn lacks_weights(snapshot: &Path) -> bool {
    const INDEXES: [&str; 2] = ["model.safetensors.index.json", "pytorch_model.bin.index.json"];
    for name in INDEXES {
        let Ok(text) = fs::read(snapshot.join(name)) else { continue };
        // A malformed index is refused when the snapshot is opened.
        let Ok(index) = ckfs_format::json::tree(&text) else { return false };
        let Some(map) = index.get("weight_map").and_then(serde_json::Value::as_object) else { return false };
        let files: BTreeSet<&str> = map.values().filter_map(serde_json::Value::as_str).collect();
        return files.into_iter().any(|file| !snapshot.join(file).is_file());
    }
    let is_weights = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| ["safetensors", "bin", "pt", "pth", "gguf"].contains(&extension))
            && path.is_file()
    };
    let mut entries = fs::read_dir(snapshot).into_iter().flatten().flatten();
    !entries.any(|entry| is_weights(&entry.path()) || entry.path().is_dir())
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
    let names = |directory: &Path| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    };
    let commits: Vec<String> = names(&snapshots).into_iter().filter(|commit| has(commit)).collect();
    let mut matching = commits.iter().filter(|commit| commit.starts_with(revision));
    match (matching.next(), matching.next()) {
        (Some(only), None) if revision.len() >= PREFIX_CHARS_MIN => Ok(only.clone()),
        // Branches first, which people type.
        _ => {
            let commit_of = |name: &String| fs::read_to_string(repo.join("refs").join(name)).ok();
            let leads = |name: &String| commit_of(name).is_some_and(|commit| has(commit.trim()));
            let branches = names(&repo.join("refs")).into_iter().filter(leads);
            Err(branches.chain(commits.iter().cloned()).collect())
        }
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
            let found = cache_directory(|name| set.contains(&name).then(|| PathBuf::from(format!("/{name}"))));
            assert_eq!(found, Some(PathBuf::from(expected)));
        }
        assert_eq!(cache_directory(|_| None), None);
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
