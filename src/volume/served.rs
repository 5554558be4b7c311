//! The volume: a checkpoint's views as a file system.

use std::{
    collections::HashMap,
    fmt, io,
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lru::LruCache;

use super::{
    Access, Attr, DirEntry, FileSystem, FsError, Handle, Health, Ino, Metrics, Mounter, NodeKind, OnChange, Op, Opened,
    Overrides, ProblemKind, StatFs, WhenWhole,
    arrays::{ArrayNode, ArrayTable},
    copies::Copies,
    exposition::{self, METRICS_BYTES},
    looks::Looks,
    name_tree::NameNode,
    permissions::{Permissions, Subject, readers, readers_text},
    stats,
    tree::{Block, BlockKind, Fixed, FixedKind, Flavor, Names, OWN, Place, Seedling, Tree},
    unavailable::unavailable_text,
    view_files::{Content, Made, ORBAX_ITEM, ViewFiles, file_ids},
    watched::Watched,
    whole_files::{Pin, WholeFiles},
};
use crate::{
    checkpoint::{Checkpoint, printable},
    config::MadeWhole,
    host::budget::Budget,
    image::{FileImage, RowFile, distcp_name},
    plan::{Allow, HfContent, HfFile, Plan, Problem, report},
    read::{Engine, EngineOptions, MapsAhead, OpenFile, ReadError, counters::add},
    source::{FileId, Served, SourceError},
    tensor::{View, to_usize},
};

/// Segments of closed files that are remembered with their tilings and tiles.
const REMEMBERED_SEGMENTS_MAX: usize = 200_000;
/// Closed files that are remembered. The tiling of one view may take some megabytes.
const REMEMBERED_FILES_MAX: usize = 64;

/// How to mount anew, in general.
const REMOUNT: &str = "ckfs umount MNT && ckfs mount SOURCE MNT, with the options in .ckfs/config.toml";

/// A plan and where it is shown.
#[derive(Clone, Debug)]
pub struct ViewPlan {
    /// Directory under the mount; empty for the mount's root itself.
    pub name: String,
    /// The plan.
    pub plan: Arc<Plan>,
}

/// Settings of a volume.
#[derive(Clone, Debug, Default)]
pub struct VolumeOptions {
    /// Limits of the engine.
    pub engine: EngineOptions,
    /// Tensor files, by path, whose reads bypass the kernel's page cache.
    pub direct: Allow,
    /// The effective configuration, shown as `.ckfs/config.toml`.
    pub config_text: String,
    /// What memory is for, shown in the statistics.
    pub budget: Option<Budget>,
    /// The command that mounts anew, told where something is wrong; empty for the general form.
    pub remount: String,
    /// What is said of owners and permission bits, in place of what the sources allow.
    pub overrides: Overrides,
}

/// Everything that keeps a volume from being made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeError {
    /// The problems, at least one.
    pub problems: Vec<Problem>,
}

impl std::error::Error for VolumeError {}

impl fmt::Display for VolumeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::plan::PlanError { problems: self.problems.clone() }.fmt(f)
    }
}

#[derive(Clone, Debug)]
enum Open {
    Original(FileId),
    Bytes(Arc<[u8]>),
    Rows(Arc<RowFile>),
    Image(Arc<OpenFile>, Pin),
}

/// A checkpoint's views as a file system. Immutable but for caches and counters.
#[derive(Debug)]
pub struct Volume {
    pub(super) engine: Arc<Engine>,
    views: Vec<ViewFiles>,
    tree: Tree,
    modified: SystemTime,
    total_bytes: u64,
    metrics: Metrics,
    next_handle: AtomicU64,
    open: RwLock<HashMap<u64, Open>>,
    pub(super) watched: Watched,
    remembered: Mutex<Remembered>,
    direct: Allow,
    copies: Option<Copies>,
    whole: Option<(WholeFiles, MadeWhole)>,
    looks: Looks,
    budget: Option<Budget>,
    remount: String,
    stats_bytes: usize,
    permissions: Permissions,
}

/// Files made ready, open or lately closed: reopening finds tilings and tiles again.
#[derive(Debug)]
struct Remembered {
    files: LruCache<Ino, Arc<OpenFile>>,
    segments: usize,
}

