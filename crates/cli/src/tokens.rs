//! `tokens bootstrap|create|get|revoke`: API credentials.
//!
//! `bootstrap` writes the first one into the BMDB, because nobody can call an API without one. An operator with write
//! access to the BMDB is trusted. The others are created through the API. A token is printed once, alone on standard
//! output, or is written into a file that only its owner can read. It is in no log, no error and no JSON output except
//! that of its creation.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;

use crate::api_decode::{decode_timestamp, require_timestamp};
use crate::command::{BootstrapArgs, CreateToken, RevokeToken};
use crate::contexts::{self, Context, Contexts};
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::get::format_json;
use crate::idempotency_key;
use crate::machine_orders::{current_user, direct_order};
use crate::order_retry;
use crate::output::{Format, format_table, print_stderr, terminal_width};
use crate::pem::encode_pem;
use bmdb::audit::request_digest;
use bmdb::connection::Bmdb;
use bmdb::credential::{MAX_LIFETIME, NewAccessCredential, check_credential_name};
use model::access::{AccessRole, AccessScope};
use model::humanize::relative_time;
use model::time::{Span, Timestamp};
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

/// Most credentials that are listed.
const MAX_LISTED: usize = 100_000;
/// Page size of the API's list: with a hundred providers for each credential, a page still passes the field limit of
/// [`proto::codec`].
const PAGE_SIZE: i32 = 50;
/// Most tokens to create when the responses with the earlier ones are lost.
const MAX_CREATE_ATTEMPTS: u32 = 3;

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

#[derive(Serialize)]
struct CreatedCredentialOutput<'a> {
    credential: String,
    /// The token, unless it was written to a file.
    token: Option<&'a str>,
    path: Option<PathBuf>,
}

/// Runs `tokens bootstrap`: creates the first admin token.
pub async fn bootstrap_token(
    bmdb: &Bmdb,
    arguments: &BootstrapArgs,
    format: Format,
) -> Result<String, CliError> {
    let mut output = arguments.output_file.as_deref().map(absolute_path).transpose()?;
    let place = match &arguments.save_context {
        None => None,
        Some(name) => {
            contexts::check_context_name(name)?;
            let path = absolute_path(&contexts::contexts_path()?)?;
            let contexts = Contexts::read(&path)?;
            let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
            output.get_or_insert_with(|| directory.join(format!("{name}.token")));
            Some((name.clone(), path, directory, contexts, discover_api_servers(bmdb).await?))
        }
    };
    if let Some(file) = &output {
        contexts::check_token_writable(file)?;
    }
    let name = arguments.name.clone().unwrap_or_else(current_user);
    check_credential_name(&name).map_err(|error| CliError::Invalid(format!("--name: {error}")))?;
    let new = NewAccessCredential {
        name: name.clone(),
        role: AccessRole::Admin,
        scope: AccessScope::Fleet,
        expires_after: arguments.expires_after,
        certificate: None,
    };
    let reason = Some("the first credential, made in the BMDB directly");
    let order = direct_order("shepherd.fleet.v1.Credentials/Create", format!("credential of {name}"), reason);
    let made = bmdb.create_credential(order, new).await?;
    let id = made.credential.map(|credential| credential.id.to_string()).unwrap_or_default();
    let mut printed = deliver_token(&id, made.token.as_ref(), output.as_deref(), format)?;
    if let Some((name, path, directory, mut contexts, (servers, authority))) = place {
        let ca_certificate_path = authority.as_ref().map(|_| directory.join(format!("{name}.ca.pem")));
        if let (Some(path), Some(authority)) = (&ca_certificate_path, &authority) {
            contexts::write_file_atomic(path, authority.as_bytes(), 0o644)?;
        }
        let context = Context { servers, ca_certificate_path, token_path: output.unwrap_or_default() };
        contexts.contexts.insert(name.clone(), context);
        contexts.current = Some(name.clone());
        contexts.write(&path)?;
        if format == Format::Table {
            let _ =
                writeln!(printed, "The context {name} stands in {} and is used from now on.", path.display());
        }
    }
    Ok(printed)
}

/// The path relative to the root, so that it is valid from every directory.
fn absolute_path(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path)
        .map_err(|error| CliError::Invalid(format!("{}: this is no path: {error}", path.display())))
}

