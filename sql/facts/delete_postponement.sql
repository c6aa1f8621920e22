DELETE FROM work_postponed WHERE machine_id = $1 AND process = $2
