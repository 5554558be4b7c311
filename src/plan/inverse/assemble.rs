//! Putting the parts of a target together, and finding what no leaf holds.

use std::collections::BTreeMap;

use ckfs_tensor::View;

use super::invert::Places;

/// That no part has `start..stop` of an axis.
fn missing(axis: usize, start: u64, stop: u64, extent: u64) -> String {
    format!("no leaf holds {start}..{stop} of axis {axis}, whose extent is {extent}")
}

/// That two parts have the same elements.
fn twice(axis: usize) -> String {
    format!("two leaves hold the same part of axis {axis}")
}

/// Parts of a view, each with its places by axis.
type Parts = Vec<(Vec<Places>, View)>;

/// The tensor of these parts, which have the same places on all axes before `axis`. Elements that no part has come from `rest`, a
/// tensor of the same shape and dtype.
///
/// # Errors
/// Elements that no part has, or that two have.
pub(super) fn assemble(extents: &[u64], axis: usize, mut parts: Parts, rest: Option<&View>) -> Result<View, String> {
    let Some(extent) = extents.get(axis).copied() else {
        return match (parts.pop(), parts.is_empty()) {
            (Some((_, view)), true) => Ok(view),
            (None, _) => Err(missing(0, 0, 1, 1)),
            (Some(_), false) => Err(twice(axis.saturating_sub(1))),
        };
    };
    let mut groups: BTreeMap<Places, Parts> = BTreeMap::new();
    for (places, view) in parts {
        groups.entry(places[axis]).or_default().push((places, view));
    }
    let group = |places: Places, parts| {
        let rest = rest.map(|rest| rest.slice(axis, places.start, places.end(), places.step)).transpose()?;
        assemble(extents, axis + 1, parts, rest.as_ref())
    };
    if let Some(first) = groups.keys().find(|places| places.step > 1).copied() {
        return interleave(extent, axis, first.step, groups, &group);
    }
    let mut views = Vec::with_capacity(groups.len());
    let mut at = 0;
    let gap = |at: u64, stop: u64| match rest {
        Some(rest) => Ok(rest.slice(axis, at, stop, 1)?),
        None => Err(missing(axis, at, stop, extent)),
    };
    for (places, parts) in groups.into_iter().filter(|(places, _)| places.count > 0) {
        if places.start < at {
            return Err(twice(axis));
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

/// Joins parts of which each has every `step`th place of an axis.
fn interleave(
    extent: u64,
    axis: usize,
    step: u64,
    groups: BTreeMap<Places, Parts>,
    group: &dyn Fn(Places, Parts) -> Result<View, String>,
) -> Result<View, String> {
    let count = extent / step;
    let mut views = Vec::with_capacity(groups.len());
    for (places, parts) in groups {
        let expected = Places { start: views.len() as u64, step: if count > 1 { step } else { 1 }, count };
        if places != expected || !extent.is_multiple_of(step) {
            return Err(format!("the parts of axis {axis} do not interleave regularly"));
        }
        views.push(group(places, parts)?);
    }
    if views.len() as u64 != step {
        let start = views.len() as u64;
        return Err(missing(axis, start, start + 1, extent));
    }
    let mut extents = views[0].shape().extents().to_vec();
    extents[axis] = extent;
    Ok(View::stack(axis + 1, &views)?.reshape_to(&extents)?)
}
