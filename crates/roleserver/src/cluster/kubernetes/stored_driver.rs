//! The cgroup driver of this worker: choose it, store it, and report what contradicts it.
//!
//! [`choose_driver`] decides; this reads what it decides on. The choice is made once in the life of a process, and again
//! when the node is drained. Nobody else starts a kubelet meanwhile, so pods that are found at other places later are
//! those that a drain has left, which are restarted with the driver that was chosen for the drained node.

use model::host_finding::{HostFinding, HostFindingKind};
use model::kubernetes::bundle_manifest::KubernetesDuty;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::kubernetes::cgroup_driver::{
    CgroupDriver, DriverChoice, DriverFacts, FINDINGS, PodHost, choose_driver,
};
use crate::cluster::kubernetes::components::{kubelet, service_id};
use crate::cluster::kubernetes::pod_cgroups::PodCgroups;
use crate::host_findings::HostFindings;

/// Why no driver was chosen.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The choice could not be stored.
    #[error(transparent)]
    Files(#[from] ClusterFilesError),
    /// It is not known where pods run, and a guess could end them.
    #[error("looking for running pods in the control groups of this worker failed: {0}; it is tried again")]
    Pods(#[source] std::io::Error),
}

/// The driver of this worker, with what it follows from.
#[derive(Debug)]
pub struct StoredDriver {
    files: ClusterFiles,
    pods: PodCgroups,
    host: PodHost,
    findings: HostFindings,
    /// The choice of this process.
    chosen: Option<CgroupDriver>,
}

impl StoredDriver {
    /// The driver of the worker with these files and control groups. Contradictions become `findings`.
    #[must_use]
    pub fn new(files: ClusterFiles, pods: PodCgroups, host: PodHost, findings: HostFindings) -> Self {
        Self { files, pods, host, findings, chosen: None }
    }

    /// The driver for components that are not started now: the worker is off, or waits.
    pub fn look_up(&mut self) -> CgroupDriver {
        self.chosen = None;
        CgroupDriver::read(&self.files).unwrap_or_default()
    }

    /// Stores the choice of this process again if the file is damaged or gone. Without the file, no host is prepared for
    /// a kubelet.
    pub fn restore_file(&self) {
        let Some(chosen) = self.chosen.filter(|chosen| CgroupDriver::read(&self.files) != Some(*chosen))
        else {
            return;
        };
        // Components that run need no file, so this is no reason to end them.
        match chosen.write(&self.files) {
            Ok(()) => tracing::warn!("the file with the cgroup driver was damaged, and was written again"),
            Err(error) => {
                tracing::warn!(%error, "the damaged file with the cgroup driver was not written again");
            }
        }
    }

    /// Chooses the driver, and stores it before a component is started with it. `is_drained` is whether a drain has ended
    /// every pod that it ends.
    pub fn choose(&mut self, is_drained: bool) -> Result<CgroupDriver, DriverError> {
        if let Some(chosen) = self.chosen.filter(|_| !is_drained) {
            self.restore_file();
            return Ok(chosen);
        }
        let stored = CgroupDriver::read(&self.files);
        let kubelet = service_id(KubernetesDuty::Worker, kubelet::NAME);
        let facts = DriverFacts {
            stored,
            pods: self.pods.find_running().map_err(DriverError::Pods)?,
            is_new: !self.files.kubernetes_directory().join(kubelet.child_name()).exists(),
            is_drained,
            host: self.host,
        };
        let DriverChoice { driver, conflict } = choose_driver(facts);
        if stored != Some(driver) {
            driver.write(&self.files)?;
        }
        let finding = |message| HostFinding { kind: HostFindingKind::PodCgroups, message };
        self.findings.set(FINDINGS, conflict.map(finding).into_iter().collect());
        self.chosen = Some(driver);
        Ok(driver)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::init_system::unit_check::UnitHierarchy;

    /// A worker with version 2 alone. A plain directory is its hierarchy.
    struct Worker {
        root: tempfile::TempDir,
        files: ClusterFiles,
        findings: HostFindings,
    }

    impl Worker {
        fn new(stored: CgroupDriver) -> Self {
            let root = tempfile::tempdir().unwrap();
            let files = ClusterFiles::in_state_directory(&root.path().join("state"));
            stored.write(&files).unwrap();
            let kubelet = service_id(KubernetesDuty::Worker, kubelet::NAME).child_name();
            fs::create_dir_all(files.kubernetes_directory().join(kubelet)).unwrap();
            Self { root, files, findings: HostFindings::default() }
        }

        /// A process of a pod in this group.
        fn add_pod(&self, group: &str) {
            let group = self.root.path().join("tree").join(group);
            fs::create_dir_all(&group).unwrap();
            fs::write(group.join("cgroup.procs"), "12\n").unwrap();
        }

        /// The driver as a new process finds it.
        fn started(&self) -> StoredDriver {
            let tree = self.root.path().join("tree");
            let mountinfo = format!("30 28 0:26 / {} rw - cgroup2 cgroup2 rw\n", tree.display());
            let host = PodHost { is_started_by_systemd: true, hierarchy: UnitHierarchy::Unified };
            let pods = PodCgroups::parse_host(&mountinfo, "roleserver-7");
            StoredDriver::new(self.files.clone(), pods, host, self.findings.clone())
        }
    }

    /// Roll-back to the release before, which has its pods in groups of cgroupfs, and a second update.
    #[test]
    fn pods_of_the_release_before_are_found_although_the_file_names_systemd() {
        let worker = Worker::new(CgroupDriver::Systemd);
        worker.add_pod("roleserver-7-pods/kubepods/burstable/pod9/a");
        assert_eq!(worker.started().choose(false).unwrap(), CgroupDriver::Cgroupfs);
        // The hook that prepares the host ends the pods of the driver that is not stored.
        assert_eq!(CgroupDriver::read(&worker.files), Some(CgroupDriver::Cgroupfs));
        let found = worker.findings.collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].message.contains("names systemd, as after a roll-back"), "{found:?}");
        assert_eq!(worker.started().choose(true).unwrap(), CgroupDriver::Systemd, "once it is drained");
        assert!(worker.findings.collect().is_empty());
    }

    #[test]
    fn choice_for_a_drained_node_outlives_the_drain_with_its_process() {
        let worker = Worker::new(CgroupDriver::Cgroupfs);
        worker.add_pod("roleserver-7-pods/kubepods/pod-of-a-daemon-set");
        let mut driver = worker.started();
        assert_eq!(driver.choose(false).unwrap(), CgroupDriver::Cgroupfs);
        assert_eq!(driver.choose(true).unwrap(), CgroupDriver::Systemd);
        // The kubelet is being restarted: its node counts as drained no more, and the pod is still there.
        assert_eq!(driver.choose(false).unwrap(), CgroupDriver::Systemd);
        assert_eq!(driver.look_up(), CgroupDriver::Systemd);
        assert_eq!(
            worker.started().choose(false).unwrap(),
            CgroupDriver::Cgroupfs,
            "a process that was killed"
        );
    }

    #[test]
    fn damaged_file_is_written_again_by_the_process_that_chose() {
        let worker = Worker::new(CgroupDriver::Cgroupfs);
        worker.add_pod("roleserver-7-pods/kubepods/burstable/pod9/a");
        let mut driver = worker.started();
        assert_eq!(driver.choose(false).unwrap(), CgroupDriver::Cgroupfs);
        let file = worker.root.path().join("state/cluster/kubernetes-cgroup-driver.json");
        fs::write(&file, "{").unwrap();
        assert_eq!(CgroupDriver::read(&worker.files), None);
        assert_eq!(driver.choose(false).unwrap(), CgroupDriver::Cgroupfs);
        assert_eq!(CgroupDriver::read(&worker.files), Some(CgroupDriver::Cgroupfs));
        fs::remove_file(&file).unwrap();
        driver.restore_file();
        assert_eq!(CgroupDriver::read(&worker.files), Some(CgroupDriver::Cgroupfs));
        // A worker that is off stores nothing.
        driver.look_up();
        fs::remove_file(&file).unwrap();
        driver.restore_file();
        assert_eq!(CgroupDriver::read(&worker.files), None);
    }

    #[test]
    fn groups_that_cannot_be_read_change_nothing() {
        let worker = Worker::new(CgroupDriver::Systemd);
        fs::create_dir_all(worker.root.path().join("tree/roleserver-7-pods/cgroup.procs")).unwrap();
        let error = worker.started().choose(false).unwrap_err().to_string();
        assert!(error.starts_with("looking for running pods"), "{error}");
        assert_eq!(CgroupDriver::read(&worker.files), Some(CgroupDriver::Systemd));
    }
}
