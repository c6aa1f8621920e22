-- As free_leases.sql, for a database that cannot skip locked rows: one lease, if nobody has its row
-- locked.
WITH lost AS MATERIALIZED (
    SELECT l.kind, l.name, l.lease_session
    FROM named_lease l
    JOIN session s ON s.session_id = l.lease_session AND s.closed_at IS NOT NULL
    WHERE l.kind = $1 AND l.name = $2
    FOR UPDATE OF l NOWAIT)
UPDATE named_lease l
SET lease_session = NULL
FROM lost
WHERE l.kind = lost.kind AND l.name = lost.name AND l.lease_session = lost.lease_session
RETURNING l.kind, l.name
