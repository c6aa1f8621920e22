//! Command-line flags of `shepherd`.
//!
//! Every flag is also an environment variable (`SHEPHERD_` and its name in capitals) and a key of the TOML file given
//! by `--config`. The command line takes precedence over the environment, and the environment over the file. A dash
//! works wherever an underscore does.
//!
//! Flags about when and how machines are treated only *write* the policy in the BMDB, and only if they are given: see
//! `model/policy.rs`.

#![allow(rustdoc::broken_intra_doc_links, reason = "[[provider]] in a help text is TOML")]
#![expect(
    clippy::doc_markdown,
    reason = "the documentation of each flag is its help text, which shows no marks"
)]

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::bmdb::connection::dialect::Dialect;
use crate::model::adoption::AdoptionSettings;
use crate::model::policy_flags::PolicyFlags;
use crate::model::time::{Rate, Span};
use crate::service::demo::flags::DemoFlags;
use crate::simulator::service::SimulatorArgs;

/// Takes over bare-metal servers and keeps them useful without a person watching.
///
/// Without a subcommand it runs the service: control loops that install the role server on your machines, detect
/// failures and recover machines, and the endpoint to which the machines report. Any number of instances can share one
/// database.
#[derive(Debug, Parser)]
#[command(
    name = "shepherd",
    version,
    max_term_width = 100,
    args_conflicts_with_subcommands = true,
    after_help = EXAMPLES
)]
pub struct ShepherdFlags {
    /// What to run in place of the service.
    #[command(subcommand)]
    pub command: Option<ShepherdCommand>,
    /// Flags of the service itself.
    #[command(flatten)]
    pub service: ServiceFlags,
}

const EXAMPLES: &str = "\
See it work:
  shepherd demo

Run it on a list of servers:
  shepherd --bmdb_url postgres://user@host:5432/bmdb --provider static \\
    --static_device_list_url file:///etc/shepherd/devices.json \\
    --agent_executable_path /usr/lib/shepherd/roleserver --agent_endpoint shepherd.example:8443 \\
    --ssh_key_path /var/lib/shepherd/ssh_key --secrets_key_path /var/lib/shepherd/secrets.key

Ask what a machine is waiting for:
  shepherdctl why MACHINE

A dash works wherever an underscore does. Each flag is also an environment variable (--ssh_user
is SHEPHERD_SSH_USER) and a key of the file named by --config (ssh_user). The command line
overrides the environment, and the environment overrides the file.

SPAN is a length of time: 250ms, 5s, 30m, 1h30m. RATE is PERIOD,COUNT: 250ms,8 is up to 8 at
once, and one more every 250ms.";

/// What `shepherd` can be instead of the service.
#[derive(Debug, Subcommand)]
pub enum ShepherdCommand {
    /// Run a whole fleet in a box: database, simulated machines and the service.
    Demo(DemoFlags),
    /// Simulate machines behind real protocols, or break one of them.
    Simulator(SimulatorArgs),
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of text, for a terminal.
    #[default]
    Text,
    /// One object per line.
    Json,
}

/// A part of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum ServiceComponent {
    /// Records the machines of providers in the BMDB, and requests new ones.
    Provisioner,
    /// Installs the role server on machines.
    Initializer,
    /// Recovers machines that became silent.
    Recoverer,
    /// Queries providers about their machines, and rolls out releases of the role server.
    Updater,
    /// Returns retiring machines to their providers.
    Retirer,
    /// Carries out operators' reboot and power orders.
    Switcher,
    /// Creates clusters of machines, and maintains them.
    Cluster,
    /// Receives the heartbeats of agents.
    Callback,
    /// Serves the fleet API to operators.
    Api,
}

