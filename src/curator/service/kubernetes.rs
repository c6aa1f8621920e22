//! What Kubernetes of the cluster is to be, what each node is told of it, and what is signed for whom.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tonic::{Code, Request, Response, Status};

use crate::curator::kubernetes::allotment::{Allotment, Bundle};
use crate::curator::kubernetes::authority::{PublicPoint, Signer, Subject, new_key};
use crate::curator::kubernetes::certificates::{self, LIFETIME, Needs};
use crate::curator::kubernetes::keys::{Keys, Which, keys_key};
use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::kubernetes::settings::{Settings, check_bundle, settings_key};
use crate::curator::kubernetes::setup::{self, Known};
use crate::curator::kubernetes::users;
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::pki::{AUTHORITY_LIFETIME, Issued, Serial, Validity};
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Answers, Caller, Leading};
use crate::curator::service::nodes::parse_node;
use crate::curator::service::store::{Stored, put};
use crate::etcd::guard::{Change, Expected};
use crate::model::role::told;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::kubernetes_server;

/// The service.
#[derive(Clone, Debug)]
pub struct KubernetesService(pub Arc<Leading>);

impl KubernetesService {
    /// What Kubernetes is to be; there must be one.
    async fn settings(&self) -> Result<Stored<Settings>, Failure> {
        Ok(self.0.store.kubernetes().await?.ok_or(Refusal::None)?)
    }

    /// What signs in it; there must be one.
    async fn keys(&self) -> Result<Stored<Keys>, Failure> {
        let keys = self.0.store.kubernetes_keys().await?.filter(|keys| !keys.value.rings.is_empty());
        Ok(keys.ok_or(Refusal::None)?)
    }

    /// A new key for this purpose.
    fn new_signer(&self, which: Which) -> Result<Signer, Failure> {
        let key = new_key()?;
        if !which.is_authority() {
            return Ok(Signer::bare(&key)?);
        }
        let validity = Validity::starting(self.0.clock.now(), AUTHORITY_LIFETIME);
        let serial = Serial::new(rand::random());
        Ok(Signer::authority(which.as_str(), self.0.cluster.id, &key, serial, validity)?)
    }

    fn issue(
        &self,
        keys: &Keys,
        which: Which,
        subject: &Subject,
        key: &PublicPoint,
        lifetime: Duration,
    ) -> Result<Issued, Failure> {
        let validity = Validity::starting(self.0.clock.now(), lifetime);
        let signs = &keys.ring(which)?.signs;
        Ok(signs.issue(subject, key, Serial::new(rand::random()), validity)?)
    }

    /// The calling node as it is now, and whether its certificates are refused.
    async fn node(&self, id: NodeId) -> Result<(Option<Node>, bool), Failure> {
        let node = self.0.store.node(&id).await?.map(|stored| stored.value);
        Ok((node, self.0.store.is_revoked(id).await?))
    }
}

#[tonic::async_trait]
impl kubernetes_server::Kubernetes for KubernetesService {
    type WatchOwnStream = Answers<wire::WatchOwnKubernetesResponse>;

