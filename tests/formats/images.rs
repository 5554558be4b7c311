//! The formats that wrap tensors, decoded by readers written in this file: every size is the length of the read bytes, and
//! every element equals the raw file's.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::collections::{BTreeMap, BTreeSet};

use crate::common::repo::{self, row};
use ckfs::{
    plan::{Layout, Mesh, Pattern, ShardRule, ViewOptions},
    tensor::DType,
    volume::{FileSystem, FsError, Ino, NodeKind, Volume, VolumeOptions},
};
use serde_json::Value;
use tempfile::TempDir;

const CODES: [(&str, DType); 7] = [
    ("flags", DType::Bool),
    ("bytes", DType::U8),
    ("small", DType::F8E4M3),
    ("half", DType::BF16),
    ("word", DType::U32),
    ("complex", DType::C64),
    ("wide", DType::F64),
];

/// Scalars, empty tensors, odd extents, many types.
fn odd() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = vec![
        row("scalar", DType::F32, &[]),
        row("nothing", DType::F16, &[0, 4]),
        row("hollow", DType::F16, &[3, 0]),
        row("short", DType::F32, &[2, 3]),
        row("odd", DType::BF16, &[7, 5, 3]),
        row("line", DType::I64, &[13]),
    ];
    rows.extend(CODES.iter().map(|(name, dtype)| row(name, *dtype, &[5, 4])));
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({"model_type": "unheard_of"}));
    dir
}

fn experts() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = vec![row("model.embed_tokens.weight", DType::BF16, &[10, 6])];
    for layer in 0..2 {
        rows.push(row(&format!("model.layers.{layer}.input_layernorm.weight"), DType::BF16, &[6]));
        for expert in 0..3 {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
            rows.push(row(&name, DType::BF16, &[5, 6]));
        }
    }
    // An unknown model type, for which the rules expect no more tensors.
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({"model_type": "qwen3_next", "num_hidden_layers": 2}));
    dir
}

fn options(mesh: &str) -> ViewOptions {
    ViewOptions { mesh: Mesh::parse(mesh).unwrap(), ..ViewOptions::default() }
}

/// A mount whose files are read on request.
struct Shown {
    volume: Volume,
    files: BTreeMap<String, Ino>,
    manifest: Value,
    /// The source, which must outlive its readers.
    _source: TempDir,
}

impl Shown {
    fn new(dir: TempDir, options: &ViewOptions) -> Self {
        let volume = repo::volume(&repo::open(dir.path()), options, VolumeOptions::default());
        let mut found = Vec::new();
        repo::files(&volume, Ino::ROOT, "", &mut found);
        let mut shown = Self { volume, files: found.into_iter().collect(), manifest: Value::Null, _source: dir };
        shown.manifest = serde_json::from_slice(&shown.read(".ckfs/manifest.json")).unwrap();
        shown
    }

    /// A whole file, whose length must equal its size; any odd span is the same slice.
    fn read(&self, path: &str) -> Vec<u8> {
        let ino = *self.files.get(path).unwrap_or_else(|| panic!("{path} is not among {:#?}", self.files.keys()));
        let size = self.volume.attr(ino).unwrap().size_bytes;
        let bytes = repo::read(&self.volume, ino, 0, usize::try_from(size).unwrap() + 100);
        assert_eq!(bytes.len() as u64, size, "{path}");
        let (from, to) = (bytes.len() / 3, bytes.len() - bytes.len() / 5);
        assert_eq!(repo::read(&self.volume, ino, from as u64, to - from), bytes[from..to], "{path}");
        bytes
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_slice(&self.read(path)).unwrap()
    }

    fn bundled(&self) -> impl Iterator<Item = Tensor<'_>> {
        let rows = self.manifest["tensors"].as_array().unwrap().iter().filter(|row| row["bundled"] == true);
        rows.map(|row| Tensor { row })
    }

    fn devices(&self) -> usize {
        self.manifest["devices"].as_array().unwrap().len()
    }

    fn under(&self, directory: &str) -> Vec<&str> {
        self.files.keys().filter_map(|path| path.strip_prefix(directory)).collect()
    }
}

/// A row of the manifest.
struct Tensor<'a> {
    row: &'a Value,
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| usize::try_from(n.as_u64().unwrap()).unwrap()).collect()
}

