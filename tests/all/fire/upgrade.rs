//! A database of the previous release, upgraded with all its content, and while shepherds run.
//!
//! The short form takes the schema back to that release's, gives it rows as that release wrote them, and starts two
//! shepherds of this one at once. The long form runs that release's own program, built from its commit by
//! `tools/previous`, and upgrades the schema under it: it continues with its sessions, receives heartbeats of agents,
//! and from then on leaves every machine to the newer rules.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::connection::schema::supported_version;
use shepherd::model::schedule::RULES_VERSION;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection};

use crate::checker::{Records, check};
use crate::fire::{ALL_KNOWN_READY, BRAKES, DISTURBED, Form, RECOVERED, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Otherwise, PATIENCE, Program, endpoint};
use crate::harness::postgres::migrator;

const FLAGS: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_silence_timeout=12s",
    "--recovery_brake_fraction=0.9",
    "--recovery_ladder=restart-agent:30s:3",
];

/// A number from `tests/upgrade/previous` about the previous release.
fn previous(what: &str) -> Result<i64> {
    let text = include_str!("../../upgrade/previous");
    let line = text.lines().find_map(|line| line.strip_prefix(what)).context("a line of that name")?;
    Ok(line.trim().parse()?)
}

/// What has another name in the previous release: the present name, and the former one.
fn previous_names(of: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let text = include_str!("../../upgrade/previous");
    text.lines().filter_map(move |line| line.strip_prefix(of)?.strip_prefix(' ')?.split_once(" was "))
}

async fn connect(fleet: &Fleet) -> Result<PgConnection> {
    let options: sqlx::postgres::PgConnectOptions = fleet.bmdb_url.parse()?;
    Ok(options.connect().await?)
}

/// Rows as the previous release wrote them.
const OLD_ROWS: &str = "
    UPDATE machine_due SET rules_version = 1;
    -- A person was called for one whose agent reports: that release knew no obstacles.
    INSERT INTO machine_needs_human (machine_id, since, reason)
        SELECT machine_id, clock_timestamp(), 'tried in vain: reboot' FROM machine ORDER BY machine_id LIMIT 1;
    UPDATE machine_due SET phase_index = 'NeedsHuman', process = NULL, ready_at = NULL, timer = FALSE
        WHERE lane = 'access' AND machine_id = (SELECT machine_id FROM machine_needs_human);
    -- One was in the middle of its ladder.
    INSERT INTO machine_recovery (machine_id, started_at, rung, tries, next_at, note)
        SELECT machine_id, clock_timestamp(), 0, 1, clock_timestamp(), 'tried to restart the agent (try 1 of 3)'
        FROM machine ORDER BY machine_id OFFSET 1 LIMIT 1;
    -- One has an agent that nobody wrote down, because its shepherd died.
    DELETE FROM machine_agent_heartbeat WHERE machine_id = (SELECT machine_id FROM machine ORDER BY machine_id OFFSET 2 LIMIT 1);
    DELETE FROM machine_agent_started WHERE machine_id = (SELECT machine_id FROM machine ORDER BY machine_id OFFSET 2 LIMIT 1);
    UPDATE machine_due SET phase_index = 'Provided', process = 'AgentStart', ready_at = clock_timestamp(), timer = FALSE
        WHERE lane = 'access' AND machine_id = (SELECT machine_id FROM machine ORDER BY machine_id OFFSET 2 LIMIT 1);
    -- And a shepherd of that release died with a session open.
    INSERT INTO session (session_id, process_id, component, runtime_info, interval_ms, started_at, deadline)
        VALUES (gen_random_uuid(), gen_random_uuid(), 'initializer', '{\"pid\": 1, \"version\": \"0.0.1\"}', 1000,
                clock_timestamp(), clock_timestamp() + INTERVAL '1 s')";

