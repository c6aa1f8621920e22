//! The callback server, called over real TLS on the loopback address.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ClientConfig, RootCertStore, SignatureAlgorithm, SignatureScheme};
use shepherd::proto::agent::v1::installation_report::Result as Installed;
use shepherd::proto::agent::v1::{InstallationReport, InstallationSuccess};
use shepherd::proto::hardware::v1::{Cpu, HardwareReport, Memory};
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::agent::{Agent, ignore_events};
use shepherd::roleserver::boot_clock::HostClock;
use shepherd::roleserver::connection::client_config;
use shepherd::server::callback::callback_server::CallbackServer;
use shepherd::server::metrics_server::serve_metrics;
use shepherd::server::tls::server_certificate::RenewalClock;
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{
    Client, Listener, TestAgent, events, phase, provided, rows, say, settings, until, untold,
};
use crate::harness::postgres::TestDatabase;

/// A listener with its database and the directory of its key.
struct World {
    database: TestDatabase,
    directory: tempfile::TempDir,
    pool: PgPool,
    listener: Listener,
}

impl World {
    async fn new(name: &str) -> anyhow::Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let listener = Listener::start(&database, settings(directory.path())?).await?;
        let pool = database.pool().await?;
        Ok(Self { database, directory, pool, listener })
    }

    /// A world whose server permits handshakes of this duration.
    async fn patient(name: &str, handshake: Duration) -> anyhow::Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let mut settings = settings(directory.path())?;
        settings.limits.handshake = Some(handshake);
        let listener = Listener::start(&database, settings).await?;
        let pool = database.pool().await?;
        Ok(Self { database, directory, pool, listener })
    }

    async fn agent(&self) -> anyhow::Result<(TestAgent, Client)> {
        let agent = TestAgent::new(&self.pool, &self.listener.bmdb).await?;
        let client = agent.connect(&self.listener.server).await?;
        Ok((agent, client))
    }
}

fn refused(answer: Result<impl std::fmt::Debug, Status>) -> anyhow::Result<(Code, String)> {
    let status = answer.err().context("it was not refused")?;
    Ok((status.code(), status.message().to_owned()))
}

fn report() -> HardwareReport {
    HardwareReport {
        manufacturer: "ACME".to_owned(),
        product: "Server\u{0} 9".to_owned(),
        memory: Some(Memory { installed_bytes: 64 << 30, usable_ratio: 0.9 }),
        cpus: vec![Cpu { threads: 32, ..Cpu::default() }],
        ..HardwareReport::default()
    }
}