impl Tensor<'_> {
    fn name(&self) -> &str {
        self.row["name"].as_str().unwrap()
    }

    fn path(&self) -> &str {
        self.row["path"].as_str().unwrap()
    }

    fn shape(&self) -> Vec<usize> {
        numbers(&self.row["shape"])
    }

    fn dtype(&self) -> DType {
        *DType::ALL.iter().find(|dtype| self.row["dtype"] == dtype.code()).unwrap()
    }

    fn width(&self) -> usize {
        usize::try_from(self.dtype().element_bytes().unwrap()).unwrap()
    }

    /// Origin and extents of a device's shard.
    fn region(&self, device: usize) -> (Vec<usize>, Vec<usize>) {
        let region = &self.row["regions"][device];
        (numbers(&region["offset"]), numbers(&region["shape"]))
    }
}

/// Calls `each` with the numbers of every element of a box.
fn for_each(extents: &[usize], each: &mut dyn FnMut(&[usize])) {
    let mut at = vec![0; extents.len()];
    if extents.contains(&0) {
        return;
    }
    loop {
        each(&at);
        let Some(axis) = (0..at.len()).rev().find(|axis| at[*axis] + 1 < extents[*axis]) else { return };
        at[axis] += 1;
        at[axis + 1..].fill(0);
    }
}

fn position(at: &[usize], extents: &[usize]) -> usize {
    at.iter().zip(extents).fold(0, |position, (at, extent)| position * extent + at)
}

/// Copies a box of elements into a whole; elements beyond the whole must be zeros. Returns the number of copied elements.
fn place(whole: &mut [u8], shape: &[usize], origin: &[usize], part: &[u8], extents: &[usize], width: usize) -> usize {
    assert_eq!(part.len(), extents.iter().product::<usize>() * width);
    let mut placed = 0;
    for_each(extents, &mut |at| {
        let element = &part[position(at, extents) * width..][..width];
        let target: Vec<usize> = at.iter().zip(origin).map(|(at, origin)| at + origin).collect();
        if target.iter().zip(shape).all(|(at, extent)| at < extent) {
            whole[position(&target, shape) * width..][..width].copy_from_slice(element);
            placed += 1;
        } else {
            assert!(element.iter().all(|byte| *byte == 0), "padding");
        }
    });
    placed
}

fn all_cases() -> Vec<(TempDir, ViewOptions)> {
    let mut cases = Vec::new();
    for mesh in ["", "fsdp=4", "fsdp=3", "replica=2,fsdp=3", "tensor=2,fsdp=2"] {
        cases.push((odd(), options(mesh)));
        cases.push((odd(), ViewOptions { layout: Layout::Hf, chunk_bytes_max: Some(50), ..options(mesh) }));
        cases.push((repo::llama(2, DType::F32), ViewOptions { dtype: Some(DType::BF16), ..options(mesh) }));
        cases.push((repo::llama(2, DType::BF16), ViewOptions { unscanned: true, ..options(mesh) }));
    }
    for mesh in ["expert=2", "expert=3,fsdp=2", "fsdp=2,expert=2"] {
        for unscanned in [false, true] {
            cases.push((experts(), ViewOptions { unscanned, ..options(mesh) }));
        }
    }
    // Inner and outer axes split together, by user rules.
    let rule = |text: &str, spec: &[&[&str]]| ShardRule {
        pattern: Pattern::parse(text).unwrap(),
        spec: spec.iter().map(|axes| axes.iter().map(|axis| (*axis).to_owned()).collect()).collect(),
    };
    let shard_rules = vec![rule("odd", &[&[], &["b"], &["a"]]), rule("line", &[&["b", "a"]])];
    cases.push((odd(), ViewOptions { shard_rules, ..options("a=2,b=3") }));
    cases
}

