UPDATE sealed_secret SET name = $2 WHERE name = $1
