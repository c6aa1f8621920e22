//! The etcd client: reads, unguarded writes and errors, with a deadline on every call.
//!
//! A client belongs to one namespace of one cluster. It is cheap to clone, and connects when it is first used. Reads of
//! keys are linearizable: they need a quorum, and see every write that was acknowledged before they began. A response
//! that does not come within the deadline is an error. etcd gets the same deadline, so that it does not go on with work
//! that nobody waits for. A stream has the deadline for the head of its response alone.
//!
//! Writes of a leader are in [`guard`](crate::guard), changes of the membership in [`members`](crate::members). Both
//! are methods of the same client.

use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use proto::etcdserverpb as wire;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::namespace::{KeySelector, NameError, Namespace};
use crate::transaction::{self, compare_mod_revision};
use crate::transport::{self, Endpoint};

/// The deadline of a call, unless the client has another one. An election in etcd takes one to three seconds.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);
/// The largest response: a page of the largest values that etcd takes (1.5 MiB) and their keys.
const MAX_RESPONSE_BYTES: usize = 160 << 20;
/// The most keys in one response; a longer listing is read in pages.
const PAGE_KEYS: usize = 100;
/// Most characters of an answer of etcd that an error quotes.
const MAX_STATUS_CHARS: usize = 1000;

/// An operation that failed in etcd, or whose outcome is unknown.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    /// The request names an invalid key or namespace; nothing was sent.
    #[error(transparent)]
    InvalidName(#[from] NameError),
    /// No response within the deadline. A write may have been made.
    #[error(
        "{operation} got no response from etcd within {} ms and may have been carried out; read again \
         before you repeat it",
        within.as_millis()
    )]
    Deadline {
        /// The operation and its object.
        operation: String,
        /// The deadline that passed.
        within: Duration,
    },
    /// No connection, or etcd has no quorum. A write may still have been made: a connection can break, and a
    /// quorum can be lost, between the write and the response.
    #[error(
        "{operation} failed, because etcd cannot be reached or has no quorum ({message}); it works again once most members run"
    )]
    Unavailable {
        /// The operation and its object.
        operation: String,
        /// The message of etcd or of the connection.
        message: String,
    },
    /// The revision was compacted: it is older than etcd's history.
    #[error("{operation} failed, because etcd no longer keeps that revision; read again")]
    Compacted {
        /// The operation and its object.
        operation: String,
    },
    /// etcd rejects the request, and will reject a repetition of it.
    #[error("{operation} was refused by etcd ({message})")]
    Rejected {
        /// The operation and its object.
        operation: String,
        /// The message in etcd's response.
        message: String,
    },
}

/// A key and its value as etcd has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key within its namespace.
    pub key: String,
    /// The value, as bytes that only the caller interprets.
    pub value: Vec<u8>,
    /// The store's revision when the key was created. A key that was deleted and created again has another one.
    pub create_revision: i64,
    /// The store's revision when the value was last written.
    pub mod_revision: i64,
}

/// Records as they all were at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The records, sorted by key.
    pub records: Vec<Record>,
    /// The store's revision of the listing.
    pub revision: i64,
}

/// The status of the connected member and of its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// The member id that etcd gave it.
    pub member_id: u64,
    /// The member id of the Raft leader; `None` while there is none.
    pub leader: Option<u64>,
    /// The newest revision that this member has applied; it may be behind the others.
    pub revision: i64,
    /// The version of etcd, such as `3.4.23`.
    pub version: String,
    /// Size of its database file in bytes.
    pub database_bytes: u64,
    /// Whether it is a learner, without a vote.
    pub learner: bool,
}

/// A client of one etcd cluster in one namespace.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
    endpoints: Arc<[Endpoint]>,
    namespace: Namespace,
    deadline: Duration,
}

