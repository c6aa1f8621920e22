//! Tests: the replacement of an authority after a theft, step by step.

use super::*;
use crate::cluster::plan::tests::{at, etcd, healthy_cluster, machine, observed, plan_text};
use crate::cluster::state::{CONSENSUS_MEMBER_ROLE, LastOrder, NodeState};
use crate::phase::Phase;

const NEW: [u8; 2] = [5, 5];

/// A cluster of three members and a worker in which the authority is replaced, with this step under way since
/// second 900.
fn cluster(step: Option<AuthorityStep>) -> Cluster {
    let stage = step.map(|step| TheftStage { certificate: NEW.to_vec(), step, since: at(900) });
    let theft = AuthorityTheft { ordered_by: "kim".to_owned(), stage };
    Cluster { authority_theft: Some(theft), ..healthy_cluster(3) }
}

fn sent_at(member: &mut ClusterMember, second: i64, generation: i64) {
    let order = MembershipOrder::Join;
    member.last_order = Some(LastOrder { order, generation, sent_at: at(second) });
}

fn took(member: &mut ClusterMember, step: AuthorityStep) {
    let report = member.report.as_mut().unwrap();
    (report.next_authority, report.next_authority_step) = (Some(NEW.to_vec()), Some(step));
}

fn followed(member: &mut ClusterMember) {
    member.report.as_mut().unwrap().ca_certificate = Some(NEW.to_vec());
}

#[test]
fn authority_is_made_before_anything_is_sent() {
    assert!(plan_text(&cluster(None), &[]).starts_with(&ClusterPlanStep::CreateAuthority.to_string()));
}

#[test]
fn each_step_waits_for_every_member_of_etcd() {
    use AuthorityStep::{Accept, Close, Install, Reject, Show};
    for step in [Accept, Show, Reject, Close, Install] {
        let mut cluster = cluster(Some(step));
        let sent = |number| ClusterPlanStep::SendAuthority { machine: machine(number), step }.to_string();
        let all = [1, 2, 3].map(sent).join("; ");
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(&all) && !text.contains(&sent(9)), "{step}: {text}");
        let next = ClusterPlanStep::AdvanceAuthority { step: step.next().unwrap() }.to_string();
        for number in 0..3 {
            let text = plan_text(&cluster, &[]);
            assert!(!text.contains(&next), "{step}, without machine {number}: {text}");
            let member = &mut cluster.members[number];
            match step {
                Install => followed(member),
                _ => took(member, step),
            }
        }
        assert!(plan_text(&cluster, &[]).starts_with(&next), "{step}: {}", plan_text(&cluster, &[]));
    }
}

#[test]
fn member_of_etcd_without_a_machine_is_not_cut_off() {
    let mut cluster = cluster(Some(AuthorityStep::Accept));
    for member in &mut cluster.members[..3] {
        took(member, AuthorityStep::Accept);
    }
    let next = ClusterPlanStep::AdvanceAuthority { step: AuthorityStep::Show }.to_string();
    assert!(plan_text(&cluster, &[]).starts_with(&next));
    observed(&mut cluster).etcd_members.push(etcd(7));
    let text = plan_text(&cluster, &[]);
    assert!(
        text.contains("node-7 runs on no machine of its control plane") && !text.contains(&next),
        "{text}"
    );
    // A worker takes no steps of etcd. A person may have given it the role.
    *observed(&mut cluster).etcd_members.last_mut().unwrap() = etcd(9);
    let text = plan_text(&cluster, &[]);
    assert!(
        text.contains("node-9 runs on no machine of its control plane") && !text.contains(&next),
        "{text}"
    );
}

#[test]
fn nothing_that_answers_while_the_curators_are_stopped_is_believed() {
    use AuthorityStep::{Accept, Close, Follow, Install, Reject, Show};
    // A false curator of the thief lists no nodes, and a member of etcd that nobody can move.
    for (step, is_believed) in
        [(Accept, true), (Show, true), (Reject, true), (Close, false), (Install, false), (Follow, true)]
    {
        let mut cluster = cluster(Some(step));
        observed(&mut cluster).nodes.clear();
        observed(&mut cluster).etcd_members.push(etcd(7));
        let text = plan_text(&cluster, &[]);
        assert_eq!(text.contains("ask 9 leave"), is_believed, "{step}: {text}");
        let is_held = matches!(step, Accept | Show | Reject);
        assert_eq!(text.contains("runs on no machine"), is_held, "{step}: {text}");
    }
}

