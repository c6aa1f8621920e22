-- The release that a machine was asked to become and did, if its agent says so.
SELECT r.sha256 FROM machine_release_report r
JOIN release_order o ON o.machine_id = r.machine_id AND o.sha256 = r.sha256 AND o.generation <= r.generation
WHERE r.machine_id = $1 AND r.error IS NULL
