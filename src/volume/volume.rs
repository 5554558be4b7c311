//! The volume: a checkpoint's views as a file system.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, atomic::AtomicU64},
    time::{SystemTime, UNIX_EPOCH},
};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Materialize;
use ckfs_host::budget::Budget;
use ckfs_image::{
    DerivedFrom, Directory, FileContent, FormatInput, GeneratedFile, LazyFile, OWN, text_file, unavailable_text,
};
use ckfs_plan::{Allow, Plan, PlanError, Problem, report};
use ckfs_read::{Engine, EngineOptions, EngineRooms, PreparedFile};
use ckfs_source::{
    FileId, Stall,
    permission::{Mounter, Overrides},
};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use rayon::prelude::*;

use super::{
    exposition,
    file_system::{Handle, Ino},
    health::{HealthProblem, VolumeHealth},
    live_reads::LiveReads,
    materialize::{BundleSizes, FileEntry, Materializer, Policy},
    metrics::Metrics,
    permissions::{Permissions, readers, readers_text},
    stats,
    tree::{FixedKind, Live, NodeTree, TreeBuilder, TreeLeaf},
    upkeep::OnChange,
};

/// How to mount anew, where the command is not known.
const REMOUNT: &str = "open the source again, in a new process";

/// A plan and its directory in the mount.
#[derive(Clone, Debug)]
pub struct ViewPlan {
    /// Directory under the mount; empty for the mount's root itself.
    pub name: String,
    /// The plan.
    pub plan: Arc<Plan>,
}

/// Settings of a volume.
#[derive(Clone, Default)]
pub struct VolumeOptions {
    /// Limits of the engine.
    pub engine: EngineOptions,
    /// Tensor files, by path, that bypass the kernel's page cache.
    pub direct: Allow,
    /// Whether the first open of a file bypasses it too, where programs read such files once.
    pub direct_once: bool,
    /// The effective configuration, shown as `.ckfs/config.toml`.
    pub config_text: String,
    /// The memory budget by purpose, shown in the statistics.
    pub budget: Option<Budget>,
    /// The command that mounts anew, shown with problems; empty for the general form.
    pub remount: String,
    /// The user's settings for owners and permission bits; they replace those of the sources.
    pub overrides: Overrides,
    /// The tensor files that are materialized, once [`Volume::enable_materialization`] is called.
    pub materialize: Materialize,
    /// Memory and threads that other volumes use too; in place of the engine's own.
    pub rooms: Option<EngineRooms>,
}

/// A checkpoint's views as a file system. Immutable except for caches and counters.
pub struct Volume {
    pub(super) engine: Arc<Engine>,
    pub(super) views: Vec<Arc<Plan>>,
    pub(super) tree: NodeTree,
    pub(super) modified: SystemTime,
    pub(super) total_bytes: u64,
    pub(super) metrics: Metrics,
    pub(super) next_handle: AtomicU64,
    /// The first handle of this process. Others were given by a process before or after it.
    pub(super) first_handle: AtomicU64,
    pub(super) open: RwLock<HashMap<(Ino, Handle), Open>>,
    pub(super) live_reads: LiveReads,
    pub(super) watched: Arc<Watched>,
    pub(super) remembered: Mutex<PreparedFileCache>,
    pub(super) direct: Allow,
    pub(super) direct_once: bool,
    pub(super) policy: Policy,
    pub(super) materializer: Option<Materializer>,
    pub(super) budget: Option<Budget>,
    pub(super) remount: String,
    pub(super) stats_bytes: usize,
    pub(super) permissions: Permissions,
}

/// Makes the text of `ckfs plan` for these views, with `remarks` at its end.
fn plan_text(checkpoint: &Arc<Checkpoint>, views: &[ViewPlan], remarks: String) -> impl Fn() -> FileContent + use<> {
    let (checkpoint, views) = (Arc::clone(checkpoint), views.to_vec());
    move || {
        let plans = views.iter().map(|view| (view.name.as_str(), view.plan.as_ref()));
        let text = format!("{}{remarks}", report::text(&checkpoint, plans));
        FileContent::Bytes(text.into_bytes().into())
    }
}

