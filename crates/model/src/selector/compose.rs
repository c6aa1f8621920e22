//! Text of selectors that programs compose, for example of the flags of a command.

/// A value as a selector writes it, in quotes where it needs them.
#[must_use]
pub fn quote_value(value: &str) -> String {
    if !value.is_empty() && is_plain(value) { value.to_owned() } else { format!("\"{}\"", escape(value)) }
}

/// A prefix as a selector writes it: with a star at its end. An empty prefix fits every value that is known.
#[must_use]
pub fn quote_prefix(prefix: &str) -> String {
    if is_plain(prefix) { format!("{prefix}*") } else { format!("\"{}*\"", escape(prefix)) }
}

/// The term that requires one of these values, which are quoted already. `None` without values.
#[must_use]
pub fn any_of(key: &str, quoted_values: &[String]) -> Option<String> {
    match quoted_values {
        [] => None,
        [value] => Some(format!("{key}={value}")),
        values => Some(format!("{key} in ({})", values.join(","))),
    }
}

fn is_plain(value: &str) -> bool {
    value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | ':' | '@'))
}

fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for c in value.chars() {
        if matches!(c, '\\' | '"' | '*') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
