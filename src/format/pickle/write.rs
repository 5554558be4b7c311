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

use std::{
    collections::HashMap,
    io::{self, Write},
};

use super::read::{Id, Object, PickleValue, Unpickled};

/// Most values within each other that are copied.
const DEPTH_MAX: usize = 100;

/// Writes one pickle.
pub struct Pickle<'a> {
    out: &'a mut dyn Write,
    memo: HashMap<String, u32>,
    /// The keys of storages that were copied.
    storages: Vec<String>,
}

macro_rules! opcodes {
    ($($name:ident $byte:literal $doc:literal;)*) => {
        $(
            #[doc = $doc]
            ///
            /// # Errors
            /// What the output fails with.
            pub fn $name(&mut self) -> io::Result<()> {
                self.out.write_all(&[$byte])
            }
        )*
    };
}

impl<'a> Pickle<'a> {
    /// Begins a pickle.
    ///
    /// # Errors
    /// What the output fails with.
    pub fn new(out: &'a mut dyn Write) -> io::Result<Self> {
        out.write_all(b"\x80\x02")?;
        Ok(Self { out, memo: HashMap::new(), storages: Vec::new() })
    }

    opcodes! {
        none b'N' "Pushes `None`.";
        yes 0x88 "Pushes `True`.";
        no 0x89 "Pushes `False`.";
        empty_tuple b')' "Pushes `()`.";
        empty_dict b'}' "Pushes `{}`.";
        empty_list b']' "Pushes `[]`.";
        mark b'(' "Marks the stack for [`Pickle::tuple`].";
        tuple b't' "Folds everything above the mark into a tuple.";
        call b'R' "Calls the second value from the top with the tuple on top.";
        new_object 0x81 "Makes an object of the class second from the top with the tuple on top, without `__init__`.";
        build b'b' "Gives the object second from the top the state on top.";
        set_item b's' "Puts key and value, on top, into the dictionary below.";
        append b'a' "Puts the value on top into the list below.";
        persistent b'Q' "Replaces the value on top by the object that it names to the reader.";
        stop b'.' "Ends the pickle: its value is on top.";
    }

    /// Gets a memoized value, or lets `push` push it and memoizes that.
    fn once(&mut self, key: &str, push: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        if let Some(slot) = self.memo.get(key) {
            let slot = *slot;
            return self.slot((b'h', b'j'), slot);
        }
        push(self)?;
        let slot = u32::try_from(self.memo.len()).expect("a pickle has a few dozen words");
        self.memo.insert(key.to_owned(), slot);
        self.slot((b'q', b'r'), slot)
    }

    fn slot(&mut self, (short, long): (u8, u8), slot: u32) -> io::Result<()> {
        if let Ok(slot) = u8::try_from(slot) {
            return self.out.write_all(&[short, slot]);
        }
        self.out.write_all(&[long])?;
        self.out.write_all(&slot.to_le_bytes())
    }

    /// Pushes the object `name` of the module `module`.
    ///
    /// # Errors
    /// What the output fails with.
    pub fn global(&mut self, module: &str, name: &str) -> io::Result<()> {
        // No word holds a line feed.
        let key = format!("{module}\n{name}");
        self.once(&key, |pickle| write!(pickle.out, "c{module}\n{name}\n"))
    }

    /// Pushes a string that occurs often and has no line feed.
    ///
    /// # Errors
    /// What the output fails with.
    pub fn word(&mut self, word: &str) -> io::Result<()> {
        self.once(word, |pickle| pickle.text(word))
    }

