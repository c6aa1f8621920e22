//! One client of an etcd cluster, in one namespace, with a limit on every call.
//!
//! A client is cheap to clone, and connects when it is first used. Reads are linearizable: they need a quorum, and see
//! all that was acknowledged before they began. An answer that does not come within the deadline is an error, and
//! etcd is told the same deadline, so that it does not go on with what nobody waits for.

use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

pub use super::transport::Endpoint;

use crate::etcd::namespace::{Keys, NameError, Namespace};
use crate::etcd::transport;
use crate::proto::etcdserverpb as wire;

/// How long a call may take unless the client is told otherwise. An election in etcd takes one to three seconds.
pub const DEADLINE: Duration = Duration::from_secs(5);
/// The largest answer: a page of the largest values that etcd takes (1.5 MiB) and their keys.
const ANSWER_LIMIT_BYTES: usize = 160 << 20;
/// Keys of one answer.
const PAGE: usize = 100;

/// What etcd did not do, and why.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    /// What was asked cannot be asked.
    #[error(transparent)]
    Name(#[from] NameError),
    /// No answer. What was to be written may be written.
    #[error(
        "{doing} got no answer from etcd within {} ms, and may have been done; look again before it is repeated",
        within.as_millis()
    )]
    Deadline {
        /// What was being done, to what.
        doing: String,
        /// The limit.
        within: Duration,
    },
    /// No connection, or etcd has no quorum. What was to be written may be written all the same: a connection can
    /// break, and a quorum be lost, between the deed and the answer.
    #[error(
        "{doing} failed, because etcd cannot be reached or has no quorum ({said}); it works again once most members run"
    )]
    Away {
        /// What was being done, to what.
        doing: String,
        /// What etcd, or the connection, said.
        said: String,
    },
    /// The revision is older than what etcd keeps.
    #[error("{doing} failed, because etcd no longer keeps that revision; read anew")]
    Compacted {
        /// What was being done, to what.
        doing: String,
    },
    /// etcd will not do it, however often it is asked.
    #[error("{doing} was refused by etcd ({said})")]
    Refused {
        /// What was being done, to what.
        doing: String,
        /// What etcd said.
        said: String,
    },
}

/// A key and its value as etcd has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key within its namespace.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The store's revision when the key came to be; a key that was deleted and made again has another.
    pub create_revision: i64,
    /// The store's revision when the value was last written.
    pub mod_revision: i64,
}

/// Records as they all were at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// In the order of their keys.
    pub records: Vec<Record>,
    /// The store's revision at that moment.
    pub revision: i64,
}

/// What the member that was asked knows of itself and its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its member id.
    pub member: u64,
    /// The member id of the leader of the members; `None` while there is none.
    pub leader: Option<u64>,
    /// How far this member is, which may be behind the others.
    pub revision: i64,
    /// Of etcd: `3.4.23`.
    pub version: String,
    /// Size of its database file.
    pub database_bytes: u64,
    /// Whether it only learns, and does not vote.
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

