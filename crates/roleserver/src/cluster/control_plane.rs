//! Run etcd and the curator on this node, for founding a cluster or as a consensus member.
//!
//! Both run together or not at all. Whether they run follows from founding, or else from the node's roles
//! ([`startup`][crate::cluster::startup]). A change in the details of a role restarts nothing as long as the membership
//! stays the same. The data of a membership is removed when the membership has ended, after etcd has stopped. A node
//! that becomes a member again gets another member ID, and etcd would not run on the data of the former member.
//!
//! While etcd runs, a step beside it that fails is repeated and reported, and stops nothing: the other members may need
//! this one for their quorum. So a member with revoked credentials runs etcd without a curator until the leading curator
//! has ended its membership.
//!
//! etcd is a child that outlives this process; the next role server adopts it. The curator is a part of this process
//! ([`local_curator`][crate::cluster::local_curator]).

use std::collections::BTreeSet;
use std::slice;
use std::time::Duration;

use curator::bootstrap::{bootstrap_cluster, renew_from_local_etcd};
use curator::entitlement::{Entitlement, check_certificate};
use curator_client::certificate::{Serial, Validity};
use curator_client::node::{ConsensusMember, NodeRoles};
use curator_client::node_id::PublicKey;
use curator_client::pki::PEER_LIFETIME;
use etcd::client::Client;
use etcd::namespace::Namespace;
use supervisor::combine::derive_value;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::{WatchCell, Watcher};

use crate::child::lifecycle::{find_running, run_child};
use crate::child::spec::ChildSpec;
use crate::cluster::beside_etcd::{register_pair, retry_beside_etcd};
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_data::{self, EtcdDataState};
use crate::cluster::etcd_image::restore_image;
use crate::cluster::etcd_member;
use crate::cluster::etcd_program::{Flags, running_flags};
use crate::cluster::etcd_space::watch_space;
use crate::cluster::etcd_start::{check_program, record_version};
use crate::cluster::files::{ClusterFiles, Credentials, EtcdMembership};
use crate::cluster::local_curator::start_curator;
use crate::cluster::member_address::{follow_moved_member, publish_peer_url};
use crate::cluster::node_facts::{ClusterFounding, CuratorConnection, NodeFacts};
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_certificate::renew_peer_certificate;
use crate::cluster::peer_restart::{record_start, restart_in_turn};
use crate::cluster::peer_revocation::{
    describe_lost_list, is_pair_revoked, prepare_list, request_peer_certificate, watch_revocation_list,
};
use crate::cluster::startup::{
    ControlPlaneStartup, EtcdDataAction, decide_etcd_data, decide_startup, matches_running, must_restart,
    startup_inputs,
};
use crate::cluster::stored_authorities::{encode_bundle, prepare_ca_file};

/// Key namespace of the curator in etcd.
pub(super) const CURATOR_NAMESPACE: &str = "curator";
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Makes the runnable: one child decides what to run from `facts`, another one runs it.
#[must_use]
pub fn run_control_plane(host: ControlPlaneContext, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        async move {
            let startup = WatchCell::new();
            let watched = facts.clone();
            starting
                .start("decide", derive_value(move || startup_inputs(&watched), decide_startup, &startup))?;
            starting.start("launcher", launch_control_plane(host, facts, startup))?;
            Err(starting.mark_healthy().scope().cancelled().await.into())
        }
    })
}

