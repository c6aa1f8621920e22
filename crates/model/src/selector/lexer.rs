//! The text of a selector as terms: key, operator and values, which are not checked yet.

use crate::selector::error::{SelectorError, quote_excerpt};

/// A value without its quotes and backslashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RawValue {
    /// The value; without the star if it is a prefix.
    pub(super) text: String,
    /// Whether a star follows it.
    pub(super) is_prefix: bool,
}

/// What a term requires of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Nothing follows the key.
    Present,
    Equal(RawValue),
    NotEqual(RawValue),
    AtLeast(RawValue),
    In(Vec<RawValue>),
    NotIn(Vec<RawValue>),
}

/// A term whose key and values are not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RawTerm<'t> {
    /// The whole term, for errors.
    pub(super) text: &'t str,
    /// Whether an exclamation mark precedes the key.
    pub(super) is_negated: bool,
    /// The key, with that of a label after its dot.
    pub(super) key: &'t str,
    /// Where the key is in the selector, in bytes.
    pub(super) key_at: usize,
    /// What is required of it.
    pub(super) condition: Condition,
}

impl RawTerm<'_> {
    /// The number of its values.
    pub(super) const fn value_count(&self) -> usize {
        match &self.condition {
            Condition::Present => 0,
            Condition::Equal(_) | Condition::NotEqual(_) | Condition::AtLeast(_) => 1,
            Condition::In(values) | Condition::NotIn(values) => values.len(),
        }
    }
}

/// Splits a selector into its terms, without empty ones.
pub(super) fn split_terms(source: &str) -> Result<Vec<RawTerm<'_>>, SelectorError> {
    let mut scanner = Scanner { source, at: 0 };
    let mut terms = Vec::new();
    loop {
        scanner.skip_while(|c| c == ',' || c.is_whitespace());
        if scanner.rest().is_empty() {
            return Ok(terms);
        }
        terms.push(scanner.next_term()?);
    }
}

/// Whether a character may be in a key.
fn is_key_char(c: char) -> bool {
    !c.is_whitespace() && !matches!(c, ',' | '=' | '!' | '<' | '>' | '(' | ')' | '"')
}

/// A place in the text of a selector.
struct Scanner<'t> {
    source: &'t str,
    /// Distance of the place from the beginning, in bytes.
    at: usize,
}

