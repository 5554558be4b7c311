//! Putting the parts of a target together, and finding what no leaf holds.

use std::collections::BTreeMap;

use ckfs_tensor::{Shape, View, ViewError};

use super::invert::Places;

/// Why parts are not a whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Incomplete {
    /// No part has these elements.
    #[error("no leaf holds {start}..{stop} of axis {axis}, whose extent is {extent}")]
    Missing {
        /// The axis.
        axis: usize,
        /// First missing place.
        start: u64,
        /// One past the last one.
        stop: u64,
        /// Extent of the axis.
        extent: u64,
    },
    /// Two parts have the same elements.
    #[error("two leaves hold the same part of axis {axis}")]
    Twice {
        /// The axis.
        axis: usize,
    },
    /// Parts interleave in a way that is not regular.
    #[error("the parts of axis {axis} do not interleave regularly")]
    Irregular {
        /// The axis.
        axis: usize,
    },
    /// Parts that do not fit each other.
    #[error(transparent)]
    View(#[from] ViewError),
}

/// The tensor of these parts. Elements that no part has come from `rest`, a tensor of the same shape and dtype.
///
/// # Errors
/// [`Incomplete`].
pub(super) fn assemble(
    shape: &Shape,
    parts: Vec<(Vec<Places>, View)>,
    rest: Option<&View>,
) -> Result<View, Incomplete> {
    join(shape.extents(), 0, parts, rest)
}

/// Joins parts that have the same places on all axes before `axis`.
fn join(
    extents: &[u64],
    axis: usize,
    mut parts: Vec<(Vec<Places>, View)>,
    rest: Option<&View>,
) -> Result<View, Incomplete> {
    let Some(extent) = extents.get(axis).copied() else {
        return match (parts.pop(), parts.is_empty()) {
            (Some((_, view)), true) => Ok(view),
            (None, _) => Err(Incomplete::Missing { axis: 0, start: 0, stop: 1, extent: 1 }),
            (Some(_), false) => Err(Incomplete::Twice { axis: axis.saturating_sub(1) }),
        };
    };
    let mut groups: BTreeMap<Places, Vec<(Vec<Places>, View)>> = BTreeMap::new();
    for (places, view) in parts {
        groups.entry(places[axis]).or_default().push((places, view));
    }
    let group = |places: Places, parts| {
        let rest = rest.map(|rest| rest.slice(axis, places.start, places.end(), places.step)).transpose()?;
        join(extents, axis + 1, parts, rest.as_ref())
    };
    if let Some(first) = groups.keys().find(|places| places.step > 1).copied() {
        return interleave(extent, axis, first.step, groups, &group);
    }
    let mut views = Vec::with_capacity(groups.len());
    let mut at = 0;
    let gap = |at: u64, stop: u64| match rest {
        Some(rest) => Ok(rest.slice(axis, at, stop, 1)?),
        None => Err(Incomplete::Missing { axis, start: at, stop, extent }),
    };
    for (places, parts) in groups.into_iter().filter(|(places, _)| places.count > 0) {
        if places.start < at {
            return Err(Incomplete::Twice { axis });
        }
        if places.start > at {
            views.push(gap(at, places.start)?);
        }
        views.push(group(places, parts)?);
        at = places.end();
    }
    if at < extent || views.is_empty() {
        views.push(gap(at, extent)?);
    }
    Ok(View::concat(axis, &views)?)
}

/// Parts of a view, each with its places by axis.
type Parts = Vec<(Vec<Places>, View)>;

/// Joins parts of which each has every `step`th place of an axis.
fn interleave(
    extent: u64,
    axis: usize,
    step: u64,
    groups: BTreeMap<Places, Parts>,
    group: &dyn Fn(Places, Parts) -> Result<View, Incomplete>,
) -> Result<View, Incomplete> {
    let count = extent / step;
    let mut views = Vec::with_capacity(groups.len());
    for (places, parts) in groups {
        let expected = Places { start: views.len() as u64, step: if count > 1 { step } else { 1 }, count };
        if places != expected || !extent.is_multiple_of(step) {
            return Err(Incomplete::Irregular { axis });
        }
        views.push(group(places, parts)?);
    }
    if views.len() as u64 != step {
        let start = views.len() as u64;
        return Err(Incomplete::Missing { axis, start, stop: start + 1, extent });
    }
    let mut extents = views[0].shape().extents().to_vec();
    extents[axis] = extent;
    let shape = Shape::try_new(&extents).map_err(ViewError::from)?;
    Ok(View::stack(axis + 1, &views)?.reshape(&shape)?)
}
