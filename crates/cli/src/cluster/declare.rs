//! `cluster declare`, `cluster undeclare`: roles of operators, with the services that nodes run for them.

use std::path::PathBuf;

use clap::Args;

use crate::cluster::outcome::format_response;
use crate::cluster::role_file::read_role_file;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const DECLARE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster declare ams web.toml --reason 'the new front'

Give the role to the workers with: shepherdctl cluster roles ams --add_role web

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
that has it restarts the services that changed. Do not store secrets in a declaration.";

pub(crate) const UNDECLARE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster undeclare ams web --reason 'the front moved'

A role that the workers have cannot be withdrawn. First remove it from them:
  shepherdctl cluster roles ams --remove_role web --reason 'the front moved'";

/// Arguments of `cluster declare`: the file of the role.
#[derive(Debug, Args)]
pub struct DeclareInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// TOML file with the declaration of the role
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
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
    let give = async |service, order| {
        let request = v1::DeclareRoleRequest {
            name: args.name.clone(),
            order: Some(order),
            declaration: Some(declaration.to_wire().clone()),
        };
        ClustersClient::new(service).declare_role(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, response)
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
    format_response(context, &args.name, response)
}
