//! gRPC service Clusters: create, change, plan, snapshot, restore, authority, keys, certificates of etcd's members.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use crate::api::services::cluster_messages::encode_cluster;
use crate::api::services::kubernetes_messages::parse_patch;
use crate::api::services::order_confirmation::{confirm_dry_run, confirmation_by_name};
use bmdb::cluster::declaration::NewDeclaration;
use bmdb::cluster::forecast::{ForecastResult, Hypothesis};
use bmdb::cluster::lock::{no_such_cluster, order_target};
use bmdb::cluster::reading::list_cluster_details;
use bmdb::cluster::restore::RestoreRequest;
use bmdb::cluster::snapshot::list_cluster_snapshots;
use model::cluster::authority_rotation::{RotationKind, check_rotation_confirmation};
use model::cluster::declaration::encode_signed_content;
use model::cluster::forecast::{ASSUMPTIONS, Forecast};
use model::cluster::snapshot::SnapshotView;
use model::cluster::spec::{ClusterSpec, ClusterSpecChange, JoinApproval, parse_cluster_selector};
use model::process::UnknownName;
use model::role_declaration::RoleDeclaration;
use model::rpc_name::{
    APPROVE_MACHINE_RPC, CHANGE_CLUSTER_RPC, CREATE_CLUSTER_RPC, DECLARE_ROLE_RPC, DELETE_CLUSTER_RPC,
    RENEW_PEERS_RPC, RESTORE_CLUSTER_RPC, ROTATE_AUTHORITY_RPC, ROTATE_KEY_RPC, ROTATE_SECRETS_KEY_RPC,
    SNAPSHOT_CLUSTER_RPC, UNDECLARE_ROLE_RPC,
};
use model::signed_artefact::declaration_proof::verify_declaration;
use model::signed_artefact::signature::ArtefactSignature;
use model::signed_artefact::signing_trust::SigningTrust;
use proto::fleet::v1;
use proto::fleet::v1::clusters_server::Clusters;

/// The gRPC service `Clusters`.
pub struct ClustersService {
    /// Context shared by all services.
    pub context: ApiContext,
}

/// Parses and verifies the signature of a declaration; `None` without one.
fn parse_signature(
    text: &str,
    declaration: &RoleDeclaration,
    trust: &SigningTrust,
) -> Result<Option<ArtefactSignature>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let refused = |reason: String| invalid_argument("signature", reason);
    let signature = ArtefactSignature::parse(text).map_err(|error| refused(error.to_string()))?;
    let (role, content) = (declaration.role().to_string(), encode_signed_content(declaration.to_wire()));
    verify_declaration(&signature, &role, &content, trust).map_err(refused)?;
    Ok(Some(signature))
}

#[tonic::async_trait]
impl Clusters for ClustersService {
    async fn list(
        &self,
        request: Request<v1::ListClustersRequest>,
    ) -> Result<Response<v1::ListClustersResponse>, Status> {
        let name = Some(request.into_inner().name).filter(|name| !name.is_empty());
        let look = self
            .context
            .read_pool
            .read_with(name, |tx, name| Box::pin(list_cluster_details(tx, name.as_deref())));
        let (found, now) = look.await.map_err(bmdb_status)?;
        let clusters = found.into_iter().map(encode_cluster).collect();
        Ok(Response::new(v1::ListClustersResponse { clusters, read_at: Some(encode_timestamp(now)) }))
    }

    async fn plan(
        &self,
        request: Request<v1::PlanClusterRequest>,
    ) -> Result<Response<v1::PlanClusterResponse>, Status> {
        let body = request.into_inner();
        let select = match body.selector.as_str() {
            "" => None,
            text => {
                Some(parse_cluster_selector(text).map_err(|reason| invalid_argument("selector", reason))?)
            }
        };
        let change = ClusterSpecChange {
            control_plane: body.control_plane,
            workers: body.workers,
            add_roles: body.add_roles.into_iter().collect(),
            remove_roles: body.remove_roles.into_iter().collect(),
            keep_authority: false,
        };
        let supposed = Hypothesis { change, select, delete: body.delete };
        let forecast = self
            .context
            .read_pool
            .bmdb()
            .forecast_cluster(&body.name, &supposed)
            .await
            .map_err(bmdb_status)?;
        let exists = matches!(forecast, ForecastResult::Existing(_));
        let (ForecastResult::Existing(prediction) | ForecastResult::Hypothetical(prediction)) = forecast
        else {
            return Err(bmdb_status(no_such_cluster(&body.name)));
        };
        Ok(Response::new(encode_forecast(prediction, exists)))
    }

    async fn create(
        &self,
        request: Request<v1::CreateClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let approval = match body.approval.as_str() {
            "" => JoinApproval::default(),
            text => {
                text.parse().map_err(|error: UnknownName| invalid_argument("approval", error.to_string()))?
            }
        };
        let spec = ClusterSpec {
            name: body.name.clone(),
            control_plane: body.control_plane,
            workers: body.workers,
            selector: parse_cluster_selector(&body.selector)
                .map_err(|reason| invalid_argument("selector", reason))?,
            roles: body.roles.iter().cloned().collect(),
            approval,
        };
        let order = IncomingOrder { rpc: CREATE_CLUSTER_RPC, request: &request, order: body.order.as_ref() }
            .parse_unversioned(order_target(&body.name))?;
        let dry_run = order.dry_run;
        let trust = self.context.signing.trust();
        let kubernetes = body.kubernetes.as_ref().map(|patch| parse_patch(patch, &trust)).transpose()?;
        let carried = self.context.bmdb.create_cluster(order, spec, kubernetes).await.map_err(bmdb_status)?;
        Ok(Response::new(encode_order_response(None, dry_run, &carried)))
    }

