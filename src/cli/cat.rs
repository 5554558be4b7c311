//! `ckfs cat`: the bytes of one virtual file, without FUSE.

use std::io::IsTerminal;

use anyhow::bail;
use clap::Args;

use super::{
    flags::{SourceFlags, source_help},
    open, output, tree,
};

/// Bytes read at once.
const CHUNK_BYTES: usize = 4 << 20;

/// Writes one virtual file to standard output, without mounting.
///
/// PATH is relative to the root of the mount that the same flags would make; links such as mesh/fsdp=0 are followed.
/// The command writes exactly the bytes of the mount's file, or fails.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs cat /data/llama dev3/layers/scanned/wq --mesh fsdp=4,tensor=2 > wq.bin
  ckfs cat /data/llama safetensors/dev0.safetensors --mesh fsdp=8 | sha256sum
  ckfs cat /data/llama full/embed --offset 0 --length 64 | xxd
  ckfs cat --config llama.toml train/.ckfs/manifest.json")]
pub(super) struct Cat {
    #[arg(value_name = "SOURCE", help = source_help())]
    first: String,
    /// The file, relative to the mount.
    #[arg(value_name = "PATH")]
    second: Option<String>,
    /// First byte.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    offset: u64,
    /// Number of bytes; by default all bytes up to the end.
    #[arg(long, value_name = "BYTES")]
    length: Option<u64>,
    #[command(flatten)]
    flags: SourceFlags,
}

impl Cat {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let (source, path) = open::source_and(&self.first, self.second.as_deref(), &self.flags, "PATH")?;
        let mut config = open::source_config(source, &self.flags)?;
        let volume = open::volume(&mut config)?;
        let node = tree::find_file(&volume, path)?;
        let size = node.attr.size_bytes;
        if self.offset > size {
            bail!("{path}: --offset {} is beyond the end: the file has {size} bytes", self.offset);
        }
        let end = self.length.map_or(size, |length| self.offset.saturating_add(length));
        if end > size {
            bail!("{path}: bytes {}..{end} are beyond the end: the file has {size} bytes", self.offset);
        }
        if std::io::stdout().is_terminal() && !node.path.contains(".ckfs/") {
            tracing::warn!("binary data goes to a terminal");
        }
        let open = tree::OpenNode::open(&volume, &node)?;
        tree::stream(&open, path, (self.offset, end), CHUNK_BYTES, &mut output::write_served)?;
        Ok(ckfs_service::check_sources(&volume)?)
    }
}