    async fn put(
        &self,
        request: Request<wire::PutKubernetesRequest>,
    ) -> Result<Response<wire::PutKubernetesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let said = Settings::new(asked.settings.unwrap_or_default()).map_err(Failure::from)?;
        let leading = &self.0;
        // Nothing of one that was before is looked at in the middle of this.
        let _alone = leading.membership().await;
        let written = leading.store.decide(|| async {
            let known = leading.store.kubernetes().await?;
            let in_force = known.as_ref().map(|known| &known.value);
            let Some(new) = said.clone().replacing(in_force, asked.expected_revision)? else {
                return Ok((known.map_or(0, |known| known.value.revision()), false));
            };
            let mut changes = vec![put(settings_key()?, new.encode(), known.as_ref())];
            if known.is_none() {
                leading.forget_allotments().await?;
                let before = leading.store.kubernetes_keys().await?;
                let signers = Which::ALL.into_iter().map(|which| Ok((which, self.new_signer(which)?)));
                let signers = signers.collect::<Result<BTreeMap<_, _>, Failure>>()?;
                let first = Keys::first(before.as_ref().map(|before| &before.value), signers);
                changes.push(put(keys_key()?, first.encode(), before.as_ref()));
            }
            leading.store.write(&changes).await?;
            tracing::info!(revision = new.revision(), by = %caller.peer, "it was said what Kubernetes is to be");
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
        let settings = self.settings().await?.value;
        let keys = self.keys().await?.value;
        let allotments = leading.store.allotments().await?.all;
        let nodes = leading.store.nodes().await?.nodes;
        let rotations = keys.rotations(&leading.standings(&nodes, &allotments), leading.token_overlap);
        let assigned = allotments.into_iter().filter(|(node, _)| nodes.contains_key(node));
        let assigned = assigned.filter_map(|(node, has)| Some((node.to_string(), has.bundle?.digest)));
        Ok(Response::new(wire::GetKubernetesResponse {
            settings: Some(settings.said().clone()),
            revision: settings.revision(),
            assigned: assigned.collect(),
            authorities: keys.authorities(),
            rotations,
            api_servers: setup::api_servers(nodes.values()),
        }))
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteKubernetesRequest>,
    ) -> Result<Response<wire::DeleteKubernetesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let leading = &self.0;
        // Nobody is given a role of it between the look at the nodes and the deletion.
        let _alone = leading.membership().await;
        let deleted = leading.store.decide(|| async {
            let Some(known) = leading.store.kubernetes().await? else { return Ok(false) };
            let nodes = leading.store.nodes().await?.nodes;
            let with = nodes
                .values()
                .filter(|node| node.roles.kubernetes_controller || node.roles.kubernetes_worker)
                .map(|node| node.id);
            let with: Vec<NodeId> = with.collect();
            if !with.is_empty() {
                return Err(Refusal::InUse { with: told(with) }.into());
            }
            let expected = Expected::At(known.revision);
            let mut changes = vec![Change::Delete { key: settings_key()?, expected }];
            if let Some(keys) = leading.store.kubernetes_keys().await? {
                changes.push(put(keys_key()?, keys.value.forgotten().encode(), Some(&keys)));
            }
            leading.store.write(&changes).await?;
            Ok(true)
        });
        if deleted.await? {
            tracing::warn!(by = %caller.peer, "Kubernetes of the cluster was forgotten, with its authorities and keys");
        }
        leading.forget_allotments().await?;
        Ok(Response::new(wire::DeleteKubernetesResponse {}))
    }

