//! Power orders of operators: an order is carried out once, or ends with a reason, also after anything that happens in between; and a
//! machine that was switched off stays off.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::fact_change::power::PowerChange;
use shepherd::bmdb::orders::machine_decision;
use shepherd::bmdb::orders::power_order::SwitchPermission;
use shepherd::model::backoff::BackoffPolicy;
use shepherd::model::facts::{Hold, HoldScope};
use shepherd::model::policy::{Budget, DisruptionKind};
use shepherd::model::power_order::PowerOrderKind;
use shepherd::model::process::Process;
use shepherd::model::time::Span;

use crate::bmdb_kit::{Kit, LONG, Shepherd};
use crate::checker::{Records, check};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, endpoint};
#[cfg(debug_assertions)]
use crate::harness::ordering::until_dead;
use crate::harness::ordering::{ctl, refuses, says, stop, until_phase};
use crate::harness::port::reserved;

const LIMITS: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_silence_timeout=15s",
    "--recovery_ladder=restart-agent:10m:1,reboot:10m:1,power-cycle:10m:1",
    "--recovery_brake_fraction=1",
];

/// How often the simulator did that to the machine: each call that it carried out, over SSH or by its API.
fn done(journal: &[Value], id: &str, what: &str) -> usize {
    let carried_out = |call: &Value| {
        journal.iter().any(|line| line["phase"] == "end" && line["call"] == *call && line["outcome"] == "ok")
    };
    journal
        .iter()
        .filter(|line| line["phase"] == "start" && line["what"] == what && line["machine"] == id)
        .filter(|line| carried_out(&line["call"]))
        .count()
}

/// The boot from which a machine reported last.
async fn boot(fleet: &Fleet, id: &str) -> Result<String> {
    let boot = "SELECT boot_id FROM machine_agent_heartbeat JOIN machine_provided USING (machine_id)
                WHERE provider_id = $1";
    Ok(sqlx::query_scalar(boot).bind(id).fetch_one(&fleet.pool).await?)
}

