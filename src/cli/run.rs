//! From arguments to an exit code.

use std::ffi::OsString;

use clap::FromArgMatches as _;
use clap::error::ErrorKind;
use clap::parser::ValueSource;

use crate::bmdb::connection::{Bmdb, ConnectionSettings};
use crate::bmdb::error::BmdbError;
use crate::bmdb::url::password_warning;
use crate::cli::budgets::BudgetCommand;
use crate::cli::bundle::Debug;
use crate::cli::command::{Allow, Cli, Command, Declare, Describe, FleetCommand, Get, Tokens};
use crate::cli::contexts::Contexts;
use crate::cli::error::CliError;
use crate::cli::loops::Loops;
use crate::cli::order_key::{self, grammar};
use crate::cli::output::{Format, Output, say};
use crate::cli::policy::PolicyCommand;
use crate::cli::remote::Remote;
use crate::cli::source::{Asked, Named, Source, Whom, whom};
use crate::cli::{
    approvals, artefacts, budgets, bundle, cluster, contexts, describe, dry_run, get, issues, logs, loops,
    many, operate, output, plan, policy, power, priority, restored, retire, shell, timeline, tokens, top,
    update, watch, why, yaml,
};
use crate::model::arguments::accept_dashes;
use crate::model::usage::usage_sentence;

/// What was typed: everybody on the host can read it, and it counts before what the environment says.
#[derive(Clone, Copy)]
struct Flags {
    bmdb_url: bool,
    context: bool,
}

/// Does what the arguments say and returns the exit code. Errors and warnings go to standard error.
pub async fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let given = accept_dashes(arguments);
    let parsed = grammar().try_get_matches_from(&given).and_then(|matches| {
        let flags = Flags {
            bmdb_url: given_as_flag(&matches, "bmdb_url"),
            context: given_as_flag(&matches, "context"),
        };
        let typed = (order_key::typed(&matches), dry_run::typed(&matches));
        Ok((flags, typed, Cli::from_arg_matches(&matches)?))
    });
    let (flags, (key, dry), cli) = match parsed {
        Ok(parsed) => parsed,
        Err(said) => return say_usage(&said, &given),
    };
    if let Some(warning) = cli.bmdb_url.as_deref().filter(|_| flags.bmdb_url).and_then(password_warning) {
        say(warning);
    }
    let command = format!("{:?}", cli.command);
    let answered = Box::pin(order_key::scope(key, &command, dry_run::scope(dry, answer(&cli, flags)))).await;
    match answered.and_then(|text| Ok(output::print(&text)?)) {
        Ok(()) => 0,
        Err(error) => {
            say(&format!("shepherdctl: {error}"));
            if let Some(key) = error.key_to_repeat_with() {
                say(&format!("  {}", order_key::repeated(&given, key)));
            }
            error.exit_code()
        }
    }
}

/// What the command answers, as text.
async fn answer(cli: &Cli, flags: Flags) -> Result<String, CliError> {
    let command = match &cli.command {
        Command::Fleet(command) => command.as_ref(),
        Command::Completions(of) => return Ok(shell::completions(of.shell)),
        Command::Manual(into) => return shell::manual(&into.directory),
    };
    let source = source(cli, flags).await?;
    if let FleetCommand::Watch(filters) = command {
        // It has printed all that there is to say.
        return watch::watch(&source, filters, cli.output).await.map(|()| String::new());
    }
    if let FleetCommand::Logs(asked) = command
        && asked.follow
    {
        let followed = logs::follow(&source, asked, cli.output).await;
        source.close().await;
        return followed.map(|()| String::new());
    }
    if let FleetCommand::Top(asked) = command
        && top::is_drawn(asked, cli.output)
    {
        let shown = top::show(&source, asked).await;
        source.close().await;
        return shown.map(|()| String::new());
    }
    let answer = ask(command, cli.output.format(), &source).await;
    source.close().await;
    match cli.output {
        Output::Yaml => Ok(yaml::document(&serde_json::from_str(&answer?)?)),
        Output::Table | Output::Json => answer,
    }
}

