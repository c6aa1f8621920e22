-- What a person ordered of a machine's power, until it is done or given up: to reboot it, to switch it on, off, or off and
-- on. The intent is recorded before anything is sent, and is the same however often it must be sent.
CREATE TABLE machine_power_order (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    switch     TEXT NOT NULL CHECK (switch IN ('reboot', 'on', 'off', 'cycle')),
    reason     TEXT NOT NULL,
    ordered_by TEXT NOT NULL,
    ordered_at TIMESTAMPTZ NOT NULL,
    intent_id  UUID,
    begun_at   TIMESTAMPTZ
);
