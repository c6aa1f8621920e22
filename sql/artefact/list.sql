-- List the artefacts: complete ones first, newest first, then unfinished uploads with the number of their
-- stored pieces.
SELECT a.sha256, a.size, a.begun_at, a.name, a.added_at, a.added_by, a.kubernetes, a.signature,
       CASE WHEN a.added_at IS NULL
            THEN (SELECT count(*) FROM artefact_chunk c WHERE c.sha256 = a.sha256)
       END AS pieces
FROM artefact a
ORDER BY a.added_at DESC NULLS LAST, a.begun_at DESC, a.sha256
