//! Services of operators' roles: declared to a real curator, run by real role servers.
//!
//! The services run the shell and the Perl of a Debian host, which its packages need anyway.

mod manual;
mod programs;
mod signed;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::declarations_client::DeclarationsClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use shepherd::proto::curator::v1::service_status::Kind;
use shepherd::roleserver::process::ProcessInstance;

use super::node::Node;
use super::owner::{Owner, patiently};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::port::reserved;

/// Answers every request with its second argument, on the port that is its first.
const WEB: &str = r#"
use IO::Socket::INET;
my ($port, $text) = @ARGV;
my $listener = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => $port, Listen => 64, ReuseAddr => 1)
    or die "no port: $@";
while (1) {
    my $client = $listener->accept or next;
    while (defined(my $line = <$client>)) { last if $line =~ /^\r?$/ }
    print $client "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " . length($text) . "\r\n\r\n$text";
    close $client;
}
"#;

fn program(path: &str) -> wire::service::Run {
    let source = Some(wire::program::Source::Path(path.to_owned()));
    wire::service::Run::Program(wire::Program { source, url: String::new() })
}

/// A service that runs a script of the shell.
pub(super) fn script(name: &str, script: &str, depends_on: &[&str]) -> wire::Service {
    wire::Service {
        name: name.to_owned(),
        run: Some(program("/bin/sh")),
        arguments: vec!["-c".to_owned(), script.to_owned()],
        environment: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        user: "root".to_owned(),
        depends_on: depends_on.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    }
}

pub(super) fn every(milliseconds: u64, probe: wire::health_check::Probe) -> wire::HealthCheck {
    wire::HealthCheck { probe: Some(probe), interval_ms: milliseconds, timeout_ms: 0, failures: 2 }
}

pub(super) fn web(at: SocketAddr, text: &str) -> wire::Service {
    let http = wire::HttpCheck { port: at.port().into(), path: "/".to_owned() };
    wire::Service {
        name: "server".to_owned(),
        run: Some(program("/usr/bin/perl")),
        arguments: vec!["server.pl".to_owned(), at.port().to_string(), text.to_owned()],
        files: vec![wire::File { path: "server.pl".to_owned(), contents: WEB.to_owned(), mode: 0o400 }],
        // A user without an account.
        user: "65533".to_owned(),
        health_check: Some(every(500, wire::health_check::Probe::Http(http))),
        ..Default::default()
    }
}

/// The response to a request, complete within the time limit of a connection.
pub(super) fn ask(at: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(Duration::from_mins(1)))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    Ok(body.to_owned())
}

/// Repeats a request, and counts those without a response.
pub(super) struct Traffic {
    over: Arc<AtomicBool>,
    request_count: Arc<AtomicU32>,
    asking: std::thread::JoinHandle<Vec<String>>,
}

impl Traffic {
    pub(super) fn start(at: SocketAddr) -> Self {
        let (over, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let asking = std::thread::spawn({
            let (over, count) = (over.clone(), count.clone());
            move || {
                let mut failures = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    failures.extend(ask(at).err().map(|error| error.to_string()));
                    count.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(5));
                }
                failures
            }
        });
        Self { over, request_count: count, asking }
    }

    pub(super) fn end(self) -> Result<(u32, Vec<String>)> {
        self.over.store(true, Ordering::SeqCst);
        let failures = self.asking.join().map_err(|_| anyhow::anyhow!("it panicked"))?;
        Ok((self.request_count.load(Ordering::SeqCst), failures))
    }
}

/// Declares a role, and returns its revision.
pub(crate) async fn declare(owner: &Owner, role: &str, services: &[wire::Service]) -> Result<u64> {
    let (role, services) = (role.to_owned(), services.to_vec());
    put(owner, wire::Declaration { role, services, ..wire::Declaration::default() }).await
}

/// The same with a declaration that may be signed.
async fn put(owner: &Owner, declaration: wire::Declaration) -> Result<u64> {
    let mut declarations = DeclarationsClient::new(owner.curators()?.channel());
    let request = wire::PutDeclarationRequest { declaration: Some(declaration), expected_revision: None };
    let put = patiently(async || declarations.put(request.clone()).await).await?;
    Ok(put.declaration.context("no declaration")?.revision)
}

/// The status of a node's services, as the curator lists it.
async fn statuses(owner: &Owner, node: &Node) -> Result<BTreeMap<String, wire::ServiceStatus>> {
    let id = node.id()?.to_string();
    let listed = owner.nodes().await?.into_iter().filter_map(|listed| listed.node);
    let status = listed.filter(|node| node.node_id == id).find_map(|node| node.status);
    let services = status.map(|status| status.services).unwrap_or_default();
    Ok(services.into_iter().map(|status| (status.service.clone(), status)).collect())
}

