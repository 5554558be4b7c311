#![expect(
    clippy::cast_precision_loss,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints rates"
)]

//! Loads from disk: what a training host does once in a run.
//!
//! `cargo bench --bench cold [-- --gigabytes 8.5] [--runs 5] [--short] [--only WORD] [--mount-option OPTION]...` writes a
//! repository of a llama in files of up to 5 GB, exports the files of four devices beside it, and has one process for each
//! device read its file: by a map, touching each page, as `safetensors.torch.load_file` does, or in reads of 1 MiB. The
//! exported files are read natively, the same files of a mount through it. All pages of all files are dropped from the page
//! cache before each load, memory is taken and freed as in the bench `read`, and both loads alternate. A row gives the rate of all readers together, from the start of the first
//! to the end of the last, as a median. Needs `/dev/fuse` and 2.1 times the size on the disk of `CKFS_BENCH_DIR` or `TMPDIR`.

mod rig;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rig::{MIB, Mount, Report, Result, median, warm_memory, write_llama};

/// Devices of a host.
const DEVICES: usize = 4;

/// One process of [`read_file`]: it says when it is ready, and reads when it is told to.
struct Reader {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Reader {
    fn new(how: &str, path: &Path) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut child = Command::new(program)
            .args(["--reader", how])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("a reader without an output")?);
        let mut reader = Self { child, output };
        reader.line()?;
        Ok(reader)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err("a reader failed".into());
        }
        Ok(line.trim().to_owned())
    }

    fn go(&mut self) -> Result<()> {
        let mut input = self.child.stdin.take().ok_or("a reader was started twice")?;
        Ok(input.write_all(b"\n")?)
    }

    fn bytes(mut self) -> Result<u64> {
        let bytes = self.line()?.parse()?;
        self.child.wait()?;
        Ok(bytes)
    }
}

/// What a reader does: opens and reads a file once its standard input has a line; prints how many bytes it found.
fn read_file(how: &str, path: &Path) -> Result<()> {
    let mut go = String::new();
    println!("ready");
    std::io::stdin().read_line(&mut go)?;
    let mut file = File::open(path)?;
    let bytes = if how == "map" {
        let map = crate::map(&file)?;
        let touched: u64 = map.iter().step_by(4096).map(|byte| u64::from(*byte)).sum();
        std::hint::black_box(touched);
        map.len() as u64
    } else {
        let mut buffer = vec![1u8; MIB];
        let mut bytes = 0;
        loop {
            match file.read(&mut buffer)? {
                0 => break bytes,
                read => bytes += read as u64,
            }
        }
    };
    println!("{bytes}");
    Ok(())
}

#[expect(unsafe_code, reason = "files of a bench, which nothing changes")]
fn map(file: &File) -> Result<memmap2::Mmap> {
    // SAFETY: the bench wrote the file itself, or mounted it, and changes it no more.
    Ok(unsafe { memmap2::Mmap::map(file)? })
}

/// Drops the pages of all files below a directory from the page cache.
fn drop_pages(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            drop_pages(&path)?;
        } else {
            posix_fadvise(&File::open(&path)?, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        }
    }
    Ok(())
}

/// GB per second of one process for each path.
fn load(paths: &[PathBuf], how: &str) -> Result<f64> {
    let mut readers = paths.iter().map(|path| Reader::new(how, path)).collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    for reader in &mut readers {
        reader.go()?;
    }
    let mut bytes = 0;
    for reader in readers {
        bytes += reader.bytes()?;
    }
    Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// What is loaded.
struct Case<'a> {
    name: &'a str,
    view: &'a [&'a str],
    goal: f64,
}

struct Bench<'a> {
    repo: &'a Path,
    work: &'a Path,
    runs: usize,
    /// Whether only some loads are measured.
    is_short: bool,
    /// Memory that a load needs.
    memory_bytes: usize,
    options: Vec<String>,
    only: Option<String>,
}

