//! The parser of expressions: recursive descent, with a limit on depth.

use std::sync::Arc;

use super::{
    expression::{Expr, ExprNode, TextTemplate},
    function::FUNCTIONS,
    value::{Absent, DEPTH_MAX, ExprValue, SyntaxError},
};

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// The names so far.
    names: Vec<Arc<str>>,
}

/// Operators by precedence, the loosest first. Within a row, a longer operator stands before one that is its prefix.
const LEVELS: [&[&str]; 5] =
    [&["||"], &["&&"], &["==", "!=", "<=", ">=", "<", ">"], &["+", "-"], &["*", "//", "/", "%"]];

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, depth: usize) -> Self {
        Self { text, at: 0, depth, names: Vec::new() }
    }

    /// An expression by itself.
    fn whole(&mut self) -> Result<Expr, SyntaxError> {
        let node = self.expression()?;
        Ok(Expr { node, names: std::mem::take(&mut self.names) })
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    pub(super) fn expected(&self, expected: &'static str) -> SyntaxError {
        let at: String = self.rest().trim_start().chars().take(24).collect();
        SyntaxError::Expected { at: if at.is_empty() { "the end".to_owned() } else { at }, expected }
    }

    pub(super) fn take(&mut self, token: &str) -> bool {
        self.skip();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn peek_word(&mut self) -> &'a str {
        self.skip();
        let rest = self.rest();
        let starts = rest.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if starts { &rest[..end] } else { "" }
    }

    pub(super) fn keyword(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.at += word.len();
        }
        found
    }

    pub(super) fn end(&mut self) -> Result<(), SyntaxError> {
        self.skip();
        if self.rest().is_empty() { Ok(()) } else { Err(self.expected("an operator or the end")) }
    }

    fn deeper<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, SyntaxError>) -> Result<T, SyntaxError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(SyntaxError::Depth);
        }
        let result = f(self);
        self.depth -= 1;
        result
    }

    pub(super) fn expression(&mut self) -> Result<ExprNode, SyntaxError> {
        self.deeper(|parser| {
            if parser.keyword("if") {
                let condition = parser.expression()?;
                if !parser.keyword("then") {
                    return Err(parser.expected("then"));
                }
                let yes = parser.expression()?;
                if !parser.keyword("else") {
                    return Err(parser.expected("else"));
                }
                return Ok(ExprNode::If(Box::new([condition, yes, parser.expression()?])));
            }
            let first = parser.binary(0)?;
            if parser.take("??") {
                return Ok(ExprNode::Coalesce(Box::new([first, parser.expression()?])));
            }
            Ok(first)
        })
    }

    fn binary(&mut self, level: usize) -> Result<ExprNode, SyntaxError> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(sign) = operators.iter().find(|sign| self.take(sign)) {
            let right = self.binary(level + 1)?;
            left = ExprNode::Binary(sign, Box::new([left, right]));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<ExprNode, SyntaxError> {
        self.deeper(|parser| {
            if parser.take("-") {
                return Ok(ExprNode::Negative(Box::new(parser.unary()?)));
            }
            if parser.take("!") {
                return Ok(ExprNode::Not(Box::new(parser.unary()?)));
            }
            parser.atom()
        })
    }

    fn atom(&mut self) -> Result<ExprNode, SyntaxError> {
        if self.take("(") {
            let inner = self.expression()?;
            return if self.take(")") { Ok(inner) } else { Err(self.expected("a closing parenthesis")) };
        }
        if self.take("[") {
            return self.list_to("]", "a comma or a closing bracket", Self::entry).map(ExprNode::List);
        }
        for quote in ["'", "\""] {
            if self.take(quote) {
                let end = self.rest().find(quote).ok_or_else(|| self.expected("a closing quote"))?;
                let template = TextTemplate::parse_deep(&self.rest()[..end], self.depth)?;
                self.at += end + 1;
                self.names.extend_from_slice(&template.names);
                return Ok(ExprNode::Text(template));
            }
        }
        if self.rest().starts_with(|c: char| c.is_ascii_digit()) {
            return self.number();
        }
        let word = self.peek_word();
        if word.is_empty() {
            return Err(self.expected("a value"));
        }
        self.at += word.len();
        match word {
            "true" => return Ok(ExprNode::Value(ExprValue::Bool(true))),
            "false" => return Ok(ExprNode::Value(ExprValue::Bool(false))),
            "absent" => return Ok(ExprNode::Value(ExprValue::Absent(Arc::new(Absent::Literal)))),
            "then" | "else" => return Err(self.expected("a value before then or else")),
            "config" => return self.members().map(ExprNode::Config),
            "mesh" => {
                let [axis] = <[String; 1]>::try_from(self.members()?).map_err(|_| self.expected("one mesh axis"))?;
                return Ok(ExprNode::Mesh(axis));
            }
            _ => {}
        }
        if !self.take("(") {
            self.names.push(word.into());
            return Ok(ExprNode::Name(word.into()));
        }
        let function = FUNCTIONS.iter().find(|(name, ..)| *name == word);
        let function = function.ok_or_else(|| SyntaxError::Function(word.to_owned()))?;
        let arguments = self.list_to(")", "a comma or a closing parenthesis", Self::expression)?;
        let (name, least, most, _) = function;
        if !(least..=most).contains(&&arguments.len()) {
            let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
            return Err(SyntaxError::Arguments { function: name, expected, found: arguments.len() });
        }
        Ok(ExprNode::Call(function, arguments))
    }

    /// What stands between commas up to a closing token.
    fn list_to<T>(
        &mut self,
        closing: &str,
        expected: &'static str,
        item: impl Fn(&mut Self) -> Result<T, SyntaxError>,
    ) -> Result<Vec<T>, SyntaxError> {
        let mut all = Vec::new();
        while !self.take(closing) {
            if !all.is_empty() && !self.take(",") {
                return Err(self.expected(expected));
            }
            all.push(item(self)?);
        }
        Ok(all)
    }

    /// A number, or a range.
    fn entry(&mut self) -> Result<(ExprNode, Option<ExprNode>), SyntaxError> {
        Ok((self.expression()?, if self.take("..") { Some(self.expression()?) } else { None }))
    }

    /// Names after dots.
    fn members(&mut self) -> Result<Vec<String>, SyntaxError> {
        let mut path = Vec::new();
        while self.rest().starts_with('.') && !self.rest().starts_with("..") {
            self.at += 1;
            let end = self.rest().find(|c| !is_word(c)).unwrap_or(self.rest().len());
            if end == 0 {
                return Err(self.expected("a member's name"));
            }
            path.push(self.rest()[..end].to_owned());
            self.at += end;
        }
        if path.is_empty() { Err(self.expected("a dot and a member's name")) } else { Ok(path) }
    }

    fn number(&mut self) -> Result<ExprNode, SyntaxError> {
        let rest = self.rest();
        let digits = |from: usize| {
            rest[from..].find(|c: char| !c.is_ascii_digit() && c != '_').map_or(rest.len(), |end| from + end)
        };
        let mut end = digits(0);
        let mut whole = true;
        let digit_at = |at: usize| rest.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
        if rest[end..].starts_with('.') && digit_at(end + 1) {
            whole = false;
            end = digits(end + 1);
        }
        if rest[end..].starts_with(['e', 'E']) {
            let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
            if digit_at(end + 1 + sign) {
                whole = false;
                end = digits(end + 1 + sign);
            }
        }
        let text = rest[..end].replace('_', "");
        let value = if whole { text.parse().map(ExprValue::Int).ok() } else { text.parse().map(ExprValue::Float).ok() };
        let value = value.ok_or_else(|| self.expected("a number of at most 64 bits"))?;
        self.at += end;
        Ok(ExprNode::Value(value))
    }
}

