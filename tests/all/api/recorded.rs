//! Every command of `shepherdctl` prints what is recorded in `tests/all/golden/api/commands.snap`: with the API of a
//! server, and with a login to the database.
//!
//! One script of commands runs on two fleets that are alike, one each way. What differs from run to run (identifiers,
//! times, secrets, this host, the width of columns) is masked. Where the two ways print something else, both are recorded.
//!
//! The orders of the script run again on two such fleets, with `-o json`. What they print is not recorded: the two ways
//! are compared with each other. `same_answers` does the same with commands that read.

use std::fmt::Write as _;
use std::fs;
use std::process::Output;

use anyhow::Context as _;
use serde_json::Value;
use shepherd::bmdb::connection::settings::ConnectionSettings;
use shepherd::cli::command::grammar;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::api::same_answers::{leaves, populate};
use crate::harness::aloud::TestResult;

/// Commands in the order in which they run. `M` is a machine that a cluster has, `N` a free one, `HOME` a folder with
/// the files that the commands read.
const SCRIPT: &[&str] = &[
    // Reads.
    "get machines",
    "get machines --phase Ready",
    "get sessions --limit 1000",
    "get work --limit 1",
    "get providers",
    "get loops",
    "get approvals",
    "get budgets",
    "get brakes",
    "get shepherds",
    "get clusters",
    "get clusters ams nowhere",
    "get machine N nobody",
    "get issues",
    "get tokens",
    "get artefacts",
    "get updates",
    "get policy",
    "get audit --limit 2",
    "audit --actor nobody",
    "get contexts",
    "describe machine N",
    "describe cluster ams",
    "describe shepherd nobody",
    "describe session nobody",
    "describe work nobody",
    "describe provider nobody",
    "describe loop provisioner",
    "describe budget reboot",
    "describe brake recovery",
    "describe approval nobody",
    "describe issue work-fails",
    "describe token nobody",
    "describe artefact one",
    "describe update u1",
    "describe policy",
    "describe audit nobody",
    "describe context home",
    "whoami",
    "version",
    "version --client",
    "contexts",
    "contexts use home",
    "contexts use nowhere",
    "contexts delete nowhere",
    "explain AgentStarting",
    "explain nowhere",
    "why M",
    "why N",
    "timeline N",
    "plan --machine N",
    "issues",
    "top --once",
    "cluster get",
    "cluster describe ams",
    "cluster plan ams",
    "cluster plan fra --control-plane 1 --workers 1",
    "cluster snapshots ams",
    "cluster credentials get ams",
    "logs N",
    // Orders about a machine.
    "hold N --reason disk --until 2h",
    "hold N --reason disk --scope power --dry-run",
    "release N --reason done",
    "release N",
    "retry N --reason again",
    "quarantine N --reason fan",
    "release N --quarantine",
    "label N row=7 owner=kim",
    "label --label row=7 hall=2",
    "label --label row=7 hall=2 --yes-count 1",
    "label N owner-",
    "label N row",
    "hold M N --reason disk",
    "hold M nobody --reason disk",
    "release M N",
    "prioritize N urgent --reason customer --until 4h",
    "prioritize N normal --reason done",
    "reboot N --reason kernel",
    "reboot N --reason kernel",
    "power cancel N --reason no",
    "power off N --reason fan",
    "power on N --reason fan",
    "power cancel N",
    "allow host-key N --fingerprint SHA256:abc",
    "allow signing-keys N --reason burnt",
    "logs N roleserver",
    "retire N --reason lease --dry-run",
    "retire N --reason lease",
    "retire M N --reason lease",
    "retire N --reason lease --yes",
    "retire N --reason lease --yes",
    "why N",
    "retire waive N wipe --reason shredded",
    "retire waive N release --reason gone",
    "retire cancel N --reason needed",
    "retire cancel N",
    // Orders about the fleet.
    "loops pause recoverer --provider rack --reason switch --until 2h",
    "loops resume recoverer --provider rack --reason switch",
    "loops resume recoverer --provider rack",
    "budget set reboot --max-count 50 --reason kernel",
    "budget set nonsense --max-count 50 --reason kernel",
    "get budgets",
    "approve 0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90 --reason looked",
    "artefacts add HOME/server --name server-1 --reason front",
    "artefacts add HOME/server --name server-1 --reason front",
    "artefacts delete server-1 --reason front",
    "artefacts delete server-1 --reason front",
    "update --selector cpus>=4 --release one --reason try --dry-run",
    "update --selector cpus>=4 --release two --reason try",
    "update pause u1 --reason look",
    "update resume u1 --reason looked",
    "update abort u1 --reason bad",
    "update abort u1 --reason bad",
    "tokens create lee --role viewer --reason new --output-file HOME/lee.token",
    "tokens create lee --role nobody --reason new",
    "tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10 --reason left",
    // Orders about clusters.
    "cluster create fra --workers 1 --reason hall",
    "cluster create fra --workers 1 --reason hall",
    "cluster scale ams --workers 3 --reason load",
    "cluster scale nowhere --workers 3 --reason load",
    "cluster declare ams HOME/role.toml --reason front",
    "cluster declare ams HOME/bad.toml --reason front",
    "cluster roles ams --add-role front --remove-role web --reason front",
    "cluster undeclare ams web --reason front",
    "cluster approve ams N --reason console",
    "cluster snapshot ams --reason before",
    "cluster rotate-key ams --reason lost",
    "cluster rotate-secrets-key ams --reason lost",
    "cluster renew-peers ams --reason ended",
    "cluster rotate-authority ams --reason old",
    "cluster rotate-authority ams --compromised --reason stolen",
    "cluster restore ams --reason burnt --dry-run",
    "cluster restore ams --reason burnt",
    "cluster credentials issue ams --output-dir HOME/ams --reason look --dry-run",
    "cluster credentials revoke ams 0199d0a2-4f5e-7cc1-9d52-5b1f0a1c2d3e --reason left",
    "cluster kubernetes set ams --bundle one --reason services",
    "cluster kubernetes rotate ams --keys clients --reason stolen",
    "cluster kubeconfig ams --output-file HOME/ams.yaml --reason look",
    "cluster kubeconfig ams --until 30d --reason look",
    "cluster upgrade ams --rollback --reason pods",
    "cluster upgrade ams --kubernetes-bundle one --reason next --dry-run",
    "cluster kubernetes remove ams --reason over",
    "cluster delete ams --reason over",
    "cluster delete ams --reason over --yes",
    "cluster delete ams --reason over",
    // Commands that call nothing, and commands that call everything.
    "completions nonsense",
    "manual HOME/manual",
    "debug bundle --output-file HOME/bundle.tar.gz",
    "no-such-command",
    // Last, because the other commands use it.
    "contexts delete home",
];
/// Commands that exist with the database alone, or print while they run. They have tests of their own.
const ELSEWHERE: &[&str] = &[
    "declare restored",
    "policy disable-two-person-rule",
    "tokens bootstrap",
    "options",
    "watch",
    "wait machines",
    "wait clusters",
    "wait updates",
];
/// The cluster was observed just now.
const RENEWAL: &str = "UPDATE cluster SET polled_at = clock_timestamp(), observed_at = clock_timestamp() WHERE observed_at IS NOT NULL";

