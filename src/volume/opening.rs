//! Opening, reading and closing the files of a volume.

use std::{
    io,
    path::Path,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Instant,
};

use super::{
    copies::Copies,
    file_system::{Access, FsError, Handle, Ino, Opened, WhenWhole},
    health::ProblemKind,
    open_files::Open,
    served::Volume,
    tree::{FixedKind, FixedNode, NodeRef},
    whole_files::{Pin, WholeFiles},
};
use crate::{
    config::MadeWhole,
    image::{Content, FileImage},
    plan::Plan,
    read::counters::add,
    read::{MapsAhead, OpenFile, ReadError},
    source::{FileId, SourceError},
    tensor::to_usize,
};

impl Volume {
    /// From now on copies each tensor file that was opened into the directory `dir`, for the kernel to read by itself.
    ///
    /// # Errors
    /// The directory cannot hold unnamed files.
    pub fn materialize(&mut self, dir: &Path) -> io::Result<()> {
        self.copies = Some(Copies::new(dir.to_owned(), Arc::clone(&self.engine))?);
        Ok(())
    }

    /// From now on makes files whole in memory when they are opened, for the kernel to read by itself: those that are not too
    /// large for the engine's cache.
    ///
    /// # Errors
    /// The system gives us no file system in memory, as it does only to root.
    pub fn make_whole(&mut self, which: MadeWhole) -> io::Result<()> {
        self.whole = match which {
            MadeWhole::None => None,
            MadeWhole::Tensors | MadeWhole::Auto | MadeWhole::All => Some((WholeFiles::new(&self.engine)?, which)),
        };
        Ok(())
    }

    /// Whether a file should be made whole now that it is opened.
    fn is_made_whole(&self, ino: Ino, file: &OpenFile) -> bool {
        let Some((whole, which)) = &self.whole else { return false };
        let chosen = match (which, self.tree.node(ino)) {
            (MadeWhole::None, _) | (_, None) | (MadeWhole::Tensors, Some(NodeRef::Fixed(_))) => false,
            (_, Some(NodeRef::InSubtree(..))) | (MadeWhole::All, Some(NodeRef::Fixed(_))) => true,
            (MadeWhole::Auto, Some(NodeRef::Fixed(fixed))) => {
                let in_parts = matches!(&fixed.kind, FixedKind::File(node) if node.file.is_read_in_parts());
                !in_parts && (self.looks.opened(fixed.parent, ino, Instant::now()) || whole.has(ino))
            }
        };
        chosen && whole.accepts(file.len_bytes())
    }

    /// Notes that a file of tensors is opened, read or closed.
    fn note_read(&self) {
        if let Some((whole, _)) = &self.whole {
            whole.note_read();
        }
    }

    /// Notes that a file is closed that may be of many tensors.
    fn note_closed(&self, ino: Ino, file: &OpenFile, pin: &Pin) {
        if let (Some((_, MadeWhole::Auto)), Some(NodeRef::Fixed(fixed))) = (&self.whole, self.tree.node(ino)) {
            self.looks.closed(fixed.parent, ino, pin.used(file.image().header_bytes()), Instant::now());
        }
    }

    /// Notes that an open or a read of a file failed. A stall is noted by itself, as long as it lasts.
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

    /// The file made ready, as before if it is open or was lately.
    fn ready(&self, ino: Ino, image: FileImage) -> Arc<OpenFile> {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = remembered.files.get(&ino) {
            return Arc::clone(file);
        }
        let segments = image.segments().len();
        let file = Arc::new(OpenFile::new(self.path_of(ino), image));
        remembered.segments += segments;
        remembered.files.put(ino, Arc::clone(&file));
        while let Some(old) = remembered.forget_one() {
            self.engine.forget(&old);
        }
        drop(remembered);
        self.watched.note_in_use(self.engine.sources_of(&file));
        file
    }

    fn remembered(&self, ino: Ino) -> Option<Arc<OpenFile>> {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.files.get(&ino).map(Arc::clone)
    }

    /// Gives back memory of readers who are gone, and looks at sources. To be called every few seconds.
    pub fn watch(&self) {
        self.settle();
        self.look_at_sources();
    }

    /// Gives back memory of readers who are gone. To be called every few seconds; never waits for storage.
    pub fn settle(&self) {
        if let Some((whole, _)) = &self.whole {
            whole.drop_idle();
            if whole.expects() {
                self.engine.keep_maps();
            }
        }
        self.engine.settle();
    }

    /// The source files that a file is made of.
    pub(super) fn sources_of(&self, ino: Ino) -> Vec<FileId> {
        if let Some(file) = self.remembered(ino) {
            return self.engine.sources_of(&file).to_vec();
        }
        match self.content(ino) {
            Ok(Content::Original(file)) => vec![file],
            Ok(Content::Image(image)) => self.engine.sources_of(&OpenFile::new(String::new(), image)).to_vec(),
            Ok(Content::Bytes(_) | Content::Rows(_)) | Err(_) => Vec::new(),
        }
    }

    /// What a failed read or check is to the reader.
    fn failure(&self) -> FsError {
        self.tell_changes();
        FsError::Io
    }

    /// A read of the engine. Bytes that went out just when their source changed may be in the kernel's cache now.
    fn read_checked(
        &self,
        ino: Ino,
        reply: &mut dyn FnMut(&[u8]),
        read: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<(), ReadError>,
    ) -> Result<(), FsError> {
        let mut replied = false;
        let result = read(&mut |bytes| {
            replied = true;
            reply(bytes);
        });
        result.map_err(|error| {
            if replied {
                self.tell_again();
            }
            self.note_failure(ProblemKind::FailedRead, ino, &error);
            self.failure()
        })
    }

