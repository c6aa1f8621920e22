-- Count the machines of each roll-out by state.
SELECT roll_out_id, state, count(*) AS "count!" FROM roll_out_machine
WHERE $1::TEXT IS NULL OR roll_out_id = $1
GROUP BY roll_out_id, state
