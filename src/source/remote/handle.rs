//! A remote object together with what fetches it.

use std::{io, ops::Range, os::unix::fs::FileExt, sync::Arc, time::Duration};

use super::{
    super::{ByteSpan, FetchPart},
    cache::geometry::blocks_of,
    fetcher::Fetcher,
    object::{FetchError, RemoteObject},
    retry::Deadline,
};

/// A remote object together with what fetches it. Cheap to clone.
#[derive(Clone)]
pub struct Remote {
    /// The object.
    pub object: Arc<RemoteObject>,
    /// What fetches its blocks.
    pub fetcher: Arc<Fetcher>,
    /// Longest wait of one read.
    pub timeout: Duration,
}

impl Remote {
    /// Fills `target` with the bytes of a span. Waits as long as the service asks for, as opening a checkpoint does.
    ///
    /// # Errors
    /// The bytes do not come, or the object ends earlier.
    pub fn read_span(&self, span: ByteSpan, target: &mut [u8]) -> io::Result<()> {
        let object = &self.object;
        if !object.file.span().contains(span) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        object.digest.note_served();
        let blocks = blocks_of(span);
        let demand = (Arc::clone(object), vec![blocks.clone()]);
        loop {
            match self.fetcher.fetch(std::slice::from_ref(&demand), 0, Deadline::Quiet) {
                Ok(()) => {
                    let guards = match object.entry.guard(&blocks) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return self.read_span_uncached(span, target);
                        }
                        guards => guards,
                    };
                    let _guards = guards?;
                    if object.entry.is_verified(&blocks) {
                        return object.entry.data().read_exact_at(target, span.start());
                    }
                }
                Err(FetchError::NoRoom | FetchError::Cache(_)) => {
                    return self.read_span_uncached(span, target);
                }
                Err(FetchError::Remote(error)) => return Err(io::Error::other(error)),
            }
        }
    }

    fn read_span_uncached(&self, span: ByteSpan, target: &mut [u8]) -> io::Result<()> {
        let part = FetchPart { start: span.start(), target };
        self.read_uncached(&mut [part], Deadline::Quiet).map_err(|(_, error)| io::Error::other(error))
    }

    /// The blocks of spans.
    pub fn blocks(spans: &[ByteSpan]) -> Vec<Range<u64>> {
        spans.iter().map(|span| blocks_of(*span)).filter(|blocks| !blocks.is_empty()).collect()
    }
}
