//! API credentials: bearer tokens and pinned client certificates.
//!
//! # What a token is
//!
//! `shepherd_ID_SECRET`: the id of its row in hexadecimal digits, and 256 random bits. The row holds the HMAC-SHA-256
//! of the secret under the id, from which nobody can recover the token; a slow hash is not needed for what cannot be
//! guessed. The row is found by the id, so the only comparison with anything secret is that of two digests, in constant
//! time. It takes place for an unknown id as well, so the duration of a rejection reveals nothing.
//!
//! A certificate is identified by the SHA-256 of its DER, which is no secret; the handshake proves that its holder has
//! the key.

use std::sync::Arc;

use rand::Rng as _;
use ring::hmac;
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::lock_policy;
use crate::orders::approval::{append_approver, require_approval_of_rights, require_second_approval};
use crate::orders::audit::{begin_dry_run, end_dry_run, find_by_idempotency_key, record_audit};
use crate::orders::order::{
    Expiry, Order, OrderEffect, OrderOutcome, OrderRejection, OrderResult, OutcomeKind,
};
use crate::orders::two_person_rule::{list_admins, read_waiting_time};
use model::access::{AccessRole, AccessScope};
use model::admins::{RevocationDecision, decide_revocation, find_uncounted};
use model::plain_text::canonical_name;
use model::policy::Policy;
use model::time::{Span, Timestamp};
use model::two_person_rule::SensitiveOrder;

const TOKEN_PREFIX: &str = "shepherd_";
const OPERATION: &str = "reading credentials";
/// Longest lifetime of a credential; a permanent one is made without an end.
pub const MAX_LIFETIME: Span = Span::hours(24 * 366 * 10);
/// What is wrong with a lifetime beyond [`MAX_LIFETIME`], as a part of a sentence.
pub const LIFETIME_TOO_LONG: &str = "that is longer than ten years; omit it for no expiry";
const MAX_NAME_LENGTH: usize = 100;

/// The name of a credential in the form in which it is stored; if it is not allowed, explains why.
pub fn canonical_credential_name(name: &str) -> Result<String, String> {
    let canonical = canonical_name(name).map_err(|reason| format!("the name {reason}"))?;
    if canonical.is_empty() || canonical.chars().count() > MAX_NAME_LENGTH {
        return Err(format!(
            "the name must be that of the credential's owner, in 1 to {MAX_NAME_LENGTH} characters of one line"
        ));
    }
    Ok(canonical)
}

/// The kind of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialKind {
    /// A bearer token of the form `shepherd_ID_SECRET`.
    Token,
    /// A client certificate, pinned by its SHA-256.
    Certificate,
}

impl CredentialKind {
    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Certificate => "certificate",
        }
    }
}

/// A credential as it is stored, without the secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessCredential {
    /// Id of its row, which a token contains.
    pub id: Uuid,
    /// The kind: `token` or `certificate`.
    pub kind: String,
    /// Name of the person or program it was made for.
    pub name: String,
    /// What the holder may do.
    pub role: AccessRole,
    /// The providers whose machines the holder may reach.
    pub scope: AccessScope,
    /// When it was made.
    pub created_at: Timestamp,
    /// Name of the admin who made it.
    pub created_by: String,
    /// When it expires; `None` is never.
    pub expires_at: Option<Timestamp>,
    /// When it was revoked; `None` if it was not.
    pub revoked_at: Option<Timestamp>,
    /// Name of the admin who revoked it; `None` if nobody did.
    pub revoked_by: Option<String>,
    /// Whether it was valid when this was read.
    pub active: bool,
}

/// A credential to make.
#[derive(Clone, Debug)]
pub struct NewAccessCredential {
    /// Name of the person or program it is for.
    pub name: String,
    /// What the holder may do.
    pub role: AccessRole,
    /// The providers whose machines the holder may reach.
    pub scope: AccessScope,
    /// When it expires, within [`MAX_LIFETIME`]; `None` is until it is revoked.
    pub expiry: Option<Expiry>,
    /// SHA-256 of a certificate to pin; `None` makes a token.
    pub certificate: Option<[u8; 32]>,
}

/// The result of making a credential.
#[derive(Debug)]
pub struct CreatedCredential {
    /// The stored credential; `None` when the order had been carried out before.
    pub credential: Option<AccessCredential>,
    /// The token, if it is one. It cannot be read again.
    pub token: Option<SecretString>,
    /// Result of the order, with its line in the audit.
    pub result: OrderResult,
}

/// A token as it was presented: the id it names, and the secret in it.
pub struct PresentedToken {
    id: Uuid,
    secret: SecretString,
}

