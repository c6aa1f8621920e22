//! Nothing grows without a bound: three months of work in a minute, and a transaction that holds a snapshot meanwhile.
//!
//! Days are those of the test clock. Autovacuum runs once a minute; the test vacuums once a day, because its days are
//! shorter than autovacuum's minute.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::fleet::retention::TABLES;
use shepherd::bmdb::fleet::sample::LEASE;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::metrics::labels::ByTable;
use shepherd::manager::housekeeping;
use shepherd::manager::metrics::{HousekeepingMetrics, ManagerMetrics};
use shepherd::manager::sampler;
use shepherd::model::ids::ProcessId;
use shepherd::model::policy::DisruptionKind;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::time::Span;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgConnection};
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, LONG, PATIENCE, Shepherd, until};
use crate::fire::{Form, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, endpoint};

/// The result of `Update` if nothing has changed.
pub(crate) fn unchanged_poll() -> FactChange {
    FactChange::ProviderPolled {
        details: ProviderDetails {
            reservation: None,
            address: Some("192.0.2.1".to_owned()),
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
        },
        unchanged: true,
    }
}

fn house_metrics() -> HousekeepingMetrics {
    ManagerMetrics::register(&Metrics::new()).housekeeping
}

/// The events of a day of the test clock, and the retention time.
struct Rates {
    machines: i64,
    /// How often a day each machine is processed, one creation is attempted, and the workers' sessions are replaced.
    steps: i64,
    retention_days: i64,
}

/// Sessions of each step: two are closed in order, one is lost.
const SESSIONS: i64 = 3;
/// How long samples of the fleet are stored, with any retention of history in the policy.
const SAMPLES_KEPT_DAYS: i64 = 30;

impl Rates {
    fn cycles_a_day(&self) -> i64 {
        self.machines * self.steps
    }

    /// Most rows of a table. Rows are deleted by age once a day, so the rows of one day more than the retention time
    /// exist.
    fn rows(&self, table: &str) -> i64 {
        let days = self.retention_days + 1;
        match table {
            // A start and an end.
            "history" => self.cycles_a_day() * 2 * days,
            // And the one that stays open.
            "intent" => self.steps * days + 1,
            "session" => self.steps * SESSIONS * days,
            "machine_due" => self.machines * 2,
            "work" => SESSIONS,
            "work_backoff" | "work_postponed" => self.machines * 3,
            "fleet_listening" => 16,
            // A budget for each disruption, for orders and for releases; a provider's lease, and the one for counting.
            "named_lease" => i64::try_from(DisruptionKind::ALL.len()).unwrap_or(i64::MAX) + 4,
            "fleet_sample" => self.steps * (SAMPLES_KEPT_DAYS + 1),
            "policy" | "bmdb_identity" | "provider_state" => 1,
            "sealed_secret" | "migration_lock" | "brake" => 2,
            "_sqlx_migrations" => 100,
            _ => self.machines,
        }
    }

    /// Most row versions that a day leaves behind in a table, until the next vacuum.
    fn versions_a_day(&self, table: &str) -> i64 {
        match table {
            // As many as are deleted.
            "history" => self.cycles_a_day() * 2,
            "intent" | "work_backoff" | "fleet_listening" => self.steps * 2,
            // Each is started, renewed and closed, and one old session is deleted.
            "session" => self.steps * SESSIONS * 4,
            // A claim, a rewrite of both lanes, a released lease, and a sweep.
            "machine_due" => self.cycles_a_day() * 5,
            "named_lease" => self.steps * 6,
            // As many as are deleted.
            "fleet_sample" => self.steps,
            "work" | "machine_provided" => self.cycles_a_day(),
            _ => 0,
        }
    }

    /// Most bytes of a table with its indexes, relative to a fresh copy of its rows. A page of an index that grew by
    /// splits is half full, and each of its files begins with some pages.
    fn bytes(&self, table: &str, fresh: &Fresh) -> i64 {
        let rows = self.rows(table) + 2 * self.versions_a_day(table);
        fresh.empty + FREE_SPACE_MAP + 2 * (rows * fresh.a_thousand_rows / 1_000)
    }
}

