//! Command-line grammar (clap) of `shepherdctl`: the commands, and the flags that many of them have.
//!
//! The grammar only parses. The arguments of a command and the examples in its help are in the file that runs it, and
//! [`crate::dispatch`] calls that. Each order gets the flags of [`crate::order`] here.

use std::path::PathBuf;

use clap::{Arg, Args, CommandFactory as _, Parser, Subcommand};

use crate::approvals::{APPROVE_EXAMPLES, ApproveArgs};
use crate::artefacts::ArtefactsCommand;
use crate::audit::command::{AUDIT_EXAMPLES, AuditArgs};
use crate::budgets::BudgetCommand;
use crate::cluster::command::ClusterCommand;
use crate::completions::shell::CompletionShell;
use crate::contexts::{CONTEXTS_EXAMPLES, ContextsArgs};
use crate::debug::DebugCommand;
use crate::declare_restored::DeclareCommand;
use crate::exit_code::exit_status_text;
use crate::explain::{EXPLAIN_EXAMPLES, ExplainArgs};
use crate::issues::{ISSUES_EXAMPLES, IssuesArgs};
use crate::loops::LoopsCommand;
use crate::machine::allow_host_key::AllowCommand;
use crate::machine::hold::{HOLD_EXAMPLES, HoldArgs, RELEASE_EXAMPLES, ReleaseArgs};
use crate::machine::label::{LABEL_EXAMPLES, LabelArgs};
use crate::machine::logs::{LOGS_EXAMPLES, LogsArgs};
use crate::machine::power::{POWER_EXAMPLES, PowerArgs, REBOOT_EXAMPLES, RebootArgs};
use crate::machine::prioritize::{PRIORITIZE_EXAMPLES, PrioritizeArgs};
use crate::machine::quarantine::{QUARANTINE_EXAMPLES, QuarantineArgs};
use crate::machine::retire::{RETIRE_EXAMPLES, RetireArgs};
use crate::machine::retry::{RETRY_EXAMPLES, RetryArgs};
use crate::machine::timeline::{TIMELINE_EXAMPLES, TimelineArgs};
use crate::machine::watch::{WATCH_EXAMPLES, WatchArgs};
use crate::machine::why::{WHY_EXAMPLES, WhyArgs};
use crate::object::command::{DescribeCommand, GetCommand};
use crate::order::{dry_run, idempotency_key};
use crate::output::Output;
use crate::output::color::ColorChoice;
use crate::plan::{PLAN_EXAMPLES, PlanArgs};
use crate::policy::PolicyCommand;
use crate::tokens::TokensCommand;
use crate::top::{TOP_EXAMPLES, TopArgs};
use crate::update::{UPDATE_EXAMPLES, UpdateArgs};
use crate::version::{VERSION_EXAMPLES, VersionArgs};
use crate::wait::command::{WAIT_EXAMPLES, WaitArgs};
use crate::whoami::WHOAMI_EXAMPLES;
use bmdb::connection::dialect::Dialect;

/// Help heading of the flags that every command accepts.
const GLOBAL_HEADING: &str = "Everywhere";

/// The command line of `shepherdctl`.
#[derive(Debug, Parser)]
#[command(
    name = "shepherdctl",
    version,
    about = "Show the fleet of a Shepherd, and give it orders",
    after_help = "\
M names a machine: its UUID or the beginning of it (4 digits or more), its provider's id (sim-0007), or
PROVIDER/ID (rack-a/sim-0007). In a flag's name an underscore works wherever a dash does.

Examples:
  export SHEPHERD_BMDB_URL=postgres://kim@db:5432/bmdb
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl why sim-0007                      what it waits for, until when, and what would help
  shepherdctl timeline sim-0007                 what happened to it, newest first
  shepherdctl issues                            what is wrong, and what to do
  shepherdctl plan --horizon 30m                what the loops would do next, and when
  shepherdctl hold sim-0007 --reason 'changing a disk' --until 2h
  shepherdctl get machines -o json | jq -r '.machines[] | select(.heartbeatAt == null) | .name.machine'

