//! Orders about the machines that a filter means, and labels: through the API and in the database.

use anyhow::{Context as _, Result};
use model::access::AccessScope;
use model::facts::HoldScope;
use model::label::Labels;
use model::order_limits::{MAX_EXAMINED_MACHINES, OrderLimits};
use model::priority::PriorityLevel;
use model::rpc_name::SUBMIT_BULK_ORDER_RPC;
use serde_json::{Value, json};
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::fact_change::FactChange;
use shepherd_bmdb::engine::fact_change::retirement::RetirementChange;
use shepherd_bmdb::fleet::listing::Filter;
use shepherd_bmdb::machine::tags::list_tags;
use shepherd_bmdb::orders::bulk_orders::{BulkOrderResult, MachineSelection};
use shepherd_bmdb::orders::machine_order::MachineOrder;
use shepherd_bmdb::orders::order::{Actor, EXPIRY_PASSED, Expiry, Order, OutcomeKind, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

fn order(key: &str, dry_run: bool) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: SUBMIT_BULK_ORDER_RPC.to_owned(),
        target: "the machines of a selector".to_owned(),
        reason: "the row is rewired".to_owned(),
        idempotency_key: Some(key.to_owned()).filter(|_| !dry_run),
        dry_run,
        expected_version: None,
        request_digest: request_digest(key.as_bytes()),
    }
}

/// The machines of a selector.
#[expect(clippy::unwrap_used, reason = "the selectors of these tests are valid")]
fn filter(selector: &str) -> Filter {
    Filter { selector: selector.parse().unwrap(), omit_retired: false }
}

/// An operator's selection of the machines of these providers, or of all machines.
fn of(providers: &[&str], expected: usize) -> MachineSelection {
    let text =
        if providers.is_empty() { String::new() } else { format!("provider in ({})", providers.join(",")) };
    MachineSelection {
        filter: filter(&text),
        named: None,
        scope: AccessScope::Fleet,
        expected: Some(expected),
        beyond_limits: false,
        is_admin: false,
        max_examined: MAX_EXAMINED_MACHINES,
    }
}

fn refusal(given: Result<BulkOrderResult, BmdbError>) -> Result<&'static str> {
    match given {
        Err(BmdbError::OrderRejected { reason, .. }) => Ok(reason),
        other => anyhow::bail!("expected a refusal, got {other:?}"),
    }
}

const HOLD: MachineOrder = MachineOrder::Hold { scope: HoldScope::Power, until: None };

