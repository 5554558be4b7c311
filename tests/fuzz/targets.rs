//! Every parser of bytes that others write: what holds for any input. Shared by the tests, which mutate valid input and run the
//! corpus, and by the coverage-guided runs.
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a check fails by panicking")]

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use ckfs_checkpoint::{Checkpoint, OpenOptions};
use ckfs_config::{Allow, FileSettings, LayerRanges, Mesh, Pattern, Rename, options};
use ckfs_format::{
    dcp::read::DcpState,
    gguf::Gguf,
    ocdbt::{KeyRange, Manifest, NodeRef, Version, Walk},
    orbax::read as orbax_state,
    pickle::read::{self as unpickle, Id, Limits, Unpickled},
    safetensors::{Header, tensor_bytes},
    torch::{read::TorchArchive, state as torch_state},
    zarr::read::Array,
};
use ckfs_plan::{Layout, LayoutFile, Plan, ViewOptions, expr};
use ckfs_tensor::Shape;

/// A parser.
pub struct Target {
    pub name: &'static str,
    /// Panics if something does not hold that must hold for any input. Whether the input was accepted.
    pub check: fn(&[u8]) -> bool,
    /// The files of `tests/fixtures/formats`, and the members of these, that have valid input for it in hexadecimal digits or as
    /// text.
    pub seeds: &'static [(&'static str, &'static [&'static str])],
    /// Other valid input.
    pub texts: &'static [&'static str],
}

const CONFIGS: &[&str] = &[
    r#"{"model_type":"deepseek_v3","num_hidden_layers":1,"quantization_config":{"quant_method":"fp8","weight_block_size":[2,2]}}"#,
    r#"{"text_config":{"num_hidden_layers":2},"quantization_config":{"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{"group_0":{"weights":{"strategy":"block","block_structure":"2x2","num_bits":8}}},"ignore":["lm_head","re:.*gate$"]}}"#,
    r#"{"architectures":["LlamaForCausalLM"],"tie_word_embeddings":true,"num_hidden_layers":2,"layer_types":["full_attention","sliding_attention"]}"#,
    r#"{"model_type":"llama","quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"desc_act":true,"dynamic":{"-:.*down":{}}}}"#,
];

const LLAMA: &str = r#"{"model_type":"llama","architectures":["LlamaForCausalLM"],"hidden_size":32,"intermediate_size":32,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":64,"max_position_embeddings":64}"#;
const TOKENIZER: &str = r#"{"added_tokens":[{"id":3,"content":"<|a|>","special":true},{"id":4,"content":"▁b"}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},{"type":"ByteLevel"}]},"post_processor":{"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|a|>"}},{"Sequence":{"id":"A"}}],"pair":[{"SpecialToken":{"id":"<|a|>"}},{"Sequence":{"id":"A"}},{"SpecialToken":{"id":"<|a|>"}},{"Sequence":{"id":"B"}}]}]},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}"#;
const FALLBACK: &str = r#"{"added_tokens":[{"id":3,"content":"<s>","special":true}],"decoder":{"type":"Sequence"},"model":{"type":"BPE","byte_fallback":true,"vocab":{"<0x41>":0,"b":1,"<s>":2},"merges":["a b"]}}"#;
const TOKENIZER_CONFIG: &str = r#"{"bos_token":"<|a|>","eos_token":{"content":"▁b"},"add_bos_token":true,"add_prefix_space":false,"added_tokens_decoder":{"5":{"content":"c","special":true}},"chat_template":[{"name":"default","template":"x"},{"name":"a b","template":"y"}]}"#;
const CARD: &str = "---\nlicense: [mit, \"x\"]\nname: a # b\nbase_model:\n- org/Model-7B-v1\n- https://huggingface.co/a/b\nwidget:\n  - text: |\n     c\nlanguage:\n  - no\n---\n# Title\n";

