//! Parts of an etcd transaction: comparisons and operations.
//!
//! A transaction of etcd is a list of comparisons, the operations that are done if all of them hold, and those that are
//! done if one fails. etcd does all of this at one revision, so nothing is written between the comparison and the
//! write. [`Client::transact`](crate::client::Client::transact) sends it.
//!
//! A comparison of one key takes the key as etcd stores it, with the namespace. All other parts add the namespace
//! themselves.

use proto::etcdserverpb as wire;

use crate::namespace::{KeySelector, NameError, Namespace};

/// A part of a transaction: write the key, with a lease at whose end it is deleted; 0 is no lease.
pub(super) fn put_operation(
    namespace: &Namespace,
    key: &str,
    value: &[u8],
    lease: i64,
) -> Result<wire::RequestOp, NameError> {
    let put = wire::PutRequest { key: namespace.to_etcd_key(key)?, value: value.to_vec(), lease };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestPut(put)) })
}

/// A part of a transaction: delete these keys.
pub(super) fn delete_operation(
    namespace: &Namespace,
    keys: &KeySelector,
) -> Result<wire::RequestOp, NameError> {
    let (key, range_end) = keys.to_etcd_range(namespace)?;
    let delete = wire::DeleteRangeRequest { key, range_end };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestDeleteRange(delete)) })
}

/// A part of a transaction: read the key.
pub(super) fn get_operation(namespace: &Namespace, key: &str) -> Result<wire::RequestOp, NameError> {
    let get = wire::RangeRequest { key: namespace.to_etcd_key(key)?, ..Default::default() };
    Ok(wire::RequestOp { request: Some(wire::request_op::Request::RequestRange(get)) })
}

/// A comparison for a transaction: the key was created at this revision; 0 means that it does not exist.
pub(super) fn compare_create_revision(key: Vec<u8>, revision: i64) -> wire::Compare {
    wire::Compare {
        result: wire::compare::CompareResult::Equal.into(),
        target: wire::compare::CompareTarget::Create.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

/// A comparison for a transaction: the key was last written at this revision; 0 means that it does not exist.
pub(super) fn compare_mod_revision(key: Vec<u8>, revision: i64) -> wire::Compare {
    wire::Compare {
        result: wire::compare::CompareResult::Equal.into(),
        target: wire::compare::CompareTarget::Mod.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::ModRevision(revision)),
        range_end: Vec::new(),
    }
}

/// A comparison for a transaction: none of these keys was written after this revision. It holds if there are no such
/// keys.
pub(super) fn compare_not_modified_since(
    namespace: &Namespace,
    keys: &KeySelector,
    revision: i64,
) -> Result<wire::Compare, NameError> {
    let (key, range_end) = keys.to_etcd_range(namespace)?;
    Ok(wire::Compare {
        result: wire::compare::CompareResult::Less.into(),
        target: wire::compare::CompareTarget::Mod.into(),
        key,
        target_union: Some(wire::compare::TargetUnion::ModRevision(revision + 1)),
        range_end,
    })
}
