//! Certificates of people for clusters: orders for them, and what came of each.
//!
//! No key is ever here, and a certificate is no secret: whoever reads it can do nothing with it. An order only writes down
//! what is wanted; whoever holds the cluster's lease has it signed or refused by the curators.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{clusters, locked, no_such};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
#[cfg(feature = "shepherd")]
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::cluster::credential::{
    Credential, CredentialView, Issued, MOST, check_holder, check_lifetime, state, to_forget, view,
};
use crate::model::cluster::state::Founded;
use crate::model::time::{Span, Timestamp};

const WHAT: &str = "reading certificates for a cluster";
const ASKING: &str = "asking for a certificate for a cluster";
const REVOKING: &str = "ending a certificate for a cluster";

/// A certificate to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewCredential {
    /// The key, Ed25519.
    pub public_key: [u8; 32],
    /// Whose it is to be.
    pub holder: String,
    /// How long it is to be good.
    pub lifetime: Span,
}

/// Certificates of a cluster, and by what the cluster is known.
#[derive(Clone, Debug, PartialEq)]
pub struct OfCluster {
    /// Newest first.
    pub credentials: Vec<CredentialView>,
    /// Once it is founded.
    pub founded: Option<Founded>,
    /// When that was read.
    pub at: Timestamp,
}

