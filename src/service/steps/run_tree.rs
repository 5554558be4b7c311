//! A run as a file system: the root with its names, and below each step the tree of its volume.

use std::{
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
};

use ckfs_source::{ReadFailure, Replied, Served};
use ckfs_tensor::to_usize;
use ckfs_volume::{
    Access, Attr, BUFFER_BYTES, DirEntry, FileSystem, FsError, Handle, Ino, NodeKind, NodeScope, Nodes, NodesRef,
    OpenedFile, Permission, StatFs,
};

use super::{
    failed::part,
    run::{Run, RunState},
    slot::{INNER_BITS, Slot, StepContent, split},
};

/// The run's own directory, and its files.
const OWN: Ino = Ino(2);
const OWN_NAME: &str = ".ckfs";
/// The link to the newest step, and its numbers: one for each target that it had.
const LATEST_NAME: &str = "latest";
const LATEST_FIRST: u64 = 1 << 32;

/// A file of the run's own directory: its name, and its bytes as they are now.
type OwnFile = (&'static str, fn(&RunState) -> Vec<u8>);

/// These files in the order of their names, the first with this number.
const OWN_FIRST: u64 = 3;
const OWN_FILES: [OwnFile; 4] = [
    ("config.toml", |run| run.config_text.clone().into_bytes()),
    ("metrics", |run| run.metrics_text().into_bytes()),
    ("stats.json", RunState::stats_text),
    ("steps.json", RunState::steps_text),
];

/// The number of a file among them.
fn own_place(name: &[u8]) -> Option<usize> {
    OWN_FILES.iter().position(|(known, _)| known.as_bytes() == name)
}

/// Entry numbers of the root: its own directory, the link, and the slots by their index.
const OWN_ENTRY: u64 = 0;
const LATEST_ENTRY: u64 = 1;
const SLOT_ENTRIES: u64 = 2;

/// What a number of the run stands for.
enum NodeOf {
    Root,
    Own,
    /// A file of that, by its place in the list.
    OwnFile(usize),
    /// The link to the newest step, or to one that was.
    Latest,
    /// A node of a step.
    InStep(Arc<Slot>, Ino),
}

impl RunState {
    fn node(&self, ino: Ino) -> Result<NodeOf, FsError> {
        let (index, inner) = split(ino.0);
        if index > 0 {
            return match self.slots.get(index) {
                Some(slot) => Ok(NodeOf::InStep(slot, Ino(inner))),
                None => Err(self.gone()),
            };
        }
        match ino {
            Ino::ROOT => Ok(NodeOf::Root),
            OWN => Ok(NodeOf::Own),
            Ino(number) if number >= LATEST_FIRST => Ok(NodeOf::Latest),
            Ino(number) => {
                let place = number.checked_sub(OWN_FIRST).map(to_usize).filter(|place| *place < OWN_FILES.len());
                Ok(NodeOf::OwnFile(place.ok_or(FsError::NotFound)?))
            }
        }
    }

    fn own_attr(&self, ino: Ino, kind: NodeKind, size_bytes: u64, links: u32, permission: Permission) -> Attr {
        let modified = *self.modified.read();
        Attr { ino, kind, size_bytes, links, modified, permission, buffer_bytes: BUFFER_BYTES }
    }

    fn root_attr(&self) -> Attr {
        let steps = u32::try_from(self.slots.listed().len()).unwrap_or(u32::MAX - 3);
        self.own_attr(Ino::ROOT, NodeKind::Directory, 0, 3 + steps, self.permission)
    }

    fn latest_attr(&self) -> Option<(u64, Attr)> {
        let (number, changes) = self.slots.latest()?;
        let permission = Permission { mode: 0o777, ..self.permission };
        let size = number.to_string().len() as u64;
        let ino = Ino(LATEST_FIRST + changes % (1 << 32));
        Some((number, self.own_attr(ino, NodeKind::Symlink, size, 1, permission)))
    }

    fn file_attr(&self, place: usize) -> Attr {
        let size = OWN_FILES[place].1(self).len() as u64;
        self.own_attr(Ino(OWN_FIRST + place as u64), NodeKind::File, size, 1, self.own_permission[0])
    }

    /// The bytes of a file of `.ckfs/`, by its name, as they are now.
    pub fn own_file(&self, name: &str) -> Option<Vec<u8>> {
        own_place(name.as_bytes()).map(|place| OWN_FILES[place].1(self))
    }
}

impl Run {
    fn open_node(
        self: &Arc<Self>,
        ino: Ino,
        open: impl FnOnce(&dyn FileSystem, Ino) -> Result<OpenedFile, FsError>,
    ) -> Result<OpenedFile, FsError> {
        match self.node(ino)? {
            NodeOf::Root | NodeOf::Own => Err(FsError::IsDirectory),
            NodeOf::Latest => Err(FsError::Invalid),
            NodeOf::OwnFile(_) => {
                let handle = self.next_own.fetch_add(1, Ordering::Relaxed) % (1 << INNER_BITS);
                Ok(OpenedFile { handle: Handle(handle), access: Access::Direct })
            }
            NodeOf::InStep(slot, inner) => {
                let opened = open(self.content(&slot)?.files(), inner)?;
                Ok(OpenedFile { handle: Handle(slot.index << INNER_BITS | opened.handle.0), ..opened })
            }
        }
    }
}

/// The nodes of a run that are in memory: its own, and those of a step that a request has found there.
struct RunNodes<'a> {
    run: &'a RunState,
    held: Option<(Arc<Slot>, StepContent)>,
}

