//! Restarts the etcd of this node when it runs with old inputs: one member of a cluster at a time, under a quorum guard.
//!
//! etcd reads some of its inputs only at its start, and others for each connection that it accepts. So a restart is due
//! when
//!
//! * its command line has other flags than this release gives it. An update adopts an etcd with the flags of another
//!   release; this is what restarts it.
//! * it was started without the list of revoked peers, and the list has certificates now.
//! * `ca.crt` has other authorities.
//! * a certificate was added to the list of revoked peers. A connection that was open before stays open until one of both
//!   ends restarts, and the removed member need not do that.
//!
//! A new version of the program is no reason ([`etcd_program`](super::etcd_program)).
//!
//! # What the process was started with
//!
//! The record of the child has the digest of its command line. The content of the files is recorded in
//! `etcd/started.json` right before each start. An etcd that another release started may have no such file, or an older
//! one: then it counts as started with an empty list and with the authority that this node trusts without a statement, so
//! that at worst it restarts once more than needed.
//!
//! # In turn
//!
//! A member restarts only if the others are a quorum without it ([`check_restart`]), by what its own etcd sees. Two
//! members that see this at the same time would both go. So a member holds a lock in etcd from before the last check
//! until its etcd has returned to the others. The lock ends after a minute if the holder dies. By then its neighbours
//! see that its etcd is missing, and the guard stops them. A member that makes its file smaller holds the same lock, for
//! some minutes longer ([`etcd_space`](super::etcd_space)).
//!
//! A member that votes alone restarts, too: nobody else can end the connection of the member that was removed last. The
//! cluster then accepts no writes for some seconds. It needs no other member to return, but everything on its own host:
//! so each member first checks that the program runs, that its certificate is good, and that the host has its address.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::slice;
use std::time::{Duration, Instant};

use curator::membership::check_restart;
use curator::service::etcd_members::list_members;
use curator_client::certificate::Validity;
use curator_client::node_id::NodeId;
use curator_client::pki_revocation_list::parse_peer_revocation_list;
use etcd::client::Client;
use etcd::key_space::PEER_RESTART;
use etcd::lock::{Lock, LockAttempt};
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::child::launch::ChildRecord;
use crate::child::lifecycle::find_running;
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_member;
use crate::cluster::etcd_program::{Flags, running_flags};
use crate::cluster::etcd_start::check_program;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_revocation::is_pair_revoked;
use crate::cluster::stored_authorities::{encode_bundle, read_anchor};
use crate::state_format::check_format;

/// File with what the running etcd was started with.
const START_RECORD: &str = "started.json";
/// How often a restart is considered.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How long the lock lives if its holder dies.
const LOCK_TTL: Duration = Duration::from_mins(1);
/// A restart that has not begun after this part of the lock's life does not begin.
const LATEST_BEGIN: Duration = Duration::from_secs(20);
/// How long etcd may take to end before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The content of etcd's files at its start. A hint: without it, one restart too many may happen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRecord {
    /// SHA-256 of the file with the authorities' certificates, in hexadecimal digits.
    pub authority_sha256: String,
    /// Serial numbers on the list of revoked peers, in hexadecimal digits.
    pub revoked: BTreeSet<String>,
    /// SHA-256 of each certificate of an authority in that file, in hexadecimal digits. A record of a release that could not
    /// replace an authority has none.
    #[serde(default)]
    pub authorities: BTreeSet<String>,
    /// Whether this node has had a list of revoked peers, at this start or before. Without one now, it has lost it.
    #[serde(default)]
    pub had_list: bool,
}

/// Why the etcd of this node should restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartReason {
    /// Its command line is that of another release.
    Flags,
    /// It was started without the list of revoked peers, which has certificates now.
    NoList,
    /// It was started with other authorities of the cluster.
    Authority,
    /// This many certificates were revoked since its start.
    Revoked(usize),
}

impl fmt::Display for RestartReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flags => f.write_str("it runs with the flags of another release"),
            Self::NoList => f.write_str("it was started without the list of revoked peers"),
            Self::Authority => f.write_str("the certificate of the cluster's authority has changed"),
            Self::Revoked(count) => {
                write!(
                    f,
                    "certificates of removed members since its start, which may have open connections: {count}"
                )
            }
        }
    }
}

/// Decides whether the running etcd should restart.
///
/// `started` is what it was started with, `None` if that is unknown, and `present` is what it would be started with now.
/// `running` are its flags and whether it reads the list of revoked peers, `None` if its command line is another one.
#[must_use]
pub fn decide_restart(
    started: Option<&StartRecord>,
    present: &StartRecord,
    running: Option<(Flags, bool)>,
) -> Option<RestartReason> {
    let Some((_, reads_list)) = running else { return Some(RestartReason::Flags) };
    // A list without certificates rejects nobody, so an update to the release that has it restarts nothing.
    if !reads_list && !present.revoked.is_empty() {
        return Some(RestartReason::NoList);
    }
    if started.is_some_and(|started| started.authority_sha256 != present.authority_sha256) {
        return Some(RestartReason::Authority);
    }
    let added = match started {
        Some(started) => present.revoked.difference(&started.revoked).count(),
        None => present.revoked.len(),
    };
    (added > 0).then_some(RestartReason::Revoked(added))
}

