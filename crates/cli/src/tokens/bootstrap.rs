//! `tokens bootstrap`: create the first admin token, in the BMDB itself, and save a context with it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;

use crate::client::contexts::{Context, Contexts, check_context_name, check_token_writable, contexts_path};
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::order::expiry::{check_credential_lifetime, parse_end};
use crate::order::operator::{current_user, direct_order};
use crate::output::Format;
use crate::output::file::write_file_atomic;
use crate::tokens::delivery::deliver_token;
use bmdb::connection::Bmdb;
use bmdb::orders::credential::{NewAccessCredential, canonical_credential_name};
use model::access::{AccessRole, AccessScope};
use model::pem_blocks::encode_pem;
use model::rpc_name::CREATE_CREDENTIAL_RPC;

pub(crate) const BOOTSTRAP_EXAMPLES: &str = "\
Examples:
  shepherdctl tokens bootstrap --direct --save-context prod
  shepherdctl tokens bootstrap --direct --output-file /root/token";

/// Arguments of `tokens bootstrap`: name, end and destination of the first token.
#[derive(Debug, Args)]
pub struct BootstrapArgs {
    /// Owner of the token [default: you]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// When it expires: a duration (90d) or a time (2026-11-20T18:00:00Z) [default: when it is revoked]
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Write the token into this new file, readable only by you, instead of to standard output
    #[arg(long = "output-file", value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Save a context of this name with the token, and make it the current one
    #[arg(long = "save-context", value_name = "NAME")]
    pub save_context: Option<String>,
}

/// Runs `tokens bootstrap`: creates the first admin token.
pub async fn bootstrap_token(
    bmdb: &Bmdb,
    arguments: &BootstrapArgs,
    format: Format,
) -> Result<String, CliError> {
    let until = parse_end(arguments.until.as_deref(), check_credential_lifetime)?;
    let mut output = arguments.output_file.as_deref().map(absolute_path).transpose()?;
    let place = match &arguments.save_context {
        None => None,
        Some(name) => {
            check_context_name(name)?;
            let path = absolute_path(&contexts_path()?)?;
            let contexts = Contexts::read(&path)?;
            let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
            output.get_or_insert_with(|| directory.join(format!("{name}.token")));
            Some((name.clone(), path, directory, contexts, discover_api_servers(bmdb).await?))
        }
    };
    if let Some(file) = &output {
        check_token_writable(file)?;
    }
    let name = arguments.name.clone().unwrap_or_else(current_user);
    let name =
        canonical_credential_name(&name).map_err(|error| CliError::Invalid(format!("--name: {error}")))?;
    let new = NewAccessCredential {
        name: name.clone(),
        role: AccessRole::Admin,
        scope: AccessScope::Fleet,
        expiry: until,
        certificate: None,
    };
    let reason = Some("the first credential, made in the BMDB directly");
    let order = direct_order(CREATE_CREDENTIAL_RPC, format!("credential of {name}"), reason);
    let made = bmdb.create_credential(order, new).await?;
    let id = made.credential.map(|credential| credential.id.to_string()).unwrap_or_default();
    let mut printed = deliver_token(&id, made.token.as_ref(), output.as_deref(), format)?;
    if let Some((name, path, directory, mut contexts, (servers, authority))) = place {
        let ca_certificate_path = authority.as_ref().map(|_| directory.join(format!("{name}.ca.pem")));
        if let (Some(path), Some(authority)) = (&ca_certificate_path, &authority) {
            write_file_atomic(path, authority.as_bytes(), 0o644)?;
        }
        let context = Context { servers, ca_certificate_path, token_path: output.unwrap_or_default() };
        contexts.contexts.insert(name.clone(), context);
        contexts.current = Some(name.clone());
        contexts.write(&path)?;
        if format == Format::Table {
            let _ = writeln!(
                printed,
                "The context {name} is saved in {}, and is the current one.",
                path.display()
            );
        }
    }
    Ok(printed)
}

/// The path relative to the root, so that it is valid from every directory.
fn absolute_path(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path)
        .map_err(|error| CliError::Invalid(format!("{} is not a valid path: {error}", path.display())))
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
        return Err(CliError::Ended {
            exit: ExitCode::Unreachable,
            message: "no shepherd serves the API now, so no context can be saved; start one, or omit --save-context"
                .to_owned(),
        });
    }
    // Decoded and encoded again, so that only Base64 gets into the file.
    let pem = |der: &String| encode_pem("CERTIFICATE", &STANDARD.decode(der).unwrap_or_default());
    let authorities = Some(authorities.iter().map(pem).collect()).filter(|pem: &String| !pem.is_empty());
    Ok((servers, authorities))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_paths_are_absolute() {
        let here = std::env::current_dir().unwrap();
        for (given, expected) in [("a.token", here.join("a.token")), ("/b/c", PathBuf::from("/b/c"))] {
            assert_eq!(absolute_path(Path::new(given)).unwrap(), expected);
        }
        assert!(absolute_path(Path::new("")).is_err());
    }
}