#[test]
fn chunks_of_arrays_are_the_tensors() {
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        let tree = shown.json("orbax/0/items/_METADATA");
        assert_eq!((&tree["use_zarr3"], &tree["use_ocdbt"]), (&Value::Bool(false), &Value::Bool(false)));
        let leaves = tree["tree_metadata"].as_object().unwrap();
        assert_eq!(leaves.len(), shown.bundled().count());
        let mut files = 2;
        for tensor in shown.bundled() {
            let keys: Vec<&str> = tensor.name().split('.').collect();
            let listed = leaves.values().find(|leaf| {
                let listed = leaf["key_metadata"].as_array().unwrap().iter();
                listed.map(|key| key["key"].as_str().unwrap()).eq(keys.iter().copied())
            });
            assert_eq!(listed.unwrap()["value_metadata"]["value_type"], "np.ndarray");
            let directory = format!("orbax/0/items/{}", tensor.name());
            let described = shown.json(&format!("{directory}/.zarray"));
            let (shape, chunk) = (numbers(&described["shape"]), numbers(&described["chunks"]));
            assert_eq!(shape, tensor.shape(), "{directory}");
            assert_eq!((&described["compressor"], &described["order"]), (&Value::Null, &Value::from("C")));
            assert!(chunk.iter().all(|extent| *extent > 0), "{directory}: {chunk:?}");
            let limit = options.chunk_bytes_max.unwrap_or(1 << 30);
            let chunk_bytes = chunk.iter().product::<usize>() * tensor.width();
            assert!(chunk_bytes as u64 <= limit, "{directory}: {chunk:?}");
            let raw = shown.read(&format!("full/{}", tensor.path()));
            let mut whole = vec![0xaa; raw.len()];
            let counts: Vec<usize> = shape.iter().zip(&chunk).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect();
            let mut elements = 0;
            files += 1;
            for_each(&counts, &mut |number| {
                let name: Vec<String> = number.iter().map(usize::to_string).collect();
                let name = if name.is_empty() { "0".to_owned() } else { name.join(".") };
                let origin: Vec<usize> = number.iter().zip(&chunk).map(|(number, chunk)| number * chunk).collect();
                let part = shown.read(&format!("{directory}/{name}"));
                elements += place(&mut whole, &shape, &origin, &part, &chunk, tensor.width());
                files += 1;
            });
            assert_eq!(elements, shape.iter().product::<usize>(), "{directory}");
            assert_eq!(whole, raw, "{directory}");
        }
        assert_eq!(shown.under("orbax/0/items/").len(), files);
    }
}

#[test]
fn a_chunk_is_a_devices_shard_where_the_split_is_even() {
    let shown = Shown::new(repo::llama(2, DType::BF16), &options("fsdp=2,tensor=2"));
    let chunk = shown.read("orbax/0/items/layers.scanned.wq/0.3.0");
    // Tensor parallelism splits outermost, and device 3 is the last of both axes.
    assert_eq!(chunk, shown.read("dev3/layers/scanned/wq"));
    let names = shown.under("orbax/0/items/layers.scanned.wq/");
    assert_eq!(names, [".zarray", "0.0.0", "0.1.0", "0.2.0", "0.3.0"]);
}

#[test]
fn the_checkpoint_states_whether_layers_are_stacked() {
    for (unscanned, layout, expected) in
        [(false, Layout::Canonical, true), (true, Layout::Canonical, false), (false, Layout::Hf, false)]
    {
        let shown = Shown::new(repo::llama(2, DType::BF16), &ViewOptions { unscanned, layout, ..options("") });
        for path in ["orbax/0/_CHECKPOINT_METADATA", "orbax/0/items/_CHECKPOINT_METADATA"] {
            let metadata = shown.json(path);
            assert_eq!(metadata["custom_metadata"]["scan_layers"], expected, "{path}");
            let time = metadata["commit_timestamp_nsecs"].as_u64().unwrap();
            assert!(time > 1_600_000_000_000_000_000, "{path}");
        }
        let handlers = &shown.json("orbax/0/_CHECKPOINT_METADATA")["item_handlers"];
        assert!(handlers["items"].as_str().unwrap().ends_with(".PyTreeCheckpointHandler"));
    }
}

#[test]
fn a_name_that_begins_another_is_a_leaf_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let rows =
        ["a", "a.b", "a.b.c", "a-b", "ab", "a/b", "b/c/d", "b/c.e", "100%"].map(|name| row(name, DType::F32, &[2]));
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let shown = Shown::new(dir, &ViewOptions { layout: Layout::Hf, ..options("") });
    let arrays: Vec<_> = shown.under("orbax/0/items/").into_iter().filter_map(|path| path.strip_suffix("/0")).collect();
    // A key with a slash is a path, unless that is inside another array.
    assert_eq!(arrays, ["100%", "a%2Fb", "a-b", "a._self", "a.b._self", "a.b.c", "ab", "b/c.e", "b/c/d"]);
    assert_eq!(shown.read("orbax/0/items/b/c/d/0"), shown.read("full/b%2Fc%2Fd"));
    assert_eq!(shown.read("orbax/0/items/b/c.e/0"), shown.read("full/b%2Fc.e"));
    let keys = shown.json("orbax/0/items/_METADATA")["tree_metadata"]["('b/c', 'e')"]["key_metadata"].clone();
    assert_eq!(keys[0]["key"], "b/c");
    assert_eq!(shown.read("orbax/0/items/a._self/0"), shown.read("full/a"));
    assert_eq!(shown.read("orbax/0/items/a.b.c/0"), shown.read("full/a.b.c"));
    assert_eq!(shown.read("orbax/0/items/a%2Fb/0"), shown.read("full/a%2Fb"));
}

