//! Two queues of Node.js on the same server, as a comparison for people who know one of them.
//!
//! They are installed below the target directory when this comparison is requested, and run by
//! `benches/compare/run.mjs`. The comparison is not of equals, and the section says so.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use sqlx::postgres::PgConnectOptions;
use tokio::process::Command;

use crate::Plan;
use crate::cycles::cycles;
use crate::fleet::Fleet;
use crate::report::{Report, Target, progress};
use crate::server::{CLIENTS, Server};

const QUEUES: [&str; 2] = ["graphile-worker", "pg-boss"];
const PACKAGE: &str = include_str!("../compare/package.json");
const RUN: &str = include_str!("../compare/run.mjs");

/// Result of a run of one queue.
#[derive(Deserialize)]
struct RunResult {
    version: String,
    done: u32,
    seconds: f64,
}

/// Where the queues are installed.
fn place() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("compare")
}

/// Installs both queues.
pub(crate) async fn install() -> Result<()> {
    for program in ["node", "npm"] {
        let result = Command::new(program).arg("--version").stdin(Stdio::null()).output().await;
        if !result.is_ok_and(|answer| answer.status.success()) {
            bail!(
                "--compare runs two queues of Node.js, and `{program}` cannot be run here; install Node.js 20 or \
                 newer with its npm (`apt-get install nodejs npm`), or measure without --compare"
            );
        }
    }
    let place = place();
    progress(&format!("installing {} into {}", QUEUES.join(" and "), place.display()))?;
    fs::create_dir_all(&place)?;
    fs::write(place.join("package.json"), PACKAGE)?;
    fs::write(place.join("run.mjs"), RUN)?;
    let quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--loglevel=error"];
    let installed = Command::new("npm")
        .arg("install")
        .args(quiet)
        .current_dir(&place)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    ensure!(
        installed.status.success(),
        "npm could not install them ({}): {}",
        installed.status,
        String::from_utf8_lossy(&installed.stderr).trim()
    );
    Ok(())
}

/// One run, in its own database.
async fn run(server: &Server, queue: &str, number: u32, jobs: u32) -> Result<RunResult> {
    let database = format!("{}_{number}", queue.replace('-', "_"));
    server.create_database(&database).await?;
    let options: PgConnectOptions = server.url(&database).parse()?;
    let host = options.get_socket().map_or_else(|| options.get_host().into(), Clone::clone);
    let ran = Command::new("node")
        .arg(place().join("run.mjs"))
        .args([queue, &jobs.to_string(), &CLIENTS.to_string()])
        .env("PGHOST", host)
        .env("PGPORT", options.get_port().to_string())
        .env("PGUSER", options.get_username())
        .env("PGDATABASE", database)
        .env("NODE_ENV", "production")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    let complaint = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{queue} ended with {}: {}", ran.status, complaint.trim());
    let output = String::from_utf8_lossy(&ran.stdout);
    let reported: RunResult =
        serde_json::from_str(output.trim()).with_context(|| format!("{queue} printed {output}"))?;
    ensure!(reported.done == jobs, "{queue} did {} of {jobs} jobs", reported.done);
    Ok(reported)
}

pub(crate) async fn measure(plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    report.section(
        "Jobs of other queues, and our cycles",
        format!(
            "{} jobs that do nothing, eight at a time, in turns on one server. graphile-worker and pg-boss are queues: a \
             job is put in, one worker gets it, it is done and gone. They are run by Node.js, graphile-worker by its own \
             workers, pg-boss by asking for one job and completing it. Ours is no queue: a cycle is a claim of one \
             machine under a lease with a fence that expires with its holder, and a finish that changes what is \
             known of the machine, decides from all that is known when it is due next, and writes two lines of \
             history. So a cycle is more work than a job; and who needs a queue should use one.",
            plan.jobs
        ),
    )?;
    let fleet = Fleet::fill(server, plan.jobs * 10).await?;
    let mut floors = Vec::new();
    let mut ours = Vec::new();
    let mut theirs = QUEUES.map(|_| Vec::new());
    let mut versions = QUEUES.map(|_| String::new());
    for number in 1..=plan.repetitions {
        progress(&format!("in turns, {number} of {}", plan.repetitions))?;
        floors.push(server.floor(plan.floor).await?);
        ours.push(cycles(server, &fleet, 1, plan.jobs).await?.rate);
        for ((queue, rates), version) in QUEUES.iter().zip(&mut theirs).zip(&mut versions) {
            let reported = run(server, queue, number, plan.jobs).await?;
            rates.push(f64::from(reported.done) / reported.seconds);
            *version = reported.version;
        }
    }
    fleet.close().await?;
    report.add("plain commits of pgbench", "/s", &floors, Target::None)?;
    report.add("cycles of ours, k = 1", "/s", &ours, Target::None)?;
    for ((queue, rates), version) in QUEUES.iter().zip(&theirs).zip(&versions) {
        report.add(format!("jobs of {queue} {version}"), "/s", rates, Target::None)?;
    }
    Ok(())
}
