//! gRPC service `ClusterKubernetes`: Kubernetes settings, users, key rotation, upgrades.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::services::kubernetes_messages::{optional_line, parse_patch};
use crate::api::services::order_confirmation::{confirm_dry_run, confirmation_by_name};
use crate::api::services::order_fields::{parse_expiry_at, parse_lifetime};
use bmdb::cluster::kubernetes::user::{KubernetesUserRequest, list_kubernetes_users};
use bmdb::cluster::lock::order_target;
use bmdb::cluster::upgrade::NewUpgrade;
use bmdb::cluster::upgrade::orders::UpgradeChange;
use bmdb::orders::order::Expiry;
use model::cluster::certificate_request::{DEFAULT_LIFETIME, check_holder};
use model::cluster::kubernetes::KeyPurpose;
use model::cluster::kubernetes_user::{KubernetesAccess, KubernetesUser, check_lifetime, check_public_key};
use model::cluster::upgrade::DEFAULT_NODE_DEADLINE_SECONDS;
use model::process::UnknownName;
use model::rpc_name::{
    ABORT_UPGRADE_RPC, ISSUE_KUBERNETES_USER_RPC, PAUSE_UPGRADE_RPC, REMOVE_KUBERNETES_RPC,
    RESUME_UPGRADE_RPC, ROLL_BACK_KUBERNETES_RPC, ROTATE_KUBERNETES_RPC, SET_KUBERNETES_RPC,
    UPGRADE_KUBERNETES_RPC,
};
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::cluster_kubernetes_server::ClusterKubernetes;

/// The gRPC service `ClusterKubernetes`.
pub struct ClusterKubernetesService {
    /// Context shared by all services.
    pub context: ApiContext,
}

fn parse_user_request(
    request: &v1::IssueClusterKubernetesUserRequest,
) -> Result<KubernetesUserRequest, Status> {
    let none =
        || invalid_argument("public_key", "it is not a public key of ECDSA P-256, in hexadecimal digits");
    let public_key = hex::decode(&request.public_key).map_err(|_| none())?;
    check_public_key(&public_key).map_err(|reason| invalid_argument("public_key", reason))?;
    check_holder(&request.holder).map_err(|reason| invalid_argument("holder", reason))?;
    let access: KubernetesAccess =
        request.access.parse().map_err(|error: UnknownName| invalid_argument("access", error.to_string()))?;
    let expiry = match &request.expiry {
        None => Expiry::After(DEFAULT_LIFETIME),
        Some(v1::issue_cluster_kubernetes_user_request::Expiry::Lifetime(text)) => {
            parse_lifetime(text, DEFAULT_LIFETIME, check_lifetime)?
        }
        Some(v1::issue_cluster_kubernetes_user_request::Expiry::ExpiresAt(time)) => parse_expiry_at(*time)?,
    };
    Ok(KubernetesUserRequest { public_key, holder: request.holder.clone(), access, expiry })
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
        let wish = parse_patch(&body.patch.clone().unwrap_or_default(), &self.context.signing.trust())?;
        IncomingOrder { rpc: SET_KUBERNETES_RPC, request: &request, order: body.order.as_ref() }
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
        let reply =
            IncomingOrder { rpc: REMOVE_KUBERNETES_RPC, request: &request, order: body.order.as_ref() }
                .execute(order_target(&body.name), |order| {
                    self.context.bmdb.remove_kubernetes(order, body.name.clone())
                })
                .await;
        confirm_dry_run(reply, confirmation_by_name(REMOVE_KUBERNETES_RPC, &body.name))
    }

    async fn rotate(
        &self,
        request: Request<v1::RotateClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let keys: KeyPurpose =
            body.keys.parse().map_err(|error: UnknownName| invalid_argument("keys", error.to_string()))?;
        IncomingOrder { rpc: ROTATE_KUBERNETES_RPC, request: &request, order: body.order.as_ref() }
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
        let users = found.into_iter().map(|user| encode_user(user, now)).collect();
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
        IncomingOrder { rpc: ISSUE_KUBERNETES_USER_RPC, request: &request, order: body.order.as_ref() }
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
            trust: self.context.signing.trust(),
        };
        IncomingOrder { rpc: UPGRADE_KUBERNETES_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.upgrade_cluster(order, body.name.clone(), new)
            })
            .await
    }

    async fn roll_back(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (ROLL_BACK_KUBERNETES_RPC, UpgradeChange::RollBack)).await
    }

    async fn pause_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (PAUSE_UPGRADE_RPC, UpgradeChange::Pause)).await
    }

    async fn resume_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (RESUME_UPGRADE_RPC, UpgradeChange::Resume)).await
    }

    async fn abort_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_upgrade(request, (ABORT_UPGRADE_RPC, UpgradeChange::Abort)).await
    }
}

fn encode_user(user: KubernetesUser, now: Timestamp) -> v1::ClusterKubernetesUser {
    let KubernetesUser { request, access, server_authorities, api_servers } = user;
    let (state, issued) = (request.state(now), request.issued.as_ref());
    v1::ClusterKubernetesUser {
        id: request.id.to_string(),
        access: access.to_string(),
        public_key: hex::encode(&request.public_key),
        state: state.as_str().to_owned(),
        requested_at: Some(encode_timestamp(request.requested_at)),
        expires_at: issued.map(|issued| encode_timestamp(issued.expires_at)),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
        server_authorities: server_authorities.iter().map(hex::encode).collect(),
        api_servers,
        holder: request.holder,
        requested_by: request.requested_by,
        rejection: request.rejection,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use model::cluster::certificate_request::{CertificateRequest, SignedCertificate};
    use model::time::Span;
    use uuid::Uuid;

    #[test]
    fn state_of_a_certificate_is_that_of_its_request() {
        let at = |seconds: i64| Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let user = |end: Option<i64>, rejection: Option<&str>| KubernetesUser {
            request: CertificateRequest {
                id: Uuid::from_u128(1),
                public_key: Vec::new(),
                holder: "kim".to_owned(),
                lifetime: Span::hours(8),
                requested_at: at(0),
                requested_by: "kim".to_owned(),
                issued: end.map(|end| SignedCertificate { certificate: vec![1], expires_at: at(end) }),
                rejection: rejection.map(str::to_owned),
                revocation: None,
            },
            access: KubernetesAccess::Viewer,
            server_authorities: vec![vec![2]],
            api_servers: vec!["10.0.0.1:6443".to_owned()],
        };
        for (user, now, expected) in [
            (user(None, None), 3_599, "requested"),
            (user(None, None), 3_600, "timed-out"),
            (user(None, Some("no")), 1, "rejected"),
            (user(Some(100), None), 99, "valid"),
            (user(Some(100), None), 100, "expired"),
        ] {
            assert_eq!(encode_user(user, at(now)).state, expected);
        }
    }
}