pub const TARGETS: &[Target] = &[
    Target { name: "safetensors", check: safetensors_header, seeds: &[], texts: &[] },
    Target { name: "manifest", check: ocdbt_manifest, seeds: &[], texts: &[] },
    Target { name: "node", check: ocdbt_node, seeds: &[], texts: &[] },
    Target {
        name: "zarr2",
        check: |bytes| zarr(Array::parse_v2(bytes).ok()),
        seeds: &[("zarr.json", &["metadata"])],
        texts: &[],
    },
    Target {
        name: "zarr3",
        check: |bytes| zarr(Array::parse_v3(bytes).ok()),
        seeds: &[("zarr.json", &["metadata"])],
        texts: &[],
    },
    Target {
        name: "archive",
        check: archive,
        seeds: &[("torch.json", &["archive 2", "archive 3", "archive 4"])],
        texts: &[],
    },
    Target {
        name: "gguf",
        check: gguf,
        seeds: &[("gguf.json", &["llama", "gemma2", "gpt-oss", "deepseek2", "other"])],
        texts: &[],
    },
    Target { name: "sentence_pieces", check: |bytes| written("tokenizer.model", bytes), seeds: &[], texts: &[] },
    Target {
        name: "tokenizer_json",
        check: |bytes| written("tokenizer.json", bytes),
        seeds: &[],
        texts: &[TOKENIZER, FALLBACK],
    },
    Target {
        name: "tokenizer_config",
        check: |bytes| written("tokenizer_config.json", bytes),
        seeds: &[],
        texts: &[TOKENIZER_CONFIG],
    },
    Target { name: "model_card", check: |bytes| written("README.md", bytes), seeds: &[], texts: &[CARD] },
    Target { name: "pickle", check: pickle, seeds: &[("torch.json", &[".metadata"])], texts: &[] },
    Target { name: "dcp", check: dcp, seeds: &[("torch.json", &[".metadata"])], texts: &[] },
    Target {
        name: "orbax",
        check: orbax,
        seeds: &[("orbax.json", &["_METADATA", "_CHECKPOINT_METADATA"])],
        texts: &[],
    },
    Target { name: "config_json", check: config_json, seeds: &[], texts: CONFIGS },
    Target {
        name: "index",
        check: index,
        seeds: &[],
        texts: &[
            r#"{"metadata":{"total_size":8},"weight_map":{"a.weight":"model.safetensors"}}"#,
            r#"{"weight_map":{"a.weight":"model.safetensors","b.weight":"../x"}}"#,
        ],
    },
    Target {
        name: "settings",
        check: settings,
        seeds: &[],
        texts: &[
            "source = \"org/name\"\nmountpoint = \"/mnt/x\"\nmesh = \"fsdp=4,tensor=2\"\ndtype = \"bf16\"\n[mount]\ncache_bytes = \"1G\"\nsource_timeout = \"5s\"\n[view.train]\nlayout = \"maxtext\"\ndevices = \"0-3\"\n",
            "source='x'\nset=['scan=true','a=1']\nshard=['*.wq=fsdp,_']\ninclude=['a*']\n[view.a]\n[view.b]\nlayers='0-3'\n",
        ],
    },
    Target {
        name: "words",
        check: words,
        seeds: &[],
        texts: &[
            "fsdp=4,tensor=2",
            "fsdp=8",
            "0-3,7",
            "model.layers.{0-1}.*",
            "a\\.(b)=>$1",
            "mesh=fsdp=4:tensor=2,allow_other,set=scan=true",
            "a*.weight",
        ],
    },
    Target {
        name: "layout",
        check: layout,
        seeds: &[],
        texts: &[include_str!("../../src/plan/layouts/maxtext/llama.toml")],
    },
    Target {
        name: "expression",
        check: expression,
        seeds: &[],
        texts: &[
            "transpose(reshape(a, 2, 3), 1, 0)",
            "0..num_layers",
            "(a + 1) * 2 / b - c",
            "stack(x, i, 0..n)",
            "_ , a, _",
            "layers.{i}.w",
        ],
    },
];

