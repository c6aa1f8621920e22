//! `get tokens`: list of credentials.

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::object::resolve::NamedId;
use model::humanize::relative_time;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

/// Page size of the API's list: with a hundred providers for each credential, a page still fits into a message.
const PAGE_SIZE: i32 = 50;

const COLUMNS: [Column; 6] = [
    Column::always("NAME"),
    Column::always("KIND"),
    Column::always("ROLE"),
    Column::always("PROVIDERS"),
    Column::always("STATE"),
    Column::always("CREDENTIAL"),
];

/// Lists the credentials, newest first.
pub(crate) async fn list_tokens(client: &FleetClient, limit: Option<u32>) -> Result<ObjectList, CliError> {
    let mut service = CredentialsClient::new(client.channel());
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request =
            v1::ListCredentialsRequest { page_size: page.size.min(PAGE_SIZE), page_token: page.token };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        let credentials = std::mem::take(&mut response.credentials);
        let lines = credentials.iter().map(|credential| credential_object(credential, now)).collect();
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(ObjectList::of_pages(ObjectKind::Token, &COLUMNS, pages))
}

/// The names and ids of all credentials.
pub(super) async fn fetch_token_names(client: &FleetClient) -> Result<Vec<NamedId>, CliError> {
    let mut service = CredentialsClient::new(client.channel());
    let named = |credential: v1::Credential| NamedId {
        id: credential.credential_id,
        name: Some(credential.name),
        is_current: credential.active,
    };
    let pages = fetch_pages(None, String::new(), async |page| {
        let request =
            v1::ListCredentialsRequest { page_size: page.size.min(PAGE_SIZE), page_token: page.token };
        let response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let lines = response.credentials.into_iter().map(named).collect();
        Ok(Page { lines, next_token: response.next_page_token, response: () })
    })
    .await?;
    Ok(pages.lines)
}

fn credential_object(credential: &v1::Credential, now: Timestamp) -> ListedObject {
    ListedObject {
        names: ObjectNames {
            others: vec![credential.name.clone()],
            ..ObjectNames::of_id(credential.credential_id.clone())
        },
        rows: vec![credential_row(credential, now)],
        document: ObjectDocument::of_message(credential),
    }
}

fn credential_row(credential: &v1::Credential, now: Timestamp) -> Vec<String> {
    let moment = |at: Timestamp| relative_time(at, now);
    let revoked_at = credential.revoked_at.and_then(decode_timestamp);
    let expires_at = credential.expires_at.and_then(decode_timestamp);
    let state = match (credential.active, revoked_at, expires_at) {
        (_, Some(at), _) => format!("revoked {}", moment(at)),
        (true, _, Some(at)) => format!("active, expires {}", moment(at)),
        (true, _, None) => "active".to_owned(),
        (false, _, Some(at)) => format!("expired {}", moment(at)),
        (false, _, None) => "ended".to_owned(),
    };
    let providers = &credential.providers;
    vec![
        credential.name.clone(),
        credential.kind.clone(),
        credential.role.clone(),
        if providers.is_empty() { "all".to_owned() } else { providers.join(",") },
        state,
        credential.credential_id.clone(),
    ]
}
