//! What surrounds the body of every block: mark, length, version, compression; checksum.

use std::{borrow::Cow, io::Read as _};

use super::{
    cursor::Cursor,
    error::{Block, OcdbtError},
};

/// Most bytes of a block's body after decompression. Orbax asks its writer for at most 100 MB.
pub const DECODED_BYTES_MAX: u64 = 256 << 20;

/// Mark, length, version, compression, checksum.
const SMALLEST_BYTES: usize = 4 + 8 + 1 + 1 + 4;
const CHECKSUM_BYTES: usize = 4;

/// Binary logarithm of the largest window that a decoder reserves, in bytes: 128 MiB, the library's own limit.
const WINDOW_LOG_MAX: u32 = 27;

const fn magic(block: Block) -> u32 {
    match block {
        Block::Manifest => 0x0cdb_3a2a,
        Block::VersionNode => 0x0cdb_1234,
        Block::Node => 0x0cdb_20de,
    }
}

/// The body of the block that `bytes` are, decompressed.
pub(super) fn open(bytes: &[u8], block: Block) -> Result<Cow<'_, [u8]>, OcdbtError> {
    let too_short = OcdbtError::TooShort { block, expected: SMALLEST_BYTES, found: bytes.len() };
    let checked = bytes.split_last_chunk::<CHECKSUM_BYTES>().filter(|_| bytes.len() >= SMALLEST_BYTES);
    let (covered, checksum) = checked.ok_or(too_short)?;
    let mut cursor = Cursor::new(covered, block);
    // The only number of the format with its highest byte first.
    let found = u32::from_le_bytes(cursor.array("mark")?).swap_bytes();
    if found != magic(block) {
        return Err(OcdbtError::Magic { block, expected: magic(block), found });
    }
    let (expected, found) = (u64::from_le_bytes(cursor.array("length")?), bytes.len() as u64);
    if expected != found {
        return Err(OcdbtError::Length { block, expected, found });
    }
    let (expected, found) = (u32::from_le_bytes(*checksum), crc32c::crc32c(covered));
    if expected != found {
        return Err(OcdbtError::Checksum { block, expected, found });
    }
    cursor.bounded("format version", 0)?;
    match cursor.varint("compression")? {
        0 => Ok(Cow::Borrowed(cursor.take(cursor.left(), "body")?)),
        1 => decompress(cursor.take(cursor.left(), "body")?, block).map(Cow::Owned),
        found => Err(cursor.wrong("compression", "0 (none) or 1 (zstd)", found)),
    }
}

/// Nothing says how long the body is, so that it grows while it is decoded, up to the limit.
fn decompress(packed: &[u8], block: Block) -> Result<Vec<u8>, OcdbtError> {
    let failed = |error: std::io::Error| OcdbtError::Zstd { block, message: error.to_string() };
    let mut decoder = zstd::stream::read::Decoder::with_buffer(packed).map_err(failed)?;
    decoder.window_log_max(WINDOW_LOG_MAX).map_err(failed)?;
    let mut body = Vec::new();
    let len = decoder.take(DECODED_BYTES_MAX + 1).read_to_end(&mut body).map_err(failed)? as u64;
    if len > DECODED_BYTES_MAX {
        return Err(OcdbtError::Limit { block, what: "decoded bytes", limit: DECODED_BYTES_MAX, found: len });
    }
    Ok(body)
}

/// A block around `body`, for tests of what real writers do not write.
#[cfg(test)]
pub(super) fn wrap(body: &[u8], block: Block, compressed: bool) -> Vec<u8> {
    let mut bytes = magic(block).swap_bytes().to_le_bytes().to_vec();
    let packed = if compressed { zstd::encode_all(body, 1).unwrap() } else { body.to_vec() };
    let len = SMALLEST_BYTES + packed.len();
    bytes.extend((len as u64).to_le_bytes());
    bytes.extend([0, u8::from(compressed)]);
    bytes.extend(packed);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_come_out_as_they_went_in() {
        for compressed in [false, true] {
            let bytes = wrap(b"body", Block::Node, compressed);
            assert_eq!(open(&bytes, Block::Node).unwrap(), &b"body"[..]);
            assert!(matches!(open(&bytes, Block::Manifest), Err(OcdbtError::Magic { .. })));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        for compressed in [false, true] {
            let whole = wrap(b"some body", Block::VersionNode, compressed);
            for at in 0..whole.len() {
                for bit in 0..8 {
                    let mut bytes = whole.clone();
                    bytes[at] ^= 1 << bit;
                    assert!(open(&bytes, Block::VersionNode).is_err(), "byte {at}");
                }
                assert!(open(&whole[..at], Block::VersionNode).is_err(), "cut to {at}");
            }
        }
    }

    #[test]
    fn a_body_that_grows_beyond_the_limit_is_refused() {
        // 300 MiB of zeros take some 30 kB.
        let zeros = vec![0; 1 << 20];
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        for _ in 0..300 {
            std::io::Write::write_all(&mut encoder, &zeros).unwrap();
        }
        let packed = encoder.finish().unwrap();
        assert!(matches!(
            decompress(&packed, Block::Node),
            Err(OcdbtError::Limit { what: "decoded bytes", limit: DECODED_BYTES_MAX, .. })
        ));
        assert!(matches!(
            decompress(&packed[..packed.len() - 1], Block::Node),
            Err(OcdbtError::Zstd { .. } | OcdbtError::Limit { .. })
        ));
        let trailing = [zstd::encode_all(&b"x"[..], 1).unwrap(), vec![7; 9]].concat();
        assert!(matches!(decompress(&trailing, Block::Node), Err(OcdbtError::Zstd { .. })));
    }
}
