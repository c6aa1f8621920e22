-- Read the isolation level in force on this connection. It is requested as a connection option, which a
-- pooler may drop and a server may replace by another level.
SELECT current_setting('transaction_isolation') AS "isolation!"
