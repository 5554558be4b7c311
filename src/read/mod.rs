//! The byte-range engine: from a span of a virtual file to the bytes of its sources.
//!
//! [`reference`](mod@reference) is the slow second opinion on every byte.

pub mod reference;
