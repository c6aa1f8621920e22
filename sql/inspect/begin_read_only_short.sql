-- As begin.sql, for whoever asks over the network: the limits on one statement and on a client that says nothing
-- are half of the five seconds for which a snapshot is to be held (look.rs).
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL statement_timeout = '2500ms';
SET LOCAL idle_in_transaction_session_timeout = '2500ms'
