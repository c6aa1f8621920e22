//! Requests to the simulator: how they are recorded, refused, and left without an answer.

use std::collections::{BTreeMap, HashSet};

use anyhow::Result;
use prost::Message as _;
use serde_json::Value;
use shepherd::model::ids::IntentId;
use shepherd::proto::agent::v1 as wire;
use shepherd::providers::provider::{CreationControl as _, PowerAction, PowerControl, Provider as _};
use shepherd::simulator::state::FleetState;

use super::{AGENT_PATH, Running, client, program, runtime, session, take};

#[tokio::test]
async fn the_journal_holds_every_call_with_its_start_and_end() {
    let directory = tempfile::tempdir().unwrap();
    let running =
        Running::start(directory.path(), &["--machine_count", "2", "--boot_seconds", "0"]).await.unwrap();
    let provider = running.provider().unwrap();
    provider.list().await.unwrap();
    let machine = running.machine().await.unwrap();
    let intent = IntentId::generate();
    PowerControl::set_power(&provider, &machine.id, PowerAction::Cycle, intent).await.unwrap();
    provider.power_state(&machine.id).await.unwrap();
    running.strike(&machine.id, "slow").await.unwrap();
    running.strike(&machine.id, "heal").await.unwrap();
    running.until_state(&machine.id, &["up"]).await.unwrap();
    let ssh = session(&machine).await.unwrap();
    ssh.exec("a test", "true", bytes::Bytes::new()).await.unwrap();
    ssh.close().await;
    let state = running.state.clone();
    let journal = || -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(format!("{}.calls.jsonl", state.display()))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    running.stop().await.unwrap();

    let lines = journal().unwrap();
    let sequence: Vec<_> = lines.iter().map(|line| line["seq"].as_u64().unwrap()).collect();
    assert!(sequence.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{sequence:?}");
    let mut open = BTreeMap::new();
    let mut seen = Vec::new();
    for line in &lines {
        let call = line["call"].as_u64().unwrap();
        if line["phase"] == "start" {
            open.insert(call, line);
        } else {
            let start = open.remove(&call).expect("an end has a start, and one");
            seen.push((start["what"].as_str().unwrap(), start, line));
        }
    }
    assert!(open.is_empty(), "{open:?}");
    let what: HashSet<_> = seen.iter().map(|(what, ..)| *what).collect();
    for expected in ["list", "create", "power", "power-state", "machine", "connection", "exec"] {
        assert!(what.contains(expected), "{expected} is not in {what:?}");
    }
    let (_, start, end) = seen.iter().find(|(what, ..)| *what == "power").unwrap();
    assert_eq!(start["intent"], intent.to_string());
    assert_eq!(start["caller"], "test");
    assert_eq!(start["machine"], machine.id);
    assert_eq!(start["arguments"]["action"], "cycle");
    assert_eq!(end["outcome"], "ok");
}

#[tokio::test]
async fn wrong_requests_are_answered_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(directory.path(), &["--machine_count", "2"]).await.unwrap();
    let client = client().unwrap();
    let post =
        |path: &str, body: &str| client.post(format!("{}{path}", running.url)).body(body.to_owned()).send();
    let intent = IntentId::generate();
    for (path, body, status) in [
        ("/v1/machines", "", 400),
        ("/v1/machines", "{\"intent\":\"x\"}", 400),
        ("/v1/machines", &format!("{{\"intent\":\"{intent}\",\"more\":1}}"), 400),
        ("/v1/machines", &format!("{{\"intent\":\"{intent}\",\"reservation\":\"slot-9\"}}"), 404),
        ("/v1/machines/sim-0001/power", &format!("{{\"intent\":\"{intent}\",\"action\":\"on\"}}"), 404),
        ("/v1/machines/sim-0001/power", &format!("{{\"intent\":\"{intent}\",\"action\":\"burn\"}}"), 400),
        ("/v1/machines/sim-0001/faults", "{\"fault\":\"flood\"}", 400),
        ("/v1/machines/sim-0001/faults", "{\"fault\":\"kill\"}", 409),
        ("/v1/faults", "{\"fault\":\"kill\"}", 400),
    ] {
        let answer = post(path, body).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{path} {body}");
        let value: Value = answer.json().await.unwrap();
        assert!(value["error"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
        let lines = running.journal().unwrap();
        let [.., start, end] = lines.as_slice() else { panic!("{path} {body} is not in the journal") };
        assert_eq!(
            (&start["seq"], &end["result"]["status"]),
            (&end["call"], &status.into()),
            "{path} {body}"
        );
        assert_eq!(end["result"]["error"], value["error"]);
    }
    let state = running.state.clone();
    running.stop().await.unwrap();
    let kept = FleetState::load(&state).unwrap().unwrap();
    assert!(kept.machines.iter().all(|record| record.intent.is_none() && record.machine.boots == 0));
}

#[tokio::test]
async fn lost_answers_make_no_second_machine() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--machine_count", "40", "--fault_profile", "harsh", "--seed", "3", "--boot_seconds", "0"];
    let running = Running::start(directory.path(), &flags).await.unwrap();
    let provider = running.provider().unwrap();
    let mut lost = 0;
    let mut made = HashSet::new();
    for _ in 0..40 {
        let intent = IntentId::generate();
        let mut tries = 0;
        let machine = loop {
            tries += 1;
            assert!(tries < 100, "an API of a thousand that fails seventy");
            match provider.create(intent, None).await {
                Ok(machine) => break machine,
                Err(error) => assert!(error.message.contains("503"), "{error}"),
            }
        };
        lost += tries - 1;
        made.insert(machine.id);
    }
    assert_eq!(made.len(), 40);
    assert!(lost > 0, "nothing failed, so nothing was shown");
    running.stop().await.unwrap();
}

#[test]
fn an_enrolment_that_is_no_message_is_refused() {
    // The decoder and the limit come before the rules; both are tested over a real connection.
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let running =
            Running::start(directory.path(), &["--machine_count", "1", "--boot_seconds", "0"]).await.unwrap();
        let machine = running.machine().await.unwrap();
        let agent = program().unwrap();
        let empty = wire::EnrollRequest::default();
        let error = take(&machine, &agent, &empty).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("machine_id"), "{error}");
        let ssh = session(&machine).await.unwrap();
        let command = format!("'sh' '-c' 'x' 'shepherd-enroll' '{AGENT_PATH}'");
        for input in [b"\xff\xff\xff".to_vec(), vec![0x0a; (1 << 20) + 10]] {
            let output = ssh.exec("a test", &command, input.into()).await.unwrap();
            assert_eq!(output.exit, shepherd::takeover::exec::CommandExit::Status(2));
        }
        assert_eq!(running.truth(&machine.id).await.unwrap()["enrolments"], 0);
        assert!(!empty.encode_to_vec().iter().any(|byte| *byte != 0));
        running.stop().await.unwrap();
    });
}
