//! Budgets and brakes: operators set and read them through the API, the database has them, and a running loop respects
//! them.

use anyhow::{Context as _, Result};
use serde_json::Value;
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::orders::budget::{BudgetsAndBrakes, read_budgets_and_brakes};
use shepherd::bmdb::orders::order::{Actor, Order, request_digest};
use shepherd::model::budget::{BudgetChange, BudgetKind};
use shepherd::model::policy::DisruptionKind;
use shepherd::model::time::Span;

use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;
use crate::recovery::ready;

fn order(key: Option<&str>, dry_run: bool) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Budgets/Set".to_owned(),
        target: "the budget reboot".to_owned(),
        reason: "the feed is repaired".to_owned(),
        idempotency_key: key.map(str::to_owned),
        dry_run,
        expected_version: None,
        request_digest: request_digest(b"set"),
    }
}

async fn read_budgets(kit: &Kit) -> Result<BudgetsAndBrakes> {
    kit.bmdb.read_policy().await?;
    let (_, policy) = kit.bmdb.policy();
    Ok(kit
        .bmdb
        .transact_read_only_with(policy, |tx, policy| Box::pin(read_budgets_and_brakes(tx, policy)))
        .await?)
}

const REBOOT: BudgetKind = BudgetKind::Disrupt(DisruptionKind::Reboot);

#[tokio::test]
async fn budget_is_set_once_tried_in_vain_written_down_and_counted() -> TestResult {
    let kit = Kit::new("budgets_set").await?;
    let change = |most, window| BudgetChange { max_count: most, window };
    let version = kit.bmdb.read_policy().await?;
    let dry = kit.bmdb.set_budget(order(None, true), REBOOT, change(Some(1), None)).await?;
    assert!(
        dry.outcome.is_changed() && dry.outcome.message.starts_with("is 1 in 10m (was 20 in 10m)"),
        "{dry:?}"
    );
    assert_eq!(kit.bmdb.read_policy().await?, version, "a dry run changed the policy");

    let wanted = change(Some(2), Some(Span::hours(1)));
    let given = kit.bmdb.set_budget(order(Some("k"), false), REBOOT, wanted).await?;
    let again = kit.bmdb.set_budget(order(Some("k"), false), REBOOT, wanted).await?;
    assert!(again.replayed && again.audit_id == given.audit_id, "{again:?}");
    assert_eq!(kit.bmdb.read_policy().await?, version + 1, "it was set once");
    let same = kit.bmdb.set_budget(order(None, false), REBOOT, wanted).await?;
    assert_eq!((same.outcome.is_changed(), kit.bmdb.read_policy().await?), (false, version + 1));
    let refused = kit.bmdb.set_budget(order(None, false), REBOOT, change(None, Some(Span::default()))).await;
    assert!(matches!(refused, Err(BmdbError::OrderRejected { reason: "NO_SUCH_BUDGET", .. })), "{refused:?}");
    let (before, after): (Value, Value) =
        sqlx::query_as("SELECT before, after FROM audit WHERE idempotency_key = 'k'")
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!((&before["most"], &after["most"], &after["window"]), (&20.into(), &2.into(), &"1h".into()));
    let by: String = sqlx::query_scalar("SELECT written_by FROM policy").fetch_one(&kit.pool).await?;
    assert_eq!(by, "kim");
    let outcomes: Vec<String> =
        sqlx::query_scalar("SELECT outcome FROM audit ORDER BY at").fetch_all(&kit.pool).await?;
    assert_eq!(outcomes, ["changed", "changed", "unchanged", "refused"]);

    // Three steps began, and two are permitted: the next one is permitted when the second newest leaves the window.
    sqlx::query(
        "INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at)
         SELECT gen_random_uuid(), 'reboot', 'rack', gen_random_uuid(), 1, '',
                clock_timestamp() - n * INTERVAL '10 minutes' FROM generate_series(1, 3) n",
    )
    .execute(&kit.pool)
    .await?;
    sqlx::query("INSERT INTO brake VALUES ('recovery', 'rack', 'brake: 6 of 9', clock_timestamp(), clock_timestamp())")
        .execute(&kit.pool)
        .await?;
    let found = read_budgets(&kit).await?;
    let reboot = found.budgets.iter().find(|line| line.budget == "reboot").context("the budget")?;
    assert_eq!((reboot.max_count, reboot.used, reboot.available), (Some(2), 3, false));
    let free = (reboot.available_at.context("when")? - found.at).num_minutes();
    assert!((39..=40).contains(&free), "in {free} minutes");
    let release = found.budgets.iter().find(|line| line.budget == "release").context("the budget")?;
    assert!(release.available && release.available_at.is_none() && release.used == 0, "{release:?}");
    let holding: Vec<&str> =
        found.brakes.iter().filter(|brake| brake.engaged).map(|brake| brake.scope.as_str()).collect();
    assert_eq!((found.brakes[0].scope.as_str(), holding), ("*", vec!["rack"]));
    kit.database.advance(std::time::Duration::from_mins(41)).await?;
    let found = read_budgets(&kit).await?;
    assert!(found.budgets.iter().all(|line| line.available), "{:?}", found.budgets);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_loop_heeds_a_budget_as_soon_as_it_is_set() -> TestResult {
    let (fleet, _shepherd) = ready("budget_heeded", 2, &[]).await?;
    let bmdb = fleet.database.bmdb().await?;
    let set = async |most| {
        let change = BudgetChange { max_count: Some(most), window: None };
        let kind = BudgetKind::Disrupt(DisruptionKind::RestartAgent);
        bmdb.set_budget(order(None, false), kind, change).await.map(|carried| carried.outcome.message)
    };
    let text = set(0).await?;
    assert!(text.starts_with("is 0 in 10m (was 100 in 10m)"), "{text}");
    fleet.strike("sim-0001", "kill").await?;
    fleet
        .until(
            "it is put off, because none may begin",
            "SELECT count(*) = 1 FROM machine_due WHERE reason = 'the budget to restart the agent over SSH allows none'",
        )
        .await?;
    assert!(fleet.holds("SELECT count(*) = 0 FROM intent WHERE kind = 'restart-agent'").await?);
    set(1).await?;
    fleet.until("it is helped", "SELECT count(*) = 1 FROM intent WHERE kind = 'restart-agent'").await?;
    Ok(())
}
