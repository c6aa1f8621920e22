//! A fake etcd that loses events: a server in this process, without a disk. A test controls its watches. It serves
//! the requests of a watcher and no others: ranges and watches.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use anyhow::Result;
use proto::etcdserverpb as wire;
use shepherd_etcd::client::Client;
use shepherd_etcd::namespace::Namespace;
use shepherd_etcd::transport::Endpoint;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, StreamingService, UnaryService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;
type Events = mpsc::Sender<Result<wire::WatchResponse, Status>>;

/// The fake server. It ends when this value is dropped.
pub(crate) struct LossyEtcd {
    store: Arc<Mutex<Store>>,
    /// How many of the delayed responses may be sent. Each was read before it was delayed.
    released_ranges: watch::Sender<usize>,
    directory: tempfile::TempDir,
    _server: JoinSet<()>,
}

#[derive(Default)]
struct Store {
    revision: i64,
    compact_revision: i64,
    records: BTreeMap<Vec<u8>, wire::KeyValue>,
    history: Vec<wire::Event>,
    /// A key that is deleted, and its deletion compacted, when the next watch is about to begin.
    deleted_before_watch: Option<Vec<u8>>,
    /// The start revision of each watch request.
    watch_starts: Vec<i64>,
    watches: Vec<Events>,
    holds_ranges: bool,
    /// How many responses to ranges were delayed.
    held_ranges: usize,
}

/// Whether watches receive a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Delivered,
    Lost,
}

impl LossyEtcd {
    pub(crate) fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let store = Arc::new(Mutex::new(Store { revision: 1, ..Store::default() }));
        let released_ranges = watch::Sender::new(0);
        let service = Services { store: store.clone(), released_ranges: released_ranges.subscribe() };
        let incoming = UnixListenerStream::new(UnixListener::bind(socket(directory.path()))?);
        let mut server = JoinSet::new();
        server.spawn(async move {
            // It ends when the test does.
            let _ = tonic::transport::Server::builder().serve_with_incoming(service, incoming).await;
        });
        Ok(Self { store, released_ranges, directory, _server: server })
    }

    pub(crate) fn client(&self) -> Result<Client> {
        let endpoint = Endpoint::Socket(socket(self.directory.path()));
        Ok(Client::new(vec![endpoint], Namespace::new("test")?))
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        locked(&self.store)
    }

    /// Writes a key. `delivery` decides whether watches receive the change.
    pub(crate) fn put(&self, key: &str, value: &str, delivery: Delivery) {
        self.store().change(outside(key), Some(value.into()), delivery);
    }

    /// Deletes a key. `delivery` decides whether watches receive the change.
    pub(crate) fn delete(&self, key: &str, delivery: Delivery) {
        self.store().change(outside(key), None, delivery);
    }

    /// Deletes a key, and compacts that deletion away, between the next listing and the watch that follows it.
    pub(crate) fn delete_before_next_watch(&self, key: &str) {
        self.store().deleted_before_watch = Some(outside(key));
    }

    pub(crate) fn revision(&self) -> i64 {
        self.store().revision
    }

    /// The start revision of each watch request.
    pub(crate) fn watch_starts(&self) -> Vec<i64> {
        self.store().watch_starts.clone()
    }

    /// From now on delays the response to each range. The response has the state at the time of the read.
    pub(crate) fn hold_ranges(&self) {
        self.store().holds_ranges = true;
    }

    /// How many responses were delayed so far.
    pub(crate) fn held_ranges(&self) -> usize {
        self.store().held_ranges
    }

    /// Sends the responses that were delayed so far, and no later ones.
    pub(crate) fn release_held_ranges(&self) {
        let held = self.held_ranges();
        self.released_ranges.send_replace(held);
    }
}

impl Store {
    fn header(&self) -> wire::ResponseHeader {
        wire::ResponseHeader { revision: self.revision, ..Default::default() }
    }

    fn change(&mut self, key: Vec<u8>, value: Option<Vec<u8>>, delivery: Delivery) {
        self.revision += 1;
        let mut pair = wire::KeyValue { key: key.clone(), mod_revision: self.revision, ..Default::default() };
        let kind = if let Some(value) = value {
            let created = self.records.get(&key).map_or(self.revision, |before| before.create_revision);
            (pair.value, pair.create_revision) = (value, created);
            self.records.insert(key, pair.clone());
            wire::event::EventType::Put
        } else {
            self.records.remove(&key);
            wire::event::EventType::Delete
        };
        let mut event = wire::Event { kv: Some(pair), ..Default::default() };
        event.set_type(kind);
        if delivery == Delivery::Delivered {
            self.history.push(event.clone());
            let answer = wire::WatchResponse {
                header: Some(self.header()),
                events: vec![event],
                ..Default::default()
            };
            self.watches.retain(|watch| watch.try_send(Ok(answer.clone())).is_ok());
        }
    }

