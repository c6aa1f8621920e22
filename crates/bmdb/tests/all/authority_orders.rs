//! Orders to keep the authority of a cluster when a machine of its control plane leaves: which removal each of them is
//! about.

use anyhow::{Context as _, Result};
use model::cluster::spec::ClusterSpecChange;
use model::ids::MachineId;
use shepherd_bmdb::cluster::transitions::LEASE_KIND;
use shepherd_bmdb::engine::fact_change::FactChange;
use shepherd_bmdb::engine::fact_change::retirement::RetirementChange;
use shepherd_bmdb::orders::machine_order::MachineOrder;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LeaseHolder};

fn order(rpc: &str) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: rpc.to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "its disks are shredded".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(rpc.as_bytes()),
    }
}

/// A cluster of three machines.
async fn world(name: &str) -> Result<(Kit, Uuid, Vec<MachineId>)> {
    let kit = Kit::new(name).await?;
    let cluster = kit.founded_cluster(5, 1).await?;
    sqlx::query("UPDATE cluster SET voters = 3, voters_reached = 3").execute(&kit.pool).await?;
    let machines = kit.control_plane(3).await?;
    Ok((kit, cluster, machines))
}

async fn scale(
    kit: &Kit,
    control_plane: Option<u32>,
    workers: Option<u32>,
    keep_authority: bool,
) -> Result<String> {
    let change = ClusterSpecChange { control_plane, workers, keep_authority, ..ClusterSpecChange::default() };
    let order = order("shepherd.fleet.v1.Clusters/Change");
    let carried = kit.bmdb.change_cluster(order, "ams".to_owned(), change).await?;
    assert!(carried.outcome.is_changed(), "{:?}", carried.outcome);
    Ok(carried.outcome.message)
}

/// The machines that keep the authority when they leave.
async fn keeping(kit: &Kit) -> Result<Vec<MachineId>> {
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let members = found.machines.iter().map(|line| &line.member);
    Ok(members.filter(|member| member.keep_authority).map(|member| member.machine).collect())
}

#[tokio::test]
async fn authority_is_kept_for_the_machines_that_leave_by_the_order() -> TestResult {
    let (kit, cluster, machines) = world("keep_authority_scale").await?;
    let holder = LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    let leave = async |machine: MachineId, how: (&str, bool)| {
        holder.shepherd.bmdb.mark_leaving_cluster(&holder.lease, (cluster, "ams"), machine, how).await
    };
    let kept = scale(&kit, Some(3), None, true).await?;
    assert!(kept.contains("; it keeps its authority; "), "{kept}");
    assert!(keeping(&kit).await?.is_empty(), "none of them leaves yet");
    leave(machines[0], ("its machine is lost", false)).await?;
    assert!(keeping(&kit).await?.is_empty(), "it does not leave by the order");
    // Machines leave one after the other, and orders about workers come in between.
    let workers = scale(&kit, None, Some(2), false).await?;
    assert!(!workers.contains("authority"), "{workers}");
    leave(machines[1], ("the cluster should have 3", true)).await?;
    assert_eq!(keeping(&kit).await?, [machines[1]]);
    let replaced = scale(&kit, Some(1), None, false).await?;
    assert!(replaced.contains("; its authority is replaced when a member"), "{replaced}");
    leave(machines[2], ("the cluster should have 1", true)).await?;
    assert_eq!(keeping(&kit).await?, [machines[1]], "the later order does not change what leaves already");
    Ok(())
}

#[tokio::test]
async fn authority_is_kept_for_a_machine_that_is_retired_so() -> TestResult {
    let (kit, _, machines) = world("keep_authority_retire").await?;
    let retire = async |machine: MachineId, keep_authority: bool| -> Result<String> {
        let retire = MachineOrder::Retire { wipe: false, keep_authority };
        let order = order(retire.rpc());
        let carried = kit.bmdb.execute_machine_order(order, machine, retire, "kim".to_owned()).await?;
        Ok(carried.outcome.message)
    };
    retire(machines[0], false).await?;
    retire(machines[1], true).await?;
    assert_eq!(keeping(&kit).await?, [machines[1]]);
    let later = retire(machines[0], true).await?;
    assert!(later.contains("its cluster keeps its authority from now on"), "{later}");
    let again = retire(machines[0], false).await?;
    assert!(again.contains("nothing was changed"), "{again}");
    let both = keeping(&kit).await?;
    assert!(both.len() == 2 && both.contains(&machines[0]), "{both:?}");
    // The next order to retire it decides that again.
    kit.change(machines[1], vec![FactChange::Retirement(RetirementChange::Cleared)]).await?;
    retire(machines[1], false).await?;
    assert_eq!(keeping(&kit).await?, [machines[0]]);
    Ok(())
}
