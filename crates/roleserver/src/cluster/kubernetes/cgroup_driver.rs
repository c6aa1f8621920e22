//! Which program makes the control groups of pods: containerd and the kubelet themselves, or systemd.
//!
//! Where systemd runs the host with control groups of version 2, it expects to be the only one that writes them. So
//! pods are in slices and scopes of systemd there (`SystemdCgroup` of containerd, `cgroupDriver` of the kubelet), as
//! Kubernetes recommends.
//!
//! Kubernetes does not support another driver under pods that run: the kubelet would look for their groups at other
//! places. So a node keeps its driver while it may have pods. Only a new node, or one without pods because all were
//! evicted for another bundle, gets the other one. The driver in use is in `kubernetes-cgroup-driver.json`, written
//! before a component is started with it.
//!
//! The file is a hint, and the groups of running pods are the truth: a release that knows only `cgroupfs` leaves a file
//! that names `systemd` as it is, and runs pods beside it. So a driver that has pods is kept, even if the file
//! names the other. [`StoredDriver`](super::stored_driver::StoredDriver) looks for them.
//!
//! On hierarchies of version 1 the driver stays `cgroupfs`: the group above all pods has to exist in each hierarchy
//! before the kubelet starts, and systemd makes slices in some of them only.

use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::init_system::systemd::UNIT;
use crate::init_system::unit_check::{OwnGroup, UnitHierarchy, UnitManager};
use crate::mountinfo;

const NAME: &str = "kubernetes-cgroup-driver.json";
/// The source of findings about the driver.
pub const FINDINGS: &str = "pods";

/// What makes the control groups of pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// containerd and the kubelet, in the file system of control groups.
    #[default]
    Cgroupfs,
    /// systemd, by slices and scopes.
    Systemd,
}

impl CgroupDriver {
    /// The name that the kubelet has for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        }
    }

    /// The driver that components of this node were last started with; `None` if none was, or the file is damaged.
    #[must_use]
    pub fn read(files: &ClusterFiles) -> Option<Self> {
        let read = files.read_json_limited::<DriverRecord>(NAME, 1 << 10);
        let read = read.inspect_err(|error| tracing::warn!(%error, "the cgroup driver in use is not known"));
        read.ok().flatten().map(|record| record.driver)
    }

    /// Stores the driver, so that later starts use the same one.
    pub fn write(self, files: &ClusterFiles) -> Result<(), ClusterFilesError> {
        files.write_hint(NAME, &DriverRecord { driver: self })
    }
}

#[derive(Serialize, Deserialize)]
struct DriverRecord {
    driver: CgroupDriver,
}

/// The control groups of the host, and who started the role server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodHost {
    /// Whether the system's systemd started the role server.
    pub is_started_by_systemd: bool,
    /// The version of control groups.
    pub hierarchy: UnitHierarchy,
}

impl PodHost {
    /// The host of this process.
    #[must_use]
    pub fn detect_host() -> Self {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::parse_host(&mountinfo::read_mountinfo().unwrap_or_default(), &own)
    }

    /// Parses `/proc/self/mountinfo` and `/proc/self/cgroup`.
    #[must_use]
    pub fn parse_host(mountinfo: &str, own: &str) -> Self {
        let group = OwnGroup::parse_host(mountinfo, own, UNIT);
        Self {
            is_started_by_systemd: group.as_ref().is_some_and(|group| group.manager == UnitManager::System),
            hierarchy: group.map_or(UnitHierarchy::Legacy, |group| group.hierarchy),
        }
    }

    /// The driver of a worker that has no pods.
    const fn preferred_driver(self) -> CgroupDriver {
        match (self.is_started_by_systemd, self.hierarchy) {
            (true, UnitHierarchy::Unified) => CgroupDriver::Systemd,
            _ => CgroupDriver::Cgroupfs,
        }
    }
}

/// Where processes of pods run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunningPods {
    /// In groups that containerd and the kubelet make.
    pub in_cgroupfs: bool,
    /// In slices of systemd.
    pub in_slice: bool,
}

/// What the choice of the driver follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverFacts {
    /// The stored driver; `None` if none is stored, or if the file is damaged.
    pub stored: Option<CgroupDriver>,
    /// Where pods run now.
    pub pods: RunningPods,
    /// Whether this node never had a kubelet.
    pub is_new: bool,
    /// Whether every pod was evicted that a drain evicts.
    pub is_drained: bool,
    /// The host.
    pub host: PodHost,
}

/// The chosen driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverChoice {
    /// The driver to use and to store.
    pub driver: CgroupDriver,
    /// The contradiction between the file and the pods, as a sentence; `None` without one.
    pub conflict: Option<String>,
}

/// Chooses the driver. Pods that run keep theirs until the node is drained, even if the other one is stored.
#[must_use]
pub fn choose_driver(facts: DriverFacts) -> DriverChoice {
    let DriverFacts { stored, pods, is_new, is_drained, host } = facts;
    let of_pods = match pods {
        // Also with pods in both: a release that knows only this driver was the last one that ran a kubelet.
        RunningPods { in_cgroupfs: true, .. } => Some(CgroupDriver::Cgroupfs),
        RunningPods { in_slice: true, .. } => Some(CgroupDriver::Systemd),
        RunningPods { .. } => None,
    };
    // A drain leaves pods of daemon sets, which are restarted with the next driver.
    let of_pods = of_pods.filter(|_| !is_drained);
    let driver = match of_pods {
        Some(driver) => driver,
        None if is_new || is_drained => host.preferred_driver(),
        // An earlier release stored no driver and had only this one.
        None => stored.unwrap_or(CgroupDriver::Cgroupfs),
    };
    let conflict = stored.filter(|stored| of_pods.is_some() && *stored != driver);
    DriverChoice { driver, conflict: conflict.map(|stored| describe_conflict(driver, stored)) }
}

