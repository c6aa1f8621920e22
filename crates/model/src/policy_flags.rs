//! Flags that write the policy.
//!
//! They are the part of the service's flags and configuration that decides for the whole fleet. `shepherdctl plan
//! --diff` shows what they would change.

use std::collections::BTreeMap;

use clap::{Arg, Args, CommandFactory as _, Parser};

use crate::artefact::check_storage_limit;
use crate::byte_size::ByteSize;
use crate::cluster::owner_key::check_rotation_interval;
use crate::configuration_value::{arguments_of_value, claim_key, key_lines, locate_problem};
use crate::policy::{DisruptionKind, MAX_RETAINED_SNAPSHOTS, Policy, Rung};
use crate::process::Process;
use crate::time::Span;
use crate::usage_error::{flag_name, format_usage_error};

/// Flags that write the policy when they are given.
#[derive(Clone, Debug, Default, Args)]
#[command(
    rename_all = "snake_case",
    next_help_heading = "Policy (stored in the database; a flag changes it only if given)"
)]
pub struct PolicyFlags {
    /// Time after which a new agent that has not reported counts as silent. [default: 30m]
    #[arg(long, value_name = "SPAN")]
    pub recovery_first_heartbeat_timeout: Option<Span>,
    /// Time after which an agent without a heartbeat counts as silent. [default: 10m]
    #[arg(long, value_name = "SPAN")]
    pub recovery_silence_timeout: Option<Span>,
    /// How often agents report. [default: 30s]
    #[arg(long, value_name = "SPAN")]
    pub heartbeat_interval: Option<Span>,
    /// Steps of recovery as STEP:DEADLINE:TRIES,… [default: restart-agent:2m:2,reboot:15m:2,power-cycle:20m:2]
    #[arg(long, value_name = "LADDER", value_parser = parse_ladder)]
    pub recovery_ladder: Option<LadderFlag>,
    /// Share of the machines above which the recovery brake engages, if they become silent within its window. [default:
    /// 0.2]
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub recovery_brake_fraction: Option<f64>,
    /// Window of the recovery brake. [default: 10m]
    #[arg(long, value_name = "SPAN")]
    pub recovery_brake_window: Option<Span>,
    /// Wait after the first failure to start an agent. [default: 5m]
    #[arg(long, value_name = "SPAN")]
    pub agent_start_backoff_initial: Option<Span>,
    /// Longest wait after a failure to start an agent. [default: 4h]
    #[arg(long, value_name = "SPAN")]
    pub agent_start_backoff_maximum: Option<Span>,
    /// Interval between queries about a machine without a change at its provider. [default: 30m]
    #[arg(long, value_name = "SPAN")]
    pub update_interval_stable: Option<Span>,
    /// Interval between queries about a machine with an incomplete, unstable or just changed status. [default: 1m]
    #[arg(long, value_name = "SPAN")]
    pub update_interval_unstable: Option<Span>,
    /// Time after which the wipe of a retiring machine is overdue. [default: 4h]
    #[arg(long, value_name = "SPAN")]
    pub retirement_wipe_timeout: Option<Span>,
    /// Time after which the release of a retiring machine to its provider is overdue. [default: 1h]
    #[arg(long, value_name = "SPAN")]
    pub retirement_release_timeout: Option<Span>,
    /// Time limit of a reboot or power order. [default: 30m]
    #[arg(long, value_name = "SPAN")]
    pub power_order_timeout: Option<Span>,
    /// Longest time an outward call may outlive its session. [default: 1m]
    #[arg(long, value_name = "SPAN")]
    pub outward_call_timeout: Option<Span>,
    /// How long history and audit are retained; at least a day. [default: 180d]
    #[arg(long, value_name = "SPAN")]
    pub history_retention: Option<Span>,
    /// Maximum number of machines of one bulk order. [default: 50]
    #[arg(long, value_name = "COUNT")]
    pub order_max_machines: Option<u32>,
    /// Maximum number of machines of all bulk orders within an hour. [default: 200]
    #[arg(long, value_name = "COUNT")]
    pub order_max_machines_per_hour: Option<u32>,
    /// Whether orders beyond these limits, new budgets, waived stages of a retirement, pauses for all providers, new
    /// credentials and certificates for clusters need another admin. True switches that on; false changes nothing.
    /// [default: false]
    #[arg(long, value_name = "TRUTH")]
    pub require_second_admin: Option<bool>,
    /// How long such an order waits for approval, and how long its approval is valid. [default: 1h]
    #[arg(long, value_name = "SPAN")]
    pub approval_ttl: Option<Span>,
    /// How long a new credential approves no order. [default: 1d]
    #[arg(long, value_name = "SPAN")]
    pub approver_waiting_time: Option<Span>,
    /// How often a snapshot of each cluster is taken. [default: 1h]
    #[arg(long, value_name = "SPAN")]
    pub cluster_snapshot_interval: Option<Span>,
    /// How many of a cluster's newest snapshots are kept. [default: 24]
    #[arg(long, value_name = "COUNT")]
    pub cluster_snapshots_retained: Option<u32>,
    /// For how many days at least one snapshot of each day and cluster is kept. [default: 7]
    #[arg(long, value_name = "COUNT")]
    pub cluster_snapshots_retained_daily: Option<u32>,
    /// Age at which the shepherd's key for a cluster is replaced; 0s: only on request. [default: 30d]
    #[arg(long, value_name = "SPAN")]
    pub cluster_key_rotation_interval: Option<Span>,
    /// Maximum size of all artefacts together; they are stored in the database. [default: 20GiB]
    #[arg(long, value_name = "SIZE")]
    pub artefact_storage_limit: Option<ByteSize>,
    /// Whether releases of the role server that nobody signed may be rolled out. An issue shows that. [default: false]
    #[arg(long, value_name = "TRUTH")]
    pub allow_unsigned_releases: Option<bool>,
}