impl Remembered {
    /// Takes out the file that was opened longest ago and is closed, if there are more than should be remembered. One that is
    /// open stays: opened a second time, it would be tiled a second time too.
    fn forget_one(&mut self) -> Option<Arc<OpenFile>> {
        let many = self.files.len() > REMEMBERED_FILES_MAX || self.segments > REMEMBERED_SEGMENTS_MAX;
        let closed = |file: &Arc<OpenFile>| Arc::strong_count(file) == 1;
        let (ino, _) = self.files.iter().rev().find(|(_, file)| many && closed(file))?;
        let old = self.files.pop(&ino.clone())?;
        self.segments -= old.image().segments().len();
        Some(old)
    }
}

impl Volume {
    /// A volume of these views.
    ///
    /// # Errors
    /// Names that cannot be laid out as a tree.
    ///
    /// # Panics
    /// Never: there are fewer than 2^32 views.
    pub fn new(checkpoint: Arc<Checkpoint>, views: Vec<ViewPlan>, options: VolumeOptions) -> Result<Self, VolumeError> {
        let source = checkpoint.source();
        let modified = file_ids(&checkpoint).map(|file| source.pin(file).modified).max().unwrap_or(UNIX_EPOCH);
        let total_bytes = file_ids(&checkpoint).map(|file| source.len_bytes(file)).sum();
        let mut problems = Vec::new();
        let mut root = Seedling::default();
        let mut made = Vec::new();
        // What `ckfs plan` says, shown as `.ckfs/plan.txt`, goes through all tensors too.
        let (mut plan_text, files) = rayon::join(
            || report::text(&checkpoint, views.iter().map(|view| (view.name.as_str(), view.plan.as_ref()))),
            || {
                let files_of = |view: &ViewPlan| ViewFiles::new(Arc::clone(&checkpoint), Arc::clone(&view.plan));
                views.iter().map(files_of).collect::<Vec<_>>()
            },
        );
        let places: Vec<(String, Arc<Plan>)> =
            views.iter().map(|view| (view.name.clone(), Arc::clone(&view.plan))).collect();
        for (view, files) in views.into_iter().zip(files) {
            match files {
                Ok(files) => {
                    plan_text.push_str(&unavailable_text(&view.name, &files.unavailable()));
                    let index = u32::try_from(made.len()).expect("fewer than 2^32 views");
                    let directory = if view.name.is_empty() { Some(&mut root) } else { root.directory(&view.name) };
                    if let Some(directory) = directory {
                        plant_view(directory, index, &files, &mut problems);
                    }
                    made.push(files);
                }
                Err(found) => problems.extend(found),
            }
        }
        let mounter = Mounter::of_this_process();
        plan_text.push_str(&readers_text(&readers(&checkpoint, &mounter, &options.overrides)));
        if let Some(directory) = root.directory(OWN) {
            directory.file("stats.json", FixedKind::Stats);
            directory.file("metrics", FixedKind::Metrics);
            directory.file("config.toml", FixedKind::Text(options.config_text.into_bytes().into()));
            directory.file("plan.txt", FixedKind::Text(plan_text.into_bytes().into()));
        }
        if !problems.is_empty() {
            return Err(VolumeError { problems });
        }
        let remount = Some(options.remount).filter(|command| !command.is_empty());
        let tree = root.plant();
        let permissions = Permissions::new(&checkpoint, &places, &tree, mounter, options.overrides);
        Ok(Self {
            stats_bytes: stats::stats_bytes(checkpoint.source().as_ref()),
            budget: options.budget,
            remount: remount.unwrap_or_else(|| REMOUNT.to_owned()),
            engine: Arc::new(Engine::new(checkpoint, options.engine)),
            views: made,
            tree,
            modified,
            total_bytes,
            metrics: Metrics::default(),
            next_handle: AtomicU64::new(1),
            open: RwLock::default(),
            watched: Watched::default(),
            remembered: Mutex::new(Remembered { files: LruCache::unbounded(), segments: 0 }),
            direct: options.direct,
            copies: None,
            whole: None,
            looks: Looks::default(),
            permissions,
        })
    }

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
        let chosen = match (which, self.tree.place(ino)) {
            (MadeWhole::None, _) | (_, None) | (MadeWhole::Tensors, Some(Place::Fixed(_))) => false,
            (_, Some(Place::Named(..) | Place::Array(..))) | (MadeWhole::All, Some(Place::Fixed(_))) => true,
            (MadeWhole::Auto, Some(Place::Fixed(fixed))) => {
                // Each rank reads its parts of several files of `dcp/`.
                let in_parts = matches!(&fixed.kind, FixedKind::Made { made: Made::Distcp { .. }, .. });
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
        if let (Some((_, MadeWhole::Auto)), Some(Place::Fixed(fixed))) = (&self.whole, self.tree.place(ino)) {
            self.looks.closed(fixed.parent, ino, pin.used(file.image().header_bytes()), Instant::now());
        }
    }

    /// What the statistics are made of.
    fn reported(&self) -> stats::Reported<'_> {
        stats::Reported {
            metrics: &self.metrics,
            engine: &self.engine,
            budget: self.budget.as_ref(),
            shared_bytes: self.whole.as_ref().map(|(whole, _)| whole.used_bytes()),
            remount: &self.remount,
        }
    }

