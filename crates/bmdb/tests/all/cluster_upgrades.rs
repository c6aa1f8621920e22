//! Kubernetes of clusters, and upgrades: which orders are given, which are rejected with a message, and that an
//! upgrade goes on after any crash, node by node, in the right order.
//!
//! The database, the orders and all records are real. Nodes, and what curators report about them, are made up here,
//! so that the lease holder can die after any step.

mod bundles;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use model::cluster::kubernetes::{
    CONTROLLER_ROLE, ComponentStatus, CuratorKubernetes, KubernetesSpec, NodeKubernetes, ObservedKubernetes,
    WORKER_ROLE,
};
use model::cluster::node_address::NodeAddresses;
use model::cluster::plan::step::ClusterPlanStep;
use model::cluster::plan::upgrade::plan_upgrade;
use model::cluster::spec::{ClusterSpec, JoinApproval};
use model::cluster::state::{
    CONSENSUS_MEMBER_ROLE, ClusterNode, EtcdMember, NodeHealth, NodeState, ObservedCluster,
};
use model::cluster::upgrade::UpgradeEvent;
use model::ids::MachineId;
use model::selector::Selector;
use model::signed_artefact::signing_trust::SigningTrust;
use shepherd_bmdb::cluster::kubernetes::desired::KubernetesPatch;
use shepherd_bmdb::cluster::transitions::LEASE_KIND;
use shepherd_bmdb::cluster::upgrade::NewUpgrade;
use shepherd_bmdb::cluster::upgrade::orders::UpgradeChange;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::named_lease::NamedLease;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LeaseHolder};

fn order(rpc: &str) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: format!("shepherd.fleet.v1.ClusterKubernetes/{rpc}"),
        target: "the cluster ams".to_owned(),
        reason: "a test".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(rpc.as_bytes()),
    }
}

fn name() -> String {
    "ams".to_owned()
}

/// The message of an order; if it is rejected, the reason for programs and the text.
fn split_order_result<T>(
    carried: Result<T, BmdbError>,
    of: impl Fn(T) -> String,
) -> Result<Result<String, (&'static str, String)>> {
    match carried {
        Ok(carried) => Ok(Ok(of(carried))),
        Err(BmdbError::OrderRejected { reason, message: text }) => Ok(Err((reason, text))),
        Err(other) => bail!(other),
    }
}

