//! Grammar of `get` and `describe`: a subcommand for each row of the table of kinds.
//!
//! The derived grammar of the other commands is an enum, with a variant per subcommand. Here the subcommands follow from
//! [`KINDS`], so that a kind is added in the table alone.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand};

use crate::audit::list::{AuditListArgs, FILTER_FLAGS};
use crate::machine::get::MachineListArgs;
use crate::machine::selection::MachineArg;
use crate::object::kind::{KINDS, KindRow, ObjectKind};

/// The parsed command `get KIND [NAME…]`.
#[derive(Debug)]
pub struct GetCommand {
    /// The kind to list.
    pub kind: ObjectKind,
    /// Which objects, and how many of them.
    pub args: GetArgs,
    /// What selects objects of this kind.
    pub selection: KindSelection,
    /// Whether to print changes until the command is stopped.
    pub watch: bool,
}

/// Arguments of `get` for every kind.
#[derive(Debug, Default, Args)]
pub struct GetArgs {
    /// Names of the objects to list; omit them to list all
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub names: Vec<String>,
    /// Maximum number of objects to list [default: all]
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=100_000),
        conflicts_with = "names"
    )]
    pub limit: Option<u32>,
    /// Sort by this column, numbers by value; the whole list is read, also with --limit
    #[arg(long = "sort-by", value_name = "COLUMN")]
    pub sort_by: Option<String>,
    /// Print no line with the names of the columns
    #[arg(long = "no-headers")]
    pub no_headers: bool,
}

/// What selects objects of one kind besides their names. The defaults select all.
#[derive(Debug, Default)]
pub struct KindSelection {
    /// Filters and cursor of a list of machines.
    pub machines: MachineListArgs,
    /// The filters of audit records.
    pub audit: AuditListArgs,
}

/// The parsed command `describe KIND NAME`.
#[derive(Debug)]
pub struct DescribeCommand {
    /// The kind of the object.
    pub kind: ObjectKind,
    /// Its name; `None` for the policy, which is the only one, unless it is named.
    pub name: Option<String>,
}

/// Argument of `describe` for most kinds.
#[derive(Debug, Args)]
struct NameArg {
    /// Name of the object, as `get` lists it
    #[arg(value_name = "NAME", value_parser = parse_name)]
    name: String,
}

fn parse_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("a name cannot be empty; omit it to list all".to_owned());
    }
    Ok(text.to_owned())
}

const WATCH: &str = "watch";
const NAME: &str = "name";

/// The definition of `--watch`.
fn watch_flag() -> Arg {
    Arg::new(WATCH)
        .short('w')
        .long(WATCH)
        .action(ArgAction::SetTrue)
        .conflicts_with_all(["limit", "sort_by"])
        .help("Print the list, then a line for each change, until you stop it (Ctrl-C)")
}

/// Whether a list of this kind can be watched. The policy is no list, and contexts are a file of this host.
const fn can_be_watched(kind: ObjectKind) -> bool {
    !matches!(kind, ObjectKind::Policy | ObjectKind::Context)
}

/// A subcommand without arguments. The other number of its word is its alias.
fn kind_command(name: &'static str, alias: &'static str) -> Command {
    let command = Command::default().name(name);
    if name == alias { command } else { command.visible_alias(alias) }
}

fn list_grammar(row: &KindRow) -> Command {
    let command = kind_command(row.plural, row.singular).after_help(row.list_examples);
    let command = match row.kind {
        ObjectKind::Policy => command,
        ObjectKind::Machine => {
            let command = MachineListArgs::augment_args(GetArgs::augment_args(command));
            let command = command.mut_arg("sort_by", |column| column.conflicts_with("cursor"));
            command.mut_arg("names", |names| {
                names.value_name("M").conflicts_with_all(["MachineFilters", "cursor"]).help(
                    "Machines to list, each by its UUID or the beginning of it, its provider's id, or PROVIDER/ID; \
                     omit them to list by filters",
                )
            })
        }
        ObjectKind::Audit => {
            let command = AuditListArgs::augment_args(GetArgs::augment_args(command));
            FILTER_FLAGS
                .into_iter()
                .fold(command, |command, flag| command.mut_arg(flag, |flag| flag.conflicts_with("names")))
        }
        _ => GetArgs::augment_args(command),
    };
    let command = if can_be_watched(row.kind) { command.arg(watch_flag()) } else { command };
    let command = match row.kind {
        ObjectKind::Machine => command.mut_arg(WATCH, |watch| watch.conflicts_with("cursor")),
        _ => command,
    };
    // Last, because a group of arguments brings a description of its own.
    command.about(row.list_about)
}

fn page_grammar(row: &KindRow) -> Command {
    let command = kind_command(row.singular, row.plural).after_help(row.page_examples);
    let command = match row.kind {
        // What `get policy -o name` prints is accepted as well.
        ObjectKind::Policy => {
            let name = Arg::new(NAME).value_name("NAME").value_parser(parse_name);
            command.arg(name.help("Name of the only one: policy"))
        }
        ObjectKind::Machine => MachineArg::augment_args(command),
        _ => NameArg::augment_args(command),
    };
    command.about(row.page_about)
}

