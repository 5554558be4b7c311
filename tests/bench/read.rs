#![expect(
    clippy::cast_precision_loss,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints rates"
)]

//! Speed of reading through a mount, as ratios to native reads of the same bytes in the same run.
//!
//! `cargo bench --bench read [-- --short] [--only WORD] [--pause SECONDS] [--as-written]` writes generated repositories to a
//! temporary directory, mounts them with the release binary, and prints one row per case and one JSON line per case. Native
//! and mounted reads alternate; a row gives medians. "First" reads come some seconds after a mount, as those of a program
//! that must start first; the page cache then holds the source's pages, but none of the mount. "Second" reads
//! follow them. The source's pages are large, as a read from disk leaves them; with `--as-written` they stay as small as
//! they were written. Needs `/dev/fuse`.

mod rig;

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::json;

use rig::{
    MIB, Mount, Report, Result, ledger::Ledger, median, prototype::Prototype, warm_memory, write_llama, write_tensors,
    write_weights,
};

/// Repetitions of each case with `--short`, which shows that all cases run, and tells little of small differences.
const SHORT_RUNS: usize = 1;

/// Repetitions and pauses of measurements.
#[derive(Clone, Copy)]
struct Pace {
    runs: usize,
    /// Time from each mount to its first read.
    pause: Duration,
}

impl Pace {
    /// Default pause: less than a trainer takes to start.
    const PAUSE: Duration = Duration::from_secs(5);
    /// With `--short`.
    const SHORT_PAUSE: Duration = Duration::from_millis(100);
}

