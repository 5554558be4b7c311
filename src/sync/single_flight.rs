//! A cache in which each value is made once: the first thread that asks for it makes it, and others wait for that one flight.
//!
//! How many bytes it may hold is for its [`RoomPolicy`], which gives a maker its room before it begins: so the bound also holds for what
//! is being made. Without room a caller waits for some, or is refused. No lock is held while a value is made or dropped.
//!
//! A waiter does not take every failure for its own. The time of a prefetch may have begun long before, and a panic was another's:
//! the waiter then tries once itself.

use std::{
    collections::HashMap,
    hash::Hash,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use super::{
    changes::{ChangeCount, Watch},
    primitives::{Condvar, Mutex, MutexGuard, lock, wait},
    shelf::{Shelf, Weight},
};

/// Time after which a thread that waits checks whether it should go on waiting.
const CHECK_PERIOD: Duration = Duration::from_millis(200);

/// Failures of others that a waiter does not take for its own. The next one is its own, or another reader's.
const TRIES_MAX: u32 = 2;

/// Why a value is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// A reader needs it.
    Reader,
    /// A reader may need it next.
    Prefetch,
}

/// What a caller without room finds when it asks for some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Situation {
    /// Waits for room in a row during which nothing changed.
    pub idle_waits: u32,
    /// Number of values that are being made.
    pub flights: usize,
}

/// What becomes of a caller that asks for room.
#[derive(Debug)]
pub enum Verdict<R, V> {
    /// It makes the value in this room. The values are dropped before, without the lock.
    Make(R, Vec<Arc<V>>),
    /// This is dropped without the lock, and room is requested again.
    Drop(Arc<V>),
    /// Others must first leave room.
    Wait,
    /// It gets none.
    Refuse,
}

/// Who gets room, and what is dropped for it.
pub trait RoomPolicy<K: Hash + Eq, V>: Send {
    /// What a caller tells of the value that it would make.
    type Ask;
    /// Room for a value that is being made.
    type Room;
    /// Why a value was not made.
    type Error: Clone;

    /// Room for a value that nobody makes.
    fn room(
        &mut self,
        shelf: &mut Shelf<K, V>,
        key: &K,
        ask: &Self::Ask,
        demand: Demand,
        situation: Situation,
    ) -> Verdict<Self::Room, V>;

    /// Values to drop after one was made.
    fn kept(&mut self, _shelf: &mut Shelf<K, V>) -> Vec<Arc<V>> {
        Vec::new()
    }

    /// A reader has a value, or makes it.
    fn asked(&mut self, _key: &K) {}

    /// Whether a waiter takes the failure of another reader for its own.
    fn is_shared(&self, _error: &Self::Error) -> bool {
        true
    }
}

/// What happened for a caller, to be counted.
#[derive(Debug)]
pub enum Event<'a, V> {
    /// The value is there.
    Found(&'a V),
    /// The caller waits for a flight.
    Waits,
    /// The caller makes the value.
    Makes,
    /// So many values were dropped.
    Dropped(usize),
}

/// What a caller wants, and how long.
pub struct Request<'a, V, E> {
    /// Why.
    pub demand: Demand,
    /// Called regularly during a wait; an error from it ends the wait.
    pub give_up: &'a dyn Fn() -> Option<E>,
    /// Called with what happens.
    pub event: &'a dyn Fn(Event<'_, V>),
}

/// What came of a flight.
enum Landing<V, E> {
    Made(Arc<V>),
    Failed(E),
    Panicked,
}

/// A value that is being made, and that others wait for.
struct Flight<V, E> {
    is_prefetch: bool,
    landing: Mutex<Option<Landing<V, E>>>,
    landed: Condvar,
}

type Flights<K, V, E> = HashMap<K, Arc<Flight<V, E>>>;

/// What is under the lock of a cache.
pub struct CacheInside<K: Hash + Eq, V, P: RoomPolicy<K, V>> {
    /// The values that are kept.
    pub shelf: Shelf<K, V>,
    /// Who gets room.
    pub policy: P,
    flights: Flights<K, V, P::Error>,
}

impl<K: Hash + Eq + Copy, V: Weight, P: RoomPolicy<K, V>> CacheInside<K, V, P> {
    /// Whether a value is there or being made.
    pub fn has(&self, key: &K) -> bool {
        self.shelf.peek(key).is_some() || self.flights.contains_key(key)
    }
}

