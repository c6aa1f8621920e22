//! Enrolment of a machine that has an agent already, or damaged state.

use std::fs::OpenOptions;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, anyhow};
use prost::Message as _;
use shepherd::proto::agent::v1 as wire;
use shepherd::proto::agent::v1::enroll_error::Kind;
use shepherd::proto::agent::v1::enroll_response::Result as Answer;

use super::callback::{Callback, curious};
use super::{Machine, files, request, signal, wait_for};
use crate::harness::aloud::TestResult;
use crate::harness::damage::{Damage, restore, snapshot};

/// A public key of minisign.
const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
/// A time that a shepherd reports, in milliseconds since 1970.
const SHEPHERD_TIME: i64 = 1_700_000_000_000;

#[test]
fn agent_is_left_alone_by_a_repetition_and_replaced_by_a_higher_fence() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let first = machine.enroll(&request(&callback, 1))?;
    let agent = machine.agent()?;
    let again = machine.enroll(&request(&callback, 1))?;
    assert_eq!(again.public_key, first.public_key);
    assert_eq!(machine.agent()?, agent);
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");

    // A hung agent does not end on request, and sends no heartbeats.
    signal(agent.pid, rustix::process::Signal::STOP);
    let taken_over = machine.enroll(&request(&callback, 2))?;
    assert_eq!(taken_over.public_key, first.public_key);
    assert!(!agent.is_alive());
    assert!(machine.agent()?.is_alive());
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");
    Ok(wait_for("a heartbeat of the new fence", || {
        Ok(callback
            .heartbeats()
            .iter()
            .any(|observations| observations.request.access_fence == 2)
            .then_some(()))
    })?)
}

#[test]
fn enrolment_brings_back_what_was_killed_with_its_supervisor() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    let (supervisor, agent) = (machine.supervisor()?, machine.agent()?);
    for process in [&supervisor, &agent] {
        signal(process.pid, rustix::process::Signal::KILL);
    }
    wait_for("the end of both", || Ok((!supervisor.is_alive() && !agent.is_alive()).then_some(())))?;
    // The same fence: a repetition still has to leave a running agent behind.
    machine.enroll(&request(&callback, 1))?;
    assert!(machine.agent()?.is_alive());
    assert_eq!(machine.processes()?.len(), 2);
    Ok(())
}

/// A process that has inherited the lock of a supervisor which has ended, as the child that a killed supervisor was
/// starting has until its `execve`. It ends with its standard input.
fn start_lock_heir(machine: &Machine) -> Result<Child> {
    let path = machine.path().join("supervisor.lock");
    let lock = OpenOptions::new().write(true).open(path)?;
    lock.lock()?;
    let mut command = Command::new("cat");
    // The command owns the descriptor of this process, which is closed without an unlock at the end of this function: an
    // enrolment stops the process that has taken the lock if it still has the file open.
    Ok(command.stdin(Stdio::piped()).stdout(lock).spawn()?)
}

#[test]
fn supervisor_waits_for_the_lock_of_one_that_was_killed() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    let (supervisor, agent) = (machine.supervisor()?, machine.agent()?);
    for process in [&supervisor, &agent] {
        signal(process.pid, rustix::process::Signal::KILL);
    }
    wait_for("the end of both", || Ok((!supervisor.is_alive() && !agent.is_alive()).then_some(())))?;
    let mut heir = start_lock_heir(&machine)?;
    let next = request(&callback, 2);
    std::thread::scope(|scope| -> Result<()> {
        let enrolment = scope.spawn(|| machine.enroll(&next));
        let waited = wait_for("the next supervisor", || {
            let log = std::fs::read_to_string(machine.state().log_path())?;
            Ok((log.contains("waiting until it has ended") || enrolment.is_finished()).then_some(()))
        });
        drop(heir.stdin.take());
        heir.wait()?;
        waited?;
        enrolment.join().map_err(|_| anyhow!("panicked"))??;
        Ok(())
    })?;
    assert!(machine.supervisor()?.is_alive() && machine.agent()?.is_alive());
    assert_ne!(machine.supervisor()?.instance, supervisor.instance);
    Ok(())
}