impl Expr {
    /// Reads an expression.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse(text: &str) -> Result<Self, SyntaxError> {
        let mut parser = Parser::new(text, 0);
        let expr = parser.whole()?;
        parser.end()?;
        Ok(expr)
    }

    /// Reads a range `start..stop`.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse_range(text: &str) -> Result<(Self, Self), SyntaxError> {
        let mut parser = Parser::new(text, 0);
        let start = parser.whole()?;
        if !parser.take("..") {
            return Err(parser.expected("a range start..stop"));
        }
        let stop = parser.whole()?;
        parser.end()?;
        Ok((start, stop))
    }

    /// Reads expressions separated by commas. `_` gives `None`; an empty text gives an empty list.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse_list(text: &str) -> Result<Vec<Option<Self>>, SyntaxError> {
        let mut parser = Parser::new(text, 0);
        let mut all = Vec::new();
        while parser.end().is_err() {
            if !all.is_empty() && !parser.take(",") {
                return Err(parser.expected("a comma"));
            }
            all.push(if parser.keyword("_") { None } else { Some(parser.whole()?) });
        }
        Ok(all)
    }
}

impl TextTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// [`SyntaxError`].
    pub fn parse(text: &str) -> Result<Self, SyntaxError> {
        Self::parse_deep(text, 0)
    }

    fn parse_deep(text: &str, depth: usize) -> Result<Self, SyntaxError> {
        let mut parser = Parser::new(text, depth);
        let mut parts = Vec::new();
        let mut literal = String::new();
        while let Some(c) = parser.rest().chars().next() {
            if parser.rest().starts_with("{{") || parser.rest().starts_with("}}") {
                literal.push(c);
                parser.at += 2;
            } else if c == '{' {
                parser.at += 1;
                let node = parser.expression()?;
                if !parser.take("}") {
                    return Err(parser.expected("a closing brace"));
                }
                parts.push((std::mem::take(&mut literal), Some(node)));
            } else if c == '}' {
                return Err(parser.expected("no closing brace"));
            } else {
                literal.push(c);
                parser.at += c.len_utf8();
            }
        }
        parts.push((literal, None));
        Ok(Self { parts, names: parser.names })
    }
}
