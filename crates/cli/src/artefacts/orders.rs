//! `artefacts add|delete`: the orders about artefacts, and their outcome as text or JSON.

use std::io::ErrorKind;
use std::path::PathBuf;

use clap::Args;

use crate::artefacts::upload::{LocalFile, upload_missing_pieces};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::{send_order, send_order_through};
use crate::output::Format;
use bmdb::fleet::artefact::order_target;
use model::artefact::check_name;
use model::signed_artefact::signature::ArtefactSignature;
use model::text_file::decode_text;
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

pub(crate) const ADD_EXAMPLES: &str = "\
Examples:
  shepherdctl artefacts add ./server-1.4 --reason 'the new front'
  shepherdctl artefacts add roleserver --name 'roleserver 1.4' --reason 'the next release'
  shepherdctl artefacts add roleserver --signature signed.minisig --reason 'the next release'

The artefact is identified by its digest, which is printed. A service that names it without a URL fetches
it from a shepherd. Repeat the command to resume an interrupted upload.";

pub(crate) const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl artefacts delete server-1.3 --reason 'no service uses it any more'";

/// Arguments of `artefacts add`: the file and its name.
#[derive(Debug, Args)]
pub struct AddArtefact {
    /// File to add, at most 256 MiB
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Name of the artefact [default: the name of the file]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Signature of the file, which minisign wrote [default: FILE.minisig, if it exists]
    #[arg(long, value_name = "FILE")]
    pub signature: Option<PathBuf>,
    /// Add the file without a signature although FILE.minisig exists
    #[arg(long = "without-signature", conflicts_with = "signature")]
    pub without_signature: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(crate) async fn add_artefact(context: &CommandContext, args: &AddArtefact) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let of_file = || args.file.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = args.name.clone().or_else(of_file).unwrap_or_default();
    check_name(&name).map_err(|reason| CliError::Invalid(format!("--name: {reason}")))?;
    let signature = read_signature(args)?;
    let mut local = LocalFile::open(&args.file)?;
    let mut client = context.client.clone();
    if !context.order_flags.dry_run {
        upload_missing_pieces(&mut client, &mut local).await?;
    }
    let sha256 = local.sha256;
    let give = async |service, order| {
        let request = v1::AddArtefactRequest {
            sha256: sha256.clone(),
            order: Some(order),
            name: name.clone(),
            signature: signature.clone(),
        };
        ArtefactsClient::new(service).add(request).await
    };
    let done = send_order_through(&mut client, context, &args.reason, give).await?;
    format_response(context, &name, &sha256, &done)
}

/// Reads the signature of the file; empty if it is not signed.
fn read_signature(args: &AddArtefact) -> Result<String, CliError> {
    if args.without_signature {
        return Ok(String::new());
    }
    let mut beside = args.file.as_os_str().to_owned();
    beside.push(".minisig");
    let path = args.signature.clone().unwrap_or_else(|| beside.into());
    let failed =
        |what: &dyn std::fmt::Display| CliError::Invalid(format!("cannot read {}: {what}", path.display()));
    let content = match std::fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound && args.signature.is_none() => {
            return Ok(String::new());
        }
        read => read.map_err(|error| failed(&error))?,
    };
    let text = decode_text(&content).map_err(|error| failed(&error))?;
    // Before anything is uploaded.
    ArtefactSignature::parse(text).map_err(|error| {
        let remedy = match args.signature {
            Some(_) => "",
            None => "; if it is no signature for this fleet, give --without-signature, or another file with --signature",
        };
        CliError::Invalid(format!("{}: {error}{remedy}", path.display()))
    })?;
    Ok(text.to_owned())
}

/// Arguments of `artefacts delete`: the artefact to remove.
#[derive(Debug, Args)]
pub struct DeleteArtefact {
    /// Artefact: its digest, the beginning of it (8 digits or more), or its name
    #[arg(value_name = "ARTEFACT")]
    pub artefact: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(crate) async fn delete_artefact(
    context: &CommandContext,
    args: &DeleteArtefact,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let name = &args.artefact;
    let give = async |service, order| {
        let request = v1::DeleteArtefactRequest { artefact: name.clone(), order: Some(order) };
        ArtefactsClient::new(service).delete(request).await
    };
    let done = send_order(context, &args.reason, give).await?;
    format_response(context, name, "", &done)
}

fn format_response(
    context: &CommandContext,
    name: &str,
    sha256: &str,
    response: &v1::OrderResponse,
) -> Result<String, CliError> {
    let text = format!("{} {}", order_target(name), response.message);
    let outcome = context.format_outcome(response, &text)?;
    if context.format == Format::Json || sha256.is_empty() {
        return Ok(outcome);
    }
    Ok(format!("{outcome}{sha256}\n"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A signature that minisign makes by default, with its own trusted comment.
    const FOREIGN: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
        "trusted comment: timestamp:1\tfile:tool.tar\thashed\n",
        "UDxDQF/pltTvw0F7zZ0LA1Qr1N1wKBod5Yj9i9OMOisddHng4NZceRcNYCguF12DBd3Savk11OYbrOd1NQUcAQ==\n",
    );

    #[test]
    fn foreign_signature_beside_a_file_is_left_out_on_request() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tool.tar");
        let beside = directory.path().join("tool.tar.minisig");
        let read = |signature: Option<&Path>, without_signature| {
            let args = AddArtefact {
                file: file.clone(),
                name: None,
                signature: signature.map(Path::to_owned),
                without_signature,
                reason: "a test".to_owned(),
            };
            read_signature(&args).map_err(|error| error.to_string())
        };
        assert_eq!(read(None, false), Ok(String::new()), "there is none");
        std::fs::write(&beside, FOREIGN).unwrap();
        let error = read(None, false).unwrap_err();
        assert!(
            error.contains("tool.tar.minisig: ") && error.contains("give --without-signature"),
            "{error}"
        );
        assert_eq!(read(None, true), Ok(String::new()));
        let error = read(Some(&beside), false).unwrap_err();
        assert!(!error.contains("--without-signature"), "it was named: {error}");
    }

    #[test]
    fn signature_is_read_as_editors_save_it() {
        let directory = tempfile::tempdir().unwrap();
        let args = AddArtefact {
            file: directory.path().join("tool.tar"),
            name: None,
            signature: None,
            without_signature: false,
            reason: "a test".to_owned(),
        };
        let read = |content: &[u8]| {
            std::fs::write(directory.path().join("tool.tar.minisig"), content).unwrap();
            read_signature(&args).map_err(|error| error.to_string())
        };
        // The same reason as without the mark: its comment is that of minisign.
        let plain = read(FOREIGN.as_bytes()).unwrap_err();
        assert_eq!(read(format!("\u{feff}{FOREIGN}").as_bytes()), Err(plain));
        let utf16: Vec<u8> = FOREIGN.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let error = read(&utf16).unwrap_err();
        assert!(error.contains("it is UTF-16") && !error.contains("--without-signature"), "{error}");
    }
}
