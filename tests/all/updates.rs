//! Roll-outs of releases to real role servers: a good one reaches all of them one after the other, a bad one the first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::fleet::artefact::upload::{SignedUpload, UploadState};
use shepherd::bmdb::fleet::roll_out::{NewRollOut, RollOutChange, list_roll_outs};
use shepherd::bmdb::orders::order::{Actor, Order, request_digest};
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::roll_outs as rolling;
use shepherd::model::artefact::PIECE_BYTES;
use shepherd::model::ids::{MachineId, ProcessId};
use shepherd::model::issues::find_issues;
use shepherd::model::role_declaration::Sha256;
use shepherd::model::roll_out_view::RollOutView;
use shepherd::model::signed_artefact::signature::ArtefactSignature;
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;
use shepherd::model::signed_artefact::signing_key::SigningKey;
use shepherd::model::time::Span;
use shepherd::roleserver::process::program_digest;
use shepherd::server::callback::callback_server::CallbackSettings;
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, enrolled_with_keys, settings};
use crate::harness::line::Line;
use crate::harness::minisign::{Signer, release_comment};
use crate::harness::postgres::TestDatabase;
use crate::harness::program::PATIENCE;
use crate::roleserver::Machine;

mod refusals;

/// Role servers of a fleet, and a shepherd that receives their heartbeats and rolls out releases.
struct Fleet {
    listener: Listener,
    pool: PgPool,
    machines: Vec<(MachineId, Arc<Machine>)>,
    stop: CancellationToken,
    keep: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    _line: Option<Line>,
    _directory: tempfile::TempDir,
    _database: TestDatabase,
}

fn order(reason: &str) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "test".to_owned(),
        target: "an update".to_owned(),
        reason: reason.to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}

impl Fleet {
    async fn start(name: &str, count: usize) -> Result<Self> {
        Self::start_with(name, count, SigningConfiguration::default(), Vec::new(), None).await
    }

