//! Tests of the encryption of Secrets: each step, and who is waited for.

use super::*;
use crate::cluster::authority_theft::AuthorityTheft;
use crate::cluster::kubernetes::tests::kubernetes;
use crate::cluster::kubernetes::{
    CuratorKubernetes, DesiredKubernetes, ObservedKubernetes, spec_from_settings,
};
use crate::cluster::plan::tests::{at, etcd, healthy_cluster, machine, node, observed, order, plan_text};
use crate::cluster::secret_keys::{SecretsReport, SecretsRotationOrder};
use crate::cluster::state::{CONSENSUS_MEMBER_ROLE, Cluster, CuratorAnswer, PeerRenewal};

/// A state after these steps, all of them taken at second 0.
fn state(steps: &[SecretsStep]) -> SecretKeys {
    let mut state = SecretKeys::new(at(0));
    for step in steps {
        state = state.advance(*step, "f", None, at(0));
    }
    state
}

fn settled() -> SecretKeys {
    state(&[SecretsStep::Generate])
}

fn reading() -> SecretKeys {
    state(&[SecretsStep::Generate, SecretsStep::Generate])
}

/// A cluster of three controllers that know the order. Its Kubernetes is desired, and the curators have not answered
/// for it, so nothing else is planned.
fn cluster(state: Option<SecretKeys>, has_controllers: bool) -> Cluster {
    let mut cluster = healthy_cluster(3);
    cluster.kubernetes =
        Some(DesiredKubernetes { spec: kubernetes(), removing: false, pending_rotations: Vec::new() });
    cluster.secret_keys = state;
    for number in 0..3 {
        cluster.members[number].report.as_mut().unwrap().secrets = Some(SecretsReport::default());
        if has_controllers {
            observed(&mut cluster).nodes[number].roles.insert(CONTROLLER_ROLE.to_owned());
        }
    }
    cluster
}

/// The same cluster once its curators have the Kubernetes spec, so that nodes become controllers.
fn with_active_kubernetes(mut cluster: Cluster) -> Cluster {
    let spec = spec_from_settings(kubernetes().to_settings());
    observed(&mut cluster).kubernetes =
        ObservedKubernetes::Present(CuratorKubernetes { spec, ..CuratorKubernetes::default() });
    cluster
}

fn secrets(cluster: &mut Cluster, index: usize) -> &mut SecretsReport {
    cluster.members[index].report.as_mut().unwrap().secrets.as_mut().unwrap()
}

/// The machine has the present list, and its API server runs with it.
fn take(cluster: &mut Cluster, index: usize) {
    let state = cluster.secret_keys.clone().unwrap();
    let report = secrets(cluster, index);
    (report.ordered, report.rewrite) = (state.provider_list(), state.stage == SecretsStage::Rewriting);
    report.running = state.provider_list();
}

fn sent(number: u8) -> String {
    ClusterPlanStep::SendSecretKeys { machine: machine(number) }.to_string()
}

fn step(step: SecretsStep) -> String {
    ClusterPlanStep::AdvanceSecretKeys { step }.to_string()
}

#[test]
fn first_key_of_a_new_cluster_is_made_before_it_has_a_controller() {
    let mut new = cluster(Some(SecretKeys::new(at(0))), false);
    assert!(plan_text(&new, &[]).starts_with(&step(SecretsStep::Generate)), "{}", plan_text(&new, &[]));
    // A controller of an earlier release writes in plain text.
    new.members[1].report.as_mut().unwrap().secrets = None;
    assert_eq!(plan_text(&new, &[]), "");
    observed(&mut new).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
    assert_eq!(plan_text(&new, &[]), step(SecretsStep::Prepare));
}

#[test]
fn running_cluster_gets_a_key_an_hour_after_every_controller_knows_the_order() {
    let mut old = cluster(None, true);
    assert_eq!(plan_text(&old, &[]), step(SecretsStep::Prepare));
    for (second, knows, expected) in [
        (1000 - 3599, true, String::new()),
        (1000 - 3600, true, step(SecretsStep::Generate)),
        (1000 - 3600, false, step(SecretsStep::Prepare)),
        (1000 - 599, false, String::new()),
    ] {
        old.secret_keys = Some(SecretKeys { since: at(second), ..state(&[SecretsStep::Prepare]) });
        old.members[2].report.as_mut().unwrap().secrets = knows.then(SecretsReport::default);
        let text = plan_text(&old, &[]);
        assert_eq!(text.split("; ").next().unwrap(), expected, "{second} {knows}");
    }
    old.secret_keys = None;
    assert_eq!(plan_text(&old, &[]), "", "one of them does not know it");
    old.kubernetes = None;
    old.members[2].report.as_mut().unwrap().secrets = Some(SecretsReport::default());
    assert_eq!(plan_text(&old, &[]), "", "there is nothing to encrypt");
}

