//! Tests of the files: each truth and each hint, with every damage.

use std::collections::{BTreeMap, BTreeSet};

use curator_client::known_epoch::EpochChange;
use curator_client::node::NodeRoles;
use curator_client::proved_curators::ProvedAddresses;
use curator_client::testing::{authority, authority_of, node_id, statement};
use model::cluster::authority_theft::AuthorityStep;
use testkit::damage::{Damage, restore, snapshot};
use uuid::Uuid;

use super::*;
use crate::cluster::etcd_start::EtcdVersionRecord;
use crate::cluster::node_order::OrderKind;
use crate::cluster::services::desired::{DeclarationMap, RetainedRoles};
use crate::cluster::services::persisted::{
    PersistedNodeInfo, read_declarations, read_node_info, write_declarations, write_node_info,
};

pub(in crate::cluster) fn files() -> (tempfile::TempDir, ClusterFiles) {
    let directory = tempfile::tempdir().unwrap();
    let files = ClusterFiles::in_state_directory(directory.path());
    (directory, files)
}

pub(crate) fn membership() -> EtcdMembership {
    EtcdMembership {
        member: Some(7),
        data: "member-7".to_owned(),
        address: "10.0.0.1".parse().unwrap(),
        initial_cluster: String::new(),
        new_cluster: false,
        epoch: 0,
    }
}

/// The authority of the first cluster with this key, which replaces a stolen one, and the step. Everything else is empty.
pub(in crate::cluster) fn next_authority(step: AuthorityStep, key: u8) -> NextAuthority {
    NextAuthority {
        step,
        ca_certificate: hex::encode(&authority_of(1, key).anchor().certificate),
        private_key: None,
        owner_keys: Vec::new(),
        epoch: 0,
        curators: Vec::new(),
        statement: None,
    }
}

#[test]
fn key_is_made_once_and_a_damaged_one_is_never_replaced() {
    let (directory, files) = files();
    assert!(files.read_key().unwrap().is_none());
    let key = files.read_or_create_key().unwrap().public_key();
    assert_eq!(files.read_or_create_key().unwrap().public_key(), key);
    std::fs::write(directory.path().join("cluster/node_key.pk8"), b"very secret").unwrap();
    let error = files.read_or_create_key().unwrap_err().to_string();
    assert!(error.contains("no Ed25519 key") && !error.contains("secret"), "{error}");
}

#[test]
fn damaged_file_error_names_the_file_and_not_its_content() {
    let (directory, files) = files();
    std::fs::create_dir(directory.path().join("cluster")).unwrap();
    std::fs::write(directory.path().join("cluster/order.json"), "{\"ticket\": \"c0ffee").unwrap();
    let error = files.read_order().unwrap_err().to_string();
    assert!(error.contains("order.json is damaged (line 1") && !error.contains("c0ffee"), "{error}");
}

#[test]
fn end_of_a_membership_removes_its_data_first() {
    let (_directory, files) = files();
    let membership = membership();
    files.write_membership(&membership).unwrap();
    std::fs::create_dir_all(files.etcd_directory().join("member-7/member/wal")).unwrap();
    files.remove_membership(&membership).unwrap();
    assert!(!files.etcd_directory().join("member-7").exists());
    assert_eq!(files.read_membership().unwrap(), None);
    files.remove_membership(&membership).unwrap();
}

fn credentials() -> Credentials {
    let ca_certificate = hex::encode(&authority(1).anchor().certificate);
    Credentials { certificate: "aa".to_owned(), ca_certificate }
}

fn cluster() -> Uuid {
    authority(1).anchor().cluster
}

/// Writes every truth.
fn write_all(files: &ClusterFiles) {
    let (what, labels) = (OrderKind::Leave {}, BTreeMap::new());
    let order = NodeOrder { generation: 1, what, machine: None, labels, address: None };
    files.write_order(&order).unwrap();
    files.read_or_create_key().unwrap();
    let (certificate, private_key) = ("aa".to_owned(), "bb".to_owned());
    files.write_authority(&StoredAuthority { certificate, private_key }).unwrap();
    files.write_next_authority(&next_authority(AuthorityStep::Accept, 1)).unwrap();
    files.write_membership(&membership()).unwrap();
    files.write_credentials(&credentials()).unwrap();
    files.raise_epoch(cluster(), 1).unwrap();
    files.write_statement(&statement(1, 2).sign(&authority(1)).unwrap()).unwrap();
    files.write_secret_keys(&secret_keys_tests::secret_keys_order(&[("key1-a", 1)])).unwrap();
}

