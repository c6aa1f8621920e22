//! Delivery of a new token: printed once, or written into a file.

use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;

use crate::client::contexts::write_token;
use crate::error::CliError;
use crate::output::{Format, format_json};

#[derive(Serialize)]
struct CreatedCredentialOutput<'a> {
    credential: String,
    /// The token, unless it was written to a file.
    token: Option<&'a str>,
    path: Option<PathBuf>,
}

/// Writes a token into the file, if there is one. Returns the token to print otherwise.
pub(super) fn store_token<'a>(
    id: &str,
    token: Option<&'a SecretString>,
    file: Option<&Path>,
) -> Result<Option<&'a str>, CliError> {
    if let (Some(token), Some(file)) = (token, file) {
        write_token(file, token).map_err(|error| {
            CliError::Failed(format!(
                "{error}. Nobody has the token; revoke it with: shepherdctl tokens revoke {id} --reason 'was lost'"
            ))
        })?;
    }
    Ok(token.filter(|_| file.is_none()).map(SecretString::expose_secret))
}

/// Prints the token once, or writes it into a file.
pub(super) fn deliver_token(
    id: &str,
    token: Option<&SecretString>,
    file: Option<&Path>,
    format: Format,
) -> Result<String, CliError> {
    let shown = store_token(id, token, file)?;
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
        _ => format!("The credential {id} is valid from now on.\n"),
    })
}