fn launch_control_plane(
    host: ControlPlaneContext,
    facts: NodeFacts,
    startup: WatchCell<ControlPlaneStartup>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        let mut startups = startup.watch();
        async move {
            // What an earlier run published no longer holds.
            facts.control_plane.set(None);
            facts.etcd_space.set(None);
            let scope = starting.scope().clone();
            let first = scope.until_cancelled(startups.next()).await?;
            facts.problems.clear_parts(&NodePart::OF_ETCD);
            let last = host.files.read_membership()?;
            let over = |last: &EtcdMembership| {
                decide_etcd_data(last, etcd_data::inspect_data(&host.files, last), &first)
                    == EtcdDataAction::Remove
            };
            if last.as_ref().is_some_and(over) {
                stop_leftover_etcd(&host).await?;
            }
            // etcd may have created its data until it stopped, so decide again.
            if let Some(last) = last.filter(over) {
                tracing::info!(member = ?last.member, data = last.data, "an etcd membership has ended or never began; its data is removed");
                host.files.remove_membership(&last)?;
                host.files.remove_curator_certificate()?;
            }
            let beginning = async {
                Ok::<_, RunnableError>(match &first {
                    ControlPlaneStartup::Nothing => None,
                    ControlPlaneStartup::Founding(to_found) => {
                        Some(found_cluster(&starting, &scope, &host, &facts, to_found).await?)
                    }
                    ControlPlaneStartup::Member(role, connection) => {
                        Some(run_member(&starting, &scope, &host, &facts, role, connection).await?)
                    }
                })
            };
            // If the membership has ended before etcd responded for the first time, waiting for etcd would never end.
            let running = tokio::select! {
                running = beginning => running,
                () = wait_for_other_startup(&mut startups, &first, &host.files) => return Err(stop_for_restart(&facts)),
            };
            // The result is also reported to the shepherd or operator who ordered it, not only in this machine's log.
            if !scope.token().is_cancelled() {
                facts.problems.set(NodePart::ControlPlane, running.as_ref().err().map(ToString::to_string));
            }
            let running = running?;
            let healthy = starting.mark_healthy();
            loop {
                let next = healthy.scope().until_cancelled(startups.next()).await?;
                if !matches_running(running, &next) {
                    return Err(stop_for_restart(&facts));
                }
            }
        }
    })
}

/// Waits until the desired control plane differs from `beginning`, which is still starting.
async fn wait_for_other_startup(
    startups: &mut Watcher<ControlPlaneStartup>,
    beginning: &ControlPlaneStartup,
    files: &ClusterFiles,
) {
    let begun = || match files.read_membership() {
        Ok(Some(membership)) => etcd_data::inspect_data(files, &membership),
        Ok(None) => EtcdDataState::Empty,
        Err(_) => EtcdDataState::Unknown,
    };
    startups.next_matching(|next| must_restart(beginning, begun(), next)).await;
}

/// Clears what was published about the control plane, and returns the error that restarts this runnable.
fn stop_for_restart(facts: &NodeFacts) -> RunnableError {
    facts.control_plane.set(None);
    if let Some(connection) = facts.connection.latest() {
        connection.curators.set_local(None);
    }
    RunnableError::msg("the roles of this node's control plane have changed, so it restarts")
}

/// Stops an etcd that an earlier role server started and that is no longer needed.
async fn stop_leftover_etcd(host: &ControlPlaneContext) -> Result<(), RunnableError> {
    let children = host.children.clone();
    let ended = tokio::task::spawn_blocking(move || {
        crate::child::lifecycle::stop_leftovers(etcd_member::NAME, &children)
    });
    Ok(ended.await??)
}

async fn found_cluster(
    starting: &Starting,
    scope: &Scope,
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    to_found: &ClusterFounding,
) -> Result<u64, RunnableError> {
    let key = host.files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))?;
    let founding = &to_found.founding;
    let own = curator_client::node_id::NodeId::from_key(&founding.node_key);
    let membership = if let Some(membership) = host.files.read_membership()? {
        membership
    } else {
        let membership = etcd_member::first_membership(own, to_found.address, founding.epoch());
        // A release that left the pair of an earlier membership may have run here.
        host.files.remove_peer_pair()?;
        host.files.write_membership(&membership)?;
        membership
    };
    let anchor = founding.authority.anchor();
    if etcd_member::read_peer_certificate(&host.files).is_none() {
        let validity = Validity::starting(host.clock.now(), PEER_LIFETIME);
        let serial = Serial::new(rand::random());
        let issued = founding.authority.issue_etcd_peer_certificate(
            &founding.node_key,
            membership.address,
            serial,
            validity,
        )?;
        check_certificate(&issued.certificate, &Entitlement::for_etcd_peer(membership.address))?;
        // First the list: without it, etcd would reject every peer from the first one on.
        let none = BTreeSet::new();
        let list = founding.authority.sign_peer_revocation_list(&none, 0, host.clock.now())?;
        etcd_member::write_revocation_list(&host.files, &list)?;
        let trusted = encode_bundle(slice::from_ref(anchor));
        etcd_member::write_peer_certificate(&host.files, &key, &issued.certificate, &trusted)?;
    }
    let cluster = anchor.cluster.to_string();
    if let Some(image) = &to_found.image {
        let restoring = restore_image(host, own, &cluster, &membership, image);
        scope.until_cancelled(restoring).await??;
    }
    let client = start_etcd(starting, scope, host, facts, own, &cluster, &membership).await?;
    let founded = scope.until_cancelled(bootstrap_cluster(&client, founding, host.clock.now())).await??;
    let registering = || register_pair(&host.files, &client, founding.node_key);
    let member = retry_beside_etcd(scope, facts, registering).await?;
    // The order matters: once a node has a certificate it must have roles too, or it would wait for a curator to tell
    // it that the curator has to run here.
    host.files.write_membership(&EtcdMembership { member: Some(member), ..membership.clone() })?;
    let role = ConsensusMember { member_id: member, peers: std::collections::BTreeMap::new() };
    let roles = NodeRoles { consensus_member: Some(role), ..NodeRoles::default() };
    if host.files.read_roles().is_none() {
        host.files.write_roles(&roles)?;
    }
    let credentials = Credentials {
        certificate: hex::encode(&founded.certificate),
        ca_certificate: hex::encode(&founded.ca_certificate),
    };
    host.files.write_credentials(&credentials)?;
    host.files.remove_authority()?;
    host.files.remove_snapshot()?;
    host.files.remove_image()?;
    let connection = CuratorConnection::new(&key, &credentials, &host.files, &host.clock)?;
    tracing::info!(node = %connection.id, "cluster {} is founded", connection.anchor.cluster);
    start_curator(starting, scope, host, facts, &connection, client, membership.address).await?;
    // Publish the connection before clearing `founding`: from then on the roles decide what runs.
    facts.roles.set(roles);
    facts.connection.set(connection);
    facts.founding.set(None);
    Ok(member)
}