impl RunNodes<'_> {
    /// What a step shows, if it is in memory.
    fn content(&self, slot: &Slot) -> Option<StepContent> {
        let held = self.held.as_ref().filter(|(held, _)| held.index == slot.index);
        held.map(|(_, content)| content.clone()).or_else(|| slot.content())
    }

    /// What a step that must be in memory shows.
    fn planned(&self, slot: &Slot) -> Result<StepContent, FsError> {
        self.content(slot).ok_or(FsError::Io)
    }

    /// The step that a node is in, and its number there; none for a node of the run, such as the root of a step.
    fn inside(&self, ino: Ino) -> Result<Option<(StepContent, Ino)>, FsError> {
        let NodeOf::InStep(slot, inner) = self.run.node(ino)? else { return Ok(None) };
        Ok(if inner == Ino::ROOT { None } else { Some((self.planned(&slot)?, inner)) })
    }

    fn slot_attr(&self, slot: &Slot, inner: Ino) -> Result<Attr, FsError> {
        let Some(content) = self.content(slot) else {
            // A listing of the root plans nothing.
            return if inner == Ino::ROOT { Ok(slot.plain_attr()) } else { Err(FsError::Io) };
        };
        let attr = content.nodes().attr(inner)?;
        slot.note_used();
        Ok(Attr { ino: slot.outer(attr.ino), ..attr })
    }

    fn find_in_root(&self, name: &[u8]) -> Result<Attr, FsError> {
        if name == OWN_NAME.as_bytes() {
            return Ok(self.run.own_attr(OWN, NodeKind::Directory, 0, 2, self.run.own_permission[1]));
        }
        if name == LATEST_NAME.as_bytes() {
            return self.run.latest_attr().map(|(_, attr)| attr).ok_or(FsError::NotFound);
        }
        let number = std::str::from_utf8(name).ok().and_then(step_number);
        let slot = number.and_then(|number| self.run.slots.of_step(number)).ok_or(FsError::NotFound)?;
        self.slot_attr(&slot, Ino::ROOT)
    }

    fn list_root(&self, from: u64, each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>) {
        let mut each = |name: &str, ino: Ino, kind: NodeKind, number: u64| {
            number < from || each(DirEntry { name: name.as_bytes(), ino, kind, next: Some(number + 1) }).is_continue()
        };
        if !each(OWN_NAME, OWN, NodeKind::Directory, OWN_ENTRY) {
            return;
        }
        if let Some((_, attr)) = self.run.latest_attr()
            && !each(LATEST_NAME, attr.ino, NodeKind::Symlink, LATEST_ENTRY)
        {
            return;
        }
        // By slots, whose numbers never change: a step that goes meanwhile hides no other.
        let mut slots = self.run.slots.listed();
        slots.sort_by_key(|slot| slot.index);
        for slot in slots {
            let name = slot.step.number.to_string();
            if !each(&name, slot.outer(Ino::ROOT), NodeKind::Directory, SLOT_ENTRIES + slot.index) {
                return;
            }
        }
    }
}