#[tokio::test]
async fn order_about_many_is_counted_bounded_given_once_and_goes_on_where_it_ended() -> TestResult {
    let kit = Kit::new("orders_about_many").await?;
    let row = kit.provided(3, "rack").await?;
    kit.provided(2, "other").await?;
    kit.bmdb
        .change_policy("test", |policy| {
            policy.order_limits = OrderLimits { machines: 3, machines_per_hour: 4 };
        })
        .await?;
    let give = |key: &'static str, selection| {
        kit.bmdb.execute_bulk_order(order(key, false), selection, HOLD, "kim".into())
    };
    let held = "SELECT count(*) FROM machine_hold";

    let dry = async |expected| {
        let selection = MachineSelection { expected, ..of(&["rack"], 0) };
        kit.bmdb.execute_bulk_order(order("dry", true), selection, HOLD, "kim".into()).await
    };
    for (expected, refused) in [(None, None), (Some(3), None), (Some(2), Some("2 were expected"))] {
        let dry = dry(expected).await?;
        let text = dry.rejection.unwrap_or_default();
        assert_eq!((dry.outcomes.len(), kit.count(held).await?), (3, 0));
        assert_eq!(text.is_empty(), refused.is_none(), "{expected:?}: {text}");
        assert!(text.contains(refused.unwrap_or_default()), "{expected:?}: {text}");
    }
    assert_eq!(refusal(give("few", of(&["rack"], 2)).await)?, "OTHER_COUNT");
    assert_eq!(refusal(give("five", of(&["rack", "other"], 5)).await)?, "TOO_MANY");
    assert_eq!(refusal(give("all", of(&[], 5)).await)?, "EVERYBODY");
    assert_eq!(kit.count(held).await?, 0, "what was refused did something");

    // One of the machines has changed since the first part was carried out.
    let given = give("k", of(&["rack"], 3)).await?;
    assert!(given.outcomes.iter().all(|one| one.outcome.is_changed() && !one.rejected), "{given:?}");
    sqlx::query("DELETE FROM audit WHERE idempotency_key LIKE 'k/%' AND machine_id = $1")
        .bind(row[1].0)
        .execute(&kit.pool)
        .await?;
    sqlx::query("DELETE FROM machine_hold WHERE machine_id = $1").bind(row[1].0).execute(&kit.pool).await?;
    let (more, before) = (kit.provided(1, "rack").await?, kit.count("SELECT count(*) FROM audit").await?);
    let again = give("k", of(&["rack"], 3)).await?;
    assert!(again.replayed && again.audit_id == given.audit_id && again.outcomes.len() == 3, "{again:?}");
    assert_eq!(kit.count(held).await?, 3, "the one that had not got it has it, and the newcomer has not");
    assert_eq!(kit.count("SELECT count(*) FROM audit").await?, before + 1, "once for each");
    assert!(!again.outcomes.iter().any(|one| one.name.machine == more[0].0));

    // Three of the four that are allowed in an hour are used up.
    assert_eq!(refusal(give("two", of(&["other"], 2)).await)?, "TOO_MANY_IN_AN_HOUR");
    let beyond = MachineSelection { beyond_limits: true, ..of(&[], 6) };
    assert_eq!(refusal(give("operator", beyond.clone()).await)?, "NOT_AN_ADMIN");
    let all = give("admin", MachineSelection { is_admin: true, ..beyond }).await?;
    assert_eq!((all.outcomes.len(), kit.count(held).await?), (6, 6));
    let message = "SELECT count(*) FROM audit WHERE (before->>'beyond_limits')::BOOL AND outcome = 'changed'";
    assert_eq!(kit.count(message).await?, 1, "the audit has that it went beyond the limits");
    kit.database.advance(std::time::Duration::from_mins(61)).await?;
    assert_eq!(give("later", of(&["other"], 2)).await?.outcomes.len(), 2, "an hour later there is room");
    Ok(())
}

#[tokio::test]
async fn dry_run_about_many_has_the_outcomes_of_the_order_and_changes_nothing() -> TestResult {
    let kit = Kit::new("orders_dry_outcomes").await?;
    let row = kit.provided(3, "rack").await?;
    let each = |key: &'static str, machine, each: MachineOrder| {
        kit.bmdb.execute_machine_order(order(key, false), machine, each, "kim".into())
    };
    each("1", row[0], HOLD).await?;
    each("2", row[1], MachineOrder::Quarantine).await?;
    let facts = "SELECT (SELECT count(*) FROM machine_hold) + (SELECT count(*) FROM machine_quarantine)";
    assert_eq!(kit.count(facts).await?, 2);
    let give = async |key: &'static str, dry_run| -> Result<Vec<(uuid::Uuid, OutcomeKind)>> {
        let release = MachineOrder::Release { quarantine: false };
        let given =
            kit.bmdb.execute_bulk_order(order(key, dry_run), of(&["rack"], 3), release, "kim".into()).await?;
        let mut kinds: Vec<_> =
            given.outcomes.iter().map(|one| (one.name.machine, one.outcome.kind)).collect();
        kinds.sort_by_key(|(machine, _)| row.iter().position(|known| known.0 == *machine));
        Ok(kinds)
    };
    let expected = [OutcomeKind::Changed, OutcomeKind::NoEffect, OutcomeKind::Already];
    let expected: Vec<_> = row.iter().map(|machine| machine.0).zip(expected).collect();
    assert_eq!(give("dry", true).await?, expected);
    assert_eq!(kit.count(facts).await?, 2, "the dry run changed something");
    assert_eq!(give("k", false).await?, expected);
    assert_eq!(give("k", false).await?, expected, "a repeated order has its first outcomes");
    let recorded = "SELECT count(*) FROM audit WHERE outcome = 'no_effect' AND idempotency_key LIKE 'k/%'";
    assert_eq!(kit.count(recorded).await?, 1, "the audit distinguishes it from one that was not needed");
    Ok(())
}

