//! `ckfs metrics`: the metrics of the host's mounts for Prometheus, printed, written to a file, or served over HTTP.

mod http;
mod text;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, bail};
use ckfs_config::Config;
use ckfs_fuse::ckfs_mounts;
use ckfs_host::signal;
use clap::Args;
use parking_lot::{Condvar, Mutex};

use super::output::{self, Usage};

/// Longest time for the answers of all mounts.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Port of `--listen` without a value.
const LISTEN: &str = "127.0.0.1:9464";

/// Gives the metrics of all mounts, or of one, to Prometheus.
///
/// Each sample has the label `mount`, the path of its mount. `ckfs_up` is 1 for a mount that answers and 0 for one that does
/// not, and for one of --expect that is not mounted. Without --listen and --textfile the text goes to standard output. Only mounts that this user may read are asked.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs metrics
  ckfs metrics --listen 9464                   serves http://127.0.0.1:9464/metrics
  ckfs metrics /mnt/llama --listen 0.0.0.0:9464
  ckfs metrics --listen --expect /etc/ckfs
  ckfs metrics --textfile /var/lib/node_exporter/ckfs.prom")]
pub(super) struct MetricsCommand {
    /// Only the mount there.
    #[arg(value_name = "MNT")]
    mountpoint: Option<PathBuf>,
    /// A mount that should be there: its mountpoint, a configuration file, or a directory of such files.
    ///
    /// While it is not mounted, its `ckfs_up` is 0; without this a mount that is gone has no sample. Files are those that name a
    /// `mountpoint`, as /etc/ckfs has them for systemd; they are read again for each request.
    #[arg(long, value_name = "PATH")]
    expect: Vec<PathBuf>,
    /// Serves them under /metrics at this address. A port alone is one of 127.0.0.1.
    ///
    /// Every program that reaches the address reads the metrics: paths of mounts and counters. An address that other hosts
    /// reach must be named, as in 0.0.0.0:9464. Port 0 is any free one.
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = LISTEN, conflicts_with = "textfile")]
    listen: Option<String>,
    /// Writes them to a file, as the textfile collector of `node_exporter` reads it.
    ///
    /// The file is replaced as a whole. Its name ends in .prom for that collector.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

impl MetricsCommand {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let only = self.mountpoint.as_deref().map(resolved).transpose()?;
        // A path that is wrong is said now, not by a mount that is never missed.
        self.expect.iter().try_for_each(|path| expected(path).map(drop))?;
        let mounts = Arc::new(Mounts { only, expect: self.expect.clone(), ..Mounts::default() });
        if let Some(only) = &mounts.only
            && !ckfs_mounts().iter().any(|entry| &entry.mountpoint == only)
            && self.listen.is_none()
            && self.textfile.is_none()
        {
            bail!("{}: no ckfs mount", only.display());
        }
        if let Some(address) = &self.listen {
            return serve(address, mounts);
        }
        match &self.textfile {
            Some(path) if path.file_name().is_none() => {
                Err(Usage(format!("--textfile: expected a file, found {}", path.display())).into())
            }
            // The collector passes over the file beside it, whose name does not end in .prom.
            Some(path) => output::replace(path, |new| fs::write(new, mounts.text())),
            None => output::print(&mounts.text()),
        }
    }
}

/// The path as the table of mounts has it. That of a stale mount cannot be resolved.
fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    fs::canonicalize(path).or_else(|_| std::path::absolute(path)).with_context(|| path.display().to_string())
}

/// The mountpoints that a path of `--expect` stands for.
///
/// # Errors
/// A configuration that cannot be read.
fn expected(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let is_config = |path: &Path| path.extension().is_some_and(|ending| ending == "toml") && !path.is_dir();
    let files = match fs::read_dir(path) {
        _ if is_config(path) => vec![path.to_owned()],
        // A mounted directory is a mountpoint, whatever it shows.
        Ok(entries) if !ckfs_mounts().iter().any(|entry| entry.mountpoint == path) => {
            entries.flatten().map(|entry| entry.path()).filter(|path| is_config(path)).collect()
        }
        Ok(_) | Err(_) => Vec::new(),
    };
    if files.is_empty() {
        return Ok(vec![resolved(path)?]);
    }
    let mountpoint = |file: PathBuf| Ok(Config::load_alone(&file)?.mountpoint);
    let points = files.into_iter().map(mountpoint).collect::<anyhow::Result<Vec<_>>>()?;
    points.into_iter().flatten().map(|point| resolved(&point)).collect()
}