/// Valid input for a target.
pub fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let mut found: Vec<Vec<u8>> = target.texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    for (file, members) in target.seeds {
        members_of(&fixture(file), members, &mut found);
    }
    match target.name {
        "safetensors" => {
            let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"b":{"dtype":"F4","shape":[4],"data_offsets":[8,10]}}"#;
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(&[0x5a; 10]);
            found.push(bytes);
        }
        "sentence_pieces" => {
            found.push(b"\x0a\x09\x0a\x02ab\x15\0\0\xc0\x3f\x12\x02zz\x0a\x05\x0a\x01\x3c\x18\x06".to_vec());
        }
        // Without mark, length and checksum, which the target adds.
        "manifest" => found.extend(databases().iter().map(|database| body(&database.manifest))),
        "node" => found.extend(databases().iter().flat_map(|database| &database.root).map(|(_, block)| body(block))),
        _ => {}
    }
    found
}

/// Inputs that once reached something new, as hexadecimal digits, one a line.
pub fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let path = root().join("tests/fuzz/corpus").join(format!("{}.hex", target.name));
    fs::read_to_string(path).unwrap_or_default().lines().map(bytes_of).collect()
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().find(|path| path.join("tests/fuzz/targets.rs").is_file());
    root.unwrap().to_owned()
}

