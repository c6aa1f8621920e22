//! Scopes of children: when they are used, their names and their properties (pure).
//!
//! systemd ends everything in the control group of a unit when the unit ends. So where systemd started the role server,
//! each child runs in a transient scope of its own, outside the unit, below [`SLICE`]. `KillMode=process` with
//! `Delegate=yes` in the unit is no substitute: with version 2 alone, systemd cannot start a unit again while its group
//! has handed controllers on and still has a child, and every later start ends with 219/CGROUP.

use serde::{Deserialize, Serialize};

use crate::child::spec::ResourceLimits;
use crate::systemd_manager::manager::Property;
use crate::systemd_manager::value::Value;

/// The slice that has all scopes.
pub const SLICE: &str = "shepherd.slice";
/// The group below a scope, in version 2, that holds the processes of the child itself. A group that hands controllers
/// on must hold no process, and a program such as runc makes groups beside this one.
pub const LEAF: &str = "main";

const INFINITY: u64 = u64::MAX;
/// Microseconds of processor time in a second.
const SECOND_US: u64 = 1_000_000;

/// The scope of a child, as its record stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeRecord {
    /// Name of the unit.
    pub unit: String,
    /// Its control group, as systemd reported it.
    pub control_group: String,
}

/// What this process can find out about its start.
#[derive(Clone, Copy, Debug)]
pub struct StartFacts<'f> {
    /// Whether systemd runs on this host (`/run/systemd/system`).
    pub has_systemd: bool,
    /// Whether `INVOCATION_ID` is set, which systemd does for each process of a unit that it starts.
    pub has_invocation_id: bool,
    /// `/proc/self/cgroup`.
    pub own_cgroups: &'f str,
    /// The same file of the parent process.
    pub parent_cgroups: &'f str,
}

/// The unit that this process is the main process of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartingUnit {
    /// Control group below which its manager has all units; empty if that is the root.
    pub manager_group: String,
    /// Control group of the unit.
    pub unit_group: String,
    /// Whether the manager is a user's.
    pub is_user: bool,
}

/// The service unit, if its manager started this process itself; `None` if anything else did.
///
/// A service unit alone proves nothing: what somebody runs by hand in a session, or in a test below a service, inherits
/// both its group and its environment. But the parent of the unit's main process is the manager, in its own scope.
#[must_use]
pub fn find_starting_unit(facts: &StartFacts<'_>) -> Option<StartingUnit> {
    if !facts.has_systemd || !facts.has_invocation_id {
        return None;
    }
    let manager_group = manager_path(facts.parent_cgroups)?.strip_suffix("/init.scope")?;
    let own = manager_path(facts.own_cgroups)?;
    // An earlier release may have moved itself into a group of its own.
    let unit_group = own.strip_suffix("/agent").unwrap_or(own);
    let below = unit_group.strip_prefix(manager_group)?;
    let is_service = below.starts_with('/') && below.ends_with(".service");
    let last = manager_group.rsplit('/').next().unwrap_or_default();
    is_service.then(|| StartingUnit {
        manager_group: manager_group.to_owned(),
        unit_group: unit_group.to_owned(),
        is_user: last.starts_with("user@") && last.ends_with(".service"),
    })
}

/// The path in the hierarchy that systemd manages: that with its name in version 1, otherwise version 2.
pub(super) fn manager_path(cgroups: &str) -> Option<&str> {
    let in_hierarchy = |wanted: &str| {
        cgroups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            (controllers == wanted).then_some(path)
        })
    };
    in_hierarchy("name=systemd").or_else(|| in_hierarchy(""))
}

/// The name of the scope for a start of a child.
#[must_use]
pub fn scope_name(family: &str, child: &str, number: u64) -> String {
    format!("shepherd-{family}-{child}-{number}.scope")
}

/// The number of a scope, if it is one of this child.
#[must_use]
pub fn scope_number(unit: &str, family: &str, child: &str) -> Option<u64> {
    let rest = unit.strip_prefix("shepherd-")?.strip_prefix(family)?.strip_prefix('-')?;
    let number = rest.strip_prefix(child)?.strip_prefix('-')?.strip_suffix(".scope")?;
    // No sign, and no name of another child that ends with a number.
    number.bytes().all(|digit| digit.is_ascii_digit()).then(|| number.parse().ok())?
}

/// The properties that a scope is made with (systemd.scope(5), systemd.resource-control(5)).
#[must_use]
pub fn scope_properties(child: &str, pids: &[u32], limits: &ResourceLimits) -> Vec<Property> {
    let mut properties = vec![
        ("Description", Value::Text(format!("{child}, started by the Shepherd role server"))),
        ("Slice", Value::text(SLICE)),
        ("PIDs", Value::numbers(pids)),
        ("Delegate", Value::Bool(true)),
        // A scope that failed would otherwise stay, and keep its name.
        ("CollectMode", Value::text("inactive-or-failed")),
    ];
    properties.extend(limit_properties(limits));
    properties
}

/// The limits as properties. All of them are set, because one that is no longer declared has to be lifted.
#[must_use]
pub fn limit_properties(limits: &ResourceLimits) -> Vec<Property> {
    let quota = limits.cpu_millis.map(|millis| millis.saturating_mul(SECOND_US) / 1000);
    // systemd accepts no smaller quota than one percent.
    let quota = quota.map(|quota| quota.max(SECOND_US / 100));
    vec![
        ("TasksMax", Value::U64(limits.tasks.unwrap_or(INFINITY))),
        ("MemoryMax", Value::U64(limits.memory_bytes.unwrap_or(INFINITY))),
        ("CPUQuotaPerSecUSec", Value::U64(quota.unwrap_or(INFINITY))),
    ]
}