impl Client {
    /// A client of the cluster that all these endpoints belong to. It must be created within a tokio runtime, and
    /// connects when it is first used.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, namespace: Namespace) -> Self {
        let endpoints: Arc<[Endpoint]> = endpoints.into();
        Self {
            channel: transport::lazy_channel(endpoints.clone()),
            endpoints,
            namespace,
            deadline: DEFAULT_DEADLINE,
        }
    }

    /// The same connection with another deadline for each call.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The same connection in another namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: Namespace) -> Self {
        Self { namespace, ..self.clone() }
    }

    /// The deadline of each call.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Reads one key; `None` if it does not exist.
    pub async fn get(&self, key: &str) -> Result<Option<Record>, EtcdError> {
        let request = wire::RangeRequest { key: self.namespace.to_etcd_key(key)?, ..Default::default() };
        let read = self.range(format!("reading {key}"), request).await?;
        Ok(read.kvs.into_iter().next().map(|pair| self.record(pair)))
    }

    /// Reads any number of keys as they all are at one revision.
    pub async fn list(&self, keys: &KeySelector) -> Result<Listing, EtcdError> {
        let (mut first, end) = keys.to_etcd_range(&self.namespace)?;
        let (mut records, mut revision) = (Vec::new(), 0);
        loop {
            let request = wire::RangeRequest {
                key: first,
                range_end: end.clone(),
                limit: PAGE_KEYS.try_into().unwrap_or(i64::MAX),
                // Every page is read at the revision of the first.
                revision,
                ..Default::default()
            };
            let page = self.range(format!("reading {}", keys.display_name()), request).await?;
            if revision == 0 {
                revision = page.header.as_ref().map_or(0, |header| header.revision);
            }
            first = page.kvs.last().map(|pair| [&pair.key[..], &[0]].concat()).unwrap_or_default();
            let full = page.more && !page.kvs.is_empty();
            records.extend(page.kvs.into_iter().map(|pair| self.record(pair)));
            if !full {
                return Ok(Listing { records, revision });
            }
        }
    }

    /// Writes a key whatever its value is, without a guard: for records that are written before anybody can lead, and
    /// for tests. Returns the store's revision of the write.
    pub async fn put_unguarded(&self, key: &str, value: &[u8]) -> Result<i64, EtcdError> {
        let put = self.put_operation(key, value, 0)?;
        let done = self.transact(format!("writing {key}"), vec![], vec![put], vec![]).await?;
        Ok(done.revision)
    }

    /// Writes all of these keys if none of them exists, without any other guard. Returns whether it did.
    pub async fn create_unguarded(
        &self,
        what: &str,
        records: &[(String, Vec<u8>)],
    ) -> Result<bool, EtcdError> {
        let (mut absent, mut puts) = (Vec::new(), Vec::new());
        for (key, value) in records {
            absent.push(compare_mod_revision(self.namespace.to_etcd_key(key)?, 0));
            puts.push(self.put_operation(key, value, 0)?);
        }
        let done = self.transact(format!("writing {what}"), absent, puts, vec![]).await?;
        Ok(done.succeeded)
    }

    /// Deletes keys without a guard. Returns the store's revision after it.
    pub async fn delete_unguarded(&self, keys: &KeySelector) -> Result<i64, EtcdError> {
        let delete = self.delete_operation(keys)?;
        let done =
            self.transact(format!("deleting {}", keys.display_name()), vec![], vec![delete], vec![]).await?;
        Ok(done.revision)
    }

    /// Compacts the history: etcd drops everything before this revision except the newest value of each key.
    pub async fn compact(&self, revision: i64) -> Result<(), EtcdError> {
        self.call_compact(wire::CompactionRequest { revision, physical: false }).await
    }

    /// Calls for a compaction. With `physical`, etcd responds once the room is free in the file of the connected member.
    pub(super) async fn call_compact(&self, request: wire::CompactionRequest) -> Result<(), EtcdError> {
        let revision = request.revision;
        let doing = format!("compacting etcd up to revision {revision}");
        let mut kv = self.kv();
        self.call_unary(doing, request, async |request| kv.compact(request).await).await.map(drop)
    }

    /// Reads the status of the connected member. It responds without a quorum.
    pub async fn status(&self) -> Result<MemberStatus, EtcdError> {
        let mut maintenance = self.maintenance();
        let doing = "reading the status of etcd".to_owned();
        let status = self
            .call_unary(doing, wire::StatusRequest {}, async |request| maintenance.status(request).await)
            .await?;
        let header = status.header.unwrap_or_default();
        Ok(MemberStatus {
            member_id: header.member_id,
            leader: (status.leader != 0).then_some(status.leader),
            revision: header.revision,
            version: status.version,
            database_bytes: status.db_size.try_into().unwrap_or(0),
            learner: status.is_learner,
        })
    }

    async fn range(
        &self,
        doing: String,
        range: wire::RangeRequest,
    ) -> Result<wire::RangeResponse, EtcdError> {
        let mut kv = self.kv();
        self.call_unary(doing, range, async |request| kv.range(request).await).await
    }

    /// Runs one transaction: all of `success` if every comparison holds, else all of `failure`.
    pub(super) async fn transact(
        &self,
        doing: String,
        compare: Vec<wire::Compare>,
        success: Vec<wire::RequestOp>,
        failure: Vec<wire::RequestOp>,
    ) -> Result<TransactionResult, EtcdError> {
        let request = wire::TxnRequest { compare, success, failure };
        let mut kv = self.kv();
        let done = self.call_unary(doing, request, async |request| kv.txn(request).await).await?;
        let mut read = Vec::new();
        for response in done.responses {
            if let Some(wire::response_op::Response::ResponseRange(range)) = response.response {
                read.extend(range.kvs.into_iter().map(|pair| self.record(pair)));
            }
        }
        let revision = done.header.map_or(0, |header| header.revision);
        Ok(TransactionResult { succeeded: done.succeeded, revision, reads: read })
    }

    pub(super) fn put_operation(
        &self,
        key: &str,
        value: &[u8],
        lease: i64,
    ) -> Result<wire::RequestOp, EtcdError> {
        Ok(transaction::put_operation(&self.namespace, key, value, lease)?)
    }

    pub(super) fn delete_operation(&self, keys: &KeySelector) -> Result<wire::RequestOp, EtcdError> {
        Ok(transaction::delete_operation(&self.namespace, keys)?)
    }

    pub(super) fn record(&self, pair: wire::KeyValue) -> Record {
        Record {
            key: self.namespace.decode_key(&pair.key),
            value: pair.value,
            create_revision: pair.create_revision,
            mod_revision: pair.mod_revision,
        }
    }

    /// Makes one call within the deadline.
    pub(super) async fn call_unary<Q, A>(
        &self,
        doing: String,
        request: Q,
        send: impl AsyncFnOnce(Request<Q>) -> Result<tonic::Response<A>, Status>,
    ) -> Result<A, EtcdError> {
        let mut request = Request::new(request);
        request.set_timeout(self.deadline);
        let answered = self.within_deadline(&doing, send(request)).await?;
        answered
            .map(tonic::Response::into_inner)
            .map_err(|status| classify_status(doing, &status, self.deadline))
    }

    /// Opens a stream of responses. The head of the first response must come within the deadline; what follows has no
    /// limit.
    ///
    /// etcd ends the stream when its member has lost the Raft leader, instead of falling silent.
    pub(super) async fn open_stream<Q, A>(
        &self,
        doing: &str,
        request: Q,
        send: impl AsyncFnOnce(Request<Q>) -> Result<tonic::Response<Streaming<A>>, Status>,
    ) -> Result<Streaming<A>, EtcdError> {
        let mut request = Request::new(request);
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let answered = self.within_deadline(doing, send(request)).await?;
        answered
            .map(tonic::Response::into_inner)
            .map_err(|status| classify_status(doing.to_owned(), &status, self.deadline))
    }

    /// The error of a stream that has ended with this status.
    pub(super) fn stream_error(&self, doing: &str, status: &Status) -> EtcdError {
        classify_status(doing.to_owned(), status, self.deadline)
    }

    async fn within_deadline<T>(&self, doing: &str, work: impl Future<Output = T>) -> Result<T, EtcdError> {
        tokio::time::timeout(self.deadline, work)
            .await
            .map_err(|_| EtcdError::Deadline { operation: doing.to_owned(), within: self.deadline })
    }

    pub(super) fn kv(&self) -> wire::kv_client::KvClient<Channel> {
        wire::kv_client::KvClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(super) fn watch(&self) -> wire::watch_client::WatchClient<Channel> {
        wire::watch_client::WatchClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(super) fn lease(&self) -> wire::lease_client::LeaseClient<Channel> {
        wire::lease_client::LeaseClient::new(self.channel.clone())
    }

    pub(super) fn cluster(&self) -> wire::cluster_client::ClusterClient<Channel> {
        wire::cluster_client::ClusterClient::new(self.channel.clone())
    }

    pub(super) fn maintenance(&self) -> wire::maintenance_client::MaintenanceClient<Channel> {
        wire::maintenance_client::MaintenanceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

/// The outcome of a transaction.
pub(super) struct TransactionResult {
    /// Whether every comparison held.
    pub(super) succeeded: bool,
    /// The store's revision after the transaction.
    pub(super) revision: i64,
    /// The records that its reads found.
    pub(super) reads: Vec<Record>,
}

/// Classifies a gRPC status. etcd has a code for most cases; the text distinguishes the rest.
fn classify_status(doing: String, status: &Status, within: Duration) -> EtcdError {
    let output = status_text(status);
    match status.code() {
        // The deadline is measured by etcd, by our channel and by the call itself; the first of them reports it.
        Code::DeadlineExceeded => EtcdError::Deadline { operation: doing, within },
        _ if error_causes(status).any(<dyn Error>::is::<tonic::TimeoutExpired>) => {
            EtcdError::Deadline { operation: doing, within }
        }
        // Both our end and the server's end of a broken connection report it by one of these codes.
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::Aborted => {
            EtcdError::Unavailable { operation: doing, message: output }
        }
        Code::OutOfRange if output.contains("compacted") => EtcdError::Compacted { operation: doing },
        _ => EtcdError::Rejected { operation: doing, message: output },
    }
}

fn error_causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |error| (*error).source())
}

/// The status's own text and the texts of its causes, each once, of limited length. What shows it to a person removes hidden
/// characters: this crate has no part in texts for people.
fn status_text(status: &Status) -> String {
    let mut messages = vec![status.message().to_owned()];
    for cause in error_causes(status) {
        let text = cause.to_string();
        if !messages.iter().any(|earlier| earlier.contains(&text)) {
            messages.push(text);
        }
    }
    messages.retain(|text| !text.is_empty());
    let text = if messages.is_empty() { format!("{:?}", status.code()) } else { messages.join(": ") };
    text.chars().take(MAX_STATUS_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_of_etcd_is_bounded() {
        let text = status_text(&Status::internal("x".repeat(5000)));
        assert_eq!(text.chars().count(), MAX_STATUS_CHARS);
    }

    #[test]
    fn statuses_are_classified_by_remedy() {
        let reported = |code, text: &str| {
            classify_status("reading /a".to_owned(), &Status::new(code, text), Duration::from_secs(5))
                .to_string()
        };
        assert_eq!(
            reported(Code::DeadlineExceeded, "context deadline exceeded"),
            "reading /a got no response from etcd within 5000 ms and may have been carried out; read again \
             before you repeat it"
        );
        assert_eq!(
            reported(Code::Unavailable, "etcdserver: no leader"),
            "reading /a failed, because etcd cannot be reached or has no quorum (etcdserver: no leader); it works again \
             once most members run"
        );
        assert_eq!(
            reported(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
            "reading /a failed, because etcd no longer keeps that revision; read again"
        );
        assert_eq!(
            reported(Code::InvalidArgument, "etcdserver: request is too large"),
            "reading /a was refused by etcd (etcdserver: request is too large)"
        );
    }
}
