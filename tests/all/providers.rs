//! The rules for every provider: one suite, run for each kind.
//!
//! A harness has a provider with a source that the suite can break and repair. The suite itself knows no kind.

mod simulated;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use shepherd::model::ids::IntentId;
use shepherd::model::provider_status::{MachineUsage, PowerState};
use shepherd::providers::provider::{ErrorClass, PowerAction, Provider, RebootMethod};
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use shepherd::providers::static_provider::{StaticConfig, StaticProvider};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::harness::port::reserved;

const PATIENCE: Duration = Duration::from_mins(5);

type Deed<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// A provider and its source.
trait Harness: Send + Sync {
    fn provider(&self) -> &dyn Provider;
    /// Makes the list unreadable.
    fn break_list(&self) -> Deed<'_>;
    /// Makes the list readable again.
    fn mend_list(&self) -> Deed<'_>;
}

async fn conforms(harness: &dyn Harness) -> Result<()> {
    let provider = harness.provider();
    let listed = provider.list().await?;
    ensure!(listed.len() >= 3, "the harness has too few machines to show anything");
    let ids = |machines: &[shepherd::providers::provider::ProviderMachine]| {
        machines.iter().map(|machine| machine.id.clone()).collect::<Vec<_>>()
    };
    let mut unique = ids(&listed);
    unique.sort();
    unique.dedup();
    ensure!(unique.len() == listed.len(), "an id is listed twice");
    ensure!(ids(&listed) == ids(&provider.list().await?), "ids are stable");

    check_unknown_machines(provider).await.context("unknown machine")?;
    let made = creation_is_exactly_once(provider).await.context("creation")?;

    for machine in provider.list().await? {
        if !matches!(machine.usage, MachineUsage::KnownUnused { .. }) {
            let seen = provider.find_machine(&machine.id).await?.context("a listed machine is not known")?;
            ensure!((&seen.id, &seen.address) == (&machine.id, &machine.address), "{seen:?} {machine:?}");
        }
    }

    power_is_seen(provider, &made).await.context("power")?;
    let rungs = provider.capabilities(&made).await?;
    ensure!(rungs.can_power_cycle(), "{rungs:?}");
    if rungs.reboot == RebootMethod::Provider {
        let control = provider.reboot().context("a method and no control")?;
        control.reboot(&made, IntentId::generate()).await?;
    }

    let whole = ids(&provider.list().await?);
    harness.break_list().await?;
    for _ in 0..2 {
        match provider.list().await {
            Ok(part) => bail!("a broken list was read as {} machines", part.len()),
            Err(error) => ensure!(error.class == ErrorClass::Unreadable, "{error:?}"),
        }
    }
    harness.mend_list().await?;
    ensure!(ids(&provider.list().await?) == whole, "a mended list is the one before");
    what_is_given_back_is_taken_once(provider, &made).await.context("release")
}

async fn what_is_given_back_is_taken_once(provider: &dyn Provider, id: &str) -> Result<()> {
    let release = provider.release().context("no release")?;
    let (unknown, intent) = ("no/such machine?", IntentId::generate());
    let error = release.release(unknown, intent).await.err();
    ensure!(error.as_ref().is_some_and(|error| error.class == ErrorClass::NotFound), "{error:?}");
    let before = provider.list().await?.len();
    release.release(id, intent).await?;
    // A retry after a lost response: it succeeds, or the machine no longer exists.
    if let Err(error) = release.release(id, intent).await {
        ensure!(error.class == ErrorClass::NotFound, "{error:?}");
    }
    ensure!(
        provider.list().await?.len() == before,
        "what is given back is capacity, and no more than it was"
    );
    let theirs = provider.find_machine(id).await?;
    ensure!(
        theirs.is_none_or(|machine| machine.usage == MachineUsage::PossiblyUsed),
        "somebody still has it"
    );
    Ok(())
}

async fn check_unknown_machines(provider: &dyn Provider) -> Result<()> {
    let unknown = "no/such machine?";
    ensure!(provider.find_machine(unknown).await?.is_none());
    let power = provider.power().context("no power")?;
    let intent = IntentId::generate();
    for error in [
        power.power_state(unknown).await.err(),
        power.set_power(unknown, PowerAction::On, intent).await.err(),
    ] {
        ensure!(error.as_ref().is_some_and(|error| error.class == ErrorClass::NotFound), "{error:?}");
    }
    let creation = provider.creation().context("no creation")?;
    ensure!(creation.find_by_intent(intent).await?.is_none());
    let error = creation.create(intent, Some(unknown)).await.err();
    ensure!(error.as_ref().is_some_and(|error| error.class == ErrorClass::NotFound), "{error:?}");
    ensure!(creation.find_by_intent(intent).await?.is_none(), "a creation that failed made nothing");
    Ok(())
}

