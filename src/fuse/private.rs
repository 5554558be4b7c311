//! A mount that only one command and its children see.
//!
//! ```text
//! starter (this program) -- starts --> child (this program again, one thread)
//!                                        new user and mount namespace, mount(2), descriptor of /dev/fuse
//!         <-- descriptor, by a socket --
//!         a daemon outside serves the descriptor, without privileges
//!         -- go -->                      the mount answers; the child becomes the command
//! ```
//!
//! The child must have one thread when it enters a user namespace. So it is the program started again, and [`run_inside`] is
//! the first step of `main`. In a user namespace the child has all capabilities until it becomes the command, which has
//! none: the namespace maps only the user's own number. A process with the capability to mount needs no user namespace.
//!
//! The mount has no `allow_other` unless the user says so: only processes of the same user may use it. The daemon stays outside and
//! reads sources with the user's own rights. So the command reads nothing through the mount that the user could not read.
//!
//! The kernel removes the mount with the last process of its namespace, or when the directory that it lies on is removed
//! outside.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, ExitCode},
};

use ckfs_host::{send_descriptors, signal, tell};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{getegid, geteuid, getppid},
};

use super::mounts::{
    MountError, MountOptions, adopt_socket, check_host, is_in_chroot, mount_as_root, receive_descriptor, sanitize,
};

/// Environment variable of the command: where the mount is.
pub(crate) const MOUNT_VARIABLE: &str = "CKFS_MOUNT";

/// Environment variable of the child: the number of its socket and of its starter's process.
const INSIDE_VARIABLE: &str = "CKFS_RUN_INSIDE";

/// Exit codes of a command that cannot be run, as of shells.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// A mount in private namespaces, and the child that will become the command.
#[derive(Debug)]
pub struct PrivateMount {
    /// The child; the command has its process id.
    pub child: Child,
    socket: UnixStream,
}

impl PrivateMount {
    /// Starts the child, which mounts on `mountpoint`. Returns the descriptor to serve as well.
    ///
    /// The child is killed when the calling thread ends.
    ///
    /// # Errors
    /// [`MountError::Host`] with the remedy. The child has ended then.
    pub fn start(
        program: &Path,
        mountpoint: &Path,
        options: &MountOptions,
        command: &[OsString],
    ) -> Result<(Self, OwnedFd), MountError> {
        check_host()?;
        let (socket, theirs) = UnixStream::pair().map_err(MountError::system("make a socket"))?;
        let inherit = fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()));
        inherit.map_err(MountError::system("pass a socket"))?;
        let allow_other = if options.allow_other { "allow_other" } else { "" };
        let child = Command::new(program)
            .args([mountpoint.as_os_str(), OsStr::new(&sanitize(&options.name)), OsStr::new(allow_other)])
            .args(command)
            .env(INSIDE_VARIABLE, format!("{}:{}", theirs.as_raw_fd(), std::process::id()))
            .spawn();
        let child = child.map_err(MountError::system("start this program again"))?;
        drop(theirs);
        let mut private = Self { child, socket };
        if let Ok(Some(device)) = receive_descriptor(&private.socket) {
            return Ok((private, device));
        }
        let mut message = String::new();
        let _ = private.socket.read_to_string(&mut message);
        private.end();
        let message = if message.is_empty() { "the child ended" } else { &message };
        Err(MountError::Host(format!("cannot mount for one command: {message}")))
    }

    /// Lets the child check that the mount answers, and become the command.
    ///
    /// # Errors
    /// The child has ended.
    pub fn go(&mut self) -> io::Result<()> {
        self.socket.write_all(&[1])
    }

    /// Ends the child.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Becomes the command of [`PrivateMount::start`], if this process is its child. Returns only if that fails, or if it is not. Must be
/// called before any thread is started.
pub fn run_inside() -> Option<ExitCode> {
    let value = env::var(INSIDE_VARIABLE).ok()?;
    let (socket, starter) = value.split_once(':')?;
    let (socket, starter): (i32, i32) = (socket.parse().ok()?, starter.parse().ok()?);
    if getppid().as_raw() != starter {
        return None;
    }
    let mut socket = adopt_socket(socket)?;
    signal::restore();
    let args: Vec<OsString> = env::args_os().skip(1).collect();
    let [mountpoint, name, allow_other, program, rest @ ..] = args.as_slice() else { return Some(ExitCode::FAILURE) };
    let options = MountOptions { allow_other: !allow_other.is_empty(), ..MountOptions::default() };
    let source = format!("ckfs:{}", name.to_string_lossy());
    let mountpoint = Path::new(mountpoint);
    let sent = enter(starter)
        .and_then(|()| mount_as_root(mountpoint, &source, &options).map_err(|error| refusal_of_mount(&error)))
        .and_then(|device| {
            send_descriptors(&socket, &[1], &[device.as_raw_fd()])
                .map_err(|errno| format!("pass a descriptor: {errno}"))
        });
    if let Err(message) = sent {
        // Without a descriptor before it, this is the reason.
        let _ = socket.write_all(&[0]).and_then(|()| socket.write_all(message.as_bytes()));
        return Some(ExitCode::FAILURE);
    }
    // Without the word to go, the daemon failed, and the starter says why.
    let mut word = [0];
    if socket.read_exact(&mut word).is_err() {
        return Some(ExitCode::FAILURE);
    }
    drop(socket);
    let answer = nix::sys::statfs::statfs(mountpoint).map_err(io::Error::from).and_then(|_| fs::metadata(mountpoint));
    if let Err(error) = answer {
        tell(&format!("ckfs: error: the mount does not answer: {error}\n"));
        return Some(ExitCode::FAILURE);
    }
    let error = Command::new(program).args(rest).env(MOUNT_VARIABLE, mountpoint).env_remove(INSIDE_VARIABLE).exec();
    tell(&format!("ckfs: error: {}\n", not_run(program, &error)));
    Some(ExitCode::from(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE }))
}

