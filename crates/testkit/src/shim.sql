-- The test clock. With `shim` in front of pg_catalog in the search path, now() and clock_timestamp()
-- mean these functions, and a test moves the database's time by setting a sequence.
--
-- A sequence and not a table: it is outside transactions, so that moving the clock neither waits for
-- one nor makes a SERIALIZABLE one fail. STABLE, so that plans use indexes as they do without it.
CREATE SCHEMA shim;
CREATE SEQUENCE shim.offset_microseconds MINVALUE -9000000000000000 START 0;
SELECT setval('shim.offset_microseconds', 0);

CREATE FUNCTION shim.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.now()
         + pg_catalog.pg_sequence_last_value('shim.offset_microseconds'::regclass) * interval '1 microsecond'
$$;

CREATE FUNCTION shim.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.clock_timestamp()
         + pg_catalog.pg_sequence_last_value('shim.offset_microseconds'::regclass) * interval '1 microsecond'
$$;
