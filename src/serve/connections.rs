//! The open connections: bounded, and the one that was idle longest makes room for a new one.

use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What the server knows of a connection.
#[derive(Debug)]
struct ConnectionState {
    /// Requests that are being answered.
    busy: usize,
    close: Arc<Notify>,
}

#[derive(Debug)]
struct ConnectionTable {
    open: LruCache<u64, ConnectionState>,
    next_number: u64,
}

/// The open connections.
#[derive(Debug)]
pub(super) struct Connections {
    table: Mutex<ConnectionTable>,
    max: usize,
}

/// A place among them. Given back when it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionPlace {
    connections: Arc<Connections>,
    number: u64,
    /// Notified when another connection needs this place.
    pub(super) close: Arc<Notify>,
}

/// A request that is being answered, until it is dropped.
#[derive(Debug)]
pub(super) struct BusyMark {
    connections: Arc<Connections>,
    number: u64,
}

impl Connections {
    /// Room for `max` connections.
    pub(super) fn new(max: usize) -> Self {
        let table = ConnectionTable { open: LruCache::unbounded(), next_number: 0 };
        Self { table: Mutex::new(table), max }
    }

    /// A place for a new connection. If all are taken, the one that was idle longest is closed; `None` if none is idle.
    pub(super) fn enter(self: &Arc<Self>) -> Option<ConnectionPlace> {
        let mut table = self.table.lock();
        if table.open.len() >= self.max {
            let (oldest, _) = table.open.iter().rev().find(|(_, state)| state.busy == 0)?;
            let oldest = *oldest;
            // Its task ends soon. Its place is free at once, so that a flood cannot be faster than the tasks end.
            if let Some(state) = table.open.pop(&oldest) {
                state.close.notify_one();
            }
        }
        table.next_number += 1;
        let (number, close) = (table.next_number, Arc::<Notify>::default());
        let state = ConnectionState { busy: 0, close: Arc::clone(&close) };
        table.open.put(number, state);
        drop(table);
        Some(ConnectionPlace { connections: Arc::clone(self), number, close })
    }

    /// Number of open connections.
    pub(super) fn len(&self) -> usize {
        self.table.lock().open.len()
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut ConnectionState)) {
        if let Some(state) = self.table.lock().open.get_mut(&number) {
            change(state);
        }
    }
}

impl ConnectionPlace {
    /// Notes that a request is being answered.
    pub(super) fn busy(&self) -> BusyMark {
        self.connections.change(self.number, |state| state.busy += 1);
        BusyMark { connections: Arc::clone(&self.connections), number: self.number }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.connections.table.lock().open.pop(&self.number);
    }
}

impl Drop for BusyMark {
    fn drop(&mut self) {
        self.connections.change(self.number, |state| state.busy -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_that_was_idle_longest_makes_room() {
        let connections = Arc::new(Connections::new(2));
        let first = connections.enter().unwrap();
        let second = connections.enter().unwrap();
        // The first was used after the second began.
        drop(first.busy());
        let third = connections.enter().unwrap();
        assert_eq!(connections.len(), 2);
        let numbers = || connections.table.lock().open.iter().map(|(number, _)| *number).rev().collect::<Vec<_>>();
        assert_eq!(numbers(), [first.number, third.number]);
        let marks = [first.busy(), third.busy()];
        assert!(connections.enter().is_none(), "all are in use");
        drop(second);
        assert_eq!(connections.len(), 2, "its place was given away before");
        drop(marks);
        drop(first);
        assert_eq!(numbers(), [third.number]);
    }
}
