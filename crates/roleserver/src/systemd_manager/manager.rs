//! The calls to systemd's manager that a role server needs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::systemd_manager::connection::{Connection, ManagerError};
use crate::systemd_manager::value::Value;

/// How long one operation may take, with all its calls and the job that it waits for.
const DEADLINE: Duration = Duration::from_secs(5);

const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const UNIT: &str = "org.freedesktop.systemd1.Unit";
const SCOPE: &str = "org.freedesktop.systemd1.Scope";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// A property of a unit and its value.
pub type Property = (&'static str, Value);

/// The manager of the system or of a user, by its private socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemdManager {
    /// Path of its private socket.
    pub socket: PathBuf,
    /// How long one operation may take.
    pub deadline: Duration,
    /// When every operation has ended at the latest, if the caller has to end.
    pub until: Option<Instant>,
}

/// The state of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitState {
    /// `active`, `inactive`, `failed` and so on (`ActiveState`).
    pub active: String,
    /// Its control group, as a path from the root of each hierarchy; empty without one (`ControlGroup`).
    pub control_group: String,
}

/// Why a scope was not made.
#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    /// A unit of that name exists already.
    #[error("a unit named {0} exists already")]
    Exists(String),
    /// The call or the job failed.
    #[error(transparent)]
    Manager(#[from] ManagerError),
}

impl SystemdManager {
    /// The manager of the system.
    #[must_use]
    pub fn system() -> Self {
        Self { socket: PathBuf::from("/run/systemd/private"), deadline: DEADLINE, until: None }
    }

    /// The manager of the user of this process.
    #[must_use]
    pub fn own_user() -> Self {
        let runtime_directory = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(
            || PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw())),
            PathBuf::from,
        );
        Self::user(&runtime_directory)
    }

    /// The manager of the user with this runtime directory (`XDG_RUNTIME_DIR`).
    #[must_use]
    pub fn user(runtime_directory: &Path) -> Self {
        Self { socket: runtime_directory.join("systemd/private"), deadline: DEADLINE, until: None }
    }

    fn connect(&self) -> Result<Connection, ManagerError> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        match left {
            Some(left) if left.is_zero() => Err(ManagerError::NoTime),
            _ => Connection::open(&self.socket, left.map_or(self.deadline, |left| left.min(self.deadline))),
        }
    }

    /// Makes a transient scope with these properties, waits until its job is done, and returns its state. Blocks.
    ///
    /// The call only queues a job. Even after the job, the scope may be dead while its process lives (systemd issue
    /// 36781), so the caller looks at the state.
    pub fn start_scope(&self, unit: &str, properties: &[Property]) -> Result<UnitState, ScopeError> {
        let mut connection = self.connect()?;
        let body = vec![
            Value::text(unit),
            Value::text("fail"),
            encode_properties(properties),
            Value::Array("(sa(sv))".to_owned(), Vec::new()),
        ];
        let reply = match connection.call(MANAGER_PATH, MANAGER, "StartTransientUnit", body) {
            Err(error) if error.is_refusal(UNIT_EXISTS) => return Err(ScopeError::Exists(unit.to_owned())),
            other => other?,
        };
        let job = reply.first().and_then(Value::as_text).unwrap_or_default().to_owned();
        let doing = format!("waiting for the start of {unit}");
        let removed = connection.wait_for_signal(&doing, |signal| {
            signal.member == "JobRemoved" && signal.body.get(1).and_then(Value::as_text) == Some(&job)
        })?;
        let result = removed.body.get(3).and_then(Value::as_text).unwrap_or_default();
        if result != "done" {
            let why =
                format!("the job that starts {unit} ended with the result {result:?} instead of \"done\"");
            return Err(ManagerError::Failed(why).into());
        }
        let state = read_unit(&mut connection, unit)?;
        Ok(state.ok_or_else(|| ManagerError::Failed(format!("{unit} is gone right after its start")))?)
    }

    /// The state of a unit; `None` if systemd knows no unit of that name. Blocks.
    pub fn read_unit(&self, unit: &str) -> Result<Option<UnitState>, ManagerError> {
        read_unit(&mut self.connect()?, unit)
    }

    /// Changes properties of a running unit until the next boot. Blocks.
    pub fn set_properties(&self, unit: &str, properties: &[Property]) -> Result<(), ManagerError> {
        let body = vec![Value::text(unit), Value::Bool(true), encode_properties(properties)];
        self.connect()?.call(MANAGER_PATH, MANAGER, "SetUnitProperties", body).map(drop)
    }

    /// Moves processes into a group inside the control group of a unit that has `Delegate=yes`. The group exists;
    /// `subgroup` is its path from that of the unit and begins with `/`, and an empty one is that of the unit. Blocks.
    pub fn attach_processes(&self, unit: &str, subgroup: &str, pids: &[u32]) -> Result<(), ManagerError> {
        let body = vec![Value::text(unit), Value::text(subgroup), Value::numbers(pids)];
        self.connect()?.call(MANAGER_PATH, MANAGER, "AttachProcessesToUnit", body).map(drop)
    }

    /// The control group below which the manager has all its units; empty if that is the root. Blocks.
    pub fn control_group(&self) -> Result<String, ManagerError> {
        let group = read_property(&mut self.connect()?, MANAGER_PATH, MANAGER, "ControlGroup")?;
        Ok(group.trim_end_matches('/').to_owned())
    }
}

fn encode_properties(properties: &[Property]) -> Value {
    let properties = properties
        .iter()
        .map(|(name, value)| Value::Structure(vec![Value::text(name), value.clone().in_variant()]));
    Value::Array("(sv)".to_owned(), properties.collect())
}

fn read_unit(connection: &mut Connection, unit: &str) -> Result<Option<UnitState>, ManagerError> {
    let reply = match connection.call(MANAGER_PATH, MANAGER, "GetUnit", vec![Value::text(unit)]) {
        Err(error) if error.is_refusal(NO_SUCH_UNIT) => return Ok(None),
        other => other?,
    };
    let path = reply.first().and_then(Value::as_text).unwrap_or_default().to_owned();
    let active = read_property(connection, &path, UNIT, "ActiveState")?;
    let interface =
        if unit.strip_suffix(".scope").is_some() { SCOPE } else { "org.freedesktop.systemd1.Service" };
    let control_group = read_property(connection, &path, interface, "ControlGroup")?;
    Ok(Some(UnitState { active, control_group }))
}

fn read_property(
    connection: &mut Connection,
    path: &str,
    interface: &str,
    name: &str,
) -> Result<String, ManagerError> {
    let body = vec![Value::text(interface), Value::text(name)];
    let reply = connection.call(path, PROPERTIES, "Get", body)?;
    Ok(reply.first().and_then(Value::as_text).unwrap_or_default().to_owned())
}
