//! Finding and masking passwords in connection URLs.
//!
//! A URL on a command line is visible to everybody who lists processes. It works there all the same, because existing
//! users write it so, with a warning; and no log line or error may repeat its password.

/// The warning for a URL with a password that was given as this flag; `None` without a password.
#[must_use]
pub fn password_warning(flag: &str, url: &str) -> Option<String> {
    has_password(url).then(|| {
        format!(
            "warning: everybody who lists processes here can read the password in --{flag}; give the URL in the \
             environment as SHEPHERD_{}, or the password in ~/.pgpass",
            flag.replace('-', "_").to_uppercase()
        )
    })
}

/// Whether a connection URL has a password, between user and host or as a parameter.
#[must_use]
pub fn has_password(url: &str) -> bool {
    mask_password(url) != url
}

/// The URL with its password, if any, replaced by three stars.
#[must_use]
pub fn mask_password(url: &str) -> String {
    let (base, query) = url.split_once('?').map_or((url, None), |(base, query)| (base, Some(query)));
    let mut text = mask_user(base);
    if let Some(query) = query {
        let parts: Vec<String> = query.split('&').map(mask_parameter).collect();
        text.push('?');
        text.push_str(&parts.join("&"));
    }
    text
}

fn mask_user(base: &str) -> String {
    let Some((scheme, rest)) = base.split_once("://") else { return base.to_owned() };
    // The last `@`: a password that was not percent-encoded may hold one, and a `/` too.
    let Some((user, host)) = rest.rsplit_once('@') else { return base.to_owned() };
    let Some((name, password)) = user.split_once(':') else { return base.to_owned() };
    if password.is_empty() {
        return base.to_owned();
    }
    format!("{scheme}://{name}:***@{host}")
}

fn mask_parameter(parameter: &str) -> String {
    match parameter.split_once('=') {
        Some((name, value)) if !value.is_empty() && is_secret(name) => format!("{name}=***"),
        _ => parameter.to_owned(),
    }
}

fn is_secret(name: &str) -> bool {
    ["password", "sslpassword"].iter().any(|secret| name.eq_ignore_ascii_case(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_found_and_masked_everywhere() {
        for (url, expected) in [
            ("postgres://kim:secret@db:5432/bmdb", "postgres://kim:***@db:5432/bmdb"),
            ("postgres://kim:se:cr@et@db/bmdb", "postgres://kim:***@db/bmdb"),
            ("postgres://kim:se/cret@db/bmdb", "postgres://kim:***@db/bmdb"),
            ("postgres://:secret@db/bmdb", "postgres://:***@db/bmdb"),
            (
                "postgres://kim@db/bmdb?sslmode=require&password=secret",
                "postgres://kim@db/bmdb?sslmode=require&password=***",
            ),
            ("postgres:///bmdb?Password=secret&host=/run", "postgres:///bmdb?Password=***&host=/run"),
        ] {
            assert_eq!(mask_password(url), expected);
            assert!(has_password(url), "{url}");
            let warning = password_warning("bmdb_direct_url", url).unwrap();
            assert!(warning.contains("in --bmdb_direct_url; ") && !warning.contains("cret"), "{warning}");
            assert!(warning.contains("SHEPHERD_BMDB_DIRECT_URL"), "{warning}");
            let warning = password_warning("bmdb-url", url).unwrap();
            assert!(
                warning.contains("in --bmdb-url; ") && warning.contains("SHEPHERD_BMDB_URL"),
                "{warning}"
            );
        }
    }

    #[test]
    fn url_without_password_is_left_as_it_is() {
        for url in [
            "postgres://kim@db:5432/bmdb",
            "postgres://db:5432/bmdb",
            "postgres://kim:@db/bmdb",
            "postgres:///bmdb?host=/run/postgresql&user=kim",
            "postgres://db/bmdb?password=",
            "nonsense:with@signs",
            "",
        ] {
            assert_eq!(mask_password(url), url);
            assert_eq!(password_warning("bmdb-url", url), None, "{url}");
        }
    }
}
