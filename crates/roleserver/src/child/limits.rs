//! Limits that a control group can hold, and those that it cannot (pure).
//!
//! In version 2 a group has the controllers that the group above hands on. systemd hands on to a unit what its units use:
//! by default, that is memory and pids, but not cpu. With a scope, systemd enables every controller that the limits of
//! the child need. A child that starts in the group of the unit, because systemd does not answer, gets those limits that
//! can hold there. The others are in its record and are reported, and its scope is made with all of them.
//!
//! systemd accepts a limit for which its manager has no controller, without an error: the manager of a user in version 1,
//! or one to which `cpu` is not delegated. So what the group of a scope has is compared with what was requested.

use std::collections::BTreeSet;

use crate::child::spec::ResourceLimits;

/// Splits limits into those that a group with these controllers can hold, and the others.
#[must_use]
pub fn split_limits(
    limits: &ResourceLimits,
    controllers: &BTreeSet<String>,
) -> (ResourceLimits, ResourceLimits) {
    let split = |limit: Option<u64>, controller: &str| {
        if controllers.contains(controller) { (limit, None) } else { (None, limit) }
    };
    let (memory, missed_memory) = split(limits.memory_bytes, "memory");
    let (cpu, missed_cpu) = split(limits.cpu_millis, "cpu");
    let (tasks, missed_tasks) = split(limits.tasks, "pids");
    (
        ResourceLimits { memory_bytes: memory, cpu_millis: cpu, tasks },
        ResourceLimits { memory_bytes: missed_memory, cpu_millis: missed_cpu, tasks: missed_tasks },
    )
}

/// These limits, and those of `others` where these have none.
#[must_use]
pub fn merge_limits(limits: &ResourceLimits, others: &ResourceLimits) -> ResourceLimits {
    ResourceLimits {
        memory_bytes: limits.memory_bytes.or(others.memory_bytes),
        cpu_millis: limits.cpu_millis.or(others.cpu_millis),
        tasks: limits.tasks.or(others.tasks),
    }
}

/// The smallest share of a processor that systemd sets, in thousandths.
const LEAST_CPU_MILLIS: u64 = 10;

/// The requested limits that do not hold by those that a group has. A smaller one holds: the kernel rounds down.
#[must_use]
pub fn find_missing_limits(requested: &ResourceLimits, present: &ResourceLimits) -> ResourceLimits {
    let missing = |requested: Option<u64>, present: Option<u64>, least: u64| {
        requested.filter(|limit| present.is_none_or(|present| present > (*limit).max(least)))
    };
    ResourceLimits {
        memory_bytes: missing(requested.memory_bytes, present.memory_bytes, 0),
        cpu_millis: missing(requested.cpu_millis, present.cpu_millis, LEAST_CPU_MILLIS),
        tasks: missing(requested.tasks, present.tasks, 0),
    }
}

/// The limits by the names that they have in a declaration.
#[must_use]
pub fn name_limits(limits: &ResourceLimits) -> String {
    let named = [("memory", limits.memory_bytes), ("processors", limits.cpu_millis), ("tasks", limits.tasks)];
    let names: Vec<&str> =
        named.into_iter().filter(|(_, limit)| limit.is_some()).map(|(name, _)| name).collect();
    names.join(" and ")
}

/// The sentence about a child in the group of the unit that runs without these limits.
#[must_use]
pub fn missed_limits_message(child: &str, missed: &ResourceLimits) -> String {
    format!(
        "{child} runs without its limit of {}, because systemd hands on no controller for that to the group of the \
         role server's unit; the limit holds as soon as systemd makes a scope for {child}",
        name_limits(missed)
    )
}

/// The sentence about a child in a scope that runs without these limits.
#[must_use]
pub fn scope_limits_message(child: &str, missed: &ResourceLimits) -> String {
    format!(
        "{child} runs without its limit of {}, because systemd accepted it and did not set it in the control group of the \
         scope: its manager has no controller for it; delegate that to the manager (Delegate= of user@.service, for a \
         user's), or remove the limit",
        name_limits(missed)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_holds_if_the_group_has_it_or_a_smaller_one() {
        let cpu = |millis| ResourceLimits { cpu_millis: Some(millis), ..NONE };
        let memory = |bytes| ResourceLimits { memory_bytes: Some(bytes), ..NONE };
        for (requested, present, missing) in [
            (ALL, ALL, NONE),
            (ALL, NONE, ALL),
            (NONE, ALL, NONE),
            (ALL, ResourceLimits { cpu_millis: None, ..ALL }, cpu(1500)),
            // The kernel counts pages.
            (memory((1 << 20) + 1), memory(1 << 20), NONE),
            (memory(1 << 20), memory(1 << 21), memory(1 << 20)),
            // systemd sets one percent at least.
            (cpu(1), cpu(10), NONE),
            (cpu(1), cpu(11), cpu(1)),
        ] {
            assert_eq!(find_missing_limits(&requested, &present), missing, "{requested:?} {present:?}");
        }
        let message = scope_limits_message("web", &cpu(500));
        assert!(message.starts_with("web runs without its limit of processors, because"), "{message}");
    }

    const ALL: ResourceLimits =
        ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(1500), tasks: Some(7) };
    const NONE: ResourceLimits = ResourceLimits { memory_bytes: None, cpu_millis: None, tasks: None };

    #[test]
    fn each_limit_is_held_or_missed_by_its_controller() {
        let cpu = ResourceLimits { cpu_millis: Some(1500), ..NONE };
        for (limits, controllers, held, missed, names) in [
            (ALL, "cpuset cpu io memory pids", ALL, NONE, ""),
            // The default of systemd for a unit.
            (ALL, "memory pids", ResourceLimits { cpu_millis: None, ..ALL }, cpu, "processors"),
            (cpu, "memory pids", NONE, cpu, "processors"),
            (NONE, "memory pids", NONE, NONE, ""),
            (ALL, "cpu", cpu, ResourceLimits { cpu_millis: None, ..ALL }, "memory and tasks"),
            (ALL, "", NONE, ALL, "memory and processors and tasks"),
        ] {
            let controllers: BTreeSet<String> = controllers.split_whitespace().map(str::to_owned).collect();
            assert_eq!(split_limits(&limits, &controllers), (held, missed), "{limits:?} {controllers:?}");
            assert_eq!(name_limits(&missed), names);
            assert_eq!(merge_limits(&held, &missed), limits, "none is lost");
        }
        let message = missed_limits_message("web", &cpu);
        assert!(message.starts_with("web runs without its limit of processors, because"), "{message}");
    }
}
