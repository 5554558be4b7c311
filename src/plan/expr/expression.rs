//! Parsed expressions and texts with expressions in braces, and their values.

use std::{fmt, sync::Arc};

use super::{
    function::{Call, Function},
    value::{Absent, EvalError, ExprValue, NameScope},
};

/// Most numbers of a list.
const LIST_MAX: i64 = 1 << 20;

/// A node of a parsed expression.
#[derive(Clone, Debug)]
pub(super) enum ExprNode {
    Value(ExprValue),
    Text(TextTemplate),
    Name(Arc<str>),
    Config(Vec<String>),
    Mesh(String),
    Not(Box<ExprNode>),
    Negative(Box<ExprNode>),
    If(Box<[ExprNode; 3]>),
    Coalesce(Box<[ExprNode; 2]>),
    /// The sign of the operator, and the operands.
    Binary(&'static str, Box<[ExprNode; 2]>),
    Call(&'static Function, Vec<ExprNode>),
    /// Numbers, and ranges without their end.
    List(Vec<(ExprNode, Option<ExprNode>)>),
}

/// A parsed expression.
#[derive(Clone, Debug)]
pub struct Expr {
    pub(super) node: ExprNode,
    /// The names that it uses, in order, with repetitions.
    pub(crate) names: Vec<Arc<str>>,
}

/// A text with expressions in braces: `layers.{l}.{2*i+1}`. Doubled braces stand for themselves.
#[derive(Clone, Debug)]
pub struct TextTemplate {
    pub(super) parts: Vec<(String, Option<ExprNode>)>,
    /// The names that it uses, in order, with repetitions.
    pub(crate) names: Vec<Arc<str>>,
}

impl Expr {
    /// Its value.
    ///
    /// # Errors
    /// [`EvalError`].
    pub(crate) fn eval(&self, names: &dyn NameScope) -> Result<ExprValue, EvalError> {
        self.node.eval(names)
    }
}

impl TextTemplate {
    /// The text with values filled in.
    ///
    /// # Errors
    /// [`EvalError`], also if a value is not a number, text, true or false.
    pub(crate) fn eval(&self, names: &dyn NameScope) -> Result<String, EvalError> {
        use fmt::Write as _;
        let mut text = String::new();
        for (literal, node) in &self.parts {
            text.push_str(literal);
            let Some(node) = node else { continue };
            let value = node.eval(names)?;
            if matches!(value, ExprValue::Absent(_) | ExprValue::View(_) | ExprValue::List(_)) {
                return Err(value.kind("template", "a number or a text"));
            }
            write!(text, "{value}").expect("a string takes all that is written");
        }
        Ok(text)
    }
}

impl ExprNode {
    fn eval(&self, names: &dyn NameScope) -> Result<ExprValue, EvalError> {
        match self {
            Self::Value(value) => Ok(value.clone()),
            Self::Text(template) => Ok(ExprValue::Text(template.eval(names)?.into())),
            Self::Name(name) => names.name(name),
            Self::Config(path) => {
                Ok(names.config(path).unwrap_or_else(|| ExprValue::Absent(Arc::new(Absent::Config(path.join("."))))))
            }
            Self::Mesh(axis) => Ok(match names.mesh(axis) {
                Some(size) => ExprValue::whole("mesh", size)?,
                None => ExprValue::Absent(Arc::new(Absent::MeshAxis(axis.clone()))),
            }),
            Self::Not(of) => Ok(ExprValue::Bool(!of.eval(names)?.bool("!")?)),
            Self::Negative(of) => {
                let value = of.eval(names)?;
                if let ExprValue::Int(value) = value {
                    return value.checked_neg().map(ExprValue::Int).ok_or_else(|| EvalError::range("-"));
                }
                Ok(ExprValue::Float(-value.float("-")?))
            }
            Self::If(of) => {
                let [condition, yes, no] = &**of;
                if condition.eval(names)?.bool("if")? { yes.eval(names) } else { no.eval(names) }
            }
            Self::Coalesce(of) => {
                let [first, second] = &**of;
                let value = first.eval(names)?;
                if let ExprValue::Absent(_) = value { second.eval(names) } else { Ok(value) }
            }
            Self::Binary(sign, of) => {
                let left = of[0].eval(names)?;
                let right = || of[1].eval(names);
                Ok(match *sign {
                    "||" => ExprValue::Bool(left.bool(sign)? || right()?.bool(sign)?),
                    "&&" => ExprValue::Bool(left.bool(sign)? && right()?.bool(sign)?),
                    "==" => ExprValue::Bool(equal(&left, &right()?)),
                    "!=" => ExprValue::Bool(!equal(&left, &right()?)),
                    "<" | "<=" | ">" | ">=" => {
                        let order = left.float(sign)?.total_cmp(&right()?.float(sign)?);
                        ExprValue::Bool(match *sign {
                            "<" => order.is_lt(),
                            "<=" => order.is_le(),
                            ">" => order.is_gt(),
                            _ => order.is_ge(),
                        })
                    }
                    _ => arithmetic(sign, &left, &right()?)?,
                })
            }
            Self::Call((name, _, _, apply), of) => {
                let values = of.iter().map(|node| node.eval(names)).collect::<Result<Vec<_>, _>>()?;
                apply(&Call { name, values: &values, names })
            }
            Self::List(of) => {
                let mut numbers = Vec::new();
                for (first, end) in of {
                    let first = first.eval(names)?.int("list")?;
                    let end = end.as_ref().map(|end| end.eval(names).and_then(|end| end.int("list"))).transpose()?;
                    let end = end.or(first.checked_add(1)).ok_or_else(|| EvalError::range("list"))?;
                    if end.saturating_sub(first) > LIST_MAX
                        || numbers.len() as u64 + end.abs_diff(first) > LIST_MAX.unsigned_abs()
                    {
                        return Err(EvalError::range("list"));
                    }
                    numbers.extend(first..end);
                }
                Ok(ExprValue::List(numbers.into()))
            }
        }
    }
}

/// Whether two values are equal. Values of different kinds are not, but a whole number may equal a fraction.
fn equal(left: &ExprValue, right: &ExprValue) -> bool {
    match (left, right) {
        (ExprValue::Text(left), ExprValue::Text(right)) => left == right,
        (ExprValue::Bool(left), ExprValue::Bool(right)) => left == right,
        (ExprValue::Absent(_), ExprValue::Absent(_)) => true,
        (left, right) => match (left.float("=="), right.float("==")) {
            (Ok(left), Ok(right)) => left.total_cmp(&right).is_eq(),
            _ => false,
        },
    }
}

/// A sum, difference, product, quotient or remainder.
fn arithmetic(sign: &'static str, left: &ExprValue, right: &ExprValue) -> Result<ExprValue, EvalError> {
    if let (ExprValue::Int(a), ExprValue::Int(b)) = (left, right) {
        let exact = match sign {
            "+" => a.checked_add(*b),
            "-" => a.checked_sub(*b),
            "*" => a.checked_mul(*b),
            "//" => {
                let quotient = a.checked_div_euclid(*b);
                // Euclid's quotient rounds up for a negative divisor that does not divide.
                quotient.and_then(|quotient| {
                    if *b < 0 && a.rem_euclid(*b) != 0 { quotient.checked_sub(1) } else { Some(quotient) }
                })
            }
            "%" => a.checked_rem_euclid(*b),
            _ if a.checked_rem(*b).is_some_and(|rest| rest != 0) => {
                return Ok(ExprValue::Float(left.float(sign)? / right.float(sign)?));
            }
            _ => a.checked_div(*b),
        };
        return exact.map(ExprValue::Int).ok_or_else(|| EvalError::range(sign));
    }
    let (a, b) = (left.float(sign)?, right.float(sign)?);
    let value = match sign {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "//" => (a / b).floor(),
        "%" => a.rem_euclid(b),
        _ => a / b,
    };
    if value.is_finite() { Ok(ExprValue::Float(value)) } else { Err(EvalError::range(sign)) }
}
