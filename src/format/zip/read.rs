//! A reader of the directory of a zip archive without compression, as `torch.save` writes.
//!
//! ```text
//! local header, name, extra, data   for each entry
//! directory: for each entry its name, sizes, checksum and where its local header is
//! end: where the directory is, how many entries it has      (preceded by 64-bit numbers where these do not fit)
//! ```
//!
//! Reading goes from the end: `find_directory` looks for the end record in the last bytes of a file and says where the directory
//! is, `parse_directory` lists it, and [`ZipEntry::data_start`] finds an entry's data from its local header, whose length only the header
//! itself gives. Compressed and encrypted entries are listed and refused when their data is requested.

use ckfs_tensor::to_usize;

use crate::FormatError;

/// Bytes at the end of a file in which `find_directory` looks: the end record with the longest comment that it may have, and
/// the 64-bit records before it.
pub const TAIL_BYTES: u64 = 22 + 0xffff + 20 + 56;

/// Bytes of a local header before name and extra fields.
pub(crate) const LOCAL_BYTES: u64 = 30;

/// Most entries of an archive.
pub const ENTRIES_MAX: u64 = 4 << 20;

/// That a record is cut off, or does not begin with its mark.
fn damaged(what: &str) -> FormatError {
    FormatError(format!("zip: {what} is damaged"))
}

/// That the directory, or an entry, lies beyond the file.
pub(crate) fn outside(start: u64, end: u64, len_bytes: u64) -> FormatError {
    FormatError(format!("zip: the directory at bytes {start}..{end} is outside a file of {len_bytes} bytes"))
}

/// Where the directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZipDirectory {
    /// First byte in the file.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Number of entries.
    pub entries: u64,
}

/// One entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZipEntry {
    /// Name, with `/` between its parts.
    pub name: String,
    /// CRC-32 of the data.
    pub crc32: u32,
    /// Bytes of the data.
    pub len_bytes: u64,
    /// Where the local header is in the file.
    pub header_start: u64,
    method: u16,
    flags: u16,
}

const END_MARK: u32 = 0x0605_4b50;
const END_BYTES: usize = 22;
const WIDE_LOCATOR_MARK: u32 = 0x0706_4b50;
const WIDE_LOCATOR_BYTES: usize = 20;
const WIDE_END_MARK: u32 = 0x0606_4b50;
const WIDE_END_BYTES: usize = 56;
const ENTRY_MARK: u32 = 0x0201_4b50;
const ENTRY_BYTES: usize = 46;
const LOCAL_MARK: u32 = 0x0403_4b50;
const ENCRYPTED: u16 = 1;
const STORED: u16 = 0;
/// Identifier of the extra field with 64-bit numbers.
const WIDE_ID: u16 = 1;
/// What a field holds whose number is in the extra field.
const ELSEWHERE: u32 = u32::MAX;

/// Little-endian numbers at places of a record.
#[derive(Clone, Copy)]
struct Record<'a>(&'a [u8]);

impl Record<'_> {
    fn u16(self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(*self.0.get(at..)?.first_chunk()?))
    }

    fn u32(self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(*self.0.get(at..)?.first_chunk()?))
    }

    fn u64(self, at: usize) -> Option<u64> {
        Some(u64::from_le_bytes(*self.0.get(at..)?.first_chunk()?))
    }
}

/// Finds the directory of an archive of `file_bytes` bytes, of which `tail` are the last: [`TAIL_BYTES`] of them, or all if it is
/// shorter.
///
/// # Errors
/// [`FormatError`]: there is no end record, or it points outside the file.
pub(crate) fn find_directory(tail: &[u8], file_bytes: u64) -> Result<ZipDirectory, FormatError> {
    // The comment may hold anything, even the mark: the last place counts whose comment ends with the file.
    let ends_file = |at: &usize| {
        let record = Record(&tail[*at..]);
        let comment = record.u16(END_BYTES - 2).map(usize::from);
        record.u32(0) == Some(END_MARK) && comment.is_some_and(|comment| at + END_BYTES + comment == tail.len())
    };
    let at = tail.len().checked_sub(END_BYTES).and_then(|last| (0..=last).rev().find(ends_file));
    let searched = tail.len();
    let at = at.ok_or_else(|| FormatError(format!("not a zip archive: no end record in the last {searched} bytes")))?;
    let record = Record(&tail[at..]);
    let (Some(entries), Some(len), Some(start)) = (record.u16(10), record.u32(12), record.u32(16)) else {
        return Err(damaged("the end record"));
    };
    let (mut entries, mut len, mut start) = (u64::from(entries), u64::from(len), u64::from(start));
    let is_wide = entries == u64::from(u16::MAX) || len == u64::from(ELSEWHERE) || start == u64::from(ELSEWHERE);
    if let Some(wide) = wide_end(tail, at, file_bytes).filter(|_| is_wide) {
        (entries, len, start) = wide?;
    }
    let end = start.saturating_add(len);
    if end > file_bytes - (tail.len() - at) as u64 {
        return Err(outside(start, end, file_bytes));
    }
    // No more than there can be.
    if entries > ENTRIES_MAX || entries > len / ENTRY_BYTES as u64 {
        return Err(FormatError(format!("zip: {entries} entries: expected at most {ENTRIES_MAX}")));
    }
    Ok(ZipDirectory { start, end, entries })
}