async fn until_other_boot(fleet: &Fleet, id: &str, before: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while boot(fleet, id).await? == before {
        ensure!(Instant::now() < deadline, "{id} is never in another boot\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

async fn state(fleet: &Fleet, id: &str) -> Result<String> {
    let truth = fleet.truth().await?;
    let machine = truth.iter().find(|machine| machine["id"] == id).context("no such machine")?;
    Ok(machine["state"].as_str().context("a word")?.to_owned())
}

/// How the machine's power work ended, oldest first.
async fn endings(fleet: &Fleet, id: &str) -> Result<Vec<String>> {
    let ends = "SELECT h.event || ' ' || h.detail FROM history h JOIN machine_provided USING (machine_id)
                WHERE provider_id = $1 AND h.process = 'Power' AND h.edge = 'end' ORDER BY h.fence";
    Ok(sqlx::query_scalar(ends).bind(id).fetch_all(&fleet.pool).await?)
}

const READY: &str = "SELECT count(*) = 5 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
const NOTHING_ORDERED: &str = "SELECT count(*) = 0 FROM machine_power_order";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_ordered_is_done_once_and_what_is_off_stays_off() -> TestResult {
    let simulator = ["--machine_count", "5", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("power", &simulator).await?;
    let endpoints = [endpoint()?];
    let shepherd = fleet.shepherd("first", &endpoints, &LIMITS)?;
    fleet.until("all five are Ready", READY).await?;

    rebooted_and_cycled(&fleet).await?;
    off_and_on(&fleet).await?;
    stop(&fleet, shepherd).await?;
    refused_and_cancelled(&fleet).await?;
    let shepherd = fleet.shepherd("second", &endpoints, &LIMITS)?;
    within_the_budget(&fleet).await?;
    stop(&fleet, shepherd).await?;
    with_the_provider_gone(&fleet, &endpoints).await?;
    with_shepherds_that_die(&fleet, &endpoints).await?;

    let shepherd = fleet.shepherd("last", &endpoints, &LIMITS)?;
    // The machine whose provider was gone is watched for a boot that never came. The operator orders it again.
    let before = boot(&fleet, "sim-0005").await?;
    says(&fleet, &["power", "cycle", "sim-0005", "--reason", "it hangs"], "switched off and on").await?;
    until_other_boot(&fleet, "sim-0005", &before).await?;
    fleet.until("all five are Ready again", READY).await?;
    stop(&fleet, shepherd).await?;
    let violations = check(&Records::read(&fleet.pool, &fleet.journal()?).await?);
    assert!(violations.is_empty(), "{violations:?}\n{}", fleet.explain().await?);
    assert!(fleet.holds(NOTHING_ORDERED).await?, "an order was forgotten");
    Ok(())
}

async fn rebooted_and_cycled(fleet: &Fleet) -> Result<()> {
    for (id, line, what, text, message) in [
        ("sim-0001", vec!["reboot", "sim-0001"], "reboot", "will be rebooted; recovery watches", "reboot it"),
        (
            "sim-0002",
            vec!["power", "cycle", "sim-0002"],
            "power",
            "will be switched off and on",
            "off and on",
        ),
    ] {
        let before = boot(fleet, id).await?;
        let waits = ["--reason", "a new kernel", "--wait", "--timeout", "5m"];
        says(fleet, &[&line[..], &waits].concat(), text).await?;
        assert_ne!(boot(fleet, id).await?, before, "the command has waited for another boot");
        until_phase(fleet, id, "Ready").await?;
        assert_eq!(done(&fleet.journal()?, id, what), 1, "{id}");
        let ends = endings(fleet, id).await?;
        assert!(ends.len() == 1 && ends[0].contains(message) && ends[0].contains("was given"), "{ends:?}");
        says(fleet, &["timeline", id], "a new kernel").await?;
    }
    Ok(())
}

async fn off_and_on(fleet: &Fleet) -> Result<()> {
    let id = "sim-0003";
    let before = boot(fleet, id).await?;
    says(fleet, &["power", "off", id, "--reason", "its fan"], "it is held (recovery) from now on").await?;
    until_phase(fleet, id, "Silent").await?;
    assert_eq!(state(fleet, id).await?, "off");
    says(fleet, &["why", id], "switched off: its fan").await?;
    says(fleet, &["why", id], "; its phase is Silent").await?;
    says(fleet, &["power", "on", id, "--reason", "it is in"], "will be switched on; it is still held")
        .await?;
    until_other_boot(fleet, id, &before).await?;
    until_phase(fleet, id, "Ready").await?;
    says(fleet, &["why", id], "switched on ").await?;
    says(fleet, &["release", id], "is released").await?;
    assert_eq!(done(&fleet.journal()?, id, "power"), 2, "off and on, and nothing by the ladder");
    let ladder = "SELECT count(*) = 0 FROM history h JOIN machine_provided USING (machine_id)
                  WHERE provider_id = 'sim-0003' AND h.process = 'Recovery' AND h.edge = 'start'";
    assert!(fleet.holds(ladder).await?, "its recovery was held\n{}", fleet.explain().await?);
    Ok(())
}

/// An order can be cancelled as long as no worker has begun it.
async fn refused_and_cancelled(fleet: &Fleet) -> Result<()> {
    let id = "sim-0004";
    let why = ["--reason", "trying it"];
    let reboot = [&["reboot", id][..], &why].concat();
    says(fleet, &[&reboot[..], &["--dry-run"]].concat(), "will be rebooted").await?;
    assert!(fleet.holds(NOTHING_ORDERED).await?, "a dry run orders nothing");
    let (one, other) = tokio::join!(ctl(fleet, &reboot), ctl(fleet, &reboot));
    let (one, other) = (one?, other?);
    ensure!(one.0 == Some(0) && other.0 == Some(0), "{one:?}, {other:?}");
    let already = [&one.1, &other.1].into_iter().filter(|text| text.contains("already")).count();
    assert_eq!(already, 1, "{one:?}, {other:?}");
    says(fleet, &["why", id], "ordered to reboot it: trying it").await?;
    refuses(fleet, &[&["power", "off", id][..], &why].concat(), "is already ordered to be rebooted, by kim@")
        .await?;
    says(fleet, &["power", "cancel", id], "will not be rebooted").await?;
    says(fleet, &["power", "cancel", id], "has no reboot or power order").await?;
    says(fleet, &["hold", id, "--scope", "power", "--reason", "a firmware is written"], "is held").await?;
    refuses(fleet, &reboot, "is held (power) by kim@").await?;
    says(fleet, &["release", id], "is released").await?;
    let (code, text) = ctl(fleet, &["power", "reboot", id, "--reason", "x"]).await?;
    assert!(code == Some(2) && text.contains("it is one of on, off, cycle"), "{code:?}: {text}");
    assert_eq!(done(&fleet.journal()?, id, "reboot"), 0);
    Ok(())
}

/// One was rebooted before and two may be. The others wait until their orders lapse.
async fn within_the_budget(fleet: &Fleet) -> Result<()> {
    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        policy.budgets.insert(DisruptionKind::Reboot, Budget { count: 3, window: Span::hours(12) });
    })
    .await?;
    let all = ["reboot", "--provider", "sim", "--phase", "Ready", "--reason", "a new kernel"];
    let (code, listed) = ctl(fleet, &[&all[..], &["--dry-run"]].concat()).await?;
    assert!(code == Some(0) && listed.contains("5 machines"), "{listed}");
    says(fleet, &[&all[..], &["--yes-count", "5"]].concat(), "5 changed").await?;
    fleet
        .until(
            "three wait for the budget",
            "SELECT count(*) = 3 FROM work_postponed
             WHERE reason = 'the budget to reboot the machine is used up (3 in 12h)'",
        )
        .await?;
    // They are postponed for hours, and an order does not last that long.
    bmdb.change_policy("test", |policy| policy.power_order_timeout = Span::seconds(1)).await?;
    Ok(())
}

/// Nothing answers at the provider's address: the order ends when its time is over.
async fn with_the_provider_gone(fleet: &Fleet, endpoints: &[String]) -> Result<()> {
    let id = "sim-0005";
    let nowhere = format!("--simulated_url=http://{}", reserved()?);
    let shepherd = fleet.shepherd("cut-off", endpoints, &[&LIMITS[..], &[&nowhere]].concat())?;
    fleet.until("what waited for the budget is given up", NOTHING_ORDERED).await?;
    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        policy.power_order_timeout = Span::hours(1);
        // Only an operator's request triggers another attempt, not a slow host that took longer to send one.
        let day = BackoffPolicy { initial: Span::hours(24), maximum: Span::hours(24), exponent: 1.0 };
        policy.backoff.insert(Process::Power, day);
        policy.budgets.insert(DisruptionKind::Reboot, Budget { count: 20, window: Span::hours(12) });
    })
    .await?;
    says(fleet, &["power", "cycle", id, "--reason", "it hangs"], "will be switched off and on").await?;
    let failed = "SELECT count(*) = 1 FROM work_backoff WHERE process = 'Power'";
    fleet.until("it has failed", failed).await?;
    says(fleet, &["why", id], "failed once").await?;
    says(fleet, &["retry", id], "is retried").await?;
    fleet.until("it has failed again", failed).await?;
    // It is postponed for a day by now, and lapses nevertheless when its time is over.
    bmdb.change_policy("test", |policy| policy.power_order_timeout = Span::seconds(1)).await?;
    fleet.until("it is given up", NOTHING_ORDERED).await?;
    let ends = endings(fleet, id).await?;
    let last = ends.last().context("an end")?;
    assert!(last.contains("the order to switch it off and on was given, and its result"), "{ends:?}");
    // What a client reads that waits for the order.
    let event = "SELECT count(*) = 1 FROM history h JOIN machine_provided p USING (machine_id)
                 WHERE p.provider_id = 'sim-0005' AND h.event = 'PowerOrderGivenUp'
                   AND h.detail LIKE 'the order to switch it off and on was given, and its result%'";
    assert!(fleet.holds(event).await?, "{}", fleet.explain().await?);
    bmdb.change_policy("test", |policy| {
        policy.power_order_timeout = Span::hours(1);
        policy.backoff.remove(&Process::Power);
    })
    .await?;
    stop(fleet, shepherd).await
}

