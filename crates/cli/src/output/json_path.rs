//! `JSONPath` templates of `-o jsonpath=…`, as kubectl has them.
//!
//! A template is text with actions in braces: a path (`{.phase}`), `{range PATH}` and `{end}` around what is repeated for
//! each value, and quoted text (`{"\n"}`). A library evaluates the paths of RFC 9535. Those of kubectl differ: `$` is
//! optional, a dot within a name is escaped, and a name may have any other character. So a path is rewritten here, and
//! what has no equivalent is refused.
//!
//! Several names in brackets are alternatives, and each may be a path of its own: `['name.providerId','phase']`. The
//! standard has no such union, so a path here is a list of standard paths, one for each alternative.

use jsonpath_rust::parser::model::JpQuery;
use jsonpath_rust::parser::parse_json_path;
use jsonpath_rust::query::js_path_process;
use serde_json::Value;

/// Longest template, in bytes.
const MAX_TEMPLATE_BYTES: usize = 8 << 10;
/// Most alternatives of a path.
const MAX_ALTERNATIVES: usize = 16;
/// Deepest nesting of ranges.
const MAX_RANGES: usize = 8;

/// A template that is valid.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonPathTemplate {
    parts: Vec<TemplatePart>,
}

#[derive(Clone, Debug, PartialEq)]
enum TemplatePart {
    Text(String),
    Path(ObjectPath),
    /// Repeated for each value of the path.
    Range(ObjectPath, Vec<TemplatePart>),
}

/// What is between two braces.
enum Action {
    Text(String),
    Path(ObjectPath),
    Range(ObjectPath),
    End,
}

/// A path to values in a document.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectPath {
    alternatives: Vec<JpQuery>,
}

impl JsonPathTemplate {
    /// Parses a template. The error is a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_TEMPLATE_BYTES {
            return Err(format!("the template is longer than {} KiB", MAX_TEMPLATE_BYTES >> 10));
        }
        let (mut parts, mut ranges) = (Vec::new(), Vec::new());
        let (mut rest, mut has_action) = (text, false);
        while let Some((literal, after)) = rest.split_once('{') {
            push_text(&mut parts, literal);
            let (action, after) =
                split_at(after, '}').ok_or_else(|| format!("a brace is not closed before {after:?} ends"))?;
            (rest, has_action) = (after, true);
            match parse_action(action.trim())? {
                Action::Text(text) => push_text(&mut parts, &text),
                Action::Path(path) => parts.push(TemplatePart::Path(path)),
                Action::Range(path) => {
                    if ranges.len() == MAX_RANGES {
                        return Err(format!("more than {MAX_RANGES} ranges are in one another"));
                    }
                    ranges.push((path, std::mem::take(&mut parts)));
                }
                Action::End => {
                    let (path, outer) =
                        ranges.pop().ok_or_else(|| "{end} has no {range} before it".to_owned())?;
                    let repeated = std::mem::replace(&mut parts, outer);
                    parts.push(TemplatePart::Range(path, repeated));
                }
            }
        }
        push_text(&mut parts, rest);
        if !has_action {
            return Err("a template has its paths in braces, for example '{.phase}'".to_owned());
        }
        if !ranges.is_empty() {
            return Err("{range} has no {end} after it".to_owned());
        }
        Ok(Self { parts })
    }

    /// The text for a document.
    #[must_use]
    pub fn render(&self, document: &Value) -> String {
        let mut text = String::new();
        render_parts(&self.parts, document, &mut text);
        text
    }
}

