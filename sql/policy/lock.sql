SELECT version, document FROM policy FOR UPDATE
