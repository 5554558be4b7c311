//! Tensors that are made of others, such as the matrix of one expert in a tensor of all experts.
//!
//! Programs store the experts of a layer in several ways, and codes too. The plan decides which way its layouts see, and asks the
//! checkpoint for tensors under those names. The bytes stay where they are: a composed tensor is a view of its parts.

use ckfs_tensor::{DType, TensorId, View, ViewError};

/// A tensor that is made of others.
#[derive(Clone, Debug)]
pub struct Composed {
    /// Its name.
    pub name: String,
    /// Type of its elements, which is that of its parts.
    pub dtype: DType,
    /// Its extents.
    pub shape: Vec<u64>,
    /// The tensor that it is a part of.
    pub of: TensorId,
    /// The part.
    pub part: ExpertPart,
    /// The tensor itself, if it is more than such a part.
    pub view: Option<View>,
}

/// A part of a tensor that holds the matrices of several experts or projections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertPart {
    /// The index on axis 0, which is then dropped.
    pub expert: Option<u64>,
    /// Elements of an axis, counted after the axis of experts is dropped: axis, start, stop and step.
    pub range: Option<(usize, u64, u64, u64)>,
    /// Whether the last two axes are exchanged, after all else.
    pub turned: bool,
}

impl ExpertPart {
    /// The extents of the part of a tensor of these extents. `None` if the tensor has no such part.
    pub fn shape(&self, of: &[u64]) -> Option<Vec<u64>> {
        let mut shape = of.to_vec();
        if self.expert.is_some_and(|expert| shape.is_empty() || expert >= shape.remove(0)) {
            return None;
        }
        if let Some((axis, start, stop, step)) = self.range {
            let extent = shape.get_mut(axis).filter(|extent| step > 0 && start <= stop && stop <= **extent)?;
            *extent = (stop - start).div_ceil(step);
        }
        if self.turned {
            let last = shape.len().checked_sub(1).filter(|last| *last > 0)?;
            shape.swap(last - 1, last);
        }
        Some(shape)
    }

    /// The part of a view.
    ///
    /// # Errors
    /// The view has no such part.
    pub fn of_view(&self, mut view: View) -> Result<View, ViewError> {
        if let Some(expert) = self.expert {
            view = view.slice(0, expert, expert + 1, 1)?;
            view = view.reshape_to(&view.shape().extents()[1..])?;
        }
        if let Some((axis, start, stop, step)) = self.range {
            view = view.slice(axis, start, stop, step)?;
        }
        if self.turned {
            let rank = view.shape().rank();
            view = view.swap_axes(rank.saturating_sub(2), rank.saturating_sub(1))?;
        }
        Ok(view)
    }
}

impl Composed {
    /// A part of a tensor, with its own name. `None` if the tensor has no such part.
    pub fn part(name: String, (of, dtype, shape): (TensorId, DType, &[u64]), part: ExpertPart) -> Option<Self> {
        Some(Self { name, dtype, shape: part.shape(shape)?, of, part, view: None })
    }

    /// A view, which stands in the place of a tensor.
    pub fn view(name: String, of: TensorId, view: View) -> Self {
        let (dtype, shape) = (view.dtype(), view.shape().extents().to_vec());
        Self { name, dtype, shape, of, part: ExpertPart::default(), view: Some(view) }
    }
}

#[cfg(test)]
mod tests {
    use ckfs_tensor::Shape;

    use super::*;

    #[test]
    fn a_part_has_the_shape_of_its_view() {
        let shape = Shape::try_new(&[4, 6, 10]).unwrap();
        let source = ckfs_tensor::SourceTensor { id: TensorId(0), dtype: DType::BF16, shape };
        let view = View::source(source);
        let rows: [(ExpertPart, Option<&[u64]>); 6] = [
            (ExpertPart::default(), Some(&[4, 6, 10])),
            (ExpertPart { expert: Some(3), ..ExpertPart::default() }, Some(&[6, 10])),
            (ExpertPart { expert: Some(4), ..ExpertPart::default() }, None),
            (ExpertPart { expert: Some(0), range: Some((0, 3, 6, 1)), turned: true }, Some(&[10, 3])),
            (ExpertPart { expert: Some(0), range: Some((1, 1, 10, 2)), turned: false }, Some(&[6, 5])),
            (ExpertPart { expert: None, range: None, turned: true }, Some(&[4, 10, 6])),
        ];
        for (part, expected) in rows {
            assert_eq!(part.shape(&[4, 6, 10]).as_deref(), expected, "{part:?}");
            let made = part.of_view(view.clone()).ok().map(|view| view.shape().extents().to_vec());
            assert_eq!(made.as_deref(), expected, "{part:?}");
        }
    }
}
