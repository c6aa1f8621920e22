-- List the newest history rows of a machine up to a moment, newest first, skipping those that were already
-- returned.
--
-- The conditions and the order are those of the index on (machine_id, at). With an equality of the machine, the planner
-- may read the rows of all machines through the index on time instead, and all of them may be newer than the machine's.
SELECT h.at, h.event, h.lane, h.fence, h.process, h.session_id, h.detail, s.component AS "component?",
       s.runtime_info AS "runtime_info?"
FROM history h
LEFT JOIN session s ON s.session_id = h.session_id
WHERE h.machine_id >= $1 AND (h.machine_id, h.at) <= ($1, COALESCE($2, 'infinity'::TIMESTAMPTZ))
ORDER BY h.machine_id DESC, h.at DESC, h.fence DESC NULLS LAST, h.edge NULLS LAST, h.event, h.detail
LIMIT $3
OFFSET $4
