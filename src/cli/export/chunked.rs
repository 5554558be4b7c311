//! Files whose source is stored in coded chunks, as Orbax stores arrays.
//!
//! A chunk may hold the tensors of all layers, and every file of a repository needs a part of it. Written file by file, either all
//! decoded chunks stay in memory, or each is decoded again for every layer. So the parts of all files are written in the order of
//! the chunks: each chunk is decoded once, and few are in memory at a time.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use anyhow::Context;
use ckfs_host::budget::Budget;
use ckfs_image::Segment;
use ckfs_source::FileId;
use ckfs_volume::{NodeKind, Volume};
use indicatif::ProgressBar;
use parking_lot::Mutex;

use super::{super::tree, files::PartialFile, journal::Written, parts::coded_chunks};

/// Most bytes of a file that are made at once: rows of a transposed tensor that are made together visit the source once.
const PART_BYTES: u64 = 16 << 20;
/// Bytes of chunks in memory beside those that one tensor needs: the next ones, and stored bytes while they are decoded.
const SLACK_BYTES: u64 = 256 << 20;
/// Most threads that make bytes.
const THREADS_MAX: usize = 16;

/// A part of a file. In the order of parts each chunk is decoded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ExportPart {
    /// The first decoded byte that it is made from, if any: the file of decoded chunks, and the place in it.
    first: Option<(FileId, u64)>,
    /// Number of the file that it belongs to.
    file: usize,
    start: u64,
    end: u64,
}

/// A file of which parts need decoded chunks.
pub(super) struct ChunkedFile<'a> {
    node: &'a tree::PathNode,
    parts: Vec<ExportPart>,
    /// Most bytes of decoded chunks that a tensor of it needs together.
    together_bytes: u64,
}

/// The files of which several parts need decoded chunks, and all other nodes.
pub(super) fn split<'a>(
    volume: &Volume,
    nodes: Vec<&'a tree::PathNode>,
) -> anyhow::Result<(Vec<ChunkedFile<'a>>, Vec<&'a tree::PathNode>)> {
    let (mut chunked, mut others) = (Vec::new(), Vec::new());
    for node in nodes {
        let file = match node.attr.kind {
            NodeKind::File => chunked_file(volume, node, chunked.len())?,
            NodeKind::Directory | NodeKind::Symlink => None,
        };
        match file {
            Some(file) => chunked.push(file),
            None => others.push(node),
        }
    }
    Ok((chunked, others))
}

/// A file, which is the one of this number, if it needs decoded chunks.
fn chunked_file<'a>(volume: &Volume, node: &'a tree::PathNode, file: usize) -> anyhow::Result<Option<ChunkedFile<'a>>> {
    let checkpoint = volume.engine().checkpoint();
    let Some(image) = volume.image(node.attr.ino).with_context(|| node.path.clone())? else { return Ok(None) };
    let (mut parts, mut most_bytes) = (Vec::new(), 0);
    for (number, segment) in image.segments().iter().enumerate() {
        let coded = match segment {
            Segment::View(view) => coded_chunks(checkpoint, view),
            Segment::Bytes(_) | Segment::Spaces(_) => BTreeMap::new(),
        };
        let first = coded.keys().next().copied();
        most_bytes = coded.values().sum::<u64>().max(most_bytes);
        let (mut start, end) = (image.start_of(number), image.start_of(number + 1));
        while start < end {
            let next = end.min(start + PART_BYTES);
            parts.push(ExportPart { first, file, start, end: next });
            start = next;
        }
    }
    Ok((most_bytes > 0).then_some(ChunkedFile { node, parts, together_bytes: most_bytes }))
}

/// Writes the files.
pub(super) fn write(
    volume: &Volume,
    files: &[ChunkedFile<'_>],
    directory: &Path,
    bar: &ProgressBar,
    written: &mut Written<'_>,
) -> anyhow::Result<()> {
    let together_bytes = files.iter().map(|file| file.together_bytes).max().unwrap_or(0);
    if let Some(chunks) = volume.engine().checkpoint().source().chunks() {
        let most_bytes = volume.budget().map_or(u64::MAX, Budget::decoded_bytes_max);
        chunks.bound_bytes(together_bytes.saturating_add(SLACK_BYTES).min(most_bytes));
    }
    let mut begun = Vec::with_capacity(files.len());
    for ChunkedFile { node, .. } in files {
        let (partial, _) = PartialFile::create(volume, node, directory)?;
        begun.push((partial, tree::OpenNode::open(volume, node)?));
    }
    let mut parts: Vec<ExportPart> = files.iter().flat_map(|file| file.parts.iter().copied()).collect();
    parts.sort_unstable();
    write_all(&parts, &begun, bar)?;
    for (partial, _) in begun {
        let file = File::options().write(true).open(&partial.path);
        let file = file.with_context(|| partial.path.display().to_string())?;
        partial.complete(&file, written)?;
    }
    Ok(())
}

/// A file that is being written, and where its bytes come from.
type BegunFile<'a> = (PartialFile<'a>, tree::OpenNode<'a>);

/// Makes and writes parts in their order, in several threads.
fn write_all(parts: &[ExportPart], files: &[BegunFile<'_>], bar: &ProgressBar) -> anyhow::Result<()> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failure = Mutex::new(None);
    let work = || {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(error) = write_part(part, &files[part.file], &mut buffer) {
                failed.store(true, Ordering::Relaxed);
                failure.lock().get_or_insert(error);
            }
            bar.inc(part.end - part.start);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        for _ in 1..threads {
            // If the system refuses more threads, this one does all.
            let _ = thread::Builder::new().name("ckfs-export".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

fn write_part(part: &ExportPart, (file, open): &BegunFile<'_>, buffer: &mut Vec<u8>) -> anyhow::Result<()> {
    buffer.resize(usize::try_from(part.end - part.start)?, 0);
    let made = open.make(part.start, buffer);
    made.with_context(|| format!("{}: bytes {}..{}", file.node.path, part.start, part.end))?;
    // Opened for each part: the files may be more than a process may have open.
    let target = File::options().write(true).open(&file.path);
    target.and_then(|target| target.write_all_at(buffer, part.start)).with_context(|| file.path.display().to_string())
}
