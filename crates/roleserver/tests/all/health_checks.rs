//! Health checks of services that listen at one address only: each is found at any address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use model::role_declaration::RoleDeclaration;
use proto::curator::v1 as wire;
use shepherd_roleserver::cluster::services::artefact_store::ArtefactStore;
use shepherd_roleserver::cluster::services::desired::{
    DeclarationMap, DesiredService, RenderInputs, desired_services,
};
use shepherd_roleserver::cluster::services::probe::watch_health;
use shepherd_roleserver::cluster::services::service_runtime::{ServiceHooks, ServiceOwner, ServiceRuntime};
use shepherd_roleserver::cluster::services::service_state::Health;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::host::Host;

/// A service with a health check of this port, on a node with this address.
fn service_on_port(port: u16, node: IpAddr) -> Result<DesiredService> {
    let source = Some(wire::program::Source::Path("/bin/server".to_owned()));
    let tcp = wire::health_check::Probe::Tcp(wire::TcpCheck { port: port.into() });
    let service = wire::Service {
        name: "server".to_owned(),
        run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
        user: "root".to_owned(),
        health_check: Some(wire::HealthCheck { probe: Some(tcp), failures: 1, ..Default::default() }),
        ..Default::default()
    };
    let (role, services) = ("web".to_owned(), vec![service]);
    let declaration = wire::Declaration { role, services, revision: 1, ..Default::default() };
    let declaration = RoleDeclaration::new(declaration)?;
    let declared = DeclarationMap::from([(declaration.role().clone(), Arc::new(declaration))]);
    let inputs = RenderInputs {
        node: "node".to_owned(),
        cluster: "cluster".to_owned(),
        address: Some(node),
        node_info: None,
        curators: None,
    };
    desired_services(&declared, &inputs).into_values().next().context("no service")
}

#[tokio::test]
async fn service_is_healthy_at_whichever_address_it_listens() -> Result<()> {
    let host = Host::new()?;
    // The node has another address of the loopback interface.
    let node = IpAddr::from(Ipv4Addr::new(127, 0, 0, 2));
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST), node] {
        let listener = match TcpListener::bind((address, 0)).await {
            Ok(listener) => listener,
            // A host without IPv6 has no service there.
            Err(_) if address.is_ipv6() => continue,
            Err(error) => return Err(error.into()),
        };
        let runtime = ServiceRuntime {
            owner: ServiceOwner::Declared,
            hooks: ServiceHooks::NONE,
            children: Arc::new(host.children.clone()),
            directory: host.path("services"),
            store: ArtefactStore(host.path("artefacts")),
        };
        let service = service_on_port(listener.local_addr()?.port(), node)?;
        let check = service.check.clone().context("no check")?;
        let end = CancellationToken::new();
        let (results, mut result) = mpsc::unbounded_channel();
        let watching = watch_health(runtime, service, check, end.clone(), move |health| {
            let _ = results.send(health);
        });
        let first = async {
            let first = tokio::time::timeout(Duration::from_secs(20), result.recv()).await;
            end.cancel();
            first
        };
        let ((), first) = tokio::join!(watching, first);
        assert_eq!(first?, Some(Health::Healthy), "it listens at {address}");
    }
    Ok(())
}
