//! Orders that nothing undoes, on a terminal and without one, in two contexts: only the right text or flag gives them.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::json;
use shepherd::model::access::AccessRole;
use shepherd::model::shell_words::quote_if_needed;

use crate::api::command_line::{Operator, interruptible, read_stdout};
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::screen::Screen;

/// Each command has it: a shell needs quotes around it.
const REASON: &str = "it's over";
/// Orders in the audit that were given, and not only tried.
const ORDERED: &str = "SELECT count(*) FROM audit WHERE NOT dry_run";

/// Clusters to delete, to restore, and to take Kubernetes from.
const CLUSTERS: [&str; 3] = [
    "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
         created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
     SELECT gen_random_uuid(), name, 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
            clock_timestamp(), 'ca', '[]' FROM (VALUES ('old'), ('burnt'), ('kube')) n (name)",
    "INSERT INTO cluster_snapshot
     SELECT gen_random_uuid(), cluster_id, clock_timestamp() - INTERVAL '1 hour', 'interval', 7, 0, 12345, 5, 3, '[]',
            decode(repeat('cd', 32), 'hex') FROM cluster WHERE name = 'burnt'",
    "INSERT INTO cluster_kubernetes
     SELECT cluster_id, decode(repeat('1a', 32), 'hex'), '1.30.1', '10.96.0.0/16', '10.128.0.0/12', 24,
            'cluster.local', '{}', NULL, clock_timestamp(), 'kim', NULL, '[]', NULL FROM cluster WHERE name = 'kube'",
];

/// An order that nothing undoes.
struct FinalOrder {
    /// The command, without its reason.
    words: Vec<String>,
    /// What a person types.
    text: String,
    /// The flags that replace it.
    flags: Vec<String>,
    /// Counts what the order changes.
    effect: &'static str,
}

fn final_order(line: &str, text: &str, flags: &[&str], effect: &'static str) -> FinalOrder {
    FinalOrder {
        words: line.split(' ').map(str::to_owned).collect(),
        text: text.to_owned(),
        flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
        effect,
    }
}

/// Fills a fleet, and returns one order of each kind about it.
async fn populate(api: &Api) -> anyhow::Result<Vec<FinalOrder>> {
    let mut machines = Vec::new();
    for _ in 0..5 {
        machines.push(provided(&api.pool).await?);
    }
    for statement in CLUSTERS {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let join = "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, voter)
                SELECT $1, cluster_id, 'control-plane', clock_timestamp(), TRUE FROM cluster WHERE name = 'kube'";
    sqlx::query(join).bind(machines[1].0).execute(&api.pool).await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let wipe = json!({ "machine": machines[2], "wipe": true, "order": order("sold", "wipe") });
    api.call(Some(&admin.token), "Machines/Retire", wipe).await?.ok()?;
    let [one, voter, wiping, two, three] = &machines[..] else { anyhow::bail!("five machines") };
    let (retired, words) = ("SELECT count(*) FROM machine_retirement", format!("rack/{wiping} is not wiped"));
    Ok(vec![
        final_order(&format!("retire {one}"), &format!("rack/{one}"), &["--yes"], retired),
        final_order(&format!("retire {two} {three}"), "2", &["--yes-count", "2"], retired),
        final_order(
            &format!("retire waive {wiping} wipe"),
            &words,
            &["--confirm", &words],
            "SELECT count(*) FROM machine_retirement WHERE wipe_waived_at IS NOT NULL",
        ),
        final_order(
            &format!("power off {voter}"),
            &format!("rack/{voter}"),
            &["--yes"],
            "SELECT count(*) FROM machine_power_order",
        ),
        final_order(
            "cluster delete old",
            "old",
            &["--yes"],
            "SELECT count(*) FROM cluster WHERE deleting_at IS NOT NULL",
        ),
        final_order(
            "cluster restore burnt --bypass-quorum",
            "burnt",
            &["--yes"],
            "SELECT count(*) FROM cluster WHERE restoring_from IS NOT NULL",
        ),
        final_order(
            "cluster kubernetes remove kube",
            "kube",
            &["--yes"],
            "SELECT count(*) FROM cluster_kubernetes WHERE removing_by IS NOT NULL",
        ),
    ])
}

/// Sentences with a command: in the history of a machine, in an update and in a brake.
const SENTENCES: [&str; 3] = [
    "INSERT INTO history (machine_id, at, event, detail)
     SELECT machine_id, clock_timestamp(), 'Noted', 'the budget is used up (shepherdctl get budgets: reboot)'
     FROM machine",
    "INSERT INTO roll_out VALUES ('u1', decode(repeat('ab', 32), 'hex'), 'one', '', 1, 60, clock_timestamp(), 'kim', 'a try',
         'the budget is used up (shepherdctl get budgets: restart-agent)', NULL, NULL)",
    "INSERT INTO brake VALUES ('recovery', 'rack', 'brake: many are silent; see: shepherdctl get issues',
         clock_timestamp(), clock_timestamp())",
];

