//! Command-line grammar (clap) of `shepherdctl`. It only parses; the other modules run the commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, builder::PossibleValuesParser};
use uuid::Uuid;

use crate::approvals::ApproveArgs;
use crate::artefacts::ArtefactsCommand;
use crate::budgets::BudgetCommand;
use crate::bulk_orders::{BULK_GROUPS, BulkSelection, LabelArgs, QuarantineArgs, UnlabelArgs};
use crate::cluster::ClusterCommand;
use crate::debug_bundle::DebugCommand;
use crate::examples;
use crate::logs::LogsArgs;
use crate::loops::LoopsCommand;
use crate::machine_filter::MachineFilters;
use crate::output::Output;
use crate::policy::PolicyCommand;
use crate::priority::PrioritizeArgs;
use crate::tokens::parse_lifetime;
use crate::top::TopArgs;
use crate::update::UpdateArgs;
use crate::watch::WatchArgs;
use bmdb::connection::Dialect;
use model::access::AccessRole;
use model::facts::HoldScope;
use model::process::Process;
use model::time::Span;

/// Help heading of the flags that every command accepts.
const GLOBAL_HEADING: &str = "Everywhere";

/// The command line of `shepherdctl`.
#[derive(Debug, Parser)]
#[command(
    name = "shepherdctl",
    version,
    about = "Asks a Shepherd about its machines, and tells it what to do with them",
    after_help = "\
M names a machine: its UUID or the beginning of it (4 digits or more), its provider's id (sim-0007), or
PROVIDER/ID (rack-a/sim-0007). In a flag's name a dash works wherever an underscore does.

Examples:
  export SHEPHERD_BMDB_URL=postgres://kim@db:5432/bmdb
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl why sim-0007                      what it waits for, until when, and what would help
  shepherdctl timeline sim-0007                 what happened to it, newest first
  shepherdctl issues                            what is wrong, and what to do
  shepherdctl plan --horizon 30m                what the loops would do next, and when
  shepherdctl hold sim-0007 --reason 'changing a disk' --until 2h
  shepherdctl get machines -o json | jq -r '.machines[] | select(.heartbeat_at == null) | .machine'

A password is read from ~/.pgpass. Exit code: 0 done, 1 something failed, 2 the command was wrong."
)]
pub struct Cli {
    /// Where the BMDB is
    #[arg(
        help = "Where the BMDB is: postgres://USER@HOST:5432/DATABASE",
        long = "bmdb_url",
        value_name = "URL",
        env = "SHEPHERD_BMDB_URL",
        hide_env_values = true,
        global = true,
        help_heading = GLOBAL_HEADING
    )]
    pub bmdb_url: Option<String>,

    /// Database dialect: postgres or cockroachdb
    #[arg(
        long = "bmdb_dialect",
        value_name = "DIALECT",
        env = "SHEPHERD_BMDB_DIALECT",
        hide_env_values = true,
        value_enum,
        default_value = "postgres",
        hide_possible_values = true,
        global = true,
        hide_short_help = true,
        help_heading = GLOBAL_HEADING
    )]
    pub bmdb_dialect: Dialect,

    /// Ask the database itself, and not a context's API
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    pub direct: bool,

    /// Ask the API of this context instead of the current one
    #[arg(
        long,
        value_name = "NAME",
        env = "SHEPHERD_CONTEXT",
        hide_env_values = true,
        global = true,
        help_heading = GLOBAL_HEADING
    )]
    pub context: Option<String>,

    /// Output format: a table for people, JSON or YAML for programs
    #[arg(short = 'o', long = "output", value_enum, default_value = "table", global = true, help_heading = GLOBAL_HEADING)]
    pub output: Output,

    /// Command to run, with its arguments
    #[command(subcommand)]
    pub command: Command,
}

/// What is done: with a fleet, or with the host that somebody sits at.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    #[expect(missing_docs, reason = "its text would be taken for the program's")]
    Fleet(Box<FleetCommand>),
    /// Print the script that makes a shell complete what you type
    #[command(after_help = "\
Examples:
  shepherdctl completions bash >/etc/bash_completion.d/shepherdctl
  shepherdctl completions zsh >\"${fpath[1]}/_shepherdctl\"
  shepherdctl completions fish >~/.config/fish/completions/shepherdctl.fish")]
    Completions(CompletionsArgs),
    /// Write the pages of the manual, one a command
    Manual(ManualArgs),
}

/// Shell that gets the completion script.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell that runs the script, for example bash
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: clap_complete::Shell,
}

