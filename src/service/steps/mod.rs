//! A run that is alive: each finished step is a volume of its own, and all of them are one file system.
//!
//! ```text
//! MNT/100/...   the tree of the step's volume          MNT/latest -> 100          MNT/.ckfs/steps.json
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | `run` | [`Run`]: what is shared by all steps: settings, memory, threads, counters; [`RunState`]: what of it never waits |
//! | `run_service` | [`RunService`]: a run with its threads, and what keeps it alive |
//! | `settle` | which steps of a listing are finished: their marks, silence, and a first look into fresh ones |
//! | `follow` | the thread that looks for new and deleted steps |
//! | `slot`, `slots` | a step and its volume; all steps by number |
//! | `opening` | planning a step when it is first looked at, or is new and the newest, and dropping what nobody uses |
//! | `held` | [`HeldStep`]: a step that somebody uses, for doors that look into one step |
//! | `failed` | the tree of a step that cannot be planned: `.ckfs/error` |
//! | `run_tree` | the file system |
//! | `report` | `steps.json`, statistics, metrics |
//! | `hook` | the command for each new step |
//!
//! # Numbers
//! A step has a *slot*, whose number is in the upper bits of every inode number and handle of its files; the lower bits are the
//! numbers of the step's volume. A slot is of one directory in one state. If the directory is deleted, the slot ends: its name
//! is gone from the listing, and whoever still has a file of it open gets EIO. If it is written anew, another slot takes its
//! name. A volume that nobody uses is dropped and planned again at the next request; the slot goes on only if the new volume
//! has the same files under the same numbers ([`Volume::fingerprint`](ckfs_volume::Volume::fingerprint)), else it ends and
//! another takes its name.
//!
//! So within a slot nothing ever changes, and the kernel may keep what it read. What changes are the names in the root: the
//! kernel keeps none of them ([`FileSystem::is_fixed`](ckfs_volume::FileSystem::is_fixed)). `latest` has a new inode number for
//! each target, so that no reader sees a mixture.
//!
//! # Budgets
//! Tiles, buffers and threads are those of one [`EngineRooms`](ckfs_read::EngineRooms). Mapped pages and decoded chunks belong
//! to a step's source: each gets an equal part of the budget, anew whenever a volume comes or goes. Volumes without open files
//! are kept while their tables are small together, and for some minutes; that of the newest step is always kept.

mod failed;
mod follow;
mod held;
mod hook;
mod opening;
mod report;
mod run;
mod run_service;
mod run_tree;
mod settle;
mod slot;
mod slots;

pub use held::{HeldStep, NoStep};
pub use hook::StepPlace;
pub use run::{Run, RunState};
pub use run_service::RunService;
pub use run_tree::step_number;
pub use settle::{ListedStep, finished_steps, listed_steps};