impl Volume {
    /// A volume of these views.
    ///
    /// # Errors
    /// Names that cannot be laid out as a tree.
    ///
    /// # Panics
    /// Never: there are fewer than 2^32 views.
    pub fn new(checkpoint: Arc<Checkpoint>, views: Vec<ViewPlan>, options: VolumeOptions) -> Result<Self, PlanError> {
        let source = checkpoint.source();
        let modified = source.files().map(|file| source.pin(file).modified).max().unwrap_or(UNIX_EPOCH);
        let total_bytes = source.files().map(|file| source.len_bytes(file)).fold(0, u64::saturating_add);
        let input = |view: &ViewPlan| FormatInput::new(Arc::clone(&checkpoint), Arc::clone(&view.plan));
        let shown: Vec<_> = views.par_iter().map(|view| ckfs_image::layout(&Arc::new(input(view)))).collect();
        // What the plan's text ends with.
        let mut remarks = String::new();
        let mut problems = Vec::new();
        let mut root = TreeBuilder::default();
        let mut bundles = BundleSizes::default();
        for (number, (view, shown)) in (0..).zip(views.iter().zip(shown)) {
            match shown {
                Ok((shown, lacking)) => {
                    remarks.push_str(&unavailable_text(&view.name, &lacking));
                    add_bundles(&mut bundles, &view.plan, &shown);
                    let directory = if view.name.is_empty() { Some(&mut root) } else { root.directory(&view.name) };
                    let added = directory.map_or_else(
                        || Err(view.name.clone()),
                        |at| at.merge(shown, &|shown| TreeLeaf::of(number, shown)),
                    );
                    let taken = "the name is taken by another view".to_owned();
                    problems.extend(added.err().map(|file| Problem::File { file, reason: taken }));
                }
                Err(found) => problems.extend(found),
            }
        }
        let engine = Arc::new(match &options.rooms {
            Some(rooms) => rooms.engine(checkpoint),
            None => Engine::new(checkpoint, options.engine),
        });
        let checkpoint = engine.checkpoint();
        let policy = Policy::new(options.materialize, engine.reservable_bytes() as u64, bundles);
        remarks.push_str(&policy.text());
        let mounter = Mounter::of_this_process();
        remarks.push_str(&readers_text(&readers(checkpoint, &mounter, &options.overrides)));
        if let Some(directory) = root.directory(OWN) {
            let text = |text: String| text_file(text.into_bytes().into(), DerivedFrom::Everything);
            directory.add("stats.json", TreeLeaf::Fixed(FixedKind::Live(Live::Stats)));
            directory.add("metrics", TreeLeaf::Fixed(FixedKind::Live(Live::Metrics)));
            directory.add("config.toml", TreeLeaf::own(text(options.config_text)));
            // The text goes through all tensors, and few mounts are asked for it.
            let plan = LazyFile::new(plan_text(checkpoint, &views, remarks), DerivedFrom::Everything);
            directory.add("plan.txt", TreeLeaf::own(plan));
        }
        if !problems.is_empty() {
            return Err(PlanError { problems });
        }
        let views: Vec<Arc<Plan>> = views.into_iter().map(|view| view.plan).collect();
        let remount = Some(options.remount).filter(|command| !command.is_empty());
        let tree = NodeTree::new(root);
        let permissions = Permissions::new(checkpoint, &views, &tree, mounter, options.overrides);
        let watched = Arc::<Watched>::default();
        // Also where no read finds it: bytes of a remote object are compared when all of them have come.
        let told = Arc::downgrade(&watched);
        checkpoint.source().health().on_poisoned(Box::new(move || {
            if let Some(watched) = told.upgrade() {
                watched.report();
            }
        }));
        Ok(Self {
            stats_bytes: stats::stats_bytes(&**checkpoint.source()),
            budget: options.budget,
            remount: remount.unwrap_or_else(|| REMOUNT.to_owned()),
            engine,
            views,
            tree,
            modified,
            total_bytes,
            metrics: Metrics::default(),
            next_handle: AtomicU64::new(1),
            first_handle: AtomicU64::new(1),
            open: RwLock::default(),
            live_reads: LiveReads::default(),
            watched,
            remembered: Mutex::new(PreparedFileCache { files: LruCache::unbounded(), segments: 0 }),
            direct: options.direct,
            direct_once: options.direct_once,
            policy,
            materializer: None,
            permissions,
        })
    }

    /// The inputs of the statistics.
    pub(super) fn reported(&self) -> stats::Reported<'_> {
        stats::Reported {
            metrics: &self.metrics,
            engine: &self.engine,
            budget: self.budget.as_ref(),
            shared_bytes: self.materializer.as_ref().and_then(Materializer::used_bytes),
            remount: &self.remount,
        }
    }

    /// The mount's problems. The code that finds a problem notes it here.
    pub fn health(&self) -> &VolumeHealth {
        &self.metrics.health
    }

    /// The problems that are open now, those of changed source files too. None while the volume is healthy.
    pub fn open_problems(&self) -> Vec<HealthProblem> {
        self.reported().health().into_open_problems()
    }

    /// The metrics in the text format of `OpenMetrics`.
    pub fn metrics_text(&self) -> String {
        exposition::metrics_text(&self.reported())
    }

    /// The files that are materialized.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The plans of its views.
    pub fn plans(&self) -> &[Arc<Plan>] {
        &self.views
    }

    /// The memory budget, if the volume was made with one.
    pub fn budget(&self) -> Option<&Budget> {
        self.budget.as_ref()
    }

    /// The read engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

