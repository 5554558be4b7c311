//! Object stores and web servers: S3, Google Cloud Storage, Azure and HTTP, by the `object_store` crate.
//!
//! The crate makes one attempt at a time to read: its own repetitions are off, since [`super::Retrying`] repeats for all services.
//! [`observe`] sees every reply below it, and takes from it what the crate does not pass on: status, pauses, request ids. [`client`]
//! follows redirects, and [`page`] takes keys out of listings that the crate would refuse. Only [`writer`] changes what a store holds.

mod address;
mod aws_profile;
mod client;
mod connect;
mod http_listing;
mod observe;
mod page;
mod reader;
mod writer;

pub use address::open_url;
pub use writer::Bucket;
