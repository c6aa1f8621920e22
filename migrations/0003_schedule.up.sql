-- The schedule: eligibility as data. See src/model/schedule.rs for who decides what stands here.

-- The schedule columns are always next_due(facts, lane, policy, now); the lease columns change in
-- claim, finish, fail, cancel and reap alone.
CREATE TABLE machine_due (
    machine_id    UUID NOT NULL REFERENCES machine (machine_id),
    lane          TEXT NOT NULL CHECK (lane IN ('access', 'observe')),
    process       TEXT,
    provider      TEXT NOT NULL,
    priority      INT8 NOT NULL CHECK (priority BETWEEN 0 AND 2),
    bucket        INT8 NOT NULL CHECK (bucket >= 0),
    ready_at      TIMESTAMPTZ,
    timer         BOOL NOT NULL,
    reason        TEXT NOT NULL,
    decided_at    TEXT NOT NULL,
    deadline      TIMESTAMPTZ,
    phase_index   TEXT NOT NULL,
    phase_since   TIMESTAMPTZ NOT NULL,
    rules_version INT8 NOT NULL,
    policy_version INT8 NOT NULL,
    version       INT8 NOT NULL,
    lease_session UUID,
    fence         INT8 NOT NULL,
    losses        INT8 NOT NULL,
    not_before    TIMESTAMPTZ,
    PRIMARY KEY (machine_id, lane),
    CHECK ((process IS NULL) = (ready_at IS NULL))
);

-- One probe: is anything due, and when next.
CREATE INDEX machine_due_next ON machine_due (process, ready_at)
    WHERE lease_session IS NULL AND process IS NOT NULL;
-- Claiming.
CREATE INDEX machine_due_claim ON machine_due (process, provider, priority, bucket, ready_at)
    WHERE lease_session IS NULL AND process IS NOT NULL;
-- Timers that came due, to be re-armed before anybody may claim them.
CREATE INDEX machine_due_timer ON machine_due (ready_at) WHERE timer AND lease_session IS NULL;
-- Lists and counts by phase.
CREATE INDEX machine_due_phase ON machine_due (phase_index, provider, machine_id) WHERE lane = 'access';

-- Live locks.
CREATE TABLE work (
    machine_id UUID NOT NULL,
    lane       TEXT NOT NULL,
    session_id UUID NOT NULL,
    process    TEXT NOT NULL,
    fence      INT8 NOT NULL,
    started_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (machine_id, lane)
);
CREATE INDEX work_by_session ON work (session_id);

-- What happened. Inserted into and, after the retention time, deleted from; never updated.
-- `edge` marks the rows that begin and end a work item: at most one of each per fence.
CREATE TABLE history (
    machine_id UUID NOT NULL,
    at         TIMESTAMPTZ NOT NULL,
    event      TEXT NOT NULL,
    edge       TEXT CHECK (edge IN ('start', 'end')),
    lane       TEXT,
    fence      INT8,
    process    TEXT,
    session_id UUID,
    detail     TEXT,
    CHECK (edge IS NULL OR (lane IS NOT NULL AND fence IS NOT NULL AND process IS NOT NULL))
);
CREATE UNIQUE INDEX history_edges ON history (machine_id, lane, fence, edge) WHERE edge IS NOT NULL;
CREATE INDEX history_by_time ON history (machine_id, at);

-- Outward actions, recorded before they are taken.
CREATE TABLE intent (
    intent_id  UUID PRIMARY KEY,
    kind       TEXT NOT NULL,
    provider   TEXT NOT NULL,
    machine_id UUID,
    session_id UUID NOT NULL,
    fence      INT8 NOT NULL,
    detail     TEXT NOT NULL,
    begun_at   TIMESTAMPTZ NOT NULL,
    settled_at TIMESTAMPTZ,
    outcome    TEXT
);
CREATE INDEX intent_by_kind ON intent (kind, begun_at);
CREATE INDEX intent_open ON intent (provider, kind, begun_at) WHERE settled_at IS NULL;
CREATE INDEX intent_by_machine ON intent (machine_id, begun_at);

-- Brakes that are on, for people; the decision is derived anew each time.
CREATE TABLE brake (
    kind       TEXT NOT NULL,
    scope      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    engaged_at TIMESTAMPTZ NOT NULL,
    seen_at    TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (kind, scope)
);

-- Everything a decision about one machine looks at, except the clock and who listens: a view would
-- freeze which now() it means, and tests move time.
CREATE VIEW machine_snapshot AS
SELECT
    m.machine_id,
    m.created_at,
    p.provider, p.provider_id, p.reservation, p.address, p.ssh_port, p.ssh_user, p.location,
    p.status, p.provided_at, p.looked_at, p.unchanged,
    a.started_at AS agent_started_at, a.public_key AS agent_public_key, a.boot_id AS agent_boot_id,
    a.fence AS agent_fence,
    h.at AS heartbeat_at, h.boot_id AS heartbeat_boot_id, h.incarnation AS heartbeat_incarnation,
    h.sequence AS heartbeat_sequence,
    q.generation AS request_generation,
    r.generation AS report_generation, r.succeeded AS report_succeeded,
    o.scope AS hold_scope, o.reason AS hold_reason, o.held_by AS hold_by, o.until AS hold_until,
    u.since AS quarantine_since, u.reason AS quarantine_reason,
    n.since AS needs_human_since, n.reason AS needs_human_reason,
    c.started_at AS recovery_started_at, c.rung AS recovery_rung, c.tries AS recovery_tries,
    c.step AS recovery_step, c.acted_at AS recovery_acted_at, c.deadline AS recovery_deadline,
    c.boot_id_before AS recovery_boot_id_before, c.next_at AS recovery_next_at, c.note AS recovery_note,
    t.reason AS retirement_reason, t.requested_at AS retirement_requested_at,
    t.finished_at AS retirement_finished_at,
    (SELECT jsonb_agg(jsonb_build_object('process', b.process, 'failures', b.failures,
            'last_interval_ms', b.last_interval_ms, 'until', b.until, 'cause', b.cause))
       FROM work_backoff b WHERE b.machine_id = m.machine_id) AS backoffs,
    (SELECT jsonb_agg(jsonb_build_object('process', w.process, 'until', w.until, 'reason', w.reason,
            'decided_at', w.decided_at))
       FROM work_postponed w WHERE w.machine_id = m.machine_id) AS postponements
FROM machine m
LEFT JOIN machine_provided p ON p.machine_id = m.machine_id
LEFT JOIN machine_agent_started a ON a.machine_id = m.machine_id
LEFT JOIN machine_agent_heartbeat h ON h.machine_id = m.machine_id
LEFT JOIN machine_os_installation_request q ON q.machine_id = m.machine_id
LEFT JOIN machine_os_installation_report r ON r.machine_id = m.machine_id
LEFT JOIN machine_hold o ON o.machine_id = m.machine_id
LEFT JOIN machine_quarantine u ON u.machine_id = m.machine_id
LEFT JOIN machine_needs_human n ON n.machine_id = m.machine_id
LEFT JOIN machine_recovery c ON c.machine_id = m.machine_id
LEFT JOIN machine_retirement t ON t.machine_id = m.machine_id;