impl ObjectPath {
    /// Parses a path as kubectl has it. The error is a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let unsupported = || format!("{text:?} is no path that can be evaluated");
        let mut rest = text.strip_prefix(['$', '@']).unwrap_or(text);
        if text.is_empty() {
            return Err(unsupported());
        }
        if rest == "." {
            rest = "";
        }
        let mut paths = vec!["$".to_owned()];
        while !rest.is_empty() {
            let (prefix, after) = match rest.strip_prefix("..") {
                Some(after) => ("..", after),
                None => ("", rest.strip_prefix('.').unwrap_or(rest)),
            };
            let (segments, after) = if let Some(inner) = after.strip_prefix('[') {
                let (inner, after) = split_at(inner, ']').ok_or_else(unsupported)?;
                (bracket_segments(inner.trim()).ok_or_else(unsupported)?, after)
            } else if after.len() < rest.len() {
                let (name, after) = split_name(after, false).ok_or_else(unsupported)?;
                let segment = if name == "*" { "[*]".to_owned() } else { name_segment(&name) };
                (vec![segment], after)
            } else {
                return Err(unsupported());
            };
            paths = segments
                .iter()
                .flat_map(|segment| paths.iter().map(move |path| format!("{path}{prefix}{segment}")))
                .collect();
            if paths.len() > MAX_ALTERNATIVES {
                return Err(format!("{text:?} has more than {MAX_ALTERNATIVES} alternatives"));
            }
            rest = after;
        }
        let alternatives = paths.iter().map(|path| parse_json_path(path).map_err(|_| unsupported()));
        Ok(Self { alternatives: alternatives.collect::<Result<_, _>>()? })
    }

    /// The values at the path; empty if there are none.
    #[must_use]
    pub fn find<'a>(&self, document: &'a Value) -> Vec<&'a Value> {
        let found = self.alternatives.iter().flat_map(|path| {
            // Only a function returns something else than values of the document, and no path ends with one.
            js_path_process(path, document).unwrap_or_default()
        });
        found.map(|one| one.val).collect()
    }
}

/// A value as text: strings without quotes, and objects and lists as JSON.
#[must_use]
pub fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The text before a separator and after it. One within quotes or brackets does not count.
pub(super) fn split_at(text: &str, separator: char) -> Option<(&str, &str)> {
    let (mut quote, mut escaped, mut depth) = (None, false, 0_usize);
    for (index, c) in text.char_indices() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (_, '\\') => escaped = true,
            (Some(open), c) if c == open => quote = None,
            (None, c) if c == separator && depth == 0 => {
                return Some((&text[..index], &text[index + c.len_utf8()..]));
            }
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '(' | '{') => depth += 1,
            (None, ']' | ')' | '}') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

fn push_text(parts: &mut Vec<TemplatePart>, text: &str) {
    if !text.is_empty() {
        parts.push(TemplatePart::Text(text.to_owned()));
    }
}

fn render_parts(parts: &[TemplatePart], document: &Value, text: &mut String) {
    for part in parts {
        match part {
            TemplatePart::Text(literal) => text.push_str(literal),
            TemplatePart::Path(path) => {
                let values: Vec<String> = path.find(document).into_iter().map(value_text).collect();
                text.push_str(&values.join(" "));
            }
            TemplatePart::Range(path, repeated) => {
                for value in path.find(document) {
                    render_parts(repeated, value, text);
                }
            }
        }
    }
}

fn parse_action(action: &str) -> Result<Action, String> {
    if action.starts_with(['"', '\'']) {
        return unquote(action).map(Action::Text).ok_or_else(|| format!("{action} is no quoted text"));
    }
    if action == "end" {
        return Ok(Action::End);
    }
    if let Some(path) = action.strip_prefix("range").filter(|rest| rest.starts_with(char::is_whitespace)) {
        return ObjectPath::parse(path.trim()).map(Action::Range);
    }
    if action.starts_with(['.', '[', '$', '@']) {
        return ObjectPath::parse(action).map(Action::Path);
    }
    Err(format!(
        "{action:?} is not supported; a template has paths such as {{.phase}}, {{range PATH}}, {{end}} and quoted text"
    ))
}

