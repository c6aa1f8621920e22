//! The objects of nodes, from records in a real etcd: what is deleted with a node, and which roles its object has.

use anyhow::Result;
use prost::Message as _;
use serde_json::json;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::NODES;
use shepherd::etcd::namespace::KeySelector;
use shepherd::etcd::record;
use shepherd::model::kubernetes::bundle_manifest::KUBELET;
use shepherd::proto::curator::v1 as wire;
use shepherd::reconciler::objects::node_objects::{CONTROL_PLANE_LABEL, WORKER_LABEL};

use super::kit::{EVERYTHING, ManagedObjects, Server, everything, named, node, nodes};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::Cluster;

const NOTHING: [usize; 4] = [0, 0, 0, 0];

fn id(number: u8) -> String {
    format!("node-{number:032x}")
}

/// Writes the record of a node with these roles that reports this Kubernetes status.
pub(super) async fn put_node(
    client: &Client,
    id: &str,
    roles: wire::NodeRoles,
    components: &[&str],
) -> Result<()> {
    let component =
        |name: &&str| wire::KubernetesComponentStatus { name: (*name).to_owned(), ..Default::default() };
    let kubernetes = wire::KubernetesStatus {
        components: components.iter().map(component).collect(),
        ..Default::default()
    };
    let node = wire::Node {
        node_id: id.to_owned(),
        state: wire::NodeState::Up.into(),
        roles: Some(roles),
        status: Some(wire::NodeStatus { kubernetes: Some(kubernetes), ..Default::default() }),
        ..Default::default()
    };
    let stored = wire::NodeRecord {
        format: record::FORMAT,
        node: Some(node),
        ticket_id: String::new(),
        ..Default::default()
    };
    client.put_unguarded(&NODES.key(id)?, &stored.encode_to_vec()).await?;
    Ok(())
}

#[tokio::test]
async fn objects_of_nodes_follow_their_records() -> TestResult {
    Ok(follow(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn objects_of_nodes_follow_their_records_on_a_real_server() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(follow(&server).await?)
}

async fn follow(server: &Server) -> Result<()> {
    let etcd = Cluster::start(1).await?;
    let (client, other) = (etcd.client(), server.other()?);
    let worker = || wire::NodeRoles { kubernetes_worker: true, ..Default::default() };
    let both = || wire::NodeRoles { kubernetes_controller: true, ..worker() };
    put_node(&client, &id(1), both(), &[KUBELET]).await?;
    put_node(&client, &id(2), worker(), &[KUBELET]).await?;
    put_node(&client, &id(3), worker(), &[]).await?;
    for number in 1..=4 {
        other.create(&nodes(), &node(&id(number), &["of-its-own"])).await??;
    }
    other.create(&nodes(), &node("somebody-elses", &[WORKER_LABEL])).await??;
    let kept = ManagedObjects::new(server, everything()).and_nodes_of(client.clone());
    let plan = kept.objects.describe_plan().await?;
    for line in [format!("update nodes {}\n", id(1)), format!("delete nodes {}\n", id(4))] {
        assert!(plan.contains(&line), "{plan}");
    }
    assert!(!plan.contains("somebody"), "{plan}");
    assert_eq!(kept.pass().await?, [EVERYTHING, 3, 0, 1], "three are labelled, and the fourth has no record");
    let labels = async |name: &str| -> Result<serde_json::Value> {
        Ok(other.get(&nodes(), &named(name)).await??["metadata"]["labels"].clone())
    };
    assert_eq!(labels(&id(1)).await?, json!({"of-its-own": "", WORKER_LABEL: "", CONTROL_PLANE_LABEL: ""}));
    assert_eq!(labels(&id(2)).await?, json!({"of-its-own": "", WORKER_LABEL: ""}));
    assert_eq!(labels("somebody-elses").await?, json!({WORKER_LABEL: ""}));
    assert_eq!(kept.pass().await?, NOTHING);
    assert_eq!(kept.objects.describe_plan().await?, "");

    // A role is removed.
    put_node(&client, &id(2), wire::NodeRoles::default(), &[KUBELET]).await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0], "the object stays as long as the kubelet does");
    assert_eq!(labels(&id(2)).await?, json!({"of-its-own": ""}));
    put_node(&client, &id(2), wire::NodeRoles::default(), &[]).await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1], "and goes with it");
    // A node does not exist any more.
    client.delete_unguarded(&KeySelector::One(NODES.key(id(3))?)).await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    client.put_unguarded(&NODES.key(id(1))?, b"\xff").await?;
    assert_eq!(kept.pass().await?, NOTHING, "what nobody can read may be anything");
    assert_eq!(labels(&id(1)).await?, json!({"of-its-own": "", WORKER_LABEL: "", CONTROL_PLANE_LABEL: ""}));
    let left = kept.objects.problems().borrow().len();
    assert_eq!(left, 0, "nothing of it is for a person");
    Ok(())
}

#[tokio::test]
async fn records_that_cannot_be_read_block_no_pass_and_are_reported() -> TestResult {
    let server = Server::simulated().await?;
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    server.other()?.create(&nodes(), &node(&id(1), &[])).await??;
    let kept = ManagedObjects::new(&server, everything()).and_nodes_of(client);
    etcd.kill(0)?;
    assert_eq!(kept.pass().await?, [EVERYTHING, 0, 0, 0], "the objects of the release do not wait for it");
    let troubles = kept.troubles();
    assert!(
        matches!(troubles.as_slice(), [only] if only.starts_with("all nodes: their records")),
        "{troubles:?}"
    );
    let plan = kept.objects.describe_plan().await?;
    assert!(plan.starts_with("unknown nodes: their records cannot be read"), "{plan}");
    etcd.restart(0)?;
    etcd.wait_until_it_answers(0).await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    assert!(kept.troubles().is_empty());
    Ok(())
}
