-- Make a transaction read-only as begin_read_only.sql does, for requests over the network. The limits on one
-- statement and on an idle client are half of the five seconds for which a snapshot may be open (look.rs).
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL statement_timeout = '2500ms';
SET LOCAL idle_in_transaction_session_timeout = '2500ms'
