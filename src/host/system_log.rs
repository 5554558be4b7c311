//! The system's log: syslog by `/dev/log`, else the journal by its own socket.
//!
//! Both take one datagram a line. The socket never blocks; what the log does not take in time counts as lost.
//!
//! Own code, because the sockets of `syslog` (7.0) and `tracing-journald` (0.3) block while the log is slow. The second knows the
//! journal only, and discards errors without a count.

use std::{
    io,
    os::{fd::AsFd, unix::net::UnixDatagram},
    path::{Path, PathBuf},
    process,
    sync::OnceLock,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::Level;

/// Where syslog listens.
pub(crate) const SYSLOG: &str = "/dev/log";
/// Where the journal listens.
pub(crate) const JOURNAL: &str = "/run/systemd/journal/socket";

/// Name of this program in the log.
const IDENTIFIER: &str = "ckfs";

/// The facility of daemons, in the place where a priority has it.
const DAEMON: u8 = 3 << 3;

/// How long to wait for room in the socket.
const PATIENCE_MS: u16 = 200;

/// How lines are wrapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `<priority>ckfs[pid]: text`
    Syslog,
    /// Fields, one a line.
    Journal,
}

/// What the lines of this process are about, as fields of the journal.
static SUBJECT: OnceLock<Vec<u8>> = OnceLock::new();

/// Gives all further lines in the journal these fields, such as `CKFS_MOUNT`. The first call counts.
pub fn set_subject(fields: &[(&str, &str)]) {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        add_field(&mut bytes, name, value);
    }
    let _ = SUBJECT.set(bytes);
}

/// A connection to the system's log.
#[derive(Debug)]
pub struct SystemLog {
    path: PathBuf,
    protocol: Protocol,
    socket: Option<UnixDatagram>,
}

impl SystemLog {
    /// The log of this system, if it has one that listens.
    pub fn find() -> Option<Self> {
        let rows = [(SYSLOG, Protocol::Syslog), (JOURNAL, Protocol::Journal)];
        rows.into_iter().find_map(|(path, protocol)| Self::connect(Path::new(path), protocol).ok())
    }

    /// The journal, if there is one that listens.
    pub(super) fn journal() -> Option<Self> {
        Self::connect(Path::new(JOURNAL), Protocol::Journal).ok()
    }

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// Nothing listens there.
    pub fn connect(path: &Path, protocol: Protocol) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), protocol, socket: Some(socket(path)?) })
    }

    /// For people: what it is and how to read it.
    pub fn description(&self) -> String {
        match self.protocol {
            Protocol::Syslog => format!("the system log ({}), as {IDENTIFIER}[{}]", self.path.display(), process::id()),
            Protocol::Journal => format!("the journal: journalctl _PID={}", process::id()),
        }
    }

    /// Sends one line.
    ///
    /// # Errors
    /// It is not taken, also after connecting again.
    pub fn write(&mut self, level: Level, text: &str) -> io::Result<()> {
        let datagram = match self.protocol {
            Protocol::Syslog => syslog_datagram(level, text),
            Protocol::Journal => journal_datagram(level, text, SUBJECT.get().map_or(&[], Vec::as_slice)),
        };
        if let Some(socket) = &self.socket {
            match send(socket, &datagram) {
                // It may have been started anew, with a new socket.
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => self.socket = None,
                result => return result,
            }
        }
        let socket = socket(&self.path)?;
        let result = send(&socket, &datagram);
        self.socket = Some(socket);
        result
    }
}

fn socket(path: &Path) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect(path)?;
    Ok(socket)
}

fn send(socket: &UnixDatagram, datagram: &[u8]) -> io::Result<()> {
    match socket.send(datagram) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
            let _ = poll(&mut fds, PollTimeout::from(PATIENCE_MS));
            socket.send(datagram).map(|_| ())
        }
        result => result.map(|_| ()),
    }
}

/// The severity of syslog.
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn syslog_datagram(level: Level, text: &str) -> Vec<u8> {
    // A line break would be shown as an escape by some, and end the message for others.
    let text = text.replace('\n', "; ");
    format!("<{}>{IDENTIFIER}[{}]: {text}", DAEMON | severity(level), process::id()).into_bytes()
}

fn journal_datagram(level: Level, text: &str, subject: &[u8]) -> Vec<u8> {
    let mut datagram =
        format!("PRIORITY={}\nSYSLOG_FACILITY=3\nSYSLOG_IDENTIFIER={IDENTIFIER}\n", severity(level)).into_bytes();
    datagram.extend_from_slice(subject);
    add_field(&mut datagram, "MESSAGE", text);
    datagram
}

/// A field in the journal's own form: a value with line breaks has its length before it.
fn add_field(datagram: &mut Vec<u8>, name: &str, value: &str) {
    datagram.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        datagram.push(b'\n');
        datagram.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        datagram.push(b'=');
    }
    datagram.extend_from_slice(value.as_bytes());
    datagram.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_have_the_form_of_their_protocol() {
        let pid = process::id();
        assert_eq!(syslog_datagram(Level::ERROR, "a\nb"), format!("<27>ckfs[{pid}]: a; b").into_bytes());
        assert_eq!(syslog_datagram(Level::TRACE, "a"), format!("<31>ckfs[{pid}]: a").into_bytes());
        let head = "PRIORITY=4\nSYSLOG_FACILITY=3\nSYSLOG_IDENTIFIER=ckfs\n";
        assert_eq!(journal_datagram(Level::WARN, "a=b", b""), format!("{head}MESSAGE=a=b\n").into_bytes());
        let two_lines = format!("{head}MESSAGE\n\x03\0\0\0\0\0\0\0a\nb\n");
        assert_eq!(journal_datagram(Level::WARN, "a\nb", b""), two_lines.into_bytes());
        let mut subject = Vec::new();
        add_field(&mut subject, "CKFS_MOUNT", "/mnt/a");
        let about = format!("{head}CKFS_MOUNT=/mnt/a\nMESSAGE=a\n");
        assert_eq!(journal_datagram(Level::WARN, "a", &subject), about.into_bytes());
    }

    #[test]
    fn a_log_that_was_started_anew_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert!(SystemLog::connect(&path, Protocol::Syslog).is_err());
        let first = UnixDatagram::bind(&path).unwrap();
        let mut log = SystemLog::connect(&path, Protocol::Syslog).unwrap();
        log.write(Level::INFO, "one").unwrap();
        drop(first);
        std::fs::remove_file(&path).unwrap();
        assert!(log.write(Level::INFO, "two").is_err());
        let second = UnixDatagram::bind(&path).unwrap();
        log.write(Level::INFO, "three").unwrap();
        let mut buffer = [0; 100];
        let len = second.recv(&mut buffer).unwrap();
        assert!(buffer[..len].ends_with(b": three"));
    }

    #[test]
    fn a_log_that_nobody_reads_does_not_block() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let _unread = UnixDatagram::bind(&path).unwrap();
        let mut log = SystemLog::connect(&path, Protocol::Journal).unwrap();
        let refused = (0..10_000).any(|_| log.write(Level::INFO, &"x".repeat(10_000)).is_err());
        assert!(refused, "100 MB in a socket");
    }
}
