//! gRPC service Kubernetes: settings, certificates, key rotation, node setup.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use curator_client::certificate::{IssuedCertificate, Serial, Validity};
use curator_client::node::Node;
use curator_client::node_id::NodeId;
use etcd::guard::{ExpectedRevision, KeyChange};
use futures::Stream;
use model::cluster::kubernetes::KeyPurpose;
use model::node_role::join_names;
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_server;
use tonic::{Code, Request, Response, Status};

use crate::entitlement::{self, Entitlement};
use crate::kubernetes::component_certificates::{self, COMPONENT_LIFETIME, KubernetesRole};
use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::keys::{KubernetesKeys, keys_record_key, parse_key_purpose};
use crate::kubernetes::node_allocation::{BundleRef, NodeAllocation};
use crate::kubernetes::node_setup::{self, SetupInputs};
use crate::kubernetes::settings::{KubernetesSettings, settings_record_key, validate_bundle};
use crate::kubernetes::signer::{CertificateSubject, P256PublicKey};
use crate::kubernetes::user_certificates;
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext, ResponseStream};
use crate::service::node_addresses::recorded_address;
use crate::service::nodes::parse_node_id;
use crate::service::store::{Versioned, record_change};

#[derive(Clone, Debug)]
pub(super) struct KubernetesService(pub(super) Arc<LeaderContext>);

impl KubernetesService {
    /// The Kubernetes settings; an error if there are none.
    async fn load_settings(&self) -> Result<Versioned<KubernetesSettings>, ServiceError> {
        Ok(self.0.store.kubernetes().await?.ok_or(KubernetesError::NotConfigured)?)
    }

    /// The Kubernetes keys; an error if there are none.
    async fn load_keys(&self) -> Result<Versioned<KubernetesKeys>, ServiceError> {
        let keys = self.0.store.kubernetes_keys().await?.filter(|keys| !keys.value.rings.is_empty());
        Ok(keys.ok_or(KubernetesError::NotConfigured)?)
    }

    fn sign_certificate(
        &self,
        keys: &KubernetesKeys,
        which: KeyPurpose,
        (subject, entitled): (&CertificateSubject, &Entitlement),
        key: &P256PublicKey,
        lifetime: Duration,
    ) -> Result<IssuedCertificate, ServiceError> {
        let validity = Validity::starting(self.0.clock.now(), lifetime);
        let signs = &keys.key_ring(which)?.signer;
        let issued = signs.issue_certificate(subject, key, Serial::new(rand::random()), validity)?;
        entitlement::check_certificate(&issued.certificate, entitled)?;
        Ok(issued)
    }

    /// The record of the calling node, and whether the node is revoked.
    async fn load_node(&self, id: NodeId) -> Result<(Option<Node>, bool), ServiceError> {
        let node = self.0.store.node(&id).await?.map(|stored| stored.value);
        Ok((node, self.0.store.is_node_revoked(id).await?))
    }
}

#[tonic::async_trait]
impl kubernetes_server::Kubernetes for KubernetesService {
    type WatchOwnStream = ResponseStream<wire::WatchOwnKubernetesResponse>;

