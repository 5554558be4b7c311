//! Mutated headers, indexes and configurations: for any input the answer is an error or something consistent.
//!
//! Each test starts from valid input, breaks it in a few random places, and checks the invariants of any accepted result.
//! By default it runs for a second; `CKFS_FUZZ_SECONDS` makes it run longer and `CKFS_FUZZ_SEED` repeats a run. The seed of
//! a failing input is printed, and `CKFS_FUZZ_SEED=<it> CKFS_FUZZ_SECONDS=0` runs only that.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by panicking, and tells its seed"
)]

mod readers;
#[allow(unreachable_pub, reason = "the guided runs have another crate")]
mod targets;

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    format::safetensors::{Header, tensor_bytes, write_header},
    tensor::DType,
};

/// A small generator (splitmix64): reproducible, and independent of the tested code.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).unwrap()
    }

    fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: expected a number")))
}

/// Runs `one` with seed after seed until the time is over.
fn run(name: &str, mut one: impl FnMut(&mut Random) -> bool) {
    let time = Duration::from_secs(variable("CKFS_FUZZ_SECONDS").unwrap_or(1));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let first = variable("CKFS_FUZZ_SEED").unwrap_or(now.as_secs() << 24);
    let start = Instant::now();
    let (mut runs, mut accepted) = (0_u64, 0_u64);
    loop {
        let seed = first.wrapping_add(runs);
        match catch_unwind(AssertUnwindSafe(|| one(&mut Random(seed)))) {
            Ok(ok) => accepted += u64::from(ok),
            Err(panic) => {
                eprintln!("{name}: failed with CKFS_FUZZ_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
        runs += 1;
        if start.elapsed() >= time {
            break;
        }
    }
    println!("{name}: {runs} inputs in {:.1?}, {accepted} accepted, first seed {first}", start.elapsed());
    // Otherwise only the refusals of the first lines of a parser are tested. A run that repeats one input may refuse it.
    assert!(accepted > 0 || time.is_zero(), "{name}: no input of {runs} was accepted, first seed {first}");
}

const TOKENS: [&str; 24] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "null",
    "-1",
    "0",
    "1e9",
    "18446744073709551615",
    "\"BF16\"",
    "\"F4\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"dtype\"",
    "\"__metadata__\"",
    "\"../x\"",
    "\u{e9}",
    " ",
    "9999999999",
];

/// Breaks `bytes` in a few places: bits, bytes, tokens, pieces moved or doubled, digits changed.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..random.below(4) {
        let place = random.below(bytes.len() + 1);
        let byte = random.next().to_le_bytes()[0];
        match random.below(9) {
            0 => bytes.truncate(place),
            1 => bytes.insert(place, byte),
            2 if place < bytes.len() => bytes[place] ^= 1 << (byte % 8),
            3 if place < bytes.len() => bytes[place] = byte,
            4 => {
                let token = random.pick(&TOKENS).bytes();
                bytes.splice(place..place, token);
            }
            5 => {
                let end = (place + random.below(40)).min(bytes.len());
                bytes.drain(place..end);
            }
            6 => {
                let end = (place + random.below(80)).min(bytes.len());
                let piece = bytes[place..end].to_vec();
                let target = random.below(bytes.len() + 1);
                bytes.splice(target..target, piece);
            }
            _ => {
                let digits: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    bytes[*random.pick(&digits)] = b'0' + byte % 10;
                }
            }
        }
    }
}

type Tensor = (String, DType, Vec<u64>);

fn tensors(random: &mut Random, file: usize) -> Vec<Tensor> {
    let names =
        ["weight", "weight_scale_inv", "scale", "mlp.experts.0.w1.weight", "mlp.experts.gate_up_proj_blocks", "\n\""];
    (0..random.below(6))
        .map(|number| {
            let dtype = *random.pick(DType::ALL);
            let mut shape: Vec<u64> = (0..random.below(4)).map(|_| random.next() % 4).collect();
            shape.push(dtype.unit().elements * (random.next() % 3));
            (format!("model.layers.{}.{file}.{}", number / 2, random.pick(&names)), dtype, shape)
        })
        .fold(Vec::new(), |mut kept: Vec<Tensor>, tensor| {
            if kept.iter().all(|other| other.0 != tensor.0) {
                kept.push(tensor);
            }
            kept
        })
}

fn file_of(random: &mut Random, tensors: &[Tensor]) -> Vec<u8> {
    let entries = tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()));
    let alignment = *random.pick(&[1, 8, 64]);
    let written = write_header(entries, &[("format", "pt")], alignment).unwrap();
    let mut bytes = written.bytes;
    bytes.resize(bytes.len() + usize::try_from(written.data_bytes).unwrap(), 0x5a);
    bytes
}

