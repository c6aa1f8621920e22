-- Insert the pause of a loop and provider. No row is returned when the same pause was inserted meanwhile. The
-- caller then repeats the whole transaction, which finds that pause.
INSERT INTO loop_pause (loop_name, provider, reason, paused_by, since, until)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (loop_name, provider) DO NOTHING
RETURNING since