/// Opens a file and reads it to its end in blocks; returns bytes and seconds.
fn read_all(path: &Path, block: usize, flags: i32) -> Result<(u64, f64)> {
    let mut buffer = vec![0u8; block + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    buffer[skip..skip + block].fill(1);
    let start = Instant::now();
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut total = 0;
    loop {
        let read = file.read(&mut buffer[skip..skip + block])?;
        if read == 0 {
            break;
        }
        total += read as u64;
    }
    Ok((total, start.elapsed().as_secs_f64()))
}

/// Reads `bytes` bytes of a file from `from` on in blocks of 1 MiB; returns seconds.
fn read_part(path: &Path, from: u64, bytes: u64) -> Result<f64> {
    let mut buffer = vec![1u8; MIB];
    let start = Instant::now();
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(from))?;
    let mut left = bytes;
    while left > 0 {
        let len = usize::try_from(left.min(MIB as u64))?;
        let read = file.read(&mut buffer[..len])?;
        if read == 0 {
            return Err("the file is shorter than expected".into());
        }
        left -= read as u64;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// How a program reads a file: those of today's loaders.
#[derive(Clone, Copy)]
enum Way {
    /// `read` of 1 MiB after the other, as `cp` and `torch.load`.
    Read,
    /// A map, of which every byte is used, as `safetensors` and `numpy.load(mmap_mode="r")`.
    Map,
    /// Eight threads, each with `pread` of 16 MiB, as loaders that prefetch.
    Preads,
    /// The same past the page cache.
    Direct,
}

/// Bytes of one read of the last two ways.
const PREAD_BYTES: usize = 16 * MIB;
/// Their threads.
const PREAD_THREADS: usize = 8;

impl Way {
    /// Opens a file and reads all of it; returns bytes and seconds.
    fn read(self, path: &Path) -> Result<(u64, f64)> {
        match self {
            Self::Read => read_all(path, MIB, 0),
            Self::Map => {
                let start = Instant::now();
                // SAFETY: nothing writes the file while the bench runs.
                #[expect(unsafe_code, reason = "the way of the programs that this stands for")]
                let map = unsafe { memmap2::Mmap::map(&File::open(path)?)? };
                let mut buffer = vec![1u8; MIB];
                for block in map.chunks(MIB) {
                    buffer[..block.len()].copy_from_slice(block);
                    std::hint::black_box(&mut buffer);
                }
                Ok((map.len() as u64, start.elapsed().as_secs_f64()))
            }
            Self::Preads => preads(path, 0),
            Self::Direct => preads(path, libc::O_DIRECT),
        }
    }
}

fn preads(path: &Path, flags: i32) -> Result<(u64, f64)> {
    let start = Instant::now();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let len = file.metadata()?.len();
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<()> {
        let mut buffer = vec![1u8; PREAD_BYTES + 4096];
        let skip = buffer.as_ptr().align_offset(4096);
        loop {
            let mut at = next.fetch_add(PREAD_BYTES as u64, Ordering::Relaxed);
            let end = len.min(at + PREAD_BYTES as u64);
            if at >= len {
                return Ok(());
            }
            while at < end {
                match file.read_at(&mut buffer[skip..skip + PREAD_BYTES], at)? {
                    0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                    read => at += read as u64,
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..PREAD_THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    Ok((len, start.elapsed().as_secs_f64()))
}

/// One measured case.
#[derive(Clone, Copy)]
struct Case<'a> {
    name: &'a str,
    /// Path in the mount.
    path: &'a str,
    mount: &'a [&'a str],
    way: Way,
    /// Target ratios of the first and the second read.
    goals: (f64, f64),
}

/// Drops the pages of a repository's weights from the page cache, so that a read from disk brings them back.
fn drop_pages(repo: &Path) -> Result<()> {
    let weights = File::open(repo.join("model.safetensors"))?;
    Ok(posix_fadvise(&weights, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

/// First and second read of a file, each beside a native read of the same number of bytes.
fn sequential(report: &mut Report, repo: &Path, work: &Path, pace: Pace, case: &Case<'_>) -> Result<()> {
    let weights = repo.join("model.safetensors");
    let (mut native, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
    let (mut first_cost, mut second_cost) = (Ledger::default(), Ledger::default());
    for _ in 0..pace.runs {
        let mount = Mount::new(repo, &work.join("mnt"), case.mount)?;
        let path = mount.path(case.path);
        let bytes = fs::metadata(&path)?.len();
        // The source must be in the page cache, and the native read has the same number of bytes as the mounted one.
        let available = fs::metadata(&weights)?.len();
        let span = bytes.min(available);
        read_part(&weights, 0, available)?;
        std::thread::sleep(pace.pause);
        let gb = |seconds: f64, bytes: u64| bytes as f64 / seconds / 1e9;
        native.push(gb(read_part(&weights, available - span, span)?, span));
        warm_memory(usize::try_from(bytes)?)?;
        let daemon = mount.daemon()?;
        let (got, seconds) = first_cost.add(&daemon, || case.way.read(&path))?;
        assert_eq!(got, bytes, "{}", case.path);
        first.push(gb(seconds, bytes));
        if case.mount.windows(2).any(|words| words[0] == "--materialize" && words[1].starts_with('/')) {
            mount.wait_for_a_file()?;
        }
        native.push(gb(read_part(&weights, available - span, span)?, span));
        second.push(gb(second_cost.add(&daemon, || case.way.read(&path))?.1, bytes));
    }
    let native = median(native);
    report.row(&format!("{}, first", case.name), native, median(first), "GB/s", case.goals.0);
    report.cost(first_cost);
    report.row(&format!("{}, second", case.name), native, median(second), "GB/s", case.goals.1);
    report.cost(second_cost);
    Ok(())
}

/// Files whose bytes are those of the source, each by the ways to read it.
fn contiguous(report: &mut Report, repo: &Path, work: &Path, pace: Pace, wants: &dyn Fn(&str) -> bool) -> Result<()> {
    let untouched =
        Case { name: "untouched file", path: "hf/model.safetensors", mount: &[], way: Way::Read, goals: (0.95, 0.95) };
    let shard = Case {
        name: "contiguous shard",
        path: "safetensors/dev1.safetensors",
        mount: &["--mesh", "fsdp=2"],
        way: Way::Read,
        goals: (0.38, 0.75),
    };
    let shard_map = Case { name: "contiguous shard, map", way: Way::Map, ..shard };
    let shard_preads = Case { name: "contiguous shard, 8 preads of 16 MiB", way: Way::Preads, ..shard };
    let shard_direct = Case { name: "contiguous shard, 8 O_DIRECT of 16 MiB", way: Way::Direct, ..shard };
    let pages = Case {
        name: "contiguous shard, --materialize none",
        mount: &["--mesh", "fsdp=2", "--materialize", "none"],
        ..shard
    };
    let one_tensor = Case { name: "contiguous shard of one tensor", path: "dev1/layers/scanned/w_down", ..shard };
    let direct_io =
        Case { name: "contiguous shard, --direct-io", mount: &["--mesh", "fsdp=2", "--direct-io"], ..shard };
    let copies = work.display().to_string();
    let materialize = ["--mesh", "fsdp=2", "--materialize", &copies];
    let copied =
        Case { name: "contiguous shard, --materialize DIR", mount: &materialize, goals: (0.38, 0.95), ..shard };
    let cases = [untouched, shard, shard_map, shard_preads, shard_direct, pages, one_tensor, direct_io, copied];
    for case in cases.iter().filter(|case| wants(case.name)) {
        sequential(report, repo, work, pace, case)?;
    }
    Ok(())
}

/// The files of one tensor of 1 GB, with `--short` of a quarter, that is stored as it is shown, by each way to read them.
fn one_tensor(report: &mut Report, work: &Path, pace: Pace) -> Result<()> {
    let repo = work.join("one");
    fs::create_dir_all(&repo)?;
    let name = "model.embed_tokens.weight";
    let rows = if pace.runs > SHORT_RUNS { 131_072 } else { 32_768 };
    write_weights(&repo.join("model.safetensors"), "BF16", &[(name.to_owned(), vec![rows, 4096])])?;
    fs::write(repo.join("config.json"), r#"{"model_type": "other"}"#)?;
    drop_pages(&repo)?;
    for path in ["full/embed_tokens", "npy/dev0/embed_tokens.npy", "pt/dev0.pt", "dcp/__0_0.distcp"] {
        for (by, way) in [("", Way::Read), (", map", Way::Map), (", 8 preads of 16 MiB", Way::Preads)] {
            let case = format!("one tensor, {path}{by}");
            let mount = &["--layout", "canonical"];
            sequential(report, &repo, work, pace, &Case { name: &case, path, mount, way, goals: (0.4, 0.9) })?;
        }
    }
    Ok(fs::remove_dir_all(&repo)?)
}

/// The transposed kernels of the layout `maxtext`, whole and as one of eight devices' shards.
fn maxtext(report: &mut Report, repo: &Path, work: &Path, pace: Pace, cast: &[&str], goal: f64) -> Result<()> {
    let from = if cast.is_empty() { "bf16" } else { "f32 to bf16" };
    let all = [
        "self_attention/query",
        "self_attention/key",
        "self_attention/value",
        "self_attention/out",
        "mlp/wi_0",
        "mlp/wo",
    ];
    let kernels = if pace.runs > SHORT_RUNS { &all[..] } else { &["self_attention/query", "mlp/wo"] };
    let options = [&["--layout", "maxtext", "--mesh", "fsdp=4,tensor=2"], cast].concat();
    for kernel in kernels {
        for part in ["full", "dev3"] {
            let name = format!("maxtext {kernel} {part}, {from}");
            let path = format!("{part}/params/decoder/layers/{kernel}/kernel");
            let case = Case { name: &name, path: &path, mount: &options, way: Way::Read, goals: (goal, 0.75) };
            sequential(report, repo, work, pace, &case)?;
        }
    }
    Ok(())
}

/// A quantized matrix: its scheme, the path of the decoded tensor, `config.json`, and what is stored.
type QuantizedMatrix<'a> = (&'a str, &'a str, serde_json::Value, Vec<(&'a str, &'a str, Vec<u64>)>);

/// First and second read of decoded matrices of 1 GB, in bytes of bf16.
fn decoded(report: &mut Report, work: &Path, pace: Pace) -> Result<()> {
    let (rows, columns, experts) = if pace.runs > SHORT_RUNS { (16384, 32768, 32) } else { (4096, 16384, 4) };
    let matrices: [QuantizedMatrix<'_>; 3] = [
        (
            "mxfp4",
            "full/model.layers.0.mlp.experts.gate_up_proj",
            json!({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}),
            vec![
                ("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", vec![experts, 5760, 90, 16]),
                ("model.layers.0.mlp.experts.gate_up_proj_scales", "U8", vec![experts, 5760, 90]),
            ],
        ),
        (
            "fp8 blocks",
            "full/model.layers.0.mlp.up_proj.weight",
            json!({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}),
            vec![
                ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", vec![rows, columns]),
                ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", vec![rows / 128, columns / 128]),
            ],
        ),
        (
            "awq",
            "full/model.layers.0.mlp.up_proj.weight",
            json!({"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                "zero_point": true, "version": "gemm"}}),
            vec![
                ("model.layers.0.mlp.up_proj.qweight", "I32", vec![columns, rows / 8]),
                ("model.layers.0.mlp.up_proj.qzeros", "I32", vec![columns / 128, rows / 8]),
                ("model.layers.0.mlp.up_proj.scales", "F16", vec![columns / 128, rows]),
            ],
        ),
    ];
    for (scheme, path, config, stored) in matrices {
        let repo = work.join("quantized");
        fs::create_dir_all(&repo)?;
        let tensors = stored.iter().map(|(name, dtype, shape)| (*name, *dtype, shape.as_slice()));
        write_tensors(&repo.join("model.safetensors"), tensors)?;
        fs::write(repo.join("config.json"), config.to_string())?;
        drop_pages(&repo)?;
        let name = format!("decoded, {scheme} to bf16");
        let mount = &["--layout", "hf", "--dequantize=bf16"];
        sequential(report, &repo, work, pace, &Case { name: &name, path, mount, way: Way::Read, goals: (0.25, 0.75) })?;
        fs::remove_dir_all(&repo)?;
    }
    Ok(())
}

/// Reads that bypass the page cache, beside a native read and beside a prototype that does nothing but reply: a client's
/// `O_DIRECT` in blocks of 16 MiB, and `--direct-io` in blocks of 1 MiB.
fn direct(report: &mut Report, repo: &Path, work: &Path, runs: usize, path: &str) -> Result<()> {
    let weights = repo.join("model.safetensors");
    let ways: [(&str, &[&str], usize, i32); 2] = [
        ("client O_DIRECT 16 MiB", &["--mesh", "fsdp=2"], 16 * MIB, libc::O_DIRECT),
        ("--direct-io 1 MiB", &["--mesh", "fsdp=2", "--direct-io"], MIB, 0),
    ];
    for (name, options, block, flags) in ways {
        let (mut native, mut mounted, mut floor) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..runs {
            // The second read of each: the source's pages are mapped then.
            let again = |path: &Path| {
                read_all(path, block, flags)?;
                read_all(path, block, flags)
            };
            let mount = Mount::new(repo, &work.join("mnt"), options)?;
            let (bytes, seconds) = again(&mount.path(path))?;
            mounted.push(bytes as f64 / seconds / 1e9);
            drop(mount);
            let prototype = Prototype::new(&weights, bytes, options.contains(&"--direct-io"), &work.join("prototype"))?;
            let (read, seconds) = again(&prototype.file())?;
            assert_eq!(read, bytes, "the prototype's file");
            floor.push(bytes as f64 / seconds / 1e9);
            drop(prototype);
            native.push(bytes as f64 / read_part(&weights, 0, bytes)? / 1e9);
        }
        let (native, mounted, floor) = (median(native), median(mounted), median(floor));
        report.row(&format!("contiguous shard, {name}"), native, mounted, "GB/s", f64::NAN);
        report.row(&format!("  the same beside a prototype, {name}"), floor, mounted, "GB/s", 0.95);
    }
    Ok(())
}

fn random_reads(path: &Path, count: u64) -> Result<f64> {
    let file = File::open(path)?;
    let pages = file.metadata()?.len() / 4096;
    let mut buffer = [0u8; 4096];
    let mut state = 7u64;
    let start = Instant::now();
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        file.read_exact_at(&mut buffer, (state >> 20) % pages * 4096)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64() / 1e3)
}

fn random(report: &mut Report, repo: &Path, work: &Path, runs: usize, path: &str) -> Result<()> {
    let mount = Mount::new(repo, &work.join("mnt"), &["--mesh", "fsdp=2"])?;
    let mounted_path = mount.path(path);
    read_all(&mounted_path, MIB, 0)?;
    let (mut native, mut mounted) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        native.push(random_reads(&repo.join("model.safetensors"), 200_000)?);
        mounted.push(random_reads(&mounted_path, 200_000)?);
    }
    report.row("random 4 KiB, warm", median(native), median(mounted), "kIOPS", 0.8);
    Ok(())
}

fn list_seconds(dir: &Path) -> Result<f64> {
    let start = Instant::now();
    let status = Command::new("ls").arg("-lR").arg(dir).stdout(Stdio::null()).status()?;
    if !status.success() {
        return Err("ls failed".into());
    }
    Ok(start.elapsed().as_secs_f64())
}

/// `ls -lR` of the same number of files on ext4 and in a mount.
fn listing(report: &mut Report, work: &Path, runs: usize, files: u64) -> Result<()> {
    let repo = work.join("names");
    fs::create_dir_all(&repo)?;
    let tensors: Vec<_> =
        (0..files).map(|index| (format!("group{}.tensor{index}", index / 1000), vec![1u64])).collect();
    write_weights(&repo.join("model.safetensors"), "BF16", &tensors)?;
    let native_dir = work.join("native-names");
    for group in 0..files.div_ceil(1000) {
        fs::create_dir_all(native_dir.join(format!("group{group}")))?;
    }
    for index in 0..files {
        fs::write(native_dir.join(format!("group{}/tensor{index}", index / 1000)), b"ab")?;
    }
    let (mut native, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
    list_seconds(&native_dir)?;
    for _ in 0..runs {
        let mount = Mount::new(&repo, &work.join("mnt"), &["--layout", "canonical"])?;
        native.push(files as f64 / list_seconds(&native_dir)? / 1e3);
        first.push(files as f64 / list_seconds(&mount.path("full"))? / 1e3);
        second.push(files as f64 / list_seconds(&mount.path("full"))? / 1e3);
    }
    let native = median(native);
    report.row(&format!("ls -lR of {files} files, first"), native, median(first), "kfiles/s", 1.0);
    report.row(&format!("ls -lR of {files} files, second"), native, median(second), "kfiles/s", 1.0);
    Ok(())
}

/// A repository of very many tensors in sparse files.
fn huge(report: &mut Report, work: &Path, short: bool) -> Result<()> {
    let (files, per_file, rows) = (250u64, 600u64, 2048u64);
    let repo = work.join("huge");
    fs::create_dir_all(&repo)?;
    let mut map = serde_json::Map::new();
    for file in 0..files {
        let name = format!("model-{:05}-of-{files:05}.safetensors", file + 1);
        let mut header = serde_json::Map::new();
        let mut end = 0u64;
        for index in 0..per_file {
            let number = file * per_file + index;
            let words = ["gate_proj", "up_proj", "down_proj"];
            let (layer, expert, word) = (number / 1536, number % 1536 / 3, words[usize::try_from(number % 3)?]);
            let tensor = format!("model.layers.{layer}.mlp.experts.{expert}.{word}.weight");
            let start = end;
            end += rows * 2560 * 2;
            header
                .insert(tensor.clone(), json!({"dtype": "BF16", "shape": [rows, 2560], "data_offsets": [start, end]}));
            map.insert(tensor, json!(name));
        }
        let json = serde_json::to_vec(&header)?;
        let mut out = File::create(repo.join(&name))?;
        out.write_all(&(json.len() as u64).to_le_bytes())?;
        out.write_all(&json)?;
        out.set_len(8 + json.len() as u64 + end)?;
    }
    fs::write(repo.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())?;
    fs::write(repo.join("config.json"), r#"{"model_type": "qwen3_moe"}"#)?;
    let at = work.join("mnt");
    drop(Mount::new(&repo, &at, &["--mesh", "fsdp=8"])?);
    let mut times = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        let mount = Mount::new(&repo, &at, &["--mesh", "fsdp=8"])?;
        times.push(start.elapsed().as_secs_f64());
        drop(mount);
    }
    report.value("mount of 150 000 tensors, 250 files, 1.6 TB", median(times), "s", 1.0);
    let mount = Mount::new(&repo, &at, &["--mesh", "fsdp=8"])?;
    let listed = Instant::now();
    let shown = if short { mount.path("full") } else { at.clone() };
    let out = Command::new("ls").arg("-lR").arg(&shown).stdout(Stdio::piped()).spawn()?.wait_with_output()?;
    let lines = out.stdout.split(|byte| *byte == b'\n').count();
    let seconds = listed.elapsed().as_secs_f64();
    let what = if short { "full/" } else { "all of it" };
    report.value(&format!("  listing {what} ({lines} lines)"), seconds, "s", f64::NAN);
    report.value("  daemon RSS after listing", mount.resident_kib()? as f64 / 1024.0, "MiB", 512.0);
    let wanted = if short { 250_000_000 } else { 10_000_000_000u64 };
    let mut read = 0;
    'reading: for device in 0..8 {
        for layer in 0..97 {
            for word in ["w_gate", "w_up", "w_down"] {
                for expert in [0, 100, 200, 300, 400, 500] {
                    if read >= wanted {
                        break 'reading;
                    }
                    let path = mount.path(&format!("dev{device}/layers/{layer}/experts/{expert}/{word}"));
                    read += read_all(&path, MIB, 0)?.0;
                }
            }
        }
    }
    let what = format!("  daemon RSS after reading {:.1} GB", read as f64 / 1e9);
    report.value(&what, mount.resident_kib()? as f64 / 1024.0, "MiB", 512.0);
    Ok(())
}

fn main() -> Result<()> {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    let value = |flag: &str| std::env::args().skip_while(|arg| arg != flag).nth(1);
    let (short, only) = (has("--short"), value("--only"));
    let pause = match value("--pause") {
        Some(seconds) => Duration::try_from_secs_f64(seconds.parse()?)?,
        None if short => Pace::SHORT_PAUSE,
        None => Pace::PAUSE,
    };
    let wants = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let (layers, hidden, inner, runs) = if short { (4, 2048, 5632, SHORT_RUNS) } else { (16, 4096, 11008, 5) };
    let work = tempfile::tempdir_in(std::env::var_os("CKFS_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from))?;
    let work = work.path();
    let pace = Pace { runs, pause };
    let write = |dir: &Path, dtype, layers, hidden, inner| {
        write_llama(dir, dtype, layers, hidden, inner)?;
        if has("--as-written") { Ok(()) } else { drop_pages(dir) }
    };
    let mut report = Report { rows: Vec::new() };
    println!("{:<52} {:>10} {:>10} {:<8} {:>6}", "case", "native", "mounted", "unit", "ratio");
    let bf16 = work.join("bf16");
    if ["untouched", "shard", "random", "direct"].iter().any(|name| wants(name)) {
        write(&bf16, "BF16", layers, hidden, inner)?;
        contiguous(&mut report, &bf16, work, pace, &wants)?;
        if wants("direct") {
            direct(&mut report, &bf16, work, runs, "safetensors/dev1.safetensors")?;
        }
        if wants("random") {
            random(&mut report, &bf16, work, runs, "safetensors/dev1.safetensors")?;
        }
        fs::remove_dir_all(&bf16)?;
    }
    if wants("one tensor") {
        one_tensor(&mut report, work, pace)?;
    }
    if wants("f32 to bf16") {
        let f32s = work.join("f32");
        write(&f32s, "F32", layers / 2, hidden, inner)?;
        let case = Case {
            name: "f32 to bf16 (output bytes)",
            path: "safetensors/dev0.safetensors",
            mount: &["--mesh", "fsdp=2", "--dtype", "bf16"],
            way: Way::Read,
            goals: (0.27, 0.75),
        };
        let pages = Case {
            name: "f32 to bf16 (output bytes), --materialize none",
            mount: &["--mesh", "fsdp=2", "--dtype", "bf16", "--materialize", "none"],
            ..case
        };
        for case in [case, pages] {
            sequential(&mut report, &f32s, work, pace, &case)?;
        }
        fs::remove_dir_all(&f32s)?;
    }
    if wants("maxtext") {
        // 3.2 GB for each, or a quarter of one.
        let (layers, hidden, inner) = if short { (2, 2048, 5632) } else { (8, 4096, 11008) };
        let repo = work.join("bf16");
        write(&repo, "BF16", layers, hidden, inner)?;
        maxtext(&mut report, &repo, work, pace, &[], 0.25)?;
        fs::remove_dir_all(&repo)?;
        let repo = work.join("f32");
        write(&repo, "F32", layers / 2, hidden, inner)?;
        maxtext(&mut report, &repo, work, pace, &["--dtype", "bf16"], 0.2)?;
        fs::remove_dir_all(&repo)?;
    }
    if wants("decoded") {
        decoded(&mut report, work, pace)?;
    }
    if wants("listing") {
        listing(&mut report, work, runs, if short { 20_000 } else { 100_000 })?;
    }
    if wants("huge") {
        huge(&mut report, work, short)?;
    }
    println!();
    for row in &report.rows {
        println!("{row}");
    }
    Ok(())
}
