//! `shepherdctl why`: what a machine waits for, and the commands that help it.

use std::time::Duration;

use anyhow::Context as _;
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd::bmdb::engine::intent::{DisruptionRequest, Permission};
use shepherd::bmdb::engine::session::Sessions;
use shepherd::model::facts::Recovery;
use shepherd::model::ids::ProcessId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::policy::DisruptionKind;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::time::after;
use shepherd::takeover::ssh_error::HostKeyChanged;

use super::{Site, agent, beat, details, fail, golden, healthy, key, pinned, refused};
use crate::harness::aloud::TestResult;

#[tokio::test]
async fn why_tells_a_machine_without_agent_what_it_waits_for() -> TestResult {
    let site = Site::create("cli_why_start").await?;
    let fresh = site.machine("fresh", "m-1").await?;
    golden("why_nobody_works", &site.ask(&["why", "m-1"])?);
    let nowhere = site.machine("nowhere", "m-2").await?;
    let unplaced = ProviderDetails { address: None, status: ProviderStatus::Provisioning, ..details() };
    site.change(nowhere, vec![FactChange::ProviderPolled { details: unplaced, unchanged: false }]).await?;
    golden("why_provisioning", &site.ask(&["why", "m-2"])?);
    let worker = site.sessions("initializer").await?;
    let work = worker.claim(Process::AgentStart, "fresh").await?;
    golden("why_under_way", &site.ask_wide(&["why", "fresh/m-1"])?);
    work.cancel("the test goes on").await?;
    for _ in 0..3 {
        fail(
            &site,
            fresh,
            Process::AgentStart,
            "192.0.2.7:22 refused the SSH connection: nothing listens there",
        )
        .await?;
    }
    golden("why_failing", &site.ask(&["why", &fresh.to_string()])?);
    golden("retry", &site.ask(&["retry", "m-1", "--reason", "plugged in"])?);
    golden("retry_again", &site.ask(&["retry", "m-1"])?);
    golden("why_retried", &site.ask(&["why", "m-1"])?);
    golden("timeline", &site.ask_wide(&["timeline", "m-1"])?);
    golden("timeline_limited", &site.ask_wide(&["timeline", "m-1", "--limit", "1"])?);
    site.change(fresh, vec![agent()]).await?;
    site.listen().await?;
    golden("why_agent_starting", &site.ask(&["why", "m-1"])?);
    Ok(worker.end().await?)
}

#[tokio::test]
async fn why_of_a_changed_host_key_leads_to_allowing_it() -> TestResult {
    let site = Site::create("cli_host_key").await?;
    let machine = site.machine("sim", "sim-0007").await?;
    let (old, new, other) = (key(1), key(2), key(3));
    golden(
        "allow_without_key",
        &site.ask(&["allow", "host-key", "sim-0007", "--fingerprint", &new.fingerprint()])?,
    );
    site.change(machine, vec![pinned(&old)]).await?;
    golden(
        "allow_without_refusal",
        &site.ask(&["allow", "host-key", "sim-0007", "--fingerprint", &new.fingerprint()])?,
    );
    let worker = site.sessions("initializer").await?;
    let work = worker.claim(Process::AgentStart, "sim").await?;
    let cause =
        HostKeyChanged { address: "192.0.2.7:22".into(), expected: vec![old.clone()], offered: new.clone() };
    let changes = vec![
        refused(&new),
        FactChange::NeedsHuman { obstacle: Obstacle::HostKeyChanged, reason: cause.to_string() },
    ];
    work.fail(changes, cause.to_string(), None).await?;
    golden("why_host_key_changed", &site.ask(&["why", "sim-0007"])?);

    let wrong = site.ask(&["allow", "host-key", "sim-0007", "--fingerprint", &other.fingerprint()])?;
    golden("allow_wrong_host_key", &wrong);
    let before = site.bmdb.host_key(machine).await?.context("no key")?;
    assert_eq!((before.key, before.rejected.map(|(key, _)| key)), (old, Some(new.clone())));

    let why = site.json(&["why", "sim-0007"])?;
    let command = why["advice"][0]["command"].as_str().context("no advice")?.to_owned();
    let words: Vec<&str> = command.split(' ').skip(1).chain(["--reason", "reinstalled"]).collect();
    golden("allow_host_key", &site.ask(&words)?);
    let after = site.bmdb.host_key(machine).await?.context("no key")?;
    assert_eq!((after.key, after.source.as_str(), after.rejected), (new.clone(), "allowed", None));
    let facts = site.bmdb.read_machine_snapshot(machine).await?.facts;
    assert!(facts.needs_human.is_none() && facts.backoffs.is_empty(), "{facts:?}");
    // It is due at once, and its reason does not mention keys any more.
    let work = worker.claim(Process::AgentStart, "sim").await?;
    work.cancel("the test goes on").await?;
    golden("why_host_key_allowed", &site.ask(&["why", "sim-0007"])?);
    golden(
        "allow_again",
        &site.ask(&["allow", "host-key", "sim-0007", "--fingerprint", &new.fingerprint()])?,
    );
    golden("timeline_host_key", &site.ask_wide(&["timeline", "sim-0007"])?);
    Ok(worker.end().await?)
}

