-- Which release a machine was last asked to become and did. It outlives the next order, whatever comes of that: a takeover
-- leaves such a machine what it runs.
ALTER TABLE machine_release_report ADD COLUMN became BYTEA CHECK (became IS NULL OR length(became) = 32);
UPDATE machine_release_report r SET became = r.sha256
FROM release_order o
WHERE o.machine_id = r.machine_id AND o.sha256 = r.sha256 AND o.generation <= r.generation AND r.error IS NULL;
