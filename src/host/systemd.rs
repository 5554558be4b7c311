//! Notifications to systemd, if it started this process as a service of `Type=notify`, and the unit of a process.

use std::{
    env,
    fmt::Display,
    fs, io,
    os::{
        fd::{AsRawFd, BorrowedFd, RawFd},
        unix::net::UnixDatagram,
    },
    time::Duration,
};

pub use sd_notify::NotifyState;

use super::send_descriptors;

/// Tells systemd.
pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("systemd was not notified: {error}");
    }
}

/// Name of the descriptors that systemd keeps for a mount.
const KEPT: &str = "ckfs";

/// Whether systemd, or something like it, hears of this process.
pub fn listens() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some()
}

/// Asks systemd to keep descriptors for the next process of this service (`FileDescriptorStoreMax=`).
pub fn keep(descriptors: &[BorrowedFd<'_>]) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let message = format!("FDSTORE=1\nFDNAME={KEPT}\n");
    let send = || {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        io::Result::Ok(send_descriptors(&socket, message.as_bytes(), &numbers)?)
    };
    if let Err(error) = send() {
        tracing::warn!("systemd was asked to keep no descriptor: {error}");
    }
}

/// Asks systemd to keep them no longer.
pub fn release() {
    notify(&[NotifyState::Custom("FDSTOREREMOVE=1"), NotifyState::Custom(&format!("FDNAME={KEPT}"))]);
}

/// The descriptors that systemd has kept. They belong to the caller.
pub fn kept() -> Vec<RawFd> {
    let found = sd_notify::listen_fds_with_names();
    found.into_iter().flatten().filter(|(_, name)| name == KEPT).map(|(number, _)| number).collect()
}

/// Time between two signs of life, if systemd expects them of this process (`WatchdogSec=`): half of what it waits for one.
pub fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|period| !period.is_zero())
}

/// The command that restarts the service of ckfs that a process belongs to, `self` or its number; `None` if there is none.
pub fn restart_command(process: impl Display) -> Option<String> {
    restart_of(&fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?)
}

fn restart_of(groups: &str) -> Option<String> {
    groups.lines().find_map(|group| {
        let unit = group.rsplit('/').next().filter(|unit| unit.starts_with("ckfs") && unit.ends_with(".service"))?;
        let manager = if group.contains("/user@") { "systemctl --user" } else { "systemctl" };
        // Names have escapes such as `\x2d`.
        let quote = if unit.contains('\\') { "'" } else { "" };
        Some(format!("{manager} restart {quote}{unit}{quote}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_a_process_is_that_of_its_cgroup() {
        let user = "0::/user.slice/user-7.slice/user@7.service/app.slice/app-ckfs.slice/ckfs@llama.service\n";
        for (groups, expected) in [
            ("0::/system.slice/system-ckfs.slice/ckfs@llama.service\n", Some("systemctl restart ckfs@llama.service")),
            (
                "1:name=systemd:/\n0::/system.slice/ckfs@a\\x2db.service",
                Some("systemctl restart 'ckfs@a\\x2db.service'"),
            ),
            (user, Some("systemctl --user restart ckfs@llama.service")),
            ("0::/system.slice/slurmd.service\n", None),
            ("0::/user.slice/session-3.scope\n", None),
        ] {
            assert_eq!(restart_of(groups).as_deref(), expected, "{groups}");
        }
    }
}
