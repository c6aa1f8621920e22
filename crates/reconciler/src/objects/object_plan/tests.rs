//! Tests of the object plan.

use serde_json::json;

use super::*;

fn key(name: &str) -> ObjectKey {
    ObjectKey { namespace: None, name: name.to_owned() }
}

fn built_in(name: &str, value: i64) -> Value {
    json!({"metadata": {"name": name, "labels": {MANAGED_LABEL: MANAGED_BUILT_IN}}, "value": value})
}

/// An object as a server returns it, with the fields that it adds.
fn live_object(mut object: Value, version: u64) -> Value {
    object["metadata"]["uid"] = json!(format!("uid of {}", object["metadata"]["name"].as_str().unwrap()));
    object["metadata"]["resourceVersion"] = json!(version.to_string());
    object["filled"] = json!("in");
    object
}

fn kind() -> ObjectKind {
    ObjectKind {
        group: String::new(),
        version: "v1".to_owned(),
        kind: "Thing".to_owned(),
        plural: "things".to_owned(),
        namespaced: false,
    }
}

fn applied(name: &str, value: &Value, digest: &str) -> DesiredObject {
    DesiredObject::Applied {
        add_on: "dns".to_owned(),
        kind: kind(),
        object: json!({"metadata": {"name": name, "labels": {MANAGED_LABEL: MANAGED_ADD_ON, ADD_ON_LABEL: "dns"}}, "value": value}),
        digest: digest.to_owned(),
    }
}

/// An applied object as a server returns it.
fn live_applied(name: &str, value: &Value, digest: &str, fields: &Value) -> Value {
    json!({"metadata": {"name": name, "uid": "u", "resourceVersion": "5", "labels": {MANAGED_LABEL: MANAGED_ADD_ON, ADD_ON_LABEL: "dns"},
        "annotations": {APPLIED_ANNOTATION: digest},
        "managedFields": [{"manager": "shepherd", "operation": "Apply", "fieldsV1": fields}]}, "value": value})
}

fn expectation(wanted: &[DesiredObject]) -> Expectation {
    let wanted =
        wanted.iter().map(|wanted| (ObjectKey::from_object(wanted.object()), wanted.clone())).collect();
    Expectation::new(wanted, BTreeSet::new(), None)
}

fn precondition(name: &str, version: &str) -> Precondition {
    Precondition { uid: format!("uid of {name}"), resource_version: version.to_owned() }
}

#[test]
fn missing_objects_are_created_changed_updated_orphans_deleted() {
    let wanted =
        expectation(&[DesiredObject::BuiltIn(built_in("a", 1)), DesiredObject::BuiltIn(built_in("b", 2))]);
    let (a, b) = (live_object(built_in("a", 1), 3), live_object(built_in("b", 2), 4));
    let (other_a, stray) = (live_object(built_in("a", 9), 5), live_object(built_in("c", 3), 6));
    let create = |name| Action::Create(key(name));
    let delete = Action::Delete(key("c"), precondition("c", "6"));
    for (present, expected) in [
        (vec![], vec![create("a"), create("b")]),
        (vec![a.clone()], vec![create("b")]),
        (vec![a.clone(), b.clone()], vec![]),
        (vec![other_a.clone(), b.clone()], vec![Action::Update(key("a"), other_a.clone())]),
        (vec![a, b, stray.clone()], vec![delete.clone()]),
        (vec![other_a.clone(), stray], vec![Action::Update(key("a"), other_a), create("b"), delete]),
    ] {
        assert_eq!(wanted.plan_actions(&present), expected, "{present:?}");
    }
}

#[test]
fn fields_of_others_are_ignored() {
    let wanted = expectation(&[DesiredObject::BuiltIn(built_in("a", 1))]);
    let mut present = live_object(built_in("a", 1), 3);
    present["metadata"]["labels"]["theirs"] = json!("x");
    present["metadata"]["annotations"] = json!({"theirs": "x"});
    present["metadata"]["finalizers"] = json!(["theirs"]);
    assert_eq!(wanted.plan_actions(&[present]), []);
}

#[test]
fn terminating_object_is_awaited() {
    let wanted = expectation(&[DesiredObject::BuiltIn(built_in("a", 1))]);
    let ending = |name| {
        let mut object = live_object(built_in(name, 9), 3);
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        object
    };
    assert_eq!(wanted.plan_actions(&[ending("a"), ending("stray")]), [Action::AwaitDeletion(key("a"))]);
    assert!(!wanted.needs_action(&key("a"), Some(&ending("a"))));
    assert!(wanted.needs_action(&key("a"), None), "now it can be made");
}