/// The rungs of a ladder. It is a type of its own because clap takes a `Vec` for a repeated flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LadderFlag(pub Vec<Rung>);

fn parse_ladder(text: &str) -> Result<LadderFlag, String> {
    let rung = |part: &str| -> Result<Rung, String> {
        let mut fields = part.split(':');
        let (Some(step), Some(deadline), Some(tries), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(format!(
                "{part:?} is not a step; write STEP:DEADLINE:TRIES, for example reboot:15m:2"
            ));
        };
        Ok(Rung {
            step: step.parse::<DisruptionKind>().map_err(|error| error.to_string())?,
            deadline: deadline.parse::<Span>().map_err(|error| error.to_string())?,
            tries: tries.parse().map_err(|_| format!("{tries:?} is no number of tries"))?,
        })
    };
    text.split(',').map(rung).collect::<Result<Vec<_>, _>>().map(LadderFlag)
}

fn parse_share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| format!("{text:?} is not a share; write a number from 0 to 1"))
}

impl PolicyFlags {
    /// Writes the given flags into a policy.
    pub fn apply(&self, policy: &mut Policy) {
        fn set<T: Clone>(given: Option<&T>, place: &mut T) {
            if let Some(value) = given {
                *place = value.clone();
            }
        }
        set(self.recovery_first_heartbeat_timeout.as_ref(), &mut policy.recovery_first_heartbeat_timeout);
        set(self.recovery_silence_timeout.as_ref(), &mut policy.recovery_silence_timeout);
        set(self.heartbeat_interval.as_ref(), &mut policy.heartbeat_interval);
        set(self.recovery_ladder.as_ref().map(|ladder| &ladder.0), &mut policy.ladder);
        set(self.recovery_brake_fraction.as_ref(), &mut policy.recovery_brake.fraction);
        set(self.recovery_brake_window.as_ref(), &mut policy.recovery_brake.window);
        set(self.update_interval_stable.as_ref(), &mut policy.update_interval_stable);
        set(self.update_interval_unstable.as_ref(), &mut policy.update_interval_unstable);
        set(self.retirement_wipe_timeout.as_ref(), &mut policy.retirement_wipe_timeout);
        set(self.retirement_release_timeout.as_ref(), &mut policy.retirement_release_timeout);
        set(self.power_order_timeout.as_ref(), &mut policy.power_order_timeout);
        set(self.outward_call_timeout.as_ref(), &mut policy.outward_limit);
        set(self.history_retention.as_ref(), &mut policy.history_retention);
        let limits = &mut policy.order_limits;
        set(self.order_max_machines.as_ref(), &mut limits.machines);
        set(self.order_max_machines_per_hour.as_ref(), &mut limits.machines_per_hour);
        // A flag only switches the rule on: who can start a shepherd must not be able to end it.
        policy.two_person_rule.required |= self.require_second_admin == Some(true);
        set(self.approval_ttl.as_ref(), &mut policy.two_person_rule.approval_ttl);
        set(self.approver_waiting_time.as_ref(), &mut policy.approver_waiting_time);
        let snapshots = &mut policy.cluster_snapshots;
        set(self.cluster_snapshot_interval.as_ref(), &mut snapshots.interval);
        set(self.cluster_snapshots_retained.as_ref(), &mut snapshots.newest);
        set(self.cluster_snapshots_retained_daily.as_ref(), &mut snapshots.days);
        set(self.cluster_key_rotation_interval.as_ref(), &mut policy.cluster_key_rotation);
        set(self.artefact_storage_limit.as_ref(), &mut policy.artefact_storage_limit);
        set(self.allow_unsigned_releases.as_ref(), &mut policy.allow_unsigned_releases);
        let mut backoff = policy.backoff_of(Process::AgentStart);
        set(self.agent_start_backoff_initial.as_ref(), &mut backoff.initial);
        set(self.agent_start_backoff_maximum.as_ref(), &mut backoff.maximum);
        policy.backoff.insert(Process::AgentStart, backoff);
    }