/// The map of free space (three pages), that of visible pages, and one page to come.
const FREE_SPACE_MAP: i64 = 5 * 8_192;

/// The size of a table's rows with all indexes, at least.
struct Fresh {
    empty: i64,
    a_thousand_rows: i64,
}

/// Copies a table's rows into a new one like it.
async fn fresh(connection: &mut PgConnection, table: &str, rows: i64) -> Result<Fresh> {
    let create = format!("CREATE TABLE public.fresh (LIKE public.{table} INCLUDING ALL)");
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *connection).await?;
    let size = "SELECT pg_total_relation_size('public.fresh')";
    let empty: i64 = sqlx::query_scalar(size).fetch_one(&mut *connection).await?;
    let fill = format!("INSERT INTO public.fresh SELECT * FROM public.{table}");
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut *connection).await?;
    let full: i64 = sqlx::query_scalar(size).fetch_one(&mut *connection).await?;
    sqlx::raw_sql("DROP TABLE public.fresh").execute(&mut *connection).await?;
    Ok(Fresh { empty, a_thousand_rows: (full - empty) * 1_000 / rows.max(1) })
}

/// Processes everything that is due, under one session. Returns the number of machines.
async fn work_on_all(shepherd: &Shepherd, claimer: &mut Claimer, failing: bool) -> Result<i64> {
    let session = shepherd.session().await?;
    let mut done = 0;
    loop {
        match claimer.claim(std::slice::from_ref(&session)).await? {
            Claimed::Work(work) => {
                for work in work {
                    if failing && done == 0 {
                        work.fail(Vec::new(), "its provider did not answer", None).await?;
                    } else {
                        work.finish(vec![unchanged_poll()], "the provider was polled").await?;
                    }
                    done += 1;
                }
            }
            Claimed::Contended => tokio::task::yield_now().await,
            Claimed::FullScanDeferred(rests) => tokio::time::sleep(rests).await,
            Claimed::Empty => break,
        }
    }
    shepherd.sessions.close(&session, "the day is over").await?;
    Ok(done)
}

/// A creation without a result, by a process that is then killed. The outcome of the first one stays unknown.
async fn create(bmdb: &Bmdb, leave_open: bool) -> Result<()> {
    // Nothing renews its session. A keeper could do so while the clock moves on, and the lease would stay.
    let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), LONG);
    drop(keeper);
    let session = sessions.start("doomed", serde_json::json!({})).await?;
    let lease = bmdb.acquire_named_lease(&session, "provisioner", "rack").await?;
    let lease = lease.context("the lease is free")?;
    let intent = bmdb.begin_creation(&lease, "a machine").await?;
    if !leave_open {
        ensure!(bmdb.resolve_creation(&lease, intent, "nothing was made").await?);
    }
    // The lease is not released and the session is not closed: the clock moves on, and both are lost.
    Ok(())
}

/// Counts the fleet once, under a session of its own.
async fn sample(shepherd: &Shepherd) -> Result<()> {
    let session = shepherd.session().await?;
    let (kind, name) = LEASE;
    let lease =
        shepherd.bmdb.acquire_named_lease(&session, kind, name).await?.context("the lease is free")?;
    let now = shepherd.bmdb.read_latest_sample(None).await?.now;
    let counted = sampler::count_fleet(&shepherd.bmdb, &CancellationToken::new()).await?;
    let counted = counted.context("it was stopped")?;
    ensure!(shepherd.bmdb.store_sample(&lease, now, &counted).await?, "the minute has a count");
    ensure!(shepherd.bmdb.release_named_lease(&lease).await?);
    Ok(shepherd.sessions.close(&session, "counted").await?)
}

