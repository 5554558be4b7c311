//! The program as a daemon: how it is started, in the background or by mount(8), and how it reports that it is ready.

mod background;
mod helper;

pub(super) use background::start_child;
pub use background::{DEVICE_VARIABLE, DaemonError, Readiness, Started, is_daemon, start_attached, start_background};
pub use helper::{HelperError, HelperRequest, parse_mount_helper};
