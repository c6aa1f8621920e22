-- One moment for everything that a command shows, no locks, and no patience with a busy database.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL statement_timeout = '5s'
