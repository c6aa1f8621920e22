//! The command line as documented: help texts, `--check`, and the precedence of flag, environment and file.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context as _;
use shepherd::bmdb::connection::dialect::Dialect;
use shepherd::cli::explain::topic::find_topics;

use crate::bad_input::{NO_FSYNC, dialect_flag};
use crate::file_flags::complete;
use crate::harness::aloud::TestResult;
use crate::harness::postgres::TestDatabase;
use crate::harness::program::Place;
use crate::harness::source;

const SSH_USER: &[&str] = &["--check", "--bmdb_eat_my_data", "--provider=static", "--components=updater"];

fn golden(name: &str, text: &str) {
    insta::with_settings!({snapshot_path => "golden/command_line", prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!(name, text);
    });
}

fn help(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).env("COLUMNS", "100").stdin(Stdio::null()).output()?;
    anyhow::ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    // The parser writes lines of spaces alone, which nobody sees and which editors remove.
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n"))
}

#[test]
fn help_reads_well() {
    let shepherd = env!("CARGO_BIN_EXE_shepherd");
    let roleserver = env!("CARGO_BIN_EXE_roleserver");
    for (name, program, arguments) in [
        ("help", shepherd, &["--help"][..]),
        ("help_short", shepherd, &["-h"]),
        ("help_demo", shepherd, &["demo", "--help"]),
        ("help_simulator", shepherd, &["simulator", "--help"]),
        ("help_fault", shepherd, &["simulator", "fault", "--help"]),
        ("help_roleserver", roleserver, &["--help"]),
        ("help_roleserver_enroll", roleserver, &["enroll", "--help"]),
    ] {
        let text = help(program, arguments).unwrap();
        let long = text.lines().find(|line| line.chars().count() > 100);
        assert_eq!(long, None, "{name} is wider than 100 columns");
        golden(name, &text);
    }
}

#[tokio::test]
async fn the_documented_command_line_is_checked_and_changes_nothing() {
    let database = TestDatabase::create("documented").await.unwrap();
    let place = Place::new().unwrap();
    let list = place
        .write(
            "devices.json",
            r#"[{"ID": "rack1-01", "Addr": "192.0.2.11", "Location": "rack 1", "PowerCommand": ["/usr/local/bin/power", "rack1-01"]},
                {"ID": "rack1-02", "Addr": "192.0.2.12", "Location": "rack 1"}]"#,
        )
        .unwrap();
    let readme = source::read(&source::root().join("README.md")).unwrap();
    let began = readme.find("shepherd --bmdb_url").unwrap();
    let documented = readme[began..].split("```").next().unwrap().replace("\\\n", " ");
    let agent = env!("CARGO_BIN_EXE_roleserver");
    let arguments: Vec<String> = documented
        .split_whitespace()
        .skip(1)
        .map(|word| match word {
            "postgres://user@host:5432/bmdb" => database.url().to_owned(),
            "file:///etc/shepherd/devices.json" => format!("file://{}", list.display()),
            "/usr/lib/shepherd/roleserver" => agent.to_owned(),
            "/var/lib/shepherd/ssh_key" => place.path("ssh_key").display().to_string(),
            "/var/lib/shepherd/secrets.key" => place.path("secrets.key").display().to_string(),
            other => other.to_owned(),
        })
        .collect();
    let with_dashes = arguments.iter().map(|argument| {
        if argument.starts_with("--") { argument.replace('_', "-") } else { argument.clone() }
    });
    let check = ["--check".to_owned(), dialect_flag(database.dialect())];
    let reported = place.run(arguments.iter().chain(&check)).unwrap();
    assert_eq!(reported.code, Some(0), "{}", reported.stdout);
    let warnings: Vec<&str> = reported.stderr.lines().collect();
    // CockroachDB has no such setting.
    let expected = usize::from(database.dialect() == Dialect::Postgres);
    assert_eq!(warnings.len(), expected, "{warnings:?}");
    assert!(warnings.iter().all(|warning| warning.contains(NO_FSYNC)), "{warnings:?}");
    let dashed = place.run(with_dashes.chain(check)).unwrap();
    assert_eq!(dashed.stdout, reported.stdout, "a dash works wherever an underscore does");
    let text = place.masked(&reported.stdout);
    insta::with_settings!({filters => vec![
        (r"database     .*", "database     [database]"),
        (r"an agent for \S+, \d+ bytes, SHA-256 [0-9a-f]{64}(; it is not static, .*)?", "an agent for [architecture], [size] bytes, SHA-256 [digest]"),
        (r"schema version \d+", "schema version [known]"),
        // Another database reports no version of PostgreSQL.
        (r"found        PostgreSQL \d+\.\d+\n", ""),
    ]}, { golden("check", &text); });
    assert!(!place.path("ssh_key").exists() && !place.path("secrets.key").exists());
    place.must_be_clean().unwrap();
}

