//! A reader of the archives of `torch.save`: where the bytes of each tensor are.
//!
//! ```text
//! archive/data.pkl      the pickled object; it refers to storages by number
//! archive/byteorder     "little"
//! archive/data/0        the bytes of storage 0
//! ```
//!
//! An archive is a `.pt`, `.pth` or `.bin` file, or one item of a `.distcp` file. [`TorchArchive`] says which bytes it needs next,
//! is given them, and ends with its pickle and the places of storages. An archive of a few KiB needs one request, of two spans; a
//! large one needs the local header of each storage too, all in one request.
//!
//! The CRC-32 of what is interpreted is verified. That of storages is not: their bytes are read where they are, in parts.

use std::{collections::HashMap, ops::Range};

use ckfs_tensor::to_usize;

use super::{
    super::{
        pickle::read::{self as unpickle, Id, Limits, Unpickled},
        zip::{
            read::{self as unzip, LOCAL_BYTES, TAIL_BYTES, ZipDirectory, ZipEntry},
            write::crc32,
        },
    },
    state::{self as torch_state, Of, PICKLE, TorchContents, TorchTensor},
};
use crate::FormatError;

/// Bytes at the start and at the end that are requested first. An archive of one tensor has its pickle and its directory there.
const PROBE_BYTES: u64 = 4 << 10;

/// Bytes of a local header's extra fields that are requested first: torch pads data to multiples of 64 bytes with them.
const EXTRA_PROBE_BYTES: u64 = 128;

/// Longest pickle, in bytes.
const PICKLE_BYTES_MAX: u64 = 1 << 30;

/// The pickled number that is the first in files that `torch.save` wrote before archives, until 2020.
const LEGACY_NUMBER: &[u8] = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

/// Bytes in which that number must be: after the protocol, and a frame in newer ones.
const LEGACY_BYTES: usize = 32;

/// What a file is refused with that torch wrote before it had archives.
const LEGACY: &str =
    "written by torch before 1.6, or without its zip format: load it with torch.load and save it with torch.save";
/// What a pickle alone is refused with.
const PICKLED: &str =
    "a pickle that is no archive, as pickle.dump writes: load it in Python and save its tensors with torch.save";
/// What a file without bytes is refused with.
const EMPTY: &str = "an empty file: the save or the download did not finish";

/// That it is not an archive as torch writes them.
fn refused(problem: impl std::fmt::Display) -> FormatError {
    FormatError(format!("torch archive: {problem}"))
}

fn missing(entry: &str) -> FormatError {
    refused(format_args!("expected an entry {entry:?}"))
}

/// That an entry has another length than it must have.
fn length(entry: &str, expected: u64, found: u64) -> FormatError {
    refused(format_args!("entry {entry:?}: expected {expected} bytes, found {found}"))
}

/// A tensor of an archive and where its storage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// The tensor, with strides and offset in its storage.
    pub tensor: TorchTensor,
    /// First byte of the storage in the archive.
    pub storage_start: u64,
}

impl SavedTensor {
    /// The bytes of the archive that the tensor uses, from its first element to its last.
    ///
    /// # Panics
    /// Never for what [`TorchArchive`] gives: such a tensor is inside its storage.
    pub fn span(&self) -> Range<u64> {
        let TorchTensor { dtype, offset, .. } = &self.tensor;
        let end = self.tensor.end_bytes().expect("a tensor is inside its storage");
        let start = offset.saturating_mul(dtype.element_bytes().unwrap_or(1)).min(end);
        self.storage_start + start..self.storage_start + end
    }
}

#[derive(Debug)]
struct Listing {
    entries: Vec<ZipEntry>,
    by_name: HashMap<String, usize>,
    /// Where the header of each entry, and the directory, begins; sorted.
    starts: Vec<u64>,
}

#[derive(Debug)]
enum Stage {
    /// The end of the archive is looked at.
    Ends,
    /// The directory is known.
    Directory(ZipDirectory),
    /// The entries are known.
    Pickle(Listing),
    /// Which storages are needed is known.
    Storages(Listing, Unpickled),
    Done(OpenedArchive),
}

/// The reading of one archive.
#[derive(Debug)]
pub struct TorchArchive {
    len_bytes: u64,
    /// What was given, with its first byte.
    known: Vec<(u64, Vec<u8>)>,
    wanted: Vec<Range<u64>>,
    stage: Stage,
    allowed: Allowed,
}

/// Whether a pickle may name this class or function, by module and name.
pub type Allowed = fn(&str, &str) -> bool;

