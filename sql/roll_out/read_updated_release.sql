-- The release that a machine was asked to become and did, if its agent says that it still runs.
SELECT sha256 FROM machine_release_report WHERE machine_id = $1 AND became = sha256
