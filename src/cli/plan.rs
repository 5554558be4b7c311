//! `ckfs plan`: what would be mounted.

use std::{collections::BTreeMap, ffi::OsString, fmt::Write as _, fs::File, io::Write as _, path::PathBuf, sync::Arc};

use anyhow::{Context, bail};
use ckfs_checkpoint::{Checkpoint, CheckpointError, printable, runs::StepKind};
use ckfs_config::{Config, SETTINGS, Settings, Steps};
use ckfs_fuse::{MountError, check_mountpoint, is_passed};
use ckfs_plan::{
    RemoteBytes,
    report::{Report, ViewReport, html, human_bytes, summary},
};
use ckfs_service::{plan_views, quoted, steps::ListedStep, volume_of};
use ckfs_tensor::EncodedMatrices;
use ckfs_volume::{Mounter, OmittedFormat, PermittedReaders, ViewPlan, Volume, readers, unavailable};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tracing::warn;

use super::{
    fetch,
    flags::{LogFlags, SourceFlags, source_help},
    open,
    output::{self, Usage, warning_text},
    paragraph, steps, tree,
};

/// The plan's text in a mount.
const PLAN: &str = ".ckfs/plan.txt";

/// Shows what would be mounted, without mounting.
///
/// Prints what to know before a mount, in about a dozen lines: how the repository names, fuses and quantizes its tensors,
/// layout, mesh, bytes per device and to fetch, what is left out, and warnings. Everything wrong with the repository or the
/// flags is an error here as it is for `mount`, all of it at once.
///
/// `-v` prints all: the tensors that each mesh axis splits, every group of tensors with shape, dtype and spec, the files to
/// materialize, and the directories that a mount would not have, with the reasons. It also lists differences between layers
/// that nothing in config.json explains, and the trainers that read only their own chunks of orbax/ and dcp/.
///
/// Shards cut on an inner axis use only a part of each page of the sources that they touch. Where that makes a difference,
/// "over-read" says how many times the bytes needed those pages hold, for the devices and for all listed ones together;
/// `-v` says why, and what would change it.
///
/// Of a run, a directory in which a trainer leaves a checkpoint for each step, it lists the steps first: kind, size, and
/// whether each is finished, or why not. With `--steps` it plans the selected ones.
///
/// `--html FILE` also writes the plan as a page for a browser: tensors by devices, the bytes of the source files that feed
/// each device, bytes per device, over-read with its reason, and what is left out. The page is one file that loads nothing
/// from elsewhere. It has at most 5 MB, and names what it leaves out. The command prints the same with it as without it.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs plan /data/llama --mesh fsdp=4,tensor=2
  ckfs plan /data/llama --mesh fsdp=4,tensor=2 -v           every tensor, over-read with its reason
  ckfs plan /data/llama --layout hf --quantize fp8-block --check-values
  ckfs plan org/name@main --layout hf --dtype bf16
  ckfs plan --config /etc/ckfs/llama.toml
  ckfs plan /data/llama --mesh fsdp=4,tensor=2 --html plan.html
  ckfs plan /data/llama --mesh fsdp=8 --mesh fsdp=4,tensor=2 --html plan.html    compares two meshes
  ckfs plan /runs/llama/checkpoints                         lists the steps of a run
  ckfs plan /data/llama --mesh fsdp=8 --json | jq '.views[0].devices'")]
