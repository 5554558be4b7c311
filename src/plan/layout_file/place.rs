//! Places in a layout file that messages mark.

use ckfs_config::{excerpt, nearest};

use super::{
    super::{
        expr::{Absent, EvalError},
        mesh::Mesh,
        problem::Problem,
    },
    LayoutFile, Span,
};

/// The line of a byte of a text, from 1.
pub(super) fn line(text: &str, at: usize) -> usize {
    1 + text.get(..at).unwrap_or_default().matches('\n').count()
}

/// The problem at a place of a file of this label and text, for the leaf `target` if it is not empty.
pub(super) fn problem((label, text): (&str, &str), at: Span, target: String, reason: String) -> Problem {
    let excerpt = excerpt(label, text, &(at.0..at.1));
    Problem::Layout { file: label.to_owned(), line: line(text, at.0), target, reason, excerpt }
}

/// The place of a word within a place; the whole place if the file writes the word with escapes.
pub(super) fn word(text: &str, at: Span, word: &str) -> Span {
    let text = text.get(at.0..at.1).unwrap_or_default();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let alone = |start: &usize| {
        !text[..*start].ends_with(is_part) && !text[start + word.len()..].starts_with(is_part) && !word.is_empty()
    };
    let start = text.match_indices(word).map(|(start, _)| start).find(alone);
    start.map_or(at, |start| (at.0 + start, at.0 + start + word.len()))
}

/// The part of an expression that an error concerns.
pub(super) fn mark(text: &str, at: Span, error: &EvalError) -> Span {
    // The definition of a variable does not name the variable.
    error.words.iter().map(|name| word(text, at, name)).find(|found| *found != at).unwrap_or(at)
}

/// The name that a mistyped one of an expression most resembles. `members` are those of `config.json`.
pub(super) fn near<'n>(error: &EvalError, mesh: &'n Mesh, members: &[&'n str]) -> Option<&'n str> {
    match error.absent.as_ref()? {
        Absent::MeshAxis(name) => nearest(name, mesh.axes().iter().map(|axis| axis.name.as_str())),
        Absent::Config(name) => nearest(name, members.iter().copied()),
        Absent::Tensor(_) | Absent::Literal => None,
    }
}

impl LayoutFile {
    /// The problem of a condition that does not hold. A place in a file that nobody can open says nothing.
    pub(super) fn unmet(&self, at: Span, reason: String) -> Problem {
        if self.is_embedded {
            return Problem::File { file: format!("layout {}", self.name), reason };
        }
        self.refusal(at, "", reason)
    }

    /// The problem at a place of this file.
    pub(super) fn refusal(&self, at: Span, target: &str, reason: String) -> Problem {
        problem((&self.label, &self.text), at, target.to_owned(), reason)
    }
}
