//! The expressions of layout files: numbers from `config.json`, and views over named tensors.
//!
//! One small language without assignment, loops or side effects:
//!
//! ```text
//! if A then B else C      A ?? B (B where A is absent)      ||  &&  !
//! == != < <= > >=         + - * / // %                      12  1.5  true  'text {template}'
//! config.NAME             member of config.json, looked for in the text model's part first; absent if it is not there
//! name                    a parameter, a variable, a loop's variable, or a source tensor of the rule
//! f(a, b)                 a function of the table below
//! ```
//!
//! `/` of whole numbers gives a whole number where it comes out even and a fraction elsewhere; `//` rounds down. Where
//! a whole number is needed a fraction is an error. Functions of numbers are `min max sqrt ceil floor f32 bf16`, the last two
//! rounding to that type. `exists('name')`, `shape('name', axis)` and `count('a.*.b')` ask about the repository's tensors; the
//! last is one more than the highest number that stands for the star.
//!
//! | function of views | result |
//! | --- | --- |
//! | `transpose(x)` | all axes reversed |
//! | `permute(x, 1, 0)` | axis `i` is the operand's axis number `i` of the list |
//! | `swap(x, -1, -2)` | two axes exchanged |
//! | `reshape(x, 4, -1)` | the same elements in row-major order; one extent may be `-1` |
//! | `slice(x, axis, start, stop[, step])` | a part of an axis |
//! | `concat(axis, x, …)`, `stack(axis, x, …)` | end to end, or side by side along a new axis |
//! | `pad(x, axis, before, after)` | zeros around |
//! | `cut_or_pad(x, axis, n)` | the first `n` elements of an axis, with zeros after if there are fewer |
//! | `fill(value, 'f32', extent, …)` | a constant |
//! | `cast(x, 'f32')` | values rounded to another type |
//! | `mul(x, c)`, `add(x, c)` | arithmetic in f32, rounded to the operand's type |
//! | `mul_flush(x, c)` | as `mul`, with subnormal operands and products made zero of the same sign |
//! | `mul_f32(x, c)`, `add_f32(x, c)` | as `mul` and `add`, the result left in f32 |
//! | `extent(x, axis)`, `rank(x)` | numbers |
//!
//! Axes may be counted from the end as `-1`, `-2`. Constants of arithmetic must be values of f32: write `f32(…)`.

use std::{fmt, sync::Arc};

use half::bf16;

use crate::tensor::{DType, Element, Keep, Shape, View, ViewError};

/// Deepest nesting of an expression.
const DEPTH_MAX: usize = 64;

/// Highest number of operands of a function.
const ARGUMENTS_MAX: usize = 64;

/// Why a text is no expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SyntaxError {
    /// Something else was expected.
    #[error("at {at:?}: expected {expected}")]
    Expected {
        /// What stands there, up to the end or so.
        at: String,
        /// What should stand there.
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
        /// How many it takes.
        expected: String,
        /// How many there are.
        found: usize,
    },
    /// Too deep.
    #[error("nested more than {DEPTH_MAX} deep")]
    Depth,
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// A name that nothing has.
    #[error("nothing is called {0:?}")]
    Name(String),
    /// Something needed is not there.
    #[error("{0}")]
    Absent(Absent),
    /// A value of another kind was expected.
    #[error("{operation}: expected {expected}, found {found}")]
    Kind {
        /// The operator or function.
        operation: &'static str,
        /// What it takes.
        expected: &'static str,
        /// What it got.
        found: String,
    },
    /// A result beyond 64 bits, or a division by zero.
    #[error("{0}: no such number")]
    Range(&'static str),
    /// A constant that is no value of f32.
    #[error("{0} is no value of f32: round it with f32(…)")]
    Inexact(String),
    /// No such dtype.
    #[error("there is no dtype {0:?}")]
    DType(String),
    /// A variable defined by itself.
    #[error("{0:?} is defined by itself")]
    Cycle(String),
    /// Views that do not fit.
    #[error(transparent)]
    View(#[from] ViewError),
    /// In the definition of a variable.
    #[error("{name}: {error}")]
    In {
        /// The variable.
        name: String,
        /// What is wrong.
        #[source]
        error: Box<EvalError>,
    },
}

/// Something that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absent {
    /// A member of `config.json`.
    Config(String),
    /// A tensor.
    Tensor(String),
    /// The literal `absent`.
    Literal,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(name) => write!(f, "config.json has no member {name:?}"),
            Self::Tensor(name) => write!(f, "there is no tensor {name:?}"),
            Self::Literal => f.write_str("it is absent"),
        }
    }
}

