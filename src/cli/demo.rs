//! `ckfs demo`: all of ckfs on a generated checkpoint.

use std::{
    fmt::Write as _,
    fs,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use ckfs_format::safetensors::write_header;
use ckfs_plan::report::human_bytes;
use ckfs_tensor::DType;
use clap::Args;
use serde_json::{Value, json};

use super::{
    cleanup::Cleanup,
    doctor,
    flags::{LogFlags, LoggingFlags},
    mount, output,
    verify::{Amount, verify_mount},
};

const LAYERS: u64 = 4;
const HIDDEN: u64 = 256;
const MLP: u64 = 512;
const KV: u64 = 128;
const VOCAB: u64 = 1024;
/// The data of the generated files starts at a multiple of this.
const ALIGNMENT: u64 = 8;
const MESH: &str = "fsdp=2,tensor=2";
/// Entries of a directory that the summary shows.
const ENTRIES_SHOWN: usize = 6;

/// Shows ckfs at work on a small generated checkpoint.
///
/// Writes a llama-like repository of a few megabytes to a temporary directory and mounts it for a mesh of four devices.
/// Prints the content of the mount, compares files read through it with the independent evaluator, and cleans up.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs demo
  ckfs demo --keep --dir /tmp/ckfs-demo    leaves it mounted, to look around in")]
pub(super) struct Demo {
    /// Leaves the checkpoint there and the mount up.
    #[arg(long)]
    keep: bool,
    /// Where to write: a directory that is empty or not there yet; by default a temporary one.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Demo {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let directory = match &self.dir {
            Some(directory) => std::path::absolute(directory).context("--dir")?,
            None => std::env::temp_dir().join(format!("ckfs-demo-{}", std::process::id())),
        };
        if fs::read_dir(&directory).is_ok_and(|mut entries| entries.next().is_some()) {
            bail!("{}: not empty", directory.display());
        }
        let (model, mountpoint) = (directory.join("model"), directory.join("mnt"));
        let no_device = doctor::device_problem();
        // Without a mount, the user can still try the checkpoint.
        let mut cleanup = Cleanup { directory: directory.clone(), mounted: false, keep: self.keep };
        for new in [&model, &mountpoint] {
            fs::create_dir_all(new).with_context(|| new.display().to_string())?;
        }
        let bytes = write_model(&model)?;
        output::print(&format!(
            "1. a llama-like checkpoint of {LAYERS} layers, {} in 2 files:\n   {}\n\n",
            human_bytes(bytes),
            model.display()
        ))?;
        if let Some(problem) = no_device {
            cleanup.keep = true;
            output::print(&format!(
                "2. it cannot be mounted on this host. Without a mount:\n   \
                 ckfs plan {model} --mesh {MESH}\n   \
                 ckfs cat {model} dev1/layers/scanned/wq --mesh {MESH} | sha256sum\n   \
                 ckfs export {model} /tmp/sharded --mesh {MESH} --only 'safetensors/*'\n   \
                 ckfs doctor\n",
                model = model.display()
            ))?;
            bail!("{problem}");
        }
        let args = ["mount", &model.display().to_string(), &mountpoint.display().to_string(), "--mesh", MESH];
        mount::start(&args.map(Into::into), &mountpoint, Duration::from_mins(1))?;
        cleanup.mounted = true;
        output::print(&format!("2. ckfs mount {} {} --mesh {MESH}\n", model.display(), mountpoint.display()))?;
        let mut text = String::new();
        digest(&mountpoint, 1, &mut text)?;
        output::print(&format!("{text}\n"))?;
        output::print(&shard_text(&mountpoint)?)?;
        let log = LogFlags { verbose: 0, quiet: true, file: LoggingFlags::default() };
        let findings = verify_mount(&mountpoint, &[], Amount::Sample(16 << 10), &log)?;
        findings.verdict()?;
        output::print(&format!("4. ckfs verify {}: {}, no difference\n\n", mountpoint.display(), findings.summary()))?;
        output::print(&next(self.keep, &mountpoint))?;
        cleanup.run()
    }
}

fn next(kept: bool, mountpoint: &Path) -> String {
    if kept {
        let mnt = mountpoint.display();
        format!(
            "It is still mounted. Try:\n  ls -l {mnt}/dev0/layers/scanned\n  cat {mnt}/.ckfs/plan.txt\n  ckfs status {mnt}\n  \
             ckfs umount {mnt}\n"
        )
    } else {
        "Unmounted and removed; --keep leaves it. Next, with a checkpoint of your own:\n  \
         ckfs plan SOURCE --mesh fsdp=4,tensor=2\n  \
         ckfs mount SOURCE MNT --mesh fsdp=4,tensor=2 --dtype bf16\n  \
         ckfs doctor\n"
            .to_owned()
    }
}

