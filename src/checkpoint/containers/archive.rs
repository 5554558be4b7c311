//! Reads what archives of `torch.save` say of their tensors: many small ones in few requests.
//!
//! An archive asks for a few spans at its ends and is then done, or asks for more. Archives that lie one after the other in a
//! file ask for neighbouring spans, which are fetched as one. Groups of archives are read at the same time.

use ckfs_format::torch::{
    read::{Allowed, OpenedArchive, SavedTensor, TorchArchive},
    state::{self, TorchContents},
};
use ckfs_host::parse_room::ParseRoomFull;
use ckfs_source::{FileId, Source};
use rayon::{
    iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator},
    slice::ParallelSlice,
};

/// Archives that one thread reads together.
const GROUP_ARCHIVES: usize = 64;

/// Most bytes that are fetched as one because little lies between them.
const MERGED_BYTES_MAX: u64 = 4 << 20;

/// An archive: these bytes of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArchiveSpan {
    /// The file.
    pub(crate) file: FileId,
    /// First byte.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) len: u64,
}

impl ArchiveSpan {
    /// All of a file.
    pub(crate) fn whole(source: &dyn Source, file: FileId) -> Self {
        Self { file, start: 0, len: source.len_bytes(file) }
    }

    /// Why it is not in its file, if it is not.
    fn outside(&self, source: &dyn Source) -> Option<String> {
        let Self { file, start, len } = *self;
        let len_bytes = source.len_bytes(file);
        let is_inside = start.checked_add(len).is_some_and(|end| end <= len_bytes);
        (!is_inside).then(|| format!("expected {len} bytes at {start}, found a file of {len_bytes}"))
    }

    /// Its bytes, which fit memory, or why they cannot be read.
    pub(crate) fn read(&self, source: &dyn Source) -> Result<Vec<u8>, String> {
        let read = || source.read_bytes(self.file, self.start, self.len).map_err(|error| error.to_string());
        self.outside(source).map_or_else(read, Err)
    }
}

/// What each of many small archives holds, or why it cannot be read. The pickles of a group are in memory together.
pub(crate) fn read_items(
    source: &dyn Source,
    items: &[ArchiveSpan],
) -> Vec<Result<TorchContents<SavedTensor>, String>> {
    let of_group = |group: &[ArchiveSpan]| {
        let contents = |opened: OpenedArchive| opened.contents().map_err(|error| error.to_string());
        read_group(source, group, state::is_allowed).map(move |opened| opened.and_then(contents))
    };
    items.par_chunks(GROUP_ARCHIVES).flat_map_iter(of_group).collect()
}

/// What `interpret` makes of each archive, or why it cannot be read. It is given the number of the archive and its pickle, which may name
/// what `allowed` says; pickles are dropped one by one, since those of whole files, or of thousands of ranks, are large together.
pub(crate) fn read_opened<T: Send>(
    source: &dyn Source,
    items: &[ArchiveSpan],
    allowed: Allowed,
    interpret: &(dyn Fn(usize, &OpenedArchive) -> Result<T, String> + Sync),
) -> Vec<Result<T, String>> {
    let read = |(number, item): (usize, &ArchiveSpan)| {
        let mut alone = read_group(source, &[*item], allowed);
        interpret(number, &alone.next().expect("one archive was read")?)
    };
    let mut all: Vec<Result<T, String>> = items.par_iter().enumerate().map(read).collect();
    // A pickle may fit that did not fit beside those of other threads.
    for (number, found) in all.iter_mut().enumerate() {
        if found.as_ref().is_err_and(|message| ParseRoomFull::is_told_in(message)) {
            *found = read((number, &items[number]));
        }
    }
    all
}

/// An archive that is being read.
struct Reading {
    item: ArchiveSpan,
    archive: TorchArchive,
    failed: Option<String>,
}

