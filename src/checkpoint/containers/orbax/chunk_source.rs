//! A source with more files than another: its decoded files.
//!
//! A fetch from a decoded file decodes the chunks that it touches, each whole and once, whatever its own size: they are kept as
//! long as there is room. Different chunks are decoded by all cores at once, and those that a sequential reader will need next are
//! decoded while it still reads others.
//!
//! A decoded file is checked, poisoned and stalled as the file is that its chunks are stored in. Stored bytes are copied before they
//! are decoded, never decoded in a map: a file that changes at that moment gives an error, not a decoder that reads two versions.

use std::{collections::BTreeMap, fs::File, sync::Arc};

use ckfs_source::{
    ByteSpan, Coded, DecodedChunks, FetchPart, FileFetch, FileId, Health, KernelBytes, Maps, Pin, ReadFailure,
    RemoteSource, Replied, Source, SourceError, digest::Compared, permission::AccessRules,
};
use ckfs_sync::{Helpers, processors};
use ckfs_tensor::to_usize;
use parking_lot::Mutex;

use super::{
    coded::{CodedBytes, DecodedFile, FileCoding},
    decoder::Decoder,
};
use crate::problem::{BYTES_MAX, Problem, Problems};
use lru::LruCache;

/// Most bytes of chunks that the slow decoder has made, unless a single one has more.
const BY_DEFINITION_BYTES_MAX: usize = 64 << 20;

/// Threads that decode with their readers.
static DECODING: Helpers = Helpers::new("ckfs-decode", || 2 * processors());

/// A source whose files with coded chunks are also shown decoded. The decoded files come after its own.
pub(crate) struct ChunkSource {
    inner: Arc<dyn Source>,
    decoder: Arc<Decoder>,
    /// Bytes of the largest chunk.
    chunk_bytes_max: u64,
    pins: Vec<Pin>,
    /// Chunks that the slow decoder made last.
    by_definition: Mutex<Chunks>,
    /// Held while the slow decoder makes a large chunk.
    large_by_definition: Mutex<()>,
}

/// Decoded chunks, by file and number.
type Chunks = LruCache<(u32, u64), Arc<Vec<u8>>>;

/// Parts of one chunk that are to be copied: first byte in the chunk, and target.
type Wanted<'a> = Vec<(u64, &'a mut [u8])>;

impl ChunkSource {
    /// `inner` with these decoded files after its own; `inner` itself if there are none.
    pub(crate) fn over(inner: Arc<dyn Source>, files: &Arc<[DecodedFile]>) -> Arc<dyn Source> {
        if files.is_empty() {
            return inner;
        }
        inner.health().name_others(files.iter().map(|file| file.stored_in).collect());
        Arc::new(Self::new(inner, Arc::clone(files)))
    }

    /// The same, to look at. More bytes than may be are a problem.
    pub(crate) fn looked_at(inner: &Arc<dyn Source>, files: &[DecodedFile], problems: &mut Problems) -> Self {
        let source = Self::new(Arc::clone(inner), files.into());
        if source.pins.iter().map(|pin| pin.len_bytes).fold(0, u64::saturating_add) > BYTES_MAX {
            problems.push(Problem::TooManyBytes);
        }
        source
    }

    /// The files have no health of their own yet.
    fn new(inner: Arc<dyn Source>, files: Arc<[DecodedFile]>) -> Self {
        let pin = |file: &DecodedFile| {
            let pin = inner.pin(file.stored_in).clone();
            let files = file.files();
            let gates = AccessRules::all(files.iter().map(|file| &inner.pin(*file).gates)).unwrap_or(pin.gates);
            Pin { len_bytes: file.len_bytes, gates, ..pin }
        };
        let pins = files.iter().map(pin).collect();
        let chunk_bytes_max = files.iter().map(DecodedFile::chunk_bytes).max().unwrap_or(0);
        let decoder = Arc::new(Decoder::new(Arc::clone(&inner), files));
        Self {
            inner,
            decoder,
            chunk_bytes_max,
            pins,
            by_definition: Mutex::new(LruCache::unbounded()),
            large_by_definition: Mutex::default(),
        }
    }

    /// The decoded file of this id, with its number; `None` if it is a file of the inner source.
    fn decoded(&self, file: FileId) -> Option<(u32, &DecodedFile)> {
        let number = file.index().checked_sub(self.inner.file_count())?;
        Some((u32::try_from(number).expect("a number of 32 bits less another"), &self.decoder.files[number]))
    }

