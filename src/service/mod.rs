//! A volume that is alive: opened as a configuration says, with its memory budget, and watched until it ends.
//!
//! Every way in stands on this layer: the kernel's requests ([`ckfs_fuse`](https://docs.rs/ckfs-fuse)), the commands that read
//! files by themselves, and programs that use the library. So all have the same budgets, the same default layout, the same
//! checks of sources and the same time limits.
//!
//! | module | holds |
//! | --- | --- |
//! | `service` | [`Service`]: a volume with the threads that keep it alive |
//! | `alive` | [`Alive`]: that, or a run |
//! | `open` | what the settings mean: checkpoint, plans, volume, memory budget; chunks that do not fit in memory are refused |
//! | [`average`] | which sources an average is of |
//! | `own_mount` | what is refused before anything is served: shards of a mount as a source |
//! | `upkeep` | repeated work: memory of closed files is released, sources are checked; what the listed devices will read is fetched ahead |
//! | `wait_watch` | waits for storage and services while nothing is served yet: reported, and given up after the time limit |
//! | [`steps`] | a run: the checkpoints that a trainer leaves in a directory, each a volume of its own |
//! | [`identity`] | digests that name what is served or exported |
//! | `requests` | requests that wait for bytes: each is answered once, in time |

mod alive;
pub mod average;
mod error;
pub mod identity;
mod open;
mod own_mount;
mod requests;
mod service;
pub mod steps;
mod upkeep;
mod wait_watch;

pub use alive::{Alive, AliveContent, OpenProblem};
pub use error::OpenError;
pub use open::{
    FINDINGS, budget, cache_of_environment, check_sources, cores, enable_materialization, open_checkpoint, open_volume,
    overrides, plan_views, quoted, remote_options, volume_of,
};
pub use own_mount::advice as own_mount_advice;
pub use requests::{
    Client, Handlers, Heartbeat, Pending, Refuse, ReplySlot, Requests, WaitingThreads, Watchdog, panic_text, read_whole,
};
pub use service::{Service, open_alive};
pub use wait_watch::{WaitWatch, wait_registry, watch};