fn fixture(name: &str) -> serde_json::Value {
    let path = root().join("tests/fixtures/formats").join(name);
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

pub fn bytes_of(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// The values of members whose names end so.
fn members_of(value: &serde_json::Value, names: &[&str], found: &mut Vec<Vec<u8>>) {
    match value {
        serde_json::Value::Object(members) => {
            for (name, member) in members {
                match member.as_str().filter(|_| names.iter().any(|ending| name.ends_with(ending))) {
                    Some(text) if text.len() % 2 == 0 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                        found.push(bytes_of(text));
                    }
                    Some(text) => found.push(text.as_bytes().to_vec()),
                    None => members_of(member, names, found),
                }
            }
        }
        serde_json::Value::Array(elements) => elements.iter().for_each(|element| members_of(element, names, found)),
        _ => {}
    }
}

fn place(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

fn safetensors_header(bytes: &[u8]) -> bool {
    match Header::parse_file(bytes, bytes.len() as u64) {
        Ok(header) => {
            check_header(&header, bytes);
            true
        }
        Err(errors) => {
            assert!(!errors.problems.is_empty() && !errors.to_string().is_empty());
            false
        }
    }
}

/// A header whose tensors are in the file, and a checkpoint, or a refusal.
fn gguf(bytes: &[u8]) -> bool {
    let Ok(header) = Gguf::parse(bytes, bytes.len() as u64) else { return false };
    for tensor in &header.tensors {
        assert!(tensor.start.checked_add(tensor.bytes).is_some_and(|end| end <= bytes.len() as u64));
    }
    let read = |checkpoint: &Checkpoint| {
        for (id, info) in checkpoint.tensors().filter(|(_, info)| info.bytes() < 1 << 20) {
            assert!(!checkpoint.files_of(id).is_empty() || info.bytes() == 0);
        }
    };
    opened("model.gguf", bytes, |directory| directory.join("model.gguf"), read)
}

/// The invariants of every accepted header.
pub fn check_header(header: &Header, bytes: &[u8]) {
    let mut end = None;
    for tensor in header.tensors() {
        assert!(end.is_none_or(|end| end == tensor.start), "contiguous");
        assert_eq!(tensor_bytes(tensor.dtype, tensor.shape), Some(tensor.end - tensor.start));
        end = Some(tensor.end);
    }
    assert!(end.is_none_or(|end| end == bytes.len() as u64), "to the end of the file");
    let theirs = safetensors::SafeTensors::deserialize(bytes).expect("never laxer than the official crate");
    assert_eq!(theirs.len(), header.len());
}

/// Files with their paths.
type Files = Vec<(String, Vec<u8>)>;

/// The databases of the fixtures, by name.
pub fn ocdbt_files() -> Vec<(String, Files)> {
    let databases = fixture("ocdbt.json");
    let files = |database: &serde_json::Value| {
        let files = database["files"].as_object().unwrap().iter();
        files.map(|(path, hex)| (path.clone(), bytes_of(hex.as_str().unwrap()))).collect()
    };
    databases.as_object().unwrap().iter().map(|(name, database)| (name.clone(), files(database))).collect()
}

/// Length and CRC-32C of a block, corrected.
pub fn seal(block: &mut [u8]) {
    if block.len() < 18 {
        return;
    }
    let len = block.len() as u64;
    block[4..12].copy_from_slice(&len.to_le_bytes());
    let end = block.len() - 4;
    let sum = crc32c::crc32c(&block[..end]);
    block[end..].copy_from_slice(&sum.to_le_bytes());
}

/// A database of the fixtures.
struct Database {
    manifest: Vec<u8>,
    latest: Option<Version>,
    /// Its root, if the database has keys.
    root: Option<(NodeRef, Vec<u8>)>,
}

fn databases() -> &'static [Database] {
    static DATABASES: OnceLock<Vec<Database>> = OnceLock::new();
    DATABASES.get_or_init(|| {
        let database = |(_, files): (String, Files)| {
            let file = |wanted: &str| files.iter().find(|(path, _)| path == wanted).map(|(_, bytes)| bytes);
            let manifest = file("manifest.ocdbt").unwrap().clone();
            let latest = Manifest::parse(&manifest).ok().and_then(|manifest| manifest.latest);
            let root = latest.as_ref().and_then(|version| {
                let node = Walk::new(version, vec![KeyRange::all()]).take_wanted().into_iter().next()?;
                let place = place(node.location.offset)..place(node.location.end());
                Some((node.clone(), file(&node.location.path)?.get(place)?.to_vec()))
            });
            Database { manifest, latest, root }
        };
        ocdbt_files().into_iter().map(database).collect()
    })
}

/// What follows the mark and the length of a block, without the checksum.
fn body(block: &[u8]) -> Vec<u8> {
    block[12..block.len() - 4].to_vec()
}

/// A block with this mark and body, and with right length and checksum.
fn sealed(mark: [u8; 4], body: &[u8]) -> Vec<u8> {
    let mut block = mark.to_vec();
    block.extend_from_slice(&[0; 8]);
    block.extend_from_slice(body);
    block.extend_from_slice(&[0; 4]);
    seal(&mut block);
    block
}

fn ocdbt_manifest(body: &[u8]) -> bool {
    Manifest::parse(&sealed([0x0c, 0xdb, 0x3a, 0x2a], body)).is_ok()
}

/// A node in the place of each root.
fn ocdbt_node(body: &[u8]) -> bool {
    let block = sealed([0x0c, 0xdb, 0x20, 0xde], body);
    let mut accepted = false;
    for database in databases() {
        let (Some(version), Some((root, _))) = (&database.latest, &database.root) else { continue };
        let mut node = root.clone();
        node.location.len_bytes = block.len() as u64;
        let mut last: Option<Vec<u8>> = None;
        let read = Walk::new(version, vec![KeyRange::all()]).read(&node, &block, &mut |key, _| {
            assert!(last.as_ref().is_none_or(|last| last.as_slice() < key), "increasing keys");
            last = Some(key.to_vec());
        });
        accepted |= read.is_ok();
    }
    accepted
}

fn zarr(array: Option<Array>) -> bool {
    array.inspect(|array| check_array(array, &[0x28, 0xb5, 0x2f, 0xfd, 7, 200, 3, 1])).is_some()
}

/// The invariants of every accepted array, with some bytes as a stored chunk.
pub fn check_array(array: &Array, stored: &[u8]) {
    let extents = array.shape.extents();
    assert!(Shape::try_new(extents).is_ok() && extents.len() == array.chunk.len());
    let grid = array.grid();
    if grid.iter().all(|count| *count > 0) {
        for numbers in [grid.iter().map(|_| 0).collect(), grid.iter().map(|count| count - 1).collect::<Vec<u64>>()] {
            assert_eq!(array.numbers(&array.key(&numbers)).unwrap().as_slice(), numbers);
        }
    }
    if let Some(strides) = array.codecs.plain(array.dtype, &array.chunk) {
        let last: u64 = strides.iter().zip(&array.chunk).map(|(stride, extent)| stride * (extent - 1)).sum();
        assert_eq!(last + 1, array.chunk.iter().product::<u64>());
    }
    if array.chunk_bytes() <= 1 << 16 {
        let mut target = vec![0; place(array.chunk_bytes())];
        drop(array.decode(stored, &mut target));
        let mut whole = stored.to_vec();
        whole.resize(place(array.chunk_bytes()), 1);
        drop(array.decode(&whole, &mut target));
    }
}

fn archive(bytes: &[u8]) -> bool {
    let mut archive = TorchArchive::new(bytes.len() as u64, torch_state::is_allowed);
    while !archive.wanted().is_empty() {
        let spans = archive.wanted().iter().map(|span| bytes[place(span.start)..place(span.end)].to_vec()).collect();
        if archive.supply(spans).is_err() {
            return false;
        }
    }
    let Ok(contents) = archive.into_opened().expect("nothing more is wanted").contents() else { return false };
    for saved in &contents.tensors {
        assert!(saved.span().end <= bytes.len() as u64, "{saved:?}");
    }
    true
}

/// Visits objects that a value refers to: every id is one of the pickle's own.
fn visit(pickle: &Unpickled, id: Id, left: &mut u32) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    for element in pickle.sequence(id).unwrap_or_default() {
        visit(pickle, *element, left);
    }
    for (key, value) in pickle.items(id).unwrap_or_default() {
        visit(pickle, *key, left);
        visit(pickle, *value, left);
    }
    if let Some((_, args, object)) = pickle.call(id) {
        args.iter().chain(&object.state).for_each(|id| visit(pickle, *id, left));
    }
}

