//! State of the two-person rule: when it was switched on, and who can approve.
//!
//! [`model::two_person_rule`] decides. Whether the rule is on is in the policy, which an earlier release reads too. The
//! columns beside the policy's document have what an earlier release would lose when it writes the document.
//!
//! A flag of a shepherd switches the rule on, and cannot switch it off. It stays off while fewer than two people are
//! admins, because then nobody could approve anything. `shepherdctl` switches it off on a host that reaches the
//! database: no call of the API does.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::{lock_policy, write_policy};
use crate::orders::order::{Actor, Order, OrderEffect, OrderResult, request_digest};
use model::admins::{AdminCredential, MIN_ADMINS, count_people};
use model::issues::inputs::{RuleSwitchedOff, TwoPersonRuleInputs};
use model::policy::Policy;
use model::policy_flags::PolicyFlags;
use model::rpc_name::DISABLE_TWO_PERSON_RULE_RPC;
use model::time::Timestamp;
use model::two_person_rule::{Approver, Principal, WaitingTime};

const OPERATION: &str = "reading the two-person rule";
const SWITCHING: &str = "switching the two-person rule";
/// The order to switch the rule on, as the audit names it. No call of the API gives it.
const ENABLE: &str = "shepherd.direct/EnableTwoPersonRule";
const TARGET: &str = "the two-person rule";

impl Bmdb {
    /// Writes the flags that a shepherd was started with into the policy, and switches the two-person rule on if one of
    /// them does. `by` names the flags. Returns a warning if a flag about the rule changed nothing.
    pub async fn write_policy_flags(
        &self,
        by: &str,
        flags: PolicyFlags,
    ) -> Result<Option<String>, BmdbError> {
        let rule = flags.require_second_admin;
        self.change_policy(by, move |stored| {
            // The rule needs two admins, so an order of its own switches it on.
            let is_on = stored.two_person_rule.required;
            flags.apply(stored);
            stored.two_person_rule.required = is_on;
        })
        .await?;
        match rule {
            Some(true) => {
                let switched = self.enable_two_person_rule(by).await?;
                let refused = switched.filter(|result| !result.outcome.is_changed());
                Ok(refused.map(|result| format!("the two-person rule {}", result.outcome.message)))
            }
            Some(false) if self.policy().1.two_person_rule.required => Ok(Some(
                "--require_second_admin false changes nothing: the two-person rule stays on".to_owned(),
            )),
            _ => {
                let withdrawn = self.transact_with(SWITCHING, by.to_owned(), |tx, by| {
                    Box::pin(withdraw_request_in_tx(tx, by))
                });
                withdrawn.await?;
                Ok(None)
            }
        }
    }

    /// Switches the rule on for a flag of a shepherd, unless fewer than two people are admins. `by` names the flag's
    /// shepherd. The result is `None` if the rule is on already.
    pub async fn enable_two_person_rule(&self, by: &str) -> Result<Option<OrderResult>, BmdbError> {
        self.read_policy().await?;
        if self.policy().1.two_person_rule.required {
            return Ok(None);
        }
        let order = direct_order(by, ENABLE, "--require_second_admin true");
        let result = self
            .execute_order(SWITCHING, order, None, (), |tx, order, ()| Box::pin(enable_in_tx(tx, order)))
            .await?;
        self.read_policy().await?;
        Ok(Some(result))
    }

    /// Switches the rule off for a person who reaches the database, `by`. A dry run only returns what would happen.
    pub async fn disable_two_person_rule(
        &self,
        by: &str,
        reason: &str,
        dry_run: bool,
    ) -> Result<OrderResult, BmdbError> {
        let order = Order { dry_run, ..direct_order(by, DISABLE_TWO_PERSON_RULE_RPC, reason) };
        let result = self
            .execute_order(SWITCHING, order, None, (), |tx, order, ()| Box::pin(disable_in_tx(tx, order)))
            .await?;
        self.read_policy().await?;
        Ok(result)
    }
}

