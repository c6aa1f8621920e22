//! Tests of the state directory.

use std::os::unix::fs::PermissionsExt as _;

use testkit::damage::{Damage, restore, snapshot};

use super::*;
use crate::signing_store::SigningStore;
use crate::state_error::EMPTY_SIGNING_TRUST;

fn directory() -> (tempfile::TempDir, StateDirectory) {
    let parent = tempfile::tempdir().unwrap();
    let state = StateDirectory::open(&parent.path().join("deep/state")).unwrap();
    (parent, state)
}

#[test]
fn default_path_follows_the_user() {
    let path = |root, home: Option<&str>| StateDirectory::default_path(root, home.map(Path::new));
    assert_eq!(path(true, Some("/root")).unwrap(), Path::new("/var/lib/roleserver"));
    assert_eq!(path(false, Some("/home/a")).unwrap(), Path::new("/home/a/.local/state/roleserver"));
    assert!(matches!(path(false, None), Err(StateError::NoHomeDirectory)));
    assert!(matches!(path(false, Some("a")), Err(StateError::NoHomeDirectory)));
}

#[test]
fn key_is_created_once_and_is_private() {
    let (_parent, state) = directory();
    assert!(state.read_identity().unwrap().is_none());
    let made = state.read_or_create_identity().unwrap();
    assert_eq!(state.read_or_create_identity().unwrap().public_key(), made.public_key());
    let permissions = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(permissions(&state.path().join("identity.pk8")), 0o600);
    assert_eq!(permissions(state.path()), 0o700);
}

fn enrolment() -> Enrolment {
    Enrolment {
        machine_id: "0b1a4a52-4a5c-4b66-8a5e-000000000001".parse().unwrap(),
        bmdb_id: Uuid::from_u128(7),
        fences: BTreeMap::new(),
        holders: BTreeMap::new(),
        settings: AgentSettings::new(&["a:1".to_owned()], &[], 0).unwrap(),
        revision: 1,
    }
}

/// A file of truth, what reads it, and the way back that its error names.
type TruthCase = (&'static str, fn(&StateDirectory) -> Result<(), String>, &'static str);

/// Each damage to truth is one sentence that names the file and the way back. Nothing changes on the disk, also
/// by what makes the file if there is none.
#[test]
fn damaged_truth_is_a_sentence_with_the_way_back_and_stays() {
    let cases: [TruthCase; 3] = [
        (
            "enrolment.json",
            |state| state.read_enrolment().map(drop).map_err(|error| error.to_string()),
            "let the shepherd enrol this machine again",
        ),
        (
            "identity.pk8",
            |state| state.read_or_create_identity().map(drop).map_err(|error| error.to_string()),
            "let the shepherd enrol this machine again",
        ),
        (
            "signing.json",
            |state| {
                let store = SigningStore::open(state.clone());
                assert!(!store.accept_offer(&["x".to_owned()], &[]) && store.key_ids().is_empty());
                store.save().unwrap();
                store.trust().map(drop)
            },
            "and restart the role server",
        ),
    ];
    let (_parent, state) = directory();
    state.write_enrolment(&enrolment()).unwrap();
    state.read_or_create_identity().unwrap();
    state.write_signing_trust(&StoredSigningTrust::default()).unwrap();
    for (name, read, way_back) in cases {
        let path = state.path().join(name);
        for damage in Damage::ALL {
            let whole = damage.inflict(&path).unwrap();
            let before = snapshot(state.path()).unwrap();
            let error = read(&state).unwrap_err();
            assert!(error.contains(&format!("{} is damaged (", path.display())), "{damage:?}: {error}");
            assert!(error.contains(way_back) && !error.contains('\n'), "{name} {damage:?}: {error}");
            if damage == Damage::Newer && name != "identity.pk8" {
                assert!(error.contains("format 9 of a newer release"), "{name}: {error}");
            }
            assert_eq!(snapshot(state.path()).unwrap(), before, "{name} {damage:?}");
            restore(&path, &whole).unwrap();
            assert_eq!(read(&state), Ok(()), "{name} {damage:?}");
        }
    }
}

/// Signing keys that were damaged while the role server runs. Without the file, it would run what it has refused, so the
/// error must not say that the file may be removed.
#[test]
fn signing_keys_that_were_damaged_meanwhile_are_not_written_over() {
    let (_parent, state) = directory();
    state.write_signing_trust(&StoredSigningTrust::default()).unwrap();
    let path = state.path().join("signing.json");
    // The lock file is made once.
    drop(state.acquire_lock(Lock::SigningKeys).unwrap());
    for damage in Damage::ALL {
        let store = SigningStore::open(state.clone());
        store.require_signed_declarations();
        let whole = damage.inflict(&path).unwrap();
        let before = snapshot(state.path()).unwrap();
        let error = store.save().unwrap_err().to_string();
        assert!(
            error.contains(EMPTY_SIGNING_TRUST) && !error.contains("then remove it"),
            "{damage:?}: {error}"
        );
        assert_eq!(snapshot(state.path()).unwrap(), before, "{damage:?}");
        restore(&path, &whole).unwrap();
    }
}

