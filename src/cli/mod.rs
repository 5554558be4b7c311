//! The command line: the only user of clap, anyhow and standard output.
//!
//! Each command is one file. Shared are: `flags` (the settings as typed), `open` (their interpretation: configuration,
//! checkpoint, plans, volume), `output` (printing), `tree` (walks over a volume).
//!
//! Exit codes: 0 done, 1 failed, 2 usage error. Standard output carries data only; everything else goes to standard
//! error.

mod cache;
mod cat;
#[cfg(feature = "csi")]
mod csi;
mod demo;
mod doctor;
mod explain;
mod export;
mod fetch;
mod flags;
mod hint;
mod last_mount;
mod man;
mod meant;
mod metrics;
mod mount;
mod open;
mod output;
mod paragraph;
mod permission_hint;
mod plan;
mod restart;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod status;
mod steps;
mod sums;
mod tree;
mod verify;

use std::{ffi::OsString, fmt::Write as _, path::Path, process::ExitCode, thread};

use anyhow::Context;
use ckfs_config::ConfigError;
use ckfs_host::{Log, LogTarget, limits, signal};
use ckfs_service::FINDINGS;
use ckfs_source::remote::url_schemes;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use tracing_subscriber::{EnvFilter, filter::ParseError};

use flags::LogFlags;
use man::COMMAND_GROUPS;
use output::{AlreadyReported, Closed, Usage};

/// Mounts Hugging Face safetensors repositories as virtual, sharded views.
#[derive(Debug, Parser)]
#[command(name = "ckfs", version, long_about = long_about(), long_version = LONG_VERSION, max_term_width = 100, propagate_version = true)]
#[command(after_long_help = "\
Examples:
  ckfs demo                                                 see it work on a generated checkpoint
  ckfs plan meta-llama/Llama-3.1-8B --mesh fsdp=4,tensor=2  what would be mounted
  ckfs mount /data/llama /mnt/llama --mesh fsdp=8           mount it
  ckfs run /data/llama --mesh fsdp=8 -- python train.py     mount it for one command only
  ckfs serve /data/llama --dtype bf16                       the same files over HTTP, and as a repository of the Hub
  ckfs status                                               what is mounted
  ckfs umount /mnt/llama

Environment:
  CKFS_LOG       what is logged, as in `info`, `ckfs::read=debug`; wins over -v and -q
  HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME
                 where the Hugging Face cache is, as its own client has it
  HF_TOKEN, HF_TOKEN_PATH, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DISABLE_IMPLICIT_TOKEN
                 how the Hub is asked, likewise
  CKFS_CACHE_DIR where bytes of remote sources are kept, unless --cache-dir says it
  XDG_STATE_HOME where a daemon logs, below ckfs/, on a host without a system log; by default ~/.local/state

Exit codes:
  0  done    1  failed    2  used wrongly: flags, or the text of a configuration file")]
struct Cli {
    #[command(flatten)]
    log: LogFlags,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Mount(Box<mount::Mount>),
    Run(Box<run::RunCommand>),
    #[cfg(feature = "serve")]
    Serve(Box<serve::Serve>),
    #[cfg(feature = "csi")]
    Csi(csi::Csi),
    #[command(visible_alias = "unmount")]
    Umount(restart::Umount),
    Status(status::Status),
    Restart(restart::Restart),
    Metrics(metrics::MetricsCommand),
    Plan(Box<plan::PlanCommand>),
    Explain(Box<explain::Explain>),
    Cat(Box<cat::Cat>),
    Export(Box<export::Export>),
    Fetch(Box<fetch::FetchCommand>),
    Cache(cache::CacheCommand),
    Verify(Box<verify::Verify>),
    Sums(Box<sums::Sums>),
    Doctor(doctor::Doctor),
    Demo(demo::Demo),
    Completions(man::Completions),
    Man(man::Manual),
}

