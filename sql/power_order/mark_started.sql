-- Record the intent of a power order that starts. The first intent stays: it may have been carried out
-- already.
UPDATE machine_power_order SET intent_id = $2, begun_at = clock_timestamp()
WHERE machine_id = $1 AND intent_id IS NULL
