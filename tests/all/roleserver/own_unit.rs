//! The start of a role server that systemd started: its unit file is brought up to date. A script takes the place of
//! `systemctl`, and a directory that of `/etc/systemd/system`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use shepherd::roleserver::host_findings::HostFindings;
use shepherd::roleserver::init_system::own_unit::{OwnUnit, run_own_unit};
use shepherd::roleserver::init_system::systemd::Systemd;
use shepherd::roleserver::init_system::unit_check::{OwnGroup, UnitHierarchy, UnitManager};
use shepherd::supervisor::supervise::{Supervisor, SupervisorSettings};

use crate::harness::aloud::TestResult;

/// The unit that every release wrote until the role server began to care for it, byte for byte.
const FORMER_UNIT: &str = "\
# Written by `roleserver enroll`; changes are overwritten.
[Unit]
Description=Shepherd role server
Wants=network-online.target
After=network-online.target
# A machine that stops calling is a machine that somebody has to visit.
StartLimitIntervalSec=0

[Service]
ExecStart=\"/root/role server\" run --state_dir \"/var/lib/roleserver\"
Restart=always
RestartSec=2
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
";
/// The start writes a file and calls a script.
const LIMIT: Duration = Duration::from_secs(30);

/// A unit below `root`, with a `systemctl` that records its calls.
fn own_unit(root: &Path, unit: &str) -> Result<OwnUnit> {
    let (script, calls) = (root.join("systemctl"), root.join("calls"));
    fs::write(&script, format!("echo \"$@\" >> {}\n", calls.display()))?;
    let systemd = Systemd {
        systemctl: vec!["sh".to_owned(), script.display().to_string()],
        units: root.join("units"),
        wanted_by: "multi-user.target",
        runtime_directory: None,
        until: None,
    };
    fs::create_dir(&systemd.units)?;
    fs::write(systemd.unit_path(), unit)?;
    let group = OwnGroup {
        manager: UnitManager::System,
        hierarchy: UnitHierarchy::Unified,
        directory: root.join("group"),
    };
    Ok(OwnUnit { systemd, group })
}

/// Polls until the condition holds, or the limit has passed; returns whether it holds.
async fn holds_in_time(condition: impl Fn() -> bool) -> bool {
    let end = Instant::now() + LIMIT;
    while !condition() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    condition()
}

#[tokio::test]
async fn start_of_a_new_release_rewrites_the_unit_and_restarts_nothing() -> TestResult {
    let root = tempfile::tempdir()?;
    let own = own_unit(root.path(), FORMER_UNIT)?;
    let calls = || fs::read_to_string(root.path().join("calls")).unwrap_or_default();
    let unit = || fs::read_to_string(own.systemd.unit_path()).unwrap_or_default();
    let findings = HostFindings::default();
    let tree = Supervisor::start(run_own_unit(own.clone(), findings.clone()), SupervisorSettings::default());
    assert!(
        holds_in_time(|| calls() == "daemon-reload\n").await,
        "the start did not rewrite the unit: {}",
        unit()
    );
    tree.stop().await;
    let unit = unit();
    assert!(unit.contains("\nLimitNOFILE=1024:1048576\n"), "{unit}");
    assert!(
        unit.contains("\nExecStart=\"/root/role server\" run --state_dir \"/var/lib/roleserver\"\n"),
        "program and state directory stay: {unit}"
    );
    assert!(findings.collect().is_empty());
    Ok(())
}

#[tokio::test]
async fn edited_unit_is_kept_and_reported() -> TestResult {
    let root = tempfile::tempdir()?;
    let edited = FORMER_UNIT.replace("TimeoutStopSec=10", "TimeoutStopSec=90");
    let own = own_unit(root.path(), &edited)?;
    let findings = HostFindings::default();
    let tree = Supervisor::start(run_own_unit(own.clone(), findings.clone()), SupervisorSettings::default());
    assert!(holds_in_time(|| !findings.collect().is_empty()).await, "the edited unit was not reported");
    tree.stop().await;
    let found = findings.collect();
    assert!(found[0].message.contains("was edited, so no release replaces it"), "{found:?}");
    assert_eq!(fs::read_to_string(own.systemd.unit_path())?, edited);
    assert!(!root.path().join("calls").exists(), "nothing was reloaded");
    Ok(())
}
