//! Casts to floats of 8 bits without scales: what is large becomes NaN or infinite, and what is small becomes 0. The warning names the
//! worst that the first bytes of the weights have.

use ckfs_checkpoint::{Checkpoint, Storage};
use ckfs_tensor::{DType, Load, Program, SourceTensor, convert_row};

use super::super::planned::PlannedTensor;

/// Bytes of one tensor that are looked at, and of all: those of a service cost a request each, and none of them is asked.
const BYTES: u64 = 1 << 20;
const BYTES_ALL: u64 = 64 << 20;

/// Whether weights of a dtype are of little use without scales.
pub(crate) fn needs_scales(dtype: DType) -> bool {
    dtype.is_float() && dtype.bits() <= 8
}

/// The warning of tensors that are cast to floats of 8 bits; `None` if none is.
pub(crate) fn warning(checkpoint: &Checkpoint, tensors: &[PlannedTensor]) -> Option<String> {
    let mut found = LostValues::default();
    let (mut target, mut count, mut left) = (None, 0_u64, BYTES_ALL);
    for tensor in tensors.iter().filter(|tensor| needs_scales(tensor.view.dtype())) {
        let mut wide = Vec::new();
        tensor.view.for_each_source(&mut |source| wide.extend((!needs_scales(source.dtype)).then(|| source.clone())));
        count += u64::from(!wide.is_empty());
        target = target.or_else(|| wide.first().map(|_| tensor.view.dtype()));
        for source in wide.iter().filter(|source| matches!(source.dtype, DType::BF16 | DType::F16 | DType::F32)) {
            left = found.look(checkpoint, source, tensor.view.dtype(), left);
        }
    }
    let words = |found: &Option<(f32, String)>, becomes: &str| {
        found.as_ref().map(|(value, name)| format!("{value} in {name} becomes {becomes}"))
    };
    let worst: Vec<String> =
        [words(&found.large, "NaN or infinite"), words(&found.small, "0")].into_iter().flatten().collect();
    let worst = if worst.is_empty() { String::new() } else { format!(": {}", worst.join(", and ")) };
    Some(format!(
        "{count} tensors are cast to {} without scales{worst}; --quantize fp8-block shows weights in fp8 with scales, and leaves the others",
        target?
    ))
}

/// The worst values: the largest that is beyond the type, and the largest that becomes 0, each with its tensor.
#[derive(Default)]
struct LostValues {
    large: Option<(f32, String)>,
    small: Option<(f32, String)>,
}

impl LostValues {
    /// Looks at the first bytes of a tensor, at most `left`, and returns how many are left for others.
    fn look(&mut self, checkpoint: &Checkpoint, tensor: &SourceTensor, target: DType, left: u64) -> u64 {
        let info = checkpoint.tensor(tensor.id);
        let (Storage::Plain { file, span }, None) = (info.storage, checkpoint.source().remote()) else { return left };
        let unit = tensor.dtype.bits() / 8;
        let len = span.len().min(BYTES).min(left) / unit;
        let elements = usize::try_from(len).expect("a megabyte");
        let mut stored = vec![0; usize::try_from(len * unit).expect("a megabyte")];
        // A file that cannot be read is reported by what reads it.
        if checkpoint.source().read_into(file, span.start(), &mut stored).is_err() {
            return left;
        }
        let cast = |from: DType, to: DType, source: &[u8]| {
            let mut cast = vec![0; elements * usize::try_from(to.bits() / 8).expect("1 to 4")];
            convert_row(&Program { load: Load::Element(from), steps: Vec::new(), target: to }, source, &mut cast);
            cast
        };
        let floats = |bytes: Vec<u8>| {
            let floats = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            floats.collect::<Vec<f32>>()
        };
        let before = floats(cast(tensor.dtype, DType::F32, &stored));
        let after = floats(cast(target, DType::F32, &cast(tensor.dtype, target, &stored)));
        for (before, after) in before.into_iter().zip(after).filter(|(before, _)| before.is_finite()) {
            let place = if !after.is_finite() {
                &mut self.large
            } else if after == 0.0 && before != 0.0 {
                &mut self.small
            } else {
                continue;
            };
            if place.as_ref().is_none_or(|(worst, _)| before.abs() > worst.abs()) {
                *place = Some((before, info.name.to_owned()));
            }
        }
        left - len * unit
    }
}