/// A fleet, its context, and the orders about it.
struct Fleet<'a> {
    api: &'a Api,
    context: &'static str,
    orders: Vec<FinalOrder>,
}

impl Fleet<'_> {
    /// The command, with the context and these flags.
    fn command(&self, kim: &Operator<'_>, order: &FinalOrder, flags: &[String]) -> Command {
        let words = ["--context", self.context].into_iter().chain(order.words.iter().map(String::as_str));
        let flags = ["--reason", REASON].into_iter().chain(flags.iter().map(String::as_str));
        kim.command(&words.chain(flags).collect::<Vec<_>>())
    }

    /// What prompts and errors name.
    fn description(&self) -> String {
        format!("context {} ({})", self.context, self.api.server.local_addr)
    }

    /// What the order has changed so far, and how many orders were given.
    async fn state(&self, order: &FinalOrder) -> anyhow::Result<(i64, i64)> {
        Ok((self.api.count(order.effect).await?, self.api.count(ORDERED).await?))
    }

    /// Types this at the prompt, and returns the exit code and the screen.
    async fn answer(
        &self,
        kim: &Operator<'_>,
        order: &FinalOrder,
        keys: &[u8],
    ) -> anyhow::Result<(Option<i32>, String)> {
        let mut screen = Screen::start(&self.command(kim, order, &[]), 50, 400)?;
        let prompt = if order.flags.len() > 1 && order.text == "2" {
            "Type their number to give the order:".to_owned()
        } else {
            format!("Type {} to give it:", order.text)
        };
        let text = screen.until(&[&prompt]).await?;
        ensure!(text.contains(&self.description()), "the prompt does not name the fleet:\n{text}");
        screen.types(keys)?;
        let (status, text, _) = screen.ended().await?;
        Ok((status.code(), text))
    }

    /// Runs the command without a terminal, which must refuse it. Returns the line that it prints.
    async fn refused_line(&self, kim: &Operator<'_>, order: &FinalOrder) -> anyhow::Result<String> {
        let output = tokio::process::Command::from(self.command(kim, order, &[])).output().await?;
        let text = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(2), "{:?}: {text}", order.words);
        ensure!(text.contains(&self.description()) && text.contains("nothing was ordered"), "{text}");
        let line = text.lines().last().context("a line to type")?.trim().to_owned();
        let flags: Vec<String> = order.flags.iter().map(|flag| quote_if_needed(flag)).collect();
        ensure!(line.ends_with(&flags.join(" ")), "{line}");
        Ok(line)
    }
}

