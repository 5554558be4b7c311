//! An opened checkpoint.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    str::FromStr,
    sync::{Arc, mpsc},
};

use ckfs_config::{Config, Settings, THREADS_MAX, nearest};
use ckfs_plan::{Plan, PlannedTensor, ViewOptions, report};
use ckfs_read::{Engine, ReadError};
use ckfs_service::{Alive, OpenError, Service, cores, wait_registry, watch};
use ckfs_tensor::DType;
use pyo3::{
    exceptions::{PyIndexError, PyValueError},
    prelude::*,
    types::PyDict,
};

use super::{
    failure::ExceptionKind,
    keyword,
    loading::{self, AxisSelection, LoadJob},
    process, warning,
};

/// Why a checkpoint is not opened.
enum Refusal {
    Usage(String),
    Open(Box<OpenError>),
    Stalled(String),
    Panicked,
}

impl Refusal {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Usage(text) => ExceptionKind::Usage.with(py, text),
            Self::Open(error) if error.concerns_view() => {
                ExceptionKind::Plan.listing(py, &error.to_string(), error.problems())
            }
            Self::Open(error) => ExceptionKind::General.with(py, &error.to_string()),
            Self::Stalled(text) => ExceptionKind::Read.with(py, text),
            Self::Panicked => ExceptionKind::General.with(py, "the opening of the checkpoint panicked"),
        }
    }
}

type OpenResult = Result<(Service, Vec<String>), Refusal>;

fn open_service(source: Option<String>, settings: &Settings, tell: &mpsc::Sender<OpenResult>) -> OpenResult {
    let usage = |error: &dyn std::fmt::Display| Refusal::Usage(error.to_string());
    let base = std::env::current_dir().map_err(|error| usage(&error))?;
    let mut config = Config::gather(&[settings], &base).map_err(|error| usage(&error))?;
    // A mountpoint in the file is of no account here.
    config.mountpoint = None;
    if source.is_some() {
        config.source = source;
    }
    for view in &config.views {
        ViewOptions::new(&view.settings).map_err(|error| usage(&error))?;
    }
    let waits = wait_registry(&config.mount);
    let stalled = tell.clone();
    let give_up = move |text: &str| drop(stalled.send(Err(Refusal::Stalled(text.to_owned()))));
    let opened = |error| Refusal::Open(Box::new(error));
    let watching =
        watch(&waits, |_| {}, give_up).map_err(|source| opened(OpenError::of_threads("start a thread", &source)))?;
    let (service, warnings) = warning::collected(|| Service::open(&mut config, &waits));
    drop(watching);
    let mut service = service.map_err(opened)?;
    service.start().map_err(|source| opened(OpenError::of_threads("start a thread", &source)))?;
    Ok((service, warnings))
}

/// Opens a source with settings. Returns the checkpoint, and the warnings of its plans.
#[pyfunction]
#[pyo3(signature = (source, settings))]
pub(super) fn open(
    py: Python<'_>,
    source: Option<String>,
    settings: &Bound<'_, PyDict>,
) -> PyResult<(OpenedCheckpoint, Vec<String>)> {
    process::claim(py)?;
    let settings = keyword::parsed(settings)?;
    let opened = process::apart(py, "ckfs-open", move |tell| open_service(source, &settings, tell))?;
    let (service, warnings) = opened.unwrap_or(Err(Refusal::Panicked)).map_err(|refusal| refusal.raised(py))?;
    Ok((OpenedCheckpoint { service: Arc::new(service) }, warnings))
}

/// A number of Python's, where numbers have any size, if this program's type has it.
fn number<N: FromStr>(given: &Bound<'_, PyAny>) -> Option<N> {
    given.str().ok()?.to_str().ok()?.parse().ok()
}

/// The number of a device of the mesh.
fn device_of(plan: &Plan, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let devices = plan.mesh.devices();
    number(given).filter(|device| *device < devices).ok_or_else(|| {
        PyValueError::new_err(format!("device {given}: expected one of the mesh's {devices}, 0 to {}", devices - 1))
    })
}

