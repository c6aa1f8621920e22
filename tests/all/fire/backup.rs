//! A database restored from a backup as `docs/backup.md` describes, and a second database on the same provider: both
//! repeat nothing that was done, and get the reason why they are rejected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd::bmdb::connection::private_postgres::programs;

use crate::fire::{Form, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, Program, endpoint};

const FLAGS: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_silence_timeout=15s",
    "--recovery_brake_fraction=0.9",
    "--recovery_ladder=restart-agent:20s:3",
];

/// The commands of the document, in its order: one text per block.
fn commands_of_the_document() -> Vec<String> {
    let text = include_str!("../../../docs/backup.md");
    let mut blocks = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines().map(str::trim_start) {
        match (&mut block, line) {
            (None, "```sh") => block = Some(String::new()),
            (Some(_), "```") => blocks.extend(block.take()),
            (Some(block), line) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, _) => {}
        }
    }
    blocks
}

/// An operator's shell beside the server.
struct Shell {
    directory: PathBuf,
    path: String,
    sockets: String,
    url: String,
}

impl Shell {
    fn new(directory: &Path, server: &PrivatePostgres) -> Result<Self> {
        let url = server.url("bmdb");
        let options: sqlx::postgres::PgConnectOptions = url.parse()?;
        let sockets = options.get_socket().context("a socket")?.display().to_string();
        let programs = programs::find_programs();
        let programs = programs.first().context("PostgreSQL is installed")?;
        let postgres = programs.path("pg_dump").parent().context("a directory")?.display().to_string();
        let ours = Path::new(env!("CARGO_BIN_EXE_shepherdctl")).parent().context("a directory")?;
        let path = format!("{}:{postgres}:{}", ours.display(), std::env::var("PATH")?);
        Ok(Self { directory: directory.to_owned(), path, sockets, url })
    }

    /// The output of the commands, on both channels; an error if one failed.
    fn run(&self, commands: &str) -> Result<String> {
        let output = Command::new("sh")
            .args(["-e", "-u", "-c", commands])
            .current_dir(&self.directory)
            .env("PATH", &self.path)
            .env("PGHOST", &self.sockets)
            .env("PGUSER", "postgres")
            .env("SHEPHERD_BMDB_URL", &self.url)
            .output()?;
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{commands} ended with {}: {text}", output.status);
        Ok(text)
    }
}

/// Fences that each machine accepted, in their order.
fn accepted_fences(journal: &[Value]) -> BTreeMap<String, Vec<i64>> {
    let mut started: BTreeMap<u64, (String, i64)> = BTreeMap::new();
    let mut accepted: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for line in journal {
        let Some(call) = line["call"].as_u64() else { continue };
        if line["phase"] == "start" && line["what"] == "enroll" {
            let machine = line["machine"].as_str().unwrap_or_default().to_owned();
            started.insert(call, (machine, line["arguments"]["fence"].as_i64().unwrap_or(0)));
        } else if line["phase"] == "end"
            && line["outcome"] == "ok"
            && let Some((machine, fence)) = started.remove(&call)
        {
            accepted.entry(machine).or_default().push(fence);
        }
    }
    accepted
}

/// Orders that were sent to a machine, with any answer.
fn orders(journal: &[Value], machine: &str) -> usize {
    let sent = journal.iter().filter(|line| line["phase"] == "start" && line["machine"] == machine);
    sent.filter(|line| ["enroll", "reboot", "power"].iter().any(|what| line["what"] == *what)).count()
}

/// Calls of this kind that the simulator has received.
fn calls(journal: &[Value], what: &str) -> usize {
    journal.iter().filter(|line| line["phase"] == "start" && line["what"] == what).count()
}

struct Site {
    server: PrivatePostgres,
    shell: Shell,
    fleet: Fleet,
    _directory: tempfile::TempDir,
}

impl Site {
    async fn start(test_name: &str, machines: usize) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("fire-").tempdir()?;
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let options = PrivatePostgresOptions { storage: ServerStorage::Temporary, max_connections: 200 };
        let server = PrivatePostgres::start(options).await?;
        server.create_database("bmdb").await?;
        let shell = Shell::new(directory.path(), &server)?;
        let machines = machines.to_string();
        let flags =
            ["--machine_count", &machines, "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
        let url = server.url("bmdb");
        let fleet = Fleet::start_at(test_name, &flags, |_| Ok(url)).await?;
        Ok(Self { server, shell, fleet, _directory: directory })
    }

