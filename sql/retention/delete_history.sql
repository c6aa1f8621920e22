-- The oldest lines of history, as many as a batch holds and those of the same moment as the last. History
-- has no key that names a line, so they are found by time; both ends are given because the planner takes
-- a range with two ends for a small one, and goes by the index.
--
-- A newer fence is kept while fences are not lifted beyond it, because until then it holds orders back. There
-- is one such line of a machine at the most.
WITH expired_range AS MATERIALIZED (
    SELECT min(x.at) AS first, max(x.at) AS last
    FROM (SELECT h.at FROM history h
          WHERE h.at < now() - $1::INT8 * INTERVAL '1 millisecond'
            AND NOT (h.event = 'NewerFence' AND EXISTS (
                SELECT 1 FROM machine_due d
                WHERE d.machine_id = h.machine_id AND d.lane = 'access' AND h.fence > d.fence - $3::INT8))
          ORDER BY h.at LIMIT $2) x)
DELETE FROM history h
WHERE h.at BETWEEN (SELECT first FROM expired_range) AND (SELECT last FROM expired_range)
  AND NOT (h.event = 'NewerFence' AND EXISTS (
      SELECT 1 FROM machine_due d
      WHERE d.machine_id = h.machine_id AND d.lane = 'access' AND h.fence > d.fence - $3::INT8))