    /// The file of the inner source that this one is, or is stored in.
    fn stored_in(&self, file: FileId) -> FileId {
        self.decoded(file).map_or(file, |(_, decoded)| decoded.stored_in)
    }

    /// Splits parts of a decoded file into those of its chunks.
    fn split<'p>(
        &self,
        file: FileId,
        (number, decoded): (u32, &DecodedFile),
        parts: &'p mut [FetchPart<'_>],
        wanted: &mut BTreeMap<(u32, u64), Wanted<'p>>,
    ) -> Result<(), SourceError> {
        let (chunk_bytes, len_bytes) = (decoded.chunk_bytes(), decoded.len_bytes);
        for part in parts {
            let beyond = ByteSpan::new(part.start, u64::MAX).expect("no start is above u64::MAX");
            let span = part.span().unwrap_or(beyond);
            if span.end() > len_bytes {
                return Err(SourceError::out_of_bounds(&self.pin(file).path, span, len_bytes));
            }
            let (mut at, mut rest) = (part.start, &mut *part.target);
            while !rest.is_empty() {
                let (chunk, inside) = (at / chunk_bytes, at % chunk_bytes);
                let len = rest.len().min(to_usize(chunk_bytes - inside));
                let (target, after) = rest.split_at_mut(len);
                wanted.entry((number, chunk)).or_default().push((inside, target));
                (at, rest) = (at + len as u64, after);
            }
        }
        Ok(())
    }

    /// The decoded chunk by the slow decoder. The last ones are kept.
    fn by_definition(&self, key: (u32, u64)) -> Result<Arc<Vec<u8>>, SourceError> {
        let lock = || self.by_definition.lock();
        if let Some(found) = lock().get(&key) {
            return Ok(Arc::clone(found));
        }
        self.decoder.check_memory(key)?;
        let decoded = &self.decoder.files[key.0 as usize];
        // Several threads would decode several large chunks at once.
        let is_large = to_usize(decoded.chunk_bytes()) > BY_DEFINITION_BYTES_MAX;
        let _alone = is_large.then(|| self.large_by_definition.lock());
        if is_large && let Some(found) = lock().get(&key) {
            return Ok(Arc::clone(found));
        }
        let chunk = &*decoded.chunk(key.1).expect("keys are of chunks that there are");
        let bytes = match (&decoded.coding, &chunk.bytes) {
            (FileCoding::Delta(tensor), _) => Ok(tensor.decode_by_definition(&*self.inner)?),
            // Blocks have one decoder, in which nothing is fast.
            (FileCoding::Blocks(tensor), CodedBytes::Span(span)) => {
                let (mut stored, mut bytes) =
                    (vec![0; to_usize(span.len())], vec![0; to_usize(tensor.bytes_of(key.1))]);
                tensor.decode(&*self.inner, *span, &mut stored, &mut bytes)?;
                Ok(bytes)
            }
            (FileCoding::Blocks(_), CodedBytes::Inline(_)) => unreachable!("blocks are in files"),
            (FileCoding::Array(array), CodedBytes::Inline(bytes)) => {
                array.array.decode_by_definition(array.is_inner, bytes)
            }
            (FileCoding::Array(array), CodedBytes::Span(span)) => {
                let stored = self.inner.read_bytes(decoded.stored_in, span.start(), span.len())?;
                array.array.decode_by_definition(array.is_inner, &stored)
            }
        };
        let bytes = Arc::new(bytes.map_err(|error| self.decoder.undecodable(decoded, chunk, error))?);
        let mut kept = lock();
        kept.push(key, Arc::clone(&bytes));
        let bytes_of = |kept: &LruCache<_, Arc<Vec<u8>>>| kept.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        while kept.len() > 1 && bytes_of(&kept) > BY_DEFINITION_BYTES_MAX {
            kept.pop_lru();
        }
        Ok(bytes)
    }

    fn copy(&self, key: (u32, u64), wanted: Wanted<'_>) -> Result<(), SourceError> {
        let chunk = self.decoder.chunk(key)?;
        for (start, target) in wanted {
            target.copy_from_slice(&chunk[to_usize(start)..][..target.len()]);
            self.decoder.pool.note_read(key, target.len() as u64);
        }
        Ok(())
    }

    /// Copies from all chunks, those that must be decoded by all cores. An error has the number of the decoded file.
    fn copy_all(&self, wanted: BTreeMap<(u32, u64), Wanted<'_>>) -> Result<(), (u32, SourceError)> {
        let mut missing = Vec::new();
        for (key, parts) in wanted {
            match self.decoder.pool.find(key) {
                Some(_) => self.copy(key, parts).map_err(|error| (key.0, error))?,
                None => missing.push((key, parts)),
            }
        }
        DECODING.each(processors(), missing, |(key, parts)| self.copy(key, parts).map_err(|error| (key.0, error)))
    }
}

