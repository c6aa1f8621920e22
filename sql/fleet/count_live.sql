SELECT (SELECT count(*) FROM work) AS "work!",
       (SELECT count(*) FROM session WHERE closed_at IS NULL) AS "sessions!"
