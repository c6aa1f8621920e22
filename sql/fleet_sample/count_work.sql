-- Work under way: a row per worker at the most.
SELECT process, count(*) AS "count!" FROM work GROUP BY process
