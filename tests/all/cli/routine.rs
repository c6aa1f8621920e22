//! Routine folded in `timeline` and `plan`: what an operator reads about a quiet machine, about one that needs a person, and
//! about the fleet. A failure is never folded.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use shepherd::bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::routine::NOTHING_CHANGED;

use super::{Site, details, golden, golden_plan, healthy};
use crate::harness::aloud::TestResult;

/// A machine that was taken over, and then queried 24 times. The query with the number `$2` failed.
const HISTORY: &str = "
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, detail)
    SELECT $1, TIMESTAMPTZ '2026-03-02 00:33:00Z' + n * INTERVAL '15 min' + (edge = 'end')::INT * INTERVAL '1 s',
           CASE WHEN edge = 'start' THEN 'Started' WHEN n = $2 THEN 'Failed' ELSE 'Finished' END,
           edge, 'observe', n, 'Update',
           CASE WHEN edge = 'start' THEN NULL WHEN n = $2 THEN 'the provider does not answer'
                ELSE 'nothing changed' END
    FROM generate_series(1, 24) n, (VALUES ('start'), ('end')) e (edge)
    UNION ALL
    VALUES ($1, TIMESTAMPTZ '2026-03-02 00:30:00Z', 'Provided', NULL, NULL, NULL, NULL,
            'was New: has no role server yet'),
           ($1, TIMESTAMPTZ '2026-03-02 00:30:01Z', 'Recorded', NULL, NULL, NULL, NULL, 'sim lists it'),
           ($1, TIMESTAMPTZ '2026-03-02 00:31:00Z', 'Started', 'start', 'access', 1, 'AgentStart', NULL),
           ($1, TIMESTAMPTZ '2026-03-02 00:31:09Z', 'Finished', 'end', 'access', 1, 'AgentStart',
            'the role server was put on it'),
           ($1, TIMESTAMPTZ '2026-03-02 00:31:10Z', 'Ready', NULL, NULL, NULL, NULL,
            'was AgentStarting: healthy; recovery begins when its agent is silent for 10m')";

/// Replaces the history of a machine by [`HISTORY`].
async fn rewrite_history(site: &Site, machine: MachineId, failed: i64) -> anyhow::Result<()> {
    let pool = site.database.pool().await?;
    sqlx::query("DELETE FROM history WHERE machine_id = $1").bind(machine.0).execute(&pool).await?;
    sqlx::query(HISTORY).bind(machine.0).bind(failed).execute(&pool).await?;
    Ok(())
}

/// A machine that waits for a person, and that its provider does not find: it is queried every minute.
async fn broken_machine(site: &Site, id: &str) -> anyhow::Result<MachineId> {
    let machine = site.machine("sim", id).await?;
    sqlx::query("UPDATE machine_provided SET status = 'Missing' WHERE machine_id = $1")
        .bind(machine.0)
        .execute(&site.database.pool().await?)
        .await?;
    let reason = "it lets nobody in".to_owned();
    site.change(machine, vec![FactChange::NeedsHuman { obstacle: Obstacle::LoginRefused, reason }]).await?;
    Ok(machine)
}

#[tokio::test]
async fn timeline_of_a_quiet_machine_is_short() -> TestResult {
    let site = Site::create("cli_routine_quiet").await?;
    let machine = site.machine("sim", "sim-0001").await?;
    rewrite_history(&site, machine, 0).await?;
    golden("timeline_quiet", &site.ask_wide(&["timeline", "sim-0001"])?);
    let all = site.ask_wide(&["timeline", "sim-0001", "--all", "--limit", "1000"])?;
    assert_eq!(all.lines().count(), 1 + 48 + 5, "{all}");
    assert!(!all.contains("Routine") && !all.contains("folded"), "{all}");
    Ok(())
}

