//! This node's address: from its order, or detected, and followed when it changes.
//!
//! The address in the order counts, as long as the host has it. Without one, the address is the one that the host uses as
//! the source of connections to a curator. A curator of another node sees that source, and refuses the report of any other
//! address that is not assigned.
//!
//! A host may lose its address while the node runs, for example when a lease of DHCP ends. So the address is looked for
//! again every 15 seconds. An address that the host still has stays, so that a node with several addresses does
//! not change between them. An order may also name another address than before, because the provider's list has another
//! one. The node takes it as soon as the host has it. The status report, the services and the components of Kubernetes
//! follow the new one. A consensus member does not while it runs, because its etcd listens at its address. It does when it
//! comes back ([`member_address`](super::member_address)).

use std::io::Error;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::time::{Instant, timeout_at};

use crate::cluster::files::ClusterFiles;
use crate::cluster::host_addresses::list_host_addresses;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_order::NodeOrder;

/// How often the address of this node is compared with those of the host.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// How long all names of curators may take to resolve together. The thread that renews leases does not wait for them.
const LOOKUP_DEADLINE: Duration = Duration::from_secs(10);

/// The address at which other nodes connect to this one: from the order, or else from the route to a curator.
pub async fn node_address(
    order: Option<&NodeOrder>,
    curators: impl IntoIterator<Item = String>,
) -> Result<IpAddr, RunnableError> {
    match order.and_then(|order| ordered_address(order, host_has)) {
        Some(address) => Ok(address),
        None => detect_address(curators, LOOKUP_DEADLINE).await,
    }
}

/// The address in an order, if it counts. That of a shepherd's order comes from a provider's list, and counts while the host
/// has it. That of a person's order, which names no machine, counts as it is: the host may be behind a router.
pub fn ordered_address(order: &NodeOrder, has: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
    order.address.filter(|address| order.machine.is_none() || has(*address))
}

/// The address of a node that starts again; `None` if it has to be detected. While the host has the former address alone,
/// that one stays: a provider's list may name another one before the machine gets it.
pub fn restart_address(
    order: Option<&NodeOrder>,
    former: Option<IpAddr>,
    has: impl Fn(IpAddr) -> bool,
) -> Option<IpAddr> {
    let order = order.filter(|order| order.address.is_some())?;
    ordered_address(order, &has).or_else(|| former.filter(|former| has(*former)))
}

/// Whether an interface of this host has the address.
pub(super) fn host_has(address: IpAddr) -> bool {
    has_address(address, list_host_addresses())
}

/// What decides whether a running node has another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressState {
    /// The address that it has.
    pub current: IpAddr,
    /// The address in its order, if it counts ([`ordered_address`]).
    pub ordered: Option<IpAddr>,
    /// Whether the host still has `current`.
    pub is_present: bool,
    /// Whether the node is a consensus member.
    pub is_member: bool,
}

/// The other address that a running node has from now on; `None` while nothing changes.
pub async fn decide_address<Detecting>(
    state: &AddressState,
    detect: impl FnOnce() -> Detecting,
) -> Option<IpAddr>
where
    Detecting: Future<Output = Option<IpAddr>>,
{
    if state.is_member {
        return None;
    }
    if let Some(ordered) = state.ordered {
        return (ordered != state.current).then_some(ordered);
    }
    if state.is_present {
        return None;
    }
    detect().await.filter(|detected| *detected != state.current)
}

/// Makes the runnable that follows the address of this host.
#[must_use]
pub fn follow_address(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let healthy = starting.mark_healthy();
            loop {
                healthy.scope().until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
                let (Some(connection), Some(current)) = (facts.connection.latest(), facts.address.latest())
                else {
                    continue;
                };
                let order = files.read_order()?;
                let state = AddressState {
                    current,
                    ordered: order.and_then(|order| ordered_address(&order, host_has)),
                    is_present: host_has(current),
                    is_member: facts.roles.latest().is_some_and(|roles| roles.consensus_member.is_some()),
                };
                let curators = connection.curators.directory();
                let detect = || async move { detect_address(curators, LOOKUP_DEADLINE).await.ok() };
                let changed = healthy.scope().until_cancelled(decide_address(&state, detect)).await?;
                if let Some(address) = changed {
                    tracing::warn!(former = %current, %address, "the node has another address, by its order or because its host lost the former one");
                    facts.address.set(address);
                }
            }
        }
    })
}

/// Whether the host has this address. The loopback interface has all of its network. If the list cannot be read, nothing
/// changes.
fn has_address(address: IpAddr, listed: Result<Vec<IpAddr>, Error>) -> bool {
    match listed {
        Ok(listed) => address.is_loopback() || listed.contains(&address),
        Err(error) => {
            tracing::warn!(%error, "the addresses of this host cannot be listed, so this node keeps its own");
            true
        }
    }
}

/// The address that the host would use as source; no packet is sent to a curator. Names that were not resolved within
/// `deadline` are passed over.
async fn detect_address(
    curators: impl IntoIterator<Item = String>,
    deadline: Duration,
) -> Result<IpAddr, RunnableError> {
    let deadline = Instant::now() + deadline;
    for curator in curators {
        // A number is resolved at once, also after the deadline.
        let resolved = timeout_at(deadline, tokio::net::lookup_host(&curator)).await;
        let remote = resolved.ok().and_then(Result::ok).and_then(|mut resolved| resolved.next());
        if let Some(local) = remote.and_then(source_towards) {
            return Ok(local);
        }
    }
    // A documentation address (TEST-NET-1) represents the default route.
    source_towards(SocketAddr::from(([192, 0, 2, 1], 7835))).ok_or_else(|| {
        RunnableError::msg(
            "no address is known at which other nodes can reach this one: it has no route to a curator; set the \
             address in the order",
        )
    })
}

