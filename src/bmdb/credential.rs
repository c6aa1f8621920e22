//! Tokens and pinned client certificates: making them, checking them, ending them.
//!
//! # What a token is
//!
//! `shepherd_ID_SECRET`: the id of its row in hexadecimal digits, and 256 random bits. The row holds the
//! HMAC-SHA-256 of the secret under the id, from which nobody gets the token back; no slow hash is needed
//! for what cannot be guessed. The row is found by the id, so the only comparison with anything secret is
//! that of two digests, in constant time, and it takes place for an unknown id as well: how long a refusal
//! takes tells nothing.
//!
//! A certificate is known by the SHA-256 of its DER, which is no secret; that its holder has the key is
//! proven in the handshake.

use rand::Rng as _;
use ring::hmac;
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::model::access::{Role, Scope};
use crate::model::time::{Span, Timestamp};

const PREFIX: &str = "shepherd_";
const WHAT: &str = "reading credentials";
/// Longest time a credential may be good; what is to last is made without an end.
pub const LONGEST_LIFE: Span = Span::hours(24 * 366 * 10);
const LONGEST_NAME: usize = 100;

/// Whether a credential may be called so; if not, a sentence.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.trim().is_empty() || name.chars().count() > LONGEST_NAME || name.chars().any(char::is_control) {
        return Err(format!(
            "the name must say whose the credential is, in 1 to {LONGEST_NAME} characters of one line"
        ));
    }
    Ok(())
}

/// What a credential is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bearer token.
    Token,
    /// A client certificate.
    Certificate,
}

impl Kind {
    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Certificate => "certificate",
        }
    }
}

/// What is known of a credential, the secret aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Its id.
    pub id: Uuid,
    /// `token` or `certificate`.
    pub kind: String,
    /// Whose.
    pub name: String,
    /// What they may do.
    pub role: Role,
    /// With whose machines.
    pub scope: Scope,
    /// When it was made.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
    /// When it was ended.
    pub revoked_at: Option<Timestamp>,
    /// By whom.
    pub revoked_by: Option<String>,
    /// Whether it was good when this was read.
    pub active: bool,
}

/// A credential to make.
#[derive(Clone, Debug)]
pub struct NewCredential {
    /// Whose.
    pub name: String,
    /// What they may do.
    pub role: Role,
    /// With whose machines.
    pub scope: Scope,
    /// How long it is good; `None` is until it is revoked.
    pub expires_after: Option<Span>,
    /// SHA-256 of a certificate to pin; `None` makes a token.
    pub certificate: Option<[u8; 32]>,
}

/// A credential that was made.
#[derive(Debug)]
pub struct Made {
    /// What is known of it; `None` when the order had been carried out before.
    pub credential: Option<Credential>,
    /// The token, if it is one. Nobody can read it again.
    pub token: Option<SecretString>,
    /// What the audit says.
    pub carried: Carried,
}

/// A token as it was presented: the id it names, and the secret in it.
pub struct Presented {
    id: Uuid,
    secret: SecretString,
}

impl Presented {
    /// Takes a token apart; `None` for what has not its form.
    #[must_use]
    pub fn read(token: &str) -> Option<Self> {
        let (id, secret) = token.strip_prefix(PREFIX)?.split_once('_')?;
        let well_formed = id.len() == 32 && secret.len() == 64;
        let id = Uuid::try_parse(id).ok().filter(|_| well_formed)?;
        Some(Self { id, secret: secret.to_owned().into() })
    }

    /// The id it names.
    #[must_use]
    pub const fn id(&self) -> Uuid {
        self.id
    }

    /// Whether the secret is the one that `proof` is of, in constant time.
    fn is_proven_by(&self, proof: &[u8]) -> bool {
        hmac::verify(&key_of(self.id), self.secret.expose_secret().as_bytes(), proof).is_ok()
    }
}

fn key_of(id: Uuid) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, id.as_bytes())
}

