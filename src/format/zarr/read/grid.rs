//! The grid of chunks and their names.

use std::fmt::Write as _;

use ckfs_tensor::PerAxis;

use super::{super::write::parse_numbers, keys::Keys, metadata::Array};

impl Array {
    /// Number of chunks along each axis.
    pub fn grid(&self) -> PerAxis {
        self.shape.extents().iter().zip(&self.chunk).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect()
    }

    /// Name of the chunk with these numbers, below the array's own name and a `/`.
    pub fn key(&self, numbers: &[u64]) -> String {
        let Keys { separator, has_head } = self.keys;
        let mut key = String::from(if has_head { "c" } else { "" });
        for number in numbers {
            if !key.is_empty() {
                key.push(separator);
            }
            // Writing to a string cannot fail.
            let _ = write!(key, "{number}");
        }
        if key.is_empty() { "0".to_owned() } else { key }
    }

    /// The numbers of the chunk of this name; `None` for any other spelling and for a chunk outside the grid.
    pub fn numbers(&self, key: &str) -> Option<PerAxis> {
        let rank = self.shape.rank();
        if rank == 0 {
            return (key == self.key(&[])).then(PerAxis::new);
        }
        let Keys { separator, has_head } = self.keys;
        let words = if has_head { key.strip_prefix('c')?.strip_prefix(separator)? } else { key };
        let numbers = parse_numbers(words, separator)?;
        let is_inside = numbers.len() == rank && numbers.iter().zip(&self.grid()).all(|(number, count)| number < count);
        is_inside.then_some(numbers)
    }
}
