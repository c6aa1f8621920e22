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

use crate::bmdb::audit::{Order, request_digest};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::credential::{self, Credential, LONGEST_LIFE, NewCredential, check_name};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::cli::again;
use crate::cli::command::{Bootstrap, CreateToken, RevokeToken};
use crate::cli::contexts::{self, Context, Contexts};
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::operate::{direct, who};
use crate::cli::order_key;
use crate::cli::output::{Format, say, table, width};
use crate::cli::pem::pem;
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::access::{Role, Scope};
use crate::model::telling::relative;
use crate::model::time::{Span, Timestamp};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::credentials_client::CredentialsClient;

/// Most credentials listed.
const LISTED: usize = 100_000;
/// As many as the API is asked for at once: with a hundred providers each, they are an answer that
/// [`crate::proto::codec`] still takes.
const PAGE: i32 = 50;
/// How often a token is made whose predecessor was lost on the way.
const MOST_MADE: u32 = 3;

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
    direct(&format!("shepherd.fleet.v1.Credentials/{rpc}"), target, reason)
}

/// `tokens bootstrap`.
pub async fn bootstrap(bmdb: &Bmdb, arguments: &Bootstrap, format: Format) -> Result<String, CliError> {
    let mut output = arguments.output_file.as_deref().map(absolute).transpose()?;
    let place = match &arguments.save_context {
        None => None,
        Some(name) => {
            contexts::check_name(name)?;
            let path = absolute(&contexts::path()?)?;
            let contexts = Contexts::read(&path)?;
            let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
            output.get_or_insert_with(|| directory.join(format!("{name}.token")));
            Some((name.clone(), path, directory, contexts, reached(bmdb).await?))
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
    if let Some((name, path, directory, mut contexts, (servers, authority))) = place {
        let ca_certificate_path = authority.as_ref().map(|_| directory.join(format!("{name}.ca.pem")));
        if let (Some(path), Some(authority)) = (&ca_certificate_path, &authority) {
            contexts::write_file(path, authority.as_bytes(), 0o644)?;
        }
        let context = Context { servers, ca_certificate_path, token_path: output.unwrap_or_default() };
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

/// A path that means the same wherever a context is used.
fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path)
        .map_err(|error| CliError::Wrong(format!("{}: this is no path: {error}", path.display())))
}

/// The servers of the API that are alive, and the CA certificates they are verified against, PEM; `None`
/// where they publish none, because whoever calls trusts them already.
async fn reached(bmdb: &Bmdb) -> Result<(Vec<String>, Option<String>), CliError> {
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
    // Read and written again, so that only what is base64 gets into the file.
    let pem = |der: &String| pem("CERTIFICATE", &STANDARD.decode(der).unwrap_or_default());
    let authorities = Some(authorities.iter().map(pem).collect()).filter(|pem: &String| !pem.is_empty());
    Ok((servers, authorities))
}

/// Gives a token to whoever asked for it, once.
fn deliver(
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
            match (made.credential, &made.carried) {
                (Some(credential), _) => (credential.id.to_string(), made.token),
                (None, carried) if carried.repeated && carried.done.changed => order_key::made_before(
                    &order_key::written_id(carried.after.as_ref()),
                    fingerprint.is_some(),
                )?,
                (None, carried) => return Err(CliError::Wrong(carried.done.said.clone())),
            }
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
    let mut remote = remote.clone();
    for _ in 0..MOST_MADE {
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
        let made = again::order(&mut remote, &arguments.reason, give).await?;
        let lost = match outcome(made, fingerprint.is_some()) {
            Outcome::Made(id, token) => return Ok((id, token)),
            Outcome::Refused(said) => return Err(CliError::Wrong(said)),
            // The same order would be answered so again.
            Outcome::Lost(id) if order_key::is_typed() => return order_key::made_before(&id, false),
            Outcome::Lost(id) => id,
        };
        say(&format!(
            "shepherdctl: the token {lost} was made and lost on its way here; it is revoked, and another \
             one made"
        ));
        revoke_through(&mut remote, &lost, "it was lost on its way to whoever it was made for").await?;
    }
    Err(CliError::Failed(format!(
        "{MOST_MADE} tokens were made, lost on their way here, and revoked; try again when the connection is \
         better"
    )))
}

/// What an answer about a new credential means.
#[derive(Debug)]
enum Outcome {
    /// It is there, with its token if it has one.
    Made(String, Option<SecretString>),
    /// It is there, and its token was in an answer that was lost: nobody can have it again.
    Lost(String),
    /// It is not there; a sentence.
    Refused(String),
}

fn outcome(made: v1::CreateCredentialResponse, pinned: bool) -> Outcome {
    let token = Some(made.token).filter(|token| !token.is_empty()).map(SecretString::from);
    if let Some(credential) = made.credential {
        return Outcome::Made(credential.credential, token);
    }
    let order = made.order.unwrap_or_default();
    // An order that is answered again names the credential only in what was written down of it.
    let written = order.after.as_ref().and_then(|after| after.fields.get("credential")?.kind.as_ref());
    match written {
        Some(prost_types::value::Kind::StringValue(id)) if order.repeated && order.changed => {
            if pinned {
                Outcome::Made(id.clone(), None)
            } else {
                Outcome::Lost(id.clone())
            }
        }
        _ => Outcome::Refused(order.said),
    }
}

async fn revoke_through(remote: &mut Remote, id: &str, reason: &str) -> Result<v1::OrderResponse, CliError> {
    let give = async |service, order| {
        let request = v1::RevokeCredentialRequest { order: Some(order), credential: id.to_owned() };
        CredentialsClient::new(service).revoke(request).await
    };
    again::order(remote, reason, give).await
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
            let mut client = CredentialsClient::new(remote.service());
            let (mut lines, mut page_token) = (Vec::new(), String::new());
            loop {
                let request = v1::ListCredentialsRequest { page_size: PAGE, page_token };
                let page = client.list(request).await.map_err(refused)?.into_inner();
                lines.extend(page.credentials.into_iter().map(Line::from));
                page_token = page.next_page_token;
                if page_token.is_empty() || lines.len() >= LISTED {
                    let more = lines.len() > LISTED || !page_token.is_empty();
                    lines.truncate(LISTED);
                    break (lines, more, remote_read::at(page.at, "its moment")?);
                }
            }
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
        let _ = write!(text, "\nthe newest {LISTED}, and there are older ones\n");
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
            let done =
                revoke_through(&mut remote.clone(), &arguments.credential.to_string(), &arguments.reason)
                    .await?;
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn written(changed: bool, repeated: bool) -> v1::OrderResponse {
        let kind = Some(prost_types::value::Kind::StringValue("c-1".into()));
        let fields = BTreeMap::from([("credential".to_owned(), prost_types::Value { kind })]);
        let after = Some(prost_types::Struct { fields });
        v1::OrderResponse { said: "said".into(), changed, repeated, after, ..Default::default() }
    }

    fn answered(token: &str, there: bool, order: v1::OrderResponse) -> v1::CreateCredentialResponse {
        let credential = there.then(|| v1::Credential { credential: "c-1".into(), ..Default::default() });
        v1::CreateCredentialResponse { credential, token: token.into(), order: Some(order) }
    }

    #[test]
    fn token_whose_answer_was_lost_is_known_to_be() {
        for (answer, pinned, expected) in [
            (answered("t", true, written(true, false)), false, "made c-1 with its token"),
            (answered("", true, written(true, false)), true, "made c-1"),
            (answered("", false, written(true, true)), true, "made c-1"),
            (answered("", false, written(true, true)), false, "lost c-1"),
            (answered("", false, written(false, true)), false, "refused: said"),
            (
                answered("", false, v1::OrderResponse { said: "said".into(), ..Default::default() }),
                true,
                "refused: said",
            ),
        ] {
            let found = match outcome(answer, pinned) {
                Outcome::Made(id, Some(_)) => format!("made {id} with its token"),
                Outcome::Made(id, None) => format!("made {id}"),
                Outcome::Lost(id) => format!("lost {id}"),
                Outcome::Refused(said) => format!("refused: {said}"),
            };
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn path_of_a_context_means_the_same_everywhere() {
        let here = std::env::current_dir().unwrap();
        for (given, expected) in [("a.token", here.join("a.token")), ("/b/c", PathBuf::from("/b/c"))] {
            assert_eq!(absolute(Path::new(given)).unwrap(), expected);
        }
        assert!(absolute(Path::new("")).is_err());
    }
}
