//! Kubernetes API client: list, watch, apply, delete; reloads its certificate.
//!
//! Objects are sent and received as JSON. Each request has a deadline and is sent once. It is not sent any more once
//! the caller has dropped it; whether a request that had been sent arrives is then unknown.
//!
//! The client's identity is in files that are renewed from time to time. They are read before each pass, and a new
//! client is built when they have changed. The certificate is of the user `shepherd:reconciler` in the group
//! `system:masters`, because the roles of all other users are among the objects that are created here.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{Stream, StreamExt as _};
use kube::api::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchParams,
};
use kube::core::{Request, Status, WatchEvent};
use model::excerpt::Excerpt;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::Value;
use tonic::codegen::http::HeaderValue;
use tonic::codegen::http::header::USER_AGENT;

use crate::objects::object_kind::{FIELD_MANAGER, MANAGED_LABEL, ObjectKey, ObjectKind, escape_path_segment};
use crate::objects::object_plan::Precondition;

/// Time limit of a request. An API server itself gives up on most requests after a minute.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one watch lasts, in seconds. Then the server ends it, and the next watch continues from there.
const WATCH_SECONDS: u32 = 290;
/// A server that has not ended a watch after this time is considered gone.
const WATCH_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 20);
/// Our user agent in audit logs, which shows the release that wrote an object.
const CLIENT_USER_AGENT: &str = concat!("shepherd-roleserver/", env!("CARGO_PKG_VERSION"));
/// Most characters of a rejection that an error quotes.
const MAX_REJECTION_CHARS: usize = 1000;

/// The address of the API server, and our identity there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiServerConnection {
    /// Its address, for example `https://127.0.0.1:6443`.
    pub url: String,
    /// Our certificate and the server's authority; `None` for a server without authentication, as one on loopback may
    /// be.
    pub identity: Option<ClientIdentity>,
}

/// PEM files that may be replaced at any time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The certificates of the authorities that sign the server's certificate.
    pub authority: PathBuf,
    /// Our client certificate with its chain.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The server rejected it, with a reason.
    #[error("{}", describe_rejection(.0))]
    Rejected(Box<Status>),
    /// No response. The request may have been carried out.
    #[error("the API server gave no answer that can be used: {0}")]
    NoResponse(String),
    /// A response that is not what the API server documents. The request may have been carried out.
    #[error("the API server's response cannot be read: {0}")]
    Unreadable(String),
    /// The request was never sent.
    #[error("{0}")]
    NotSent(String),
}

/// The message of a rejection as one line of limited length. Webhooks of others write messages, too.
fn describe_rejection(status: &Status) -> String {
    let words = Excerpt::within(&status.message, MAX_REJECTION_CHARS);
    words.map_or_else(
        || format!("it gave no reason ({} {})", status.code, status.reason),
        |words| words.to_string(),
    )
}

/// An event of a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum ObjectEvent {
    /// An object was created or changed to this state.
    Updated(Value),
    /// An object was deleted; this was its last state. The version is that of the deletion.
    Deleted(Value),
    /// Nothing in the watched set has changed up to this version.
    Bookmark(String),
}

/// All objects of a kind with the label, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectList {
    /// The objects as JSON.
    pub items: Vec<Value>,
    /// The resource version of the list, from which a watch continues.
    pub resource_version: String,
}

/// A client that is rebuilt when its files change.
#[derive(Debug)]
pub struct ReloadingClient {
    connection: ApiServerConnection,
    cached: Mutex<Option<(IdentityContents, ApiClient)>>,
}

#[derive(PartialEq, Eq)]
struct IdentityContents(Vec<Vec<u8>>);

/// A client with one identity.
#[derive(Clone)]
pub struct ApiClient(pub(super) kube::Client);

impl std::fmt::Debug for IdentityContents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents(..)")
    }
}

impl std::fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api(..)")
    }
}

impl ReloadingClient {
    /// Creates the client without reading any file.
    #[must_use]
    pub const fn new(connection: ApiServerConnection) -> Self {
        Self { connection, cached: Mutex::new(None) }
    }

