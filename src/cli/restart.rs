//! `ckfs umount`, and `ckfs restart`: the same mount by this version of the program.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use ckfs_config::{Config, TimeLimit, WaitTime};
use ckfs_fuse::{Started, UnmountError, UnmountOptions, ckfs_mounts, pass_on_nothing, unmount};
use ckfs_host::{Log, last_mount_file, systemd};
use ckfs_service::quoted;
use clap::Args;

use super::{
    flags::LogFlags,
    hint, last_mount, mount, open,
    output::Usage,
    status::{MountHealth, probe},
};

/// Replaces the daemon of a mount under its readers, with the configuration that it has.
///
/// For a daemon of an older version after an upgrade. The new daemon opens and plans first. If it would show the same, it takes the
/// connection to the kernel from the old one: files stay open and mapped, and no reader notices. The old daemon answers what it has
/// begun and ends. If it would show something else (a source has changed, this version plans it otherwise or needs other settings of
/// the kernel, or with --steps), the mount is made anew if no process uses it, as for a degraded mount whose source is well again; else it
/// is left as it is, and the error says why. The mount of a service is restarted by systemctl.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs restart /mnt/llama
  ckfs restart /mnt/llama --wait 30    if it has to be mounted anew, give readers half a minute")]
pub(super) struct Restart {
    /// Where it is mounted.
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,
    /// How long to go on trying to mount anew while files are open, as in 30 (seconds) or 2min.
    #[arg(long, value_name = "TIME", default_value = "0")]
    wait: WaitTime,
}

impl Restart {
    pub(super) fn run(&self, log: &LogFlags, sink: &Log) -> anyhow::Result<()> {
        let mountpoint = std::path::absolute(&self.mountpoint).context("mountpoint")?;
        let path = mountpoint.display();
        let last = || match last_mount::find(Some(&mountpoint)) {
            Ok(_) => {
                let word = quoted(&path.to_string());
                format!(
                    "; the last mount there comes back by: ckfs status --last {word} > ckfs.toml && ckfs mount --config ckfs.toml"
                )
            }
            Err(_) => String::new(),
        };
        // The path of a stale mount cannot be resolved. It is compared as it is.
        let resolved = fs::canonicalize(&mountpoint).unwrap_or_else(|_| mountpoint.clone());
        if ckfs_mounts().iter().all(|mount| mount.mountpoint != resolved) {
            let near = hint::near_mount(&mountpoint).map_or_else(String::new, |near| format!("; {near}"));
            bail!("{path}: no ckfs mount{near}{}", last());
        }
        let found = probe(&mountpoint);
        let kept = last_mount::find(Some(&mountpoint)).ok();
        let kept = kept.and_then(|text| Config::without_files(&text, Path::new("config.toml"), Path::new("/")).ok());
        let is_kept = kept.is_some_and(|config| config.mount.keeper == Some(true));
        let is_live = found.health.remedy().is_none();
        if let Some(remedy) = found.health.remedy().filter(|_| found.health != MountHealth::Stuck || !is_kept) {
            let last = if found.health == MountHealth::Stale { last() } else { String::new() };
            bail!("{path}: {}: {remedy}{last}", found.health.name());
        }
        if let Some(command) = found.pid().and_then(systemd::restart_command) {
            bail!("{path}: is the mount of a service: {command}");
        }
        // A daemon that is gone shows none, and its keeper has the mount.
        let (config, file) = if is_live {
            let config = Config { mountpoint: Some(mountpoint.clone()), ..open::shown_config(&mountpoint)? };
            let file = last_mount::write(&config, &mountpoint)
                .with_context(|| format!("{path}: no place for its configuration"))?;
            (config, file)
        } else {
            let file = last_mount_file(&mountpoint).context("state directory")?;
            (Config::load_alone(&file)?, file)
        };
        pass_on_nothing();
        let timeout = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
        let words = ["mount", "--config"].map(OsString::from);
        let words = [&words[..], &[file.clone().into_os_string()]].concat();
        let succeeding = [&words[..], &["--succeed", "running"].map(OsString::from)].concat();
        let (started, how) = match mount::start(&succeeding, &mountpoint, timeout) {
            Ok(started) => (started, "replaced under its readers on"),
            Err(why) if is_live => (self.anew(&why, config, &words, &mountpoint)?, "mounted anew on"),
            Err(why) => return Err(why),
        };
        log.tell(sink, &format!("{how} {path}; its log goes {}; {}", started.log, started.served));
        Ok(())
    }

    /// Mounts anew what cannot be replaced under its readers, if it has none. `words` are the arguments of the daemon.
    fn anew(
        &self,
        why: &anyhow::Error,
        config: Config,
        words: &[OsString],
        mountpoint: &Path,
    ) -> anyhow::Result<Started> {
        let timeout = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
        // Steps of a run are opened when they are looked at.
        if config.mount.steps.is_none() {
            open::volume(&mut Config { mountpoint: None, ..config }).context("the mount is left as it is")?;
        }
        let options = UnmountOptions { lazy: false, stale_only: false, wait: self.wait.duration() };
        match unmount(mountpoint, options) {
            // To take it away now is no way here: the new mount would have other readers than the old one.
            Err(error @ UnmountError::Busy { .. }) => {
                bail!("{why:#}\n  {error}\n  it is left as it is; --wait TIME goes on trying to mount it anew")
            }
            other => other?,
        }
        let again = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let path = mountpoint.display();
        mount::start(words, mountpoint, timeout)
            .with_context(|| format!("{path}: unmounted; `ckfs {again}` tries again"))
    }
}

/// Unmounts a ckfs mount, live or stale.
///
/// A mount in use is not removed; the error names the processes using it. The mount must be ckfs's.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs umount /mnt/llama
  ckfs umount /mnt/llama --wait 30    give readers half a minute
  ckfs umount /mnt/llama --lazy       now; open files stay readable until they are closed
  ckfs umount --stale --config /etc/ckfs/llama.toml")]
pub(super) struct Umount {
    /// Where it is mounted.
    #[arg(value_name = "MNT")]
    mountpoint: Option<PathBuf>,
    /// Detaches at once, even if files are open.
    #[arg(long, short = 'z')]
    lazy: bool,
    /// Removes the mount only if its daemon is gone; a live one is left alone, without an error.
    #[arg(long)]
    stale: bool,
    /// How long to go on trying while files are open, as in 30 (seconds) or 2min.
    #[arg(long, value_name = "TIME", default_value = "0")]
    wait: WaitTime,
    /// Takes the mountpoint from this file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Umount {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let config = self.config.as_deref().map(Config::load_alone).transpose()?.unwrap_or_default();
        let Some(mountpoint) = self.mountpoint.or(config.mountpoint) else {
            return Err(Usage("expected MNT, or a --config file that names it".to_owned()).into());
        };
        let options = UnmountOptions { lazy: self.lazy, stale_only: self.stale, wait: self.wait.duration() };
        Ok(unmount(&mountpoint, options)?)
    }
}