#[test]
fn types_that_a_format_lacks_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let lacking = |shown: &Shown, formats: &[&str], reason: &str| {
        for format in formats {
            assert_eq!(shown.under(&format!("{format}/")), ["UNAVAILABLE.txt"]);
            let text = String::from_utf8(shown.read(&format!("{format}/UNAVAILABLE.txt"))).unwrap();
            assert!(text.contains("packed") && text.contains(reason), "{text}");
        }
    };
    for (dtype, shape, reason) in [(DType::F6E2M3, [4, 8], "F6_E2M3"), (DType::F4, [4, 3], "F4")] {
        let dir = tempfile::tempdir().unwrap();
        repo::write_repo(dir.path(), &[&[row("packed", dtype, &shape)]], &serde_json::json!({}));
        lacking(&Shown::new(dir, &options("fsdp=2")), &["orbax", "pt", "dcp"], reason);
    }
    let rows = [row("packed", DType::F4, &[4, 6]), row("plain", DType::F32, &[4])];
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let shown = Shown::new(dir, &options("fsdp=2"));
    lacking(&shown, &["orbax"], "F4");
    // torch has them as pairs.
    for path in ["pt/dev1.pt", "dcp/.metadata"] {
        let bytes = shown.read(path);
        assert!(bytes.windows(22).any(|name| name == b"torch\nfloat4_e2m1fn_x2"), "{path}");
    }
    // Bytes of packed elements are available as arrays of bytes.
    let file = shown.read("npy/dev1/packed.npy");
    assert!(String::from_utf8_lossy(&file[..100]).contains("'descr': '|u1', 'fortran_order': False, 'shape': (2, 3)"));
}

#[test]
fn npy_files_are_the_raw_files_with_a_header() {
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        for device in 0..shown.devices() {
            assert_eq!(shown.under(&format!("npy/dev{device}/")).len(), shown.bundled().count());
            for tensor in shown.bundled() {
                let path = format!("npy/dev{device}/{}.npy", tensor.path());
                let file = shown.read(&path);
                assert_eq!(&file[..8], b"\x93NUMPY\x01\x00", "{path}");
                let header = 10 + usize::from(u16::from_le_bytes([file[8], file[9]]));
                assert_eq!(header % 4096, 0, "{path}");
                let dictionary = std::str::from_utf8(&file[10..header]).unwrap();
                let (_, extents) = tensor.region(device);
                let inner: Vec<String> = extents.iter().map(|extent| format!("{extent},")).collect();
                let squeezed = dictionary.replace(' ', "");
                let (squeezed, tuple) = (squeezed.replace(",)", ")"), inner.concat().trim_end_matches(',').to_owned());
                assert!(squeezed.contains(&format!("'shape':({tuple})")), "{path}: {dictionary}");
                assert_eq!(&file[header..], shown.read(&format!("dev{device}/{}", tensor.path())), "{path}");
            }
        }
    }
}

/// Metadata of a safetensors file.
fn metadata(file: &[u8]) -> Value {
    let len = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    header["__metadata__"].clone()
}

