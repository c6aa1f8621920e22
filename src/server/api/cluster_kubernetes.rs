//! The service `ClusterKubernetes`.

use tonic::{Request, Response, Status};

use crate::bmdb::cluster::target;
use crate::bmdb::cluster_kubernetes::Wish;
use crate::bmdb::cluster_kubernetes_user::{NewUser, kubernetes_users};
use crate::bmdb::cluster_upgrade::{NewUpgrade, UpgradeChange};
use crate::model::cluster::credential::{DEFAULT_LIFETIME, check_holder};
use crate::model::cluster::kubernetes::{Clash, Component, Keys, OnNode, Rotation, Storage};
use crate::model::cluster::kubernetes_user::{Access, UserView, check_key, check_lifetime};
use crate::model::cluster::kubernetes_view::{BundleView, KubernetesView, UpgradeView};
use crate::model::cluster::upgrade::DEADLINE;
use crate::model::process::UnknownName;
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::cluster_kubernetes_server::ClusterKubernetes;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;
use crate::server::api::texts::line;

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
const LONGEST: usize = 100;

/// The service.
pub struct ClusterKubernetesService {
    /// What it stands on.
    pub site: Site,
}

/// What is said, once its form is right.
pub(super) fn wish(said: &v1::KubernetesWish) -> Result<Wish, Status> {
    let some = |field: &str, text: &str| -> Result<Option<String>, Status> {
        Ok(Some(line(field, text, LONGEST)?.to_owned()).filter(|text| !text.is_empty()))
    };
    let storage = said.storage.as_ref().map(|storage| -> Result<Storage, Status> {
        Ok(Storage {
            driver: line("storage.driver", &storage.driver, LONGEST)?.to_owned(),
            class: line("storage.class", &storage.class, LONGEST)?.to_owned(),
        })
    });
    let add_ons = said.add_ons.iter().map(|(name, artefact)| -> Result<(String, String), Status> {
        Ok((line("add_ons", name, LONGEST)?.to_owned(), line("add_ons", artefact, LONGEST)?.to_owned()))
    });
    Ok(Wish {
        bundle: some("bundle", &said.bundle)?,
        service_range: some("service_range", &said.service_range)?,
        pod_range: some("pod_range", &said.pod_range)?,
        node_prefix: Some(said.node_prefix).filter(|prefix| *prefix != 0),
        domain: some("domain", &said.domain)?,
        add_ons: add_ons.collect::<Result<_, _>>()?,
        remove_add_ons: said.remove_add_ons.iter().cloned().collect(),
        storage: storage.transpose()?,
    })
}

fn new_user(asked: &v1::IssueClusterKubernetesUserRequest) -> Result<NewUser, Status> {
    let none = || wrong("public_key", "it is no public key of ECDSA P-256, in hexadecimal digits");
    let public_key = hex::decode(&asked.public_key).map_err(|_| none())?;
    check_key(&public_key).map_err(|said| wrong("public_key", said))?;
    check_holder(&asked.holder).map_err(|said| wrong("holder", said))?;
    let access: Access =
        asked.access.parse().map_err(|error: UnknownName| wrong("access", error.to_string()))?;
    let lifetime = match asked.lifetime.as_str() {
        "" => DEFAULT_LIFETIME,
        said => said.parse::<Span>().map_err(|_| {
            wrong("lifetime", format!("{said:?} is no length of time; write for example 8h or 7d"))
        })?,
    };
    check_lifetime(lifetime).map_err(|said| wrong("lifetime", said))?;
    Ok(NewUser { public_key, holder: asked.holder.clone(), access, lifetime })
}

