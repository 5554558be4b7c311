//! Shared by the benches: generated repositories, mounts, tables.
#![allow(dead_code, reason = "each bench uses a part")]

#[cfg(feature = "remote")]
pub(crate) mod download;
pub(crate) mod ledger;
pub(crate) mod prototype;

use std::{
    error::Error,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use self::ledger::Ledger;
use serde_json::{Value, json};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

pub(crate) const MIB: usize = 1 << 20;

/// A mounted repository; unmounted when dropped.
pub(crate) struct Mount {
    at: PathBuf,
}

impl Mount {
    pub(crate) fn new(repo: &Path, at: &Path, options: &[&str]) -> Result<Self> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.arg("mount").arg(repo);
        Self::by(command, at, options)
    }

    /// Runs a command `ckfs mount SOURCE`.
    pub(crate) fn by(mut command: Command, at: &Path, options: &[&str]) -> Result<Self> {
        fs::create_dir_all(at)?;
        let run = command.arg(at).args(options).output()?;
        if !run.status.success() {
            return Err(format!("mount: {}", String::from_utf8_lossy(&run.stderr)).into());
        }
        Ok(Self { at: at.to_owned() })
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.at.join(path)
    }

    /// Waits until a file that was read is materialized on disk.
    pub(crate) fn wait_for_a_file(&self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed().as_secs() < 60 {
            let stats: Value = serde_json::from_slice(&fs::read(self.path(".ckfs/stats.json"))?)?;
            if stats["materialized_files"].as_u64() > Some(0) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("no file was materialized".into())
    }

    /// The daemon's directory under `/proc`.
    pub(crate) fn daemon(&self) -> Result<PathBuf> {
        let at = self.at.to_str().unwrap_or_default();
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            let command = fs::read(path.join("cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
            if words.contains(&at.as_bytes()) && words.contains(&b"mount".as_slice()) {
                return Ok(path);
            }
        }
        Err("no daemon found".into())
    }

    /// Memory that the daemon holds, in KiB.
    pub(crate) fn resident_kib(&self) -> Result<u64> {
        let status = fs::read_to_string(self.daemon()?.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let done = Command::new(env!("CARGO_BIN_EXE_ckfs")).arg("umount").arg(&self.at).status();
        if !done.is_ok_and(|status| status.success()) {
            eprintln!("{}: could not be unmounted", self.at.display());
        }
    }
}

/// Writes a safetensors file of tensors of one type with pseudo-random finite values.
pub(crate) fn write_weights(path: &Path, dtype: &str, tensors: &[(String, Vec<u64>)]) -> Result<()> {
    write_tensors(path, tensors.iter().map(|(name, shape)| (name.as_str(), dtype, shape.as_slice())))
}

/// The same with a type for each tensor.
pub(crate) fn write_tensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a str, &'a [u64])>,
) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let width = match dtype {
            "F32" | "I32" => 4,
            "BF16" | "F16" => 2,
            _ => 1,
        };
        let start = end;
        end += shape.iter().product::<u64>() * width;
        header.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let mut json = serde_json::to_vec(&header)?;
    json.resize((json.len() + 8).next_multiple_of(4096) - 8, b' ');
    let mut file = File::create(path)?;
    file.write_all(&(json.len() as u64).to_le_bytes())?;
    file.write_all(&json)?;
    let mut block = vec![0u8; MIB];
    let mut state = 1u64;
    while end > 0 {
        for word in block.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Magnitudes of weights, for elements of two bytes and of four: from 2^-15 to 2^-7.
            word.copy_from_slice(&((state >> 3) & 0x83ff_83ff_83ff_83ff | 0x3800_3800_3800_3800).to_le_bytes());
        }
        let len = usize::try_from(end)?.min(MIB);
        file.write_all(&block[..len])?;
        end -= len as u64;
    }
    file.sync_all()?;
    Ok(())
}

/// A llama-like repository with one file.
pub(crate) fn write_llama(dir: &Path, dtype: &str, layers: u64, hidden: u64, inner: u64) -> Result<()> {
    fs::create_dir_all(dir)?;
    write_weights(&dir.join("model.safetensors"), dtype, &llama_tensors(layers, hidden, inner))?;
    write_llama_config(dir, dtype, layers, hidden, inner)
}

/// Names and shapes of the tensors of such a repository.
pub(crate) fn llama_tensors(layers: u64, hidden: u64, inner: u64) -> Vec<(String, Vec<u64>)> {
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![8192, hidden]),
        ("lm_head.weight".to_owned(), vec![8192, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![hidden / 4, hidden]),
            ("self_attn.v_proj", vec![hidden / 4, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    tensors
}

/// Its configuration.
pub(crate) fn write_llama_config(dir: &Path, dtype: &str, layers: u64, hidden: u64, inner: u64) -> Result<()> {
    let heads = hidden / 128;
    let config = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": heads / 4, "head_dim": 128, "vocab_size": 8192, "tie_word_embeddings": false,
        "torch_dtype": if dtype == "F32" { "float32" } else { "bfloat16" }});
    fs::write(dir.join("config.json"), config.to_string())?;
    Ok(())
}

/// Allocates and frees as much memory as will be needed next, in small and in huge pages. The host of a virtual machine may
/// back memory only when it is used, and reclaim it seconds after it was freed. Both take several times as long as any read here,
/// and would be charged to it.
pub(crate) fn warm_memory(bytes: usize) -> Result<()> {
    let blocks: Vec<Vec<u8>> = (0..bytes / MIB).map(|_| vec![1; MIB]).collect();
    std::hint::black_box(blocks);
    let mut huge = memmap2::MmapMut::map_anon((2 * bytes).next_multiple_of(2 * MIB))?;
    // Not required: small pages work as well.
    let _ = huge.advise(memmap2::Advice::HugePage);
    huge.fill(1);
    Ok(())
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(crate) struct Report {
    pub(crate) rows: Vec<Value>,
}

impl Report {
    pub(crate) fn row(&mut self, case: &str, native: f64, mounted: f64, unit: &str, goal: f64) {
        let ratio = mounted / native;
        println!("{case:<52} {native:>10.2} {mounted:>10.2} {unit:<8} {ratio:>6.2}  (goal {goal})");
        self.rows.push(json!({"bench": "read", "case": case, "native": native, "mounted": mounted, "unit": unit,
            "ratio": ratio, "goal": goal}));
    }

    /// What the case of the last row cost.
    pub(crate) fn cost(&mut self, ledger: Ledger) {
        println!("    {}", ledger.text());
        if let Some(row) = self.rows.last_mut() {
            row["cost"] = ledger.to_json();
        }
    }

    pub(crate) fn value(&mut self, case: &str, value: f64, unit: &str, goal: f64) {
        println!("{case:<52} {:>10} {value:>10.3} {unit:<8}         (goal {goal})", "");
        self.rows.push(json!({"bench": "read", "case": case, "value": value, "unit": unit, "goal": goal}));
    }
}
