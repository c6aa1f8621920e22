//! The phase in Rust and the phase in SQL are one function written twice: held together over ten
//! thousand sets of facts, most of them near or exactly at the limits where they could differ.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use chrono::TimeDelta;
use model::facts::{
    AgentStarted, HeartbeatFact, InstallationReport, InstallationRequest, MachineFacts, NeedsHuman,
    ProviderRecord, Quarantine, Recovery, Retirement,
};
use model::ids::MachineId;
use model::needs_human::Obstacle;
use model::phase::{Phase, phase_of};
use model::policy::Policy;
use model::provider_status::ProviderStatus;
use model::time::Timestamp;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

const SETS: usize = 10_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn phase_equals_its_twin_over_ten_thousand_sets_of_facts() -> TestResult {
    let kit = Kit::new("phase_twin").await?;
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let policy = Policy::default();
    let mut seen: BTreeMap<Phase, usize> = BTreeMap::new();
    let mut connection = kit.connection().await?;
    // Who listens is one for the fleet, so it varies by batch: nobody, long, not long, since exactly
    // the limit, and one who stopped.
    for (since, last_commit) in [
        (None, 0),
        (Some(7_200_000_000), 1_000_000),
        (Some(300_000_000), 1_000_000),
        (Some(600_000_000), 59_999_999),
        (Some(7_200_000_000), 60_000_000),
    ] {
        // One transaction, so that now() does not advance and facts can lie exactly on a limit.
        let mut transaction = connection.begin().await?;
        let now: Timestamp = sqlx::query_scalar("SELECT now()").fetch_one(&mut *transaction).await?;
        let listening = since.map(|since| now - TimeDelta::microseconds(since));
        if let Some(since) = listening {
            sqlx::query("INSERT INTO fleet_listening (shard, since, last_commit) VALUES (1, $1, $2)")
                .bind(since)
                .bind(now - TimeDelta::microseconds(last_commit))
                .execute(&mut *transaction)
                .await?;
        }
        let last_contact = listening.filter(|_| last_commit < 60_000_000);
        let sets: Vec<MachineFacts> =
            (0..SETS / 5).map(|_| some_facts(&mut random, now, last_contact)).collect();
        store(&mut transaction, &sets).await?;
        let twin = phases_by_sql(&mut transaction).await?;
        assert_eq!(twin.len(), sets.len());
        for facts in &sets {
            let phase = phase_of(facts, &policy, now);
            assert_eq!(
                twin.get(&facts.machine.0),
                Some(&phase.to_string()),
                "at {now}, seed {seed}: {facts:#?}"
            );
            *seen.entry(phase).or_default() += 1;
        }
        transaction.rollback().await?;
    }
    for phase in Phase::ALL {
        if matches!(phase, Phase::Installing | Phase::Installed) {
            assert_eq!(seen.get(&phase), None, "installing is not available in this release");
            continue;
        }
        assert!(seen.get(&phase).is_some_and(|count| *count >= 20), "hardly any {phase} among {seen:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn facts_are_read_as_they_were_stored_and_counted_and_indexed_by_their_phase() -> TestResult {
    let kit = Kit::new("phase_counts").await?;
    let mut random = StdRng::seed_from_u64(7);
    let mut connection = kit.connection().await?;
    let now: Timestamp = sqlx::query_scalar("SELECT now()").fetch_one(&mut connection).await?;
    let since = now - TimeDelta::hours(3);
    let mut sets: Vec<MachineFacts> = (0..400).map(|_| some_facts(&mut random, now, Some(since))).collect();
    store(&mut connection, &sets).await?;
    sqlx::query(
        "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at,
                phase_index, phase_since, rules_version, policy_version, version, fence, losses)
         SELECT machine_id, lane, 'rack', 1, 0, FALSE, '', '', 'New', now(), 1, 0, 0, 0, 0
         FROM machine, (VALUES ('access'), ('observe')) l (lane)",
    )
    .execute(&mut connection)
    .await?;
    // So long after, every limit is passed and time alone changes no phase any more.
    kit.database.advance(Duration::from_hours(10)).await?;
    // Nobody stops listening, however long the host takes for the following.
    sqlx::query(
        "INSERT INTO fleet_listening (shard, since, last_commit)
         VALUES (1, $1, clock_timestamp() + INTERVAL '1 hour')",
    )
    .bind(since)
    .execute(&mut connection)
    .await?;

    let mut read = kit.bmdb.read_snapshot_page(MachineId(Uuid::nil()), 1_000).await?;
    sets.sort_by_key(|facts| facts.machine);
    read.sort_by_key(|snapshot| snapshot.facts.machine);
    let (policy, mut counted) = (Policy::default(), BTreeMap::new());
    for (stored, read) in sets.iter().zip(&read) {
        assert_eq!(stored, &read.facts);
        *counted.entry(phase_of(&read.facts, &policy, read.now)).or_insert(0_u64) += 1;
    }
    assert_eq!(kit.bmdb.count_phases().await?, counted);

    kit.sweep().await?;
    let indexed: Vec<(String, i64)> =
        sqlx::query_as("SELECT phase_index, count(*) FROM machine_due WHERE lane = 'access' GROUP BY 1")
            .fetch_all(&kit.pool)
            .await?;
    let indexed: BTreeMap<Phase, u64> = indexed
        .into_iter()
        .map(|(phase, count)| Ok((phase.parse()?, u64::try_from(count)?)))
        .collect::<anyhow::Result<_>>()?;
    assert_eq!(indexed, counted, "the index is not what the facts say");
    Ok(())
}

/// The twin's inner statement, by machine.
async fn phases_by_sql(connection: &mut PgConnection) -> anyhow::Result<BTreeMap<Uuid, String>> {
    let text = include_str!("../../../../sql/fleet/count_phases.sql");
    let (_, rest) = text.split_once("FROM (\n").context("the beginning of the inner statement")?;
    let (inner, _) = rest.rsplit_once(") each").context("its end")?;
    let statement = format!("SELECT machine_id, phase FROM ({inner}) each");
    let rows: Vec<(Uuid, String)> = sqlx::query_as(AssertSqlSafe(statement)).fetch_all(connection).await?;
    Ok(rows.into_iter().collect())
}

/// A time before `now`, often within a microsecond of one of the limits.
fn some_time(random: &mut StdRng, now: Timestamp) -> Timestamp {
    let limits = [600_000_000_i64, 1_800_000_000];
    let ago = match random.random_range(0..4) {
        0 => *limits.choose(random).unwrap_or(&0) + random.random_range(-1..=1),
        1 => random.random_range(0..7_200_000_000),
        2 => random.random_range(0..1_000_000),
        _ => random.random_range(500_000_000..2_000_000_000),
    };
    now - TimeDelta::microseconds(ago)
}

fn some_facts(random: &mut StdRng, now: Timestamp, listening: Option<Timestamp>) -> MachineFacts {
    let machine = MachineId(Uuid::from_u128(random.random()));
    let mut facts = MachineFacts::empty(machine, now);
    facts.listening_since = listening;
    let often = random.random_bool(0.9).then_some(());
    facts.provider_record = often.map(|()| ProviderRecord {
        provider: "rack".into(),
        provider_id: machine.to_string(),
        reservation: None,
        address: random.random_bool(0.8).then(|| "192.0.2.1".into()),
        ssh_port: random.random_bool(0.3).then_some(2222),
        ssh_user: None,
        location: random.random_bool(0.3).then(|| "here".into()),
        status: match random.random_range(0..8) {
            0 => ProviderStatus::Other("Hibernating".into()),
            n => ProviderStatus::NAMED[n % ProviderStatus::NAMED.len()].clone(),
        },
        acquired_at: some_time(random, now),
        polled_at: random.random_bool(0.5).then(|| some_time(random, now)),
        unchanged: random.random_bool(0.5),
    });
    facts.agent_started = random.random_bool(0.75).then(|| AgentStarted {
        started_at: some_time(random, now),
        public_key: vec![1; 32],
        boot_id: random.random_bool(0.5).then(|| "b".into()),
        fence: 3,
    });
    facts.heartbeat = random.random_bool(0.7).then(|| HeartbeatFact {
        received_at: some_time(random, now),
        boot_id: "b".into(),
        incarnation: "i".into(),
        sequence: random.random_range(0..i64::MAX),
    });
    facts.installation_request =
        random.random_bool(0.4).then(|| InstallationRequest { generation: random.random_range(1..3) });
    facts.installation_report = random.random_bool(0.4).then(|| InstallationReport {
        generation: random.random_range(1..3),
        succeeded: random.random_bool(0.5),
    });
    facts.quarantine =
        random.random_bool(0.05).then(|| Quarantine { since: some_time(random, now), reason: "q".into() });
    facts.needs_human = random.random_bool(0.05).then(|| NeedsHuman {
        since: some_time(random, now),
        reason: "n".into(),
        obstacle: Obstacle::NAMED.choose(random).cloned().unwrap_or(Obstacle::Unknown),
        reporting_since: random.random_bool(0.5).then(|| some_time(random, now)),
    });
    facts.recovery = random.random_bool(0.05).then(|| Recovery {
        started_at: some_time(random, now),
        rung: 1,
        last_action: None,
        attempts: 0,
        next_check_at: some_time(random, now),
        note: "climbing".into(),
        obstacle: random.random_bool(0.5).then_some(Obstacle::LoginRefused),
    });
    facts.retirement = random.random_bool(0.05).then(|| Retirement {
        finished_at: random.random_bool(0.5).then(|| some_time(random, now)),
        wipe: random.random_bool(0.5),
        ..Retirement::new("old".into(), "kim".into(), some_time(random, now))
    });
    facts
}

/// Stores sets of facts, a table at a time.
async fn store(connection: &mut PgConnection, sets: &[MachineFacts]) -> anyhow::Result<()> {
    let rows = |of: &dyn Fn(&MachineFacts) -> Option<Value>| -> Value {
        sets.iter()
            .filter_map(|facts| {
                let mut row = of(facts)?;
                row["machine_id"] = json!(facts.machine);
                Some(row)
            })
            .collect()
    };
    let key = format!("\\x{}", "01".repeat(32));
    let provided = |facts: &MachineFacts| {
        let p = facts.provider_record.as_ref()?;
        Some(json!({"provider": p.provider, "provider_id": p.provider_id, "address": p.address,
            "ssh_port": p.ssh_port, "location": p.location, "status": p.status.as_str(),
            "provided_at": p.acquired_at, "looked_at": p.polled_at, "unchanged": p.unchanged}))
    };
    let started = |facts: &MachineFacts| {
        let a = facts.agent_started.as_ref()?;
        Some(json!({"started_at": a.started_at, "public_key": key, "boot_id": a.boot_id, "fence": a.fence}))
    };
    let heartbeat = |facts: &MachineFacts| {
        let h = facts.heartbeat.as_ref()?;
        Some(
            json!({"at": h.received_at, "boot_id": h.boot_id, "incarnation": h.incarnation, "sequence": h.sequence}),
        )
    };
    let request = |facts: &MachineFacts| {
        let r = facts.installation_request?;
        Some(json!({"generation": r.generation, "artefact_url": "u", "artefact_sha256": key,
            "requested_at": facts.created_at}))
    };
    let report = |facts: &MachineFacts| {
        let r = facts.installation_report?;
        Some(json!({"generation": r.generation, "succeeded": r.succeeded, "reported_at": facts.created_at}))
    };
    let recovery = |facts: &MachineFacts| {
        let r = facts.recovery.as_ref()?;
        Some(
            json!({"started_at": r.started_at, "rung": r.rung, "tries": r.attempts, "next_at": r.next_check_at,
            "note": r.note, "obstacle": r.obstacle.as_ref().map(Obstacle::as_str)}),
        )
    };
    let retirement = |facts: &MachineFacts| {
        let r = facts.retirement.as_ref()?;
        Some(json!({"reason": r.reason, "requested_at": r.requested_at, "requested_by": r.by,
            "wipe": r.wipe, "keep_authority": false, "finished_at": r.finished_at}))
    };
    for (table, rows) in [
        ("machine", rows(&|facts| Some(json!({"created_at": facts.created_at})))),
        ("machine_provided", rows(&provided)),
        ("machine_agent_started", rows(&started)),
        ("machine_agent_heartbeat", rows(&heartbeat)),
        ("machine_os_installation_request", rows(&request)),
        ("machine_os_installation_report", rows(&report)),
        (
            "machine_quarantine",
            rows(&|f| f.quarantine.as_ref().map(|q| json!({"since": q.since, "reason": q.reason}))),
        ),
        (
            "machine_needs_human",
            rows(&|f| {
                f.needs_human.as_ref().map(|n| {
                    json!({"since": n.since, "reason": n.reason,
                "obstacle": n.obstacle.as_str(), "reporting_since": n.reporting_since})
                })
            }),
        ),
        ("machine_recovery", rows(&recovery)),
        ("machine_retirement", rows(&retirement)),
    ] {
        let statement =
            format!("INSERT INTO {table} SELECT * FROM jsonb_populate_recordset(NULL::{table}, $1)");
        sqlx::query(AssertSqlSafe(statement)).bind(rows).execute(&mut *connection).await.context(table)?;
    }
    Ok(())
}