async fn creation_is_exactly_once(provider: &dyn Provider) -> Result<String> {
    let creation = provider.creation().context("no creation")?;
    let listed = provider.list().await?;
    let source = &listed[1];
    let reservation = source.usage.reservation().unwrap_or(&source.id).to_owned();
    let intent = IntentId::generate();
    let tries = (0..8).map(|_| creation.create(intent, Some(&reservation)));
    let made = futures::future::try_join_all(tries).await?;
    let first = &made[0];
    ensure!(made.iter().all(|machine| machine.id == first.id), "one intent made several machines");
    let found = creation.find_by_intent(intent).await?.context("what was made is not found by its intent")?;
    ensure!((&found.id, found.intent) == (&first.id, Some(intent)), "{found:?}");
    let after = provider.list().await?;
    ensure!(after.len() == listed.len(), "{} machines became {}", listed.len(), after.len());
    let entry = after.iter().find(|machine| machine.id == first.id).context("what was made is not listed")?;
    ensure!(
        entry.intent == Some(intent) && !matches!(entry.usage, MachineUsage::KnownUnused { .. }),
        "{entry:?}"
    );
    Ok(first.id.clone())
}

async fn power_is_seen(provider: &dyn Provider, id: &str) -> Result<()> {
    let power = provider.power().context("no power")?;
    for (action, expected) in [
        (PowerAction::On, PowerState::On),
        (PowerAction::Off, PowerState::Off),
        (PowerAction::Cycle, PowerState::On),
        (PowerAction::Off, PowerState::Off),
        (PowerAction::On, PowerState::On),
    ] {
        power.set_power(id, action, IntentId::generate()).await?;
        let deadline = Instant::now() + PATIENCE;
        while power.power_state(id).await? != expected {
            ensure!(Instant::now() < deadline, "{action:?} is not seen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// A device list of three machines, with power commands that store their state in files.
fn device_list(directory: &Path) -> Result<String> {
    let script = directory.join("power");
    std::fs::write(
        &script,
        "case $2 in on|cycle) echo on > \"$1\";; off) echo off > \"$1\";; status) cat \"$1\";; *) exit 9;; esac\n",
    )?;
    let devices = (1..=3)
        .map(|number| {
            let state = directory.join(format!("power-{number}"));
            std::fs::write(&state, "off\n")?;
            Ok(serde_json::json!({
                "ID": format!("rack-{number}"), "Addr": format!("192.0.2.{number}"), "Port": 2200 + number,
                "PowerCommand": ["/bin/sh", script, state],
            }))
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(serde_json::to_string_pretty(&devices)?)
}

fn statically(url: String, sha256: Option<String>) -> Result<StaticProvider> {
    let config = StaticConfig {
        name: "rack-a".parse()?,
        device_list_url: url,
        device_list_sha256: sha256,
        default_ssh_user: "root".to_owned(),
    };
    Ok(StaticProvider::new(config)?)
}

struct FileList {
    provider: StaticProvider,
    path: PathBuf,
    list: String,
    _directory: tempfile::TempDir,
}

impl FileList {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let list = device_list(directory.path())?;
        let path = directory.path().join("devices.json");
        std::fs::write(&path, &list)?;
        let provider = statically(format!("file://{}", path.display()), None)?;
        Ok(Self { provider, path, list, _directory: directory })
    }
}

impl Harness for FileList {
    fn provider(&self) -> &dyn Provider {
        &self.provider
    }

    fn break_list(&self) -> Deed<'_> {
        let half = &self.list[..self.list.len() / 2];
        Box::pin(async move { Ok(std::fs::write(&self.path, half)?) })
    }

    fn mend_list(&self) -> Deed<'_> {
        Box::pin(async move { Ok(std::fs::write(&self.path, &self.list)?) })
    }
}

#[tokio::test]
async fn a_device_list_in_a_file_conforms() {
    conforms(&FileList::new().unwrap()).await.unwrap();
}

struct Served {
    list: Mutex<String>,
    was_revalidated: AtomicBool,
}

struct HttpList {
    provider: StaticProvider,
    url: String,
    served: Arc<Served>,
    list: String,
    directory: tempfile::TempDir,
}

impl HttpList {
    async fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let list = device_list(directory.path())?;
        let served =
            Arc::new(Served { list: Mutex::new(list.clone()), was_revalidated: AtomicBool::new(false) });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://someone:hush-hush@{}/devices.json", listener.local_addr()?);
        let router = axum::Router::new()
            .route("/devices.json", axum::routing::get(serve_list))
            .with_state(Arc::clone(&served));
        // Ends with the test's runtime.
        tokio::spawn(async move { axum::serve(listener, router).await });
        let digest = hex::encode(ring::digest::digest(&ring::digest::SHA256, list.as_bytes()));
        let provider = statically(url.clone(), Some(digest))?;
        Ok(Self { provider, url, served, list, directory })
    }

    fn serve(&self, list: &str) {
        list.clone_into(&mut self.served.list.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

async fn serve_list(State(served): State<Arc<Served>>, headers: HeaderMap) -> axum::response::Response {
    let list = served.list.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let etag = format!("\"{:x}\"", list.len());
    if headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == etag.as_bytes()) {
        served.was_revalidated.store(true, Ordering::Relaxed);
        return StatusCode::NOT_MODIFIED.into_response();
    }
    ([(header::ETAG, etag)], list).into_response()
}

impl Harness for HttpList {
    fn provider(&self) -> &dyn Provider {
        &self.provider
    }

    fn break_list(&self) -> Deed<'_> {
        Box::pin(async move {
            self.serve(&self.list[..self.list.len() / 2]);
            Ok(())
        })
    }

    fn mend_list(&self) -> Deed<'_> {
        Box::pin(async move {
            self.serve(&self.list);
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_device_list_on_a_server_conforms() {
    let harness = HttpList::new().await.unwrap();
    conforms(&harness).await.unwrap();
    assert!(harness.served.was_revalidated.load(Ordering::Relaxed), "an unchanged list is not sent again");
    let without_digest = statically(harness.url.clone(), None).unwrap();
    harness.serve("[\n {\"ID\": \"a\"}]");
    for (provider, part) in
        [(&without_digest, "line 2, field \"Addr\""), (&harness.provider, "its SHA-256 is ")]
    {
        let error = provider.list().await.unwrap_err();
        assert!(error.message.contains(part), "{}", error.message);
        assert!(!format!("{error:?}").contains("hush-hush"), "{error:?}");
    }
}

#[tokio::test]
async fn a_server_gets_no_command_run_without_the_digest_of_its_list() {
    let harness = HttpList::new().await.unwrap();
    let provider = statically(harness.url.clone(), None).unwrap();
    let power = provider.power().unwrap();
    for result in [
        provider.list().await.map(drop),
        power.set_power("rack-1", PowerAction::On, IntentId::generate()).await,
        power.power_state("rack-1").await.map(drop),
    ] {
        let error = result.unwrap_err().message;
        assert!(
            error.contains(
                "commands and host keys from a server are accepted only in a list with a configured SHA-256"
            ),
            "{error}"
        );
    }
    let state = harness.directory.path().join("power-1");
    assert_eq!(std::fs::read_to_string(state).unwrap(), "off\n", "a command of the list was run");
}

#[tokio::test]
async fn callers_that_wait_for_a_slow_list_share_one_reading() {
    let count = Arc::new(AtomicUsize::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/devices.json", listener.local_addr().unwrap());
    let slowly = |State(count): State<Arc<AtomicUsize>>| async move {
        count.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(300)).await;
        r#"[{"ID": "a", "Addr": "h"}]"#
    };
    let router =
        axum::Router::new().route("/devices.json", axum::routing::get(slowly)).with_state(Arc::clone(&count));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let provider = statically(url, None).unwrap();
    let looks = futures::future::join_all((0..20).map(|_| provider.find_machine("a"))).await;
    assert!(looks.iter().all(|look| look.as_ref().is_ok_and(Option::is_some)), "{looks:?}");
    // One that was in progress when the others came, and one that began after them.
    assert!(count.load(Ordering::Relaxed) <= 2, "{} readings for 20 callers", count.load(Ordering::Relaxed));
    provider.find_machine("a").await.unwrap();
    assert!(count.load(Ordering::Relaxed) <= 3, "the next one reads for itself");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_a_transient_error() {
    let closed = reserved().unwrap();
    let listed =
        statically(format!("http://someone:hush-hush@{closed}/devices.json"), None).unwrap().list().await;
    let config =
        SimulatedConfig { name: "sim".parse().unwrap(), url: format!("http://{closed}"), caller: None };
    for result in [listed, SimulatedProvider::new(config).unwrap().list().await] {
        let error = result.unwrap_err();
        assert_eq!(error.class, ErrorClass::Transient);
        assert_eq!(error.endpoint, format!("http://{closed}"));
        assert!(!format!("{error:?}").contains("hush-hush"), "{error:?}");
    }
}

#[tokio::test]
async fn a_web_server_that_is_no_simulator_makes_no_machine_vanish() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new()).await });
    let config = SimulatedConfig { name: "sim".parse().unwrap(), url, caller: None };
    let provider = SimulatedProvider::new(config).unwrap();
    assert_eq!(provider.find_machine("sim-0001").await.unwrap_err().class, ErrorClass::Configuration);
    assert_eq!(provider.list().await.unwrap_err().class, ErrorClass::Configuration);
}

/// A provider with an API that responds to each call with `head`, and then with `tail` repeatedly unless it is empty.
async fn saying(head: &'static [u8], tail: &'static [u8]) -> Result<SimulatedProvider> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((mut caller, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                // The request is read before the response: a connection closed with unread bytes is reset.
                if caller.read(&mut bytes).await? > 0 {
                    caller.write_all(head).await?;
                }
                while !tail.is_empty() {
                    caller.write_all(tail).await?;
                }
                caller.shutdown().await?;
                while caller.read(&mut bytes).await? > 0 {}
                Ok::<_, std::io::Error>(())
            });
        }
    });
    Ok(SimulatedProvider::new(SimulatedConfig { name: "sim".parse()?, url, caller: None })?)
}

