//! Every flag of the service with every type of TOML: the value arrives as it was meant, or the key is rejected. A wrong text
//! is rejected by one sentence, whether the command line, the environment or the file has it.
//!
//! The types of the flags are listed here once more. A new flag that takes no text must be added, or this test fails.

use std::ffi::{OsStr, OsString};

use clap::builder::Str;
use clap::{Arg, CommandFactory as _};
use shepherd::service::configuration::read_configuration;
use shepherd::service::flags::ShepherdFlags;

use crate::harness::aloud::TestResult;
use crate::harness::program::Place;

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Switch,
    Truth,
    WholeNumber,
    Number,
    Text,
    JoinedTexts,
    Texts,
}

/// Flags that take something else than one text.
const TYPES: &[(&str, Takes)] = &[
    ("agent_endpoint", Takes::Texts),
    ("allow_unsigned_releases", Takes::Truth),
    ("api_endpoint", Takes::Texts),
    ("bmdb_eat_my_data", Takes::Switch),
    ("bmdb_max_connections", Takes::WholeNumber),
    ("cluster_snapshots_retained", Takes::WholeNumber),
    ("cluster_snapshots_retained_daily", Takes::WholeNumber),
    ("components", Takes::Texts),
    ("initializer_loop_parallelism", Takes::WholeNumber),
    ("key_rotation_path", Takes::Texts),
    ("order_max_machines", Takes::WholeNumber),
    ("order_max_machines_per_hour", Takes::WholeNumber),
    ("provisioner_max_machines", Takes::WholeNumber),
    ("provisioner_reservation_chunk_size", Takes::WholeNumber),
    ("recoverer_loop_parallelism", Takes::WholeNumber),
    ("recovery_brake_fraction", Takes::Number),
    ("recovery_ladder", Takes::JoinedTexts),
    ("require_second_admin", Takes::Truth),
    ("require_signed_declarations", Takes::Switch),
    ("retirer_loop_parallelism", Takes::WholeNumber),
    ("switcher_loop_parallelism", Takes::WholeNumber),
    ("updater_loop_parallelism", Takes::WholeNumber),
];

/// Flags that are of the command line alone. The key `provider` is that of the tables.
const NO_KEYS: &[&str] = &["check", "config", "help", "provider", "version"];

/// Kinds of values that the parser judges. Others are judged when the flag is used.
const JUDGED_BY_THE_PARSER: [&str; 12] = [
    "SPAN",
    "RATE",
    "ADDRESS:PORT",
    "LADDER",
    "SIZE",
    "FORMAT",
    "DIALECT",
    "PART",
    "SHARE",
    "TRUTH",
    "N",
    "COUNT",
];

/// The kind of value that a flag takes, as its help names it.
fn value_name(flag: &Arg) -> &str {
    flag.get_value_names().and_then(<[Str]>::first).map_or("", Str::as_str)
}

/// Two values that the parser of a flag accepts.
fn good_texts(flag: &Arg) -> [&'static str; 2] {
    match value_name(flag) {
        "SPAN" => ["90s", "2m"],
        "RATE" => ["1m,2", "2m,3"],
        "ADDRESS:PORT" => ["127.0.0.1:9", "[::1]:9"],
        "HOST:PORT" => ["h:1", "[::1]:2"],
        "LADDER" => ["restart-agent:20s:1", "power-cycle:20m:1"],
        "SIZE" => ["1GiB", "2GiB"],
        "FORMAT" => ["json", "text"],
        "DIALECT" => ["postgres", "postgres"],
        "PART" => ["api", "callback"],
        "SHARE" => ["0.5", "0.25"],
        "TRUTH" => ["true", "false"],
        "N" | "COUNT" => ["7", "8"],
        _ => ["x", "y"],
    }
}

/// The flags without which the parser rejects a flag.
fn companions(flag: &str) -> &'static [&'static str] {
    match flag {
        "bmdb_direct_url" => &["--bmdb_url=x"],
        "require_signed_declarations" => &["--signing_keys_path=x"],
        "provider_name" => &["--provider=static"],
        "static_device_list_sha256" => &["--static_device_list_url=file:///x"],
        _ => &[],
    }
}

/// The file for each type of TOML, and what the flag must have; `None` if the key must be rejected.
fn cases(flag: &Arg, takes: Takes) -> Vec<(&'static str, String, Option<Vec<String>>)> {
    let name = flag.get_id().as_str();
    let [one, two] = good_texts(flag);
    let integer = if takes == Takes::Number { "1" } else { "7" };
    let accepted = |types: &[Takes], values: &[&str]| {
        types.contains(&takes).then(|| values.iter().map(|value| (*value).to_owned()).collect::<Vec<_>>())
    };
    let texts =
        [Takes::Truth, Takes::WholeNumber, Takes::Number, Takes::Text, Takes::JoinedTexts, Takes::Texts];
    let list = match takes {
        Takes::JoinedTexts => Some(vec![format!("{one},{two}")]),
        _ => accepted(&[Takes::Texts], &[one, two]),
    };
    vec![
        ("string", format!("{name} = \"{one}\""), accepted(&texts, &[one])),
        (
            "integer",
            format!("{name} = {integer}"),
            accepted(&[Takes::WholeNumber, Takes::Number], &[integer]),
        ),
        ("float", format!("{name} = 0.5"), accepted(&[Takes::Number], &["0.5"])),
        ("boolean", format!("{name} = true"), accepted(&[Takes::Switch, Takes::Truth], &["true"])),
        ("date-time", format!("{name} = 1979-05-27T07:32:00Z"), None),
        ("array", format!("{name} = [\"{one}\", \"{two}\"]"), list),
        ("empty array", format!("{name} = []"), None),
        ("array of numbers", format!("{name} = [7, 8]"), None),
        ("array of tables", format!("[[{name}]]\nx = \"{one}\""), None),
        ("table", format!("[{name}]\nx = \"{one}\""), None),
    ]
}

