//! Parse and print the `host:port` of a callback server.
//!
//! An IPv6 address is in brackets, as in a URL. An endpoint is parsed where it enters (an enrolment, a response),
//! because a malformed one would otherwise show up half an hour later as a machine that never called.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Characters of a malformed endpoint that an error quotes; escaped, each may take ten.
const MAX_QUOTED_CHARS: usize = 100;

/// The address of one callback server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Host {
    Name(String),
    V4(Ipv4Addr),
    V6(Ipv6Addr),
}

/// Why a text is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no endpoint: {reason}; write host:port, 192.0.2.1:port or [2001:db8::1]:port")]
pub struct EndpointError {
    text: String,
    reason: &'static str,
}

impl Endpoint {
    /// The host without brackets, as certificates name it.
    #[must_use]
    pub fn host(&self) -> String {
        match &self.host {
            Host::Name(name) => name.clone(),
            Host::V4(address) => address.to_string(),
            Host::V6(address) => address.to_string(),
        }
    }

    /// The TCP port, never 0.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(f, "{name}:{}", self.port),
            Host::V4(address) => write!(f, "{address}:{}", self.port),
            Host::V6(address) => write!(f, "[{address}]:{}", self.port),
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let error = |reason| EndpointError { text: text.chars().take(MAX_QUOTED_CHARS).collect(), reason };
        let (host, port) = text
            .rsplit_once(':')
            .filter(|_| !text.ends_with(']'))
            .ok_or_else(|| error("it names no port"))?;
        let host = if let Some(rest) = host.strip_prefix('[') {
            let address = rest.strip_suffix(']').ok_or_else(|| error("its bracket is not closed"))?;
            Host::V6(address.parse().map_err(|_| error("the text in brackets is not an IPv6 address"))?)
        } else if host.contains(':') {
            return Err(error("an IPv6 address needs brackets"));
        } else if let Ok(address) = host.parse() {
            Host::V4(address)
        } else {
            Host::Name(host_name(host).ok_or_else(|| error("its host is not a valid host name"))?)
        };
        // `u16::from_str` accepts a leading plus, which no port has.
        let port = Some(port)
            .filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|port| port.parse().ok())
            .filter(|port| *port != 0)
            .ok_or_else(|| error("its port is no number from 1 to 65535"))?;
        Ok(Self { host, port })
    }
}

fn host_name(text: &str) -> Option<String> {
    let labels_fit = text.trim_end_matches('.').split('.').all(|label| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    });
    // A name of digits and dots alone is an IPv4 address that could not be parsed.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    (labels_fit && !is_number && text.len() <= 253).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written_alike() {
        for text in ["shepherd.example:8443", "192.0.2.7:1", "[2001:db8::1]:65535", "[::1]:8443", "a_b-c:80"]
        {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        assert_eq!("[::1]:8443".parse::<Endpoint>().unwrap().host(), "::1");
    }

    #[test]
    fn invalid_endpoint_is_rejected_with_a_reason() {
        for (text, reason) in [
            ("", "it names no port"),
            ("host", "it names no port"),
            ("[2001:db8::1]", "it names no port"),
            (":80", "its host is not a valid host name"),
            ("::1:80", "an IPv6 address needs brackets"),
            ("[::1:80", "its bracket is not closed"),
            ("[nothing]:80", "the text in brackets is not an IPv6 address"),
            ("host:0", "its port is no number from 1 to 65535"),
            ("host:65536", "its port is no number from 1 to 65535"),
            ("host:+80", "its port is no number from 1 to 65535"),
            ("host:", "its port is no number from 1 to 65535"),
            ("1.2.3.400:80", "its host is not a valid host name"),
            ("https://host:80", "an IPv6 address needs brackets"),
            ("ho st:80", "its host is not a valid host name"),
            ("-host:80", "its host is not a valid host name"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap_err().reason, reason, "{text:?}");
        }
    }
}