A context names the servers of an API and a token: ~/.config/shepherd/contexts.toml, shepherdctl explain context.
The password of the database is read from ~/.pgpass."
)]
pub struct Cli {
    /// Where the BMDB is
    #[arg(
        help = "Where the BMDB is: postgres://USER@HOST:5432/DATABASE",
        long = "bmdb-url",
        value_name = "URL",
        env = "SHEPHERD_BMDB_URL",
        hide_env_values = true,
        global = true,
        help_heading = GLOBAL_HEADING
    )]
    pub bmdb_url: Option<String>,

    /// Database dialect: postgres or cockroachdb
    #[arg(
        long = "bmdb-dialect",
        value_name = "DIALECT",
        env = "SHEPHERD_BMDB_DIALECT",
        hide_env_values = true,
        value_enum,
        ignore_case = true,
        default_value = "postgres",
        hide_possible_values = true,
        global = true,
        hide_short_help = true,
        help_heading = GLOBAL_HEADING
    )]
    pub bmdb_dialect: Dialect,

    /// Use the database instead of the API of a context.
    #[arg(
        long,
        global = true,
        help = "Use the database (--bmdb-url) instead of the API of a context",
        help_heading = GLOBAL_HEADING
    )]
    pub direct: bool,

    /// Use the API of this context instead of the current one
    #[arg(
        long,
        value_name = "NAME",
        env = "SHEPHERD_CONTEXT",
        hide_env_values = true,
        global = true,
        help_heading = GLOBAL_HEADING
    )]
    pub context: Option<String>,

    /// Output: table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=COLUMNS
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        value_parser = Output::parse,
        default_value = "table",
        hide_default_value = true,
        global = true,
        help_heading = GLOBAL_HEADING
    )]
    pub output: Output,

    /// When to colour by severity: auto (on a terminal), always or never
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        ignore_case = true,
        default_value = "auto",
        hide_default_value = true,
        hide_possible_values = true,
        global = true,
        hide_short_help = true,
        help_heading = GLOBAL_HEADING
    )]
    pub color: ColorChoice,

    /// Show times in UTC, and read times without an offset as UTC, instead of in the zone of TZ
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    pub utc: bool,

    /// Command to run, with its arguments
    #[command(subcommand)]
    pub command: Command,
}

/// All commands: those about a fleet, and those that only concern this host.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    #[expect(missing_docs, reason = "its text would be taken for the program's")]
    Fleet(Box<FleetCommand>),
    /// List the contexts of this user, choose one, or delete one
    #[command(after_help = CONTEXTS_EXAMPLES)]
    Contexts(ContextsArgs),
    /// Explain an issue, a phase or a term
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(ExplainArgs),
    /// Show the versions of this program and of the servers
    #[command(after_help = VERSION_EXAMPLES)]
    Version(VersionArgs),
    /// Print the flags that every command accepts
    Options,
    /// Print a completion script for a shell
    #[command(
        alias = "completion",
        after_help = "\
Examples:
  shepherdctl completions bash >/etc/bash_completion.d/shepherdctl
  shepherdctl completions zsh >\"${fpath[1]}/_shepherdctl\"
  shepherdctl completions fish >~/.config/fish/completions/shepherdctl.fish

The script asks this program for commands, flags and names. Names come from the API of the context, if it
answers within 300 ms; otherwise there are none."
    )]
    Completions(CompletionsArgs),
    /// Write man pages: one for each command, and those of the other programs
    #[command(after_help = MANUAL_EXAMPLES)]
    Manual(ManualArgs),
}

/// Arguments of `completions`: the shell that gets the script.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell that runs the script, for example bash
    #[arg(value_name = "SHELL", value_enum, ignore_case = true)]
    pub shell: CompletionShell,
}

const MANUAL_EXAMPLES: &str = "\
Example:
  shepherdctl manual /usr/local/share/man       shepherdctl.1 is in man1 there";

/// Arguments of `manual`: the directory for the pages.
#[derive(Debug, Args)]
pub struct ManualArgs {
    /// Directory for the man pages, for example /usr/local/share/man; they are in man1, man5 and man8 there
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

/// Commands about a fleet.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// List objects of a kind: machines, clusters, issues, work and more
    #[command(subcommand)]
    Get(GetCommand),
    /// Show all details of one object
    #[command(subcommand)]
    Describe(DescribeCommand),
    /// Explain the state of a machine: why, what it waits for, and what would help
    #[command(after_help = WHY_EXAMPLES)]
    Why(WhyArgs),
    /// Show what happened to a machine, newest first
    #[command(after_help = TIMELINE_EXAMPLES)]
    Timeline(TimelineArgs),
    /// Show the end of a machine's log, or list its logs
    #[command(after_help = LOGS_EXAMPLES)]
    Logs(LogsArgs),
    /// Show what the control loops will do next, and when
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// List problems of the fleet, most urgent first
    #[command(after_help = ISSUES_EXAMPLES)]
    Issues(IssuesArgs),
    /// List orders that were given: by whom, when and why, newest first
    #[command(after_help = AUDIT_EXAMPLES)]
    Audit(AuditArgs),
    /// Print machines as they change, until you stop it (Ctrl-C)
    #[command(
        after_help = WATCH_EXAMPLES,
        long_about = "\
Print all machines, then a line for each change, until you stop it (Ctrl-C).

With a context, a shepherd sends the changes. When it stops or dies, the watch continues at the next server of the
context. With --direct, shepherdctl reads the database itself."
    )]
    Watch(WatchArgs),
    /// Wait until machines, clusters or updates meet a condition
    #[command(
        after_help = WAIT_EXAMPLES,
        long_about = "\
Wait until machines, clusters or updates meet a condition (--for).

