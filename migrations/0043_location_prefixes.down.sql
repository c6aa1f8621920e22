-- The release before takes each location for a prefix and no star for one, so a star after a location goes, and so does the
-- backslash before any other star. A location without a star becomes a prefix, and what that release does not know (other
-- operators, other prefixes) stays as it is: it reports such a selector as invalid. The states are those of the way forward.
WITH RECURSIVE scan (selector, place, state, escaped, key, converted) AS (
    SELECT selector, 1, 'key', FALSE, '', ''
    FROM (SELECT selector FROM cluster UNION SELECT selector FROM roll_out) s
    UNION ALL
    SELECT selector, place + 1,
           CASE WHEN state = 'key' AND c = '=' THEN 'begin'
                WHEN state = 'begin' AND c = '"' THEN 'quoted'
                WHEN state = 'begin' AND c = ' ' THEN 'begin'
                WHEN ends THEN 'key'
                WHEN state = 'begin' THEN 'plain'
                WHEN state = 'quoted' AND c = '"' AND NOT escaped THEN 'after'
                WHEN state = 'after' AND c = ',' THEN 'key'
                ELSE state END,
           state IN ('begin', 'plain', 'quoted') AND c = '\' AND NOT escaped,
           CASE WHEN ends OR c = ',' AND state IN ('key', 'after') THEN ''
                WHEN state = 'key' AND c <> '=' THEN key || c
                ELSE key END,
           CASE WHEN state IN ('begin', 'plain', 'quoted') AND c = '*' AND escaped
                THEN substr(converted, 1, length(converted) - 1) || '*'
                WHEN state IN ('begin', 'plain', 'quoted') AND c = '*' AND btrim(key) = 'location' THEN converted
                ELSE converted || c END
    FROM (
        SELECT *, state IN ('begin', 'plain') AND c = ',' AND NOT escaped
                  AND rest ~ '^([^ ]|$| +($|[,!]|label\.|[^,=!<>()" ]+ *(=|!=|>=)))' AS ends
        FROM (
            SELECT *, substr(selector, place, 1) AS c, substr(selector, place + 1) AS rest
            FROM scan
            WHERE place <= length(selector)
        ) r
    ) n
),
converted_selector AS (
    SELECT selector, converted FROM scan WHERE place > length(selector)
),
updated_cluster AS (
    UPDATE cluster SET selector = v.converted FROM converted_selector v
    WHERE v.selector = cluster.selector AND v.converted <> cluster.selector
    RETURNING cluster_id
)
UPDATE roll_out SET selector = v.converted FROM converted_selector v
WHERE v.selector = roll_out.selector AND v.converted <> roll_out.selector;
