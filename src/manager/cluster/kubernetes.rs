//! Kubernetes calls to curators, and Kubernetes steps of a plan.

use chrono::DateTime;
use tonic::Code;

use crate::manager::cluster::curator_responses::parse_kubernetes;
use crate::manager::cluster::curators::{CuratorCallError, CuratorClient, call_curator};
use crate::manager::cluster::{COMPONENT, ClusterPassError, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::certificate_request::SignedCertificate;
use crate::model::cluster::kubernetes::{KeyPurpose, KubernetesSpec, ObservedKubernetes};
use crate::model::cluster::kubernetes_user::{IssuedUserCertificate, KubernetesAccess, KubernetesUser};
use crate::model::cluster::plan::ClusterPlan;
use crate::model::cluster::plan::step::ClusterPlanStep;
use crate::model::cluster::state::{Cluster, CuratorAnswer, ObservedCluster};
use crate::model::cluster::upgrade::UpgradeEvent;
use crate::model::ids::MachineId;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::kubernetes_client::KubernetesClient;

impl CuratorClient {
    /// Fetches the state of Kubernetes. A failure becomes part of the observation and stops nothing else.
    pub(super) async fn fetch_kubernetes(&self) -> ObservedKubernetes {
        let mut kubernetes = KubernetesClient::new(self.channel());
        let result =
            call_curator("reading the Kubernetes settings", kubernetes.get(wire::GetKubernetesRequest {}))
                .await;
        match result {
            Ok(response) => ObservedKubernetes::Present(parse_kubernetes(response)),
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::NotFound => {
                ObservedKubernetes::Absent
            }
            Err(error) => ObservedKubernetes::Unavailable(error.to_string()),
        }
    }

    /// Sets the desired Kubernetes spec.
    async fn put_kubernetes(&self, wanted: &KubernetesSpec) -> Result<(), CuratorCallError> {
        let request =
            wire::PutKubernetesRequest { settings: Some(wanted.to_settings()), expected_revision: None };
        let mut kubernetes = KubernetesClient::new(self.channel());
        call_curator("setting the desired Kubernetes", kubernetes.put(request)).await.map(drop)
    }

    /// Deletes the Kubernetes spec. Only valid when no node runs Kubernetes.
    async fn delete_kubernetes(&self) -> Result<(), CuratorCallError> {
        let mut kubernetes = KubernetesClient::new(self.channel());
        let call = kubernetes.delete(wire::DeleteKubernetesRequest {});
        match call_curator("having Kubernetes forgotten", call).await {
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Assigns a bundle to a node. An empty text assigns the bundle of its cluster.
    async fn assign_bundle(&self, node: &str, bundle: &str) -> Result<(), CuratorCallError> {
        let request = wire::AssignBundleRequest {
            node_id: node.to_owned(),
            bundle: bundle.to_owned(),
            url: String::new(),
        };
        let mut kubernetes = KubernetesClient::new(self.channel());
        call_curator("assigning a bundle", kubernetes.assign_bundle(request)).await.map(drop)
    }

    /// Starts the rotation of certificates or keys.
    async fn rotate_keys(&self, keys: KeyPurpose) -> Result<(), CuratorCallError> {
        let request = wire::RotateKubernetesRequest { keys: keys.to_wire().into() };
        let mut kubernetes = KubernetesClient::new(self.channel());
        call_curator("having keys of Kubernetes replaced", kubernetes.rotate(request)).await.map(drop)
    }

    /// Has a person's client certificate for API servers signed.
    pub(super) async fn issue_user_certificate(
        &self,
        user: &KubernetesUser,
    ) -> Result<IssuedUserCertificate, CuratorCallError> {
        use wire::issue_kubernetes_user_request::Access as WireAccess;
        let access = match user.access {
            KubernetesAccess::Owner => WireAccess::Owner,
            KubernetesAccess::Viewer => WireAccess::Viewer,
        };
        let request = wire::IssueKubernetesUserRequest {
            public_key: user.request.public_key.clone(),
            name: user.request.holder.clone(),
            access: access.into(),
            lifetime_ms: u64::try_from(user.request.lifetime.0.as_millis()).unwrap_or(u64::MAX),
        };
        let mut kubernetes = KubernetesClient::new(self.channel());
        let response =
            call_curator("having a certificate for API servers signed", kubernetes.issue_user(request))
                .await?;
        let invalid = || CuratorCallError::InvalidResponse("a certificate without an end".to_owned());
        let expires_at = DateTime::from_timestamp_millis(response.not_after_ms).ok_or_else(invalid)?;
        Ok(IssuedUserCertificate {
            signed: SignedCertificate { certificate: response.certificate, expires_at },
            server_authorities: response.server_authorities,
            api_servers: response.api_servers,
        })
    }
}

impl ClusterWorker<'_> {
    /// Applies one step that concerns Kubernetes or an upgrade. What prevents it is added to the plan's wait reasons.
    pub(super) async fn apply_kubernetes_step(
        &self,
        cluster: &Cluster,
        step: &ClusterPlanStep,
        planned: &mut ClusterPlan,
    ) -> Result<(), ClusterPassError> {
        let Some(client) = &self.curators else { return Ok(()) };
        let done = match step {
            ClusterPlanStep::PutKubernetes => match &cluster.kubernetes {
                Some(wanted) => client.put_kubernetes(&wanted.spec).await,
                None => Ok(()),
            },
            ClusterPlanStep::DeleteKubernetes => client.delete_kubernetes().await,
            ClusterPlanStep::DeleteKubernetesRecord => {
                self.bmdb.delete_kubernetes(&self.lease, self.cluster).await?;
                Ok(())
            }
            ClusterPlanStep::RotateKeys { keys } => match client.rotate_keys(*keys).await {
                // If the record is lost after the call, the next pass calls again, and a rotation under way continues.
                Ok(()) => {
                    self.bmdb.record_rotation_started(&self.lease, self.cluster, *keys).await?;
                    Ok(())
                }
                Err(error) => Err(error),
            },
            ClusterPlanStep::AssignBundle { node, machine, bundle } => {
                let Some(upgrade) = &cluster.upgrade else { return Ok(()) };
                let query =
                    self.bmdb.request_node_upgrade(&self.lease, upgrade, (node, *machine), bundle).await?;
                if let Some(why) = query {
                    planned.machine_waits.insert(*machine, why);
                    return Ok(());
                }
                failpoint::hit(COMPONENT, "bundle-assigned");
                client.assign_bundle(node, bundle).await
            }
            ClusterPlanStep::ClearBundle { node } => client.assign_bundle(node, "").await,
            ClusterPlanStep::RecordUpgrade(turn) => {
                self.record_upgrade_event(cluster, turn).await?;
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = done {
            planned.wait_reasons.push(error.to_string());
        }
        Ok(())
    }

    async fn record_upgrade_event(
        &self,
        cluster: &Cluster,
        turn: &UpgradeEvent,
    ) -> Result<(), ClusterPassError> {
        let Some(upgrade) = &cluster.upgrade else { return Ok(()) };
        let (bmdb, lease, id) = (self.bmdb, &self.lease, upgrade.id.as_str());
        match turn {
            UpgradeEvent::NodeDone { node } => {
                let seen = match &cluster.observed {
                    CuratorAnswer::Observed(seen) => Some(seen),
                    _ => None,
                };
                let machine = machine_of(cluster, seen, node);
                bmdb.record_node_upgraded(lease, id, node, machine).await?;
            }
            UpgradeEvent::Pause { reason: why } => bmdb.pause_upgrade(lease, id, why).await?,
            UpgradeEvent::ReleaseDone => bmdb.record_upgrade_roll_out_done(lease, id).await?,
            UpgradeEvent::Finish => bmdb.complete_upgrade(lease, self.cluster, upgrade).await?,
        }
        Ok(())
    }
}

/// The machine of a node, if that node is a member that stays.
fn machine_of(cluster: &Cluster, seen: Option<&ObservedCluster>, node: &str) -> Option<MachineId> {
    let key = seen?.nodes.iter().find(|known| known.id == node)?.key;
    let member = cluster.members.iter().find(|member| member.key() == Some(key))?;
    Some(member.machine)
}