/// The text between quotes. `None` if it is malformed, or something follows it.
fn unquote(text: &str) -> Option<String> {
    let mut letters = text.chars();
    let (quote, mut unquoted) = (letters.next()?, String::new());
    loop {
        match letters.next()? {
            c if c == quote => return Some(unquoted).filter(|_| letters.as_str().is_empty()),
            '\\' => unquoted.push(match letters.next()? {
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                c @ ('\\' | '"' | '\'') => c,
                _ => return None,
            }),
            c => unquoted.push(c),
        }
    }
}

/// The segments of RFC 9535 for what is between brackets, one for each alternative.
fn bracket_segments(inner: &str) -> Option<Vec<String>> {
    let is_index = |c: char| c.is_ascii_digit() || matches!(c, '-' | ':' | ',' | ' ');
    match inner.chars().next()? {
        '"' | '\'' => quoted_segments(inner),
        '?' => Some(vec![format!("[{inner}]")]),
        '*' if inner == "*" => Some(vec!["[*]".to_owned()]),
        _ if inner.chars().all(is_index) => Some(vec![format!("[{inner}]")]),
        _ => None,
    }
}

/// The segments for quoted names. A dot in a name separates the names of a path.
fn quoted_segments(inner: &str) -> Option<Vec<String>> {
    let (mut alternatives, mut rest) = (Vec::new(), Some(inner));
    while let Some(text) = rest {
        let (part, after) = split_at(text, ',').map_or((text, None), |(part, after)| (part, Some(after)));
        let part = part.trim();
        let quote = part.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        alternatives.push(dotted_segments(part.strip_prefix(quote)?.strip_suffix(quote)?)?);
        rest = after;
    }
    Some(alternatives)
}

fn dotted_segments(text: &str) -> Option<String> {
    let (mut segments, mut rest) = (String::new(), text);
    loop {
        let (name, after) = split_name(rest, true)?;
        segments.push_str(&name_segment(&name));
        if after.is_empty() {
            return Some(segments);
        }
        rest = after.strip_prefix('.')?;
    }
}