#[tokio::test]
async fn agent_and_server_have_their_whole_conversation() -> TestResult {
    let world = World::new("conversation").await?;
    let (agent, mut client) = world.agent().await?;
    let first = say(&mut client, agent.heartbeat(10)).await?;
    assert!(first.hardware_report_requested && first.installation_request.is_none());
    assert_eq!(first.endpoints, world.listener.server.endpoints);
    assert_eq!(first.ca_certificates, world.listener.server.current_ca_certificates());
    assert_eq!(first.heartbeat_interval_seconds, 30);
    assert_eq!(phase(&world.pool, agent.machine).await?, "Ready");

    let mut with_report = agent.heartbeat(20);
    with_report.hardware_report = Some(report());
    assert!(!say(&mut client, with_report).await?.hardware_report_requested);
    let stored: (String, String, i64, i64) = sqlx::query_as(
        "SELECT manufacturer, product, memory_bytes, cpu_threads FROM machine_hardware_report WHERE machine_id = $1",
    )
    .bind(agent.machine.0)
    .fetch_one(&world.pool)
    .await?;
    assert_eq!(stored, ("ACME".to_owned(), "Server 9".to_owned(), 64 << 30, 32));
    assert!(!say(&mut client, agent.heartbeat(30)).await?.hardware_report_requested);

    sqlx::query("INSERT INTO machine_os_installation_request VALUES ($1, 4, 'https://a/b', '\\x01', clock_timestamp())")
        .bind(agent.machine.0)
        .execute(&world.pool)
        .await?;
    let request = say(&mut client, agent.heartbeat(40))
        .await?
        .installation_request
        .context("no installation request")?;
    assert_eq!((request.generation, request.artefact_url.as_str()), (4, "https://a/b"));
    let mut late = agent.heartbeat(50);
    late.installation_report =
        Some(InstallationReport { generation: 3, result: Some(Installed::Success(InstallationSuccess {})) });
    assert!(say(&mut client, late.clone()).await?.installation_request.is_some());
    let mut done = late;
    done.seq = 60;
    done.installation_report =
        Some(InstallationReport { generation: 4, result: Some(Installed::Success(InstallationSuccess {})) });
    assert!(say(&mut client, done).await?.installation_request.is_none());
    assert_eq!(
        phase(&world.pool, agent.machine).await?,
        "Ready",
        "installing is not available in this release"
    );

    // Another start of the agent, then another boot.
    let agent = TestAgent { incarnation: Uuid::new_v4().to_string(), ..agent };
    assert!(say(&mut client, agent.heartbeat(70)).await?.hardware_report_requested);
    let agent = TestAgent { boot_id: Uuid::new_v4().to_string(), ..agent };
    say(&mut client, agent.heartbeat(5)).await?;
    let messages = events(&world.pool, agent.machine).await?;
    for event in ["FirstHeartbeat", "LateInstallationReport", "Booted"] {
        assert!(messages.iter().any(|text| text == event), "{event} is missing in {messages:?}");
    }
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn repetition_is_answered_the_same_and_what_is_older_changes_nothing() -> TestResult {
    let world = World::new("repetition").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(10)).await?;
    let mut heartbeat = agent.heartbeat(20);
    heartbeat.hardware_report = Some(report());
    let answer = say(&mut client, heartbeat.clone()).await?;
    let before = rows(&world.pool, agent.machine).await?;
    for again in [heartbeat, agent.heartbeat(20)] {
        let mut again = say(&mut client, again).await?;
        // Each response states when it was made.
        assert!(again.shepherd_time_ms >= answer.shepherd_time_ms);
        again.shepherd_time_ms = answer.shepherd_time_ms;
        assert_eq!(again, answer);
    }
    let stale = (Code::FailedPrecondition, "a heartbeat newer than this one is already stored".to_owned());
    assert_eq!(refused(say(&mut client, agent.heartbeat(19)).await)?, stale);
    let mut older = agent.heartbeat(19);
    older.hardware_report = Some(HardwareReport::default());
    assert_eq!(refused(say(&mut client, older).await)?, stale);
    assert_eq!(rows(&world.pool, agent.machine).await?, before);

    let last_boot = agent.boot_id.clone();
    let rebooted = TestAgent { boot_id: Uuid::new_v4().to_string(), ..agent };
    say(&mut client, rebooted.heartbeat(1)).await?;
    let before = rows(&world.pool, rebooted.machine).await?;
    let mut of_last_boot = rebooted.heartbeat(99);
    of_last_boot.boot_id = last_boot;
    assert_eq!(refused(say(&mut client, of_last_boot).await)?, stale);
    assert_eq!(rows(&world.pool, rebooted.machine).await?, before);
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn foreign_heartbeats_are_refused_in_the_same_words_at_the_same_time() -> TestResult {
    let world = World::new("foreign").await?;
    let (mine, mut client) = world.agent().await?;
    let (other, mut others_client) = world.agent().await?;
    say(&mut others_client, other.heartbeat(10)).await?;
    let bare = provided(&world.pool).await?;
    let before = rows(&world.pool, other.machine).await?;
    let nobody = Uuid::new_v4().to_string();
    let mut seen = Vec::new();
    for machine in [nobody, other.machine.to_string(), bare.to_string()] {
        for seq in [5, 10, 15] {
            let mut heartbeat = mine.heartbeat(seq);
            heartbeat.machine_id.clone_from(&machine);
            heartbeat.boot_id.clone_from(&other.boot_id);
            let called = Instant::now();
            let status = say(&mut client, heartbeat).await.err().context("it was not refused")?;
            assert!(called.elapsed() >= Duration::from_millis(240), "{:?}", called.elapsed());
            let mut headers = status.metadata().clone();
            headers.remove("date");
            seen.push(format!("{:?} {} {:?} {headers:?}", status.code(), status.message(), status.details()));
        }
    }
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:#?}");
    assert!(seen[0].starts_with("Unauthenticated machine id and key do not belong together"), "{seen:?}");
    assert_eq!(rows(&world.pool, other.machine).await?, before);
    assert_eq!(phase(&world.pool, bare).await?, "New");
    Ok(world.listener.stop().await?)
}

/// A copy of a machine's key is worth nothing once another enrolment has given the machine a new one.
#[tokio::test]
async fn key_that_another_enrolment_replaced_reports_nothing() -> TestResult {
    let world = World::new("replaced_key").await?;
    let (former, mut opened_before) = world.agent().await?;
    say(&mut opened_before, former.heartbeat(1)).await?;
    let agent = TestAgent::enroll(former.machine, &world.listener.bmdb).await?;
    say(&mut agent.connect(&world.listener.server).await?, agent.heartbeat(1)).await?;
    let before = rows(&world.pool, agent.machine).await?;
    let expected = (Code::Unauthenticated, "machine id and key do not belong together".to_owned());
    for mut client in [opened_before, former.connect(&world.listener.server).await?] {
        assert_eq!(refused(say(&mut client, former.heartbeat(2)).await)?, expected);
    }
    assert_eq!(rows(&world.pool, agent.machine).await?, before);
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn malformed_and_oversized_heartbeats_are_refused_and_change_nothing() -> TestResult {
    let world = World::new("malformed").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(10)).await?;
    let before = rows(&world.pool, agent.machine).await?;
    let mut odd = agent.heartbeat(20);
    odd.machine_id = "machine-1".to_owned();
    let text = "machine_id is no UUID in hyphenated lower case".to_owned();
    assert_eq!(refused(say(&mut client, odd).await)?, (Code::InvalidArgument, text));
    let with_report_of = |bytes: usize| {
        let mut large = agent.heartbeat(20);
        large.hardware_report =
            Some(HardwareReport { warnings: vec!["w".repeat(bytes)], ..HardwareReport::default() });
        large
    };
    let text = "hardware_report is larger than 1 MiB".to_owned();
    let answer = say(&mut client, with_report_of(1_200_000)).await;
    assert_eq!(refused(answer)?, (Code::InvalidArgument, text));
    let (code, _) = refused(say(&mut client, with_report_of(3_000_000)).await)?;
    assert_eq!(code, Code::OutOfRange);
    // A megabyte that would expand to a hundred in memory.
    let mut many = agent.heartbeat(20);
    many.hardware_report =
        Some(HardwareReport { cpus: vec![Cpu::default(); 400_000], ..HardwareReport::default() });
    let text = "the message has more than 10000 fields".to_owned();
    assert_eq!(refused(say(&mut client, many).await)?, (Code::InvalidArgument, text));
    assert_eq!(rows(&world.pool, agent.machine).await?, before);
    say(&mut client, with_report_of(900_000)).await?;
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn agent_that_calls_too_often_is_rate_limited_and_no_other_is() -> TestResult {
    let database = TestDatabase::create("too_often").await?;
    let directory = tempfile::tempdir()?;
    let mut slow = settings(directory.path())?;
    slow.agent_rate = "1h,3".parse()?;
    let listener = Listener::start(&database, slow).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    for seq in 1..=3 {
        say(&mut client, agent.heartbeat(seq)).await?;
    }
    let (code, _) = refused(say(&mut client, agent.heartbeat(4)).await)?;
    assert_eq!(code, Code::ResourceExhausted);
    let mut again = agent.connect(&listener.server).await?;
    assert_eq!(refused(say(&mut again, agent.heartbeat(5)).await)?.0, Code::ResourceExhausted);
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    say(&mut other.connect(&listener.server).await?, other.heartbeat(1)).await?;
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn without_its_database_the_server_says_that_it_is_away() -> TestResult {
    let world = World::new("away").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(1)).await?;
    world.listener.bmdb.close().await;
    let text = "the database is not available; try again".to_owned();
    assert_eq!(refused(say(&mut client, agent.heartbeat(2)).await)?, (Code::Unavailable, text));
    Ok(world.listener.stop().await?)
}

/// Shows a certificate and signs with a key, whether or not they belong together, and whether or not the server
/// offered such a signature scheme.
#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

/// Signs with its own schemes. A client that keeps the rules shows no certificate at all if the server requested none
/// of its signature schemes, and the server's verdict on that certificate would never be seen.
#[derive(Debug)]
struct Stubborn(Arc<dyn SigningKey>);

impl SigningKey for Stubborn {
    fn choose_scheme(&self, _: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        self.0.choose_scheme(&[
            SignatureScheme::ED25519,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::RSA_PSS_SHA256,
        ])
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl rustls::client::ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Whether a peer that shows `chain` and signs with `pkcs8` can speak HTTP/2.
async fn gets_in(
    server: &CallbackServer,
    chain: Vec<CertificateDer<'static>>,
    pkcs8: &[u8],
) -> anyhow::Result<bool> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let key = Arc::new(Stubborn(rustls::crypto::ring::sign::any_supported_type(&key)?));
    let mut config = builder(server, &rustls::version::TLS13)?
        .with_client_cert_resolver(Arc::new(Shows(Arc::new(CertifiedKey::new(chain, key)))));
    config.alpn_protocols = vec![b"h2".to_vec()];
    speaks(server, config).await
}

fn builder(
    server: &CallbackServer,
    version: &'static rustls::SupportedProtocolVersion,
) -> anyhow::Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    for authority in &server.current_ca_certificates() {
        roots.add(authority.clone().into())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])?
        .with_root_certificates(roots))
}

