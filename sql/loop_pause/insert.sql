-- No row comes back when somebody paused the same meanwhile: then all of this is done anew, and finds that.
INSERT INTO loop_pause (loop_name, provider, reason, paused_by, since, until)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (loop_name, provider) DO NOTHING
RETURNING since
