//! Names that shells offer: from the API of the context, within a time limit, and otherwise none.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::json;
use shepherd::cli::client::contexts::{Context, Contexts};
use shepherd::cli::completions::complete_line;
use shepherd::cli::completions::names::NameEnvironment;
use shepherd::cli::completions::shell::CompletionShell;
use shepherd::cli::completions::words::CompletionRequest;
use shepherd::model::access::AccessRole;
use tokio::net::{TcpListener, TcpSocket};

use crate::api::command_line::Operator;
use crate::api::same_answers::populate;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::until;
use crate::harness::program::PATIENCE;
use crate::harness::shell_completion::{installed_shells, offered};

/// Three machines of one provider, of which the first is retired, and that provider.
const FLEET: [&str; 4] = [
    "INSERT INTO machine SELECT md5('m' || n)::UUID, clock_timestamp() FROM generate_series(1, 3) n",
    "INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
     SELECT md5('m' || n)::UUID, 'sim', 'sim-' || n, '192.0.2.1', 'Running', clock_timestamp(), FALSE
     FROM generate_series(1, 3) n",
    "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
         phase_since, rules_version, policy_version, version, fence, losses)
     SELECT md5('m' || n)::UUID, lane, 'sim', 1, 0, FALSE, 'newly provided', '',
            CASE WHEN n = 1 THEN 'Retired' ELSE 'New' END, clock_timestamp(), 1, 0, 0, 0, 0
     FROM generate_series(1, 3) n, (VALUES ('access'), ('observe')) l (lane)",
    "INSERT INTO provider_state (provider, kind, listed_at, machines) VALUES ('sim', 'simulated', clock_timestamp(), 3)",
];

/// An operator of a fleet with objects of each kind. The current context is `home`.
async fn start_operator(api: &Api) -> anyhow::Result<Operator<'_>> {
    populate(api).await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    Ok(kim)
}

/// Saves a context that differs from `home`.
fn add_context(kim: &Operator<'_>, name: &str, change: impl FnOnce(&mut Context)) -> anyhow::Result<()> {
    let mut contexts = Contexts::read(&kim.contexts())?;
    let mut context = contexts.contexts.get("home").context("the context")?.clone();
    change(&mut context);
    contexts.contexts.insert(name.to_owned(), context);
    Ok(contexts.write(&kim.contexts())?)
}

/// What fish would offer for the last word of a line, one candidate a line.
async fn complete(environment: &NameEnvironment, line: &str, limit: Duration) -> anyhow::Result<String> {
    let arguments = ["shepherdctl", "--"].into_iter().chain(line.split(' ')).map(OsString::from);
    let request = CompletionRequest::from_arguments(CompletionShell::Fish, arguments, None, None);
    Ok(complete_line(&request.context("a request")?, environment, limit).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_those_of_the_api_within_the_time_limit() -> TestResult {
    let api = Api::start("api_completion").await?;
    let kim = start_operator(&api).await?;
    let home = NameEnvironment { contexts_path: Some(kim.contexts()), ..NameEnvironment::default() };
    let database = NameEnvironment { has_database: true, ..home.clone() };
    for (line, expected) in [
        ("shepherdctl hold sim", "sim-2\nsim-3"),
        ("shepherdctl hold sim-2 sim/", "sim/sim-2\nsim/sim-3"),
        ("shepherdctl --context home why sim-3", "sim-3"),
        ("shepherdctl why no-such", ""),
        ("shepherdctl get clusters a", "ams"),
        ("shepherdctl cluster scale a", "ams"),
        ("shepherdctl describe provider s", "sim"),
        ("shepherdctl get machines --provider=s", "--provider=sim"),
        ("shepherdctl describe token adm", "admin's"),
        ("shepherdctl describe artefact o", "one"),
        ("shepherdctl update pause u", "u1"),
    ] {
        assert_eq!(complete(&home, line, PATIENCE).await?, expected, "{line}");
        assert_eq!(complete(&home, line, Duration::ZERO).await?, "", "no time is left: {line}");
        if !line.contains("--context") {
            assert_eq!(complete(&database, line, PATIENCE).await?, "", "the database is used: {line}");
        }
    }
    // What needs no call needs no time.
    for (line, expected) in [
        ("shepherdctl contexts use h", "home"),
        ("shepherdctl prioritize sim-2 urg", "urgent"),
        ("shepherdctl get machines --phase=Needs", "--phase=NeedsHuman"),
    ] {
        assert_eq!(complete(&database, line, Duration::ZERO).await?, expected, "{line}");
    }
    drop(kim);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shells_offer_names_while_the_api_answers_and_nothing_otherwise() -> TestResult {
    let api = Api::start("api_completion_shells").await?;
    let kim = start_operator(&api).await?;
    // Nobody listens on one of the ports, and nobody answers on the other.
    let gone = TcpSocket::new_v4()?;
    gone.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    for (name, address) in [("gone", gone.local_addr()?), ("silent", silent.local_addr()?)] {
        add_context(&kim, name, |context| context.servers = vec![address.to_string()])?;
    }
    let (admin, revoked) =
        (api.key(AccessRole::Admin, &[], None).await?, api.key(AccessRole::Admin, &[], None).await?);
    let revoke = json!({ "credentialId": revoked.id, "order": order("it was lost", "revoked") });
    api.call(Some(&admin.token), "Credentials/Revoke", revoke).await?.ok()?;
    let token = kim.home.path().join("revoked.token");
    fs::write(&token, &revoked.token)?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    add_context(&kim, "revoked", |context| context.token_path = token)?;
    add_context(&kim, "without-token", |context| context.token_path = PathBuf::from("/no/such/token"))?;

    for shell in installed_shells() {
        // The time limit of the program is short, and this host may be busy.
        let expected = BTreeSet::from(["sim-2".to_owned(), "sim-3".to_owned()]);
        until("the shell offers the machines", || async {
            Ok(offered(shell, kim.home.path(), &["shepherdctl", "hold", "sim"])? == expected)
        })
        .await?;
        for context in ["gone", "silent", "revoked", "without-token", "nowhere"] {
            let words = ["shepherdctl", "--context", context, "hold", "sim"];
            assert_eq!(offered(shell, kim.home.path(), &words)?, BTreeSet::new(), "{shell}, {context}");
        }
    }
    for context in ["gone", "silent", "revoked", "without-token", "nowhere"] {
        let words = ["--", "shepherdctl", "--context", context, "hold", "sim"];
        let mut command = tokio::process::Command::from(kim.command(&words));
        let output = command.env("COMPLETE", "bash").output().await?;
        let found = (output.status.code(), output.stdout.len(), output.stderr.len());
        assert_eq!(found, (Some(0), 0, 0), "{context}: {output:?}");
    }
    drop(kim);
    Ok(api.stop().await?)
}
