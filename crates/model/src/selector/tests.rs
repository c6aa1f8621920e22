use proptest::prelude::*;

use super::compose::{any_of, quote_prefix, quote_value};
use super::*;

/// The values of a machine, owned.
struct Machine {
    provider: Option<&'static str>,
    provider_id: Option<&'static str>,
    location: Option<String>,
    hardware: Hardware,
    labels: Labels,
    phase: &'static str,
    cluster: Option<&'static str>,
    facts: BTreeSet<String>,
}

impl Machine {
    /// It is known of three facts whether a machine has them.
    fn is_selected_by(&self, text: &str) -> bool {
        let selector: Selector = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector.clone()), "{text}");
        selector.matches(&MachineTraits {
            provider: self.provider,
            provider_id: self.provider_id,
            location: self.location.as_deref(),
            hardware: &self.hardware,
            labels: &self.labels,
            phase: Some(self.phase),
            cluster: self.cluster,
            facts: &self.facts,
            known_facts: &["hold", "quarantine", "needs_human"].map(str::to_owned).into(),
        })
    }
}

fn machine() -> Machine {
    Machine {
        provider: Some("rack"),
        provider_id: Some("u-17"),
        location: Some("ams-1/r7".to_owned()),
        hardware: Hardware {
            manufacturer: Some("Dell Inc.".to_owned()),
            product: Some("R640".to_owned()),
            memory: Some(64 << 30),
            cpus: Some(32),
        },
        labels: Labels::from([("row".to_owned(), "7".to_owned()), ("empty".to_owned(), String::new())]),
        phase: "Ready",
        cluster: Some("prod"),
        facts: BTreeSet::from(["hold".to_owned()]),
    }
}

/// A machine of which only the phase is known.
fn unknown_machine() -> Machine {
    Machine {
        provider: None,
        provider_id: None,
        location: None,
        hardware: Hardware::default(),
        labels: Labels::new(),
        phase: "New",
        cluster: None,
        facts: BTreeSet::new(),
    }
}

#[test]
fn machine_matches_when_every_term_does() {
    for (text, expected) in [
        ("", true),
        (" , ", true),
        ("phase=Ready,location=ams*,label.row=7,memory>=64GiB", true),
        ("phase=Ready,location=ams*,label.row=7,memory>=65GiB", false),
        ("phase = Ready , location = ams*", true),
        // Names.
        ("name=u-17", true),
        ("name=rack/u-17", true),
        ("name=rack/*", true),
        ("name=u-*", true),
        ("name=u-1", false),
        ("name=rack*", false),
        ("name=other/u-17", false),
        ("name!=rack/u-17", false),
        ("name notin (u-16,u-18)", true),
        ("provider=rack", true),
        ("provider==rack", true),
        ("provider=rac", false),
        ("provider=rac*", true),
        ("provider!=rack", false),
        ("provider in (other,rack)", true),
        ("provider notin (other,rack)", false),
        // Locations are no prefixes by themselves.
        ("location=ams", false),
        ("location=ams*", true),
        ("location=*", true),
        ("location=ams-1/r7", true),
        ("location in (fra*,ams-1*)", true),
        ("location in(fra*)", false),
        ("location!=fra*", true),
        ("location!=ams*", false),
        ("manufacturer=Dell Inc.", true),
        ("manufacturer=Dell*,product=R640", true),
        ("manufacturer=dell*", false),
        // Numbers.
        ("memory>=65536MiB,cpus>=32", true),
        ("cpus>=33", false),
        // Labels.
        ("label.row=7", true),
        ("label.row", true),
        ("!label.row", false),
        ("!label.rack", true),
        ("label.row=8", false),
        ("label.row!=8", true),
        ("label.row in (7,8)", true),
        ("label.row notin (7,8)", false),
        ("label.rack", false),
        ("label.empty=", true),
        ("label.empty=\"\"", true),
        ("label.row=", false),
        ("label.row=*", true),
        // Phases, clusters, facts.
        ("phase=ready", true),
        ("phase!=Ready", false),
        ("phase in (Ready,NeedsHuman)", true),
        ("phase notin (Ready,NeedsHuman)", false),
        ("cluster=prod", true),
        ("cluster=*", true),
        ("cluster!=prod", false),
        ("fact=hold", true),
        ("fact=hold,fact=quarantine", false),
        ("fact in (hold,quarantine)", true),
        ("fact!=hold", false),
        ("fact!=quarantine", true),
        ("fact notin (quarantine,needs_human)", true),
    ] {
        assert_eq!(machine().is_selected_by(text), expected, "{text}");
    }
}

