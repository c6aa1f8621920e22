//! Replaces the authority after a theft of its key: the orders to the machines, and the steps of the cluster.
//!
//! [`authority_theft`](crate::cluster::authority_theft) explains the steps. The plan follows from the stored step and
//! from what machines report over their agent channel. Both are independent of the curators: between two steps they may
//! trust another authority than the shepherd, and a thief may speak for them.
//!
//! # Who is waited for
//!
//! Until the new authority is installed, each machine of the control plane that is a node, however long it is silent:
//! its etcd would be cut off. A machine that has to leave is waited for until it is ordered to leave. After that, each
//! machine that is a node. One that is off holds the order, gets it when it reports, or is retired. A machine with a
//! node that a person has moved reports the new authority, and counts as done. A member of etcd that runs on no machine of the
//! control plane holds the steps of etcd, too, as long as curators report one.
//!
//! While the curators are stopped, nobody can take a lost machine out of the control plane. So one that is being
//! retired, or that the control loops have given up, is waited for in these two steps for two minutes alone. One that
//! still runs stops its curator by then. It has no vote that rejects the new authority: its etcd has taken the steps
//! before.
//!
//! # What else is planned meanwhile
//!
//! No machine becomes a member of etcd until the new authority is installed: a member that learns restarts its etcd for
//! no step. While the curators are stopped, nothing else is planned: what answers in their place may be the thief.

use std::time::Duration;

use crate::cluster::authority_rotation::{AuthorityProgress, AuthorityWait};
use crate::cluster::authority_theft::{AuthorityStep, AuthorityTheft, TheftStage};
use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{Cluster, ClusterMember, CuratorAnswer, MemberReport, MembershipOrder};
use crate::time::{Timestamp, between};

/// How long a machine may take for a step that it has accepted before it gets the order again.
const ORDER_RETRY_AFTER: Duration = Duration::from_mins(1);
/// How long a machine that is being retired or given up is waited for while the curators are stopped.
const GIVEN_UP_GRACE: Duration = Duration::from_mins(2);
/// Age of an order at which a machine that waits for others gets it again, with another certificate for etcd. Such a
/// certificate lasts thirty days. Nobody else renews it: curators issue those of the former authority.
const CERTIFICATE_REFRESH_AFTER: Duration = Duration::from_hours(10 * 24);

/// What a machine lacks for a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepDelivery {
    /// It takes no part: it is no node, or its order is to leave.
    Excluded,
    /// It has taken the step.
    Done,
    /// It gets the order now.
    Due,
    /// It has the order, or will get it when it reports; the text is what it waits for, without a full stop.
    Waits(String),
}

/// What this machine lacks for the step that is under way.
#[must_use]
pub fn step_delivery(member: &ClusterMember, stage: &TheftStage, now: Timestamp) -> StepDelivery {
    if must_join_again(member, stage) {
        return StepDelivery::Waits(
            "its order to join names the stolen authority, and it gets another".to_owned(),
        );
    }
    let Some(report) = member.report.as_ref().filter(|report| report.key.is_some()) else {
        return StepDelivery::Excluded;
    };
    let ordered_to_leave = member.last_order.is_some_and(|order| order.order == MembershipOrder::Leave);
    let Some(trusted) = report.ca_certificate.as_ref().filter(|_| !ordered_to_leave) else {
        return StepDelivery::Excluded;
    };
    if stage.step != AuthorityStep::Follow && member.part != ClusterPart::ControlPlane {
        return StepDelivery::Excluded;
    }
    // The order is removed last. Until then, the epoch that the machine reports may be that of the thief.
    let has_followed = *trusted == stage.certificate && report.next_authority.is_none();
    let has_taken = report.next_authority.as_ref() == Some(&stage.certificate)
        && report.next_authority_step.is_some_and(|step| step >= stage.step);
    if has_taken && needs_certificate(member, report, stage, now) {
        return StepDelivery::Due;
    }
    if has_followed || has_taken {
        return StepDelivery::Done;
    }
    // No curator answers by then that could end its membership. An operator who retires it states that it is off.
    let is_given_up = member.retiring || member.is_given_up();
    if stage.step.stops_curators() && is_given_up && between(stage.since, now) >= GIVEN_UP_GRACE {
        return StepDelivery::Excluded;
    }
    let Some(order) = member.last_order.filter(|order| order.sent_at > stage.since) else {
        return StepDelivery::Due;
    };
    if report.generation < order.generation {
        return StepDelivery::Waits(
            "it was sent the new authority of its cluster, and has not reported on it".to_owned(),
        );
    }
    if between(order.sent_at, now) >= ORDER_RETRY_AFTER {
        return StepDelivery::Due;
    }
    StepDelivery::Waits(match &report.error {
        Some(error) => format!("it has the new authority of its cluster, and reports: {error}"),
        None => "it has the new authority of its cluster, and takes the step".to_owned(),
    })
}

/// Whether a machine that has taken the step needs another certificate for its etcd, because others take long.
fn needs_certificate(
    member: &ClusterMember,
    report: &MemberReport,
    stage: &TheftStage,
    now: Timestamp,
) -> bool {
    let has_one = stage.step > AuthorityStep::Accept && stage.step < AuthorityStep::Follow;
    let reported = member.last_order.filter(|order| report.generation >= order.generation);
    has_one && reported.is_some_and(|order| between(order.sent_at, now) >= CERTIFICATE_REFRESH_AFTER)
}

