-- Count the artefacts, and those of them whose upload is not complete.
SELECT count(*) AS "artefacts!", count(*) FILTER (WHERE added_at IS NULL) AS "begun!" FROM artefact