#[test]
fn no_member_of_etcd_is_added_before_the_new_authority_is_installed() {
    let added = format!("node-3 +{CONSENSUS_MEMBER_ROLE} -");
    for (step, is_added) in [
        (None, false),
        (Some(AuthorityStep::Accept), false),
        (Some(AuthorityStep::Reject), false),
        (Some(AuthorityStep::Install), false),
        (Some(AuthorityStep::Follow), true),
    ] {
        let mut cluster = cluster(step);
        observed(&mut cluster).nodes[2].roles.clear();
        observed(&mut cluster).etcd_members.truncate(2);
        let text = plan_text(&cluster, &[]);
        assert_eq!(text.contains(&added), is_added, "{step:?}: {text}");
    }
}

#[test]
fn machine_that_joins_in_the_middle_gets_the_order_again_with_the_new_authority() {
    let joins = "ask 9 join";
    for (step, sent, key_known, is_sent) in [
        (AuthorityStep::Reject, 899, false, false),
        (AuthorityStep::Follow, 899, false, true),
        (AuthorityStep::Follow, 899, true, true),
        (AuthorityStep::Follow, 901, false, false),
    ] {
        let mut cluster = cluster(Some(step));
        for member in &mut cluster.members[..3] {
            followed(member);
        }
        let member = &mut cluster.members[3];
        sent_at(member, sent, 3);
        let report = member.report.as_mut().unwrap();
        report.ca_certificate = None;
        if !key_known {
            report.key = None;
        }
        // It registered by the former authority, and cannot take its certificate.
        observed(&mut cluster).nodes[3].state = NodeState::Standby;
        let text = plan_text(&cluster, &[]);
        assert_eq!(text.contains(joins), is_sent, "{step} {sent} {key_known}: {text}");
        let ended = text.contains(&ClusterPlanStep::EndAuthorityTheft.to_string());
        assert_eq!(ended, step == AuthorityStep::Follow && !is_sent, "{step} {sent} {key_known}: {text}");
    }
}

#[test]
fn machine_that_waits_for_others_gets_another_certificate_in_time() {
    let days = |days: i64| 901 + days * 86_400;
    for (step, reported, day, expected) in [
        (AuthorityStep::Show, true, 9, StepDelivery::Done),
        (AuthorityStep::Show, true, 10, StepDelivery::Due),
        (AuthorityStep::Reject, true, 10, StepDelivery::Due),
        (AuthorityStep::Install, true, 10, StepDelivery::Due),
        // It has no certificate by the new authority yet.
        (AuthorityStep::Accept, true, 10, StepDelivery::Done),
        // It is off, and has taken the step.
        (AuthorityStep::Reject, false, 10, StepDelivery::Done),
    ] {
        let stage = TheftStage { certificate: NEW.to_vec(), step, since: at(900) };
        let mut member = healthy_cluster(3).members.swap_remove(0);
        took(&mut member, step);
        sent_at(&mut member, 901, if reported { 3 } else { 4 });
        assert_eq!(step_delivery(&member, &stage, at(days(day))), expected, "{step} {reported} {day}");
    }
}

#[test]
fn records_of_the_control_plane_count_and_not_those_of_the_thief() {
    let mut cluster = Cluster { epoch: 900, ..cluster(Some(AuthorityStep::Install)) };
    assert_eq!(installed_control_plane(&cluster, &NEW), (900, Vec::new()), "nobody has followed");
    let mut report = |number: usize, epoch, address: &str, is_unfinished| {
        let member = &mut cluster.members[number];
        followed(member);
        let report = member.report.as_mut().unwrap();
        (report.epoch, report.address) = (epoch, Some(address.to_owned()));
        report.next_authority = if is_unfinished { Some(NEW.to_vec()) } else { None };
    };
    report(0, 2, "10.0.0.1", false);
    // It got its epoch by an order.
    report(1, 900, "10.0.0.2", false);
    report(2, 0, "10.0.0.3", true);
    report(3, 0, "10.0.0.9", false);
    let expected = (2, vec!["10.0.0.1".to_owned(), "10.0.0.2".to_owned()]);
    assert_eq!(installed_control_plane(&cluster, &NEW), expected);
}

#[test]
fn last_step_concerns_every_node_and_ends_once_curators_answer() {
    let mut cluster = cluster(Some(AuthorityStep::Follow));
    for member in &mut cluster.members[..3] {
        followed(member);
    }
    let sent = ClusterPlanStep::SendAuthority { machine: machine(9), step: AuthorityStep::Follow };
    assert!(plan_text(&cluster, &[]).starts_with(&sent.to_string()), "{}", plan_text(&cluster, &[]));
    followed(&mut cluster.members[3]);
    let unreachable = Cluster { observed: CuratorAnswer::Unreachable("none".to_owned()), ..cluster.clone() };
    let ended = ClusterPlanStep::EndAuthorityTheft.to_string();
    assert!(!plan_text(&unreachable, &[]).contains(&ended));
    assert!(plan_text(&cluster, &[]).starts_with(&ended), "{}", plan_text(&cluster, &[]));
}

