//! What nodes watch: one node, all nodes, the declarations of their own roles.

use anyhow::{Context as _, Result, ensure};
use curator_client::node::{Node, NodeState};
use proto::curator::v1 as wire;
use proto::curator::v1::declarations_client::DeclarationsClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::node_event::Event;
use proto::curator::v1::nodes_client::NodesClient;
use tonic::{Code, Streaming};

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, refusal, status};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

async fn one(watching: &mut Streaming<wire::WatchResponse>) -> Result<Event> {
    let response = in_time("news of the node", watching.message()).await??.context("it ended")?;
    response.event.and_then(|event| event.event).context("it says nothing")
}

fn present(event: Event) -> Result<wire::Node> {
    match event {
        Event::Present(node) => Ok(node),
        Event::Deleted(id) => anyhow::bail!("{id} is gone"),
    }
}

/// Reads events until one matches.
async fn until(
    watching: &mut Streaming<wire::WatchAllResponse>,
    says: impl Fn(&Event) -> bool,
) -> Result<Vec<wire::NodeEvent>> {
    let mut all = Vec::new();
    loop {
        let response = in_time("news", watching.message()).await??.context("it ended")?;
        ensure!(!response.backlog_complete, "the backlog is complete once");
        all.extend(response.events);
        if all.iter().filter_map(|event| event.event.as_ref()).any(&says) {
            return Ok(all);
        }
    }
}

/// Scenarios C-5 and C-9.
#[tokio::test]
async fn watch_of_one_node_tells_each_of_its_lives() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let (node, other) = (Holder::new()?, Holder::new()?);
    cluster.take_in(&other).await?;
    let mut watching = NodesClient::new(owner.clone())
        .watch(wire::WatchRequest { node_id: node.id.to_string() })
        .await?
        .into_inner();
    // There is no event for a node that does not exist: the first one is its registration.
    let certificate = cluster.take_in(&node).await?;
    let mut record = present(one(&mut watching).await?)?;
    while record.state() != wire::NodeState::Up {
        record = present(one(&mut watching).await?)?;
    }
    assert_eq!(record.status, None);

    let mut itself = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let report = |status| wire::UpdateStatusRequest { node_id: node.id.to_string(), status: Some(status) };
    let node_status = status(([10, 0, 0, 7], 7835).into());
    itself.update_status(report(node_status.clone())).await?;
    let record = present(one(&mut watching).await?)?;
    let reported = record.status.context("no status")?;
    assert!(reported.reported_at_ms > 0, "by the curator's clock");
    assert_eq!(wire::NodeStatus { reported_at_ms: 0, ..reported }, node_status);
    // The same status again causes no event: the next event is the one that differs.
    itself.update_status(report(node_status.clone())).await?;
    let other_reported =
        wire::NodeStatus { version: "2.0.0".to_owned(), curator_port: 0, ..node_status.clone() };
    itself.update_status(report(other_reported)).await?;
    let reported = present(one(&mut watching).await?)?.status.context("no status")?;
    assert_eq!(
        (reported.version.as_str(), reported.curator_port),
        ("2.0.0", 0),
        "the whole of it is replaced"
    );
    for (odd, field) in [
        (wire::NodeStatus { external_address: String::new(), ..node_status.clone() }, "external_address"),
        (
            wire::NodeStatus { external_address: "<nil>".to_owned(), ..node_status.clone() },
            "external_address",
        ),
        (wire::NodeStatus { curator_port: 70_000, ..node_status.clone() }, "curator_port"),
    ] {
        let (code, words) = refusal(itself.update_status(report(odd)).await)?;
        assert_eq!((code, words.contains(field)), (Code::InvalidArgument, true), "{words}");
    }

    let mut management = ManagementClient::new(owner);
    let delete = wire::DeleteRequest {
        node_id: node.id.to_string(),
        bypass_not_decommissioned: true,
        ..Default::default()
    };
    management.delete(delete).await?;
    assert_eq!(one(&mut watching).await?, Event::Deleted(node.id.to_string()));
    cluster.take_in(&node).await?;
    present(one(&mut watching).await?)?;
    Ok(())
}

