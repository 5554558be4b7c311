//! Hands a mount over to another process, and takes it over from one.
//!
//! ```text
//! this process                                     the next one
//!   listens in the state directory   <- connects -   has opened and planned the same configuration
//!   - descriptor of /dev/fuse, record ->             compares; whatever differs, it gives up, and nothing has changed
//!                                    <- STARTED -    takes requests from now on, as this process still does
//!                                    <- TAKEN -      its files answer
//!   takes no more requests     - ALONE ->            says that it is ready
//!   has answered what it took  - DONE ->
//! ```
//!
//! So at every moment some process takes requests, and each request is answered by the one that took it. If either ends in the middle,
//! the other has the kernel send again what is not answered. Of a daemon that was killed, the keeper ([`super::keeper`]) or systemd has
//! the descriptor, and the next one has all unanswered requests sent again.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            fs::DirBuilderExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use ckfs_host::{hand_over_file, if_there, send_descriptors, systemd};
use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use crate::{
    connection::{Inheritance, Record, resend},
    mounts::{MountError, MountOptions, Mounted, receive_descriptors, resolved},
};

/// With the descriptors: their sender serves, or only holds them.
const SERVING: u8 = 1;
pub(super) const HOLDING: u8 = 2;

const STARTED: u8 = b'S';
const TAKEN: u8 = b'T';
pub(super) const ALONE: u8 = b'A';
pub(super) const DONE: u8 = b'D';

/// Longest time for the next word of the other process. Before its first one the other makes or compares digests of all names.
const WORD_LIMIT: Duration = Duration::from_mins(5);

/// What becomes of a mount when another process is to go on with it and cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Succession {
    /// None is to go on with it, unless systemd has kept the descriptor.
    None,
    /// It is left to its daemon.
    Running,
    /// Its daemon is gone: it is made anew.
    Dead,
}

/// The digest of what the kernel may keep of a tree; none if it cannot be made.
pub(super) type Kept = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// The connection of another process.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) device: OwnedFd,
    pub(super) record: Record,
    /// The other process.
    other: Option<UnixStream>,
    /// Whether that one serves the mount, and does not only hold the connection.
    serves: bool,
    /// The lock of the record, where no other process serves.
    pub(super) lock: Option<File>,
    /// Whether it is left to the other process if this one cannot go on with it.
    pub(super) is_left: bool,
}

/// Opens the directory of a mount's socket: its path may be too long for a socket's name.
fn socket_of(mountpoint: &Path, make: bool) -> io::Result<(File, PathBuf, PathBuf)> {
    let file = hand_over_file(&resolved(mountpoint)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no state directory: neither XDG_STATE_HOME nor HOME is set")
    })?;
    let (Some(directory), Some(name)) = (file.parent(), file.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    if make {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let directory = File::open(directory)?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((directory, short, file))
}

/// Listens for the next process of a mount, in place of whoever did before.
pub(super) fn listen(mountpoint: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let (_directory, short, file) = socket_of(mountpoint, true)?;
    if_there(fs::remove_file(&file))?;
    Ok((UnixListener::bind(short)?, file))
}

/// Whether the other end is a process of this user, or of root.
fn is_trusted(stream: &UnixStream) -> bool {
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == geteuid().as_raw() || peer.uid() == 0)
}

/// Hands the connection to the process at the other end. Whether that one goes on with it.
pub(super) fn hand_over(mut stream: &UnixStream, device: &OwnedFd, record: &Record, kind: u8) -> io::Result<bool> {
    if !is_trusted(stream) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(WORD_LIMIT))?;
    send_descriptors(stream, &[kind], &[device.as_raw_fd(), record.as_fd().as_raw_fd()])?;
    let (mut word, mut has_started) = ([0], false);
    while let Ok(1) = stream.read(&mut word) {
        match word[0] {
            STARTED => has_started = true,
            TAKEN => return Ok(true),
            _ => break,
        }
    }
    // It may have taken requests.
    if has_started && record.read()?.resends() {
        resend(device)?;
    }
    Ok(false)
}

impl Taken {
    /// What this process is to go on with, if there is something.
    ///
    /// # Errors
    /// The daemon does not hand it over, and is to go on itself then.
    pub(super) fn find(mountpoint: &Path, succession: Succession) -> Result<Option<Self>, MountError> {
        let found = if succession == Succession::None {
            let Some(kept) = Self::kept() else { return Ok(None) };
            Ok(kept)
        } else {
            Self::connect(mountpoint)
        };
        match found {
            Ok(taken) => {
                let lock = if taken.serves { None } else { Some(taken.record.lock()) };
                let lock = lock.transpose().map_err(|_| {
                    MountError::Refused(format!("{}: another daemon goes on with it", mountpoint.display()))
                })?;
                Ok(Some(Self { is_left: succession == Succession::Running, lock, ..taken }))
            }
            Err(error) if succession == Succession::Dead => {
                warn!("the connection of the daemon before this one is lost: {error}");
                Ok(None)
            }
            Err(error) => {
                Err(MountError::Refused(format!("{}: its daemon does not hand it over: {error}", mountpoint.display())))
            }
        }
    }

    fn connect(mountpoint: &Path) -> io::Result<Self> {
        let (_directory, short, _) = socket_of(mountpoint, false)?;
        let stream = UnixStream::connect(short)?;
        if !is_trusted(&stream) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(Some(WORD_LIMIT))?;
        let (kind, descriptors) = receive_descriptors(&stream)?;
        let [device, record] = <[OwnedFd; 2]>::try_from(descriptors)
            .map_err(|_| io::Error::other("it ended, or is handed over to another process already"))?;
        Ok(Self {
            device,
            record: Record::of(record)?,
            other: Some(stream),
            serves: kind == SERVING,
            lock: None,
            is_left: true,
        })
    }

