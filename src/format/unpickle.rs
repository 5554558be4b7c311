//! A reader of Python pickles that runs no code.
//!
//! A pickle is a program for a small stack machine, and one of its instructions calls any function of any module. This machine
//! knows the same instructions but calls nothing: a class or function is a name from a closed list, and what calling it would
//! give is an [`Object`] that says what would be called with which arguments. A name that is not on the list is an error with
//! that name.
//!
//! Values lie in one flat table and refer to each other by [`Id`], so that a deeply nested or a cyclic pickle costs no stack
//! here and cannot be dropped recursively. Work and memory are bounded by [`Limits`] and by the length of the input: no
//! instruction adds more values than it has bytes or operands on the stack.
//!
//! Not read, since neither torch nor its checkpoints use them: the text instructions of protocols 0 and 1, extension codes,
//! out-of-band buffers. They are errors with the instruction's number.

use std::collections::HashMap;

/// A value's place in the table of its pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(u32);

/// The name of a class or function: its module and its qualified name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// As in `torch._utils`.
    pub module: String,
    /// As in `_rebuild_tensor_v2`.
    pub name: String,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.module.escape_debug(), self.name.escape_debug())
    }
}

/// What a call would give, and what was done to it afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// What would be called: a [`Value::Global`] in every pickle that this machine accepts.
    pub callee: Id,
    /// A [`Value::Tuple`].
    pub args: Id,
    /// What `__setstate__` would be given.
    pub state: Option<Id>,
    /// Elements appended, as to a list.
    pub elements: Vec<Id>,
    /// Keys and values set, as in a dictionary.
    pub items: Vec<(Id, Id)>,
}

/// One value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 128 bits.
    Int(i128),
    /// A float.
    Float(f64),
    /// A string.
    Text(Box<str>),
    /// `bytes` or `bytearray`.
    Bytes(Box<[u8]>),
    /// A tuple.
    Tuple(Box<[Id]>),
    /// A list.
    List(Vec<Id>),
    /// A dictionary, its items in the order in which they were set. A key that was set twice is there twice; the later counts.
    Dict(Vec<(Id, Id)>),
    /// A set or frozen set.
    Set(Vec<Id>),
    /// A class or function of the closed list.
    Global(Name),
    /// What a call would give.
    Object(Box<Object>),
    /// What the program that loads the pickle would supply for this value.
    Persistent(Id),
}

impl Value {
    /// What the value is, for messages.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Text(_) => "a str",
            Self::Bytes(_) => "bytes",
            Self::Tuple(_) => "a tuple",
            Self::List(_) => "a list",
            Self::Dict(_) => "a dict",
            Self::Set(_) => "a set",
            Self::Global(_) => "a class or function",
            Self::Object(_) => "an object",
            Self::Persistent(_) => "a persistent object",
        }
    }
}

/// Bounds on what one pickle may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most values. A value takes some 40 bytes besides its text.
    pub values_max: u32,
    /// Most bytes of text and byte strings together.
    pub text_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { values_max: 64 << 20, text_bytes_max: 1 << 30 }
    }
}

/// Why a pickle is refused. Offsets are those of the instruction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// The input ends within an instruction, or before the last one.
    #[error("pickle: ends at byte {at} before it is complete")]
    Truncated {
        /// Length of the input.
        at: usize,
    },
    /// An instruction that is not read here.
    #[error("pickle: byte {at}: instruction {opcode:#04x} is not supported")]
    Opcode {
        /// Where.
        at: usize,
        /// Its number.
        opcode: u8,
    },
    /// A protocol newer than 5.
    #[error("pickle: protocol {found}: expected at most 5")]
    Protocol {
        /// As given.
        found: u8,
    },
    /// A class or function that is not on the list.
    #[error("pickle: byte {at}: {name} is not on the list of what a checkpoint may hold; nothing was run")]
    Forbidden {
        /// Where.
        at: usize,
        /// Its name.
        name: Name,
    },
    /// The instruction needs other operands than those on the stack.
    #[error("pickle: byte {at}: expected {expected}, found {found}")]
    Operand {
        /// Where.
        at: usize,
        /// What the instruction needs.
        expected: &'static str,
        /// What is there.
        found: &'static str,
    },
    /// A number that was never stored is asked for.
    #[error("pickle: byte {at}: nothing was stored under number {number}")]
    Memo {
        /// Where.
        at: usize,
        /// The number.
        number: u32,
    },
    /// Text that is not UTF-8.
    #[error("pickle: byte {at}: text is not UTF-8")]
    Utf8 {
        /// Where.
        at: usize,
    },
    /// An integer of more than 128 bits.
    #[error("pickle: byte {at}: an integer of {bytes} bytes: expected at most 16")]
    Integer {
        /// Where.
        at: usize,
        /// Its length.
        bytes: usize,
    },
    /// A limit was reached.
    #[error("pickle: byte {at}: more than {limit} {what}")]
    Limit {
        /// Where.
        at: usize,
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

/// A pickle that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpickled {
    values: Vec<Value>,
    root: Id,
    /// Bytes of the input up to the end of the last instruction.
    len: usize,
}