impl PresentedToken {
    /// Parses a token; `None` if it does not have the form of one.
    #[must_use]
    pub fn parse(token: &str) -> Option<Self> {
        let (id, secret) = token.strip_prefix(TOKEN_PREFIX)?.split_once('_')?;
        let well_formed = id.len() == 32 && secret.len() == 64;
        let id = Uuid::try_parse(id).ok().filter(|_| well_formed)?;
        Some(Self { id, secret: secret.to_owned().into() })
    }

    /// The id it names.
    #[must_use]
    pub const fn id(&self) -> Uuid {
        self.id
    }

    /// Whether `proof` is the stored HMAC of this secret, compared in constant time.
    fn matches_proof(&self, proof: &[u8]) -> bool {
        hmac::verify(&hmac_key(self.id), self.secret.expose_secret().as_bytes(), proof).is_ok()
    }
}

fn hmac_key(id: Uuid) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, id.as_bytes())
}

/// Generates a token for a row with that id, and the HMAC that the row stores.
fn generate_token(id: Uuid) -> (SecretString, Vec<u8>) {
    let mut random = [0_u8; 32];
    rand::rng().fill_bytes(&mut random);
    let secret = hex::encode(random);
    let proof = hmac::sign(&hmac_key(id), secret.as_bytes()).as_ref().to_vec();
    (format!("{TOKEN_PREFIX}{}_{secret}", id.simple()).into(), proof)
}

#[derive(Debug)]
struct CredentialRow {
    credential_id: Uuid,
    kind: String,
    name: String,
    role: String,
    providers: Option<serde_json::Value>,
    proof: Vec<u8>,
    created_at: Timestamp,
    created_by: String,
    expires_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
    revoked_by: Option<String>,
    active: bool,
}

impl CredentialRow {
    fn into_credential(self) -> Result<AccessCredential, BmdbError> {
        let odd = |what: &str| BmdbError::Corrupt(format!("the credential {}: {what}", self.credential_id));
        let scope = match self.providers {
            None => AccessScope::Fleet,
            Some(listed) => {
                let listed: Vec<String> =
                    serde_json::from_value(listed).map_err(|error| odd(&error.to_string()))?;
                // An empty list is not accepted: it would mean everything.
                AccessScope::Providers(listed.into_iter().collect())
            }
        };
        Ok(AccessCredential {
            role: self.role.parse::<AccessRole>().map_err(|error| odd(&error.to_string()))?,
            id: self.credential_id,
            kind: self.kind,
            name: self.name,
            scope,
            created_at: self.created_at,
            created_by: self.created_by,
            expires_at: self.expires_at,
            revoked_at: self.revoked_at,
            revoked_by: self.revoked_by,
            active: self.active,
        })
    }
}

/// The credential of a presented token, whether it is valid or expired; `None` unless a row matches id and secret.
pub async fn find_by_token(
    tx: &mut PgConnection,
    presented: &PresentedToken,
) -> Result<Option<AccessCredential>, BmdbError> {
    let row = sqlx::query_file_as!(CredentialRow, "../../sql/credential/find_by_id.sql", presented.id)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    let proof = row.as_ref().map_or([0; 32].as_slice(), |row| row.proof.as_slice());
    let proven = presented.matches_proof(proof);
    let row = row.filter(|row| proven && row.kind == CredentialKind::Token.as_str());
    row.map(CredentialRow::into_credential).transpose()
}

/// The credential of a certificate that the handshake proved, by the SHA-256 of its DER.
pub async fn find_by_certificate(
    tx: &mut PgConnection,
    fingerprint: [u8; 32],
) -> Result<Option<AccessCredential>, BmdbError> {
    let row = sqlx::query_file_as!(
        CredentialRow,
        "../../sql/credential/find_by_fingerprint.sql",
        fingerprint.as_slice()
    )
    .fetch_optional(tx)
    .await
    .context(OPERATION)?;
    row.map(CredentialRow::into_credential).transpose()
}

/// A credential by its id.
pub async fn find_by_id(tx: &mut PgConnection, id: Uuid) -> Result<Option<AccessCredential>, BmdbError> {
    let row = sqlx::query_file_as!(CredentialRow, "../../sql/credential/find_by_id.sql", id)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    row.map(CredentialRow::into_credential).transpose()
}

