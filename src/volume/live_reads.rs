//! Reads of files that are generated for their readers: statistics, metrics, the list of a run's steps.
//!
//! An open costs nothing. A read at the start of the file generates the content, and the reads after it continue that content. It
//! is kept for as long as the file is open, up to a limit for all open files of a tree together. A reader whose content was
//! dropped in the middle gets an error: the rest of a newer content would not belong to what the reader has.

use std::{collections::HashMap, sync::Arc};

use lru::LruCache;
use parking_lot::Mutex;

use super::file_system::{FsError, Handle};

/// Most bytes of contents that are kept: those of some fifty readers at the same time.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// The contents that open files are read from.
#[derive(Default)]
pub struct LiveReads(Mutex<KeptContents>);

struct KeptContents {
    contents: LruCache<Handle, Arc<[u8]>>,
    bytes: usize,
    /// Lengths of contents that were dropped while their files were open.
    dropped: HashMap<Handle, u64>,
}

impl Default for KeptContents {
    fn default() -> Self {
        Self { contents: LruCache::unbounded(), bytes: 0, dropped: HashMap::new() }
    }
}

impl LiveReads {
    /// The content for a read of an open file at `offset`; empty at or after the end of one that was dropped.
    ///
    /// # Errors
    /// [`FsError::Io`] if the content that the reader has begun was dropped.
    pub fn content(
        &self,
        handle: Handle,
        offset: u64,
        generate: impl FnOnce() -> Arc<[u8]>,
    ) -> Result<Arc<[u8]>, FsError> {
        if offset > 0 {
            let mut kept = self.0.lock();
            if let Some(content) = kept.contents.get(&handle) {
                return Ok(Arc::clone(content));
            }
            match kept.dropped.get(&handle) {
                Some(len_bytes) if offset >= *len_bytes => return Ok(Arc::default()),
                Some(_) => {
                    tracing::error!(
                        offset,
                        "a generated file is read by too many readers at the same time: one that read it in small parts \
                         has to begin again"
                    );
                    return Err(FsError::Io);
                }
                None => {}
            }
        }
        let content = generate();
        let mut kept = self.0.lock();
        kept.close(handle);
        kept.bytes += content.len();
        kept.contents.put(handle, Arc::clone(&content));
        while kept.bytes > KEPT_BYTES_MAX && kept.contents.len() > 1 {
            let Some((oldest, dropped)) = kept.contents.pop_lru() else { break };
            kept.bytes -= dropped.len();
            kept.dropped.insert(oldest, dropped.len() as u64);
        }
        Ok(content)
    }

    /// Length of the content that an open file was last read from.
    pub fn len_bytes(&self, handle: Handle) -> Option<u64> {
        let kept = self.0.lock();
        let held = kept.contents.peek(&handle).map(|content| content.len() as u64);
        held.or_else(|| kept.dropped.get(&handle).copied())
    }

    /// Forgets a file that was closed.
    pub fn close(&self, handle: Handle) {
        self.0.lock().close(handle);
    }
}

impl KeptContents {
    fn close(&mut self, handle: Handle) {
        self.dropped.remove(&handle);
        self.bytes -= self.contents.pop(&handle).map_or(0, |content| content.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_has_one_content_and_all_readers_together_a_limit() {
        let reads = LiveReads::default();
        let (len, many) = (64 << 10, 6000);
        let read = |handle, offset, byte| reads.content(Handle(handle), offset, || Arc::from(vec![byte; len]));
        assert_eq!(read(0, 0, 1).unwrap()[0], 1);
        assert_eq!(read(0, 100, 2).unwrap()[0], 1, "the second read goes on in what the first has read");
        assert_eq!(read(0, 0, 3).unwrap()[0], 3, "a reader that begins again has the present content");
        for handle in 1..many {
            assert_eq!(read(handle, 0, 4).unwrap().len(), len);
        }
        assert!(reads.0.lock().bytes <= KEPT_BYTES_MAX);
        assert_eq!(read(0, 100, 5), Err(FsError::Io), "never the rest of another content");
        assert_eq!((read(0, len as u64, 5).unwrap().len(), reads.len_bytes(Handle(0))), (0, Some(len as u64)));
        assert_eq!(read(0, 0, 6).unwrap()[0], 6);
        // A first read may be one of the end.
        assert_eq!(read(many, 100, 7).unwrap()[0], 7);
        (0..=many).for_each(|handle| reads.close(Handle(handle)));
        let kept = reads.0.lock();
        assert_eq!((kept.bytes, kept.dropped.len()), (0, 0));
    }

    #[test]
    fn a_content_beyond_the_limit_is_kept_for_its_only_reader() {
        let reads = LiveReads::default();
        let large = |handle| reads.content(Handle(handle), 0, || Arc::from(vec![1; KEPT_BYTES_MAX + 1])).unwrap();
        large(1);
        assert!(reads.content(Handle(1), 5, || unreachable!("it is kept")).is_ok());
        large(2);
        assert_eq!(reads.content(Handle(1), 5, || unreachable!("it was begun")), Err(FsError::Io));
    }
}
