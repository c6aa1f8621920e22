-- List what the clusters of a page of machines last observed about them, without locks.
SELECT c.machine_id, k.name, c.health, c.voter, c.leaving, k.deleting_at IS NOT NULL AS "deleting!",
       k.founded_at IS NOT NULL AS "founded!", k.observed_at, k.voters, k.voters_reached
FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
WHERE c.machine_id = ANY ($1)
