//! `wait`, and `--wait` of orders: each condition is met at once, later or never, or cannot be met any more; also
//! when the shepherd that served it stops.
//!
//! The loops of a shepherd do not run here. Statements make what they would make, so that nothing depends on time.

use std::process::{Output, Stdio};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::fact_change::power::PowerChange;
use shepherd::model::ids::MachineId;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::time::timeout;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::harness::aloud::TestResult;
use crate::harness::callback::{TestAgent, provided};
use crate::harness::program::PATIENCE;

/// Founded clusters of one machine of the control plane, which they do not have yet.
const CLUSTERS: &str = "
    INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
        created_by, founded_at, ca_certificate, curators, wait_reasons, settled)
    SELECT md5(name)::UUID, name, 1, 0, '', '[]'::JSONB, 'automatic', 1, clock_timestamp(), 'kim', clock_timestamp(),
           'ca'::BYTEA, '[\"10.0.0.1:7835\"]'::JSONB, '[\"it learns\"]'::JSONB, FALSE
    FROM (VALUES ('ams'), ('fra'), ('lon')) c (name)";
/// Updates of an artefact, which are under way.
const UPDATES: [&str; 2] = [
    "INSERT INTO artefact VALUES (decode(repeat('ab', 32), 'hex'), 600000, gen_random_uuid(), clock_timestamp(), 'one',
         clock_timestamp(), 'kim')",
    "INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at,
         created_by, reason)
     SELECT id, decode(repeat('ab', 32), 'hex'), 'one', 'cpus>=4', 1, 60, clock_timestamp(), 'kim', 'a try'
     FROM (VALUES ('u1'), ('u2'), ('u3')) u (id)",
];

const SET_READY: &[&str] = &["UPDATE machine_due SET phase_index = 'Ready' WHERE machine_id::TEXT = $1"];
const SET_RETIRED: &[&str] = &["UPDATE machine_due SET phase_index = 'Retired' WHERE machine_id::TEXT = $1"];
const DELETE_MACHINE: &[&str] = &[
    "DELETE FROM machine_due WHERE machine_id::TEXT = $1",
    "DELETE FROM machine_provided WHERE machine_id::TEXT = $1",
    "DELETE FROM machine WHERE machine_id::TEXT = $1",
];
const CONVERGE: &[&str] = &["UPDATE cluster SET settled = TRUE WHERE name = $1"];
const BEGIN_DELETION: &[&str] =
    &["UPDATE cluster SET deleting_at = clock_timestamp(), deleting_by = 'kim' WHERE name = $1"];
const DELETE_CLUSTER: &[&str] = &[
    "DELETE FROM machine_cluster WHERE cluster_id IN (SELECT cluster_id FROM cluster WHERE name = $1)",
    "DELETE FROM cluster WHERE name = $1",
];
const FINISH_UPDATE: &[&str] =
    &["UPDATE roll_out SET ended = 'finished', ended_at = clock_timestamp() WHERE roll_out_id = $1"];
const ABORT_UPDATE: &[&str] =
    &["UPDATE roll_out SET ended = 'aborted', ended_at = clock_timestamp() WHERE roll_out_id = $1"];

async fn change(api: &Api, statements: &[&'static str], name: &str) -> anyhow::Result<()> {
    for statement in statements {
        sqlx::query(*statement).bind(name.to_owned()).execute(&api.pool).await?;
    }
    Ok(())
}

/// A command that runs until it has waited.
struct Waiting {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    errors: Lines<BufReader<ChildStderr>>,
}

impl Waiting {
    fn start(kim: &Operator<'_>, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = tokio::process::Command::from(kim.command(arguments))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        let errors = BufReader::new(child.stderr.take().context("its errors")?).lines();
        Ok(Self { child, lines, errors })
    }

    /// The next line of its output.
    async fn line(&mut self) -> anyhow::Result<String> {
        timeout(PATIENCE, self.lines.next_line()).await.context("it is silent")??.context("it has ended")
    }

    /// The next line of its errors that has `part`.
    async fn step(&mut self, part: &str) -> anyhow::Result<String> {
        loop {
            let line = timeout(PATIENCE, self.errors.next_line()).await.context(part.to_owned())??;
            let line = line.with_context(|| format!("it ended before: {part}"))?;
            if line.contains(part) {
                return Ok(line);
            }
        }
    }

    /// Its exit code, and the rest of its output and of its errors.
    async fn end(mut self) -> anyhow::Result<(Option<i32>, String, String)> {
        let status = timeout(PATIENCE, self.child.wait()).await.context("it does not end")??;
        let (mut output, mut errors) = (String::new(), String::new());
        self.lines.into_inner().read_to_string(&mut output).await?;
        self.errors.into_inner().read_to_string(&mut errors).await?;
        Ok((status.code(), output, errors))
    }
}

fn texts(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A condition, with three objects of its kind that do not meet it.
struct Case<'a> {
    kind: &'a str,
    names: [&'a str; 3],
    condition: &'a str,
    /// What an object that meets the condition is.
    is: &'a str,
    /// What makes an object meet the condition.
    meet: &'a [&'static str],
    /// What keeps an object from ever meeting it, and the reason. Empty: nothing does.
    prevent: (&'a [&'static str], &'a str),
}

/// The command that waits for two of the objects.
fn words<'a>(case: &Case<'a>, names: [&'a str; 2], more: &[&'a str]) -> Vec<&'a str> {
    [&["wait", case.kind][..], &names[..], &["--for", case.condition], more].concat()
}

