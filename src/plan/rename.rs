//! Renaming of tensors: ordered rules of a regular expression and what takes the place of its matches.
//!
//! Every rule is applied to the result of those before it, to all its matches in the name, as Python's `re.sub` does. In the
//! replacement `$1` or `\1` is the first group; `$$` is a dollar sign.

use std::borrow::Cow;

use regex::Regex;

/// One rule.
#[derive(Clone, Debug)]
pub struct Rename {
    pattern: String,
    to: String,
    regex: Regex,
    replacement: String,
}

impl PartialEq for Rename {
    fn eq(&self, other: &Self) -> bool {
        (&self.pattern, &self.to) == (&other.pattern, &other.to)
    }
}

/// The replacement in the words of the regex crate, where `$1_a` would be a group called `1_a`.
fn replacement(to: &str) -> String {
    let mut text = String::with_capacity(to.len());
    let mut rest = to.chars().peekable();
    while let Some(c) = rest.next() {
        let next = rest.peek().copied();
        match (c, next) {
            ('$' | '\\', Some('0'..='9')) => {
                text.push_str("${");
                while let Some(digit) = rest.next_if(char::is_ascii_digit) {
                    text.push(digit);
                }
                text.push('}');
            }
            ('$', Some('$')) => {
                rest.next();
                text.push_str("$$");
            }
            ('$', Some('{')) => text.push('$'),
            ('$', _) => text.push_str("$$"),
            _ => text.push(c),
        }
    }
    text
}

impl Rename {
    /// A rule of a regular expression and its replacement.
    ///
    /// # Errors
    /// What is wrong with the expression, or the number of a group that it does not have.
    pub fn new(pattern: &str, to: &str) -> Result<Self, String> {
        let regex = Regex::new(pattern).map_err(|error| format!("rename {pattern:?}: {error}"))?;
        let replacement = replacement(to);
        for group in replacement.split("${").skip(1) {
            let name = group.split_once('}').map_or(group, |(name, _)| name);
            let known = match name.parse::<usize>() {
                Ok(number) => number < regex.captures_len(),
                Err(_) => regex.capture_names().flatten().any(|known| known == name),
            };
            if !known {
                return Err(format!(
                    "rename {pattern:?}: the replacement {to:?} names group {name}, which is not there"
                ));
            }
        }
        Ok(Self { pattern: pattern.to_owned(), to: to.to_owned(), regex, replacement })
    }

    /// A rule as on the command line, `REGEX=>REPLACEMENT`.
    ///
    /// # Errors
    /// As [`Rename::new`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let (pattern, to) =
            text.split_once("=>").ok_or_else(|| format!("expected REGEX=>REPLACEMENT, found {text:?}"))?;
        Self::new(pattern, to)
    }

    /// Drops a prefix.
    ///
    /// # Panics
    /// Never: an escaped text is a regular expression.
    pub fn strip_prefix(prefix: &str) -> Self {
        Self::new(&format!("^{}", regex::escape(prefix)), "").expect("an escaped text is a regular expression")
    }

    /// Adds a prefix.
    ///
    /// # Panics
    /// Never: the start of a text is a regular expression.
    pub fn add_prefix(prefix: &str) -> Self {
        Self::new("^", &prefix.replace('$', "$$")).expect("the start of a text is an expression")
    }

    /// The expression.
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// The replacement, as written.
    pub fn to(&self) -> &str {
        &self.to
    }
}

/// A name after all rules.
pub fn apply(rules: &[Rename], name: &str) -> String {
    let mut name = Cow::Borrowed(name);
    for rule in rules {
        if let Cow::Owned(new) = rule.regex.replace_all(&name, rule.replacement.as_str()) {
            name = Cow::Owned(new);
        }
    }
    name.into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_apply_in_order_to_all_matches() {
        let rows: &[(&[&str], &str, &str)] = &[
            (&["^model\\.=>"], "model.layers.0.w", "layers.0.w"),
            (&["a=>b", "b=>c"], "aab", "ccc"),
            (&["layers\\.(\\d+)=>h.$1_x"], "layers.7.w", "h.7_x.w"),
            (&["(\\w+)\\.(\\w+)=>\\2.$1"], "a.b", "b.a"),
            (&["w=>$$"], "w", "$"),
            (&["(?<n>\\d)=>${n}${n}"], "a1", "a11"),
            (&["nothing=>x"], "a", "a"),
        ];
        for (rules, name, expected) in rows {
            let rules: Vec<Rename> = rules.iter().map(|rule| Rename::parse(rule).unwrap()).collect();
            assert_eq!(apply(&rules, name), *expected, "{rules:?}");
        }
        assert_eq!(apply(&[Rename::strip_prefix("m."), Rename::add_prefix("$1.")], "m.a"), "$1.a");
        assert_eq!(apply(&[Rename::strip_prefix("m.")], "mxa"), "mxa", "a dot is a dot");
    }

    #[test]
    fn malformed_rules_are_refused() {
        for (text, expected) in [("a", "expected REGEX=>"), ("(=>b", "unclosed group"), ("a=>$1", "names group 1")] {
            let error = Rename::parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