async fn speaks(server: &CallbackServer, config: ClientConfig) -> anyhow::Result<bool> {
    let stream = TcpStream::connect(server.local_addr).await?;
    let name = ServerName::from(server.local_addr.ip());
    let Ok(mut stream) = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
    else {
        return Ok(false);
    };
    // In TLS 1.3 a client learns only with the first byte that it reads whether it was accepted.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut settings = [0; 9];
    let talk = async {
        stream.write_all(preface).await?;
        stream.flush().await?;
        stream.read_exact(&mut settings).await
    };
    let answered = tokio::time::timeout(Duration::from_secs(30), talk).await?;
    Ok(answered.is_ok() && settings[3] == 4)
}

fn self_signed(key: &KeyPair) -> anyhow::Result<CertificateDer<'static>> {
    Ok(CertificateParams::default().self_signed(key)?.der().clone())
}

#[tokio::test]
async fn only_who_has_the_key_of_an_ed25519_certificate_gets_in() -> TestResult {
    let world = World::new("gets_in").await?;
    let server = &world.listener.server;
    let (agent, _client) = world.agent().await?;
    let certificate = agent.identity.certificate_der().clone();
    let another = KeyPair::generate_for(&PKCS_ED25519)?;
    let ecdsa = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    // A key that belongs to nothing, made with `openssl req -x509 -newkey rsa:2048 -nodes`.
    let rsa = CertificateDer::from_pem_slice(include_bytes!("data/rsa_certificate.pem"))?;
    let rsa_key = PrivateKeyDer::from_pem_slice(include_bytes!("data/rsa_key.pem"))?;
    CertifiedKey::from_der(vec![rsa.clone()], rsa_key.clone_key(), &rustls::crypto::ring::default_provider())
        .context("the RSA certificate and its key")?;
    let (own, other, wrong_kind) = (agent.identity.pkcs8(), another.serialized_der(), ecdsa.serialized_der());
    assert!(gets_in(server, vec![certificate.clone()], own).await?, "its own key");
    let cases = [
        ("another's certificate", vec![certificate.clone()], other),
        ("another's certificate with an ECDSA key", vec![certificate.clone()], wrong_kind),
        ("an RSA certificate with its key", vec![rsa.clone()], rsa_key.secret_der()),
        ("an RSA certificate with an Ed25519 key", vec![rsa], other),
        ("an Ed25519 certificate with an RSA key", vec![certificate.clone()], rsa_key.secret_der()),
        ("an ECDSA certificate with its key", vec![self_signed(&ecdsa)?], wrong_kind),
        ("an ECDSA certificate with an Ed25519 key", vec![self_signed(&ecdsa)?], other),
        ("a chain", vec![certificate.clone(), self_signed(&another)?], own),
        ("a chain of itself", vec![certificate.clone(), certificate.clone()], own),
        ("no X.509 at all", vec![CertificateDer::from(vec![0x30, 0x82, 0xff, 0xff])], own),
        ("an empty certificate", vec![CertificateDer::from(Vec::new())], own),
        ("a huge certificate", vec![CertificateDer::from(vec![0x30; 60_000])], own),
    ];
    for (refused, (name, chain, key)) in (1..).zip(cases) {
        assert!(!gets_in(server, chain, key).await?, "{name}");
        // It is rejected because of its certificate, not because of its protocol.
        until(&format!("the refusal of {name} is counted"), async || {
            let counted =
                world.listener.counted("shepherd_tls_handshake_failures_total{reason=\"certificate\"}")?;
            Ok(counted == refused)
        })
        .await?;
    }
    let nothing = builder(server, &rustls::version::TLS13)?.with_no_client_auth();
    assert!(!speaks(server, nothing).await?, "no certificate");
    let old = builder(server, &rustls::version::TLS12)?
        .with_client_auth_cert(vec![certificate.clone()], agent.identity.private_key())?;
    assert!(!speaks(server, old).await?, "TLS 1.2");
    // Rejected connections leave nothing behind that would block others.
    assert!(gets_in(server, vec![certificate], own).await?);
    Ok(world.listener.stop().await?)
}