impl Bench<'_> {
    fn case(&self, report: &mut Report, case: &Case<'_>) -> Result<()> {
        if self.only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
            return Ok(());
        }
        let plain = self.work.join("plain");
        fs::create_dir_all(&plain)?;
        let files = |root: &Path| -> Vec<PathBuf> {
            (0..DEVICES).map(|device| root.join(format!("safetensors/dev{device}.safetensors"))).collect()
        };
        let export = Command::new(env!("CARGO_BIN_EXE_ckfs"))
            .args(["-q", "export"])
            .arg(self.repo)
            .arg(&plain)
            .args(["--only", "safetensors/**"])
            .args(case.view)
            .output()?;
        if !export.status.success() {
            return Err(format!("export: {}", String::from_utf8_lossy(&export.stderr)).into());
        }
        for path in files(&plain) {
            File::open(path)?.sync_all()?;
        }
        let options: Vec<&str> = case.view.iter().copied().chain(self.options.iter().map(String::as_str)).collect();
        let all = [("map", DEVICES), ("read", 1), ("map", 1), ("read", DEVICES)];
        for (how, readers) in if self.is_short { &all[..2] } else { &all[..] } {
            let (mut native, mut mounted) = (Vec::new(), Vec::new());
            for _ in 0..self.runs {
                self.prepare(&plain)?;
                native.push(load(&files(&plain)[..*readers], how)?);
                self.prepare(&plain)?;
                let mount = Mount::new(self.repo, &self.work.join("mnt"), &options)?;
                mounted.push(load(&files(&mount.path(""))[..*readers], how)?);
            }
            let name = format!("cold, {}, by {how}, {readers} of {DEVICES}", case.name);
            report.row(&name, median(native), median(mounted), "GB/s", case.goal);
        }
        fs::remove_dir_all(&plain)?;
        Ok(())
    }

    /// Drops the pages of all files. The memory that both page caches and a reader need is provided by the host afterwards.
    fn prepare(&self, plain: &Path) -> Result<()> {
        drop_pages(self.repo)?;
        drop_pages(plain)?;
        warm_memory(self.memory_bytes)
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, how, path] = arguments.as_slice()
        && flag == "--reader"
    {
        return read_file(how, Path::new(path));
    }
    let has = |flag: &str| arguments.iter().any(|arg| arg == flag);
    let value = |flag: &str| arguments.iter().skip_while(|arg| *arg != flag).nth(1).cloned();
    let short = has("--short");
    let gigabytes: f64 = value("--gigabytes").map_or(Ok(if short { 0.9 } else { 8.5 }), |value| value.parse())?;
    let runs = value("--runs").map_or(Ok(if short { 1 } else { 5 }), |value| value.parse())?;
    let work = tempfile::tempdir_in(std::env::var_os("CKFS_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from))?;
    let repo = work.path().join("repo");
    // A layer is 0.405 GB.
    let layers = (1u32..64).find(|layers| f64::from(*layers) * 0.405 + 0.13 >= gigabytes).unwrap_or(64);
    write_llama(&repo, "BF16", u64::from(layers), 4096, 11008)?;
    let options = value("--mount-option").into_iter().collect();
    let memory_bytes = MIB * usize::try_from(layers)? * 405;
    let bench =
        Bench { repo: &repo, work: work.path(), runs, is_short: short, memory_bytes, options, only: value("--only") };
    let mut report = Report { rows: Vec::new() };
    println!("{:<52} {:>10} {:>10} {:<8} {:>6}", "case", "native", "mounted", "unit", "ratio");
    for case in [
        Case { name: "contiguous", view: &["--mesh", "fsdp=4"], goal: 0.95 },
        Case { name: "transposed", view: &["--mesh", "fsdp=4", "--layout", "maxtext"], goal: 0.8 },
        Case { name: "cast to f32", view: &["--mesh", "fsdp=4", "--dtype", "f32"], goal: 0.8 },
    ] {
        bench.case(&mut report, &case)?;
    }
    println!();
    for row in &report.rows {
        println!("{row}");
    }
    Ok(())
}
