//! Orders that need another admin: requested, approved by another person, and carried out once.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use model::access::{AccessRole, AccessScope};
use model::budget::{BudgetChange, BudgetKind};
use model::order_limits::{MAX_EXAMINED_MACHINES, OrderLimits};
use model::pause::LoopKind;
use model::policy::Policy;
use model::retirement::RetirementStage;
use model::role_declaration::RoleDeclaration;
use model::rpc_name::{APPROVE_RPC, CANCEL_RETIRE_RPC, SUBMIT_BULK_ORDER_RPC, WAIVE_RPC};
use model::time::Span;
use model::two_person_rule::Principal;
use shepherd_bmdb::cluster::kubernetes::desired::KubernetesPatch;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::fleet::listing::Filter;
use shepherd_bmdb::orders::approval::list_approvals;
use shepherd_bmdb::orders::budget::read_budgets_and_brakes;
use shepherd_bmdb::orders::bulk_orders::MachineSelection;
use shepherd_bmdb::orders::loop_pause::NewPause;
use shepherd_bmdb::orders::machine_order::MachineOrder;
use shepherd_bmdb::orders::order::{Actor, Order, OrderResult, request_digest};
use shepherd_bmdb::orders::retirement;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;
use testkit::declaration::web_role;

const SET: &str = "shepherd.fleet.v1.Budgets/Set";

fn order(actor: &str, rpc: &str, key: Option<&str>, request: &str) -> Order {
    Order {
        actor: Actor { name: actor.to_owned(), credential: None },
        rpc: rpc.to_owned(),
        target: "what it is about".to_owned(),
        reason: "the feed is repaired".to_owned(),
        idempotency_key: key.map(str::to_owned),
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(request.as_bytes()),
    }
}

fn five() -> BudgetChange {
    BudgetChange { max_count: Some(5), window: None }
}

/// The id of the approval request, for an order that needs another admin.
fn expect_approval_required<T: std::fmt::Debug>(given: Result<T, BmdbError>) -> Result<Uuid> {
    match given {
        Err(BmdbError::ApprovalRequired(wanted)) => Ok(wanted.approval_id),
        other => anyhow::bail!("expected that another admin is needed, got {other:?}"),
    }
}

fn refused<T: std::fmt::Debug>(given: Result<T, BmdbError>) -> Result<&'static str> {
    match given {
        Err(BmdbError::OrderRejected { reason, .. }) => Ok(reason),
        other => anyhow::bail!("expected a refusal, got {other:?}"),
    }
}

async fn with_two(name: &str) -> Result<Kit> {
    let kit = Kit::new(name).await?;
    kit.bmdb.change_policy("test", |policy| policy.two_person_rule.required = true).await?;
    Ok(kit)
}

async fn set(kit: &Kit, given: Order) -> Result<OrderResult, BmdbError> {
    kit.bmdb.set_budget(given, BudgetKind::Release, five()).await
}

async fn approve(kit: &Kit, who: &str, approval: Uuid, dry_run: bool) -> Result<OrderResult, BmdbError> {
    let order = Order { dry_run, ..order(who, APPROVE_RPC, None, "approve") };
    kit.bmdb.approve_order(order, approval, Principal { name: who.to_owned(), credential: None }).await
}

async fn most(kit: &Kit) -> Result<Option<u32>> {
    kit.bmdb.read_policy().await?;
    let (_, policy) = kit.bmdb.policy();
    let look =
        kit.bmdb.transact_read_only_with(policy, |tx, policy| Box::pin(read_budgets_and_brakes(tx, policy)));
    Ok(look.await?.budgets.into_iter().find(|line| line.budget == "release").context("the budget")?.max_count)
}