/// The address to listen on: `PORT`, `HOST:PORT` or `IP:PORT`.
fn address(text: &str) -> anyhow::Result<SocketAddr> {
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    let expected = || Usage(format!("--listen: expected PORT, or ADDRESS:PORT such as {LISTEN}, found {text:?}"));
    let found = text.to_socket_addrs().map_err(|_| expected())?.next();
    Ok(found.ok_or_else(expected)?)
}

fn serve(text: &str, mounts: Arc<Mounts>) -> anyhow::Result<()> {
    let address = address(text)?;
    let listener = TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
    let bound = listener.local_addr().context("address")?;
    signal::ignore_write_failures();
    ckfs_host::tell(&format!("ckfs: metrics at http://{bound}/metrics\n"));
    let page: Arc<http::Page> = Arc::new(move || mounts.text());
    http::serve(&listener, &page);
    Ok(())
}

/// The mounts to be asked.
#[derive(Debug, Default)]
struct Mounts {
    only: Option<PathBuf>,
    /// Where mounts should be: paths of `--expect`.
    expect: Vec<PathBuf>,
    /// The answers of those that have not answered yet. They are not asked again, so that threads do not pile up.
    asked: Arc<Mutex<BTreeMap<PathBuf, Arc<Answer>>>>,
}

/// The metrics of a mount, for all that wait for them: the text unless the mount fails.
#[derive(Debug, Default)]
struct Answer {
    text: Mutex<Option<io::Result<String>>>,
    came: Condvar,
}

impl Answer {
    fn give(&self, text: io::Result<String>) {
        *self.text.lock() = Some(text);
        self.came.notify_all();
    }
}

impl Mounts {
    /// The metrics of all of them.
    fn text(&self) -> String {
        let mut points: BTreeSet<PathBuf> = ckfs_mounts().into_iter().map(|entry| entry.mountpoint).collect();
        if let Some(only) = &self.only {
            points.retain(|point| point == only);
            points.insert(only.clone());
        }
        // A configuration that is being written is read at the next request.
        points.extend(self.expect.iter().filter_map(|path| expected(path).ok()).flatten());
        let answers: Vec<_> = points.iter().map(|point| (point, self.ask(point))).collect();
        let until = std::time::Instant::now() + ANSWER_LIMIT;
        let mut merged = text::Merged::default();
        let mut up = BTreeSet::new();
        for (point, answer) in answers {
            let mut text = answer.text.lock();
            answer.came.wait_while_until(&mut text, |text| text.is_none(), until);
            if let Some(Ok(text)) = &*text {
                merged.add(&point.display().to_string(), text);
                up.insert(point);
            }
        }
        let states = points.iter().map(|point| (point.display().to_string(), up.contains(point)));
        merged.finish(&states.collect::<Vec<_>>())
    }

