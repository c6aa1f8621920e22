//! Which machine is meant: see [`crate::bmdb::find`].

use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::{self, Found};
use crate::cli::error::CliError;
use crate::model::machine_view::MachineName;

/// Finds the one machine that `text` names.
pub async fn find(bmdb: &Bmdb, text: &str) -> Result<MachineName, CliError> {
    let wanted = text.to_owned();
    let found = bmdb
        .inspect(move |tx| {
            let wanted = wanted.clone();
            Box::pin(async move { find::find(tx, &wanted).await })
        })
        .await?;
    match found {
        Found::One(name) => Ok(name),
        Found::Not(said) => Err(CliError::Wrong(said)),
    }
}
