//! Which of the last two axes of fused experts are the inputs.
//!
//! Programs store the matrices of all experts as `[experts, out, in]` or as `[experts, in, out]`. A tensor that is not square
//! shows it, as `config.json` says how long the hidden axis is. A square one does not: it is read as the others of the model
//! are, and where the program that the model is made for would read it otherwise, the user decides.

use ckfs_config::value::Choice;

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

impl Choice for Order {
    const WHAT: &'static str = PARAMETER;
    const WORDS: &'static [(&'static str, Self)] = &[("out_in", Self::OutIn), ("in_out", Self::InOut)];
}

/// The orders that the last two extents of fused experts may have, where the model has `hidden` elements on its hidden axis: both if
/// they are square, none if neither axis is the hidden one.
pub(super) fn fitting(projection: Projection, shape: &[u64], hidden: Option<u64>) -> &'static [Order] {
    let &[_, before_last, last] = shape else { return &[] };
    // Without a configuration, the order is that of all other matrices.
    let Some(hidden) = hidden else { return &[Order::OutIn] };
    let (inputs_last, inputs_first) = match projection {
        Projection::Gate | Projection::Up | Projection::GateUp => (last == hidden, before_last == hidden),
        Projection::Down => (before_last == hidden, last == hidden),
    };
    match (inputs_last, inputs_first) {
        (true, true) => &[Order::OutIn, Order::InOut],
        (true, false) => &[Order::OutIn],
        (false, true) => &[Order::InOut],
        (false, false) => &[],
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

    /// Notes a tensor that fits these orders.
    pub(super) fn see(&mut self, name: &str, fitting: &[Order]) {
        let [order] = fitting else { return };
        let place = if *order == Order::OutIn { &mut self.out_in } else { &mut self.in_out };
        place.get_or_insert_with(|| name.to_owned());
    }

    /// The order of a tensor that fits these. None: it is not of the model's shape. A square tensor has the order of the other
    /// tensors. `is_fixed` tells whether the model's own code reads all of one order.
    ///
    /// # Errors
    /// The tensor is square, and its order is not known.
    pub(super) fn order(
        &self,
        (name, shape): (&str, &[u64]),
        fitting: &[Order],
        is_fixed: bool,
    ) -> Result<Option<Order>, String> {
        match (fitting, self.told) {
            ([] | [_], _) => Ok(fitting.first().copied()),
            (_, Some(told)) => Ok(Some(told)),
            (_, None) => {
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

    /// The order in which transformers reads a tensor that fits these: a square one as it is.
    pub(crate) fn as_loaded(&self, fitting: &[Order]) -> Option<Order> {
        if let [_, _] = fitting { Some(self.told.unwrap_or(Order::OutIn)) } else { fitting.first().copied() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[Order] = &[Order::OutIn, Order::InOut];

    #[test]
    fn a_square_tensor_has_the_order_of_the_others_or_is_ambiguous() {
        let (gate_up, down) = (Projection::GateUp, Projection::Down);
        assert_eq!(fitting(gate_up, &[4, 48, 32], Some(32)), [Order::OutIn]);
        assert_eq!(fitting(gate_up, &[4, 32, 48], Some(32)), [Order::InOut]);
        assert_eq!(fitting(down, &[4, 32, 24], Some(32)), [Order::OutIn]);
        assert_eq!(fitting(down, &[4, 24, 32], Some(32)), [Order::InOut]);
        assert_eq!(fitting(down, &[4, 32, 32], Some(32)), BOTH);
        assert_eq!(fitting(down, &[4, 24, 48], Some(32)), []);
        assert_eq!(fitting(down, &[24, 48], Some(32)), []);

        let order = |orientation: &Orientation, is_fixed| orientation.order(("x", &[4, 32, 32]), BOTH, is_fixed);
        let mut seen = Orientation::new(None);
        assert_eq!(order(&seen, true), Ok(Some(Order::OutIn)));
        assert!(order(&seen, false).unwrap_err().contains("--set experts_order=in_out decides"));
        seen.see("a", &[Order::OutIn]);
        assert_eq!(order(&seen, false), Ok(Some(Order::OutIn)));
        seen.see("b", &[Order::InOut]);
        assert!(order(&seen, true).unwrap_err().contains("b is stored"));
        assert_eq!(order(&Orientation { told: Some(Order::InOut), ..seen }, true), Ok(Some(Order::InOut)));
    }
}