/// What an expression stands for.
#[derive(Clone, Debug)]
pub enum Value {
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
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::Text(value) => f.write_str(value),
            Self::Absent(_) => f.write_str("absent"),
            Self::View(view) => write!(f, "a view {} {}", view.dtype(), view.shape()),
        }
    }
}

impl Value {
    /// The value of a member of `config.json`; lists and objects count as absent.
    pub fn of_json(value: &serde_json::Value) -> Option<Self> {
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

    fn kind(&self, operation: &'static str, expected: &'static str) -> EvalError {
        match self {
            Self::Absent(what) => EvalError::Absent(what.as_ref().clone()),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::View(_) => {
                EvalError::Kind { operation, expected, found: self.to_string() }
            }
        }
    }

    /// The whole number that this is.
    ///
    /// # Errors
    /// [`EvalError`] if it is none; a fraction that comes out even is one.
    pub fn int(&self, operation: &'static str) -> Result<i64, EvalError> {
        match self {
            Self::Int(value) => Ok(*value),
            Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) => {
                Err(self.kind(operation, "a whole number"))
            }
        }
    }

    /// The whole number, not negative, that this is.
    ///
    /// # Errors
    /// [`EvalError`] if it is none.
    pub fn natural(&self, operation: &'static str) -> Result<u64, EvalError> {
        u64::try_from(self.int(operation)?).map_err(|_| self.kind(operation, "a number that is not negative"))
    }

    #[allow(clippy::cast_precision_loss, reason = "numbers of a configuration are far below 2^53")]
    fn float(&self, operation: &'static str) -> Result<f64, EvalError> {
        match self {
            Self::Int(value) => Ok(*value as f64),
            Self::Float(value) => Ok(*value),
            Self::Bool(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) => Err(self.kind(operation, "a number")),
        }
    }

    /// Whether this is true.
    ///
    /// # Errors
    /// [`EvalError`] if it is neither true nor false.
    pub fn bool(&self, operation: &'static str) -> Result<bool, EvalError> {
        match self {
            Self::Bool(value) => Ok(*value),
            Self::Int(_) | Self::Float(_) | Self::Text(_) | Self::Absent(_) | Self::View(_) => {
                Err(self.kind(operation, "true or false"))
            }
        }
    }

    fn text(&self, operation: &'static str) -> Result<&str, EvalError> {
        match self {
            Self::Text(value) => Ok(value),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Absent(_) | Self::View(_) => {
                Err(self.kind(operation, "a text"))
            }
        }
    }

