SELECT sealed FROM sealed_secret WHERE name = $1