    /// What is wrong with the mount. The code that finds a problem notes it here.
    pub fn health(&self) -> &Health {
        &self.metrics.health
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

    /// The engine that reads.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The node at a path relative to the root, such as `dev3/layers/scanned/wq`. Links are not followed.
    ///
    /// # Errors
    /// [`FsError::NotFound`] or [`FsError::NotDirectory`].
    pub fn resolve(&self, path: &str) -> Result<Attr, FsError> {
        path.split('/')
            .filter(|component| !component.is_empty() && *component != ".")
            .try_fold(self.attr(Ino::ROOT)?, |attr, component| self.lookup(attr.ino, component.as_bytes()))
    }

    /// The name and view behind a raw tensor file: a device's shard, or the whole tensor under `full/`.
    pub fn shard_view(&self, ino: Ino) -> Option<(&str, View)> {
        let Place::Named(block, names, node) = self.tree.place(ino)? else { return None };
        let view = &self.views[block.view as usize];
        let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else { return None };
        let shard = || (view.plan.tensors[tensor as usize].name.as_str(), view.shard(tensor, names.device));
        (names.flavor == Flavor::Raw).then(shard)
    }

    /// The layout of a file that holds tensors; `None` for other nodes.
    ///
    /// # Errors
    /// [`FsError::Io`] if the file cannot be laid out.
    pub fn image(&self, ino: Ino) -> Result<Option<FileImage>, FsError> {
        match self.content(ino)? {
            Content::Image(image) => Ok(Some(image)),
            Content::Original(_) | Content::Bytes(_) | Content::Rows(_) => Ok(None),
        }
    }

    /// The source file that a file is identical to, if it is one.
    pub fn original(&self, ino: Ino) -> Option<FileId> {
        let Place::Fixed(Fixed { kind: FixedKind::Made { view, made }, .. }) = self.tree.place(ino)? else {
            return None;
        };
        match self.views[*view as usize].made(*made) {
            Ok(Content::Original(file)) => Some(file),
            Ok(Content::Bytes(_) | Content::Rows(_) | Content::Image(_)) | Err(_) => None,
        }
    }

    fn content(&self, ino: Ino) -> Result<Content, FsError> {
        let content = match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let view = &self.views[block.view as usize];
                let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else {
                    return Err(FsError::IsDirectory);
                };
                view.tensor(tensor, names).map(Content::Image)
            }
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                view.array(table, table.node(node)).transpose().ok_or(FsError::IsDirectory)?
            }
            Place::Fixed(fixed) => match &fixed.kind {
                FixedKind::Directory { .. } => return Err(FsError::IsDirectory),
                FixedKind::Symlink(_) => return Err(FsError::Invalid),
                FixedKind::Made { view, made } => self.views[*view as usize].made(*made),
                FixedKind::Text(text) => Ok(Content::Bytes(Arc::clone(text))),
                FixedKind::Stats => Ok(Content::Bytes(self.reported().stats(self.stats_bytes).into())),
                FixedKind::Metrics => {
                    let text = exposition::metrics(&self.reported()).map_err(|_| FsError::Io)?;
                    Ok(Content::Bytes(text.into()))
                }
            },
        };
        content.map_err(|error| {
            tracing::error!(ino = ino.0, "cannot lay out a file: {error}");
            self.health().note(ProblemKind::FailedOpen, &self.path_of(ino), &error.to_string());
            FsError::Io
        })
    }

    fn fixed_attr(&self, ino: Ino, fixed: &Fixed) -> Attr {
        let (kind, size_bytes, links) = match &fixed.kind {
            FixedKind::Directory { subdirectories, .. } => (NodeKind::Directory, 0, 2 + subdirectories),
            FixedKind::Symlink(target) => (NodeKind::Symlink, target.len() as u64, 1),
            FixedKind::Text(text) => (NodeKind::File, text.len() as u64, 1),
            FixedKind::Stats => (NodeKind::File, self.stats_bytes as u64, 1),
            FixedKind::Metrics => (NodeKind::File, METRICS_BYTES as u64, 1),
            FixedKind::Made { view, made } => (NodeKind::File, self.views[*view as usize].made_len(*made), 1),
        };
        let permission = self.permissions.of(Self::fixed_subject(ino, fixed));
        Attr { ino, kind, size_bytes, links, modified: self.modified, permission }
    }

    fn fixed_subject(ino: Ino, fixed: &Fixed) -> Subject {
        let is_directory = matches!(fixed.kind, FixedKind::Directory { .. });
        if fixed.is_own {
            return Subject::Own { is_directory };
        }
        match fixed.kind {
            FixedKind::Directory { .. } => Subject::Directory(ino),
            FixedKind::Made { view, made: Made::Hf(file) } => Subject::Hf { view, file },
            FixedKind::Made { view, .. } => Subject::Tensors { view },
            FixedKind::Text(_) | FixedKind::Stats | FixedKind::Metrics => Subject::Everything,
            FixedKind::Symlink(_) => Subject::Link,
        }
    }

    fn array_subject(block: Block, table: &ArrayTable, node: ArrayNode) -> Subject {
        let view = block.view;
        match node {
            ArrayNode::Root | ArrayNode::Directory(_) => Subject::Names { view },
            ArrayNode::Metadata(_) => Subject::Tensors { view },
            ArrayNode::Description(array) | ArrayNode::Chunk(array, _) => {
                Subject::Tensor { view, tensor: table.tensor(array) }
            }
        }
    }

    fn named_subject(block: Block, node: NameNode) -> Subject {
        let view = block.view;
        match node {
            NameNode::Directory(_) => Subject::Names { view },
            NameNode::Tensor(tensor) => Subject::Tensor { view, tensor },
        }
    }

    /// The permission bits that a copy of a node may have under another owner and group: those that the sources allow, and all
    /// that the owner needs. For nodes without attributes, none.
    pub fn copy_mode(&self, ino: Ino, uid: u32, gid: u32) -> u16 {
        let subject = match self.tree.place(ino) {
            Some(Place::Fixed(fixed)) => Self::fixed_subject(ino, fixed),
            Some(Place::Named(block, names, node)) => {
                Self::named_subject(block, self.views[block.view as usize].tree(names.flavor).node(node))
            }
            Some(Place::Array(block, node)) => match self.arrays(block) {
                Ok((_, table)) => Self::array_subject(block, table, table.node(node)),
                Err(_) => return 0,
            },
            None => return 0,
        };
        self.permissions.mode(subject, uid, gid)
    }

    fn named_attr(&self, block: Block, names: Names, node: u32) -> Attr {
        let view = &self.views[block.view as usize];
        let node_kind = view.tree(names.flavor).node(node);
        let (kind, size_bytes, links) = match node_kind {
            NameNode::Directory(subdirectories) => (NodeKind::Directory, 0, 2 + subdirectories),
            NameNode::Tensor(tensor) => (NodeKind::File, view.tensor_len(tensor, names), 1),
        };
        let permission = self.permissions.of(Self::named_subject(block, node_kind));
        let ino = Ino(block.first + u64::from(node));
        Attr { ino, kind, size_bytes, links, modified: self.modified, permission }
    }

    /// The view and the arrays of a block, which is there only if the view has arrays.
    fn arrays(&self, block: Block) -> Result<(&ViewFiles, &Arc<ArrayTable>), FsError> {
        let view = &self.views[block.view as usize];
        view.arrays().map(|table| (view, table)).map_err(|_| FsError::NotFound)
    }

    fn array_attr(&self, block: Block, node: u64) -> Result<Attr, FsError> {
        let (view, table) = self.arrays(block)?;
        let node_kind = table.node(node);
        let kind = array_kind(node_kind);
        let links = match node_kind {
            ArrayNode::Root => 2 + u32::try_from(table.arrays()).expect("fewer tensors than 2^32 - 2"),
            ArrayNode::Directory(_) => 2,
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => 1,
        };
        let size_bytes = view.array_len(table, node_kind);
        let permission = self.permissions.of(Self::array_subject(block, table, node_kind));
        Ok(Attr { ino: Ino(block.first + node), kind, size_bytes, links, modified: self.modified, permission })
    }

    fn kind(&self, ino: Ino) -> NodeKind {
        match self.tree.place(ino) {
            Some(Place::Named(block, names, node)) => {
                match self.views[block.view as usize].tree(names.flavor).node(node) {
                    NameNode::Directory(_) => NodeKind::Directory,
                    NameNode::Tensor(_) => NodeKind::File,
                }
            }
            Some(Place::Array(block, node)) => {
                self.arrays(block).map_or(NodeKind::File, |(_, table)| array_kind(table.node(node)))
            }
            Some(Place::Fixed(fixed)) => match fixed.kind {
                FixedKind::Directory { .. } => NodeKind::Directory,
                FixedKind::Symlink(_) => NodeKind::Symlink,
                FixedKind::Made { .. } | FixedKind::Text(_) | FixedKind::Stats | FixedKind::Metrics => NodeKind::File,
            },
            None => NodeKind::File,
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

    /// The path of a node, for messages.
    fn path_of(&self, ino: Ino) -> String {
        let mut names: Vec<String> = Vec::new();
        let mut at = ino;
        while at != Ino::ROOT {
            match self.tree.place(at) {
                Some(Place::Named(block, shown, node)) if node != 0 => {
                    let tree = self.views[block.view as usize].tree(shown.flavor);
                    names.push(tree.name(node).to_owned());
                    at = Ino(block.first + u64::from(tree.parent(node)));
                }
                Some(Place::Array(block, node)) if node != 0 => {
                    let Ok((view, table)) = self.arrays(block) else { break };
                    names.push(table.node_name(&view.plan, table.node(node)));
                    at = Ino(block.first + table.number(ArrayTable::parent(table.node(node))));
                }
                Some(place) => {
                    let parent = match place {
                        Place::Named(block, ..) | Place::Array(block, _) => block.parent,
                        Place::Fixed(fixed) => fixed.parent,
                    };
                    names.push(self.entry_name(parent, at).unwrap_or("?").to_owned());
                    at = parent;
                }
                None => break,
            }
        }
        names.reverse();
        names.join("/")
    }

    fn entry_name(&self, parent: Ino, child: Ino) -> Option<&str> {
        let Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) = self.tree.place(parent)? else {
            return None;
        };
        entries.iter().find(|(_, ino)| *ino == child).map(|(name, _)| &**name)
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
        reply: &mut dyn FnMut(Served<'_>),
        read: impl FnOnce(&mut dyn FnMut(Served<'_>)) -> Result<(), ReadError>,
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
    fn open_checked(&self, ino: Ino) -> Result<Opened, FsError> {
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
        let place = self.tree.place(ino);
        matches!(place, Some(Place::Fixed(Fixed { kind: FixedKind::Stats | FixedKind::Metrics, .. })))
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
}

fn array_kind(node: ArrayNode) -> NodeKind {
    match node {
        ArrayNode::Root | ArrayNode::Directory(_) => NodeKind::Directory,
        ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => NodeKind::File,
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

/// Name of the file that says why a format's directory is otherwise empty.
const UNAVAILABLE: &str = "UNAVAILABLE.txt";

/// Plants the directory of a format that cannot hold the view: it says why, and no loader takes it for a checkpoint.
fn plant_unavailable(directory: &mut Seedling, format: &str, reason: &str) {
    let reason = printable(reason);
    tracing::warn!("{format}/ is not available: {reason}");
    let text = format!("{format}/ is not available for this view: {reason}\n");
    if let Some(empty) = directory.directory(format) {
        empty.file(UNAVAILABLE, FixedKind::Text(text.into_bytes().into()));
    }
}

/// Plants the directories of one view.
fn plant_view(directory: &mut Seedling, index: u32, files: &ViewFiles, problems: &mut Vec<Problem>) {
    let plan = &files.plan;
    let names = |device, flavor| (BlockKind::Names(Names { device, flavor }), files.tree(flavor).len());
    let (whole, len) = names(None, Flavor::Raw);
    directory.block("full", index, whole, len);
    for device in &plan.devices {
        let (shards, len) = names(Some(*device), Flavor::Raw);
        directory.block(&format!("dev{device}"), index, shards, len);
    }
    if let Some(npy) = directory.directory("npy") {
        for device in &plan.devices {
            let (shards, len) = names(Some(*device), Flavor::Npy);
            npy.block(&format!("dev{device}"), index, shards, len);
        }
    }
    let made = |made| FixedKind::Made { view: index, made };
    if let Some(bundles) = directory.directory("safetensors") {
        for device in &plan.devices {
            bundles.file(&format!("dev{device}.safetensors"), made(Made::Safetensors { device: *device }));
        }
        if files.has_safetensors_index() {
            bundles.file("model.safetensors.index.json", made(Made::SafetensorsIndex));
        }
    }
    plant_torch(directory, index, files);
    match files.arrays() {
        Ok(table) => {
            if let Some(step) = directory.directory("orbax").and_then(|orbax| orbax.directory("0")) {
                step.file("_CHECKPOINT_METADATA", made(Made::OrbaxStep));
                step.block(ORBAX_ITEM, index, BlockKind::Arrays, table.len());
            }
        }
        Err(reason) => plant_unavailable(directory, "orbax", reason),
    }
    if !plan.mesh.axes().is_empty()
        && let Some(mesh) = directory.directory("mesh")
    {
        for device in &plan.devices {
            let target = format!("../dev{device}").into_boxed_str();
            mesh.file(&plan.mesh.path(*device).join(","), FixedKind::Symlink(target));
        }
    }
    for (number, file) in plan.hf.iter().enumerate() {
        let (parents, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let mut parents = std::iter::once("hf").chain(parents.split('/').filter(|parent| !parent.is_empty()));
        let parent = parents.try_fold(&mut *directory, |at, parent| at.directory(parent));
        if !parent.is_some_and(|parent| parent.file(name, made(Made::Hf(number)))) {
            let reason = "the name is taken by another file".to_owned();
            problems.push(Problem::Hf { path: file.path.clone(), reason });
        }
    }
    if plan.sharded_state {
        plant_sharded_state(directory, index, plan);
    }
    if let Some(own) = directory.directory(OWN) {
        own.file("manifest.json", made(Made::Manifest));
    }
}

/// Plants `sharded_state/`: the files of the ranks, and beside them what an engine reads from the same directory to know the
/// model and its tokenizer.
fn plant_sharded_state(directory: &mut Seedling, index: u32, plan: &Plan) {
    let Some(state) = directory.directory("sharded_state") else { return };
    for (rank, device) in plan.ranks() {
        let name = format!("model-rank-{rank}-part-0.safetensors");
        state.file(&name, FixedKind::Made { view: index, made: Made::ShardedState { device } });
    }
    for (number, file) in plan.hf.iter().enumerate().filter(|(_, file)| !file.path.contains('/') && !is_weights(file)) {
        state.file(&file.path, FixedKind::Made { view: index, made: Made::Hf(number) });
    }
}

/// Endings of files that hold weights or say where weights are.
const WEIGHT_ENDINGS: [&str; 8] = [".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"];

fn is_weights(file: &HfFile) -> bool {
    matches!(file.content, HfContent::Weights { .. }) || WEIGHT_ENDINGS.iter().any(|ending| file.path.ends_with(ending))
}

/// Plants `pt/` and `dcp/`. The latter is complete whatever devices are listed: any process may read any of it.
fn plant_torch(directory: &mut Seedling, index: u32, files: &ViewFiles) {
    if let Err(reason) = files.torch() {
        plant_unavailable(directory, "pt", reason);
        plant_unavailable(directory, "dcp", reason);
        return;
    }
    if let Err(reason) = files.dcp() {
        plant_unavailable(directory, "dcp", reason);
    }
    let made = |made| FixedKind::Made { view: index, made };
    if let Some(archives) = directory.directory("pt") {
        for device in &files.plan.devices {
            archives.file(&format!("dev{device}.pt"), made(Made::Pt { device: *device }));
        }
    }
    if files.dcp().is_ok()
        && let Some(dcp) = directory.directory("dcp")
    {
        for device in files.plan.first_holders() {
            dcp.file(&distcp_name(device), made(Made::Distcp { device }));
        }
        dcp.file(".metadata", made(Made::DcpMetadata));
        dcp.file("metadata.json", made(Made::MegatronMetadata));
        dcp.file("common.pt", made(Made::MegatronCommon));
    }
}

impl FileSystem for Volume {
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        match self.tree.place(parent).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                if let NameNode::Tensor(_) = tree.node(node) {
                    return Err(FsError::NotDirectory);
                }
                tree.child(node, name).map(|child| self.named_attr(block, names, child)).ok_or(FsError::NotFound)
            }
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                let node = table.node(node);
                if array_kind(node) != NodeKind::Directory {
                    return Err(FsError::NotDirectory);
                }
                let child = table.child(&view.plan, node, name).ok_or(FsError::NotFound)?;
                self.array_attr(block, table.number(child))
            }
            Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) => {
                let found = entries.binary_search_by(|(entry, _)| entry.as_bytes().cmp(name));
                self.attr(entries[found.map_err(|_| FsError::NotFound)?].1)
            }
            Place::Fixed(_) => Err(FsError::NotDirectory),
        }
    }

    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Fixed(fixed) => Ok(self.fixed_attr(ino, fixed)),
            Place::Named(block, names, node) => Ok(self.named_attr(block, names, node)),
            Place::Array(block, node) => self.array_attr(block, node),
        }
    }

    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        let skip = to_usize(from);
        match self.tree.place(dir).ok_or(FsError::NotFound)? {
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                let node = table.node(node);
                if array_kind(node) != NodeKind::Directory {
                    return Err(FsError::NotDirectory);
                }
                table.list(&view.plan, node, from, &mut |name, child| {
                    let ino = Ino(block.first + table.number(child));
                    each(DirEntry { name: name.as_bytes(), ino, kind: array_kind(child) }).is_continue()
                });
            }
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                if let NameNode::Tensor(_) = tree.node(node) {
                    return Err(FsError::NotDirectory);
                }
                for child in tree.children(node).skip(skip) {
                    let kind = match tree.node(child) {
                        NameNode::Directory(_) => NodeKind::Directory,
                        NameNode::Tensor(_) => NodeKind::File,
                    };
                    let ino = Ino(block.first + u64::from(child));
                    if each(DirEntry { name: tree.name(child).as_bytes(), ino, kind }).is_break() {
                        break;
                    }
                }
            }
            Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) => {
                self.looks.listed(dir, Instant::now());
                for (name, ino) in entries.iter().skip(skip) {
                    if each(DirEntry { name: name.as_bytes(), ino: *ino, kind: self.kind(*ino) }).is_break() {
                        break;
                    }
                }
            }
            Place::Fixed(_) => return Err(FsError::NotDirectory),
        }
        Ok(())
    }

    fn parent(&self, ino: Ino) -> Result<Ino, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, _, 0) | Place::Array(block, 0) => Ok(block.parent),
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                Ok(Ino(block.first + u64::from(tree.parent(node))))
            }
            Place::Array(block, node) => {
                let (_, table) = self.arrays(block)?;
                Ok(Ino(block.first + table.number(ArrayTable::parent(table.node(node)))))
            }
            Place::Fixed(fixed) => Ok(fixed.parent),
        }
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Fixed(Fixed { kind: FixedKind::Symlink(target), .. }) => Ok(target.as_bytes().to_vec()),
            Place::Fixed(_) | Place::Named(..) | Place::Array(..) => Err(FsError::Invalid),
        }
    }

    fn open(&self, ino: Ino) -> Result<Opened, FsError> {
        self.open_checked(ino).inspect_err(|error| {
            add(&self.engine.counters().failed_opens, u64::from(*error == FsError::Io));
        })
    }

    fn read(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>),
    ) -> Result<(), FsError> {
        let mut reply_part = |bytes: &[u8]| {
            let start = to_usize(offset).min(bytes.len());
            reply(Served::Memory(&bytes[start..start.saturating_add(len).min(bytes.len())]));
        };
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned();
        match open.ok_or(FsError::Invalid)? {
            Open::Bytes(bytes) => {
                reply_part(&bytes);
                Ok(())
            }
            Open::Rows(rows) => {
                reply(Served::Memory(&rows.read(offset, len)));
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

    fn started(&self, passthrough: bool) {
        if let (Some((whole, which)), true) = (&self.whole, passthrough) {
            let (plans, which) = (self.views.iter().map(|view| Arc::clone(&view.plan)).collect::<Vec<_>>(), *which);
            let views = plans.clone().into_iter().flat_map(|plan| {
                (0..plan.tensors.len())
                    .filter_map(move |index| plan.tensors.get(index).map(|tensor| tensor.view.clone()))
            });
            let maps = MapsAhead::new(&self.engine, views);
            whole.expect(maps, move |tell| plans.iter().for_each(|plan| tell_sizes(plan, which, tell)));
        }
    }

    fn make_whole(&self, ino: Ino, handle: Handle, then: WhenWhole) {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned();
        match (&self.whole, open) {
            (Some((whole, _)), Some(Open::Image(file, pin))) => whole.make(ino, &file, pin, then),
            (_, _) => then(None),
        }
    }

    fn release(&self, ino: Ino, handle: Handle) {
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

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if !name.starts_with(b"user.") {
            return Err(FsError::Unsupported);
        }
        let Place::Named(block, names, node) = self.tree.place(ino).ok_or(FsError::NotFound)? else {
            return Err(FsError::NoAttribute);
        };
        let view = &self.views[block.view as usize];
        let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else { return Err(FsError::NoAttribute) };
        view.xattr(tensor, names.device, name).ok_or(FsError::NoAttribute)
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let node = self.views[block.view as usize].tree(names.flavor).node(node);
                let shown: &[&str] = if matches!(node, NameNode::Tensor(_)) { &ViewFiles::XATTRS } else { &[] };
                Ok(shown.iter().map(|name| name.as_bytes().to_vec()).collect())
            }
            Place::Array(..) | Place::Fixed(_) => Ok(Vec::new()),
        }
    }

    fn stat_fs(&self) -> StatFs {
        StatFs { total_bytes: self.total_bytes, nodes: self.tree.len() }
    }

    fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn patience(&self) -> Duration {
        self.engine.checkpoint().source().health().stall_limit()
    }

    fn note_stalls(&self) {
        self.engine.note_stalls();
        self.report_stalls();
        self.tell_changes();
    }

    fn is_waiting(&self) -> bool {
        self.engine.is_waiting()
    }

    fn is_stalled(&self, ino: Ino) -> bool {
        self.waits_for_stalled(ino)
    }

    fn note_given_up(&self, op: Op, _ino: Ino) {
        self.count_given_up(op);
    }

    fn on_change(&self, told: Option<OnChange>) {
        self.watched.set_on_change(told);
    }

    fn changed_files(&self) -> Vec<Ino> {
        self.files_of_poisoned()
    }
}
