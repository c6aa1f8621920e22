//! A stand-in for systemd's manager: a server of its private socket, over a tree of plain files.
//!
//! It speaks the protocol as systemd 252 does, and keeps one rule of the kernel: a process is in one group of the tree.
//! So a pid that is moved disappears from the file of its old group, and a file without pids goes away, as a group
//! without processes can be removed. Nothing of it touches the systemd or the control groups of the host.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, bail};
use shepherd_roleserver::systemd_manager::message::{FIXED_BYTES, Message, MessageKind, message_length};
use shepherd_roleserver::systemd_manager::value::Value;

use crate::host::PATIENCE;

/// The file of a control group that lists its processes.
pub(crate) const PROCESSES: &str = "cgroup.procs";

/// What it does with a request for a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conduct {
    /// It makes the scope.
    Well,
    /// It accepts connections and answers nothing.
    Silent,
    /// It queues the job, and completes it when the conduct changes.
    Slow,
    /// The job is done, and the scope is dead (systemd issue 36781).
    DeadScope,
    /// The job fails.
    FailedJob,
    /// It answers with bytes that are no D-Bus.
    Garbage,
    /// It refuses to authenticate anybody.
    Suspicious,
    /// It makes scopes, and attaches no process to one.
    RefusesToAttach,
    /// It makes scopes, and changes no property of one.
    RefusesProperties,
}

/// A scope that it has made.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FakeUnit {
    pub(crate) active: String,
    pub(crate) control_group: String,
    pub(crate) properties: BTreeMap<String, Value>,
}

#[derive(Debug)]
struct State {
    conduct: Conduct,
    /// The controllers of its scopes.
    controllers: Vec<&'static str>,
    units: BTreeMap<String, FakeUnit>,
    calls: Vec<String>,
    /// Groups and pids of processes that are started while the next scope is made.
    forks: Vec<(String, u32)>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    tree: PathBuf,
}

/// The server. It ends with the test.
#[derive(Clone, Debug)]
pub(crate) struct FakeSystemd {
    shared: Arc<Shared>,
    pub(crate) socket: PathBuf,
}

