//! gRPC service `ClusterKubernetes`: Kubernetes settings, users, key rotation, upgrades.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::{IncomingOrder, encode_order_response, reject_expected_version};
use crate::api::validate::single_line;
use bmdb::cluster::order_target;
use bmdb::cluster_kubernetes::KubernetesPatch;
use bmdb::cluster_kubernetes_user::{KubernetesUserRequest, list_kubernetes_users};
use bmdb::cluster_upgrade::{NewUpgrade, UpgradeChange};
use model::cluster::credential::{DEFAULT_LIFETIME, check_holder};
use model::cluster::kubernetes::{
    ComponentStatus, KubernetesKeyRotation, NodeKubernetes, ObjectConflict, RotatableKeys, VolumeDriver,
};
use model::cluster::kubernetes_user::{
    KubernetesAccess, KubernetesUserView, check_lifetime, check_public_key,
};
use model::cluster::kubernetes_view::{BundleView, KubernetesView, UpgradeView};
use model::cluster::upgrade::DEFAULT_NODE_DEADLINE_SECONDS;
use model::process::UnknownName;
use model::time::Span;
use proto::fleet::v1;
use proto::fleet::v1::cluster_kubernetes_server::ClusterKubernetes;

const SET: &str = "shepherd.fleet.v1.ClusterKubernetes/Set";
const REMOVE: &str = "shepherd.fleet.v1.ClusterKubernetes/Remove";
const ROTATE: &str = "shepherd.fleet.v1.ClusterKubernetes/Rotate";
const ISSUE_USER: &str = "shepherd.fleet.v1.ClusterKubernetes/IssueUser";
const UPGRADE: &str = "shepherd.fleet.v1.ClusterKubernetes/Upgrade";
const ROLL_BACK: &str = "shepherd.fleet.v1.ClusterKubernetes/RollBack";
const PAUSE: &str = "shepherd.fleet.v1.ClusterKubernetes/PauseUpgrade";
const RESUME: &str = "shepherd.fleet.v1.ClusterKubernetes/ResumeUpgrade";
const ABORT: &str = "shepherd.fleet.v1.ClusterKubernetes/AbortUpgrade";
/// Longest name of an artefact in a request, in characters.
const MAX_NAME_CHARS: usize = 100;

/// The gRPC service `ClusterKubernetes`.
pub struct ClusterKubernetesService {
    /// Context shared by all services.
    pub context: ApiContext,
}

/// Validates and decodes a change of the Kubernetes settings.
pub(super) fn parse_patch(wish: &v1::KubernetesPatch) -> Result<KubernetesPatch, Status> {
    let some = |field: &str, text: &str| -> Result<Option<String>, Status> {
        Ok(Some(single_line(field, text, MAX_NAME_CHARS)?.to_owned()).filter(|text| !text.is_empty()))
    };
    let storage = wish.storage.as_ref().map(|storage| -> Result<VolumeDriver, Status> {
        Ok(VolumeDriver {
            driver: single_line("storage.driver", &storage.driver, MAX_NAME_CHARS)?.to_owned(),
            class: single_line("storage.class", &storage.class, MAX_NAME_CHARS)?.to_owned(),
        })
    });
    let add_ons = wish.add_ons.iter().map(|(name, artefact)| -> Result<(String, String), Status> {
        Ok((
            single_line("add_ons", name, MAX_NAME_CHARS)?.to_owned(),
            single_line("add_ons", artefact, MAX_NAME_CHARS)?.to_owned(),
        ))
    });
    Ok(KubernetesPatch {
        bundle: some("bundle", &wish.bundle)?,
        service_range: some("service_range", &wish.service_range)?,
        pod_range: some("pod_range", &wish.pod_range)?,
        node_prefix: Some(wish.node_prefix).filter(|prefix| *prefix != 0),
        domain: some("domain", &wish.domain)?,
        add_ons: add_ons.collect::<Result<_, _>>()?,
        remove_add_ons: wish.remove_add_ons.iter().cloned().collect(),
        storage: storage.transpose()?,
    })
}