#[tokio::test]
async fn allowing_a_host_key_leaves_other_calls_for_a_person_alone() -> TestResult {
    let site = Site::create("cli_other_cause").await?;
    let machine = site.machine("sim", "sim-0001").await?;
    let (old, new) = (key(1), key(2));
    let burning =
        FactChange::NeedsHuman { obstacle: Obstacle::Unknown, reason: "its disk is on fire".into() };
    site.change(machine, vec![pinned(&old), refused(&new), burning]).await?;
    fail(&site, machine, Process::Update, "the provider does not answer").await?;
    site.ask(&["allow", "host-key", "sim-0001", "--fingerprint", &new.fingerprint()])?;
    let facts = site.bmdb.read_machine_snapshot(machine).await?.facts;
    assert_eq!(site.bmdb.host_key(machine).await?.context("no key")?.key, new);
    assert!(facts.needs_human.is_some(), "the fire was forgotten");
    assert!(
        facts.backoffs.contains_key(&Process::Update),
        "a wait that has nothing to do with keys was forgotten"
    );
    Ok(())
}

#[tokio::test]
async fn why_follows_a_machine_through_silence_and_recovery() -> TestResult {
    let site = Site::create("cli_why_recovery").await?;
    let machine = site.machine("sim", "sim-0007").await?;
    site.change(machine, healthy()).await?;
    golden("why_nobody_listens", &site.ask(&["why", "sim-0007"])?);
    site.listen().await?;
    site.change(machine, vec![beat("boot-1", 2000)]).await?;
    golden("why_healthy", &site.ask(&["why", "sim-0007"])?);
    for (flags, expected) in [(&["--verbose"][..], true), (&["-v"], true), (&[], false)] {
        let text = site.ask(&[&["why", "sim-0007"][..], flags].concat())?;
        assert_eq!(text.contains("decided at"), expected, "{flags:?}: {text}");
    }
    site.advance(Duration::from_mins(12)).await?;
    site.listen().await?;
    golden("why_silent", &site.ask(&["why", "sim-0007"])?);

    let worker = site.sessions("recoverer").await?;
    let work = worker.claim(Process::Recovery, "sim").await?;
    let now = work.snapshot().await?.now;
    let brake = "brake: 40 of 50 machines in all fell silent within 10m, which is more likely our network";
    site.bmdb.set_recovery_brake("*", Some(brake)).await?;
    work.postpone(Vec::new(), after(now, Duration::from_mins(3)), brake).await?;
    golden("why_braked", &site.ask(&["why", "sim-0007"])?);
    site.bmdb.set_recovery_brake("*", None).await?;

    site.advance(Duration::from_mins(4)).await?;
    site.listen().await?;
    let work = worker.claim(Process::Recovery, "sim").await?;
    let now = work.snapshot().await?.now;
    let budget = "the budget to reboot the machine is used up (20 in 10m)";
    work.postpone(Vec::new(), after(now, Duration::from_mins(3)), budget).await?;
    golden("why_out_of_budget", &site.ask(&["why", "sim-0007"])?);

    site.advance(Duration::from_mins(4)).await?;
    site.listen().await?;
    let work = worker.claim(Process::Recovery, "sim").await?;
    let decided_on = work.snapshot().await?.now;
    let (_, policy) = site.bmdb.policy();
    let step = DisruptionRequest {
        rung: 1,
        disruption: DisruptionKind::Reboot,
        attempt: 1,
        deadline: policy.ladder[1].deadline,
        facts_read_at: decided_on,
        brake: None,
        provider: "sim".into(),
    };
    let Permission::Granted { recovery, .. } = work.begin_disruption(step).await? else {
        panic!("the reboot was refused");
    };
    golden("why_rebooting", &site.ask_wide(&["why", "sim-0007"])?);
    let next_at = after(decided_on, Duration::from_mins(2));
    let waiting = Recovery {
        next_check_at: next_at,
        note: "the reboot was requested; waits for its agent".into(),
        ..recovery
    };
    work.finish(vec![FactChange::Recovery(waiting)], "rebooted").await?;
    golden("why_recovering", &site.ask(&["why", "sim-0007"])?);

    site.advance(Duration::from_mins(30)).await?;
    let work = worker.claim(Process::Recovery, "sim").await?;
    let end = "tried in vain: restart-agent, reboot; last: no answer";
    work.finish(
        vec![
            FactChange::RecoveryCleared,
            FactChange::NeedsHuman { obstacle: Obstacle::LadderExhausted, reason: end.into() },
        ],
        end,
    )
    .await?;
    golden("why_needs_human", &site.ask(&["why", "sim-0007"])?);
    golden("retry_needs_human", &site.ask(&["retry", "sim-0007"])?);
    assert!(site.bmdb.read_machine_snapshot(machine).await?.facts.needs_human.is_none());
    Ok(worker.end().await?)
}

