//! Starts daemons: in this process, or in one that is there for that alone, so that they outlive the plugin's container.
//!
//! The end of a container ends all its processes. So the plugin and the process that starts daemons ([`serve_mounts`]) are two
//! containers: the plugin is upgraded while the daemons go on.

use std::{
    collections::BTreeMap,
    env,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};
use tracing::warn;

use crate::{state::listen, volume::is_credential};

/// What is to be started. Not shown: it has secrets.
#[derive(Serialize, Deserialize)]
pub(crate) struct Start {
    /// The configuration.
    pub(crate) file: PathBuf,
    /// Where the daemon keeps its log and the socket by which it is replaced.
    pub(crate) state: PathBuf,
    pub(crate) variables: BTreeMap<String, String>,
}

/// How `ckfs mount` ended, and what it said.
#[derive(Serialize, Deserialize)]
struct Outcome {
    code: i32,
    said: String,
}

/// Held to read while a child is waited for: nothing else may take its exit status.
static WAITING: RwLock<()> = RwLock::new(());

/// Takes note of the end of daemons that this process has adopted, as the first one of a container does.
fn reap() {
    let Some(_alone) = WAITING.try_write() else { return };
    while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok_and(|status| status != WaitStatus::StillAlive) {}
}

impl Start {
    /// Starts it; returns when the mount answers.
    ///
    /// # Errors
    /// The daemon's own message, with the code that fits it.
    pub(crate) fn run(&self, mounter: Option<&Path>) -> Result<(), Status> {
        let outcome = match mounter {
            None => self.here(),
            Some(socket) => self
                .there(socket)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display()))),
        };
        let Outcome { code, said } =
            outcome.map_err(|error| Status::unavailable(format!("start a daemon: {error}")))?;
        let message = said.split_once("ckfs: error: ").map_or(&*said, |(_, message)| message).trim();
        match code {
            0 => Ok(()),
            code => Err(Status::new(code_of(code, message), message)),
        }
    }

    fn here(&self) -> io::Result<Outcome> {
        reap();
        let _waiting = WAITING.read();
        let mut command = Command::new(env::current_exe()?);
        command.args(["mount", "--config"]).arg(&self.file).env("XDG_STATE_HOME", &self.state);
        // The plugin's own.
        command.env_remove("NOTIFY_SOCKET");
        if !self.variables.is_empty() {
            for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_credential)) {
                command.env_remove(name);
            }
        }
        let done = command.envs(&self.variables).stdin(Stdio::null()).stdout(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        Ok(Outcome { code: done.status.code().unwrap_or(-1), said })
    }

    fn there(&self, socket: &Path) -> io::Result<Outcome> {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(&serde_json::to_vec(self)?)?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(serde_json::from_slice(&answer)?)
    }
}

/// The code of a failure: by what the message of `ckfs mount` says, as its exit code tells usage only.
fn code_of(exit: i32, message: &str) -> Code {
    let text = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if exit == 2 {
        Code::InvalidArgument
    } else if says(&["no such file", "no such directory", "not found", "does not exist", "404"]) {
        Code::NotFound
    } else if says(&["permission denied", "access denied", "401", "403", "gated"]) {
        Code::PermissionDenied
    } else if says(&["no answer", "was not ready within", "timed out"]) {
        Code::DeadlineExceeded
    } else {
        Code::FailedPrecondition
    }
}

/// Starts daemons for the plugin until this process ends. Each connection is one request.
///
/// # Errors
/// The socket.
pub fn serve_mounts(socket: &Path) -> io::Result<()> {
    let listener = listen(socket)?;
    // What it starts runs as this user, and requests have secrets.
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    thread::Builder::new().name("ckfs-mounter".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = move || {
                let mut stream = stream;
                let start: Start = serde_json::from_reader(&stream)?;
                let outcome = start.here().unwrap_or_else(|error| Outcome { code: -1, said: error.to_string() });
                stream.write_all(&serde_json::to_vec(&outcome)?)
            };
            let answered = thread::Builder::new().name("ckfs-start".into()).spawn(move || {
                if let Err(error) = answer() {
                    warn!("a request of the plugin: {error}");
                }
            });
            if let Err(error) = answered {
                warn!("start a thread: {error}");
            }
        }
    })?;
    wait_for_end();
    let _ = std::fs::remove_file(socket);
    Ok(())
}

/// Waits for a signal that ends this process. They must be blocked.
pub(crate) fn wait_for_end() {
    let signals: nix::sys::signal::SigSet = ckfs_host::signal::ENDING.into_iter().collect();
    let _ = signals.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_a_code() {
        for (exit, message, code) in [
            (2, "unknown key", Code::InvalidArgument),
            (1, "/models/x: no such directory", Code::NotFound),
            (1, "org/name: 401 Unauthorized", Code::PermissionDenied),
            (1, "the daemon was not ready within 1s", Code::DeadlineExceeded),
            (1, "axis tensor splits nothing", Code::FailedPrecondition),
        ] {
            assert_eq!(code_of(exit, message), code, "{message}");
        }
    }
}
