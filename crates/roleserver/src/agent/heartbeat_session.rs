//! Build heartbeats, and remember which fields a server has acknowledged (pure).
//!
//! A heartbeat is built once and sent until it is acknowledged. An attempt whose response was lost is repeated with the
//! same `seq`, so the server can distinguish it from a new one and respond in the same way. But a heartbeat means "I
//! live *now*": one that could not be delivered for a whole interval is dropped, and a new one with a new `seq` takes
//! over its content.
//!
//! The first heartbeat of an incarnation is empty, so that nothing (a disk that responds slowly, a report that is too
//! large) keeps a machine from showing that it lives. The second carries the hardware report if it was read in time,
//! and so does every one after a response that requests it. A report that the server rejects as malformed is left out
//! of one heartbeat for the same reason.

use std::collections::BTreeSet;
use std::time::Duration;

use model::ids::MachineId;
use proto::agent::v1 as wire;
use proto::hardware::v1::HardwareReport;
use tonic::Code;
use uuid::Uuid;

/// What every heartbeat of one incarnation has in common.
#[derive(Clone, Debug)]
pub struct HeartbeatHeader {
    /// The identity of the machine in the database.
    pub machine_id: MachineId,
    /// The id of the running boot.
    pub boot_id: String,
    /// The id of this start of the agent.
    pub incarnation: Uuid,
    /// Version of the agent program.
    pub agent_version: String,
    /// Highest fence of the access lane that enrolled the machine.
    pub access_fence: i64,
    /// Whether the agent uploads logs on request.
    pub uploads_logs: bool,
}

/// The state between two heartbeats.
#[derive(Debug)]
pub struct HeartbeatSession {
    header: HeartbeatHeader,
    pending: Option<wire::HeartbeatRequest>,
    last_seq: u64,
    ack_count: u64,
    report_requested: bool,
    /// The next heartbeat has no report, even if one is requested.
    skip_report_once: bool,
    installation: Option<wire::InstallationReport>,
    rejected_generations: BTreeSet<i64>,
    /// The cluster report that a shepherd acknowledged last.
    acked_cluster: Option<wire::ClusterReport>,
    /// The release report that a shepherd acknowledged last.
    acked_release: Option<wire::ReleaseReport>,
    /// Whether another release is ordered.
    release_ordered: bool,
}

/// What a response changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatAck {
    /// Whether this was the first acknowledgement of this incarnation.
    pub first: bool,
    /// Whether the heartbeat carried a hardware report, which is durable now.
    pub with_report: bool,
    /// Generation of a requested installation that this role server cannot do; set once for each generation.
    pub rejected_installation: Option<i64>,
}

impl HeartbeatSession {
    /// Begins the session of one incarnation.
    #[must_use]
    pub const fn new(header: HeartbeatHeader) -> Self {
        Self {
            header,
            pending: None,
            last_seq: 0,
            ack_count: 0,
            report_requested: true,
            skip_report_once: false,
            installation: None,
            rejected_generations: BTreeSet::new(),
            acked_cluster: None,
            acked_release: None,
            release_ordered: false,
        }
    }

    /// Whether the next heartbeat should carry a hardware report.
    #[must_use]
    pub const fn should_send_report(&self) -> bool {
        self.ack_count > 0 && self.report_requested && !self.skip_report_once
    }

    /// The pending heartbeat that should be sent again unchanged; `None` if there is none or it is too old.
    #[must_use]
    pub fn pending(&self, boot_milliseconds: u64, interval: Duration) -> Option<&wire::HeartbeatRequest> {
        let pending = self.pending.as_ref()?;
        let age = Duration::from_millis(boot_milliseconds.saturating_sub(pending.seq));
        (age < interval).then_some(pending)
    }

    /// Builds a new heartbeat, dropping a pending one.
    ///
    /// The cluster report is sent when it has changed, and with the hardware report: so a machine without a cluster
    /// sends an empty one once.
    pub fn build_heartbeat(
        &mut self,
        boot_milliseconds: u64,
        report: Option<HardwareReport>,
        cluster: wire::ClusterReport,
        release: Option<wire::ReleaseReport>,
    ) -> &wire::HeartbeatRequest {
        let release = release.filter(|release| report.is_some() || self.is_release_changed(release));
        let cluster = (report.is_some() || self.is_cluster_changed(&cluster)).then_some(cluster);
        self.last_seq = boot_milliseconds.max(self.last_seq + 1);
        self.skip_report_once = false;
        self.pending.insert(wire::HeartbeatRequest {
            machine_id: self.header.machine_id.to_string(),
            boot_id: self.header.boot_id.clone(),
            incarnation: self.header.incarnation.to_string(),
            seq: self.last_seq,
            agent_version: self.header.agent_version.clone(),
            hardware_report: report,
            installation_report: self.installation.clone(),
            access_fence: self.header.access_fence,
            cluster_report: cluster,
            release_report: release,
            supports_log_upload: self.header.uploads_logs,
        })
    }

