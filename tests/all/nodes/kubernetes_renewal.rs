//! Certificates of a controller that reach half of their validity while a client calls its API server.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use shepherd::curator::kubernetes::component_certificates::COMPONENT_LIFETIME;
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::clock::Clock;
use shepherd::model::time::{Timestamp, after, before};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::kubernetes::{
    API_SERVER, CONTROLLER_MANAGER, SCHEDULER, all_well, controlled, open_gate, put, put_bundle, stand_ins,
    starts, wait_for_kubernetes_status,
};
use super::node::Node;
use super::owner::{Owner, patiently};
use super::services::instance;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// All certificates of a controller.
const CERTIFICATES: [&str; 6] = [
    "apiserver",
    "apiserver-kubelet-client",
    "front-proxy-client",
    "controller-manager",
    "scheduler",
    "reconciler",
];
/// A little more than half of their validity.
const HALF: Duration = Duration::from_hours(4 * 24);

fn validity(directory: &Path, name: &str) -> Result<Validity> {
    let certificate = CertificateDer::from_pem_file(directory.join(format!("{name}.crt")))?;
    Validity::from_der(&certificate).with_context(|| format!("{name} has no time"))
}

/// Whether an API server reports that it is ready, to a client that verifies its present certificate.
async fn is_answered(address: SocketAddr, servers: &Path) -> Result<()> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_file_iter(servers)? {
        roots.add(authority?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = tokio::net::TcpStream::connect(address).await?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(ServerName::from(address.ip()), stream).await?;
    stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await?;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    anyhow::ensure!(answer.contains(" 200 "), "it answers {answer:?}");
    Ok(())
}

/// Sends requests until it is stopped, and returns for each whether there was a response.
fn spawn_prober(
    address: SocketAddr,
    servers: PathBuf,
) -> (watch::Sender<bool>, watch::Receiver<usize>, JoinHandle<Vec<bool>>) {
    let (end, ended) = watch::channel(false);
    let (count, counted) = watch::channel(0);
    let asking = tokio::spawn(async move {
        let mut answers = Vec::new();
        while !*ended.borrow() {
            let result = tokio::time::timeout(Duration::from_secs(10), is_answered(address, &servers)).await;
            let is_answered = matches!(result, Ok(Ok(())));
            answers.push(is_answered);
            if is_answered {
                count.send_modify(|count| *count += 1);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        answers
    });
    (end, counted, asking)
}

/// Each of them is replaced, with the full validity. Components that read one of them only once are restarted, and no
/// others. Responses are missing while the API server restarts, and at no other time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_at_half_of_their_time_while_somebody_asks() -> TestResult {
    // The cluster's clock starts half of a lifetime before the host's. So the certificates are at half of their
    // lifetime by the host's clock, and a component that uses it accepts all of them.
    let days = Arc::new(AtomicU32::new(0));
    let clock = {
        let (days, host) = (days.clone(), Clock::system());
        let now = move || {
            let passed = Duration::from_hours(24) * days.load(Ordering::SeqCst);
            after(before(Timestamp::from(SystemTime::now()), HALF), passed)
        };
        Clock::new(now, move || host.monotonic())
    };
    let (mut owner, mut node) = (Owner::new()?, Node::new()?);
    node.clock = clock.clone();
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    let bundle = stand_ins("1.20.2", false)?;
    put_bundle(&node, &bundle)?;
    put(&owner, &bundle.0).await?;
    owner.wait_for_node_status(&node).await?;
    owner.roles(&node, &["kubernetes-controller"], &[]).await?;
    wait_for_kubernetes_status(&owner, &node, "the API server waits at the gate", |status| {
        !status.components.is_empty()
    })
    .await?;
    open_gate(&node).await?;
    wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;

    let directory = node.files().kubernetes_directory().join("controller");
    let all = || CERTIFICATES.map(|name| validity(&directory, name)).into_iter().collect::<Result<Vec<_>>>();
    let first = all()?;
    let keys = || {
        let read = |name: &&str| std::fs::read(directory.join(format!("{name}.key")));
        CERTIFICATES.iter().map(read).collect::<std::io::Result<Vec<_>>>()
    };
    let first_keys = keys()?;
    let running = [CONTROLLER_MANAGER, SCHEDULER].map(|child| instance(&node, child));
    let running = running.into_iter().collect::<Result<Vec<_>>>()?;
    let address = SocketAddr::new(node.address, node.ports.api_server);
    let (end, mut counted, asking) = spawn_prober(address, directory.join("servers.crt"));
    counted.wait_for(|count| *count >= 10).await?;

    // Shortly before half of their lifetime nothing is requested. Certificates are checked again when anything changes.
    let look = async |owner: &Owner, value: &str| {
        let mut management = ManagementClient::new(owner.curators()?.channel());
        let set = [("looked".to_owned(), value.to_owned())].into();
        let request = wire::UpdateLabelsRequest { node_id: node.id()?.to_string(), set, remove: Vec::new() };
        patiently(async || management.update_labels(request.clone()).await).await?;
        anyhow::Ok(())
    };
    days.store(3, Ordering::SeqCst);
    owner.claim(&node).await?;
    look(&owner, "early").await?;
    let setup = node.facts.setup.clone();
    until("it is looked", async || {
        let setup = setup.latest().flatten();
        Ok(setup.is_some_and(|setup| setup.labels().any(|(_, value)| value == "early")))
    })
    .await?;
    assert_eq!(all()?, first, "they were renewed before half of their time");

    days.store(u32::try_from(HALF.as_secs() / 86_400)?, Ordering::SeqCst);
    owner.claim(&node).await?;
    look(&owner, "due").await?;
    let renewed = until("all are renewed", async || {
        let now = all()?;
        Ok(now.iter().zip(&first).all(|(now, first)| now.not_before > first.not_before))
    });
    renewed.await.with_context(|| node.report())?;
    for (name, now) in CERTIFICATES.iter().zip(all()?) {
        let host = Timestamp::from(SystemTime::now());
        assert!(
            now.contains(host)
                && now.contains(after(host, COMPONENT_LIFETIME.saturating_sub(Duration::from_hours(1)))),
            "{name}"
        );
    }
    assert_eq!(keys()?, first_keys, "keys stay as long as the role");
    until("the API server is started again", async || Ok(starts(&node, API_SERVER)?.len() == 2)).await?;
    wait_for_kubernetes_status(&owner, &node, "all are well again", all_well).await?;
    let before = *counted.borrow();
    counted.wait_for(|count| *count >= before + 10).await?;
    end.send_replace(true);
    let answers = asking.await?;
    let gaps = answers.windows(2).filter(|two| two[0] && !two[1]).count();
    assert!(answers[0] && gaps <= 1, "answers were missed at {gaps} times: {answers:?}");

    assert_eq!(
        starts(&node, API_SERVER)?.len(),
        2,
        "it reads one of them once, and was started again for it once"
    );
    for (child, before) in [CONTROLLER_MANAGER, SCHEDULER].into_iter().zip(running) {
        assert_eq!(starts(&node, child)?.len(), 1, "{child} was started again");
        assert_eq!(instance(&node, child)?, before, "{child} looks at its certificate again by itself");
    }
    Ok(())
}

/// Another authority of clients, on a running node: each of the three steps restarts every component, in order, and is
/// reported as applied only then. In the end nothing of the former authority is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_keys_start_every_component_again_step_by_step() -> TestResult {
    let (owner, node, _) = controlled().await?;
    wait_for_kubernetes_status(&owner, &node, "the API server waits at the gate", |status| {
        !status.components.is_empty()
    })
    .await?;
    open_gate(&node).await?;
    let first = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?.generation;
    let directory = node.files().kubernetes_directory().join("controller");
    let clients = || std::fs::read_to_string(directory.join("clients.crt"));
    let old = clients()?;
    let mut kubernetes = KubernetesClient::new(owner.curators()?.channel());
    let which = wire::KubernetesKeys::Clients.into();
    patiently(async || kubernetes.rotate(wire::RotateKubernetesRequest { keys: which }).await).await?;
    let acts = |status: &wire::KubernetesStatus| status.generation == first + 3 && all_well(status);
    wait_for_kubernetes_status(&owner, &node, "it acts on the last step", acts).await?;
    let new = clients()?;
    assert!(new != old && new.matches("BEGIN CERTIFICATE").count() == 1, "{new}");
    let at = |child| {
        let starts = starts(&node, child)?;
        starts.iter().map(|start| start["at"].as_f64().context("no time")).collect::<Result<Vec<_>>>()
    };
    let (api_server, manager, scheduler) = (at(API_SERVER)?, at(CONTROLLER_MANAGER)?, at(SCHEDULER)?);
    assert_eq!((api_server.len(), manager.len(), scheduler.len()), (4, 4, 4), "once for each step");
    for ((api_server, manager), scheduler) in api_server.iter().zip(&manager).zip(&scheduler) {
        assert!(api_server < manager && manager < scheduler, "{api_server} {manager} {scheduler}");
    }
    for name in CERTIFICATES {
        let signed = validity(&directory, name)?;
        assert!(signed.contains(Timestamp::from(SystemTime::now())), "{name}");
    }
    Ok(())
}
