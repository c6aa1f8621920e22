-- What an admin ordered of the signing keys that a machine has pinned: the next takeover before `expires_at` replaces them by
-- these, the lines of public keys with line breaks between them. The takeover deletes the row, and another order replaces it.
CREATE TABLE machine_key_replacement (
    machine_id UUID PRIMARY KEY REFERENCES machine (machine_id),
    keys       TEXT NOT NULL,
    reason     TEXT NOT NULL,
    ordered_by TEXT NOT NULL,
    ordered_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
);
