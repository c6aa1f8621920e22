//! A model of etcd: one store that all members agree on, reached through a member that has a quorum.
//!
//! What Raft ensures is taken for granted: there is one order of all writes. What it leaves open is modelled. A member
//! without a quorum answers only with a member list that may be outdated. A write may have taken effect
//! if its response was lost. A lease expires when it is not renewed, and its keys are deleted. A removed member stops. A member
//! that was never started refuses to start if its initial member list differs from the current one. Transactions are
//! those of the product, in etcd's own messages.

use std::collections::BTreeMap;
use std::time::Duration;

use shepherd::etcd::client::Record;
use shepherd::proto::etcdserverpb as wire;
use wire::compare::{CompareResult, CompareTarget, TargetUnion};
use wire::request_op::Request;

/// The namespace in front of every key of the product.
pub(crate) const NAMESPACE: &str = "curator";

/// A member as the cluster knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) id: u64,
    /// Empty until it has started.
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) learner: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) value: Vec<u8>,
    pub(crate) created: i64,
    pub(crate) written: i64,
    lease: i64,
}

/// The result of a transaction.
pub(crate) struct Done {
    pub(crate) succeeded: bool,
    pub(crate) revision: i64,
    pub(crate) read: Vec<Record>,
    /// Keys that were written or deleted, and their former values.
    pub(crate) before: Vec<(String, Option<Pair>)>,
}

#[derive(Default)]
pub(crate) struct Etcd {
    pub(crate) revision: i64,
    pub(crate) pairs: BTreeMap<String, Pair>,
    pub(crate) members: Vec<Listed>,
    /// Time to live, and the expiry as etcd computes it.
    leases: BTreeMap<i64, (Duration, Duration)>,
    /// The member that leads the others.
    pub(crate) leader: Option<u64>,
    /// Numbers of memberships that have ended.
    pub(crate) removed: std::collections::BTreeSet<u64>,
}

/// A key as the product writes it.
fn inside(key: &[u8]) -> String {
    let text = String::from_utf8_lossy(key);
    let before = format!("namespaced:{NAMESPACE}");
    text.strip_prefix(&before).unwrap_or(&text).to_owned()
}

impl Etcd {
    pub(crate) fn voters(&self) -> impl Iterator<Item = &Listed> {
        self.members.iter().filter(|member| !member.learner)
    }

    pub(crate) fn member(&self, id: u64) -> Option<&Listed> {
        self.members.iter().find(|member| member.id == id)
    }

    pub(crate) fn record(&self, key: &str) -> Option<Record> {
        self.pairs.get(key).map(|pair| Record {
            key: key.to_owned(),
            value: pair.value.clone(),
            create_revision: pair.created,
            mod_revision: pair.written,
        })
    }

    /// Records below a prefix, which ends with a slash.
    pub(crate) fn under(&self, prefix: &str) -> Vec<Record> {
        let keys = self.pairs.range(prefix.to_owned()..).map(|(key, _)| key);
        keys.take_while(|key| key.starts_with(prefix)).filter_map(|key| self.record(key)).collect()
    }

    /// One transaction, as etcd does it.
    pub(crate) fn transact(&mut self, body: &wire::TxnRequest) -> Done {
        let succeeded = body.compare.iter().all(|compare| self.holds(compare));
        let requests = if succeeded { &body.success } else { &body.failure };
        let requests: Vec<&Request> = requests.iter().filter_map(|op| op.request.as_ref()).collect();
        let writes = |op: &&Request| matches!(op, Request::RequestPut(_) | Request::RequestDeleteRange(_));
        if requests.iter().any(writes) {
            self.revision += 1;
        }
        let (mut read, mut before) = (Vec::new(), Vec::new());
        for request in requests {
            match request {
                Request::RequestRange(range) => read.extend(self.record(&inside(&range.key))),
                Request::RequestPut(put) => {
                    let key = inside(&put.key);
                    let old = self.pairs.get(&key).cloned();
                    let created = old.as_ref().map_or(self.revision, |old| old.created);
                    let (value, lease) = (put.value.clone(), put.lease);
                    let pair = Pair { value, created, written: self.revision, lease };
                    self.pairs.insert(key.clone(), pair);
                    before.push((key, old));
                }
                Request::RequestDeleteRange(delete) => {
                    let key = inside(&delete.key);
                    let old = self.pairs.remove(&key);
                    before.push((key, old));
                }
            }
        }
        Done { succeeded, revision: self.revision, read, before }
    }

    fn holds(&self, compare: &wire::Compare) -> bool {
        let pair = self.pairs.get(&inside(&compare.key));
        match (compare.target(), &compare.target_union) {
            (CompareTarget::Create, Some(TargetUnion::CreateRevision(wanted))) => {
                pair.map_or(0, |pair| pair.created) == *wanted
            }
            (CompareTarget::Mod, Some(TargetUnion::ModRevision(wanted))) if !compare.range_end.is_empty() => {
                let mut pairs = self.pairs.range(inside(&compare.key)..inside(&compare.range_end));
                compare.result() == CompareResult::Less && pairs.all(|(_, pair)| pair.written < *wanted)
            }
            (CompareTarget::Mod, Some(TargetUnion::ModRevision(wanted))) => {
                pair.map_or(0, |pair| pair.written) == *wanted
            }
            _ => false,
        }
    }

    pub(crate) fn grant(&mut self, id: i64, ttl: Duration, now: Duration) {
        self.leases.insert(id, (ttl, now + ttl));
    }

    /// Whether the lease exists; if so, it lives for its whole time from now on.
    pub(crate) fn keep_alive(&mut self, id: i64, now: Duration) -> bool {
        self.leases.get_mut(&id).map(|(ttl, until)| *until = now + *ttl).is_some()
    }

    pub(crate) fn revoke(&mut self, id: i64) {
        if self.leases.remove(&id).is_some() {
            self.revision += 1;
            self.pairs.retain(|_, pair| pair.lease != id);
        }
    }

    /// Ends leases that were not renewed. Returns how many.
    pub(crate) fn expire(&mut self, now: Duration) -> usize {
        let over: Vec<i64> =
            self.leases.iter().filter(|(_, (_, until))| *until <= now).map(|(id, _)| *id).collect();
        for id in &over {
            self.revoke(*id);
        }
        over.len()
    }

    /// Whether etcd itself permits the removal of a voting member: those that ever started must be a quorum of the
    /// remaining ones.
    pub(crate) fn lets_go(&self, id: u64) -> bool {
        let left: Vec<&Listed> = self.voters().filter(|member| member.id != id).collect();
        let started = left.iter().filter(|member| !member.name.is_empty()).count();
        started > left.len() / 2
    }
}
