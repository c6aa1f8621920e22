//! A shepherd that is frozen while it orders a machine from a provider, for longer than its session and its
//! provisioner's lease last. Another one takes over the lease and resolves the intent. Then the first one resumes. It
//! sends no more orders, no machine is created twice, and none is created for an intent that was resolved.
//!
//! There are three places to freeze it: the intent is written and no request is sent; the provider is processing the
//! request; its response has arrived and is not recorded. The test finds the second place by watching the simulator's
//! journal. The others are fail points of `src/manager/failpoint.rs`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::checker::{Records, check};
#[cfg(debug_assertions)]
use crate::fire::ALL_KNOWN_READY;
#[cfg(debug_assertions)]
use crate::fire::frozen::is_stopped;
use crate::fire::frozen::{all_over, end_both, freeze, open_calls, works_again};
use crate::fire::{BRAKES, Form, count, counted};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, Program, endpoint};

const FLAGS: [&str; 2] = ["--session_interval=3s", "--outward_call_timeout=8s"];

/// Intents of the orders that a provider received after line `since`.
fn ordered_since(journal: &[Value], since: u64) -> Vec<String> {
    let orders = journal.iter().filter(|line| line["phase"] == "start" && line["what"] == "create");
    orders
        .filter(|line| line["call"].as_u64().is_some_and(|call| call > since))
        .filter_map(|line| line["intent"].as_str().map(str::to_owned))
        .collect()
}

/// The number of the journal's last line.
fn last_line(journal: &[Value]) -> u64 {
    journal.iter().filter_map(|line| line["seq"].as_u64()).max().unwrap_or(0)
}

/// Resolved creations, by their outcome: with a machine, and without one.
async fn outcomes(fleet: &Fleet) -> Result<(i64, i64)> {
    Ok(sqlx::query_as(
        "SELECT count(*) FILTER (WHERE outcome LIKE 'machine %'),
                count(*) FILTER (WHERE outcome = 'nothing was made')
         FROM intent WHERE kind = 'create'",
    )
    .fetch_one(&fleet.pool)
    .await?)
}

