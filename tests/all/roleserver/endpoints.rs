//! How an agent finds a server that accepts its calls, and stays there.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use shepherd::curator_client::identity::Identity;
use shepherd::model::ids::MachineId;
use shepherd::model::role_declaration::Sha256;
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::server_pool::{FetchError, ServerEndpoint, ServerEndpoints, ServerPool};
use tonic::Status;

use super::callback::{Callback, curious};
use super::{Machine, request, signal, wait_for};
use crate::harness::aloud::TestResult;
use crate::harness::callback::untold;
use crate::harness::port::reserved;
use crate::harness::promtool::promtool;

#[test]
fn agent_keeps_calling_when_refused_and_finds_the_endpoint_that_works() -> TestResult {
    let refuses = Callback::start(|_| Err(Status::unauthenticated("")))?;
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let closed = reserved()?.to_string();
    let endpoints = vec![closed, refuses.endpoint.clone(), callback.endpoint.clone()];
    let ca_certificates = vec![refuses.ca.clone(), callback.ca.clone()];
    // The period in which a heartbeat is repeated unchanged.
    let heartbeat_interval_seconds = 10;
    machine.enroll(&wire::EnrollRequest {
        endpoints,
        ca_certificates,
        heartbeat_interval_seconds,
        ..request(&callback, 1)
    })?;
    wait_for("three heartbeats in a row", || Ok((callback.heartbeats().len() >= 3).then_some(())))?;
    assert_eq!(refuses.heartbeats().len(), 1, "what works is kept to");
    assert_eq!(
        refuses.heartbeats()[0].request.seq,
        callback.heartbeats()[0].request.seq,
        "a retry is the same heartbeat"
    );

    let status = machine.command("status").output()?;
    let text = String::from_utf8(status.stdout)?;
    assert!(text.contains("0b1a4a52-4a5c-4b66-8a5e-000000000001"), "{text}");
    assert!(text.contains("access 1"), "{text}");
    assert!(text.contains(&format!("to {}", callback.endpoint)), "{text}");
    let tree: Vec<_> = text.lines().skip_while(|line| !line.starts_with("root ")).collect();
    let states = tree.iter().map(|line| {
        let words = line.trim_start_matches(|c: char| !c.is_ascii_alphabetic()).split_whitespace();
        words.take(2).collect::<Vec<_>>().join(" ")
    });
    let expected = [
        "root healthy",
        "callback healthy",
        "cluster healthy",
        "programs healthy",
        "file-systems healthy",
        "logs healthy",
        "metrics healthy",
        "status healthy",
        "update healthy",
    ];
    assert_eq!(states.collect::<Vec<_>>(), expected, "{text}");

    let metrics = String::from_utf8(machine.command("metrics").output()?.stdout)?;
    for line in [
        "roleserver_runnable_state{path=\"root.callback\",state=\"healthy\"} 1",
        "roleserver_runnable_state{path=\"root.callback\",state=\"dead\"} 0",
        "roleserver_control_plane_running 0",
    ] {
        assert!(metrics.lines().any(|message| message == line), "{line} is not in\n{metrics}");
    }
    assert_eq!(promtool(&["check", "metrics"], &metrics)?, "", "{metrics}");
    Ok(())
}

#[test]
fn endpoint_that_accepts_and_says_nothing_is_left_after_the_time_limit() -> TestResult {
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let endpoints = vec![silent.local_addr()?.to_string(), callback.endpoint.clone()];
    machine.enroll(&wire::EnrollRequest { endpoints, ..request(&callback, 1) })?;
    Ok(wait_for("heartbeats at the other endpoint", || Ok((callback.heartbeats().len() >= 2).then_some(())))?)
}

#[test]
fn agent_moves_where_an_answer_sends_it_and_remembers() -> TestResult {
    let new = Callback::start(curious())?;
    let (endpoint, ca) = (new.endpoint.clone(), new.ca.clone());
    let old = Callback::start(move |_| {
        Ok(wire::HeartbeatResponse {
            endpoints: vec![endpoint.clone()],
            ca_certificates: vec![ca.clone()],
            ..Default::default()
        })
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&old, 1))?;
    wait_for("a heartbeat at the new place", || Ok((!new.heartbeats().is_empty()).then_some(())))?;
    let incarnation = new.heartbeats()[0].request.incarnation.clone();
    let at_old = old.heartbeats().len();
    signal(machine.agent()?.pid, rustix::process::Signal::KILL);
    wait_for("a heartbeat of the next incarnation", || {
        Ok(new
            .heartbeats()
            .iter()
            .any(|observations| observations.request.incarnation != incarnation)
            .then_some(()))
    })?;
    assert_eq!(old.heartbeats().len(), at_old, "the old place receives no more heartbeats");
    Ok(())
}

