-- Delete the oldest history rows: as many as a batch allows, and those of the same moment as the last.
-- History has no key that identifies a row, so they are found by time. Both ends are given because the
-- planner takes a range with two ends for a small one, and uses the index.
--
-- A NewerFence row is retained until fences are raised beyond it, because until then it blocks orders. Each
-- machine has at most one such row.
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
