//! The service `Clusters`.

use tonic::{Request, Response, Status};

use crate::bmdb::cluster::{no_such, target, view, with_machines};
use crate::bmdb::cluster_foresight::{Foresight, Supposed};
use crate::bmdb::cluster_restore::Restore;
use crate::bmdb::cluster_snapshot::snapshots_of;
use crate::model::cluster::declared::{DeclarationView, ServiceView};
use crate::model::cluster::foresee::{ASSUMPTIONS, Foreseen};
use crate::model::cluster::snapshot::SnapshotView;
use crate::model::cluster::spec::{Approval, Change, Spec};
use crate::model::cluster::view::{ClusterMachineView, ClusterView};
use crate::model::declaration::Declaration;
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_server::Clusters;
use crate::server::api::cluster_kubernetes;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

const CREATE: &str = "shepherd.fleet.v1.Clusters/Create";
const CHANGE: &str = "shepherd.fleet.v1.Clusters/Change";
const DECLARE: &str = "shepherd.fleet.v1.Clusters/Declare";
const UNDECLARE: &str = "shepherd.fleet.v1.Clusters/Undeclare";
const SNAPSHOT: &str = "shepherd.fleet.v1.Clusters/Snapshot";
const ROTATE_KEY: &str = "shepherd.fleet.v1.Clusters/RotateKey";
const RESTORE: &str = "shepherd.fleet.v1.Clusters/Restore";
const APPROVE: &str = "shepherd.fleet.v1.Clusters/Approve";
const DELETE: &str = "shepherd.fleet.v1.Clusters/Delete";

/// The service.
pub struct ClustersService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Clusters for ClustersService {
    async fn list(
        &self,
        request: Request<v1::ListClustersRequest>,
    ) -> Result<Response<v1::ListClustersResponse>, Status> {
        let name = Some(request.into_inner().name).filter(|name| !name.is_empty());
        let look = self.site.looks.look(move |tx| {
            let name = name.clone();
            Box::pin(async move { with_machines(tx, name.as_deref()).await })
        });
        let (found, now) = look.await.map_err(of_bmdb)?;
        let clusters = found.iter().map(|found| cluster(view(found))).collect();
        Ok(Response::new(v1::ListClustersResponse { clusters, at: Some(at(now)) }))
    }

    async fn plan(
        &self,
        request: Request<v1::PlanClusterRequest>,
    ) -> Result<Response<v1::PlanClusterResponse>, Status> {
        let asked = request.into_inner();
        let select = match asked.select.as_str() {
            "" => None,
            said => Some(said.parse().map_err(|said: String| wrong("select", said))?),
        };
        let change = Change {
            control_plane: asked.control_plane,
            workers: asked.workers,
            give: asked.give.into_iter().collect(),
            take: asked.take.into_iter().collect(),
        };
        let supposed = Supposed { change, select, delete: asked.delete };
        let foresight =
            self.site.looks.bmdb().foresee_cluster(&asked.name, &supposed).await.map_err(of_bmdb)?;
        let exists = matches!(foresight, Foresight::Of(_));
        let (Foresight::Of(foreseen) | Foresight::IfAskedFor(foreseen)) = foresight else {
            return Err(of_bmdb(no_such(&asked.name)));
        };
        Ok(Response::new(planned(foreseen, exists)))
    }

