-- Told once of each machine until the fences are lifted beyond it, however many hear of it and however
-- often. Sent under the machine's lock.
INSERT INTO history (machine_id, at, event, fence, detail)
SELECT $1, clock_timestamp(), 'NewerFence', $2, $3
WHERE NOT EXISTS (
    SELECT 1 FROM history h
    WHERE h.machine_id = $1 AND h.event = 'NewerFence'
      AND h.fence > (SELECT d.fence FROM machine_due d WHERE d.machine_id = $1 AND d.lane = 'access') - $4::INT8)
RETURNING fence
