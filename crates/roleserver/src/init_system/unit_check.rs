//! What the unit of the agent would do to its children, as systemd has it with all drop-ins (pure).
//!
//! A drop-in of an administrator is always kept. Some settings end workloads, keep the agent from starting again, or are
//! inherited by children that outlive the unit. Those are reported.
//!
//! Children in scopes of their own are outside the unit's group, so no `KillMode=` reaches them. A child that could not
//! get a scope is in the unit's group, and then it depends on the unit what a restart of the agent does to it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use model::host_finding::{HostFinding, HostFindingKind};
use model::role_declaration::privileges::Capability;

use crate::mountinfo;

/// Settings that open a mount or another namespace, or restrict what is started, with the values that do not. systemd
/// prints a filter of system calls or of address families that is not set as the list of all except none, `~`.
const INHERITED_SETTINGS: [(&str, &[&str]); 43] = [
    ("ProtectSystem", &["no"]),
    ("ProtectHome", &["no"]),
    ("ProtectKernelTunables", &["no"]),
    ("ProtectKernelModules", &["no"]),
    ("ProtectKernelLogs", &["no"]),
    ("ProtectControlGroups", &["no"]),
    ("ProtectClock", &["no"]),
    ("ProtectHostname", &["no"]),
    ("ProtectProc", &["default"]),
    ("ProcSubset", &["all"]),
    ("PrivateTmp", &["no"]),
    ("PrivateDevices", &["no"]),
    ("PrivateMounts", &["no"]),
    ("PrivateNetwork", &["no"]),
    ("PrivateIPC", &["no"]),
    ("PrivateUsers", &["no"]),
    ("NoNewPrivileges", &["no"]),
    ("SystemCallFilter", &["", "~"]),
    ("SystemCallArchitectures", &[""]),
    ("RestrictAddressFamilies", &["", "~"]),
    ("RestrictNamespaces", &["no"]),
    ("RestrictRealtime", &["no"]),
    ("RestrictSUIDSGID", &["no"]),
    ("LockPersonality", &["no"]),
    ("MemoryDenyWriteExecute", &["no"]),
    ("ReadWritePaths", &[""]),
    ("ReadOnlyPaths", &[""]),
    ("InaccessiblePaths", &[""]),
    ("NoExecPaths", &[""]),
    ("TemporaryFileSystem", &[""]),
    ("BindPaths", &[""]),
    ("BindReadOnlyPaths", &[""]),
    ("RootDirectory", &[""]),
    ("RootImage", &[""]),
    ("DynamicUser", &["no"]),
    ("NetworkNamespacePath", &[""]),
    ("IPCNamespacePath", &[""]),
    ("MountImages", &[""]),
    ("ExtensionImages", &[""]),
    ("RestrictFileSystems", &["", "~"]),
    ("SecureBits", &["", "0"]),
    ("SELinuxContext", &[""]),
    ("AppArmorProfile", &[""]),
];
/// The setting that children inherit without a fixed value that harms none: where it is not set, systemd prints every
/// capability of the kernel.
const BOUNDING_SET: &str = "CapabilityBoundingSet";
/// Other settings that are read.
const OTHER_SETTINGS: [&str; 5] = ["KillMode", "Delegate", "DropInPaths", "FragmentPath", BOUNDING_SET];
/// Most programs that a sentence names.
const MAX_NAMED: usize = 5;

/// The settings to request from `systemctl show`.
#[must_use]
pub fn requested_settings() -> String {
    let inherited = INHERITED_SETTINGS.iter().map(|(name, _)| *name);
    OTHER_SETTINGS.into_iter().chain(inherited).collect::<Vec<_>>().join(",")
}

/// The settings of a unit, by name, as `systemctl show` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitSettings {
    values: BTreeMap<String, String>,
    last_capability: Option<u8>,
}

