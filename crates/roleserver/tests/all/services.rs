//! Services: what a start knows of the one before it, and what the next role server sets right when it adopts one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::clock::Clock;
use model::role_declaration::privileges::Privileges;
use model::role_declaration::{ProgramSource, RestartPolicy};
use shepherd_roleserver::child::launch::read_record;
use shepherd_roleserver::child::spec::ResourceLimits;
use shepherd_roleserver::cluster::services::artefact_store::ArtefactStore;
use shepherd_roleserver::cluster::services::desired::{DesiredService, RenderedService, ServiceId};
use shepherd_roleserver::cluster::services::service_manager::{ServiceManagerInputs, run_service_manager};
use shepherd_roleserver::cluster::services::service_runtime::{ServiceHooks, ServiceOwner, ServiceRuntime};
use shepherd_roleserver::cluster::services::service_state::RunRecord;
use shepherd_roleserver::cluster::services::workdir::WorkdirFile;
use shepherd_roleserver::systemd_manager::value::Value;
use supervisor::supervise::{Supervisor, SupervisorSettings};
use supervisor::watch_cell::WatchCell;

use crate::host::{Host, wait_for};

/// A service that sleeps, as the user of this process.
fn sleeping(service: &str, files: &[&str], limits: ResourceLimits) -> DesiredService {
    let file =
        |path: &&str| WorkdirFile { path: (*path).to_owned(), contents: "text".to_owned(), mode: 0o600 };
    let rendered = RenderedService {
        run: ProgramSource::Path("/bin/sleep".to_owned()),
        arguments: vec!["600".to_owned()],
        environment: BTreeMap::new(),
        files: files.iter().map(file).collect(),
        user: rustix::process::geteuid().as_raw().to_string(),
        privileges: Privileges::default(),
    };
    let digest = rendered.digest();
    DesiredService {
        id: ServiceId { role: "web".to_owned(), service: service.to_owned() },
        revision: 1,
        rendered: Ok((rendered, digest)),
        declared: None,
        former: None,
        limits,
        depends_on: BTreeSet::new(),
        check: None,
        restart: RestartPolicy::Always,
        is_task: false,
        stop_time: Duration::from_secs(10),
    }
}

/// The run record of its start.
fn start_record(service: &DesiredService) -> RunRecord {
    let files = service.rendered.iter().flat_map(|(rendered, _)| &rendered.files);
    RunRecord {
        digest: service.digest().unwrap_or_default().to_owned(),
        files: files.map(|file| file.path.clone()).collect(),
        ..RunRecord::missing(service.id.clone()).adjusted(service)
    }
}

fn runtime_of(host: &Host) -> ServiceRuntime {
    ServiceRuntime {
        owner: ServiceOwner::Declared,
        hooks: ServiceHooks::NONE,
        children: Arc::new(host.children.clone()),
        directory: host.path("services"),
        store: ArtefactStore(host.path("artefacts")),
    }
}

/// A file system may lose the run record in a loss of power, with a change that did not wait for the disk.
#[test]
fn files_of_a_former_declaration_are_removed_although_the_run_record_was_lost() -> Result<()> {
    let host = Host::new()?;
    let runtime = runtime_of(&host);
    let former = sleeping("server", &["both", "former"], ResourceLimits::default());
    let (record, _handle) = runtime.start_service(&former, None, &start_record(&former))?;
    record.instance.stop(Duration::ZERO)?;
    record.instance.reap()?;
    host.systemd.forget_process(record.instance.pid.try_into()?)?;
    let name = former.id.child_name();
    fs::write(host.children.directory.join(&name).join("service.json"), "")?;

    let found = runtime.find_services()?.pop().context("it is not found")?;
    assert!(found.running.is_none());
    assert_eq!(found.record.digest, "", "its record is lost");
    let next = sleeping("server", &["both", "next"], ResourceLimits::default());
    runtime.start_service(&next, Some(&found.record), &start_record(&next))?;
    let entries = fs::read_dir(host.path("services").join(&name))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut files = names.collect::<Result<Vec<String>>>()?;
    files.sort_unstable();
    assert_eq!(files, ["both", "next"], "a file of the former declaration stays");
    Ok(())
}

/// Each service manager compares the limits of the services that it adopts. Smaller ones hold, and stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_a_scope_has_lost_are_set_again_when_its_service_is_adopted() -> Result<()> {
    let host = Host::new()?;
    let runtime = runtime_of(&host);
    let limits = ResourceLimits { cpu_millis: Some(500), tasks: Some(20), ..ResourceLimits::default() };
    // The service manager compares them in this order.
    let services = ["complete", "incomplete"].map(|service| sleeping(service, &[], limits));
    for service in &services {
        runtime.start_service(service, None, &start_record(service))?;
    }
    let records = || -> Result<Vec<_>> {
        let path = |service: &DesiredService| host.children.record_path(&service.id.child_name());
        services.iter().map(|service| read_record(&path(service)).context("no record")).collect()
    };
    let started = records()?;
    let scope = |index: usize| started[index].scope.clone().context("no scope");
    let (complete, incomplete) = (scope(0)?, scope(1)?);
    fs::write(host.group(&complete.control_group).join("pids.max"), "5\n")?;
    let lost = host.group(&incomplete.control_group).join("cpu.max");
    fs::write(&lost, "max 100000\n")?;

    let desired: WatchCell<BTreeMap<ServiceId, DesiredService>> = WatchCell::new();
    desired.set(services.iter().map(|service| (service.id.clone(), service.clone())).collect());
    let inputs = ServiceManagerInputs { desired, retained: WatchCell::new(), artefacts: WatchCell::new() };
    let boot_id = started[0].instance.boot_id.clone();
    let manager = run_service_manager(runtime, WatchCell::new(), inputs, Clock::system(), boot_id);
    let tree = Supervisor::start(manager, SupervisorSettings::default());
    let is_restored = || fs::read_to_string(&lost).is_ok_and(|text| text == "50000 100000\n");
    let restored = tokio::task::block_in_place(|| wait_for("the limit that its scope has lost", is_restored));
    tree.stop().await;
    restored?;
    let unit = host.systemd.unit(&incomplete.unit).context("no scope")?;
    assert_eq!(unit.properties.get("CPUQuotaPerSecUSec"), Some(&Value::U64(500_000)));
    let smaller = fs::read_to_string(host.group(&complete.control_group).join("pids.max"))?;
    assert_eq!(smaller, "5\n", "a limit that holds was changed");
    assert_eq!(records()?, started, "they are the same processes");
    Ok(())
}