/// Sends heartbeats over old and new connections, and returns how long they took.
async fn times(
    world: &World,
    agents: &mut [(TestAgent, Client)],
    seq: &mut u64,
) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    for _ in 0..8 {
        for (agent, client) in agents.iter_mut() {
            *seq += 1;
            let called = Instant::now();
            say(client, agent.heartbeat(*seq)).await?;
            times.push(called.elapsed());
            *seq += 1;
            let called = Instant::now();
            say(&mut agent.connect(&world.listener.server).await?, agent.heartbeat(*seq)).await?;
            times.push(called.elapsed());
        }
    }
    Ok(times)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_half_open_handshakes_delay_no_heartbeat() -> TestResult {
    // A call that waited for a half-open handshake would wait for longer than this test may take, so none of the
    // heartbeats below did. Their durations show what a thousand such handshakes cost.
    Ok(tokio::time::timeout(Duration::from_mins(5), beside_half_open_handshakes()).await??)
}

async fn beside_half_open_handshakes() -> anyhow::Result<()> {
    let world = World::patient("half_open", Duration::from_mins(10)).await?;
    let mut agents = vec![world.agent().await?, world.agent().await?];
    let mut seq = 0;
    let (mut quiet, mut busy) = (Vec::new(), Vec::new());
    // In turns, because other programs may make this host busier or less busy.
    for _ in 0..3 {
        quiet.extend(times(&world, &mut agents, &mut seq).await?);
        let half_open = thousand_half_open(&world).await?;
        busy.extend(times(&world, &mut agents, &mut seq).await?);
        assert_eq!(world.listener.counted("shepherd_tls_handshakes_in_progress")?, 1000);
        for stream in &half_open {
            // Neither an end nor an alert: the server still waits for the rest.
            let error_kind = stream.try_read(&mut [0]).err().map(|error| error.kind());
            assert_eq!(error_kind, Some(std::io::ErrorKind::WouldBlock), "it ended before it mattered");
        }
        drop(half_open);
        until("none is open any more", async || {
            Ok(world.listener.counted("shepherd_tls_handshakes_in_progress")? == 0)
        })
        .await?;
    }
    quiet.extend(times(&world, &mut agents, &mut seq).await?);
    let most = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() * 9 / 10]
    };
    let (quiet, busy) = (most(quiet), most(busy));
    assert!(busy <= quiet * 10, "quiet {quiet:?}, busy {busy:?}");
    world.listener.stop().await
}

