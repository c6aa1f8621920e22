-- List the columns of tag tables, which are recognised by their shape: named machine_…, keyed by machine_id
-- alone. The catalogue itself is read, because information_schema hides constraints from a role that may only
-- read.
SELECT c.relname::TEXT AS "table_name!", a.attname::TEXT AS "column_name!",
       format_type(a.atttypid, a.atttypmod) AS "column_type!"
FROM pg_class c
JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary AND i.indnkeyatts = 1
JOIN pg_attribute k ON k.attrelid = c.oid AND k.attnum = i.indkey[0] AND k.attname = 'machine_id'
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relname LIKE 'machine\_%' AND c.relkind IN ('r', 'p') AND pg_table_is_visible(c.oid)
ORDER BY c.relname, a.attnum
