//! stub
/// One loop
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// e
    pub extent: u64,
    /// t
    pub target_stride: u64,
    /// s
    pub source_stride: u64,
}
