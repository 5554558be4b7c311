//! A run with the threads that keep it alive.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use ckfs_config::Config;
use ckfs_source::WaitRegistry;
use ckfs_volume::Upkeep;

use super::{
    super::{
        alive::{Alive, AliveContent},
        error::OpenError,
        upkeep::Upkeeping,
    },
    follow,
    hook::{Hook, StepPlace},
    run::Run,
    run_tree::RunTree,
    run_upkeep,
};

/// A run that is served, with the threads that keep it alive.
pub struct RunService {
    run: Arc<Run>,
    config: Config,
    running: Option<Upkeeping>,
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
}

impl Alive for RunService {
    fn start(&mut self) -> io::Result<()> {
        follow::start(&self.run)?;
        self.running = Some(run_upkeep::start(&self.run)?);
        Ok(())
    }

    fn note_reached(&self, place: StepPlace) {
        let Some(command) = &self.config.mount.on_step else { return };
        match Hook::start(command, place) {
            Ok(hook) => *self.run.hook.lock() = Some(hook),
            Err(error) => tracing::error!("--on-step: no thread starts: {error}"),
        }
    }

    fn content(&self) -> AliveContent<'_> {
        AliveContent::Run(&self.run)
    }

    fn file_system(&self) -> Arc<dyn Upkeep> {
        Arc::new(RunTree(Arc::clone(&self.run)))
    }

    fn label(&self) -> &str {
        self.run.label()
    }

    fn config(&self) -> &Config {
        &self.config
    }
}

impl Drop for RunService {
    fn drop(&mut self) {
        self.run.has_ended.store(true, Ordering::Relaxed);
        self.run.ring();
        drop(self.run.hook.lock().take());
    }
}
