//! JSON as Python writes it, with the words `NaN`, `Infinity` and `-Infinity`. Standard JSON has none of them, but the
//! configurations of state-space models do (`"time_step_limit": [0.0, Infinity]`).
//!
//! In a [`Value`] such a word is a string that begins with a character that no text has. So it can be written as it was
//! read.

use std::borrow::Cow;

use ckfs_format::json::{self, JsonForm};
use ckfs_source::{Opened, WaitRegistry};
use serde::Serialize;
use serde_json::Value;

use super::problem::Problems;

/// A character that no text has: Unicode reserves it for uses such as this.
const SIGN: char = '\u{10ffff}';

const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

fn kept(text: &[u8]) -> Result<Value, serde_json::Error> {
    json::parse(text, JsonForm::Kept)
}

/// Reads a text.
///
/// # Errors
/// The first violation of JSON's syntax; too many values.
pub fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    kept(text).or_else(|error| match std::str::from_utf8(text).ok().and_then(signed) {
        Some(signed) => kept(signed.as_bytes()),
        None => Err(error),
    })
}

/// What is wrong with a text, for messages.
pub(super) fn fault(error: &serde_json::Error) -> String {
    if error.is_eof() {
        let (line, column) = (error.line(), error.column());
        return format!(
            "the file ends early, at line {line} column {column}: it is not complete; copy or download it again"
        );
    }
    error.to_string()
}

/// The text as standard JSON: [`pretty`] writes Python's words again where they were.
pub(super) fn standard(text: &[u8]) -> Cow<'_, [u8]> {
    let signed = std::str::from_utf8(text).ok().and_then(signed);
    signed.map_or(Cow::Borrowed(text), |signed| Cow::Owned(signed.into_bytes()))
}

/// Writes a text, one member a line.
///
/// # Panics
/// If a key is no text. Those of a [`Value`] are.
pub fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_string_pretty(value).expect("keys are texts, and a text takes all that is written");
    if text.contains(SIGN) {
        text = WORDS.iter().fold(text, |text, word| text.replace(&format!("\"{SIGN}{word}\""), word));
    }
    text.push('\n');
    text.into_bytes()
}

/// The text with Python's words as strings; `None` if there are none.
fn signed(text: &str) -> Option<String> {
    if text.contains(SIGN) || !WORDS.iter().any(|word| text.contains(word)) {
        return None;
    }
    let mut out = String::with_capacity(text.len() + 32);
    let mut rest = text;
    let mut in_string = false;
    while let Some(character) = rest.chars().next() {
        let word = WORDS.iter().find(|word| !in_string && rest.starts_with(**word));
        let taken = match (word, character) {
            (Some(word), _) => {
                out.extend(['"', SIGN]);
                out.push_str(word);
                out.push('"');
                rest = &rest[word.len()..];
                // Such a word cannot be the name of a member.
                if rest.trim_start().starts_with(':') {
                    return None;
                }
                continue;
            }
            (None, '"') => {
                in_string = !in_string;
                1
            }
            // An escaped character does not end a string.
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, other) => other.len_utf8(),
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    Some(out)
}

/// Longest `config.json` or index that is read, in bytes.
pub(super) const JSON_FILE_BYTES_MAX: u64 = 256 << 20;

/// The text of a JSON file, or the reason why it is not available.
pub(super) fn read_json(opened: &Opened, fetches: &WaitRegistry) -> Result<Vec<u8>, String> {
    let reading = fetches.begin_path(opened.path(), "read");
    let too_long = |len: u64| format!("expected at most {JSON_FILE_BYTES_MAX} bytes, found {len}");
    let len = opened.len_bytes().map_err(|error| error.to_string())?;
    if len > JSON_FILE_BYTES_MAX {
        return Err(too_long(len));
    }
    let text = opened.read(JSON_FILE_BYTES_MAX + 1, &reading).map_err(|error| error.to_string())?;
    if text.len() as u64 > JSON_FILE_BYTES_MAX { Err(too_long(text.len() as u64)) } else { Ok(text) }
}

/// The object that a JSON file holds.
pub(super) fn parsed(file: &str, text: &Result<Vec<u8>, String>, problems: &mut Problems) -> Option<serde_json::Value> {
    let value = text.as_ref().map_err(Clone::clone).and_then(|text| {
        let value = parse(text).map_err(|error| fault(&error))?;
        if value.is_object() { Ok(value) } else { Err("expected an object".into()) }
    });
    value.map_err(|message| problems.of_file(file, message)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pythons_words_are_read_and_written() {
        let text = r#"{"a":[0.0,Infinity,-Infinity,NaN],"b":"Infinity \" NaN","c\\":NaN}"#;
        let value = parse(text.as_bytes()).unwrap();
        assert_eq!(value["b"], "Infinity \" NaN");
        assert!(value["a"][1].is_string());
        let written = String::from_utf8(pretty(&value)).unwrap();
        assert_eq!(written.split_whitespace().collect::<String>(), text.replace(' ', ""));
    }

    #[test]
    fn other_words_are_refused() {
        for text in
            ["Nan", "[NaNx]", "[NaN", "{Infinity:1}", "[\"\u{10ffff}NaN\", NaN]", "[\"NaN\\", "[\"é\\\u{e9}", ""]
        {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_read_back_unchanged() {
        // The nearest double, not its neighbour.
        for text in [
            "0.9452706955539223",
            "7.120190912076126e-200",
            "0.02",
            "1e-5",
            "0.1459999999999999964",
            "9007199254740993",
        ] {
            let value = parse(text.as_bytes()).unwrap();
            assert_eq!(value.as_f64(), text.parse().ok(), "{text}");
        }
    }
}
