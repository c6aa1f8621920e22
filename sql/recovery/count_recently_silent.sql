-- Count the machines that fell silent within the brake's window, by provider: those that still are, and those
-- that a step has already brought back. Many machines that come back quickly are no less suspicious.
SELECT provider AS "provider!", count(*) AS "count!"
FROM (
    SELECT d.machine_id, d.provider
    FROM machine_due d
    LEFT JOIN machine_recovery r ON r.machine_id = d.machine_id
    WHERE d.lane = 'access' AND d.phase_index IN ('Silent', 'Recovering')
      AND COALESCE(r.started_at, d.phase_since) > clock_timestamp() - $1 * INTERVAL '1 millisecond'
    UNION
    SELECT i.machine_id, i.provider
    FROM intent i
    LEFT JOIN machine_recovery r ON r.machine_id = i.machine_id
    WHERE (r.started_at IS NULL OR r.started_at > clock_timestamp() - $1 * INTERVAL '1 millisecond')
      AND i.kind IN ('restart-agent', 'reboot', 'power-cycle')
      AND i.begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond') recently_silent
GROUP BY provider
