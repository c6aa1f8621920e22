//! Two-person rule: orders that wait for a second admin's approval.
//!
//! [`model::two_person_rule`] decides; this module stores the requests. `require_second_approval` rejects an
//! order that needs a second admin in the order's own transaction, which is rolled back. `audit_rejection` in
//! `execution.rs` then stores the request together with its line of the audit. The id of its row is derived from the
//! actor and the idempotency key, so an order that is repeated meanwhile makes no second request.
//!
//! When the approved order is given again, it finds its row under a lock and uses it up in the transaction that carries
//! it out. Of two that come at once the second one waits, and then finds the order in the audit.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{ApprovalRequest, BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::read_policy_in_tx;
use crate::orders::audit::find_by_idempotency_key;
use crate::orders::order::{Order, OrderEffect, OrderResult, request_digest};
use crate::orders::two_person_rule::{read_approver, read_waiting_time};
use model::humanize::absolute_time;
use model::time::Timestamp;
use model::two_person_rule::{
    ApprovalDecision, PendingApproval, Principal, SensitiveOrder, TwoPersonRule, approval_required_message,
    approval_state, check_approver, decide_approval,
};

const OPERATION: &str = "looking for an approval";

/// An approval request as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRecord {
    /// Id that an admin approves it by.
    pub approval_id: Uuid,
    /// `waiting`, `approved`, `used` or `expired`.
    pub state: String,
    /// Name of the actor who gave the order.
    pub requested_by: String,
    /// The order's RPC, such as `shepherd.fleet.v1.Machines/Hold`.
    pub rpc: String,
    /// What the order is about, for people.
    pub target: String,
    /// The actor's reason for the order.
    pub reason: String,
    /// When the order was first given.
    pub requested_at: Timestamp,
    /// Until when it can be approved and, once it is approved, carried out.
    pub expires_at: Timestamp,
    /// Name of the admin who approved it; `None` until then.
    pub approved_by: Option<String>,
    /// When it was approved; `None` until then.
    pub approved_at: Option<Timestamp>,
    /// The approving admin's reason; `None` until then.
    pub approve_reason: Option<String>,
    /// When the order was carried out; `None` until then.
    pub used_at: Option<Timestamp>,
}

#[derive(Debug)]
struct ApprovalRow {
    approval_id: Uuid,
    actor: String,
    credential_id: Option<Uuid>,
    rpc: String,
    request: Vec<u8>,
    target: String,
    reason: String,
    requested_at: Timestamp,
    expires_at: Timestamp,
    approved_by: Option<String>,
    approved_at: Option<Timestamp>,
    approve_reason: Option<String>,
    used_at: Option<Timestamp>,
    credential_name: Option<String>,
    good: bool,
    approver_good: bool,
    now: Timestamp,
}

impl ApprovalRow {
    fn pending_approval(&self) -> PendingApproval {
        let name = self.credential_name.as_ref().unwrap_or(&self.actor).clone();
        PendingApproval {
            requester: Principal { name, credential: self.credential_id },
            requester_is_valid: self.good,
            requested_at: self.requested_at,
            expires_at: self.expires_at,
            approved_by: self.approved_by.clone(),
            approver_is_valid: self.approver_good,
            is_used: self.used_at.is_some(),
        }
    }

    /// The row as the audit stores it.
    fn audit_json(&self) -> Value {
        json!({
            "approval": self.approval_id,
            "requested_by": self.actor,
            "rpc": self.rpc,
            "target": self.target,
            "reason": self.reason,
            "requested_at": self.requested_at,
            "expires_at": self.expires_at,
            "approved_by": self.approved_by,
            "approved_at": self.approved_at,
            "approve_reason": self.approve_reason,
        })
    }
}