async fn run_member(
    starting: &Starting,
    scope: &Scope,
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    role: &ConsensusMember,
    connection: &CuratorConnection,
) -> Result<u64, RunnableError> {
    let key = host.files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))?;
    let own = connection.id;
    let former = host.files.read_membership()?;
    let launched_for = former.as_ref().and_then(|membership| membership.member);
    let address = scope.until_cancelled(facts.address.watch().next()).await?;
    let membership = if let Some(membership) = former {
        // etcd may have started as another member than the one it was launched for.
        let of_role = EtcdMembership { member: Some(role.member_id), ..membership.clone() };
        if of_role != membership {
            host.files.write_membership(&of_role)?;
        }
        scope.until_cancelled(follow_moved_member(host, address, of_role)).await??
    } else {
        let membership =
            etcd_member::membership_for_role(own, address, role, connection.curators.highest_epoch());
        host.files.remove_peer_pair()?;
        host.files.write_membership(&membership)?;
        membership
    };
    let is_of_another = launched_for.is_some_and(|member| member != role.member_id);
    let needs_pair = is_of_another
        || etcd_member::read_peer_certificate(&host.files).is_none()
        || is_pair_revoked(&host.files);
    let lost = describe_lost_list(&host.files);
    facts.problems.set(NodePart::RevocationList, lost.clone());
    if needs_pair || lost.is_some() {
        match request_peer_certificate(scope, host, connection, &key).await {
            // etcd starts with the copy of the list or without one, because the other members may need it.
            Err(error) if !needs_pair => tracing::warn!(%error, "no list of revoked peers was received"),
            requested => requested?,
        }
        facts.problems.set(NodePart::RevocationList, prepare_list(&host.files).problem);
    }
    prepare_ca_file(&host.files);
    let cluster = connection.anchor.cluster.to_string();
    let client = start_etcd(starting, scope, host, facts, own, &cluster, &membership).await?;
    retry_beside_etcd(scope, facts, || publish_peer_url(&client, membership.address)).await?;
    let node_key = PublicKey(key.public_key());
    retry_beside_etcd(scope, facts, || register_pair(&host.files, &client, node_key)).await?;
    retry_beside_etcd(scope, facts, || renew_expired_certificate(host, connection, &client)).await?;
    start_curator(starting, scope, host, facts, connection, client, membership.address).await?;
    Ok(role.member_id)
}

