//! A tensor as its difference from an earlier version of it, as trainers publish the weights of a run.
//!
//! | encoding | the difference, before compression |
//! | --- | --- |
//! | `xor` | the new bytes XOR the old ones |
//! | `overwrite` | u32 count, as many u32 positions of bytes, and the new bytes there |
//!
//! A digest of the new bytes comes with each difference.

use std::io::{self, Read};

use ckfs_tensor::to_usize;
use serde_json::Value;

/// Bytes that are decompressed at once.
const BLOCK_BYTES: usize = 64 << 10;

/// Bytes of a count or a position.
const NUMBER_BYTES: usize = 4;

/// Why a difference is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeltaError(String);

/// How bytes differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Xor,
    Overwrite,
}

/// The digest of the new bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checksum {
    Xxh3,
    Blake3,
    Adler32,
}

/// How the differences of one version are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaFormat {
    encoding: Encoding,
    is_packed: bool,
    checksum: Checksum,
}

impl DeltaFormat {
    /// The format that the `metadata` of an index tells.
    ///
    /// # Errors
    /// A member is missing, or not known.
    pub fn parse(metadata: &Value) -> Result<Self, DeltaError> {
        fn one_of<T: Copy>(metadata: &Value, key: &str, known: &[(&str, T)]) -> Result<T, DeltaError> {
            let found = &metadata[key];
            let value = known.iter().find(|(name, _)| found.as_str() == Some(name)).map(|(_, value)| *value);
            value.ok_or_else(|| {
                let known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
                DeltaError(format!("{key}: expected {}, found {found}", known.join(" or ")))
            })
        }
        let encodings = [("xor", Encoding::Xor), ("overwrite", Encoding::Overwrite)];
        let checksums = [("xxh3-128", Checksum::Xxh3), ("blake3", Checksum::Blake3), ("adler32", Checksum::Adler32)];
        Ok(Self {
            encoding: one_of(metadata, "delta_encoding", &encodings)?,
            is_packed: one_of(metadata, "compression_format", &[("zstd", true), ("none", false)])?,
            checksum: one_of(metadata, "checksum_format", &checksums)?,
        })
    }