/// A new token for a row with that id, and what the row keeps of it.
fn make_token(id: Uuid) -> (SecretString, Vec<u8>) {
    let mut random = [0_u8; 32];
    rand::rng().fill_bytes(&mut random);
    let secret = hex::encode(random);
    let proof = hmac::sign(&key_of(id), secret.as_bytes()).as_ref().to_vec();
    (format!("{PREFIX}{}_{secret}", id.simple()).into(), proof)
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
    fn understood(self) -> Result<Credential, BmdbError> {
        let odd = |what: &str| BmdbError::Corrupt(format!("the credential {}: {what}", self.credential_id));
        let scope = match self.providers {
            None => Scope::Everything,
            Some(listed) => {
                let listed: Vec<String> =
                    serde_json::from_value(listed).map_err(|error| odd(&error.to_string()))?;
                // An empty list is no list: it would mean everything.
                Scope::Providers(listed.into_iter().collect())
            }
        };
        Ok(Credential {
            role: self.role.parse::<Role>().map_err(|error| odd(&error.to_string()))?,
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

/// The credential of a token that was presented, whether it is good or over; `None` when no row and secret
/// belong together.
pub async fn of_token(tx: &mut PgConnection, presented: &Presented) -> Result<Option<Credential>, BmdbError> {
    let row = sqlx::query_file_as!(CredentialRow, "sql/credential/find_by_id.sql", presented.id)
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    let proof = row.as_ref().map_or([0; 32].as_slice(), |row| row.proof.as_slice());
    let proven = presented.is_proven_by(proof);
    let row = row.filter(|row| proven && row.kind == Kind::Token.as_str());
    row.map(CredentialRow::understood).transpose()
}

/// The credential of a certificate that was proven, by the SHA-256 of its DER.
pub async fn of_certificate(
    tx: &mut PgConnection,
    fingerprint: [u8; 32],
) -> Result<Option<Credential>, BmdbError> {
    let row =
        sqlx::query_file_as!(CredentialRow, "sql/credential/find_by_fingerprint.sql", fingerprint.as_slice())
            .fetch_optional(tx)
            .await
            .doing(WHAT)?;
    row.map(CredentialRow::understood).transpose()
}

/// A credential by its id.
pub async fn by_id(tx: &mut PgConnection, id: Uuid) -> Result<Option<Credential>, BmdbError> {
    let row = sqlx::query_file_as!(CredentialRow, "sql/credential/find_by_id.sql", id)
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    row.map(CredentialRow::understood).transpose()
}

/// Credentials, newest first, from the one before `before`.
pub async fn list(tx: &mut PgConnection, before: Uuid, limit: i64) -> Result<Vec<Credential>, BmdbError> {
    let rows = sqlx::query_file_as!(CredentialRow, "sql/credential/list.sql", before, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    rows.into_iter().map(CredentialRow::understood).collect()
}

impl Bmdb {
    /// Makes a credential. The token, if it is one, is in the answer and nowhere else.
    pub async fn create_credential(&self, order: Order, new: NewCredential) -> Result<Made, BmdbError> {
        let id = Uuid::now_v7();
        let (token, proof, kind) = if let Some(fingerprint) = new.certificate {
            (None, fingerprint.to_vec(), Kind::Certificate)
        } else {
            let (token, proof) = make_token(id);
            (Some(token), proof, Kind::Token)
        };
        let given = order.clone();
        let made = self
            .ordered("making a credential", move |tx| {
                let (order, new, proof) = (order.clone(), new.clone(), proof.clone());
                Box::pin(async move { create(tx, &order, id, kind, &new, proof).await })
            })
            .await;
        let (carried, credential) = self.note_refusal(made, &given, None).await?;
        // What was made in vain is written nowhere, and nobody need know it.
        let token = token.filter(|_| credential.is_some());
        Ok(Made { credential, token, carried })
    }

    /// Ends a credential at once.
    pub async fn revoke_credential(&self, order: Order, id: Uuid) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let revoked = self
            .ordered("revoking a credential", move |tx| {
                let order = order.clone();
                Box::pin(async move { revoke(tx, &order, id).await })
            })
            .await;
        self.note_refusal(revoked, &given, None).await
    }
}

async fn revoke(tx: &mut PgConnection, order: &Order, id: Uuid) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    sqlx::query_file!("sql/credential/lock.sql", id).fetch_optional(&mut *tx).await.doing(WHAT)?;
    let unknown = || BmdbError::NoSuchCredential(id.to_string());
    let before = by_id(tx, id).await?.ok_or_else(unknown)?;
    begin_attempt(tx, order).await?;
    let done = if before.revoked_at.is_some() {
        Done { changed: false, said: "is revoked already; nothing was changed".into() }
    } else {
        sqlx::query_file!("sql/credential/revoke.sql", id, order.actor.name)
            .execute(&mut *tx)
            .await
            .doing("revoking a credential")?;
        Done { changed: true, said: "is good for nothing any more".into() }
    };
    let after = by_id(tx, id).await?.ok_or_else(unknown)?;
    end_attempt(tx, order).await?;
    write_down(tx, order, None, done, Some(written_down(&before)), Some(written_down(&after))).await
}

/// A credential as the audit says it.
fn written_down(credential: &Credential) -> serde_json::Value {
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

async fn create(
    tx: &mut PgConnection,
    order: &Order,
    id: Uuid,
    kind: Kind,
    new: &NewCredential,
    proof: Vec<u8>,
) -> Result<(Carried, Option<Credential>), BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok((carried, None));
    }
    let providers = new.scope.providers();
    let stored = (!providers.is_empty()).then(|| serde_json::json!(providers));
    let expires = new.expires_after.map(|span| i64::try_from(span.0.as_millis()).unwrap_or(i64::MAX));
    begin_attempt(tx, order).await?;
    let written = sqlx::query_file!(
        "sql/credential/insert.sql",
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
    .doing("making a credential")?;
    let made = by_id(tx, id).await?;
    end_attempt(tx, order).await?;
    if written.is_none() {
        let done = Done { changed: false, said: pinned_before(tx, new.certificate).await? };
        return Ok((write_down(tx, order, None, done, None, None).await?, None));
    }
    let done = Done {
        changed: true,
        said: format!("{} of {}, {}, is good from now on", kind.as_str(), new.name, new.role),
    };
    let mut after = made.as_ref().map(written_down);
    if let (true, Some(after)) = (order.dry_run, &mut after) {
        // It was never there.
        after["credential"] = serde_json::Value::Null;
    }
    let carried = write_down(tx, order, None, done, None, after).await?;
    Ok((carried, made.filter(|_| !order.dry_run)))
}

/// Why a certificate is not pinned: there is a row of it, which the audit names and nobody may take.
async fn pinned_before(tx: &mut PgConnection, certificate: Option<[u8; 32]>) -> Result<String, BmdbError> {
    let found = match certificate {
        Some(fingerprint) => of_certificate(tx, fingerprint).await?,
        None => None,
    };
    Ok(match found {
        Some(Credential { id, active: false, .. }) => format!(
            "this certificate was pinned before, as {id}, and that is over; make another one. Nothing was changed"
        ),
        Some(Credential { id, .. }) => {
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
        let (token, proof) = make_token(id);
        let presented = Presented::read(token.expose_secret()).unwrap();
        assert_eq!(presented.id(), id);
        assert!(presented.is_proven_by(&proof));
        assert!(!presented.is_proven_by(&make_token(id).1), "another secret");
        assert!(!presented.is_proven_by(&[0; 32]));
        let moved = token.expose_secret().replace(&id.simple().to_string(), &other.simple().to_string());
        assert!(!Presented::read(&moved).unwrap().is_proven_by(&proof), "the same secret under another id");
    }

    #[test]
    fn what_is_no_token_is_not_looked_up() {
        let whole = make_token(Uuid::now_v7()).0;
        let whole = whole.expose_secret();
        for text in ["", "shepherd_", "shepherd__", &whole[1..], &whole[..whole.len() - 1], "Bearer x"] {
            assert!(Presented::read(text).is_none(), "{text}");
        }
    }

    #[test]
    fn nothing_that_is_kept_or_logged_holds_the_secret() {
        let (token, proof) = make_token(Uuid::now_v7());
        let secret = token.expose_secret().rsplit('_').next().unwrap();
        assert!(!hex::encode(proof).contains(secret));
        assert!(!format!("{token:?}").contains(secret));
    }
}
