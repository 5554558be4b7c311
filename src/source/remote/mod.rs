//! Remote sources: repositories in object stores, on the Hub and on web servers, read through a cache on disk.
//!
//! ```text
//! RemoteRepository   a pinned listing: path, size and content of each object          from `store` or the Hub's client
//!   Objects          one attempt to read a span of an object                          blocking; async below it
//!   Retrying         repetitions, pauses shared by all threads, counts
//! ```
//!
//! What it deliberately does not do: write to a service, or believe it. Every reply must be of the pinned version and of the
//! requested span, and a complete object is checked against the digest that its service names.

mod counters;
mod error;
mod interface;
mod locality;
mod options;
mod retry;
#[cfg(feature = "remote")]
pub mod runtime;

pub use counters::{LATENCY_BOUNDS_MS, RemoteCounters};
pub use error::{Failure, RemoteError};
pub use interface::{Content, Objects, RemoteFile, RemoteRepository, Sink};
pub use locality::is_loopback;
pub use options::RemoteOptions;
pub use retry::{Deadline, Gate, Retrying, retry};