/// A thousand connections whose handshakes the server waits for.
async fn thousand_half_open(world: &World) -> anyhow::Result<Vec<TcpStream>> {
    let mut half_open = Vec::new();
    for number in 0..1000_u32 {
        let mut stream = TcpStream::connect(world.listener.server.local_addr).await?;
        if number % 2 == 0 {
            // Half of a record's header: a handshake that has begun.
            stream.write_all(&[0x16, 0x03]).await?;
        }
        half_open.push(stream);
    }
    until("the server has a thousand handshakes open", async || {
        Ok(world.listener.counted("shepherd_tls_handshakes_in_progress")? >= 1000)
    })
    .await?;
    Ok(half_open)
}

/// The certificate that the server now shows to a new client.
async fn fetch_server_certificate(
    server: &CallbackServer,
    agent: &TestAgent,
) -> anyhow::Result<CertificateDer<'static>> {
    let config = client_config(&agent.identity, &server.current_ca_certificates(), &untold()?)?;
    let stream = TcpStream::connect(server.local_addr).await?;
    let name = ServerName::from(server.local_addr.ip());
    let stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await?;
    let certificates = stream.get_ref().1.peer_certificates().context("no certificate was shown")?;
    Ok(certificates.first().context("an empty chain was shown")?.clone().into_owned())
}

