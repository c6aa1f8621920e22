-- Count the open sessions of each component.
SELECT component, count(*) AS "workers!"
FROM session
WHERE closed_at IS NULL
GROUP BY component
