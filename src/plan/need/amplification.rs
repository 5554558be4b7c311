//! Read amplification of a plan, as `page_reads` counts it.

use ckfs_tensor::Reads;

/// The bytes that a plan's devices read from the sources for all bundled tensors.
#[derive(Clone, Debug)]
pub struct Amplification {
    /// By listed device, in order.
    pub devices: Vec<Reads>,
    /// All listed devices together, as on a host with one page cache.
    pub union: Reads,
    /// By name with `*` for numbers: the reads of these tensors alone, on the device with the greatest excess. Sorted
    /// by excess, the greatest first.
    pub tensors: Vec<(String, Reads)>,
}
