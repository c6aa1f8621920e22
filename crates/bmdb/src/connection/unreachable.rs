//! Why a server cannot be reached, in words for the person who wrote its address.

use crate::connection::error::{server_words, without_blocks};

/// Why the server cannot be reached, without the password that some messages repeat.
pub(super) fn unreachable_reason(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Io(io) => match io.to_string().strip_prefix("invalid peer certificate: ") {
            Some(why) => format!(
                "TLS failed: its certificate cannot be verified ({why}); name the CA that issued it by \
                 sslrootcert=FILE in the URL, and write the host name as the certificate has it"
            ),
            None => io.to_string(),
        },
        sqlx::Error::Tls(tls) => format!("TLS failed: {}", without_blocks(&tls.to_string())),
        sqlx::Error::Database(refusal) => refusal_reason(&server_words(refusal.message())),
        other => other.to_string(),
    }
}

/// Why a server or a pooler refuses a connection, from its message.
fn refusal_reason(message: &str) -> String {
    if message.contains("startup parameter") {
        return format!(
            "a pooler in between refuses connection options ({message}); add `ignore_startup_parameters = \
             options,extra_float_digits` to its configuration, and they are set by statements instead"
        );
    }
    // RDS Proxy writes another apostrophe in "doesn't" than one expects.
    if message.contains("RDS Proxy") && message.contains("command-line options") {
        return format!(
            "RDS Proxy in between refuses connection options ({message}); give the address of the server itself"
        );
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::error::{BmdbError, describe_error};

    #[test]
    fn damaged_certificate_of_a_file_is_not_repeated() {
        let damaged = sqlx::Error::Tls("Invalid certificate -----BEGIN CERTIFICATE-----\nAA".into());
        let expected = "TLS failed: Invalid certificate in a file that the URL names; copy it again from where it was issued";
        assert_eq!(unreachable_reason(&damaged), expected);
        assert!(!describe_error(&damaged).contains("-----"), "{}", describe_error(&damaged));
        let other = sqlx::Error::Tls("server does not support TLS".into());
        assert_eq!(unreachable_reason(&other), "TLS failed: server does not support TLS");
    }

    #[test]
    fn pooler_that_refuses_connection_options_is_named_with_what_to_do() {
        for (message, advice) in [
            (
                "unsupported startup parameter: extra_float_digits",
                Some("add `ignore_startup_parameters = options,extra_float_digits`"),
            ),
            (
                "Feature not supported: RDS Proxy currently doesn\u{2019}t support command-line options.",
                Some("RDS Proxy in between refuses connection options"),
            ),
            ("password authentication failed for user \"kim\"", None),
        ] {
            let reason = refusal_reason(message);
            assert!(reason.contains(advice.unwrap_or(message)), "{reason}");
            assert!(reason.contains(message), "{reason}");
            let error = BmdbError::Unreachable { address: "db:5432/bmdb".to_owned(), reason };
            // The question whether it runs would mislead.
            assert_eq!(error.with_advice().contains("Is it running"), advice.is_none(), "{error}");
        }
    }
}