/// The name at the beginning of a text, with its escapes resolved, and what follows it.
fn split_name(text: &str, quoted: bool) -> Option<(String, &str)> {
    let (mut name, mut escaped) = (String::new(), false);
    for (index, c) in text.char_indices() {
        match c {
            _ if escaped => {
                name.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '.' => return Some((name, &text[index..])).filter(|(name, _)| !name.is_empty()),
            '[' if !quoted => return Some((name, &text[index..])).filter(|(name, _)| !name.is_empty()),
            _ if !quoted && (c.is_whitespace() || "]{}()\"',".contains(c)) => return None,
            _ => name.push(c),
        }
    }
    Some((name, "")).filter(|(name, _)| !name.is_empty() && !escaped)
}

fn name_segment(name: &str) -> String {
    format!("['{}']", name.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The document of kubectl's page about `JSONPath`.
    fn list() -> Value {
        json!({
            "kind": "List",
            "items": [
                {
                    "kind": "None",
                    "metadata": { "name": "127.0.0.1", "labels": { "kubernetes.io/hostname": "127.0.0.1" } },
                    "status": {
                        "capacity": { "cpu": "4" },
                        "addresses": [{ "type": "LegacyHostIP", "address": "127.0.0.1" }],
                    },
                },
                {
                    "kind": "None",
                    "metadata": { "name": "127.0.0.2" },
                    "status": {
                        "capacity": { "cpu": "8" },
                        "addresses": [
                            { "type": "LegacyHostIP", "address": "127.0.0.2" },
                            { "type": "another", "address": "127.0.0.3" },
                        ],
                    },
                },
            ],
            "users": [
                { "name": "myself", "user": {} },
                { "name": "e2e", "user": { "username": "admin", "password": "secret" } },
            ],
        })
    }

    #[test]
    fn examples_of_kubectl_print_what_its_page_says() {
        for (template, expected) in [
            ("kind is {.kind}", "kind is List"),
            ("{.kind}", "List"),
            ("{$.kind}", "List"),
            ("{['kind']}", "List"),
            ("{.items[*].metadata.name}", "127.0.0.1 127.0.0.2"),
            ("{.items.*.metadata.name}", "127.0.0.1 127.0.0.2"),
            ("{.users[0].name}", "myself"),
            ("{.items[-1].metadata.name}", "127.0.0.2"),
            ("{.items[0:2].metadata.name}", "127.0.0.1 127.0.0.2"),
            (
                "{.items[*]['metadata.name', 'status.capacity']}",
                "127.0.0.1 127.0.0.2 {\"cpu\":\"4\"} {\"cpu\":\"8\"}",
            ),
            ("{.users[?(@.name==\"e2e\")].user.password}", "secret"),
            (
                "{range .items[*]}[{.metadata.name}, {.status.capacity}] {end}",
                "[127.0.0.1, {\"cpu\":\"4\"}] [127.0.0.2, {\"cpu\":\"8\"}] ",
            ),
            ("{range .items[*]}{.metadata.name}{'\\t'}{end}", "127.0.0.1\t127.0.0.2\t"),
            ("{range .items[*]}{.metadata.name}{\"\\n\"}{end}", "127.0.0.1\n127.0.0.2\n"),
            ("{.items[0].metadata.labels.kubernetes\\.io/hostname}", "127.0.0.1"),
            ("{.items[0].metadata.labels['kubernetes\\.io/hostname']}", "127.0.0.1"),
            ("{.nothing.at.all}", ""),
        ] {
            let parsed = JsonPathTemplate::parse(template).unwrap();
            assert_eq!(parsed.render(&list()), expected, "{template}");
        }
        let whole = JsonPathTemplate::parse("{@}").unwrap().render(&list());
        assert_eq!(serde_json::from_str::<Value>(&whole).unwrap(), list());
        let names = JsonPathTemplate::parse("{..name}").unwrap().render(&list());
        let mut names: Vec<&str> = names.split(' ').collect();
        names.sort_unstable();
        assert_eq!(names, ["127.0.0.1", "127.0.0.2", "e2e", "myself"]);
    }

    #[test]
    fn nested_range_is_about_the_value_of_the_outer_one() {
        let template =
            "{range .items[*]}{.metadata.name}:{range .status.addresses[*]} {.address}{end}\n{end}";
        let text = JsonPathTemplate::parse(template).unwrap().render(&list());
        assert_eq!(text, "127.0.0.1: 127.0.0.1\n127.0.0.2: 127.0.0.2 127.0.0.3\n");
    }

    #[test]
    fn unsupported_template_is_refused_with_its_part() {
        for (template, part) in [
            ("", "in braces"),
            ("phase", "in braces"),
            ("{.phase", "not closed"),
            ("{end}", "{end} has no {range}"),
            ("{range .items[*]}{.kind}", "{range} has no {end}"),
            ("{range }", "\"range\" is not supported"),
            ("{length(.items)}", "\"length(.items)\" is not supported"),
            ("{phase}", "\"phase\" is not supported"),
            ("{.}{\"\\x\"}", "is no quoted text"),
            ("{\"a\" b}", "is no quoted text"),
            ("{.items[}", "not closed"),
            ("{.items[x]}", "\".items[x]\" is no path"),
            ("{.items[]}", "is no path"),
            ("{.a.}", "\".a.\" is no path"),
            ("{.a b}", "\".a b\" is no path"),
            ("{.items[?(@.name=~/^test$/)]}", "is no path"),
            ("{.['a','b']['a','b']['a','b']['a','b']['a','b']['a','b']['a','b']}", "16 alternatives"),
        ] {
            let error = JsonPathTemplate::parse(template).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{template}: {error}");
        }
        assert!(JsonPathTemplate::parse(&"{range .a}".repeat(9)).unwrap_err().contains("more than 8 ranges"));
        assert!(JsonPathTemplate::parse(&"x".repeat(9 << 10)).unwrap_err().contains("8 KiB"));
    }
}
