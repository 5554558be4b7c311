//! Python's pickles.

pub mod read;
pub mod write;
