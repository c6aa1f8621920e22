-- Machines left to a person because they had seen newer leases than this database gave out.
SELECT machine_id FROM machine_needs_human WHERE obstacle = 'stale-fence' ORDER BY machine_id
