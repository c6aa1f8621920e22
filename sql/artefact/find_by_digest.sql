SELECT size, upload, name, added_at, added_by FROM artefact WHERE sha256 = $1
