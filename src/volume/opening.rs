//! Opening, reading and closing the files of a volume.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use ckfs_image::{FileContent, FileImage};
use ckfs_read::{PreparedFile, ReadError, counters::add};
use ckfs_source::{FileId, ReadFailure, Replied, Served, SourceError};
use ckfs_tensor::to_usize;

use super::{
    file_system::{Access, FileSystem, FsError, Handle, Ino, NodeScope, NodesRef, OpenedFile, copy_into},
    health::ProblemKind,
    materialize::{BYTES_MIN, FileClass, FileEntry, Materializer, When},
    tree::{FixedKind, FixedNode, Live, TreeNode},
    volume::{Open, Volume},
};

impl Volume {
    /// Enables materialization of the files that the policy selects, once the kernel may read files directly.
    ///
    /// # Errors
    /// The system gives us no file system in memory, as it does only for root; or the directory cannot hold unnamed files.
    pub fn enable_materialization(&mut self) -> io::Result<()> {
        let watched = Arc::clone(&self.watched);
        let on_disk = Box::new(move |ino| watched.note_superseded(ino));
        self.materializer = Materializer::new(&self.policy, &self.engine, on_disk)?;
        Ok(())
    }

    /// When a file of tensors is materialized; `None` for never.
    fn when_materialized(&self, ino: Ino, file: &PreparedFile) -> Option<When> {
        let class = match self.tree.node(ino)? {
            TreeNode::InSubtree(..) if self.engine.is_untransformed(file) => FileClass::Untransformed,
            TreeNode::InSubtree(..) => FileClass::Tensor,
            TreeNode::Fixed(FixedNode { kind: FixedKind::File(node), .. }) if node.file.is_bundle() => {
                FileClass::Bundle
            }
            TreeNode::Fixed(FixedNode { kind: FixedKind::File(_), .. }) => FileClass::Mixed,
            TreeNode::Fixed(_) => return None,
        };
        self.policy.when(class, file.len_bytes())
    }

    /// Whether the first open of a file bypasses the page cache: a format whose files are read once, as a whole or item by item; or
    /// bytes that need no work, of which the kernel would make a second copy at twice the cost.
    fn is_read_once(&self, ino: Ino, file: &PreparedFile) -> bool {
        self.direct_once
            && file.len_bytes() >= BYTES_MIN
            && match self.tree.node(ino) {
                Some(TreeNode::InSubtree(block, _)) => {
                    block.subtree.is_read_once() || self.engine.is_untransformed(file)
                }
                Some(TreeNode::Fixed(FixedNode { kind: FixedKind::File(node), .. })) => node.file.is_read_once(),
                Some(TreeNode::Fixed(_)) | None => false,
            }
    }

    /// The entry of a file that is being opened, if it may be materialized. With `may_begin` false, only an entry whose file
    /// is materialized already.
    fn hold(&self, ino: Ino, file: &PreparedFile, may_begin: bool) -> Option<Arc<FileEntry>> {
        let materializer = self.materializer.as_ref().filter(|_| !self.direct.accepts(file.name()))?;
        let when = self.when_materialized(ino, file)?;
        // While bytes come over the network, a reader that takes them as they come is faster than one that waits for a whole file.
        if may_begin && (when == When::Closed || !self.engine.lacks_bytes(file)) {
            materializer.hold(ino, when)
        } else {
            materializer.hold_complete(ino)
        }
    }

    /// Notes that an open or a read of a file failed. A stall is reported elsewhere, for as long as it lasts.
    fn note_failure(&self, kind: ProblemKind, ino: Ino, error: &ReadError) {
        if error.is_stall() {
            return;
        }
        match error.source_error().and_then(SourceError::poisoned_file) {
            Some(source) => {
                let (source, cause) = (source.display().to_string(), error.to_string());
                self.health().note(ProblemKind::SourceChanged, &source, &cause);
            }
            None => self.health().note(kind, &self.path_of(ino), &error.to_string()),
        }
    }

    /// The prepared file: the cached one if it is open or was recently, else a new one.
    fn ready(&self, ino: Ino, image: FileImage) -> Arc<PreparedFile> {
        let mut remembered = self.remembered.lock();
        if let Some(file) = remembered.files.get(&ino) {
            return Arc::clone(file);
        }
        let segments = image.segments().len();
        let file = Arc::new(PreparedFile::new(self.path_of(ino), image));
        remembered.segments += segments;
        remembered.files.put(ino, Arc::clone(&file));
        while let Some(old) = remembered.forget_one() {
            self.engine.forget(&old);
        }
        drop(remembered);
        self.watched.note_in_use(self.engine.sources_of(&file));
        file
    }