/// Entries, length and start of the directory by the 64-bit record, if there is one before the end record at `at`.
fn wide_end(tail: &[u8], at: usize, file_bytes: u64) -> Option<Result<(u64, u64, u64), FormatError>> {
    let locator_at = at.checked_sub(WIDE_LOCATOR_BYTES)?;
    let locator = Record(&tail[locator_at..at]);
    if locator.u32(0)? != WIDE_LOCATOR_MARK {
        return None;
    }
    let read = || {
        let tail_start = file_bytes.checked_sub(tail.len() as u64)?;
        let place = usize::try_from(locator.u64(8)?.checked_sub(tail_start)?).ok()?;
        let record = Record(tail.get(place..)?.get(..WIDE_END_BYTES)?);
        (record.u32(0)? == WIDE_END_MARK).then_some(())?;
        Some((record.u64(32)?, record.u64(40)?, record.u64(48)?))
    };
    Some(read().ok_or_else(|| damaged("the 64-bit end record")))
}

/// The entries of a directory, of which `bytes` are all.
///
/// # Errors
/// [`FormatError`].
pub(crate) fn parse_directory(bytes: &[u8], directory: ZipDirectory) -> Result<Vec<ZipEntry>, FormatError> {
    let damaged = || damaged("the directory");
    let mut entries = Vec::new();
    let mut rest = bytes;
    for _ in 0..directory.entries {
        let (entry, len) = parse_entry(rest).ok_or_else(damaged)?;
        rest = rest.get(len..).ok_or_else(damaged)?;
        entries.push(entry);
    }
    if rest.is_empty() { Ok(entries) } else { Err(damaged()) }
}

/// An entry and the bytes that it takes.
fn parse_entry(bytes: &[u8]) -> Option<(ZipEntry, usize)> {
    let record = Record(bytes);
    (record.u32(0)? == ENTRY_MARK).then_some(())?;
    let (flags, method, crc32) = (record.u16(8)?, record.u16(10)?, record.u32(16)?);
    let (packed, plain, header) = (record.u32(20)?, record.u32(24)?, record.u32(42)?);
    let lens = [record.u16(28)?, record.u16(30)?, record.u16(32)?].map(usize::from);
    let [name_len, extra_len, comment_len] = lens;
    let name = bytes.get(ENTRY_BYTES..)?.get(..name_len)?;
    let extra = bytes.get(ENTRY_BYTES + name_len..)?.get(..extra_len)?;
    // In this order, and each only where its field says so.
    let mut wide = wide_fields(extra)?;
    let mut number = |narrow: u32| if narrow == ELSEWHERE { wide.next() } else { Some(u64::from(narrow)) };
    let (len_bytes, packed_bytes, header_start) = (number(plain)?, number(packed)?, number(header)?);
    (method != STORED || packed_bytes == len_bytes).then_some(())?;
    let name = std::str::from_utf8(name).ok()?.to_owned();
    let len = ENTRY_BYTES + lens.iter().sum::<usize>();
    bytes.get(len - comment_len..len)?;
    Some((ZipEntry { name, crc32, len_bytes, header_start, method, flags }, len))
}

/// The 64-bit numbers among the extra fields of an entry.
fn wide_fields(mut extra: &[u8]) -> Option<impl Iterator<Item = u64>> {
    let mut numbers: &[u8] = &[];
    while !extra.is_empty() {
        let record = Record(extra);
        let (id, len) = (record.u16(0)?, usize::from(record.u16(2)?));
        let field = extra.get(4..)?.get(..len)?;
        if id == WIDE_ID {
            numbers = field;
        }
        extra = &extra[4 + len..];
    }
    let (numbers, _) = numbers.as_chunks::<8>();
    Some(numbers.iter().map(|number| u64::from_le_bytes(*number)))
}

/// Bytes of a local header with its name and extra fields, given at least the first [`LOCAL_BYTES`] of them; `None` if it is
/// no local header.
pub(crate) fn local_header_bytes(local: &[u8]) -> Option<u64> {
    let record = Record(local);
    (record.u32(0)? == LOCAL_MARK).then_some(())?;
    Some(LOCAL_BYTES + u64::from(record.u16(26)?) + u64::from(record.u16(28)?))
}

