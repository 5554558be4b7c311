//! The name of the one bucket.

/// The bucket; also the access key, where signatures are checked.
pub(super) const BUCKET: &str = "ckfs";