/// Why the command was not run.
fn not_run(program: &OsStr, error: &io::Error) -> String {
    let name = program.display();
    if error.kind() != io::ErrorKind::NotFound {
        format!("{name}: {error}")
    } else if !program.as_encoded_bytes().contains(&b'/') {
        format!("no program {name} in PATH")
    } else if Path::new(program).exists() {
        format!("{name}: the interpreter or the loader that it names is not there")
    } else {
        format!("{name}: no such program")
    }
}

/// Enters a mount namespace whose mounts no other process sees, and a user namespace where that needs one.
fn enter(starter: i32) -> Result<(), String> {
    let (user, group) = (geteuid(), getegid());
    // Root may lack the capability, as in most containers.
    let alone = if user.is_root() { unshare(CloneFlags::CLONE_NEWNS) } else { Err(Errno::EPERM) };
    if alone.is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).map_err(refusal_of_namespace)?;
        let write = |file: &str, text: String| {
            fs::write(file, text).map_err(|error| format!("{file}: {error}; {REMEDY_OF_PERMISSION}"))
        };
        // The kernel lets users map their own group only after this.
        write("/proc/self/setgroups", "deny".to_owned())?;
        write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // Mounts made outside later are still visible inside, as those of an automounter. None goes the other way.
    let flags = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)
        .map_err(|errno| format!("hide mounts from others: {errno}; {}", remedy(errno, is_in_chroot())))?;
    // After the change of rights, which would undo it.
    set_pdeathsig(Signal::SIGKILL).map_err(|errno| format!("prctl: {errno}"))?;
    if getppid().as_raw() != starter {
        return Err("its starter has ended".to_owned());
    }
    Ok(())
}

const REMEDY_OF_PERMISSION: &str = "an administrator can allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, \
                                    kernel.apparmor_restrict_unprivileged_userns=0, or for a container a seccomp and an AppArmor \
                                    profile that permit unshare and mount";

/// The kernel hides no mounts, and lets nobody make a user namespace, below a root that is not that of a mount.
const REMEDY_OF_CHROOT: &str = "this process is in a chroot whose / is no mount point, where the kernel permits that to nobody: \
                                as root outside, mount --bind DIR DIR and enter it by unshare or a container (pivot_root), or use \
                                `ckfs mount`";

#[expect(clippy::wildcard_enum_match_arm, reason = "errors of all system calls")]
fn remedy(errno: Errno, in_chroot: bool) -> &'static str {
    match errno {
        Errno::EINVAL | Errno::EPERM if in_chroot => REMEDY_OF_CHROOT,
        _ => REMEDY_OF_PERMISSION,
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "errors of all system calls")]
fn refusal_of_namespace(errno: Errno) -> String {
    let remedy = match errno {
        Errno::ENOSPC => "sysctl user.max_user_namespaces and user.max_mnt_namespaces are used up, or 0",
        Errno::EINVAL | Errno::ENOSYS => "this kernel has no user namespaces (CONFIG_USER_NS)",
        _ => remedy(errno, is_in_chroot()),
    };
    format!("user namespace refused: {errno}; {remedy}")
}

#[expect(clippy::wildcard_enum_match_arm, reason = "mounting in this way has these errors")]
fn refusal_of_mount(error: &MountError) -> String {
    match error {
        MountError::Device(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            format!("{error}; it needs mode 0666 (chmod 666 /dev/fuse, or a udev rule)")
        }
        MountError::Mount { errno: Errno::EPERM | Errno::EACCES, .. } => format!("{error}; {REMEDY_OF_PERMISSION}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_passes_through_the_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(b"passed").unwrap();
        send_descriptors(&theirs, &[1], &[file.as_raw_fd()]).unwrap();
        let received = receive_descriptor(&ours).unwrap().unwrap();
        assert_eq!(fs::File::from(received).metadata().unwrap().len(), 6);
    }

    #[test]
    fn every_refusal_has_a_remedy() {
        assert!(refusal_of_namespace(Errno::EPERM).contains("unprivileged_userns_clone"));
        assert!(
            remedy(Errno::EINVAL, true).contains("in a chroot") && !remedy(Errno::EINVAL, false).contains("chroot")
        );
        assert!(refusal_of_namespace(Errno::ENOSPC).contains("max_user_namespaces"));
        assert!(refusal_of_namespace(Errno::EINVAL).contains("CONFIG_USER_NS"));
        let closed = MountError::Device(io::ErrorKind::PermissionDenied.into());
        assert!(refusal_of_mount(&closed).contains("0666"));
        let refused = MountError::Mount { path: "/x".into(), errno: Errno::EPERM };
        assert!(refusal_of_mount(&refused).contains("AppArmor"));
        assert!(refusal_of_mount(&MountError::NoDevice).contains("modprobe"));
    }

    #[test]
    fn a_process_that_is_no_child_goes_on() {
        assert!(run_inside().is_none());
    }
}
