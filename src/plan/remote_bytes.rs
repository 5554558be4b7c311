//! How many bytes of a remote source the listed devices need, what that costs to fetch, and what is on this machine already.

use serde_json::{Value, json};

use super::{Plan, amplification::Amplification};
use crate::{
    checkpoint::{Checkpoint, FileRole},
    source::{ByteSpan, FileId},
};

/// Gaps of the spans that are counted: less than a block of the disk cache, so that no block is counted that is not needed.
const GAP_BYTES: u64 = 16 << 10;

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
    /// Bytes of the cache's blocks that hold them, other files included.
    pub spanned_bytes: u64,
    /// Bytes that the cache lacks; it brings blocks, so that this may exceed the needed bytes.
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
        if source.remote().is_none() {
            return Ok(None);
        }
        let mut found = Self::default();
        let mut by_file: Vec<Vec<ByteSpan>> = vec![Vec::new(); source.file_count()];
        for file in checkpoint.files() {
            if let Some(id) = file.file.filter(|_| file.role == FileRole::Other && file.size_bytes <= OTHER_BYTES_MAX) {
                by_file[id.index()].extend(ByteSpan::new(0, file.size_bytes));
            }
        }
        for (name, plan) in views {
            let amplification = Amplification::of(checkpoint, plan);
            let rows = plan.devices.iter().zip(&amplification.devices);
            found.devices.extend(rows.map(|(device, reads)| ((*name).to_owned(), *device, reads.needed_bytes)));
            found.needed_bytes += amplification.union.needed_bytes;
            if plan.devices.len() > DEVICES_MAX {
                for file in checkpoint.files().iter().filter(|file| file.role == FileRole::Weights) {
                    let Some(id) = file.file else { continue };
                    by_file[id.index()].extend(ByteSpan::new(0, file.size_bytes));
                }
                continue;
            }
            plan.for_each_needed(checkpoint, &plan.devices, GAP_BYTES, &mut |file, spans| {
                let all = &mut by_file[file.index()];
                all.extend_from_slice(spans);
                if all.len() > SPANS_MAX {
                    merge(all);
                }
                true
            })?;
        }
        for (number, mut spans) in (0..).zip(by_file) {
            merge(&mut spans);
            if spans.is_empty() {
                continue;
            }
            found.spanned_bytes += block_bytes(&spans, source.len_bytes(FileId(number)));
            found.absent_bytes += source.absent_bytes(FileId(number), &spans);
            found.spans.push((FileId(number), spans));
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

/// Bytes of the blocks that hold spans of a file of this length.
fn block_bytes(spans: &[ByteSpan], len_bytes: u64) -> u64 {
    let blocks = spans.iter().filter_map(|span| {
        let end = span.end().next_multiple_of(GAP_BYTES).min(len_bytes);
        ByteSpan::new(span.start() / GAP_BYTES * GAP_BYTES, end)
    });
    let mut blocks: Vec<ByteSpan> = blocks.collect();
    merge(&mut blocks);
    blocks.iter().map(|span| span.len()).sum()
}

/// Sorts spans and joins those that touch or overlap.
fn merge(spans: &mut Vec<ByteSpan>) {
    spans.sort_unstable_by_key(|span| span.start());
    let mut kept = 0;
    for at in 1..spans.len() {
        let (last, next) = (spans[kept], spans[at]);
        if next.start() <= last.end() {
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
            merge(&mut merged);
            assert_eq!(merged, expected);
        }
    }
}
