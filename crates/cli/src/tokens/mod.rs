//! `tokens bootstrap|create|revoke`: API credentials. `get tokens` lists them.
//!
//! `bootstrap` writes the first one into the BMDB, because nobody can call an API without one. An operator with write
//! access to the BMDB is trusted. The others are created through the API. A token is printed once, alone on standard
//! output, or is written into a file that only its owner can read. It is in no log, no error and no JSON output except
//! that of its creation.

use clap::Subcommand;

use crate::tokens::bootstrap::{BOOTSTRAP_EXAMPLES, BootstrapArgs};
use crate::tokens::create::{CREATE_EXAMPLES, CreateToken};
use crate::tokens::revoke::{REVOKE_EXAMPLES, RevokeToken};

pub mod bootstrap;
pub mod create;
pub mod delivery;
pub mod get;
pub mod revoke;

/// Subcommands of `tokens`, about credentials.
#[derive(Debug, Subcommand)]
pub enum TokensCommand {
    /// Create the first token, for an admin, in the database
    #[command(after_help = BOOTSTRAP_EXAMPLES)]
    Bootstrap(BootstrapArgs),
    /// Create a token, or pin a client certificate
    #[command(after_help = CREATE_EXAMPLES)]
    Create(CreateToken),
    /// Revoke a credential at once
    #[command(after_help = REVOKE_EXAMPLES)]
    Revoke(RevokeToken),
}
