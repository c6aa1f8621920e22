-- A location in a selector is a prefix only if it ends in a star. Until now each location was one, so each stored location gets
-- a star. What else the language of selectors reads in another way now is written so that it means the same: a star within a
-- value, and a comma that belongs to a value without quotes, get a backslash, and other white space than blanks becomes a blank.
--
-- A selector is read character by character. `state` is what the next character belongs to: a key, the beginning of a value
-- after the equals sign, a value without quotes, a value in quotes, or what follows the quotes. A comma ends a value without
-- quotes if another term follows, or nothing. Selectors of upgrades ("cluster ams") have no value and stay as they are.
WITH RECURSIVE stored AS (
    SELECT selector, translate(selector, chr(9) || chr(10) || chr(11) || chr(12) || chr(13), '     ') AS source
    FROM (SELECT selector FROM cluster UNION SELECT selector FROM roll_out) s
),
scan (selector, source, place, state, escaped, key, converted) AS (
    SELECT selector, source, 1, 'key', FALSE, '', ''
    FROM stored
    UNION ALL
    SELECT selector, source, place + 1,
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
           CASE WHEN ends AND state = 'plain' AND btrim(key) = 'location' THEN rtrim(converted) || '*,'
                WHEN state = 'quoted' AND c = '"' AND NOT escaped AND btrim(key) = 'location' THEN converted || '*"'
                WHEN state IN ('begin', 'plain', 'quoted') AND c = '*' THEN converted || CASE WHEN escaped THEN '\\*' ELSE '\*' END
                WHEN state IN ('begin', 'plain') AND c = ',' AND NOT escaped AND NOT ends THEN converted || '\,'
                ELSE converted || c END
    FROM (
        SELECT *, state IN ('begin', 'plain') AND c = ',' AND NOT escaped
                  AND rest ~ '^ *($|,|label\.|[A-Za-z0-9_./-]+ *(=|>=))' AS ends
        FROM (
            SELECT *, substr(source, place, 1) AS c, substr(source, place + 1) AS rest
            FROM scan
            WHERE place <= length(source)
        ) r
    ) n
),
converted_selector AS (
    SELECT selector,
           CASE WHEN state = 'plain' AND btrim(key) = 'location'
                THEN converted || CASE WHEN escaped THEN '\*' ELSE '*' END
                ELSE converted END AS converted
    FROM scan
    WHERE place > length(source)
),
updated_cluster AS (
    UPDATE cluster SET selector = v.converted FROM converted_selector v
    WHERE v.selector = cluster.selector AND v.converted <> cluster.selector
    RETURNING cluster_id
)
UPDATE roll_out SET selector = v.converted FROM converted_selector v
WHERE v.selector = roll_out.selector AND v.converted <> roll_out.selector;
