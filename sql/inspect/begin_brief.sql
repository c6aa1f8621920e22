-- As begin.sql, for whoever asks over the network: with the limit on the whole transaction, a snapshot is held
-- for five seconds at the most.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL statement_timeout = '2500ms'