/// An archive that was read.
#[derive(Debug)]
pub struct OpenedArchive {
    /// The saved object.
    pub pickle: Unpickled,
    /// First byte and length of each storage, by key.
    storages: HashMap<String, (u64, u64)>,
    /// What stands before the names of all entries.
    root: String,
}

impl OpenedArchive {
    /// First byte and length of the storage with this key in the archive.
    pub fn storage(&self, key: &str) -> Option<(u64, u64)> {
        self.storages.get(key).copied()
    }

    /// The tensor that a value of the pickle is, called `name` in messages; `None` if it is none.
    ///
    /// # Errors
    /// It is not described as torch describes tensors, or its storage is not as long as it says.
    pub fn tensor(&self, id: Id, name: &str) -> Result<Option<SavedTensor>, FormatError> {
        let Some(tensor) = Of { pickle: &self.pickle, name }.tensor(id)? else { return Ok(None) };
        let entry = format!("{}data/{}", self.root, tensor.storage);
        let (storage_start, found) = self.storage(&tensor.storage).ok_or_else(|| missing(&entry))?;
        if found == tensor.storage_bytes {
            return Ok(Some(SavedTensor { tensor, storage_start }));
        }
        Err(length(&entry, tensor.storage_bytes, found))
    }

    /// All tensors that it holds, by name, and what is none.
    ///
    /// # Errors
    /// As [`OpenedArchive::tensor`], and those of [`leaves`](torch_state::leaves).
    pub fn contents(&self) -> Result<TorchContents<SavedTensor>, FormatError> {
        let TorchContents { tensors, others } = torch_state::leaves(&self.pickle, self.pickle.root())?;
        let saved = tensors.iter().filter_map(|(name, id)| self.tensor(*id, name).transpose());
        Ok(TorchContents { tensors: saved.collect::<Result<_, _>>()?, others })
    }
}

impl TorchArchive {
    /// Begins to read an archive of this length, whose pickle may name what `allowed` says.
    pub fn new(len_bytes: u64, allowed: Allowed) -> Self {
        let wanted = if len_bytes <= 2 * PROBE_BYTES {
            std::iter::once(0..len_bytes).collect()
        } else {
            vec![0..PROBE_BYTES, len_bytes - PROBE_BYTES..len_bytes]
        };
        Self { len_bytes, known: Vec::new(), wanted, stage: Stage::Ends, allowed }
    }

    /// The spans of the archive that are needed next; none when it is read.
    pub fn wanted(&self) -> &[Range<u64>] {
        &self.wanted
    }

    /// Takes the bytes of the wanted spans, in their order.
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn supply(&mut self, bytes: Vec<Vec<u8>>) -> Result<(), FormatError> {
        let wanted = std::mem::take(&mut self.wanted);
        for (at, span) in wanted.iter().enumerate() {
            let (expected, found) = (span.end - span.start, bytes.get(at).map_or(0, |bytes| bytes.len() as u64));
            if expected != found {
                let start = span.start;
                return Err(refused(format_args!("expected {expected} bytes at {start}, found {found}")));
            }
        }
        self.known.extend(wanted.into_iter().map(|span| span.start).zip(bytes));
        loop {
            let stage = std::mem::replace(&mut self.stage, Stage::Ends);
            let (next, wanted) = self.advance(stage)?;
            self.stage = next;
            if !wanted.is_empty() || matches!(self.stage, Stage::Done(_)) {
                self.wanted = wanted;
                return Ok(());
            }
        }
    }

    /// The archive with its pickle; `None` if more bytes are wanted.
    pub fn into_opened(self) -> Option<OpenedArchive> {
        if let Stage::Done(opened) = self.stage { Some(opened) } else { None }
    }

    fn bytes(&self, span: &Range<u64>) -> Option<&[u8]> {
        self.known.iter().find_map(|(start, bytes)| {
            let at = to_usize(span.start.checked_sub(*start)?);
            bytes.get(at..at.checked_add(to_usize(span.end - span.start))?)
        })
    }

    /// The spans among these that were not given yet.
    fn missing(&self, spans: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
        spans.into_iter().filter(|span| self.bytes(span).is_none()).collect()
    }

    /// Does what can be done with what was given: the next stage, or the same and what it needs.
    fn advance(&self, stage: Stage) -> Result<(Stage, Vec<Range<u64>>), FormatError> {
        match stage {
            Stage::Ends => self.find_directory(),
            Stage::Directory(directory) => {
                let span = directory.start..directory.end;
                let Some(bytes) = self.bytes(&span) else { return Ok((stage, vec![span])) };
                Ok((Stage::Pickle(Listing::new(unzip::parse_directory(bytes, directory)?, directory)?), Vec::new()))
            }
            Stage::Pickle(listing) => self.read_pickle(listing),
            Stage::Storages(listing, pickle) => self.find_storages(listing, pickle),
            Stage::Done(_) => Ok((stage, Vec::new())),
        }
    }