/// The live API servers and the CA certificates that verify them, PEM. The certificates are `None` if the servers
/// publish none, because clients trust them by their own trust stores.
async fn discover_api_servers(bmdb: &Bmdb) -> Result<(Vec<String>, Option<String>), CliError> {
    let (mut servers, mut authorities) = (Vec::new(), Vec::new());
    for place in bmdb.list_api_servers().await? {
        servers.extend(place.endpoints);
        authorities.extend(place.ca_certificates);
    }
    servers.dedup();
    authorities.sort_unstable();
    authorities.dedup();
    if servers.is_empty() {
        return Err(CliError::Invalid(
            "no shepherd answers operators at this moment, so there is nothing to save a context of; start one, or \
             leave out --save_context"
                .to_owned(),
        ));
    }
    // Decoded and encoded again, so that only Base64 gets into the file.
    let pem = |der: &String| encode_pem("CERTIFICATE", &STANDARD.decode(der).unwrap_or_default());
    let authorities = Some(authorities.iter().map(pem).collect()).filter(|pem: &String| !pem.is_empty());
    Ok((servers, authorities))
}

/// Prints the token once, or writes it into a file.
fn deliver_token(
    id: &str,
    token: Option<&SecretString>,
    file: Option<&Path>,
    format: Format,
) -> Result<String, CliError> {
    if let (Some(token), Some(file)) = (token, file) {
        contexts::write_token(file, token).map_err(|error| {
            CliError::Failed(format!(
                "{error}, and nobody has it; end it by: shepherdctl tokens revoke {id} --reason 'was lost'"
            ))
        })?;
    }
    let shown = token.filter(|_| file.is_none()).map(SecretString::expose_secret);
    if format == Format::Json {
        return format_json(&CreatedCredentialOutput {
            credential: id.to_owned(),
            token: shown,
            path: file.map(Path::to_owned),
        });
    }
    Ok(match (shown, file) {
        (Some(token), _) => format!("{token}\n"),
        (None, Some(file)) if token.is_some() => {
            format!("The token {id} is in {}, which only you may read.\n", file.display())
        }
        _ => format!("{id} is good from now on.\n"),
    })
}

/// Runs `tokens create`: creates a token or pins a client certificate.
pub async fn create_token(
    client: &FleetClient,
    arguments: &CreateToken,
    format: Format,
) -> Result<String, CliError> {
    if let Some(file) = &arguments.output_file {
        contexts::check_token_writable(file)?;
    }
    let fingerprint = arguments.certificate.as_deref().map(certificate_fingerprint).transpose()?;
    let (id, token) = create_credential(client, arguments, fingerprint).await?;
    deliver_token(&id, token.as_ref(), arguments.output_file.as_deref(), format)
}

/// Creates the credential, and returns its id, and its token if it has one.
async fn create_credential(
    client: &FleetClient,
    arguments: &CreateToken,
    fingerprint: Option<[u8; 32]>,
) -> Result<(String, Option<SecretString>), CliError> {
    let mut client = client.clone();
    for _ in 0..MAX_CREATE_ATTEMPTS {
        let give = async |service, order| {
            let request = v1::CreateCredentialRequest {
                order: Some(order),
                name: arguments.name.clone(),
                role: arguments.role.clone(),
                providers: arguments.provider.clone(),
                expires_after: arguments.expires_after.map(|span| span.to_string()).unwrap_or_default(),
                certificate_sha256: fingerprint.map(hex::encode).unwrap_or_default(),
            };
            CredentialsClient::new(service).create(request).await
        };
        let made = order_retry::send_order(&mut client, &arguments.reason, give).await?;
        let lost = match create_outcome(made, fingerprint.is_some()) {
            CreateOutcome::Created(id, token) => return Ok((id, token)),
            CreateOutcome::Rejected(text) => return Err(CliError::Invalid(text)),
            // A repetition with the same key would get the same response.
            CreateOutcome::TokenLost(id) if idempotency_key::is_explicit() => {
                return Err(idempotency_key::repeated_token(&id));
            }
            CreateOutcome::TokenLost(id) => id,
        };
        print_stderr(&format!(
            "shepherdctl: the token {lost} was made and lost on its way here; it is revoked, and another \
             one made"
        ));
        revoke_credential(&mut client, &lost, "it was lost on its way to the requesting client").await?;
    }
    Err(CliError::Failed(format!(
        "{MAX_CREATE_ATTEMPTS} tokens were made, lost on their way here, and revoked; try again when the connection is \
         better"
    )))
}

/// Outcome of the creation of a credential.
#[derive(Debug)]
enum CreateOutcome {
    /// The credential exists; with its token if it has one.
    Created(String, Option<SecretString>),
    /// The credential exists, but the response with its token was lost, and the token cannot be retrieved.
    TokenLost(String),
    /// The credential does not exist; the reason as a sentence.
    Rejected(String),
}

fn create_outcome(made: v1::CreateCredentialResponse, pinned: bool) -> CreateOutcome {
    let token = Some(made.token).filter(|token| !token.is_empty()).map(SecretString::from);
    if let Some(credential) = made.credential {
        return CreateOutcome::Created(credential.credential_id, token);
    }
    let order = made.order.unwrap_or_default();
    // The response to a repeated order contains the credential only in the audited state.
    let written = order.after.as_ref().and_then(|after| after.fields.get("credential")?.kind.as_ref());
    match written {
        Some(prost_types::value::Kind::StringValue(id)) if order.replayed && order.changed => {
            if pinned {
                CreateOutcome::Created(id.clone(), None)
            } else {
                CreateOutcome::TokenLost(id.clone())
            }
        }
        _ => CreateOutcome::Rejected(order.message),
    }
}

