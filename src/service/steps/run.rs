//! A run with what its steps share.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    ops::Deref,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::SystemTime,
};

use ckfs_checkpoint::runs::StepDirectory;
use ckfs_config::{Config, Steps};
use ckfs_host::budget::Budget;
use ckfs_read::EngineRooms;
use ckfs_source::{RootDir, WaitRegistry, private_directory};
use ckfs_volume::{
    FsError, LiveReads, Metrics, Mounter, OnChange, Overrides, Permission, Volume, directory_permission,
};
use parking_lot::{Mutex, RwLock};
use serde_json::{Map, Value};

use super::{
    super::{error::OpenError, open, wait_watch::wait_registry},
    hook::{Hook, HookState},
    settle::{self, ListedStep, Settling},
    slot::Slot,
    slots::Slots,
};

/// The directory of a run as one file system: see the module's documentation. Its storage, and what is known of it in memory.
pub struct Run {
    state: RunState,
    pub(super) config: Config,
    pub(super) directory: StepDirectory,
    /// Until the thread takes it that looks at the directory.
    pub(super) settling: Mutex<Option<Settling>>,
    pub(super) on_change: Mutex<Option<Arc<OnChange>>>,
    /// Whether the kernel reads files directly; empty until it is known.
    pub(super) passthrough: Mutex<Option<bool>>,
    /// Steps that are being planned.
    pub(super) opening: Mutex<Vec<Arc<Slot>>>,
    /// The slot that was the newest step's when steps were last planned ahead: those before it are not.
    pub(super) planned_ahead: AtomicU64,
    /// Volumes of steps that have gone and that a request still uses.
    pub(super) parted: Mutex<Vec<Arc<Volume>>>,
    /// Steps that were shown and whose files are being changed or deleted: names by number.
    pub(super) changing: Mutex<BTreeMap<u64, String>>,
    pub(super) bell: Mutex<Option<io::PipeWriter>>,
    pub(super) has_ended: AtomicBool,
}

/// What is known of a run, in memory: nothing here leads to its storage, so whatever has only this never waits for that.
pub struct RunState {
    pub(super) config_text: String,
    /// The command that mounts the run anew.
    pub(super) remount: String,
    pub(super) source: String,
    pub(super) wanted: Steps,
    pub(super) slots: Slots,
    /// All steps of the last look, with those that are not finished.
    pub(super) looked: RwLock<Vec<ListedStep>>,
    /// Steps to measure again, by name, until a look has done it.
    pub(super) rechecks: Mutex<Vec<String>>,
    pub(super) rooms: EngineRooms,
    pub(super) budget: Budget,
    pub(super) metrics: Metrics,
    pub(super) waits: Arc<WaitRegistry>,
    pub(super) modified: RwLock<SystemTime>,
    pub(super) permission: Permission,
    pub(super) own_permission: [Permission; 2],
    pub(super) counts: RunCounts,
    /// Numbers of volumes that are gone.
    pub(super) retired: Mutex<Map<String, Value>>,
    pub(super) own_reads: LiveReads,
    pub(super) next_own: AtomicU64,
    pub(super) hook: Mutex<Option<Hook>>,
    pub(super) looking_failed: Mutex<Option<String>>,
}

impl Deref for Run {
    type Target = RunState;

    fn deref(&self) -> &RunState {
        &self.state
    }
}

/// What happened to the steps of a run.
#[derive(Debug, Default)]
pub(super) struct RunCounts {
    pub(super) appeared: AtomicU64,
    pub(super) deleted: AtomicU64,
    pub(super) rewritten: AtomicU64,
    pub(super) plans: AtomicU64,
    pub(super) failed_plans: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) looks: AtomicU64,
    /// Requests for files of steps that are gone.
    pub(super) gone_requests: AtomicU64,
}