#[test]
fn machine_without_the_present_list_becomes_no_controller() {
    let mut cluster = with_active_kubernetes(cluster(Some(settled()), false));
    let text = plan_text(&cluster, &[]);
    assert!(text.starts_with(&[1, 2, 3].map(sent).join("; ")), "{text}");
    assert!(!text.contains("+kubernetes-controller"), "{text}");
    take(&mut cluster, 0);
    let text = plan_text(&cluster, &[]);
    assert!(text.contains("node-1 +kubernetes-controller") && !text.contains("node-2 +"), "{text}");
    cluster.members[1].report.as_mut().unwrap().secrets = None;
    let text = plan_text(&cluster, &[]);
    assert!(text.contains("2 waits: its role server is of a release that does not"), "{text}");
}

#[test]
fn controllers_restart_one_at_a_time_and_all_are_waited_for() {
    let next = step(SecretsStep::Write);
    let mut cluster = cluster(Some(reading()), true);
    let text = plan_text(&cluster, &[]);
    assert!(text.starts_with(&sent(1)) && !text.contains(&sent(2)), "{text}");
    // It has the order, and its API server restarts.
    secrets(&mut cluster, 0).ordered = reading().provider_list();
    let text = plan_text(&cluster, &[]);
    assert!(!text.contains(&sent(2)) && text.contains("1 waits: its API server restarts"), "{text}");
    take(&mut cluster, 0);
    let text = plan_text(&cluster, &[]);
    assert!(text.starts_with(&sent(2)) && !text.contains(&next), "{text}");
    // The second one is off. It has the order, and holds the third one back, and the stage.
    cluster.members[1].last_order = Some(order(MembershipOrder::Join, 900));
    cluster.members[1].report.as_mut().unwrap().generation = 2;
    let text = plan_text(&cluster, &[]);
    assert!(!text.contains(&sent(3)) && !text.contains(&next), "{text}");
    assert!(text.contains("(reading): 1 of 3 controllers"), "{text}");
    cluster.members[1].report.as_mut().unwrap().generation = 3;
    take(&mut cluster, 1);
    assert!(!plan_text(&cluster, &[]).contains(&next));
    take(&mut cluster, 2);
    assert_eq!(plan_text(&cluster, &[]), next);
    // One that leaves counts until it is ordered to leave.
    secrets(&mut cluster, 2).running.clear();
    cluster.members[2].last_order = Some(order(MembershipOrder::Leave, 5));
    observed(&mut cluster).nodes[2].roles.remove(CONTROLLER_ROLE);
    assert!(plan_text(&cluster, &[]).contains(&next), "{}", plan_text(&cluster, &[]));
}

#[test]
fn controller_without_a_machine_holds_the_stage() {
    let mut cluster = cluster(Some(reading()), true);
    for index in 0..3 {
        take(&mut cluster, index);
    }
    assert_eq!(plan_text(&cluster, &[]), step(SecretsStep::Write));
    observed(&mut cluster).nodes.push(node(7, &[CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE]));
    observed(&mut cluster).etcd_members.push(etcd(7));
    let text = plan_text(&cluster, &[]);
    assert!(
        text.contains("node-7 runs on no machine") && !text.contains(&step(SecretsStep::Write)),
        "{text}"
    );
}

#[test]
fn former_key_is_dropped_after_every_secret_was_written_again() {
    use SecretsStep::{Drop, Generate, Rewrite, Write};
    let mut cluster = cluster(Some(state(&[Generate, Generate, Write, Rewrite])), true);
    let list = cluster.secret_keys.as_ref().unwrap().provider_list();
    for index in 0..3 {
        take(&mut cluster, index);
        secrets(&mut cluster, index).rewrite = false;
    }
    // No API server restarts for it.
    let text = plan_text(&cluster, &[]);
    assert!(text.starts_with(&[1, 2, 3].map(sent).join("; ")), "{text}");
    for index in 0..3 {
        take(&mut cluster, index);
        secrets(&mut cluster, index).rewritten = "key1-f".to_owned();
    }
    let text = plan_text(&cluster, &[]);
    assert!(text.contains("no API server has written every Secret again yet"), "{text}");
    secrets(&mut cluster, 1).rewritten = "key2-f".to_owned();
    assert_eq!(list, "key2-f key1-f");
    assert_eq!(plan_text(&cluster, &[]), step(Drop));
    // Not while one of them may still write with the former key.
    secrets(&mut cluster, 2).running = "key1-f key2-f".to_owned();
    assert!(!plan_text(&cluster, &[]).contains(&step(Drop)), "{}", plan_text(&cluster, &[]));
}

#[test]
fn another_key_is_made_by_order_and_a_former_one_is_deleted_without_a_snapshot() {
    use SecretsStep::{Drop, Forget, Generate, Rewrite, Write};
    let ordered = SecretsRotationOrder { ordered_at: at(900), ordered_by: "kim".to_owned() };
    let mut cluster = cluster(Some(SecretKeys { rotation: Some(ordered), ..settled() }), true);
    for index in 0..3 {
        take(&mut cluster, index);
    }
    assert_eq!(plan_text(&cluster, &[]), step(Generate));
    cluster.secret_keys = Some(settled());
    assert_eq!(plan_text(&cluster, &[]), "");
    cluster.secret_keys = Some(state(&[Generate, Generate, Write, Rewrite, Drop]));
    for index in 0..3 {
        take(&mut cluster, index);
    }
    cluster.oldest_snapshot = Some(at(-1));
    assert_eq!(plan_text(&cluster, &[]), "", "that snapshot may need it");
    cluster.oldest_snapshot = Some(at(1));
    assert_eq!(plan_text(&cluster, &[]), step(Forget(1)));
}

