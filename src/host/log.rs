//! The log: one sink for all lines, whatever is wrong with the place where they are written.
//!
//! ```text
//! any thread -> repeats -> queue (bounded) -> writer thread -> target
//! ```
//!
//! Adding a line takes a short lock and never waits for the target, so a log on a full disk, a stalled pipe or a dead
//! terminal holds up no request. Lines that find the queue full or cannot be written are counted; the count is written as
//! soon as writing works again. Errors and warnings that repeat are counted too: see [`super::repeats`].
//!
//! Without the writer thread, which a system at its limits may refuse, lines are written where they arise.
//!
//! Own code, because `tracing-appender` (0.2) does not count lines whose writing failed, panics when the system starts no thread,
//! and cannot be given another target.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, Write},
    panic::{self, PanicHookInfo},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::{
    MakeWriter,
    format::Writer as TextWriter,
    time::{FormatTime, SystemTime},
};

use super::{
    repeats::Repeats,
    signal::with_all_blocked,
    target::{LogTarget, Lost},
};

/// Lines and bytes that may wait to be written.
const QUEUE_LINES_MAX: usize = 4096;
const QUEUE_BYTES_MAX: usize = 4 << 20;

/// A longer line is cut.
const LINE_BYTES_MAX: usize = 32 << 10;

/// How long the end of the process waits for the log.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Whose words the log's own lines are.
const OWN: &str = "ckfs::log";

/// An event begins with its level, right-aligned, and a space.
const LEVEL_CHARS: usize = 6;

/// One line, its level and target included, without its time.
#[derive(Debug)]
struct Line {
    level: Level,
    time: String,
    text: String,
}

impl Line {
    fn new(level: Level, mut text: String) -> Self {
        if text.len() > LINE_BYTES_MAX {
            text.truncate(text.floor_char_boundary(LINE_BYTES_MAX));
            text.push_str(" (cut)");
        }
        let mut time = String::new();
        // Writing to a string cannot fail.
        let _ = SystemTime.format_time(&mut TextWriter::new(&mut time));
        Self { level, time, text }
    }

    fn own(level: Level, text: impl fmt::Display) -> Self {
        Self::new(level, format!("{level:>5} {OWN}: {text}"))
    }
}

/// What is to be done, and by whom.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is asked for on its own")]
struct State {
    queue: VecDeque<Line>,
    queue_bytes: usize,
    /// Lines that found no room in the queue.
    overflowed: u64,
    repeats: Repeats,
    target: Option<LogTarget>,
    reopen: bool,
    /// The process ends: a default log file is removed if nothing is in it.
    tidy: bool,
    /// The writer thread is at work on what it took.
    writing: bool,
    has_thread: bool,
}

/// The part that writes. Held by the writer thread, or by a thread that writes a line without it.
#[derive(Debug)]
struct Output {
    target: LogTarget,
    lost: u64,
    reason: Option<io::Error>,
    /// The last line was cut off.
    in_part: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something is to be done.
    called: Condvar,
    /// All that was requested is done.
    done: Condvar,
    output: Mutex<Output>,
}

/// The log. Clones are the same log.
#[derive(Clone, Debug)]
pub struct Log {
    shared: Arc<Shared>,
}

