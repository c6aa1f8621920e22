DELETE FROM loop_pause WHERE loop_name = $1 AND provider = $2
