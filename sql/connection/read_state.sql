-- Read whether transactions of this session are read-only, and the level of their isolation.
SELECT current_setting('transaction_read_only'), current_setting('transaction_isolation')