    /// The view that this is.
    ///
    /// # Errors
    /// [`EvalError`] if it is none.
    pub fn view(&self, operation: &'static str) -> Result<&View, EvalError> {
        match self {
            Self::View(view) => Ok(view),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::Absent(_) => {
                Err(self.kind(operation, "a view"))
            }
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the narrowed value is compared with the original")]
    fn constant(&self, operation: &'static str) -> Result<f32, EvalError> {
        let wide = self.float(operation)?;
        let narrow = wide as f32;
        if f64::from(narrow).to_bits() == wide.to_bits() {
            Ok(narrow)
        } else {
            Err(EvalError::Inexact(self.to_string()))
        }
    }
}

/// What names mean to an expression.
pub trait Names {
    /// The value of a name.
    ///
    /// # Errors
    /// [`EvalError::Name`] if there is none.
    fn name(&self, name: &str) -> Result<Value, EvalError>;
    /// A member of `config.json`, `None` if it is not there.
    fn config(&self, path: &[String]) -> Option<Value>;
    /// The extents of a tensor, `None` if it is not there.
    fn shape(&self, tensor: &str) -> Option<Vec<u64>>;
    /// One more than the highest number that stands for the star in a tensor's name, 0 if there is none.
    fn count(&self, pattern: &str) -> u64;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Min,
    Max,
    Sqrt,
    Ceil,
    Floor,
    F32,
    Bf16,
    Exists,
    ShapeOf,
    Count,
    View(ViewFunction),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViewFunction {
    Transpose,
    Permute,
    Swap,
    Reshape,
    Slice,
    Concat,
    Stack,
    Pad,
    CutOrPad,
    Fill,
    Cast,
    Mul,
    MulFlush,
    MulF32,
    Add,
    AddF32,
    Extent,
    Rank,
}

/// Name, function, least and most operands.
const FUNCTIONS: &[(&str, Function, usize, usize)] = &[
    ("min", Function::Min, 1, ARGUMENTS_MAX),
    ("max", Function::Max, 1, ARGUMENTS_MAX),
    ("sqrt", Function::Sqrt, 1, 1),
    ("ceil", Function::Ceil, 1, 1),
    ("floor", Function::Floor, 1, 1),
    ("f32", Function::F32, 1, 1),
    ("bf16", Function::Bf16, 1, 1),
    ("exists", Function::Exists, 1, 1),
    ("shape", Function::ShapeOf, 2, 2),
    ("count", Function::Count, 1, 1),
    ("transpose", Function::View(ViewFunction::Transpose), 1, 1),
    ("permute", Function::View(ViewFunction::Permute), 1, ARGUMENTS_MAX),
    ("swap", Function::View(ViewFunction::Swap), 3, 3),
    ("reshape", Function::View(ViewFunction::Reshape), 1, ARGUMENTS_MAX),
    ("slice", Function::View(ViewFunction::Slice), 4, 5),
    ("concat", Function::View(ViewFunction::Concat), 2, ARGUMENTS_MAX),
    ("stack", Function::View(ViewFunction::Stack), 2, ARGUMENTS_MAX),
    ("pad", Function::View(ViewFunction::Pad), 4, 4),
    ("cut_or_pad", Function::View(ViewFunction::CutOrPad), 3, 3),
    ("fill", Function::View(ViewFunction::Fill), 2, ARGUMENTS_MAX),
    ("cast", Function::View(ViewFunction::Cast), 2, 2),
    ("mul", Function::View(ViewFunction::Mul), 2, 2),
    ("mul_flush", Function::View(ViewFunction::MulFlush), 2, 2),
    ("mul_f32", Function::View(ViewFunction::MulF32), 2, 2),
    ("add", Function::View(ViewFunction::Add), 2, 2),
    ("add_f32", Function::View(ViewFunction::AddF32), 2, 2),
    ("extent", Function::View(ViewFunction::Extent), 2, 2),
    ("rank", Function::View(ViewFunction::Rank), 1, 1),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binary {
    Or,
    And,
    Equal,
    Unequal,
    Compare(Compare),
    Arithmetic(Arithmetic),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
}

#[derive(Clone, Debug)]
enum Node {
    Value(Value),
    Text(Template),
    Name(Arc<str>),
    Config(Vec<String>),
    Not(Box<Node>),
    Negative(Box<Node>),
    If(Box<[Node; 3]>),
    Coalesce(Box<[Node; 2]>),
    Binary(&'static str, Binary, Box<[Node; 2]>),
    Call(&'static str, Function, Vec<Node>),
}

/// A parsed expression.
#[derive(Clone, Debug)]
pub struct Expr {
    node: Node,
    text: Arc<str>,
}

/// A text with expressions in braces: `layers.{l}.{2*i+1}`. Doubled braces stand for themselves.
#[derive(Clone, Debug)]
pub struct Template {
    parts: Vec<(String, Option<Node>)>,
}

impl Expr {
    /// Reads an expression.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse(text: &str) -> Result<Self, SyntaxError> {
        let mut parser = Parser { text, at: 0, depth: 0 };
        let node = parser.expression()?;
        parser.end()?;
        Ok(Self { node, text: text.into() })
    }

    /// Reads a range `start..stop`.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse_range(text: &str) -> Result<(Self, Self), SyntaxError> {
        let mut parser = Parser { text, at: 0, depth: 0 };
        let start = parser.expression()?;
        if !parser.take("..") {
            return Err(parser.expected("a range start..stop"));
        }
        let stop = parser.expression()?;
        parser.end()?;
        Ok((Self { node: start, text: text.into() }, Self { node: stop, text: text.into() }))
    }

    /// The text it was read from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its value.
    ///
    /// # Errors
    /// [`EvalError`].
    pub fn eval(&self, names: &dyn Names) -> Result<Value, EvalError> {
        self.node.eval(names)
    }

    /// Calls `visit` for each name used.
    pub fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        self.node.for_each_name(visit);
    }
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse(text: &str) -> Result<Self, SyntaxError> {
        Self::parse_deep(text, 0)
    }

    fn parse_deep(text: &str, depth: usize) -> Result<Self, SyntaxError> {
        let mut parser = Parser { text, at: 0, depth };
        let mut parts = Vec::new();
        let mut literal = String::new();
        while let Some(c) = parser.rest().chars().next() {
            if parser.rest().starts_with("{{") || parser.rest().starts_with("}}") {
                literal.push(c);
                parser.at += 2;
            } else if c == '{' {
                parser.at += 1;
                let node = parser.expression()?;
                if !parser.take("}") {
                    return Err(parser.expected("a closing brace"));
                }
                parts.push((std::mem::take(&mut literal), Some(node)));
            } else if c == '}' {
                return Err(parser.expected("no closing brace"));
            } else {
                literal.push(c);
                parser.at += c.len_utf8();
            }
        }
        parts.push((literal, None));
        Ok(Self { parts })
    }

    /// The text with values filled in.
    ///
    /// # Errors
    /// [`EvalError`], also where a value is no number, text, true or false.
    pub fn eval(&self, names: &dyn Names) -> Result<String, EvalError> {
        use fmt::Write as _;
        let mut text = String::new();
        for (literal, node) in &self.parts {
            text.push_str(literal);
            let Some(node) = node else { continue };
            match node.eval(names)? {
                value @ (Value::Absent(_) | Value::View(_)) => return Err(value.kind("template", "a number or a text")),
                value @ (Value::Int(_) | Value::Float(_) | Value::Bool(_) | Value::Text(_)) => {
                    write!(text, "{value}").unwrap_or_default();
                }
            }
        }
        Ok(text)
    }

    /// Calls `visit` for each name used.
    pub fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        self.parts.iter().filter_map(|part| part.1.as_ref()).for_each(|node| node.for_each_name(visit));
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

/// Operators by precedence, loosest first; a longer one before its own beginning.
const LEVELS: [&[(&str, Binary)]; 5] = [
    &[("||", Binary::Or)],
    &[("&&", Binary::And)],
    &[
        ("==", Binary::Equal),
        ("!=", Binary::Unequal),
        ("<=", Binary::Compare(Compare::LessEqual)),
        (">=", Binary::Compare(Compare::GreaterEqual)),
        ("<", Binary::Compare(Compare::Less)),
        (">", Binary::Compare(Compare::Greater)),
    ],
    &[("+", Binary::Arithmetic(Arithmetic::Add)), ("-", Binary::Arithmetic(Arithmetic::Subtract))],
    &[
        ("*", Binary::Arithmetic(Arithmetic::Multiply)),
        ("//", Binary::Arithmetic(Arithmetic::FloorDivide)),
        ("/", Binary::Arithmetic(Arithmetic::Divide)),
        ("%", Binary::Arithmetic(Arithmetic::Remainder)),
    ],
];

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn expected(&self, expected: &'static str) -> SyntaxError {
        let at: String = self.rest().trim_start().chars().take(24).collect();
        SyntaxError::Expected { at: if at.is_empty() { "the end".to_owned() } else { at }, expected }
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn peek_word(&mut self) -> &'a str {
        self.skip();
        let rest = self.rest();
        let starts = rest.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if starts { &rest[..end] } else { "" }
    }

    fn keyword(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.at += word.len();
        }
        found
    }

    fn end(&mut self) -> Result<(), SyntaxError> {
        self.skip();
        if self.rest().is_empty() { Ok(()) } else { Err(self.expected("an operator or the end")) }
    }

    fn deeper<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, SyntaxError>) -> Result<T, SyntaxError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(SyntaxError::Depth);
        }
        let result = f(self);
        self.depth -= 1;
        result
    }

    fn expression(&mut self) -> Result<Node, SyntaxError> {
        self.deeper(|parser| {
            if parser.keyword("if") {
                let condition = parser.expression()?;
                if !parser.keyword("then") {
                    return Err(parser.expected("then"));
                }
                let yes = parser.expression()?;
                if !parser.keyword("else") {
                    return Err(parser.expected("else"));
                }
                return Ok(Node::If(Box::new([condition, yes, parser.expression()?])));
            }
            let first = parser.binary(0)?;
            if parser.take("??") {
                return Ok(Node::Coalesce(Box::new([first, parser.expression()?])));
            }
            Ok(first)
        })
    }

    fn binary(&mut self, level: usize) -> Result<Node, SyntaxError> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some((sign, operator)) = operators.iter().find(|(token, _)| self.take(token)) {
            let right = self.binary(level + 1)?;
            left = Node::Binary(sign, *operator, Box::new([left, right]));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Node, SyntaxError> {
        self.deeper(|parser| {
            if parser.take("-") {
                return Ok(Node::Negative(Box::new(parser.unary()?)));
            }
            if parser.take("!") {
                return Ok(Node::Not(Box::new(parser.unary()?)));
            }
            parser.atom()
        })
    }

    fn atom(&mut self) -> Result<Node, SyntaxError> {
        if self.take("(") {
            let inner = self.expression()?;
            return if self.take(")") { Ok(inner) } else { Err(self.expected("a closing parenthesis")) };
        }
        for quote in ["'", "\""] {
            if self.take(quote) {
                let end = self.rest().find(quote).ok_or_else(|| self.expected("a closing quote"))?;
                let template = Template::parse_deep(&self.rest()[..end], self.depth)?;
                self.at += end + 1;
                return Ok(Node::Text(template));
            }
        }
        if self.rest().starts_with(|c: char| c.is_ascii_digit()) {
            return self.number();
        }
        let word = self.peek_word();
        if word.is_empty() {
            return Err(self.expected("a value"));
        }
        self.at += word.len();
        match word {
            "true" => return Ok(Node::Value(Value::Bool(true))),
            "false" => return Ok(Node::Value(Value::Bool(false))),
            "absent" => return Ok(Node::Value(Value::Absent(Arc::new(Absent::Literal)))),
            "then" | "else" => return Err(self.expected("a value before then or else")),
            "config" => return self.config(),
            _ => {}
        }
        if !self.take("(") {
            return Ok(Node::Name(word.into()));
        }
        let (name, function, least, most) =
            *FUNCTIONS.iter().find(|(name, ..)| *name == word).ok_or_else(|| SyntaxError::Function(word.to_owned()))?;
        let mut arguments = Vec::new();
        while !self.take(")") {
            if !arguments.is_empty() && !self.take(",") {
                return Err(self.expected("a comma or a closing parenthesis"));
            }
            arguments.push(self.expression()?);
        }
        if !(least..=most).contains(&arguments.len()) {
            let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
            return Err(SyntaxError::Arguments { function: name, expected, found: arguments.len() });
        }
        Ok(Node::Call(name, function, arguments))
    }

    fn config(&mut self) -> Result<Node, SyntaxError> {
        let mut path = Vec::new();
        while self.rest().starts_with('.') && !self.rest().starts_with("..") {
            self.at += 1;
            let end = self.rest().find(|c| !is_word(c)).unwrap_or(self.rest().len());
            if end == 0 {
                return Err(self.expected("a member's name"));
            }
            path.push(self.rest()[..end].to_owned());
            self.at += end;
        }
        if path.is_empty() { Err(self.expected("a dot and a member's name")) } else { Ok(Node::Config(path)) }
    }

    fn number(&mut self) -> Result<Node, SyntaxError> {
        let rest = self.rest();
        let digits = |from: usize| {
            rest[from..].find(|c: char| !c.is_ascii_digit() && c != '_').map_or(rest.len(), |end| from + end)
        };
        let mut end = digits(0);
        let mut whole = true;
        let digit_at = |at: usize| rest.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
        if rest[end..].starts_with('.') && digit_at(end + 1) {
            whole = false;
            end = digits(end + 1);
        }
        if rest[end..].starts_with(['e', 'E']) {
            let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
            if digit_at(end + 1 + sign) {
                whole = false;
                end = digits(end + 1 + sign);
            }
        }
        let text = rest[..end].replace('_', "");
        let value = if whole { text.parse().map(Value::Int).ok() } else { text.parse().map(Value::Float).ok() };
        let value = value.ok_or_else(|| self.expected("a number of at most 64 bits"))?;
        self.at += end;
        Ok(Node::Value(value))
    }
}