#[test]
fn device_files_say_where_their_shards_are() {
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        let mut seen: BTreeMap<(String, Vec<usize>), Vec<usize>> = BTreeMap::new();
        for device in 0..shown.devices() {
            let found = metadata(&shown.read(&format!("safetensors/dev{device}.safetensors")));
            assert_eq!((&found["format"], &found["DCP_VERSION"]), (&Value::from("pt"), &Value::from("1.0")));
            let info: Value = serde_json::from_str(found["DCP_SHARDING_INFO"].as_str().unwrap()).unwrap();
            assert_eq!(info.as_object().unwrap().len(), shown.bundled().count());
            assert_eq!(found["CKFS_FILES"], shown.devices().to_string().as_str());
            for tensor in shown.bundled() {
                let (origin, extents) = tensor.region(device);
                let offsets = numbers(&info[tensor.name()]["saved_offsets"]);
                assert_eq!(numbers(&info[tensor.name()]["global_shape"]), tensor.shape());
                if !extents.contains(&0) {
                    assert_eq!(offsets, origin, "{}", tensor.name());
                }
                // Readers find a shard by its offsets, and compute the extent of the whole from the ends.
                let held = seen.entry((tensor.name().to_owned(), offsets.clone())).or_insert_with(|| extents.clone());
                assert_eq!(*held, extents, "{} at {offsets:?}", tensor.name());
                let fits =
                    offsets.iter().zip(&extents).zip(tensor.shape()).all(|((at, extent), whole)| at + extent <= whole);
                assert!(fits, "{}", tensor.name());
            }
        }
    }
}

#[test]
fn an_index_exists_only_where_every_tensor_is_whole_in_one_file() {
    let index = "safetensors/model.safetensors.index.json";
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        let whole_on = |tensor: &Tensor<'_>| (0..shown.devices()).find(|d| tensor.region(*d).1 == tensor.shape());
        let expected = shown.bundled().all(|tensor| whole_on(&tensor).is_some());
        assert_eq!(shown.files.contains_key(index), expected);
        if expected {
            let map = shown.json(index)["weight_map"].clone();
            for tensor in shown.bundled() {
                let file = format!("dev{}.safetensors", whole_on(&tensor).unwrap());
                assert_eq!(map[tensor.name()], file.as_str());
            }
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()))
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    usize::try_from(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())).unwrap()
}

/// Entries of a zip archive by its central directory, each checked against its local header: name, offset of its data,
/// length.
fn unzip(bytes: &[u8]) -> Vec<(String, usize, usize)> {
    let end = bytes.len() - 22;
    assert_eq!(&bytes[end..end + 4], b"PK\x05\x06");
    let (count, len, start) = (u16_at(bytes, end + 10), u32_at(bytes, end + 12), u32_at(bytes, end + 16));
    assert_eq!(start + len, end);
    let mut at = start;
    let mut entries = Vec::new();
    for _ in 0..count {
        assert_eq!(&bytes[at..at + 4], b"PK\x01\x02");
        let (name_len, extra, local) = (u16_at(bytes, at + 28), u16_at(bytes, at + 30), u32_at(bytes, at + 42));
        let name = &bytes[at + 46..at + 46 + name_len];
        assert_eq!(&bytes[local..local + 4], b"PK\x03\x04");
        assert_eq!(&bytes[local + 30..local + 30 + name_len], name);
        // Version, flags, method, time and date, checksum and sizes are equal in both.
        assert_eq!(bytes[at + 6..at + 28], bytes[local + 4..local + 26]);
        let data = local + 30 + name_len + u16_at(bytes, local + 28);
        entries.push((String::from_utf8(name.to_vec()).unwrap(), data, u32_at(bytes, at + 24)));
        at += 46 + name_len + extra;
    }
    assert_eq!(at, end);
    entries
}

fn entry<'a>(archive: &'a [u8], entries: &[(String, usize, usize)], name: &str) -> &'a [u8] {
    let (_, start, len) = entries.iter().find(|(found, ..)| found == name).unwrap_or_else(|| panic!("{name}"));
    &archive[*start..start + len]
}

#[test]
fn pt_archives_hold_the_shards() {
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        for device in 0..shown.devices() {
            let archive = shown.read(&format!("pt/dev{device}.pt"));
            let entries = unzip(&archive);
            assert_eq!(entries[0].0, "archive/data.pkl");
            assert_eq!(entry(&archive, &entries, "archive/version"), b"3\n");
            let pickle = entry(&archive, &entries, "archive/data.pkl");
            let mut held: Vec<&[u8]> = Vec::new();
            for (name, start, len) in &entries {
                assert_eq!(start % 64, 0, "{name}");
                if name.starts_with("archive/data/") {
                    held.push(&archive[*start..start + len]);
                }
            }
            assert_eq!(held.len(), shown.bundled().count());
            for tensor in shown.bundled() {
                let word = tensor.name().as_bytes();
                assert!(pickle.windows(word.len()).any(|window| window == word));
                let raw = shown.read(&format!("dev{device}/{}", tensor.path()));
                assert!(held.contains(&raw.as_slice()), "{}", tensor.name());
            }
        }
    }
}

