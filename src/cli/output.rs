//! How commands print.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::Context;
use ckfs_checkpoint::printable_lines;
use ckfs_source::Served;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use super::{flags::LogFlags, hint::hint};

/// A usage error; exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub(super) String);

/// The reader of standard output has closed it, as `head` does.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub(super) struct Closed;

/// The command failed, and another process reports why.
#[derive(Debug, thiserror::Error)]
#[error("the starter has the error")]
pub(super) struct AlreadyReported;

/// An error with its causes, without repetitions: many messages contain their cause's message. Names in it are escaped.
pub(super) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    printable_lines(&text).into_owned()
}

/// The message of an error: its causes, and what would help.
pub(super) fn message(error: &anyhow::Error) -> String {
    match hint(error) {
        Some(hint) => format!("{}\n  {}", chain(error), printable_lines(&hint)),
        None => chain(error),
    }
}

/// Escape sequences of terminals.
const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[1;31m";
const YELLOW: &str = "\x1b[1;33m";
const BLUE: &str = "\x1b[1;34m";

/// The message of an error, as standard error shows it.
pub(super) fn error_text(message: &str) -> String {
    if ckfs_host::stderr_is_colored() {
        painted(message)
    } else if ckfs_host::stderr_is_journal() {
        // Its priority, before each line: the journal takes it away.
        format!("<3>ckfs: error: {}", message.replace('\n', "\n<3>"))
    } else {
        format!("ckfs: error: {message}")
    }
}

/// A warning, as standard error shows it.
pub(super) fn warning_text(message: &str) -> String {
    if ckfs_host::stderr_is_colored() {
        format!("ckfs: {YELLOW}warning:{RESET} {message}")
    } else {
        format!("ckfs: warning: {message}")
    }
}

/// The message in colours: its first line, and the excerpts of files in it.
fn painted(message: &str) -> String {
    let mut lines = message.split('\n');
    let first = lines.next().unwrap_or_default();
    let mut text = format!("ckfs: {RED}error:{RESET} {BOLD}{first}{RESET}");
    for line in lines {
        text.push('\n');
        let gutter = line.find('|').filter(|at| line[..*at].chars().all(|c| c == ' ' || c.is_ascii_digit()));
        match gutter {
            Some(at) if line[at + 1..].trim_start().starts_with('^') => {
                let _ = write!(text, "{BLUE}{}|{RED}{}{RESET}", &line[..at], &line[at + 1..]);
            }
            Some(at) => {
                let _ = write!(text, "{BLUE}{}|{RESET}{}", &line[..at], &line[at + 1..]);
            }
            None => match line.trim_start().strip_prefix("-->") {
                Some(place) => {
                    let indent = line.len() - line.trim_start().len();
                    let _ = write!(text, "{:indent$}{BLUE}-->{RESET}{place}", "");
                }
                None => text.push_str(line),
            },
        }
    }
    text
}

fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
        result => result.context("standard output"),
    }
}

/// Prints a text.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// The number of the form of JSON documents. It grows when a key is renamed, removed or means something else.
const SCHEMA: u32 = 1;

/// A JSON document: an object, with the number of its form first.
#[derive(Serialize)]
struct Document<'a, T: Serialize> {
    schema: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// Whether this process has printed a JSON document.
static HAS_PRINTED: AtomicBool = AtomicBool::new(false);

/// Prints the error of a command that was given --json as its document, if it has printed none.
pub(super) fn print_json_error(message: &str, exit_code: u8) {
    // What follows `--` is another command's.
    let is_json = env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    if is_json && !HAS_PRINTED.load(Ordering::Relaxed) {
        // The message is on standard error too: a closed standard output loses nothing.
        let _ = print_json(&json!({ "error": { "message": message, "exit_code": exit_code } }));
    }
}

/// Prints a JSON document, an object, which is generated while it is written.
pub(super) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    HAS_PRINTED.store(true, Ordering::Relaxed);
    let mut out = io::BufWriter::new(io::stdout().lock());
    let document = Document { schema: SCHEMA, value };
    let written_all = serde_json::to_writer_pretty(&mut out, &document).map_err(io::Error::from);
    written(written_all.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
}