impl Node {
    fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        match self {
            Self::Value(_) | Self::Config(_) => {}
            Self::Text(template) => template.for_each_name(visit),
            Self::Name(name) => visit(name),
            Self::Not(of) | Self::Negative(of) => of.for_each_name(visit),
            Self::If(of) => of.iter().for_each(|node| node.for_each_name(visit)),
            Self::Coalesce(of) | Self::Binary(_, _, of) => of.iter().for_each(|node| node.for_each_name(visit)),
            Self::Call(_, _, of) => of.iter().for_each(|node| node.for_each_name(visit)),
        }
    }

    fn eval(&self, names: &dyn Names) -> Result<Value, EvalError> {
        match self {
            Self::Value(value) => Ok(value.clone()),
            Self::Text(template) => Ok(Value::Text(template.eval(names)?.into())),
            Self::Name(name) => names.name(name),
            Self::Config(path) => {
                Ok(names.config(path).unwrap_or_else(|| Value::Absent(Arc::new(Absent::Config(path.join("."))))))
            }
            Self::Not(of) => Ok(Value::Bool(!of.eval(names)?.bool("!")?)),
            Self::Negative(of) => match of.eval(names)? {
                Value::Int(value) => value.checked_neg().map(Value::Int).ok_or(EvalError::Range("-")),
                value => Ok(Value::Float(-value.float("-")?)),
            },
            Self::If(of) => {
                let [condition, yes, no] = &**of;
                if condition.eval(names)?.bool("if")? { yes.eval(names) } else { no.eval(names) }
            }
            Self::Coalesce(of) => {
                let [first, second] = &**of;
                match first.eval(names)? {
                    Value::Absent(_) => second.eval(names),
                    value => Ok(value),
                }
            }
            Self::Binary(sign, operator, of) => {
                let left = of[0].eval(names)?;
                let right = || of[1].eval(names);
                Ok(match operator {
                    Binary::Or => Value::Bool(left.bool(sign)? || right()?.bool(sign)?),
                    Binary::And => Value::Bool(left.bool(sign)? && right()?.bool(sign)?),
                    Binary::Equal => Value::Bool(equal(&left, &right()?)),
                    Binary::Unequal => Value::Bool(!equal(&left, &right()?)),
                    Binary::Compare(compare) => Value::Bool(compare.apply(left.float(sign)?, right()?.float(sign)?)),
                    Binary::Arithmetic(arithmetic) => arithmetic.apply(sign, &left, &right()?)?,
                })
            }
            Self::Call(name, function, of) => {
                let values = of.iter().map(|node| node.eval(names)).collect::<Result<Vec<_>, _>>()?;
                function.apply(name, &values, names)
            }
        }
    }
}

