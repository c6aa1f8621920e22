//! What the shepherd says to curators about Kubernetes, and what they answer.

use chrono::DateTime;
use tonic::Code;

use crate::manager::cluster::curators::{ANSWER, CuratorError, Way, answered, doing};
use crate::manager::cluster::{PassError, Tending};
use crate::model::cluster::kubernetes::{
    Clash, Component, Has, Keys, Known, Kubernetes, OnNode, Rotation, told,
};
use crate::model::cluster::kubernetes_user::{Access, Issued, User, due};
use crate::model::cluster::plan::{Plan, Step};
use crate::model::cluster::state::{Cluster, Seen};
use crate::model::cluster::upgrade::Turn;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::kubernetes_client::KubernetesClient;

impl Way {
    /// What they have of it. That they do not say is known then, and stops nothing else.
    pub(super) async fn kubernetes(&self) -> Known {
        let mut kubernetes = KubernetesClient::new(self.channel());
        let asked = answered("asking for Kubernetes", kubernetes.get(wire::GetKubernetesRequest {})).await;
        match asked {
            Ok(said) => Known::Has(has(said)),
            Err(CuratorError::Said { status, .. }) if status.code() == Code::NotFound => Known::Nothing,
            Err(error) => Known::Away(error.to_string()),
        }
    }

    /// Says what it is to be.
    async fn put_kubernetes(&self, wanted: &Kubernetes) -> Result<(), CuratorError> {
        let request =
            wire::PutKubernetesRequest { settings: Some(wanted.settings()), expected_revision: None };
        let mut kubernetes = KubernetesClient::new(self.channel());
        answered("saying what Kubernetes is to be", kubernetes.put(request)).await.map(drop)
    }