#[test]
fn enrolments_at_once_leave_one_agent_of_the_highest_fence() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let fences = [3, 1, 4, 2];
    let answers: Vec<Result<_>> = std::thread::scope(|scope| {
        let handles = fences.map(|fence| {
            let bytes = request(&callback, fence).encode_to_vec();
            let machine = &machine;
            scope.spawn(move || machine.enroll_bytes(&bytes))
        });
        handles.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("panicked"))?).collect()
    });
    for (fence, answer) in fences.into_iter().zip(answers) {
        match answer?.1.result {
            Some(Answer::Success(_)) => {}
            Some(Answer::Error(error)) => {
                assert_eq!(error.kind(), Kind::StaleFence, "{error:?}");
                assert!(error.current_fence > fence, "{error:?}");
            }
            None => panic!("no answer"),
        }
    }
    assert_eq!(machine.state().read_enrolment()?.context("not enrolled")?.access_fence(), 4);
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");
    Ok(wait_for("a heartbeat of the highest fence", || {
        Ok(callback
            .heartbeats()
            .last()
            .is_some_and(|observations| observations.request.access_fence == 4)
            .then_some(()))
    })?)
}

#[test]
fn refused_enrolment_changes_nothing() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 5))?;
    let before = files(&machine.path())?;
    assert_eq!(before.len(), 4);

    let stale = machine.refusal(&request(&callback, 4))?;
    assert_eq!((stale.kind(), stale.current_fence), (Kind::StaleFence, 5));
    let other = "0b1a4a52-4a5c-4b66-8a5e-00000000ffff".to_owned();
    let machine_id = wire::EnrollRequest { machine_id: other.clone(), ..request(&callback, 6) };
    assert_eq!(machine.refusal(&machine_id)?.kind(), Kind::OtherMachine);
    let bmdb_id = wire::EnrollRequest { bmdb_id: other, ..request(&callback, 6) };
    assert_eq!(machine.refusal(&bmdb_id)?.kind(), Kind::OtherBmdb);
    let invalid = wire::EnrollRequest { ca_certificates: vec![vec![0; 9]], ..request(&callback, 6) };
    assert_eq!(machine.refusal(&invalid)?.kind(), Kind::Invalid);
    let (output, garbage) = machine.enroll_bytes(b"GET / HTTP/1.1\r\n\r\n")?;
    assert_eq!(output.status.code(), Some(2), "it is malformed");
    assert!(matches!(garbage.result, Some(Answer::Error(error)) if error.kind() == Kind::Invalid));

    assert_eq!(files(&machine.path())?, before);
    assert!(machine.agent()?.is_alive());
    Ok(())
}

/// As a loss of power, a disk error, another program or a newer release leaves them.
#[test]
fn damaged_hint_never_refuses_an_enrolment() -> TestResult {
    let hints = [
        "agent.json",
        "supervisor.json",
        "learned.json",
        "last_heartbeat.json",
        "time.json",
        "update.json",
        "release.json",
    ];
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    for (fence, damage) in (2..).zip(Damage::ALL) {
        let before = (machine.supervisor()?, machine.agent()?);
        for name in hints {
            damage.inflict(&machine.path().join(name))?;
        }
        machine
            .enroll(&wire::EnrollRequest { shepherd_time_ms: SHEPHERD_TIME, ..request(&callback, fence) })?;
        let after = (machine.supervisor()?, machine.agent()?);
        assert!(after.0.is_alive() && after.1.is_alive(), "{damage:?}");
        // Those of before had no record any more, and were found by their locks.
        assert!(!before.0.is_alive() && !before.1.is_alive(), "{damage:?}: two agents run");
        let state = machine.state();
        assert!(state.read_time_sample()?.is_some(), "{damage:?}");
        wait_for("the outcome of a heartbeat is stored again", || {
            Ok(state.read_last_heartbeat().is_ok_and(|last| last.is_some()).then_some(()))
        })?;
    }
    Ok(())
}

