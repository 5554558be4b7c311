#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints rates")]

//! A fleet: many simulated hosts fetch their shards from one object store on loopback, each a process with its own cache and
//! devices. Printed are the bytes that the store sent against the bytes of the hosts' shards, and requests per host. Then a
//! model of 1.6 TB, in sparse objects, is planned and mounted from a store that answers after 30 ms.
//!
//! At last one host loads an eighth of a model, through a mount with an empty cache and by parallel ranged reads of `object_store`
//! itself: as many bytes from the same server. Medians of three, alternating; the fastest of 8, 16 and 32 reads at a time counts.
//!
//! `cargo bench --bench fleet`, with `--short` for a few hosts and a small model. `--only fleet|large|load` runs one part. Needs
//! `/dev/fuse`, and room for the model in `TMPDIR`: 3.6 GB, with `--short` 1 GB.

#[path = "rig/mod.rs"]
mod rig;
#[path = "../stub/mod.rs"]
mod stub;

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use rig::{MIB, Mount, Result, download::Downloader, median, warm_memory};
use serde_json::{Value, json};
use stub::{http::Line, store::StoreStub};

/// Runs of a load.
const RUNS: usize = 3;
/// The rate of a line that is slower than this machine, in bytes per second: 4 Gbit/s.
const LINE_BYTES_PER_SECOND: u64 = 500_000_000;
/// The rate at which the store sends to the fleet, in bytes per second: what hosts with a core each could take is not to be had on
/// one machine.
const FLEET_BYTES_PER_SECOND: u64 = 250_000_000;
/// Hosts that run at the same time: this machine has to be all of them.
const AT_ONCE: usize = 8;

struct Fleet<'a> {
    store: &'a StoreStub,
    root: &'a Path,
    caches: &'a Path,
}