impl Log {
    /// A log that goes to `target`, and its thread, which takes no signals.
    pub fn start(target: LogTarget) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            called: Condvar::new(),
            done: Condvar::new(),
            output: Mutex::new(Output { target, lost: 0, reason: None, in_part: false }),
        });
        let writer = Arc::clone(&shared);
        shared.state.lock().has_thread = true;
        let thread = with_all_blocked(|| thread::Builder::new().name("ckfs-log".into()).spawn(move || writer.run()));
        if thread.is_err() {
            shared.state.lock().has_thread = false;
        }
        Self { shared }
    }

    /// Adds a line, whatever level is logged.
    pub fn write(&self, level: Level, target: &str, text: impl fmt::Display) {
        self.shared.add(Line::new(level, format!("{level:>5} {target}: {text}")));
    }

    /// Sends all further lines, and those that wait, to another target.
    pub fn switch(&self, target: LogTarget) {
        self.shared.ask(|state| state.target = Some(target));
    }

    /// Opens the log file anew, as after it was renamed.
    pub fn reopen(&self) {
        self.shared.ask(|state| state.reopen = true);
    }

    /// Waits until all lines are written, at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let mut state = self.shared.state.lock();
        let busy = |state: &mut State| state.has_thread && (state.writing || state.has_work());
        self.shared.done.wait_while_for(&mut state, busy, limit);
    }

    /// Sums up what was counted and waits until all is written, at most [`FLUSH_LIMIT`].
    pub fn finish(&self) {
        let summaries = self.shared.state.lock().repeats.all(Instant::now());
        for summary in &summaries {
            self.shared.push(Line::own(Level::WARN, summary));
        }
        self.shared.ask(|state| state.tidy = true);
        self.flush(FLUSH_LIMIT);
    }

    /// Lets panics be one line in the log, with place and thread.
    pub fn take_panics(&self) {
        let log = self.clone();
        panic::set_hook(Box::new(move |info| log.note_panic(info)));
    }

    fn note_panic(&self, info: &PanicHookInfo<'_>) {
        // A panic in here would abort the process: a thread that holds the lock writes nothing.
        if self.shared.state.try_lock().is_none() && !self.shared.is_free_soon() {
            return;
        }
        let text = info.payload_as_str().unwrap_or("no text");
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        let place = info.location().map(|place| format!(" at {place}")).unwrap_or_default();
        self.write(Level::ERROR, "ckfs::panic", format_args!("thread {name} panicked{place}: {text}"));
    }
}

impl State {
    fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.target.is_some() || self.reopen || self.tidy || self.overflowed > 0
    }
}

impl Shared {
    /// Whether another thread lets go of the lock: it is held for microseconds, unless by the caller itself.
    fn is_free_soon(&self) -> bool {
        (0..100).any(|_| {
            thread::sleep(Duration::from_millis(1));
            self.state.try_lock().is_some()
        })
    }

    /// Adds a line, unless it repeats.
    fn add(&self, line: Line) {
        if line.level <= Level::WARN {
            let (is_new, forgotten) = self.state.lock().repeats.note(&line.text, Instant::now());
            if let Some(summary) = forgotten {
                self.push(Line::own(line.level, summary));
            }
            if !is_new {
                // The thread knows from the first of them when their window ends.
                return;
            }
        }
        self.push(line);
    }

    fn push(&self, line: Line) {
        self.ask(|state| {
            if state.queue.len() >= QUEUE_LINES_MAX || state.queue_bytes + line.text.len() > QUEUE_BYTES_MAX {
                state.overflowed += 1;
            } else {
                state.queue_bytes += line.text.len();
                state.queue.push_back(line);
            }
        });
    }

    /// Asks for something to be done, and does it if there is no thread for it.
    fn ask(&self, what: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        what(&mut state);
        let alone = !state.has_thread;
        drop(state);
        if alone {
            // The thread that is writing finds it, or it waits for the next line.
            if let Some(mut output) = self.output.try_lock() {
                self.turn(&mut output);
            }
        } else {
            self.called.notify_one();
        }
    }

    /// The writer thread.
    fn run(&self) {
        let mut output = self.output.lock();
        loop {
            let mut state = self.state.lock();
            while !state.has_work() {
                state.writing = false;
                self.done.notify_all();
                if !state.has_thread {
                    return;
                }
                let now = Instant::now();
                let summaries = state.repeats.expired(now);
                if !summaries.is_empty() {
                    let lines = summaries.iter().map(|summary| Line::own(Level::WARN, summary));
                    state.queue.extend(lines);
                    break;
                }
                let left = state.repeats.next_end().map(|end| end.saturating_duration_since(now));
                match left {
                    Some(left) => drop(self.called.wait_for(&mut state, left)),
                    None => self.called.wait(&mut state),
                }
            }
            state.writing = true;
            drop(state);
            self.turn(&mut output);
        }
    }

