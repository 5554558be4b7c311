//! What encoders make: bands of codes and scales, and reductions over whole matrices.
//!
//! A read of codes makes the bands that it touches, each once: codes of a band are a tile in the cache, and are dropped once readers
//! have all of them. Its scales are made with them and kept apart: they are few bytes, and bundles read them after the last code of
//! the matrix. A read of scales alone reads the weights of its bands, but makes no codes.
//!
//! A factor needs the greatest magnitude of whole matrices. The first thread that needs it reads them, others wait for that one.

use std::sync::Arc;

use ckfs_sync::{Demand, Request};
use ckfs_tensor::{
    Band, EncodedLeaf, EncodedMatrices, EncodedPart, Origin, Piece, Shape, Tiling, Uncodable, View, Window,
    greatest_magnitude, to_usize, unravel,
};

use super::{
    Engine, ReadError,
    band_store::{BandScales, Reduced},
    buffer::Buffer,
    counters::Path,
    fill::{FillMode, TouchedFiles, touch},
    plan_jobs::Job,
    scatter::scatter,
    tile::TileKey,
};

/// Elements of which a reduction finds the greatest magnitude at a time.
const REDUCED_ELEMENTS: u64 = 1 << 20;

/// Bit of a tile's file that marks an encoding.
const ENCODED: u64 = 1 << 63;

/// Most bytes of scales that are kept, and the part of the tile cache that this is at most.
const SCALE_BYTES_MAX: usize = 64 << 20;
const SCALE_PART: usize = 8;

/// The error of an element without a code.
fn uncodable(name: &str, shape: &Shape, first: u64, found: Uncodable) -> ReadError {
    let index = unravel(first + found.element, shape.extents());
    ReadError::Uncodable { tensor: name.to_owned(), index: index.to_vec(), value: found.value }
}

impl Engine {
    /// Fills the elements of a piece of what an encoder makes.
    pub(super) fn fill_encoded(
        &self,
        leaf: &EncodedLeaf,
        job: &Job<'_>,
        target: &mut [u8],
        touched: &mut TouchedFiles,
        mode: FillMode,
    ) -> Result<(), ReadError> {
        let bands = &leaf.encoding.bands;
        let width = bands.dtype(leaf.part).unit().bytes;
        let mut left = vec![job.piece.clone()];
        while let Some(piece) = left.pop() {
            let Origin::Encoded { offset, .. } = piece.origin else {
                return Err(ReadError::Internal { what: "a piece of an encoder has another origin" });
            };
            let band = bands.band_of(leaf.part, offset);
            let (inside, outside) = piece.cut_source(band.first + band.count - offset);
            left.extend(outside);
            self.with_band(leaf, band, touched, mode, &mut |bytes| {
                let windows = [Window { bytes, start: band.first * width }];
                for piece in &inside {
                    scatter(job, piece, &windows, target, mode.stores);
                }
                inside.iter().map(Piece::units).sum::<u64>() * width
            })?;
        }
        Ok(())
    }

    /// Passes the bytes of a part of a band to `work`, which returns how many it took.
    fn with_band(
        &self,
        leaf: &EncodedLeaf,
        band: Band,
        touched: &mut TouchedFiles,
        mode: FillMode,
        work: &mut dyn FnMut(&[u8]) -> u64,
    ) -> Result<(), ReadError> {
        let encoding = &leaf.encoding;
        match leaf.part {
            EncodedPart::Factor => {
                work(&self.factor(encoding, band.number, touched, mode)?.to_le_bytes());
            }
            EncodedPart::Scales | EncodedPart::Biases => {
                let kept = self.encoded.scales.lock().find(&(encoding.id(), band.number)).map(Arc::clone);
                let scales = match kept {
                    Some(scales) => scales,
                    None => self.make_band(encoding, band.number, None, mode)?,
                };
                touch(touched, &scales.files);
                // Biases follow the scales.
                let first = if leaf.part == EncodedPart::Biases { scales.bytes.len() / 2 } else { 0 };
                work(&scales.bytes[first..]);
            }
            EncodedPart::Codes => {
                let key = TileKey { file: ENCODED | encoding.id(), segment: 0, index: band.number };
                let (_, elements) = encoding.bands.input_of(band.number);
                let len = encoding.bands.bytes_of(EncodedPart::Codes, elements);
                let make = |bytes: &mut Buffer| self.make_band(encoding, band.number, Some(bytes), mode);
                let compute = |room| self.make_tile(len, room, |bytes| Ok(make(bytes)?.files.clone()));
                if let Some(tile) = self.rooms.cache.get(key, Demand::Reader, len, &self.counters, &|| None, compute) {
                    let tile = tile?;
                    touch(touched, &tile.files);
                    if tile.serve(work(&tile.bytes)) {
                        self.rooms.cache.forget(&key);
                    }
                } else {
                    // For this request alone.
                    let mut bytes = self.rooms.buffers.take(len);
                    touch(touched, &make(&mut bytes)?.files);
                    work(&bytes);
                }
            }
        }
        Ok(())
    }

