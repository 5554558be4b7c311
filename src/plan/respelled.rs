//! Layers that a repository names by another word than the model's releases.
//!
//! transformers 5.24 saves the text layers of Kimi K2.5 as `language_model.model.blocks.N`, because its rename for the vision tower
//! takes them too when it is turned round. Every other program reads `layers.N`, and so does each layout here.

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Rename;

use super::family::Family;

/// The word that tables have for layers, and the other one.
const WORDS: [&str; 2] = ["layers", "blocks"];

/// The rename that gives a known model's layers the word of its releases. `None` if they have it.
pub(super) fn rename(checkpoint: &Checkpoint) -> Option<Rename> {
    let family = Family::of(checkpoint)?;
    let has = |prefix: &str, word: &str| checkpoint.table().with_prefix(&format!("{prefix}{word}.")).next().is_some();
    let [word, other] = WORDS;
    // Without a prefix nothing says that the layers are those of the text model.
    let mut prefixes = family.prefixes.iter().filter(|prefix| !prefix.is_empty());
    let prefix = prefixes.find(|prefix| has(prefix, other) && !has(prefix, word))?;
    let pattern = format!("^{}", fancy_regex::escape(&format!("{prefix}{other}.")));
    Rename::new(&pattern, &format!("{prefix}{word}.")).ok()
}
