//! Tensors that transformers makes of others when it loads a repository: parts of one, several in one, axes exchanged, heads
//! permuted.
//!
//! A converter of the table has patterns of names, the names of what it makes, and operations. Tensors whose names become one
//! belong together; each operation takes the tensors that the one before has made, under the pattern or the name that each then has.

use std::{cmp::Reverse, collections::BTreeMap, slice};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::{Shape, View, ViewError};
use fancy_regex::Regex;
use serde::Deserialize;

use super::super::member;

/// An operation of a converter.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum LoadOperation {
    /// Equal parts along an axis, one for each name.
    Chunk { axis: usize },
    /// All tensors one after the other, in the order of the patterns.
    Concatenate { axis: usize },
    /// The tensors of each pattern on a new first axis.
    Stack,
    /// Rows of the queries, the keys and the values, as many as their heads have.
    Heads,
    /// Parts along an axis, one for each name, each as long as its terms together. A term is a factor, and members of the
    /// configuration by which it is multiplied. `defaults`: their values where the configuration has none.
    Split { axis: usize, sizes: Vec<Vec<(u64, Vec<String>)>>, defaults: BTreeMap<String, u64> },
    /// The first rows: as many as the member of the configuration `config` says.
    Rows { config: String, member: String, default: u64 },
    /// The tensors of each pattern in equal groups, one for each name: a group on a new first axis, and those of all patterns one
    /// after the other along an axis.
    Groups { axis: usize },
    /// Two axes exchanged.
    Transpose { axes: [usize; 2] },
    /// Pairs along an axis: all first ones, then all second ones.
    Interleave { axis: usize },
    /// The rows of each head as `Interleave` has them. `heads`: members of the configuration `config` that count them.
    Rope { config: String, heads: Vec<String>, default: u64, only: Option<Vec<String>> },
}

/// A row of the table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConverterRow {
    from: Vec<String>,
    to: Vec<String>,
    ops: Vec<LoadOperation>,
    #[serde(default)]
    pub(super) scope: Vec<String>,
}

/// A converter: patterns of names, names of what it makes, and how.
#[derive(Debug)]
pub(crate) struct LoadConverter {
    /// In the order in which their tensors are taken.
    from: Vec<Regex>,
    /// The text in place of the pattern's.
    pub(super) to: Vec<String>,
    ops: Vec<LoadOperation>,
}

/// Tensors by the pattern that they match, or by the text of the name that they then have.
type Labelled = Vec<(String, Vec<View>)>;

impl LoadConverter {
    pub(super) fn new(row: &ConverterRow) -> Result<Self, String> {
        let regex = |text: &String| Regex::new(text).map_err(|error| error.to_string());
        let from = row.from.iter().map(regex).collect::<Result<_, _>>()?;
        Ok(Self { from, to: row.to.clone(), ops: row.ops.clone() })
    }