#[test]
fn key_that_the_database_lost_is_not_replaced() {
    let mut cluster = cluster(Some(settled()), true);
    for index in 0..3 {
        take(&mut cluster, index);
    }
    secrets(&mut cluster, 0).ordered = "key2-other key1-f".to_owned();
    let text = plan_text(&cluster, &[]);
    assert!(text.starts_with("1 waits: its API server writes Kubernetes Secrets with key2-other"), "{text}");
    // The backup is of a time before the first key. Another first key would leave Secrets unreadable.
    let prepared = SecretKeys { since: at(-3600), ..state(&[SecretsStep::Prepare]) };
    for before in [None, Some(prepared)] {
        cluster.secret_keys = before;
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("1 waits: its API server writes Kubernetes Secrets with key2-other"), "{text}");
        assert!(!text.contains(&step(SecretsStep::Generate)), "{text}");
    }
}

#[test]
fn machine_becomes_no_controller_while_the_database_lacks_a_key() {
    let mut cluster = with_active_kubernetes(cluster(Some(settled()), false));
    for index in 0..3 {
        take(&mut cluster, index);
    }
    let controller = |number: u8| format!("node-{number} +{CONTROLLER_ROLE}");
    let text = plan_text(&cluster, &[]);
    assert!((1..=3).all(|number| text.contains(&controller(number))), "{text}");
    observed(&mut cluster).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
    secrets(&mut cluster, 0).ordered = "key2-other".to_owned();
    let text = plan_text(&cluster, &[]);
    assert!(!text.contains(&controller(2)) && !text.contains(&sent(2)), "{text}");
    assert!(text.contains("2 waits: it gets no keys of Kubernetes Secrets: m1 writes them"), "{text}");
}

#[test]
fn machine_without_keys_becomes_no_controller_while_none_are_sent() {
    let theft = AuthorityTheft { ordered_by: "kim".to_owned(), stage: None };
    let renewal = PeerRenewal { requested_at: at(900), requested_by: "kim".to_owned() };
    for (theft, renewal) in [(Some(theft), None), (None, Some(renewal))] {
        for state in [settled(), SecretKeys::new(at(0))] {
            let mut cluster = with_active_kubernetes(cluster(Some(state.clone()), false));
            cluster.authority_theft.clone_from(&theft);
            cluster.peer_renewal.clone_from(&renewal);
            let text = plan_text(&cluster, &[]);
            assert!(!text.contains(CONTROLLER_ROLE) && !text.contains(&sent(1)), "{text}");
            if state.stage.has_keys() {
                take(&mut cluster, 0);
                let text = plan_text(&cluster, &[]);
                assert!(text.contains("node-1 +") && !text.contains("node-2 +"), "{text}");
            }
        }
    }
}

#[test]
fn order_that_was_rejected_is_sent_again_after_a_while() {
    let mut cluster = cluster(Some(SecretKeys { since: at(900), ..settled() }), true);
    for index in 1..3 {
        take(&mut cluster, index);
    }
    cluster.members[0].report.as_mut().unwrap().error = Some("the disk is full".to_owned());
    for (ago, is_sent) in [(59, false), (60, true)] {
        cluster.members[0].last_order = Some(order(MembershipOrder::Join, ago));
        let text = plan_text(&cluster, &[]);
        assert_eq!(text.contains(&sent(1)), is_sent, "{ago}: {text}");
    }
}

#[test]
fn keys_wait_for_other_orders_and_come_back_for_a_restore() {
    let mut cluster = cluster(Some(settled()), true);
    cluster.peer_renewal = Some(PeerRenewal { requested_at: at(900), requested_by: "kim".to_owned() });
    assert!(!plan_text(&cluster, &[]).contains(&sent(1)), "{}", plan_text(&cluster, &[]));
    cluster.peer_renewal = None;
    // A machine that has to follow the restored cluster first.
    cluster.epoch = 1;
    assert!(!plan_text(&cluster, &[]).contains(&sent(1)), "{}", plan_text(&cluster, &[]));

    cluster.restoring = Some(PendingRestore {
        requested_at: at(990),
        target_machine: None,
        digest: Some([1; 32]),
        image: None,
    });
    cluster.observed = CuratorAnswer::NotQueried;
    let brought = step(SecretsStep::BringBack(at(990)));
    assert!(plan_text(&cluster, &[]).contains(&brought), "{}", plan_text(&cluster, &[]));
    cluster.secret_keys.as_mut().unwrap().restored_for = Some(at(990));
    assert!(!plan_text(&cluster, &[]).contains(&brought), "{}", plan_text(&cluster, &[]));
}
