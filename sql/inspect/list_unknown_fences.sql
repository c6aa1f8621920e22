-- List what read_unknown_fence.sql reads, for each of these machines that ever reported an unknown fence.
SELECT DISTINCT ON (h.machine_id) h.machine_id AS "machine_id!", h.at AS "at!", h.fence AS "fence!",
       d.fence AS "issued_fence!"
FROM history h
JOIN machine_due d ON d.machine_id = h.machine_id AND d.lane = 'access'
WHERE h.machine_id = ANY ($1) AND h.event = 'NewerFence' AND h.fence IS NOT NULL
ORDER BY h.machine_id, h.fence DESC