impl Source for ChunkSource {
    fn file_count(&self) -> usize {
        self.inner.file_count() + self.decoder.files.len()
    }

    fn pin(&self, file: FileId) -> &Pin {
        match self.decoded(file) {
            Some((number, _)) => &self.pins[number as usize],
            None => self.inner.pin(file),
        }
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        self.inner.check(self.stored_in(file))
    }

    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        self.inner.check_path(self.stored_in(file))
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        if self.decoded(file).is_none() {
            return self.inner.fetch(file, parts);
        }
        self.fetch_files(&mut [FileFetch { file, parts }]).map_err(|(_, error)| error)
    }

    fn fetch_files(&self, files: &mut [FileFetch<'_, '_>]) -> Result<(), (FileId, SourceError)> {
        let mut wanted = BTreeMap::new();
        let mut own = Vec::new();
        for FileFetch { file, parts } in files {
            let file = *file;
            match self.decoded(file) {
                None => own.push(FileFetch { file, parts }),
                Some(decoded) => {
                    let usable = self.inner.health().usable(decoded.1.stored_in);
                    usable
                        .and_then(|()| self.split(file, decoded, parts, &mut wanted))
                        .map_err(|error| (file, error))?;
                }
            }
        }
        if !own.is_empty() {
            self.inner.fetch_files(&mut own)?;
        }
        let first = u32::try_from(self.inner.file_count()).expect("files are numbered by 32 bits");
        self.copy_all(wanted).map_err(|(number, error)| (FileId(first + number), error))
    }

    fn gap_bytes(&self) -> u64 {
        self.inner.gap_bytes()
    }

    fn is_used(&self, file: FileId) -> bool {
        self.decoded(file).is_none() && self.inner.is_used(file)
    }

    fn note_right(&self, file: FileId) {
        if self.decoded(file).is_none() {
            self.inner.note_right(file);
        }
    }

    fn compare(&self, file: FileId) -> Result<Compared, SourceError> {
        if self.decoded(file).is_some() { Ok(Compared::Unknown) } else { self.inner.compare(file) }
    }

    /// Readers of decoded chunks request the stored bytes themselves.
    fn remote(&self) -> Option<&dyn RemoteSource> {
        self.inner.remote()
    }

    fn chunks(&self) -> Option<&dyn DecodedChunks> {
        Some(self)
    }

    fn health(&self) -> &Health {
        self.inner.health()
    }

    fn maps(&self) -> Option<&dyn Maps> {
        Some(self)
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        if self.decoded(file).is_some() { None } else { self.inner.backing(file) }
    }
}

impl DecodedChunks for ChunkSource {
    fn coded(&self, file: FileId, at: u64) -> Option<Coded> {
        let (_, decoded) = self.decoded(file)?;
        let chunk = decoded.chunk(at / decoded.chunk_bytes())?;
        let (name, codec) = decoded.described(&chunk);
        Some(Coded { chunk: name, codec, stored: chunk.bytes.span() })
    }

    fn decode_by_definition(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let Some((number, decoded)) = self.decoded(file) else {
            return self.inner.read_into(file, start, target);
        };
        let mut wanted = BTreeMap::new();
        let mut parts = [FetchPart { start, target }];
        self.split(file, (number, decoded), &mut parts, &mut wanted)?;
        for (key, parts) in wanted {
            let chunk = self.by_definition(key)?;
            for (start, target) in parts {
                target.copy_from_slice(&chunk[to_usize(start)..][..target.len()]);
            }
        }
        Ok(())
    }

    fn chunk_bytes_max(&self) -> u64 {
        self.chunk_bytes_max
    }

    fn memory_bytes(&self, file: FileId) -> u64 {
        self.decoded(file).map_or(0, |(number, _)| self.decoder.memory_bytes(number))
    }

    fn bound_bytes(&self, bytes_max: u64) {
        self.decoder.pool.bound(bytes_max);
    }