    /// Makes the codes of a band, if they are wanted, and its scales, which are kept.
    fn make_band(
        &self,
        encoding: &Arc<EncodedMatrices>,
        number: u64,
        codes: Option<&mut Buffer>,
        mode: FillMode,
    ) -> Result<Arc<BandScales>, ReadError> {
        let bands = &encoding.bands;
        let (first, elements) = bands.input_of(number);
        let (input, mut files) = self.elements((encoding.id(), false), &encoding.input, (first, elements), mode)?;
        let mut given = None;
        if let Some(view) = encoding.given.as_ref() {
            let run = bands.encoder().block(bands.matrix().1).1;
            let (scales, of_scales) =
                self.elements((encoding.id(), true), view, (first / run, elements / run), mode)?;
            touch(&mut files, &of_scales);
            given = Some(scales);
        }
        let mut factor = None;
        if bands.encoder().has_factor() {
            factor = Some(self.factor(encoding, bands.matrix_of(number), &mut files, mode)?);
        }
        let mut scales = vec![0; bands.shared_bytes_of(elements)];
        let codes = codes.map(|codes| &mut **codes);
        bands
            .encode(&input, factor, given.as_deref(), codes, &mut scales)
            .map_err(|found| uncodable(&encoding.name, encoding.input.shape(), first, found))?;
        self.check_touched(&files)?;
        let made = Arc::new(BandScales { bytes: scales, files });
        let most = SCALE_BYTES_MAX.min(self.options().tile_cache_bytes / SCALE_PART);
        if bands.encoder().has_scales() && self.encoded.room.get_or_init(|| self.rooms.cache.reserve(most)).is_some() {
            let mut kept = self.encoded.scales.lock();
            kept.put((encoding.id(), number), Arc::clone(&made));
            kept.pop_until(most);
        }
        Ok(made)
    }

    /// Reads all of some matrices, and makes their scales.
    ///
    /// # Errors
    /// As of a read of their codes: the first element that has no code, or an error of a source.
    pub fn check_encoded(&self, matrices: &Arc<EncodedMatrices>) -> Result<(), ReadError> {
        let bands = &matrices.bands;
        let mode = FillMode::cached(Path::Tiles);
        (0..bands.matrices() * bands.per_matrix())
            .try_for_each(|number| self.make_band(matrices, number, None, mode).map(drop))
    }

    /// Elements of an input of an encoding, from one on, and the files that they were made from.
    fn elements(
        &self,
        of: (u64, bool),
        view: &View,
        (first, count): (u64, u64),
        mode: FillMode,
    ) -> Result<(Buffer, TouchedFiles), ReadError> {
        let kept = self.encoded.lowered.lock().get(&of).map(Arc::clone);
        let tiling = if let Some(tiling) = kept {
            tiling
        } else {
            let tiling = Arc::new(view.lower()?);
            self.encoded.lowered.lock().put(of, Arc::clone(&tiling));
            tiling
        };
        self.elements_of(&tiling, (first, count), mode)
    }

    fn elements_of(
        &self,
        tiling: &Tiling,
        (first, count): (u64, u64),
        mode: FillMode,
    ) -> Result<(Buffer, TouchedFiles), ReadError> {
        let mut bytes = self.rooms.buffers.take(to_usize(count * tiling.unit_bytes()));
        let mut files = TouchedFiles::new();
        self.fill_span(tiling, first, first + count, &mut bytes, &mut files, FillMode::cached(mode.path))?;
        Ok((bytes, files))
    }

    /// The factor of a matrix, which follows from the greatest magnitude of the views that share it.
    fn factor(
        &self,
        encoding: &Arc<EncodedMatrices>,
        matrix: u64,
        touched: &mut TouchedFiles,
        mode: FillMode,
    ) -> Result<f32, ReadError> {
        let request = Request { demand: Demand::Reader, give_up: &|| None, event: &|_| () };
        let make = |()| self.reduce(encoding, matrix, mode);
        let made = self.encoded.reductions.get((encoding.id(), matrix), &(), &request, make);
        let reduced = made.unwrap_or(Err(ReadError::Internal { what: "a reduction is always made" }))?;
        touch(touched, &reduced.files);
        Ok(encoding.bands.encoder().factor(reduced.greatest))
    }

    fn reduce(&self, encoding: &EncodedMatrices, matrix: u64, mode: FillMode) -> Result<Reduced, ReadError> {
        let mut reduced = Reduced { greatest: 0.0, files: TouchedFiles::new() };
        for (name, view) in &encoding.together {
            let tiling = view.lower()?;
            let count = view.shape().elements() / encoding.bands.matrices();
            for first in (0..count).step_by(to_usize(REDUCED_ELEMENTS)) {
                let len = REDUCED_ELEMENTS.min(count - first);
                let first = matrix * count + first;
                let (bytes, files) = self.elements_of(&tiling, (first, len), mode)?;
                let greatest = greatest_magnitude(view.dtype(), &bytes)
                    .map_err(|found| uncodable(name, view.shape(), first, found))?;
                touch(&mut reduced.files, &files);
                reduced.greatest = reduced.greatest.max(greatest);
            }
        }
        self.check_touched(&reduced.files)?;
        Ok(reduced)
    }
}
