-- Read how close the server is to limits at which it or its standbys stop: the age of the oldest transaction id and
-- multixact id of all its databases, whether WAL can be archived, its replication slots, the settings with which it
-- may lose commits, its version, and the size of this database. There is one row per slot, or one without a slot. Every role may read all of this. Only the list of
-- WAL files needs a right, and a column reports whether the role has it. The time of a failure stays when the server
-- archives no more.
WITH wal_end AS MATERIALIZED (
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS lsn),
oldest_transaction AS (
    SELECT d.datname, age(d.datfrozenxid) AS age FROM pg_database d ORDER BY age(d.datfrozenxid) DESC LIMIT 1),
oldest_multixact AS (
    SELECT d.datname, mxid_age(d.datminmxid) AS age FROM pg_database d ORDER BY mxid_age(d.datminmxid) DESC LIMIT 1)
SELECT t.datname::TEXT AS "transaction_database!", t.age::BIGINT AS "transaction_age!",
       current_setting('autovacuum_freeze_max_age')::BIGINT AS "transaction_freeze_age!",
       m.datname::TEXT AS "multixact_database!", m.age::BIGINT AS "multixact_age!",
       current_setting('autovacuum_multixact_freeze_max_age')::BIGINT AS "multixact_freeze_age!",
       pg_size_bytes(current_setting('max_wal_size')) AS "max_wal!",
       current_setting('archive_mode') <> 'off'
           AND COALESCE(a.last_failed_time > COALESCE(a.last_archived_time, '-infinity'), FALSE) AS "is_archiving_failing!",
       s.slot_name::TEXT AS "slot?", COALESCE(s.active, FALSE) AS "is_active!", s.wal_status::TEXT AS "wal_status?",
       pg_wal_lsn_diff(w.lsn, s.restart_lsn)::BIGINT AS "retained?", s.safe_wal_size::BIGINT AS "margin?",
       has_function_privilege('pg_ls_waldir()', 'EXECUTE') AS "may_list_wal!",
       current_setting('server_version_num')::INT4 AS "version!", pg_database_size(current_database()) AS "database_bytes!",
       current_setting('fsync') AS "fsync!", current_setting('synchronous_commit') AS "commit!",
       COALESCE(current_setting('synchronous_standby_names', TRUE), '') AS "standbys!",
       COALESCE(current_setting('shepherd.throw_away', TRUE), 'off') = 'on' AS "is_thrown_away!"
FROM wal_end w CROSS JOIN oldest_transaction t CROSS JOIN oldest_multixact m CROSS JOIN pg_stat_archiver a
LEFT JOIN pg_replication_slots s ON TRUE
ORDER BY s.slot_name