/// An order that no call gives, for the audit.
fn direct_order(by: &str, rpc: &str, reason: &str) -> Order {
    Order {
        actor: Actor { name: by.to_owned(), credential: None },
        rpc: rpc.to_owned(),
        target: TARGET.to_owned(),
        reason: reason.to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}

async fn enable_in_tx(tx: &mut PgConnection, order: &Order) -> Result<OrderEffect, BmdbError> {
    let mut policy = lock_policy(tx).await?;
    if policy.two_person_rule.required {
        return Ok(OrderEffect::already("is on already; nothing was changed", Some(audit_json(true))));
    }
    let (admins, _) = list_admins(tx).await?;
    let people = count_people(&admins);
    if people < MIN_ADMINS {
        sqlx::query!("UPDATE policy SET two_person_rule_requested_by = $1", order.actor.name)
            .execute(&mut *tx)
            .await
            .context(SWITCHING)?;
        let text = format!(
            "stays off: it needs {MIN_ADMINS} admins with different names, and there are {people}. Create another with \
             `shepherdctl tokens create NAME --role admin`, then start a shepherd with --require_second_admin true again"
        );
        return Ok(OrderEffect::no_effect(text, Some(audit_json(false))));
    }
    policy.two_person_rule.required = true;
    write_policy(tx, &policy, &order.actor.name).await?;
    sqlx::query!(
        "UPDATE policy SET two_person_rule_on_at = clock_timestamp(), two_person_rule_requested_by = NULL"
    )
    .execute(&mut *tx)
    .await
    .context(SWITCHING)?;
    Ok(OrderEffect::changed("is on from now on", Some(audit_json(false)), Some(audit_json(true))))
}

/// Removes the note that these flags switch the rule on, after a start without that flag.
async fn withdraw_request_in_tx(tx: &mut PgConnection, by: &str) -> Result<(), BmdbError> {
    sqlx::query!(
        "UPDATE policy SET two_person_rule_requested_by = NULL WHERE two_person_rule_requested_by = $1",
        by
    )
    .execute(tx)
    .await
    .context(SWITCHING)?;
    Ok(())
}

async fn disable_in_tx(tx: &mut PgConnection, order: &Order) -> Result<OrderEffect, BmdbError> {
    let mut policy = lock_policy(tx).await?;
    if !policy.two_person_rule.required {
        return Ok(OrderEffect::already("is off already; nothing was changed", Some(audit_json(false))));
    }
    policy.two_person_rule.required = false;
    write_policy(tx, &policy, &order.actor.name).await?;
    sqlx::query!(
        "UPDATE policy SET two_person_rule_on_at = NULL, two_person_rule_requested_by = NULL,
         two_person_rule_off_at = clock_timestamp(), two_person_rule_off_by = $1, two_person_rule_off_reason = $2",
        order.actor.name,
        order.reason
    )
    .execute(&mut *tx)
    .await
    .context(SWITCHING)?;
    let text = "is off from now on: one admin is enough for every order. The issues list it for 30 days";
    Ok(OrderEffect::changed(text, Some(audit_json(true)), Some(audit_json(false))))
}

/// The rule as the audit stores it.
fn audit_json(required: bool) -> Value {
    json!({ "required": required })
}

/// How long a new credential approves nothing, by this policy and by the time when the rule was switched on.
pub(crate) async fn read_waiting_time(
    tx: &mut PgConnection,
    policy: &Policy,
) -> Result<WaitingTime, BmdbError> {
    // No time if the rule is off, or an earlier release switched it on.
    let since = sqlx::query_scalar!("SELECT two_person_rule_on_at FROM policy")
        .fetch_one(tx)
        .await
        .context(OPERATION)?;
    Ok(WaitingTime::of_policy(policy.two_person_rule, policy.approver_waiting_time, since))
}

/// What issues are derived from.
pub(crate) async fn read_rule_inputs(tx: &mut PgConnection) -> Result<TwoPersonRuleInputs, BmdbError> {
    let (admins, _) = list_admins(tx).await?;
    let admins = count_people(&admins);
    let row = sqlx::query!(
        "SELECT two_person_rule_requested_by, two_person_rule_off_at, two_person_rule_off_by,
                two_person_rule_off_reason FROM policy"
    )
    .fetch_one(tx)
    .await
    .context(OPERATION)?;
    let last_off = row.two_person_rule_off_at.map(|at| RuleSwitchedOff {
        at,
        by: row.two_person_rule_off_by.unwrap_or_default(),
        reason: row.two_person_rule_off_reason.unwrap_or_default(),
    });
    Ok(TwoPersonRuleInputs { admins, requested_by: row.two_person_rule_requested_by, last_off })
}

/// The credentials that can approve an order now, and the database's clock when they were read.
pub(crate) async fn list_admins(
    tx: &mut PgConnection,
) -> Result<(Vec<AdminCredential>, Timestamp), BmdbError> {
    let rows = sqlx::query_file!("../../sql/credential/list_admins.sql")
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let now = match rows.first() {
        Some(row) => row.now,
        None => database_now(tx).await?,
    };
    let admins = rows.into_iter().map(|row| AdminCredential {
        id: row.credential_id,
        name: row.name,
        created_at: row.created_at,
        expires_at: row.expires_at,
    });
    Ok((admins.collect(), now))
}

/// The person who approves an order, with the age of their credential.
pub(crate) async fn read_approver(tx: &mut PgConnection, by: &Principal) -> Result<Approver, BmdbError> {
    let credential_created_at = match by.credential {
        None => None,
        Some(credential) => Some(read_creation(tx, credential).await?),
    };
    Ok(Approver { principal: by.clone(), credential_created_at })
}

async fn read_creation(tx: &mut PgConnection, credential: Uuid) -> Result<Timestamp, BmdbError> {
    let created_at = sqlx::query_file_scalar!("../../sql/credential/find_approver.sql", credential)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    created_at.ok_or_else(|| {
        order_rejected(
            "APPROVER_GONE",
            "this credential is revoked or expired, and approves nothing any more",
        )
    })
}
