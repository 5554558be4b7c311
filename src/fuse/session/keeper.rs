//! The keeper of a mount: a process that has the connection open, so that it outlives a daemon that is killed, and starts the next one.
//!
//! It ends when the daemon says that it ends in order, and with the start of the next daemon, which has a keeper of its own.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ckfs_host::send_descriptors;
use nix::unistd::{chdir, setsid};
use tracing::{error, warn};

use super::successor::{ALONE, DONE, HOLDING, hand_over, listen};
use crate::{
    connection::{Record, has_ended},
    daemon::start_child,
    mounts::receive_descriptors,
};

/// The flag of `ckfs mount` for a keeper.
const FLAG: &str = "--keep";

/// Longest time for the start of the keeper.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A daemon that ends sooner than this is not worth another one, if it happens again and again: a request may be what ends it.
const LIFE_MIN: Duration = Duration::from_secs(1);

/// Most such daemons, one after the other; and most starts that fail.
const SHORT_LIVES_MAX: u32 = 10;
const STARTS_MAX: u32 = 6;

/// Starts a keeper, which reads the configuration in `file`. The stream tells it, by a byte, that this process ends in order.
pub(super) fn start(file: &Path, device: &OwnedFd, record: &Record) -> io::Result<UnixStream> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["mount", "--config"]).arg(file).arg(FLAG);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    drop(command);
    let descriptors = [device.as_fd(), record.as_fd()].map(|fd| std::os::fd::AsRawFd::as_raw_fd(&fd));
    send_descriptors(&ours, &[HOLDING], &descriptors)?;
    ours.set_read_timeout(Some(START_LIMIT))?;
    ours.read_exact(&mut [0])?;
    Ok(ours)
}

/// Tells the keeper that this process ends in order.
pub(super) fn release(keeper: Option<UnixStream>) {
    if let Some(mut keeper) = keeper {
        let _ = keeper.write_all(&[HOLDING]);
    }
}

/// Keeps the connection of a daemon, which is at the other end of standard input, and starts the next one if it dies.
///
/// # Errors
/// It was not started by a daemon, or no next daemon starts. The mount ends with this process then.
pub fn keep(file: &Path, mountpoint: &Path, timeout: Duration) -> io::Result<()> {
    let program = std::env::current_exe()?;
    let mut daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (_, descriptors) = receive_descriptors(&daemon)?;
    let [device, record] =
        <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| io::Error::other("only a daemon starts a keeper"))?;
    let record = Record::of(record)?;
    // It is no part of the daemon's session, and no directory is in use because of it.
    let _ = setsid();
    chdir("/")?;
    let since = Instant::now();
    // One that dies before it hears of its keeper is not ready, which its starter sees.
    let is_over = daemon.write_all(&[HOLDING]).is_err() || matches!(daemon.read(&mut [0]), Ok(1));
    if is_over || has_ended(&device) {
        return Ok(());
    }
    let mut known = record.read()?;
    known.short_lives = if since.elapsed() < LIFE_MIN { known.short_lives + 1 } else { 0 };
    record.write(&known)?;
    let path = mountpoint.display();
    if known.short_lives > SHORT_LIVES_MAX {
        return Err(io::Error::other(format!(
            "{path}: given up: {SHORT_LIVES_MAX} daemons ended right after their start"
        )));
    }
    warn!("{path}: its daemon was killed; another one goes on");
    let (listener, _) = listen(mountpoint)?;
    let (device, is_taken) = (Arc::new(device), Arc::new(AtomicBool::new(false)));
    let (held, taken) = (Arc::clone(&device), Arc::clone(&is_taken));
    thread::Builder::new().name("ckfs-holder".into()).spawn(move || {
        for mut stream in listener.incoming().flatten() {
            if matches!(hand_over(&stream, &held, &record, HOLDING), Ok(true)) {
                taken.store(true, Ordering::Release);
                let _ = stream.write_all(&[ALONE, DONE]);
            }
        }
    })?;
    let args = ["mount".into(), "--config".into(), file.into(), "--succeed".into(), "dead".into()];
    let (mut starts, mut pause) = (0, Duration::from_secs(1));
    loop {
        let started = start_child(&program, &args, None, timeout);
        starts += 1;
        match started {
            Ok(_) => return Ok(()),
            // Another process may have been started by hand.
            Err(error) if is_taken.load(Ordering::Acquire) || has_ended(&device) => {
                warn!("{path}: no daemon was started, as another one goes on or the mount has ended: {error}");
                return Ok(());
            }
            Err(error) if starts == STARTS_MAX => return Err(io::Error::other(format!("{path}: given up: {error}"))),
            Err(error) => error!("{path}: no daemon goes on yet: {error}"),
        }
        thread::sleep(pause);
        if is_taken.load(Ordering::Acquire) {
            return Ok(());
        }
        pause *= 2;
    }
}
