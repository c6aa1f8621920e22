//! Updates of the role server: a release is tried, is kept once a shepherd has received its heartbeat, and is otherwise
//! rolled back by the machine itself.

use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::boot_clock::{BootClock as _, HostClock};
use shepherd::roleserver::process::{ProcessInstance, program_digest};
use shepherd::roleserver::state_directory::Lock;
use shepherd::roleserver::update::decision::{Trial, UpdateResult};
use shepherd::roleserver::update::files::UpdateFiles;

use super::callback::Callback;
use super::{Machine, PATIENCE, request, signal, wait_for};
use crate::harness::aloud::TestResult;

/// A shepherd that orders releases.
struct Orders {
    callback: Callback,
    order: Arc<Mutex<Option<wire::ReleaseOrder>>>,
}

impl Orders {
    fn start() -> Result<Self> {
        let order = Arc::<Mutex<Option<wire::ReleaseOrder>>>::default();
        let given = order.clone();
        let callback = Callback::start(move |request| {
            Ok(wire::HeartbeatResponse {
                hardware_report_requested: request.hardware_report.is_none(),
                release_order: given.lock().map_or(None, |order| order.clone()),
                ..Default::default()
            })
        })?;
        Ok(Self { callback, order })
    }

    fn give(&self, generation: i64, sha256: &[u8], deadline_seconds: u32) -> Result<()> {
        let order = wire::ReleaseOrder {
            generation,
            sha256: sha256.to_vec(),
            deadline_seconds,
            signature: String::new(),
            is_unsigned: true,
        };
        *self.order.lock().map_err(|_| anyhow::anyhow!("poisoned"))? = Some(order);
        Ok(())
    }

    /// The report that the shepherd receives once this order has ended.
    fn ended(&self, machine: &Machine, generation: i64) -> Result<wire::ReleaseReport> {
        let ended = wait_for("the end of an order", || {
            let newest = self
                .callback
                .heartbeats()
                .into_iter()
                .rev()
                .find_map(|observations| observations.request.release_report);
            Ok(newest.filter(|report| report.generation == generation))
        });
        ended.with_context(|| std::fs::read_to_string(machine.state().log_path()).unwrap_or_default())
    }
}

/// Whether a process has closed itself to others: it lowers its limit of core files at last.
fn is_closed(process: &ProcessInstance) -> Result<bool> {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.pid))?;
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size"));
    Ok(core.and_then(|rest| rest.split_whitespace().next()) == Some("0"))
}

fn digest(path: &Path) -> Result<Vec<u8>> {
    Ok(hex::decode(program_digest(path)?)?)
}

fn another(program: &Path, with: &[u8]) -> Result<Vec<u8>> {
    Ok([&std::fs::read(program)?[..], with].concat())
}

fn beside(program: &Path, what: &str) -> std::path::PathBuf {
    let mut name = program.as_os_str().to_owned();
    name.push(what);
    name.into()
}

#[test]
fn release_whose_heartbeat_arrives_stays_and_outlives_its_process() -> TestResult {
    let orders = Orders::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&request(&orders.callback, 1))?;
    let (former, process) = (digest(&machine.program)?, machine.agent()?);
    let release = orders.callback.serve(another(&machine.program, b"2")?)?;
    orders.give(1, &release, 120)?;
    let report = orders.ended(&machine, 1)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &release));
    assert_eq!(machine.agent()?.instance, process.instance, "it is the same process");
    assert!(is_closed(&process.instance)?, "and closed again, although execve opened it");
    assert_eq!(digest(&machine.program)?, release, "it is started from now on");
    assert_eq!(digest(&beside(&machine.program, ".previous"))?, former);
    let files = UpdateFiles::in_state_directory(&machine.path());
    assert_eq!(files.read_trial(), None);

    // A second release, installed by a process that has replaced itself before.
    let second = orders.callback.serve(another(&machine.program, b"3")?)?;
    orders.give(2, &second, 120)?;
    let report = orders.ended(&machine, 2)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &second));
    assert_eq!(machine.agent()?.instance, process.instance);

    signal(process.pid, rustix::process::Signal::KILL);
    let next = wait_for("the next process", || {
        Ok(machine.state().read_agent_process()?.filter(|agent| agent.instance != process.instance))
    })?;
    assert_eq!(hex::decode(&next.program_sha256)?, second);
    // The ordered release runs already; an older order is ignored.
    orders.give(3, &second, 120)?;
    let report = orders.ended(&machine, 3)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &second));
    assert_eq!(machine.agent()?.instance, next.instance);
    Ok(())
}