/// The value of a pickle that uses the opcodes of our writer: objects keep their class name and state.
#[derive(Clone, Debug, PartialEq)]
enum Pickled {
    Mark,
    None,
    Bool(bool),
    Int(u64),
    Text(String),
    Global(String),
    Tuple(Vec<Pickled>),
    List(Vec<Pickled>),
    Dict(Vec<(Pickled, Pickled)>),
    Object(String, Box<Pickled>),
    Call(String, Vec<Pickled>),
}

impl Pickled {
    fn member(&self, name: &str) -> &Self {
        let Self::Object(_, state) = self else { panic!("{self:?}") };
        state.get(name)
    }

    fn get(&self, name: &str) -> &Self {
        let Self::Dict(pairs) = self else { panic!("{self:?}") };
        let found = pairs.iter().find(|(key, _)| *key == Self::Text(name.to_owned()));
        &found.unwrap_or_else(|| panic!("{name} in {self:?}")).1
    }

    fn size(&self) -> Vec<usize> {
        let Self::Call(what, arguments) = self else { panic!("{self:?}") };
        assert_eq!(what, "torch Size");
        let [Self::Tuple(extents)] = arguments.as_slice() else { panic!("{self:?}") };
        extents.iter().map(Self::int).collect()
    }

    fn int(&self) -> usize {
        let Self::Int(number) = self else { panic!("{self:?}") };
        usize::try_from(*number).unwrap()
    }
}

fn unpickle(bytes: &[u8]) -> Pickled {
    let mut stack: Vec<Pickled> = Vec::new();
    let mut memo = BTreeMap::new();
    let mut at = 2;
    let mut take = |n: usize| {
        at += n;
        &bytes[at - n..at]
    };
    loop {
        match take(1)[0] {
            b'N' => stack.push(Pickled::None),
            0x89 => stack.push(Pickled::Bool(false)),
            b')' => stack.push(Pickled::Tuple(Vec::new())),
            b'}' => stack.push(Pickled::Dict(Vec::new())),
            b']' => stack.push(Pickled::List(Vec::new())),
            b'(' => stack.push(Pickled::Mark),
            b'K' => stack.push(Pickled::Int(u64::from(take(1)[0]))),
            b'M' => stack.push(Pickled::Int(u16_at(take(2), 0) as u64)),
            b'J' => stack.push(Pickled::Int(u32_at(take(4), 0) as u64)),
            0x8a => {
                let len = usize::from(take(1)[0]);
                let digits = take(len).iter().rev();
                stack.push(Pickled::Int(digits.fold(0, |number, byte| number << 8 | u64::from(*byte))));
            }
            b'0' => drop(stack.pop()),
            b'X' => {
                let len = u32_at(take(4), 0);
                stack.push(Pickled::Text(String::from_utf8(take(len).to_vec()).unwrap()));
            }
            b'c' => {
                let mut words = [String::new(), String::new()];
                for word in &mut words {
                    while let [byte] = take(1)
                        && *byte != b'\n'
                    {
                        word.push(char::from(*byte));
                    }
                }
                stack.push(Pickled::Global(words.join(" ")));
            }
            b'q' => drop(memo.insert(usize::from(take(1)[0]), stack.last().unwrap().clone())),
            b'r' => drop(memo.insert(u32_at(take(4), 0), stack.last().unwrap().clone())),
            b'h' => stack.push(memo[&usize::from(take(1)[0])].clone()),
            b'j' => stack.push(memo[&u32_at(take(4), 0)].clone()),
            b't' => {
                let mark = stack.iter().rposition(|value| *value == Pickled::Mark).unwrap();
                let items = stack.split_off(mark + 1);
                stack[mark] = Pickled::Tuple(items);
            }
            0x85 => {
                let item = stack.pop().unwrap();
                stack.push(Pickled::Tuple(vec![item]));
            }
            code @ (b'R' | 0x81) => {
                let (Some(Pickled::Tuple(arguments)), Some(Pickled::Global(name))) = (stack.pop(), stack.pop()) else {
                    panic!("a call of something else");
                };
                let object = Pickled::Object(name.clone(), Box::new(Pickled::None));
                stack.push(if code == b'R' { Pickled::Call(name, arguments) } else { object });
            }
            b'b' => {
                let given = stack.pop().unwrap();
                let Some(Pickled::Object(_, state)) = stack.last_mut() else { panic!("state of no object") };
                **state = given;
            }
            b's' => {
                let (value, key) = (stack.pop().unwrap(), stack.pop().unwrap());
                let Some(Pickled::Dict(pairs)) = stack.last_mut() else { panic!("an item of no dictionary") };
                pairs.push((key, value));
            }
            b'a' => {
                let value = stack.pop().unwrap();
                let Some(Pickled::List(items)) = stack.last_mut() else { panic!("an item of no list") };
                items.push(value);
            }
            b'.' => break,
            code => panic!("opcode {code:#x}"),
        }
    }
    assert_eq!((at, stack.len()), (bytes.len(), 1));
    stack.remove(0)
}