/// The source of connections to this address, unless only this host can reach it.
fn source_towards(remote: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if remote.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(remote).ok()?;
    let local = socket.local_addr().ok()?.ip();
    (!local.is_loopback() && !local.is_unspecified()).then_some(local)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::pin::Pin;
    use std::task::Poll;

    use model::ids::MachineId;
    use uuid::Uuid;

    use super::*;
    use crate::cluster::node_order::OrderKind;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The output of a future after its first poll; `None` while it waits.
    async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
        std::future::poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    #[tokio::test]
    async fn address_changes_only_when_the_host_lost_it_and_nothing_gives_it() {
        let (current, other) = (ip("10.0.0.1"), ip("10.0.0.2"));
        let lost = AddressState { current, ordered: None, is_present: false, is_member: false };
        let ordered = AddressState { ordered: Some(other), is_present: true, ..lost };
        for (case, state, detected, expected) in [
            ("lost", lost, Some(other), Some(other)),
            ("lost, and none is detected", lost, None, None),
            ("lost, and detected all the same", lost, Some(current), None),
            ("still there", AddressState { is_present: true, ..lost }, Some(other), None),
            ("of a member of etcd", AddressState { is_member: true, ..lost }, Some(other), None),
            ("in the order", AddressState { ordered: Some(current), ..lost }, Some(other), None),
            ("another one in the order", ordered, None, Some(other)),
            ("ordered, of a member of etcd", AddressState { is_member: true, ..ordered }, None, None),
        ] {
            let decided = decide_address(&state, || std::future::ready(detected)).await;
            assert_eq!(decided, expected, "{case}");
        }
        let present = AddressState { is_present: true, ..lost };
        let detect = || -> std::future::Ready<Option<IpAddr>> { panic!("nothing is detected without need") };
        assert_eq!(decide_address(&present, detect).await, None);
    }

    fn order(address: Option<IpAddr>, machine: Option<MachineId>) -> NodeOrder {
        NodeOrder { generation: 0, what: OrderKind::Leave {}, machine, labels: BTreeMap::new(), address }
    }

    #[test]
    fn node_that_starts_has_the_ordered_address_while_its_host_has_it() {
        let (ordered, former) = (ip("10.0.0.2"), ip("10.0.0.1"));
        let by_shepherd = order(Some(ordered), Some(MachineId(Uuid::from_u128(7))));
        let by_person = order(Some(ordered), None);
        let without = order(None, Some(MachineId(Uuid::from_u128(7))));
        for (case, order, last, host, expected) in [
            ("no order", None, Some(former), &[former][..], None),
            ("no address in it", Some(&without), Some(former), &[former][..], None),
            ("the list names it early", Some(&by_shepherd), Some(former), &[former][..], Some(former)),
            ("it has moved", Some(&by_shepherd), Some(former), &[ordered][..], Some(ordered)),
            ("the host has both", Some(&by_shepherd), Some(former), &[former, ordered][..], Some(ordered)),
            ("the host has none of both", Some(&by_shepherd), Some(former), &[][..], None),
            ("it had none before", Some(&by_shepherd), None, &[former][..], None),
            ("a person has ordered it", Some(&by_person), Some(former), &[former][..], Some(ordered)),
        ] {
            let chosen = restart_address(order, last, |address| host.contains(&address));
            assert_eq!(chosen, expected, "{case}");
        }
    }

    #[test]
    fn names_are_resolved_on_another_thread_until_the_deadline() {
        // Both threads of this runtime are those of the role server: one for the leases, one for what blocks. The second
        // one is occupied, so that the resolver never answers.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
        let (release, occupied) = std::sync::mpsc::channel::<()>();
        runtime.block_on(async {
            let occupying = tokio::task::spawn_blocking(move || occupied.recv().is_err());
            let (name, number) = ("curator.invalid:7835".to_owned(), "192.0.2.1:7835".to_owned());
            let mut detecting =
                std::pin::pin!(detect_address([name.clone(), number.clone()], Duration::from_mins(1)));
            assert!(poll_once(detecting.as_mut()).await.is_none(), "the leases waited for the resolver");
            // There may be no route where this test runs.
            let expected = detect_address([number.clone()], Duration::ZERO).await.ok();
            assert_eq!(detect_address([name, number], Duration::ZERO).await.ok(), expected);
            drop(release);
            assert!(occupying.await.unwrap());
        });
        // The lookups that nobody waits for may take seconds.
        runtime.shutdown_background();
    }

    #[tokio::test]
    async fn address_in_the_order_counts() {
        let address = Some(ip("127.0.0.7"));
        assert_eq!(node_address(Some(&order(address, None)), []).await.ok(), address);
    }

    #[test]
    fn host_has_what_its_interfaces_have() {
        let has = |address, listed: &[&str]| {
            has_address(ip(address), Ok(listed.iter().map(|address| ip(address)).collect()))
        };
        assert!(has("10.0.0.1", &["127.0.0.1", "10.0.0.1"]));
        assert!(has("fd00::1", &["127.0.0.1", "fd00::1"]));
        assert!(has("127.0.0.7", &["127.0.0.1"]), "the whole network");
        assert!(!has("10.0.0.1", &["127.0.0.1", "10.0.0.2"]));
        assert!(
            has_address(ip("10.0.0.1"), Err(Error::other("unreadable"))),
            "an unknown input changes nothing"
        );
        // An address for documentation (TEST-NET-1) that no host has.
        assert!(!has_address(ip("192.0.2.77"), list_host_addresses()));
    }
}