    /// Has a thread read the metrics of the mount on `point`, unless one does.
    fn ask(&self, point: &Path) -> Arc<Answer> {
        let mut asked = self.asked.lock();
        let answer = Arc::clone(asked.entry(point.to_owned()).or_default());
        // The map has one, and so has the thread.
        if Arc::strong_count(&answer) > 2 {
            return answer;
        }
        let (path, told, waiting) = (point.to_owned(), Arc::clone(&answer), Arc::clone(&self.asked));
        let asking = thread::Builder::new().name("ckfs-probe".into()).spawn(move || {
            let text = fs::read_to_string(path.join(".ckfs/metrics"));
            waiting.lock().remove(&path);
            told.give(text);
        });
        if let Err(error) = asking {
            asked.remove(point);
            answer.give(Err(error));
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_host() {
        for (text, expected) in [
            ("9464", "127.0.0.1:9464"),
            (":9464", "127.0.0.1:9464"),
            ("0.0.0.0:1", "0.0.0.0:1"),
            ("[::1]:2", "[::1]:2"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), expected);
        }
        assert!(address("localhost:3").unwrap().ip().is_loopback());
        for text in ["", "x", "1.2.3.4", "99999", "1.2.3.4:99999"] {
            assert!(address(text).unwrap_err().is::<Usage>(), "{text}");
        }
    }

    #[test]
    fn a_mount_that_answers_is_asked_anew() {
        let mounts = Mounts::default();
        for _ in 0..2 {
            let answer = mounts.ask(Path::new("/no/such/mount"));
            answer.came.wait_while(&mut answer.text.lock(), |text| text.is_none());
            assert!(matches!(&*answer.text.lock(), Some(Err(_))));
            assert!(mounts.asked.lock().is_empty());
        }
    }

    #[test]
    fn overlapping_scrapes_have_one_answer() {
        let directory = tempfile::tempdir().unwrap();
        let (mount, metrics) = (directory.path().to_owned(), directory.path().join(".ckfs/metrics"));
        fs::create_dir(directory.path().join(".ckfs")).unwrap();
        // A mount that takes its time: nothing comes until a writer does.
        nix::unistd::mkfifo(&metrics, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mounts = Arc::new(Mounts { only: Some(mount.clone()), ..Mounts::default() });
        // Beside the map and the thread that asks.
        let waiting = || mounts.asked.lock().get(&mount).map_or(0, |answer| Arc::strong_count(answer) - 2);
        let scrapes: Vec<_> = (1..=3)
            .map(|count| {
                let mounts = Arc::clone(&mounts);
                let scrape = thread::spawn(move || mounts.text());
                let until = std::time::Instant::now() + ANSWER_LIMIT / 2;
                while waiting() < count && std::time::Instant::now() < until {
                    thread::sleep(std::time::Duration::from_millis(1));
                }
                scrape
            })
            .collect();
        fs::write(&metrics, "# TYPE ckfs_x counter\nckfs_x_total 7\n# EOF\n").unwrap();
        for scrape in scrapes {
            let text = scrape.join().unwrap();
            let labels = format!("{{mount=\"{}\"}}", mount.display());
            assert!(text.contains(&format!("ckfs_up{labels} 1\n")), "{text}");
            assert!(text.contains(&format!("ckfs_x_total{labels} 7\n")), "{text}");
        }
    }

    #[test]
    fn a_mount_that_should_be_there_is_down() {
        let directory = tempfile::tempdir().unwrap();
        let of = |name: &str| directory.path().join(name);
        for (name, text) in [
            ("a.toml", format!("source = \"/models/a\"\nmountpoint = {:?}\n", of("mounts/a"))),
            ("server.toml", "source = \"/models/b\"\n".to_owned()),
            ("notes.txt", "no configuration".to_owned()),
        ] {
            fs::write(of(name), text).unwrap();
        }
        fs::create_dir_all(of("mounts/empty")).unwrap();
        for (path, points) in [
            (directory.path().to_owned(), vec![of("mounts/a")]),
            (of("a.toml"), vec![of("mounts/a")]),
            (of("server.toml"), vec![]),
            (of("mounts/empty"), vec![of("mounts/empty")]),
            (of("mounts/gone"), vec![of("mounts/gone")]),
        ] {
            assert_eq!(expected(&path).unwrap(), points, "{}", path.display());
            let text = Mounts { expect: vec![path], ..Mounts::default() }.text();
            for point in points {
                assert!(text.contains(&format!("ckfs_up{{mount=\"{}\"}} 0\n", point.display())), "{text}");
            }
        }
        fs::write(of("b.toml"), "mountpoint = 7\n").unwrap();
        assert!(expected(directory.path()).unwrap_err().to_string().contains("b.toml"));
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ckfs.prom");
        for text in ["first\n", "2\n"] {
            output::replace(&path, |new| fs::write(new, text)).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(output::replace(&directory.path().join("no/ckfs.prom"), |new| fs::write(new, "")).is_err());
        assert!(output::replace(Path::new("/"), |new| fs::write(new, "")).unwrap_err().is::<Usage>());
    }
}