/// Whether this command of the script gives an order.
fn is_order(command: &str) -> bool {
    let grammar = grammar();
    let mut found = &grammar;
    for word in command.split(' ') {
        let Some(below) = found.find_subcommand(word) else { break };
        found = below;
    }
    found.get_arguments().any(|argument| argument.get_id() == "idempotency_key")
}

/// The word without the parts that differ from run to run.
fn mask_word(word: &str) -> String {
    let hexadecimal = word.len() >= 8 && word.chars().all(|c| c.is_ascii_hexdigit() || c == '-' || c == '…');
    if hexadecimal {
        return "ID".to_owned();
    }
    let mut masked = String::new();
    for c in word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }) {
        if c != '0' || !masked.ends_with('0') {
            masked.push(c);
        }
    }
    // A duration.
    if masked.len() > 1 && masked.starts_with('0') && masked.chars().all(|c| "0dhms".contains(c)) {
        return "0s".to_owned();
    }
    masked
}

/// The text with `HOST` in place of this host's name, where that is a word of its own. Sessions record it.
pub(super) fn mask_host(text: &str) -> anyhow::Result<String> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname")?;
    let host = host.trim();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let (mut masked, mut copied) = (String::new(), 0);
    for (start, _) in text.match_indices(host) {
        let end = start + host.len();
        if !text[..start].ends_with(is_part) && !text[end..].starts_with(is_part) {
            masked += &text[copied..start];
            masked += "HOST";
            copied = end;
        }
    }
    Ok(masked + &text[copied..])
}

