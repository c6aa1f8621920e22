-- Find a roll-out of this release that is under way.
SELECT roll_out_id FROM roll_out WHERE ended_at IS NULL AND sha256 = $1 LIMIT 1
