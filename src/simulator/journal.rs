//! Every call the simulator received, written down for a checker.
//!
//! One JSON object a line in `<state file>.calls.jsonl`. A call is two lines,
//! `start` and `end`, so that a reader can see which calls overlapped; both
//! carry the call's number, which is the `seq` of its start. `seq` counts all
//! lines and never repeats, over restarts too. A call whose caller went away
//! ends with the outcome `dropped`, and a result that says whether the deed was
//! done all the same (`"done": true`); one without an end was cut off by the end
//! of the simulator itself. A request that cannot be read is a call, too.
//!
//! | field | start | end |
//! | --- | --- | --- |
//! | `seq`, `at` | line number, host time | the same |
//! | `phase` | `start` | `end` |
//! | `call` | its own `seq` | the start's `seq` |
//! | `channel` | `api`, `ssh`, `fault` | – |
//! | `what` | `list`, `create`, `power`, `connection`, `upload`, `enroll`, … | – |
//! | `machine` | id, or null for the whole provider | – |
//! | `caller`, `intent` | what the caller said of itself, or null | – |
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
pub enum Outcome {
    /// What was asked was done.
    Ok,
    /// It was understood and declined.
    Refused,
    /// It failed, by a fault or otherwise.
    Failed,
    /// The caller went away.
    Dropped,
}

/// A call that begins.
#[derive(Clone, Debug, Default)]
pub struct Call<'a> {
    /// Which way it came.
    pub channel: &'a str,
    /// What it asks.
    pub what: &'a str,
    /// Of which machine.
    pub machine: Option<&'a str>,
    /// Who calls, in its own words.
    pub caller: Option<&'a str>,
    /// Under which intent.
    pub intent: Option<String>,
    /// With which arguments.
    pub arguments: Value,
}

/// The file of calls.
pub struct Journal {
    path: PathBuf,
    lines: Mutex<Lines>,
}

struct Lines {
    file: File,
    next: u64,
}

impl Journal {
    /// Where the journal of a state file is.
    #[must_use]
    pub fn path_beside(state: &Path) -> PathBuf {
        let mut name = state.as_os_str().to_owned();
        name.push(".calls.jsonl");
        PathBuf::from(name)
    }

    /// Opens a journal, going on after its last line.
    pub fn open(path: &Path) -> std::io::Result<Arc<Self>> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let next = next_number(&mut file)?;
        Ok(Arc::new(Self { path: path.to_owned(), lines: Mutex::new(Lines { file, next }) }))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the start of a call; the answer writes its end.
    pub fn begin(self: &Arc<Self>, call: Call<'_>) -> OpenCall {
        let Call { channel, what, machine, caller, intent, arguments } = call;
        let number = self.write(|seq| {
            json!({
                "seq": seq, "at": host_now(), "phase": "start", "call": seq, "channel": channel, "what": what,
                "machine": machine, "caller": caller, "intent": intent, "arguments": arguments,
            })
        });
        OpenCall { journal: Arc::clone(self), number, noted: json!({}), ended: false }
    }

    fn end(&self, call: u64, outcome: Outcome, result: &Value) {
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
        // One write a line: what another process reads is whole lines.
        if let Err(error) = lines.file.write_all(text.as_bytes()) {
            tracing::error!(path = %self.path.display(), %error, "cannot write the journal of calls");
        }
        seq
    }
}

/// A call that has begun and not ended.
#[must_use = "a call has an end"]
pub struct OpenCall {
    journal: Arc<Journal>,
    number: u64,
    /// The result, should the caller go away.
    noted: Value,
    ended: bool,
}

impl OpenCall {
    /// Notes that what was asked is done, though the caller was not told yet. A caller who goes away
    /// before he is has made a difference that the journal must not hide.
    pub fn done(&mut self, answer: &Value) {
        self.noted = json!({ "done": true, "answer": answer });
    }

    /// Writes its end.
    pub fn end(mut self, outcome: Outcome, result: &Value) {
        self.ended = true;
        self.journal.end(self.number, outcome, result);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        if !self.ended {
            self.journal.end(self.number, Outcome::Dropped, &self.noted);
        }
    }
}

fn host_now() -> String {
    DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// The number after the last whole line's. A line torn by a crash is closed, so that the next one
/// stands on its own.
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
        let first = journal.begin(Call { channel: "api", what: "list", ..Call::default() });
        let second = journal.begin(Call { what: "power", machine: Some("sim-0001"), ..Call::default() });
        let mut third = journal.begin(Call { what: "create", ..Call::default() });
        first.end(Outcome::Ok, &json!({ "machines": 2 }));
        drop(second);
        third.done(&json!({ "id": "sim-0002" }));
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
        Journal::open(&path).unwrap().begin(Call::default()).end(Outcome::Ok, &json!({}));
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"seq\":3,\"a").unwrap();
        Journal::open(&path).unwrap().begin(Call::default()).end(Outcome::Ok, &json!({}));
        let numbers: Vec<_> = lines(&path).iter().map(|line| line["seq"].as_u64().unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3, 4]);
    }
}