    /// The same with signing keys. The machines pin those in `pinned` at their enrolment, or those of the shepherd if
    /// there are none. They reach the shepherd over `line`, if there is one.
    async fn start_with(
        name: &str,
        count: usize,
        signing: SigningConfiguration,
        pinned: Vec<String>,
        line: Option<Line>,
    ) -> Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let settings = CallbackSettings {
            signing: Arc::new(signing),
            endpoints: line.iter().map(|line| format!("127.0.0.1:{}", line.port())).collect(),
            ..settings(directory.path())?
        };
        let listener = Listener::start(&database, settings).await?;
        if let Some(line) = &line {
            line.lead_to(listener.server.local_addr.port());
        }
        let pool = database.pool().await?;
        let bmdb = listener.bmdb.clone();
        bmdb.change_policy("test", |policy| {
            policy.heartbeat_interval = Span::seconds(1);
            // What machines accept is tested here. One test forbids it.
            policy.allow_unsigned_releases = true;
        })
        .await?;
        let mut machines = Vec::new();
        for _ in 0..count {
            let create = Machine::with_own_program;
            machines.push(enrolled_with_keys(&listener, &pool, create, pinned.clone()).await?);
        }
        machines.sort_by_key(|(machine, _)| machine.0);
        let (sessions, keeper) = Sessions::new(bmdb, ProcessId::generate(), Duration::from_secs(30));
        let (stop, keep) = (CancellationToken::new(), CancellationToken::new());
        let keeper = tokio::spawn(keeper.run(&keep)?);
        let metrics = ManagerMetrics::register(&listener.metrics);
        let rolling = tokio::spawn(rolling::run_roll_outs(sessions, metrics, stop.clone()));
        let fleet = Self {
            listener,
            pool,
            machines,
            stop,
            keep,
            tasks: vec![rolling, keeper],
            _line: line,
            _directory: directory,
            _database: database,
        };
        fleet
            .until("all have reported their release", async || {
                let text = "SELECT count(*) FROM machine_release_report JOIN machine_due USING (machine_id)
                        WHERE lane = 'access' AND phase_index = 'Ready'";
                let value: i64 = sqlx::query_scalar(text).fetch_one(&fleet.pool).await?;
                Ok(usize::try_from(value)? == count)
            })
            .await?;
        Ok(fleet)
    }

    async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !holds().await? {
            if Instant::now() > end {
                let machines = "SELECT roll_out_id, name, state, coalesce(message, '')
                                FROM roll_out_machine JOIN (SELECT machine_id, provider_id AS name FROM machine_provided) p
                                USING (machine_id)";
                let machines: Vec<(String, String, String, String)> =
                    sqlx::query_as(machines).fetch_all(&self.pool).await?;
                bail!("waited in vain until {what}: {machines:#?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// What `issues` shows of machines that refused a release.
    async fn refused_releases(&self) -> Result<Vec<String>> {
        let issues = find_issues(&self.listener.bmdb.read_issue_inputs().await?);
        let refused = issues.into_iter().filter(|issue| issue.id == "release-refused");
        Ok(refused.map(|issue| issue.message).collect())
    }

    async fn add(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.add_signed(name, bytes, None).await
    }

    async fn add_signed(&self, name: &str, bytes: &[u8], signed: Option<SignedUpload>) -> Result<()> {
        let sha256 = Sha256(request_digest(bytes));
        let bmdb = &self.listener.bmdb;
        if let UploadState::Missing(missing) =
            bmdb.begin_artefact_upload(sha256, u64::try_from(bytes.len())?).await?
        {
            let pieces: Vec<&[u8]> = bytes.chunks(usize::try_from(PIECE_BYTES)?).collect();
            for number in missing {
                bmdb.store_artefact_piece(sha256, number, pieces[usize::try_from(number)?].to_vec()).await?;
            }
        }
        bmdb.add_signed_artefact(order("a release"), sha256, name.to_owned(), signed).await?;
        Ok(())
    }

    async fn roll_out(&self, release: &str, parallelism: u32) -> Result<String> {
        let new = NewRollOut {
            release: release.to_owned(),
            selector: "".parse().map_err(anyhow::Error::msg)?,
            parallelism,
            deadline_seconds: 60,
        };
        let carried = self.listener.bmdb.create_roll_out(order("a test"), new).await?;
        let id = carried.after.as_ref().and_then(|after| after["update"].as_str());
        Ok(id.context("an id")?.to_owned())
    }

    async fn update(&self, id: &str) -> Result<RollOutView> {
        let id = id.to_owned();
        let look = self
            .listener
            .bmdb
            .transact_read_only_with(id, move |tx, id| Box::pin(list_roll_outs(tx, Some(id))));
        look.await?.0.pop().context("no such update")
    }

    /// The program at each machine's stable path.
    fn programs(&self) -> Result<Vec<String>> {
        self.machines.iter().map(|(_, host)| Ok(program_digest(&host.program)?)).collect()
    }

    async fn events(&self, machine: MachineId) -> Result<Vec<String>> {
        let text = "SELECT event FROM history WHERE machine_id = $1 AND event LIKE 'Release%' ORDER BY at";
        Ok(sqlx::query_scalar(text).bind(machine.0).fetch_all(&self.pool).await?)
    }

    async fn stop(self) -> Result<()> {
        self.stop.cancel();
        let mut tasks = self.tasks.into_iter();
        tasks.next().context("a task")?.await?;
        self.listener.stop().await?;
        self.keep.cancel();
        for task in tasks {
            task.await?;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn good_release_reaches_every_machine_one_after_the_other() -> TestResult {
    let fleet = Fleet::start("updates_good", 3).await?;
    let processes: Vec<_> =
        fleet.machines.iter().map(|(_, host)| Ok(host.agent()?.instance)).collect::<Result<_>>()?;
    let release = [&std::fs::read(&fleet.machines[0].1.program)?[..], b"another"].concat();
    let digest = hex::encode(request_digest(&release));
    fleet.add("1.4", &release).await?;

    // The last one is held: the roll-out waits for it, and the others are not affected.
    let held = fleet.machines[2].0;
    sqlx::query(
        "INSERT INTO machine_hold VALUES ($1, 'everything', 'a disk', 'lee', clock_timestamp(), NULL)",
    )
    .bind(held.0)
    .execute(&fleet.pool)
    .await?;
    let id = fleet.roll_out("1.4", 1).await?;
    let refused = fleet.roll_out("1.4", 1).await.err().context("two at once")?.to_string();
    assert!(refused.contains(&format!("is in the update {id}, which has not ended")), "{refused}");
    let refused = fleet.listener.bmdb.delete_artefact(order("r"), "1.4".to_owned()).await;
    let refused = refused.err().context("a release was removed that is rolled out")?.to_string();
    assert!(refused.contains(&format!("the update {id} rolls it out")), "{refused}");
    fleet
        .until("two have it", async || {
            let update = fleet.update(&id).await?;
            let ordered = update.machines.iter().filter(|machine| machine.state == "ordered").count();
            anyhow::ensure!(ordered <= 1, "more than one at a time: {update:#?}");
            anyhow::ensure!(update.pause_reason.is_none(), "it stands still: {update:#?}");
            Ok(update.format_counts() == "done 2, waiting 1")
        })
        .await?;
    let waits = fleet.update(&id).await?.machines[2].message.clone();
    assert_eq!(waits.as_deref(), Some("lee holds it: a disk"));
    let why =
        fleet.listener.bmdb.machine_view(held).await?.roll_out_note.context("no note on its roll-out")?;
    assert!(why.starts_with(&format!("it is to run the release 1.4 (update {id}); lee holds it")), "{why}");

    sqlx::query("DELETE FROM machine_hold").execute(&fleet.pool).await?;
    fleet
        .until("all have it", async || Ok(fleet.update(&id).await?.outcome.as_deref() == Some("finished")))
        .await?;
    assert_eq!(fleet.update(&id).await?.format_counts(), "done 3");
    assert_eq!(fleet.programs()?, vec![digest.clone(); 3]);
    for ((machine, host), process) in fleet.machines.iter().zip(processes) {
        assert_eq!(host.agent()?.instance, process, "it is the same process");
        assert_eq!(fleet.events(*machine).await?, ["ReleaseOrdered", "ReleaseRuns"]);
    }
    // One after the other in time: no order before the end of the previous one.
    let overlaps: i64 = sqlx::query_scalar(
        "WITH steps AS (SELECT machine_id, min(at) AS first, max(at) AS last FROM history
                        WHERE event LIKE 'Release%' GROUP BY machine_id)
         SELECT count(*) FROM steps a JOIN steps b ON a.machine_id < b.machine_id
         WHERE a.first < b.last AND b.first < a.last",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(overlaps, 0, "two machines were updated at once");

    // All roll-outs are listed without their machines, which may be many.
    let look = fleet.listener.bmdb.transact_read_only(|tx| Box::pin(list_roll_outs(tx, None)));
    let all = look.await?.0;
    assert_eq!((all[0].format_counts().as_str(), all[0].machines.len()), ("done 3", 0));

    // A failed roll-out is no reason for a takeover to undo the previous one.
    fleet.add("bad", b"#!/bin/sh\nexit 1\n").await?;
    let bad = fleet.roll_out("bad", 1).await?;
    fleet
        .until("one has given it up", async || {
            Ok(fleet.update(&bad).await?.format_counts() == "failed 1, waiting 2")
        })
        .await?;
    for (machine, _) in &fleet.machines {
        assert_eq!(fleet.listener.bmdb.read_updated_release(*machine).await?.as_ref(), Some(&digest));
    }
    Ok(fleet.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_release_stops_after_the_first_machine_until_somebody_decides() -> TestResult {
    let fleet = Fleet::start("updates_bad", 3).await?;
    let before = fleet.programs()?;
    fleet.add("bad", b"#!/bin/sh\nexit 1\n").await?;
    let id = fleet.roll_out("bad", 1).await?;
    fleet
        .until("the first one has failed", async || {
            let update = fleet.update(&id).await?;
            anyhow::ensure!(
                update.pause_reason.is_some() || !update.format_counts().contains("failed"),
                "{update:#?}"
            );
            Ok(update.format_counts() == "failed 1, waiting 2")
        })
        .await?;
    let update = fleet.update(&id).await?;
    // The roll-out waits for it no more, so it gets no more orders.
    let requested: Vec<bool> =
        sqlx::query_scalar("SELECT withdrawn FROM release_order").fetch_all(&fleet.pool).await?;
    assert_eq!(requested, [true]);
    let why = update.pause_reason.clone().context("a reason")?;
    assert!(why.starts_with(&update.machines[0].name) && why.contains("it ended before a shepherd"), "{why}");
    assert_eq!(fleet.events(fleet.machines[0].0).await?, ["ReleaseOrdered", "ReleaseFailed"]);

    // After it is resumed it continues with the next machine, and stops there again.
    fleet.listener.bmdb.change_roll_out(order("a try"), id.clone(), RollOutChange::Resume).await?;
    fleet
        .until("it stands still again", async || {
            Ok(fleet.update(&id).await?.format_counts() == "failed 2, waiting 1")
        })
        .await?;
    assert!(fleet.update(&id).await?.pause_reason.is_some());
    fleet.listener.bmdb.change_roll_out(order("it is bad"), id.clone(), RollOutChange::Abort).await?;
    let update = fleet.update(&id).await?;
    assert_eq!((update.stage(), update.format_counts().as_str()), ("aborted", "failed 2, skipped 1"));
    assert_eq!(fleet.programs()?, before, "every machine has the former release");
    assert!(fleet.events(fleet.machines[2].0).await?.is_empty());
    Ok(fleet.stop().await?)
}

/// The signature of a file, as a person uploads it beside the file.
fn signed(signer: &Signer, bytes: &[u8], comment: &str) -> Result<SignedUpload> {
    let signature = ArtefactSignature::parse(&signer.sign(bytes, comment)?)?;
    Ok(SignedUpload { signature, key: SigningKey::parse(&signer.public_key()?).map_err(anyhow::Error::msg)? })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signed_release_reaches_machines_and_one_without_a_valid_signature_none() -> TestResult {
    let (signer, thief) = (Signer::new()?, Signer::new()?);
    let signing = SigningConfiguration::parse(Some(&signer.public_file()?), Vec::new());
    let signing = signing.map_err(anyhow::Error::msg)?.with_signed_declarations(true);
    let fleet = Fleet::start_with("updates_signed", 1, signing, Vec::new(), None).await?;
    let state = fleet.machines[0].1.state();
    fleet
        .until("a heartbeat has pinned that declarations are signed", async || {
            Ok(state.read_signing_trust()?.is_some_and(|trust| trust.requires_signed_declarations))
        })
        .await?;
    let before = fleet.programs()?;
    let program = std::fs::read(&fleet.machines[0].1.program)?;
    let (release, other) = ([&program[..], b"2"].concat(), [&program[..], b"3"].concat());
    let comment = release_comment("1.4.0", "1.4.0");

    // A signature of another file, and one that says that it is something else.
    let of_another = signed(&signer, &other, &comment)?;
    let refused = fleet.add_signed("1.4", &release, Some(of_another)).await.err().context("another file")?;
    assert!(refused.to_string().contains("it was not added: its signature is not valid"), "{refused}");
    let as_bundle = signed(&signer, &release, &comment.replace("kind=release", "kind=bundle"))?;
    let refused = fleet.add_signed("1.4", &release, Some(as_bundle)).await.err().context("a bundle")?;
    assert!(refused.to_string().contains("for kind bundle, and release is expected"), "{refused}");

    // Unsigned, and then with a signature of a key that no machine has pinned, as a thief of the database stores it.
    fleet.add("1.4", &release).await?;
    for text in ["it is not signed", "which is not one of the pinned keys"] {
        let id = fleet.roll_out("1.4", 1).await?;
        fleet
            .until("the machine has refused it", async || Ok(fleet.update(&id).await?.outcome.is_some()))
            .await?;
        assert_eq!(fleet.update(&id).await?.format_counts(), "failed 1");
        let message = fleet.update(&id).await?.machines[0].message.clone().context("no message")?;
        assert!(message.contains(text), "{message}");
        assert_eq!(fleet.programs()?, before);
        let issues = fleet.refused_releases().await?;
        assert!(issues.len() == 1 && issues[0].contains(text), "issues: {issues:?}");
        fleet.add_signed("1.4", &release, Some(signed(&thief, &release, &comment)?)).await?;
    }

    fleet.listener.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = false).await?;
    fleet.add("unsigned", &other).await?;
    let refused = fleet.roll_out("unsigned", 1).await.err().context("it is not signed")?.to_string();
    assert!(refused.contains("unsigned cannot be rolled out: it is not signed"), "{refused}");
    fleet.add_signed("1.4", &release, Some(signed(&signer, &release, &comment)?)).await?;
    let id = fleet.roll_out("1.4", 1).await?;
    fleet
        .until("it has the signed release", async || {
            Ok(fleet.update(&id).await?.outcome.as_deref() == Some("finished"))
        })
        .await?;
    assert_eq!(fleet.programs()?, [hex::encode(request_digest(&release))]);
    assert!(fleet.refused_releases().await?.is_empty(), "it is over");
    let recorded =
        "SELECT count(*) FROM audit WHERE outcome = 'changed' AND after::TEXT LIKE '%version=1.4.0%'";
    let recorded: i64 = sqlx::query_scalar(recorded).fetch_one(&fleet.pool).await?;
    assert_eq!(recorded, 2, "the thief's signature and the other one");
    Ok(fleet.stop().await?)
}
