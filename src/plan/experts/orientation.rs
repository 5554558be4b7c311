//! Which of the last two axes of fused experts are the inputs.
//!
//! Programs store the matrices of all experts as `[experts, out, in]` or as `[experts, in, out]`. A tensor that is not square
//! shows it, as `config.json` says how long the hidden axis is. A square one does not: it is read as the others of the model
//! are, and where the program that the model is made for would read it otherwise, the user decides.

use super::spelling::Projection;

/// The order of the last two axes of fused experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// `[experts, out, in]`, as matrices of Hugging Face are.
    OutIn,
    /// `[experts, in, out]`.
    InOut,
}

/// Name of the parameter that decides the order.
pub(crate) const PARAMETER: &str = "experts_order";

impl Order {
    /// The value of the parameter.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::OutIn => "out_in",
            Self::InOut => "in_out",
        }
    }

    /// The order of a value of the parameter.
    pub(crate) fn of_word(word: &str) -> Option<Self> {
        [Self::OutIn, Self::InOut].into_iter().find(|order| order.word() == word)
    }
}

/// What a shape shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShapeHint {
    Order(Order),
    /// It is square.
    Either,
    /// Neither axis is the hidden one.
    Neither,
}

/// What the last two extents of fused experts show, where the model has `hidden` elements on its hidden axis.
pub(super) fn shown(projection: Projection, shape: &[u64], hidden: Option<u64>) -> ShapeHint {
    let &[_, before_last, last] = shape else { return ShapeHint::Neither };
    // Without a configuration, the order is that of all other matrices.
    let Some(hidden) = hidden else { return ShapeHint::Order(Order::OutIn) };
    let (inputs_last, inputs_first) = match projection {
        Projection::Gate | Projection::Up | Projection::GateUp => (last == hidden, before_last == hidden),
        Projection::Down => (before_last == hidden, last == hidden),
    };
    match (inputs_last, inputs_first) {
        (true, true) => ShapeHint::Either,
        (true, false) => ShapeHint::Order(Order::OutIn),
        (false, true) => ShapeHint::Order(Order::InOut),
        (false, false) => ShapeHint::Neither,
    }
}

/// The orders that the tensors of a model show.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orientation {
    told: Option<Order>,
    /// A tensor of each order, if there is one.
    out_in: Option<String>,
    in_out: Option<String>,
}

impl Orientation {
    /// No tensor yet; `told` is the user's setting.
    pub(super) fn new(told: Option<Order>) -> Self {
        Self { told, ..Self::default() }
    }

    /// Notes what a tensor shows.
    pub(super) fn see(&mut self, name: &str, shown: ShapeHint) {
        let place = match shown {
            ShapeHint::Order(Order::OutIn) => &mut self.out_in,
            ShapeHint::Order(Order::InOut) => &mut self.in_out,
            ShapeHint::Either | ShapeHint::Neither => return,
        };
        place.get_or_insert_with(|| name.to_owned());
    }

    /// The order of a tensor that shows this. None: it is not of the model's shape. A square tensor has the order of the other
    /// tensors. `is_fixed` tells whether the model's own code reads all of one order.
    ///
    /// # Errors
    /// The tensor is square, and its order is not known.
    pub(super) fn order(
        &self,
        (name, shape): (&str, &[u64]),
        shown: ShapeHint,
        is_fixed: bool,
    ) -> Result<Option<Order>, String> {
        match (shown, self.told) {
            (ShapeHint::Neither, _) => Ok(None),
            (ShapeHint::Order(order), _) => Ok(Some(order)),
            (ShapeHint::Either, Some(told)) => Ok(Some(told)),
            (ShapeHint::Either, None) => {
                let why = match (&self.out_in, &self.in_out) {
                    (Some(_), None) => return Ok(Some(Order::OutIn)),
                    (None, None) if is_fixed => return Ok(Some(Order::OutIn)),
                    (_, Some(other)) => &format!(
                        "{other} is stored [experts, in, out], but transformers reads a square one as [experts, out, in]"
                    ),
                    (None, None) => "no other tensor of experts shows the order of its axes",
                };
                let (one, other) = (Order::OutIn.word(), Order::InOut.word());
                Err(format!(
                    "{name} has the shape {shape:?}, and both orientations fit: {why}; --set {PARAMETER}={one} or --set \
                     {PARAMETER}={other} decides"
                ))
            }
        }
    }

    /// The order in which transformers reads a tensor that shows this: a square one as it is.
    pub(crate) fn as_loaded(&self, shown: ShapeHint) -> Option<Order> {
        match shown {
            ShapeHint::Neither => None,
            ShapeHint::Order(order) => Some(order),
            ShapeHint::Either => Some(self.told.unwrap_or(Order::OutIn)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_square_tensor_has_the_order_of_the_others_or_is_ambiguous() {
        let (gate_up, down) = (Projection::GateUp, Projection::Down);
        assert_eq!(shown(gate_up, &[4, 48, 32], Some(32)), ShapeHint::Order(Order::OutIn));
        assert_eq!(shown(gate_up, &[4, 32, 48], Some(32)), ShapeHint::Order(Order::InOut));
        assert_eq!(shown(down, &[4, 32, 24], Some(32)), ShapeHint::Order(Order::OutIn));
        assert_eq!(shown(down, &[4, 24, 32], Some(32)), ShapeHint::Order(Order::InOut));
        assert_eq!(shown(down, &[4, 32, 32], Some(32)), ShapeHint::Either);
        assert_eq!(shown(down, &[4, 24, 48], Some(32)), ShapeHint::Neither);
        assert_eq!(shown(down, &[24, 48], Some(32)), ShapeHint::Neither);

        let order =
            |orientation: &Orientation, is_fixed| orientation.order(("x", &[4, 32, 32]), ShapeHint::Either, is_fixed);
        let mut seen = Orientation::new(None);
        assert_eq!(order(&seen, true), Ok(Some(Order::OutIn)));
        assert!(order(&seen, false).unwrap_err().contains("--set experts_order=in_out decides"));
        seen.see("a", ShapeHint::Order(Order::OutIn));
        assert_eq!(order(&seen, false), Ok(Some(Order::OutIn)));
        seen.see("b", ShapeHint::Order(Order::InOut));
        assert!(order(&seen, true).unwrap_err().contains("b is stored"));
        assert_eq!(order(&Orientation { told: Some(Order::InOut), ..seen }, true), Ok(Some(Order::InOut)));
    }
}