/// The kind and the arguments of the subcommand that was parsed.
fn parsed_kind(matches: &ArgMatches) -> Result<(ObjectKind, &ArgMatches), clap::Error> {
    let (word, matches) =
        matches.subcommand().ok_or_else(|| clap::Error::new(ErrorKind::MissingSubcommand))?;
    let kind = ObjectKind::find(word).ok_or_else(|| clap::Error::new(ErrorKind::InvalidSubcommand))?;
    Ok((kind, matches))
}

impl FromArgMatches for GetCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let (kind, matches) = parsed_kind(matches)?;
        let watch = can_be_watched(kind) && matches.get_flag(WATCH);
        let mut command = Self { kind, args: GetArgs::default(), selection: KindSelection::default(), watch };
        if kind != ObjectKind::Policy {
            command.args = GetArgs::from_arg_matches(matches)?;
        }
        if kind == ObjectKind::Machine {
            command.selection.machines = MachineListArgs::from_arg_matches(matches)?;
        }
        if kind == ObjectKind::Audit {
            command.selection.audit = AuditListArgs::from_arg_matches(matches)?;
        }
        Ok(command)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for GetCommand {
    fn augment_subcommands(command: Command) -> Command {
        KINDS.iter().fold(command, |command, row| command.subcommand(list_grammar(row)))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        ObjectKind::find(name).is_some()
    }
}

impl FromArgMatches for DescribeCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let (kind, matches) = parsed_kind(matches)?;
        let name = match kind {
            ObjectKind::Policy => matches.get_one::<String>(NAME).cloned(),
            ObjectKind::Machine => Some(MachineArg::from_arg_matches(matches)?.machine),
            _ => Some(NameArg::from_arg_matches(matches)?.name),
        };
        Ok(Self { kind, name })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for DescribeCommand {
    fn augment_subcommands(command: Command) -> Command {
        KINDS.iter().fold(command, |command, row| command.subcommand(page_grammar(row)))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        ObjectKind::find(name).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Cli, FleetCommand, grammar};

    fn fleet_command(line: &[&str]) -> Result<FleetCommand, ErrorKind> {
        let line = ["shepherdctl"].iter().chain(line);
        let parsed = grammar().try_get_matches_from(line).and_then(|found| Cli::from_arg_matches(&found));
        match parsed.map_err(|error| error.kind())?.command {
            crate::command::Command::Fleet(command) => Ok(*command),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_kind_is_listed_and_described_by_both_of_its_words() {
        for row in &KINDS {
            for word in [row.plural, row.singular] {
                let found = fleet_command(&["get", word]);
                assert!(matches!(found, Ok(FleetCommand::Get(of)) if of.kind == row.kind), "{word}");
                let named = if row.kind == ObjectKind::Policy { None } else { Some("n".to_owned()) };
                let line: Vec<&str> = ["describe", word].into_iter().chain(named.as_deref()).collect();
                let Ok(FleetCommand::Describe(found)) = fleet_command(&line) else { panic!("{word}") };
                assert_eq!((found.kind, found.name), (row.kind, named), "{word}");
            }
        }
    }

    #[test]
    fn names_exclude_other_selections() {
        for (line, expected) in [
            (&["get", "machines", "a", "b"][..], None),
            (&["get", "machines", "--phase", "ready", "--limit", "3"], None),
            (&["get", "machines", "a", "--phase", "ready"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "machines", "a", "--cursor", "x"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "machines", "--sort-by", "phase", "--cursor", "x"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "machines", "a", "b", "--sort-by", "phase"], None),
            (&["get", "work", "--sort-by=for", "--limit", "3"], None),
            (&["get", "work", "a", "--limit", "3"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "audit", "a", "--machine", "m"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "audit", "a", "--since", "2h"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "audit", "--actor", "kim", "--since", "2h", "--before", "1h"], None),
            (&["get", "machine", ""], Some(ErrorKind::ValueValidation)),
            (&["describe", "session"], Some(ErrorKind::MissingRequiredArgument)),
            (&["describe", "session", "a", "b"], Some(ErrorKind::UnknownArgument)),
            (&["get", "machines", "a", "-w"], None),
            (&["get", "machines", "--phase", "ready", "--watch"], None),
            (&["get", "machines", "-w", "--limit", "3"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "machines", "-w", "--sort-by", "phase"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "machines", "-w", "--cursor", "x"], Some(ErrorKind::ArgumentConflict)),
            (&["get", "clusters", "-w", "-o", "json"], None),
            (&["get", "contexts", "-w"], Some(ErrorKind::UnknownArgument)),
            (&["get", "policy", "-w"], Some(ErrorKind::UnknownArgument)),
            (&["get", "policy", "a"], Some(ErrorKind::UnknownArgument)),
            (&["describe", "policy", "policy"], None),
            (&["describe", "policy", "a", "b"], Some(ErrorKind::UnknownArgument)),
            (&["get", "nodes"], Some(ErrorKind::InvalidSubcommand)),
        ] {
            assert_eq!(fleet_command(line).err(), expected, "{line:?}");
        }
    }
}