impl ClusterKubernetesService {
    async fn change(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
        (rpc, change): (&'static str, UpgradeChange),
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let changed = self.site.bmdb.change_upgrade(order, asked.name.clone(), change);
        Ok(Response::new(answer(None, dry_run, &changed.await.map_err(of_bmdb)?)))
    }
}

#[tonic::async_trait]
impl ClusterKubernetes for ClusterKubernetesService {
    async fn set(
        &self,
        request: Request<v1::SetClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let wish = wish(&asked.wish.clone().unwrap_or_default())?;
        let order = Said { rpc: SET, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let set = self.site.bmdb.set_kubernetes(order, asked.name.clone(), wish);
        Ok(Response::new(answer(None, dry_run, &set.await.map_err(of_bmdb)?)))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: REMOVE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let removed = self.site.bmdb.remove_kubernetes(order, asked.name.clone());
        Ok(Response::new(answer(None, dry_run, &removed.await.map_err(of_bmdb)?)))
    }

    async fn rotate(
        &self,
        request: Request<v1::RotateClusterKubernetesRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let keys: Keys = asked.what.parse().map_err(|error: UnknownName| wrong("what", error.to_string()))?;
        let order = Said { rpc: ROTATE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let rotated = self.site.bmdb.rotate_kubernetes(order, asked.name.clone(), keys);
        Ok(Response::new(answer(None, dry_run, &rotated.await.map_err(of_bmdb)?)))
    }

    async fn list_users(
        &self,
        request: Request<v1::ListClusterKubernetesUsersRequest>,
    ) -> Result<Response<v1::ListClusterKubernetesUsersResponse>, Status> {
        let name = request.into_inner().name;
        let look = self.site.looks.look(move |tx| {
            let name = name.clone();
            Box::pin(async move { kubernetes_users(tx, &name).await })
        });
        let (found, now) = look.await.map_err(of_bmdb)?;
        let users = found.into_iter().map(user).collect();
        Ok(Response::new(v1::ListClusterKubernetesUsersResponse { users, at: Some(at(now)) }))
    }

    async fn issue_user(
        &self,
        request: Request<v1::IssueClusterKubernetesUserRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let new = new_user(asked)?;
        let order = Said { rpc: ISSUE_USER, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let issued = self.site.bmdb.ask_for_kubernetes_user(order, asked.name.clone(), new);
        Ok(Response::new(answer(None, dry_run, &issued.await.map_err(of_bmdb)?)))
    }

    async fn upgrade(
        &self,
        request: Request<v1::UpgradeClusterRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let some = |field: &str, text: &str| -> Result<Option<String>, Status> {
            Ok(Some(line(field, text, LONGEST)?.to_owned()).filter(|text| !text.is_empty()))
        };
        let new = NewUpgrade {
            kubernetes: some("kubernetes", &asked.kubernetes)?,
            roleserver: some("roleserver", &asked.roleserver)?,
            parallelism: asked.parallelism.max(1),
            deadline_seconds: if asked.deadline_seconds == 0 { DEADLINE } else { asked.deadline_seconds },
        };
        let order = Said { rpc: UPGRADE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let upgraded = self.site.bmdb.upgrade_cluster(order, asked.name.clone(), new);
        Ok(Response::new(answer(None, dry_run, &upgraded.await.map_err(of_bmdb)?)))
    }

    async fn roll_back(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (ROLL_BACK, UpgradeChange::RollBack)).await
    }

    async fn pause_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (PAUSE, UpgradeChange::Pause)).await
    }

    async fn resume_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (RESUME, UpgradeChange::Resume)).await
    }

    async fn abort_upgrade(
        &self,
        request: Request<v1::ChangeClusterUpgradeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (ABORT, UpgradeChange::Abort)).await
    }
}

fn user(view: UserView) -> v1::ClusterKubernetesUser {
    v1::ClusterKubernetesUser {
        id: view.id,
        holder: view.holder,
        access: view.access,
        public_key: view.public_key,
        state: view.state,
        asked_at: Some(at(view.asked_at)),
        asked_by: view.asked_by,
        expires_at: view.expires_at.map(at),
        refused: view.refused,
        certificate: view.certificate,
        servers: view.servers,
        api_servers: view.api_servers,
    }
}

/// Kubernetes of a cluster.
pub(super) fn state(view: KubernetesView) -> v1::ClusterKubernetesState {
    let rotation = |rotation: Rotation| v1::ClusterRotation {
        what: rotation.what,
        stage: rotation.stage,
        since: rotation.since.map(at),
        waits_for: rotation.waits_for,
        until: rotation.until.map(at),
        held_by: rotation.held_by,
        told_at: rotation.told_at.map(at),
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
        asked_at: Some(at(view.asked_at)),
        asked_by: view.asked_by,
        removing_by: view.removing_by,
        rotate: view.rotate,
        told: view.known.told,
        assigned: view.known.assigned.into_iter().collect(),
        rotations: view.known.rotations.into_iter().map(rotation).collect(),
        api_servers: view.known.api_servers,
    }
}

/// An upgrade of a cluster.
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
        released: view.released,
        back: view.back,
        parallelism: view.parallelism,
        deadline_seconds: view.deadline_seconds,
        created_at: Some(at(view.created_at)),
        created_by: view.created_by,
        reason: view.reason,
        paused: view.paused,
        ended_at: view.ended_at.map(at),
        ended: view.ended,
        asked: view.asked,
        through: view.through,
    }
}

/// What a node runs of it.
pub(super) fn on_node(view: OnNode) -> v1::ClusterNodeKubernetes {
    let component = |component: Component| v1::ClusterComponent {
        name: component.name,
        state: component.state,
        since: component.since.map(at),
        restarts: component.restarts,
        message: component.message,
    };
    let clash =
        |clash: Clash| v1::ClusterClash { kind: clash.kind, name: clash.name, message: clash.message };
    v1::ClusterNodeKubernetes {
        bundle: view.bundle,
        version: view.version,
        components: view.components.into_iter().map(component).collect(),
        waits: view.waits,
        reconciles: view.reconciles,
        clashes: view.clashes.into_iter().map(clash).collect(),
    }
}
