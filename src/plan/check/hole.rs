//! The report of a tensor that some layers lack.

use std::collections::BTreeSet;

use ckfs_tensor::Shape;

use super::super::name_group::{NameGroup, layers_text};

/// A tensor that some layers lack or have in another shape, without a reason in the pattern of layers or in
/// `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hole {
    /// Its name, with `*` for the layer. Several experts are one group.
    pub group: NameGroup,
    /// Layers that have it.
    pub present: BTreeSet<u64>,
    /// Layers that lack it or have it in another shape.
    pub absent: BTreeSet<u64>,
    /// The usual shape and the shape in the first layer that differs, if the layers differ in shape.
    pub shapes: Option<(Shape, Shape)>,
    /// Whether the layers differ in width as a whole: other tensors of the same layers have the same other extent, or the widths follow
    /// no pattern. Such a model is pruned, and nothing is lost.
    pub is_width: bool,
    /// Whether the layers that differ have several shapes.
    pub has_several: bool,
    /// The first of the tensors that are missing or have another shape.
    pub example: String,
    /// Whether it belongs to the text model.
    pub of_text: bool,
}

impl std::fmt::Display for Hole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (present, absent) = (layers_text(&self.present), layers_text(&self.absent));
        let (one, several) = (self.absent.len() == 1, self.present.len() > 1);
        let have = if several { "have" } else { "has" };
        let has = if one { "has" } else { "have" };
        write!(f, "{}: ", self.group.counted())?;
        match &self.shapes {
            None => write!(f, "{present} {have} it, {absent} {} it", if one { "lacks" } else { "lack" }),
            Some((usual, other)) if self.has_several => {
                write!(f, "{present} {have} shape {usual}, {absent} {has} others, the first of them {other}")
            }
            Some((usual, other)) => write!(f, "{present} {have} shape {usual}, {absent} {has} {other}"),
        }
    }
}
