//! Machines in odd conditions: how each condition ends, with the real loops against real OpenSSH servers. The output of
//! `why` afterwards must be true, and no machine that answers is rebooted.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::agent_file::{AgentFile, AgentTrust};
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::control_loop::{ControlLoop, HandlerOutcome};
use shepherd::manager::initializer::Initializer;
use shepherd::manager::limiter::Limiter;
use shepherd::manager::machine_access::MachineAccess;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_set::ProviderSet;
use shepherd::manager::recoverer::Recoverer;
use shepherd::manager::recovery_brakes::RecoveryBrakes;
use shepherd::manager::updater::Updater;
use shepherd::model::backoff::BackoffPolicy;
use shepherd::model::ids::MachineId;
use shepherd::model::policy::{DisruptionKind, Rung};
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;
use shepherd::model::time::Span;
use shepherd::providers::static_provider::{StaticConfig, StaticProvider};
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::session::SshSettings;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb_kit::{Kit, LONG, Shepherd, hold, until};
use crate::fire::counted;
use crate::harness::aloud::TestResult;
use crate::recovery::fall_silent;
use crate::sshd::{Setup, Sshd, write_program};

/// A machine with its own state directory, and with an external supervisor of its agent, which does not exist.
pub(super) fn enrolling(state: &Path) -> Setup {
    let environment = format!("ROLESERVER_STATE_DIR={} ROLESERVER_SUPERVISION=external", state.display());
    Setup { environment, ..Setup::default() }
}

/// The loops of one shepherd, a device list, and a directory in which the commands of machines leave traces.
pub(super) struct Site {
    pub(super) kit: Kit,
    shepherd: Shepherd,
    pub(super) directory: tempfile::TempDir,
    loops: JoinSet<()>,
    drain: CancellationToken,
}

impl Site {
    pub(super) async fn new(name: &str) -> Result<Self> {
        let kit = Kit::new(name).await?;
        kit.bmdb
            .change_policy("test", |policy| {
                let rung = |step, tries| Rung { step, deadline: Span::seconds(5), tries };
                policy.ladder = vec![
                    rung(DisruptionKind::RestartAgent, 2),
                    rung(DisruptionKind::Reboot, 1),
                    rung(DisruptionKind::PowerCycle, 1),
                ];
                let short =
                    BackoffPolicy { initial: Span::seconds(1), maximum: Span::seconds(1), exponent: 1.0 };
                policy.backoff.insert(Process::AgentStart, short);
                policy.update_interval_stable = Span::seconds(1);
                policy.update_interval_unstable = Span::seconds(1);
            })
            .await?;
        let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
        shepherd.bmdb.read_policy().await?;
        let directory = tempfile::tempdir()?;
        let site = Self { kit, shepherd, directory, loops: JoinSet::new(), drain: CancellationToken::new() };
        let traces = site.traces();
        write_program(
            &site.directory.path().join("power"),
            &format!("#!/bin/sh\necho \"$@\" >> {}\n", traces.display()),
        )?;
        Ok(site)
    }

    /// File with the arguments of the power and reboot commands, one line per command.
    fn traces(&self) -> PathBuf {
        self.directory.path().join("traces")
    }

    /// Writes the device list: every machine with its id and server, and with commands that leave traces.
    pub(super) fn list(&self, devices: &[(&str, &Sshd)], reboot: &[&str]) -> Result<()> {
        let mut list = Vec::new();
        for (id, sshd) in devices {
            let target = sshd.target()?;
            list.push(serde_json::json!({
                "ID": id, "Addr": target.host, "Port": target.port, "User": target.user,
                "RebootCommand": reboot, "PowerCommand": [self.directory.path().join("power"), id],
            }));
        }
        fs::write(self.directory.path().join("devices.json"), serde_json::to_string_pretty(&list)?)?;
        Ok(())
    }

    /// A provided machine with the details of the device list.
    pub(super) async fn machine(&self, id: &str, sshd: &Sshd) -> Result<MachineId> {
        let machine = self.kit.provided(1, "rack").await?[0];
        sqlx::query("UPDATE machine_provided SET provider_id = $2 WHERE machine_id = $1")
            .bind(machine.0)
            .bind(id)
            .execute(&self.kit.pool)
            .await?;
        let target = sshd.target()?;
        let details = ProviderDetails {
            reservation: None,
            address: Some(target.host),
            ssh_port: Some(target.port),
            ssh_user: Some(target.user),
            location: None,
            status: ProviderStatus::Unknown,
        };
        self.kit.change(machine, vec![FactChange::ProviderPolled { details, unchanged: true }]).await?;
        Ok(machine)
    }