/// TLS to etcd: who may answer, and who we are. Certificates are DER, our own before those that signed it.
///
/// With the one TLS provider named, because a library must not rely on which one its process has chosen.
pub fn tls(
    authorities: &[CertificateDer<'_>],
    own_chain: Vec<CertificateDer<'static>>,
    own_key: PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority.clone().into_owned())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(own_chain, own_key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

impl Client {
    /// A client of the cluster that all these endpoints belong to. It must be made within a tokio runtime, and
    /// connects when it is first used.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, namespace: Namespace) -> Self {
        let endpoints: Arc<[Endpoint]> = endpoints.into();
        Self { channel: transport::channel(endpoints.clone()), endpoints, namespace, deadline: DEADLINE }
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

    /// How long each call may take.
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

    /// Reads one key; `None` when it is not there.
    pub async fn get(&self, key: &str) -> Result<Option<Record>, EtcdError> {
        let request = wire::RangeRequest { key: self.namespace.outside(key)?, ..Default::default() };
        let read = self.range(format!("reading {key}"), request).await?;
        Ok(read.kvs.into_iter().next().map(|pair| self.record(pair)))
    }

    /// Reads keys as they all are at one moment, however many.
    pub async fn list(&self, keys: &Keys) -> Result<Listing, EtcdError> {
        let (mut first, end) = keys.outside(&self.namespace)?;
        let (mut records, mut revision) = (Vec::new(), 0);
        loop {
            let request = wire::RangeRequest {
                key: first,
                range_end: end.clone(),
                limit: PAGE.try_into().unwrap_or(i64::MAX),
                // Every page as it was when the first was read.
                revision,
                ..Default::default()
            };
            let page = self.range(format!("reading {}", keys.name()), request).await?;
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

    /// Writes a key whatever it was, guarded by nothing: for what is written before anybody can lead, and for tests.
    /// Gives the store's revision of it.
    pub async fn put_unguarded(&self, key: &str, value: &[u8]) -> Result<i64, EtcdError> {
        let put = self.put_operation(key, value, 0)?;
        let done = self.transact(format!("writing {key}"), vec![], vec![put], vec![]).await?;
        Ok(done.revision)
    }

    /// Writes all of these keys if none of them is there, guarded by nothing else. Says whether it did.
    pub async fn create_unguarded(
        &self,
        what: &str,
        records: &[(String, Vec<u8>)],
    ) -> Result<bool, EtcdError> {
        let (mut absent, mut puts) = (Vec::new(), Vec::new());
        for (key, value) in records {
            absent.push(written_at(self.namespace.outside(key)?, 0));
            puts.push(self.put_operation(key, value, 0)?);
        }
        let done = self.transact(format!("writing {what}"), absent, puts, vec![]).await?;
        Ok(done.succeeded)
    }

    /// Deletes keys, guarded by nothing. Gives the store's revision after it.
    pub async fn delete_unguarded(&self, keys: &Keys) -> Result<i64, EtcdError> {
        let delete = self.delete_operation(keys)?;
        let done = self.transact(format!("deleting {}", keys.name()), vec![], vec![delete], vec![]).await?;
        Ok(done.revision)
    }

    /// Has etcd forget all that was before this revision but the newest value of each key.
    pub async fn compact(&self, revision: i64) -> Result<(), EtcdError> {
        let request = wire::CompactionRequest { revision, physical: false };
        let doing = format!("compacting etcd up to revision {revision}");
        let mut kv = self.kv();
        self.call(doing, request, async |request| kv.compact(request).await).await.map(drop)
    }

    /// Asks the member that we are connected to how it is. It answers without a quorum.
    pub async fn status(&self) -> Result<MemberStatus, EtcdError> {
        let mut maintenance = self.maintenance();
        let doing = "asking etcd how it is".to_owned();
        let status = self
            .call(doing, wire::StatusRequest {}, async |request| maintenance.status(request).await)
            .await?;
        let header = status.header.unwrap_or_default();
        Ok(MemberStatus {
            member: header.member_id,
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
        self.call(doing, range, async |request| kv.range(request).await).await
    }

    /// One transaction: all of `success` if every comparison holds, else all of `failure`.
    pub(super) async fn transact(
        &self,
        doing: String,
        compare: Vec<wire::Compare>,
        success: Vec<wire::RequestOp>,
        failure: Vec<wire::RequestOp>,
    ) -> Result<Transacted, EtcdError> {
        let request = wire::TxnRequest { compare, success, failure };
        let mut kv = self.kv();
        let done = self.call(doing, request, async |request| kv.txn(request).await).await?;
        let mut read = Vec::new();
        for response in done.responses {
            if let Some(wire::response_op::Response::ResponseRange(range)) = response.response {
                read.extend(range.kvs.into_iter().map(|pair| self.record(pair)));
            }
        }
        let revision = done.header.map_or(0, |header| header.revision);
        Ok(Transacted { succeeded: done.succeeded, revision, read })
    }

    pub(super) fn put_operation(
        &self,
        key: &str,
        value: &[u8],
        lease: i64,
    ) -> Result<wire::RequestOp, EtcdError> {
        put_operation(&self.namespace, key, value, lease)
    }

    pub(super) fn delete_operation(&self, keys: &Keys) -> Result<wire::RequestOp, EtcdError> {
        delete_operation(&self.namespace, keys)
    }

    pub(super) fn record(&self, pair: wire::KeyValue) -> Record {
        Record {
            key: self.namespace.inside(&pair.key),
            value: pair.value,
            create_revision: pair.create_revision,
            mod_revision: pair.mod_revision,
        }
    }

    /// Makes one call, within the deadline.
    pub(super) async fn call<Q, A>(
        &self,
        doing: String,
        request: Q,
        send: impl AsyncFnOnce(Request<Q>) -> Result<tonic::Response<A>, Status>,
    ) -> Result<A, EtcdError> {
        let mut request = Request::new(request);
        request.set_timeout(self.deadline);
        let answered = self.within_deadline(&doing, send(request)).await?;
        answered.map(tonic::Response::into_inner).map_err(|status| told(doing, &status, self.deadline))
    }

    /// Opens a stream of answers: the first answer's head must come within the deadline, what follows takes its time.
    ///
    /// etcd ends the stream when its member has lost the leader of the members, instead of falling silent.
    pub(super) async fn open<Q, A>(
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
            .map_err(|status| told(doing.to_owned(), &status, self.deadline))
    }

    /// The error of a stream that has ended.
    pub(super) fn stream_error(&self, doing: &str, status: &Status) -> EtcdError {
        told(doing.to_owned(), status, self.deadline)
    }

    async fn within_deadline<T>(&self, doing: &str, work: impl Future<Output = T>) -> Result<T, EtcdError> {
        tokio::time::timeout(self.deadline, work)
            .await
            .map_err(|_| EtcdError::Deadline { doing: doing.to_owned(), within: self.deadline })
    }

    pub(super) fn kv(&self) -> wire::kv_client::KvClient<Channel> {
        wire::kv_client::KvClient::new(self.channel.clone()).max_decoding_message_size(ANSWER_LIMIT_BYTES)
    }

    pub(super) fn watch(&self) -> wire::watch_client::WatchClient<Channel> {
        wire::watch_client::WatchClient::new(self.channel.clone())
            .max_decoding_message_size(ANSWER_LIMIT_BYTES)
    }

    pub(super) fn lease(&self) -> wire::lease_client::LeaseClient<Channel> {
        wire::lease_client::LeaseClient::new(self.channel.clone())
    }

    pub(super) fn cluster(&self) -> wire::cluster_client::ClusterClient<Channel> {
        wire::cluster_client::ClusterClient::new(self.channel.clone())
    }

    pub(super) fn maintenance(&self) -> wire::maintenance_client::MaintenanceClient<Channel> {
        wire::maintenance_client::MaintenanceClient::new(self.channel.clone())
            .max_decoding_message_size(ANSWER_LIMIT_BYTES)
    }
}

/// What became of a transaction.
pub(super) struct Transacted {
    /// Whether every comparison held.
    pub(super) succeeded: bool,
    /// The store's revision after it.
    pub(super) revision: i64,
    /// What its reads found.
    pub(super) read: Vec<Record>,
}

/// A part of a transaction: the key gets this value, until this lease ends; 0 is none.
pub(super) fn put_operation(
    namespace: &Namespace,
    key: &str,
    value: &[u8],
    lease: i64,
) -> Result<wire::RequestOp, EtcdError> {
    let put = wire::PutRequest { key: namespace.outside(key)?, value: value.to_vec(), lease };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestPut(put)) })
}

/// A part of a transaction: these are deleted.
pub(super) fn delete_operation(namespace: &Namespace, keys: &Keys) -> Result<wire::RequestOp, EtcdError> {
    let (key, range_end) = keys.outside(namespace)?;
    let delete = wire::DeleteRangeRequest { key, range_end };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestDeleteRange(delete)) })
}

