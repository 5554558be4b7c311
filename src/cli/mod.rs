//! The command line: the only user of clap, anyhow and standard output.
//!
//! Commands are one file each. What they share: `flags` (what was typed), `open` (what it means: configuration,
//! checkpoint, plans, volume), `output` (how things are printed), `tree` (walks over a volume).
//!
//! Exit codes: 0 done, 1 failed, 2 used wrongly. Standard output carries data only; everything else goes to standard error.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is where the program speaks")]

mod cat;
mod demo;
mod doctor;
mod explain;
mod export;
mod flags;
mod lent;
mod mount;
mod open;
mod output;
mod patience;
mod plan;
mod status;
mod sums;
mod tree;
mod umount;
mod verify;

use std::{ffi::OsString, fs::File, io::IsTerminal, path::Path, process::ExitCode, sync::Mutex};

use anyhow::Context;
use clap::{Parser, Subcommand, error::ErrorKind};
use tracing_subscriber::EnvFilter;

use output::{Closed, Usage};

/// Mounts Hugging Face safetensors repositories as virtual, sharded views.
///
/// ckfs shows a checkpoint as the files that a training job wants to read: every tensor stacked over layers, renamed,
/// cast and cut to one device's shard, made on read from the original bytes. Nothing is converted and nothing is copied.
///
/// SOURCE is a directory with *.safetensors files, one such file, or org/name[@revision] in the local Hugging Face cache.
#[derive(Debug, Parser)]
#[command(name = "ckfs", version, max_term_width = 100, propagate_version = true)]
#[command(after_long_help = "\
Examples:
  ckfs demo                                                 see it work on a generated checkpoint
  ckfs plan meta-llama/Llama-3.1-8B --mesh fsdp=4,tensor=2  what would be mounted
  ckfs mount /data/llama /mnt/llama --mesh fsdp=8           mount it
  ckfs status                                               what is mounted
  ckfs umount /mnt/llama

Environment:
  CKFS_LOG       what is logged, as in `info`, `ckfs::read=debug`; wins over -v and -q
  HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME
                 where the Hugging Face cache is, as its own client has it

Exit codes:
  0  done    1  failed    2  used wrongly")]
struct Cli {
    #[command(flatten)]
    log: LogFlags,
    #[command(subcommand)]
    command: Command,
}

/// How much is logged, and where to.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Logging")]
struct LogFlags {
    /// Logs more: -v information, -vv details, -vvv everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    /// Logs errors only, and shows no progress.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Appends the log to this file instead of standard error.
    #[arg(long, global = true, value_name = "FILE")]
    log_file: Option<std::path::PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Mount(Box<mount::Mount>),
    Umount(umount::Umount),
    Status(status::Status),
    Plan(Box<plan::Plan>),
    Explain(Box<explain::Explain>),
    Cat(Box<cat::Cat>),
    Export(Box<export::Export>),
    Verify(Box<verify::Verify>),
    Sums(Box<sums::Sums>),
    Doctor(doctor::Doctor),
    Demo(demo::Demo),
}

/// Runs the program on the arguments of this process.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let called = args.first().map(Path::new).and_then(Path::file_name).and_then(|name| name.to_str());
    let args = match called {
        // A daemon is given the arguments of `ckfs mount`, whatever its program is called.
        Some("mount.ckfs" | "mount.fuse.ckfs") if !mount::is_daemon() => match mount::helper_arguments(&args[1..]) {
            Ok(args) => args,
            Err(error) => return finish(Err(error)),
        },
        _ if args.is_empty() => vec!["ckfs".into()],
        _ => args,
    };
    match Cli::try_parse_from(&args) {
        Ok(cli) => finish(run(cli, &args[1..])),
        Err(error) => finish_parsing(&error),
    }
}

/// Shows a usage error, help or the version.
fn finish_parsing(error: &clap::Error) -> ExitCode {
    let kind = error.kind();
    if kind == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand || !error.use_stderr() {
        // Whoever reads our output may have seen enough.
        let _ = error.print();
    } else {
        eprint!("ckfs: {}", error.render());
    }
    if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS }
}

fn run(cli: Cli, args: &[OsString]) -> anyhow::Result<()> {
    let Cli { log, command } = cli;
    // The log file of a mount is opened by its daemon.
    let log_file = log.log_file.as_deref().filter(|_| !matches!(command, Command::Mount(_)));
    start_log(&log, log_file)?;
    match command {
        Command::Mount(command) => command.run(&log, args),
        Command::Umount(command) => command.run(),
        Command::Status(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Explain(command) => command.run(),
        Command::Cat(command) => command.run(),
        Command::Export(command) => command.run(&log),
        Command::Verify(command) => command.run(&log),
        Command::Sums(command) => command.run(&log),
        Command::Doctor(command) => command.run(),
        Command::Demo(command) => command.run(),
    }
}

fn start_log(flags: &LogFlags, file: Option<&Path>) -> anyhow::Result<()> {
    let level = match (flags.quiet, flags.verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    };
    let filter = match std::env::var("CKFS_LOG") {
        Ok(text) if !text.is_empty() => {
            EnvFilter::try_new(&text).map_err(|error| Usage(format!("CKFS_LOG={text}: {error}")))?
        }
        _ => EnvFilter::new(level),
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    match file {
        None => log.with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init(),
        Some(path) => {
            let file = File::options().append(true).create(true).open(path);
            let file = file.with_context(|| format!("log file {}", path.display()))?;
            log.with_writer(Mutex::new(file)).with_ansi(false).init();
        }
    }
    Ok(())
}

/// Prints why a command failed, and says so by the exit code.
fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(error) if error.is::<Closed>() => ExitCode::SUCCESS,
        Err(error) if error.is::<Usage>() => {
            eprintln!("ckfs: error: {}\n\nFor more information, try '--help'.", output::chain(&error));
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("ckfs: error: {}", output::chain(&error));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_is_consistent() {
        Cli::command().debug_assert();
    }
}
