//! What would help after a failure, beyond what its message says.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use ckfs_checkpoint::{
    CheckpointError, OpenOptions, Problem, hub_cache_directory,
    runs::{StepDirectory, StepKind},
};
use ckfs_config::{ConfigError, nearest};
use ckfs_fuse::{DaemonError, MountError, UnmountError, ckfs_mounts};

use ckfs_service::own_mount_advice;
use ckfs_source::remote::url_schemes;

use super::{paragraph::counted, permission_hint::denied, tree::shown};

/// Entries of a directory among which a mistyped one is sought.
const ENTRIES_MAX: usize = 10_000;

const HOST: &str =
    "`ckfs doctor` examines what this host allows; `ckfs export` writes the same files to a directory without a mount";

/// A sentence on what would help; `None` where the message says it all.
pub(super) fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        if let Some(error) = cause.downcast_ref::<MountError>() {
            return after_mount(error).map(str::to_owned);
        }
        if let Some(error) = cause.downcast_ref::<DaemonError>() {
            return after_start(error).map(str::to_owned);
        }
        if let Some(UnmountError::Busy { .. }) = cause.downcast_ref() {
            return Some(
                "--wait TIME goes on trying; --lazy takes it away now, and open files stay readable until closed"
                    .to_owned(),
            );
        }
        if let Some(UnmountError::Path { path, .. } | UnmountError::NotMounted { path }) = cause.downcast_ref() {
            return near_mount(path);
        }
        if let Some(ConfigError::Read { file, .. }) = cause.downcast_ref() {
            return if file.exists() { None } else { proposed(near_path(file)).or_else(|| files_beside(file)) };
        }
        cause.downcast_ref::<CheckpointError>().and_then(after_open)
    })
}

/// The files of the same kind where a file is sought and not found.
fn files_beside(file: &Path) -> Option<String> {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(entries) = fs::read_dir(parent) else { return Some(format!("there is no directory {}", parent.display())) };
    let kind = file.extension().unwrap_or("toml".as_ref());
    let paths = entries.take(ENTRIES_MAX).filter_map(|entry| Some(entry.ok()?.path()));
    let mut names: Vec<String> = paths
        .filter(|path| path.extension() == Some(kind))
        .map(|path| path.file_name().unwrap_or_default().display().to_string())
        .collect();
    names.sort();
    (!names.is_empty()).then(|| format!("{} has {}", parent.display(), shown(&names)))
}

fn proposed(near: Option<String>) -> Option<String> {
    near.map(|near| format!("did you mean `{near}`?"))
}

/// The mount point above or below a path where nothing of ckfs is mounted. Any other mount may be somebody else's.
pub(super) fn near_mount(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).or_else(|_| std::path::absolute(path)).ok()?;
    let points = ckfs_mounts().into_iter().map(|mount| mount.mountpoint);
    proposed(above_or_below(&path, points).map(|near| near.display().to_string()))
}

/// The nearest directory above a path, or else the nearest below it if there is one only.
fn above_or_below(path: &Path, points: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let (above, others): (Vec<PathBuf>, Vec<PathBuf>) = points.partition(|point| path.starts_with(point));
    let mut below = others.into_iter().filter(|point| point.starts_with(path));
    let nearest = above.into_iter().max_by_key(|point| point.components().count());
    nearest.or_else(|| below.next().filter(|_| below.next().is_none()))
}

fn after_mount(error: &MountError) -> Option<&'static str> {
    match error {
        MountError::NoDevice
        | MountError::NoProc
        | MountError::NoNull
        | MountError::Device { .. }
        | MountError::Mount { .. }
        | MountError::Host(_) => Some(HOST),
        MountError::Missing { .. } => Some("--mkdir makes it"),
        MountError::Refused(_) => None,
    }
}

