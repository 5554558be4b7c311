//! Notifications to systemd, if it started this process as a service of `Type=notify`.

use std::time::Duration;

pub use sd_notify::NotifyState;

/// Tells systemd.
pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("systemd was not notified: {error}");
    }
}

/// Time between two signs of life, if systemd expects them of this process (`WatchdogSec=`): half of what it waits for one.
pub fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|period| !period.is_zero())
}