#[test]
fn damaged_record_of_a_process_is_ignored_and_replaced() {
    let (_parent, state) = directory();
    let own = ProcessRecord::current(1, "00".to_owned()).unwrap();
    let records = ["agent.json", "supervisor.json"].map(|name| state.path().join(name));
    for damage in Damage::ALL {
        state.record_agent(&own).unwrap();
        state.record_supervisor(&own).unwrap();
        for path in &records {
            damage.inflict(path).unwrap();
        }
        assert_eq!(state.find_agent_process(), None, "{damage:?}");
        assert_eq!(state.find_supervisor_process(), None, "{damage:?}");
        for path in &records {
            assert!(!path.exists(), "{damage:?}: it is in the way of the next process");
        }
        // A process that runs nevertheless is found by its lock.
        let _lock = state.acquire_lock(Lock::Agent).unwrap();
        let found = state.find_agent_process().unwrap();
        assert_eq!((&found.instance, found.program_sha256.as_str()), (&own.instance, ""), "{damage:?}");
        state.record_agent(&own).unwrap();
        assert_eq!(state.find_agent_process(), Some(own.clone()));
    }
    // Of a release that stored something else.
    std::fs::write(&records[0], "[]").unwrap();
    assert_eq!(state.find_agent_process(), None);
}

#[test]
fn damaged_hint_is_replaced_with_its_next_value() {
    let learned = || LearnedSettings { revision: 1, settings: enrolment().settings, fallback: None };
    let heartbeat = || LastHeartbeat {
        boot_id: "b".to_owned(),
        at_milliseconds: 1,
        incarnation: Uuid::nil(),
        endpoint: "a:1".to_owned(),
        error: None,
        delivered_at_milliseconds: Some(1),
    };
    let sample = || TimeSample { unix_ms: 1, boot_id: "b".to_owned(), boot_ms: 1 };
    let (_parent, state) = directory();
    for damage in Damage::ALL {
        state.write_learned_settings(&learned()).unwrap();
        state.write_last_heartbeat(&heartbeat()).unwrap();
        state.write_time_sample(&sample()).unwrap();
        for name in ["learned.json", "last_heartbeat.json", "time.json"] {
            damage.inflict(&state.path().join(name)).unwrap();
        }
        assert!(state.read_learned_settings(1).is_err(), "{damage:?}");
        assert!(state.read_last_heartbeat().is_err(), "{damage:?}");
        assert!(state.read_time_sample().is_err(), "{damage:?}");
        state.write_learned_settings(&learned()).unwrap();
        state.write_last_heartbeat(&heartbeat()).unwrap();
        state.write_time_sample(&sample()).unwrap();
        assert_eq!(state.read_learned_settings(1).unwrap(), Some(learned()), "{damage:?}");
        assert_eq!(state.read_last_heartbeat().unwrap(), Some(heartbeat()), "{damage:?}");
        assert_eq!(state.read_time_sample().unwrap(), Some(sample()), "{damage:?}");
    }
}

#[test]
fn holder_of_a_lock_is_found_through_a_link() {
    let (parent, state) = directory();
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(state.path(), &link).unwrap();
    let linked = StateDirectory::open(&link).unwrap();
    assert_eq!(linked.find_agent_process(), None);
    let _lock = linked.acquire_lock(Lock::Agent).unwrap();
    let own = ProcessRecord::current(1, "00".to_owned()).unwrap();
    assert_eq!(linked.find_agent_process().map(|found| found.instance), Some(own.instance));
}

/// A file that parses but cannot be used is damaged, too: an agent without an endpoint has nothing to do.
#[test]
fn settings_that_could_not_be_used_are_damage() {
    let (_parent, state) = directory();
    for (settings, message) in [
        (r#"{"endpoints":[],"ca_certificates":[],"heartbeat_interval_seconds":0}"#, "endpoints is empty"),
        (
            r#"{"endpoints":["a:1"],"ca_certificates":[],"heartbeat_interval_seconds":4000000000}"#,
            "heartbeat_interval_seconds is 4000000000",
        ),
        (
            r#"{"endpoints":["a:1"],"ca_certificates":["AAAA"],"heartbeat_interval_seconds":0}"#,
            "ca_certificates: CA certificate 1 of 1 is no X.509",
        ),
    ] {
        let text = format!(r#"{{"revision":1,"settings":{settings},"fallback":null}}"#);
        std::fs::write(state.path().join("learned.json"), text).unwrap();
        let error = state.read_learned_settings(1).unwrap_err().to_string();
        assert!(error.contains("learned.json is damaged") && error.contains(message), "{error}");
    }
}

#[test]
fn file_larger_than_any_state_is_not_read_into_memory() {
    let (_parent, state) = directory();
    let file = File::create(state.path().join("enrolment.json")).unwrap();
    // A sparse file: it has this size without using space.
    file.set_len(1 << 40).unwrap();
    let error = state.read_enrolment().unwrap_err().to_string();
    assert!(error.contains("enrolment.json is damaged (it has more than 16777216 bytes)"), "{error}");
}

#[test]
fn learned_settings_end_with_their_enrolment() {
    let (_parent, state) = directory();
    let settings = AgentSettings::new(&["a:1".to_owned()], &[], 0).unwrap();
    let learned = LearnedSettings { revision: 3, settings, fallback: None };
    state.write_learned_settings(&learned).unwrap();
    assert_eq!(state.read_learned_settings(3).unwrap(), Some(learned));
    assert_eq!(state.read_learned_settings(4).unwrap(), None);
}

#[test]
fn second_holder_is_refused_until_the_first_lets_go() {
    let (_parent, state) = directory();
    let first = state.acquire_lock(Lock::Agent).unwrap();
    let error = state.acquire_lock(Lock::Agent).unwrap_err().to_string();
    assert!(error.starts_with("another role server already runs in "), "{error}");
    assert!(state.acquire_lock(Lock::Supervisor).is_ok());
    drop(first);
    assert!(state.acquire_lock(Lock::Agent).is_ok());
}

#[test]
fn failed_write_leaves_nothing_behind() {
    let (_parent, state) = directory();
    // No file can be made where a directory is, and truth moves none away.
    std::fs::create_dir(state.path().join("enrolment.json")).unwrap();
    assert!(state.write_enrolment(&enrolment()).is_err());
    assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 1);
}
