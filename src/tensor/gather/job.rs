//! A strided copy as data: its loops, its decoder, and its kind of stores.

use smallvec::SmallVec;

use super::super::Decode;

/// One loop of a strided copy. Strides are in elements. For elements narrower than a byte the caller converts everything to
/// units, and strides are in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Steps of the loop, at least 1.
    pub extent: u64,
    /// Target elements from one step to the next.
    pub target_stride: u64,
    /// Source elements from one step to the next.
    pub source_stride: u64,
}

/// Loops of a piece, by falling target stride.
pub type Loops = SmallVec<[Loop; 4]>;

/// Sorts loops by falling target stride, drops those of extent 1, and merges neighbours that step alike on both sides.
pub(crate) fn normalize(loops: &mut Loops) {
    loops.retain(|l| l.extent != 1);
    loops.sort_by_key(|l| l.target_stride);
    loops.dedup_by(|outer, inner| {
        let continues = |inner_stride: u64, stride| inner.extent.checked_mul(inner_stride) == Some(stride);
        let chained =
            continues(inner.target_stride, outer.target_stride) && continues(inner.source_stride, outer.source_stride);
        if chained {
            inner.extent *= outer.extent;
        }
        chained
    });
    loops.reverse();
}

/// Everything needed to fill a strided set of target elements from one source tensor.
///
/// Different loop positions must be different target elements; source elements may repeat.
#[derive(Clone, Copy, Debug)]
pub struct Gather<'a> {
    /// How a source element becomes a target element.
    pub decode: &'a Decode,
    /// Bytes of one target element.
    pub target_bytes: u64,
    /// The loops, in any order.
    pub loops: &'a [Loop],
    /// Source element at loop position zero; of a quantized tensor, the number of that logical element.
    pub source_offset: u64,
    /// Target element at loop position zero.
    pub target_offset: u64,
}

/// How target bytes are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stores {
    /// Through the processor's caches: the bytes are read next.
    #[default]
    Cached,
    /// Past the caches, where that is faster: the target is larger than they are.
    Streamed,
}
