//! The operators of expressions.

use super::value::{EvalError, ExprValue};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Or,
    And,
    Equal,
    Unequal,
    Compare(Compare),
    Arithmetic(Arithmetic),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
}

/// Whether two values are equal. Values of different kinds are not, but a whole number may equal a fraction.
pub(super) fn equal(left: &ExprValue, right: &ExprValue) -> bool {
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

impl Compare {
    pub(super) fn apply(self, left: f64, right: f64) -> bool {
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
    pub(super) fn apply(self, sign: &'static str, left: &ExprValue, right: &ExprValue) -> Result<ExprValue, EvalError> {
        if let (ExprValue::Int(a), ExprValue::Int(b)) = (left, right) {
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
                    return Ok(ExprValue::Float(left.float(sign)? / right.float(sign)?));
                }
                Self::Divide => a.checked_div(*b),
            };
            return exact.map(ExprValue::Int).ok_or(EvalError::Range(sign));
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
        if value.is_finite() { Ok(ExprValue::Float(value)) } else { Err(EvalError::Range(sign)) }
    }
}