#[tokio::test]
async fn why_tells_of_stops_and_losses() -> TestResult {
    let site = Site::create("cli_why_stops").await?;
    site.listen().await?;
    let machine = site.machine("sim", "sim-0007").await?;
    site.change(machine, healthy()).await?;
    let hold = ["hold", "sim-0007", "--reason", "changing a disk"];
    golden("hold_until", &site.ask(&[&hold[..], &["--until", "2h", "--scope", "recovery"]].concat())?);
    golden("why_held_for_a_time", &site.ask_wide(&["why", "sim-0007"])?);
    golden("hold", &site.ask(&hold)?);
    golden("why_held", &site.ask_wide(&["why", "sim-0007"])?);
    golden("release", &site.ask(&["release", "sim-0007", "--reason", "disk changed"])?);
    golden("release_again", &site.ask(&["release", "sim-0007"])?);
    golden("hold_in_the_past", &site.ask(&[&hold[..], &["--until", "2020-01-01T00:00:00Z"]].concat())?);
    assert!(site.bmdb.read_machine_snapshot(machine).await?.facts.hold.is_none());
    golden("timeline_holds", &site.ask_wide(&["timeline", "sim-0007"])?);

    let odd = "the provider does not list it any more, and it still reports";
    site.change(machine, vec![FactChange::Quarantined(odd.into())]).await?;
    golden("why_quarantined", &site.ask(&["why", "sim-0007"])?);
    golden("release_quarantine", &site.ask(&["release", "sim-0007", "--quarantine"])?);
    assert!(site.bmdb.read_machine_snapshot(machine).await?.facts.quarantine.is_none());

    let lost = site.machine("fragile", "m-1").await?;
    let (sessions, _keeper_that_never_runs) =
        Sessions::new(site.bmdb.clone(), ProcessId::generate(), Duration::from_secs(30));
    let session = sessions.start("initializer", serde_json::json!({})).await?;
    let mut claimer = Claimer::new(sessions, Process::AgentStart, vec!["fragile".to_owned()]);
    let Claimed::Work(_work) = claimer.claim(&[session]).await? else { panic!("not due") };
    site.advance(Duration::from_mins(1)).await?;
    golden("why_about_to_be_freed", &site.ask_wide(&["why", &lost.to_string()])?);
    site.bmdb.reap().await?;
    golden("why_lost", &site.ask_wide(&["why", "m-1"])?);
    Ok(())
}
