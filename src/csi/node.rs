//! What the calls do.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use ckfs_config::Config;
use ckfs_host::if_there;
use nix::sys::statvfs::statvfs;
use parking_lot::Mutex;
use serde_json::Value;
use tonic::Status;
use tracing::{info, warn};

use crate::{
    CsiOptions,
    daemons::Start,
    messages::{
        NodeInfo, PluginInfo, PublishRequest, Stats, StatsRequest, UnpublishRequest, VolumeCondition, VolumeUsage,
    },
    state::{PointHealth, Published, State, bind, detach, health, mount_at},
    volume::WantedVolume,
};

/// Units of usage: bytes and inodes.
const BYTES: i32 = 1;
const INODES: i32 = 2;

/// The volumes of a node. Calls for one target come one after the other, and so does what is done with one daemon.
pub(crate) struct NodePlugin {
    options: CsiOptions,
    state: State,
    locks: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
}

fn internal(path: &Path) -> impl Fn(io::Error) -> Status {
    move |error| Status::internal(format!("{}: {error}", path.display()))
}

fn given<'a>(what: &str, value: &'a str) -> Result<&'a str, Status> {
    if value.is_empty() { Err(Status::invalid_argument(format!("{what}: expected one"))) } else { Ok(value) }
}

/// A path as the table of mounts has it, whether it exists or not.
fn target(what: &str, path: &str) -> Result<PathBuf, Status> {
    let path = Path::new(given(what, path)?);
    if path.is_relative() || path.components().any(|part| part == Component::ParentDir) {
        return Err(Status::invalid_argument(format!("{what}: expected an absolute path, found {}", path.display())));
    }
    // Not the path itself, whose daemon may be gone.
    let above = path.parent().and_then(|above| above.canonicalize().ok());
    Ok(above.and_then(|above| Some(above.join(path.file_name()?))).unwrap_or_else(|| path.to_owned()))
}

impl NodePlugin {
    pub(crate) fn new(options: CsiOptions) -> io::Result<Self> {
        let state = State::new(&options.state)?;
        Ok(Self { options, state, locks: Mutex::default() })
    }

