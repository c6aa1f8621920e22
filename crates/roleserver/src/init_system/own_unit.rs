//! The role server's care for its own unit: bring the file up to date at each start, and check what the unit does.
//!
//! Only an enrolment used to write the file, so a new release that needs another text would never get it by a roll-out.
//! A role server that systemd started therefore writes the text of its release when it starts, and reloads systemd. It
//! never restarts the unit: the new text counts from the next start. `unit` decides what is
//! written, and [`unit_check`](crate::init_system::unit_check) what is wrong.
//!
//! A role server that something else started reads and writes no units: [`OwnGroup::parse_host`] decides that.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use backoff::ExponentialBackoff;
use model::host_finding::HostFinding;
use model::plain_text::replace_hidden;
use supervisor::context::{Runnable, Starting};

use crate::host_findings::HostFindings;
use crate::init_system::systemd::{Systemd, SystemdError, UNIT};
use crate::init_system::unit::{self, UnitAction};
use crate::init_system::unit_check::{
    OwnGroup, UnitManager, UnitSettings, assess_unit, edited_unit_finding, requested_settings,
};
use crate::mountinfo;

/// The source of the findings of this file.
const SOURCE: &str = "unit";
/// How often the unit is checked. An administrator's change is reported after that.
const CHECK_INTERVAL: Duration = Duration::from_mins(5);
/// How long after a start the first check is. Children have found their scopes by then.
const FIRST_CHECK: Duration = Duration::from_mins(1);
/// Two looks at the unit's processes, this far apart, tell long-lived ones from health probes.
const SETTLE_TIME: Duration = Duration::from_secs(20);

/// The unit that this process was started as, and how to reach its manager.
#[derive(Clone, Debug)]
pub struct OwnUnit {
    /// The manager that started the unit.
    pub systemd: Systemd,
    /// The group of the unit.
    pub group: OwnGroup,
}

impl OwnUnit {
    /// Finds the unit of this process. `None` if systemd did not start it.
    #[must_use]
    pub fn detect_host(home: Option<&Path>) -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let group = OwnGroup::parse_host(&mountinfo::read_mountinfo().ok()?, &own, UNIT)?;
        let systemd = match group.manager {
            UnitManager::System => Systemd::system(),
            UnitManager::User => Systemd::user(home?),
        };
        Some(Self { systemd, group })
    }

    /// Brings the unit file up to date. Returns whether somebody edited it, so that it stays. Blocks.
    pub fn refresh_file(&self) -> Result<bool, SystemdError> {
        let Some(text) = self.systemd.read_unit()? else { return Ok(false) };
        match unit::action_at_start(&text) {
            UnitAction::Write(text) => {
                self.systemd.write_unit(&text)?;
                tracing::info!("the unit file was brought up to date; it counts from the next start");
                Ok(false)
            }
            UnitAction::KeepEdited => Ok(true),
            UnitAction::Nothing | UnitAction::ReplaceEdited(_) => Ok(false),
        }
    }

    /// Brings the unit file up to date, and returns the finding about it if somebody edited it. Blocks.
    fn check_file(&self) -> Result<Option<HostFinding>, SystemdError> {
        Ok(self.refresh_file()?.then(|| edited_unit_finding(&self.systemd.unit_path())))
    }

    /// Checks the file, and the unit as systemd has it. `in_unit` are the programs in its group. Blocks.
    fn check_unit(&self, in_unit: &[String]) -> Result<Vec<HostFinding>, SystemdError> {
        let edited = self.check_file()?;
        let shown = self.systemd.show_unit(&requested_settings())?;
        let last_capability = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap").ok();
        let last_capability = last_capability.and_then(|number| number.trim().parse().ok());
        let settings = UnitSettings::parse(&shown, last_capability);
        let found = assess_unit(&settings, self.group.hierarchy, in_unit);
        Ok(edited.into_iter().chain(found).collect())
    }
}