    /// The name of the encoding, as an index has it.
    pub const fn encoding(self) -> &'static str {
        match self.encoding {
            Encoding::Xor => "xor",
            Encoding::Overwrite => "overwrite",
        }
    }

    /// Whether `digest` can be one of new bytes.
    pub fn is_digest(self, digest: &str) -> bool {
        digest.len() == self.digest(&[]).len() && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    /// The digest of bytes, in lower case.
    pub fn digest(self, bytes: &[u8]) -> String {
        match self.checksum {
            Checksum::Xxh3 => format!("{:032x}", twox_hash::XxHash3_128::oneshot(bytes)),
            Checksum::Blake3 => blake3::hash(bytes).to_hex().to_string(),
            Checksum::Adler32 => format!("{:08x}", adler2::adler32_slice(bytes)),
        }
    }

    /// Makes the new bytes of the old ones in `target`, with the difference of which `stored` are all bytes.
    ///
    /// # Errors
    /// [`DeltaError`]. `target` has then any content.
    pub fn apply(self, stored: &[u8], target: &mut [u8]) -> Result<(), DeltaError> {
        match self.encoding {
            Encoding::Xor => self.apply_xor(stored, target),
            Encoding::Overwrite => self.apply_overwrite(stored, target),
        }
    }

    fn apply_xor(self, stored: &[u8], target: &mut [u8]) -> Result<(), DeltaError> {
        let mut difference = self.unpacked(stored)?;
        let mut block = vec![0; BLOCK_BYTES.min(target.len())];
        for part in target.chunks_mut(BLOCK_BYTES) {
            let block = &mut block[..part.len()];
            difference.read_exact(block)?;
            part.iter_mut().zip(block).for_each(|(byte, difference)| *byte ^= *difference);
        }
        ended(difference)
    }

    /// Positions and bytes are decompressed beside each other, so that neither is in memory as a whole.
    fn apply_overwrite(self, stored: &[u8], target: &mut [u8]) -> Result<(), DeltaError> {
        let (mut positions, mut values) = (self.unpacked(stored)?, self.unpacked(stored)?);
        let mut number = [0; NUMBER_BYTES];
        positions.read_exact(&mut number)?;
        let mut left = to_usize(u64::from(u32::from_le_bytes(number)));
        if left > target.len() {
            return Err(DeltaError(format!("{left} bytes are overwritten, of a tensor of {} bytes", target.len())));
        }
        let before = (left + 1) * NUMBER_BYTES;
        let skipped = io::copy(&mut values.by_ref().take(before as u64), &mut io::sink())?;
        if skipped != before as u64 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let (mut places, mut bytes) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES / NUMBER_BYTES]);
        while left > 0 {
            let count = left.min(bytes.len());
            let (places, bytes) = (&mut places[..count * NUMBER_BYTES], &mut bytes[..count]);
            positions.read_exact(places)?;
            values.read_exact(bytes)?;
            let (places, _) = places.as_chunks::<NUMBER_BYTES>();
            for (place, byte) in places.iter().zip(bytes) {
                let place = u32::from_le_bytes(*place);
                let len = target.len();
                let found = target.get_mut(to_usize(u64::from(place)));
                *found
                    .ok_or_else(|| DeltaError(format!("byte {place} is overwritten, of a tensor of {len} bytes")))? =
                    *byte;
            }
            left -= count;
        }
        ended(values)
    }

    fn unpacked(self, stored: &[u8]) -> Result<Box<dyn Read + '_>, DeltaError> {
        if !self.is_packed {
            return Ok(Box::new(stored));
        }
        Ok(Box::new(zstd::stream::read::Decoder::with_buffer(stored)?))
    }

    /// As [`DeltaFormat::apply`], but by other means: all of the difference at once, and each byte by the definition.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub fn apply_by_definition(self, stored: &[u8], old: &[u8]) -> Result<Vec<u8>, DeltaError> {
        let limit = old.len().saturating_mul(NUMBER_BYTES + 1) + NUMBER_BYTES;
        let mut difference = Vec::new();
        self.unpacked(stored)?.take(limit as u64 + 1).read_to_end(&mut difference)?;
        let wrong = || DeltaError(format!("a difference of {} bytes, of a tensor of {}", difference.len(), old.len()));
        let number = |at: usize| {
            let bytes = difference.get(at * NUMBER_BYTES..(at + 1) * NUMBER_BYTES).ok_or_else(wrong)?;
            Ok::<_, DeltaError>(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
        };
        match self.encoding {
            Encoding::Xor if difference.len() == old.len() => {
                Ok(old.iter().zip(&difference).map(|(old, difference)| old ^ difference).collect())
            }
            Encoding::Overwrite => {
                let count = number(0)?;
                let values = difference.get((count + 1) * NUMBER_BYTES..).filter(|values| values.len() == count);
                let mut new = old.to_vec();
                for (at, value) in values.ok_or_else(wrong)?.iter().enumerate() {
                    *new.get_mut(number(at + 1)?).ok_or_else(wrong)? = *value;
                }
                Ok(new)
            }
            Encoding::Xor => Err(wrong()),
        }
    }
}

impl From<io::Error> for DeltaError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Self("the difference ends before its last byte".to_owned());
        }
        Self(format!("zstd: {error}"))
    }
}