    async fn create(
        &self,
        request: Request<v1::CreateClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let approval = match asked.approval.as_str() {
            "" => Approval::default(),
            said => said.parse().map_err(|error: UnknownName| wrong("approval", error.to_string()))?,
        };
        let spec = Spec {
            name: asked.name.clone(),
            control_plane: asked.control_plane,
            workers: asked.workers,
            selector: asked.select.parse().map_err(|said: String| wrong("select", said))?,
            roles: asked.roles.iter().cloned().collect(),
            approval,
        };
        let order = Said { rpc: CREATE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let kubernetes = asked.kubernetes.as_ref().map(cluster_kubernetes::wish).transpose()?;
        let carried = self.site.bmdb.create_cluster(order, spec, kubernetes).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }

    async fn change(
        &self,
        request: Request<v1::ChangeClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let change = Change {
            control_plane: asked.control_plane,
            workers: asked.workers,
            give: asked.give.iter().cloned().collect(),
            take: asked.take.iter().cloned().collect(),
        };
        let order = Said { rpc: CHANGE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried =
            self.site.bmdb.change_cluster(order, asked.name.clone(), change).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }

    async fn declare(
        &self,
        request: Request<v1::DeclareInClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let declaration = Declaration::new(asked.declaration.clone().unwrap_or_default())
            .map_err(|error| wrong("declaration", error.to_string()))?;
        let order = Said { rpc: DECLARE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let declared = self.site.bmdb.declare_in_cluster(order, asked.name.clone(), declaration);
        Ok(Response::new(answer(None, dry_run, &declared.await.map_err(of_bmdb)?)))
    }

    async fn undeclare(
        &self,
        request: Request<v1::UndeclareInClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: UNDECLARE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let withdrawn = self.site.bmdb.undeclare_in_cluster(order, asked.name.clone(), asked.role.clone());
        Ok(Response::new(answer(None, dry_run, &withdrawn.await.map_err(of_bmdb)?)))
    }

    async fn snapshot(
        &self,
        request: Request<v1::SnapshotClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: SNAPSHOT, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let asked = self.site.bmdb.ask_for_snapshot(order, asked.name.clone());
        Ok(Response::new(answer(None, dry_run, &asked.await.map_err(of_bmdb)?)))
    }

    async fn restore(
        &self,
        request: Request<v1::RestoreClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let said = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let restore = Restore {
            snapshot: said(&asked.snapshot),
            onto: said(&asked.onto),
            bypass_quorum: asked.bypass_quorum,
        };
        let order = Said { rpc: RESTORE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let restored = self.site.bmdb.restore_cluster(order, asked.name.clone(), restore);
        Ok(Response::new(answer(None, dry_run, &restored.await.map_err(of_bmdb)?)))
    }

    async fn rotate_key(
        &self,
        request: Request<v1::RotateClusterKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: ROTATE_KEY, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let rotated = self.site.bmdb.rotate_cluster_key(order, asked.name.clone());
        Ok(Response::new(answer(None, dry_run, &rotated.await.map_err(of_bmdb)?)))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let name = request.into_inner().name;
        let look = self.site.looks.look(move |tx| {
            let name = name.clone();
            Box::pin(async move { snapshots_of(tx, &name).await })
        });
        let (found, now) = look.await.map_err(of_bmdb)?;
        let snapshots = found.into_iter().map(snapshot).collect();
        Ok(Response::new(v1::ListSnapshotsResponse { snapshots, at: Some(at(now)) }))
    }

    async fn approve(
        &self,
        request: Request<v1::ApproveInClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: APPROVE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let approved = self.site.bmdb.approve_in_cluster(order, asked.name.clone(), asked.machine.clone());
        Ok(Response::new(answer(None, dry_run, &approved.await.map_err(of_bmdb)?)))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: DELETE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.delete_cluster(order, asked.name.clone()).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

fn planned(foreseen: Foreseen, exists: bool) -> v1::PlanClusterResponse {
    v1::PlanClusterResponse {
        at: Some(at(foreseen.at)),
        exists,
        steps: (foreseen.steps.into_iter())
            .map(|step| v1::ClusterStep { machine: step.machine, name: step.name, what: step.what })
            .collect(),
        end: foreseen.end.as_str().to_owned(),
        waits: foreseen.waits,
        machines: (foreseen.machines.into_iter())
            .map(|(name, waits)| v1::ClusterMachineWait { name, waits })
            .collect(),
        assumptions: ASSUMPTIONS.map(str::to_owned).to_vec(),
    }
}

fn cluster(view: ClusterView) -> v1::Cluster {
    v1::Cluster {
        name: view.name,
        id: view.id,
        stage: view.stage,
        control_plane: view.control_plane,
        workers: view.workers,
        select: view.select,
        roles: view.roles,
        approval: view.approval,
        created_at: Some(at(view.created_at)),
        created_by: view.created_by,
        deleting_by: view.deleting_by,
        curators: view.curators,
        seen_at: view.seen_at.map(at),
        voters: view.voters,
        voters_reached: view.voters_reached,
        waits: view.waits,
        machines: view.machines.into_iter().map(machine).collect(),
        declarations: view.declarations.into_iter().map(declaration).collect(),
        snapshot_at: view.snapshot_at.map(at),
        epoch: view.epoch,
        restored_at: view.restored_at.map(at),
        restoring_from: view.restoring_from,
        restoring_by: view.restoring_by,
        key_since: view.key_since.map(at),
        key_asked_by: view.key_asked_by,
        keys_refused_since: view.keys_refused_since.map(at),
        kubernetes: view.kubernetes.map(cluster_kubernetes::state),
        upgrade: view.upgrade.map(cluster_kubernetes::upgrade),
    }
}

fn snapshot(view: SnapshotView) -> v1::ClusterSnapshot {
    v1::ClusterSnapshot {
        id: view.id,
        taken_at: Some(at(view.taken_at)),
        why: view.why,
        revision: view.revision,
        epoch: view.epoch,
        bytes: view.bytes,
        nodes: view.nodes,
        members: view.members,
        digest: view.digest,
    }
}

fn declaration(view: DeclarationView) -> v1::ClusterDeclaration {
    v1::ClusterDeclaration {
        role: view.role,
        services: view.services,
        digest: view.digest,
        declared_at: Some(at(view.declared_at)),
        declared_by: view.declared_by,
        withdrawn: view.withdrawn,
    }
}

fn service(view: ServiceView) -> v1::ClusterService {
    v1::ClusterService {
        role: view.role,
        service: view.service,
        state: view.state,
        since: view.since.map(at),
        restarts: view.restarts,
        message: view.message,
    }
}

fn machine(view: ClusterMachineView) -> v1::ClusterMachine {
    v1::ClusterMachine {
        machine: view.machine,
        name: view.name,
        part: view.part,
        location: view.location,
        phase: view.phase,
        node: view.node,
        state: view.state,
        health: view.health,
        roles: view.roles,
        leaving: view.leaving,
        waits: view.waits,
        services: view.services.into_iter().map(service).collect(),
        kubernetes: view.kubernetes.map(cluster_kubernetes::on_node),
    }
}
