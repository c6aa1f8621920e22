//! gRPC service `ClusterKubernetes`: Kubernetes settings, users, key rotation, upgrades.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::services::kubernetes_messages::{optional_line, parse_patch};
use bmdb::cluster::kubernetes::user::{KubernetesUserRequest, list_kubernetes_users};
use bmdb::cluster::lock::order_target;
use bmdb::cluster::upgrade::NewUpgrade;
use bmdb::cluster::upgrade::orders::UpgradeChange;
use model::cluster::credential::{DEFAULT_LIFETIME, check_holder};
use model::cluster::kubernetes::RotatableKeys;
use model::cluster::kubernetes_user::{
    KubernetesAccess, KubernetesUserView, check_lifetime, check_public_key,
};
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

/// The gRPC service `ClusterKubernetes`.
pub struct ClusterKubernetesService {
    /// Context shared by all services.
    pub context: ApiContext,
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
            invalid_argument("lifetime", format!("{text:?} is not a duration; write for example 8h or 7d"))
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
        let body = request.get_ref();
        IncomingOrder { rpc, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.change_upgrade(order, body.name.clone(), change)
            })
            .await
    }
}

#[tonic::async_trait]
impl ClusterKubernetes for ClusterKubernetesService {
    async fn set(
        &self,
        request: Request<v1::SetClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let wish = parse_patch(&body.patch.clone().unwrap_or_default())?;
        IncomingOrder { rpc: SET, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.set_kubernetes(order, body.name.clone(), wish)
            })
            .await
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: REMOVE, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.remove_kubernetes(order, body.name.clone())
            })
            .await
    }

    async fn rotate(
        &self,
        request: Request<v1::RotateClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let keys: RotatableKeys =
            body.keys.parse().map_err(|error: UnknownName| invalid_argument("keys", error.to_string()))?;
        IncomingOrder { rpc: ROTATE, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.rotate_kubernetes_keys(order, body.name.clone(), keys)
            })
            .await
    }

    async fn list_users(
        &self,
        request: Request<v1::ListClusterKubernetesUsersRequest>,
    ) -> Result<Response<v1::ListClusterKubernetesUsersResponse>, Status> {
        let name = request.into_inner().name;
        let look =
            self.context.read_pool.read_with(name, |tx, name| Box::pin(list_kubernetes_users(tx, name)));
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
        let body = request.get_ref();
        let new = parse_user_request(body)?;
        IncomingOrder { rpc: ISSUE_USER, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.request_kubernetes_user(order, body.name.clone(), new)
            })
            .await
    }

    async fn upgrade(
        &self,
        request: Request<v1::UpgradeClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let new = NewUpgrade {
            kubernetes: optional_line("kubernetes", &body.kubernetes)?,
            roleserver: optional_line("roleserver", &body.roleserver)?,
            parallelism: body.parallelism.max(1),
            deadline_seconds: if body.deadline_seconds == 0 {
                DEFAULT_NODE_DEADLINE_SECONDS
            } else {
                body.deadline_seconds
            },
        };
        IncomingOrder { rpc: UPGRADE, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.upgrade_cluster(order, body.name.clone(), new)
            })
            .await
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
