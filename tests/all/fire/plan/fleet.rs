//! A random fleet: its policy, and machines in random states.

use std::time::Duration;

use anyhow::{Context as _, Result};
use chrono::TimeDelta;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent, ProviderDetails};
use shepherd::bmdb::fleet::provider::NewMachine;
use shepherd::model::backoff::BackoffFact;
use shepherd::model::facts::{Hold, HoldScope, Postponement, Recovery, RecoveryAction};
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::policy::{Budget, DisruptionKind, Policy};
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::time::{Span, Timestamp};
use shepherd::providers::provider::Provider as _;

use super::{Agent, FOR_EVER, Site, beat};
use crate::bmdb_kit::Shepherd;

impl Site {
    /// Adds machines in random states.
    pub(super) async fn furnish(&mut self) -> Result<()> {
        let count = self.random.random_range(2..=8);
        let shepherd = Shepherd::start(&self.kit, "provisioner", FOR_EVER).await?;
        let session = shepherd.session().await?;
        let lease =
            self.kit.bmdb.acquire_named_lease(&session, "provisioner", "sim").await?.context("taken")?;
        let mut machines = Vec::new();
        for number in 0..count {
            // The provider has lost one in ten.
            let there = self.random.random_range(0..10) != 0;
            let (provider_id, details) = if there {
                let made = self.simulator.machine().await?;
                let found = self.simulator.provider()?.find_machine(&made.id).await?.context("just made")?;
                let details = ProviderDetails {
                    reservation: None,
                    address: found.address,
                    ssh_port: found.ssh_port,
                    ssh_user: found.ssh_user,
                    location: found.location,
                    status: found.status,
                };
                (found.id, details)
            } else {
                let details = ProviderDetails {
                    reservation: None,
                    address: None,
                    ssh_port: None,
                    ssh_user: None,
                    location: None,
                    status: ProviderStatus::Missing,
                };
                (format!("lost-{number}"), details)
            };
            let new = NewMachine { provider_id, details, changes: Vec::new(), detail: "made".to_owned() };
            let machine = self.kit.bmdb.record_machine(&lease, None, &new).await?;
            machines.push((machine, there));
        }
        self.kit.bmdb.release_named_lease(&lease).await?;
        shepherd.sessions.close(&session, "done").await?;
        shepherd.stop().await?;
        for (machine, there) in machines {
            self.befall(machine, there).await?;
        }
        Ok(())
    }

