-- What agents told lately: boots that no step of ours ordered, and fences that this database never gave.
SELECT told.machine_id AS "machine_id!", told.first_boot_at, told.fence_at, told.fence,
       GREATEST(told.boots - (SELECT count(*) FROM intent i
                               WHERE i.machine_id = told.machine_id AND i.kind IN ('reboot', 'power-cycle')
                                 AND i.begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond'), 0)
           AS "boots!"
FROM (
    SELECT h.machine_id,
           count(*) FILTER (WHERE h.event = 'Booted') AS boots,
           min(h.at) FILTER (WHERE h.event = 'Booted') AS first_boot_at,
           min(h.at) FILTER (WHERE h.event = 'NewerFence' AND h.fence > d.fence) AS fence_at,
           max(h.fence) FILTER (WHERE h.event = 'NewerFence' AND h.fence > d.fence) AS fence
    FROM history h
    JOIN machine_due d ON d.machine_id = h.machine_id AND d.lane = 'access'
    WHERE h.at > clock_timestamp() - $1 * INTERVAL '1 millisecond' AND h.event IN ('Booted', 'NewerFence')
    GROUP BY h.machine_id) told
