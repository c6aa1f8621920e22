//! Call journal of the simulator (JSON lines).
//!
//! It records every call for a checker. The file is `<state file>.calls.jsonl`, with one JSON object per line. A call
//! has two lines, `start` and `end`, so that a reader can see which calls overlapped. Both have the call's number,
//! which is the `seq` of its start. `seq` counts all lines and never repeats, over restarts too. A call whose caller
//! disconnected ends with the outcome `dropped`, and its result states whether it was carried out anyway
//! (`"done": true`). A call without an end was cut off by the end of the simulator itself. A malformed request is a
//! call, too.
//!
//! | field | start | end |
//! | --- | --- | --- |
//! | `seq`, `at` | line number, host time | the same |
//! | `phase` | `start` | `end` |
//! | `call` | its own `seq` | the start's `seq` |
//! | `channel` | `api`, `ssh`, `fault` | – |
//! | `what` | `list`, `create`, `power`, `connection`, `upload`, `enroll`, … | – |
//! | `machine` | id, or null for the whole provider | – |
//! | `caller`, `intent` | the caller's name and intent as it sent them, or null | – |
//! | `arguments` | an object | – |
//! | `outcome` | – | `ok`, `refused`, `failed`, `dropped` |
//! | `result` | – | an object |

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use serde_json::{Value, json};

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum JournalOutcome {
    /// The call was carried out.
    Ok,
    /// The call was understood and rejected.
    Refused,
    /// The call failed, by a fault or otherwise.
    Failed,
    /// The caller disconnected before the answer.
    Dropped,
}

/// A call at its start.
#[derive(Clone, Debug, Default)]
pub(crate) struct JournalCall<'a> {
    /// The channel it came through: `api`, `ssh` or `fault`.
    pub(crate) channel: &'a str,
    /// The action, for example `create` or `upload`.
    pub(crate) action: &'a str,
    /// The id of its machine; `None` for the whole provider.
    pub(crate) machine: Option<&'a str>,
    /// The caller's name for itself, if it sent one.
    pub(crate) caller: Option<&'a str>,
    /// The intent id, if the call has one.
    pub(crate) intent: Option<String>,
    /// The arguments of the call, an object.
    pub(crate) arguments: Value,
}

/// The file that records calls.
pub(crate) struct Journal {
    path: PathBuf,
    lines: Mutex<JournalFile>,
}

struct JournalFile {
    file: File,
    next: u64,
}

impl Journal {
    /// The path of the journal for a state file.
    #[must_use]
    pub(crate) fn path_beside(state: &Path) -> PathBuf {
        let mut name = state.as_os_str().to_owned();
        name.push(".calls.jsonl");
        PathBuf::from(name)
    }

    /// Opens a journal, and continues after its last line.
    pub(crate) fn open(path: &Path) -> std::io::Result<Arc<Self>> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let next = next_number(&mut file)?;
        Ok(Arc::new(Self { path: path.to_owned(), lines: Mutex::new(JournalFile { file, next }) }))
    }

    /// Writes the start of a call. The caller of this function writes its end by the returned handle.
    pub(crate) fn begin(self: &Arc<Self>, call: JournalCall<'_>) -> OpenCall {
        let JournalCall { channel, action: what, machine, caller, intent, arguments } = call;
        let number = self.write(|seq| {
            json!({
                "seq": seq, "at": host_now(), "phase": "start", "call": seq, "channel": channel, "what": what,
                "machine": machine, "caller": caller, "intent": intent, "arguments": arguments,
            })
        });
        OpenCall { journal: Arc::clone(self), number, noted_result: json!({}), ended: false }
    }

    fn end(&self, call: u64, outcome: JournalOutcome, result: &Value) {
        self.write(|seq| {
            json!({
                "seq": seq, "at": host_now(), "phase": "end", "call": call, "outcome": outcome, "result": result,
            })
        });
    }

    fn write(&self, line: impl FnOnce(u64) -> Value) -> u64 {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = lines.next;
        lines.next += 1;
        let mut text = line(seq).to_string();
        text.push('\n');
        // One write per line, so that another process reads whole lines.
        if let Err(error) = lines.file.write_all(text.as_bytes()) {
            tracing::error!(path = %self.path.display(), %error, "cannot write the journal of calls");
        }
        seq
    }
}

/// A call that has started and not ended.
#[must_use = "a call has an end"]
pub(crate) struct OpenCall {
    journal: Arc<Journal>,
    number: u64,
    /// The result to write if the caller disconnects.
    noted_result: Value,
    ended: bool,
}

impl OpenCall {
    /// Notes that the call was carried out, before it is answered. If the caller disconnects before the answer, the
    /// journal must not hide the effect.
    pub(crate) fn note_result(&mut self, answer: &Value) {
        self.noted_result = json!({ "done": true, "answer": answer });
    }

    /// Writes the end of the call.
    pub(crate) fn end(mut self, outcome: JournalOutcome, result: &Value) {
        self.ended = true;
        self.journal.end(self.number, outcome, result);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        if !self.ended {
            self.journal.end(self.number, JournalOutcome::Dropped, &self.noted_result);
        }
    }
}

fn host_now() -> String {
    DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// The number after that of the last whole line. A line that a crash cut off is terminated, so that the next one is a
/// line of its own.
fn next_number(file: &mut File) -> std::io::Result<u64> {
    const TAIL: u64 = 1 << 20;
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    if tail.last().is_some_and(|byte| *byte != b'\n') {
        file.write_all(b"\n")?;
    }
    let last = tail
        .split(|byte| *byte == b'\n')
        .rev()
        .find_map(|line| serde_json::from_slice::<Value>(line).ok()?.get("seq")?.as_u64());
    Ok(last.map_or(1, |seq| seq + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    #[test]
    fn a_call_has_a_start_and_an_end_even_when_its_caller_goes_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("calls");
        let journal = Journal::open(&path).unwrap();
        let first = journal.begin(JournalCall { channel: "api", action: "list", ..JournalCall::default() });
        let second = journal.begin(JournalCall {
            action: "power",
            machine: Some("sim-0001"),
            ..JournalCall::default()
        });
        let mut third = journal.begin(JournalCall { action: "create", ..JournalCall::default() });
        first.end(JournalOutcome::Ok, &json!({ "machines": 2 }));
        drop(second);
        third.note_result(&json!({ "id": "sim-0002" }));
        drop(third);
        let lines = lines(&path);
        let numbers: Vec<_> = lines.iter().map(|line| line["seq"].as_u64().unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6]);
        let ends: Vec<_> =
            lines[3..].iter().map(|line| [&line["call"], &line["outcome"], &line["result"]]).collect();
        let done = json!({ "done": true, "answer": { "id": "sim-0002" } });
        assert_eq!(ends[0], [&json!(1), &json!("ok"), &json!({ "machines": 2 })]);
        assert_eq!(ends[1], [&json!(2), &json!("dropped"), &json!({})]);
        assert_eq!(ends[2], [&json!(3), &json!("dropped"), &done]);
    }

    #[test]
    fn numbers_go_on_after_a_restart_and_a_torn_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("calls");
        Journal::open(&path).unwrap().begin(JournalCall::default()).end(JournalOutcome::Ok, &json!({}));
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"seq\":3,\"a").unwrap();
        Journal::open(&path).unwrap().begin(JournalCall::default()).end(JournalOutcome::Ok, &json!({}));
        let numbers: Vec<_> = lines(&path).iter().map(|line| line["seq"].as_u64().unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3, 4]);
    }
}
