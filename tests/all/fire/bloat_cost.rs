//! The cost of a held snapshot: processor time of the server for each claimed and finished machine at full rate, before
//! and while a transaction holds a snapshot.
//!
//! Only the long form evaluates it, because only then nothing else runs on the host. The short form shows that the
//! measured events occur: machines are processed while none of their dead rows can be removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd::bmdb::connection::settings::ConnectionSettings;
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::session::{Session, Sessions};
use shepherd::model::ids::ProcessId;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::until;
use crate::fire::bloat::{hold_a_snapshot, unchanged_poll};
use crate::fire::{Form, counted};
use crate::harness::aloud::TestResult;
use crate::harness::dialect;

/// Ticks of a processor's time in a second, as `/proc` counts them for programs (`USER_HZ`).
const TICKS: f64 = 100.0;
const CLIENTS: usize = 8;
/// The largest factor by which a minute under a held snapshot may raise the cost of a claim.
const MOST: f64 = 2.5;

/// Machines of one provider that are due, in eight buckets, each a moment after the one before.
const FILL: &str = "
    INSERT INTO machine SELECT md5(n::TEXT)::UUID, now() FROM generate_series(1, $MACHINES) n;
    INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, looked_at, unchanged)
    SELECT md5(n::TEXT)::UUID, 'rack', n::TEXT, '192.0.2.1', 'Running', now() - INTERVAL '1 day', now(), TRUE
    FROM generate_series(1, $MACHINES) n;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT md5(n::TEXT)::UUID, 'observe', 'Update', 'rack', 1, n % 8,
           now() - INTERVAL '1 hour' + n * INTERVAL '1 millisecond', FALSE, 'looked at', 'here:1', 'Provided', now(),
           1, 1, 0, 0, 0 FROM generate_series(1, $MACHINES) n;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT md5(n::TEXT)::UUID, 'access', NULL, 'rack', 1, n % 8, NULL, FALSE, 'nothing', 'here:1', 'Provided', now(),
           1, 1, 0, 0, 0 FROM generate_series(1, $MACHINES) n;
    VACUUM ANALYZE";

/// A server with a fleet of its own, and clients of a shepherd at full rate.
struct Site {
    server: PrivatePostgres,
    bmdb: Bmdb,
    stop: Arc<AtomicBool>,
    finished: Arc<AtomicU64>,
    clients: JoinSet<Result<()>>,
    keep: CancellationToken,
    keeper: tokio::task::JoinHandle<()>,
}

impl Site {
    async fn start(machines: u32, interval: Span) -> Result<Self> {
        let options = PrivatePostgresOptions { storage: ServerStorage::Temporary, max_connections: 100 };
        let server = PrivatePostgres::start(options).await?;
        server.create_database("bloat").await?;
        let mut settings = ConnectionSettings::from_url(&server.url("bloat"), "clients")?;
        settings.dialect = dialect::of_this_run()?;
        settings.max_connections = 20;
        let bmdb = Bmdb::connect(settings).await?;
        bmdb.migrate().await?;
        fill(&server.url("bloat"), machines).await?;
        bmdb.change_policy("test", move |policy| {
            policy.update_interval_stable = interval;
            policy.update_interval_unstable = interval;
        })
        .await?;
        let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_mins(1));
        let keep = CancellationToken::new();
        let keeper = tokio::spawn(keeper.run(&keep)?);
        let (stop, finished) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let session = sessions.start("client", serde_json::json!({})).await?;
            let claimer = Claimer::new(sessions.clone(), Process::Update, vec!["rack".to_owned()]);
            clients.spawn(client(claimer, session, stop.clone(), finished.clone()));
        }
        Ok(Self { server, bmdb, stop, finished, clients, keep, keeper })
    }

    fn data(&self) -> Result<PathBuf> {
        Ok(self.server.log().parent().context("a log has a directory")?.join("data"))
    }

    /// Milliseconds of processor time of the whole server for each machine, over this period.
    async fn cost(&self, lasts: Duration) -> Result<f64> {
        let (seconds, done) = (server_seconds(&self.data()?)?, self.finished.load(Ordering::Relaxed));
        // The subject is a rate, which takes time.
        tokio::time::sleep(lasts).await;
        // Longer on a host that is so busy that nothing was done.
        until("a machine is worked on", async || Ok(self.finished.load(Ordering::Relaxed) > done)).await?;
        let done = self.finished.load(Ordering::Relaxed) - done;
        let seconds = server_seconds(&self.data()?)? - seconds;
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        let done = done as f64;
        Ok(seconds * 1000.0 / done)
    }

    async fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(client) = self.clients.join_next().await {
            client??;
        }
        self.keep.cancel();
        self.keeper.await?;
        self.bmdb.close().await;
        self.server.stop().await?;
        Ok(self.finished.load(Ordering::Relaxed))
    }
}

