//! Words of messages: rows of a key and a text, as wide as the terminal, and numbers of things.

use std::{fmt::Write as _, io};

use terminal_size::{Width, terminal_size_of};

/// Columns of a key, and of the space after it.
const KEY: usize = 12;

/// A terminal that is narrower than this gets long lines, and breaks them itself.
const WIDTH_MIN: usize = 40;

/// The width of the terminal that standard output is; `None` where it is none.
pub(super) fn width() -> Option<usize> {
    terminal_size_of(io::stdout()).map(|(Width(width), _)| usize::from(width)).filter(|width| *width >= WIDTH_MIN)
}

/// Rows below each other. Texts that are wider than `width` go on below their beginning; without a width no line is broken.
pub(super) fn rows<'a>(rows: impl IntoIterator<Item = (&'a str, String)>, width: Option<usize>) -> String {
    let mut text = String::new();
    for (key, value) in rows {
        let lines = width.map_or_else(|| vec![value.clone()], |width| broken(&value, width.saturating_sub(KEY)));
        for (number, line) in lines.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:<KEY$}{line}", if number == 0 { key } else { "" });
        }
    }
    text
}

/// The words of a text in lines. A word that is wider than a line has one of its own.
fn broken(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

/// `1 device`, `2 devices`.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_go_on_below_their_beginning() {
        let text = || [("mesh", "one two three".to_owned()), ("x", "https://long".to_owned())];
        assert_eq!(rows(text(), None), "mesh        one two three\nx           https://long\n");
        assert_eq!(rows(text(), Some(20)), "mesh        one two\n            three\nx           https://long\n");
    }
}