fn parse_user_request(
    request: &v1::IssueClusterKubernetesUserRequest,
) -> Result<KubernetesUserRequest, Status> {
    let none = || invalid_argument("public_key", "it is no public key of ECDSA P-256, in hexadecimal digits");
    let public_key = hex::decode(&request.public_key).map_err(|_| none())?;
    check_public_key(&public_key).map_err(|reason| invalid_argument("public_key", reason))?;
    check_holder(&request.holder).map_err(|reason| invalid_argument("holder", reason))?;
    let access: KubernetesAccess =
        request.access.parse().map_err(|error: UnknownName| invalid_argument("access", error.to_string()))?;
    let lifetime = match request.lifetime.as_str() {
        "" => DEFAULT_LIFETIME,
        text => text.parse::<Span>().map_err(|_| {
            invalid_argument("lifetime", format!("{text:?} is no length of time; write for example 8h or 7d"))
        })?,
    };
    check_lifetime(lifetime).map_err(|reason| invalid_argument("lifetime", reason))?;
    Ok(KubernetesUserRequest { public_key, holder: request.holder.clone(), access, lifetime })
}

impl ClusterKubernetesService {
    async fn change_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
        (rpc, change): (&'static str, UpgradeChange),
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let order = IncomingOrder { rpc, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let changed = self.context.bmdb.change_upgrade(order, body.name.clone(), change);
        Ok(Response::new(encode_order_response(None, dry_run, &changed.await.map_err(bmdb_status)?)))
    }
}

#[tonic::async_trait]
impl ClusterKubernetes for ClusterKubernetesService {
    async fn set(
        &self,
        request: Request<v1::SetClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let wish = parse_patch(&body.patch.clone().unwrap_or_default())?;
        let order = IncomingOrder { rpc: SET, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let set = self.context.bmdb.set_kubernetes(order, body.name.clone(), wish);
        Ok(Response::new(encode_order_response(None, dry_run, &set.await.map_err(bmdb_status)?)))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let order = IncomingOrder { rpc: REMOVE, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let removed = self.context.bmdb.remove_kubernetes(order, body.name.clone());
        Ok(Response::new(encode_order_response(None, dry_run, &removed.await.map_err(bmdb_status)?)))
    }

    async fn rotate(
        &self,
        request: Request<v1::RotateClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let keys: RotatableKeys =
            body.keys.parse().map_err(|error: UnknownName| invalid_argument("keys", error.to_string()))?;
        let order = IncomingOrder { rpc: ROTATE, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let rotated = self.context.bmdb.rotate_kubernetes_keys(order, body.name.clone(), keys);
        Ok(Response::new(encode_order_response(None, dry_run, &rotated.await.map_err(bmdb_status)?)))
    }

    async fn list_users(
        &self,
        request: Request<v1::ListClusterKubernetesUsersRequest>,
    ) -> Result<Response<v1::ListClusterKubernetesUsersResponse>, Status> {
        let name = request.into_inner().name;
        let look = self.context.read_pool.read(move |tx| {
            let name = name.clone();
            Box::pin(async move { list_kubernetes_users(tx, &name).await })
        });
        let (found, now) = look.await.map_err(bmdb_status)?;
        let users = found.into_iter().map(encode_user).collect();
        Ok(Response::new(v1::ListClusterKubernetesUsersResponse {
            users,
            read_at: Some(encode_timestamp(now)),
        }))
    }

    async fn issue_user(
        &self,
        request: Request<v1::IssueClusterKubernetesUserRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let new = parse_user_request(body)?;
        let order = IncomingOrder { rpc: ISSUE_USER, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let issued = self.context.bmdb.request_kubernetes_user(order, body.name.clone(), new);
        Ok(Response::new(encode_order_response(None, dry_run, &issued.await.map_err(bmdb_status)?)))
    }

    async fn upgrade(
        &self,
        request: Request<v1::UpgradeClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let some = |field: &str, text: &str| -> Result<Option<String>, Status> {
            Ok(Some(single_line(field, text, MAX_NAME_CHARS)?.to_owned()).filter(|text| !text.is_empty()))
        };
        let new = NewUpgrade {
            kubernetes: some("kubernetes", &body.kubernetes)?,
            roleserver: some("roleserver", &body.roleserver)?,
            parallelism: body.parallelism.max(1),
            deadline_seconds: if body.deadline_seconds == 0 {
                DEFAULT_NODE_DEADLINE_SECONDS
            } else {
                body.deadline_seconds
            },
        };
        let order = IncomingOrder { rpc: UPGRADE, request: body, order: body.order.as_ref() }
            .parse(&caller, order_target(&body.name))
            .and_then(reject_expected_version)?;
        let dry_run = order.dry_run;
        let upgraded = self.context.bmdb.upgrade_cluster(order, body.name.clone(), new);
        Ok(Response::new(encode_order_response(None, dry_run, &upgraded.await.map_err(bmdb_status)?)))
    }

    async fn roll_back(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (ROLL_BACK, UpgradeChange::RollBack)).await
    }

    async fn pause_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (PAUSE, UpgradeChange::Pause)).await
    }

    async fn resume_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (RESUME, UpgradeChange::Resume)).await
    }

