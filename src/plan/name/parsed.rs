//! The names of a checkpoint's tensors, each parsed once.
//!
//! A checkpoint of 150 000 tensors has a few dozen kinds of names: those of one kind differ in the numbers of their layers and
//! experts only. What a name tells is told by its kind, so that planning asks each kind once.

use std::collections::BTreeMap;

use ckfs_checkpoint::Checkpoint;
use rayon::prelude::*;

use super::{
    super::{
        family::Family,
        numbered::{Numbered, number_of},
    },
    naming::{self, Around, Parsed, is_tower},
};

/// Names that one thread parses together.
const PARSED_TOGETHER: usize = 4096;

/// Names that differ in the numbers of layer and expert only.
#[derive(Clone, Debug)]
pub(crate) struct NameKind<'a> {
    /// One of them.
    pub(crate) name: &'a str,
    /// It, parsed.
    pub(crate) parsed: Parsed,
    /// The text around the numbers.
    pub(crate) around: Around<'a>,
    /// Number of names.
    pub(crate) count: u64,
}

/// One name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParsedName {
    /// Number of its kind.
    pub(crate) kind: u32,
    layer: u64,
    expert: u64,
}

/// All names of a checkpoint, in the order of its tensors.
#[derive(Clone, Debug)]
pub(crate) struct ParsedNames<'a> {
    kinds: Vec<NameKind<'a>>,
    names: Vec<ParsedName>,
}

/// Names of a part of a checkpoint, and their kinds.
#[derive(Default)]
struct NamesPart<'a> {
    kinds: Numbered<Around<'a>, NameKind<'a>>,
    names: Vec<ParsedName>,
}

impl<'a> NamesPart<'a> {
    /// The number of a kind, of which there are `count` more.
    fn kind(&mut self, around: Around<'a>, count: u64, new: impl FnOnce() -> NameKind<'a>) -> u32 {
        let kind = number_of(&mut self.kinds, around, |_| NameKind { count: 0, ..new() });
        self.kinds[kind as usize].count += count;
        kind
    }

    fn of(names: &[&'a str]) -> Self {
        let mut part = Self { names: Vec::with_capacity(names.len()), ..Self::default() };
        for name in names.iter().copied() {
            let (around, layer, expert) = naming::around(name);
            let kind = part.kind(around, 1, || NameKind { name, parsed: naming::parse(name), around, count: 1 });
            // The kind says whether there are these numbers.
            part.names.push(ParsedName { kind, layer: layer.unwrap_or(0), expert: expert.unwrap_or(0) });
        }
        part
    }
}

impl<'a> ParsedNames<'a> {
    /// The names of all tensors of a checkpoint.
    pub(crate) fn of(checkpoint: &'a Checkpoint) -> Self {
        let names: Vec<&str> = checkpoint.tensors().map(|(_, info)| info.name).collect();
        let parts: Vec<NamesPart<'a>> = names.par_chunks(PARSED_TOGETHER).map(NamesPart::of).collect();
        let mut all = NamesPart { names: Vec::with_capacity(names.len()), ..NamesPart::default() };
        for part in parts {
            let kinds = part.kinds.into_values().map(|kind| all.kind(kind.around, kind.count, || kind));
            let kinds: Vec<u32> = kinds.collect();
            all.names.extend(part.names.iter().map(|name| ParsedName { kind: kinds[name.kind as usize], ..*name }));
        }
        Self { kinds: all.kinds.into_values().collect(), names: all.names }
    }

    /// The kinds, by number.
    pub(crate) fn kinds(&self) -> &[NameKind<'a>] {
        &self.kinds
    }

    /// The names, in the order of the checkpoint's tensors.
    pub(crate) fn names(&self) -> &[ParsedName] {
        &self.names
    }

    /// The kind of a name.
    pub(crate) fn kind(&self, name: &ParsedName) -> &NameKind<'a> {
        &self.kinds[name.kind as usize]
    }

    /// The number of a name's layer, if it has one.
    pub(crate) fn layer(&self, name: &ParsedName) -> Option<u64> {
        self.kind(name).parsed.layer.map(|_| name.layer)
    }

    /// The number of a name's expert, if it has one.
    pub(crate) fn expert(&self, name: &ParsedName) -> Option<u64> {
        self.kind(name).parsed.expert.map(|_| name.expert)
    }

    /// The prefix of the text model's layers: the most frequent one, of those that the family has if it is known.
    pub(crate) fn text_prefix(&self, family: Option<&Family>) -> Option<String> {
        let is_known = |prefix: &String| family.is_none_or(|family| family.prefixes.contains(prefix));
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        let layered = self.kinds.iter().filter(|kind| kind.parsed.layer.is_some());
        for kind in layered.filter(|kind| is_known(&kind.parsed.prefix) && !is_tower(kind.name)) {
            *counts.entry(&kind.parsed.prefix).or_default() += kind.count;
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(prefix, _)| prefix.to_owned())
    }
}
