//! Read what a page shows. Every read is bounded, except that of the clusters, which has all of them.

use crate::client::fleet_client::FleetClient;
use crate::cluster::get::list_clusters;
use crate::error::CliError;
use crate::machine::get::list_machine_page;
use crate::machine::why::fetch_explanation;
use crate::top::data::{Content, ReadRequest, TopAnswer, TopList};
use crate::top::fleet_summary::fetch_summary;

/// Machines of a page.
const MACHINES_PER_PAGE: u32 = 100;

/// Reads the summary of the fleet, and what the request names. A content that is refused is part of the answer. A summary
/// that is refused is an error: then the operator may see nothing any more.
pub async fn fetch_answer(client: &FleetClient, request: &ReadRequest) -> Result<TopAnswer, CliError> {
    let summary = fetch_summary(client).await?;
    let content = match fetch_content(client, request).await {
        Ok(content) => Ok(content),
        Err(error) if error.is_rejection() => Err(error.to_string()),
        Err(error) => return Err(error),
    };
    Ok(TopAnswer { request: request.clone(), summary, content })
}

async fn fetch_content(client: &FleetClient, request: &ReadRequest) -> Result<Content, CliError> {
    let list = match request {
        ReadRequest::Overview => return Ok(Content::Overview),
        ReadRequest::Why { machine } => {
            return Ok(Content::Why(Box::new(fetch_explanation(client, machine).await?)));
        }
        ReadRequest::Machines { selector, page_token } => {
            list_machine_page(client, selector, page_token, MACHINES_PER_PAGE).await?
        }
        ReadRequest::Clusters => list_clusters(client).await?,
    };
    Ok(Content::List(TopList::of_objects(list)))
}