    /// Opens a file whose sources are what they were.
    pub(super) fn open_checked(&self, ino: Ino) -> Result<Opened, FsError> {
        let open = if let Some(file) = self.remembered(ino) {
            Open::Image(file, Pin::default())
        } else {
            match self.content(ino)? {
                Content::Original(file) => Open::Original(file),
                Content::Bytes(bytes) => Open::Bytes(bytes),
                Content::Rows(rows) => Open::Rows(rows),
                Content::Image(image) => Open::Image(self.ready(ino, image), Pin::default()),
            }
        };
        self.check(ino, &open)?;
        if let Open::Image(..) | Open::Original(_) = open {
            self.note_read();
            self.watched.note_opened(ino);
        }
        let access = match &open {
            Open::Original(file) => {
                let backing = self.engine.checkpoint().source().backing(*file);
                self.watched.note_in_use(&[*file]);
                backing.map_or(Access::Cached, Access::Passthrough)
            }
            Open::Bytes(_) if self.is_live(ino) => Access::Direct,
            Open::Image(file, _) if self.direct.accepts(file.name()) => Access::Direct,
            Open::Image(file, _) => match self.copies.as_ref().and_then(|copies| copies.get(ino)) {
                Some(copy) => Access::Passthrough(copy),
                None if self.is_made_whole(ino, file) => Access::Whole,
                None => Access::Cached,
            },
            Open::Bytes(_) | Open::Rows(_) => Access::Cached,
        };
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(handle, open);
        Ok(Opened { handle: Handle(handle), access })
    }

    /// Whether a file's content is taken anew at each open.
    fn is_live(&self, ino: Ino) -> bool {
        matches!(self.tree.node(ino), Some(NodeRef::Fixed(FixedNode { kind: FixedKind::Live(_), .. })))
    }

    fn check(&self, ino: Ino, open: &Open) -> Result<(), FsError> {
        let checked = match open {
            Open::Original(file) => self.engine.check_original(*file),
            Open::Image(file, _) => self.engine.check(file),
            Open::Bytes(_) | Open::Rows(_) => Ok(()),
        };
        // The source has logged what changed.
        checked.map_err(|error| {
            if error.is_stall() {
                add(&self.engine.counters().stalled_reads, 1);
            }
            self.note_failure(ProblemKind::FailedOpen, ino, &error);
            self.failure()
        })
    }

    pub(super) fn read_open(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), FsError> {
        let mut reply_part = |bytes: &[u8]| {
            let start = to_usize(offset).min(bytes.len());
            reply(&bytes[start..start.saturating_add(len).min(bytes.len())]);
        };
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned();
        match open.ok_or(FsError::Invalid)? {
            Open::Bytes(bytes) => {
                reply_part(&bytes);
                Ok(())
            }
            Open::Rows(rows) => {
                reply(&rows.read(offset, len));
                Ok(())
            }
            Open::Original(file) => {
                self.note_read();
                self.read_checked(ino, reply, |reply| self.engine.read_original(file, offset, len, reply))
            }
            Open::Image(file, pin) => {
                self.note_read();
                pin.note_read(len as u64);
                self.read_checked(ino, reply, |reply| self.engine.read(&file, offset, len, reply))
            }
        }
    }

    pub(super) fn start(&self, passthrough: bool) {
        if let (Some((whole, which)), true) = (&self.whole, passthrough) {
            let (plans, which) = (self.views.clone(), *which);
            let views = plans.clone().into_iter().flat_map(|plan| {
                (0..plan.tensors.len())
                    .filter_map(move |index| plan.tensors.get(index).map(|tensor| tensor.view.clone()))
            });
            let maps = MapsAhead::new(&self.engine, views);
            whole.expect(maps, move |tell| plans.iter().for_each(|plan| tell_sizes(plan, which, tell)));
        }
    }

    pub(super) fn make_open_whole(&self, ino: Ino, handle: Handle, then: WhenWhole) {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned();
        match (&self.whole, open) {
            (Some((whole, _)), Some(Open::Image(file, pin))) => whole.make(ino, &file, pin, then),
            (_, _) => then(None),
        }
    }

    pub(super) fn close(&self, ino: Ino, handle: Handle) {
        let open = self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0);
        if let Some(Open::Image(..) | Open::Original(_)) = open {
            self.note_read();
        }
        let Some(Open::Image(file, pin)) = open else { return };
        self.note_closed(ino, &file, &pin);
        if let Some(copies) = &self.copies
            && !self.direct.accepts(file.name())
        {
            copies.want(ino, &file);
        }
    }
}

/// Tells sizes in bytes, and how many files may have each: of whole tensors, of a first device's shards, like which those of
/// most others are, and, unless `which` leaves them out, of a device's file of all its tensors, header aside.
fn tell_sizes(plan: &Plan, which: MadeWhole, tell: &mut dyn FnMut(u64, usize)) {
    let mut all = 0_u64;
    for tensor in &plan.tensors {
        let bytes_of = |elements| tensor.view.dtype().bytes_of(elements).expect("a plan's shards are whole bytes");
        tell(bytes_of(tensor.view.shape().elements()), 1);
        if let Some(first) = plan.devices.first() {
            let bytes = bytes_of(plan.region(tensor, *first).shape().elements());
            tell(bytes, plan.devices.len());
            all = all.saturating_add(bytes);
        }
    }
    if which != MadeWhole::Tensors {
        tell(all, plan.devices.len());
    }
}