impl Nodes for RunNodes<'_> {
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        match self.run.node(parent)? {
            NodeOf::Root => self.find_in_root(name),
            NodeOf::Own => Ok(self.run.file_attr(own_place(name).ok_or(FsError::NotFound)?)),
            NodeOf::OwnFile(_) | NodeOf::Latest => Err(FsError::NotDirectory),
            NodeOf::InStep(slot, inner) => {
                let attr = self.planned(&slot)?.nodes().lookup(inner, name)?;
                Ok(Attr { ino: slot.outer(attr.ino), ..attr })
            }
        }
    }

    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        match self.run.node(ino)? {
            NodeOf::Root => Ok(self.run.root_attr()),
            NodeOf::Own => Ok(self.run.own_attr(OWN, NodeKind::Directory, 0, 2, self.run.own_permission[1])),
            NodeOf::OwnFile(place) => Ok(self.run.file_attr(place)),
            // A program that has found the link before it led elsewhere gets what it leads to now.
            NodeOf::Latest => self.run.latest_attr().map(|(_, attr)| Attr { ino, ..attr }).ok_or(FsError::NotFound),
            NodeOf::InStep(slot, inner) => self.slot_attr(&slot, inner),
        }
    }

    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        match self.run.node(dir)? {
            NodeOf::Root => self.list_root(from, each),
            NodeOf::Own => {
                for (number, (name, _)) in (0..).zip(OWN_FILES).skip(to_usize(from)) {
                    let ino = Ino(OWN_FIRST + number);
                    if each(DirEntry { name: name.as_bytes(), ino, kind: NodeKind::File, next: None }).is_break() {
                        break;
                    }
                }
            }
            NodeOf::OwnFile(_) | NodeOf::Latest => return Err(FsError::NotDirectory),
            NodeOf::InStep(slot, inner) => {
                let mut outer = |entry: DirEntry<'_>| each(DirEntry { ino: slot.outer(entry.ino), ..entry });
                self.planned(&slot)?.nodes().read_dir(inner, from, &mut outer)?;
            }
        }
        Ok(())
    }

    fn parent(&self, ino: Ino) -> Result<Ino, FsError> {
        match self.run.node(ino)? {
            NodeOf::Root | NodeOf::Own | NodeOf::Latest | NodeOf::InStep(_, Ino::ROOT) => Ok(Ino::ROOT),
            NodeOf::OwnFile(_) => Ok(OWN),
            NodeOf::InStep(slot, inner) => Ok(slot.outer(self.planned(&slot)?.nodes().parent(inner)?)),
        }
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        if matches!(self.run.node(ino)?, NodeOf::Latest) {
            let found = self.run.latest_attr();
            return found.map(|(number, _)| number.to_string().into_bytes()).ok_or(FsError::NotFound);
        }
        self.inside(ino)?.map_or(Err(FsError::Invalid), |(content, inner)| content.nodes().read_link(inner))
    }

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if !name.starts_with(b"user.") {
            return Err(FsError::Unsupported);
        }
        self.inside(ino)?.map_or(Err(FsError::NoAttribute), |(content, inner)| content.nodes().xattr(inner, name))
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        self.inside(ino)?.map_or(Ok(Vec::new()), |(content, inner)| content.nodes().xattr_names(inner))
    }

    fn is_fixed(&self, ino: Ino) -> bool {
        let (index, inner) = split(ino.0);
        // The directory of a step has other attributes once it is planned.
        index > 0
            && (Ino(inner) != Ino::ROOT || self.run.slots.get(index).is_some_and(|slot| self.content(&slot).is_some()))
    }

    fn stat_fs(&self) -> StatFs {
        let bytes = |slot: &Arc<Slot>| slot.step.measure.as_ref().map_or(0, |measure| measure.bytes);
        let listed = self.run.slots.listed();
        let total_bytes = listed.iter().map(bytes).fold(0, u64::saturating_add);
        let contents = listed.iter().filter_map(|slot| slot.content());
        let nodes = contents.map(|content| content.nodes().stat_fs().nodes);
        StatFs { total_bytes, nodes: nodes.fold(listed.len() as u64, u64::saturating_add) }
    }
}

