-- Make a transaction read-only: one snapshot for everything that a command shows, no locks, and a short
-- statement timeout in case the database is busy.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL statement_timeout = '5s'
