//! Values of expressions, the names that they use, and what may go wrong.

use std::{fmt, sync::Arc};

use ckfs_config::nearest;
use ckfs_tensor::{DType, View, ViewError};

/// Deepest nesting of an expression.
pub(super) const DEPTH_MAX: usize = 64;

/// Why a text is not an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SyntaxError {
    /// A token other than the expected one.
    #[error("at {at:?}: expected {expected}")]
    Expected {
        /// The found text, shortened.
        at: String,
        /// The expected token.
        expected: &'static str,
    },
    /// No such function.
    #[error("there is no function {0:?}")]
    Function(String),
    /// Wrong number of operands.
    #[error("{function} takes {expected} operands, found {found}")]
    Arguments {
        /// The function.
        function: &'static str,
        /// The number of operands that it takes.
        expected: String,
        /// The number of operands found.
        found: usize,
    },
    /// A text that stands for a dtype, and for none.
    #[error("{0}")]
    Dtype(String),
    /// Nested too deep.
    #[error("nested more than {DEPTH_MAX} deep")]
    Depth,
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct EvalError {
    text: String,
    /// The words of the expression that it concerns, after the variables in whose definitions these are. Empty if it concerns the whole.
    pub(crate) words: Vec<String>,
    /// The absent value that is the reason.
    pub(crate) absent: Option<Absent>,
}

impl EvalError {
    /// An error that concerns a word of the expression, or the whole if it is empty.
    pub(crate) fn new(text: String, word: &str) -> Self {
        Self { text, words: vec![word.to_owned()], absent: None }
    }

    /// Nothing has this name.
    pub(crate) fn no_name(name: &str) -> Self {
        Self::new(format!("nothing is called {name:?}"), name)
    }

    /// There is no such dtype.
    pub(super) fn no_dtype(name: &str) -> Self {
        let words = DType::ALL.iter().flat_map(|dtype| [dtype.code().to_ascii_lowercase(), dtype.name().to_owned()]);
        let words: Vec<String> = words.collect();
        let near = nearest(name, words.iter().map(String::as_str));
        let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        Self::new(format!("there is no dtype {name:?}{near}"), name)
    }

    /// A result beyond 64 bits, or a division by zero.
    pub(crate) fn range(operation: &'static str) -> Self {
        Self::new(format!("{operation}: no such number"), operation)
    }

    /// This error in the definition of a variable.
    pub(crate) fn within(mut self, variable: &str) -> Self {
        self.text = format!("{variable}: {}", self.text);
        self.words.insert(0, variable.to_owned());
        self
    }
}

impl From<ViewError> for EvalError {
    fn from(error: ViewError) -> Self {
        Self::new(error.to_string(), "")
    }
}

/// An absent value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// A member of `config.json`.
    #[error("config.json has no member {0:?}")]
    Config(String),
    /// A mesh axis.
    #[error("the mesh has no axis {0:?}")]
    MeshAxis(String),
    /// A tensor.
    #[error("there is no tensor {0:?}")]
    Tensor(String),
    /// The literal `absent`.
    #[error("it is absent")]
    Literal,
}

/// The value of an expression.
#[derive(Clone, Debug)]
pub enum ExprValue {
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(Arc<str>),
    /// Nothing.
    Absent(Arc<Absent>),
    /// A view.
    View(View),
    /// A list of whole numbers.
    List(Arc<[i64]>),
}

impl fmt::Display for ExprValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::Text(value) => f.write_str(value),
            Self::Absent(_) => f.write_str("absent"),
            Self::View(view) => write!(f, "a view {} {}", view.dtype(), view.shape()),
            Self::List(numbers) => write!(f, "a list of {} numbers", numbers.len()),
        }
    }
}

impl ExprValue {
    /// The value of a member of `config.json`; lists and objects count as absent.
    pub(crate) fn of_json(value: &serde_json::Value) -> Option<Self> {
        match value {
            serde_json::Value::Bool(value) => Some(Self::Bool(*value)),
            serde_json::Value::String(text) => Some(Self::Text(text.as_str().into())),
            serde_json::Value::Number(number) => {
                number.as_i64().map(Self::Int).or_else(|| number.as_f64().map(Self::Float))
            }
            serde_json::Value::Null | serde_json::Value::Array(_) | serde_json::Value::Object(_) => None,
        }
    }

