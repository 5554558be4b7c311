//! The threads of a way in that take and handle requests.

/// The threads that take and handle requests, as the watchdog sees them.
pub trait Handlers: Send + Sync + 'static {
    /// Makes sure that a thread takes requests although others wait for storage, which `is_waiting` tells. Whether there were requests
    /// since the last call.
    fn tend(&self, is_waiting: &dyn Fn() -> bool) -> bool;

    /// Notes that a request was given up while a thread handles it that stands in for others: yet another may stand in for that one.
    fn mark_stuck(&self);

    /// Notes that such a thread is back.
    fn unmark_stuck(&self);
}