#[tokio::test]
async fn renewed_certificate_is_shown_to_newcomers_and_nobody_is_dropped() -> TestResult {
    let database = TestDatabase::create("renewal").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    let day = Duration::from_hours(24);
    // The certificate began eight days ago; half of a certificate's life is seven days.
    let began = SystemTime::now() - 8 * day;
    let (today, time) = watch::channel(began);
    let looks = Arc::new(AtomicU64::new(0));
    let counted = looks.clone();
    settings.renewal = RenewalClock {
        check_interval: Duration::from_millis(20),
        now: Arc::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            *time.borrow()
        }),
        ..RenewalClock::default()
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    say(&mut client, agent.heartbeat(1)).await?;
    let first = fetch_server_certificate(&listener.server, &agent).await?;

    let looked_often = async |what| {
        let until_now = looks.load(Ordering::SeqCst);
        until(what, async || Ok(looks.load(Ordering::SeqCst) > until_now + 3)).await
    };
    today.send(began + 6 * day)?;
    looked_often("it was looked at before its time").await?;
    assert_eq!(
        fetch_server_certificate(&listener.server, &agent).await?,
        first,
        "it is not renewed before half its life"
    );

    today.send(began + 8 * day)?;
    until("another certificate is shown", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await? != first)
    })
    .await?;
    let second = fetch_server_certificate(&listener.server, &agent).await?;
    looked_often("the new one was looked at").await?;
    assert_eq!(
        fetch_server_certificate(&listener.server, &agent).await?,
        second,
        "it is renewed once, not with every look"
    );

    // A connected agent stays connected, on the connection that it made with the first certificate.
    say(&mut client, agent.heartbeat(2)).await?;
    until("the connections that only looked are gone", async || {
        Ok(listener.counted("shepherd_agent_connections")? == 1)
    })
    .await?;
    say(&mut client, agent.heartbeat(3)).await?;
    assert_eq!(listener.counted("shepherd_agent_connections")?, 1, "no second connection was needed");
    // A new connection verifies the new certificate with the old authority, as an agent does.
    say(&mut agent.connect(&listener.server).await?, agent.heartbeat(4)).await?;

    // The clock was a month ahead and is corrected: a certificate that was issued meanwhile is not valid yet.
    today.send(began + 38 * day)?;
    until("a certificate of the wrong month is issued", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await.is_err())
    })
    .await?;
    today.send(began + 8 * day)?;
    until("one that is believed is shown", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await.is_ok())
    })
    .await?;
    say(&mut client, agent.heartbeat(5)).await?;
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn too_many_and_too_slow_handshakes_end_and_honest_ones_go_on() -> TestResult {
    let database = TestDatabase::create("slow").await?;
    let directory = tempfile::tempdir()?;
    let mut narrow = settings(directory.path())?;
    narrow.limits.per_source = 8;
    // Longer than a busy host takes to open forty connections, or for an honest handshake.
    narrow.limits.handshake = Some(Duration::from_secs(20));
    let listener = Listener::start(&database, narrow).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(listener.server.local_addr).await?);
    }
    say(&mut agent.connect(&listener.server).await?, agent.heartbeat(1)).await?;
    for mut stream in silent {
        assert_eq!(
            tokio::time::timeout(Duration::from_mins(5), stream.read(&mut [0])).await?.unwrap_or(0),
            0
        );
    }
    assert!(listener.counted("shepherd_tls_handshake_failures_total{reason=\"evicted\"}")? >= 32);
    until("the others ran out of time", async || {
        Ok(listener.counted("shepherd_tls_handshake_failures_total{reason=\"timeout\"}")? > 0
            && listener.counted("shepherd_tls_handshakes_in_progress")? == 0)
    })
    .await?;
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn shepherds_of_one_bmdb_share_an_authority_and_know_each_other() -> TestResult {
    let world = World::new("authority").await?;
    let second = Listener::start(&world.database, settings(world.directory.path())?).await?;
    let (first, second_server) = (&world.listener.server, &second.server);
    assert_eq!(first.current_ca_certificates(), second_server.current_ca_certificates());
    assert_eq!(first.current_ca_certificates().len(), 1);
    let (agent, _) = world.agent().await?;
    let client = agent.connect(second_server).await?;
    let mut both = [first.endpoints.clone(), second_server.endpoints.clone()].concat();
    both.sort_unstable();
    let next = AtomicU64::new(1);
    let next = || next.fetch_add(1, Ordering::Relaxed);
    until("an agent receives both endpoints", async || {
        Ok(say(&mut client.clone(), agent.heartbeat(next())).await?.endpoints == both)
    })
    .await?;
    let authority = first.current_ca_certificates();
    second.stop().await?;
    world.listener.stop().await?;
    let open: i64 = sqlx::query_scalar("SELECT count(*) FROM session WHERE closed_at IS NULL")
        .fetch_one(&world.pool)
        .await?;
    assert_eq!(open, 0);
    let again = Listener::start(&world.database, settings(world.directory.path())?).await?;
    assert_eq!(again.server.current_ca_certificates(), authority);
    say(&mut agent.connect(&again.server).await?, agent.heartbeat(next())).await?;
    again.stop().await?;

    let elsewhere = tempfile::tempdir()?;
    let wrong = Listener::start(&world.database, settings(elsewhere.path())?).await;
    let output = wrong.err().context("another key opened the secret")?.to_string();
    let text = output.replace(&elsewhere.path().display().to_string(), "DIRECTORY");
    assert_eq!(
        text,
        "the secret \"agent-callback-ca\" in the BMDB was sealed with another key than the one in \
         DIRECTORY/secrets.key; copy the key of the shepherd that made this BMDB to that path, or give its path \
         with --secrets_key_path"
    );
    Ok(())
}

