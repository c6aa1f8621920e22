//! `--wait` of orders: after the answer to an order, wait for the end of its work.
//!
//! What an order has an effect on is recorded when its answer arrives ([`AffectedObjects`]), so nothing is waited for
//! after a dry run or an order without effect. The exit code is the higher one of the order's and of the waiting's.
//!
//! [`AffectedObjects`]: crate::order::outcome::AffectedObjects

use crate::client::decode::{decode_machine_name, decode_struct, missing_field};
use crate::cluster::command::ClusterCommand;
use crate::command::FleetCommand;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::outcome::OrderTarget;
use crate::order::wait_flags::WaitFlags;
use crate::wait::condition::{ClusterGoal, MachineGoal, UpgradeDirection, WaitGoal};
use crate::wait::fetch::Subject;
use crate::wait::follow::{WaitReport, Waiting, follow_objects};
use model::power_order::PowerOrderKind;

/// What an order with `--wait` is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OrderWait {
    flags: WaitFlags,
    goal: WaitGoal,
    /// The cluster of the order, whose answer does not name it.
    cluster: Option<String>,
}

impl OrderWait {
    /// The waiting that a command requests. `None` for a command without `--wait`.
    pub(crate) fn of_command(command: &FleetCommand) -> Option<Self> {
        let (flags, goal) = match command {
            FleetCommand::Retire(args) if args.command.is_none() => {
                (args.waiting, WaitGoal::Machine(MachineGoal::RetirementEnd))
            }
            FleetCommand::Reboot(args) => {
                (args.waiting, WaitGoal::Machine(MachineGoal::PowerOrderEnd(PowerOrderKind::Reboot)))
            }
            FleetCommand::Power(args) if args.command.is_none() => {
                let kind = args.action.as_deref()?.parse().ok()?;
                (args.waiting, WaitGoal::Machine(MachineGoal::PowerOrderEnd(kind)))
            }
            FleetCommand::Update(args) if args.command.is_none() => (args.waiting, WaitGoal::UpdateFinished),
            FleetCommand::Cluster(command) => return Self::of_cluster_command(command),
            _ => return None,
        };
        flags.wait.then_some(Self { flags, goal, cluster: None })
    }

    fn of_cluster_command(command: &ClusterCommand) -> Option<Self> {
        let (flags, goal, name) = match command {
            ClusterCommand::Create(args) => (args.waiting, ClusterGoal::Ready, &args.name),
            ClusterCommand::Scale(args) => (args.waiting, ClusterGoal::Ready, &args.name),
            ClusterCommand::Restore(args) => (args.waiting, ClusterGoal::Ready, &args.name),
            ClusterCommand::Delete(args) => (args.waiting, ClusterGoal::Deleted, &args.order.name),
            ClusterCommand::Upgrade(args) => {
                let direction = match (args.rollback, args.resume) {
                    (true, _) => UpgradeDirection::Back,
                    (_, true) => UpgradeDirection::Either,
                    _ => UpgradeDirection::Forward,
                };
                (args.waiting, ClusterGoal::UpgradeEnd(direction), &args.name)
            }
            _ => return None,
        };
        let goal = WaitGoal::Cluster(goal);
        flags.wait.then_some(Self { flags, goal, cluster: Some(name.clone()) })
    }

    /// The objects to wait for, by what the order has an effect on.
    fn list_subjects(&self, targets: Vec<OrderTarget>) -> Result<Vec<Subject>, CliError> {
        let machine = |target: OrderTarget| {
            let name = decode_machine_name(target.machine)?;
            Ok(Subject::new(name.machine.to_string(), name.short_name()))
        };
        let update = |target: OrderTarget| {
            let after = target.after.map(decode_struct).unwrap_or_default();
            let id = after["update"].as_str().ok_or_else(|| missing_field("the id of the update"))?;
            Ok(Subject::new(id, id))
        };
        match (self.goal, &self.cluster) {
            (WaitGoal::Machine(_), _) => targets.into_iter().map(machine).collect(),
            (WaitGoal::UpdateFinished, _) => targets.into_iter().map(update).collect(),
            (WaitGoal::Cluster(_), cluster) => {
                let cluster = cluster.iter().filter(|_| !targets.is_empty());
                Ok(cluster.map(Subject::cluster).collect())
            }
        }
    }
}

