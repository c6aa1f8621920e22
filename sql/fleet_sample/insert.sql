-- Insert the sample of a minute. The first sample of a minute stays.
INSERT INTO fleet_sample (minute, taken_at, took_ms, counts) VALUES ($1, $2, $3, $4)
ON CONFLICT (minute) DO NOTHING
