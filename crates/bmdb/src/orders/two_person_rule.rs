//! State of the two-person rule: when it was switched on, and who can approve.
//!
//! [`model::two_person_rule`] decides. Whether the rule is on is in the policy, which an earlier release reads too. The
//! columns beside the policy's document have what an earlier release would lose when it writes the document.
//!
//! A flag of a shepherd switches the rule on, and cannot switch it off. It stays off while fewer than two people are
//! admins, because then nobody could approve anything.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::policy::{lock_policy, write_policy};
use crate::orders::order::{Actor, Order, OrderEffect, OrderResult, request_digest};
use model::admins::{AdminCredential, MIN_ADMINS, count_people};
use model::time::Timestamp;
use model::two_person_rule::{Approver, Principal};

const OPERATION: &str = "reading the two-person rule";
const SWITCHING: &str = "switching the two-person rule";
/// The order to switch the rule on, as the audit names it. No call of the API gives it.
const ENABLE: &str = "shepherd.direct/EnableTwoPersonRule";
const TARGET: &str = "the two-person rule";

impl Bmdb {
    /// Switches the rule on for a flag of a shepherd, unless fewer than two people are admins. `by` names the flag's
    /// shepherd. The result is `None` if the rule is on already.
    pub async fn enable_two_person_rule(&self, by: &str) -> Result<Option<OrderResult>, BmdbError> {
        self.read_policy().await?;
        if self.policy().1.two_person_rule.required {
            return Ok(None);
        }
        let order = Order {
            actor: Actor { name: by.to_owned(), credential: None },
            rpc: ENABLE.to_owned(),
            target: TARGET.to_owned(),
            reason: "--require_second_admin true".to_owned(),
            idempotency_key: None,
            dry_run: false,
            expected_version: None,
            request_digest: request_digest(&[]),
        };
        let result = self
            .execute_order(SWITCHING, order, None, (), |tx, order, _| Box::pin(enable_in_tx(tx, order)))
            .await?;
        self.read_policy().await?;
        Ok(Some(result))
    }
}

async fn enable_in_tx(tx: &mut PgConnection, order: &Order) -> Result<OrderEffect, BmdbError> {
    let mut policy = lock_policy(tx).await?;
    if policy.two_person_rule.required {
        return Ok(OrderEffect::unchanged("is on already; nothing was changed", None));
    }
    let admins = list_admins(tx).await?;
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
        return Ok(OrderEffect::unchanged(text, None));
    }
    policy.two_person_rule.required = true;
    write_policy(tx, &policy, &order.actor.name).await?;
    sqlx::query!(
        "UPDATE policy SET two_person_rule_on_at = clock_timestamp(), two_person_rule_requested_by = NULL"
    )
    .execute(&mut *tx)
    .await
    .context(SWITCHING)?;
    let state = |on: bool| Some(serde_json::json!({ "required": on }));
    Ok(OrderEffect::changed("is on from now on", state(false), state(true)))
}

/// When the rule was switched on; `None` if it is off, or an earlier release switched it on.
pub(crate) async fn read_rule_start(tx: &mut PgConnection) -> Result<Option<Timestamp>, BmdbError> {
    sqlx::query_scalar!("SELECT two_person_rule_on_at FROM policy").fetch_one(tx).await.context(OPERATION)
}

/// The credentials that can approve an order now.
pub(crate) async fn list_admins(tx: &mut PgConnection) -> Result<Vec<AdminCredential>, BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/credential/list_admins.sql").fetch_all(tx).await.context(OPERATION)?;
    Ok(rows.into_iter().map(|row| AdminCredential { id: row.credential_id, name: row.name }).collect())
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