impl Fleet<'_> {
    fn ckfs(&self, cache: &str, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
        command.args(args).args(["--cache-dir", self.caches.join(cache).to_str().unwrap_or_default()]);
        // Without a bound the caches would leave a 20th of the disk free, and may then keep nothing.
        command.args(["--cache-disk-bytes", "64G"]);
        for (name, value) in [
            ("AWS_ENDPOINT_URL", self.store.server.url().as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_SKIP_SIGNATURE", "true"),
            ("AWS_REGION", "us-east-1"),
        ] {
            command.env(name, value);
        }
        command
    }

    /// All hosts of a mesh fetch; `each` devices are on one host.
    fn fetch(&self, mesh: &str, hosts: u64, each: u64) -> Result<()> {
        let name = mesh.replace(['=', ','], "-");
        let record = &self.store.server.record;
        let sent_bytes = || record.body_bytes.load(Ordering::Relaxed);
        let (mut needed, mut headers) = (0, 0);
        fs::remove_dir_all(self.caches.join("plans")).or_else(|_| fs::create_dir_all(self.caches))?;
        for host in 0..hosts {
            let devices = format!("{}-{}", host * each, host * each + each - 1);
            let plan = ["plan", "s3://models/llama", "--json", "--mesh", mesh, "--devices", &devices];
            let before = sent_bytes();
            let output = self.ckfs("plans", &plan).output()?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).into());
            }
            // The first plan fetches what every host fetches besides its shards.
            headers = if host == 0 { sent_bytes() - before } else { headers };
            let plan: Value = serde_json::from_slice(&output.stdout)?;
            needed += plan["remote"]["needed_bytes"].as_u64().ok_or("no needed_bytes")?;
        }
        let before = (sent_bytes(), record.count.load(Ordering::Relaxed));
        let begun = Instant::now();
        let mut running: Vec<(Child, PathBuf)> = Vec::new();
        for host in 0..hosts {
            let devices = format!("{}-{}", host * each, host * each + each - 1);
            let cache = format!("{name}-{host}");
            let fetch = ["-q", "fetch", "s3://models/llama", "--mesh", mesh, "--devices", &devices];
            running.push((self.ckfs(&cache, &fetch).stdout(Stdio::null()).spawn()?, self.caches.join(&cache)));
            if running.len() == AT_ONCE {
                finish(running.remove(0))?;
            }
        }
        running.into_iter().try_for_each(finish)?;
        let seconds = begun.elapsed().as_secs_f64();
        let sent = sent_bytes() - before.0 - hosts * headers;
        let requests = record.count.load(Ordering::Relaxed) - before.1;
        #[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
        let (ratio, per_host) = (sent as f64 / needed as f64, requests as f64 / hosts as f64);
        println!(
            "{mesh:<28} {hosts:>3} hosts  shards {:>7.1} MB  sent {:>7.1} MB  {ratio:>6.3}, headers {:>5.1} MB  {per_host:>6.1} requests per host  \
             {seconds:>5.1} s, {:.1} s for the line alone",
            mb(needed),
            mb(sent),
            mb(hosts * headers),
            mb(sent + hosts * headers) / mb(FLEET_BYTES_PER_SECOND)
        );
        Ok(())
    }

    fn set_latency(&self, ms: u64) {
        self.store.switch(|switches| switches.latency = Duration::from_millis(ms));
    }

    /// Limits the rate at which the store sends.
    fn set_line(&self, bytes_per_second: Option<u64>) {
        self.store.switch(|switches| switches.line = bytes_per_second.map(Line::new));
    }

    /// Removes a cache, if it is there.
    fn clear(&self, name: &str) -> Result<()> {
        match fs::remove_dir_all(self.caches.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Mounts with an empty cache.
    fn mount(&self, source: &str, name: &str, options: &[&str]) -> Result<Mount> {
        self.clear(name)?;
        Mount::by(self.ckfs(name, &["mount", source]), &self.caches.join("mnt"), options)
    }

    /// Time to plan and to mount a large model.
    fn plan_large(&self) -> Result<()> {
        self.set_latency(30);
        for run in ["first", "from the cache"] {
            let begun = Instant::now();
            let args = ["plan", "s3://models/large", "--json", "--mesh", "fsdp=64,tensor=8", "--devices", "0-7"];
            let output = self.ckfs("large", &args).output()?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).into());
            }
            println!("plan of 1.6 TB in 250 files, 30 ms latency, {run:<16} {:>6.2} s", begun.elapsed().as_secs_f64());
        }
        let begun = Instant::now();
        let options = ["--mesh", "fsdp=64,tensor=8", "--devices", "0-7", "--prefetch", "off"];
        let mounted = self.mount("s3://models/large", "large", &options)?;
        println!("mount of the same, {:<33} {:>6.2} s", "first", begun.elapsed().as_secs_f64());
        drop(mounted);
        Ok(())
    }

    /// First sequential read of a device's file, and a restore that starts right after the mount, against downloads.
    fn load(&self) -> Result<()> {
        const SOURCE: &str = "s3://models/deep";
        const KEY: &str = "deep/model.safetensors";
        const MESH: [&str; 4] = ["--mesh", "fsdp=8", "--devices", "0"];
        let whole_bytes = fs::metadata(self.root.join("models").join(KEY))?.len();
        let downloader = Downloader::new(&self.store.server.url(), "models")?;
        let copy = self.caches.join("copy");
        fs::create_dir_all(self.caches)?;
        // What a load takes: the cache, a file in memory, and what the reader has.
        let part_bytes = whole_bytes / 8 * 4;
        let warm = |bytes: u64| warm_memory(usize::try_from(bytes)?);
        for (ms, line) in [(0, None), (30, None), (30, Some(LINE_BYTES_PER_SECOND))] {
            self.set_latency(ms);
            self.set_line(line);
            let mut seconds: [Vec<f64>; 6] = Default::default();
            let mut bytes = 0;
            for _ in 0..RUNS {
                let mut first = |cache: &str, options: &[&str]| -> Result<f64> {
                    let options: Vec<&str> = MESH.iter().chain(options).copied().collect();
                    warm(part_bytes)?;
                    let mounted = self.mount(SOURCE, cache, &options)?;
                    let (len, seconds) = read(&mounted.path("safetensors/dev0.safetensors"))?;
                    bytes = len;
                    Ok(seconds)
                };
                let (by_default, by_reads) = (first("first", &[])?, first("reads", &["--prefetch", "off"])?);
                warm(part_bytes)?;
                let (downloaded, at_a_time) = downloader.best(KEY, bytes)?;
                // The old cache takes a while to remove.
                self.clear("restore")?;
                warm(part_bytes)?;
                let begun = Instant::now();
                let mounted = self.mount(SOURCE, "restore", &MESH)?;
                read(&mounted.path("safetensors/dev0.safetensors"))?;
                let restored = begun.elapsed().as_secs_f64();
                drop(mounted);
                warm(part_bytes)?;
                let part = downloader.seconds(KEY, bytes, at_a_time, Some(&copy))? + read(&copy)?.1;
                fs::remove_file(&copy)?;
                warm(whole_bytes)?;
                let whole = downloader.seconds(KEY, whole_bytes, at_a_time, Some(&copy))? + read_first(&copy, bytes)?;
                fs::remove_file(&copy)?;
                for (all, one) in seconds.iter_mut().zip([by_default, by_reads, downloaded, restored, part, whole]) {
                    all.push(one);
                }
            }
            let [by_default, by_reads, downloaded, restored, part, whole] = seconds.map(median);
            let rate = |seconds: f64| mb(bytes) / seconds;
            let of_line = line.map_or_else(String::new, |bytes| format!(", a line of {:.0} MB/s", mb(bytes)));
            println!("an eighth of {:.0} MB, {ms} ms latency{of_line}", mb(whole_bytes));
            for (what, first) in [("", by_default), (" without prefetch", by_reads)] {
                println!(
                    "  first read after the mount{what:<17} {:>6.0} MB/s   download {:>6.0} MB/s   {:.2} (goal 0.9)",
                    rate(first),
                    rate(downloaded),
                    downloaded / first
                );
            }
            println!(
                "  mount and read {restored:>6.2} s   download the eighth, then read {part:>6.2} s   {:.2} (goal 1)   the whole, \
                 then read {whole:>6.2} s   {:.2} (goal 1.7)",
                part / restored,
                whole / restored
            );
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Waits for a host, and removes its cache: the disk of this machine need not hold those of all.
fn finish((mut host, cache): (Child, PathBuf)) -> Result<()> {
    if !host.wait()?.success() {
        return Err("a host failed".into());
    }
    Ok(fs::remove_dir_all(cache)?)
}

/// Writes a file of these tensors with holes for their bytes.
fn write_sparse(path: &Path, rows: Vec<(String, Vec<u64>)>) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (tensor, shape) in rows {
        let start = end;
        end += shape.iter().product::<u64>() * 2;
        header.insert(tensor, json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let json = serde_json::to_vec(&header)?;
    let mut out = File::create(path)?;
    out.write_all(&(json.len() as u64).to_le_bytes())?;
    out.write_all(&json)?;
    out.set_len(8 + json.len() as u64 + end)?;
    Ok(())
}

/// Reads a file in steps of 1 MiB. Returns its bytes and the seconds.
fn read(path: &Path) -> Result<(u64, f64)> {
    let len = fs::metadata(path)?.len();
    Ok((len, read_first(path, len)?))
}

/// Reads the first bytes of a file likewise.
fn read_first(path: &Path, len: u64) -> Result<f64> {
    let begun = Instant::now();
    let mut file = File::open(path)?.take(len);
    let (mut buffer, mut left) = (vec![0; MIB], len);
    while left > 0 {
        match file.read(&mut buffer)? {
            0 => return Err(format!("{}: {left} bytes are missing", path.display()).into()),
            bytes => left -= bytes as u64,
        }
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// A dense model with the shapes of a model of 8 billion parameters.
fn write_dense(dir: &Path, layers: u64) -> Result<()> {
    let (hidden, inner) = (4096, 14336);
    fs::create_dir_all(dir)?;
    write_sparse(&dir.join("model.safetensors"), rig::llama_tensors(layers, hidden, inner))?;
    rig::write_llama_config(dir, "BF16", layers, hidden, inner)
}

/// A model of 1.6 TB in sparse files: 125 layers of experts.
fn write_large(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let (hidden, inner, experts, layers) = (4096u64, 1024u64, 504u64, 125u64);
    let mut map = serde_json::Map::new();
    for file in 0..250u64 {
        let (layer, half) = (file / 2, file % 2);
        let name = format!("model-{:05}-of-00250.safetensors", file + 1);
        let mut rows: Vec<(String, Vec<u64>)> = Vec::new();
        let prefix = format!("model.layers.{layer}");
        if half == 0 {
            for (part, shape) in [
                ("self_attn.q_proj", vec![hidden, hidden]),
                ("self_attn.k_proj", vec![hidden / 4, hidden]),
                ("self_attn.v_proj", vec![hidden / 4, hidden]),
                ("self_attn.o_proj", vec![hidden, hidden]),
                ("mlp.gate", vec![experts, hidden]),
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.q_norm", vec![128]),
                ("self_attn.k_norm", vec![128]),
            ] {
                rows.push((format!("{prefix}.{part}.weight"), shape));
            }
        }
        if file == 0 {
            rows.push(("model.embed_tokens.weight".into(), vec![8192, hidden]));
            rows.push(("lm_head.weight".into(), vec![8192, hidden]));
            rows.push(("model.norm.weight".into(), vec![hidden]));
        }
        for expert in half * experts / 2..(half + 1) * experts / 2 {
            for (part, shape) in [
                ("gate_proj", vec![inner, hidden]),
                ("up_proj", vec![inner, hidden]),
                ("down_proj", vec![hidden, inner]),
            ] {
                rows.push((format!("{prefix}.mlp.experts.{expert}.{part}.weight"), shape));
            }
        }
        map.extend(rows.iter().map(|(tensor, _)| (tensor.clone(), json!(name))));
        write_sparse(&dir.join(&name), rows)?;
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string())?;
    let config = json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner, "num_experts": experts,
        "num_experts_per_tok": 8, "num_attention_heads": hidden / 128, "num_key_value_heads": hidden / 512,
        "head_dim": 128, "vocab_size": 8192, "tie_word_embeddings": false, "torch_dtype": "bfloat16"});
    fs::write(dir.join("config.json"), config.to_string())?;
    Ok(())
}

fn main() -> Result<()> {
    let short = std::env::args().any(|arg| arg == "--short");
    let dir = tempfile::tempdir()?;
    let (root, caches) = (dir.path().join("store"), dir.path().join("caches"));
    let store = StoreStub::start(&root);
    let fleet = Fleet { store: &store, root: &root, caches: &caches };
    let only = std::env::args().skip_while(|arg| arg != "--only").nth(1);
    let wanted = |part: &str| only.as_deref().is_none_or(|only| only == part);
    if wanted("fleet") {
        write_dense(&root.join("models/llama"), 1)?;
        let hosts = if short { 8 } else { 64 };
        let meshes =
            [format!("fsdp={}", hosts * 8), format!("fsdp={hosts},tensor=8"), format!("replica=8,fsdp={hosts}")];
        for mesh in meshes.iter().take(if short { 2 } else { 3 }) {
            fleet.set_line(Some(FLEET_BYTES_PER_SECOND));
            fleet.fetch(mesh, hosts, 8)?;
        }
        fleet.set_line(None);
    }
    if wanted("large") {
        write_large(&root.join("models/large"))?;
        fleet.plan_large()?;
    }
    if wanted("load") {
        write_dense(&root.join("models/deep"), if short { 2 } else { 8 })?;
        fleet.load()?;
    }
    Ok(())
}