    fn lock(&self, of: &Path) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock();
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(of.to_owned()).or_default())
    }

    pub(crate) fn plugin_info(&self) -> PluginInfo {
        PluginInfo { name: self.options.driver.clone(), vendor_version: env!("CARGO_PKG_VERSION").to_owned() }
    }

    pub(crate) fn info(&self) -> NodeInfo {
        NodeInfo { node_id: self.options.node.clone() }
    }

    /// Mounts, unless a volume of the same configuration is mounted, and binds that to the target.
    pub(crate) fn publish(&self, request: &PublishRequest) -> Result<(), Status> {
        let volume = given("volume id", &request.volume_id)?.to_owned();
        target("target path", &request.target_path)?;
        match &request.volume_capability {
            None => return Err(Status::invalid_argument("volume capability: expected one")),
            Some(capability) if capability.block.is_some() => {
                return Err(Status::invalid_argument("volume capability: expected a mount, found a block device"));
            }
            Some(_) => {}
        }
        let WantedVolume { key, config, variables } =
            WantedVolume::new(&self.options, &request.volume_context, &request.secrets)?;
        // Only of a directory that exists the path without links is known.
        if let Some(above) = Path::new(&request.target_path).parent() {
            fs::DirBuilder::new().recursive(true).mode(0o750).create(above).map_err(internal(above))?;
        }
        let target = target("target path", &request.target_path)?;
        let published =
            Published { volume, target: target.clone(), key: key.clone(), has_secrets: !variables.is_empty() };
        let lock = self.lock(&target);
        let _target = lock.lock();
        if let Some(found) = self.state.find(&target)
            && found != published
        {
            let (path, volume) = (target.display(), found.volume);
            let why = format!("{path}: volume {volume} is published there, with other attributes or secrets");
            return Err(Status::already_exists(why));
        }
        let place = self.state.place(&key);
        let lock = self.lock(&place);
        let _daemon = lock.lock();
        let point = self.start(&place, Some(config), variables).inspect_err(|_| self.tear_down(&key))?;
        self.state.write(&published).map_err(internal(&place))?;
        bind(&point, &target).map_err(internal(&target)).inspect_err(|_| {
            let removed = self.state.remove(&target).and_then(|()| self.state.tear_down(&key));
            removed.unwrap_or_else(|error| warn!("{}: {error}", target.display()));
        })?;
        Ok(())
    }

    fn tear_down(&self, key: &str) {
        self.state.tear_down(key).unwrap_or_else(|error| warn!("{}: {error}", self.state.place(key).display()));
    }

    /// Makes sure that a daemon answers; returns its mount. Without a configuration it is the one that the daemon had.
    fn start(
        &self,
        place: &Path,
        config: Option<Config>,
        variables: BTreeMap<String, String>,
    ) -> Result<PathBuf, Status> {
        let (point, file) = (place.join("mnt"), place.join("config.toml"));
        match health(&point) {
            PointHealth::Live(_) => return Ok(point),
            PointHealth::None => {}
            PointHealth::Stale => detach(&point).map_err(internal(&point))?,
            PointHealth::Stuck => {
                return Err(Status::unavailable(format!(
                    "{}: mounted, but does not answer; asked again later",
                    point.display()
                )));
            }
        }
        fs::create_dir_all(&point).map_err(internal(&point))?;
        if let Some(mut config) = config {
            config.mountpoint = Some(point.clone());
            let text = config.to_toml().map_err(|error| Status::invalid_argument(error.to_string()))?;
            fs::write(&file, text).map_err(internal(&file))?;
        }
        Start { file, state: place.to_owned(), variables }.run(self.options.mounter.as_deref())?;
        Ok(point)
    }

    /// Takes a volume away, and its daemon if no other has it.
    pub(crate) fn unpublish(&self, request: &UnpublishRequest) -> Result<(), Status> {
        given("volume id", &request.volume_id)?;
        let target = target("target path", &request.target_path)?;
        let lock = self.lock(&target);
        let _target = lock.lock();
        detach(&target).map_err(internal(&target))?;
        if_there(fs::remove_dir(&target)).map_err(internal(&target))?;
        let Some(found) = self.state.find(&target) else { return Ok(()) };
        let place = self.state.place(&found.key);
        let lock = self.lock(&place);
        let _daemon = lock.lock();
        self.state.remove(&target).and_then(|()| self.state.tear_down(&found.key)).map_err(internal(&place))?;
        Ok(())
    }

    pub(crate) fn stats(&self, request: &StatsRequest) -> Result<Stats, Status> {
        let volume = given("volume id", &request.volume_id)?;
        // What is no path of a target has no volume either.
        given("volume path", &request.volume_path)?;
        let path = target("volume path", &request.volume_path).map_err(|status| Status::not_found(status.message()))?;
        if self.state.find(&path).is_none_or(|found| found.volume != volume) || mount_at(&path).is_none() {
            return Err(Status::not_found(format!("{}: volume {volume} is not published there", path.display())));
        }
        let condition = |abnormal: bool, message: &str| Some(VolumeCondition { abnormal, message: message.to_owned() });
        let stats = match health(&path) {
            PointHealth::Live(stats) => stats,
            PointHealth::None | PointHealth::Stale => {
                return Ok(Stats { usage: vec![], condition: condition(true, "its daemon is gone") });
            }
            PointHealth::Stuck => return Ok(Stats { usage: vec![], condition: condition(true, "it does not answer") }),
        };
        let sizes = statvfs(&path).map_err(|errno| internal(&path)(errno.into()))?;
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let usage = |count: u64, unit| VolumeUsage { total: number(count), used: number(count), unit };
        let bytes = sizes.blocks().saturating_mul(sizes.fragment_size());
        let problems: Vec<String> = stats["problems"].as_array().into_iter().flatten().map(problem).collect();
        let message = if problems.is_empty() { "it answers".to_owned() } else { problems.join("; ") };
        Ok(Stats {
            usage: vec![usage(bytes, BYTES), usage(sizes.files(), INODES)],
            condition: condition(!problems.is_empty() || stats["health"] == "degraded", &message),
        })
    }

    /// Goes on with what the plugin before this one has published: starts daemons again that are gone, and ends those that no volume
    /// has. A daemon with secrets is started when the volume is published again.
    pub(crate) fn adopt(&self) {
        for key in self.state.keys() {
            let place = self.state.place(&key);
            let lock = self.lock(&place);
            let _daemon = lock.lock();
            let volumes: Vec<Published> = self.state.all().into_iter().filter(|found| found.key == key).collect();
            if volumes.is_empty() {
                self.tear_down(&key);
                continue;
            }
            let found = health(&place.join("mnt"));
            info!("{}: {} volumes; {}", place.display(), volumes.len(), name(&found));
            if found != PointHealth::Stale || volumes.iter().any(|found| found.has_secrets) {
                continue;
            }
            match self.start(&place, None, BTreeMap::new()) {
                Ok(point) => {
                    for Published { target, .. } in volumes {
                        bind(&point, &target).unwrap_or_else(|error| warn!("{}: {error}", target.display()));
                    }
                }
                Err(status) => warn!("{}: {}", place.display(), status.message()),
            }
        }
    }
}

fn name(health: &PointHealth) -> &'static str {
    match health {
        PointHealth::Live(_) => "its daemon answers",
        PointHealth::None => "not mounted",
        PointHealth::Stale => "its daemon is gone",
        PointHealth::Stuck => "it does not answer",
    }
}

/// A problem of the statistics in words.
fn problem(problem: &Value) -> String {
    let word = |key: &str| problem[key].as_str().unwrap_or_default().to_owned();
    format!("{}: {}: {}", word("kind"), word("file"), word("cause"))
}