    async fn stop(self) -> Result<()> {
        self.fleet.pool.close().await;
        drop(self.fleet);
        self.server.stop().await?;
        Ok(())
    }
}

fn ready(fleet: &Fleet, name: &str, machines: &str, endpoints: &[String]) -> Result<Program> {
    let most = format!("--provisioner_max_machines={machines}");
    fleet.shepherd(name, endpoints, &[&FLAGS, [most.as_str()].as_slice()].concat())
}

/// Creates four more machines, and kills three agents, which are recovered. Returns those three.
async fn half_a_day_of_work(fleet: &Fleet, endpoints: &[String]) -> Result<Vec<String>> {
    let second = ready(fleet, "second", "12", endpoints)?;
    fleet
        .until(
            "twelve are Ready",
            "SELECT count(*) = 12 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'",
        )
        .await?;
    let known: Vec<String> =
        sqlx::query_scalar("SELECT provider_id FROM machine_provided ORDER BY provided_at LIMIT 3")
            .fetch_all(&fleet.pool)
            .await?;
    for round in 1..=Form::of_this_run().pick(1, 2) {
        for machine in &known {
            fleet.strike(machine, "kill").await?;
        }
        let done = match round {
            1 => {
                "SELECT count(DISTINCT machine_id) = 3 FROM intent
                 WHERE kind = 'restart-agent' AND settled_at IS NOT NULL
                   AND machine_id IN (SELECT machine_id FROM machine_provided ORDER BY provided_at LIMIT 3)"
            }
            _ => {
                "SELECT count(*) = 3 FROM (
                     SELECT machine_id FROM intent
                     WHERE kind = 'restart-agent' AND settled_at IS NOT NULL
                       AND machine_id IN (SELECT machine_id FROM machine_provided ORDER BY provided_at LIMIT 3)
                     GROUP BY machine_id HAVING count(*) >= 2) twice"
            }
        };
        fleet.until("the three are brought back", done).await?;
        fleet.until("all are Ready", ALL_READY).await?;
    }
    end(fleet, second).await?;
    Ok(known)
}

