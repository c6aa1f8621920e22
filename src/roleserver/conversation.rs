//! What the next heartbeat says.
//!
//! A heartbeat is made once and sent until it is answered: a try whose answer
//! was lost goes out again with the same `seq`, so the server can tell it from
//! a new one and answer it the same. But a heartbeat says "I live *now*"; one
//! that could not be delivered for a whole interval is given up, and a new one
//! with a new `seq` takes over what it carried.
//!
//! The first heartbeat of an incarnation is empty, so that nothing (a disk that
//! answers slowly, a report that is too large) keeps a machine from showing
//! that it lives. The second carries the hardware report, and so does every one
//! after an answer that asks for it. A report that the server calls malformed is
//! set aside for one heartbeat for the same reason.

use std::collections::BTreeSet;
use std::time::Duration;

use tonic::Code;
use uuid::Uuid;

use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::hardware::v1::HardwareReport;

/// Who speaks: what every heartbeat of one incarnation has in common.
#[derive(Clone, Debug)]
pub struct Speaker {
    /// Who the machine is.
    pub machine_id: MachineId,
    /// The running boot.
    pub boot_id: String,
    /// This start of the agent.
    pub incarnation: Uuid,
    /// Version of the agent program.
    pub agent_version: String,
    /// Highest fence that enrolled it.
    pub access_fence: i64,
    /// Whether it brings logs when it is asked for them.
    pub brings_logs: bool,
}

/// The state between two heartbeats.
#[derive(Debug)]
pub struct Conversation {
    speaker: Speaker,
    pending: Option<wire::HeartbeatRequest>,
    last_seq: u64,
    delivered: u64,
    wants_report: bool,
    /// The next heartbeat goes without a report, whatever is wanted.
    set_aside: bool,
    installation: Option<wire::InstallationReport>,
    refused_generations: BTreeSet<i64>,
    /// Where the machine stands with its cluster, as it was last taken by a shepherd.
    cluster: Option<wire::ClusterReport>,
    /// Which release it is, as that was last taken by a shepherd.
    release: Option<wire::ReleaseReport>,
    /// Whether another release is ordered.
    ordered: bool,
}

/// What an answer made of the conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// The first answer of this incarnation.
    pub first: bool,
    /// The heartbeat carried a hardware report, which is durable now.
    pub with_report: bool,
    /// An installation that this role server was asked for and cannot do; named once.
    pub refused_installation: Option<i64>,
}

impl Conversation {
    /// Begins the conversation of one incarnation.
    #[must_use]
    pub const fn new(speaker: Speaker) -> Self {
        Self {
            speaker,
            pending: None,
            last_seq: 0,
            delivered: 0,
            wants_report: true,
            set_aside: false,
            installation: None,
            refused_generations: BTreeSet::new(),
            cluster: None,
            release: None,
            ordered: false,
        }
    }

    /// Whether the next heartbeat should carry a hardware report.
    #[must_use]
    pub const fn wants_report(&self) -> bool {
        self.delivered > 0 && self.wants_report && !self.set_aside
    }

    /// Whether a heartbeat is on its way that should be sent again as it is.
    #[must_use]
    pub fn pending(&self, boot_milliseconds: u64, interval: Duration) -> Option<&wire::HeartbeatRequest> {
        let pending = self.pending.as_ref()?;
        let age = Duration::from_millis(boot_milliseconds.saturating_sub(pending.seq));
        (age < interval).then_some(pending)
    }

    /// Makes a new heartbeat, giving up one that was on its way.
    ///
    /// Where the machine stands with its cluster is said when that has changed, and with the hardware: a machine that
    /// never heard of clusters says so once.
    pub fn compose(
        &mut self,
        boot_milliseconds: u64,
        report: Option<HardwareReport>,
        cluster: wire::ClusterReport,
        release: Option<wire::ReleaseReport>,
    ) -> &wire::HeartbeatRequest {
        let release = release.filter(|release| report.is_some() || self.is_another_release(release));
        let cluster = (report.is_some() || self.is_news(&cluster)).then_some(cluster);
        self.last_seq = boot_milliseconds.max(self.last_seq + 1);
        self.set_aside = false;
        self.pending.insert(wire::HeartbeatRequest {
            machine_id: self.speaker.machine_id.to_string(),
            boot_id: self.speaker.boot_id.clone(),
            incarnation: self.speaker.incarnation.to_string(),
            seq: self.last_seq,
            agent_version: self.speaker.agent_version.clone(),
            hardware_report: report,
            installation_report: self.installation.clone(),
            access_fence: self.speaker.access_fence,
            cluster_report: cluster,
            release_report: release,
            brings_logs: self.speaker.brings_logs,
        })
    }