pub fn pickle(bytes: &[u8]) -> bool {
    let Ok(pickle) = unpickle::read(bytes, Limits::default(), &|_, _| true) else { return false };
    visit(&pickle, pickle.root(), &mut 100);
    drop(torch_state::leaves(&pickle, pickle.root()));
    true
}

pub fn dcp(bytes: &[u8]) -> bool {
    match DcpState::parse(bytes) {
        Ok(state) => {
            let segments = state.tensors.iter().flat_map(|tensor| &tensor.chunks).map(|chunk| chunk.segment);
            let segments = segments.chain(state.objects.iter().map(|object| object.segment));
            assert!(segments.into_iter().all(|segment| (segment.file as usize) < state.files.len()));
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

pub fn orbax(bytes: &[u8]) -> bool {
    let tree = orbax_state::Tree::parse(bytes);
    if let Ok(tree) = &tree {
        let stored = tree.leaves.iter().filter(|leaf| leaf.kind != orbax_state::LeafKind::Empty);
        let names: Vec<String> = stored.map(orbax_state::Leaf::name).collect();
        assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), names.len());
    }
    orbax_state::CheckpointMetadata::parse(bytes).is_ok() || tree.is_ok()
}

/// A repository of one file, for the files beside it.
fn with_repository(file: &str, bytes: &[u8]) -> bool {
    opened(
        file,
        bytes,
        |directory| directory,
        |checkpoint| {
            assert_eq!(checkpoint.tensors().count(), 1);
            assert!(!checkpoint.dialect().to_string().contains('\n'));
        },
    )
}

/// Whether a GGUF file is made of a small model with this file beside it. Its header is one.
fn written(file: &str, bytes: &[u8]) -> bool {
    thread_local! {
        static DIRECTORY: tempfile::TempDir = {
            let memory = Path::new("/dev/shm");
            let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
            let header = r#"{"model.embed_tokens.weight":{"dtype":"F16","shape":[64,32],"data_offsets":[0,4096]},"model.layers.0.input_layernorm.weight":{"dtype":"F16","shape":[32],"data_offsets":[4096,4160]}}"#;
            let mut weights = (header.len() as u64).to_le_bytes().to_vec();
            weights.extend_from_slice(header.as_bytes());
            weights.extend_from_slice(&[0; 4160]);
            let write = |name: &str, bytes: &[u8]| fs::write(directory.path().join(name), bytes).unwrap();
            write("model.safetensors", &weights);
            write("config.json", LLAMA.as_bytes());
            directory
        };
    }
    DIRECTORY.with(|directory| {
        let path = |name: &str| directory.path().join(name);
        for (name, text) in [("tokenizer.json", TOKENIZER), ("tokenizer_config.json", TOKENIZER_CONFIG)] {
            fs::write(path(name), text).unwrap();
        }
        fs::write(path(file), bytes).unwrap();
        let checkpoint = Checkpoint::open(directory.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
        // The repository has two of its tensors.
        let options = ViewOptions { layout: Layout::Gguf, allow_missing: Allow::All, ..ViewOptions::default() };
        let plan = Plan::build(&checkpoint, &options);
        fs::remove_file(path(file)).unwrap();
        match plan {
            Ok(plan) => {
                let made = plan.gguf.unwrap();
                let of_tensors = made.tensors.iter().map(|(_, view)| view.bytes().unwrap().next_multiple_of(32));
                let header = Gguf::parse(&made.header, made.header.len() as u64 + of_tensors.sum::<u64>());
                assert!(header.is_ok(), "{:?}", header.err());
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        }
    })
}

/// Opens the source that a directory with this file beside weights is for `source`. An accepted one is checked.
fn opened(file: &str, bytes: &[u8], source: impl Fn(PathBuf) -> PathBuf, check: impl Fn(&Checkpoint)) -> bool {
    thread_local! {
        static DIRECTORY: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
    }
    DIRECTORY.with_borrow_mut(|kept| {
        let directory = kept.get_or_insert_with(|| {
            let memory = Path::new("/dev/shm");
            let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
            let header = r#"{"a.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}"#;
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(&[0x5a; 8]);
            fs::write(directory.path().join("model.safetensors"), bytes).unwrap();
            directory
        });
        fs::write(directory.path().join(file), bytes).unwrap();
        let source = source(directory.path().to_owned());
        let opened = Checkpoint::open(source.to_str().unwrap(), &OpenOptions::default());
        fs::remove_file(directory.path().join(file)).unwrap();
        match opened {
            Ok(checkpoint) => {
                check(&checkpoint);
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        }
    })
}

fn config_json(bytes: &[u8]) -> bool {
    with_repository("config.json", bytes)
}

fn index(bytes: &[u8]) -> bool {
    with_repository("model.safetensors.index.json", bytes)
}

/// The text of input that is one.
fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn settings(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    match FileSettings::parse(text, Path::new("ckfs.toml")) {
        Ok(_) => true,
        Err(error) => {
            assert!(error.to_string().contains("ckfs.toml"), "{error}");
            false
        }
    }
}

fn words(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let options = text
        .split(',')
        .map(|option| option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value))));
    let accepted = [
        Mesh::parse(text).is_ok(),
        LayerRanges::parse(text).is_ok(),
        Pattern::parse(text).is_ok(),
        Rename::parse(text).is_ok(),
        options::parse(options).is_ok(),
    ];
    accepted.contains(&true)
}

fn layout(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    match LayoutFile::parse("x.toml", text) {
        Ok(_) => true,
        Err(error) => {
            assert!(!error.problems.is_empty());
            false
        }
    }
}

fn expression(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let accepted = [
        expr::Expr::parse(text).is_ok(),
        expr::Expr::parse_range(text).is_ok(),
        expr::Expr::parse_list(text).is_ok(),
        expr::TextTemplate::parse(text).is_ok(),
    ];
    accepted.contains(&true)
}
