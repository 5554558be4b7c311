//! Values that are numbered in the order in which their keys were seen first.

use std::hash::Hash;

use hashbrown::DefaultHashBuilder;
use indexmap::{IndexMap, IndexSet};

/// Values by key and by number.
pub(crate) type Numbered<K, V> = IndexMap<K, V, DefaultHashBuilder>;

/// Keys by number.
pub(crate) type NumberedSet<K> = IndexSet<K, DefaultHashBuilder>;

/// The number of a key. One that is new is added with its value.
pub(crate) fn number_of<K: Eq + Hash, V>(known: &mut Numbered<K, V>, key: K, new: impl FnOnce(&K) -> V) -> u32 {
    let entry = known.entry(key);
    let number = u32::try_from(entry.index()).expect("there are fewer tensors and devices than 2^32");
    entry.or_insert_with_key(new);
    number
}
