//! What a `.pt`, `.pth` or `.bin` file says of its tensors.
//!
//! Such a file is a zip archive: `<root>/data.pkl` is a pickle of the saved object, `<root>/data/<key>` the bytes of each storage.
//! [`leaves`] walks the pickled object and finds every tensor in it, under a name made of the keys on the way there joined by
//! dots, as the state dictionaries of modules have them. What is no tensor (numbers, texts, arguments) has no place in a
//! checkpoint of tensors and is passed over.

use std::collections::BTreeSet;

use ckfs_tensor::DType;

use super::{
    super::{
        json::repeated,
        pickle::read::{Id, PickleValue, Unpickled},
    },
    write::{STORAGES, dtype_name},
};
use crate::FormatError;

/// The pickle of an archive, below its root directory.
pub(crate) const PICKLE: &str = "data.pkl";

/// Most levels of containers around a tensor. Deeper ones are not made by any program, but can be made by hand.
pub const DEPTH_MAX: usize = 64;

/// Most visits beside one for each value of the pickle. A container that is referred to twice is visited twice: a pickle of a
/// kilobyte, with containers that each hold the next one twice, would have billions of tensors.
pub const REPEATS_MAX: usize = 256 << 10;

/// Most bytes of names. A long key of a container is in the names of all tensors below it.
pub const NAME_BYTES_MAX: usize = 256 << 20;

/// One tensor of a saved object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchTensor {
    /// The keys on the way to it, joined by dots.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Extents in elements.
    pub shape: Vec<u64>,
    /// Elements of the storage from one to the next, per axis.
    pub strides: Vec<u64>,
    /// Key of its storage: the name of an entry below `data/`.
    pub storage: String,
    /// Element of the storage that is its first.
    pub offset: u64,
    /// Bytes that the storage must have, at least, as the pickle says.
    pub storage_bytes: u64,
}

/// What stands for the file itself where messages name a tensor.
pub(super) const FILE: &str = "(file)";

/// A tensor that is not described as torch describes it.
pub(super) fn malformed(name: &str, expected: &str) -> FormatError {
    FormatError(format!("tensor {name:?}: expected {expected}"))
}

/// A type or function that has no place here.
pub(super) fn unsupported(name: &str, found: impl std::fmt::Display) -> FormatError {
    FormatError(format!("tensor {name:?}: {found} is not supported"))
}

/// The type that torch calls so.
pub fn dtype_of(name: &str) -> Option<DType> {
    DType::ALL.iter().copied().find(|dtype| dtype_name(*dtype) == Some(name) && *dtype != DType::F4)
}

/// Whether a class or function is in one of these rows of modules and of names in each of them, with spaces between.
pub(crate) fn is_listed(rows: &[(&str, &str)], module: &str, name: &str) -> bool {
    let has = |words: &str, word: &str| words.split(' ').any(|listed| listed == word);
    rows.iter().any(|(modules, names)| has(modules, module) && has(names, name))
}

/// Whether a saved object may name a class or function: what torch writes for tensors, and the containers around them.
pub fn is_allowed(module: &str, name: &str) -> bool {
    const LISTED: [(&str, &str); 7] = [
        ("torch", "Size device"),
        ("torch.storage", "UntypedStorage TypedStorage"),
        ("torch._utils", "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict defaultdict"),
        ("builtins __builtin__", "set frozenset dict list"),
    ];
    let is_type = || STORAGES.iter().any(|(storage, _)| *storage == name) || dtype_of(name).is_some();
    is_listed(&LISTED, module, name) || module == "torch" && is_type()
}

/// Most values that are no tensors and are listed. Optimizers have a few for each tensor.
pub(crate) const OTHERS_MAX: usize = 10_000;

/// The keys of all storages that a pickle refers to.
pub(crate) fn storage_keys(pickle: &Unpickled) -> BTreeSet<&str> {
    let key = |value: &PickleValue| {
        let PickleValue::Persistent(id) = value else { return None };
        let [kind, _, key, ..] = pickle.sequence(*id)? else { return None };
        pickle.text(*key).filter(|_| pickle.text(*kind) == Some("storage"))
    };
    pickle.values().filter_map(key).collect()
}

/// Whether a value is what rebuilds a tensor of any kind.
fn is_tensor(pickle: &Unpickled, id: Id) -> bool {
    pickle.call(id).is_some_and(|(callee, ..)| match callee.module.as_str() {
        "torch._utils" | "torch._tensor" => true,
        "torch.nn.parameter" => callee.name == "Parameter",
        _ => false,
    })
}

