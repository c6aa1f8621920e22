UPDATE release_order SET withdrawn = TRUE WHERE NOT withdrawn
