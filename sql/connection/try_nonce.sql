-- Take an advisory lock for the rest of the transaction, unless another session of the same server and database has it.
SELECT pg_try_advisory_xact_lock($1) AS "is_free!"
