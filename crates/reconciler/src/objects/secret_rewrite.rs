//! Writes every Secret again as it is, so that the API server encrypts it with the key that it writes with now.
//!
//! An API server stores nothing for an update without a change, unless what is stored is encrypted with another key than its
//! first one, or not at all. So Secrets that are encrypted with it already cost a request and no write. One that somebody
//! else changes or deletes meanwhile has been written by an API server with that key, too.
//!
//! Secrets are read in pages, so that the memory for them is bounded. When a page has expired, the list begins again.

use kube::api::ListParams;
use kube::core::Request;
use serde_json::Value;

use crate::objects::api_client::{
    ApiClient, ApiError, ReloadingClient, request_error, take_items, with_timeout,
};
use crate::objects::object_kind::{ObjectKey, ObjectKind};

/// Secrets in a page. One has at most a MiB.
const PAGE_SIZE: u32 = 32;
/// How often the list begins again before the attempt fails.
const MAX_EXPIRED_PAGES: usize = 5;
/// HTTP status of a page that has expired.
const PAGE_EXPIRED: u16 = 410;

/// Writes every Secret again, and returns how many there were.
pub async fn rewrite_all_secrets(connection: &ReloadingClient) -> Result<usize, ApiError> {
    let kind = secret_kind();
    let (mut token, mut expired, mut count) = (None, 0, 0);
    loop {
        // The certificate may have been renewed since the last page.
        let client = connection.client().await?;
        let (secrets, next) = match list_page(&client, &kind, token.as_deref()).await {
            Err(ApiError::Rejected(status))
                if status.code == PAGE_EXPIRED && token.is_some() && expired < MAX_EXPIRED_PAGES =>
            {
                expired += 1;
                token = None;
                continue;
            }
            page => page?,
        };
        for secret in secrets {
            rewrite_one(&client, &kind, secret).await?;
            count += 1;
        }
        match next {
            Some(next) => token = Some(next),
            None => return Ok(count),
        }
    }
}

fn secret_kind() -> ObjectKind {
    ObjectKind {
        group: String::new(),
        version: "v1".to_owned(),
        kind: "Secret".to_owned(),
        plural: "secrets".to_owned(),
        namespaced: true,
    }
}

/// A page of the list, and the token of the next one.
async fn list_page(
    client: &ApiClient,
    kind: &ObjectKind,
    token: Option<&str>,
) -> Result<(Vec<Value>, Option<String>), ApiError> {
    let mut parameters = ListParams::default().limit(PAGE_SIZE);
    if let Some(token) = token {
        parameters = parameters.continue_token(token);
    }
    let request = Request::new(kind.path(None)).list(&parameters).map_err(|error| request_error(&error))?;
    let list: Value = with_timeout(client.0.request(request)).await?;
    let next = list.pointer("/metadata/continue").and_then(Value::as_str).filter(|token| !token.is_empty());
    let next = next.map(str::to_owned);
    Ok((take_items(list, kind)?, next))
}

async fn rewrite_one(client: &ApiClient, kind: &ObjectKind, mut secret: Value) -> Result<(), ApiError> {
    let text = |field: &str| secret.pointer(field).and_then(Value::as_str).map(str::to_owned);
    let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
    let Some(name) = name else {
        return Err(ApiError::Unreadable("a Secret in its list has no name".to_owned()));
    };
    // A list states the kind once, so a server omits it in each item.
    if let Some(fields) = secret.as_object_mut() {
        fields.entry("apiVersion").or_insert_with(|| Value::from(kind.api_version()));
        fields.entry("kind").or_insert_with(|| Value::from(kind.kind.as_str()));
    }
    match client.replace(kind, &ObjectKey { namespace, name }, &secret).await {
        Ok(_) => Ok(()),
        // Somebody else has written or deleted it meanwhile.
        Err(ApiError::Rejected(status)) if status.is_conflict() || status.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}