    /// Rejects values that would make every healthy machine count as silent, or a loop spin without a pause.
    pub fn validate(&self) -> Result<(), String> {
        let policy = self;
        for (flag, span) in [
            ("--recovery_first_heartbeat_timeout", policy.recovery_first_heartbeat_timeout),
            ("--recovery_silence_timeout", policy.recovery_silence_timeout),
            ("--heartbeat_interval", policy.heartbeat_interval),
            ("--recovery_brake_window", policy.recovery_brake_window),
            ("--agent_start_backoff_initial", policy.agent_start_backoff_initial),
            ("--agent_start_backoff_maximum", policy.agent_start_backoff_maximum),
            ("--update_interval_stable", policy.update_interval_stable),
            ("--update_interval_unstable", policy.update_interval_unstable),
            ("--retirement_wipe_timeout", policy.retirement_wipe_timeout),
            ("--retirement_release_timeout", policy.retirement_release_timeout),
            ("--power_order_timeout", policy.power_order_timeout),
            ("--approval_ttl", policy.approval_ttl),
            ("--approver_waiting_time", policy.approver_waiting_time),
            ("--cluster_snapshot_interval", policy.cluster_snapshot_interval),
        ] {
            if span.is_some_and(|span| span.0.is_zero()) {
                return Err(format!("{flag} 0s leaves no time at all; give for example 1s"));
            }
        }
        if let Some(kept) = policy.history_retention.filter(|kept| *kept < Span::hours(24)) {
            return Err(format!("--history_retention {kept} is too short; give at least 1d"));
        }
        if let Some(every) = policy.cluster_key_rotation_interval {
            check_rotation_interval(every)
                .map_err(|reason| format!("--cluster_key_rotation_interval {reason}"))?;
        }
        if let Some(limit) = policy.artefact_storage_limit {
            check_storage_limit(limit).map_err(|reason| format!("--artefact_storage_limit {reason}"))?;
        }
        for (flag, count, least) in [
            ("--cluster_snapshots_retained", policy.cluster_snapshots_retained, 1),
            ("--cluster_snapshots_retained_daily", policy.cluster_snapshots_retained_daily, 0),
        ] {
            if let Some(count) = count.filter(|count| !(least..=MAX_RETAINED_SNAPSHOTS).contains(count)) {
                return Err(format!(
                    "{flag} {count} cannot be: give a number from {least} to {MAX_RETAINED_SNAPSHOTS}"
                ));
            }
        }
        let pairs = [
            (
                ("--heartbeat_interval", policy.heartbeat_interval),
                ("--recovery_silence_timeout", policy.recovery_silence_timeout),
                "so that every healthy machine would be taken for silent",
            ),
            (
                ("--agent_start_backoff_initial", policy.agent_start_backoff_initial),
                ("--agent_start_backoff_maximum", policy.agent_start_backoff_maximum),
                "so that the first wait would be longer than the longest",
            ),
        ];
        for ((shorter, short), (longer, long), why) in pairs {
            if let (Some(short), Some(long)) = (short, long)
                && short > long
            {
                return Err(format!(
                    "{longer} {long} is shorter than {shorter} {short}, {why}; give a longer {longer}"
                ));
            }
        }
        Ok(())
    }