/// The first entries of each directory, down to a few levels.
fn digest(directory: &Path, depth: usize, text: &mut String) -> anyhow::Result<()> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>())
        .with_context(|| directory.display().to_string())?;
    names.sort();
    let indent = "   ".repeat(depth);
    let all = if depth == 1 { usize::MAX } else { ENTRIES_SHOWN };
    for path in names.iter().take(all) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let metadata = fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
        if metadata.is_dir() {
            let _ = writeln!(text, "{indent}{name}/");
            // One device represents all devices, and one layer all layers.
            let another_device = depth == 1 && (name.starts_with("dev") && name != "dev0" || name == "full");
            let another_layer = depth == 3 && name != "0" && name.bytes().all(|byte| byte.is_ascii_digit());
            let opened = depth < 4 && !another_device && !another_layer;
            if opened {
                digest(path, depth + 1, text)?;
            }
        } else if metadata.is_symlink() {
            let _ = writeln!(text, "{indent}{name} -> {}", fs::read_link(path)?.display());
        } else {
            let _ = writeln!(text, "{indent}{name}  {}", human_bytes(metadata.len()));
        }
    }
    if names.len() > all {
        let _ = writeln!(text, "{indent}and {} more", names.len() - all);
    }
    Ok(())
}

fn shard_text(mountpoint: &Path) -> anyhow::Result<String> {
    let name = "layers/scanned/wq";
    let whole = fs::read(mountpoint.join("full").join(name))?.len();
    let mut text = format!("3. {name}: {} whole, of which each device has\n", human_bytes(whole as u64));
    for device in 0..4 {
        let bytes = fs::read(mountpoint.join(format!("dev{device}")).join(name))?;
        let sum = bytes.iter().fold(0_u32, |sum, byte| sum.rotate_left(5) ^ u32::from(*byte));
        let _ = writeln!(text, "   dev{device}: {} (checksum {sum:08x})", human_bytes(bytes.len() as u64));
    }
    text.push('\n');
    Ok(text)
}

/// Names and shapes of the generated model, by file.
fn tensors() -> [Vec<(String, Vec<u64>)>; 2] {
    let mut files = [Vec::new(), Vec::new()];
    let mut add = |file: usize, name: String, shape: &[u64]| files[file].push((name, shape.to_vec()));
    add(0, "model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN]);
    for layer in 0..LAYERS {
        let file = usize::from(layer >= LAYERS / 2);
        let rows: [(&str, &[u64]); 9] = [
            ("input_layernorm", &[HIDDEN]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.k_proj", &[KV, HIDDEN]),
            ("self_attn.v_proj", &[KV, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
            ("mlp.gate_proj", &[MLP, HIDDEN]),
            ("mlp.up_proj", &[MLP, HIDDEN]),
            ("mlp.down_proj", &[HIDDEN, MLP]),
        ];
        for (name, shape) in rows {
            add(file, format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    add(1, "model.norm.weight".to_owned(), &[HIDDEN]);
    add(1, "lm_head.weight".to_owned(), &[VOCAB, HIDDEN]);
    files
}

/// Writes the repository. Returns the bytes of its tensors.
fn write_model(directory: &Path) -> anyhow::Result<u64> {
    let mut map = serde_json::Map::new();
    let mut total = 0;
    // A linear congruential sequence: the same checkpoint in every run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for (number, tensors) in tensors().iter().enumerate() {
        let name = format!("model-{:05}-of-00002.safetensors", number + 1);
        let rows = tensors.iter().map(|(name, shape)| (name.as_str(), DType::BF16, shape.as_slice()));
        let header = write_header(rows, &[("format", "pt")], ALIGNMENT)?;
        let path = directory.join(&name);
        let mut file = BufWriter::new(fs::File::create(&path).with_context(|| path.display().to_string())?);
        file.write_all(&header.bytes)?;
        for _ in 0..header.data_bytes / 2 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let [.., exponent, low, high] = state.to_le_bytes();
            // Magnitudes from 2^-8 to 1, either sign: like weights.
            let bits = u16::from(high & 0x80) << 8 | (0x3b80 + u16::from(exponent & 7) * 0x80) | u16::from(low & 0x7f);
            file.write_all(&bits.to_le_bytes())?;
        }
        file.flush()?;
        total += header.data_bytes;
        map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), Value::from(name.as_str()))));
    }
    let write = |name: &str, value: &Value| {
        fs::write(directory.join(name), format!("{value:#}\n")).with_context(|| name.to_owned())
    };
    write("model.safetensors.index.json", &json!({ "metadata": { "total_size": total }, "weight_map": map }))?;
    write(
        "config.json",
        &json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": MLP,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": VOCAB,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
        }),
    )?;
    write("tokenizer_config.json", &json!({ "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048 }))?;
    Ok(total)
}