/// Everything the service takes.
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the documentation of each is its help text")]
pub struct ServiceFlags {
    /// TOML file with any of these flags as keys, and [[provider]] tables.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Validate everything, touch nothing, and print what would run.
    #[arg(long)]
    pub check: bool,
    /// Parts to run in this process. [default: all of them]
    #[arg(
        long,
        value_name = "PART",
        value_delimiter = ',',
        ignore_case = true,
        hide_default_value = true,
        default_value = "provisioner,initializer,recoverer,updater,retirer,switcher,cluster,callback,api"
    )]
    pub components: Vec<ServiceComponent>,
    /// How logs are written.
    #[arg(long, value_name = "FORMAT", value_enum, ignore_case = true, default_value = "text")]
    pub log_format: LogFormat,
    /// Time that running work has to finish after a signal to stop.
    #[arg(long, value_name = "SPAN", default_value = "30s")]
    pub shutdown_grace: Span,

    /// The database: postgres://user@host:5432/bmdb, or several hosts (host1,host2:5433), of which the one that takes
    /// writes is used. Pass the password in SHEPHERD_BMDB_URL or ~/.pgpass.
    #[arg(long, value_name = "URL", help_heading = "Bare metal database", conflicts_with_all = ["bmdb_eat_my_data", "bmdb_dir"])]
    pub bmdb_url: Option<String>,
    /// The same database without the pooler of --bmdb_url, for the connections that renew sessions and receive wake-ups.
    #[arg(long, value_name = "URL", help_heading = "Bare metal database", requires = "bmdb_url")]
    pub bmdb_direct_url: Option<String>,
    /// Start a private PostgreSQL, and delete its data when shepherd ends.
    #[arg(long, help_heading = "Bare metal database", conflicts_with = "bmdb_dir")]
    pub bmdb_eat_my_data: bool,
    /// Start a private PostgreSQL that keeps its data in DIR.
    #[arg(long, value_name = "DIR", help_heading = "Bare metal database")]
    pub bmdb_dir: Option<PathBuf>,
    /// SQL dialect and transaction rules of the database.
    #[arg(
        long,
        value_name = "DIALECT",
        value_enum,
        ignore_case = true,
        default_value = "postgres",
        help_heading = "Bare metal database"
    )]
    pub bmdb_dialect: Dialect,
    /// Maximum number of connections to the database.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(4..=1000), help_heading = "Bare metal database")]
    pub bmdb_max_connections: u32,
    /// Time after which a session that is not renewed expires.
    #[arg(long, value_name = "SPAN", default_value = "5s", help_heading = "Bare metal database")]
    pub session_interval: Span,
    /// File of the key that seals secrets in the database; created if missing.
    #[arg(long, value_name = "FILE", help_heading = "Bare metal database")]
    pub secrets_key_path: Option<PathBuf>,

    /// Kind of the one provider that needs no configuration file: static or simulated.
    #[arg(long, value_name = "KIND", help_heading = "Provider")]
    pub provider: Option<String>,
    /// Name of that provider. [default: its kind]
    #[arg(long, value_name = "NAME", help_heading = "Provider", requires = "provider")]
    pub provider_name: Option<String>,
    /// Device list of a static provider: file:///path or http(s)://host/path.
    #[arg(long, value_name = "URL", help_heading = "Provider")]
    pub static_device_list_url: Option<String>,
    /// SHA-256 of that list, 64 hexadecimal digits. Commands and host keys of a list from a server are
    /// accepted only with it.
    #[arg(long, value_name = "DIGEST", help_heading = "Provider", requires = "static_device_list_url")]
    pub static_device_list_sha256: Option<String>,
    /// Provider API of a simulator: http://host:port.
    #[arg(long, value_name = "URL", help_heading = "Provider")]
    pub simulated_url: Option<String>,

    /// Program of the role server, to install on machines. Only this user and root may be able to change it. With
    /// signing keys, its signature is FILE.minisig.
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub agent_executable_path: Option<PathBuf>,
    /// Path of the role server on machines, absolute or relative to the home of the SSH user. Only that user and root
    /// may be able to change it.
    /// [default: a place that suits the machine, see docs/machines.md]
    #[arg(long, value_name = "PATH", help_heading = "Agent")]
    pub agent_target_path: Option<String>,
    /// HOST:PORT to which machines report; may be given several times.
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', help_heading = "Agent")]
    pub agent_endpoint: Vec<String>,
    /// Listen address of the callback server, to which agents report.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8443", help_heading = "Agent")]
    pub agent_listen_address: SocketAddr,
    /// Certificate of the callback server and its chain, PEM. [default: one from a CA stored in the database]
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub agent_tls_certificate_path: Option<PathBuf>,
    /// Private key of that certificate, PEM.
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub agent_tls_key_path: Option<PathBuf>,
    /// CA with which machines verify that certificate, PEM. [default: the last certificate of its chain if that is
    /// self-signed, otherwise the machine's own trusted CAs]
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub agent_endpoint_ca_certificate_path: Option<PathBuf>,
    /// Public keys of minisign that releases must be signed with, one file after the other, a spare key among them.
    /// Machines pin them.
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub signing_keys_path: Option<PathBuf>,
    /// List of keys that replaces those that machines have pinned; its signature is FILE.minisig. May be given several
    /// times.
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub key_rotation_path: Vec<PathBuf>,
    /// Let machines refuse a declared role that gives root and is not signed. They pin it.
    #[arg(long, help_heading = "Agent", requires = "signing_keys_path")]
    pub require_signed_declarations: bool,

    /// Listen address of the fleet API, gRPC and JSON over TLS.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8444", help_heading = "API")]
    pub api_listen_address: SocketAddr,
    /// HOST:PORT at which operators reach the API, a name in its certificate; may be given several times. [default: the
    /// listen address, unless that is 0.0.0.0]
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', help_heading = "API")]
    pub api_endpoint: Vec<String>,

    /// SSH user for machines of a provider that names none.
    #[arg(long, value_name = "USER", default_value = "root", help_heading = "SSH")]
    pub ssh_user: String,
    /// SSH private key in OpenSSH format; created if missing.
    #[arg(long, value_name = "FILE", help_heading = "SSH")]
    pub ssh_key_path: Option<PathBuf>,
    /// File with the SSH password for the machines of --provider. Their host keys must be known. Shepherd then logs in
    /// with it and not with the key. SHEPHERD_SSH_PASSWORD can contain the password instead.
    #[arg(long, value_name = "FILE", help_heading = "SSH")]
    pub ssh_password_path: Option<PathBuf>,
    /// Time limit for connecting.
    #[arg(long, value_name = "SPAN", default_value = "2s", help_heading = "SSH")]
    pub agent_ssh_connect_timeout: Span,
    /// Time limit for the first byte of the SSH greeting, which a host that hangs never sends.
    #[arg(long, value_name = "SPAN", default_value = "5s", help_heading = "SSH")]
    pub agent_ssh_greeting_timeout: Span,
    /// Time limit for the key exchange and the login.
    #[arg(long, value_name = "SPAN", default_value = "20s", help_heading = "SSH")]
    pub agent_ssh_login_timeout: Span,
    /// Time limit for one command.
    #[arg(long, value_name = "SPAN", default_value = "60s", help_heading = "SSH")]
    pub agent_ssh_exec_timeout: Span,

    /// How often a provider is compared with the database.
    #[arg(long, value_name = "RATE", default_value = "1m,1", help_heading = "Loops")]
    pub provisioner_reconciler_rate: Rate,
    /// Maximum number of machines of one provider; 0 for no limit. The key max_machines of a [[provider]] table overrides
    /// it. [default: no limit for static, otherwise 50]
    #[arg(long, value_name = "N", help_heading = "Loops")]
    pub provisioner_max_machines: Option<usize>,
    /// How often a machine is requested from a provider. The key device_creation_rate of a [[provider]] table overrides it.
    /// [default: at once for static, otherwise 5s,1]
    #[arg(long, value_name = "RATE", help_heading = "Loops")]
    pub provisioner_device_creation_rate: Option<Rate>,
    /// Maximum number of machines requested from a provider in one pass.
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = "Loops")]
    pub provisioner_reservation_chunk_size: usize,
    /// Machines taken over at once; 0 counts as 1.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Loops")]
    pub initializer_loop_parallelism: usize,
    /// How often the initializer looks for work.
    #[arg(long, value_name = "RATE", default_value = "250ms,8", help_heading = "Loops")]
    pub initializer_db_query_rate: Rate,
    /// Machines recovered at once; 0 counts as 1.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Loops")]
    pub recoverer_loop_parallelism: usize,
    /// How often the recoverer looks for work.
    #[arg(long, value_name = "RATE", default_value = "250ms,8", help_heading = "Loops")]
    pub recoverer_db_query_rate: Rate,
    /// Machines about which providers are queried at once; 0 counts as 1.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Loops")]
    pub updater_loop_parallelism: usize,
    /// How often the updater looks for work.
    #[arg(long, value_name = "RATE", default_value = "250ms,8", help_heading = "Loops")]
    pub updater_db_query_rate: Rate,
    /// Machines returned to their providers at once; 0 counts as 1.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Loops")]
    pub retirer_loop_parallelism: usize,
    /// How often the retirer looks for work.
    #[arg(long, value_name = "RATE", default_value = "250ms,8", help_heading = "Loops")]
    pub retirer_db_query_rate: Rate,
    /// Reboot and power orders carried out at once; 0 counts as 1.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Loops")]
    pub switcher_loop_parallelism: usize,
    /// How often the switcher looks for work.
    #[arg(long, value_name = "RATE", default_value = "250ms,8", help_heading = "Loops")]
    pub switcher_db_query_rate: Rate,

    /// Listen address of the metrics, served as http://ADDRESS:PORT/metrics.
    #[arg(long, value_name = "ADDRESS:PORT", help_heading = "Metrics")]
    pub metrics_listen_address: Option<SocketAddr>,
    /// Receiver of traces of work items, by OTLP over gRPC: http://HOST:4317. It takes precedence over the variables
    /// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT. [default: none]
    #[arg(long, value_name = "URL", help_heading = "Traces")]
    pub otlp_endpoint: Option<String>,

    #[command(flatten)]
    pub policy: PolicyFlags,
}

