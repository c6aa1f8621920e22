-- List roll-outs: those under way first, then the newest first.
SELECT roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at, created_by, reason, paused,
       ended_at, ended
FROM roll_out
WHERE $1::TEXT IS NULL OR roll_out_id = $1
ORDER BY ended_at IS NOT NULL, created_at DESC, roll_out_id
