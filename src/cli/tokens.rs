//! `tokens`: credentials for the API, made, listed and ended.
//!
//! `bootstrap` makes the first one, straight in the BMDB: whoever may write there is believed. The others go
//! through the API, or straight there as well. A token is printed once, alone on standard output, or goes
//! into a file that nobody else may read; it is in no log, no error and no answer in JSON but that one.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;
use uuid::Uuid;

use crate::bmdb::audit::{Actor, Order, request_digest};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::credential::{self, Credential, LONGEST_LIFE, NewCredential, check_name};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::cli::command::{Bootstrap, CreateToken, RevokeToken};
use crate::cli::contexts::{self, Context, Contexts};
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::operate::who;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::access::{Role, Scope};
use crate::model::telling::relative;
use crate::model::time::{Span, Timestamp};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::credentials_client::CredentialsClient;

/// Most credentials listed.
const LISTED: usize = 500;

/// A line of the list.
#[derive(Serialize)]
struct Line {
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
struct Listed {
    credentials: Vec<Line>,
    /// Whether there are older ones.
    more: bool,
}

#[derive(Serialize)]
struct Made<'a> {
    credential: String,
    /// The token, where it was not written to a file.
    token: Option<&'a str>,
    path: Option<PathBuf>,
}

fn direct_order(rpc: &str, target: String, reason: Option<&str>) -> Order {
    Order {
        actor: Actor { name: who(), credential: None },
        rpc: format!("shepherd.fleet.v1.Credentials/{rpc}"),
        target,
        reason: reason.unwrap_or_default().to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request: request_digest(&[]),
    }
}

/// `tokens bootstrap`.
pub async fn bootstrap(bmdb: &Bmdb, arguments: &Bootstrap, format: Format) -> Result<String, CliError> {
    let contexts_path = contexts::path();
    let mut output = arguments.output_file.clone();
    let place = match &arguments.save_context {
        None => None,
        Some(name) => {
            contexts::check_name(name)?;
            let path = contexts_path?;
            let directory = path.parent().unwrap_or(Path::new(".")).to_owned();
            output.get_or_insert_with(|| directory.join(format!("{name}.token")));
            Some((name.clone(), path, directory, reached(bmdb).await?))
        }
    };
    if let Some(file) = &output {
        contexts::may_write_token(file)?;
    }
    let name = arguments.name.clone().unwrap_or_else(who);
    check_name(&name).map_err(|said| CliError::Wrong(format!("--name: {said}")))?;
    let new = NewCredential {
        name: name.clone(),
        role: Role::Admin,
        scope: Scope::Everything,
        expires_after: arguments.expires_after,
        certificate: None,
    };
    let reason = Some("the first credential, made in the BMDB directly");
    let made =
        bmdb.create_credential(direct_order("Create", format!("credential of {name}"), reason), new).await?;
    let id = made.credential.map(|credential| credential.id.to_string()).unwrap_or_default();
    let mut said = deliver(&id, made.token.as_ref(), output.as_deref(), format)?;
    if let Some((name, path, directory, (servers, authority))) = place {
        let authority_path = directory.join(format!("{name}.ca.pem"));
        contexts::write_file(&authority_path, authority.as_bytes(), 0o644)?;
        let mut contexts = Contexts::read(&path)?;
        let context =
            Context { servers, ca_certificate_path: authority_path, token_path: output.unwrap_or_default() };
        contexts.contexts.insert(name.clone(), context);
        contexts.current = Some(name.clone());
        contexts.write(&path)?;
        if format == Format::Table {
            let _ =
                writeln!(said, "The context {name} stands in {} and is used from now on.", path.display());
        }
    }
    Ok(said)
}

/// The servers of the API that are alive, and the CA certificates they are verified against, PEM.
async fn reached(bmdb: &Bmdb) -> Result<(Vec<String>, String), CliError> {
    let (mut servers, mut authorities) = (Vec::new(), Vec::new());
    for place in bmdb.api_servers().await? {
        servers.extend(place.endpoints);
        authorities.extend(place.ca_certificates);
    }
    servers.dedup();
    authorities.sort_unstable();
    authorities.dedup();
    if servers.is_empty() {
        return Err(CliError::Wrong(
            "no shepherd answers operators at this moment, so there is nothing to save a context of; start one, or \
             leave out --save_context"
                .to_owned(),
        ));
    }
    let pem = |der: &String| {
        // Read and written again, so that only what is base64 gets into the file.
        let der = STANDARD.decode(der).unwrap_or_default();
        let lines = STANDARD.encode(der);
        let lines: Vec<&str> =
            lines.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
    };
    Ok((servers, authorities.iter().map(pem).collect()))
}