/// The words of each line, masked. Equal lines are then kept once.
pub(super) fn mask(text: &str) -> String {
    let mut masked: Vec<String> = Vec::new();
    for line in text.replace("just now", "0s ago").lines() {
        let mut words = Vec::new();
        for word in line.split_whitespace() {
            // A word, without the punctuation and the name in front of it that belong to the sentence.
            let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '…';
            let (mut rest, mut parts) = (word, String::new());
            while !rest.is_empty() {
                let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                parts += &mask_word(&rest[..end]);
                let after = rest[end..].find(is_part).map_or(rest.len(), |at| end + at);
                parts += &rest[end..after];
                rest = &rest[after..];
            }
            words.push(parts);
        }
        // A time has its date if it is on another day.
        masked.push(words.join(" ").replace("last ID 0:0,", "last 0:0,") + "\n");
    }
    masked.dedup();
    masked.concat()
}

/// A fleet, and an operator who gives it commands in one of the two ways.
struct Way<'a> {
    kim: Operator<'a>,
    direct: bool,
    machines: [(&'static str, String); 2],
}

impl<'a> Way<'a> {
    async fn new(api: &'a Api, direct: bool) -> anyhow::Result<Self> {
        let of_cluster = populate(api).await?;
        let free: uuid::Uuid = sqlx::query_scalar(
            "SELECT machine_id FROM machine WHERE machine_id NOT IN (SELECT machine_id FROM machine_cluster)",
        )
        .fetch_one(&api.pool)
        .await?;
        let kim = Operator { api, home: tempfile::tempdir()? };
        kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
        for (name, text) in [
            ("server", "#!/bin/sh\n"),
            (
                "role.toml",
                "role = \"front\"\n[[service]]\nname = \"server\"\nprogram = \"/bin/sleep\"\nuser = \"nobody\"\narguments = [\"9\"]\n",
            ),
            ("bad.toml", "role = \"front\"\n[[service]]\nname = \"server\"\n"),
        ] {
            fs::write(kim.home.path().join(name), text)?;
        }
        Ok(Self { kim, direct, machines: [("M", of_cluster), ("N", free.to_string())] })
    }

    fn output(&self, command: &str) -> anyhow::Result<Output> {
        let home = self.kim.home.path().to_str().context("text")?;
        let words: Vec<String> = command
            .split(' ')
            .map(|word| match self.machines.iter().find(|(name, _)| *name == word) {
                Some((_, machine)) => machine.clone(),
                None => word.replace("HOME", home),
            })
            .collect();
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        let dialect = self.kim.api.database.dialect().as_str();
        if self.direct {
            words.extend(["--direct", "--bmdb-dialect", dialect]);
        }
        let mut command = self.kim.command(&words);
        if self.direct {
            command.env("SHEPHERD_BMDB_URL", self.kim.api.database.url());
        }
        Ok(command.output()?)
    }

    fn text(&self, bytes: &[u8]) -> anyhow::Result<String> {
        let mut text = String::from_utf8(bytes.to_vec())?;
        text = text.replace(self.kim.home.path().to_str().context("text")?, "HOME");
        for (name, machine) in &self.machines {
            text = text.replace(machine, name).replace(&machine[..8], name);
        }
        // Machines of the same time are in the order of random identifiers.
        text = text.replace("rack/N, rack/M", "rack/M, rack/N");
        Ok(mask(&mask_host(&self.mask_fleet(&text)?)?))
    }

    /// The text without what says which fleet it is about, and in which way.
    fn mask_fleet(&self, text: &str) -> anyhow::Result<String> {
        let api = self.kim.api;
        let database = ConnectionSettings::from_url(api.database.url(), "test")?.address();
        let flags = format!(" --direct --bmdb-dialect {}", api.database.dialect().as_str());
        Ok(text
            .replace(&format!("context home ({})", api.server.local_addr), "FLEET")
            .replace(&format!("the database {database}"), "FLEET")
            .replace(env!("CARGO_BIN_EXE_shepherdctl"), "shepherdctl")
            .replace(&flags, "")
            .replace("shepherdctl --direct ", "shepherdctl "))
    }

    /// What a command prints, standard error marked, and its exit code.
    fn transcript(&self, command: &str) -> anyhow::Result<String> {
        let output = self.output(command)?;
        let mut lines = self.text(&output.stdout)?;
        for line in self.text(&output.stderr)?.lines() {
            let _ = writeln!(lines, "! {line}");
        }
        if command.starts_with("get ") || command.starts_with("debug ") {
            let mut sorted: Vec<&str> = lines.lines().collect();
            sorted.sort_unstable();
            sorted.dedup();
            lines = sorted.join("\n") + "\n";
        }
        let code = output.status.code().context("it ended by itself")?;
        if code != 0 {
            let _ = writeln!(lines, "exit code {code}");
        }
        Ok(lines)
    }

    /// What an order prints with `-o json`: its exit code, its answer, and its standard error.
    fn json_answer(&self, command: &str) -> anyhow::Result<(Option<i32>, Value, String)> {
        let output = self.output(&format!("{command} -o json"))?;
        let mut answer = Value::Null;
        if !output.stdout.is_empty() {
            answer = serde_json::from_slice(&output.stdout).with_context(|| command.to_owned())?;
        }
        self.mask_json(&mut answer)?;
        Ok((output.status.code(), answer, self.text(&output.stderr)?))
    }

    /// Masks the texts of an answer. One that names who gave an earlier order also names the token, if there is one.
    fn mask_json(&self, answer: &mut Value) -> anyhow::Result<()> {
        match answer {
            Value::String(text) => {
                *text = self.text(text.as_bytes())?.replace("kim@HOST (token ID)", "kim@HOST");
            }
            Value::Array(items) => items.iter_mut().try_for_each(|item| self.mask_json(item))?,
            Value::Object(fields) => fields.values_mut().try_for_each(|field| self.mask_json(field))?,
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }
}

#[test]
fn script_has_every_command() {
    let mut found = Vec::new();
    leaves(&grammar(), "", &mut found);
    for (path, _) in &found {
        let runs = SCRIPT.iter().any(|command| *command == path || command.starts_with(&format!("{path} ")));
        let elsewhere = ELSEWHERE.contains(&path.as_str());
        assert!(runs != elsewhere, "`{path}` must be in the script or in the list of the others");
    }
}

#[test]
fn orders_of_the_script_are_distinguished_from_reads() {
    for (command, order) in [
        ("hold N --reason disk --until 2h", true),
        ("power off N --reason fan", true),
        ("power cancel N", true),
        ("update --selector cpus>=4 --release two --reason try", true),
        ("cluster kubernetes rotate ams --keys clients --reason stolen", true),
        ("budget set nonsense --max-count 50 --reason kernel", true),
        ("get updates", false),
        ("why N", false),
        ("cluster plan ams", false),
        ("manual HOME/manual", false),
        ("no-such-command", false),
    ] {
        assert!(SCRIPT.contains(&command), "{command}");
        assert_eq!(is_order(command), order, "{command}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_prints_what_is_recorded() -> TestResult {
    let (through, direct) = (Api::start("api_recorded").await?, Api::start("api_recorded_direct").await?);
    let ways = (Way::new(&through, false).await?, Way::new(&direct, true).await?);
    let mut recorded = String::new();
    for command in SCRIPT {
        // Some answers depend on whether the cluster was observed within the last minute; the script may take longer.
        for api in [&through, &direct] {
            sqlx::query(RENEWAL).execute(&api.pool).await?;
        }
        let (through, direct) =
            tokio::task::block_in_place(|| (ways.0.transcript(command), ways.1.transcript(command)));
        let (through, direct) = (through?, direct?);
        let _ = writeln!(recorded, "$ shepherdctl {command}\n{through}");
        if direct != through {
            let _ = writeln!(recorded, "directly:\n{direct}");
        }
    }
    insta::with_settings!({snapshot_path => "../golden/api", prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!("commands", recorded);
    });
    drop(ways);
    through.stop().await?;
    Ok(direct.stop().await?)
}

/// Dry runs and rejections included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_order_prints_the_same_json_in_both_ways() -> TestResult {
    let (through, direct) =
        (Api::start("api_orders_json").await?, Api::start("api_orders_json_direct").await?);
    let ways = (Way::new(&through, false).await?, Way::new(&direct, true).await?);
    let (mut changed, mut unchanged) = (0, 0);
    for command in SCRIPT.iter().filter(|command| is_order(command)) {
        for api in [&through, &direct] {
            sqlx::query(RENEWAL).execute(&api.pool).await?;
        }
        let (through, direct) =
            tokio::task::block_in_place(|| (ways.0.json_answer(command), ways.1.json_answer(command)));
        let (through, direct) = (through?, direct?);
        assert_eq!(through, direct, "{command}: through the API, and with a login to the database");
        // The response that creates a credential has that of the order in it.
        let order = through.1.get("order").unwrap_or(&through.1);
        match order["changed"].as_bool() {
            Some(true) => changed += 1,
            Some(false) => unchanged += 1,
            None => {}
        }
    }
    // Equal answers prove nothing if all of them are errors.
    assert!(changed > 20 && unchanged > 5, "{changed} orders changed something, and {unchanged} nothing");
    drop(ways);
    through.stop().await?;
    Ok(direct.stop().await?)
}