#[test]
fn unknown_value_meets_no_term_and_a_missing_label_is_known() {
    for (text, expected) in [
        ("name=*", false),
        ("name!=u-17", false),
        ("provider!=rack", false),
        ("location!=ams*", false),
        ("location notin (ams)", false),
        ("location=*", false),
        ("manufacturer!=Dell*", false),
        ("product notin (R640,R650)", false),
        ("memory>=0", false),
        ("cpus>=0", false),
        // A fact of which nothing is known, for example because it is misspelt.
        ("fact=holt", false),
        ("fact!=holt", false),
        ("fact notin (hold,holt)", false),
        ("fact!=hold", true),
        // Known to be missing.
        ("label.row!=7", true),
        ("label.row notin (7,8)", true),
        ("!label.row", true),
        ("label.row=*", false),
        ("cluster!=prod", true),
        ("cluster!=*", true),
        ("cluster=*", false),
    ] {
        assert_eq!(unknown_machine().is_selected_by(text), expected, "{text}");
    }
    // A placeholder of firmware is no name.
    let hardware = Hardware {
        manufacturer: Some("Default string".to_owned()),
        product: Some("Unknown".to_owned()),
        ..Hardware::default()
    };
    let unnamed = Machine { hardware, ..machine() };
    for text in ["manufacturer=Default string", "product=Unknown", "product!=R640", "manufacturer=*"] {
        assert!(!unnamed.is_selected_by(text), "{text}");
    }
}

