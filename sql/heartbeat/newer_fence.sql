-- Told once of each machine and fence, however many hear of it and however often. Sent under the
-- machine's lock.
INSERT INTO history (machine_id, at, event, fence, detail)
SELECT $1, clock_timestamp(), 'NewerFence', $2, $3
WHERE NOT EXISTS (
    SELECT 1 FROM history WHERE machine_id = $1 AND event = 'NewerFence' AND fence = $2)
RETURNING fence