/// The sentence about a child that is not in a scope.
#[must_use]
pub fn unprotected_message(child: &str, why: &str) -> String {
    format!(
        "{child} would end with the role server, because it is not in a systemd scope of its own: {why}; the role \
         server tries again, so make systemd answer"
    )
}

/// The sentence about a child in a scope, of which a step of its move there failed.
#[must_use]
pub fn unfinished_message(child: &str, why: &str) -> String {
    format!(
        "{child} is in a systemd scope of its own, but its move there is not complete: {why}; the role server tries again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "0::/system.slice/roleserver.service\n";
    const INIT: &str = "0::/init.scope\n";

    fn starting_unit_of(own_cgroups: &str, parent_cgroups: &str) -> Option<StartingUnit> {
        let facts = StartFacts { has_systemd: true, has_invocation_id: true, own_cgroups, parent_cgroups };
        find_starting_unit(&facts)
    }

    #[test]
    fn only_the_main_process_of_a_service_unit_uses_scopes() {
        let unit = |manager: &str, unit: &str, is_user| {
            Some(StartingUnit { manager_group: manager.to_owned(), unit_group: unit.to_owned(), is_user })
        };
        let system = unit("", "/system.slice/roleserver.service", false);
        let user = "/user.slice/user-1000.slice/user@1000.service";
        let hybrid = "4:memory:/elsewhere\n1:name=systemd:/system.slice/roleserver.service\n0::/x\n";
        let container = "/machine.slice/a.scope";
        let table = [
            (OWN.to_owned(), INIT.to_owned(), system.clone()),
            ("0::/system.slice/roleserver.service/agent\n".to_owned(), INIT.to_owned(), system.clone()),
            (hybrid.to_owned(), "1:name=systemd:/init.scope\n0::/init.scope\n".to_owned(), system),
            (
                format!("0::{user}/app.slice/roleserver.service\n"),
                format!("0::{user}/init.scope\n"),
                unit(user, &format!("{user}/app.slice/roleserver.service"), true),
            ),
            (
                format!("0::{container}/system.slice/a.service\n"),
                format!("0::{container}/init.scope\n"),
                unit(container, &format!("{container}/system.slice/a.service"), false),
            ),
            // By hand in a service, in a session, and where there are no groups.
            (OWN.to_owned(), OWN.to_owned(), None),
            ("0::/user.slice/user-0.slice/session-3.scope\n".to_owned(), INIT.to_owned(), None),
            ("0::/\n".to_owned(), INIT.to_owned(), None),
            (String::new(), String::new(), None),
            (OWN.to_owned(), format!("0::{user}/init.scope\n"), None),
        ];
        for (own, parent, expected) in table {
            assert_eq!(starting_unit_of(&own, &parent), expected, "{own} {parent}");
        }
        for (has_systemd, has_invocation_id) in [(false, true), (true, false)] {
            let facts = StartFacts { has_systemd, has_invocation_id, own_cgroups: OWN, parent_cgroups: INIT };
            assert_eq!(find_starting_unit(&facts), None);
        }
    }

    #[test]
    fn name_of_a_scope_has_family_child_and_number() {
        let family = "roleserver-0123456789ab";
        let name = scope_name(family, "web_server", 12);
        assert_eq!(name, "shepherd-roleserver-0123456789ab-web_server-12.scope");
        assert_eq!(scope_number(&name, family, "web_server"), Some(12));
        for (unit, child) in [
            (name.as_str(), "web"),
            ("shepherd-roleserver-0123456789ab-web-1-2.scope", "web"),
            ("shepherd-roleserver-0123456789ab-web-+2.scope", "web"),
            ("shepherd-roleserver-0123456789ab-web-.scope", "web"),
            ("shepherd-roleserver-0123456789ab-web-2.service", "web"),
            ("shepherd-roleserver-ba9876543210-web-2.scope", "web"),
            ("init.scope", "web"),
        ] {
            assert_eq!(scope_number(unit, family, child), None, "{unit}");
        }
        let other = "shepherd-roleserver-0123456789ab-web-1-2.scope";
        assert_eq!(scope_number(other, family, "web-1"), Some(2));
    }

    #[test]
    fn limits_become_properties_and_absent_ones_are_lifted() {
        let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(1500), tasks: Some(7) };
        let numbers = |limits: &ResourceLimits| {
            limit_properties(limits).into_iter().map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(numbers(&limits), [Value::U64(7), Value::U64(1 << 20), Value::U64(1_500_000)]);
        assert_eq!(numbers(&ResourceLimits::default()), [const { Value::U64(INFINITY) }; 3]);
        let little = ResourceLimits { cpu_millis: Some(1), ..ResourceLimits::default() };
        assert_eq!(numbers(&little)[2], Value::U64(10_000));
        let names: Vec<_> =
            scope_properties("web", &[1], &limits).into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            names,
            [
                "Description",
                "Slice",
                "PIDs",
                "Delegate",
                "CollectMode",
                "TasksMax",
                "MemoryMax",
                "CPUQuotaPerSecUSec"
            ]
        );
    }
}