/// Whether two values are the same; values of different kinds are not, but a whole number may equal a fraction.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Text(left), Value::Text(right)) => left == right,
        (Value::Bool(left), Value::Bool(right)) => left == right,
        (Value::Absent(_), Value::Absent(_)) => true,
        (left, right) => match (left.float("=="), right.float("==")) {
            (Ok(left), Ok(right)) => left.total_cmp(&right).is_eq(),
            _ => false,
        },
    }
}

impl Compare {
    fn apply(self, left: f64, right: f64) -> bool {
        let order = left.total_cmp(&right);
        match self {
            Self::Less => order.is_lt(),
            Self::LessEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterEqual => order.is_ge(),
        }
    }
}

impl Arithmetic {
    fn apply(self, sign: &'static str, left: &Value, right: &Value) -> Result<Value, EvalError> {
        if let (Value::Int(a), Value::Int(b)) = (left, right) {
            let exact = match self {
                Self::Add => a.checked_add(*b),
                Self::Subtract => a.checked_sub(*b),
                Self::Multiply => a.checked_mul(*b),
                Self::FloorDivide => {
                    let quotient = a.checked_div_euclid(*b);
                    // Euclid's quotient rounds up for a negative divisor that does not divide.
                    quotient.and_then(|quotient| {
                        if *b < 0 && a.rem_euclid(*b) != 0 { quotient.checked_sub(1) } else { Some(quotient) }
                    })
                }
                Self::Remainder => a.checked_rem_euclid(*b),
                Self::Divide if a.checked_rem(*b).is_some_and(|rest| rest != 0) => {
                    return Ok(Value::Float(left.float(sign)? / right.float(sign)?));
                }
                Self::Divide => a.checked_div(*b),
            };
            return exact.map(Value::Int).ok_or(EvalError::Range(sign));
        }
        let (a, b) = (left.float(sign)?, right.float(sign)?);
        let value = match self {
            Self::Add => a + b,
            Self::Subtract => a - b,
            Self::Multiply => a * b,
            Self::FloorDivide => (a / b).floor(),
            Self::Remainder => a.rem_euclid(b),
            Self::Divide => a / b,
        };
        if value.is_finite() { Ok(Value::Float(value)) } else { Err(EvalError::Range(sign)) }
    }
}