impl Unpickled {
    /// Reads the pickle that `bytes` begin with. `allowed` is the closed list: it is asked for each class and function that the
    /// pickle names, with module and name.
    ///
    /// # Errors
    /// [`PickleError`], the first that is met.
    pub fn read(bytes: &[u8], limits: Limits, allowed: &dyn Fn(&str, &str) -> bool) -> Result<Self, PickleError> {
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
        }
        .run()
    }

    /// The value that the pickle is of.
    pub fn root(&self) -> Id {
        self.root
    }

    /// A value.
    pub fn value(&self, id: Id) -> &Value {
        // Ids are made by the machine that made the table, which never shrinks.
        &self.values[id.0 as usize]
    }

    /// Bytes of the input that were read.
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// The text of a string.
    pub fn text(&self, id: Id) -> Option<&str> {
        if let Value::Text(text) = self.value(id) { Some(text) } else { None }
    }

    /// An integer that is not negative, of at most 64 bits.
    pub fn natural(&self, id: Id) -> Option<u64> {
        if let Value::Int(number) = self.value(id) { u64::try_from(*number).ok() } else { None }
    }

    /// The elements of a tuple or a list.
    pub fn sequence(&self, id: Id) -> Option<&[Id]> {
        let value = self.value(id);
        if let Value::Tuple(elements) = value {
            Some(elements)
        } else if let Value::List(elements) = value {
            Some(elements)
        } else {
            None
        }
    }

    /// The items of a dictionary, or of an object that items were set on, as on an `OrderedDict`.
    pub fn items(&self, id: Id) -> Option<&[(Id, Id)]> {
        let value = self.value(id);
        if let Value::Dict(items) = value {
            Some(items)
        } else if let Value::Object(object) = value {
            Some(&object.items)
        } else {
            None
        }
    }

    /// The value under a text key; the last that was set counts.
    pub fn item(&self, id: Id, key: &str) -> Option<Id> {
        let items = self.items(id)?;
        items.iter().rev().find(|(found, _)| self.text(*found) == Some(key)).map(|(_, value)| *value)
    }

    /// What is called and with which arguments, if the value is what a call of a listed function would give.
    pub fn call(&self, id: Id) -> Option<(&Name, &[Id], &Object)> {
        let Value::Object(object) = self.value(id) else { return None };
        let Value::Global(name) = self.value(object.callee) else { return None };
        Some((name, self.sequence(object.args)?, object))
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the present instruction begins.
    opcode_at: usize,
    limits: Limits,
    allowed: &'a dyn Fn(&str, &str) -> bool,
    values: Vec<Value>,
    text_bytes: u64,
    stack: Vec<Id>,
    /// Lengths of the stack where marks were set.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

/// Instructions, by their names in Python's `pickletools`.
mod op {
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const POP: u8 = b'0';
    pub(super) const POP_MARK: u8 = b'1';
    pub(super) const DUP: u8 = b'2';
    pub(super) const BINBYTES: u8 = b'B';
    pub(super) const SHORT_BINBYTES: u8 = b'C';
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const NONE: u8 = b'N';
    pub(super) const BINPERSID: u8 = b'Q';
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const BINSTRING: u8 = b'T';
    pub(super) const SHORT_BINSTRING: u8 = b'U';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const BUILD: u8 = b'b';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const DICT: u8 = b'd';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const LIST: u8 = b'l';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const NEWOBJ: u8 = 0x81;
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG4: u8 = 0x8b;
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const BINUNICODE8: u8 = 0x8d;
    pub(super) const BINBYTES8: u8 = 0x8e;
    pub(super) const EMPTY_SET: u8 = 0x8f;
    pub(super) const ADDITEMS: u8 = 0x90;
    pub(super) const FROZENSET: u8 = 0x91;
    pub(super) const STACK_GLOBAL: u8 = 0x93;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const FRAME: u8 = 0x95;
    pub(super) const BYTEARRAY8: u8 = 0x96;
}

/// Newest protocol that is read.
const PROTOCOL_MAX: u8 = 5;

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Unpickled, PickleError> {
        loop {
            self.opcode_at = self.at;
            let opcode = self.byte()?;
            if opcode == op::STOP {
                let root = self.pop()?;
                return Ok(Unpickled { values: self.values, root, len: self.at });
            }
            self.step(opcode)?;
        }
    }

    /// Carries out one instruction.
    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            op::PROTO => match self.byte()? {
                found if found > PROTOCOL_MAX => Err(PickleError::Protocol { found }),
                _ => Ok(()),
            },
            // The length of what follows, of use to readers of streams only.
            op::FRAME => self.take(8).map(drop),
            op::MARK => {
                self.marks.push(self.stack.len());
                self.bounded(self.marks.len() as u64, u64::from(self.limits.values_max), "marks")
            }
            op::POP => match self.marks.last() {
                // A mark counts as the topmost value.
                Some(mark) if *mark == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                Some(_) | None => self.pop().map(drop),
            },
            op::POP_MARK => self.above_mark().map(drop),
            op::DUP => {
                let top = self.top()?;
                self.push_id(top)
            }
            op::BINPUT | op::LONG_BINPUT | op::MEMOIZE | op::BINGET | op::LONG_BINGET => self.memo(opcode),
            op::NONE
            | op::NEWTRUE
            | op::NEWFALSE
            | op::BININT
            | op::BININT1
            | op::BININT2
            | op::LONG1
            | op::LONG4
            | op::BINFLOAT => self.number(opcode),
            op::BINSTRING
            | op::SHORT_BINSTRING
            | op::BINUNICODE
            | op::SHORT_BINUNICODE
            | op::BINUNICODE8
            | op::BINBYTES
            | op::SHORT_BINBYTES
            | op::BINBYTES8
            | op::BYTEARRAY8 => self.text(opcode),
            op::EMPTY_TUPLE
            | op::TUPLE1
            | op::TUPLE2
            | op::TUPLE3
            | op::TUPLE
            | op::EMPTY_LIST
            | op::LIST
            | op::EMPTY_DICT
            | op::DICT
            | op::EMPTY_SET
            | op::FROZENSET => self.container(opcode),
            op::APPEND | op::APPENDS | op::ADDITEMS | op::SETITEM | op::SETITEMS => self.fill(opcode),
            op::GLOBAL | op::STACK_GLOBAL | op::REDUCE | op::NEWOBJ | op::BUILD | op::BINPERSID => self.object(opcode),
            _ => Err(PickleError::Opcode { at: self.opcode_at, opcode }),
        }
    }

    fn memo(&mut self, opcode: u8) -> Result<(), PickleError> {
        let number = match opcode {
            op::BINPUT | op::BINGET => u32::from(self.byte()?),
            op::LONG_BINPUT | op::LONG_BINGET => self.u32()?,
            // Python numbers by how many there are.
            _ => u32::try_from(self.memo.len()).map_err(|_| self.limit("stored values", u64::from(u32::MAX)))?,
        };
        if matches!(opcode, op::BINGET | op::LONG_BINGET) {
            let found = self.memo.get(&number).copied();
            return self.push_id(found.ok_or(PickleError::Memo { at: self.opcode_at, number })?);
        }
        let top = self.top()?;
        self.memo.insert(number, top);
        self.bounded(self.memo.len() as u64, u64::from(self.limits.values_max), "stored values")
    }

    fn number(&mut self, opcode: u8) -> Result<(), PickleError> {
        let value = match opcode {
            op::NONE => Value::None,
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            op::BININT => Value::Int(i32::from_le_bytes(self.array()?).into()),
            op::BININT1 => Value::Int(self.byte()?.into()),
            op::BININT2 => Value::Int(u16::from_le_bytes(self.array()?).into()),
            op::BINFLOAT => {
                // The only number in this order of bytes.
                let mut bytes: [u8; 8] = self.array()?;
                bytes.reverse();
                Value::Float(f64::from_le_bytes(bytes))
            }
            _ => {
                let len = if opcode == op::LONG1 { usize::from(self.byte()?) } else { self.len32()? };
                let at = self.opcode_at;
                let bytes = self.take(len)?;
                let negative = bytes.last().is_some_and(|top| top & 0x80 != 0);
                let mut wide = [if negative { 0xff } else { 0 }; 16];
                wide.get_mut(..len).ok_or(PickleError::Integer { at, bytes: len })?.copy_from_slice(bytes);
                Value::Int(i128::from_le_bytes(wide))
            }
        };
        self.push(value)
    }

    fn text(&mut self, opcode: u8) -> Result<(), PickleError> {
        let len = match opcode {
            op::SHORT_BINSTRING | op::SHORT_BINUNICODE | op::SHORT_BINBYTES => usize::from(self.byte()?),
            op::BINSTRING | op::BINUNICODE | op::BINBYTES => self.len32()?,
            _ => {
                let len = u64::from_le_bytes(self.array()?);
                // More than memory can hold is more than the input has.
                usize::try_from(len).map_err(|_| PickleError::Truncated { at: self.bytes.len() })?
            }
        };
        let at = self.opcode_at;
        let bytes = self.take(len)?;
        self.text_bytes += len as u64;
        self.bounded(self.text_bytes, self.limits.text_bytes_max, "bytes of text")?;
        let is_text = matches!(
            opcode,
            op::BINSTRING | op::SHORT_BINSTRING | op::BINUNICODE | op::SHORT_BINUNICODE | op::BINUNICODE8
        );
        self.push(if is_text {
            Value::Text(std::str::from_utf8(bytes).map_err(|_| PickleError::Utf8 { at })?.into())
        } else {
            Value::Bytes(bytes.into())
        })
    }

    fn container(&mut self, opcode: u8) -> Result<(), PickleError> {
        let value = match opcode {
            op::EMPTY_TUPLE => Value::Tuple(Box::default()),
            op::TUPLE1 => Value::Tuple([self.pop()?].into()),
            op::TUPLE2 | op::TUPLE3 => {
                let mut elements = Vec::new();
                for _ in op::TUPLE1..=opcode {
                    elements.push(self.pop()?);
                }
                elements.reverse();
                Value::Tuple(elements.into())
            }
            op::TUPLE => Value::Tuple(self.above_mark()?.into()),
            op::EMPTY_LIST => Value::List(Vec::new()),
            op::LIST => Value::List(self.above_mark()?),
            op::EMPTY_DICT => Value::Dict(Vec::new()),
            op::DICT => {
                let flat = self.above_mark()?;
                Value::Dict(self.pairs(&flat)?)
            }
            op::EMPTY_SET => Value::Set(Vec::new()),
            _ => Value::Set(self.above_mark()?),
        };
        self.push(value)
    }

    /// Puts what is on the stack into the container below.
    fn fill(&mut self, opcode: u8) -> Result<(), PickleError> {
        let added = match opcode {
            op::APPEND => vec![self.pop()?],
            op::SETITEM => {
                let value = self.pop()?;
                vec![self.pop()?, value]
            }
            _ => self.above_mark()?,
        };
        let at = self.opcode_at;
        let target = self.top()?;
        let in_pairs = matches!(opcode, op::SETITEM | op::SETITEMS);
        let pairs = if in_pairs { self.pairs(&added)? } else { Vec::new() };
        let target = &mut self.values[target.0 as usize];
        match (target, opcode) {
            (Value::List(elements), op::APPEND | op::APPENDS) | (Value::Set(elements), op::ADDITEMS) => {
                elements.extend(added);
            }
            (Value::Dict(items), op::SETITEM | op::SETITEMS) => items.extend(pairs),
            (Value::Object(object), op::SETITEM | op::SETITEMS) => object.items.extend(pairs),
            (Value::Object(object), _) => object.elements.extend(added),
            (other, _) => {
                let expected = if in_pairs { "a dict below the items" } else { "a list or set below the elements" };
                return Err(PickleError::Operand { at, expected, found: other.kind() });
            }
        }
        Ok(())
    }

    fn object(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            op::GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module.to_owned(), name.to_owned())
            }
            op::STACK_GLOBAL => {
                let (name, module) = (self.pop_text()?, self.pop_text()?);
                self.global(module, name)
            }
            op::BINPERSID => {
                let id = self.pop()?;
                self.push(Value::Persistent(id))
            }
            op::BUILD => {
                let state = self.pop()?;
                let (at, target) = (self.opcode_at, self.top()?);
                let target = &mut self.values[target.0 as usize];
                let Value::Object(object) = target else {
                    return Err(PickleError::Operand {
                        at,
                        expected: "an object below its state",
                        found: target.kind(),
                    });
                };
                object.state = Some(state);
                Ok(())
            }
            _ => {
                let (args, callee) = (self.pop()?, self.pop()?);
                let at = self.opcode_at;
                for (id, expected) in [(callee, "a class or function to call"), (args, "a tuple of arguments")] {
                    let found = &self.values[id.0 as usize];
                    let fits =
                        if id == callee { matches!(found, Value::Global(_)) } else { matches!(found, Value::Tuple(_)) };
                    if !fits {
                        return Err(PickleError::Operand { at, expected, found: found.kind() });
                    }
                }
                let object = Object { callee, args, state: None, elements: Vec::new(), items: Vec::new() };
                self.push(Value::Object(Box::new(object)))
            }
        }
    }

    fn global(&mut self, module: String, name: String) -> Result<(), PickleError> {
        let name = Name { module, name };
        if !(self.allowed)(&name.module, &name.name) {
            return Err(PickleError::Forbidden { at: self.opcode_at, name });
        }
        self.text_bytes += (name.module.len() + name.name.len()) as u64;
        self.bounded(self.text_bytes, self.limits.text_bytes_max, "bytes of text")?;
        self.push(Value::Global(name))
    }

    fn pairs(&self, flat: &[Id]) -> Result<Vec<(Id, Id)>, PickleError> {
        let (pairs, rest) = flat.as_chunks::<2>();
        if rest.is_empty() {
            Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
        } else {
            let (expected, found) = ("as many values as keys", "an odd number of both");
            Err(PickleError::Operand { at: self.opcode_at, expected, found })
        }
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        let limit = || self.limit("values", u64::from(self.limits.values_max));
        let id = u32::try_from(self.values.len()).ok().filter(|id| *id < self.limits.values_max).ok_or_else(limit)?;
        self.values.push(value);
        self.push_id(Id(id))
    }

    /// The stack holds references, of which one value may have many.
    fn push_id(&mut self, id: Id) -> Result<(), PickleError> {
        self.stack.push(id);
        self.bounded(self.stack.len() as u64, u64::from(self.limits.values_max), "values on the stack")
    }

    /// The topmost value above the last mark.
    fn top(&self) -> Result<Id, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let found = if self.marks.is_empty() { "an empty stack" } else { "a mark" };
        let missing = PickleError::Operand { at: self.opcode_at, expected: "a value on the stack", found };
        self.stack.get(floor..).and_then(|above| above.last().copied()).ok_or(missing)
    }

    fn pop(&mut self) -> Result<Id, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_text(&mut self) -> Result<String, PickleError> {
        let id = self.pop()?;
        let value = &self.values[id.0 as usize];
        let Value::Text(text) = value else {
            return Err(PickleError::Operand { at: self.opcode_at, expected: "a str", found: value.kind() });
        };
        Ok(text.to_string())
    }

    /// Takes what lies above the last mark, and the mark.
    fn above_mark(&mut self) -> Result<Vec<Id>, PickleError> {
        let found = "none";
        let mark = self.marks.pop().ok_or(PickleError::Operand { at: self.opcode_at, expected: "a mark", found })?;
        Ok(self.stack.split_off(mark))
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, PickleError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn len32(&mut self) -> Result<usize, PickleError> {
        // Of 32 bits, so that it fits memory.
        usize::try_from(self.u32()?).map_err(|_| PickleError::Truncated { at: self.bytes.len() })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let rest = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<N>);
        let bytes = *rest.ok_or(PickleError::Truncated { at: self.bytes.len() })?;
        self.at += N;
        Ok(bytes)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(len);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or(PickleError::Truncated { at: self.bytes.len() })?;
        self.at += len;
        Ok(taken)
    }

    /// Text up to the end of its line.
    fn line(&mut self) -> Result<&'a str, PickleError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or(PickleError::Truncated { at: self.bytes.len() })?;
        let line = self.take(len)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| PickleError::Utf8 { at: self.opcode_at })
    }

    fn limit(&self, what: &'static str, limit: u64) -> PickleError {
        PickleError::Limit { at: self.opcode_at, what, limit }
    }

    fn bounded(&self, found: u64, limit: u64, what: &'static str) -> Result<(), PickleError> {
        if found <= limit { Ok(()) } else { Err(self.limit(what, limit)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Unpickled, PickleError> {
        Unpickled::read(bytes, Limits::default(), &|module, _| module == "collections")
    }

    /// A value as Python would print it, by and large.
    fn show(pickle: &Unpickled, id: Id) -> String {
        let all = |ids: &[Id]| ids.iter().map(|id| show(pickle, *id)).collect::<Vec<_>>().join(", ");
        let pairs = |items: &[(Id, Id)]| {
            items
                .iter()
                .map(|(key, value)| format!("{}: {}", show(pickle, *key), show(pickle, *value)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        match pickle.value(id) {
            Value::None => "None".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Int(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Text(text) => format!("{text:?}"),
            Value::Bytes(bytes) => format!("b{bytes:?}"),
            Value::Tuple(elements) => format!("({})", all(elements)),
            Value::List(elements) => format!("[{}]", all(elements)),
            Value::Set(elements) => format!("{{{}}}", all(elements)),
            Value::Dict(items) => format!("{{{}}}", pairs(items)),
            Value::Global(name) => name.to_string(),
            Value::Object(object) => {
                let state = object.state.map_or(String::new(), |state| format!(" state {}", show(pickle, state)));
                let (callee, args) = (show(pickle, object.callee), show(pickle, object.args));
                format!("{callee}{args}{{{}}}[{}]{state}", pairs(&object.items), all(&object.elements))
            }
            Value::Persistent(id) => format!("persistent {}", show(pickle, *id)),
        }
    }

    fn shown(bytes: &[u8]) -> String {
        let pickle = read(bytes).unwrap();
        show(&pickle, pickle.root())
    }

    #[test]
    fn values_of_each_kind_are_read() {
        // As `pickle.dumps(value, protocol)` of CPython 3.11 writes them.
        let rows: [(&[u8], &str); 14] = [
            (b"\x80\x02N.", "None"),
            (b"\x80\x02\x88.", "true"),
            (b"\x80\x04K\x07.", "7"),
            (b"\x80\x02M\x01\x02.", "513"),
            (b"\x80\x02J\xff\xff\xff\xff.", "-1"),
            (b"\x80\x02\x8a\x05\x00\x00\x00\x00\x01.", "4294967296"),
            (b"\x80\x02\x8a\x00.", "0"),
            (b"\x80\x02G\x3f\xf8\x00\x00\x00\x00\x00\x00.", "1.5"),
            (b"\x80\x02X\x02\x00\x00\x00abq\x00.", "\"ab\""),
            (b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00\x8c\x02ab\x94.", "\"ab\""),
            (b"\x80\x03C\x02\x01\x02q\x00.", "b[1, 2]"),
            (b"\x80\x02(K\x01K\x02K\x03K\x04tq\x00.", "(1, 2, 3, 4)"),
            (b"\x80\x02K\x01K\x02K\x03\x87q\x00.", "(1, 2, 3)"),
            (b"\x80\x04\x8f\x94(K\x01K\x02\x90.", "{1, 2}"),
        ];
        for (bytes, expected) in rows {
            assert_eq!(shown(bytes), expected);
        }
    }

    #[test]
    fn containers_are_filled_after_they_were_stored() {
        assert_eq!(shown(b"\x80\x02]q\x00(K\x01K\x02eh\x00\x86."), "([1, 2], [1, 2])");
        assert_eq!(shown(b"\x80\x02}q\x00(K\x01K\x02K\x03K\x04u."), "{1: 2, 3: 4}");
        // A list that holds itself.
        let pickle = read(b"\x80\x02]q\x00h\x00a.").unwrap();
        assert_eq!(pickle.value(pickle.root()), &Value::List(vec![pickle.root()]));
    }

    #[test]
    fn calls_are_described_and_not_made() {
        let ordered = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01K\x01K\x02sN}b.";
        // An instruction `b` needs its state on top: `N` is popped as the state of `{}`, which is no object.
        assert!(matches!(read(ordered), Err(PickleError::Operand { found: "None", .. })));
        let ordered = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aK\x02u}b.";
        assert_eq!(shown(ordered), "collections.OrderedDict(){\"a\": 2}[] state {}");
        let pickle = read(ordered).unwrap();
        let item = pickle.item(pickle.root(), "a").unwrap();
        assert_eq!(pickle.natural(item), Some(2));
        let (name, args, object) = pickle.call(pickle.root()).unwrap();
        assert_eq!((name.to_string(), args.len(), object.items.len()), ("collections.OrderedDict".to_owned(), 0, 1));
        assert_eq!(shown(b"\x80\x04\x8c\x0bcollections\x8c\x07Counter\x93)\x81."), "collections.Counter(){}[]");
        assert_eq!(shown(b"\x80\x02X\x01\x00\x00\x000Q."), "persistent \"0\"");
    }

    #[test]
    fn names_that_are_not_listed_are_refused_by_name() {
        for bytes in
            [&b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R."[..], b"\x80\x04\x8c\x05posix\x8c\x06system\x93."]
        {
            let error = read(bytes).unwrap_err();
            assert!(
                matches!(&error, PickleError::Forbidden { name, .. } if name.to_string() == "posix.system"),
                "{error}"
            );
        }
        let error = read(b"\x80\x02ca\x1b[1m\nb\n.").unwrap_err().to_string();
        assert!(!error.contains('\x1b'), "{error}");
    }

    #[test]
    fn what_is_wrong_is_an_error() {
        let rows: [(&[u8], &str); 14] = [
            (b"", "ends at byte 0"),
            (b"\x80\x02", "ends at byte 2"),
            (b"\x80\x06N.", "protocol 6"),
            (b"\x80\x02.", "found an empty stack"),
            (b"\x80\x02(.", "found a mark"),
            (b"\x80\x02t.", "expected a mark, found none"),
            (b"\x80\x02h\x05.", "nothing was stored under number 5"),
            (b"\x80\x02X\xff\xff\xff\xffab.", "ends at byte 10"),
            (b"\x80\x02X\x01\x00\x00\x00\xff.", "not UTF-8"),
            (b"\x80\x02\x8a\x11aaaaaaaaaaaaaaaaa.", "an integer of 17 bytes"),
            (b"\x80\x02K\x01K\x02a.", "expected a list or set below the elements, found an int"),
            (b"\x80\x02}(K\x01u.", "an odd number of both"),
            (b"\x80\x02K\x01)R.", "expected a class or function to call, found an int"),
            (b"\x80\x02I1\n.", "instruction 0x49 is not supported"),
        ];
        for (bytes, expected) in rows {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}: expected {expected}");
        }
    }

    #[test]
    fn limits_hold() {
        let few = |values_max, text_bytes_max| Limits { values_max, text_bytes_max };
        let read = |bytes: &[u8], limits| Unpickled::read(bytes, limits, &|_, _| true);
        assert!(read(b"\x80\x02(NNNt.", few(4, 0)).is_ok());
        assert!(matches!(read(b"\x80\x02(NNNt.", few(3, 0)), Err(PickleError::Limit { what: "values", .. })));
        // One value, many references to it, or marks without end.
        let many = [b"\x80\x02N".as_slice(), &[b'2'; 100]].concat();
        assert!(matches!(read(&many, few(50, 0)), Err(PickleError::Limit { what: "values on the stack", .. })));
        assert!(matches!(read(&[b'('; 100], few(50, 0)), Err(PickleError::Limit { what: "marks", .. })));
        assert!(matches!(read(b"\x80\x02X\x02\x00\x00\x00ab.", few(9, 1)), Err(PickleError::Limit { .. })));
    }

    #[test]
    fn damaged_pickles_never_panic() {
        let whole = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aK\x02X\x01\x00\x00\x00b](K\x01\x85G\x3f\xf8\x00\x00\x00\x00\x00\x00eu}b.";
        assert!(read(whole).is_ok());
        for len in 0..whole.len() {
            assert!(read(&whole[..len]).is_err());
        }
        for at in 0..whole.len() {
            for byte in 0..=255 {
                let mut bytes = whole.to_vec();
                bytes[at] = byte;
                drop(read(&bytes));
            }
        }
    }
}
