//! Renaming of tensors: ordered rules, each of a regular expression and a replacement for its matches.
//!
//! Every rule is applied to the result of those before it, to all its matches in the name, as Python's `re.sub` does. In the
//! replacement `$1` or `\1` is the first group; `$$` is a dollar sign.

use regex::Regex;

/// Longest name that a rule may make, in bytes: the longest path that the kernel accepts.
pub const NAME_BYTES_MAX: usize = 4096;

/// Longest replacement, in bytes. Together with the limit on names it bounds the replacement of one match.
const REPLACEMENT_BYTES_MAX: usize = NAME_BYTES_MAX;

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

/// The replacement in the syntax of the regex crate. There `$1_a` would be a group called `1_a`.
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
    /// The error of the expression, or the number of a group that it does not have.
    pub fn new(pattern: &str, to: &str) -> Result<Self, String> {
        if to.len() > REPLACEMENT_BYTES_MAX {
            let found = to.len();
            return Err(format!(
                "rename {pattern:?}: expected a replacement of at most {REPLACEMENT_BYTES_MAX} bytes, found {found}"
            ));
        }
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

    /// A name after this rule, applied to all its matches; `None` without a match.
    ///
    /// # Errors
    /// The bytes of a name longer than [`NAME_BYTES_MAX`], counted up to the first match that exceeds it.
    pub fn apply(&self, name: &str) -> Result<Option<String>, usize> {
        let mut matches = self.regex.captures_iter(name).peekable();
        if matches.peek().is_none() {
            return Ok(None);
        }
        let (mut new, mut end) = (String::new(), 0);
        for captures in matches {
            let Some(whole) = captures.get(0) else { continue };
            new.push_str(&name[end..whole.start()]);
            captures.expand(&self.replacement, &mut new);
            end = whole.end();
            if new.len() > NAME_BYTES_MAX {
                return Err(new.len());
            }
        }
        new.push_str(&name[end..]);
        if new.len() > NAME_BYTES_MAX { Err(new.len()) } else { Ok(Some(new)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_rules_are_refused() {
        for (text, expected) in [("a", "expected REGEX=>"), ("(=>b", "unclosed group"), ("a=>$1", "names group 1")] {
            let error = Rename::parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
