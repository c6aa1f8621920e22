//! `cluster credentials issue|get|revoke`: client certificates for a cluster's curators.
//!
//! The key is generated on this host and does not leave it. It is written into a file that only its owner can read
//! before the signature of its public half is requested. So an operator whose wait is interrupted still has the key,
//! and finds the certificate in the list. An order that is repeated with its idempotency key uses that file.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use rand::Rng as _;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::json;

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::ClusterArg;
use crate::cluster::certificate::{
    SIGNING_TIMEOUT, decode_certificate, invalid_key_file, read_key_file, resolve_holder, wait_until_signed,
};
use crate::cluster::outcome::{describe_command, format_response};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::{ObjectDocument, format_message};
use crate::object::resolve::{NameSpace, NamedId, parse_name, resolve_id, whole_id};
use crate::order::expiry::{encode_timestamp, parse_end};
use crate::order::outcome::is_changed;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::output::file::write_file_atomic;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use bmdb::cluster::lock::order_target;
use bmdb::orders::order::Expiry;
use model::cluster::credential::check_lifetime;
use model::humanize::{absolute_time, relative_time};
use model::pem_blocks::encode_pem;
use model::shell_words::quote_if_needed;
use proto::fleet::v1;
use proto::fleet::v1::cluster_credentials_client::ClusterCredentialsClient;

const ISSUE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster credentials issue ams --output-dir ./ams --reason 'a look at its tickets'

Until the certificate expires, the holder of the key has an owner's rights at the curators. The limits and
the audit of shepherds do not apply there. The key is created on this host and never leaves it.";

pub(crate) const GET_EXAMPLES: &str = "\
Example:
  shepherdctl cluster credentials get ams

Expired certificates are shown for a day, revoked ones until they would have expired.";

const REVOKE_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster credentials revoke ams lee --reason 'lee left'
  shepherdctl cluster credentials revoke ams 0199d0a2-4f5e-7cc1-9d52-5b1f0a1c2d3e --reason lost

The curators reject the certificate as soon as they receive the revocation. They receive it again after a
restore, because the snapshot may be older than the revocation.";

/// The PKCS #8 prefix of the 32 bytes of an Ed25519 private key, RFC 8410.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// States of a certificate that a revocation changes, as the API names them.
const REVOCABLE_STATES: [&str; 2] = ["requested", "valid"];

/// Subcommands of `cluster credentials`.
#[derive(Debug, Subcommand)]
pub enum CredentialsCommand {
    /// Create a key here, and have the cluster sign its certificate
    #[command(after_help = ISSUE_EXAMPLES)]
    Issue(IssueCredential),
    /// List the certificates of people for a cluster
    #[command(after_help = GET_EXAMPLES)]
    Get(ClusterArg),
    /// Revoke a certificate
    #[command(after_help = REVOKE_EXAMPLES)]
    Revoke(RevokeCredential),
}

