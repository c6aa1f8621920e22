ALTER TABLE machine_agent_started DROP COLUMN placement;
ALTER TABLE machine_release_report DROP COLUMN findings;
