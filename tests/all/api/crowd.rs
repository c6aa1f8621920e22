//! Fifty programs that list machines without a pause, and twenty people who watch: the loops are not affected. A claim
//! touches as many pages as without them, and no transaction of the loops has to be repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use shepherd::bmdb::engine::claim::Claimed;
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent};
use shepherd::bmdb::metrics::Metrics;
use shepherd::model::access::AccessRole;
use shepherd::model::process::Process;
use shepherd::proto::fleet::v1::WatchMachinesRequest;
use shepherd::proto::fleet::v1::machines_client::MachinesClient;
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic::Request;

use crate::api::{Api, Key};
use crate::bmdb_explain::{claimed_at, fill};
use crate::bmdb_kit::{Shepherd, settings, surely, until};
use crate::harness::aloud::TestResult;

/// One in a hundred of these waits for an agent.
const MACHINES: usize = 20_000;
const POLLERS: u64 = 50;
const WATCHERS: u64 = 20;
/// Claims in each of three rounds.
const CLAIMS: usize = 40;

/// The costs of the loops in one round.
#[derive(Debug)]
struct Paid {
    /// Pages that a claim of one machine touched: the median of several.
    buffers: i64,
    /// Claims that found the work taken by another worker.
    contended: usize,
    /// Transactions that had to be repeated, and those that failed: their names, and how often so far.
    again: Vec<String>,
}

/// Transactions of that handle that did not succeed at the first attempt.
fn again(shepherd: &Shepherd) -> Result<Vec<String>> {
    let metrics = Metrics::new();
    shepherd.bmdb.metrics().register(&metrics);
    let text = metrics.encode()?;
    let lines = text.lines().filter(|line| line.contains("_transactions_total{"));
    let lines = lines.filter(|line| !line.contains("\"done\"") && !line.ends_with(" 0"));
    Ok(lines.map(str::to_owned).collect())
}

/// Claims machines one after the other, gives each an agent, and counts the pages that each claim touches.
async fn turn(shepherd: &Shepherd, connection: &mut PgConnection) -> Result<Paid> {
    let before = again(shepherd)?;
    let session = shepherd.session().await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack-0");
    let (mut contended, mut buffers) = (0, Vec::new());
    let mut done = 0;
    while done < CLAIMS {
        match surely(&mut claimer, &session).await? {
            Claimed::Work(work) => {
                for work in work {
                    let agent = NewAgent {
                        public_key: vec![7; 32],
                        boot_id: None,
                        version: "1".into(),
                        supervision: "systemd".into(),
                        fence: work.fence(),
                    };
                    work.finish(vec![FactChange::AgentStarted(agent)], "done").await?;
                    done += 1;
                }
            }
            Claimed::Contended => contended += 1,
            other => anyhow::bail!("nothing is due: {other:?}"),
        }
        if done % 4 == 0 {
            buffers.push(claimed_at(connection).await?);
        }
    }
    shepherd.sessions.close(&session, "done").await?;
    buffers.sort_unstable();
    let middle = *buffers.get(buffers.len() / 2).context("looks")?;
    let again = again(shepherd)?.into_iter().filter(|line| !before.contains(line)).collect();
    Ok(Paid { buffers: middle, contended, again })
}

/// Clients that poll and watch until `stop` is set, with the numbers of pages and lines that they have received.
struct Crowd {
    stop: Arc<AtomicBool>,
    pages: Arc<AtomicU64>,
    watch_lines: Arc<AtomicU64>,
    everybody: JoinSet<Result<()>>,
}