/// The axis that a number stands for, counted from the end if negative.
fn axis(name: &'static str, value: &Value, rank: usize) -> Result<usize, EvalError> {
    let number = value.int(name)?;
    let from_end = if number < 0 { i64::try_from(rank).unwrap_or(i64::MAX) + number } else { number };
    usize::try_from(from_end).map_err(|_| value.kind(name, "an axis"))
}

fn whole(name: &'static str, value: f64) -> Result<Value, EvalError> {
    // Beyond 2^53 a float no longer tells neighbours apart.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.abs() > EXACT {
        return Err(EvalError::Range(name));
    }
    #[allow(clippy::cast_possible_truncation, reason = "whole and below 2^53")]
    Ok(Value::Int(value as i64))
}

impl Function {
    fn apply(self, name: &'static str, values: &[Value], names: &dyn Names) -> Result<Value, EvalError> {
        match self {
            Self::Min | Self::Max => {
                let mut best = &values[0];
                best.float(name)?;
                for value in &values[1..] {
                    let order = value.float(name)?.total_cmp(&best.float(name)?);
                    if (self == Self::Min && order.is_lt()) || (self == Self::Max && order.is_gt()) {
                        best = value;
                    }
                }
                Ok(best.clone())
            }
            Self::Sqrt => {
                let value = values[0].float(name)?;
                if value >= 0.0 { Ok(Value::Float(value.sqrt())) } else { Err(EvalError::Range(name)) }
            }
            Self::Ceil => whole(name, values[0].float(name)?.ceil()),
            Self::Floor => whole(name, values[0].float(name)?.floor()),
            #[allow(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
            Self::F32 => Ok(Value::Float(f64::from(values[0].float(name)? as f32))),
            #[allow(clippy::cast_possible_truncation, reason = "rounding is what is asked for, by way of f32")]
            Self::Bf16 => Ok(Value::Float(bf16::from_f32(values[0].float(name)? as f32).to_f64())),
            Self::Exists => Ok(Value::Bool(names.shape(values[0].text(name)?).is_some())),
            Self::ShapeOf => {
                let tensor = values[0].text(name)?;
                let Some(shape) = names.shape(tensor) else {
                    return Ok(Value::Absent(Arc::new(Absent::Tensor(tensor.to_owned()))));
                };
                let extent = shape.get(axis(name, &values[1], shape.len())?).and_then(|e| i64::try_from(*e).ok());
                extent.map(Value::Int).ok_or_else(|| values[1].kind(name, "an axis of the tensor"))
            }
            Self::Count => {
                let count = names.count(values[0].text(name)?);
                i64::try_from(count).map(Value::Int).map_err(|_| EvalError::Range(name))
            }
            Self::View(function) => function.apply(name, values),
        }
    }
}

