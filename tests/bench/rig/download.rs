//! The best that a client of an object store does: parallel ranged reads by `object_store` itself.

use std::{fs::File, os::unix::fs::FileExt, path::Path, time::Instant};

use ckfs::source::remote::runtime::install_tls;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{
    ClientOptions, ObjectStoreExt,
    aws::{AmazonS3, AmazonS3Builder},
    path::Path as Key,
};
use tokio::runtime::Runtime;

use super::Result;

/// Bytes of a request, and the numbers of requests at a time of which the best counts.
const PART_BYTES: u64 = 8 << 20;
const AT_A_TIME: [usize; 3] = [8, 16, 32];

/// A client of a bucket.
pub(crate) struct Downloader {
    runtime: Runtime,
    store: AmazonS3,
}

impl Downloader {
    pub(crate) fn new(endpoint: &str, bucket: &str) -> Result<Self> {
        install_tls();
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_bucket_name(bucket)
            .with_region("us-east-1")
            .with_skip_signature(true)
            .with_client_options(ClientOptions::new().with_allow_http(true))
            .build()?;
        Ok(Self { runtime: tokio::runtime::Builder::new_multi_thread().enable_all().build()?, store })
    }

    /// The fewest seconds in which the first `len` bytes of an object come into memory, and with how many requests at a time.
    pub(crate) fn best(&self, key: &str, len: u64) -> Result<(f64, usize)> {
        let mut best = (f64::INFINITY, 1);
        for at_a_time in AT_A_TIME {
            let seconds = self.seconds(key, len, at_a_time, None)?;
            if seconds < best.0 {
                best = (seconds, at_a_time);
            }
        }
        Ok(best)
    }

    /// The seconds in which they come, into memory or into a file.
    pub(crate) fn seconds(&self, key: &str, len: u64, at_a_time: usize, to: Option<&Path>) -> Result<f64> {
        let file = to.map(File::create).transpose()?;
        let (file, key) = (file.as_ref(), &Key::from(key));
        let starts = (0..len).step_by(usize::try_from(PART_BYTES)?);
        let part = |start: u64| async move {
            let bytes = self.store.get_range(key, start..(start + PART_BYTES).min(len)).await?;
            if let Some(file) = file {
                file.write_all_at(&bytes, start)?;
            }
            Ok::<usize, Box<dyn std::error::Error>>(bytes.len())
        };
        let begun = Instant::now();
        let parts = stream::iter(starts).map(part).buffer_unordered(at_a_time);
        let got = self.runtime.block_on(parts.try_fold(0, |sum, bytes| async move { Ok(sum + bytes as u64) }))?;
        let seconds = begun.elapsed().as_secs_f64();
        if got == len { Ok(seconds) } else { Err(format!("{key}: expected {len} bytes, found {got}").into()) }
    }
}