/// A bar on standard error, where that is a terminal.
pub(super) fn bar(bytes: u64, log: &LogFlags) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    // The bar hides itself if standard error is not a terminal.
    bar.set_draw_target(if log.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() });
    let template = "{bar:30} {percent:>3} %  {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta}  {wide_msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Prints what was found: as JSON, or the text that tells it.
pub(super) fn print_either(as_json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    if as_json { print_json(value) } else { print(&text()) }
}

/// Writes the bytes of a read to standard output.
pub(super) fn write_served(bytes: Served<'_>) -> anyhow::Result<()> {
    written(bytes.write_to(&io::stdout()))
}

fn no_name(path: &Path) -> Usage {
    Usage(format!("{}: expected the name of a file", path.display()))
}

/// Replaces a file by one that `write` makes beside it: a reader finds the old or the new content.
pub(super) fn replace(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> anyhow::Result<()> {
    let name = path.file_name().ok_or_else(|| no_name(path))?;
    let beside = path.with_file_name(format!(".{}.{}.part", name.display(), std::process::id()));
    let written = write(&beside).and_then(|()| fs::rename(&beside, path));
    // One that is there already may be another process's, of the same number in another namespace.
    let is_own = |error: &io::Error| error.kind() != io::ErrorKind::AlreadyExists;
    let clean = |error: &io::Error| is_own(error).then(|| fs::remove_file(&beside));
    let at = if written.as_ref().is_err_and(|error| !is_own(error)) { beside.as_path() } else { path };
    written.inspect_err(|error| drop(clean(error))).with_context(|| at.display().to_string())
}

/// The regular file to be replaced at a path. A link leads to its target. What is no regular file is refused.
pub(super) fn replaced(path: &Path) -> anyhow::Result<PathBuf> {
    if path == Path::new("-") {
        return Err(Usage("-: expected the name of a file, such as plan.html".to_owned()).into());
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(&target).is_ok_and(|found| !found.is_file()) {
        return Err(Usage(format!("{}: is not a regular file", path.display())).into());
    }
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(Usage(format!("{}: no such directory; create it first", parent.display())).into());
    }
    if target.file_name().is_none() { Err(no_name(&target).into()) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_replaces_the_old_one_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.html");
        for content in ["one", "two"] {
            replace(&replaced(&path).unwrap(), |new| fs::write(new, content)).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("plan.html", &link).unwrap();
        replace(&replaced(&link).unwrap(), |new| fs::write(new, "three")).unwrap();
        assert!(link.is_symlink() && fs::read_to_string(&path).unwrap() == "three");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        for wrong in [Path::new("-"), directory.path(), Path::new("/dev/null"), &directory.path().join("no/plan.html")]
        {
            assert!(replaced(wrong).is_err(), "{}", wrong.display());
        }
    }

    #[test]
    fn what_another_process_writes_is_left_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let part = directory.path().join(format!(".plan.html.{}.part", std::process::id()));
        fs::write(&part, "another's").unwrap();
        let refused = replace(&directory.path().join("plan.html"), |new| fs::File::create_new(new).map(drop));
        assert!(format!("{:#}", refused.unwrap_err()).starts_with(&format!("{}: ", part.display())));
        assert_eq!(fs::read_to_string(&part).unwrap(), "another's");
    }

    #[test]
    fn a_painted_message_has_the_same_text() {
        let message = "a.toml:2: unknown\n --> a.toml:2:1\n  |\n2 | a = '|'\n  | ^\n  a hint";
        let painted = painted(message);
        let mut plain = painted.clone();
        for code in [RESET, BOLD, RED, BLUE] {
            assert!(painted.contains(code), "{painted:?}");
            plain = plain.replace(code, "");
        }
        assert_eq!(plain, format!("ckfs: error: {message}"));
    }
}