impl ViewFunction {
    fn apply(self, name: &'static str, values: &[Value]) -> Result<Value, EvalError> {
        if let Self::Concat | Self::Stack = self {
            let views = values[1..].iter().map(|value| value.view(name).cloned()).collect::<Result<Vec<_>, _>>()?;
            let rank = views[0].shape().rank();
            let axis = axis(name, &values[0], rank + usize::from(self == Self::Stack))?;
            let view = if self == Self::Stack { View::stack(axis, &views) } else { View::concat(axis, &views) };
            return Ok(Value::View(view?));
        }
        if self == Self::Fill {
            return Self::fill(name, values);
        }
        let view = values[0].view(name)?;
        let rank = view.shape().rank();
        let axis = |at: usize| axis(name, &values[at], rank);
        let natural = |at: usize| values[at].natural(name);
        let result = match self {
            Self::Transpose => view.reverse_axes(),
            Self::Permute => {
                let axes = (1..values.len()).map(axis).collect::<Result<Vec<_>, _>>()?;
                view.transpose(&axes)?
            }
            Self::Swap => {
                let mut axes: Vec<usize> = (0..rank).collect();
                let (a, b) = (axis(1)?, axis(2)?);
                if a >= rank || b >= rank {
                    return Err(ViewError::Axis { op: "swap", axis: a.max(b), shape: view.shape().clone() }.into());
                }
                axes.swap(a, b);
                view.transpose(&axes)?
            }
            Self::Reshape => {
                view.reshape(&Shape::try_new(&Self::extents(name, view, &values[1..])?).map_err(ViewError::from)?)?
            }
            Self::Slice => {
                let step = if values.len() > 4 { natural(4)? } else { 1 };
                view.slice(axis(1)?, natural(2)?, natural(3)?, step)?
            }
            Self::Pad => view.pad(axis(1)?, natural(2)?, natural(3)?)?,
            Self::CutOrPad => {
                let (axis, wanted) = (axis(1)?, natural(2)?);
                let extent = view.shape().extents().get(axis).copied().unwrap_or(0);
                if wanted <= extent { view.slice(axis, 0, wanted, 1)? } else { view.pad(axis, 0, wanted - extent)? }
            }
            Self::Cast => view.cast(Self::dtype(name, &values[1])?)?,
            Self::Mul => view.multiply(values[1].constant(name)?, false, Keep::Operand)?,
            Self::MulFlush => view.multiply(values[1].constant(name)?, true, Keep::Operand)?,
            Self::MulF32 => view.multiply(values[1].constant(name)?, false, Keep::F32)?,
            Self::Add => view.add(values[1].constant(name)?, Keep::Operand)?,
            Self::AddF32 => view.add(values[1].constant(name)?, Keep::F32)?,
            Self::Extent => {
                let extent = view.shape().extents().get(axis(1)?).and_then(|extent| i64::try_from(*extent).ok());
                return extent.map(Value::Int).ok_or_else(|| values[1].kind(name, "an axis of the view"));
            }
            Self::Rank | Self::Concat | Self::Stack | Self::Fill => {
                return i64::try_from(rank).map(Value::Int).map_err(|_| EvalError::Range(name));
            }
        };
        Ok(Value::View(result))
    }