    /// What systemd has kept for this service.
    fn kept() -> Option<Self> {
        let [device, record] = <[OwnedFd; 2]>::try_from(crate::mounts::adopt_kept(&systemd::kept())).ok()?;
        let record = Record::of(record).inspect_err(|error| warn!("what systemd has kept: {error}")).ok()?;
        Some(Self { device, record, other: None, serves: false, lock: None, is_left: false })
    }

    /// What the record says, and the mount, if this process can go on with it.
    pub(super) fn check(
        &self,
        mountpoint: &Path,
        options: &MountOptions,
        kept: &Kept,
    ) -> Result<(Inheritance, Mounted), MountError> {
        let refused = |why: &str| MountError::Refused(format!("{}: {why}", mountpoint.display()));
        let known =
            self.record.read().map_err(|error| refused(&format!("what its daemon left is unreadable: {error}")))?;
        let mounted = Mounted::taken(mountpoint, &known.device, known.unique_id)?;
        if known.options != options.of_mount() {
            let (found, expected) = (&known.options, options.of_mount());
            return Err(refused(&format!("is mounted with {found}, and would be with {expected} now")));
        }
        if known.kept.is_none() || known.kept != kept() {
            return Err(refused(
                "what it shows is no longer what a mount would show now: a source file, a layout or another setting has \
                 changed, this version plans it otherwise, or its files have times of whole seconds, by which no change is seen",
            ));
        }
        if !self.serves && !known.owes_nothing && !known.resends() {
            return Err(refused("its daemon is gone, and this kernel sends no request again, as Linux does since 6.9"));
        }
        Ok((known, mounted))
    }

    /// Says that this process takes requests from now on, those among them that the daemon before it has not answered: a kernel that
    /// does not send them again has none, as [`Self::check`] has seen.
    pub(super) fn start(&self, resends: bool) -> io::Result<()> {
        if let Some(mut other) = self.other.as_ref() {
            other.write_all(&[STARTED])?;
        }
        if self.serves || !resends { Ok(()) } else { resend(&self.device) }
    }

    /// Says that this process goes on with the mount. Returns when no other takes requests any more; those that the other has taken
    /// it answers by itself.
    pub(super) fn finish(self) {
        let Some(mut other) = self.other else {
            return std::mem::forget(self.lock);
        };
        let mut word = [0];
        if let Err(error) = other.write_all(&[TAKEN]).and_then(|()| other.read_exact(&mut word)) {
            debug!("the process before this one has ended: {error}");
        }
        let wait = move || {
            let mut last = [0];
            let _ = other.set_read_timeout(None);
            if !matches!(other.read(&mut last), Ok(1) if last == [DONE]) && self.serves {
                warn!("the process before this one ended too early; what it left unanswered is sent again");
                if let Err(error) = resend(&self.device) {
                    warn!("some requests of before stay unanswered: {error}");
                }
            }
            // The other process has it until its end.
            while self.lock.is_none() {
                match self.record.lock() {
                    Ok(lock) => std::mem::forget(lock),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(error) => debug!("no lock: {error}"),
                }
                break;
            }
            std::mem::forget(self.lock);
        };
        if let Err(error) = thread::Builder::new().name("ckfs-predecessor".into()).spawn(wait) {
            warn!("nothing waits for the process before this one: {error}");
        }
    }
}

/// What this process offers to the next one of its mount.
pub(super) struct Offer {
    /// Reports a hang-up when another process goes on with the mount.
    pub(super) taken: io::PipeReader,
    next: Arc<Mutex<Option<UnixStream>>>,
    socket: Option<PathBuf>,
}

impl Offer {
    /// Offers a mount until the end of the process. Until the first one asks, or `is_kept`, the digest is not made.
    pub(super) fn new(
        mountpoint: &Path,
        device: OwnedFd,
        record: Record,
        mut known: Inheritance,
        (kept, is_kept): (Kept, bool),
    ) -> io::Result<Self> {
        let (listener, socket) = match listen(mountpoint) {
            Ok((listener, socket)) => (Some(listener), Some(socket)),
            // Services of the system have no state directory.
            Err(_) if is_kept => (None, None),
            Err(error) => return Err(error),
        };
        let (taken, alive) = io::pipe()?;
        let next = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&next);
        let work = move || {
            let complete = |known: &mut Inheritance| {
                if known.kept.is_none() {
                    known.kept = kept();
                    if let Err(error) = record.write(known) {
                        warn!("this mount cannot be handed over: {error}");
                    }
                }
            };
            if is_kept {
                complete(&mut known);
                systemd::keep(&[device.as_fd(), record.as_fd()]);
            }
            // Without an end, which would look like another process that goes on.
            while let Some(listener) = &listener {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(100));
                    continue;
                };
                complete(&mut known);
                match hand_over(&stream, &device, &record, SERVING) {
                    Ok(true) => {
                        *slot.lock() = Some(stream);
                        drop(alive);
                        return;
                    }
                    Ok(false) => info!("another process could not go on with this mount; this one does"),
                    Err(error) => debug!("not handed over: {error}"),
                }
            }
            std::mem::forget(alive);
        };
        thread::Builder::new().name("ckfs-successor".into()).spawn(work)?;
        Ok(Self { taken, next, socket })
    }

    /// Tells the process that goes on with the mount.
    pub(super) fn tell(&self, word: u8) {
        if let Some(next) = &mut *self.next.lock() {
            let _ = next.write_all(&[word]);
        }
    }

    /// Ends the offer where no process goes on with the mount.
    pub(super) fn end(&self) {
        if let Some(socket) = &self.socket {
            let _ = fs::remove_file(socket);
        }
    }
}
