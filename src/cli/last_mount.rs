//! The configurations of this user's mounts, kept after their end.
//!
//! A mount shows its own in `.ckfs/config.toml`, which is gone with it. Each mount on another path has a file of its own, and the
//! latest [`FILES_MAX`] of them are kept.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context, bail};
use ckfs_config::Config;
use ckfs_host::{last_mount_file, last_mounts_directory};

use super::output;

/// Configurations that are kept.
const FILES_MAX: usize = 64;

/// Keeps the configuration of a mount that was just made. A place that takes no files is no reason to fail.
pub(super) fn keep(config: &Config, mountpoint: &Path) {
    if let Err(error) = write(config, mountpoint) {
        tracing::info!("the configuration for `ckfs status --last` is not kept: {error:#}");
    }
}

/// Keeps it, and returns the file.
///
/// # Errors
/// The place takes no files, or there is none.
pub(super) fn write(config: &Config, mountpoint: &Path) -> anyhow::Result<PathBuf> {
    let file = last_mount_file(mountpoint).context("no state directory: neither XDG_STATE_HOME nor HOME is set")?;
    let directory = file.parent().context("state directory")?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let text = config.to_toml()?;
    let open = |new: &Path| fs::File::options().write(true).create_new(true).mode(0o600).open(new);
    output::replace(&file, |new| open(new)?.write_all(text.as_bytes()))?;
    for (_, old) in newest_first(directory).into_iter().skip(FILES_MAX) {
        fs::remove_file(old)?;
    }
    Ok(file)
}

/// The configurations that are kept.
fn newest_first(directory: &Path) -> Vec<(SystemTime, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .filter(|entry| entry.path().extension().is_some_and(|ending| ending == "toml"))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort_by(|a, b| b.cmp(a));
    files
}

/// The configuration of this user's last mount: on a mountpoint, or on any.
///
/// # Errors
/// There is none.
pub(super) fn find(mountpoint: Option<&Path>) -> anyhow::Result<String> {
    let Some(directory) = last_mounts_directory() else {
        bail!("no configuration is kept where neither XDG_STATE_HOME nor HOME is set");
    };
    let Some(mountpoint) = mountpoint else {
        let Some((_, file)) = newest_first(&directory).into_iter().next() else {
            bail!("{}: has no configuration of a mount of yours", directory.display());
        };
        return fs::read_to_string(&file).with_context(|| file.display().to_string());
    };
    let mountpoint = std::path::absolute(mountpoint).context("MNT")?;
    let names = [Some(mountpoint.clone()), fs::canonicalize(&mountpoint).ok()];
    for file in names.iter().flatten().filter_map(|name| last_mount_file(name)) {
        if let Ok(text) = fs::read_to_string(&file) {
            return Ok(text);
        }
    }
    bail!("{}: {} has no configuration of a mount of yours there", mountpoint.display(), directory.display())
}