/// Id of an order's row: the same for the same actor and key.
fn approval_id(actor: &str, key: &str) -> Uuid {
    let digest = request_digest(format!("{actor}\0{key}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

async fn lock_approval(tx: &mut PgConnection, approval: Uuid) -> Result<Option<ApprovalRow>, BmdbError> {
    sqlx::query_file_as!(ApprovalRow, "../../sql/approval/lock.sql", approval)
        .fetch_optional(tx)
        .await
        .context(OPERATION)
}

/// Decides whether an order of this kind may be carried out in this transaction. Returns the admin who approved it if
/// an approval was needed, which is used up then. `about` is what else must be the same as at the time of the request.
pub(crate) async fn require_second_approval(
    tx: &mut PgConnection,
    order: &Order,
    kind: SensitiveOrder,
    policy: TwoPersonRule,
    about: &[u8],
) -> Result<Option<String>, BmdbError> {
    if decide_approval(policy, order.dry_run, None, Timestamp::UNIX_EPOCH) == ApprovalDecision::NotRequired {
        return Ok(None);
    }
    let key = order.idempotency_key.clone().unwrap_or_else(|| Uuid::new_v4().to_string());
    let approval = approval_id(&order.actor.name, &key);
    let mut bytes = order.request_digest.to_vec();
    bytes.extend(about);
    let request = request_digest(&bytes);
    let found = lock_approval(tx, approval).await?;
    let now = match &found {
        Some(found) => found.now,
        None => database_now(tx).await?,
    };
    let requested = found.as_ref().map(|found| (found.pending_approval(), found.request == request));
    let requested = requested.as_ref().map(|(pending_approval, the_same)| (pending_approval, *the_same));
    let refuse = |reason, text: String| Err(order_rejected(reason, text));
    match decide_approval(policy, order.dry_run, requested, now) {
        ApprovalDecision::NotRequired => Ok(None),
        ApprovalDecision::Approved(by) => {
            sqlx::query!(
                "UPDATE approval SET used_at = clock_timestamp() WHERE approval_id = $1 AND used_at IS NULL",
                approval
            )
            .execute(tx)
            .await
            .context("using an approval")?;
            Ok(Some(by))
        }
        ApprovalDecision::Required => {
            let text = approval_required_message(kind, approval, &key);
            Err(BmdbError::ApprovalRequired(Box::new(ApprovalRequest {
                approval_id: approval,
                idempotency_key: key,
                request_digest: request,
                target: order.target.clone(),
                ttl: policy.approval_ttl,
                message: text,
            })))
        }
        ApprovalDecision::OrderChanged => refuse(
            "NOT_AS_REQUESTED",
            format!(
                "this is not the order that was requested with the idempotency key {key}: its content \
                 differs, or its selector now matches other machines. Nothing was changed; use another key to \
                 request approval again"
            ),
        ),
        // The same order was given at the same time and is in the audit by now, where the retry finds its outcome.
        ApprovalDecision::AlreadyUsed if find_by_idempotency_key(tx, order).await?.is_some() => {
            Err(BmdbError::DuplicateOrderInProgress)
        }
        ApprovalDecision::AlreadyUsed => refuse(
            "USED",
            format!(
                "what was approved under the idempotency key {key} was carried out; nothing was changed now"
            ),
        ),
        ApprovalDecision::RequesterInvalid => refuse(
            "REQUESTER_GONE",
            "the credential that requested this order is revoked or expired, and nothing was changed: give the order \
             with another credential, which makes a new request"
                .to_owned(),
        ),
        ApprovalDecision::ApproverInvalid(by) => refuse(
            "APPROVER_GONE",
            format!(
                "the credential of {by}, who approved this order, is revoked or expired, and nothing was changed: let \
                 another admin give `shepherdctl approve {approval} --reason …`, then give the order again"
            ),
        ),
    }
}

/// Decides as [`require_second_approval`] does on an order that gives rights. A person who writes to the database
/// directly is outside of the rule here: they can write the row without any order. `about` is the identity of what the
/// rights are for, if the order names it by a name that something else can get.
pub(crate) async fn require_approval_of_rights(
    tx: &mut PgConnection,
    order: &Order,
    kind: SensitiveOrder,
    about: &[u8],
) -> Result<Option<String>, BmdbError> {
    if order.actor.credential.is_none() {
        return Ok(None);
    }
    let rule = read_policy_in_tx(tx).await?.two_person_rule;
    require_second_approval(tx, order, kind, rule, about).await
}

/// Stores that an order waits for a second admin.
pub(crate) async fn record_approval_request(
    tx: &mut PgConnection,
    order: &Order,
    wanted: &ApprovalRequest,
) -> Result<(), BmdbError> {
    sqlx::query_file!(
        "../../sql/approval/upsert_request.sql",
        wanted.approval_id,
        order.actor.name,
        order.actor.credential,
        wanted.idempotency_key,
        order.rpc,
        wanted.request_digest.as_slice(),
        wanted.target,
        order.reason,
        wanted.ttl.float_milliseconds(),
    )
    .execute(tx)
    .await
    .context("requesting the approval of another admin")?;
    Ok(())
}

/// The outcome's message, with the approver's name appended.
#[must_use]
pub(crate) fn append_approver(text: String, by: Option<&str>) -> String {
    match by {
        None => text,
        Some(by) => format!("{text}; approved by {by}"),
    }
}

/// Approval requests after the one at `after`, newest first, `limit` at most, and the database's clock when they were read.
/// Without `after` they begin with the newest one.
pub async fn list_approvals(
    tx: &mut PgConnection,
    after: Option<(Timestamp, Uuid)>,
    limit: i64,
) -> Result<(Vec<ApprovalRecord>, Timestamp), BmdbError> {
    let now = database_now(tx).await?;
    let (at, approval) = after.unwrap_or((now, Uuid::max()));
    let rows = sqlx::query_file!("../../sql/approval/list.sql", at, approval, limit)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let lines = rows.into_iter().map(|row| ApprovalRecord {
        approval_id: row.approval_id,
        state: approval_state(row.approved_at.is_some(), row.used_at.is_some(), row.expires_at, now)
            .to_owned(),
        requested_by: row.actor,
        rpc: row.rpc,
        target: row.target,
        reason: row.reason,
        requested_at: row.requested_at,
        expires_at: row.expires_at,
        approved_by: row.approved_by,
        approved_at: row.approved_at,
        approve_reason: row.approve_reason,
        used_at: row.used_at,
    });
    Ok((lines.collect(), now))
}

impl Bmdb {
    /// Approves a stored request on behalf of `by`.
    pub async fn approve_order(
        &self,
        order: Order,
        approval: Uuid,
        by: Principal,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("approving an order", order, None, (approval, by), |tx, order, (approval, by)| {
            Box::pin(approve_order_in_tx(tx, order, *approval, by))
        })
        .await
    }
}

async fn approve_order_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    approval: Uuid,
    by: &Principal,
) -> Result<OrderEffect, BmdbError> {
    let Some(found) = lock_approval(tx, approval).await? else {
        let output = format!(
            "there is no request for approval {approval}; `shepherdctl get approvals` lists those that exist"
        );
        return Err(order_rejected("NO_SUCH_APPROVAL", output));
    };
    let (approver, policy) = (read_approver(tx, by).await?, read_policy_in_tx(tx).await?);
    let rule = policy.two_person_rule;
    let waiting = read_waiting_time(tx, &policy).await?;
    check_approver(&found.pending_approval(), &approver, waiting, found.now)
        .map_err(|(reason, text)| order_rejected(reason, format!("{approval} is not approved: {text}")))?;
    let before = found.audit_json();
    let written = sqlx::query_file!(
        "../../sql/approval/approve.sql",
        approval,
        by.name,
        by.credential,
        order.reason,
        rule.approval_ttl.float_milliseconds(),
    )
    .fetch_one(&mut *tx)
    .await
    .context("approving an order")?;
    let text = format!(
        "is approved until {}: {} of {} ({}), which {} has to give again",
        absolute_time(written.expires_at),
        found.rpc.rsplit('.').next().unwrap_or(&found.rpc),
        found.target,
        found.reason,
        found.actor
    );
    let after = ApprovalRow {
        expires_at: written.expires_at,
        approved_by: Some(by.name.clone()),
        approved_at: Some(written.approved_at),
        approve_reason: Some(order.reason.clone()),
        ..found
    };
    Ok(OrderEffect::changed(text, Some(before), Some(after.audit_json())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approval_id_depends_on_actor_and_key() {
        assert_eq!(approval_id("kim", "1"), approval_id("kim", "1"));
        assert_ne!(approval_id("kim", "1"), approval_id("kim", "2"));
        assert_ne!(approval_id("kim", "1"), approval_id("lee", "1"));
        assert_eq!(append_approver("is 5".into(), Some("lee")), "is 5; approved by lee");
        assert_eq!(append_approver("is 5".into(), None), "is 5");
    }
}