    async fn put(
        &self,
        request: Request<wire::PutKubernetesRequest>,
    ) -> Result<Response<wire::PutKubernetesResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let settings =
            KubernetesSettings::new(body.settings.unwrap_or_default()).map_err(ServiceError::from)?;
        let leading = &self.0;
        // With the lock, nobody reads allocations of a former Kubernetes in the middle of this.
        let _alone = leading.lock_membership().await;
        let written = leading.store.retry_on_conflict(|| async {
            let known = leading.store.kubernetes().await?;
            let in_force = known.as_ref().map(|known| &known.value);
            let Some(new) = settings.clone().into_next_revision(in_force, body.expected_revision)? else {
                return Ok((known.map_or(0, |known| known.value.revision()), false));
            };
            let mut changes = vec![record_change(settings_record_key()?, new.encode(), known.as_ref())];
            if known.is_none() {
                leading.delete_allocations().await?;
                let before = leading.store.kubernetes_keys().await?;
                // An API server of a release before trusts no authority of kubelets.
                let knows_kubelets = leading.store.statement().await?.is_some();
                let purposes = KeyPurpose::ALL.into_iter();
                let signers = purposes
                    .filter(|which| knows_kubelets || *which != KeyPurpose::Kubelets)
                    .map(|which| Ok((which, leading.create_signer(which)?)));
                let signers = signers.collect::<Result<BTreeMap<_, _>, ServiceError>>()?;
                let first = KubernetesKeys::initial(before.as_ref().map(|before| &before.value), signers);
                changes.push(record_change(keys_record_key()?, first.encode(), before.as_ref()));
            }
            leading.store.write(&changes).await?;
            tracing::info!(revision = new.revision(), actor = %caller.peer, "a new Kubernetes spec was stored");
            Ok((new.revision(), true))
        });
        let (revision, changed) = written.await?;
        Ok(Response::new(wire::PutKubernetesResponse { revision, changed }))
    }

    async fn get(
        &self,
        _: Request<wire::GetKubernetesRequest>,
    ) -> Result<Response<wire::GetKubernetesResponse>, Status> {
        let leading = &self.0;
        let settings = self.load_settings().await?.value;
        let keys = self.load_keys().await?.value;
        let allotments = leading.store.allocations().await?.allocations;
        let nodes = leading.store.nodes().await?.nodes;
        let rotations =
            keys.describe_rotations(&leading.node_progress(&nodes, &allotments), leading.token_overlap);
        let assigned = allotments.into_iter().filter(|(node, _)| nodes.contains_key(node));
        let assigned = assigned.filter_map(|(node, has)| Some((node.to_string(), has.bundle?.digest)));
        Ok(Response::new(wire::GetKubernetesResponse {
            settings: Some(settings.spec().clone()),
            revision: settings.revision(),
            assigned_bundles: assigned.collect(),
            authorities: keys.authorities(),
            rotations,
            api_servers: node_setup::api_server_addresses(nodes.values()),
        }))
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteKubernetesRequest>,
    ) -> Result<Response<wire::DeleteKubernetesResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let leading = &self.0;
        // With the lock, nobody adds a Kubernetes role to a node between the check of the nodes and the deletion.
        let _alone = leading.lock_membership().await;
        let deleted = leading.store.retry_on_conflict(|| async {
            let Some(known) = leading.store.kubernetes().await? else { return Ok(false) };
            let nodes = leading.store.nodes().await?.nodes;
            let with = nodes
                .values()
                .filter(|node| node.roles.kubernetes_controller || node.roles.kubernetes_worker)
                .map(|node| node.id);
            let with: Vec<NodeId> = with.collect();
            if !with.is_empty() {
                return Err(KubernetesError::InUse { nodes: join_names(with) }.into());
            }
            let expected = ExpectedRevision::At(known.revision);
            let mut changes = vec![KeyChange::Delete { key: settings_record_key()?, expected }];
            if let Some(keys) = leading.store.kubernetes_keys().await? {
                changes.push(record_change(
                    keys_record_key()?,
                    keys.value.without_keys().encode(),
                    Some(&keys),
                ));
            }
            leading.store.write(&changes).await?;
            Ok(true)
        });
        if deleted.await? {
            tracing::warn!(actor = %caller.peer, "the Kubernetes of the cluster was deleted, with its authorities and keys");
        }
        leading.delete_allocations().await?;
        Ok(Response::new(wire::DeleteKubernetesResponse {}))
    }

    async fn assign_bundle(
        &self,
        request: Request<wire::AssignBundleRequest>,
    ) -> Result<Response<wire::AssignBundleResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let id = parse_node_id(&body.node_id)?;
        let bundle = match body.bundle.as_str() {
            "" => None,
            digest => {
                validate_bundle(digest, &body.url).map_err(ServiceError::from)?;
                Some(BundleRef { digest: digest.to_owned(), url: body.url.clone() })
            }
        };
        let leading = &self.0;
        let _alone = leading.lock_membership().await;
        let assigned = leading.store.retry_on_conflict(|| async {
            self.load_settings().await?;
            leading.store.node(&id).await?.ok_or(KubernetesError::UnknownNode(id))?;
            let allotments = leading.store.allocations().await?;
            let has = allotments.allocations.get(&id).cloned().unwrap_or_default();
            let wanted = NodeAllocation { bundle: bundle.clone(), ..has.clone() };
            if wanted != has {
                leading.store.write(&[allotments.allocation_change(&id, &wanted)?]).await?;
                tracing::info!(node = %id, bundle = body.bundle, actor = %caller.peer, "a node has another bundle of Kubernetes");
            }
            Ok(())
        });
        assigned.await?;
        Ok(Response::new(wire::AssignBundleResponse {}))
    }

    async fn watch_own(
        &self,
        request: Request<wire::WatchOwnKubernetesRequest>,
    ) -> Result<Response<Self::WatchOwnStream>, Status> {
        let caller = Caller::from_request(&request)?;
        let own = watch_setup_of(self.0.clone(), caller.require_node()?);
        Ok(Response::new(self.0.guard_stream(&caller, own)))
    }

    async fn issue_certificate(
        &self,
        request: Request<wire::IssueKubernetesCertificateRequest>,
    ) -> Result<Response<wire::IssueKubernetesCertificateResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let id = caller.require_node()?;
        let body = request.into_inner();
        let key = P256PublicKey::from_spki(&body.public_key).map_err(ServiceError::from)?;
        let (node, revoked) = self.load_node(id).await?;
        let settings = self.0.store.kubernetes().await?.map(|stored| stored.value);
        let decided = component_certificates::resolve_certificate(
            body.component,
            node.as_ref(),
            id,
            revoked,
            settings.as_ref(),
        );
        let (which, subject) = decided.map_err(ServiceError::from)?;
        let node = node.ok_or(KubernetesError::UnknownNode(id)).map_err(ServiceError::from)?;
        // Only a certificate that names the node's address lets others believe that the node is there.
        if let Some(address) = recorded_address(&node).filter(|address| subject.addresses.contains(address)) {
            self.0.check_certified_address(&caller, &node, address).await?;
        }
        let keys = self.load_keys().await?.value;
        let entitled = Entitlement::for_component(body.component(), &subject);
        let issued = self.sign_certificate(&keys, which, (&subject, &entitled), &key, COMPONENT_LIFETIME)?;
        tracing::debug!(node = %id, authority = %which, name = subject.name, serial = %issued.serial, "a component has a certificate");
        Ok(Response::new(wire::IssueKubernetesCertificateResponse {
            certificate: issued.certificate,
            generation: keys.generation,
        }))
    }

    async fn get_signing_key(
        &self,
        request: Request<wire::GetSigningKeyRequest>,
    ) -> Result<Response<wire::GetSigningKeyResponse>, Status> {
        let id = Caller::from_request(&request)?.require_node()?;
        let (node, revoked) = self.load_node(id).await?;
        let settings = self.0.store.kubernetes().await?.map(|stored| stored.value);
        component_certificates::authorize_node(
            node.as_ref(),
            id,
            revoked,
            KubernetesRole::Controller,
            settings.as_ref(),
        )
        .map_err(ServiceError::from)?;
        let keys = self.load_keys().await?.value;
        let signs = &keys.key_ring(KeyPurpose::ServiceAccounts).map_err(ServiceError::from)?.signer;
        Ok(Response::new(wire::GetSigningKeyResponse {
            private_key: signs.pkcs8().to_vec(),
            generation: keys.generation,
        }))
    }

    async fn issue_user(
        &self,
        request: Request<wire::IssueKubernetesUserRequest>,
    ) -> Result<Response<wire::IssueKubernetesUserResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let key = P256PublicKey::from_spki(&body.public_key).map_err(ServiceError::from)?;
        let (subject, lifetime) =
            user_certificates::plan_user_certificate(&body).map_err(ServiceError::from)?;
        let keys = self.load_keys().await?.value;
        let entitled = Entitlement::for_kubernetes_user(&subject);
        let issued =
            self.sign_certificate(&keys, KeyPurpose::Clients, (&subject, &entitled), &key, lifetime)?;
        tracing::info!(
            user = subject.name, group = subject.organisation, serial = %issued.serial, actor = %caller.peer,
            "a user of Kubernetes has a certificate"
        );
        let servers = keys
            .authorities()
            .into_iter()
            .find(|authority| authority.keys() == wire::KubernetesKeys::Servers);
        let nodes = self.0.store.nodes().await?.nodes;
        Ok(Response::new(wire::IssueKubernetesUserResponse {
            certificate: issued.certificate,
            server_authorities: servers.map(|authority| authority.trusted).unwrap_or_default(),
            api_servers: node_setup::api_server_addresses(nodes.values()),
            not_after_ms: issued.validity.not_after.timestamp_millis(),
        }))
    }

    async fn rotate(
        &self,
        request: Request<wire::RotateKubernetesRequest>,
    ) -> Result<Response<wire::RotateKubernetesResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let number = request.into_inner().keys;
        let which = parse_key_purpose(number).map_err(ServiceError::from)?;
        let leading = &self.0;
        // With the lock, no node is assigned a generation whose bundle is just being dropped as unused.
        let _alone = leading.lock_membership().await;
        let begun = leading.store.retry_on_conflict(|| async {
            self.load_settings().await?;
            let known = self.load_keys().await?;
            if which == KeyPurpose::Kubelets && !known.value.rings.contains_key(&which) {
                return Err(ServiceError::from(KubernetesError::SharedAuthority));
            }
            let new = leading.create_signer(which)?;
            match known.value.begin_rotation(which, new, leading.clock.now())? {
                None => Ok(known.value),
                Some(begun) => {
                    leading.assign_to_new_nodes().await?;
                    let begun = begun.retain_bundles(leading.store.allocations().await?.assigned_generations());
                    leading.store.write(&[record_change(keys_record_key()?, begun.encode(), Some(&known))]).await?;
                    tracing::warn!(keys = %which, generation = begun.generation, actor = %caller.peer, "keys of Kubernetes are being replaced");
                    Ok(begun)
                }
            }
        });
        let keys = begun.await?;
        let nodes = leading.store.nodes().await?.nodes;
        let allotments = leading.store.allocations().await?.allocations;
        let rotations =
            keys.describe_rotations(&leading.node_progress(&nodes, &allotments), leading.token_overlap);
        let rotation = rotations.into_iter().find(|rotation| rotation.keys == number);
        Ok(Response::new(wire::RotateKubernetesResponse { rotation }))
    }
}

