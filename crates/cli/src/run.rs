//! Entry point: parse arguments, run the command, return the exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::FromArgMatches as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;

use crate::client::backend::{BackendFlags, BackendKind, ContextSource, choose_backend};
use crate::client::contexts::{Contexts, contexts_path};
use crate::client::fleet_client::FleetClient;
use crate::cluster::command::ClusterCommand;
use crate::command::{Cli, Command, FleetCommand, global_flags_help, grammar};
use crate::completions::answer_completion;
use crate::completions::words::CompletionRequest;
use crate::context::{CommandContext, OrderFlags};
use crate::contexts::{ContextsArgs, change_contexts, list_contexts};
use crate::dispatch::run_fleet_command;
use crate::error::CliError;
use crate::exit_code::ExitRecord;
use crate::explain::explain_topic;
use crate::machine::logs::follow_log;
use crate::machine::watch::{WatchRequest, watch_machines};
use crate::manual::{ManualProgram, write_man_pages};
use crate::object::command::{GetArgs, GetCommand};
use crate::object::describe::print_page;
use crate::object::fetch::arrange_list;
use crate::object::get::print_objects;
use crate::object::kind::ObjectKind;
use crate::object::watch::watch_objects;
use crate::order::idempotency_key::{repeat_command, stdin_note};
use crate::order::operator::current_user;
use crate::order::outcome::AffectedObjects;
use crate::output::color::SeverityColors;
use crate::output::table::terminal_width;
use crate::output::terminal::format_help;
use crate::output::zone::{Zone, current_zone, set_current_zone};
use crate::output::{Format, Output, print_command, print_stderr, print_text, report_error};
use crate::selector_hint::{suggest_label_selector, suggest_selection};
use crate::suggestions::suggest_command;
use crate::target_flags::TargetFlags;
use crate::top::{is_interactive, run_interactive};
use crate::version::{VersionArgs, VersionReport};
use crate::wait::after_order::{OrderWait, follow_orders};
use crate::wait::command::run_wait_command;
use bmdb::connection::Bmdb;
use bmdb::connection::error::BmdbError;
use bmdb::connection::settings::ConnectionSettings;
use bmdb::connection::url::password_warning;
use model::arguments::spell_flags_with_dashes;
use model::text_layout::fit_text;
use model::usage_error::format_usage_error;

/// Which flags are on the command line: everybody on the host can read it, and it takes precedence over the
/// environment.
#[derive(Clone, Copy)]
struct ExplicitFlags {
    bmdb_url: bool,
    context: bool,
}

