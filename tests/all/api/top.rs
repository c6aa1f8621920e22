//! The page of `shepherdctl top`: on a terminal, in a file, and for a user who may see a part of the fleet.

use anyhow::Context as _;
use serde_json::Value;
use shepherd::cli::client::contexts::Contexts;

use crate::api::Api;
use crate::api::command_line::{Operator, read_stdout};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::screen::Screen;

/// Compares the screen with its golden file, with masks for what differs from run to run.
fn golden(name: &str, text: &str, servers: &[String]) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../golden/top");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    for server in servers {
        settings.add_filter(&server.replace('.', r"\."), "[server]");
    }
    for (pattern, mask) in [
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "[uuid]"),
        (r"\b[0-9a-f]{8}  (rack/)?\S+…?", "[uuid]  [name]"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", "[moment]"),
        (r"\b(\d+(ms|[smhd]))+\b", "[span]"),
        (r"\b(\[span\] ago|just now)", "[span] ago"),
        // Columns are as wide as the values that were masked in them.
        (r"(\S) {2,}", "$1  "),
    ] {
        settings.add_filter(pattern, mask);
    }
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// A fleet of two providers with an example of everything that a page shows.
async fn populate(api: &Api) -> anyhow::Result<()> {
    for _ in 0..5 {
        provided(&api.pool).await?;
    }
    for statement in [
        "UPDATE machine_due SET phase_index = 'Ready' WHERE machine_id IN
             (SELECT machine_id FROM machine ORDER BY machine_id LIMIT 3)",
        "UPDATE machine_due SET phase_index = 'NeedsHuman', provider = 'shed' WHERE machine_id IN
             (SELECT machine_id FROM machine ORDER BY machine_id DESC LIMIT 1)",
        "UPDATE machine_provided SET provider = 'shed' WHERE machine_id IN
             (SELECT machine_id FROM machine ORDER BY machine_id DESC LIMIT 1)",
        "INSERT INTO session (session_id, process_id, component, runtime_info, interval_ms, started_at, deadline)
         SELECT ('00000000-0000-0000-0000-00000000000' || n)::UUID, gen_random_uuid(),
                CASE WHEN n < 3 THEN 'initializer' ELSE 'recoverer' END, '{\"host\": \"rack1\", \"pid\": 7}', 1000,
                clock_timestamp(), clock_timestamp() + n % 2 * INTERVAL '1 d' FROM generate_series(1, 3) n",
        "INSERT INTO work SELECT machine_id, 'access', ('00000000-0000-0000-0000-00000000000' || n)::UUID,
                CASE WHEN n < 3 THEN 'AgentStart' ELSE 'Recovery' END, n, clock_timestamp() - n * INTERVAL '1 h'
         FROM (SELECT machine_id, row_number() OVER (ORDER BY machine_id) AS n FROM machine LIMIT 3) m",
        // One per second, within the last minute. Each began two seconds before it ended.
        "WITH c AS MATERIALIZED (SELECT clock_timestamp() AS now)
         INSERT INTO history (machine_id, at, event, edge, lane, fence, process)
         SELECT machine_id, now - n * INTERVAL '1 s' - e * INTERVAL '2 s',
                CASE WHEN e = 1 THEN 'Started' WHEN n % 4 = 0 THEN 'Failed' ELSE 'Finished' END,
                CASE WHEN e = 1 THEN 'start' ELSE 'end' END, 'access', n, 'AgentStart'
         FROM c, (SELECT machine_id FROM machine ORDER BY machine_id LIMIT 1) m, generate_series(1, 8) n,
              generate_series(0, 1) e",
        "INSERT INTO fleet_sample (minute, taken_at, took_ms, counts)
         VALUES (date_trunc('minute', clock_timestamp()), clock_timestamp(), 5,
                 '{\"phases\": {\"Ready\": {\"machines\": 3, \"oldest_seconds\": 7200.0, \"over_deadline\": 0},
                                \"New\": {\"machines\": 1, \"oldest_seconds\": 600.0, \"over_deadline\": 1}},
                   \"due\": {\"AgentStart\": {\"machines\": 4, \"oldest_seconds\": 30.0}}}')",
        "INSERT INTO loop_pause VALUES ('updater', 'shed', 'its API is slow today', 'kim', clock_timestamp(), NULL)",
        "INSERT INTO brake VALUES ('recovery', 'rack', 'brake: 5 of 9 machines of provider rack fell silent',
             clock_timestamp() - INTERVAL '3 m', clock_timestamp())",
    ] {
        sqlx::query(statement).execute(&api.pool).await.with_context(|| statement.to_owned())?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_on_a_terminal_stays_with_who_answers_and_leaves_the_terminal_as_it_was() -> TestResult {
    let api = Api::start("api_top").await?;
    populate(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (other, stop) = api.another().await?;
    let servers = [other.local_addr.to_string(), api.server.local_addr.to_string()];
    kim.reach(&[other.local_addr, api.server.local_addr])?;

    let top = || Screen::start(&kim.command(&["top", "--interval", "1s"]), 40, 110);
    let mut screen = top()?;
    // The last row is drawn last: a page that has it is drawn whole.
    let last_row = "initializer  rack1  works";
    let page = screen.until(&["Machines by phase", last_row, "q quit", &servers[0]]).await?;
    golden("page", &page, &servers);

    // A change appears on the page by itself.
    provided(&api.pool).await?;
    screen.until(&["6 machines"]).await?;
    // The page also updates after the server that it queried has stopped.
    stop.cancel();
    other.wait_until_stopped().await;
    screen.until(&[&servers[1], "q quit", "6 machines"]).await?;
    provided(&api.pool).await?;
    screen.until(&["7 machines"]).await?;

    let terminated = top()?;
    terminated.until(&["7 machines"]).await?;
    rustix::process::kill_process(terminated.pid()?, rustix::process::Signal::TERM)?;
    let (status, text, restored) = terminated.ended().await?;
    assert!(status.code() == Some(143) && restored, "by SIGTERM: {status}\n{text}");
    assert!(text.contains("nothing was changed"), "{text}");
    screen.types(b"q")?;
    let (status, text, restored) = screen.ended().await?;
    assert!(status.success() && restored, "by q: {status}\n{text}");
    let mut interrupted = top()?;
    interrupted.until(&["7 machines"]).await?;
    interrupted.types(b"\x03")?;
    let (status, text, restored) = interrupted.ended().await?;
    assert!(status.code() == Some(130) && restored, "by Ctrl-C: {status}\n{text}");
    let hung_up = top()?;
    hung_up.until(&["7 machines"]).await?;
    rustix::process::kill_process(hung_up.pid()?, rustix::process::Signal::HUP)?;
    let (status, text, restored) = hung_up.ended().await?;
    assert!(status.code() == Some(129) && restored, "by SIGHUP: {status}\n{text}");

    // A user with a revoked token sees no old page.
    let refused = top()?;
    refused.until(&["7 machines"]).await?;
    sqlx::query("UPDATE access_credential SET revoked_at = clock_timestamp(), revoked_by = 'kim'")
        .execute(&api.pool)
        .await?;
    let (status, text, restored) = refused.ended().await?;
    assert!(status.code() == Some(4) && restored, "{status}\n{text}");
    assert!(text.contains("revoked"), "{text}");
    Ok(api.stop().await?)
}

/// Adds a machine of another provider.
async fn add_machine(api: &Api, name: &str) -> anyhow::Result<()> {
    let machine = provided(&api.pool).await?;
    for statement in [
        "UPDATE machine_provided SET provider = 'ラック', provider_id = $2 WHERE machine_id = $1",
        "UPDATE machine_due SET provider = 'ラック' WHERE machine_id = $1 AND $2 <> ''",
    ] {
        sqlx::query(statement).bind(machine.0).bind(name).execute(&api.pool).await?;
    }
    Ok(())
}

/// Orders that the audit has.
async fn orders(api: &Api) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar("SELECT count(*) FROM audit").fetch_one(&api.pool).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_are_selected_and_sorted_and_filtered_and_explained_by_keys() -> TestResult {
    let api = Api::start("api_top_keys").await?;
    populate(&api).await?;
    let mut names = Vec::new();
    for name in ["サーバー-1", "サーバー-2", "サーバー-10"] {
        add_machine(&api, name).await?;
        names.push(format!("ラック/{name}"));
    }
    sqlx::query(
        "INSERT INTO cluster VALUES (gen_random_uuid(), 'ams', 3, 2, 'cpus>=4', '[\"web\"]', 'manual', 1,
             clock_timestamp(), 'kim', NULL, NULL, clock_timestamp(), 'ca', '[\"10.0.0.1:7835\"]',
             clock_timestamp(), clock_timestamp(), '[\"no machine is free\"]', FALSE, 3, 2)",
    )
    .execute(&api.pool)
    .await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    kim.reach(&[api.server.local_addr])?;
    let before = orders(&api).await?;
    let mut screen = Screen::start(&kim.command(&["top", "--context", "home"]), 40, 160)?;
    screen.until(&["Machines by phase", "tab machines"]).await?;
    screen.types(b"?")?;
    screen.until(&["This page gives no orders", "filter machines by a selector"]).await?;
    screen.types(b"?\t")?;
    // Names are sorted by value, as the server sorts them.
    let page = screen.until(&[&names[0], &names[1], &names[2], "enter why"]).await?;
    let place = |page: &str, name: &str| page.lines().position(|line| line.contains(&format!("{name} ")));
    assert!(place(&page, &names[1]) < place(&page, &names[2]), "{page}");

    // A wrong selector is a sentence and is not sent; a right one is sent.
    screen.types(b"/phase=Redy\r")?;
    screen.until(&["\"Redy\" is not a phase", "selector: phase=Redy_"]).await?;
    screen.types(b"\x1b")?;
    screen.until(&[&names[0], "enter why"]).await?;
    screen.types("/provider=\"ラック\"\r".as_bytes())?;
    let page = screen.until(&["Machines with provider=\"ラック\"", "> サーバー-1 ", "サーバー-10 "]).await?;
    assert!(!page.contains("rack/") && !page.contains("shed/"), "{page}");
    // By name, and the other way round.
    screen.types(b"S")?;
    screen.until(&["sorted on this page by NAME, greatest first", "> サーバー-10 "]).await?;
    screen.types(b"S")?;
    screen.until(&["sorted on this page by NAME", "> サーバー-1 "]).await?;
    screen.types(b"j")?;
    screen.until(&["> サーバー-2 "]).await?;
    // A new machine above it does not move the selection to another one.
    add_machine(&api, "サーバー-0").await?;
    screen.until(&["サーバー-0 ", "> サーバー-2 "]).await?;
    screen.types(b"\r")?;
    // What `why` prints.
    let why = read_stdout(&kim.run_command(&["why", &names[1]]).await?)?;
    let name = why.lines().next().context("its first line")?.to_owned();
    screen.until(&[&name, "has no role server yet", "esc back"]).await?;
    screen.types(b"\x1b")?;
    screen.until(&["> サーバー-2 "]).await?;

    screen.types(b"3")?;
    screen.until(&["Clusters", "> ams", "HEALTHY"]).await?;
    screen.types(b"\r")?;
    screen.until(&["Machines with cluster=ams", "no machine matches"]).await?;
    screen.types(b"\x1b")?;
    screen.until(&[&names[0], "shed/"]).await?;
    screen.types(b"q")?;
    let (status, text, restored) = screen.ended().await?;
    assert!(status.success() && restored, "by q: {status}\n{text}");
    assert_eq!(orders(&api).await?, before, "no key gives an order");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn colours_of_the_page_are_those_that_the_user_wants() -> TestResult {
    let api = Api::start("api_top_colors").await?;
    populate(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    kim.reach(&[api.server.local_addr])?;
    for (flags, no_color, is_colored) in [
        (&[][..], None, true),
        (&["--color", "never"], None, false),
        (&["--color", "always"], Some("1"), true),
        (&[], Some("1"), false),
    ] {
        let mut command = kim.command(&[&["top"][..], flags].concat());
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let mut screen = Screen::start(&command, 40, 110)?;
        screen.until(&["Machines by phase", "q quit"]).await?;
        assert_eq!(screen.has_colors(), is_colored, "{flags:?} {no_color:?}");
        screen.types(b"\t")?;
        screen.until(&["NeedsHuman", "enter why"]).await?;
        assert_eq!(screen.has_colors(), is_colored, "{flags:?} {no_color:?}");
        screen.types(b"q")?;
        screen.ended().await?;
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_is_printed_once_where_there_is_no_terminal_and_tells_no_more_than_one_may_see() -> TestResult {
    let api = Api::start("api_top_once").await?;
    populate(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let servers = [api.server.local_addr.to_string()];
    kim.reach(&[api.server.local_addr])?;
    golden("once", &read_stdout(&kim.run_command(&["top"]).await?)?, &servers);

    let json: Value = serde_json::from_str(&read_stdout(&kim.run_command(&["top", "-o", "json"]).await?)?)?;
    // The responses of the API that the page is made of.
    let loops = json["loops"]["loops"].as_array().context("loops")?;
    let initializer = loops.iter().find(|one| one["name"] == "initializer").context("the initializer")?;
    assert_eq!(initializer["workers"], "2", "{json}");
    let paces = json["statistics"]["throughput"].as_array().context("throughput")?;
    let pace = paces.iter().find(|one| one["process"] == "AgentStart").context("of the initializer")?;
    assert_eq!(pace["meanSeconds"], 2.0, "{json}");
    assert_eq!(json["work"]["work"].as_array().map(Vec::len), Some(3), "{json}");
    assert!(json["providers"]["brakes"].as_array().is_some_and(|brakes| brakes.len() == 1), "{json}");

    let token = kim.home.path().join("pat");
    let file = token.to_str().context("text")?;
    let limited =
        ["tokens", "create", "pat", "--role", "viewer", "--provider", "shed", "--output-file", file];
    kim.direct(&[&limited[..], &["--reason", "minds the shed"]].concat())?;
    let contexts = kim.home.path().join(".config/shepherd/contexts.toml");
    let mut known = Contexts::read(&contexts)?;
    known.contexts.get_mut("home").context("the context")?.token_path = token;
    known.write(&contexts)?;
    golden("of_a_provider", &read_stdout(&kim.run_command(&["top", "--once"]).await?)?, &servers);
    let limited = kim.json(&["top"])?;
    assert!(limited["notPermitted"].is_string() && limited["loops"].is_null(), "{limited}");
    assert!(limited["statistics"]["counts"].is_array(), "{limited}");
    Ok(api.stop().await?)
}