/// Directory that receives the manual pages.
#[derive(Debug, Args)]
pub struct ManualArgs {
    /// The directory, as /usr/local/share/man/man1
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

/// A verb on a fleet.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// List machines, sessions, live work or providers
    #[command(subcommand)]
    Get(GetCommand),
    /// Show everything that is known
    #[command(subcommand)]
    Describe(DescribeCommand),
    /// Say why a machine is as it is, what it waits for, and what would help
    #[command(after_help = examples::WHY)]
    Why(MachineArg),
    /// Show what happened to a machine, newest first
    #[command(after_help = examples::TIMELINE)]
    Timeline(TimelineArgs),
    /// Show the last lines of a log of a machine, or which logs it has
    #[command(after_help = examples::LOGS)]
    Logs(LogsArgs),
    /// Say what the loops would do next, and when, before they do it
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Say what is wrong, most urgent first
    #[command(after_help = examples::ISSUES)]
    Issues,
    /// Print machines as they change, until you end it
    #[command(
        after_help = examples::WATCH,
        long_about = "\
Print the machines there are, and then a line for each that changes, until you end it.

With a context, a shepherd sends the changes. When it stops or dies, the watch continues at the next server of the
context. With --direct, shepherdctl reads the database itself."
    )]
    Watch(WatchArgs),
    /// Show the fleet on one page: machines by phase, how the loops get on, what takes longest
    #[command(
        after_help = examples::TOP,
        long_about = "\
Show the fleet on one page that is redrawn every few seconds, until you end it (q).

It shows machines by phase, how the loops get on, what is under way for longest, and what somebody should look at:
brakes, pauses, providers that fail. Where standard output is no terminal, or with --once, the page is printed once."
    )]
    Top(TopArgs),
    /// Show the rules that the fleet is run by
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Stop work on a machine until it is released
    #[command(after_help = examples::HOLD)]
    Hold(HoldArgs),
    /// End a hold on a machine, or its quarantine
    #[command(after_help = examples::RELEASE)]
    Release(ReleaseArgs),
    /// Try again at once: forget a machine's failures and that it needs a person
    #[command(after_help = examples::RETRY)]
    Retry(RetryArgs),
    /// Leave a machine alone until its quarantine is released
    #[command(after_help = examples::QUARANTINE)]
    Quarantine(QuarantineArgs),
    /// Say something of a machine, as KEY=VALUE, for lists and filters
    #[command(after_help = examples::LABEL)]
    Label(LabelArgs),
    /// Take labels away from a machine
    #[command(after_help = examples::UNLABEL)]
    Unlabel(UnlabelArgs),
    /// Put a machine's work before or behind that of the others
    #[command(after_help = examples::PRIORITIZE, allow_missing_positional = true)]
    Prioritize(PrioritizeArgs),
    /// Pause a loop in every shepherd, and let it go on
    #[command(subcommand)]
    Loops(LoopsCommand),
    /// Approve an order of somebody else that needs another admin
    #[command(after_help = examples::APPROVE)]
    Approve(ApproveArgs),
    /// Change how many machines may be disturbed, and given back, within a while
    #[command(subcommand)]
    Budget(BudgetCommand),
    /// Make clusters of machines, and look after them
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Files that machines fetch from any shepherd
    #[command(subcommand)]
    Artefacts(ArtefactsCommand),
    /// Roll a release of the role server out to machines, few at a time
    #[command(after_help = examples::UPDATE, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Update(UpdateArgs),
    /// Retire a machine: its provider takes it back, and only the record of it stays
    #[command(
        after_help = examples::RETIRE,
        args_conflicts_with_subcommands = true,
        subcommand_negates_reqs = true
    )]
    Retire(RetireArgs),
    /// Reboot a machine; recovery watches whether it comes back
    #[command(after_help = examples::REBOOT)]
    Reboot(RebootArgs),
    /// Switch a machine's power: on, off, or cycle for off and on
    #[command(
        after_help = examples::POWER,
        long_about = "\
Switch a machine's power, where its provider can.

Who is switched off is held (recovery) until `release`, because the ladder would else switch it on again. An order that
could not be carried out within the policy's power_order_timeout is given up. `power cancel` takes one back that was
not begun; this also goes for `reboot`.",
        args_conflicts_with_subcommands = true,
        subcommand_negates_reqs = true
    )]
    Power(PowerArgs),
    /// Collect what helps to find a fault
    #[command(subcommand)]
    Debug(DebugCommand),
    /// Allow what was refused for safety
    #[command(subcommand)]
    Allow(AllowCommand),
    /// Declare what the BMDB cannot know by itself
    #[command(subcommand)]
    Declare(DeclareCommand),
    /// Make, list and revoke credentials for the API
    #[command(subcommand)]
    Tokens(TokensCommand),
}

