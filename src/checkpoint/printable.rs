//! Names as messages show them. Names from a repository may hold characters that move a terminal's cursor or reverse
//! the direction of a line.

use std::borrow::Cow;

/// Whether a character controls a terminal, ends a line (2028, 2029) or changes the direction of text.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text on one line. Characters that control a terminal, or are invisible, are written as `\n`, `\t` or `\u{1b}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return text.into();
    }
    let safe = |character: char| {
        if is_hidden(character) { character.escape_default().to_string() } else { character.to_string() }
    };
    text.chars().map(safe).collect::<String>().into()
}

/// As [`printable`], but line breaks are kept.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    if !text.contains(|character| character != '\n' && is_hidden(character)) {
        return text.into();
    }
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        for (text, expected) in [
            ("model.layers.0.größe", "model.layers.0.größe"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{1b}[2J\u{9b}\u{7f}", "\\u{1b}[2J\\u{9b}\\u{7f}"),
            ("x\u{202e}y", "x\\u{202e}y"),
        ] {
            assert_eq!(printable(text), expected);
        }
        assert_eq!(printable_lines("a\n\tb"), "a\n\\tb");
    }
}
