-- How many there are, and how many of them are not whole.
SELECT count(*) AS "artefacts!", count(*) FILTER (WHERE added_at IS NULL) AS "begun!" FROM artefact
