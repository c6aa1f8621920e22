//! Orders that wait for another admin: asked for, approved, and carried out once.
//!
//! [`crate::model::second_person`] decides; this keeps what was asked for. An order that needs another admin is
//! refused by `gate` in its own transaction, which is rolled back; [`crate::bmdb::audit`] then writes down that it
//! was asked for, with the line of the audit. Its row is known by who asked and their key, so that however often it
//! is given meanwhile it is asked for once.
//!
//! Approved, and given again, it finds its row under a lock and uses it up in the transaction that carries it out:
//! of two that come at once the second one waits, and then finds the order in the audit.

use serde::Serialize;
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{
    Carried, Order, begin_attempt, end_attempt, given_before, request_digest, write_down,
};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::now;
use crate::bmdb::policy::policy_in;
use crate::model::second_person::{
    Asked, Grave, Person, SecondPerson, Verdict, decide, may_approve, sentence, state,
};
use crate::model::telling::absolute;
use crate::model::time::{Span, Timestamp};

const WHAT: &str = "looking for an approval";
/// The call that approves, as the audit names it.
pub const RPC: &str = "shepherd.fleet.v1.Approvals/Approve";
/// Most that are listed.
pub const LISTED: i64 = 500;

/// What an order that needs another admin is asked for under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its row.
    pub approval: Uuid,
    /// Its idempotency key: the one that it was given, or one that was made for it.
    pub key: String,
    /// What tells it from another order.
    pub request: [u8; 32],
    /// About what, for whoever approves it.
    pub target: String,
    /// How long it stays asked for.
    pub good_for: Span,
    /// A sentence.
    pub said: String,
}

/// An order that was asked for, as it is listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalLine {
    /// Its id.
    pub approval: Uuid,
    /// `waiting`, `approved`, `used` or `expired`.
    pub state: String,
    /// Who asked.
    pub asked_by: String,
    /// Which call.
    pub rpc: String,
    /// About what.
    pub target: String,
    /// Why.
    pub reason: String,
    /// When.
    pub asked_at: Timestamp,
    /// Until when it can be approved, or is.
    pub expires_at: Timestamp,
    /// Who approved it.
    pub approved_by: Option<String>,
    /// When.
    pub approved_at: Option<Timestamp>,
    /// Why.
    pub approve_reason: Option<String>,
    /// When it was carried out.
    pub used_at: Option<Timestamp>,
}

#[derive(Debug)]
struct Row {
    approval_id: Uuid,
    actor: String,
    credential_id: Option<Uuid>,
    rpc: String,
    request: Vec<u8>,
    target: String,
    reason: String,
    asked_at: Timestamp,
    expires_at: Timestamp,
    approved_by: Option<String>,
    approved_at: Option<Timestamp>,
    approve_reason: Option<String>,
    used_at: Option<Timestamp>,
    credential_name: Option<String>,
    good: bool,
    now: Timestamp,
}

impl Row {
    fn asked(&self) -> Asked {
        let name = self.credential_name.as_ref().unwrap_or(&self.actor).clone();
        Asked {
            by: Person { name, credential: self.credential_id },
            good: self.good,
            expires_at: self.expires_at,
            approved_by: self.approved_by.clone(),
            used: self.used_at.is_some(),
        }
    }

    /// As the audit says it.
    fn told(&self) -> Value {
        json!({
            "approval": self.approval_id,
            "asked_by": self.actor,
            "rpc": self.rpc,
            "target": self.target,
            "reason": self.reason,
            "asked_at": self.asked_at,
            "expires_at": self.expires_at,
            "approved_by": self.approved_by,
            "approved_at": self.approved_at,
            "approve_reason": self.approve_reason,
        })
    }
}

