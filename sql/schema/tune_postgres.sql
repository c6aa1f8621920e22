-- Set storage parameters that only PostgreSQL has, after the migrations. Only the cost of statements depends
-- on them, not their results.
ALTER TABLE session SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE machine_agent_heartbeat SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE machine_due SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE work SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE fleet_listening SET (fillfactor = 10);
-- Only a small part of these tables is deleted each day, and vacuum must not wait until a fifth is dead.
ALTER TABLE history SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE intent SET (autovacuum_vacuum_scale_factor = 0.01);
