//! A certificate from files that is renewed while agents send heartbeats: no agent is cut off, not even when the
//! certificate is self-signed and so its own authority.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use futures::future::BoxFuture;
use shepherd::model::time::Span;
use shepherd::proto::hardware::v1::HardwareReport;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::agent::{Agent, AgentEvent};
use shepherd::roleserver::boot_clock::HostClock;
use shepherd::roleserver::connection::{client_config, connect_server};
use shepherd::server::tls::server_certificate::{CertificateSource, RenewalClock};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, TestAgent, say, settings, until, untold};
use crate::harness::postgres::TestDatabase;

const AGENTS: usize = 6;

/// Writes a self-signed certificate and its key. Returns the certificate.
fn write_pair(directory: &Path) -> Result<Vec<u8>> {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
    std::fs::write(directory.join("certificate.pem"), made.cert.pem())?;
    let key = directory.join("key.pem");
    std::fs::write(&key, made.signing_key.serialize_pem())?;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
    Ok(made.cert.der().to_vec())
}

/// The observations of one agent.
#[derive(Default)]
struct AgentHistory {
    trusts: Vec<Vec<u8>>,
    /// Whether the certificates that it trusts have worked.
    proven: bool,
    delivered: usize,
    failed: Vec<String>,
}

impl AgentHistory {
    fn record_event(&mut self, event: &AgentEvent) {
        match event {
            AgentEvent::Delivered { .. } => self.delivered += 1,
            AgentEvent::Failed { error, .. } => self.failed.push(error.clone()),
            AgentEvent::SettingsChanged { settings, fallback } => {
                self.trusts.clone_from(&settings.ca_certificates);
                self.proven = fallback.is_none();
            }
            AgentEvent::SettingsConfirmed => self.proven = true,
            AgentEvent::SettingsRejected { reason } => self.failed.push(reason.clone()),
            AgentEvent::TimeSampled { .. }
            | AgentEvent::ClusterOrder { .. }
            | AgentEvent::SigningKeys { .. }
            | AgentEvent::ReleaseOrder { .. }
            | AgentEvent::LogRequests { .. } => {}
        }
    }
}