/// The threads of a load: as many as there are processors, unless a number is given.
fn threads_of(given: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
    let Some(given) = given else { return Ok(cores()) };
    let count: Option<u16> = number(given).filter(|count| (1..=THREADS_MAX).contains(count));
    let refused = || PyValueError::new_err(format!("threads: expected 1 to {THREADS_MAX}, found {given}"));
    count.map(usize::from).ok_or_else(refused)
}

/// A tensor: name, shape, numpy's dtype, spec as JSON, bytes, layers, logical axes, source tensors.
type TensorRow = (String, Vec<u64>, &'static str, String, u64, Option<Vec<u64>>, Vec<String>, Vec<String>);

/// What one tensor is to be loaded to: its index, what is taken along each axis, another dtype, the memory.
type LoadRow<'py> = (usize, Option<Vec<AxisSelection>>, Option<String>, Bound<'py, PyAny>);

/// A checkpoint, opened. Its views and tensors are known by number.
#[pyclass(module = "ckfs._ckfs", name = "OpenedCheckpoint", frozen)]
pub(super) struct OpenedCheckpoint {
    service: Arc<Service>,
}

impl Drop for OpenedCheckpoint {
    fn drop(&mut self) {
        // In a child of `fork` its threads do not exist, and locks may be held forever.
        if !process::is_owner() {
            mem::forget(Arc::clone(&self.service));
        }
    }
}

impl OpenedCheckpoint {
    pub(super) fn service(&self, py: Python<'_>) -> PyResult<&Arc<Service>> {
        process::check(py)?;
        Ok(&self.service)
    }

    fn plan<'a>(&'a self, py: Python<'_>, view: usize) -> PyResult<&'a Arc<Plan>> {
        let plans = self.service(py)?.volume().plans();
        plans.get(view).ok_or_else(|| PyIndexError::new_err(format!("view {view}: there are {}", plans.len())))
    }

    fn tensor<'a>(&'a self, py: Python<'_>, view: usize, index: usize) -> PyResult<(&'a Plan, &'a PlannedTensor)> {
        let plan = self.plan(py, view)?;
        let missing = || PyIndexError::new_err(format!("tensor {index}: there are {}", plan.tensors.len()));
        Ok((plan, plan.tensors.get(index).ok_or_else(missing)?))
    }

    fn engine(&self, py: Python<'_>) -> PyResult<&Arc<Engine>> {
        Ok(self.service(py)?.volume().engine())
    }
}