/// Scenario C-6, with a backlog that does not fit into one message.
#[tokio::test]
async fn watch_of_all_nodes_ends_its_backlog_once_and_loses_nothing_after_it() -> TestResult {
    let cluster = Cluster::start().await?;
    let client = cluster.client_of(0);
    let mut large = Vec::new();
    for _ in 0..600 {
        let holder = Holder::new()?;
        let mut node = Node::new(holder.key, NodeState::Up, cluster.time.now());
        let label = |number: u8| (format!("{number}-{}", "k".repeat(58)), "v".repeat(63));
        node.labels = (0..32).map(label).collect();
        large.push(node);
    }
    for part in large.chunks(100) {
        let records = part.iter().map(|node| Ok((Node::etcd_key(&node.id)?, node.encode()?)));
        let records = records.collect::<Result<Vec<_>>>()?;
        assert!(client.create_unguarded("many nodes", &records).await?);
    }
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    // The cache may lag behind the records that the test wrote into etcd directly.
    let mut streaming = loop {
        let mut watching = nodes.watch_all(wire::WatchAllRequest {}).await?.into_inner();
        let (mut seen, mut messages) = (Vec::new(), 0);
        loop {
            let response = in_time("the backlog", watching.message()).await??.context("it ended")?;
            messages += 1;
            seen.extend(response.events);
            if response.backlog_complete {
                break;
            }
        }
        if seen.len() == 602 {
            assert!(messages >= 2, "{messages} message: it fits into one");
            let one = seen.iter().find_map(|event| match event.event.as_ref()? {
                Event::Present(found) if found.node_id == large[0].id.to_string() => Some(found.clone()),
                _ => None,
            });
            assert_eq!(one, Some(large[0].to_wire()), "all of it");
            break watching;
        }
    };
    nodes
        .update_status(wire::UpdateStatusRequest {
            node_id: node.id.to_string(),
            status: Some(status(([10, 0, 0, 8], 0).into())),
        })
        .await?;
    let id = node.id.to_string();
    let reported =
        |event: &Event| matches!(event, Event::Present(node) if node.node_id == id && node.status.is_some());
    let news = until(&mut streaming, reported).await?;
    assert!(news.len() < 20, "the watch delivers only what changed: {}", news.len());

    let owner = cluster.as_owner().await?;
    let gone = large[1].id.to_string();
    let delete =
        wire::DeleteRequest { node_id: gone.clone(), bypass_not_decommissioned: true, ..Default::default() };
    ManagementClient::new(owner).delete(delete).await?;
    let news = until(&mut streaming, |event| *event == Event::Deleted(gone.clone())).await?;
    assert_eq!(news.len(), 1);
    Ok(())
}

fn declaration(role: &str, program: &str) -> wire::Declaration {
    wire::Declaration {
        role: role.to_owned(),
        services: vec![wire::Service {
            name: "web".to_owned(),
            run: Some(wire::service::Run::Program(wire::Program {
                source: Some(wire::program::Source::Path(program.to_owned())),
                url: String::new(),
            })),
            user: "root".to_owned(),
            ..Default::default()
        }],
        ..wire::Declaration::default()
    }
}

#[tokio::test]
async fn node_gets_the_declarations_of_its_own_roles_and_no_others() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let mut declarations = DeclarationsClient::new(owner.clone());
    let put = |declaration, expected_revision| wire::PutDeclarationRequest {
        declaration: Some(declaration),
        expected_revision,
    };
    let declared = declarations.put(put(declaration("web", "/bin/one"), Some(0))).await?.into_inner();
    assert_eq!((declared.changed, declared.declaration.map_or(0, |d| d.revision)), (true, 1));
    let same = declarations.put(put(declaration("web", "/bin/one"), None)).await?.into_inner();
    assert_eq!((same.changed, same.declaration.map_or(0, |d| d.revision)), (false, 1));
    let (code, text) = refusal(declarations.put(put(declaration("web", "/bin/two"), Some(0))).await)?;
    assert_eq!((code, text.contains("revision 1 is in force")), (Code::FailedPrecondition, true), "{text}");
    let (code, text) = refusal(declarations.put(put(declaration("consensus-member", "x"), None)).await)?;
    assert_eq!((code, text.contains("built-in")), (Code::InvalidArgument, true), "{text}");
    declarations.put(put(declaration("other", "/bin/other"), None)).await?;

    let mut itself = DeclarationsClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let mut lister = itself.clone();
    let mut watching = itself.watch_own(wire::WatchOwnDeclarationsRequest {}).await?.into_inner();
    let mut reported = async || {
        let response = in_time("declarations", watching.message()).await??.context("it ended")?;
        let reports = response.declarations.iter().map(|declared| (declared.role.clone(), declared.revision));
        anyhow::Ok(reports.collect::<Vec<_>>())
    };
    assert_eq!(reported().await?, [], "it has no role yet, and receives an empty list");
    let (code, text) = refusal(lister.list(wire::ListDeclarationsRequest {}).await)?;
    assert_eq!((code, text.contains("Declarations/List")), (Code::PermissionDenied, true), "{text}");
    let mut management = ManagementClient::new(owner.clone());
    let roles = |give: &[&str], take: &[&str]| wire::UpdateRolesRequest {
        node_id: node.id.to_string(),
        add_roles: give.iter().map(|&name| name.to_owned()).collect(),
        remove_roles: take.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    };
    let (code, text) = refusal(management.update_roles(roles(&["nowhere"], &[])).await)?;
    assert_eq!((code, text.contains("not declared")), (Code::NotFound, true), "{text}");
    management.update_roles(roles(&["web"], &[])).await?;
    assert_eq!(reported().await?, [("web".to_owned(), 1)]);
    declarations.put(put(declaration("other", "/bin/another"), None)).await?;
    declarations.put(put(declaration("web", "/bin/two"), Some(1))).await?;
    assert_eq!(reported().await?, [("web".to_owned(), 2)], "what is not its role is no news");
    let delete = |role: &str| wire::DeleteDeclarationRequest { role: role.to_owned() };
    let (code, text) = refusal(declarations.delete(delete("web")).await)?;
    assert_eq!((code, text.contains(&node.id.to_string())), (Code::FailedPrecondition, true), "{text}");
    management.update_roles(roles(&[], &["web"])).await?;
    assert_eq!(reported().await?, []);
    declarations.delete(delete("web")).await?;
    assert_eq!(refusal(declarations.delete(delete("web")).await)?.0, Code::NotFound);
    let listed = declarations.list(wire::ListDeclarationsRequest {}).await?.into_inner().declarations;
    assert_eq!(listed.iter().map(|d| d.role.as_str()).collect::<Vec<_>>(), ["other"]);
    Ok(())
}