/// Waits until the curator reports this status of a service.
pub(super) async fn until_status(
    owner: &Owner,
    node: &Node,
    service: &str,
    holds: impl Fn(&wire::ServiceStatus) -> bool,
) -> Result<wire::ServiceStatus> {
    let mut last = None;
    let waited = until("a service does as it should", async || {
        last = statuses(owner, node).await?.remove(service);
        Ok(last.as_ref().is_some_and(&holds))
    });
    let waited = waited.await;
    waited.with_context(|| format!("{service}: {last:?}\n{}", node.report()))?;
    last.context("no status")
}

pub(crate) async fn until_well(
    owner: &Owner,
    node: &Node,
    service: &str,
    revision: u64,
) -> Result<wire::ServiceStatus> {
    let well = |status: &wire::ServiceStatus| {
        status.kind() == Kind::Healthy && status.declaration_revision == revision
    };
    until_status(owner, node, service, well).await
}

pub(super) fn instance(node: &Node, child: &str) -> Result<ProcessInstance> {
    Ok(node.child(child).with_context(|| format!("{child} is not there"))?.instance)
}

/// Waits until nothing is left of any service: no process, no directory, no status.
pub(super) async fn until_nothing_is_left(owner: &Owner, node: &Node) -> Result<()> {
    let mut last = String::new();
    let waited = until("nothing is left of services", async || {
        let children: Vec<String> = node.children().into_iter().filter(|name| name.contains('_')).collect();
        let directories = std::fs::read_dir(node.disk().join("services")).map_or(0, Iterator::count);
        let number = statuses(owner, node).await?.len();
        last = format!("{children:?}, {directories} directories, {number} statuses");
        Ok(children.is_empty() && directories == 0 && number == 0)
    });
    waited.await.with_context(|| format!("{last}\n{}", node.report()))
}

/// A cluster of one node.
pub(crate) async fn founded() -> Result<(Owner, Node)> {
    founded_on(Node::new()?).await
}

/// The same on this machine.
async fn founded_on(mut node: Node) -> Result<(Owner, Node)> {
    let mut owner = Owner::new()?;
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    Ok((owner, node))
}

/// Another node in the cluster of `first`, without roles.
pub(crate) async fn joined(owner: &Owner, first: &Node) -> Result<Node> {
    let mut node = Node::new()?;
    node.ask(owner.join(first).await?)?;
    node.start()?;
    owner.approve(&node).await?;
    node.until_it_is_one().await?;
    owner.wait_for_node_status(&node).await?;
    Ok(node)
}