#[test]
fn fields_the_server_drops_are_not_requested_again() {
    let mut wanted = expectation(&[DesiredObject::BuiltIn(built_in("a", 1))]);
    // The server does not know the field.
    let mut answer = live_object(built_in("a", 1), 3);
    answer.as_object_mut().unwrap().remove("value");
    assert_eq!(wanted.evaluate(&key("a"), &answer), Verdict::Differs);
    wanted.record_result(&key("a"), &answer);
    assert_eq!(wanted.evaluate(&key("a"), &answer), Verdict::InSync);
    let mut again = wanted.clone();
    again = Expectation::new(wanted.desired.clone(), BTreeSet::new(), Some(&again));
    assert_eq!(again.evaluate(&key("a"), &answer), Verdict::InSync, "in the next pass, too");
    // The object was changed; another object has its name; another object is desired.
    let mut changed = answer.clone();
    changed["metadata"]["resourceVersion"] = json!("4");
    assert_eq!(again.evaluate(&key("a"), &changed), Verdict::Differs);
    let mut another = answer.clone();
    another["metadata"]["uid"] = json!("another");
    assert_eq!(again.evaluate(&key("a"), &another), Verdict::Differs);
    let otherwise = expectation(&[DesiredObject::BuiltIn(built_in("a", 2))]);
    let otherwise = Expectation::new(otherwise.desired, BTreeSet::new(), Some(&again));
    assert_eq!(otherwise.evaluate(&key("a"), &answer), Verdict::Differs);
}

#[test]
fn applied_object_is_reapplied_only_when_it_differs() {
    let fields = json!({"f:value": {}});
    let mut wanted = expectation(&[applied("a", &json!("1000m"), "digest")]);
    let as_reported = live_applied("a", &json!("1000m"), "digest", &fields);
    // A quantity is returned in another form than it was sent.
    let as_read = live_applied("a", &json!("1"), "digest", &fields);
    assert_eq!(wanted.evaluate(&key("a"), &as_reported), Verdict::InSync);
    assert_eq!(
        wanted.evaluate(&key("a"), &as_read),
        Verdict::Differs,
        "nobody knows yet that it is the same"
    );
    wanted.record_result(&key("a"), &as_read);
    for (present, expected) in [
        (as_read.clone(), Verdict::InSync),
        // Its status changes all the time.
        (
            {
                let mut other = as_read.clone();
                other["metadata"]["resourceVersion"] = json!("9");
                other
            },
            Verdict::InSync,
        ),
        (live_applied("a", &json!("1"), "another", &fields), Verdict::Differs),
        (live_applied("a", &json!("7"), "digest", &json!({})), Verdict::Differs),
        (
            {
                let mut other = as_read.clone();
                other["metadata"]["managedFields"] = json!([]);
                other
            },
            Verdict::Differs,
        ),
        (
            {
                let mut other = as_read.clone();
                other["metadata"]["uid"] = json!("another");
                other
            },
            Verdict::Differs,
        ),
    ] {
        assert_eq!(wanted.evaluate(&key("a"), &present), expected, "{present}");
    }
}

#[test]
fn add_on_objects_are_deleted_with_it_unless_unreadable() {
    let stray = live_applied("a", &json!(1), "digest", &json!({}));
    let read = expectation(&[]);
    let unread = Expectation::new(BTreeMap::new(), BTreeSet::from(["dns".to_owned()]), None);
    let others = Expectation::new(BTreeMap::new(), BTreeSet::from(["network".to_owned()]), None);
    let gone =
        [Action::Delete(key("a"), Precondition { uid: "u".to_owned(), resource_version: "5".to_owned() })];
    assert_eq!(read.plan_actions(std::slice::from_ref(&stray)), gone);
    assert_eq!(others.plan_actions(std::slice::from_ref(&stray)), gone);
    assert_eq!(unread.plan_actions(std::slice::from_ref(&stray)), []);
    // An object of the release is not an add-on's, whatever its other labels are.
    let mut built_in = live_object(built_in("b", 1), 3);
    built_in["metadata"]["labels"][ADD_ON_LABEL] = json!("dns");
    assert_eq!(unread.plan_actions(&[built_in]).len(), 1);
}

#[test]
fn unknown_label_value_never_deletes() {
    let mut unknown = live_object(built_in("a", 1), 3);
    unknown["metadata"]["labels"][MANAGED_LABEL] = json!("by somebody");
    assert_eq!(expectation(&[]).plan_actions(&[unknown]), []);
}

#[test]
fn only_changes_that_need_action_count() {
    let mut wanted = expectation(&[DesiredObject::BuiltIn(built_in("a", 1))]);
    let right = live_object(built_in("a", 1), 3);
    wanted.record_result(&key("a"), &right);
    for (name, now, expected) in [
        ("a", Some(right.clone()), false),
        ("a", Some(live_object(built_in("a", 1), 8)), false),
        ("a", Some(live_object(built_in("a", 2), 8)), true),
        ("a", None, true),
        ("stray", Some(live_object(built_in("stray", 1), 8)), true),
        ("stray", None, false),
    ] {
        assert_eq!(wanted.needs_action(&key(name), now.as_ref()), expected, "{name} {now:?}");
    }
}
