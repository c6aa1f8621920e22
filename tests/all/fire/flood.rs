//! Floods of connections without a credential, silent and half-spoken, on every listener of a shepherd that starts with
//! a soft limit of 1,024 files. Heartbeats, recovery and operators go on. Curators have the same test in their crate, and
//! those of role servers in `nodes::flood`.
//!
//! A second shepherd may open no more than these files. A class of connections to its API has 38 places then, so its
//! floods come from fewer addresses, and not from that of everyone else: a flood from more addresses than places reaches
//! handshakes.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hardening::file_limit::UsualFileLimit as _;
use serde_json::json;
use shepherd::model::access::AccessRole;
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD, HALF_A_REQUEST};

use crate::api::key_in;
use crate::fire::{Form, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::child::limit_files;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, Program, endpoint};

const SILENT: usize = 1300;
const HALF_SPOKEN: usize = 1000;
const FLAGS: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_silence_timeout=15s",
    "--recovery_brake_fraction=0.9",
    "--recovery_ladder=restart-agent:20s:3",
];
/// Attempts of an operator's call: `shepherdctl` retries too.
const ATTEMPTS: usize = 3;

/// The limit of open files of a shepherd that has few.
const FEW_FILES: u64 = 1024;

/// Addresses of a flood.
#[derive(Clone, Copy)]
struct Sources {
    count: usize,
    /// The number of the first one; zero is the address of everyone else.
    first: usize,
}

/// A shepherd with flooded listeners.
struct Target {
    fleet: Fleet,
    shepherd: Program,
    callback: SocketAddr,
    api: SocketAddr,
    metrics: SocketAddr,
    token: String,
}

