//! Issues: each has its page, and a real service with real faults reports the right one.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shepherd::model::issues::IssueKind;
use shepherd::model::policy::{Budget, DisruptionKind};
use shepherd::model::time::Span;
use testkit::flood::{Flood, FloodPlan, HALF_A_REQUEST};

use crate::harness::aloud::TestResult;
use crate::harness::child::limit_files;
use crate::harness::fleet::{ALL_READY, Fleet, Otherwise, PATIENCE, Program, endpoint};
use crate::harness::source;

/// Limits that are short enough for a test.
const SHORT: [&str; 5] = [
    "--heartbeat_interval=1s",
    "--recovery_first_heartbeat_timeout=20s",
    "--recovery_silence_timeout=8s",
    "--recovery_ladder=restart-agent:5s:1,reboot:5s:1",
    "--recovery_brake_fraction=1",
];

#[test]
fn every_issue_has_its_page_and_every_page_its_issue() -> TestResult {
    let mut pages = BTreeSet::new();
    for path in source::files("docs/issues", "md")? {
        let id = path.file_stem().and_then(|stem| stem.to_str()).context("a name")?.to_owned();
        let text = source::read(&path)?;
        let kind = IssueKind::ALL.into_iter().find(|kind| kind.id() == id);
        let kind = kind.with_context(|| format!("{} is the page of no issue", path.display()))?;
        assert!(text.starts_with(&format!("# {id}: ")), "{}: its heading names another", path.display());
        let severity = format!("\nSeverity: {}.\n", kind.severity().as_str());
        assert!(text.contains(&severity), "{}: its severity is {severity:?}", path.display());
        for part in ["**How it is found.**", "**What to do.**"] {
            assert!(text.contains(part), "{}: {part} is missing", path.display());
        }
        pages.insert(id);
    }
    let ids: BTreeSet<String> = IssueKind::ALL.into_iter().map(|kind| kind.id().to_owned()).collect();
    assert!(ids == pages, "without a page: {:?}", ids.difference(&pages).collect::<Vec<_>>());
    Ok(())
}

/// The output of the command in this format.
fn run_issues_command(fleet: &Fleet, form: &str) -> Result<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
        .args(["issues", "-o", form])
        .env_clear()
        .env("SHEPHERD_BMDB_URL", &fleet.bmdb_url)
        .env("SHEPHERD_BMDB_DIALECT", fleet.database.dialect().as_str())
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Every issue as (id, about, evidence).
fn issues(fleet: &Fleet) -> Result<Vec<(String, String, String)>> {
    let answer: Value = serde_json::from_str(&run_issues_command(fleet, "json")?)?;
    let text = |issue: &Value, key: &str| issue[key].as_str().unwrap_or_default().to_owned();
    let issues = answer["issues"].as_array().context("no list")?;
    Ok(issues
        .iter()
        .map(|issue| (text(issue, "id"), text(issue, "subject"), text(issue, "message")))
        .collect())
}

/// Waits until there is an issue of this kind with this subject, and with these words in its evidence.
async fn until(fleet: &Fleet, id: &str, about: &str, words: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = issues(fleet)?;
        if found.iter().any(|one| one.0 == id && one.1 == about && one.2.contains(words)) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "no {id} of {about} with {words:?}, but {found:#?}\n{}",
            fleet.explain().await?
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The subject of issues of this host.
fn host_subject() -> String {
    format!("host {}", rustix::system::uname().nodename().to_string_lossy())
}

async fn until_none(fleet: &Fleet) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = issues(fleet)?;
        if found.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "still {found:#?}\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn problem_of_a_real_service_is_listed_as_its_issue() -> TestResult {
    let simulator = ["--machine_count", "4", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("issues", &simulator).await?;
    until(&fleet, "no-shepherd", "all machines", "no session is alive").await?;

    let endpoint = endpoint()?;
    let mut shepherd = fleet.shepherd("shepherd", std::slice::from_ref(&endpoint), &SHORT)?;
    fleet.until("some are known", "SELECT count(*) > 0 FROM machine").await?;
    fleet.until("all are Ready", ALL_READY).await?;
    until_none(&fleet).await?;
    assert!(
        run_issues_command(&fleet, "table")?.is_empty()
            && run_issues_command(&fleet, "yaml")?.starts_with("issues: []\n")
    );

    fleet.strike("sim-0001", "power-fail").await?;
    until(&fleet, "silent-agent", "sim/sim-0001", "its agent last reported").await?;
    until(&fleet, "needs-human", "sim/sim-0001", "tried in vain: restart-agent, reboot").await?;

    // Its agent has to be installed again, and the server there has another key.
    fleet.strike("sim-0002", "new-host-key").await?;
    fleet.strike("sim-0002", "kill").await?;
    until(&fleet, "host-key-changed", "sim/sim-0002", "another SSH host key").await?;

    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        policy.budgets.insert(DisruptionKind::RestartAgent, Budget { count: 1, window: Span::hours(1) });
    })
    .await?;
    fleet.strike("sim-0003", "kill").await?;
    until(&fleet, "budget-exhausted", "restart-agent", "machines that wait for it: 1").await?;

    fleet.strike("provider", "list-error").await?;
    until(&fleet, "provider-fails", "provider sim", "its last list is").await?;
    let table = run_issues_command(&fleet, "table")?;
    assert!(
        table.contains("shepherdctl explain provider-fails") && table.contains("critical  needs-human"),
        "{table}"
    );

    assert!(shepherd.terminate().await?.success());
    until(&fleet, "no-shepherd", "all machines", "no session is alive").await?;
    fleet.database.advance(Duration::from_mins(10)).await?;
    until(&fleet, "nobody-listens", "all machines", "should report was stored recently").await?;

    // The database's clock is ten minutes ahead of this host's by now.
    let mut shepherd = fleet.shepherd("again", &[endpoint], &SHORT)?;
    until(&fleet, "clock-skew", &host_subject(), "behind the database's").await?;

    // A killed shepherd closes no session, and no other shepherd exists that could.
    shepherd.kill()?;
    assert!(fleet.holds("SELECT count(*) > 0 FROM session WHERE closed_at IS NULL").await?);
    fleet.database.advance(Duration::from_mins(10)).await?;
    Ok(until(&fleet, "no-shepherd", "all machines", "no session is alive").await?)
}

