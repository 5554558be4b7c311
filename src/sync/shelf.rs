//! The values that a cache keeps, and how long ago each was used.

use std::{
    collections::VecDeque,
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use lru::LruCache;

/// A value of a cache.
pub trait Weight {
    /// Bytes that it occupies.
    fn weight_bytes(&self) -> usize;
}

#[derive(Debug)]
struct Kept<V> {
    value: Arc<V>,
    used: Instant,
}

/// Values by key, in the order of their last use.
#[derive(Debug)]
pub struct Shelf<K: Hash + Eq, V> {
    kept: LruCache<K, Kept<V>>,
    bytes: usize,
    /// Values whose bytes were all read, the first ones first.
    consumed: VecDeque<K>,
}

impl<K: Hash + Eq, V> Default for Shelf<K, V> {
    fn default() -> Self {
        // The limit is in bytes; the map's own limit must never bind.
        Self { kept: LruCache::unbounded(), bytes: 0, consumed: VecDeque::new() }
    }
}

impl<K: Copy + Hash + Eq, V: Weight> Shelf<K, V> {
    /// A value, used now.
    pub fn find(&mut self, key: &K) -> Option<&Arc<V>> {
        let kept = self.kept.get_mut(key)?;
        kept.used = Instant::now();
        Some(&kept.value)
    }

    /// Keeps a value, used now. Returns the one that it replaces.
    pub fn put(&mut self, key: K, value: Arc<V>) -> Option<Arc<V>> {
        self.bytes += value.weight_bytes();
        let before = self.kept.put(key, Kept { value, used: Instant::now() })?.value;
        self.bytes -= before.weight_bytes();
        Some(before)
    }

    /// A value, not used by that.
    pub fn peek(&self, key: &K) -> Option<&V> {
        self.kept.peek(key).map(|kept| &*kept.value)
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Bytes of the values used within this time.
    pub fn bytes_used_within(&self, time: Duration) -> usize {
        let recent = self.kept.iter().take_while(|(_, kept)| kept.used.elapsed() < time);
        recent.map(|(_, kept)| kept.value.weight_bytes()).sum()
    }

    /// Takes a value away.
    pub fn remove(&mut self, key: &K) -> Option<Arc<V>> {
        let value = self.kept.pop(key)?.value;
        self.bytes -= value.weight_bytes();
        Some(value)
    }

    /// Takes the values away whose keys are such.
    pub fn remove_where(&mut self, is_such: impl Fn(&K) -> bool) -> Vec<Arc<V>> {
        let keys: Vec<K> = self.kept.iter().map(|(key, _)| *key).filter(is_such).collect();
        keys.iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Takes the least recently used value away.
    pub fn pop_lru(&mut self) -> Option<(K, Arc<V>)> {
        let (key, kept) = self.kept.pop_lru()?;
        self.bytes -= kept.value.weight_bytes();
        Some((key, kept.value))
    }

    /// Takes the least recently used values away until no more than `bytes` are left.
    pub fn pop_until(&mut self, bytes: usize) -> Vec<Arc<V>> {
        let mut popped = Vec::new();
        while self.bytes > bytes
            && let Some((_, value)) = self.pop_lru()
        {
            popped.push(value);
        }
        popped
    }

    /// Takes the values away that were not used for this time.
    pub fn pop_unused_for(&mut self, time: Duration) -> Vec<Arc<V>> {
        let mut popped = Vec::new();
        while self.kept.peek_lru().is_some_and(|(_, kept)| kept.used.elapsed() > time)
            && let Some((_, value)) = self.pop_lru()
        {
            popped.push(value);
        }
        popped
    }

    /// Notes that all bytes of a value were read: it is likely not needed again.
    pub fn note_consumed(&mut self, key: K) {
        self.consumed.push_back(key);
    }

    /// Takes a value away whose bytes were all read, and that no reader uses now.
    pub fn pop_consumed(&mut self) -> Option<Arc<V>> {
        while let Some(key) = self.consumed.pop_front() {
            if self.kept.peek(&key).is_some_and(|kept| Arc::strong_count(&kept.value) == 1) {
                return self.remove(&key);
            }
        }
        None
    }

    /// For tests: makes the last use of a value that much earlier.
    #[doc(hidden)]
    pub fn age(&mut self, key: &K, time: Duration) {
        if let Some(kept) = self.kept.peek_mut(key) {
            kept.used -= time;
        }
    }
}
