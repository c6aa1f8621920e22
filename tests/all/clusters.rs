//! Clusters of the fleet, from the order to working nodes and back.
//!
//! The machines are simulated, their nodes are not: each is the role server's own worker with a real etcd and a real
//! curator, on an address of its own. Orders are given with `shepherdctl`.

mod recovery;

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use prost::Message as _;
use serde_json::Value;
use shepherd::proto::curator::v1 as wire;
use tempfile::TempDir;

use crate::harness::aloud::{TestResult, aloud};
use crate::harness::child::Program;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};

/// A fleet whose machines can be nodes.
pub(crate) struct Field {
    pub(crate) fleet: Fleet,
    pub(crate) shepherd: Option<Program>,
    /// The endpoint of the first shepherd, which the agents call.
    pub(crate) endpoint: String,
    // Dropped after the fleet: what is left of nodes is removed when the simulator has ended.
    nodes: Nodes,
}

/// Ends the etcds of a fleet that is gone. They have no parent then.
struct Nodes {
    disks: std::path::PathBuf,
    /// The directory of the fleet. It is removed after the records in it were read.
    _directory: Arc<TempDir>,
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for record in records(&self.disks) {
            if let Some(record) = shepherd::roleserver::child::launch::read_record(&record) {
                let _ = record.instance.stop(Duration::ZERO);
            }
        }
    }
}

fn records(disks: &std::path::Path) -> Vec<std::path::PathBuf> {
    let machines = std::fs::read_dir(disks).into_iter().flatten().flatten();
    machines.flat_map(|machine| children(&machine.path())).collect()
}

fn children(disk: &std::path::Path) -> Vec<std::path::PathBuf> {
    let children = std::fs::read_dir(disk.join("children")).into_iter().flatten().flatten();
    children.map(|child| child.path().join("process.json")).collect()
}

const UNDISTURBED: &str = "SELECT count(*) = 0 FROM intent WHERE kind <> 'create'";

pub(crate) const FLAGS: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_first_heartbeat_timeout=20s",
    "--recovery_silence_timeout=15s",
    "--recovery_ladder=restart-agent:15s:1,reboot:20s:1,power-cycle:20s:1",
];

impl Field {
    pub(crate) async fn start(name: &str, machines: usize) -> Result<Self> {
        Self::start_with(name, machines, &[]).await
    }