impl FakeSystemd {
    /// Listens at this socket; the tree is a directory.
    pub(crate) fn start(socket: &Path, tree: &Path) -> Result<Self> {
        let state = State {
            conduct: Conduct::Well,
            controllers: vec!["cpu", "memory", "pids"],
            units: BTreeMap::new(),
            calls: Vec::new(),
            forks: Vec::new(),
        };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), tree: tree.to_owned() });
        let listener = UnixListener::bind(socket)?;
        let for_peers = shared.clone();
        std::thread::spawn(move || {
            for peer in listener.incoming().flatten() {
                let shared = for_peers.clone();
                // A peer that goes away ends its connection only.
                std::thread::spawn(move || drop(shared.serve(&peer)));
            }
        });
        Ok(Self { shared, socket: socket.to_owned() })
    }

    pub(crate) fn set_conduct(&self, conduct: Conduct) {
        self.shared.state().conduct = conduct;
        self.shared.changed.notify_all();
    }

    /// From now on it takes limits without one of these controllers, and does not set them.
    pub(crate) fn set_controllers(&self, controllers: &[&'static str]) {
        self.shared.state().controllers = controllers.to_vec();
    }

    /// A unit that existed before.
    pub(crate) fn add_unit(&self, name: &str, control_group: &str) {
        let unit = FakeUnit {
            active: "active".to_owned(),
            control_group: control_group.to_owned(),
            properties: BTreeMap::new(),
        };
        self.shared.state().units.insert(name.to_owned(), unit);
    }

    pub(crate) fn unit(&self, name: &str) -> Option<FakeUnit> {
        self.shared.state().units.get(name).cloned()
    }

    pub(crate) fn remove_unit(&self, name: &str) {
        self.shared.state().units.remove(name);
    }

    pub(crate) fn unit_names(&self) -> Vec<String> {
        self.shared.state().units.keys().cloned().collect()
    }

    /// Waits until a method was called.
    pub(crate) fn wait_for_call(&self, member: &str) -> Result<()> {
        let lacks = |state: &mut State| !state.calls.iter().any(|call| call == member);
        let waited = self.shared.changed.wait_timeout_while(self.shared.state(), PATIENCE, lacks);
        let (state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        anyhow::ensure!(!result.timed_out(), "{member} was never called");
        Ok(())
    }

    /// A process that appears in this group while the next scope is made, because its parent is there then.
    pub(crate) fn fork_meanwhile(&self, group: &str, pid: u32) {
        self.shared.state().forks.push((group.to_owned(), pid));
    }

    /// The pids in a group, not in those inside it.
    pub(crate) fn pids(&self, group: &str) -> Vec<u32> {
        let file = self.shared.tree.join(group.trim_start_matches('/')).join(PROCESSES);
        fs::read_to_string(file).unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// The process has ended.
    pub(crate) fn forget_process(&self, pid: u32) -> Result<()> {
        remove_pid(&self.shared.tree, pid)
    }

    /// Moves a process as the kernel does when somebody else moves it.
    pub(crate) fn move_process(&self, group: &str, pid: u32) -> Result<()> {
        self.shared.move_process(group, pid)
    }
}

fn reply_to(call: &Message, body: Vec<Value>) -> Message {
    Message { reply_to: call.serial, ..Message::new(MessageKind::Reply, call.serial, body) }
}

fn error_for(call: &Message, name: &str, text: &str) -> Message {
    let error = format!("org.freedesktop.systemd1.{name}");
    Message {
        reply_to: call.serial,
        error,
        ..Message::new(MessageKind::Error, call.serial, vec![Value::text(text)])
    }
}

fn text_at(call: &Message, index: usize) -> String {
    call.body.get(index).and_then(Value::as_text).unwrap_or_default().to_owned()
}

fn properties_of(value: Option<&Value>) -> BTreeMap<String, Value> {
    let Some(Value::Array(_, items)) = value else { return BTreeMap::new() };
    let pairs = items.iter().filter_map(|item| match item {
        Value::Structure(fields) => match fields.as_slice() {
            [Value::Text(name), Value::Variant(value)] => Some((name.clone(), (**value).clone())),
            _ => None,
        },
        _ => None,
    });
    pairs.collect()
}

fn numbers_in(value: Option<&Value>) -> Vec<u32> {
    let Some(Value::Array(_, items)) = value else { return Vec::new() };
    items.iter().filter_map(|item| if let Value::U32(number) = item { Some(*number) } else { None }).collect()
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, peer: &UnixStream) -> Result<()> {
        let (mut input, mut output) = (peer.try_clone()?, peer.try_clone()?);
        // As systemd reads it.
        let mut greeting = [0; 256];
        let count = input.read(&mut greeting)?;
        let greeting = String::from_utf8_lossy(&greeting[..count]).into_owned();
        let conduct = self.state().conduct;
        match conduct {
            Conduct::Silent => {
                drop(self.changed.wait_while(self.state(), |state| state.conduct == Conduct::Silent));
                bail!("the peer has given up meanwhile");
            }
            Conduct::Suspicious => {
                output.write_all(b"REJECTED EXTERNAL\r\n")?;
                return Ok(());
            }
            _ => {}
        }
        let uid = rustix::process::geteuid().as_raw().to_string();
        // systemd does not look at what came together with `BEGIN` until more arrives. So `BEGIN` must come before the answer
        // that the first call waits for.
        let expected = format!("\0AUTH EXTERNAL {}\r\nBEGIN\r\n", hex::encode(uid));
        anyhow::ensure!(greeting == expected, "{greeting:?}");
        output.write_all(b"OK 0123456789abcdef0123456789abcdef\r\n")?;
        loop {
            let mut bytes = vec![0; FIXED_BYTES];
            input.read_exact(&mut bytes)?;
            let mut rest = vec![0; message_length(&bytes)? - FIXED_BYTES];
            input.read_exact(&mut rest)?;
            bytes.extend(rest);
            let call = Message::decode(&bytes)?;
            self.state().calls.push(call.member.clone());
            self.changed.notify_all();
            if conduct == Conduct::Garbage {
                output.write_all(&[b'B'; 64])?;
                return Ok(());
            }
            for answer in self.answer(&call, &mut output)? {
                output.write_all(&answer.encode())?;
            }
        }
    }

    fn answer(&self, call: &Message, output: &mut UnixStream) -> Result<Vec<Message>> {
        let name = text_at(call, 0);
        Ok(match call.member.as_str() {
            "StartTransientUnit" => {
                if self.state().units.contains_key(&name) {
                    let text = format!("Unit {name} was already loaded or has a fragment file.");
                    return Ok(vec![error_for(call, "UnitExists", &text)]);
                }
                let job = Value::ObjectPath("/org/freedesktop/systemd1/job/7".to_owned());
                output.write_all(&reply_to(call, vec![job.clone()]).encode())?;
                let result = self.run_job(&name, properties_of(call.body.get(2)))?;
                let body = vec![Value::U32(7), job, Value::text(&name), Value::text(result)];
                let signal = Message {
                    path: "/org/freedesktop/systemd1".to_owned(),
                    interface: "org.freedesktop.systemd1.Manager".to_owned(),
                    member: "JobRemoved".to_owned(),
                    ..Message::new(MessageKind::Signal, 99, body)
                };
                let other = Message { member: "UnitNew".to_owned(), body: Vec::new(), ..signal.clone() };
                vec![other, signal]
            }
            "GetUnit" if self.state().units.contains_key(&name) => {
                vec![reply_to(call, vec![Value::ObjectPath(format!("/unit/{name}"))])]
            }
            "GetUnit" => vec![error_for(call, "NoSuchUnit", &format!("Unit {name} not loaded."))],
            "Get" if text_at(call, 0).ends_with(".Manager") => {
                vec![reply_to(call, vec![Value::text("").in_variant()])]
            }
            "Get" => {
                let unit =
                    call.path.strip_prefix("/unit/").and_then(|name| self.state().units.get(name).cloned());
                let unit = unit.context("a property of an unknown unit")?;
                let value = match text_at(call, 1).as_str() {
                    "ActiveState" => unit.active,
                    "ControlGroup" => unit.control_group,
                    other => bail!("the property {other}"),
                };
                vec![reply_to(call, vec![Value::text(&value).in_variant()])]
            }
            "SetUnitProperties" if self.state().conduct == Conduct::RefusesProperties => {
                vec![error_for(call, "BadUnitSetting", "Cannot set property")]
            }
            "AttachProcessesToUnit" if self.state().conduct == Conduct::RefusesToAttach => {
                vec![error_for(call, "UnitInactive", "Unit is not active")]
            }
            "SetUnitProperties" => {
                let changed = properties_of(call.body.get(2));
                let mut state = self.state();
                let unit = state.units.get_mut(&name).context("properties of an unknown unit")?;
                unit.properties.extend(changed);
                let unit = unit.clone();
                drop(state);
                self.write_limits(&unit)?;
                vec![reply_to(call, Vec::new())]
            }
            "AttachProcessesToUnit" => {
                let group = self.state().units.get(&name).context("an unknown unit")?.control_group.clone();
                let group = format!("{group}{}", text_at(call, 1));
                anyhow::ensure!(self.directory(&group).is_dir(), "systemd makes no group {group}");
                for pid in numbers_in(call.body.get(2)) {
                    self.move_process(&group, pid)?;
                }
                vec![reply_to(call, Vec::new())]
            }
            other => vec![error_for(call, "Unsupported", other)],
        })
    }

    fn run_job(&self, name: &str, properties: BTreeMap<String, Value>) -> Result<&'static str> {
        let waited = self.changed.wait_while(self.state(), |state| state.conduct == Conduct::Slow);
        let conduct = waited.unwrap_or_else(PoisonError::into_inner).conduct;
        let slice = properties.get("Slice").and_then(Value::as_text).unwrap_or("system.slice");
        let control_group = format!("/{slice}/{name}");
        if conduct == Conduct::FailedJob {
            return Ok("failed");
        }
        let active = if conduct == Conduct::DeadScope { "inactive" } else { "active" };
        if conduct == Conduct::DeadScope {
            // Only the first one is dead.
            self.state().conduct = Conduct::Well;
        }
        for pid in numbers_in(properties.get("PIDs")) {
            self.move_process(&control_group, pid)?;
        }
        let forks = std::mem::take(&mut self.state().forks);
        for (group, pid) in forks {
            self.move_process(&group, pid)?;
        }
        let unit = FakeUnit { active: active.to_owned(), control_group, properties };
        self.write_limits(&unit)?;
        self.state().units.insert(name.to_owned(), unit);
        Ok("done")
    }

    /// Writes the limits of a unit to its group, as far as it has controllers for them.
    fn write_limits(&self, unit: &FakeUnit) -> Result<()> {
        let controllers = self.state().controllers.clone();
        let directory = self.directory(&unit.control_group);
        let limits = [
            ("memory", "MemoryMax", "memory.max"),
            ("cpu", "CPUQuotaPerSecUSec", "cpu.max"),
            ("pids", "TasksMax", "pids.max"),
        ];
        for (controller, property, file) in limits {
            let Some(Value::U64(limit)) = unit.properties.get(property) else { continue };
            let text = match (controller, *limit) {
                _ if !controllers.contains(&controller) => continue,
                ("cpu", u64::MAX) => "max 100000".to_owned(),
                ("cpu", limit) => format!("{} 100000", limit / 10),
                (_, u64::MAX) => "max".to_owned(),
                (_, limit) => limit.to_string(),
            };
            fs::create_dir_all(&directory)?;
            fs::write(directory.join(file), text + "\n")?;
        }
        Ok(())
    }

    fn move_process(&self, group: &str, pid: u32) -> Result<()> {
        remove_pid(&self.tree, pid)?;
        let directory = self.directory(group);
        fs::create_dir_all(&directory)?;
        let file = directory.join(PROCESSES);
        // A process that moved itself, or was moved by the role server, is there without a line end.
        let text = fs::read_to_string(&file).unwrap_or_default();
        let lines = text.lines().map(str::to_owned).chain([pid.to_string()]);
        Ok(fs::write(file, lines.collect::<Vec<_>>().join("\n") + "\n")?)
    }

    /// The directory that stands in for a group.
    fn directory(&self, group: &str) -> PathBuf {
        self.tree.join(group.trim_start_matches('/'))
    }
}

/// Removes a pid from all groups of a tree.
fn remove_pid(directory: &Path, pid: u32) -> Result<()> {
    for entry in fs::read_dir(directory)?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            remove_pid(&path, pid)?;
        } else if path.ends_with(PROCESSES) {
            let text = fs::read_to_string(&path)?;
            let left: Vec<&str> = text.lines().filter(|line| *line != pid.to_string()).collect();
            if left.is_empty() {
                fs::remove_file(&path)?;
            } else {
                fs::write(&path, left.join("\n") + "\n")?;
            }
        }
    }
    Ok(())
}
