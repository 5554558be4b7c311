//! What would help after a failure, beyond what its message says.

use std::{fs, io, path::Path};

use anyhow::anyhow;

use super::denied::denied;
use crate::{
    checkpoint::CheckpointError,
    config::{Config, nearest},
    fuse::{DaemonError, MountError},
};

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
        cause.downcast_ref::<CheckpointError>().and_then(after_open)
    })
}

fn after_mount(error: &MountError) -> Option<&'static str> {
    match error {
        MountError::NoDevice
        | MountError::Device { .. }
        | MountError::NoFusermount
        | MountError::Fusermount { .. }
        | MountError::Mount { .. }
        | MountError::Private { .. }
        | MountError::Session { .. }
        | MountError::Unresponsive { .. } => Some(HOST),
        MountError::Missing { .. } => Some("--mkdir makes it"),
        MountError::Path { .. }
        | MountError::Descriptor { .. }
        | MountError::NotDirectory { .. }
        | MountError::Occupied { .. }
        | MountError::Stale { .. }
        | MountError::System { .. } => None,
    }
}

fn after_start(error: &DaemonError) -> Option<&'static str> {
    match error {
        DaemonError::Died { .. } => Some(HOST),
        DaemonError::TimedOut { .. } => Some("--timeout SECONDS gives it more time; `ckfs plan` shows what takes long"),
        // The daemon's own message has its hint.
        DaemonError::Failed { .. }
        | DaemonError::Spawn { .. }
        | DaemonError::LogFile { .. }
        | DaemonError::Abandoned
        | DaemonError::System { .. } => None,
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most errors of a checkpoint say by themselves what would help")]
fn after_open(error: &CheckpointError) -> Option<String> {
    match error {
        CheckpointError::NotFound { source_name } | CheckpointError::NotInCache { source_name, .. } => {
            let path = Path::new(source_name);
            denied(path).or_else(|| near_path(path).map(|near| format!("did you mean `{near}`?")))
        }
        CheckpointError::NoHome { .. } => {
            Some("set HF_HOME or HOME to where the hub cache is, or give --cache-dir DIR".to_owned())
        }
        error => {
            let (file, _) = error.unreadable().filter(|(_, error)| error.kind() == io::ErrorKind::PermissionDenied)?;
            denied(file)
        }
    }
}

/// The path beside a mistyped one that it most resembles.
fn near_path(path: &Path) -> Option<String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name()?.to_str()?;
    let entries = fs::read_dir(parent).ok()?.take(ENTRIES_MAX);
    let names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let near = nearest(name, names.iter().map(String::as_str))?;
    Some(path.with_file_name(near).display().to_string())
}

/// The error of opening a source, for a part of a ckfs mount with the part that can be opened, and for a name that the Hub
/// lacks with the path that it resembles.
pub(super) fn of_source(source: &str, error: CheckpointError) -> anyhow::Error {
    let path = Path::new(source);
    // Such a name may be one of the Hub, or a mistyped path.
    if let (CheckpointError::Remote(_), Some(near)) = (&error, near_path(path)) {
        return anyhow!("{source}: no such file or directory; did you mean `{near}`? As a name of the Hub: {error}");
    }
    let root = path.ancestors().skip(1).find(|root| root.join(".ckfs/config.toml").is_file());
    let shards = path.ancestors().find(|part| part.file_name().is_some_and(|name| name == "safetensors"));
    let (Some(root), Some(shards)) = (root, shards.filter(|_| matches!(error, CheckpointError::Problems { .. })))
    else {
        return error.into();
    };
    let whole = shards.with_file_name("hf");
    let whole = if whole.is_dir() { format!("{}, or ", whole.display()) } else { String::new() };
    let origin = Config::load(&root.join(".ckfs/config.toml")).ok().and_then(|config| config.source);
    let origin = origin.map_or_else(String::new, |origin| format!(", {origin}"));
    anyhow!(
        "{source}: holds the shards of the devices of the ckfs mount {}; give {whole}the source of that mount{origin}\n{error}",
        root.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Problem;

    fn problems() -> CheckpointError {
        CheckpointError::Problems { label: "x".to_owned(), problems: vec![Problem::TooLarge], more: 0 }
    }

    #[test]
    fn shards_of_a_mount_as_a_source_lead_to_its_whole_tensors() {
        let directory = tempfile::tempdir().unwrap();
        let (shards, elsewhere) = (directory.path().join("mnt/safetensors"), directory.path().join("safetensors"));
        for new in [&shards, &elsewhere, &directory.path().join("mnt/.ckfs"), &directory.path().join("mnt/hf")] {
            fs::create_dir_all(new).unwrap();
        }
        fs::write(directory.path().join("mnt/.ckfs/config.toml"), "source = '/data/llama'\n").unwrap();
        let source = shards.display().to_string();
        let found = of_source(&source, problems()).to_string();
        let mount = directory.path().join("mnt").display().to_string();
        let expected = format!(
            "{source}: holds the shards of the devices of the ckfs mount {mount}; give {mount}/hf, or the source of that mount, \
             /data/llama\n{}",
            problems()
        );
        assert_eq!(found, expected);
        let other = of_source(&elsewhere.display().to_string(), problems());
        assert_eq!(other.to_string(), problems().to_string());
        let error = of_source("x", CheckpointError::NoHome { source_name: "x".to_owned(), advice: String::new() });
        assert!(hint(&error).unwrap().starts_with("set HF_HOME or HOME"));
    }

    #[test]
    fn a_failure_to_mount_names_what_examines_the_host_and_what_works_without_a_mount() {
        let error = anyhow::Error::from(MountError::NoFusermount).context("mnt");
        let hint = hint(&error).unwrap();
        assert!(hint.contains("`ckfs doctor`") && hint.contains("`ckfs export`"), "{hint}");
        assert_eq!(super::hint(&anyhow!("other")), None);
    }
}