/// A part of a transaction: the key is read.
pub(super) fn get_operation(namespace: &Namespace, key: &str) -> Result<wire::RequestOp, EtcdError> {
    let get = wire::RangeRequest { key: namespace.outside(key)?, ..Default::default() };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestRange(get)) })
}

/// A comparison for a transaction: the key came to be at this revision; 0 when it is to be absent.
pub(super) fn created_at(key: Vec<u8>, revision: i64) -> wire::Compare {
    wire::Compare {
        result: wire::compare::CompareResult::Equal.into(),
        target: wire::compare::CompareTarget::Create.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

/// A comparison for a transaction: the key was last written at this revision; 0 when it is to be absent.
pub(super) fn written_at(key: Vec<u8>, revision: i64) -> wire::Compare {
    wire::Compare {
        result: wire::compare::CompareResult::Equal.into(),
        target: wire::compare::CompareTarget::Mod.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::ModRevision(revision)),
        range_end: Vec::new(),
    }
}

/// A comparison for a transaction: none of these was written after this revision. Holds where there is none.
pub(super) fn none_written_after(
    namespace: &Namespace,
    keys: &Keys,
    revision: i64,
) -> Result<wire::Compare, EtcdError> {
    let (key, range_end) = keys.outside(namespace)?;
    Ok(wire::Compare {
        result: wire::compare::CompareResult::Less.into(),
        target: wire::compare::CompareTarget::Mod.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::ModRevision(revision + 1)),
        range_end,
    })
}

