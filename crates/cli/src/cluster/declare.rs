//! `cluster declare`, `cluster undeclare`: roles of operators, with the services that nodes run for them.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use crate::cluster::outcome::format_response;
use crate::cluster::role_file::read_role_file;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::output::file::write_file_atomic;
use model::cluster::declaration::encode_signed_content;
use model::signed_artefact::signature::ArtefactSignature;
use model::text_file::decode_text;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const DECLARE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster declare ams web.toml --reason 'the new front'

Give the role to the workers with: shepherdctl cluster roles ams --add-role web

web.toml:
  role = \"web\"

  [[service]]
  name = \"server\"
  program = \"/usr/bin/perl\"           # or artefact = SHA-256 and url = \"http://HOST/PATH\"
  arguments = [\"server.pl\", \"{{node.address}}\"]
  user = \"nobody\"
  limits = { memory = \"64MiB\", processors = 0.5, tasks = 20 }
  health = { http = { port = 8080, path = \"/\" }, interval = \"5s\" }

  [[service.file]]
  path = \"server.pl\"
  from = \"server.pl\"                  # a file beside this one, or contents = \"…\"

A service may also have environment, depends_on, restart (always, on-failure or never) and stop_time;
health may be tcp = PORT or exec = [PROGRAM, …]. It is confined as in a container; capabilities = [\"NET_ADMIN\"],
new_privileges = true and, with an archive, seccomp = \"unconfined\" request more. Declaring a role again replaces it: each node
that has it restarts the services that changed. Do not store secrets in a declaration.

A role that gives root on nodes is signed, if the shepherds have signing keys and no other admin approves it:
  shepherdctl cluster declare ams web.toml --output-file web.role --reason 'the new front'
  minisign -S -H -s release.key -m web.role \\
    -t 'shepherd kind=declaration name=web version=1.0.0 architecture=any minimum-version=1.0.0'
  shepherdctl cluster declare ams web.toml --signature web.role.minisig --reason 'the new front'";

pub(crate) const UNDECLARE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster undeclare ams web --reason 'the front moved'

A role that the workers have cannot be withdrawn. First remove it from them:
  shepherdctl cluster roles ams --remove-role web --reason 'the front moved'";

/// Arguments of `cluster declare`: the file of the role.
#[derive(Debug, Args)]
pub struct DeclareInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// TOML file with the declaration of the role
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Signature of the encoded role, as minisign wrote it
    #[arg(long, value_name = "FILE", conflicts_with = "output_file")]
    pub signature: Option<PathBuf>,
    /// Write the encoded role, which minisign signs, to this file, and declare nothing
    #[arg(long = "output-file", value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Arguments of `cluster undeclare`: the role to withdraw.
#[derive(Debug, Args)]
pub struct UndeclareInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Name of the role to withdraw, for example web
    #[arg(value_name = "ROLE")]
    pub role: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(super) async fn declare_role(
    context: &CommandContext,
    args: &DeclareInCluster,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let declaration = read_role_file(&args.file)?;
    if let Some(file) = &args.output_file {
        write_file_atomic(file, &encode_signed_content(declaration.to_wire()), 0o644)?;
        let role = declaration.role().to_string();
        let text =
            format!("the role {role} was not declared: it is written to {}, to be signed", file.display());
        let answer = json!({ "role": role, "changed": false, "file": file });
        return context.format_document(&text, || Ok(answer));
    }
    let signature = args.signature.as_deref().map(read_signature).transpose()?.unwrap_or_default();
    let give = async |service, order| {
        let request = v1::DeclareRoleRequest {
            name: args.name.clone(),
            order: Some(order),
            declaration: Some(declaration.to_wire().clone()),
            signature: signature.clone(),
        };
        ClustersClient::new(service).declare_role(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}

/// Reads the signature of a role.
fn read_signature(path: &Path) -> Result<String, CliError> {
    let wrong = |error: &dyn std::fmt::Display| CliError::Invalid(format!("{}: {error}", path.display()));
    let unread =
        |error: &dyn std::fmt::Display| CliError::Invalid(format!("cannot read {}: {error}", path.display()));
    let content = std::fs::read(path).map_err(|error| unread(&error))?;
    let text = decode_text(&content).map_err(|error| unread(&error))?;
    ArtefactSignature::parse(text).map_err(|error| wrong(&error))?;
    Ok(text.to_owned())
}

pub(super) async fn undeclare_role(
    context: &CommandContext,
    args: &UndeclareInCluster,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let give = async |service, order| {
        let request =
            v1::UndeclareRoleRequest { name: args.name.clone(), order: Some(order), role: args.role.clone() };
        ClustersClient::new(service).undeclare_role(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}