/// Gives a token to whoever asked for it, once.
fn deliver(
    id: &str,
    token: Option<&SecretString>,
    file: Option<&Path>,
    format: Format,
) -> Result<String, CliError> {
    if let (Some(token), Some(file)) = (token, file) {
        contexts::write_token(file, token)?;
    }
    let shown = token.filter(|_| file.is_none()).map(SecretString::expose_secret);
    if format == Format::Json {
        return json(&Made { credential: id.to_owned(), token: shown, path: file.map(Path::to_owned) });
    }
    Ok(match (shown, file) {
        (Some(token), _) => format!("{token}\n"),
        (None, Some(file)) if token.is_some() => {
            format!("The token {id} is in {}, which only you may read.\n", file.display())
        }
        _ => format!("{id} is good from now on.\n"),
    })
}

/// `tokens create`.
pub async fn create(source: &Source, arguments: &CreateToken, format: Format) -> Result<String, CliError> {
    if let Some(file) = &arguments.output_file {
        contexts::may_write_token(file)?;
    }
    let fingerprint = arguments.certificate.as_deref().map(fingerprint_of).transpose()?;
    let role: Role = arguments.role.parse().map_err(|error| CliError::Wrong(format!("--role: {error}")))?;
    let (id, token) = match source {
        Source::Direct(bmdb) => {
            check_name(&arguments.name).map_err(CliError::Wrong)?;
            let new = NewCredential {
                name: arguments.name.trim().to_owned(),
                role,
                scope: Scope::of(arguments.provider.iter().cloned()),
                expires_after: arguments.expires_after,
                certificate: fingerprint,
            };
            let order =
                direct_order("Create", format!("credential of {}", arguments.name), Some(&arguments.reason));
            let made = bmdb.create_credential(order, new).await?;
            let Some(credential) = made.credential else {
                return Err(CliError::Wrong(made.carried.done.said));
            };
            (credential.id.to_string(), made.token)
        }
        Source::Api(remote) => through_api(remote, arguments, fingerprint).await?,
    };
    deliver(&id, token.as_ref(), arguments.output_file.as_deref(), format)
}

async fn through_api(
    remote: &Remote,
    arguments: &CreateToken,
    fingerprint: Option<[u8; 32]>,
) -> Result<(String, Option<SecretString>), CliError> {
    let request = v1::CreateCredentialRequest {
        order: Some(remote_order(&arguments.reason)),
        name: arguments.name.clone(),
        role: arguments.role.clone(),
        providers: arguments.provider.clone(),
        expires_after: arguments.expires_after.map(|span| span.to_string()).unwrap_or_default(),
        certificate_sha256: fingerprint.map(hex::encode).unwrap_or_default(),
    };
    let made = CredentialsClient::new(remote.service()).create(request).await.map_err(refused)?.into_inner();
    let Some(credential) = made.credential else {
        return Err(CliError::Wrong(made.order.map(|order| order.said).unwrap_or_default()));
    };
    let token = Some(made.token).filter(|token| !token.is_empty()).map(SecretString::from);
    Ok((credential.credential, token))
}

/// An order through the API, with a key of its own.
pub(crate) fn remote_order(reason: &str) -> v1::Order {
    v1::Order {
        reason: reason.to_owned(),
        idempotency_key: Uuid::new_v4().to_string(),
        dry_run: false,
        expected_version: None,
    }
}

fn fingerprint_of(path: &Path) -> Result<[u8; 32], CliError> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;
    let der = CertificateDer::from_pem_file(path).map_err(|error| {
        CliError::Wrong(format!(
            "--certificate {}: no certificate in PEM can be read there: {error}",
            path.display()
        ))
    })?;
    Ok(request_digest(&der))
}

