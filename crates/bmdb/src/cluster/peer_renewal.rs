//! New certificates for members of etcd that cannot renew theirs, by an operator's order.
//!
//! The order is accepted only if the control plane is known not to work ([`check_peer_renewal_allowed`]). It changes the
//! desired state and nothing else. The holder of the cluster's lease signs a certificate for each machine of the control
//! plane, with the authority in the newest snapshot, and sends it as the machine's order about its cluster. The order
//! ends when the curators answer again.

use serde_json::json;
use sqlx::PgConnection;

use crate::cluster::reading::list_cluster_machines;
use crate::cluster::record::ClusterRecord;
use crate::cluster::restore::control_plane_evidence;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::plan::peer_renewal::{CertificateDelivery, certificate_delivery};
use model::cluster::restore::check_peer_renewal_allowed;
#[cfg(feature = "sealing")]
use model::cluster::state::MembershipOrder;
#[cfg(feature = "sealing")]
use model::ids::MachineId;
#[cfg(feature = "sealing")]
use uuid::Uuid;

const REQUESTING: &str = "ordering certificates for the members of a cluster";

impl Bmdb {
    /// Orders new certificates for the members of a cluster's etcd.
    pub async fn renew_cluster_peers(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        self.execute_cluster_order(REQUESTING, order, name, |tx, order, cluster| {
            Box::pin(renew_peers_in_tx(tx, order, cluster))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Sends a machine a certificate for its member of etcd; `sealed` is the order that has it.
    ///
    /// It is recorded as an order to join, because a shepherd of the release before fails on a word that it does not
    /// know. For a machine that is a node already, that order means nothing else.
    pub async fn send_peer_certificate(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (name, sealed): (&str, Vec<u8>),
    ) -> Result<(), BmdbError> {
        let detail = format!("a new one for etcd of cluster {name}");
        let order = (MembershipOrder::Join, sealed);
        self.place_recorded_order(lease, machine, order, ("ClusterCertificateSent", detail)).await
    }

    /// Records that the members of a cluster's etcd need no certificates by an order any more.
    pub async fn end_peer_renewal(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        self.execute_under_lease("ending the order for certificates of a cluster", lease, move || {
            sqlx::query!(
                "UPDATE cluster SET peer_renewal_requested_at = NULL, peer_renewal_requested_by = NULL
                 WHERE cluster_id = $1",
                cluster
            )
        })
        .await
    }
}

async fn renew_peers_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    cluster: ClusterRecord,
) -> Result<OrderEffect, BmdbError> {
    let (id, name) = (cluster.id, &cluster.spec.name);
    if let Some(by) = &cluster.restoring_by {
        let text = format!(
            "the members of the cluster {name} get no new certificates: the cluster is being restored, as {by} ordered, \
             and its new members have others; watch it with: shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("RESTORING", text));
    }
    if let Some(theft) = &cluster.authority_theft {
        let text = format!(
            "the members of the cluster {name} get no certificates from its newest snapshot: the authority in it is \
             replaced after a theft, as {} ordered, and its members get certificates of the new one; watch it with: \
             shepherdctl cluster describe {name}",
            theft.ordered_by
        );
        return Err(order_rejected("ROTATING", text));
    }
    if let Some(renewal) = &cluster.peer_renewal {
        let machines = list_cluster_machines(tx, id).await?;
        let waits = machines.iter().any(|line| {
            matches!(
                certificate_delivery(&line.member, renewal),
                CertificateDelivery::Due | CertificateDelivery::Sent
            )
        });
        // Once each member has reported, another order sends other certificates.
        if waits {
            let text = format!(
                "already sends its members of etcd new certificates, as {} ordered; nothing was changed",
                renewal.requested_by
            );
            return Ok(OrderEffect::already(text, None));
        }
    }
    check_peer_renewal_allowed(&control_plane_evidence(&cluster), database_now(tx).await?)
        .map_err(|(reason, text)| order_rejected(reason, format!("the cluster {name} {text}")))?;
    if cluster.snapshots.last.is_none() {
        let text = format!(
            "the members of the cluster {name} get no new certificates: no snapshot of the cluster is kept, and only a \
             snapshot has the authority that signs them"
        );
        return Err(order_rejected("NO_SUCH_SNAPSHOT", text));
    }
    sqlx::query!(
        "UPDATE cluster SET peer_renewal_requested_at = clock_timestamp(), peer_renewal_requested_by = $2,
             settled = FALSE, version = version + 1
         WHERE cluster_id = $1",
        id,
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context(REQUESTING)?;
    let text = format!(
        "sends its members of etcd new certificates, which the authority in its newest snapshot signs; watch it with: \
         shepherdctl cluster describe {name}"
    );
    Ok(OrderEffect::changed(text, None, Some(json!({ "cluster": name }))))
}