    /// Whether this is worth a heartbeat: no shepherd has heard it yet.
    #[must_use]
    pub fn is_news(&self, cluster: &wire::ClusterReport) -> bool {
        let unheard = self.cluster.is_none() && *cluster == wire::ClusterReport::default();
        self.delivered > 0 && !unheard && self.cluster.as_ref() != Some(cluster)
    }

    /// Whether this is worth a heartbeat, too.
    #[must_use]
    pub fn is_another_release(&self, release: &wire::ReleaseReport) -> bool {
        self.delivered > 0 && self.release.as_ref() != Some(release)
    }

    /// Whether somebody waits for this machine to become another release.
    #[must_use]
    pub const fn is_ordered(&self) -> bool {
        self.ordered
    }

    /// Whether this machine has to do with a cluster, as far as a shepherd was told.
    #[must_use]
    pub fn in_cluster(&self) -> bool {
        self.cluster.as_ref().is_some_and(|known| *known != wire::ClusterReport::default())
    }

    /// Notes that the pending heartbeat is durable.
    pub fn answered(&mut self, answer: &wire::HeartbeatResponse) -> Delivered {
        let sent = self.pending.take();
        let first = self.delivered == 0;
        self.delivered += 1;
        let with_report = sent.as_ref().is_some_and(|sent| sent.hardware_report.is_some());
        if with_report {
            self.wants_report = false;
        }
        self.wants_report |= answer.wants_hardware_report;
        self.ordered = answer.release_order.is_some();
        if let Some(sent) = sent {
            if sent.installation_report.is_some() {
                self.installation = None;
            }
            self.cluster = sent.cluster_report.or(self.cluster.take());
            self.release = sent.release_report.or(self.release.take());
        }
        let refused_installation = answer
            .installation_request
            .as_ref()
            .map(|request| request.generation)
            .filter(|generation| self.refused_generations.insert(*generation));
        if let Some(generation) = refused_installation {
            self.installation = Some(wire::InstallationReport {
                generation,
                result: Some(wire::installation_report::Result::Failure(wire::InstallationFailure {
                    error: "this release of the role server cannot install operating systems".to_owned(),
                })),
            });
        }
        Delivered { first, with_report, refused_installation }
    }

