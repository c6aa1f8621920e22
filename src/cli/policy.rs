//! `policy`: the rules that the fleet is run by, as they are kept in the BMDB.
//!
//! They are written by the flags and the configuration of a shepherd; `plan --diff` says what that would change.

use clap::Subcommand;
use serde::Serialize;
use serde_json::Value;

use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get::json;
use crate::cli::output::{Format, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{json_object, odd};
use crate::cli::source::Source;
use crate::model::layout::labelled;
use crate::model::policy::Policy;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::policy_client::PolicyClient;

/// What can be done with the policy.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Show the policy and its version
    #[command(after_help = examples::POLICY_GET)]
    Get,
}

#[derive(Serialize)]
struct Answer {
    version: i64,
    policy: Policy,
}

/// `policy get`.
pub async fn get(source: &Source, format: Format) -> Result<String, CliError> {
    let answer = match source {
        Source::Direct(bmdb) => {
            bmdb.read_policy().await?;
            let (version, policy) = bmdb.policy();
            Answer { version, policy: (*policy).clone() }
        }
        Source::Api(remote) => {
            let request = v1::GetPolicyRequest {};
            let said = PolicyClient::new(remote.service()).get(request).await.map_err(refused)?.into_inner();
            let policy = said.policy.map(json_object).and_then(|policy| serde_json::from_value(policy).ok());
            let policy = policy.ok_or_else(|| odd("a policy that is known here"))?;
            Answer { version: said.version, policy }
        }
    };
    match format {
        Format::Json => json(&answer),
        Format::Table => render(&answer),
    }
}

fn render(answer: &Answer) -> Result<String, CliError> {
    let mut lines = vec![("version".to_owned(), answer.version.to_string())];
    if let Value::Object(policy) = serde_json::to_value(&answer.policy)? {
        for (key, value) in &policy {
            tell(key, value, &mut lines);
        }
    }
    Ok(labelled(0, &lines, width()))
}

/// A line for each value: `budgets.reboot.most  20`.
fn tell(name: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                tell(&format!("{name}.{key}"), value, lines);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            for (number, value) in values.iter().enumerate() {
                tell(&format!("{name}.{}", number + 1), value, lines);
            }
        }
        Value::Array(values) => {
            let texts: Vec<String> = values.iter().map(text).collect();
            lines.push((name.to_owned(), texts.join(", ")));
        }
        other => lines.push((name.to_owned(), text(other))),
    }
}

fn text(value: &Value) -> String {
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
        let text = render(&Answer { version: 3, policy: Policy::default() }).unwrap();
        for line in ["version", "recovery_silence_timeout", "ladder.1.step", "priority_weights"] {
            assert!(text.lines().any(|told| told.starts_with(line)), "{line}: {text}");
        }
        assert!(!text.contains('{'), "{text}");
    }
}