#[tokio::test]
async fn machine_that_needs_a_person_is_not_hidden_by_its_routine() -> TestResult {
    let site = Site::create("cli_routine_broken").await?;
    site.listen().await?;
    let machine = broken_machine(&site, "sim-0007").await?;
    rewrite_history(&site, machine, 12).await?;
    sqlx::query(
        "INSERT INTO history (machine_id, at, event, detail) VALUES ($1, TIMESTAMPTZ '2026-03-02 06:40:00Z',
             'NeedsHuman', 'was Ready: waits for a person: it lets nobody in')",
    )
    .bind(machine.0)
    .execute(&site.database.pool().await?)
    .await?;
    golden("timeline_needs_human", &site.ask_wide(&["timeline", "sim-0007"])?);
    golden_plan("plan_needs_human", &site.ask(&["plan", "--machine", "sim-0007"])?);
    let all = site.json(&["plan", "--machine", "sim-0007", "--all"])?;
    assert_eq!(all["rows"].as_array().map(Vec::len), Some(61), "one a minute: {all}");
    Ok(())
}

#[tokio::test]
async fn plan_of_the_fleet_has_its_routine_in_one_line() -> TestResult {
    let site = Site::create("cli_routine_fleet").await?;
    site.listen().await?;
    for id in ["sim-0001", "sim-0002"] {
        let machine = site.machine("sim", id).await?;
        site.change(machine, healthy()).await?;
    }
    site.machine("sim", "sim-0003").await?;
    broken_machine(&site, "sim-0007").await?;
    golden_plan("plan_fleet", &site.ask(&["plan"])?);
    let (all, folded) = (site.json(&["plan", "--all"])?, site.json(&["plan"])?);
    assert_eq!(lines(&folded["rows"])?, lines(&all["rows"])?);
    assert_eq!(folded["rows"].as_array().map(Vec::len), Some(2), "{folded}");
    Ok(())
}

/// How many lines there would be without the fold.
fn lines(list: &Value) -> anyhow::Result<usize> {
    let mut count = 0;
    for line in list.as_array().context("no list")? {
        count += match &line["routine"]["lines"] {
            Value::String(lines) => lines.parse::<usize>()?,
            _ => 1,
        };
    }
    Ok(count)
}

#[tokio::test]
async fn failure_among_routine_updates_splits_the_fold() -> TestResult {
    let site = Site::create("cli_routine_failure").await?;
    let machine = site.machine("sim", "sim-0001").await?;
    let worker = site.sessions("updater").await?;
    let missing = ProviderDetails { status: ProviderStatus::Missing, ..details() };
    let polled = FactChange::ProviderPolled { details: missing, unchanged: true };
    site.change(machine, vec![polled.clone()]).await?;
    for number in 1..=24 {
        site.advance(Duration::from_mins(5)).await?;
        let work = worker.claim(Process::Update, "sim").await?;
        if number == 12 {
            work.fail(Vec::new(), "the provider does not answer", None).await?;
        } else {
            work.finish(vec![polled.clone()], NOTHING_CHANGED).await?;
        }
    }
    let all = site.json(&["timeline", "sim-0001", "--all", "--limit", "1000"])?;
    let folded = site.json(&["timeline", "sim-0001"])?;
    assert_eq!(lines(&folded["events"])?, lines(&all["events"])?, "{folded:#}");
    let events = folded["events"].as_array().context("no events")?;
    let names: Vec<&str> = events.iter().filter_map(|event| event["event"].as_str()).collect();
    let newest: Vec<&str> = names.iter().take(4).copied().collect();
    let expected = ["Routine", "Failed", "Started", "Routine"];
    assert_eq!(newest, expected, "the failure is not alone: {folded:#}");
    assert!(!names[4..].contains(&"Routine"), "{folded:#}");
    let numbers = |event: &Value| (event["routine"]["workItems"].clone(), event["routine"]["lines"].clone());
    assert_eq!(numbers(&events[0]), ("12".into(), "24".into()));
    assert_eq!(numbers(&events[3]), ("11".into(), "22".into()));
    assert_eq!(events[1]["detail"], "the provider does not answer");
    assert_eq!(events[1]["fence"], events[2]["fence"]);

    let text = site.ask_wide(&["timeline", "sim-0001"])?;
    assert_eq!(text.matches("nothing new").count(), 2, "{text}");
    assert!(text.contains("Update ×12, last ") && text.contains("Update ×11, last "), "{text}");
    assert!(text.contains("46 lines of routine work are folded; --all prints them"), "{text}");
    // The limit counts lines as they are printed.
    let newest = site.json(&["timeline", "sim-0001", "--limit", "2"])?;
    assert_eq!(newest["events"], Value::from(events[..2].to_vec()));
    assert_eq!(newest["more"], true);
    Ok(worker.end().await?)
}
