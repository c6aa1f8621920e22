-- Lock an artefact, so that no other transaction starts, completes or deletes it until this one ends.
SELECT size, upload, name, added_at, added_by, signature FROM artefact WHERE sha256 = $1 FOR UPDATE