impl UnitSettings {
    /// Parses the output: a line `NAME=VALUE` for each setting that this systemd has. `last_capability` is the highest
    /// number of a capability of this kernel (`/proc/sys/kernel/cap_last_cap`); without it, no bounding set is judged.
    #[must_use]
    pub fn parse(shown: &str, last_capability: Option<u8>) -> Self {
        let pairs = shown.lines().filter_map(|line| line.split_once('='));
        let values = pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        Self { values, last_capability }
    }

    fn get(&self, name: &str) -> &str {
        self.values.get(name).map_or("", String::as_str)
    }

    /// The inherited settings that are in force, as `NAME=VALUE`. A setting that this systemd does not have is none.
    fn inherited(&self) -> Vec<String> {
        let in_force = INHERITED_SETTINGS.iter().filter_map(|(name, harmless)| {
            let value = self.values.get(*name)?;
            (!harmless.contains(&value.as_str())).then(|| format!("{name}={value}"))
        });
        in_force.chain(self.bounding_set()).collect()
    }

    /// The bounding set of capabilities, if it lacks one that the kernel has.
    fn bounding_set(&self) -> Option<String> {
        let value = self.values.get(BOUNDING_SET)?;
        let missing = missing_capabilities(value, self.last_capability?);
        match value.as_str() {
            "" => Some(format!("{BOUNDING_SET}=")),
            _ => (!missing.is_empty()).then(|| format!("{BOUNDING_SET}=~{}", missing.join(" "))),
        }
    }

    /// Where an administrator finds the setting.
    fn place(&self) -> String {
        match self.get("DropInPaths") {
            "" => format!("the unit file {}", self.get("FragmentPath")),
            paths => format!("a drop-in of the unit ({paths})"),
        }
    }
}

/// The version of control groups that systemd uses for its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitHierarchy {
    /// Version 2, and no hierarchy of version 1.
    Unified,
    /// A hierarchy of version 1, or version 2 beside version 1.
    Legacy,
}

/// What is wrong with the unit. `in_unit` has the names of the long-lived programs in its group, besides the agent.
#[must_use]
pub fn assess_unit(
    settings: &UnitSettings,
    hierarchy: UnitHierarchy,
    in_unit: &[String],
) -> Vec<HostFinding> {
    let mut findings = Vec::new();
    let mut add = |kind, message| findings.push(HostFinding { kind, message });
    let kill_mode = settings.get("KillMode");
    let programs = name_programs(in_unit);
    if !in_unit.is_empty() && matches!(kill_mode, "control-group" | "mixed") {
        add(
            HostFindingKind::WorkloadsEndWithAgent,
            format!(
                "{programs} would end with the role server: the group of its unit, which has KillMode={kill_mode}, is \
                 theirs too; each moves into a scope of its own as soon as systemd makes one"
            ),
        );
    } else if !in_unit.is_empty() && hierarchy == UnitHierarchy::Unified {
        add(
            HostFindingKind::WorkloadsEndWithAgent,
            format!(
                "the next start of the role server may end in 219/CGROUP, because programs stay in the group of its \
                 unit ({programs}) with KillMode={kill_mode}, which {} sets; remove that setting",
                settings.place()
            ),
        );
    }
    let inherited = settings.inherited();
    if !inherited.is_empty() {
        add(
            HostFindingKind::UnitSetting,
            format!(
                "{} has {}, which every program that the role server starts inherits and keeps when the role server \
                 is started again; remove that setting",
                settings.place(),
                inherited.join(", ")
            ),
        );
    }
    findings
}

/// The finding about a unit file that somebody edited.
#[must_use]
pub fn edited_unit_finding(unit: &Path) -> HostFinding {
    HostFinding {
        kind: HostFindingKind::UnitEdited,
        message: format!(
            "the unit file {} was edited, so no release replaces it; put the changes into a drop-in (`systemctl \
             edit`), remove the file, and take the machine over again",
            unit.display()
        ),
    }
}

