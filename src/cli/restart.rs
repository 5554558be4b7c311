//! `ckfs umount`, and `ckfs restart`: the same mount by this version of the program.

use std::{fs, path::PathBuf};

use anyhow::{Context, anyhow, bail};
use ckfs_config::{Config, TimeLimit, WaitTime};
use ckfs_fuse::{UnmountError, UnmountOptions, ckfs_mounts, unmount};
use ckfs_host::{Log, last_mount_file, systemd};
use ckfs_service::quoted;
use clap::Args;

use super::{
    flags::LogFlags,
    hint, last_mount, mount, open,
    output::Usage,
    status::{MountHealth, probe},
};

/// Mounts a mount anew, with the configuration that it has.
///
/// For a daemon of an older version after an upgrade, and for a degraded mount whose source is well again. The source is
/// opened first: what cannot be mounted leaves the old mount as it is. A mount in use is left as it is too; the error names
/// the processes that use it. The mount of a service is restarted by systemctl.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs restart /mnt/llama
  ckfs restart /mnt/llama --wait 30    give readers half a minute")]
pub(super) struct Restart {
    /// Where it is mounted.
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,
    /// How long to go on trying while files are open, as in 30 (seconds) or 2min.
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
        if let Some(remedy) = found.health.remedy() {
            let last = if found.health == MountHealth::Stale { last() } else { String::new() };
            bail!("{path}: {}: {remedy}{last}", found.health.name());
        }
        if let Some(command) = found.pid().and_then(systemd::restart_command) {
            bail!("{path}: is the mount of a service: {command}");
        }
        let mut config = open::shown_config(&mountpoint)?;
        config.mountpoint = Some(mountpoint.clone());
        // Steps of a run are opened when they are looked at.
        if config.mount.steps.is_none() {
            open::volume(&mut Config { mountpoint: None, ..config.clone() }).context("the mount is left as it is")?;
        }
        last_mount::keep(&config, &mountpoint);
        let file = last_mount_file(&mountpoint).filter(|file| file.is_file());
        let file = file
            .ok_or_else(|| anyhow!("{path}: no place for its configuration: neither XDG_STATE_HOME nor HOME is set"))?;
        let unmounted =
            unmount(&mountpoint, UnmountOptions { lazy: false, stale_only: false, wait: self.wait.duration() });
        match unmounted {
            // To take it away now is no way here: the new mount would have other readers than the old one.
            Err(error @ UnmountError::Busy { .. }) => {
                bail!("{error}\n  it is left as it is; --wait TIME goes on trying")
            }
            other => other?,
        }
        let timeout = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
        let words = ["mount".into(), "--config".into(), file.clone().into_os_string()];
        let started = mount::start(&words, &mountpoint, timeout)
            .with_context(|| format!("{path}: unmounted; `ckfs mount --config {}` tries again", file.display()))?;
        if !log.quiet {
            sink.flush(ckfs_host::log::FLUSH_LIMIT);
            let (place, served) = (started.log, started.served);
            ckfs_host::tell(&format!("ckfs: mounted anew on {path}; its log goes {place}; {served}\n"));
        }
        Ok(())
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
