//! The API server, as it is asked.
//!
//! Objects go to and fro as JSON. Each request has a deadline, is sent once, and is not sent any more when whoever asked
//! is dropped; whether one that had been sent arrives nobody knows then.
//!
//! Who we are stands in files, which somebody renews: they are read before each pass, and a client is made anew when they
//! say something else. The certificate is of the user `shepherd:reconciler` in the group `system:masters`, for the roles
//! of everybody else are among what is made here.

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
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::Value;
use tonic::codegen::http::HeaderValue;
use tonic::codegen::http::header::USER_AGENT;

use crate::reconciler::objects::kind::{KEPT, Key, Kind, MANAGER, in_address};
use crate::reconciler::objects::plan::Precondition;

/// After which a request is given up. An API server gives up on most of them after a minute itself.
const DEADLINE: Duration = Duration::from_secs(30);
/// How long one watch lasts, in seconds: the server ends it then, and the next goes on where it ended.
const WATCH_LASTS: u32 = 290;
/// After which a server that should have ended a watch is taken for gone.
const WATCH_ENDED: Duration = Duration::from_secs(WATCH_LASTS as u64 + 20);
/// As what we are known in audit logs: which release has written what is to be seen there.
pub const WE_ARE: &str = concat!("shepherd-roleserver/", env!("CARGO_PKG_VERSION"));

/// Where the API server is, and who we are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its address: `https://127.0.0.1:6443`.
    pub url: String,
    /// Who it is, and who we are; `None` where the server asks nobody who he is, as one on loopback may.
    pub identity: Option<Identity>,
}

/// Files, in PEM, that may be replaced at any time by others of the same names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificates of those who may have signed the server's.
    pub authority: PathBuf,
    /// Our certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The server refused it, and says why.
    #[error("{}", .0.message)]
    Refused(Box<Status>),
    /// There was no answer, or none that could be read. What was asked may have been done.
    #[error("the API server gave no answer that can be used: {0}")]
    Unanswered(String),
    /// It was never sent.
    #[error("{0}")]
    NotSent(String),
}

/// What is told of objects that are watched.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    /// An object is now this.
    Is(Value),
    /// An object is gone; this was its last state. The version is that of its end.
    Gone(Value),
    /// Nothing of what is watched has changed up to this version.
    Nothing(String),
}

/// All of a kind that carries the label, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct List {
    /// The objects.
    pub items: Vec<Value>,
    /// The moment.
    pub resource_version: String,
}

/// A client that is made anew when its files say something else.
#[derive(Debug)]
pub struct Kubernetes {
    connection: Connection,
    built: Mutex<Option<(Contents, Api)>>,
}

#[derive(PartialEq, Eq)]
struct Contents(Vec<Vec<u8>>);

/// One client.
#[derive(Clone)]
pub struct Api(pub(super) kube::Client);

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents(..)")
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api(..)")
    }
}

impl Kubernetes {
    /// Reads nothing yet.
    #[must_use]
    pub const fn new(connection: Connection) -> Self {
        Self { connection, built: Mutex::new(None) }
    }

    /// A client of what the files say now.
    pub async fn api(&self) -> Result<Api, AskError> {
        let contents = self.read().await?;
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, api)) = &*built
            && *of == contents
        {
            return Ok(api.clone());
        }
        let api = self.build(&contents)?;
        *built = Some((contents, api.clone()));
        Ok(api)
    }

    async fn read(&self) -> Result<Contents, AskError> {
        let Some(Identity { authority, certificate, key }) = &self.connection.identity else {
            return Ok(Contents(Vec::new()));
        };
        let mut contents = Vec::new();
        for path in [authority, certificate, key] {
            let read = tokio::fs::read(path).await;
            contents.push(read.map_err(|error| {
                AskError::NotSent(format!(
                    "{} cannot be read, which the API server is asked with: {error}",
                    path.display()
                ))
            })?);
        }
        Ok(Contents(contents))
    }

    fn build(&self, Contents(contents): &Contents) -> Result<Api, AskError> {
        let not_sent = |why: String| AskError::NotSent(why);
        let url = &self.connection.url;
        let address = url
            .parse()
            .map_err(|error| not_sent(format!("{url} is no address of an API server: {error}")))?;
        let mut config = kube::Config::new(address);
        // What is asked again is decided by whoever asks.
        config.default_retry = false;
        config.headers.push((USER_AGENT, HeaderValue::from_static(WE_ARE)));
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
        // Its errors may hold what a key file says.
        let client = kube::Client::try_from(config).map_err(|_| {
            not_sent(
                "the certificate and the key that the API server is asked with do not fit each other"
                    .to_owned(),
            )
        })?;
        Ok(Api(client))
    }
}