#[tokio::test]
async fn dry_run_about_too_many_decides_on_none_and_reports_it() -> TestResult {
    let kit = Kit::new("orders_dry_many").await?;
    kit.provided(1_001, "rack").await?;
    let before = kit.count("SELECT count(*) FROM audit").await?;
    let all = MachineSelection { beyond_limits: true, is_admin: true, expected: None, ..of(&["rack"], 0) };
    let dry = kit.bmdb.execute_bulk_order(order("dry", true), all, HOLD, "kim".into()).await?;
    let lines = kit.count("SELECT count(*) FROM audit").await? - before;
    let changed = dry.outcomes.iter().filter(|one| one.outcome.is_changed()).count();
    assert_eq!(
        (dry.outcomes.len(), changed, lines, dry.rejection),
        (1_001, 0, 1, None),
        "only the head is in the audit"
    );
    let reason = dry.undecided_reason.context("it decided")?;
    assert!(reason.contains("these 1001"), "{reason}");
    Ok(())
}

#[tokio::test]
async fn order_about_many_that_is_over_is_rejected_as_a_whole() -> TestResult {
    let kit = Kit::new("orders_over").await?;
    kit.provided(2, "rack").await?;
    let until = Some(Expiry::At("2020-01-01T00:00:00Z".parse()?));
    for (key, each) in [
        ("hold", MachineOrder::Hold { scope: HoldScope::Power, until }),
        ("prioritize", MachineOrder::Prioritize { level: PriorityLevel::Urgent, until }),
    ] {
        for dry_run in [true, false] {
            let given = kit.bmdb.execute_bulk_order(
                order(key, dry_run),
                of(&["rack"], 2),
                each.clone(),
                "kim".into(),
            );
            assert_eq!(refusal(given.await)?, EXPIRY_PASSED, "{key}");
        }
    }
    let recorded = "SELECT count(*) FROM audit WHERE rpc <> 'test'";
    assert_eq!(kit.count(recorded).await?, 4, "each rejection has one line, and no machine has any");
    Ok(())
}

#[tokio::test]
async fn order_whose_machines_are_not_found_within_the_bound_is_rejected() -> TestResult {
    let kit = Kit::new("orders_examine_a_bounded_number").await?;
    kit.provided(3, "rack").await?;
    kit.provided(2, "other").await?;
    for (selector, rejected) in [
        ("!label.row", true),
        ("provider=rack,!label.row", true),
        ("provider=other,!label.row", false),
        ("provider=other", false),
    ] {
        for dry_run in [true, false] {
            let selection = MachineSelection { filter: filter(selector), max_examined: 3, ..of(&[], 2) };
            let given =
                kit.bmdb.execute_bulk_order(order(selector, dry_run), selection, HOLD, "kim".into()).await;
            if rejected {
                assert_eq!(refusal(given)?, "TOO_MANY_EXAMINED", "{selector}");
            } else {
                assert_eq!(given?.outcomes.len(), 2, "{selector}");
            }
        }
    }
    let held =
        "SELECT count(*) FROM machine_hold JOIN machine_provided USING (machine_id) WHERE provider = 'other'";
    assert_eq!((kit.count(held).await?, kit.count("SELECT count(*) FROM machine_hold").await?), (2, 2));
    Ok(())
}