    /// The part of a configuration file that [`Self::from_configuration`] reads, and nothing else. What the file has
    /// about providers and keys is left out.
    pub fn extract_from_configuration(text: &str) -> Result<String, String> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let known = PolicyCommandLine::command();
        let part: toml::Table =
            table.into_iter().filter(|(key, _)| policy_flag(&known, key).is_some()).collect();
        toml::to_string(&part).map_err(|error| error.to_string())
    }

    /// The policy flags that a configuration file sets, in the format of the file of `shepherd --config`. Other keys
    /// are ignored: they decide for one shepherd, not for the fleet.
    pub fn from_configuration(text: &str) -> Result<Self, String> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let known = PolicyCommandLine::command();
        let lines = key_lines(text);
        let (mut arguments, mut keys) = (Vec::new(), BTreeMap::new());
        for (key, value) in table {
            let Some(flag) = policy_flag(&known, &key) else { continue };
            let read = claim_key(&mut keys, &key).and_then(|_| arguments_of_value(flag, &value));
            arguments.extend(read.map_err(|problem| locate_problem(&lines, &key, &problem))?);
        }
        let line = PolicyCommandLine::try_parse_from(&arguments).map_err(|error| {
            let problem = format_usage_error(&error, &known, &arguments);
            let flag = flag_name(&error).unwrap_or_default();
            let key = keys.get(flag.trim_start_matches('-')).map_or("", String::as_str);
            locate_problem(&lines, key, &problem)
        })?;
        line.policy.validate()?;
        Ok(line.policy)
    }
}

/// The flag of these that a key of a configuration file is.
fn policy_flag<'a>(flags: &'a clap::Command, key: &str) -> Option<&'a Arg> {
    let name = key.replace('-', "_");
    flags.get_arguments().find(|argument| argument.get_id().as_str() == name)
}

