//! Priorities: machines that operators put before or behind the others are claimed in that order, are reported with
//! their priority, and return to the normal order when it expires.

use std::time::Duration;

use anyhow::{Context as _, Result};
use model::access::AccessScope;
use model::ids::MachineId;
use model::order_limits::MAX_EXAMINED_MACHINES;
use model::plan::plan_fleet;
use model::priority::PriorityLevel;
use model::process::Process;
use model::rpc_name::SUBMIT_BULK_ORDER_RPC;
use model::time::Span;
use model::why::explain_machine;
use serde_json::Value;
use shepherd_bmdb::fleet::listing::{Filter, list_machines};
use shepherd_bmdb::orders::bulk_orders::MachineSelection;
use shepherd_bmdb::orders::machine_order::MachineOrder;
use shepherd_bmdb::orders::order::{Actor, Expiry, Order, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd};

fn order(key: Option<&str>, dry_run: bool) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Machines/Prioritize".to_owned(),
        target: "a machine".to_owned(),
        reason: "a customer waits".to_owned(),
        idempotency_key: key.map(str::to_owned),
        dry_run,
        expected_version: None,
        request_digest: request_digest(key.unwrap_or_default().as_bytes()),
    }
}

async fn prioritize(
    kit: &Kit,
    machine: MachineId,
    level: PriorityLevel,
    until: Option<Expiry>,
) -> Result<String> {
    let each = MachineOrder::Prioritize { level, until };
    Ok(kit.bmdb.execute_machine_order(order(None, false), machine, each, "kim".into()).await?.outcome.message)
}

/// The class of each machine's access lane, as it is stored.
async fn class(kit: &Kit, machine: MachineId) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT priority::INT8 FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
        .bind(machine.0)
        .fetch_one(&kit.pool)
        .await?)
}

/// The priority that a list shows for a machine.
async fn listed(kit: &Kit, machine: MachineId) -> Result<Option<String>> {
    let page = kit
        .bmdb
        .transact_read_only(|tx| {
            Box::pin(async move {
                list_machines(tx, &Filter::default(), &AccessScope::Fleet, None, 1000, usize::MAX).await
            })
        })
        .await?;
    let found = page.machines.into_iter().find(|one| one.summary.name.machine == machine.0);
    Ok(found.context("it is listed")?.summary.priority)
}

