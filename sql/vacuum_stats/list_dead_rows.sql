-- List the numbers of dead rows of each table, as PostgreSQL counts them: row versions that no transaction
-- needs any more and that vacuum has not removed yet.
SELECT t.relname::TEXT AS "name!", t.n_dead_tup AS "dead!"
FROM pg_stat_user_tables t
WHERE t.relname = ANY ($1::TEXT[]) AND pg_table_is_visible(t.relid)
