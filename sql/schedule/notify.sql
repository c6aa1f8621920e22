SELECT pg_notify('shepherd_due', $1)