/// The row of an order: the same for the same actor and key.
fn id_of(actor: &str, key: &str) -> Uuid {
    let digest = request_digest(format!("{actor}\0{key}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

async fn row(tx: &mut PgConnection, approval: Uuid) -> Result<Option<Row>, BmdbError> {
    sqlx::query_file_as!(Row, "sql/approval/lock.sql", approval).fetch_optional(tx).await.doing(WHAT)
}

/// Asks whether an order of that kind may be carried out in this transaction, and says who approved it where that
/// was needed; its approval is used up then. `about` is what else must be the same as when it was approved.
pub(crate) async fn gate(
    tx: &mut PgConnection,
    order: &Order,
    grave: Grave,
    policy: SecondPerson,
    about: &[u8],
) -> Result<Option<String>, BmdbError> {
    if decide(policy, order.dry_run, None, Timestamp::UNIX_EPOCH) == Verdict::Free {
        return Ok(None);
    }
    let key = order.idempotency_key.clone().unwrap_or_else(|| Uuid::new_v4().to_string());
    let approval = id_of(&order.actor.name, &key);
    let mut said = order.request.to_vec();
    said.extend(about);
    let request = request_digest(&said);
    let found = row(tx, approval).await?;
    let now = match &found {
        Some(found) => found.now,
        None => now(tx).await?,
    };
    let asked = found.as_ref().map(|found| (found.asked(), found.request == request));
    let asked = asked.as_ref().map(|(asked, the_same)| (asked, *the_same));
    let refuse = |reason, said: String| Err(BmdbError::OrderRefused { reason, said });
    match decide(policy, order.dry_run, asked, now) {
        Verdict::Free => Ok(None),
        Verdict::Approved(by) => {
            sqlx::query_file!("sql/approval/mark_used.sql", approval)
                .execute(tx)
                .await
                .doing("using an approval")?;
            Ok(Some(by))
        }
        Verdict::Ask => {
            let said = sentence(grave, approval, &key);
            let (good_for, target) = (policy.good_for, order.target.clone());
            Err(BmdbError::SecondPerson(Box::new(Wanted { approval, key, request, target, good_for, said })))
        }
        Verdict::Changed => refuse(
            "NOT_AS_ASKED",
            format!(
                "this is not the order that was asked for with the idempotency key {key}: it says something else, or \
                 means other machines by now. Nothing was changed; give it another key to ask anew"
            ),
        ),
        // The same order was given at once, and is in the audit by now: there it finds what became of it.
        Verdict::Used if given_before(tx, order).await?.is_some() => Err(BmdbError::OrderedAtOnce),
        Verdict::Used => refuse(
            "USED",
            format!(
                "what was approved under the idempotency key {key} was carried out; nothing was changed now"
            ),
        ),
        Verdict::AskerGone => refuse(
            "ASKER_GONE",
            "the credential that this order was asked for with is revoked or over; nothing was changed"
                .to_owned(),
        ),
    }
}

/// Writes down that an order waits for another admin.
pub(crate) async fn ask(tx: &mut PgConnection, order: &Order, wanted: &Wanted) -> Result<(), BmdbError> {
    sqlx::query_file!(
        "sql/approval/upsert_request.sql",
        wanted.approval,
        order.actor.name,
        order.actor.credential,
        wanted.key,
        order.rpc,
        wanted.request.as_slice(),
        wanted.target,
        order.reason,
        wanted.good_for.float_milliseconds(),
    )
    .execute(tx)
    .await
    .doing("asking for another admin")?;
    Ok(())
}

/// What was done, with who approved it.
#[must_use]
pub(crate) fn with_approval(said: String, by: Option<&str>) -> String {
    match by {
        None => said,
        Some(by) => format!("{said}; approved by {by}"),
    }
}

/// What was asked for, newest first, and when that was read.
pub async fn approvals(tx: &mut PgConnection) -> Result<(Vec<ApprovalLine>, Timestamp), BmdbError> {
    let rows = sqlx::query_file!("sql/approval/list.sql", LISTED).fetch_all(&mut *tx).await.doing(WHAT)?;
    let now = now(tx).await?;
    let lines = rows.into_iter().map(|row| ApprovalLine {
        approval: row.approval_id,
        state: state(row.approved_at.is_some(), row.used_at.is_some(), row.expires_at, now).to_owned(),
        asked_by: row.actor,
        rpc: row.rpc,
        target: row.target,
        reason: row.reason,
        asked_at: row.asked_at,
        expires_at: row.expires_at,
        approved_by: row.approved_by,
        approved_at: row.approved_at,
        approve_reason: row.approve_reason,
        used_at: row.used_at,
    });
    Ok((lines.collect(), now))
}

impl Bmdb {
    /// Approves what was asked for, on behalf of `by`.
    pub async fn approve(&self, order: Order, approval: Uuid, by: Person) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("approving an order", move |tx| {
                let (order, by) = (order.clone(), by.clone());
                Box::pin(async move { approve(tx, &order, approval, &by).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }
}

async fn approve(
    tx: &mut PgConnection,
    order: &Order,
    approval: Uuid,
    by: &Person,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let refuse = |reason, said: String| BmdbError::OrderRefused { reason, said };
    let Some(found) = row(tx, approval).await? else {
        let said = format!("nothing was asked for as {approval}; `shepherdctl get approvals` lists what was");
        return Err(refuse("NO_SUCH_APPROVAL", said));
    };
    may_approve(&found.asked(), by, found.now)
        .map_err(|(reason, said)| refuse(reason, format!("{approval} is not approved: {said}")))?;
    let good_for = policy_in(tx).await?.second_person.good_for;
    let before = found.told();
    begin_attempt(tx, order).await?;
    let written = sqlx::query_file!(
        "sql/approval/approve.sql",
        approval,
        by.name,
        by.credential,
        order.reason,
        good_for.float_milliseconds(),
    )
    .fetch_one(&mut *tx)
    .await
    .doing("approving an order")?;
    end_attempt(tx, order).await?;
    let said = format!(
        "is approved until {}: {} of {} ({}), which {} is to give again",
        absolute(written.expires_at),
        found.rpc.rsplit('.').next().unwrap_or(&found.rpc),
        found.target,
        found.reason,
        found.actor
    );
    let after = Row {
        expires_at: written.expires_at,
        approved_by: Some(by.name.clone()),
        approved_at: Some(written.approved_at),
        approve_reason: Some(order.reason.clone()),
        ..found
    };
    write_down(tx, order, None, Done { changed: true, said }, Some(before), Some(after.told())).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_of_an_order_is_its_actors_and_its_keys() {
        assert_eq!(id_of("kim", "1"), id_of("kim", "1"));
        assert_ne!(id_of("kim", "1"), id_of("kim", "2"));
        assert_ne!(id_of("kim", "1"), id_of("lee", "1"));
        assert_eq!(with_approval("is 5".into(), Some("lee")), "is 5; approved by lee");
        assert_eq!(with_approval("is 5".into(), None), "is 5");
    }
}