/// Whether a value is a parameter.
fn is_parameter(pickle: &Unpickled, id: Id) -> bool {
    pickle.call(id).is_some_and(|(callee, ..)| matches!(callee.name.as_str(), "_rebuild_parameter" | "Parameter"))
}

/// What an archive, or a value of its pickle, holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchContents<T> {
    /// The tensors, in the order of the pickle.
    pub tensors: Vec<T>,
    /// What is no tensor: its name, the keys on the way to it joined by dots, and what it is. At most `OTHERS_MAX` of
    /// them. Empty containers and `None` are passed over.
    pub others: Vec<(String, String)>,
}

/// Names and places of tensors, and what is none.
pub type Leaves = TorchContents<(String, Id)>;

/// Names and places of the values below `root` that are tensors of any kind, and what else there is. A tensor of a class of its
/// own, as a `DTensor`, is the call that rebuilds it.
///
/// # Errors
/// [`FormatError`]: depth, repetition or names without end, or a name twice.
pub fn leaves(pickle: &Unpickled, root: Id) -> Result<Leaves, FormatError> {
    let found = Leaves { tensors: Vec::new(), others: Vec::new() };
    let mut walk = Walk { pickle, found, path: Vec::new(), path_bytes: 0, visits: 0, name_bytes: 0 };
    walk.visit(root)?;
    if let Some(name) = repeated(walk.found.tensors.iter().map(|(name, _)| name)).first() {
        return Err(FormatError(format!("tensor {name:?} is there twice")));
    }
    Ok(walk.found)
}

struct Walk<'a> {
    pickle: &'a Unpickled,
    found: Leaves,
    path: Vec<String>,
    path_bytes: usize,
    visits: usize,
    /// Bytes of all names so far.
    name_bytes: usize,
}

impl Walk<'_> {
    fn visit(&mut self, id: Id) -> Result<(), FormatError> {
        if self.path.len() > DEPTH_MAX {
            let name = self.name();
            return Err(FormatError(format!("{name:?}: more than {DEPTH_MAX} containers within each other")));
        }
        self.visits += 1;
        if self.visits > self.pickle.count() + REPEATS_MAX {
            let found =
                format!("values are referred to more than {REPEATS_MAX} times again, as no program writes them");
            return Err(FormatError(format!("{:?}: {found}", self.name())));
        }
        match self.pickle.value(id) {
            PickleValue::Dict(items) => self.items(items),
            PickleValue::List(elements) => self.elements(elements),
            PickleValue::Tuple(elements) => self.elements(elements),
            PickleValue::Object(object) => {
                self.count_name()?;
                if is_tensor(self.pickle, id) {
                    self.found.tensors.push((self.name(), id));
                    return Ok(());
                }
                if object.items.is_empty() && object.elements.is_empty() {
                    self.other(
                        self.pickle.call(id).map_or_else(|| "an object".to_owned(), |(name, ..)| name.to_string()),
                    );
                }
                self.elements(&object.elements)?;
                self.items(&object.items)
            }
            PickleValue::None => Ok(()),
            value @ (PickleValue::Bool(_)
            | PickleValue::Int(_)
            | PickleValue::Float(_)
            | PickleValue::Text(_)
            | PickleValue::Bytes(_)
            | PickleValue::Set(_)
            | PickleValue::Global(_)
            | PickleValue::Persistent(_)) => {
                self.count_name()?;
                self.other(if let PickleValue::Global(name) = value {
                    name.to_string()
                } else {
                    value.kind().to_owned()
                });
                Ok(())
            }
        }
    }

    /// Counts the name of a value that is noted.
    fn count_name(&mut self) -> Result<(), FormatError> {
        self.name_bytes = self.name_bytes.saturating_add(self.path_bytes);
        let too_long = || FormatError(format!("more than {NAME_BYTES_MAX} bytes of names of tensors"));
        if self.name_bytes > NAME_BYTES_MAX { Err(too_long()) } else { Ok(()) }
    }

    /// Notes what is no tensor. An empty dictionary, such as the metadata of a state, is nothing.
    fn other(&mut self, kind: String) {
        if self.found.others.len() < OTHERS_MAX && kind != "collections.OrderedDict" {
            self.found.others.push((self.name(), kind));
        }
    }

    fn items(&mut self, items: &[(Id, Id)]) -> Result<(), FormatError> {
        items.iter().try_for_each(|(key, value)| {
            let number = || self.pickle.natural(*key).map(|number| number.to_string());
            // Keys of other kinds name nothing in a state dictionary.
            let key = self.pickle.text(*key).map(str::to_owned).or_else(number);
            key.map_or(Ok(()), |key| self.below(key, *value))
        })
    }

    fn elements(&mut self, elements: &[Id]) -> Result<(), FormatError> {
        elements.iter().enumerate().try_for_each(|(number, value)| self.below(number.to_string(), *value))
    }

    fn below(&mut self, key: String, value: Id) -> Result<(), FormatError> {
        let bytes = key.len() + 1;
        self.path.push(key);
        self.path_bytes += bytes;
        let visited = self.visit(value);
        self.path_bytes -= bytes;
        self.path.pop();
        visited
    }

    fn name(&self) -> String {
        self.path.join(".")
    }
}

