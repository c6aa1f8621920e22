//! `debug`: collect what helps to find a fault.

use std::path::PathBuf;

use clap::{Args, Subcommand};

pub mod bundle;
pub mod mask;

const DEBUG_BUNDLE_EXAMPLES: &str = "\
Examples:
  shepherdctl debug bundle
  shepherdctl debug bundle --direct --machine sim-0007 --output-file /tmp/for-help.tar.gz

The archive has the output of the commands that read, as JSON: issues, machines, providers, sessions, work,
loops, plan, policy; and why, facts and history of each machine that has an issue or is named. Passwords,
tokens and keys in known forms are masked; read it before you send it.";

/// Subcommands of `debug`, for the search for a fault.
#[derive(Debug, Subcommand)]
pub enum DebugCommand {
    /// Write one archive of the fleet's state, to find a fault; known forms of secrets are masked
    #[command(after_help = DEBUG_BUNDLE_EXAMPLES)]
    Bundle(DebugBundleArgs),
}

/// Arguments of `debug bundle`: the file, and the machines that are added.
#[derive(Debug, Args)]
pub struct DebugBundleArgs {
    /// File to write; it must not exist yet [default: shepherd-debug-TIME.tar.gz in this directory]
    #[arg(long = "output-file", value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Machine to describe fully, in addition to those with an issue; may be given several times
    #[arg(long, value_name = "M")]
    pub machine: Vec<String>,
}
