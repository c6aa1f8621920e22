//! The cost of a pass without changes, with any objects.

use std::collections::BTreeMap;

use shepherd::proto::curator::v1 as wire;
use shepherd::reconciler::objects::cluster_config::ClusterConfig;
use shepherd::reconciler::objects::node_objects::WORKER_LABEL;

use super::kit::{ManagedObjects, Server, everything, map, node, nodes};
use super::node_objects::put_node;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, until};

const NOTHING: [usize; 4] = [0, 0, 0, 0];

#[tokio::test]
async fn a_pass_asks_once_for_each_kind_however_many_objects_there_are() -> TestResult {
    for objects in [1, 200] {
        let server = Server::simulated().await?;
        // Ten objects of the release.
        let wishes = ClusterConfig { runtime_handlers: ["runc".to_owned()].into(), ..everything() };
        let etcd = Cluster::start(1).await?;
        let kept = ManagedObjects::new(&server, wishes).and_nodes_of(etcd.client());
        for number in 0..objects {
            let id = format!("node-{number:032x}");
            let has = wire::NodeRoles { kubernetes_worker: true, ..Default::default() };
            put_node(&etcd.client(), &id, has, &[]).await?;
            server.other()?.create(&nodes(), &node(&id, &[WORKER_LABEL])).await??;
        }
        server.in_this_process()?.agents();
        let manifest: String = (0..objects).map(|number| map(&format!("map-{number}"), "one")).collect();
        kept.wish(&[("dns", &manifest)]);
        assert_eq!(kept.pass().await?, [10 + objects, 0, 0, 0]);
        let simulated = server.in_this_process()?;
        until("all kinds are watched", async || Ok(simulated.watches() == 7)).await?;
        simulated.take_requests();
        for _ in 0..3 {
            assert_eq!(kept.pass().await?, NOTHING);
            let mut requests = BTreeMap::new();
            for request in simulated.take_requests() {
                *requests.entry(request).or_insert(0) += 1;
            }
            let expected = [
                "GET /api/v1/configmaps",
                "GET /api/v1/nodes",
                "GET /apis/node.k8s.io/v1/runtimeclasses",
                "GET /apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
                "GET /apis/rbac.authorization.k8s.io/v1/clusterroles",
                "GET /apis/scheduling.k8s.io/v1/priorityclasses",
                "GET /apis/storage.k8s.io/v1/csidrivers",
                "GET /apis/storage.k8s.io/v1/storageclasses",
            ];
            let expected: BTreeMap<String, i32> = expected.map(|request| (request.to_owned(), 1)).into();
            assert_eq!(
                requests, expected,
                "with {objects} objects: one list for each kind, and the watches add none"
            );
        }
        assert!(!kept.is_change_reported().await);
        assert_eq!(simulated.take_requests(), Vec::<String>::new(), "nor do they ask in between");
        assert_eq!(simulated.agents(), [format!("shepherd-roleserver/{}", env!("CARGO_PKG_VERSION"))].into());
    }
    Ok(())
}
