//! How many bytes of a remote source the listed devices need, what that costs to fetch, and what is on this machine already.

use std::collections::BTreeMap;

use ckfs_checkpoint::{Checkpoint, FileRole};
use ckfs_source::{ByteSpan, FileId, RemoteSource, remote::cache::BLOCK_BYTES};
use ckfs_tensor::Region;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::{
    super::{Amplification, Plan, PlannedTensor},
    needed::for_each_of_part,
};

/// A block of the disk cache, which is fetched as a whole. A gap of fewer bytes leaves out no block, so that spans with such gaps may
/// be taken for one.
pub const FETCHED_BYTES: u64 = BLOCK_BYTES;

/// Above this number of listed devices the host is taken to need every weight file whole.
const DEVICES_MAX: usize = 128;

/// The other files, such as the tokenizer, up to this size each are part of what a host fetches.
const OTHER_BYTES_MAX: u64 = 64 << 20;

/// The needs of a host, for all of its views.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteBytes {
    /// By view and device: bytes that the device's shards need.
    pub devices: Vec<(String, u64, u64)>,
    /// Bytes that the host needs, each once.
    pub needed_bytes: u64,
    /// Bytes that are fetched for them into an empty cache: blocks, other files, and gaps where reading over them costs less than
    /// another request.
    pub spanned_bytes: u64,
    /// Bytes of them that are to be fetched now.
    pub absent_bytes: u64,
    /// By file, the spans that the host reads, merged and ascending.
    pub spans: Vec<(FileId, Vec<ByteSpan>)>,
}

impl RemoteBytes {
    /// The needs of the listed devices of these views, each with its name. `None` if no file is remote.
    ///
    /// # Errors
    /// As [`Plan::for_each_needed`].
    pub fn of(checkpoint: &Checkpoint, views: &[(&str, &Plan)]) -> Result<Option<Self>, String> {
        let source = checkpoint.source();
        let Some(remote) = source.remote() else { return Ok(None) };
        let mut found = Self::default();
        let mut reads = Reads::new();
        for file in checkpoint.files() {
            if let Some(id) = file.file.filter(|_| file.role == FileRole::Other && file.size_bytes <= OTHER_BYTES_MAX) {
                reads.entry(id).or_default().spans.extend(ByteSpan::new(0, file.size_bytes));
            }
        }
        for (name, plan) in views {
            let is_short = plan.devices.len() <= DEVICES_MAX;
            let read = || if is_short { reads_of(checkpoint, remote, plan) } else { Ok(Reads::new()) };
            let (amplification, read) = rayon::join(|| Amplification::of(checkpoint, plan), read);
            let rows = plan.devices.iter().zip(&amplification.devices);
            found.devices.extend(rows.map(|(device, reads)| ((*name).to_owned(), *device, reads.needed_bytes)));
            found.needed_bytes += amplification.union.needed_bytes;
            if !is_short {
                for file in checkpoint.files().iter().filter(|file| file.role == FileRole::Weights) {
                    let Some(id) = file.file else { continue };
                    reads.entry(id).or_default().spans.extend(ByteSpan::new(0, file.size_bytes));
                }
                continue;
            }
            reads = both(reads, read?);
        }
        for (file, FileReads { mut spans, mut spanned, mut absent }) in reads {
            merge(&mut spans, 0);
            if spans.is_empty() {
                continue;
            }
            spanned.extend(blocks_of(&spans, source.len_bytes(file)));
            absent.extend(remote.absent_spans(file, &spans));
            for (mut all, bytes) in [(spanned, &mut found.spanned_bytes), (absent, &mut found.absent_bytes)] {
                merge(&mut all, 0);
                *bytes += all.iter().map(|span| span.len()).sum::<u64>();
            }
            found.spans.push((file, spans));
        }
        Ok(Some(found))
    }

    /// How many times the needed bytes the blocks hold, at least 1.
    pub fn over_read(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
        let ratio = self.spanned_bytes as f64 / self.needed_bytes.max(1) as f64;
        ratio.max(1.0)
    }

    /// As an object of `plan --json`.
    pub fn to_json(&self) -> Value {
        let device =
            |(view, device, bytes): &(String, u64, u64)| json!({"view": view, "device": device, "bytes": bytes});
        json!({
            "devices": self.devices.iter().map(device).collect::<Vec<_>>(),
            "needed_bytes": self.needed_bytes,
            "spanned_bytes": self.spanned_bytes,
            "absent_bytes": self.absent_bytes,
        })
    }
}

/// Spans of a file after which they are merged, to bound the memory.
const SPANS_MAX: usize = 1 << 20;

