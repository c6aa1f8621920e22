//! Calls to systemd over its private socket, and every way in which they fail.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use shepherd_roleserver::child::scope::scope_properties;
use shepherd_roleserver::child::spec::ResourceLimits;
use shepherd_roleserver::systemd_manager::manager::{ScopeError, SystemdManager, UnitState};

use crate::fake_systemd::{Conduct, FakeSystemd};

#[test]
fn scope_is_made_read_and_found_again() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let systemd = FakeSystemd::start(&directory.path().join("private"), directory.path())?;
    let manager =
        SystemdManager { socket: systemd.socket.clone(), deadline: Duration::from_mins(1), until: None };
    let properties = scope_properties("web", &[12], &ResourceLimits::default());
    let state =
        UnitState { active: "active".to_owned(), control_group: "/shepherd.slice/a.scope".to_owned() };
    assert_eq!(manager.start_scope("a.scope", &properties)?, state);
    assert_eq!(systemd.pids(&state.control_group), [12]);
    assert_eq!(manager.read_unit("a.scope")?, Some(state));
    assert_eq!(manager.read_unit("b.scope")?, None);
    assert_eq!(manager.control_group()?, "");
    let again = manager.start_scope("a.scope", &properties);
    assert!(matches!(&again, Err(ScopeError::Exists(name)) if name == "a.scope"), "{again:?}");
    manager.attach_processes("a.scope", "", &[13, 14])?;
    assert_eq!(systemd.pids("/shepherd.slice/a.scope"), [12, 13, 14]);
    Ok(())
}

#[test]
fn failed_call_is_a_sentence_and_ends_within_its_deadline() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let systemd = FakeSystemd::start(&directory.path().join("private"), directory.path())?;
    let manager = |deadline| SystemdManager { socket: systemd.socket.clone(), deadline, until: None };
    let (short, long) = (Duration::from_millis(150), Duration::from_mins(1));
    for (conduct, deadline, expected, is_silence) in [
        (Conduct::Silent, short, "authenticating to systemd: systemd did not answer within 0.15 s", true),
        (Conduct::Slow, short, "the start of Slow.scope: systemd did not answer within 0.15 s", true),
        (Conduct::FailedJob, long, "that starts FailedJob.scope ended with the result \"failed\"", false),
        (
            Conduct::Garbage,
            long,
            "the answer of systemd is malformed: it is not in little-endian order",
            false,
        ),
        (Conduct::Suspicious, long, "systemd refused: REJECTED EXTERNAL", false),
    ] {
        systemd.set_conduct(conduct);
        let begun = Instant::now();
        let made = manager(deadline).start_scope(&format!("{conduct:?}.scope"), &[]);
        let error = made.err().with_context(|| format!("{conduct:?}: it succeeded"))?;
        assert!(begun.elapsed() < Duration::from_secs(30), "{conduct:?}");
        assert!(error.to_string().contains(expected), "{conduct:?}: {error}");
        let ScopeError::Manager(error) = error else { anyhow::bail!("{error}") };
        assert_eq!(error.is_silence(), is_silence, "{conduct:?}");
    }
    let nowhere = SystemdManager { socket: directory.path().join("nothing"), deadline: long, until: None };
    let error = nowhere.read_unit("a.scope").err().context("it succeeded")?;
    assert!(error.is_silence());
    assert!(error.to_string().starts_with("systemd cannot be reached at "), "{error}");
    Ok(())
}

#[test]
fn operation_ends_with_the_time_of_its_caller() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let systemd = FakeSystemd::start(&directory.path().join("private"), directory.path())?;
    systemd.set_conduct(Conduct::Silent);
    let (begun, deadline) = (Instant::now(), Duration::from_mins(2));
    let until = Some(begun + Duration::from_secs(1));
    let manager = SystemdManager { socket: systemd.socket.clone(), deadline, until };
    while Instant::now() < begun + Duration::from_secs(1) {
        let error = manager.control_group().err().context("it succeeded")?;
        assert!(error.is_silence(), "{error}");
    }
    let error = manager.read_unit("a.scope").err().context("it succeeded")?;
    assert!(error.is_silence());
    assert_eq!(error.to_string(), "no time is left for another call to systemd");
    assert!(begun.elapsed() < Duration::from_mins(1), "it took the time of an operation");
    Ok(())
}
