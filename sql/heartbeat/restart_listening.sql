-- Record that this shard starts to listen. The fleet counts as listened to without a gap for as long as the
-- listeners that still exist have listened: a shepherd that starts as another one stops causes no gap.
INSERT INTO fleet_listening (shard, since, last_commit)
SELECT $1::INT8,
       coalesce((SELECT min(l.since) FROM fleet_listening l
                  WHERE l.last_commit > clock_timestamp() - p.listening_gap_ms * INTERVAL '1 millisecond'),
                clock_timestamp()),
       clock_timestamp()
FROM policy p
ON CONFLICT (shard) DO UPDATE SET since = EXCLUDED.since, last_commit = EXCLUDED.last_commit
