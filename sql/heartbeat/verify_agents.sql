-- Find which of these pairs of machine and key belong together.
SELECT a.machine_id, a.public_key
FROM unnest($1::UUID[], $2::BYTEA[]) AS n (machine_id, public_key)
JOIN machine_agent_started a ON a.machine_id = n.machine_id AND a.public_key = n.public_key