    /// Puts a machine into a random state.
    async fn befall(&mut self, machine: MachineId, there: bool) -> Result<()> {
        if self.random.random_range(0..4) != 0 {
            let (looked_at, unchanged) = (self.before(40), self.random.random());
            sqlx::query("UPDATE machine_provided SET looked_at = $2, unchanged = $3 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(looked_at)
                .bind::<bool>(unchanged)
                .execute(&self.kit.pool)
                .await?;
        }
        if there && self.random.random_range(0..4) != 0 {
            self.take_over(machine).await?;
        }
        let mut changes = Vec::new();
        if self.random.random_range(0..4) == 0 {
            let scope = HoldScope::ALL[self.random.random_range(0..3)];
            let until = self.random.random::<bool>().then(|| self.later(40));
            changes.push(FactChange::HoldSet(Hold {
                scope,
                reason: "disks".into(),
                by: "kim".into(),
                until,
            }));
        }
        for process in Process::ALL {
            if self.random.random_range(0..6) == 0 {
                changes.push(FactChange::Backoff(
                    process,
                    BackoffFact {
                        failures: self.random.random_range(1..3),
                        last_interval: Duration::from_mins(5),
                        until: self.later(20),
                        cause: "no route to host".into(),
                    },
                ));
            }
            if self.random.random_range(0..8) == 0 {
                let wait = Postponement {
                    until: self.later(20),
                    reason: "the budget is used up".into(),
                    decided_at: "here".into(),
                };
                changes.push(FactChange::Postponed(process, wait));
            }
        }
        match self.random.random_range(0..12) {
            0 => changes.push(FactChange::Quarantined("the lists differ".into())),
            1 => changes.push(FactChange::NeedsHuman {
                obstacle: Obstacle::LadderExhausted,
                reason: "nothing helped".into(),
            }),
            _ => {}
        }
        self.kit.change(machine, changes).await?;
        // Its agent reported a fence that this database never issued.
        if self.random.random_range(0..8) == 0 {
            sqlx::query(
                "INSERT INTO history (machine_id, at, event, fence, detail)
                 VALUES ($1, $2, 'NewerFence', 1000, 'reported')",
            )
            .bind(machine.0)
            .bind(self.before(90))
            .execute(&self.kit.pool)
            .await?;
        }
        if self.random.random_range(0..8) == 0 {
            sqlx::query("UPDATE machine_due SET losses = 1, not_before = $2 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(self.later(5))
                .execute(&self.kit.pool)
                .await?;
        }
        Ok(())
    }

    /// Its agent was started once, and reports, has fallen silent, or is being recovered.
    async fn take_over(&mut self, machine: MachineId) -> Result<()> {
        let agent = Agent { public_key: key_of(machine), boot_id: format!("boot of {machine}") };
        let started = FactChange::AgentStarted(NewAgent {
            public_key: agent.public_key.to_vec(),
            boot_id: Some(agent.boot_id.clone()),
            version: "1".into(),
            supervision: "systemd".into(),
            fence: 0,
        });
        let beat = FactChange::Heartbeat(beat(&agent.boot_id, 1));
        let (_, policy) = self.kit.bmdb.policy();
        let interval = i64::try_from(policy.heartbeat_interval.0.as_secs())?;
        let second = |seconds: i64| self.begin - TimeDelta::seconds(seconds);
        // How many seconds ago its agent was installed and last reported, and whether it still reports.
        let (start, received, speaks) = match self.random.random_range(0..8) {
            // Silent for some time, noticed or not.
            0..=3 => (7200, Some(self.random.random_range(3 * interval + 1..2400)), false),
            // Has never reported.
            4 => (self.random.random_range(3 * interval + 1..2400), None, false),
            // Installed a moment ago.
            5 => (self.random.random_range(0..interval), None, true),
            _ => (7200, Some(self.random.random_range(0..interval)), true),
        };
        let (start, last_contact) = (second(start), received.map(second));
        let mut changes = vec![started];
        changes.extend(last_contact.map(|_| beat));
        let silent = last_contact.is_some() && !speaks;
        if silent && self.random.random() {
            changes.push(FactChange::Recovery(self.ladder(&policy, &agent)));
        }
        self.kit.change(machine, changes).await?;
        sqlx::query("UPDATE machine_agent_started SET started_at = $2 WHERE machine_id = $1")
            .bind(machine.0)
            .bind(start)
            .execute(&self.kit.pool)
            .await?;
        if let Some(last_contact) = last_contact {
            sqlx::query("UPDATE machine_agent_heartbeat SET at = $2 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(last_contact)
                .execute(&self.kit.pool)
                .await?;
        }
        match (speaks, last_contact) {
            (true, Some(_)) => drop(self.speaking.insert(machine, agent)),
            (true, None) => drop(self.to_report.insert(machine, self.begin + TimeDelta::seconds(1))),
            _ => {}
        }
        Ok(())
    }

    /// A ladder of which some steps were taken.
    fn ladder(&mut self, policy: &Policy, agent: &Agent) -> Recovery {
        let rung = self.random.random_range(0..policy.ladder.len());
        let what = policy.ladder[rung];
        let at = self.before(10);
        let acted = self.random.random::<bool>().then(|| RecoveryAction {
            step: what.step,
            acted_at: at,
            deadline: at + what.deadline.0,
            boot_id_before: Some(agent.boot_id.clone()),
        });
        Recovery {
            started_at: at,
            rung,
            attempts: if acted.is_some() { self.random.random_range(1..=what.tries) } else { 0 },
            next_check_at: acted.as_ref().map_or(at, |acted| acted.deadline.min(self.later(2))),
            last_action: acted,
            note: "somebody tried".into(),
            obstacle: None,
        }
    }

    fn before(&mut self, minutes: i64) -> Timestamp {
        self.begin - TimeDelta::seconds(self.random.random_range(1..minutes * 60))
    }

    fn later(&mut self, minutes: i64) -> Timestamp {
        self.begin + TimeDelta::seconds(self.random.random_range(1..minutes * 60))
    }
}

/// A policy in which much happens within an hour.
pub(super) fn random_policy(random: &mut ChaCha8Rng) -> Policy {
    let mut policy = Policy::default();
    let mut minutes = |from: u64, to: u64| Span::minutes(random.random_range(from..=to));
    policy.heartbeat_interval = minutes(1, 3);
    policy.recovery_silence_timeout = minutes(10, 20);
    policy.recovery_first_heartbeat_timeout = minutes(10, 40);
    policy.update_interval_stable = minutes(10, 30);
    policy.update_interval_unstable = minutes(4, 8);
    policy.recovery_brake.window = minutes(3, 10);
    for rung in &mut policy.ladder {
        rung.deadline = minutes(1, 15);
    }
    policy.recovery_brake.at_least = random.random_range(2..8);
    for step in DisruptionKind::ALL {
        let window = Span::minutes(random.random_range(2..10));
        policy.budgets.insert(step, Budget { count: random.random_range(1..5), window });
    }
    policy
}

/// A key that no other machine has.
fn key_of(machine: MachineId) -> [u8; 32] {
    let mut key = [7; 32];
    key[..16].copy_from_slice(machine.0.as_bytes());
    key
}