/// A bundle of that version, as the fleet has it.
async fn bundle(kit: &Kit, digit: char, version: &str) -> Result<String> {
    let digest = digit.to_string().repeat(64);
    sqlx::query(
        "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by, kubernetes)
         VALUES (decode($1, 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'k-' || $2, clock_timestamp(), 'kim', $2)",
    )
    .bind(&digest)
    .bind(version)
    .execute(&kit.pool)
    .await?;
    Ok(digest)
}

fn spec(control_plane: u32, workers: u32) -> ClusterSpec {
    ClusterSpec {
        name: name(),
        control_plane,
        workers,
        selector: Selector::default(),
        roles: BTreeSet::new(),
        approval: JoinApproval::Automatic,
    }
}

fn with_bundle(bundle: &str) -> KubernetesPatch {
    KubernetesPatch { bundle: Some(bundle.to_owned()), ..KubernetesPatch::default() }
}

fn to(bundle: &str) -> NewUpgrade {
    NewUpgrade {
        kubernetes: Some(bundle.to_owned()),
        roleserver: None,
        parallelism: 1,
        deadline_seconds: 900,
        trust: SigningTrust::default(),
    }
}

/// A cluster that was founded: three controllers and two workers that are well with the bundle `k-1.30.1`.
struct World {
    kit: Kit,
    machines: Vec<MachineId>,
    /// What the curators have, by what nodes act at once.
    has: CuratorKubernetes,
    nodes: BTreeMap<String, NodeKubernetes>,
    /// In which order nodes came to another bundle.
    order: Vec<(String, String)>,
}

fn well(bundle: &str, version: &str) -> NodeKubernetes {
    let component = ComponentStatus {
        name: "kubelet".to_owned(),
        state: "healthy".to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    };
    NodeKubernetes {
        bundle: bundle.to_owned(),
        version: version.to_owned(),
        components: vec![component],
        ..NodeKubernetes::default()
    }
}

impl World {
    async fn new(test: &str) -> Result<Self> {
        let kit = Kit::new(test).await?;
        let old = bundle(&kit, 'a', "1.30.1").await?;
        kit.bmdb.create_cluster(order("Create"), spec(3, 2), Some(with_bundle("k-1.30.1"))).await?;
        let machines = kit.provided(5, "rack").await?;
        sqlx::raw_sql(
            "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
             SELECT machine_id, clock_timestamp() - INTERVAL '1 hour', decode(repeat('00', 32), 'hex'), 1 FROM machine;
             INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
             SELECT machine_id, clock_timestamp(), 'b', 'i', 1 FROM machine;
             INSERT INTO fleet_listening VALUES (3, clock_timestamp() - INTERVAL '1 day', clock_timestamp());
             UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = 'ca', curators = '[]'",
        )
        .execute(&kit.pool)
        .await?;
        kit.sweep().await?;
        let mut nodes = BTreeMap::new();
        for (number, machine) in machines.iter().enumerate() {
            let id = format!("node-{number}");
            let part = if number < 3 { "control-plane" } else { "worker" };
            sqlx::query(
                "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, kubernetes)
                 SELECT $1, cluster_id, $2, clock_timestamp(), $3 FROM cluster",
            )
            .bind(machine.0)
            .bind(part)
            .bind(serde_json::json!(well(&old, "1.30.1")))
            .execute(&kit.pool)
            .await?;
            sqlx::query(
                "INSERT INTO machine_cluster_report (machine_id, generation, node_key, reported_at, epoch)
                 VALUES ($1, 1, $2, clock_timestamp(), 0)",
            )
            .bind(machine.0)
            .bind(vec![u8::try_from(number)?; 32])
            .execute(&kit.pool)
            .await?;
            nodes.insert(id, well(&old, "1.30.1"));
        }
        let settings = KubernetesSpec { bundle: old, ..KubernetesSpec::default() };
        let has = CuratorKubernetes { spec: settings, ..CuratorKubernetes::default() };
        Ok(Self { kit, machines, has, nodes, order: Vec::new() })
    }

    fn observe_cluster(&self) -> ObservedCluster {
        let node = |(number, (id, kubernetes)): (usize, (&String, &NodeKubernetes))| {
            let roles =
                if number < 3 { vec![CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE] } else { vec![WORKER_ROLE] };
            ClusterNode {
                id: id.clone(),
                key: [u8::try_from(number).unwrap_or(0); 32],
                machine: Some(self.machines[number]),
                state: NodeState::Up,
                roles: roles.into_iter().map(str::to_owned).collect(),
                health: NodeHealth::Healthy,
                services: Vec::new(),
                kubernetes: Some(kubernetes.clone()),
                addresses: NodeAddresses::default(),
            }
        };
        let etcd = (0..3).map(|number| EtcdMember {
            node: Some(format!("node-{number}")),
            learner: false,
            reachable: true,
        });
        ObservedCluster {
            nodes: self.nodes.iter().enumerate().map(node).collect(),
            etcd_members: etcd.collect(),
            kubernetes: ObservedKubernetes::Present(self.has.clone()),
            ..ObservedCluster::default()
        }
    }

    /// A pass of the lease holder, which dies after so many halves of steps: a first half is the record, a second
    /// half the message to the curator. Returns whether an upgrade is still under way.
    async fn pass(&mut self, lease: &NamedLease, mut halves: usize) -> Result<bool> {
        let (found, now) = self.kit.bmdb.read_cluster("ams").await?.context("a cluster")?;
        let Some(line) = found.upgrade.as_ref().filter(|line| line.ended.is_none()) else { return Ok(false) };
        let members: Vec<_> = found.machines.iter().map(|line| line.member.clone()).collect();
        for step in plan_upgrade(&line.upgrade, &members, &self.observe_cluster(), now).steps {
            if halves == 0 {
                return Ok(true);
            }
            halves -= 1;
            match step {
                ClusterPlanStep::AssignBundle { node, machine, bundle } => {
                    let no = self
                        .kit
                        .bmdb
                        .request_node_upgrade(lease, &line.upgrade, (&node, machine), &bundle)
                        .await?;
                    if let Some(no) = no {
                        bail!("{node} gets no request: {no}");
                    }
                    if halves == 0 {
                        return Ok(true);
                    }
                    halves -= 1;
                    self.assign_bundle(&node, &bundle);
                }
                ClusterPlanStep::RecordUpgrade(UpgradeEvent::NodeDone { node }) => {
                    self.kit.bmdb.record_node_upgraded(lease, &line.upgrade.id, &node, None).await?;
                }
                ClusterPlanStep::RecordUpgrade(UpgradeEvent::Finish) => {
                    self.kit.bmdb.complete_upgrade(lease, found.cluster.id, &line.upgrade).await?;
                }
                ClusterPlanStep::RecordUpgrade(UpgradeEvent::Pause { reason: why }) => {
                    self.kit.bmdb.pause_upgrade(lease, &line.upgrade.id, &why).await?;
                }
                other => bail!("{other}"),
            }
        }
        Ok(true)
    }

    /// Assigns a bundle through a curator. The node runs it at once and is well.
    fn assign_bundle(&mut self, node: &str, bundle: &str) {
        if self.has.bundle_of(node) != bundle {
            self.order.push((node.to_owned(), bundle[..1].to_owned()));
        }
        self.has.assigned_bundles.insert(node.to_owned(), bundle.to_owned());
        let version = if bundle.starts_with('a') { "1.30.1" } else { "1.31.0" };
        self.nodes.insert(node.to_owned(), well(bundle, version));
    }

    /// Others take the lease, each for one pass that is cut off, until nothing is under way; says how many they were.
    async fn carry_out(&mut self) -> Result<usize> {
        let cluster: uuid::Uuid =
            sqlx::query_scalar("SELECT cluster_id FROM cluster").fetch_one(&self.kit.pool).await?;
        for turn in 0..200_usize {
            let application = format!("shepherd-{turn}");
            let holder =
                LeaseHolder::start(&self.kit, &application, LEASE_KIND, &cluster.to_string()).await?;
            // 1, 2, 3, 1, …: every step is some time the last one, and every step is some time cut in its middle.
            let under_way = self.pass(&holder.lease, 1 + turn % 3).await?;
            holder.stop().await?;
            if !under_way {
                return Ok(turn);
            }
        }
        bail!("it comes to no end: {:?}", self.order)
    }

    async fn bundle_in_force(&self) -> Result<(String, String)> {
        let row = "SELECT encode(bundle, 'hex'), version FROM cluster_kubernetes";
        Ok(sqlx::query_as(row).fetch_one(&self.kit.pool).await?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_and_rollback_go_on_after_any_crash_in_their_order() -> TestResult {
    let mut world = World::new("upgrade_crashes").await?;
    let new = bundle(&world.kit, 'b', "1.31.0").await?;
    let carried = world.kit.bmdb.upgrade_cluster(order("Upgrade"), name(), to("k-1.31.0")).await?;
    assert!(
        carried.outcome.message.contains("from Kubernetes 1.30.1 to 1.31.0, one by one"),
        "{}",
        carried.outcome.message
    );
    let reported = |order: &[(String, String)]| -> Vec<String> {
        order.iter().map(|(node, bundle)| format!("{node}{bundle}")).collect()
    };
    let others = world.carry_out().await?;
    assert!(others > 10, "only {others} shepherds were in it");
    assert_eq!(
        reported(&world.order),
        ["node-0b", "node-1b", "node-2b", "node-3b", "node-4b"],
        "a worker before controllers, or two at once"
    );
    assert_eq!(world.bundle_in_force().await?, (new.clone(), "1.31.0".to_owned()));

    // Back: workers first.
    world.order.clear();
    world.has.spec.bundle = new.clone();
    world.has.assigned_bundles.clear();
    let carried = world.kit.bmdb.change_upgrade(order("RollBack"), name(), UpgradeChange::RollBack).await?;
    assert!(carried.outcome.message.contains("workers first"), "{}", carried.outcome.message);
    world.carry_out().await?;
    assert_eq!(
        reported(&world.order),
        ["node-3a", "node-4a", "node-0a", "node-1a", "node-2a"],
        "a worker before controllers, or two at once"
    );
    assert_eq!(world.bundle_in_force().await?.1, "1.30.1");
    let again = world.kit.bmdb.change_upgrade(order("RollBack"), name(), UpgradeChange::RollBack).await;
    let refused = split_order_result(again, |carried| carried.outcome.message)?
        .expect_err("there is nothing further back");
    assert_eq!(refused.0, "NOTHING_TO_ROLL_BACK", "{refused:?}");

    let history: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM history WHERE event = 'KubernetesOrdered' AND detail LIKE 'Kubernetes 1.3%'",
    )
    .fetch_one(&world.kit.pool)
    .await?;
    assert_eq!(history, 10, "each node got one request each way");
    let counted: i64 = sqlx::query_scalar("SELECT count(*) FROM intent WHERE kind = 'restart-agent'")
        .fetch_one(&world.kit.pool)
        .await?;
    assert_eq!(counted, 10, "every request counts against the budget");
    Ok(())
}

/// Two controllers are never on their way at once, whatever crashes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_controller_at_a_time_is_upgraded_and_the_next_when_it_is_well() -> TestResult {
    let mut world = World::new("upgrade_one_by_one").await?;
    bundle(&world.kit, 'b', "1.31.0").await?;
    world
        .kit
        .bmdb
        .upgrade_cluster(order("Upgrade"), name(), NewUpgrade { parallelism: 5, ..to("k-1.31.0") })
        .await?;
    let cluster: uuid::Uuid =
        sqlx::query_scalar("SELECT cluster_id FROM cluster").fetch_one(&world.kit.pool).await?;
    let holder = LeaseHolder::start(&world.kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    world.pass(&holder.lease, 100).await?;
    // The first one does not become well.
    let first = world.order[0].0.clone();
    if let Some(node) = world.nodes.get_mut(&first) {
        node.components[0].state = "backing off".to_owned();
    }
    for _ in 0..3 {
        world.pass(&holder.lease, 100).await?;
        assert_eq!(world.order.len(), 1, "controllers got requests at once: {:?}", world.order);
    }
    // After its deadline it makes no more progress, and its status shows that.
    sqlx::query("UPDATE cluster_upgrade SET deadline_seconds = 0").execute(&world.kit.pool).await?;
    world.pass(&holder.lease, 100).await?;
    let paused: Option<String> =
        sqlx::query_scalar("SELECT paused FROM cluster_upgrade").fetch_one(&world.kit.pool).await?;
    assert!(paused.as_ref().is_some_and(|why| why.contains("kubelet is backing off")), "{paused:?}");
    world.pass(&holder.lease, 100).await?;
    assert_eq!(world.order.len(), 1, "it goes on though it stands still: {:?}", world.order);
    // Another update of its machines, and another upgrade, are refused meanwhile.
    let other = world.kit.bmdb.upgrade_cluster(order("Upgrade"), name(), to("k-1.31.0")).await;
    let refused =
        split_order_result(other, |carried| carried.outcome.message)?.expect_err("two upgrades at once");
    assert_eq!(refused.0, "UPGRADING", "{refused:?}");
    // Mended and resumed, it goes on.
    sqlx::query("UPDATE cluster_upgrade SET deadline_seconds = 900").execute(&world.kit.pool).await?;
    if let Some(node) = world.nodes.get_mut(&first) {
        node.components[0].state = "healthy".to_owned();
    }
    world.kit.bmdb.change_upgrade(order("ResumeUpgrade"), name(), UpgradeChange::Resume).await?;
    while world.pass(&holder.lease, 100).await? {}
    assert_eq!(world.order.len(), 5, "{:?}", world.order);
    holder.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_machine_is_not_upgraded_and_names_who_holds_it() -> TestResult {
    let world = World::new("upgrade_held").await?;
    let new = bundle(&world.kit, 'b', "1.31.0").await?;
    world.kit.bmdb.upgrade_cluster(order("Upgrade"), name(), to("k-1.31.0")).await?;
    for machine in &world.machines {
        world.kit.change(*machine, vec![testkit::bmdb_kit::hold("a new disk")]).await?;
    }
    let (found, _) = world.kit.bmdb.read_cluster("ams").await?.context("a cluster")?;
    let upgrade = found.upgrade.context("an upgrade")?.upgrade;
    let holder =
        LeaseHolder::start(&world.kit, "shepherd", LEASE_KIND, &found.cluster.id.to_string()).await?;
    let query = world
        .kit
        .bmdb
        .request_node_upgrade(&holder.lease, &upgrade, ("node-0", world.machines[0]), &new)
        .await?;
    assert_eq!(query.as_deref(), Some("kim holds it: a new disk"));
    holder.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn way_that_versions_do_not_allow_is_refused_in_words() -> TestResult {
    let world = World::new("upgrade_skew").await?;
    for (digit, version) in [('b', "1.32.0"), ('c', "1.29.9"), ('d', "1.31.0"), ('e', "1.30.1")] {
        bundle(&world.kit, digit, version).await?;
    }
    sqlx::query(
        "INSERT INTO artefact VALUES (decode(repeat('f', 64), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'text',
             clock_timestamp(), 'kim')",
    )
    .execute(&world.kit.pool)
    .await?;
    for (requested, reason, expected) in [
        ("k-1.32.0", "SKEW", "upgrade to a 1.31 first"),
        ("k-1.29.9", "SKEW", "is older than 1.30.1"),
        ("text", "NO_BUNDLE", "is not a bundle of Kubernetes"),
        ("nothing", "NO_SUCH_ARTEFACT", "get artefacts"),
    ] {
        let upgrade = world.kit.bmdb.upgrade_cluster(order("Upgrade"), name(), to(requested)).await;
        let refused = split_order_result(upgrade, |carried| carried.outcome.message)?;
        let (why, words) = refused.err().with_context(|| format!("an upgrade to {requested} was begun"))?;
        assert_eq!(why, reason, "{words}");
        assert!(words.contains(expected), "{words}");
    }
    let begun: i64 =
        sqlx::query_scalar("SELECT count(*) FROM cluster_upgrade").fetch_one(&world.kit.pool).await?;
    assert_eq!(begun, 0, "an upgrade was begun that versions do not allow");
    // A worker that is far behind is named.
    let old = serde_json::json!(well(&"9".repeat(64), "1.27.4"));
    sqlx::query("UPDATE machine_cluster SET kubernetes = $1 WHERE part = 'worker'")
        .bind(old)
        .execute(&world.kit.pool)
        .await?;
    let upgrade = world.kit.bmdb.upgrade_cluster(order("Upgrade"), name(), to("k-1.31.0")).await;
    let (_, words) = split_order_result(upgrade, |carried| carried.outcome.message)?
        .err()
        .context("an upgrade beside 1.27 was begun")?;
    assert!(words.contains("runs a kubelet of 1.27.4"), "{words}");
    // A dry run reports what it would do without doing it.
    let dry = Order { dry_run: true, ..order("Upgrade") };
    sqlx::query("UPDATE machine_cluster SET kubernetes = NULL").execute(&world.kit.pool).await?;
    let words = world.kit.bmdb.upgrade_cluster(dry, name(), to("k-1.31.0")).await?.outcome.message;
    assert!(words.contains("then its workers"), "{words}");
    let begun: i64 =
        sqlx::query_scalar("SELECT count(*) FROM cluster_upgrade").fetch_one(&world.kit.pool).await?;
    assert_eq!(begun, 0);
    Ok(())
}
