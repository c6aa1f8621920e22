//! `whoami`: the caller, as the server sees it.

use crate::client::decode::{decode_timestamp, missing_field};
use crate::client::fleet_client::status_to_error;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::output::table::terminal_width;
use crate::output::{Format, format_json};
use model::humanize::relative_and_absolute_time;
use model::text_layout::format_labelled;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

pub(crate) const WHOAMI_EXAMPLES: &str = "\
Example:
  shepherdctl whoami --context prod";

/// Runs `whoami`: prints the name, the role and the credential of the caller.
pub(crate) async fn show_caller(context: &CommandContext) -> Result<String, CliError> {
    let result = CredentialsClient::new(context.client.channel()).who_am_i(v1::WhoAmIRequest {}).await;
    let response = result.map_err(status_to_error)?.into_inner();
    match context.format {
        Format::Json => format_json(&ObjectDocument::of_message(&response).to_json()?),
        Format::Table => {
            let credential = response.credential.ok_or_else(|| missing_field("the caller's credential"))?;
            let now = Timestamp::from(std::time::SystemTime::now());
            let lines = caller_lines(&credential, context.client.current_server(), now);
            Ok(format_labelled(0, &lines, terminal_width()))
        }
    }
}

fn caller_lines(credential: &v1::Credential, server: &str, now: Timestamp) -> Vec<(String, String)> {
    let providers = &credential.providers;
    let providers = if providers.is_empty() { "all".to_owned() } else { providers.join(", ") };
    let mut lines = vec![("name", credential.name.clone()), ("role", credential.role.clone())];
    lines.push(("providers", providers));
    // A login to the database has no credential.
    let id = &credential.credential_id;
    lines.push(("kind", credential.kind.clone()));
    if !id.is_empty() {
        lines.push(("credential", id.clone()));
    }
    if let Some(at) = credential.expires_at.and_then(decode_timestamp) {
        lines.push(("expires", relative_and_absolute_time(at, now)));
    }
    lines.push(("server", server.to_owned()));
    lines.into_iter().map(|(label, value)| (label.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_has_a_line_for_what_it_has() {
        let now = Timestamp::from_timestamp(0, 0).unwrap();
        let login = v1::Credential {
            kind: "database-login".to_owned(),
            name: "kim@host".to_owned(),
            role: "admin".to_owned(),
            ..v1::Credential::default()
        };
        let lines = format_labelled(0, &caller_lines(&login, "the database", now), None);
        let expected = "\
name       kim@host
role       admin
providers  all
kind       database-login
server     the database
";
        assert_eq!(lines, expected);
        let token = v1::Credential {
            credential_id: "c".to_owned(),
            kind: "token".to_owned(),
            providers: vec!["a".to_owned(), "b".to_owned()],
            expires_at: Some(prost_types::Timestamp { seconds: 60, nanos: 0 }),
            ..login
        };
        let lines = caller_lines(&token, "s:1", now);
        for (label, value) in [("providers", "a, b"), ("credential", "c"), ("server", "s:1")] {
            assert!(lines.contains(&(label.to_owned(), value.to_owned())), "{label}: {lines:?}");
        }
        let expires = lines.iter().find(|(label, _)| label == "expires");
        assert!(expires.is_some_and(|(_, value)| value.starts_with("in 1m (1970-01-01")), "{lines:?}");
    }
}