    fn find_directory(&self) -> Result<(Stage, Vec<Range<u64>>), FormatError> {
        // The last that was given is the end of the archive.
        let tail = self.known.last().map_or(&[][..], |(_, bytes)| bytes);
        match unzip::find_directory(tail, self.len_bytes) {
            Ok(directory) => Ok((Stage::Directory(directory), Vec::new())),
            Err(error) => {
                let head = self.known.first().map_or(&[][..], |(_, bytes)| bytes);
                if self.len_bytes == 0 {
                    return Err(FormatError(EMPTY.to_owned()));
                }
                let first = &head[..head.len().min(LEGACY_BYTES)];
                if first.windows(LEGACY_NUMBER.len()).any(|part| part == LEGACY_NUMBER) {
                    return Err(FormatError(LEGACY.to_owned()));
                }
                if let [0x80, 0..=5, ..] = first {
                    return Err(FormatError(PICKLED.to_owned()));
                }
                // A comment may be longer than what was looked at.
                let longest = TAIL_BYTES.min(self.len_bytes);
                if (tail.len() as u64) < longest {
                    return Ok((Stage::Ends, std::iter::once(self.len_bytes - longest..self.len_bytes).collect()));
                }
                Err(error)
            }
        }
    }

    fn read_pickle(&self, listing: Listing) -> Result<(Stage, Vec<Range<u64>>), FormatError> {
        let root = listing.root()?;
        let pickle = listing.find(&format!("{root}{PICKLE}"))?;
        if listing.entries[pickle].len_bytes > PICKLE_BYTES_MAX {
            let ZipEntry { name, len_bytes, .. } = &listing.entries[pickle];
            return Err(length(name, PICKLE_BYTES_MAX, *len_bytes));
        }
        // Archives from before 2023 do not say the order of bytes.
        let order = listing.by_name.get(&format!("{root}byteorder")).copied();
        let missing = self.missing(order.into_iter().chain([pickle]).map(|entry| listing.region(entry)));
        if !missing.is_empty() {
            return Ok((Stage::Pickle(listing), missing));
        }
        if let Some(order) = order {
            let found = self.content(&listing, order)?;
            if found != b"little" {
                let found = String::from_utf8_lossy(found);
                return Err(refused(format_args!("expected byte order \"little\", found {found:?}")));
            }
        }
        let bytes = self.content(&listing, pickle)?;
        let pickle = unpickle::read(bytes, Limits::default(), &self.allowed)?;
        Ok((Stage::Storages(listing, pickle), Vec::new()))
    }

    /// The data of an entry whose region was given, with the right checksum.
    fn content(&self, listing: &Listing, number: usize) -> Result<&[u8], FormatError> {
        let entry = &listing.entries[number];
        let start = self.data_start(listing, number)?;
        let span = start..start + entry.len_bytes;
        let bytes = self.bytes(&span).expect("the region of the entry was given, and the data is inside it");
        let (name, expected, found) = (&entry.name, entry.crc32, crc32(bytes));
        if expected == found {
            return Ok(bytes);
        }
        let sums = format!("expected CRC-32 {expected:08x}, found {found:08x}: the archive is damaged");
        Err(refused(format_args!("entry {name:?}: {sums}")))
    }

    /// Where the data of an entry begins, whose local header was given. All of the data is before the next entry.
    fn data_start(&self, listing: &Listing, number: usize) -> Result<u64, FormatError> {
        let (entry, region) = (&listing.entries[number], listing.region(number));
        let local = self.bytes(&self.local_header(listing, number)).expect("the local header was asked for");
        let start = entry.data_start(local, self.len_bytes)?;
        let room = region.end.saturating_sub(start);
        if start <= region.end && entry.len_bytes <= room {
            Ok(start)
        } else {
            Err(length(&entry.name, room, entry.len_bytes))
        }
    }

    /// The local header of an entry with its name and extra fields, as far as its length is known.
    fn local_header(&self, listing: &Listing, number: usize) -> Range<u64> {
        let region = listing.region(number);
        let first = LOCAL_BYTES + listing.entries[number].name.len() as u64 + EXTRA_PROBE_BYTES;
        let first = region.start..region.end.min(region.start + first);
        let len = self.bytes(&first).and_then(unzip::local_header_bytes).unwrap_or(0);
        region.start..region.end.min(first.end.max(region.start + len))
    }

