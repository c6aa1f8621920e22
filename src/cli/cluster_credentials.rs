//! `cluster credentials issue|get|revoke`: certificates with which people speak to the curators of a cluster.
//!
//! The key is made here, and stays here: it goes into a file that nobody else may read before anybody is asked to sign
//! its public half. So whoever is interrupted while waiting still has it, and finds the certificate in the list.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use rand::Rng as _;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::bmdb::action::Done;
use crate::bmdb::cluster::target;
use crate::bmdb::cluster_credential::{NewCredential, credentials_of};
use crate::cli::again;
use crate::cli::cluster::{OfCluster, given, told};
use crate::cli::contexts::write_file;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::{direct, who};
use crate::cli::output::{Format, say, table, width};
use crate::cli::pem::pem;
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, moment};
use crate::cli::source::Source;
use crate::cli::tokens::span;
use crate::model::cluster::credential::{CredentialView, DEFAULT_LIFETIME, check_holder, check_lifetime};
use crate::model::telling::{absolute, relative};
use crate::model::time::{Span, Timestamp};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::cluster_credentials_client::ClusterCredentialsClient;

/// How long the curators are waited for. Whoever holds the cluster's lease looks every fifteen seconds.
const BOUND: Duration = Duration::from_mins(2);
/// How often it is asked whether they have answered.
const PAUSE: Duration = Duration::from_secs(1);
/// What stands before the 32 bytes of a private key of Ed25519, RFC 8410.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// What can be done with certificates of people.
#[derive(Debug, Subcommand)]
pub enum CredentialsCommand {
    /// Make a key here, and have its certificate signed by the cluster
    #[command(after_help = examples::CLUSTER_CREDENTIALS_ISSUE)]
    Issue(IssueCredential),
    /// List the certificates of people for a cluster
    #[command(after_help = examples::CLUSTER_CREDENTIALS_GET)]
    Get(OfCluster),
    /// Have a cluster refuse a certificate from now on
    #[command(after_help = examples::CLUSTER_CREDENTIALS_REVOKE)]
    Revoke(RevokeCredential),
}

