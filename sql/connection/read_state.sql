-- Read what a session is: whether its transactions are read-only, the level of their isolation, the encoding of the
-- database, the schema that new tables would be created in, and the one that has our tables, if there are any.
SELECT current_setting('transaction_read_only') = 'on', current_setting('transaction_isolation'),
       current_setting('server_encoding'), current_schema()::TEXT,
       (SELECT n.nspname::TEXT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = to_regclass('machine'))