/// Arguments of `cluster credentials issue`: the holder, the end and the directory of the files.
#[derive(Debug, Args)]
pub struct IssueCredential {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Directory for HOLDER.key (readable only by you), HOLDER.crt and ca.crt; created if missing
    #[arg(long = "output-dir", value_name = "PATH")]
    pub output_dir: PathBuf,
    /// Holder of the certificate: letters, digits, dots, dashes and underscores [default: the user who runs this]
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// When the certificate expires, from 1m to 30d from now: a duration (8h) or a time (2026-11-20T18:00:00Z)
    /// [default: 8h]
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Arguments of `cluster credentials revoke`: the certificate to revoke.
#[derive(Debug, Args)]
pub struct RevokeCredential {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Certificate: its holder, its id as `cluster credentials get` lists it, or the beginning of that
    #[arg(value_name = "CERTIFICATE", value_parser = parse_name)]
    pub credential: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs a `cluster credentials` command and returns its output.
pub(super) async fn run_credentials_command(
    context: &CommandContext,
    command: &CredentialsCommand,
) -> Result<String, CliError> {
    match command {
        CredentialsCommand::Issue(args) => issue_credential(context, args).await,
        CredentialsCommand::Get(of) => show_credentials(&context.client, &of.name, context.format).await,
        CredentialsCommand::Revoke(args) => revoke_credential(context, args).await,
    }
}

async fn fetch_credentials(
    client: &FleetClient,
    name: &str,
) -> Result<v1::ListClusterCredentialsResponse, CliError> {
    let request = v1::ListClusterCredentialsRequest { name: name.to_owned() };
    let result = ClusterCredentialsClient::new(client.channel()).list(request).await;
    Ok(result.map_err(status_to_error)?.into_inner())
}

async fn show_credentials(client: &FleetClient, name: &str, format: Format) -> Result<String, CliError> {
    let found = fetch_credentials(client, name).await?;
    if format == Format::Json {
        return format_message(&found);
    }
    if found.credentials.is_empty() {
        return Ok(format!("nobody has a certificate for {}\n", order_target(name)));
    }
    let now = require_timestamp(found.read_at, "its read time")?;
    let rows: Vec<Vec<String>> = found
        .credentials
        .iter()
        .map(|credential| {
            let end = credential.expires_at.and_then(decode_timestamp);
            vec![
                credential.id.clone(),
                credential.holder.clone(),
                credential.state.clone(),
                end.map_or_else(|| "-".to_owned(), |end| relative_time(end, now)),
                credential.requested_by.clone(),
            ]
        })
        .collect();
    let head = ["CERTIFICATE", "HOLDER", "STATE", "ENDS", "REQUESTED BY"];
    Ok(format_table(&head, &rows, terminal_width()))
}

/// The id of a certificate of the cluster `name`.
async fn resolve_credential(client: &FleetClient, name: &str, text: &str) -> Result<String, CliError> {
    if let Some(id) = whole_id(text) {
        return Ok(id);
    }
    let named = |credential: v1::ClusterCredential| NamedId {
        id: credential.id,
        name: Some(credential.holder),
        is_current: REVOCABLE_STATES.contains(&credential.state.as_str()),
    };
    let credentials = fetch_credentials(client, name).await?.credentials;
    let objects: Vec<NamedId> = credentials.into_iter().map(named).collect();
    let list_command = format!("shepherdctl cluster credentials get {}", quote_if_needed(name));
    resolve_id(NameSpace { noun: "certificate", list_command: &list_command }, text, &objects)
}

async fn revoke_credential(context: &CommandContext, args: &RevokeCredential) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let credential = resolve_credential(&context.client, &args.name, &args.credential).await?;
    let give = async |service, order| {
        let request = v1::RevokeClusterCredentialRequest {
            name: args.name.clone(),
            order: Some(order),
            credential_id: credential.clone(),
        };
        ClusterCredentialsClient::new(service).revoke(request).await
    };
    let done = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &done)
}

/// Generates an Ed25519 key: the private key in PKCS #8, and the public key.
fn generate_key() -> Result<(SecretSlice<u8>, [u8; 32]), CliError> {
    let mut seed = [0; 32];
    rand::rng().fill_bytes(&mut seed);
    let made = Ed25519KeyPair::from_seed_unchecked(&seed)
        .map_err(|error| CliError::Failed(format!("cannot make a key: {error}")))?;
    let mut public_key = [0; 32];
    public_key.copy_from_slice(made.public_key().as_ref());
    Ok((SecretSlice::from([&PKCS8_PREFIX[..], &seed].concat()), public_key))
}

/// Reads the key that an earlier run of the command wrote, and its public key.
fn read_key(file: &Path) -> Result<(SecretSlice<u8>, [u8; 32]), CliError> {
    let secret = read_key_file(file)?;
    let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(secret.expose_secret())
        .map_err(|error| invalid_key_file(file, &error))?;
    let mut public_key = [0; 32];
    public_key.copy_from_slice(pair.public_key().as_ref());
    Ok((secret, public_key))
}