/// What can be done with credentials.
#[derive(Debug, Subcommand)]
pub enum TokensCommand {
    /// Make the first token, an admin's, in the database itself
    #[command(after_help = examples::TOKENS_BOOTSTRAP)]
    Bootstrap(BootstrapArgs),
    /// Make a token, or pin a client certificate
    #[command(after_help = examples::TOKENS_CREATE)]
    Create(CreateToken),
    /// List credentials, newest first
    #[command(after_help = examples::TOKENS_GET)]
    Get,
    /// End a credential at once
    #[command(after_help = examples::TOKENS_REVOKE)]
    Revoke(RevokeToken),
}

/// Name, lifetime and destination of the first token.
#[derive(Debug, Args)]
pub struct BootstrapArgs {
    /// Whose it is [default: you]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// How long it is good, as 90d [default: until it is revoked]
    #[arg(long = "expires_after", value_name = "SPAN", value_parser = parse_lifetime)]
    pub expires_after: Option<Span>,
    /// Write it into this new file, which only you may read, and not to standard output
    #[arg(long = "output_file", value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Save a context of this name with it, and use that from now on
    #[arg(long = "save_context", value_name = "NAME")]
    pub save_context: Option<String>,
}

/// A credential to make.
#[derive(Debug, Args)]
pub struct CreateToken {
    /// Whose it is: a person or a program
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What they may do
    #[arg(long, value_name = "ROLE", value_parser = PossibleValuesParser::new(AccessRole::ALL.map(AccessRole::as_str)))]
    pub role: String,
    /// Only the machines of this provider; may be given several times
    #[arg(long, value_name = "NAME")]
    pub provider: Vec<String>,
    /// How long it is good, as 90d [default: until it is revoked]
    #[arg(long = "expires_after", value_name = "SPAN", value_parser = parse_lifetime)]
    pub expires_after: Option<Span>,
    /// Pin this client certificate (PEM, Ed25519, signed by itself) instead of making a token
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Write the token into this new file, which only you may read, and not to standard output
    #[arg(long = "output_file", value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A credential to end.
#[derive(Debug, Args)]
pub struct RevokeToken {
    /// Its UUID, as `tokens get` lists it
    #[arg(value_name = "CREDENTIAL")]
    pub credential: Uuid,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// What can be declared.
#[derive(Debug, Subcommand)]
pub enum DeclareCommand {
    /// The BMDB was restored from a backup, and counts from now on; with every shepherd stopped
    #[command(long_about = "\
Declare that the BMDB was restored from a backup, and that this copy is the one that counts from now on.

Machines remember what was ordered after the backup was taken, and refuse a database that has forgotten
it. This lifts every fence beyond that, ends the sessions, work and steps that the backup holds, and
writes a line into every machine's history. Stop every shepherd first; docs/backup.md says the rest.")]
    Restored(DeclareRestoredArgs),
}

/// Lists that `get` prints, one per subcommand.
#[derive(Debug, Subcommand)]
pub enum GetCommand {
    /// Machines by phase, provider and id
    #[command(visible_alias = "machine", after_help = examples::GET_MACHINES)]
    Machines(ListMachinesArgs),
    /// Open sessions: who works
    #[command(visible_alias = "session", after_help = examples::GET_SESSIONS)]
    Sessions(LimitArgs),
    /// Live work: what is being done now, longest running first
    #[command(after_help = examples::GET_WORK)]
    Work(LimitArgs),
    /// Providers with what they answered last, and the brakes that are on
    #[command(visible_alias = "provider", after_help = examples::GET_PROVIDERS)]
    Providers,
    /// The loops, and who paused which
    #[command(visible_alias = "loop", after_help = examples::GET_LOOPS)]
    Loops,
    /// Orders that need another admin, and what became of them
    #[command(visible_alias = "approval", after_help = examples::GET_APPROVALS)]
    Approvals,
    /// How many machines may be disturbed, how much of that is used, and when the next may be
    #[command(visible_alias = "budget", after_help = examples::GET_BUDGETS)]
    Budgets,
    /// The brakes: which hold, since when and why, and what engages them
    #[command(visible_alias = "brake", after_help = examples::GET_BRAKES)]
    Brakes,
}

/// What can be shown in full.
#[derive(Debug, Subcommand)]
pub enum DescribeCommand {
    /// Facts, schedule, work, waits and last events of a machine
    #[command(after_help = examples::DESCRIBE_MACHINE)]
    Machine(MachineArg),
}

/// What can be allowed.
#[derive(Debug, Subcommand)]
pub enum AllowCommand {
    /// Believe the SSH host key that was refused last, after you checked that it is the machine's own
    #[command(after_help = examples::ALLOW_HOST_KEY)]
    HostKey(AllowHostKey),
}

/// The one machine that a command is about.
#[derive(Debug, Args)]
pub struct MachineArg {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
}

/// A list of machines.
#[derive(Debug, Args)]
pub struct ListMachinesArgs {
    /// Filters that select the machines to list.
    #[command(flatten)]
    pub filters: MachineFilters,
    /// Most machines to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
    /// Go on where an earlier list ended (it says so)
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,
}

/// A list with an end.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Most lines to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// How much of a machine's history.
#[derive(Debug, Args)]
pub struct TimelineArgs {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Most events to list
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// What the forecast covers: machine, process, horizon and policy.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Only what happens to this machine
    #[arg(long, value_name = "M")]
    pub machine: Option<String>,
    /// Only what this process does
    #[arg(
        long,
        value_name = "PROCESS",
        value_parser = PossibleValuesParser::new(Process::ALL.map(Process::as_str))
    )]
    pub process: Option<String>,
    /// How far to look ahead
    #[arg(long, value_name = "SPAN", default_value = "1h")]
    pub horizon: Span,
    /// What this configuration file of a shepherd would change, by the policy in it
    #[arg(long, value_name = "NEW_CONFIG")]
    pub diff: Option<PathBuf>,
    /// Most lines to show
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// Which machines to hold, why, how much and until when.
#[derive(Debug, Args)]
pub struct HoldArgs {
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// What it stops: everything, power (no reboot, no power cut), or recovery
    #[arg(
        long,
        value_name = "SCOPE",
        default_value = "everything",
        value_parser = PossibleValuesParser::new(HoldScope::ALL.map(HoldScope::as_str))
    )]
    pub scope: String,
    /// When it ends by itself: after a while (2h) or at a moment (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// The end of a stop.