/// Credentials, newest first, older than the one with id `before`.
pub async fn list_credentials(
    tx: &mut PgConnection,
    before: Uuid,
    limit: i64,
) -> Result<Vec<AccessCredential>, BmdbError> {
    let rows = sqlx::query_file_as!(CredentialRow, "../../sql/credential/list.sql", before, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    rows.into_iter().map(CredentialRow::into_credential).collect()
}

impl Bmdb {
    /// Makes a credential. A new token is in the result and nowhere else.
    pub async fn create_credential(
        &self,
        order: Order,
        new: NewAccessCredential,
    ) -> Result<CreatedCredential, BmdbError> {
        let id = Uuid::now_v7();
        let (token, proof, kind) = if let Some(fingerprint) = new.certificate {
            (None, fingerprint.to_vec(), CredentialKind::Certificate)
        } else {
            let (token, proof) = generate_token(id);
            (Some(token), proof, CredentialKind::Token)
        };
        let order = Arc::new(order);
        let arguments = (id, kind, new, proof);
        let made = self
            .run_order_transaction("making a credential", &order, arguments, |tx, order, arguments| {
                let (id, kind, new, proof) = arguments;
                Box::pin(create_credential_in_tx(tx, order, *id, *kind, new, proof))
            })
            .await;
        let (carried, credential) = self.audit_rejection(made, &order, None).await?;
        // A token that was generated in vain is stored nowhere, so nobody need know it.
        let token = token.filter(|_| credential.is_some());
        Ok(CreatedCredential { credential, token, result: carried })
    }

    /// Revokes a credential at once.
    pub async fn revoke_credential(&self, order: Order, id: Uuid) -> Result<OrderResult, BmdbError> {
        self.execute_order("revoking a credential", order, None, id, |tx, order, id| {
            Box::pin(revoke_credential_in_tx(tx, order, *id))
        })
        .await
    }
}

async fn revoke_credential_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    id: Uuid,
) -> Result<OrderEffect, BmdbError> {
    // Revocations lock the policy first, so that two of them do not count the same admins.
    let policy = lock_policy(tx).await?;
    sqlx::query!("SELECT revoked_at FROM access_credential WHERE credential_id = $1 FOR UPDATE", id)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let unknown = || BmdbError::NoSuchCredential(id.to_string());
    let before = find_by_id(tx, id).await?.ok_or_else(unknown)?;
    let outcome = if before.revoked_at.is_some() {
        OrderOutcome { kind: OutcomeKind::Already, message: "is revoked already; nothing was changed".into() }
    } else {
        let by = check_revocation(tx, order, &policy, &before).await?;
        sqlx::query!(
            "UPDATE access_credential SET revoked_at = clock_timestamp(), revoked_by = $2
             WHERE credential_id = $1 AND revoked_at IS NULL",
            id,
            order.actor.name
        )
        .execute(&mut *tx)
        .await
        .context("revoking a credential")?;
        let text = append_approver("is good for nothing any more".to_owned(), by.as_deref());
        OrderOutcome { kind: OutcomeKind::Changed, message: text }
    };
    let after = find_by_id(tx, id).await?.ok_or_else(unknown)?;
    Ok(OrderEffect { outcome, before: Some(audit_json(&before)), after: Some(audit_json(&after)) })
}

/// Rejects a revocation that leaves no admin, or that leaves fewer than two, or fewer than two who approve orders now and in a
/// day, without a second person. Returns the person who approved it. A person who writes to the database directly is outside of this.
async fn check_revocation(
    tx: &mut PgConnection,
    order: &Order,
    policy: &Policy,
    revoked: &AccessCredential,
) -> Result<Option<String>, BmdbError> {
    if order.actor.credential.is_none() {
        return Ok(None);
    }
    let rule = policy.two_person_rule;
    let (admins, now) = list_admins(tx).await?;
    let uncounted = find_uncounted(&admins, read_waiting_time(tx, policy).await?, now);
    match decide_revocation(rule.required, &admins, &uncounted, revoked.id) {
        RevocationDecision::Allowed => Ok(None),
        RevocationDecision::ApprovalRequired => {
            let shown = Order { target: revocation_target(&order.target, revoked), ..order.clone() };
            require_second_approval(tx, &shown, SensitiveOrder::RevokeAdmin, rule, &[]).await
        }
        RevocationDecision::LastAdmin => Err(order_rejected(
            "LAST_ADMIN",
            format!(
                "{} is the last admin, and nothing was changed: create another admin first, or revoke the credential \
                 with `shepherdctl --direct` on a host that reaches the database",
                revoked.name
            ),
        )),
    }
}

/// The credential to revoke, for the admin who approves it.
fn revocation_target(target: &str, revoked: &AccessCredential) -> String {
    format!("{target}, with the role {}, of {}", revoked.role, revoked.name)
}

/// A credential as the audit stores it.
fn audit_json(credential: &AccessCredential) -> serde_json::Value {
    serde_json::json!({
        "credential": credential.id,
        "kind": credential.kind,
        "name": credential.name,
        "role": credential.role.as_str(),
        "providers": credential.scope.providers(),
        "expires_at": credential.expires_at,
        "revoked_by": credential.revoked_by,
        "active": credential.active,
    })
}

