ALTER TABLE machine_release_report DROP COLUMN became;