    /// The pattern that a name matches, and the text that it matches: the first in the name, of those that begin there the longest
    /// pattern's.
    pub(super) fn matched<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let found = self.from.iter().enumerate().filter_map(|(at, regex)| {
            let found = regex.find(name).ok().flatten()?;
            Some(((found.start(), Reverse(regex.as_str().len())), (at, found.as_str())))
        });
        found.min_by_key(|(order, _)| *order).map(|(_, found)| found)
    }

    /// How many patterns it has.
    pub(crate) fn patterns(&self) -> usize {
        self.from.len()
    }

    /// What is made of tensors, which are given for each pattern, and the name of each. `name` is that of the first.
    ///
    /// # Errors
    /// Why the tensors are none that transformers could convert.
    pub(crate) fn make(
        &self,
        name: &str,
        given: Vec<Vec<View>>,
        checkpoint: &Checkpoint,
    ) -> Result<Vec<(String, View)>, String> {
        if let Some(pattern) = given.iter().position(Vec::is_empty) {
            return Err(format!(
                "a tensor that it is made of is missing: its name has {}",
                self.from[pattern].as_str()
            ));
        }
        if given.iter().any(|views| views.len() != given[0].len()) {
            return Err("the tensors that it is made of are not equally many".to_owned());
        }
        let labels = self.from.iter().map(|pattern| pattern.as_str().to_owned());
        let mut made: Labelled = labels.zip(given).collect();
        for (at, op) in self.ops.iter().enumerate() {
            made = self.apply(op, made, at + 1 == self.ops.len(), checkpoint)?;
        }
        let first = &self.to[0];
        let named = |(label, views): (String, Vec<View>)| match <[View; 1]>::try_from(views) {
            Ok([view]) => Ok((name.replacen(first.as_str(), &label, 1), view)),
            Err(views) => Err(format!("{} tensors for one name", views.len())),
        };
        made.into_iter().map(named).collect()
    }

    fn apply(
        &self,
        op: &LoadOperation,
        of: Labelled,
        is_last: bool,
        checkpoint: &Checkpoint,
    ) -> Result<Labelled, String> {
        // One tensor with one name to come has that name after the last operation.
        let label = |label: String| if is_last && self.to.len() == 1 { self.to[0].clone() } else { label };
        let each = |of: Labelled, change: &dyn Fn(&str, &View) -> Result<View, String>| {
            let one = |(label_before, views): (String, Vec<View>)| {
                let views = views.iter().map(|view| change(&label_before, view)).collect::<Result<_, String>>()?;
                Ok((label(label_before), views))
            };
            of.into_iter().map(one).collect::<Result<Labelled, String>>()
        };
        match op {
            LoadOperation::Concatenate { axis } => {
                let all: Vec<View> = of.into_iter().flat_map(|(_, views)| views).collect();
                Ok(vec![(self.to[0].clone(), vec![View::concat(*axis, &all)?])])
            }
            LoadOperation::Stack => {
                let stacked = |(before, views): (String, Vec<View>)| Ok((label(before), vec![View::stack(0, &views)?]));
                of.into_iter().map(stacked).collect()
            }
            LoadOperation::Chunk { axis } => {
                let view = single(&of)?;
                let count = self.to.len() as u64;
                let extent = extent(view, *axis)?;
                if !extent.is_multiple_of(count) {
                    return Err(format!("{extent} elements of axis {axis} are no {count} equal parts"));
                }
                self.parts(view, *axis, &vec![extent / count; self.to.len()])
            }
            LoadOperation::Heads => {
                let view = single(&of)?;
                let rows = extent(view, 0)?;
                self.parts(view, 0, &rows_of_heads(rows, checkpoint)?)
            }
            LoadOperation::Split { axis, sizes, defaults } => {
                let view = single(&of)?;
                let extents = sizes.iter().map(|terms| length_of(terms, checkpoint, defaults));
                let extents = extents.collect::<Result<Vec<u64>, String>>()?;
                let (all, found) =
                    (extents.iter().try_fold(0u64, |all, one| all.checked_add(*one)), extent(view, *axis)?);
                if all != Some(found) {
                    let parts = self.to.iter().zip(&extents).map(|(name, one)| format!("{one} of {name}"));
                    let parts = parts.collect::<Vec<_>>().join(", ");
                    return Err(format!("axis {axis} has {found} elements, and by config.json {parts} are expected"));
                }
                self.parts(view, *axis, &extents)
            }
            LoadOperation::Rows { config, member, default } => {
                let rows = number_of(checkpoint, config, slice::from_ref(member)).unwrap_or(*default);
                each(of, &|_, view| {
                    let found = extent(view, 0)?;
                    if found < rows {
                        return Err(format!("{found} rows, and {member} of config.json is {rows}"));
                    }
                    Ok(view.slice(0, 0, rows, 1)?)
                })
            }
            LoadOperation::Groups { axis } => {
                let count = self.to.len();
                let one = |(at, name): (usize, &String)| {
                    let group = |(_, views): &(String, Vec<View>)| {
                        let size = views.len() / count;
                        if size * count != views.len() {
                            return Err(format!("{} tensors are no {count} equal groups", views.len()));
                        }
                        Ok(View::stack(0, &views[at * size..(at + 1) * size])?)
                    };
                    let groups = of.iter().map(group).collect::<Result<Vec<View>, String>>()?;
                    Ok((name.clone(), vec![View::concat(*axis, &groups)?]))
                };
                self.to.iter().enumerate().map(one).collect()
            }
            LoadOperation::Transpose { axes: [one, other] } => each(of, &|_, view| {
                let mut axes: Vec<usize> = (0..view.shape().rank()).collect();
                if axes.len() <= *one.max(other) {
                    return Err(format!("expected {} axes, found {}", one.max(other) + 1, axes.len()));
                }
                axes.swap(*one, *other);
                Ok(view.transpose(&axes)?)
            }),
            LoadOperation::Interleave { axis } => each(of, &|_, view| halves_of_pairs(view, *axis, 1)),
            LoadOperation::Rope { config, heads, default, only } => {
                let count = number_of(checkpoint, config, heads).unwrap_or(*default);
                each(of, &|label, view| {
                    let permutes = only.as_ref().is_none_or(|only| only.iter().any(|word| label.contains(word)));
                    if permutes { halves_of_pairs(view, 0, count) } else { Ok(view.clone()) }
                })
            }
        }
    }

    /// Parts along an axis, one for each name.
    fn parts(&self, view: &View, axis: usize, extents: &[u64]) -> Result<Labelled, String> {
        let mut start = 0;
        let part = |(label, extent): (&String, &u64)| {
            let stop = start + extent;
            let part = view.slice(axis, start, stop, 1)?;
            start = stop;
            Ok((label.clone(), vec![part]))
        };
        self.to.iter().zip(extents).map(part).collect()
    }
}