/// Runs a line in a shell, in the environment of the operator.
async fn paste(kim: &Operator<'_>, line: &str) -> anyhow::Result<Output> {
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).stdin(Stdio::null());
    for (name, value) in kim.command(&[]).get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    Ok(tokio::process::Command::from(shell).output().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_right_text_or_flag_gives_an_order_that_nothing_undoes() -> TestResult {
    let (prod, lab) = (Api::start("api_confirm_prod").await?, Api::start("api_confirm_lab").await?);
    let kim = Operator { api: &prod, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "prod"])?;
    let dialect = lab.database.dialect().as_str();
    let bootstrap = ["--direct", "--bmdb-dialect", dialect, "tokens", "bootstrap", "--save-context", "lab"];
    read_stdout(&kim.command(&bootstrap).env("SHEPHERD_BMDB_URL", lab.database.url()).output()?)?;
    let fleets = [
        Fleet { context: "prod", orders: populate(&prod).await?, api: &prod },
        Fleet { context: "lab", orders: populate(&lab).await?, api: &lab },
    ];
    for fleet in &fleets {
        for order in &fleet.orders {
            let before = fleet.state(order).await?;
            let line = fleet.refused_line(&kim, order).await?;
            // A wrong text, none, and the end of the input.
            for (keys, expected) in [("nonsense\r", 2), ("\r", 2), ("\u{4}", 2)] {
                let (code, text) = fleet.answer(&kim, order, keys.as_bytes()).await?;
                assert_eq!(code, Some(expected), "{:?} {keys:?}: {text}", order.words);
            }
            assert_eq!(fleet.state(order).await?, before, "{:?} changed something", order.words);
            // In one context a person types it, in the other one they paste the line.
            let text = if fleet.context == "prod" {
                let (code, text) = fleet.answer(&kim, order, format!("{}\r", order.text).as_bytes()).await?;
                assert_eq!(code, Some(0), "{:?}: {text}", order.words);
                text
            } else {
                read_stdout(&paste(&kim, &line).await?).with_context(|| line.clone())?
            };
            let after = fleet.state(order).await?;
            assert!(after.0 > before.0 && after.1 > before.1, "{:?}: {text}", order.words);
        }
    }
    // Each order reached the fleet of its context alone.
    let [first, second] = &fleets;
    assert_eq!(first.api.count(ORDERED).await?, second.api.count(ORDERED).await?);
    drop(fleets);
    drop(kim);
    prod.stop().await?;
    Ok(lab.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn number_of_many_machines_is_replaced_by_no_other_flag() -> TestResult {
    let api = Api::start("api_confirm_many").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (one, two) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    let retire = |flags: &[&str]| {
        let words = ["retire", &one, &two, "--reason", "sold"];
        kim.command(&[&words[..], flags].concat())
    };
    for (flags, expected) in
        [(&["--yes"][..], 2), (&["--yes-count", "3"], 4), (&["--yes", "--yes-count", "1"], 4)]
    {
        let output = retire(flags).output()?;
        assert_eq!(output.status.code(), Some(expected), "{flags:?}: {output:?}");
        assert_eq!(api.count("SELECT count(*) FROM machine_retirement").await?, 0, "{flags:?}");
    }
    // Another number on the terminal is refused, as it is in the flag, and nothing is sent.
    let mut screen = Screen::start(&retire(&[]), 40, 400)?;
    screen.until(&["Type their number to give the order:"]).await?;
    screen.types(b"3\r")?;
    let (status, text, _) = screen.ended().await?;
    assert_eq!(status.code(), Some(4), "{text}");
    let orders = "SELECT count(*) FROM audit WHERE NOT dry_run AND rpc LIKE '%BulkOrders/Submit'";
    assert_eq!(api.count(orders).await?, 2, "only the two wrong flags were sent");

    // Ctrl-C ends the command by the signal.
    let mut screen = Screen::start(&interruptible(&retire(&[])), 40, 400)?;
    screen.until(&["Type their number to give the order:"]).await?;
    screen.types(b"\x03")?;
    let (status, text, _) = screen.ended().await?;
    assert_eq!(status.code(), Some(130), "{text}");
    assert_eq!(api.count("SELECT count(*) FROM machine_retirement").await?, 0);
    drop(kim);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_list_prints_goes_into_an_order() -> TestResult {
    let api = Api::start("api_order_names").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for _ in 0..3 {
        provided(&api.pool).await?;
    }
    let hold = async |input: &str| -> anyhow::Result<Output> {
        let mut child = tokio::process::Command::from(kim.command(&["hold", "-", "--reason", "a fuse"]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut stdin = child.stdin.take().context("its input")?;
        tokio::io::AsyncWriteExt::write_all(&mut stdin, input.as_bytes()).await?;
        drop(stdin);
        Ok(child.wait_with_output().await?)
    };
    let holds = "SELECT count(*) FROM machine_hold";
    let names = kim.ask(&["get", "machines", "-o", "name"])?;
    assert_eq!(names.lines().count(), 3, "{names}");
    for (input, code, part) in [
        (String::new(), 2, "standard input has no name of a machine"),
        (kim.ask(&["get", "machines"])?, 2, "line 1 of standard input is \"NAME"),
        (format!("{names}nobody\n"), 3, "knows no machine \"nobody\""),
    ] {
        let output = hold(&input).await?;
        let text = String::from_utf8(output.stderr)?;
        assert!(output.status.code() == Some(code) && text.contains(part), "{input}: {text}");
        assert_eq!(api.count(holds).await?, 0, "{input}");
    }
    let held = read_stdout(&hold(&format!("{names}{names}")).await?)?;
    assert!(held.ends_with("3 machines: 3 changed\n"), "each name once: {held}");
    assert_eq!(api.count(holds).await?, 3);
    let one = names.lines().next().context("a name")?;
    let output = kim.json(&["release", one, one])?;
    assert_eq!(output["outcome"], "CHANGED", "a name that is there twice is one machine: {output}");
    drop(kim);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_runs_and_printed_commands_name_the_fleet() -> TestResult {
    let api = Api::start("api_fleet_names").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let machine = provided(&api.pool).await?.to_string();
    kim.ask(&["hold", &machine, "--reason", "a disk"])?;
    for statement in SENTENCES {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let server = format!("context home ({})", api.server.local_addr);
    let dry = ["reboot", &machine, "--reason", "a kernel", "--dry-run"];
    for (output, expected) in [
        (kim.ask(&["release", &machine, "--dry-run"])?, &server),
        (kim.json(&["release", &machine, "--dry-run"])?["fleet"].to_string(), &server),
        (kim.direct(&["release", &machine, "--dry-run"])?, &"the database ".to_owned()),
    ] {
        assert!(output.contains(expected), "{output}");
    }
    for (arguments, printed) in [
        (vec!["why", &machine], "shepherdctl release "),
        (vec!["why", &machine, "--context", "home"], "shepherdctl --context home release "),
        (vec!["--context=home", "why", &machine], "shepherdctl --context home release "),
        (vec!["timeline", &machine, "--context", "home"], "(shepherdctl --context home get budgets: reboot)"),
        (
            vec!["describe", "machine", &machine, "--context", "home"],
            "(shepherdctl --context home get budgets: reboot)",
        ),
        (
            vec!["describe", "update", "u1", "--context", "home"],
            "(shepherdctl --context home get budgets: restart-agent)",
        ),
        (vec!["top", "--once", "--context", "home"], "see: shepherdctl --context home get issues"),
    ] {
        let output = kim.ask(&arguments)?;
        assert!(output.contains(printed), "{arguments:?}: {output}");
    }
    let direct = kim.direct(&["why", &machine])?;
    let dialect = api.database.dialect().as_str();
    assert!(direct.contains(&format!("shepherdctl --direct --bmdb-dialect {dialect} release ")), "{direct}");
    let cordoned = format!("run: shepherdctl --context home hold {machine} --reason TEXT");
    for (arguments, printed) in [
        (vec!["--context", "home", "why", "nobody"], "`shepherdctl --context home get machines`"),
        (vec!["--context", "home", "cordon", &machine], cordoned.as_str()),
        (vec!["get", "artefacts", "--context", "home"], "shepherdctl --context home artefacts add"),
        (
            vec!["wait", "update", "u1", "--for", "finished", "--timeout", "0", "--context", "home"],
            "(shepherdctl --context home get budgets: restart-agent)",
        ),
    ] {
        let output = kim.command(&arguments).output()?;
        let text = String::from_utf8(output.stderr)?;
        assert!(text.contains(printed), "{arguments:?}: {text}");
    }
    for (arguments, printed) in [
        (vec!["why", "nobody"], "`shepherdctl --context home get machines`"),
        (vec!["describe", "update", "nobody"], "shepherdctl --context home get updates"),
        (vec!["hold", "-l", "name=none", "--reason", "r"], "shepherdctl --context home get machines"),
        (vec!["cordon", &machine], cordoned.as_str()),
    ] {
        let output =
            kim.command(&[&arguments[..], &["--context", "home", "-o", "json"]].concat()).output()?;
        let error: serde_json::Value = serde_json::from_slice(&output.stderr)?;
        let sentence = error["error"]["message"].as_str().unwrap_or_default();
        assert!(sentence.contains(printed), "{arguments:?}: {error}");
    }
    let held = kim.command(&dry).output()?;
    assert_eq!(held.status.code(), Some(4), "a dry run exits as the order would: {held:?}");
    drop(kim);
    Ok(api.stop().await?)
}
