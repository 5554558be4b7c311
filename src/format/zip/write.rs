//! A writer of zip archives without compression.
//!
//! An archive is laid out before the data is known: [`ZipWriter::entry`] gives the bytes before an entry's data,
//! [`ZipWriter::finish`] those after the last. Sizes are exact, with the 64-bit extension where a number needs it. The
//! checksum of data that is known only when it is read is left 0, which torch accepts.
//!
//! Own code, because the `zip` crate (9.8) writes through the data: it needs every byte of an entry before it can say where the
//! next one begins. It also pads no entry as torch does.

/// Largest number that a field of 32 bits holds; the next one is the mark of the 64-bit extension.
const NARROW_MAX: u64 = 0xffff_fffe;
/// Version needed to extract: 4.5 with the 64-bit extension, 2.0 without.
const VERSION: (u16, u16) = (45, 20);
/// Names are UTF-8.
const FLAGS: u16 = 0x800;
/// 1 January 1980, the first day that the format can write.
const DATE: u16 = 0x21;
/// Identifier of the extra field that torch pads with.
const PADDING_ID: u16 = u16::from_le_bytes(*b"FB");
/// Identifier of the 64-bit extension's extra field.
const WIDE_ID: u16 = 1;

/// The checksum that zip has, of bytes that are known.
pub use crc32fast::hash as crc32;

#[derive(Debug)]
struct Entry {
    name: String,
    crc: u32,
    len: u64,
    offset: u64,
}

/// An archive being laid out.
#[derive(Debug, Default)]
pub struct ZipWriter {
    entries: Vec<Entry>,
    at: u64,
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).ok().filter(|_| number <= NARROW_MAX).unwrap_or(u32::MAX)
}

/// A number that a field of 16 bits holds.
fn short(number: usize) -> u16 {
    u16::try_from(number).expect("names were checked, and padding is at most 32 KiB")
}

