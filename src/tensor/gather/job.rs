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

impl Gather<'_> {
    /// Passes the job to `each` in turns of the loop with the largest source steps, until one fails. `None`, without any call,
    /// if the job is one element.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn in_turns<E>(&self, each: &mut dyn FnMut(&Gather<'_>) -> Result<(), E>) -> Option<Result<(), E>> {
        let loops = self.loops.iter().enumerate().filter(|(_, l)| l.extent > 1);
        let (at, outer) = loops.max_by_key(|(_, l)| l.source_stride)?;
        let others = self.loops.iter().enumerate().filter(|(index, _)| *index != at);
        let inner: SmallVec<[Loop; 4]> = others.map(|(_, l)| *l).collect();
        Some((0..outer.extent).try_for_each(|turn| {
            each(&Gather {
                loops: &inner,
                source_offset: self.source_offset + turn * outer.source_stride,
                target_offset: self.target_offset + turn * outer.target_stride,
                ..*self
            })
        }))
    }
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