/// An operator who has not read the output of `why` retries again and again, until our fences are higher than those
/// that the machines have seen.
async fn try_in_vain(fleet: &Fleet, shell: &Shell, machines: [&String; 2]) -> Result<i64> {
    let tries = Form::of_this_run().pick(5, 20);
    let fences =
        "SELECT sum(fence)::INT8 FROM machine_due WHERE lane = 'access' AND phase_index = 'NeedsHuman'";
    for _ in 0..tries {
        let before = count(fleet, fences).await?;
        for machine in machines {
            shell.run(&format!("shepherdctl retry {machine}"))?;
        }
        let deadline = Instant::now() + PATIENCE;
        while count(fleet, NEED_HUMAN).await? < 2 || count(fleet, fences).await? < before + 2 {
            ensure!(
                Instant::now() < deadline,
                "tried again, and it does not end with a person\n{}",
                fleet.explain().await?
            );
            assert_eq!(count(fleet, OLD_FENCE_TAKEN).await?, 0, "a machine took an old fence");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(tries)
}

/// The backup knows of no step that was ever taken: a step that is taken from it has an old fence.
const OLD_FENCE_TAKEN: &str =
    "SELECT count(*) FROM intent WHERE kind = 'restart-agent' AND outcome LIKE 'done: %'";
/// Machines that wait for a person.
const NEED_HUMAN: &str =
    "SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'NeedsHuman'";

/// For a machine that gets no orders, `why` states which fence it has seen, and what to do.
fn holding_back_is_explained(shell: &Shell, machine: &str) -> Result<()> {
    let why = shell.run(&format!("shepherdctl why {machine}"))?;
    ensure!(
        why.contains("has seen fence") && why.contains("  shepherdctl declare restored --reason"),
        "{why}"
    );
    Ok(())
}

/// `why` states for a machine that was created after the backup that this database did not create it.
async fn stranger_is_explained(fleet: &Fleet, shell: &Shell) -> Result<()> {
    let stranger: String = sqlx::query_scalar(
        "SELECT provider_id FROM machine_provided JOIN machine_quarantine USING (machine_id) LIMIT 1",
    )
    .fetch_one(&fleet.pool)
    .await?;
    let why = shell.run(&format!("shepherdctl why {stranger}"))?;
    ensure!(why.contains("it was not created from here"), "{why}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_backup_repeats_nothing_and_names_what_to_do() -> TestResult {
    let [dump, restore, declare] = &commands_of_the_document()[..] else {
        panic!("docs/backup.md has other commands than this test follows");
    };
    let site = Site::start("fire_backup", 12).await?;
    let (fleet, shell) = (&site.fleet, &site.shell);
    let endpoints = [endpoint()?];
    let first = ready(fleet, "first", "8", &endpoints)?;
    fleet
        .until("the schema is there", "SELECT count(*) > 0 FROM pg_tables WHERE tablename = 'intent'")
        .await?;
    fleet
        .until(
            "eight are Ready",
            "SELECT count(*) = 8 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'",
        )
        .await?;
    shell.run(dump)?;
    end(fleet, first).await?;

    let known = half_a_day_of_work(fleet, &endpoints).await?;
    // The second one, whose agent is dead, cannot report its fence unless it gets a request.
    let (struck, mute) = (&known[0], &known[2]);
    fleet.strike(mute, "kill").await?;
    let before = fleet.journal()?;
    let created = calls(&before, "create");

    fleet.pool.close().await;
    shell.run(restore)?;
    let fleet = &fleet.with_bmdb(fleet.bmdb_url.clone()).await?;

    // A shepherd is started before the restore is declared.
    let hasty = ready(fleet, "hasty", "12", &endpoints)?;
    fleet
        .until(
            "known machines report, and those it does not know are put aside",
            "SELECT count(*) FILTER (WHERE phase_index = 'Quarantined') = 4
                AND (SELECT count(DISTINCT machine_id) FROM history WHERE event = 'NewerFence') >= 2
             FROM machine_due WHERE lane = 'access'",
        )
        .await?;
    fleet.strike(struck, "kill").await?;
    fleet
        .until(
            "a person is called for both",
            "SELECT (SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'NeedsHuman') = 2
                OR (SELECT count(*) FROM intent WHERE kind = 'restart-agent' AND outcome LIKE 'done: %') > 0",
        )
        .await?;
    assert_eq!(count(fleet, OLD_FENCE_TAKEN).await?, 0, "a machine took an old fence");
    let tries = try_in_vain(fleet, shell, [struck, mute]).await?;
    for machine in [struck, mute] {
        holding_back_is_explained(shell, machine)?;
    }
    let refused = shell.run("shepherdctl declare restored --reason 'too early'");
    let refused = refused.err().context("declared restored under a living shepherd")?.to_string();
    assert!(refused.contains("shepherds are working on this BMDB (process "), "{refused}");
    end(fleet, hasty).await?;
    let since = &fleet.journal()?[before.len()..];
    let taken = accepted_fences(since);
    assert!(taken.is_empty(), "orders of a restored database were taken: {taken:?}");
    // The machine that reported was believed. The other one got a request, rejected it, and was believed then.
    assert_eq!((orders(since, struck), orders(since, mute)), (0, 1), "sent after {tries} tries");

    // An operator types the name of the database.
    let declared = shell.run(&format!("{} --yes", declare.trim_end()))?;
    assert!(declared.starts_with("The fences of 12 machines are lifted by "), "{declared}");
    let third = ready(fleet, "third", "12", &endpoints)?;
    fleet
        .until(
            "those that were held back are helped with lifted fences",
            "SELECT count(*) = 2 FROM machine_agent_started WHERE fence > 100000000 AND machine_id IN (
                 (SELECT machine_id FROM machine_provided ORDER BY provided_at LIMIT 1),
                 (SELECT machine_id FROM machine_provided ORDER BY provided_at OFFSET 2 LIMIT 1))",
        )
        .await?;
    fleet
        .until(
            "all that were known are Ready",
            "SELECT count(*) FILTER (WHERE phase_index = 'Ready') = 8
                AND count(*) FILTER (WHERE phase_index = 'Quarantined') = 4
             FROM machine_due WHERE lane = 'access'",
        )
        .await?;
    stranger_is_explained(fleet, shell).await?;
    end(fleet, third).await?;

    let journal = fleet.journal()?;
    assert_eq!(calls(&journal, "create"), created, "something was created twice");
    let fences = accepted_fences(&journal);
    for (machine, accepted) in &fences {
        assert!(accepted.is_sorted(), "{machine} accepted {accepted:?}");
    }
    for machine in [struck, mute] {
        let lifted = fences[machine].last().copied().unwrap_or(0);
        assert!(lifted > 100_000_000, "{machine} was helped with fence {lifted}");
    }
    for line in &journal[before.len()..] {
        assert!(line["what"] != "power" && line["what"] != "reboot", "disturbed after restoring: {line}");
    }
    counted(
        "restored backup",
        format!(
            "12 machines, {created} creations and none repeated, 4 unknown put aside, 2 given no order in {tries} \
             tries before the fences were lifted"
        ),
    )?;
    fleet.pool.close().await;
    Ok(site.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_database_on_the_same_machines_is_refused_with_words() -> TestResult {
    let site = Site::start("fire_second", 6).await?;
    let fleet = &site.fleet;
    let owner = ready(fleet, "owner", "0", &[endpoint()?])?;
    fleet
        .until("the schema is there", "SELECT count(*) > 0 FROM pg_tables WHERE tablename = 'intent'")
        .await?;
    fleet.until("all are Ready", ALL_READY).await?;
    let before = fleet.journal()?;

    // The same provider: its machines belong to another database, and are not touched.
    site.server.create_database("second").await?;
    let stranger = fleet.with_bmdb(site.server.url("second")).await?;
    let shepherd = ready(&stranger, "stranger", "0", &[endpoint()?])?;
    stranger
        .until("the schema is there", "SELECT count(*) > 0 FROM pg_tables WHERE tablename = 'intent'")
        .await?;
    stranger
        .until(
            "all are put aside, or creation is stopped",
            "SELECT (SELECT count(*) FROM machine_quarantine) = 6
                 OR (SELECT count(*) FROM provider_state WHERE brake IS NOT NULL) = 1",
        )
        .await?;
    let machines: i64 =
        sqlx::query_scalar("SELECT count(*) FROM machine_due WHERE process IS NOT NULL AND lane = 'access'")
            .fetch_one(&stranger.pool)
            .await?;
    assert_eq!(machines, 0, "work is due on somebody else's machines");
    end(&stranger, shepherd).await?;

    // The same hosts from a list: the machines themselves reject the orders.
    site.server.create_database("third").await?;
    let listed = fleet.with_bmdb(site.server.url("third")).await?;
    let devices: Vec<Value> = fleet
        .truth()
        .await?
        .iter()
        .map(|machine| {
            serde_json::json!({ "ID": machine["id"], "Addr": "127.0.0.1", "Port": machine["port"], "User": "root" })
        })
        .collect();
    let list = site.shell.directory.join("devices.json");
    std::fs::write(&list, serde_json::to_vec(&devices)?)?;
    let shepherd = listed.shepherd_of_list("listed", &[endpoint()?], &list, &FLAGS)?;
    listed
        .until("the schema is there", "SELECT count(*) > 0 FROM pg_tables WHERE tablename = 'intent'")
        .await?;
    listed
        .until(
            "a person is called for each",
            "SELECT count(*) = 6 FROM machine_due WHERE lane = 'access' AND phase_index = 'NeedsHuman'",
        )
        .await?;
    let reason: String =
        sqlx::query_scalar("SELECT reason FROM machine_needs_human LIMIT 1").fetch_one(&listed.pool).await?;
    assert!(reason.contains("belongs to bare metal database"), "{reason}");
    end(&listed, shepherd).await?;

    let journal = fleet.journal()?;
    let owners = accepted_fences(&before);
    assert_eq!(accepted_fences(&journal), owners, "a machine took an order of another database");
    for line in &journal[before.len()..] {
        let disturbs = ["create", "power", "reboot"].iter().any(|what| line["what"] == *what);
        assert!(!disturbs, "somebody else's machine was disturbed: {line}");
    }
    fleet.until("all are Ready", ALL_READY).await?;
    end(fleet, owner).await?;
    counted(
        "second database",
        "6 of 6 machines left alone by the one, and refused to the other by themselves",
    )?;
    stranger.pool.close().await;
    listed.pool.close().await;
    Ok(site.stop().await?)
}