/// How many tasks the control group of a process may have, if the host has such groups.
fn most_tasks(of: &ProcessInstance) -> Result<Option<String>> {
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", of.pid))?;
    let below = groups.lines().find_map(|line| line.strip_prefix("0::").map(|path| ("", path)));
    let pids = groups.lines().find_map(|line| Some(("pids", line.split_once(":pids:")?.1)));
    let Some((controller, path)) = pids.or(below) else { return Ok(None) };
    let group = Path::new("/sys/fs/cgroup").join(controller).join(path.trim_start_matches('/'));
    Ok(std::fs::read_to_string(group.join("pids.max")).ok().map(|text| text.trim().to_owned()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_answers_on_while_its_role_server_is_replaced_and_killed() -> TestResult {
    let (owner, mut node) = founded().await?;
    let at = reserved()?;
    let first = declare(&owner, "web", &[web(at, "one")]).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", first).await?;
    assert_eq!(ask(at)?, "one");
    let runs = instance(&node, "web_server")?;

    let traffic = Traffic::start(at);
    node.stop().await?;
    for _ in 0..2 {
        node.start_apart()?;
        until("this role server looks after it", async || {
            Ok(node.report().contains("a service that runs already was adopted"))
        })
        .await
        .with_context(|| node.report())?;
        owner.until_well(1, 1).await?;
        let status = until_well(&owner, &node, "server", first).await?;
        assert_eq!(status.restarts, 0);
        node.kill_role_server()?;
        assert!(runs.is_alive());
    }
    node.start_apart()?;
    owner.until_well(1, 1).await?;
    until_well(&owner, &node, "server", first).await?;
    assert_eq!(instance(&node, "web_server")?, runs, "only its role server was started again");
    let (requested, failures) = traffic.end()?;
    assert!(
        requested > 0 && failures.is_empty(),
        "{} of {requested} were not answered: {failures:?}",
        failures.len()
    );

    // What can be changed while it runs is changed: it is another revision, and the same process.
    let limits = Some(wire::Limits { tasks: 50, ..Default::default() });
    let second = declare(&owner, "web", &[wire::Service { limits, ..web(at, "one") }]).await?;
    until_well(&owner, &node, "server", second).await?;
    assert_eq!(instance(&node, "web_server")?, runs);
    if let Some(most) = most_tasks(&runs)? {
        assert_eq!(most, "50");
    }

    // Other arguments: it is restarted, once.
    let third = declare(&owner, "web", &[web(at, "two")]).await?;
    let status = until_well(&owner, &node, "server", third).await?;
    assert_eq!((ask(at)?.as_str(), status.restarts, status.message.as_str()), ("two", 0, ""));
    let next = instance(&node, "web_server")?;
    assert!(next != runs && !runs.is_alive() && next.is_alive());

    // Its health is checked all the time: a service that stops responding is reported.
    next.send_signal(rustix::process::Signal::STOP)?;
    let ill = until_status(&owner, &node, "server", |status| status.kind() == Kind::Unhealthy).await?;
    assert!(ill.message.contains("its health check fails: it took longer than 500 ms"), "{}", ill.message);
    next.send_signal(rustix::process::Signal::CONT)?;
    until_well(&owner, &node, "server", third).await?;
    assert_eq!(instance(&node, "web_server")?, next, "a failed health check restarts nothing");

    owner.roles(&node, &[], &["web"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    assert!(!next.is_alive() && TcpStream::connect(at).is_err());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_start_when_those_they_depend_on_are_well_and_stop_in_the_opposite_order() -> TestResult {
    let (owner, node) = founded().await?;
    let place = tempfile::tempdir()?;
    let (log, gate) = (place.path().join("log"), place.path().join("gate"));
    let line = |name: &str, word: &str, depends_on: &[&str]| {
        let log = log.display();
        let text = format!(
            "trap 'echo stop {name} >>{log}; exit 0' TERM; echo start {name} {word} >>{log}; \
             while :; do sleep 0.1; done"
        );
        script(name, &text, depends_on)
    };
    let base = |word: &str| wire::Service {
        health_check: Some(every(
            100,
            wire::health_check::Probe::Exec(wire::ExecCheck {
                command: vec!["/usr/bin/test".to_owned(), "-e".to_owned(), gate.display().to_string()],
            }),
        )),
        ..line("base", word, &[])
    };
    let lines = || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    // The order of their names is not the order of their dependencies.
    let (middle, top) = (line("and-middle", "a", &["base"]), line("a-top", "a", &["and-middle", "base"]));
    let first = declare(&owner, "line", &[base("a"), middle.clone(), top.clone()]).await?;
    owner.roles(&node, &["line"], &[]).await?;
    let ill = until_status(&owner, &node, "base", |status| status.kind() == Kind::Unhealthy).await?;
    assert!(ill.message.contains("it ended by itself with status 1"), "{}", ill.message);
    let waits = until_status(&owner, &node, "a-top", |_| true).await?;
    assert_eq!(
        (waits.kind(), waits.message.as_str()),
        (Kind::Waiting, "it waits until and-middle, base are healthy")
    );
    assert_eq!(lines(), ["start base a"]);
    std::fs::write(&gate, "")?;
    for name in ["base", "and-middle", "a-top"] {
        until_well(&owner, &node, name, first).await?;
    }
    let all = || ["line_base", "line_and-middle", "line_a-top"].map(|name| instance(&node, name).ok());
    let before = all();
    until("all have spoken", async || Ok(lines().len() == 3)).await?;
    assert_eq!(lines(), ["start base a", "start and-middle a", "start a-top a"]);

    // A changed service is restarted, and the services that depend on it continue.
    let second = declare(&owner, "line", &[base("b"), middle, top]).await?;
    for name in ["base", "and-middle", "a-top"] {
        until_well(&owner, &node, name, second).await?;
    }
    until("it has spoken", async || Ok(lines().len() == 5)).await?;
    assert_eq!(lines()[3..], ["stop base", "start base b"]);
    let after = all();
    assert!(after[0] != before[0] && after[1..] == before[1..], "{before:?} {after:?}");

    owner.roles(&node, &[], &["line"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    assert_eq!(lines()[5..], ["stop a-top", "stop and-middle", "stop base"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_that_does_not_run_says_why_and_disturbs_no_other() -> TestResult {
    let (owner, node) = founded().await?;
    let policy = |policy: wire::RestartPolicy, service| wire::Service { restart: policy.into(), ..service };
    let odd = [
        script("crashes", "echo one; echo out of luck >&2; exit 3", &[]),
        policy(wire::RestartPolicy::OnFailure, script("once", "exit 0", &[])),
        policy(wire::RestartPolicy::Never, script("never", "exit 7", &[])),
        script("after", "while :; do sleep 1; done", &["once"]),
        wire::Service { user: "nobody-of-that-name".to_owned(), ..script("stranger", "exit 0", &[]) },
        wire::Service { run: Some(program("/nowhere/server")), ..script("missing", "exit 0", &[]) },
        script("labelled", "while :; do sleep 1; done # {{node.label.rack}}", &[]),
    ];
    let good = declare(&owner, "good", &[script("quiet", "while :; do sleep 1; done", &[])]).await?;
    let declared = declare(&owner, "odd", &odd).await?;
    owner.roles(&node, &["good"], &[]).await?;
    until_well(&owner, &node, "quiet", good).await?;
    let quiet = instance(&node, "good_quiet")?;
    owner.roles(&node, &["odd"], &[]).await?;

    let crashes = until_status(&owner, &node, "crashes", |status| {
        status.kind() == Kind::BackingOff && status.restarts >= 3
    })
    .await?;
    assert_eq!(
        crashes.message,
        "it ended by itself with status 3; it last wrote: out of luck / one / out of luck"
    );
    let ended = |status: &wire::ServiceStatus| status.kind() == Kind::Ended;
    let once = until_status(&owner, &node, "once", ended).await?;
    assert!(once.message.contains("(success)"), "{}", once.message);
    let never = until_status(&owner, &node, "never", ended).await?;
    assert!(never.message.contains("with status 7"), "{}", never.message);
    until_well(&owner, &node, "after", declared).await?;
    for (name, part) in [
        ("stranger", "there is no user nobody-of-that-name on this node"),
        ("missing", "/nowhere/server cannot be run"),
    ] {
        let service_status =
            until_status(&owner, &node, name, |status| status.kind() == Kind::BackingOff).await?;
        assert!(service_status.message.contains(part), "{}", service_status.message);
    }
    let waits = until_status(&owner, &node, "labelled", |status| status.kind() == Kind::Waiting).await?;
    assert!(waits.message.contains("has no label \"rack\""), "{}", waits.message);
    let mut management = ManagementClient::new(owner.curators()?.channel());
    let set = wire::UpdateLabelsRequest {
        node_id: node.id()?.to_string(),
        set: [("rack".to_owned(), "7".to_owned())].into(),
        remove: Vec::new(),
    };
    patiently(async || management.update_labels(set.clone()).await).await?;
    until_well(&owner, &node, "labelled", declared).await?;
    assert_eq!(instance(&node, "good_quiet")?, quiet, "the other role is as it was");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_comes_back_runs_its_services_before_any_curator_is_reachable() -> TestResult {
    let (owner, mut first) = founded().await?;
    let mut node = Node::new()?;
    node.ask(owner.join(&first).await?)?;
    node.start()?;
    owner.approve(&node).await?;
    node.until_it_is_one().await?;
    owner.wait_for_node_status(&node).await?;
    let at = reserved()?;
    let once = wire::Service {
        restart: wire::RestartPolicy::Never.into(),
        ..script("once", "echo ran >>ran; exit 0", &[])
    };
    let named = web(at, "{{node.address}} {{node.id}}");
    let declared = declare(&owner, "web", &[named, once]).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", declared).await?;
    until_status(&owner, &node, "once", |status| status.kind() == Kind::Ended).await?;
    let expected = format!("{} {}", node.address, node.id()?);
    assert_eq!(ask(at)?, expected);
    let before = instance(&node, "web_server")?;

    // Everything is off, and only the node that is no consensus member starts again.
    first.cut_power().await?;
    node.cut_power().await?;
    assert!(!before.is_alive());
    node.start()?;
    until("it answers", async || Ok(ask(at).is_ok_and(|answer| answer == expected)))
        .await
        .with_context(|| node.report())?;
    let runs = instance(&node, "web_server")?;
    assert_ne!(runs, before);

    // Its declarations are lost from its disk while its services continue.
    node.stop().await?;
    let kept = node.disk().join("declarations.json");
    let whole = std::fs::read(&kept)?;
    std::fs::write(&kept, &whole[..whole.len() / 2])?;
    node.start()?;
    let services = node.facts.services.clone();
    until("it has seen what there is", async || Ok(services.latest().is_some())).await?;
    first.start()?;
    let watch_cell = node.facts.declarations.clone();
    until("it has its declarations", async || Ok(watch_cell.latest().is_some_and(|all| all.len() == 1)))
        .await
        .with_context(|| node.report())?;
    until_well(&owner, &node, "server", declared).await?;
    assert_eq!(instance(&node, "web_server")?, runs, "what nobody spoke against goes on");
    let ran = std::fs::read_to_string(node.disk().join("services/web_once/ran"))?;
    assert_eq!(ran, "ran\n", "what has ended for good in this boot stays so");
    assert_eq!(ask(at)?, expected);
    Ok(())
}
