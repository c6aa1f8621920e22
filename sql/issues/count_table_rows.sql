-- List the numbers of dead and live rows of each table, as PostgreSQL counts them.
SELECT t.relname::TEXT AS "name!", t.n_dead_tup AS "dead!", t.n_live_tup AS "live!"
FROM pg_stat_user_tables t
WHERE t.relname = ANY ($1::TEXT[]) AND pg_table_is_visible(t.relid)