    fn remembered(&self, ino: Ino) -> Option<Arc<PreparedFile>> {
        self.remembered.lock().files.get(&ino).map(Arc::clone)
    }

    /// Releases the memory of readers that have closed their files. Repeated every few seconds; never waits for storage.
    pub fn trim(&self) {
        if let Some(materializer) = &self.materializer {
            materializer.drop_idle();
        }
        self.engine.trim();
    }

    /// The source files that a file needs.
    pub(super) fn sources_of(&self, ino: Ino) -> Vec<FileId> {
        if let Some(file) = self.remembered(ino) {
            return self.engine.sources_of(&file).to_vec();
        }
        match self.content(ino) {
            Ok(FileContent::Original(file, _)) => vec![file],
            Ok(FileContent::Image(image)) => self.engine.sources_of(&PreparedFile::new(String::new(), image)).to_vec(),
            Ok(FileContent::Bytes(_) | FileContent::Generated(_)) | Err(_) => Vec::new(),
        }
    }

    /// The reader's error for a failed read or check.
    fn failure(&self) -> FsError {
        self.report_changes();
        FsError::Io
    }

    /// The reader's error for a failed read. If the source changed while bytes were sent, the kernel's cache may hold them now.
    fn read_failed(&self, ino: Ino, failure: ReadFailure<ReadError>) -> ReadFailure<FsError> {
        if failure.replied.is_some() {
            // A change was seen after bytes went out.
            self.watched.report();
        }
        self.note_failure(ProblemKind::FailedRead, ino, &failure.error);
        failure.map(|_| self.failure())
    }

    fn open_counted(&self, ino: Ino, may_begin: bool) -> Result<OpenedFile, FsError> {
        self.open_checked(ino, may_begin).inspect_err(|error| {
            add(&self.engine.counters().failed_opens, u64::from(*error == FsError::Io));
        })
    }

    /// Opens a file after checking that its sources are unchanged. With `may_begin` false it starts no materialization.
    fn open_checked(&self, ino: Ino, may_begin: bool) -> Result<OpenedFile, FsError> {
        let mut once = false;
        let mut image = |file: Arc<PreparedFile>| {
            once = self.is_read_once(ino, &file) && !self.watched.note_opened(ino);
            let entry = self.hold(ino, &file, may_begin && !once);
            Open::Image(file, entry)
        };
        let open = self.checked(ino, &mut image)?;
        if let Open::Image(..) | Open::Original(_) = open {
            let _ = self.watched.note_opened(ino);
        }
        let access = match &open {
            Open::Original(file) => {
                self.engine.checkpoint().source().backing(*file).map_or(Access::Cached, Access::Passthrough)
            }
            Open::Live(_) => Access::Direct,
            Open::Image(file, _) if self.direct.accepts(file.name()) => Access::Direct,
            Open::Image(_, Some(entry)) => entry.access(),
            Open::Image(_, None) if once => Access::Once,
            Open::Image(_, None) | Open::Bytes(_) | Open::Generated(_) => Access::Cached,
        };
        let handle = Handle(self.next_handle.fetch_add(1, Ordering::Relaxed));
        self.open.write().insert((ino, handle), open);
        Ok(OpenedFile { handle, access })
    }

    pub(super) fn opened(&self, ino: Ino, handle: Handle) -> Option<Open> {
        self.open.read().get(&(ino, handle)).cloned()
    }

    /// The open file for a read at `offset`. One that another process with this mount has opened is opened again, for its bytes are the same;
    /// what a reader has begun of a generated content only that process could go on with.
    fn opened_for_read(&self, ino: Ino, handle: Handle, offset: u64) -> Result<Open, FsError> {
        if let Some(open) = self.opened(ino, handle) {
            return Ok(open);
        }
        // Two processes serve for a moment when one replaces the other, so that it may be of a later one too.
        let own = self.first_handle.load(Ordering::Relaxed)..self.next_handle.load(Ordering::Relaxed);
        if own.contains(&handle.0) {
            return Err(FsError::Invalid);
        }
        if offset > 0 && self.is_live(ino) {
            tracing::error!(
                ino = ino.0,
                "a generated file that was begun before the daemon was replaced has to be read anew"
            );
            return Err(FsError::Io);
        }
        let open = self.checked(ino, &mut |file| Open::Image(file, None))?;
        self.open.write().insert((ino, handle), open.clone());
        Ok(open)
    }

    fn live(&self, ino: Ino) -> Option<Live> {
        match self.tree.node(ino)? {
            TreeNode::Fixed(FixedNode { kind: FixedKind::Live(live), .. }) => Some(*live),
            TreeNode::Fixed(_) | TreeNode::InSubtree(..) => None,
        }
    }

