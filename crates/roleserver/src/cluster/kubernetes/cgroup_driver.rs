//! Which program makes the control groups of pods: containerd and the kubelet themselves, or systemd.
//!
//! Where systemd runs the host with control groups of version 2, it expects to be the only one that writes them. So
//! pods are in slices and scopes of systemd there (`SystemdCgroup` of containerd, `cgroupDriver` of the kubelet), as
//! Kubernetes recommends.
//!
//! Kubernetes does not support another driver under pods that run: the kubelet would look for their groups at other
//! places. So a node keeps its driver while it may have pods, and only a node that is new, or whose pods were all
//! evicted for another bundle, gets the other one. The driver in use is in `kubernetes-cgroup-driver.json`, written
//! before a component is started with it.
//!
//! On hierarchies of version 1 the driver stays `cgroupfs`: the group above all pods has to exist in each hierarchy
//! before the kubelet starts, and systemd makes slices in some of them only.

use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::init_system::systemd::UNIT;
use crate::init_system::unit_check::{OwnGroup, UnitHierarchy, UnitManager};
use crate::mountinfo;

const NAME: &str = "kubernetes-cgroup-driver.json";

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

    /// Stores the driver.
    pub fn write(self, files: &ClusterFiles) -> Result<(), ClusterFilesError> {
        files.write_json(NAME, &DriverRecord { driver: self })
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
}

/// Chooses the driver. `previous` is the one in use, `None` if none is known.
#[must_use]
pub fn choose_driver(previous: Option<CgroupDriver>, may_have_pods: bool, host: PodHost) -> CgroupDriver {
    if may_have_pods {
        // An earlier release stored no driver and had only this one.
        return previous.unwrap_or(CgroupDriver::Cgroupfs);
    }
    if host.is_started_by_systemd && host.hierarchy == UnitHierarchy::Unified {
        CgroupDriver::Systemd
    } else {
        CgroupDriver::Cgroupfs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_changes_only_where_no_pod_can_run() {
        use CgroupDriver::{Cgroupfs, Systemd};
        let host = |is_started_by_systemd, hierarchy| PodHost { is_started_by_systemd, hierarchy };
        let (unified, legacy) = (UnitHierarchy::Unified, UnitHierarchy::Legacy);
        for (name, previous, may_have_pods, host, expected) in [
            ("new", None, false, host(true, unified), Systemd),
            ("new, version 1", None, false, host(true, legacy), Cgroupfs),
            ("new, not started by systemd", None, false, host(false, unified), Cgroupfs),
            ("of an earlier release, with pods", None, true, host(true, unified), Cgroupfs),
            ("with pods", Some(Cgroupfs), true, host(true, unified), Cgroupfs),
            ("drained", Some(Cgroupfs), false, host(true, unified), Systemd),
            ("drained, version 1", Some(Cgroupfs), false, host(true, legacy), Cgroupfs),
            ("with pods of systemd", Some(Systemd), true, host(true, unified), Systemd),
            ("with pods of systemd, started by hand", Some(Systemd), true, host(false, legacy), Systemd),
            ("drained, started by hand", Some(Systemd), false, host(false, unified), Cgroupfs),
        ] {
            assert_eq!(choose_driver(previous, may_have_pods, host), expected, "{name}");
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
