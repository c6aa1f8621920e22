//! A damaged record of a running child: the child goes on if it is recognized in its scope, and else ends in order.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd_roleserver::child::launch::ChildRecord;
use shepherd_roleserver::child::lifecycle::adopt_or_start;
use shepherd_roleserver::child::spec::ChildSpec;

use crate::host::{Host, wait_for};

/// The tree does not notice by itself which group a process joins.
fn join_leaf(host: &Host, record: &ChildRecord) -> Result<u32> {
    let scope = record.scope.as_ref().context("no scope")?;
    let pid = record.instance.pid.try_into()?;
    host.systemd.move_process(&format!("{}/main", scope.control_group), pid)?;
    Ok(pid)
}

fn sleeping(host: &Host, program: &str) -> ChildSpec {
    ChildSpec {
        program: program.into(),
        arguments: vec!["600".to_owned()],
        stop_time: Duration::from_secs(1),
        ..host.spec("")
    }
}

/// By its path, and by a link in its working directory, as a program from an artefact.
#[test]
fn running_child_with_a_damaged_record_is_found_in_its_scope() -> Result<()> {
    for program in ["/bin/sleep", "/proc/self/cwd/.program"] {
        let host = Host::new()?;
        std::os::unix::fs::symlink("/bin/sleep", host.path(".program"))?;
        let spec = sleeping(&host, program);
        let (first, _handle) = adopt_or_start(&spec, &host.children)?;
        join_leaf(&host, &first)?;
        for damage in ["", "{\"instance\":{\"pid\":", "[]"] {
            fs::write(host.children.record_path("web"), damage)?;
            let (adopted, _handle) = adopt_or_start(&spec, &host.children)?;
            assert_eq!(adopted, first, "{program} {damage:?}");
            assert_eq!(host.record()?, first, "{program} {damage:?}: the record stays damaged");
        }
        assert!(first.instance.is_alive(), "{program}");
        assert_eq!(host.systemd.unit_names(), [host.scope_name("web", 1)], "{program}");
    }
    Ok(())
}

/// Its container was deleted before, so its process is about to end.
#[test]
fn service_in_a_root_filesystem_with_a_damaged_record_is_started_again() -> Result<()> {
    let host = Host::new()?;
    let spec = sleeping(&host, "/bin/sleep");
    let (first, _handle) = adopt_or_start(&spec, &host.children)?;
    let pid = join_leaf(&host, &first)?;
    fs::create_dir(host.children.directory.join("web/bundle"))?;
    fs::write(host.children.record_path("web"), "")?;
    let (instance, systemd) = (first.instance.clone(), host.systemd.clone());
    let noticing = std::thread::spawn(move || -> Result<()> {
        wait_for("the end of the first", || !instance.is_alive())?;
        systemd.forget_process(pid)
    });
    let (second, _handle) = adopt_or_start(&spec, &host.children)?;
    assert_ne!(second.instance, first.instance, "a process that is about to end was adopted");
    noticing.join().map_err(|_| anyhow::anyhow!("it panicked"))?
}

/// It has other arguments than the specification has now, so nobody knows that it is the child.
#[test]
fn child_with_a_damaged_record_that_is_not_recognized_ends_in_order() -> Result<()> {
    let host = Host::new()?;
    let script = "trap 'echo ends in order; exit' TERM; echo runs; while :; do sleep 0.05; done";
    let (first, _handle) = adopt_or_start(&host.spec(script), &host.children)?;
    wait_for("its first words", || host.log() == "runs\n")?;
    let pid = join_leaf(&host, &first)?;
    fs::write(host.children.record_path("web"), "")?;
    // The tree does not notice by itself that a process ends.
    let (instance, systemd) = (first.instance.clone(), host.systemd.clone());
    let noticing = std::thread::spawn(move || -> Result<()> {
        wait_for("the end of the first", || !instance.is_alive())?;
        systemd.forget_process(pid)
    });
    let (second, _handle) = adopt_or_start(&host.spec("exec sleep 600"), &host.children)?;
    noticing.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
    assert_eq!(host.log(), "runs\nends in order\n", "it was killed without its stop time");
    assert!(!first.instance.is_alive(), "two of one name never run at once");
    assert_eq!(second.scope.map(|scope| scope.unit), Some(host.scope_name("web", 2)));
    Ok(())
}