    /// The value that a user's text stands for: a number, `true`, `false`, or the text itself.
    pub fn of_text(text: &str) -> Self {
        let text = text.trim();
        let number = text.replace('_', "");
        match text {
            "true" => Self::Bool(true),
            "false" => Self::Bool(false),
            _ => number.parse().map(Self::Int).ok().unwrap_or_else(|| {
                let float = number.parse::<f64>().ok().filter(|value| value.is_finite());
                float.map_or_else(|| Self::Text(text.into()), Self::Float)
            }),
        }
    }

    /// A count as a whole number.
    pub(super) fn whole(operation: &'static str, count: impl TryInto<i64>) -> Result<Self, EvalError> {
        count.try_into().map(Self::Int).map_err(|_| EvalError::range(operation))
    }

    pub(super) fn kind(&self, operation: &'static str, expected: &'static str) -> EvalError {
        let Self::Absent(absent) = self else {
            return EvalError::new(format!("{operation}: expected {expected}, found {self}"), operation);
        };
        let word = match &**absent {
            Absent::Config(name) | Absent::MeshAxis(name) | Absent::Tensor(name) => name,
            Absent::Literal => "absent",
        };
        EvalError { absent: Some(absent.as_ref().clone()), ..EvalError::new(absent.to_string(), word) }
    }

    /// This value as a whole number.
    ///
    /// # Errors
    /// [`EvalError`] if it is not one. A fraction with an integral value is accepted.
    pub fn int(&self, operation: &'static str) -> Result<i64, EvalError> {
        if let Self::Int(value) = self { Ok(*value) } else { Err(self.kind(operation, "a whole number")) }
    }

    /// This value as a whole number that is not negative.
    ///
    /// # Errors
    /// [`EvalError`] if it is not one.
    pub fn natural(&self, operation: &'static str) -> Result<u64, EvalError> {
        u64::try_from(self.int(operation)?).map_err(|_| self.kind(operation, "a number that is not negative"))
    }

    #[allow(clippy::cast_precision_loss, reason = "numbers of a configuration are far below 2^53")]
    pub(super) fn float(&self, operation: &'static str) -> Result<f64, EvalError> {
        if let Self::Float(value) = self {
            return Ok(*value);
        }
        if let Self::Int(value) = self { Ok(*value as f64) } else { Err(self.kind(operation, "a number")) }
    }

    /// Whether this is true.
    ///
    /// # Errors
    /// [`EvalError`] if it is neither true nor false.
    pub fn bool(&self, operation: &'static str) -> Result<bool, EvalError> {
        if let Self::Bool(value) = self { Ok(*value) } else { Err(self.kind(operation, "true or false")) }
    }

    pub(super) fn text(&self, operation: &'static str) -> Result<&str, EvalError> {
        if let Self::Text(value) = self { Ok(value) } else { Err(self.kind(operation, "a text")) }
    }

    /// This value as a view.
    ///
    /// # Errors
    /// [`EvalError`] if it is not one.
    pub fn view(&self, operation: &'static str) -> Result<&View, EvalError> {
        if let Self::View(view) = self { Ok(view) } else { Err(self.kind(operation, "a view")) }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the narrowed value is compared with the original")]
    pub(super) fn constant(&self, operation: &'static str) -> Result<f32, EvalError> {
        let wide = self.float(operation)?;
        let narrow = wide as f32;
        let is_exact = f64::from(narrow).to_bits() == wide.to_bits();
        let inexact = || EvalError::new(format!("{self} is no value of f32: round it with f32(…)"), "");
        is_exact.then_some(narrow).ok_or_else(inexact)
    }
}

/// The meaning of names in an expression.
pub trait NameScope {
    /// The value of a name.
    ///
    /// # Errors
    /// [`EvalError`] if there is none.
    fn name(&self, name: &str) -> Result<ExprValue, EvalError>;
    /// A member of `config.json`; `None` if it is absent.
    fn config(&self, path: &[String]) -> Option<ExprValue>;
    /// Size of a mesh axis; `None` if the mesh does not have it, or nothing depends on the devices.
    fn mesh(&self, _axis: &str) -> Option<u64> {
        None
    }
    /// The extents of a tensor; `None` if the repository does not have it.
    fn shape(&self, tensor: &str) -> Option<Vec<u64>>;
    /// One more than the highest number in the place of the star in a tensor's name; 0 if there is none.
    fn count(&self, _pattern: &str) -> u64 {
        0
    }
    /// Whether the user has set a parameter.
    fn given(&self, _parameter: &str) -> bool {
        false
    }
    /// Whether products and sums get the constants that undo them, for the inverse of a rule.
    fn inverts(&self) -> bool {
        false
    }
}
