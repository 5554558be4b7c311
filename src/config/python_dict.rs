//! A Python dictionary of texts, as it stands in a program: `{"^visual": "model.visual", r"^model(?!\.visual)": "model.x"}`.

/// The pairs of a dictionary in their order. A name and `=` before it, comments and a comma at the end are accepted.
///
/// # Errors
/// What was expected at which place.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut reader = Reader { rest: text };
    let name = reader.rest.trim_start().find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(0);
    if name > 0 {
        reader.rest = &reader.rest.trim_start()[name..];
        reader.take("=")?;
    }
    reader.take("{")?;
    let mut pairs: Vec<(String, String)> = Vec::new();
    while !reader.starts_with("}") {
        let key = reader.string()?;
        reader.take(":")?;
        let value = reader.string()?;
        if pairs.iter().any(|(known, _)| *known == key) {
            return Err(format!("the key {key:?} occurs twice"));
        }
        pairs.push((key, value));
        if !reader.starts_with("}") {
            reader.take(",")?;
        }
    }
    reader.take("}")?;
    reader.skip();
    if reader.rest.is_empty() { Ok(pairs) } else { Err(reader.expected("the end")) }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// Skips spaces and comments.
    fn skip(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            let Some(comment) = self.rest.strip_prefix('#') else { return };
            self.rest = comment.find('\n').map_or("", |end| &comment[end..]);
        }
    }

    fn expected(&self, what: &str) -> String {
        let found: String = self.rest.chars().take(24).collect();
        let found = if found.is_empty() { "the end".to_owned() } else { format!("{found:?}") };
        format!("expected {what}, found {found}")
    }

    fn starts_with(&mut self, token: &str) -> bool {
        self.skip();
        self.rest.starts_with(token)
    }

    fn take(&mut self, token: &str) -> Result<(), String> {
        if !self.starts_with(token) {
            return Err(self.expected(&format!("{token:?}")));
        }
        self.rest = &self.rest[token.len()..];
        Ok(())
    }

    /// A text in quotes, raw with `r` before them.
    fn string(&mut self) -> Result<String, String> {
        self.skip();
        let raw = self.rest.starts_with(['r', 'R']);
        let body = &self.rest[usize::from(raw)..];
        let Some(quote) = body.chars().next().filter(|c| ['"', '\''].contains(c)) else {
            return Err(self.expected("a text in quotes"));
        };
        if body.starts_with("\"\"\"")
            || body.starts_with("'''")
            || body.starts_with("\"\"") && !body[2..].starts_with([':', ',', '}', ' ', '\n', '\r', '\t', '#'])
        {
            return Err(self.expected("a text in single quotes of one line"));
        }
        let mut text = String::new();
        let mut characters = body.char_indices().skip(1);
        while let Some((at, c)) = characters.next() {
            match c {
                '\n' => break,
                c if c == quote => {
                    self.rest = &body[at + 1..];
                    return Ok(text);
                }
                '\\' => {
                    let Some((_, next)) = characters.next() else { break };
                    match next {
                        '\\' | '\'' | '"' if !raw => text.push(next),
                        'n' if !raw => text.push('\n'),
                        't' if !raw => text.push('\t'),
                        // Python keeps the backslash of any other pair.
                        _ => text.extend(['\\', next]),
                    }
                }
                c => text.push(c),
            }
        }
        Err(self.expected("a text with its closing quote"))
    }
}

#[cfg(test)]
mod tests {
    use super::pairs;

    #[test]
    fn dictionaries_as_programs_have_them() {
        let text = "_checkpoint_conversion_mapping = {\n    \"^visual\": \"model.visual\",  # old\n    \
                    r'^model(?!\\.(language_model|visual))': 'model.language_model',\n}\n";
        let expected = [("^visual", "model.visual"), ("^model(?!\\.(language_model|visual))", "model.language_model")];
        let expected: Vec<(String, String)> = expected.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
        assert_eq!(pairs(text), Ok(expected));
        assert_eq!(pairs("{}"), Ok(vec![]));
        assert_eq!(pairs(r#"{"a\.b": "c\\1", "d": ""}"#).unwrap()[0], ("a\\.b".to_owned(), "c\\1".to_owned()));
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, expected) in [
            ("", "expected \"{\", found the end"),
            ("{", "expected a text in quotes, found the end"),
            ("{a: 'b'}", "expected a text in quotes, found \"a: 'b'}\""),
            ("{'a'}", "expected \":\", found \"}\""),
            ("{'a': 'b' 'c'}", "expected \",\", found \"'c'}\""),
            ("{'a': 'b}", "expected a text with its closing quote, found \"'b}\""),
            ("{'a': 'b'} x", "expected the end, found \"x\""),
            ("{'a': 'b', 'a': 'c'}", "the key \"a\" occurs twice"),
        ] {
            assert_eq!(pairs(text), Err(expected.to_owned()), "{text}");
        }
    }
}
