//! Owners' keys and certificates, and the end of anybody's.
//!
//! A revocation, of a key too, is answered once this curator's own door refuses what was revoked, and every stream that
//! stood on it is closed. A key that is removed goes from the cluster's record and stands among what is revoked from the
//! same transaction on: whoever claims a certificate at that moment has one that the door refuses.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Request, Response, Status};

use crate::curator::cluster::{Cluster, cluster_key};
use crate::curator::credential::{Credential, Holder, Revocation};
use crate::curator::node_id::PublicKey;
use crate::curator::peer::Peer;
use crate::curator::pki::{CLOCK_SKEW, LONGEST_OWNER_LIFETIME, NODE_LIFETIME, NoSerial, Serial};
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Caller, Leading};
use crate::curator::service::nodes::parse_node;
use crate::curator::service::store::{Stored, put};
use crate::etcd::guard::{Change, Expected};
use crate::model::time::after;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::credentials_server;

/// The service.
#[derive(Clone, Debug)]
pub struct CredentialsService(pub Arc<Leading>);

impl CredentialsService {
    async fn issue(
        &self,
        name: &str,
        key: &PublicKey,
        lifetime_ms: u64,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let lifetime = Duration::from_millis(lifetime_ms);
        let (credential, issued, kept) = self.0.issue_owner(name, key, lifetime)?;
        self.0.store.write(&[kept]).await?;
        tracing::info!(owner = name, serial = %credential.serial, "an owner's certificate was issued");
        Ok(Response::new(wire::IssueOwnerResponse {
            certificate: issued.certificate,
            ca_certificate: self.0.authority.anchor().certificate.clone(),
            credential: Some(credential.to_wire(false)),
        }))
    }

    async fn cluster(&self) -> Result<Stored<Cluster>, Failure> {
        let gone = || Failure::refused(Code::Internal, "the record of the cluster is gone");
        self.0.store.cluster().await?.ok_or_else(gone)
    }

    async fn revocation(
        &self,
        which: wire::revoke_credentials_request::Which,
    ) -> Result<Revocation, Failure> {
        use wire::revoke_credentials_request::Which;
        match which {
            Which::NodeId(id) => Ok(Revocation::Node(parse_node(&id)?)),
            Which::Serial(serial) => {
                let serial: Serial =
                    serial.parse().map_err(|error: NoSerial| Failure::invalid(error.to_string()))?;
                let known = self.0.store.credential(serial).await?;
                // One of which nothing is known could be good for as long as any.
                let longest = NODE_LIFETIME.max(LONGEST_OWNER_LIFETIME) + CLOCK_SKEW;
                let until = known
                    .map_or_else(|| after(self.0.clock.now(), longest), |known| known.value.validity.until);
                Ok(Revocation::Certificate(serial, until))
            }
        }
    }
}

#[tonic::async_trait]
impl credentials_server::Credentials for CredentialsService {
    async fn issue_owner(
        &self,
        request: Request<wire::IssueOwnerRequest>,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let asked = request.into_inner();
        let key = PublicKey::from_slice(&asked.public_key).map_err(Failure::invalid)?;
        self.issue(&asked.name, &key, asked.lifetime_ms).await
    }

    async fn claim_owner(
        &self,
        request: Request<wire::ClaimOwnerRequest>,
    ) -> Result<Response<wire::IssueOwnerResponse>, Status> {
        let key = Caller::of(&request)?.key()?;
        // As it stands, and not as it was when this curator began to lead.
        if !self.cluster().await?.value.owner_keys.contains(&key) {
            let sentence = format!("key {key} is not that of an owner of this cluster");
            return Err(Failure::refused(Code::PermissionDenied, sentence).into());
        }
        let name = format!("owner-{}", hex::encode(&key.0[..4]));
        self.issue(&name, &key, request.into_inner().lifetime_ms).await
    }

