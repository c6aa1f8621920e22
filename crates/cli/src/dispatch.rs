//! Dispatch of commands: calls the function of the command that was parsed.
//!
//! Commands that print while they run are not here but in [`crate::run`]: `watch`, `get --watch`, `wait`, `logs --follow`,
//! and `top` on a terminal. So is `--wait` of orders.

use crate::approvals::approve_order;
use crate::artefacts::ArtefactsCommand;
use crate::artefacts::orders::{add_artefact, delete_artefact};
use crate::audit::command::print_audit;
use crate::budgets::{BudgetCommand, set_budget};
use crate::cluster::command::run_cluster_command;
use crate::command::FleetCommand;
use crate::context::CommandContext;
use crate::debug::DebugCommand;
use crate::debug::bundle::write_debug_bundle;
use crate::declare_restored::{DeclareCommand, declare_restored};
use crate::error::CliError;
use crate::issues::list_issues;
use crate::loops::{LoopsCommand, pause_loop, resume_loop};
use crate::machine::allow_host_key::{AllowCommand, allow_host_key};
use crate::machine::allow_signing_keys::allow_signing_keys;
use crate::machine::hold::{hold_machines, release_machines};
use crate::machine::label::label_machines;
use crate::machine::logs::show_log;
use crate::machine::power::{reboot_machines, switch_power};
use crate::machine::prioritize::prioritize_machines;
use crate::machine::quarantine::quarantine_machines;
use crate::machine::retire::run_retire_command;
use crate::machine::retry::retry_machines;
use crate::machine::timeline::show_timeline;
use crate::machine::why::show_explanation;
use crate::object::command::GetArgs;
use crate::object::describe::run_describe_command;
use crate::object::get::{print_objects, run_get_command};
use crate::plan::show_plan;
use crate::policy::{PolicyCommand, disable_two_person_rule};
use crate::tokens::TokensCommand;
use crate::tokens::bootstrap::bootstrap_token;
use crate::tokens::create::create_token;
use crate::tokens::revoke::revoke_token;
use crate::top::render_once;
use crate::update::run_update_command;
use crate::whoami::show_caller;

/// Runs one command for the fleet and returns its output.
pub(crate) async fn run_fleet_command(
    command: &FleetCommand,
    context: &CommandContext,
) -> Result<String, CliError> {
    let (client, format) = (&context.client, context.format);
    match command {
        FleetCommand::Get(get) => run_get_command(context, get.kind, &get.args, &get.selection).await,
        FleetCommand::Describe(describe) => run_describe_command(context, describe).await,
        FleetCommand::Approve(args) => approve_order(context, args).await,
        FleetCommand::Budget(BudgetCommand::Set(args)) => set_budget(context, args).await,
        FleetCommand::Cluster(command) => run_cluster_command(context, command).await,
        FleetCommand::Artefacts(ArtefactsCommand::Add(args)) => add_artefact(context, args).await,
        FleetCommand::Artefacts(ArtefactsCommand::Delete(args)) => delete_artefact(context, args).await,
        FleetCommand::Update(args) => run_update_command(context, args).await,
        FleetCommand::Loops(LoopsCommand::Pause(args)) => pause_loop(context, args).await,
        FleetCommand::Loops(LoopsCommand::Resume(args)) => resume_loop(context, args).await,
        FleetCommand::Why(args) => show_explanation(client, args, format).await,
        FleetCommand::Timeline(of) => show_timeline(client, of, format).await,
        FleetCommand::Logs(args) => show_log(context, args).await,
        FleetCommand::Issues(args) => {
            let (list, exit) = list_issues(client, args).await?;
            context.exit_record.record(exit);
            let (output, record) = (&context.output, &context.exit_record);
            print_objects(list, &GetArgs::default(), output, record, &context.target_flags)
        }
        FleetCommand::Audit(args) => print_audit(context, args).await,
        FleetCommand::Plan(args) => show_plan(client, args, format).await,
        FleetCommand::Policy(PolicyCommand::DisableTwoPersonRule(args)) => {
            disable_two_person_rule(context, args).await
        }
        FleetCommand::Watch(_) | FleetCommand::Wait(_) => Ok(String::new()),
        FleetCommand::Top(_) => render_once(client, format).await,
        FleetCommand::Hold(hold) => hold_machines(context, hold).await,
        FleetCommand::Release(release) => release_machines(context, release).await,
        FleetCommand::Retry(retry) => retry_machines(context, retry).await,
        FleetCommand::Quarantine(args) => quarantine_machines(context, args).await,
        FleetCommand::Label(args) => label_machines(context, args).await,
        FleetCommand::Reboot(reboot) => reboot_machines(context, reboot).await,
        FleetCommand::Power(power) => switch_power(context, power).await,
        FleetCommand::Prioritize(args) => prioritize_machines(context, args).await,
        FleetCommand::Retire(retire) => run_retire_command(context, retire).await,
        FleetCommand::Declare(DeclareCommand::Restored(declared)) => {
            declare_restored(context, declared).await
        }
        FleetCommand::Allow(AllowCommand::HostKey(allow)) => allow_host_key(context, allow).await,
        FleetCommand::Allow(AllowCommand::SigningKeys(allow)) => allow_signing_keys(context, allow).await,
        FleetCommand::Debug(DebugCommand::Bundle(args)) => write_debug_bundle(client, args, format).await,
        FleetCommand::Tokens(TokensCommand::Bootstrap(first)) => {
            bootstrap_token(
                client.require_bmdb("`tokens bootstrap`", "no credential exists yet")?,
                first,
                format,
            )
            .await
        }
        FleetCommand::Tokens(TokensCommand::Create(new)) => create_token(context, new).await,
        FleetCommand::Tokens(TokensCommand::Revoke(which)) => revoke_token(context, which).await,
        FleetCommand::Whoami => show_caller(context).await,
    }
}
