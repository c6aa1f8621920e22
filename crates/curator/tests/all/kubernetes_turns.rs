//! Key rotation with three controllers and a worker, which behave as their role servers would: a node that receives
//! other keys stops, starts again, and reports it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::leader_channel::LeaderTracker;
use curator_client::node::{Node, NodeState};
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::service_status::Kind;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use super::leading::{call_leader, three, way, way_of};
use testkit::aloud::TestResult;
use testkit::curators::{Cluster, certificate, kubernetes_settings, status};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

const CONTROLLER: &str = "kubernetes-controller";
const WORKER: &str = "kubernetes-worker";

/// A node that follows the setup it receives, and sends heartbeats.
struct Follower {
    id: String,
    address: SocketAddr,
    curators: LeaderTracker,
    setup_receiver: watch::Receiver<Option<wire::KubernetesSetup>>,
    is_silent: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

impl Follower {
    fn begin(cluster: &Cluster, holder: &Holder, address: SocketAddr) -> Result<Self> {
        let own = certificate(&cluster.authority, holder, cluster.time.now())?;
        let (curators, mut tasks) = way_of(cluster, holder.with(&own)?);
        let (tell, receiver) = watch::channel(None);
        let is_silent = Arc::new(AtomicBool::new(false));
        tasks.spawn({
            let curators = curators.clone();
            async move {
                loop {
                    let request = wire::WatchOwnKubernetesRequest {};
                    if let Ok(answers) = KubernetesClient::new(curators.channel()).watch_own(request).await {
                        let mut answers = answers.into_inner();
                        while let Ok(Some(answer)) = answers.message().await {
                            tell.send_replace(answer.setup);
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        });
        tasks.spawn({
            let (curators, is_silent) = (curators.clone(), is_silent.clone());
            async move {
                loop {
                    let (beat, beats) = mpsc::channel(1);
                    let beating = async {
                        while beat.send(wire::HeartbeatRequest {}).await.is_ok() {
                            tokio::time::sleep(Duration::from_millis(100)).await;
                            while is_silent.load(Ordering::SeqCst) {
                                tokio::time::sleep(Duration::from_millis(50)).await;
                            }
                        }
                    };
                    let hearing = async {
                        let mut nodes = NodesClient::new(curators.channel());
                        if let Ok(answers) = nodes.heartbeat(ReceiverStream::new(beats)).await {
                            let mut answers = answers.into_inner();
                            while let Ok(Some(_)) = answers.message().await {}
                        }
                    };
                    tokio::select! { () = beating => {}, () = hearing => {} }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        });
        Ok(Self {
            id: holder.id.to_string(),
            address,
            curators,
            setup_receiver: receiver,
            is_silent,
            _tasks: tasks,
        })
    }

    /// Reports the generation that its components run with, the same for all of them.
    async fn say(&self, generation: u64, kind: Kind) -> Result<()> {
        let component = wire::KubernetesComponentStatus {
            name: "kube-apiserver".to_owned(),
            kind: kind.into(),
            ..Default::default()
        };
        let kubernetes =
            wire::KubernetesStatus { generation, components: vec![component], ..Default::default() };
        let status = wire::NodeStatus { kubernetes: Some(kubernetes), ..status(self.address) };
        let request = wire::UpdateStatusRequest { node_id: self.id.clone(), status: Some(status) };
        let nodes = NodesClient::new(self.curators.channel());
        call_leader("what it says", async || nodes.clone().update_status(request.clone()).await).await?;
        Ok(())
    }

    /// The generation of the setup that it received last; 0 if it received none.
    fn generation(&self) -> u64 {
        self.setup_receiver.borrow().as_ref().map_or(0, |setup| setup.generation)
    }

    fn trusted_clients(&self) -> Vec<Vec<u8>> {
        let kubernetes_setup = self.setup_receiver.borrow();
        let authorities = kubernetes_setup.iter().flat_map(|setup| &setup.authorities);
        let mut clients = authorities.filter(|authority| authority.keys() == wire::KubernetesKeys::Clients);
        clients.next().map(|authority| authority.trusted.clone()).unwrap_or_default()
    }
}

/// A cluster of three controllers and a worker, which all follow the setups that they receive.
struct Fleet {
    cluster: Cluster,
    owner: LeaderTracker,
    /// The three controllers, and the worker.
    nodes: Vec<Arc<Follower>>,
    _following: JoinSet<()>,
}

impl Fleet {
    async fn begin() -> Result<Self> {
        let cluster = Cluster::start_with(three()).await?;
        let (owner, following) = way(&cluster)?;
        let worker = Holder::new()?;
        let record = Node::new(worker.key, NodeState::Up, cluster.time.now());
        cluster.client_of(0).put_unguarded(&Node::etcd_key(&worker.id)?, &record.encode()?).await?;
        let mut nodes = Vec::new();
        for (number, holder) in cluster.nodes.iter().chain([&worker]).enumerate() {
            let address = match number {
                3 => SocketAddr::from(([10, 0, 0, 3], 0)),
                number => cluster.address(number)?.parse()?,
            };
            nodes.push(Arc::new(Follower::begin(&cluster, holder, address)?));
        }
        let fleet = Self { cluster, owner, nodes, _following: following };
        let request =
            wire::PutKubernetesRequest { settings: Some(kubernetes_settings()), expected_revision: None };
        let kubernetes = KubernetesClient::new(fleet.owner.channel());
        call_leader("Kubernetes", async || kubernetes.clone().put(request.clone()).await).await?;
        for node in &fleet.nodes {
            node.say(0, Kind::Starting).await?;
            let role = if node.id == worker.id.to_string() { WORKER } else { CONTROLLER };
            // The three are members of etcd. Their curators notice that by themselves.
            until("it has its role", async || Ok(fleet.roles(node, &[role], &[]).await.is_ok())).await?;
        }
        for node in &fleet.nodes {
            until("it receives what to run", async || Ok(node.generation() > 0)).await?;
            node.say(node.generation(), Kind::Healthy).await?;
        }
        Ok(fleet)
    }

    async fn roles(&self, node: &Follower, give: &[&str], take: &[&str]) -> Result<()> {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let request = wire::UpdateRolesRequest {
            node_id: node.id.clone(),
            add_roles: names(give),
            remove_roles: names(take),
            ..Default::default()
        };
        ManagementClient::new(self.owner.channel()).update_roles(request).await?;
        Ok(())
    }

    async fn rotate(&self) -> Result<wire::KubernetesRotation> {
        let request = wire::RotateKubernetesRequest { keys: wire::KubernetesKeys::Clients.into() };
        let kubernetes = KubernetesClient::new(self.owner.channel());
        let begun = call_leader("a replacement", async || kubernetes.clone().rotate(request).await).await?;
        begun.rotation.context("no replacement")
    }

    async fn rotations(&self) -> Result<Vec<wire::KubernetesRotation>> {
        let kubernetes = KubernetesClient::new(self.owner.channel());
        let request = wire::GetKubernetesRequest {};
        Ok(call_leader("Kubernetes", async || kubernetes.clone().get(request).await).await?.rotations)
    }

    /// Waits until one of the controllers receives this generation, and returns its number.
    async fn wait_for_generation(&self, generation: u64) -> Result<usize> {
        let mut which = None;
        until("a controller receives the generation", async || {
            which = (0..3).find(|number| self.nodes[*number].generation() == generation);
            Ok(which.is_some())
        })
        .await?;
        which.context("none")
    }
}

/// The observations of all nodes together.
#[derive(Default)]
struct Board {
    /// Controllers that received a new generation and have not restarted yet.
    away: Vec<usize>,
    /// The most controllers that were away at once.
    most_away: usize,
    /// The generation that each node runs with.
    acts: BTreeMap<usize, u64>,
    /// Whether the worker received the generation before all controllers ran with it.
    worker_was_early: bool,
}

/// Stops and starts again whenever it receives another generation, until it runs with this one.
async fn act(number: usize, node: Arc<Follower>, board: Arc<Mutex<Board>>, last: u64) -> Result<()> {
    let see = || board.lock().unwrap_or_else(PoisonError::into_inner);
    let mut receiver = node.setup_receiver.clone();
    let mut acts = node.generation();
    see().acts.insert(number, acts);
    while acts < last {
        let is_new = |kubernetes_setup: &Option<wire::KubernetesSetup>| {
            kubernetes_setup.as_ref().is_some_and(|kubernetes_setup| kubernetes_setup.generation > acts)
        };
        let next = receiver.wait_for(is_new).await?.as_ref().map_or(0, |setup| setup.generation);
        acts = next;
        {
            let mut board = see();
            if number == 3 {
                board.worker_was_early |= (0..3).any(|number| board.acts.get(&number) < Some(&acts));
            } else {
                board.away.push(number);
                board.most_away = board.most_away.max(board.away.len());
            }
        }
        for _ in 0..5 {
            node.say(0, Kind::Starting).await?;
        }
        {
            let mut board = see();
            board.away.retain(|away| *away != number);
            board.acts.insert(number, acts);
        }
        node.say(acts, Kind::Healthy).await?;
    }
    Ok(())
}

#[tokio::test]
async fn controllers_act_on_other_keys_one_after_the_other_and_the_worker_after_them() -> TestResult {
    let fleet = Fleet::begin().await?;
    let first = fleet.nodes[0].generation();
    let old = fleet.nodes[0].trusted_clients();
    let board = Arc::new(Mutex::new(Board::default()));
    // Trusted, signs, dropped: three generations.
    let acting = fleet.nodes.iter().enumerate();
    let acting = acting.map(|(number, node)| act(number, node.clone(), board.clone(), first + 3));
    let acting = futures::future::try_join_all(acting);
    let rotating = async {
        let begun = fleet.rotate().await?;
        assert_eq!(begun.waits_for.len(), 4, "{begun:?}");
        anyhow::Ok(())
    };
    let acted = futures::future::try_join(acting, rotating);
    in_time("all act on it", acted).await??;
    until("the replacement is done", async || Ok(fleet.rotations().await?.is_empty())).await?;
    let board = board.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(board.most_away, 1, "API servers of several controllers were away at once");
    assert!(!board.worker_was_early, "the worker received it before all controllers acted");
    for node in &fleet.nodes {
        let now = node.trusted_clients();
        assert!(now.len() == 1 && now != old, "{}", node.id);
    }
    Ok(())
}

/// The leader is lost while one controller is away: the next leader sends the others the generation that they had. Then
/// one controller is silent, and the rotation names it until its role is removed.
#[tokio::test]
async fn rotation_goes_on_under_another_leader_and_the_node_that_delays_it_is_named() -> TestResult {
    let mut fleet = Fleet::begin().await?;
    let first = fleet.nodes[0].generation();
    let old = fleet.nodes[0].trusted_clients();
    fleet.rotate().await?;
    let away = fleet.wait_for_generation(first + 1).await?;
    fleet.nodes[away].say(0, Kind::Starting).await?;
    let held = |rotations: &[wire::KubernetesRotation]| {
        rotations.first().map(|rotation| rotation.blocked_by.clone()).unwrap_or_default()
    };
    assert_eq!(held(&fleet.rotations().await?), [fleet.nodes[away].id.clone()]);

    let led = fleet.cluster.until_one_leads(None).await?;
    fleet.cluster.stop(led).await?;
    fleet.cluster.until_one_leads(Some(led)).await?;
    // Each node has followed to the next leader, and receives from it the generation that it had before.
    let others: Vec<usize> = (0..3).filter(|number| *number != away).collect();
    for number in 0..4 {
        let request = wire::WatchOwnKubernetesRequest {};
        let kubernetes = KubernetesClient::new(fleet.nodes[number].curators.channel());
        let mut watching =
            call_leader("what it is to run", async || kubernetes.clone().watch_own(request).await).await?;
        let setup = watching.message().await?.and_then(|answer| answer.setup).context("nothing")?;
        let expected = if number == away { first + 1 } else { first };
        assert_eq!(setup.generation, expected, "{number}: the next leader tells it something else");
    }
    for number in &others {
        assert_eq!(fleet.nodes[*number].trusted_clients(), old, "{number}");
    }
    fleet.nodes[away].say(first + 1, Kind::Healthy).await?;
    let second = async {
        let mut which = None;
        until("the next one receives the generation", async || {
            which = others.iter().copied().find(|number| fleet.nodes[*number].generation() > first);
            Ok(which.is_some())
        })
        .await?;
        which.context("none")
    };
    let second = second.await?;
    let third = others.into_iter().find(|number| *number != second).context("no third")?;
    assert_eq!(fleet.nodes[third].generation(), first, "two are away at once");

    // It runs with the generation. The third controller is silent, and receives the generation for that reason: it
    // cannot harm the other nodes any more.
    fleet.nodes[third].is_silent.store(true, Ordering::SeqCst);
    fleet.nodes[second].say(first + 1, Kind::Healthy).await?;
    until("the third receives it", async || Ok(fleet.nodes[third].generation() == first + 1)).await?;
    fleet.cluster.time.pass(11);
    until("it is named", async || Ok(held(&fleet.rotations().await?).contains(&fleet.nodes[third].id)))
        .await?;
    assert_eq!(fleet.nodes[3].generation(), first, "the worker received it before all controllers acted");
    fleet.roles(&fleet.nodes[third], &[], &[CONTROLLER]).await?;
    until("the worker receives the generation", async || Ok(fleet.nodes[3].generation() == first + 1))
        .await?;
    let waits = fleet.rotations().await?;
    assert_eq!(
        waits.first().map(|rotation| rotation.waits_for.clone()),
        Some(vec![fleet.nodes[3].id.clone()])
    );
    fleet.nodes[3].say(first + 1, Kind::Healthy).await?;
    fleet.wait_for_generation(first + 2).await?;
    Ok(())
}