/// What the program is for, and what a source is.
fn long_about() -> String {
    format!(
        "Mounts Hugging Face safetensors repositories as virtual, sharded views.

ckfs shows a checkpoint as the files that a training job wants to read. Every tensor is stacked over layers, renamed, \
cast and cut to one device's shard, on read and from the original bytes. There is no conversion step and no second copy.

SOURCE is one of: a directory with a Hugging Face repository (*.safetensors, or *.bin of torch), an Orbax checkpoint, a \
torch.distributed.checkpoint, or the files of the ranks of FSDP, DeepSpeed or Megatron; a file (.safetensors, .pt, .bin); \
org/name[@revision] in the local Hugging Face cache or on the Hub; hf://org/name[@revision]; {}. With --steps it is a \
directory in which a trainer leaves a checkpoint for each step.",
        url_schemes()
    )
}

/// What `--version` prints after the name; `-V` prints the first line only.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit    ",
    env!("CKFS_COMMIT"),
    "\nfeatures  ",
    env!("CKFS_FEATURES"),
    "\ntarget    ",
    env!("CKFS_TARGET"),
);

/// Below this the main thread's stack is too small for the command line.
const STACK_BYTES_MIN: u64 = 2 << 20;

/// The stack of the thread that replaces it.
const STACK_BYTES: usize = 8 << 20;

/// Writes the rest of the log when dropped, also after a panic of the thread.
struct Finish(Log);

