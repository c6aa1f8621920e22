//! Shepherds, providers, and the policy of the fleet.

use crate::adoption::NotAdopted;
use crate::issues::tests::cases::Case;
use crate::issues::tests::*;
use crate::machine_view::EngagedBrake;

pub(super) const CASES: &[Case] = &[
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
        "the limit of a provider leaves out machines",
        |e| e.providers[0].not_adopted = Some(NotAdopted { machines: 5, limit: 50 }),
        &[("machines-not-adopted", "provider rack-a")],
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
        "a shepherd that refuses its certificate",
        |e| e.sessions[0].file_refused = Some("what a file has now is not used".into()),
        &[("file-refused", "host a")],
    ),
    ("a pause of a moment", |e| e.pauses = vec![paused(NOW - 3599)], &[]),
    ("a pause of an hour", |e| e.pauses = vec![paused(NOW - 3600)], &[("loop-paused", "provider rack-a")]),
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
