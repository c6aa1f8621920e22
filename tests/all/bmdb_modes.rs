//! Each mode proves that it is one: the engine does everything it does, and the server's own record of
//! what it was sent shows which words were used.

use shepherd::bmdb::claim::Claimed;
use shepherd::model::process::Process;
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

use crate::bmdb_kit::{Kit, SOON, Shepherd, hold, until};
use crate::harness::aloud::TestResult;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_of_this_run_is_what_the_server_was_sent() -> TestResult {
    let kit = Kit::new("mode_proof").await?;
    let machines = kit.provided(4, "rack").await?;
    let isolation: String =
        sqlx::query_scalar("SHOW default_transaction_isolation").fetch_one(kit.bmdb.pool()).await?;
    assert_eq!(isolation, kit.database.mode().isolation());

    // Everything that has two forms, driven through the engine as a loop does it.
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let mut sessions = Vec::new();
    for _ in 0..4 {
        sessions.push(shepherd.session().await?);
    }
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    claimer.probe().await?;
    claimer.rearm_timers().await?;
    let claimed = claimer.claim(&sessions).await?;
    let Claimed::Work(work) = claimed else { panic!("{claimed:?}") };
    for (number, item) in work.into_iter().enumerate() {
        match number {
            0 => item.finish(Vec::new(), "done").await?,
            1 => item.fail(Vec::new(), "no route", None).await?,
            _ => item.cancel("not now").await?,
        }
    }
    kit.change(machines[0], vec![hold("disk swap")]).await?;
    kit.change(machines[0], vec![shepherd::bmdb::change::FactChange::HoldCleared]).await?;
    until("the sessions are renewed", async || {
        Ok(kit
            .count("SELECT count(*) FROM session WHERE deadline > started_at + INTERVAL '20.5 seconds'")
            .await?
            == 4)
    })
    .await?;
    kit.overdue(&sessions[0]).await?;
    kit.bmdb.reap().await?;
    kit.sweep().await?;

    let options: PgConnectOptions = kit.database.server_url().parse()?;
    let mut server = options.connect().await?;
    let name = kit.database.url().parse::<PgConnectOptions>()?;
    let sent = |word: &'static str| {
        sqlx::query_as::<_, (i64, Option<String>)>(
            "SELECT coalesce(sum(calls), 0)::INT8, min(query) FROM pg_stat_statements s
             JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = $1 AND query !~ 'pg_stat_statements'
               AND regexp_replace(query, '--[^\n]*', '', 'g') ~* $2",
        )
        .bind(name.get_database().map(str::to_owned))
        .bind(word)
    };
    for (word, allowed) in [
        (r"skip\s+locked", kit.database.mode().has_skip_locked_and_notify()),
        (r"\m(pg_notify|notify|listen)\M", kit.database.mode().has_skip_locked_and_notify()),
    ] {
        let (calls, example) = sent(word).fetch_one(&mut server).await?;
        assert_eq!(calls > 0, allowed, "{word}: {calls} times, such as {example:?}");
    }
    // The proof proves nothing if the record is empty.
    let (calls, _) = sent(r"for\s+key\s+share").fetch_one(&mut server).await?;
    assert!(calls > 0, "the server recorded nothing of this database");
    Ok(shepherd.stop().await?)
}

/// What holds for one database must hold for all that this run has used so far.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_database_of_this_run_was_sent_words_of_another_mode() -> TestResult {
    let kit = Kit::new("mode_of_all").await?;
    if kit.skip_locked() {
        assert_eq!(crate::bmdb_kit::dialect(kit.database.mode()), kit.bmdb.dialect());
    }
    let options: PgConnectOptions = kit.database.server_url().parse()?;
    let mut server = options.connect().await?;
    let wrong: Vec<String> = sqlx::query_scalar(
        "SELECT query FROM pg_stat_statements
         WHERE query !~ 'pg_stat_statements'
           AND regexp_replace(query, '--[^\n]*', '', 'g') ~* 'skip\\s+locked|pg_notify'",
    )
    .fetch_all(&mut server)
    .await?;
    assert!(kit.skip_locked() || wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