    fn held_bytes(&self) -> u64 {
        self.decoder.pool.bytes()
    }

    fn decoded_count(&self) -> u64 {
        self.decoder.pool.decoded()
    }
}

impl ChunkSource {
    /// Runs `work` on a span of a decoded file: of the chunk in memory, or of a copy if the span reaches beyond one chunk.
    fn with_decoded(
        &self,
        file: FileId,
        (number, decoded): (u32, &DecodedFile),
        span: ByteSpan,
        work: &mut dyn FnMut(&[u8]),
    ) -> Result<(), SourceError> {
        self.inner.health().usable(decoded.stored_in)?;
        let len_bytes = decoded.len_bytes;
        if span.end() > len_bytes {
            return Err(SourceError::out_of_bounds(&self.pin(file).path, span, len_bytes));
        }
        if span.is_empty() {
            work(&[]);
            return Ok(());
        }
        let chunk_bytes = decoded.chunk_bytes();
        let (first, last) = (span.start() / chunk_bytes, (span.end() - 1) / chunk_bytes);
        if first == last {
            let chunk = self.decoder.chunk((number, first))?;
            let start = to_usize(span.start() - first * chunk_bytes);
            work(&chunk[start..start + to_usize(span.len())]);
        } else {
            work(&(self as &dyn Source).read_bytes(file, span.start(), span.len())?);
        }
        Ok(())
    }

    /// The maps of the inner source, for one of its own files.
    fn own_maps(&self, file: FileId) -> Option<&dyn Maps> {
        self.inner.maps().filter(|_| self.decoded(file).is_none())
    }
}

impl Drop for ChunkSource {
    fn drop(&mut self) {
        self.decoder.pool.cancel_ahead();
    }
}

impl Maps for ChunkSource {
    /// Boxes of an array never reach beyond a chunk, so that their spans are in memory when they are requested: no copy is needed.
    /// Those of a tensor of blocks do.
    fn is_mapped(&self, file: FileId) -> bool {
        self.decoded(file).is_some_and(|(_, decoded)| !decoded.is_of_blocks())
            || self.own_maps(file).is_some_and(|maps| maps.is_mapped(file))
    }

    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        let Some((number, decoded)) = self.decoded(file) else { return self.own_maps(file)?.with(file, span, work) };
        Some(self.with_decoded(file, (number, decoded), span, work))
    }

    fn is_partial(&self, file: FileId, span: ByteSpan) -> bool {
        self.own_maps(file).is_some_and(|maps| maps.is_partial(file, span))
    }

    fn with_parts(
        &self,
        file: FileId,
        span: ByteSpan,
        parts: &[ByteSpan],
        work: &mut dyn FnMut(&[u8]),
    ) -> Option<Result<(), SourceError>> {
        match self.decoded(file) {
            Some(_) => self.with(file, span, work),
            None => self.own_maps(file)?.with_parts(file, span, parts, work),
        }
    }

    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>) -> Replied,
    ) -> Option<Result<Replied, ReadFailure<SourceError>>> {
        self.own_maps(file)?.with_kernel_bytes(file, span, reply)
    }

    fn used(&self, file: FileId, span: ByteSpan, bytes: u64) {
        if let Some((number, decoded)) = self.decoded(file) {
            self.decoder.pool.note_read((number, span.start() / decoded.chunk_bytes()), bytes);
        }
    }

    /// Chunks that will be read are decoded by other threads.
    fn will_need(&self, file: FileId, span: ByteSpan) -> bool {
        if let Some((number, decoded)) = self.decoded(file) {
            let chunk_bytes = decoded.chunk_bytes();
            let last = span.end().min(decoded.len_bytes).div_ceil(chunk_bytes);
            (span.start() / chunk_bytes..last).for_each(|chunk| self.decoder.expect((number, chunk)));
            return false;
        }
        self.own_maps(file).is_some_and(|maps| maps.will_need(file, span))
    }

    fn will_revisit(&self) {
        if let Some(maps) = self.inner.maps() {
            maps.will_revisit();
        }
    }

    fn trim(&self) {
        if let Some(maps) = self.inner.maps() {
            maps.trim();
        }
    }

    fn bound(&self, usual_bytes: u64, again_bytes: u64) {
        if let Some(maps) = self.inner.maps() {
            maps.bound(usual_bytes, again_bytes);
        }
    }
}
