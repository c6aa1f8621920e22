-- Machines whose work a person puts before or behind that of the others. A fact like the others, and shown with
-- them. One whose time is over counts no more, and is replaced by the next one; whoever is neither before nor
-- behind has no row.
CREATE TABLE machine_priority (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    level      TEXT NOT NULL CHECK (level IN ('urgent', 'low')),
    reason     TEXT NOT NULL,
    set_by     TEXT NOT NULL,
    since      TIMESTAMPTZ NOT NULL,
    until      TIMESTAMPTZ
);
