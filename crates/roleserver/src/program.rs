//! The program `roleserver`: parses flags and calls a subcommand.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use model::usage_error::format_usage_error;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use transport::gate::open_files::{check_files, raise_limit};

use crate::child::launch;
use crate::commands::{CommandError, enroll, follow_authority, pages, run, status, supervise};
use crate::hardware::{self, Sources};
use crate::init_system::SupervisionMode;
use crate::logs::log_queue::LogQueue;
use crate::logs::own_log::OwnLog;
use crate::state_directory::StateDirectory;
use crate::update::watchdog;

/// How long the end of the agent waits for its last log lines. On a disk that is slower, they are lost.
const LOG_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps this machine in touch with its shepherd.
///
/// A shepherd takes a machine over by SSH: it uploads this program and calls
/// `roleserver enroll`, which installs `roleserver run` as a systemd unit, or as a
/// detached process where systemd does not run. From then on the machine calls its
/// shepherd with a heartbeat and a report of its hardware; nothing connects to it.
///
/// `roleserver status` shows the shepherd of this machine and the result of the last heartbeat.
#[derive(Parser)]
#[command(name = "roleserver", version, max_term_width = 100, after_help = EXAMPLES)]
struct RoleserverFlags {
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  roleserver status      which shepherd this machine has, and how its last heartbeat ended
  roleserver hardware    what the next report says of this machine";

const HARDWARE_EXAMPLES: &str = "\
Examples:
  roleserver hardware
  roleserver hardware -o json | jq -r '.blockDevices[] | .name + \" \" + .capacityBytes'";

#[derive(Subcommand)]
enum Verb {
    /// Enrol with a shepherd: read an `EnrollRequest` from standard input, and answer on standard output.
    #[command(after_help = "Exit status: 0 enrolled, 1 failed, 2 the request is malformed, 4 refused.")]
    Enroll {
        #[command(flatten)]
        directory: StateDirFlag,
        /// How the agent is kept alive.
        #[arg(long, value_enum, ignore_case = true, default_value = "auto", env = "ROLESERVER_SUPERVISION")]
        supervision: SupervisionFlag,
    },
    /// Run the agent: send heartbeats until SIGTERM.
    Run {
        #[command(flatten)]
        directory: StateDirFlag,
    },
    /// Keep `roleserver run` running on a machine without an init system.
    Supervise {
        #[command(flatten)]
        directory: StateDirFlag,
    },
    /// Replace this process by another program. Only the role server calls this, for what it runs.
    #[command(hide = true)]
    Launch,
    /// Kill a new release that gets no heartbeat answered. Only a role server that updates itself calls this.
    #[command(hide = true)]
    WatchUpdate {
        #[command(flatten)]
        directory: StateDirFlag,
        /// Start the watchdog as a detached process, and end.
        #[arg(long)]
        detach: bool,
    },
    /// Print the certificate of the authority that this machine trusts as a node of its cluster.
    Authority {
        #[command(flatten)]
        directory: StateDirFlag,
    },
    /// Trust another authority of the cluster alone, after a theft of the former one's key, on a machine without a shepherd.
    FollowAuthority {
        #[command(flatten)]
        directory: StateDirFlag,
        /// What `roleserver authority` prints on a machine of the cluster that has followed
        #[arg(value_name = "CERTIFICATE")]
        certificate: String,
        /// Address of a curator of the cluster, if it has changed; may be repeated
        #[arg(long = "curator", value_name = "HOST:PORT")]
        curators: Vec<String>,
    },
    /// Print the hardware of this machine as it will be in the next report.
    #[command(after_help = HARDWARE_EXAMPLES)]
    Hardware {
        /// Output: table for people, or json (the report in the JSON form of its contract) for programs.
        #[arg(short, long, value_name = "FORMAT", value_enum, ignore_case = true, default_value = "table")]
        output: HardwareOutput,
    },
    /// Print the shepherd of this machine and the result of the last heartbeat.
    #[command(after_help = "Exit status: 0 enrolled, 1 the enrolment cannot be read, 3 not enrolled.")]
    Status {
        #[command(flatten)]
        directory: StateDirFlag,
    },
    /// Print the metrics of the running role server, for Prometheus.
    Metrics {
        #[command(flatten)]
        directory: StateDirFlag,
    },
    /// On a Kubernetes controller, print what the next pass would change in Kubernetes; change nothing.
    Plan {
        #[command(flatten)]
        directory: StateDirFlag,
    },
}

#[derive(Args)]
struct StateDirFlag {
    /// Directory of the key and the enrolment of this machine; one directory is one identity.
    /// [default: /var/lib/roleserver for root, ~/.local/state/roleserver for others]
    #[arg(long = "state_dir", alias = "state-dir", value_name = "DIR", env = "ROLESERVER_STATE_DIR")]
    state_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum HardwareOutput {
    /// A line per item, with sizes in GiB and TB.
    Table,
    /// One JSON document, for programs.
    Json,
}

#[derive(Clone, Copy, ValueEnum)]
enum SupervisionFlag {
    /// A systemd unit where systemd runs, a detached process elsewhere.
    Auto,
    /// A systemd unit or nothing.
    Systemd,
    /// A detached process that starts the agent again, until the next reboot.
    Detached,
    /// Nothing: another program runs `roleserver run`.
    External,
}

impl From<SupervisionFlag> for SupervisionMode {
    fn from(supervision: SupervisionFlag) -> Self {
        match supervision {
            SupervisionFlag::Auto => Self::Auto,
            SupervisionFlag::Systemd => Self::Systemd,
            SupervisionFlag::Detached => Self::Detached,
            SupervisionFlag::External => Self::External,
        }
    }
}

/// The command line of the program.
#[must_use]
pub fn build_command() -> clap::Command {
    RoleserverFlags::command()
}

/// Runs the program with the arguments of this process, and returns its exit code.
#[must_use]
pub fn run_program() -> ExitCode {
    hardening::protect_process("roleserver");
    // A release that was started through its open file has the number of that file as its name.
    let _ = rustix::thread::set_name(c"roleserver");
    let flags = match RoleserverFlags::try_parse() {
        Ok(flags) => flags,
        Err(error)
            if error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let given: Vec<_> = std::env::args_os().collect();
            let sentence = format_usage_error(&error, &build_command(), &given);
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
    let log = agent_log(&flags.verb);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(log.clone().map_or_else(|| BoxMakeWriter::new(std::io::stderr), BoxMakeWriter::new))
        .with_ansi(false)
        // A line that could not be written is reported by `eprintln!`, which panics if standard error cannot be written
        // to: a full disk under the log would end the agent and its supervisor.
        .log_internal_errors(false)
        .init();
    // An error means that a provider is installed already, which is just as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let ended = execute_verb(flags.verb, log.as_ref());
    if let Some(log) = &log {
        log.finish(LOG_TIMEOUT);
    }
    match ended {
        Ok(exit_code) => ExitCode::from(exit_code),
        Err(error) => {
            // Standard error may be closed too. Then the exit code is the only report.
            let _ = writeln!(std::io::stderr(), "roleserver: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Runs a verb, and returns the exit code of one that has done its work.
fn execute_verb(verb: Verb, log: Option<&LogQueue>) -> Result<u8, CommandError> {
    let home = std::env::home_dir();
    let home = home.as_deref();
    let done = match verb {
        Verb::Enroll { directory: place, supervision } => {
            return enroll::execute(&state_directory_path(&place, home)?, home, supervision.into());
        }
        Verb::Run { directory: place } => {
            // A machine that stops calling must be visited, so the role server runs with any number of files.
            if let Err(error) = check_files(raise_limit()) {
                tracing::warn!("{error}; until then it serves few connections");
            }
            run::execute(&state_directory_path(&place, home)?, log)
        }
        Verb::Supervise { directory: place } => supervise::execute(&state_directory_path(&place, home)?),
        Verb::WatchUpdate { directory: place, detach } => {
            // It kills the process that a file there names.
            let state = StateDirectory::open_existing(&state_directory_path(&place, home)?)
                .map_err(CommandError::from_error)?;
            watchdog::execute(state.path(), detach).map_err(CommandError::from_error)
        }
        Verb::Launch => Err(CommandError::Failed(launch::execute())),
        Verb::Authority { directory: place } => {
            print_text(&follow_authority::render_authority(&state_directory_path(&place, home)?)?)
        }
        Verb::FollowAuthority { directory: place, certificate, curators } => {
            let path = state_directory_path(&place, home)?;
            print_text(&follow_authority::follow_authority(&path, &certificate, &curators)?)
        }
        Verb::Hardware { output } => {
            let report = hardware::read_hardware(&Sources::host());
            print_text(&match output {
                HardwareOutput::Table => crate::commands::hardware::render_table(&report),
                HardwareOutput::Json => crate::commands::hardware::render_json(&report),
            })
        }
        Verb::Status { directory: place } => {
            let (text, exit_code) = status::render_text(&state_directory_path(&place, home)?)?;
            return print_text(&text).map(|()| exit_code);
        }
        Verb::Metrics { directory: place } => {
            let text = pages::render_metrics(&state_directory_path(&place, home)?)?;
            print_text(&text)
        }
        Verb::Plan { directory: place } => {
            let text = pages::render_plan(&state_directory_path(&place, home)?)?;
            print_text(&text)
        }
    };
    done.map(|()| 0)
}

/// Writes the log of the agent to standard error and to its file, and never lets the agent wait for a line. The other
/// verbs write to standard error only, at once: their caller reads it.
fn agent_log(verb: &Verb) -> Option<LogQueue> {
    let Verb::Run { directory: place } = verb else { return None };
    let directory = state_directory_path(place, std::env::home_dir().as_deref());
    let file = directory.map_or_else(
        |_| OwnLog::default(),
        |path| OwnLog::open_path(&StateDirectory::from_path(path).log_path()),
    );
    Some(LogQueue::new(move |line| {
        // Each of the two may be closed or full, and then the line is in the other one.
        let _ = std::io::stderr().write_all(line);
        let _ = file.clone().write_all(line);
    }))
}

fn print_text(text: &str) -> Result<(), CommandError> {
    std::io::stdout().write_all(text.as_bytes()).map_err(CommandError::from_error)
}

fn state_directory_path(place: &StateDirFlag, home: Option<&Path>) -> Result<PathBuf, CommandError> {
    let root = rustix::process::geteuid().is_root();
    place
        .state_dir
        .clone()
        .map_or_else(|| StateDirectory::default_path(root, home), Ok)
        .map_err(|error| CommandError::Usage(error.to_string()))
}
