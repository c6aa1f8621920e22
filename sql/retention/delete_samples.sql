-- Delete the fleet samples that are older than the age limit.
DELETE FROM fleet_sample s
WHERE s.minute = ANY (ARRAY(
    SELECT o.minute FROM fleet_sample o
    WHERE o.minute < now() - $1::INT8 * INTERVAL '1 millisecond'
    ORDER BY o.minute LIMIT $2))