/// Records the content of etcd's files, right before it is started.
pub(super) fn record_start(files: &ClusterFiles) -> Result<(), RunnableError> {
    let had_list = has_had_list(files);
    let record = StartRecord { had_list, ..read_inputs(files)? };
    Ok(files.write_etcd_hint(START_RECORD, &serde_json::to_vec_pretty(&record)?)?)
}

/// Whether this node has or has had a list of revoked peers, by its files and by the record of the last start. A record of a
/// release that does not have this in it shows a list by its certificates alone.
pub(super) fn has_had_list(files: &ClusterFiles) -> bool {
    let exists = |read: Result<Option<Vec<u8>>, ClusterFilesError>| !matches!(read, Ok(None));
    let started = read_start_record(files).ok().flatten();
    exists(etcd_member::read_revocation_list(files))
        || exists(etcd_member::read_revocation_copy(files))
        || started.is_some_and(|started| started.had_list || !started.revoked.is_empty())
}

/// What etcd would be started with now. A list that it could not parse counts as empty.
fn read_inputs(files: &ClusterFiles) -> Result<StartRecord, ClusterFilesError> {
    let authority = etcd_member::read_authority_certificate(files)?.unwrap_or_default();
    let list = etcd_member::read_revocation_list(files)?;
    let listed = list.and_then(|list| parse_peer_revocation_list(&list)).unwrap_or_default();
    let revoked = listed.iter().map(ToString::to_string).collect();
    Ok(StartRecord { revoked, ..describe_authorities(&authority) })
}

/// The part of a record about this content of `ca.crt`.
fn describe_authorities(bundle: &[u8]) -> StartRecord {
    let hash = |bytes: &[u8]| hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes));
    let certificates = etcd_member::decode_pem_bundle(&String::from_utf8_lossy(bundle));
    StartRecord {
        authority_sha256: hash(bundle),
        authorities: certificates.iter().map(|certificate| hash(certificate)).collect(),
        ..StartRecord::default()
    }
}

/// What the running etcd was started with. Without a record, that is what a release that recorded nothing started it with;
/// `None` if this machine is no node.
fn find_start(files: &ClusterFiles) -> Result<Option<StartRecord>, ClusterFilesError> {
    if let Some(recorded) = read_start_record(files)? {
        return Ok(Some(recorded));
    }
    let anchor = read_anchor(files)?;
    Ok(anchor.map(|anchor| describe_authorities(encode_bundle(slice::from_ref(&anchor)).as_bytes())))
}

/// The record of the last start; `None` if there is none, or if it is damaged.
fn read_start_record(files: &ClusterFiles) -> Result<Option<StartRecord>, ClusterFilesError> {
    let bytes = match files.read_etcd_file(START_RECORD) {
        Err(error) if error.is_directory() => None,
        read => read?,
    };
    let bytes = bytes.filter(|bytes| check_format(bytes).is_ok());
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// SHA-256 of the certificates of the authorities that the running etcd was started with.
pub(super) fn read_started_authorities(files: &ClusterFiles) -> Result<Vec<Vec<u8>>, ClusterFilesError> {
    let started = find_start(files)?.unwrap_or_default();
    Ok(started.authorities.iter().filter_map(|hash| hex::decode(hash).ok()).collect())
}

/// Makes the runnable that restarts the etcd of this node when that is due and its turn. `digest` computes the digest of
/// its specification with these flags, with or without the list of revoked peers.
#[must_use]
pub(super) fn restart_in_turn(
    host: ControlPlaneContext,
    facts: NodeFacts,
    own: NodeId,
    client: Client,
    digest: impl Fn(Flags, bool) -> String + Clone + Send + Sync + 'static,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts, client, digest) = (host.clone(), facts.clone(), client.clone(), digest.clone());
        async move {
            let healthy = starting.mark_healthy();
            loop {
                let (scope, pause) = (healthy.scope(), tokio::time::sleep(CHECK_INTERVAL));
                scope.until_cancelled(pause).await?;
                let restarting = restart_if_due(&host, own, &client, &digest);
                let problem = scope.until_cancelled(restarting).await?.err();
                facts.problems.set(NodePart::PeerRestart, problem);
            }
        }
    })
}

