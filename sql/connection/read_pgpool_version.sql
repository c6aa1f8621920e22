SHOW pool_version