/// A value that is described, with its name in messages.
#[derive(Clone, Copy)]
pub(super) struct Of<'a, 'b> {
    pub(super) pickle: &'a Unpickled,
    pub(super) name: &'b str,
}

impl<'a> Of<'a, '_> {
    pub(super) fn malformed(self, expected: &str) -> FormatError {
        malformed(self.name, expected)
    }

    pub(super) fn unsupported(self, found: impl std::fmt::Display) -> FormatError {
        unsupported(self.name, found)
    }

    /// The tensor that a value is, if it is one.
    pub(super) fn tensor(self, id: Id) -> Result<Option<TorchTensor>, FormatError> {
        let Some((callee, args, _)) = self.pickle.call(id) else { return Ok(None) };
        match (callee.module.as_str(), callee.name.as_str()) {
            // A parameter holds its tensor, which is no parameter: hostile ones within each other have no end.
            ("torch._utils", "_rebuild_parameter") | ("torch.nn.parameter", "Parameter") => {
                let inner = args.first().filter(|inner| !is_parameter(self.pickle, **inner));
                let tensor = inner.map_or(Ok(None), |inner| self.tensor(*inner))?;
                Ok(Some(tensor.ok_or_else(|| self.malformed("a parameter of a tensor"))?))
            }
            // A tensor that was given attributes: the call that would rebuild it, its class, and the arguments.
            ("torch._tensor", "_rebuild_from_type_v2") => {
                let [function, class, inner, ..] = args else {
                    return Err(self.malformed("a class and its arguments"));
                };
                let (PickleValue::Global(function), PickleValue::Global(class)) =
                    (self.pickle.value(*function), self.pickle.value(*class))
                else {
                    return Err(self.malformed("a class"));
                };
                let is_plain =
                    matches!(class.name.as_str(), "Tensor" | "Parameter") && function.module == "torch._utils";
                let inner = self.pickle.sequence(*inner).filter(|_| is_plain);
                let inner = inner.ok_or_else(|| self.unsupported(class))?;
                self.rebuilt(&function.name, inner).map(Some)
            }
            ("torch._utils", rebuild) => self.rebuilt(rebuild, args).map(Some),
            _ => Ok(None),
        }
    }

    fn rebuilt(self, rebuild: &str, args: &[Id]) -> Result<TorchTensor, FormatError> {
        let [storage, offset, sizes, strides, ..] = args else {
            return Err(self.malformed("storage, offset, sizes and strides"));
        };
        let (class, storage, count) = self.storage(*storage).ok_or_else(|| self.malformed("a storage"))?;
        let typed = STORAGES.iter().find(|(known, _)| *known == class);
        let (dtype, element_of_count, metadata) = match (rebuild, typed) {
            ("_rebuild_tensor_v2", Some((_, dtype))) => (*dtype, dtype.element_bytes().unwrap_or(1), args.get(6)),
            // Without a class of its own, the type is an argument and the storage counts bytes.
            ("_rebuild_tensor_v3", None) => {
                let named = args.get(6).ok_or_else(|| self.malformed("a dtype"))?;
                let PickleValue::Global(name) = self.pickle.value(*named) else {
                    return Err(self.malformed("a dtype"));
                };
                let unsupported = || self.unsupported(name);
                (dtype_of(&name.name).ok_or_else(unsupported)?, 1, args.get(7))
            }
            _ => return Err(self.malformed("a typed storage, or bytes and a dtype")),
        };
        // Conjugated and negated tensors have other values than their bytes say.
        let is_plain = |id: &Id| {
            *self.pickle.value(*id) == PickleValue::None || self.pickle.items(*id).is_some_and(<[_]>::is_empty)
        };
        if !metadata.is_none_or(is_plain) {
            return Err(self.unsupported("a tensor with metadata"));
        }
        let numbers =
            |id: Id| self.pickle.sizes(id).ok_or_else(|| self.malformed("sizes and strides of whole numbers"));
        let (shape, strides) = (numbers(*sizes)?, numbers(*strides)?);
        if shape.len() != strides.len() {
            return Err(self.malformed("as many strides as sizes"));
        }
        let offset = self.pickle.natural(*offset).ok_or_else(|| self.malformed("an offset"))?;
        let storage_bytes =
            count.checked_mul(element_of_count).ok_or_else(|| self.malformed("a storage that fits 64 bits"))?;
        let tensor = TorchTensor { name: self.name.to_owned(), dtype, shape, strides, storage, offset, storage_bytes };
        let fits = tensor.end_bytes().is_some_and(|end| end <= storage_bytes);
        if fits { Ok(tensor) } else { Err(self.malformed("a tensor inside its storage")) }
    }

    /// Class, key and number of elements of a storage.
    fn storage(self, id: Id) -> Option<(&'a str, String, u64)> {
        let PickleValue::Persistent(id) = self.pickle.value(id) else { return None };
        let [kind, class, key, _, count] = self.pickle.sequence(*id)? else { return None };
        let PickleValue::Global(class) = self.pickle.value(*class) else { return None };
        let right = self.pickle.text(*kind)? == "storage";
        right.then_some((class.name.as_str(), self.pickle.text(*key)?.to_owned(), self.pickle.natural(*count)?))
    }
}

