-- What operators order beyond one machine's hold: loops that are paused.

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
