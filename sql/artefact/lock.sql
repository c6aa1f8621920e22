-- Nobody else begins, ends or removes it until this transaction ends.
SELECT size, upload, name, added_at, added_by FROM artefact WHERE sha256 = $1 FOR UPDATE