/// A file of truth, and what reads it. If something writes it without an order of the shepherd, that is called.
type TruthCase = (&'static str, fn(&ClusterFiles) -> Result<(), ClusterFilesError>);

/// Each damage to truth is one sentence that names the file and the way back. Nothing changes on the disk, also
/// by what would write the next value.
#[test]
fn damaged_truth_is_a_sentence_with_the_way_back_and_stays() {
    let cases: [TruthCase; 9] = [
        ("order.json", |files| files.read_order().map(drop)),
        ("node_key.pk8", |files| files.read_or_create_key().map(drop)),
        ("authority.json", |files| files.read_authority().map(drop)),
        ("next_authority.json", |files| files.read_next_authority().map(drop)),
        ("membership.json", |files| files.read_membership().map(drop)),
        ("credentials.json", |files| files.renew_credentials(&credentials()).map(drop)),
        ("epoch.json", |files| files.change_epoch(cluster(), EpochChange::Reported(3))),
        ("statement.json", |files| {
            files.write_statement(&statement(1, 3).sign(&authority(1)).unwrap())?;
            files.read_statement(authority(1).anchor()).map(drop)
        }),
        ("secret_keys.json", |files| files.read_secret_keys().map(drop)),
    ];
    for (name, read) in cases {
        for damage in Damage::ALL {
            let (directory, files) = files();
            write_all(&files);
            let path = directory.path().join("cluster").join(name);
            let whole = damage.inflict(&path).unwrap();
            let before = snapshot(directory.path()).unwrap();
            let error = read(&files).unwrap_err().to_string();
            assert!(error.contains(&format!("{} is damaged (", path.display())), "{damage:?}: {error}");
            let has_way_back = error.contains("restore it from a copy of this disk");
            assert!(has_way_back && !error.contains('\n'), "{name} {damage:?}: {error}");
            if damage == Damage::Newer && name != "node_key.pk8" {
                assert!(error.contains("format 9 of a newer release"), "{name}: {error}");
            }
            assert_eq!(snapshot(directory.path()).unwrap(), before, "{name} {damage:?}");
            restore(&path, &whole).unwrap();
            read(&files).unwrap();
        }
    }
}

/// Truth whose absence is damage, because another file shows that it existed. What else is missing belongs to a machine that
/// has not come so far.
#[test]
fn missing_truth_is_damage_where_another_file_shows_that_it_existed() {
    type MissingCase = (&'static str, bool, fn(&ClusterFiles) -> Result<(), ClusterFilesError>);
    let cases: [MissingCase; 8] = [
        ("order.json", false, |files| files.read_order().map(drop)),
        ("node_key.pk8", false, |files| files.read_key().map(drop)),
        ("authority.json", false, |files| files.read_authority().map(drop)),
        ("next_authority.json", false, |files| files.read_next_authority().map(drop)),
        ("membership.json", false, |files| files.read_membership().map(drop)),
        ("credentials.json", false, |files| files.read_credentials().map(drop)),
        ("statement.json", true, |files| files.read_statement(authority(1).anchor()).map(drop)),
        ("secret_keys.json", false, |files| files.read_secret_keys().map(drop)),
    ];
    for (name, is_damage, read) in cases {
        let (directory, files) = files();
        write_all(&files);
        let path = directory.path().join("cluster").join(name);
        std::fs::remove_file(&path).unwrap();
        let before = snapshot(directory.path()).unwrap();
        let error = read(&files).map_err(|error| error.to_string()).err();
        assert_eq!(error.is_some(), is_damage, "{name}: {error:?}");
        if let Some(error) = error {
            assert!(error.contains(&format!("{} is damaged (it is missing", path.display())), "{error}");
            assert!(
                error.contains("restore it from a copy of this disk") && !error.contains('\n'),
                "{error}"
            );
        }
        assert_eq!(snapshot(directory.path()).unwrap(), before, "{name}");
    }
}

/// A hint, what writes it, and whether it is read as it was written.
type HintCase = (&'static str, fn(&ClusterFiles) -> Result<(), ClusterFilesError>, fn(&ClusterFiles) -> bool);

#[test]
fn damaged_hint_is_absent_and_replaced_with_its_next_value() {
    let cases: [HintCase; 9] = [
        (
            "roles.json",
            |files| files.write_roles(&NodeRoles::default()),
            |files| files.read_roles().is_some(),
        ),
        (
            "curator.json",
            |files| files.write_curator_certificate(&[1, 2]),
            |files| files.read_curator_certificate().is_some(),
        ),
        (
            "curators.json",
            |files| files.write_curators(&BTreeSet::from(["a:1".to_owned()])),
            |files| !files.read_curators().is_empty(),
        ),
        (
            "former_curators.json",
            |files| files.write_former_curators(&BTreeSet::from(["a:1".to_owned()])),
            |files| !files.read_former_curators().is_empty(),
        ),
        (
            "proved_curators.json",
            |files| files.write_proved_curators(&ProvedAddresses::from([("a:1".to_owned(), node_id(1))])),
            |files| !files.read_proved_curators().is_empty(),
        ),
        (
            "etcd_version.json",
            |files| {
                let (data, version) = ("member-7".to_owned(), "3.6.9".to_owned());
                files.write_etcd_version(&EtcdVersionRecord { data, epoch: 0, version })
            },
            |files| files.read_etcd_version().is_ok_and(|version| version.is_some()),
        ),
        (
            "secret_keys_status.json",
            |files| {
                let (running, rewritten) = ("key1-a".to_owned(), String::new());
                files.write_secret_keys_status(&SecretKeysStatus { running, rewritten })
            },
            |files| files.read_secret_keys_status() != SecretKeysStatus::default(),
        ),
        (
            "declarations.json",
            |files| write_declarations(files, &DeclarationMap::new(), &RetainedRoles::new()),
            |files| read_declarations(files).is_some(),
        ),
        (
            "about.json",
            |files| {
                let address = "10.0.0.1".parse().ok();
                write_node_info(files, &PersistedNodeInfo { address, ..PersistedNodeInfo::default() })
            },
            |files| read_node_info(files) != PersistedNodeInfo::default(),
        ),
    ];
    let (directory, files) = files();
    for (name, write, is_read) in cases {
        let path = directory.path().join("cluster").join(name);
        for damage in Damage::ALL {
            write(&files).unwrap();
            assert!(is_read(&files), "{name}");
            damage.inflict(&path).unwrap();
            assert!(!is_read(&files), "{name} {damage:?}");
            write(&files).unwrap();
            assert!(is_read(&files), "{name} {damage:?}");
        }
    }
}
