-- As newer_fence.sql, of each of these machines that was ever told of.
SELECT DISTINCT ON (h.machine_id) h.machine_id AS "machine_id!", h.at AS "at!", h.fence AS "fence!", d.fence AS "given!"
FROM history h
JOIN machine_due d ON d.machine_id = h.machine_id AND d.lane = 'access'
WHERE h.machine_id = ANY ($1) AND h.event = 'NewerFence' AND h.fence IS NOT NULL
ORDER BY h.machine_id, h.fence DESC
