//! Looking for work: the empty poll, the claim of one machine, and the query that would do without a
//! schedule.

use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use shepherd::bmdb::engine::claim::{Claimed, NextDue};
use shepherd::model::process::Process;
use shepherd::model::schedule::{BUCKETS, RULES_VERSION};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;

use crate::Plan;
use crate::fleet::{Fleet, PROVIDERS};
use crate::report::{Plot, Report, Target, median, progress};

/// How both grow with the fleet.
const TIME: Plot = Plot { title: "Time to look for work", unit: "milliseconds" };
const PAGES: Plot = Plot { title: "Pages touched to look for work", unit: "pages of 8 KiB" };
const EMPTY: &str = "empty poll";
const ONE: &str = "claim of one, one provider";
const WIDE: &str = "claim of one, ten providers";
const ANTI_EMPTY: &str = "anti-join, nothing due";
const ANTI_ONE: &str = "anti-join, claim of one";
/// Anti-joins of one repetition; on the largest fleets, where each takes seconds, one.
const ANTI_JOINS: u32 = 5;
/// From so many machines on.
const LARGE: u32 = 1_000_000;

/// The query that `AgentStart` would need without a schedule, computed from the facts: the machines of these providers
/// that have no agent, no finished installation, no hold, no wait and no work in progress, oldest first.
const WITHOUT_A_SCHEDULE: &str = "
        SELECT m.machine_id FROM machine m JOIN machine_provided p USING (machine_id)
        WHERE p.provider = ANY ($1) AND p.address IS NOT NULL
          AND p.status NOT IN ('Missing', 'Provisioning', 'ProvisioningFailedPermanent')
          AND NOT EXISTS (SELECT 1 FROM machine_agent_started x WHERE x.machine_id = m.machine_id)
          AND NOT EXISTS (SELECT 1 FROM machine_os_installation_request x
                          JOIN machine_os_installation_report r USING (machine_id, generation)
                          WHERE x.machine_id = m.machine_id AND r.succeeded)
          AND NOT EXISTS (SELECT 1 FROM machine_hold x WHERE x.machine_id = m.machine_id AND x.scope = 'Everything'
                          AND (x.until IS NULL OR x.until > now()))
          AND NOT EXISTS (SELECT 1 FROM machine_quarantine x WHERE x.machine_id = m.machine_id)
          AND NOT EXISTS (SELECT 1 FROM machine_needs_human x WHERE x.machine_id = m.machine_id)
          AND NOT EXISTS (SELECT 1 FROM machine_recovery x WHERE x.machine_id = m.machine_id)
          AND NOT EXISTS (SELECT 1 FROM machine_retirement x WHERE x.machine_id = m.machine_id)
          AND NOT EXISTS (SELECT 1 FROM work_backoff x WHERE x.machine_id = m.machine_id
                          AND x.process = 'AgentStart' AND x.until > now())
          AND NOT EXISTS (SELECT 1 FROM work_postponed x WHERE x.machine_id = m.machine_id
                          AND x.process = 'AgentStart' AND x.until > now())
          AND NOT EXISTS (SELECT 1 FROM work x WHERE x.machine_id = m.machine_id AND x.lane = 'access')
        ORDER BY p.provided_at";

/// Takes the first of them, as a claim does.
const ANTI_JOIN: &str = "
    WITH next AS ($WITHOUT_A_SCHEDULE LIMIT 1 FOR UPDATE OF m SKIP LOCKED),
    history_row AS (INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id)
             SELECT machine_id, clock_timestamp(), 'Started', 'start', 'access', $2, 'AgentStart', $3 FROM next)
    INSERT INTO work (machine_id, lane, session_id, process, fence, started_at)
    SELECT machine_id, 'access', $3, 'AgentStart', $2, clock_timestamp() FROM next
    RETURNING machine_id";

/// What one fleet costs, a value for each repetition.
#[derive(Default)]
struct Measured {
    empty: Vec<f64>,
    one: Vec<f64>,
    wide: Vec<f64>,
    anti_empty: Vec<f64>,
    anti_one: Vec<f64>,
    poll_buffers: f64,
    claim_buffers: f64,
    /// Whether the anti-join was found to mean what a claim means.
    same: bool,
}