The objects are selected once. If the time is over, or one of them cannot meet the condition any more,
standard error has the reason for each that does not meet it, and the exit code is 1. Ctrl-C ends the waiting."
    )]
    Wait(WaitArgs),
    /// Show the fleet on one page: overview, machines, clusters, and why a machine is as it is
    #[command(
        after_help = TOP_EXAMPLES,
        long_about = "\
Show the fleet on a page that is redrawn every few seconds, until you quit (q).

It shows machines by phase, the throughput of the loops, the longest running work, and what needs attention:
brakes, pauses, failing providers. Tab leads to the machines and the clusters, Enter opens why the selected
machine is as it is, and ? lists the keys. The page gives no orders. With --once, or if standard output is not
a terminal, the overview is printed once."
    )]
    Top(TopArgs),
    /// Switch the two-person rule of the fleet off
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Stop work on machines until they are released
    #[command(after_help = HOLD_EXAMPLES)]
    Hold(HoldArgs),
    /// End holds on machines, or their quarantine
    #[command(after_help = RELEASE_EXAMPLES)]
    Release(ReleaseArgs),
    /// Retry work on machines at once: clear their failures and their wait for a person
    #[command(after_help = RETRY_EXAMPLES)]
    Retry(RetryArgs),
    /// Leave machines alone until their quarantine is released
    #[command(after_help = QUARANTINE_EXAMPLES)]
    Quarantine(QuarantineArgs),
    /// Set labels (KEY=VALUE) of machines, and remove labels (KEY-)
    #[command(after_help = LABEL_EXAMPLES)]
    Label(LabelArgs),
    /// Set the scheduling priority of machines
    #[command(after_help = PRIORITIZE_EXAMPLES)]
    Prioritize(PrioritizeArgs),
    /// Pause and resume control loops in every shepherd
    #[command(subcommand)]
    Loops(LoopsCommand),
    /// Approve an order that needs a second admin (two-person rule)
    #[command(after_help = APPROVE_EXAMPLES)]
    Approve(ApproveArgs),
    /// Change budgets: how many machines may be disrupted or released within a time window
    #[command(subcommand)]
    Budget(BudgetCommand),
    /// Create, change and delete clusters
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Add and delete files that machines fetch from any shepherd
    #[command(subcommand)]
    Artefacts(ArtefactsCommand),
    /// Roll out a release of the role server to machines, a few at a time
    #[command(after_help = UPDATE_EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Update(UpdateArgs),
    /// Retire machines: the provider takes them back, and only their records stay
    #[command(
        after_help = RETIRE_EXAMPLES,
        args_conflicts_with_subcommands = true,
        subcommand_negates_reqs = true
    )]
    Retire(RetireArgs),
    /// Reboot machines; recovery watches whether they come back
    #[command(after_help = REBOOT_EXAMPLES)]
    Reboot(RebootArgs),
    /// Switch the power of machines: on, off, or cycle for off and on
    #[command(
        after_help = POWER_EXAMPLES,
        long_about = "\
Switch the power of machines, where their provider can.

A machine that is switched off is held (scope recovery) until `release`; otherwise recovery would switch it on
again. An order that is not carried out within power_order_timeout (policy) ends. `power cancel` cancels a power or
reboot order that has not started.",
        args_conflicts_with_subcommands = true,
        subcommand_negates_reqs = true
    )]
    Power(PowerArgs),
    /// Collect data for finding a fault
    #[command(subcommand)]
    Debug(DebugCommand),
    /// Allow what was rejected for safety
    #[command(subcommand)]
    Allow(AllowCommand),
    /// Declare a fact that the BMDB cannot find out
    #[command(subcommand)]
    Declare(DeclareCommand),
    /// Create and revoke credentials for the API
    #[command(subcommand)]
    Tokens(TokensCommand),
    /// Show who calls: the name, the role and the credential
    #[command(after_help = WHOAMI_EXAMPLES)]
    Whoami,
}

/// The line of every help in the place of the flags that every command accepts.
const POINTER: &str = "`shepherdctl options` lists the flags that every command accepts.";

/// Whether a block of a help is the line about the flags of every command.
#[must_use]
pub fn is_pointer(block: &str) -> bool {
    block.trim() == POINTER
}

/// The grammar, with `--idempotency-key` and `--dry-run` added to each command that gives orders. The help of a command
/// refers to the flags of every command, and that of the program has the exit codes.
#[must_use]
pub fn grammar() -> clap::Command {
    let command = whole_grammar().mut_args(|flag| if flag.is_global_set() { flag.hide(true) } else { flag });
    add_pointer(command)
}

