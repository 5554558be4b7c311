//! Interpretation of the settings: checkpoint, plans, memory budget, volume.

use std::{
    collections::BTreeSet,
    error::Error,
    io, iter,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use ckfs_checkpoint::{Accepted, Checkpoint, Container, OpenOptions, printable};
use ckfs_config::{
    Allow, Average, Config, HfCache, LayoutChoice, Materialize, MergedLora, MountSettings, OwnerId, ThreadCount,
    TimeLimit, ViewSettings,
};
use ckfs_host::{budget::Budget, limits, memory, state_directory, systemd};
use ckfs_plan::{Plan, ViewOptions, report::human_bytes};
use ckfs_read::{EngineOptions, EngineRooms};
use ckfs_source::{ComparedFiles, FileId, SourceError, WaitRegistry, digest::Compared, remote::RemoteOptions};
use ckfs_tensor::TensorId;
use ckfs_volume::{Overrides, ViewPlan, Volume, VolumeOptions};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{average, error::OpenError, own_mount};

/// Starts the threads that make plans, or only one if the limits allow fewer. By default they would start at their
/// first use, and panic if the system refused them.
pub(super) fn start_pool() -> Result<(), OpenError> {
    let startable = limits::startable_threads(cores(), 0);
    let mut pool = rayon::ThreadPoolBuilder::new().thread_name(|index| format!("ckfs-plan-{index}"));
    if let Some(refusal) = startable.refusal {
        if startable.threads == 0 {
            return Err(OpenError::of_threads("start a thread", &refusal));
        }
        // The mount needs the remaining threads.
        pool = pool.num_threads(1);
    }
    match pool.build_global() {
        Ok(()) => Ok(()),
        // The pool exists already.
        Err(error) if error.source().is_none() => Ok(()),
        Err(error) => Err(OpenError::of_threads("start threads", &io::Error::other(error))),
    }
}

/// The variable that names the disk cache, where no flag does.
const CACHE_VARIABLE: &str = "CKFS_CACHE_DIR";

/// The disk cache that the environment names.
pub fn cache_of_environment() -> Option<PathBuf> {
    std::env::var_os(CACHE_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

/// How services of the network are asked.
pub fn remote_options(settings: &MountSettings) -> RemoteOptions {
    RemoteOptions {
        cache_dir: settings.cache_dir.clone().or_else(cache_of_environment),
        cache_disk_bytes: settings.cache_disk_bytes.map(|bytes| bytes.0),
        timeout: settings.source_timeout.map_or(RemoteOptions::TIMEOUT, TimeLimit::duration),
        offline: settings.offline.unwrap_or(false),
        allow_http: settings.allow_http.unwrap_or(false),
        shares: settings.hf_cache == Some(HfCache::Share),
        waits: Arc::default(),
    }
}

/// Makes the path of a source complete: a daemon changes its working directory, and later checks its files by path again.
fn make_complete(source: &mut String, waits: &WaitRegistry) -> Result<(), OpenError> {
    let path = Path::new(&*source);
    let _looking = waits.begin_path(path, "look for the source");
    // A complete path needs no look at its storage.
    if path.is_absolute() || path.exists() {
        let absolute = std::path::absolute(path);
        let absolute = absolute.map_err(|error| OpenError::Surroundings(format!("{source}: {error}")))?;
        *source = absolute.display().to_string();
    }
    Ok(())
}

/// Makes the paths of the sources beside the one of a configuration complete. Returns that one, complete too.
pub(super) fn complete_source(config: &mut Config, waits: &WaitRegistry) -> Result<String, OpenError> {
    let mut source = config.source.clone().ok_or_else(OpenError::no_source)?;
    let averaged = config.mount.average.iter_mut().flat_map(Average::sources_mut);
    let others = [&mut config.config_from, &mut config.fill_from, &mut config.base].into_iter().flatten();
    iter::once(&mut source).chain(averaged).chain(others).try_for_each(|source| make_complete(source, waits))?;
    Ok(source)
}

/// How a configuration wants checkpoints to be opened, with every wait noted in `waits`.
pub(super) fn open_options(config: &Config, waits: &Arc<WaitRegistry>) -> OpenOptions {
    let of_view = |view: &ckfs_config::ViewConfig| {
        let merged = match &view.settings.merge_lora {
            Some(MergedLora::Dir(dir)) => Some(dir.clone()),
            Some(MergedLora::Own) | None => None,
        };
        [view.settings.lora.clone(), merged]
    };
    let mut adapters: Vec<_> = config.views.iter().flat_map(of_view).flatten().collect();
    adapters.sort();
    adapters.dedup();
    let allow_unfinished = config.mount.allow_unfinished == Some(true);
    // Later each view checks for itself what it needs.
    let allowed = |of: fn(&ViewSettings) -> &Option<Allow>| {
        let allowed: Vec<Allow> =
            config.views.iter().map(|view| of(&view.settings).clone().unwrap_or_default()).collect();
        Accepted::new(move |name| !allowed.is_empty() && allowed.iter().all(|allow| allow.accepts(name)))
    };
    OpenOptions {
        io: config.mount.source_io.unwrap_or_default(),
        adapters,
        config_from: config.config_from.clone(),
        fill_from: config.fill_from.clone(),
        base: config.base.clone(),
        average: if let Some(Average::Sources(sources)) = &config.mount.average { sources.clone() } else { Vec::new() },
        follow_symlinks: config.mount.follow_symlinks.unwrap_or(false),
        training_state: config.mount.training_state.unwrap_or(false),
        allow_unfinished,
        allow_missing: allowed(|settings| &settings.allow_missing),
        allow_unmapped: allowed(|settings| &settings.allow_unmapped),
        duplicates: config.mount.duplicates,
        variant: config.mount.variant.clone(),
        compared: state_directory().map(|directory| Arc::new(ComparedFiles::open(&directory))),
        fetches: Arc::clone(waits),
        asks_hub: true,
        remote: RemoteOptions { waits: Arc::clone(waits.services()), ..remote_options(&config.mount) },
        ..OpenOptions::default()
    }
}

/// Whose words warnings about a source and its plans are in the log. A command that shows them itself turns them off.
pub const FINDINGS: &str = "ckfs_findings";

/// Opens the checkpoint that a configuration names, with every wait noted in `waits`. `config` gets the source as a complete path or
/// with its revision, and the default layout of a checkpoint without a model's configuration.
///
/// # Errors
/// Everything wrong with the repository.
pub fn open_checkpoint(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Arc<Checkpoint>, OpenError> {
    if config.mount.steps.is_some() {
        let text =
            "--steps: for mount, serve, plan, export and verify; give the directory of one step here, and leave it out";
        return Err(OpenError::Surroundings(text.to_owned()));
    }
    start_pool()?;
    average::resolve(config, &open_options(config, waits))?;
    let source = complete_source(config, waits)?;
    let options = open_options(config, waits);
    let checkpoint = Checkpoint::open(&source, &options);
    let looking = waits.begin_path(Path::new(&source), "look for a mount");
    let checkpoint = checkpoint.map_err(|error| OpenError::Checkpoint { source_name: source.clone(), error })?;
    own_mount::refuse_shards(&source, &checkpoint)?;
    drop(looking);
    config.source = Some(match checkpoint.revision() {
        // The label is the repository's name with a short revision.
        Some(revision) => {
            let name = checkpoint.label().split('@').next().unwrap_or_default();
            format!("{name}@{revision}")
        }
        None => source,
    });
    // The choice is written down, so that every command and the mount's own configuration say the same.
    if !checkpoint.is_repository() {
        for view in &mut config.views {
            view.settings.layout.get_or_insert(LayoutChoice::Named("stored"));
        }
    }
    let suspicious: Vec<&str> = checkpoint.suspicious_files().map(|file| file.path.as_str()).collect();
    if let Some(files) = counted(&suspicious) {
        tracing::warn!("{files}: left out: safetensors that the index does not name");
    }
    if options.training_state && checkpoint.container() == Container::Safetensors {
        tracing::warn!("--training-state changes nothing: files of safetensors have weights alone");
    }
    let is_of_hub = checkpoint.source().remote().is_some() && checkpoint.revision().is_some();
    if options.remote.shares && !is_of_hub {
        tracing::warn!("--hf-cache share changes nothing: no file of this source comes from the Hub");
    }
    for warning in checkpoint.warnings() {
        tracing::warn!(target: FINDINGS, "{}", printable(warning));
    }
    Ok(Arc::new(checkpoint))
}

/// The first of some names, and how many more there are. None if there is none.
fn counted(names: &[&str]) -> Option<String> {
    const SHOWN: usize = 3;
    let shown = names.iter().take(SHOWN).map(|name| printable(name)).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 if names.is_empty() => None,
        0 => Some(shown),
        more => Some(format!("{shown} and {more} more")),
    }
}

/// The hint at the flags for names other than the expected ones.
const ADVICE: &str = "  --allow-missing[=PATTERN] accepts what is missing, --allow-unmapped[=PATTERN] what is unexpected; \
                      --source-rename 'REGEX=>TO' mends names";

/// Builds the plan of every view.
///
/// # Errors
/// Everything wrong with any of the plans.
pub fn plan_views(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<ViewPlan>, OpenError> {
    let (mut failures, mut problems) = (Vec::new(), Vec::new());
    let mut plans = Vec::new();
    let (mut of_names, mut other_shape, mut head) = (false, None, None);
    for view in &config.views {
        // What no rule of a layout names is left out if it is accepted. Other layouts show it.
        let is_of_rules =
            !matches!(view.settings.layout, None | Some(LayoutChoice::Named("canonical" | "hf" | "stored")));
        match ViewOptions::new(&view.settings).and_then(|options| Plan::build(checkpoint, &options)) {
            Ok(plan) => plans.push(ViewPlan { name: view.name.clone(), plan: Arc::new(plan) }),
            Err(error) => {
                of_names |= error.concerns_names();
                other_shape = other_shape.or_else(|| error.of_other_shape().map(str::to_owned));
                head = head.or_else(|| error.trained_head().filter(|_| is_of_rules).map(str::to_owned));
                let of_view = if view.name.is_empty() { String::new() } else { format!("view {}: ", view.name) };
                problems.extend(error.texts().into_iter().map(|problem| format!("{of_view}{problem}")));
                failures.push(format!("{of_view}{error}"));
            }
        }
    }
    if let Some(head) = head {
        failures.push(format!(
            "  {} is a trained head, for which the layout has no place: --allow-unmapped would leave it out, --layout hf has it",
            printable(&head)
        ));
    } else if of_names {
        failures.push(ADVICE.to_owned());
    }
    if let Some(tensor) = other_shape {
        failures.push(format!(
            "  a tensor that has another shape in one layer is often damaged, or of another model; if it is meant so, \
             --allow-missing={} shows it with its own shape",
            printable(&tensor)
        ));
    }
    if failures.is_empty() { Ok(plans) } else { Err(OpenError::View { text: failures.join("\n"), problems }) }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The purposes of memory in this process.
pub fn budget(settings: &MountSettings) -> Budget {
    let (cache_bytes, threads) = (settings.cache_bytes, settings.threads);
    Budget::new(memory::limit(), cores(), cache_bytes.map(|bytes| bytes.0), threads.map(ThreadCount::count))
}

/// Limits of the read engine.
pub(super) fn engine_options(budget: &Budget) -> EngineOptions {
    let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
    EngineOptions {
        tile_cache_bytes: bytes(budget.cache_bytes),
        spare_buffer_bytes: bytes(budget.spare_buffer_bytes),
        thread_buffer_bytes: bytes(budget.thread_buffer_bytes),
        workers: budget.threads,
    }
}

/// Warns of a cache size from the user that exceeds the memory.
pub(super) fn warn_of_large_cache(budget: &Budget) {
    if let Some(fits) = budget.cache_bytes_that_fit() {
        let (cache, all) = (human_bytes(budget.cache_bytes), human_bytes(budget.total_bytes()));
        let (limit, origin) = (human_bytes(budget.limit.bytes), &budget.limit.origin);
        tracing::warn!(
            "--cache-bytes {cache}: with buffers and mapped pages ckfs may take {all}, more than the limit of {limit} ({origin}), \
             and may be killed; at most {} fit",
            human_bytes(fits)
        );
    }
}

/// The command that mounts the present mount anew. A service of systemd would be started again by its unit, beside another mount.
pub(super) fn remount_command(config: &Config) -> Option<String> {
    let mountpoint = config.mountpoint.as_ref().map(|point| quoted(&point.display().to_string()));
    systemd::restart_command("self").or(Some(format!("ckfs restart {}", mountpoint?)))
}

/// A word quoted for the shell, if that is needed.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+@%:,=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The configured owners and permission bits, as far as they have an effect: files are read, and directories listed and
/// passed.
pub fn overrides(settings: &MountSettings) -> Overrides {
    Overrides {
        file_mode: settings.file_mode.map(|mode| mode.0 & 0o444),
        dir_mode: settings.dir_mode.map(|mode| mode.0 & 0o555),
        uid: settings.uid.map(OwnerId::number),
        gid: settings.gid.map(OwnerId::number),
    }
}

/// The volume of a configuration, ready for reads. Every wait for storage is noted in `waits`.
///
/// # Errors
/// Everything wrong with settings, repository or plans.
pub fn open_volume(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Volume, OpenError> {
    let checkpoint = open_checkpoint(config, waits)?;
    let plans = plan_views(&checkpoint, config)?;
    for (name, warning) in plans.iter().flat_map(|view| view.plan.warnings.iter().map(|text| (&view.name, text))) {
        let warning = printable(warning);
        if name.is_empty() {
            tracing::warn!(target: FINDINGS, "{warning}");
        } else {
            tracing::warn!(target: FINDINGS, "view {name}: {warning}");
        }
    }
    volume_of(&checkpoint, &plans, config)
}

/// The volume of these plans.
///
/// # Errors
/// Every reason why the plans cannot be mounted.
pub fn volume_of(checkpoint: &Arc<Checkpoint>, plans: &[ViewPlan], config: &Config) -> Result<Volume, OpenError> {
    let mut budget = budget(&config.mount);
    admit_chunks(checkpoint, plans, &mut budget)?;
    bound_source(checkpoint, &budget, 1, 0);
    warn_of_large_cache(&budget);
    let options = volume_options(config, budget, None)?;
    Ok(Volume::new(Arc::clone(checkpoint), plans.to_vec(), options)?)
}

/// Makes room in the budget for the largest chunk that these plans need. Returns the memory that it takes, in bytes.
///
/// A compressed chunk is decoded whole, however small its stored bytes are: a few hundred kilobytes may be gigabytes of zeros. If the
/// largest chunk needs more than its part of the budget, the part grows as far as the limit allows.
///
/// # Errors
/// It does not fit the limit. The error names the tensor, both sizes, and what to do.
pub(super) fn admit_chunks(checkpoint: &Checkpoint, plans: &[ViewPlan], budget: &mut Budget) -> Result<u64, OpenError> {
    let Some((bytes, tensor)) = largest_chunk(checkpoint, plans) else { return Ok(0) };
    let most_bytes = budget.decoded_bytes_max();
    if bytes <= most_bytes {
        budget.decoded_bytes = budget.decoded_bytes.max(bytes);
        return Ok(bytes);
    }
    let (source, tensor) = (checkpoint.source(), checkpoint.tensor(tensor));
    let stored = source.coded(tensor.file(), tensor.span().start()).and_then(|coded| coded.stored);
    let stored = stored.map(|span| format!(", stored in {}", human_bytes(span.len()))).unwrap_or_default();
    let (limit, origin) = (human_bytes(budget.limit.bytes), &budget.limit.origin);
    Err(OpenError::of_view(format!(
        "{}, tensor {}: a chunk is compressed as a whole and takes {} of memory to decode{stored}; {} are free for it within the \
         limit of {limit} ({origin}). Allow more memory, lower --cache-bytes (now {}), leave the tensor out with --exclude, or \
         save the checkpoint in smaller chunks",
        source.path(tensor.file()).display(),
        tensor.name,
        human_bytes(bytes),
        human_bytes(most_bytes),
        human_bytes(budget.cache_bytes),
    )))
}

/// The most memory that a chunk takes, in bytes, and its first tensor.
fn largest_chunk(checkpoint: &Checkpoint, plans: &[ViewPlan]) -> Option<(u64, TensorId)> {
    let chunks = checkpoint.source().chunks()?;
    let (mut largest, mut seen) = (None, BTreeSet::new());
    for tensor in plans.iter().flat_map(|view| &view.plan.tensors) {
        tensor.view.for_each_stored(&mut |id| {
            let file = checkpoint.tensor(id).file();
            if seen.insert(file.index()) {
                let bytes = chunks.memory_bytes(file);
                if bytes > largest.map_or(0, |(most, _)| most) {
                    largest = Some((bytes, id));
                }
            }
        });
    }
    largest
}

/// Bounds the memory of a source to a part of the budget, but that its largest chunk has room, which takes `chunk_bytes`.
pub(super) fn bound_source(checkpoint: &Checkpoint, budget: &Budget, parts: u64, chunk_bytes: u64) {
    if let Some(maps) = checkpoint.source().maps() {
        maps.bound(budget.mapped_bytes / parts, budget.revisit_window_bytes / parts);
    }
    if let Some(chunks) = checkpoint.source().chunks() {
        chunks.bound_bytes((budget.decoded_bytes / parts).max(chunk_bytes));
    }
}

/// A mountpoint would cover a file of the source.
pub(super) fn covered(mountpoint: &Path, file: &Path) -> OpenError {
    let (mountpoint, file) = (mountpoint.display(), file.display());
    OpenError::Surroundings(format!("mountpoint {mountpoint}: would cover the source file {file}"))
}

/// A configuration as a mount shows it.
pub(super) fn config_text(config: &Config) -> Result<String, OpenError> {
    config.to_toml().map_err(|error| OpenError::Surroundings(error.to_string()))
}

/// How a configuration wants its volume, with memory of its own or in these rooms.
pub(super) fn volume_options(
    config: &Config,
    budget: Budget,
    rooms: Option<EngineRooms>,
) -> Result<VolumeOptions, OpenError> {
    let materialize = config.mount.materialize.clone().unwrap_or_default();
    Ok(VolumeOptions {
        engine: engine_options(&budget),
        direct: config.mount.direct_io.clone().unwrap_or_default(),
        direct_once: config.mount.direct_io.is_none() && matches!(materialize, Materialize::Auto | Materialize::None),
        config_text: config_text(config)?,
        budget: Some(budget),
        remount: remount_command(config).unwrap_or_default(),
        overrides: overrides(&config.mount),
        materialize,
        rooms,
    })
}

/// Fails if a source file has changed since it was opened, or if one that was read does not have the digest that is known of it.
/// Says which could not be compared.
///
/// # Errors
/// The first such file.
pub fn check_sources(volume: &Volume) -> Result<(), SourceError> {
    let source = volume.engine().checkpoint().source();
    let files: Vec<FileId> = source.files().collect();
    files.iter().try_for_each(|file| source.check(*file))?;
    let compare = |file: &FileId| match source.compare(*file)? {
        Compared::Unknown | Compared::Right => Ok(None),
        Compared::Partial { absent_bytes } => Ok(Some((*file, absent_bytes))),
    };
    let used = files.par_iter().filter(|file| source.is_used(**file));
    let found: Vec<Option<(FileId, u64)>> = used.map(compare).collect::<Result<_, SourceError>>()?;
    let parts: Vec<(FileId, u64)> = found.into_iter().flatten().collect();
    if let Some((file, absent_bytes)) = parts.first() {
        let (path, absent) =
            (printable(&source.path(*file).display().to_string()).into_owned(), human_bytes(*absent_bytes));
        let others = parts.len() - 1;
        let more = if others == 0 { String::new() } else { format!(", nor {others} other files") };
        tracing::info!(
            "not compared with the digest that its service names: {path}, of which {absent} were not fetched{more}; `ckfs fetch` \
             of all devices brings and compares whole files"
        );
    }
    Ok(())
}

/// Prepares the place of materialized files. The inner error is that of memory, without which a volume goes on.
///
/// # Errors
/// The directory that the user names cannot hold such files.
pub fn enable_materialization(volume: &mut Volume) -> Result<io::Result<()>, OpenError> {
    let directory = volume.policy().directory().cloned();
    match (volume.enable_materialization(), directory) {
        (Err(error), Some(directory)) => {
            let text = format!("{}: no place for materialized files: {error}", directory.display());
            Err(OpenError::Surroundings(text))
        }
        (enabled, _) => Ok(enabled),
    }
}
