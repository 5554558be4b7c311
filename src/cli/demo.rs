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
    doctor::{self, Trial},
    flags::{LogFlags, LoggingFlags},
    mount, output,
    verify::verify_mount,
};

const LAYERS: u64 = 4;
const HIDDEN: u64 = 256;
const MLP: u64 = 512;
const KV: u64 = 128;
const VOCAB: u64 = 1024;
/// The data of the generated files starts at a multiple of this.
const ALIGNMENT: u64 = 8;
const MESH: &str = "fsdp=2,tensor=2";

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
        let no_device = doctor::device_problem();
        // Without a mount, the user can still try the checkpoint.
        let mut trial = Trial::at(&directory)?;
        trial.keep = self.keep;
        let (model, mountpoint) = (trial.model.clone(), trial.mountpoint.clone());
        let bytes = write_model(&model)?;
        output::print(&format!(
            "1. a llama-like checkpoint of {LAYERS} layers, {} in 2 files:\n   {}\n\n",
            human_bytes(bytes),
            model.display()
        ))?;
        if let Some(problem) = no_device {
            trial.keep = true;
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
        trial.mounted = true;
        output::print(&format!("2. ckfs mount {} {} --mesh {MESH}\n", model.display(), mountpoint.display()))?;
        output::print(&format!("{}\n", directories(&mountpoint)?))?;
        output::print(&shard_text(&mountpoint)?)?;
        let log = LogFlags { verbose: 0, quiet: true, file: LoggingFlags::default() };
        let findings = verify_mount(&mountpoint, 16 << 10, &log)?;
        findings.verdict()?;
        output::print(&format!("4. ckfs verify {}: {}, no difference\n\n", mountpoint.display(), findings.summary()))?;
        output::print(&next(self.keep, &mountpoint))?;
        trial.end()
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

/// What the directories of a mount hold. Directories of devices have one line together.
const HOLDS: [(&str, &str); 11] = [
    ("dev0", "each device's shards as raw bytes"),
    ("full", "the same tensors, unsharded"),
    ("mesh", "links to devices by mesh coordinates"),
    ("safetensors", "all shards of a device in one file"),
    ("npy", "the same for numpy, a file for each tensor"),
    ("pt", "the same for torch.load"),
    ("dcp", "a torch.distributed.checkpoint"),
    ("orbax", "an Orbax checkpoint, for JAX and MaxText"),
    ("hf", "the repository as it is"),
    ("sharded_state", "files of vLLM's ranks"),
    (".ckfs", "manifest, plan, configuration, statistics"),
];

/// The directories that a mount has, and what they hold.
fn directories(mountpoint: &Path) -> anyhow::Result<String> {
    let mut names: Vec<String> = fs::read_dir(mountpoint)
        .and_then(|entries| {
            let name = |entry: std::io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
            entries.map(name).collect::<Result<Vec<String>, std::io::Error>>()
        })
        .with_context(|| mountpoint.display().to_string())?;
    let devices = names.iter().filter(|name| name.starts_with("dev")).count();
    names.retain(|name| !name.starts_with("dev") || name == "dev0");
    let place = |name: &String| HOLDS.iter().position(|(known, _)| known == name).unwrap_or(HOLDS.len());
    names.sort_by_key(place);
    let mut text = String::new();
    for name in &names {
        let holds = HOLDS.get(place(name)).map_or("", |(_, holds)| *holds);
        let shown =
            if name == "dev0" { format!("dev0/ to dev{}/", devices.saturating_sub(1)) } else { format!("{name}/") };
        let _ = writeln!(text, "   {shown:<16}{holds}");
    }
    Ok(text)
}

fn shard_text(mountpoint: &Path) -> anyhow::Result<String> {
    let name = "layers/scanned/wq";
    let bytes =
        |directory: &str| Ok::<_, std::io::Error>(fs::read(mountpoint.join(directory).join(name))?.len() as u64);
    let shards = (0..4).map(|device| bytes(&format!("dev{device}"))).collect::<Result<Vec<_>, _>>()?;
    let shard = human_bytes(shards.first().copied().unwrap_or(0));
    Ok(format!(
        "3. {name}: four tensors of two files, stacked on read: {} in full/, {shard} in each of {} devices\n\n",
        human_bytes(bytes("full")?),
        shards.len(),
    ))
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