fn describe_conflict(kept: CgroupDriver, stored: CgroupDriver) -> String {
    let (kept, stored) = (kept.as_str(), stored.as_str());
    format!(
        "pods of this worker run with the cgroup driver {kept}, although {NAME} names {stored}, as after a roll-back \
         to a release that does not read this file; the worker keeps {kept} until it is drained for another bundle, \
         so that no pod is ended"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: PodHost = PodHost { is_started_by_systemd: true, hierarchy: UnitHierarchy::Unified };
    const LEGACY: PodHost = PodHost { is_started_by_systemd: true, hierarchy: UnitHierarchy::Legacy };
    const BY_HAND: PodHost = PodHost { is_started_by_systemd: false, hierarchy: UnitHierarchy::Unified };
    const NO_PODS: RunningPods = RunningPods { in_cgroupfs: false, in_slice: false };
    const IN_CGROUPFS: RunningPods = RunningPods { in_cgroupfs: true, in_slice: false };
    const IN_SLICE: RunningPods = RunningPods { in_cgroupfs: false, in_slice: true };
    const IN_BOTH: RunningPods = RunningPods { in_cgroupfs: true, in_slice: true };

    /// A worker that is not new and not drained: what is stored, where its pods run, and the driver that it keeps.
    #[test]
    fn driver_follows_the_pods_and_not_the_file() {
        use CgroupDriver::{Cgroupfs, Systemd};
        for (stored, pods, expected, is_conflict) in [
            (None, NO_PODS, Cgroupfs, false),
            (None, IN_CGROUPFS, Cgroupfs, false),
            (None, IN_SLICE, Systemd, false),
            (None, IN_BOTH, Cgroupfs, false),
            (Some(Cgroupfs), NO_PODS, Cgroupfs, false),
            (Some(Cgroupfs), IN_CGROUPFS, Cgroupfs, false),
            (Some(Cgroupfs), IN_SLICE, Systemd, true),
            (Some(Cgroupfs), IN_BOTH, Cgroupfs, false),
            (Some(Systemd), NO_PODS, Systemd, false),
            // The release before ran here meanwhile: it does not use the file.
            (Some(Systemd), IN_CGROUPFS, Cgroupfs, true),
            (Some(Systemd), IN_SLICE, Systemd, false),
            (Some(Systemd), IN_BOTH, Cgroupfs, true),
        ] {
            for host in [UNIFIED, LEGACY, BY_HAND] {
                let facts = DriverFacts { stored, pods, is_new: false, is_drained: false, host };
                let DriverChoice { driver, conflict } = choose_driver(facts);
                assert_eq!((driver, conflict.is_some()), (expected, is_conflict), "{facts:?}");
            }
        }
    }

    #[test]
    fn driver_changes_only_where_no_pod_can_run() {
        use CgroupDriver::{Cgroupfs, Systemd};
        for (name, stored, pods, (is_new, is_drained), host, expected) in [
            ("new", None, NO_PODS, (true, false), UNIFIED, Systemd),
            ("new, version 1", None, NO_PODS, (true, false), LEGACY, Cgroupfs),
            ("new, not started by systemd", None, NO_PODS, (true, false), BY_HAND, Cgroupfs),
            ("new, after a role that was removed", Some(Cgroupfs), NO_PODS, (true, false), UNIFIED, Systemd),
            ("its directory was lost, and its pods run", None, IN_CGROUPFS, (true, false), UNIFIED, Cgroupfs),
            ("drained", Some(Cgroupfs), NO_PODS, (false, true), UNIFIED, Systemd),
            ("drained, with daemon sets", Some(Cgroupfs), IN_CGROUPFS, (false, true), UNIFIED, Systemd),
            ("drained, version 1", Some(Cgroupfs), NO_PODS, (false, true), LEGACY, Cgroupfs),
            ("drained, started by hand", Some(Systemd), IN_SLICE, (false, true), BY_HAND, Cgroupfs),
        ] {
            let facts = DriverFacts { stored, pods, is_new, is_drained, host };
            let choice = choose_driver(facts);
            assert_eq!(choice, DriverChoice { driver: expected, conflict: None }, "{name}");
        }
    }

    #[test]
    fn stored_driver_is_read_again_and_a_damaged_file_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        assert_eq!(CgroupDriver::read(&files), None);
        for driver in [CgroupDriver::Systemd, CgroupDriver::Cgroupfs] {
            driver.write(&files).unwrap();
            assert_eq!(CgroupDriver::read(&files), Some(driver));
        }
        std::fs::write(directory.path().join("cluster").join(NAME), "{").unwrap();
        assert_eq!(CgroupDriver::read(&files), None);
    }

    #[test]
    fn only_the_system_manager_on_version_2_alone_makes_groups_of_pods() {
        let unified = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        for (own, expected) in [
            ("0::/system.slice/roleserver.service\n", true),
            ("0::/user.slice/user-7.slice/user@7.service/app.slice/roleserver.service\n", false),
            ("0::/system.slice/ci.service\n", false),
            ("", false),
        ] {
            assert_eq!(PodHost::parse_host(unified, own).is_started_by_systemd, expected, "{own}");
        }
    }
}
