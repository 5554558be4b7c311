//! `ckfs csi`: the node plugin of Kubernetes, what starts its daemons, and the sidecar for plugins of others.

use std::path::PathBuf;

use anyhow::{Context, bail};
use ckfs_csi::{CsiOptions, serve, serve_mounts, serve_sidecar};
use ckfs_fuse::block_signals;
use ckfs_host::{Log, LogTarget, state_directory, systemd};
use clap::Args;

use super::flags::LogFlags;

/// Mounts volumes for the pods of a Kubernetes node, by the Container Storage Interface.
///
/// A volume's attributes are the keys of a configuration file, as words: source, mesh, layout, dtype, steps; a setting that may be
/// repeated has one value a line. Keys of its secret are `token` for the Hub, or variables such as `AWS_ACCESS_KEY_ID`. Volumes are read-only.
/// Those of the same attributes and secrets share one daemon, which goes on when the plugin ends. Stays in the foreground until SIGTERM.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs csi --endpoint unix:///csi/csi.sock --node worker-1
  ckfs csi --endpoint unix:///csi/csi.sock --node worker-1 --root /models --mounter /csi/mount.sock
  ckfs csi --mount-for /csi/mount.sock    starts daemons for that plugin, in another container
  ckfs csi --sidecar /gcsfuse-tmp         serves what the plugin of Cloud Storage FUSE mounts
  ckfs csi --sidecar /hf-csi-tmp          the same for that of Hugging Face")]
pub(super) struct Csi {
    /// Where calls are answered.
    #[arg(long, value_name = "unix:///PATH", required_unless_present_any = ["mount_for", "sidecar"], requires = "node")]
    endpoint: Option<String>,
    /// The name of this node.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The name of the driver, as the `CSIDriver` object has it.
    #[arg(long, value_name = "NAME", default_value = "csi.ckfs")]
    driver: String,
    /// Where volumes are mounted and remembered; by default csi/ in ckfs's state directory.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Lets volumes name files only below this directory. May be repeated; by default they may name any file that this process sees.
    #[arg(long = "root", value_name = "DIR")]
    roots: Vec<PathBuf>,
    /// Where daemons keep bytes of remote sources.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Lets the process at this socket start daemons (--mount-for), so that they outlive the container of the plugin.
    #[arg(long, value_name = "SOCKET")]
    mounter: Option<PathBuf>,
    /// Starts daemons for a plugin that has --mounter.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["endpoint", "sidecar"])]
    mount_for: Option<PathBuf>,
    /// Serves the descriptors of /dev/fuse that a plugin passes by sockets in this directory. Needs no privilege.
    ///
    /// The protocols are those of the plugins of Cloud Storage FUSE and of Hugging Face. Settings are options `ckfs:KEY=VALUE` of the
    /// volume, as in `ckfs:mesh=fsdp=8`.
    #[arg(long, value_name = "DIR", conflicts_with = "endpoint")]
    sidecar: Option<PathBuf>,
    /// Settings for all volumes of --sidecar.
    #[arg(long, value_name = "FILE", requires = "sidecar")]
    config: Option<PathBuf>,
}

impl Csi {
    pub(super) fn run(self, flags: &LogFlags, log: &Log) -> anyhow::Result<()> {
        block_signals()?;
        let tell = |text: &str| {
            flags.tell(log, text);
            log.switch(LogTarget::stderr());
            systemd::notify(&[systemd::NotifyState::Ready]);
        };
        if let Some(directory) = self.sidecar {
            tell(&format!("serves what is passed in {}", directory.display()));
            return Ok(serve_sidecar(&directory, self.config.as_deref())?);
        }
        if let Some(socket) = self.mount_for {
            tell(&format!("starts daemons for {}", socket.display()));
            return Ok(serve_mounts(&socket)?);
        }
        let state = self.state.or_else(|| Some(state_directory()?.join("csi")));
        let (Some(endpoint), Some(node)) = (self.endpoint, self.node) else {
            bail!("--endpoint and --node: expected both")
        };
        let options = CsiOptions {
            endpoint,
            node,
            driver: self.driver,
            state: state.context("no state directory: give --state, or set XDG_STATE_HOME or HOME")?,
            roots: self
                .roots
                .iter()
                .map(|root| root.canonicalize().with_context(|| root.display().to_string()))
                .collect::<Result<_, _>>()?,
            cache_dir: self.cache_dir,
            mounter: self.mounter,
        };
        let text = format!("answers at {} as {}", options.endpoint, options.driver);
        Ok(serve(options, || tell(&text))?)
    }
}
