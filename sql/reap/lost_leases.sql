-- Named leases that closed sessions still hold.
SELECT l.kind, l.name
FROM named_lease l
JOIN session s ON s.session_id = l.lease_session AND s.closed_at IS NOT NULL
ORDER BY l.kind, l.name LIMIT 100