impl Api {
    /// All of a kind that carries the label.
    pub async fn list(&self, kind: &Kind) -> Result<List, AskError> {
        let request = Request::new(kind.path(None))
            .list(&ListParams::default().labels(KEPT))
            .map_err(|error| unsent(&error))?;
        let list: Value = within(self.0.request(request)).await?;
        let resource_version =
            list.pointer("/metadata/resourceVersion").and_then(Value::as_str).unwrap_or_default();
        let resource_version = resource_version.to_owned();
        let mut items = items(list, kind)?;
        // What a list says of them all, a server does not say of each.
        for fields in items.iter_mut().filter_map(Value::as_object_mut) {
            fields.entry("apiVersion").or_insert_with(|| Value::from(kind.api_version()));
            fields.entry("kind").or_insert_with(|| Value::from(kind.kind.as_str()));
        }
        Ok(List { items, resource_version })
    }

    /// One object.
    pub async fn get(&self, kind: &Kind, key: &Key) -> Result<Option<Value>, AskError> {
        let request = at(kind, key)
            .get(&in_address(&key.name), &GetParams::default())
            .map_err(|error| unsent(&error))?;
        match within(self.0.request(request)).await {
            Ok(object) => Ok(Some(object)),
            Err(AskError::Refused(status)) if status.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes an object that is not there.
    pub async fn create(&self, kind: &Kind, key: &Key, object: &Value) -> Result<Value, AskError> {
        let request = at(kind, key)
            .create(&as_us(), object.to_string().into_bytes())
            .map_err(|error| unsent(&error))?;
        within(self.0.request(request)).await
    }

    /// Writes an object that is as it was seen: it says its version.
    pub async fn replace(&self, kind: &Kind, key: &Key, object: &Value) -> Result<Value, AskError> {
        let body = object.to_string().into_bytes();
        let request =
            at(kind, key).replace(&in_address(&key.name), &as_us(), body).map_err(|error| unsent(&error))?;
        within(self.0.request(request)).await
    }

    /// Says what of an object is ours. What others say of the same goes.
    pub async fn apply(&self, kind: &Kind, key: &Key, object: &Value) -> Result<Value, AskError> {
        let parameters = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(object);
        let request = at(kind, key)
            .patch(&in_address(&key.name), &parameters, &patch)
            .map_err(|error| unsent(&error))?;
        within(self.0.request(request)).await
    }

    /// Deletes an object that is as it was seen. What depends on it goes after it.
    pub async fn delete(&self, kind: &Kind, key: &Key, seen: &Precondition) -> Result<(), AskError> {
        let preconditions = Preconditions {
            uid: Some(seen.uid.clone()),
            resource_version: Some(seen.resource_version.clone()),
        };
        let parameters = DeleteParams::background().preconditions(preconditions);
        let request =
            at(kind, key).delete(&in_address(&key.name), &parameters).map_err(|error| unsent(&error))?;
        within(self.0.request_text(request)).await.map(drop)
    }

    /// What is told of all of a kind that carries the label, from this version on, until the server ends it.
    pub async fn watch(
        &self,
        kind: &Kind,
        from: &str,
    ) -> Result<impl Stream<Item = Result<Told, AskError>> + use<>, AskError> {
        let parameters = WatchParams {
            label_selector: Some(KEPT.to_owned()),
            timeout: Some(WATCH_LASTS),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request =
            Request::new(kind.path(None)).watch(&parameters, from).map_err(|error| unsent(&error))?;
        let events = within(self.0.request_events::<Value>(request)).await?;
        let told = events.map(|event| match event.map_err(answered)? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Ok(Told::Is(object)),
            WatchEvent::Deleted(object) => Ok(Told::Gone(object)),
            WatchEvent::Bookmark(bookmark) => Ok(Told::Nothing(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => Err(AskError::Refused(status)),
        });
        let end = tokio::time::sleep(WATCH_ENDED);
        Ok(told.take_until(end))
    }

    /// Anything else that is read.
    pub(super) async fn read(&self, path: &str) -> Result<Value, AskError> {
        let request = Request::new(path).list(&ListParams::default()).map_err(|error| unsent(&error))?;
        within(self.0.request(request)).await
    }
}

/// What a list holds.
pub(super) fn items(mut list: Value, kind: &Kind) -> Result<Vec<Value>, AskError> {
    match list.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => Ok(items),
        Some(Value::Null) => Ok(Vec::new()),
        _ => Err(AskError::Unanswered(format!("its list of {} has no items", kind.resource()))),
    }
}

fn at(kind: &Kind, key: &Key) -> Request {
    Request::new(kind.path(key.namespace.as_deref()))
}

fn as_us() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

pub(super) async fn within<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, AskError> {
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(answer) => answer.map_err(answered),
        Err(_) => Err(AskError::Unanswered(format!("nothing came within {} seconds", DEADLINE.as_secs()))),
    }
}

fn answered(error: kube::Error) -> AskError {
    match error {
        kube::Error::Api(status) => AskError::Refused(status),
        other => AskError::Unanswered(causes(&other)),
    }
}

pub(super) fn unsent(error: &kube::core::request::Error) -> AskError {
    AskError::NotSent(format!("what was to be asked makes no request: {error}"))
}

/// An error and what it came from; its own words are often no more than the name of a layer.
fn causes(error: &dyn std::error::Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(error) = source {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        source = error.source();
    }
    text
}
