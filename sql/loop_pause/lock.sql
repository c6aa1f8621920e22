-- Lock the pause of a loop and provider, expired or not.
SELECT reason, paused_by, since, until, until IS NULL OR until > clock_timestamp() AS "holds!"
FROM loop_pause
WHERE loop_name = $1 AND provider = $2
FOR UPDATE
