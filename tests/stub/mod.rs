//! Servers on loopback that stand for services on the network: the Hub with its content network, and object stores.
//!
//! Test programs include this module; `program.rs` makes a program of it, for tests in Python and for trying by hand.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs, reason = "tests panic")]

pub mod http;
pub mod hub;
pub mod store;
