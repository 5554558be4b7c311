//! The front matter of a model card: texts and lists of texts, as YAML writes them in one line or one item a line.
//!
//! Other YAML below members that give no key is passed over. Everything that could be read in two ways is refused.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

/// Closing marks of values that may go on in the next line, by the opening ones.
const CLOSED: [(char, char); 4] = [('"', '"'), ('\'', '\''), ('[', ']'), ('{', '}')];

static MEMBER: LazyLock<Regex> = LazyLock::new(|| regex(r"^([A-Za-z_][\w-]*):(?: +(.*))?$"));
/// What YAML takes for a truth value, a number, a date or a directive, and a little more.
static NO_TEXT: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^(?i:y|n|yes|no|true|false|on|off|=|<<|[-+]?\.(inf|nan)|[-+]?0x[\da-f_]+|[-+]?0b[01_]+|[-+.]?\d[-+\d_.:e tz]*)$|: |:$|^[-?:,!&*|>%@`\[\]{}#]",
    )
});

pub(super) fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of the program, which a test uses")
}

/// The members of a card that give keys, `is_used`: null, texts, and lists of texts. Nothing if it has no front matter.
///
/// # Errors
/// The line that is no such member.
pub(super) fn front_matter(card: &str, is_used: &dyn Fn(&str) -> bool) -> Result<Map<String, Value>, String> {
    let mut found = Map::new();
    let mut lines = card.lines();
    if lines.next() != Some("---") {
        return Ok(found);
    }
    let mut members: Vec<(usize, &str, &str, Vec<String>)> = Vec::new();
    let refused = |number: usize, what: &str| format!("line {number} of the front matter: expected {what}");
    for (number, line) in (2..).zip(lines.take_while(|line| *line != "---")) {
        // PyYAML takes these for line ends, or for none of its letters.
        if line.contains(|letter: char| (letter.is_control() && letter != '\t') || "\u{2028}\u{2029}".contains(letter))
        {
            return Err(refused(number, "no control characters"));
        }
        let is_comment = line.trim().is_empty() || line.trim_start().starts_with('#');
        match members.last_mut() {
            _ if is_comment => {}
            Some((.., below)) if line.starts_with([' ', '\t', '-']) => {
                // So the converter does it.
                let line =
                    line.strip_suffix("- no").map_or_else(|| line.to_owned(), |start| format!("{start}- \"no\""));
                below.push(line.replace('\t', "  "));
            }
            _ => {
                let member = MEMBER.captures(line).ok_or_else(|| refused(number, "member: value"))?;
                let text = |at: usize| member.get(at).map_or("", |part| part.as_str().trim());
                members.push((number, text(1), text(2), Vec::new()));
            }
        }
    }
    for (number, name, value, below) in members {
        let values = below.iter().map(|line| {
            let item = line.trim().trim_start_matches("- ");
            item.split_once(": ").filter(|_| !item.starts_with(['"', '\''])).map_or(item, |(_, value)| value.trim())
        });
        let is_literal = value.starts_with(['|', '>']);
        if std::iter::once(value).chain(values.filter(|_| !is_literal)).any(is_open) {
            return Err(refused(number, &format!("{name} with values that end in their lines")));
        }
        if !is_used(name) {
            continue;
        }
        let wrong = |()| refused(number, &format!("a text, or a list of texts, of {name}"));
        let list = value.strip_prefix('[').and_then(|value| value.strip_suffix(']'));
        let value = match (list, below.as_slice()) {
            (Some(inner), []) if inner.trim().is_empty() => Value::Array(Vec::new()),
            (Some(inner), []) if !inner.contains(['[', ']', '{', '}']) => {
                inner.split(',').map(|item| text_of(item.trim())).collect::<Result<_, ()>>().map_err(wrong)?
            }
            (None, []) => scalar(value).map_err(wrong)?,
            (None, [first, ..]) if value.is_empty() || value.starts_with('#') => {
                let indent = first.find('-').ok_or(()).map_err(wrong)?;
                let item = |line: &String| text_of(line.get(indent..).ok_or(())?.strip_prefix("- ").ok_or(())?.trim());
                let is_even = |line: &String| line.len() - line.trim_start().len() == indent;
                if !below.iter().all(is_even) {
                    return Err(wrong(()));
                }
                below.iter().map(item).collect::<Result<_, ()>>().map_err(wrong)?
            }
            _ => return Err(wrong(())),
        };
        found.insert(name.to_owned(), value);
    }
    Ok(found)
}

/// Whether a value goes on in the next line.
fn is_open(value: &str) -> bool {
    let mark = CLOSED.iter().find(|(open, _)| value.starts_with(*open));
    mark.is_some_and(|(_, close)| value.len() < 2 || !value.ends_with(*close))
}

/// A text, or null.
fn scalar(value: &str) -> Result<Value, ()> {
    for quote in ['"', '\''] {
        if let Some(inner) = value.strip_prefix(quote) {
            let inner = inner.strip_suffix(quote).ok_or(())?;
            return if inner.contains([quote, '\\']) { Err(()) } else { Ok(inner.into()) };
        }
    }
    let text = value.split_once(" #").map_or(value, |(text, _)| text.trim_end());
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Ok(Value::Null),
        comment if comment.starts_with('#') => Ok(Value::Null),
        _ if NO_TEXT.is_match(text) => Err(()),
        _ => Ok(text.into()),
    }
}

fn text_of(value: &str) -> Result<Value, ()> {
    scalar(value).and_then(|value| if value.is_string() { Ok(value) } else { Err(()) })
}
