//! Carries out planned orders to replace the authority of a cluster.
//!
//! [`crate::model::cluster::authority_rotation`] decides the next step, from the order and from what the curators
//! report. The curators replace the authority by themselves once they have begun. A shepherd that dies leaves the order:
//! its successor finds out from the report whether they have begun, and whether they have ended.
//!
//! A frozen shepherd that resumes may call the curators to begin what has ended long ago. The call names the authority
//! that it replaces, so they reject it.
//!
//! An order after a theft is carried out by orders to machines ([`authority_theft`](super::authority_theft)); only how
//! far it is, is stored here.

use std::collections::BTreeMap;

use crate::bmdb::cluster::record::ClusterDetails;
use crate::manager::cluster::curators::{CURATOR_TIMEOUT, CuratorCallError};
use crate::manager::cluster::{COMPONENT, ClusterPassError, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::authority_rotation::{
    AuthorityProgress, RotationPlan, plan_rotation, stopped_replacement, stopped_replacement_remedy,
};
use crate::model::cluster::plan::ClusterPlan;
use crate::model::cluster::plan::authority_theft::theft_progress;
use crate::model::cluster::spec::ClusterPart;
use crate::model::cluster::state::{Cluster, CuratorAnswer, ObservedCluster};
use crate::model::ids::MachineId;
use crate::model::pause::LoopKind;
use crate::model::time::Timestamp;

impl ClusterWorker<'_> {
    /// Stores how far a replacement is, and takes the next step of an order. What prevents the step, and what the
    /// replacement waits for, is added to the plan's wait reasons. Returns whether the next pass has to follow soon.
    pub(super) async fn follow_authority(
        &mut self,
        found: &ClusterDetails,
        cluster: &Cluster,
        planned: &mut ClusterPlan,
        now: Timestamp,
    ) -> Result<bool, ClusterPassError> {
        let order = found.cluster.authority_rotation.as_ref();
        if let Some(theft) = &cluster.authority_theft {
            let progress = theft_progress(theft, &cluster.members, now);
            if found.cluster.authority_progress != progress {
                self.bmdb.record_authority_progress(&self.lease, self.cluster, progress.as_ref()).await?;
            }
            return Ok(true);
        }
        let CuratorAnswer::Observed(seen) = &cluster.observed else { return Ok(order.is_some()) };
        let progress = seen.authority.progress.as_ref();
        if found.cluster.authority_progress.as_ref() != progress {
            self.bmdb.record_authority_progress(&self.lease, self.cluster, progress).await?;
        }
        if let Some(progress) = progress {
            for (machine, wait) in machine_waits(cluster, seen, progress) {
                planned.machine_waits.entry(machine).or_insert(wait);
            }
        }
        match plan_rotation(order, &seen.authority) {
            RotationPlan::Idle => return Ok(progress.is_some()),
            RotationPlan::Follow => {}
            RotationPlan::Wait(reason) => planned.wait_reasons.push(reason),
            RotationPlan::RecordReplaced(digest) => {
                self.bmdb.record_replaced_authority(&self.lease, self.cluster, &digest).await?;
                failpoint::hit(COMPONENT, "authority-recorded");
            }
            RotationPlan::Begin(digest) => self.begin_authority_rotation(&digest, planned).await?,
            RotationPlan::End => {
                self.bmdb.end_authority_rotation(&self.lease, self.cluster).await?;
                tracing::warn!(cluster = self.name, "the authority of a cluster is replaced");
            }
        }
        Ok(true)
    }

    /// Has the curators begin, unless the loop is paused: their etcd restarts.
    async fn begin_authority_rotation(
        &mut self,
        replaces: &[u8],
        planned: &mut ClusterPlan,
    ) -> Result<(), ClusterPassError> {
        if let Some((pause, at)) = self.pauses.pause_of_loop(self.bmdb, LoopKind::Cluster).await? {
            planned.wait_reasons.push(format!(
                "{}; the next step would be: its authority is replaced; it continues with: {}",
                pause.describe(at),
                pause.resume_command()
            ));
            return Ok(());
        }
        let Some(client) = self.curators.as_ref().filter(|_| self.session.remaining() > CURATOR_TIMEOUT)
        else {
            return Ok(());
        };
        match client.rotate_authority(self.cluster, replaces).await {
            Ok(()) => {
                tracing::warn!(cluster = self.name, "the authority of a cluster is being replaced");
                failpoint::hit(COMPONENT, "authority-begun");
            }
            Err(CuratorCallError::Bmdb(error)) => return Err(error.into()),
            Err(error) => planned.wait_reasons.push(error.to_string()),
        }
        Ok(())
    }
}

/// Adds why a replacement does not go on while no curator answers to what the cluster and its control plane wait for.
pub(super) fn explain_stop(
    found: &ClusterDetails,
    cluster: &Cluster,
    planned: &mut ClusterPlan,
    now: Timestamp,
) {
    let CuratorAnswer::Unreachable(_) = &cluster.observed else { return };
    let (order, progress) =
        (found.cluster.authority_rotation.as_ref(), found.cluster.authority_progress.as_ref());
    let Some(stopped) = stopped_replacement(order, progress, found.cluster.unreachable_since, now) else {
        return;
    };
    let text = format!("{stopped}; {}", stopped_replacement_remedy(&cluster.spec.name));
    for member in cluster.members.iter().filter(|member| member.part == ClusterPart::ControlPlane) {
        planned.machine_waits.entry(member.machine).or_insert_with(|| text.clone());
    }
    planned.wait_reasons.push(text);
}

/// What the machines of the cluster lack for the stage of the replacement.
fn machine_waits(
    cluster: &Cluster,
    seen: &ObservedCluster,
    progress: &AuthorityProgress,
) -> BTreeMap<MachineId, String> {
    let machine_of = |node: &str| {
        let node = seen.nodes.iter().find(|one| one.id == node)?;
        let member = cluster.members.iter().find(|member| member.key() == Some(node.key))?;
        Some(member.machine)
    };
    let waits = progress.waits_for.iter().filter_map(|wait| {
        let text = format!("the replacement of the cluster's authority waits for it: {}", wait.reason);
        Some((machine_of(&wait.node)?, text))
    });
    waits.collect()
}
