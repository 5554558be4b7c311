//! What threads share: pools of threads, a cache that makes each value once, recycled buffers.
//!
//! This layer knows nothing of bytes of checkpoints; those who use it say what a job, a value and its room are.
//!
//! | for | use |
//! | --- | --- |
//! | jobs in the background | a [`Pool`]: threads start when jobs wait, up to a bound, and end when idle |
//! | one job that several threads do, and the caller waits | [`Helpers::beside`]; for each of a list: [`Helpers::each`] |
//! | a thread that lives as long as something else | [`spawn`] |
//! | values made once for all who ask | a [`SingleFlight`] with a [`RoomPolicy`] |
//! | memory that is used again | a [`BufferPool`] |
//! | bytes that count until they are dropped | an [`Account`] |
//!
//! Every thread is counted by its use ([`running`]).
//!
//! The tests of this crate run on the primitives of `shuttle` instead of those of the standard library. It runs a model many times,
//! each time in another order of its threads, and finds a model that waits forever.

mod account;
mod buffers;
mod changes;
mod pool;
mod primitives;
mod shelf;
mod single_flight;
#[cfg(test)]
mod tests;
mod threads;

pub use account::{Account, Reservation};
pub use buffers::{Buffer, BufferLimit, BufferPool, RawMemory, Sizing};
pub use changes::{ChangeCount, Watch};
pub use pool::{BoxedJob, Pool, PoolOptions, PoolThreads, Queue};
pub use shelf::{Shelf, Weight};
pub use single_flight::{CacheInside, Demand, Event, Next, Request, RoomPolicy, SingleFlight, Situation, Verdict};
pub use threads::{Helpers, processors, running, spawn};
