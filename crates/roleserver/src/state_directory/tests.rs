//! Tests of the state directory.

use super::*;
use std::os::unix::fs::PermissionsExt as _;

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

#[test]
fn damaged_file_says_which_and_what_to_do() {
    let (_parent, state) = directory();
    for name in ["enrolment.json", "identity.pk8"] {
        let path = state.path().join(name);
        std::fs::write(&path, "{\"machine_id\": ").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    for error in [state.read_enrolment().unwrap_err(), state.read_or_create_identity().unwrap_err()] {
        let text = error.to_string();
        assert!(text.contains("is damaged") && text.contains("enrol this machine again"), "{text}");
    }
}

#[test]
fn damaged_record_of_a_process_is_ignored_and_replaced() {
    let (_parent, state) = directory();
    let own = ProcessRecord::current(1, "00".to_owned()).unwrap();
    let newer = r#"{"process": {"pid": 7}, "format": 9}"#;
    for content in ["", "{\"pid\": 4711, \"start", newer, "[]"] {
        for name in ["agent.json", "supervisor.json"] {
            std::fs::write(state.path().join(name), content).unwrap();
        }
        assert_eq!(state.find_agent_process(), None, "{content:?}");
        assert_eq!(state.find_supervisor_process(), None, "{content:?}");
        // A process that runs nevertheless is found by its lock.
        let _lock = state.acquire_lock(Lock::Agent).unwrap();
        let found = state.find_agent_process().unwrap();
        assert_eq!((&found.instance, found.program_sha256.as_str()), (&own.instance, ""), "{content:?}");
        state.record_agent(&own).unwrap();
        assert_eq!(state.find_agent_process(), Some(own.clone()));
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
    std::fs::create_dir(state.path().join("agent.json")).unwrap();
    let process = ProcessRecord::current(1, "00".to_owned()).unwrap();
    assert!(state.record_agent(&process).is_err());
    assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 1);
}