/// `tokens get`.
pub async fn get(source: &Source, format: Format) -> Result<String, CliError> {
    let (lines, more, now) = match source {
        Source::Direct(bmdb) => {
            let (found, now) = bmdb
                .inspect(|tx| {
                    Box::pin(async move {
                        // One more than is shown tells whether there are more.
                        let limit = i64::try_from(LISTED + 1).unwrap_or(i64::MAX);
                        let found = credential::list(tx, Uuid::max(), limit).await?;
                        Ok::<_, BmdbError>((found, inspect::now(tx).await?))
                    })
                })
                .await?;
            let more = found.len() > LISTED;
            (found.into_iter().take(LISTED).map(Line::from).collect::<Vec<_>>(), more, now)
        }
        Source::Api(remote) => {
            let page_size = i32::try_from(LISTED).unwrap_or_default();
            let request = v1::ListCredentialsRequest { page_size, page_token: String::new() };
            let found =
                CredentialsClient::new(remote.service()).list(request).await.map_err(refused)?.into_inner();
            let (more, at) = (!found.next_page_token.is_empty(), remote_read::at(found.at, "its moment")?);
            (found.credentials.into_iter().map(Line::from).collect(), more, at)
        }
    };
    if format == Format::Json {
        return json(&Listed { credentials: lines, more });
    }
    if lines.is_empty() {
        return Ok(
            "no credential was made yet; `shepherdctl tokens bootstrap` makes the first one\n".to_owned()
        );
    }
    let rows: Vec<Vec<String>> = lines.iter().map(|line| row(line, now)).collect();
    let mut text = table(&["CREDENTIAL", "KIND", "NAME", "ROLE", "PROVIDERS", "STATE"], &rows, width());
    if more {
        let _ = write!(text, "\nthe newest {LISTED}, and there are older ones, which the API lists\n");
    }
    Ok(text)
}

fn row(line: &Line, now: Timestamp) -> Vec<String> {
    let moment = |at: Timestamp| relative(at, now);
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

/// `tokens revoke`.
pub async fn revoke(source: &Source, arguments: &RevokeToken, format: Format) -> Result<String, CliError> {
    let (changed, said) = match source {
        Source::Direct(bmdb) => {
            let target = format!("credential {}", arguments.credential);
            let order = direct_order("Revoke", target, Some(&arguments.reason));
            let carried = bmdb.revoke_credential(order, arguments.credential).await?;
            (carried.done.changed, carried.done.said)
        }
        Source::Api(remote) => {
            let request = v1::RevokeCredentialRequest {
                order: Some(remote_order(&arguments.reason)),
                credential: arguments.credential.to_string(),
            };
            let done =
                CredentialsClient::new(remote.service()).revoke(request).await.map_err(refused)?.into_inner();
            (done.changed, done.said)
        }
    };
    match format {
        Format::Json => json(&serde_json::json!({
            "credential": arguments.credential, "changed": changed, "said": said,
        })),
        Format::Table => Ok(format!("{} {said}\n", arguments.credential)),
    }
}

impl From<Credential> for Line {
    fn from(of: Credential) -> Self {
        Self {
            credential: of.id.to_string(),
            kind: of.kind,
            name: of.name,
            role: of.role.as_str().to_owned(),
            providers: of.scope.providers(),
            created_at: Some(of.created_at),
            created_by: of.created_by,
            expires_at: of.expires_at,
            revoked_at: of.revoked_at,
            active: of.active,
        }
    }
}

impl From<v1::Credential> for Line {
    fn from(of: v1::Credential) -> Self {
        use remote_read::moment;
        Self {
            credential: of.credential,
            kind: of.kind,
            name: of.name,
            role: of.role,
            providers: of.providers,
            created_at: of.created_at.and_then(moment),
            created_by: of.created_by,
            expires_at: of.expires_at.and_then(moment),
            revoked_at: of.revoked_at.and_then(moment),
            active: of.active,
        }
    }
}

/// How long a credential is to be good, as it is said on the command line.
pub fn span(text: &str) -> Result<Span, String> {
    let span: Span =
        text.parse().map_err(|_| format!("{text:?} is no length of time; write for example 90d or 12h"))?;
    if span > LONGEST_LIFE {
        return Err("that is longer than ten years; leave it out for no end".to_owned());
    }
    Ok(span)
}