    /// Whether a file's content is generated for each reader: it has no version.
    pub fn is_live(&self, ino: Ino) -> bool {
        self.live(ino).is_some()
    }

    /// A file's content after a check that its sources are unchanged; `image` opens one of tensors.
    fn checked(&self, ino: Ino, image: &mut dyn FnMut(Arc<PreparedFile>) -> Open) -> Result<Open, FsError> {
        let open = if let Some(live) = self.live(ino) {
            Open::Live(live)
        } else if let Some(file) = self.remembered(ino) {
            image(file)
        } else {
            match self.content(ino)? {
                FileContent::Original(file, _) => Open::Original(file),
                FileContent::Bytes(bytes) => Open::Bytes(bytes),
                FileContent::Generated(rows) => Open::Generated(rows),
                FileContent::Image(laid_out) => image(self.ready(ino, laid_out)),
            }
        };
        let checked = match &open {
            Open::Original(file) => self.engine.check_original(*file).inspect(|()| self.watched.note_in_use(&[*file])),
            Open::Image(file, _) => self.engine.check(file),
            Open::Bytes(_) | Open::Generated(_) | Open::Live(_) => Ok(()),
        };
        // The source has logged the change.
        checked.map(|()| open).map_err(|error| {
            if error.is_stall() {
                add(&self.engine.counters().stalled_reads, 1);
            }
            self.note_failure(ProblemKind::FailedOpen, ino, &error);
            self.failure()
        })
    }

    /// Makes the bytes of an open file of tensors from `start` on in `target`, without caches and without read-ahead: for a program
    /// that reads each byte once, in an order of its own.
    ///
    /// # Errors
    /// [`FsError::Invalid`] if the file is none of tensors; else as [`FileSystem::read`](super::FileSystem::read).
    pub fn make(&self, ino: Ino, handle: Handle, start: u64, target: &mut [u8]) -> Result<(), FsError> {
        let Some(Open::Image(file, _)) = self.opened(ino, handle) else { return Err(FsError::Invalid) };
        let made = self.engine.make_span(&file, start, target);
        made.map_err(|error| self.read_failed(ino, error.into()).error)
    }
}

impl FileSystem for Volume {
    fn nodes(&self, _ino: Ino, _scope: NodeScope) -> Option<NodesRef<'_>> {
        Some(NodesRef::All(self))
    }

    fn open(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        self.open_counted(ino, true)
    }

    fn open_uncached(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        self.open_counted(ino, false)
    }

    fn read(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<FsError>> {
        let mut part = |bytes: &[u8]| {
            let start = to_usize(offset).min(bytes.len());
            Ok(reply(Served::Memory(&bytes[start..start.saturating_add(len).min(bytes.len())])))
        };
        let read = match self.opened_for_read(ino, handle, offset)? {
            Open::Bytes(bytes) => return part(&bytes),
            Open::Live(live) => {
                return part(&self.live_reads.content(handle, offset, || self.live_content(live))?);
            }
            Open::Generated(rows) => return Ok(reply(Served::Memory(&rows.read(offset, len)))),
            Open::Original(file) => self.engine.read_original(file, offset, len, reply),
            Open::Image(file, entry) => {
                let made = entry.and_then(|entry| {
                    Materializer::read(&entry, &file, offset, len, &mut |bytes| reply(Served::Memory(bytes)))
                });
                made.map_or_else(|| self.engine.read(&file, offset, len, reply), Ok)
            }
        };
        read.map_err(|failure| self.read_failed(ino, failure))
    }

    fn read_into(&self, ino: Ino, handle: Handle, offset: u64, target: &mut [u8]) -> Result<(), FsError> {
        let read = match self.opened_for_read(ino, handle, offset)? {
            Open::Bytes(_) | Open::Generated(_) | Open::Live(_) => return copy_into(self, ino, handle, offset, target),
            Open::Original(file) => self.engine.read_original_into(file, offset, target),
            Open::Image(file, _) => self.engine.read_into(&file, offset, target),
        };
        read.map_err(|error| self.read_failed(ino, error.into()).error)
    }

    fn release(&self, ino: Ino, handle: Handle) {
        let open = self.open.write().remove(&(ino, handle));
        match (&self.materializer, open) {
            (Some(materializer), Some(Open::Image(file, Some(entry)))) => materializer.close(ino, &entry, &file),
            (_, Some(Open::Live(_))) => self.live_reads.close(handle),
            (_, _) => {}
        }
    }
}
