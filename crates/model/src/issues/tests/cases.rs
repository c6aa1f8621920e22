//! Cases: a change of the healthy inputs, and the issues that follow.

use super::*;
use crate::cluster::authority_rotation::ANNOUNCED_REPLACEMENTS;
use crate::cluster::kubernetes::ObjectConflict;
use crate::cluster::state::MAX_ETCD_BYTES;
use crate::database_durability::DurabilityFault;
use crate::facts::Quarantine;
use crate::host_finding::{HostFinding, HostFindingKind};
use crate::machine_view::EngagedBrake;
use crate::unknown_fence::UnknownFence;

/// A case: a change of the healthy inputs, and the issues that follow from it, with their subjects.
type Case = (&'static str, fn(&mut IssueInputs), &'static [(&'static str, &'static str)]);

pub(super) const CASES: &[Case] = &[
    ("all is well", |_| {}, &[]),
    (
        "silent",
        |e| e.machines[0].facts.heartbeat = Some(heartbeat(NOW - 600)),
        &[("silent-agent", "rack-a/1")],
    ),
    (
        "a cluster without a snapshot",
        |e| e.clusters.push(cluster(NOW - 3 * 3600, None)),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    ("a young cluster without a snapshot", |e| e.clusters.push(cluster(NOW - 3 * 3600 + 1, None)), &[]),
    (
        "a cluster with an old snapshot",
        |e| e.clusters.push(cluster(NOW - 90_000, Some(NOW - 3 * 3600))),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    (
        "a cluster with a young snapshot",
        |e| e.clusters.push(cluster(NOW - 90_000, Some(NOW - 3 * 3600 + 1))),
        &[],
    ),
    (
        "a cluster with young snapshots that have no objects",
        |e| e.clusters.push(with_kubernetes(NOW - 3 * 3600, Some(NOW - 2), None)),
        &[("cluster-image-old", "cluster ams")],
    ),
    (
        "a cluster with an old image",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 2), Some(NOW - 3 * 3600))),
        &[("cluster-image-old", "cluster ams")],
    ),
    (
        "a cluster with a young image",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 2), Some(NOW - 3 * 3600 + 1))),
        &[],
    ),
    (
        "a cluster that has Kubernetes for a while",
        |e| e.clusters.push(with_kubernetes(NOW - 3 * 3600 + 1, Some(NOW - 2), None)),
        &[],
    ),
    (
        "a cluster with Kubernetes without young snapshots",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 3 * 3600), None)),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    (
        "a cluster that refuses every key",
        |e| {
            let refused = Some(at(NOW - 1));
            e.clusters
                .push(ClusterIssueInputs { keys_rejected_since: refused, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-key-refused", "cluster ams")],
    ),
    (
        "an etcd that is nearly full",
        |e| {
            let size = Some(ByteSize(MAX_ETCD_BYTES * 4 / 5 + 1));
            e.clusters.push(ClusterIssueInputs { etcd_bytes: size, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-etcd-large", "cluster ams")],
    ),
    (
        "an etcd that is full",
        |e| {
            let since = Some(at(NOW));
            e.clusters.push(ClusterIssueInputs { etcd_full_since: since, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-etcd-full", "cluster ams")],
    ),
    (
        "an authority that can still be replaced often",
        |e| {
            let count = ANNOUNCED_REPLACEMENTS - 1;
            e.clusters.push(ClusterIssueInputs {
                authority_replacements: count,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[],
    ),
    (
        "an authority that was replaced too often",
        |e| {
            let count = ANNOUNCED_REPLACEMENTS;
            e.clusters.push(ClusterIssueInputs {
                authority_replacements: count,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[("authority-replacements", "cluster ams")],
    ),
    (
        "an etcd that has room",
        |e| {
            let size = Some(ByteSize(MAX_ETCD_BYTES * 4 / 5));
            e.clusters.push(ClusterIssueInputs { etcd_bytes: size, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[],
    ),
    ("an authority that is replaced", |e| e.clusters.push(rotating_cluster(None)), &[]),
    (
        "an authority that is replaced while a curator is elected",
        |e| e.clusters.push(rotating_cluster(Some(NOW - 119))),
        &[],
    ),
    (
        "an authority that is not replaced any further",
        |e| e.clusters.push(rotating_cluster(Some(NOW - 120))),
        &[("authority-rotation-held", "cluster ams")],
    ),
    ("a component that is well", |e| e.kubernetes.push(kubernetes("healthy", 0)), &[]),
    ("a component that is unwell for a while", |e| e.kubernetes.push(kubernetes("starting", NOW - 599)), &[]),
    (
        "a component that is unwell for long",
        |e| e.kubernetes.push(kubernetes("backing off", NOW - 600)),
        &[("kubernetes-component-unwell", "cluster ams")],
    ),
    ("keys that are replaced", |e| e.kubernetes.push(rotating(NOW - 899, &["node-1"])), &[]),
    ("keys that wait for their end", |e| e.kubernetes.push(rotating(NOW - 90_000, &[])), &[]),
    (
        "keys that a node holds up",
        |e| e.kubernetes.push(rotating(NOW - 900, &["node-1"])),
        &[("kubernetes-rotation-held", "cluster ams")],
    ),
    (
        "keys that reach one node after the other",
        |e| {
            let mut rotating = rotating(NOW - 9000, &["node-1", "node-2"]);
            rotating.rotations[0].notified_at = Some(at(NOW - 899));
            e.kubernetes.push(rotating);
        },
        &[],
    ),
    (
        "keys that the node notified last holds up",
        |e| {
            let mut rotating = rotating(NOW - 9000, &["node-1", "node-2"]);
            rotating.rotations[0].notified_at = Some(at(NOW - 900));
            e.kubernetes.push(rotating);
        },
        &[("kubernetes-rotation-held", "cluster ams")],
    ),
    (
        "an object of somebody else",
        |e| {
            let mut clashing = kubernetes("healthy", 0);
            clashing.nodes[0].kubernetes.conflicts = vec![ObjectConflict {
                kind: "Role".into(),
                name: "a".into(),
                message: "it has no label".into(),
            }];
            e.kubernetes.push(clashing);
        },
        &[("kubernetes-object-clash", "cluster ams")],
    ),
    ("not yet silent", |e| e.machines[0].facts.heartbeat = Some(heartbeat(NOW - 599)), &[]),
    (
        "being brought back",
        |e| {
            e.machines[0].facts.recovery = Some(Recovery {
                started_at: at(900),
                rung: 0,
                last_action: None,
                attempts: 0,
                next_check_at: at(901),
                note: "tried".into(),
                obstacle: None,
            });
        },
        &[("silent-agent", "rack-a/1")],
    ),
    (
        "being retired, and everything else wrong with it",
        |e| {
            e.machines[0].facts.heartbeat = None;
            e.machines[0].facts.needs_human = Some(needs_human(Obstacle::LoginRefused));
            e.machines[0].lost_sessions = 9;
            e.machines[0].serial_number = Some("S200".into());
            e.machines[0].facts.retirement = Some(retiring(NOW - 3599));
        },
        &[],
    ),
    (
        "being retired, and it has seen newer orders",
        |e| {
            e.machines[0].unknown_fence = Some(UnknownFence { reported_at: at(1), fence: 20 });
            e.machines[0].facts.retirement = Some(retiring(NOW));
        },
        &[("newer-fence", "rack-a/1")],
    ),
    (
        "retired, and it had seen newer orders",
        |e| {
            e.machines[0].unknown_fence = Some(UnknownFence { reported_at: at(1), fence: 20 });
            let over = Retirement { finished_at: Some(at(2)), ..retiring(1) };
            e.machines[0].facts.retirement = Some(over);
        },
        &[],
    ),
    (
        "an hour on its way out",
        |e| e.machines[0].facts.retirement = Some(retiring(NOW - 3600)),
        &[("retirement-stuck", "rack-a/1")],
    ),
    (
        "to be wiped, which nobody can",
        |e| e.machines[0].facts.retirement = Some(Retirement { wipe: true, ..retiring(NOW) }),
        &[("retirement-stuck", "rack-a/1")],
    ),
    (
        "retired, and not listed any more",
        |e| e.machines[0].facts.retirement = Some(Retirement { finished_at: Some(at(2)), ..retiring(1) }),
        &[],
    ),
    (
        "retired, and listed",
        |e| {
            let over = Retirement { finished_at: Some(at(2)), listed_since: Some(at(3)), ..retiring(1) };
            e.machines[0].facts.retirement = Some(over);
        },
        &[("retired-listed", "rack-a/1")],
    ),
    (
        "left to a person",
        |e| e.machines[0].facts.needs_human = Some(needs_human(Obstacle::LadderExhausted)),
        &[("needs-human", "rack-a/1")],
    ),
    (
        "refused as an older database",
        |e| e.machines[0].facts.needs_human = Some(needs_human(Obstacle::StaleFence)),
        &[("newer-fence", "rack-a/1")],
    ),
    (
        "report of a newer fence",
        |e| e.machines[0].unknown_fence = Some(UnknownFence { reported_at: at(900), fence: 17 }),
        &[("newer-fence", "rack-a/1")],
    ),
    (
        "report of a newer fence, and left to a person for it",
        |e| {
            e.machines[0].unknown_fence = Some(UnknownFence { reported_at: at(900), fence: 17 });
            e.machines[0].facts.needs_human = Some(needs_human(Obstacle::StaleFence));
        },
        &[("newer-fence", "rack-a/1")],
    ),
    (
        "another host key",
        |e| {
            e.machines[0].facts.needs_human = Some(needs_human(Obstacle::HostKeyChanged));
            e.machines[0].host_key_rejected_at = Some(at(900));
        },
        &[("host-key-changed", "rack-a/1")],
    ),
    (
        "another host key once, and the right one since",
        |e| e.machines[0].facts.needs_human = Some(needs_human(Obstacle::HostKeyChanged)),
        &[("needs-human", "rack-a/1")],
    ),
    (
        "a problem of its node that it has reported for a moment",
        |e| e.machines[0].node_problem = Some(("etcd would end with the role server".into(), at(NOW - 119))),
        &[],
    ),
    (
        "a problem of its node",
        |e| e.machines[0].node_problem = Some(("etcd would end with the role server".into(), at(NOW - 120))),
        &[("node-problem", "rack-a/1")],
    ),
    ("rebooted three times", |e| e.machines[1].recent.unordered_boots = 3, &[("crash-loop", "rack-a/2")]),
    (
        "quarantined",
        |e| {
            e.machines[0].facts.quarantine =
                Some(Quarantine { since: at(900), reason: "two of them".into() });
        },
        &[("provider-discrepancy", "rack-a/1")],
    ),
    (
        "lost by its provider",
        |e| e.machines[0].facts.provider_record.as_mut().unwrap().status = ProviderStatus::Missing,
        &[("provider-discrepancy", "rack-a/1")],
    ),
    (
        "a database with a published fault",
        |e| e.database_version = Some(postgres_version(140_003)),
        &[("version-fault", "the database")],
    ),
    (
        "a database that is not supported",
        |e| e.database_version = Some(postgres_version(190_000)),
        &[("version-fault", "the database")],
    ),
    ("a database that is no PostgreSQL", |e| e.database_version = None, &[]),
    (
        "a Kubernetes with a published fault",
        |e| {
            let mut cluster = kubernetes("healthy", 0);
            cluster.nodes[0].kubernetes.version = "1.22.1".into();
            e.kubernetes.push(cluster);
        },
        &[("version-fault", "cluster ams")],
    ),
    ("failed twice", |e| fail(e, 2), &[]),
    (
        "its first takeover failed",
        |e| {
            fail(e, 1);
            let facts = &mut e.machines[0].facts;
            let failed = facts.backoffs.remove(&Process::Recovery).unwrap();
            facts.backoffs.insert(Process::AgentStart, failed);
            (facts.agent_started, facts.heartbeat) = (None, None);
        },
        &[("work-fails", "rack-a/1")],
    ),
    ("failed three times", |e| fail(e, 3), &[("work-fails", "rack-a/1")]),
    ("lost three workers", |e| e.machines[0].lost_sessions = 3, &[("lost-workers", "rack-a/1")]),
    (
        "its unit was edited",
        |e| {
            let message = "the unit file was edited".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::UnitEdited, message });
        },
        &[("agent-unit", "rack-a/1")],
    ),
    (
        "its workloads would end with its agent, and its unit was edited",
        |e| {
            for kind in [HostFindingKind::UnitEdited, HostFindingKind::WorkloadsEndWithAgent] {
                e.machines[0].findings.push(HostFinding { kind, message: kind.to_string() });
            }
        },
        &[("agent-unit", "rack-a/1"), ("workloads-end-with-agent", "rack-a/1")],
    ),
    (
        "its pods keep their cgroup driver",
        |e| {
            let message = "the worker keeps cgroupfs".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::PodCgroups, message });
        },
        &[],
    ),
    (
        "its curator turned connections away",
        |e| {
            let (kind, message) = (HostFindingKind::ConnectionsTurnedAway, "its curator had too many".into());
            e.machines[0].findings.push(HostFinding { kind, message });
        },
        &[("connections-turned-away", "rack-a/1")],
    ),
    (
        "a file system of it is nearly full",
        |e| {
            let message = "the file system of /var/lib/roleserver is nearly full".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::StorageLow, message });
        },
        &[("storage-low", "rack-a/1")],
    ),
    (
        "it has pinned no signing keys",
        |e| {
            let message = "it has pinned no signing keys".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::UnpinnedKeys, message });
        },
        &[("unpinned-keys", "rack-a/1")],
    ),
    (
        "it refused a release",
        |e| {
            let message = "it refused a release: it is not signed".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::ReleaseRefused, message });
        },
        &[("release-refused", "rack-a/1")],
    ),
    (
        "the agent with these findings was given up",
        |e| {
            let message = "the unit file was edited".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::UnitEdited, message });
            e.machines[0].facts.agent_started = None;
        },
        &[],
    ),
    ("drifted", |e| e.machines[0].schedule_mismatch = Some("it says x".into()), &[("drift", "rack-a/1")]),
    (
        "one address",
        |e| e.machines[1].facts.provider_record.as_mut().unwrap().address = Some("192.0.2.1".into()),
        &[("address-conflict", "rack-a/1, rack-a/2")],
    ),
    (
        "one address, two ports",
        |e| {
            let provided = e.machines[1].facts.provider_record.as_mut().unwrap();
            (provided.address, provided.ssh_port) = (Some("192.0.2.1".into()), Some(2222));
        },
        &[],
    ),
    (
        "one key",
        |e| e.machines[1].facts.agent_started.as_mut().unwrap().public_key = vec![1; 32],
        &[("duplicate-key", "rack-a/1, rack-a/2")],
    ),
    (
        "one serial number",
        |e| e.machines[1].serial_number = Some(" S100 ".into()),
        &[("duplicate-serial", "rack-a/1, rack-a/2")],
    ),
    (
        "no serial number",
        |e| e.machines.iter_mut().for_each(|m| m.serial_number = Some("To Be Filled By O.E.M.".into())),
        &[],
    ),
    ("zeros", |e| e.machines.iter_mut().for_each(|m| m.serial_number = Some("0000".into())), &[]),
    ("counted", |e| e.machines.iter_mut().for_each(|m| m.serial_number = Some("1234567890".into())), &[]),
    ("null", |e| e.machines.iter_mut().for_each(|m| m.serial_number = Some("(null string)".into())), &[]),
    (
        "one network address",
        |e| e.machines[1].macs.push("00:00:5e:00:53:01".into()),
        &[("duplicate-mac", "rack-a/1, rack-a/2")],
    ),
    (
        "network addresses made up at boot, and none",
        |e| {
            for machine in &mut e.machines {
                machine.macs =
                    vec!["02:00:00:00:00:01".into(), "00:00:00:00:00:00".into(), "00:11:22:33:44:55".into()];
            }
        },
        &[],
    ),
    ("nobody has a session", |e| e.sessions.clear(), &[("no-shepherd", "all machines")]),
    ("nobody listens", |e| e.listening_since = None, &[("nobody-listens", "all machines")]),
    (
        "nobody listens, and nobody speaks",
        |e| {
            e.listening_since = None;
            e.machines.iter_mut().for_each(|m| (m.facts.agent_started, m.facts.heartbeat) = (None, None));
        },
        &[],
    ),
    (
        "a provider does not answer",
        |e| (e.providers[0].error, e.providers[0].error_at) = (Some("HTTP 503".into()), Some(at(900))),
        &[("provider-fails", "provider rack-a")],
    ),
    (
        "a provider's list lost machines",
        |e| e.providers[0].brake = Some("it lost 4 of 10".into()),
        &[("brake", "provider rack-a")],
    ),
    (
        "recovery is held",
        |e| {
            e.brakes.push(EngagedBrake {
                kind: "recovery".into(),
                scope: "*".into(),
                reason: "brake: 40 of 50".into(),
                engaged_at: at(900),
                confirmed_at: at(NOW),
            });
        },
        &[("brake", "all machines")],
    ),
    ("a budget is nearly used up", |e| disturb(e, 1, 599), &[]),
    ("a budget is used up", |e| disturb(e, 2, 599), &[("budget-exhausted", "reboot")]),
    ("a budget is free again", |e| disturb(e, 2, 600), &[]),
    ("a clock ahead", |e| e.sessions[0].host_clock = Some(at(531)), &[("clock-skew", "host a")]),
    ("a clock behind", |e| e.sessions[0].host_clock = Some(at(469)), &[("clock-skew", "host a")]),
    (
        "a certificate ends in six days",
        |e| e.sessions[0].certificate_expires_at = Some(at(NOW + 6 * 86_400)),
        &[("certificate-ends", "host a")],
    ),
    (
        "the certificate of an API ends in six days",
        |e| {
            e.sessions[0].component = "api".into();
            e.sessions[0].certificate_expires_at = Some(at(NOW + 6 * 86_400));
        },
        &[("certificate-ends", "host a")],
    ),
    (
        "an agent rejected the certificate of a callback server",
        |e| e.sessions[0].certificate_rejected_at = Some(at(NOW - 900)),
        &[("certificate-rejected", "host a")],
    ),
    (
        "an operator rejected the certificate of an API",
        |e| {
            e.sessions[0].component = "api".into();
            e.sessions[0].certificate_rejected_at = Some(at(NOW - 900));
        },
        &[("certificate-rejected", "host a")],
    ),
    (
        "a callback server turned a connection away",
        |e| e.sessions[0].turned_away_at = Some(at(NOW - 900)),
        &[("connections-turned-away", "host a")],
    ),
    (
        "the metrics listener of a shepherd turned a connection away",
        |e| {
            let turned_away_at = Some(at(NOW - 900));
            e.sessions.push(SessionIssueInputs {
                component: "sampler".into(),
                turned_away_at,
                ..session("b")
            });
        },
        &[("connections-turned-away", "host b")],
    ),
    ("five sessions expired", |e| e.expired_sessions[0].count = 5, &[("session-flapping", "updater on a")]),
    (
        "older agents",
        |e| e.machines.iter_mut().for_each(|m| m.agent_version = Some("1.1.0".into())),
        &[("outdated-agent", "rack-a/1, rack-a/2")],
    ),
    (
        "an upgrade half-way",
        |e| {
            e.machines[0].agent_version = Some("1.1.0".into());
            e.sessions.push(SessionIssueInputs { version: Some("1.1.0".into()), ..session("b") });
        },
        &[],
    ),
    (
        "a shepherd with a full disk",
        |e| e.sessions[0].storage_low = Some("the file system of /tmp is full".into()),
        &[("storage-low", "host a")],
    ),
    (
        "a shepherd with many open files",
        |e| e.sessions[0].open_files_low = Some("it has opened many files".into()),
        &[("open-files", "host a")],
    ),
    (
        "a forgotten psql",
        |e| e.storage.as_mut().unwrap().oldest_snapshot = Duration::from_secs(601),
        &[("long-snapshot", "the database")],
    ),
    ("a pause of a moment", |e| e.pauses = vec![paused(NOW - 3599)], &[]),
    ("a pause of an hour", |e| e.pauses = vec![paused(NOW - 3600)], &[("loop-paused", "provider rack-a")]),
    ("dead rows", |e| e.storage.as_mut().unwrap().rows[0].1 = 100_000, &[("dead-rows", "table session")]),
    ("a database without books", |e| e.storage = None, &[]),
    ("a database without limits", |e| e.database_limits = DatabaseLimitInputs::Absent, &[]),
    (
        "limits that cannot be read",
        |e| e.database_limits = DatabaseLimitInputs::Unreadable("permission denied".into()),
        &[("database-limits-unreadable", "the database")],
    ),
    (
        "limits that a busy server does not report",
        |e| e.database_limits = DatabaseLimitInputs::Unanswered("timed out".into()),
        &[("database-limits-unreadable", "the database")],
    ),
    (
        "WAL files that cannot be listed beside a slot that has lost WAL",
        |e| {
            (limits(e).wal, limits(e).wal_failure) = (None, Some("timed out".into()));
            limits(e).slots[0].wal = SlotWal::Lost;
        },
        &[("database-limits-unreadable", "the database"), ("replication-slot", "slot standby")],
    ),
    (
        "a server that loses commits",
        |e| limits(e).durability_fault = Some(DurabilityFault::CommitOff),
        &[("database-durability", "the database")],
    ),
    (
        "a slot that holds much WAL",
        |e| limits(e).slots[0].retained = Some(ByteSize::gibibytes(4)),
        &[("replication-slot", "slot standby")],
    ),
    (
        "a slot that has lost WAL",
        |e| limits(e).slots[0].wal = SlotWal::Lost,
        &[("replication-slot", "slot standby")],
    ),
    (
        "transaction ids that are not freed",
        |e| limits(e).transactions.age = 700_000_000,
        &[("transaction-ids", "database bmdb")],
    ),
    (
        "multixact ids that are not freed",
        |e| limits(e).multixacts.age = 700_000_000,
        &[("transaction-ids", "database bmdb")],
    ),
    ("much WAL", |e| limits(e).wal = Some(ByteSize::gibibytes(4)), &[("wal-retained", "the database")]),
    ("WAL that may not be listed", |e| limits(e).wal = None, &[]),
    (
        "WAL that is not archived",
        |e| limits(e).is_archiving_failing = true,
        &[("wal-retained", "the database")],
    ),
    (
        "unsigned releases are allowed",
        |e| e.policy = Arc::new(Policy { allow_unsigned_releases: true, ..Policy::default() }),
        &[("unsigned-releases", "the fleet")],
    ),
    ("many artefacts", |e| e.artefacts = ByteSize((16 << 30) - 1), &[]),
    (
        "too many artefacts",
        |e| e.artefacts = ByteSize::gibibytes(16),
        &[("artefact-storage", "the database")],
    ),
    ("the two-person rule with three admins", |e| require_two(e, 3), &[]),
    ("the two-person rule with two admins", |e| require_two(e, 2), &[("few-admins", "the two-person rule")]),
    (
        "the two-person rule with a waiting time that is over at once",
        |e| wait_before_approval(e, true, Span::seconds(0)),
        &[("short-waiting-time", "the two-person rule")],
    ),
    (
        "the two-person rule with a short waiting time",
        |e| wait_before_approval(e, true, Span::seconds(3599)),
        &[("short-waiting-time", "the two-person rule")],
    ),
    ("the two-person rule with an hour", |e| wait_before_approval(e, true, Span::hours(1)), &[]),
    ("no waiting time without the rule", |e| wait_before_approval(e, false, Span::seconds(0)), &[]),
    ("one admin without the rule", |e| e.two_person_rule.admins = 1, &[]),
    (
        "the rule is requested",
        |e| e.two_person_rule.requested_by = Some("flags of a".into()),
        &[("few-admins", "the two-person rule")],
    ),
    (
        "the rule was switched off",
        |e| rule_off(e, 30 * 86_400 - 1),
        &[("two-person-rule-off", "the two-person rule")],
    ),
    (
        "the rule was switched off, and is on again",
        |e| {
            require_two(e, 3);
            rule_off(e, 1);
        },
        &[("two-person-rule-off", "the two-person rule")],
    ),
    ("the rule was switched off a month ago", |e| rule_off(e, 30 * 86_400), &[]),
];