    /// The same with further environment variables of the machines.
    pub(crate) async fn start_with(
        name: &str,
        machines: usize,
        environment: &[(&str, OsString)],
    ) -> Result<Self> {
        let count = machines.to_string();
        let roleserver = env!("CARGO_BIN_EXE_roleserver");
        let simulator = [
            "--machine_count",
            &count,
            "--boot_seconds",
            "0.3",
            "--persistent_agent_percent",
            "100",
            "--roleserver_path",
            roleserver,
        ];
        let fleet =
            Fleet::start_with(name, &simulator, environment, |database| Ok(database.url().to_owned()))
                .await?;
        let disks = fleet.directory().join("fleet.json.disks");
        let nodes = Nodes { disks, _directory: fleet.shared_directory() };
        let endpoint = endpoint()?;
        let shepherd = fleet.shepherd("shepherd", slice::from_ref(&endpoint), &FLAGS)?;
        fleet.until("some are known", "SELECT count(*) > 0 FROM machine").await?;
        fleet.until("all are Ready", ALL_READY).await?;
        Ok(Self { fleet, shepherd: Some(shepherd), endpoint, nodes })
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
            .args(["--direct", "--bmdb-dialect", self.fleet.database.dialect().as_str()])
            .args(arguments)
            .env("SHEPHERD_BMDB_URL", &self.fleet.bmdb_url)
            .stdin(Stdio::null())
            .output()?;
        ensure!(
            output.status.success(),
            "shepherdctl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Creates the cluster `ams` with this many machines, and waits until it has converged.
    pub(crate) async fn make_ams(&self, control_plane: usize, workers: usize) -> Result<Value> {
        let (control_plane, workers) = (control_plane.to_string(), workers.to_string());
        let create = ["cluster", "create", "ams", "--control-plane", &control_plane, "--workers", &workers];
        self.ctl(&[&create[..], &["--reason", "the hall"]].concat())?;
        self.until("it is settled", "ams", settled).await
    }

    pub(crate) fn cluster(&self, name: &str) -> Result<Value> {
        let output = self.ctl(&["cluster", "describe", name, "-o", "json"])?;
        Ok(serde_json::from_str(&output)?)
    }

    /// Waits until `is` holds for a cluster.
    pub(crate) async fn until(&self, what: &str, name: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            let cluster = self.cluster(name)?;
            if is(&cluster) {
                return Ok(cluster);
            }
            if Instant::now() > end {
                aloud(&format!("waited in vain until {what}: {cluster:#}"));
                anyhow::bail!("waited in vain until {what}\n{cluster:#}\n{}", self.fleet.explain().await?);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Waits until the stored statement of the only cluster shows that its authority is being replaced, or was.
    async fn until_authority_is_replaced(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let stored: Option<Vec<u8>> =
                sqlx::query_scalar("SELECT statement FROM cluster").fetch_one(&self.fleet.pool).await?;
            let signed = wire::SignedStatement::decode(stored.unwrap_or_default().as_slice())?;
            let statement = wire::Statement::decode(signed.statement.as_slice())?;
            if statement.authorities.len() > 1 || !signed.successors.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the authority is kept: {}", self.fleet.explain().await?);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The directory of a machine's disk.
    pub(crate) fn disk(&self, machine: &str) -> std::path::PathBuf {
        self.nodes.disks.join(machine)
    }

    /// Whether anything runs on a machine beside its role server.
    pub(crate) fn runs_anything(&self, machine: &str) -> bool {
        children(&self.disk(machine)).iter().any(|record| {
            shepherd::roleserver::child::launch::read_record(record)
                .is_some_and(|record| record.instance.is_alive())
        })
    }

    fn why(&self, machine: &str) -> Result<String> {
        self.ctl(&["why", machine])
    }
}

pub(crate) fn machines<'c>(cluster: &'c Value, part: &str) -> Vec<&'c Value> {
    let all = cluster["machines"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter(|machine| machine["part"] == part).collect()
}

pub(crate) fn settled(cluster: &Value) -> bool {
    cluster["stage"] == "converged"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_is_made_of_the_fleet_outlives_a_member_and_ends() -> TestResult {
    let field = Field::start("clusters", 5).await?;
    let output = field.ctl(&[
        "cluster",
        "create",
        "ams",
        "--control-plane",
        "3",
        "--workers",
        "1",
        "--reason",
        "the new hall",
    ])?;
    assert!(
        output.starts_with("the cluster ams is requested: 3 members of the control plane, 1 worker"),
        "{output}"
    );
    let cluster = field.until("it is settled", "ams", settled).await?;
    assert_eq!((&cluster["voters"], &cluster["votersReached"]), (&3.into(), &3.into()), "{cluster:#}");
    let members = machines(&cluster, "control-plane");
    assert!(members.iter().all(|member| member["roles"][0] == "consensus-member"), "{cluster:#}");
    let workers = machines(&cluster, "worker");
    assert_eq!(workers.len(), 1);
    let why = field.why(workers[0]["name"].as_str().context("a name")?)?;
    assert!(why.contains("it is a worker of cluster ams; its node is healthy to its curator"), "{why}");

    snapshots_are_taken_sealed_and_listed(&field).await?;
    declared_role_runs_and_is_withdrawn(&field).await?;

    // A member is retired: another machine replaces it first, and then it is released.
    let leaves = members[0]["name"].as_str().context("a name")?.to_owned();
    field.ctl(&["retire", &leaves, "--yes", "--reason", "it is old"])?;
    let without = |cluster: &Value| {
        let voters = cluster["voters"].as_u64();
        assert!(voters >= Some(3), "a member that was well gave its vote up too early: {cluster:#}");
        settled(cluster) && machines(cluster, "control-plane").iter().all(|member| member["name"] != *leaves)
    };
    let left = "SELECT count(*) = 0 FROM machine_cluster JOIN machine_due USING (machine_id)
        WHERE lane = 'access' AND phase_index = 'Retired'";
    let cluster = {
        let leaving = field.until("another has taken its place", "ams", without);
        let mut leaving = std::pin::pin!(leaving);
        loop {
            tokio::select! {
                cluster = &mut leaving => break cluster?,
                () = tokio::time::sleep(Duration::from_millis(100)) => {
                    assert!(field.fleet.holds(left).await?, "a machine was given back before it had left");
                }
            }
        }
    };
    assert_eq!(cluster["voters"], 3);
    // Nothing shows that its disk was wiped, so the authority is replaced: nodes are to trust another one as well.
    field.until_authority_is_replaced().await?;
    let other_members = "SELECT count(*) >= 1 FROM cluster_snapshot WHERE why = 'members' AND members >= 3";
    field.fleet.until("a snapshot has the new member", other_members).await?;
    field
        .fleet
        .until(
            "it is given back",
            "SELECT count(*) = 1 FROM machine_due WHERE lane = 'access' AND phase_index = 'Retired'",
        )
        .await?;
    let messages: Vec<String> = sqlx::query_scalar(
        "SELECT event FROM history JOIN machine_provided USING (machine_id)
         WHERE provider_id = $1 AND (event LIKE 'Cluster%' OR event = 'RetirementFinished' OR event = 'Finished')
         ORDER BY at",
    )
    .bind(&leaves)
    .fetch_all(&field.fleet.pool)
    .await?;
    let at = |event: &str| messages.iter().position(|text| text == event);
    assert!(at("ClusterLeaving") < at("ClusterLeft") && at("ClusterLeft").is_some(), "{messages:?}");

    // The cluster is deleted, and its machines are free again.
    field.ctl(&["cluster", "delete", "ams", "--yes", "--reason", "the trial is over"])?;
    field.fleet.until("it is gone", "SELECT count(*) = 0 FROM cluster").await?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM named_lease WHERE kind = 'cluster'").await?);
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_snapshot_chunk").await?);
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM sealed_secret WHERE name LIKE 'cluster/%'").await?);
    field.fleet.until("its machines are free", "SELECT count(*) = 0 FROM machine_cluster").await?;
    field
        .fleet
        .until(
            "nothing is kept of it on any machine",
            "SELECT count(*) = 0 FROM machine_cluster_report WHERE node_key IS NOT NULL",
        )
        .await?;
    assert!(field.why(&leaves)?.contains("Retired"), "{}", field.why(&leaves)?);
    Ok(())
}

/// A snapshot is taken without an order. One that is ordered has all nodes, and its sealed chunks reveal no contents.
async fn snapshots_are_taken_sealed_and_listed(field: &Field) -> Result<()> {
    let listed = || -> Result<Vec<Value>> {
        let output = field.ctl(&["cluster", "snapshots", "ams", "-o", "json"])?;
        Ok(serde_json::from_str::<Value>(&output)?["snapshots"].as_array().cloned().unwrap_or_default())
    };
    wait_for("there is a snapshot", || Ok(!listed()?.is_empty())).await?;
    let output = field.ctl(&["cluster", "snapshot", "ams", "--reason", "before the front"])?;
    assert!(
        output.starts_with("the cluster ams takes a snapshot as soon as its curators answer"),
        "{output}"
    );
    wait_for("it is taken", || Ok(listed()?[0]["reason"] == "ordered")).await?;
    let newest = listed()?.into_iter().next().context("one")?;
    assert_eq!((&newest["nodes"], &newest["members"], &newest["epoch"]), (&4.into(), &3.into(), &"0".into()));
    let bytes: u64 = newest["bytes"].as_str().context("a 64-bit integer is a text")?.parse()?;
    assert!(bytes > 1_000, "{newest}");
    let chunks: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT sealed FROM cluster_snapshot_chunk").fetch_all(&field.fleet.pool).await?;
    assert!(chunks.len() >= 2, "{}", chunks.len());
    assert!(chunks.iter().all(|chunk| chunk.starts_with(b"age-encryption.org/v1")), "a chunk is not sealed");
    let described = field.ctl(&["cluster", "describe", "ams"])?;
    assert!(
        described.lines().any(|line| line.starts_with("snapshot ") && line.ends_with(" ago")),
        "{described}"
    );
    Ok(())
}

/// A declared role runs on the workers, is replaced there, and is gone after it was removed from them and withdrawn.
async fn declared_role_runs_and_is_withdrawn(field: &Field) -> Result<()> {
    let file = field.fleet.directory().join("web.toml");
    let path = file.to_str().context("a path")?;
    let write = |seconds: u32| {
        let text = format!(
            "role = \"web\"\n[[service]]\nname = \"server\"\nprogram = \"/bin/sleep\"\nuser = \"root\"\n\
             arguments = [\"{seconds}\"]\nhealth = {{ exec = [\"/bin/true\"], interval = \"1s\" }}\n"
        );
        std::fs::write(&file, text)
    };
    let runs = |cluster: &Value| {
        let workers = machines(cluster, "worker");
        let well = |worker: &&Value| {
            worker["services"] == Value::Array(Vec::new())
                || worker["services"][0]["state"] != "healthy"
                || worker["services"][0]["service"] != "server"
        };
        settled(cluster) && !workers.is_empty() && !workers.iter().any(well)
    };
    // Durations for which nothing else on this host sleeps, including other runs of these tests.
    let (first, second) = (10_000_000 + 2 * std::process::id(), 10_000_001 + 2 * std::process::id());
    write(first)?;
    // A role that is not declared cannot be assigned, and the cluster reports so until it is declared.
    field.ctl(&["cluster", "roles", "ams", "--add-role", "web", "--reason", "the front"])?;
    let waits = |cluster: &Value| cluster["waitReasons"].to_string().contains("web");
    field.until("it says what it waits for", "ams", waits).await?;
    let output = field.ctl(&["cluster", "declare", "ams", path, "--reason", "the front"])?;
    assert!(
        output.starts_with(
            "the cluster ams declares web, which runs server; its workers act on the declaration"
        ),
        "{output}"
    );
    let cluster = field.until("the service runs", "ams", runs).await?;
    let digest = cluster["declarations"][0]["digest"].clone();
    assert!(asleep(first)? >= 1, "the node says that it runs what nobody runs");
    let output = field.ctl(&["cluster", "describe", "ams"])?;
    assert!(output.contains("web runs server; by ") && output.contains("web/server  healthy"), "{output}");

    // The new one is a program that the fleet has, and that its nodes fetch from a shepherd.
    let program = field.fleet.directory().join("front");
    std::fs::write(&program, format!("#!/bin/sh\nexec /bin/sleep {second}\n"))?;
    let added =
        field.ctl(&["artefacts", "add", program.to_str().context("a path")?, "--reason", "the front"])?;
    let digest_of_it = added.lines().nth(1).context("a digest")?;
    let text = format!(
        "role = \"web\"\n[[service]]\nname = \"server\"\nartefact = \"{digest_of_it}\"\nuser = \"root\"\n\
         health = {{ exec = [\"/bin/true\"], interval = \"1s\" }}\n"
    );
    std::fs::write(&file, text)?;
    field.ctl(&["cluster", "declare", "ams", path, "--reason", "the new front"])?;
    let replaced = |cluster: &Value| cluster["declarations"][0]["digest"] != digest && runs(cluster);
    field.until("the new one is declared", "ams", replaced).await?;
    wait_for("the new one runs alone", || Ok(asleep(second)? >= 1 && asleep(first)? == 0)).await?;
    let again = field.ctl(&["cluster", "declare", "ams", path, "--reason", "again"])?;
    assert!(again.contains("already declares web in this way; nothing was changed"), "{again}");

    let refused = field.ctl(&["cluster", "undeclare", "ams", "web", "--reason", "too early"]);
    let refused = refused.err().context("a role was withdrawn that workers are to have")?.to_string();
    assert!(refused.contains("cluster roles ams --remove-role web"), "{refused}");
    field.ctl(&["cluster", "roles", "ams", "--remove-role", "web", "--reason", "the front moved"])?;
    field.ctl(&["cluster", "undeclare", "ams", "web", "--reason", "the front moved"])?;
    let gone = |cluster: &Value| {
        let workers = machines(cluster, "worker");
        let nothing = |value: &Value| value.as_array().is_none_or(Vec::is_empty);
        settled(cluster)
            && nothing(&cluster["declarations"])
            && workers.iter().all(|worker| nothing(&worker["services"]) && nothing(&worker["roles"]))
    };
    field.until("nothing is left of it", "ams", gone).await?;
    wait_for("nothing of it runs", || Ok(asleep(second)? == 0)).await
}

/// How many processes sleep for this long.
fn asleep(seconds: u32) -> Result<usize> {
    Ok(sleeping(seconds)?.len())
}

/// The processes that sleep for this long.
pub(crate) fn sleeping(seconds: u32) -> Result<Vec<u32>> {
    let sleeps = |process: &std::fs::DirEntry| {
        std::fs::read(process.path().join("cmdline"))
            .is_ok_and(|line| line == format!("/bin/sleep\0{seconds}\0").into_bytes())
    };
    let found = std::fs::read_dir("/proc")?.flatten().filter(sleeps);
    Ok(found.filter_map(|process| process.file_name().to_str()?.parse().ok()).collect())
}

pub(crate) async fn wait_for(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds()? {
        ensure!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_loop_takes_no_step_and_says_which_it_would_take() -> TestResult {
    let field = Field::start("clusters_paused", 2).await?;
    let pause = ["loops", "pause", "cluster", "--reason", "the switch is changed"];
    let refused = field.ctl(&[&pause[..], &["--provider", "sim"]].concat());
    let refused = refused.expect_err("a provider has no clusters").to_string();
    assert!(refused.contains("cannot be paused for sim alone"), "{refused}");
    field.ctl(&pause)?;
    let size = ["ams", "--control-plane", "1", "--workers", "1"];
    let before_creation = planned(&field, &size)?;
    assert_eq!(before_creation["exists"], false, "{before_creation:#}");
    field.ctl(&[&["cluster", "create"], &size[..], &["--reason", "the hall"]].concat())?;
    let waits = |cluster: &Value| cluster["waitReasons"][0].as_str().unwrap_or_default().to_owned();
    let paused = field.until("it says why it waits", "ams", |cluster| !waits(cluster).is_empty()).await?;
    let message = waits(&paused);
    for part in
        ["the loop cluster was paused by ", "the switch is changed", "is chosen as", "loops resume cluster"]
    {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    // It is polled several times, and still nothing was done.
    let again = "SELECT polled_at > created_at + INTERVAL '5 seconds' FROM cluster";
    field.fleet.until("it is looked at again", again).await?;
    let later = field.cluster("ams")?;
    assert_eq!((machines(&later, "control-plane").len(), settled(&later)), (0, false), "{later:#}");
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_order").await?);

    // Meanwhile `cluster plan` forecasts all steps. Afterwards, history shows the same steps.
    let forecast = planned(&field, &["ams"])?;
    assert_eq!(
        (&forecast["exists"], &forecast["end"], &forecast["steps"]),
        (&true.into(), &"converged".into(), &before_creation["steps"]),
        "{forecast:#}"
    );

    field.ctl(&["loops", "resume", "cluster", "--reason", "the switch is new"])?;
    field.until("it is made", "ams", settled).await?;
    let reported: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT provider_id, event, coalesce(detail, '') FROM history JOIN machine_provided USING (machine_id)
         WHERE event IN ('ClusterChosen', 'ClusterAsked', 'ClusterFounded') ORDER BY at",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    let messages: Vec<String> = reported
        .into_iter()
        .map(|(machine, event, detail)| match event.as_str() {
            "ClusterChosen" => format!("{machine} is chosen {}", detail.trim_end_matches(" of cluster ams")),
            "ClusterAsked" => format!("{machine} is ordered {}", detail.trim_end_matches(" cluster ams")),
            _ => format!("{machine} has founded it"),
        })
        .collect();
    let steps = forecast["steps"].as_array().context("steps")?;
    let text = |step: &Value, field: &str| step[field].as_str().unwrap_or_default().to_owned();
    let lines = steps.iter().map(|step| format!("{} {}", text(step, "name"), text(step, "action")));
    let known = ["is chosen ", "is ordered ", "has founded "];
    let lines: Vec<String> = lines.filter(|line| known.iter().any(|known| line.contains(known))).collect();
    assert!(lines.len() == 5, "{lines:#?}");
    assert_eq!(messages, lines);
    let now = planned(&field, &["ams"])?;
    assert_eq!(
        (&now["end"], now["steps"].as_array().map(Vec::len)),
        (&"converged".into(), Some(0)),
        "{now:#}"
    );
    let ended = planned(&field, &["ams", "--delete"])?;
    assert_eq!(ended["end"], "deleted", "{ended:#}");
    let refused = field.ctl(&["cluster", "plan", "ams", "--control-plane", "2"]).expect_err("an even one");
    assert!(refused.to_string().contains("a control plane cannot have 2 members"), "{refused}");
    let refused = field.ctl(&["cluster", "plan", "fra"]).expect_err("there is none");
    assert!(refused.to_string().contains("there is no cluster \"fra\""), "{refused}");
    Ok(())
}

/// Output of `cluster plan` with these arguments.
fn planned(field: &Field, of: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&field.ctl(&[&["cluster", "plan"], of, &["-o", "json"]].concat())?)?)
}