    /// Whether this cluster report is worth a heartbeat: no shepherd has acknowledged it yet.
    #[must_use]
    pub fn is_cluster_changed(&self, cluster: &wire::ClusterReport) -> bool {
        let unheard = self.acked_cluster.is_none() && *cluster == wire::ClusterReport::default();
        self.ack_count > 0 && !unheard && self.acked_cluster.as_ref() != Some(cluster)
    }

    /// Whether this release report is worth a heartbeat: no shepherd has acknowledged it yet.
    #[must_use]
    pub fn is_release_changed(&self, release: &wire::ReleaseReport) -> bool {
        self.ack_count > 0 && self.acked_release.as_ref() != Some(release)
    }

    /// Whether another release is ordered for this machine.
    #[must_use]
    pub const fn is_release_ordered(&self) -> bool {
        self.release_ordered
    }

    /// Whether the last acknowledged cluster report shows a cluster.
    #[must_use]
    pub fn is_in_cluster(&self) -> bool {
        self.acked_cluster.as_ref().is_some_and(|known| *known != wire::ClusterReport::default())
    }

    /// Records that the pending heartbeat is durable.
    pub fn record_ack(&mut self, answer: &wire::HeartbeatResponse) -> HeartbeatAck {
        let sent = self.pending.take();
        let first = self.ack_count == 0;
        self.ack_count += 1;
        let with_report = sent.as_ref().is_some_and(|sent| sent.hardware_report.is_some());
        if with_report {
            self.report_requested = false;
        }
        self.report_requested |= answer.hardware_report_requested;
        self.release_ordered = answer.release_order.is_some();
        if let Some(sent) = sent {
            if sent.installation_report.is_some() {
                self.installation = None;
            }
            self.acked_cluster = sent.cluster_report.or(self.acked_cluster.take());
            self.acked_release = sent.release_report.or(self.acked_release.take());
        }
        let refused_installation = answer
            .installation_request
            .as_ref()
            .map(|request| request.generation)
            .filter(|generation| self.rejected_generations.insert(*generation));
        if let Some(generation) = refused_installation {
            self.installation = Some(wire::InstallationReport {
                generation,
                result: Some(wire::installation_report::Result::Failure(wire::InstallationFailure {
                    error: "installing an operating system is not available in this release".to_owned(),
                })),
            });
        }
        HeartbeatAck { first, with_report, rejected_installation: refused_installation }
    }