/// Makes the runnable that cares for the unit.
#[must_use]
pub fn run_own_unit(own: OwnUnit, findings: HostFindings) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (own, findings) = (own.clone(), findings.clone());
        async move {
            let healthy = starting.mark_healthy();
            healthy.scope().until_cancelled(care_for_unit(&own, &findings)).await?;
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

/// Refreshes the file until that succeeds once, then checks file and unit for ever. A failure prevents nothing else.
async fn care_for_unit(own: &OwnUnit, findings: &HostFindings) {
    let mut failures = 0;
    let edited = loop {
        let unit = own.clone();
        match run_blocking(move || unit.check_file()).await {
            Ok(edited) => break edited,
            Err(error) => {
                failures += 1;
                if failures == 1 {
                    tracing::warn!(error, "the unit file could not be brought up to date; it is tried again");
                }
            }
        }
        tokio::time::sleep(ExponentialBackoff::DEFAULT.delay(failures, rand::random())).await;
    };
    findings.set(SOURCE, edited.into_iter().collect());
    tokio::time::sleep(FIRST_CHECK).await;
    loop {
        let before = list_processes(&own.group.directory);
        tokio::time::sleep(SETTLE_TIME).await;
        let unit = own.clone();
        let checked = run_blocking(move || {
            let after = list_processes(&unit.group.directory);
            unit.check_unit(&long_lived_programs(&before, &after))
        });
        match checked.await {
            Ok(found) => findings.set(SOURCE, found),
            // What was found before stays: systemd may be busy.
            Err(error) => tracing::debug!(error, "the unit cannot be checked"),
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SystemdError> + Send + 'static,
) -> Result<T, String> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The processes in a group and the groups below it, by pid, with the names of their programs. The calling process and
/// other role servers are left out.
fn list_processes(group: &Path) -> BTreeMap<i32, String> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let own_name = read_program_name(own);
    let mut found = BTreeMap::new();
    let mut left = vec![group.to_owned()];
    while let Some(directory) = left.pop() {
        let pids = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        for pid in
            pids.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0 && *pid != own)
        {
            let name = read_program_name(pid);
            if name.is_some() && name != own_name {
                found.insert(pid, name.unwrap_or_default());
            }
        }
        left.extend(subdirectories(&directory));
    }
    found
}

fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let directories =
        entries.filter_map(Result::ok).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.map(|entry| entry.path()).collect()
}

fn read_program_name(pid: i32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(replace_hidden(name.trim(), &[]))
}

