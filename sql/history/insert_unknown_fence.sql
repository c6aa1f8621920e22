-- Record in history that an agent has seen a fence that this database never issued. This is recorded once per
-- machine until its fences are raised beyond it, however many shepherds observe it and however often. The
-- caller has locked the machine.
INSERT INTO history (machine_id, at, event, fence, detail)
SELECT $1, clock_timestamp(), 'NewerFence', $2, $3
WHERE NOT EXISTS (
    SELECT 1 FROM history h
    WHERE h.machine_id = $1 AND h.event = 'NewerFence'
      AND h.fence > (SELECT d.fence FROM machine_due d WHERE d.machine_id = $1 AND d.lane = 'access') - $4::INT8)
RETURNING fence
