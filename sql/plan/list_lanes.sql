-- List the due rows of a page of machines, as far as their future follows from them, without locks.
SELECT machine_id, lane, process, ready_at, timer, not_before, phase_index, phase_since,
       lease_session IS NOT NULL AS "working!"
FROM machine_due
WHERE machine_id = ANY ($1)
ORDER BY machine_id, lane
