//! Words of messages: rows of a key and a text, as wide as the terminal, and numbers of things.

use std::{fmt::Write as _, io};

use ckfs_plan::report::human_bytes;
use serde_json::Value;
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

/// The text that a template makes of what `--json` writes. `{a.b}` is the member `b` of the member `a`, or nothing; `{a:n}` is it as a
/// number, 0 where there is none; `{a:b}` the same in bytes, which of an object are those of all its members. `[one|other]` is the
/// first of these texts of which every member is there and not empty, or nothing.
pub(super) fn filled(template: &str, value: &Value) -> String {
    let mut parts = template.split('[');
    let mut text = whole(parts.next().unwrap_or_default(), value, false).unwrap_or_default();
    for part in parts {
        let (choices, after) = part.split_once(']').unwrap_or((part, ""));
        text.extend(choices.split('|').find_map(|choice| whole(choice, value, true)));
        text.extend(whole(after, value, false));
    }
    text
}

/// A template without choices; `None` where a member is not there and `must_be_there`.
fn whole(template: &str, value: &Value, must_be_there: bool) -> Option<String> {
    let mut parts = template.split('{');
    let mut text = parts.next()?.to_owned();
    for part in parts {
        let (member, after) = part.split_once('}')?;
        let (path, form) = member.split_once(':').unwrap_or((member, ""));
        let found = value.pointer(&format!("/{}", path.replace('.', "/"))).unwrap_or(&Value::Null);
        if must_be_there && (found.is_null() || found == "") {
            return None;
        }
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        text += &match (form, found) {
            ("b", Value::Object(members)) => human_bytes(members.values().map(number).sum()),
            ("b", value) => human_bytes(number(value)),
            ("n", value) => number(value).to_string(),
            (_, Value::Null) => String::new(),
            (_, Value::String(text)) => text.clone(),
            (_, value) => value.to_string(),
        };
        text += after;
    }
    Some(text)
}

/// The rows of a member that is a list; none of another.
pub(super) fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_take_members_by_their_paths() {
        let value = json!({"a": {"b": "{x}", "list": [1, 2]}, "n": 2048, "sum": {"x": 1024, "y": 1024}, "empty": ""});
        assert_eq!(
            filled("{a.b} {a.list.1} {n} {n:b} {sum:b} {none}-{none:n}-{none:b}.", &value),
            "{x} 2 2048 2.0 KiB 2.0 KiB -0-0 B."
        );
        assert_eq!(
            filled("x[, n {n}][, none {none}][, empty {empty}|, a {a.b}|, n {n}] y{n:n}", &value),
            "x, n 2048, a {x} y2048"
        );
    }

    #[test]
    fn long_texts_go_on_below_their_beginning() {
        let text = || [("mesh", "one two three".to_owned()), ("x", "https://long".to_owned())];
        assert_eq!(rows(text(), None), "mesh        one two three\nx           https://long\n");
        assert_eq!(rows(text(), Some(20)), "mesh        one two\n            three\nx           https://long\n");
    }
}