    /// Records that the pending heartbeat was rejected.
    ///
    /// Most failures leave it pending. A server that has a newer one, or finds something malformed, would reject it
    /// again.
    pub fn record_failure(&mut self, code: Code) {
        match code {
            Code::FailedPrecondition => self.pending = None,
            Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted => {
                let carried = self.pending.take().is_some_and(|sent| sent.hardware_report.is_some());
                self.skip_report_once = carried;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn session() -> HeartbeatSession {
        HeartbeatSession::new(HeartbeatHeader {
            machine_id: MachineId::generate(),
            boot_id: Uuid::new_v4().to_string(),
            incarnation: Uuid::new_v4(),
            agent_version: "1.2.3".to_owned(),
            access_fence: 4,
            uploads_logs: false,
        })
    }

    fn none() -> wire::ClusterReport {
        wire::ClusterReport::default()
    }

    fn satisfied() -> wire::HeartbeatResponse {
        wire::HeartbeatResponse::default()
    }

    fn requesting_hardware() -> wire::HeartbeatResponse {
        wire::HeartbeatResponse { hardware_report_requested: true, ..satisfied() }
    }

    #[test]
    fn release_is_sent_with_the_hardware_and_when_it_changes() {
        let mut talk = session();
        let release = |generation| Some(wire::ReleaseReport { generation, ..Default::default() });
        let taken = |talk: &mut HeartbeatSession| {
            talk.record_ack(&wire::HeartbeatResponse::default());
        };
        assert_eq!(
            talk.build_heartbeat(1000, None, none(), release(0)).release_report,
            None,
            "the first is empty"
        );
        taken(&mut talk);
        assert_eq!(talk.build_heartbeat(2000, None, none(), release(0)).release_report, release(0));
        assert_eq!(
            talk.build_heartbeat(3000, None, none(), release(0)).release_report,
            release(0),
            "nobody took it"
        );
        taken(&mut talk);
        assert_eq!(talk.build_heartbeat(4000, None, none(), release(0)).release_report, None, "it is known");
        taken(&mut talk);
        let report = Some(HardwareReport::default());
        assert_eq!(talk.build_heartbeat(5000, report, none(), release(0)).release_report, release(0));
        taken(&mut talk);
        assert_eq!(talk.build_heartbeat(6000, None, none(), release(1)).release_report, release(1));
        taken(&mut talk);
        assert_eq!(talk.build_heartbeat(7000, None, none(), None).release_report, None);
        assert!(!talk.is_release_ordered());
        let order = Some(wire::ReleaseOrder::default());
        talk.record_ack(&wire::HeartbeatResponse { release_order: order, ..Default::default() });
        assert!(talk.is_release_ordered());
    }

    #[test]
    fn second_heartbeat_carries_the_report_and_later_ones_only_when_requested() {
        let mut talk = session();
        assert!(!talk.should_send_report());
        talk.build_heartbeat(1000, None, none(), None);
        assert!(talk.record_ack(&requesting_hardware()).first);
        assert!(talk.should_send_report());
        talk.build_heartbeat(2000, Some(HardwareReport::default()), none(), None);
        assert_eq!(
            talk.record_ack(&satisfied()),
            HeartbeatAck { first: false, with_report: true, rejected_installation: None }
        );
        assert!(!talk.should_send_report());
        talk.build_heartbeat(3000, None, none(), None);
        talk.record_ack(&requesting_hardware());
        assert!(talk.should_send_report());
    }

    #[test]
    fn second_heartbeat_carries_the_report_even_when_nobody_asks() {
        let mut talk = session();
        talk.build_heartbeat(1000, None, none(), None);
        talk.record_ack(&satisfied());
        assert!(talk.should_send_report());
    }

    #[test]
    fn retry_is_the_same_heartbeat_until_it_is_an_interval_old() {
        let mut talk = session();
        let sent = talk.build_heartbeat(1000, None, none(), None).clone();
        talk.record_failure(Code::Unavailable);
        assert_eq!(talk.pending(30_999, INTERVAL), Some(&sent));
        assert_eq!(talk.pending(31_000, INTERVAL), None);
        assert_eq!(talk.build_heartbeat(31_000, None, none(), None).seq, 31_000);
    }

    #[test]
    fn seq_grows_even_when_the_clock_stands_still() {
        let mut talk = session();
        assert_eq!(talk.build_heartbeat(1000, None, none(), None).seq, 1000);
        talk.record_ack(&satisfied());
        assert_eq!(talk.build_heartbeat(1000, None, none(), None).seq, 1001);
        talk.record_ack(&satisfied());
        assert_eq!(talk.build_heartbeat(500, None, none(), None).seq, 1002);
    }

    #[test]
    fn outdated_heartbeat_is_rebuilt() {
        let mut talk = session();
        talk.build_heartbeat(1000, None, none(), None);
        talk.record_failure(Code::FailedPrecondition);
        assert_eq!(talk.pending(1000, INTERVAL), None);
        assert_eq!(talk.build_heartbeat(1000, None, none(), None).seq, 1001);
    }

    #[test]
    fn refused_report_does_not_silence_the_machine() {
        let mut talk = session();
        talk.build_heartbeat(1000, None, none(), None);
        talk.record_ack(&requesting_hardware());
        talk.build_heartbeat(2000, Some(HardwareReport::default()), none(), None);
        talk.record_failure(Code::InvalidArgument);
        assert!(!talk.should_send_report(), "the next heartbeat goes without");
        talk.build_heartbeat(3000, None, none(), None);
        talk.record_ack(&requesting_hardware());
        assert!(talk.should_send_report(), "and then it is tried again");
    }

    #[test]
    fn installation_is_refused_once_per_generation_and_never_reported_done() {
        let asks = |generation| wire::HeartbeatResponse {
            installation_request: Some(wire::InstallationRequest { generation, ..Default::default() }),
            ..satisfied()
        };
        let mut talk = session();
        talk.build_heartbeat(1000, None, none(), None);
        assert_eq!(talk.record_ack(&asks(3)).rejected_installation, Some(3));
        let report = talk.build_heartbeat(2000, None, none(), None).installation_report.clone().unwrap();
        assert_eq!(report.generation, 3);
        assert!(matches!(report.result, Some(wire::installation_report::Result::Failure(_))));
        assert_eq!(talk.record_ack(&asks(3)).rejected_installation, None);
        assert_eq!(talk.build_heartbeat(3000, None, none(), None).installation_report, None);
        assert_eq!(talk.record_ack(&asks(4)).rejected_installation, Some(4));
    }

    #[test]
    fn cluster_report_is_sent_with_the_hardware_and_after_changes() {
        let requested = |generation| wire::ClusterReport { generation, ..none() };
        let mut talk = session();
        assert_eq!(
            talk.build_heartbeat(1000, None, requested(1), None).cluster_report,
            None,
            "the first is empty"
        );
        talk.record_ack(&requesting_hardware());
        let report = Some(HardwareReport::default());
        assert_eq!(talk.build_heartbeat(2000, report, none(), None).cluster_report, Some(none()));
        talk.record_ack(&satisfied());
        assert_eq!(talk.build_heartbeat(3000, None, none(), None).cluster_report, None, "it is known");
        talk.record_ack(&satisfied());
        assert_eq!(talk.build_heartbeat(4000, None, requested(1), None).cluster_report, Some(requested(1)));
        talk.record_failure(Code::FailedPrecondition);
        assert_eq!(
            talk.build_heartbeat(5000, None, requested(1), None).cluster_report,
            Some(requested(1)),
            "nobody took it"
        );
        talk.record_ack(&satisfied());
        assert_eq!(talk.build_heartbeat(6000, None, requested(1), None).cluster_report, None);
        talk.record_ack(&satisfied());
        assert_eq!(
            talk.build_heartbeat(7000, None, none(), None).cluster_report,
            Some(none()),
            "its disk was lost"
        );
    }
}
