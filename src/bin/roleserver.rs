//! The program on the machine: parses flags and calls the library.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use shepherd::model::usage::usage_sentence;
use shepherd::roleserver::child::launch;
use shepherd::roleserver::commands::{CommandError, enroll, metrics, plan, run, status, supervise};
use shepherd::roleserver::hardware::{self, Sources};
use shepherd::roleserver::logs::own::OwnLog;
use shepherd::roleserver::state_directory::StateDirectory;
use shepherd::roleserver::supervision::Wish;
use shepherd::roleserver::update::watch;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::MakeWriterExt as _;

/// Keeps this machine in touch with its shepherd.
///
/// A shepherd takes a machine over by SSH: it uploads this program and calls
/// `roleserver enroll`, which installs `roleserver run` as a systemd unit, or as a
/// detached process where systemd does not run. From then on the machine calls its
/// shepherd with a heartbeat and a report of its hardware; nothing connects to it.
///
/// `roleserver status` says whose this machine is and whether it is heard.
#[derive(Parser)]
#[command(name = "roleserver", version, max_term_width = 100)]
struct Flags {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Belong to a shepherd: read an `EnrollRequest` from standard input, answer on standard output.
    Enroll {
        #[command(flatten)]
        place: Place,
        /// What keeps the agent alive.
        #[arg(long, value_enum, default_value = "auto", env = "ROLESERVER_SUPERVISION")]
        supervision: Supervision,
    },
    /// Be the agent: heartbeat until SIGTERM.
    Run {
        #[command(flatten)]
        place: Place,
    },
    /// Keep `roleserver run` alive where no init system does.
    Supervise {
        #[command(flatten)]
        place: Place,
    },
    /// Become another program: a role server starts what it runs by this, and nobody else.
    #[command(hide = true)]
    Launch,
    /// End a release that no shepherd hears: a role server that updates itself starts this, and nobody else.
    #[command(hide = true)]
    WatchUpdate {
        #[command(flatten)]
        place: Place,
        /// Start it as a process of nobody's, and end.
        #[arg(long)]
        detach: bool,
    },
    /// Print what this machine is made of, as the next report would say it.
    Hardware,
    /// Print whose this machine is and what became of the last heartbeat.
    Status {
        #[command(flatten)]
        place: Place,
    },
    /// Print what the role server that runs here counts, for Prometheus.
    Metrics {
        #[command(flatten)]
        place: Place,
    },
    /// Print what would be changed in Kubernetes, where this machine runs its control plane; nothing is.
    Plan {
        #[command(flatten)]
        place: Place,
    },
}

#[derive(Args)]
struct Place {
    /// Where the machine keeps its key and its enrolment; one directory is one identity.
    /// [default: /var/lib/roleserver for root, ~/.local/state/roleserver for others]
    #[arg(long = "state_dir", alias = "state-dir", value_name = "DIR", env = "ROLESERVER_STATE_DIR")]
    state_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Supervision {
    /// A systemd unit where systemd runs, a detached process elsewhere.
    Auto,
    /// A systemd unit or nothing.
    Systemd,
    /// A detached process that starts the agent again, until the next reboot.
    Detached,
    /// Nothing: somebody else runs `roleserver run`.
    External,
}

impl From<Supervision> for Wish {
    fn from(supervision: Supervision) -> Self {
        match supervision {
            Supervision::Auto => Self::Auto,
            Supervision::Systemd => Self::Systemd,
            Supervision::Detached => Self::Detached,
            Supervision::External => Self::External,
        }
    }
}

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error)
            if error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let given: Vec<_> = std::env::args_os().collect();
            let sentence = usage_sentence(&error, &Flags::command(), &given);
            let _ = writeln!(std::io::stderr(), "roleserver: {sentence}");
            return ExitCode::from(2);
        }
        Err(error) => {
            // Help and version come this way too, and belong on standard output.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let filter = EnvFilter::try_from_env("ROLESERVER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr.and(own_log(&flags.verb)))
        .with_ansi(false)
        // A line that could not be written is reported by `eprintln!`, which panics when standard error is
        // what cannot be written to: a full disk under the log would end the agent and its supervisor.
        .log_internal_errors(false)
        .init();
    // Already there is as good: there is only one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match execute(flags.verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where standard error is gone too, the exit code is all there is to say.
            let _ = writeln!(std::io::stderr(), "roleserver: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn execute(verb: Verb) -> Result<(), CommandError> {
    let home = std::env::home_dir();
    let home = home.as_deref();
    match verb {
        Verb::Enroll { place, supervision } => {
            enroll::execute(&state_directory(&place, home)?, home, supervision.into())
        }
        Verb::Run { place } => run::execute(&state_directory(&place, home)?),
        Verb::Supervise { place } => supervise::execute(&state_directory(&place, home)?),
        Verb::WatchUpdate { place, detach } => {
            watch::execute(&state_directory(&place, home)?, detach).map_err(CommandError::failed)
        }
        Verb::Launch => Err(CommandError::Failed(launch::execute())),
        Verb::Hardware => print(&format!("{:#?}\n", hardware::read(&Sources::host()))),
        Verb::Status { place } => {
            let text = status::text(&state_directory(&place, home)?)?;
            print(&text)
        }
        Verb::Metrics { place } => {
            let text = metrics::text(&state_directory(&place, home)?)?;
            print(&text)
        }
        Verb::Plan { place } => {
            let text = plan::text(&state_directory(&place, home)?)?;
            print(&text)
        }
    }
}

/// Where the agent's lines go beside standard error. The other verbs are done when whoever called them has read theirs.
fn own_log(verb: &Verb) -> OwnLog {
    let Verb::Run { place } = verb else { return OwnLog::default() };
    let directory = state_directory(place, std::env::home_dir().as_deref());
    directory.map_or_else(|_| OwnLog::default(), |path| OwnLog::at(&StateDirectory::at(path).log_path()))
}

fn print(text: &str) -> Result<(), CommandError> {
    std::io::stdout().write_all(text.as_bytes()).map_err(CommandError::failed)
}

fn state_directory(place: &Place, home: Option<&Path>) -> Result<PathBuf, CommandError> {
    let root = rustix::process::geteuid().is_root();
    place
        .state_dir
        .clone()
        .map_or_else(|| StateDirectory::default_path(root, home), Ok)
        .map_err(|error| CommandError::Usage(error.to_string()))
}
