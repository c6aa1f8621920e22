//! `get policy`, `policy disable-two-person-rule`: show the fleet policy, as the BMDB stores it, and end the two-person
//! rule.
//!
//! The flags and the configuration of a shepherd write the policy; `plan --diff` shows what a new configuration would
//! change. The two-person rule is an exception: flags only switch it on, and no call switches it off. The way back is
//! here, for a person who reaches the database.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::client::decode::{decode_struct, missing_field};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::{CommandEnd, exit_code};
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::order::operator::current_user;
use crate::order::reason::require_audit_reason;
use model::plain_text::visible_text;
use proto::fleet::v1;
use proto::fleet::v1::policy_client::PolicyClient;

const COLUMNS: [Column; 2] = [Column::always("SETTING"), Column::always("VALUE")];

const DISABLE_RULE_EXAMPLES: &str = "\
Example:
  shepherdctl policy disable-two-person-rule --direct --reason 'lee left, and nobody else is an admin'";

/// Subcommands of `policy`: they end the two-person rule.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Switch the two-person rule off, in the database itself
    #[command(
        after_help = DISABLE_RULE_EXAMPLES,
        long_about = "\
Switch the two-person rule off, in the database itself: one admin is enough for every order again.

No flag of a shepherd and no call of the API does this. It is for the time when no second admin is left who could
approve an order. It is in the audit, and `shepherdctl issues` lists it for 30 days. To switch the rule on
again, start `shepherd --require_second_admin true`."
    )]
    DisableTwoPersonRule(DisableRuleArgs),
}

/// Arguments of `policy disable-two-person-rule`: the reason.
#[derive(Debug, Args)]
pub struct DisableRuleArgs {
    /// Why, for the audit and the issues
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// The fleet policy as a list of one object, with a row for each setting.
pub(crate) async fn list_policy(client: &FleetClient) -> Result<ObjectList, CliError> {
    let request = v1::GetPolicyRequest {};
    let response =
        PolicyClient::new(client.channel()).get(request).await.map_err(status_to_error)?.into_inner();
    let document = ObjectDocument::of_message(&response);
    let policy = response.policy.map(decode_struct).ok_or_else(|| missing_field("the policy"))?;
    let object = ListedObject {
        names: ObjectNames::of_name("policy"),
        rows: policy_rows(response.version, &policy),
        document: document.clone(),
    };
    Ok(ObjectList::new(ObjectKind::Policy, document, &COLUMNS, vec![object]))
}

/// Runs `policy disable-two-person-rule`: switches the rule off in the database.
pub async fn disable_two_person_rule(
    context: &CommandContext,
    args: &DisableRuleArgs,
) -> Result<String, CliError> {
    let reason = visible_text(require_audit_reason(&args.reason)?);
    let bmdb = context
        .client
        .require_bmdb("`policy disable-two-person-rule`", "no call of the API switches the rule off")?;
    let dry_run = context.order_flags.dry_run;
    let outcome = bmdb.disable_two_person_rule(&current_user(), &reason, dry_run).await?.outcome;
    context.exit_record.record(exit_code(CommandEnd::Outcome(outcome.kind)));
    // No call of the API does this, so there is no response to print.
    context.format_document(&format!("the two-person rule {}", outcome.message), || {
        Ok(json!({
            "changed": outcome.is_changed(), "outcome": outcome.kind.as_str(), "message": outcome.message,
        }))
    })
}

/// A row for each setting, with the version first.
fn policy_rows(version: i64, policy: &Value) -> Vec<Vec<String>> {
    let mut lines = vec![("version".to_owned(), version.to_string())];
    if let Value::Object(policy) = policy {
        for (key, value) in policy {
            add_value_lines(key, value, &mut lines);
        }
    }
    lines.into_iter().map(|(setting, value)| vec![setting, value]).collect()
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
    use model::policy::Policy;

    #[test]
    fn every_value_has_a_row() {
        let policy = serde_json::to_value(Policy::default()).unwrap();
        let rows = policy_rows(3, &policy);
        for setting in ["version", "recovery_silence_timeout", "ladder.1.step", "priority_weights"] {
            assert!(rows.iter().any(|row| row[0].starts_with(setting)), "{setting}: {rows:?}");
        }
        assert!(rows.iter().all(|row| !row[1].contains('{')), "{rows:?}");
    }
}
