use serde_json::json;

use super::*;

fn key(name: &str) -> Key {
    Key { namespace: None, name: name.to_owned() }
}

fn built_in(name: &str, value: i64) -> Value {
    json!({"metadata": {"name": name, "labels": {KEPT: BUILT_IN}}, "value": value})
}

/// As a server has it: with what it adds itself.
fn there(mut object: Value, version: u64) -> Value {
    object["metadata"]["uid"] = json!(format!("uid of {}", object["metadata"]["name"].as_str().unwrap()));
    object["metadata"]["resourceVersion"] = json!(version.to_string());
    object["filled"] = json!("in");
    object
}

fn kind() -> Kind {
    Kind {
        group: String::new(),
        version: "v1".to_owned(),
        kind: "Thing".to_owned(),
        plural: "things".to_owned(),
        namespaced: false,
    }
}

fn applied(name: &str, value: &Value, digest: &str) -> Wanted {
    Wanted::Applied {
        add_on: "dns".to_owned(),
        kind: kind(),
        object: json!({"metadata": {"name": name, "labels": {KEPT: OF_AN_ADD_ON, ADD_ON: "dns"}}, "value": value}),
        digest: digest.to_owned(),
    }
}

/// As a server has what was applied.
fn applied_there(name: &str, value: &Value, digest: &str, fields: &Value) -> Value {
    json!({"metadata": {"name": name, "uid": "u", "resourceVersion": "5", "labels": {KEPT: OF_AN_ADD_ON, ADD_ON: "dns"},
        "annotations": {APPLIED: digest},
        "managedFields": [{"manager": "shepherd", "operation": "Apply", "fieldsV1": fields}]}, "value": value})
}

fn expectation(wanted: &[Wanted]) -> Expectation {
    let wanted = wanted.iter().map(|wanted| (Key::of(wanted.object()), wanted.clone())).collect();
    Expectation::new(wanted, BTreeSet::new(), None)
}

fn precondition(name: &str, version: &str) -> Precondition {
    Precondition { uid: format!("uid of {name}"), resource_version: version.to_owned() }
}

#[test]
fn what_is_missing_is_made_what_differs_is_changed_and_what_nobody_wants_goes() {
    let wanted = expectation(&[Wanted::BuiltIn(built_in("a", 1)), Wanted::BuiltIn(built_in("b", 2))]);
    let (a, b) = (there(built_in("a", 1), 3), there(built_in("b", 2), 4));
    let (other_a, stray) = (there(built_in("a", 9), 5), there(built_in("c", 3), 6));
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
        assert_eq!(wanted.plan(&present), expected, "{present:?}");
    }
}

#[test]
fn what_others_say_of_an_object_is_theirs() {
    let wanted = expectation(&[Wanted::BuiltIn(built_in("a", 1))]);
    let mut present = there(built_in("a", 1), 3);
    present["metadata"]["labels"]["theirs"] = json!("x");
    present["metadata"]["annotations"] = json!({"theirs": "x"});
    present["metadata"]["finalizers"] = json!(["theirs"]);
    assert_eq!(wanted.plan(&[present]), []);
}

#[test]
fn an_object_that_is_being_deleted_is_waited_for() {
    let wanted = expectation(&[Wanted::BuiltIn(built_in("a", 1))]);
    let ending = |name| {
        let mut object = there(built_in(name, 9), 3);
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        object
    };
    assert_eq!(wanted.plan(&[ending("a"), ending("stray")]), [Action::Await(key("a"))]);
    assert!(!wanted.is_news(&key("a"), Some(&ending("a"))));
    assert!(wanted.is_news(&key("a"), None), "now it can be made");
}