/// Release builds have no fail points.
#[cfg(not(debug_assertions))]
async fn with_shepherds_that_die(_fleet: &Fleet, _endpoints: &[String]) -> Result<()> {
    Ok(())
}

/// One shepherd dies between the record of the order and the order, and the next one after it was carried out. The
/// provider gets one intent, and the machine that has come back meanwhile is Ready without another boot.
#[cfg(debug_assertions)]
async fn with_shepherds_that_die(fleet: &Fleet, endpoints: &[String]) -> Result<()> {
    let brief = [&LIMITS[..], &["--session_interval=3s", "--outward_call_timeout=1s"]].concat();
    let cycled = "sim-0002";
    let before = boot(fleet, cycled).await?;
    let powered = done(&fleet.journal()?, cycled, "power");
    says(fleet, &["power", "cycle", cycled, "--reason", "it hangs"], "will be switched off and on").await?;
    for (place, carried_out) in [("switcher.intended", 0), ("switcher.switched", 1)] {
        let mut shepherd = fleet.shepherd_dying_at(place, place, endpoints, &brief)?;
        until_dead(fleet, place, &mut shepherd).await?;
        assert_eq!(done(&fleet.journal()?, cycled, "power") - powered, carried_out, "{place}");
        refuses(fleet, &["power", "cancel", cycled], "is being switched off and on already").await?;
    }
    let intents = "SELECT count(*) = 2 FROM intent JOIN machine_provided USING (machine_id)
                   WHERE provider_id = 'sim-0002' AND kind = 'power-cycle'";
    assert!(fleet.holds(intents).await?, "both gave the same order\n{}", fleet.explain().await?);

    let shepherd = fleet.shepherd("after", endpoints, &brief)?;
    fleet.until("the order is over", NOTHING_ORDERED).await?;
    until_phase(fleet, cycled, "Ready").await?;
    assert_ne!(boot(fleet, cycled).await?, before);
    assert_eq!(done(&fleet.journal()?, cycled, "power") - powered, 2, "ordered twice, under one intent");
    stop(fleet, shepherd).await
}