fn after_start(error: &DaemonError) -> Option<&'static str> {
    match error {
        DaemonError::Died { .. } => Some(HOST),
        DaemonError::TimedOut { .. } => Some("--timeout TIME gives it more time; `ckfs plan` shows what takes long"),
        // The daemon's own message has its hint.
        DaemonError::Failed(_) | DaemonError::LogFile { .. } => None,
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most errors of a checkpoint say by themselves what would help")]
fn after_open(error: &CheckpointError) -> Option<String> {
    match error {
        CheckpointError::NotFound { source_name } => {
            let path = Path::new(source_name);
            denied(path).or_else(|| proposed(address(source_name).or_else(|| near_path(path))))
        }
        CheckpointError::NotInCache { source_name, looked_in, near, .. } => {
            let path = Path::new(source_name);
            let cached = || near_cached(source_name, looked_in).filter(|_| near.is_none());
            denied(path).or_else(|| proposed(near_path(path).or_else(cached)))
        }
        CheckpointError::NoHome { .. } => {
            Some("set HF_HOME or HOME to where the hub cache is, or give --cache-dir DIR".to_owned())
        }
        CheckpointError::Problems { problems, .. } if problems.iter().any(Problem::is_of_ranks) => Some(
            "by their names the files hold the parts of ranks, of which one would be shown as the whole tensor: join them with a program that \
             knows how they were cut"
                .to_owned(),
        ),
        CheckpointError::Problems { problems, .. } if problems.iter().any(Problem::is_of_copies) => {
            let variants: BTreeSet<&str> = problems.iter().flat_map(Problem::variants).collect();
            let variants: Vec<String> = variants.iter().map(|name| format!("--variant {name}")).collect();
            let or = if variants.is_empty() { String::new() } else { format!("{}; ", variants.join(" or ")) };
            Some(format!(
                "{or}--duplicates index takes the copy that the index names, --duplicates last that of the last file, as transformers and \
                 vLLM do"
            ))
        }
        CheckpointError::Problems { problems, .. } if problems.iter().any(Problem::is_of_index) => Some(
            "--allow-missing[=PATTERN] accepts tensors that the index names and no file has, --allow-unmapped[=PATTERN] those that \
             the index does not name"
                .to_owned(),
        ),
        CheckpointError::NoWeights { root, .. } => of_run(root),
        error => {
            let (file, _) = error.unreadable().filter(|(_, error)| error.kind() == io::ErrorKind::PermissionDenied)?;
            denied(file)
        }
    }
}

/// How to take a directory whose checkpoints are in directories of it, one for each step.
fn of_run(root: &Path) -> Option<String> {
    let run = StepDirectory::new(root.to_str()?, &OpenOptions::default()).ok()?;
    let steps = run.list().ok()?.steps;
    let newest = steps.iter().rfind(|step| step.kind != StepKind::Unknown)?;
    Some(format!(
        "it is a run of {}: --steps all|latest|latest=N of mount, serve, export and verify takes the finished ones; or give one, as {}",
        counted(steps.len(), "step"),
        run.source_of(newest)
    ))
}

/// The path of an entry that a mistyped one most resembles, component by component.
fn near_path(path: &Path) -> Option<String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.exists() {
        let parent = near_path(parent)?;
        let path = Path::new(&parent).join(path.file_name()?);
        // Two words that are both mistyped are rather a name of something else.
        return path.to_str().filter(|_| path.exists()).map(str::to_owned);
    }
    let name = path.file_name()?.to_str()?;
    let entries = fs::read_dir(parent).ok()?.take(ENTRIES_MAX);
    let names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let near = nearest(name, names.iter().map(String::as_str))?;
    Some(path.with_file_name(near).display().to_string())
}

/// The address that lacks a slash or two: `s3:/x`.
fn address(source: &str) -> Option<String> {
    let (scheme, rest) = source.split_once(':')?;
    let is_known = scheme == "hf" || url_schemes().contains(&format!("{scheme}://"));
    is_known.then(|| format!("{scheme}://{}", rest.trim_start_matches('/')))
}

/// Whether the Hub's own cache has a repository of this name.
fn is_in_cache(source: &str) -> bool {
    let repo = source.split('@').next().unwrap_or(source).replace('/', "--");
    hub_cache_directory().is_some_and(|cache| cache.join(format!("models--{repo}")).is_dir())
}