#[test]
fn what_a_server_does_not_keep_is_not_asked_of_it_again() {
    let mut wanted = expectation(&[Wanted::BuiltIn(built_in("a", 1))]);
    // It does not know the field.
    let mut answer = there(built_in("a", 1), 3);
    answer.as_object_mut().unwrap().remove("value");
    assert_eq!(wanted.judge(&key("a"), &answer), Verdict::Differs);
    wanted.remember(&key("a"), &answer);
    assert_eq!(wanted.judge(&key("a"), &answer), Verdict::Right);
    let mut again = wanted.clone();
    again = Expectation::new(wanted.wanted.clone(), BTreeSet::new(), Some(&again));
    assert_eq!(again.judge(&key("a"), &answer), Verdict::Right, "in the next pass, too");
    // Somebody changed it; another one has its name; something else is wanted.
    let mut changed = answer.clone();
    changed["metadata"]["resourceVersion"] = json!("4");
    assert_eq!(again.judge(&key("a"), &changed), Verdict::Differs);
    let mut another = answer.clone();
    another["metadata"]["uid"] = json!("another");
    assert_eq!(again.judge(&key("a"), &another), Verdict::Differs);
    let otherwise = expectation(&[Wanted::BuiltIn(built_in("a", 2))]);
    let otherwise = Expectation::new(otherwise.wanted, BTreeSet::new(), Some(&again));
    assert_eq!(otherwise.judge(&key("a"), &answer), Verdict::Differs);
}

#[test]
fn what_was_applied_is_applied_again_only_when_it_differs() {
    let fields = json!({"f:value": {}});
    let mut wanted = expectation(&[applied("a", &json!("1000m"), "digest")]);
    let as_said = applied_there("a", &json!("1000m"), "digest", &fields);
    // A quantity reads otherwise than it was written.
    let as_read = applied_there("a", &json!("1"), "digest", &fields);
    assert_eq!(wanted.judge(&key("a"), &as_said), Verdict::Right);
    assert_eq!(wanted.judge(&key("a"), &as_read), Verdict::Differs, "nobody knows yet that it is the same");
    wanted.remember(&key("a"), &as_read);
    for (present, expected) in [
        (as_read.clone(), Verdict::Right),
        // Its status changes all the time.
        (
            {
                let mut other = as_read.clone();
                other["metadata"]["resourceVersion"] = json!("9");
                other
            },
            Verdict::Right,
        ),
        (applied_there("a", &json!("1"), "another", &fields), Verdict::Differs),
        (applied_there("a", &json!("7"), "digest", &json!({})), Verdict::Differs),
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
        assert_eq!(wanted.judge(&key("a"), &present), expected, "{present}");
    }
}

#[test]
fn what_an_add_on_made_goes_with_it_and_not_with_a_manifest_that_cannot_be_read() {
    let stray = applied_there("a", &json!(1), "digest", &json!({}));
    let read = expectation(&[]);
    let unread = Expectation::new(BTreeMap::new(), BTreeSet::from(["dns".to_owned()]), None);
    let others = Expectation::new(BTreeMap::new(), BTreeSet::from(["network".to_owned()]), None);
    let gone =
        [Action::Delete(key("a"), Precondition { uid: "u".to_owned(), resource_version: "5".to_owned() })];
    assert_eq!(read.plan(std::slice::from_ref(&stray)), gone);
    assert_eq!(others.plan(std::slice::from_ref(&stray)), gone);
    assert_eq!(unread.plan(std::slice::from_ref(&stray)), []);
    // The release's own is not an add-on's, whatever it says.
    let mut built_in = there(built_in("b", 1), 3);
    built_in["metadata"]["labels"][ADD_ON] = json!("dns");
    assert_eq!(unread.plan(&[built_in]).len(), 1);
}

#[test]
fn a_value_of_the_label_that_nobody_knows_is_no_leave_to_delete() {
    let mut unknown = there(built_in("a", 1), 3);
    unknown["metadata"]["labels"][KEPT] = json!("by somebody");
    assert_eq!(expectation(&[]).plan(&[unknown]), []);
}

#[test]
fn news_is_what_a_pass_would_do_something_about() {
    let mut wanted = expectation(&[Wanted::BuiltIn(built_in("a", 1))]);
    let right = there(built_in("a", 1), 3);
    wanted.remember(&key("a"), &right);
    for (name, now, expected) in [
        ("a", Some(right.clone()), false),
        ("a", Some(there(built_in("a", 1), 8)), false),
        ("a", Some(there(built_in("a", 2), 8)), true),
        ("a", None, true),
        ("stray", Some(there(built_in("stray", 1), 8)), true),
        ("stray", None, false),
    ] {
        assert_eq!(wanted.is_news(&key(name), now.as_ref()), expected, "{name} {now:?}");
    }
}