    /// The places of the storages, once the local headers before them are there.
    fn find_storages(&self, listing: Listing, pickle: Unpickled) -> Result<(Stage, Vec<Range<u64>>), FormatError> {
        let root = listing.root()?.to_owned();
        // In order, so that of several faults always the same is told.
        let number = |key: &str| Ok((key.to_owned(), listing.find(&format!("{root}data/{key}"))?));
        let numbers = torch_state::storage_keys(&pickle).into_iter().map(number);
        let numbers = numbers.collect::<Result<Vec<(String, usize)>, FormatError>>()?;
        let mut missing = self.missing(numbers.iter().map(|(_, number)| self.local_header(&listing, *number)));
        if !missing.is_empty() {
            missing.sort_unstable_by_key(|span| span.start);
            return Ok((Stage::Storages(listing, pickle), missing));
        }
        let place = |(key, number): (String, usize)| -> Result<(String, (u64, u64)), FormatError> {
            Ok((key, (self.data_start(&listing, number)?, listing.entries[number].len_bytes)))
        };
        let storages = numbers.into_iter().map(place).collect::<Result<_, _>>()?;
        Ok((Stage::Done(OpenedArchive { pickle, storages, root }), Vec::new()))
    }
}

impl Listing {
    fn new(entries: Vec<ZipEntry>, directory: ZipDirectory) -> Result<Self, FormatError> {
        let mut by_name = HashMap::with_capacity(entries.len());
        for (number, entry) in entries.iter().enumerate() {
            if by_name.insert(entry.name.clone(), number).is_some() {
                return Err(refused(format_args!("entry {:?} is there twice", entry.name)));
            }
            if entry.header_start >= directory.start {
                let (start, end) = (entry.header_start, directory.start);
                return Err(unzip::outside(start, start.saturating_add(entry.len_bytes), end));
            }
        }
        let mut starts: Vec<u64> = entries.iter().map(|entry| entry.header_start).chain([directory.start]).collect();
        starts.sort_unstable();
        Ok(Self { entries, by_name, starts })
    }

    /// What stands before the names of all entries of torch.
    fn root(&self) -> Result<&str, FormatError> {
        let root = |entry: &ZipEntry| entry.name.strip_suffix(PICKLE).filter(|root| root.ends_with('/')).map(str::len);
        let found = self.entries.iter().find_map(|entry| root(entry).map(|len| &entry.name[..len]));
        found.ok_or_else(|| missing(PICKLE))
    }

    fn find(&self, name: &str) -> Result<usize, FormatError> {
        self.by_name.get(name).copied().ok_or_else(|| missing(name))
    }