#[test]
fn segments_of_a_distributed_checkpoint_are_the_tensors() {
    for (dir, options) in all_cases() {
        let shown = Shown::new(dir, &options);
        let metadata = unpickle(&shown.read("dcp/.metadata"));
        let (described, Pickled::Dict(segments)) =
            (metadata.member("state_dict_metadata"), metadata.member("storage_data"))
        else {
            panic!("{metadata:?}")
        };
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut used = 0;
        for tensor in shown.bundled() {
            let about = described.get(tensor.name());
            assert_eq!(about.member("size").size(), tensor.shape(), "{}", tensor.name());
            let Pickled::List(chunks) = about.member("chunks") else { panic!("{about:?}") };
            let raw = shown.read(&format!("full/{}", tensor.path()));
            let mut whole = vec![0xaa; raw.len()];
            let mut elements = 0;
            for (number, chunk) in chunks.iter().enumerate() {
                let (origin, extents) = (chunk.member("offsets").size(), chunk.member("sizes").size());
                let fqn = Pickled::Text(tensor.name().to_owned());
                let mut found = segments
                    .iter()
                    .filter(|(key, _)| *key.member("fqn") == fqn && key.member("offset").size() == origin);
                let (Some((key, info)), None) = (found.next(), found.next()) else { panic!("{}", tensor.name()) };
                assert_eq!(key.member("index").int(), number);
                let Pickled::Text(path) = info.member("relative_path") else { panic!("{info:?}") };
                let file = files.entry(path.clone()).or_insert_with(|| shown.read(&format!("dcp/{path}")));
                let (offset, length) = (info.member("offset").int(), info.member("length").int());
                let archive = &file[offset..offset + length];
                let part = entry(archive, &unzip(archive), "archive/data/0");
                elements += place(&mut whole, &tensor.shape(), &origin, part, &extents, tensor.width());
                used += 1;
            }
            assert_eq!(elements, tensor.shape().iter().product::<usize>(), "{}: {chunks:?}", tensor.name());
            assert_eq!(whole, raw, "{}", tensor.name());
        }
        assert_eq!(used, segments.len());
        let listed: Vec<_> = shown.under("dcp/").into_iter().filter(|name| name.ends_with(".distcp")).collect();
        assert!(files.keys().all(|name| listed.contains(&name.as_str())));
        let common = shown.read("dcp/common.pt");
        let pickle = unpickle(entry(&common, &unzip(&common), "archive/data.pkl"));
        assert_eq!(pickle.get("iteration").int(), 0);
        assert_eq!(shown.json("dcp/metadata.json")["sharded_backend"], "torch_dist");
    }
}

#[test]
fn a_distributed_checkpoint_is_complete_for_any_listed_devices() {
    let devices = Some(vec![2]);
    let shown = Shown::new(repo::llama(2, DType::BF16), &ViewOptions { devices, ..options("fsdp=4") });
    let files = shown.under("dcp/");
    for device in 0..4 {
        assert!(files.contains(&format!("__{device}_0.distcp").as_str()), "{files:?}");
    }
    assert_eq!(shown.under("pt/"), ["dev2.pt"]);
    assert!(shown.files.contains_key("npy/dev2/embed.npy") && !shown.files.contains_key("npy/dev0/embed.npy"));
}

