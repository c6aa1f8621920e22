//! New certificates for members of etcd that cannot renew theirs: an operator ordered them, and no curator answers.
//!
//! Each machine of the control plane that is a node gets one certificate for each order. The order ends when a majority
//! of the members answers: then the remaining members get their certificates from the leading curator.
//!
//! A certificate is sent as an order about the cluster, because a machine has one such order at a time. The database
//! records it as an order to join, which a machine that is a node already has carried out: a shepherd of the release
//! before knows no other word for it.

use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::quorum::majority;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{ClusterMember, CuratorAnswer, MembershipOrder, PeerRenewal};

/// What a machine of the control plane has of an order for new certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateDelivery {
    /// It is no node of the cluster, or it leaves: it gets none.
    NotEntitled,
    /// None was sent to it.
    Due,
    /// One was sent to it, and it has not reported on it.
    Sent,
    /// It has reported on the one that was sent to it.
    Reported,
}

/// What this machine has of the order.
#[must_use]
pub fn certificate_delivery(member: &ClusterMember, renewal: &PeerRenewal) -> CertificateDelivery {
    let report = member.report.as_ref();
    let is_node = report.is_some_and(|report| report.key.is_some() && report.ca_certificate.is_some());
    let ordered_to_leave = member.last_order.is_some_and(|order| order.order == MembershipOrder::Leave);
    if member.part != ClusterPart::ControlPlane
        || member.leave_reason.is_some()
        || ordered_to_leave
        || !is_node
    {
        return CertificateDelivery::NotEntitled;
    }
    match member.last_order.filter(|order| order.sent_at > renewal.requested_at) {
        None => CertificateDelivery::Due,
        Some(order) if report.is_some_and(|report| report.generation == order.generation) => {
            CertificateDelivery::Reported
        }
        Some(_) => CertificateDelivery::Sent,
    }
}

impl ClusterPlanner<'_> {
    /// Plans the certificates that are due by an order, or the end of the order.
    pub(super) fn plan_peer_renewal(&mut self) {
        let cluster = self.cluster;
        let Some(renewal) = &cluster.peer_renewal else { return };
        if let CuratorAnswer::Observed(seen) = &cluster.observed {
            let (voters, reached) = seen.vote_counts();
            if reached >= majority(voters) {
                return self.push_step(ClusterPlanStep::EndPeerRenewal);
            }
        }
        let by = &renewal.requested_by;
        self.plan.wait_reasons.push(format!("its members of etcd get new certificates, as {by} ordered"));
        for member in cluster.members.iter().filter(|member| member.part == ClusterPart::ControlPlane) {
            match certificate_delivery(member, renewal) {
                CertificateDelivery::NotEntitled => {
                    self.push_wait(member, "it is no node that stays, so it gets no certificate for etcd");
                }
                CertificateDelivery::Due => {
                    self.push_step(ClusterPlanStep::RenewPeer { machine: member.machine });
                }
                CertificateDelivery::Sent => {
                    self.push_wait(member, "it was sent a certificate for etcd, and has not reported on it");
                }
                CertificateDelivery::Reported => {
                    let error = member.report.as_ref().and_then(|report| report.error.as_ref());
                    let waits = match error {
                        Some(error) => format!("it was sent a certificate for etcd, and reports: {error}"),
                        None => "it has a new certificate for etcd, and waits for the others".to_owned(),
                    };
                    self.push_wait(member, waits);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::tests::{at, healthy_cluster, machine, member, observed, order, plan_text};
    use crate::cluster::state::{Cluster, PendingRestore};

    /// A cluster of three without a curator that answers. An operator ordered certificates at second 900.
    fn silent() -> Cluster {
        Cluster {
            observed: CuratorAnswer::Unreachable("off".to_owned()),
            peer_renewal: Some(PeerRenewal { requested_at: at(900), requested_by: "kim".to_owned() }),
            ..healthy_cluster(3)
        }
    }

    const WAITS: &str = "waits: none of its curators answers: off; \
                         waits: its members of etcd get new certificates, as kim ordered";

    #[test]
    fn each_member_gets_one_certificate_for_each_order() {
        let mut cluster = silent();
        let sent = |number| ClusterPlanStep::RenewPeer { machine: machine(number) }.to_string();
        let all = format!("{}; {}; {}; {WAITS}", sent(1), sent(2), sent(3));
        assert_eq!(plan_text(&cluster, &[]), all);

        // The first has reported on its certificate, and the second cannot use it. The third is off.
        for (index, error) in [(0, None), (1, Some("its clock is wrong")), (2, None)] {
            let member = &mut cluster.members[index];
            let last = order(MembershipOrder::Join, 50);
            member.last_order = Some(last);
            if let Some(report) = &mut member.report {
                report.error = error.map(str::to_owned);
                report.generation = if index == 2 { 0 } else { last.generation };
            }
        }
        let text = plan_text(&cluster, &[]);
        let silent = WAITS.split("; ").next().unwrap_or_default();
        for part in [
            "m2 reports: its clock is wrong; waits: its members of etcd get new certificates, as kim ordered",
            "1 waits: it has a new certificate for etcd, and waits for the others",
            "2 waits: it was sent a certificate for etcd, and reports: its clock is wrong",
            "3 waits: it was sent a certificate for etcd, and has not reported on it",
        ] {
            assert!(text.starts_with(silent) && text.contains(part), "{part}: {text}");
        }

        // Another order: what was sent before does not count.
        if let Some(renewal) = &mut cluster.peer_renewal {
            renewal.requested_at = at(960);
        }
        let reported = all.replace("answers: off;", "answers: off; m2 reports: its clock is wrong;");
        assert_eq!(plan_text(&cluster, &[]), reported);
    }

    #[test]
    fn machine_that_leaves_or_is_no_node_gets_no_certificate() {
        let mut cluster = silent();
        cluster.members[0].leave_reason = Some("it is retired".to_owned());
        cluster.members[1].last_order = Some(order(MembershipOrder::Leave, 5));
        cluster.members[2] = member(3, ClusterPart::ControlPlane);
        let text = plan_text(&cluster, &[]);
        for number in 1..=3 {
            let wait =
                format!("{number} waits: it is no node that stays, so it gets no certificate for etcd");
            assert!(text.contains(&wait), "{wait}: {text}");
        }
        assert!(!text.contains("is sent a new certificate"), "{text}");
    }

    #[test]
    fn order_ends_when_a_majority_answers() {
        let mut cluster = silent();
        cluster.observed = healthy_cluster(3).observed;
        assert_eq!(plan_text(&cluster, &[]), ClusterPlanStep::EndPeerRenewal.to_string());
        for member in &mut observed(&mut cluster).etcd_members[1..] {
            member.reachable = false;
        }
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("is sent a new certificate") && !text.contains("have their"), "{text}");

        // A restore replaces the members, and their certificates with them.
        let restoring =
            PendingRestore { requested_at: at(950), target_machine: None, digest: None, image: None };
        let restoring = Some(restoring);
        let text = plan_text(&Cluster { restoring, ..silent() }, &[]);
        assert!(!text.contains("certificate"), "{text}");
    }
}