/// Mutates the JSON and mostly writes the right length before it, so that the parser sees more than a wrong length.
fn broken_file(random: &mut Random, tensors: &[Tensor]) -> Vec<u8> {
    let mut bytes = file_of(random, tensors);
    if random.below(8) == 0 {
        mutate(random, &mut bytes);
        return bytes;
    }
    let len = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    let mut json = bytes[8..8 + len].to_vec();
    mutate(random, &mut json);
    let mut broken = (json.len() as u64).to_le_bytes().to_vec();
    broken.extend_from_slice(&json);
    broken.extend_from_slice(&bytes[8 + len..]);
    broken
}

#[test]
fn headers() {
    run("headers", |random| {
        let tensors = tensors(random, 0);
        let bytes = broken_file(random, &tensors);
        match Header::parse_file(&bytes, bytes.len() as u64) {
            Ok(header) => {
                targets::check_header(&header, &bytes);
                true
            }
            Err(errors) => {
                assert!(!errors.problems.is_empty() && !errors.to_string().is_empty());
                false
            }
        }
    });
}

/// Writes a repository of a few files with an index and a configuration, some of them broken.
fn write_repository(random: &mut Random, dir: &Path) {
    let mut map = Vec::new();
    for file in 0..=random.below(3) {
        let name = format!("model-{file}.safetensors");
        let tensors = tensors(random, random.0.to_le_bytes()[0] as usize % 2 + file);
        map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), name.clone())));
        let bytes = if random.below(4) == 0 { broken_file(random, &tensors) } else { file_of(random, &tensors) };
        fs::write(dir.join(name), bytes).unwrap();
    }
    if random.below(4) > 0 {
        let map: serde_json::Map<_, _> = map.into_iter().map(|(name, file)| (name, file.into())).collect();
        let mut index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string().into_bytes();
        if random.below(2) == 0 {
            mutate(random, &mut index);
        }
        fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    }
    let config = *random.pick(&[
        r#"{"model_type":"deepseek_v3","num_hidden_layers":1,"quantization_config":{"quant_method":"fp8","weight_block_size":[2,2]}}"#,
        r#"{"text_config":{"num_hidden_layers":2},"quantization_config":{"quant_method":"compressed-tensors","format":"float-quantized",
            "config_groups":{"group_0":{"weights":{"strategy":"block","block_structure":"2x2","num_bits":8}}}}}"#,
        r#"{"architectures":["LlamaForCausalLM"],"tie_word_embeddings":true}"#,
    ]);
    let mut config = config.as_bytes().to_vec();
    if random.below(3) == 0 {
        mutate(random, &mut config);
    }
    fs::write(dir.join("config.json"), config).unwrap();
}

fn check_checkpoint(checkpoint: &Checkpoint) {
    let mut per_file = vec![0; checkpoint.source().file_count()];
    for (id, tensor) in checkpoint.tensors() {
        assert_eq!(checkpoint.find(tensor.name), Some(id));
        assert_eq!(tensor_bytes(tensor.dtype, tensor.shape), Some(tensor.span().len()));
        assert!(tensor.span().end() <= checkpoint.source().len_bytes(tensor.file()));
        per_file[tensor.file().index()] += tensor.span().len();
    }
    let dialect = checkpoint.dialect();
    assert_eq!(dialect.bytes(), per_file.iter().sum::<u64>());
    assert!(!dialect.describe().is_empty() && !dialect.to_string().contains('\n'));
    for file in checkpoint.files() {
        if let Some(id) = file.file {
            assert_eq!(checkpoint.source().path(id), checkpoint.root().join(&file.path));
        }
    }
}

#[test]
fn repositories() {
    let dir = tempfile::tempdir().unwrap();
    run("repositories", |random| {
        let root = dir.path().join("repo");
        fs::create_dir(&root).unwrap();
        write_repository(random, &root);
        let opened = Checkpoint::open(root.to_str().unwrap(), &OpenOptions::default());
        let accepted = match opened {
            Ok(checkpoint) => {
                check_checkpoint(&checkpoint);
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        };
        fs::remove_dir_all(&root).unwrap();
        accepted
    });
}

/// Each parser, with valid input broken in a few places.
#[test]
fn parsers() {
    for target in targets::TARGETS {
        let valid = targets::seeds(target);
        let accepted = valid.iter().filter(|bytes| (target.check)(bytes)).count();
        assert!(accepted > 0, "{}: of {} seeds none is accepted", target.name, valid.len());
        run(target.name, |random| {
            let mut bytes = random.pick(&valid).clone();
            mutate(random, &mut bytes);
            (target.check)(&bytes)
        });
    }
}

/// What coverage-guided runs have found (`tests/fuzz/run.sh`).
#[test]
fn the_corpus_holds() {
    for target in targets::TARGETS {
        let inputs = targets::corpus(target);
        assert!(!inputs.is_empty(), "{}: expected inputs in tests/fuzz/corpus", target.name);
        for input in inputs {
            (target.check)(&input);
        }
    }
}
