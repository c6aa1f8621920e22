//! gRPC service Credentials: owner keys, owner certificates, revocation.
//!
//! A revocation, of a key too, returns once this curator itself rejects what was revoked, and every stream that relied
//! on it is closed. Removing an owner key takes it out of the cluster's record and adds it to the revocations in one
//! transaction. A certificate that is claimed at that moment is rejected from then on.
//!
//! Nodes learn of a revoked curator from the next statement of the authority (`statements`). The curator itself steps
//! down. So the last consensus member that could lead is not revoked and not removed. The membership of a revoked node in
//! etcd ends as soon as the remaining members are a quorum: the leader compares members with what is revoked
//! ([`plan_sync`](crate::membership::plan_sync)).

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use curator_client::certificate::{CLOCK_SKEW, InvalidSerial, Serial};
use curator_client::cluster::{Cluster, cluster_record_key};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::peer_identity::Peer;
use curator_client::pki::{MAX_OWNER_LIFETIME, NODE_LIFETIME};
use etcd::guard::{ExpectedRevision, KeyChange};
use model::time::after;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_server;
use tonic::{Code, Request, Response, Status};

use crate::credential::{Credential, CredentialHolder, Revocation};
use crate::membership::{EtcdMember, Nodes, check_member_removal, check_revocation, match_members_to_nodes};
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext};
use crate::service::nodes::parse_node_id;
use crate::service::store::{Versioned, record_change};

#[derive(Clone, Debug)]
pub(super) struct CredentialsService(pub(super) Arc<LeaderContext>);

impl CredentialsService {
    async fn issue_owner_credential(
        &self,
        name: &str,
        key: &PublicKey,
        lifetime_ms: u64,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let lifetime = Duration::from_millis(lifetime_ms);
        let (credential, issued, kept) = self.0.issue_owner_certificate(name, key, lifetime)?;
        self.0.store.write(&[kept]).await?;
        tracing::info!(owner = name, serial = %credential.serial, "an owner's certificate was issued");
        Ok(Response::new(wire::IssueOwnerResponse {
            certificate: issued.certificate,
            ca_certificate: self.0.authority().anchor().certificate.clone(),
            credential: Some(credential.to_wire(false)),
        }))
    }

    async fn load_cluster(&self) -> Result<Versioned<Cluster>, ServiceError> {
        let gone = || ServiceError::rejected(Code::Internal, "the record of the cluster is gone");
        self.0.store.cluster().await?.ok_or_else(gone)
    }

    /// Checks that another curator could lead if all certificates of this node were revoked.
    async fn check_node_revocation(&self, node: NodeId) -> Result<(), ServiceError> {
        let leading = &self.0;
        // Members before nodes, as `membership::plan_sync` requires.
        let members = leading.list_members().await?;
        let nodes = leading.store.nodes().await?.nodes;
        let revoked = leading.revoked_members(&members, &nodes).await?;
        Ok(check_revocation(node, &members, &nodes, &revoked)?)
    }

    async fn resolve_revocation(
        &self,
        which: wire::revoke_credentials_request::Target,
    ) -> Result<Revocation, ServiceError> {
        use wire::revoke_credentials_request::Target;
        match which {
            Target::NodeId(id) => Ok(Revocation::Node(parse_node_id(&id)?)),
            Target::Serial(serial) => {
                let serial: Serial = serial
                    .parse()
                    .map_err(|error: InvalidSerial| ServiceError::invalid_argument(error.to_string()))?;
                let known = self.0.store.credential(serial).await?;
                // A certificate that is not recorded could be valid for as long as any.
                let longest = NODE_LIFETIME.max(MAX_OWNER_LIFETIME) + CLOCK_SKEW;
                let until = known.map_or_else(
                    || after(self.0.clock.now(), longest),
                    |known| known.value.validity.not_after,
                );
                Ok(Revocation::Certificate(serial, until))
            }
        }
    }
}

impl LeaderContext {
    /// Checks that a curator that can lead remains when the membership of this node ends. The caller holds the lock of
    /// membership, and has read the members and then the nodes under it.
    pub(super) async fn check_member_removal(
        &self,
        node: NodeId,
        members: &[EtcdMember],
        nodes: &Nodes,
    ) -> Result<(), ServiceError> {
        let revoked = self.revoked_members(members, nodes).await?;
        Ok(check_member_removal(node, members, nodes, &revoked)?)
    }

    /// Those nodes of these members of etcd that have only revoked certificates.
    async fn revoked_members(
        &self,
        members: &[EtcdMember],
        nodes: &Nodes,
    ) -> Result<BTreeSet<NodeId>, ServiceError> {
        let mut revoked = BTreeSet::new();
        for id in match_members_to_nodes(members, nodes).by_node.into_keys() {
            if self.store.is_node_revoked(id).await? {
                revoked.insert(id);
            }
        }
        Ok(revoked)
    }
}

#[tonic::async_trait]
impl credentials_server::Credentials for CredentialsService {
    async fn issue_owner(
        &self,
        request: Request<wire::IssueOwnerRequest>,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let body = request.into_inner();
        let key = PublicKey::from_slice(&body.public_key).map_err(ServiceError::invalid_argument)?;
        self.issue_owner_credential(&body.name, &key, body.lifetime_ms).await
    }

