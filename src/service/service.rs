//! A volume with the threads that keep it alive.

use std::{fs, io, path::Path, sync::Arc};

use ckfs_config::Config;
use ckfs_source::WaitRegistry;
use ckfs_volume::{Upkeep, Volume};

use super::{
    alive::{Alive, AliveContent},
    error::OpenError,
    open,
    steps::RunService,
    upkeep::{self, PERIOD, Prefetching, Upkeeping},
};

/// An opened configuration, ready to be served.
///
/// ```no_run
/// use std::path::Path;
/// use ckfs_config::Config;
/// use ckfs_service::{Alive, Service, wait_registry};
///
/// let mut config = Config::load_alone(Path::new("/etc/ckfs/llama.toml"))?;
/// let waits = wait_registry(&config.mount);
/// let mut service = Service::open(&mut config, &waits)?;
/// service.start()?;
/// println!("{} devices", service.volume().plans()[0].devices.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Service {
    volume: Arc<Volume>,
    config: Config,
    running: Option<(Upkeeping, Option<Prefetching>)>,
}

impl Service {
    /// Opens the checkpoint that a configuration names, and makes the volume of its views. Every wait for storage or a service is
    /// noted in `waits`, which another thread may watch (see [`watch`](super::watch)). `config` gets what was found: the source as
    /// a complete path or with its revision, and the default layout.
    ///
    /// # Errors
    /// Everything wrong with settings, repository or plans; and a mountpoint that would cover a file of the source.
    pub fn open(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Self, OpenError> {
        let mut volume = open::open_volume(config, waits)?;
        if let Err(error) = open::enable_materialization(&mut volume)? {
            tracing::info!("no file is materialized: no file system in memory: {error}");
        }
        let service = Self { volume: Arc::new(volume), config: config.clone(), running: None };
        if let Some(mountpoint) = &config.mountpoint {
            service.refuse_covered(mountpoint, waits)?;
        }
        Ok(service)
    }

    /// Refuses a mountpoint that would cover a source file: a check of that file's path would make the daemon wait for itself.
    fn refuse_covered(&self, mountpoint: &Path, waits: &WaitRegistry) -> Result<(), OpenError> {
        let Ok(covered) = fs::canonicalize(mountpoint) else { return Ok(()) };
        let source = self.volume.engine().checkpoint().source();
        for id in source.files() {
            let path = source.path(id);
            let _looking = waits.begin_path(path, "stat");
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            if path.starts_with(mountpoint) || path.starts_with(&covered) || real.starts_with(&covered) {
                return Err(open::covered(mountpoint, path));
            }
        }
        Ok(())
    }

    /// The volume.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }
}

impl Alive for Service {
    fn start(&mut self) -> io::Result<()> {
        let (trimmed, checked) = (Arc::clone(&self.volume), Arc::clone(&self.volume));
        let upkeeping = upkeep::repeat(PERIOD, move || trimmed.trim(), move || checked.check_sources())?;
        let prefetch = self.config.mount.prefetch.unwrap_or_default();
        let prefetching = upkeep::prefetch(self.volume.engine().checkpoint(), self.volume.plans(), prefetch);
        self.running = Some((upkeeping, prefetching));
        Ok(())
    }

    fn content(&self) -> AliveContent<'_> {
        AliveContent::Checkpoint(&self.volume)
    }

    fn file_system(&self) -> Arc<dyn Upkeep> {
        Arc::<Volume>::clone(&self.volume)
    }

    fn label(&self) -> &str {
        self.volume.engine().checkpoint().label()
    }

    fn config(&self) -> &Config {
        &self.config
    }
}

/// Opens what a configuration names: a run if it has `steps`, else a checkpoint.
///
/// # Errors
/// As [`Service::open`] and [`RunService::open`].
pub fn open_alive(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Box<dyn Alive>, OpenError> {
    Ok(match config.mount.steps {
        Some(_) => Box::new(RunService::open(config, waits)?),
        None => Box::new(Service::open(config, waits)?),
    })
}