/// What one command answers.
pub(crate) async fn ask(command: &FleetCommand, format: Format, source: &Source) -> Result<String, CliError> {
    match command {
        FleetCommand::Get(Get::Machines(filters)) => get::machines(source, filters, format).await,
        FleetCommand::Get(Get::Sessions(limited)) => get::sessions(source, limited.limit, format).await,
        FleetCommand::Get(Get::Work(limited)) => get::work(source, limited.limit, format).await,
        FleetCommand::Get(Get::Providers) => get::providers(source, format).await,
        FleetCommand::Describe(Describe::Machine(of)) => describe::machine(source, &of.machine, format).await,
        FleetCommand::Get(Get::Loops) => loops::list(source, format).await,
        FleetCommand::Get(Get::Approvals) => approvals::list(source, format).await,
        FleetCommand::Approve(asked) => approvals::approve(source, asked, format).await,
        FleetCommand::Get(Get::Budgets) => budgets::budgets(source, format).await,
        FleetCommand::Get(Get::Brakes) => budgets::brakes(source, format).await,
        FleetCommand::Budget(BudgetCommand::Set(asked)) => budgets::set(source, asked, format).await,
        FleetCommand::Cluster(command) => cluster::cluster_command(source, command, format).await,
        FleetCommand::Artefacts(command) => artefacts::artefacts_command(source, command, format).await,
        FleetCommand::Update(asked) => update::update_command(source, asked, format).await,
        FleetCommand::Loops(Loops::Pause(asked)) => loops::pause(source, asked, format).await,
        FleetCommand::Loops(Loops::Resume(asked)) => loops::resume(source, asked, format).await,
        FleetCommand::Why(of) => why::why(source, &of.machine, format).await,
        FleetCommand::Timeline(of) => timeline::timeline(source, &of.machine, of.limit, format).await,
        FleetCommand::Logs(asked) => logs::logs(source, asked, format).await,
        FleetCommand::Issues => issues::issues(source, format).await,
        FleetCommand::Plan(asked) => plan::plan(source, asked, format).await,
        FleetCommand::Policy(PolicyCommand::Get) => policy::get(source, format).await,
        FleetCommand::Watch(_) => Ok(String::new()),
        FleetCommand::Top(_) => top::once(source, format).await,
        FleetCommand::Hold(hold) => operate::hold(source, hold, format).await,
        FleetCommand::Release(release) => operate::release(source, release, format).await,
        FleetCommand::Retry(retry) => operate::retry(source, retry, format).await,
        FleetCommand::Quarantine(asked) => many::quarantine(source, asked, format).await,
        FleetCommand::Label(asked) => many::label(source, asked, format).await,
        FleetCommand::Unlabel(asked) => many::unlabel(source, asked, format).await,
        FleetCommand::Reboot(reboot) => power::reboot(source, reboot, format).await,
        FleetCommand::Power(power) => power::power(source, power, format).await,
        FleetCommand::Prioritize(asked) => priority::prioritize(source, asked, format).await,
        FleetCommand::Retire(retire) => retire::retire(source, retire, format).await,
        FleetCommand::Declare(Declare::Restored(declared)) => {
            restored::restored(source.direct("`declare restored`")?, declared, format).await
        }
        FleetCommand::Allow(Allow::HostKey(allow)) => operate::allow_host_key(source, allow, format).await,
        FleetCommand::Debug(Debug::Bundle(asked)) => bundle::bundle(source, asked, format).await,
        FleetCommand::Tokens(Tokens::Bootstrap(first)) => {
            tokens::bootstrap(source.direct("`tokens bootstrap`")?, first, format).await
        }
        FleetCommand::Tokens(Tokens::Create(new)) => tokens::create(source, new, format).await,
        FleetCommand::Tokens(Tokens::Get) => tokens::get(source, format).await,
        FleetCommand::Tokens(Tokens::Revoke(which)) => tokens::revoke(source, which, format).await,
    }
}

async fn source(cli: &Cli, flags: Flags) -> Result<Source, CliError> {
    // Whoever names a BMDB and no context needs none, and without a home there are none.
    let needless = cli.direct || (cli.bmdb_url.is_some() && cli.context.is_none());
    let contexts = match contexts::path() {
        Ok(path) if !needless => Contexts::read(&path)?,
        Err(error) if cli.context.is_some() && !needless => return Err(error),
        _ => Contexts::default(),
    };
    let asked = Asked {
        direct: cli.direct,
        bmdb: cli.bmdb_url.is_some(),
        context: match (flags.context, &cli.context) {
            (true, _) => Named::ByFlag,
            (false, Some(_)) => Named::ByEnvironment,
            (false, None) => Named::Not,
        },
        current: contexts.current.is_some(),
    };
    match (whom(asked)?, contexts.find(cli.context.as_deref())) {
        (Whom::Api, Ok(Some(context))) => Ok(Source::Api(Remote::connect(context).await?)),
        (Whom::Api, Err(error)) => Err(error),
        _ => Ok(Source::Direct(connect(cli).await?)),
    }
}

async fn connect(cli: &Cli) -> Result<Bmdb, CliError> {
    let url = cli.bmdb_url.as_deref().ok_or_else(|| {
        CliError::Wrong(
            "no BMDB was named: give --bmdb_url postgres://USER@HOST:5432/DATABASE, or the same in the environment \
             as SHEPHERD_BMDB_URL"
                .to_owned(),
        )
    })?;
    let mut settings = ConnectionSettings::from_url(url, "shepherdctl")?;
    settings.dialect = cli.bmdb_dialect;
    settings.max_connections = 1;
    let bmdb = Bmdb::connect(settings).await?;
    match bmdb.require_schema().await {
        Ok(()) => Ok(bmdb),
        Err(BmdbError::OlderSchema { found: 0, .. }) => Err(CliError::Wrong(format!(
            "{} is no BMDB: it has no schema of ours; give the database that `shepherd` uses, or start `shepherd` on \
             this one first",
            bmdb.settings().place()
        ))),
        Err(error) => Err(error.into()),
    }
}

/// Whether a global flag was typed, and not read from the environment. It is known to the subcommand it was
/// given after, or to the whole.
fn given_as_flag(matches: &clap::ArgMatches, flag: &str) -> bool {
    matches.value_source(flag) == Some(ValueSource::CommandLine)
        || matches.subcommand().is_some_and(|(_, matches)| given_as_flag(matches, flag))
}

/// Help and the version are answers, and so is the help that is given to whoever typed no command; the
/// rest is the caller's mistake, and one sentence.
fn say_usage(said: &clap::Error, given: &[OsString]) -> u8 {
    if said.use_stderr() && said.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        say(&format!("shepherdctl: {}", usage_sentence(said, &grammar(), given)));
    } else {
        // Nothing is left to tell a reader who has gone away.
        let _ = said.print();
    }
    u8::try_from(said.exit_code()).unwrap_or(2)
}