/// The archives of a group once they want nothing more, or why they cannot be read.
fn read_group(
    source: &dyn Source,
    group: &[ArchiveSpan],
    allowed: Allowed,
) -> impl Iterator<Item = Result<OpenedArchive, String>> + use<> {
    let begin = |item: &ArchiveSpan| Reading {
        item: *item,
        archive: TorchArchive::new(item.len, allowed),
        failed: item.outside(source),
    };
    let mut group: Vec<Reading> = group.iter().map(begin).collect();
    while group.iter().any(Reading::wants) {
        supply(source, &mut group);
    }
    let opened = |archive: TorchArchive| archive.into_opened().expect("an archive that wants nothing more is done");
    group.into_iter().map(move |reading| reading.failed.map_or_else(|| Ok(opened(reading.archive)), Err))
}

impl Reading {
    fn wants(&self) -> bool {
        self.failed.is_none() && !self.archive.wanted().is_empty()
    }
}

/// Fetches what the archives want now, and gives it to them.
fn supply(source: &dyn Source, group: &mut [Reading]) {
    /// A wanted span of a file, and which archive wants it.
    struct Wanted {
        file: FileId,
        start: u64,
        end: u64,
        archive: usize,
        place: usize,
    }
    let mut wanted = Vec::new();
    let mut supplied: Vec<Vec<Vec<u8>>> = Vec::with_capacity(group.len());
    for (archive, reading) in group.iter().enumerate() {
        let spans = if reading.wants() { reading.archive.wanted() } else { &[] };
        supplied.push(vec![Vec::new(); spans.len()]);
        let start = reading.item.start;
        let of_file = |(place, span): (usize, &std::ops::Range<u64>)| Wanted {
            file: reading.item.file,
            start: start + span.start,
            end: start + span.end,
            archive,
            place,
        };
        wanted.extend(spans.iter().enumerate().map(of_file));
    }
    wanted.sort_unstable_by_key(|wanted| (wanted.file, wanted.start, wanted.end));
    let gap = source.gap_bytes();
    let joins = |first: u64, end: u64, next: &Wanted| {
        next.start <= end.saturating_add(gap) && next.end.max(end) - first <= MERGED_BYTES_MAX
    };
    let mut left = &wanted[..];
    while let Some(head) = left.first() {
        let (mut end, mut count) = (head.end, 1);
        while let Some(next) = left.get(count).filter(|next| next.file == head.file && joins(head.start, end, next)) {
            end = end.max(next.end);
            count += 1;
        }
        let (run, rest) = left.split_at(count);
        left = rest;
        // Archives ask for at most what they may hold in memory.
        let bytes = match source.read_bytes(head.file, head.start, end - head.start) {
            Ok(bytes) => bytes,
            Err(error) => {
                for wanted in run {
                    group[wanted.archive].failed = Some(error.to_string());
                }
                continue;
            }
        };
        for wanted in run {
            let at = |position: u64| usize::try_from(position - head.start).expect("inside the bytes fetched");
            supplied[wanted.archive][wanted.place] = bytes[at(wanted.start)..at(wanted.end)].to_vec();
        }
    }
    for (reading, supplied) in group.iter_mut().zip(supplied) {
        if reading.wants()
            && let Err(error) = reading.archive.supply(supplied)
        {
            reading.failed = Some(error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use ckfs_source::local::{LocalFiles, SourceIo};

    use super::*;

    #[test]
    fn what_is_not_inside_its_file_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0; 100]).unwrap();
        let source = LocalFiles::open(&[file.path().to_owned()], SourceIo::Pread).unwrap();
        for (start, len) in [(0, 101), (90, 11), (u64::MAX, 1)] {
            let item = ArchiveSpan { file: FileId(0), start, len };
            let expected = format!("expected {len} bytes at {start}, found a file of 100");
            assert_eq!(read_items(&source, &[item]).remove(0).unwrap_err(), expected);
            assert_eq!(item.read(&source).unwrap_err(), expected);
        }
        let all = read_items(&source, &[ArchiveSpan::whole(&source, FileId(0))]).remove(0).unwrap_err();
        assert!(all.starts_with("not a zip archive"), "{all}");
    }
}