    fn providers(&self) -> Result<ProviderSet> {
        let config = StaticConfig {
            name: "rack".parse()?,
            device_list_url: format!("file://{}", self.directory.path().join("devices.json").display()),
            device_list_sha256: None,
            default_ssh_user: "root".to_owned(),
        };
        Ok(ProviderSet::new(vec![Arc::new(StaticProvider::new(config)?)]))
    }

    fn access(ssh: SshSettings, signing: Arc<SigningConfiguration>) -> Arc<MachineAccess> {
        Arc::new(MachineAccess {
            ssh,
            passwords: HashMap::new(),
            user: "root".to_owned(),
            agent_file: AgentFile::new(env!("CARGO_BIN_EXE_roleserver").into(), AgentTrust::Unchecked),
            agent_path: DEFAULT_AGENT_PATH.into(),
            endpoints: vec!["127.0.0.1:1".to_owned()],
            ca_certificates: Box::new(Vec::new),
            signing,
            bmdb_id: Uuid::from_u128(0xb),
        })
    }

    fn initializer(&self, ssh: SshSettings) -> Result<Initializer> {
        self.initializer_with(ssh, Arc::default())
    }

    /// The same of a shepherd with signing keys.
    pub(super) fn initializer_with(
        &self,
        ssh: SshSettings,
        signing: Arc<SigningConfiguration>,
    ) -> Result<Initializer> {
        Ok(Initializer { providers: self.providers()?, access: Self::access(ssh, signing) })
    }

    fn recoverer(&self, ssh: SshSettings) -> Result<Recoverer> {
        let brakes = Arc::new(RecoveryBrakes::new(self.shepherd.bmdb.clone()));
        Ok(Recoverer { providers: self.providers()?, access: Self::access(ssh, Arc::default()), brakes })
    }

    pub(super) fn run<L: ControlLoop>(&mut self, control_loop: L) -> Result<()> {
        let metrics = ManagerMetrics::register(&Metrics::new());
        let context = LoopContext {
            sessions: self.shepherd.sessions.clone(),
            wake_ups: WakeUps::default(),
            metrics: metrics.for_loop(control_loop.name(), control_loop.process()),
            drain: self.drain.clone(),
            abort: CancellationToken::new(),
        };
        let settings = LoopSettings { parallelism: 2, limiter: Limiter::new("5ms,50".parse()?) };
        self.loops.spawn(run_loop(Arc::new(control_loop), settings, context));
        Ok(())
    }

    pub(super) async fn until_phase(&self, machine: MachineId, phase: &str) -> Result<()> {
        let what = format!("it is {phase}");
        let reached = until(&what, async || {
            let found: String = sqlx::query_scalar(
                "SELECT phase_index FROM machine_due WHERE machine_id = $1 AND lane = 'access'",
            )
            .bind(machine.0)
            .fetch_one(&self.kit.pool)
            .await?;
            Ok(found == phase)
        })
        .await;
        reached.with_context(|| self.explain())
    }

