//! The machine that carries out the instructions of a pickle.

use std::collections::HashMap;

use ckfs_host::parse_room::{HeldRoom, ParseRoom};

use super::value::{Id, Name, Object, PickleValue, Unpickled};
use crate::FormatError;

/// Bounds on what one pickle may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most values.
    pub values_max: u32,
    /// Most bytes of text and byte strings together.
    pub text_bytes_max: u64,
    /// What values and all that refers to them count against, while the pickle is there.
    pub room: &'static ParseRoom,
}

impl Default for Limits {
    fn default() -> Self {
        Self { values_max: 64 << 20, text_bytes_max: 1 << 30, room: ParseRoom::of_process() }
    }
}

/// Reads the pickle that `bytes` begin with. `allowed` is the closed list: it is asked for each class and function that the
/// pickle names, with module and name.
///
/// # Errors
/// [`FormatError`], the first that is met.
pub fn read(bytes: &[u8], limits: Limits, allowed: &dyn Fn(&str, &str) -> bool) -> Result<Unpickled, FormatError> {
    Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        limits,
        allowed,
        values: Vec::new(),
        text_bytes: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        held: limits.room.hold(),
        uncounted_bytes: 0,
        stack_max: 0,
    }
    .run()
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the present instruction begins.
    opcode_at: usize,
    limits: Limits,
    allowed: &'a dyn Fn(&str, &str) -> bool,
    values: Vec<PickleValue>,
    text_bytes: u64,
    stack: Vec<Id>,
    /// Lengths of the stack where marks were set.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    held: HeldRoom,
    /// Bytes to be counted next.
    uncounted_bytes: usize,
    /// The longest that the stack and the marks were.
    stack_max: usize,
}

/// Bytes that are counted at a time.
const COUNTED_BYTES: usize = 256 << 10;
/// Bytes of an entry of the memo, which is at least half full.
const MEMO_ENTRY_BYTES: usize = 24;

