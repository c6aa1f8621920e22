//! Client certificates of people for Kubernetes API servers.
//!
//! No private key is ever stored here, and a certificate is no secret: a reader can do nothing with it. An order only
//! records a request; the holder of the cluster's lease has the curators sign the certificate.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::certificate_request::admit_request;
use crate::cluster::kubernetes::require_kubernetes;
use crate::cluster::lock::{lock_cluster, order_target};
use crate::cluster::reading::require_cluster;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::approval::{append_approver, require_approval_of_rights};
use crate::orders::order::{Expiry, Order, OrderEffect, OrderResult};
use model::cluster::certificate_request::{CertificateRequest, SignedCertificate, check_holder};
#[cfg(feature = "sealing")]
use model::cluster::kubernetes_user::IssuedUserCertificate;
use model::cluster::kubernetes_user::{
    KubernetesAccess, KubernetesUser, SPKI_PREFIX, check_lifetime, check_public_key,
};
use model::time::{Span, Timestamp};
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "reading certificates for API servers";
const REQUESTING: &str = "requesting a certificate for API servers";

/// A request for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesUserRequest {
    /// The public key, `SubjectPublicKeyInfo`, DER.
    pub public_key: Vec<u8>,
    /// The person it is issued to.
    pub holder: String,
    /// What the holder may do.
    pub access: KubernetesAccess,
    /// When the certificate expires. What remains when it is requested counts from its signature.
    pub expiry: Expiry,
}

async fn read_users(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<KubernetesUser>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/kubernetes/list_users.sql", cluster)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    let read = rows.into_iter().map(|row| {
        let odd = |error: &dyn std::fmt::Display| {
            BmdbError::Corrupt(format!("the certificate {} for API servers: {error}", row.user_id))
        };
        let access: KubernetesAccess = row.access.parse().map_err(|error| odd(&error))?;
        let (issued, server_authorities, api_servers) =
            match (row.certificate, row.servers, row.api_servers, row.expires_at) {
                (Some(certificate), Some(servers), Some(api_servers), Some(expires_at)) => {
                    let servers: Vec<String> =
                        serde_json::from_value(servers).map_err(|error| odd(&error))?;
                    let servers: Result<Vec<_>, _> = servers.iter().map(hex::decode).collect();
                    let issued = SignedCertificate { certificate, expires_at };
                    let api_servers = serde_json::from_value(api_servers).map_err(|error| odd(&error))?;
                    (Some(issued), servers.map_err(|error| odd(&error))?, api_servers)
                }
                _ => (None, Vec::new(), Vec::new()),
            };
        let request = CertificateRequest {
            id: row.user_id,
            public_key: row.public_key,
            holder: row.holder,
            lifetime: Span::seconds(row.lifetime_seconds.try_into().unwrap_or(0)),
            requested_at: row.requested_at,
            requested_by: row.requested_by,
            issued,
            rejection: row.refused,
            // No API server could check it.
            revocation: None,
        };
        Ok(KubernetesUser { request, access, server_authorities, api_servers })
    });
    read.collect()
}

/// The certificates of the cluster of that name, newest first, and the database's clock when they were read.
pub async fn list_kubernetes_users(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Vec<KubernetesUser>, Timestamp), BmdbError> {
    let cluster = require_cluster(tx, name).await?;
    Ok((read_users(tx, cluster.id).await?, database_now(tx).await?))
}

