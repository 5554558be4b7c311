//! Remote sources: repositories in object stores, on the Hub and on web servers, read through a cache on disk.
//!
//! ```text
//! RemoteRepository   a pinned listing: path, size and content of each object          from `store` or the Hub's client
//!   Objects          one attempt to read a span of an object                          blocking; async below it
//!   Retrying         repetitions, pauses shared by all threads, counts
//! ```
//!
//! What it deliberately does not do: believe a service, or write to one but where an export is to be. Every reply must be of the pinned version and of the
//! requested span, and a complete object is checked against the digest that its service names.

pub mod cache;
mod counters;
pub mod digest;
mod error;
mod fetcher;
mod files;
pub(super) mod handle;
#[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "only services of the network are asked twice"))]
mod hedge;
#[cfg(feature = "hub")]
pub mod hub;
mod interface;
#[cfg(feature = "hub")]
mod kept;
#[cfg(feature = "hub")]
#[cfg_attr(not(feature = "stores"), allow(dead_code, reason = "the Hub lists files and nothing else"))]
mod listing;
mod object;
mod options;
#[cfg(feature = "hub")]
mod reply;
mod retry;
#[cfg(feature = "hub")]
pub mod runtime;
mod share;
mod shared;
#[cfg(feature = "stores")]
mod store;
mod tree;
mod url_scheme;

pub use counters::{CountRow, LATENCY_BOUNDS_MS, RemoteCounters};
pub use error::{Failure, RemoteError};
pub use files::{RemoteFiles, pin_files};
pub use handle::Remote;
pub use hedge::Hedging;
pub use interface::{Content, Objects, RemoteFile, RemoteRepository, Sink};
pub use object::RemoteObject;
pub use options::RemoteOptions;
pub use retry::{Backoff, Deadline, Retrying};
pub use shared::SharedCache;
#[cfg(feature = "stores")]
pub use store::{Bucket, open_url};
pub use tree::{RemoteTree, open_cache};
pub use url_scheme::{StoreKind, is_loopback, url_schemes};

/// A build without the feature `stores` reads no object stores and web servers.
///
/// # Errors
/// Always, if the address is remote.
#[cfg(not(feature = "stores"))]
pub fn open_url(source: &str, _: &RemoteOptions) -> Option<Result<RemoteRepository, RemoteError>> {
    url_scheme::service_of(source.split_once("://")?.0)?;
    let message = "this build of ckfs reads no object stores and web servers (feature `stores`)";
    Some(Err(RemoteError::new(Failure::Unsupported, "", source.split('?').next().unwrap_or(source), message)))
}
