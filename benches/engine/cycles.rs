//! Work itself: claimed, finished with a fact, and rescheduled, as a loop does it.

use std::time::Instant;

use anyhow::{Result, ensure};
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd::bmdb::engine::session::Session;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use tokio::task::JoinSet;

use crate::Plan;
use crate::fleet::Fleet;
use crate::report::{Report, Target, progress};
use crate::server::{CLIENTS, Server, own_processor_seconds};

/// What the cost of a cycle consists of, and what was tried to reduce it.
const MEASURED_ALTERNATIVES: &str = "A cycle was 13 statements and is 7 (claim; then begin, lock session and machine, change the fact, \
    read all facts, write schedule, lease, work and history in one, commit). The facts of one machine are read by a \
    statement of its own, which the server plans once: as part of a page it was planned for every finish, which took \
    some six times as long as running it. Waits and backoffs are cleared only where reading found some. A connection that \
    is given back is tested once, not twice. Not joined further: reading must be a statement of its own (what waited for a \
    lock sees its row new and every other table old), and the client library sends begin and commit by themselves. \
    Finishing several machines in one transaction would bring larger k nearer; it would let one machine wait for \
    another, and was not done.";

/// Result of a run of cycles.
pub(crate) struct Run {
    /// Finished cycles in each second.
    pub(crate) rate: f64,
    /// SQL statements in each cycle.
    statements: f64,
    /// Processor time of each, in milliseconds: ours, and the server's.
    ours: f64,
    theirs: f64,
}

/// Machines in one claim of a client, and the promised share of the rate of plain commits.
const CLAIM_TARGETS: [(usize, Target); 3] =
    [(1, Target::AtLeast(0.18)), (10, Target::AtLeast(0.6)), (100, Target::None)];

pub(crate) async fn measure(plan: &Plan, server: &Server, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "Cycles of work against plain commits",
        "Eight clients. A cycle is a claim of one machine and its finish: its provider answered about it, so \
         its facts change and it is scheduled again. With k workers a client claims for k at once and finishes \
         one after the other. Plain commits are pgbench's, of two inserts, by as many clients, in turns with \
         the cycles. Clients and server share this host's processors.",
    )?;
    let (floors, runs) = in_turns(plan, server, fleet).await?;
    report.add("plain commits", "/s", &floors, Target::None)?;
    for ((k, target), runs) in CLAIM_TARGETS.iter().zip(&runs) {
        let of = |value: fn(&Run) -> f64| runs.iter().map(value).collect::<Vec<f64>>();
        let rates = of(|run| run.rate);
        report.add(format!("cycles, k = {k}"), "/s", &rates, Target::None)?;
        let ratios: Vec<f64> = rates.iter().zip(&floors).map(|(rate, floor)| rate / floor).collect();
        report.add(format!("cycles, k = {k}, against plain commits"), "×", &ratios, *target)?;
        report.record_attempted_remedy(MEASURED_ALTERNATIVES)?;
        report.add(format!("statements of a cycle, k = {k}"), "", &of(|run| run.statements), Target::None)?;
        let name = format!("processor time of a cycle, k = {k}, ours");
        report.add(name, "ms", &of(|run| run.ours), Target::None)?;
        let name = format!("processor time of a cycle, k = {k}, PostgreSQL's");
        report.add(name, "ms", &of(|run| run.theirs), Target::None)?;
    }
    Ok(())
}

/// The same on a server with commits that wait for its disk, as in production.
pub(crate) async fn measure_durable(plan: &Plan, report: &mut Report) -> Result<()> {
    report.section(
        "The same on a server that waits for its disk",
        "As above, on a smaller fleet and a server with fsync, full_page_writes and synchronous_commit on, as people \
         run it. Both sides wait for the same disk, whose commits all waiting clients share. What is promised is \
         held against the server above, for which it is harder.",
    )?;
    let server = Server::start_durable().await?;
    let measured = durable(plan, &server, report).await;
    server.stop().await?;
    measured
}