    async fn abort_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (ABORT, UpgradeChange::Abort)).await
    }
}

fn encode_user(view: KubernetesUserView) -> v1::ClusterKubernetesUser {
    v1::ClusterKubernetesUser {
        id: view.id,
        holder: view.holder,
        access: view.access,
        public_key: view.public_key,
        state: view.state,
        requested_at: Some(encode_timestamp(view.requested_at)),
        requested_by: view.requested_by,
        expires_at: view.expires_at.map(encode_timestamp),
        rejection: view.rejection,
        certificate: view.certificate,
        server_authorities: view.server_authorities,
        api_servers: view.api_servers,
    }
}

/// Encodes the Kubernetes state of a cluster.
pub(super) fn encode_kubernetes(view: KubernetesView) -> v1::ClusterKubernetesState {
    let rotation = |rotation: KubernetesKeyRotation| v1::ClusterKeyRotation {
        keys: rotation.keys,
        stage: rotation.stage,
        since: rotation.since.map(encode_timestamp),
        waits_for: rotation.waits_for,
        until: rotation.until.map(encode_timestamp),
        blocked_by: rotation.blocked_by,
        notified_at: rotation.notified_at.map(encode_timestamp),
    };
    v1::ClusterKubernetesState {
        bundle: view.bundle,
        version: view.version,
        service_range: view.service_range,
        pod_range: view.pod_range,
        node_prefix: view.node_prefix,
        domain: view.domain,
        add_ons: view.add_ons.into_iter().collect(),
        storage: (view.storage)
            .map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
        requested_at: Some(encode_timestamp(view.requested_at)),
        requested_by: view.requested_by,
        removal_requested_by: view.removal_requested_by,
        pending_rotations: view.pending_rotations,
        in_sync: view.status.in_sync,
        assigned_bundles: view.status.assigned_bundles.into_iter().collect(),
        rotations: view.status.rotations.into_iter().map(rotation).collect(),
        api_servers: view.status.api_servers,
    }
}

/// Encodes an upgrade of a cluster.
pub(super) fn upgrade(view: UpgradeView) -> v1::ClusterUpgrade {
    let named = |bundle: Option<BundleView>| bundle.map(|b| (b.sha256, b.version)).unwrap_or_default();
    let (from, to) = (named(view.from), named(view.to));
    v1::ClusterUpgrade {
        id: view.id,
        from_sha256: from.0,
        from_version: from.1,
        to_sha256: to.0,
        to_version: to.1,
        release: view.release,
        roll_out: view.roll_out,
        release_done: view.release_done,
        rolling_back: view.rolling_back,
        parallelism: view.parallelism,
        deadline_seconds: view.deadline_seconds,
        created_at: Some(encode_timestamp(view.created_at)),
        created_by: view.created_by,
        reason: view.reason,
        pause_reason: view.pause_reason,
        ended_at: view.ended_at.map(encode_timestamp),
        outcome: view.outcome,
        requested_count: view.requested_count,
        completed_count: view.completed_count,
    }
}

/// Encodes the Kubernetes components of a node.
pub(super) fn encode_node_kubernetes(view: NodeKubernetes) -> v1::ClusterNodeKubernetes {
    let component = |component: ComponentStatus| v1::ClusterComponentStatus {
        name: component.name,
        state: component.state,
        since: component.since.map(encode_timestamp),
        restarts: component.restarts,
        message: component.message,
    };
    let clash = |clash: ObjectConflict| v1::ClusterObjectConflict {
        kind: clash.kind,
        name: clash.name,
        message: clash.message,
    };
    v1::ClusterNodeKubernetes {
        bundle: view.bundle,
        version: view.version,
        components: view.components.into_iter().map(component).collect(),
        wait_reason: view.wait_reason,
        is_reconciler: view.is_reconciler,
        conflicts: view.conflicts.into_iter().map(clash).collect(),
    }
}