/// A command line of policy flags alone.
#[derive(Parser)]
#[command(name = "shepherd", no_binary_name = true)]
struct PolicyCommandLine {
    #[command(flatten)]
    policy: PolicyFlags,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_yields_its_policy_flags() {
        let flags = PolicyFlags::from_configuration(
            "ssh_user = \"root\"\nrecovery-silence_timeout = \"5m\"\nrecovery_brake_fraction = 0.5\n\
             require_second_admin = true\n[[provider]]\nname = \"rack-a\"",
        );
        let flags = flags.unwrap();
        assert_eq!(flags.recovery_silence_timeout, Some(Span::minutes(5)));
        assert_eq!(flags.recovery_brake_fraction, Some(0.5));
        assert_eq!((flags.require_second_admin, flags.approval_ttl), (Some(true), None));
        assert_eq!(flags.heartbeat_interval, None);
        let ladder = |value: &str| {
            let flags = PolicyFlags::from_configuration(&format!("recovery_ladder = {value}")).unwrap();
            flags.recovery_ladder.unwrap()
        };
        let text = "\"restart-agent:20s:1,reboot:15m:2,power-cycle:20m:1\"";
        assert_eq!(ladder(&format!("[{}]", text.replace(',', "\", \""))), ladder(text));
        assert_eq!(ladder(text).0.len(), 3);
        for (wrong, part) in [
            (
                "\nheartbeat_interval = [1]",
                "line 2: heartbeat_interval takes one text in quotes, and this is a list",
            ),
            ("recovery_ladder = []", "line 1: recovery_ladder takes"),
            ("\nheartbeat-interval = \"soon\"", "line 2: --heartbeat_interval: \"soon\""),
            (
                "heartbeat-interval = \"1m\"\nheartbeat_interval = \"2m\"",
                "is the same key as heartbeat-interval",
            ),
            ("heartbeat_interval = \"soon\"", "see `shepherd --help`"),
            ("heartbeat_interval = \"0s\"", "leaves no time"),
            ("heartbeat_interval", "="),
        ] {
            let problem = PolicyFlags::from_configuration(wrong).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn extracted_configuration_has_only_policy_keys() {
        let whole = "ssh_user = \"root\"\nrecovery-silence_timeout = \"5m\"\nrecovery_brake_fraction = 0.5\n\
                     [[provider]]\nname = \"rack-a\"\nurl = \"https://kim:secret@h\"";
        let part = PolicyFlags::extract_from_configuration(whole).unwrap();
        assert!(!part.contains("secret") && !part.contains("ssh_user"), "{part}");
        let read = |text: &str| format!("{:?}", PolicyFlags::from_configuration(text).unwrap());
        assert_eq!(read(&part), read(whole));
        assert_eq!(PolicyFlags::extract_from_configuration("ssh_user = \"root\"").unwrap(), "");
        assert!(PolicyFlags::extract_from_configuration("heartbeat_interval").is_err());
    }

    #[test]
    fn policy_that_would_disrupt_healthy_machines_is_rejected() {
        let span = |text: &str| Some(text.parse().unwrap());
        let none = PolicyFlags::default;
        for (policy, part) in [
            (
                PolicyFlags { heartbeat_interval: span("0s"), ..none() },
                "--heartbeat_interval 0s leaves no time",
            ),
            (
                PolicyFlags {
                    heartbeat_interval: span("1m"),
                    recovery_silence_timeout: span("30s"),
                    ..none()
                },
                "--recovery_silence_timeout 30s is shorter than --heartbeat_interval 1m",
            ),
            (
                PolicyFlags {
                    agent_start_backoff_initial: span("1h"),
                    agent_start_backoff_maximum: span("1m"),
                    ..none()
                },
                "--agent_start_backoff_maximum 1m is shorter",
            ),
            (
                PolicyFlags { cluster_snapshots_retained: Some(0), ..none() },
                "--cluster_snapshots_retained 0 cannot be: give a number from 1",
            ),
            (
                PolicyFlags { cluster_key_rotation_interval: span("1m"), ..none() },
                "--cluster_key_rotation_interval 1m is too short for a key: give at least 1h",
            ),
            (
                PolicyFlags { artefact_storage_limit: Some(ByteSize(1 << 20)), ..none() },
                "--artefact_storage_limit 1MiB is too small: give at least 256MiB",
            ),
        ] {
            let refused = policy.validate().unwrap_err();
            assert!(refused.starts_with(part), "{refused}");
        }
        none().validate().unwrap();
    }

    #[test]
    fn ladder_parses_into_rungs() {
        let LadderFlag(rungs) = parse_ladder("restart-agent:2m:2,reboot:15m:2,power-cycle:20m:2").unwrap();
        assert_eq!(rungs, Policy::default().ladder);
        for wrong in ["", "reboot", "reboot:1m", "reboot:1m:1:1", "explode:1m:1", "reboot:x:1", "reboot:1m:x"]
        {
            assert!(parse_ladder(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn flag_switches_the_two_person_rule_on_and_never_off() {
        for (flag, stored, expected) in [
            (None, false, false),
            (None, true, true),
            (Some(true), false, true),
            (Some(true), true, true),
            (Some(false), false, false),
            (Some(false), true, true),
        ] {
            let mut policy = Policy::default();
            policy.two_person_rule.required = stored;
            PolicyFlags { require_second_admin: flag, ..PolicyFlags::default() }.apply(&mut policy);
            assert_eq!(policy.two_person_rule.required, expected, "{flag:?} {stored}");
        }
    }

    #[test]
    fn only_given_flags_change_the_policy() {
        let mut policy = Policy::default();
        PolicyFlags::default().apply(&mut policy);
        assert_eq!(policy, Policy::default());
        let flags =
            PolicyFlags { recovery_silence_timeout: Some(Span::seconds(5)), ..PolicyFlags::default() };
        flags.apply(&mut policy);
        assert_eq!(policy, Policy { recovery_silence_timeout: Span::seconds(5), ..Policy::default() });
    }
}
