CREATE TABLE IF NOT EXISTS migration_lock (
    singleton BOOL PRIMARY KEY,
    holder    UUID NOT NULL,
    until     TIMESTAMPTZ NOT NULL
)