#[tokio::test]
async fn port_in_use_is_reported_with_its_flag() -> TestResult {
    let world = World::new("port").await?;
    let address = world.listener.server.local_addr;
    let mut same = settings(world.directory.path())?;
    same.listen_address = address;
    let output = Listener::start(&world.database, same).await.err().context("two listen there")?.to_string();
    assert_eq!(
        output,
        format!(
            "cannot listen on {address}: another program listens there already; give another address with \
             --agent_listen_address"
        )
    );
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn stop_answers_what_is_under_way() -> TestResult {
    let world = World::new("stop").await?;
    let mut agents = Vec::new();
    for _ in 0..8 {
        agents.push(world.agent().await?);
    }
    let calls = agents.into_iter().map(|(agent, mut client)| {
        tokio::spawn(async move {
            let mut stored = 0;
            for seq in 1.. {
                match say(&mut client, agent.heartbeat(seq)).await {
                    Ok(_) => stored = seq,
                    Err(_) => break,
                }
            }
            (agent.machine, stored)
        })
    });
    let calls: Vec<_> = calls.collect();
    until("heartbeats flow", async || {
        Ok(world.listener.counted("shepherd_heartbeats_total{result=\"stored\"}")? > 40)
    })
    .await?;
    world.listener.stop().await?;
    for call in calls {
        let (machine, stored) = call.await?;
        let sequence: i64 =
            sqlx::query_scalar("SELECT sequence FROM machine_agent_heartbeat WHERE machine_id = $1")
                .bind(machine.0)
                .fetch_one(&world.pool)
                .await?;
        // The response to the last heartbeat may have been lost with the connection. Every response that arrived is
        // true.
        assert!(stored > 0 && [0, 1].contains(&(sequence - i64::try_from(stored)?)), "{sequence} {stored}");
    }
    Ok(())
}

#[tokio::test]
async fn real_agent_sends_heartbeats_and_reports_its_hardware() -> TestResult {
    let world = World::new("real_agent").await?;
    let (agent, _) = world.agent().await?;
    let server = &world.listener.server;
    let real = Agent {
        machine_id: agent.machine,
        identity: agent.identity.clone(),
        settings: AgentSettings {
            endpoints: server.endpoints.clone(),
            ca_certificates: server.current_ca_certificates(),
            heartbeat_interval_seconds: 1,
        },
        fallback: None,
        access_fence: 1,
        incarnation: Uuid::new_v4(),
        agent_version: "test".to_owned(),
        clock: Arc::new(HostClock::read()?),
        time: untold()?,
        hardware: Arc::new(report),
        cluster: shepherd::roleserver::agent::no_cluster(),
        release: shepherd::roleserver::agent::no_release(),
        uploads_logs: false,
        server_pool: None,
        observer: ignore_events(),
    };
    let stop = CancellationToken::new();
    let running = tokio::spawn(real.run(stop.clone()));
    until("the agent's report is stored", async || {
        let count: i64 =
            sqlx::query_scalar("SELECT count(*) FROM machine_hardware_report").fetch_one(&world.pool).await?;
        Ok(count == 1)
    })
    .await?;
    stop.cancel();
    running.await?;
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn metrics_and_health_are_shown() -> TestResult {
    let world = World::new("metrics").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(1)).await?;
    let stop = CancellationToken::new();
    let (bmdb, metrics) = (&world.listener.bmdb, world.listener.metrics.clone());
    let loopback = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let limits = GateLimits::for_listener(ListenerKind::Metrics, 1 << 20);
    let shown = serve_metrics(bmdb, metrics, loopback, limits, stop.clone()).await?;
    let address = shown.local_addr;
    let get = async |path: &str| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        let (path, more) = path.split_once(' ').unwrap_or((path, ""));
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{more}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    let metrics = get("/metrics").await?;
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    assert!(metrics.contains("\nshepherd_heartbeats_total{result=\"stored\"} 1\n"), "{metrics}");
    assert!(metrics.contains("\nshepherd_sessions_started_total{component=\"callback\"} 1\n"), "{metrics}");
    assert!(metrics.contains("\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{metrics}");
    assert!(metrics.contains("\n# TYPE shepherd_heartbeats_total counter\n") && !metrics.contains("# EOF"));
    let open =
        get("/metrics Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n").await?;
    assert!(open.contains("\r\ncontent-type: application/openmetrics-text; version=1.0.0;"), "{open}");
    assert!(open.contains("\n# TYPE shepherd_heartbeats counter\n") && open.ends_with("# EOF\n"), "{open}");
    // Health is that of one moment, and on an overloaded host the database is sometimes late.
    until("the service is healthy", async || Ok(get("/healthz").await?.ends_with("\r\n\r\nok\n"))).await?;
    assert!(get("/else").await?.starts_with("HTTP/1.1 404"));
    let gauge = "\nshepherd_listener_connections_unauthenticated{listener=\"metrics\"} 1\n";
    until("only this connection is counted", async || Ok(get("/metrics").await?.contains(gauge))).await?;
    sqlx::query("ALTER TABLE policy RENAME TO policy_elsewhere").execute(&world.pool).await?;
    until("the service is not healthy", async || {
        let health = get("/healthz").await?;
        Ok(health.starts_with("HTTP/1.1 503") && health.ends_with("\r\n\r\nthe BMDB cannot be queried\n"))
    })
    .await?;
    stop.cancel();
    shown.wait_until_stopped().await;
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn health_checks_have_a_database_connection_of_their_own() -> TestResult {
    // An error means that another test has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let world = World::new("health_pool").await?;
    let (stop, loopback) = (CancellationToken::new(), std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let (bmdb, metrics) = (&world.listener.bmdb, world.listener.metrics.clone());
    let limits = GateLimits::for_listener(ListenerKind::Metrics, 1 << 20);
    let shown = serve_metrics(bmdb, metrics, loopback, limits, stop.clone()).await?;
    // Heartbeats and loops use all connections, and a flood of checks waits for none of them.
    let mut used = Vec::new();
    for _ in 0..bmdb.settings().max_connections {
        used.push(bmdb.pool().acquire().await?);
    }
    let url = format!("http://{}/healthz", shown.local_addr);
    let client = reqwest::Client::builder().no_proxy().build()?;
    let mut checks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        checks.spawn(client.get(&url).send());
    }
    let mut healthy = 0;
    while let Some(answer) = checks.join_next().await {
        let answer = answer??;
        if answer.status().is_success() {
            healthy += 1;
        } else {
            assert_eq!(answer.text().await?, "too many health checks wait for the BMDB; try again\n");
        }
    }
    assert!(healthy > 0, "no health check was answered");
    drop(used);
    stop.cancel();
    shown.wait_until_stopped().await;
    Ok(world.listener.stop().await?)
}