/// Rows whose schedule follows other rules than this release's.
async fn of_other_rules(fleet: &Fleet) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT count(*) FROM machine_due WHERE rules_version <> $1")
        .bind(i64::from(RULES_VERSION))
        .fetch_one(&fleet.pool)
        .await?)
}

/// Waits until every row follows this release's rules.
async fn until_all_follow(fleet: &Fleet) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let others = of_other_rules(fleet).await?;
        if others == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{others} rows keep other rules\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn schema(fleet: &Fleet) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(&fleet.pool).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_schema_before_with_data_is_upgraded_by_two_at_once_and_its_machines_go_on() -> TestResult {
    let machines: i64 = Form::of_this_run().pick(10, 60);
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.5",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start("fire_upgrade", &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let endpoints = [first.clone(), second.clone()];
    let before =
        fleet.shepherd("before", &endpoints, &[&FLAGS[..], &["--provisioner_max_machines=6"]].concat())?;
    let six = "SELECT count(*) = 6 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
    fleet.until("six are Ready", six).await?;
    end(&fleet, before).await?;
    let mut connection = connect(&fleet).await?;
    migrator().undo(&mut connection, previous("schema ")?).await?;
    sqlx::raw_sql(OLD_ROWS).execute(&mut connection).await?;
    let kept = "SELECT count(*) FROM history";
    let number = count(&fleet, kept).await?;
    connection.close().await?;
    assert_eq!(schema(&fleet).await?, previous("schema ")?);
    assert_eq!(of_other_rules(&fleet).await?, 12, "rules {} are this release's", previous("rules ")?);

    let one = fleet.shepherd("one", &endpoints, &FLAGS)?;
    let two = fleet.shepherd("two", &[second, first], &FLAGS)?;
    // A row that the old release wrote may call a machine Ready on which it had begun work.
    until_all_follow(&fleet).await?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert_eq!(schema(&fleet).await?, supported_version());
    let known = count(&fleet, "SELECT count(*) FROM machine").await?;
    assert_eq!(known, machines, "{}", fleet.explain().await?);
    assert!(count(&fleet, kept).await? > number, "history was lost, or nothing was done");
    let ended = "SELECT NOT EXISTS (SELECT 1 FROM machine_needs_human) AND NOT EXISTS (SELECT 1 FROM machine_recovery)";
    fleet.until("what the old release had begun is ended", ended).await?;
    let over = "SELECT count(*) = 0 FROM session WHERE closed_at IS NULL AND runtime_info->>'pid' = '1'";
    fleet.until("the old release's session is over", over).await?;
    assert_eq!(count(&fleet, BRAKES).await?, 0);
    end(&fleet, one).await?;
    end(&fleet, two).await?;
    assert_eq!(check_known(&fleet).await?, Vec::<String>::new());
    counted(
        "schema before this one",
        format!(
            "from {} to {} with 6 machines in 4 states, by 2 shepherds at once; {machines} Ready, {number} lines of history kept",
            previous("schema ")?,
            supported_version()
        ),
    )?;
    Ok(())
}

/// The violations that the checker finds, except for the session that no process of ours ever had.
async fn check_known(fleet: &Fleet) -> Result<Vec<String>> {
    let records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    Ok(check(&records).into_iter().map(|violation| format!("{violation:?}")).collect())
}

/// The program of the previous release, in the long form.
fn previous_program() -> Result<Option<PathBuf>> {
    if Form::of_this_run() == Form::Short {
        return Ok(None);
    }
    let path =
        std::env::var_os("SHEPHERD_PREVIOUS_RELEASE_PATH").map(PathBuf::from).filter(|path| path.is_file());
    let path = path.context(
        "the release before this one is not built, so nothing is shown of an upgrade under it: \
         set SHEPHERD_PREVIOUS_RELEASE_PATH to what tools/previous prints",
    )?;
    Ok(Some(path))
}

