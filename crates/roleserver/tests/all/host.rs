//! A host for children: directories that stand in for control groups, and this program as the launcher.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use shepherd_roleserver::child::cgroup::CgroupMounts;
use shepherd_roleserver::child::launch::{self, ChildRecord};
use shepherd_roleserver::child::lifecycle::ChildContext;
use shepherd_roleserver::child::placement::Scopes;
use shepherd_roleserver::child::scope::StartingUnit;
use shepherd_roleserver::child::spec::{ChildSpec, ResourceLimits};
use shepherd_roleserver::systemd_manager::manager::SystemdManager;
use tokio_util::sync::CancellationToken;

use crate::fake_systemd::FakeSystemd;

/// The deadline of every wait. What has not happened by then never will.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);
/// Control group of the role server's unit.
pub(crate) const UNIT_GROUP: &str = "/system.slice/roleserver.service";
/// Makes this program the launcher of a child.
const LAUNCHER_VARIABLE: &str = "SHEPHERD_TEST_LAUNCHER";

/// Not a test: the launcher, which carries out the order on its standard input. The harness writes to standard output,
/// so the script that starts it has put the launcher's output on descriptor 3.
#[test]
fn stand_in_for_the_launcher() -> Result<()> {
    if std::env::var_os(LAUNCHER_VARIABLE).is_none() {
        return Ok(());
    }
    let output = fs::OpenOptions::new().write(true).open("/proc/self/fd/3")?;
    rustix::stdio::dup2_stdout(&output)?;
    let why = launch::execute();
    anyhow::bail!("{why}")
}

/// A host. The processes that a test leaves end with it.
pub(crate) struct Host {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) systemd: FakeSystemd,
    pub(crate) children: ChildContext,
}

impl Host {
    pub(crate) fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let (tree, launcher) = (directory.path().join("tree"), directory.path().join("launcher"));
        fs::create_dir_all(tree.join(UNIT_GROUP.trim_start_matches('/')))?;
        let systemd = FakeSystemd::start(&directory.path().join("private"), &tree)?;
        let program = std::env::current_exe()?;
        let script = format!(
            "#!/bin/sh\nexec 3>&1 >/dev/null\nexec /usr/bin/env {LAUNCHER_VARIABLE}=1 '{}' \
             host::stand_in_for_the_launcher --exact --nocapture --test-threads=1\n",
            program.display()
        );
        fs::write(&launcher, script)?;
        fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755))?;
        let mountinfo = format!("30 28 0:26 / {} rw - cgroup2 cgroup2 rw\n", tree.display());
        let unit =
            StartingUnit { manager_group: String::new(), unit_group: UNIT_GROUP.to_owned(), is_user: false };
        let manager = SystemdManager { socket: systemd.socket.clone(), deadline: PATIENCE, until: None };
        let children = ChildContext {
            directory: directory.path().join("children"),
            mounts: CgroupMounts::at_path(&mountinfo, UNIT_GROUP),
            launcher,
            shutdown: CancellationToken::new(),
            scopes: Some(Scopes::new(manager, unit, mountinfo)),
        };
        Ok(Self { directory, systemd, children })
    }

    /// The same host with a role server that gives systemd only this long to answer.
    pub(crate) fn with_deadline(mut self, deadline: Duration) -> Self {
        if let Some(scopes) = &mut self.children.scopes {
            scopes.manager.deadline = deadline;
        }
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A group of the tree, as a directory.
    pub(crate) fn group(&self, group: &str) -> PathBuf {
        self.path("tree").join(group.trim_start_matches('/'))
    }

    /// The group of a child in the layout of earlier releases.
    pub(crate) fn old_group(&self, name: &str) -> String {
        format!("{UNIT_GROUP}/{}/{name}", self.children.instance_name())
    }

    pub(crate) fn scope_name(&self, name: &str, number: u64) -> String {
        format!("shepherd-{}-{name}-{number}.scope", self.children.instance_name())
    }

    pub(crate) fn spec(&self, script: &str) -> ChildSpec {
        ChildSpec {
            name: "web".to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            environment: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
            directory: self.directory.path().to_owned(),
            user: None,
            groups: Vec::new(),
            confinement: None,
            limits: ResourceLimits::default(),
            stale_files: Vec::new(),
            survivor_prefix: None,
            stop_time: Duration::from_secs(30),
            declared: None,
        }
    }

    pub(crate) fn record(&self) -> Result<ChildRecord> {
        launch::read_record(&self.children.record_path("web")).context("no record")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.children.log_path("web")).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for name in self.children.recorded_names() {
            if let Some(record) = launch::read_record(&self.children.record_path(&name)) {
                let _ = record.instance.stop(Duration::ZERO);
            }
        }
    }
}

/// Waits for something that another process does.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        anyhow::ensure!(Instant::now() < end, "waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
