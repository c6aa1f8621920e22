//! Parameters of a connection URL, in the form in which sqlx reads them right.
//!
//! sqlx keeps the brackets of an IPv6 address as a part of the host's name, also when it looks for the password in
//! `.pgpass`. So the address becomes the parameter `host`, which has none. sqlx logs the value of a parameter that it does
//! not know, which may be a password. So such parameters are removed, and only their names are kept.

use std::net::Ipv6Addr;

/// The parameters that sqlx reads. It also reads `options[NAME]`.
const SQLX_PARAMETERS: [&str; 18] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];

/// A URL for sqlx.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AdaptedUrl {
    pub(super) url: String,
    /// Names of the parameters that were removed.
    pub(super) ignored: Vec<String>,
}

/// Adapts a connection URL to sqlx.
pub(super) fn adapt_url(url: &str) -> AdaptedUrl {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let (known, unknown): (Vec<&str>, Vec<&str>) =
        query.split('&').filter(|parameter| !parameter.is_empty()).partition(|parameter| is_known(parameter));
    // The first one, so that a `host` of the URL counts.
    let host = ipv6_host(base).map(|address| format!("host={address}"));
    let parameters: Vec<&str> = host.as_deref().into_iter().chain(known).collect();
    let url =
        if parameters.is_empty() { base.to_owned() } else { format!("{base}?{}", parameters.join("&")) };
    AdaptedUrl { url, ignored: unknown.into_iter().map(describe_name).collect() }
}

/// The IPv6 address between the brackets of a URL without its query.
fn ipv6_host(base: &str) -> Option<&str> {
    let (_, rest) = base.split_once("://")?;
    let authority = rest.split('/').next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (address, _) = host.strip_prefix('[')?.split_once(']')?;
    address.parse::<Ipv6Addr>().is_ok().then_some(address)
}

fn name_of(parameter: &str) -> &str {
    parameter.split_once('=').map_or(parameter, |(name, _)| name)
}

fn is_known(parameter: &str) -> bool {
    let name = name_of(parameter);
    SQLX_PARAMETERS.contains(&name)
        || ["options[", "options%5B", "options%5b"].iter().any(|start| name.starts_with(start))
}

/// The name of a parameter. What is no name may be a part of a password.
fn describe_name(parameter: &str) -> String {
    let name = name_of(parameter);
    let is_name = name.len() < parameter.len()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if is_name { name.to_owned() } else { "(not a name)".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_address_becomes_a_parameter_and_unknown_parameters_go() {
        for (url, adapted, ignored) in [
            ("postgres://kim@db/bmdb", "postgres://kim@db/bmdb", vec![]),
            ("postgres://kim@[::1]/bmdb", "postgres://kim@[::1]/bmdb?host=::1", vec![]),
            (
                "postgres://kim:a@[b@[2001:db8::1]:6003/bmdb?sslmode=require&host=::1",
                "postgres://kim:a@[b@[2001:db8::1]:6003/bmdb?host=2001:db8::1&sslmode=require&host=::1",
                vec![],
            ),
            ("postgres://kim@[db]/bmdb", "postgres://kim@[db]/bmdb", vec![]),
            (
                "postgres://db/bmdb?options[jit]=off&options%5Bjit%5D=off&sslpassword=secret&user=kim",
                "postgres://db/bmdb?options[jit]=off&options%5Bjit%5D=off&user=kim",
                vec!["sslpassword"],
            ),
            (
                "postgres://db/bmdb?load_balance_hosts=random&connect_timeout=3&cret@=x&secret",
                "postgres://db/bmdb",
                vec!["load_balance_hosts", "connect_timeout", "(not a name)", "(not a name)"],
            ),
            ("postgres:///bmdb?", "postgres:///bmdb", vec![]),
        ] {
            let ignored = ignored.into_iter().map(str::to_owned).collect();
            assert_eq!(adapt_url(url), AdaptedUrl { url: adapted.to_owned(), ignored }, "{url}");
        }
    }
}
