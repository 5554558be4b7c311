//! What surrounds the body of every block: mark, length, version, compression; checksum.

use std::{borrow::Cow, io::Read as _};

use super::cursor::{Block, Cursor};
use crate::FormatError;

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
        Block::Node => 0x0cdb_20de,
    }
}

/// The body of the block that `bytes` are, decompressed.
pub(super) fn open(bytes: &[u8], block: Block) -> Result<Cow<'_, [u8]>, FormatError> {
    let refused = |text: String| FormatError(format!("{block}: {text}"));
    let too_short = || refused(format!("expected at least {SMALLEST_BYTES} bytes, found {}", bytes.len()));
    let checked = bytes.split_last_chunk::<CHECKSUM_BYTES>().filter(|_| bytes.len() >= SMALLEST_BYTES);
    let (covered, checksum) = checked.ok_or_else(too_short)?;
    let mut cursor = Cursor::new(covered, block);
    // The only number of the format with its highest byte first.
    let found = u32::from_le_bytes(cursor.array("mark")?).swap_bytes();
    if found != magic(block) {
        return Err(refused(format!("expected to begin with {:08x}, found {found:08x}", magic(block))));
    }
    let (expected, found) = (u64::from_le_bytes(cursor.array("length")?), bytes.len() as u64);
    if expected != found {
        return Err(refused(format!("expected {expected} bytes by its header, found {found}")));
    }
    let (expected, found) = (u32::from_le_bytes(*checksum), crc32c::crc32c(covered));
    if expected != found {
        let text = format!("expected CRC-32C {expected:08x}, found {found:08x}: the block is damaged");
        return Err(refused(text));
    }
    cursor.bounded("format version", 0)?;
    match cursor.varint("compression")? {
        0 => Ok(Cow::Borrowed(cursor.take(cursor.left(), "body")?)),
        1 => decompress(cursor.take(cursor.left(), "body")?, block).map(Cow::Owned),
        found => Err(cursor.block.wrong("compression", "0 (none) or 1 (zstd)", found)),
    }
}

/// Nothing says how long the body is, so that it grows while it is decoded, up to the limit.
fn decompress(packed: &[u8], block: Block) -> Result<Vec<u8>, FormatError> {
    let failed = |error: std::io::Error| FormatError(format!("{block}: zstd: {error}"));
    let mut decoder = zstd::stream::read::Decoder::with_buffer(packed).map_err(failed)?;
    decoder.window_log_max(WINDOW_LOG_MAX).map_err(failed)?;
    let mut body = Vec::new();
    let len = decoder.take(DECODED_BYTES_MAX + 1).read_to_end(&mut body).map_err(failed)? as u64;
    if len > DECODED_BYTES_MAX {
        return Err(block.beyond("decoded bytes", DECODED_BYTES_MAX, len));
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
            let error = open(&bytes, Block::Manifest).unwrap_err().to_string();
            assert_eq!(error, "ocdbt manifest: expected to begin with 0cdb3a2a, found 0cdb20de");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        for compressed in [false, true] {
            let whole = wrap(b"some body", Block::Manifest, compressed);
            for at in 0..whole.len() {
                for bit in 0..8 {
                    let mut bytes = whole.clone();
                    bytes[at] ^= 1 << bit;
                    assert!(open(&bytes, Block::Manifest).is_err(), "byte {at}");
                }
                assert!(open(&whole[..at], Block::Manifest).is_err(), "cut to {at}");
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
        let error = |packed: &[u8]| decompress(packed, Block::Node).unwrap_err().to_string();
        let limit = format!("decoded bytes: expected at most {DECODED_BYTES_MAX}");
        assert!(error(&packed).contains(&limit));
        let cut = error(&packed[..packed.len() - 1]);
        assert!(cut.contains("zstd") || cut.contains(&limit), "{cut}");
        let trailing = [zstd::encode_all(&b"x"[..], 1).unwrap(), vec![7; 9]].concat();
        assert!(error(&trailing).contains("zstd"));
    }
}