pub(super) struct PlanCommand {
    #[arg(help = source_help())]
    source: Option<String>,
    /// Prints JSON, with every tensor.
    #[arg(long)]
    json: bool,
    /// Writes a page for a browser as well, in place of a file of that name. With several --mesh it compares them.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// A further mesh of a page that compares some; typed as --mesh once more.
    #[arg(long, hide = true, value_name = "MESH")]
    and_mesh: Vec<OsString>,
    /// Reads all weights that --quantize names, and refuses those with a value that has no code: a NaN or an infinity.
    #[arg(long)]
    check_values: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

/// The arguments of a plan as a page, where `--mesh` is there several times: each but the first says a mesh to compare with.
pub(super) fn with_compared_meshes(args: Vec<OsString>) -> Vec<OsString> {
    let is = |word: &OsString, flag: &str| word.to_str().is_some_and(|word| word.split('=').next() == Some(flag));
    let is_page = args.iter().any(|word| word == "plan") && args.iter().any(|word| is(word, "--html"));
    if !is_page {
        return args;
    }
    let mut meshes = 0;
    let compared = |word: OsString| {
        meshes += usize::from(is(&word, "--mesh"));
        match word.to_str().and_then(|word| word.strip_prefix("--mesh")).filter(|_| meshes > 1 && is(&word, "--mesh")) {
            Some(value) => format!("--and-mesh{value}").into(),
            None => word,
        }
    };
    args.into_iter().map(compared).collect()
}

/// Whether a source is opened as the checkpoint of the one step that is in it: an error is about that step.
fn is_of_its_only_step(listed: &[ListedStep]) -> bool {
    // What names a step in the source itself, a tracker or `latest`, is of trainers that name it so.
    matches!(listed, [step] if step.kind == StepKind::Orbax || ["iter_", "global_step"].iter().any(|start| step.name.starts_with(start)))
}

impl PlanCommand {
    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        let page = self.html.as_deref().map(output::replaced).transpose()?;
        let mut config = open::source_config(self.source.as_deref(), &self.flags)?;
        self.add_compared(&mut config)?;
        if let Some(wanted) = config.mount.steps {
            if page.is_some() {
                return Err(Usage("--html: for one step: give its directory, and leave --steps out".to_owned()).into());
            }
            return self.plan_steps(&config, wanted, log);
        }
        // An average is one checkpoint.
        let listed =
            if config.mount.average.is_some() { None } else { steps::of_directory(&config)? }.unwrap_or_default();
        let checkpoint = match open::checkpoint(&mut config) {
            Ok(opened) => opened,
            // A service that does not list the source would not list its steps either.
            Err(error) if matches!(error.downcast_ref(), Some(CheckpointError::Remote(_))) => return Err(error),
            Err(error) => {
                let listed = if listed.is_empty() { steps::of_service(&config) } else { listed };
                if listed.is_empty() || is_of_its_only_step(&listed) {
                    return Err(error);
                }
                return self.only_steps(&config, &listed, error);
            }
        };
        // One step is the checkpoint of this plan.
        let listed = if listed.len() > 1 { listed } else { Vec::new() };
        let planned = Planned::new(checkpoint, &config)?;
        if !self.json && !listed.is_empty() {
            output::print(&format!("{}\n", steps::run_text(config.source.as_deref().unwrap_or_default(), &listed)))?;
        }
        if self.check_values {
            planned.check_values()?;
        }
        if let Some(page) = page {
            let text = html(&planned.checkpoint, &planned.views(), planned.needs.as_ref());
            output::replace(&page, |new| {
                let mut file = File::options().write(true).create_new(true).open(new)?;
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })?;
        }
        if self.json {
            let steps = (!listed.is_empty()).then(|| ("steps".to_owned(), steps::to_json(&listed)));
            output::print_json(&planned.report(&config, steps))?;
        } else {
            output::print(&planned.text(log)?)?;
            if log.verbose == 0 && self.and_mesh.is_empty() {
                output::print(&self.next())?;
            }
        }
        self.warn(&planned, log);
        // The process ends now. Giving back some million pieces of memory one by one takes a tenth of the whole time.
        std::mem::forget(planned);
        Ok(())
    }

    /// Makes a view of each mesh to compare, under the mesh's name.
    fn add_compared(&self, config: &mut Config) -> anyhow::Result<()> {
        if self.and_mesh.is_empty() {
            return Ok(());
        }
        let [only] = config.views.as_mut_slice() else {
            let text = "--mesh several times: expected one view, found several in the configuration";
            return Err(Usage(text.to_owned()).into());
        };
        let mesh = SETTINGS.iter().find(|setting| setting.name == "mesh").context("the setting of a mesh")?;
        let mut views = vec![only.clone()];
        for word in &self.and_mesh {
            let mut typed = Settings::default();
            (mesh.field.add)(&mut typed, word).map_err(Usage)?;
            let mut view = only.clone();
            view.settings.mesh = typed.view.mesh;
            views.push(view);
        }
        for view in &mut views {
            view.name = view.settings.mesh.clone().unwrap_or_default().to_string();
        }
        config.views = views;
        Ok(())
    }

    /// Lists the steps of a run that is no checkpoint.
    ///
    /// # Errors
    /// `error`, if the source is a checkpoint with steps that cannot be opened.
    fn only_steps(&self, config: &Config, listed: &[ListedStep], error: anyhow::Error) -> anyhow::Result<()> {
        let source = config.source.as_deref().unwrap_or_default();
        if self.json {
            output::print_json(&json!({ "run": source, "steps": steps::to_json(listed) }))?;
        } else {
            output::print(&steps::run_text(source, listed))?;
        }
        let is_orbax = |step: &ListedStep| step.kind == StepKind::Orbax && step.unfinished.is_none();
        if listed.iter().any(is_orbax) { Err(error) } else { Ok(()) }
    }

