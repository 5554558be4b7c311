//! Regular expressions as Python's `re` has them: look-around, back references, `\Z`. The configurations of models and adapters are
//! full of them.

use fancy_regex::Regex;

/// An expression over names.
#[derive(Clone, Debug)]
pub struct PythonRegex(Regex);

impl PythonRegex {
    /// The expression with `before` and `after` around it, which is how Python's libraries extend it; `None` if it cannot be used.
    pub fn new(before: &str, pattern: &str, after: &str) -> Option<Self> {
        // An expression that closes a group which it did not open is none by itself.
        Regex::new(pattern).ok().or_else(|| Regex::new(&end_anchor(pattern)).ok())?;
        Regex::new(&format!("{before}{}{after}", end_anchor(pattern))).ok().map(Self)
    }

    /// An expression that is matched as `re.match` does: from the start, not to the end.
    pub(crate) fn matching(pattern: &str) -> Option<Self> {
        Self::new("^(?:", pattern, ")")
    }

    /// An expression that is matched as `re.fullmatch` does.
    pub fn full(pattern: &str) -> Option<Self> {
        Self::new("^(?:", pattern, ")$")
    }

    /// Whether a name matches; `None` if that takes too many steps.
    pub fn matches(&self, name: &str) -> Option<bool> {
        self.0.is_match(name).ok()
    }

    /// The first group of the match in a name.
    pub fn first_group<'n>(&self, name: &'n str) -> Option<&'n str> {
        Some(self.0.captures(name).ok()??.get(1)?.as_str())
    }
}

/// Python's end of the text, `\Z`, in the syntax of the regex crates.
fn end_anchor(pattern: &str) -> String {
    let mut text = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        text.push(character);
        if character == '\\' {
            match characters.next() {
                Some('Z') => text.push('z'),
                Some(other) => text.push(other),
                None => {}
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_those_of_python() {
        let rows = [
            (r"layers\.(?!0|1)\d+\.q", "layers.3.q", Some(true)),
            (r"layers\.(?!0|1)\d+\.q", "layers.1.q", Some(false)),
            (r"(?P<a>\w+)\.(?P=a)", "x.x", Some(true)),
            (r"q_proj\Z", "q_proj", Some(true)),
            (r"\\Z", r"\Z", Some(true)),
            (r".*(?<=layers\.)3", "a.layers.3", Some(true)),
            ("(", "", None),
            (")(", "", None),
            ("*", "", None),
        ];
        for (pattern, name, expected) in rows {
            assert_eq!(PythonRegex::full(pattern).and_then(|regex| regex.matches(name)), expected, "{pattern}");
        }
        assert_eq!(PythonRegex::matching("a").unwrap().matches("ab"), Some(true));
        assert_eq!(PythonRegex::matching("b").unwrap().matches("ab"), Some(false));
        assert_eq!(PythonRegex::new("^", r"l\.(\d)", "$").unwrap().first_group("l.7"), Some("7"));
    }
}
