//! What encoders make: bands of codes and scales, and reductions over whole matrices.
//!
//! A read of codes makes the bands that it touches, each once: codes of a band are a tile in the cache, and are dropped once readers
//! have all of them. Its scales are made with them and kept apart: they are few bytes, and bundles read them after the last code of
//! the matrix. A read of scales alone reads the weights of its bands, but makes no codes.
//!
//! A factor needs the greatest magnitude of whole matrices. The first thread that needs it reads them, others wait for that one.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use ckfs_source::FileId;
use ckfs_sync::{Demand, Request, Reservation};
use ckfs_tensor::{
    Band, EncodedLeaf, EncodedMatrices, EncodedPart, Origin, Shape, Tiling, Uncodable, View, Window,
    greatest_magnitude, to_usize, unravel,
};

use super::{
    Engine, ReadError,
    band_store::{BandInput, BandScales, Reduced, SCALE_BYTES_MAX, SCALE_PART},
    buffer::Buffer,
    counters::Path,
    fill::{FillMode, TouchedFiles, touch},
    plan_jobs::Job,
    scatter::scatter,
    tile::{Tile, TileKey},
};

/// Elements of which a reduction finds the greatest magnitude at a time.
const REDUCED_ELEMENTS: u64 = 1 << 20;

/// Bit of a tile's file that marks an encoding.
const ENCODED: u64 = 1 << 63;

/// The bytes of a part of a band.
enum BandBytes {
    Tile(TileKey, Arc<Tile>),
    /// For this request alone.
    Alone(Buffer),
    Scales(Arc<BandScales>),
    /// Those that follow the scales.
    Biases(Arc<BandScales>),
    Factor([u8; 4]),
}

impl BandBytes {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Tile(_, tile) => &tile.bytes,
            Self::Alone(buffer) => buffer,
            Self::Scales(scales) => &scales.bytes,
            Self::Biases(scales) => &scales.bytes[scales.bytes.len() / 2..],
            Self::Factor(bytes) => bytes,
        }
    }
}

