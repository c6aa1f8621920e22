-- What operators order beyond one machine: loops that are paused, labels, and orders about many.

-- Loops that people paused: of one provider, or `*` for all. A pause whose time is over counts no more, and is
-- replaced by the next one.
CREATE TABLE loop_pause (
    loop_name TEXT NOT NULL,
    provider  TEXT NOT NULL,
    reason    TEXT NOT NULL,
    paused_by TEXT NOT NULL,
    since     TIMESTAMPTZ NOT NULL,
    until     TIMESTAMPTZ,
    PRIMARY KEY (loop_name, provider)
);

-- What people say of a machine, key by key. A fact like the others, and shown with them.
CREATE TABLE machine_labels (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    labels     JSONB NOT NULL
);

-- Whoever orders something about many machines counts under this lock what was ordered within the hour.
INSERT INTO named_lease (kind, name, fence) VALUES ('budget', 'orders', 0);
