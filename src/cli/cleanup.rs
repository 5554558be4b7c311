//! Removal of the checkpoint and the mount that a command made for a trial.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::Context;
use ckfs_fuse::{UnmountOptions, unmount};

/// Removes a directory with a checkpoint in `model/` and a mount on `mnt/`, unless `keep` is set.
pub(super) struct Cleanup {
    pub(super) directory: PathBuf,
    pub(super) mounted: bool,
    pub(super) keep: bool,
}

impl Cleanup {
    pub(super) fn run(&mut self) -> anyhow::Result<()> {
        if self.mounted && !self.keep {
            let options = UnmountOptions { wait: Duration::from_secs(5), ..UnmountOptions::default() };
            unmount(&self.directory.join("mnt"), options)?;
            self.mounted = false;
        }
        if !self.keep && self.directory.exists() {
            // A recursive removal must never enter a mount: it runs only after the unmount.
            fs::remove_dir(self.directory.join("mnt")).context("mnt")?;
            fs::remove_dir_all(self.directory.join("model")).context("model")?;
            fs::remove_dir(&self.directory).with_context(|| self.directory.display().to_string())?;
        }
        Ok(())
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if let Err(error) = self.run() {
            super::open::warn("cleaning up", &error);
        }
    }
}