/// Reading to the end also compares the checksum there.
fn ended(mut difference: impl Read) -> Result<(), DeltaError> {
    let more = difference.read(&mut [0])?;
    if more == 0 { Ok(()) } else { Err(DeltaError("the difference goes on after its last byte".to_owned())) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn format(encoding: &str, compression: &str, checksum: &str) -> DeltaFormat {
        let metadata =
            json!({"delta_encoding": encoding, "compression_format": compression, "checksum_format": checksum});
        DeltaFormat::parse(&metadata).unwrap()
    }

    fn overwrite(changes: &[(u32, u8)]) -> Vec<u8> {
        let numbers = std::iter::once(u32::try_from(changes.len()).unwrap()).chain(changes.iter().map(|(at, _)| *at));
        numbers.flat_map(u32::to_le_bytes).chain(changes.iter().map(|(_, byte)| *byte)).collect()
    }

    #[test]
    fn digests_are_those_of_other_programs() {
        // Python: xxhash.xxh3_128, blake3.blake3, zlib.adler32 of bytes(i % 251 for i in range(100_000)), and of b"".
        let long: Vec<u8> = (0..100_000u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
        for (name, empty, digest) in DIGESTS {
            let format = format("xor", "none", name);
            assert_eq!((format.digest(b"").as_str(), format.digest(&long).as_str()), (empty, digest), "{name}");
            assert!(
                format.is_digest(digest)
                    && !format.is_digest(&digest[1..])
                    && !format.is_digest(&"g".repeat(digest.len()))
            );
        }
    }

    const DIGESTS: [(&str, &str, &str); 3] = [
        ("xxh3-128", "99aa06d3014798d86001c324468d497f", "54182c58bbb1337c42c23aeead96750d"),
        (
            "blake3",
            "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
            "d93c23eedaf165a7e0be908ba86f1a7a520d568d2d13cde787c8580c5c72cc54",
        ),
        ("adler32", "00000001", "84cba994"),
    ];

    #[test]
    fn differences_make_the_new_bytes() {
        let old: Vec<u8> = (0..200_000u32).map(|i| u8::try_from(i * 7 % 256).unwrap()).collect();
        let mut new = old.clone();
        let changes: Vec<(u32, u8)> = (0..40_000).map(|i| (i * 5 % 200_000, u8::try_from(i % 256).unwrap())).collect();
        for (at, byte) in &changes {
            new[*at as usize] = *byte;
        }
        let xor: Vec<u8> = old.iter().zip(&new).map(|(old, new)| old ^ new).collect();
        for (encoding, difference) in [("xor", xor), ("overwrite", overwrite(&changes))] {
            for compression in ["zstd", "none"] {
                let stored = if compression == "zstd" {
                    zstd::encode_all(&difference[..], 1).unwrap()
                } else {
                    difference.clone()
                };
                let format = format(encoding, compression, "adler32");
                let mut target = old.clone();
                format.apply(&stored, &mut target).unwrap();
                assert!(
                    target == new && format.apply_by_definition(&stored, &old).unwrap() == new,
                    "{encoding} {compression}"
                );
                // Bytes that are missing, or too many.
                let short = &stored[..stored.len() - 1];
                assert!(format.apply(short, &mut target).is_err() && format.apply_by_definition(short, &old).is_err());
                let long = [&stored[..], &stored[..1]].concat();
                assert!(format.apply(&long, &mut target).is_err() && format.apply_by_definition(&long, &old).is_err());
                assert!(format.apply(&stored, &mut target[..1000]).is_err(), "of a longer tensor");
            }
        }
    }

    #[test]
    fn places_outside_the_tensor_are_refused() {
        let format = format("overwrite", "none", "adler32");
        for (changes, expected) in [
            (&[(8, 1)][..], "byte 8 is overwritten, of a tensor of 8 bytes"),
            (&[(0, 1); 9], "9 bytes are overwritten, of a tensor of 8 bytes"),
        ] {
            let stored = overwrite(changes);
            assert_eq!(format.apply(&stored, &mut [0; 8]).unwrap_err().to_string(), expected);
            assert!(changes.len() == 9 || format.apply_by_definition(&stored, &[0; 8]).is_err());
        }
        let error = format.apply(&[255; 4], &mut [0; 8]).unwrap_err();
        assert_eq!(error.to_string(), "4294967295 bytes are overwritten, of a tensor of 8 bytes");
    }

    #[test]
    fn unknown_formats_are_refused() {
        let good = json!({"delta_encoding": "xor", "compression_format": "none", "checksum_format": "blake3"});
        for (key, value, expected) in [
            ("delta_encoding", json!("add"), "delta_encoding: expected xor or overwrite, found \"add\""),
            ("compression_format", json!(null), "compression_format: expected zstd or none, found null"),
            ("checksum_format", json!(3), "checksum_format: expected xxh3-128 or blake3 or adler32, found 3"),
        ] {
            let mut metadata = good.clone();
            metadata[key] = value;
            assert_eq!(DeltaFormat::parse(&metadata).unwrap_err().to_string(), expected);
        }
    }
}