/// The capabilities up to this number that a bounding set lacks, as systemd names them. Older releases of systemd print the
/// bits of the set as a number.
fn missing_capabilities(shown: &str, last: u8) -> Vec<String> {
    let names = Capability::all().filter(|capability| capability.number() <= last);
    let names = names.map(|capability| (capability.number(), format!("cap_{capability}").to_lowercase()));
    let is_missing = |(number, name): &(u8, String)| match shown.parse::<u64>() {
        Ok(bits) => (bits >> number) & 1 == 0,
        Err(_) => !shown.split_whitespace().any(|shown| shown == name),
    };
    names.filter(is_missing).map(|(_, name)| name).collect()
}

fn name_programs(names: &[String]) -> String {
    match names.len() {
        count if count > MAX_NAMED => {
            format!("{} and {} more programs", names[..MAX_NAMED].join(", "), count - MAX_NAMED)
        }
        _ => names.join(", "),
    }
}

/// The manager of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitManager {
    /// The manager of the system, process 1.
    System,
    /// The manager of a user.
    User,
}

/// The group of this process in the hierarchy that systemd uses, if systemd started it as `unit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnGroup {
    /// The manager that started the unit.
    pub manager: UnitManager,
    /// The version of that hierarchy.
    pub hierarchy: UnitHierarchy,
    /// The directory of the unit's group.
    pub directory: PathBuf,
}