/// The names of the programs that were there at both times, without repetition.
fn long_lived_programs(before: &BTreeMap<i32, String>, after: &BTreeMap<i32, String>) -> Vec<String> {
    let both = after.iter().filter(|(pid, name)| before.get(*pid) == Some(*name));
    let mut names: Vec<String> = both.map(|(_, name)| name.clone()).collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init_system::tests::manager;
    use crate::init_system::unit::{UnitFacts, render_unit};
    use crate::init_system::unit_check::UnitHierarchy;

    fn own_unit(root: &Path, fails: &str) -> OwnUnit {
        OwnUnit {
            systemd: manager(root, fails),
            group: OwnGroup {
                manager: UnitManager::System,
                hierarchy: UnitHierarchy::Unified,
                directory: root.join("group"),
            },
        }
    }

    fn facts() -> UnitFacts {
        UnitFacts {
            program: "/opt/roleserver".into(),
            state: "/var/lib/roleserver".into(),
            wanted_by: "multi-user.target".to_owned(),
        }
    }

    /// The text of the first releases.
    fn former_text() -> String {
        let lines = render_unit(&facts()).replace(
            "# Written by the role server. For changes use `systemctl edit`: a drop-in is kept.",
            "# Written by `roleserver enroll`; changes are overwritten.",
        );
        let kept = lines.lines().filter(|line| {
            !line.starts_with("# sha256")
                && !line.starts_with("# The role server raises")
                && !line.contains("NOFILE")
        });
        kept.fold(String::new(), |text, line| text + line + "\n")
    }

    #[test]
    fn start_rewrites_the_unit_of_an_earlier_release_and_reloads_without_a_restart() {
        let root = tempfile::tempdir().unwrap();
        let own = own_unit(root.path(), "nothing");
        let calls = || std::fs::read_to_string(root.path().join("calls")).unwrap_or_default();
        let read = || std::fs::read_to_string(own.systemd.unit_path()).unwrap();
        assert!(!own.refresh_file().unwrap(), "a unit that does not exist is not created");
        std::fs::create_dir_all(&own.systemd.units).unwrap();
        std::fs::write(own.systemd.unit_path(), former_text()).unwrap();
        assert!(!own.refresh_file().unwrap());
        assert_eq!(read(), render_unit(&facts()), "the unit was not rewritten at the start");
        assert_eq!(calls(), "daemon-reload\n");
        assert_eq!(std::fs::read_dir(&own.systemd.units).unwrap().count(), 1, "no temporary file stays");
        assert!(!own.refresh_file().unwrap());
        assert_eq!(calls(), "daemon-reload\n", "it is up to date");
    }

    #[test]
    fn start_keeps_an_edited_unit_and_a_link() {
        let root = tempfile::tempdir().unwrap();
        let own = own_unit(root.path(), "nothing");
        std::fs::create_dir_all(&own.systemd.units).unwrap();
        let edited = former_text().replace("RestartSec=2", "RestartSec=9");
        std::fs::write(own.systemd.unit_path(), &edited).unwrap();
        assert!(own.refresh_file().unwrap());
        assert_eq!(std::fs::read_to_string(own.systemd.unit_path()).unwrap(), edited);
        let elsewhere = root.path().join("elsewhere");
        std::fs::write(&elsewhere, former_text()).unwrap();
        std::fs::remove_file(own.systemd.unit_path()).unwrap();
        std::os::unix::fs::symlink(&elsewhere, own.systemd.unit_path()).unwrap();
        assert!(own.refresh_file().unwrap(), "an administrator made the link");
        assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), former_text());
        assert!(!root.path().join("calls").exists());
    }

    #[test]
    fn edit_while_the_role_server_runs_is_found_and_withdrawn() {
        let root = tempfile::tempdir().unwrap();
        let own = own_unit(root.path(), "nothing");
        std::fs::create_dir_all(&own.systemd.units).unwrap();
        let released = render_unit(&facts());
        for (text, is_edited) in [
            (released.clone(), false),
            (released.replace("RestartSec=2", "RestartSec=9"), true),
            (released, false),
        ] {
            std::fs::write(own.systemd.unit_path(), &text).unwrap();
            let found = own.check_unit(&[]).unwrap();
            assert_eq!(found.len(), usize::from(is_edited), "{text}: {found:?}");
            assert_eq!(std::fs::read_to_string(own.systemd.unit_path()).unwrap(), text);
        }
    }

    #[test]
    fn failed_reload_is_an_error_and_is_repeated() {
        let root = tempfile::tempdir().unwrap();
        let own = own_unit(root.path(), "daemon-reload");
        std::fs::create_dir_all(&own.systemd.units).unwrap();
        std::fs::write(own.systemd.unit_path(), former_text()).unwrap();
        for _ in 0..2 {
            let error = own.refresh_file().unwrap_err().to_string();
            assert!(error.ends_with("systemctl daemon-reload` failed: Access denied"), "{error}");
            assert_eq!(std::fs::read_to_string(own.systemd.unit_path()).unwrap(), former_text());
        }
    }

    #[test]
    fn programs_of_the_group_are_named_once_if_they_stay() {
        let processes = |list: &[(i32, &str)]| -> BTreeMap<i32, String> {
            list.iter().map(|(pid, name)| (*pid, (*name).to_owned())).collect()
        };
        let before = processes(&[
            (7, "etcd"),
            (8, "containerd-shim"),
            (9, "containerd-shim"),
            (10, "probe"),
            (11, "a"),
        ]);
        let after = processes(&[
            (7, "etcd"),
            (8, "containerd-shim"),
            (9, "containerd-shim"),
            (11, "b"),
            (12, "probe"),
        ]);
        assert_eq!(long_lived_programs(&before, &after), ["containerd-shim", "etcd"]);
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("family/etcd")).unwrap();
        let own = std::process::id();
        std::fs::write(root.path().join("cgroup.procs"), format!("{own}\n0\n")).unwrap();
        std::fs::write(root.path().join("family/etcd/cgroup.procs"), "1\n").unwrap();
        let pids: Vec<i32> = list_processes(root.path()).into_keys().collect();
        assert_eq!(pids, [1]);
        assert!(list_processes(Path::new("/nowhere")).is_empty());
    }
}
