-- Report whether a process has anything due for this shepherd, when the first due row is not for it (see
-- probe.sql). Each class is searched for its first row for this shepherd, whatever the size of the other
-- classes' backlog.
SELECT min(x.ready_at) <= now() AS "due!",
       GREATEST((EXTRACT(EPOCH FROM min(x.ready_at) - now()) * 1000)::INT8, 0) AS "wait_ms!"
FROM unnest($2::TEXT[]) AS p (provider)
CROSS JOIN generate_series(0, 2) AS c (priority)
CROSS JOIN generate_series(0, $4::INT8 - 1) AS b (bucket)
CROSS JOIN LATERAL (
    SELECT d.ready_at FROM machine_due d
    WHERE d.process = $1 AND d.provider = p.provider AND d.priority = c.priority AND d.bucket = b.bucket
      AND d.lease_session IS NULL AND (d.not_before IS NULL OR d.not_before <= now())
      AND d.rules_version <= $3
    ORDER BY d.ready_at
    LIMIT 1) x
HAVING min(x.ready_at) IS NOT NULL
