//! A run with the threads that keep it alive.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use ckfs_config::Config;
use ckfs_source::WaitRegistry;
use ckfs_volume::Upkeep;

use super::{
    super::error::OpenError,
    follow::{self, Following},
    hook::{Hook, StepPlace},
    run::{Run, lock},
    run_tree::RunTree,
    run_upkeep::{self, RunUpkeeping},
};

/// A run that is served, with the threads that keep it alive.
pub struct RunService {
    run: Arc<Run>,
    config: Config,
    running: Option<(Following, RunUpkeeping)>,
}

impl RunService {
    /// Opens the run that a configuration names: see [`Run::open`].
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn open(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Self, OpenError> {
        let run = Run::open(config, waits)?;
        Ok(Self { run, config: config.clone(), running: None })
    }

    /// Starts the threads that look for steps, check sources and release memory. They end with the service.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(&mut self) -> io::Result<()> {
        let following = follow::start(&self.run)?;
        self.running = Some((following, run_upkeep::start(&self.run)?));
        Ok(())
    }

    /// Starts the command for new steps, if the configuration has one. To be called when the steps can be read at this place.
    pub fn start_hook(&self, place: StepPlace) {
        let Some(command) = &self.config.mount.on_step else { return };
        match Hook::start(command, place) {
            Ok(hook) => *lock(&self.run.hook) = Some(hook),
            Err(error) => tracing::error!("--on-step: no thread starts: {error}"),
        }
    }

    /// The run.
    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// The run as a file system.
    pub fn file_system(&self) -> Arc<dyn Upkeep> {
        Arc::new(RunTree(Arc::clone(&self.run)))
    }

    /// The configuration, with the source as a complete path.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Drop for RunService {
    fn drop(&mut self) {
        self.run.has_ended.store(true, Ordering::Relaxed);
        self.run.ring();
        drop(lock(&self.run.hook).take());
    }
}
