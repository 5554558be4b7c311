//! The division of an array into chunks, computed on the grid; a chunk's file is laid out when it is opened.

use ckfs_format::zarr::write as zarr;
use ckfs_tensor::{DType, PerAxis, Region, Shape, View, unravel};

use super::file_image::{FileImage, ImageError};

/// Largest chunk file in bytes, unless the user sets a limit.
pub(super) const CHUNK_BYTES_MAX: u64 = 1 << 30;

/// A chunk may be cut into up to this many times the parts that it needs, so that chunks divide a shard.
const EXTRA_PARTS_MAX: u64 = 8;

/// The division of an array into chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChunkGrid {
    dtype: DType,
    shape: Shape,
    chunk: PerAxis,
    grid: PerAxis,
}

impl ChunkGrid {
    /// The chunks of an array that devices split in `parts` along each axis. Chunks larger than `bytes_max` are cut further,
    /// along the first axis that can be cut.
    ///
    /// A chunk has `ceil(extent / parts)` elements along an axis. Where that does not divide the extent the last chunk is
    /// padded with zeros, and there may be fewer chunks than parts.
    ///
    /// # Panics
    /// If the format cannot hold the type: see [`holds`].
    pub(super) fn new(dtype: DType, shape: &Shape, parts: &[u64], bytes_max: u64) -> Self {
        // The format has no chunks without elements.
        let mut chunk: PerAxis =
            shape.extents().iter().zip(parts).map(|(extent, parts)| extent.div_ceil(*parts).max(1)).collect();
        let element = dtype.element_bytes().expect("types that the format cannot hold were refused");
        for axis in 0..chunk.len() {
            let bytes = chunk.iter().product::<u64>() * element;
            if bytes <= bytes_max {
                break;
            }
            let slab = bytes / chunk[axis];
            let needed = chunk[axis].div_ceil((bytes_max / slab).max(1));
            // Along a split axis a shard should be whole chunks; along an axis that is not split any cut is right.
            let divides = |pieces: &u64| chunk[axis].is_multiple_of(*pieces);
            let range = needed..=chunk[axis].min(needed.saturating_mul(EXTRA_PARTS_MAX));
            let pieces = if parts[axis] > 1 { range.into_iter().find(divides).unwrap_or(needed) } else { needed };
            chunk[axis] = chunk[axis].div_ceil(pieces);
        }
        let grid = shape.extents().iter().zip(&chunk).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect();
        Self { dtype, shape: shape.clone(), chunk, grid }
    }

    /// Number of chunks.
    pub(super) fn count(&self) -> u64 {
        self.grid.iter().product()
    }

    /// Elements of a chunk along each axis.
    #[cfg(test)]
    fn chunk(&self) -> &[u64] {
        &self.chunk
    }

    /// File name of a chunk.
    pub(super) fn name(&self, index: u64) -> String {
        zarr::chunk_name(&unravel(index, &self.grid))
    }

    /// The chunk with this file name.
    pub(super) fn find(&self, name: &[u8]) -> Option<u64> {
        let numbers = zarr::chunk_numbers(name, self.grid.len())?;
        let inside = numbers.iter().zip(&self.grid).all(|(number, extent)| number < extent);
        let number = || numbers.iter().zip(&self.grid).fold(0, |index, (number, extent)| index * extent + number);
        inside.then(number)
    }

    /// Contents of the array's `.zarray`.
    ///
    /// # Errors
    /// The format cannot hold the type.
    pub(super) fn zarray(&self, name: &str) -> Result<String, ImageError> {
        let text = zarr::zarray(self.dtype, self.shape.extents(), &self.chunk);
        text.ok_or_else(|| ImageError::unsupported(name, "orbax", self.dtype))
    }

    /// A chunk's file: the elements of `view`, the whole array, with zeros beyond its edge.
    ///
    /// # Errors
    /// The elements do not fill whole bytes.
    ///
    /// # Panics
    /// If this is not the view's grid or the chunk is not in it.
    pub(super) fn chunk_image(&self, name: &str, view: &View, index: u64) -> Result<FileImage, ImageError> {
        let failed = |error| ImageError(format!("{name}: {error}"));
        let numbers = unravel(index, &self.grid);
        let ranges: Vec<_> = numbers
            .iter()
            .zip(&self.chunk)
            .zip(self.shape.extents())
            .map(|((number, chunk), extent)| number * chunk..((number + 1) * chunk).min(*extent))
            .collect();
        let region = Region::within(view.shape(), &ranges).expect("a chunk of the view's own grid");
        let mut shard = view.region(&region).map_err(failed)?;
        for (axis, chunk) in self.chunk.iter().enumerate() {
            let held = shard.shape().extents()[axis];
            if held < *chunk {
                shard = shard.pad(axis, 0, chunk - held).map_err(failed)?;
            }
        }
        let mut image = FileImage::default();
        image.push_view(name, shard)?;
        Ok(image)
    }
}

/// Whether the format can hold a type.
pub(super) fn holds(dtype: DType) -> bool {
    zarr::code(dtype).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(shape: &[u64], parts: &[u64], bytes_max: u64) -> ChunkGrid {
        ChunkGrid::new(DType::BF16, &Shape::try_new(shape).unwrap(), parts, bytes_max)
    }

    #[test]
    fn chunks_are_shards() {
        // shape, parts, limit in bytes: chunk, number of chunks
        type Case<'a> = (&'a [u64], &'a [u64], u64, &'a [u64], u64);
        let cases: [Case<'_>; 13] = [
            (&[], &[], 1 << 30, &[], 1),
            (&[8, 6], &[4, 2], 1 << 30, &[2, 3], 8),
            (&[7, 6], &[4, 1], 1 << 30, &[2, 6], 4),
            (&[6], &[4], 1 << 30, &[2], 3),
            (&[2], &[4], 1 << 30, &[1], 2),
            (&[0, 5], &[2, 1], 1 << 30, &[1, 5], 0),
            // Axis 0 is not split: any cut is right.
            (&[10, 4], &[1, 1], 24, &[3, 4], 4),
            // A shard of 12 rows with at most 5 rows in a chunk: three chunks of four.
            (&[24, 4], &[2, 1], 40, &[4, 4], 6),
            // A shard of 7 rows divides by 7 only, which is within eight times the three needed.
            (&[14, 4], &[2, 1], 24, &[1, 4], 14),
            // 101 rows: 101 pieces are too many for the 4 needed.
            (&[202, 4], &[2, 1], 26 * 8, &[26, 4], 8),
            // One row is too large: the next axis is cut too.
            (&[2, 8], &[1, 1], 8, &[1, 4], 4),
            (&[1, 2, 8], &[1, 1, 4], 2, &[1, 1, 1], 16),
            (&[3, 8], &[1, 1], 1, &[1, 1], 24),
        ];
        for (shape, parts, bytes_max, chunk, count) in cases {
            let grid = grid(shape, parts, bytes_max);
            assert_eq!((grid.chunk(), grid.count()), (chunk, count), "{shape:?} in {parts:?} below {bytes_max}");
            for index in 0..count {
                assert_eq!(grid.find(grid.name(index).as_bytes()), Some(index));
            }
        }
    }

    #[test]
    fn chunks_beyond_the_grid_are_not_found() {
        let two = grid(&[4, 4], &[2, 2], 1 << 30);
        assert_eq!(two.find(b"1.1"), Some(3));
        for name in ["2.0", "0.2", "0", "0.0.0", ".zarray"] {
            assert_eq!(two.find(name.as_bytes()), None, "{name}");
        }
        assert_eq!(grid(&[0], &[1], 1 << 30).find(b"0"), None);
    }
}