async fn revoke_credential(
    client: &mut FleetClient,
    id: &str,
    reason: &str,
) -> Result<v1::OrderResponse, CliError> {
    let give = async |service, order| {
        let request = v1::RevokeCredentialRequest { order: Some(order), credential_id: id.to_owned() };
        CredentialsClient::new(service).revoke(request).await
    };
    order_retry::send_order(client, reason, give).await
}

fn certificate_fingerprint(path: &Path) -> Result<[u8; 32], CliError> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;
    let der = CertificateDer::from_pem_file(path).map_err(|error| {
        CliError::Invalid(format!(
            "--certificate {}: no certificate in PEM can be read there: {error}",
            path.display()
        ))
    })?;
    Ok(request_digest(&der))
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
            "no credential was made yet; `shepherdctl tokens bootstrap` makes the first one\n".to_owned()
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
        (true, _, Some(at)) => format!("good, ends {}", moment(at)),
        (true, _, None) => "good".to_owned(),
        (false, _, Some(at)) => format!("expired {}", moment(at)),
        (false, _, None) => "over".to_owned(),
    };
    let providers = if line.providers.is_empty() { "all".to_owned() } else { line.providers.join(",") };
    vec![line.credential.clone(), line.kind.clone(), line.name.clone(), line.role.clone(), providers, state]
}

/// Runs `tokens revoke`: revokes a credential.
pub async fn revoke_token(
    client: &FleetClient,
    arguments: &RevokeToken,
    format: Format,
) -> Result<String, CliError> {
    let id = arguments.credential.to_string();
    let done = revoke_credential(&mut client.clone(), &id, &arguments.reason).await?;
    match format {
        Format::Json => format_json(&serde_json::json!({
            "credential": id, "changed": done.changed, "message": done.message,
        })),
        Format::Table => Ok(format!("{id} {}\n", done.message)),
    }
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

/// Parses the lifetime of a credential, for example `90d`.
pub fn parse_lifetime(text: &str) -> Result<Span, String> {
    let span: Span =
        text.parse().map_err(|_| format!("{text:?} is no length of time; write for example 90d or 12h"))?;
    if span > MAX_LIFETIME {
        return Err("that is longer than ten years; leave it out for no end".to_owned());
    }
    Ok(span)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn order_response(changed: bool, repeated: bool) -> v1::OrderResponse {
        let kind = Some(prost_types::value::Kind::StringValue("c-1".into()));
        let fields = BTreeMap::from([("credential".to_owned(), prost_types::Value { kind })]);
        let after = Some(prost_types::Struct { fields });
        v1::OrderResponse {
            message: "denied".into(),
            changed,
            replayed: repeated,
            after,
            ..Default::default()
        }
    }

    fn create_response(token: &str, there: bool, order: v1::OrderResponse) -> v1::CreateCredentialResponse {
        let credential = there.then(|| v1::Credential { credential_id: "c-1".into(), ..Default::default() });
        v1::CreateCredentialResponse { credential, token: token.into(), order: Some(order) }
    }

    #[test]
    fn lost_token_is_detected() {
        for (answer, pinned, expected) in [
            (create_response("t", true, order_response(true, false)), false, "made c-1 with its token"),
            (create_response("", true, order_response(true, false)), true, "made c-1"),
            (create_response("", false, order_response(true, true)), true, "made c-1"),
            (create_response("", false, order_response(true, true)), false, "lost c-1"),
            (create_response("", false, order_response(false, true)), false, "refused: denied"),
            (
                create_response(
                    "",
                    false,
                    v1::OrderResponse { message: "denied".into(), ..Default::default() },
                ),
                true,
                "refused: denied",
            ),
        ] {
            let found = match create_outcome(answer, pinned) {
                CreateOutcome::Created(id, Some(_)) => format!("made {id} with its token"),
                CreateOutcome::Created(id, None) => format!("made {id}"),
                CreateOutcome::TokenLost(id) => format!("lost {id}"),
                CreateOutcome::Rejected(text) => format!("refused: {text}"),
            };
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn context_paths_are_absolute() {
        let here = std::env::current_dir().unwrap();
        for (given, expected) in [("a.token", here.join("a.token")), ("/b/c", PathBuf::from("/b/c"))] {
            assert_eq!(absolute_path(Path::new(given)).unwrap(), expected);
        }
        assert!(absolute_path(Path::new("")).is_err());
    }
}