#[test]
fn every_value_can_be_written() {
    for (text, manufacturer, product, location) in [
        ("manufacturer=Gigabyte Technology Co., Ltd.", Some("Gigabyte Technology Co., Ltd."), None, None),
        (
            r#"manufacturer="Gigabyte Technology Co., Ltd.""#,
            Some("Gigabyte Technology Co., Ltd."),
            None,
            None,
        ),
        (
            "manufacturer=Acme, Inc., product=X570 AORUS, rev. 1.0,cpus>=1",
            Some("Acme, Inc."),
            Some("X570 AORUS, rev. 1.0"),
            None,
        ),
        ("location=Hall A, row 7", None, None, Some("Hall A, row 7")),
        ("location=Hall A, ro*", None, None, Some("Hall A, row 7")),
        ("location=\"Hall A, ro*\"", None, None, Some("Hall A, row 7")),
        ("location in (\"Hall A, row 7\", Hall B)", None, None, Some("Hall A, row 7")),
        ("location in (Hall A, Hall B)", None, None, Some("Hall B")),
        ("location=Hall A, row 7, label.row in (7)", None, None, Some("Hall A, row 7")),
        ("location=Hall A, row 7, !label.rack", None, None, Some("Hall A, row 7")),
        ("location=Halle \u{4e2d}, \u{540d},label.row", None, None, Some("Halle \u{4e2d}, \u{540d}")),
        (r#"product="A, memory>=1 \"x\" \\" , location=a"#, None, Some(r#"A, memory>=1 "x" \"#), Some("a")),
        (r"product=A\,memory=1,location=a", None, Some("A,memory=1"), Some("a")),
        (r"product=A\B", None, Some(r"A\B"), None),
        (r"product=A\*B\*", None, Some("A*B*"), None),
        (r#"product="A\*""#, None, Some("A*"), None),
        (r#"product=24" screen"#, None, Some(r#"24" screen"#), None),
        ("product=PowerEdge (14G)", None, Some("PowerEdge (14G)"), None),
        (r#"product in ("PowerEdge (14G)")"#, None, Some("PowerEdge (14G)"), None),
        (r#"memory>="1GiB",label.row="7",location=a,"#, None, None, Some("a")),
    ] {
        let named = Machine {
            location: location.map(str::to_owned),
            hardware: Hardware {
                manufacturer: manufacturer.map(str::to_owned),
                product: product.map(str::to_owned),
                ..machine().hardware
            },
            ..machine()
        };
        assert!(named.is_selected_by(text), "{text}");
    }
}

fn has_control_character(text: &str) -> bool {
    text.contains(|c: char| c < ' ' || c == '\u{7f}')
}

#[test]
fn invalid_selectors_have_one_sentence() {
    for (text, part) in [
        ("colour=red", "\"colour\" is no key of a selector; a label is written \"label.colour=red\""),
        ("row=7", "a label is written \"label.row=7\""),
        ("!row", "a label is written \"!label.row\""),
        ("row in (7,8)", "a label is written \"label.row in (7,8)\""),
        ("location=Hall A,row 7", "is followed by no operator"),
        ("location=Hall A,B", "a value with a comma is written in quotes"),
        ("label=7", "the keys are name, provider,"),
        ("memory=64GiB", "would hardly ever match a machine; write memory>=64GiB"),
        ("memory", "write the selector in quotes: 'memory>=64GiB'"),
        ("location=ams*,memory", "write the selector in quotes: 'memory>=64GiB'"),
        ("location=ams*, memory", "write the selector in quotes: 'memory>=64GiB'"),
        ("cpus", "write the selector in quotes: 'cpus>=32'"),
        ("cpus=32", "write cpus>=32"),
        ("memory in (64GiB)", "memory has only >="),
        ("memory!=64GiB", "memory has only >="),
        ("memory>64GiB", "is followed by no operator"),
        ("memory>=", "\"\" is no amount of memory"),
        ("memory>=lots", "\"lots\" is no amount of memory"),
        ("memory>=6*", "is no amount of memory"),
        ("memory>=99999999999TiB", "is no amount of memory"),
        ("cpus>=x", "\"x\" is no number of threads"),
        ("disks>=2", "a label is written \"label.disks>=2\""),
        ("location>=a", "cannot be compared with >="),
        ("location=", "has no value to compare with"),
        ("location=\"\"", "has no value to compare with"),
        ("location", "\"location\" has no value to compare with; write location=VALUE"),
        ("location in ()", "has no values; write them between the parentheses"),
        ("location in (a,)", "has an empty value"),
        ("location in (,a)", "has an empty value"),
        ("location in (a", "has a parenthesis that is not closed"),
        ("location in (", "has a parenthesis that is not closed"),
        ("location in a", "needs values in parentheses"),
        ("location in (\"a\" b)", "separate values by commas"),
        ("location in (a) b", "more text follows the value"),
        ("!location", "only a label can be missing; write location!=VALUE"),
        ("!label.row=7", "write label.row!=VALUE, or !label.row"),
        ("label.row>=7", "the value of a label is a text"),
        ("label.=x", "is not a valid key of a label"),
        ("label.row=a b", "is not a valid value of a label"),
        ("phase=Redy", "\"Redy\" is not a phase; the phases are New, Provisioning,"),
        ("phase=R*", "\"R*\" is not a phase"),
        ("phase in (Ready,Redy)", "\"Redy\" is not a phase"),
        ("phase=", "\"\" is not a phase"),
        ("fact=Hold", "is not the name of a fact"),
        ("fact=ho*", "\"ho*\" is not the name of a fact"),
        ("fact=\"x; DROP\"", "is not the name of a fact"),
        ("location=a*b", "has a star within a value"),
        ("location=*a", "has a star within a value"),
        ("location in (a*b)", "has a star within a value"),
        ("location=a**", "has a star within a value"),
        ("product=\"A, B", "has a quote that is not closed"),
        ("product in (\"A, B)", "has a quote that is not closed"),
        ("product=\"A\" B", "more text follows the value"),
        ("product=\"A\"*", "more text follows the value"),
        ("=7", "begins with its key"),
        ("(a)", "begins with its key"),
        ("\"phase=Ready\"", "begins with its key"),
        ("location=a\nb", "has a control character"),
        ("location=\u{1b}[2J", "has a control character"),
        ("location ams", "is followed by no operator"),
    ] {
        let message = text.parse::<Selector>().expect_err(text).to_string();
        assert!(message.contains(part), "{text}: {message}");
        assert!(!has_control_character(&message), "{text}: {message}");
    }
}

#[test]
fn size_of_a_selector_is_bounded() {
    let long = format!("location={}", "a".repeat(64 << 10));
    let message = long.parse::<Selector>().unwrap_err().to_string();
    assert!(message.starts_with("the selector has 65545 bytes, and at most 16384 are allowed"), "{message}");
    let longest = format!("location={}", "a".repeat(MAX_BYTES - 9));
    assert!(longest.parse::<Selector>().is_ok());
    let names = |count: usize| {
        let names: Vec<String> = (0..count).map(|number| number.to_string()).collect();
        format!("name in ({}),label.row", names.join(","))
    };
    assert!(names(MAX_VALUES - 1).parse::<Selector>().is_ok());
    let message = names(MAX_VALUES).parse::<Selector>().unwrap_err().to_string();
    assert!(message.starts_with("the selector has 501 values"), "{message}");
    // No error repeats a text that is far too long.
    for text in [
        "x".repeat(MAX_BYTES),
        format!("label.{}", "x".repeat(10_000)),
        format!("label.row={}", "x".repeat(10_000)),
        format!("location in ({}", "x".repeat(10_000)),
        format!("phase={}", "\u{202e}".repeat(5_000)),
    ] {
        let message = text.parse::<Selector>().unwrap_err().to_string();
        assert!(message.chars().count() < 1500, "{message}");
    }
}

#[test]
fn keys_that_do_not_exist_are_those_of_labels() {
    for (text, expected) in [
        ("row=7", Some("label.row=7")),
        (" row=7,phase=Ready", Some("label.row=7,phase=Ready")),
        ("phase=Ready,row in (7,8),!rack", Some("phase=Ready,label.row in (7,8),!label.rack")),
        ("row", Some("label.row")),
        ("label.row=7", None),
        ("row=7,phase=Redy", None),
        ("row=a b", None),
        ("row>=7", None),
        ("memory", None),
        ("-row=7", None),
    ] {
        assert_eq!(correct_label_keys(text).as_deref(), expected, "{text}");
    }
}

#[test]
fn selector_says_what_it_is_about() {
    let parsed = |text: &str| text.parse::<Selector>().unwrap();
    let text = "label.row!=7,!label.rack,label.owner,location=a,fact in (hold,quarantine),fact!=hold";
    assert!(parsed(text).label_keys().eq(["row", "rack", "owner"]));
    assert_eq!(parsed(text).facts(), ["hold", "quarantine"].into());
    for (text, empty, class, retired) in [
        ("", true, true, false),
        ("phase=Ready", false, true, false),
        ("phase!=Ready", false, true, false),
        ("phase!=Retired", false, true, false),
        ("provider=rack,phase in (ready,retired)", false, true, true),
        ("phase=Retired,cluster=prod", false, false, true),
        ("location=ams*", false, false, false),
    ] {
        let selector = parsed(text);
        let found =
            (selector.is_empty(), selector.is_about_class_alone(), selector.names_phase(Phase::Retired));
        assert_eq!(found, (empty, class, retired), "{text}");
    }
    let selector = parsed("phase in (Ready,Installed),provider!=lab,memory>=1");
    for (phase, provider, expected) in [
        ("Ready", Some("rack"), true),
        ("Ready", Some("lab"), false),
        ("Ready", None, false),
        ("New", Some("rack"), false),
        ("AsYetUnknown", Some("rack"), false),
    ] {
        assert_eq!(selector.matches_class(phase, provider), expected, "{phase} {provider:?}");
    }
    let (hardware, labels) = (Hardware::default(), Labels::new());
    let traits = MachineTraits {
        provider: Some("rack"),
        provider_id: None,
        location: None,
        hardware: &hardware,
        labels: &labels,
        phase: Some("Ready"),
        cluster: None,
        facts: &NO_FACTS,
        known_facts: &NO_FACTS,
    };
    assert!(!selector.matches(&traits) && selector.matches_besides(&traits, &[SelectorKey::Memory]));
}

#[test]
fn terms_are_composed_of_any_values() {
    let quoted = ["ams".to_owned(), quote_value("Hall A, row 7")];
    assert_eq!(any_of("location", &quoted).as_deref(), Some(r#"location in (ams,"Hall A, row 7")"#));
    assert_eq!(any_of("location", &quoted[..1]).as_deref(), Some("location=ams"));
    assert_eq!(any_of("location", &[]), None);
    assert_eq!((quote_prefix("ams"), quote_prefix("")), ("ams*".to_owned(), "*".to_owned()));
}

proptest! {
    #[test]
    fn composed_term_means_its_value(
        value in r#"[a-c,"\\*() =\u{4e2d}-]{1,12}"#,
        other in r#"[a-c,"\\*() =\u{4e2d}-]{1,12}"#,
    ) {
        let matches = |text: String, location: &str| {
            Machine { location: Some(location.to_owned()), ..machine() }.is_selected_by(&text)
        };
        let equal = any_of("location", &[quote_value(&value)]).unwrap();
        prop_assert!(matches(equal.clone(), &value), "{equal}");
        prop_assert_eq!(matches(equal, &other), value == other);
        let both = any_of("location", &[quote_value(&value), quote_value(&other)]).unwrap();
        prop_assert!(matches(both.clone(), &value) && matches(both, &other));
        let prefix = format!("{},phase=Ready", any_of("location", &[quote_prefix(&value)]).unwrap());
        prop_assert!(matches(prefix.clone(), &format!("{value}{other}")), "{prefix}");
        prop_assert_eq!(matches(prefix, &other), other.starts_with(&value));
    }

    #[test]
    fn any_text_is_a_selector_or_has_a_sentence(text in r#"(phase|label\.row|memory|location|[ ,!=<>()"*\\a-c\n]){0,20}"#) {
        match text.parse::<Selector>() {
            Ok(selector) => prop_assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector)),
            Err(error) => prop_assert!(!has_control_character(&error.to_string())),
        }
    }
}
