-- Find the last of the rows that list_of_machine.sql looks at, as find_last_examined.sql does.
SELECT at, audit_id FROM audit
WHERE machine_id = $5 AND at <= $1 AND (at, audit_id) < ($1, $2) AND at >= $3
ORDER BY at DESC, audit_id DESC
LIMIT 1
OFFSET $4
