SELECT kind, scope, reason, engaged_at, seen_at AS confirmed_at FROM brake ORDER BY kind, scope
