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

pub mod cache;
mod cache_place;
mod counters;
pub mod digest;
mod digest_state;
#[cfg(feature = "remote")]
mod encoding;
mod entry_reader;
mod error;
mod fetcher;
#[cfg(feature = "remote")]
mod files;
pub(super) mod handle;
#[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "only services of the network are asked twice"))]
mod hedge;
#[cfg(feature = "remote")]
pub mod hub;
mod interface;
#[cfg(feature = "remote")]
mod kept_file;
mod locality;
mod object;
mod options;
#[cfg(feature = "remote")]
mod redirect;
mod retry;
#[cfg(feature = "remote")]
mod retry_after;
#[cfg(feature = "remote")]
pub mod runtime;
mod share;
mod shared;
#[cfg(feature = "remote")]
mod store;
mod tree;
mod uncached;
mod url_scheme;

pub use counters::{CountRow, LATENCY_BOUNDS_MS, RemoteCounters};
pub use error::{Failure, RemoteError};
pub use files::RemoteFiles;
pub use handle::Remote;
pub use hedge::Hedging;
pub use interface::{Content, Objects, RemoteFile, RemoteRepository, Sink};
pub use locality::is_loopback;
pub use object::RemoteObject;
pub use options::RemoteOptions;
pub use retry::{Deadline, Gate, Retrying, retry};
pub use shared::SharedCache;
#[cfg(feature = "remote")]
pub use store::open_url;
pub use tree::{RemoteTree, open_cache};
pub use url_scheme::{StoreKind, service_of, url_schemes};

/// A build without the feature `remote` reads no remote source.
///
/// # Errors
/// Always, if the address is remote.
#[cfg(not(feature = "remote"))]
pub fn open_url(source: &str, _: &RemoteOptions) -> Option<Result<RemoteRepository, RemoteError>> {
    service_of(source.split_once("://")?.0)?;
    let message = "this build of ckfs has no remote sources (feature `remote`)";
    Some(Err(RemoteError::new(Failure::Unsupported, "", source.split('?').next().unwrap_or(source), message)))
}