/// Restarts etcd if that is due and permitted now. The error is a sentence.
async fn restart_if_due(
    host: &ControlPlaneContext,
    own: NodeId,
    client: &Client,
    digest: &(impl Fn(Flags, bool) -> String + Sync),
) -> Result<(), String> {
    let children = host.children.clone();
    let looking = tokio::task::spawn_blocking(move || find_running(etcd_member::NAME, &children));
    let running = looking.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    // One that does not run is about to be started, with everything that is new.
    let Some((record, handle)) = running else { return Ok(()) };
    let inputs = read_inputs(&host.files).and_then(|inputs| Ok((inputs, find_start(&host.files)?)));
    let (present, started) = inputs.map_err(|error| error.to_string())?;
    let flags = running_flags(&record.spec_sha256, digest);
    let Some(reason) = decide_restart(started.as_ref(), &present, flags) else { return Ok(()) };
    take_turn(host, own, client, (&record, &handle), reason)
        .await
        .map_err(|why| format!("etcd of this node has to restart ({reason}), and waits: {why}"))
}

/// Takes the lock and restarts etcd under it.
async fn take_turn(
    host: &ControlPlaneContext,
    own: NodeId,
    client: &Client,
    running: (&ChildRecord, &OwnedFd),
    reason: RestartReason,
) -> Result<(), String> {
    check_quorum(client).await?;
    let attempt = client.try_lock(PEER_RESTART, &own.to_string(), LOCK_TTL).await;
    let lock = match attempt.map_err(|error| error.to_string())? {
        LockAttempt::Acquired(lock) => lock,
        LockAttempt::Busy { holder } => {
            return Err(format!("node {holder} restarts its own or makes its file smaller, within minutes"));
        }
    };
    let restarted = restart_under_lock(host, client, running, &lock, reason).await;
    lock.release(client).await;
    restarted
}