impl Drop for Finish {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Runs the program on the arguments of this process.
pub fn main() -> ExitCode {
    if let Some(code) = ckfs_fuse::run_inside() {
        return code;
    }
    signal::ignore_write_failures();
    limits::tune_allocator();
    if ckfs_fuse::is_daemon() {
        // As the first step, so that no signal reaches a thread that does not expect it.
        signal::ignore_harmless();
        let _ = signal::block();
    }
    if limits::stack_bytes().is_some_and(|bytes| bytes < STACK_BYTES_MIN)
        && let Ok(thread) = thread::Builder::new().name("main".into()).stack_size(STACK_BYTES).spawn(run_program)
    {
        // That thread handles signals: this one blocks all of them.
        return signal::with_all_blocked(|| thread.join()).unwrap_or(ExitCode::from(101));
    }
    run_program()
}

fn run_program() -> ExitCode {
    let finish = Finish(Log::start(LogTarget::messages()));
    finish.0.take_panics();
    let code = run_args(&finish.0);
    // The log comes before the message of an error.
    code.unwrap_or_else(|error| {
        finish.0.flush(ckfs_host::log::FLUSH_LIMIT);
        report_error(&error)
    })
}

fn run_args(log: &Log) -> anyhow::Result<ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let called = args.first().map(Path::new).and_then(Path::file_name).and_then(|name| name.to_str());
    let args = match called {
        // A daemon gets the arguments of `ckfs mount`, whatever the name of its program.
        Some("mount.ckfs" | "mount.fuse.ckfs") if !ckfs_fuse::is_daemon() => mount::helper_arguments(&args[1..])?,
        _ if args.is_empty() => vec!["ckfs".into()],
        _ => args,
    };
    if args.get(1).is_some_and(|word| word == "help") && args.get(2).is_some_and(|word| word == "options") {
        output::print(&flags::all_options().render_long_help().to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    let args = plan::with_compared_meshes(args);
    match parse(&args) {
        Ok(cli) => run(cli, log, &args[1..]),
        Err(error) => {
            let hint = || mesh_in_pieces(&args).or_else(|| meant::instead(&error, &args, &command()));
            match error.use_stderr().then(hint).flatten() {
                Some(hint) => Err(Usage(hint).into()),
                None => Ok(finish_parsing(&meant::without_far(error))),
            }
        }
    }
}

/// The command line as it is parsed, with the texts of its help.
fn command() -> clap::Command {
    let mut command = Cli::command();
    let more = |text: Option<String>| {
        let more = "Other options: ckfs help options";
        text.map_or_else(|| more.to_owned(), |text| format!("{text}\n\n{more}"))
    };
    let has_more =
        |command: &clap::Command| command.get_arguments().any(|arg| arg.is_hide_long_help_set() && !arg.is_hide_set());
    let names: Vec<String> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in &names {
        command = command.mut_subcommand(name, |command| {
            if !has_more(&command) {
                return command;
            }
            let long = command.get_after_long_help().map(ToString::to_string);
            command.after_help(more(None)).after_long_help(more(long))
        });
    }
    let template = help_template(&command);
    command.help_template(template)
}

/// The help of the program, with its commands in groups.
fn help_template(command: &clap::Command) -> clap::builder::StyledStr {
    let (header, literal) = (*command.get_styles().get_header(), *command.get_styles().get_literal());
    let about = |name: &str| {
        if name == "help" {
            return Some("Prints the help of a command; `ckfs help options` prints every option".to_owned());
        }
        let about = command.find_subcommand(name)?.get_about()?.to_string();
        Some(about.split_once(". ").map_or(about.clone(), |(first, _)| first.to_owned()))
    };
    let width = COMMAND_GROUPS.iter().flat_map(|(_, names)| *names).map(|name| name.len()).max().unwrap_or(0);
    let mut text = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in COMMAND_GROUPS {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{header}{group}:{header:#}\n");
        // A program that was built without a feature lacks its command.
        for (name, about) in names.iter().filter_map(|name| Some((name, about(name)?))) {
            let _ = writeln!(text, "  {literal}{name}{literal:#}{:1$}  {about}", "", width - name.len());
        }
    }
    let _ = write!(text, "\n{header}Options:{header:#}\n{{options}}{{after-help}}");
    text.into()
}

fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// What to type if the axes of a mesh are several words or several flags.
fn mesh_in_pieces(args: &[OsString]) -> Option<String> {
    let is_axis = |word: &str| {
        let sized = word.split_once('=').filter(|(name, _)| !name.is_empty() && !name.starts_with('-'));
        sized.is_some_and(|(_, size)| !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (mut axes, mut flags, mut in_mesh) = (Vec::new(), 0, false);
    let mut words = args.iter().filter_map(|word| word.to_str());
    while let Some(word) = words.next() {
        let value = if word == "--mesh" { words.next() } else { word.strip_prefix("--mesh=") };
        if let Some(value) = value {
            (flags, in_mesh) = (flags + 1, true);
            axes.push(value.trim_end_matches(','));
        } else if in_mesh && is_axis(word.trim_end_matches(',')) {
            axes.push(word.trim_end_matches(','));
        } else {
            in_mesh = false;
        }
    }
    let pieces = flags > 0 && axes.len() > 1;
    pieces.then(|| format!("there is one mesh, its axes separated by commas: --mesh {}", axes.join(",")))
}

/// Shows a usage error, help or the version.
fn finish_parsing(error: &clap::Error) -> ExitCode {
    let kind = error.kind();
    if kind == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand || !error.use_stderr() {
        // The reader of the output may have closed it early.
        let _ = error.print();
    } else {
        let text = error.render();
        let plain = text.to_string();
        let text = if ckfs_host::stderr_is_colored() { text.ansi().to_string() } else { plain.clone() };
        ckfs_host::tell(&format!("ckfs: {text}"));
        output::print_json_error(plain.strip_prefix("error: ").unwrap_or(&plain).trim_end(), 2);
    }
    if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS }
}

fn run(cli: Cli, sink: &Log, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let Cli { log, command } = cli;
    // The log file of a mount is opened by its daemon.
    let has_daemon = matches!(command, Command::Mount(_) | Command::Run(_));
    let log_file = log.file.settings.mount.log_file.as_deref().filter(|_| !has_daemon);
    // It shows what it finds by itself, after all else.
    let shows_findings = matches!(command, Command::Plan(_));
    start_log(&log, sink, log_file, shows_findings)?;
    let done = match command {
        // Its exit code is that of another command.
        Command::Run(command) => return command.run(&log, sink, args),
        Command::Mount(command) => command.run(&log, sink, args),
        #[cfg(feature = "serve")]
        Command::Serve(command) => command.run(&log, sink),
        #[cfg(feature = "csi")]
        Command::Csi(command) => command.run(&log, sink),
        Command::Umount(command) => command.run(),
        Command::Status(command) => command.run(),
        Command::Metrics(command) => command.run(),
        Command::Plan(command) => command.run(&log),
        Command::Restart(command) => command.run(&log, sink),
        Command::Explain(command) => command.run(),
        Command::Cat(command) => command.run(),
        Command::Export(command) => command.run(&log),
        Command::Fetch(command) => command.run(&log),
        Command::Cache(command) => command.run(),
        Command::Verify(command) => command.run(&log),
        Command::Sums(command) => command.run(&log),
        Command::Doctor(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Completions(command) => command.run(Cli::command()),
        Command::Man(command) => command.run(Cli::command()),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn start_log(flags: &LogFlags, sink: &Log, file: Option<&Path>, shows_findings: bool) -> anyhow::Result<()> {
    let level = match (flags.quiet, flags.verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    };
    let chosen = std::env::var("CKFS_LOG").ok().filter(|text| !text.is_empty());
    let mut filter = match &chosen {
        Some(text) => log_filter(text).map_err(|error| Usage(format!("CKFS_LOG={text}: {error}")))?,
        None => EnvFilter::new(level),
    };
    if shows_findings {
        filter = filter.add_directive(format!("{FINDINGS}=off").parse().expect("a target and a level"));
    }
    if let Some(path) = file {
        sink.switch(LogTarget::file(path).with_context(|| format!("log file {}", path.display()))?);
    } else if flags.verbose > 0 || chosen.is_some() {
        // A log was requested, and not only what a user has to know.
        sink.switch(LogTarget::stderr());
    }
    // The sink adds time and colours, because it knows where the lines go. It never fails, so that no failure needs a
    // message.
    let log = tracing_subscriber::fmt().with_env_filter(filter).without_time().with_ansi(false);
    log.log_internal_errors(false).with_writer(sink.clone()).init();
    Ok(())
}

/// The filter of a text of `CKFS_LOG`. A layer has its name in the library, as in `ckfs::read=debug`; its crate is `ckfs_read`.
fn log_filter(text: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::try_new(text.replace("ckfs::", "ckfs_"))
}

/// Prints why a command failed, and returns the exit code.
fn report_error(error: &anyhow::Error) -> ExitCode {
    if error.is::<Closed>() {
        // The reader of the output has closed it early.
        ExitCode::SUCCESS
    } else if error.is::<AlreadyReported>() {
        ExitCode::FAILURE
    } else {
        let is_usage = error.is::<Usage>();
        let (message, code) = (output::message(error), if is_usage || is_malformed(error) { 2 } else { 1 });
        let more = if is_usage { "\n\nFor more information, try '--help'." } else { "" };
        ckfs_host::tell(&format!("{}{more}\n", output::error_text(&message)));
        output::print_json_error(&message, code);
        ExitCode::from(code)
    }
}

/// Whether a text of configuration is malformed: it must be edited, and another try as it is cannot succeed.
fn is_malformed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(ConfigError::Text { .. })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_has_commit_features_and_target() {
        let lines: Vec<&str> = LONG_VERSION.lines().collect();
        assert_eq!(lines[0], env!("CARGO_PKG_VERSION"));
        for (line, name) in lines[1..].iter().zip(["commit    ", "features  ", "target    "]) {
            assert!(line.strip_prefix(name).is_some_and(|value| !value.trim().is_empty()), "{LONG_VERSION}");
        }
        assert_eq!(lines[2].contains("remote"), cfg!(feature = "stores"), "{LONG_VERSION}");
        assert_eq!(lines[2].contains("serve"), cfg!(feature = "serve"), "{LONG_VERSION}");
    }

    #[test]
    fn the_declaration_is_consistent() {
        Cli::command().debug_assert();
        command().debug_assert();
        flags::all_options().debug_assert();
    }

    #[test]
    fn every_command_is_in_one_group() {
        let mut grouped: Vec<&str> = COMMAND_GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        grouped.retain(|name| *name != "help" && (cfg!(feature = "serve") || *name != "serve"));
        grouped.retain(|name| cfg!(feature = "csi") || *name != "csi");
        grouped.sort_unstable();
        let command = Cli::command();
        let mut all: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        all.sort_unstable();
        assert_eq!(grouped, all);
    }

    #[test]
    fn a_log_filter_names_layers_as_the_library_does() {
        let filter = log_filter("info,ckfs::read=debug").unwrap().to_string();
        let mut directives: Vec<_> = filter.split(',').collect();
        directives.sort_unstable();
        assert_eq!(directives, ["ckfs_read=debug", "info"]);
        assert!(module_path!().starts_with("ckfs_cli"));
    }
}
