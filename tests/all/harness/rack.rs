//! A rack of real OpenSSH servers, which real shepherds take over with the real role server.
//!
//! Every server is a machine of a device list, with a home and an agent of its own. The agents are real processes that
//! outlive the sessions that started them. They end with the rack.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::roleserver::state_directory::StateDirectory;
use tempfile::TempDir;

use crate::harness::child::{Detached, Program};
use crate::harness::fleet::{Fleet, PATIENCE};
use crate::sshd::{Setup, Sshd};

/// One machine: a server, and the state of its agent.
struct Machine {
    id: &'static str,
    sshd: Sshd,
    state: PathBuf,
    _detached: Detached,
    /// The port in the list, if it is not that of the server.
    port: Option<u16>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // An unreadable state is treated as an absent one: no process can be found by it.
        let state = StateDirectory::from_path(self.state.clone());
        // The supervisor first: it would start the agent again.
        for process in
            [state.read_supervisor_process(), state.read_agent_process()].into_iter().flatten().flatten()
        {
            let _stopped = process.stop(Duration::from_secs(10));
        }
    }
}

/// The rack, its list, and a BMDB.
pub(crate) struct Rack {
    machines: Vec<Machine>,
    pub(crate) fleet: Fleet,
    directory: TempDir,
}

impl Rack {
    /// An empty rack.
    pub(crate) async fn new(test_name: &str) -> Result<Self> {
        let fleet = Fleet::start(test_name, &["--machine_count", "0"]).await?;
        let directory = tempfile::Builder::new().prefix("shepherd-rack-").tempdir()?;
        Ok(Self { machines: Vec::new(), fleet, directory })
    }

    /// Adds a machine with an agent that has a detached supervisor.
    pub(crate) fn add(&mut self, id: &'static str, setup: Setup) -> Result<()> {
        let state = self.directory.path().join(id);
        let environment = format!(
            "ROLESERVER_STATE_DIR={} ROLESERVER_SUPERVISION=detached {}",
            state.display(),
            setup.environment
        );
        let setup = Setup { environment, ..setup };
        let sshd = match self.machines.first() {
            Some(first) => first.sshd.beside(&setup)?,
            None => Sshd::start(&setup)?,
        };
        let detached = Detached::naming(&state)?;
        self.machines.push(Machine { id, sshd, state, _detached: detached, port: None });
        Ok(())
    }

    /// The SSH server of a machine.
    pub(crate) fn sshd(&self, id: &str) -> Result<&Sshd> {
        let machine = self.machines.iter().find(|machine| machine.id == id);
        Ok(&machine.with_context(|| format!("there is no {id}"))?.sshd)
    }

    /// Puts a proxy in front of it: the list has the proxy's port.
    pub(crate) fn behind(&mut self, id: &str, port: u16) {
        for machine in self.machines.iter_mut().filter(|machine| machine.id == id) {
            machine.port = Some(port);
        }
    }

    /// Kills its agent and the agent's supervisor, as a power cut would.
    pub(crate) fn silence(&self, id: &str) -> Result<()> {
        let machine = self.machines.iter().find(|machine| machine.id == id).context("no such machine")?;
        let state = StateDirectory::from_path(machine.state.clone());
        for process in [state.read_supervisor_process()?, state.read_agent_process()?].into_iter().flatten() {
            process.stop(Duration::ZERO)?;
        }
        Ok(())
    }

    /// The role server without debug information, so that the upload has about the size that operators upload.
    pub(crate) fn agent(&self) -> Result<PathBuf> {
        let path = self.directory.path().join("roleserver");
        if !path.exists() {
            let mut strip = Command::new("strip");
            strip.args(["-s", "-o"]).arg(&path).arg(env!("CARGO_BIN_EXE_roleserver"));
            ensure!(strip.status().context("starting strip")?.success(), "strip failed");
            // A shepherd refuses a program that others can change, as a umask of 002 makes it.
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        }
        Ok(path)
    }

    /// Starts a shepherd for all machines that were added. It listens at `endpoint`.
    pub(crate) fn shepherd(&self, name: &str, endpoint: &str, flags: &[&str]) -> Result<Program> {
        let list = self.directory.path().join("devices.json");
        let devices = self.machines.iter().map(|machine| {
            let target = machine.sshd.target()?;
            let port = machine.port.unwrap_or(target.port);
            // All of them are this host, which must not be rebooted.
            let reboot = ["true"];
            let id = machine.id;
            Ok(json!({
                "ID": id, "Addr": target.host, "Port": port, "User": target.user, "RebootCommand": reboot,
            }))
        });
        std::fs::write(&list, serde_json::to_vec(&devices.collect::<Result<Vec<_>>>()?)?)?;
        let first = self.machines.first().context("an empty rack")?;
        let key = format!("--ssh_key_path={}", first.sshd.directory().join("client_key").display());
        let agent = format!("--agent_executable_path={}", self.agent()?.display());
        // These machines share the file systems of the host, and each has a home of its own.
        let target = format!("--agent_target_path={DEFAULT_AGENT_PATH}");
        let flags = [&[key.as_str(), agent.as_str(), target.as_str()], flags].concat();
        self.fleet.shepherd_of_list(name, &[endpoint.to_owned()], &list, &flags)
    }

    /// The output of `shepherdctl why` for a machine.
    pub(crate) fn why(&self, id: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.shepherdctl(&["why", &format!("sim/{id}"), "-o", "json"])?)?)
    }

    /// The output of `shepherdctl`.
    pub(crate) fn shepherdctl(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
            .args(arguments)
            .env_clear()
            .env("USER", "kim")
            .env("SHEPHERD_BMDB_URL", &self.fleet.bmdb_url)
            .env("SHEPHERD_BMDB_DIALECT", self.fleet.database.dialect().as_str())
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Waits until `why` shows a machine in this phase, with all of these words.
    pub(crate) async fn until_why(&self, id: &str, phase: &str, words: &[&str]) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Before the first pass of the provisioner the machine is unknown.
            let result = self.why(id);
            if let Ok(why) = &result {
                let text = why.to_string();
                // In the form of JSON.
                let there = |word: &&str| text.contains(json!(word).to_string().trim_matches('"'));
                if why["phase"] == phase && words.iter().all(there) {
                    return Ok(());
                }
            }
            ensure!(
                Instant::now() < deadline,
                "{id} is not {phase} with {words:?}; why says {result:#?}\n{}",
                self.fleet.explain().await?
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The address of a machine's server, as sentences contain it.
    pub(crate) fn address(&self, id: &str) -> Result<String> {
        let machine = self.machines.iter().find(|machine| machine.id == id).context("no such machine")?;
        let mut target = machine.sshd.target()?;
        target.port = machine.port.unwrap_or(target.port);
        Ok(target.address())
    }
}
