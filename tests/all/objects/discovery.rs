//! Discovery: which kinds a server serves, and what becomes of a part of it that cannot be read.

use serde_json::json;
use shepherd::reconciler::objects::built_in::built_in_kinds;
use shepherd::reconciler::objects::discovery::ApiDiscovery;

use super::kit::{EVERYTHING, ManagedObjects, Server, config_maps, everything, map};
use crate::harness::aloud::TestResult;

#[tokio::test]
async fn discovery_asks_once_for_each_group() -> TestResult {
    let server = Server::simulated().await?;
    ApiDiscovery::fetch(&server.api().await?).await?;
    let mut requests = server.in_this_process()?.take_requests();
    requests.sort();
    let expected = [
        "GET /api/v1",
        "GET /apis",
        "GET /apis/authorization.k8s.io/v1",
        "GET /apis/node.k8s.io/v1",
        "GET /apis/rbac.authorization.k8s.io/v1",
        "GET /apis/scheduling.k8s.io/v1",
        "GET /apis/storage.k8s.io/v1",
    ];
    assert_eq!(requests, expected);
    Ok(())
}

#[tokio::test]
async fn api_that_cannot_be_discovered_hides_no_other() -> TestResult {
    let server = Server::simulated().await?;
    let simulated = server.in_this_process()?;
    simulated.aggregate("dead.example", None);
    simulated.aggregate("odd.example", Some(json!({"kind": "APIResourceList", "resources": "none"})));
    let served = ApiDiscovery::fetch(&server.api().await?).await?;
    for wanted in built_in_kinds().into_iter().chain([config_maps()]) {
        assert_eq!(served.find(&wanted.api_version(), &wanted.kind), Some(&wanted));
    }
    let failed = served.failed_versions.as_slice();
    let [(dead, unavailable), (odd, unreadable)] = failed else {
        return Err(anyhow::anyhow!("two versions cannot be discovered: {failed:?}").into());
    };
    assert_eq!((dead.as_str(), odd.as_str()), ("dead.example/v1", "odd.example/v1"));
    assert!(unavailable.contains("currently unable to handle the request"), "{unavailable}");
    assert!(unreadable.contains("the API server's response cannot be read"), "{unreadable}");
    let kept = ManagedObjects::new(&server, everything());
    let thing = |group: &str| format!("apiVersion: {group}/v1\nkind: Thing\nmetadata: {{name: x}}\n---\n");
    kept.wish(&[("dns", &[thing("dead.example"), thing("odd.example"), map("own", "one")].concat())]);
    for created in [EVERYTHING + 1, 0] {
        assert_eq!(kept.pass().await?, [created, 0, 0, 0], "the rest is made, and the pass is done");
        let troubles = kept.troubles();
        for says in ["no kind Thing of dead.example/v1", "no kind Thing of odd.example/v1"] {
            assert!(troubles.iter().any(|trouble| trouble.contains(says)), "{says} is not in {troubles:#?}");
        }
        assert_eq!(troubles.len(), 2, "{troubles:#?}");
    }
    Ok(())
}
