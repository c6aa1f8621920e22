//! Executes the steps of a cluster plan.
//!
//! If a curator rejects a step, or none answers, that becomes a wait reason, and the next pass plans again. An error of
//! the BMDB ends the pass.

use std::net::IpAddr;

use prost::Message as _;
use secrecy::SecretSlice;

use crate::bmdb::cluster::owner_key::current_secret_name;
use crate::bmdb::cluster::record::ClusterDetails;
use crate::bmdb::cluster::secret_keys::secret_keys_prefix;
use crate::curator_client::statement_trust::StatementTrust;
use crate::manager::cluster::curators::{
    CuratorCallError, CuratorClient, curator_endpoint, is_authority_of, load_owner_key,
};
use crate::manager::cluster::statements::is_own_authority;
use crate::manager::cluster::{COMPONENT, ClusterPassError, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::node_labels::node_labels;
use crate::model::cluster::plan::step::ClusterPlanStep;
use crate::model::cluster::plan::{ClusterPlan, TICKET_LIFETIME};
use crate::model::cluster::state::{Cluster, ClusterIdentity, MembershipOrder};
use crate::model::ids::MachineId;
use crate::model::time::Timestamp;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::Operation;

/// TCP port of the curators on each node.
pub(super) const CURATOR_PORT: u16 = 7835;
/// Purpose that orders are sealed with.
pub(super) const ORDER_SEAL_PURPOSE: &str = "an order about a cluster";

impl ClusterWorker<'_> {
    /// Applies one step. `now` is the time of the database at which the pass began. Returns whether the cluster is gone.
    /// What prevents the step is added to the plan's wait reasons.
    pub(super) async fn apply_step(
        &self,
        (found, now): (&ClusterDetails, Timestamp),
        cluster: &Cluster,
        step: &ClusterPlanStep,
        planned: &mut ClusterPlan,
    ) -> Result<bool, ClusterPassError> {
        tracing::info!(cluster = self.name, %step, "a step of a cluster");
        let about = (self.cluster, self.name);
        match step {
            ClusterPlanStep::AddMember { machine, part } => {
                self.bmdb.assign_to_cluster(&self.lease, about, *machine, *part).await?;
            }
            ClusterPlanStep::SendOrder { machine, order } => {
                self.send_order(found, cluster, (*machine, *order), planned).await?;
            }
            ClusterPlanStep::EndPeerRenewal => self.bmdb.end_peer_renewal(&self.lease, self.cluster).await?,
            ClusterPlanStep::RenewPeer { .. }
            | ClusterPlanStep::CreateAuthority
            | ClusterPlanStep::SendAuthority { .. }
            | ClusterPlanStep::AdvanceAuthority { .. }
            | ClusterPlanStep::EndAuthorityTheft
            | ClusterPlanStep::SendSecretKeys { .. }
            | ClusterPlanStep::AdvanceSecretKeys { .. } => {
                self.apply_sealed_step(cluster, step, planned, now).await?;
            }
            ClusterPlanStep::RecordFounding { machine } => {
                self.record_founding(cluster, *machine, planned).await?;
            }
            ClusterPlanStep::ApproveNode { machine, key, address } => {
                self.approve_node(*machine, (*key, *address), planned).await;
            }
            ClusterPlanStep::AssignAddress { machine, key, address, is_moved } => {
                // The order first: once the address is assigned, nothing shows that the machine has no order about it.
                let join = (*machine, MembershipOrder::Join);
                if !*is_moved || self.send_order(found, cluster, join, planned).await? {
                    self.approve_node(*machine, (*key, Some(*address)), planned).await;
                }
            }
            ClusterPlanStep::ChangeRoles { node, add: give, remove: take, keep_authority } => {
                if let Some(client) = &self.curators {
                    let changed =
                        client.update_roles(node, (give.as_slice(), take.as_slice()), !keep_authority).await;
                    push_wait_reason(planned, changed.err());
                }
            }
            ClusterPlanStep::DecommissionNode { node } => {
                if let Some(client) = &self.curators {
                    push_wait_reason(planned, client.decommission_node(node).await.err());
                }
            }
            ClusterPlanStep::DeleteNode { node } => {
                if let Some(client) = &self.curators {
                    push_wait_reason(planned, client.delete_node(node).await.err());
                }
            }
            ClusterPlanStep::DeclareRole { role } => {
                if let Some(client) = &self.curators
                    && let Some(kept) = self.bmdb.encoded_declaration(self.cluster, role).await?
                {
                    push_wait_reason(planned, client.declare_role(&kept).await.err());
                }
            }
            ClusterPlanStep::UndeclareRole { role } => {
                if let Some(client) = &self.curators {
                    push_wait_reason(planned, client.delete_declaration(role).await.err());
                }
            }
            ClusterPlanStep::DeleteDeclaration { role } => {
                self.bmdb.delete_declaration(&self.lease, self.cluster, role).await?;
            }
            ClusterPlanStep::PutKubernetes
            | ClusterPlanStep::DeleteKubernetes
            | ClusterPlanStep::DeleteKubernetesRecord
            | ClusterPlanStep::RotateKeys { .. }
            | ClusterPlanStep::AssignBundle { .. }
            | ClusterPlanStep::ClearBundle { .. }
            | ClusterPlanStep::RecordUpgrade(_) => self.apply_kubernetes_step(cluster, step, planned).await?,
            ClusterPlanStep::MarkLeaving { machine, reason: why, surplus } => {
                self.bmdb
                    .mark_leaving_cluster(&self.lease, about, *machine, (why.as_str(), *surplus))
                    .await?;
            }
            ClusterPlanStep::RemoveMember { machine, reason: how } => {
                self.bmdb.remove_from_cluster(&self.lease, about, *machine, how).await?;
            }
            ClusterPlanStep::DeleteCluster => {
                let secrets = [current_secret_name(self.cluster), secret_keys_prefix(self.cluster)];
                self.bmdb.purge_cluster(&self.lease, self.cluster, &secrets).await?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sends a machine an order. Returns whether it was sent; what prevents it is a wait reason.
    async fn send_order(
        &self,
        found: &ClusterDetails,
        cluster: &Cluster,
        (machine, what): (MachineId, MembershipOrder),
        planned: &mut ClusterPlan,
    ) -> Result<bool, ClusterPassError> {
        let order = match self.build_order(found, cluster, machine, what).await {
            Ok(order) => order,
            Err(CuratorCallError::Bmdb(error)) => return Err(error.into()),
            Err(error) => {
                planned.machine_waits.insert(machine, error.to_string());
                return Ok(false);
            }
        };
        let plain = SecretSlice::from(order.encode_to_vec());
        let sealed =
            self.settings.secrets.seal(ORDER_SEAL_PURPOSE, &plain).map_err(CuratorCallError::from)?;
        self.bmdb.issue_cluster_order(&self.lease, machine, (what, self.name), sealed).await?;
        if what == MembershipOrder::Found {
            failpoint::hit(COMPONENT, "founding-ordered");
        }
        Ok(true)
    }

    /// Approves a node, and assigns it an address if there is one. What prevents it is a wait reason.
    async fn approve_node(
        &self,
        machine: MachineId,
        (key, address): ([u8; 32], Option<IpAddr>),
        planned: &mut ClusterPlan,
    ) {
        let approved = match &self.curators {
            Some(client) => client.approve_node(key, address).await,
            None => Ok(()),
        };
        if let Err(error) = approved {
            planned.machine_waits.insert(machine, error.to_string());
        }
    }

    /// Applies one step that sends what an authority signs or keys of Secrets, or that replaces an authority after a theft.
    /// No curator has a part in it.
    async fn apply_sealed_step(
        &self,
        cluster: &Cluster,
        step: &ClusterPlanStep,
        planned: &mut ClusterPlan,
        now: Timestamp,
    ) -> Result<(), ClusterPassError> {
        let (applied, machine) = match step {
            ClusterPlanStep::RenewPeer { machine } => {
                (self.renew_peer(cluster, *machine).await, Some(*machine))
            }
            ClusterPlanStep::CreateAuthority => (self.create_next_authority().await, None),
            ClusterPlanStep::SendAuthority { machine, step } => {
                (self.send_next_authority(cluster, *machine, *step).await, Some(*machine))
            }
            ClusterPlanStep::AdvanceAuthority { step } => {
                (self.begin_authority_step(cluster, *step).await, None)
            }
            ClusterPlanStep::SendSecretKeys { machine } => {
                (self.send_secret_keys(cluster, *machine).await, Some(*machine))
            }
            ClusterPlanStep::AdvanceSecretKeys { step } => {
                (self.advance_secret_keys(cluster, *step, now).await, None)
            }
            _ => {
                self.bmdb.end_authority_theft(&self.lease, self.cluster).await?;
                tracing::warn!(cluster = self.name, "the stolen authority of a cluster is replaced");
                (Ok(()), None)
            }
        };
        match (applied, machine) {
            (Ok(()), _) => {}
            (Err(CuratorCallError::Bmdb(error)), _) => return Err(error.into()),
            (Err(error), Some(machine)) => {
                planned.machine_waits.insert(machine, error.to_string());
            }
            (Err(error), None) => planned.wait_reasons.push(error.to_string()),
        }
        Ok(())
    }

    /// Records the identity of a cluster, as reported by the machine that founded or restored it.
    async fn record_founding(
        &self,
        cluster: &Cluster,
        machine: MachineId,
        planned: &mut ClusterPlan,
    ) -> Result<(), ClusterPassError> {
        let report = cluster.members.iter().find(|member| member.machine == machine);
        let report = report.and_then(|member| member.report.clone()).unwrap_or_default();
        let certificate = report.ca_certificate.unwrap_or_default();
        let curator = report.address.and_then(|address| curator_endpoint(&address, CURATOR_PORT));
        let text = match curator {
            // A restored cluster has the CA of its snapshot: the one recorded for the cluster, or one that replaced it.
            Some(curator) if cluster.restoring.is_some() => {
                let is_own = match &cluster.identity {
                    Some(founded) => is_own_authority(self.bmdb, founded, &certificate).await?,
                    None => false,
                };
                if is_own && report.epoch == cluster.epoch {
                    self.bmdb.record_cluster_restored(&self.lease, self.cluster, machine, &[curator]).await?;
                    failpoint::hit(COMPONENT, "restore-recorded");
                    return Ok(());
                }
                "it reports to have restored something else than this cluster; it has to leave it"
            }
            Some(curator) if is_authority_of(&certificate, self.cluster) => {
                self.bmdb
                    .record_cluster_founded(&self.lease, self.cluster, machine, &certificate, &[curator])
                    .await?;
                return Ok(());
            }
            _ => "it reports to be a node of another cluster; it has to leave that first",
        };
        planned.machine_waits.insert(machine, text.to_owned());
        Ok(())
    }

    /// Builds the order for a machine. If the machine is to join, a ticket is created for it.
    async fn build_order(
        &self,
        found: &ClusterDetails,
        cluster: &Cluster,
        machine: MachineId,
        what: MembershipOrder,
    ) -> Result<wire::ClusterOrder, CuratorCallError> {
        let what = match what {
            MembershipOrder::Leave => Operation::Leave(wire::LeaveCluster {}),
            MembershipOrder::Found => {
                let owner = load_owner_key(self.bmdb, &self.settings.secrets, self.cluster).await?;
                let revocations = self.revocations_to_carry(found).await?.into_iter();
                let (snapshot_sha256, image, epoch) = match &cluster.restoring {
                    None => (Vec::new(), None, 0),
                    Some(restoring) => {
                        let over =
                            CuratorCallError::OrderUnavailable("the restoring of the cluster was cancelled");
                        let gone = || {
                            CuratorCallError::OrderUnavailable(
                                "the snapshot from which the cluster would be restored was deleted; restore it from \
                                 another one with: shepherdctl cluster restore",
                            )
                        };
                        let image = match &restoring.image {
                            Some(image) => Some(wire::EtcdImage {
                                sha256: image.digest.ok_or_else(gone)?.to_vec(),
                                etcd_version: image.etcd_version.clone(),
                            }),
                            None => None,
                        };
                        let digest = restoring.digest.ok_or_else(gone)?;
                        self.check_restored_snapshot(found, &digest).await?;
                        // Last: an order that is not built uses no epoch.
                        let epoch = self.bmdb.allocate_cluster_epoch(&self.lease, self.cluster).await?;
                        failpoint::hit(COMPONENT, "epoch-allocated");
                        (digest.to_vec(), image, epoch.ok_or(over)?)
                    }
                };
                Operation::Found(wire::FoundCluster {
                    cluster_id: self.cluster.to_string(),
                    name: cluster.spec.name.clone(),
                    owner_keys: vec![owner.public_key().to_vec()],
                    snapshot_sha256,
                    image,
                    revocations: revocations
                        .map(|(key, value)| wire::RevocationRecord { key, value })
                        .collect(),
                    epoch,
                })
            }
            MembershipOrder::Join => {
                let (client, founded) = self.require_founded(cluster)?;
                let purpose = format!("machine {machine}");
                let statement = self.statements.as_ref().and_then(StatementTrust::current);
                Operation::Join(wire::JoinCluster {
                    ticket: client.create_ticket(purpose, TICKET_LIFETIME).await?,
                    ca_certificate: founded.ca_certificate.clone(),
                    curators: founded.curators.clone(),
                    epoch: cluster.epoch,
                    statement: statement.map(|signed| signed.to_wire().encode_to_vec()).unwrap_or_default(),
                })
            }
        };
        let line = found.machines.iter().find(|line| line.member.machine == machine);
        let labels = line.map(|line| node_labels(line.member.part, line.location.as_deref(), &line.hardware));
        Ok(wire::ClusterOrder {
            generation: 0,
            operation: Some(what),
            labels: labels.unwrap_or_default().into_iter().collect(),
            address: cluster.ordered_address(machine).map(|address| address.to_string()).unwrap_or_default(),
            machine_id: machine.to_string(),
        })
    }

    fn require_founded<'c>(
        &self,
        cluster: &'c Cluster,
    ) -> Result<(&CuratorClient, &'c ClusterIdentity), CuratorCallError> {
        let client = self.curators.as_ref().zip(cluster.identity.as_ref());
        client.ok_or_else(|| CuratorCallError::InvalidResponse("the cluster is not founded".to_owned()))
    }
}

fn push_wait_reason(planned: &mut ClusterPlan, error: Option<CuratorCallError>) {
    if let Some(error) = error {
        planned.wait_reasons.push(error.to_string());
    }
}
