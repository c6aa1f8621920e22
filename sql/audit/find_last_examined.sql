-- Find the last of the rows that list.sql looks at. There is none if it looks at all rows that are left.
SELECT at, audit_id FROM audit
WHERE (at, audit_id) < ($1, $2) AND at >= $3
ORDER BY at DESC, audit_id DESC
LIMIT 1
OFFSET $4