/// Starts etcd, and waits until it responds and has become a voting member.
async fn start_etcd(
    starting: &Starting,
    scope: &Scope,
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    own: curator_client::node_id::NodeId,
    cluster: &str,
    membership: &EtcdMembership,
) -> Result<Client, RunnableError> {
    let spec_for = {
        let (program, files) = (host.etcd.clone(), host.files.clone());
        let (cluster, membership) = (cluster.to_owned(), membership.clone());
        move |flags, listed| {
            etcd_member::etcd_spec(&program, flags, listed, own, &cluster, &files, &membership)
        }
    };
    starting.start(etcd_member::NAME, keep_etcd(host, facts, spec_for.clone()))?;
    let client =
        Client::new(vec![etcd_member::client_endpoint(&host.files)], Namespace::new(CURATOR_NAMESPACE)?);
    // Before etcd answers: without a valid certificate, it never may.
    let renewing = renew_peer_certificate(host.clone(), facts.clone(), client.clone());
    starting.start("peer_certificate", renewing)?;
    // Before it answers, too: a learner is not yet used by anything else.
    let watching = watch_space(host.files.clone(), own, client.clone(), facts.clone());
    starting.start("etcd_space", watching)?;
    let answering = async {
        let mut complained = false;
        loop {
            let requested = async {
                let status = client.status().await?;
                record_version(&host.files, membership, &status.version);
                // This read needs a quorum; a member that is cut off still answers the status request.
                client.get("/").await?;
                Ok::<_, etcd::client::EtcdError>(status.learner)
            };
            match requested.await {
                Ok(false) => return,
                Ok(true) => tracing::debug!("the etcd member of this node is still a learner"),
                Err(error) if !complained => {
                    tracing::info!(%error, "waiting for etcd");
                    complained = true;
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    };
    scope.until_cancelled(answering).await?;
    let watching = watch_revocation_list(host.files.clone(), client.clone(), facts.clone());
    starting.start("revocation_list", watching)?;
    let digest = move |flags, listed| spec_for(flags, listed).digest();
    let restarting = restart_in_turn(host.clone(), facts.clone(), own, client.clone(), digest);
    starting.start("restart_in_turn", restarting)?;
    Ok(client)
}

/// Keeps etcd running with the flags that its program supports, and with the list of revoked peers if there is one or its
/// copy. A version that cannot be read or must not run on the data is reported, and so is a list that is lost.
fn keep_etcd(
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    spec_for: impl Fn(Flags, bool) -> ChildSpec + Clone + Send + Sync + 'static,
) -> Runnable {
    let (program, children, problems) = (host.etcd.clone(), host.children.clone(), facts.problems.clone());
    let files = host.files.clone();
    let decide_spec = move || {
        let (program, children, problems) = (program.clone(), children.clone(), problems.clone());
        let (spec_for, files) = (spec_for.clone(), files.clone());
        async move {
            let running =
                tokio::task::spawn_blocking(move || find_running(etcd_member::NAME, &children)).await??;
            let digest = |flags, listed| spec_for(flags, listed).digest();
            let with = running.as_ref().and_then(|(record, _)| running_flags(&record.spec_sha256, digest));
            let flags = if let Some(with) = with {
                Ok(with)
            } else {
                let (flags, list) = (check_program(&program, &files).await, prepare_list(&files));
                if !list.is_present && list.problem.is_none() {
                    tracing::info!("etcd starts without a list of revoked peers, because there is none yet");
                }
                // A problem ends once etcd has answered: one that was found before stays until then.
                if list.problem.is_some() {
                    problems.set(NodePart::RevocationList, list.problem);
                }
                flags.map(|flags| (flags, list.is_present))
            };
            problems.set(NodePart::EtcdProgram, flags.as_ref().err().map(ToString::to_string));
            let (flags, listed) = flags?;
            let spec = spec_for(flags, listed);
            // One that is adopted has read its files before.
            if !running.is_some_and(|(record, _)| record.satisfies(&spec)) {
                record_start(&files)?;
            }
            Ok(spec)
        }
    };
    run_child(decide_spec, host.children.clone(), |_| {})
}

/// Renews this node's certificate from its own etcd if it has expired, because no other curator may be running.
async fn renew_expired_certificate(
    host: &ControlPlaneContext,
    connection: &CuratorConnection,
    client: &Client,
) -> Result<(), RunnableError> {
    let current = connection.certificate.current();
    let validity = current.cert.first().and_then(|certificate| Validity::from_der(certificate));
    if !validity.is_none_or(|validity| validity.has_ended(host.clock.now())) {
        return Ok(());
    }
    let key = host.files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))?;
    let node_key = PublicKey(key.public_key());
    let certificate = renew_from_local_etcd(client, node_key, host.clock.now()).await?;
    connection.replace_certificate(&host.files, &key, &certificate)?;
    tracing::info!(node = %connection.id, "the certificate of this node was renewed, from its own etcd");
    Ok(())
}
