//! `ckfs umount`.

use std::path::PathBuf;

use ckfs_config::{Config, WaitTime};
use ckfs_fuse::{UnmountOptions, unmount};
use clap::Args;

use super::output::Usage;

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
