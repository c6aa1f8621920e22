-- Every cluster, or the one of that name.
SELECT c.cluster_id, c.name, c.control_plane, c.workers, c.selector, c.roles, c.approval, c.version, c.created_at,
       c.created_by, c.deleting_at, c.deleting_by, c.founded_at, c.ca_certificate, c.curators, c.looked_at, c.seen_at,
       c.waits, c.settled, c.voters, c.voters_reached
FROM cluster c
WHERE $1::TEXT IS NULL OR c.name = $1
ORDER BY c.name