impl TorchTensor {
    /// One past the last byte of the storage that the tensor uses; `None` if that does not fit 64 bits.
    pub(crate) fn end_bytes(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let steps = self.shape.iter().zip(&self.strides);
        let last = steps
            .map(|(extent, stride)| (extent - 1).checked_mul(*stride))
            .try_fold(self.offset, |sum, step| sum.checked_add(step?))?;
        last.checked_add(1)?.checked_mul(self.dtype.element_bytes()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::read::{self as unpickle, Limits};

    /// Pickle of `{"model": OrderedDict(w=Parameter(ones(2, 3)), v=ones(4, 2).t(), f8=zeros(3, float8_e4m3fn)), "step": 3,
    /// "arr": [ones(1)]}` as torch 2.15 writes it.
    const SAVED: &[u8] = b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq\x01ccollections\nOrderedDict\nq\x02)Rq\x03(X\x01\x00\x00\x00wq\x04\
ctorch._utils\n_rebuild_parameter\nq\x05ctorch._utils\n_rebuild_tensor_v2\nq\x06((X\x07\x00\x00\x00storageq\x07ctorch\nFloatStorage\nq\x08\
X\x01\x00\x00\x000q\x09X\x03\x00\x00\x00cpuq\x0aK\x06tq\x0bQK\x00K\x02K\x03\x86q\x0cK\x03K\x01\x86q\x0d\x89h\x02)Rq\x0etq\x0fRq\x10\x88h\x02\
)Rq\x11\x87q\x12Rq\x13X\x01\x00\x00\x00vq\x14h\x06((h\x07h\x08X\x01\x00\x00\x001q\x15h\x0aK\x08tq\x16QK\x00K\x02K\x04\x86q\x17K\x01K\x02\x86\
q\x18\x89h\x02)Rq\x19tq\x1aRq\x1bX\x02\x00\x00\x00f8q\x1cctorch._utils\n_rebuild_tensor_v3\nq\x1d((h\x07ctorch.storage\nUntypedStorage\nq\x1e\
X\x01\x00\x00\x002q\x1fh\x0aK\x03tq QK\x00K\x03\x85q!K\x01\x85q\"\x89h\x02)Rq#ctorch\nfloat8_e4m3fn\nq$tq%Rq&uX\x04\x00\x00\x00stepq'K\x03\
X\x03\x00\x00\x00arrq(]q)h\x06((h\x07h\x08X\x01\x00\x00\x003q*h\x0aK\x01tq+QK\x00K\x01\x85q,K\x01\x85q-\x89h\x02)Rq.tq/Rq0au.";

    fn read(bytes: &[u8]) -> Result<Vec<TorchTensor>, String> {
        let pickle =
            unpickle::read(bytes, Limits::default(), &is_allowed).map_err(|error: FormatError| error.to_string())?;
        let found = leaves(&pickle, pickle.root()).map_err(|error| error.to_string())?;
        let tensor = |(name, id): &(String, Id)| Of { pickle: &pickle, name }.tensor(*id).transpose();
        found.tensors.iter().filter_map(tensor).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    #[test]
    fn a_long_key_above_many_values_is_refused() {
        // A long key above many values.
        let mut long = b"\x80\x02}X\0\0\x10\0".to_vec();
        long.extend(std::iter::repeat_n(b'k', 1 << 20));
        long.extend(b"](");
        for _ in 0..300 {
            long.extend(b"K\x01");
        }
        long.extend(b"es.");
        assert!(read(&long).unwrap_err().contains("bytes of names"));
    }

    #[test]
    fn tensors_are_found_wherever_they_are() {
        let found = read(SAVED).unwrap();
        let row = |tensor: &TorchTensor| {
            let TorchTensor { name, dtype, shape, strides, storage, storage_bytes, .. } = tensor;
            format!("{name} {} {shape:?} {strides:?} in {storage} of {storage_bytes}", dtype.code())
        };
        let rows: Vec<String> = found.iter().map(row).collect();
        let expected = [
            "model.w F32 [2, 3] [3, 1] in 0 of 24",
            "model.v F32 [2, 4] [1, 2] in 1 of 32",
            "model.f8 F8_E4M3 [3] [1] in 2 of 3",
            "arr.0 F32 [1] [1] in 3 of 4",
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn a_tensor_beyond_its_storage_is_refused() {
        let mut bytes = SAVED.to_vec();
        let count = bytes.windows(4).position(|window| window == b"K\x06tq").unwrap();
        bytes[count + 1] = 5;
        assert_eq!(read(&bytes).unwrap_err(), "tensor \"model.w\": expected a tensor inside its storage");
    }

    #[test]
    fn parameters_within_each_other_are_refused_at_once() {
        let count = 1 << 20;
        let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_parameter\nq\x00".to_vec();
        bytes.extend(b"h\x00".repeat(count));
        bytes.extend(b"N");
        bytes.extend(b"\x85R".repeat(count));
        bytes.push(b'.');
        assert_eq!(read(&bytes).unwrap_err(), "tensor \"\": expected a parameter of a tensor");
    }

    #[test]
    fn a_conjugated_tensor_is_refused() {
        // The last tensor gets a seventh argument: {"conj": True}.
        let tail = SAVED.windows(8).rposition(|window| window.starts_with(b"tq/Rq0")).unwrap();
        let mut bytes = SAVED[..tail].to_vec();
        bytes.extend(b"}X\x04\x00\x00\x00conj\x88s");
        bytes.extend(&SAVED[tail..]);
        assert_eq!(read(&bytes).unwrap_err(), "tensor \"arr.0\": a tensor with metadata is not supported");
    }

    #[test]
    fn what_may_be_named_is_a_closed_list() {
        for (module, name) in
            [("posix", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.hub", "load"), ("numpy", "array")]
        {
            assert!(!is_allowed(module, name), "{module}.{name}");
        }
        let error = read(b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.").unwrap_err();
        assert!(error.contains("builtins.eval"), "{error}");
    }

    #[test]
    fn damaged_objects_never_panic_and_cycles_end() {
        for at in 0..SAVED.len() {
            for byte in [0, 1, b'.', b'h', b't', b'R', b'(', 0x80, 0xff] {
                let mut bytes = SAVED.to_vec();
                bytes[at] = byte;
                drop(read(&bytes));
            }
        }
        let error = read(b"\x80\x02]q\x00h\x00a.").unwrap_err();
        assert!(error.contains("64 containers"), "{error}");
        // A list that holds the one before it twice, fifty times over.
        let mut bytes = b"\x80\x02]".to_vec();
        for number in 0..50 {
            bytes.extend([b'q', number, b'0', b']', b'(', b'h', number, b'h', number, b'e']);
        }
        bytes.push(b'.');
        let error = read(&bytes).unwrap_err();
        assert!(error.contains("more than 262144 times again"), "{error}");
    }
}
