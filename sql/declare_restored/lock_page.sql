SELECT machine_id, lane FROM machine_due WHERE machine_id = ANY ($1) ORDER BY machine_id, lane FOR UPDATE