/// Checks that a credential is not valid for longer than allowed.
fn check_lifetime(lifetime: Span) -> Result<Span, BmdbError> {
    if lifetime > MAX_LIFETIME {
        return Err(order_rejected("NO_LIFETIME", LIFETIME_TOO_LONG));
    }
    Ok(lifetime)
}

async fn create_credential_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    id: Uuid,
    kind: CredentialKind,
    new: &NewAccessCredential,
    proof: &[u8],
) -> Result<(OrderResult, Option<AccessCredential>), BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok((carried, None));
    }
    let lifetime = match new.expiry {
        None => None,
        Some(expiry) => {
            let remaining = expiry.remaining(database_now(tx).await?);
            let rejected = |(reason, text): OrderRejection| {
                order_rejected(reason, format!("no credential is made: {text}"))
            };
            Some(check_lifetime(remaining.map_err(rejected)?)?)
        }
    };
    let by = require_approval_of_rights(tx, order, SensitiveOrder::CreateCredential, &[]).await?;
    let providers = new.scope.providers();
    let stored = (!providers.is_empty()).then(|| serde_json::json!(providers));
    let expires = lifetime.map(|span| i64::try_from(span.0.as_millis()).unwrap_or(i64::MAX));
    begin_dry_run(tx, order).await?;
    let written = sqlx::query_file!(
        "../../sql/credential/insert.sql",
        id,
        kind.as_str(),
        new.name,
        new.role.as_str(),
        stored,
        proof,
        order.actor.name,
        expires,
    )
    .fetch_optional(&mut *tx)
    .await
    .context("making a credential")?;
    let made = find_by_id(tx, id).await?;
    end_dry_run(tx, order).await?;
    if written.is_none() {
        let effect = OrderEffect::no_effect(existing_pin_message(tx, new.certificate).await?, None);
        return Ok((record_audit(tx, order, None, effect).await?, None));
    }
    let text = format!("{} of {}, {}, is good from now on", kind.as_str(), new.name, new.role);
    let text = append_approver(text, by.as_deref());
    let mut after = made.as_ref().map(audit_json);
    if let (true, Some(after)) = (order.dry_run, &mut after) {
        // A dry run made no credential.
        after["credential"] = serde_json::Value::Null;
    }
    let carried = record_audit(tx, order, None, OrderEffect::changed(text, None, after)).await?;
    Ok((carried, made.filter(|_| !order.dry_run)))
}

/// Why a certificate is not pinned: a row of it exists. The audit names that row, and nobody may take it over.
async fn existing_pin_message(
    tx: &mut PgConnection,
    certificate: Option<[u8; 32]>,
) -> Result<String, BmdbError> {
    let found = match certificate {
        Some(fingerprint) => find_by_certificate(tx, fingerprint).await?,
        None => None,
    };
    Ok(match found {
        Some(AccessCredential { id, active: false, .. }) => format!(
            "this certificate was pinned before, as {id}, and is revoked or expired; create another one. Nothing \
             was changed"
        ),
        Some(AccessCredential { id, .. }) => {
            format!("this certificate is pinned already, as {id}; nothing was changed")
        }
        None => "this credential is there already; nothing was changed".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_proves_itself_and_no_other() {
        let (id, other) = (Uuid::now_v7(), Uuid::now_v7());
        let (token, proof) = generate_token(id);
        let presented = PresentedToken::parse(token.expose_secret()).unwrap();
        assert_eq!(presented.id(), id);
        assert!(presented.matches_proof(&proof));
        assert!(!presented.matches_proof(&generate_token(id).1), "another secret");
        assert!(!presented.matches_proof(&[0; 32]));
        let moved = token.expose_secret().replace(&id.simple().to_string(), &other.simple().to_string());
        assert!(
            !PresentedToken::parse(&moved).unwrap().matches_proof(&proof),
            "the same secret under another id"
        );
    }

    #[test]
    fn malformed_tokens_are_not_parsed() {
        let whole = generate_token(Uuid::now_v7()).0;
        let whole = whole.expose_secret();
        for text in ["", "shepherd_", "shepherd__", &whole[1..], &whole[..whole.len() - 1], "Bearer x"] {
            assert!(PresentedToken::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn stored_and_logged_values_do_not_contain_the_secret() {
        let (token, proof) = generate_token(Uuid::now_v7());
        let secret = token.expose_secret().rsplit('_').next().unwrap();
        assert!(!hex::encode(&proof).contains(secret));
        assert_ne!(proof, secret.as_bytes());
        assert!(!format!("{token:?}").contains(secret));
    }
}
