//! Where the bytes of a checkpoint come from.
//!
//! The seam is narrow: an object has a length and a version pinned before mount, and gives byte spans. A local file also
//! lends its mapping, so that contiguous reads are answered without a copy.