    /// A client with the present contents of the files.
    pub async fn client(&self) -> Result<ApiClient, ApiError> {
        let contents = self.read_identity().await?;
        let mut built = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, api)) = &*built
            && *of == contents
        {
            return Ok(api.clone());
        }
        let api = self.build_client(&contents)?;
        *built = Some((contents, api.clone()));
        Ok(api)
    }

    async fn read_identity(&self) -> Result<IdentityContents, ApiError> {
        let Some(ClientIdentity { authority, certificate, key }) = &self.connection.identity else {
            return Ok(IdentityContents(Vec::new()));
        };
        let mut contents = Vec::new();
        for path in [authority, certificate, key] {
            let read = tokio::fs::read(path).await;
            contents.push(read.map_err(|error| {
                ApiError::NotSent(format!(
                    "{} cannot be read, and requests to the API server need it: {error}",
                    path.display()
                ))
            })?);
        }
        Ok(IdentityContents(contents))
    }

    fn build_client(&self, IdentityContents(contents): &IdentityContents) -> Result<ApiClient, ApiError> {
        let not_sent = |why: String| ApiError::NotSent(why);
        let url = &self.connection.url;
        let address = url
            .parse()
            .map_err(|error| not_sent(format!("{url} is no address of an API server: {error}")))?;
        let mut config = kube::Config::new(address);
        // The caller decides about retries.
        config.default_retry = false;
        config.headers.push((USER_AGENT, HeaderValue::from_static(CLIENT_USER_AGENT)));
        if let [authority, certificate, key] = contents.as_slice() {
            let authorities: Result<Vec<_>, _> =
                CertificateDer::pem_slice_iter(authority).map(|der| der.map(|der| der.to_vec())).collect();
            let authorities = authorities.map_err(|error| {
                not_sent(format!("the API server's authority is no certificate: {error}"))
            })?;
            config.root_cert = Some(authorities);
            config.auth_info.client_certificate_data = Some(STANDARD.encode(certificate));
            config.auth_info.client_key_data = Some(STANDARD.encode(key).into());
        }
        // Its errors may contain parts of a key file, so they are not shown.
        let client = kube::Client::try_from(config).map_err(|_| {
            not_sent(
                "the certificate and the key for requests to the API server do not belong together"
                    .to_owned(),
            )
        })?;
        Ok(ApiClient(client))
    }
}

impl ApiClient {
    /// Lists all objects of a kind with the label.
    pub async fn list(&self, kind: &ObjectKind) -> Result<ObjectList, ApiError> {
        let request = Request::new(kind.path(None))
            .list(&ListParams::default().labels(MANAGED_LABEL))
            .map_err(|error| request_error(&error))?;
        let list: Value = with_timeout(self.0.request(request)).await?;
        let resource_version =
            list.pointer("/metadata/resourceVersion").and_then(Value::as_str).unwrap_or_default();
        let resource_version = resource_version.to_owned();
        let mut items = take_items(list, kind)?;
        // A list states the kind once, so a server omits it in each item.
        for fields in items.iter_mut().filter_map(Value::as_object_mut) {
            fields.entry("apiVersion").or_insert_with(|| Value::from(kind.api_version()));
            fields.entry("kind").or_insert_with(|| Value::from(kind.kind.as_str()));
        }
        Ok(ObjectList { items, resource_version })
    }