async fn issue_credential(context: &CommandContext, args: &IssueCredential) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let holder = resolve_holder(args.holder.as_deref())?;
    let until = parse_end(args.until.as_deref(), check_lifetime)?;
    let file = |ending: &str| args.output_dir.join(format!("{holder}.{ending}"));
    // An order that is given again has a key already.
    let repeated = context.order_flags.idempotency_key.is_some() && file("key").exists();
    for (there, expected) in [(file("key"), repeated), (file("crt"), false)] {
        if there.exists() && !expected {
            return Err(CliError::Invalid(format!(
                "{} exists; use another --output-dir or --holder, or remove it",
                there.display()
            )));
        }
    }
    let (secret, public_key) = if repeated { read_key(&file("key"))? } else { generate_key()? };
    if !context.order_flags.dry_run && !repeated {
        // Written before the request: a certificate without its key is useless.
        write_file_atomic(&file("key"), encode_pem("PRIVATE KEY", secret.expose_secret()).as_bytes(), 0o600)?;
    }
    let public_key = hex::encode(public_key);
    let done = match request_credential(context, args, until, (&holder, &public_key)).await {
        Ok(done) => done,
        Err(error) => {
            // A rejected request is never signed, so its key is useless. If only the response was lost, the request
            // may be signed. A request that waits for another admin is repeated with its key.
            if error.is_rejection() && !repeated {
                let _ = std::fs::remove_file(file("key"));
            }
            return Err(error);
        }
    };
    if context.order_flags.dry_run || !is_changed(&done) {
        return format_response(context, &args.name, &done);
    }
    let list = async || {
        let mut found = fetch_credentials(&context.client, &args.name).await?;
        Ok::<_, CliError>((std::mem::take(&mut found.credentials), found))
    };
    let name = &args.name;
    let unsigned = |credential: &v1::ClusterCredential| {
        format!(
            "no curator of {name} signed the certificate within {} s. It may still be signed: the key is in {}, and \
             shepherdctl cluster credentials get {} -o json shows certificate {} once it is signed; to see what the \
             cluster waits for, run: {}",
            SIGNING_TIMEOUT.as_secs(),
            file("key").display(),
            quote_if_needed(name),
            credential.id,
            describe_command(name)
        )
    };
    let (credential, found) = wait_until_signed(name, &public_key, list, unsigned).await?;
    let certificate = decode_certificate(credential.certificate.as_deref().unwrap_or_default())?;
    write_file_atomic(&file("crt"), encode_pem("CERTIFICATE", &certificate).as_bytes(), 0o644)?;
    let authority = args.output_dir.join("ca.crt");
    write_file_atomic(&authority, encode_pem("CERTIFICATE", &found.ca_certificate).as_bytes(), 0o644)?;
    if context.format == Format::Json {
        return format_json(&json!({
            "order": ObjectDocument::of_message(&done).to_json()?,
            "credential": ObjectDocument::of_message(&credential).to_json()?,
            "curators": found.curators,
            "keyFile": file("key"),
            "certificateFile": file("crt"),
            "authorityFile": authority,
        }));
    }
    let end = credential.expires_at.and_then(decode_timestamp).map(absolute_time).unwrap_or_default();
    Ok(format!(
        "{holder} has a certificate for {}, good until {end}:\n  key          {} (only you may read it)\n  certificate  \
         {}\n  authority    {}\n  curators     {}\nend it sooner with: shepherdctl cluster credentials revoke {} {} \
         --reason '...'\n",
        order_target(&args.name),
        file("key").display(),
        file("crt").display(),
        authority.display(),
        found.curators.join(", "),
        args.name,
        credential.id,
    ))
}

async fn request_credential(
    context: &CommandContext,
    args: &IssueCredential,
    until: Option<Expiry>,
    (holder, public_key): (&str, &str),
) -> Result<v1::OrderResponse, CliError> {
    let expiry = until.map(|until| match until {
        Expiry::After(span) => v1::issue_cluster_credential_request::Expiry::Lifetime(span.to_string()),
        Expiry::At(moment) => {
            v1::issue_cluster_credential_request::Expiry::ExpiresAt(encode_timestamp(moment))
        }
    });
    let give = async |service, order| {
        let request = v1::IssueClusterCredentialRequest {
            name: args.name.clone(),
            order: Some(order),
            public_key: public_key.to_owned(),
            holder: holder.to_owned(),
            expiry: expiry.clone(),
        };
        ClusterCredentialsClient::new(service).issue(request).await
    };
    send_order(context, &args.reason, give).await
}

#[cfg(test)]
mod tests {
    use super::*;

    use ring::signature::{ED25519, UnparsedPublicKey};
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    #[test]
    fn generated_key_is_readable_by_other_tools() {
        let (secret, public_key) = generate_key().unwrap();
        let read = Ed25519KeyPair::from_pkcs8_maybe_unchecked(secret.expose_secret()).unwrap();
        assert_eq!(read.public_key().as_ref(), public_key);
        UnparsedPublicKey::new(&ED25519, public_key).verify(b"a", read.sign(b"a").as_ref()).unwrap();
        assert_ne!(generate_key().unwrap().1, public_key);
    }

    #[test]
    fn encoded_pem_is_parsed_by_a_library() {
        for der in [vec![], vec![7; 48], vec![7; 49], (0..=255).collect::<Vec<u8>>()] {
            let written = encode_pem("CERTIFICATE", &der);
            assert!(written.lines().all(|line| line.len() <= 64), "{written}");
            let read = CertificateDer::from_pem_slice(written.as_bytes()).unwrap();
            assert_eq!(read.as_ref(), der);
        }
    }

    #[test]
    fn key_of_a_repeated_order_is_the_one_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kim.key");
        let (secret, public_key) = generate_key().unwrap();
        std::fs::write(&file, encode_pem("PRIVATE KEY", secret.expose_secret())).unwrap();
        let (read, again) = read_key(&file).unwrap();
        assert_eq!((read.expose_secret(), again), (secret.expose_secret(), public_key));
        for text in [String::new(), encode_pem("PRIVATE KEY", &[7; 48])] {
            std::fs::write(&file, text).unwrap();
            let error = read_key(&file).unwrap_err().to_string();
            assert!(error.starts_with("cannot use the key in ") && error.contains("kim.key"), "{error}");
        }
    }
}