    async fn add_owner_key(
        &self,
        request: Request<wire::AddOwnerKeyRequest>,
    ) -> Result<Response<wire::AddOwnerKeyResponse>, Status> {
        let caller = Caller::of(&request)?;
        let key = PublicKey::from_slice(&request.get_ref().public_key).map_err(Failure::invalid)?;
        let store = &self.0.store;
        let added = store.decide(|| async {
            let known = self.cluster().await?;
            let removed = store.is_removed(key).await?;
            let Some(more) = known.value.with_owner_key(key, removed)? else { return Ok(false) };
            store.write(&[put(cluster_key()?, more.encode(), Some(&known))]).await?;
            Ok(true)
        });
        if added.await? {
            tracing::warn!(%key, by = %caller.peer, "a key may claim owners' certificates from now on");
        }
        Ok(Response::new(wire::AddOwnerKeyResponse {}))
    }

    async fn remove_owner_key(
        &self,
        request: Request<wire::RemoveOwnerKeyRequest>,
    ) -> Result<Response<wire::RemoveOwnerKeyResponse>, Status> {
        let caller = Caller::of(&request)?;
        let Peer::Owner { key: by, .. } = caller.peer else {
            return Err(Status::internal("only an owner comes here: please report it"));
        };
        let key = PublicKey::from_slice(&request.get_ref().public_key).map_err(Failure::invalid)?;
        let leading = &self.0;
        let revocation = Revocation::Owner(key);
        let record = revocation.encode(&caller.peer.to_string(), leading.clock.now());
        let removed = leading.store.decide(|| async {
            let known = self.cluster().await?;
            let fewer = known.value.without_owner_key(key, by)?;
            if fewer == known.value && leading.store.is_removed(key).await? {
                return Ok(false);
            }
            // The cluster's record in any case: whoever adds this key at the same time decides anew.
            let changes = [
                put(cluster_key()?, fewer.encode(), Some(&known)),
                Change::Put {
                    key: revocation.etcd_key()?,
                    value: record.clone(),
                    expected: Expected::Anything,
                },
            ];
            leading.store.write(&changes).await?;
            Ok(true)
        });
        if removed.await? {
            tracing::warn!(%key, by = %caller.peer, "an owner's key was removed");
        }
        leading.until_seen(|seen| seen.revocations.owners.contains(&key)).await?;
        Ok(Response::new(wire::RemoveOwnerKeyResponse {}))
    }

    async fn revoke(
        &self,
        request: Request<wire::RevokeCredentialsRequest>,
    ) -> Result<Response<wire::RevokeCredentialsResponse>, Status> {
        let caller = Caller::of(&request)?;
        let none = || Failure::invalid("it does not say what is to be revoked: a serial number or a node id");
        let which = request.into_inner().which.ok_or_else(none)?;
        let leading = &self.0;
        let revocation = self.revocation(which).await?;
        let key = revocation.etcd_key().map_err(Failure::from)?;
        let record = revocation.encode(&caller.peer.to_string(), leading.clock.now());
        match leading.store.write(&[put::<()>(key, record, None)]).await {
            // It was refused before.
            Ok(()) | Err(Failure::Changed(_)) => {}
            Err(error) => return Err(error.into()),
        }
        tracing::warn!(?revocation, by = %caller.peer, "credentials were revoked");
        leading
            .until_seen(|seen| match &revocation {
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
        kept.retain(|credential| now <= credential.value.validity.until);
        kept.sort_by_key(|kept| (Reverse(kept.value.validity.from), kept.value.serial));
        let seen = leading.view.seen();
        let credentials = kept.iter().map(|Stored { value: credential, .. }: &Stored<Credential>| {
            let revoked = seen.revocations.serials.contains_key(&credential.serial)
                || match &credential.holder {
                    Holder::Node(node) => seen.revocations.nodes.contains(node),
                    Holder::Owner(_) => seen.revocations.owners.contains(&credential.key),
                };
            credential.to_wire(revoked)
        });
        Ok(Response::new(wire::ListCredentialsResponse { credentials: credentials.collect() }))
    }
}
