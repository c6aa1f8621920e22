-- List the machines that need a person because they had seen newer fences than this database had issued.
SELECT machine_id FROM machine_needs_human WHERE obstacle = 'stale-fence' ORDER BY machine_id