/// See the module's documentation.
pub struct SingleFlight<K: Hash + Eq, V, P: RoomPolicy<K, V>> {
    inside: Mutex<CacheInside<K, V, P>>,
    /// Room that is left without the lock, and flights that end.
    changes: Arc<ChangeCount>,
}

/// Ends a flight even if its maker panics, so that no waiter waits forever.
struct Maker<'a, K: Hash + Eq, V, P: RoomPolicy<K, V>> {
    cache: &'a SingleFlight<K, V, P>,
    key: K,
    flight: Arc<Flight<V, P::Error>>,
    landing: Landing<V, P::Error>,
}

impl<K: Hash + Eq, V, P: RoomPolicy<K, V>> Drop for Maker<'_, K, V, P> {
    fn drop(&mut self) {
        lock(&self.cache.inside).flights.remove(&self.key);
        *lock(&self.flight.landing) = Some(std::mem::replace(&mut self.landing, Landing::Panicked));
        self.flight.landed.notify_all();
        self.cache.changes.note();
    }
}

/// A prefetch that the cache's user picks under the lock.
#[derive(Debug)]
pub enum Next<K, R, V> {
    /// This value is made, which is neither there nor being made.
    Make(K, R),
    /// This is dropped without the lock, and the next one asked for again.
    Drop(Arc<V>),
    /// None.
    None,
}

impl<K: Hash + Eq + Copy, V: Weight, P: RoomPolicy<K, V>> SingleFlight<K, V, P> {
    /// An empty cache. `changes` are those that leave room.
    pub fn new(policy: P, changes: Arc<ChangeCount>) -> Self {
        let inside = CacheInside { shelf: Shelf::default(), policy, flights: HashMap::new() };
        Self { inside: Mutex::new(inside), changes }
    }

    /// Calls `change` under the lock. What it takes off the shelf is better returned than dropped.
    pub fn with<R>(&self, change: impl FnOnce(&mut CacheInside<K, V, P>) -> R) -> R {
        change(&mut lock(&self.inside))
    }

    /// The value, if it is there, for a reader.
    pub fn find(&self, key: &K) -> Option<Arc<V>> {
        let mut inside = lock(&self.inside);
        let found = inside.shelf.find(key).map(Arc::clone)?;
        inside.policy.asked(key);
        Some(found)
    }