/// A clock whose ticks come one by one, each when the test permits it. A caller that waits for one waits as a task: a
/// blocked thread of the runtime could be the one that polls the sockets, and every connection of the test would stop
/// with it.
fn create_stepped_clock() -> (mpsc::UnboundedSender<()>, RenewalClock) {
    let (permit, permits) = mpsc::unbounded_channel();
    let permits = Arc::new(tokio::sync::Mutex::new(permits));
    let pause = move |_| -> BoxFuture<'static, ()> {
        let permits = permits.clone();
        Box::pin(async move {
            if permits.lock().await.recv().await.is_none() {
                // The test is over, and its server is being stopped.
                std::future::pending::<()>().await;
            }
        })
    };
    let clock = RenewalClock {
        check_interval: Duration::from_millis(50),
        sleep: Arc::new(pause),
        now: Arc::new(SystemTime::now),
    };
    (permit, clock)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn self_signed_pair_is_renewed_under_agents_that_call_and_none_is_cut_off() -> TestResult {
    let database = TestDatabase::create("rotation").await?;
    let directory = tempfile::tempdir()?;
    let first = write_pair(directory.path())?;
    let (look, renewal) = create_stepped_clock();
    let mut settings = settings(directory.path())?;
    settings.renewal = renewal;
    settings.certificate = CertificateSource::Files {
        certificate: directory.path().join("certificate.pem"),
        key: directory.path().join("key.pem"),
        ca_certificate: None,
    };
    let listener = Listener::start(&database, settings).await?;
    listener.bmdb.change_policy("test", |policy| policy.heartbeat_interval = Span::seconds(1)).await?;
    listener.bmdb.read_policy().await?;
    let pool = database.pool().await?;

    let stop = CancellationToken::new();
    let (mut agents, mut seen) = (Vec::new(), Vec::new());
    for _ in 0..AGENTS {
        let agent = TestAgent::new(&pool, &listener.bmdb).await?;
        let own = Arc::new(Mutex::new(AgentHistory {
            trusts: vec![first.clone()],
            proven: true,
            ..AgentHistory::default()
        }));
        seen.push(own.clone());
        let real = Agent {
            machine_id: agent.machine,
            identity: agent.identity.clone(),
            settings: AgentSettings::new(&listener.server.endpoints, std::slice::from_ref(&first), 1)
                .map_err(anyhow::Error::msg)?,
            fallback: None,
            access_fence: 1,
            incarnation: Uuid::new_v4(),
            agent_version: "test".to_owned(),
            clock: Arc::new(HostClock::read()?),
            time: untold()?,
            hardware: Arc::new(HardwareReport::default),
            cluster: shepherd::roleserver::agent::no_cluster(),
            release: shepherd::roleserver::agent::no_release(),
            uploads_logs: false,
            server_pool: None,
            observer: Arc::new(move |event| {
                if let Ok(mut seen) = own.lock() {
                    seen.record_event(event);
                }
            }),
        };
        agents.push(tokio::spawn(real.run(stop.clone())));
    }
    let all = |holds: &dyn Fn(&AgentHistory) -> bool| {
        seen.iter().all(|seen| seen.lock().is_ok_and(|seen| holds(&seen)))
    };
    until("every agent calls", async || Ok(all(&|seen| seen.delivered > 0))).await?;

    let second = write_pair(directory.path())?;
    look.send(())?;
    let both = [second.clone(), first.clone()];
    until("every agent trusts both", async || Ok(all(&|seen| seen.trusts == both && seen.proven))).await?;

    // A new agent that knows the old certificate alone is still accepted: no other one is served yet.
    let newcomer = TestAgent::new(&pool, &listener.bmdb).await?;
    let endpoint = listener.server.endpoints.first().context("no endpoint")?;
    let knows = async |authority: &Vec<u8>, seq| -> Result<()> {
        let config = client_config(&newcomer.identity, std::slice::from_ref(authority), &untold()?)?;
        let mut client = connect_server(endpoint, config).await?;
        say(&mut client, newcomer.heartbeat(seq)).await?;
        Ok(())
    };
    knows(&first, 1).await?;
    assert!(
        knows(&second, 2).await.is_err(),
        "the new certificate is in use before the agents received its authority"
    );

    look.send(())?;
    until("the new one is shown", async || Ok(knows(&second, 3).await.is_ok())).await?;
    assert!(knows(&first, 4).await.is_err());

    look.send(())?;
    let second_alone = [second.clone()];
    until("every agent trusts the new one alone", async || {
        Ok(all(&|seen| seen.trusts == second_alone && seen.proven))
    })
    .await?;
    let delivered: Vec<usize> = seen.iter().filter_map(|seen| Some(seen.lock().ok()?.delivered)).collect();
    until("every agent calls on", async || {
        Ok(seen
            .iter()
            .zip(&delivered)
            .all(|(seen, before)| seen.lock().is_ok_and(|seen| seen.delivered > before + 1)))
    })
    .await?;
    stop.cancel();
    for agent in agents {
        agent.await?;
    }
    let failed: Vec<String> =
        seen.iter().filter_map(|seen| Some(seen.lock().ok()?.failed.clone())).flatten().collect();
    assert_eq!(failed, Vec::<String>::new(), "no heartbeat was lost over it");
    drop(look);
    Ok(listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pair_that_is_refused_when_it_is_read_again_is_published_until_it_is_repaired() -> TestResult {
    let database = TestDatabase::create("rotation_refused").await?;
    let directory = tempfile::tempdir()?;
    write_pair(directory.path())?;
    let (look, renewal) = create_stepped_clock();
    let mut settings = settings(directory.path())?;
    settings.renewal = renewal;
    let key = directory.path().join("key.pem");
    settings.certificate = CertificateSource::Files {
        certificate: directory.path().join("certificate.pem"),
        key: key.clone(),
        ca_certificate: None,
    };
    let listener = Listener::start(&database, settings).await?;
    let refusal = listener.server.certificate_refusal.clone();
    assert_eq!(*refusal.borrow(), None);
    let whole = std::fs::read(&key)?;
    std::fs::write(&key, "half a key")?;
    look.send(())?;
    until("the refusal is published", async || Ok(refusal.borrow().is_some())).await?;
    let sentence = refusal.borrow().clone().unwrap_or_default();
    assert!(sentence.contains("--agent_tls_key_path") && sentence.contains("key.pem"), "{sentence}");
    std::fs::write(&key, whole)?;
    look.send(())?;
    until("the refusal has ended", async || Ok(refusal.borrow().is_none())).await?;
    drop(look);
    Ok(listener.stop().await?)
}
