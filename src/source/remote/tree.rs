//! A remote repository as files that can be opened: an entry in the cache for each object.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use rayon::iter::{IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};

use super::{
    super::{ByteSpan, SourceError},
    cache::{
        Cache,
        geometry::{BLOCK_BYTES, block_count},
    },
    digest,
    fetcher::{Demand, Fetcher},
    handle::Remote,
    interface::RemoteRepository,
    object::{FetchError, RemoteObject},
    options::RemoteOptions,
    retry::{Backoff, Deadline, Retrying},
};

/// Bytes fetched from the beginning of each file of tensors when a repository is opened: most headers fit.
const HEAD_BYTES: u64 = 128 << 10;
/// The length of a header of safetensors is in the first bytes of its file.
const PREFIX_BYTES: u64 = 8;
/// Longer headers are not fetched together: the parser refuses them.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Files up to this size are fetched whole when a repository is opened.
const SMALL_BYTES: u64 = 64 << 10;
/// At most this number of them: a directory of arrays may have very many.
const SMALL_FILES_MAX: usize = 512;
/// Files with these names are fetched whole up to the next limit: opening a checkpoint reads them.
const NEEDED: [&str; 12] = [
    "config.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    ".metadata",
    "_METADATA",
    "_sharding",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
    ".zmetadata",
    ".zarray",
];
const NEEDED_BYTES_MAX: u64 = 64 << 20;

/// A remote repository, open: its files can be found.
pub struct RemoteTree {
    repository: RemoteRepository,
    service: Arc<Retrying>,
    fetcher: Arc<Fetcher>,
    /// Made when they are first used: a checkpoint of a trainer may have very many files that are never read.
    remotes: Vec<OnceLock<Remote>>,
}

impl RemoteTree {
    /// Descriptors of an open file: the sparse file for writing and for reading, and its map.
    pub const DESCRIPTORS: usize = 3;

    /// Opens a repository, and fetches what opening a checkpoint will read: small files and headers, all at once.
    ///
    /// # Errors
    /// What is needed does not come, or the cache cannot be used.
    pub fn open(
        repository: RemoteRepository,
        cache: &Arc<Cache>,
        options: &RemoteOptions,
    ) -> Result<Self, SourceError> {
        let (objects, counters) = (Arc::clone(&repository.objects), Arc::clone(cache.counters()));
        let gate = Backoff::new(objects.host(), options.timeout, &options.waits, counters);
        let service = Arc::new(Retrying::new(gate, objects));
        let remotes = repository.files.iter().map(|_| OnceLock::new()).collect();
        let fetcher = Arc::new(Fetcher::new(Arc::clone(cache)));
        let tree = Self { repository, service, fetcher, remotes };
        tree.fetch_heads()?;
        Ok(tree)
    }

    /// The repository.
    pub fn repository(&self) -> &RemoteRepository {
        &self.repository
    }

    /// The file at a place of the repository's list, with its entry in the cache.
    ///
    /// # Errors
    /// The cache cannot be used.
    ///
    /// # Panics
    /// If the list is shorter.
    pub fn remote(&self, place: usize) -> Result<&Remote, SourceError> {
        if let Some(remote) = self.remotes[place].get() {
            return Ok(remote);
        }
        let file = &self.repository.files[place];
        let name: Arc<Path> = Arc::from(Path::new(&self.repository.name_of(file)));
        let origin = self.repository.objects.origin();
        let entry = self.fetcher.cache().entry(file, origin, &name.display().to_string());
        let entry = entry.map_err(|error| SourceError::io(Arc::clone(&name), "make its entry in the cache", error))?;
        let object = Arc::new(RemoteObject::new(file.clone(), name, entry, Arc::clone(&self.service)));
        let made = Remote { object, fetcher: Arc::clone(&self.fetcher) };
        Ok(self.remotes[place].get_or_init(|| made))
    }

