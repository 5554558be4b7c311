//! Renaming of tensors: ordered rules, each of a regular expression and a replacement for its matches.
//!
//! Every rule is applied to the result of those before it, to all its matches in the name, as Python's `re.sub` does. In the
//! replacement `$1` or `\1` is the first group; `$$` is a dollar sign. Expressions may look ahead and behind. A *mapping*
//! is one rule with several expressions, as transformers' `_checkpoint_conversion_mapping`: the first that matches a name
//! replaces all its matches, and the others are not tried.

use fancy_regex::Regex;

use super::python_dict;

/// Longest name that a rule may make, in bytes: the longest path that the kernel accepts.
pub const NAME_BYTES_MAX: usize = 4096;

/// Longest replacement, in bytes. Together with the limit on names it bounds the replacement of one match.
const REPLACEMENT_BYTES_MAX: usize = NAME_BYTES_MAX;

/// One rule.
#[derive(Clone, Debug)]
pub struct Rename {
    text: Text,
    /// The first that matches counts.
    alternatives: Vec<Alternative>,
}

/// A rule as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    /// An expression and its replacement.
    Rule(String, String),
    /// A dictionary of Python.
    Mapping(String),
}

/// An expression and its replacement in the syntax of the regex crates.
#[derive(Clone, Debug)]
struct Alternative {
    regex: Regex,
    replacement: String,
}

/// Why a rule gives no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameFault {
    /// The bytes of a name longer than [`NAME_BYTES_MAX`], counted up to the first match that exceeds it.
    Long(usize),
    /// The expression needs too many steps for this name.
    Steps,
}

impl PartialEq for Rename {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
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

impl Alternative {
    fn new(pattern: &str, to: &str) -> Result<Self, String> {
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
        Ok(Self { regex, replacement })
    }

    /// As [`Rename::apply`].
    fn apply(&self, name: &str) -> Result<Option<String>, RenameFault> {
        let (mut new, mut end) = (None::<String>, 0);
        for captures in self.regex.captures_iter(name) {
            let captures = captures.map_err(|_| RenameFault::Steps)?;
            let Some(whole) = captures.get(0) else { continue };
            let new = new.get_or_insert_default();
            new.push_str(&name[end..whole.start()]);
            captures.expand(&self.replacement, new);
            end = whole.end();
            if new.len() > NAME_BYTES_MAX {
                return Err(RenameFault::Long(new.len()));
            }
        }
        let Some(mut new) = new else { return Ok(None) };
        new.push_str(&name[end..]);
        if new.len() > NAME_BYTES_MAX { Err(RenameFault::Long(new.len())) } else { Ok(Some(new)) }
    }
}

impl Rename {
    /// A rule of a regular expression and its replacement.
    ///
    /// # Errors
    /// The error of the expression, or the number of a group that it does not have.
    pub fn new(pattern: &str, to: &str) -> Result<Self, String> {
        let text = Text::Rule(pattern.to_owned(), to.to_owned());
        Ok(Self { text, alternatives: vec![Alternative::new(pattern, to)?] })
    }

    /// A mapping: the text of a Python dictionary of expressions and replacements, in which `$` has no meaning.
    ///
    /// # Errors
    /// That the text is no such dictionary, and the errors of [`Rename::new`].
    pub(crate) fn mapping(text: &str) -> Result<Self, String> {
        let pairs = python_dict::pairs(text).map_err(|error| format!("mapping: {error}"))?;
        if pairs.is_empty() {
            return Err("mapping: expected expressions and replacements, found none".to_owned());
        }
        let alternative = |(pattern, to): &(String, String)| Alternative::new(pattern, &to.replace('$', "$$"));
        let alternatives = pairs.iter().map(alternative).collect::<Result<_, _>>()?;
        Ok(Self { text: Text::Mapping(text.to_owned()), alternatives })
    }

    /// A rule as on the command line, `REGEX=>REPLACEMENT`, or a mapping in braces.
    ///
    /// # Errors
    /// As [`Rename::new`].
    pub fn parse(text: &str) -> Result<Self, String> {
        // No expression begins with a brace.
        if text.trim_start().starts_with('{') || text.trim_start().starts_with("_checkpoint_conversion_mapping") {
            return Self::mapping(text);
        }
        let (pattern, to) =
            text.split_once("=>").ok_or_else(|| format!("expected REGEX=>REPLACEMENT, found {text:?}"))?;
        Self::new(pattern, to)
    }

    /// Drops a prefix.
    ///
    /// # Panics
    /// Never: an escaped text is a regular expression.
    pub fn strip_prefix(prefix: &str) -> Self {
        Self::new(&format!("^{}", fancy_regex::escape(prefix)), "").expect("an escaped text is a regular expression")
    }

    /// Adds a prefix.
    ///
    /// # Panics
    /// Never: the start of a text is a regular expression.
    pub fn add_prefix(prefix: &str) -> Self {
        Self::new("^", &prefix.replace('$', "$$")).expect("the start of a text is an expression")
    }

    /// The expression, or the whole mapping.
    pub fn pattern(&self) -> &str {
        match &self.text {
            Text::Rule(pattern, _) => pattern,
            Text::Mapping(text) => text.trim(),
        }
    }

    /// The rule as written.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// A name after this rule, applied to all its matches; `None` without a match.
    ///
    /// # Errors
    /// [`RenameFault`].
    pub fn apply(&self, name: &str) -> Result<Option<String>, RenameFault> {
        for alternative in &self.alternatives {
            if let Some(new) = alternative.apply(name)? {
                return Ok(Some(new));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_rules_are_refused() {
        for (text, expected) in [
            ("a", "expected REGEX=>"),
            ("(=>b", "rename \"(\": "),
            ("a=>$1", "names group 1"),
            ("{'a': r'\\1'}", "names group 1"),
            ("{'(': 'a'}", "rename \"(\": "),
            ("{}", "found none"),
            ("{'a'}", "mapping: expected \":\""),
        ] {
            let error = Rename::parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// The mapping of transformers 4.57's Qwen 2.5 VL, and names before and after as that release's `re.subn` with an early exit makes.
    #[test]
    fn a_mapping_of_transformers_is_pasted_as_it_is() {
        let text = r#"
    _checkpoint_conversion_mapping = {
        "^visual": "model.visual",
        r"^model(?!\.(language_model|visual))": "model.language_model",
    }
"#;
        let rename = Rename::parse(text).unwrap();
        let rows = [
            ("visual.blocks.0.attn.qkv.weight", Some("model.visual.blocks.0.attn.qkv.weight")),
            ("model.layers.0.mlp.up_proj.weight", Some("model.language_model.layers.0.mlp.up_proj.weight")),
            ("model.visual.patch_embed.proj.weight", None),
            ("model.language_model.norm.weight", None),
            ("lm_head.weight", None),
        ];
        for (name, expected) in rows {
            assert_eq!(rename.apply(name), Ok(expected.map(str::to_owned)), "{name}");
        }
        // All matches of the first expression, and dollars are dollars.
        let rename = Rename::parse(r#"{"(a)(b)?": r"\1$", "x": "y"}"#).unwrap();
        assert_eq!(rename.apply("abax"), Ok(Some("a$a$x".to_owned())));
        assert_eq!(rename.apply("xx"), Ok(Some("yy".to_owned())));
    }

    #[test]
    fn expressions_without_end_are_refused() {
        let rename = Rename::parse("(?i)(a|b|ab)*(?>c)=>x").unwrap();
        assert_eq!(rename.apply(&"ab".repeat(60)), Err(RenameFault::Steps));
    }
}