/// The values that a file gives a flag, as the parser of the command line has them.
fn read_values(place: &Place, flag: &str, text: &str) -> anyhow::Result<Result<Vec<String>, String>> {
    let path = place.write("shepherd.toml", format!("# configuration\n{text}\n"))?;
    let file = match read_configuration(&path, &[]) {
        Ok(file) => file,
        Err(failure) => return Ok(Err(failure.message)),
    };
    let program = ["shepherd"].iter().chain(companions(flag)).map(OsString::from);
    let matches = ShepherdFlags::command().try_get_matches_from(program.chain(file.arguments));
    Ok(matches.map_err(|error| error.to_string()).map(|matches| {
        let values = matches.get_raw(flag).into_iter().flatten();
        values.map(OsStr::to_string_lossy).map(String::from).collect()
    }))
}

#[test]
fn every_flag_takes_its_own_types_and_rejects_all_others_by_name() -> TestResult {
    let place = Place::new()?;
    let command = ShepherdFlags::command();
    let flags: Vec<&Arg> =
        command.get_arguments().filter(|flag| !NO_KEYS.contains(&flag.get_id().as_str())).collect();
    assert!(flags.len() > 50, "{}", flags.len());
    for (name, _) in TYPES {
        assert!(flags.iter().any(|flag| flag.get_id().as_str() == *name), "there is no flag {name}");
    }
    for flag in flags {
        let name = flag.get_id().as_str();
        let takes = TYPES.iter().find(|(flag, _)| *flag == name).map_or(Takes::Text, |(_, takes)| *takes);
        for (toml_type, text, expected) in cases(flag, takes) {
            let found = read_values(&place, name, &text)?;
            if let Some(values) = expected {
                assert_eq!(found, Ok(values), "{name} as {toml_type}");
                continue;
            }
            let problem = found.err().unwrap_or_default();
            assert!(
                problem.contains(&format!("line 2: {name} takes ")),
                "{name} as {toml_type} is not rejected by its name: {problem:?}"
            );
        }
    }
    Ok(())
}

/// A list that a flag takes as one text is not shortened to its last value (a ladder became its last step).
#[test]
fn list_is_the_same_as_its_text() -> TestResult {
    let place = Place::new()?;
    for (flag, list, text) in [
        (
            "recovery_ladder",
            r#"["restart-agent:20s:1", "reboot:15m:2", "power-cycle:20m:1"]"#,
            "restart-agent:20s:1,reboot:15m:2,power-cycle:20m:1",
        ),
        (
            "agent_endpoint",
            r#"["a.example:8443", "[2001:db8::1]:8443"]"#,
            "a.example:8443,[2001:db8::1]:8443",
        ),
        ("api_endpoint", r#"["a.example:8444", "b.example:8444"]"#, "a.example:8444,b.example:8444"),
        ("components", r#"["api", "callback"]"#, "api,callback"),
    ] {
        let by_list = read_values(&place, flag, &format!("{flag} = {list}"))?;
        let by_text = read_values(&place, flag, &format!("{flag} = \"{text}\""))?;
        assert!(by_list.is_ok(), "{by_list:?}");
        assert_eq!(by_list, by_text, "{flag}");
    }
    Ok(())
}

/// The sentence with which the service refuses to start, without the place of a file in it.
fn refusal(place: &Place, flag: &str, own: &[String], variable: Option<&str>) -> anyhow::Result<String> {
    let arguments = companions(flag).iter().map(|&companion| companion.to_owned());
    let mut command = place.program(["--check".to_owned()].into_iter().chain(arguments).chain(own.to_vec()));
    // Each program of a test has it, and it would override the file.
    command.env_remove("SHEPHERD_API_LISTEN_ADDRESS");
    if let Some(value) = variable {
        command.env(format!("SHEPHERD_{}", flag.to_uppercase()), value);
    }
    let ended = Place::finish(command.spawn()?)?;
    anyhow::ensure!(ended.code == Some(2), "{flag} is accepted: {ended:?}");
    let sentence = ended.stderr.trim().trim_start_matches("shepherd: ");
    let file = format!("the configuration file {}: line 1: ", place.path("wrong.toml").display());
    Ok(sentence.strip_prefix(&file).unwrap_or(sentence).to_owned())
}

#[test]
fn wrong_text_is_refused_by_one_sentence_wherever_it_is() -> TestResult {
    const WRONG: &str = "no such value";
    let place = Place::new()?;
    let command = ShepherdFlags::command();
    let judged = |flag: &&Arg| {
        !NO_KEYS.contains(&flag.get_id().as_str()) && JUDGED_BY_THE_PARSER.contains(&value_name(flag))
    };
    let flags: Vec<&str> =
        command.get_arguments().filter(judged).map(|flag| flag.get_id().as_str()).collect();
    assert!(flags.len() > 40, "{flags:?}");
    for flag in flags {
        let by_line = refusal(&place, flag, &[format!("--{flag}={WRONG}")], None)?;
        assert!(by_line.contains(flag) && by_line.contains(WRONG), "{flag}: {by_line}");
        assert_eq!(refusal(&place, flag, &[], Some(WRONG))?, by_line, "{flag} in the environment");
        let file = place.write("wrong.toml", format!("{flag} = \"{WRONG}\"\n"))?;
        let by_file = refusal(&place, flag, &[format!("--config={}", file.display())], None)?;
        assert_eq!(by_file, by_line, "{flag} in the file");
    }
    Ok(())
}