async fn read(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<Credential>, BmdbError> {
    let rows =
        sqlx::query_file!("sql/cluster/list_credentials.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
    let read = rows.into_iter().map(|row| {
        let issued = match (row.certificate, row.serial, row.expires_at) {
            (Some(certificate), Some(serial), Some(expires_at)) => {
                Some(Issued { certificate, serial, expires_at })
            }
            _ => None,
        };
        Ok(Credential {
            id: row.credential_id,
            public_key: row
                .public_key
                .try_into()
                .map_err(|_| BmdbError::Corrupt("a key of a certificate that has not 32 bytes".to_owned()))?,
            holder: row.holder,
            lifetime: Span::seconds(row.lifetime_seconds.try_into().unwrap_or(0)),
            asked_at: row.asked_at,
            asked_by: row.asked_by,
            issued,
            refused: row.refused,
            revoked_by: row.revoke_asked_by,
            revoked_at: row.revoked_at,
        })
    });
    read.collect()
}

/// The certificates of the cluster of that name.
pub async fn credentials_of(tx: &mut PgConnection, name: &str) -> Result<OfCluster, BmdbError> {
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    let found = read(tx, cluster.id).await?;
    let at = inspect::now(tx).await?;
    let credentials = found.iter().map(|credential| view(credential, at)).collect();
    Ok(OfCluster { credentials, founded: cluster.founded, at })
}

/// Forgets all of a cluster that is about to go: nobody is left who would take them.
#[cfg(feature = "shepherd")]
pub(crate) async fn remove_credentials(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/cluster/delete_credentials.sql", cluster)
        .execute(tx)
        .await
        .doing("forgetting the certificates for a cluster")?;
    Ok(())
}

/// Has its curators told again of everything that they are to refuse.
#[cfg(feature = "shepherd")]
pub(crate) async fn revoke_again(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/cluster/requeue_revocations.sql", cluster).execute(tx).await.doing(REVOKING)?;
    Ok(())
}

impl Bmdb {
    /// Has a certificate for a person's key signed soon.
    pub async fn ask_for_credential(
        &self,
        order: Order,
        name: String,
        new: NewCredential,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(ASKING, move |tx| {
                let (order, name, new) = (order.clone(), name.clone(), new.clone());
                Box::pin(async move { ask(tx, &order, &name, &new).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Has the curators refuse a certificate soon.
    pub async fn revoke_cluster_credential(
        &self,
        order: Order,
        name: String,
        credential: String,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(REVOKING, move |tx| {
                let (order, name, credential) = (order.clone(), name.clone(), credential.clone());
                Box::pin(async move { revoke(tx, &order, &name, &credential).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// The certificates of a cluster, and when they were read.
    #[cfg(feature = "shepherd")]
    pub async fn cluster_credentials(
        &self,
        cluster: Uuid,
    ) -> Result<(Vec<Credential>, Timestamp), BmdbError> {
        self.inspect(move |tx| {
            Box::pin(async move { Ok((read(tx, cluster).await?, inspect::now(tx).await?)) })
        })
        .await
    }

    /// Writes down what the curators signed.
    #[cfg(feature = "shepherd")]
    pub async fn credential_issued(
        &self,
        lease: &NamedLease,
        credential: Uuid,
        issued: Issued,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "keeping a certificate for a cluster");
        self.transact(doing, move |tx| {
            let (lease, issued) = (lease.clone(), issued.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let Issued { certificate, serial, expires_at } = issued;
                sqlx::query_file!(
                    "sql/cluster/record_credential_issued.sql",
                    credential,
                    certificate,
                    serial,
                    expires_at
                )
                .execute(tx)
                .await
                .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down that the curators do not sign it, and why.
    #[cfg(feature = "shepherd")]
    pub async fn credential_refused(
        &self,
        lease: &NamedLease,
        credential: Uuid,
        said: &str,
    ) -> Result<(), BmdbError> {
        let (lease, said, doing) =
            (lease.clone(), said.to_owned(), "writing down that no certificate is signed");
        self.transact(doing, move |tx| {
            let (lease, said) = (lease.clone(), said.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/record_credential_rejected.sql", credential, said)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down that the curators refuse it.
    #[cfg(feature = "shepherd")]
    pub async fn credential_revoked(&self, lease: &NamedLease, credential: Uuid) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "writing down that a certificate is refused");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/record_credential_revoked.sql", credential)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }
}

fn refused(reason: &'static str, said: String) -> BmdbError {
    BmdbError::OrderRefused { reason, said }
}

async fn ask(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &NewCredential,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    check_holder(&new.holder).map_err(|said| refused("NO_HOLDER", said))?;
    check_lifetime(new.lifetime).map_err(|said| refused("NO_LIFETIME", said))?;
    let (cluster, _) = locked(tx, name).await?;
    let known = read(tx, cluster).await?;
    if let Some(known) = known.iter().find(|known| known.public_key == new.public_key) {
        let said = format!(
            "certificate {} was asked for with the same key; make another key for another certificate",
            known.id
        );
        return Err(refused("KEY_IN_USE", said));
    }
    let old = to_forget(&known, inspect::now(tx).await?);
    if known.len() - old.len() >= MOST {
        let said = format!(
            "the cluster {name} has {MOST} certificates that are not forgotten yet, and can have no more; each is \
             forgotten a day after its end"
        );
        return Err(refused("TOO_MANY_CREDENTIALS", said));
    }
    begin_attempt(tx, order).await?;
    if !old.is_empty() {
        sqlx::query_file!("sql/cluster/delete_credentials_by_id.sql", &old)
            .execute(&mut *tx)
            .await
            .doing(ASKING)?;
    }
    let id = Uuid::now_v7();
    sqlx::query_file!(
        "sql/cluster/insert_credential.sql",
        id,
        cluster,
        new.public_key.as_slice(),
        new.holder,
        i64::try_from(new.lifetime.0.as_secs()).unwrap_or(i64::MAX),
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .doing(ASKING)?;
    end_attempt(tx, order).await?;
    let said = format!(
        "has a certificate for {} signed as soon as its curators answer, good for {}; see it with: shepherdctl \
         cluster credentials get {name}",
        new.holder, new.lifetime
    );
    let after = json!({
        "credential": id, "holder": new.holder, "public_key": hex::encode(new.public_key), "lifetime": new.lifetime,
    });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

async fn revoke(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    credential: &str,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (cluster, _) = locked(tx, name).await?;
    let now = inspect::now(tx).await?;
    let known = read(tx, cluster).await?;
    let id: Option<Uuid> = credential.parse().ok();
    let Some(found) = known.iter().find(|known| Some(known.id) == id) else {
        let said = format!(
            "the cluster {name} has no certificate {credential:?}; see which there are with: shepherdctl cluster \
             credentials get {name}"
        );
        return Err(refused("NO_SUCH_CREDENTIAL", said));
    };
    let before = told(found, now);
    let is = state(found, now);
    if !matches!(is, "asked" | "good") {
        let said = format!("has nothing to end: the certificate {credential} of {} is {is}", found.holder);
        let same = Some(before);
        return write_down(tx, order, None, Done { changed: false, said }, same.clone(), same).await;
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/cluster/request_credential_revocation.sql", found.id, order.actor.name)
        .execute(&mut *tx)
        .await
        .doing(REVOKING)?;
    end_attempt(tx, order).await?;
    let said =
        format!("refuses the certificate {credential} of {} as soon as its curators were told", found.holder);
    let ended = Credential { revoked_by: Some(order.actor.name.clone()), ..found.clone() };
    let after = told(&ended, now);
    write_down(tx, order, None, Done { changed: true, said }, Some(before), Some(after)).await
}

/// One as the audit says it.
fn told(credential: &Credential, now: Timestamp) -> Value {
    json!({
        "credential": credential.id, "holder": credential.holder,
        "public_key": hex::encode(credential.public_key), "state": state(credential, now),
    })
}
