//! `ckfs serve`: the files of a mount over HTTP, without FUSE.

use std::net::SocketAddr;

use anyhow::{Context, bail};
use ckfs_config::Materialize;
use ckfs_fuse::block_signals;
use ckfs_host::{Log, LogTarget, system_log};
use ckfs_serve::{Door, ServeOptions};
use ckfs_service::{AliveContent, wait_registry};
use ckfs_volume::Nodes;
use clap::Args;

use super::{
    flags::{LogFlags, NetworkFlags, SourceFlags, source_help},
    open,
    output::Usage,
    steps,
};

/// Serves the files that a mount would have over HTTP, and hf/ as a repository of the Hub. Needs no FUSE and no privileges.
///
/// Stays in the foreground until SIGTERM or SIGINT, and tells systemd when it is ready. Everything wrong with the checkpoint, the
/// flags or the address is an error at the start. A read that fails later ends its connection: an answer is never cut short in silence.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs serve /data/llama --dtype bf16
  ckfs serve org/name@main --listen 0.0.0.0:8421 --token-file /run/secrets/token
  ckfs serve /data/llama --s3 8422                 the same files as objects of a bucket, too
  ckfs serve /runs/llama --steps all               every step of a run; a step is a revision of the repository
  ckfs serve --config /etc/ckfs/llama.toml         several views, and a table [serve]

What is served at http://ADDR:
  /files/...                        every file of the mount; one range, entity tags; directories as HTML or JSON
  /api/models/..., /ORG/NAME/resolve/...
                                    hf/ of each view as a repository: HF_ENDPOINT=http://ADDR
  /metrics  /healthz  /readyz       for Prometheus and orchestrators; 503 from /readyz while something is wrong

Signals:
  TERM, INT, QUIT  answers that have begun go on for the time of --drain; a second one cuts them off
  HUP              opens the log file anew
  USR1             writes one line of statistics to the log")]
pub(super) struct Serve {
    #[arg(help = source_help())]
    source: Option<String>,
    #[command(flatten)]
    flags: SourceFlags,
    #[command(flatten)]
    network: NetworkFlags,
}

impl Serve {
    pub(super) fn run(&self, log: &LogFlags, sink: &Log) -> anyhow::Result<()> {
        block_signals()?;
        let config = open::config(&[&self.flags.settings, &self.network.settings, &log.file.settings])?;
        let mut config = open::with_source(config, self.source.as_deref())?;
        // A mountpoint in the file is of `ckfs mount`. Only the kernel reads materialized files.
        (config.mountpoint, config.mount.materialize) = (None, Some(Materialize::None));
        let options = ServeOptions::of(&config).map_err(|error| Usage(error.to_string()))?;
        if let (Some(path), None) = (&config.mount.log_file, &log.file.settings.mount.log_file) {
            // A flag's file is open already.
            sink.switch(LogTarget::file(path).with_context(|| format!("log file {}", path.display()))?);
        }
        let door = Door::bind(options)?;
        let (address, s3) = (door.address(), door.s3_address());
        let has_log_file = config.mount.log_file.is_some();
        system_log::set_subject(&[("CKFS_SOURCE", config.source.as_deref().unwrap_or_default())]);
        let waits = wait_registry(&config.mount);
        let logged = sink.clone();
        let wait_watch = open::ending(&waits, move || logged.finish());
        let service = open::started(&mut config, &waits, wait_watch)?;
        let label = service.label();
        let all_sent = door.serve(&*service, sink, |names| {
            let (shown, told) = match service.content() {
                AliveContent::Checkpoint(volume) => {
                    (format!("{} files and directories", Nodes::stat_fs(&**volume).nodes), label.to_owned())
                }
                AliveContent::Run(run) => (steps::shown(run), format!("{label} ({})", steps::shown(run))),
            };
            tracing::info!("serving {label} at http://{address}, {shown}");
            log.tell(sink, &ready_text(&told, address, s3, names));
            if !has_log_file {
                // The log of a server has times.
                sink.switch(LogTarget::stderr());
            }
        })?;
        if !all_sent {
            bail!("answers were cut off; --drain TIME gives their readers longer");
        }
        Ok(())
    }
}

/// What users need to know when requests are answered.
fn ready_text(label: &str, address: SocketAddr, s3: Option<SocketAddr>, names: &[String]) -> String {
    let repositories = match names {
        [] => "no repository: hf/ is not available (see `ckfs plan`)".to_owned(),
        names => format!("HF_ENDPOINT=http://{address} has {}", names.join(", ")),
    };
    let s3 = s3.map_or_else(String::new, |s3| format!("; S3 at http://{s3}, bucket ckfs"));
    format!("serving {label} at http://{address}/files/; {repositories}{s3}")
}