/// The number of entries, or the mark of the 64-bit extension.
fn narrow_count(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

fn version(wide: bool) -> u16 {
    if wide { VERSION.0 } else { VERSION.1 }
}

impl ZipWriter {
    /// Begins an entry of `len` bytes and gives what stands before them. They start at a multiple of `alignment` from the
    /// archive's first byte.
    ///
    /// # Panics
    /// If `alignment` is not in `1..=32768`, or the name has more than 65 535 bytes.
    pub fn entry(&mut self, name: &str, len: u64, crc: u32, alignment: u64) -> Vec<u8> {
        assert!((1..=1 << 15).contains(&alignment), "alignment {alignment}");
        let name_len = u16::try_from(name.len()).expect("a name of less than 64 KiB");
        let wide = len > NARROW_MAX;
        let mut extra = Vec::new();
        if wide {
            extra.extend([WIDE_ID, 16].map(u16::to_le_bytes).as_flattened());
            extra.extend([len, len].map(u64::to_le_bytes).as_flattened());
        }
        let start = self.at + 30 + u64::from(name_len) + extra.len() as u64;
        if !start.is_multiple_of(alignment) {
            // The field itself takes 4 bytes.
            let padding = (start + 4).next_multiple_of(alignment) - start - 4;
            let padding = usize::try_from(padding).expect("less than the alignment");
            extra.extend([PADDING_ID, short(padding)].map(u16::to_le_bytes).as_flattened());
            extra.resize(extra.len() + padding, b'Z');
        }
        let mut bytes = b"PK\x03\x04".to_vec();
        bytes.extend([version(wide), FLAGS, 0, 0, DATE].map(u16::to_le_bytes).as_flattened());
        bytes.extend([crc, narrow(len), narrow(len)].map(u32::to_le_bytes).as_flattened());
        bytes.extend([name_len, short(extra.len())].map(u16::to_le_bytes).as_flattened());
        bytes.extend(name.as_bytes());
        bytes.extend(extra);
        self.entries.push(Entry { name: name.to_owned(), crc, len, offset: self.at });
        self.at += bytes.len() as u64 + len;
        bytes
    }

    /// Ends the archive and gives what stands after the last entry's data.
    pub fn finish(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let count = self.entries.len();
        for entry in self.entries {
            let mut wide = Vec::new();
            if entry.len > NARROW_MAX {
                wide.extend([entry.len, entry.len].map(u64::to_le_bytes).as_flattened());
            }
            if entry.offset > NARROW_MAX {
                wide.extend(entry.offset.to_le_bytes());
            }
            let extra = if wide.is_empty() { 0 } else { 4 + wide.len() };
            bytes.extend(b"PK\x01\x02");
            // Made by the same version, on no system in particular.
            bytes.extend(
                [version(extra > 0), version(extra > 0), FLAGS, 0, 0, DATE].map(u16::to_le_bytes).as_flattened(),
            );
            bytes.extend([entry.crc, narrow(entry.len), narrow(entry.len)].map(u32::to_le_bytes).as_flattened());
            bytes.extend([short(entry.name.len()), short(extra), 0, 0, 0].map(u16::to_le_bytes).as_flattened());
            bytes.extend([0, narrow(entry.offset)].map(u32::to_le_bytes).as_flattened());
            bytes.extend(entry.name.as_bytes());
            if extra > 0 {
                bytes.extend([WIDE_ID, short(wide.len())].map(u16::to_le_bytes).as_flattened());
                bytes.extend(wide);
            }
        }
        let (start, len) = (self.at, bytes.len() as u64);
        let many = count >= usize::from(u16::MAX);
        if many || start > NARROW_MAX || len > NARROW_MAX {
            bytes.extend(b"PK\x06\x06");
            // Length of the rest of this record.
            bytes.extend(44_u64.to_le_bytes());
            bytes.extend([VERSION.0, VERSION.0].map(u16::to_le_bytes).as_flattened());
            bytes.extend([0, 0].map(u32::to_le_bytes).as_flattened());
            bytes.extend([count as u64, count as u64, len, start].map(u64::to_le_bytes).as_flattened());
            bytes.extend(b"PK\x06\x07");
            bytes.extend(0_u32.to_le_bytes());
            bytes.extend((start + len).to_le_bytes());
            bytes.extend(1_u32.to_le_bytes());
        }
        bytes.extend(b"PK\x05\x06");
        bytes.extend([0, 0, narrow_count(count), narrow_count(count)].map(u16::to_le_bytes).as_flattened());
        bytes.extend([narrow(len), narrow(start)].map(u32::to_le_bytes).as_flattened());
        bytes.extend(0_u16.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_zip() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn data_starts_where_asked() {
        let mut zip = ZipWriter::default();
        let mut at = 0;
        for (name, len, alignment) in
            [("a", 3, 64), ("archive/data/0", 100, 4096), ("b", 7, 1), ("c", u64::MAX / 4, 64)]
        {
            at += zip.entry(name, len, 0, alignment).len() as u64;
            assert_eq!(at % alignment, 0, "{name}");
            at += len;
        }
        assert!(zip.finish().len() > 4 * 46 + 22 + 76);
    }

    #[test]
    fn the_extension_is_used_only_where_needed() {
        let len = |count: u64, each: u64| {
            let mut zip = ZipWriter::default();
            (0..count).for_each(|_| drop(zip.entry("n", each, 0, 1)));
            zip.finish().len() as u64
        };
        assert_eq!(len(2, 5), 2 * 47 + 22);
        // Offsets beyond 4 GiB, sizes not.
        assert_eq!(len(3, 3 << 30), 3 * 47 + 12 + 76 + 22);
        assert_eq!(len(1, 1 << 32), 47 + 20 + 76 + 22);
        assert_eq!(len(70_000, 0), 70_000 * 47 + 76 + 22);
    }
}
