//! Signs certificates for members of etcd that cannot renew theirs, and sends them as orders.
//!
//! The authority is in the newest snapshot of the cluster, which is opened for this alone and stays in memory. Each
//! machine gets a certificate for its own key. If the shepherd dies after it signed one, the certificate is lost, and the
//! next holder of the cluster's lease signs another one. If it dies after it recorded the order, the order counts.

use prost::Message as _;
use secrecy::SecretSlice;

use crate::curator_client::certificate::Serial;
use crate::curator_client::clock::Clock;
use crate::curator_client::cluster_snapshot::ClusterSnapshot;
use crate::curator_client::node_id::PublicKey;
use crate::curator_client::peer_renewal::renew_peer;
use crate::manager::cluster::ClusterWorker;
use crate::manager::cluster::curators::CuratorCallError;
use crate::manager::cluster::statements::is_own_authority;
use crate::manager::cluster::steps::ORDER_SEAL_PURPOSE;
use crate::model::cluster::state::{Cluster, ClusterMember};
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::Operation;

impl ClusterWorker<'_> {
    /// Sends this machine a certificate for its member of etcd.
    pub(super) async fn renew_peer(
        &self,
        cluster: &Cluster,
        machine: MachineId,
    ) -> Result<(), CuratorCallError> {
        let member = cluster.members.iter().find(|member| member.machine == machine);
        let (Some(founded), Some(key)) = (&cluster.identity, member.and_then(ClusterMember::key)) else {
            return Err(CuratorCallError::OrderUnavailable("the machine is no node of the cluster any more"));
        };
        let snapshot = self.open_newest_snapshot().await?;
        // The snapshot has the newest successions alone, and the stored statement has all of them.
        let (_, signer) = snapshot.cluster_and_authority()?;
        let signer = &signer.anchor().certificate;
        let is_own = is_own_authority(self.bmdb, founded, signer).await?;
        let trusted = if is_own { signer } else { &founded.ca_certificate };
        let (serial, now) = (Serial::new(rand::random()), Clock::system().now());
        let issued = renew_peer(&snapshot, trusted, &PublicKey(key), serial, now)?;
        let renew = wire::RenewPeer { certificate: issued.certificate };
        let (operation, machine_id) = (Some(Operation::RenewPeer(renew)), machine.to_string());
        let order = wire::ClusterOrder { operation, machine_id, ..Default::default() };
        let plain = SecretSlice::from(order.encode_to_vec());
        let sealed = self.settings.secrets.seal(ORDER_SEAL_PURPOSE, &plain)?;
        self.bmdb.send_peer_certificate(&self.lease, machine, (self.name, sealed)).await?;
        tracing::info!(cluster = self.name, %machine, %serial, "a member of etcd is sent a certificate");
        Ok(())
    }

    async fn open_newest_snapshot(&self) -> Result<ClusterSnapshot, CuratorCallError> {
        let newest = self.bmdb.newest_sealed_snapshot(self.cluster).await?;
        let (sha256, sealed) = newest
            .ok_or(CuratorCallError::OrderUnavailable("no snapshot of the cluster is kept any more"))?;
        self.open_snapshot(&sealed, &sha256)
    }
}
