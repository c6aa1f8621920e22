//! Client certificates of people for a cluster's curators: request, record, revoke.
//!
//! No private key is ever stored here, and a certificate is no secret: a reader can do nothing with it. An order only
//! records a request; the holder of the cluster's lease has the curators sign or revoke the certificate.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::certificate_request::admit_request;
use crate::cluster::lock::{lock_cluster, order_target};
use crate::cluster::reading::require_cluster;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::approval::{append_approver, require_approval_of_rights};
use crate::orders::order::{Expiry, Order, OrderEffect, OrderResult};
use model::cluster::certificate_request::{
    CertificateRequest, RequestState, Revocation, SignedCertificate, check_holder,
};
#[cfg(feature = "sealing")]
use model::cluster::credential::IssuedCertificate;
use model::cluster::credential::{ClusterCredential, check_lifetime};
use model::cluster::state::ClusterIdentity;
use model::time::{Span, Timestamp};
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "reading certificates for a cluster";
const REQUESTING: &str = "requesting a certificate for a cluster";
const REVOKING: &str = "ending a certificate for a cluster";

/// A request for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterCredentialRequest {
    /// Raw Ed25519 public key to certify.
    pub public_key: [u8; 32],
    /// The person it is issued to.
    pub holder: String,
    /// When the certificate expires. What remains when it is requested counts from its signature.
    pub expiry: Expiry,
}

/// Certificates of a cluster, and the cluster's identity.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterCredentials {
    /// The certificates, newest first.
    pub credentials: Vec<ClusterCredential>,
    /// The cluster's identity; `None` until it is founded.
    pub founded: Option<ClusterIdentity>,
    /// The database's clock when they were read.
    pub at: Timestamp,
}

async fn read_credentials(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<ClusterCredential>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/cluster/list_credentials.sql", cluster)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    let read = rows.into_iter().map(|row| {
        let (issued, serial) = match (row.certificate, row.serial, row.expires_at) {
            (Some(certificate), Some(serial), Some(expires_at)) => {
                (Some(SignedCertificate { certificate, expires_at }), Some(serial))
            }
            _ => (None, None),
        };
        let revoked_at = row.revoked_at;
        let revocation = row
            .revocation_requested_by
            .map(|requested_by| Revocation { requested_by, recorded_at: revoked_at });
        let request = CertificateRequest {
            id: row.credential_id,
            public_key: row.public_key,
            holder: row.holder,
            lifetime: Span::seconds(row.lifetime_seconds.try_into().unwrap_or(0)),
            requested_at: row.requested_at,
            requested_by: row.requested_by,
            issued,
            rejection: row.refused,
            revocation,
        };
        ClusterCredential { request, serial }
    });
    Ok(read.collect())
}

/// The certificates of the cluster of that name.
pub async fn list_cluster_credentials(
    tx: &mut PgConnection,
    name: &str,
) -> Result<ClusterCredentials, BmdbError> {
    let cluster = require_cluster(tx, name).await?;
    let credentials = read_credentials(tx, cluster.id).await?;
    let at = database_now(tx).await?;
    Ok(ClusterCredentials { credentials, founded: cluster.founded, at })
}

