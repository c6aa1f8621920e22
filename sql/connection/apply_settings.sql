-- Set settings of this session. A pooler may have dropped the connection options that requested them.
SELECT set_config(s.name, s.value, FALSE) AS "value!"
FROM unnest($1::TEXT[], $2::TEXT[]) s (name, value)
