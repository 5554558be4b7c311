//! Settings from Python's values.

use ckfs_config::{Setting, Settings, keywords};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBool, PyDict, PyList, PyString, PyTuple},
};

use super::failure::ExceptionKind;

/// The names of all settings that `ckfs.open` takes.
#[pyfunction]
pub(super) fn settings() -> Vec<String> {
    keywords::all().map(Setting::option).collect()
}

/// Most lists and dicts inside each other. No setting has as many; one that holds itself has no end.
const DEPTH_MAX: u8 = 16;

fn value(given: &Bound<'_, PyAny>, depth: u8) -> PyResult<toml::Value> {
    if depth > DEPTH_MAX {
        return Err(PyTypeError::new_err(format!("expected at most {DEPTH_MAX} lists or dicts inside each other")));
    }
    let value = |item: &Bound<'_, PyAny>| value(item, depth + 1);
    if given.is_instance_of::<PyBool>() {
        return Ok(given.extract::<bool>()?.into());
    }
    if given.is_instance_of::<PyString>() {
        return Ok(given.extract::<String>()?.into());
    }
    if let Ok(table) = given.cast::<PyDict>() {
        let row = |(key, item): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((key.extract::<String>()?, value(&item)?));
        return Ok(toml::Value::Table(table.iter().map(row).collect::<PyResult<toml::Table>>()?));
    }
    if given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>() {
        let items = given.try_iter()?.map(|item| value(&item?));
        return Ok(toml::Value::Array(items.collect::<PyResult<_>>()?));
    }
    if let Ok(number) = given.extract::<i64>() {
        return Ok(number.into());
    }
    if let Ok(number) = given.extract::<f64>() {
        return Ok(number.into());
    }
    Err(PyTypeError::new_err(format!("expected a text, a number, a bool, a list or a dict, found {}", given.repr()?)))
}

/// The settings of keywords.
///
/// # Errors
/// `TypeError` for an unknown keyword, else `UsageError`; each with everything that is wrong.
pub(super) fn parsed(given: &Bound<'_, PyDict>) -> PyResult<Settings> {
    let py = given.py();
    let mut pairs = Vec::new();
    for (name, item) in given.iter() {
        let name: String = name.extract()?;
        let value = value(&item, 0).map_err(|error| PyTypeError::new_err(format!("{name}: {}", error.value(py))))?;
        pairs.push((name, value));
    }
    keywords::parse(pairs).map_err(|errors| {
        let is_unknown = errors.iter().any(|error| error.is_unknown);
        let texts: Vec<String> = errors.into_iter().map(|error| error.text).collect();
        let text = texts.join("; ");
        if is_unknown { PyTypeError::new_err(text) } else { ExceptionKind::Usage.listing(py, &text, texts) }
    })
}