#[tokio::test]
async fn retired_machines_are_selected_only_by_an_order_that_names_them() -> TestResult {
    let kit = Kit::new("orders_about_retired").await?;
    let machines = kit.provided(3, "rack").await?;
    let requested = RetirementChange::Requested { reason: "old".into(), by: "kim".into(), wipe: false };
    let changes = [requested, RetirementChange::Finished("gone".into())].map(FactChange::Retirement);
    kit.change(machines[0], changes.to_vec()).await?;
    for (selector, expected) in [
        ("provider=rack", 2),
        ("provider=rack,phase=Provided", 2),
        ("provider=rack,phase=retired", 1),
        ("provider=rack,phase in (Retired,Provided)", 3),
        ("provider=rack,phase!=Ready", 2),
    ] {
        let selection = MachineSelection { filter: filter(selector), expected: None, ..of(&[], 0) };
        let dry = kit.bmdb.execute_bulk_order(order("dry", true), selection, HOLD, "kim".into()).await?;
        assert_eq!(dry.outcomes.len(), expected, "{dry:?}");
    }
    Ok(())
}

#[tokio::test]
async fn labels_are_facts_that_lists_go_by_and_a_quarantine_by_hand_stays() -> TestResult {
    let kit = Kit::new("labels").await?;
    let machines = kit.provided(3, "rack").await?;
    let label = |set: &[(&str, &str)], remove: &[&str]| MachineOrder::Label {
        set: set.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect::<Labels>(),
        remove: remove.iter().map(|&key| key.to_owned()).collect(),
    };
    let each = |key: &'static str, number: usize, each: MachineOrder| {
        kit.bmdb.execute_machine_order(order(key, false), machines[number], each, "kim".into())
    };
    each("1", 0, label(&[("row", "7"), ("owner", "kim")], &[])).await?;
    each("2", 1, label(&[("row", "8")], &[])).await?;
    let changed = each("3", 0, label(&[], &["owner"])).await?;
    assert_eq!(changed.outcome.message, "is labelled row=7");
    assert_eq!(
        (changed.before.context("before")?, changed.after.context("after")?),
        (json!({ "labels": { "owner": "kim", "row": "7" } }), json!({ "labels": { "row": "7" } }))
    );
    let listed = async |wanted: &str| -> Result<usize> {
        let filter = filter(&format!("label.{wanted}"));
        let selection = MachineSelection { filter, ..of(&[], 0) };
        Ok(kit
            .bmdb
            .execute_bulk_order(order("dry", true), selection, MachineOrder::Retry, "kim".into())
            .await?
            .outcomes
            .len())
    };
    assert_eq!((listed("row").await?, listed("row=7").await?, listed("owner").await?), (2, 1, 0));
    let first = machines[0];
    let shown =
        kit.bmdb.transact_read_only(move |tx| Box::pin(async move { list_tags(tx, first).await })).await?;
    let reported = shown.iter().find(|tag| tag.table == "machine_labels").context("no such fact")?;
    assert_eq!(reported.row["labels"], json!({ "row": "7" }));
    each("4", 1, label(&[], &["row"])).await?;
    assert_eq!(kit.count("SELECT count(*) FROM machine_labels").await?, 1, "who has none has no row");

    each("5", 2, MachineOrder::Quarantine).await?;
    let phase = "SELECT count(*) FROM machine_due WHERE phase_index = 'Quarantined' AND process IS NULL";
    assert!(kit.count(phase).await? >= 1, "it is not left alone");
    each("6", 2, MachineOrder::Release { quarantine: true }).await?;
    assert_eq!(kit.count(phase).await?, 0);
    let events: Vec<String> = sqlx::query_scalar(
        "SELECT event FROM history WHERE event IN ('Labelled', 'QuarantineOrdered', 'QuarantineReleased') ORDER BY at",
    )
    .fetch_all(&kit.pool)
    .await?;
    let labelled = ["Labelled"; 4];
    assert_eq!(events[..4], labelled);
    assert_eq!(events[4..], ["QuarantineOrdered", "QuarantineReleased"]);
    let audit: Value = sqlx::query_scalar("SELECT after FROM audit WHERE idempotency_key = '5'")
        .fetch_one(&kit.pool)
        .await?;
    assert_eq!(audit["quarantine"]["reason"], "by kim: the row is rewired");
    Ok(())
}