/// Deletes all certificates of a cluster that is about to be deleted: nobody would accept them any more.
#[cfg(feature = "sealing")]
pub(crate) async fn delete_cluster_credentials(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<(), BmdbError> {
    sqlx::query!("DELETE FROM cluster_credential WHERE cluster_id = $1", cluster)
        .execute(tx)
        .await
        .context("forgetting the certificates for a cluster")?;
    Ok(())
}

/// Queues every revocation again, so that the curators receive all of them.
#[cfg(feature = "sealing")]
pub(crate) async fn requeue_revocations(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    // A cluster that was restored from a snapshot knows of no revocation since.
    sqlx::query!(
        "UPDATE cluster_credential SET revoked_at = NULL WHERE cluster_id = $1 AND revoked_at IS NOT NULL",
        cluster
    )
    .execute(tx)
    .await
    .context(REVOKING)?;
    Ok(())
}

impl Bmdb {
    /// Requests that a person's key be certified soon.
    pub async fn request_cluster_credential(
        &self,
        order: Order,
        name: String,
        new: ClusterCredentialRequest,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(REQUESTING, order, None, (name, new), |tx, order, (name, new)| {
            Box::pin(request_credential_in_tx(tx, order, name, new))
        })
        .await
    }

    /// Requests that the curators reject a certificate soon.
    pub async fn revoke_cluster_credential(
        &self,
        order: Order,
        name: String,
        credential: String,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(REVOKING, order, None, (name, credential), |tx, order, (name, credential)| {
            Box::pin(revoke_cluster_credential_in_tx(tx, order, name, credential))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// The certificates of a cluster, and the database's clock when they were read.
    pub async fn cluster_credentials(
        &self,
        cluster: Uuid,
    ) -> Result<(Vec<ClusterCredential>, Timestamp), BmdbError> {
        self.transact_read_only(move |tx| {
            Box::pin(async move { Ok((read_credentials(tx, cluster).await?, database_now(tx).await?)) })
        })
        .await
    }

    /// Records the certificate that the curators signed.
    pub async fn record_cluster_credential_issued(
        &self,
        lease: &NamedLease,
        credential: Uuid,
        issued: IssuedCertificate,
    ) -> Result<(), BmdbError> {
        self.execute_under_lease("keeping a certificate for a cluster", lease, move || {
            // A certificate is also recorded if its revocation is requested by now, because the revocation uses
            // its serial number.
            sqlx::query!(
                "UPDATE cluster_credential SET certificate = $2, serial = $3, expires_at = $4
                 WHERE credential_id = $1 AND certificate IS NULL",
                credential,
                issued.signed.certificate,
                issued.serial,
                issued.signed.expires_at
            )
        })
        .await
    }

    /// Records that the curators do not sign it, and why.
    pub async fn record_cluster_credential_rejected(
        &self,
        lease: &NamedLease,
        credential: Uuid,
        text: &str,
    ) -> Result<(), BmdbError> {
        let text = text.to_owned();
        self.execute_under_lease("recording that no certificate is signed", lease, move || {
            sqlx::query!(
                "UPDATE cluster_credential SET refused = $2
                 WHERE credential_id = $1 AND certificate IS NULL",
                credential,
                text
            )
        })
        .await
    }

    /// Records that the curators reject the certificate now.
    pub async fn record_cluster_credential_revoked(
        &self,
        lease: &NamedLease,
        credential: Uuid,
    ) -> Result<(), BmdbError> {
        self.execute_under_lease("recording that a certificate is refused", lease, move || {
            sqlx::query!(
                "UPDATE cluster_credential SET revoked_at = clock_timestamp()
                 WHERE credential_id = $1 AND revocation_requested_at IS NOT NULL",
                credential
            )
        })
        .await
    }
}

async fn request_credential_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &ClusterCredentialRequest,
) -> Result<OrderEffect, BmdbError> {
    check_holder(&new.holder).map_err(|reason| order_rejected("NO_HOLDER", reason))?;
    let (cluster, _) = lock_cluster(tx, name).await?;
    let known = read_credentials(tx, cluster).await?;
    let now = database_now(tx).await?;
    let lifetime = new.expiry.remaining(now);
    let lifetime = lifetime
        .map_err(|(reason, text)| order_rejected(reason, format!("no certificate is requested: {text}")))?;
    check_lifetime(lifetime).map_err(|reason| order_rejected("NO_LIFETIME", reason))?;
    let old = admit_request(&known, &new.public_key, (name, "certificates"), now)?;
    let granted = Order { target: describe_request(name, new), ..order.clone() };
    // This cluster, and no later one of its name.
    let (kind, about) = (SensitiveOrder::IssueCertificate, cluster.as_bytes());
    let by = require_approval_of_rights(tx, &granted, kind, about).await?;
    if !old.is_empty() {
        sqlx::query!("DELETE FROM cluster_credential WHERE credential_id = ANY ($1)", &old)
            .execute(&mut *tx)
            .await
            .context(REQUESTING)?;
    }
    let id = Uuid::now_v7();
    sqlx::query!(
        "INSERT INTO cluster_credential (credential_id, cluster_id, public_key, holder, lifetime_seconds,
             requested_at, requested_by)
         VALUES ($1, $2, $3, $4, $5, clock_timestamp(), $6)",
        id,
        cluster,
        new.public_key.as_slice(),
        new.holder,
        i64::try_from(lifetime.0.as_secs()).unwrap_or(i64::MAX),
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context(REQUESTING)?;
    let text = format!(
        "signs a certificate for {} as soon as its curators answer, valid {}; see it with: shepherdctl \
         cluster credentials get {name}",
        new.holder,
        new.expiry.describe()
    );
    let text = append_approver(text, by.as_deref());
    let after = json!({
        "credential": id, "holder": new.holder, "public_key": hex::encode(new.public_key), "lifetime": lifetime,
    });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

/// The certificate for the admin who approves it: its cluster, its rights, its lifetime and its key, then its holder.
fn describe_request(cluster: &str, new: &ClusterCredentialRequest) -> String {
    format!(
        "{}: a certificate with all rights at its curators, valid {}, with the key {}, of {}",
        order_target(cluster),
        new.expiry.describe(),
        hex::encode(new.public_key),
        new.holder
    )
}

async fn revoke_cluster_credential_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    credential: &str,
) -> Result<OrderEffect, BmdbError> {
    let (cluster, _) = lock_cluster(tx, name).await?;
    let now = database_now(tx).await?;
    let known = read_credentials(tx, cluster).await?;
    let id: Option<Uuid> = credential.parse().ok();
    let Some(found) = known.iter().map(|known| &known.request).find(|known| Some(known.id) == id) else {
        let text = format!(
            "the cluster {name} has no certificate {credential:?}; see which there are with: shepherdctl cluster \
             credentials get {name}"
        );
        return Err(order_rejected("NO_SUCH_CREDENTIAL", text));
    };
    let before = audit_json(found, now);
    let state = found.state(now);
    if !matches!(state, RequestState::Requested | RequestState::Valid) {
        let is = state.as_str();
        let text = format!("has nothing to revoke: the certificate {credential} of {} is {is}", found.holder);
        let same = Some(before);
        return Ok(OrderEffect::already(text, same));
    }
    sqlx::query!(
        "UPDATE cluster_credential
         SET revocation_requested_at = clock_timestamp(), revocation_requested_by = $2
         WHERE credential_id = $1 AND revocation_requested_at IS NULL",
        found.id,
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context(REVOKING)?;
    let text = format!(
        "refuses the certificate {credential} of {} once its curators have received the revocation",
        found.holder
    );
    let revocation = Revocation { requested_by: order.actor.name.clone(), recorded_at: None };
    let ended = CertificateRequest { revocation: Some(revocation), ..found.clone() };
    let after = audit_json(&ended, now);
    Ok(OrderEffect::changed(text, Some(before), Some(after)))
}

/// A certificate as the audit stores it.
fn audit_json(request: &CertificateRequest, now: Timestamp) -> Value {
    json!({
        "credential": request.id, "holder": request.holder,
        "public_key": hex::encode(&request.public_key), "state": request.state(now).as_str(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approver_reads_the_whole_request() {
        let new = ClusterCredentialRequest {
            public_key: [7; 32],
            holder: "kim".to_owned(),
            expiry: Expiry::After(Span::hours(8)),
        };
        let expected = format!(
            "the cluster ams: a certificate with all rights at its curators, valid for 8h, with the key {}, of kim",
            "07".repeat(32)
        );
        assert_eq!(describe_request("ams", &new), expected);
    }
}