/// Waits for the end of the work of the orders that were given. Each step is printed once on standard error.
pub(crate) async fn follow_orders(context: &CommandContext, wait: &OrderWait) -> Result<(), CliError> {
    let subjects = wait.list_subjects(context.order_targets.all())?;
    if subjects.is_empty() {
        return Ok(());
    }
    let waiting = Waiting {
        goal: wait.goal,
        subjects,
        timeout: wait.flags.timeout.0,
        report: WaitReport::Steps,
        colors: context.colors,
        target_flags: context.target_flags.clone(),
    };
    follow_objects(&context.client, waiting).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::FromArgMatches as _;
    use prost_types::value::Kind;

    use super::*;
    use crate::command::{Cli, Command, grammar};
    use proto::fleet::v1;

    fn wait_of(line: &str) -> Option<OrderWait> {
        let line = ["shepherdctl"].into_iter().chain(line.split(' '));
        let parsed = grammar().try_get_matches_from(line).unwrap();
        match Cli::from_arg_matches(&parsed).unwrap().command {
            Command::Fleet(command) => OrderWait::of_command(&command),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_order_with_work_after_its_answer_can_be_waited_for() {
        for (line, goal) in [
            ("retire m --reason r --wait", WaitGoal::Machine(MachineGoal::RetirementEnd)),
            (
                "retire --label row=7 --reason r --wait --yes-count 2",
                WaitGoal::Machine(MachineGoal::RetirementEnd),
            ),
            (
                "reboot m --reason r --wait",
                WaitGoal::Machine(MachineGoal::PowerOrderEnd(PowerOrderKind::Reboot)),
            ),
            (
                "power off m --reason r --wait",
                WaitGoal::Machine(MachineGoal::PowerOrderEnd(PowerOrderKind::Off)),
            ),
            (
                "power on m --reason r --wait",
                WaitGoal::Machine(MachineGoal::PowerOrderEnd(PowerOrderKind::On)),
            ),
            ("update --selector cpus>=4 --release one --reason r --wait", WaitGoal::UpdateFinished),
            ("cluster create ams --reason r --wait", WaitGoal::Cluster(ClusterGoal::Ready)),
            ("cluster scale ams --workers 3 --reason r --wait", WaitGoal::Cluster(ClusterGoal::Ready)),
            ("cluster restore ams --reason r --wait", WaitGoal::Cluster(ClusterGoal::Ready)),
            ("cluster delete ams --reason r --wait", WaitGoal::Cluster(ClusterGoal::Deleted)),
            (
                "cluster upgrade ams --kubernetes-bundle one --reason r --wait",
                WaitGoal::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Forward)),
            ),
            (
                "cluster upgrade ams --rollback --reason r --wait",
                WaitGoal::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Back)),
            ),
            (
                "cluster upgrade ams --resume --reason r --wait",
                WaitGoal::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Either)),
            ),
        ] {
            let wait = wait_of(line).unwrap();
            assert_eq!((wait.goal, wait.flags.timeout.0), (goal, Duration::from_hours(1)), "{line}");
            assert_eq!(wait.cluster.is_some(), line.starts_with("cluster"), "{line}");
            assert_eq!(wait_of(&line.replace(" --wait", "")), None, "{line}");
        }
        let brief = wait_of("reboot m --reason r --wait --timeout 7m").unwrap();
        assert_eq!(brief.flags.timeout.0, Duration::from_mins(7));
        assert_eq!(wait_of("retire cancel m --reason r"), None);
        let alone = grammar().try_get_matches_from("shepherdctl reboot m --reason r --timeout 7m".split(' '));
        assert!(alone.is_err(), "there is nothing that the timeout is for");
    }

    #[test]
    fn objects_are_those_that_the_order_has_an_effect_on() {
        let uuid = "10000000-0000-4000-8000-000000000007";
        let machine = v1::MachineName {
            machine: uuid.to_owned(),
            provider: Some("sim".to_owned()),
            provider_id: Some("sim-0007".to_owned()),
        };
        let id = prost_types::Value { kind: Some(Kind::StringValue("3f9a12bc".to_owned())) };
        let after = prost_types::Struct { fields: [("update".to_owned(), id)].into_iter().collect() };
        let of_machine = OrderTarget { machine: Some(machine), after: None };
        let of_update = OrderTarget { machine: None, after: Some(after) };
        let empty = OrderTarget { machine: None, after: None };
        for (line, targets, expected) in [
            ("reboot m --reason r --wait", vec![of_machine], Some(vec![(Some(uuid), "sim/sim-0007")])),
            ("reboot m --reason r --wait", vec![], Some(vec![])),
            (
                "update --selector cpus>=4 --release one --reason r --wait",
                vec![of_update],
                Some(vec![(Some("3f9a12bc"), "3f9a12bc")]),
            ),
            ("update --selector cpus>=4 --release one --reason r --wait", vec![empty.clone()], None),
            ("cluster delete ams --reason r --wait", vec![empty], Some(vec![(None, "ams")])),
            ("cluster delete ams --reason r --wait", vec![], Some(vec![])),
        ] {
            let subjects = wait_of(line).unwrap().list_subjects(targets).ok();
            let found = subjects.as_ref().map(|subjects| {
                let names = subjects.iter().map(|subject| (subject.id.as_deref(), subject.name.as_str()));
                names.collect::<Vec<_>>()
            });
            assert_eq!(found, expected, "{line}");
        }
    }
}
