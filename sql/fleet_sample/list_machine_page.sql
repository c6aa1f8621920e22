-- List a page of machines for the sample of a minute, in the order of their ids and without locks. OFFSET 0
-- keeps the lookup of a machine's facts apart from the page, as in facts/read_page.sql.
SELECT m.machine_id AS "machine_id!", s.read_at AS "read_at!", s.phase_index AS "phase!", s.phase_since AS "phase_since!",
       s.deadline AS "deadline?",
       s.access_process AS "access_process?", s.access_ready_at AS "access_ready_at?",
       s.access_timer AS "access_timer!", s.access_leased AS "access_leased!",
       s.observe_process AS "observe_process?", s.observe_ready_at AS "observe_ready_at?",
       s.observe_timer AS "observe_timer!", s.observe_leased AS "observe_leased!",
       s.backoffs AS "backoffs!", s.provider AS "provider?", s.location AS "location?",
       s.agent_started AS "agent_started!", s.heartbeat_at AS "heartbeat_at?",
       s.requested_generation AS "requested_generation?", s.reported_generation AS "reported_generation?",
       s.succeeded AS "succeeded?", s.on_hold AS "on_hold!",
       s.memory_bytes AS "memory_bytes?", s.cpu_threads AS "cpu_threads?"
FROM (SELECT machine_id FROM machine WHERE machine_id > $1 ORDER BY machine_id LIMIT $2) m
CROSS JOIN LATERAL (
    SELECT clock_timestamp() AS read_at, a.phase_index, a.phase_since, a.deadline,
           a.process AS access_process, a.ready_at AS access_ready_at, a.timer AS access_timer,
           a.lease_session IS NOT NULL AS access_leased,
           o.process AS observe_process, o.ready_at AS observe_ready_at, o.timer AS observe_timer,
           o.lease_session IS NOT NULL AS observe_leased,
           ARRAY(SELECT b.process FROM work_backoff b WHERE b.machine_id = a.machine_id AND b.until > now())
               AS backoffs,
           p.provider, p.location, g.machine_id IS NOT NULL AS agent_started, h.at AS heartbeat_at,
           q.generation AS requested_generation, r.generation AS reported_generation, r.succeeded,
           k.machine_id IS NOT NULL AND (k.until IS NULL OR k.until > now()) AS on_hold,
           w.memory_bytes, w.cpu_threads
    FROM machine_due a
    JOIN machine_due o ON o.machine_id = a.machine_id AND o.lane = 'observe'
    LEFT JOIN machine_provided p ON p.machine_id = a.machine_id
    LEFT JOIN machine_agent_started g ON g.machine_id = a.machine_id
    LEFT JOIN machine_agent_heartbeat h ON h.machine_id = a.machine_id
    LEFT JOIN machine_os_installation_request q ON q.machine_id = a.machine_id
    LEFT JOIN machine_os_installation_report r ON r.machine_id = a.machine_id
    LEFT JOIN machine_hold k ON k.machine_id = a.machine_id
    LEFT JOIN machine_hardware_report w ON w.machine_id = a.machine_id
    WHERE a.machine_id = m.machine_id AND a.lane = 'access' OFFSET 0) s
ORDER BY m.machine_id