impl ZipEntry {
    /// Where the data is in a file of `file_bytes` bytes. `local` is the local header at [`ZipEntry::header_start`], with its name
    /// and extra fields; more may follow.
    ///
    /// Only the local header says where the data begins, and has no checksum. So its name must be that of the directory, and its
    /// extra fields must fill their room: a damaged length is noticed.
    ///
    /// # Errors
    /// [`FormatError`]: it is compressed, encrypted, damaged or outside the file.
    pub fn data_start(&self, local: &[u8], file_bytes: u64) -> Result<u64, FormatError> {
        let refused = |how: String| {
            Err(FormatError(format!("zip: entry {:?} is {how}; only stored entries are read", self.name)))
        };
        if self.flags & ENCRYPTED != 0 {
            return refused("encrypted".to_owned());
        }
        if self.method != STORED {
            return refused(format!("compressed by method {}", self.method));
        }
        let damaged = || damaged("a local header");
        let names = local.get(to_usize(LOCAL_BYTES)..).and_then(|rest| {
            let (name, rest) = rest.split_at_checked(usize::from(Record(local).u16(26)?))?;
            Some((name, rest.get(..usize::from(Record(local).u16(28)?))?))
        });
        let (Some(len), Some((name, extra))) = (local_header_bytes(local), names) else { return Err(damaged()) };
        let start = self.header_start.checked_add(len).filter(|_| name == self.name.as_bytes());
        let start = start.filter(|_| wide_fields(extra).is_some()).ok_or_else(damaged)?;
        let end = start.saturating_add(self.len_bytes);
        if end <= file_bytes { Ok(start) } else { Err(outside(start, end, file_bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zip::write::{ZipWriter, crc32};

    fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let mut zip = ZipWriter::default();
        let mut bytes = Vec::new();
        for (name, data) in entries {
            bytes.extend(zip.entry(name, data.len() as u64, crc32(data), 64));
            bytes.extend_from_slice(data);
        }
        bytes.extend(zip.finish());
        bytes
    }

    fn list(bytes: &[u8]) -> Result<Vec<(String, Vec<u8>)>, FormatError> {
        let len = bytes.len() as u64;
        let tail = &bytes[bytes.len() - bytes.len().min(usize::try_from(TAIL_BYTES).unwrap())..];
        let directory = find_directory(tail, len)?;
        let place = |at: u64| usize::try_from(at).unwrap();
        let entries = parse_directory(&bytes[place(directory.start)..place(directory.end)], directory)?;
        let data = |entry: ZipEntry| {
            let local = bytes.get(place(entry.header_start)..).unwrap_or_default();
            let start = place(entry.data_start(local, len)?);
            Ok((entry.name, bytes[start..start + place(entry.len_bytes)].to_vec()))
        };
        entries.into_iter().map(data).collect()
    }

    #[test]
    fn what_the_writer_writes_is_read() {
        let entries: [(&str, &[u8]); 3] =
            [("archive/data.pkl", b"pickle"), ("archive/data/0", b""), ("archive/data/1", b"12345")];
        let found = list(&archive(&entries)).unwrap();
        let expected: Vec<_> = entries.iter().map(|(name, data)| ((*name).to_owned(), data.to_vec())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn numbers_beyond_32_bits_are_read() {
        let lens = [5 << 30, 1, u64::from(u32::MAX), 7];
        let mut zip = ZipWriter::default();
        let mut headers = Vec::new();
        let mut at = 0;
        for (number, len) in lens.into_iter().enumerate() {
            let local = zip.entry(&format!("archive/data/{number}"), len, 9, 64);
            let start = at + local.len() as u64;
            headers.push((at, start, local));
            at = start + len;
        }
        let tail = zip.finish();
        let file_bytes = at + tail.len() as u64;
        let directory = find_directory(&tail, file_bytes).unwrap();
        assert_eq!((directory.start, directory.entries), (at, 4));
        let len = usize::try_from(directory.end - directory.start).unwrap();
        let entries = parse_directory(&tail[..len], directory).unwrap();
        for ((entry, len), (header, start, local)) in entries.iter().zip(lens).zip(headers) {
            assert_eq!((entry.len_bytes, entry.header_start, entry.crc32), (len, header, 9));
            assert_eq!(entry.data_start(&local, file_bytes), Ok(start));
        }
        let mut many = ZipWriter::default();
        (0..70_000).for_each(|_| drop(many.entry("n", 0, 0, 1)));
        let at = 70_000 * 31;
        let tail = many.finish();
        assert_eq!(find_directory(&tail, at + tail.len() as u64).unwrap().entries, 70_000);
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        for bytes in [&b""[..], &[7; 100]] {
            let expected = format!("not a zip archive: no end record in the last {} bytes", bytes.len());
            assert_eq!(list(bytes).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_damaged_length_of_a_local_header_is_noticed() {
        let whole = archive(&[("a/data.pkl", b"pickle"), ("a/data/0", b"12345")]);
        let entry = whole.windows(8).position(|window| window == b"a/data/0").unwrap() - 30;
        for place in 26..30 {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[entry + place] ^= 1 << bit;
                let error = list(&bytes).unwrap_err().to_string();
                assert_eq!(error, "zip: a local header is damaged", "byte {place} bit {bit}");
            }
        }
    }

    #[test]
    fn damaged_archives_never_panic() {
        let whole = archive(&[("a/data.pkl", b"pickle"), ("a/data/0", b"12345")]);
        for len in 0..whole.len() {
            assert!(list(&whole[..len]).is_err(), "cut to {len}");
        }
        for at in 0..whole.len() {
            for byte in 0..=255 {
                let mut bytes = whole.clone();
                bytes[at] = byte;
                drop(list(&bytes));
            }
        }
    }
}