    /// From the local header of an entry to what follows it.
    fn region(&self, number: usize) -> Range<u64> {
        let start = self.entries[number].header_start;
        let next = self.starts.partition_point(|other| *other <= start);
        start..self.starts[next]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hexadecimal::bytes_of;

    fn fixture(name: &str) -> Vec<u8> {
        let text = include_str!("../../../tests/fixtures/formats/torch.json");
        let fixtures: serde_json::Value = serde_json::from_str(text).unwrap();
        bytes_of(fixtures[name].as_str().unwrap())
    }

    /// The tensors of an archive, and the number of spans of each request.
    fn read(bytes: &[u8]) -> Result<(Vec<SavedTensor>, Vec<usize>), FormatError> {
        let mut archive = TorchArchive::new(bytes.len() as u64, torch_state::is_allowed);
        let mut requests = Vec::new();
        while !archive.wanted().is_empty() {
            requests.push(archive.wanted().len());
            let spans = archive.wanted().iter().map(|span| bytes[to_usize(span.start)..to_usize(span.end)].to_vec());
            let spans = spans.collect();
            archive.supply(spans)?;
        }
        Ok((archive.into_opened().expect("nothing more is wanted").contents()?.tensors, requests))
    }

    fn row(bytes: &[u8], saved: &SavedTensor) -> String {
        let SavedTensor { tensor, .. } = saved;
        let span = saved.span();
        let data = &bytes[to_usize(span.start)..to_usize(span.end)];
        let TorchTensor { name, dtype, shape, strides, .. } = tensor;
        format!("{name} {dtype} {shape:?} {strides:?} {data:02x?}")
    }

    #[test]
    fn archives_of_each_protocol_are_read() {
        let halves = "00, 00, 00, 3c, 00, 40, 00, 42, 00, 44, 00, 45";
        for protocol in [2, 3, 4] {
            let bytes = fixture(&format!("archive {protocol}"));
            let (tensors, requests) = read(&bytes).unwrap();
            assert_eq!(requests, [1]);
            let rows: Vec<String> = tensors.iter().map(|saved| row(&bytes, saved)).collect();
            let expected = [
                format!("a F16 [2, 3] [3, 1] [{halves}]"),
                format!("b F16 [3, 2] [1, 3] [{halves}]"),
                "row F16 [3] [1] [00, 42, 00, 44, 00, 45]".to_owned(),
                "f8 F8_E4M3 [3] [1] [00, 00, 00]".to_owned(),
                "nest.x F32 [2] [1] [00, 00, 80, 3f, 00, 00, 80, 3f]".to_owned(),
            ];
            assert_eq!(rows, expected);
        }
    }

    /// An archive as torch lays it out, with one tensor of this many elements, which has so many bytes.
    fn large(elements: u32, bytes: usize, byte_order: &str) -> Vec<u8> {
        let pickle = [
            b"\x80\x02}(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nByteStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ".as_slice(),
            &elements.to_le_bytes(),
            b"tQK\x00J",
            &elements.to_le_bytes(),
            b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRu.",
        ]
        .concat();
        let data = vec![7; bytes];
        let mut zip = crate::zip::write::ZipWriter::default();
        let mut bytes = Vec::new();
        for (name, data) in [("data.pkl", pickle.as_slice()), ("data/0", &data), ("byteorder", byte_order.as_bytes())] {
            bytes.extend(zip.entry(&format!("x/{name}"), data.len() as u64, crc32(data), 64));
            bytes.extend_from_slice(data);
        }
        bytes.extend(zip.finish());
        bytes
    }

    #[test]
    fn a_large_archive_needs_its_two_ends() {
        let (tensors, requests) = read(&large(100_000, 100_000, "little")).unwrap();
        assert_eq!((tensors.len(), requests), (1, vec![2]));
        assert_eq!(tensors[0].span().end - tensors[0].span().start, 100_000);
        for (bytes, byte_order, expected) in [
            (10, "big", "expected byte order \"little\", found \"big\""),
            (9, "little", "entry \"x/data/0\": expected 10 bytes, found 9"),
            (11, "little", "entry \"x/data/0\": expected 10 bytes, found 11"),
        ] {
            let error = read(&large(10, bytes, byte_order)).unwrap_err().to_string();
            assert_eq!(error, format!("torch archive: {expected}"));
        }
    }

    #[test]
    fn old_files_are_refused_with_advice() {
        let error = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert_eq!(error(&fixture("legacy")), LEGACY);
        assert!(error(b"nothing").starts_with("not a zip archive: no end record"));
        assert!(error(&vec![1; 80_000]).starts_with("not a zip archive: no end record"));
        assert_eq!(error(b""), EMPTY);
        // The number in a frame, as protocol 4 has it, and another pickle.
        let framed = [b"\x80\x04\x95\x0d\0\0\0\0\0\0\0", LEGACY_NUMBER, b"."].concat();
        assert_eq!(error(&framed), LEGACY);
        assert_eq!(error(b"\x80\x04}."), PICKLED);
    }

    #[test]
    fn bytes_that_were_not_asked_for_are_refused() {
        let bytes = fixture("archive 2");
        let mut archive = TorchArchive::new(bytes.len() as u64, torch_state::is_allowed);
        let error = archive.supply(vec![bytes[1..].to_vec()]).unwrap_err().to_string();
        assert!(error.starts_with("torch archive: expected ") && error.contains(" bytes at 0, found "), "{error}");
    }

    #[test]
    fn every_flipped_bit_of_the_pickle_is_noticed_and_no_damage_panics() {
        let whole = fixture("archive 4");
        let (expected, _) = read(&whole).unwrap();
        let pickle = whole
            .windows(4)
            .position(|window| window == b"\x80\x04\x95\x0e" || window.starts_with(b"\x80\x04\x95"))
            .unwrap();
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let found = read(&bytes);
                if (pickle..pickle + 100).contains(&at) {
                    let error = found.as_ref().unwrap_err().to_string();
                    assert!(error.contains("expected CRC-32 "), "byte {at}: {error}");
                }
                // Bits of names, times and versions may change; places may not.
                if let Ok((tensors, _)) = found {
                    let places = |tensors: &[SavedTensor]| tensors.iter().map(SavedTensor::span).collect::<Vec<_>>();
                    assert_eq!(places(&tensors), places(&expected), "byte {at} bit {bit}");
                }
            }
            assert!(read(&whole[..at]).is_err(), "cut to {at}");
        }
    }
}
