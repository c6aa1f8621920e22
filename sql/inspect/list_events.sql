-- List when history rows were written within a range of time, and for which machines. A row has the time at
-- which it is written, and is visible only once its transaction commits. A client that follows history
-- therefore reads the last seconds again.
SELECT h.machine_id, h.at FROM history h
WHERE h.at > $1 AND h.at <= $2
ORDER BY h.at
LIMIT $3