#[test]
fn a_flag_counts_before_the_environment_and_that_before_the_file() {
    let place = Place::new().unwrap();
    let config =
        place.write("shepherd.toml", "ssh-user = \"file\"\nagent_target_path = \"from/file\"\n").unwrap();
    let config = format!("--config={}", config.display());
    let list = place.write("devices.json", "[]").unwrap();
    let list = format!("--static_device_list_url=file://{}", list.display());
    let user = |flags: &[&str], environment: Option<&str>| -> anyhow::Result<String> {
        let mut command = place.program(SSH_USER.iter().chain(flags).chain(&[list.as_str()]));
        if let Some(user) = environment {
            command.env("SHEPHERD_SSH_USER", user);
        }
        let reported = Place::finish(command.spawn()?)?;
        let line =
            reported.stdout.lines().find(|line| line.starts_with("ssh ")).context(reported.stderr.clone());
        Ok(line?.split(',').next().unwrap_or_default().to_owned())
    };
    for (flags, environment, expected) in [
        (&[][..], None, "root"),
        (&[config.as_str()], None, "file"),
        (&[config.as_str()], Some("environment"), "environment"),
        (&[config.as_str(), "--ssh_user=flag"], Some("environment"), "flag"),
        (&[config.as_str(), "--ssh-user", "flag"], None, "flag"),
        (&["--ssh-user=flag"], Some("environment"), "flag"),
    ] {
        let found = user(flags, environment).unwrap();
        assert!(found.ends_with(&format!(" as {expected}")), "{flags:?}, {environment:?}: {found}");
    }
    // The environment may name the file, and a flag's value that looks like a subcommand is not one.
    let mut command = place.program(SSH_USER.iter().chain(&["--provider_name", "demo", list.as_str()]));
    command.env("SHEPHERD_CONFIG", place.path("shepherd.toml"));
    let reported = Place::finish(command.spawn().unwrap()).unwrap();
    assert!(reported.stdout.contains("as file,"), "{reported:?}");
}

/// The default listens on all IPv4 addresses, where an endpoint that is an IPv6 address leads to nothing.
#[test]
fn endpoint_of_another_family_than_its_listener_is_a_warning_of_the_check_and_of_the_start() -> TestResult {
    let place = Place::new()?;
    let mut flags = complete(&place)?;
    flags.retain(|(name, _)| {
        !name.starts_with("agent_tls_") && !name.ends_with("_address") && name != "agent_endpoint"
    });
    for (endpoint, expected) in [("192.0.2.1:8443", false), ("[2001:db8::1]:8443", true)] {
        let own: Vec<String> = flags.iter().map(|(name, value)| format!("--{name}={value}")).collect();
        let endpoint = format!("--agent_endpoint={endpoint}");
        for database in
            [&["--check", "--bmdb_eat_my_data"][..], &["--bmdb_url=postgres://user@127.0.0.1:1/bmdb"]]
        {
            let arguments = own.iter().map(String::as_str).chain([endpoint.as_str()]);
            let reported = place.run(arguments.chain(database.iter().copied()))?;
            let warned = reported.stderr.contains("--agent_listen_address 0.0.0.0:8443 accepts IPv4 alone");
            assert_eq!(warned, expected, "{endpoint} {database:?}: {reported:?}");
        }
    }
    Ok(())
}

#[test]
fn every_flag_that_the_documents_name_exists() {
    let mut known = String::new();
    let shepherd = env!("CARGO_BIN_EXE_shepherd");
    for arguments in
        [&["--help"][..], &["demo", "--help"], &["simulator", "--help"], &["simulator", "fault", "--help"]]
    {
        known.push_str(&help(shepherd, arguments).unwrap());
    }
    for arguments in [&["--help"][..], &["enroll", "--help"], &["run", "--help"]] {
        known.push_str(&help(env!("CARGO_BIN_EXE_roleserver"), arguments).unwrap());
    }
    for arguments in [
        &["--help"][..],
        &["options"],
        &["get", "machines", "--help"],
        &["cluster", "rotate-authority", "--help"],
        &["cluster", "scale", "--help"],
        &["hold", "--help"],
        &["retire", "--help"],
        &["timeline", "--help"],
        &["tokens", "create", "--help"],
    ] {
        known.push_str(&help(env!("CARGO_BIN_EXE_shepherdctl"), arguments).unwrap());
    }
    let flags = |text: &str| -> Vec<String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let words = text
            .split(|c: char| !is_part(c))
            .filter(|word| word.starts_with("--") && !word.trim_matches('-').is_empty());
        words
            .map(|word| word.trim_end_matches('-').replace("--", "\0").replace('-', "_").replace('\0', "--"))
            .collect()
    };
    let known = flags(&known);
    // Flags of other programs.
    let foreign = ["--system", "--home", "--shell", "--now", "--pwprompt", "--owner", "--create_home"];
    for document in ["README.md", "docs/deploying.md", "docs/keys.md"] {
        let named = flags(&source::read(&source::root().join(document)).unwrap());
        assert!(!named.is_empty(), "{document} names no flag");
        for flag in named.iter().filter(|flag| !foreign.contains(&flag.as_str())) {
            assert!(known.contains(flag), "{document} names {flag}, which no program has");
        }
    }
}