/// Waits until there is no issue of this kind.
async fn until_gone(fleet: &Fleet, id: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = issues(fleet)?;
        if found.iter().all(|issue| issue.0 != id) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "still {found:#?}\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// No machine needs the agent meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_that_is_refused_when_it_changes_is_an_issue_until_it_is_repaired() -> TestResult {
    let fleet = Fleet::start("issues_agent", &["--machine_count", "2"]).await?;
    let (agent, program) = (fleet.directory().join("agent"), std::fs::read("/bin/sh")?);
    std::fs::write(&agent, &program)?;
    let flag = format!("--agent_executable_path={}", agent.display());
    let mut shepherd = fleet.shepherd("changed", &[endpoint()?], &[flag.as_str()])?;
    fleet.until("every machine is Ready", ALL_READY).await?;
    until_gone(&fleet, "file-refused").await?;
    std::fs::write(&agent, "#!/bin/sh\n")?;
    let words = "what a file has now is not used: ";
    until(&fleet, "file-refused", &host_subject(), words).await?;
    let found = issues(&fleet)?;
    let named = format!("{}", agent.display());
    assert!(found.iter().any(|issue| issue.0 == "file-refused" && issue.2.contains(&named)), "{found:#?}");
    std::fs::write(&agent, &program)?;
    until_gone(&fleet, "file-refused").await?;
    assert!(shepherd.terminate().await?.success());
    Ok(())
}

/// The database has no TLS, so nothing but the check reads the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_of_the_database_url_that_is_refused_later_is_an_issue_until_it_is_repaired() -> TestResult {
    let fleet = Fleet::start("issues_database_ca", &["--machine_count", "2"]).await?;
    let ca = fleet.directory().canonicalize()?.join("database-ca.pem");
    std::fs::write(&ca, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")?;
    let set_mode = |mode| std::fs::set_permissions(&ca, Permissions::from_mode(mode));
    set_mode(0o644)?;
    let url = format!("{}&sslmode=prefer&sslrootcert={}", fleet.bmdb_url, ca.display());
    let environment = vec![("SHEPHERD_BMDB_URL", url.into())];
    let otherwise = Otherwise { environment, ..Otherwise::default() };
    let mut shepherd = fleet.shepherd_otherwise(otherwise, "changed", &[endpoint()?], &[])?;
    fleet.until("every machine is Ready", ALL_READY).await?;
    until_gone(&fleet, "file-refused").await?;
    set_mode(0o646)?;
    let words = format!("the file {} of sslrootcert in the BMDB URL cannot be used: ", ca.display());
    until(&fleet, "file-refused", &host_subject(), &words).await?;
    set_mode(0o644)?;
    until_gone(&fleet, "file-refused").await?;
    assert!(shepherd.terminate().await?.success());
    Ok(())
}

/// With so few files the metrics listener has 76 places, and one source has 19 of each class.
const FEW_FILES: u64 = 1024;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_the_metrics_listener_is_an_issue_while_it_answers() -> TestResult {
    let fleet = Fleet::start("issues_metrics", &["--machine_count", "2"]).await?;
    let metrics = endpoint()?;
    let flag = format!("--metrics_listen_address={metrics}");
    let mut command = fleet.unheard_shepherd("flooded", &[endpoint()?], &[flag.as_str()])?;
    limit_files(&mut command, FEW_FILES);
    let mut shepherd = Program::spawn_logged(&mut command, &fleet.log_of("flooded"))?;
    fleet.until("every machine is Ready", ALL_READY).await?;
    let found = issues(&fleet)?;
    assert!(found.iter().all(|issue| issue.0 != "connections-turned-away"), "{found:#?}");

    let plan = FloodPlan {
        target: metrics.parse()?,
        sources: 1,
        first_source: 1,
        silent: 30,
        half_spoken: 30,
        half: HALF_A_REQUEST,
    };
    let flood = Flood::start(&[plan]).await?;
    let words = "its metrics listener had more connections than places";
    until(&fleet, "connections-turned-away", &host_subject(), words).await?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let text = client.get(format!("http://{metrics}/metrics")).send().await?.text().await?;
    let closed = "shepherd_listener_connections_closed_total{listener=\"metrics\",reason=\"evicted\"}";
    assert!(text.contains(closed), "{text}");
    drop(flood);

    let status = shepherd.terminate().await?;
    assert!(status.success(), "{status}");
    assert!(fleet.holds("SELECT count(*) = 0 FROM session WHERE closed_at IS NULL").await?, "one is open");
    Ok(())
}