    /// The value: from the shelf, from a flight, or made now by `make`. None if it is not there and the policy refuses room, or if it
    /// is only a prefetch and another makes it.
    ///
    /// # Errors
    /// That of the maker, or of giving up.
    pub fn get(
        &self,
        key: K,
        ask: &P::Ask,
        request: &Request<'_, V, P::Error>,
        make: impl FnOnce(P::Room) -> Result<V, P::Error>,
    ) -> Option<Result<Arc<V>, P::Error>> {
        let is_prefetch = request.demand == Demand::Prefetch;
        let (mut tries, mut idle_waits, mut watch) = (0, 0, None::<Watch<'_>>);
        let mut inside = lock(&self.inside);
        let (room, dropped) = loop {
            if let Some(value) = inside.shelf.find(&key).map(Arc::clone) {
                if !is_prefetch {
                    inside.policy.asked(&key);
                }
                drop(inside);
                (request.event)(Event::Found(&value));
                return Some(Ok(value));
            }
            if let Some(flight) = inside.flights.get(&key).map(Arc::clone) {
                drop(inside);
                if is_prefetch {
                    return None;
                }
                (request.event)(Event::Waits);
                let landing = match flight.wait(request.give_up) {
                    Ok(landing) => landing,
                    Err(error) => return Some(Err(error)),
                };
                inside = lock(&self.inside);
                match landing {
                    Landing::Made(value) => {
                        inside.policy.asked(&key);
                        return Some(Ok(value));
                    }
                    Landing::Failed(error) if tries >= TRIES_MAX || !flight.is_prefetch => {
                        if inside.policy.is_shared(&error) {
                            return Some(Err(error));
                        }
                    }
                    Landing::Failed(_) | Landing::Panicked => tries += 1,
                }
                continue;
            }
            let situation = Situation { idle_waits, flights: inside.flights.len() };
            let CacheInside { shelf, policy, .. } = &mut *inside;
            match policy.room(shelf, &key, ask, request.demand, situation) {
                Verdict::Make(room, dropped) => break (room, dropped),
                Verdict::Refuse => return None,
                Verdict::Drop(value) => {
                    drop(inside);
                    drop(value);
                }
                Verdict::Wait => {
                    drop(inside);
                    match &mut watch {
                        // Room that was left before the watch began is found now.
                        None => watch = Some(self.changes.watch()),
                        Some(watch) => {
                            idle_waits = if watch.wait(CHECK_PERIOD) { 0 } else { idle_waits + 1 };
                            if let Some(error) = (request.give_up)() {
                                return Some(Err(error));
                            }
                        }
                    }
                }
            }
            inside = lock(&self.inside);
        };
        if !is_prefetch {
            inside.policy.asked(&key);
        }
        let mut maker = self.take_off(inside, key, is_prefetch);
        (request.event)(Event::Dropped(dropped.len()));
        // Their buffers are then free for this value.
        drop(dropped);
        (request.event)(Event::Makes);
        let made = make(room).map(Arc::new);
        let dropped = self.land(&mut maker, &made);
        drop(maker);
        (request.event)(Event::Dropped(dropped.len()));
        Some(made)
    }

    /// Makes the value that `next` picks, as a prefetch. None if it picks none; else its key, and whether it was made.
    pub fn prefetch(
        &self,
        mut next: impl FnMut(&mut CacheInside<K, V, P>) -> Next<K, P::Room, V>,
        make: impl FnOnce(K, P::Room) -> Result<V, P::Error>,
    ) -> Option<(K, bool)> {
        let mut inside = lock(&self.inside);
        let (key, room) = loop {
            match next(&mut inside) {
                Next::Make(key, room) => break (key, room),
                Next::None => return None,
                Next::Drop(value) => {
                    drop(inside);
                    drop(value);
                    inside = lock(&self.inside);
                }
            }
        };
        let mut maker = self.take_off(inside, key, true);
        let made = catch_unwind(AssertUnwindSafe(|| make(key, room).map(Arc::new)));
        let is_made = matches!(made, Ok(Ok(_)));
        if let Ok(made) = made {
            drop(self.land(&mut maker, &made));
        }
        drop(maker);
        Some((key, is_made))
    }

    /// Begins a flight.
    fn take_off(
        &self,
        mut inside: MutexGuard<'_, CacheInside<K, V, P>>,
        key: K,
        is_prefetch: bool,
    ) -> Maker<'_, K, V, P> {
        let flight = Arc::new(Flight { is_prefetch, landing: Mutex::new(None), landed: Condvar::new() });
        let before = inside.flights.insert(key, Arc::clone(&flight));
        debug_assert!(before.is_none(), "one flight for each key");
        Maker { cache: self, key, flight, landing: Landing::Panicked }
    }

    /// Keeps what was made. Returns what is dropped for it.
    fn land(&self, maker: &mut Maker<'_, K, V, P>, made: &Result<Arc<V>, P::Error>) -> Vec<Arc<V>> {
        match made {
            Err(error) => {
                maker.landing = Landing::Failed(error.clone());
                Vec::new()
            }
            Ok(value) => {
                maker.landing = Landing::Made(Arc::clone(value));
                let mut inside = lock(&self.inside);
                let CacheInside { shelf, policy, .. } = &mut *inside;
                let replaced = shelf.put(maker.key, Arc::clone(value));
                debug_assert!(replaced.is_none(), "a value that is kept is not made");
                policy.kept(shelf)
            }
        }
    }
}

impl<V, E: Clone> Flight<V, E> {
    /// Waits until the flight has landed. The error is that of giving up.
    fn wait(&self, give_up: &dyn Fn() -> Option<E>) -> Result<Landing<V, E>, E> {
        let mut landing = lock(&self.landing);
        loop {
            match &*landing {
                Some(Landing::Made(value)) => return Ok(Landing::Made(Arc::clone(value))),
                Some(Landing::Failed(error)) => return Ok(Landing::Failed(error.clone())),
                Some(Landing::Panicked) => return Ok(Landing::Panicked),
                None => {}
            }
            let (found, is_over) = wait(&self.landed, &self.landing, landing, CHECK_PERIOD);
            landing = found;
            if is_over
                && landing.is_none()
                && let Some(error) = give_up()
            {
                return Err(error);
            }
        }
    }
}
