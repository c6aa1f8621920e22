INSERT INTO intent (intent_id, kind, provider, machine_id, session_id, fence, detail, begun_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp())