#[pymethods]
impl OpenedCheckpoint {
    /// The source's name for users.
    fn label(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.service(py)?.label().to_owned())
    }

    /// Names of the views; of the only one it is empty.
    fn views(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.service(py)?.config().views.iter().map(|view| view.name.clone()).collect())
    }

    /// Names of a view's tensors, in order, and whether each is held by files that hold each weight once.
    fn names(&self, py: Python<'_>, view: usize) -> PyResult<Vec<(String, bool)>> {
        let plan = self.plan(py, view)?;
        Ok(plan.tensors.iter().map(|tensor| (tensor.name.clone(), plan.is_bundled(tensor))).collect())
    }

    /// Names of the tensors that the bundle of a device holds: each weight once, of the device's pipeline stage.
    fn stage_names(&self, py: Python<'_>, view: usize, device: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let plan = self.plan(py, view)?;
        let device = device_of(plan, device)?;
        Ok(plan.bundle_of_stage(device).map(|tensor| tensor.name.clone()).collect())
    }

    /// The tensor name that another one most resembles.
    fn nearest(&self, py: Python<'_>, view: usize, name: &str) -> PyResult<Option<String>> {
        let plan = self.plan(py, view)?;
        Ok(nearest(name, plan.tensors.iter().map(|tensor| tensor.name.as_str())).map(str::to_owned))
    }

    /// Names and sizes of a view's mesh axes.
    fn mesh(&self, py: Python<'_>, view: usize) -> PyResult<Vec<(String, u64)>> {
        Ok(self.plan(py, view)?.mesh.axes().iter().map(|axis| (axis.name.clone(), axis.size)).collect())
    }

    /// The listed devices of a view.
    fn devices(&self, py: Python<'_>, view: usize) -> PyResult<Vec<u64>> {
        Ok(self.plan(py, view)?.devices.clone())
    }

    /// What is known of a tensor.
    fn tensor_row(&self, py: Python<'_>, view: usize, index: usize) -> PyResult<TensorRow> {
        let (plan, tensor) = self.tensor(py, view, index)?;
        let shape = tensor.view.shape();
        let checkpoint = self.engine(py)?.checkpoint();
        let (mut sources, mut last) = (Vec::new(), None);
        tensor.view.for_each_source(&mut |source| {
            if last.replace(source.id) != Some(source.id) {
                sources.push(checkpoint.tensor(source.id).name.to_owned());
            }
        });
        Ok((
            tensor.name.clone(),
            shape.extents().to_vec(),
            tensor.view.dtype().name(),
            plan.spec(tensor).to_json(shape.rank(), &plan.mesh).to_string(),
            tensor.bytes(),
            tensor.layers.as_ref().map(|layers| layers.to_vec()),
            tensor.logical.clone(),
            sources,
        ))
    }

    /// The region of a tensor that a device holds: start and stop along each axis.
    fn region(
        &self,
        py: Python<'_>,
        view: usize,
        index: usize,
        device: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(u64, u64)>> {
        let (plan, tensor) = self.tensor(py, view, index)?;
        let device = device_of(plan, device)?;
        Ok(plan.region(tensor, device).ranges().map(|range| (range.start, range.end)).collect())
    }

    /// The report of all views, as JSON.
    fn plan_json(&self, py: Python<'_>) -> PyResult<String> {
        let service = self.service(py)?;
        let (checkpoint, names) = (service.volume().engine().checkpoint(), service.config().views.iter());
        let view = |(name, plan): (&'_ ckfs_config::ViewConfig, &'_ Arc<Plan>)| (name.name.clone(), Arc::clone(plan));
        let views: Vec<(String, Arc<Plan>)> = names.zip(service.volume().plans()).map(view).collect();
        py.detach(|| {
            let rows = views.iter().map(|(name, plan)| report::ViewReport { name, plan, more: serde_json::Map::new() });
            serde_json::to_string(&report::Report::new(checkpoint, rows.collect(), serde_json::Map::new()))
        })
        .map_err(|error| ExceptionKind::General.with(py, &error.to_string()))
    }

    /// Loads parts of a view's tensors into memory, by `threads` threads or else by all processors.
    #[pyo3(signature = (view, rows, threads, progress))]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python's calls are converted to values")]
    fn load(
        &self,
        py: Python<'_>,
        view: usize,
        rows: Vec<LoadRow<'_>>,
        threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (engine, threads) = (self.engine(py)?, threads_of(threads)?);
        let job = |(index, selection, dtype, target): &LoadRow<'_>| {
            let (_, tensor) = self.tensor(py, view, *index)?;
            let word = dtype.as_deref();
            let unknown = |word| PyValueError::new_err(format!("unknown dtype {word:?}"));
            let dtype = word.map(|word| DType::from_user(word).ok_or_else(|| unknown(word))).transpose()?;
            LoadJob::new(engine, (&tensor.name, &tensor.view), selection.as_deref(), dtype, target)
        };
        let jobs = rows.iter().map(job).collect::<PyResult<Vec<LoadJob>>>()?;
        loading::refuse_overlaps(&jobs)?;
        // A panic would be no `Exception` of Python's.
        catch_unwind(AssertUnwindSafe(|| loading::run(py, engine, jobs, threads, progress)))
            .unwrap_or_else(|_| Err(ExceptionKind::Read.with(py, &ReadError::Panicked.to_string())))
    }
}