    /// Does all that is requested.
    fn turn(&self, output: &mut Output) {
        let mut state = self.state.lock();
        let lines = std::mem::take(&mut state.queue);
        state.queue_bytes = 0;
        let overflowed = std::mem::take(&mut state.overflowed);
        let target = state.target.take();
        let reopen = std::mem::take(&mut state.reopen);
        let tidy = std::mem::take(&mut state.tidy);
        drop(state);
        if let Some(target) = target {
            output.switch(target);
        }
        if reopen && let Err(error) = output.target.reopen() {
            let line =
                Line::own(Level::ERROR, format_args!("the log file is not opened anew, the old one is kept: {error}"));
            output.write(&line, &|| true);
        }
        if overflowed > 0 {
            output.lost += overflowed;
            output.reason = Some(io::Error::other("the log takes them too slowly"));
        }
        // Another target, or the end, frees a writer from one that takes nothing.
        let go_on = || {
            let state = self.state.lock();
            state.target.is_none() && state.has_thread
        };
        for line in lines {
            if let Some(target) = self.state.lock().target.take() {
                output.switch(target);
            }
            output.write(&line, &go_on);
        }
        output.write_losses(&go_on);
        if tidy {
            output.target.remove_if_empty();
        }
    }
}

impl Output {
    fn switch(&mut self, target: LogTarget) {
        self.target = target;
        self.in_part = false;
    }

    /// Writes a line, after a count of those that were lost; or counts it as lost too.
    fn write(&mut self, line: &Line, go_on: &dyn Fn() -> bool) {
        if !self.write_losses(go_on) {
            self.lost += 1;
        } else if let Err(lost) = self.target.write(line.level, &line.time, &line.text, go_on) {
            self.note(lost);
            self.lost += 1;
        }
    }

    /// Writes how many lines were lost, if any were; whether that works.
    fn write_losses(&mut self, go_on: &dyn Fn() -> bool) -> bool {
        if self.lost == 0 {
            return true;
        }
        let reason = self.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let count = self.lost;
        let lines = if count == 1 { "line was" } else { "lines were" };
        let mut line = Line::own(Level::WARN, format_args!("{count} log {lines} lost{reason}"));
        if std::mem::take(&mut self.in_part) {
            // Ends the line that was cut off.
            line.time.insert(0, '\n');
        }
        match self.target.write(line.level, &line.time, &line.text, go_on) {
            Ok(()) => {
                self.lost = 0;
                true
            }
            Err(lost) => {
                self.note(lost);
                false
            }
        }
    }

    fn note(&mut self, lost: Lost) {
        self.in_part |= lost.in_part;
        self.reason = Some(lost.error);
    }
}

/// One event of `tracing`, as it is formatted.
#[derive(Debug)]
pub struct EventWriter<'a> {
    log: &'a Log,
    level: Level,
}

/// An event whose target has the layer's name in the library, as in `ckfs::read`. The crate is `ckfs_read`.
fn by_layer(event: &str) -> String {
    match event.split_at_checked(LEVEL_CHARS) {
        Some((level, rest)) if rest.starts_with("ckfs_") => format!("{level}{}", rest.replacen('_', "::", 1)),
        _ => event.to_owned(),
    }
}

/// Whether an event says only that the kernel had given up a request (ENOENT) before its reply came: its process was killed, or the
/// mount aborted. Nobody lacks that reply, so it is no error, though the library of FUSE says it as one.
fn is_reply_to_nobody(event: &str) -> bool {
    event.contains("fuser::reply: Failed to send FUSE reply: ") && event.ends_with("(os error 2)")
}

