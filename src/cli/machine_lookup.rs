//! Find a machine by UUID prefix, provider id or PROVIDER/ID: see [`crate::bmdb::machine_lookup`].

use crate::bmdb::connection::Bmdb;
use crate::bmdb::machine_lookup::{self, LookupResult};
use crate::cli::error::CliError;
use crate::model::machine_view::MachineName;

/// Finds the one machine that `text` names.
pub async fn find_machine(bmdb: &Bmdb, text: &str) -> Result<MachineName, CliError> {
    let wanted = text.to_owned();
    let found = bmdb
        .transact_read_only(move |tx| {
            let wanted = wanted.clone();
            Box::pin(async move { machine_lookup::find_machine(tx, &wanted).await })
        })
        .await?;
    match found {
        LookupResult::One(name) => Ok(name),
        LookupResult::Unresolved(message) => Err(CliError::Invalid(message)),
    }
}
