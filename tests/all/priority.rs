//! Machines that people put before or behind the others: claimed so, told so, and back among the others when their
//! time is over.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;
use shepherd::bmdb::action::Until;
use shepherd::bmdb::audit::{Actor, Order, request_digest};
use shepherd::bmdb::each::Each;
use shepherd::bmdb::listing::{Filter, machines};
use shepherd::bmdb::selection::{RPC, Selection};
use shepherd::model::access::Scope;
use shepherd::model::ids::MachineId;
use shepherd::model::plan::plan;
use shepherd::model::priority::Level;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use shepherd::model::why::explain;

use crate::bmdb_kit::{Kit, LONG, Shepherd};
use crate::harness::aloud::TestResult;

fn order(key: Option<&str>, dry_run: bool) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Machines/Prioritize".to_owned(),
        target: "a machine".to_owned(),
        reason: "a customer waits".to_owned(),
        idempotency_key: key.map(str::to_owned),
        dry_run,
        expected_version: None,
        request: request_digest(key.unwrap_or_default().as_bytes()),
    }
}

async fn prioritize(kit: &Kit, machine: MachineId, level: Level, until: Option<Until>) -> Result<String> {
    let each = Each::Prioritize { level, until };
    Ok(kit.bmdb.order_each(order(None, false), machine, each, "kim".into()).await?.done.said)
}

/// The class of each machine's access lane, as it is stored.
async fn class(kit: &Kit, machine: MachineId) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT priority::INT8 FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
        .bind(machine.0)
        .fetch_one(&kit.pool)
        .await?)
}

/// What lists say of a machine.
async fn listed(kit: &Kit, machine: MachineId) -> Result<Option<String>> {
    let page = kit
        .bmdb
        .inspect(|tx| {
            Box::pin(async move {
                machines(tx, &Filter::default(), &Scope::Everything, None, 1000, usize::MAX).await
            })
        })
        .await?;
    let found = page.machines.into_iter().find(|one| one.line.name.machine == machine.0);
    Ok(found.context("it is listed")?.line.priority)
}

#[tokio::test]
async fn urgent_machine_is_claimed_before_others_that_wait_for_longer() -> TestResult {
    let kit = Kit::new("priority_claimed").await?;
    let others = kit.provided(20, "rack").await?;
    let last = kit.provided(1, "rack").await?[0];
    let said = prioritize(&kit, last, Level::Urgent, None).await?;
    assert!(said.starts_with("comes before the others (urgent) until somebody says otherwise"), "{said}");
    prioritize(&kit, others[0], Level::Low, None).await?;
    assert_eq!(
        (class(&kit, last).await?, class(&kit, others[0]).await?, class(&kit, others[1]).await?),
        (0, 2, 1)
    );
    let foreseen = plan(&kit.bmdb.fleet_view().await?, Span::minutes(1));
    let agents: Vec<_> = foreseen.rows.iter().filter(|row| row.process == "AgentStart").collect();
    assert_eq!(agents.len(), 21);
    assert_eq!(agents[0].what, "put the role server on it (urgent, by kim)");
    assert_eq!(agents.last().context("the last")?.name.machine, others[0].0);
    let shepherd = Shepherd::start(&kit, "claiming", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    assert_eq!(work.machine(), last, "another came first");
    drop(work);
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn priority_is_ordered_told_replaced_and_over_when_its_time_is() -> TestResult {
    let kit = Kit::new("priority_orders").await?;
    let row = kit.provided(3, "rack").await?;
    let hour = Some(Until::After(Span::hours(1)));
    let urgent = || Each::Prioritize { level: Level::Urgent, until: hour };
    let dry = kit.bmdb.order_each(order(None, true), row[0], urgent(), "kim".into()).await?;
    assert!(dry.done.changed && class(&kit, row[0]).await? == 1, "{dry:?}");

    let given = kit.bmdb.order_each(order(Some("k"), false), row[0], urgent(), "kim".into()).await?;
    let again = kit.bmdb.order_each(order(Some("k"), false), row[0], urgent(), "kim".into()).await?;
    assert!(again.repeated && again.audit == given.audit, "{again:?}");
    assert_eq!((class(&kit, row[0]).await?, listed(&kit, row[0]).await?), (0, Some("urgent".to_owned())));
    let after: Value = sqlx::query_scalar("SELECT after FROM audit WHERE idempotency_key = 'k'")
        .fetch_one(&kit.pool)
        .await?;
    assert_eq!((&after["priority"]["level"], &after["priority"]["by"]), (&"urgent".into(), &"kim".into()));
    let why = explain(&kit.bmdb.machine_view(row[0]).await?);
    let note = why.notes.iter().find(|note| note.contains("urgent")).context("a note")?;
    assert!(note.contains("by kim") && note.contains("a customer waits"), "{note}");

    // Over: it counts no more at once, and that what is stored lags is nobody's fault.
    kit.database.advance(Duration::from_mins(61)).await?;
    assert_eq!(listed(&kit, row[0]).await?, None);
    let why = explain(&kit.bmdb.machine_view(row[0]).await?);
    assert!(
        !why.notes.iter().any(|note| note.contains("urgent") || note.contains("priority")),
        "{:?}",
        why.notes
    );
    assert_eq!(class(&kit, row[0]).await?, 0, "nobody has looked yet");
    let swept = kit.bmdb.sweep_page(MachineId(uuid::Uuid::nil()), 100).await?;
    assert_eq!((swept.drifted, class(&kit, row[0]).await?), (0, 1), "{swept:?}");

    let said = prioritize(&kit, row[1], Level::Low, None).await?;
    assert!(said.starts_with("comes behind the others (low) until somebody says otherwise"), "{said}");
    let said = prioritize(&kit, row[1], Level::Urgent, None).await?;
    assert!(said.contains("in place of low by kim"), "{said}");
    let said = prioritize(&kit, row[1], Level::Normal, None).await?;
    assert_eq!((said.as_str(), class(&kit, row[1]).await?), ("comes as the engine decides from now on", 1));
    let said = prioritize(&kit, row[1], Level::Normal, None).await?;
    assert!(said.ends_with("nothing was changed"), "{said}");
    let over = Some(Until::At("2020-01-01T00:00:00Z".parse()?));
    let said = prioritize(&kit, row[1], Level::Low, over).await?;
    assert!(said.contains("is over; nothing was changed"), "{said}");

    let selection = Selection {
        filter: Filter { providers: vec!["rack".to_owned()], ..Filter::default() },
        scope: Scope::Everything,
        expected: Some(3),
        beyond_limits: false,
        admin: false,
    };
    let many = Order { rpc: RPC.to_owned(), ..order(Some("many"), false) };
    let given = kit.bmdb.order_many(many, selection, urgent(), "kim".into()).await?;
    assert!(given.outcomes.iter().all(|one| one.done.changed && !one.refused), "{given:?}");
    assert_eq!(
        kit.count("SELECT count(*) FROM machine_due WHERE lane = 'access' AND priority = 0").await?,
        3
    );
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Prioritized'").await?, 7);
    Ok(())
}
