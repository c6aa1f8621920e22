SELECT version, document FROM policy