/// Who runs a program has no checkout: messages refer to `shepherdctl explain`, and that has what they name.
#[test]
fn messages_refer_to_the_documentation_by_a_command() -> TestResult {
    /// The field of the API that names the page of an issue.
    const PAGE_OF_AN_ISSUE: &str = "docs/issues/{}.md";
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-/.#{}".contains(c);
    let (mut topics, mut wrong) = (0, Vec::new());
    for path in source::rust_files()?.iter().filter(|path| !path.ends_with("tests.rs")) {
        let text = source::read(path)?;
        let program = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for (line, text) in source::take_apart(program).strings {
            let is_file = |word: &str| word.starts_with("docs/") && word.contains(".md");
            let mut words = text.split(|c| !is_part(c)).filter(|word| *word != PAGE_OF_AN_ISSUE);
            if words.any(is_file) {
                wrong.push(format!("{}:{line}: {text}", path.display()));
            }
            // Two spaces precede the description of an example without a topic.
            for topic in text.split("shepherdctl explain").skip(1).filter(|rest| !rest.starts_with("  ")) {
                let topic = topic.trim_start_matches(|c: char| c == '\\' || c.is_whitespace());
                let topic = topic.split(|c| !is_part(c)).next().unwrap_or_default().trim_end_matches('.');
                topics += 1;
                if !topic.is_empty() && !topic.starts_with('{') && find_topics(topic).is_empty() {
                    wrong.push(format!("{}:{line}: nothing explains {topic}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(topics > 10, "{topics}");
    Ok(())
}

/// Errors, help texts and comments refer to pages of the documentation.
#[test]
fn every_page_that_the_tree_names_exists() -> TestResult {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-/.".contains(c);
    let mut pages = BTreeSet::new();
    for (folder, extension) in [
        ("src", "rs"),
        ("crates", "rs"),
        ("proto", "proto"),
        ("sql", "sql"),
        ("migrations", "sql"),
        ("contrib", "yml"),
        ("docs", "md"),
    ] {
        for path in source::files(folder, extension)? {
            for word in source::read(&source::root().join(path))?.split(|c| !is_part(c)) {
                // Other tests check relative links, and the page of each kind of issue.
                let page = word.trim_end_matches(|c| !char::is_ascii_alphanumeric(&c));
                let is_page = Path::new(page).extension().is_some_and(|extension| extension == "md");
                if page.starts_with("docs/") && is_page && page != "docs/issues/ID.md" {
                    pages.insert(page.to_owned());
                }
            }
        }
    }
    assert!(pages.len() > 5, "{pages:?}");
    pages.retain(|page| !source::root().join(page).is_file());
    assert!(pages.is_empty(), "these do not exist: {pages:?}");
    Ok(())
}

/// `make readme` follows the README on a fresh clone, which takes too long for a test. This test checks that it can
/// evaluate each of the README's commands.
#[test]
fn every_command_of_the_readme_can_be_judged() {
    let list = |root: &Path| {
        // Read by bash rather than executed: see `write_program`.
        let mut command = Command::new("bash");
        command.arg(root.join("tools/readme-check")).arg("--list").stdin(Stdio::null());
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (known, text) = list(source::root());
    assert!(known && text.lines().count() > 10, "{text}");

    let place = Place::new().unwrap();
    std::fs::create_dir(place.path("tools")).unwrap();
    std::fs::copy(source::root().join("tools/readme-check"), place.path("tools/readme-check")).unwrap();
    let readme = source::read(&source::root().join("README.md")).unwrap();
    for (promise, expected) in [
        ("\n```\nshepherd demo --magic\n```\n", "s  shepherd demo --magic: "),
        ("\nThen run `make money`.\n", "s  make money: "),
        ("\n| become rich | `tools/mint` |\n", "s  tools/mint: "),
    ] {
        place.write("README.md", format!("{readme}{promise}")).unwrap();
        let (known, text) = list(&place.path(""));
        // The number of seconds is between the two, and a busy host's is above 0.
        let refused = text.lines().any(|line| line.starts_with("not ok ") && line.contains(expected));
        assert!(!known && refused, "{promise}: {text}");
    }
}
