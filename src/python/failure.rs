//! Exceptions. Their classes are Python's own, in `ckfs/_errors.py`, since they exist without this module too.

use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyDict},
};

/// The class of an exception.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExceptionKind {
    /// A setting has a wrong value.
    Usage,
    /// The source and the settings give no view.
    Plan,
    /// Bytes do not come.
    Read,
    /// This process is a child of the one that opened the checkpoint.
    Fork,
    /// Anything else.
    General,
}

impl ExceptionKind {
    fn class(self) -> &'static str {
        match self {
            Self::Usage => "UsageError",
            Self::Plan => "PlanError",
            Self::Read => "ReadError",
            Self::Fork => "ForkError",
            Self::General => "Error",
        }
    }

    /// An exception with a message.
    pub(super) fn with(self, py: Python<'_>, message: &str) -> PyErr {
        self.raised(py, message, None)
    }

    /// An exception with a message and all problems.
    pub(super) fn listing(self, py: Python<'_>, message: &str, problems: Vec<String>) -> PyErr {
        match [("problems", problems)].into_py_dict(py) {
            Ok(more) => self.raised(py, message, Some(&more)),
            Err(error) => error,
        }
    }

    fn raised(self, py: Python<'_>, message: &str, more: Option<&Bound<'_, PyDict>>) -> PyErr {
        let raised = py.import("ckfs._errors").and_then(|module| module.getattr(self.class())?.call((message,), more));
        raised.map_or_else(|error| error, PyErr::from_value)
    }
}