/// Whether a machine that is no node yet has an order to join which names the stolen authority, although the cluster has
/// another one.
fn must_join_again(member: &ClusterMember, stage: &TheftStage) -> bool {
    let is_node =
        member.report.as_ref().is_some_and(|report| report.key.is_some() && report.ca_certificate.is_some());
    let joins = member
        .last_order
        .is_some_and(|order| order.order == MembershipOrder::Join && order.sent_at <= stage.since);
    stage.step == AuthorityStep::Follow && joins && !is_node && member.leave_reason.is_none()
}

/// The epoch in the records of the cluster, and the addresses of its control plane, as those machines report them that
/// have put this authority into the records. What the BMDB has of both may be the thief's.
///
/// The lowest epoch counts: a machine that got it by an order reports what the BMDB had. One that is too low does no
/// harm, because curators prove a higher one.
#[must_use]
pub fn installed_control_plane(cluster: &Cluster, certificate: &[u8]) -> (u64, Vec<String>) {
    let members = cluster.members.iter().filter(|member| member.part == ClusterPart::ControlPlane);
    let followed: Vec<&MemberReport> = members
        .filter_map(|member| member.report.as_ref())
        .filter(|report| {
            report.ca_certificate.as_deref() == Some(certificate) && report.next_authority.is_none()
        })
        .collect();
    let epoch = followed.iter().map(|report| report.epoch).min().unwrap_or(cluster.epoch);
    (epoch, followed.iter().filter_map(|report| report.address.clone()).collect())
}

/// How far the replacement is, with the machines that it waits for.
#[must_use]
pub fn theft_progress(
    theft: &AuthorityTheft,
    members: &[ClusterMember],
    now: Timestamp,
) -> Option<AuthorityProgress> {
    let stage = theft.stage.as_ref()?;
    let waits_for = members.iter().filter_map(|member| {
        let reason = match step_delivery(member, stage, now) {
            StepDelivery::Excluded | StepDelivery::Done => return None,
            StepDelivery::Due => "it is sent the new authority".to_owned(),
            StepDelivery::Waits(reason) => reason,
        };
        Some(AuthorityWait { node: member.name.clone(), reason })
    });
    Some(AuthorityProgress {
        stage: stage.step.as_str().to_owned(),
        since: Some(stage.since),
        waits_for: waits_for.collect(),
    })
}

impl ClusterPlanner<'_> {
    fn theft_stage(&self) -> Option<&TheftStage> {
        self.cluster.authority_theft.as_ref()?.stage.as_ref()
    }

    /// Whether the curators are stopped for a step.
    pub(super) fn are_curators_stopped(&self) -> bool {
        self.theft_stage().is_some_and(|stage| stage.step.stops_curators())
    }

    /// Whether no machine may become a member of etcd until the new authority is installed.
    pub(super) fn holds_new_members(&self) -> bool {
        self.cluster.authority_theft.is_some()
            && self.theft_stage().is_none_or(|stage| stage.step < AuthorityStep::Follow)
    }

    /// Whether the order to join of this machine names the stolen authority, although the cluster has another one.
    pub(super) fn names_stolen_authority(&self, member: &ClusterMember) -> bool {
        self.theft_stage().is_some_and(|stage| must_join_again(member, stage))
    }

    /// A member of etcd that runs on no machine of the control plane. It would be cut off.
    fn find_stranger(&self) -> Option<String> {
        let CuratorAnswer::Observed(seen) = &self.cluster.observed else { return None };
        let is_ours = |id: &str| {
            let node = seen.nodes.iter().find(|node| node.id == id);
            let mut members =
                self.cluster.members.iter().filter(|member| member.part == ClusterPart::ControlPlane);
            node.is_some_and(|node| members.any(|member| member.key() == Some(node.key)))
        };
        let mut members = seen.etcd_members.iter().filter_map(|member| member.node.as_deref());
        members.find(|id| !is_ours(id)).map(str::to_owned)
    }

    /// Plans the orders that are due, the next step, or the end.
    pub(super) fn plan_authority_theft(&mut self) {
        let cluster = self.cluster;
        let Some(theft) = &cluster.authority_theft else { return };
        let by = &theft.ordered_by;
        let Some(stage) = &theft.stage else {
            return self.push_step(ClusterPlanStep::CreateAuthority);
        };
        let (mut taking_part, mut done) = (0_usize, 0_usize);
        for member in &cluster.members {
            let delivery = step_delivery(member, stage, self.now);
            taking_part += usize::from(delivery != StepDelivery::Excluded);
            match delivery {
                StepDelivery::Excluded => {}
                StepDelivery::Done => done += 1,
                StepDelivery::Due => self
                    .push_step(ClusterPlanStep::SendAuthority { machine: member.machine, step: stage.step }),
                StepDelivery::Waits(reason) => self.push_wait(member, reason),
            }
        }
        // Later, no curator could report one that is there, and etcd has rejected it already.
        let stranger = self.find_stranger().filter(|_| stage.step <= AuthorityStep::Reject);
        if let Some(node) = &stranger {
            self.plan.wait_reasons.push(format!(
                "its member of etcd {node} runs on no machine of its control plane, so nobody sends it the new authority: \
                 take its role consensus-member with Management.UpdateRoles of the curators"
            ));
        }
        let is_done = taking_part > 0 && done == taking_part && stranger.is_none();
        match stage.step.next() {
            Some(next) if is_done => self.push_step(ClusterPlanStep::AdvanceAuthority { step: next }),
            // Its first statement is stored by then, and a snapshot follows.
            None if is_done && matches!(cluster.observed, CuratorAnswer::Observed(_)) => {
                self.push_step(ClusterPlanStep::EndAuthorityTheft);
            }
            _ => self.plan.wait_reasons.push(format!(
                "its authority is replaced after a theft, as {by} ordered ({}): {done} of {taking_part} machines have \
                 taken this step",
                stage.step
            )),
        }
    }
}

#[cfg(test)]
mod tests;
