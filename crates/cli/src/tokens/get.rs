//! `tokens get`: list of credentials.

use std::fmt::Write as _;

use serde::Serialize;

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use model::humanize::relative_time;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

pub(crate) const GET_EXAMPLES: &str = "\
Example:
  shepherdctl tokens get -o json | jq -r '.credentials[] | select(.active) | .name'";

/// Most credentials that are listed.
const MAX_LISTED: usize = 100_000;
/// Page size of the API's list: with a hundred providers for each credential, a page still passes the field limit of
/// [`proto::codec`].
const PAGE_SIZE: i32 = 50;

/// A credential of the list.
#[derive(Serialize)]
struct CredentialLine {
    credential: String,
    kind: String,
    name: String,
    role: String,
    providers: Vec<String>,
    created_at: Option<Timestamp>,
    created_by: String,
    expires_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
    active: bool,
}

#[derive(Serialize)]
struct CredentialsOutput {
    credentials: Vec<CredentialLine>,
    /// Whether older credentials exist.
    more: bool,
}

/// Runs `tokens get`: lists the credentials.
pub async fn show_tokens(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let mut credentials = CredentialsClient::new(client.channel());
    let (mut lines, mut page_token) = (Vec::new(), String::new());
    let (more, now) = loop {
        let request = v1::ListCredentialsRequest { page_size: PAGE_SIZE, page_token };
        let page = credentials.list(request).await.map_err(status_to_error)?.into_inner();
        lines.extend(page.credentials.into_iter().map(CredentialLine::from));
        page_token = page.next_page_token;
        if page_token.is_empty() || lines.len() >= MAX_LISTED {
            let more = lines.len() > MAX_LISTED || !page_token.is_empty();
            lines.truncate(MAX_LISTED);
            break (more, require_timestamp(page.read_at, "its read time")?);
        }
    };
    if format == Format::Json {
        return format_json(&CredentialsOutput { credentials: lines, more });
    }
    if lines.is_empty() {
        return Ok(
            "no credential exists yet; `shepherdctl tokens bootstrap` creates the first one\n".to_owned()
        );
    }
    let rows: Vec<Vec<String>> = lines.iter().map(|line| credential_row(line, now)).collect();
    let mut text =
        format_table(&["CREDENTIAL", "KIND", "NAME", "ROLE", "PROVIDERS", "STATE"], &rows, terminal_width());
    if more {
        let _ = write!(text, "\nthe newest {MAX_LISTED}, and there are older ones\n");
    }
    Ok(text)
}

fn credential_row(line: &CredentialLine, now: Timestamp) -> Vec<String> {
    let moment = |at: Timestamp| relative_time(at, now);
    let state = match (line.active, line.revoked_at, line.expires_at) {
        (_, Some(at), _) => format!("revoked {}", moment(at)),
        (true, _, Some(at)) => format!("active, expires {}", moment(at)),
        (true, _, None) => "active".to_owned(),
        (false, _, Some(at)) => format!("expired {}", moment(at)),
        (false, _, None) => "ended".to_owned(),
    };
    let providers = if line.providers.is_empty() { "all".to_owned() } else { line.providers.join(",") };
    vec![line.credential.clone(), line.kind.clone(), line.name.clone(), line.role.clone(), providers, state]
}

impl From<v1::Credential> for CredentialLine {
    fn from(of: v1::Credential) -> Self {
        Self {
            credential: of.credential_id,
            kind: of.kind,
            name: of.name,
            role: of.role,
            providers: of.providers,
            created_at: of.created_at.and_then(decode_timestamp),
            created_by: of.created_by,
            expires_at: of.expires_at.and_then(decode_timestamp),
            revoked_at: of.revoked_at.and_then(decode_timestamp),
            active: of.active,
        }
    }
}
