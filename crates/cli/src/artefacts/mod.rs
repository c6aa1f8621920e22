//! `artefacts add|delete`: files that machines download. `get artefacts` lists them.

use clap::Subcommand;

use crate::artefacts::orders::{ADD_EXAMPLES, AddArtefact, DELETE_EXAMPLES, DeleteArtefact};

pub mod get;
pub mod orders;
pub mod upload;

/// Subcommands of `artefacts`: what operators do with files that machines fetch.
#[derive(Debug, Subcommand)]
pub enum ArtefactsCommand {
    /// Add a file that machines can fetch from any shepherd
    #[command(after_help = ADD_EXAMPLES)]
    Add(AddArtefact),
    /// Remove an artefact; machines that have fetched it keep it
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(DeleteArtefact),
}
