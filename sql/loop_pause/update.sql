UPDATE loop_pause SET reason = $3, paused_by = $4, since = $5, until = $6 WHERE loop_name = $1 AND provider = $2