    /// Notes that the pending heartbeat was not taken.
    ///
    /// Most failures leave it pending. A server that has a newer one, or finds
    /// something malformed, would say so again.
    pub fn refused(&mut self, code: Code) {
        match code {
            Code::FailedPrecondition => self.pending = None,
            Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted => {
                let carried = self.pending.take().is_some_and(|sent| sent.hardware_report.is_some());
                self.set_aside = carried;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn conversation() -> Conversation {
        Conversation::new(Speaker {
            machine_id: MachineId::generate(),
            boot_id: Uuid::new_v4().to_string(),
            incarnation: Uuid::new_v4(),
            agent_version: "1.2.3".to_owned(),
            access_fence: 4,
            brings_logs: false,
        })
    }

    fn none() -> wire::ClusterReport {
        wire::ClusterReport::default()
    }

    fn satisfied() -> wire::HeartbeatResponse {
        wire::HeartbeatResponse::default()
    }

    fn curious() -> wire::HeartbeatResponse {
        wire::HeartbeatResponse { wants_hardware_report: true, ..satisfied() }
    }

    #[test]
    fn release_is_said_with_the_hardware_and_when_it_is_another() {
        let mut talk = conversation();
        let release = |generation| Some(wire::ReleaseReport { generation, ..Default::default() });
        let taken = |talk: &mut Conversation| {
            talk.answered(&wire::HeartbeatResponse::default());
        };
        assert_eq!(talk.compose(1000, None, none(), release(0)).release_report, None, "the first is empty");
        taken(&mut talk);
        assert_eq!(talk.compose(2000, None, none(), release(0)).release_report, release(0));
        assert_eq!(talk.compose(3000, None, none(), release(0)).release_report, release(0), "nobody took it");
        taken(&mut talk);
        assert_eq!(talk.compose(4000, None, none(), release(0)).release_report, None, "it is known");
        taken(&mut talk);
        let report = Some(HardwareReport::default());
        assert_eq!(talk.compose(5000, report, none(), release(0)).release_report, release(0));
        taken(&mut talk);
        assert_eq!(talk.compose(6000, None, none(), release(1)).release_report, release(1));
        taken(&mut talk);
        assert_eq!(talk.compose(7000, None, none(), None).release_report, None);
        assert!(!talk.is_ordered());
        let order = Some(wire::ReleaseOrder::default());
        talk.answered(&wire::HeartbeatResponse { release_order: order, ..Default::default() });
        assert!(talk.is_ordered());
    }

    #[test]
    fn second_heartbeat_carries_the_report_and_later_ones_only_when_asked() {
        let mut talk = conversation();
        assert!(!talk.wants_report());
        talk.compose(1000, None, none(), None);
        assert!(talk.answered(&curious()).first);
        assert!(talk.wants_report());
        talk.compose(2000, Some(HardwareReport::default()), none(), None);
        assert_eq!(
            talk.answered(&satisfied()),
            Delivered { first: false, with_report: true, refused_installation: None }
        );
        assert!(!talk.wants_report());
        talk.compose(3000, None, none(), None);
        talk.answered(&curious());
        assert!(talk.wants_report());
    }

    #[test]
    fn second_heartbeat_carries_the_report_even_when_nobody_asks() {
        let mut talk = conversation();
        talk.compose(1000, None, none(), None);
        talk.answered(&satisfied());
        assert!(talk.wants_report());
    }

    #[test]
    fn retry_is_the_same_heartbeat_until_it_is_an_interval_old() {
        let mut talk = conversation();
        let sent = talk.compose(1000, None, none(), None).clone();
        talk.refused(Code::Unavailable);
        assert_eq!(talk.pending(30_999, INTERVAL), Some(&sent));
        assert_eq!(talk.pending(31_000, INTERVAL), None);
        assert_eq!(talk.compose(31_000, None, none(), None).seq, 31_000);
    }

    #[test]
    fn seq_grows_even_when_the_clock_stands_still() {
        let mut talk = conversation();
        assert_eq!(talk.compose(1000, None, none(), None).seq, 1000);
        talk.answered(&satisfied());
        assert_eq!(talk.compose(1000, None, none(), None).seq, 1001);
        talk.answered(&satisfied());
        assert_eq!(talk.compose(500, None, none(), None).seq, 1002);
    }

    #[test]
    fn older_heartbeat_is_made_anew() {
        let mut talk = conversation();
        talk.compose(1000, None, none(), None);
        talk.refused(Code::FailedPrecondition);
        assert_eq!(talk.pending(1000, INTERVAL), None);
        assert_eq!(talk.compose(1000, None, none(), None).seq, 1001);
    }

    #[test]
    fn refused_report_does_not_silence_the_machine() {
        let mut talk = conversation();
        talk.compose(1000, None, none(), None);
        talk.answered(&curious());
        talk.compose(2000, Some(HardwareReport::default()), none(), None);
        talk.refused(Code::InvalidArgument);
        assert!(!talk.wants_report(), "the next heartbeat goes without");
        talk.compose(3000, None, none(), None);
        talk.answered(&curious());
        assert!(talk.wants_report(), "and then it is tried again");
    }

    #[test]
    fn installation_is_refused_once_per_generation_and_never_reported_done() {
        let asks = |generation| wire::HeartbeatResponse {
            installation_request: Some(wire::InstallationRequest { generation, ..Default::default() }),
            ..satisfied()
        };
        let mut talk = conversation();
        talk.compose(1000, None, none(), None);
        assert_eq!(talk.answered(&asks(3)).refused_installation, Some(3));
        let report = talk.compose(2000, None, none(), None).installation_report.clone().unwrap();
        assert_eq!(report.generation, 3);
        assert!(matches!(report.result, Some(wire::installation_report::Result::Failure(_))));
        assert_eq!(talk.answered(&asks(3)).refused_installation, None);
        assert_eq!(talk.compose(3000, None, none(), None).installation_report, None);
        assert_eq!(talk.answered(&asks(4)).refused_installation, Some(4));
    }

    #[test]
    fn standing_is_said_with_the_hardware_and_after_each_change() {
        let asked = |generation| wire::ClusterReport { generation, ..none() };
        let mut talk = conversation();
        assert_eq!(talk.compose(1000, None, asked(1), None).cluster_report, None, "the first is empty");
        talk.answered(&curious());
        let report = Some(HardwareReport::default());
        assert_eq!(talk.compose(2000, report, none(), None).cluster_report, Some(none()));
        talk.answered(&satisfied());
        assert_eq!(talk.compose(3000, None, none(), None).cluster_report, None, "it is known");
        talk.answered(&satisfied());
        assert_eq!(talk.compose(4000, None, asked(1), None).cluster_report, Some(asked(1)));
        talk.refused(Code::FailedPrecondition);
        assert_eq!(talk.compose(5000, None, asked(1), None).cluster_report, Some(asked(1)), "nobody took it");
        talk.answered(&satisfied());
        assert_eq!(talk.compose(6000, None, asked(1), None).cluster_report, None);
        talk.answered(&satisfied());
        assert_eq!(talk.compose(7000, None, none(), None).cluster_report, Some(none()), "its disk was lost");
    }
}
