//! Serves descriptors of `/dev/fuse` that a node plugin passes, without any privilege.
//!
//! The plugins of Cloud Storage FUSE and of Hugging Face mount by themselves, listen in a directory that they share with the sidecar, and
//! send the descriptor to who connects (`SCM_RIGHTS`):
//!
//! ```text
//! DIR/.volumes/NAME/socket   Cloud Storage FUSE: with it comes JSON, {"bucketName": ..., "options": [...]}
//! DIR/.volumes/NAME/s        Hugging Face: the first of several descriptors counts, and `args` has a word a line
//! DIR/.volumes/NAME/error    why it is not served; the plugin shows it as an event of the pod
//! ```
//!
//! Settings are options `ckfs:KEY=VALUE` of the volume; other options are the plugin's own.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::{self, BufRead, BufReader},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use ckfs_config::{Config, options};
use ckfs_fuse::receive_passed;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use parking_lot::Mutex;
use serde::Deserialize;
use tracing::{info, warn};

use crate::daemons::wait_for_end;

/// Time between two looks for sockets.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Most bytes of what comes with a descriptor.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// What begins an option that is a setting.
const PREFIX: &str = "ckfs:";

/// What comes with the descriptor of Cloud Storage FUSE.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Message {
    bucket_name: String,
    options: Vec<String>,
}

/// What a plugin wants to be served.
#[derive(Debug, Default, PartialEq)]
struct Asked {
    source: Option<String>,
    attributes: BTreeMap<String, String>,
    token_file: Option<String>,
}

impl Asked {
    fn add(&mut self, option: &str) {
        let Some((name, value)) = option
            .trim_start_matches("--")
            .strip_prefix(PREFIX)
            .map(|option| option.split_once('=').unwrap_or((option, "true")))
        else {
            return;
        };
        // A setting that is repeated has a line for each value.
        let values = self.attributes.entry(name.to_owned()).or_default();
        *values = if values.is_empty() { value.to_owned() } else { format!("{values}\n{value}") };
    }

    fn of_message(message: &[u8]) -> io::Result<Self> {
        let Message { bucket_name, options } = serde_json::from_slice(message)?;
        let mut asked = Self::default();
        for option in &options {
            asked.add(option);
        }
        let below = options.iter().find_map(|option| option.strip_prefix("only-dir=")).unwrap_or_default();
        asked.source = (!bucket_name.is_empty() && bucket_name != "_").then(|| format!("gs://{bucket_name}/{below}"));
        Ok(asked)
    }

    /// `--FLAG [VALUE] ... repo|bucket NAME TARGET [--revision REVISION]`, a word a line, after the name of the program.
    fn of_words(text: &str) -> Self {
        let words: Vec<&str> = text.lines().collect();
        let after = |flag: &str| words.iter().position(|word| *word == flag).and_then(|at| words.get(at + 1));
        let mut asked = Self { token_file: after("--token-file").map(|file| (*file).to_owned()), ..Self::default() };
        for word in &words {
            asked.add(word);
        }
        let revision = after("--revision").map_or_else(String::new, |revision| format!("@{revision}"));
        let kind = words.iter().rposition(|word| ["repo", "bucket"].contains(word));
        asked.source = match kind.map(|at| (words[at], words.get(at + 1))) {
            Some(("repo", Some(name))) => Some(format!("hf://{name}{revision}")),
            _ => None,
        };
        asked
    }

    /// With what the sidecar itself was told.
    fn config(self, file: Option<&Path>) -> Result<Config, String> {
        let pairs = self.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut settings = options::of_attributes(pairs, |_, _| Ok(()))?;
        settings.config = file.map(Path::to_owned);
        let source = settings.source.take();
        let mut config = Config::gather(&[&settings], Path::new("/")).map_err(|error| error.to_string())?;
        config.source = source.or(config.source).or(self.source);
        // The plugin mounts.
        (config.mountpoint, config.mount.keeper) = (None, None);
        match config.source {
            None => Err("no source: expected an option ckfs:source=SOURCE of the volume".to_owned()),
            Some(_) => Ok(config),
        }
    }
}

