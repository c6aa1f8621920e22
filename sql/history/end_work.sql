INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id, detail)
VALUES ($1, clock_timestamp(), $2, 'end', $3, $4, $5, $6, $7)
