//! Saved context of a demo: what `shepherdctl` needs to call the API of the fleet, in the directory of the demo.
//!
//! The contexts file has the context `demo`: the address of the API, the CA certificates that verify it, and the path of
//! the file with a token. `SHEPHERD_CONTEXTS` names it to `shepherdctl`, which has the code that reads such files and
//! that this program does not link. `tests/all/demo.rs` uses a saved context with that program.
//!
//! In a persistent directory a context outlives the demo: the token stays valid with the database that knows it, and the
//! API listens at the same port again. Other contexts that were saved in the file stay.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};
use toml::{Table, Value};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::orders::credential::{NewAccessCredential, PresentedToken, find_by_token};
use crate::bmdb::orders::order::{Actor, Order, request_digest};
use crate::model::access::{AccessRole, AccessScope};
use crate::model::pem_blocks::encode_pem;
use crate::model::rpc_name::CREATE_CREDENTIAL_RPC;
use crate::server::api::listener::api_server::ApiServer;
use crate::service::failure::{ExitFailure, database_failure};
use crate::service::os_process::hostname;

/// Name of the context, and owner of its token.
const CONTEXT: &str = "demo";
/// Name of the contexts file.
pub(super) const CONTEXTS_FILE: &str = "contexts.toml";
/// Name of the file with the token.
pub(super) const TOKEN_FILE: &str = "demo.token";
/// Name of the file with the CA certificates, PEM.
pub(super) const CA_FILE: &str = "demo.ca.pem";

/// Saves a context for the API of the demo in this directory, and makes it the current one. Returns the path of the
/// contexts file.
pub(super) async fn save_context(
    directory: &Path,
    bmdb: &Bmdb,
    api: &ApiServer,
) -> Result<PathBuf, ExitFailure> {
    let [path, token_path, ca_path] = [CONTEXTS_FILE, TOKEN_FILE, CA_FILE].map(|name| directory.join(name));
    if !is_token_valid(&token_path, bmdb).await? {
        let token = create_token(bmdb).await?;
        replace_file(&token_path, &format!("{}\n", token.expose_secret()), 0o600)?;
    }
    replace_file(&ca_path, &encode_certificates(&api.ca_certificates), 0o644)?;
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    let context = Table::from_iter([
        ("servers".to_owned(), Value::from(vec![api.local_addr.to_string()])),
        ("ca_certificate_path".to_owned(), text(&ca_path)),
        ("token_path".to_owned(), text(&token_path)),
    ]);
    let contexts = toml::to_string_pretty(&add_context(read_contexts(&path)?, context))
        .map_err(|error| ExitFailure::failed(format!("cannot write the contexts as TOML: {error}")))?;
    replace_file(&path, &contexts, 0o644)?;
    Ok(path)
}

/// Whether the file has a token that the database knows and that is valid.
async fn is_token_valid(path: &Path, bmdb: &Bmdb) -> Result<bool, ExitFailure> {
    let token = fs::read_to_string(path).ok();
    let Some(presented) = token.and_then(|token| PresentedToken::parse(token.trim())) else {
        return Ok(false);
    };
    let found = bmdb
        .transact_read_only_with(presented, |tx, presented| Box::pin(find_by_token(tx, presented)))
        .await
        .map_err(database_failure)?;
    Ok(found.is_some_and(|credential| credential.active))
}

/// Creates the token of an admin in the database, as `shepherdctl tokens bootstrap` does.
async fn create_token(bmdb: &Bmdb) -> Result<SecretString, ExitFailure> {
    let order = Order {
        actor: Actor { name: format!("shepherd demo on {}", hostname()), credential: None },
        rpc: CREATE_CREDENTIAL_RPC.to_owned(),
        target: format!("credential of {CONTEXT}"),
        reason: "the context of the demo".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    };
    let new = NewAccessCredential {
        name: CONTEXT.to_owned(),
        role: AccessRole::Admin,
        scope: AccessScope::Fleet,
        expiry: None,
        certificate: None,
    };
    let created = bmdb.create_credential(order, new).await.map_err(database_failure)?;
    created.token.ok_or_else(|| ExitFailure::failed("no token was created for the context of the demo"))
}

/// The contexts that are saved; none if there is no file.
fn read_contexts(path: &Path) -> Result<Table, ExitFailure> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Table::new()),
        Err(error) => return Err(file_failure("read", path, &error)),
    };
    text.parse().map_err(|error: toml::de::Error| {
        ExitFailure::usage(format!(
            "{} is no TOML: {}; repair it, or remove it to get a new one",
            path.display(),
            error.message()
        ))
    })
}

/// The contexts with that of the demo, which becomes the current one.
fn add_context(mut file: Table, context: Table) -> Table {
    let mut contexts = match file.remove("contexts") {
        Some(Value::Table(contexts)) => contexts,
        _ => Table::new(),
    };
    contexts.insert(CONTEXT.to_owned(), context.into());
    file.insert("current".to_owned(), CONTEXT.into());
    file.insert("contexts".to_owned(), contexts.into());
    file
}

/// Certificates in DER as PEM, one after the other.
fn encode_certificates(certificates: &[Vec<u8>]) -> String {
    certificates.iter().map(|certificate| encode_pem("CERTIFICATE", certificate)).collect()
}

/// Writes a file with this mode in place of an older one. Readers see one of the two.
fn replace_file(path: &Path, text: &str, mode: u32) -> Result<(), ExitFailure> {
    let next = path.with_extension("next");
    let write = || {
        // An older file would keep its mode.
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&next)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&next, path)
    };
    write().map_err(|error| file_failure("write", path, &error))
}

fn file_failure(verb: &str, path: &Path, error: &io::Error) -> ExitFailure {
    ExitFailure::failed(format!("cannot {verb} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    #[test]
    fn other_contexts_of_the_file_stay() {
        let context = |server: &str| Table::from_iter([("servers".to_owned(), Value::from(vec![server]))]);
        let file = add_context(Table::new(), context("127.0.0.1:1"));
        assert_eq!(file["current"].as_str(), Some("demo"));
        let mut file: Table = toml::to_string_pretty(&file).unwrap().parse().unwrap();
        file["contexts"].as_table_mut().unwrap().insert("prod".to_owned(), context("a:1").into());
        file["current"] = "prod".into();
        let file = add_context(file, context("127.0.0.1:2"));
        let contexts = file["contexts"].as_table().unwrap();
        assert_eq!(contexts["demo"]["servers"][0].as_str(), Some("127.0.0.1:2"));
        assert_eq!(contexts["prod"]["servers"][0].as_str(), Some("a:1"));
        assert_eq!(file["current"].as_str(), Some("demo"), "its commands are about the demo");
    }

    #[test]
    fn files_are_replaced_with_their_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        for (text, mode) in [("first", 0o644), ("second", 0o600)] {
            replace_file(&path, text, mode).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
        let wrong = directory.path().join("contexts.toml");
        assert_eq!(read_contexts(&wrong), Ok(Table::new()));
        fs::write(&wrong, "current = ").unwrap();
        let failure = read_contexts(&wrong).unwrap_err();
        assert!(failure.code == 2 && failure.message.contains("remove it to get a new one"), "{failure}");
    }

    #[test]
    fn certificates_are_read_by_a_library_as_they_were() {
        let certificates = [vec![7; 48], vec![8; 49], vec![9; 1000]];
        let pem = encode_certificates(&certificates);
        let read: Vec<Vec<u8>> = CertificateDer::pem_slice_iter(pem.as_bytes())
            .map(|certificate| certificate.unwrap().as_ref().to_vec())
            .collect();
        assert_eq!(read, certificates);
    }
}