/// Runs the command of this process's arguments, or completes a line for a shell. A plain function, so that the program
/// compiles no generic code itself.
/// `others` are the programs that are built with this one, for the pages of the manual.
#[must_use]
pub fn run_program(others: fn() -> Vec<ManualProgram>) -> ExitCode {
    hardening::protect_process("shepherdctl");
    // One provider of cryptography in the process, for clients that use the default one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    if let Some(request) = CompletionRequest::of_process() {
        return answer_completion(&request);
    }
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => ExitCode::from(runtime.block_on(run(std::env::args_os(), others))),
        Err(error) => {
            print_stderr(&format!("shepherdctl: cannot start the runtime: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs the command of the arguments and returns the exit code. Errors and warnings go to standard error.
pub async fn run(arguments: impl IntoIterator<Item = OsString>, others: fn() -> Vec<ManualProgram>) -> u8 {
    let given = spell_flags_with_dashes(arguments);
    let parsed = grammar().try_get_matches_from(&given).and_then(|matches| {
        let flags = ExplicitFlags {
            bmdb_url: is_explicit_flag(&matches, "bmdb_url"),
            context: is_explicit_flag(&matches, "context"),
        };
        Ok((flags, OrderFlags::from_matches(&matches), Cli::from_arg_matches(&matches)?))
    });
    let target_flags = TargetFlags::from_arguments(&given, &grammar());
    let (flags, order_flags, cli) = match parsed {
        Ok(parsed) => parsed,
        Err(reported) => return print_usage(&reported, &given, &target_flags),
    };
    // Before anything is printed: the first use of the zone sets it, too.
    set_current_zone(if cli.utc { Zone::utc() } else { Zone::of_environment() });
    let url = cli.bmdb_url.as_deref().filter(|_| flags.bmdb_url);
    if let Some(warning) = url.and_then(|url| password_warning("bmdb-url", url)) {
        print_stderr(&warning);
    }
    let line = CommandLine { cli, flags, order_flags, target_flags, arguments: given };
    let answered = Box::pin(run_command(&line, others)).await;
    let printed = answered.and_then(|(text, exit)| {
        print_text(&lay_out(&line.cli, text)).map(|()| exit).map_err(CliError::from)
    });
    match printed {
        Ok(exit) => exit,
        Err(error) => {
            report_error(&error, &line.cli.output, &line.target_flags);
            // For programs, the key is in the details of the error.
            if let Some(key) = error.idempotency_key().filter(|_| line.cli.output != Output::Json) {
                let note = stdin_note(&line.arguments);
                if !note.is_empty() {
                    print_stderr(&format!("Run the line below{note}."));
                }
                print_command(&repeat_command(&line.arguments, key));
            }
            error.exit_code().number()
        }
    }
}

/// The text of a command as its user gets it: with times in the zone of the user, and on a terminal in lines that fit, and
/// coloured by severity. JSON, logs and files stay as they are.
fn lay_out(cli: &Cli, text: String) -> String {
    let (is_ours, has_severities) = match &cli.command {
        Command::Fleet(command) => (
            !prints_content(command),
            prints_objects(command)
                || matches!(
                    **command,
                    FleetCommand::Why(_) | FleetCommand::Timeline(_) | FleetCommand::Top(_)
                ),
        ),
        Command::Contexts(_) | Command::Explain(_) | Command::Version(_) => (true, false),
        Command::Completions(_) | Command::Manual(_) | Command::Options => (false, false),
    };
    if !is_ours || cli.output.format() != Format::Table {
        return text;
    }
    let text = fit_answer(&cli.command, &current_zone().localize(&text), terminal_width());
    if has_severities { SeverityColors::of_stdout(cli.color).apply(text) } else { text }
}

/// The text of a command in lines of at most `width` columns. A page of the documentation is in such lines already, except
/// its code, which is not wrapped: half a command does something else.
fn fit_answer(command: &Command, text: &str, width: Option<usize>) -> String {
    match command {
        Command::Explain(_) => text.to_owned(),
        _ => fit_text(text, width),
    }
}

/// A command line that was parsed.
struct CommandLine {
    cli: Cli,
    flags: ExplicitFlags,
    order_flags: OrderFlags,
    target_flags: TargetFlags,
    /// The arguments of the process, its own name first.
    arguments: Vec<OsString>,
}

/// Runs the command and returns its output and its exit code.
async fn run_command(
    line: &CommandLine,
    others: fn() -> Vec<ManualProgram>,
) -> Result<(String, u8), CliError> {
    let (cli, flags, exit_record) = (&line.cli, line.flags, ExitRecord::default());
    let command = match &cli.command {
        Command::Fleet(command) => command.as_ref(),
        Command::Contexts(args) => {
            report_context_override(cli, flags);
            return run_contexts_command(args, &cli.output, &exit_record, &line.target_flags);
        }
        Command::Explain(args) => {
            return explain_topic(args, &cli.output, terminal_width()).map(|text| (text, 0));
        }
        Command::Version(args) => return run_version_command(cli, flags, args).await,
        Command::Completions(of) => return Ok((of.shell.registration_script(), 0)),
        Command::Manual(into) => {
            return write_man_pages(&into.directory, &others()).map(|text| (text, 0));
        }
        Command::Options => return Ok((format_help(&global_flags_help()), 0)),
    };
    check_output(command, &cli.output)?;
    if let FleetCommand::Wait(args) = command {
        // A wrong condition is one with any server, and with none.
        args.parse_goal()?;
    }
    if let Some(answer) = run_local_command(cli, command, &exit_record, &line.target_flags) {
        report_context_override(cli, flags);
        return answer.map(|text| (text, exit_record.highest()));
    }
    let client = open_backend(cli, flags).await?;
    let context = CommandContext {
        client,
        output: cli.output.clone(),
        format: cli.output.format(),
        order_flags: line.order_flags.clone(),
        exit_record,
        order_targets: AffectedObjects::default(),
        target_flags: line.target_flags.clone(),
        colors: SeverityColors::of_stdout(cli.color),
        arguments: line.arguments.clone(),
    };
    let answer = run_with_context(cli, command, &context).await;
    context.client.close().await;
    answer.map(|text| (text, context.exit_record.highest()))
}

async fn run_with_context(
    cli: &Cli,
    command: &FleetCommand,
    context: &CommandContext,
) -> Result<String, CliError> {
    // A watch has printed its output already.
    if let FleetCommand::Watch(args) = command {
        return watch_machines(&context.client, &WatchRequest::of_watch(context, args))
            .await
            .map(|()| String::new());
    }
    if let FleetCommand::Get(get) = command
        && get.watch
    {
        return watch_list(context, get).await.map(|()| String::new());
    }
    if let FleetCommand::Wait(args) = command {
        return run_wait_command(context, args).await;
    }
    if let FleetCommand::Logs(args) = command
        && args.follow
    {
        return follow_log(context, args, &cli.output).await.map(|()| String::new());
    }
    if let FleetCommand::Top(args) = command
        && is_interactive(args, &cli.output)
    {
        return run_interactive(context, args).await.map(|()| String::new());
    }
    let answer = run_fleet_command(command, context).await?;
    let answer = if prints_messages(command) && context.format == Format::Table {
        context.target_flags.qualify(&answer)
    } else {
        answer
    };
    let answer = if prints_objects(command) { answer } else { cli.output.convert(answer)? };
    let Some(wait) = OrderWait::of_command(command) else { return Ok(answer) };
    print_text(&lay_out(cli, answer))?;
    match follow_orders(context, &wait).await {
        // An order on several machines may have failed worse. So this is no error that the process exits with.
        Err(error) if error.exit_code().number() < context.exit_record.highest() => {
            report_error(&error, &cli.output, &context.target_flags);
            Ok(String::new())
        }
        result => result.map(|()| String::new()),
    }
}

/// Runs `get KIND --watch`.
async fn watch_list(context: &CommandContext, get: &GetCommand) -> Result<(), CliError> {
    if get.kind != ObjectKind::Machine {
        return watch_objects(context, get).await;
    }
    watch_machines(&context.client, &WatchRequest::of_list(context, &get.args, &get.selection.machines)).await
}

/// Whether the text of the command has messages that name commands to run, such as what a machine waits for. The others show
/// what people and machines wrote, as it is.
fn prints_messages(command: &FleetCommand) -> bool {
    match command {
        FleetCommand::Get(get) => get.kind == ObjectKind::Issue,
        FleetCommand::Describe(describe) => {
            matches!(
                describe.kind,
                ObjectKind::Issue | ObjectKind::Cluster | ObjectKind::Machine | ObjectKind::Update
            )
        }
        FleetCommand::Logs(_) | FleetCommand::Watch(_) | FleetCommand::Debug(_) => false,
        _ => true,
    }
}

/// Whether the command prints the content of a log or of a file, which is not ours to lay out.
fn prints_content(command: &FleetCommand) -> bool {
    match command {
        FleetCommand::Logs(_) => true,
        FleetCommand::Cluster(cluster) => cluster.prints_file(),
        _ => false,
    }
}

/// Whether the command prints objects of a kind, in each output.
fn prints_objects(command: &FleetCommand) -> bool {
    matches!(
        command,
        FleetCommand::Get(_)
            | FleetCommand::Describe(_)
            | FleetCommand::Issues(_)
            | FleetCommand::Audit(_)
            | FleetCommand::Cluster(ClusterCommand::Get(_) | ClusterCommand::Describe(_))
    )
}

/// Rejects names as output of a command that prints none, before it does anything.
fn check_output(command: &FleetCommand, output: &Output) -> Result<(), CliError> {
    let has_names = prints_objects(command)
        || matches!(
            command,
            FleetCommand::Why(_) | FleetCommand::Timeline(_) | FleetCommand::Watch(_) | FleetCommand::Wait(_)
        );
    if *output == Output::Name && !has_names {
        return Err(CliError::Invalid(
            "-o name is for commands that print objects: get, describe, issues, why, timeline, watch and wait"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Reports on standard error what later commands use in place of the current context.
fn report_context_override(cli: &Cli, flags: ExplicitFlags) {
    let reason = match &cli.context {
        Some(name) if !flags.context => format!("SHEPHERD_CONTEXT={name}"),
        None if cli.bmdb_url.is_some() && !flags.bmdb_url => "SHEPHERD_BMDB_URL".to_owned(),
        _ => return,
    };
    print_stderr(&format!("shepherdctl: {reason} in the environment overrides the current context"));
}

/// Runs `contexts`: lists the contexts, or changes them.
fn run_contexts_command(
    args: &ContextsArgs,
    output: &Output,
    exit_record: &ExitRecord,
    target_flags: &TargetFlags,
) -> Result<(String, u8), CliError> {
    let text = match &args.command {
        None => print_objects(list_contexts()?, &GetArgs::default(), output, exit_record, target_flags)?,
        Some(command) => change_contexts(command, output)?,
    };
    Ok((text, exit_record.highest()))
}

/// Runs `version`: this program's version is printed, also if no server can be called.
async fn run_version_command(
    cli: &Cli,
    flags: ExplicitFlags,
    args: &VersionArgs,
) -> Result<(String, u8), CliError> {
    if cli.output == Output::Name {
        return Err(CliError::Invalid("versions have no names; use -o jsonpath=TEMPLATE".to_owned()));
    }
    let mut report = VersionReport::of_client();
    if !args.client {
        match open_backend(cli, flags).await {
            Ok(client) => {
                report.add_servers(&client).await;
                client.close().await;
            }
            Err(error) => {
                print_text(&report.render(&cli.output)?)?;
                return Err(error);
            }
        }
    }
    Ok((report.render(&cli.output)?, report.exit_code().number()))
}

/// Runs a command about contexts: it needs no server and no database. `None` for another command.
fn run_local_command(
    cli: &Cli,
    command: &FleetCommand,
    exit_record: &ExitRecord,
    target_flags: &TargetFlags,
) -> Option<Result<String, CliError>> {
    match command {
        FleetCommand::Get(get) if get.kind == ObjectKind::Context => {
            Some(list_contexts().and_then(|mut list| {
                arrange_list(&mut list, &get.args)?;
                print_objects(list, &get.args, &cli.output, exit_record, target_flags)
            }))
        }
        FleetCommand::Describe(describe) if describe.kind == ObjectKind::Context => {
            Some(list_contexts().and_then(|list| print_page(list, describe, &cli.output)))
        }
        _ => None,
    }
}

async fn open_backend(cli: &Cli, flags: ExplicitFlags) -> Result<FleetClient, CliError> {
    // With a BMDB and no named context, the contexts file is not needed. Without a home directory there is none.
    let needless = cli.direct || (cli.bmdb_url.is_some() && cli.context.is_none());
    let contexts = match contexts_path() {
        Ok(path) if !needless => Contexts::read(&path)?,
        Err(error) if cli.context.is_some() && !needless => return Err(error),
        _ => Contexts::default(),
    };
    let args = BackendFlags {
        direct: cli.direct,
        bmdb: cli.bmdb_url.is_some(),
        context: match (flags.context, &cli.context) {
            (true, _) => ContextSource::ByFlag,
            (false, Some(_)) => ContextSource::ByEnvironment,
            (false, None) => ContextSource::Unset,
        },
        has_current_context: contexts.current.is_some(),
    };
    let name = cli.context.as_deref().or(contexts.current.as_deref()).unwrap_or_default();
    match (choose_backend(args)?, contexts.find(cli.context.as_deref())) {
        (BackendKind::Api, Ok(Some(context))) => FleetClient::connect(name, context).await,
        (BackendKind::Api, Err(error)) => Err(error),
        _ => FleetClient::in_process(connect_bmdb(cli).await?, &current_user()).await,
    }
}

async fn connect_bmdb(cli: &Cli) -> Result<Bmdb, CliError> {
    let url = cli.bmdb_url.as_deref().ok_or_else(|| {
        CliError::Invalid(
            "no BMDB is named: give --bmdb-url postgres://USER@HOST:5432/DATABASE, or the same in the environment \
             as SHEPHERD_BMDB_URL"
                .to_owned(),
        )
    })?;
    let mut settings = ConnectionSettings::from_url(url, "shepherdctl")?;
    for warning in [settings.tls_warning(), settings.parameter_warning()].into_iter().flatten() {
        print_stderr(&format!("warning: {warning}"));
    }
    settings.dialect = cli.bmdb_dialect;
    settings.max_connections = 1;
    let bmdb = Bmdb::connect(settings).await?;
    match bmdb.require_schema().await {
        Ok(()) => Ok(bmdb),
        Err(BmdbError::OlderSchema { found: 0, .. }) => Err(CliError::Invalid(format!(
            "{} is not a BMDB: it has no schema of Shepherd; give the database that `shepherd` uses, or start \
             `shepherd` on this one first",
            bmdb.settings().address()
        ))),
        Err(error) => Err(error.into()),
    }
}

/// Whether a global flag is on the command line, and not from the environment. clap records it for the subcommand that
/// it follows, or for the root.
fn is_explicit_flag(matches: &clap::ArgMatches, flag: &str) -> bool {
    matches.value_source(flag) == Some(ValueSource::CommandLine)
        || matches.subcommand().is_some_and(|(_, matches)| is_explicit_flag(matches, flag))
}

/// The sentence for a command that operators look for and that this release does not have, or has by another name.
fn unavailable_command(error: &clap::Error, given: &[OsString]) -> Option<String> {
    let word =
        error.get(ContextKind::InvalidSubcommand).filter(|_| error.kind() == ErrorKind::InvalidSubcommand)?;
    let ContextValue::String(word) = word else { return None };
    if word == "install" {
        return Some(
            "installing an operating system is not available in this release; a provider or a person installs it, and \
             Shepherd then takes the machine over by SSH"
                .to_owned(),
        );
    }
    suggest_command(&grammar(), word, given)
}

/// Prints help, version or a usage error, and returns the exit code. Help and version are regular output, as is the
/// help for a missing command. Anything else is an error of the caller, in one sentence.
fn print_usage(error: &clap::Error, given: &[OsString], target_flags: &TargetFlags) -> u8 {
    let is_mistake =
        error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    // A corrected command has the flags of the given one, and help is the same for every fleet.
    let mistake = unavailable_command(error, given)
        .map(|sentence| CliError::Invalid(target_flags.qualify(&sentence)))
        .or_else(|| suggest_label_selector(error, given))
        .or_else(|| suggest_selection(error, given).map(CliError::Invalid))
        .or_else(|| is_mistake.then(|| CliError::Invalid(format_usage_error(error, &grammar(), given))));
    if let Some(mistake) = mistake {
        let output = Output::requested_by(given);
        report_error(&mistake, &output, &TargetFlags::default());
    } else {
        let help = format_help(&error.render().to_string());
        if error.use_stderr() {
            print_stderr(help.trim_end());
        } else {
            // Ignored: the reader has closed standard output.
            let _ = print_text(&help);
        }
    }
    u8::try_from(error.exit_code()).unwrap_or(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Command {
        let matches = grammar().try_get_matches_from(line.split(' ')).unwrap();
        Cli::from_arg_matches(&matches).unwrap().command
    }

    #[test]
    fn content_of_logs_and_files_is_not_laid_out() {
        for (line, expected) in [
            ("shepherdctl logs m", true),
            ("shepherdctl cluster snapshots ams", false),
            ("shepherdctl get machines", false),
        ] {
            let Command::Fleet(command) = parsed(line) else { panic!("{line}") };
            assert_eq!(prints_content(&command), expected, "{line}");
        }
    }

    #[test]
    fn code_of_a_page_is_not_wrapped() {
        let code = "    shepherdctl hold sim-1 --reason 'a disk'\n";
        assert_eq!(fit_answer(&parsed("shepherdctl explain hold"), code, Some(30)), code);
        let wrapped = fit_answer(&parsed("shepherdctl issues"), "one two three four\n", Some(10));
        assert_eq!(wrapped, "one two\nthree four\n");
    }

    #[test]
    fn texts_with_sentences_of_the_fleet_have_commands() {
        for (line, expected) in [
            ("why m", true),
            ("issues", true),
            ("get issues", true),
            ("describe issue i", true),
            ("describe cluster ams", true),
            ("describe machine m", true),
            ("describe update u", true),
            ("plan", true),
            ("timeline m", true),
            ("top", true),
            ("hold m --reason r", true),
            ("get machines", false),
            ("describe audit a", false),
            ("logs m", false),
        ] {
            let matches = grammar().try_get_matches_from(["shepherdctl"].into_iter().chain(line.split(' ')));
            let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap();
            let Command::Fleet(command) = cli.command else { panic!("{line} is about no fleet") };
            assert_eq!(prints_messages(&command), expected, "{line}");
        }
    }

    #[test]
    fn empty_value_of_a_flag_selects_nothing() {
        for line in [
            "get machines --location=",
            "watch --provider=",
            "wait machines --for healthy --product=",
            "hold --reason r --manufacturer=",
            "retire --reason r --fact= --yes-count 3",
            "audit --machine=",
            "audit --actor=",
            "get audit --rpc=",
            "plan --machine=",
        ] {
            let arguments: Vec<OsString> =
                ["shepherdctl"].into_iter().chain(line.split(' ')).map(OsString::from).collect();
            let error = grammar().try_get_matches_from(&arguments).unwrap_err();
            let sentence = format_usage_error(&error, &grammar(), &arguments);
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(sentence.contains("> needs a value; see `shepherdctl "), "{line}: {sentence}");
        }
    }

    /// Adds a command line for each flag of several words of a command and of those below it, up to that flag.
    fn add_flag_lines(command: &clap::Command, path: &str, lines: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        for flag in command.get_arguments() {
            let value = if flag.get_action().takes_values() { "=1" } else { "" };
            let long = flag.get_long().filter(|long| long.contains(['-', '_']));
            lines.extend(long.map(|long| format!("{} --{long}{value}", path.trim_start())));
        }
        for below in command.get_subcommands() {
            add_flag_lines(below, &path, lines);
        }
    }

    #[test]
    fn every_flag_is_accepted_with_dashes_and_with_underscores() {
        let mut lines = Vec::new();
        add_flag_lines(&grammar(), "", &mut lines);
        assert!(lines.len() > 100, "{lines:?}");
        for line in lines {
            let (command, flag) = line.split_once(" --").unwrap();
            assert!(!flag.contains('_'), "{line}: declare it with dashes");
            let parse = |flag: &str| {
                let words = format!("{command} --{flag}");
                let given = spell_flags_with_dashes(words.split(' ').map(OsString::from));
                let error = grammar().try_get_matches_from(&given).err()?;
                // What is missing besides is another error.
                assert_ne!(error.kind(), ErrorKind::UnknownArgument, "{words}: {error}");
                Some(error.to_string())
            };
            assert_eq!(parse(&flag.replace('-', "_")), parse(flag), "{line}");
        }
    }

    #[test]
    fn command_that_is_repeated_has_dashes_however_it_was_typed() {
        let typed = "shepherdctl --bmdb_url=postgres://a_b/c budget set reboot --max_count 5 --reason a_b";
        let given = spell_flags_with_dashes(typed.split(' ').map(OsString::from));
        let expected = "shepherdctl '--bmdb-url=postgres://a_b/c' budget set reboot --max-count 5 --reason a_b \
                        --idempotency-key k";
        assert_eq!(repeat_command(&given, "k"), expected);
        let flags = TargetFlags::from_arguments(&given, &grammar());
        assert_eq!(flags.qualify("shepherdctl issues"), "shepherdctl --bmdb-url postgres://a_b/c issues");
    }

    #[test]
    fn mistyped_flag_is_answered_with_dashes() {
        for typed in ["--dry-rn", "--dry_rn", "--dryrun", "--dry_runs"] {
            let words = ["shepherdctl", "hold", "m", "--reason", "r", typed];
            let given = spell_flags_with_dashes(words.map(OsString::from));
            let error = grammar().try_get_matches_from(&given).unwrap_err();
            let sentence = format_usage_error(&error, &grammar(), &given);
            assert!(sentence.contains("; did you mean --dry-run? "), "{typed}: {sentence}");
        }
    }

    #[test]
    fn install_is_answered_with_one_sentence() {
        let sentence = |words: &[&str]| {
            let error = grammar().try_get_matches_from(words).unwrap_err();
            let given: Vec<OsString> = words.iter().map(OsString::from).collect();
            unavailable_command(&error, &given)
        };
        for words in
            [vec!["shepherdctl", "install"], vec!["shepherdctl", "install", "rack1-01", "--reason", "new"]]
        {
            let found = sentence(&words).unwrap();
            assert!(found.contains("not available in this release"), "{words:?}: {found}");
        }
        for words in [["shepherdctl", "instal"], ["shepherdctl", "cluster"]] {
            assert_eq!(sentence(&words), None, "{words:?}");
        }
    }
}