/// Claims of a process since `since`.
async fn claims(fleet: &Fleet, pid: u32, since: chrono::DateTime<chrono::Utc>) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(*) FROM history JOIN session USING (session_id)
         WHERE edge = 'start' AND at > $2 AND runtime_info->>'pid' = $1",
    )
    .bind(pid.to_string())
    .bind(since)
    .fetch_one(&fleet.pool)
    .await?)
}

/// The newer one finds the older at work. Without the older one's program, as part of the suite, this is the other half
/// of `restart.rs`: there newer rules are written by hand under one shepherd of this release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_upgraded_live_is_left_alone_by_the_older_shepherd_that_still_runs() -> TestResult {
    let Some(program) = previous_program()? else {
        return Ok(newer_rules_beside_an_older_shepherd().await?);
    };
    let machines = 40;
    let flags = ["--machine_count", "40", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("fire_upgrade_live", &flags).await?;
    let mut connection = connect(&fleet).await?;
    sqlx::raw_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public").execute(&mut connection).await?;
    connection.close().await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let dialect = previous_names("dialect").find(|(now, _)| *now == fleet.database.dialect().as_str());
    let old_program = || Otherwise {
        program: Some(program.clone()),
        dialect: dialect.map(|(_, before)| before),
        renamed_flags: previous_names("flag").collect(),
        ..Otherwise::default()
    };
    let old_endpoints = [first.clone(), second.clone()];
    let mut old = fleet.shepherd_otherwise(old_program(), "old", &old_endpoints, &FLAGS)?;
    let deadline = Instant::now() + PATIENCE;
    let ready = "SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
    loop {
        let made = count(&fleet, "SELECT count(*) FROM pg_tables WHERE tablename = 'intent'").await? > 0;
        if made && count(&fleet, ready).await? >= 5 {
            break;
        }
        assert!(Instant::now() < deadline, "the old one makes nothing Ready:\n{}", fleet.read_log("old")?);
        if let Some(status) = old.ended()? {
            panic!("the old one ended: {status}\n{}", fleet.read_log("old")?);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(schema(&fleet).await?, previous("schema ")?);
    let under_way = count(&fleet, "SELECT count(*) FROM work").await?;

    let new = fleet.shepherd("new", &[second.clone(), first.clone()], &FLAGS)?;
    fleet.until("all are Ready", ALL_READY).await?;
    until_all_follow(&fleet).await?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert_eq!(schema(&fleet).await?, supported_version());
    assert_eq!(
        count(&fleet, RECOVERED).await?,
        0,
        "upgrading made a machine silent\n{}",
        fleet.explain().await?
    );

    // From now on every machine belongs to the newer one, while the older one runs and receives heartbeats.
    let since: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&fleet.pool).await?;
    let dead = 6;
    for number in 1..=dead {
        fleet.strike(&format!("sim-{number:04}"), "kill").await?;
    }
    fleet
        .until(
            "those whose agents died are helped",
            "SELECT count(DISTINCT machine_id) = 6 FROM intent WHERE kind = 'restart-agent' AND settled_at IS NOT NULL",
        )
        .await?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert_eq!(claims(&fleet, old.pid(), since).await?, 0, "the older one worked on newer rules' machines");
    assert!(claims(&fleet, new.pid(), since).await? >= dead, "the newer one did not do it");
    assert_eq!(
        count(&fleet, RECOVERED).await?,
        dead,
        "somebody else was suspected\n{}",
        fleet.explain().await?
    );
    assert_eq!(count(&fleet, BRAKES).await?, 0);
    assert_eq!(of_other_rules(&fleet).await?, 0, "the older one rewrote a newer one's rows");
    assert!(old.ended()?.is_none(), "the older one ended\n{}", fleet.explain().await?);
    let open: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM session WHERE closed_at IS NULL AND runtime_info->>'pid' = $1",
    )
    .bind(old.pid().to_string())
    .fetch_one(&fleet.pool)
    .await?;
    assert!(open > 0, "the older one has lost its sessions\n{}", fleet.explain().await?);
    refused_at_its_start(&fleet, old_program()).await?;
    end(&fleet, old).await?;
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    end(&fleet, new).await?;
    assert_eq!(check_known(&fleet).await?, Vec::<String>::new());
    counted(
        "upgraded live under the release before",
        format!(
            "{machines} machines Ready, {under_way} worked on at that moment, {dead} helped afterwards, all by the newer; \
             the older one kept {open} sessions and claimed 0"
        ),
    )?;
    Ok(())
}

