-- Count the recent boots that agents reported and that no step of the shepherd ordered.
SELECT recent_boots.machine_id AS "machine_id!", recent_boots.first_boot_at AS "first_boot_at!",
       GREATEST(recent_boots.boots - (SELECT count(*) FROM intent i
                               WHERE i.machine_id = recent_boots.machine_id AND i.kind IN ('reboot', 'power-cycle')
                                 AND i.begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond'), 0)
           AS "boots!"
FROM (
    SELECT machine_id, count(*) AS boots, min(at) AS first_boot_at
    FROM history
    WHERE at > clock_timestamp() - $1 * INTERVAL '1 millisecond' AND event = 'Booted'
    GROUP BY machine_id) recent_boots