async fn check(api: &Api, kim: &Operator<'_>, case: &Case<'_>) -> anyhow::Result<()> {
    let [first, second, third] = case.names;
    let about = format!("{} {}", case.kind, case.condition);

    // Never: with a timeout of zero the objects are read once.
    let once = words(case, [first, second], &["--timeout", "0"]);
    let (code, output, errors) = texts(&kim.run_command(&once).await?);
    ensure!((code, output.as_str()) == (Some(1), ""), "{about}: {code:?} {output} {errors}");
    let sentence = format!("shepherdctl: 2 of 2 are not {}: ", case.is);
    ensure!(errors.lines().last().is_some_and(|line| line.starts_with(&sentence)), "{about}: {errors}");
    ensure!(errors.lines().count() > 2 && errors.contains(first) && errors.contains(second), "{errors}");

    // Later: one meets it before the other.
    change(api, case.meet, first).await?;
    let mut waiting = Waiting::start(kim, &words(case, [first, second], &[]))?;
    let met = waiting.line().await?;
    ensure!(met.contains(first) && met.ends_with(&format!(" is {}", case.is)), "{about}: {met}");
    change(api, case.meet, second).await?;
    let met = waiting.line().await?;
    ensure!(met.contains(second), "{about}: {met}");
    let end = waiting.end().await?;
    ensure!(end == (Some(0), String::new(), String::new()), "{about}: {end:?}");

    // At once.
    let (code, output, errors) = texts(&kim.run_command(&once).await?);
    ensure!((code, output.lines().count()) == (Some(0), 2), "{about}: {code:?} {output} {errors}");
    let (code, output, _) = texts(&kim.run_command(&[&once[..], &["-o", "name"]].concat()).await?);
    // An object that does not exist is not listed.
    let listed = if case.is == "deleted" { 0 } else { 2 };
    ensure!((code, output.lines().count()) == (Some(0), listed), "{about}: {code:?} {output}");

    // Never again.
    let (prevent, reason) = case.prevent;
    if !prevent.is_empty() {
        let mut waiting = Waiting::start(kim, &words(case, [first, third], &[]))?;
        waiting.line().await?;
        change(api, prevent, third).await?;
        let (code, _, errors) = waiting.end().await?;
        let sentence = format!("{reason}, so it cannot be {} any more", case.is);
        ensure!(code == Some(1) && errors.contains(&sentence) && errors.contains(third), "{about}: {errors}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_are_waited_for() -> TestResult {
    let api = Api::start("api_wait_machines").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for (condition, is, meet, prevent) in [
        ("phase=Ready", "Ready", SET_READY, (SET_RETIRED, "is Retired, and stays so")),
        ("healthy", "healthy", SET_READY, (SET_RETIRED, "is Retired, and stays so")),
        ("retired", "retired", SET_RETIRED, (DELETE_MACHINE, "does not exist any more")),
    ] {
        let mut names = Vec::new();
        for _ in 0..3 {
            names.push(provided(&api.pool).await?.to_string());
        }
        let names = [names[0].as_str(), names[1].as_str(), names[2].as_str()];
        check(&api, &kim, &Case { kind: "machines", names, condition, is, meet, prevent }).await?;
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_are_waited_for() -> TestResult {
    let api = Api::start("api_wait_clusters").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    sqlx::query(CLUSTERS).execute(&api.pool).await?;
    for name in ["ams", "fra", "lon"] {
        add_member(&api, name, "control-plane").await?;
    }
    let names = ["ams", "fra", "lon"];
    let prevent = (BEGIN_DELETION, "is being deleted");
    let ready = Case { kind: "clusters", names, condition: "ready", is: "ready", meet: CONVERGE, prevent };
    check(&api, &kim, &ready).await?;
    let (condition, meet) = ("deleted", DELETE_CLUSTER);
    let deleted = Case { kind: "clusters", names, condition, is: "deleted", meet, prevent: (&[], "") };
    check(&api, &kim, &deleted).await?;

    // A cluster that never existed is deleted, and cannot be ready.
    for (condition, expected) in [("deleted", 0), ("ready", 3)] {
        let ended = kim.run_command(&["wait", "cluster", "nowhere", "--for", condition]).await?;
        assert_eq!(ended.status.code(), Some(expected), "{condition}: {ended:?}");
    }
    Ok(api.stop().await?)
}

/// Makes a new machine a member of a cluster.
async fn add_member(api: &Api, cluster: &str, part: &str) -> anyhow::Result<()> {
    let machine = provided(&api.pool).await?;
    let statement = "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
                     SELECT $1, cluster_id, $3, clock_timestamp() FROM cluster WHERE name = $2";
    let query = sqlx::query(statement).bind(machine.0).bind(cluster.to_owned()).bind(part.to_owned());
    ensure!(query.execute(&api.pool).await?.rows_affected() == 1, "there is no cluster {cluster}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_are_waited_for() -> TestResult {
    let api = Api::start("api_wait_updates").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for statement in UPDATES {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let case = Case {
        kind: "updates",
        names: ["u1", "u2", "u3"],
        condition: "finished",
        is: "finished",
        meet: FINISH_UPDATE,
        prevent: (ABORT_UPDATE, "is aborted"),
    };
    check(&api, &kim, &case).await?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn selection_is_resolved_once_and_must_have_an_object() -> TestResult {
    let api = Api::start("api_wait_selection").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let machine = provided(&api.pool).await?.to_string();
    change(&api, SET_READY, &machine).await?;
    for (line, expected, part) in [
        ("wait machines --provider rack --for healthy --timeout 0", 0, "is healthy"),
        ("wait machines --for healthy --timeout 0", 0, "is healthy"),
        ("wait machines -l provider=rack,phase=Ready --for healthy --timeout 0", 0, "is healthy"),
        (
            "wait machines -l provider=rack,phase!=Ready --for healthy --timeout 0",
            3,
            "no machine is selected",
        ),
        (
            "wait machines -l row=7 --for healthy",
            2,
            "run the line below\n  shepherdctl wait machines -l label.row=7 --for healthy",
        ),
        ("wait machines --provider nobody --for healthy", 3, "no machine is selected"),
        ("wait machines nobody --for healthy", 3, "nobody"),
        ("wait machines M nobody --for healthy", 3, "nobody"),
        ("wait clusters --for ready", 3, "no cluster is selected"),
        ("wait updates --for finished", 3, "no update is selected"),
        ("wait updates u9 --for finished", 3, "there is no update \"u9\"; run: shepherdctl get updates"),
        ("wait machines M", 2, "`wait` needs a condition: give --for with phase=PHASE, healthy or retired"),
        ("wait machines M --for ready", 2, "give phase=PHASE, healthy or retired"),
        ("wait machines M --for phase=Redy", 2, "\"Redy\" is no phase"),
        ("wait clusters M --for healthy", 2, "give ready or deleted"),
        ("wait machines M --for healthy --timeout soon", 2, "is not a duration"),
        ("wait machines M --phase Ready --for healthy", 2, "cannot be"),
        ("wait machines M -l phase=Ready --for healthy", 2, "cannot be"),
    ] {
        let words: Vec<&str> =
            line.split(' ').map(|word| if word == "M" { machine.as_str() } else { word }).collect();
        let (code, output, errors) = texts(&kim.run_command(&words).await?);
        assert_eq!(code, Some(expected), "{line}: {output}{errors}");
        assert!(format!("{output}{errors}").contains(part), "{line}: {output}{errors}");
    }
    // One name gives the bare object.
    let one = kim.json(&["wait", "machine", &machine, "--for", "healthy"])?;
    assert_eq!(
        (&one["phase"], &one["name"]["providerId"]),
        (&Value::from("Ready"), &Value::from(machine.as_str()))
    );
    let list = kim.json(&["wait", "machines", "--provider", "rack", "--for", "healthy"])?;
    assert_eq!(list["machines"].as_array().map(Vec::len), Some(1), "{list}");

    // A machine that comes later is not waited for.
    let second = provided(&api.pool).await?.to_string();
    let mut waiting = Waiting::start(&kim, &["wait", "machines", "-l", "provider=rack", "--for", "healthy"])?;
    waiting.line().await?;
    provided(&api.pool).await?;
    change(&api, SET_READY, &second).await?;
    assert!(waiting.line().await?.contains(&second));
    assert_eq!(waiting.end().await?, (Some(0), String::new(), String::new()));

    // The time is over.
    let late = provided(&api.pool).await?.to_string();
    let ended =
        kim.run_command(&["wait", "machine", &late, "--for", "healthy", "--timeout", "1500ms"]).await?;
    let (code, _, errors) = texts(&ended);
    let sentence = format!("shepherdctl: 1 of 1 are not healthy after 1s500ms: rack/{late}");
    assert_eq!((code, errors.lines().last()), (Some(1), Some(sentence.as_str())), "{errors}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_continues_at_another_shepherd_when_its_own_stops() -> TestResult {
    let api = Api::start("api_wait_moves").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (first, second) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    change(&api, SET_READY, &first).await?;
    let (other, stop) = api.another().await?;
    kim.reach(&[other.local_addr, api.server.local_addr])?;
    let mut waiting = Waiting::start(&kim, &["wait", "machines", &first, &second, "--for", "phase=Ready"])?;
    let mut order = Waiting::start(&kim, &["retire", &second, "--yes", "--reason", "r", "--wait"])?;
    waiting.line().await?;
    order.step("is Retiring").await?;
    stop.cancel();
    other.wait_until_stopped().await;
    for moved in [&mut waiting, &mut order] {
        moved.step(&format!("continuing at {}", api.server.local_addr)).await?;
    }
    change(&api, SET_READY, &second).await?;
    assert!(waiting.line().await?.contains(&second));
    assert_eq!(waiting.end().await?.0, Some(0));
    // Its retirement was cancelled, as far as the list of machines shows.
    let (code, _, errors) = order.end().await?;
    assert!(code == Some(1) && errors.contains("its retirement was cancelled"), "{code:?}: {errors}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_waited_for_until_the_machine_is_retired() -> TestResult {
    let api = Api::start("api_wait_retire").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let mut names = Vec::new();
    for _ in 0..4 {
        names.push(provided(&api.pool).await?.to_string());
    }
    let retire =
        |name: &str| Waiting::start(&kim, &["retire", name, "--yes", "--reason", "its lease ends", "--wait"]);

    let mut later = retire(&names[0])?;
    assert!(later.line().await?.contains("is being retired"));
    later.step("is Retiring: is being retired by kim@").await?;
    change(&api, SET_RETIRED, &names[0]).await?;
    later.step("is Retired").await?;
    let end = later.end().await?;
    assert_eq!(end, (Some(0), String::new(), format!("rack/{} is retired\n", names[0])));

    let at_once = retire(&names[0])?;
    let (code, output, errors) = at_once.end().await?;
    assert!(code == Some(0) && output.contains("is being retired already"), "{code:?}: {output}{errors}");

    let never = kim
        .run_command(&["retire", &names[1], "--yes", "--reason", "r", "--wait", "--timeout", "1s"])
        .await?;
    let (code, output, errors) = texts(&never);
    assert!(code == Some(1) && output.contains("is being retired"), "{code:?}: {output}{errors}");
    assert!(errors.contains("1 of 1 are not retired after 1s"), "{errors}");

    let mut cancelled = retire(&names[2])?;
    cancelled.step("is Retiring").await?;
    kim.direct(&["retire", "cancel", &names[2]])?;
    let (code, _, errors) = cancelled.end().await?;
    assert!(code == Some(1) && errors.contains("its retirement was cancelled"), "{code:?}: {errors}");

    // Ctrl-C ends the waiting.
    let mut interrupted = retire(&names[3])?;
    interrupted.step("is Retiring").await?;
    let process = interrupted.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    kill_process(process.context("it runs")?, Signal::INT)?;
    let (code, _, errors) = interrupted.end().await?;
    let again = format!(
        "to wait again, run the line below\n  shepherdctl wait machines rack/{} --for retired",
        names[3]
    );
    assert!(
        code == Some(130) && errors.contains("the order continues") && errors.contains(&again),
        "{errors}"
    );
    let retiring = "SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'Retiring'";
    assert_eq!(api.count(retiring).await?, 2, "the second and the fourth");

    // After a dry run there is nothing to wait for.
    let dry = kim.ask(&["retire", &names[2], "--reason", "r", "--wait", "--dry-run"])?;
    assert!(dry.contains("without --dry-run"), "{dry}");
    Ok(api.stop().await?)
}

async fn end_power_order(api: &Api, machine: MachineId, end: PowerChange) -> anyhow::Result<()> {
    api.bmdb
        .change_machine(machine, move |_| Decision {
            changes: vec![FactChange::Power(end.clone())],
            events: Vec::new(),
            output: (),
        })
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_order_is_waited_for_until_it_was_carried_out() -> TestResult {
    let api = Api::start("api_wait_power").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let agent = TestAgent::new(&api.pool, &api.bmdb).await?;
    let report = async |boot: &'static str, sequence: i64| {
        sqlx::query("DELETE FROM machine_agent_heartbeat").execute(&api.pool).await?;
        sqlx::query(
            "INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
             VALUES ($1, clock_timestamp(), $2, 'i', $3)",
        )
        .bind(agent.machine.0)
        .bind(boot)
        .bind(sequence)
        .execute(&api.pool)
        .await
        .map(drop)
    };
    report("one", 1).await?;
    let name = agent.machine.to_string();
    let order = |words: &[&str]| {
        Waiting::start(&kim, &[words, &[name.as_str(), "--reason", "a kernel", "--wait"]].concat())
    };

    for (words, is) in [
        (&["reboot"][..], "is rebooted"),
        (&["power", "cycle"], "is switched off and on"),
        (&["power", "on"], "is switched on"),
    ] {
        let mut carried_out = order(words)?;
        carried_out.step("is Ready").await?;
        end_power_order(&api, agent.machine, PowerChange::Ended).await?;
        carried_out.step(is).await?;
        assert_eq!(carried_out.end().await?.0, Some(0), "{words:?}");
    }

    let mut given_up = order(&["reboot"])?;
    given_up.step("is Ready").await?;
    let reason = "the order to reboot it failed: its provider cannot reboot machines";
    end_power_order(&api, agent.machine, PowerChange::GivenUp(reason.to_owned())).await?;
    let (code, _, errors) = given_up.end().await?;
    assert!(
        code == Some(1) && errors.contains(&format!("is not known to be rebooted: {reason}")),
        "{errors}"
    );

    let mut cancelled = order(&["power", "cycle"])?;
    cancelled.step("is Ready").await?;
    kim.direct(&["power", "cancel", &name])?;
    let (code, _, errors) = cancelled.end().await?;
    assert!(code == Some(1) && errors.contains("is not known to be switched off and on"), "{errors}");

    let line = ["reboot", &name, "--reason", "r", "--wait", "--timeout", "1s"];
    let (code, _, errors) = texts(&kim.run_command(&line).await?);
    assert!(code == Some(1) && errors.contains("1 of 1 are not rebooted after 1s"), "{code:?}: {errors}");
    kim.direct(&["power", "cancel", &name])?;

    // Nobody watches a machine that is held: another boot is the proof.
    let mut off = order(&["power", "off"])?;
    off.step("is Ready").await?;
    end_power_order(&api, agent.machine, PowerChange::Ended).await?;
    assert_eq!(off.end().await?.0, Some(0));
    let mut held = order(&["reboot"])?;
    held.step("is Ready").await?;
    end_power_order(&api, agent.machine, PowerChange::Ended).await?;
    // It has read that the order is over when it prints the first of these, and still waits when it prints the second.
    for reason in ["its disk is looked at", "its fan is looked at"] {
        sqlx::query("UPDATE machine_due SET reason = $2 WHERE machine_id = $1 AND lane = 'access'")
            .bind(agent.machine.0)
            .bind(reason)
            .execute(&api.pool)
            .await?;
        held.step(reason).await?;
    }
    report("two", 2).await?;
    assert_eq!(held.end().await?.0, Some(0));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_about_a_cluster_is_waited_for() -> TestResult {
    let api = Api::start("api_wait_cluster_orders").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    sqlx::query(CLUSTERS).execute(&api.pool).await?;
    add_member(&api, "ams", "control-plane").await?;
    change(&api, CONVERGE, "ams").await?;

    let scale = ["cluster", "scale", "ams", "--workers", "1", "--reason", "load", "--wait"];
    let mut scaled = Waiting::start(&kim, &scale)?;
    assert!(scaled.line().await?.starts_with("the cluster ams "));
    scaled.step("the cluster ams is changing").await?;
    // A pass that began before the order is no proof.
    change(&api, CONVERGE, "ams").await?;
    scaled.step("the cluster ams is converged").await?;
    add_member(&api, "ams", "worker").await?;
    scaled.step("the cluster ams is ready").await?;
    assert_eq!(scaled.end().await?.0, Some(0));

    let never =
        ["cluster", "create", "new", "--control-plane", "1", "--reason", "r", "--wait", "--timeout", "1s"];
    let (code, output, errors) = texts(&kim.run_command(&never).await?);
    assert!(code == Some(1) && output.starts_with("the cluster new "), "{code:?}: {output}{errors}");
    assert!(errors.contains("1 of 1 are not ready after 1s: the cluster new"), "{errors}");

    let scale = ["cluster", "scale", "fra", "--workers", "1", "--reason", "load", "--wait"];
    let mut prevented = Waiting::start(&kim, &scale)?;
    prevented.step("the cluster fra is changing").await?;
    let mut deleted =
        Waiting::start(&kim, &["cluster", "delete", "fra", "--yes", "--reason", "over", "--wait"])?;
    deleted.step("the cluster fra is deleting").await?;
    let (code, _, errors) = prevented.end().await?;
    assert!(
        code == Some(1) && errors.contains("is being deleted, so it cannot be ready any more"),
        "{errors}"
    );
    change(&api, DELETE_CLUSTER, "fra").await?;
    deleted.step("the cluster fra is deleted").await?;
    assert_eq!(deleted.end().await?.0, Some(0));

    // An upgrade that continues.
    let upgrade = "INSERT INTO cluster_upgrade (upgrade_id, cluster_id, released, back, parallelism, deadline_seconds,
                       created_at, created_by, reason, paused, requested_nodes)
                   SELECT 'up1', cluster_id, FALSE, FALSE, 1, 900, clock_timestamp(), 'kim', 'a try', 'n1: no', '{}'::JSONB
                   FROM cluster WHERE name = $1";
    change(&api, &[upgrade], "lon").await?;
    let resume = ["cluster", "upgrade", "lon", "--resume", "--reason", "again", "--wait"];
    let mut resumed = Waiting::start(&kim, &resume)?;
    resumed.step("is being upgraded: 0 of 0 nodes are done").await?;
    let finish = "UPDATE cluster_upgrade SET ended = 'finished', ended_at = clock_timestamp()
                  WHERE cluster_id IN (SELECT cluster_id FROM cluster WHERE name = $1)";
    change(&api, &[finish], "lon").await?;
    resumed.step("the cluster lon is upgraded or rolled back").await?;
    assert_eq!(resumed.end().await?.0, Some(0));
    let pause = ["cluster", "upgrade", "lon", "--pause", "--reason", "look", "--wait"];
    assert_eq!(kim.run_command(&pause).await?.status.code(), Some(2));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordered_update_is_waited_for() -> TestResult {
    let api = Api::start("api_wait_update_orders").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    api.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = true).await?;
    sqlx::query(UPDATES[0]).execute(&api.pool).await?;
    let machine = provided(&api.pool).await?;
    let update = ["update", "--selector", "provider=rack", "--release", "one", "--reason", "a try", "--wait"];
    for (end, step, expected) in [
        (FINISH_UPDATE, "is finished", 0),
        (ABORT_UPDATE, "is aborted, so it cannot be finished any more", 1),
    ] {
        let mut waiting = Waiting::start(&kim, &update)?;
        waiting.step("is rolling: waiting 1").await?;
        let id: String = sqlx::query_scalar("SELECT roll_out_id FROM roll_out WHERE ended_at IS NULL")
            .fetch_one(&api.pool)
            .await?;
        sqlx::query("UPDATE roll_out_machine SET active = FALSE").execute(&api.pool).await?;
        change(&api, end, &id).await?;
        waiting.step(step).await?;
        assert_eq!(waiting.end().await?.0, Some(expected), "{step} on {machine}");
    }
    Ok(api.stop().await?)
}