impl Target {
    /// `files` is the hard limit of the shepherd; it starts with the usual soft limit.
    async fn start(name: &str, files: Option<u64>) -> Result<Self> {
        let machines = Form::of_this_run().pick("8", "60");
        let flags =
            ["--machine_count", machines, "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
        let fleet = Fleet::start(name, &flags).await?;
        let (agents, api, metrics) = (endpoint()?, endpoint()?, endpoint()?);
        let (api_flag, metrics_flag) =
            (format!("--api_listen_address={api}"), format!("--metrics_listen_address={metrics}"));
        let flags = [FLAGS.as_slice(), &[api_flag.as_str(), metrics_flag.as_str()]].concat();
        let mut command = fleet.unheard_shepherd("flooded", std::slice::from_ref(&agents), &flags)?;
        command.usual_file_limit();
        if let Some(files) = files {
            limit_files(&mut command, files);
        }
        let shepherd = Program::spawn_logged(&mut command, &fleet.log_of("flooded"))?;
        fleet
            .until("the schema is there", "SELECT count(*) > 0 FROM pg_tables WHERE tablename = 'intent'")
            .await?;
        fleet.until("all are Ready", ALL_READY).await?;
        let bmdb = fleet.database.bmdb().await?;
        let token = key_in(&bmdb, AccessRole::Viewer, &[], None).await?.token;
        bmdb.close().await;
        Ok(Self {
            fleet,
            shepherd,
            callback: agents.parse()?,
            api: api.parse()?,
            metrics: metrics.parse()?,
            token,
        })
    }

    fn plans(&self, sources: Sources) -> [FloodPlan; 3] {
        [(self.callback, HALF_A_RECORD), (self.api, HALF_A_RECORD), (self.metrics, HALF_A_REQUEST)].map(
            |(target, half)| FloodPlan {
                target,
                sources: sources.count,
                first_source: sources.first,
                silent: SILENT,
                half_spoken: HALF_SPOKEN,
                half,
            },
        )
    }

    /// Waits until each machine has sent two more heartbeats.
    async fn heartbeats_go_on(&self) -> Result<Duration> {
        let began = Instant::now();
        for _ in 0..2 {
            let since: chrono::DateTime<chrono::Utc> =
                sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&self.fleet.pool).await?;
            loop {
                let late: i64 =
                    sqlx::query_scalar("SELECT count(*) FROM machine_agent_heartbeat WHERE at <= $1")
                        .bind(since)
                        .fetch_one(&self.fleet.pool)
                        .await?;
                if late == 0 {
                    break;
                }
                ensure!(
                    began.elapsed() < PATIENCE,
                    "{late} machines send no heartbeat\n{}",
                    self.fleet.explain().await?
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(began.elapsed())
    }

    /// An operator's call over a new connection, and a health check.
    async fn operator_is_answered(&self) -> Result<Duration> {
        let began = Instant::now();
        let mut last = String::new();
        for _ in 0..ATTEMPTS {
            match self.call().await {
                Ok(()) => return Ok(began.elapsed()),
                Err(error) => last = format!("{error:#}"),
            }
        }
        anyhow::bail!("an operator's call was not answered: {last}")
    }

    async fn call(&self) -> Result<()> {
        // A client of its own, so that the connection is new.
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_danger_accept_invalid_certs(true)
            .timeout(Duration::from_secs(30))
            .build()?;
        let url = format!("https://{}/api/shepherd.fleet.v1.Machines/List", self.api);
        let call = client.post(url).bearer_auth(&self.token).json(&json!({ "pageSize": 1 }));
        let answer = call.send().await.context("the API")?;
        ensure!(answer.status().is_success(), "the API answered {}", answer.status());
        let health =
            client.get(format!("http://{}/healthz", self.metrics)).send().await.context("/healthz")?;
        ensure!(health.status().is_success(), "/healthz answered {}", health.status());
        Ok(())
    }

    /// Kills the agent of another machine than before, and waits until it is recovered. `before` machines were.
    async fn agent_is_recovered(&self, before: i64) -> Result<Duration> {
        let began = Instant::now();
        let machine: String = sqlx::query_scalar(
            "SELECT provider_id FROM machine_provided ORDER BY provider_id LIMIT 1 OFFSET $1",
        )
        .bind(before)
        .fetch_one(&self.fleet.pool)
        .await?;
        self.fleet.strike(&machine, "kill").await?;
        loop {
            let recovered: i64 = sqlx::query_scalar(
                "SELECT count(DISTINCT machine_id) FROM intent
                 WHERE kind = 'restart-agent' AND settled_at IS NOT NULL",
            )
            .fetch_one(&self.fleet.pool)
            .await?;
            if recovered > before {
                break;
            }
            ensure!(
                began.elapsed() < PATIENCE,
                "the killed agent of {machine} is not recovered\n{}",
                self.fleet.explain().await?
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.fleet.until("all are Ready", ALL_READY).await?;
        Ok(began.elapsed())
    }
}

/// Floods a shepherd from these addresses, one after the other. Returns a report of what went on meanwhile.
async fn flood_shepherd(name: &str, files: Option<u64>, rounds: &[Sources]) -> Result<String> {
    let target = Target::start(name, files).await?;
    target.heartbeats_go_on().await?;
    let quiet = target.operator_is_answered().await?;
    let mut report = format!("a call takes {} ms without a flood", quiet.as_millis());
    let mut recovered = 0;
    for &sources in rounds {
        let flood = Flood::start(&target.plans(sources)).await?;
        let heartbeats = target.heartbeats_go_on().await?;
        let call = target.operator_is_answered().await?;
        write!(
            report,
            ", {} ms beside {} connections of {} sources (two rounds of heartbeats in {} ms)",
            call.as_millis(),
            flood.opened(),
            sources.count,
            heartbeats.as_millis()
        )?;
        let recovery = target.agent_is_recovered(recovered).await?;
        recovered += 1;
        write!(report, ", an agent recovered in {} ms", recovery.as_millis())?;
        drop(flood);
    }
    let disturbed: i64 =
        sqlx::query_scalar("SELECT count(DISTINCT machine_id) FROM intent WHERE kind <> 'create'")
            .fetch_one(&target.fleet.pool)
            .await?;
    ensure!(disturbed == recovered, "{disturbed} machines were disturbed, and {recovered} agents killed");
    end(&target.fleet, target.shepherd).await?;
    Ok(report)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_one_and_of_many_sources_stop_neither_heartbeats_nor_recovery_nor_operators() -> TestResult
{
    let rounds = [1, 200].map(|count| Sources { count, first: 0 });
    let report = flood_shepherd("fire_flood", None, &rounds).await?;
    Ok(counted("flood", report)?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_stop_nothing_of_a_shepherd_that_may_open_1024_files() -> TestResult {
    let counts = Form::of_this_run().pick(vec![30], vec![1, 30]);
    let rounds: Vec<_> = counts.into_iter().map(|count| Sources { count, first: 1 }).collect();
    let report = flood_shepherd("fire_flood_few", Some(FEW_FILES), &rounds).await?;
    Ok(counted("flood of a shepherd with 1,024 files", report)?)
}
