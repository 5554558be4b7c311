//! Listings of stores, kept in the disk cache: a run with `--offline` reads what an earlier run has pinned and fetched.
//!
//! ```text
//! <cache>/stores/<digest of the address>.json   the objects that were listed last, with their versions
//! ```
//!
//! The address holds the endpoint. A listing that cannot be read is as good as none.

use std::{
    borrow::Cow,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::super::{
    super::digest::hexadecimal,
    interface::RemoteFile,
    kept_file::replace,
    options::{RemoteOptions, default_directory},
};

/// What is kept.
#[derive(Debug, Serialize, Deserialize)]
struct Listing<'a> {
    address: Cow<'a, str>,
    files: Cow<'a, [RemoteFile]>,
}

/// The kept listing of one address.
#[derive(Debug)]
pub(super) struct KeptObjects {
    address: String,
    /// The directory of the disk cache; `None` where there is none.
    cache: Option<PathBuf>,
    /// Its path below that.
    inside: PathBuf,
}

impl KeptObjects {
    /// The listing of an address in the cache that the options name.
    pub(super) fn new(address: String, options: &RemoteOptions) -> Self {
        let dir = options.cache_dir.clone().or_else(default_directory);
        let name = format!("{}.json", hexadecimal(&Sha256::digest(address.as_bytes())));
        Self { address, cache: dir, inside: Path::new("stores").join(name) }
    }

    pub(super) fn keep(&self, files: &[RemoteFile]) {
        let listing = Listing { address: Cow::from(&self.address), files: Cow::from(files) };
        if let Ok(text) = serde_json::to_vec(&listing) {
            replace(self.cache.as_deref(), &self.inside, &text);
        }
    }

    pub(super) fn files(&self) -> Option<Vec<RemoteFile>> {
        let text = fs::read(self.cache.as_ref()?.join(&self.inside)).ok()?;
        let listing: Listing<'_> = serde_json::from_slice(&text).ok()?;
        (listing.address == self.address).then(|| listing.files.into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::interface::Content, *};

    #[test]
    fn a_listing_is_kept_and_a_damaged_one_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let options = RemoteOptions { cache_dir: Some(dir.path().to_owned()), ..RemoteOptions::default() };
        let kept = KeptObjects::new("s3://bucket at host/models".into(), &options);
        assert_eq!(kept.files(), None);
        let file = |path: &str, etag: Option<&str>| RemoteFile {
            path: path.into(),
            key: format!("models/{path}"),
            size_bytes: 7,
            content: Content::Version { object: format!("s3://bucket/models/{path}"), version: "etag 1".into() },
            etag: etag.map(str::to_owned),
            modified_seconds: Some(3),
        };
        let files = vec![file("a", Some("1")), file("b/c", None)];
        kept.keep(&files);
        assert_eq!(kept.files().as_ref(), Some(&files));
        assert_eq!(KeptObjects::new("s3://bucket at other/models".into(), &options).files(), None, "another endpoint");
        let path = dir.path().join(&kept.inside);
        // Other versions read it, too.
        let a = r#"{"path":"a","key":"models/a","size":7,"object":"s3://bucket/models/a","version":"etag 1","etag":"1","modified":3}"#;
        let b = r#"{"path":"b/c","key":"models/b/c","size":7,"object":"s3://bucket/models/b/c","version":"etag 1","modified":3}"#;
        let text = format!(r#"{{"address":"s3://bucket at host/models","files":[{a},{b}]}}"#);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        for damage in ["", "{}", r#"{"address":"s3://other","files":[]}"#] {
            fs::write(&path, damage).unwrap();
            assert_eq!(kept.files(), None, "{damage}");
        }
    }
}