    /// Pushes a string.
    ///
    /// # Errors
    /// What the output fails with; a string of 4 GiB.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        let len = u32::try_from(text.len()).map_err(io::Error::other)?;
        self.out.write_all(b"X")?;
        self.out.write_all(&len.to_le_bytes())?;
        self.out.write_all(text.as_bytes())
    }

    /// Pushes a number.
    ///
    /// # Errors
    /// What the output fails with.
    pub fn int(&mut self, number: u64) -> io::Result<()> {
        let mut bytes = Vec::new();
        push_int(&mut bytes, number);
        self.out.write_all(&bytes)
    }

    /// Pushes a tuple of numbers.
    ///
    /// # Errors
    /// What the output fails with.
    pub(crate) fn ints(&mut self, numbers: &[u64]) -> io::Result<()> {
        self.mark()?;
        numbers.iter().try_for_each(|number| self.int(*number))?;
        self.tuple()
    }

    /// Pushes a value of a pickle that was read, with all that it refers to. Storages of torch are on the CPU in the copy.
    ///
    /// # Errors
    /// What the output fails with; a value that protocol 2 has no one way to write, or one within itself.
    pub(crate) fn copy(&mut self, from: &Unpickled, id: Id) -> io::Result<()> {
        self.copy_below(from, id, DEPTH_MAX)
    }

    /// The keys of the storages that copied values refer to, in order; a key may be there twice.
    pub(crate) fn storages(self) -> Vec<String> {
        self.storages
    }

    fn copy_below(&mut self, from: &Unpickled, id: Id, depth: usize) -> io::Result<()> {
        let depth = depth.checked_sub(1).ok_or_else(|| io::Error::other("values within each other without end"))?;
        let key = || format!("\n{}", id.number());
        match from.value(id) {
            PickleValue::None => self.none(),
            PickleValue::Bool(true) => self.yes(),
            PickleValue::Bool(false) => self.no(),
            PickleValue::Int(number) => {
                if let Ok(number) = u64::try_from(*number) {
                    return self.int(number);
                }
                self.out.write_all(&[0x8a, 16])?;
                self.out.write_all(&number.to_le_bytes())
            }
            PickleValue::Float(number) => {
                // The only number in this order of bytes.
                let mut bytes = number.to_le_bytes();
                bytes.reverse();
                self.out.write_all(b"G")?;
                self.out.write_all(&bytes)
            }
            PickleValue::Text(text) => self.text(text),
            PickleValue::Global(name) if name.name.contains('.') => Err(not_copied(&format_args!("the class {name}"))),
            PickleValue::Global(name) => self.global(&name.module, &name.name),
            PickleValue::Tuple(elements) => self.once(&key(), |pickle| {
                pickle.mark()?;
                elements.iter().try_for_each(|element| pickle.copy_below(from, *element, depth))?;
                pickle.tuple()
            }),
            PickleValue::List(elements) => self.once(&key(), |pickle| {
                pickle.empty_list()?;
                pickle.copy_into(from, elements, &[], depth)
            }),
            PickleValue::Dict(items) => self.once(&key(), |pickle| {
                pickle.empty_dict()?;
                pickle.copy_into(from, &[], items, depth)
            }),
            PickleValue::Object(object) => self.once(&key(), |pickle| {
                let Object { callee, args, is_new, state, elements, items } = &**object;
                pickle.copy_below(from, *callee, depth)?;
                pickle.copy_below(from, *args, depth)?;
                if *is_new {
                    pickle.new_object()?;
                } else {
                    pickle.call()?;
                }
                pickle.copy_into(from, elements, items, depth)?;
                state.map_or(Ok(()), |state| {
                    pickle.copy_below(from, state, depth)?;
                    pickle.build()
                })
            }),
            PickleValue::Persistent(of) => self.once(&key(), |pickle| {
                let [kind, class, number, _, count] = from.sequence(*of).unwrap_or_default() else {
                    return Err(not_copied(&"a persistent object that is no storage"));
                };
                pickle.storages.extend(from.text(*number).map(str::to_owned));
                pickle.mark()?;
                [kind, class, number].into_iter().try_for_each(|part| pickle.copy_below(from, *part, depth))?;
                pickle.word("cpu")?;
                pickle.copy_below(from, *count, depth)?;
                pickle.tuple()?;
                pickle.persistent()
            }),
            value @ (PickleValue::Bytes(_) | PickleValue::Set(_)) => Err(not_copied(&value.kind())),
        }
    }

    fn copy_into(&mut self, from: &Unpickled, elements: &[Id], items: &[(Id, Id)], depth: usize) -> io::Result<()> {
        for element in elements {
            self.copy_below(from, *element, depth)?;
            self.append()?;
        }
        for (key, value) in items {
            self.copy_below(from, *key, depth)?;
            self.copy_below(from, *value, depth)?;
            self.set_item()?;
        }
        Ok(())
    }
}

/// What a value is not copied with.
fn not_copied(what: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("{what} is not written anew"))
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

/// Appends the drop of the value on top.
pub(crate) fn push_pop(out: &mut Vec<u8>) {
    out.push(b'0');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_opcodes() {
        let mut bytes = Vec::new();
        let mut pickle = Pickle::new(&mut bytes).unwrap();
        pickle.ints(&[255, 256, 65536, 1 << 31]).unwrap();
        pickle.word("a").unwrap();
        pickle.word("a").unwrap();
        pickle.global("m", "f").unwrap();
        pickle.stop().unwrap();
        let expected = [
            b"\x80\x02(K\xff".as_slice(),
            b"M\x00\x01",
            b"J\x00\x00\x01\x00",
            b"\x8a\x09\x00\x00\x00\x80\x00\x00\x00\x00\x00t",
            b"X\x01\x00\x00\x00aq\x00h\x00",
            b"cm\nf\nq\x01.",
        ]
        .concat();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn many_words_get_long_slots() {
        let mut bytes = Vec::new();
        let mut pickle = Pickle::new(&mut bytes).unwrap();
        for word in 0..300 {
            pickle.word(&word.to_string()).unwrap();
        }
        pickle.word("299").unwrap();
        assert!(bytes.ends_with(b"r\x2b\x01\x00\x00j\x2b\x01\x00\x00"));
    }
}