#[test]
fn order_is_sent_once_and_again_to_a_machine_that_does_not_take_it() {
    let stage = TheftStage { certificate: NEW.to_vec(), step: AuthorityStep::Show, since: at(900) };
    let mut member = healthy_cluster(3).members.swap_remove(0);
    let generation = member.report.as_ref().unwrap().generation;
    let delivery = |member: &ClusterMember, second| step_delivery(member, &stage, at(second));
    let waits = |delivery, part: &str| {
        let StepDelivery::Waits(text) = delivery else { panic!("{part}: {delivery:?}") };
        assert!(text.contains(part) && !text.ends_with('.'), "{text}");
    };
    sent_at(&mut member, 899, generation);
    assert_eq!(delivery(&member, 901), StepDelivery::Due, "that was the order of the step before");
    sent_at(&mut member, 901, generation + 1);
    waits(delivery(&member, 902), "has not reported on it");
    waits(delivery(&member, 90_000), "has not reported on it");
    let report = member.report.as_mut().unwrap();
    report.generation = generation + 1;
    waits(delivery(&member, 902), "takes the step");
    assert_eq!(delivery(&member, 961), StepDelivery::Due, "its certificate may have ended");
    member.report.as_mut().unwrap().error = Some("its operation is not known to this release".to_owned());
    waits(delivery(&member, 902), "not known to this release");
    took(&mut member, AuthorityStep::Accept);
    assert_eq!(delivery(&member, 961), StepDelivery::Due, "it has taken the step before");
    took(&mut member, AuthorityStep::Reject);
    assert_eq!(delivery(&member, 961), StepDelivery::Done, "it is further than that");
    let mut interrupted = member.clone();
    took(&mut interrupted, AuthorityStep::Accept);
    followed(&mut interrupted);
    interrupted.report.as_mut().unwrap().error = None;
    waits(delivery(&interrupted, 902), "takes the step");
    interrupted.report.as_mut().unwrap().next_authority = None;
    assert_eq!(delivery(&interrupted, 902), StepDelivery::Done, "the rest of its files is changed, too");
    member.report.as_mut().unwrap().next_authority = Some(vec![6]);
    assert_eq!(delivery(&member, 961), StepDelivery::Due, "that was another authority");
    let retired = ClusterMember { retiring: true, ..member.clone() };
    let given_up = ClusterMember { phase: Phase::NeedsHuman, ..member.clone() };
    for lost in [&retired, &given_up] {
        assert_eq!(delivery(lost, 90_000), StepDelivery::Due, "its etcd would be cut off");
        for step in [AuthorityStep::Close, AuthorityStep::Install] {
            let stage = TheftStage { step, ..stage.clone() };
            assert_eq!(
                step_delivery(lost, &stage, at(1019)),
                StepDelivery::Due,
                "{step}: its curator may run"
            );
            assert_eq!(
                step_delivery(lost, &stage, at(1020)),
                StepDelivery::Excluded,
                "{step}: nobody could remove it"
            );
            assert_ne!(step_delivery(&member, &stage, at(1020)), StepDelivery::Excluded, "{step}");
            let mut done = lost.clone();
            followed(&mut done);
            done.report.as_mut().unwrap().next_authority = None;
            assert_eq!(step_delivery(&done, &stage, at(1020)), StepDelivery::Done, "{step}");
        }
    }
    member.last_order.as_mut().unwrap().order = MembershipOrder::Leave;
    assert_eq!(delivery(&member, 961), StepDelivery::Excluded);
}

#[test]
fn progress_names_the_machines_that_are_waited_for() {
    let mut cluster = cluster(Some(AuthorityStep::Accept));
    took(&mut cluster.members[0], AuthorityStep::Accept);
    let theft = cluster.authority_theft.clone().unwrap();
    let progress = theft_progress(&theft, &cluster.members, at(1000)).unwrap();
    let named: Vec<&str> = progress.waits_for.iter().map(|wait| wait.node.as_str()).collect();
    assert_eq!((progress.stage.as_str(), progress.since), ("accepting", Some(at(900))));
    assert_eq!(named, ["m2", "m3"]);
    assert_eq!(theft_progress(&AuthorityTheft { stage: None, ..theft }, &cluster.members, at(1000)), None);
}