/// A run that is served.
pub(super) struct RunTree(pub(super) Arc<Run>);

impl FileSystem for RunTree {
    fn nodes(&self, ino: Ino, scope: NodeScope) -> Option<NodesRef<'_>> {
        let (index, inner) = split(ino.0);
        let held = match self.0.slots.get(index) {
            Some(slot) => match slot.content() {
                Some(content) => {
                    slot.note_used();
                    Some((slot, content))
                }
                None if Ino(inner) == Ino::ROOT && scope == NodeScope::Itself => None,
                None => return None,
            },
            // The run's own, or of a step that is gone.
            None => None,
        };
        Some(NodesRef::Some(Box::new(RunNodes { run: &self.0, held })))
    }

    fn reach(&self, ino: Ino, scope: NodeScope) -> Result<NodesRef<'_>, FsError> {
        if let Some(nodes) = self.nodes(ino, scope) {
            return Ok(nodes);
        }
        let slot = self.0.slots.get(split(ino.0).0).ok_or_else(|| self.0.gone())?;
        let content = self.0.content(&slot)?;
        Ok(NodesRef::Some(Box::new(RunNodes { run: &self.0, held: Some((slot, content)) })))
    }

    fn open(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        self.0.open_node(ino, FileSystem::open)
    }

    fn open_uncached(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        self.0.open_node(ino, FileSystem::open_uncached)
    }

    fn open_len_bytes(&self, ino: Ino, handle: Handle) -> Result<u64, FsError> {
        match self.0.node(ino)? {
            NodeOf::OwnFile(_) => self.0.own_reads.len_bytes(handle).ok_or(FsError::Invalid),
            NodeOf::InStep(slot, inner) => {
                self.0.content(&slot)?.files().open_len_bytes(inner, Handle(split(handle.0).1))
            }
            NodeOf::Root | NodeOf::Own | NodeOf::Latest => Err(FsError::Invalid),
        }
    }

    fn read(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<FsError>> {
        match self.0.node(ino)? {
            NodeOf::OwnFile(place) => {
                let text = self.0.own_reads.content(handle, offset, || OWN_FILES[place].1(&self.0).into())?;
                Ok(reply(part(&text, offset, len)))
            }
            NodeOf::InStep(slot, inner) => {
                self.0.content(&slot)?.files().read(inner, Handle(split(handle.0).1), offset, len, reply)
            }
            NodeOf::Root | NodeOf::Own | NodeOf::Latest => Err(FsError::Invalid.into()),
        }
    }

    fn release(&self, ino: Ino, handle: Handle) {
        let (index, inner) = split(ino.0);
        if index == 0 {
            self.0.own_reads.close(handle);
        } else if let Some(content) = self.0.slots.get(index).and_then(|slot| slot.content()) {
            content.files().release(Ino(inner), Handle(split(handle.0).1));
        }
    }
}

/// The number of a step as it is written.
pub fn step_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_one_name_each() {
        for (text, expected) in [
            ("0", Some(0)),
            ("200", Some(200)),
            ("0200", None),
            ("+2", None),
            ("", None),
            ("2a", None),
            ("18446744073709551616", None),
        ] {
            assert_eq!(step_number(text), expected, "{text}");
        }
    }
}
