-- Storage settings that only PostgreSQL knows; applied after migrating, and nothing depends on them
-- being right: only how much a statement costs does.
ALTER TABLE session SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE machine_agent_heartbeat SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE machine_due SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE work SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE fleet_listening SET (fillfactor = 10);
-- What is deleted from these is a small part of them each day, and must not wait for a fifth to be dead.
ALTER TABLE history SET (autovacuum_vacuum_scale_factor = 0.01);
ALTER TABLE intent SET (autovacuum_vacuum_scale_factor = 0.01);
