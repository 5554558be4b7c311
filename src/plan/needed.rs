//! The source bytes that the listed devices of a plan read: what a host must have before its trainer can start.

use std::collections::HashSet;

use super::{Plan, PlannedTensor};
use crate::{
    checkpoint::Checkpoint,
    source::{ByteSpan, FileId},
    tensor::{Origin, Region, Runs, TensorId, Tiling, needs},
};

/// Receives the spans of one piece in one file, ascending. `false` ends the walk.
pub(super) type Emit<'a> = dyn FnMut(FileId, &[ByteSpan]) -> bool + 'a;

impl Plan {
    /// Emits the spans that `devices` read for all bundled tensors, in the order of the tensors: each weight once, as files that
    /// bundle tensors hold it. Bytes that several devices or tensors read may be emitted several times. Gaps of less than
    /// `gap_bytes` are filled, which keeps the number of spans small.
    ///
    /// # Errors
    /// The name of a tensor whose view cannot be lowered, with the reason. A plan that can be mounted has none.
    pub fn for_each_needed(
        &self,
        checkpoint: &Checkpoint,
        devices: &[u64],
        gap_bytes: u64,
        emit: &mut Emit<'_>,
    ) -> Result<(), String> {
        for tensor in self.bundle() {
            let mut known: HashSet<Region> = HashSet::new();
            for device in devices {
                let region = self.region(tensor, *device);
                if region.shape().is_empty() || known.contains(&region) {
                    continue;
                }
                if !for_each_of_region(checkpoint, tensor, &region, gap_bytes, emit)? {
                    return Ok(());
                }
                known.insert(region);
            }
        }
        Ok(())
    }
}

fn for_each_of_region(
    checkpoint: &Checkpoint,
    tensor: &PlannedTensor,
    region: &Region,
    gap_bytes: u64,
    emit: &mut Emit<'_>,
) -> Result<bool, String> {
    let failed = |reason: String| format!("{}: {reason}", tensor.name);
    let view = tensor.view.region(region).map_err(|error| failed(error.to_string()))?;
    let tiling = view.lower().map_err(|error| failed(error.to_string()))?;
    for (id, runs) in runs_of(&tiling) {
        let info = checkpoint.tensor(id);
        let (file, first) = (info.file(), info.span().start());
        let mut spans: Vec<ByteSpan> = Vec::new();
        runs.for_each_span(gap_bytes, &mut |start, len| spans.extend(ByteSpan::of_len(first + start, len)));
        if !spans.is_empty() && !emit(file, &spans) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The runs of all pieces, of quantized tensors those of every operand.
fn runs_of(tiling: &Tiling) -> impl Iterator<Item = (TensorId, Runs)> {
    tiling.pieces().iter().flat_map(move |piece| {
        let Origin::Tensor { offset, decoder, .. } = piece.origin else { return Vec::new() };
        match tiling.decoders()[decoder as usize].value() {
            Some(value) => {
                let of_operand = |need: crate::tensor::Need<'_>| {
                    let id = need.operand.tensor.id;
                    need.runs.into_iter().map(move |runs| (id, runs))
                };
                needs(value, offset, &piece.loops).into_iter().flat_map(of_operand).collect()
            }
            None => Runs::of(tiling, piece).into_vec(),
        }
    })
}
