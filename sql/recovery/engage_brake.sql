INSERT INTO brake (kind, scope, reason, engaged_at, seen_at)
VALUES ('recovery', $1, $2, clock_timestamp(), clock_timestamp())
ON CONFLICT (kind, scope) DO UPDATE SET reason = EXCLUDED.reason, seen_at = EXCLUDED.seen_at