/// What a status of gRPC means. etcd has a code for most of it; the text tells the rest.
fn told(doing: String, status: &Status, within: Duration) -> EtcdError {
    let said = sentence(status);
    match status.code() {
        // Whoever counts the time first says it: etcd, our side of the channel, or the call itself.
        Code::DeadlineExceeded => EtcdError::Deadline { doing, within },
        _ if causes(status).any(<dyn Error>::is::<tonic::TimeoutExpired>) => {
            EtcdError::Deadline { doing, within }
        }
        // The server's or our own end of a connection that broke says so in one of these.
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::Aborted => {
            EtcdError::Away { doing, said }
        }
        Code::OutOfRange if said.contains("compacted") => EtcdError::Compacted { doing },
        _ => EtcdError::Refused { doing, said },
    }
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |error| (*error).source())
}

/// The status's own text, with what caused it, each said once.
fn sentence(status: &Status) -> String {
    let mut said = vec![status.message().to_owned()];
    for cause in causes(status) {
        let text = cause.to_string();
        if !said.iter().any(|earlier| earlier.contains(&text)) {
            said.push(text);
        }
    }
    said.retain(|text| !text.is_empty());
    if said.is_empty() { format!("{:?}", status.code()) } else { said.join(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_told_apart_by_what_can_be_done_about_them() {
        let told = |code, said: &str| {
            told("reading /a".to_owned(), &Status::new(code, said), Duration::from_secs(5)).to_string()
        };
        assert_eq!(
            told(Code::DeadlineExceeded, "context deadline exceeded"),
            "reading /a got no answer from etcd within 5000 ms, and may have been done; look again before it is repeated"
        );
        assert_eq!(
            told(Code::Unavailable, "etcdserver: no leader"),
            "reading /a failed, because etcd cannot be reached or has no quorum (etcdserver: no leader); it works again \
             once most members run"
        );
        assert_eq!(
            told(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
            "reading /a failed, because etcd no longer keeps that revision; read anew"
        );
        assert_eq!(
            told(Code::InvalidArgument, "etcdserver: request is too large"),
            "reading /a was refused by etcd (etcdserver: request is too large)"
        );
    }
}