    fn fetch_heads(&self) -> Result<(), SourceError> {
        let mut small = 0;
        let mut heads: Vec<(usize, u64)> = Vec::new();
        let mut cut = Vec::new();
        for (place, file) in self.repository.files.iter().enumerate() {
            let (size, name) = (file.size_bytes, file.path.rsplit('/').next().unwrap_or_default());
            let needed = NEEDED.contains(&name) && size <= NEEDED_BYTES_MAX;
            let is_small = size <= SMALL_BYTES && small < SMALL_FILES_MAX;
            let whole = block_count(size);
            let blocks = if needed || is_small {
                small += usize::from(!needed);
                whole
            } else if Path::new(name).extension().is_some_and(|extension| extension == "safetensors") || name.is_empty()
            {
                if size > HEAD_BYTES {
                    cut.push(place);
                }
                whole.min(HEAD_BYTES / BLOCK_BYTES)
            } else {
                0
            };
            if blocks > 0 {
                heads.push((place, blocks));
            }
        }
        // To make the entries of a cold cache takes about a millisecond each.
        let demand = |(place, blocks): (usize, u64)| {
            Ok::<Demand, SourceError>((Arc::clone(&self.remote(place)?.object), std::iter::once(0..blocks).collect()))
        };
        let demands = heads.into_par_iter().map(demand).collect::<Result<Vec<Demand>, SourceError>>()?;
        if self.bring(&demands)? {
            self.compare_small(&demands)?;
            self.bring(&self.rest_of_headers(&cut)?)?;
        }
        Ok(())
    }

    /// Compares the small files that are complete with their digests, before anything is made of them.
    fn compare_small(&self, demands: &[Demand]) -> Result<(), SourceError> {
        let compare = |(object, _): &Demand| {
            let remote = Remote { object: Arc::clone(object), fetcher: Arc::clone(&self.fetcher) };
            if object.file.size_bytes > NEEDED_BYTES_MAX || !digest::is_open(object) || !object.entry.is_whole() {
                return Ok(());
            }
            digest::settle(&remote).map(|_| ())
        };
        demands.par_iter().try_for_each(compare)
    }

    /// The headers that are longer than what was fetched of their files, so that they come all at once too.
    fn rest_of_headers(&self, places: &[usize]) -> Result<Vec<Demand>, SourceError> {
        let mut demands = Vec::new();
        for place in places {
            let remote = self.remote(*place)?;
            let object = &remote.object;
            let mut prefix = [0; size_of::<u64>()];
            let span = ByteSpan::of_len(0, PREFIX_BYTES).filter(|span| object.file.span().contains(*span));
            // Opening the checkpoint reads it again, and reports the error.
            let Some(Ok(())) = span.map(|span| remote.read_span(span, &mut prefix)) else { continue };
            let len = u64::from_le_bytes(prefix);
            let end = PREFIX_BYTES.saturating_add(len);
            if len <= HEADER_BYTES_MAX && end > HEAD_BYTES && end <= object.file.size_bytes {
                let blocks = HEAD_BYTES / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
                demands.push((Arc::clone(object), std::iter::once(blocks).collect()));
            }
        }
        Ok(demands)
    }

    /// Brings blocks of several objects together. Returns false if the cache has no room for them.
    fn bring(&self, demands: &[Demand]) -> Result<bool, SourceError> {
        self.fetcher.fetch(demands, 0, Deadline::Quiet).map(|()| true).or_else(|failure| match failure {
            // Whatever reads them reads past the cache then.
            FetchError::NoRoom | FetchError::Cache(_) => Ok(false),
            FetchError::Remote(name, error) => {
                Err(SourceError::remote(name, error.span.unwrap_or(ByteSpan::EMPTY), &error))
            }
        })
    }
}

/// The cache that the options name. Where there is none, or it cannot be used, memory serves for headers and small files, and a
/// warning says so.
pub fn open_cache(options: &RemoteOptions, counters: Arc<super::RemoteCounters>) -> Arc<Cache> {
    let Some(dir) = options.cache_dir.clone().or_else(super::cache::default_directory) else {
        tracing::warn!(
            "no disk cache: neither --cache-dir, CKFS_CACHE_DIR, XDG_CACHE_HOME nor HOME is set; nothing is kept"
        );
        return Cache::in_memory(counters);
    };
    match Cache::open(&dir, options.cache_disk_bytes, Arc::clone(&counters)) {
        Ok(cache) => cache,
        Err(error) => {
            tracing::warn!("no disk cache in {}: {error}; nothing is kept", dir.display());
            Cache::in_memory(counters)
        }
    }
}