/// The one tensor.
fn single(of: &[(String, Vec<View>)]) -> Result<&View, String> {
    match of {
        [(_, views)] if views.len() == 1 => Ok(&views[0]),
        _ => Err("several tensors have the name of one".to_owned()),
    }
}

fn extent(view: &View, axis: usize) -> Result<u64, String> {
    let extents = view.shape().extents();
    extents.get(axis).copied().ok_or_else(|| format!("expected an axis {axis}, found the shape {extents:?}"))
}

/// An axis of `groups` groups of pairs: in each group all first elements of pairs, then all second ones.
fn halves_of_pairs(view: &View, axis: usize, groups: u64) -> Result<View, String> {
    let pairs = extent(view, axis)?;
    if groups == 0 || !pairs.is_multiple_of(2 * groups) {
        return Err(format!("{pairs} elements of axis {axis} are no pairs in each of {groups} heads"));
    }
    let mut split = view.shape().extents().to_vec();
    split.splice(axis..=axis, [groups, pairs / groups / 2, 2]);
    let mut axes: Vec<usize> = (0..split.len()).collect();
    axes.swap(axis + 1, axis + 2);
    let split = Shape::try_new(&split).map_err(ViewError::from)?;
    let turned = view.reshape(&split)?.transpose(&axes)?;
    Ok(turned.reshape(view.shape())?)
}

/// A number of a nested configuration, or of the whole one where it is not nested.
fn number_of(checkpoint: &Checkpoint, config: &str, members: &[String]) -> Option<u64> {
    let whole = checkpoint.config()?;
    let config = whole.get(config).unwrap_or(whole);
    members.iter().find_map(|member| config.get(member)?.as_u64())
}

/// The sum of terms.
fn length_of(
    terms: &[(u64, Vec<String>)],
    checkpoint: &Checkpoint,
    defaults: &BTreeMap<String, u64>,
) -> Result<u64, String> {
    let product = |(factor, members): &(u64, Vec<String>)| {
        members.iter().try_fold(*factor, |product, member| {
            let number = member::config_number(checkpoint, member).or_else(|| defaults.get(member).copied());
            let number = number.ok_or_else(|| format!("config.json has no {member}"))?;
            product.checked_mul(number).ok_or_else(|| format!("{member} of config.json is {number}: too large"))
        })
    };
    terms.iter().try_fold(0u64, |sum, term| sum.checked_add(product(term)?).ok_or_else(|| "too large".to_owned()))
}

/// The rows of queries, keys and values in a tensor of all three.
fn rows_of_heads(rows: u64, checkpoint: &Checkpoint) -> Result<[u64; 3], String> {
    let number = |member| member::config_number(checkpoint, member);
    let heads = number("num_attention_heads").ok_or("config.json has no num_attention_heads")?;
    let of_keys = number("num_key_value_heads").unwrap_or(heads);
    let all = of_keys.checked_mul(2).and_then(|both| both.checked_add(heads)).filter(|all| *all > 0);
    let row = all.filter(|all| rows.is_multiple_of(*all)).map(|all| rows / all);
    let row = row.filter(|row| number("head_dim").is_none_or(|dim| dim == *row)).ok_or_else(|| {
        format!(
            "{rows} rows are not those of {heads} heads of queries and {of_keys} of keys and of values by config.json"
        )
    })?;
    Ok([heads * row, of_keys * row, of_keys * row])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_matches_the_first_pattern_in_it_the_longest_first() {
        let row = ConverterRow {
            from: vec![r"\.up(?!\w)".to_owned(), r"\.gate\.up(?!\w)".to_owned()],
            to: vec![".gate_up".to_owned()],
            ops: Vec::new(),
            scope: Vec::new(),
        };
        let converter = LoadConverter::new(&row).unwrap();
        assert_eq!(converter.matched("a.up.gate.up"), Some((0, ".up")));
        assert_eq!(converter.matched("a.gate.up"), Some((1, ".gate.up")));
        assert_eq!(converter.matched("a.gate.ups"), None);
    }
}
