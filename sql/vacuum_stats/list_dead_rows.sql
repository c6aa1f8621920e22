-- Versions of rows that nobody needs any more and vacuum has not removed yet, as PostgreSQL counts them.
SELECT t.relname::TEXT AS "name!", t.n_dead_tup AS "dead!"
FROM pg_stat_user_tables t
WHERE t.relname = ANY ($1::TEXT[]) AND pg_table_is_visible(t.relid)