/// Compares the row count of every table with its bound. Returns the counts of those that grow with time.
async fn hold_against_bounds(kit: &Kit, rates: &Rates, day: i64) -> Result<String> {
    let mut connection = kit.pool.acquire().await?;
    let mut text = format!("day {day}:");
    let (mut all, mut all_bound) = (0, 0);
    for table in TABLES {
        let look = format!("SELECT count(*), pg_total_relation_size('public.{table}') FROM public.{table}");
        let (rows, bytes): (i64, i64) =
            sqlx::query_as(AssertSqlSafe(look)).fetch_one(&mut *connection).await?;
        let bound = rates.bytes(table, &fresh(&mut connection, table, rows).await?);
        let most = rates.rows(table);
        ensure!(rows <= most, "{table} has {rows} rows on day {day}, and {most} at the most by its rates");
        ensure!(
            bytes <= bound,
            "{table} takes {bytes} bytes on day {day}, and {bound} at the most by its rows"
        );
        all += bytes;
        all_bound += bound;
        if ["history", "intent", "session", "machine_due"].contains(&table) {
            write!(text, " {table} {rows} of {most} rows, {} of {} KiB;", bytes / 1024, bound / 1024)?;
        }
    }
    write!(text, " all {} tables {} of {} KiB", TABLES.len(), all / 1024, all_bound / 1024)?;
    Ok(text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ninety_days_keep_every_table_within_its_bound() -> TestResult {
    let form = Form::of_this_run();
    let rates = Rates { machines: form.pick(8, 40), steps: form.pick(2, 6), retention_days: 20 };
    let kit = Kit::new("fire_days").await?;
    kit.provided(rates.machines, "rack").await?;
    let step = Span::hours(24 / rates.steps.unsigned_abs());
    kit.bmdb
        .change_policy("test", move |policy| {
            policy.update_interval_stable = step;
            policy.update_interval_unstable = step;
            policy.history_retention = Span::hours(20 * 24);
        })
        .await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let mut claimer = shepherd.claimer(Process::Update, "rack");
    let tables = TABLES.join(", ");
    let mut maintenance = kit.connection().await?;
    let (mut cycles, mut deleted, mut lines) = (0, 0, Vec::new());
    let fences = "SELECT sum(fence)::INT8 FROM machine_due";
    for day in 1..=90 {
        for number in 0..rates.steps {
            cycles += work_on_all(&shepherd, &mut claimer, number == 0).await?;
            create(&shepherd.bmdb, day == 1 && number == 0).await?;
            sample(&shepherd).await?;
            kit.bmdb.store_heartbeat_group((day * rates.steps + number) % 16, Arc::from([])).await?;
            kit.database.advance(step.0).await?;
            kit.bmdb.reap().await?;
            assert!(kit.sweep().await? == 0, "the schedule drifted on day {day}");
        }
        let before = kit.count(fences).await?;
        deleted +=
            housekeeping::delete_expired_once(&kit.bmdb, &house_metrics(), &CancellationToken::new()).await?;
        assert!(kit.count(fences).await? == before, "a fence went back");
        let vacuum = format!("VACUUM {tables}");
        sqlx::raw_sql(AssertSqlSafe(vacuum)).execute(&mut maintenance).await?;
        if day % 30 == 0 {
            lines.push(hold_against_bounds(&kit, &rates, day).await?);
        }
    }
    let most = rates.cycles_a_day() * 90;
    assert!(cycles * 10 >= most * 8, "{cycles} cycles of {most}: the days were idle");
    assert!(kit.bmdb.open_creations("rack").await?.len() == 1, "the open creation is gone");
    assert!(kit.count("SELECT sum(fence)::INT8 FROM machine_due").await? == cycles, "fences count claims");
    for line in lines {
        counted("ninety days", line)?;
    }
    counted(
        "ninety days",
        format!("{} machines, {cycles} work items, {deleted} rows deleted in batches", rates.machines),
    )?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_shepherd_deletes_what_its_policy_does_not_keep() -> TestResult {
    let fleet = Fleet::start("fire_retention", &["--machine_count", "2", "--boot_seconds", "0.2"]).await?;
    sqlx::raw_sql(
        "INSERT INTO history (machine_id, at, event)
         SELECT md5(n::TEXT)::UUID, now() - INTERVAL '31 days' - n * INTERVAL '1 minute', 'Old'
         FROM generate_series(1, 2500) n;
         INSERT INTO history (machine_id, at, event)
         SELECT md5(n::TEXT)::UUID, now() - INTERVAL '29 days', 'Newer' FROM generate_series(1, 7) n",
    )
    .execute(&fleet.pool)
    .await?;
    let shepherd = fleet.shepherd("keeping", &[endpoint()?], &["--history_retention=30d"])?;
    fleet.until("what is old is gone", "SELECT count(*) = 0 FROM history WHERE event = 'Old'").await?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert!(fleet.holds("SELECT count(*) = 7 FROM history WHERE event = 'Newer'").await?);
    let written =
        "SELECT document->>'history_retention' = '30d' AND written_by LIKE 'flags of %' FROM policy";
    assert!(fleet.holds(written).await?);
    end(&fleet, shepherd).await?;
    Ok(counted("retention by the service", "2500 of 2500 old lines deleted, 7 of 7 newer ones kept")?)
}

/// Begins a transaction that prevents the removal of all present rows.
pub(crate) async fn hold_a_snapshot(options: &PgConnectOptions) -> Result<PgConnection> {
    let mut holder = options.clone().application_name("holder").connect().await?;
    sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM machine_due")
        .execute(&mut holder)
        .await?;
    Ok(holder)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_show_a_held_snapshot_while_it_is_held() -> TestResult {
    let kit = Kit::new("fire_snapshot_metrics").await?;
    kit.provided(20, "rack").await?;
    let options: PgConnectOptions = kit.database.url().parse()?;
    let metrics = house_metrics();
    let mut maintenance = kit.connection().await?;
    let churn = "UPDATE machine_due SET version = version + 1";
    let vacuum = "VACUUM machine_due";
    let dead = || metrics.dead_rows.get_or_create(&ByTable { table: "machine_due" }).get();

    // A connection reports its dead rows up to ten seconds later, which may be after a vacuum of all of them.
    until("nothing is held, and nothing dead", async || {
        sqlx::raw_sql(vacuum).execute(&mut maintenance).await?;
        housekeeping::sample_storage_once(&kit.bmdb, &metrics).await?;
        Ok(dead() == 0 && metrics.oldest_snapshot.get() <= 0.0)
    })
    .await?;
    let began = Instant::now();
    let holder = hold_a_snapshot(&options).await?;
    for _ in 0..10 {
        sqlx::raw_sql(churn).execute(&mut maintenance).await?;
    }
    sqlx::raw_sql(vacuum).execute(&mut maintenance).await?;
    // 20 machines with two lanes, written ten times: vacuum may remove none of the versions.
    until("the dead rows stay, and the snapshot's age grows", async || {
        housekeeping::sample_storage_once(&kit.bmdb, &metrics).await?;
        Ok(dead() >= 400 && metrics.oldest_snapshot.get() > 1.0)
    })
    .await?;
    let (held_dead, held_for) = (dead(), metrics.oldest_snapshot.get());
    assert!(held_for <= began.elapsed().as_secs_f64() + 0.1, "{held_for} s, held for {:?}", began.elapsed());
    assert!(metrics.oldest_transaction.get() >= held_for);

    drop(holder);
    until("both fall once it has ended", async || {
        sqlx::raw_sql(vacuum).execute(&mut maintenance).await?;
        housekeeping::sample_storage_once(&kit.bmdb, &metrics).await?;
        Ok(dead() == 0 && metrics.oldest_snapshot.get() <= 0.0)
    })
    .await?;
    Ok(counted(
        "metrics of a held snapshot",
        format!("{held_dead} dead rows and an age of {held_for:.1} s while it was held, 0 and 0 after it"),
    )?)
}

/// Pages that claims have touched so far, and the number of claims.
async fn claims_so_far(kit: &Kit) -> Result<(i64, i64)> {
    let options: PgConnectOptions = kit.database.server_url().parse()?;
    let mut server = options.connect().await?;
    let url: PgConnectOptions = kit.database.url().parse()?;
    Ok(sqlx::query_as(
        "SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::INT8, coalesce(sum(calls), 0)::INT8
         FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
         WHERE d.datname = $1 AND query LIKE '%candidate AS MATERIALIZED%'",
    )
    .bind(url.get_database().map(str::to_owned))
    .fetch_one(&mut server)
    .await?)
}

/// Machines without due work, so many that the planner does not read them all. The test decides when they are analysed.
const OTHERS: &str = "
    INSERT INTO machine SELECT md5(n::TEXT)::UUID, now() FROM generate_series(1, 10000) n;
    INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
           phase_since, rules_version, policy_version, version, fence, losses)
    SELECT md5(n::TEXT)::UUID, 'observe', 'rack', 1, n % 8, FALSE, 'retired', 'here:1', 'Retired', now(), 1, 1, 0, 0, 0
    FROM generate_series(1, 10000) n;
    ALTER TABLE machine_due SET (autovacuum_enabled = FALSE)";

const MACHINES: i64 = 64;
const ROUNDS: i64 = 16;
/// Between two rounds, and longer than the longest period that a claim looks back over.
const BETWEEN: Duration = Duration::from_secs(40);

/// One step on every machine. Returns the pages that claims touched, the number of claims, and the duration.
async fn round(kit: &Kit, claimer: &mut Claimer, shepherd: &Shepherd) -> Result<(i64, i64, Duration)> {
    kit.database.advance(BETWEEN).await?;
    let session = shepherd.session().await?;
    let before = claims_so_far(kit).await?;
    let began = Instant::now();
    let mut done = 0;
    while done < MACHINES {
        ensure!(began.elapsed() < PATIENCE, "{done} of {MACHINES} machines were due");
        if let Claimed::Work(work) = claimer.claim(std::slice::from_ref(&session)).await? {
            for work in work {
                work.finish(vec![unchanged_poll()], "the provider was polled").await?;
                done += 1;
            }
        }
    }
    let took = began.elapsed();
    let after = claims_so_far(kit).await?;
    shepherd.sessions.close(&session, "the round is over").await?;
    Ok((after.0 - before.0, after.1 - before.1, took))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_under_a_held_snapshot_touches_no_more_pages_than_were_computed() -> TestResult {
    let kit = Kit::new("fire_snapshot").await?;
    kit.provided(MACHINES, "rack").await?;
    sqlx::raw_sql(OTHERS).execute(&kit.pool).await?;
    kit.bmdb
        .change_policy("test", |policy| {
            policy.update_interval_stable = Span::seconds(30);
            policy.update_interval_unstable = Span::seconds(30);
        })
        .await?;
    let shepherd = Shepherd::start(&kit, "worker", Duration::from_hours(10)).await?;
    let mut claimer = shepherd.claimer(Process::Update, "rack");
    let mut maintenance = kit.connection().await?;
    // The first round spreads the machines over time.
    round(&kit, &mut claimer, &shepherd).await?;
    sqlx::raw_sql("VACUUM ANALYZE machine_due, work, session").execute(&mut maintenance).await?;
    let (pages, claims, _) = round(&kit, &mut claimer, &shepherd).await?;
    let plain = pages / claims;

    let _holder = hold_a_snapshot(&kit.database.url().parse()?).await?;
    let (mut last, mut all) = (0, 0);
    for number in 1..=ROUNDS {
        let (pages, claims, took) = round(&kit, &mut claimer, &shepherd).await?;
        last = pages / claims;
        all += claims;
        // Three lookups by key pass the versions of that one row, five per round, and one passes those of its work
        // item, two per round. The versions that died in this round and, on a slow host, in the one before are within
        // the period that a claim looks back over. Every fifth second it starts from the beginning.
        let versions = (3 * 5 + 2) * number;
        let full = i64::try_from(took.as_secs())? / 5 + 2;
        let bound = plain + versions + 2 * MACHINES + full * MACHINES * number / claims;
        assert!(
            last <= bound,
            "in round {number} a claim touches {last} pages, {bound} at the most ({plain} without a snapshot)"
        );
    }
    counted(
        "claims under a held snapshot",
        format!("{all} claims, {plain} pages each before it and {last} at its end"),
    )?;
    Ok(shepherd.stop().await?)
}
