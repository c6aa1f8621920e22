-- Count the work under way by process. The table `work` has at most one row per worker.
SELECT process, count(*) AS "count!" FROM work GROUP BY process
