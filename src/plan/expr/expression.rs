//! Parsed expressions and texts with expressions in braces, and their values.

use std::{fmt, sync::Arc};

use super::{
    function::Function,
    operator::{Binary, equal},
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
    Binary(&'static str, Binary, Box<[ExprNode; 2]>),
    Call(&'static str, Function, Vec<ExprNode>),
    /// Numbers, and ranges without their end.
    List(Vec<(ExprNode, Option<ExprNode>)>),
}

/// A parsed expression.
#[derive(Clone, Debug)]
pub struct Expr {
    pub(super) node: ExprNode,
    pub(super) text: Arc<str>,
}

/// A text with expressions in braces: `layers.{l}.{2*i+1}`. Doubled braces stand for themselves.
#[derive(Clone, Debug)]
pub struct TextTemplate {
    pub(super) parts: Vec<(String, Option<ExprNode>)>,
}

impl Expr {
    /// The source text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its value.
    ///
    /// # Errors
    /// [`EvalError`].
    pub(crate) fn eval(&self, names: &dyn NameScope) -> Result<ExprValue, EvalError> {
        self.node.eval(names)
    }

    /// Calls `visit` for each name used.
    pub(crate) fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        self.node.for_each_name(visit);
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
            match node.eval(names)? {
                value @ (ExprValue::Absent(_) | ExprValue::View(_) | ExprValue::List(_)) => {
                    return Err(value.kind("template", "a number or a text"));
                }
                value @ (ExprValue::Int(_) | ExprValue::Float(_) | ExprValue::Bool(_) | ExprValue::Text(_)) => {
                    write!(text, "{value}").expect("a string takes all that is written");
                }
            }
        }
        Ok(text)
    }

    /// Calls `visit` for each name used.
    pub(crate) fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        self.parts.iter().filter_map(|part| part.1.as_ref()).for_each(|node| node.for_each_name(visit));
    }
}

impl ExprNode {
    fn for_each_name(&self, visit: &mut dyn FnMut(&str)) {
        match self {
            Self::Value(_) | Self::Config(_) | Self::Mesh(_) => {}
            Self::Text(template) => template.for_each_name(visit),
            Self::Name(name) => visit(name),
            Self::Not(of) | Self::Negative(of) => of.for_each_name(visit),
            Self::If(of) => of.iter().for_each(|node| node.for_each_name(visit)),
            Self::Coalesce(of) | Self::Binary(_, _, of) => of.iter().for_each(|node| node.for_each_name(visit)),
            Self::Call(_, _, of) => of.iter().for_each(|node| node.for_each_name(visit)),
            Self::List(of) => {
                of.iter()
                    .flat_map(|(first, end)| [Some(first), end.as_ref()])
                    .flatten()
                    .for_each(|node| node.for_each_name(visit));
            }
        }
    }

    fn eval(&self, names: &dyn NameScope) -> Result<ExprValue, EvalError> {
        match self {
            Self::Value(value) => Ok(value.clone()),
            Self::Text(template) => Ok(ExprValue::Text(template.eval(names)?.into())),
            Self::Name(name) => names.name(name),
            Self::Config(path) => {
                Ok(names.config(path).unwrap_or_else(|| ExprValue::Absent(Arc::new(Absent::Config(path.join("."))))))
            }
            Self::Mesh(axis) => Ok(match names.mesh(axis) {
                Some(size) => i64::try_from(size).map(ExprValue::Int).map_err(|_| EvalError::Range("mesh"))?,
                None => ExprValue::Absent(Arc::new(Absent::MeshAxis(axis.clone()))),
            }),
            Self::Not(of) => Ok(ExprValue::Bool(!of.eval(names)?.bool("!")?)),
            Self::Negative(of) => match of.eval(names)? {
                ExprValue::Int(value) => value.checked_neg().map(ExprValue::Int).ok_or(EvalError::Range("-")),
                value @ (ExprValue::Float(_)
                | ExprValue::Bool(_)
                | ExprValue::Text(_)
                | ExprValue::Absent(_)
                | ExprValue::View(_)
                | ExprValue::List(_)) => Ok(ExprValue::Float(-value.float("-")?)),
            },
            Self::If(of) => {
                let [condition, yes, no] = &**of;
                if condition.eval(names)?.bool("if")? { yes.eval(names) } else { no.eval(names) }
            }
            Self::Coalesce(of) => {
                let [first, second] = &**of;
                let value = first.eval(names)?;
                if let ExprValue::Absent(_) = value { second.eval(names) } else { Ok(value) }
            }
            Self::Binary(sign, operator, of) => {
                let left = of[0].eval(names)?;
                let right = || of[1].eval(names);
                Ok(match operator {
                    Binary::Or => ExprValue::Bool(left.bool(sign)? || right()?.bool(sign)?),
                    Binary::And => ExprValue::Bool(left.bool(sign)? && right()?.bool(sign)?),
                    Binary::Equal => ExprValue::Bool(equal(&left, &right()?)),
                    Binary::Unequal => ExprValue::Bool(!equal(&left, &right()?)),
                    Binary::Compare(compare) => {
                        ExprValue::Bool(compare.apply(left.float(sign)?, right()?.float(sign)?))
                    }
                    Binary::Arithmetic(arithmetic) => arithmetic.apply(sign, &left, &right()?)?,
                })
            }
            Self::Call(name, function, of) => {
                let values = of.iter().map(|node| node.eval(names)).collect::<Result<Vec<_>, _>>()?;
                function.apply(name, &values, names)
            }
            Self::List(of) => {
                let mut numbers = Vec::new();
                for (first, end) in of {
                    let first = first.eval(names)?.int("list")?;
                    let end = end.as_ref().map(|end| end.eval(names).and_then(|end| end.int("list"))).transpose()?;
                    let end = end.or(first.checked_add(1)).ok_or(EvalError::Range("list"))?;
                    if end.saturating_sub(first) > LIST_MAX
                        || numbers.len() as u64 + end.abs_diff(first) > LIST_MAX.unsigned_abs()
                    {
                        return Err(EvalError::Range("list"));
                    }
                    numbers.extend(first..end);
                }
                Ok(ExprValue::List(numbers.into()))
            }
        }
    }
}