/// The name in the Hub's cache that a mistyped one most resembles.
fn near_cached(source: &str, looked_in: &Path) -> Option<String> {
    let entries = fs::read_dir(looked_in.parent()?).ok()?.take(ENTRIES_MAX);
    let name = |entry: fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix("models--")?.replace("--", "/"));
    let names: Vec<String> = entries.filter_map(|entry| name(entry.ok()?)).collect();
    nearest(source.split('@').next()?, names.iter().map(String::as_str)).map(str::to_owned)
}

/// Says at once which path a name resembles that is none: the Hub, which is asked next, may take seconds to answer.
pub(super) fn tell_near(source: &str) {
    let path = Path::new(source);
    let is_offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|word| !["", "0"].contains(&word.as_str()));
    let may_be_of_hub = !is_offline && !source.contains(':') && path.is_relative() && !path.exists();
    // Of the names of the Hub's own cache many resemble a directory.
    if may_be_of_hub
        && !is_in_cache(source)
        && let Some(near) = near_path(path)
    {
        ckfs_host::tell(&format!("ckfs: {source}: no such file or directory; did you mean `{near}`?\n"));
    }
}

/// The error of opening a source, for a part of a ckfs mount with the part that can be opened, and for a name that the Hub
/// lacks with the path that it resembles.
pub(super) fn of_source(source: &str, error: CheckpointError) -> anyhow::Error {
    // Such a name may be one of the Hub, or a mistyped path.
    let is_there = Path::new(source).exists();
    if let (CheckpointError::Remote(_), false, Some(near)) = (&error, is_there, near_path(Path::new(source))) {
        return anyhow!("{source}: no such file or directory; did you mean `{near}`? As a name of the Hub: {error}");
    }
    match own_mount_advice(source, &error) {
        // What a directory of the mount lacks says nothing more.
        Some(advice) if matches!(error, CheckpointError::NoWeights { .. }) => anyhow!(advice),
        Some(advice) => anyhow!("{advice}\n{error}"),
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mount_above_or_below_is_proposed() {
        let near = |path: &str, points: &[&str]| {
            above_or_below(Path::new(path), points.iter().map(PathBuf::from)).map(|found| found.display().to_string())
        };
        let other = "/home/other/run/m";
        assert_eq!(near("/home/me/m", &[other]), None);
        assert_eq!(near("/home/other/run/n", &[other]), None);
        assert_eq!(near("/home/me/mnt/hf", &["/home/me/mnt", "/home/me", other]).as_deref(), Some("/home/me/mnt"));
        assert_eq!(near("/home/me", &["/home/me/mnt", other]).as_deref(), Some("/home/me/mnt"));
        assert_eq!(near("/home/me", &["/home/me/a", "/home/me/b"]), None, "either may be meant");
    }

    #[test]
    fn a_run_in_place_of_a_step_is_told_how_to_be_taken() {
        let run = tempfile::tempdir().unwrap();
        for number in [1, 20] {
            let step = run.path().join(format!("checkpoint-{number}"));
            fs::create_dir(&step).unwrap();
            for name in ["config.json", "model.safetensors", "trainer_state.json"] {
                fs::write(step.join(name), "{}").unwrap();
            }
        }
        let of = |root: &Path| {
            hint(&CheckpointError::NoWeights { root: root.to_owned(), subdirectories: Vec::new(), found: None }.into())
        };
        let text = of(run.path()).unwrap();
        let newest = run.path().join("checkpoint-20").display().to_string();
        assert!(text.starts_with("it is a run of 2 steps: --steps all|") && text.ends_with(&newest), "{text}");
        assert_eq!(of(&run.path().join("checkpoint-1")), None);
    }

    #[test]
    fn a_missing_home_has_its_remedy() {
        let error = of_source("x", CheckpointError::NoHome { source_name: "x".to_owned(), advice: String::new() });
        assert!(hint(&error).unwrap().starts_with("set HF_HOME or HOME"));
    }

    #[test]
    fn a_failure_to_mount_names_what_examines_the_host_and_what_works_without_a_mount() {
        let error = anyhow::Error::from(MountError::NoDevice).context("mnt");
        let hint = hint(&error).unwrap();
        assert!(hint.contains("`ckfs doctor`") && hint.contains("`ckfs export`"), "{hint}");
        assert_eq!(super::hint(&anyhow!("other")), None);
    }
}