    async fn change(
        &self,
        request: Request<v1::ChangeClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let change = ClusterSpecChange {
            control_plane: body.control_plane,
            workers: body.workers,
            add_roles: body.add_roles.iter().cloned().collect(),
            remove_roles: body.remove_roles.iter().cloned().collect(),
            keep_authority: body.keep_authority,
        };
        IncomingOrder { rpc: CHANGE_CLUSTER_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.change_cluster(order, body.name.clone(), change)
            })
            .await
    }

    async fn declare_role(
        &self,
        request: Request<v1::DeclareRoleRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let declaration = RoleDeclaration::new(body.declaration.clone().unwrap_or_default())
            .map_err(|error| invalid_argument("declaration", error.to_string()))?;
        let trust = self.context.signing.trust();
        let signature = parse_signature(&body.signature, &declaration, &trust)?;
        let new = NewDeclaration { declaration, signature, trust };
        IncomingOrder { rpc: DECLARE_ROLE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.declare_cluster_role(order, body.name.clone(), new)
            })
            .await
    }

    async fn undeclare_role(
        &self,
        request: Request<v1::UndeclareRoleRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: UNDECLARE_ROLE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.undeclare_cluster_role(order, body.name.clone(), body.role.clone())
            })
            .await
    }

    async fn snapshot(
        &self,
        request: Request<v1::SnapshotClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: SNAPSHOT_CLUSTER_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.request_cluster_snapshot(order, body.name.clone())
            })
            .await
    }

    async fn renew_peers(
        &self,
        request: Request<v1::RenewClusterPeersRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: RENEW_PEERS_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.renew_cluster_peers(order, body.name.clone())
            })
            .await
    }

    async fn restore(
        &self,
        request: Request<v1::RestoreClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let reported = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let restore = RestoreRequest {
            snapshot: reported(&body.snapshot),
            target_machine: reported(&body.target_machine),
            bypass_quorum: body.bypass_quorum,
            without_kubernetes: body.without_kubernetes,
            confirmation: body.confirmation.clone(),
        };
        let reply = IncomingOrder { rpc: RESTORE_CLUSTER_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.restore_cluster(order, body.name.clone(), restore)
            })
            .await;
        confirm_dry_run(reply, confirmation_by_name(RESTORE_CLUSTER_RPC, &body.name))
    }

    async fn rotate_key(
        &self,
        request: Request<v1::RotateClusterKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: ROTATE_KEY_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.rotate_cluster_key(order, body.name.clone())
            })
            .await
    }

    async fn rotate_secrets_key(
        &self,
        request: Request<v1::RotateSecretsKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: ROTATE_SECRETS_KEY_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.rotate_secrets_key(order, body.name.clone())
            })
            .await
    }

    async fn rotate_authority(
        &self,
        request: Request<v1::RotateClusterAuthorityRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let kind = match body.kind.as_str() {
            "" => RotationKind::Planned,
            text => text.parse().map_err(|error: UnknownName| invalid_argument("kind", error.to_string()))?,
        };
        check_rotation_confirmation(kind, &body.name, &body.confirmation)
            .map_err(|problem| invalid_argument("confirmation", problem))?;
        IncomingOrder { rpc: ROTATE_AUTHORITY_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.rotate_cluster_authority(order, body.name.clone(), kind)
            })
            .await
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let name = request.into_inner().name;
        let look =
            self.context.read_pool.read_with(name, |tx, name| Box::pin(list_cluster_snapshots(tx, name)));
        let (found, now) = look.await.map_err(bmdb_status)?;
        let snapshots = found.into_iter().map(snapshot).collect();
        Ok(Response::new(v1::ListSnapshotsResponse { snapshots, read_at: Some(encode_timestamp(now)) }))
    }

    async fn approve_machine(
        &self,
        request: Request<v1::ApproveMachineRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: APPROVE_MACHINE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.approve_cluster_member(order, body.name.clone(), body.machine.clone())
            })
            .await
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let reply = IncomingOrder { rpc: DELETE_CLUSTER_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.delete_cluster(order, body.name.clone())
            })
            .await;
        confirm_dry_run(reply, confirmation_by_name(DELETE_CLUSTER_RPC, &body.name))
    }
}

fn encode_forecast(forecast: Forecast, exists: bool) -> v1::PlanClusterResponse {
    v1::PlanClusterResponse {
        read_at: Some(encode_timestamp(forecast.at)),
        exists,
        steps: (forecast.steps.into_iter())
            .map(|step| v1::ForecastStep { machine: step.machine, name: step.name, action: step.action })
            .collect(),
        end: forecast.end.as_str().to_owned(),
        wait_reasons: forecast.wait_reasons,
        machine_waits: (forecast.machine_waits.into_iter())
            .map(|(name, waits)| v1::MachineWait { name, wait_reason: waits })
            .collect(),
        assumptions: ASSUMPTIONS.map(str::to_owned).to_vec(),
    }
}

fn snapshot(view: SnapshotView) -> v1::ClusterSnapshot {
    v1::ClusterSnapshot {
        id: view.id,
        taken_at: Some(encode_timestamp(view.taken_at)),
        reason: view.reason,
        revision: view.revision,
        epoch: view.epoch,
        bytes: view.bytes,
        nodes: view.nodes,
        members: view.members,
        digest: view.digest,
        image_bytes: view.image_bytes,
    }
}