async fn fill(url: &str, machines: u32) -> Result<()> {
    let pool = PgPool::connect(url).await?;
    let text = FILL.replace("$MACHINES", &machines.to_string());
    for statement in text.split(';') {
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&pool).await?;
    }
    pool.close().await;
    Ok(())
}

async fn client(
    mut claimer: Claimer,
    session: Session,
    stop: Arc<AtomicBool>,
    finished: Arc<AtomicU64>,
) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        match claimer.claim(std::slice::from_ref(&session)).await? {
            Claimed::Work(work) => {
                for work in work {
                    work.finish(vec![unchanged_poll()], "the provider was polled").await?;
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            }
            Claimed::Contended => tokio::task::yield_now().await,
            Claimed::Empty => tokio::time::sleep(Duration::from_millis(1)).await,
            // As a loop does if its work is announced all the time.
            Claimed::FullScanDeferred(rests) => {
                tokio::time::sleep(rests.min(Duration::from_millis(10))).await;
            }
        }
    }
    Ok(())
}

/// Processor time of every process that works in this directory. That of ended processes is counted by their parent.
fn server_seconds(data: &Path) -> Result<f64> {
    let mut ticks = 0.0;
    for entry in fs::read_dir("/proc")? {
        let process = entry?.path();
        if !fs::read_link(process.join("cwd")).is_ok_and(|works_in| works_in == data) {
            continue;
        }
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        let Some((_, fields)) = stat.rsplit_once(')') else { continue };
        // User and system time, of the process and of its ended children.
        ticks +=
            fields.split_whitespace().skip(11).take(4).filter_map(|n| n.parse::<f64>().ok()).sum::<f64>();
    }
    Ok(ticks / TICKS)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_held_for_a_minute_at_full_rate_costs_little() -> TestResult {
    let form = Form::of_this_run();
    let site = Site::start(form.pick(1_000, 60_000), Span::seconds(form.pick(1, 20))).await?;
    let window = Duration::from_secs(form.pick(1, 10));
    site.cost(window).await?;
    let before = site.cost(window).await?;
    let options: PgConnectOptions = site.server.url("bloat").parse()?;
    let began = site.finished.load(Ordering::Relaxed);
    let holder = hold_a_snapshot(&options).await?;
    let mut held = Vec::new();
    for _ in 0..form.pick(2, 6) {
        held.push(site.cost(window).await?);
    }
    let under = site.finished.load(Ordering::Relaxed) - began;
    // Each leaves the versions of a claim, of two rewritten lanes, and of a released lease.
    until("the server has counted what stays", async || {
        let sample = site.bmdb.read_vacuum_stats().await?;
        let dead = sample.dead_rows.iter().find(|(table, _)| *table == "machine_due").map_or(0, |(_, n)| *n);
        Ok(u64::try_from(dead)? >= under * 2)
    })
    .await?;
    drop(holder);
    let after = site.cost(window).await?;
    let all = site.stop().await?;
    let last = held.last().copied().unwrap_or(f64::NAN);
    let ratio = last / before;
    let each: Vec<String> = held.iter().map(|cost| format!("{cost:.2}")).collect();
    counted(
        "a snapshot held for a minute",
        format!(
            "{all} machines, {under} of them under it; processor time for each {before:.2} ms before, {} ms \
             in the {} windows of {} s while it was held ({ratio:.2} times), {after:.2} ms after it",
            each.join(", "),
            held.len(),
            window.as_secs()
        ),
    )?;
    assert!(
        form == Form::Short || ratio <= MOST,
        "a held snapshot made each machine cost {ratio:.2} times as much ({before:.2} ms, then {}), {MOST} \
         times at the most",
        each.join(", ")
    );
    Ok(())
}
