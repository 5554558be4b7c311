//! Regions of tensors into memory of the caller.

use std::{ops::Range, sync::Arc, time::Duration};

use ckfs_image::FileImage;
use ckfs_read::{Engine, LoadPart, LoadTarget, Loading, PreparedFile, ReadError};
use ckfs_source::FileId;
use ckfs_tensor::{DType, View, ViewError, to_usize};
use pyo3::{exceptions::PyValueError, prelude::*};

use super::{
    failure::ExceptionKind,
    memory::{LentBuffer, LentPart},
};

/// Time between two looks at signals, failures and progress.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time that an interrupted or failed load waits for its threads. They may be waiting for storage.
const LEAVE: Duration = Duration::from_millis(500);
/// The calling thread alone makes up to this many bytes of mapped files: to start another takes as long.
const ALONE_BYTES_MAX: u64 = 256 << 10;

/// What is taken of an axis.
#[derive(Debug, FromPyObject)]
pub(super) enum AxisSelection {
    /// `start, start + step, …` before `stop`, as in Python's `range`.
    Range(i64, i64, i64),
    /// These indexes.
    Indices(Vec<u64>),
}

/// One tensor, or a part of one, and where its bytes go.
#[derive(Debug)]
pub(super) struct LoadJob {
    file: Arc<PreparedFile>,
    buffer: Arc<LentBuffer>,
    /// Where the first of its source bytes are.
    source: (FileId, u64),
    mapped: bool,
}

fn number(number: i64) -> u64 {
    number.unsigned_abs()
}

/// The elements of a view that are selected along each axis.
fn selected(view: View, selection: &[AxisSelection]) -> Result<View, ViewError> {
    selection.iter().enumerate().try_fold(view, |view, (axis, taken)| match taken {
        AxisSelection::Range(start, stop, step) if *step > 0 => {
            view.slice(axis, number(*start), number(*stop).max(number(*start)), number(*step))
        }
        AxisSelection::Range(start, stop, step) => view.slice_down(axis, *start, (*stop).min(*start), number(*step)),
        AxisSelection::Indices(indices) => view.gather(axis, indices),
    })
}

impl LoadJob {
    /// A part of a view, cast to another dtype if one is given, into the memory of `target`.
    ///
    /// # Errors
    /// `ValueError` if the view has no such part or cannot be cast; a buffer that does not fit.
    pub(super) fn new(
        engine: &Engine,
        (name, view): (&str, &View),
        selection: Option<&[AxisSelection]>,
        dtype: Option<DType>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let refused = |error: &dyn std::fmt::Display| PyValueError::new_err(format!("{name}: {error}"));
        let mut part = selected(view.clone(), selection.unwrap_or_default()).map_err(|error| refused(&error))?;
        if let Some(dtype) = dtype.filter(|dtype| *dtype != part.dtype()) {
            part = part.cast(dtype).map_err(|error| refused(&error))?;
        }
        let checkpoint = engine.checkpoint();
        let (mut source, mut mapped) = (None, true);
        part.for_each_stored(&mut |tensor| {
            let info = checkpoint.tensor(tensor);
            source.get_or_insert((info.file(), info.span().start()));
            mapped = mapped && checkpoint.source().maps_of(info.file()).is_some();
        });
        let mut image = FileImage::default();
        image.push_view(name, part).map_err(|error| refused(&error))?;
        let buffer = LentBuffer::new(target, image.len_bytes()).map_err(|error| refused(&error.value(target.py())))?;
        let file = Arc::new(PreparedFile::new(name.to_owned(), image));
        Ok(Self { file, buffer, source: source.unwrap_or((FileId(0), 0)), mapped })
    }

    fn bytes(&self) -> u64 {
        self.file.len_bytes()
    }
}

/// Refuses memory that is given for two tensors.
///
/// # Errors
/// `ValueError` if buffers overlap: which of the tensors they then hold would be chance.
pub(super) fn refuse_overlaps(jobs: &[LoadJob]) -> PyResult<()> {
    let filled = jobs.iter().map(|job| (job.buffer.addresses(), job.file.name()));
    let mut filled: Vec<_> = filled.filter(|(addresses, _)| !addresses.is_empty()).collect();
    filled.sort_unstable_by_key(|(addresses, _)| addresses.start);
    // In this order one that overlaps any other overlaps the next.
    let shared = |pair: &&[(Range<usize>, &str)]| pair[1].0.start < pair[0].0.end;
    filled.windows(2).find(shared).map_or(Ok(()), |pair| {
        let bytes = pair[0].0.end.min(pair[1].0.end) - pair[1].0.start;
        let (one, other) = (pair[0].1, pair[1].1);
        Err(PyValueError::new_err(format!(
            "{one} and {other}: {bytes} bytes of memory are given for both: give each memory of its own"
        )))
    })
}

/// Makes all jobs. Calls `progress` with the bytes made so far and all bytes, from this thread.
///
/// # Errors
/// `ReadError`; what a signal's handler or `progress` raises. The content of the memory is then unspecified.
pub(super) fn run(
    py: Python<'_>,
    engine: &Arc<Engine>,
    mut jobs: Vec<LoadJob>,
    threads: usize,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let failed = |error: ReadError| ExceptionKind::Read.with(py, &error.to_string());
    let total: u64 = jobs.iter().map(LoadJob::bytes).sum();
    // Storage is read in its order.
    jobs.sort_by_key(|job| job.source);
    let alone = total <= ALONE_BYTES_MAX && jobs.iter().all(|job| job.mapped);
    let threads = if alone { 1 } else { threads };
    let cut = py.detach(|| {
        jobs.iter().map(|job| engine.cut(&job.file, threads)).collect::<Result<Vec<Vec<Range<u64>>>, ReadError>>()
    });
    let mut parts = Vec::new();
    for (job, ranges) in jobs.iter().zip(cut.map_err(failed)?) {
        let places: Vec<Range<usize>> = ranges.iter().map(|range| to_usize(range.start)..to_usize(range.end)).collect();
        let place = |(range, target): (&Range<u64>, LentPart)| LoadPart {
            file: Arc::clone(&job.file),
            span: range.clone(),
            target: Box::new(target) as Box<dyn LoadTarget>,
        };
        parts.extend(ranges.iter().zip(job.buffer.parts(&places)).map(place));
    }
    if alone {
        let made = py.detach(|| {
            jobs.iter().try_for_each(|job| engine.check(&job.file))?;
            parts.into_iter().try_for_each(|part| engine.load_part(part))
        });
        made.map_err(failed)?;
    } else {
        let load = py.detach(|| engine.load(parts, threads)).map_err(failed)?;
        let watched = watch(py, &load, total, progress);
        if let Err(error) = watched {
            load.stop();
            py.detach(|| load.wait(LEAVE));
            return Err(error);
        }
    }
    progress.map_or(Ok(()), |progress| progress.call1((total, total)).map(drop))
}

/// Waits for a load.
fn watch(py: Python<'_>, load: &Loading, total: u64, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    loop {
        let done = py.detach(|| load.wait(LOOK));
        py.check_signals()?;
        let result = py.detach(|| load.result());
        result.map_err(|error| ExceptionKind::Read.with(py, &error.to_string()))?;
        if done {
            return Ok(());
        }
        if let Some(progress) = progress {
            progress.call1((load.made_bytes(), total))?;
        }
    }
}