impl ServiceFlags {
    /// What the flags set of the limits of adoption, for every provider.
    pub(super) fn adoption_settings(&self) -> AdoptionSettings {
        AdoptionSettings {
            max_machines: self.provisioner_max_machines,
            creation_rate: self.provisioner_device_creation_rate,
        }
    }
}

/// The command, with an environment variable for every flag.
#[must_use]
pub fn build_command() -> clap::Command {
    ShepherdFlags::command().args_override_self(true).mut_args(|arg| {
        let name = arg.get_id().as_str();
        if matches!(name, "help" | "version" | "check") {
            return arg;
        }
        let variable = format!("SHEPHERD_{}", name.to_uppercase());
        arg.env(variable).hide_env(true)
    })
}

/// Parses flags that a program gives. The environment is ignored.
pub fn parse_flags_without_environment(
    arguments: Vec<std::ffi::OsString>,
) -> Result<ShepherdFlags, clap::Error> {
    let matches = ShepherdFlags::command().try_get_matches_from(arguments)?;
    ShepherdFlags::from_arg_matches(&matches)
}

/// Parses arguments whose dashes are already replaced by underscores.
pub fn parse_flags(arguments: Vec<std::ffi::OsString>) -> Result<ShepherdFlags, clap::Error> {
    let matches = build_command().try_get_matches_from(arguments)?;
    ShepherdFlags::from_arg_matches(&matches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_well_formed() {
        build_command().debug_assert();
    }
}
