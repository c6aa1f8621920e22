-- Read settings of this session, as the server writes them. One that the server does not know has no value.
SELECT n.name AS "name!", current_setting(n.name, TRUE) AS "value?"
FROM unnest($1::TEXT[]) n (name)