impl Crowd {
    async fn gather(api: &Arc<Api>, keys: &[Key]) -> Result<Self> {
        let (stop, pages, count) = (Arc::new(AtomicBool::new(false)), Arc::default(), Arc::default());
        let mut crowd = Self { stop, pages, watch_lines: count, everybody: JoinSet::new() };
        for (number, key) in (0..POLLERS).zip(keys.iter().cycle()) {
            let (api, token, stop) = (api.clone(), key.token.clone(), crowd.stop.clone());
            let pages = crowd.pages.clone();
            crowd.everybody.spawn(async move {
                let selector = match number % 4 {
                    0 => String::new(),
                    1 => format!("provider=rack-{}", number % 10),
                    2 => "phase=Provided".to_owned(),
                    _ => "fact=agent_started".to_owned(),
                };
                let body = json!({ "selector": selector, "pageSize": 100 });
                while !stop.load(Ordering::Relaxed) {
                    api.call(Some(&token), "Machines/List", body.clone()).await?.ok()?;
                    pages.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        for (_, key) in (0..WATCHERS).zip(keys.iter().cycle()) {
            let selector = "phase=Provided".to_owned();
            let mut request = Request::new(WatchMachinesRequest { selector, resume_token: String::new() });
            request.metadata_mut().insert("authorization", format!("Bearer {}", key.token).parse()?);
            let mut stream = MachinesClient::new(api.channel(None).await?).watch(request).await?.into_inner();
            let (stop, count) = (crowd.stop.clone(), crowd.watch_lines.clone());
            crowd.everybody.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    // The timeout lets an idle watcher check `stop`.
                    let wait = tokio::time::timeout(Duration::from_millis(200), stream.next());
                    if let Ok(line) = wait.await {
                        line.context("the watch ended")??;
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Ok(())
            });
        }
        Ok(crowd)
    }

    /// Waits until the crowd has received at least this many pages and lines.
    async fn until_busy(&self, pages: u64, lines: u64) -> Result<()> {
        until("the crowd is served", async || {
            Ok(self.pages.load(Ordering::Relaxed) >= pages
                && self.watch_lines.load(Ordering::Relaxed) >= lines)
        })
        .await
    }

    async fn leave(mut self) -> Result<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.everybody.join_next().await {
            ended??;
        }
        Ok((self.pages.load(Ordering::Relaxed), self.watch_lines.load(Ordering::Relaxed)))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loops_pay_the_same_with_fifty_pollers_and_twenty_watchers() -> TestResult {
    let api = Arc::new(Api::start("api_crowd").await?);
    let mut connection = PgConnection::connect(api.database.url()).await?;
    fill(&mut connection, MACHINES).await?;
    // One credential may have a quarter of the watches of a shepherd.
    let mut viewers = Vec::new();
    for _ in 0..5 {
        viewers.push(api.key(AccessRole::Viewer, &[], None).await?);
    }
    // Sessions are not renewed meanwhile, as with the API's own session: a claim that lost against another transaction
    // did not lose against a caller.
    let unrenewed = Duration::from_hours(10);
    let shepherd = Shepherd::with(settings(&api.database, "loops", 4)?, unrenewed).await?;

    let alone = turn(&shepherd, &mut connection).await?;
    let crowd = Crowd::gather(&api, &viewers).await?;
    crowd.until_busy(POLLERS, WATCHERS * 100).await?;
    let pages = crowd.pages.load(Ordering::Relaxed);
    let watched = turn(&shepherd, &mut connection).await?;
    let during = crowd.pages.load(Ordering::Relaxed) - pages;
    // Each claim moved a machine out of what is watched.
    crowd.until_busy(pages, WATCHERS * (100 + CLAIMS as u64)).await?;
    let (pages, number) = crowd.leave().await?;
    let after = turn(&shepherd, &mut connection).await?;

    println!(
        "alone {alone:?}, watched {watched:?} ({during} of {pages} pages, {number} lines), after {after:?}"
    );
    assert!(during > 0, "nobody polled while machines were claimed");
    let without = alone.buffers.max(after.buffers);
    assert!(
        watched.buffers * 10 <= without * 12,
        "{watched:?} beside a crowd, {alone:?} and {after:?} without"
    );
    for paid in [&alone, &watched, &after] {
        assert!(paid.contended == 0 && paid.again.is_empty(), "{paid:?}");
    }
    shepherd.stop().await?;
    Ok(Arc::into_inner(api).context("everybody has left")?.stop().await?)
}
