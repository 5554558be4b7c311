//! Values of expressions, the names that they use, and what may go wrong.

use std::{fmt, sync::Arc};

use ckfs_tensor::{View, ViewError};

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
    /// Nested too deep.
    #[error("nested more than {DEPTH_MAX} deep")]
    Depth,
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// An unknown name.
    #[error("nothing is called {0:?}")]
    Name(String),
    /// A required value is absent.
    #[error("{0}")]
    Absent(Absent),
    /// A value of another kind was expected.
    #[error("{operation}: expected {expected}, found {found}")]
    Kind {
        /// The operator or function.
        operation: &'static str,
        /// The kind of value that it takes.
        expected: &'static str,
        /// The value that it got.
        found: String,
    },
    /// A result beyond 64 bits, or a division by zero.
    #[error("{0}: no such number")]
    Range(&'static str),
    /// A constant that f32 cannot represent.
    #[error("{0} is no value of f32: round it with f32(…)")]
    Inexact(String),
    /// An unknown dtype.
    #[error("there is no dtype {0:?}")]
    DType(String),
    /// A product whose rule does not say how to undo it.
    #[error("{0}: the rule has no third operand, the factor that undoes the product")]
    NoInverse(&'static str),
    /// A tensor to be made whose shape no rule gives.
    #[error("the rule does not give the shape of {0}")]
    NoShape(String),
    /// A loop without a range, over something other than the number in a name.
    #[error("the numbers of {0:?} cannot be derived from names: give a range by over")]
    Open(String),
    /// A variable defined by itself.
    #[error("{0:?} is defined by itself")]
    Cycle(String),
    /// Views whose shapes or dtypes do not fit.
    #[error(transparent)]
    View(#[from] ViewError),
    /// In the definition of a variable.
    #[error("{name}: {error}")]
    In {
        /// The variable.
        name: String,
        /// The reason.
        #[source]
        error: Box<EvalError>,
    },
}

/// An absent value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absent {
    /// A member of `config.json`.
    Config(String),
    /// A mesh axis.
    MeshAxis(String),
    /// A tensor.
    Tensor(String),
    /// The literal `absent`.
    Literal,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(name) => write!(f, "config.json has no member {name:?}"),
            Self::MeshAxis(name) => write!(f, "the mesh has no axis {name:?}"),
            Self::Tensor(name) => write!(f, "there is no tensor {name:?}"),
            Self::Literal => f.write_str("it is absent"),
        }
    }
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

    pub(super) fn kind(&self, operation: &'static str, expected: &'static str) -> EvalError {
        match self {
            Self::Absent(what) => EvalError::Absent(what.as_ref().clone()),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::View(_) | Self::List(_) => {
                EvalError::Kind { operation, expected, found: self.to_string() }
            }
        }
    }

    /// This value as a whole number.
    ///
    /// # Errors
    /// [`EvalError`] if it is not one. A fraction with an integral value is accepted.
    pub fn int(&self, operation: &'static str) -> Result<i64, EvalError> {
        match self {
            Self::Int(value) => Ok(*value),
            Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) | Self::List(_) => {
                Err(self.kind(operation, "a whole number"))
            }
        }
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
        match self {
            Self::Int(value) => Ok(*value as f64),
            Self::Float(value) => Ok(*value),
            Self::Bool(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) | Self::List(_) => {
                Err(self.kind(operation, "a number"))
            }
        }
    }

    /// Whether this is true.
    ///
    /// # Errors
    /// [`EvalError`] if it is neither true nor false.
    pub fn bool(&self, operation: &'static str) -> Result<bool, EvalError> {
        match self {
            Self::Bool(value) => Ok(*value),
            Self::Int(_) | Self::Float(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) | Self::List(_) => {
                Err(self.kind(operation, "true or false"))
            }
        }
    }

    pub(super) fn text(&self, operation: &'static str) -> Result<&str, EvalError> {
        match self {
            Self::Text(value) => Ok(value),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Absent(_) | Self::View(_) | Self::List(_) => {
                Err(self.kind(operation, "a text"))
            }
        }
    }

    /// This value as a view.
    ///
    /// # Errors
    /// [`EvalError`] if it is not one.
    pub fn view(&self, operation: &'static str) -> Result<&View, EvalError> {
        match self {
            Self::View(view) => Ok(view),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::Absent(_) | Self::List(_) => {
                Err(self.kind(operation, "a view"))
            }
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the narrowed value is compared with the original")]
    pub(super) fn constant(&self, operation: &'static str) -> Result<f32, EvalError> {
        let wide = self.float(operation)?;
        let narrow = wide as f32;
        if f64::from(narrow).to_bits() == wide.to_bits() {
            Ok(narrow)
        } else {
            Err(EvalError::Inexact(self.to_string()))
        }
    }
}

/// The meaning of names in an expression.
pub trait NameScope {
    /// The value of a name.
    ///
    /// # Errors
    /// [`EvalError::Name`] if there is none.
    fn name(&self, name: &str) -> Result<ExprValue, EvalError>;
    /// A member of `config.json`; `None` if it is absent.
    fn config(&self, path: &[String]) -> Option<ExprValue>;
    /// Size of a mesh axis; `None` if the mesh does not have it.
    fn mesh(&self, axis: &str) -> Option<u64>;
    /// The extents of a tensor; `None` if the repository does not have it.
    fn shape(&self, tensor: &str) -> Option<Vec<u64>>;
    /// One more than the highest number in the place of the star in a tensor's name; 0 if there is none.
    fn count(&self, pattern: &str) -> u64;
    /// Whether the user has set a parameter.
    fn given(&self, _parameter: &str) -> bool {
        false
    }
    /// Whether products and sums get the constants that undo them, for the inverse of a rule.
    fn inverts(&self) -> bool {
        false
    }
}
