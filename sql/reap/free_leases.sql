UPDATE named_lease l
SET lease_session = NULL
FROM session s
WHERE s.session_id = l.lease_session AND s.closed_at IS NOT NULL
RETURNING l.kind, l.name
