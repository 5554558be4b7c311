//! A writer of Python pickles, protocol 2.
//!
//! The pickle machine has a stack: each call here pushes a value or folds the topmost ones into one. Globals and words given
//! to [`Pickle::word`] are memoized, so that they are written once.
//!
//! A pickle of very many rows is written in parts that do not depend on their place: its words are memoized first of all, and rows
//! are put together from parts with `push_int`, `push_wide_int` and `push_get`.
//!
//! Values of a pickle that was read are written anew with `Pickle::copy`, each once.
//!
//! Own code, because `serde-pickle` (1.2) writes plain values only: no global, no call and no persistent id, of which torch's
//! files consist.

use std::collections::HashMap;

use super::read::{Id, Object, PickleValue, Unpickled};

/// Most values within each other that are copied.
const DEPTH_MAX: usize = 100;

/// Writes one pickle to memory.
#[derive(Default)]
pub struct Pickle {
    out: Vec<u8>,
    memo: HashMap<String, u32>,
    /// The keys of storages that were copied.
    storages: Vec<String>,
}

impl Pickle {
    /// Begins a pickle.
    pub fn new() -> Self {
        Self { out: b"\x80\x02".to_vec(), ..Self::default() }
    }

    /// Ends the pickle, whose value is on top. Gives its bytes, and the keys of the storages that copied values refer to, in order; a key
    /// may be there twice.
    pub fn finish(mut self) -> (Vec<u8>, Vec<String>) {
        self.out.push(b'.');
        (self.out, self.storages)
    }

    /// Appends instructions that stand for themselves:
    ///
    /// | | |
    /// |---|---|
    /// | `N`, `\x88`, `\x89`, `)`, `}`, `]` | push `None`, `True`, `False`, `()`, `{}`, `[]` |
    /// | `(`, `t` | mark the stack; fold everything above the mark into a tuple |
    /// | `R` | call the second value from the top with the tuple on top |
    /// | `\x81` | make an object of the class second from the top with the tuple on top, without `__init__` |
    /// | `b` | give the object second from the top the state on top |
    /// | `s`, `a` | put key and value, or the value, on top into the container below |
    /// | `Q` | replace the value on top by the object that it names to the reader |
    pub fn ops(&mut self, opcodes: &[u8]) {
        self.out.extend(opcodes);
    }

    /// Gets a memoized value, if it is one.
    fn get(&mut self, key: &str) -> bool {
        let slot = self.memo.get(key).copied();
        slot.map(|slot| self.slot((b'h', b'j'), slot)).is_some()
    }

    /// Memoizes the value on top.
    fn put(&mut self, key: String) {
        let slot = u32::try_from(self.memo.len()).expect("a pickle has a few dozen words");
        self.memo.insert(key, slot);
        self.slot((b'q', b'r'), slot);
    }

    fn slot(&mut self, (short, long): (u8, u8), slot: u32) {
        if let Ok(slot) = u8::try_from(slot) {
            self.out.extend([short, slot]);
        } else {
            self.out.push(long);
            self.out.extend(slot.to_le_bytes());
        }
    }

    /// Pushes the object `name` of the module `module`.
    pub fn global(&mut self, module: &str, name: &str) {
        // No word holds a line feed.
        let key = format!("{module}\n{name}");
        if !self.get(&key) {
            self.out.extend(format!("c{key}\n").bytes());
            self.put(key);
        }
    }

    /// Pushes a string that occurs often and has no line feed.
    pub fn word(&mut self, word: &str) {
        if !self.get(word) {
            self.text(word);
            self.put(word.to_owned());
        }
    }

    /// Pushes a string.
    ///
    /// # Panics
    /// If it has 4 GiB.
    pub fn text(&mut self, text: &str) {
        push_text(&mut self.out, text);
    }

    /// Pushes a number.
    pub fn int(&mut self, number: u64) {
        push_int(&mut self.out, number);
    }

    /// Pushes a tuple of numbers.
    pub(crate) fn ints(&mut self, numbers: &[u64]) {
        push_ints(&mut self.out, numbers);
    }

    /// Pushes a value of a pickle that was read, with all that it refers to. Storages of torch are on the CPU in the copy.
    ///
    /// # Errors
    /// A text: a value that protocol 2 has no one way to write, or one within itself.
    pub(crate) fn copy(&mut self, from: &Unpickled, id: Id) -> Result<(), String> {
        self.copy_below(from, id, DEPTH_MAX)
    }