#[tokio::test]
async fn urgent_machine_is_claimed_before_others_that_wait_for_longer() -> TestResult {
    let kit = Kit::new("priority_claimed").await?;
    let others = kit.provided(20, "rack").await?;
    let last = kit.provided(1, "rack").await?[0];
    let text = prioritize(&kit, last, PriorityLevel::Urgent, None).await?;
    assert!(text.starts_with("comes before the others (urgent) until somebody says otherwise"), "{text}");
    prioritize(&kit, others[0], PriorityLevel::Low, None).await?;
    assert_eq!(
        (class(&kit, last).await?, class(&kit, others[0]).await?, class(&kit, others[1]).await?),
        (0, 2, 1)
    );
    let forecast = plan_fleet(&kit.bmdb.read_fleet_view().await?, Span::minutes(1));
    let agents: Vec<_> = forecast.rows.iter().filter(|row| row.process == "AgentStart").collect();
    assert_eq!(agents.len(), 21);
    assert_eq!(agents[0].action, "put the role server on it (urgent, by kim)");
    assert_eq!(agents.last().context("the last")?.name.machine, others[0].0);
    let shepherd = Shepherd::start(&kit, "claiming", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    assert_eq!(work.machine(), last, "another came first");
    drop(work);
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn priority_is_ordered_listed_replaced_and_over_when_its_time_is() -> TestResult {
    let kit = Kit::new("priority_orders").await?;
    let row = kit.provided(3, "rack").await?;
    let hour = Some(Expiry::After(Span::hours(1)));
    let urgent = || MachineOrder::Prioritize { level: PriorityLevel::Urgent, until: hour };
    let dry = kit.bmdb.execute_machine_order(order(None, true), row[0], urgent(), "kim".into()).await?;
    assert!(dry.outcome.is_changed() && class(&kit, row[0]).await? == 1, "{dry:?}");

    let given =
        kit.bmdb.execute_machine_order(order(Some("k"), false), row[0], urgent(), "kim".into()).await?;
    let again =
        kit.bmdb.execute_machine_order(order(Some("k"), false), row[0], urgent(), "kim".into()).await?;
    assert!(again.replayed && again.audit_id == given.audit_id, "{again:?}");
    assert_eq!((class(&kit, row[0]).await?, listed(&kit, row[0]).await?), (0, Some("urgent".to_owned())));
    let after: Value = sqlx::query_scalar("SELECT after FROM audit WHERE idempotency_key = 'k'")
        .fetch_one(&kit.pool)
        .await?;
    assert_eq!((&after["priority"]["level"], &after["priority"]["by"]), (&"urgent".into(), &"kim".into()));
    let why = explain_machine(&kit.bmdb.machine_view(row[0]).await?);
    let note = why.notes.iter().find(|note| note.contains("urgent")).context("a note")?;
    assert!(note.contains("by kim") && note.contains("a customer waits"), "{note}");

    // Once it expires it no longer counts, and the stored value that lags is not a mismatch.
    kit.database.advance(Duration::from_mins(61)).await?;
    assert_eq!(listed(&kit, row[0]).await?, None);
    let why = explain_machine(&kit.bmdb.machine_view(row[0]).await?);
    assert!(
        !why.notes.iter().any(|note| note.contains("urgent") || note.contains("priority")),
        "{:?}",
        why.notes
    );
    assert_eq!(class(&kit, row[0]).await?, 0, "nobody has looked yet");
    let swept = kit.bmdb.sweep_page(MachineId(uuid::Uuid::nil()), 100).await?;
    assert_eq!((swept.mismatches, class(&kit, row[0]).await?), (0, 1), "{swept:?}");

    let text = prioritize(&kit, row[1], PriorityLevel::Low, None).await?;
    assert!(text.starts_with("comes behind the others (low) until somebody says otherwise"), "{text}");
    let text = prioritize(&kit, row[1], PriorityLevel::Urgent, None).await?;
    assert!(text.contains("in place of low by kim"), "{text}");
    let text = prioritize(&kit, row[1], PriorityLevel::Normal, None).await?;
    assert_eq!((text.as_str(), class(&kit, row[1]).await?), ("has the engine's own priority from now on", 1));
    let text = prioritize(&kit, row[1], PriorityLevel::Normal, None).await?;
    assert!(text.ends_with("nothing was changed"), "{text}");
    let over = Some(Expiry::At("2020-01-01T00:00:00Z".parse()?));
    let refused = prioritize(&kit, row[1], PriorityLevel::Low, over).await;
    let text = refused.err().context("it would be over already")?.to_string();
    assert!(text.contains("is over; nothing was changed"), "{text}");

    let selection = MachineSelection {
        filter: Filter { selector: "provider=rack".parse()?, omit_retired: false },
        named: None,
        scope: AccessScope::Fleet,
        expected: Some(3),
        beyond_limits: false,
        is_admin: false,
        max_examined: MAX_EXAMINED_MACHINES,
    };
    let many = Order { rpc: SUBMIT_BULK_ORDER_RPC.to_owned(), ..order(Some("many"), false) };
    let given = kit.bmdb.execute_bulk_order(many, selection, urgent(), "kim".into()).await?;
    assert!(given.outcomes.iter().all(|one| one.outcome.is_changed() && !one.rejected), "{given:?}");
    assert_eq!(
        kit.count("SELECT count(*) FROM machine_due WHERE lane = 'access' AND priority = 0").await?,
        3
    );
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Prioritized'").await?, 7);
    Ok(())
}