/// A hold, a cancellation or a retirement that comes between the decision and the order.
#[tokio::test]
async fn machine_is_switched_only_as_things_are_right_before() -> TestResult {
    let kit = Kit::new("power_permission").await?;
    let shepherd = Shepherd::start(&kit, "switcher", LONG).await?;
    let machine = kit.provided(1, "rack").await?[0];
    let ordered = |switch| {
        FactChange::Power(PowerChange::Ordered { switch, reason: "it hangs".into(), by: "kim".into() })
    };
    kit.change(machine, vec![ordered(PowerOrderKind::Reboot)]).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::Power).await?;
    let ask = async || Ok::<_, anyhow::Error>(work.begin_switch(PowerOrderKind::Reboot, "rack").await?);
    let refused = async |part: &str| {
        let answer = ask().await?;
        ensure!(
            matches!(&answer, SwitchPermission::Denied(no) if no.reason.contains(part)),
            "{part}: {answer:?}"
        );
        Ok(())
    };
    let intents = async || kit.count("SELECT count(*) FROM intent").await;

    let hold = Hold { scope: HoldScope::Power, reason: "disks".into(), by: "lee".into(), until: None };
    kit.change(machine, vec![FactChange::HoldSet(hold)]).await?;
    refused("lee holds it").await?;
    kit.change(machine, vec![FactChange::HoldCleared, FactChange::Power(PowerChange::Ended)]).await?;
    refused("the order was cancelled").await?;
    kit.change(machine, vec![ordered(PowerOrderKind::Off)]).await?;
    refused("the order was cancelled").await?;
    kit.change(machine, vec![FactChange::Power(PowerChange::Ended), ordered(PowerOrderKind::Reboot)]).await?;
    kit.change(machine, vec![FactChange::Quarantined("twice".into())]).await?;
    refused("it is quarantined").await?;
    assert_eq!(intents().await?, 0, "nothing was recorded");
    kit.change(machine, vec![FactChange::QuarantineCleared]).await?;
    let SwitchPermission::Granted { intent, ladder } = ask().await? else { panic!("refused") };
    assert!(ladder.is_none(), "it was never given an agent that could report");
    let SwitchPermission::Granted { intent: again, .. } = ask().await? else { panic!("refused") };
    assert_eq!((intents().await?, again), (1, intent), "a second request gets the same intent");
    work.finish(vec![FactChange::Power(PowerChange::Ended)], "done").await?;
    let open = kit.count("SELECT count(*) FROM intent WHERE settled_at IS NULL").await?;
    assert_eq!((open, kit.sweep().await?), (0, 0), "its schedule is what its facts demand");
    // Nothing of it is left for the next order to find.
    let snapshot = kit.bmdb.read_machine_snapshot(machine).await?;
    let retried = machine_decision::retry_machine(&snapshot, &kit.bmdb.policy().1, "kim");
    assert_eq!((snapshot.facts.power_order.is_none(), retried.changes.len()), (true, 0));
    Ok(shepherd.stop().await?)
}
