//! Partition specs: which mesh axes split which axis of a tensor, and which part each device then holds.
//!
//! One axis is split as `torch.chunk` splits: `n` elements over `w` positions in chunks of `ceil(n / w)`. The last
//! positions may hold fewer elements, or none. Several mesh axes split one tensor axis in turn: the first one splits
//! the axis, the next one splits the part of each position. If every split is even, this equals JAX's partitioning over
//! the product of the mesh axes.

use std::ops::Range;

use ckfs_tensor::{PerAxis, Region, Shape};
use smallvec::SmallVec;

use super::super::mesh::Mesh;

/// Per tensor axis, the mesh axes (by number) that split it, the first outermost. Missing axes are not split.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Spec {
    axes: SmallVec<[SmallVec<[u8; 2]>; 4]>,
}

/// Half-open range that position `at` of `parts` holds of `length` elements, as `torch.chunk` splits.
pub fn chunk(whole: Range<u64>, parts: u64, at: u64) -> Range<u64> {
    let length = whole.end - whole.start;
    let size = length.div_ceil(parts);
    whole.start + (at * size).min(length)..whole.start + ((at + 1) * size).min(length)
}

impl Spec {
    /// The spec that splits nothing.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// Splits `axis` further by a mesh axis, inside those already there.
    ///
    /// # Panics
    /// If the mesh has more than 255 axes. The parser's limit on devices does not exclude this, as sizes may be 1, but
    /// no mesh has this number.
    pub fn split(&mut self, axis: usize, mesh_axis: usize) {
        if self.axes.len() <= axis {
            self.axes.resize(axis + 1, SmallVec::new());
        }
        self.axes[axis].push(u8::try_from(mesh_axis).expect("fewer than 256 mesh axes"));
    }

    /// Numbers of the mesh axes that split `axis`, the first outermost.
    pub(crate) fn mesh_axes(&self, axis: usize) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.axes.get(axis).map_or(&[][..], SmallVec::as_slice).iter().map(|axis| usize::from(*axis))
    }

    /// Whether no axis is split.
    pub fn is_replicated(&self) -> bool {
        self.axes.iter().all(SmallVec::is_empty)
    }

    /// Whether some axis is split by this mesh axis.
    pub fn uses(&self, mesh_axis: usize) -> bool {
        self.axes.iter().flatten().any(|axis| usize::from(*axis) == mesh_axis)
    }

    /// The region of a tensor of `shape` that the device at `coordinates` holds.
    ///
    /// # Panics
    /// If `coordinates` are not those of a device of `mesh`.
    pub fn region(&self, shape: &Shape, mesh: &Mesh, coordinates: &[u64]) -> Region {
        let part = |whole, index: usize| chunk(whole, mesh.axes()[index].size, coordinates[index]);
        let ranges =
            shape.extents().iter().enumerate().map(|(axis, extent)| self.mesh_axes(axis).fold(0..*extent, part));
        let ranges: SmallVec<[Range<u64>; 4]> = ranges.collect();
        Region::within(shape, &ranges).expect("a chunk of an extent lies within it, and there is one for each axis")
    }

    /// The indices of an axis at which the parts of some device begin or end inside the tensor, ascending.
    pub fn cuts(&self, axis: usize, shape: &Shape, mesh: &Mesh) -> Vec<u64> {
        let extent = shape.extents()[axis];
        let mut parts: Vec<Range<u64>> = std::iter::once(0..extent).collect();
        for mesh_axis in self.mesh_axes(axis) {
            let size = mesh.axes()[mesh_axis].size;
            let inner = |whole: Range<u64>| (0..size).map(move |at| chunk(whole.clone(), size, at));
            parts = parts.into_iter().flat_map(inner).filter(|part| !part.is_empty()).collect();
        }
        let mut cuts: Vec<u64> = parts.into_iter().flat_map(|part| [part.start, part.end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.retain(|cut| *cut > 0 && *cut < extent);
        cuts
    }

    /// The axes whose extents the mesh does not divide, as `(axis, parts)`.
    pub fn uneven(&self, shape: &Shape, mesh: &Mesh) -> impl Iterator<Item = (usize, u64)> {
        shape.extents().iter().enumerate().filter_map(|(axis, extent)| {
            let parts: u64 = self.mesh_axes(axis).map(|mesh_axis| mesh.axes()[mesh_axis].size).product();
            (!extent.is_multiple_of(parts)).then_some((axis, parts))
        })
    }

    /// Parts along each axis of a tensor of this rank.
    pub fn grid(&self, rank: usize, mesh: &Mesh) -> PerAxis {
        (0..rank).map(|axis| self.mesh_axes(axis).map(|mesh_axis| mesh.axes()[mesh_axis].size).product()).collect()
    }

    /// As JSON: per axis null, the name of a mesh axis, or a list of names: `[null, "fsdp", ["tensor", "fsdp"]]`.
    pub fn to_json(&self, rank: usize, mesh: &Mesh) -> serde_json::Value {
        let name = |axis: usize| serde_json::Value::from(mesh.axes()[axis].name.as_str());
        (0..rank)
            .map(|axis| {
                let mut names: Vec<_> = self.mesh_axes(axis).map(name).collect();
                match names.len() {
                    0 => serde_json::Value::Null,
                    1 => names.swap_remove(0),
                    _ => names.into(),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_of_torch() {
        let all = |n, w| (0..w).map(|at| chunk(0..n, w, at)).collect::<Vec<_>>();
        assert_eq!(all(6, 4), [0..2, 2..4, 4..6, 6..6]);
        assert_eq!(all(13, 4), [0..4, 4..8, 8..12, 12..13]);
        assert_eq!(all(2, 4), [0..1, 1..2, 2..2, 2..2]);
        assert_eq!(all(0, 3), [0..0, 0..0, 0..0]);
        assert_eq!(chunk(3..9, 4, 1), 5..7);
    }

    #[test]
    fn the_first_mesh_axis_splits_outermost() {
        // Tensor parallel first, fully sharded inside: 10 rows over 2 and 2 (torch's _StridedShard).
        let mesh = Mesh::parse("fsdp=2,tensor=2").unwrap();
        let mut spec = Spec::replicated();
        spec.split(0, 1);
        spec.split(0, 0);
        let shape = Shape::try_new(&[10]).unwrap();
        let rows: Vec<_> = (0..4)
            .map(|device| spec.region(&shape, &mesh, &mesh.coordinates(device)).ranges().next().unwrap())
            .collect();
        assert_eq!(rows, [0..3, 5..8, 3..5, 8..10]);
        assert_eq!(spec.uneven(&shape, &mesh).collect::<Vec<_>>(), [(0, 4)]);
        assert_eq!(spec.to_json(1, &mesh).to_string(), r#"[["tensor","fsdp"]]"#);
    }
}
