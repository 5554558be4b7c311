//! Places in a layout file that messages mark.

use ckfs_config::{excerpt, nearest};
use ckfs_tensor::DType;

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

/// The word of an expression that an error concerns. Empty if it concerns the whole expression.
fn faulty(error: &EvalError) -> &str {
    match error {
        EvalError::Name(name)
        | EvalError::Open(name)
        | EvalError::Cycle(name)
        | EvalError::DType(name)
        | EvalError::In { name, .. }
        | EvalError::Absent(Absent::Config(name) | Absent::MeshAxis(name) | Absent::Tensor(name)) => name,
        EvalError::Kind { operation, .. } | EvalError::Range(operation) | EvalError::NoInverse(operation) => operation,
        EvalError::Absent(Absent::Literal) => "absent",
        EvalError::Inexact(_) | EvalError::NoShape(_) | EvalError::View(_) => "",
    }
}

/// The part of an expression that an error concerns.
fn mark(text: &str, at: Span, error: &EvalError) -> Span {
    match (word(text, at, faulty(error)), error) {
        // The definition of a variable does not name the variable.
        (found, EvalError::In { error, .. }) if found == at => mark(text, at, error),
        (found, _) => found,
    }
}

/// The name that a mistyped one of an expression most resembles. `members` are those of `config.json`.
fn near(error: &EvalError, mesh: &Mesh, members: &[&str]) -> Option<String> {
    match error {
        EvalError::In { error, .. } => near(error, mesh, members),
        EvalError::DType(name) => {
            let words: Vec<String> = DType::ALL
                .iter()
                .flat_map(|dtype| [dtype.code().to_ascii_lowercase(), dtype.name().to_owned()])
                .collect();
            nearest(name, words.iter().map(String::as_str)).map(str::to_owned)
        }
        EvalError::Absent(Absent::MeshAxis(name)) => {
            nearest(name, mesh.axes().iter().map(|axis| axis.name.as_str())).map(str::to_owned)
        }
        EvalError::Absent(Absent::Config(name)) => nearest(name, members.iter().copied()).map(str::to_owned),
        EvalError::Absent(Absent::Tensor(_) | Absent::Literal)
        | EvalError::Name(_)
        | EvalError::Kind { .. }
        | EvalError::Range(_)
        | EvalError::Inexact(_)
        | EvalError::Open(_)
        | EvalError::NoInverse(_)
        | EvalError::NoShape(_)
        | EvalError::Cycle(_)
        | EvalError::View(_) => None,
    }
}

impl LayoutFile {
    /// The problem of a rule whose expression at `at` has no value, for the leaf `target`.
    pub(super) fn problem(
        &self,
        at: Span,
        target: &str,
        error: &EvalError,
        (mesh, members): (&Mesh, &[&str]),
    ) -> Problem {
        let near = near(error, mesh, members).map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        self.refusal(mark(&self.text, at, error), target, format!("{error}{near}"))
    }

    /// The problem of a condition that does not hold. A place in a file that nobody can open says nothing.
    pub(super) fn unmet(&self, at: Span, reason: String) -> Problem {
        if self.is_embedded {
            return Problem::File { file: format!("layout {}", self.name), reason };
        }
        self.refusal(at, "", reason)
    }

    /// The problem at a place of this file.
    pub(super) fn refusal(&self, at: Span, target: &str, reason: String) -> Problem {
        Problem::Layout {
            file: self.label.clone(),
            line: line(&self.text, at.0),
            target: target.to_owned(),
            reason,
            excerpt: excerpt(&self.label, &self.text, &(at.0..at.1)),
        }
    }
}
