-- Acquire a named lease that is free, or acquire it again for the session that already has it without
-- knowing, because the response to its first attempt was lost. The reaper frees the leases of closed
-- sessions.
INSERT INTO named_lease AS l (kind, name, lease_session, fence, taken_at)
SELECT $2, $3, s.session_id, 1, clock_timestamp()
FROM (SELECT session_id FROM session
      WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
      FOR KEY SHARE) s
ON CONFLICT (kind, name) DO UPDATE
SET lease_session = EXCLUDED.lease_session, fence = l.fence + 1, taken_at = EXCLUDED.taken_at
WHERE l.lease_session IS NULL OR l.lease_session = EXCLUDED.lease_session
RETURNING l.fence
