//! The values of a pickle.

use ckfs_host::parse_room::HeldRoom;

/// A value's place in the table of its pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(super) u32);

impl Id {
    /// The place, from 0.
    pub(in super::super) const fn number(self) -> u32 {
        self.0
    }
}

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
    /// What would be called: a [`PickleValue::Global`] in every pickle that this machine accepts.
    pub callee: Id,
    /// A [`PickleValue::Tuple`].
    pub args: Id,
    /// Whether the class makes it of the arguments without `__init__`.
    pub is_new: bool,
    /// What `__setstate__` would be given.
    pub state: Option<Id>,
    /// Elements appended, as to a list.
    pub elements: Vec<Id>,
    /// Keys and values set, as in a dictionary.
    pub items: Vec<(Id, Id)>,
}

/// One value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum PickleValue {
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

impl PickleValue {
    /// About what it takes in memory besides its place in the table: its own allocations.
    pub(super) fn owned_bytes(&self) -> usize {
        /// What the allocator itself takes.
        const ALLOCATION: usize = 24;
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Persistent(_) => 0,
            Self::Text(text) => ALLOCATION + text.len(),
            Self::Bytes(bytes) => ALLOCATION + bytes.len(),
            Self::Tuple(elements) => ALLOCATION + size_of_val(&elements[..]),
            Self::List(elements) | Self::Set(elements) => ALLOCATION + size_of_val(&elements[..]),
            Self::Dict(items) => ALLOCATION + size_of_val(&items[..]),
            Self::Global(name) => 2 * ALLOCATION + name.module.len() + name.name.len(),
            Self::Object(_) => ALLOCATION + size_of::<Object>(),
        }
    }

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

/// A pickle that was read.
#[derive(Debug)]
pub struct Unpickled {
    pub(super) values: Vec<PickleValue>,
    pub(super) root: Id,
    /// What its values count for.
    pub(super) _held: HeldRoom,
}

impl Unpickled {
    /// The value that the pickle is of.
    pub fn root(&self) -> Id {
        self.root
    }

    /// Number of values.
    pub fn count(&self) -> usize {
        self.values.len()
    }

    /// All values, in the order in which the pickle made them.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &PickleValue> {
        self.values.iter()
    }

    /// A value.
    pub fn value(&self, id: Id) -> &PickleValue {
        // Ids are made by the machine that made the table, which never shrinks.
        &self.values[id.0 as usize]
    }

    /// The text of a string.
    pub fn text(&self, id: Id) -> Option<&str> {
        if let PickleValue::Text(text) = self.value(id) { Some(text) } else { None }
    }

    /// An integer that is not negative, of at most 64 bits.
    pub fn natural(&self, id: Id) -> Option<u64> {
        if let PickleValue::Int(number) = self.value(id) { u64::try_from(*number).ok() } else { None }
    }

    /// What a `torch.Size` is made of; any other value itself.
    pub(crate) fn size(&self, id: Id) -> Id {
        match self.call(id) {
            Some((name, [numbers], _)) if name.module == "torch" && name.name == "Size" => *numbers,
            Some(_) | None => id,
        }
    }

    /// The numbers of a tuple or list, or one number.
    pub(crate) fn naturals(&self, id: Id) -> Option<Vec<u64>> {
        let one = self.natural(id).map(|number| vec![number]);
        one.or_else(|| self.sequence(id)?.iter().map(|number| self.natural(*number)).collect())
    }

    /// The numbers of a `torch.Size`, a tuple or a list.
    pub(crate) fn sizes(&self, id: Id) -> Option<Vec<u64>> {
        let id = self.size(id);
        self.sequence(id).and_then(|_| self.naturals(id))
    }

    /// The elements of a tuple or a list.
    pub fn sequence(&self, id: Id) -> Option<&[Id]> {
        let value = self.value(id);
        if let PickleValue::Tuple(elements) = value {
            return Some(elements);
        }
        if let PickleValue::List(elements) = value { Some(elements) } else { None }
    }

    /// The items of a dictionary, or of an object that items were set on, as on an `OrderedDict`.
    pub fn items(&self, id: Id) -> Option<&[(Id, Id)]> {
        let value = self.value(id);
        if let PickleValue::Dict(items) = value {
            return Some(items);
        }
        if let PickleValue::Object(object) = value { Some(&object.items) } else { None }
    }

    /// The value under a text key; the last that was set counts.
    pub fn item(&self, id: Id, key: &str) -> Option<Id> {
        let items = self.items(id)?;
        items.iter().rev().find(|(found, _)| self.text(*found) == Some(key)).map(|(_, value)| *value)
    }

    /// What is called and with which arguments, if the value is what a call of a listed function would give.
    pub fn call(&self, id: Id) -> Option<(&Name, &[Id], &Object)> {
        let PickleValue::Object(object) = self.value(id) else { return None };
        let PickleValue::Global(name) = self.value(object.callee) else { return None };
        Some((name, self.sequence(object.args)?, object))
    }
}