/// The setup of a node: now, and whenever it changes.
fn watch_setup_of(
    leading: Arc<LeaderContext>,
    node: NodeId,
) -> impl Stream<Item = Result<wire::WatchOwnKubernetesResponse, Status>> {
    let changes = leading.cache.subscribe_changes();
    futures::stream::unfold(Some((leading, changes, None)), move |state| async move {
        let (leading, mut changes, response) = state?;
        loop {
            changes.mark_unchanged();
            match setup_response(&leading, &node) {
                // An unreadable record must not make the node stop anything, so it gets an error and no setup.
                Err(status) => return Some((Err(status), None)),
                Ok(Some(now)) if response.as_ref() != Some(&now) => {
                    return Some((Ok(now.clone()), Some((leading, changes, Some(now)))));
                }
                // The same while no generation is assigned yet: send nothing.
                Ok(_) => {}
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// The setup of a node, from the cached records; `None` while it runs Kubernetes but no generation is assigned to it.
fn setup_response(
    leading: &LeaderContext,
    node: &NodeId,
) -> Result<Option<wire::WatchOwnKubernetesResponse>, Status> {
    let seen = leading.cache.records();
    let of_kubernetes = &seen.kubernetes;
    if let Some(key) = of_kubernetes.unreadable_for(node) {
        return Err(Status::new(
            Code::Unavailable,
            format!("the record {key} of the cluster cannot be read by this curator; update its role server"),
        ));
    }
    let nothing = wire::WatchOwnKubernetesResponse { setup: None };
    let (Some(settings), Some(keys)) = (&of_kubernetes.settings, &of_kubernetes.keys) else {
        return Ok(Some(nothing));
    };
    let Some(own) = seen.nodes.get(node) else { return Ok(Some(nothing)) };
    let none = NodeAllocation::default();
    let allocation = of_kubernetes.allocations.get(node).unwrap_or(&none);
    let nodes = seen.nodes.nodes().map(AsRef::as_ref);
    let trust_bundle = allocation
        .assigned
        .map_or_else(|| keys.trust_bundle(), |generation| keys.trust_bundle_for(generation.generation));
    let setup = node_setup::build_node_setup(
        SetupInputs { settings, trust_bundle: &trust_bundle },
        own,
        allocation,
        nodes,
    );
    let may_be_notified = setup.is_none() || allocation.assigned.is_some();
    Ok(may_be_notified.then_some(wire::WatchOwnKubernetesResponse { setup }))
}