impl Run {
    /// Looks at the run that a configuration names. `config` gets the source as a complete path.
    ///
    /// # Errors
    /// There is no such directory, or it holds a checkpoint and no steps.
    pub fn open(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Arc<Self>, OpenError> {
        open::start_pool()?;
        let wanted = config.mount.steps.unwrap_or(Steps::All);
        let source = open::complete_source(config, waits)?;
        config.source = Some(source.clone());
        if let Some(mountpoint) = &config.mountpoint {
            refuse_inside(&source, mountpoint)?;
        }
        let (directory, options) = settle::step_directory(config, waits)?;
        let mut settling = Settling::new(directory, options);
        let failed = |error| OpenError::Checkpoint { source_name: source.clone(), error };
        let look = settling.settle(settle::OPENING_AT_START).map_err(failed)?;
        settle::refuse_checkpoint(&source, &look.found)?;
        // From now on waits are those of a mount, which goes on when one has no end.
        let (directory, options) = settle::step_directory(config, &wait_registry(&config.mount))?;
        let later_waits = Arc::clone(&options.fetches);
        settling.go_on(directory.clone(), options);
        let budget = open::budget(&config.mount);
        open::warn_of_large_cache(&budget);
        let (mounter, overrides) = (Mounter::of_this_process(), open::overrides(&config.mount));
        let (uid, gid) = (overrides.uid.unwrap_or(mounter.uid), overrides.gid.unwrap_or(mounter.gid));
        let own = |mode| Permission { uid, gid, mode };
        let state = RunState {
            config_text: open::config_text(config)?,
            remount: open::remount_command(config).unwrap_or_default(),
            permission: permission_of(&source, &mounter, &overrides),
            own_permission: [own(overrides.file_mode.unwrap_or(0o400)), own(overrides.dir_mode.unwrap_or(0o500))],
            source,
            wanted,
            slots: Slots::default(),
            looked: RwLock::default(),
            rechecks: Mutex::default(),
            rooms: EngineRooms::new(open::engine_options(&budget)),
            budget,
            metrics: Metrics::default(),
            waits: later_waits,
            modified: RwLock::new(SystemTime::now()),
            counts: RunCounts::default(),
            retired: Mutex::default(),
            own_reads: LiveReads::default(),
            next_own: AtomicU64::new(1),
            hook: Mutex::default(),
            looking_failed: Mutex::default(),
        };
        let run = Self {
            state,
            config: config.clone(),
            directory,
            settling: Mutex::new(Some(settling)),
            on_change: Mutex::default(),
            passthrough: Mutex::default(),
            opening: Mutex::default(),
            planned_ahead: AtomicU64::new(0),
            parted: Mutex::default(),
            changing: Mutex::default(),
            bell: Mutex::default(),
            has_ended: AtomicBool::new(false),
        };
        run.take(&look);
        // Steps that are there already are planned when somebody looks at them.
        let newest = run.slots.newest().map_or(0, |slot| slot.index);
        run.planned_ahead.store(newest, Ordering::Relaxed);
        Ok(Arc::new(run))
    }

    pub(super) fn permission_of_step(&self, step: &ListedStep) -> Permission {
        let _looking = self.waits.begin_path(Path::new(&step.source), "stat");
        permission_of(&step.source, &Mounter::of_this_process(), &open::overrides(&self.config.mount))
    }

    /// Wakes the thread that looks for steps.
    pub(super) fn ring(&self) {
        if let Some(bell) = &mut *self.bell.lock() {
            // Full: it is awake.
            let _ = bell.write(&[1]);
        }
    }
}

/// Owner, group and bits of a directory that shows the names in another.
fn permission_of(source: &str, mounter: &Mounter, overrides: &Overrides) -> Permission {
    let rules = RootDir::open(Path::new(source)).map_or_else(|_| private_directory(), |root| root.directory_gates(""));
    directory_permission(&rules, mounter, overrides)
}

/// Refuses a mountpoint inside the run: the mount would be one of its steps, or hide them.
fn refuse_inside(source: &str, mountpoint: &Path) -> Result<(), OpenError> {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let (run, mount) = (real(Path::new(source)), real(mountpoint));
    if run.starts_with(&mount) {
        return Err(open::covered(mountpoint, &run));
    }
    if mount.starts_with(&run) {
        let (mountpoint, run) = (mountpoint.display(), run.display());
        return Err(OpenError::Surroundings(format!(
            "mountpoint {mountpoint}: inside the run {run}, which is searched for steps; mount outside of it"
        )));
    }
    Ok(())
}

impl RunState {
    /// The steps that are shown, by number.
    pub fn steps(&self) -> Vec<ListedStep> {
        self.slots.listed().iter().map(|slot| slot.step.clone()).collect()
    }

    /// The number of the newest step that is shown.
    pub fn latest(&self) -> Option<u64> {
        self.slots.latest().map(|(number, _)| number)
    }

    /// The name of the run for users.
    pub fn label(&self) -> &str {
        &self.source
    }

    /// What the hook has done so far.
    pub(super) fn hook_report(&self) -> Option<HookState> {
        self.hook.lock().as_ref().map(Hook::report)
    }

    /// The volumes that there are now.
    pub(super) fn volumes(&self) -> Vec<(Arc<Slot>, Arc<Volume>)> {
        let planned = self.slots.planned().into_iter();
        planned.filter_map(|slot| slot.volume().map(|volume| (slot, volume))).collect()
    }

    /// An error for a request that concerns a step which is gone.
    pub(super) fn gone(&self) -> FsError {
        self.counts.gone_requests.fetch_add(1, Ordering::Relaxed);
        FsError::Io
    }
}
