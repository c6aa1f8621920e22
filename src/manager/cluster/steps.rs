//! Doing what was planned about a cluster.
//!
//! A step that a curator refuses or nobody answers is what is waited for; the next pass plans anew. What the BMDB cannot
//! do ends the pass.

use prost::Message as _;
use secrecy::SecretSlice;

use crate::bmdb::cluster::ClusterAndMachines;
use crate::bmdb::cluster_key::current_secret;
use crate::manager::cluster::curators::{CuratorError, Way, first_curator, is_authority_of, owner_key};
use crate::manager::cluster::{PassError, Tending};
use crate::model::cluster::labels::labels;
use crate::model::cluster::plan::{Plan, Step, TICKET_LIFETIME};
use crate::model::cluster::state::{Cluster, Founded, Wanted};
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::What;

/// The port of curators.
const CURATOR_PORT: u16 = 7835;
/// What orders are sealed as.
const SEALED: &str = "an order about a cluster";

impl Tending<'_> {
    /// Does one step; says whether the cluster is gone. What stands in the way is added to what is waited for.
    pub(super) async fn take(
        &self,
        found: &ClusterAndMachines,
        cluster: &Cluster,
        step: &Step,
        planned: &mut Plan,
    ) -> Result<bool, PassError> {
        tracing::info!(cluster = self.name, %step, "a step of a cluster");
        let about = (self.cluster, self.name);
        match step {
            Step::Choose { machine, part } => {
                self.bmdb.choose_for_cluster(&self.lease, about, *machine, *part).await?;
            }
            Step::Ask { machine, what } => {
                let order = match self.order(found, cluster, *machine, *what).await {
                    Ok(order) => order,
                    Err(CuratorError::Bmdb(error)) => return Err(error.into()),
                    Err(error) => {
                        planned.machines.insert(*machine, error.to_string());
                        return Ok(false);
                    }
                };
                let plain = SecretSlice::from(order.encode_to_vec());
                let sealed = self.settings.secrets.seal(SEALED, &plain).map_err(CuratorError::from)?;
                self.bmdb.ask_about_cluster(&self.lease, *machine, (*what, self.name), sealed).await?;
            }
            Step::Founded { machine } => self.note_founded(cluster, *machine, planned).await?,
            Step::Approve { machine, key } => {
                let approved = match &self.way {
                    Some(way) => way.approve(*key).await,
                    None => Ok(()),
                };
                if let Err(error) = approved {
                    planned.machines.insert(*machine, error.to_string());
                }
            }
            Step::Roles { node, give, take } => {
                if let Some(way) = &self.way {
                    note(planned, way.roles(node, give, take).await.err());
                }
            }
            Step::Decommission { node } => {
                if let Some(way) = &self.way {
                    note(planned, way.decommission(node).await.err());
                }
            }
            Step::Delete { node } => {
                if let Some(way) = &self.way {
                    note(planned, way.delete(node).await.err());
                }
            }
            Step::Declare { role } => {
                if let Some(way) = &self.way
                    && let Some(kept) = self.bmdb.declaration_for_curators(self.cluster, role).await?
                {
                    note(planned, way.declare(&kept).await.err());
                }
            }
            Step::Undeclare { role } => {
                if let Some(way) = &self.way {
                    note(planned, way.undeclare(role).await.err());
                }
            }
            Step::ForgetDeclaration { role } => {
                self.bmdb.forget_declaration(&self.lease, self.cluster, role).await?;
            }
            Step::PutKubernetes
            | Step::DeleteKubernetes
            | Step::ForgetKubernetes
            | Step::Rotate { .. }
            | Step::AssignBundle { .. }
            | Step::ClearBundle { .. }
            | Step::Upgrade(_) => self.take_kubernetes(cluster, step, planned).await?,
            Step::Leaving { machine, why } => {
                self.bmdb.leave_cluster(&self.lease, about, *machine, why).await?;
            }
            Step::Forget { machine, how } => {
                self.bmdb.forget_in_cluster(&self.lease, about, *machine, how).await?;
            }
            Step::Remove => {
                let secrets = [current_secret(self.cluster)];
                self.bmdb.remove_cluster(&self.lease, self.cluster, &secrets).await?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Writes down by what a cluster is known, as the machine reported it that founded it or brought it back.
    async fn note_founded(
        &self,
        cluster: &Cluster,
        machine: MachineId,
        planned: &mut Plan,
    ) -> Result<(), PassError> {
        let report = cluster.members.iter().find(|member| member.machine == machine);
        let report = report.and_then(|member| member.report.clone()).unwrap_or_default();
        let certificate = report.ca_certificate.unwrap_or_default();
        let curator = report.address.and_then(|address| first_curator(&address, CURATOR_PORT));
        let said = match curator {
            // What was restored has the authority of the snapshot, and that is the cluster's.
            Some(curator) if cluster.restoring.is_some() => {
                let known = cluster.founded.as_ref().map(|founded| founded.ca_certificate.as_slice());
                if known == Some(certificate.as_slice()) && report.epoch == cluster.epoch {
                    self.bmdb.cluster_restored(&self.lease, self.cluster, machine, &[curator]).await?;
                    return Ok(());
                }
                "it reports to have restored something else than this cluster; it has to leave it"
            }
            Some(curator) if is_authority_of(&certificate, self.cluster) => {
                self.bmdb
                    .cluster_founded(&self.lease, self.cluster, machine, &certificate, &[curator])
                    .await?;
                return Ok(());
            }
            _ => "it reports to be a node of another cluster; it has to leave that first",
        };
        planned.machines.insert(machine, said.to_owned());
        Ok(())
    }

    /// The order that a machine is given. A ticket is made for it where it is to join.
    async fn order(
        &self,
        found: &ClusterAndMachines,
        cluster: &Cluster,
        machine: MachineId,
        what: Wanted,
    ) -> Result<wire::ClusterOrder, CuratorError> {
        let what = match what {
            Wanted::Leave => What::Leave(wire::LeaveCluster {}),
            Wanted::Found => {
                let owner = owner_key(self.bmdb, &self.settings.secrets, self.cluster).await?;
                let (snapshot_sha256, epoch) = match &cluster.restoring {
                    None => (Vec::new(), 0),
                    Some(restoring) => {
                        let epoch = self.bmdb.next_epoch(&self.lease, self.cluster).await?;
                        let over = CuratorError::Order("the cluster is not to be restored any more");
                        let gone = CuratorError::Order(
                            "the snapshot that the cluster is to be restored from is not kept any more; order it from \
                             another one with: shepherdctl cluster restore",
                        );
                        (restoring.digest.ok_or(gone)?.to_vec(), epoch.ok_or(over)?)
                    }
                };
                What::Found(wire::FoundCluster {
                    cluster_id: self.cluster.to_string(),
                    name: cluster.spec.name.clone(),
                    owner_keys: vec![owner.public_key().to_vec()],
                    snapshot_sha256,
                    epoch,
                })
            }
            Wanted::Join => {
                let (way, founded) = self.founded(cluster)?;
                let purpose = format!("machine {machine}");
                What::Join(wire::JoinCluster {
                    ticket: way.ticket(purpose, TICKET_LIFETIME).await?,
                    ca_certificate: founded.ca_certificate.clone(),
                    curators: founded.curators.clone(),
                    epoch: cluster.epoch,
                })
            }
        };
        let line = found.machines.iter().find(|line| line.member.machine == machine);
        let labels = line.map(|line| labels(line.member.part, line.location.as_deref(), &line.hardware));
        Ok(wire::ClusterOrder {
            generation: 0,
            what: Some(what),
            labels: labels.unwrap_or_default().into_iter().collect(),
            address: String::new(),
        })
    }

    fn founded<'c>(&self, cluster: &'c Cluster) -> Result<(&Way, &'c Founded), CuratorError> {
        let way = self.way.as_ref().zip(cluster.founded.as_ref());
        way.ok_or_else(|| CuratorError::Odd("the cluster is not founded".to_owned()))
    }
}

fn note(planned: &mut Plan, error: Option<CuratorError>) {
    if let Some(error) = error {
        planned.waits.push(error.to_string());
    }
}