impl Bmdb {
    /// Requests that a person's key be certified for API servers soon.
    pub async fn request_kubernetes_user(
        &self,
        order: Order,
        name: String,
        new: KubernetesUserRequest,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(REQUESTING, order, None, (name, new), |tx, order, (name, new)| {
            Box::pin(request_user_in_tx(tx, order, name, new))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// The certificates of a cluster, and the database's clock when they were read.
    pub async fn cluster_kubernetes_users(
        &self,
        cluster: Uuid,
    ) -> Result<(Vec<KubernetesUser>, Timestamp), BmdbError> {
        self.transact_read_only(move |tx| {
            Box::pin(async move { Ok((read_users(tx, cluster).await?, database_now(tx).await?)) })
        })
        .await
    }

    /// Records the certificate that the curators signed.
    pub async fn record_kubernetes_user_issued(
        &self,
        lease: &NamedLease,
        user: Uuid,
        issued: IssuedUserCertificate,
    ) -> Result<(), BmdbError> {
        let servers: Vec<String> = issued.server_authorities.iter().map(hex::encode).collect();
        self.execute_under_lease("keeping a certificate for API servers", lease, move || {
            sqlx::query_file!(
                "../../sql/kubernetes/record_user_issued.sql",
                user,
                issued.signed.certificate,
                json!(servers),
                json!(issued.api_servers),
                issued.signed.expires_at
            )
        })
        .await
    }

    /// Records that the curators do not sign it, and why.
    pub async fn record_kubernetes_user_rejected(
        &self,
        lease: &NamedLease,
        user: Uuid,
        text: &str,
    ) -> Result<(), BmdbError> {
        let text = text.to_owned();
        let doing = "recording that no certificate for API servers is signed";
        self.execute_under_lease(doing, lease, move || {
            sqlx::query_file!("../../sql/kubernetes/record_user_rejected.sql", user, text)
        })
        .await
    }
}

async fn request_user_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &KubernetesUserRequest,
) -> Result<OrderEffect, BmdbError> {
    check_public_key(&new.public_key).map_err(|reason| order_rejected("NO_KEY", reason))?;
    check_holder(&new.holder).map_err(|reason| order_rejected("NO_HOLDER", reason))?;
    let (cluster, _) = lock_cluster(tx, name).await?;
    require_kubernetes(tx, cluster, name).await?;
    let known = read_users(tx, cluster).await?;
    let now = database_now(tx).await?;
    let lifetime = new.expiry.remaining(now);
    let lifetime = lifetime
        .map_err(|(reason, text)| order_rejected(reason, format!("no certificate is requested: {text}")))?;
    check_lifetime(lifetime).map_err(|reason| order_rejected("NO_LIFETIME", reason))?;
    let old = admit_request(&known, &new.public_key, (name, "certificates for its API servers"), now)?;
    let granted = Order { target: describe_request(name, new), ..order.clone() };
    // This cluster, and no later one of its name.
    let (kind, about) = (SensitiveOrder::IssueCertificate, cluster.as_bytes());
    let by = require_approval_of_rights(tx, &granted, kind, about).await?;
    if !old.is_empty() {
        sqlx::query_file!("../../sql/kubernetes/delete_users_by_id.sql", &old)
            .execute(&mut *tx)
            .await
            .context(REQUESTING)?;
    }
    let id = Uuid::now_v7();
    sqlx::query_file!(
        "../../sql/kubernetes/insert_user.sql",
        id,
        cluster,
        new.public_key,
        new.holder,
        new.access.as_str(),
        i64::try_from(lifetime.0.as_secs()).unwrap_or(i64::MAX),
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context(REQUESTING)?;
    let text = format!(
        "signs a certificate for its API servers for {} ({}) as soon as its curators answer, valid {}",
        new.holder,
        new.access,
        new.expiry.describe()
    );
    let text = append_approver(text, by.as_deref());
    let after = json!({
        "user": id, "holder": new.holder, "access": new.access.as_str(),
        "public_key": hex::encode(&new.public_key), "lifetime": lifetime,
    });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

/// The certificate for the admin who approves it: its cluster, its rights, its lifetime and its key, then its holder.
fn describe_request(cluster: &str, new: &KubernetesUserRequest) -> String {
    // The end of the key: its point on the curve. All keys of this kind begin alike.
    let point = new.public_key.get(SPKI_PREFIX.len()..).unwrap_or(&new.public_key);
    format!(
        "{}: a certificate for its API servers with the access {}, valid {}, with the key {}, of {}",
        order_target(cluster),
        new.access,
        new.expiry.describe(),
        hex::encode(point),
        new.holder
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approver_reads_the_whole_request() {
        let new = KubernetesUserRequest {
            public_key: [&SPKI_PREFIX[..], &[4], &[7; 64]].concat(),
            holder: "kim".to_owned(),
            access: KubernetesAccess::Viewer,
            expiry: Expiry::After(Span::hours(8)),
        };
        let expected = format!(
            "the cluster ams: a certificate for its API servers with the access viewer, valid for 8h, with the key \
             04{}, of kim",
            "07".repeat(64)
        );
        assert_eq!(describe_request("ams", &new), expected);
    }
}
