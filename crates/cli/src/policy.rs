//! `policy get`: show the fleet policy, as the BMDB stores it.
//!
//! The flags and the configuration of a shepherd write the policy; `plan --diff` shows what a new configuration would
//! change.

use clap::Subcommand;
use serde::Serialize;
use serde_json::Value;

use crate::client::decode::{decode_struct, missing_field};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::output::table::terminal_width;
use crate::output::{Format, format_json};
use model::policy::Policy;
use model::text_layout::format_labelled;
use proto::fleet::v1;
use proto::fleet::v1::policy_client::PolicyClient;

const POLICY_GET_EXAMPLES: &str = "\
Example:
  shepherdctl policy get -o json | jq .policy.ladder";

/// Subcommands of `policy`: they read and replace the fleet policy.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Show the policy and its version
    #[command(after_help = POLICY_GET_EXAMPLES)]
    Get,
}

#[derive(Serialize)]
struct PolicyOutput {
    version: i64,
    policy: Policy,
}

/// Runs `policy get`: prints the fleet policy.
pub async fn show_policy(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let request = v1::GetPolicyRequest {};
    let response =
        PolicyClient::new(client.channel()).get(request).await.map_err(status_to_error)?.into_inner();
    let policy = response.policy.map(decode_struct).and_then(|policy| serde_json::from_value(policy).ok());
    let policy = policy.ok_or_else(|| missing_field("a policy that this release can read"))?;
    let answer = PolicyOutput { version: response.version, policy };
    match format {
        Format::Json => format_json(&answer),
        Format::Table => render_policy(&answer),
    }
}

fn render_policy(answer: &PolicyOutput) -> Result<String, CliError> {
    let mut lines = vec![("version".to_owned(), answer.version.to_string())];
    if let Value::Object(policy) = serde_json::to_value(&answer.policy)? {
        for (key, value) in &policy {
            add_value_lines(key, value, &mut lines);
        }
    }
    Ok(format_labelled(0, &lines, terminal_width()))
}

/// Adds a line for each value: `budgets.reboot.most  20`.
fn add_value_lines(name: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                add_value_lines(&format!("{name}.{key}"), value, lines);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            for (number, value) in values.iter().enumerate() {
                add_value_lines(&format!("{name}.{}", number + 1), value, lines);
            }
        }
        Value::Array(values) => {
            let texts: Vec<String> = values.iter().map(format_value).collect();
            lines.push((name.to_owned(), texts.join(", ")));
        }
        other => lines.push((name.to_owned(), format_value(other))),
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_line() {
        let text = render_policy(&PolicyOutput { version: 3, policy: Policy::default() }).unwrap();
        for line in ["version", "recovery_silence_timeout", "ladder.1.step", "priority_weights"] {
            assert!(text.lines().any(|message| message.starts_with(line)), "{line}: {text}");
        }
        assert!(!text.contains('{'), "{text}");
    }
}