async fn states(kit: &Kit) -> Result<Vec<String>> {
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    Ok(found.into_iter().map(|line| line.state).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_waits_for_another_admin_and_is_then_carried_out_once() -> TestResult {
    let kit = with_two("second_person").await?;
    let given = || order("kim@a", SET, Some("k"), "five");
    let dry = set(&kit, Order { dry_run: true, ..given() }).await?;
    assert!(dry.outcome.is_changed(), "a dry run needs nobody: {dry:?}");
    let approval = expect_approval_required(set(&kit, given()).await)?;
    assert_eq!(expect_approval_required(set(&kit, given()).await)?, approval, "it is requested once");
    assert_eq!((states(&kit).await?, most(&kit).await?), (vec!["waiting".to_owned()], Some(100)));

    assert_eq!(refused(approve(&kit, "kim@b", approval, false).await)?, "SAME_PERSON");
    assert_eq!(refused(approve(&kit, "lee@a", Uuid::nil(), false).await)?, "NO_SUCH_APPROVAL");
    approve(&kit, "lee@a", approval, true).await?;
    assert_eq!(
        expect_approval_required(set(&kit, given()).await)?,
        approval,
        "tried in vain, it is not approved"
    );
    let text = approve(&kit, "lee@a", approval, false).await?.outcome.message;
    assert!(text.contains("v1.Budgets/Set") || text.contains("Budgets/Set"), "{text}");
    assert_eq!(states(&kit).await?, ["approved"]);
    let other = order("kim@a", SET, Some("k"), "another");
    assert_eq!(refused(set(&kit, other).await)?, "NOT_AS_REQUESTED");
    // Another's order with the same key is another order.
    let of_max = expect_approval_required(set(&kit, order("max@a", SET, Some("k"), "five")).await)?;
    assert_ne!(of_max, approval);

    let version = kit.bmdb.read_policy().await?;
    let at_once = try_join_all((0..4).map(|_| set(&kit, given()))).await?;
    let fresh: Vec<&OrderResult> = at_once.iter().filter(|carried| !carried.replayed).collect();
    assert_eq!((fresh.len(), kit.bmdb.read_policy().await?, most(&kit).await?), (1, version + 1, Some(5)));
    assert!(fresh[0].outcome.message.ends_with("; approved by lee@a"), "{:?}", fresh[0]);
    assert!(states(&kit).await?.contains(&"used".to_owned()));
    assert!(set(&kit, given()).await?.replayed, "and it stays carried out once");
    assert_eq!(refused(approve(&kit, "lee@a", approval, false).await)?, "USED");

    let lines: Vec<(String, String)> = sqlx::query_as(
        "SELECT rpc, outcome FROM audit WHERE NOT dry_run AND actor IN ('kim@a', 'lee@a') ORDER BY at",
    )
    .fetch_all(&kit.pool)
    .await?;
    let count =
        |rpc: &str, outcome: &str| lines.iter().filter(|line| line.0 == rpc && line.1 == outcome).count();
    assert_eq!((count(SET, "refused"), count(SET, "changed")), (4, 1), "{lines:?}");
    assert_eq!((count(APPROVE_RPC, "refused"), count(APPROVE_RPC, "changed")), (2, 1), "{lines:?}");
    Ok(())
}

#[tokio::test]
async fn budget_is_set_as_the_approver_read_it_and_in_no_other_way() -> TestResult {
    let kit = with_two("second_person_budget").await?;
    kit.bmdb.change_policy("test", |policy| policy.release_budget.window = Span::hours(2)).await?;
    let given = || order("kim@a", SET, Some("k"), "five");
    let approval = expect_approval_required(set(&kit, given()).await)?;
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.first().context("the request")?;
    assert_eq!(line.target, "the budget release: 100 in 2h -> 5 in 2h");
    approve(&kit, "lee@a", approval, false).await?;
    // The order names no window, so its outcome depends on the present one.
    kit.bmdb.change_policy("test", |policy| policy.release_budget.window = Span::seconds(1)).await?;
    assert_eq!(refused(set(&kit, given()).await)?, "NOT_AS_REQUESTED");
    kit.bmdb.change_policy("test", |policy| policy.release_budget.window = Span::hours(2)).await?;
    set(&kit, given()).await?;
    assert_eq!(most(&kit).await?, Some(5));
    Ok(())
}

#[tokio::test]
async fn what_is_requested_and_what_is_approved_expires_after_a_while() -> TestResult {
    let kit = with_two("second_person_over").await?;
    let given = || order("kim@a", SET, Some("k"), "five");
    let hour = Duration::from_mins(61);
    let approval = expect_approval_required(set(&kit, given()).await)?;
    kit.database.advance(hour).await?;
    assert_eq!(refused(approve(&kit, "lee@a", approval, false).await)?, "EXPIRED");
    assert_eq!(states(&kit).await?, ["expired"]);
    expect_approval_required(set(&kit, given()).await)?;
    approve(&kit, "lee@a", approval, false).await?;
    kit.database.advance(hour).await?;
    expect_approval_required(set(&kit, given()).await)?;
    assert_eq!((states(&kit).await?, most(&kit).await?), (vec!["waiting".to_owned()], Some(100)));
    approve(&kit, "lee@a", approval, false).await?;
    set(&kit, given()).await?;
    assert_eq!(most(&kit).await?, Some(5));

    // Who read a request approves it by its id, so no other order gets that id, also after the request has expired.
    kit.bmdb.change_policy("test", |policy| policy.release_budget.count = 100).await?;
    let pause =
        NewPause { paused_loop: LoopKind::Updater, provider: None, until: None, actor: "kim".to_owned() };
    let harmless = order("kim@a", "shepherd.fleet.v1.Loops/Pause", Some("again"), "pause");
    let shown = expect_approval_required(kit.bmdb.pause_loop(harmless, pause).await)?;
    kit.database.advance(hour).await?;
    let again = order("kim@a", SET, Some("again"), "five");
    assert_eq!(refused(set(&kit, again).await)?, "NOT_AS_REQUESTED");
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.into_iter().find(|line| line.approval_id == shown).context("the request")?;
    assert_eq!((line.rpc.as_str(), line.state.as_str()), ("shepherd.fleet.v1.Loops/Pause", "expired"));
    assert_eq!(refused(approve(&kit, "lee@a", shown, false).await)?, "EXPIRED");

    // A credential that ends takes its approval requests with it.
    let credential = Uuid::new_v4();
    sqlx::query(
        "INSERT INTO access_credential (credential_id, kind, name, role, proof, created_at, created_by)
         VALUES ($1, 'token', 'max', 'admin', decode(repeat('07', 32), 'hex'), clock_timestamp(), 'test')",
    )
    .bind(credential)
    .execute(&kit.pool)
    .await?;
    let of_max = |key| {
        let actor = Actor { name: format!("max (token {credential})"), credential: Some(credential) };
        Order { actor, ..order("", SET, Some(key), "five") }
    };
    let (first, second) = (
        expect_approval_required(set(&kit, of_max("1")).await)?,
        expect_approval_required(set(&kit, of_max("2")).await)?,
    );
    assert_eq!(
        refused(approve(&kit, "Max@b", first, false).await)?,
        "SAME_PERSON",
        "by the credential's name"
    );
    approve(&kit, "lee@a", first, false).await?;
    sqlx::query("UPDATE access_credential SET revoked_at = clock_timestamp(), revoked_by = 'test'")
        .execute(&kit.pool)
        .await?;
    assert_eq!(refused(set(&kit, of_max("1")).await)?, "REQUESTER_GONE");
    assert_eq!(refused(approve(&kit, "lee@a", second, false).await)?, "REQUESTER_GONE");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_order_that_reaches_far_needs_two_and_no_other_does() -> TestResult {
    let kit = with_two("second_person_grave").await?;
    let row = kit.provided(3, "rack").await?;
    kit.bmdb
        .change_policy("test", |policy| {
            policy.order_limits = OrderLimits { machines: 2, machines_per_hour: 100 };
        })
        .await?;
    let pause = |provider: Option<&str>, key| {
        let new = NewPause {
            paused_loop: LoopKind::Updater,
            provider: provider.map(str::to_owned),
            until: None,
            actor: "kim@a".to_owned(),
        };
        kit.bmdb.pause_loop(order("kim@a", "shepherd.fleet.v1.Loops/Pause", Some(key), "pause"), new)
    };
    pause(Some("rack"), "1").await?;
    let approval = expect_approval_required(pause(None, "2").await)?;
    assert_eq!(kit.count("SELECT count(*) FROM loop_pause").await?, 1);
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.iter().find(|line| line.approval_id == approval).context("it is listed")?;
    assert_eq!(line.target, "what it is about, until it is resumed");
    approve(&kit, "lee@a", approval, false).await?;
    // Several concurrent calls do not deadlock, and all get the same result.
    let at_once = try_join_all((0..4).map(|_| pause(None, "2"))).await?;
    assert_eq!(at_once.iter().filter(|carried| !carried.replayed).count(), 1, "{at_once:?}");
    assert!(
        at_once.iter().all(|carried| carried.outcome.message.ends_with("; approved by lee@a")),
        "{at_once:?}"
    );

    // To leave out a stage needs approval, and the order before it does not.
    let retire = MachineOrder::Retire { wipe: true, keep_authority: false };
    kit.bmdb
        .execute_machine_order(order("kim@a", retire.rpc(), Some("3"), "r"), row[0], retire, "kim@a".into())
        .await?;
    let waive = |key| {
        kit.bmdb.try_execute_on_machine(order("kim@a", WAIVE_RPC, Some(key), "w"), row[0], |snapshot| {
            retirement::waive_stage(
                snapshot,
                &Policy::default(),
                None,
                RetirementStage::Wipe,
                "shredded",
                "kim@a",
            )
        })
    };
    let approval = expect_approval_required(waive("4").await)?;
    assert_eq!(
        kit.count("SELECT count(*) FROM machine_retirement WHERE wipe_waived_at IS NOT NULL").await?,
        0
    );
    approve(&kit, "lee@a", approval, false).await?;
    assert!(waive("4").await?.outcome.is_changed());

    let many = |providers: &[&str], key: &'static str, expected| {
        let selection = MachineSelection {
            filter: Filter {
                selector: format!("provider in ({})", providers.join(",")).parse().unwrap(),
                omit_retired: false,
            },
            named: None,
            scope: AccessScope::Fleet,
            expected: Some(expected),
            beyond_limits: true,
            is_admin: true,
            max_examined: MAX_EXAMINED_MACHINES,
        };
        kit.bmdb.execute_bulk_order(
            order("kim@a", SUBMIT_BULK_ORDER_RPC, Some(key), key),
            selection,
            MachineOrder::Quarantine,
            "kim@a".into(),
        )
    };
    kit.provided(2, "few").await?;
    assert_eq!(many(&["few"], "5", 2).await?.outcomes.len(), 2, "what may go beyond the limits and does not");
    let approval = expect_approval_required(many(&["rack"], "6", 3).await)?;
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.iter().find(|line| line.approval_id == approval).context("it is listed")?;
    assert_eq!(line.target, "quarantine: 3 machines: provider in (rack)");
    approve(&kit, "lee@a", approval, false).await?;
    // The same number, but not the same machines: one left the selection, and another joined it.
    let provided = "UPDATE machine_due SET provider = 'other' WHERE machine_id = $1";
    let newcomer = kit.provided(1, "rack").await?[0];
    sqlx::query(provided).bind(row[2].0).execute(&kit.pool).await?;
    assert_eq!(refused(many(&["rack"], "6", 3).await)?, "NOT_AS_REQUESTED");
    sqlx::query("UPDATE machine_due SET provider = 'rack' WHERE machine_id = $1")
        .bind(row[2].0)
        .execute(&kit.pool)
        .await?;
    sqlx::query(provided).bind(newcomer.0).execute(&kit.pool).await?;
    let given = many(&["rack"], "6", 3).await?;
    assert!(given.outcomes.len() == 3 && !given.replayed, "{given:?}");
    assert!(many(&["rack"], "6", 3).await?.replayed);
    Ok(())
}

/// Who cancels a retirement with a wipe can order one without it, which is a waiver in two orders.
#[tokio::test]
async fn cancelled_wipe_needs_two_and_the_approver_reads_it() -> TestResult {
    let kit = with_two("second_person_wipe").await?;
    let row = kit.provided(2, "rack").await?;
    let retire = |machine, wipe, key| {
        let retire = MachineOrder::Retire { wipe, keep_authority: false };
        kit.bmdb.execute_machine_order(
            order("kim@a", retire.rpc(), Some(key), "r"),
            machine,
            retire,
            "kim@a".into(),
        )
    };
    let cancel = |machine, key| {
        let given = order("kim@a", CANCEL_RETIRE_RPC, Some(key), "c");
        kit.bmdb.try_execute_on_machine(given, machine, |snapshot| {
            retirement::cancel_retirement(snapshot, "by kim@a", AccessRole::Admin)
        })
    };
    retire(row[0], true, "1").await?;
    retire(row[1], false, "2").await?;
    assert!(cancel(row[1], "3").await?.outcome.is_changed(), "without a wipe it needs nobody");
    let wiped = "SELECT count(*) FROM machine_retirement WHERE wipe";
    let approval = expect_approval_required(cancel(row[0], "4").await)?;
    assert_eq!(kit.count(wiped).await?, 1);
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.iter().find(|line| line.approval_id == approval).context("it is listed")?;
    assert!(line.target.starts_with("what it is about: it stays in the fleet"), "{}", line.target);
    approve(&kit, "lee@a", approval, false).await?;
    // The same request about another machine, which has the name by then.
    retire(row[1], true, "5").await?;
    assert_eq!(refused(cancel(row[1], "4").await)?, "NOT_AS_REQUESTED");
    let done = cancel(row[0], "4").await?;
    assert!(done.outcome.message.ends_with("; approved by lee@a"), "{done:?}");
    assert_eq!(kit.count(wiped).await?, 1, "that of the other machine");
    Ok(())
}

#[tokio::test]
async fn approval_of_a_credential_that_was_revoked_since_counts_for_nothing() -> TestResult {
    let kit = with_two("second_person_revoked").await?;
    let credential = Uuid::new_v4();
    sqlx::query(
        "INSERT INTO access_credential (credential_id, kind, name, role, proof, created_at, created_by)
         VALUES ($1, 'token', 'lee', 'admin', decode(repeat('07', 32), 'hex'),
                 clock_timestamp() - INTERVAL '2 days', 'test')",
    )
    .bind(credential)
    .execute(&kit.pool)
    .await?;
    let lee = || Principal { name: "lee".to_owned(), credential: Some(credential) };
    let given = || order("kim@a", SET, Some("k"), "five");
    let approval = expect_approval_required(set(&kit, given()).await)?;
    kit.bmdb.approve_order(order("lee", APPROVE_RPC, None, "approve"), approval, lee()).await?;
    sqlx::query("UPDATE access_credential SET revoked_at = clock_timestamp(), revoked_by = 'test'")
        .execute(&kit.pool)
        .await?;
    assert_eq!(refused(set(&kit, given()).await)?, "APPROVER_GONE");
    assert_eq!(most(&kit).await?, Some(100), "nothing was changed");
    let late = kit.bmdb.approve_order(order("lee", APPROVE_RPC, None, "again"), approval, lee()).await;
    assert_eq!(refused(late)?, "APPROVER_GONE");
    approve(&kit, "max@a", approval, false).await?;
    assert!(set(&kit, given()).await?.outcome.is_changed(), "another admin approved it");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn add_on_that_is_new_or_has_other_objects_needs_two() -> TestResult {
    let kit = with_two("second_person_add_ons").await?;
    for (digit, name) in [("a", "k"), ("b", "dns-1"), ("c", "dns-2")] {
        sqlx::query(
            "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by, kubernetes)
             VALUES (decode(repeat($1, 64), 'hex'), 3, gen_random_uuid(), clock_timestamp(), $2, clock_timestamp(), 'kim',
                     CASE WHEN $2 = 'k' THEN '1.30.1' END)",
        )
        .bind(digit)
        .bind(name)
        .execute(&kit.pool)
        .await?;
    }
    kit.founded_cluster(1, 0).await?;
    let rpc = "shepherd.fleet.v1.ClusterKubernetes/Set";
    let set = async |patch: KubernetesPatch, key: &str| {
        kit.bmdb.set_kubernetes(order("kim@a", rpc, Some(key), key), "ams".to_owned(), patch).await
    };
    let dns = |artefact: &str| KubernetesPatch {
        add_ons: [("dns".to_owned(), artefact.to_owned())].into_iter().collect(),
        ..KubernetesPatch::default()
    };
    let bundle = KubernetesPatch { bundle: Some("k".to_owned()), ..KubernetesPatch::default() };
    assert!(
        set(bundle, "1").await?.outcome.is_changed(),
        "a bundle has no other objects than those that it has"
    );
    let approval = expect_approval_required(set(dns("dns-1"), "2").await)?;
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.iter().find(|line| line.approval_id == approval).context("it is listed")?;
    assert!(line.target.ends_with(&format!("the add-ons dns ({})", "b".repeat(64))), "{}", line.target);
    approve(&kit, "lee@a", approval, false).await?;
    // The name is that of another artefact by then.
    sqlx::query("UPDATE artefact SET name = CASE name WHEN 'dns-1' THEN 'dns-2' ELSE 'dns-1' END WHERE name LIKE 'dns%'")
        .execute(&kit.pool)
        .await?;
    assert_eq!(refused(set(dns("dns-1"), "2").await)?, "NOT_AS_REQUESTED");
    let approval = expect_approval_required(set(dns("dns-2"), "3").await)?;
    approve(&kit, "lee@a", approval, false).await?;
    assert!(set(dns("dns-2"), "3").await?.outcome.message.ends_with("; approved by lee@a"));
    expect_approval_required(set(dns("dns-1"), "4").await)?;
    let without = KubernetesPatch {
        remove_add_ons: ["dns".to_owned()].into_iter().collect(),
        ..KubernetesPatch::default()
    };
    assert!(set(without, "5").await?.outcome.is_changed(), "fewer objects need nobody");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declaration_that_gives_root_needs_two() -> TestResult {
    let kit = with_two("second_person_declares").await?;
    kit.founded_cluster(1, 0).await?;
    let declare = async |user: &str, key: &str| {
        let given = order("kim@a", "shepherd.fleet.v1.Clusters/DeclareRole", Some(key), user);
        let declaration = RoleDeclaration::new(web_role(&"ab".repeat(32), user))?;
        kit.bmdb
            .declare_cluster_role(given, "ams".to_owned(), declaration.into())
            .await
            .map_err(anyhow::Error::from)
    };
    let refused = |given: Result<OrderResult>| match given {
        Err(error) => expect_approval_required::<()>(Err(error.downcast::<BmdbError>()?)),
        Ok(carried) => anyhow::bail!("nobody approved it: {carried:?}"),
    };
    assert!(declare("1000", "1").await?.outcome.is_changed(), "it has no privileges");
    let approval = refused(declare("root", "2").await)?;
    assert_eq!(kit.count("SELECT version FROM cluster").await?, 2, "the former declaration stays");
    let (found, _) = kit.bmdb.transact_read_only(|tx| Box::pin(list_approvals(tx, None, 100))).await?;
    let line = found.iter().find(|line| line.approval_id == approval).context("it is listed")?;
    assert!(line.target.ends_with("the role web, in which server runs as root"), "{}", line.target);
    approve(&kit, "lee@a", approval, false).await?;
    assert!(declare("root", "2").await?.outcome.message.ends_with("; approved by lee@a"));
    // The approval is used up.
    assert!(declare("1000", "3").await?.outcome.is_changed());
    refused(declare("root", "4").await)?;
    Ok(())
}