    fn dtype(name: &'static str, value: &Value) -> Result<DType, EvalError> {
        let text = value.text(name)?;
        DType::from_user(text).ok_or_else(|| EvalError::DType(text.to_owned()))
    }

    fn fill(name: &'static str, values: &[Value]) -> Result<Value, EvalError> {
        let dtype = Self::dtype(name, &values[1])?;
        let extents = values[2..].iter().map(|value| value.natural(name)).collect::<Result<Vec<_>, _>>()?;
        let shape = Shape::try_new(&extents).map_err(ViewError::from)?;
        let constant = values[0].constant(name)?;
        if constant.to_bits() == 0 && dtype != DType::F8E8M0 {
            return Ok(Value::View(View::fill(shape, Element::zero(dtype))));
        }
        Ok(Value::View(View::fill(shape, Element::f32(constant)).cast(dtype)?))
    }

    /// Extents with the one that is -1 worked out.
    fn extents(name: &'static str, view: &View, values: &[Value]) -> Result<Vec<u64>, EvalError> {
        let mut open = None;
        let mut extents = Vec::with_capacity(values.len());
        for (at, value) in values.iter().enumerate() {
            if value.int(name)? == -1 && open.is_none() {
                open = Some(at);
                extents.push(1);
            } else {
                extents.push(value.natural(name)?);
            }
        }
        if let Some(at) = open {
            let known = extents.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
            let known = known.ok_or(EvalError::Range(name))?;
            // An extent that does not come out even is left for the reshape itself to refuse.
            extents[at] = view.shape().elements().checked_div(known).unwrap_or(0);
        }
        Ok(extents)
    }
}
