//! Field checks: what a device list and an answer of a provider may have in a field.

use std::net::IpAddr;

use crate::model::plain_text::replace_hidden;

/// The longest text accepted in a field, in bytes.
pub(super) const MAX_FIELD_BYTES: usize = 1024;
/// The longest DNS name (RFC 1035) and the longest label of one, in bytes.
const MAX_DNS_NAME_BYTES: usize = 253;
const MAX_DNS_LABEL_BYTES: usize = 63;
/// How much of a wrong value is shown, in characters.
const MAX_SHOWN_CHARS: usize = 40;

/// Checks that an address is a DNS name or an IP literal without anything else. The error describes the problem.
pub fn check_address(address: &str) -> Result<(), String> {
    let expected = "expected a DNS name or an IP address";
    if address.is_empty() {
        return Err(format!("{expected}, found \"\""));
    }
    if address.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let shown = shorten(address);
    if address.contains('@') {
        return Err(format!("{expected} without a user (that is \"User\"), found {shown:?}"));
    }
    if address.starts_with('[') {
        return Err(format!("{expected} without brackets, found {shown:?}"));
    }
    if let Some((host, port)) = address.rsplit_once(':')
        && !host.contains(':')
        && port.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Err(format!("{expected} without a port (that is \"Port\"), found {shown:?}"));
    }
    let name = address.strip_suffix('.').unwrap_or(address);
    let labels = || name.split('.');
    let well_formed = name.len() <= MAX_DNS_NAME_BYTES
        && labels().all(|label| {
            (1..=MAX_DNS_LABEL_BYTES).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
                && !label.starts_with('-')
                && !label.ends_with('-')
        });
    // A last label of digits is an invalid IPv4 address (RFC 3696, section 2).
    let numeric = labels().next_back().is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()));
    if well_formed && !numeric { Ok(()) } else { Err(format!("{expected}, found {shown:?}")) }
}

/// Shortens a text for an error message and replaces hidden characters.
pub(super) fn shorten(text: &str) -> String {
    let start: String = text.chars().take(MAX_SHOWN_CHARS).collect();
    let mut shown = replace_hidden(&start, &[]);
    if text.chars().nth(MAX_SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_name_or_an_ip_literal() {
        for good in ["h", "a.example", "A-1.example.", "192.0.2.1", "2001:db8::1", "::1", "_x.example", "1a"]
        {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            " ",
            "a b",
            "-a",
            "a..b",
            "[::1]",
            "::1]:22",
            "http://h",
            "h/",
            "1.2.3",
            "fe80::1%eth0",
            "ü.example",
        ] {
            assert!(check_address(bad).is_err(), "{bad}");
        }
    }
}