    /// Plans each of the selected steps.
    fn plan_steps(&self, config: &Config, wanted: Steps, log: &LogFlags) -> anyhow::Result<()> {
        let mut all = Vec::new();
        for (step, mut config) in steps::selected(config, wanted)? {
            let of_step = || format!("step {}", step.number);
            let checkpoint = open::checkpoint(&mut config).with_context(of_step)?;
            let planned = Planned::new(checkpoint, &config).with_context(of_step)?;
            if self.json {
                let report = serde_json::to_value(planned.report(&config, None))?;
                all.push(json!({ "step": step.number, "source": step.source, "plan": report }));
            } else {
                let text = planned.text(log)?;
                output::print(&format!("step {}: {}\n{text}\n", step.number, printable(&step.source)))?;
            }
            self.warn(&planned, log);
        }
        if self.json {
            output::print_json(&json!({ "run": config.source, "steps": all }))?;
        }
        Ok(())
    }
}

/// What a report in a few lines leaves to others.
const MORE: &str = "-v shows every tensor with its spec, and why; --html FILE draws it";

/// What would be mounted.
struct Planned {
    checkpoint: Arc<Checkpoint>,
    plans: Vec<ViewPlan>,
    volume: Volume,
    needs: Option<RemoteBytes>,
}

impl Planned {
    fn new(checkpoint: Arc<Checkpoint>, config: &Config) -> anyhow::Result<Self> {
        let plans = plan_views(&checkpoint, config).map_err(open::explained)?;
        // The layout of all files, made as for a mount, finds the plans that cannot be mounted.
        let mut volume = volume_of(&checkpoint, &plans, config).map_err(open::explained)?;
        check_places(config, &mut volume)?;
        let needs = fetch::needs(&checkpoint, &plans)?;
        Ok(Self { checkpoint, plans, volume, needs })
    }

    /// Finds the values that are to be quantized and have no code.
    fn check_values(&self) -> anyhow::Result<()> {
        // A weight that a view shows alone and in a stack is one.
        let mut matrices: BTreeMap<(usize, String), Arc<EncodedMatrices>> = BTreeMap::new();
        for (number, view) in self.plans.iter().enumerate() {
            for tensor in &view.plan.tensors {
                tensor.view.for_each_encoded(&mut |of| {
                    matrices.entry((number, of.name.clone())).or_insert_with(|| Arc::clone(of));
                });
            }
        }
        if matrices.is_empty() {
            bail!("--check-values: nothing is quantized: expected --quantize SCHEME");
        }
        let engine = self.volume.engine();
        let found: Vec<String> = matrices
            .values()
            .filter_map(|of| Some(format!("  {}", printable(&engine.check_encoded(of).err()?.to_string()))))
            .collect();
        if !found.is_empty() {
            bail!("{} of {} weights cannot be quantized:\n{}", found.len(), matrices.len(), found.join("\n"));
        }
        tracing::info!("all values of {} weights have codes", matrices.len());
        Ok(())
    }

    /// The views with the formats that they do not have.
    fn views(&self) -> Vec<ViewReport<'_>> {
        let row = |shown: &OmittedFormat| json!({"format": shown.format, "reason": shown.reason});
        let more = |view: &ViewPlan| {
            let missing: Value = unavailable(&view.plan).iter().map(row).collect();
            Map::from_iter([("unavailable".to_owned(), missing)])
        };
        self.plans.iter().map(|of| ViewReport { name: &of.name, plan: &of.plan, more: more(of) }).collect()
    }

    /// All of it as JSON: the plans, what a volume adds to them, and another member.
    fn report(&self, config: &Config, other: Option<(String, Value)>) -> impl Serialize {
        let row = |readers: &PermittedReaders| {
            let permission = readers.permission;
            json!({
                "uid": permission.uid, "gid": permission.gid, "mode": format!("{:04o}", permission.mode),
                "files": readers.files, "example": readers.example,
            })
        };
        let overrides = ckfs_service::overrides(&config.mount);
        let readers = readers(&self.checkpoint, &Mounter::of_this_process(), &overrides);
        let mut more = Map::from_iter([
            ("materialized".to_owned(), self.volume.policy().to_json()),
            ("readers".to_owned(), readers.iter().map(row).collect()),
        ]);
        more.extend(self.needs.as_ref().map(|needs| ("remote".to_owned(), needs.to_json())));
        more.extend(other);
        Report::new(&self.checkpoint, self.views(), more)
    }

    /// The plan in a dozen lines, or all of it, as a mount shows it too.
    fn text(&self, log: &LogFlags) -> anyhow::Result<String> {
        if log.verbose > 0 {
            let node = tree::find(&self.volume, PLAN)?;
            let (file, mut text) = (tree::ServedFile::open(&self.volume, None, &node)?, Vec::new());
            file.read(0, usize::try_from(node.attr.size_bytes)?, &mut text).context(PLAN)?;
            let more = self.needs.as_ref().map(remote_text).unwrap_or_default();
            return Ok(String::from_utf8_lossy(&text).into_owned() + &more);
        }
        let mut rows = summary(&self.checkpoint, self.plans.iter().map(|of| (of.name.as_str(), of.plan.as_ref())));
        for view in &self.plans {
            let absent: Vec<&str> = unavailable(&view.plan).iter().map(|shown| shown.format).collect();
            if !absent.is_empty() {
                rows.push(("formats", format!("not there, or only in part: {} (-v says why)", absent.join(", "))));
            }
        }
        rows.extend(self.needs.as_ref().map(|needs| ("to fetch", to_fetch(needs))));
        rows.push(("more", MORE.to_owned()));
        let rows = rows.into_iter().map(|(key, value)| (key, printable(&value).into_owned()));
        Ok(paragraph::rows(rows, paragraph::width()))
    }
}