#[test]
fn copies_are_stored_once_in_a_distributed_checkpoint() {
    let shown = Shown::new(repo::llama(2, DType::BF16), &options("replica=4,fsdp=2"));
    let names: Vec<_> = shown.under("dcp/").into_iter().filter(|name| name.ends_with(".distcp")).collect();
    assert_eq!(names, ["__0_0.distcp", "__1_0.distcp"]);
}

#[test]
fn nodes_of_arrays_agree_with_each_other() {
    let shown = Shown::new(odd(), &options("fsdp=2"));
    let items = shown.volume.resolve("orbax/0/items").unwrap();
    assert_eq!(items.kind, NodeKind::Directory);
    assert_eq!(items.links as usize, 2 + shown.bundled().count());
    assert_eq!(
        ckfs::volume::Nodes::parent(&shown.volume, items.ino).unwrap(),
        shown.volume.resolve("orbax/0").unwrap().ino
    );
    for (path, ino) in shown.files.iter().filter(|(path, _)| path.starts_with("orbax/")) {
        assert_eq!(shown.volume.resolve(path).unwrap().ino, *ino, "{path}");
        let directory = path.rsplit_once('/').unwrap().0;
        assert_eq!(
            ckfs::volume::Nodes::parent(&shown.volume, *ino).unwrap(),
            shown.volume.resolve(directory).unwrap().ino,
            "{path}"
        );
        assert!(ckfs::volume::Nodes::xattr_names(&shown.volume, *ino).unwrap().is_empty());
        assert!(shown.volume.open(*ino).is_ok(), "{path}");
    }
    let array = shown.volume.resolve("orbax/0/items/odd").unwrap();
    for name in ["2.0.0", "0.0", "00.0.0", "c", "", ".zattrs"] {
        assert_eq!(shown.volume.lookup(array.ino, name.as_bytes()), Err(FsError::NotFound), "{name}");
    }
    assert_eq!(shown.volume.open(array.ino).unwrap_err(), FsError::IsDirectory);
    let chunk = shown.volume.resolve("orbax/0/items/odd/1.0.0").unwrap();
    assert_eq!(shown.volume.lookup(chunk.ino, b"x"), Err(FsError::NotDirectory));
    // A listing may start at any entry.
    for from in 0..4 {
        let mut names = Vec::new();
        let mut list = |entry: ckfs::volume::DirEntry<'_>| {
            names.push(String::from_utf8(entry.name.to_vec()).unwrap());
            std::ops::ControlFlow::Break(())
        };
        shown.volume.read_dir(array.ino, from, &mut list).unwrap();
        let all = [".zarray", "0.0.0", "1.0.0"];
        assert_eq!(names, all.get(usize::try_from(from).unwrap()).copied().into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn thousands_of_arrays_for_a_thousand_devices_cost_little() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<_> = (0..2000).map(|n| row(&format!("w{n}"), DType::F32, &[1024])).collect();
    repo::write_repo(dir.path(), &[&rows], &serde_json::json!({}));
    let checkpoint = repo::open(dir.path());
    let start = std::time::Instant::now();
    let volume = repo::volume(&checkpoint, &options("fsdp=1024"), VolumeOptions::default());
    assert!(start.elapsed().as_secs() < 120, "{:?}", start.elapsed());
    assert!(ckfs::volume::Nodes::stat_fs(&volume).nodes > 2000 * 1024 * 3);
    let chunk = volume.resolve("orbax/0/items/w1999/1023").unwrap();
    assert_eq!(chunk.size_bytes, 4);
    let raw = volume.resolve("dev1023/w1999").unwrap();
    assert_eq!(repo::read(&volume, chunk.ino, 0, 100), repo::read(&volume, raw.ino, 0, 100));
}

/// A new format needs only its file and its line in the list, as long as nothing above the layer names a format.
#[test]
fn the_volume_names_no_format() {
    let names: Vec<&str> = ckfs::image::FORMATS.iter().map(|format| format.name).collect();
    assert_eq!(names.len(), names.iter().collect::<BTreeSet<_>>().len(), "{names:?}");
    let mut paths = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/volume")];
    let mut found = Vec::new();
    let mut seen = 0;
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            paths.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
        for line in code {
            seen += 1;
            let mut words = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            if words.any(|word| names.iter().any(|name| name.eq_ignore_ascii_case(word))) {
                found.push(format!("{}: {line}", path.display()));
            }
        }
    }
    assert!(seen > 1000, "the code was read: {seen} lines");
    assert!(found.is_empty(), "{found:#?}");
}
