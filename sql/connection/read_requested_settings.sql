-- Read the settings that connections request by their options, as the server writes them.
SELECT name, current_setting(name)
FROM pg_settings
WHERE name IN (
    'default_transaction_isolation', 'idle_in_transaction_session_timeout', 'statement_timeout', 'lock_timeout', 'TimeZone',
    'client_encoding', 'standard_conforming_strings', 'search_path'
)