#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// End its quarantine instead; it comes back if provider and BMDB still disagree
    #[arg(long)]
    pub quarantine: bool,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Which machines to retry, and why.
#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// A machine to give back, or a change of mind.
#[derive(Debug, Args)]
pub struct RetireArgs {
    /// What to do with a retirement that was begun
    #[command(subcommand)]
    pub command: Option<RetireCommand>,
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Wipe it first; no agent and no provider of this release offers that yet
    #[arg(long)]
    pub wipe: bool,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// A machine to reboot.
#[derive(Debug, Args)]
pub struct RebootArgs {
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Power to switch, or a change of mind.
#[derive(Debug, Args)]
pub struct PowerArgs {
    /// What to do with an order that was given
    #[command(subcommand)]
    pub command: Option<PowerCommand>,
    /// What to do: on, off or cycle
    #[arg(value_name = "ACTION", required = true, value_parser = ["on", "off", "cycle"])]
    pub action: Option<String>,
    /// Machine: its UUID, its provider's id (sim-0007) or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// What can be done with an order about power.
#[derive(Debug, Subcommand)]
pub enum PowerCommand {
    /// Take back an order to reboot or to switch that was not begun
    #[command(after_help = examples::POWER_CANCEL)]
    Cancel(CancelPower),
}

/// A machine that is to stay as it is.
#[derive(Debug, Args)]
pub struct CancelPower {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// What can be done with a retirement that was begun.
#[derive(Debug, Subcommand)]
pub enum RetireCommand {
    /// Let it stay; possible until its provider is ordered to take it back
    #[command(after_help = examples::RETIRE_CANCEL)]
    Cancel(CancelRetire),
    /// Leave out the stage that it is at, when that cannot be done
    #[command(after_help = examples::RETIRE_WAIVE)]
    Waive(WaiveStage),
}

/// A machine that is to stay.
#[derive(Debug, Args)]
pub struct CancelRetire {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// A stage to leave out.
#[derive(Debug, Args)]
pub struct WaiveStage {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// The stage: wipe or release
    #[arg(value_name = "STAGE")]
    pub stage: String,
    /// Words that confirm what stays undone, exactly; without the right words the error shows them
    #[arg(long = "confirm", value_name = "WORDS", default_value = "")]
    pub confirm: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A host key to believe.
#[derive(Debug, Args)]
pub struct AllowHostKey {
    /// Machine: its UUID or the start of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Fingerprint of the key as `why` shows it; nothing happens unless it is the one that was refused
    #[arg(long, value_name = "SHA256:…")]
    pub fingerprint: String,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Which backup the BMDB was restored from, and why.
#[derive(Debug, Args)]
pub struct DeclareRestoredArgs {
    /// Which backup, and why: kept in every machine's history
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}