    fn copy_below(&mut self, from: &Unpickled, id: Id, depth: usize) -> Result<(), String> {
        let depth = depth.checked_sub(1).ok_or("values within each other without end")?;
        let key = format!("\n{}", id.number());
        if self.get(&key) {
            return Ok(());
        }
        match from.value(id) {
            PickleValue::None => self.ops(b"N"),
            PickleValue::Bool(true) => self.ops(b"\x88"),
            PickleValue::Bool(false) => self.ops(b"\x89"),
            PickleValue::Int(number) => {
                if let Ok(number) = u64::try_from(*number) {
                    self.int(number);
                } else {
                    self.ops(&[0x8a, 16]);
                    self.ops(&number.to_le_bytes());
                }
            }
            PickleValue::Float(number) => {
                // The only number in this order of bytes.
                self.ops(b"G");
                self.out.extend(number.to_le_bytes().iter().rev());
            }
            PickleValue::Text(text) => self.text(text),
            PickleValue::Global(name) if name.name.contains('.') => {
                return Err(not_copied(format_args!("the class {name}")));
            }
            PickleValue::Global(name) => self.global(&name.module, &name.name),
            PickleValue::Tuple(elements) => {
                self.ops(b"(");
                elements.iter().try_for_each(|element| self.copy_below(from, *element, depth))?;
                self.ops(b"t");
                self.put(key);
            }
            PickleValue::List(elements) => {
                self.ops(b"]");
                self.copy_into(from, elements, &[], depth)?;
                self.put(key);
            }
            PickleValue::Dict(items) => {
                self.ops(b"}");
                self.copy_into(from, &[], items, depth)?;
                self.put(key);
            }
            PickleValue::Object(object) => {
                let Object { callee, args, is_new, state, elements, items } = &**object;
                self.copy_below(from, *callee, depth)?;
                self.copy_below(from, *args, depth)?;
                self.ops(if *is_new { b"\x81" } else { b"R" });
                self.copy_into(from, elements, items, depth)?;
                if let Some(state) = state {
                    self.copy_below(from, *state, depth)?;
                    self.ops(b"b");
                }
                self.put(key);
            }
            PickleValue::Persistent(of) => {
                let [kind, class, number, _, count] = from.sequence(*of).unwrap_or_default() else {
                    return Err(not_copied("a persistent object that is no storage"));
                };
                self.storages.extend(from.text(*number).map(str::to_owned));
                self.ops(b"(");
                [kind, class, number].into_iter().try_for_each(|part| self.copy_below(from, *part, depth))?;
                self.word("cpu");
                self.copy_below(from, *count, depth)?;
                self.ops(b"tQ");
                self.put(key);
            }
            value @ (PickleValue::Bytes(_) | PickleValue::Set(_)) => return Err(not_copied(value.kind())),
        }
        Ok(())
    }

    fn copy_into(&mut self, from: &Unpickled, elements: &[Id], items: &[(Id, Id)], depth: usize) -> Result<(), String> {
        for element in elements {
            self.copy_below(from, *element, depth)?;
            self.ops(b"a");
        }
        for (key, value) in items {
            self.copy_below(from, *key, depth)?;
            self.copy_below(from, *value, depth)?;
            self.ops(b"s");
        }
        Ok(())
    }
}

/// What a value is not copied with.
fn not_copied(what: impl std::fmt::Display) -> String {
    format!("{what} is not written anew")
}

/// Appends the push of a number, in as few bytes as it takes.
pub(crate) fn push_int(out: &mut Vec<u8>, number: u64) {
    if let Ok(number) = u8::try_from(number) {
        out.extend([b'K', number]);
    } else if let Ok(number) = u16::try_from(number) {
        out.push(b'M');
        out.extend(number.to_le_bytes());
    } else if let Ok(number) = i32::try_from(number) {
        out.push(b'J');
        out.extend(number.to_le_bytes());
    } else {
        push_wide_int(out, number);
    }
}

/// Appends the push of a number in 11 bytes, whatever it is.
pub(crate) fn push_wide_int(out: &mut Vec<u8>, number: u64) {
    // A signed number of 9 bytes, so that the topmost bit is never a sign.
    out.extend([0x8a, 9]);
    out.extend(number.to_le_bytes());
    out.push(0);
}

/// Appends the push of a tuple of numbers.
pub(crate) fn push_ints(out: &mut Vec<u8>, numbers: &[u64]) {
    out.push(b'(');
    for number in numbers {
        push_int(out, *number);
    }
    out.push(b't');
}

/// Appends the push of a string.
///
/// # Panics
/// If it has 4 GiB.
pub(crate) fn push_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend(u32::try_from(text.len()).expect("names have less than 4 GiB").to_le_bytes());
    out.extend(text.as_bytes());
}

/// Appends the memoization of the value on top, in 5 bytes whatever the slot.
pub(crate) fn push_put(out: &mut Vec<u8>, slot: u32) {
    out.push(b'r');
    out.extend(slot.to_le_bytes());
}

/// Appends the push of a memoized value, in 5 bytes whatever the slot.
pub(crate) fn push_get(out: &mut Vec<u8>, slot: u32) {
    out.push(b'j');
    out.extend(slot.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_opcodes() {
        let mut pickle = Pickle::new();
        pickle.ints(&[255, 256, 65536, 1 << 31]);
        pickle.word("a");
        pickle.word("a");
        pickle.global("m", "f");
        let expected = [
            b"\x80\x02(K\xff".as_slice(),
            b"M\x00\x01",
            b"J\x00\x00\x01\x00",
            b"\x8a\x09\x00\x00\x00\x80\x00\x00\x00\x00\x00t",
            b"X\x01\x00\x00\x00aq\x00h\x00",
            b"cm\nf\nq\x01.",
        ]
        .concat();
        assert_eq!(pickle.finish().0, expected);
    }

    #[test]
    fn many_words_get_long_slots() {
        let mut pickle = Pickle::new();
        for word in 0..300 {
            pickle.word(&word.to_string());
        }
        pickle.word("299");
        assert!(pickle.finish().0.ends_with(b"r\x2b\x01\x00\x00j\x2b\x01\x00\x00."));
    }
}
