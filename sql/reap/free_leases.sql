-- Free the named leases of closed sessions. A lease that another transaction has locked is left to the next
-- pass, and delays no other.
WITH lost_lease AS MATERIALIZED (
    SELECT l.kind, l.name, l.lease_session
    FROM named_lease l
    JOIN session s ON s.session_id = l.lease_session AND s.closed_at IS NOT NULL
    ORDER BY l.kind, l.name LIMIT 100
    FOR UPDATE OF l SKIP LOCKED)
UPDATE named_lease l
SET lease_session = NULL
FROM lost_lease
WHERE l.kind = lost_lease.kind AND l.name = lost_lease.name AND l.lease_session = lost_lease.lease_session
RETURNING l.kind, l.name