fn touch_all(touched: &mut TouchedFiles, files: &[FileId]) {
    for file in files {
        touch(touched, *file);
    }
}

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
        let bands = leaf.encoding.bands();
        let width = bands.dtype(leaf.part).unit().bytes;
        let mut left = vec![job.piece.clone()];
        while let Some(piece) = left.pop() {
            let Origin::Encoded { offset, .. } = piece.origin else {
                return Err(ReadError::Internal { what: "a piece of an encoder has another origin" });
            };
            let band = bands.band_of(leaf.part, offset);
            let (inside, outside) = piece.cut_source(band.first + band.count - offset);
            left.extend(outside);
            let made = self.band_bytes(leaf, band, touched, mode)?;
            let windows = [Window { bytes: made.bytes(), start: band.first * width }];
            let mut units = 0;
            for piece in inside {
                units += piece.units();
                scatter(job, &piece, &windows, target, mode.stores);
            }
            if let BandBytes::Tile(key, tile) = &made {
                let before = tile.served.fetch_add(units * width, Ordering::Relaxed);
                if before + units * width >= tile.bytes.len() as u64 {
                    self.rooms.cache.forget(key);
                }
            }
        }
        Ok(())
    }

    /// A part of a band.
    fn band_bytes(
        &self,
        leaf: &EncodedLeaf,
        band: Band,
        touched: &mut TouchedFiles,
        mode: FillMode,
    ) -> Result<BandBytes, ReadError> {
        let encoding = &leaf.encoding;
        let made = match leaf.part {
            EncodedPart::Factor => {
                let reduced = self.reduced(encoding, band.number, mode)?;
                touch_all(touched, &reduced.files);
                BandBytes::Factor(encoding.bands().encoder().factor(reduced.greatest).to_le_bytes())
            }
            EncodedPart::Scales | EncodedPart::Biases => {
                let key = (encoding.id(), band.number);
                let kept = self.encoded.scales.lock().scales.get(&key).map(Arc::clone);
                let scales = match kept {
                    Some(scales) => scales,
                    None => self.make_band(encoding, band.number, None, mode)?,
                };
                touch_all(touched, &scales.files);
                if leaf.part == EncodedPart::Biases { BandBytes::Biases(scales) } else { BandBytes::Scales(scales) }
            }
            EncodedPart::Codes => {
                let key = TileKey { file: ENCODED | encoding.id(), segment: 0, index: band.number };
                let (_, elements) = encoding.bands().input_of(band.number);
                let len = encoding.bands().bytes_of(EncodedPart::Codes, elements);
                let compute = |mut room: Reservation| {
                    let mut bytes = self.rooms.buffers.take(len);
                    room.resize(bytes.memory_bytes());
                    let scales = self.make_band(encoding, band.number, Some(&mut bytes), mode)?;
                    let (ahead, served) = (AtomicBool::new(false), AtomicU64::new(0));
                    Ok(Tile { bytes, room, files: scales.files.clone(), ahead, served })
                };
                if let Some(tile) = self.rooms.cache.get(key, Demand::Reader, len, &self.counters, &|| None, compute) {
                    let tile = tile?;
                    touch_all(touched, &tile.files);
                    BandBytes::Tile(key, tile)
                } else {
                    let mut bytes = self.rooms.buffers.take(len);
                    let scales = self.make_band(encoding, band.number, Some(&mut bytes), mode)?;
                    touch_all(touched, &scales.files);
                    BandBytes::Alone(bytes)
                }
            }
        };
        Ok(made)
    }

    /// Makes the codes of a band, if they are wanted, and its scales, which are kept.
    fn make_band(
        &self,
        encoding: &Arc<EncodedMatrices>,
        number: u64,
        codes: Option<&mut Buffer>,
        mode: FillMode,
    ) -> Result<Arc<BandScales>, ReadError> {
        let bands = encoding.bands();
        let (first, elements) = bands.input_of(number);
        let (input, mut files) =
            self.elements((encoding.id(), BandInput::Values), encoding.input(), (first, elements), mode)?;
        let mut given = None;
        if let Some(view) = encoding.given() {
            let run = bands.encoder().block(bands.matrix().1).1;
            let place = (first / run, elements / run);
            let (scales, of_scales) = self.elements((encoding.id(), BandInput::Scales), view, place, mode)?;
            touch_all(&mut files, &of_scales);
            given = Some(scales);
        }
        let mut factor = None;
        if bands.encoder().has_factor() {
            let reduced = self.reduced(encoding, bands.matrix_of(number), mode)?;
            touch_all(&mut files, &reduced.files);
            factor = Some(bands.encoder().factor(reduced.greatest));
        }
        let mut scales = vec![0; bands.shared_bytes_of(elements)];
        let codes = codes.map(|codes| &mut **codes);
        bands
            .encode(&input, factor, given.as_deref(), codes, &mut scales)
            .map_err(|found| uncodable(encoding.name(), encoding.input().shape(), first, found))?;
        self.check_touched(&files)?;
        let made = Arc::new(BandScales { bytes: scales, files });
        if bands.encoder().has_scales() {
            self.keep_scales((encoding.id(), number), &made);
        }
        Ok(made)
    }

    fn keep_scales(&self, key: (u64, u64), made: &Arc<BandScales>) {
        let most = SCALE_BYTES_MAX.min(self.options().tile_cache_bytes / SCALE_PART);
        if self.encoded.room.get_or_init(|| self.rooms.cache.reserve(most)).is_none() {
            return;
        }
        let mut kept = self.encoded.scales.lock();
        kept.bytes += made.bytes.len();
        if let Some((_, before)) = kept.scales.push(key, Arc::clone(made)) {
            kept.bytes -= before.bytes.len();
        }
        while kept.bytes > most
            && let Some((_, dropped)) = kept.scales.pop_lru()
        {
            kept.bytes -= dropped.bytes.len();
        }
    }

    /// Reads all of some matrices, and makes their scales.
    ///
    /// # Errors
    /// As of a read of their codes: the first element that has no code, or an error of a source.
    pub fn check_encoded(&self, matrices: &Arc<EncodedMatrices>) -> Result<(), ReadError> {
        let bands = matrices.bands();
        let mode = FillMode::cached(Path::Tiles);
        (0..bands.matrices() * bands.per_matrix())
            .try_for_each(|number| self.make_band(matrices, number, None, mode).map(drop))
    }

    /// Elements of an input of an encoding, from one on, and the files that they were made from.
    fn elements(
        &self,
        of: (u64, BandInput),
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

    /// The greatest magnitude of a matrix of the views that share a factor.
    fn reduced(&self, encoding: &Arc<EncodedMatrices>, matrix: u64, mode: FillMode) -> Result<Arc<Reduced>, ReadError> {
        let request = Request { demand: Demand::Reader, give_up: &|| None, event: &|_| () };
        let made = self
            .encoded
            .reductions
            .get((encoding.id(), matrix), &(), &request, |()| self.reduce(encoding, matrix, mode));
        made.unwrap_or(Err(ReadError::Internal { what: "a reduction is always made" }))
    }

    fn reduce(&self, encoding: &EncodedMatrices, matrix: u64, mode: FillMode) -> Result<Reduced, ReadError> {
        let mut reduced = Reduced { greatest: 0.0, files: TouchedFiles::new() };
        for (name, view) in encoding.together() {
            let tiling = view.lower()?;
            let count = view.shape().elements() / encoding.bands().matrices();
            for first in (0..count).step_by(to_usize(REDUCED_ELEMENTS)) {
                let len = REDUCED_ELEMENTS.min(count - first);
                let first = matrix * count + first;
                let (bytes, files) = self.elements_of(&tiling, (first, len), mode)?;
                let greatest = greatest_magnitude(view.dtype(), &bytes)
                    .map_err(|found| uncodable(name, view.shape(), first, found))?;
                touch_all(&mut reduced.files, &files);
                reduced.greatest = reduced.greatest.max(greatest);
            }
        }
        self.check_touched(&reduced.files)?;
        Ok(reduced)
    }
}