async fn durable(plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    let fleet = Fleet::fill(server, plan.main_fleet / 2).await?;
    let measured = in_turns(plan, server, &fleet).await;
    fleet.close().await?;
    let (floors, runs) = measured?;
    report.add("plain commits, on disk", "/s", &floors, Target::None)?;
    for ((k, _), runs) in CLAIM_TARGETS.iter().zip(&runs) {
        let rates: Vec<f64> = runs.iter().map(|run| run.rate).collect();
        report.add(format!("cycles, k = {k}, on disk"), "/s", &rates, Target::None)?;
        let ratios: Vec<f64> = rates.iter().zip(&floors).map(|(rate, floor)| rate / floor).collect();
        let name = format!("cycles, k = {k}, against plain commits, on disk");
        report.add(name, "×", &ratios, Target::None)?;
    }
    Ok(())
}

/// Measures plain commits a second and the cycles of each k in turns, as often as planned.
async fn in_turns(plan: &Plan, server: &Server, fleet: &Fleet) -> Result<(Vec<f64>, Vec<Vec<Run>>)> {
    let mut floors = Vec::new();
    let mut runs: Vec<Vec<Run>> = CLAIM_TARGETS.iter().map(|_| Vec::new()).collect();
    for repetition in 1..=plan.repetitions {
        progress(&format!("cycles, {repetition} of {}", plan.repetitions))?;
        floors.push(server.floor(plan.floor).await?);
        for ((k, _), runs) in CLAIM_TARGETS.iter().zip(&mut runs) {
            // More machines where a cycle is shorter, so that the runs take similar time.
            let machines = if *k == 1 { plan.cycles } else { plan.cycles * 2 };
            runs.push(cycles(server, fleet, *k, machines.min(fleet.of_first_provider())).await?);
        }
    }
    Ok((floors, runs))
}

/// Claims and finishes this many machines once each.
pub(crate) async fn cycles(server: &Server, fleet: &Fleet, k: usize, machines: u32) -> Result<Run> {
    fleet.make_due_for_update(machines).await?;
    let mut sessions = Vec::new();
    for _ in 0..CLIENTS {
        sessions.push(fleet.sessions(k).await?);
    }
    let before = fleet.statements().await?;
    let (ours, theirs) = (own_processor_seconds()?, server.processor_seconds()?);
    let began = Instant::now();
    let mut clients = JoinSet::new();
    for sessions in sessions.clone() {
        clients.spawn(client(fleet.claimer(Process::Update, 1), sessions));
    }
    let mut done = 0;
    while let Some(finished) = clients.join_next().await {
        done += finished??;
    }
    let took = began.elapsed().as_secs_f64();
    let (ours, theirs) = (own_processor_seconds()? - ours, server.processor_seconds()? - theirs);
    let sent = fleet.statements().await? - before;
    for sessions in sessions {
        fleet.end(&sessions).await?;
    }
    ensure!(done == machines, "{done} of {machines} machines were worked on");
    let each = |seconds: f64| seconds * 1000.0 / f64::from(done);
    let rate = f64::from(done) / took;
    Ok(Run { rate, statements: sent / f64::from(done), ours: each(ours), theirs: each(theirs) })
}

async fn client(mut claimer: Claimer, sessions: Vec<Session>) -> Result<u32> {
    let mut done = 0;
    loop {
        match claimer.claim(&sessions).await? {
            Claimed::Work(work) => {
                for work in work {
                    work.finish(vec![unchanged_poll()], "measured").await?;
                    done += 1;
                }
            }
            // Other clients hold the remaining machines, and finish them.
            Claimed::Contended => tokio::task::yield_now().await,
            Claimed::FullScanDeferred(rests) => tokio::time::sleep(rests).await,
            Claimed::Empty => return Ok(done),
        }
    }
}

/// The result of an update that found no change.
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