/// Ends both shepherds, and checks their records.
async fn judge(fleet: &Fleet, victim: Program, survivor: Program) -> Result<()> {
    assert_eq!(count(fleet, BRAKES).await?, 0, "{}", fleet.explain().await?);
    let put_aside = count(fleet, "SELECT count(*) FROM machine_quarantine").await?;
    assert_eq!(put_aside, 0, "a machine turned up that nobody waited for");
    end_both(fleet, victim, survivor).await?;
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_while_the_provider_is_making_a_machine() -> TestResult {
    let machines: i64 = Form::of_this_run().pick(6, 40);
    let flags = ["--machine_count", &machines.to_string(), "--boot_seconds", "0.5"];
    let fleet = Fleet::start("fire_frozen_create", &flags).await?;
    // Five seconds for every call: long enough to freeze the caller meanwhile.
    fleet.strike("provider", "api-slow").await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let victim = fleet.shepherd("victim", &[first.clone(), second.clone()], &FLAGS)?;
    let caught = freeze(&fleet, &victim, &["create"]).await?;
    let frozen = victim.pid();
    let flags = ["--session_interval=30s", FLAGS[1]];
    let survivor = fleet.shepherd("survivor", &[second, first], &flags)?;
    all_over(&fleet, frozen, "frozen").await?;
    fleet.strike("provider", "heal").await?;
    // The provider creates the machine although no client waits for the response.
    let deadline = Instant::now() + PATIENCE;
    while !open_calls(&fleet.journal()?, &["create"])
        .iter()
        .all(|open| caught.iter().all(|c| c.call != open.call))
    {
        assert!(Instant::now() < deadline, "the provider never ends the create calls");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    fleet.until("the other one has them all Ready", ALL_READY).await?;
    let known = count(&fleet, "SELECT count(*) FROM machine_provided").await?;
    assert!(known == machines, "{known} of {machines} are known");
    let before = fleet.journal()?;
    let settled = outcomes(&fleet).await?;
    victim.signal(Signal::CONT)?;
    works_again(&fleet, frozen, async || Ok(())).await?;
    fleet.until("all are Ready", ALL_READY).await?;

    let late = ordered_since(&fleet.journal()?, last_line(&before));
    assert_eq!(late, Vec::<String>::new(), "ordered after everything was there");
    assert_eq!(outcomes(&fleet).await?, settled, "an outcome was rewritten");
    let adopted = adopted_by(&fleet, &caught.first().context("something was caught")?.intent).await?;
    assert!(adopted != i64::from(frozen), "the frozen one recorded what it had ordered");
    judge(&fleet, victim, survivor).await?;
    counted(
        "in the middle of an order",
        format!("{} frozen, {machines} machines made once each, none by the late one", caught.len()),
    )?;
    Ok(())
}

/// The process that last held the provisioner's lease, once the machine of an intent is recorded.
async fn adopted_by(fleet: &Fleet, intent: &str) -> Result<i64> {
    let intent: uuid::Uuid = intent.parse()?;
    Ok(sqlx::query_scalar(
        "SELECT (s.runtime_info->>'pid')::INT8 FROM intent i, named_lease l JOIN session s ON s.session_id = l.lease_session
         WHERE i.intent_id = $1 AND i.outcome LIKE 'machine %' AND l.kind = 'provisioner'",
    )
    .bind(intent)
    .fetch_one(&fleet.pool)
    .await?)
}

/// Freezes a shepherd at `place`, lets another one take over its work, and resumes it.
#[cfg(debug_assertions)]
async fn frozen_at(
    test_name: &str,
    place: &str,
    looked_after: &'static str,
    expected: (i64, i64),
) -> Result<()> {
    let flags = ["--machine_count", "8", "--boot_seconds", "0.5"];
    let fleet = Fleet::start(test_name, &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    // The survivor creates no machine itself, so the capacity for the late order is available.
    let brief = ["--session_interval=10s", "--outward_call_timeout=2s", "--provisioner_max_machines=3"];
    let victim = fleet.shepherd_dying_at(place, "victim", &[first.clone(), second.clone()], &brief)?;
    let frozen = victim.pid();
    let deadline = Instant::now() + PATIENCE;
    while !is_stopped(frozen)? {
        ensure!(Instant::now() < deadline, "{place} is never passed\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let open: Vec<uuid::Uuid> =
        sqlx::query_scalar("SELECT intent_id FROM intent WHERE kind = 'create' AND settled_at IS NULL")
            .fetch_all(&fleet.pool)
            .await?;
    ensure!(open.len() == 1, "{place} is not in the middle of an order: {open:?}");
    // It does not lose the lease again, however busy the host is.
    let brief = ["--session_interval=30s", "--outward_call_timeout=2s", "--provisioner_max_machines=2"];
    let survivor = fleet.shepherd("survivor", &[second, first], &brief)?;
    all_over(&fleet, frozen, place).await?;
    fleet.until("somebody has looked after it", looked_after).await?;
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    let before = fleet.journal()?;
    let known: BTreeSet<String> = recorded(&fleet).await?;
    victim.signal(Signal::CONT)?;
    works_again(&fleet, frozen, async || Ok(())).await?;
    // Before any wait: a machine that no shepherd here ordered never becomes Ready.
    let late = ordered_since(&fleet.journal()?, last_line(&before));
    assert_eq!(late, Vec::<String>::new(), "an order went out for an intent that others had settled");
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    assert_eq!(outcomes(&fleet).await?, expected);
    assert_eq!(recorded(&fleet).await?, known, "a machine was recorded late");
    let in_use = fleet.truth().await?.iter().filter(|machine| machine["handed_out"] == true).count();
    assert_eq!(in_use, known.len(), "the provider gave out what nobody here knows");
    judge(&fleet, victim, survivor).await?;
    counted(
        &format!("at {}", place.split('@').next().unwrap_or(place)),
        format!(
            "1 order looked after by another, 0 sent late, {in_use} machines given out and {} known",
            known.len()
        ),
    )?;
    Ok(())
}

#[cfg(debug_assertions)]
async fn recorded(fleet: &Fleet) -> Result<BTreeSet<String>> {
    let known: Vec<String> =
        sqlx::query_scalar("SELECT provider_id FROM machine_provided").fetch_all(&fleet.pool).await?;
    Ok(known.into_iter().collect())
}

#[cfg(debug_assertions)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_between_the_intent_and_the_order_sends_none_when_it_wakes() -> TestResult {
    let looked_after = "SELECT count(*) = 1 FROM intent WHERE outcome = 'nothing was made'";
    Ok(frozen_at("fire_frozen_intended", "provisioner.intended@3=freeze", looked_after, (2, 1)).await?)
}

#[cfg(debug_assertions)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_with_the_answer_in_hand_writes_nothing_down_when_it_wakes() -> TestResult {
    let looked_after = "SELECT count(*) = 0 FROM intent WHERE kind = 'create' AND settled_at IS NULL";
    Ok(frozen_at("fire_frozen_created", "provisioner.created@2=freeze", looked_after, (2, 0)).await?)
}