impl<'t> Scanner<'t> {
    fn rest(&self) -> &'t str {
        &self.source[self.at..]
    }

    /// Passes over the characters for which `skips` is true, and returns them.
    fn skip_while(&mut self, skips: impl Fn(char) -> bool) -> &'t str {
        let rest = self.rest();
        let length = rest.find(|c: char| !skips(c)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn skip_space(&mut self) {
        self.skip_while(char::is_whitespace);
    }

    /// Passes over `text` if it is here, and returns whether it is.
    fn take(&mut self, text: &str) -> bool {
        let is_here = self.rest().starts_with(text);
        if is_here {
            self.at += text.len();
        }
        is_here
    }

    fn next_term(&mut self) -> Result<RawTerm<'t>, SelectorError> {
        let begin = self.at;
        let is_negated = self.take("!");
        self.skip_space();
        let (key_at, key) = (self.at, self.skip_while(is_key_char));
        if key.is_empty() {
            return Err(SelectorError::new(format!(
                "a term of a selector begins with its key, and {} does not; write for example location=ams*",
                quote_excerpt(&self.source[begin..])
            )));
        }
        self.skip_space();
        let condition = self.next_condition(begin)?;
        let text = self.source[begin..self.at].trim_end();
        self.skip_space();
        if !self.ends_term() {
            return Err(SelectorError::new(format!(
                "more text follows the value of {}; a comma ends a term, and a value in quotes is quoted as a whole",
                quote_excerpt(text)
            )));
        }
        Ok(RawTerm { text, is_negated, key, key_at, condition })
    }

    /// Whether a term ends here.
    fn ends_term(&self) -> bool {
        self.rest().is_empty() || self.rest().starts_with(',')
    }

    /// The operator and the values of the term that began at `begin`.
    fn next_condition(&mut self, begin: usize) -> Result<Condition, SelectorError> {
        if self.ends_term() {
            return Ok(Condition::Present);
        }
        if self.take(">=") {
            return Ok(Condition::AtLeast(self.next_value(begin)?));
        }
        if self.take("!=") {
            return Ok(Condition::NotEqual(self.next_value(begin)?));
        }
        if self.take("==") || self.take("=") {
            return Ok(Condition::Equal(self.next_value(begin)?));
        }
        let (key, rest) = (self.source[begin..self.at].trim_end(), self.rest());
        let word = &rest[..rest.find(|c: char| !is_key_char(c)).unwrap_or(rest.len())];
        if matches!(word, "in" | "notin") {
            self.at += word.len();
            self.skip_space();
            if !self.take("(") {
                return Err(SelectorError::new(format!(
                    "{} needs values in parentheses; write for example location {word} (ams,fra)",
                    quote_excerpt(&format!("{key} {word}"))
                )));
            }
            let values = self.next_values(begin)?;
            return Ok(if word == "in" { Condition::In(values) } else { Condition::NotIn(values) });
        }
        Err(SelectorError::new(format!(
            "{} is followed by no operator of a selector; the operators are =, !=, >=, in (A,B) and notin (A,B)",
            quote_excerpt(key)
        )))
    }

    /// The one value of a term, up to the comma that ends it.
    fn next_value(&mut self, begin: usize) -> Result<RawValue, SelectorError> {
        self.skip_space();
        if self.rest().starts_with('"') {
            let quoted = self.next_quoted(begin)?;
            return decode_value(quoted, &self.source[begin..self.at]);
        }
        let rest = self.rest();
        let mut escaped = false;
        let mut length = rest.len();
        for (at, c) in rest.char_indices() {
            if c == ',' && !escaped && comma_ends_term(&rest[at + 1..]) {
                length = at;
                break;
            }
            escaped = c == '\\' && !escaped;
        }
        self.at += length;
        decode_value(rest[..length].trim_end(), &self.source[begin..self.at])
    }

    /// The values in parentheses, after the opening one.
    fn next_values(&mut self, begin: usize) -> Result<Vec<RawValue>, SelectorError> {
        let mut values = Vec::new();
        loop {
            self.skip_space();
            let is_quoted = self.rest().starts_with('"');
            let raw = if is_quoted { self.next_quoted(begin)? } else { self.next_listed() };
            self.skip_space();
            let is_last = self.take(")");
            let text = &self.source[begin..self.at];
            if !is_last && self.rest().is_empty() {
                return Err(SelectorError::new(format!(
                    "{} has a parenthesis that is not closed",
                    quote_excerpt(text)
                )));
            }
            if !is_last && !self.take(",") {
                return Err(SelectorError::new(format!(
                    "more text follows a value in quotes in {}; separate values by commas",
                    quote_excerpt(text)
                )));
            }
            if raw.is_empty() && !is_quoted {
                let text = quote_excerpt(text);
                return Err(SelectorError::new(if values.is_empty() && is_last {
                    format!("{text} has no values; write them between the parentheses, separated by commas")
                } else {
                    format!("{text} has an empty value between its parentheses; remove a comma")
                }));
            }
            values.push(decode_value(raw, text)?);
            if is_last {
                return Ok(values);
            }
        }
    }

    /// A value in parentheses without quotes, up to a comma or the closing parenthesis.
    fn next_listed(&mut self) -> &'t str {
        let rest = self.rest();
        let mut escaped = false;
        let ends = |(_, c): &(usize, char)| {
            let ends = matches!(c, ',' | ')') && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        };
        let length = rest.char_indices().find(ends).map_or(rest.len(), |(at, _)| at);
        self.at += length;
        rest[..length].trim_end()
    }

    /// The text between the quotes that begin here.
    fn next_quoted(&mut self, begin: usize) -> Result<&'t str, SelectorError> {
        let quoted = &self.rest()[1..];
        let mut escaped = false;
        for (at, c) in quoted.char_indices() {
            if c == '"' && !escaped {
                self.at += at + 2;
                return Ok(&quoted[..at]);
            }
            escaped = c == '\\' && !escaped;
        }
        let text = quote_excerpt(&self.source[begin..]);
        Err(SelectorError::new(format!("{text} has a quote that is not closed")))
    }
}

/// Whether a comma in a value without quotes ends the term, by the text after it. One before a space belongs to the value
/// unless a term follows.
fn comma_ends_term(after: &str) -> bool {
    !after.starts_with(char::is_whitespace) || begins_term(after.trim_start())
}

/// Whether a term begins here, or nothing follows.
fn begins_term(text: &str) -> bool {
    if text.is_empty() || text.starts_with([',', '!']) || text.starts_with("label.") {
        return true;
    }
    let key = &text[..text.find(|c: char| !is_key_char(c)).unwrap_or(text.len())];
    let after = text[key.len()..].trim_start();
    if key.is_empty() {
        return false;
    }
    let operator = ["=", "!=", ">="].iter().any(|sign| after.starts_with(sign));
    let is_set = ["in", "notin"]
        .iter()
        .any(|word| after.strip_prefix(word).is_some_and(|values| values.trim_start().starts_with('(')));
    // What a shell leaves of a term with `>=` that is not quoted.
    let is_torn = matches!(key, "memory" | "cpus") && (after.is_empty() || after.starts_with(','));
    operator || is_set || is_torn
}

/// A value without its backslashes and its star. `term` is for errors.
fn decode_value(raw: &str, term: &str) -> Result<RawValue, SelectorError> {
    let mut value = RawValue { text: String::with_capacity(raw.len()), is_prefix: false };
    let mut characters = raw.chars().peekable();
    while let Some(c) = characters.next() {
        if c == '*' {
            if characters.peek().is_some() {
                return Err(SelectorError::new(format!(
                    "{} has a star within a value; a star at the end makes a prefix, and \\* is the character itself",
                    quote_excerpt(term.trim_end())
                )));
            }
            value.is_prefix = true;
            break;
        }
        let escaped =
            (c == '\\').then(|| characters.next_if(|next| matches!(next, ',' | '"' | '\\' | '*'))).flatten();
        value.text.push(escaped.unwrap_or(c));
    }
    Ok(value)
}
