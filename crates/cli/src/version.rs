//! `version`: the releases of this program and of the servers.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::output::{Format, Output, format_json};
use proto::fleet::v1;
use proto::fleet::v1::about_client::AboutClient;

pub(crate) const VERSION_EXAMPLES: &str = "\
Examples:
  shepherdctl version                           this program and each server of the context
  shepherdctl version --client                  this program alone";

/// Arguments of `version`: which programs.
#[derive(Debug, Args)]
pub struct VersionArgs {
    /// Print the version of this program alone, without a call
    #[arg(long)]
    pub client: bool,
}

/// The versions that were found.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionReport {
    /// Release of this program.
    pub client_version: &'static str,
    /// The servers that were called, beginning with the one that other commands would use.
    pub servers: Vec<ServerVersion>,
}

/// The version of one server.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerVersion {
    /// `HOST:PORT` of the server, or the database.
    pub server: String,
    /// Release of the server; `None` if it did not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Version of the schema of its database.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_version: Option<i64>,
    /// Why it did not answer; `None` if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The exit code of that error.
    #[serde(skip)]
    pub exit: ExitCode,
}

impl VersionReport {
    /// The report of this program alone.
    #[must_use]
    pub const fn of_client() -> Self {
        Self { client_version: env!("CARGO_PKG_VERSION"), servers: Vec::new() }
    }

    /// The exit code of the command: the highest one of the servers.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        self.servers.iter().map(|server| server.exit).max().unwrap_or_default()
    }

    /// Calls each server of the context once.
    pub async fn add_servers(&mut self, client: &FleetClient) {
        let mut client = client.clone();
        for number in 0..client.server_count() {
            let mut connected = Ok(());
            if number > 0 {
                connected = client.connect_to_next().await;
            }
            let server = client.current_server().to_owned();
            let answer = match connected {
                Ok(()) => AboutClient::new(client.channel()).get(v1::GetAboutRequest {}).await,
                Err(status) => Err(status),
            };
            self.servers.push(match answer.map(tonic::Response::into_inner) {
                Ok(about) => ServerVersion {
                    server,
                    version: Some(about.version),
                    schema_version: Some(about.schema_version),
                    error: None,
                    exit: ExitCode::Done,
                },
                Err(status) => {
                    let error = status_to_error(status);
                    ServerVersion {
                        server,
                        version: None,
                        schema_version: None,
                        exit: error.exit_code(),
                        error: Some(error.to_string()),
                    }
                }
            });
        }
    }

    /// The report in an output. Names are no output of it.
    pub fn render(&self, output: &Output) -> Result<String, CliError> {
        match output.format() {
            Format::Json => output.convert(format_json(self)?),
            Format::Table => Ok(self.to_text()),
        }
    }

    fn to_text(&self) -> String {
        let mut text = format!("shepherdctl {}\n", self.client_version);
        for ServerVersion { server, version, schema_version, error, .. } in &self.servers {
            let _ = match (version, schema_version, error) {
                (Some(version), Some(schema), _) => {
                    writeln!(text, "shepherd {version} at {server}, schema {schema}")
                }
                (_, _, error) => {
                    let reason = error.as_deref().unwrap_or("it did not answer");
                    writeln!(text, "no version of {server}: {reason}")
                }
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_a_line_for_each_program() {
        let server = |name: &str, version: Option<&str>, error: Option<(&str, ExitCode)>| ServerVersion {
            server: name.to_owned(),
            version: version.map(str::to_owned),
            schema_version: version.map(|_| 42),
            error: error.map(|(text, _)| text.to_owned()),
            exit: error.map(|(_, exit)| exit).unwrap_or_default(),
        };
        let report = VersionReport {
            client_version: "1.2",
            servers: vec![
                server("a:1", Some("1.1"), None),
                server("b:1", None, Some(("refused", ExitCode::Unreachable))),
            ],
        };
        let text = "shepherdctl 1.2\nshepherd 1.1 at a:1, schema 42\nno version of b:1: refused\n";
        assert_eq!(report.render(&Output::Table).unwrap(), text);
        let template =
            Output::parse("jsonpath={.clientVersion} {.servers[*].version} {.servers[1].error}").unwrap();
        assert_eq!(report.render(&template).unwrap(), "1.2 1.1 refused");
        assert_eq!(report.exit_code(), ExitCode::Unreachable);
        assert_eq!(VersionReport::of_client().exit_code(), ExitCode::Done);
    }
}