/// Adds a view's bundles: the files that hold all tensors of a device.
fn add_bundles(bundles: &mut BundleSizes, plan: &Plan, shown: &Directory) {
    let formats = shown.bundles() / plan.devices.len().max(1);
    for bytes in report::bytes_per_device(plan) {
        (0..formats).for_each(|_| bundles.add(bytes));
    }
}

/// Most segments of closed files that stay cached with their tilings and tiles.
const REMEMBERED_SEGMENTS_MAX: usize = 200_000;
/// Most closed files that stay cached. The tiling of one view may take some megabytes.
const REMEMBERED_FILES_MAX: usize = 64;

/// An open file.
#[derive(Clone)]
pub(super) enum Open {
    Original(FileId),
    Bytes(Arc<[u8]>),
    Generated(Arc<GeneratedFile>),
    Live(Live),
    /// A file of tensors, and its entry if it may be materialized.
    Image(Arc<PreparedFile>, Option<Arc<FileEntry>>),
}

/// Prepared files, open or recently closed: a reopened file finds its tilings and tiles again.
#[derive(Debug)]
pub(super) struct PreparedFileCache {
    pub(super) files: LruCache<Ino, Arc<PreparedFile>>,
    pub(super) segments: usize,
}

impl PreparedFileCache {
    /// Removes the closed file that was opened longest ago, if the cache is over its limits. An open file stays: a second open
    /// would tile it a second time.
    pub(super) fn forget_one(&mut self) -> Option<Arc<PreparedFile>> {
        let many = self.files.len() > REMEMBERED_FILES_MAX || self.segments > REMEMBERED_SEGMENTS_MAX;
        let closed = |file: &Arc<PreparedFile>| Arc::strong_count(file) == 1;
        let (ino, _) = self.files.iter().rev().find(|(_, file)| many && closed(file))?;
        let old = self.files.pop(&ino.clone())?;
        self.segments -= old.image().segments().len();
        Some(old)
    }
}

/// The state of the sources and files that are in use; see [`super::watching`].
#[derive(Default)]
pub(super) struct Watched {
    /// Inodes that were opened: a bit set in words of 64 bits.
    pub(super) opened: Mutex<HashMap<u64, u64>>,
    /// Sources of files that were opened.
    pub(super) in_use: Mutex<BTreeSet<FileId>>,
    /// Sources that a thread is checking now; the check may take long.
    pub(super) checking: Mutex<BTreeSet<FileId>>,
    /// Stalls that were reported already.
    pub(super) stalls: Mutex<Vec<Stall>>,
    /// Poisoned sources that were reported already.
    pub(super) reported: AtomicU64,
    /// Called when a source has changed.
    pub(super) on_change: Mutex<Option<OnChange>>,
    /// Files that the kernel reads directly from the next open on, and whose pages it still keeps.
    pub(super) superseded: Mutex<BTreeSet<Ino>>,
}

impl Watched {
    /// Notes that a file was opened. Returns whether it was before.
    pub(super) fn note_opened(&self, ino: Ino) -> bool {
        let (mut opened, bit) = (self.opened.lock(), 1 << (ino.0 % 64));
        let word = opened.entry(ino.0 / 64).or_default();
        let before = *word & bit != 0;
        *word |= bit;
        before
    }

    /// Notes that sources are read from now on.
    pub(super) fn note_in_use(&self, files: &[FileId]) {
        self.in_use.lock().extend(files);
    }

    /// Notes that the kernel reads a file directly from the next open on. That open would wait while the kernel drops the pages it
    /// has read through ckfs, 0.1 s per GB, so they are dropped now.
    pub(super) fn note_superseded(&self, ino: Ino) {
        self.superseded.lock().insert(ino);
        self.report();
    }

    /// Tells the server that there are files to drop.
    pub(super) fn report(&self) {
        if let Some(callback) = &*self.on_change.lock() {
            callback();
        }
    }

    pub(super) fn opened(&self) -> Vec<Ino> {
        let opened = self.opened.lock();
        let bits = |(word, bits): (&u64, &u64)| {
            let (word, bits) = (*word, *bits);
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| Ino(word * 64 + bit))
        };
        opened.iter().flat_map(bits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opened_files_are_remembered_once() {
        let watched = Watched::default();
        for (ino, before) in [(1, false), (64, false), (63, false), (1, true), (1 << 40, false)] {
            assert_eq!(watched.note_opened(Ino(ino)), before, "{ino}");
        }
        let mut opened: Vec<u64> = watched.opened().into_iter().map(|ino| ino.0).collect();
        opened.sort_unstable();
        assert_eq!(opened, [1, 63, 64, 1 << 40]);
    }
}