impl PlanCommand {
    /// The command that mounts what was planned, as a row; nothing if that is no text.
    fn next(&self) -> String {
        // A path that is no text cannot be shown as it would have to be typed.
        let words: Result<Vec<String>, _> = std::env::args_os().map(OsString::into_string).collect();
        let Ok(words) = words else { return String::new() };
        let mut words = words.into_iter().skip_while(|word| word != "plan").skip(1);
        let mut kept = Vec::new();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--html" => drop(words.next()),
                "--json" | "--check-values" | "--verbose" | "--quiet" | "-q" | "--" => {}
                word if word.starts_with("--html=") || word.starts_with("-v") => {}
                word if Some(word) == self.source.as_deref() => {}
                word => kept.push(quoted(word)),
            }
        }
        let named = self.source.as_deref().map(|source| format!(" {} MNT", quoted(source)));
        let mut command = format!("ckfs mount{}", named.unwrap_or_default());
        for word in &kept {
            command.push(' ');
            command.push_str(word);
        }
        paragraph::rows([("next", command)], None)
    }

    /// Says on standard error, after the plan, what is not wrong and should be known. All of the plan has it in its lines.
    fn warn(&self, Planned { checkpoint, plans, .. }: &Planned, log: &LogFlags) {
        if log.quiet || (log.verbose > 0 && !self.json) {
            return;
        }
        let of_views = plans.iter().flat_map(|view| {
            let of_view = if view.name.is_empty() { String::new() } else { format!("view {}: ", view.name) };
            view.plan.warnings.iter().map(move |warning| format!("{of_view}{warning}"))
        });
        for warning in checkpoint.warnings().iter().cloned().chain(of_views) {
            ckfs_host::tell(&format!("{}\n", warning_text(&printable(&warning))));
        }
    }
}

/// The bytes to fetch, in a line.
fn to_fetch(needs: &RemoteBytes) -> String {
    let cached = needs.spanned_bytes.saturating_sub(needs.absent_bytes);
    format!(
        "{} of the {} that this host needs, {} are cached",
        human_bytes(needs.absent_bytes),
        human_bytes(needs.needed_bytes),
        human_bytes(cached)
    )
}

/// Checks the directories that a mount would use.
fn check_places(config: &Config, volume: &mut Volume) -> anyhow::Result<()> {
    if volume.policy().directory().is_some() {
        ckfs_service::enable_materialization(volume)?.context("materialized files")?;
    }
    let Some(mountpoint) = config.mountpoint.as_deref().filter(|mountpoint| !is_passed(mountpoint)) else {
        return Ok(());
    };
    match check_mountpoint(mountpoint) {
        // A configuration is often checked before its machine is prepared.
        Err(MountError::Missing { path }) => {
            if config.mount.mkdir != Some(true) {
                warn!("mountpoint {}: no such directory; a mount needs it, or --mkdir", path.display());
            }
            Ok(())
        }
        result => Ok(result?),
    }
}

/// Most devices that are listed one by one.
const DEVICES_SHOWN_MAX: usize = 16;

/// The bytes to fetch, in lines.
fn remote_text(needs: &RemoteBytes) -> String {
    let mut text = "\nto fetch\n".to_owned();
    for (view, device, bytes) in needs.devices.iter().take(DEVICES_SHOWN_MAX) {
        let of_view = if view.is_empty() { String::new() } else { format!("view {view}: ") };
        let _ = writeln!(text, "  {of_view}device {device} needs {}", human_bytes(*bytes));
    }
    if needs.devices.len() > DEVICES_SHOWN_MAX {
        let _ = writeln!(text, "  and {} more devices", needs.devices.len() - DEVICES_SHOWN_MAX);
    }
    let cached = needs.spanned_bytes.saturating_sub(needs.absent_bytes);
    let _ = writeln!(
        text,
        "  this host needs {}, {:.2} times of which is fetched; {} are cached, {} are to fetch",
        human_bytes(needs.needed_bytes),
        needs.over_read(),
        human_bytes(cached),
        human_bytes(needs.absent_bytes),
    );
    text
}