    fn explain(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "traces: {:?}", fs::read_to_string(self.traces()));
        text
    }

    /// The obstacle and the reason of a machine that needs a person.
    async fn call(&self, machine: MachineId) -> Result<(String, String)> {
        Ok(sqlx::query_as("SELECT obstacle, reason FROM machine_needs_human WHERE machine_id = $1")
            .bind(machine.0)
            .fetch_one(&self.kit.pool)
            .await?)
    }

    /// The steps that were taken for a machine, with the outcome of each.
    async fn steps(&self) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar(
            "SELECT kind || ' ' || split_part(COALESCE(outcome, 'open'), ':', 1) FROM intent ORDER BY begun_at",
        )
        .fetch_all(&self.kit.pool)
        .await?)
    }

    pub(super) async fn stop(mut self) -> Result<()> {
        self.drain.cancel();
        while let Some(ended) = self.loops.join_next().await {
            ended?;
        }
        self.shepherd.sessions.wait_until_drained().await;
        self.shepherd.stop().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_machine_that_refuses_our_key_is_left_to_a_person_and_to_its_power() -> TestResult {
    let mut site = Site::new("odd_login").await?;
    let sshd = Sshd::start(&Setup::default())?;
    let touch = format!("echo rebooted >> {}", site.traces().display());
    site.list(&[("m1", &sshd)], &["sh", "-c", &touch])?;
    let machine = site.machine("m1", &sshd).await?;
    fall_silent(&site.kit, machine).await?;
    let mut settings = sshd.settings();
    settings.key = ClientKey::generate()?;
    let line = settings.key.authorized_keys_line();
    let recoverer = site.recoverer(settings)?;
    site.run(recoverer)?;
    site.until_phase(machine, "NeedsHuman").await?;
    let (obstacle, reason) = site.call(machine).await?;
    assert_eq!(obstacle, "login-refused");
    assert!(
        reason.starts_with("it answers, so that nothing stronger is tried: tried to restart"),
        "{reason}"
    );
    assert!(reason.contains("(try 2 of 2)") && reason.ends_with(&line), "{reason}");
    assert_eq!(site.steps().await?, ["restart-agent failed", "restart-agent failed"]);
    assert!(!site.traces().exists(), "{}", site.explain());
    counted("our key is refused", "NeedsHuman for login-refused; 2 tries, no reboot, no power cycle")?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_machine_that_lacks_our_key_is_tried_until_somebody_puts_it_there() -> TestResult {
    let mut site = Site::new("odd_new_login").await?;
    let state = site.directory.path().join("state");
    let sshd = Sshd::start(&enrolling(&state))?;
    site.list(&[("m1", &sshd)], &["true"])?;
    let machine = site.machine("m1", &sshd).await?;
    let mut settings = sshd.settings();
    settings.key = ClientKey::generate()?;
    let line = settings.key.authorized_keys_line();
    let initializer = site.initializer(settings)?;
    site.run(initializer)?;
    until("it was refused twice", async || {
        Ok(site.kit.count("SELECT count(*) FROM work_backoff WHERE failures >= 2").await? == 1)
    })
    .await?;
    let cause: String =
        sqlx::query_scalar("SELECT cause FROM work_backoff").fetch_one(&site.kit.pool).await?;
    assert!(cause.ends_with(&format!("Add this line to that user's authorized_keys: {line}")), "{cause}");
    sshd.authorize(&line)?;
    site.until_phase(machine, "AgentStarting").await?;
    counted("a new machine lacks our key", "tried again until it was there, the line to add in `why`")?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_is_distinguished_from_its_original_and_is_welcome_under_an_identity_of_its_own() -> TestResult
{
    let mut site = Site::new("odd_clone").await?;
    let (original, own) = (site.directory.path().join("original"), site.directory.path().join("own"));
    let sshd = Sshd::start(&enrolling(&original))?;
    site.list(&[("m1", &sshd), ("m2", &sshd)], &["true"])?;
    let first = site.machine("m1", &sshd).await?;
    let initializer = site.initializer(sshd.settings())?;
    site.run(initializer)?;
    site.until_phase(first, "AgentStarting").await?;
    // The machine at the second one's address has the first one's disk, with its key.
    let second = site.machine("m2", &sshd).await?;
    site.until_phase(second, "NeedsHuman").await?;
    let (obstacle, reason) = site.call(second).await?;
    assert_eq!(obstacle, "other-machine");
    assert!(
        reason.contains(&first.to_string()) && reason.contains("a copy of another machine's disk"),
        "{reason}"
    );
    let keys: i64 = site.kit.count("SELECT count(*) FROM machine_agent_started").await?;
    assert_eq!(keys, 1, "the first one is enrolled still, and alone");

    // The provider gives it another address, where another machine answers.
    let elsewhere = sshd.beside(&enrolling(&own))?;
    site.list(&[("m1", &sshd), ("m2", &elsewhere)], &["true"])?;
    let updater = Updater { providers: site.providers()? };
    site.run(updater)?;
    site.until_phase(second, "AgentStarting").await?;
    let distinct = "SELECT count(DISTINCT public_key) FROM machine_agent_started";
    assert_eq!(site.kit.count(distinct).await?, 2);
    counted(
        "a cloned disk",
        "NeedsHuman for other-machine; 2 keys for 2 machines once it had an address of its own",
    )?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_may_not_reboot_is_reported_and_the_ladder_goes_on() -> TestResult {
    let mut site = Site::new("odd_sudo").await?;
    let sudo = "#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n".to_owned();
    let state = site.directory.path().join("state");
    let sshd = Sshd::start(&Setup { programs: vec![("sudo", sudo)], ..enrolling(&state) })?;
    site.list(&[("m1", &sshd)], &["sudo", "-n", "never-run"])?;
    let machine = site.machine("m1", &sshd).await?;
    fall_silent(&site.kit, machine).await?;
    let recoverer = site.recoverer(sshd.settings())?;
    site.run(recoverer)?;
    site.until_phase(machine, "NeedsHuman").await?;
    let (obstacle, reason) = site.call(machine).await?;
    assert_eq!(obstacle, "ladder-exhausted");
    assert!(reason.starts_with("tried in vain: restart-agent, reboot, power-cycle; last: "), "{reason}");
    assert_eq!(
        site.steps().await?,
        ["restart-agent done", "restart-agent done", "reboot failed", "power-cycle done"]
    );
    let text: String = sqlx::query_scalar("SELECT outcome FROM intent WHERE kind = 'reboot'")
        .fetch_one(&site.kit.pool)
        .await?;
    let address = sshd.target()?.address();
    assert_eq!(
        text,
        format!(
            "failed: sudo -n never-run failed on {address}: it ended with status 1: sudo: a password is required"
        )
    );
    assert_eq!(fs::read_to_string(site.traces())?, "m1 cycle\n");
    counted(
        "a user without sudo",
        "4 steps of the ladder, 1 power cycle, then NeedsHuman for ladder-exhausted",
    )?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ipv6_literal_and_a_port_of_its_own_are_an_address_like_any_other() -> TestResult {
    let mut site = Site::new("odd_ipv6").await?;
    let state = site.directory.path().join("state");
    let sshd = Sshd::start(&Setup { listen: "::1", ..enrolling(&state) })?;
    assert!(sshd.target()?.address().starts_with("[::1]:"));
    site.list(&[("m1", &sshd)], &["true"])?;
    let machine = site.machine("m1", &sshd).await?;
    let initializer = site.initializer(sshd.settings())?;
    site.run(initializer)?;
    site.until_phase(machine, "AgentStarting").await?;
    counted("an IPv6 literal and a port", "1 of 1 taken over")?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_hosts_do_not_keep_the_only_worker_from_one_that_can_be_helped() -> TestResult {
    let mut site = Site::new("odd_hung").await?;
    let state = site.directory.path().join("state");
    let sshd = Sshd::start(&enrolling(&state))?;
    site.list(&[("m1", &sshd)], &["true"])?;
    // Their kernels accept connections, and no server ever sends a byte.
    let mut silent = Vec::new();
    for number in 0..10 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let machine = site.machine(&format!("hung-{number}"), &sshd).await?;
        sqlx::query("UPDATE machine_provided SET ssh_port = $2 WHERE machine_id = $1")
            .bind(machine.0)
            .bind(i64::from(listener.local_addr()?.port()))
            .execute(&site.kit.pool)
            .await?;
        silent.push(listener);
    }
    let machine = site.machine("m1", &sshd).await?;
    let mut settings = sshd.settings();
    // More than a busy host needs to greet. Ten such limits are short compared with the test's own deadline.
    settings.greeting_timeout = Duration::from_secs(2);
    let initializer = site.initializer(settings)?;
    site.run(initializer)?;
    // The login limit of a minute for each of them would exceed the test's deadline.
    site.until_phase(machine, "AgentStarting").await?;
    let causes: Vec<String> =
        sqlx::query_scalar("SELECT DISTINCT cause FROM work_backoff").fetch_all(&site.kit.pool).await?;
    assert!(!causes.is_empty(), "none of the hung ones was tried first");
    assert!(causes.iter().all(|cause| cause.contains("while waiting for its greeting")), "{causes:?}");
    counted(
        "hosts that hang",
        format!("{} of 10 reported, and the one that answers was helped", causes.len()),
    )?;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_comes_between_the_claim_and_the_first_look_is_kept() -> TestResult {
    let site = Site::new("odd_hold").await?;
    let sshd = Sshd::start(&Setup::default())?;
    site.list(&[("m1", &sshd), ("m2", &sshd)], &["true"])?;
    let (new, silent) = (site.machine("m1", &sshd).await?, site.machine("m2", &sshd).await?);
    fall_silent(&site.kit, silent).await?;
    let session = site.shepherd.session().await?;
    let start = site.shepherd.claim_one(&session, Process::AgentStart).await?;
    let session = site.shepherd.session().await?;
    let recovery = site.shepherd.claim_one(&session, Process::Recovery).await?;
    assert_eq!((start.machine(), recovery.machine()), (new, silent));
    for machine in [new, silent] {
        site.kit.change(machine, vec![hold("new disks")]).await?;
    }
    let initializer = site.initializer(sshd.settings())?;
    let recoverer = site.recoverer(sshd.settings())?;
    for (work, handled) in
        [(&start, initializer.handle(&start).await), (&recovery, recoverer.handle(&recovery).await)]
    {
        let Ok(HandlerOutcome::Finished { changes, detail }) = handled else { panic!("{handled:?}") };
        assert_eq!(changes, [], "{}", work.process());
        assert_eq!(detail, "it is not due any more: held by kim: new disks");
    }
    assert!(!sshd.log().contains("Connection from"), "nobody went there: {}", sshd.log());
    start.cancel("the test is over").await?;
    recovery.cancel("the test is over").await?;
    counted("a hold after the claim", "2 of 2 claims were given back, nobody connected")?;
    Ok(site.stop().await?)
}