async fn restart_under_lock(
    host: &ControlPlaneContext,
    client: &Client,
    (record, handle): (&ChildRecord, &OwnedFd),
    lock: &Lock,
    reason: RestartReason,
) -> Result<(), String> {
    check_return(host).await?;
    // Last, because the former holder of the lock may have failed to return.
    check_quorum(client).await?;
    if lock.age() > LATEST_BEGIN {
        return Err("the checks before it took too long; they are repeated".to_owned());
    }
    let pid = record.instance.pid;
    tracing::info!(pid, %reason, "etcd of this node restarts; the other members wait meanwhile");
    let send = |signal| {
        pidfd_send_signal(handle, signal).map_err(|error| format!("process {pid} got no signal: {error}"))
    };
    send(Signal::TERM)?;
    let end = Instant::now() + STOP_TIMEOUT;
    let mut killed = false;
    while record.instance.is_alive() {
        if !killed && Instant::now() > end {
            tracing::warn!(pid, "etcd did not end after SIGTERM and is killed");
            killed = true;
            send(Signal::KILL)?;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    // The runnable that keeps etcd running starts it again.
    while lock.age() < LOCK_TTL {
        if client.get("/").await.is_ok() && check_quorum(client).await.is_ok() {
            tracing::info!("etcd of this node has restarted and is connected to the others");
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Err("it was restarted, and was not connected to the others within a minute".to_owned())
}

/// Checks by the own etcd that the other members are a quorum without this one.
pub(super) async fn check_quorum(client: &Client) -> Result<(), String> {
    let own = client.status().await.map_err(|error| error.to_string())?.member_id;
    let members = list_members(client).await.map_err(|error| error.to_string())?;
    check_restart(&members, own).map_err(|error| error.to_string())
}

/// Checks that etcd would come back on this host.
async fn check_return(host: &ControlPlaneContext) -> Result<(), String> {
    let membership = host.files.read_membership().map_err(|error| error.to_string())?;
    let membership = membership.ok_or("this node has no record of its membership")?;
    check_address(membership.address)?;
    let certificate = etcd_member::read_peer_certificate(&host.files);
    let validity = certificate.and_then(|certificate| Validity::from_der(&certificate));
    if validity.is_none() || is_pair_revoked(&host.files) {
        let sentence =
            "its certificate is revoked or damaged: restart the role server, which requests another one";
        return Err(sentence.to_owned());
    }
    if validity.is_some_and(|validity| validity.has_ended(host.clock.now())) {
        let sentence = "its certificate has ended: compare the clock of this node with that of the others";
        return Err(sentence.to_owned());
    }
    check_program(&host.etcd, &host.files).await.map(drop).map_err(|error| error.to_string())
}

/// Checks that a program may still listen at the address of this member.
fn check_address(address: IpAddr) -> Result<(), String> {
    let listened = TcpListener::bind((address, 0));
    listened.map(drop).map_err(|error| {
        format!("nothing can listen at {address}, its address ({error}); give it back to the host")
    })
}

#[cfg(test)]
mod tests {
    use curator_client::certificate::Serial;
    use curator_client::pki_revocation_list::PeerRevocations;
    use curator_client::testing::{at, authority, serial};
    use model::pem_blocks::encode_pem;
    use testkit::damage::Damage;

    use super::*;
    use crate::cluster::files::tests::files;
    use crate::cluster::stored_authorities::tests::{credentials, state};
    use crate::cluster::stored_authorities::update_ca_file;

    fn record(authority: &str, revoked: &[u8]) -> StartRecord {
        let revoked = revoked.iter().map(|number| serial(*number).to_string()).collect();
        StartRecord { authority_sha256: authority.to_owned(), revoked, ..StartRecord::default() }
    }

    #[test]
    fn restart_is_due_for_what_etcd_reads_only_at_its_start() {
        let now = || record("a", &[3, 4]);
        for flags in Flags::ALL {
            let with_list = Some((flags, true));
            for (what, started, running, expected) in [
                ("nothing differs", Some(now()), with_list, None),
                ("other flags", Some(now()), None, Some(RestartReason::Flags)),
                ("started without a list", Some(now()), Some((flags, false)), Some(RestartReason::NoList)),
                ("another authority", Some(record("b", &[3, 4])), with_list, Some(RestartReason::Authority)),
                ("one removal", Some(record("a", &[3])), with_list, Some(RestartReason::Revoked(1))),
                ("one that ended", Some(record("a", &[3, 4, 5])), with_list, None),
                ("an unknown start", None, with_list, Some(RestartReason::Revoked(2))),
            ] {
                assert_eq!(decide_restart(started.as_ref(), &now(), running), expected, "{what}");
            }
            for running in [with_list, Some((flags, false))] {
                let none = record("a", &[]);
                assert_eq!(decide_restart(None, &none, running), None, "nothing was removed yet");
            }
        }
    }

    #[test]
    fn start_is_recorded_with_the_files_of_that_moment() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        assert_eq!(read_start_record(&files).unwrap(), None);
        record_start(&files).unwrap();
        let empty = read_start_record(&files).unwrap().unwrap();
        assert_eq!(empty.revoked, BTreeSet::new());

        let serials: BTreeSet<Serial> = [serial(3)].into();
        let list = PeerRevocations::sign(&authority(1), serials, 1, at(0)).unwrap();
        etcd_member::write_revocation_list(&files, &list.list).unwrap();
        let present = read_inputs(&files).unwrap();
        let running = Some((Flags::Stable, true));
        let reason = decide_restart(Some(&empty), &present, running);
        assert_eq!(reason, Some(RestartReason::Revoked(1)));
        record_start(&files).unwrap();
        let started = read_start_record(&files).unwrap();
        assert_eq!(decide_restart(started.as_ref(), &present, running), None);

        let path = files.etcd_directory().join(START_RECORD);
        for damage in Damage::ALL {
            damage.inflict(&path).unwrap();
            assert_eq!(read_start_record(&files).unwrap(), None, "{damage:?} counts as none");
            record_start(&files).unwrap();
            assert_eq!(read_start_record(&files).unwrap(), started, "{damage:?}");
        }
    }

    #[test]
    fn etcd_of_an_unknown_start_restarts_for_another_authority() {
        let (_directory, files) = files();
        assert_eq!(find_start(&files).unwrap(), None, "no node");
        files.write_credentials(&credentials()).unwrap();
        let bundle = encode_pem("CERTIFICATE", &authority(1).anchor().certificate);
        etcd_member::replace_authorities(&files, &bundle).unwrap();
        let decide = || {
            let present = read_inputs(&files).unwrap();
            decide_restart(find_start(&files).unwrap().as_ref(), &present, Some((Flags::Stable, true)))
        };
        assert_eq!(decide(), None, "an update restarts nothing");
        assert_eq!(read_started_authorities(&files).unwrap(), [authority(1).anchor().fingerprint()]);
        for (number, authorities) in [(2, &[1, 5][..]), (3, &[5][..])] {
            files.write_etcd_file(START_RECORD, b"{torn").unwrap();
            state(&files, number, authorities);
            update_ca_file(&files).unwrap();
            assert_eq!(decide(), Some(RestartReason::Authority), "{authorities:?}");
            record_start(&files).unwrap();
            assert_eq!(decide(), None, "{authorities:?}");
            assert_eq!(read_started_authorities(&files).unwrap().len(), authorities.len());
        }
    }

    #[test]
    fn address_that_left_the_host_is_found_before_the_restart() {
        check_address("127.0.0.1".parse().unwrap()).unwrap();
        // A documentation address (RFC 5737), which no host has.
        let error = check_address("192.0.2.1".parse().unwrap()).unwrap_err();
        assert!(error.contains("nothing can listen at 192.0.2.1"), "{error}");
    }
}