/// Measures every fleet in turns with the others, each with the same backlog.
pub(crate) async fn measure(plan: &Plan, fleets: &[Fleet], report: &mut Report) -> Result<()> {
    let backlog = fleets.iter().map(Fleet::of_first_provider).min().context("a fleet")?;
    let mut measured: Vec<Measured> = fleets.iter().map(|_| Measured::default()).collect();
    for repetition in 1..=plan.repetitions {
        progress(&format!("looking for work, {repetition} of {}", plan.repetitions))?;
        for (fleet, measured) in fleets.iter().zip(&mut measured) {
            repeat(plan, fleet, backlog, measured).await?;
        }
    }
    for (fleet, measured) in fleets.iter().zip(&measured) {
        report_measurements(plan, fleet, measured, report)?;
    }
    let (Some(small), Some(large)) = (measured.first(), measured.last()) else { return Ok(()) };
    report.section(
        "The largest fleet against the smallest",
        "What a claim of one costs on the one and on the other, by each repetition of the sections above.",
    )?;
    let sizes: Vec<String> = plan.fleets.iter().map(|machines| thousands(*machines)).collect();
    let (Some(least), Some(most)) = (sizes.first(), sizes.last()) else { return Ok(()) };
    let what = format!("claim of one at {most} machines / at {least}");
    report.add(what, "×", &ratios(&large.one, &small.one), Target::AtMost(1.5))?;
    let before = measured.len().checked_sub(2).and_then(|place| measured.get(place).zip(sizes.get(place)));
    let Some((middle, name)) = before else { return Ok(()) };
    let what = format!("pages that a claim of one touches at {most} machines / at {name}");
    report.add(what, "×", &[large.claim_buffers / middle.claim_buffers], Target::AtMost(1.0))?;
    report.record_attempted_remedy(
        "An index of ten times as many entries can be a level higher, and a claim looks into one index once for each \
         class (provider, priority, bucket). The other pages, those of the rows that are taken, are as many.",
    )
}

async fn repeat(plan: &Plan, fleet: &Fleet, backlog: u32, measured: &mut Measured) -> Result<()> {
    fleet.vacuum().await?;
    measured.empty.push(empty_poll(plan, fleet).await?);
    measured.anti_empty.push(anti_join(fleet, false).await?);
    fleet.make_due_for_agents(backlog).await?;
    fleet.vacuum().await?;
    let (one, claimed) = claims(fleet, backlog, 1).await?;
    measured.one.push(one);
    if !measured.same {
        compare(fleet, backlog, &claimed).await?;
        measured.same = true;
    }
    fleet.vacuum().await?;
    measured.wide.push(claims(fleet, backlog, PROVIDERS).await?.0);
    fleet.vacuum().await?;
    measured.anti_one.push(anti_join(fleet, true).await?);
    (measured.poll_buffers, measured.claim_buffers) = buffers(fleet).await?;
    fleet.make_well().await
}

fn report_measurements(plan: &Plan, fleet: &Fleet, measured: &Measured, report: &mut Report) -> Result<()> {
    report.section(
        format!("Looking for work among {} machines", thousands(fleet.machines)),
        "One client on a server with nothing else to do; for each repetition the median of many statements. The poll asks for \
         all ten providers and all priorities at once, as a loop does before it claims (there are three \
         priorities; how many there are does not change the statement). The claims take one machine \
         after the other, oldest first, until the backlog is empty. The anti-join finds out the same from \
         the facts, in one statement that also records the work: before it is timed, it is asserted that both find the same \
         machines in the same order.",
    )?;
    let among = format!("{} machines", thousands(fleet.machines));
    let is = |wanted: bool, target: Target| if wanted { target } else { Target::None };
    let largest = Some(&fleet.machines) == plan.fleets.last();
    for (name, samples, target) in [
        (EMPTY, &measured.empty, is(largest, Target::AtMost(0.3))),
        (ONE, &measured.one, Target::None),
        (WIDE, &measured.wide, Target::None),
        (ANTI_EMPTY, &measured.anti_empty, Target::None),
        (ANTI_ONE, &measured.anti_one, Target::None),
    ] {
        report.add(format!("{name}, {among}"), "ms", samples, target)?;
        report.point(&TIME, name, f64::from(fleet.machines), median(samples));
    }
    let few = is(largest, Target::AtMost(10.0));
    report.add(format!("pages that an empty poll touches, {among}"), "", &[measured.poll_buffers], few)?;
    let what = format!("pages that a claim of one touches, one provider, {among}");
    report.add(what, "", &[measured.claim_buffers], Target::None)?;
    report.point(&PAGES, EMPTY, f64::from(fleet.machines), measured.poll_buffers);
    report.point(&PAGES, ONE, f64::from(fleet.machines), measured.claim_buffers);
    let compared = fleet.machines == plan.main_fleet;
    for (name, slow, fast) in [
        ("anti-join against empty poll, nothing due", &measured.anti_empty, &measured.empty),
        ("anti-join against claim of one", &measured.anti_one, &measured.one),
    ] {
        let target = is(compared, Target::AtLeast(40.0));
        report.add(format!("{name}, {among}"), "×", &ratios(slow, fast), target)?;
    }
    Ok(())
}

/// That the anti-join finds the machines that were claimed, in the same order.
async fn compare(fleet: &Fleet, backlog: u32, claimed: &[Uuid]) -> Result<()> {
    let mut connection = fleet.patient().await?;
    let found: Vec<Uuid> = sqlx::query_scalar(AssertSqlSafe(format!(
        "{WITHOUT_A_SCHEDULE} LIMIT $2 FOR UPDATE OF m SKIP LOCKED"
    )))
    .bind(Fleet::providers(PROVIDERS))
    .bind(i64::from(backlog) + 1)
    .fetch_all(&mut *connection)
    .await?;
    connection.close().await?;
    ensure!(found == claimed, "the anti-join and the claims do not mean the same: {found:?} and {claimed:?}");
    Ok(())
}

fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter().zip(under).map(|(over, under)| over / under).collect()
}

/// A number as people write it.
fn thousands(number: u32) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

async fn empty_poll(plan: &Plan, fleet: &Fleet) -> Result<f64> {
    let claimer = fleet.claimer(Process::Update, PROVIDERS);
    let mut took = Vec::new();
    for _ in 0..plan.polls {
        let began = Instant::now();
        let next = claimer.probe().await?;
        took.push(milliseconds(began));
        ensure!(matches!(next, NextDue::In(_)), "a machine is due: {next:?}");
    }
    Ok(median(&took))
}

/// How long a claim of one takes, and which machines were claimed, in order.
async fn claims(fleet: &Fleet, backlog: u32, providers: usize) -> Result<(f64, Vec<Uuid>)> {
    let sessions = fleet.sessions(1).await?;
    let mut claimer = fleet.claimer(Process::AgentStart, providers);
    let (mut took, mut claimed) = (Vec::new(), Vec::new());
    for _ in 0..backlog {
        let began = Instant::now();
        let answer = claimer.claim(&sessions).await?;
        took.push(milliseconds(began));
        let Claimed::Work(work) = answer else { bail!("nothing was claimed: {answer:?}") };
        claimed.extend(work);
    }
    let machines = claimed.iter().map(|work| work.machine().0).collect();
    for work in claimed {
        work.cancel("measured").await?;
    }
    fleet.end(&sessions).await?;
    Ok((median(&took), machines))
}

async fn anti_join(fleet: &Fleet, finds: bool) -> Result<f64> {
    let mut connection = fleet.patient().await?;
    let providers = Fleet::providers(PROVIDERS);
    let statement = ANTI_JOIN.replace("$WITHOUT_A_SCHEDULE", WITHOUT_A_SCHEDULE);
    let mut took = Vec::new();
    for turn in 0..if fleet.machines < LARGE { ANTI_JOINS } else { 1 } {
        let mut transaction = connection.begin().await?;
        let began = Instant::now();
        let found: Option<Uuid> = sqlx::query_scalar(AssertSqlSafe(statement.as_str()))
            .bind(&providers)
            // Above every fence that is in history.
            .bind(i64::from(turn) + (1 << 40))
            .bind(Uuid::nil())
            .fetch_optional(&mut *transaction)
            .await?;
        took.push(milliseconds(began));
        ensure!(found.is_some() == finds, "the anti-join found {found:?}");
        transaction.rollback().await?;
    }
    connection.close().await?;
    Ok(median(&took))
}

/// Pages that an empty poll and a claim touch.
async fn buffers(fleet: &Fleet) -> Result<(f64, f64)> {
    let sessions = fleet.sessions(1).await?;
    let session = sessions.first().context("a session")?.id().0;
    let mut connection = fleet.bmdb.pool().acquire().await?;
    let probe =
        concat!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ", include_str!("../../sql/claim/probe.sql"));
    let (mut poll, mut claim) = (0.0, 0.0);
    // The second run counts: the first one fills the connection's caches, by pages of the catalogue.
    for _ in 0..2 {
        let plan: Value = sqlx::query_scalar(probe)
            .bind("Update")
            .bind(Fleet::providers(PROVIDERS))
            .bind(i64::from(RULES_VERSION))
            .fetch_one(&mut *connection)
            .await?;
        poll = pages(&plan);
        claim = explain_claim(&mut connection, session).await?;
    }
    drop(connection);
    fleet.end(&sessions).await?;
    Ok((poll, claim))
}

async fn explain_claim(connection: &mut PgConnection, session: Uuid) -> Result<f64> {
    let claim =
        concat!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ", include_str!("../../sql/claim/claim.sql"));
    let classes: Vec<(i64, i64)> =
        (0..3).flat_map(|priority| (0..i64::from(BUCKETS)).map(move |bucket| (priority, bucket))).collect();
    let mut transaction = connection.begin().await?;
    let plan: Value = sqlx::query_scalar(claim)
        .bind(vec![session])
        .bind("AgentStart")
        .bind(vec!["rack-0"; classes.len()])
        .bind(classes.iter().map(|(priority, _)| *priority).collect::<Vec<_>>())
        .bind(classes.iter().map(|(_, bucket)| *bucket).collect::<Vec<_>>())
        .bind(vec![chrono::DateTime::UNIX_EPOCH; classes.len()])
        .bind(vec![1.0_f64; classes.len()])
        .bind(vec![1.0_f64; classes.len()])
        .bind(i64::from(RULES_VERSION))
        .bind(2_i64)
        .fetch_one(&mut *transaction)
        .await?;
    transaction.rollback().await?;
    Ok(pages(&plan))
}

fn pages(plan: &Value) -> f64 {
    let count = |name: &str| plan[0]["Plan"][name].as_f64().unwrap_or(0.0);
    count("Shared Hit Blocks") + count("Shared Read Blocks")
}