    /// Has it forgotten, which no node runs.
    async fn delete_kubernetes(&self) -> Result<(), CuratorError> {
        let mut kubernetes = KubernetesClient::new(self.channel());
        let asking = kubernetes.delete(wire::DeleteKubernetesRequest {});
        match answered("having Kubernetes forgotten", asking).await {
            Err(CuratorError::Said { status, .. }) if status.code() == Code::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Says by which bundle a node runs; an empty one: by that of its cluster.
    async fn assign_bundle(&self, node: &str, bundle: &str) -> Result<(), CuratorError> {
        let request = wire::AssignBundleRequest {
            node_id: node.to_owned(),
            bundle: bundle.to_owned(),
            url: String::new(),
        };
        let mut kubernetes = KubernetesClient::new(self.channel());
        answered("assigning a bundle", kubernetes.assign_bundle(request)).await.map(drop)
    }

    /// Begins to replace certificates or keys.
    async fn rotate(&self, keys: Keys) -> Result<(), CuratorError> {
        let request = wire::RotateKubernetesRequest { which: keys.to_wire().into() };
        let mut kubernetes = KubernetesClient::new(self.channel());
        answered("having keys of Kubernetes replaced", kubernetes.rotate(request)).await.map(drop)
    }

    /// Has a person's certificate for API servers signed.
    async fn issue_user(&self, user: &User) -> Result<Issued, CuratorError> {
        use wire::issue_kubernetes_user_request::Access as Said;
        let access = match user.access {
            Access::Owner => Said::Owner,
            Access::Viewer => Said::Viewer,
        };
        let request = wire::IssueKubernetesUserRequest {
            public_key: user.public_key.clone(),
            name: user.holder.clone(),
            access: access.into(),
            lifetime_ms: u64::try_from(user.lifetime.0.as_millis()).unwrap_or(u64::MAX),
        };
        let mut kubernetes = KubernetesClient::new(self.channel());
        let said =
            answered("having a certificate for API servers signed", kubernetes.issue_user(request)).await?;
        let odd = || CuratorError::Odd("a certificate without an end".to_owned());
        Ok(Issued {
            certificate: said.certificate,
            servers: said.servers,
            api_servers: said.api_servers,
            expires_at: DateTime::from_timestamp_millis(said.not_after_ms).ok_or_else(odd)?,
        })
    }
}

fn has(said: wire::GetKubernetesResponse) -> Has {
    Has {
        settings: told(said.settings.unwrap_or_default()),
        assigned: said.assigned.into_iter().collect(),
        rotations: said.rotations.into_iter().map(rotation).collect(),
        api_servers: said.api_servers,
    }
}

fn rotation(said: wire::KubernetesRotation) -> Rotation {
    use wire::kubernetes_rotation::Stage;
    let moment = |ms: i64| Some(ms).filter(|ms| *ms != 0).and_then(DateTime::from_timestamp_millis);
    Rotation {
        // Of newer curators, perhaps.
        what: Keys::of_wire(said.which()).map_or("keys", Keys::as_str).to_owned(),
        stage: match said.stage() {
            Stage::Trusted => "trusted",
            Stage::Signs => "signs",
            Stage::Unspecified => "unknown",
        }
        .to_owned(),
        since: moment(said.since_ms),
        until: moment(said.until_ms),
        told_at: moment(said.told_at_ms),
        held_by: said.held_by,
        waits_for: said.waits_for,
    }
}

/// What a node runs, as it said.
pub(super) fn on_node(said: wire::KubernetesStatus) -> OnNode {
    let component = |said: wire::KubernetesComponentStatus| Component {
        state: doing(said.kind()).to_owned(),
        since: DateTime::from_timestamp_millis(said.since_ms),
        name: said.name,
        restarts: said.restarts,
        message: said.message,
    };
    let clash =
        |said: wire::KubernetesClash| Clash { kind: said.kind, name: said.name, message: said.message };
    OnNode {
        bundle: said.bundle,
        version: said.version,
        components: said.components.into_iter().map(component).collect(),
        waits: said.waits,
        reconciles: said.reconciles,
        clashes: said.clashes.into_iter().map(clash).collect(),
    }
}

impl Tending<'_> {
    /// Does one step that concerns Kubernetes or an upgrade. What stands in the way is added to what is waited for.
    pub(super) async fn take_kubernetes(
        &self,
        cluster: &Cluster,
        step: &Step,
        planned: &mut Plan,
    ) -> Result<(), PassError> {
        let Some(way) = &self.way else { return Ok(()) };
        let done = match step {
            Step::PutKubernetes => match &cluster.kubernetes {
                Some(wanted) => way.put_kubernetes(&wanted.kubernetes).await,
                None => Ok(()),
            },
            Step::DeleteKubernetes => way.delete_kubernetes().await,
            Step::ForgetKubernetes => {
                self.bmdb.forget_kubernetes(&self.lease, self.cluster).await?;
                Ok(())
            }
            Step::Rotate { keys } => match way.rotate(*keys).await {
                // Told and not written down, they are told again, and what is under way goes on.
                Ok(()) => {
                    self.bmdb.kubernetes_rotated(&self.lease, self.cluster, *keys).await?;
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Step::AssignBundle { node, machine, bundle } => {
                let Some(upgrade) = &cluster.upgrade else { return Ok(()) };
                let asked = self.bmdb.ask_in_upgrade(&self.lease, upgrade, (node, *machine), bundle).await?;
                if let Some(why) = asked {
                    planned.machines.insert(*machine, why);
                    return Ok(());
                }
                crate::manager::failpoint::pass(super::COMPONENT, "assign");
                way.assign_bundle(node, bundle).await
            }
            Step::ClearBundle { node } => way.assign_bundle(node, "").await,
            Step::Upgrade(turn) => {
                self.turn(cluster, turn).await?;
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = done {
            planned.waits.push(error.to_string());
        }
        Ok(())
    }

    async fn turn(&self, cluster: &Cluster, turn: &Turn) -> Result<(), PassError> {
        let Some(upgrade) = &cluster.upgrade else { return Ok(()) };
        let (bmdb, lease, id) = (self.bmdb, &self.lease, upgrade.id.as_str());
        match turn {
            Turn::Through { node } => {
                let seen = match &cluster.view {
                    crate::model::cluster::state::View::Seen(seen) => Some(seen),
                    _ => None,
                };
                let machine = machine_of(cluster, seen, node);
                bmdb.through_with_upgrade(lease, id, node, machine).await?;
            }
            Turn::StandStill { why } => bmdb.upgrade_stands_still(lease, id, why).await?,
            Turn::Released => bmdb.upgrade_released(lease, id).await?,
            Turn::Finish => bmdb.upgrade_finished(lease, self.cluster, upgrade).await?,
        }
        Ok(())
    }

    /// Has certificates for API servers signed that people asked for; the inner error is what stands in the way for now.
    pub(super) async fn tend_kubernetes_users(&self) -> Result<Result<(), CuratorError>, PassError> {
        let Some(way) = &self.way else { return Ok(Ok(())) };
        let (users, now) = self.bmdb.cluster_kubernetes_users(self.cluster).await?;
        for user in due(&users, now) {
            // It is renewed soon, or it is over; what is left is due in the next pass.
            if self.session.remaining() <= ANSWER {
                return Ok(Ok(()));
            }
            match way.issue_user(user).await {
                Ok(issued) => {
                    let (id, holder, access) = (user.id, &user.holder, user.access.as_str());
                    tracing::info!(cluster = self.name, user = %id, holder, access, "a certificate for API servers is signed");
                    self.bmdb.kubernetes_user_issued(&self.lease, user.id, issued).await?;
                }
                // Asked again, they would say so again.
                Err(CuratorError::Said { status, .. }) if status.code() == Code::InvalidArgument => {
                    self.bmdb.kubernetes_user_refused(&self.lease, user.id, status.message()).await?;
                }
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }
}

/// The machine of a node that stays.
fn machine_of(cluster: &Cluster, seen: Option<&Seen>, node: &str) -> Option<crate::model::ids::MachineId> {
    let key = seen?.nodes.iter().find(|known| known.id == node)?.key;
    let member = cluster.members.iter().find(|member| member.key() == Some(key))?;
    Some(member.machine)
}