    fn range(&self, request: &wire::RangeRequest) -> wire::RangeResponse {
        let kvs = if request.range_end.is_empty() {
            self.records.get(&request.key).into_iter().cloned().collect()
        } else {
            self.records
                .range(request.key.clone()..request.range_end.clone())
                .map(|(_, pair)| pair.clone())
                .collect()
        };
        wire::RangeResponse { header: Some(self.header()), kvs, ..Default::default() }
    }

    /// Begins a watch as etcd 3.4.23 does: it is rejected if it begins before the compacted revision. If it begins at
    /// that revision, it misses what the compaction removed.
    fn begin_watch(&mut self, request: &wire::WatchCreateRequest, to: Events) {
        self.watch_starts.push(request.start_revision);
        if let Some(key) = self.deleted_before_watch.take() {
            self.change(key, None, Delivery::Lost);
            self.compact_revision = self.revision;
        }
        let created =
            wire::WatchResponse { header: Some(self.header()), created: true, ..Default::default() };
        // There is room for more than any test sends.
        let _ = to.try_send(Ok(created));
        if request.start_revision < self.compact_revision {
            let compact_revision = self.compact_revision;
            let refused = wire::WatchResponse {
                header: Some(self.header()),
                canceled: true,
                compact_revision,
                ..Default::default()
            };
            let _ = to.try_send(Ok(refused));
            return;
        }
        let is_requested = |event: &&wire::Event| {
            event.kv.as_ref().is_some_and(|pair| pair.mod_revision >= request.start_revision)
        };
        let events: Vec<_> = self.history.iter().filter(is_requested).cloned().collect();
        if !events.is_empty() {
            let _ = to.try_send(Ok(wire::WatchResponse {
                header: Some(self.header()),
                events,
                ..Default::default()
            }));
        }
        self.watches.push(to);
    }
}

fn locked(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("client")
}

/// A key as it is in the store, behind the namespace of the client.
fn outside(key: &str) -> Vec<u8> {
    format!("namespaced:test{key}").into_bytes()
}

/// The services `KV` and `Watch`.
#[derive(Clone)]
struct Services {
    store: Arc<Mutex<Store>>,
    released_ranges: watch::Receiver<usize>,
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let services = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/etcdserverpb.KV/Range" => Grpc::new(ProstCodec::default()).unary(services, request).await,
                "/etcdserverpb.Watch/Watch" => {
                    Grpc::new(ProstCodec::default()).streaming(services, request).await
                }
                _ => Status::unimplemented("this stand-in has no such method").into_http(),
            })
        })
    }
}

impl UnaryService<wire::RangeRequest> for Services {
    type Response = wire::RangeResponse;
    type Future = Answer<Response<wire::RangeResponse>>;

    fn call(&mut self, request: Request<wire::RangeRequest>) -> Self::Future {
        let mut released_ranges = self.released_ranges.clone();
        let mut store = locked(&self.store);
        let answer = store.range(request.get_ref());
        let number = if store.holds_ranges {
            store.held_ranges += 1;
            store.held_ranges
        } else {
            0
        };
        Box::pin(async move {
            // The sender lives as long as the test.
            let _ = released_ranges.wait_for(|released| *released >= number).await;
            Ok(Response::new(answer))
        })
    }
}

impl StreamingService<wire::WatchRequest> for Services {
    type Response = wire::WatchResponse;
    type ResponseStream = ReceiverStream<Result<wire::WatchResponse, Status>>;
    type Future = Answer<Response<Self::ResponseStream>>;

    fn call(&mut self, request: Request<Streaming<wire::WatchRequest>>) -> Self::Future {
        let store = self.store.clone();
        Box::pin(async move {
            let union = request.into_inner().message().await?.and_then(|body| body.request_union);
            let Some(wire::watch_request::RequestUnion::CreateRequest(create)) = union else {
                return Err(Status::invalid_argument("a watch begins with its creation"));
            };
            let (events, answers) = mpsc::channel(100);
            locked(&store).begin_watch(&create, events);
            Ok(Response::new(ReceiverStream::new(answers)))
        })
    }
}