#[tokio::test]
async fn an_answer_that_is_endless_torn_or_no_text_is_an_error_and_no_machine_vanishes() {
    use ErrorClass::{Transient, Unreadable};
    let cases: [(&[u8], &[u8], _, _); 6] = [
        (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"machines\": [",
            &[b' '; 1 << 14],
            Unreadable,
            "is larger than 67108864 bytes",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{\"machines\": [",
            b"",
            Transient,
            "the request to http",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{\"mac",
            b"",
            Transient,
            "the request to http",
        ),
        (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"machines\": [{\"id\": \"\xc3\x28\"}]}",
            b"",
            Unreadable,
            "the answer cannot be read",
        ),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", b"", Transient, "the request to http"),
        (b"", b"", Transient, "the request to http"),
    ];
    for (head, tail, class, text) in cases {
        let provider = saying(head, tail).await.unwrap();
        for error in
            [provider.list().await.unwrap_err(), provider.find_machine("sim-0001").await.unwrap_err()]
        {
            assert_eq!(error.class, class, "{error:?}");
            assert!(error.message.contains(text), "{error:?}");
            assert!(!error.message.contains(char::is_control), "{error:?}");
        }
    }
}

#[tokio::test]
async fn a_device_on_loopback_is_rebooted_only_by_a_command_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("devices.json");
    std::fs::write(
        &path,
        r#"[{"ID": "a", "Addr": "127.0.0.1"},
            {"ID": "b", "Addr": "127.0.0.1", "RebootCommand": ["/bin/true"]},
            {"ID": "c", "Addr": "192.0.2.1", "User": "admin"}]"#,
    )
    .unwrap();
    let provider = statically(format!("file://{}", path.display()), None).unwrap();
    let a = provider.capabilities("a").await.unwrap();
    assert!(!a.can_reboot() && !a.can_power_cycle());
    let RebootMethod::Unsupported { reason } = a.reboot else { panic!("{a:?}") };
    assert_eq!(
        reason,
        "127.0.0.1 is the shepherd's own host, which the default reboot command would reboot; give the device a RebootCommand"
    );
    assert_eq!(
        provider.capabilities("b").await.unwrap().reboot,
        RebootMethod::Ssh(vec!["/bin/true".to_owned()])
    );
    let RebootMethod::Ssh(argv) = provider.capabilities("c").await.unwrap().reboot else { panic!() };
    assert_eq!(argv, ["sudo", "-n", "systemctl", "reboot"]);
    let intent = IntentId::generate();
    let error = provider.reboot().unwrap().reboot("c", intent).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Configuration);
}
