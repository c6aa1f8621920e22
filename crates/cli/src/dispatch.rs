//! Dispatch of commands: calls the function of the command that was parsed.
//!
//! Commands that print while they run are not here but in [`crate::run`]: `watch`, `logs --follow`, and `top` on a
//! terminal.

use crate::approvals::{approve_order, show_approvals};
use crate::artefacts::ArtefactsCommand;
use crate::artefacts::add::add_artefact;
use crate::artefacts::delete::delete_artefact;
use crate::artefacts::get::show_artefacts;
use crate::budgets::{BudgetCommand, set_budget, show_brakes, show_budgets};
use crate::client::fleet_client::FleetClient;
use crate::cluster::command::run_cluster_command;
use crate::command::{FleetCommand, GetCommand};
use crate::debug::DebugCommand;
use crate::debug::bundle::write_debug_bundle;
use crate::declare_restored::{DeclareCommand, declare_restored};
use crate::error::CliError;
use crate::issues::show_issues;
use crate::loops::{LoopsCommand, pause_loop, resume_loop, show_loops};
use crate::machine::allow_host_key::{AllowCommand, allow_host_key};
use crate::machine::describe::{DescribeCommand, describe_machine};
use crate::machine::get::show_machines;
use crate::machine::hold::{hold_machine, release_machine};
use crate::machine::label::{label_machines, unlabel_machines};
use crate::machine::logs::show_log;
use crate::machine::power::{reboot_machine, switch_power};
use crate::machine::prioritize::prioritize_machine;
use crate::machine::quarantine::quarantine_machines;
use crate::machine::retire::run_retire_command;
use crate::machine::retry::retry_machine;
use crate::machine::timeline::show_timeline;
use crate::machine::why::show_explanation;
use crate::output::Format;
use crate::plan::show_plan;
use crate::policy::{PolicyCommand, show_policy};
use crate::providers::show_providers;
use crate::sessions::show_sessions;
use crate::tokens::TokensCommand;
use crate::tokens::bootstrap::bootstrap_token;
use crate::tokens::create::create_token;
use crate::tokens::get::show_tokens;
use crate::tokens::revoke::revoke_token;
use crate::top::render_once;
use crate::update::run_update_command;
use crate::work::show_work;

/// Runs one command for the fleet and returns its output.
pub(crate) async fn run_fleet_command(
    command: &FleetCommand,
    format: Format,
    client: &FleetClient,
) -> Result<String, CliError> {
    match command {
        FleetCommand::Get(GetCommand::Machines(filters)) => show_machines(client, filters, format).await,
        FleetCommand::Get(GetCommand::Sessions(limited)) => {
            show_sessions(client, limited.limit, format).await
        }
        FleetCommand::Get(GetCommand::Work(limited)) => show_work(client, limited.limit, format).await,
        FleetCommand::Get(GetCommand::Providers) => show_providers(client, format).await,
        FleetCommand::Describe(DescribeCommand::Machine(of)) => {
            describe_machine(client, &of.machine, format).await
        }
        FleetCommand::Get(GetCommand::Loops) => show_loops(client, format).await,
        FleetCommand::Get(GetCommand::Approvals) => show_approvals(client, format).await,
        FleetCommand::Approve(args) => approve_order(client, args, format).await,
        FleetCommand::Get(GetCommand::Budgets) => show_budgets(client, format).await,
        FleetCommand::Get(GetCommand::Brakes) => show_brakes(client, format).await,
        FleetCommand::Budget(BudgetCommand::Set(args)) => set_budget(client, args, format).await,
        FleetCommand::Cluster(command) => run_cluster_command(client, command, format).await,
        FleetCommand::Artefacts(ArtefactsCommand::Add(args)) => add_artefact(client, args, format).await,
        FleetCommand::Artefacts(ArtefactsCommand::Get) => show_artefacts(client, format).await,
        FleetCommand::Artefacts(ArtefactsCommand::Delete(args)) => {
            delete_artefact(client, args, format).await
        }
        FleetCommand::Update(args) => run_update_command(client, args, format).await,
        FleetCommand::Loops(LoopsCommand::Pause(args)) => pause_loop(client, args, format).await,
        FleetCommand::Loops(LoopsCommand::Resume(args)) => resume_loop(client, args, format).await,
        FleetCommand::Why(of) => show_explanation(client, &of.machine, format).await,
        FleetCommand::Timeline(of) => show_timeline(client, &of.machine, of.limit, format).await,
        FleetCommand::Logs(args) => show_log(client, args, format).await,
        FleetCommand::Issues => show_issues(client, format).await,
        FleetCommand::Plan(args) => show_plan(client, args, format).await,
        FleetCommand::Policy(PolicyCommand::Get) => show_policy(client, format).await,
        FleetCommand::Watch(_) => Ok(String::new()),
        FleetCommand::Top(_) => render_once(client, format).await,
        FleetCommand::Hold(hold) => hold_machine(client, hold, format).await,
        FleetCommand::Release(release) => release_machine(client, release, format).await,
        FleetCommand::Retry(retry) => retry_machine(client, retry, format).await,
        FleetCommand::Quarantine(args) => quarantine_machines(client, args, format).await,
        FleetCommand::Label(args) => label_machines(client, args, format).await,
        FleetCommand::Unlabel(args) => unlabel_machines(client, args, format).await,
        FleetCommand::Reboot(reboot) => reboot_machine(client, reboot, format).await,
        FleetCommand::Power(power) => switch_power(client, power, format).await,
        FleetCommand::Prioritize(args) => prioritize_machine(client, args, format).await,
        FleetCommand::Retire(retire) => run_retire_command(client, retire, format).await,
        FleetCommand::Declare(DeclareCommand::Restored(declared)) => {
            declare_restored(
                client.require_bmdb("`declare restored`", "no shepherd may run while it works")?,
                declared,
                format,
            )
            .await
        }
        FleetCommand::Allow(AllowCommand::HostKey(allow)) => allow_host_key(client, allow, format).await,
        FleetCommand::Debug(DebugCommand::Bundle(args)) => write_debug_bundle(client, args, format).await,
        FleetCommand::Tokens(TokensCommand::Bootstrap(first)) => {
            bootstrap_token(
                client.require_bmdb("`tokens bootstrap`", "no credential exists yet")?,
                first,
                format,
            )
            .await
        }
        FleetCommand::Tokens(TokensCommand::Create(new)) => create_token(client, new, format).await,
        FleetCommand::Tokens(TokensCommand::Get) => show_tokens(client, format).await,
        FleetCommand::Tokens(TokensCommand::Revoke(which)) => revoke_token(client, which, format).await,
    }
}
