//! Machines.

use crate::facts::Quarantine;
use crate::host_finding::{HostFinding, HostFindingKind};
use crate::issues::tests::cases::Case;
use crate::issues::tests::*;
use crate::provider_status::ProviderStatus;
use crate::unknown_fence::UnknownFence;

pub(super) const CASES: &[Case] = &[
    ("all is well", |_| {}, &[]),
    (
        "silent",
        |e| e.machines[0].facts.heartbeat = Some(heartbeat(NOW - 600)),
        &[("silent-agent", "rack-a/1")],
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
        "it refused a declaration",
        |e| {
            let message = "role web was refused: nobody signed it".into();
            e.machines[0].findings.push(HostFinding { kind: HostFindingKind::DeclarationRefused, message });
        },
        &[("declaration-refused", "rack-a/1")],
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
];
