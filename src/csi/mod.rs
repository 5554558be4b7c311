//! `ckfs csi`: the node plugin of Kubernetes, by the Container Storage Interface, and the sidecar for plugins of others.
//!
//! | module | holds |
//! | --- | --- |
//! | `server` | the socket, and calls of Identity and Node as functions of [`node`](self) |
//! | `messages` | the messages of the interface |
//! | `node` | what the calls do: volumes are published, looked at and taken away |
//! | `volume` | a volume's attributes and secrets as a configuration and an environment |
//! | `state` | the state directory: what is published, and one directory for each daemon |
//! | `daemons` | starts daemons, in this process or in one that outlives it |
//! | `sidecar` | serves descriptors of `/dev/fuse` that a plugin passes |
//!
//! A volume is a bind mount of a mount in the state directory, which volumes of one configuration and the same secrets share. Its daemon
//! is `ckfs mount --keeper`, no child of the plugin: it goes on when the plugin ends, and the next plugin finds it by the state
//! directory. Nothing of a volume is in the memory of the plugin alone.

mod daemons;
mod messages;
mod node;
mod server;
mod sidecar;
mod state;
mod volume;

use std::path::PathBuf;

pub use daemons::serve_mounts;
pub use server::serve;
pub use sidecar::serve_sidecar;

/// How the node plugin runs.
#[derive(Clone, Debug)]
pub struct CsiOptions {
    /// Where it answers: `unix:///path`, or a path.
    pub endpoint: String,
    /// The name of this node.
    pub node: String,
    /// The name of the driver.
    pub driver: String,
    /// Where it keeps what it mounts, and what is published.
    pub state: PathBuf,
    /// Directories in which the files that attributes name must be; none allows all.
    pub roots: Vec<PathBuf>,
    /// Where daemons keep bytes of remote sources.
    pub cache_dir: Option<PathBuf>,
    /// The socket of the process that starts daemons; this process does so by itself if there is none.
    pub mounter: Option<PathBuf>,
}
