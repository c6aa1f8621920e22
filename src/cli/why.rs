//! `why`: the answer to "it is stuck and nothing tells me why".
//!
//! The answer itself is [`crate::model::why`]'s; here it is asked for and printed.

use crate::bmdb::connection::Bmdb;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::{find, id_of};
use crate::cli::output::{Format, width};
use crate::model::why::explain;
use crate::model::why::render::render;

/// `why M`.
pub async fn why(bmdb: &Bmdb, machine: &str, format: Format) -> Result<String, CliError> {
    let name = find(bmdb, machine).await?;
    let why = explain(&bmdb.machine_view(id_of(&name)).await?);
    match format {
        Format::Json => json(&why),
        Format::Table => Ok(render(&why, width())),
    }
}
