//! Treatment of a layout's names: ties, patterns and renames, alike for every layout.

use std::collections::HashMap;

use ckfs_checkpoint::Checkpoint;

use super::super::{
    Layout, Pattern, Tied, ViewOptions,
    draft::{Bundled, Draft},
    name_group::{behind_words, matches_none},
    naming,
    problem::Problem,
    rename::{self, Rename},
    select::{Selected, is_accepted},
};

/// The name of an output head that is the embedding of this name and is not stored.
pub(crate) fn tied_head(checkpoint: &Checkpoint) -> Option<(String, String)> {
    let dialect = checkpoint.dialect();
    if dialect.has_lm_head || !dialect.tied {
        return None;
    }
    let embedding = checkpoint.embedding(&|name| naming::is_tower(name))?.to_owned();
    Some((dialect.other_head.unwrap_or("lm_head.weight").to_owned(), embedding))
}

/// Shows a tied output head as the user requests.
pub(crate) fn tie(drafts: &mut Vec<Draft>, checkpoint: &Checkpoint, options: &ViewOptions, warnings: &mut Vec<String>) {
    let alias = |draft: &Draft| draft.bundled == Bundled::NEVER;
    if options.tied == Tied::Alias && !checkpoint.dialect().has_lm_head && tied_head(checkpoint).is_none() {
        warnings
            .push("tied: there is no output head, and config.json does not say that it is the embedding".to_owned());
    }
    match (options.tied, &options.layout) {
        (Tied::Auto, _) | (Tied::Alias, Layout::Stored) => {}
        (Tied::Absent, _) => drafts.retain(|draft| !alias(draft)),
        (Tied::Alias, Layout::Hf) => {
            if let Some((head, embedding)) = tied_head(checkpoint) {
                let draft = drafts.iter().find(|draft| draft.name == embedding);
                drafts.extend(draft.cloned().map(|draft| Draft { name: head, ..draft }));
            }
        }
        (Tied::Alias, Layout::Canonical | Layout::Gguf | Layout::Embedded(_) | Layout::File(_)) => {
            for draft in drafts.iter_mut().filter(|draft| alias(draft)) {
                draft.bundled = Bundled::ALWAYS;
            }
        }
    }
}

/// The patterns that match neither a name of the repository nor one of the layout, each with the same after other words, where that
/// matches names of the repository.
pub(crate) fn meant(checkpoint: &Checkpoint, drafts: &[Draft], selected: &Selected) -> Vec<(Pattern, Pattern)> {
    let patterns = selected.target_include.iter().chain(&selected.target_exclude);
    let unmatched = patterns.filter(|pattern| !drafts.iter().any(|draft| pattern.matches(&draft.name)));
    let is_hit = |inner: &Pattern| checkpoint.tensors().any(|(_, info)| inner.matches(info.name));
    unmatched.filter_map(|pattern| Some((pattern.clone(), behind_words(pattern).filter(is_hit)?))).collect()
}

/// Drops the names that patterns over the layout's names leave out.
pub(crate) fn keep(checkpoint: &Checkpoint, drafts: &mut Vec<Draft>, selected: &Selected, problems: &mut Vec<Problem>) {
    for (rule, patterns) in [("include", &selected.target_include), ("exclude", &selected.target_exclude)] {
        for pattern in patterns {
            if !drafts.iter().any(|draft| pattern.matches(&draft.name)) {
                let stored = checkpoint.tensors().map(|(_, info)| info.name);
                let names = drafts.iter().map(|draft| draft.name.as_str()).chain(stored);
                problems.push(Problem::Request(matches_none(rule, pattern, names)));
            }
        }
    }
    drafts.retain(|draft| is_accepted(&selected.target_include, &selected.target_exclude, &draft.name));
}

/// Renames. Refuses two tensors of one name, and the first name that is too long. With `flat` a name is one path
/// component.
pub(crate) fn rename(drafts: &mut [Draft], rules: &[Rename], flat: bool, problems: &mut Vec<Problem>) {
    if rules.is_empty() {
        return;
    }
    let mut olds: HashMap<String, String> = HashMap::with_capacity(drafts.len());
    for draft in drafts {
        let new = match rename::apply_to_path(rules, &draft.name, flat) {
            Ok(new) => new,
            // The same rule usually makes many names too long: the first one is enough.
            Err(problem) => return problems.push(problem),
        };
        let old = std::mem::replace(&mut draft.name, new.clone());
        if new.is_empty() {
            let reason = format!("{old} would have no name");
            problems.push(Problem::File { file: "rename".to_owned(), reason });
        } else if let Some(first) = olds.get(&new) {
            problems.push(Problem::collision(&new, first, &old));
            draft.name = old;
        } else {
            olds.insert(new, old);
        }
    }
}