/// The grammar in which no flag is hidden, for completion and for the manual.
#[must_use]
pub fn whole_grammar() -> clap::Command {
    // Help is wrapped when it is printed, once.
    let command = Cli::command().term_width(0);
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let command = command.after_help(format!("{help}\n\n{}", exit_status_text()));
    let keyed = add_flag(command, &idempotency_key::flag(), &idempotency_key::EXCLUDED_COMMANDS);
    allow_negative_numbers(add_flag(keyed, &dry_run::flag(), &dry_run::EXCLUDED_COMMANDS))
}

/// Takes `-5` after a flag as its value, so that the error is about the value, and not about a flag of that name.
fn allow_negative_numbers(command: clap::Command) -> clap::Command {
    let takes_value = |arg: &Arg| !arg.is_positional() && arg.get_action().takes_values();
    let command =
        command.mut_args(|arg| if takes_value(&arg) { arg.allow_negative_numbers(true) } else { arg });
    command.mut_subcommands(allow_negative_numbers)
}

/// The help of the flags that every command accepts, as the parser renders it.
#[must_use]
pub fn global_flags_help() -> String {
    let flags = Cli::command();
    let flags = flags.get_arguments().filter(|flag| flag.is_global_set()).cloned();
    let command = clap::Command::new("shepherdctl").term_width(0).disable_help_flag(true).args(flags);
    let rendered = command.help_template("{all-args}").render_long_help().to_string();
    format!("Flags of every command, before or behind its own ones.\n\n{rendered}")
}

fn add_pointer(command: clap::Command) -> clap::Command {
    let help = command.get_after_help().map(|help| format!("{help}\n\n")).unwrap_or_default();
    let command = command.after_help(format!("{help}{POINTER}"));
    let below: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    below.into_iter().fold(command, |command, name| command.mut_subcommand(name, add_pointer))
}

fn add_flag(command: clap::Command, flag: &Arg, without: &[&str]) -> clap::Command {
    let orders = command.get_arguments().any(|argument| argument.get_id() == "reason");
    let command = if orders { command.arg(flag.clone()) } else { command };
    let below: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    below.into_iter().filter(|name| !without.contains(&name.as_str())).fold(command, |command, name| {
        // The exclusions name only the first word of a command.
        command.mut_subcommand(name, |below| add_flag(below, flag, &[]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_number_is_a_wrong_value_of_its_flag() {
        for (line, wrong) in [
            ("budget set reboot --max-count -5 --reason r", "-5"),
            ("get machines --limit -1", "-1"),
            ("cluster scale ams --workers -3 --reason r", "-3"),
            ("retire --label row=7 --yes-count -2 --reason r", "-2"),
        ] {
            let words = std::iter::once("shepherdctl").chain(line.split(' '));
            let given: Vec<std::ffi::OsString> = words.map(Into::into).collect();
            let error = grammar().try_get_matches_from(&given).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::ValueValidation, "{line}: {error}");
            let sentence = model::usage_error::format_usage_error(&error, &grammar(), &given);
            assert!(sentence.contains(wrong) && !sentence.contains("there is no flag"), "{sentence}");
        }
    }

    #[test]
    fn case_of_a_value_does_not_count() {
        for line in [
            "plan --process recovery",
            "get machines --phase NEEDSHUMAN",
            "issues --fail-on Critical",
            "hold sim-1 --reason r --scope POWER",
            "power ON sim-1 --reason r",
            "loops pause RECOVERER --reason r",
            "loops resume Recoverer",
            "budget set REBOOT --max-count 5 --reason r",
            "tokens create lee --role OPERATOR --reason r",
            "cluster create ams --approval MANUAL --reason r",
            "cluster kubernetes rotate ams --keys CLIENTS --reason r",
            "completions BASH",
            "--bmdb-dialect POSTGRES get machines",
            "--color NEVER get machines",
        ] {
            let words = std::iter::once("shepherdctl").chain(line.split(' '));
            let parsed = grammar().try_get_matches_from(words);
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }

    /// The descriptions of the positional arguments with this name, of this command and those below it.
    fn descriptions(command: &clap::Command, name: &str) -> Vec<String> {
        let arguments = command.get_positionals().filter(|argument| argument.get_id() == name);
        let own = arguments.map(|argument| argument.get_help().map(ToString::to_string).unwrap_or_default());
        own.chain(command.get_subcommands().flat_map(|below| descriptions(below, name))).collect()
    }

    #[test]
    fn machine_is_described_in_one_way() {
        for (name, least, expected) in [
            (
                "machine",
                5,
                "Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID",
            ),
            (
                "machines",
                8,
                "Machines: each by its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; - \
                 for names on standard input; omit them to select by filters",
            ),
        ] {
            let found = descriptions(&grammar(), name);
            assert!(found.len() >= least, "{name}: {found:?}");
            for description in found {
                assert_eq!(description, expected);
            }
        }
    }
}
