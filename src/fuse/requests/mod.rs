//! Requests that wait for storage: when they end, and which threads answer the others meanwhile.

mod client;
mod lookout;
mod spare;
mod table;

pub(super) use client::Client;
pub(super) use lookout::Lookout;
pub(super) use spare::{Overflow, Readers};
pub(super) use table::{Requests, Ticket};