/// Newest protocol that is read.
const PROTOCOL_MAX: u8 = 5;

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Unpickled, FormatError> {
        loop {
            self.opcode_at = self.at;
            let opcode = self.byte()?;
            if opcode == b'.' {
                let root = self.pop()?;
                return Ok(Unpickled { values: self.values, root, _held: self.held });
            }
            self.step(opcode)?;
        }
    }

    /// Carries out one instruction. Their names are those of Python's `pickletools`.
    fn step(&mut self, opcode: u8) -> Result<(), FormatError> {
        let value = match opcode {
            b'N' => PickleValue::None,                                          // NONE
            0x88 => PickleValue::Bool(true),                                    // NEWTRUE
            0x89 => PickleValue::Bool(false),                                   // NEWFALSE
            b'J' => PickleValue::Int(i32::from_le_bytes(self.array()?).into()), // BININT
            b'K' => PickleValue::Int(self.byte()?.into()),                      // BININT1
            b'M' => PickleValue::Int(u16::from_le_bytes(self.array()?).into()), // BININT2
            0x8a => self.short().and_then(|len| self.long(len))?,               // LONG1
            0x8b => self.len32().and_then(|len| self.long(len))?,               // LONG4
            // BINFLOAT: the only number in this order of bytes.
            b'G' => PickleValue::Float(f64::from_bits(u64::from_le_bytes(self.array()?).swap_bytes())),
            b'U' | 0x8c => self.short().and_then(|len| self.text(len))?, // SHORT_BINSTRING, SHORT_BINUNICODE
            b'T' | b'X' => self.len32().and_then(|len| self.text(len))?, // BINSTRING, BINUNICODE
            0x8d => self.len64().and_then(|len| self.text(len))?,        // BINUNICODE8
            b'C' => PickleValue::Bytes(self.short().and_then(|len| self.raw(len))?.into()), // SHORT_BINBYTES
            b'B' => PickleValue::Bytes(self.len32().and_then(|len| self.raw(len))?.into()), // BINBYTES
            0x8e | 0x96 => PickleValue::Bytes(self.len64().and_then(|len| self.raw(len))?.into()), // BINBYTES8, BYTEARRAY8
            b')' => PickleValue::Tuple(Box::default()),                                            // EMPTY_TUPLE
            // TUPLE1 to TUPLE3
            0x85..=0x87 => {
                let mut elements = (0x85..=opcode).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
                elements.reverse();
                PickleValue::Tuple(elements.into())
            }
            b't' => PickleValue::Tuple(self.above_mark()?.into()), // TUPLE
            b']' => PickleValue::List(Vec::new()),                 // EMPTY_LIST
            b'l' => PickleValue::List(self.above_mark()?),         // LIST
            b'}' => PickleValue::Dict(Vec::new()),                 // EMPTY_DICT
            // DICT
            b'd' => {
                let flat = self.above_mark()?;
                PickleValue::Dict(self.pairs(&flat)?)
            }
            0x8f => PickleValue::Set(Vec::new()),         // EMPTY_SET
            0x91 => PickleValue::Set(self.above_mark()?), // FROZENSET
            b'Q' => PickleValue::Persistent(self.pop()?), // BINPERSID
            _ => return self.act(opcode),
        };
        self.push(value)
    }

    /// Carries out an instruction that does more, or less, than to push a value.
    fn act(&mut self, opcode: u8) -> Result<(), FormatError> {
        match opcode {
            // PROTO
            0x80 => match self.byte()? {
                found if found > PROTOCOL_MAX => {
                    Err(FormatError(format!("pickle: protocol {found}: expected at most {PROTOCOL_MAX}")))
                }
                _ => Ok(()),
            },
            // FRAME: the length of what follows, of use to readers of streams only.
            0x95 => self.take(8).map(drop),
            // MARK
            b'(' => {
                self.marks.push(self.stack.len());
                self.count_stack()?;
                self.bounded(self.marks.len() as u64, u64::from(self.limits.values_max), "marks")
            }
            // POP
            b'0' => match self.marks.last() {
                // A mark counts as the topmost value.
                Some(mark) if *mark == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                Some(_) | None => self.pop().map(drop),
            },
            b'1' => self.above_mark().map(drop),                  // POP_MARK
            b'2' => self.top().and_then(|top| self.push_id(top)), // DUP
            b'q' => self.byte().and_then(|number| self.put(number.into())), // BINPUT
            b'r' => self.u32().and_then(|number| self.put(number)), // LONG_BINPUT
            // MEMOIZE: Python numbers by how many there are.
            0x94 => {
                let number = u32::try_from(self.memo.len());
                self.put(number.map_err(|_| self.limit("stored values", u64::from(u32::MAX)))?)
            }
            b'h' => self.byte().and_then(|number| self.get(number.into())), // BINGET
            b'j' => self.u32().and_then(|number| self.get(number)),         // LONG_BINGET
            b'a' => self.pop().and_then(|one| self.extend(vec![one], false)), // APPEND
            b'e' => self.above_mark().and_then(|added| self.extend(added, false)), // APPENDS
            0x90 => self.above_mark().and_then(|added| self.extend(added, true)), // ADDITEMS
            // SETITEM
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])
            }
            b'u' => self.above_mark().and_then(|flat| self.set(&flat)), // SETITEMS
            // GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module.to_owned(), name.to_owned())
            }
            // STACK_GLOBAL
            0x93 => {
                let (name, module) = (self.pop_text()?, self.pop_text()?);
                self.global(module, name)
            }
            b'R' => self.call(false), // REDUCE
            0x81 => self.call(true),  // NEWOBJ
            // BUILD
            b'b' => {
                let state = self.pop()?;
                let target = self.container()?;
                let PickleValue::Object(object) = target else {
                    let found = target.kind();
                    return Err(self.operand("an object below its state", found));
                };
                object.state = Some(state);
                Ok(())
            }
            _ => Err(self.refused(format_args!("instruction {opcode:#04x} is not supported"))),
        }
    }

    fn get(&mut self, number: u32) -> Result<(), FormatError> {
        let missing = || self.refused(format_args!("nothing was stored under number {number}"));
        self.push_id(self.memo.get(&number).copied().ok_or_else(missing)?)
    }

    fn put(&mut self, number: u32) -> Result<(), FormatError> {
        let top = self.top()?;
        self.memo.insert(number, top);
        self.count(MEMO_ENTRY_BYTES)?;
        self.bounded(self.memo.len() as u64, u64::from(self.limits.values_max), "stored values")
    }

    /// An integer of `len` bytes.
    fn long(&mut self, len: usize) -> Result<PickleValue, FormatError> {
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|top| top & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        let long = || self.refused(format_args!("an integer of {len} bytes: expected at most 16"));
        wide.get_mut(..len).ok_or_else(long)?.copy_from_slice(bytes);
        Ok(PickleValue::Int(i128::from_le_bytes(wide)))
    }

    fn text(&mut self, len: usize) -> Result<PickleValue, FormatError> {
        let bytes = self.raw(len)?;
        Ok(PickleValue::Text(std::str::from_utf8(bytes).map_err(|_| self.not_utf8())?.into()))
    }

    /// Bytes of a text or a byte string.
    fn raw(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        let bytes = self.take(len)?;
        self.text_bytes += len as u64;
        self.bounded(self.text_bytes, self.limits.text_bytes_max, "bytes of text")?;
        Ok(bytes)
    }

    /// The topmost value, which is changed.
    fn container(&mut self) -> Result<&mut PickleValue, FormatError> {
        let top = self.top()?;
        Ok(&mut self.values[top.0 as usize])
    }

    /// Puts elements into the list, or the set, on top.
    fn extend(&mut self, added: Vec<Id>, is_set: bool) -> Result<(), FormatError> {
        self.count(added.len() * size_of::<Id>() * 2)?;
        match (self.container()?, is_set) {
            (PickleValue::List(elements), false) | (PickleValue::Set(elements), true) => elements.extend(added),
            (PickleValue::Object(object), _) => object.elements.extend(added),
            (other, _) => {
                let found = other.kind();
                return Err(self.operand("a list or set below the elements", found));
            }
        }
        Ok(())
    }

    /// Puts keys and values, which take turns, into the dictionary on top.
    fn set(&mut self, flat: &[Id]) -> Result<(), FormatError> {
        self.count(size_of_val(flat) * 2)?;
        let pairs = self.pairs(flat)?;
        let target = self.container()?;
        if let PickleValue::Dict(items) = target {
            items.extend(pairs);
        } else if let PickleValue::Object(object) = target {
            object.items.extend(pairs);
        } else {
            let found = target.kind();
            return Err(self.operand("a dict below the items", found));
        }
        Ok(())
    }

    /// Notes what would be called with which arguments.
    fn call(&mut self, is_new: bool) -> Result<(), FormatError> {
        let (args, callee) = (self.pop()?, self.pop()?);
        // One value may stand in both places, by DUP or by its number.
        let found = &self.values[callee.0 as usize];
        if !matches!(found, PickleValue::Global(_)) {
            return Err(self.operand("a class or function to call", found.kind()));
        }
        let found = &self.values[args.0 as usize];
        if !matches!(found, PickleValue::Tuple(_)) {
            return Err(self.operand("a tuple of arguments", found.kind()));
        }
        if let Some(nested) = self.nested_class(callee, args) {
            return self.global(nested.module, nested.name);
        }
        let object = Object { callee, args, is_new, state: None, elements: Vec::new(), items: Vec::new() };
        self.push(PickleValue::Object(Box::new(object)))
    }

    /// The class that `getattr(class, "name")` names: protocols before 4 have no other way to name a class within a class. Where the
    /// list has `getattr`, the nested class must be on it besides.
    fn nested_class(&self, callee: Id, args: Id) -> Option<Name> {
        let PickleValue::Global(function) = &self.values[callee.0 as usize] else { return None };
        let is_getattr = function.name == "getattr" && matches!(function.module.as_str(), "__builtin__" | "builtins");
        let PickleValue::Tuple(args) = &self.values[args.0 as usize] else { return None };
        let [class, attribute] = args[..] else { return None };
        let (PickleValue::Global(class), PickleValue::Text(attribute)) =
            (&self.values[class.0 as usize], &self.values[attribute.0 as usize])
        else {
            return None;
        };
        is_getattr.then(|| Name { module: class.module.clone(), name: format!("{}.{attribute}", class.name) })
    }

    fn global(&mut self, module: String, name: String) -> Result<(), FormatError> {
        let name = Name { module, name };
        if !(self.allowed)(&name.module, &name.name) {
            let problem = format_args!("{name} is not on the list of what a checkpoint may hold; nothing was run");
            return Err(self.refused(problem));
        }
        self.text_bytes += (name.module.len() + name.name.len()) as u64;
        self.bounded(self.text_bytes, self.limits.text_bytes_max, "bytes of text")?;
        self.push(PickleValue::Global(name))
    }

    fn pairs(&self, flat: &[Id]) -> Result<Vec<(Id, Id)>, FormatError> {
        let (pairs, rest) = flat.as_chunks::<2>();
        if rest.is_empty() {
            Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
        } else {
            Err(self.operand("as many values as keys", "an odd number of both"))
        }
    }

    fn push(&mut self, value: PickleValue) -> Result<(), FormatError> {
        let limit = || self.limit("values", u64::from(self.limits.values_max));
        let id = u32::try_from(self.values.len()).ok().filter(|id| *id < self.limits.values_max).ok_or_else(limit)?;
        self.count(size_of::<PickleValue>() + value.owned_bytes())?;
        self.values.push(value);
        self.push_id(Id(id))
    }

    /// The stack holds references, of which one value may have many.
    fn push_id(&mut self, id: Id) -> Result<(), FormatError> {
        self.stack.push(id);
        self.count_stack()?;
        self.bounded(self.stack.len() as u64, u64::from(self.limits.values_max), "values on the stack")
    }

    /// Counts bytes that the pickle takes in memory.
    fn count(&mut self, bytes: usize) -> Result<(), FormatError> {
        self.uncounted_bytes += bytes;
        if self.uncounted_bytes < COUNTED_BYTES {
            return Ok(());
        }
        let counted = self.held.grow(std::mem::take(&mut self.uncounted_bytes) as u64);
        counted.map_err(|full| self.refused(full))
    }

    fn count_stack(&mut self) -> Result<(), FormatError> {
        let len = self.stack.len() + self.marks.len();
        if len <= self.stack_max {
            return Ok(());
        }
        self.stack_max = len;
        self.count(size_of::<usize>())
    }

    /// The topmost value above the last mark.
    fn top(&self) -> Result<Id, FormatError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let found = if self.marks.is_empty() { "an empty stack" } else { "a mark" };
        let missing = || self.operand("a value on the stack", found);
        self.stack.get(floor..).and_then(|above| above.last().copied()).ok_or_else(missing)
    }

    fn pop(&mut self) -> Result<Id, FormatError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_text(&mut self) -> Result<String, FormatError> {
        let id = self.pop()?;
        let value = &self.values[id.0 as usize];
        let PickleValue::Text(text) = value else {
            return Err(self.operand("a str", value.kind()));
        };
        Ok(text.to_string())
    }

    /// Takes what lies above the last mark, and the mark.
    fn above_mark(&mut self) -> Result<Vec<Id>, FormatError> {
        let mark = self.marks.pop().ok_or_else(|| self.operand("a mark", "none"))?;
        Ok(self.stack.split_off(mark))
    }

    fn byte(&mut self) -> Result<u8, FormatError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn short(&mut self) -> Result<usize, FormatError> {
        self.byte().map(usize::from)
    }

    fn len64(&mut self) -> Result<usize, FormatError> {
        let len = u64::from_le_bytes(self.array()?);
        usize::try_from(len).map_err(|_| self.truncated())
    }

    fn len32(&mut self) -> Result<usize, FormatError> {
        // Of 32 bits, so that it fits memory.
        usize::try_from(self.u32()?).map_err(|_| self.truncated())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let rest = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<N>);
        let bytes = *rest.ok_or_else(|| self.truncated())?;
        self.at += N;
        Ok(bytes)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        let end = self.at.checked_add(len);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.truncated())?;
        self.at += len;
        Ok(taken)
    }

    /// Text up to the end of its line.
    fn line(&mut self) -> Result<&'a str, FormatError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or_else(|| self.truncated())?;
        let line = self.take(len)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| self.not_utf8())
    }

    fn limit(&self, what: &'static str, limit: u64) -> FormatError {
        self.refused(format_args!("more than {limit} {what}"))
    }

    /// That the present instruction cannot be carried out.
    fn refused(&self, problem: impl std::fmt::Display) -> FormatError {
        FormatError(format!("pickle: byte {}: {problem}", self.opcode_at))
    }

    /// That it needs other operands than those on the stack.
    fn operand(&self, expected: &str, found: &str) -> FormatError {
        self.refused(format_args!("expected {expected}, found {found}"))
    }

    fn not_utf8(&self) -> FormatError {
        self.refused("text is not UTF-8")
    }

    /// That the input ends within an instruction, or before the last one.
    fn truncated(&self) -> FormatError {
        FormatError(format!("pickle: ends at byte {} before it is complete", self.bytes.len()))
    }

    fn bounded(&self, found: u64, limit: u64, what: &'static str) -> Result<(), FormatError> {
        if found <= limit { Ok(()) } else { Err(self.limit(what, limit)) }
    }
}