    /// Reads one object; `None` if it does not exist.
    pub async fn get(&self, kind: &ObjectKind, key: &ObjectKey) -> Result<Option<Value>, ApiError> {
        let request = object_request(kind, key)
            .get(&escape_path_segment(&key.name), &GetParams::default())
            .map_err(|error| request_error(&error))?;
        match with_timeout(self.0.request(request)).await {
            Ok(object) => Ok(Some(object)),
            Err(ApiError::Rejected(status)) if status.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object that does not exist.
    pub async fn create(
        &self,
        kind: &ObjectKind,
        key: &ObjectKey,
        object: &Value,
    ) -> Result<Value, ApiError> {
        let request = object_request(kind, key)
            .create(&post_params(), object.to_string().into_bytes())
            .map_err(|error| request_error(&error))?;
        with_timeout(self.0.request(request)).await
    }

    /// Replaces an object at the resource version that it contains.
    pub async fn replace(
        &self,
        kind: &ObjectKind,
        key: &ObjectKey,
        object: &Value,
    ) -> Result<Value, ApiError> {
        let body = object.to_string().into_bytes();
        let request = object_request(kind, key)
            .replace(&escape_path_segment(&key.name), &post_params(), body)
            .map_err(|error| request_error(&error))?;
        with_timeout(self.0.request(request)).await
    }

    /// Applies our fields of an object (server-side apply), and takes over fields of other managers.
    pub async fn apply(&self, kind: &ObjectKind, key: &ObjectKey, object: &Value) -> Result<Value, ApiError> {
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(object);
        let request = object_request(kind, key)
            .patch(&escape_path_segment(&key.name), &parameters, &patch)
            .map_err(|error| request_error(&error))?;
        with_timeout(self.0.request(request)).await
    }

    /// Deletes an object if it still matches the precondition. Its dependents are deleted after it.
    pub async fn delete(
        &self,
        kind: &ObjectKind,
        key: &ObjectKey,
        seen: &Precondition,
    ) -> Result<(), ApiError> {
        let preconditions = Preconditions {
            uid: Some(seen.uid.clone()),
            resource_version: Some(seen.resource_version.clone()),
        };
        let parameters = DeleteParams::background().preconditions(preconditions);
        let request = object_request(kind, key)
            .delete(&escape_path_segment(&key.name), &parameters)
            .map_err(|error| request_error(&error))?;
        with_timeout(self.0.request_text(request)).await.map(drop)
    }

    /// Watches all objects of a kind with the label, from this version on, until the server ends the watch.
    pub async fn watch(
        &self,
        kind: &ObjectKind,
        from: &str,
    ) -> Result<impl Stream<Item = Result<ObjectEvent, ApiError>> + use<>, ApiError> {
        let parameters = WatchParams {
            label_selector: Some(MANAGED_LABEL.to_owned()),
            timeout: Some(WATCH_SECONDS),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request =
            Request::new(kind.path(None)).watch(&parameters, from).map_err(|error| request_error(&error))?;
        let events = with_timeout(self.0.request_events::<Value>(request)).await?;
        let reports = events.map(|event| match event.map_err(response_error)? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Ok(ObjectEvent::Updated(object)),
            WatchEvent::Deleted(object) => Ok(ObjectEvent::Deleted(object)),
            WatchEvent::Bookmark(bookmark) => Ok(ObjectEvent::Bookmark(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => Err(ApiError::Rejected(status)),
        });
        let end = tokio::time::sleep(WATCH_TIMEOUT);
        Ok(reports.take_until(end))
    }
}

/// The items of a list.
pub(super) fn take_items(mut list: Value, kind: &ObjectKind) -> Result<Vec<Value>, ApiError> {
    match list.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => Ok(items),
        Some(Value::Null) => Ok(Vec::new()),
        _ => Err(ApiError::Unreadable(format!("its list of {} has no items", kind.resource()))),
    }
}

fn object_request(kind: &ObjectKind, key: &ObjectKey) -> Request {
    Request::new(kind.path(key.namespace.as_deref()))
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

pub(super) async fn with_timeout<T>(requested: impl Future<Output = kube::Result<T>>) -> Result<T, ApiError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, requested).await {
        Ok(answer) => answer.map_err(response_error),
        Err(_) => {
            Err(ApiError::NoResponse(format!("nothing came within {} seconds", REQUEST_TIMEOUT.as_secs())))
        }
    }
}

fn response_error(error: kube::Error) -> ApiError {
    match error {
        kube::Error::Api(status) => ApiError::Rejected(status),
        kube::Error::HttpError(error) => request_error(&error),
        error @ (kube::Error::SerdeError(_) | kube::Error::FromUtf8(_)) => {
            ApiError::Unreadable(error_chain(&error))
        }
        other => ApiError::NoResponse(error_chain(&other)),
    }
}

pub(super) fn request_error(error: &impl std::fmt::Display) -> ApiError {
    ApiError::NotSent(format!("the request to the API server cannot be built: {error}"))
}

/// An error with its causes. Its own text is often no more than the name of a layer.
fn error_chain(error: &dyn std::error::Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(error) = source {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        source = error.source();
    }
    text
}
