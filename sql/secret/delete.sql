DELETE FROM sealed_secret WHERE name = $1