    async fn assign_bundle(
        &self,
        request: Request<wire::AssignBundleRequest>,
    ) -> Result<Response<wire::AssignBundleResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let id = parse_node(&asked.node_id)?;
        let bundle = match asked.bundle.as_str() {
            "" => None,
            digest => {
                check_bundle(digest, &asked.url).map_err(Failure::from)?;
                Some(Bundle { digest: digest.to_owned(), url: asked.url.clone() })
            }
        };
        let leading = &self.0;
        let _alone = leading.membership().await;
        let assigned = leading.store.decide(|| async {
            self.settings().await?;
            leading.store.node(&id).await?.ok_or(Refusal::Unknown(id))?;
            let allotments = leading.store.allotments().await?;
            let has = allotments.all.get(&id).cloned().unwrap_or_default();
            let wanted = Allotment { bundle: bundle.clone(), ..has.clone() };
            if wanted != has {
                leading.store.write(&[allotments.put(&id, &wanted)?]).await?;
                tracing::info!(node = %id, bundle = asked.bundle, by = %caller.peer, "a node has another bundle of Kubernetes");
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
        let caller = Caller::of(&request)?;
        let own = own(self.0.clone(), caller.node()?);
        Ok(Response::new(self.0.stream(&caller, own)))
    }

    async fn issue_certificate(
        &self,
        request: Request<wire::IssueKubernetesCertificateRequest>,
    ) -> Result<Response<wire::IssueKubernetesCertificateResponse>, Status> {
        let id = Caller::of(&request)?.node()?;
        let asked = request.into_inner();
        let key = PublicPoint::from_spki(&asked.public_key).map_err(Failure::from)?;
        let (node, revoked) = self.node(id).await?;
        let settings = self.0.store.kubernetes().await?.map(|stored| stored.value);
        let decided = certificates::decide(asked.component, node.as_ref(), id, revoked, settings.as_ref());
        let (which, subject) = decided.map_err(Failure::from)?;
        let keys = self.keys().await?.value;
        let issued = self.issue(&keys, which, &subject, &key, LIFETIME)?;
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
        let id = Caller::of(&request)?.node()?;
        let (node, revoked) = self.node(id).await?;
        let settings = self.0.store.kubernetes().await?.map(|stored| stored.value);
        certificates::may_have(node.as_ref(), id, revoked, Needs::Controller, settings.as_ref())
            .map_err(Failure::from)?;
        let keys = self.keys().await?.value;
        let signs = &keys.ring(Which::ServiceAccounts).map_err(Failure::from)?.signs;
        Ok(Response::new(wire::GetSigningKeyResponse {
            private_key: signs.pkcs8().to_vec(),
            generation: keys.generation,
        }))
    }

    async fn issue_user(
        &self,
        request: Request<wire::IssueKubernetesUserRequest>,
    ) -> Result<Response<wire::IssueKubernetesUserResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let key = PublicPoint::from_spki(&asked.public_key).map_err(Failure::from)?;
        let (subject, lifetime) = users::decide(&asked).map_err(Failure::from)?;
        let keys = self.keys().await?.value;
        let issued = self.issue(&keys, Which::Clients, &subject, &key, lifetime)?;
        tracing::info!(
            user = subject.name, group = subject.organisation, serial = %issued.serial, by = %caller.peer,
            "a user of Kubernetes has a certificate"
        );
        let servers = keys
            .authorities()
            .into_iter()
            .find(|authority| authority.which() == wire::KubernetesKeys::Servers);
        let nodes = self.0.store.nodes().await?.nodes;
        Ok(Response::new(wire::IssueKubernetesUserResponse {
            certificate: issued.certificate,
            servers: servers.map(|authority| authority.trusted).unwrap_or_default(),
            api_servers: setup::api_servers(nodes.values()),
            not_after_ms: issued.validity.until.timestamp_millis(),
        }))
    }

    async fn rotate(
        &self,
        request: Request<wire::RotateKubernetesRequest>,
    ) -> Result<Response<wire::RotateKubernetesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let number = request.into_inner().which;
        let which = Which::from_wire(number).map_err(Failure::from)?;
        let leading = &self.0;
        // Nobody is told a generation meanwhile that is thought to be told to nobody.
        let _alone = leading.membership().await;
        let begun = leading.store.decide(|| async {
            self.settings().await?;
            let known = self.keys().await?;
            let new = self.new_signer(which)?;
            match known.value.begin(which, new, leading.clock.now())? {
                None => Ok(known.value),
                Some(begun) => {
                    leading.tell_whoever_is_new().await?;
                    let begun = begun.keeping(leading.store.allotments().await?.told());
                    leading.store.write(&[put(keys_key()?, begun.encode(), Some(&known))]).await?;
                    tracing::warn!(%which, generation = begun.generation, by = %caller.peer, "keys of Kubernetes are being replaced");
                    Ok(begun)
                }
            }
        });
        let keys = begun.await?;
        let nodes = leading.store.nodes().await?.nodes;
        let allotments = leading.store.allotments().await?.all;
        let rotations = keys.rotations(&leading.standings(&nodes, &allotments), leading.token_overlap);
        let rotation = rotations.into_iter().find(|rotation| rotation.which == number);
        Ok(Response::new(wire::RotateKubernetesResponse { rotation }))
    }
}

/// What a node is to run: now, and whenever it changes.
fn own(
    leading: Arc<Leading>,
    node: NodeId,
) -> impl Stream<Item = Result<wire::WatchOwnKubernetesResponse, Status>> {
    let changes = leading.view.changes();
    futures::stream::unfold(Some((leading, changes, None)), move |state| async move {
        let (leading, mut changes, told) = state?;
        loop {
            changes.mark_unchanged();
            match seen(&leading, &node) {
                // It stops nothing because of what cannot be read: it is told nothing until it can.
                Err(status) => return Some((Err(status), None)),
                Ok(Some(now)) if told.as_ref() != Some(&now) => {
                    return Some((Ok(now.clone()), Some((leading, changes, Some(now)))));
                }
                // Nor because it is not written yet which generation it may be told.
                Ok(_) => {}
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// What a node is told that it is to run, by what is seen now; none while it may be told of no generation yet.
fn seen(leading: &Leading, node: &NodeId) -> Result<Option<wire::WatchOwnKubernetesResponse>, Status> {
    let seen = leading.view.seen();
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
    let none = Allotment::default();
    let allotment = of_kubernetes.allotments.get(node).unwrap_or(&none);
    let nodes = seen.nodes.present().map(AsRef::as_ref);
    let edition = allotment.told.map_or_else(|| keys.edition(), |told| keys.edition_of(told.generation));
    let setup = setup::setup(Known { settings, edition: &edition }, own, allotment, nodes);
    let may_be_told = setup.is_none() || allotment.told.is_some();
    Ok(may_be_told.then_some(wire::WatchOwnKubernetesResponse { setup }))
}
