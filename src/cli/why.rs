//! `why`: the answer to "it is stuck and nothing tells me why".
//!
//! The answer itself is [`crate::model::why`]'s; here it is asked for and printed.

use crate::bmdb::find::id_of;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::output::{Format, width};
use crate::cli::remote::refused;
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::why::explain;
use crate::model::why::render::render;
use crate::proto::fleet::v1::WhyRequest;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// `why M`.
pub async fn why(source: &Source, machine: &str, format: Format) -> Result<String, CliError> {
    let why = match source {
        Source::Direct(bmdb) => {
            let name = find(bmdb, machine).await?;
            explain(&bmdb.machine_view(id_of(&name)).await?)
        }
        Source::Api(remote) => {
            let request = WhyRequest { machine: machine.to_owned() };
            let said = MachinesClient::new(remote.service()).why(request).await.map_err(refused)?;
            remote_read::why(said.into_inner())?
        }
    };
    match format {
        Format::Json => json(&why),
        Format::Table => Ok(render(&why, width())),
    }
}