/// Each file of truth is named with its way back, and stays. So does everything
/// else: the enrolment is refused before anything is written.
#[test]
fn damaged_truth_refuses_an_enrolment_with_the_way_back_and_stays() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let keyed =
        |fence| wire::EnrollRequest { signing_keys: vec![KEY.to_owned()], ..request(&callback, fence) };
    machine.enroll(&keyed(1))?;
    let agent = machine.agent()?;
    // Only an order to replace the keys needs the file of them. Without one, the agent reports the damage.
    let replacing = wire::EnrollRequest { replace_signing_keys: true, ..keyed(2) };
    let names = ["enrolment.json", "identity.pk8", "signing.json"];
    let again = "remove it and let the shepherd enrol this machine again";
    let cases = [
        (names[0], keyed(2), again),
        (names[1], keyed(2), again),
        (
            names[2],
            replacing,
            "look at it, write {\"keys\":[],\"requires_signed_declarations\":true} into it",
        ),
    ];
    let truth = || {
        let mut found = snapshot(&machine.path())?;
        found.retain(|path, _| names.iter().any(|name| path.starts_with(machine.path().join(name))));
        anyhow::Ok(found)
    };
    for (name, refused, way_back) in cases {
        let path = machine.path().join(name);
        for damage in Damage::ALL {
            let whole = damage.inflict(&path)?;
            let before = truth()?;
            let error = machine.refusal(&refused)?;
            assert_eq!(error.kind(), Kind::Failed, "{name} {damage:?}");
            let text = error.message;
            assert!(text.contains(&format!("{} is damaged (", path.display())), "{damage:?}: {text}");
            assert!(text.contains(way_back) && text.lines().count() == 1, "{name} {damage:?}: {text}");
            assert_eq!(truth()?, before, "{name} {damage:?}");
            assert!(agent.is_alive(), "{name} {damage:?}");
            restore(&path, &whole)?;
        }
    }
    assert_eq!(machine.state().read_enrolment()?.context("not enrolled")?.access_fence(), 1);
    assert_eq!(machine.agent()?, agent, "it was restarted");

    // Also a machine that has lost its enrolment is not enrolled with a key that it cannot use.
    machine.end_role_server()?;
    std::fs::remove_file(machine.path().join("enrolment.json"))?;
    let whole = Damage::Truncated.inflict(&machine.path().join("identity.pk8"))?;
    let before = truth()?;
    assert!(machine.refusal(&keyed(3))?.message.contains("identity.pk8 is damaged ("));
    assert_eq!(truth()?, before);
    restore(&machine.path().join("identity.pk8"), &whole)?;
    machine.enroll(&keyed(3))?;
    Ok(())
}

#[test]
fn damaged_state_and_a_second_agent_are_answered_in_words() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let output = machine.command("run").output()?;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr)?.contains("this machine is not enrolled"));
    let status = machine.command("status").output()?;
    assert_eq!(status.status.code(), Some(3));
    assert!(String::from_utf8(status.stdout)?.contains("not enrolled"));

    machine.enroll(&request(&callback, 1))?;
    assert_eq!(machine.command("status").output()?.status.code(), Some(0));
    let second = machine.command("run").output()?;
    assert_eq!(second.status.code(), Some(1));
    let text = String::from_utf8(second.stderr)?;
    assert!(text.contains("another role server already runs in"), "{text}");

    std::fs::write(machine.path().join("enrolment.json"), b"{\"machine_id\":")?;
    let error = machine.refusal(&request(&callback, 2))?;
    assert_eq!(error.kind(), Kind::Failed);
    assert!(error.message.contains("enrolment.json is damaged"), "{}", error.message);
    Ok(())
}