#[test]
fn release_that_is_no_good_is_given_up_by_the_machine_itself() -> TestResult {
    let orders = Orders::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&request(&orders.callback, 1))?;
    let former = digest(&machine.program)?;
    let half = std::fs::read(&machine.program)?;
    let half = half[..half.len() / 2].to_vec();
    let bad: [(&str, Vec<u8>, &str); 4] = [
        ("no program", b"what is this".to_vec(), ""),
        (
            "ends at once",
            b"#!/bin/sh\nexit 1\n".to_vec(),
            "ended before a shepherd acknowledged its heartbeat",
        ),
        ("half a program", half, ""),
        (
            "says nothing",
            b"#!/bin/sh\nexec sleep 1000\n".to_vec(),
            "no shepherd acknowledged its heartbeat within 4 s",
        ),
    ];
    for ((what, bytes, text), generation) in bad.into_iter().zip(1..) {
        let release = orders.callback.serve(bytes)?;
        orders.give(generation, &release, if what == "says nothing" { 4 } else { 60 })?;
        let report = orders.ended(&machine, generation)?;
        assert!(!report.error.is_empty() && report.error.contains(text), "{what}: {report:?}");
        assert_eq!(report.sha256, former, "{what}: {report:?}");
        assert_eq!(digest(&machine.program)?, former, "{what}");
        assert_eq!(UpdateFiles::in_state_directory(&machine.path()).read_trial(), None, "{what}");
        assert!(!beside(&machine.program, ".candidate").exists(), "{what}");
    }
    // Its heartbeats arrive, and the release is not tried again although its order still exists.
    let process = machine.agent()?;
    let before = orders.callback.heartbeats().len();
    wait_for("more heartbeats", || Ok((orders.callback.heartbeats().len() > before + 4).then_some(())))?;
    assert_eq!(machine.agent()?, process);
    // A release that no shepherd has is given up in time, and a valid one succeeds.
    orders.give(5, &[7; 32], 3)?;
    let report = orders.ended(&machine, 5)?;
    assert!(report.error.contains("could not be fetched: no shepherd has it"), "{report:?}");
    let release = orders.callback.serve(another(&machine.program, b"2")?)?;
    orders.give(6, &release, 120)?;
    let report = orders.ended(&machine, 6)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &release));
    wait_for("the watchdogs' ends", || Ok((machine.processes()?.len() == 2).then_some(())))?;
    Ok(())
}

#[test]
fn crash_after_each_step_ends_in_the_old_release_or_the_new_one() -> TestResult {
    let orders = Orders::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&request(&orders.callback, 1))?;
    let files = UpdateFiles::in_state_directory(&machine.path());
    let (former, clock) = (program_digest(&machine.program)?, HostClock::read()?);
    let candidate = beside(&machine.program, ".candidate");
    let release = another(&machine.program, b"2")?;
    let sha256 = hex::encode(orders.callback.serve(release.clone())?);
    let trial = |generation, until_ms| {
        Ok::<_, anyhow::Error>(Trial {
            generation,
            sha256: sha256.clone(),
            former: former.clone(),
            stable: machine.program.clone(),
            candidate: candidate.clone(),
            boot_id: clock.boot_id(),
            until_ms,
            patience_ms: 1_000,
            minimum_version: None,
            failure: None,
            instance: ProcessInstance { pid: 1, start_time: 1, boot_id: clock.boot_id() },
        })
    };
    let restart = || -> Result<()> {
        let process = machine.agent()?;
        signal(process.pid, rustix::process::Signal::KILL);
        wait_for("the next process", || {
            Ok(machine
                .state()
                .read_agent_process()?
                .filter(|agent| agent.instance != process.instance)
                .map(drop))
        })
    };
    let later = clock.milliseconds() + 600_000;

    // The candidate exists, and nothing is recorded.
    std::fs::write(&candidate, &release)?;
    restart()?;
    assert_eq!(
        (files.read_result(), digest(&machine.program)?),
        (UpdateResult::default(), hex::decode(&former)?)
    );
    // The trial is recorded, and was never begun or has ended.
    files.write_trial(&trial(1, later)?)?;
    restart()?;
    let report = orders.ended(&machine, 1)?;
    assert!(report.error.contains("it ended before"), "{report:?}");
    assert_eq!((hex::encode(&report.sha256), files.read_trial()), (former.clone(), None));
    // The outcome is recorded, and the end of the trial is not.
    files.write_trial(&trial(1, later)?)?;
    restart()?;
    wait_for("the end of it", || Ok(files.read_trial().is_none().then_some(())))?;

    // The candidate is started when its time is over: the proven release comes back, in the same process.
    std::fs::write(&candidate, &release)?;
    std::fs::set_permissions(&candidate, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let supervisor = machine.supervisor()?;
    for process in [&supervisor, &machine.agent()?] {
        signal(process.pid, rustix::process::Signal::KILL);
        wait_for("its end", || Ok((!process.is_alive()).then_some(())))?;
    }
    // The lock of an agent can outlast it for a moment: in a child that it was starting, until the `execve`, and in a thread
    // that ends after the first one. An agent that finds it taken ends with a sentence, and its supervisor starts it again.
    // Here it has none.
    drop(machine.state().wait_for_lock(Lock::Agent, PATIENCE)?);
    files.write_trial(&trial(2, 1)?)?;
    let mut late = std::process::Command::new(&candidate);
    let errors = machine.path().join("late.log");
    late.args(["run", "--state_dir"]).arg(machine.path()).stderr(std::fs::File::create(&errors)?);
    let mut late = late.spawn()?;
    let report = orders.ended(&machine, 2);
    let process = machine.agent()?;
    let ended = late.try_wait()?;
    late.kill()?;
    late.wait()?;
    let text =
        || format!("it ended by itself: {ended:?}\n{}", std::fs::read_to_string(&errors).unwrap_or_default());
    let report = report.with_context(text)?;
    assert_eq!(u32::try_from(process.pid)?, late.id(), "{}", text());
    assert!(report.error.contains("no shepherd acknowledged its heartbeat"), "{report:?}");
    assert_eq!((hex::encode(&report.sha256), files.read_trial()), (former.clone(), None));

    // It has the stable path's name, and was killed before that was recorded: it is proven.
    std::fs::write(&candidate, &release)?;
    std::fs::set_permissions(&candidate, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    files.write_trial(&trial(3, 1)?)?;
    std::fs::rename(&candidate, &machine.program)?;
    machine.enroll(&request(&orders.callback, 2))?;
    let report = orders.ended(&machine, 3)?;
    assert_eq!((report.error.as_str(), hex::encode(&report.sha256)), ("", sha256.clone()));
    assert_eq!(files.read_trial(), None);
    Ok(())
}