#[test]
fn agent_survives_settings_that_lead_nowhere() -> TestResult {
    let nowhere = reserved()?.to_string();
    let callback = Callback::start(move |_| {
        Ok(wire::HeartbeatResponse { endpoints: vec![nowhere.clone()], ..Default::default() })
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    Ok(wait_for("heartbeats after the bad advice", || Ok((callback.heartbeats().len() >= 3).then_some(())))?)
}

#[test]
fn answer_that_says_no_costs_no_connection() -> TestResult {
    let count = AtomicUsize::new(0);
    let callback = Callback::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Err(Status::unavailable("the database is not available; try again")),
        1 => Err(Status::unauthenticated("")),
        _ => Ok(wire::HeartbeatResponse::default()),
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    wait_for("heartbeats after the refusals", || Ok((callback.heartbeats().len() >= 5).then_some(())))?;
    assert_eq!(callback.connections(), 1);
    Ok(())
}

#[test]
fn connection_stays_while_other_endpoints_come_and_go() -> TestResult {
    let nowhere = reserved()?.to_string();
    let own = Arc::new(OnceLock::<String>::new());
    let (known, count) = (own.clone(), AtomicUsize::new(0));
    let callback = Callback::start(move |_| {
        let mut endpoints: Vec<_> = known.get().cloned().into_iter().collect();
        if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            endpoints.insert(0, nowhere.clone());
        }
        Ok(wire::HeartbeatResponse { endpoints, ..Default::default() })
    })?;
    own.set(callback.endpoint.clone()).map_err(|_| anyhow::anyhow!("set twice"))?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    wait_for("six heartbeats", || Ok((callback.heartbeats().len() >= 6).then_some(())))?;
    assert_eq!(callback.connections(), 1);
    let learned = machine.state().read_learned_settings(1)?.context("nothing was learnt")?;
    assert_eq!(
        learned.settings.endpoints.first(),
        Some(&callback.endpoint),
        "what works comes first after a restart"
    );
    assert_eq!(learned.fallback, None);
    Ok(())
}

/// A shepherd of an earlier release has no images of etcd, and denies one that another shepherd has.
#[test]
fn file_that_one_shepherd_lacks_is_fetched_from_another_one() -> TestResult {
    let (earlier, present) = (Callback::start(curious())?, Callback::start(curious())?);
    let digest = present.serve(b"an image".to_vec())?;
    let digest = Sha256(digest.try_into().map_err(|_| anyhow::anyhow!("not a digest"))?);
    let identity = Arc::new(Identity::generate()?);
    let (time, directory) = (untold()?, tempfile::tempdir()?);
    // Each callback has a runtime of its own, which cannot start in another one.
    let runtime = tokio::runtime::Runtime::new()?;
    let fetch = |endpoints: Vec<(String, &Callback)>, name: &str| {
        let endpoints = endpoints.into_iter().map(|(endpoint, callback)| ServerEndpoint {
            endpoint,
            ca_certificates: vec![callback.ca.clone()],
        });
        let pool = ServerPool::default();
        pool.set_endpoints(ServerEndpoints {
            machine_id: MachineId::generate(),
            identity: identity.clone(),
            time: time.clone(),
            endpoints: endpoints.collect(),
        });
        runtime.block_on(pool.fetch_artefact(digest, &directory.path().join(name)))
    };
    let at = |callback: &Callback| callback.endpoint.clone();
    let fetched = fetch(vec![(at(&earlier), &earlier), (at(&present), &present)], "both");
    assert_eq!(fetched, Ok(8), "a shepherd without the file ended the fetch");
    assert_eq!(fetch(vec![(at(&earlier), &earlier)], "none"), Err(FetchError::Absent));
    let closed = reserved()?.to_string();
    for order in [[0, 1], [1, 0]] {
        let endpoints = [(at(&earlier), &earlier), (closed.clone(), &present)];
        let fetched = fetch(order.map(|number: usize| endpoints[number].clone()).to_vec(), "dead");
        let Err(FetchError::Failed(text)) = fetched else {
            return Err(anyhow::anyhow!("{fetched:?}").into());
        };
        assert!(text.contains(&closed) && text.ends_with("another shepherd does not have it"), "{text}");
    }
    Ok(())
}
