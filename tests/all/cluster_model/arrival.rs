//! The decisions of a node follow from the newest state of all inputs. The order in which they arrived does not matter.
//!
//! Every order in which the states of all inputs can arrive is tried, with the states of each input in sequence. In
//! each order, every choice of the moments at which the reducer runs is tried, so that it sees some states and skips
//! others.

use anyhow::Result;
use futures::poll;
use shepherd::curator_client::node::{ConsensusMember, NodeRoles};
use shepherd::roleserver::cluster::node_facts::{ControlPlane, NodeFacts};
use shepherd::roleserver::cluster::node_status;
use shepherd::roleserver::cluster::startup::{self, ControlPlaneStartup};
use shepherd::supervisor::combine::CombinedInputs;

use super::fixture::Fixture;
use crate::harness::aloud::TestResult;

/// Sets one input to its next state.
type Arrive<'a> = Box<dyn Fn(&NodeFacts) + 'a>;

/// All orders in which this many states of each input can arrive, as the numbers of the inputs.
fn orders(left: &[usize]) -> Vec<Vec<usize>> {
    if left.iter().all(|left| *left == 0) {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (input, _) in left.iter().enumerate().filter(|(_, left)| **left > 0) {
        let mut rest = left.to_vec();
        rest[input] -= 1;
        for mut order in orders(&rest) {
            order.insert(0, input);
            all.push(order);
        }
    }
    all
}

/// The decisions at the end of each order and each choice of moments, and how many there were. After each run
/// `may_decide` states, by the number of arrived states of each input, whether enough has arrived to decide something.
async fn decisions<S: Clone + 'static, T>(
    arrivals: &[Vec<Arrive<'_>>],
    inputs: impl Fn(&NodeFacts) -> CombinedInputs<S>,
    decide: impl Fn(&S) -> Option<T>,
    may_decide: impl Fn(&[usize]) -> bool,
) -> Result<(Vec<Option<T>>, usize)> {
    let states: Vec<usize> = arrivals.iter().map(Vec::len).collect();
    let count: usize = states.iter().sum();
    let (mut ends, mut tried) = (Vec::new(), 0);
    for order in orders(&states) {
        for looks in 0..1_u32 << count {
            let facts = NodeFacts::default();
            let mut inputs = inputs(&facts);
            let (mut arrived, mut decided) = (vec![0; arrivals.len()], None);
            for (at, input) in order.iter().enumerate() {
                arrivals[*input][arrived[*input]](&facts);
                arrived[*input] += 1;
                // At the end the reducer always runs.
                if looks >> at & 1 == 1 || at + 1 == count {
                    while let std::task::Poll::Ready(known) = poll!(std::pin::pin!(inputs.next())) {
                        if let Some(now) = decide(&known) {
                            anyhow::ensure!(may_decide(&arrived), "decided after {arrived:?} of {order:?}");
                            decided = Some(now);
                        }
                    }
                }
            }
            ends.push(decided);
            tried += 1;
        }
    }
    Ok((ends, tried))
}

fn roles(member: Option<u64>) -> NodeRoles {
    let role = |member| ConsensusMember { member_id: member, ..ConsensusMember::default() };
    NodeRoles { consensus_member: member.map(role), ..NodeRoles::default() }
}

fn format_startup(decided: &ControlPlaneStartup) -> String {
    match decided {
        ControlPlaneStartup::Nothing => "nothing".to_owned(),
        ControlPlaneStartup::Founding(_) => "founding".to_owned(),
        ControlPlaneStartup::Member(role, _) => format!("member {}", role.member_id),
    }
}

#[tokio::test]
async fn startup_is_the_same_in_whatever_order_its_inputs_come() -> TestResult {
    let fixture = Fixture::new()?;
    let connect = || -> Arrive<'_> { Box::new(|facts| facts.connection.set(fixture.connection.clone())) };
    let give = |member| -> Arrive<'_> { Box::new(move |facts| facts.roles.set(roles(member))) };
    let found = || -> Arrive<'_> { Box::new(|facts| facts.founding.set(Some(fixture.to_found.clone()))) };
    let founded = || -> Arrive<'_> { Box::new(|facts| facts.founding.set(None)) };
    for (inputs, expected) in [
        // Roles from the disk, and then from orders, with a membership that ends and one that begins.
        (vec![vec![], vec![give(Some(7)), give(None), give(Some(8))], vec![connect()]], "member 8"),
        (vec![vec![], vec![give(Some(7)), give(None)], vec![connect(), connect()]], "nothing"),
        // A node that founds a cluster: it receives its roles when founding is complete, and no earlier input changes
        // anything.
        (vec![vec![found()], vec![give(Some(7))], vec![connect()]], "founding"),
        (vec![vec![found(), founded()], vec![give(Some(7))], vec![connect()]], "member 7"),
        (vec![vec![found(), founded()], vec![give(Some(7)), give(None)], vec![connect()]], "nothing"),
    ] {
        let founds = !inputs[0].is_empty();
        let (ends, tried) =
            decisions(&inputs, startup::startup_inputs, startup::decide_startup, |arrived: &[usize]| {
                (founds && arrived[0] == 1) || (arrived[1] > 0 && arrived[2] > 0)
            })
            .await?;
        assert!(tried >= 32, "{tried}");
        for end in ends {
            assert_eq!(end.as_ref().map(format_startup).as_deref(), Some(expected));
        }
    }
    Ok(())
}

/// Too few inputs never cause a decision, however long the others do not arrive.
#[tokio::test]
async fn nothing_is_decided_without_the_roles_or_without_the_way() -> TestResult {
    let fixture = Fixture::new()?;
    let connect = || -> Arrive<'_> { Box::new(|facts| facts.connection.set(fixture.connection.clone())) };
    let give = |member| -> Arrive<'_> { Box::new(move |facts| facts.roles.set(roles(member))) };
    for inputs in [vec![vec![give(Some(7)), give(None)]], vec![vec![connect(), connect()]]] {
        let (ends, _) =
            decisions(&inputs, startup::startup_inputs, startup::decide_startup, |_: &[usize]| false).await?;
        assert!(ends.iter().all(Option::is_none));
    }
    Ok(())
}

#[tokio::test]
async fn what_a_node_says_of_itself_is_the_same_in_whatever_order_it_is_known() -> TestResult {
    let fixture = Fixture::new()?;
    let at = |address: &'static str| -> Result<Arrive<'_>> {
        let address = address.parse()?;
        Ok(Box::new(move |facts: &NodeFacts| facts.address.set(address)))
    };
    let runs = |port: Option<u16>| -> Arrive<'_> {
        Box::new(move |facts| facts.control_plane.set(port.map(|port| ControlPlane { port })))
    };
    let connect: Arrive<'_> = Box::new(|facts| facts.connection.set(fixture.connection.clone()));
    let inputs = [vec![connect], vec![at("10.0.0.1")?, at("10.0.0.2")?], vec![runs(None), runs(Some(7835))]];
    let decide = |known: &node_status::StatusInputs| node_status::build_status(known, "1", "boot");
    let (ends, tried) =
        decisions(&inputs, node_status::status_inputs, decide, |arrived: &[usize]| arrived[1] > 0).await?;
    assert_eq!(tried, 30 * 32);
    for end in ends {
        let reported = end.map(|status| (status.external_address, status.curator_port));
        assert_eq!(reported, Some(("10.0.0.2".to_owned(), 7835)));
    }
    Ok(())
}
