//! `ckfs restart`: the same mount by this version of the program.

use std::{fs, path::PathBuf};

use anyhow::{Context, anyhow, bail};
use ckfs_config::{Config, TimeLimit, WaitTime};
use ckfs_fuse::{UnmountOptions, unmount};
use ckfs_host::{Log, last_mount_file};
use clap::Args;

use super::{
    flags::LogFlags,
    last_mount, mount, open,
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

/// The unit of systemd that a process belongs to, if that is a service of ckfs.
fn unit_of(pid: u64) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let unit = |line: &str| Some(line.rsplit('/').next()?.trim_end().to_owned());
    groups.lines().filter_map(unit).find(|unit| unit.starts_with("ckfs") && unit.ends_with(".service"))
}

impl Restart {
    pub(super) fn run(&self, log: &LogFlags, sink: &Log) -> anyhow::Result<()> {
        let mountpoint = std::path::absolute(&self.mountpoint).context("mountpoint")?;
        let path = mountpoint.display();
        let found = probe(&mountpoint);
        match found.health {
            MountHealth::Healthy | MountHealth::Degraded => {}
            health @ (MountHealth::Stale | MountHealth::Stuck | MountHealth::Failing | MountHealth::Private) => bail!(
                "{path}: {}: `ckfs umount` removes it, and `ckfs status --last {path} > FILE` has its configuration",
                health.name()
            ),
        }
        if let Some(unit) = found.pid().and_then(unit_of) {
            bail!("{path}: is the mount of a service: systemctl restart {unit}");
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
        unmount(&mountpoint, UnmountOptions { lazy: false, stale_only: false, wait: self.wait.duration() })?;
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