impl Write for EventWriter<'_> {
    /// Takes a whole event. Never fails: `tracing` would panic over a failure if standard error failed as well.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event.trim_ascii_end());
        if is_reply_to_nobody(&text) {
            return Ok(event.len());
        }
        self.log.shared.add(Line::new(self.level, by_layer(&text)));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = EventWriter<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        EventWriter { log: self, level: Level::INFO }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        EventWriter { log: self, level: *meta.level() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn targets_have_the_names_of_layers() {
        for (event, line) in [
            ("ERROR ckfs_fuse::adapter::pending: x ckfs_y", "ERROR ckfs::fuse::adapter::pending: x ckfs_y"),
            (" WARN ckfs_read: x", " WARN ckfs::read: x"),
            (" INFO fuser::session: ckfs_read", " INFO fuser::session: ckfs_read"),
            ("", ""),
        ] {
            assert_eq!(by_layer(event), line);
        }
    }

    #[test]
    fn replies_to_requests_that_were_given_up_are_no_errors() {
        let reply = "ERROR fuser::reply: Failed to send FUSE reply:";
        assert!(is_reply_to_nobody(&format!("{reply} No such file or directory (os error 2)")));
        assert!(!is_reply_to_nobody(&format!("{reply} Invalid argument (os error 22)")));
        assert!(!is_reply_to_nobody("ERROR ckfs::source: a: No such file or directory (os error 2)"));
    }

    fn log_at(directory: &tempfile::TempDir) -> (Log, std::path::PathBuf) {
        let path = directory.path().join("log");
        (Log::start(LogTarget::file(&path).unwrap()), path)
    }

    #[test]
    fn lines_are_written_in_order_and_repeats_counted() {
        let directory = tempfile::tempdir().unwrap();
        let (log, path) = log_at(&directory);
        for n in 0..50 {
            log.write(Level::INFO, "here", format_args!("line {n}"));
            log.write(Level::ERROR, "here", format_args!("read failed at {n}"));
        }
        log.finish();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(" INFO here: line ").count(), 50);
        assert_eq!(text.matches("read failed").count(), 2, "{text}");
        assert!(text.contains("repeated 49 times in 1 s: ERROR here: read failed at 49\n"), "{text}");
        let first = text.lines().next().unwrap();
        assert!(first.ends_with("Z  INFO here: line 0") && first.starts_with("20"), "{first}");
    }

    #[test]
    fn a_file_is_opened_anew_when_asked() {
        let directory = tempfile::tempdir().unwrap();
        let (log, path) = log_at(&directory);
        log.write(Level::INFO, "here", "one");
        log.flush(FLUSH_LIMIT);
        let old = directory.path().join("old");
        fs::rename(&path, &old).unwrap();
        log.reopen();
        log.write(Level::INFO, "here", "two");
        log.flush(FLUSH_LIMIT);
        assert!(fs::read_to_string(&old).unwrap().ends_with("one\n"));
        assert!(fs::read_to_string(&path).unwrap().ends_with("two\n"));
    }

    #[test]
    fn what_is_lost_is_counted_and_told() {
        let directory = tempfile::tempdir().unwrap();
        let log = Log::start(LogTarget::file(std::path::Path::new("/dev/full")).unwrap());
        for _ in 0..3 {
            log.write(Level::INFO, "here", "gone");
        }
        log.flush(FLUSH_LIMIT);
        let path = directory.path().join("log");
        log.switch(LogTarget::file(&path).unwrap());
        log.write(Level::INFO, "here", "back");
        log.flush(FLUSH_LIMIT);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("3 log lines were lost: No space left on device"), "{text}");
        assert!(text.ends_with("back\n"));
    }

    #[test]
    fn a_target_that_takes_nothing_holds_up_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Open for reading as well, so that opening for writing does not wait.
        let _reader = fs::File::options().read(true).write(true).open(&fifo).unwrap();
        let log = Log::start(LogTarget::file(&fifo).unwrap());
        for n in 0..3 * QUEUE_LINES_MAX {
            log.write(Level::INFO, "here", format_args!("line {n} {}", "x".repeat(100)));
        }
        log.flush(Duration::from_millis(1));
        let path = directory.path().join("log");
        log.switch(LogTarget::file(&path).unwrap());
        log.flush(Duration::from_secs(20));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("log lines were lost"), "{text}");
    }

    #[test]
    fn without_a_thread_lines_are_written_where_they_arise() {
        let directory = tempfile::tempdir().unwrap();
        let (log, path) = log_at(&directory);
        let mut state = log.shared.state.lock();
        state.has_thread = false;
        drop(state);
        log.shared.called.notify_all();
        // The thread holds the output until it has ended.
        drop(log.shared.output.lock());
        log.write(Level::INFO, "here", "alone");
        assert!(fs::read_to_string(&path).unwrap().ends_with("alone\n"));
    }
}