/// What is read of a file.
#[derive(Debug, Default)]
struct FileReads {
    spans: Vec<ByteSpan>,
    /// What is fetched for strided pieces into an empty cache, and what is to be fetched now: with the gaps within each piece.
    spanned: Vec<ByteSpan>,
    absent: Vec<ByteSpan>,
}

impl FileReads {
    /// Adds the spans of one piece.
    fn add(&mut self, remote: &dyn RemoteSource, file: FileId, len_bytes: u64, spans: &[ByteSpan]) {
        add(&mut self.spans, spans);
        if spans.len() == 1 {
            return;
        }
        let gap = remote.ahead_gap_bytes(file);
        let mut spanned: Vec<ByteSpan> = blocks_of(spans, len_bytes).collect();
        merge(&mut spanned, gap);
        add(&mut self.spanned, &spanned);
        let mut absent = remote.absent_spans(file, spans);
        merge(&mut absent, gap);
        add(&mut self.absent, &absent);
    }
}

/// What is read of all files.
type Reads = BTreeMap<FileId, FileReads>;

/// What the listed devices of a plan read. Parts of tensors are looked at at the same time.
fn reads_of(checkpoint: &Checkpoint, remote: &dyn RemoteSource, plan: &Plan) -> Result<Reads, String> {
    let of_tensor = |tensor| plan.needed_parts(tensor, &plan.devices).into_iter().map(move |part| (tensor, part));
    let parts: Vec<(&PlannedTensor, Region)> = plan.bundle().flat_map(of_tensor).collect();
    let add = |mut all: Reads, (tensor, part): &(&PlannedTensor, Region)| {
        for_each_of_part(checkpoint, tensor, part, FETCHED_BYTES, &mut |file, spans| {
            all.entry(file).or_default().add(remote, file, checkpoint.source().len_bytes(file), spans);
            true
        })?;
        Ok::<Reads, String>(all)
    };
    parts.par_iter().try_fold(Reads::new, add).try_reduce(Reads::new, |left, right| Ok(both(left, right)))
}

fn both(mut reads: Reads, others: Reads) -> Reads {
    for (file, FileReads { spans, spanned, absent }) in others {
        let own = reads.entry(file).or_default();
        add(&mut own.spans, &spans);
        add(&mut own.spanned, &spanned);
        add(&mut own.absent, &absent);
    }
    reads
}

/// Adds spans to those of a file.
fn add(all: &mut Vec<ByteSpan>, spans: &[ByteSpan]) {
    all.extend_from_slice(spans);
    if all.len() > SPANS_MAX {
        merge(all, 0);
    }
}

/// The blocks that hold spans of a file of this length.
fn blocks_of(spans: &[ByteSpan], len_bytes: u64) -> impl Iterator<Item = ByteSpan> {
    spans.iter().filter_map(move |span| {
        let end = span.end().next_multiple_of(FETCHED_BYTES).min(len_bytes);
        ByteSpan::new(span.start() / FETCHED_BYTES * FETCHED_BYTES, end)
    })
}

/// Sorts spans and joins those with a gap of at most `gap` bytes between them.
fn merge(spans: &mut Vec<ByteSpan>, gap: u64) {
    spans.sort_unstable_by_key(|span| span.start());
    let mut kept = 0;
    for at in 1..spans.len() {
        let (last, next) = (spans[kept], spans[at]);
        if next.start() <= last.end().saturating_add(gap) {
            spans[kept] = ByteSpan::new(last.start(), last.end().max(next.end())).unwrap_or(last);
        } else {
            kept += 1;
            spans[kept] = next;
        }
    }
    spans.truncate((kept + 1).min(spans.len()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_merged_where_they_touch() {
        let spans = |pairs: &[(u64, u64)]| -> Vec<ByteSpan> {
            pairs.iter().map(|(start, end)| ByteSpan::new(*start, *end).unwrap()).collect()
        };
        for (given, expected) in [
            (spans(&[]), spans(&[])),
            (spans(&[(5, 9)]), spans(&[(5, 9)])),
            (spans(&[(5, 9), (0, 5), (20, 30), (22, 25)]), spans(&[(0, 9), (20, 30)])),
            (spans(&[(0, 10), (2, 3), (11, 12)]), spans(&[(0, 10), (11, 12)])),
        ] {
            let mut merged = given;
            merge(&mut merged, 0);
            assert_eq!(merged, expected);
        }
        let mut merged = spans(&[(20, 30), (0, 10), (41, 50)]);
        merge(&mut merged, 10);
        assert_eq!(merged, spans(&[(0, 30), (41, 50)]));
    }
}
