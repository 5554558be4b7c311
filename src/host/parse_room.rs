//! Memory for what parsers make of descriptions: pickles, JSON, headers, the nodes of a tree.
//!
//! A value that takes a byte or two in a file takes a hundred in memory, so that some megabytes of a file ask for gigabytes.
//! Each parser that builds a tree therefore counts what it makes, and all parsers of the process have one limit together: files
//! are read at the same time. What a description says of tensors is kept in tables, which are compact and are not counted.

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering},
};

use super::memory;

/// The part of the memory limit that parsers may use, and the least bytes: ordinary checkpoints are read on small machines too.
const LIMIT_PART: u64 = 4;
const LIMIT_BYTES_MIN: u64 = 128 << 20;

/// Text up to this length makes no tree that matters.
const TEXT_BYTES_MIN: usize = 64 << 10;

/// The memory that parsers share.
#[derive(Debug)]
pub struct ParseRoom {
    limit_bytes: u64,
    held_bytes: AtomicU64,
}

/// Bytes that a parser has counted, until this is dropped.
#[derive(Debug)]
pub struct HeldRoom {
    room: &'static ParseRoom,
    bytes: u64,
}

/// What is read would take too much memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its values take at least {found} bytes of memory, together with those of other files that are read now: expected at most \
     {limit}, the part of this process's memory that is for descriptions; if the file is what it should be, run ckfs with more \
     memory"
)]
pub struct ParseRoomFull {
    /// Bytes that are counted.
    pub found: u64,
    /// The limit.
    pub limit: u64,
}

impl ParseRoomFull {
    /// Whether a message tells of it, after whatever words: what was refused may be read later, when others are done.
    pub fn is_told_in(message: &str) -> bool {
        message.contains("together with those of other files that are read now")
    }
}

/// What a text of JSON becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonForm {
    /// A tree of all its values.
    Tree,
    /// Such a tree that is kept, as those of other checkpoints are: it counts four times.
    Kept,
    /// Rows of a type that knows what it wants.
    Rows,
}

impl JsonForm {
    /// Bytes of a value and of an object besides.
    const fn weights(self) -> (u64, u64) {
        match self {
            Self::Tree => (128, 512),
            Self::Kept => (512, 2048),
            Self::Rows => (48, 192),
        }
    }
}

impl ParseRoom {
    /// Room of this size.
    pub const fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, held_bytes: AtomicU64::new(0) }
    }

    /// The room of this process.
    pub fn of_process() -> &'static Self {
        static ROOM: LazyLock<ParseRoom> =
            LazyLock::new(|| ParseRoom::new((memory::limit().bytes / LIMIT_PART).max(LIMIT_BYTES_MIN)));
        &ROOM
    }

    /// Nothing, which may grow.
    pub const fn hold(&'static self) -> HeldRoom {
        HeldRoom { room: self, bytes: 0 }
    }

    /// Counts what a text of JSON becomes, before it is parsed.
    ///
    /// # Errors
    /// [`ParseRoomFull`].
    pub fn hold_json(&'static self, text: &[u8], form: JsonForm) -> Result<HeldRoom, ParseRoomFull> {
        let mut held = self.hold();
        if text.len() > TEXT_BYTES_MIN {
            held.grow(json_bytes(text, form))?;
        }
        Ok(held)
    }
}

impl HeldRoom {
    /// Counts more bytes.
    ///
    /// # Errors
    /// [`ParseRoomFull`]; these bytes are then not counted.
    pub fn grow(&mut self, bytes: u64) -> Result<(), ParseRoomFull> {
        let (limit, held) = (self.room.limit_bytes, &self.room.held_bytes);
        let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|held| ParseRoomFull { found: held.saturating_add(bytes), limit })?;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for HeldRoom {
    fn drop(&mut self) {
        self.room.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// About what a text of JSON takes in memory once it is parsed.
fn json_bytes(text: &[u8], form: JsonForm) -> u64 {
    let (mut values, mut objects) = (1, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b',' | b'[' => values += 1,
            b'{' => {
                values += 1;
                objects += 1;
            }
            _ => {}
        }
    }
    let (of_value, of_object) = form.weights();
    text.len() as u64 + values * of_value + objects * of_object
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn parsers_have_one_limit_together() {
        static ROOM: ParseRoom = ParseRoom::new(10 * MIB);
        let (mut one, mut other) = (ROOM.hold(), ROOM.hold());
        one.grow(6 * MIB).unwrap();
        other.grow(4 * MIB).unwrap();
        let full = ParseRoomFull { found: 10 * MIB + 1, limit: 10 * MIB };
        assert_eq!(one.grow(1), Err(full));
        assert!(ParseRoomFull::is_told_in(&format!("file: {full}")) && !ParseRoomFull::is_told_in("its values"));
        assert!(other.grow(u64::MAX).is_err());
        drop(one);
        other.grow(6 * MIB).unwrap();
        drop(other);
        assert_eq!(ROOM.held_bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn json_counts_by_its_values() {
        static ROOM: ParseRoom = ParseRoom::new(16 * MIB);
        let fits = |text: &str, form| ROOM.hold_json(text.as_bytes(), form).is_ok();
        for many in ["[],", "0,", "{\"\":0},", "\"\\\"\","] {
            assert!(!fits(&format!("[{}0]", many.repeat(1 << 18)), JsonForm::Tree), "{many}");
        }
        // One long string is one value, whatever it holds.
        assert!(fits(&format!("\"{}\"", "[{,\\\"".repeat(1 << 20)), JsonForm::Tree));
        let index = "\"model.layers.10000.mlp\":\"model-00001.safetensors\",".repeat(20_000);
        assert!(fits(&index, JsonForm::Tree) && fits(&index, JsonForm::Rows));
    }
}
