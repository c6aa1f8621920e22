-- Taken when it is free, or when the session that held it is over.
INSERT INTO named_lease AS l (kind, name, lease_session, fence, taken_at)
SELECT $2, $3, s.session_id, 1, clock_timestamp()
FROM (SELECT session_id FROM session
      WHERE session_id = $1 AND closed_at IS NULL AND deadline > clock_timestamp()
      FOR KEY SHARE) s
ON CONFLICT (kind, name) DO UPDATE
SET lease_session = EXCLUDED.lease_session, fence = l.fence + 1, taken_at = EXCLUDED.taken_at
WHERE l.lease_session IS NULL
RETURNING l.fence
