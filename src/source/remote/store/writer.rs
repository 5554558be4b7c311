//! Objects that an export writes: each appears as a whole, with a text that tells what it was made from.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use object_store::{
    Attribute, Attributes, Error, GetOptions, GetResult, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    RetryConfig, WriteMultipart, path::Path,
};

use super::{
    super::{
        error::{Failure, RemoteError},
        options::RemoteOptions,
        runtime::block_on,
        url_scheme::{StoreKind, service_of},
    },
    address::{StorePlace, locate},
    client::with_cause,
    observe::Observer,
    reader::path_of,
};

/// The name of an object's text among its metadata.
const TEXT: &str = "ckfs-export";
/// Parts of an object that are sent at a time, and most of an object: 10 000 at S3.
const AT_A_TIME: usize = 4;
const PARTS_MAX: u64 = 9000;
/// Fewest bytes of a part but the last.
const PART_BYTES_MIN: u64 = 8 << 20;
/// Longest time in which a request of a few bytes is repeated.
const RETRY_TIME: Duration = Duration::from_mins(3);

/// A place for objects: a prefix of a bucket.
pub struct Bucket {
    place: StorePlace,
}

impl Bucket {
    /// The place at an address; `None` if it is none of a store that takes objects.
    ///
    /// # Errors
    /// The address or the environment's settings are malformed.
    pub fn open(address: &str, options: &RemoteOptions) -> Option<Result<Self, RemoteError>> {
        let service = service_of(address.split_once("://")?.0).filter(|service| *service != StoreKind::Http)?;
        let retries = RetryConfig { retry_timeout: RETRY_TIME, ..RetryConfig::default() };
        Some(locate(address, service, options, retries).map(|place| Self { place }))
    }

    fn key(&self, name: &str) -> Path {
        let prefix = &self.place.path;
        // As the listing has it: no character is escaped.
        path_of(&if prefix.as_ref().is_empty() { name.to_owned() } else { format!("{prefix}/{name}") })
    }

    /// The objects that are there, with their lengths.
    ///
    /// # Errors
    /// The store does not list.
    pub fn list(&self) -> Result<HashMap<String, u64>, RemoteError> {
        let files = self.place.store.list(&self.place.path)?;
        Ok(files.into_iter().map(|file| (file.path, file.size_bytes)).collect())
    }

    /// The result of a request.
    fn run<T>(&self, name: &str, request: impl Future<Output = object_store::Result<T>>) -> Result<T, RemoteError> {
        let store = &self.place.store;
        block_on(&store.host, request)?.map_err(|error| {
            let what = format!("{}/{}", store.address, self.key(name));
            let message = with_cause(&error);
            if matches!(error, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) {
                return RemoteError::new(Failure::Refused, &store.host, &what, format!("{message}; {}", store.advice));
            }
            // It was repeated already.
            RemoteError::new(Failure::Unsupported, &store.host, &what, message)
        })
    }

    /// The text that an object was written with; `None` if it is not there, and an empty one if it has none.
    ///
    /// # Errors
    /// The store does not tell.
    pub fn text_of(&self, name: &str) -> Result<Option<String>, RemoteError> {
        let mut options = GetOptions { head: true, ..GetOptions::default() };
        options.extensions.insert(Observer::default());
        let found = self.run(name, async {
            match self.place.store.inner.get_opts(&self.key(name), options).await {
                Err(Error::NotFound { .. }) => Ok(None),
                got => got.map(Some),
            }
        })?;
        let text =
            |found: GetResult| found.attributes.get(&Attribute::Metadata(TEXT.into())).map(|text| text.to_string());
        Ok(found.map(|found| text(found).unwrap_or_default()))
    }

    /// Makes an empty object with this text, and returns whether it did: without `replace` one that is there stays.
    ///
    /// # Errors
    /// The store takes none.
    pub fn mark(&self, name: &str, text: &str, replace: bool) -> Result<bool, RemoteError> {
        let mode = if replace { PutMode::Overwrite } else { PutMode::Create };
        let options = PutOptions { mode, attributes: attributes(text), ..PutOptions::default() };
        self.run(name, async {
            match self.place.store.inner.put_opts(&self.key(name), Bytes::new().into(), options).await {
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
                put => put.map(|_| true),
            }
        })
    }

    /// Removes an object, if it is there.
    ///
    /// # Errors
    /// The store does not let it go.
    pub fn remove(&self, name: &str) -> Result<(), RemoteError> {
        self.run(name, async {
            match self.place.store.inner.delete(&self.key(name)).await {
                Err(Error::NotFound { .. }) => Ok(()),
                deleted => deleted,
            }
        })
    }

    /// Writes an object of `len_bytes` in parts, which `fill` passes in order. It appears, or replaces another, when all are there.
    ///
    /// # Errors
    /// That of `fill`, or of the store. The parts are then removed.
    pub fn write<E: From<RemoteError>>(
        &self,
        name: &str,
        len_bytes: u64,
        text: &str,
        fill: impl FnOnce(&mut dyn FnMut(Vec<u8>) -> Result<(), RemoteError>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (key, mut options) = (self.key(name), PutMultipartOptions::default());
        options.attributes = attributes(text);
        options.extensions.insert(Observer::default());
        let upload = self.run(name, self.place.store.inner.put_multipart_opts(&key, options))?;
        let part_bytes = usize::try_from(PART_BYTES_MIN.max(len_bytes.div_ceil(PARTS_MAX))).unwrap_or(usize::MAX);
        let mut parts = WriteMultipart::new_with_chunk_size(upload, part_bytes);
        let mut found_bytes = 0;
        let filled = fill(&mut |bytes| {
            found_bytes += bytes.len() as u64;
            self.run(name, async {
                parts.wait_for_capacity(AT_A_TIME).await?;
                parts.put(bytes.into());
                Ok(())
            })
        });
        if filled.is_ok() && found_bytes == len_bytes {
            return Ok(self.run(name, parts.finish()).map(drop)?);
        }
        if let Err(error) = self.run(name, parts.abort()) {
            tracing::warn!("{error}: parts of it are left in the store");
        }
        filled.and_then(|()| {
            let message = format!("expected {len_bytes} bytes, found {found_bytes}");
            Err(RemoteError::new(Failure::Unsupported, &self.place.store.host, name, message).into())
        })
    }
}

fn attributes(text: &str) -> Attributes {
    Attributes::from_iter([(Attribute::Metadata(TEXT.into()), text.to_owned())])
}