/// Serves what plugins pass below `directory` until a signal ends this process. `config` has settings of all volumes. Signals must
/// be blocked.
///
/// # Errors
/// A directory is not readable.
pub fn serve_sidecar(directory: &Path, config: Option<&Path>) -> io::Result<()> {
    fs::read_dir(directory)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", directory.display())))?;
    // The plugin makes it, perhaps later.
    let volumes = directory.join(".volumes");
    let children = Arc::new(Mutex::new(Vec::<Child>::new()));
    let started = Arc::clone(&children);
    let (config, ready) = (config.map(Path::to_owned), directory.join(".ready"));
    thread::Builder::new().name("ckfs-sidecar".into()).spawn(move || {
        let mut served: BTreeSet<PathBuf> = BTreeSet::new();
        loop {
            for place in fs::read_dir(&volumes).into_iter().flatten().flatten().map(|entry| entry.path()) {
                let Some(socket) =
                    ["socket", "s"].map(|name| place.join(name)).into_iter().find(|socket| socket.exists())
                else {
                    continue;
                };
                if !served.insert(place.clone()) {
                    continue;
                }
                // A plugin that has not sent yet holds up no other volume.
                let (config, ready, started) = (config.clone(), ready.clone(), Arc::clone(&started));
                let serve = move || {
                    if let Err(why) = serve_one(&place, &socket, config.as_deref(), &started) {
                        warn!("{}: {why}", place.display());
                        let _ = fs::write(place.join("error"), why.to_string());
                    }
                    let _ = fs::write(&ready, "");
                };
                if let Err(error) = thread::Builder::new().name("ckfs-volume".into()).spawn(serve) {
                    warn!("start a thread: {error}");
                }
            }
            thread::sleep(LOOK_PERIOD);
        }
    })?;
    wait_for_end();
    let mut children = children.lock();
    for child in &*children {
        if let Ok(pid) = i32::try_from(child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }
    for child in &mut *children {
        child.wait()?;
    }
    Ok(())
}

/// Takes a descriptor, and starts the daemon that serves it.
fn serve_one(place: &Path, socket: &Path, config: Option<&Path>, children: &Mutex<Vec<Child>>) -> io::Result<()> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    // Its path may be too long for a socket's name.
    let above = fs::File::open(place)?;
    let short =
        Path::new("/proc/self/fd").join(above.as_raw_fd().to_string()).join(socket.file_name().unwrap_or_default());
    let (len, descriptors) = receive_passed(&UnixStream::connect(short)?, &mut message)?;
    let device: OwnedFd =
        descriptors.into_iter().next().ok_or_else(|| io::Error::other("the plugin passes no descriptor"))?;
    let asked = match fs::read_to_string(place.join("args")) {
        Ok(words) => Asked::of_words(&words),
        Err(_) => Asked::of_message(&message[..len])?,
    };
    let token_file = asked.token_file.clone();
    let config = asked.config(config).map_err(io::Error::other)?;
    let file = place.join("ckfs.toml");
    fs::write(&file, config.to_toml().map_err(io::Error::other)?)?;
    info!("{}: {}", place.display(), config.source.unwrap_or_default());
    let mut command = Command::new(env::current_exe()?);
    command.args(["mount", "--foreground", "--config"]).arg(&file).arg(format!("/dev/fd/{}", device.as_raw_fd()));
    command.env_remove("NOTIFY_SOCKET");
    if let Some(file) = token_file {
        command.env("HF_TOKEN_PATH", file);
    }
    // One at a time: the next child would have the descriptor too.
    let mut children = children.lock();
    fcntl(&device, FcntlArg::F_SETFD(FdFlag::empty()))?;
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    drop(device);
    let (error, said) = (place.join("error"), child.stderr.take());
    children.push(child);
    thread::Builder::new().name("ckfs-said".into()).spawn(move || {
        // Standard error is the log of the daemon; the message of a failure is the last that it says.
        let Some(said) = said else { return };
        for line in BufReader::new(said).lines().map_while(Result::ok) {
            ckfs_host::tell(&format!("{line}\n"));
            if let Some((_, why)) = line.split_once("ckfs: error: ") {
                let _ = fs::write(&error, why);
            }
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_protocols_name_a_source_and_settings() {
        let message = br#"{"volumeName":"v","bucketName":"models","options":["implicit-dirs","only-dir=llama","ckfs:mesh=fsdp=8","ckfs:even",
            "ckfs:include=a","ckfs:include=b"]}"#;
        let asked = Asked::of_message(message).unwrap();
        assert_eq!(asked.source.as_deref(), Some("gs://models/llama"));
        let found: Vec<_> = asked.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(found, ["even=true", "include=a\nb", "mesh=fsdp=8"]);
        let config = asked.config(None).unwrap();
        assert_eq!(config.source.as_deref(), Some("gs://models/llama"));
        let words = "hf-mount-fuse-sidecar\n--token-file\n/t\n--read-only\n--ckfs:dtype=bf16\nrepo\norg/name\n/tmp\n--revision\nmain\n";
        let asked = Asked::of_words(words);
        assert_eq!((asked.source.as_deref(), asked.token_file.as_deref()), (Some("hf://org/name@main"), Some("/t")));
        assert_eq!(asked.attributes["dtype"], "bf16");
        let refused =
            Asked::of_message(br#"{"bucketName":"m","options":["ckfs:mush=1"]}"#).unwrap().config(None).unwrap_err();
        assert!(refused.contains("did you mean `mesh`"), "{refused}");
        assert!(Asked::of_words("x\nbucket\na/b\n/tmp\n").config(None).unwrap_err().contains("no source"));
    }
}