/// A shepherd of the previous release that starts again gets the reason why it may not.
async fn refused_at_its_start(fleet: &Fleet, program: Otherwise) -> Result<()> {
    let mut again = fleet.shepherd_otherwise(program, "again", &[endpoint()?], &FLAGS)?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = again.ended()? {
            break status;
        }
        ensure!(Instant::now() < deadline, "one of the release before starts on a newer schema");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let text = fleet.read_log("again")?;
    ensure!(
        status.code() == Some(2) && text.contains("it was upgraded by a newer shepherd"),
        "{status}: {text}"
    );
    Ok(())
}

/// Newer rules arrive in a running shepherd's database while it works, as during an upgrade.
async fn newer_rules_beside_an_older_shepherd() -> Result<()> {
    let flags = ["--machine_count", "12", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("fire_upgrade_rules", &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    // This test does not cover sessions that a busy host loses.
    let flags = [&FLAGS[..], &["--session_interval=30s"]].concat();
    let mut older: Program = fleet.shepherd("older", &[first.clone(), second.clone()], &flags)?;
    fleet.until("all are Ready", ALL_READY).await?;
    // A first report changes a fact, and an older release must not store it.
    fleet.until("all have reported hardware", "SELECT count(*) = 12 FROM machine_hardware_report").await?;
    sqlx::query("UPDATE machine_due SET rules_version = rules_version + 1").execute(&fleet.pool).await?;
    let since: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&fleet.pool).await?;
    let disturbed = count(&fleet, RECOVERED).await? + count(&fleet, DISTURBED).await?;
    // A shepherd that starts later sweeps at once, and reports what it leaves alone.
    let later = fleet.shepherd("later", &[second, first], &flags)?;
    let deadline = Instant::now() + PATIENCE;
    while !fleet.read_log("later")?.contains("a newer release decides for these machines") {
        ensure!(
            Instant::now() < deadline,
            "it does not say what it leaves alone\n{}",
            fleet.explain().await?
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    fleet.strike("sim-0001", "kill").await?;
    fleet.strike("sim-0002", "kill").await?;
    // Their silence lasts for two limits, and heartbeats of the others arrive all that time.
    fleet
        .until(
            "two are silent and ten send heartbeats",
            "SELECT count(*) FILTER (WHERE at < clock_timestamp() - INTERVAL '24 s') = 2
                AND count(*) FILTER (WHERE at > clock_timestamp() - INTERVAL '4 s') = 10
             FROM machine_agent_heartbeat",
        )
        .await?;
    let claimed = claims(&fleet, older.pid(), since).await? + claims(&fleet, later.pid(), since).await?;
    assert_eq!(claimed, 0, "they worked on newer rules' machines");
    assert_eq!(count(&fleet, RECOVERED).await? + count(&fleet, DISTURBED).await?, disturbed);
    let newer =
        "SELECT count(*) FROM machine_due WHERE rules_version = (SELECT max(rules_version) FROM machine_due)";
    assert_eq!(count(&fleet, newer).await?, 24, "it rewrote a newer one's rows");
    ensure!(older.ended()?.is_none(), "it ended");
    let lost = count(&fleet, "SELECT count(*) FROM session WHERE closed_at IS NOT NULL").await?;
    assert_eq!(lost, 0, "it lost its sessions");
    end(&fleet, older).await?;
    counted(
        "newer rules come live",
        "24 of 24 rows left alone, 10 agents in contact all the while, 0 sessions lost",
    )?;
    Ok(())
}