impl OwnGroup {
    /// Finds it in `/proc/self/mountinfo` and `/proc/self/cgroup`. `None` if the process is not in a group of that
    /// unit: something else started it, and then the units of the host are not its business.
    #[must_use]
    pub fn parse_host(mountinfo: &str, own: &str, unit: &str) -> Option<Self> {
        let path_of = |prefix: &str, middle: &str| {
            own.lines().find_map(|line| {
                let (id, rest) = line.split_once(':')?;
                let path = rest.strip_prefix(middle)?;
                (prefix.is_empty() || id == prefix).then_some(path)
            })
        };
        let (hierarchy, path) = match path_of("", "name=systemd:") {
            Some(path) => (UnitHierarchy::Legacy, path),
            None => (UnitHierarchy::Unified, path_of("0", ":")?),
        };
        // A role server that hands controllers on is in a group below that of the unit.
        let path = Path::new(path.strip_suffix("/agent").unwrap_or(path));
        if path.file_name().is_none_or(|name| name != unit) {
            return None;
        }
        let is_user = path.components().any(|part| {
            let name = part.as_os_str().to_string_lossy();
            name.starts_with("user@") && name.ends_with(".service")
        });
        let mount = mountinfo::parse_mounts(mountinfo).find(|mount| match hierarchy {
            UnitHierarchy::Unified => mount.kind == "cgroup2",
            UnitHierarchy::Legacy => {
                mount.kind == "cgroup" && mount.options.split(',').any(|option| option == "name=systemd")
            }
        })?;
        let below = if mount.root == "/" { path } else { path.strip_prefix(mount.root).ok()? };
        Some(Self {
            manager: if is_user { UnitManager::User } else { UnitManager::System },
            hierarchy,
            directory: mount.point.join(below.strip_prefix("/").unwrap_or(below)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: &str = "roleserver.service";

    /// Name, output of `systemctl show`, hierarchy, programs in the unit, and parts of the expected sentences.
    type Case<'c> = (&'c str, String, UnitHierarchy, &'c [String], &'c [&'c str]);

    #[test]
    fn only_settings_that_harm_children_are_found() {
        let plain = "KillMode=control-group\nDelegate=no\nDropInPaths=\nPrivateTmp=no\nProtectSystem=no\nSystemCallFilter=~\n";
        let drop_in = |text: &str| {
            format!("{plain}DropInPaths=/etc/systemd/system/roleserver.service.d/a.conf\n{text}\n")
        };
        let etcd = ["etcd".to_owned()];
        let many: Vec<String> = (0..7).map(|number| format!("s{number}")).collect();
        let (unified, legacy) = (UnitHierarchy::Unified, UnitHierarchy::Legacy);
        let cases: [Case<'_>; 12] = [
            ("ours, with scopes", plain.to_owned(), unified, &[], &[]),
            (
                "ours, without scopes",
                plain.to_owned(),
                unified,
                &etcd[..],
                &["etcd would end with the role server"],
            ),
            (
                "many",
                plain.to_owned(),
                legacy,
                &many[..],
                &["s0, s1, s2, s3, s4 and 2 more programs would end"],
            ),
            ("mixed", drop_in("KillMode=mixed"), legacy, &etcd[..], &["has KillMode=mixed"]),
            ("process, with scopes", drop_in("KillMode=process\nDelegate=yes"), unified, &[], &[]),
            (
                "process, without scopes",
                drop_in("KillMode=process\nDelegate=yes"),
                unified,
                &etcd[..],
                &[
                    "219/CGROUP, because programs stay in the group of its unit (etcd) with KillMode=process, which a drop-in",
                ],
            ),
            ("process on version 1", drop_in("KillMode=process"), legacy, &etcd[..], &[]),
            ("another slice", drop_in("Slice=batch.slice\nMemoryMax=1G"), unified, &[], &[]),
            (
                "mounts of its own",
                drop_in("PrivateTmp=yes\nProtectSystem=strict"),
                unified,
                &[],
                &["a.conf) has ProtectSystem=strict, PrivateTmp=yes, which every program"],
            ),
            (
                "a filter",
                drop_in("SystemCallFilter=@system-service"),
                unified,
                &[],
                &["SystemCallFilter=@system"],
            ),
            ("an older systemd has no such setting", "KillMode=control-group\n".to_owned(), legacy, &[], &[]),
            ("nothing is known", String::new(), legacy, &[], &[]),
        ];
        for (name, shown, hierarchy, in_unit, expected) in cases {
            let found = assess_unit(&UnitSettings::parse(&shown, Some(40)), hierarchy, in_unit);
            let found: Vec<String> = found.into_iter().map(|finding| finding.message).collect();
            assert_eq!(found.len(), expected.len(), "{name}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "{name}: {found}");
            }
        }
    }

    #[test]
    fn every_setting_is_requested() {
        let requested = requested_settings();
        for name in ["KillMode", "Delegate", "DropInPaths", "ProtectSystem", "DynamicUser"] {
            assert!(requested.split(',').any(|found| found == name), "{requested}");
        }
    }

    /// Lines of `systemctl show` of a service, with systemd 252, where nothing is set and where something is.
    #[test]
    fn each_setting_that_children_inherit_is_found_and_its_default_is_not() {
        for (default, set) in [
            ("ProtectKernelLogs=no", "ProtectKernelLogs=yes"),
            ("ProtectClock=no", "ProtectClock=yes"),
            ("ProtectHostname=no", "ProtectHostname=yes"),
            ("ProtectProc=default", "ProtectProc=invisible"),
            ("ProcSubset=all", "ProcSubset=pid"),
            ("PrivateIPC=no", "PrivateIPC=yes"),
            ("SystemCallArchitectures=", "SystemCallArchitectures=native"),
            ("RestrictAddressFamilies=~", "RestrictAddressFamilies=AF_INET AF_UNIX"),
            ("RestrictRealtime=no", "RestrictRealtime=yes"),
            ("RestrictSUIDSGID=no", "RestrictSUIDSGID=yes"),
            ("LockPersonality=no", "LockPersonality=yes"),
            ("ReadWritePaths=", "ReadWritePaths=/var"),
            ("NoExecPaths=", "NoExecPaths=/var"),
            ("TemporaryFileSystem=", "TemporaryFileSystem=/var:ro"),
            ("BindReadOnlyPaths=", "BindReadOnlyPaths=/usr:/usr:rbind"),
            ("RootImage=", "RootImage=/image.raw"),
        ] {
            let name = default.split('=').next().unwrap_or_default();
            assert!(requested_settings().split(',').any(|found| found == name), "{name}");
            assert_eq!(UnitSettings::parse(default, Some(40)).inherited(), [""; 0], "{default}");
            assert_eq!(UnitSettings::parse(set, Some(40)).inherited(), [set], "{set}");
        }
    }

    #[test]
    fn bounding_set_of_a_drop_in_is_found_and_that_of_the_kernel_is_not() {
        let names: Vec<String> =
            Capability::all().map(|capability| format!("cap_{capability}").to_lowercase()).collect();
        let without = |left_out: &str| {
            let left: Vec<&str> = names.iter().map(String::as_str).filter(|name| *name != left_out).collect();
            left.join(" ")
        };
        let bits = |set: u64| set.to_string();
        for (value, last, expected) in [
            (without(""), Some(40), None),
            (names[..38].join(" "), Some(37), None),
            (without("") + " cap_of_a_newer_kernel", Some(41), None),
            (without("cap_sys_ptrace"), Some(40), Some("CapabilityBoundingSet=~cap_sys_ptrace")),
            (names[..39].join(" "), Some(40), Some("CapabilityBoundingSet=~cap_bpf cap_checkpoint_restore")),
            (String::new(), Some(40), Some("CapabilityBoundingSet=")),
            (bits(u64::MAX), Some(40), None),
            (bits((1 << 41) - 1), Some(40), None),
            (bits(u64::MAX - 1), Some(40), Some("CapabilityBoundingSet=~cap_chown")),
            // Nothing is known of the kernel.
            (without("cap_sys_ptrace"), None, None),
        ] {
            let shown = format!("KillMode=control-group\nCapabilityBoundingSet={value}\n");
            let found = UnitSettings::parse(&shown, last).inherited();
            assert_eq!(found, Vec::from_iter(expected), "{value} {last:?}");
        }
        assert!(requested_settings().split(',').any(|found| found == BOUNDING_SET));
    }

    #[test]
    fn only_a_process_in_the_group_of_the_unit_was_started_by_systemd() {
        let unified = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let legacy = "31 1 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
                      32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let group = |manager, hierarchy, directory: &str| {
            Some(OwnGroup { manager, hierarchy, directory: directory.into() })
        };
        let (system, user) = (UnitManager::System, UnitManager::User);
        let of_user = "/user.slice/user-7.slice/user@7.service/app.slice/roleserver.service";
        for (mountinfo, own, expected) in [
            (
                unified,
                "0::/system.slice/roleserver.service\n".to_owned(),
                group(system, UnitHierarchy::Unified, "/sys/fs/cgroup/system.slice/roleserver.service"),
            ),
            (
                unified,
                "0::/system.slice/roleserver.service/agent\n".to_owned(),
                group(system, UnitHierarchy::Unified, "/sys/fs/cgroup/system.slice/roleserver.service"),
            ),
            (
                unified,
                format!("0::{of_user}\n"),
                group(user, UnitHierarchy::Unified, &format!("/sys/fs/cgroup{of_user}")),
            ),
            (
                legacy,
                "9:memory:/x\n1:name=systemd:/system.slice/roleserver.service\n0::/x\n".to_owned(),
                group(
                    system,
                    UnitHierarchy::Legacy,
                    "/sys/fs/cgroup/systemd/system.slice/roleserver.service",
                ),
            ),
            (unified, "0::/system.slice/ci.service\n".to_owned(), None),
            (unified, "0::/system.slice/roleserver.service/roleserver-1/etcd\n".to_owned(), None),
            (unified, "0::/user.slice/user-0.slice/session-1.scope\n".to_owned(), None),
            (unified, "0::/\n".to_owned(), None),
            (unified, String::new(), None),
            ("", "0::/system.slice/roleserver.service\n".to_owned(), None),
        ] {
            assert_eq!(OwnGroup::parse_host(mountinfo, &own, UNIT), expected, "{own}");
        }
    }
}
