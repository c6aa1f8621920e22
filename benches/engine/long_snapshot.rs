//! A snapshot that is held for a minute while eight clients work at full rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::session::Session;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::task::JoinSet;

use crate::Plan;
use crate::cycles::unchanged_poll;
use crate::fleet::Fleet;
use crate::report::{Report, Target, progress};
use crate::server::{CLIENTS, Server};

/// Number of measurements of the server's processor time while a snapshot is held.
const WINDOWS: u32 = 6;
/// Machines in the fleet for each second of the update interval. That is more than eight clients can process, so one is
/// always due.
const MACHINES_EACH_SECOND: u32 = 3_000;

/// Measures on a fleet of its own, all of whose machines are of one provider and due.
pub(crate) async fn measure(plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    report.section(
        "A snapshot held for a minute at full rate",
        "Eight clients with one worker each claim and finish without a pause, while a transaction that keeps \
         every dead row stays open. What is compared is the processor time of the whole server for each \
         machine, in the last ten seconds of that minute against ten seconds before it.",
    )?;
    let quick = plan.floor < Duration::from_secs(5);
    let window = if quick { Duration::from_secs(1) } else { Duration::from_secs(10) };
    let seconds = if quick { 1 } else { 20 };
    let machines = MACHINES_EACH_SECOND * seconds;
    progress(&format!("filling a fleet of {machines} machines"))?;
    let fleet = Fleet::fill(server, machines).await?;
    fleet
        .bmdb
        .change_policy("bench", move |policy| {
            policy.update_interval_stable = Span::seconds(u64::from(seconds));
        })
        .await?;
    // Each finish rewrites the due row from the facts, so the facts get the provider, too.
    sqlx::raw_sql(
        "UPDATE machine_provided SET provider = 'rack-0';
         UPDATE machine_due SET provider = 'rack-0';
         UPDATE machine_due SET ready_at = now() - INTERVAL '1 hour' + random() * INTERVAL '1 minute'
         WHERE lane = 'observe'",
    )
    .execute(fleet.bmdb.pool())
    .await?;
    fleet.vacuum().await?;

    let (stop, finished) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let sessions = fleet.sessions(CLIENTS).await?;
    let mut clients = JoinSet::new();
    for session in sessions.clone() {
        clients.spawn(client(fleet.claimer(Process::Update, 1), session, stop.clone(), finished.clone()));
    }
    let cost = async || {
        let (seconds, done) = (server.processor_seconds()?, finished.load(Ordering::Relaxed));
        tokio::time::sleep(window).await;
        let done = finished.load(Ordering::Relaxed) - done;
        ensure!(done > 0, "nothing was worked on in {window:?}");
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        let done = done as f64;
        Ok::<f64, anyhow::Error>((server.processor_seconds()? - seconds) * 1000.0 / done)
    };
    cost().await?;
    let before = cost().await?;
    let options: PgConnectOptions = server.url(&format!("fleet_{machines}")).parse()?;
    let mut holder = options.connect().await?;
    sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM machine_due")
        .execute(&mut holder)
        .await?;
    let mut held = Vec::new();
    for _ in 0..WINDOWS {
        held.push(cost().await?);
    }
    holder.close().await?;
    let after = cost().await?;
    stop.store(true, Ordering::Relaxed);
    while let Some(client) = clients.join_next().await {
        client??;
    }
    fleet.end(&sessions).await?;
    fleet.close().await?;
    let last = *held.last().context("a snapshot was held")?;
    report.add("processor time of a machine before it", "ms", &[before], Target::None)?;
    report.add("while it is held, six times", "ms", &held, Target::None)?;
    report.add("after it", "ms", &[after], Target::None)?;
    report.add("at the end of it against before", "×", &[last / before], Target::AtMost(2.5))
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
                    work.finish(vec![unchanged_poll()], "measured").await?;
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            }
            Claimed::Contended => tokio::task::yield_now().await,
            Claimed::Empty => tokio::time::sleep(Duration::from_millis(1)).await,
            // As a loop does that is notified all the time.
            Claimed::FullScanDeferred(rests) => {
                tokio::time::sleep(rests.min(Duration::from_millis(10))).await;
            }
        }
    }
    Ok(())
}
