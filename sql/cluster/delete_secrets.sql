DELETE FROM sealed_secret WHERE name = $1 OR starts_with(name, $1 || '/')
