-- Record that this shard still listens. No row matches if the shard has not committed for longer than the
-- listening gap.
UPDATE fleet_listening l
SET last_commit = clock_timestamp()
FROM policy p
WHERE l.shard = $1 AND l.last_commit > clock_timestamp() - p.listening_gap_ms * INTERVAL '1 millisecond'