    async fn claim_owner(
        &self,
        request: Request<wire::ClaimOwnerRequest>,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let key = Caller::from_request(&request)?.require_key()?;
        // Read the record now: the keys may have changed since this curator began to lead.
        if !self.load_cluster().await?.value.owner_keys.contains(&key) {
            let sentence = format!("key {key} is not that of an owner of this cluster");
            return Err(ServiceError::rejected(Code::PermissionDenied, sentence).into());
        }
        let name = format!("owner-{}", hex::encode(&key.0[..4]));
        self.issue_owner_credential(&name, &key, request.into_inner().lifetime_ms).await
    }

    async fn add_owner_key(
        &self,
        request: Request<wire::AddOwnerKeyRequest>,
    ) -> Result<Response<wire::AddOwnerKeyResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let key =
            PublicKey::from_slice(&request.get_ref().public_key).map_err(ServiceError::invalid_argument)?;
        let store = &self.0.store;
        let added = store.retry_on_conflict(|| async {
            let known = self.load_cluster().await?;
            let removed = store.is_owner_removed(key).await?;
            let Some(more) = known.value.with_owner_key(key, removed)? else { return Ok(false) };
            store.write(&[record_change(cluster_record_key()?, more.encode(), Some(&known))]).await?;
            Ok(true)
        });
        if added.await? {
            tracing::warn!(%key, actor = %caller.peer, "a key may claim owners' certificates from now on");
        }
        Ok(Response::new(wire::AddOwnerKeyResponse {}))
    }

    async fn remove_owner_key(
        &self,
        request: Request<wire::RemoveOwnerKeyRequest>,
    ) -> Result<Response<wire::RemoveOwnerKeyResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let Peer::Owner { key: by, .. } = caller.peer else {
            return Err(Status::internal("only an owner comes here: please report it"));
        };
        let key =
            PublicKey::from_slice(&request.get_ref().public_key).map_err(ServiceError::invalid_argument)?;
        let leading = &self.0;
        let revocation = Revocation::Owner(key);
        let record = revocation.encode(&caller.peer.to_string(), leading.clock.now());
        let removed = leading.store.retry_on_conflict(|| async {
            let known = self.load_cluster().await?;
            let fewer = known.value.without_owner_key(key, by)?;
            if fewer == known.value && leading.store.is_owner_removed(key).await? {
                return Ok(false);
            }
            // Always write the cluster's record, so that a concurrent addition of this key conflicts and decides again.
            let changes = [
                record_change(cluster_record_key()?, fewer.encode(), Some(&known)),
                KeyChange::Put {
                    key: revocation.etcd_key()?,
                    value: record.clone(),
                    expected: ExpectedRevision::Any,
                },
            ];
            leading.store.write(&changes).await?;
            Ok(true)
        });
        if removed.await? {
            tracing::warn!(%key, actor = %caller.peer, "an owner's key was removed");
        }
        leading.wait_until_cached(|seen| seen.revocations.owners.contains(&key)).await?;
        Ok(Response::new(wire::RemoveOwnerKeyResponse {}))
    }

    async fn revoke(
        &self,
        request: Request<wire::RevokeCredentialsRequest>,
    ) -> Result<Response<wire::RevokeCredentialsResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let none = || {
            ServiceError::invalid_argument(
                "it does not name what to revoke: give a serial number or a node id",
            )
        };
        let which = request.into_inner().target.ok_or_else(none)?;
        let leading = &self.0;
        let revocation = self.resolve_revocation(which).await?;
        let key = revocation.etcd_key().map_err(ServiceError::from)?;
        let record = revocation.encode(&caller.peer.to_string(), leading.clock.now());
        {
            // Two members are never revoked beside each other: each could count on the other one.
            let _alone = leading.lock_membership().await;
            if let Revocation::Node(node) = revocation {
                self.check_node_revocation(node).await?;
            }
            match leading.store.write(&[record_change::<()>(key, record, None)]).await {
                // It was revoked before.
                Ok(()) | Err(ServiceError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        tracing::warn!(?revocation, actor = %caller.peer, "credentials were revoked");
        leading
            .wait_until_cached(|seen| match &revocation {
                Revocation::Certificate(serial, _) => seen.revocations.serials.contains_key(serial),
                Revocation::Node(node) => seen.revocations.nodes.contains(node),
                Revocation::Owner(key) => seen.revocations.owners.contains(key),
            })
            .await?;
        Ok(Response::new(wire::RevokeCredentialsResponse {}))
    }

    async fn list(
        &self,
        _: Request<wire::ListCredentialsRequest>,
    ) -> Result<Response<wire::ListCredentialsResponse>, Status> {
        let leading = &self.0;
        let now = leading.clock.now();
        let mut kept = leading.store.credentials().await?;
        kept.retain(|credential| now <= credential.value.validity.not_after);
        kept.sort_by_key(|kept| (Reverse(kept.value.validity.not_before), kept.value.serial));
        let seen = leading.cache.records();
        let credentials = kept.iter().map(|Versioned { value: credential, .. }: &Versioned<Credential>| {
            let revoked = seen.revocations.serials.contains_key(&credential.serial)
                || match &credential.holder {
                    CredentialHolder::Node(node) => seen.revocations.nodes.contains(node),
                    CredentialHolder::Owner(_) => seen.revocations.owners.contains(&credential.key),
                };
            credential.to_wire(revoked)
        });
        Ok(Response::new(wire::ListCredentialsResponse { credentials: credentials.collect() }))
    }
}
