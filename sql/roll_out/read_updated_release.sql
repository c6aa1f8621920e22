-- Read the release that a machine was updated to by an order, if its agent reports that it still runs it.
SELECT sha256 FROM machine_release_report WHERE machine_id = $1 AND updated_to = sha256