/// A certificate to ask for.
#[derive(Debug, Args)]
pub struct IssueCredential {
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where its files go: HOLDER.key, which only you may read, HOLDER.crt and ca.crt; made if it is not there
    #[arg(long, value_name = "PATH")]
    pub directory: PathBuf,
    /// Whose it is: letters, digits, dots, dashes and underscores [default: who runs this]
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// How long it is good: 1m to 30d
    #[arg(long = "expires_after", alias = "expires-after", value_name = "SPAN", value_parser = span, default_value_t = DEFAULT_LIFETIME)]
    pub expires_after: Span,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A certificate to end.
#[derive(Debug, Args)]
pub struct RevokeCredential {
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Its id, as cluster credentials get shows it
    #[arg(value_name = "ID")]
    pub credential: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// What a command about certificates answers.
pub(super) async fn credentials_command(
    source: &Source,
    command: &CredentialsCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        CredentialsCommand::Issue(asked) => issue(source, asked, format).await,
        CredentialsCommand::Get(of) => list(source, &of.name, format).await,
        CredentialsCommand::Revoke(asked) => revoke(source, asked, format).await,
    }
}

/// What is known of a cluster's certificates.
struct Found {
    credentials: Vec<CredentialView>,
    ca_certificate: Vec<u8>,
    curators: Vec<String>,
    now: Timestamp,
}

async fn read(source: &Source, name: &str) -> Result<Found, CliError> {
    match source {
        Source::Direct(bmdb) => {
            let name = name.to_owned();
            let look = bmdb.inspect(move |tx| {
                let name = name.clone();
                Box::pin(async move { credentials_of(tx, &name).await })
            });
            let found = look.await?;
            let (ca_certificate, curators) =
                found.founded.map(|founded| (founded.ca_certificate, founded.curators)).unwrap_or_default();
            Ok(Found { credentials: found.credentials, ca_certificate, curators, now: found.at })
        }
        Source::Api(remote) => {
            let request = v1::ListClusterCredentialsRequest { name: name.to_owned() };
            let said = ClusterCredentialsClient::new(remote.service()).list(request).await;
            let said = said.map_err(refused)?.into_inner();
            Ok(Found {
                credentials: said.credentials.into_iter().map(credential).collect::<Result<_, _>>()?,
                ca_certificate: said.ca_certificate,
                curators: said.curators,
                now: at(said.at, "its moment")?,
            })
        }
    }
}

fn credential(said: v1::ClusterCredential) -> Result<CredentialView, CliError> {
    Ok(CredentialView {
        id: said.id,
        holder: said.holder,
        public_key: said.public_key,
        state: said.state,
        asked_at: at(said.asked_at, "when a certificate was asked for")?,
        asked_by: said.asked_by,
        serial: said.serial,
        expires_at: said.expires_at.and_then(moment),
        refused: said.refused,
        revoked_by: said.revoked_by,
        certificate: said.certificate,
    })
}

async fn list(source: &Source, name: &str, format: Format) -> Result<String, CliError> {
    let found = read(source, name).await?;
    if format == Format::Json {
        return get::json(&json!({ "credentials": found.credentials, "curators": found.curators }));
    }
    if found.credentials.is_empty() {
        return Ok(format!("nobody has a certificate for {}\n", target(name)));
    }
    let rows: Vec<Vec<String>> = found
        .credentials
        .iter()
        .map(|credential| {
            vec![
                credential.id.clone(),
                credential.holder.clone(),
                credential.state.clone(),
                credential.expires_at.map_or_else(|| "-".to_owned(), |end| relative(end, found.now)),
                credential.asked_by.clone(),
            ]
        })
        .collect();
    let head = ["CERTIFICATE", "HOLDER", "STATE", "ENDS", "ASKED BY"];
    Ok(table(&head, &rows, width()))
}

async fn revoke(source: &Source, asked: &RevokeCredential, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let rpc = "shepherd.fleet.v1.ClusterCredentials/Revoke";
            let order = direct(rpc, target(&asked.name), Some(&asked.reason));
            bmdb.revoke_cluster_credential(order, asked.name.clone(), asked.credential.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RevokeClusterCredentialRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    credential: asked.credential.clone(),
                };
                ClusterCredentialsClient::new(service).revoke(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

/// Who runs this, as curators call people.
pub(super) fn myself() -> String {
    let who = who();
    let name = who.split('@').next().unwrap_or_default();
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    name.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(63).collect()
}

/// A new key: in PKCS #8, and its public half.
fn key() -> Result<(SecretSlice<u8>, [u8; 32]), CliError> {
    let mut seed = [0; 32];
    rand::rng().fill_bytes(&mut seed);
    let made = Ed25519KeyPair::from_seed_unchecked(&seed)
        .map_err(|error| CliError::Failed(format!("cannot make a key: {error}")))?;
    let mut public_key = [0; 32];
    public_key.copy_from_slice(made.public_key().as_ref());
    Ok((SecretSlice::from([&PKCS8[..], &seed].concat()), public_key))
}

async fn issue(source: &Source, asked: &IssueCredential, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let holder = asked.holder.clone().unwrap_or_else(myself);
    check_holder(&holder).map_err(|said| CliError::Wrong(format!("--holder: {said}")))?;
    check_lifetime(asked.expires_after)
        .map_err(|said| CliError::Wrong(format!("--expires_after: {said}")))?;
    let file = |ending: &str| asked.directory.join(format!("{holder}.{ending}"));
    for there in [file("key"), file("crt")] {
        if there.exists() {
            return Err(CliError::Wrong(format!(
                "{} is there already; say another --directory or --holder, or remove it",
                there.display()
            )));
        }
    }
    let (secret, public_key) = key()?;
    if !dry_run::asked() {
        // Before anybody is asked: a certificate without its key is good for nothing.
        write_file(&file("key"), pem("PRIVATE KEY", secret.expose_secret()).as_bytes(), 0o600)?;
    }
    let new = NewCredential { public_key, holder: holder.clone(), lifetime: asked.expires_after };
    let done = match ask(source, asked, new).await {
        Ok(done) => done,
        Err(error) => {
            // Nobody signs what nobody was asked for; what an answer was lost of may have been.
            if matches!(error, CliError::Wrong(_)) {
                let _ = std::fs::remove_file(file("key"));
            }
            return Err(error);
        }
    };
    if dry_run::asked() || !done.changed {
        return told(&asked.name, &done, format);
    }
    let found = until_signed(source, &asked.name, &hex::encode(public_key), &file("key")).await?;
    let Signed { credential, certificate, ca_certificate, curators } = found;
    write_file(&file("crt"), pem("CERTIFICATE", &certificate).as_bytes(), 0o644)?;
    let authority = asked.directory.join("ca.crt");
    write_file(&authority, pem("CERTIFICATE", &ca_certificate).as_bytes(), 0o644)?;
    if format == Format::Json {
        return get::json(&json!({
            "cluster": asked.name, "changed": true, "credential": credential, "key": file("key"),
            "certificate": file("crt"), "authority": authority, "curators": curators,
        }));
    }
    let end = credential.expires_at.map(absolute).unwrap_or_default();
    Ok(format!(
        "{holder} has a certificate for {}, good until {end}:\n  key          {} (only you may read it)\n  certificate  \
         {}\n  authority    {}\n  curators     {}\nend it sooner with: shepherdctl cluster credentials revoke {} {} \
         --reason '...'\n",
        target(&asked.name),
        file("key").display(),
        file("crt").display(),
        authority.display(),
        curators.join(", "),
        asked.name,
        credential.id,
    ))
}

async fn ask(source: &Source, asked: &IssueCredential, new: NewCredential) -> Result<Done, CliError> {
    match source {
        Source::Direct(bmdb) => {
            let rpc = "shepherd.fleet.v1.ClusterCredentials/Issue";
            let order = direct(rpc, target(&asked.name), Some(&asked.reason));
            Ok(bmdb.ask_for_credential(order, asked.name.clone(), new).await?.done)
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::IssueClusterCredentialRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    public_key: hex::encode(new.public_key),
                    holder: new.holder.clone(),
                    lifetime: new.lifetime.to_string(),
                };
                ClusterCredentialsClient::new(service).issue(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Ok(Done { changed: done.changed, said: done.said })
        }
    }
}

struct Signed {
    credential: CredentialView,
    certificate: Vec<u8>,
    ca_certificate: Vec<u8>,
    curators: Vec<String>,
}

/// Waits until the curators have signed the certificate for that key.
async fn until_signed(source: &Source, name: &str, public_key: &str, key: &Path) -> Result<Signed, CliError> {
    let end = Instant::now() + BOUND;
    let mut waiting = false;
    loop {
        let found = read(source, name).await?;
        let credential = found.credentials.into_iter().find(|credential| credential.public_key == public_key);
        let Some(credential) = credential else {
            return Err(CliError::Failed(format!("{} knows no more of what was asked for", target(name))));
        };
        match (credential.state.as_str(), &credential.certificate) {
            ("good", Some(certificate)) => {
                let certificate = hex::decode(certificate)
                    .map_err(|error| CliError::Failed(format!("the certificate is none: {error}")))?;
                let Found { ca_certificate, curators, .. } = found;
                return Ok(Signed { credential, certificate, ca_certificate, curators });
            }
            ("asked", _) if Instant::now() < end => {
                if !waiting {
                    say(&format!("shepherdctl: waiting for the curators of {name} to sign it"));
                    waiting = true;
                }
                sleep(PAUSE).await;
            }
            ("asked", _) => {
                return Err(CliError::Failed(format!(
                    "no curator of {name} has signed it within {} s. It may still come: the key is in {}, and shepherdctl \
                     cluster credentials get {name} -o json shows certificate {} once it is signed; what the cluster \
                     waits for says: shepherdctl cluster describe {name}",
                    BOUND.as_secs(),
                    key.display(),
                    credential.id
                )));
            }
            (state, _) => {
                let why = credential.refused.map(|said| format!(": {said}")).unwrap_or_default();
                return Err(CliError::Wrong(format!(
                    "the certificate {} that was asked for is {state}{why}",
                    credential.id
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use ring::signature::{ED25519, UnparsedPublicKey};

    #[test]
    fn key_is_one_that_others_read() {
        let (secret, public_key) = key().unwrap();
        let read = Ed25519KeyPair::from_pkcs8_maybe_unchecked(secret.expose_secret()).unwrap();
        assert_eq!(read.public_key().as_ref(), public_key);
        UnparsedPublicKey::new(&ED25519, public_key).verify(b"a", read.sign(b"a").as_ref()).unwrap();
        assert_ne!(key().unwrap().1, public_key);
    }

    #[test]
    fn whoever_runs_this_can_be_a_holder() {
        assert_eq!(check_holder(&myself()), Ok(()));
    }
}
